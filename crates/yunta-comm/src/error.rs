//! What can go wrong between ranks.

use std::fmt;
use std::time::Duration;

/// A collective or a transfer, for error messages and to catch ranks that are out of step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Operation {
    /// Sum, minimum or maximum of all ranks' data, on all ranks.
    AllReduce = 1,
    /// All ranks' data one after the other, on all ranks.
    AllGather = 2,
    /// Each rank's part of the reduction.
    ReduceScatter = 3,
    /// One rank's data, on all ranks.
    Broadcast = 4,
    /// All ranks' data one after the other, on one rank.
    Gather = 5,
    /// From one rank to another.
    Transfer = 6,
    /// All ranks have arrived.
    Barrier = 7,
}

impl Operation {
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        [
            Self::AllReduce,
            Self::AllGather,
            Self::ReduceScatter,
            Self::Broadcast,
            Self::Gather,
            Self::Transfer,
            Self::Barrier,
        ]
        .into_iter()
        .find(|op| *op as u8 == code)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AllReduce => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::Broadcast => "broadcast",
            Self::Gather => "gather",
            Self::Transfer => "send/recv",
            Self::Barrier => "barrier",
        })
    }
}

/// Errors of this crate. Ranks are numbered in the world, whatever group they act in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommError {
    /// A peer's link closed or failed: its process is gone, or has left the group.
    #[error("rank {rank} lost rank {peer} ({link}) in {operation} after {after:?}: {reason}")]
    PeerLost {
        /// This rank.
        rank: usize,
        /// The one that was lost.
        peer: usize,
        /// The link to it.
        link: String,
        /// What was under way.
        operation: Operation,
        /// How long it had been waited for.
        after: Duration,
        /// What the link says.
        reason: String,
    },
    /// A peer did not do its part in time: it is stopped, stuck, or cut off.
    #[error("rank {rank} waited {after:?} for rank {peer} ({link}) in {operation}: no progress")]
    Timeout {
        /// This rank.
        rank: usize,
        /// The one that was waited for.
        peer: usize,
        /// The link to it.
        link: String,
        /// What was under way.
        operation: Operation,
        /// The bound.
        after: Duration,
    },
    /// A peer gave up, and said why.
    #[error("rank {peer} gave up: {reason} (rank {rank} was in {operation} for {after:?}, {link})")]
    PeerAborted {
        /// This rank.
        rank: usize,
        /// The one that gave up.
        peer: usize,
        /// The link over which it said so.
        link: String,
        /// What was under way here.
        operation: Operation,
        /// How long.
        after: Duration,
        /// In the peer's words.
        reason: String,
    },
    /// Two ranks are not doing the same thing.
    #[error(
        "rank {rank} and rank {peer} ({link}) are out of step in {operation} after {after:?}: {reason}"
    )]
    Mismatch {
        /// This rank.
        rank: usize,
        /// The other.
        peer: usize,
        /// The link between them.
        link: String,
        /// What this rank does.
        operation: Operation,
        /// Since when.
        after: Duration,
        /// Both sides' view.
        reason: String,
    },
    /// A peer sent what is no frame, a damaged one, or one of another epoch.
    #[error(
        "rank {rank} got garbage from rank {peer} ({link}) in {operation} after {after:?}: {reason}"
    )]
    Protocol {
        /// This rank.
        rank: usize,
        /// The sender.
        peer: usize,
        /// The link.
        link: String,
        /// What was under way.
        operation: Operation,
        /// How long.
        after: Duration,
        /// What was wrong.
        reason: String,
    },
    /// The operation was called with arguments that make no sense.
    #[error("{operation}: {reason}")]
    Arguments {
        /// The operation.
        operation: Operation,
        /// What is wrong.
        reason: String,
    },
    /// This rank was told to stop.
    #[error("rank {rank} was told to stop in {operation}")]
    Aborted {
        /// This rank.
        rank: usize,
        /// What was under way.
        operation: Operation,
    },
    /// The ranks did not come together.
    #[error("rank {rank} could not join: {reason}")]
    Rendezvous {
        /// This rank.
        rank: usize,
        /// Why; names the peer and its address.
        reason: String,
    },
}

impl CommError {
    /// Whether a peer is the cause: the group must be formed again without it, or with its
    /// successor.
    pub fn is_peer_lost(&self) -> bool {
        matches!(self, Self::PeerLost { .. } | Self::Timeout { .. } | Self::PeerAborted { .. })
    }
}
