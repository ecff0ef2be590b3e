//! The llama family: llama 2 and 3, mistral, qwen2, qwen3, smollm, smollm3.
//!
//! ```text
//! h = x + Wo · attention(rope(qnorm(Wq n)), rope(knorm(Wk n)), Wv n)      n = rmsnorm(x)
//! y = h + Wdown · (silu(Wgate m) * (Wup m))                               m = rmsnorm(h)
//! ```
//! Biases and the norms of queries and keys are there if the checkpoint has them.
//! Sources: Touvron et al. 2023; Jiang et al. 2023; Qwen team 2024, 2025.

use yunta_tensor::{Attention, Backend};

use crate::ModelError;
use crate::Shard;
use crate::config::{Config, LayerConfig};
use crate::decoder::{Context, DecoderLayer};
use crate::loader::{Linear, Loader, Split};

/// One decoder layer: query, key, value, gate and up cut by output; output and down by input.
pub(crate) struct Layer<B: Backend> {
    config: LayerConfig,
    eps: f32,
    head_dim: usize,
    attention: Attention,
    input_norm: B::Tensor,
    query: Linear<B>,
    key: Linear<B>,
    value: Linear<B>,
    /// Norms of each query and key head (qwen3).
    head_norms: Option<(B::Tensor, B::Tensor)>,
    output: Linear<B>,
    feed_forward_norm: B::Tensor,
    gate: Linear<B>,
    up: Linear<B>,
    down: Linear<B>,
}

impl<B: Backend> DecoderLayer<B> for Layer<B> {
    fn load(
        loader: &mut Loader<'_, B>,
        config: &Config,
        shard: &Shard,
        index: usize,
    ) -> Result<Self, ModelError> {
        let dims = &config.dims;
        let (hidden, head_dim, wide) = (dims.hidden, dims.head_dim, dims.feed_forward);
        let name = |part: &str| format!("model.layers.{index}.{part}");
        let features =
            |heads: &std::ops::Range<usize>| heads.start * head_dim..heads.end * head_dim;
        let (heads, kv_heads) = (features(&shard.heads), features(&shard.kv_heads));
        let by_head = Split::Output(heads.clone());
        let by_kv_head = Split::Output(kv_heads);
        let by_feature = Split::Output(shard.feed_forward.clone());
        let from_heads = Split::Input(heads, head_dim);
        let from_features = Split::Input(shard.feed_forward.clone(), dims.feed_forward_cell());
        let (all_heads, all_kv) = (dims.heads * head_dim, dims.kv_heads * head_dim);

        let (query_norm, key_norm) =
            (name("self_attn.q_norm.weight"), name("self_attn.k_norm.weight"));
        let head_norms = if loader.contains(&query_norm) {
            Some((
                loader.vector(&query_norm, head_dim, 0..head_dim)?,
                loader.vector(&key_norm, head_dim, 0..head_dim)?,
            ))
        } else {
            None
        };
        let mut norm = |part: &str| loader.vector(&name(part), hidden, 0..hidden);
        let input_norm = norm("input_layernorm.weight")?;
        let feed_forward_norm = norm("post_attention_layernorm.weight")?;
        let mut linear = |part: &str, shape, split| loader.linear(&name(part), shape, split);
        Ok(Self {
            config: config.layers[index].clone(),
            eps: config.eps,
            head_dim,
            attention: Attention {
                heads: shard.heads.len(),
                first_in_group: shard.heads.start % dims.group(),
                group: dims.group(),
                scale: 1.0 / (head_dim as f32).sqrt(),
                window: config.layers[index].window,
            },
            query: linear("self_attn.q_proj", [all_heads, hidden], &by_head)?,
            key: linear("self_attn.k_proj", [all_kv, hidden], &by_kv_head)?,
            value: linear("self_attn.v_proj", [all_kv, hidden], &by_kv_head)?,
            output: linear("self_attn.o_proj", [hidden, all_heads], &from_heads)?,
            gate: linear("mlp.gate_proj", [wide, hidden], &by_feature)?,
            up: linear("mlp.up_proj", [wide, hidden], &by_feature)?,
            down: linear("mlp.down_proj", [hidden, wide], &from_features)?,
            input_norm,
            head_norms,
            feed_forward_norm,
        })
    }

    fn forward(&self, cx: &mut Context<'_, B>, mut x: B::Tensor) -> Result<B::Tensor, ModelError> {
        let n = cx.backend.rms_norm(&x, &self.input_norm, self.eps);
        let a = self.attend(cx, &n)?;
        cx.reduce_into(&mut x, &a, &self.output)?;

        let m = cx.backend.rms_norm(&x, &self.feed_forward_norm, self.eps);
        let [gate, up] = outputs_of(cx.backend.linear(&m, &[self.gate.parts(), self.up.parts()]))?;
        let f = cx.backend.silu_mul(gate, &up);
        cx.reduce_into(&mut x, &f, &self.down)?;
        Ok(x)
    }
}

impl<B: Backend> Layer<B> {
    fn attend(&self, cx: &mut Context<'_, B>, n: &B::Tensor) -> Result<B::Tensor, ModelError> {
        let b = &mut *cx.backend;
        let qkv = b.linear(n, &[self.query.parts(), self.key.parts(), self.value.parts()]);
        let [mut q, mut k, v] = outputs_of(qkv)?;
        if let Some((query_norm, key_norm)) = &self.head_norms {
            q = b.rms_norm(&q, query_norm, self.eps);
            k = b.rms_norm(&k, key_norm, self.eps);
        }
        if self.config.rotary {
            b.rotate(&mut q, self.head_dim, cx.angles);
            b.rotate(&mut k, self.head_dim, cx.angles);
        }
        Ok(b.attend(cx.cache, cx.layer, cx.spans, &q, &k, &v, &self.attention)?)
    }
}

/// The outputs of a joint linear operation, which gives one per weight.
fn outputs_of<T, const N: usize>(outputs: Vec<T>) -> Result<[T; N], ModelError> {
    let n = outputs.len();
    outputs.try_into().map_err(|_| ModelError::Step(format!("{n} outputs of {N} weights")))
}
