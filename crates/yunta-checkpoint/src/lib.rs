//! Model files: GGUF, safetensors, configurations, tokenizers and chat templates.
//!
//! Floor 3 of the house: lazy, sliced, memory-mapped; no computation. Nothing in a file is
//! believed before it has been checked against the file's size.
//!
//! - [`Checkpoint`] opens a GGUF file or a Hugging Face folder; names and the configuration have
//!   their Hugging Face form in both cases.
//! - [`Tensor`] gives packed rows, so that a rank touches only its slice.
//! - [`Tokenizer`], [`StreamDecoder`] and [`ChatTemplate`] turn conversations into tokens and
//!   tokens into text.
//!
//! ```no_run
//! use yunta_checkpoint::Checkpoint;
//!
//! let checkpoint = Checkpoint::open("model.gguf".as_ref())?;
//! let ids = checkpoint.tokenizer()?.encode("Hello", true)?;
//! let first_row = checkpoint.tensor("model.embed_tokens.weight")?.row(0)?;
//! # Ok::<(), yunta_checkpoint::CheckpointError>(())
//! ```
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

mod checkpoint;
mod error;
mod folder;
mod gguf;
mod map;
mod tensor;
mod text;

pub use checkpoint::{Checkpoint, Format};
pub use error::CheckpointError;
pub use tensor::Tensor;
pub use text::{ChatTemplate, StreamDecoder, Tokenizer};
