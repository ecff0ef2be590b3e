//! Groups of ranks and their collectives.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytemuck::{cast_slice, cast_slice_mut};

use crate::element::reduce;
use crate::exchange::{self, Incoming, Links, Outgoing, Payload, Surroundings};
use crate::frame::{Header, Kind, REASON_MAX};
use crate::outbox::OutboxLink;
use crate::{CommError, Element, Link, Operation, Outbox, ReduceOp, StreamLink};

/// Up to this many bytes every rank sends all its data to every other: one message time. Beyond,
/// each rank reduces a part and passes it on: less data.
const ONE_SHOT_MAX: usize = 64 << 10;

/// Settings of a group.
#[derive(Clone, Copy, Debug)]
pub struct GroupConfig {
    /// The attempt at running the instance: frames of another are refused.
    pub epoch: u64,
    /// Bound on each operation.
    pub timeout: Duration,
    /// How long a wait tries before it parks. Zero where ranks outnumber cores.
    pub spin: Duration,
    /// Bound on messages whose length the sender decides, in bytes.
    pub message_bytes_max: u64,
    /// Lets sends go on in the background, for ranks that compute meanwhile.
    pub outbox: Option<Outbox>,
}

impl Default for GroupConfig {
    fn default() -> Self {
        Self {
            epoch: 0,
            timeout: Duration::from_secs(1),
            spin: Duration::ZERO,
            message_bytes_max: 64 << 20,
            outbox: None,
        }
    }
}

/// Stops a rank's waits from another thread.
#[derive(Clone, Debug, Default)]
pub struct AbortHandle(Arc<AtomicBool>);

impl AbortHandle {
    /// Makes the operation under way, and all later ones, fail with [`CommError::Aborted`]: within
    /// some 50 ms.
    pub fn abort(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// The links of a rank to all others of the world, shared by its groups.
struct Mesh {
    links: Links,
    /// The first error: final.
    failure: Option<CommError>,
}

/// Some ranks of a world, acting together. All members call the same operations in the same order.
pub struct Group {
    mesh: Arc<Mutex<Mesh>>,
    abort: AbortHandle,
    config: GroupConfig,
    /// World ranks of the members, in order.
    members: Vec<usize>,
    /// This rank's place among them.
    rank: usize,
    /// Tells groups over the same links apart.
    id: u16,
    /// Groups split off so far.
    splits: u16,
    /// Operations so far.
    number: u64,
}

/// A world of `size` ranks within one process, for tests and for threads as ranks.
///
/// # Errors
/// [`CommError::Rendezvous`] if the system has no more sockets.
pub fn local_mesh(size: usize, config: &GroupConfig) -> Result<Vec<Group>, CommError> {
    let mut links: Vec<Links> = (0..size).map(|_| (0..size).map(|_| None).collect()).collect();
    for a in 0..size {
        for b in a + 1..size {
            let failed =
                |e: std::io::Error| CommError::Rendezvous { rank: a, reason: e.to_string() };
            let (at_a, at_b) = StreamLink::pair().map_err(failed)?;
            let mut put = |rank: usize, peer: usize, link: Box<dyn Link>| {
                if let Some(slot) = links.get_mut(rank).and_then(|l| l.get_mut(peer)) {
                    *slot = Some(link);
                }
            };
            put(a, b, Box::new(at_a));
            put(b, a, Box::new(at_b));
        }
    }
    Ok(links.into_iter().enumerate().map(|(rank, l)| Group::new(rank, l, config)).collect())
}

impl Group {
    /// The world of a rank with links to all others (`None` at its own place).
    pub fn new(rank: usize, links: Vec<Option<Box<dyn Link>>>, config: &GroupConfig) -> Self {
        let queued = |link: Option<Box<dyn Link>>| match (link, config.outbox) {
            (Some(link), Some(outbox)) => Some(Box::new(OutboxLink::new(link, outbox)) as _),
            (link, _) => link,
        };
        let links: Links = links.into_iter().map(queued).collect();
        Self {
            members: (0..links.len()).collect(),
            mesh: Arc::new(Mutex::new(Mesh { links, failure: None })),
            abort: AbortHandle::default(),
            config: *config,
            rank,
            id: 0,
            splits: 0,
            number: 0,
        }
    }

    /// This rank, counted within the group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of members.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// The attempt at running the instance.
    pub fn epoch(&self) -> u64 {
        self.config.epoch
    }

    /// Bounds each later operation.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.config.timeout = timeout;
    }

    /// Stops this rank's waits, in this group and all that share its links.
    pub fn abort_handle(&self) -> AbortHandle {
        self.abort.clone()
    }

    /// A group of some of this group's members, in the order given, over the same links; `None` if
    /// this rank is none of them. Every rank must call `split` equally often, and every member of
    /// the new group with the same list; disjoint groups may be split off in one go.
    ///
    /// # Errors
    /// [`CommError::Arguments`] if the list has strangers or repetitions.
    pub fn split(&mut self, members: &[usize]) -> Result<Option<Self>, CommError> {
        let bad = |reason: String| CommError::Arguments { operation: Operation::Barrier, reason };
        let mut world = Vec::new();
        for m in members {
            match self.members.get(*m) {
                Some(w) if !world.contains(w) => world.push(*w),
                _ => return Err(bad(format!("rank {m} is no member, or named twice"))),
            }
        }
        self.splits += 1;
        let place = members.iter().position(|m| *m == self.rank);
        Ok(place.map(|rank| Self {
            mesh: Arc::clone(&self.mesh),
            abort: self.abort.clone(),
            config: self.config,
            members: world,
            rank,
            // Unique for groups split off the world, which is as deep as it goes.
            id: self.id.wrapping_mul(256).wrapping_add(self.splits),
            splits: 0,
            number: 0,
        }))
    }

    /// Combines the data of all members, element by element, in place and on all of them. Folded
    /// in rank order: the result has the same bits everywhere. 16-bit floats are summed in 32 bits.
    ///
    /// # Errors
    /// [`CommError`] if a member is lost, late or out of step (so for all below).
    pub fn all_reduce<T: Element>(
        &mut self,
        data: &mut [T],
        op: ReduceOp,
    ) -> Result<(), CommError> {
        let n = self.size();
        if n == 1 {
            return self.check();
        }
        if std::mem::size_of_val(data) > ONE_SHOT_MAX {
            let counts = even(data.len(), n);
            let mut part = vec![T::zeroed(); counts.get(self.rank).copied().unwrap_or(0)];
            self.reduce_scatter(data, &counts, &mut part, op)?;
            return self.all_gather(&part, &counts, data);
        }
        let own = data.to_vec();
        let sends = self.others().map(|peer| (peer, cast_slice(&own))).collect();
        self.reduce_received(Operation::AllReduce, sends, &own, data, op)
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
        let receives = self.places(mine, counts, out);
        let sends = self.others().map(|peer| (peer, cast_slice(mine))).collect();
        self.exchange(operation, sends, receives)
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
        let mut sends = Vec::new();
        let mut own: &[T] = &[];
        let mut rest = data;
        for (peer, count) in counts.iter().enumerate() {
            let Some((part, next)) = rest.split_at_checked(*count) else { break };
            rest = next;
            if peer == self.rank {
                own = part;
            } else {
                sends.push((peer, cast_slice(part)));
            }
        }
        self.reduce_received(operation, sends, own, out, op)
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
        if self.rank != root {
            let total = counts.iter().sum();
            self.check_counts(operation, mine.len(), counts, total)?;
            let sends = if mine.is_empty() { Vec::new() } else { vec![(root, cast_slice(mine))] };
            return self.exchange(operation, sends, Vec::new());
        }
        self.check_counts(operation, mine.len(), counts, out.len())?;
        let mut receives = self.places(mine, counts, out);
        // Who has nothing sends nothing.
        receives.retain(|(_, part)| !part.is_empty());
        self.exchange(operation, Vec::new(), receives)
    }

    /// Brings `root`'s data to all members.
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn broadcast<T: Element>(&mut self, data: &mut [T], root: usize) -> Result<(), CommError> {
        self.check_member(Operation::Broadcast, root)?;
        if self.rank == root {
            let sends = self.others().map(|peer| (peer, cast_slice(&*data))).collect();
            return self.exchange(Operation::Broadcast, sends, Vec::new());
        }
        self.exchange(Operation::Broadcast, Vec::new(), vec![(root, cast_slice_mut(data))])
    }

    /// Brings a message of `root` to all members, which need not know its length.
    ///
    /// # Errors
    /// As [`Group::all_reduce`]; [`CommError::Protocol`] if it exceeds the bound on messages.
    pub fn broadcast_bytes(&mut self, data: &mut Vec<u8>, root: usize) -> Result<(), CommError> {
        let operation = Operation::Broadcast;
        self.check_member(operation, root)?;
        let most = self.config.message_bytes_max;
        if self.rank == root {
            if data.len() as u64 > most {
                let reason = format!("{} bytes exceed the {most} allowed", data.len());
                return Err(CommError::Arguments { operation, reason });
            }
            let sends = self.others().map(|peer| (peer, data.as_slice())).collect();
            return self.exchange(operation, sends, Vec::new());
        }
        self.run(operation, Vec::new(), vec![(root, Payload::Any(data, most))])
    }

    /// Sends data to a member, which must [`Group::recv`] as much of it. All other members of the
    /// group must take part in as many transfers, or use a group of two.
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn send<T: Element>(&mut self, data: &[T], to: usize) -> Result<(), CommError> {
        self.check_peer(to)?;
        self.exchange(Operation::Transfer, vec![(to, cast_slice(data))], Vec::new())
    }

    /// Receives what a member [`Group::send`]s.
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn recv<T: Element>(&mut self, data: &mut [T], from: usize) -> Result<(), CommError> {
        self.check_peer(from)?;
        self.exchange(Operation::Transfer, Vec::new(), vec![(from, cast_slice_mut(data))])
    }

    /// Returns when all members have called it.
    ///
    /// # Errors
    /// As [`Group::all_reduce`].
    pub fn barrier(&mut self) -> Result<(), CommError> {
        let mut inboxes = vec![[0u8; 0]; self.size()];
        let peers: Vec<usize> = self.others().collect();
        let sends = peers.iter().map(|peer| (*peer, &[][..])).collect();
        let receives =
            inboxes.iter_mut().zip(&peers).map(|(b, p)| (*p, b.as_mut_slice())).collect();
        self.exchange(Operation::Barrier, sends, receives)
    }

    /// Tells the other ranks why this one gives up, and closes all links.
    pub fn leave(&mut self, reason: &str) {
        let error =
            CommError::Aborted { rank: self.world(self.rank), operation: Operation::Barrier };
        let mut mesh = lock(&self.mesh);
        fail(&mut mesh, self.config.epoch, &error, reason);
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.size()).filter(move |peer| *peer != rank)
    }

    fn world(&self, member: usize) -> usize {
        self.members.get(member).copied().unwrap_or(usize::MAX)
    }

    /// The group's error, if it has failed before.
    fn check(&self) -> Result<(), CommError> {
        lock(&self.mesh).failure.clone().map_or(Ok(()), Err)
    }

    fn check_member(&self, operation: Operation, rank: usize) -> Result<(), CommError> {
        if rank < self.size() {
            return Ok(());
        }
        let reason = format!("rank {rank} is none of {}", self.size());
        Err(CommError::Arguments { operation, reason })
    }

    fn check_peer(&self, peer: usize) -> Result<(), CommError> {
        self.check_member(Operation::Transfer, peer)?;
        if peer != self.rank {
            return Ok(());
        }
        let reason = format!("rank {peer} can't send to itself");
        Err(CommError::Arguments { operation: Operation::Transfer, reason })
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

    /// Where the others' data goes in `out`, which holds `counts[rank]` elements of each member;
    /// this rank's own are put there.
    fn places<'a, T: Element>(
        &self,
        mine: &[T],
        counts: &[usize],
        out: &'a mut [T],
    ) -> Vec<(usize, &'a mut [u8])> {
        let mut places = Vec::new();
        let mut rest = out;
        for (peer, count) in counts.iter().enumerate() {
            let Some((part, next)) = rest.split_at_mut_checked(*count) else { break };
            rest = next;
            if peer == self.rank {
                part.copy_from_slice(mine);
            } else {
                places.push((peer, cast_slice_mut(part)));
            }
        }
        places
    }

    /// Sends, receives as much as `out` holds from each other member, and folds that with `own` in
    /// rank order.
    fn reduce_received<T: Element>(
        &mut self,
        operation: Operation,
        sends: Vec<(usize, &[u8])>,
        own: &[T],
        out: &mut [T],
        op: ReduceOp,
    ) -> Result<(), CommError> {
        let mut parts = vec![vec![T::zeroed(); out.len()]; self.size() - 1];
        let receives = self.others().zip(&mut parts).map(|(peer, p)| (peer, cast_slice_mut(p)));
        self.exchange(operation, sends, receives.collect())?;
        reduce(&in_rank_order(self.rank, own, &parts), out, op);
        Ok(())
    }

    fn exchange(
        &mut self,
        operation: Operation,
        sends: Vec<(usize, &[u8])>,
        receives: Vec<(usize, &mut [u8])>,
    ) -> Result<(), CommError> {
        let receives = receives.into_iter().map(|(peer, b)| (peer, Payload::Exact(b))).collect();
        self.run(operation, sends, receives)
    }

    /// Runs one operation of the group; an error is final, and told to the others.
    fn run(
        &mut self,
        operation: Operation,
        sends: Vec<(usize, &[u8])>,
        receives: Vec<(usize, Payload<'_>)>,
    ) -> Result<(), CommError> {
        let mut mesh = lock(&self.mesh);
        if let Some(failure) = &mesh.failure {
            return Err(failure.clone());
        }
        self.number += 1;
        let header = |length: usize| Header {
            kind: Kind::Data(operation),
            group: self.id,
            epoch: self.config.epoch,
            number: self.number,
            length: length as u64,
        };
        let mut outgoing: Vec<Outgoing<'_>> = sends
            .into_iter()
            .map(|(peer, data)| Outgoing::new(self.world(peer), &header(data.len()), data))
            .collect();
        let mut incoming: Vec<Incoming<'_>> = receives
            .into_iter()
            .map(|(peer, payload)| Incoming::new(self.world(peer), header(0), payload))
            .collect();
        let around = Surroundings {
            rank: self.world(self.rank),
            operation,
            timeout: self.config.timeout,
            spin: self.config.spin,
            aborted: &|| self.abort.0.load(Ordering::Relaxed),
        };
        let outcome = exchange::run(&mut mesh.links, &mut outgoing, &mut incoming, &around);
        if let Err(e) = &outcome {
            fail(&mut mesh, self.config.epoch, e, &e.to_string());
        }
        outcome
    }
}

fn lock(mesh: &Mutex<Mesh>) -> MutexGuard<'_, Mesh> {
    mesh.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Marks the mesh as failed, tells the peers why as far as their links take it, and closes them.
fn fail(mesh: &mut Mesh, epoch: u64, error: &CommError, reason: &str) {
    if mesh.failure.is_none() {
        mesh.failure = Some(error.clone());
    }
    let reason = reason.as_bytes();
    let reason = reason.get(..REASON_MAX as usize).unwrap_or(reason);
    let header =
        Header { kind: Kind::Abort, group: 0, epoch, number: 0, length: reason.len() as u64 };
    let frame = [header.encode().as_slice(), reason].concat();
    for link in mesh.links.iter_mut().flatten() {
        // A peer in the middle of a frame takes these bytes for its rest, and then sees the end.
        let _ = link.try_send(&[std::io::IoSlice::new(&frame)]);
        link.close();
    }
}

/// `n` shares of `total`, as even as can be.
fn even(total: usize, n: usize) -> Vec<usize> {
    (0..n).map(|i| total / n + usize::from(i < total % n)).collect()
}

/// All ranks' data, this rank's own in its place.
fn in_rank_order<'a, T>(rank: usize, own: &'a [T], others: &'a [Vec<T>]) -> Vec<&'a [T]> {
    let (before, behind) = others.split_at(rank.min(others.len()));
    before.iter().map(Vec::as_slice).chain([own]).chain(behind.iter().map(Vec::as_slice)).collect()
}
