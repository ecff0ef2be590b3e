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
//! use yunta_engine::{SamplingParams, sample};
//!
//! let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
//! assert_eq!(sample(&[0.1, 2.0, -1.0], &greedy, 0), Some(1));
//! ```

mod evaluate;
mod local;
mod rank;
mod request;
mod sampling;
mod scheduler;
pub mod wire;

pub use evaluate::{EvaluationError, Perplexity, Reference, Verdict, perplexity};
pub use local::{LocalConfig, LocalModel};
pub use rank::{PING_INTERVAL, RankError, follow, lead, run_step, stop};
pub use request::{
    Engine, EngineStatus, Event, EventSink, FinishReason, Request, RequestId, SamplingParams,
    SubmitError, TokenLogprobs,
};
pub use sampling::{logprobs, sample};
pub use scheduler::{Scheduler, SchedulerConfig};
