//! Links: ordered streams of bytes to one peer.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::names::names;

/// What carries a link. Ordered from the fastest to the slowest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Transport {
    /// Memory that two processes of one host share.
    Shm = 1,
    /// Queue pairs of an RDMA device.
    Verbs = 2,
    /// A fabric within this process, for tests.
    Emulated = 3,
    /// Stream sockets.
    Tcp = 4,
}

impl Transport {
    /// All there are.
    pub const ALL: [Self; 4] = [Self::Shm, Self::Verbs, Self::Emulated, Self::Tcp];

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|t| *t as u8 == code)
    }
}

names!(Transport { Shm => "shm", Tcp => "tcp", Verbs => "verbs", Emulated => "emulated" });

/// What a rank waits for on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interest {
    /// Bytes to receive.
    Read,
    /// Room to send.
    Write,
}

/// How to wait for a link: until `descriptor` has one of `events` (of `poll(2)`), or for `at_most`,
/// whichever is first. Then try again.
#[derive(Clone, Copy, Debug)]
pub struct Wait {
    /// A descriptor that `poll(2)` takes.
    pub descriptor: RawFd,
    /// `POLLIN`, `POLLOUT`.
    pub events: libc::c_short,
    /// For devices that signal nothing.
    pub at_most: Duration,
}

/// An ordered, reliable stream of bytes to one peer, which never blocks by itself.
pub trait Link: Send {
    /// For error messages: kind and addresses.
    fn name(&self) -> String;

    /// What carries it.
    fn transport(&self) -> Transport;

    /// Takes as many bytes as there is room for; 0 if there is none now.
    ///
    /// # Errors
    /// If the peer is gone.
    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize>;

    /// Gives as many bytes as are there, at most `buffer`'s length; 0 if there are none now.
    ///
    /// # Errors
    /// If the peer is gone; an orderly end is [`io::ErrorKind::UnexpectedEof`].
    fn try_recv(&mut self, buffer: &mut [u8]) -> io::Result<usize>;

    /// Received bytes where they lie, for links whose memory can be read; possibly fewer than
    /// `wanted`, or none. `None`: use [`Link::try_recv`].
    ///
    /// # Errors
    /// As [`Link::try_recv`]: if there will never be as many as `wanted`.
    fn peek(&mut self, wanted: usize) -> io::Result<Option<&[u8]>> {
        let _ = wanted;
        Ok(None)
    }

    /// Gives back the first `bytes` of what [`Link::peek`] showed.
    fn consume(&mut self, bytes: usize) {
        debug_assert_eq!(bytes, 0, "nothing was shown");
    }

    /// Prepares a wait: `None` if there is nothing to wait for.
    ///
    /// # Errors
    /// If the peer is gone.
    fn arm(&mut self, interest: Interest) -> io::Result<Option<Wait>>;

    /// Whether bytes arrive as they were sent, without a checksum of the caller's.
    fn is_checked(&self) -> bool;

    /// Closes both directions; what the peer does next on it fails.
    fn close(&mut self);
}

/// A socket that can be a link.
pub trait Socket: Read + Write + AsRawFd + Send {
    /// Closes both directions.
    fn shut(&self);
}

impl Socket for TcpStream {
    fn shut(&self) {
        // Fails only if it is closed already.
        let _ = self.shutdown(Shutdown::Both);
    }
}

impl Socket for UnixStream {
    fn shut(&self) {
        let _ = self.shutdown(Shutdown::Both);
    }
}

/// A link over a stream socket.
pub struct StreamLink<S> {
    socket: S,
    name: String,
    is_checked: bool,
}

impl StreamLink<TcpStream> {
    /// Over TCP, without Nagle's algorithm: the messages of a decode step are small and waited for.
    ///
    /// # Errors
    /// The system's, if the socket can't be set up.
    pub fn tcp(socket: TcpStream) -> io::Result<Self> {
        socket.set_nodelay(true)?;
        socket.set_nonblocking(true)?;
        let name = format!("tcp {} -> {}", socket.local_addr()?, socket.peer_addr()?);
        Ok(Self { socket, name, is_checked: false })
    }
}

impl StreamLink<UnixStream> {
    /// Two ends within one process.
    ///
    /// # Errors
    /// The system's, if there are no more sockets.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) = UnixStream::pair()?;
        let end = |socket: UnixStream| {
            socket.set_nonblocking(true)?;
            Ok::<_, io::Error>(Self { socket, name: "local socket".to_owned(), is_checked: true })
        };
        Ok((end(a)?, end(b)?))
    }
}

/// 0 for "not now".
pub(crate) fn unless_blocked(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
            Ok(0)
        }
        other => other,
    }
}

/// The error of a peer that has closed its end.
pub(crate) fn closed_by_peer() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the peer closed it")
}

/// What the parts hold after the first `skip` bytes, at most `most`.
pub(crate) fn window<'p>(
    parts: &'p [IoSlice<'_>],
    mut skip: usize,
    mut most: usize,
) -> Vec<&'p [u8]> {
    let mut pieces = Vec::with_capacity(parts.len());
    for part in parts {
        let rest = part.get(skip.min(part.len())..).unwrap_or_default();
        skip = skip.saturating_sub(part.len());
        let piece = rest.get(..rest.len().min(most)).unwrap_or_default();
        most -= piece.len();
        if !piece.is_empty() {
            pieces.push(piece);
        }
    }
    pieces
}

/// Waits on a socket itself.
pub(crate) fn wait_on(descriptor: RawFd, interest: Interest) -> Wait {
    let events = match interest {
        Interest::Read => libc::POLLIN,
        Interest::Write => libc::POLLOUT,
    };
    Wait { descriptor, events, at_most: Duration::MAX }
}

impl<S: Socket> Link for StreamLink<S> {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn transport(&self) -> Transport {
        Transport::Tcp
    }

    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        unless_blocked(self.socket.write_vectored(parts))
    }

    fn try_recv(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        match self.socket.read(buffer) {
            Ok(0) => Err(closed_by_peer()),
            other => unless_blocked(other),
        }
    }

    fn arm(&mut self, interest: Interest) -> io::Result<Option<Wait>> {
        Ok(Some(wait_on(self.socket.as_raw_fd(), interest)))
    }

    fn is_checked(&self) -> bool {
        self.is_checked
    }

    fn close(&mut self) {
        self.socket.shut();
    }
}
