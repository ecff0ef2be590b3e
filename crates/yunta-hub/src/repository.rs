//! Hugging Face repositories, fetched through the `hf-hub` library.
//!
//! A repository is fetched at one commit, and its main branch is pointed to that commit when all is
//! there: an interrupted download and one that meets a change of the repository leave no mixture.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

use crate::check::{self, INDEX, WEIGHTS};
use crate::feed::{Feed, NoResult, watch};
use crate::huggingface::{HuggingFace, repository_folder};
use crate::name::{RepositoryName, is_plain_file};
use crate::{HubError, Progress};

/// The library has no time limit of its own on a connection that went quiet.
const PATIENCE: Duration = Duration::from_secs(120);
/// Attempts in a row that bring nothing.
const ATTEMPTS: u32 = 3;
const PAUSE: Duration = Duration::from_secs(1);

/// Fetches the wanted file, or what a model's folder must hold: configuration, tokenizer, weights.
pub(crate) fn fetch(
    hub: &HuggingFace,
    name: &RepositoryName,
    searched: Vec<PathBuf>,
    progress: &dyn Progress,
) -> Result<PathBuf, HubError> {
    let fetcher = Fetcher::new(hub, name.clone(), searched)?;
    watch(progress, PATIENCE, move |feed| fetcher.fetch(feed)).unwrap_or_else(|why| {
        Err(match why {
            NoResult::Stalled => {
                HubError::Stalled { what: name.id.clone(), seconds: PATIENCE.as_secs() }
            }
            NoResult::Died => HubError::Repository {
                repository: name.id.clone(),
                reason: "the download library failed on what the hub sent".to_owned(),
            },
        })
    })
}

/// What the worker needs.
struct Fetcher {
    api: Api,
    cache: Cache,
    name: RepositoryName,
    endpoint: String,
    searched: Vec<PathBuf>,
}

impl Fetcher {
    fn new(
        hub: &HuggingFace,
        name: RepositoryName,
        searched: Vec<PathBuf>,
    ) -> Result<Self, HubError> {
        let cache = Cache::new(hub.cache.clone());
        let mut builder = ApiBuilder::from_cache(cache.clone())
            .with_progress(false)
            .with_token(hub.token.as_ref().map(|t| t.reveal()));
        if let Some(endpoint) = &hub.endpoint {
            builder = builder.with_endpoint(endpoint.clone());
        }
        let api = builder.build().map_err(|e| HubError::Repository {
            repository: name.id.clone(),
            reason: e.to_string(),
        })?;
        let endpoint = hub.endpoint.clone().unwrap_or_else(|| "the hub".to_owned());
        Ok(Self { api, cache, name, endpoint, searched })
    }

    fn fetch(&self, feed: &Feed) -> Result<PathBuf, HubError> {
        let branch = Repo::model(self.name.id.clone());
        let info = self.persist(feed, &self.name.id, || {
            self.api.repo(branch.clone()).info().map_err(Failure::from)
        })?;
        // It becomes part of paths.
        if !is_plain_file(&info.sha) || info.sha.contains('/') {
            return Err(self.unusable(format!("the hub names no commit but `{}`", info.sha)));
        }
        let commit = Commit::new(self, info.sha);
        let files: Vec<String> = info.siblings.into_iter().map(|s| s.rfilename).collect();
        if self.name.file.is_none() {
            self.get_model(feed, &commit, &files)?;
        }
        for part in self.name.parts() {
            self.get(feed, &commit, &part)?;
        }
        let main = self.cache.repo(branch);
        main.create_ref(&commit.sha).map_err(HubError::io(self.cache.path()))?;
        Ok(match self.name.parts().first() {
            Some(file) => commit.snapshot.join(file),
            None => commit.snapshot,
        })
    }

    fn get_model(&self, feed: &Feed, commit: &Commit, files: &[String]) -> Result<(), HubError> {
        for file in model_files(files).map_err(|reason| self.unusable(reason))? {
            let path = self.get(feed, commit, file)?;
            if file == INDEX {
                for shard in check::shards(&path).map_err(|reason| self.unusable(reason))? {
                    self.get(feed, commit, &shard)?;
                }
            }
        }
        Ok(())
    }

    /// A file of the commit, from the cache if it is there.
    fn get(&self, feed: &Feed, commit: &Commit, file: &str) -> Result<PathBuf, HubError> {
        let path = commit.snapshot.join(file);
        if path.exists() {
            return Ok(path);
        }
        let mut meter = feed.file(file);
        let mut arrived = 0;
        self.persist(feed, &format!("{}:{file}", self.name.id), || {
            let failure = match commit.repo.download_with_progress(file, &mut meter) {
                // The server may have ignored where the download was to be resumed.
                Ok(path) if path.metadata().map(|m| m.len()).ok() == meter.total() => {
                    return Ok(path);
                }
                Ok(path) => {
                    // Only the link: what it leads to is replaced by the next attempt.
                    let _ = fs::remove_file(path);
                    Failure::BadLeftover
                }
                Err(e) => Failure::from(e),
            };
            let gained = meter.arrived() > arrived;
            arrived = meter.arrived();
            Err(match failure {
                Failure::Unreachable(reason) if gained => Failure::CutOff(reason),
                Failure::BadLeftover => {
                    commit.remove_leftovers();
                    failure
                }
                other => other,
            })
        })
    }

    /// Tries again what may pass.
    fn persist<T>(
        &self,
        feed: &Feed,
        what: &str,
        mut attempt: impl FnMut() -> Result<T, Failure>,
    ) -> Result<T, HubError> {
        let mut attempts = 0;
        loop {
            let failure = match attempt() {
                Ok(result) => return Ok(result),
                Err(failure) => failure,
            };
            // What came is kept: large files get through bad networks in pieces.
            let was_of_use = matches!(failure, Failure::CutOff(_));
            attempts = if was_of_use { 1 } else { attempts + 1 };
            if attempts == ATTEMPTS || !failure.may_pass() || !feed.alive() {
                return Err(self.explain(failure, what));
            }
            std::thread::sleep(PAUSE * attempts);
        }
    }

    fn explain(&self, failure: Failure, what: &str) -> HubError {
        match failure {
            Failure::Unreachable(reason) | Failure::CutOff(reason) => HubError::Unreachable {
                what: format!("{} for {what}", self.endpoint),
                reason,
                searched: self.searched.clone(),
            },
            Failure::Status(status @ 400..500) => HubError::Refused { what: what.into(), status },
            Failure::Status(status) => {
                self.unusable(format!("the hub is in trouble (status {status}); try again later"))
            }
            Failure::BadLeftover => {
                self.unusable("the hub does not resume downloads as it should; try again".into())
            }
            Failure::Disk(source) => HubError::Io { path: self.cache.path().clone(), source },
            Failure::Other(reason) => self.unusable(reason),
        }
    }

    fn unusable(&self, reason: String) -> HubError {
        HubError::Repository { repository: self.name.id.clone(), reason }
    }
}

/// A repository at one commit.
struct Commit {
    sha: String,
    repo: ApiRepo,
    /// Its folder in the cache.
    snapshot: PathBuf,
    blobs: PathBuf,
}

impl Commit {
    fn new(fetcher: &Fetcher, sha: String) -> Self {
        let id = &fetcher.name.id;
        let folder = repository_folder(fetcher.cache.path(), id);
        let pinned = Repo::with_revision(id.clone(), RepoType::Model, sha.clone());
        Self {
            repo: fetcher.api.repo(pinned),
            snapshot: folder.join("snapshots").join(&sha),
            blobs: folder.join("blobs"),
            sha,
        }
    }

    /// Removes unfinished downloads that nobody works on: one of them can't be resumed.
    fn remove_leftovers(&self) {
        let entries = fs::read_dir(&self.blobs).into_iter().flatten().filter_map(Result::ok);
        let parts =
            entries.map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "part"));
        for part in parts {
            let lock = File::create(part.with_extension("lock"));
            if lock.is_ok_and(|lock| lock.try_lock().is_ok()) {
                // What can't be removed shows in the next attempt.
                let _ = fs::remove_file(part);
            }
        }
    }
}

/// Files that a model's folder is made of, in the order in which they are fetched: weights last, so
/// that a folder with weights has everything.
fn model_files(files: &[String]) -> Result<Vec<&str>, String> {
    let has = |file: &str| files.iter().any(|f| f == file);
    if !has("config.json") {
        return Err(format!("it has no config.json{}", suggest_gguf(files)));
    }
    let weights = match (has(INDEX), has(WEIGHTS)) {
        (true, _) => INDEX,
        (_, true) => WEIGHTS,
        _ => {
            let other = suggest_gguf(files);
            return Err(format!("it has no weights as safetensors{other}"));
        }
    };
    let beside = files.iter().map(String::as_str).filter(|f| goes_with_model(f));
    Ok(["config.json"].into_iter().chain(beside).chain([weights]).collect())
}

/// Whether a file beside configuration and weights is part of a model.
fn goes_with_model(file: &str) -> bool {
    let named = [
        "generation_config.json",
        "hf_quant_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "tiktoken.model",
    ];
    let plain = is_plain_file(file) && !file.contains('/');
    let data = [".json", ".model", ".jinja"].iter().any(|e| file.ends_with(e));
    plain
        && (named.contains(&file)
            || data && ["tokenizer", "chat_template."].iter().any(|p| file.starts_with(p)))
}

fn suggest_gguf(files: &[String]) -> String {
    let gguf: Vec<&str> =
        files.iter().map(String::as_str).filter(|f| check::is_gguf(Path::new(f))).collect();
    match gguf.is_empty() {
        true => String::new(),
        false => format!("; name one of its GGUF files (org/name:file): {}", gguf.join(", ")),
    }
}

/// What can go wrong with one request.
#[derive(Debug)]
enum Failure {
    /// No answer, or one that was cut off before anything new came.
    Unreachable(String),
    /// An answer of which a part came.
    CutOff(String),
    /// The hub refused, with an HTTP status.
    Status(u16),
    /// What an earlier download left can't be resumed.
    BadLeftover,
    /// The cache can't be written.
    Disk(std::io::Error),
    Other(String),
}

impl Failure {
    fn may_pass(&self) -> bool {
        match self {
            Self::Unreachable(_) | Self::CutOff(_) | Self::BadLeftover => true,
            Self::Status(status) => matches!(status, 408 | 429 | 500..),
            Self::Disk(_) | Self::Other(_) => false,
        }
    }
}

impl From<ApiError> for Failure {
    fn from(e: ApiError) -> Self {
        match e {
            ApiError::RequestError(e) => {
                let reason = e.to_string();
                match e.into_response().map(|r| r.status()) {
                    Some(416) => Self::BadLeftover,
                    Some(status) => Self::Status(status),
                    None => Self::Unreachable(reason),
                }
            }
            ApiError::InvalidResume => Self::BadLeftover,
            ApiError::IoError(e) => match e.kind() {
                ErrorKind::StorageFull
                | ErrorKind::PermissionDenied
                | ErrorKind::ReadOnlyFilesystem
                | ErrorKind::QuotaExceeded
                | ErrorKind::NotADirectory
                | ErrorKind::AlreadyExists
                | ErrorKind::NotFound => Self::Disk(e),
                ErrorKind::InvalidData => Self::Other(format!("the hub's answer: {e}")),
                _ => Self::Unreachable(e.to_string()),
            },
            ApiError::LockAcquisition(lock) => Self::Other(format!(
                "another program is fetching it (lock file {}); wait for it",
                lock.display()
            )),
            // Headers that a hub sends are missing.
            other => Self::Other(format!("{other}; see that HF_ENDPOINT names a hub")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(files: &[&str]) -> Vec<String> {
        files.iter().map(|f| (*f).to_owned()).collect()
    }

    #[test]
    fn weights_come_last_and_what_is_no_model_not_at_all() {
        let files = names(&[
            ".gitattributes",
            "README.md",
            "chat_template.jinja",
            "config.json",
            "consolidated.safetensors",
            "model.safetensors",
            "onnx/tokenizer.json",
            "pytorch_model.bin",
            "tokenizer.json",
            "tokenizer_config.json",
            "tokenizer/../../x.json",
        ]);
        assert_eq!(
            model_files(&files).unwrap(),
            [
                "config.json",
                "chat_template.jinja",
                "tokenizer.json",
                "tokenizer_config.json",
                "model.safetensors"
            ]
        );
        let sharded = names(&["config.json", WEIGHTS, INDEX, "model-00001-of-00001.safetensors"]);
        assert_eq!(model_files(&sharded).unwrap(), ["config.json", INDEX]);
    }

    #[test]
    fn a_repository_without_a_folder_model_says_what_it_has() {
        let e = model_files(&names(&["README.md", "q4.gguf", "q8.gguf"])).unwrap_err();
        assert!(e.contains("config.json") && e.contains("q4.gguf, q8.gguf"), "{e}");
        let e = model_files(&names(&["config.json", "pytorch_model.bin"])).unwrap_err();
        assert!(e.contains("safetensors"), "{e}");
    }
}
