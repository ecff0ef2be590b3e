//! Which algorithm for which size: a table of crossover points, measured with `yunta comm-bench`.

use crate::names::names;
use crate::{Topology, Transport};

/// How ranks reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// Everyone sends everything to everyone: one message time.
    OneShot,
    /// Everyone gathers everything in log₂(n) messages, then folds: fewer messages where each costs
    /// much.
    Doubling,
    /// Each rank reduces a part and sends that to all: less data.
    TwoStep,
    /// Partial sums flow from the first rank to the last, the result back, in chunks: for ranks that
    /// are linked in a line or a ring.
    Line,
    /// Everyone's data over a spanning tree: wherever there are ways at all.
    Relay,
}

names!(Algorithm {
    OneShot => "one-shot",
    Doubling => "doubling",
    TwoStep => "two-step",
    Line => "line",
    Relay => "relay",
});

/// Up to how many bytes `OneShot` is the fastest in a full mesh of `size` ranks.
fn one_shot_max(transport: Transport, size: usize) -> usize {
    match (transport, size) {
        // The fold is all there is to it: as long as a message fits into the rings.
        (Transport::Shm, ..=2) => 256 << 10,
        (Transport::Shm, _) => 32 << 10,
        (_, ..=2) => 128 << 10,
        (_, _) => 64 << 10,
    }
}

/// Up to how many bytes `Doubling` is.
fn doubling_max(transport: Transport, size: usize) -> usize {
    match transport {
        Transport::Tcp if size > 4 => 4 << 10,
        _ => 0,
    }
}

/// What all ranks of a group choose for an all_reduce of `bytes`.
pub(crate) fn all_reduce(topology: &Topology, bytes: usize) -> Algorithm {
    if !topology.is_full() {
        return if topology.is_line() { Algorithm::Line } else { Algorithm::Relay };
    }
    let transport = topology.slowest().unwrap_or(Transport::Tcp);
    let size = topology.size();
    if bytes <= doubling_max(transport, size) {
        Algorithm::Doubling
    } else if bytes <= one_shot_max(transport, size) {
        Algorithm::OneShot
    } else {
        Algorithm::TwoStep
    }
}

/// Whether the links allow an algorithm.
pub(crate) fn is_possible(algorithm: Algorithm, topology: &Topology) -> bool {
    match algorithm {
        Algorithm::OneShot | Algorithm::TwoStep | Algorithm::Doubling => topology.is_full(),
        Algorithm::Line => topology.is_line(),
        Algorithm::Relay => topology.tree(0).is_some(),
    }
}
