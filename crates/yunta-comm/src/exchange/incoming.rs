//! A frame that is expected.

use std::ops::Range;

use super::peer::Peer;
use super::{Fault, Surroundings};
use crate::frame::{CHECKSUM, HEADER, Header, Kind, REASON_MAX, trailer};

/// Where a payload goes.
pub(crate) enum Sink<'a> {
    /// To a place in the buffer of the exchange.
    Place(Range<usize>),
    /// Into the fold, of so many bytes.
    Fold(usize),
    /// The sender decides its length, up to a bound.
    Message(&'a mut Vec<u8>, u64),
}

/// How far a frame has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Header,
    Payload,
    Trailer,
    Done,
}

/// A frame that is expected.
pub(crate) struct Incoming<'a> {
    pub(crate) peer: usize,
    expected: Header,
    sink: Sink<'a>,
    stage: Stage,
    length: usize,
    /// Bytes of payload that were used.
    received: usize,
    is_checked: bool,
    checksum: u32,
}

impl<'a> Incoming<'a> {
    pub(crate) fn new(peer: usize, expected: Header, sink: Sink<'a>) -> Self {
        let stage = Stage::Header;
        Self { peer, expected, sink, stage, length: 0, received: 0, is_checked: false, checksum: 0 }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.stage == Stage::Done
    }

    /// Whether it waits to be folded.
    pub(crate) fn is_foldable(&self) -> bool {
        self.stage == Stage::Payload && matches!(self.sink, Sink::Fold(_))
    }

    /// Bytes that are to come of a frame that is under way.
    pub(crate) fn rest(&self) -> usize {
        match self.stage {
            Stage::Header | Stage::Done => 0,
            Stage::Payload | Stage::Trailer => {
                self.length - self.received + trailer(self.length, self.is_checked)
            }
        }
    }

    /// Takes what has come, but for a payload that is to be folded; whether there was anything.
    pub(crate) fn advance(
        &mut self,
        from: &mut Peer,
        buffer: &mut [u8],
        around: &Surroundings<'_>,
    ) -> Result<bool, Fault> {
        let mut progress = false;
        loop {
            let moved = match self.stage {
                Stage::Header => self.take_header(from, around)?,
                Stage::Payload => self.take_payload(from, buffer)?,
                Stage::Trailer => self.take_trailer(from)?,
                Stage::Done => false,
            };
            if !moved {
                return Ok(progress);
            }
            progress = true;
        }
    }

    /// Notes that `bytes`, the next of the payload, were folded.
    pub(crate) fn fold(&mut self, bytes: &[u8]) {
        if self.is_checked {
            self.checksum = crc32c::crc32c_append(self.checksum, bytes);
        }
        self.count(bytes.len());
    }

    fn take_payload(&mut self, from: &mut Peer, buffer: &mut [u8]) -> Result<bool, Fault> {
        let place = match &mut self.sink {
            Sink::Fold(_) => return Ok(false),
            Sink::Place(range) => buffer.get_mut(range.clone()).unwrap_or_default(),
            Sink::Message(message, _) => message.as_mut_slice(),
        };
        let rest = place.get_mut(self.received..).unwrap_or_default();
        let n = from.receive(rest)?;
        if self.is_checked {
            let new = rest.get(..n).unwrap_or_default();
            self.checksum = crc32c::crc32c_append(self.checksum, new);
        }
        self.count(n);
        Ok(n > 0)
    }

    fn count(&mut self, bytes: usize) {
        self.received += bytes;
        if self.received >= self.length {
            self.stage = Stage::Trailer;
        }
    }

    fn take_header(&mut self, from: &mut Peer, around: &Surroundings<'_>) -> Result<bool, Fault> {
        let there = from.peek(HEADER)?;
        let Some(bytes) = there.first_chunk::<HEADER>() else {
            // A stranger's few words must not pass for a slow peer.
            return match there.get(..4) {
                Some(magic) if magic != b"YNTA" => {
                    Err(Fault::Protocol(format!("a frame starts with {magic:02x?}")))
                }
                _ => Ok(false),
            };
        };
        let header = Header::decode(bytes).map_err(Fault::Protocol)?;
        if header.epoch != around.epoch {
            let (theirs, ours) = (header.epoch, around.epoch);
            return Err(Fault::Protocol(format!("it is of epoch {theirs}, this is {ours}")));
        }
        if header.kind == Kind::Abort {
            return self.take_reason(from, &header);
        }
        self.check(&header)?;
        from.consume(HEADER);
        self.is_checked = header.is_checked;
        self.length = header.length as usize;
        self.stage = if self.length == 0 { Stage::Trailer } else { Stage::Payload };
        Ok(true)
    }

    fn take_reason(&self, from: &mut Peer, header: &Header) -> Result<bool, Fault> {
        if header.length > REASON_MAX {
            return Err(Fault::Protocol(format!("a reason of {} bytes", header.length)));
        }
        let end = HEADER + header.length as usize;
        let there = from.peek(end)?;
        let Some(reason) = there.get(HEADER..end) else { return Ok(false) };
        Err(Fault::GaveUp(String::from_utf8_lossy(reason).into_owned()))
    }

    fn check(&mut self, got: &Header) -> Result<(), Fault> {
        let want = &self.expected;
        let key = |h: &Header| (h.kind, h.group, h.number, h.part);
        if key(got) != key(want) {
            let show = |h: &Header| {
                format!("{:?} {} of group {}, part {}", h.kind, h.number, h.group, h.part)
            };
            return Err(Fault::Mismatch(format!("it is at {}, this at {}", show(got), show(want))));
        }
        let expected = match &mut self.sink {
            Sink::Place(range) => range.len(),
            Sink::Fold(length) => *length,
            Sink::Message(message, most) if got.length <= *most => {
                message.clear();
                message.resize(got.length as usize, 0);
                return Ok(());
            }
            Sink::Message(_, most) => {
                let length = got.length;
                let reason = format!("a message of {length} bytes exceeds the {most} allowed");
                return Err(Fault::Protocol(reason));
            }
        };
        if got.length == expected as u64 {
            return Ok(());
        }
        let sent = got.length;
        Err(Fault::Mismatch(format!("it sent {sent} bytes, {expected} were expected")))
    }

    fn take_trailer(&mut self, from: &mut Peer) -> Result<bool, Fault> {
        let length = trailer(self.length, self.is_checked);
        let Some(bytes) = from.peek(length)?.get(..length) else { return Ok(false) };
        if self.is_checked && bytes.get(..CHECKSUM) != Some(&self.checksum.to_le_bytes()) {
            return Err(Fault::Protocol("a payload does not have its checksum".to_owned()));
        }
        from.consume(length);
        self.stage = Stage::Done;
        Ok(true)
    }
}

/// The reason that a peer sent before it closed a link, if it lies within what came: after `rest`
/// bytes of a frame, and any number of whole ones.
pub(crate) fn last_words(from: &mut Peer, rest: usize) -> Option<String> {
    let mut at = rest;
    loop {
        let body = at.checked_add(HEADER)?;
        let there = from.peek(body).ok()?.get(at..body)?;
        let header = Header::decode(there.first_chunk()?).ok()?;
        let length = usize::try_from(header.length).ok()?;
        if header.kind == Kind::Abort {
            let end = body + length.min(REASON_MAX as usize);
            let reason = from.peek(end).ok()?.get(body..end)?;
            return Some(String::from_utf8_lossy(reason).into_owned());
        }
        at = body.checked_add(length)?.checked_add(trailer(length, header.is_checked))?;
    }
}
