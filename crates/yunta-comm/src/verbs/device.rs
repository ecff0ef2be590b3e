//! Which device leads to a peer, and which of its addresses is on the way.

use std::io;
use std::net::IpAddr;
use std::ptr;

use super::sys::{
    IBV_LINK_LAYER_ETHERNET, IBV_PORT_ACTIVE, ibv_context, ibv_device, ibv_gid, ibv_port_attr,
};
use super::{Library, VerbsError};

/// Ports count from 1; devices with two are rare, and their second ports show up as devices.
pub(super) const PORT: u8 = 1;
/// Entries of an address table that are looked at.
const GIDS_MAX: i32 = 256;

/// An entry of a port's address table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gid {
    pub(super) index: u8,
    pub(super) gid: ibv_gid,
    /// Not of RoCE's first version, which routers and some switches don't carry.
    pub(super) is_routable: bool,
}

/// A device as it was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Device {
    pub(super) name: String,
    pub(super) is_active: bool,
    pub(super) is_ethernet: bool,
    pub(super) lid: u16,
    pub(super) mtu: i32,
    pub(super) gids: Vec<Gid>,
}

/// A device and an address of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Route {
    pub(super) device: String,
    pub(super) lid: u16,
    pub(super) mtu: i32,
    pub(super) gid: Gid,
    /// Whether peers are addressed by GID, not by LID alone.
    pub(super) is_global: bool,
    /// Whether the address is the one that leads to the peer, and no guess.
    pub(super) is_certain: bool,
}

/// An open device.
pub(super) struct Context<'l> {
    library: &'l Library,
    pub(super) context: *mut ibv_context,
}

impl<'l> Context<'l> {
    fn open(library: &'l Library, name: &str, device: *mut ibv_device) -> Result<Self, VerbsError> {
        // SAFETY: a device of a live list.
        let context = unsafe { (library.open_device)(device) };
        if context.is_null() {
            return Err(VerbsError::call("ibv_open_device", name, io::Error::last_os_error()));
        }
        Ok(Self { library, context })
    }

    /// Gives the context away: it is the caller's to close.
    pub(super) fn into_raw(mut self) -> *mut ibv_context {
        std::mem::replace(&mut self.context, ptr::null_mut())
    }

    fn port(&self) -> Option<ibv_port_attr> {
        let mut port = ibv_port_attr::default();
        // SAFETY: an open context; `port` has room for what any version of the library writes.
        let code = unsafe { (self.library.query_port)(self.context, PORT, &raw mut port) };
        (code == 0).then_some(port)
    }

    fn gid(&self, index: i32) -> Option<ibv_gid> {
        let mut gid = ibv_gid::default();
        // SAFETY: an open context; `gid` outlives the call.
        let code = unsafe { (self.library.query_gid)(self.context, PORT, index, &raw mut gid) };
        (code == 0 && gid != ibv_gid::default()).then_some(gid)
    }
}

impl Drop for Context<'_> {
    fn drop(&mut self) {
        if !self.context.is_null() {
            // SAFETY: open, and nothing made of it is left: such an owner takes it by `into_raw`.
            unsafe { (self.library.close_device)(self.context) };
        }
    }
}

/// Opens the device of a name.
pub(super) fn open<'l>(library: &'l Library, wanted: &str) -> Result<Context<'l>, VerbsError> {
    let list = library.devices()?;
    let found = list.iter().find(|(name, _)| name == wanted);
    let (name, device) = found.ok_or_else(|| VerbsError::NoDevice {
        wanted: format!("called {wanted:?}"),
        found: list.iter().map(|(name, _)| name).collect(),
    })?;
    Context::open(library, &name, device)
}

/// All devices of this host. One that can't be opened counts as one whose port is down.
pub(super) fn all(library: &Library) -> Result<Vec<Device>, VerbsError> {
    let list = library.devices()?;
    let look = |(name, device): (String, *mut ibv_device)| {
        let context = Context::open(library, &name, device).ok();
        let port = context.as_ref().and_then(Context::port).unwrap_or_default();
        let gids = (0..port.gid_tbl_len.clamp(0, GIDS_MAX)).filter_map(|index| {
            Some(Gid {
                index: u8::try_from(index).ok()?,
                gid: context.as_ref()?.gid(index)?,
                is_routable: !is_roce_v1(&name, index),
            })
        });
        Device {
            is_active: port.state == IBV_PORT_ACTIVE,
            is_ethernet: port.link_layer == IBV_LINK_LAYER_ETHERNET,
            lid: port.lid,
            mtu: port.active_mtu,
            gids: gids.collect(),
            name,
        }
    };
    Ok(list.iter().map(look).collect())
}

/// Linux lists every address twice: once per version of RoCE.
fn is_roce_v1(device: &str, index: i32) -> bool {
    let path = format!("/sys/class/infiniband/{device}/ports/{PORT}/gid_attrs/types/{index}");
    std::fs::read_to_string(path).is_ok_and(|kind| kind.trim() == "IB/RoCE v1")
}

/// An IP address as devices write it.
fn gid_of(address: IpAddr) -> ibv_gid {
    match address {
        IpAddr::V4(v4) => ibv_gid(v4.to_ipv6_mapped().octets()),
        IpAddr::V6(v6) => ibv_gid(v6.octets()),
    }
}

fn is_ipv4(gid: ibv_gid) -> bool {
    std::net::Ipv6Addr::from(gid.0).to_ipv4_mapped().is_some()
}

/// The way to a peer that TCP reaches from `local`, over the device called `wanted` or over any.
pub(super) fn route(devices: &[Device], wanted: Option<&str>, local: IpAddr) -> Option<Route> {
    let is_wanted = |d: &&Device| d.is_active && wanted.is_none_or(|name| name == d.name);
    let candidates = || devices.iter().filter(is_wanted);
    let to = |device: &Device, gid: Gid, is_global: bool, is_certain: bool| Route {
        device: device.name.clone(),
        lid: device.lid,
        mtu: device.mtu,
        gid,
        is_global,
        is_certain,
    };
    let find = |accept: &dyn Fn(&Gid) -> bool| {
        candidates().find_map(|device| {
            let accepted = device.gids.iter().filter(|g| accept(g));
            accepted.max_by_key(|g| (g.is_routable, -i32::from(g.index))).map(|g| (device, *g))
        })
    };
    // A device that was named leads there: whoever named it has seen the cable.
    let is_named = wanted.is_some();
    let local = gid_of(local);
    if let Some((device, gid)) = find(&|g| g.gid == local) {
        return Some(to(device, gid, true, true));
    }
    if let Some((device, gid)) = find(&|g| is_ipv4(g.gid)) {
        return Some(to(device, gid, true, is_named));
    }
    // InfiniBand proper.
    let device = candidates().find(|d| !d.is_ethernet && d.lid != 0)?;
    device.gids.first().map(|gid| to(device, *gid, false, is_named))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u8, address: &str, is_routable: bool) -> Gid {
        Gid { index, gid: gid_of(address.parse().unwrap()), is_routable }
    }

    fn device(name: &str, gids: Vec<Gid>) -> Device {
        let name = name.to_owned();
        Device { name, is_active: true, is_ethernet: true, lid: 0, mtu: 3, gids }
    }

    fn chosen(devices: &[Device], wanted: Option<&str>, local: &str) -> Option<(String, u8, bool)> {
        let route = route(devices, wanted, local.parse().unwrap())?;
        Some((route.device, route.gid.index, route.is_certain))
    }

    #[test]
    fn the_address_on_the_way_to_the_peer_is_chosen() {
        let devices = [
            device("en2", vec![gid(0, "fe80::1", true), gid(1, "169.254.1.1", true)]),
            device("en3", vec![gid(0, "fe80::2", true), gid(4, "169.254.2.1", true)]),
        ];
        let is = |name: &str, index, certain| Some((name.to_owned(), index, certain));
        assert_eq!(chosen(&devices, None, "169.254.2.1"), is("en3", 4, true));
        assert_eq!(chosen(&devices, None, "fe80::1"), is("en2", 0, true));
        // A guess, which only counts where nothing else will do.
        assert_eq!(chosen(&devices, None, "10.0.0.1"), is("en2", 1, false));
        assert_eq!(chosen(&devices, Some("en3"), "10.0.0.1"), is("en3", 4, true));
        assert_eq!(chosen(&devices, Some("en9"), "10.0.0.1"), None);
        assert_eq!(chosen(&[], None, "10.0.0.1"), None);
    }

    #[test]
    fn the_routable_version_of_roce_is_preferred_and_dead_ports_are_not() {
        let twice =
            vec![gid(2, "10.0.0.1", false), gid(3, "10.0.0.1", true), gid(5, "10.0.0.1", true)];
        let mut devices = [device("mlx5_0", twice)];
        assert_eq!(chosen(&devices, None, "10.0.0.1"), Some(("mlx5_0".to_owned(), 3, true)));
        devices[0].is_active = false;
        assert_eq!(chosen(&devices, None, "10.0.0.1"), None);
    }

    #[test]
    fn infiniband_is_addressed_by_lid() {
        let mut ib = device("ib0", vec![gid(0, "fe80::7", true)]);
        (ib.is_ethernet, ib.lid) = (false, 17);
        let route = route(&[ib], Some("ib0"), "10.0.0.1".parse().unwrap()).unwrap();
        assert!(!route.is_global && route.is_certain);
        assert_eq!(route.lid, 17);
    }
}
