//! From what the user typed to a running model.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use tracing_subscriber::EnvFilter;
use yunta_checkpoint::Checkpoint;
use yunta_cluster::{Instance, InstanceConfig};
use yunta_hub::{Hub, TerminalProgress};

use crate::args::ModelArgs;

/// Sequences longer than this must be asked for: they take memory.
const CONTEXT_DEFAULT_MAX: usize = 8192;
/// Requests that may wait beside those that run.
const QUEUE: usize = 64;

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
        slots: args.slots.max(1),
        context: args.context.unwrap_or(dims.context.min(CONTEXT_DEFAULT_MAX)),
        step_tokens: args.step_tokens.max(1),
        queue: QUEUE,
        threads: args.compute.threads(ranks),
        float32: args.compute.float32,
        step_timeout: Duration::from_secs(args.step_timeout.max(1)),
    };
    Ok(Prepared { checkpoint, config })
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
