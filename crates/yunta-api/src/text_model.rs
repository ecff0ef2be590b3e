//! The text side of a model, as the server needs it.

use serde_json::{Map, Value};

/// Why text could not be turned into tokens or back.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The messages do not fit the model's chat template; the message is for the client.
    #[error("the chat template refuses these messages: {reason}")]
    Template {
        /// The template's complaint.
        reason: String,
    },
    /// The model has no chat template.
    #[error("this model has no chat template: use /v1/completions with a prompt")]
    NoTemplate,
    /// The tokenizer failed.
    #[error("the tokenizer failed: {reason}")]
    Tokenizer {
        /// Its complaint.
        reason: String,
    },
}

/// Tokenizer and chat template of the served model.
pub trait TextModel: Send + Sync + 'static {
    /// Token ids of `text`. With `add_special` the tokens that the tokenizer puts around a text
    /// (such as BOS) are added; special tokens spelt out in `text` are recognised either way.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TextError>;

    /// The prompt text for a conversation, ready for the assistant's turn. `messages` is an array
    /// of objects with `role` and string `content`; `tools` is an array of tool definitions;
    /// `extra` holds further template variables.
    ///
    /// # Errors
    /// [`TextError::Template`] or [`TextError::NoTemplate`].
    fn render_chat(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        extra: &Map<String, Value>,
    ) -> Result<String, TextError>;

    /// A decoder for one output.
    fn decoder(&self) -> Box<dyn TextDecoder>;

    /// The bytes that a token stands for; `None` for unknown ids and tokens without text.
    fn token_bytes(&self, id: u32) -> Option<Vec<u8>>;

    /// Whether the token is a control token, which is not part of the text.
    fn is_special(&self, id: u32) -> bool;

    /// Ids are below this.
    fn vocab_size(&self) -> usize;

    /// Tokens that end a generation.
    fn stop_tokens(&self) -> &[u32];
}

/// Incremental detokeniser: the concatenation of all returned strings is the text.
pub trait TextDecoder: Send {
    /// The text that becomes complete with this token; empty for special tokens and while a
    /// character is incomplete.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    fn push(&mut self, id: u32) -> Result<String, TextError>;

    /// What is left; incomplete characters become U+FFFD.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    fn flush(&mut self) -> Result<String, TextError>;
}
