//! RDMA over verbs: queue pairs as a [`FramePort`](crate::FramePort).
//!
//! The library is opened at run time (`libibverbs.so.1` on Linux, `librdma.dylib` on macOS); what it
//! needs is mirrored in [`sys`]. One queue pair per peer moves frames of at most one 4 KiB unit of
//! the device, into receives that are always posted: senders hold credits
//! ([`ReliableLink`](crate::ReliableLink)). A dead peer is noticed on the TCP connection beside it:
//! a queue pair says nothing about one.

mod destination;
mod device;
mod library;
mod port;
mod queue;
pub mod sys;

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

pub(crate) use self::destination::{DESTINATION, Destination};
use self::device::{Device, Route};
pub(crate) use self::library::Library;
pub(crate) use self::port::{Unconnected, VerbsPort};
use self::sys::{IBV_QPT_RC, IBV_QPT_UC};
use crate::names::names;

/// Frames of Apple's devices: what a queue is counted in.
const UNIT: usize = 4096;

/// What delivers frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum QueueKind {
    /// RC: the device acknowledges and repeats.
    #[serde(rename = "rc")]
    Reliable,
    /// UC: the device sends and forgets. All that Apple's devices have.
    #[serde(rename = "uc")]
    Unreliable,
}

names!(QueueKind { Reliable => "rc", Unreliable => "uc" });

impl QueueKind {
    fn code(self) -> i32 {
        match self {
            Self::Reliable => IBV_QPT_RC,
            Self::Unreliable => IBV_QPT_UC,
        }
    }

    fn from_code(code: u8) -> Option<Self> {
        [Self::Reliable, Self::Unreliable].into_iter().find(|k| k.code() == i32::from(code))
    }
}

/// How RDMA devices are used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerbsConfig {
    /// The verbs library, if it is not where the system looks.
    pub library: Option<PathBuf>,
    /// Per peer the names of this rank's devices that lead there, one per cable (none: the peer is
    /// reached otherwise); if empty, they are found by the address that leads to the peer.
    pub devices: Vec<Vec<String>>,
    /// The same on all ranks.
    pub kind: QueueKind,
    /// Bytes of a frame. More than 4096 stalls some of Apple's devices at any depth.
    pub frame: usize,
    /// Receives posted per peer.
    pub depth: usize,
    /// Queue pairs that a device has. One more than it has, and an Apple device refuses until it is
    /// restarted: checked before any is made.
    pub queue_pairs_max: usize,
}

impl Default for VerbsConfig {
    fn default() -> Self {
        let is_apple = cfg!(target_os = "macos");
        Self {
            library: None,
            devices: Vec::new(),
            kind: if is_apple { QueueKind::Unreliable } else { QueueKind::Reliable },
            frame: UNIT,
            depth: 60,
            queue_pairs_max: if is_apple { 10 } else { 1024 },
        }
    }
}

/// What can go wrong with RDMA devices.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VerbsError {
    /// There is no library for them here.
    #[error("RDMA is not available: {library}: {reason}")]
    Library {
        /// Its name.
        library: String,
        /// What the loader says.
        reason: String,
    },
    /// No device will do.
    #[error("there is no RDMA device {wanted} with an active port (found: {found:?})")]
    NoDevice {
        /// What it should be.
        wanted: String,
        /// Devices that there are.
        found: Vec<String>,
    },
    /// A device or its driver refused.
    #[error("{call} failed on RDMA device {device}: {reason}{hint}")]
    Call {
        /// The function.
        call: &'static str,
        /// The device.
        device: String,
        /// The system's words.
        reason: String,
        /// What may mend it.
        hint: &'static str,
    },
    /// More queue pairs are needed than a device has.
    #[error("{needed} queue pairs are needed on one RDMA device, which has {budget}")]
    Budget {
        /// As many.
        needed: usize,
        /// Of so many.
        budget: usize,
    },
    /// The settings make no sense.
    #[error("{0}")]
    Settings(&'static str),
    /// What the peer says makes no sense.
    #[error("the peer's queue pair {0}")]
    Peer(&'static str),
}

impl VerbsError {
    fn call(call: &'static str, device: &str, reason: io::Error) -> Self {
        let hint = match call {
            "ibv_alloc_pd" => ": is its port down?",
            "ibv_create_qp" => ": are all its queue pairs in use, or left over from a crash?",
            "ibv_reg_mr" => ": does `ulimit -l` allow the memory?",
            "ibv_modify_qp to RTR" => ": does this device's cable lead to the peer?",
            _ => "",
        };
        Self::Call { call, device: device.to_owned(), reason: reason.to_string(), hint }
    }
}

/// Why a request failed, by the status of its completion.
fn failure(status: i32) -> Option<&'static str> {
    Some(match status {
        sys::IBV_WC_SUCCESS => return None,
        sys::IBV_WC_LOC_LEN_ERR => "the frame is longer than the receive",
        sys::IBV_WC_LOC_PROT_ERR => "the memory is not registered",
        sys::IBV_WC_WR_FLUSH_ERR => "the queue pair is in an error state",
        sys::IBV_WC_RETRY_EXC_ERR => "the peer does not answer",
        13 => "the peer has posted no receive",
        _ => "the device says no more",
    })
}

/// The devices of this host.
#[derive(Clone)]
pub(crate) struct Verbs {
    library: Arc<Library>,
    devices: Arc<[Device]>,
    config: VerbsConfig,
}

impl Verbs {
    /// Opens the library and looks at all devices.
    pub(crate) fn new(config: &VerbsConfig) -> Result<Self, VerbsError> {
        if config.frame < 128 || config.depth == 0 || config.depth > usize::from(u16::MAX) {
            return Err(VerbsError::Settings(
                "an RDMA frame has at least 128 bytes, and from 1 to 65535 are posted",
            ));
        }
        let library = Arc::new(Library::open(config.library.as_deref())?);
        let devices = device::all(&library)?;
        if !devices.iter().any(|d| d.is_active) {
            let found = devices.into_iter().map(|d| d.name).collect();
            return Err(VerbsError::NoDevice { wanted: "of any name".to_owned(), found });
        }
        Ok(Self { library, devices: devices.into(), config: config.clone() })
    }

    /// The way to a peer that TCP reaches from `local`, over one of the cables to it.
    fn route(&self, peer: usize, cable: usize, local: IpAddr) -> Option<Route> {
        let named = self.config.devices.get(peer);
        let wanted = match named {
            Some(names) => Some(names.get(cable)?.as_str()),
            None => None,
        };
        device::route(&self.devices, wanted, local)
    }

    /// Whether a device is known to lead to a peer.
    pub(crate) fn leads_to(&self, peer: usize, cable: usize, local: IpAddr) -> bool {
        self.route(peer, cable, local).is_some_and(|r| r.is_certain)
    }

    /// A queue pair to a peer that TCP reaches from `local`, and what the peer must know of it.
    pub(crate) fn open(
        &self,
        peer: usize,
        cable: usize,
        local: IpAddr,
    ) -> Result<(Unconnected, Destination), VerbsError> {
        let route = self.route(peer, cable, local).ok_or_else(|| {
            let names = self.config.devices.get(peer).and_then(|n| n.get(cable));
            VerbsError::NoDevice {
                wanted: match names {
                    Some(name) => format!("called {name:?}"),
                    None => format!("that leads from {local} to rank {peer}"),
                },
                found: self.devices.iter().map(|d| d.name.clone()).collect(),
            }
        })?;
        Unconnected::new(&self.library, route, &self.config)
    }
}
