//! Starting, watching and restarting the ranks of an instance, on one machine.
//!
//! Floor 6 of the house: no token ever crosses its control channel; the leader rank reports
//! tokens straight to the gateway.
//!
//! - [`Instance`] runs a model over local worker processes and is an
//!   [`Engine`](yunta_engine::Engine): it survives the loss of its ranks.
//! - [`run_worker`] is the main function of a worker process.
//! - The decisions (when to start, whom to blame, when to give up) are a pure core, `lifecycle.rs`;
//!   open requests are in `journal.rs`; processes in `processes.rs`.

mod control;
mod error;
mod gateway;
mod instance;
mod journal;
mod lifecycle;
mod processes;
mod secret;
mod worker;

pub use error::ClusterError;
pub use instance::{Emulation, Instance, InstanceConfig, Limits, PrefixCache};
pub use worker::run_worker;
