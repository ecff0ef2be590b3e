//! What can be wrong with a model's files.

use std::path::{Path, PathBuf};

/// Errors of this crate; each names the file, and the tensor where there is one.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The path is no checkpoint.
    #[error("{}: no checkpoint: {reason}", file.display())]
    NotACheckpoint {
        /// The path.
        file: PathBuf,
        /// What is missing there.
        reason: String,
    },
    /// A file can't be read.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file is not what it claims to be: truncated, damaged, or made to deceive.
    #[error("{}: {reason}", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// What is wrong, and where.
        reason: String,
    },
    /// A tensor's description makes no sense.
    #[error("{}: tensor `{tensor}`: {reason}", file.display())]
    Tensor {
        /// The file.
        file: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor is not there.
    #[error("{}: tensor `{tensor}` is missing", file.display())]
    Missing {
        /// The checkpoint.
        file: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// The tokenizer can't be built or used.
    #[error("{}: tokenizer: {reason}", file.display())]
    Tokenizer {
        /// Where it comes from.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A chat template can't be used, or refused the conversation.
    #[error("chat template: {reason}")]
    Template {
        /// What is wrong; if the template itself refused, its own words.
        reason: String,
    },
}

impl CheckpointError {
    pub(crate) fn malformed(file: &Path, reason: impl Into<String>) -> Self {
        Self::Malformed { file: file.to_owned(), reason: reason.into() }
    }

    pub(crate) fn tensor(file: &Path, tensor: &str, reason: impl Into<String>) -> Self {
        let (file, tensor) = (file.to_owned(), tensor.to_owned());
        Self::Tensor { file, tensor, reason: reason.into() }
    }

    pub(crate) fn io(file: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let file = file.to_owned();
        move |source| Self::Io { file, source }
    }
}
