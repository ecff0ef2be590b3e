//! A peer: its link, and what was received from it ahead of its use.

use std::io::{self, IoSlice};

use crate::link::{Interest, Link, Wait};

/// Bytes that are taken off a link at once: a message of the largest size that goes in one piece,
/// and some of the next.
const INBOX: usize = 256 << 10;
/// Frames start at multiples of this in the stream of bytes, and so they do in the inbox.
const ALIGN: usize = 16;

/// A link with an inbox, for links that do not show their own memory.
pub(crate) struct Peer {
    pub(crate) link: Box<dyn Link>,
    /// Whether the link shows its memory.
    is_shown: bool,
    /// In words, for the alignment of what is in it. Empty until it is needed.
    inbox: Vec<u128>,
    start: usize,
    end: usize,
    /// Bytes of the stream before `start`.
    position: u64,
}

impl Peer {
    pub(crate) fn new(mut link: Box<dyn Link>) -> Self {
        let is_shown = matches!(link.peek(0), Ok(Some(_)));
        Self { link, is_shown, inbox: Vec::new(), start: 0, end: 0, position: 0 }
    }

    /// What is there; looks at the link if that is less than `wanted`. Fails if the link does, and
    /// there will never be as much.
    pub(crate) fn peek(&mut self, wanted: usize) -> io::Result<&[u8]> {
        if self.is_shown {
            return Ok(self.link.peek(wanted)?.unwrap_or_default());
        }
        if self.end - self.start < wanted {
            self.fill()?;
        }
        Ok(self.held())
    }

    /// What is there without looking at the link.
    fn held(&self) -> &[u8] {
        bytemuck::cast_slice::<u128, u8>(&self.inbox).get(self.start..self.end).unwrap_or_default()
    }

    fn fill(&mut self) -> io::Result<()> {
        if self.inbox.is_empty() {
            self.inbox.resize(INBOX / size_of::<u128>(), 0);
        }
        let bytes = bytemuck::cast_slice_mut::<u128, u8>(&mut self.inbox);
        let aligned = (self.position % ALIGN as u64) as usize;
        if self.start == self.end {
            (self.start, self.end) = (aligned, aligned);
        } else if self.end == bytes.len() && self.start > aligned {
            bytes.copy_within(self.start..self.end, aligned);
            (self.start, self.end) = (aligned, aligned + self.end - self.start);
        }
        let free = bytes.get_mut(self.end..).unwrap_or_default();
        if !free.is_empty() {
            self.end += self.link.try_recv(free)?;
        }
        Ok(())
    }

    /// Gives back the first `bytes` of what [`Peer::peek`] showed.
    pub(crate) fn consume(&mut self, bytes: usize) {
        if self.is_shown {
            return self.link.consume(bytes);
        }
        self.start += bytes.min(self.end - self.start);
        self.position += bytes as u64;
    }

    /// Receives into `to`: past the inbox, if it is empty and there is much to receive.
    pub(crate) fn receive(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if self.start == self.end && (to.len() >= INBOX || self.is_shown) {
            let n = self.link.try_recv(to)?;
            self.position += n as u64;
            return Ok(n);
        }
        let there = self.peek(to.len())?;
        let n = there.len().min(to.len());
        if let (Some(to), Some(there)) = (to.get_mut(..n), there.get(..n)) {
            to.copy_from_slice(there);
        }
        self.consume(n);
        Ok(n)
    }

    pub(crate) fn send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.link.try_send(parts)
    }

    /// How to wait for more than is there.
    pub(crate) fn arm(&mut self, interest: Interest) -> io::Result<Option<Wait>> {
        self.link.arm(interest)
    }
}

/// Peers by their rank in the world; `None` for this rank itself, and where there is no link.
pub(crate) type Peers = Vec<Option<Peer>>;
