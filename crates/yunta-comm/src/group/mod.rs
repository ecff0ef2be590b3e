//! Groups of ranks and their collectives.

mod collectives;
mod direct;
mod forwarding;
mod running;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[cfg(target_os = "linux")]
use crate::ShmLink;
use crate::exchange::{Peer, Peers, Surroundings};
use crate::frame::{Header, Kind, REASON_MAX, trailer};
use crate::outbox::OutboxLink;
use crate::topology::Topology;
use crate::tuning::Algorithm;
use crate::{CommError, Link, Operation, Outbox, StreamLink, Transport};
use running::Running;

/// Settings of a group.
#[derive(Clone, Copy, Debug)]
pub struct GroupConfig {
    /// The attempt at running the instance: frames of another are refused.
    pub epoch: u64,
    /// Bound on each operation.
    pub timeout: Duration,
    /// How long a wait tries before it parks. Zero where ranks, and what else computes, outnumber
    /// the cores.
    pub spin: Duration,
    /// Bound on messages whose length the sender decides, in bytes.
    pub message_bytes_max: u64,
    /// Lets sends go on in the background, for ranks that compute meanwhile.
    pub outbox: Option<Outbox>,
    /// How to reduce, if not by the table.
    pub algorithm: Option<Algorithm>,
}

impl Default for GroupConfig {
    fn default() -> Self {
        Self {
            epoch: 0,
            timeout: Duration::from_secs(1),
            spin: Duration::ZERO,
            message_bytes_max: 64 << 20,
            outbox: None,
            algorithm: None,
        }
    }
}

impl GroupConfig {
    /// What [`GroupConfig::spin`] is best where so many threads of ranks compute on this host: some
    /// 100 µs if each has a core, since sleeping costs more than most waits; else none.
    pub fn spin_for(threads: usize) -> Duration {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        if threads <= cores { Duration::from_micros(100) } else { Duration::ZERO }
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
    peers: Peers,
    /// Frames of the operation under way, by peer.
    sent: Vec<u32>,
    received: Vec<u32>,
    /// The first error: final.
    failure: Option<CommError>,
}

impl Drop for Mesh {
    /// All at once: some links take a moment to see that the peer has everything.
    fn drop(&mut self) {
        self.peers.iter_mut().flatten().for_each(|p| p.link.close());
    }
}

/// Some ranks of a world, acting together. All members call the same collectives in the same order;
/// transfers between two of them concern these alone, and stand in the same place among both's
/// collectives.
pub struct Group {
    mesh: Arc<Mutex<Mesh>>,
    abort: AbortHandle,
    config: GroupConfig,
    /// World ranks of the members, in order.
    members: Vec<usize>,
    /// The members' links among each other.
    topology: Topology,
    /// This rank's place among them.
    rank: usize,
    /// Tells groups over the same links apart.
    id: u16,
    /// Groups split off so far.
    splits: u16,
    /// Collectives so far.
    number: u64,
    /// Transfers so far, to and from each member.
    transfers: Vec<[u64; 2]>,
}

/// A world of `size` ranks within one process, linked by local sockets, for tests and for threads as
/// ranks.
///
/// # Errors
/// [`CommError::Rendezvous`] if the system has no more sockets.
pub fn local_mesh(size: usize, config: &GroupConfig) -> Result<Vec<Group>, CommError> {
    mesh_of(&Topology::full(size, Transport::Tcp), config, |_, _| {
        let (a, b) = StreamLink::pair()?;
        Ok((Box::new(a), Box::new(b)))
    })
}

/// As [`local_mesh`], through shared memory.
///
/// # Errors
/// As [`local_mesh`].
#[cfg(target_os = "linux")]
pub fn shm_mesh(size: usize, config: &GroupConfig) -> Result<Vec<Group>, CommError> {
    mesh_of(&Topology::full(size, Transport::Shm), config, |_, _| {
        let (a, b) = ShmLink::pair()?;
        Ok((Box::new(a), Box::new(b)))
    })
}

/// Both ends of a link.
pub type Ends = (Box<dyn Link>, Box<dyn Link>);

/// The ranks of a world within one process, with links that `link(a, b)` makes wherever the topology
/// has one.
///
/// # Errors
/// [`CommError::Rendezvous`] if a link can't be made.
pub fn mesh_of(
    topology: &Topology,
    config: &GroupConfig,
    mut link: impl FnMut(usize, usize) -> std::io::Result<Ends>,
) -> Result<Vec<Group>, CommError> {
    let size = topology.size();
    let mut links: Vec<Vec<Option<Box<dyn Link>>>> =
        (0..size).map(|_| (0..size).map(|_| None).collect()).collect();
    for a in 0..size {
        for b in a + 1..size {
            if topology.link(a, b).is_none() {
                continue;
            }
            let failed =
                |e: std::io::Error| CommError::Rendezvous { rank: a, reason: e.to_string() };
            let (at_a, at_b) = link(a, b).map_err(failed)?;
            let mut put = |rank: usize, peer: usize, link: Box<dyn Link>| {
                if let Some(slot) = links.get_mut(rank).and_then(|l| l.get_mut(peer)) {
                    *slot = Some(link);
                }
            };
            put(a, b, at_a);
            put(b, a, at_b);
        }
    }
    let group = |(rank, links)| Group::with_topology(rank, links, topology.clone(), config);
    Ok(links.into_iter().enumerate().map(group).collect())
}

impl Group {
    /// The world of a rank with links to all others (`None` at its own place), all of one kind.
    pub fn new(rank: usize, links: Vec<Option<Box<dyn Link>>>, config: &GroupConfig) -> Self {
        let transport = links.iter().flatten().map(|l| l.transport()).next();
        let topology = Topology::full(links.len(), transport.unwrap_or(Transport::Tcp));
        Self::with_topology(rank, links, topology, config)
    }

    /// The world of a rank in which links differ, or some are missing. All ranks must be given the
    /// same topology.
    pub fn with_topology(
        rank: usize,
        links: Vec<Option<Box<dyn Link>>>,
        topology: Topology,
        config: &GroupConfig,
    ) -> Self {
        let queued = |link: Box<dyn Link>| match config.outbox {
            Some(outbox) => Box::new(OutboxLink::new(link, outbox)) as Box<dyn Link>,
            None => link,
        };
        let peers: Peers = links.into_iter().map(|link| Some(Peer::new(queued(link?)))).collect();
        let size = peers.len();
        let mesh = Mesh { peers, sent: vec![0; size], received: vec![0; size], failure: None };
        Self {
            members: (0..size).collect(),
            topology,
            mesh: Arc::new(Mutex::new(mesh)),
            abort: AbortHandle::default(),
            config: *config,
            rank,
            id: 0,
            splits: 0,
            number: 0,
            transfers: vec![[0; 2]; size],
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

    /// The members' links among each other.
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The name of this rank's link to a member: kind and addresses.
    pub fn link_name(&self, member: usize) -> Option<String> {
        let mesh = lock(&self.mesh);
        mesh.peers.get(self.world(member)).and_then(Option::as_ref).map(|p| p.link.name())
    }

    /// Must be given alike on all ranks.
    pub(crate) fn set_topology(&mut self, topology: Topology) {
        self.topology = topology;
    }

    /// Bounds each later operation.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.config.timeout = timeout;
    }

    /// How later reductions go, if not by the table. Alike on all ranks.
    pub fn set_algorithm(&mut self, algorithm: Option<Algorithm>) {
        self.config.algorithm = algorithm;
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
            topology: self.topology.of(members),
            members: world,
            rank,
            // Unique for groups split off the world, which is as deep as it goes.
            id: self.id.wrapping_mul(256).wrapping_add(self.splits),
            splits: 0,
            number: 0,
            transfers: vec![[0; 2]; members.len()],
        }))
    }

    /// Tells the other ranks why this one gives up, and closes all links.
    pub fn leave(&mut self, reason: &str) {
        let error =
            CommError::Aborted { rank: self.world(self.rank), operation: Operation::Barrier };
        let mut mesh = lock(&self.mesh);
        fail(&mut mesh, self.config.epoch, &error, reason);
    }

    fn world(&self, member: usize) -> usize {
        self.members.get(member).copied().unwrap_or(usize::MAX)
    }

    /// The group's error, if it has failed before.
    fn check(&self) -> Result<(), CommError> {
        lock(&self.mesh).failure.clone().map_or(Ok(()), Err)
    }

    /// Runs one collective of the group.
    fn run(
        &mut self,
        operation: Operation,
        work: impl FnOnce(&mut Running<'_>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        self.number += 1;
        self.run_as(operation, self.number, work)
    }

    /// Runs a transfer to or from a member, of which these two know alone.
    fn transfer(
        &mut self,
        peer: usize,
        is_sent: bool,
        work: impl FnOnce(&mut Running<'_>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let count = self.transfers.get_mut(peer).map(|[sent, received]| {
            let count = if is_sent { sent } else { received };
            *count += 1;
            *count
        });
        self.run_as(Operation::Transfer, count.unwrap_or_default(), work)
    }

    /// An error is final, and told to the others.
    fn run_as(
        &mut self,
        operation: Operation,
        number: u64,
        work: impl FnOnce(&mut Running<'_>) -> Result<(), CommError>,
    ) -> Result<(), CommError> {
        let mut mesh = lock(&self.mesh);
        if let Some(failure) = &mesh.failure {
            return Err(failure.clone());
        }
        let around = Surroundings {
            rank: self.world(self.rank),
            epoch: self.config.epoch,
            operation,
            start: Instant::now(),
            timeout: self.config.timeout,
            spin: self.config.spin,
            aborted: &|| self.abort.0.load(Ordering::Relaxed),
        };
        let Mesh { peers, sent, received, .. } = &mut *mesh;
        sent.fill(0);
        received.fill(0);
        let outcome = work(&mut Running {
            peers,
            sent,
            received,
            members: &self.members,
            topology: &self.topology,
            rank: self.rank,
            group: self.id,
            number,
            around: &around,
        });
        if let Err(e) = &outcome
            && !matches!(e, CommError::Arguments { .. })
        {
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
    let header = Header {
        kind: Kind::Abort,
        is_checked: false,
        group: 0,
        epoch,
        number: 0,
        length: reason.len() as u64,
        part: 0,
    };
    let padding = vec![0; trailer(reason.len(), false)];
    let frame = [header.encode().as_slice(), reason, &padding].concat();
    for peer in mesh.peers.iter_mut().flatten() {
        // A peer in the middle of a frame takes these bytes for its rest, and then sees the end.
        let _ = peer.send(&[std::io::IoSlice::new(&frame)]);
        peer.link.close();
    }
}
