//! The search for a model on this machine.

use std::path::{Path, PathBuf};

use crate::catalogue::Entry;
use crate::check;
use crate::huggingface::{repository_folder, snapshots};
use crate::name::{RepositoryName, Source, stays_below};

/// Something that should be a model, and is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The file or folder.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: String,
}

/// What was looked at, and what was wrong with it.
#[derive(Debug)]
pub(crate) struct Search {
    /// Whether hashes are checked too.
    verify: bool,
    pub(crate) searched: Vec<PathBuf>,
    pub(crate) damaged: Vec<Damage>,
}

impl Search {
    pub(crate) fn new(verify: bool) -> Self {
        Self { verify, searched: Vec::new(), damaged: Vec::new() }
    }

    /// Looks in a folder of models, which may be laid out by name, by `org/name`, or as a Hugging
    /// Face cache.
    pub(crate) fn folder(
        &mut self,
        folder: &Path,
        model: &str,
        source: Option<&Source>,
    ) -> Option<PathBuf> {
        match source {
            Some(Source::Short(entry)) => self
                .entry(&folder.join(&entry.name).join(&entry.file), entry)
                .or_else(|| self.entry(&folder.join(&entry.file), entry))
                .or_else(|| self.named(folder, model)),
            Some(Source::Repository(repository)) => match repository.parts().first() {
                Some(file) => self.any(folder.join(&repository.id).join(file)),
                None => self.named(folder, &repository.id),
            }
            .or_else(|| self.snapshot(folder, repository)),
            None => self.named(folder, model),
        }
    }

    /// A model of the catalogue at its place.
    pub(crate) fn entry(&mut self, path: &Path, entry: &Entry) -> Option<PathBuf> {
        let sha256 = self.verify.then_some(entry.sha256.as_str());
        self.consider(path.to_owned(), |path| check::file(path, entry.bytes, sha256))
    }

    /// A repository in a Hugging Face cache.
    pub(crate) fn snapshot(&mut self, cache: &Path, name: &RepositoryName) -> Option<PathBuf> {
        self.searched.push(repository_folder(cache, &name.id));
        // A snapshot without a configuration holds single files of the repository.
        let sign = name.parts().into_iter().next().unwrap_or(check::CONFIG.to_owned());
        let holds = snapshots(cache, &name.id).into_iter().filter(|s| s.join(&sign).exists());
        let place = |snapshot: PathBuf| match &name.file {
            Some(_) => snapshot.join(&sign),
            None => snapshot,
        };
        holds.map(place).find(|path| {
            let check = if name.file.is_some() { check::gguf } else { check::weights };
            let mut wrong = Vec::new();
            if let Err(reason) = check(path) {
                wrong.push(Damage { path: path.clone(), reason });
            } else if self.verify {
                let snapshot = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
                check::cached_hashes(snapshot, &mut wrong);
            }
            let whole = wrong.is_empty();
            self.damaged.extend(wrong);
            whole
        })
    }

    /// A folder or a GGUF file of that name.
    fn named(&mut self, folder: &Path, model: &str) -> Option<PathBuf> {
        if !stays_below(model) {
            return None;
        }
        self.any(folder.join(model)).or_else(|| self.any(folder.join(format!("{model}.gguf"))))
    }

    /// A file, or a folder with a model.
    fn any(&mut self, path: PathBuf) -> Option<PathBuf> {
        self.consider(
            path,
            |path| if path.is_dir() { check::folder(path) } else { check::gguf(path) },
        )
    }

    fn consider(
        &mut self,
        path: PathBuf,
        check: impl FnOnce(&Path) -> Result<(), String>,
    ) -> Option<PathBuf> {
        self.searched.push(path.clone());
        if !path.exists() {
            return None;
        }
        match check(&path) {
            Ok(()) => Some(path),
            Err(reason) => {
                self.damaged.push(Damage { path, reason });
                None
            }
        }
    }
}
