//! A tokenizer, whatever file it came from.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::CheckpointError;
use crate::text::decoder::Decoder;
use crate::text::stream::StreamDecoder;

/// Text to tokens and back, through the `tokenizers` library.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    file: PathBuf,
    decoder: Decoder,
    bos: Option<u32>,
    eos: Option<u32>,
}

impl Tokenizer {
    /// Builds a tokenizer from the text of a tokenizer.json; `file` is named in errors.
    pub(crate) fn from_json(
        file: &Path,
        json: &str,
        bos: Option<String>,
        eos: Option<String>,
    ) -> Result<Self, CheckpointError> {
        // Told apart here, because the library panics on some of what is no JSON.
        serde_json::from_str::<serde::de::IgnoredAny>(json).map_err(|e| Self::error(file, e))?;
        let inner = guarded(file, || tokenizers::Tokenizer::from_str(json))?;
        Self::new(file, inner, bos, eos)
    }

    /// Wraps a tokenizer of the library; `file` is named in errors.
    pub(crate) fn new(
        file: &Path,
        mut inner: tokenizers::Tokenizer,
        bos: Option<String>,
        eos: Option<String>,
    ) -> Result<Self, CheckpointError> {
        // Some files were saved with limits of training, which would cut prompts.
        inner.with_truncation(None).map_err(|e| Self::error(file, e))?;
        inner.with_padding(None);
        let decoder = serde_json::to_value(inner.get_decoder());
        let decoder = decoder.map_err(|e| Self::error(file, e))?;
        let decoder = Decoder::parse(&decoder).map_err(|e| Self::error(file, e))?;
        let id = |token: Option<String>| token.and_then(|t| inner.token_to_id(&t));
        let (bos, eos) = (id(bos), id(eos));
        Ok(Self { file: file.to_owned(), decoder, bos, eos, inner })
    }

    fn error(file: &Path, reason: impl ToString) -> CheckpointError {
        CheckpointError::Tokenizer { file: file.to_owned(), reason: reason.to_string() }
    }

    /// Token ids of a text; `add_special` adds what the model wants before and behind a prompt.
    ///
    /// # Errors
    /// [`CheckpointError::Tokenizer`] if the library refuses.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, CheckpointError> {
        let encoding = guarded(&self.file, || self.inner.encode_fast(text, add_special))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of tokens; `skip_special` leaves special tokens out.
    ///
    /// # Errors
    /// [`CheckpointError::Tokenizer`] if the library refuses.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, CheckpointError> {
        guarded(&self.file, || self.inner.decode(ids, skip_special))
    }

    /// Decodes tokens as they come.
    pub fn stream_decoder(&self, skip_special: bool) -> StreamDecoder<'_> {
        StreamDecoder::new(self, skip_special)
    }

    /// The bytes that a token stands for within a text; `None` if there is no such token.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        Some(self.decoder.bytes(&self.inner.id_to_token(id)?))
    }

    /// The token as the vocabulary writes it.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The id of a token as the vocabulary writes it.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Number of tokens, special ones included.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Whether a token is special: not part of any text.
    pub fn is_special(&self, id: u32) -> bool {
        let added = self.inner.get_added_vocabulary();
        self.inner.id_to_token(id).is_some_and(|token| added.is_special_token(&token))
    }

    /// The token that begins a sequence.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a sequence.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    pub(crate) fn decoder(&self) -> &Decoder {
        &self.decoder
    }
}

/// Calls the library, which panics on some files that say what makes no sense.
fn guarded<T>(
    file: &Path,
    call: impl FnOnce() -> tokenizers::Result<T>,
) -> Result<T, CheckpointError> {
    // A tokenizer half built is dropped; one that encodes changes nothing but its cache, which is
    // behind a lock.
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|e| Tokenizer::error(file, e)),
        Err(_) => Err(Tokenizer::error(file, "its rules make no sense to the tokenizers library")),
    }
}
