//! How the ranks of a mesh come together.
//!
//! Every rank listens; the higher rank of each pair connects to the lower, as many times as the pair
//! has connections. Both sides compare their configuration, prove that they know the token, and agree
//! on what links them (see `handshake`) before a connection counts. Each connection has a short
//! deadline and a thread of its own, so that a stranger who says nothing, or nonsense, delays nobody.
//! In the end all ranks tell each other how they are linked: they must choose alike.

mod handshake;

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use crate::striped::StripedLink;
use crate::{CommError, Group, GroupConfig, Link, StreamLink, Topology, Transport};
pub(crate) use handshake::random;
use handshake::{Handshake, Joined, STEP_TIMEOUT};

const RETRY: Duration = Duration::from_millis(20);
/// Connections that may be in their handshake at once.
const HANDSHAKES_MAX: usize = 64;
/// Connections of a pair.
const LANES_MAX: usize = 64;

/// What a rank needs to join a mesh.
#[derive(Clone)]
pub struct MeshConfig {
    /// This rank.
    pub rank: usize,
    /// Where each rank listens, in rank order: one address, or one per cable.
    pub addresses: Vec<Vec<SocketAddr>>,
    /// Connections per pair over TCP, over which large messages are striped; at least one per
    /// address of the rank that is connected to.
    pub connections: usize,
    /// What must link all pairs. Else the fastest that each allows: shared memory on one host, TCP
    /// between hosts.
    pub transport: Option<Transport>,
    /// Known to all ranks and nobody else.
    pub token: [u8; 32],
    /// Must be equal on all ranks: a digest of the model and its cut, for instance.
    pub config_digest: [u8; 32],
    /// Bound on the whole start-up.
    pub join_timeout: Duration,
    /// Settings of the group that results.
    pub group: GroupConfig,
}

impl MeshConfig {
    /// Connections to a rank from each that is above it.
    fn lanes_to(&self, rank: usize) -> usize {
        let cables = self.addresses.get(rank).map_or(1, Vec::len);
        self.connections.max(cables).clamp(1, LANES_MAX)
    }
}

/// A token from a secret of any length.
pub fn token(secret: &str) -> [u8; 32] {
    use sha2::Digest;
    sha2::Sha256::digest(secret.as_bytes()).into()
}

/// Links by the rank that they lead to.
type Links = Vec<(usize, Box<dyn Link>)>;

#[derive(Clone)]
struct Local {
    config: Arc<MeshConfig>,
    host: [u8; 16],
}

/// Joins the mesh: returns when this rank is connected with all others. The listeners are those of
/// this rank's addresses.
///
/// # Errors
/// [`CommError::Rendezvous`] if a peer does not appear in time, or refuses.
pub fn connect(config: MeshConfig, listeners: Vec<TcpListener>) -> Result<Group, CommError> {
    let (rank, size) = (config.rank, config.addresses.len());
    let failed = |reason: String| CommError::Rendezvous { rank, reason };
    if rank >= size || size > usize::from(u16::MAX) {
        return Err(failed(format!("there is no rank {rank} among {size}")));
    }
    if let Some(t @ (Transport::Verbs | Transport::Emulated)) = config.transport {
        return Err(failed(format!("transport {t} can't be set up over the network yet")));
    }
    let deadline = Instant::now() + config.join_timeout;
    let group = config.group;
    let local = Local { config: Arc::new(config), host: handshake::host() };
    let accepting = local.clone();
    let accepted = std::thread::Builder::new()
        .name("rendezvous".to_owned())
        .spawn(move || accept_all(&accepting, &listeners, deadline))
        .map_err(|e| failed(e.to_string()))?;
    let dialed: Result<Links, String> =
        (0..rank).map(|peer| Ok((peer, local.dial(peer, deadline)?))).collect();
    let accepted =
        accepted.join().map_err(|_| failed("the accepting thread panicked".to_owned()))?;
    let mut links: Vec<Option<Box<dyn Link>>> = (0..size).map(|_| None).collect();
    for (peer, link) in dialed.map_err(failed)?.into_iter().chain(accepted.map_err(failed)?) {
        if let Some(slot) = links.get_mut(peer) {
            *slot = Some(link);
        }
    }
    compare(rank, links, &group, deadline)
}

/// Lets all ranks know how all are linked; the group that results.
fn compare(
    rank: usize,
    links: Vec<Option<Box<dyn Link>>>,
    config: &GroupConfig,
    deadline: Instant,
) -> Result<Group, CommError> {
    let size = links.len();
    let row: Vec<u8> =
        links.iter().map(|l| l.as_ref().map_or(0, |l| l.transport() as u8)).collect();
    let mut group = Group::with_topology(rank, links, Topology::full(size, Transport::Tcp), config);
    // The others may still be waiting for one that comes late.
    group.set_timeout(deadline.saturating_duration_since(Instant::now()).max(config.timeout));
    let mut rows = vec![0; size * size];
    group.all_gather(&row, &vec![size; size], &mut rows)?;
    group.set_timeout(config.timeout);
    let rows =
        rows.chunks(size.max(1)).map(|r| r.iter().map(|t| Transport::from_code(*t)).collect());
    group.set_topology(Topology::new(rows.collect()));
    Ok(group)
}

/// The connections of one peer.
#[derive(Default)]
struct Arrivals {
    lanes: Vec<Option<TcpStream>>,
    link: Option<Box<dyn Link>>,
}

impl Arrivals {
    /// The first of each lane counts; another is an impostor's or a mistake's.
    fn add(&mut self, joined: Joined, lanes: usize) -> Result<(), String> {
        match joined {
            Joined::Whole(link) => {
                self.link.get_or_insert(link);
            }
            Joined::Lane(lane, stream) => {
                self.lanes.resize_with(lanes, || None);
                if let Some(slot) = self.lanes.get_mut(lane) {
                    slot.get_or_insert(stream);
                }
                if self.link.is_none() && self.lanes.iter().all(Option::is_some) {
                    let streams = self.lanes.drain(..).flatten().collect();
                    self.link = Some(link_over(streams)?);
                }
            }
        }
        Ok(())
    }
}

fn link_over(streams: Vec<TcpStream>) -> Result<Box<dyn Link>, String> {
    let links: Result<Vec<_>, _> = streams.into_iter().map(StreamLink::tcp).collect();
    let mut links = links.map_err(|e| e.to_string())?;
    match (links.pop(), links.is_empty()) {
        (Some(only), true) => Ok(Box::new(only)),
        (Some(last), false) => {
            links.push(last);
            Ok(Box::new(StripedLink::new(links)))
        }
        (None, _) => Err("no connection".to_owned()),
    }
}

/// Accepts the ranks above this one, whatever else knocks.
fn accept_all(
    local: &Local,
    listeners: &[TcpListener],
    deadline: Instant,
) -> Result<Links, String> {
    let rank = local.config.rank;
    let lanes = local.config.lanes_to(rank);
    let mut peers: Vec<Arrivals> =
        (rank + 1..local.config.addresses.len()).map(|_| Arrivals::default()).collect();
    for listener in listeners {
        listener.set_nonblocking(true).map_err(|e| e.to_string())?;
    }
    let (sender, arrivals) = mpsc::channel();
    let busy = Arc::new(AtomicUsize::new(0));
    while peers.iter().any(|p| p.link.is_none()) {
        if Instant::now() >= deadline {
            return Err(local.missing(&peers));
        }
        for listener in listeners {
            while busy.load(Ordering::Relaxed) < HANDSHAKES_MAX {
                let Ok((stream, _)) = listener.accept() else { break };
                local.greet_apart(stream, &sender, &busy);
            }
        }
        match arrivals.recv_timeout(RETRY) {
            Ok((peer, joined)) => {
                if let Some(arrivals) = peers.get_mut(peer - rank - 1) {
                    arrivals.add(joined, lanes)?;
                }
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
    }
    let links = peers.into_iter().zip(rank + 1..);
    Ok(links.filter_map(|(arrivals, peer)| Some((peer, arrivals.link?))).collect())
}

impl Local {
    fn handshake(&self) -> Handshake<'_> {
        Handshake { config: &self.config, host: self.host }
    }

    /// Runs a handshake on a thread of its own.
    fn greet_apart(
        &self,
        stream: TcpStream,
        sender: &Sender<(usize, Joined)>,
        busy: &Arc<AtomicUsize>,
    ) {
        let (local, sender, count) = (self.clone(), sender.clone(), Arc::clone(busy));
        busy.fetch_add(1, Ordering::Relaxed);
        let greet = move || {
            if let Ok(arrival) = local.handshake().greet(stream) {
                // Nobody waits any more if all ranks are there.
                let _ = sender.send(arrival);
            }
            count.fetch_sub(1, Ordering::Relaxed);
        };
        if std::thread::Builder::new().name("handshake".to_owned()).spawn(greet).is_err() {
            busy.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Connects to a rank, trying until it is there.
    fn dial(&self, peer: usize, deadline: Instant) -> Result<Box<dyn Link>, String> {
        let addresses = self.config.addresses.get(peer).map_or(&[][..], Vec::as_slice);
        let lanes = self.config.lanes_to(peer);
        let mut arrivals = Arrivals::default();
        for (lane, address) in (0..lanes).zip(addresses.iter().cycle()) {
            let joined = self.dial_lane(peer, lane, *address, deadline)?;
            arrivals.add(joined, lanes)?;
            if arrivals.link.is_some() {
                break;
            }
        }
        arrivals.link.ok_or_else(|| format!("rank {peer} has no address"))
    }

    fn dial_lane(
        &self,
        peer: usize,
        lane: usize,
        address: SocketAddr,
        deadline: Instant,
    ) -> Result<Joined, String> {
        loop {
            let tried = TcpStream::connect_timeout(&address, STEP_TIMEOUT)
                .and_then(|stream| self.handshake().dial(stream, peer, lane));
            let last = match tried {
                Ok(Ok(joined)) => return Ok(joined),
                Ok(Err(refusal)) => return Err(format!("rank {peer} at {address}: {refusal}")),
                Err(e) => e,
            };
            if Instant::now() + RETRY >= deadline {
                return Err(format!("rank {peer} at {address} can't be reached: {last}"));
            }
            std::thread::sleep(RETRY);
        }
    }

    fn missing(&self, peers: &[Arrivals]) -> String {
        let c = &self.config;
        let late = peers.iter().zip(c.rank + 1..).filter(|(p, _)| p.link.is_none());
        let missing: Vec<usize> = late.map(|(_, peer)| peer).collect();
        let seconds = c.join_timeout.as_secs_f64();
        format!("ranks {missing:?} did not connect within {seconds} s")
    }
}
