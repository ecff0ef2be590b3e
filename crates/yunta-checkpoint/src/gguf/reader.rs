//! The primitive values of a GGUF file, each checked against the end of the file.

use std::collections::HashMap;
use std::path::Path;

use crate::CheckpointError;

/// Arrays of arrays are legal; deeper nesting than this is not meant seriously.
const DEPTH_MAX: u32 = 4;

/// Elements of all arrays together: five times what the largest vocabularies need. Each costs far
/// more memory than the byte it may take in a file.
const ELEMENTS_MAX: u64 = 1 << 23;
/// No template, no token and no name is longer.
const STRING_BYTES_MAX: u64 = 1 << 24;

/// Metadata by key.
pub(crate) type Metadata = HashMap<String, MetadataValue>;

/// A metadata value; integers and floats are widened.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum MetadataValue {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    Array(Vec<MetadataValue>),
}

impl MetadataValue {
    pub(crate) fn unsigned(&self) -> Option<u64> {
        match self {
            Self::Unsigned(n) => Some(*n),
            Self::Signed(n) => u64::try_from(*n).ok(),
            _ => None,
        }
    }

    pub(crate) fn float(&self) -> Option<f64> {
        match self {
            Self::Float(x) => Some(*x),
            Self::Unsigned(n) => Some(*n as f64),
            Self::Signed(n) => Some(*n as f64),
            _ => None,
        }
    }

    pub(crate) fn bool(&self) -> Option<bool> {
        match self {
            Self::Bool(b) => Some(*b),
            _ => None,
        }
    }

    pub(crate) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(s) => Some(s),
            _ => None,
        }
    }

    pub(crate) fn array(&self) -> Option<&[Self]> {
        match self {
            Self::Array(a) => Some(a),
            _ => None,
        }
    }
}

/// Reads a file from its beginning.
pub(crate) struct Reader<'a> {
    data: &'a [u8],
    at: usize,
    path: &'a Path,
    /// Of arrays, so far.
    elements: u64,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(data: &'a [u8], path: &'a Path) -> Self {
        Self { data, at: 0, path, elements: 0 }
    }

    pub(crate) fn position(&self) -> usize {
        self.at
    }

    pub(crate) fn bad(&self, reason: impl Into<String>) -> CheckpointError {
        CheckpointError::malformed(self.path, reason)
    }

    pub(crate) fn bytes(&mut self, n: usize) -> Result<&'a [u8], CheckpointError> {
        let end = self.at.checked_add(n).filter(|end| *end <= self.data.len());
        let found = end.and_then(|end| Some((self.data.get(self.at..end)?, end)));
        let Some((bytes, end)) = found else {
            let at = self.at;
            return Err(self.bad(format!("it ends within its header, at byte {at}: truncated?")));
        };
        self.at = end;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], CheckpointError> {
        let mut out = [0; N];
        out.copy_from_slice(self.bytes(N)?);
        Ok(out)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, CheckpointError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, CheckpointError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn string(&mut self) -> Result<String, CheckpointError> {
        let length = self.u64()?;
        self.room_for(length, 1, "bytes of a string")?;
        if length > STRING_BYTES_MAX {
            return Err(self.bad(format!("a string of {length} bytes is not meant seriously")));
        }
        let bytes = self.bytes(length as usize)?;
        // Token texts are not always valid UTF-8; nothing else is affected.
        Ok(String::from_utf8_lossy(bytes).into_owned())
    }

    /// Refuses a count that the rest of the file can't hold, before anything is allocated for it.
    pub(crate) fn room_for(&self, n: u64, least: u64, what: &str) -> Result<(), CheckpointError> {
        let left = (self.data.len() - self.at) as u64;
        if n > left / least {
            return Err(
                self.bad(format!("{n} {what} do not fit in the {left} bytes that are left"))
            );
        }
        Ok(())
    }

    pub(crate) fn metadata(&mut self, pairs: u64) -> Result<Metadata, CheckpointError> {
        /// Length of a key, type, the smallest value.
        const LEAST: u64 = 8 + 4 + 1;
        self.room_for(pairs, LEAST, "metadata pairs")?;
        let mut metadata = Metadata::new();
        for _ in 0..pairs {
            let key = self.string()?;
            let kind = self.u32()?;
            let value = self.value(kind, &key, 0)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(self.bad(format!("metadata key `{key}` occurs twice")));
            }
        }
        Ok(metadata)
    }

    fn value(
        &mut self,
        kind: u32,
        key: &str,
        depth: u32,
    ) -> Result<MetadataValue, CheckpointError> {
        use MetadataValue as V;
        Ok(match kind {
            0 => V::Unsigned(u8::from_le_bytes(self.array()?).into()),
            1 => V::Signed(i8::from_le_bytes(self.array()?).into()),
            2 => V::Unsigned(u16::from_le_bytes(self.array()?).into()),
            3 => V::Signed(i16::from_le_bytes(self.array()?).into()),
            4 => V::Unsigned(self.u32()?.into()),
            5 => V::Signed(i32::from_le_bytes(self.array()?).into()),
            6 => V::Float(f32::from_le_bytes(self.array()?).into()),
            7 => V::Bool(u8::from_le_bytes(self.array()?) != 0),
            8 => V::Text(self.string()?),
            9 => self.array_value(key, depth)?,
            10 => V::Unsigned(self.u64()?),
            11 => V::Signed(i64::from_le_bytes(self.array()?)),
            12 => V::Float(f64::from_le_bytes(self.array()?)),
            _ => return Err(self.bad(format!("metadata `{key}` has unknown type {kind}"))),
        })
    }

    fn array_value(&mut self, key: &str, depth: u32) -> Result<MetadataValue, CheckpointError> {
        if depth >= DEPTH_MAX {
            return Err(self.bad(format!("metadata `{key}` is nested deeper than {DEPTH_MAX}")));
        }
        let kind = self.u32()?;
        let count = self.u64()?;
        let least = match kind {
            2 | 3 => 2,
            4..=6 => 4,
            8 | 10..=12 => 8,
            9 => 12,
            _ => 1,
        };
        self.room_for(count, least, "array elements")?;
        self.elements = self.elements.saturating_add(count);
        if self.elements > ELEMENTS_MAX {
            return Err(self.bad(format!("metadata arrays hold more than {ELEMENTS_MAX} elements")));
        }
        (0..count)
            .map(|_| self.value(kind, key, depth + 1))
            .collect::<Result<_, _>>()
            .map(MetadataValue::Array)
    }
}
