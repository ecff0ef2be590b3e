//! A queue pair with all that belongs to it: one context, protection domain, completion queue and
//! registered slab per peer. Apple's devices allow 10 queue pairs and about 100 registrations: a
//! slab is one, whatever its size.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::destination::Destination;
use super::device::{self, PORT, Route};
use super::sys::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_QP_ACCESS_FLAGS,
    IBV_QP_AV, IBV_QP_DEST_QPN, IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC,
    IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_RETRY_CNT,
    IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QP_TIMEOUT, IBV_QPS_INIT,
    IBV_QPS_RTR, IBV_QPS_RTS, IBV_SEND_SIGNALED, IBV_WR_SEND, PollCq, PostRecv, PostSend,
    ibv_ah_attr, ibv_context, ibv_cq, ibv_global_route, ibv_mr, ibv_pd, ibv_qp, ibv_qp_attr,
    ibv_qp_cap, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_wc,
};
use super::{Library, QueueKind, VerbsError};

/// Apple's devices refuse regions that are not open to the peer as well.
const ACCESS: i32 = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
/// Memory is registered by pages; Apple's have 16 KiB.
const PAGE: usize = 16 << 10;

/// Memory that a device writes into: one slot per frame.
struct Slab {
    start: NonNull<u8>,
    layout: Layout,
}

impl Slab {
    fn new(bytes: usize) -> Option<Self> {
        let layout = Layout::from_size_align(bytes.max(1), PAGE).ok()?.pad_to_align();
        // SAFETY: the size is not 0.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).unwrap_or_else(|| handle_alloc_error(layout));
        Some(Self { start, layout })
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; no device knows it any more (see `QueuePair`).
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// The three calls of the context itself.
#[derive(Clone, Copy)]
struct Operations {
    poll_cq: PollCq,
    post_send: PostSend,
    post_recv: PostRecv,
}

/// A completed request: its slot, and for receives the bytes that came.
pub(super) struct Completion {
    pub(super) slot: usize,
    pub(super) bytes: usize,
}

/// Made step by step; what is made so far is undone in the order that devices demand.
pub(super) struct QueuePair {
    library: Arc<Library>,
    device: String,
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    cq: *mut ibv_cq,
    qp: *mut ibv_qp,
    mr: *mut ibv_mr,
    operations: Operations,
    slab: Option<Slab>,
    slots: usize,
    frame: usize,
}

// SAFETY: verbs objects may be used from any thread, by one at a time; `&mut self` sees to that.
unsafe impl Send for QueuePair {}

impl QueuePair {
    /// In state INIT, with `depth` slots of `frame` bytes for receives and as many for sends.
    pub(super) fn new(
        library: &Arc<Library>,
        route: &Route,
        kind: QueueKind,
        frame: usize,
        depth: usize,
    ) -> Result<Self, VerbsError> {
        let context = device::open(library, &route.device)?;
        // SAFETY: an open context, whose functions don't change.
        let ops = unsafe { &(*context.context).ops };
        let (Some(poll_cq), Some(post_send), Some(post_recv)) =
            (ops.poll_cq, ops.post_send, ops.post_recv)
        else {
            let missing = io::Error::from(io::ErrorKind::Unsupported);
            return Err(VerbsError::call("ibv_post_send", &route.device, missing));
        };
        let mut this = Self {
            library: Arc::clone(library),
            device: route.device.clone(),
            context: context.into_raw(),
            pd: ptr::null_mut(),
            cq: ptr::null_mut(),
            qp: ptr::null_mut(),
            mr: ptr::null_mut(),
            operations: Operations { poll_cq, post_send, post_recv },
            slab: None,
            slots: 2 * depth,
            frame,
        };
        this.make(kind, depth)?;
        this.initialise()?;
        Ok(this)
    }

    fn make(&mut self, kind: QueueKind, depth: usize) -> Result<(), VerbsError> {
        let queue = i32::try_from(self.slots).unwrap_or(i32::MAX);
        // SAFETY: an open context.
        self.pd = unsafe { (self.library.alloc_pd)(self.context) };
        self.made(self.pd.is_null(), "ibv_alloc_pd")?;
        let none = ptr::null_mut();
        // SAFETY: an open context; no completion channel.
        self.cq = unsafe { (self.library.create_cq)(self.context, queue, none, none, 0) };
        self.made(self.cq.is_null(), "ibv_create_cq")?;
        let depth = u32::try_from(depth).unwrap_or(u32::MAX);
        let mut attributes = ibv_qp_init_attr {
            qp_context: none,
            send_cq: self.cq,
            recv_cq: self.cq,
            srq: none,
            cap: ibv_qp_cap {
                max_send_wr: depth,
                max_recv_wr: depth,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: kind.code(),
            sq_sig_all: 0,
        };
        // SAFETY: domain and completion queue are of one context; the attributes outlive the call.
        self.qp = unsafe { (self.library.create_qp)(self.pd, &raw mut attributes) };
        self.made(self.qp.is_null(), "ibv_create_qp")?;
        let bytes = self.slots * self.frame;
        let slab = Slab::new(bytes).ok_or_else(|| {
            let e = io::Error::from(io::ErrorKind::OutOfMemory);
            VerbsError::call("ibv_reg_mr", &self.device, e)
        })?;
        let start = slab.start.as_ptr().cast();
        self.slab = Some(slab);
        // SAFETY: the slab lives until after the region is deregistered (see `drop`).
        self.mr = unsafe { (self.library.reg_mr)(self.pd, start, bytes, ACCESS) };
        self.made(self.mr.is_null(), "ibv_reg_mr")
    }

    fn made(&self, is_null: bool, call: &'static str) -> Result<(), VerbsError> {
        if is_null {
            return Err(VerbsError::call(call, &self.device, io::Error::last_os_error()));
        }
        Ok(())
    }

    fn modify(&mut self, mut attributes: ibv_qp_attr, mask: i32) -> Result<(), VerbsError> {
        // SAFETY: a live queue pair; the attributes outlive the call.
        let code = unsafe { (self.library.modify_qp)(self.qp, &raw mut attributes, mask) };
        if code == 0 {
            return Ok(());
        }
        let call = match attributes.qp_state {
            IBV_QPS_INIT => "ibv_modify_qp to INIT",
            IBV_QPS_RTR => "ibv_modify_qp to RTR",
            _ => "ibv_modify_qp to RTS",
        };
        Err(VerbsError::call(call, &self.device, code_error(code)))
    }

    fn initialise(&mut self) -> Result<(), VerbsError> {
        let attributes = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            port_num: PORT,
            qp_access_flags: ACCESS.unsigned_abs(),
            ..ibv_qp_attr::default()
        };
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        self.modify(attributes, mask)
    }

    /// The number that peers know it by.
    pub(super) fn number(&self) -> u32 {
        // SAFETY: a live queue pair; its number never changes.
        unsafe { (*self.qp).qp_num }
    }

    /// To states RTR and RTS: ready to talk to a peer.
    pub(super) fn connect(
        &mut self,
        route: &Route,
        own: &Destination,
        peer: &Destination,
    ) -> Result<(), VerbsError> {
        let is_reliable = own.kind == QueueKind::Reliable;
        let is_global = route.is_global && peer.is_global;
        let receive = ibv_qp_attr {
            qp_state: IBV_QPS_RTR,
            path_mtu: route.mtu.min(peer.mtu.into()).max(1),
            rq_psn: peer.psn,
            dest_qp_num: peer.number,
            ah_attr: ibv_ah_attr {
                grh: ibv_global_route {
                    dgid: peer.gid,
                    sgid_index: route.gid.index,
                    // Beyond one hop, RoCE may be routed; Thunderbolt never is.
                    hop_limit: if is_reliable { 64 } else { 1 },
                    ..ibv_global_route::default()
                },
                dlid: peer.lid,
                is_global: is_global.into(),
                port_num: PORT,
                ..ibv_ah_attr::default()
            },
            // A receive is always posted: waits for one are short.
            min_rnr_timer: 12,
            max_dest_rd_atomic: 1,
            ..ibv_qp_attr::default()
        };
        let mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
        let reliable = IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
        self.modify(receive, mask | if is_reliable { reliable } else { 0 })?;
        let send = ibv_qp_attr {
            qp_state: IBV_QPS_RTS,
            sq_psn: own.psn,
            // 4.096 us * 2^12: 17 ms, at most 7 times.
            timeout: 12,
            retry_cnt: 7,
            rnr_retry: 7,
            max_rd_atomic: 1,
            ..ibv_qp_attr::default()
        };
        let mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
        let reliable =
            IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(send, mask | if is_reliable { reliable } else { 0 })
    }

    /// Where a slot's frame lies.
    fn slot(&self, slot: usize) -> Option<NonNull<u8>> {
        let slab = self.slab.as_ref().filter(|_| slot < self.slots)?;
        // SAFETY: the slab has `slots` frames.
        Some(unsafe { slab.start.add(slot * self.frame) })
    }

    fn part(&self, slot: usize, bytes: usize) -> Option<ibv_sge> {
        let start = self.slot(slot).filter(|_| bytes <= self.frame)?;
        Some(ibv_sge {
            addr: start.as_ptr() as u64,
            length: u32::try_from(bytes).ok()?,
            // SAFETY: a live region; its key never changes.
            lkey: unsafe { (*self.mr).lkey },
        })
    }

    /// Lets the next frame come into a slot.
    pub(super) fn receive_into(&mut self, slot: usize) -> io::Result<()> {
        let mut part = self.part(slot, self.frame).ok_or(io::ErrorKind::InvalidInput)?;
        let mut request = ibv_recv_wr {
            wr_id: slot as u64,
            next: ptr::null_mut(),
            sg_list: &raw mut part,
            num_sge: 1,
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the slot is the device's until it completes: nothing reads it before.
        let code = unsafe { (self.operations.post_recv)(self.qp, &raw mut request, &raw mut bad) };
        posted(code, "ibv_post_recv")
    }

    /// Sends the frame in a slot, which must not be under way; the slot is the device's until it
    /// completes. `bytes` beyond the frame's own are sent as they are.
    pub(super) fn send_from(&mut self, slot: usize, frame: &[u8], bytes: usize) -> io::Result<()> {
        let mut part =
            self.part(slot, bytes.max(frame.len())).ok_or(io::ErrorKind::InvalidInput)?;
        let start = self.slot(slot).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: the slot is at least as long as `frame`, and the device is done with it.
        unsafe { ptr::copy_nonoverlapping(frame.as_ptr(), start.as_ptr(), frame.len()) };
        let mut request = ibv_send_wr {
            wr_id: slot as u64,
            next: ptr::null_mut(),
            sg_list: &raw mut part,
            num_sge: 1,
            opcode: IBV_WR_SEND,
            send_flags: IBV_SEND_SIGNALED,
            imm_data: 0,
            others: [0; 11],
        };
        let mut bad = ptr::null_mut();
        // SAFETY: request and part outlive the call.
        let code = unsafe { (self.operations.post_send)(self.qp, &raw mut request, &raw mut bad) };
        posted(code, "ibv_post_send")
    }

    /// Hands over what has completed since.
    pub(super) fn poll(&mut self, take: &mut dyn FnMut(Completion)) -> io::Result<()> {
        const BATCH: usize = 16;
        loop {
            let mut completions = [ibv_wc::default(); BATCH];
            // SAFETY: room for as many as are asked for.
            let n = unsafe {
                (self.operations.poll_cq)(self.cq, BATCH as i32, completions.as_mut_ptr())
            };
            let n = usize::try_from(n)
                .map_err(|_| io::Error::other(format!("ibv_poll_cq failed ({n})")))?;
            for wc in completions.get(..n.min(BATCH)).unwrap_or_default() {
                if let Some(reason) = super::failure(wc.status) {
                    return Err(io::Error::other(format!(
                        "a request failed: {reason} (status {}, vendor's error {})",
                        wc.status, wc.vendor_err
                    )));
                }
                let bytes = (wc.byte_len as usize).min(self.frame);
                take(Completion { slot: wc.wr_id as usize, bytes });
            }
            if n < BATCH {
                return Ok(());
            }
        }
    }

    /// What came into a slot; only for receives that have completed.
    pub(super) fn received(&self, slot: usize, bytes: usize) -> &[u8] {
        match self.slot(slot) {
            // SAFETY: within the slot, which is initialised, and which the device left alone since
            // it completed; posting it again takes `&mut self`.
            Some(start) => unsafe {
                std::slice::from_raw_parts(start.as_ptr(), bytes.min(self.frame))
            },
            None => &[],
        }
    }
}

/// Verbs calls return the error's number.
fn code_error(code: i32) -> io::Error {
    if code > 0 { io::Error::from_raw_os_error(code) } else { io::Error::last_os_error() }
}

fn posted(code: i32, call: &str) -> io::Result<()> {
    if code == 0 {
        return Ok(());
    }
    let e = code_error(code);
    Err(io::Error::new(e.kind(), format!("{call}: {e}")))
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let l = &self.library;
        // The queue pair first, so that nothing writes into the slab any more. Apple's devices keep
        // regions whose queue pair was put into an error state beforehand: it is not.
        // SAFETY: each is live, made by this library and undone once, in reverse order of use.
        unsafe {
            let is_quiet = self.qp.is_null() || (l.destroy_qp)(self.qp) == 0;
            if !is_quiet || (!self.mr.is_null() && (l.dereg_mr)(self.mr) != 0) {
                // The device may still write: better to lose the memory than to give it to others.
                std::mem::forget(self.slab.take());
                return;
            }
            if !self.cq.is_null() {
                (l.destroy_cq)(self.cq);
            }
            if !self.pd.is_null() {
                (l.dealloc_pd)(self.pd);
            }
            (l.close_device)(self.context);
        }
    }
}
