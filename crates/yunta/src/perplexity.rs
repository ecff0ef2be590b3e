//! `yunta perplexity`: how well a model predicts a text.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use yunta_checkpoint::Checkpoint;
use yunta_engine::{LocalConfig, LocalModel, perplexity};
use yunta_tensor::Precision;

use crate::args::{ComputeArgs, KvArg};
use crate::start;

/// Arguments of `yunta perplexity`.
#[derive(Args)]
pub(crate) struct PerplexityArgs {
    #[command(flatten)]
    compute: ComputeArgs,
    /// The text
    #[arg(long, short = 'f')]
    file: PathBuf,
    /// Tokens per chunk; the second half of each is scored
    #[arg(long, short = 'c', default_value_t = 512)]
    context: usize,
    /// How keys and values are kept
    #[arg(long, value_enum, default_value_t = KvArg::F16)]
    kv: KvArg,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: PerplexityArgs) -> Result<ExitCode> {
    let text = std::fs::read_to_string(&args.file)
        .with_context(|| format!("can't read {}", args.file.display()))?;
    let checkpoint = Checkpoint::open(&start::find_model(&args.compute.model)?)?;
    let tokenizer = checkpoint.tokenizer()?;
    let tokens = tokenizer.encode(&text, true)?;
    let plan = args.compute.cut.plan(&yunta_model::dims(&checkpoint)?)?;
    let threads = args.compute.threads(plan.size());
    let precision = if args.compute.float32 { Precision::Float32 } else { Precision::Fast };
    let kv = args.compute.kv_type(args.kv);
    let config = LocalConfig { plan, slots: 1, context: args.context, threads, precision, kv };
    let mut model = LocalModel::load(&checkpoint, &config)?;
    // As llama-perplexity: every chunk starts with BOS if the model's prompts do.
    let plain = tokenizer.encode(&text, false)?;
    let bos = if plain.len() < tokens.len() { tokenizer.bos() } else { None };
    let bar = ProgressBar::new(0);
    bar.set_style(
        ProgressStyle::with_template("[{bar:30}] {pos}/{len} chunks")?.progress_chars("=> "),
    );
    let result = perplexity(&mut model, &tokens, args.context, bos, |done, all| {
        bar.set_length(all as u64);
        bar.set_position(done as u64);
    })?;
    bar.finish_and_clear();
    if args.json {
        println!(
            "{}",
            json!({
                "perplexity": result.perplexity,
                "error": result.error,
                "chunks": result.chunks,
                "tokens": result.tokens,
                "context": args.context,
            })
        );
    } else {
        println!(
            "PPL = {:.4} +/- {:.4} ({} chunks)",
            result.perplexity, result.error, result.chunks
        );
    }
    Ok(ExitCode::SUCCESS)
}
