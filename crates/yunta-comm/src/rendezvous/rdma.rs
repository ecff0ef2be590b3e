//! How two ranks that know each other raise a queue pair between them.
//!
//! Both sides send a record (160 bytes): whether there is a queue pair, whether nothing but RDMA
//! will do, length of a reason (1 each), zero (5), destination (40), reason (80), proof (32). Then
//! both connect, post their receives, and say so in one byte: no frame is sent before the peer can
//! take it. Where RDMA is not all that will do, a failure on either side leaves both with the
//! connection itself.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use super::handshake::{Handshake, Joined, Pair, Side, clear_timeouts, receive_byte};
use crate::verbs::{DESTINATION, Destination, Unconnected, VerbsPort};
use crate::{ReliableLink, StreamLink, Transport};

const HEAD: usize = 8;
const REASON: usize = 80;
const RECORD: usize = HEAD + DESTINATION + REASON;

/// What a side says of its queue pair.
struct Record {
    destination: Result<Destination, String>,
    is_needed: bool,
}

impl Record {
    fn encode(&self) -> [u8; RECORD] {
        let mut reason = self.destination.as_ref().err().map_or("", String::as_str).as_bytes();
        reason = reason.get(..reason.len().min(REASON)).unwrap_or_default();
        let length = u8::try_from(reason.len()).unwrap_or_default();
        let head = [self.destination.is_ok().into(), self.is_needed.into(), length];
        let destination = self.destination.as_ref().map_or([0; DESTINATION], Destination::encode);
        let fields: [&[u8]; 4] = [&head, &[0; HEAD - 3], &destination, reason];
        let mut out = [0; RECORD];
        out.iter_mut().zip(fields.concat()).for_each(|(to, from)| *to = from);
        out
    }

    fn decode(bytes: &[u8; RECORD]) -> Self {
        let [is_there, is_needed, length, ..] = *bytes;
        let body = bytes.get(HEAD..).unwrap_or_default();
        let destination = match body.first_chunk() {
            Some(destination) if is_there != 0 => {
                Destination::decode(destination).map_err(|e| e.to_string())
            }
            _ => {
                let reason = body.get(DESTINATION..).unwrap_or_default();
                let reason = reason.get(..length.into()).unwrap_or_default();
                Err(format!("it says: {}", String::from_utf8_lossy(reason)))
            }
        };
        Self { destination, is_needed: is_needed != 0 }
    }
}

impl Handshake<'_> {
    /// A link over RDMA to a peer, or the connection itself. An inner error is final.
    pub(super) fn over_rdma(
        &self,
        mut stream: TcpStream,
        pair: &Pair,
        peer: usize,
        side: Side,
    ) -> io::Result<Result<Joined, String>> {
        let is_needed =
            self.config.links.transport == Some(Transport::Verbs) || self.is_named(peer, pair.lane);
        let local = stream.local_addr()?.ip();
        let opened = match self.verbs {
            Some(verbs) => verbs.open(peer, pair.lane, local).map_err(|e| e.to_string()),
            None => Err("RDMA is not available".to_owned()),
        };
        let destination = opened.as_ref().map(|o| o.1).map_err(Clone::clone);
        let own = Record { destination, is_needed }.encode();
        let proof = self.proof(&side.label("queue pair"), pair, &own)?;
        stream.write_all(&[&own[..], &proof].concat())?;
        let (mut theirs, mut proof) = ([0; RECORD], [0; 32]);
        stream.read_exact(&mut theirs)?;
        stream.read_exact(&mut proof)?;
        self.verify(&side.other().label("queue pair"), pair, &theirs, &proof)?;
        let theirs = Record::decode(&theirs);
        let is_needed = is_needed || theirs.is_needed;
        let connected = connect(opened.map(|o| o.0), theirs.destination);
        stream.write_all(&[connected.is_ok().into()])?;
        let is_connected = receive_byte(&stream)? != 0;
        match connected {
            Ok(port) if is_connected => {
                clear_timeouts(&stream)?;
                let beside = Box::new(StreamLink::tcp(stream)?);
                let link = ReliableLink::new(Box::new(port), beside, self.config.group.epoch)?;
                Ok(Ok(Joined::Lane(pair.lane, Box::new(link))))
            }
            Err(reason) if is_needed => Ok(Err(reason)),
            Ok(_) if is_needed => Ok(Err("it could not connect its queue pair".to_owned())),
            _ => self.lane(pair, stream, side).map(Ok),
        }
    }
}

fn connect(
    own: Result<Unconnected, String>,
    peer: Result<Destination, String>,
) -> Result<VerbsPort, String> {
    own?.connect(&peer?).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_arrive_however_long_they_are() {
        for reason in ["", "the cable is out", &"é".repeat(60)] {
            let record = Record { destination: Err(reason.to_owned()), is_needed: true };
            let back = Record::decode(&record.encode());
            let told = back.destination.unwrap_err();
            assert!(back.is_needed && told.starts_with("it says: "), "{told}");
            let whole = reason.chars().take(39).collect::<String>();
            assert!(told.contains(&whole), "{told}");
        }
    }
}
