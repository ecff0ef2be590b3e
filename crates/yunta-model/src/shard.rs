//! How a model is cut.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::ModelError;

/// The dimensions of a model along which it can be cut.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dims {
    /// Decoder layers.
    pub layers: usize,
    /// Features of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Features of the feed-forward layer.
    pub feed_forward: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Tokens per sequence that the model was made for.
    pub context: usize,
}

impl Dims {
    /// Query heads that share a key-value head.
    pub fn group(&self) -> usize {
        self.heads / self.kv_heads.max(1)
    }

    /// The feed-forward layer is cut at multiples of this, and its sums are formed over runs of
    /// this length. It depends on the model alone, so that every cut computes the same: a
    /// multiple of the quantisation group, with enough cells to share out.
    pub fn feed_forward_cell(&self) -> usize {
        let n = self.feed_forward;
        [256, 128, 64]
            .into_iter()
            .find(|cell| n.is_multiple_of(*cell) && n / cell >= 24)
            .unwrap_or(if n.is_multiple_of(32) { 32 } else { 1 << n.trailing_zeros().min(5) })
    }
}

/// A rank's part of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shard {
    /// Pipeline stage, from 0.
    pub stage: usize,
    /// Number of stages.
    pub stages: usize,
    /// Rank within the stage's tensor group.
    pub tensor_rank: usize,
    /// Size of the tensor group.
    pub tensor_size: usize,
    /// Layers of this stage.
    pub layers: Range<usize>,
    /// Query heads of this rank.
    pub heads: Range<usize>,
    /// Key-value heads that serve them; neighbours may hold the same one.
    pub kv_heads: Range<usize>,
    /// Feed-forward features of this rank.
    pub feed_forward: Range<usize>,
    /// Tokens whose embedding and logit this rank computes.
    pub vocab: Range<usize>,
}

impl Shard {
    /// Whether this stage embeds tokens.
    pub fn is_first(&self) -> bool {
        self.stage == 0
    }

    /// Whether this stage computes logits.
    pub fn is_last(&self) -> bool {
        self.stage + 1 == self.stages
    }
}

/// The cut of a model over all ranks: rank = stage * tensor + tensor rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Ranks per stage.
    pub tensor: usize,
    /// Stages.
    pub pipeline: usize,
    /// One shard per rank.
    pub shards: Vec<Shard>,
}

impl Plan {
    /// Cuts a model into `pipeline` stages of `tensor` ranks, as evenly as its heads and layers
    /// allow.
    ///
    /// # Errors
    /// [`ModelError::Cut`] if a number is 0 or there are more stages than layers.
    pub fn even(dims: &Dims, tensor: usize, pipeline: usize) -> Result<Self, ModelError> {
        Self::weighted(dims, &vec![1.0; tensor], &vec![1.0; pipeline])
    }

    /// Cuts a model in proportion to the shares of the ranks within each stage, and of the stages.
    ///
    /// # Errors
    /// [`ModelError::Cut`] if there are no shares, one is not positive, or there are more stages
    /// than layers.
    pub fn weighted(dims: &Dims, tensor: &[f64], pipeline: &[f64]) -> Result<Self, ModelError> {
        let bad = |s: &f64| !s.is_finite() || *s <= 0.0;
        if tensor.is_empty() || pipeline.is_empty() {
            return Err(ModelError::Cut("a model is cut into at least one rank".to_owned()));
        }
        if tensor.iter().chain(pipeline).any(bad) {
            return Err(ModelError::Cut(
                "the share of a rank must be a positive number".to_owned(),
            ));
        }
        if pipeline.len() > dims.layers {
            let (stages, layers) = (pipeline.len(), dims.layers);
            return Err(ModelError::Cut(format!("{layers} layers can't make {stages} stages")));
        }
        let layers = intervals(dims.layers, pipeline, 1);
        let heads = intervals(dims.heads, tensor, 0);
        let cell = dims.feed_forward_cell();
        let cells = intervals(dims.feed_forward / cell, tensor, 0);
        let vocab = intervals(dims.vocab, tensor, 0);
        let mut shards = Vec::new();
        for (stage, layers) in layers.iter().enumerate() {
            for tensor_rank in 0..tensor.len() {
                let heads = heads[tensor_rank].clone();
                let group = dims.group();
                let kv_heads = if heads.is_empty() {
                    0..0
                } else {
                    heads.start / group..heads.end.div_ceil(group)
                };
                let cells = &cells[tensor_rank];
                shards.push(Shard {
                    stage,
                    stages: pipeline.len(),
                    tensor_rank,
                    tensor_size: tensor.len(),
                    layers: layers.clone(),
                    heads,
                    kv_heads,
                    feed_forward: cells.start * cell..cells.end * cell,
                    vocab: vocab[tensor_rank].clone(),
                });
            }
        }
        Ok(Self { tensor: tensor.len(), pipeline: pipeline.len(), shards })
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.shards.len()
    }

    /// The shard of a rank.
    ///
    /// # Errors
    /// [`ModelError::Cut`] if there is no such rank.
    pub fn shard(&self, rank: usize) -> Result<&Shard, ModelError> {
        let size = self.size();
        self.shards.get(rank).ok_or_else(|| {
            ModelError::Cut(format!("rank {rank} is none of the {size} of the plan"))
        })
    }
}

/// Cuts `n` into consecutive intervals in proportion to `shares`, at least `least` each.
/// `n >= least * shares.len()`.
fn intervals(n: usize, shares: &[f64], least: usize) -> Vec<Range<usize>> {
    let total: f64 = shares.iter().sum();
    let mut bounds = vec![0];
    let mut sum = 0.0;
    for (i, share) in shares.iter().enumerate() {
        sum += share;
        // Rounding up gives earlier ranks the odd ones; the last bound is `n` by construction.
        let ideal = (n as f64 * sum / total - 1e-9).ceil().max(0.0) as usize;
        let low = bounds[i] + least;
        let high = n - least * (shares.len() - 1 - i);
        bounds.push(if i + 1 == shares.len() { n } else { ideal.clamp(low, high) });
    }
    bounds.windows(2).map(|w| w[0]..w[1]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn smollm2() -> Dims {
        Dims {
            layers: 30,
            hidden: 576,
            heads: 9,
            kv_heads: 3,
            head_dim: 64,
            feed_forward: 1536,
            vocab: 49152,
            context: 8192,
        }
    }

    #[test]
    fn two_ranks_share_nine_heads() {
        let plan = Plan::even(&smollm2(), 2, 1).unwrap();
        assert_eq!((plan.shards[0].heads.clone(), plan.shards[0].kv_heads.clone()), (0..5, 0..2));
        assert_eq!((plan.shards[1].heads.clone(), plan.shards[1].kv_heads.clone()), (5..9, 1..3));
    }

    #[test]
    fn an_odd_number_of_layers_is_never_dropped() {
        for stages in 2..=5 {
            let plan = Plan::even(&Dims { layers: 61, ..smollm2() }, 1, stages).unwrap();
            assert_eq!(plan.shards.iter().map(|s| s.layers.len()).sum::<usize>(), 61);
        }
    }

    #[test]
    fn cuts_without_sense_are_refused() {
        assert!(Plan::even(&smollm2(), 0, 1).is_err());
        assert!(Plan::even(&smollm2(), 1, 31).is_err());
        assert!(Plan::weighted(&smollm2(), &[1.0, f64::NAN], &[1.0]).is_err());
        assert!(Plan::weighted(&smollm2(), &[1.0, -1.0], &[1.0]).is_err());
    }

    proptest! {
        #[test]
        fn every_part_belongs_to_exactly_one_rank(
            tensor in prop::collection::vec(0.1f64..10.0, 1..9),
            pipeline in prop::collection::vec(0.1f64..10.0, 1..9),
        ) {
            let dims = smollm2();
            let plan = Plan::weighted(&dims, &tensor, &pipeline).unwrap();
            let covers = |parts: Vec<Range<usize>>, n: usize| {
                let end = parts.iter().fold(0, |at, r| if r.start == at { r.end } else { usize::MAX });
                end == n
            };
            let of_stage = |s: usize| plan.shards.iter().filter(move |x| x.stage == s);
            for s in 0..pipeline.len() {
                prop_assert!(covers(of_stage(s).map(|x| x.heads.clone()).collect(), dims.heads));
                prop_assert!(covers(of_stage(s).map(|x| x.vocab.clone()).collect(), dims.vocab));
                let ff = of_stage(s).map(|x| x.feed_forward.clone()).collect();
                prop_assert!(covers(ff, dims.feed_forward));
                for x in of_stage(s) {
                    for h in x.heads.clone() {
                        prop_assert!(x.kv_heads.contains(&(h / dims.group())));
                    }
                    prop_assert!(!x.layers.is_empty());
                }
            }
            let first = plan.shards.iter().filter(|x| x.tensor_rank == 0);
            prop_assert!(covers(first.map(|x| x.layers.clone()).collect(), dims.layers));
        }
    }
}
