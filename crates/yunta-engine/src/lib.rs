//! Requests, scheduling, sampling and the loop of a rank.
//!
//! Floor 5 of the house: knows models and ranks, never sockets.
//!
//! - [`Request`] and [`Event`] are what a gateway sends and gets; [`Engine`] is anything that runs
//!   requests.
//! - [`Scheduler`] is the pure core that decides what each step computes; [`sample`] chooses
//!   tokens as a function of (seed, position).
//! - [`lead`] and [`follow`] are the loops of rank 0 and of the others.
//!
//! ```
//! use yunta_engine::{Draw, SamplingParams, sample};
//!
//! let greedy = SamplingParams::greedy();
//! assert_eq!(sample(&[0.1, 2.0, -1.0], &greedy, &Draw::default()), Some(1));
//! ```

mod drafter;
mod evaluate;
mod local;
mod prefix_store;
mod rank;
mod request;
mod sampling;
mod scheduler;
pub mod wire;

pub use drafter::{DraftRequest, Drafter};
pub use evaluate::{EvaluationError, Perplexity, Reference, Verdict, perplexity};
pub use local::{LocalConfig, LocalModel};
pub use prefix_store::PrefixStore;
pub use rank::{Helpers, PING_INTERVAL, RankError, follow, lead, run_step, stop};
pub use request::{
    Engine, EngineStatus, Event, EventSink, Failure, FinishReason, Request, RequestId, SubmitError,
    TokenLogprobs,
};
pub use sampling::{Draw, SamplingParams, logprobs, sample};
pub use scheduler::{GrammarSource, Scheduler, SchedulerConfig, SchedulerStats, StepPlan};
pub use yunta_grammar::{CallCount, CallTags, Grammar, GrammarCompiler, GrammarError};
