//! `yunta bench`: prompt and generation speed, with the flags of `mlx_lm.benchmark`.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::{Value, json};
use yunta_engine::{Engine, Request, SamplingParams};

use crate::args::{ComputeArgs, KvArg, ModelArgs};
use crate::session::{self, Outcome};
use crate::start;

/// Arguments of `yunta bench`.
#[derive(Args)]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    compute: ComputeArgs,
    /// Tokens of the prompt
    #[arg(long, short = 'p', default_value_t = 512)]
    prompt_tokens: usize,
    /// Tokens to generate
    #[arg(long, short = 'g', default_value_t = 128)]
    generation_tokens: usize,
    /// Sequences at once
    #[arg(long, short = 'b', visible_alias = "batch", default_value_t = 1)]
    batch_size: usize,
    /// Trials, behind one that does not count
    #[arg(long, short = 'n', default_value_t = 5)]
    num_trials: usize,
    /// Tokens of context before the prompt, computed beforehand: speed at this depth
    #[arg(long, short = 'd', default_value_t = 0)]
    depth: usize,
    /// Tokens per step: prompts are computed in chunks of so many
    #[arg(long, default_value_t = 512)]
    prefill_step_size: usize,
    /// How keys and values are kept
    #[arg(long, value_enum, default_value_t = KvArg::F16)]
    kv: KvArg,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

struct Trial {
    prompt_tps: f64,
    generation_tps: f64,
    ttft: Duration,
}

pub(crate) fn run(args: BenchArgs) -> Result<ExitCode> {
    if args.prompt_tokens == 0 || args.num_trials == 0 || args.batch_size == 0 {
        bail!("a benchmark needs a prompt, a batch and at least one trial");
    }
    let context = args.depth + args.prompt_tokens + args.generation_tokens.max(1) + 1;
    let prepared = start::prepare(&ModelArgs {
        compute: args.compute.clone(),
        context: Some(context),
        slots: args.batch_size,
        queue: 0,
        kv_tokens: Some(2 * args.batch_size * context),
        kv: args.kv,
        // Prompts and answers are measured apart: nothing is held back for the streams, and
        // nothing guessed, since the text of a benchmark repeats itself.
        stall_ratio: 1e6,
        draft_tokens: 0,
        draft_model: None,
        prefix_cache: None,
        prefix_cache_mib: 0,
        step_tokens: args.prefill_step_size,
        step_timeout: 600,
    })?;
    let vocab = yunta_model::dims(&prepared.checkpoint)?.vocab;
    let instance = start::launch(&prepared)?;
    let mut trials = Vec::new();
    for i in 0..=args.num_trials {
        let trial = trial(&args, &instance, vocab, i)?;
        if i == 0 {
            continue;
        }
        if !args.json {
            println!(
                "Trial {i}:  prompt_tps={:.3}, generation_tps={:.3}, ttft_ms={:.1}",
                trial.prompt_tps,
                trial.generation_tps,
                trial.ttft.as_secs_f64() * 1e3
            );
        }
        trials.push(trial);
    }
    let memory = instance.peak_memory();
    let report = report(&args, &prepared, &trials, &memory);
    if args.json {
        println!("{report}");
    } else {
        println!(
            "Median:   prompt_tps={:.3}, generation_tps={:.3}, ttft_ms={:.1}, peak_memory={}",
            number(&report, "prompt_tps"),
            number(&report, "generation_tps"),
            number(&report, "ttft_ms"),
            memory
                .iter()
                .map(|b| format!("{:.0} MiB", *b as f64 / 1048576.0))
                .collect::<Vec<_>>()
                .join(" + ")
        );
    }
    Ok(ExitCode::SUCCESS)
}

fn number(report: &Value, field: &str) -> f64 {
    report[field].as_f64().unwrap_or(0.0)
}

/// Tokens spread over the vocabulary, the same in every run: what they say does not matter. Each
/// number has a prompt of its own, which no cache knows.
fn prompt(number: usize, length: usize, vocab: usize) -> Vec<u32> {
    (0..length).map(|i| (((i + number * 31) * 7919 + 13) % vocab) as u32).collect()
}

/// One run of the whole batch. Rates are of all sequences together.
fn trial(args: &BenchArgs, engine: &dyn Engine, vocab: usize, number: usize) -> Result<Trial> {
    let one = |sequence: usize, tokens: usize, generate: usize| -> Result<Outcome> {
        let number = number * args.batch_size + sequence;
        let request = Request {
            sampling: SamplingParams::greedy(),
            ..Request::new(engine.next_id(), prompt(number, tokens, vocab), generate)
        };
        session::run(engine, request, None, |_| Ok(()))
    };
    // The context's keys and values are in the cache by the time that the prompt comes.
    for sequence in (0..args.batch_size).filter(|_| args.depth > 0) {
        one(sequence, args.depth, 1)?;
    }
    let outcomes = std::thread::scope(|scope| {
        let run = |sequence: usize| {
            one(sequence, args.depth + args.prompt_tokens, args.generation_tokens.max(1))
        };
        let threads: Vec<_> =
            (0..args.batch_size).map(|sequence| scope.spawn(move || run(sequence))).collect();
        let join = |t: std::thread::ScopedJoinHandle<'_, Result<Outcome>>| {
            t.join().map_err(|_| anyhow::anyhow!("a client thread panicked"))?
        };
        threads.into_iter().map(join).collect::<Result<Vec<_>>>()
    })?;
    let first = outcomes.iter().map(Outcome::first_token).max().context("no outcome")?;
    let last = outcomes.iter().map(Outcome::last_token).max().context("no outcome")?;
    let prompt_time = first.as_secs_f64();
    // While all sequences generate: behind the last first token.
    let generated = outcomes.iter().flat_map(|o| &o.times).filter(|t| **t > first).count();
    let generation_time = (last - first).as_secs_f64();
    Ok(Trial {
        prompt_tps: (args.prompt_tokens * args.batch_size) as f64 / prompt_time.max(1e-9),
        generation_tps: if generated == 0 { 0.0 } else { generated as f64 / generation_time },
        ttft: first,
    })
}

fn report(args: &BenchArgs, prepared: &start::Prepared, trials: &[Trial], memory: &[u64]) -> Value {
    let median = |f: fn(&Trial) -> f64| {
        let mut values: Vec<f64> = trials.iter().map(f).collect();
        values.sort_by(f64::total_cmp);
        let middle = values.len() / 2;
        match values.as_slice() {
            [] => 0.0,
            v if v.len() % 2 == 1 => v[middle],
            v => (v[middle - 1] + v[middle]) / 2.0,
        }
    };
    let trial = |t: &Trial| {
        json!({
            "prompt_tps": t.prompt_tps,
            "generation_tps": t.generation_tps,
            "ttft_ms": t.ttft.as_secs_f64() * 1e3,
        })
    };
    json!({
        "model": args.compute.model,
        "prompt_tokens": args.prompt_tokens,
        "generation_tokens": args.generation_tokens,
        "batch_size": args.batch_size,
        "depth": args.depth,
        "tensor": prepared.config.plan.tensor,
        "pipeline": prepared.config.plan.pipeline,
        "threads": prepared.config.threads,
        "prompt_tps": median(|t| t.prompt_tps),
        "generation_tps": median(|t| t.generation_tps),
        "ttft_ms": median(|t| t.ttft.as_secs_f64() * 1e3),
        "peak_memory_bytes": memory,
        "trials": trials.iter().map(trial).collect::<Vec<_>>(),
    })
}
