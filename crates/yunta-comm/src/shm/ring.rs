//! The protocol of a ring of bytes between one writer and one reader, without the bytes: who may
//! touch which, and who must be woken.
//!
//! Positions count bytes since the start and never wrap in practice (2⁶⁴). A side that parks says so,
//! then looks once more; the other side moves its position, then looks whether it must wake: with
//! sequentially consistent fences between, at least one of the two sees the other.

use super::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// One variable per pair of cache lines (neighbouring lines are fetched together).
#[repr(C, align(128))]
#[derive(Debug, Default)]
pub(crate) struct Padded<T>(T);

/// The shared state of a ring.
#[repr(C)]
#[derive(Debug, Default)]
pub(crate) struct Control {
    /// Bytes written so far.
    head: Padded<AtomicU64>,
    /// Bytes read so far.
    tail: Padded<AtomicU64>,
    reader_parks: Padded<AtomicU32>,
    writer_parks: Padded<AtomicU32>,
}

/// The other side broke the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Corrupt;

/// The writer's side.
#[derive(Debug)]
pub(crate) struct Writer {
    capacity: u64,
    head: u64,
    /// As last seen: loads of the other side's line are what costs.
    tail: u64,
}

impl Writer {
    /// The writer of a new ring of `capacity` bytes.
    pub(crate) fn new(capacity: u64) -> Self {
        Self { capacity, head: 0, tail: 0 }
    }

    /// Where to write, and how many bytes fit there in all (they may wrap).
    ///
    /// # Errors
    /// [`Corrupt`] if the reader claims to have read what was not written.
    pub(crate) fn room(&mut self, control: &Control, wanted: u64) -> Result<(u64, u64), Corrupt> {
        if self.capacity - (self.head - self.tail) < wanted {
            let tail = control.tail.0.load(Ordering::Acquire);
            if tail < self.tail || tail > self.head {
                return Err(Corrupt);
            }
            self.tail = tail;
        }
        Ok((self.head % self.capacity, self.capacity - (self.head - self.tail)))
    }

    /// Shows `bytes` more to the reader.
    pub(crate) fn publish(&mut self, control: &Control, bytes: u64) {
        self.head += bytes;
        control.head.0.store(self.head, Ordering::Release);
    }

    /// After publishing: whether the reader sleeps and must be woken, once.
    pub(crate) fn must_wake(&self, control: &Control) -> bool {
        unpark(&control.reader_parks)
    }

    /// Says that the writer is about to sleep; whether it must.
    ///
    /// # Errors
    /// As [`Writer::room`].
    pub(crate) fn park(&mut self, control: &Control) -> Result<bool, Corrupt> {
        control.writer_parks.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let (_, room) = self.room(control, self.capacity)?;
        Ok(room == 0)
    }
}

/// The reader's side.
#[derive(Debug)]
pub(crate) struct Reader {
    capacity: u64,
    tail: u64,
    /// As last seen.
    head: u64,
}

impl Reader {
    /// The reader of a new ring of `capacity` bytes.
    pub(crate) fn new(capacity: u64) -> Self {
        Self { capacity, tail: 0, head: 0 }
    }

    /// Where to read, and how many bytes are there in all (they may wrap).
    ///
    /// # Errors
    /// [`Corrupt`] if the writer claims to have written what can't be there.
    pub(crate) fn available(&mut self, control: &Control) -> Result<(u64, u64), Corrupt> {
        let head = control.head.0.load(Ordering::Acquire);
        if head < self.head || head - self.tail > self.capacity {
            return Err(Corrupt);
        }
        self.head = head;
        Ok((self.tail % self.capacity, self.head - self.tail))
    }

    /// Gives `bytes` back to the writer.
    pub(crate) fn release(&mut self, control: &Control, bytes: u64) {
        self.tail += bytes.min(self.head - self.tail);
        control.tail.0.store(self.tail, Ordering::Release);
    }

    /// After releasing: whether the writer sleeps and must be woken, once.
    pub(crate) fn must_wake(&self, control: &Control) -> bool {
        unpark(&control.writer_parks)
    }

    /// Says that the reader is about to sleep; whether it must.
    ///
    /// # Errors
    /// As [`Reader::available`].
    pub(crate) fn park(&mut self, control: &Control) -> Result<bool, Corrupt> {
        control.reader_parks.0.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        Ok(self.available(control)?.1 == 0)
    }
}

/// Whether the other side sleeps; it is woken once for each time that it said so.
fn unpark(parks: &Padded<AtomicU32>) -> bool {
    fence(Ordering::SeqCst);
    parks.0.load(Ordering::Relaxed) == 1 && parks.0.swap(0, Ordering::Relaxed) == 1
}
