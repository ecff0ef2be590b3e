//! Several links to one peer as one: over several cables, or where one connection does not fill a
//! cable.

use std::io::{self, IoSlice};

use crate::link::{Interest, Link, Transport, Wait, window};

/// Bytes that go over one link before it is the next one's turn. The messages of a decode step
/// go over one or two; kernels buffer more than this per socket, so that all are busy with a long one.
const STRIPE: usize = 64 << 10;

/// Where one direction of the stream stands.
#[derive(Clone, Copy, Default)]
struct Turn {
    lane: usize,
    /// Bytes of this stripe that have passed.
    passed: usize,
}

impl Turn {
    fn left(self) -> usize {
        STRIPE - self.passed
    }

    fn pass(&mut self, bytes: usize, lanes: usize) {
        self.passed += bytes;
        if self.passed >= STRIPE {
            *self = Self { lane: (self.lane + 1) % lanes.max(1), passed: 0 };
        }
    }
}

/// A link over several others, in turn.
pub(crate) struct StripedLink {
    lanes: Vec<Box<dyn Link>>,
    sending: Turn,
    receiving: Turn,
}

impl StripedLink {
    pub(crate) fn new(lanes: Vec<Box<dyn Link>>) -> Self {
        Self { lanes, sending: Turn::default(), receiving: Turn::default() }
    }
}

fn no_lane() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "no connection")
}

impl Link for StripedLink {
    fn name(&self) -> String {
        let first = self.lanes.first().map_or_else(String::new, |l| l.name());
        format!("{first} and {} more", self.lanes.len().saturating_sub(1))
    }

    fn transport(&self) -> Transport {
        self.lanes.first().map_or(Transport::Tcp, |l| l.transport())
    }

    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let lanes = self.lanes.len();
        let mut taken = 0;
        loop {
            let lane = self.lanes.get_mut(self.sending.lane).ok_or_else(no_lane)?;
            let pieces = window(parts, taken, self.sending.left());
            let stripe: Vec<IoSlice<'_>> = pieces.into_iter().map(IoSlice::new).collect();
            if stripe.is_empty() {
                return Ok(taken);
            }
            let wanted: usize = stripe.iter().map(|s| s.len()).sum();
            let n = match lane.try_send(&stripe) {
                // What went before counts; the next attempt says what is wrong.
                Err(_) if taken > 0 => return Ok(taken),
                other => other?,
            };
            self.sending.pass(n, lanes);
            taken += n;
            if n < wanted {
                return Ok(taken);
            }
        }
    }

    fn try_recv(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let lanes = self.lanes.len();
        let mut taken = 0;
        while taken < buffer.len() {
            let lane = self.lanes.get_mut(self.receiving.lane).ok_or_else(no_lane)?;
            let end = buffer.len().min(taken + self.receiving.left());
            let n = match lane.try_recv(buffer.get_mut(taken..end).unwrap_or_default()) {
                Err(_) if taken > 0 => break,
                other => other?,
            };
            self.receiving.pass(n, lanes);
            taken += n;
            if n == 0 {
                break;
            }
        }
        Ok(taken)
    }

    fn arm(&mut self, interest: Interest) -> io::Result<Option<Wait>> {
        let turn = match interest {
            Interest::Read => self.receiving,
            Interest::Write => self.sending,
        };
        self.lanes.get_mut(turn.lane).ok_or_else(no_lane)?.arm(interest)
    }

    fn is_checked(&self) -> bool {
        self.lanes.iter().all(|l| l.is_checked())
    }

    fn close(&mut self) {
        self.lanes.iter_mut().for_each(|l| l.close());
    }
}
