//! A frame on its way out.

use std::io::{self, IoSlice};
use std::ops::Range;

use super::peer::Peer;
use crate::frame::{CHECKSUM, HEADER, Header, TRAILER_MAX, trailer};

/// Up to this much of a payload is checksummed ahead, so that the frame's end goes out with it.
const AHEAD: usize = 128 << 10;

/// A frame on its way out.
pub(crate) struct Outgoing {
    pub(crate) peer: usize,
    /// Where the payload lies in the buffer of the exchange.
    pub(crate) range: Range<usize>,
    header: [u8; HEADER],
    trailer: [u8; TRAILER_MAX],
    trailer_length: usize,
    is_checked: bool,
    checksum: u32,
    /// Bytes of payload that the checksum covers.
    covered: usize,
    sent: usize,
}

impl Outgoing {
    pub(crate) fn new(peer: usize, range: Range<usize>, header: &Header) -> Self {
        Self {
            peer,
            header: header.encode(),
            trailer: [0; TRAILER_MAX],
            trailer_length: trailer(range.len(), header.is_checked),
            is_checked: header.is_checked,
            range,
            checksum: 0,
            covered: 0,
            sent: 0,
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.sent >= HEADER + self.range.len() + self.trailer_length
    }

    /// Bytes of the payload that the link has taken.
    pub(crate) fn payload_sent(&self) -> usize {
        self.sent.saturating_sub(HEADER).min(self.range.len())
    }

    /// Sends what the link takes. `payload` must not have changed behind what was sent.
    pub(crate) fn advance(&mut self, to: &mut Peer, payload: &[u8]) -> io::Result<usize> {
        let at = self.payload_sent();
        if payload.len() - at <= AHEAD {
            self.cover(payload, payload.len());
        }
        let is_covered = !self.is_checked || self.covered == payload.len();
        let end = if is_covered { self.trailer_length } else { 0 };
        let after = self.sent.saturating_sub(HEADER + payload.len());
        let n = to.send(&[
            IoSlice::new(self.header.get(self.sent..).unwrap_or_default()),
            IoSlice::new(payload.get(at..).unwrap_or_default()),
            IoSlice::new(self.trailer.get(after..end).unwrap_or_default()),
        ])?;
        self.sent += n;
        self.cover(payload, self.payload_sent());
        Ok(n)
    }

    fn cover(&mut self, payload: &[u8], end: usize) {
        if !self.is_checked || end <= self.covered {
            return;
        }
        let next = payload.get(self.covered..end).unwrap_or_default();
        self.checksum = crc32c::crc32c_append(self.checksum, next);
        self.covered = end;
        if let Some(place) = self.trailer.first_chunk_mut::<CHECKSUM>() {
            *place = self.checksum.to_le_bytes();
        }
    }
}
