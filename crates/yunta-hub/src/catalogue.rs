//! Models with short names.

use std::sync::LazyLock;

use serde::Deserialize;

/// A model of the catalogue: one GGUF file, which comes inside Python packages.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// The canonical name.
    pub name: String,
    /// Other names.
    pub aliases: Vec<String>,
    /// The licence under which its makers give it.
    pub license: String,
    /// The file's name.
    pub file: String,
    /// Its size.
    pub bytes: u64,
    /// Its SHA-256, in lower-case hexadecimal.
    pub sha256: String,
    /// The pieces of the file, in order; all of them one after the other are the file.
    pub parts: Vec<Part>,
}

/// A piece of a model's file: one member of one Python package.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// The package with its version: `name==version`.
    pub package: String,
    /// Size of the package, as it is downloaded.
    pub package_bytes: u64,
    /// Path of the piece within the package.
    pub member: String,
    /// Size of the piece.
    pub member_bytes: u64,
}

impl Entry {
    /// Bytes to download for this model.
    pub fn download_bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.package_bytes).sum()
    }
}

// The data is part of the program and tested: an error can't reach a user.
static ENTRIES: LazyLock<Vec<Entry>> =
    LazyLock::new(|| serde_json::from_str(include_str!("catalogue.json")).unwrap_or_default());

/// All models with short names.
pub fn catalogue() -> &'static [Entry] {
    &ENTRIES
}

/// The model that a short name stands for, however it is capitalised.
pub(crate) fn find(name: &str) -> Option<&'static Entry> {
    let name = name.to_lowercase();
    catalogue().iter().find(|e| e.name == name || e.aliases.contains(&name))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_two_models_share_a_name() {
        let _: Vec<Entry> = serde_json::from_str(include_str!("catalogue.json")).unwrap();
        let names: Vec<&String> =
            catalogue().iter().flat_map(|e| e.aliases.iter().chain([&e.name])).collect();
        assert!(!names.is_empty());
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), names.len());
        assert!(names.iter().all(|n| **n == n.to_lowercase()));
    }

    #[test]
    fn aliases_and_capitals_lead_to_the_model() {
        for name in ["smollm2", "SmolLM2-135M", "smollm2-135m-instruct"] {
            assert_eq!(find(name).unwrap().name, "smollm2-135m-instruct");
        }
        assert_eq!(find("gemma3-270m").unwrap().parts.len(), 4);
        assert!(find("gpt-17").is_none());
    }

    #[test]
    fn the_parts_make_up_the_whole() {
        for e in catalogue() {
            assert_eq!(e.parts.iter().map(|p| p.member_bytes).sum::<u64>(), e.bytes, "{}", e.name);
            assert!(e.sha256.len() == 64 && e.sha256.bytes().all(|b| b.is_ascii_hexdigit()));
            assert!(e.parts.iter().all(|p| p.package.contains("==")), "{}", e.name);
        }
    }
}
