//! One exchange: frames to and from several peers, progressing together.
//!
//! Sends and receives share one loop, so that two ranks that both have much to send never wait
//! for each other. The loop tries for a moment, then parks until a link is ready: more ranks than
//! cores must not burn what the others need.
//!
//! A reduction folds what has come from all peers as it comes, straight from where the links hold
//! it, into this rank's own data. Where that same data is being sent, the fold stays behind what
//! was sent. Ranks can't block each other by that: a link holds some bytes, so the rank that has
//! folded least has been sent more than that, and has sent more itself.

mod incoming;
mod outgoing;
mod peer;

use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use incoming::last_words;
pub(crate) use incoming::{Incoming, Sink};
pub(crate) use outgoing::Outgoing;
pub(crate) use peer::{Peer, Peers};

use crate::element::Fold;
use crate::link::Interest;
use crate::{CommError, Operation, ReduceOp};

/// How long a wait parks before it looks for an abort.
const PARK_MAX: Duration = Duration::from_millis(50);

/// What an exchange needs to know of its surroundings.
pub(crate) struct Surroundings<'a> {
    pub(crate) rank: usize,
    pub(crate) epoch: u64,
    pub(crate) operation: Operation,
    pub(crate) start: Instant,
    pub(crate) timeout: Duration,
    pub(crate) spin: Duration,
    pub(crate) aborted: &'a dyn Fn() -> bool,
}

/// What is wrong with a peer.
#[derive(Debug)]
pub(crate) enum Fault {
    Lost(String),
    GaveUp(String),
    Mismatch(String),
    Protocol(String),
}

impl From<io::Error> for Fault {
    fn from(e: io::Error) -> Self {
        match e.kind() {
            io::ErrorKind::InvalidData => Self::Protocol(e.to_string()),
            _ => Self::Lost(e.to_string()),
        }
    }
}

impl Surroundings<'_> {
    fn error(&self, peer: usize, link: String, fault: Fault) -> CommError {
        let (rank, operation, after) = (self.rank, self.operation, self.start.elapsed());
        match fault {
            Fault::Lost(reason) => {
                CommError::PeerLost { rank, peer, link, operation, after, reason }
            }
            Fault::GaveUp(reason) => {
                CommError::PeerAborted { rank, peer, link, operation, after, reason }
            }
            Fault::Mismatch(reason) => {
                CommError::Mismatch { rank, peer, link, operation, after, reason }
            }
            Fault::Protocol(reason) => {
                CommError::Protocol { rank, peer, link, operation, after, reason }
            }
        }
    }
}

/// What is folded: `bytes` of this rank's own data with as many of each peer whose frame goes to
/// [`Sink::Fold`].
pub(crate) struct Reduction {
    /// This rank's own, in the buffer.
    pub(crate) range: Range<usize>,
    pub(crate) fold: Fold,
    pub(crate) op: ReduceOp,
    /// How many of the peers come before this rank.
    pub(crate) place: usize,
    /// Bytes of an element.
    pub(crate) unit: usize,
    /// Whether frames are being sent from the same place.
    pub(crate) is_sent: bool,
}

/// What an exchange does. With a reduction, all that comes is folded, in the order of `incoming`.
pub(crate) struct Exchange<'a> {
    /// What is sent, if not what is written.
    pub(crate) source: Option<&'a [u8]>,
    /// Where payloads go.
    pub(crate) buffer: &'a mut [u8],
    pub(crate) outgoing: Vec<Outgoing>,
    pub(crate) incoming: Vec<Incoming<'a>>,
    pub(crate) reduction: Option<Reduction>,
    /// Bytes folded so far.
    pub(crate) folded: usize,
}

impl Exchange<'_> {
    /// Runs until all frames are through.
    pub(crate) fn run(
        &mut self,
        peers: &mut Peers,
        around: &Surroundings<'_>,
    ) -> Result<(), CommError> {
        let mut idle_since = None;
        loop {
            let progress = self.advance(peers, around)?;
            if self.is_done() {
                return Ok(());
            }
            if progress {
                idle_since = None;
                continue;
            }
            if (around.aborted)() {
                return Err(CommError::Aborted { rank: around.rank, operation: around.operation });
            }
            let now = Instant::now();
            let spent = now.saturating_duration_since(around.start);
            if spent >= around.timeout {
                return Err(self.timed_out(peers, around, spent));
            }
            let idle = *idle_since.get_or_insert(now);
            if now.saturating_duration_since(idle) < around.spin {
                std::hint::spin_loop();
            } else {
                self.park(peers, around, (around.timeout - spent).min(PARK_MAX))?;
            }
        }
    }

    fn is_done(&self) -> bool {
        self.outgoing.iter().all(Outgoing::is_done) && self.incoming.iter().all(Incoming::is_done)
    }

    /// Moves what can be moved; whether anything was.
    fn advance(&mut self, peers: &mut Peers, around: &Surroundings<'_>) -> Result<bool, CommError> {
        let mut progress = false;
        // Frames of one peer stand together, and go one after the other.
        let mut busy = None;
        for o in self.outgoing.iter_mut().filter(|o| !o.is_done()) {
            if busy == Some(o.peer) {
                continue;
            }
            let peer = of(peers, o.peer, around)?;
            let source = self.source.unwrap_or(self.buffer);
            let payload = source.get(o.range.clone()).unwrap_or_default();
            match o.advance(peer, payload) {
                Ok(n) => progress |= n > 0,
                Err(e) => return Err(lost(o.peer, peer, &self.incoming, around, e)),
            }
            busy = Some(o.peer).filter(|_| !o.is_done());
        }
        let mut busy = None;
        for i in self.incoming.iter_mut().filter(|i| !i.is_done()) {
            if busy == Some(i.peer) {
                continue;
            }
            let peer = of(peers, i.peer, around)?;
            let moved = i.advance(peer, self.buffer, around);
            progress |= moved.map_err(|f| around.error(i.peer, peer.link.name(), f))?;
            busy = Some(i.peer).filter(|_| !i.is_done());
        }
        if self.reduction.is_some() {
            progress |= self.fold(peers, around)?;
        }
        Ok(progress)
    }

    /// Folds what has come from all.
    fn fold(&mut self, peers: &mut Peers, around: &Surroundings<'_>) -> Result<bool, CommError> {
        let Some(r) = &self.reduction else { return Ok(false) };
        let left = r.range.len() - self.folded;
        // A peer whose header is yet to come has nothing to fold.
        if left == 0 || !self.incoming.iter().all(Incoming::is_foldable) {
            return Ok(false);
        }
        let mut ready = left;
        if r.is_sent {
            ready = ready.min(self.sent_to_all().saturating_sub(self.folded));
        }
        let views = match views(peers, &self.incoming, if ready == 0 { 0 } else { left }) {
            Ok(views) => views,
            Err((rank, e)) => {
                let peer = of(peers, rank, around)?;
                return Err(lost(rank, peer, &self.incoming, around, e));
            }
        };
        ready = views.iter().map(|v| v.len()).fold(ready, usize::min);
        ready -= ready % r.unit;
        if ready == 0 {
            return Ok(false);
        }
        let views: Vec<&[u8]> =
            views.into_iter().map(|v| v.get(..ready).unwrap_or_default()).collect();
        let from = r.range.start + self.folded;
        let own = self.buffer.get_mut(from..from + ready).unwrap_or_default();
        let (before, after) = views.split_at(r.place.min(views.len()));
        (r.fold)(r.op, before, own, after);
        for (i, view) in self.incoming.iter_mut().zip(views) {
            i.fold(view);
        }
        for i in &self.incoming {
            of(peers, i.peer, around)?.consume(ready);
        }
        self.folded += ready;
        Ok(true)
    }

    /// Bytes of the payload that all links have taken.
    fn sent_to_all(&self) -> usize {
        self.outgoing.iter().map(Outgoing::payload_sent).min().unwrap_or(usize::MAX)
    }

    /// Names the first peer that is not through.
    fn timed_out(
        &self,
        peers: &mut Peers,
        around: &Surroundings<'_>,
        after: Duration,
    ) -> CommError {
        let waiting = self.incoming.iter().find(|i| !i.is_done() && !self.is_ahead(peers, i));
        let peer = waiting
            .map(|i| i.peer)
            .or_else(|| self.outgoing.iter().find(|o| !o.is_done()).map(|o| o.peer))
            .unwrap_or(around.rank);
        let link = peers.get(peer).and_then(Option::as_ref);
        CommError::Timeout {
            rank: around.rank,
            peer,
            link: link.map_or_else(String::new, |p| p.link.name()),
            operation: around.operation,
            after,
        }
    }

    /// Whether there is something of all peers, and room for the result.
    fn can_fold(&self, peers: &mut Peers) -> bool {
        self.reduction.as_ref().is_some_and(|r| {
            self.folded < r.range.len()
                && (!r.is_sent || self.sent_to_all() >= self.folded + r.unit)
                && self.incoming.iter().all(|i| self.is_ahead(peers, i))
        })
    }

    /// Whether a peer's data is there but can't be folded yet: others are late.
    fn is_ahead(&self, peers: &mut Peers, i: &Incoming<'_>) -> bool {
        let unit = self.reduction.as_ref().map_or(1, |r| r.unit);
        i.is_foldable()
            && peers
                .get_mut(i.peer)
                .and_then(Option::as_mut)
                .is_some_and(|p| p.peek(unit).is_ok_and(|there| there.len() >= unit))
    }

    /// Waits until one of the links is ready, at most `timeout`.
    fn park(
        &mut self,
        peers: &mut Peers,
        around: &Surroundings<'_>,
        timeout: Duration,
    ) -> Result<(), CommError> {
        // What has come since the last look may be all that was missing: nothing would end the wait.
        if self.can_fold(peers) {
            return Ok(());
        }
        let mut waits: Vec<libc::pollfd> = Vec::new();
        let mut timeout = timeout;
        let mut is_ready = false;
        let sends =
            self.outgoing.iter().filter(|o| !o.is_done()).map(|o| (o.peer, Interest::Write));
        let receives: Vec<_> = self
            .incoming
            .iter()
            .filter(|i| !i.is_done() && !self.is_ahead(peers, i))
            .map(|i| (i.peer, Interest::Read))
            .collect();
        for (rank, interest) in sends.chain(receives) {
            let peer = of(peers, rank, around)?;
            let wait = match peer.arm(interest) {
                Ok(wait) => wait,
                Err(e) => return Err(lost(rank, peer, &self.incoming, around, e)),
            };
            // The others must be asked nevertheless: some look after themselves only then.
            let Some(wait) = wait else {
                is_ready = true;
                continue;
            };
            timeout = timeout.min(wait.at_most);
            let fd = wait.descriptor;
            match waits.iter_mut().find(|w| w.fd == fd) {
                Some(known) => known.events |= wait.events,
                None => waits.push(libc::pollfd { fd, events: wait.events, revents: 0 }),
            }
        }
        if is_ready {
            return Ok(());
        }
        let time = libc::timespec {
            tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(1),
            tv_nsec: libc::c_long::from(timeout.subsec_nanos() as i32),
        };
        poll(&mut waits, &time);
        Ok(())
    }
}

/// The error of a peer whose link failed; it may have said why before it closed it, after what is
/// expected of it.
fn lost(
    rank: usize,
    peer: &mut Peer,
    incoming: &[Incoming<'_>],
    around: &Surroundings<'_>,
    e: io::Error,
) -> CommError {
    let rest = incoming.iter().filter(|i| i.peer == rank).map(Incoming::rest).sum();
    let fault = last_words(peer, rest).map_or_else(|| e.into(), Fault::GaveUp);
    around.error(rank, peer.link.name(), fault)
}

/// What has come from each, in the order of `incoming`; looks at links that have less than `wanted`.
fn views<'p>(
    peers: &'p mut Peers,
    incoming: &[Incoming<'_>],
    wanted: usize,
) -> Result<Vec<&'p [u8]>, (usize, io::Error)> {
    let mut views = vec![&[][..]; incoming.len()];
    for (rank, peer) in peers.iter_mut().enumerate() {
        let place = incoming.iter().position(|i| i.peer == rank);
        let place = place.and_then(|at| views.get_mut(at));
        if let (Some(peer), Some(place)) = (peer, place) {
            *place = peer.peek(wanted).map_err(|e| (rank, e))?;
        }
    }
    Ok(views)
}

/// Waits for any of the descriptors.
#[cfg(target_os = "linux")]
fn poll(waits: &mut [libc::pollfd], time: &libc::timespec) {
    // SAFETY: `waits` is an array of that many entries, `time` is valid, and no signal mask is
    // given. A failure (a signal) ends the wait early, which the caller's loop takes as it takes a
    // wait that was in vain.
    unsafe {
        libc::ppoll(waits.as_mut_ptr(), waits.len() as libc::nfds_t, time, std::ptr::null());
    }
}

/// Waits for any of the descriptors.
#[cfg(not(target_os = "linux"))]
fn poll(waits: &mut [libc::pollfd], time: &libc::timespec) {
    let ms = time.tv_sec as libc::c_int * 1000 + (time.tv_nsec / 1_000_000).max(1) as libc::c_int;
    // SAFETY: as above.
    unsafe { libc::poll(waits.as_mut_ptr(), waits.len() as libc::nfds_t, ms) };
}

fn of<'p>(
    peers: &'p mut Peers,
    rank: usize,
    around: &Surroundings<'_>,
) -> Result<&'p mut Peer, CommError> {
    peers.get_mut(rank).and_then(Option::as_mut).ok_or_else(|| CommError::Arguments {
        operation: around.operation,
        reason: format!("rank {} has no link to rank {rank}", around.rank),
    })
}
