//! The boundary between model code and the device that computes.

use serde::{Deserialize, Serialize};

use crate::{Slice, TensorError, WeightSource};

/// Positions in a block of a key-value cache.
pub const KV_BLOCK: usize = crate::kernels::kv::BLOCK;

/// Consecutive tokens of one sequence within a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// The sequence's table of blocks in the KV cache.
    pub slot: usize,
    /// Position of the first token.
    pub position: usize,
    /// Number of tokens.
    pub tokens: usize,
}

/// Shape of a key-value cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheShape {
    /// Layers on this rank.
    pub layers: usize,
    /// Key-value heads on this rank.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Blocks of [`KV_BLOCK`] positions.
    pub blocks: usize,
    /// How keys and values are kept.
    pub kind: KvType,
}

/// How keys and values are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvType {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    F16,
    /// 1 byte, and a scale for every 32 elements of a position's head.
    I8,
}

/// A change to the tables and blocks of a cache. All ranks make the same ones in the same order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CacheEdit {
    /// Keeps the first `keep` blocks of a slot's table, and appends `blocks`.
    Table {
        /// The slot.
        slot: usize,
        /// Blocks that stay.
        keep: usize,
        /// Blocks that follow them.
        blocks: Vec<u32>,
    },
    /// Copies a block's contents to another, in all layers.
    Copy {
        /// Source.
        from: u32,
        /// Destination.
        to: u32,
    },
}

/// How attention looks back.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Query heads on this rank.
    pub heads: usize,
    /// Which key-value head of this rank serves query head 0: the first head's place within its
    /// group, so that a rank may start in the middle of a group.
    pub first_in_group: usize,
    /// Query heads that share a key-value head.
    pub group: usize,
    /// Factor on the scores, usually 1/sqrt(head_dim).
    pub scale: f32,
    /// Sliding window in tokens, the present one included.
    pub window: Option<usize>,
}

/// What a device can do: a few dozen fused operations on tensors that model code can't look into.
///
/// Activations are `[tokens, features]`. A weight is `[outputs, inputs]`, packed as the device
/// likes. Operations may be evaluated lazily; what brings values to the host waits.
pub trait Backend: Send {
    /// Activations, or a vector of parameters.
    type Tensor: Send;
    /// A packed weight.
    type Weight: Send;
    /// Key-value caches of all layers on this rank.
    type Cache: Send;

    /// Packs a rank's slice of a weight.
    ///
    /// # Errors
    /// If the source can't be read or its type is no weight type.
    fn weight(
        &mut self,
        source: &dyn WeightSource,
        slice: &Slice,
    ) -> Result<Self::Weight, TensorError>;

    /// Bytes that a weight holds on the device.
    fn weight_bytes(&self, weight: &Self::Weight) -> usize;

    /// Moves values to the device: `[values.len() / cols, cols]`.
    fn tensor(&mut self, values: Vec<f32>, cols: usize) -> Self::Tensor;

    /// Moves values from the device, row by row.
    fn to_host(&mut self, x: &Self::Tensor) -> Vec<f32>;

    /// Makes an empty key-value cache; memory is taken when a block is first written.
    fn cache(&mut self, shape: CacheShape) -> Self::Cache;

    /// Changes tables or blocks.
    ///
    /// # Errors
    /// [`TensorError::NoSuchBlock`].
    fn edit(&mut self, cache: &mut Self::Cache, edit: &CacheEdit) -> Result<(), TensorError>;

    /// A block's contents in all layers, as bytes that only a cache of the same shape reads.
    fn export(&mut self, cache: &Self::Cache, block: u32) -> Vec<u8>;

    /// Fills a block with what [`Backend::export`] gave.
    ///
    /// # Errors
    /// [`TensorError::NoSuchBlock`], or [`TensorError::BlockBytes`] if it is of another shape.
    fn import(
        &mut self,
        cache: &mut Self::Cache,
        block: u32,
        bytes: &[u8],
    ) -> Result<(), TensorError>;

    /// Rows of an embedding table; `None` gives a row of zeros (another rank owns that token).
    fn embed(&mut self, table: &Self::Weight, rows: &[Option<usize>]) -> Self::Tensor;

    /// `x / rms(x) * weight`, over runs of `weight`'s length (a row, or each head of a row).
    fn rms_norm(&mut self, x: &Self::Tensor, weight: &Self::Tensor, eps: f32) -> Self::Tensor;

    /// `x · wᵀ + bias` for several weights at once.
    fn linear(
        &mut self,
        x: &Self::Tensor,
        layers: &[(&Self::Weight, Option<&Self::Tensor>)],
    ) -> Vec<Self::Tensor>;

    /// This rank's share of `x · wᵀ`, where `x` and `w` are slices of the input features:
    /// row-major `[tokens, outputs]`.
    ///
    /// Each cell of inputs ([`Slice::cell`]) is summed by itself and rounded to a multiple of 2^-36, so that
    /// sums over cells and ranks are exact and the result is the same however it was cut.
    fn linear_partial(&mut self, x: &Self::Tensor, weight: &Self::Weight) -> Vec<f64>;

    /// `x += sums + bias`.
    fn add_sums(&mut self, x: &mut Self::Tensor, sums: &[f64], bias: Option<&Self::Tensor>);

    /// Rotates all heads in place. `angles` is `[tokens, 2 * half]`: cosines, then sines.
    fn rotate(&mut self, x: &mut Self::Tensor, head_dim: usize, angles: &Self::Tensor);

    /// Appends keys and values of the spans to the cache and attends to all before them.
    ///
    /// # Errors
    /// [`TensorError::CacheFull`] if a span goes beyond its table, [`TensorError::EmptyBlock`] if
    /// it looks back on what was never written.
    #[allow(clippy::too_many_arguments)]
    fn attend(
        &mut self,
        cache: &mut Self::Cache,
        layer: usize,
        spans: &[Span],
        q: &Self::Tensor,
        k: &Self::Tensor,
        v: &Self::Tensor,
        how: &Attention,
    ) -> Result<Self::Tensor, TensorError>;

    /// `silu(gate) * up`.
    fn silu_mul(&mut self, gate: Self::Tensor, up: &Self::Tensor) -> Self::Tensor;

    /// Some rows of a tensor.
    fn rows(&mut self, x: &Self::Tensor, rows: &[usize]) -> Self::Tensor;

    /// Bytes that a cache holds now.
    fn cache_bytes(&self, cache: &Self::Cache) -> usize;

    /// Bytes of one block in all layers.
    fn block_bytes(&self, cache: &Self::Cache) -> usize;
}
