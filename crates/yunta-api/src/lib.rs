//! The HTTP front end: OpenAI's chat and text completions over an [`Engine`](yunta_engine::Engine).
//!
//! It checks requests, renders chat templates, tokenises, submits, and turns tokens back into
//! text, whole or streamed as server-sent events. It knows no model mathematics, no ranks and no
//! transports, and it keeps no conversation: every request carries all that it needs.
//!
//! - [`ServerConfig`]: names, limits and deadlines.
//! - [`TextModel`]: tokenizer and chat template; [`CheckpointText`] is the one of a checkpoint.
//! - [`ApiState`]: the above and an engine, shared by all requests.
//! - [`router`] for tests and embedding, [`serve`] for a listener and a graceful end.
//! - [`text`]: detokenisation with stop strings, useful to other front ends as well.
//!
//! # Failures
//!
//! Every error is OpenAI's error object (see [`ApiError`]). An answer that fails after its stream
//! has begun ends with an event `data: {"error": {..}}` and without `data: [DONE]`: OpenAI's
//! clients raise it as an error, and no client can take the answer for complete.
//!
//! # Bounds
//!
//! Open requests are counted ([`ServerConfig::max_open_requests`]); what is beyond gets 429. The
//! channel from the engine to a request has room for all the tokens the request may have, so the
//! engine's threads never wait for a client, however slow it reads. A client that hangs up drops
//! the answer, which cancels the engine's work at once.
//!
//! # Example
//!
//! ```
//! use std::sync::Arc;
//! use yunta_api::{ApiState, ServerConfig, TextModel, serve};
//! use yunta_engine::Engine;
//!
//! async fn run(engine: Arc<dyn Engine>, text: Arc<dyn TextModel>) -> std::io::Result<()> {
//!     let state = ApiState::new(ServerConfig::new("org/Model"), engine, text);
//!     let listener = tokio::net::TcpListener::bind("127.0.0.1:8080").await?;
//!     serve(listener, state, async { tokio::signal::ctrl_c().await.unwrap_or(()) }).await
//! }
//! ```

mod access_log;
mod answer;
mod chat;
mod checkpoint_text;
mod completions;
mod config;
mod cors;
mod error;
mod fields;
mod generation;
mod logprobs;
mod params;
mod response_format;
mod sampling;
mod server;
pub mod text;
mod text_model;

pub use checkpoint_text::CheckpointText;
pub use config::{ApiKey, ServerConfig};
pub use error::ApiError;
pub use server::{ApiState, router, serve};
pub use text_model::{TextDecoder, TextError, TextModel};
