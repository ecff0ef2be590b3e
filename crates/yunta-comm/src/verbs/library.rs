//! The verbs library, opened at run time: nothing to link with where there is none.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use libloading::Library as Loaded;

use super::VerbsError;
use super::sys::{
    ibv_context, ibv_cq, ibv_device, ibv_gid, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr,
    ibv_qp_init_attr,
};

/// What it is called: Apple's on macOS, rdma-core's elsewhere.
const NAME: &str =
    if cfg!(target_os = "macos") { "/usr/lib/librdma.dylib" } else { "libibverbs.so.1" };

macro_rules! library {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The calls that are symbols. Safe to call with live objects of this library only.
        pub(crate) struct Library {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// Never closed: drivers leave threads and exit handlers behind.
            _loaded: ManuallyDrop<Loaded>,
        }

        impl Library {
            fn of(loaded: Loaded) -> Result<Self, libloading::Error> {
                $(
                    // SAFETY: the type is the one that the header declares for this name.
                    let $field = unsafe { *loaded.get($symbol)? };
                )*
                Ok(Self { $($field,)* _loaded: ManuallyDrop::new(loaded) })
            }
        }
    };
}

library! {
    get_device_list = "ibv_get_device_list": fn(*mut c_int) -> *mut *mut ibv_device;
    free_device_list = "ibv_free_device_list": fn(*mut *mut ibv_device);
    get_device_name = "ibv_get_device_name": fn(*mut ibv_device) -> *const c_char;
    open_device = "ibv_open_device": fn(*mut ibv_device) -> *mut ibv_context;
    close_device = "ibv_close_device": fn(*mut ibv_context) -> c_int;
    query_port = "ibv_query_port": fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    query_gid = "ibv_query_gid": fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
    alloc_pd = "ibv_alloc_pd": fn(*mut ibv_context) -> *mut ibv_pd;
    dealloc_pd = "ibv_dealloc_pd": fn(*mut ibv_pd) -> c_int;
    reg_mr = "ibv_reg_mr": fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    dereg_mr = "ibv_dereg_mr": fn(*mut ibv_mr) -> c_int;
    create_cq = "ibv_create_cq":
        fn(*mut ibv_context, c_int, *mut c_void, *mut c_void, c_int) -> *mut ibv_cq;
    destroy_cq = "ibv_destroy_cq": fn(*mut ibv_cq) -> c_int;
    create_qp = "ibv_create_qp": fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    destroy_qp = "ibv_destroy_qp": fn(*mut ibv_qp) -> c_int;
    modify_qp = "ibv_modify_qp": fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
}

impl Library {
    /// Opens the library at `path`, or the system's.
    pub(crate) fn open(path: Option<&Path>) -> Result<Self, VerbsError> {
        let path = path.map_or_else(|| PathBuf::from(NAME), Path::to_owned);
        let unavailable = |e: libloading::Error| VerbsError::Library {
            library: path.display().to_string(),
            reason: e.to_string(),
        };
        // SAFETY: a verbs library does nothing on being loaded that this process must prepare for.
        let loaded = unsafe { Loaded::new(&path) }.map_err(unavailable)?;
        Self::of(loaded).map_err(unavailable)
    }

    /// The devices that there are; valid while the list is.
    pub(super) fn devices(&self) -> Result<DeviceList<'_>, VerbsError> {
        let mut count = 0;
        // SAFETY: `count` outlives the call.
        let list = unsafe { (self.get_device_list)(&raw mut count) };
        if list.is_null() {
            return Err(VerbsError::call("ibv_get_device_list", "any", io::Error::last_os_error()));
        }
        Ok(DeviceList { library: self, list, count: usize::try_from(count).unwrap_or(0) })
    }
}

/// Devices, by name.
pub(super) struct DeviceList<'l> {
    library: &'l Library,
    list: *mut *mut ibv_device,
    count: usize,
}

impl DeviceList<'_> {
    pub(super) fn iter(&self) -> impl Iterator<Item = (String, *mut ibv_device)> {
        (0..self.count).filter_map(|at| {
            // SAFETY: the list has `count` entries, and lives as long as `self`.
            let device = unsafe { *self.list.add(at) };
            // SAFETY: a device of a live list.
            let name = unsafe { (self.library.get_device_name)(device) };
            if name.is_null() {
                return None;
            }
            // SAFETY: names are C strings that live as long as their device.
            let name = unsafe { CStr::from_ptr(name) };
            Some((name.to_string_lossy().into_owned(), device))
        })
    }
}

impl Drop for DeviceList<'_> {
    fn drop(&mut self) {
        // SAFETY: the library's list, freed once. Opened devices stay.
        unsafe { (self.library.free_device_list)(self.list) };
    }
}
