//! What all decoder-only families share: embedding, a stack of layers, logits; and the plumbing
//! of pipeline stages.

use serde::{Deserialize, Serialize};
use yunta_checkpoint::Checkpoint;
use yunta_tensor::{Backend, CacheEdit, CacheShape, Span};

use crate::config::Config;
use crate::loader::{Loader, Split};
use crate::{LoadOptions, ModelError, Plan, Ranks, Shard};

/// Some tokens of some sequences, computed together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Runs of tokens, one per sequence.
    pub spans: Vec<Span>,
    /// The tokens of all spans, one after the other.
    pub tokens: Vec<u32>,
    /// Indices into `tokens` whose next-token logits are wanted.
    pub outputs: Vec<usize>,
}

impl Step {
    /// Adds a run of tokens of one sequence; `outputs` of its last tokens get logits.
    pub fn push(&mut self, slot: usize, position: usize, tokens: &[u32], outputs: usize) {
        self.spans.push(Span { slot, position, tokens: tokens.len() });
        self.tokens.extend_from_slice(tokens);
        self.outputs.extend(self.tokens.len() - outputs..self.tokens.len());
    }
}

/// A step that this rank has computed, and whose logits have not been brought to rank 0 yet.
#[derive(Debug)]
pub struct Pending {
    /// This rank's logits, `[outputs, own vocabulary]`.
    mine: Vec<f32>,
    outputs: usize,
}

/// A rank's part of a model.
pub trait LanguageModel: Send {
    /// Computes this rank's part of a step, together with all other ranks: activations go on to
    /// the next stage, which may still be busy with the step before.
    ///
    /// # Errors
    /// [`ModelError`] if a peer is lost, or the step makes no sense (the same on all ranks).
    fn compute(&mut self, step: &Step, ranks: &mut dyn Ranks) -> Result<Pending, ModelError>;

    /// Waits until all ranks have computed a step. On rank 0: the logits of its outputs,
    /// `[outputs, vocab]`; on the others nothing.
    ///
    /// # Errors
    /// [`ModelError`] if a peer is lost.
    fn collect(&mut self, pending: Pending, ranks: &mut dyn Ranks) -> Result<Vec<f32>, ModelError>;

    /// Changes the tables or blocks of the KV cache.
    ///
    /// # Errors
    /// [`ModelError`] if a block does not exist.
    fn edit(&mut self, edit: &CacheEdit) -> Result<(), ModelError>;

    /// A KV block of this rank, as bytes for [`LanguageModel::import`].
    fn export(&mut self, block: u32) -> Vec<u8>;

    /// Fills a KV block with what [`LanguageModel::export`] gave on a rank of the same shard.
    ///
    /// # Errors
    /// [`ModelError`] if it is of another shape.
    fn import(&mut self, block: u32, bytes: &[u8]) -> Result<(), ModelError>;

    /// Bytes of weights on this rank.
    fn weight_bytes(&self) -> u64;

    /// Bytes of key-value cache on this rank now.
    fn cache_bytes(&self) -> u64;

    /// Bytes of one KV block on this rank.
    fn block_bytes(&self) -> u64;

    /// Tokens in the vocabulary.
    fn vocab(&self) -> usize;

    /// How many positions back any layer looks, the present one included, if all have a bound.
    fn window(&self) -> Option<usize>;
}

/// What a layer computes with.
pub(crate) struct Context<'a, B: Backend> {
    pub(crate) backend: &'a mut B,
    pub(crate) cache: &'a mut B::Cache,
    pub(crate) ranks: &'a mut dyn Ranks,
    pub(crate) spans: &'a [Span],
    /// Rotary angles of the step's tokens.
    pub(crate) angles: &'a B::Tensor,
    /// The layer's index in this rank's cache.
    pub(crate) layer: usize,
}

impl<B: Backend> Context<'_, B> {
    /// `x += sum over the tensor group of (y · wᵀ) + bias`: a layer cut by input, and its
    /// residual connection.
    pub(crate) fn reduce_into(
        &mut self,
        x: &mut B::Tensor,
        y: &B::Tensor,
        layer: &crate::loader::Linear<B>,
    ) -> Result<(), ModelError> {
        let mut sums = self.backend.linear_partial(y, &layer.weight);
        self.ranks.sum(&mut sums)?;
        self.backend.add_sums(x, &sums, layer.bias.as_ref());
        Ok(())
    }
}

/// A layer of a family: its equations.
pub(crate) trait DecoderLayer<B: Backend>: Sized + Send {
    fn load(
        loader: &mut Loader<'_, B>,
        config: &Config,
        shard: &Shard,
        index: usize,
    ) -> Result<Self, ModelError>;

    fn forward(&self, cx: &mut Context<'_, B>, x: B::Tensor) -> Result<B::Tensor, ModelError>;
}

/// Embedding table and output projection of a rank's part of the vocabulary.
struct Head<B: Backend> {
    norm: B::Tensor,
    /// `None` if it is the embedding table.
    projection: Option<B::Weight>,
}

/// A rank's part of a decoder-only model.
pub(crate) struct Decoder<B: Backend, L> {
    backend: B,
    config: Config,
    plan: Plan,
    shard: Shard,
    cache: B::Cache,
    context: usize,
    embedding: Option<B::Weight>,
    layers: Vec<L>,
    head: Option<Head<B>>,
    weight_bytes: u64,
}

impl<B: Backend, L: DecoderLayer<B>> Decoder<B, L> {
    pub(crate) fn load(
        checkpoint: &Checkpoint,
        mut backend: B,
        config: Config,
        options: LoadOptions<'_>,
    ) -> Result<Self, ModelError> {
        let shard = options.plan.shard(options.rank)?.clone();
        let dims = &config.dims;
        let mut loader = Loader::new(checkpoint, &mut backend, options.progress);
        let by_token = Split::Output(shard.vocab.clone());
        let table = [dims.vocab, dims.hidden];
        let embedding = if shard.is_first() || (shard.is_last() && config.tied) {
            let weight = loader.weight("model.embed_tokens.weight", table, &by_token)?;
            Some(weight)
        } else {
            None
        };
        let layers = shard
            .layers
            .clone()
            .map(|i| L::load(&mut loader, &config, &shard, i))
            .collect::<Result<Vec<_>, _>>()?;
        let head = if shard.is_last() {
            let norm = loader.vector("model.norm.weight", dims.hidden, 0..dims.hidden)?;
            let projection = if config.tied {
                None
            } else {
                Some(loader.weight("lm_head.weight", table, &by_token)?)
            };
            Some(Head { norm, projection })
        } else {
            None
        };
        let weight_bytes = loader.bytes();
        let cache = backend.cache(CacheShape {
            layers: layers.len(),
            kv_heads: shard.kv_heads.len(),
            head_dim: dims.head_dim,
            blocks: options.cache.blocks,
            kind: options.cache.kind,
        });
        Ok(Self {
            backend,
            plan: options.plan.clone(),
            shard,
            cache,
            context: options.context,
            embedding,
            layers,
            head,
            weight_bytes,
            config,
        })
    }

    /// Refuses what would index out of bounds: the same verdict on every rank.
    fn check(&self, step: &Step) -> Result<(), ModelError> {
        let tokens: usize = step.spans.iter().map(|s| s.tokens).sum();
        let bad = |what: String| Err(ModelError::Step(what));
        if tokens != step.tokens.len() || step.outputs.iter().any(|&o| o >= tokens) {
            return bad(format!("a step of {tokens} tokens does not match its spans or outputs"));
        }
        if let Some(t) = step.tokens.iter().find(|&&t| t as usize >= self.config.dims.vocab) {
            return bad(format!(
                "token {t} is outside the vocabulary of {}",
                self.config.dims.vocab
            ));
        }
        for span in &step.spans {
            let end = span.position.saturating_add(span.tokens);
            if end > self.context {
                let (slot, context) = (span.slot, self.context);
                return bad(format!("slot {slot} up to position {end} exceeds {context} tokens"));
            }
        }
        Ok(())
    }

    /// The step's activations as they enter this stage.
    fn enter(&mut self, step: &Step, ranks: &mut dyn Ranks) -> Result<B::Tensor, ModelError> {
        let hidden = self.config.dims.hidden;
        let mut x = match &self.embedding {
            Some(table) if self.shard.is_first() => {
                let vocab = &self.shard.vocab;
                let own = |t: &u32| {
                    let t = *t as usize;
                    vocab.contains(&t).then(|| t - vocab.start)
                };
                let rows: Vec<Option<usize>> = step.tokens.iter().map(own).collect();
                let x = self.backend.embed(table, &rows);
                if self.shard.tensor_size == 1 {
                    return Ok(x);
                }
                self.backend.to_host(&x)
            }
            _ => vec![0.0; step.tokens.len() * hidden],
        };
        if self.shard.is_first() {
            ranks.sum_rows(&mut x)?;
        } else {
            ranks.receive(&mut x)?;
        }
        Ok(self.backend.tensor(x, hidden))
    }

    /// This rank's logits of the wanted rows: `[outputs, own vocabulary]`.
    fn logits(&mut self, x: &B::Tensor, outputs: &[usize]) -> Vec<f32> {
        let Some(head) = &self.head else { return Vec::new() };
        let Some(projection) = head.projection.as_ref().or(self.embedding.as_ref()) else {
            return Vec::new();
        };
        let x = self.backend.rows(x, outputs);
        let x = self.backend.rms_norm(&x, &head.norm, self.config.eps);
        let logits = self.backend.linear(&x, &[(projection, None)]);
        logits.first().map(|l| self.backend.to_host(l)).unwrap_or_default()
    }

    /// Brings the logits of the last stage to rank 0, as `[outputs, vocab]`. A step without outputs
    /// is acknowledged by the first rank of the last stage, so that rank 0 never runs far ahead.
    fn gather(&self, pending: &Pending, ranks: &mut dyn Ranks) -> Result<Vec<f32>, ModelError> {
        let outputs = pending.outputs;
        let count = |s: &Shard| match outputs {
            _ if !s.is_last() => 0,
            0 => usize::from(s.tensor_rank == 0),
            _ => outputs * s.vocab.len(),
        };
        let counts: Vec<usize> = self.plan.shards.iter().map(count).collect();
        if outputs == 0 && self.plan.pipeline == 1 {
            return Ok(Vec::new());
        }
        let parts = ranks.gather(&pending.mine, &counts)?;
        let Some(parts) = parts.filter(|_| outputs > 0) else { return Ok(Vec::new()) };
        if self.plan.tensor == 1 {
            return Ok(parts);
        }
        let vocab = self.config.dims.vocab;
        let mut all = vec![0.0; outputs * vocab];
        let mut rest = parts.as_slice();
        for (shard, count) in self.plan.shards.iter().zip(counts) {
            let (part, next) = rest.split_at_checked(count).unwrap_or((&[], &[]));
            rest = next;
            if count == 0 {
                continue;
            }
            for (row, part) in all.chunks_exact_mut(vocab).zip(part.chunks_exact(shard.vocab.len()))
            {
                row[shard.vocab.clone()].copy_from_slice(part);
            }
        }
        Ok(all)
    }
}

impl<B: Backend, L: DecoderLayer<B>> LanguageModel for Decoder<B, L> {
    fn compute(&mut self, step: &Step, ranks: &mut dyn Ranks) -> Result<Pending, ModelError> {
        self.check(step)?;
        let mut x = self.enter(step, ranks)?;
        let positions = step.spans.iter().flat_map(|s| s.position..s.position + s.tokens);
        let angles = self.config.rope.angles(positions);
        let angles = self.backend.tensor(angles, self.config.rope.cols());
        for (i, layer) in self.layers.iter().enumerate() {
            let mut cx = Context {
                backend: &mut self.backend,
                cache: &mut self.cache,
                ranks,
                spans: &step.spans,
                angles: &angles,
                layer: i,
            };
            x = layer.forward(&mut cx, x)?;
        }
        if !self.shard.is_last() {
            let x = self.backend.to_host(&x);
            ranks.send_on(&x)?;
        }
        let outputs = step.outputs.len();
        let mine = match outputs {
            0 if self.shard.is_last() && self.shard.tensor_rank == 0 => vec![0.0],
            0 => Vec::new(),
            _ => self.logits(&x, &step.outputs),
        };
        Ok(Pending { mine, outputs })
    }

    fn collect(&mut self, pending: Pending, ranks: &mut dyn Ranks) -> Result<Vec<f32>, ModelError> {
        self.gather(&pending, ranks)
    }

    fn edit(&mut self, edit: &CacheEdit) -> Result<(), ModelError> {
        Ok(self.backend.edit(&mut self.cache, edit)?)
    }

    fn export(&mut self, block: u32) -> Vec<u8> {
        self.backend.export(&self.cache, block)
    }

    fn import(&mut self, block: u32, bytes: &[u8]) -> Result<(), ModelError> {
        Ok(self.backend.import(&mut self.cache, block, bytes)?)
    }

    fn weight_bytes(&self) -> u64 {
        self.weight_bytes
    }

    fn cache_bytes(&self) -> u64 {
        self.backend.cache_bytes(&self.cache) as u64
    }

    fn block_bytes(&self) -> u64 {
        self.backend.block_bytes(&self.cache) as u64
    }

    fn vocab(&self) -> usize {
        self.config.dims.vocab
    }

    fn window(&self) -> Option<usize> {
        let windows: Option<Vec<usize>> = self.config.layers.iter().map(|l| l.window).collect();
        windows?.into_iter().max()
    }
}
