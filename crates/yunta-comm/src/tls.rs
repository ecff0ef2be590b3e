//! Links over TLS 1.3.
//!
//! Both ends have proven by then that they know the token, on a connection that others can read and
//! change. Keys are made for one connection and vouched for by nobody; instead, each end proves
//! within the channel that it knows the token, over what only this channel's two ends know (its
//! exporter, RFC 8446 section 7.5, as RFC 9266 does): one in the middle has two channels, and fails.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use ring::signature::Ed25519KeyPair;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring as provider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{
    CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::sign::CertifiedKey;
use rustls::{
    ClientConfig, ClientConnection, Connection, DigitallySignedStruct, Error, ServerConfig,
    ServerConnection, SignatureScheme,
};

use crate::link::{
    Interest, Link, Socket, Transport, Wait, closed_by_peer, unless_blocked, wait_on, window,
};

/// Bytes that are encrypted before they are sent: four records.
const PIECE: usize = 64 << 10;

/// An encrypted connection, whose other end is yet to prove itself.
pub(crate) struct Channel {
    connection: Connection,
    stream: TcpStream,
}

/// The fastest cipher of processors with instructions for it, which is all we run on.
fn crypto() -> Arc<CryptoProvider> {
    let suites = vec![provider::cipher_suite::TLS13_AES_128_GCM_SHA256];
    Arc::new(CryptoProvider { cipher_suites: suites, ..provider::default_provider() })
}

fn failed(e: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("TLS: {e}"))
}

fn client() -> Result<Connection, Error> {
    let provider = crypto();
    let mut config = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyKey(provider)))
        .with_no_client_auth();
    config.enable_sni = false;
    let name = ServerName::from(std::net::Ipv4Addr::LOCALHOST);
    Ok(ClientConnection::new(Arc::new(config), name)?.into())
}

fn server() -> Result<Connection, Error> {
    let no_key = |_| Error::General("no key can be made".to_owned());
    let key = Ed25519KeyPair::generate_pkcs8(&ring::rand::SystemRandom::new()).map_err(no_key)?;
    let key = PrivatePkcs8KeyDer::from(key.as_ref().to_vec());
    let key = provider::sign::any_eddsa_type(&key)?;
    let public = key.public_key().ok_or_else(|| Error::General("no public key".to_owned()))?;
    let public = vec![CertificateDer::from(public.to_vec())];
    let certified = Arc::new(CertifiedKey::new(public, key));
    let mut config = ServerConfig::builder_with_provider(crypto())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(certified)));
    // Nobody comes back.
    config.send_tls13_tickets = 0;
    Ok(ServerConnection::new(Arc::new(config))?.into())
}

impl Channel {
    /// Over a connection that blocks, with a deadline on each read and write.
    pub(crate) fn new(mut stream: TcpStream, is_server: bool) -> io::Result<Self> {
        let mut connection = if is_server { server() } else { client() }.map_err(failed)?;
        while connection.is_handshaking() {
            connection.complete_io(&mut stream)?;
        }
        Ok(Self { connection, stream })
    }

    /// Bytes that only the two ends of this channel know.
    pub(crate) fn secret(&self) -> io::Result<[u8; 32]> {
        let secret = self.connection.export_keying_material([0; 32], b"EXPORTER-yunta-link", None);
        secret.map_err(failed)
    }

    /// Tells the peer something, and hears as much.
    pub(crate) fn exchange(&mut self, own: &[u8; 32]) -> io::Result<[u8; 32]> {
        let Self { connection, stream } = self;
        connection.writer().write_all(own)?;
        while connection.wants_write() {
            connection.write_tls(stream)?;
        }
        let mut theirs = [0; 32];
        while connection.process_new_packets().map_err(failed)?.plaintext_bytes_to_read() < 32 {
            if connection.read_tls(stream)? == 0 {
                return Err(closed_by_peer());
            }
        }
        connection.reader().read_exact(&mut theirs)?;
        Ok(theirs)
    }

    /// The link, once both ends have proven themselves.
    pub(crate) fn into_link(self) -> io::Result<TlsLink> {
        let Self { connection, stream } = self;
        stream.set_nonblocking(true)?;
        let name = format!("tls {} -> {}", stream.local_addr()?, stream.peer_addr()?);
        Ok(TlsLink { connection, stream, name, owed: 0 })
    }
}

/// Accepts every key: it proves nothing, and need not.
#[derive(Debug)]
struct AnyKey(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not spoken here".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls13_signature_with_raw_key(message, &key, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// An encrypted connection.
pub(crate) struct TlsLink {
    connection: Connection,
    stream: TcpStream,
    name: String,
    /// Bytes that are encrypted, but that the socket had no room for: they count as taken once it
    /// has. Until then the caller offers them again.
    owed: usize,
}

impl TlsLink {
    /// Whether the socket took all that is encrypted.
    fn flush(&mut self) -> io::Result<bool> {
        while self.connection.wants_write() {
            if unless_blocked(self.connection.write_tls(&mut self.stream))? == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn send(&mut self, parts: &[IoSlice<'_>], taken: &mut usize) -> io::Result<()> {
        while self.flush()? {
            *taken += std::mem::take(&mut self.owed);
            let pieces = window(parts, *taken, PIECE);
            if pieces.is_empty() {
                break;
            }
            for piece in pieces {
                // Takes less if there is no room, which is made by then.
                self.owed += self.connection.writer().write(piece)?;
            }
        }
        Ok(())
    }
}

impl Link for TlsLink {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn transport(&self) -> Transport {
        Transport::Tcp
    }

    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut taken = 0;
        match self.send(parts, &mut taken) {
            // What went before counts; the next attempt says what is wrong.
            Err(e) if taken == 0 => Err(e),
            _ => Ok(taken),
        }
    }

    fn try_recv(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            match self.connection.reader().read(buffer) {
                Ok(0) => return Err(closed_by_peer()),
                Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => return Err(closed_by_peer()),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                other => return other,
            }
            match self.connection.read_tls(&mut self.stream) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(0),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                other => other?,
            };
            self.connection.process_new_packets().map_err(failed)?;
        }
    }

    fn arm(&mut self, interest: Interest) -> io::Result<Option<Wait>> {
        let is_ready = match interest {
            Interest::Write => self.flush()?,
            Interest::Read => {
                let state = self.connection.process_new_packets().map_err(failed)?;
                state.plaintext_bytes_to_read() > 0 || state.peer_has_closed()
            }
        };
        Ok((!is_ready).then(|| wait_on(self.stream.as_raw_fd(), interest)))
    }

    fn is_checked(&self) -> bool {
        true
    }

    fn close(&mut self) {
        self.connection.send_close_notify();
        // The peer may be gone: it learns of the end either way.
        let _ = self.flush();
        self.stream.shut();
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    fn sockets() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (a, listener.accept().unwrap().0)
    }

    fn channels(client: TcpStream, server: TcpStream) -> (Channel, Channel) {
        let server = thread::spawn(move || Channel::new(server, true).unwrap());
        (Channel::new(client, false).unwrap(), server.join().unwrap())
    }

    #[test]
    fn only_the_two_ends_of_a_channel_share_its_secret() {
        // A rank, one in the middle with two channels, and another rank.
        let (rank, middle) = sockets();
        let (rank, middle_a) = channels(rank, middle);
        let (middle, other) = sockets();
        let (middle_b, other) = channels(middle, other);
        assert_eq!(rank.secret().unwrap(), middle_a.secret().unwrap());
        assert_eq!(middle_b.secret().unwrap(), other.secret().unwrap());
        assert_ne!(rank.secret().unwrap(), other.secret().unwrap(), "what a proof must cover");
    }

    /// Passes bytes on; what it has seen.
    fn relay(mut from: TcpStream, mut to: TcpStream) -> thread::JoinHandle<Vec<u8>> {
        thread::spawn(move || {
            let (mut seen, mut buffer) = (Vec::new(), [0; 4096]);
            while let Ok(n) = from.read(&mut buffer) {
                if n == 0 || to.write_all(&buffer[..n]).is_err() {
                    break;
                }
                seen.extend_from_slice(&buffer[..n]);
            }
            let _ = to.shutdown(std::net::Shutdown::Both);
            seen
        })
    }

    #[test]
    fn a_long_stream_arrives_whole_and_unseen_whatever_room_there_is() {
        let ((client, near), (far, server)) = (sockets(), sockets());
        let there = relay(near.try_clone().unwrap(), far.try_clone().unwrap());
        let back = relay(far, near);
        let (a, b) = channels(client, server);
        let (mut a, mut b) = (a.into_link().unwrap(), b.into_link().unwrap());
        let words = b"what nobody else must read ";
        let text: Vec<u8> = words.iter().copied().cycle().take(9_000_001).collect();
        let expected = text.clone();
        let reader = thread::spawn(move || {
            let (mut got, mut buffer) = (Vec::new(), vec![0; 50_000]);
            loop {
                match b.try_recv(&mut buffer) {
                    Ok(0) => assert!(b.arm(Interest::Read).unwrap().is_some()),
                    Ok(n) => got.extend_from_slice(&buffer[..n]),
                    Err(e) => return (got, e.kind()),
                }
                if got.len() % 7 == 0 {
                    thread::sleep(std::time::Duration::from_micros(300));
                }
            }
        });
        let mut sent = 0;
        while sent < text.len() {
            let (first, second) = text[sent..].split_at((text.len() - sent) / 2);
            sent += a.try_send(&[IoSlice::new(first), IoSlice::new(second)]).unwrap();
        }
        while !a.flush().unwrap() {}
        a.close();
        let (got, end) = reader.join().unwrap();
        assert!(got == expected, "{} bytes of {}", got.len(), expected.len());
        assert_eq!(end, io::ErrorKind::UnexpectedEof);
        for seen in [there.join().unwrap(), back.join().unwrap()] {
            assert!(!seen.windows(words.len()).any(|w| w == words));
        }
    }
}
