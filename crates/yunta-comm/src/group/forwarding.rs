//! Algorithms for ranks that are not all linked with each other: neighbours pass on what others
//! need.

use std::ops::Range;

use bytemuck::{Zeroable, cast_slice, cast_slice_mut};

use super::running::{Moves, Running};
use crate::CommError;
use crate::element::{Element, ReduceOp, combine, fold};

/// Bytes that flow along a line at a time.
const CHUNK: usize = 64 << 10;

/// Sums flow from the first rank to the last, each adding its own, and the result back. In chunks,
/// so that all cables are busy in both directions. Sums of 16-bit floats travel in 32 bits: the fold
/// is the same as everywhere.
pub(super) fn line<T: Element>(
    running: &mut Running<'_>,
    data: &mut [T],
    op: ReduceOp,
) -> Result<(), CommError> {
    let (n, rank) = (running.size(), running.rank);
    let chunk = CHUNK / size_of::<T>();
    let chunks = data.len().div_ceil(chunk);
    let range = |k: usize| k * chunk..((k + 1) * chunk).min(data.len());
    let ranges: Vec<Range<usize>> = (0..chunks).map(range).collect();
    // The chunk that reaches this rank in a step, counted from when the first one does.
    let at =
        |step: usize, since: usize| step.checked_sub(since).and_then(|k| ranges.get(k).cloned());
    let mut sums: Vec<T::Wide> = Vec::new();
    let mut arriving: Vec<T::Wide> = Vec::new();
    for step in 0..chunks + 2 * n {
        // Up: what was added to in the last step goes on; the next comes.
        let up = at(step, rank);
        let sent = at(step, rank + 1).filter(|_| rank + 1 < n);
        let expected = up.clone().filter(|_| rank > 0);
        arriving.clear();
        arriving.resize(expected.as_ref().map_or(0, Range::len), T::Wide::zeroed());
        running.exchange(Moves {
            source: Some(cast_slice(&sums)),
            sends: sent.iter().map(|_| (rank + 1, 0..size_of_val(sums.as_slice()))).collect(),
            receives: expected
                .iter()
                .map(|e| (rank - 1, 0..e.len() * size_of::<T::Wide>()))
                .collect(),
            buffer: cast_slice_mut(&mut arriving),
            ..Moves::default()
        })?;
        if let Some(own) = up.and_then(|up| data.get_mut(up)) {
            std::mem::swap(&mut sums, &mut arriving);
            if rank == 0 {
                sums.clear();
                sums.extend(own.iter().map(|x| x.widen()));
            } else {
                combine(op, &mut sums, own);
            }
            if rank + 1 == n {
                own.iter_mut().zip(&sums).for_each(|(x, sum)| *x = T::narrow(*sum));
            }
        }
        // Down: the last rank has had a chunk since its step up.
        let since = 2 * n - 2 - rank;
        let bytes = |r: Range<usize>| r.start * size_of::<T>()..r.end * size_of::<T>();
        let sent = at(step, since + 1).filter(|_| rank > 0);
        let expected = at(step, since).filter(|_| rank + 1 < n);
        running.exchange(Moves {
            sends: sent.map(|s| (rank - 1, bytes(s))).into_iter().collect(),
            receives: expected.map(|e| (rank + 1, bytes(e))).into_iter().collect(),
            buffer: cast_slice_mut(data),
            ..Moves::default()
        })?;
    }
    Ok(())
}

/// Each rank's part travels both ways along the line, or half-way round the ring.
pub(super) fn all_gather_line(
    running: &mut Running<'_>,
    buffer: &mut [u8],
    parts: &[Range<usize>],
) -> Result<(), CommError> {
    let (n, rank) = (running.size(), running.rank);
    let is_closed = running.topology.is_closed();
    // How far parts travel to the right (upwards) and to the left.
    let (right, left) = if is_closed { (n / 2, (n - 1) / 2) } else { (n - 1, n - 1) };
    // The rank that is `distance` before or behind this one, if the line has it.
    let before = |distance: usize| {
        if is_closed { Some((rank + n - distance % n) % n) } else { rank.checked_sub(distance) }
    };
    let behind = |distance: usize| {
        if is_closed {
            Some((rank + distance) % n)
        } else {
            Some(rank + distance).filter(|r| *r < n)
        }
    };
    for step in 0..right.max(left) {
        let mut moves = Moves { buffer: &mut *buffer, ..Moves::default() };
        let part = |of: Option<usize>| of.and_then(|of| parts.get(of).cloned());
        if step < right {
            if let (Some(to), Some(part)) = (behind(1), part(before(step))) {
                moves.sends.push((to, part));
            }
            if let (Some(from), Some(part)) = (before(1), part(before(step + 1))) {
                moves.receives.push((from, part));
            }
        }
        if step < left {
            if let (Some(to), Some(part)) = (before(1), part(behind(step))) {
                moves.sends.push((to, part));
            }
            if let (Some(from), Some(part)) = (behind(1), part(behind(step + 1))) {
                moves.receives.push((from, part));
            }
        }
        running.exchange(moves)?;
    }
    Ok(())
}

/// Everyone's part goes up a spanning tree, and everything down again.
pub(super) fn all_gather_tree(
    running: &mut Running<'_>,
    buffer: &mut [u8],
    parts: &[Range<usize>],
) -> Result<(), CommError> {
    let tree = Tree::new(running, 0)?;
    for child in &tree.children {
        let receives = tree.below(*child).filter_map(|of| Some((*child, parts.get(of)?.clone())));
        running.exchange(Moves { receives: receives.collect(), buffer, ..Moves::default() })?;
    }
    if let Some(parent) = tree.parent {
        let sends =
            tree.below(running.rank).filter_map(|of| Some((parent, parts.get(of)?.clone())));
        running.exchange(Moves { sends: sends.collect(), buffer, ..Moves::default() })?;
    }
    broadcast(running, buffer, 0)
}

/// From the root down a spanning tree.
pub(super) fn broadcast(
    running: &mut Running<'_>,
    buffer: &mut [u8],
    root: usize,
) -> Result<(), CommError> {
    let tree = Tree::new(running, root)?;
    let all = 0..buffer.len();
    if let Some(parent) = tree.parent {
        let receives = vec![(parent, all.clone())];
        running.exchange(Moves { receives, buffer, ..Moves::default() })?;
    }
    let sends = tree.children.iter().map(|child| (*child, all.clone())).collect();
    running.exchange(Moves { sends, buffer, ..Moves::default() })
}

/// A message of the root's length down a spanning tree.
pub(super) fn broadcast_message(
    running: &mut Running<'_>,
    message: &mut Vec<u8>,
    most: u64,
    root: usize,
) -> Result<(), CommError> {
    let tree = Tree::new(running, root)?;
    if let Some(parent) = tree.parent {
        let message = Some((parent, &mut *message, most));
        running.exchange(Moves { message, ..Moves::default() })?;
    }
    let sends = tree.children.iter().map(|child| (*child, 0..message.len())).collect();
    running.exchange(Moves { sends, source: Some(message), ..Moves::default() })
}

/// Gathers everything, then folds it.
pub(super) fn relay<T: Element>(
    running: &mut Running<'_>,
    data: &mut [T],
    op: ReduceOp,
) -> Result<(), CommError> {
    let (n, rank) = (running.size(), running.rank);
    let bytes = size_of_val(data);
    let parts: Vec<Range<usize>> = (0..n).map(|r| r * bytes..(r + 1) * bytes).collect();
    let mut all = vec![T::zeroed(); n * data.len()];
    if let Some(own) = all.get_mut(rank * data.len()..(rank + 1) * data.len()) {
        own.copy_from_slice(data);
    }
    all_gather_tree(running, cast_slice_mut(&mut all), &parts)?;
    let all: &[u8] = cast_slice(&all);
    let parts: Vec<&[u8]> = parts.into_iter().filter_map(|p| all.get(p)).collect();
    if let (Some(before), Some(after)) = (parts.get(..rank), parts.get(rank + 1..)) {
        fold::<T>(op, before, cast_slice_mut(data), after);
    }
    Ok(())
}

/// A rank's place in a spanning tree.
struct Tree {
    parents: Vec<usize>,
    parent: Option<usize>,
    children: Vec<usize>,
}

impl Tree {
    fn new(running: &Running<'_>, root: usize) -> Result<Self, CommError> {
        let parents = running.topology.tree(root).ok_or_else(|| CommError::Arguments {
            operation: running.around.operation,
            reason: "the links do not connect all ranks".to_owned(),
        })?;
        let rank = running.rank;
        let parent = parents.get(rank).copied().filter(|_| rank != root);
        let is_child = |c: &usize| *c != root && parents.get(*c) == Some(&rank);
        let children = (0..parents.len()).filter(is_child).collect();
        Ok(Self { parents, parent, children })
    }

    /// A rank and all whose way to the root goes through it.
    fn below(&self, rank: usize) -> impl Iterator<Item = usize> {
        (0..self.parents.len()).filter(move |of| {
            let mut at = *of;
            while at != rank {
                match self.parents.get(at) {
                    Some(parent) if *parent != at => at = *parent,
                    _ => return false,
                }
            }
            true
        })
    }
}
