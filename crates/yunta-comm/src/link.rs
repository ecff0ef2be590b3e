//! Links: ordered streams of bytes to one peer.

use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

/// An ordered, reliable stream of bytes to one peer, which never blocks by itself.
pub trait Link: Send {
    /// For error messages: kind and addresses.
    fn name(&self) -> String;

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

    /// What to wait on until there are bytes, or room for some.
    fn descriptor(&self) -> RawFd;

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
        Ok(Self { socket, name })
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
            Ok::<_, io::Error>(Self { socket, name: "local socket".to_owned() })
        };
        Ok((end(a)?, end(b)?))
    }
}

/// 0 for "not now".
fn unless_blocked(result: io::Result<usize>) -> io::Result<usize> {
    match result {
        Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
            Ok(0)
        }
        other => other,
    }
}

impl<S: Socket> Link for StreamLink<S> {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        unless_blocked(self.socket.write_vectored(parts))
    }

    fn try_recv(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        match self.socket.read(buffer) {
            Ok(0) => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the peer closed it")),
            other => unless_blocked(other),
        }
    }

    fn descriptor(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    fn close(&mut self) {
        self.socket.shut();
    }
}
