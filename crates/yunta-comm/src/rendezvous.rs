//! How the ranks of a mesh come together over TCP.
//!
//! Every rank listens; the higher rank of each pair connects to the lower. Both sides compare
//! their configuration and prove that they know the token (HMAC-SHA256 over both nonces) before
//! the connection counts. Each connection has a short deadline and a thread of its own, so that a
//! stranger who says nothing, or nonsense, delays nobody.
//!
//! Hello (client to server, 90 bytes): magic (8), version, size, from, to (2 each), epoch (8),
//! configuration digest (32), nonce (32), zero (2). Answer: verdict (1), nonce (32), proof (32).
//! Then the client's proof (32) and the server's word (1).

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::{CommError, Group, GroupConfig, Link, StreamLink};

const MAGIC: &[u8; 8] = b"YUNTACOM";
const VERSION: u16 = 1;
const HELLO: usize = 90;
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_millis(20);
/// Connections that may be in their handshake at once.
const HANDSHAKES_MAX: usize = 64;

/// What a rank needs to join a mesh.
#[derive(Clone)]
pub struct MeshConfig {
    /// This rank.
    pub rank: usize,
    /// Where each rank listens, in rank order.
    pub addresses: Vec<SocketAddr>,
    /// Known to all ranks and nobody else.
    pub token: [u8; 32],
    /// Must be equal on all ranks: a digest of the model and its cut, for instance.
    pub config_digest: [u8; 32],
    /// Bound on the whole start-up.
    pub join_timeout: Duration,
    /// Settings of the group that results.
    pub group: GroupConfig,
}

/// The server's verdict on a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Verdict {
    Welcome = 0,
    Version = 1,
    Size = 2,
    Epoch = 3,
    Digest = 4,
    Rank = 5,
}

impl Verdict {
    fn reason(code: u8) -> &'static str {
        match code {
            0 => "it is willing",
            1 => "the protocol versions differ",
            2 => "the world sizes differ",
            3 => "the epochs differ",
            4 => "the configurations differ (model, cut or options)",
            5 => "the ranks are not as it expects",
            _ => "it answers nonsense",
        }
    }
}

#[derive(Clone)]
struct Local {
    config: Arc<MeshConfig>,
}

/// Joins the mesh: returns when this rank is connected with all others.
///
/// # Errors
/// [`CommError::Rendezvous`] if a peer does not appear in time, or refuses.
pub fn connect(config: MeshConfig, listener: TcpListener) -> Result<Group, CommError> {
    let (rank, size) = (config.rank, config.addresses.len());
    let failed = |reason: String| CommError::Rendezvous { rank, reason };
    if rank >= size || size > usize::from(u16::MAX) {
        return Err(failed(format!("there is no rank {rank} among {size}")));
    }
    let deadline = Instant::now() + config.join_timeout;
    let group = config.group;
    let local = Local { config: Arc::new(config) };
    let mut links: Vec<Option<Box<dyn Link>>> = (0..size).map(|_| None).collect();
    let mut keep = |peer: usize, stream: TcpStream| -> Result<(), CommError> {
        let link = StreamLink::tcp(stream).map_err(|e| failed(e.to_string()))?;
        if let Some(slot) = links.get_mut(peer) {
            *slot = Some(Box::new(link));
        }
        Ok(())
    };
    let accepting = local.clone();
    let above = size - 1 - rank;
    let accepted = std::thread::Builder::new()
        .name("rendezvous".to_owned())
        .spawn(move || accept_all(&accepting, &listener, above, deadline))
        .map_err(|e| failed(e.to_string()))?;
    let dialed: Result<Vec<(usize, TcpStream)>, String> =
        (0..rank).map(|peer| Ok((peer, local.dial(peer, deadline)?))).collect();
    let accepted =
        accepted.join().map_err(|_| failed("the accepting thread panicked".to_owned()))?;
    for (peer, stream) in dialed.map_err(failed)?.into_iter().chain(accepted.map_err(failed)?) {
        keep(peer, stream)?;
    }
    Ok(Group::new(rank, links, &group))
}

/// Accepts the ranks above this one, whatever else knocks.
fn accept_all(
    local: &Local,
    listener: &TcpListener,
    count: usize,
    deadline: Instant,
) -> Result<Vec<(usize, TcpStream)>, String> {
    if count == 0 {
        return Ok(Vec::new());
    }
    listener.set_nonblocking(true).map_err(|e| e.to_string())?;
    let (sender, arrivals) = mpsc::channel();
    let busy = Arc::new(AtomicUsize::new(0));
    let mut peers: Vec<(usize, TcpStream)> = Vec::new();
    while peers.len() < count {
        if Instant::now() >= deadline {
            return Err(local.missing(&peers));
        }
        while busy.load(Ordering::Relaxed) < HANDSHAKES_MAX {
            match listener.accept() {
                Ok((stream, _)) => local.greet_apart(stream, &sender, &busy),
                Err(_) => break,
            }
        }
        match arrivals.recv_timeout(RETRY) {
            // The first of a rank counts; another is an impostor's or a mistake's.
            Ok((peer, stream)) if peers.iter().all(|(p, _)| *p != peer) => {
                peers.push((peer, stream))
            }
            Ok(_) | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
    }
    Ok(peers)
}

impl Local {
    /// Runs a handshake on a thread of its own.
    fn greet_apart(
        &self,
        stream: TcpStream,
        sender: &Sender<(usize, TcpStream)>,
        busy: &Arc<AtomicUsize>,
    ) {
        let (local, sender, count) = (self.clone(), sender.clone(), Arc::clone(busy));
        busy.fetch_add(1, Ordering::Relaxed);
        let greet = move || {
            if let Ok(peer) = local.greet(&stream) {
                // Nobody waits any more if all ranks are there.
                let _ = sender.send((peer, stream));
            }
            count.fetch_sub(1, Ordering::Relaxed);
        };
        if std::thread::Builder::new().name("handshake".to_owned()).spawn(greet).is_err() {
            busy.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The server's side of a handshake.
    fn greet(&self, mut stream: &TcpStream) -> io::Result<usize> {
        set_timeouts(stream)?;
        let mut hello = [0; HELLO];
        stream.read_exact(&mut hello)?;
        let mut fields = Fields(&hello);
        if fields.take::<8>() != *MAGIC {
            return Err(stranger());
        }
        let [version, size, from, to] = [(); 4].map(|()| u16::from_le_bytes(fields.take()));
        let epoch = u64::from_le_bytes(fields.take());
        let digest: [u8; 32] = fields.take();
        let c = &self.config;
        let peer = usize::from(from);
        let verdict = if version != VERSION {
            Verdict::Version
        } else if usize::from(size) != c.addresses.len() {
            Verdict::Size
        } else if epoch != c.group.epoch {
            Verdict::Epoch
        } else if digest != c.config_digest {
            Verdict::Digest
        } else if usize::from(to) != c.rank || peer <= c.rank || peer >= c.addresses.len() {
            Verdict::Rank
        } else {
            Verdict::Welcome
        };
        let nonce = nonce()?;
        let proof = self.proof(b"server", &hello, &nonce)?;
        stream.write_all(&[&[verdict as u8], &nonce[..], &proof[..]].concat())?;
        if verdict != Verdict::Welcome {
            return Err(stranger());
        }
        let mut theirs = [0; 32];
        stream.read_exact(&mut theirs)?;
        self.verify(b"client", &hello, &nonce, &theirs)?;
        stream.write_all(&[1])?;
        clear_timeouts(stream)?;
        Ok(peer)
    }

    /// Connects to a rank, trying until it is there.
    fn dial(&self, peer: usize, deadline: Instant) -> Result<TcpStream, String> {
        let address = self.config.addresses.get(peer).copied();
        let address = address.ok_or_else(|| format!("rank {peer} has no address"))?;
        loop {
            let last = match self.try_dial(peer, address) {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(refusal)) => return Err(format!("rank {peer} at {address}: {refusal}")),
                Err(e) => e,
            };
            if Instant::now() + RETRY >= deadline {
                return Err(format!("rank {peer} at {address} can't be reached: {last}"));
            }
            std::thread::sleep(RETRY);
        }
    }

    /// One attempt: an outer error may pass, an inner one is final.
    fn try_dial(&self, peer: usize, address: SocketAddr) -> io::Result<Result<TcpStream, String>> {
        let mut stream = TcpStream::connect_timeout(&address, HANDSHAKE_TIMEOUT)?;
        set_timeouts(&stream)?;
        let c = &self.config;
        let word = |n: usize| u16::try_from(n).unwrap_or(u16::MAX).to_le_bytes();
        let hello: Vec<u8> = [
            &MAGIC[..],
            &VERSION.to_le_bytes(),
            &word(c.addresses.len()),
            &word(c.rank),
            &word(peer),
            &c.group.epoch.to_le_bytes(),
            &c.config_digest,
            &nonce()?,
            &[0; 2],
        ]
        .concat();
        stream.write_all(&hello)?;
        let mut verdict = [0; 1];
        let (mut nonce, mut theirs) = ([0; 32], [0; 32]);
        stream.read_exact(&mut verdict)?;
        stream.read_exact(&mut nonce)?;
        stream.read_exact(&mut theirs)?;
        let [verdict] = verdict;
        if verdict != Verdict::Welcome as u8 {
            return Ok(Err(format!("it refuses: {}", Verdict::reason(verdict))));
        }
        if self.verify(b"server", &hello, &nonce, &theirs).is_err() {
            return Ok(Err("it does not know the token".to_owned()));
        }
        stream.write_all(&self.proof(b"client", &hello, &nonce)?)?;
        stream.read_exact(&mut [0; 1])?;
        clear_timeouts(&stream)?;
        Ok(Ok(stream))
    }

    fn mac(&self, side: &[u8], hello: &[u8], nonce: &[u8]) -> io::Result<Hmac<Sha256>> {
        let mac = <Hmac<Sha256> as KeyInit>::new_from_slice(&self.config.token);
        let mut mac = mac.map_err(|e| io::Error::other(e.to_string()))?;
        mac.update(side);
        mac.update(hello);
        mac.update(nonce);
        Ok(mac)
    }

    fn proof(&self, side: &[u8], hello: &[u8], nonce: &[u8]) -> io::Result<[u8; 32]> {
        Ok(self.mac(side, hello, nonce)?.finalize().into_bytes().into())
    }

    fn verify(&self, side: &[u8], hello: &[u8], nonce: &[u8], proof: &[u8]) -> io::Result<()> {
        self.mac(side, hello, nonce)?.verify_slice(proof).map_err(|_| stranger())
    }

    fn missing(&self, peers: &[(usize, TcpStream)]) -> String {
        let c = &self.config;
        let missing: Vec<usize> = (c.rank + 1..c.addresses.len())
            .filter(|p| peers.iter().all(|(there, _)| there != p))
            .collect();
        let seconds = c.join_timeout.as_secs_f64();
        format!("ranks {missing:?} did not connect within {seconds} s")
    }
}

fn stranger() -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, "no rank of this mesh")
}

fn set_timeouts(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(HANDSHAKE_TIMEOUT))?;
    stream.set_write_timeout(Some(HANDSHAKE_TIMEOUT))
}

fn clear_timeouts(stream: &TcpStream) -> io::Result<()> {
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)
}

fn nonce() -> io::Result<[u8; 32]> {
    let mut nonce = [0; 32];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut nonce)?;
    Ok(nonce)
}

/// Takes fixed-size fields off a message that is long enough for all of them.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        if let Some((field, rest)) = self.0.split_at_checked(N) {
            out.copy_from_slice(field);
            self.0 = rest;
        }
        out
    }
}
