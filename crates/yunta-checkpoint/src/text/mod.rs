//! From conversations to tokens, and back.

mod decoder;
mod gguf;
mod json;
mod pre;
mod python;
mod stream;
mod template;
mod tokenizer;

pub(crate) use gguf::from_gguf;
pub use stream::StreamDecoder;
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;
