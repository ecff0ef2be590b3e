//! Messages between a gateway and the leader rank, and their framing: one JSON object per line.
//!
//! JSON, because a message is small next to the step that it starts or reports, and a person can
//! read it in a capture. Lines are bounded.

use std::io::{BufRead, Read, Write};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{Event, Request, RequestId};

/// The longest line that is read: a prompt of a million tokens fits.
pub const LINE_BYTES_MAX: u64 = 16 << 20;

/// From a gateway to the leader.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToLeader {
    /// Run this.
    Submit(Box<Request>),
    /// Stop running this.
    Cancel(RequestId),
}

/// From the leader to a gateway.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromLeader {
    /// First on every connection: proves that the leader is the one the gateway waits for.
    Hello {
        /// The instance's secret, in hexadecimal.
        secret: String,
        /// The attempt at running the instance.
        epoch: u64,
    },
    /// Something happened to a request.
    Event {
        /// The request.
        id: RequestId,
        /// What happened.
        event: Event,
    },
}

/// Why a message could not be exchanged.
#[derive(Debug, thiserror::Error)]
pub enum WireError {
    /// The connection failed.
    #[error("connection: {0}")]
    Io(#[from] std::io::Error),
    /// A line is no such message.
    #[error("a line is no {what}: {reason}")]
    Malformed {
        /// The kind of message expected.
        what: &'static str,
        /// What the parser says.
        reason: String,
    },
    /// A line exceeds [`LINE_BYTES_MAX`].
    #[error("a line exceeds {LINE_BYTES_MAX} bytes")]
    TooLong,
}

/// Writes one message.
///
/// # Errors
/// [`WireError::Io`] if the peer is gone.
pub fn write_line<T: Serialize>(mut to: impl Write, message: &T) -> Result<(), WireError> {
    let mut line = serde_json::to_vec(message).map_err(std::io::Error::from)?;
    line.push(b'\n');
    to.write_all(&line)?;
    Ok(to.flush()?)
}

/// Reads one message; `None` at the end of the stream.
///
/// # Errors
/// [`WireError`] if the connection fails or the line is no `T`.
pub fn read_line<T: DeserializeOwned>(from: &mut impl BufRead) -> Result<Option<T>, WireError> {
    let mut line = Vec::new();
    from.by_ref().take(LINE_BYTES_MAX).read_until(b'\n', &mut line)?;
    if line.is_empty() {
        return Ok(None);
    }
    if !line.ends_with(b"\n") {
        // Cut off in the middle: by the bound, or by a peer that died.
        return if line.len() as u64 >= LINE_BYTES_MAX {
            Err(WireError::TooLong)
        } else {
            Ok(None)
        };
    }
    let what = std::any::type_name::<T>().rsplit("::").next().unwrap_or("message");
    serde_json::from_slice(&line)
        .map(Some)
        .map_err(|e| WireError::Malformed { what, reason: e.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    #[test]
    fn messages_survive_the_wire() {
        let message = ToLeader::Cancel(RequestId(7));
        let mut bytes = Vec::new();
        write_line(&mut bytes, &message).unwrap();
        let mut from = Cursor::new(bytes);
        assert_eq!(read_line::<ToLeader>(&mut from).unwrap(), Some(message));
        assert_eq!(read_line::<ToLeader>(&mut from).unwrap(), None);
    }

    #[test]
    fn garbage_is_an_error_and_a_torn_line_an_end() {
        assert!(read_line::<ToLeader>(&mut Cursor::new(b"{\"x\":1}\n")).is_err());
        assert!(read_line::<ToLeader>(&mut Cursor::new(b"{\"cancel\":")).unwrap().is_none());
    }
}
