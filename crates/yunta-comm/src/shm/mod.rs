//! Links through memory that two processes of one host share.
//!
//! A pair of rings of bytes, and a local socket over which either side wakes the other when it
//! sleeps. The socket also tells when a process is gone: the kernel closes it.

mod region;
mod ring;

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::ptr::NonNull;
// The rings take their atomics from here: a model checker gives them its own.
use std::sync::atomic;
use std::time::{Duration, Instant};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::link::{Interest, Link, Transport, Wait, closed_by_peer, unless_blocked, wait_on};
use crate::rendezvous::random;
use region::{CAPACITY, Region};
use ring::{Corrupt, Reader, Writer};

/// A reader may start on what is written while the rest is being copied.
const PIECE: usize = 4 << 10;
/// Bytes of a name: random, so that nobody can know it who is not told.
pub(crate) const NAME: usize = 16;

/// One end of a link through shared memory.
pub struct ShmLink {
    region: Region,
    /// Rings that this side writes and reads.
    out: usize,
    writer: Writer,
    reader: Reader,
    doorbell: UnixStream,
    /// The peer's process is gone, or has closed the link.
    is_over: bool,
    name: String,
}

impl ShmLink {
    /// Both ends within one process.
    ///
    /// # Errors
    /// The system's, if there is no more memory or socket.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) = UnixStream::pair()?;
        let (region, memory) = Region::create()?;
        Ok((Self::new(region, 0, a)?, Self::new(Region::open(memory)?, 1, b)?))
    }

    fn new(region: Region, out: usize, doorbell: UnixStream) -> io::Result<Self> {
        doorbell.set_nonblocking(true)?;
        Ok(Self {
            region,
            out,
            writer: Writer::new(CAPACITY as u64),
            reader: Reader::new(CAPACITY as u64),
            doorbell,
            is_over: false,
            name: "shm".to_owned(),
        })
    }

    /// For error messages: whose ends these are.
    pub(crate) fn named(mut self, own: usize, peer: usize) -> Self {
        self.name = format!("shm {own} <-> {peer}");
        self
    }

    fn ring_doorbell(&self) {
        // A full socket has enough bytes to wake the peer; a closed one is noticed on waiting.
        let _ = (&self.doorbell).write(&[1]);
    }

    /// Takes the bytes that woke this side, and notices the peer's end.
    fn quiet_doorbell(&mut self) {
        let mut bytes = [0; 64];
        loop {
            match unless_blocked((&self.doorbell).read(&mut bytes)) {
                // `unless_blocked` turns "nothing there" into 0 as well: ask the socket which.
                Ok(0) => break,
                Ok(_) => {}
                Err(_) => break self.is_over = true,
            }
        }
        self.is_over |= has_hung_up(&self.doorbell);
    }

    fn corrupt(_: Corrupt) -> io::Error {
        io::Error::new(io::ErrorKind::InvalidData, "the peer wrote nonsense to shared memory")
    }

    /// Copies into the ring, which has room for `bytes`, at `at`.
    fn put(&mut self, at: usize, bytes: &[u8]) {
        let data = self.region.data(self.out);
        // SAFETY: `at < CAPACITY` and at most `CAPACITY` bytes, as `Writer::room` allows: within the
        // two mappings of the ring. The reader does not touch these bytes before they are published.
        // `bytes` is not in the region: it is a Rust slice that nobody writes meanwhile.
        unsafe { data.add(at).copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
    }

    /// What lies ready to be read.
    fn readable(&mut self, wanted: usize) -> io::Result<&[u8]> {
        let ring = self.out ^ 1;
        let (at, bytes) =
            self.reader.available(self.region.control(ring)).map_err(Self::corrupt)?;
        let (at, bytes) = (at as usize, bytes as usize);
        if bytes < wanted && self.is_over {
            return Err(closed_by_peer());
        }
        // SAFETY: within the two mappings of the ring, as `available` checks; the writer does not
        // touch these bytes until they are released, which takes `&mut self`. A peer that breaks
        // this is one of our own processes (it knew the token) gone wrong: it can spoil the data,
        // not the memory of this process.
        Ok(unsafe { std::slice::from_raw_parts(self.region.data(ring).as_ptr().add(at), bytes) })
    }
}

/// Whether the other end of a socket is closed and nothing is left to read.
fn has_hung_up(socket: &UnixStream) -> bool {
    let mut byte = [0];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    matches!(rustix::net::recv(socket, &mut byte[..], flags), Ok((0, _)))
}

impl Link for ShmLink {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn transport(&self) -> Transport {
        Transport::Shm
    }

    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        if self.is_over {
            return Err(io::Error::new(io::ErrorKind::BrokenPipe, "the peer closed it"));
        }
        let wanted: usize = parts.iter().map(|p| p.len()).sum();
        let mut taken = 0;
        'all: for part in parts {
            for piece in part.chunks(PIECE) {
                let control = self.region.control(self.out);
                let left = (wanted - taken).min(CAPACITY) as u64;
                let (at, room) = self.writer.room(control, left).map_err(Self::corrupt)?;
                let fits = piece.get(..piece.len().min(room as usize)).unwrap_or_default();
                if fits.is_empty() && !piece.is_empty() {
                    break 'all;
                }
                self.put(at as usize, fits);
                self.writer.publish(self.region.control(self.out), fits.len() as u64);
                taken += fits.len();
                if fits.len() < piece.len() {
                    break 'all;
                }
            }
        }
        if taken > 0 && self.writer.must_wake(self.region.control(self.out)) {
            self.ring_doorbell();
        }
        Ok(taken)
    }

    fn try_recv(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let bytes = self.readable(1)?;
        let n = bytes.len().min(buffer.len());
        if let (Some(to), Some(from)) = (buffer.get_mut(..n), bytes.get(..n)) {
            to.copy_from_slice(from);
        }
        self.consume(n);
        Ok(n)
    }

    fn peek(&mut self, wanted: usize) -> io::Result<Option<&[u8]>> {
        self.readable(wanted).map(Some)
    }

    fn consume(&mut self, bytes: usize) {
        let control = self.region.control(self.out ^ 1);
        self.reader.release(control, bytes as u64);
        if bytes > 0 && self.reader.must_wake(control) {
            self.ring_doorbell();
        }
    }

    fn arm(&mut self, interest: Interest) -> io::Result<Option<Wait>> {
        self.quiet_doorbell();
        if self.is_over {
            // The next attempt says so, after what is still in the ring.
            return Ok(None);
        }
        let must_wait = match interest {
            Interest::Read => self.reader.park(self.region.control(self.out ^ 1)),
            Interest::Write => self.writer.park(self.region.control(self.out)),
        };
        // Room and bytes alike are announced by the doorbell.
        let wait = wait_on(self.doorbell.as_raw_fd(), Interest::Read);
        Ok(must_wait.map_err(Self::corrupt)?.then_some(wait))
    }

    fn is_checked(&self) -> bool {
        true
    }

    fn close(&mut self) {
        let _ = self.doorbell.shutdown(std::net::Shutdown::Both);
        self.is_over = true;
    }
}

/// The side of a link that makes its memory.
pub(crate) struct Offer {
    listener: UnixListener,
    /// Where the other side finds it: an address in the abstract namespace.
    pub(crate) name: [u8; NAME],
}

impl Offer {
    pub(crate) fn new() -> io::Result<Self> {
        let name: [u8; NAME] = random()?;
        let listener = UnixListener::bind_addr(&address(&name)?)?;
        listener.set_nonblocking(true)?;
        Ok(Self { listener, name })
    }

    /// Waits for the other side, and hands it the memory.
    pub(crate) fn accept(self, deadline: Instant) -> io::Result<ShmLink> {
        loop {
            match self.listener.accept() {
                Ok((socket, _)) if is_own_user(&socket) => return self.greet(socket, deadline),
                // A stranger; only root can have learnt the name.
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    if Instant::now() >= deadline {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(e) => return Err(e),
            }
        }
    }

    fn greet(self, socket: UnixStream, deadline: Instant) -> io::Result<ShmLink> {
        set_deadline(&socket, deadline)?;
        let (region, memory) = Region::create()?;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        let memory = [memory.as_fd()];
        ancillary.push(SendAncillaryMessage::ScmRights(&memory));
        let word = [IoSlice::new(&self.name)];
        rustix::net::sendmsg(&socket, &word, &mut ancillary, SendFlags::NOSIGNAL)?;
        (&socket).read_exact(&mut [0])?;
        ShmLink::new(region, 0, socket)
    }
}

/// Takes up an offer.
pub(crate) fn take_up(name: &[u8; NAME], deadline: Instant) -> io::Result<ShmLink> {
    let socket = UnixStream::connect_addr(&address(name)?)?;
    set_deadline(&socket, deadline)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut word = [0; NAME];
    let mut parts = [IoSliceMut::new(&mut word)];
    rustix::net::recvmsg(&socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let memory: Option<OwnedFd> = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    let nothing = || io::Error::new(io::ErrorKind::InvalidData, "no memory was handed over");
    let region = Region::open(memory.filter(|_| word == *name).ok_or_else(nothing)?)?;
    (&socket).write_all(&[1])?;
    ShmLink::new(region, 1, socket)
}

fn address(name: &[u8; NAME]) -> io::Result<SocketAddr> {
    let hex: String = name.iter().map(|b| format!("{b:02x}")).collect();
    SocketAddr::from_abstract_name(format!("yunta-{hex}"))
}

fn is_own_user(socket: &UnixStream) -> bool {
    rustix::net::sockopt::socket_peercred(socket).is_ok_and(|c| c.uid == rustix::process::getuid())
}

fn set_deadline(socket: &UnixStream, deadline: Instant) -> io::Result<()> {
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    socket.set_read_timeout(Some(left))?;
    socket.set_write_timeout(Some(left))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_arrive_in_order_through_a_ring_that_wraps() {
        let (mut a, mut b) = ShmLink::pair().unwrap();
        let data: Vec<u8> = (0..3_000_000u32).map(|i| (i * 7 % 251) as u8).collect();
        let sent = data.clone();
        let writer = std::thread::spawn(move || {
            let mut at = 0;
            while at < sent.len() {
                let end = (at + 70_001).min(sent.len());
                at += a.try_send(&[IoSlice::new(&sent[at..end])]).unwrap();
                std::thread::yield_now();
            }
            a
        });
        let mut got = Vec::new();
        while got.len() < data.len() {
            let n = if got.len() % 2 == 0 {
                let seen = b.peek(0).unwrap().unwrap();
                got.extend_from_slice(seen);
                let n = seen.len();
                b.consume(n);
                n
            } else {
                let mut buffer = [0; 997];
                let n = b.try_recv(&mut buffer).unwrap();
                got.extend_from_slice(&buffer[..n]);
                n
            };
            if n == 0 {
                std::thread::yield_now();
            }
        }
        assert!(got == data);
        drop(writer.join().unwrap());
        assert!(b.arm(Interest::Read).unwrap().is_none());
        assert_eq!(b.try_recv(&mut [0]).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(b.try_send(&[IoSlice::new(b"x")]).is_err());
    }

    #[test]
    fn what_was_written_before_the_end_is_read() {
        let (mut a, mut b) = ShmLink::pair().unwrap();
        a.try_send(&[IoSlice::new(b"last"), IoSlice::new(b" words")]).unwrap();
        a.close();
        assert!(b.arm(Interest::Read).unwrap().is_none());
        let mut words = [0; 20];
        assert_eq!(b.try_recv(&mut words).unwrap(), 10);
        assert_eq!(&words[..10], b"last words");
        assert!(b.try_recv(&mut words).is_err());
    }

    #[test]
    fn an_offer_is_taken_up_by_name_alone() {
        let offer = Offer::new().unwrap();
        let name = offer.name;
        let deadline = Instant::now() + Duration::from_secs(10);
        assert!(take_up(&[0; NAME], deadline).is_err());
        let other = std::thread::spawn(move || take_up(&name, deadline));
        let mut a = offer.accept(deadline).unwrap();
        let mut b = other.join().unwrap().unwrap();
        a.try_send(&[IoSlice::new(b"hello")]).unwrap();
        let mut word = [0; 5];
        assert_eq!(b.try_recv(&mut word).unwrap(), 5);
        assert_eq!(&word, b"hello");
    }

    #[test]
    fn nobody_waits_for_an_offer_for_ever() {
        let deadline = Instant::now() + Duration::from_millis(30);
        let error = Offer::new().unwrap().accept(deadline).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn a_side_that_lies_about_its_position_is_noticed() {
        let control = ring::Control::default();
        let mut reader = Reader::new(64);
        Writer::new(128).publish(&control, 65);
        assert_eq!(reader.available(&control), Err(Corrupt));
        Writer::new(64).publish(&control, 10);
        assert_eq!(reader.available(&control), Ok((0, 10)));
        Writer::new(64).publish(&control, 9);
        assert_eq!(reader.available(&control), Err(Corrupt));

        let control = ring::Control::default();
        let mut writer = Writer::new(64);
        assert_eq!(writer.room(&control, 1), Ok((0, 64)));
        writer.publish(&control, 64);
        let (mut ahead, other) = (Reader::new(128), ring::Control::default());
        Writer::new(128).publish(&other, 65);
        ahead.available(&other).unwrap();
        ahead.release(&control, 65);
        assert_eq!(writer.room(&control, 1), Err(Corrupt));
    }
}
