//! `yunta generate`: complete a prompt.

use std::io::Write;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Args;
use serde_json::json;
use yunta_checkpoint::Tokenizer;
use yunta_engine::{Engine, FinishReason, Request, SamplingParams};

use crate::args::{ModelArgs, SamplingArgs};
use crate::interrupt::Interrupt;
use crate::session::{self, Outcome};
use crate::start;

/// Arguments of `yunta generate`.
#[derive(Args)]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// The text to complete, as it is (`yunta chat` applies the chat template)
    #[arg(long, short = 'p', required_unless_present = "prompt_ids")]
    prompt: Option<String>,
    /// The prompt as token ids: 1,2,3
    #[arg(long, value_delimiter = ',', conflicts_with = "prompt")]
    prompt_ids: Option<Vec<u32>>,
    /// With --json: log-probabilities of each token and of the K likeliest
    #[arg(long, value_name = "K")]
    logprobs: Option<usize>,
    /// Print one JSON object when done
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: GenerateArgs) -> Result<ExitCode> {
    let prepared = start::prepare(&args.model)?;
    // Token ids in, token ids out needs no tokenizer.
    let tokenizer = prepared.checkpoint.tokenizer();
    let prompt = match (&args.prompt_ids, &args.prompt) {
        (Some(ids), _) => ids.clone(),
        (None, Some(text)) => {
            tokenizer.as_ref().map_err(|e| anyhow::anyhow!("{e}"))?.encode(text, true)?
        }
        (None, None) => bail!("either --prompt or --prompt-ids is needed"),
    };
    let tokenizer = tokenizer.ok();
    let stop_tokens =
        if args.sampling.ignore_eos { Vec::new() } else { prepared.checkpoint.stop_tokens() };
    let instance = start::launch(&prepared)?;
    let interrupt = Interrupt::install()?;
    let request = request(&instance, prompt, &args.sampling, stop_tokens.clone(), args.logprobs);
    let prompt_tokens = request.prompt.len();
    let mut printer = Printer::new(tokenizer.as_ref(), !args.json);
    let outcome = session::run(&instance, request, Some(&interrupt), |token| {
        if stop_tokens.contains(&token) { Ok(()) } else { printer.push(token) }
    })?;
    let text = printer.finish()?;
    if args.json {
        let memory = instance.peak_memory();
        println!("{}", report(&outcome, &text, prompt_tokens, args.logprobs, &memory));
    } else {
        eprintln!("{}", summary(&outcome, prompt_tokens));
    }
    Ok(if outcome.reason == FinishReason::Cancelled {
        ExitCode::from(130)
    } else {
        ExitCode::SUCCESS
    })
}

/// A request with the sampling that the options ask for.
pub(crate) fn request(
    engine: &dyn Engine,
    prompt: Vec<u32>,
    s: &SamplingArgs,
    stop_tokens: Vec<u32>,
    logprobs: Option<usize>,
) -> Request {
    Request {
        sampling: SamplingParams {
            temperature: s.temperature,
            top_k: s.top_k,
            top_p: s.top_p,
            min_p: s.min_p,
            seed: s.seed.unwrap_or_else(start::random_seed),
            ..SamplingParams::default()
        },
        stop_tokens,
        logprobs,
        ..Request::new(engine.next_id(), prompt, s.max_tokens)
    }
}

/// One line for a person.
pub(crate) fn summary(outcome: &Outcome, prompt_tokens: usize) -> String {
    format!(
        "[{prompt_tokens} prompt tokens at {:.1}/s, {} generated at {:.1}/s]",
        outcome.prompt_tps(prompt_tokens),
        outcome.tokens.len(),
        outcome.generation_tps()
    )
}

fn report(
    outcome: &Outcome,
    text: &str,
    prompt_tokens: usize,
    logprobs: Option<usize>,
    memory: &[u64],
) -> serde_json::Value {
    let mut report = json!({
        "tokens": outcome.tokens,
        "text": text,
        "finish_reason": outcome.reason,
        "prompt_tokens": prompt_tokens,
        "prompt_tps": outcome.prompt_tps(prompt_tokens),
        "generation_tps": outcome.generation_tps(),
        "ttft_ms": outcome.first_token().as_secs_f64() * 1e3,
        "peak_memory_bytes": memory,
    });
    if logprobs.is_some() {
        let positions = outcome.logprobs.iter().zip(&outcome.tokens);
        report["logprobs"] = positions
            .map(|(l, token)| json!({"token": token, "logprob": l.chosen, "top": l.top}))
            .collect();
    }
    report
}

/// Turns tokens into text as they come, and shows it.
pub(crate) struct Printer<'a> {
    decoder: Option<yunta_checkpoint::StreamDecoder<'a>>,
    text: String,
    show: bool,
}

impl<'a> Printer<'a> {
    pub(crate) fn new(tokenizer: Option<&'a Tokenizer>, show: bool) -> Self {
        Self { decoder: tokenizer.map(|t| t.stream_decoder(true)), text: String::new(), show }
    }

    pub(crate) fn push(&mut self, token: u32) -> Result<()> {
        let Some(decoder) = &mut self.decoder else { return Ok(()) };
        let piece = decoder.push(token)?;
        self.add(&piece)
    }

    /// The whole text, and the end of the line.
    pub(crate) fn finish(mut self) -> Result<String> {
        if let Some(decoder) = &mut self.decoder {
            let rest = decoder.flush()?;
            self.add(&rest)?;
        }
        if self.show {
            println!();
        }
        Ok(self.text)
    }

    fn add(&mut self, piece: &str) -> Result<()> {
        if self.show {
            let mut out = std::io::stdout().lock();
            out.write_all(piece.as_bytes())?;
            out.flush()?;
        }
        self.text.push_str(piece);
        Ok(())
    }
}
