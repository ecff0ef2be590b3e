//! From what the user typed to a running model.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use tracing_subscriber::EnvFilter;
use yunta_checkpoint::Checkpoint;
use yunta_cluster::{Instance, InstanceConfig, Limits, PrefixCache};
use yunta_hub::{Hub, TerminalProgress};
use yunta_model::{CacheOptions, Dims, KV_BLOCK, KvType};

use crate::args::ModelArgs;

/// Sequences longer than this must be asked for: they take memory.
const CONTEXT_DEFAULT_MAX: usize = 8192;
/// The KV cache holds so many contexts, if there is memory.
const CONTEXTS: usize = 16;
/// Free memory that the KV cache may take: one in so many parts.
const MEMORY_PARTS: u64 = 3;

/// Logs go to standard error; `YUNTA_LOG` chooses (`info`, `yunta_api=debug`, ...).
pub(crate) fn init_logging() {
    let filter = EnvFilter::try_from_env("YUNTA_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
}

/// Finds the model, fetching it if it is not here.
pub(crate) fn find_model(model: &str) -> Result<PathBuf> {
    Ok(Hub::from_env().pull(model, &TerminalProgress::new())?)
}

/// A model found and opened, and how it will be run.
pub(crate) struct Prepared {
    pub(crate) checkpoint: Checkpoint,
    pub(crate) config: InstanceConfig,
}

/// Opens the model and plans its cut.
pub(crate) fn prepare(args: &ModelArgs) -> Result<Prepared> {
    let path = find_model(&args.compute.model)?;
    let checkpoint = Checkpoint::open(&path)?;
    let dims = yunta_model::dims(&checkpoint)?;
    let plan = args.compute.cut.plan(&dims)?;
    let ranks = plan.size();
    let config = InstanceConfig {
        program: std::env::current_exe().context("where this program lies is not known")?,
        model: path,
        plan,
        limits: limits(args, &dims),
        threads: args.compute.threads(ranks),
        float32: args.compute.float32,
        step_timeout: Duration::from_secs(args.step_timeout.max(1)),
        draft_model: args
            .draft_model
            .as_deref()
            .map(|m| draft_model(m, &checkpoint))
            .transpose()?,
        prefix_cache: args
            .prefix_cache
            .clone()
            .map(|folder| PrefixCache { folder, bytes_max: args.prefix_cache_mib << 20 }),
        links: args.compute.cut.links.config(),
        emulation: args.compute.cut.emulation(),
    };
    Ok(Prepared { checkpoint, config })
}

/// Finds the draft model, which must have the same tokens.
fn draft_model(name: &str, large: &Checkpoint) -> Result<PathBuf> {
    let path = find_model(name)?;
    let small = Checkpoint::open(&path)?;
    let width = |c: &Checkpoint| yunta_model::dims(c).map(|d| d.vocab);
    let (a, b) = (large.tokenizer()?, small.tokenizer()?);
    let vocab = width(large)?;
    let same = |t: u32| a.token_bytes(t) == b.token_bytes(t);
    if vocab != width(&small)? || !(0..vocab as u32).all(same) {
        bail!("{name} has other tokens than the model: it can't guess ahead for it");
    }
    Ok(path)
}

/// Bytes of keys and values of one token, over all layers.
fn token_bytes(kind: KvType, dims: &Dims) -> u64 {
    let elements = 2 * dims.layers as u64 * dims.kv_heads as u64 * dims.head_dim as u64;
    match kind {
        KvType::F32 => elements * 4,
        KvType::F16 => elements * 2,
        // A 4-byte scale for every 32 elements.
        KvType::I8 => elements + elements / 8,
    }
}

fn limits(args: &ModelArgs, dims: &Dims) -> Limits {
    let context = args.context.unwrap_or(dims.context.min(CONTEXT_DEFAULT_MAX)).max(2);
    let kind = args.compute.kv_type(args.kv);
    let tokens = args.kv_tokens.unwrap_or_else(|| {
        let fits = free_memory().map(|b| b / MEMORY_PARTS / token_bytes(kind, dims).max(1));
        let fits = fits.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
        context.saturating_mul(CONTEXTS).min(fits)
    });
    Limits {
        sequences: args.slots.max(1),
        context,
        step_tokens: args.step_tokens.max(1),
        queue: args.queue,
        cache: CacheOptions { blocks: tokens.max(context).div_ceil(KV_BLOCK), kind },
        stall_ratio: args.stall_ratio.max(1.0),
        draft_tokens: args.draft_tokens,
    }
}

/// Memory that programs can still get, in bytes, if the system says.
fn free_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? << 10)
}

/// Starts the ranks and waits until a token has gone through them, with a progress bar.
pub(crate) fn launch(prepared: &Prepared) -> Result<Instance> {
    let instance = Instance::start(prepared.config.clone())?;
    let ranks = prepared.config.plan.size();
    let bar = ProgressBar::new(prepared.checkpoint.total_bytes());
    let style = ProgressStyle::with_template("{msg} [{bar:30}] {bytes}/{total_bytes}")?;
    bar.set_style(style.progress_chars("=> "));
    bar.set_message(format!("loading over {ranks} rank{}", if ranks == 1 { "" } else { "s" }));
    let ready = instance.wait_ready(Duration::from_secs(900), |bytes| bar.set_position(bytes));
    bar.finish_and_clear();
    ready?;
    Ok(instance)
}

/// A random seed for a request that names none.
pub(crate) fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish()
}
