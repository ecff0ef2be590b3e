//! The control channel between the supervisor and a worker process: the worker's standard input
//! and output, one JSON object per line. Its end is the end of the process, on either side.

use std::net::SocketAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use yunta_comm::LinkConfig;
use yunta_model::Plan;

use crate::{Emulation, Limits, PrefixCache};

/// All that a worker needs to know, sent first.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Assignment {
    /// This worker's rank.
    pub(crate) rank: usize,
    /// The attempt at running the instance; messages of older ones are refused.
    pub(crate) epoch: u64,
    /// The cut of the model.
    pub(crate) plan: Plan,
    /// The checkpoint.
    pub(crate) model: PathBuf,
    /// What it serves.
    pub(crate) limits: Limits,
    /// Compute threads of this rank.
    pub(crate) threads: usize,
    /// All arithmetic in f32.
    pub(crate) float32: bool,
    /// Shared by the ranks and the gateway of this instance, in hexadecimal.
    pub(crate) secret: String,
    /// Where the leader reports tokens.
    pub(crate) gateway: SocketAddr,
    /// Bound on each collective within a step, in milliseconds.
    pub(crate) step_timeout_ms: u64,
    /// Guesses ahead, on rank 0.
    pub(crate) draft_model: Option<PathBuf>,
    /// Where blocks of the KV cache outlive the process.
    pub(crate) prefix_cache: Option<PrefixCache>,
    /// How the machine is divided and the links are slowed, to emulate several machines.
    pub(crate) emulation: Emulation,
    /// What links the ranks.
    pub(crate) links: LinkConfig,
}

/// From the supervisor.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToWorker {
    /// What to be.
    Assignment(Box<Assignment>),
    /// Where the ranks listen, in rank order.
    Peers(Vec<SocketAddr>),
    /// Asks for [`FromWorker::Memory`].
    Memory,
}

/// From a worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromWorker {
    /// Where this rank listens for its peers.
    Listening(SocketAddr),
    /// Bytes of weights packed so far.
    Loading {
        /// Bytes.
        bytes: u64,
    },
    /// All weights are there.
    Loaded {
        /// Bytes of weights on this rank.
        weight_bytes: u64,
    },
    /// Connected with all peers, and ready for steps.
    Joined,
    /// Answer to [`ToWorker::Memory`].
    Memory {
        /// The process's greatest resident set so far, in bytes.
        peak_bytes: u64,
    },
    /// The worker can't go on, and exits.
    Failed {
        /// Why.
        message: String,
        /// Whether a peer's loss was the cause (then the peer is the one to blame).
        peer_lost: bool,
    },
}
