//! Model architectures, written once against shard descriptions.
//!
//! Floor 4 of the house: knows tensors, checkpoints and ranks; never file formats or transports.
//!
//! - [`Plan`] cuts a model into [`Shard`]s: tensor ranks within pipeline stages, evenly or not.
//! - [`load`] reads a rank's shard of a checkpoint into a [`LanguageModel`].
//! - [`LanguageModel::compute`] runs a [`Step`]: some tokens of some sequences, over all ranks;
//!   [`LanguageModel::collect`] brings its logits to rank 0.
//! - [`Ranks`] is what a model asks of its peers; [`Alone`] is a rank without any.
//!
//! A family is one file that reads like its equations: see `llama.rs`.

mod config;
mod decoder;
mod error;
mod llama;
mod loader;
mod ranks;
mod rope;
mod shard;

use serde::{Deserialize, Serialize};
use yunta_checkpoint::Checkpoint;
use yunta_tensor::Backend;

pub use decoder::{LanguageModel, Pending, Step};
pub use error::ModelError;
pub use ranks::{Alone, GroupRanks, Ranks};
pub use shard::{Dims, Plan, Shard};
pub use yunta_tensor::{CacheEdit, KV_BLOCK, KvType, Span};

/// The size and kind of a rank's KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheOptions {
    /// Blocks of [`KV_BLOCK`] positions, shared by all sequences.
    pub blocks: usize,
    /// How keys and values are kept.
    pub kind: KvType,
}

/// What a rank is told when it loads a model.
pub struct LoadOptions<'a> {
    /// The cut of the whole model.
    pub plan: &'a Plan,
    /// This rank.
    pub rank: usize,
    /// The KV cache.
    pub cache: CacheOptions,
    /// Tokens per sequence at most.
    pub context: usize,
    /// Called with bytes loaded so far, from the loading thread.
    pub progress: &'a mut dyn FnMut(u64),
}

/// The dimensions by which a checkpoint's model can be cut.
///
/// # Errors
/// [`ModelError`] if the architecture is not known or the configuration is not complete.
pub fn dims(checkpoint: &Checkpoint) -> Result<Dims, ModelError> {
    Ok(config::Config::parse(checkpoint)?.dims)
}

/// Loads a rank's shard.
///
/// # Errors
/// [`ModelError`] if the architecture is not known, or a tensor is missing or not of its shape.
pub fn load<B: Backend + 'static>(
    checkpoint: &Checkpoint,
    backend: B,
    options: LoadOptions<'_>,
) -> Result<Box<dyn LanguageModel>, ModelError>
where
    B::Tensor: 'static,
    B::Weight: 'static,
    B::Cache: 'static,
{
    let config = config::Config::parse(checkpoint)?;
    Ok(Box::new(decoder::Decoder::<B, llama::Layer<B>>::load(
        checkpoint, backend, config, options,
    )?))
}
