//! A verbs library without devices, for tests: it exports the `ibv_*` symbols that Yunta opens at
//! run time, and behaves as RDMA devices do, those of Apple's Thunderbolt above all.
//!
//! Devices lie in a folder that [`FOLDER`] names, shared by all processes that are to reach each
//! other: its `config.json` ([`Config`]) lists them, with the faults that they have. Queue pairs are
//! datagram sockets in it. A frame that meets no posted receive is gone (UC), a send completes
//! whether or not it arrives, and nothing is said of a dead peer.
//!
//! What it can't show: the speed, the ordering of memory, and the drivers' own defects.
#![cfg(target_os = "linux")]

mod abi;
mod queue;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use serde::{Deserialize, Serialize};

/// The environment variable that names the folder of the devices.
pub const FOLDER: &str = "YUNTA_RDMA_EMULATOR";
/// While a file of this name lies in the folder, all cables swallow what is sent.
pub const CUT: &str = "cut";
/// While a file of this name lies in the folder, requests complete with an error.
pub const BROKEN: &str = "broken";

/// A device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its name, as in `rdma_en2`.
    pub name: String,
    /// The address of its interface.
    pub address: IpAddr,
}

/// Devices, and what they do to frames. Shares are of 1.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// In the order of the list.
    pub devices: Vec<Device>,
    /// Devices that are cabled with each other, by name; all are with all if there are none.
    pub cables: Vec<(String, String)>,
    /// Devices whose ports are down.
    pub ports_down: Vec<String>,
    /// Calls that return NULL or fail, by name.
    pub failing: Vec<String>,
    /// Queue pairs that a device has.
    pub queue_pairs: usize,
    /// Requests that a queue takes.
    pub depth_max: u32,
    /// Whether there are reliable queue pairs.
    pub has_rc: bool,
    /// Where the faults come from.
    pub seed: u64,
    /// Share of frames that are lost.
    pub loss: f64,
    /// Share that arrives twice.
    pub duplication: f64,
    /// Share in which a bit is wrong.
    pub corruption: f64,
    /// Everything arrives so much later.
    pub latency_us: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            devices: vec![Device { name: "emu0".to_owned(), address: [169, 254, 7, 1].into() }],
            cables: Vec::new(),
            ports_down: Vec::new(),
            failing: Vec::new(),
            queue_pairs: 10,
            depth_max: 1023,
            has_rc: true,
            seed: 0,
            loss: 0.0,
            duplication: 0.0,
            corruption: 0.0,
            latency_us: 0,
        }
    }
}

impl Config {
    /// Puts the devices into a folder.
    ///
    /// # Errors
    /// The system's.
    pub fn save(&self, folder: &Path) -> io::Result<()> {
        fs::write(folder.join("config.json"), serde_json::to_vec(self)?)
    }

    /// The folder that the environment names, with what it holds.
    fn load() -> Option<(PathBuf, Self)> {
        let folder = PathBuf::from(env::var_os(FOLDER)?);
        let text = fs::read(folder.join("config.json")).ok()?;
        Some((folder, serde_json::from_slice(&text).ok()?))
    }

    fn fails(&self, call: &str) -> bool {
        self.failing.iter().any(|name| name == call)
    }
}

/// Where the library lies that was built with the running test.
///
/// # Errors
/// If it is not beside the test: its package must be a dependency of the test's.
pub fn library() -> io::Result<PathBuf> {
    let program = env::current_exe()?;
    let name = "libyunta_verbs_emulator.so";
    let beside = program.ancestors().skip(1).take(2).map(|folder| folder.join(name));
    let found = beside.into_iter().find(|path| path.exists());
    found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, format!("no {name} was built")))
}
