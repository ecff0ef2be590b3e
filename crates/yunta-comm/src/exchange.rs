//! One exchange: frames to and from several peers, progressing together.
//!
//! Sends and receives share one loop, so that two ranks that both have much to send never wait
//! for each other. The loop tries for a moment, then parks until a link is ready: more ranks than
//! cores must not burn what the others need.

use std::io::IoSlice;
use std::time::{Duration, Instant};

use crate::frame::{HEADER, Header, Kind, REASON_MAX};
use crate::link::Link;
use crate::{CommError, Operation};

/// How long a wait parks before it looks for an abort.
const PARK_MAX: Duration = Duration::from_millis(50);

/// A frame on its way out.
pub(crate) struct Outgoing<'a> {
    pub(crate) peer: usize,
    header: [u8; HEADER],
    payload: &'a [u8],
    sent: usize,
}

impl<'a> Outgoing<'a> {
    pub(crate) fn new(peer: usize, header: &Header, payload: &'a [u8]) -> Self {
        Self { peer, header: header.encode(), payload, sent: 0 }
    }

    fn is_done(&self) -> bool {
        self.sent >= HEADER + self.payload.len()
    }
}

/// A frame that is expected.
pub(crate) struct Incoming<'a> {
    pub(crate) peer: usize,
    expected: Header,
    header: [u8; HEADER],
    /// The peer's reason to give up, if that is what came.
    abort: Option<Vec<u8>>,
    payload: Payload<'a>,
    received: usize,
}

/// Where a payload goes.
pub(crate) enum Payload<'a> {
    /// Its length is known.
    Exact(&'a mut [u8]),
    /// The sender decides, up to a bound.
    Any(&'a mut Vec<u8>, u64),
}

impl Payload<'_> {
    fn buffer(&mut self) -> &mut [u8] {
        match self {
            Self::Exact(b) => b,
            Self::Any(b, _) => b,
        }
    }
}

impl<'a> Incoming<'a> {
    pub(crate) fn new(peer: usize, expected: Header, payload: Payload<'a>) -> Self {
        Self { peer, expected, header: [0; HEADER], abort: None, payload, received: 0 }
    }

    /// Whether the payload is there. A reason to give up is never "done": it ends in an error,
    /// even where an empty payload was expected.
    fn is_done(&mut self) -> bool {
        self.abort.is_none() && self.received >= HEADER + self.payload.buffer().len()
    }
}

/// What an exchange needs to know of its surroundings.
pub(crate) struct Surroundings<'a> {
    pub(crate) rank: usize,
    pub(crate) operation: Operation,
    pub(crate) timeout: Duration,
    pub(crate) spin: Duration,
    pub(crate) aborted: &'a dyn Fn() -> bool,
}

impl Surroundings<'_> {
    fn lost(&self, peer: usize, link: &dyn Link, start: Instant, reason: String) -> CommError {
        CommError::PeerLost {
            rank: self.rank,
            peer,
            link: link.name(),
            operation: self.operation,
            after: start.elapsed(),
            reason,
        }
    }
}

/// Links by peer; `None` for this rank itself.
pub(crate) type Links = Vec<Option<Box<dyn Link>>>;

/// Runs until all frames are through.
pub(crate) fn run(
    links: &mut Links,
    outgoing: &mut [Outgoing<'_>],
    incoming: &mut [Incoming<'_>],
    around: &Surroundings<'_>,
) -> Result<(), CommError> {
    let start = Instant::now();
    let mut idle_since = None;
    loop {
        let mut progress = false;
        let mut done = true;
        for o in outgoing.iter_mut().filter(|o| !o.is_done()) {
            progress |= send(links, o, around, start)?;
            done &= o.is_done();
        }
        for i in incoming.iter_mut() {
            if !i.is_done() {
                progress |= receive(links, i, around, start)?;
                done &= i.is_done();
            }
        }
        if done {
            return Ok(());
        }
        if progress {
            idle_since = None;
            continue;
        }
        if (around.aborted)() {
            return Err(CommError::Aborted { rank: around.rank, operation: around.operation });
        }
        if start.elapsed() >= around.timeout {
            return Err(timed_out(links, outgoing, incoming, around));
        }
        let idle = *idle_since.get_or_insert_with(Instant::now);
        if idle.elapsed() < around.spin {
            std::hint::spin_loop();
        } else {
            let left = around.timeout.saturating_sub(start.elapsed());
            park(links, outgoing, incoming, left.min(PARK_MAX));
        }
    }
}

fn link_to(links: &mut Links, peer: usize) -> Option<&mut Box<dyn Link>> {
    links.get_mut(peer).and_then(Option::as_mut)
}

fn no_link(around: &Surroundings<'_>, peer: usize) -> CommError {
    let reason = format!("there is no link to rank {peer}");
    CommError::Arguments { operation: around.operation, reason }
}

fn send(
    links: &mut Links,
    o: &mut Outgoing<'_>,
    around: &Surroundings<'_>,
    start: Instant,
) -> Result<bool, CommError> {
    let Some(link) = link_to(links, o.peer) else { return Err(no_link(around, o.peer)) };
    let header = o.header.get(o.sent..).unwrap_or_default();
    let payload = o.payload.get(o.sent.saturating_sub(HEADER)..).unwrap_or_default();
    let n = match link.try_send(&[IoSlice::new(header), IoSlice::new(payload)]) {
        Ok(n) => n,
        // The peer may have said why before it closed the link.
        Err(e) => {
            return Err(last_words(link.as_mut(), o.peer, around)
                .unwrap_or_else(|| around.lost(o.peer, link.as_ref(), start, e.to_string())));
        }
    };
    o.sent += n;
    Ok(n > 0)
}

/// The reason that a peer sent before it closed a link, if it lies at the front of what came.
fn last_words(link: &mut dyn Link, peer: usize, around: &Surroundings<'_>) -> Option<CommError> {
    let mut header = [0; HEADER];
    let mut got = 0;
    while got < HEADER {
        match link.try_recv(header.get_mut(got..)?) {
            Ok(0) | Err(_) => return None,
            Ok(n) => got += n,
        }
    }
    let header = Header::decode(&header).ok().filter(|h| h.kind == Kind::Abort)?;
    let mut reason = vec![0; usize::try_from(header.length.min(REASON_MAX)).ok()?];
    let n = link.try_recv(&mut reason).unwrap_or(0);
    Some(aborted_by(peer, reason.get(..n).unwrap_or_default(), around))
}

fn aborted_by(peer: usize, reason: &[u8], around: &Surroundings<'_>) -> CommError {
    CommError::PeerAborted {
        rank: around.rank,
        peer,
        operation: around.operation,
        reason: String::from_utf8_lossy(reason).into_owned(),
    }
}

fn receive(
    links: &mut Links,
    i: &mut Incoming<'_>,
    around: &Surroundings<'_>,
    start: Instant,
) -> Result<bool, CommError> {
    let peer = i.peer;
    let Some(link) = link_to(links, peer) else { return Err(no_link(around, peer)) };
    let buffer = match i.received.checked_sub(HEADER) {
        None => i.header.get_mut(i.received..),
        Some(at) => match &mut i.abort {
            Some(reason) => reason.get_mut(at..),
            None => i.payload.buffer().get_mut(at..),
        },
    };
    let n = link
        .try_recv(buffer.unwrap_or_default())
        .map_err(|e| around.lost(peer, link.as_ref(), start, e.to_string()))?;
    let had_header = i.received >= HEADER;
    i.received += n;
    if !had_header && i.received >= HEADER {
        let name = link.name();
        accept_header(i, around, &name)?;
    }
    if let Some(reason) = i.abort.as_ref().filter(|r| i.received >= HEADER + r.len()) {
        return Err(aborted_by(peer, reason, around));
    }
    Ok(n > 0)
}

/// Checks a header that is complete against what was expected.
fn accept_header(
    i: &mut Incoming<'_>,
    around: &Surroundings<'_>,
    link: &str,
) -> Result<(), CommError> {
    let (rank, peer) = (around.rank, i.peer);
    let protocol =
        |reason: String| CommError::Protocol { rank, peer, link: link.to_owned(), reason };
    let mismatch = |reason: String| CommError::Mismatch { rank, peer, reason };
    let got = Header::decode(&i.header).map_err(protocol)?;
    let want = i.expected;
    if got.epoch != want.epoch {
        return Err(protocol(format!("it is of epoch {}, this is {}", got.epoch, want.epoch)));
    }
    if got.kind == Kind::Abort {
        if got.length > REASON_MAX {
            return Err(protocol(format!("a reason of {} bytes", got.length)));
        }
        i.abort = Some(vec![0; got.length as usize]);
        return Ok(());
    }
    if (got.kind, got.group, got.number) != (want.kind, want.group, want.number) {
        let show = |h: Header| format!("{:?} {} of group {}", h.kind, h.number, h.group);
        return Err(mismatch(format!("it is at {}, this at {}", show(got), show(want))));
    }
    match &mut i.payload {
        Payload::Exact(buffer) if got.length == buffer.len() as u64 => Ok(()),
        Payload::Exact(buffer) => {
            Err(mismatch(format!("it sent {} bytes, {} were expected", got.length, buffer.len())))
        }
        Payload::Any(buffer, most) if got.length <= *most => {
            buffer.clear();
            buffer.resize(got.length as usize, 0);
            Ok(())
        }
        Payload::Any(_, most) => {
            Err(protocol(format!("a message of {} bytes exceeds the {most} allowed", got.length)))
        }
    }
}

/// Names the first peer that is not through.
fn timed_out(
    links: &mut Links,
    outgoing: &[Outgoing<'_>],
    incoming: &mut [Incoming<'_>],
    around: &Surroundings<'_>,
) -> CommError {
    let waiting = incoming.iter_mut().find_map(|i| (!i.is_done()).then_some(i.peer));
    let peer = waiting
        .or_else(|| outgoing.iter().find(|o| !o.is_done()).map(|o| o.peer))
        .unwrap_or(around.rank);
    CommError::Timeout {
        rank: around.rank,
        peer,
        link: link_to(links, peer).map_or_else(String::new, |l| l.name()),
        operation: around.operation,
        after: around.timeout,
    }
}

/// Waits until one of the links is ready, at most `timeout`.
fn park(
    links: &Links,
    outgoing: &[Outgoing<'_>],
    incoming: &mut [Incoming<'_>],
    timeout: Duration,
) {
    let mut waits: Vec<libc::pollfd> = Vec::with_capacity(outgoing.len() + incoming.len());
    let mut add = |peer: usize, events: libc::c_short| {
        let Some(link) = links.get(peer).and_then(Option::as_ref) else { return };
        let fd = link.descriptor();
        match waits.iter_mut().find(|w| w.fd == fd) {
            Some(wait) => wait.events |= events,
            None => waits.push(libc::pollfd { fd, events, revents: 0 }),
        }
    };
    outgoing.iter().filter(|o| !o.is_done()).for_each(|o| add(o.peer, libc::POLLOUT));
    for i in incoming.iter_mut() {
        if !i.is_done() {
            add(i.peer, libc::POLLIN);
        }
    }
    let ms = libc::c_int::try_from(timeout.as_millis().max(1)).unwrap_or(libc::c_int::MAX);
    // SAFETY: `waits` is an array of that many entries. A failure (a signal) ends the wait early,
    // which the caller's loop takes as it takes a wait that was in vain.
    unsafe { libc::poll(waits.as_mut_ptr(), waits.len() as libc::nfds_t, ms) };
}
