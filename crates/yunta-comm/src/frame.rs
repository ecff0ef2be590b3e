//! Frames: what goes over a link. A header of fixed size, a payload, and a trailer.
//!
//! Frames are multiples of 16 bytes, so that payloads are aligned where links show their memory.

use crate::Operation;

/// Bytes of a header.
pub(crate) const HEADER: usize = 48;
/// Bytes of a header that the checksum at its end covers.
const COVERED: usize = HEADER - 4;
/// What frames are aligned to.
const ALIGN: usize = 16;
/// Bytes of a checksum.
pub(crate) const CHECKSUM: usize = 4;
const MAGIC: [u8; 4] = *b"YNTA";
/// Marks a frame whose payload is a rank's reason to give up.
const ABORT: u8 = 0xAB;
/// The payload is followed by its CRC32C.
const CHECKED: u8 = 1;
/// The longest reason that is read.
pub(crate) const REASON_MAX: u64 = 4096;

/// What a header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Data(Operation),
    Abort,
}

/// The header of a frame. Layout, little-endian: magic (4), kind (1), flags (1), group (2),
/// epoch (8), number (8), length (8), part (4), zero (8), CRC32C of all that (4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    /// Whether a checksum of the payload follows it.
    pub(crate) is_checked: bool,
    /// Which group of ranks acts.
    pub(crate) group: u16,
    /// The attempt at running the instance.
    pub(crate) epoch: u64,
    /// Counts the operations of the group.
    pub(crate) number: u64,
    /// Bytes of payload.
    pub(crate) length: u64,
    /// Counts the frames of the operation on this link, in this direction.
    pub(crate) part: u32,
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let kind = match self.kind {
            Kind::Data(op) => op as u8,
            Kind::Abort => ABORT,
        };
        let mut out = [0; HEADER];
        let mut rest = out.as_mut_slice();
        let mut put = |field: &[u8]| {
            if let Some((place, after)) =
                std::mem::take(&mut rest).split_at_mut_checked(field.len())
            {
                place.copy_from_slice(field);
                rest = after;
            }
        };
        put(&MAGIC);
        put(&[kind, if self.is_checked { CHECKED } else { 0 }]);
        put(&self.group.to_le_bytes());
        put(&self.epoch.to_le_bytes());
        put(&self.number.to_le_bytes());
        put(&self.length.to_le_bytes());
        put(&self.part.to_le_bytes());
        let (covered, checksum) = out.split_at_mut(COVERED);
        checksum.copy_from_slice(&crc32c::crc32c(covered).to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Result<Self, String> {
        let mut rest = bytes.as_slice();
        let magic: [u8; 4] = take(&mut rest);
        if magic != MAGIC {
            return Err(format!("a frame starts with {magic:02x?}"));
        }
        let (covered, checksum) = bytes.split_at(COVERED);
        if checksum != crc32c::crc32c(covered).to_le_bytes() {
            return Err("a frame's header does not have its checksum".to_owned());
        }
        let [kind, flags] = take(&mut rest);
        let kind = match (kind, Operation::from_code(kind)) {
            (_, Some(op)) => Kind::Data(op),
            (ABORT, None) => Kind::Abort,
            (other, None) => return Err(format!("operation {other} does not exist")),
        };
        if flags & !CHECKED != 0 {
            return Err(format!("flags {flags:#x} do not exist"));
        }
        let header = Self {
            kind,
            is_checked: flags & CHECKED != 0,
            group: u16::from_le_bytes(take(&mut rest)),
            epoch: u64::from_le_bytes(take(&mut rest)),
            number: u64::from_le_bytes(take(&mut rest)),
            length: u64::from_le_bytes(take(&mut rest)),
            part: u32::from_le_bytes(take(&mut rest)),
        };
        if take::<8>(&mut rest) != [0; 8] {
            return Err("reserved bytes are set".to_owned());
        }
        Ok(header)
    }
}

/// Bytes after a payload of `length`: its checksum, if it has one, and zeros up to the alignment.
pub(crate) fn trailer(length: usize, is_checked: bool) -> usize {
    let checksum = if is_checked { CHECKSUM } else { 0 };
    checksum + (ALIGN - (length % ALIGN + checksum) % ALIGN) % ALIGN
}

/// The most that [`trailer`] gives.
pub(crate) const TRAILER_MAX: usize = ALIGN + CHECKSUM;

fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let mut out = [0; N];
    if let Some((field, after)) = rest.split_at_checked(N) {
        out.copy_from_slice(field);
        *rest = after;
    }
    out
}

/// For the fuzzer: decodes a header; `true` if it is one, which must then encode to the same bytes.
#[doc(hidden)]
pub fn fuzz_header(bytes: &[u8; HEADER]) -> bool {
    Header::decode(bytes).is_ok_and(|header| {
        assert!(header.encode() == *bytes, "a header that is read is one that is written");
        true
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn headers_survive_the_wire(
            group: u16, epoch: u64, number: u64, length: u64, part: u32, code in 1u8..8,
            is_checked: bool, flip in 0usize..HEADER * 8,
        ) {
            let kind = Kind::Data(Operation::from_code(code).unwrap());
            let header = Header { kind, is_checked, group, epoch, number, length, part };
            let mut bytes = header.encode();
            prop_assert_eq!(Header::decode(&bytes), Ok(header));
            bytes[flip / 8] ^= 1 << (flip % 8);
            prop_assert!(Header::decode(&bytes).is_err());
        }

        #[test]
        fn garbage_never_panics(bytes: [u8; HEADER]) {
            fuzz_header(&bytes);
        }

        #[test]
        fn frames_are_aligned(length in 0usize..100_000, is_checked: bool) {
            let trailer = trailer(length, is_checked);
            prop_assert!((HEADER + length + trailer).is_multiple_of(ALIGN));
            prop_assert!(trailer <= TRAILER_MAX);
            let least = if is_checked { CHECKSUM } else { 0 };
            prop_assert!(trailer >= least);
        }
    }
}
