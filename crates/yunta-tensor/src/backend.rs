//! The boundary between model code and the device that computes.

use crate::{Slice, TensorError, WeightSource};

/// Consecutive tokens of one sequence within a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// The sequence's slot in the KV cache.
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
    /// Sequences held at once.
    pub slots: usize,
    /// Tokens per sequence at most.
    pub context: usize,
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

    /// Makes an empty key-value cache; memory is taken as sequences grow.
    fn cache(&mut self, shape: CacheShape) -> Self::Cache;

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
    /// [`TensorError::CacheFull`] if a span goes beyond the context.
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

    /// Forgets a sequence.
    fn clear(&mut self, cache: &mut Self::Cache, slot: usize);

    /// Bytes that a cache holds now.
    fn cache_bytes(&self, cache: &Self::Cache) -> usize;
}
