//! What groups can do.

use std::ops::Range;

use bytemuck::{cast_slice, cast_slice_mut};

use super::Group;
use super::direct::{doubling, folding, of_peers, one_shot, ranges, two_step};
use super::forwarding::{
    all_gather_line, all_gather_tree, broadcast, broadcast_message, line, relay,
};
use super::running::{Moves, Running};
use crate::tuning::{self, Algorithm};
use crate::{CommError, Element, Operation, ReduceOp};

impl Group {
    /// Combines the data of all members, element by element, in place and on all of them. Folded
    /// in rank order: the result has the same bits everywhere, whatever the algorithm. 16-bit floats
    /// are summed in 32 bits.
    ///
    /// # Errors
    /// [`CommError`] if a member is lost, late or out of step (so for all below).
    pub fn all_reduce<T: Element>(
        &mut self,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<(), CommError> {
        if self.size() == 1 {
            return self.check();
        }
        let operation = Operation::AllReduce;
        let algorithm = self.algorithm(size_of_val(data));
        if !tuning::is_possible(algorithm, &self.topology) {
            let reason = format!("the links do not allow {algorithm}");
            return Err(CommError::Arguments { operation, reason });
        }
        self.run(operation, |running| match algorithm {
            Algorithm::OneShot => one_shot(running, data, op),
            Algorithm::TwoStep => two_step(running, data, op),
            Algorithm::Doubling => doubling(running, data, op),
            Algorithm::Line => line(running, data, op),
            Algorithm::Relay => relay(running, data, op),
        })
    }

    /// How an [`Group::all_reduce`] of so many bytes goes.
    pub fn algorithm(&self, bytes: usize) -> Algorithm {
        self.config.algorithm.unwrap_or_else(|| tuning::all_reduce(&self.topology, bytes))
    }

    /// Brings `counts[rank]` elements of each member to all of them, one after the other.
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn all_gather<T: Element>(
        &mut self,
        mine: &[T],
        counts: &[usize],
        out: &mut [T],
    ) -> Result<(), CommError> {
        let operation = Operation::AllGather;
        self.check_counts(operation, mine.len(), counts, out.len())?;
        let parts = ranges::<T>(counts);
        let buffer = self.place(mine, &parts, out);
        self.run(operation, |running| all_gather(running, buffer, &parts))
    }

    /// Combines the data of all members; each gets its own `counts[rank]` elements of the result.
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn reduce_scatter<T: Element>(
        &mut self,
        data: &[T],
        counts: &[usize],
        out: &mut [T],
        op: ReduceOp,
    ) -> Result<(), CommError> {
        let operation = Operation::ReduceScatter;
        self.check_counts(operation, out.len(), counts, data.len())?;
        let parts = ranges::<T>(counts);
        let own = parts.get(self.rank).cloned().unwrap_or_default();
        let own = own.start / size_of::<T>()..own.end / size_of::<T>();
        if !self.topology.is_full() {
            let mut all = data.to_vec();
            let is_line = self.topology.is_line();
            return self.run(operation, |running| {
                let reduce = if is_line { line } else { relay };
                reduce(running, &mut all, op)?;
                out.copy_from_slice(all.get(own).unwrap_or_default());
                Ok(())
            });
        }
        out.copy_from_slice(data.get(own).unwrap_or_default());
        self.run(operation, |running| {
            running.exchange(Moves {
                source: Some(cast_slice(data)),
                sends: of_peers(running, &parts).collect(),
                fold: Some(folding::<T>(0..size_of_val(out), op, false)),
                buffer: cast_slice_mut(out),
                ..Moves::default()
            })
        })
    }

    /// Brings `counts[rank]` elements of each member to `root`, one after the other; only there
    /// `out` is used.
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn gather<T: Element>(
        &mut self,
        mine: &[T],
        counts: &[usize],
        out: &mut [T],
        root: usize,
    ) -> Result<(), CommError> {
        let operation = Operation::Gather;
        self.check_member(operation, root)?;
        let is_root = self.rank == root;
        let total = counts.iter().sum();
        self.check_counts(operation, mine.len(), counts, if is_root { out.len() } else { total })?;
        let parts = ranges::<T>(counts);
        if !self.topology.is_full() {
            let mut all = vec![T::zeroed(); total];
            let buffer = self.place(mine, &parts, &mut all);
            self.run(operation, |running| all_gather(running, buffer, &parts))?;
            if is_root {
                out.copy_from_slice(&all);
            }
            return Ok(());
        }
        // Who has nothing sends nothing.
        if is_root {
            let buffer = self.place(mine, &parts, out);
            return self.run(operation, |running| {
                let receives = of_peers(running, &parts).filter(|(_, p)| !p.is_empty()).collect();
                running.exchange(Moves { receives, buffer, ..Moves::default() })
            });
        }
        let mine: &[u8] = cast_slice(mine);
        let sends = Some((root, 0..mine.len())).filter(|_| !mine.is_empty());
        self.run(operation, |running| {
            let sends = sends.into_iter().collect();
            running.exchange(Moves { sends, source: Some(mine), ..Moves::default() })
        })
    }

    /// Brings `root`'s data to all members.
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn broadcast<T: Element>(&mut self, data: &mut [T], root: usize) -> Result<(), CommError> {
        self.check_member(Operation::Broadcast, root)?;
        self.run(Operation::Broadcast, |running| broadcast(running, cast_slice_mut(data), root))
    }

    /// Brings a message of `root` to all members, which need not know its length.
    ///
    /// # Errors
    /// As [`Group::all_reduce`]; [`CommError::Protocol`] if it exceeds the bound on messages.
    pub fn broadcast_bytes(&mut self, data: &mut Vec<u8>, root: usize) -> Result<(), CommError> {
        let operation = Operation::Broadcast;
        self.check_member(operation, root)?;
        let most = self.config.message_bytes_max;
        if self.rank == root && data.len() as u64 > most {
            let reason = format!("{} bytes exceed the {most} allowed", data.len());
            return Err(CommError::Arguments { operation, reason });
        }
        self.run(operation, |running| broadcast_message(running, data, most, root))
    }

    /// Sends data to a member, which must [`Group::recv`] as much of it.
    ///
    /// # Errors
    /// As [`Group::all_reduce`]; [`CommError::Arguments`] if there is no link to the member.
    pub fn send<T: Element>(&mut self, data: &[T], to: usize) -> Result<(), CommError> {
        self.check_peer(to)?;
        let data: &[u8] = cast_slice(data);
        self.transfer(to, true, |running| {
            let sends = vec![(to, 0..data.len())];
            running.exchange(Moves { source: Some(data), sends, ..Moves::default() })
        })
    }

    /// Receives what a member [`Group::send`]s.
    ///
    /// # Errors
    /// As [`Group::send`].
    pub fn recv<T: Element>(&mut self, data: &mut [T], from: usize) -> Result<(), CommError> {
        self.check_peer(from)?;
        let buffer: &mut [u8] = cast_slice_mut(data);
        self.transfer(from, false, |running| {
            let receives = vec![(from, 0..buffer.len())];
            running.exchange(Moves { receives, buffer, ..Moves::default() })
        })
    }

    /// Returns when all members have called it.
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn barrier(&mut self) -> Result<(), CommError> {
        let nothing = vec![0..0; self.size()];
        self.run(Operation::Barrier, |running| all_gather(running, &mut [], &nothing))
    }

    fn check_member(&self, operation: Operation, rank: usize) -> Result<(), CommError> {
        if rank < self.size() {
            return Ok(());
        }
        let reason = format!("rank {rank} is none of {}", self.size());
        Err(CommError::Arguments { operation, reason })
    }

    fn check_peer(&self, peer: usize) -> Result<(), CommError> {
        let operation = Operation::Transfer;
        self.check_member(operation, peer)?;
        if peer == self.rank {
            let reason = format!("rank {peer} can't send to itself");
            return Err(CommError::Arguments { operation, reason });
        }
        Ok(())
    }

    fn check_counts(
        &self,
        operation: Operation,
        mine: usize,
        counts: &[usize],
        all: usize,
    ) -> Result<(), CommError> {
        let total = counts.iter().try_fold(0usize, |sum, c| sum.checked_add(*c));
        if counts.get(self.rank) == Some(&mine) && counts.len() == self.size() && total == Some(all)
        {
            return Ok(());
        }
        let reason = format!("counts {counts:?} do not fit {mine} elements of {all} on this rank");
        Err(CommError::Arguments { operation, reason })
    }

    /// Puts this rank's own where it belongs in `out`; that as bytes.
    fn place<'o, T: Element>(
        &self,
        mine: &[T],
        parts: &[Range<usize>],
        out: &'o mut [T],
    ) -> &'o mut [u8] {
        let buffer: &mut [u8] = cast_slice_mut(out);
        let own = parts.get(self.rank).cloned().and_then(|own| buffer.get_mut(own));
        if let Some(own) = own {
            own.copy_from_slice(cast_slice(mine));
        }
        buffer
    }
}

/// Brings each rank's part of the buffer to all.
fn all_gather(
    running: &mut Running<'_>,
    buffer: &mut [u8],
    parts: &[Range<usize>],
) -> Result<(), CommError> {
    if running.topology.is_full() {
        let own = parts.get(running.rank).cloned().unwrap_or_default();
        return running.exchange(Moves {
            sends: running.others().map(|peer| (peer, own.clone())).collect(),
            receives: of_peers(running, parts).collect(),
            buffer,
            ..Moves::default()
        });
    }
    if running.topology.is_line() {
        all_gather_line(running, buffer, parts)
    } else {
        all_gather_tree(running, buffer, parts)
    }
}
