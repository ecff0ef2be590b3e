//! What a gateway asks of an engine, and what comes back.

use serde::{Deserialize, Serialize};
use yunta_grammar::Grammar;

use crate::SamplingParams;

/// Names a request within one gateway; never reused while the gateway lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RequestId(pub u64);

/// A generation request, after tokenisation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the gateway.
    pub id: RequestId,
    /// Prompt token ids; at least one.
    pub prompt: Vec<u32>,
    /// Tokens already emitted by an earlier attempt: they are prefilled after the prompt, and
    /// generation goes on behind them.
    pub emitted: Vec<u32>,
    /// How many tokens to emit at most, `emitted` included.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// Generation ends when one of these is drawn; it is reported, as the last token.
    pub stop_tokens: Vec<u32>,
    /// `Some(k)`: report the log-probability of each token and of the `k` likeliest.
    pub logprobs: Option<usize>,
    /// What the output must obey.
    #[serde(default)]
    pub grammar: Option<Grammar>,
    /// Who asks: service is shared fairly between clients.
    #[serde(default)]
    pub client: String,
    /// Lower goes first; 0 is usual.
    #[serde(default)]
    pub priority: i32,
    /// The request is given up so long after its submission.
    #[serde(default)]
    pub timeout_ms: Option<u64>,
}

impl Request {
    /// A request for `max_tokens` after a prompt, with the defaults for everything else.
    pub fn new(id: RequestId, prompt: Vec<u32>, max_tokens: usize) -> Self {
        Self {
            id,
            prompt,
            emitted: Vec::new(),
            max_tokens,
            sampling: SamplingParams::default(),
            stop_tokens: Vec::new(),
            logprobs: None,
            grammar: None,
            client: String::new(),
            priority: 0,
            timeout_ms: None,
        }
    }
}

/// Log-probabilities at one position (natural logarithm, of the model's distribution before
/// temperature and truncation).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// Of the token chosen.
    pub chosen: f32,
    /// The likeliest tokens, best first.
    pub top: Vec<(u32, f32)>,
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// A stop token was drawn.
    Stop,
    /// `max_tokens` or the context's end was reached.
    Length,
    /// The gateway cancelled the request.
    Cancelled,
}

/// Why a request could not be completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Failure {
    /// The ranks were lost or busy: the same request may succeed if sent again.
    Retriable,
    /// The request itself can't be served.
    Request,
    /// Its deadline has passed.
    Deadline,
    /// The engine or the model is at fault.
    Internal,
}

/// What an engine reports about a request, in order: `Started` (which may be missing), `Token`s, then
/// one `Finished` or `Failed`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// The request was admitted.
    Started {
        /// Tokens of the prompt that were found in the KV cache.
        cached: usize,
    },
    /// A token was chosen.
    Token {
        /// Position in the output, counted from 0 (tokens of earlier attempts included).
        index: usize,
        /// The token.
        token: u32,
        /// If asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// Generation ended as it should.
    Finished {
        /// Why.
        reason: FinishReason,
    },
    /// The request can't be completed: a rank was lost, or the request was refused.
    Failed {
        /// For a person: names rank, peer and operation where they are known.
        message: String,
        /// What kind of failure it is.
        cause: Failure,
    },
}

/// Receives a request's events. Called from the engine's threads: must not block.
pub trait EventSink: Send {
    /// Takes one event. Returns `false` when nobody listens any more; the request is then cancelled.
    fn emit(&mut self, event: Event) -> bool;
}

impl<F: FnMut(Event) -> bool + Send> EventSink for F {
    fn emit(&mut self, event: Event) -> bool {
        self(event)
    }
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// Too many requests are waiting; try again later.
    #[error("{waiting} requests are waiting, and no more are taken: try again later")]
    Busy {
        /// The length of the queue.
        waiting: usize,
    },
    /// The ranks are not (yet, or any more) ready.
    #[error("the model is not ready: {reason}")]
    Unavailable {
        /// What is going on.
        reason: String,
    },
    /// The request can't be served by this model.
    #[error("{reason}")]
    Invalid {
        /// What is wrong with it.
        reason: String,
    },
}

/// The state of an engine, for `/health` and `yunta status`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineStatus {
    /// Whether a token has gone through all ranks of the present epoch.
    pub ready: bool,
    /// What is going on, for a person.
    pub state: String,
    /// How often the ranks were started; 1 for the first time.
    pub epoch: u64,
    /// Ranks in this epoch.
    pub ranks: usize,
    /// Requests running or waiting.
    pub open_requests: usize,
}

/// A model that runs somewhere: what HTTP front ends and the terminal chat talk to.
pub trait Engine: Send + Sync + 'static {
    /// A fresh id for a request.
    fn next_id(&self) -> RequestId;

    /// Queues a request; its events go to `sink`.
    ///
    /// # Errors
    /// [`SubmitError`] if the request was not taken; the sink is then never called.
    fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<(), SubmitError>;

    /// Ends a request; its sink gets `Finished { Cancelled }` unless it has ended already.
    /// Unknown ids are ignored.
    fn cancel(&self, id: RequestId);

    /// The present state.
    fn status(&self) -> EngineStatus;

    /// The longest sequence (prompt and output) that the ranks hold memory for, in tokens.
    fn context_length(&self) -> usize;
}
