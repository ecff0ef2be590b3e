//! What can go wrong with a model.

use yunta_checkpoint::CheckpointError;
use yunta_comm::CommError;
use yunta_tensor::TensorError;

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The checkpoint's architecture has no implementation here.
    #[error("{file}: model type `{model_type}` is not supported (known: {known})")]
    UnknownArchitecture {
        /// The checkpoint.
        file: String,
        /// `model_type` of its configuration.
        model_type: String,
        /// What is supported.
        known: &'static str,
    },
    /// A field of the configuration is missing or makes no sense.
    #[error("{file}: configuration field `{field}`: {reason}")]
    Config {
        /// The checkpoint.
        file: String,
        /// The field.
        field: String,
        /// What is wrong.
        reason: String,
    },
    /// A tensor is not of the shape that the configuration promises.
    #[error("{file}: tensor `{tensor}` has shape {got:?}, the configuration promises {expected:?}")]
    Shape {
        /// The checkpoint.
        file: String,
        /// The tensor.
        tensor: String,
        /// Rows and columns expected.
        expected: [usize; 2],
        /// Its shape.
        got: Vec<usize>,
    },
    /// A tensor could not be packed.
    #[error("tensor `{tensor}`: {source}")]
    Weight {
        /// The tensor.
        tensor: String,
        /// Why.
        source: TensorError,
    },
    /// The model can't be cut as asked.
    #[error("{0}")]
    Cut(String),
    /// A step asks for something that the model does not have.
    #[error("{0}")]
    Step(String),
    /// The checkpoint can't be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The backend refused.
    #[error(transparent)]
    Tensor(#[from] TensorError),
    /// A peer was lost.
    #[error(transparent)]
    Comm(#[from] CommError),
}
