//! The text side of a checkpoint.

use std::sync::Arc;

use self_cell::self_cell;
use serde_json::{Map, Value};
use yunta_checkpoint::{ChatTemplate, Checkpoint, CheckpointError, StreamDecoder, Tokenizer};

use crate::text_model::{TextDecoder, TextError, TextModel};

/// Tokenizer, chat template and stop tokens as a checkpoint has them.
pub struct CheckpointText {
    /// Shared with the decoders of running requests.
    pub tokenizer: Arc<Tokenizer>,
    /// Absent for base models.
    pub template: Option<ChatTemplate>,
    /// Tokens that end a generation.
    pub stop_tokens: Vec<u32>,
}

impl CheckpointText {
    /// Reads the text side of a checkpoint.
    ///
    /// # Errors
    /// [`CheckpointError`] if the tokenizer or the chat template can't be read.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self, CheckpointError> {
        Ok(Self {
            tokenizer: Arc::new(checkpoint.tokenizer()?),
            template: checkpoint.chat_template()?,
            stop_tokens: checkpoint.stop_tokens(),
        })
    }
}

impl TextModel for CheckpointText {
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError> {
        self.tokenizer.encode(text, add_special).map_err(text_error)
    }

    fn render_chat(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        extra: &Map<String, Value>,
    ) -> Result<String, TextError> {
        let template = self.template.as_ref().ok_or(TextError::NoTemplate)?;
        template.render(messages, tools, true, extra).map_err(text_error)
    }

    fn decoder(&self) -> Box<dyn TextDecoder> {
        let tokenizer = self.tokenizer.clone();
        Box::new(OwnedDecoder::new(tokenizer, |tokenizer| tokenizer.stream_decoder(true)))
    }

    fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        self.tokenizer.token_bytes(id)
    }

    fn is_special(&self, id: u32) -> bool {
        self.tokenizer.is_special(id)
    }

    fn vocab_size(&self) -> usize {
        self.tokenizer.vocab_size()
    }

    fn stop_tokens(&self) -> &[u32] {
        &self.stop_tokens
    }
}

self_cell!(
    /// A decoder that keeps the tokenizer it borrows from: an answer outlives the call that
    /// began it.
    struct OwnedDecoder {
        owner: Arc<Tokenizer>,
        #[covariant]
        dependent: StreamDecoder,
    }
);

impl TextDecoder for OwnedDecoder {
    fn push(&mut self, id: u32) -> Result<String, TextError> {
        self.with_dependent_mut(|_, decoder| decoder.push(id)).map_err(text_error)
    }

    fn flush(&mut self) -> Result<String, TextError> {
        self.with_dependent_mut(|_, decoder| decoder.flush()).map_err(text_error)
    }
}

/// What the template says is for the client; all else is a fault of the model's files.
fn text_error(error: CheckpointError) -> TextError {
    match error {
        CheckpointError::Template { reason } => TextError::Template { reason },
        other => TextError::Tokenizer { reason: other.to_string() },
    }
}
