//! Frames: what goes over a link, a header of fixed size and a payload.

use crate::Operation;

/// Bytes of a header.
pub(crate) const HEADER: usize = 32;
const MAGIC: [u8; 4] = *b"YNTA";
/// Marks a frame whose payload is a rank's reason to give up.
const ABORT: u8 = 0xAB;
/// The longest reason that is read.
pub(crate) const REASON_MAX: u64 = 4096;

/// What a header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Data(Operation),
    Abort,
}

/// The header of a frame. Layout, little-endian: magic (4), kind (1), zero (1), group (2),
/// epoch (8), number (8), length (8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    /// Which group of ranks acts.
    pub(crate) group: u16,
    /// The attempt at running the instance.
    pub(crate) epoch: u64,
    /// Counts the operations of the group.
    pub(crate) number: u64,
    /// Bytes of payload.
    pub(crate) length: u64,
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        let kind = match self.kind {
            Kind::Data(op) => op as u8,
            Kind::Abort => ABORT,
        };
        let fields: [&[u8]; 7] = [
            &MAGIC,
            &[kind],
            &[0],
            &self.group.to_le_bytes(),
            &self.epoch.to_le_bytes(),
            &self.number.to_le_bytes(),
            &self.length.to_le_bytes(),
        ];
        for (o, b) in out.iter_mut().zip(fields.concat()) {
            *o = b;
        }
        out
    }

    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Result<Self, String> {
        let (magic, rest) = bytes.split_at(4);
        if magic != MAGIC {
            return Err(format!("a frame starts with {magic:02x?}"));
        }
        let [kind, zero, g0, g1, rest @ ..] = rest else { return Err("short header".to_owned()) };
        let kind = match (*kind, Operation::from_code(*kind)) {
            (_, Some(op)) => Kind::Data(op),
            (ABORT, None) => Kind::Abort,
            (other, None) => return Err(format!("operation {other} does not exist")),
        };
        if *zero != 0 {
            return Err("a reserved byte is set".to_owned());
        }
        let mut words = rest
            .chunks_exact(8)
            .map(|w| w.iter().rev().fold(0u64, |value, byte| value << 8 | u64::from(*byte)));
        let mut word = || words.next().unwrap_or(0);
        let group = u16::from_le_bytes([*g0, *g1]);
        Ok(Self { kind, group, epoch: word(), number: word(), length: word() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn headers_survive_the_wire(group: u16, epoch: u64, number: u64, length: u64, code in 1u8..8) {
            let kind = Kind::Data(Operation::from_code(code).unwrap());
            let header = Header { kind, group, epoch, number, length };
            prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
        }

        #[test]
        fn garbage_never_panics(bytes: [u8; HEADER]) {
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert_eq!(header.encode(), bytes);
            }
        }
    }
}
