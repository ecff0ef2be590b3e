//! Algorithms for ranks that are all linked with each other.

use std::ops::Range;

use bytemuck::cast_slice_mut;

use super::running::{Folding, Moves, Running};
use crate::CommError;
use crate::element::{Element, ReduceOp, fold};

/// Larger reductions go in blocks of so many bytes per rank: what was received is still in the cache
/// when it is folded, and what was folded when it is sent.
const BLOCK: usize = 1 << 20;

/// Everyone sends everything to everyone.
pub(super) fn one_shot<T: Element>(
    running: &mut Running<'_>,
    data: &mut [T],
    op: ReduceOp,
) -> Result<(), CommError> {
    let all = 0..size_of_val(data);
    running.exchange(Moves {
        sends: running.others().map(|peer| (peer, all.clone())).collect(),
        fold: Some(folding::<T>(all, op, true)),
        buffer: cast_slice_mut(data),
        ..Moves::default()
    })
}

/// Each rank reduces a part, then sends that to all.
pub(super) fn two_step<T: Element>(
    running: &mut Running<'_>,
    data: &mut [T],
    op: ReduceOp,
) -> Result<(), CommError> {
    let n = running.size();
    for block in data.chunks_mut(BLOCK / size_of::<T>() * n) {
        let parts = ranges::<T>(&even(block.len(), n));
        let own = parts.get(running.rank).cloned().unwrap_or_default();
        running.exchange(Moves {
            sends: of_peers(running, &parts).collect(),
            fold: Some(folding::<T>(own.clone(), op, false)),
            buffer: cast_slice_mut(block),
            ..Moves::default()
        })?;
        running.exchange(Moves {
            sends: running.others().map(|peer| (peer, own.clone())).collect(),
            receives: of_peers(running, &parts).collect(),
            buffer: cast_slice_mut(block),
            ..Moves::default()
        })?;
    }
    Ok(())
}

/// Everyone gathers everything in ⌈log₂ n⌉ steps (Bruck et al., 1997), then folds it.
pub(super) fn doubling<T: Element>(
    running: &mut Running<'_>,
    data: &mut [T],
    op: ReduceOp,
) -> Result<(), CommError> {
    let (n, rank) = (running.size(), running.rank);
    let length = data.len();
    let bytes = size_of_val(data);
    // Block i is of rank (own + i) mod n.
    let mut blocks = vec![T::zeroed(); n * length];
    if let Some(first) = blocks.get_mut(..length) {
        first.copy_from_slice(data);
    }
    let mut step = 1;
    while step < n {
        let count = step.min(n - step);
        running.exchange(Moves {
            sends: vec![((rank + n - step) % n, 0..count * bytes)],
            receives: vec![((rank + step) % n, step * bytes..(step + count) * bytes)],
            buffer: cast_slice_mut(&mut blocks),
            ..Moves::default()
        })?;
        step *= 2;
    }
    let block = |of: usize| -> &[u8] {
        let at = (of + n - rank) % n * length;
        bytemuck::cast_slice(blocks.get(at..at + length).unwrap_or_default())
    };
    let before: Vec<&[u8]> = (0..rank).map(block).collect();
    let after: Vec<&[u8]> = (rank + 1..n).map(block).collect();
    fold::<T>(op, &before, cast_slice_mut(data), &after);
    Ok(())
}

/// The part of each other rank.
pub(super) fn of_peers<'r>(
    running: &Running<'_>,
    parts: &'r [Range<usize>],
) -> impl Iterator<Item = (usize, Range<usize>)> + use<'r> {
    running.others().filter_map(|peer| Some((peer, parts.get(peer)?.clone())))
}

pub(super) fn folding<T: Element>(range: Range<usize>, op: ReduceOp, is_sent: bool) -> Folding {
    Folding { range, fold: fold::<T>, op, unit: size_of::<T>(), is_sent }
}

/// Where parts of so many elements lie, one after the other, in bytes.
pub(super) fn ranges<T>(counts: &[usize]) -> Vec<Range<usize>> {
    let starts = counts.iter().scan(0, |at, count| {
        let start = *at;
        *at += count * size_of::<T>();
        Some(start..*at)
    });
    starts.collect()
}

/// `n` shares of `total`, as even as can be.
pub(super) fn even(total: usize, n: usize) -> Vec<usize> {
    (0..n).map(|i| total / n + usize::from(i < total % n)).collect()
}
