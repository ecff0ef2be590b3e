//! `yunta chat`: talk to a model in the terminal.

use std::io::{BufRead, IsTerminal, Write};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Args;
use serde_json::{Map, Value, json};
use yunta_checkpoint::{ChatTemplate, Tokenizer};
use yunta_cluster::Instance;
use yunta_engine::FinishReason;

use crate::args::{ModelArgs, SamplingArgs};
use crate::generate::{Printer, request, summary};
use crate::interrupt::Interrupt;
use crate::{session, start};

/// Arguments of `yunta chat`.
#[derive(Args)]
pub(crate) struct ChatArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Answer this and exit, instead of opening a conversation
    #[arg(long, short = 'p')]
    prompt: Option<String>,
    /// Instructions that stand before the conversation
    #[arg(long)]
    system: Option<String>,
}

pub(crate) fn run(args: ChatArgs) -> Result<ExitCode> {
    let prepared = start::prepare(&args.model)?;
    let tokenizer = prepared.checkpoint.tokenizer()?;
    let template = prepared
        .checkpoint
        .chat_template()?
        .context("the model has no chat template: use `yunta generate`")?;
    let instance = start::launch(&prepared)?;
    let interrupt = Interrupt::install()?;
    let mut chat = Chat {
        tokenizer: &tokenizer,
        template: &template,
        instance: &instance,
        interrupt: &interrupt,
        sampling: &args.sampling,
        stop_tokens: prepared.checkpoint.stop_tokens(),
        messages: Vec::new(),
    };
    if let Some(system) = &args.system {
        chat.add("system", system);
    }
    match &args.prompt {
        Some(prompt) => {
            let reason = chat.answer(prompt)?;
            Ok(if reason == FinishReason::Cancelled { 130.into() } else { ExitCode::SUCCESS })
        }
        None => {
            converse(&mut chat)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

struct Chat<'a> {
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
    instance: &'a Instance,
    interrupt: &'a Interrupt,
    sampling: &'a SamplingArgs,
    stop_tokens: Vec<u32>,
    messages: Vec<Value>,
}

impl Chat<'_> {
    fn add(&mut self, role: &str, content: &str) {
        self.messages.push(json!({"role": role, "content": content}));
    }

    /// Streams the answer to a message. What failed is taken back out of the conversation.
    fn answer(&mut self, message: &str) -> Result<FinishReason> {
        self.add("user", message);
        let outcome = self.stream();
        if outcome.is_err() {
            self.messages.pop();
        }
        let (reason, text, line) = outcome?;
        self.add("assistant", &text);
        eprintln!("{line}");
        Ok(reason)
    }

    fn stream(&self) -> Result<(FinishReason, String, String)> {
        let messages = Value::Array(self.messages.clone());
        let rendered = self.template.render(&messages, None, true, &Map::new())?;
        // The template writes the special tokens itself.
        let prompt = self.tokenizer.encode(&rendered, false)?;
        let stop = if self.sampling.ignore_eos { Vec::new() } else { self.stop_tokens.clone() };
        let request = request(self.instance, prompt, self.sampling, stop, None);
        let prompt_tokens = request.prompt.len();
        let mut printer = Printer::new(Some(self.tokenizer), true);
        let outcome = session::run(self.instance, request, Some(self.interrupt), |token| {
            if self.stop_tokens.contains(&token) { Ok(()) } else { printer.push(token) }
        })?;
        Ok((outcome.reason, printer.finish()?, summary(&outcome, prompt_tokens)))
    }
}

/// Reads messages from the terminal until it ends, or Ctrl-C at an empty prompt.
fn converse(chat: &mut Chat<'_>) -> Result<()> {
    let stdin = std::io::stdin();
    let show_prompt = stdin.is_terminal();
    if show_prompt {
        eprintln!("Ctrl-C stops an answer, Ctrl-D ends; /clear starts anew.");
    }
    let kept = chat.messages.len();
    loop {
        if show_prompt {
            print!("> ");
            std::io::stdout().flush()?;
        }
        let mut line = String::new();
        if stdin.lock().read_line(&mut line)? == 0 {
            return Ok(());
        }
        match line.trim() {
            "" => continue,
            "/exit" | "/quit" => return Ok(()),
            "/clear" => {
                chat.messages.truncate(kept);
                continue;
            }
            message => {
                if let Err(e) = chat.answer(message) {
                    eprintln!("yunta: {e:#}");
                }
            }
        }
    }
}
