//! What two ranks say to each other before their connection counts.
//!
//! 1. Hello of the client (120 bytes, little-endian): magic (8), version, world size, from, to (2
//!    each), epoch (8), configuration digest (32), nonce (32), host (16), wanted transport, lane,
//!    lanes, whether an RDMA device leads to the peer, whether it is to be encrypted (1 each), zero
//!    (11).
//! 2. Answer: verdict (1), nonce (32), proof (32).
//! 3. The client's proof (32).
//! 4. The server's choice: transport (1), name of shared memory (16), proof (32).
//! 5. The client's word: the transport that it has taken up (1). Over RDMA both speak instead (see
//!    `rdma`). An encrypted connection goes on within TLS, with a proof of each end.
//!
//! Proofs are HMAC-SHA256 with the token over the side, the hello, the server's nonce and, in the
//! choice's, the choice.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::MeshConfig;
use crate::tls::Channel;
use crate::verbs::Verbs;
use crate::{Link, StreamLink, Transport};

const MAGIC: &[u8; 8] = b"YUNTACOM";
const VERSION: u16 = 3;
const HELLO: usize = 120;
/// Bytes of a shared memory's name.
const NAME: usize = 16;
/// Bound on each step of a handshake.
pub(super) const STEP_TIMEOUT: Duration = Duration::from_secs(2);

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
    Transport = 6,
    Lanes = 7,
    Encryption = 8,
}

fn reason(verdict: u8) -> &'static str {
    match verdict {
        0 => "it is willing",
        1 => "the protocol versions differ",
        2 => "the world sizes differ",
        3 => "the epochs differ",
        4 => "the configurations differ (model, cut or options)",
        5 => "the ranks are not as it expects",
        6 => "the transport that is wanted can't link these two hosts, or it wants another",
        7 => "the numbers of connections differ",
        8 => "only one of the two encrypts",
        _ => "it answers nonsense",
    }
}

/// A connection that counts.
pub(super) enum Joined {
    /// One of the links of a pair.
    Lane(usize, Box<dyn Link>),
    /// The whole link.
    Whole(Box<dyn Link>),
}

/// Who connected to whom.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Client,
    Server,
}

impl Side {
    /// What a proof is of.
    pub(super) fn label(self, what: &str) -> Vec<u8> {
        let whose = match self {
            Self::Client => "client",
            Self::Server => "server",
        };
        format!("{whose}'s {what}").into_bytes()
    }

    pub(super) fn other(self) -> Self {
        match self {
            Self::Client => Self::Server,
            Self::Server => Self::Client,
        }
    }
}

/// How a pair is to be linked.
pub(super) struct Pair {
    from: usize,
    to: usize,
    pub(super) lane: usize,
    /// Bytes of both sides' words that proofs cover.
    hello: [u8; HELLO],
    nonce: [u8; 32],
}

/// One rank's side of handshakes.
pub(super) struct Handshake<'c> {
    pub(super) config: &'c MeshConfig,
    /// Tells hosts apart: two ranks that share it can share memory.
    pub(super) host: [u8; 16],
    /// This host's RDMA devices, if they may be used.
    pub(super) verbs: Option<&'c Verbs>,
}

impl Handshake<'_> {
    /// The server's side; the peer's rank. An outer error is a stranger's doing, an inner one a
    /// rank's, and final.
    pub(super) fn greet(
        &self,
        mut stream: TcpStream,
    ) -> io::Result<(usize, Result<Joined, String>)> {
        set_timeouts(&stream)?;
        let mut hello = [0; HELLO];
        stream.read_exact(&mut hello)?;
        let mut fields = Fields(&hello);
        if fields.take::<8>() != *MAGIC {
            return Err(stranger());
        }
        let [version, size, from, to] = [(); 4].map(|()| u16::from_le_bytes(fields.take()));
        let epoch = u64::from_le_bytes(fields.take());
        let digest: [u8; 32] = fields.take();
        let _: [u8; 32] = fields.take();
        let host: [u8; 16] = fields.take();
        let [wanted, lane, lanes, has_rdma, is_encrypted] = fields.take();
        let c = self.config;
        let from = usize::from(from);
        let (size, lanes) = (usize::from(size), usize::from(lanes));
        let (to, lane) = (usize::from(to), usize::from(lane));
        let pair = Pair { from, to, lane, hello, nonce: random()? };
        let has_rdma = has_rdma != 0 && self.has_rdma(&stream, from, lane);
        let is_near = host == self.host && !self.is_named(from, lane);
        let choice = self.choose(wanted, is_near, has_rdma);
        let verdict = if version != VERSION {
            Verdict::Version
        } else if size != c.addresses.len() {
            Verdict::Size
        } else if epoch != c.group.epoch {
            Verdict::Epoch
        } else if digest != c.config_digest {
            Verdict::Digest
        } else if to != c.rank || from <= c.rank || from >= size {
            Verdict::Rank
        } else if choice.is_none() {
            Verdict::Transport
        } else if lanes != c.lanes(from) || lane >= lanes {
            Verdict::Lanes
        } else if (is_encrypted != 0) != c.links.is_encrypted {
            Verdict::Encryption
        } else {
            Verdict::Welcome
        };
        let proof = self.proof(b"server", &pair, &[])?;
        stream.write_all(&[&[verdict as u8], &pair.nonce[..], &proof[..]].concat())?;
        let Some(choice) = choice.filter(|_| verdict == Verdict::Welcome) else {
            return Err(stranger());
        };
        let mut theirs = [0; 32];
        stream.read_exact(&mut theirs)?;
        self.verify(b"client", &pair, &[], &theirs)?;
        Ok((from, self.offer(stream, &pair, choice)?))
    }

    /// Whether an RDMA device was named for a cable to a peer: then it is to be used.
    pub(super) fn is_named(&self, peer: usize, lane: usize) -> bool {
        let names = self.config.links.verbs.devices.get(peer);
        names.is_some_and(|names| lane < names.len())
    }

    /// Whether an RDMA device is known to lead where this connection leads.
    fn has_rdma(&self, stream: &TcpStream, peer: usize, lane: usize) -> bool {
        let local = stream.local_addr().map(|a| a.ip());
        self.verbs.zip(local.ok()).is_some_and(|(v, local)| v.leads_to(peer, lane, local))
    }

    /// What links this rank with one that wants `wanted` (0: whatever is fastest).
    fn choose(&self, wanted: u8, is_near: bool, has_rdma: bool) -> Option<Transport> {
        let can_share = is_near && cfg!(target_os = "linux");
        let is_possible = |t: &Transport| match t {
            Transport::Shm => can_share,
            Transport::Verbs => has_rdma,
            Transport::Tcp => true,
            Transport::Emulated => false,
        };
        let theirs = match wanted {
            0 => None,
            code => Some(Transport::from_code(code)?),
        };
        match (self.config.links.transport, theirs) {
            (None, None) => Transport::ALL.into_iter().find(is_possible),
            (Some(a), Some(b)) if a != b => None,
            // What is wrong with it is said once it is tried.
            (Some(Transport::Verbs), _) | (None, Some(Transport::Verbs)) => Some(Transport::Verbs),
            (Some(one), _) | (None, Some(one)) => Some(one).filter(is_possible),
        }
    }

    /// Tells the client what it is to be, and makes it.
    fn offer(
        &self,
        stream: TcpStream,
        pair: &Pair,
        choice: Transport,
    ) -> io::Result<Result<Joined, String>> {
        #[cfg(target_os = "linux")]
        if choice == Transport::Shm && pair.lane == 0 {
            let offer = crate::shm::Offer::new()?;
            self.send_choice(&stream, pair, choice, offer.name)?;
            let link = offer.accept(Instant::now() + STEP_TIMEOUT);
            return match (receive_byte(&stream)?, link) {
                (code, Ok(link)) if code == Transport::Shm as u8 => {
                    Ok(Ok(Joined::Whole(Box::new(link.named(pair.to, pair.from)))))
                }
                (_, Err(e)) => Err(e),
                _ => Err(stranger()),
            };
        }
        self.send_choice(&stream, pair, choice, [0; NAME])?;
        if choice == Transport::Verbs {
            return self.over_rdma(stream, pair, pair.from, Side::Server);
        }
        receive_byte(&stream)?;
        self.lane(pair, stream, Side::Server).map(Ok)
    }

    fn send_choice(
        &self,
        mut stream: &TcpStream,
        pair: &Pair,
        choice: Transport,
        name: [u8; NAME],
    ) -> io::Result<()> {
        let choice = [&[choice as u8], &name[..]].concat();
        let proof = self.proof(b"choice", pair, &choice)?;
        stream.write_all(&[&choice[..], &proof[..]].concat())
    }

    /// The client's side. An outer error may pass; an inner one is final.
    pub(super) fn dial(
        &self,
        mut stream: TcpStream,
        peer: usize,
        lane: usize,
    ) -> io::Result<Result<Joined, String>> {
        set_timeouts(&stream)?;
        let c = self.config;
        let lanes = c.lanes(peer);
        let has_rdma = self.has_rdma(&stream, peer, lane);
        let word = |n: usize| u16::try_from(n).unwrap_or(u16::MAX).to_le_bytes();
        let byte = |n: usize| u8::try_from(n).unwrap_or(u8::MAX);
        let fields: [&[u8]; 10] = [
            MAGIC,
            &VERSION.to_le_bytes(),
            &word(c.addresses.len()),
            &word(c.rank),
            &word(peer),
            &c.group.epoch.to_le_bytes(),
            &c.config_digest,
            &random::<32>()?,
            &self.host,
            &[
                c.links.transport.map_or(0, |t| t as u8),
                byte(lane),
                byte(lanes),
                has_rdma.into(),
                c.links.is_encrypted.into(),
            ],
        ];
        let mut hello = [0; HELLO];
        let text = fields.concat();
        hello.iter_mut().zip(&text).for_each(|(to, from)| *to = *from);
        stream.write_all(&hello)?;
        let verdict = receive_byte(&stream)?;
        let mut pair = Pair { from: c.rank, to: peer, lane, hello, nonce: [0; 32] };
        let mut theirs = [0; 32];
        stream.read_exact(&mut pair.nonce)?;
        stream.read_exact(&mut theirs)?;
        if verdict != Verdict::Welcome as u8 {
            return Ok(Err(format!("it refuses: {}", reason(verdict))));
        }
        if self.verify(b"server", &pair, &[], &theirs).is_err() {
            return Ok(Err("it does not know the token".to_owned()));
        }
        stream.write_all(&self.proof(b"client", &pair, &[])?)?;
        let mut choice = [0; 1 + NAME];
        stream.read_exact(&mut choice)?;
        stream.read_exact(&mut theirs)?;
        self.verify(b"choice", &pair, &choice, &theirs)?;
        self.take_up(stream, &pair, &choice)
    }

    fn take_up(
        &self,
        mut stream: TcpStream,
        pair: &Pair,
        choice: &[u8; 1 + NAME],
    ) -> io::Result<Result<Joined, String>> {
        let mut fields = Fields(choice);
        let [code] = fields.take();
        #[cfg(target_os = "linux")]
        if code == Transport::Shm as u8 && pair.lane == 0 {
            let link = crate::shm::take_up(&fields.take(), Instant::now() + STEP_TIMEOUT)?;
            stream.write_all(&[code])?;
            return Ok(Ok(Joined::Whole(Box::new(link.named(pair.from, pair.to)))));
        }
        if code == Transport::Verbs as u8 {
            return self.over_rdma(stream, pair, pair.to, Side::Client);
        }
        stream.write_all(&[code])?;
        self.lane(pair, stream, Side::Client).map(Ok)
    }

    /// The connection itself as a link, encrypted if it is to be.
    pub(super) fn lane(&self, pair: &Pair, stream: TcpStream, side: Side) -> io::Result<Joined> {
        let link: Box<dyn Link> = if self.config.links.is_encrypted {
            let mut channel = Channel::new(stream, side == Side::Server)?;
            let secret = channel.secret()?;
            let proof = self.proof(&side.label("channel"), pair, &secret)?;
            let theirs = channel.exchange(&proof)?;
            self.verify(&side.other().label("channel"), pair, &secret, &theirs)?;
            Box::new(channel.into_link()?)
        } else {
            clear_timeouts(&stream)?;
            Box::new(StreamLink::tcp(stream)?)
        };
        Ok(Joined::Lane(pair.lane, link))
    }

    fn mac(&self, side: &[u8], pair: &Pair, more: &[u8]) -> io::Result<Hmac<Sha256>> {
        let mac = <Hmac<Sha256> as KeyInit>::new_from_slice(&self.config.token);
        let mut mac = mac.map_err(|e| io::Error::other(e.to_string()))?;
        for part in [side, &pair.hello, &pair.nonce, more] {
            mac.update(part);
        }
        Ok(mac)
    }

    pub(super) fn proof(&self, side: &[u8], pair: &Pair, more: &[u8]) -> io::Result<[u8; 32]> {
        Ok(self.mac(side, pair, more)?.finalize().into_bytes().into())
    }

    pub(super) fn verify(
        &self,
        side: &[u8],
        pair: &Pair,
        more: &[u8],
        proof: &[u8],
    ) -> io::Result<()> {
        self.mac(side, pair, more)?.verify_slice(proof).map_err(|_| stranger())
    }
}

/// Tells hosts apart. Shared memory is handed over through an address of the network namespace:
/// ranks in two of them are on two hosts.
pub(super) fn host() -> [u8; 16] {
    use sha2::Digest;
    let mut digest = Sha256::new();
    if let Ok(boot) = std::fs::read("/proc/sys/kernel/random/boot_id") {
        digest.update(boot);
    } else {
        // Nothing to go by: alone.
        digest.update(random::<32>().unwrap_or_default());
    }
    if let Ok(namespace) = std::fs::read_link("/proc/self/ns/net") {
        digest.update(namespace.as_os_str().as_encoded_bytes());
    }
    // SAFETY: has no preconditions and can't fail.
    digest.update(unsafe { libc::getuid() }.to_le_bytes());
    let digest: [u8; 32] = digest.finalize().into();
    Fields(&digest).take()
}

fn stranger() -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, "no rank of this mesh")
}

pub(super) fn receive_byte(mut stream: &TcpStream) -> io::Result<u8> {
    let mut byte = [0];
    stream.read_exact(&mut byte)?;
    let [byte] = byte;
    Ok(byte)
}

fn set_timeouts(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(STEP_TIMEOUT))?;
    stream.set_write_timeout(Some(STEP_TIMEOUT))
}

pub(super) fn clear_timeouts(stream: &TcpStream) -> io::Result<()> {
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)
}

/// Bytes that nobody can guess.
pub(crate) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
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
