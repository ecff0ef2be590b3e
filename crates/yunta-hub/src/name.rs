//! What a model is called: a path, a short name, or a repository.

use std::path::{Component, Path};

use crate::catalogue::{self, Entry};

/// Whence a model that is named so can be fetched.
pub(crate) enum Source {
    /// The catalogue.
    Short(&'static Entry),
    /// A Hugging Face repository.
    Repository(RepositoryName),
}

impl Source {
    /// None for a name that can only be found in a folder.
    pub(crate) fn parse(model: &str) -> Option<Self> {
        let short = catalogue::find(model).map(Self::Short);
        short.or_else(|| RepositoryName::parse(model).map(Self::Repository))
    }
}

/// A Hugging Face repository, and the one file of it that is wanted, if not the whole model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RepositoryName {
    /// `org/name`
    pub(crate) id: String,
    /// A GGUF file of the repository.
    pub(crate) file: Option<String>,
}

impl RepositoryName {
    /// From `org/name` or `org/name:file.gguf`.
    pub(crate) fn parse(model: &str) -> Option<Self> {
        let (id, file) = match model.split_once(':') {
            Some((id, file)) => (id, Some(file)),
            None => (model, None),
        };
        let (org, name) = id.split_once('/')?;
        let plain = |s: &str| is_plain_file(s) && !s.contains('/');
        let whole = plain(org) && plain(name) && file.is_none_or(is_plain_file);
        whole.then(|| Self { id: id.to_owned(), file: file.map(str::to_owned) })
    }

    /// The wanted files, if not the whole model: more than one if it is split.
    pub(crate) fn parts(&self) -> Vec<String> {
        self.file.iter().flat_map(|file| gguf_parts(file)).collect()
    }
}

/// Whether this is a file name (with folders before it) of ordinary letters which stays below the
/// folder it is joined to. Names that a server sends must pass this before they become paths.
pub(crate) fn is_plain_file(name: &str) -> bool {
    let ordinary = |c: char| c.is_ascii_alphanumeric() || "-_.+/".contains(c);
    !name.is_empty()
        && name.chars().all(ordinary)
        && name.split('/').all(|part| !part.is_empty() && !part.starts_with('.'))
}

/// Files of a model in GGUF of which one is named, the first one first: several if it is cut into
/// `NAME-00001-of-00003.gguf` and so on, as `llama-gguf-split` writes them.
pub(crate) fn gguf_parts(file: &str) -> Vec<String> {
    match split_name(file) {
        Some((stem, _, count)) => {
            (1..=count).map(|n| format!("{stem}-{n:05}-of-{count:05}.gguf")).collect()
        }
        None => vec![file.to_owned()],
    }
}

/// Whether a file is a part other than the first.
pub(crate) fn is_further_part(file: &str) -> bool {
    split_name(file).is_some_and(|(_, number, _)| number != 1)
}

/// Stem, number and count.
fn split_name(file: &str) -> Option<(&str, u32, u32)> {
    let (rest, count) = file.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let five_digits = |s: &str| s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit());
    let (number, count) =
        (five_digits(number) && five_digits(count)).then(|| (number.parse(), count.parse()))?;
    let (number, count) = (number.ok()?, count.ok()?);
    (1..=count).contains(&number).then_some((stem, number, count))
}

/// Whether the user can mean a path by this: names without `/` and `.` are looked up elsewhere,
/// whatever lies in the current folder.
pub(crate) fn can_be_path(model: &str) -> bool {
    model.contains(['/', '.'])
}

/// Whether the name can be looked up below a folder without leading out of it.
pub(crate) fn stays_below(model: &str) -> bool {
    let mut components = Path::new(model).components().peekable();
    components.peek().is_some() && components.all(|c| matches!(c, Component::Normal(_)))
}

/// The name under which a model is served: the catalogue's canonical name, the repository's id, or
/// the name of the file without its extension.
pub fn served_name(model: &str) -> String {
    let path = Path::new(model);
    if can_be_path(model) && path.exists() {
        return name_of_path(path);
    }
    match Source::parse(model) {
        Some(Source::Short(entry)) => entry.name.clone(),
        Some(Source::Repository(repository)) => repository.id,
        None => name_of_path(path),
    }
}

fn name_of_path(path: &Path) -> String {
    // `.` and `..` have a name only when resolved; links are kept as the user named them.
    let resolved = path.file_name().is_none().then(|| path.canonicalize().ok()).flatten();
    let path = resolved.as_deref().unwrap_or(path);
    if let Some(id) = snapshot_id(path) {
        return id;
    }
    let is_file = !path.is_dir() && path.extension().is_some_and(|e| e == "gguf");
    let name = if is_file { path.file_stem() } else { path.file_name() };
    name.unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// The repository's id if this is its folder in a Hugging Face cache,
/// `models--ORG--NAME/snapshots/COMMIT`.
fn snapshot_id(path: &Path) -> Option<String> {
    let snapshots = path.parent().filter(|p| p.ends_with("snapshots"))?;
    id_of_cache_folder(snapshots.parent()?.file_name()?.to_str()?)
}

/// `models--ORG--NAME` to `ORG/NAME`.
pub(crate) fn id_of_cache_folder(folder: &str) -> Option<String> {
    let (org, name) = folder.strip_prefix("models--")?.split_once("--")?;
    Some(format!("{org}/{name}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repositories_are_told_from_paths() {
        assert_eq!(RepositoryName::parse("org/name").unwrap().id, "org/name");
        let file = RepositoryName::parse("org/name:q4/f.gguf").unwrap().file;
        assert_eq!(file.as_deref(), Some("q4/f.gguf"));
        for path in ["name", "/org/name", "./name", "../name", "~/name", "a/b/c", "org/", "o r/g"] {
            assert_eq!(RepositoryName::parse(path), None, "{path}");
        }
    }

    #[test]
    fn file_names_cannot_lead_out_of_their_folder() {
        for name in ["../x", "a/../x", "/x", "", ".", "a//b", "x?y", "a\\b", "%2e%2e/x", "a/"] {
            assert!(!is_plain_file(name), "{name}");
            assert_eq!(RepositoryName::parse(&format!("org/name:{name}")), None, "{name}");
        }
        assert!(is_plain_file("model-00001-of-00002.safetensors"));
        for name in ["../x", "/x", "./x", ".", ""] {
            assert!(!stays_below(name), "{name}");
        }
        assert!(stays_below("org/name"));
    }

    #[test]
    fn any_part_of_a_split_model_names_all_of_them() {
        let parts =
            ["q/m-00001-of-00003.gguf", "q/m-00002-of-00003.gguf", "q/m-00003-of-00003.gguf"];
        for part in parts {
            assert_eq!(gguf_parts(part), parts);
        }
        assert!(!is_further_part(parts[0]) && is_further_part(parts[2]));
        for whole in ["m.gguf", "best-of-2.gguf", "m-00004-of-00003.gguf", "m-00000-of-00003.gguf"]
        {
            assert_eq!(gguf_parts(whole), [whole]);
            assert!(!is_further_part(whole));
        }
    }

    #[test]
    fn models_are_served_under_the_name_people_know() {
        assert_eq!(served_name("smollm2"), "smollm2-135m-instruct");
        assert_eq!(served_name("org/some-model.v1"), "org/some-model.v1");
        assert_eq!(served_name("org/some-model:q4.gguf"), "org/some-model");
        assert_eq!(served_name("/nowhere/Model.Q4_1.gguf"), "Model.Q4_1");
        assert_eq!(served_name("/nowhere/Qwen2.5-7B/"), "Qwen2.5-7B");
    }

    #[test]
    fn folders_are_served_under_their_own_name() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("Llama-3.1-8B");
        let snapshot = root.path().join("models--org--a--b/snapshots/0123");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::create_dir_all(&snapshot).unwrap();
        assert_eq!(served_name(folder.to_str().unwrap()), "Llama-3.1-8B");
        assert_eq!(served_name(snapshot.to_str().unwrap()), "org/a--b");
    }
}
