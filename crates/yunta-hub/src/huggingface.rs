//! The Hugging Face cache: what it holds, and the settings that all its users share.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use hf_hub::Repo;

use crate::name::is_plain_file;

/// Where Hugging Face's libraries keep models, and whence they fetch them.
#[derive(Clone, Debug)]
pub struct HuggingFace {
    /// The cache: holds `models--ORG--NAME` folders.
    pub cache: PathBuf,
    /// Another hub than the usual one.
    pub endpoint: Option<String>,
    /// For private and gated models.
    pub token: Option<Token>,
    /// Nothing is fetched.
    pub offline: bool,
}

/// A secret: never shown.
#[derive(Clone)]
pub struct Token(String);

impl Token {
    /// A token as the hub gave it; none if there is nothing but white space.
    pub fn new(text: &str) -> Option<Self> {
        let text = text.trim();
        (!text.is_empty()).then(|| Self(text.to_owned()))
    }

    pub(crate) fn reveal(&self) -> String {
        self.0.clone()
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

impl HuggingFace {
    /// From `HF_HOME` (by default `huggingface` in the user's cache folder), `HF_ENDPOINT`,
    /// `HF_TOKEN` (or the token file in `HF_HOME`), `HF_HUB_OFFLINE`.
    pub(crate) fn from_vars(var: impl Fn(&str) -> Option<OsString>, user_cache: &Path) -> Self {
        let text = |name: &str| var(name).map(|v| v.to_string_lossy().into_owned());
        let home = var("HF_HOME").map_or_else(|| user_cache.join("huggingface"), PathBuf::from);
        let saved = || Token::new(&fs::read_to_string(home.join("token")).ok()?);
        let offline = text("HF_HUB_OFFLINE").unwrap_or_default().to_uppercase();
        Self {
            endpoint: text("HF_ENDPOINT").map(|e| e.trim_end_matches('/').to_owned()),
            token: text("HF_TOKEN").and_then(|t| Token::new(&t)).or_else(saved),
            offline: ["1", "ON", "YES", "TRUE"].contains(&offline.as_str()),
            cache: home.join("hub"),
        }
    }
}

/// Folder of a repository in a Hugging Face cache.
pub(crate) fn repository_folder(cache: &Path, id: &str) -> PathBuf {
    cache.join(Repo::model(id.to_owned()).folder_name())
}

/// Snapshots of a repository in a Hugging Face cache: that of its main branch first.
pub(crate) fn snapshots(cache: &Path, id: &str) -> Vec<PathBuf> {
    let folder = repository_folder(cache, id);
    let snapshots = folder.join("snapshots");
    let main = fs::read_to_string(folder.join("refs").join("main")).unwrap_or_default();
    let main = Some(main.trim()).filter(|commit| is_plain_file(commit));
    let entries = fs::read_dir(&snapshots).into_iter().flatten().filter_map(Result::ok);
    let mut found: Vec<PathBuf> = entries.map(|e| e.path()).collect();
    found.sort_by_key(|path| (main.is_none_or(|commit| !path.ends_with(commit)), path.clone()));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(vars: &[(&str, &str)]) -> HuggingFace {
        let var = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).into());
        HuggingFace::from_vars(var, Path::new("/home/me/.cache"))
    }

    #[test]
    fn the_usual_variables_hold() {
        let plain = from(&[]);
        assert_eq!(plain.cache, Path::new("/home/me/.cache/huggingface/hub"));
        assert!(plain.endpoint.is_none() && plain.token.is_none() && !plain.offline);
        let set = from(&[
            ("HF_HOME", "/data/hf"),
            ("HF_ENDPOINT", "http://mirror:8080/"),
            ("HF_TOKEN", "hf_secret\n"),
            ("HF_HUB_OFFLINE", "1"),
        ]);
        assert_eq!(set.cache, Path::new("/data/hf/hub"));
        assert_eq!(set.endpoint.as_deref(), Some("http://mirror:8080"));
        assert_eq!(set.token.as_ref().unwrap().reveal(), "hf_secret");
        assert!(set.offline);
        assert!(!format!("{set:?}").contains("secret"));
    }

    #[test]
    fn a_saved_token_is_used() {
        let home = tempfile::tempdir().unwrap();
        fs::write(home.path().join("token"), "hf_saved\n").unwrap();
        let set = from(&[("HF_HOME", home.path().to_str().unwrap())]);
        assert_eq!(set.token.unwrap().reveal(), "hf_saved");
    }

    #[test]
    fn the_main_branch_comes_first() {
        let cache = tempfile::tempdir().unwrap();
        let folder = repository_folder(cache.path(), "org/name");
        for commit in ["aaa", "bbb", "ccc"] {
            fs::create_dir_all(folder.join("snapshots").join(commit)).unwrap();
        }
        fs::create_dir_all(folder.join("refs")).unwrap();
        fs::write(folder.join("refs/main"), "bbb").unwrap();
        let found = snapshots(cache.path(), "org/name");
        let names: Vec<_> = found.iter().map(|p| p.file_name().unwrap()).collect();
        assert_eq!(names, ["bbb", "aaa", "ccc"]);
        assert!(snapshots(cache.path(), "org/other").is_empty());
    }
}
