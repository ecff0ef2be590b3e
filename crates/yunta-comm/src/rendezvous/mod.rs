//! How the ranks of a mesh come together.
//!
//! Every rank listens; the higher rank of each pair connects to the lower, as many times as the pair
//! has connections. Both sides compare their configuration, prove that they know the token, and agree
//! on what links them (see `handshake`) before a connection counts. Each connection has a short
//! deadline and a thread of its own, so that a stranger who says nothing, or nonsense, delays nobody.
//! In the end all ranks tell each other how they are linked: they must choose alike.

mod handshake;
mod rdma;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::striped::StripedLink;
use crate::verbs::{Verbs, VerbsConfig, VerbsError};
use crate::{CommError, Group, GroupConfig, Link, Topology, Transport};
pub(crate) use handshake::random;
use handshake::{Handshake, Joined, STEP_TIMEOUT};

const RETRY: Duration = Duration::from_millis(20);
/// Connections that may be in their handshake at once.
const HANDSHAKES_MAX: usize = 64;
/// Connections of a pair.
const LANES_MAX: usize = 64;

/// What links the ranks of a mesh.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkConfig {
    /// What must link all pairs. Else the fastest that each allows: shared memory on one host, RDMA
    /// where devices are known to lead from each end to the other, else TCP.
    pub transport: Option<Transport>,
    /// Connections per pair over TCP, over which large messages are striped; at least one per
    /// address of the rank that is connected to.
    pub connections: usize,
    /// Whether connections over TCP are encrypted. Then RDMA, which can't be, is not used; what
    /// processes of one host share stays as it is.
    pub is_encrypted: bool,
    /// How RDMA devices are used.
    pub verbs: VerbsConfig,
}

impl Default for LinkConfig {
    fn default() -> Self {
        Self { transport: None, connections: 1, is_encrypted: false, verbs: VerbsConfig::default() }
    }
}

/// What a rank needs to join a mesh.
#[derive(Clone)]
pub struct MeshConfig {
    /// This rank.
    pub rank: usize,
    /// Where each rank listens, in rank order: one address, or one per cable.
    pub addresses: Vec<Vec<SocketAddr>>,
    /// What links them.
    pub links: LinkConfig,
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
    /// One connection per pair and whatever links each fastest, within 30 seconds.
    pub fn new(rank: usize, addresses: Vec<Vec<SocketAddr>>, token: [u8; 32]) -> Self {
        Self {
            rank,
            addresses,
            links: LinkConfig::default(),
            token,
            config_digest: [0; 32],
            join_timeout: Duration::from_secs(30),
            group: GroupConfig::default(),
        }
    }

    /// Cables to a peer, of which the lower rank's addresses count.
    fn cables(&self, peer: usize) -> usize {
        let server = self.rank.min(peer);
        let addresses = self.addresses.get(server).map_or(1, Vec::len);
        let devices = self.links.verbs.devices.get(peer).map_or(0, Vec::len);
        addresses.max(devices).clamp(1, LANES_MAX)
    }

    /// Connections to a peer, before it is known what they are.
    fn lanes(&self, peer: usize) -> usize {
        self.links.connections.clamp(self.cables(peer), LANES_MAX)
    }

    /// Queue pairs that the busiest device would have.
    fn queue_pairs(&self) -> usize {
        let peers = (0..self.addresses.len()).filter(|p| *p != self.rank);
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for peer in peers {
            match self.links.verbs.devices.get(peer) {
                Some(names) => names.iter().for_each(|n| *counts.entry(n).or_default() += 1),
                // Which device it will be is not known: at worst, one for all.
                None => *counts.entry("").or_default() += self.cables(peer),
            }
        }
        counts.into_values().max().unwrap_or(0)
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
    verbs: Option<Verbs>,
}

/// Joins the mesh: returns when this rank is connected with all others. The listeners are those of
/// this rank's addresses.
///
/// # Errors
/// [`CommError::Rendezvous`] if a peer does not appear in time, or refuses.
pub fn connect(config: MeshConfig, listeners: Vec<TcpListener>) -> Result<Group, CommError> {
    let (rank, size) = (config.rank, config.addresses.len());
    let failed = |reason: String| CommError::Rendezvous { rank, reason };
    if config.links.transport == Some(Transport::Emulated) {
        return Err(failed("emulated links are within one process: see Fabric".to_owned()));
    }
    let deadline = Instant::now() + config.join_timeout;
    let group = config.group;
    let links = link(config, listeners, rank + 1..size, 0..rank, deadline).map_err(failed)?;
    compare(rank, links, &group, deadline)
}

/// Where all ranks listen, in rank order, if all know nothing but where rank 0 can be reached: at
/// `coordinator`, for which rank 0 has the listener. `own` is where this rank listens. The
/// configuration's addresses count only in number.
///
/// # Errors
/// As [`connect`].
pub fn meet(
    mut config: MeshConfig,
    coordinator: SocketAddr,
    listener: Option<TcpListener>,
    own: SocketAddr,
) -> Result<Vec<SocketAddr>, CommError> {
    let (rank, size) = (config.rank, config.addresses.len());
    let failed = |reason: String| CommError::Rendezvous { rank, reason };
    config.addresses = vec![vec![coordinator]; size];
    let is_encrypted = config.links.is_encrypted;
    let transport = Some(Transport::Tcp);
    config.links = LinkConfig { transport, is_encrypted, ..LinkConfig::default() };
    let deadline = Instant::now() + config.join_timeout;
    let group = GroupConfig { timeout: config.join_timeout, algorithm: None, ..config.group };
    let (accepted, dialed) = if rank == 0 { (1..size, 0..0) } else { (0..0, 0..1) };
    let listeners = listener.into_iter().collect();
    let links = link(config, listeners, accepted, dialed, deadline).map_err(failed)?;
    let star = |a: usize, b: usize| (a != b && a.min(b) == 0).then_some(Transport::Tcp);
    let rows = (0..size).map(|a| (0..size).map(|b| star(a, b)).collect());
    let mut group = Group::with_topology(rank, links, Topology::new(rows.collect()), &group);
    let mut all = vec![0; size * ADDRESS];
    group.all_gather(&encode(own), &vec![ADDRESS; size], &mut all)?;
    Ok(all.as_chunks().0.iter().map(decode).collect())
}

/// Bytes of an address: IPv6, or IPv4 mapped into it, and the port.
const ADDRESS: usize = 18;

fn encode(address: SocketAddr) -> [u8; ADDRESS] {
    let ip = match address.ip() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let mut out = [0; ADDRESS];
    let bytes = ip.octets().into_iter().chain(address.port().to_le_bytes());
    out.iter_mut().zip(bytes).for_each(|(to, from)| *to = from);
    out
}

fn decode(bytes: &[u8; ADDRESS]) -> SocketAddr {
    let ip = bytes.first_chunk::<16>().copied().unwrap_or_default();
    let port = bytes.last_chunk().copied().unwrap_or_default();
    SocketAddr::new(Ipv6Addr::from(ip).to_canonical(), u16::from_le_bytes(port))
}

/// Links to the ranks that are accepted and dialed, each at its rank.
fn link(
    config: MeshConfig,
    listeners: Vec<TcpListener>,
    accept: Range<usize>,
    dial: Range<usize>,
    deadline: Instant,
) -> Result<Vec<Option<Box<dyn Link>>>, String> {
    let (rank, size) = (config.rank, config.addresses.len());
    if rank >= size || size > usize::from(u16::MAX) {
        return Err(format!("there is no rank {rank} among {size}"));
    }
    let verbs = verbs(&config).map_err(|e| e.to_string())?;
    let local = Local { config: Arc::new(config), host: handshake::host(), verbs };
    let accepting = local.clone();
    let accepted = std::thread::Builder::new()
        .name("rendezvous".to_owned())
        .spawn(move || accept_all(&accepting, &listeners, accept, deadline))
        .map_err(|e| e.to_string())?;
    let dialed: Result<Links, String> =
        dial.map(|peer| Ok((peer, local.dial(peer, deadline)?))).collect();
    let accepted = accepted.join().map_err(|_| "the accepting thread panicked".to_owned())?;
    let mut links: Vec<Option<Box<dyn Link>>> = (0..size).map(|_| None).collect();
    for (peer, link) in dialed?.into_iter().chain(accepted?) {
        if let Some(slot) = links.get_mut(peer) {
            *slot = Some(link);
        }
    }
    Ok(links)
}

/// The RDMA devices of this host, if they are to be used.
fn verbs(config: &MeshConfig) -> Result<Option<Verbs>, VerbsError> {
    if config.links.transport.is_some_and(|t| t != Transport::Verbs) || config.addresses.len() < 2 {
        return Ok(None);
    }
    if config.links.is_encrypted {
        let asked = config.links.transport.is_some() || !config.links.verbs.devices.is_empty();
        let error = VerbsError::Settings("RDMA can't be encrypted: choose one of the two");
        return if asked { Err(error) } else { Ok(None) };
    }
    let (needed, budget) = (config.queue_pairs(), config.links.verbs.queue_pairs_max);
    let found = if needed > budget {
        Err(VerbsError::Budget { needed, budget })
    } else {
        Verbs::new(&config.links.verbs)
    };
    match found {
        Ok(verbs) => Ok(Some(verbs)),
        // Nobody asked for them.
        Err(_) if config.links.transport.is_none() && config.links.verbs.devices.is_empty() => {
            Ok(None)
        }
        Err(e) => Err(e),
    }
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
    lanes: Vec<Option<Box<dyn Link>>>,
    link: Option<Box<dyn Link>>,
}

impl Arrivals {
    /// The first of each lane counts; another is an impostor's or a mistake's. RDMA has a lane per
    /// cable, whatever the number of connections.
    fn add(&mut self, joined: Joined, lanes: usize, cables: usize) {
        match joined {
            Joined::Whole(link) => {
                self.link.get_or_insert(link);
            }
            Joined::Lane(lane, link) => {
                self.lanes.resize_with(lanes, || None);
                if let Some(slot) = self.lanes.get_mut(lane) {
                    slot.get_or_insert(link);
                }
                let first = self.lanes.first().and_then(Option::as_ref);
                let wanted = match first.map(|l| l.transport()) {
                    Some(Transport::Verbs) => cables,
                    Some(_) => lanes,
                    None => return,
                };
                let wanted = self.lanes.get_mut(..wanted).unwrap_or_default();
                if self.link.is_none() && wanted.iter().all(Option::is_some) {
                    self.link = over(wanted.iter_mut().filter_map(Option::take).collect());
                }
            }
        }
    }
}

fn over(mut lanes: Vec<Box<dyn Link>>) -> Option<Box<dyn Link>> {
    match lanes.len() {
        0 | 1 => lanes.pop(),
        _ => Some(Box::new(StripedLink::new(lanes))),
    }
}

/// Accepts some of the ranks above this one, whatever else knocks.
fn accept_all(
    local: &Local,
    listeners: &[TcpListener],
    ranks: Range<usize>,
    deadline: Instant,
) -> Result<Links, String> {
    let mut peers: Vec<Arrivals> = ranks.clone().map(|_| Arrivals::default()).collect();
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
                let joined = joined.map_err(|e| format!("rank {peer}: {e}"))?;
                if let Some(arrivals) =
                    peer.checked_sub(ranks.start).and_then(|at| peers.get_mut(at))
                {
                    arrivals.add(joined, local.config.lanes(peer), local.config.cables(peer));
                }
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
    }
    let links = peers.into_iter().zip(ranks);
    Ok(links.filter_map(|(arrivals, peer)| Some((peer, arrivals.link?))).collect())
}

impl Local {
    fn handshake(&self) -> Handshake<'_> {
        Handshake { config: &self.config, host: self.host, verbs: self.verbs.as_ref() }
    }

    /// Runs a handshake on a thread of its own.
    fn greet_apart(
        &self,
        stream: TcpStream,
        sender: &Sender<(usize, Result<Joined, String>)>,
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
        let (lanes, cables) = (self.config.lanes(peer), self.config.cables(peer));
        let mut arrivals = Arrivals::default();
        for (lane, address) in (0..lanes).zip(addresses.iter().cycle()) {
            let joined = self.dial_lane(peer, lane, *address, deadline)?;
            arrivals.add(joined, lanes, cables);
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
