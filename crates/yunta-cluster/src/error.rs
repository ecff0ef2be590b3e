//! What can go wrong in supervising an instance.

use yunta_engine::wire::WireError;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ClusterError {
    /// The instance's configuration makes no sense.
    #[error("{0}")]
    Config(String),
    /// A worker process could not be started.
    #[error("rank {rank}: `{program}` could not be started: {source}")]
    Spawn {
        /// The rank.
        rank: usize,
        /// The program.
        program: String,
        /// Why.
        source: std::io::Error,
    },
    /// The gateway's port could not be opened.
    #[error("no local port for the leader to report to: {0}")]
    Gateway(std::io::Error),
    /// The instance did not become ready.
    #[error("the model did not start: {0}")]
    Start(String),
    /// The control channel broke.
    #[error("control channel: {0}")]
    Control(#[from] WireError),
    /// Randomness for the instance's secret could not be had.
    #[error("the system gives no random numbers: {0}")]
    Random(std::io::Error),
    /// A rank failed.
    #[error("rank {rank}: {message}")]
    Rank {
        /// The rank.
        rank: usize,
        /// Why.
        message: String,
    },
}
