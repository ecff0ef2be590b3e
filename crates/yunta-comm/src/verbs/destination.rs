//! What two ranks tell each other about their queue pairs.

use super::sys::ibv_gid;
use super::{QueueKind, VerbsError};

/// Bytes of the record: kind, global, MTU, zero (1 each), LID, depth (2 each), number, packet
/// number, frame (4 each), GID (16), zero (4); little-endian.
pub(crate) const DESTINATION: usize = 40;

/// Where a peer's queue pair is found, and what it can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Destination {
    pub(super) kind: QueueKind,
    pub(super) is_global: bool,
    /// In the code of verbs: 1 for 256 bytes, 2 for 512 and so on.
    pub(super) mtu: u8,
    pub(super) lid: u16,
    /// Receives that are posted.
    pub(super) depth: u16,
    /// Of the queue pair.
    pub(super) number: u32,
    /// Of the first packet.
    pub(super) psn: u32,
    /// Bytes of a receive.
    pub(super) frame: u32,
    pub(super) gid: ibv_gid,
}

impl Destination {
    pub(crate) fn encode(&self) -> [u8; DESTINATION] {
        let fields: [&[u8]; 8] = [
            &[self.kind.code() as u8, u8::from(self.is_global), self.mtu, 0],
            &self.lid.to_le_bytes(),
            &self.depth.to_le_bytes(),
            &self.number.to_le_bytes(),
            &self.psn.to_le_bytes(),
            &self.frame.to_le_bytes(),
            &self.gid.0,
            &[0; 4],
        ];
        let mut out = [0; DESTINATION];
        out.iter_mut().zip(fields.concat()).for_each(|(to, from)| *to = from);
        out
    }

    pub(crate) fn decode(bytes: &[u8; DESTINATION]) -> Result<Self, VerbsError> {
        let [kind, is_global, mtu, ..] = *bytes;
        Ok(Self {
            kind: QueueKind::from_code(kind).ok_or(VerbsError::Peer("names no kind of queue"))?,
            is_global: is_global != 0,
            mtu,
            lid: u16::from_le_bytes(field(bytes, 4)),
            depth: u16::from_le_bytes(field(bytes, 6)),
            number: u32::from_le_bytes(field(bytes, 8)),
            psn: u32::from_le_bytes(field(bytes, 12)),
            frame: u32::from_le_bytes(field(bytes, 16)),
            gid: ibv_gid(field(bytes, 20)),
        })
    }
}

fn field<const N: usize>(bytes: &[u8; DESTINATION], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_arrive_as_they_were() {
        let there = Destination {
            kind: QueueKind::Unreliable,
            is_global: true,
            mtu: 3,
            lid: 0x0102,
            depth: 60,
            number: 0x0304_0506,
            psn: 0x07_0809,
            frame: 4096,
            gid: ibv_gid(*b"0123456789abcdef"),
        };
        let mut bytes = there.encode();
        assert_eq!(Destination::decode(&bytes), Ok(there));
        bytes[0] = 9;
        assert!(Destination::decode(&bytes).is_err());
    }
}
