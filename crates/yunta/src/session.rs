//! One request, from submission to its last token, as the terminal commands see it.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use yunta_engine::{Engine, Event, FinishReason, Request, TokenLogprobs};

use crate::interrupt::{Generating, Interrupt};

/// What came back, and when.
pub(crate) struct Outcome {
    pub(crate) tokens: Vec<u32>,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    pub(crate) reason: FinishReason,
    /// When each token came, counted from the submission.
    pub(crate) times: Vec<Duration>,
}

impl Outcome {
    /// The time to the first token.
    pub(crate) fn first_token(&self) -> Duration {
        self.times.first().copied().unwrap_or_default()
    }

    /// The time to the last token.
    pub(crate) fn last_token(&self) -> Duration {
        self.times.last().copied().unwrap_or_default()
    }

    /// Prompt tokens per second: the first token ends the prompt.
    pub(crate) fn prompt_tps(&self, prompt: usize) -> f64 {
        prompt as f64 / self.first_token().as_secs_f64().max(1e-9)
    }

    /// Tokens per second behind the first.
    pub(crate) fn generation_tps(&self) -> f64 {
        let time = (self.last_token() - self.first_token()).as_secs_f64();
        if self.tokens.len() < 2 { 0.0 } else { (self.tokens.len() - 1) as f64 / time.max(1e-9) }
    }
}

/// Runs a request, passing each token to `on_token`; Ctrl-C cancels it.
pub(crate) fn run(
    engine: &dyn Engine,
    request: Request,
    interrupt: Option<&Interrupt>,
    mut on_token: impl FnMut(u32) -> Result<()>,
) -> Result<Outcome> {
    let (sender, events) = mpsc::channel();
    let generating = interrupt.map(Interrupt::generating);
    let (id, start) = (request.id, Instant::now());
    engine.submit(request, Box::new(move |e: Event| sender.send(e).is_ok()))?;
    let mut outcome = Outcome {
        tokens: Vec::new(),
        logprobs: Vec::new(),
        reason: FinishReason::Cancelled,
        times: Vec::new(),
    };
    loop {
        if generating.as_ref().is_some_and(Generating::is_interrupted) {
            engine.cancel(id);
        }
        match events.recv_timeout(Duration::from_millis(50)) {
            Ok(Event::Token { token, logprobs, .. }) => {
                outcome.times.push(start.elapsed());
                outcome.tokens.push(token);
                outcome.logprobs.extend(logprobs);
                on_token(token)?;
            }
            Ok(Event::Started { .. }) => {}
            Ok(Event::Finished { reason }) => {
                outcome.reason = reason;
                return Ok(outcome);
            }
            Ok(Event::Failed { message, .. }) => bail!(message),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => bail!("the model has stopped"),
        }
    }
}
