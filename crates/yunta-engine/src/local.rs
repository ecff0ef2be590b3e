//! A model over threads of this process: for evaluations, which need all logits.

use std::thread::JoinHandle;
use std::time::Duration;

use yunta_checkpoint::Checkpoint;
use yunta_comm::{GroupConfig, local_mesh};
use yunta_model::{
    Alone, CacheEdit, CacheOptions, GroupRanks, KV_BLOCK, KvType, LanguageModel, LoadOptions,
    ModelError, Plan, Ranks, Step, load,
};
use yunta_tensor::{CpuBackend, Precision};

use crate::StepPlan;
use crate::rank::{RankError, follow, run_step, stop};

/// Bound on each exchange: threads of one process don't vanish, but may be slow.
const TIMEOUT: Duration = Duration::from_secs(300);

/// How to run a model in this process.
#[derive(Clone, Debug)]
pub struct LocalConfig {
    /// One thread per rank.
    pub plan: Plan,
    /// Sequences at once.
    pub slots: usize,
    /// Tokens per sequence.
    pub context: usize,
    /// Compute threads per rank.
    pub threads: usize,
    /// Arithmetic.
    pub precision: Precision,
    /// How keys and values are kept.
    pub kv: KvType,
}

impl LocalConfig {
    /// Blocks of each slot.
    fn blocks(&self) -> usize {
        self.context.div_ceil(KV_BLOCK)
    }
}

/// A model whose ranks are threads. Rank 0 is the caller.
pub struct LocalModel {
    model: Box<dyn LanguageModel>,
    ranks: Box<dyn Ranks>,
    followers: Vec<JoinHandle<()>>,
    vocab: usize,
    /// Gives every slot blocks of its own; empty once that is done.
    tables: Vec<CacheEdit>,
}

impl LocalModel {
    /// Loads all ranks, each only its slice.
    ///
    /// # Errors
    /// [`RankError`] if the model can't be loaded.
    pub fn load(checkpoint: &Checkpoint, config: &LocalConfig) -> Result<Self, RankError> {
        let mut models = (0..config.plan.size())
            .map(|rank| load_rank(checkpoint, config, rank))
            .collect::<Result<Vec<_>, _>>()?
            .into_iter();
        let model = models.next().ok_or_else(|| ModelError::Cut("no ranks".to_owned()))?;
        let vocab = model.vocab();
        let blocks = config.blocks() as u32;
        let table = |slot: usize| {
            let first = slot as u32 * blocks;
            CacheEdit::Table { slot, keep: 0, blocks: (first..first + blocks).collect() }
        };
        let tables = (0..config.slots).map(table).collect();
        let ranks = Box::new(Alone);
        let mut local = Self { model, ranks, followers: Vec::new(), vocab, tables };
        if config.plan.size() == 1 {
            return Ok(local);
        }
        let group = GroupConfig { timeout: TIMEOUT, ..GroupConfig::default() };
        let worlds = local_mesh(config.plan.size(), &group)?;
        for (rank, world) in worlds.into_iter().enumerate() {
            let mut ranks = GroupRanks::new(world, &config.plan, TIMEOUT, Duration::MAX)?;
            if rank == 0 {
                local.ranks = Box::new(ranks);
            } else if let Some(mut model) = models.next() {
                // An error of a follower reaches rank 0 as a lost peer, with its words.
                let run = move || drop(follow(&mut *model, &mut ranks, None));
                let thread = std::thread::Builder::new().name(format!("rank-{rank}")).spawn(run);
                local.followers.push(
                    thread
                        .map_err(yunta_tensor::TensorError::Thread)
                        .map_err(ModelError::Tensor)?,
                );
            }
        }
        Ok(local)
    }

    /// Tokens in the vocabulary.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Runs a step: the logits of its outputs. A sequence is forgotten by starting another in its
    /// slot.
    ///
    /// # Errors
    /// [`RankError`] if a rank fails or the step makes no sense.
    pub fn run(&mut self, step: Step) -> Result<Vec<f32>, RankError> {
        let plan = StepPlan { edits: std::mem::take(&mut self.tables), step };
        run_step(&mut *self.model, &mut *self.ranks, plan)
    }
}

fn load_rank(
    checkpoint: &Checkpoint,
    config: &LocalConfig,
    rank: usize,
) -> Result<Box<dyn LanguageModel>, RankError> {
    let backend = CpuBackend::new(config.threads, config.precision).map_err(ModelError::Tensor)?;
    let options = LoadOptions {
        plan: &config.plan,
        rank,
        cache: CacheOptions { blocks: config.slots * config.blocks(), kind: config.kv },
        context: config.context,
        progress: &mut |_| {},
    };
    Ok(load(checkpoint, backend, options)?)
}

impl Drop for LocalModel {
    fn drop(&mut self) {
        // If it can't be said, the links are closed, which says the same.
        let _ = stop(&mut *self.ranks);
        self.ranks = Box::new(Alone);
        for thread in self.followers.drain(..) {
            let _ = thread.join();
        }
    }
}
