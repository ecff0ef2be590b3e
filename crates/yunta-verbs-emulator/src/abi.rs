//! The symbols of the library, and the objects behind its pointers.
//!
//! Each object begins with the structure that the header shows, and goes on with its own part.
//! Callers keep the rules of verbs: what they pass is live, and was made here.
#![allow(clippy::missing_safety_doc, missing_docs, unreachable_pub)]

use std::ffi::{c_char, c_int, c_void};
use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::ptr;
use std::sync::{Arc, Mutex};

use yunta_comm::verbs::sys::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE,
    IBV_LINK_LAYER_ETHERNET, IBV_MTU_1024, IBV_PORT_ACTIVE, IBV_QP_ACCESS_FLAGS, IBV_QP_AV,
    IBV_QP_DEST_QPN, IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN,
    IBV_QP_STATE, IBV_QPS_INIT, IBV_QPS_RESET, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPT_RC, IBV_QPT_UC,
    IBV_SEND_SIGNALED, IBV_WR_SEND, ibv_context, ibv_context_ops, ibv_cq, ibv_device, ibv_gid,
    ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr,
    ibv_sge, ibv_wc,
};

use crate::queue::{Completions, Queue, lock};
use crate::{Config, Device};

const PORT_DOWN: c_int = 1;
/// Where the interface's own address stands; before it is the link-local one, as on Apple's.
const GID_INDEX: c_int = 1;

#[repr(C)]
struct EmulatedDevice {
    device: ibv_device,
    folder: PathBuf,
    config: Config,
    own: Device,
}

#[repr(C)]
struct EmulatedContext {
    context: ibv_context,
    folder: PathBuf,
    config: Config,
    own: Device,
    /// Registered memory: key, start, length.
    regions: Mutex<Vec<(u32, u64, u64)>>,
}

#[repr(C)]
struct EmulatedCq {
    cq: ibv_cq,
    completions: Arc<Completions>,
}

#[repr(C)]
struct EmulatedQp {
    qp: ibv_qp,
    queue: Queue,
}

fn fail(errno: c_int) {
    // SAFETY: the address of this thread's own variable.
    unsafe { *libc::__errno_location() = errno };
}

fn null<T>(errno: c_int) -> *mut T {
    fail(errno);
    ptr::null_mut()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let (folder, config) = Config::load()
        .unwrap_or_else(|| (PathBuf::new(), Config { devices: Vec::new(), ..Config::default() }));
    if config.fails("ibv_get_device_list") {
        return null(libc::ENOSYS);
    }
    let mut list: Vec<*mut ibv_device> = Vec::new();
    for own in &config.devices {
        let mut name = [0; 64];
        for (to, from) in name.iter_mut().take(63).zip(own.name.bytes()) {
            *to = from as c_char;
        }
        let device = ibv_device {
            ops: [None; 2],
            node_type: 1,
            transport_type: 0,
            name,
            dev_name: [0; 64],
            dev_path: [0; 256],
            ibdev_path: [0; 256],
        };
        let (folder, config, own) = (folder.clone(), config.clone(), own.clone());
        list.push(Box::into_raw(Box::new(EmulatedDevice { device, folder, config, own })).cast());
    }
    if !count.is_null() {
        // SAFETY: the caller's variable.
        unsafe { *count = c_int::try_from(list.len()).unwrap_or(c_int::MAX) };
    }
    list.push(ptr::null_mut());
    Box::into_raw(list.into_boxed_slice()).cast()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    let mut length = 0;
    // SAFETY: the list ends with a null pointer; its devices were boxed above.
    unsafe {
        while !(*list.add(length)).is_null() {
            drop(Box::from_raw((*list.add(length)).cast::<EmulatedDevice>()));
            length += 1;
        }
        drop(Box::from_raw(ptr::slice_from_raw_parts_mut(list, length + 1)));
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: a live device.
    unsafe { (&raw const (*device).name).cast() }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    // SAFETY: a device of this library.
    let device = unsafe { &*device.cast::<EmulatedDevice>() };
    if device.config.fails("ibv_open_device") {
        return null(libc::ENODEV);
    }
    let ops = ibv_context_ops {
        poll_cq: Some(poll_cq),
        post_send: Some(post_send),
        post_recv: Some(post_recv),
        ..ibv_context_ops::default()
    };
    let context =
        ibv_context { device: ptr::null_mut(), ops, cmd_fd: -1, async_fd: -1, num_comp_vectors: 1 };
    let context = EmulatedContext {
        context,
        folder: device.folder.clone(),
        config: device.config.clone(),
        own: device.own.clone(),
        regions: Mutex::new(Vec::new()),
    };
    Box::into_raw(Box::new(context)).cast()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: boxed above.
    drop(unsafe { Box::from_raw(context.cast::<EmulatedContext>()) });
    0
}

unsafe fn context<'c>(context: *mut ibv_context) -> &'c EmulatedContext {
    // SAFETY: a context of this library, live while it is used.
    unsafe { &*context.cast() }
}

impl EmulatedContext {
    fn is_down(&self) -> bool {
        self.config.ports_down.contains(&self.own.name)
    }

    /// Whether a part of memory lies in a region.
    fn holds(&self, part: &ibv_sge) -> bool {
        lock(&self.regions).iter().any(|(key, start, length)| {
            let offset = part.addr.checked_sub(*start);
            *key == part.lkey && offset.is_some_and(|o| o + u64::from(part.length) <= *length)
        })
    }

    /// The device that has an address, and that a cable leads to.
    fn beyond(&self, gid: ibv_gid) -> Result<&Device, c_int> {
        let c = &self.config;
        let there = c.devices.iter().find(|d| gid_of(d) == gid).ok_or(libc::EINVAL)?;
        let is_cabled = c.cables.is_empty()
            || there.name == self.own.name
            || c.cables
                .iter()
                .any(|(a, b)| [(a, b), (b, a)].contains(&(&self.own.name, &there.name)));
        if is_cabled { Ok(there) } else { Err(libc::ETIMEDOUT) }
    }
}

fn gid_of(device: &Device) -> ibv_gid {
    ibv_gid(match device.address {
        std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        std::net::IpAddr::V6(v6) => v6.octets(),
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port(
    of: *mut ibv_context,
    port: u8,
    attributes: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: the caller's, live.
    let (context, attributes) = unsafe { (context(of), &mut *attributes) };
    if port != 1 || context.config.fails("ibv_query_port") {
        return libc::EINVAL;
    }
    attributes.state = if context.is_down() { PORT_DOWN } else { IBV_PORT_ACTIVE };
    (attributes.max_mtu, attributes.active_mtu) = (IBV_MTU_1024, IBV_MTU_1024);
    attributes.gid_tbl_len = 4;
    attributes.link_layer = IBV_LINK_LAYER_ETHERNET;
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid(
    of: *mut ibv_context,
    port: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    // SAFETY: the caller's, live.
    let (context, gid) = unsafe { (context(of), &mut *gid) };
    *gid = match index {
        _ if port != 1 => return -1,
        0 => ibv_gid(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 7).octets()),
        GID_INDEX => gid_of(&context.own),
        2..4 => ibv_gid::default(),
        _ => return -1,
    };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_alloc_pd(of: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: the caller's, live.
    let context = unsafe { context(of) };
    if context.is_down() || context.config.fails("ibv_alloc_pd") {
        return null(libc::ENODEV);
    }
    Box::into_raw(Box::new(ibv_pd { context: of, handle: 0 }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: boxed above.
    drop(unsafe { Box::from_raw(pd) });
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: the caller's, live.
    let (of, context) = unsafe { ((*pd).context, context((*pd).context)) };
    if access != IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE {
        return null(libc::EINVAL);
    }
    if context.config.fails("ibv_reg_mr") {
        return null(libc::ENOMEM);
    }
    let mut regions = lock(&context.regions);
    let lkey = 0x100 + u32::try_from(regions.len()).unwrap_or_default();
    regions.push((lkey, addr as u64, length as u64));
    Box::into_raw(Box::new(ibv_mr { context: of, pd, addr, length, handle: 0, lkey, rkey: lkey }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: boxed above.
    let mr = unsafe { Box::from_raw(mr) };
    // SAFETY: of a context that lives longer.
    lock(&unsafe { context(mr.context) }.regions).retain(|(key, ..)| *key != mr.lkey);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_cq(
    of: *mut ibv_context,
    cqe: c_int,
    _cq_context: *mut c_void,
    _channel: *mut c_void,
    _comp_vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: the caller's, live.
    let context = unsafe { context(of) };
    if context.config.fails("ibv_create_cq") {
        return null(libc::ENOMEM);
    }
    let cq = ibv_cq {
        context: of,
        channel: ptr::null_mut(),
        cq_context: ptr::null_mut(),
        handle: 0,
        cqe,
    };
    let completions = Completions::new(usize::try_from(cqe).unwrap_or(0));
    Box::into_raw(Box::new(EmulatedCq { cq, completions })).cast()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: boxed above.
    drop(unsafe { Box::from_raw(cq.cast::<EmulatedCq>()) });
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_qp(
    pd: *mut ibv_pd,
    attributes: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    // SAFETY: the caller's, live.
    let (of, attributes) = unsafe { ((*pd).context, &*attributes) };
    // SAFETY: a live context.
    let context = unsafe { context(of) };
    let (kind, cap) = (attributes.qp_type, attributes.cap);
    if kind != IBV_QPT_UC && !(kind == IBV_QPT_RC && context.config.has_rc) {
        return null(libc::EOPNOTSUPP);
    }
    let is_too_deep = cap.max_send_wr.max(cap.max_recv_wr) > context.config.depth_max;
    if context.config.fails("ibv_create_qp") || is_too_deep || cap.max_send_sge != 1 {
        return null(libc::EINVAL);
    }
    // SAFETY: a completion queue of this library.
    let completions = Arc::clone(&unsafe { &*attributes.send_cq.cast::<EmulatedCq>() }.completions);
    let depth = cap.max_send_wr;
    let (folder, device) = (&context.folder, &context.own.name);
    match Queue::new(folder, device, &context.config, kind, depth, completions) {
        Ok(queue) => {
            let qp = ibv_qp {
                context: of,
                qp_context: attributes.qp_context,
                pd,
                send_cq: attributes.send_cq,
                recv_cq: attributes.recv_cq,
                srq: ptr::null_mut(),
                handle: 0,
                qp_num: queue.number(),
                state: IBV_QPS_RESET,
                qp_type: kind,
            };
            Box::into_raw(Box::new(EmulatedQp { qp, queue })).cast()
        }
        Err(e) => null(e.raw_os_error().unwrap_or(libc::EIO)),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: boxed above.
    drop(unsafe { Box::from_raw(qp.cast::<EmulatedQp>()) });
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_modify_qp(
    qp: *mut ibv_qp,
    attributes: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: the caller's, live.
    let (qp, to) = unsafe { (&mut *qp.cast::<EmulatedQp>(), &*attributes) };
    // SAFETY: of a context that lives longer.
    let context = unsafe { context(qp.qp.context) };
    let needed = match (qp.qp.state, to.qp_state) {
        (IBV_QPS_RESET, IBV_QPS_INIT) => IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        (IBV_QPS_INIT, IBV_QPS_RTR) => {
            IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN
        }
        (IBV_QPS_RTR, IBV_QPS_RTS) => IBV_QP_SQ_PSN,
        _ => return libc::EINVAL,
    };
    if mask & (needed | IBV_QP_STATE) != needed | IBV_QP_STATE {
        return libc::EINVAL;
    }
    if to.qp_state == IBV_QPS_RTR {
        let route = to.ah_attr.grh;
        if context.config.fails("ibv_modify_qp") || to.path_mtu > IBV_MTU_1024 {
            return libc::EINVAL;
        }
        // The link-local address leads nowhere.
        if to.ah_attr.is_global == 0 || c_int::from(route.sgid_index) != GID_INDEX {
            return libc::EINVAL;
        }
        let connected = match context.beyond(route.dgid) {
            Ok(there) => qp.queue.connect(&there.name, to.dest_qp_num),
            Err(errno) => return errno,
        };
        if connected.is_err() {
            return libc::ETIMEDOUT;
        }
    }
    qp.qp.state = to.qp_state;
    0
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, most: c_int, out: *mut ibv_wc) -> c_int {
    // SAFETY: a completion queue of this library, in use by one thread at a time.
    let completions = unsafe { &(*cq.cast::<EmulatedCq>()).completions };
    for n in 0..most {
        match completions.pop() {
            // SAFETY: the caller has room for `most`.
            Some(Some(completion)) => unsafe { *out.add(n.unsigned_abs() as usize) = completion },
            Some(None) => return n,
            None => return -1,
        }
    }
    most
}

/// The part of memory that a request names, if it is one and may be used.
unsafe fn part(qp: &EmulatedQp, list: *mut ibv_sge, count: c_int) -> Option<ibv_sge> {
    if count != 1 || list.is_null() || qp.qp.state != IBV_QPS_RTS {
        return None;
    }
    // SAFETY: a list of one.
    let part = unsafe { *list };
    // SAFETY: of a context that lives longer.
    unsafe { context(qp.qp.context) }.holds(&part).then_some(part)
}

unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    request: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the caller's, live.
    let (qp, wr) = unsafe { (&*qp.cast::<EmulatedQp>(), &*request) };
    // SAFETY: the request's own list.
    let part = unsafe { part(qp, wr.sg_list, wr.num_sge) };
    let is_plain =
        wr.opcode == IBV_WR_SEND && wr.next.is_null() && wr.send_flags == IBV_SEND_SIGNALED;
    let outcome = match part.filter(|_| is_plain) {
        // SAFETY: registered memory, which the caller leaves alone until the send completes.
        Some(part) => qp.queue.post_send(wr.wr_id, unsafe {
            std::slice::from_raw_parts(part.addr as *const u8, part.length as usize)
        }),
        None => Err(libc::EINVAL),
    };
    outcome.err().map_or(0, |errno| {
        // SAFETY: the caller's variable.
        unsafe { *bad = request };
        errno
    })
}

unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    request: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller's, live.
    let (qp, wr) = unsafe { (&*qp.cast::<EmulatedQp>(), &*request) };
    // SAFETY: the request's own list.
    let part = unsafe { part(qp, wr.sg_list, wr.num_sge) };
    let outcome = match part.filter(|_| wr.next.is_null()) {
        Some(part) => qp.queue.post_receive(wr.wr_id, part.addr, part.length as usize),
        None => Err(libc::EINVAL),
    };
    outcome.err().map_or(0, |errno| {
        // SAFETY: the caller's variable.
        unsafe { *bad = request };
        errno
    })
}
