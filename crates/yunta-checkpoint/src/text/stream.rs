//! Text from tokens as they come.

use crate::CheckpointError;
use crate::text::Tokenizer;

/// Decodes a stream of tokens: text is given out as soon as its bytes are complete, each token at
/// the cost of its own length.
///
/// All pieces together are what [`Tokenizer::decode`] makes of all tokens. (One exception: where
/// single-byte tokens in a row are partly text and partly none, `decode` gives up the whole row,
/// while here what was text has already gone out.)
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    /// Bytes of a character that is not complete: three at most.
    pending: Vec<u8>,
    /// No token has come.
    is_first: bool,
    /// Characters that are dropped if they come next, at the start of the text.
    to_strip: usize,
}

impl<'a> StreamDecoder<'a> {
    pub(crate) fn new(tokenizer: &'a Tokenizer, skip_special: bool) -> Self {
        let to_strip = tokenizer.decoder().strip().map_or(0, |(_, times)| times);
        Self { tokenizer, skip_special, pending: Vec::new(), is_first: true, to_strip }
    }

    /// Takes a token; the text that it completes, which may be empty. Ids beyond the vocabulary
    /// (padding of the model's table) have no text.
    ///
    /// # Errors
    /// [`CheckpointError::Tokenizer`] never today; reserved for tokenizers that can fail.
    pub fn push(&mut self, id: u32) -> Result<String, CheckpointError> {
        let Some(token) = self.tokenizer.id_to_token(id) else { return Ok(String::new()) };
        if self.skip_special && self.tokenizer.is_special(id) {
            return Ok(String::new());
        }
        let decoder = self.tokenizer.decoder();
        let bytes = match std::mem::take(&mut self.is_first) {
            true => decoder.first_bytes(&token),
            false => decoder.bytes(&token),
        };
        let bytes = self.stripped(&bytes);
        self.pending.extend_from_slice(bytes);
        Ok(self.take_complete(false))
    }

    /// The end of the stream: what is left, incomplete characters replaced by U+FFFD.
    ///
    /// # Errors
    /// As [`StreamDecoder::push`].
    pub fn flush(&mut self) -> Result<String, CheckpointError> {
        Ok(self.take_complete(true))
    }

    /// Drops what the decoder drops at the start of a text.
    fn stripped<'b>(&mut self, bytes: &'b [u8]) -> &'b [u8] {
        let mut rest = bytes;
        if let Some((c, _)) = self.tokenizer.decoder().strip() {
            let mut buffer = [0; 4];
            let c = c.encode_utf8(&mut buffer).as_bytes();
            while self.to_strip > 0
                && let Some(behind) = rest.strip_prefix(c)
            {
                rest = behind;
                self.to_strip -= 1;
            }
        }
        if !rest.is_empty() {
            self.to_strip = 0;
        }
        rest
    }

    /// Takes out all text, but for a last character that may still be completed unless this is
    /// the `end`; what can never be text is replaced by U+FFFD.
    fn take_complete(&mut self, end: bool) -> String {
        let bytes = std::mem::take(&mut self.pending);
        let mut text = String::new();
        let mut chunks = bytes.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            let invalid = chunk.invalid();
            let is_incomplete =
                || std::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none());
            if !end && chunks.peek().is_none() && is_incomplete() {
                self.pending = invalid.to_vec();
            } else if !invalid.is_empty() {
                let times = self.tokenizer.decoder().replacements(invalid.len());
                text.extend(std::iter::repeat_n('\u{FFFD}', times));
            }
        }
        text
    }
}
