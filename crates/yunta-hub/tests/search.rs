//! The order of the search, and what counts as found.

#![allow(clippy::unwrap_used, clippy::panic)] // also in helpers of tests

mod support;

use std::fs::{self, File};
use std::path::Path;

use support::{empty_hub, fixture};
use yunta_hub::{Entry, HubError, Resolved, Silent, catalogue};

fn smollm2() -> &'static Entry {
    catalogue().iter().find(|e| e.aliases.iter().any(|a| a == "smollm2")).unwrap()
}

/// A file of the right size, with nothing in it.
fn hollow(path: &Path, entry: &Entry) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    File::create(path).unwrap().set_len(entry.bytes).unwrap();
}

fn here(path: &Path) -> Resolved {
    Resolved::Here(path.to_owned())
}

#[test]
fn paths_are_taken_as_they_are() {
    let root = tempfile::tempdir().unwrap();
    let hub = empty_hub(root.path());
    for path in ["models/llama_plain", "gguf/llama-Q4_0.gguf"] {
        let path = fixture(path);
        assert_eq!(hub.resolve(path.to_str().unwrap()).unwrap(), here(&path));
    }
}

#[test]
fn folders_come_before_the_cache_and_in_their_order() {
    let root = tempfile::tempdir().unwrap();
    let mut hub = empty_hub(root.path());
    hub.folders = vec![root.path().join("first"), root.path().join("second")];
    let file = &smollm2().file;
    let cached = root.path().join("cache/models/smollm2-135m-instruct").join(file);
    hollow(&cached, smollm2());
    assert_eq!(hub.resolve("smollm2").unwrap(), here(&cached));
    let second = root.path().join("second").join(file);
    hollow(&second, smollm2());
    assert_eq!(hub.resolve("SmolLM2-135M").unwrap(), here(&second));
    let first = root.path().join("first/smollm2-135m-instruct").join(file);
    hollow(&first, smollm2());
    assert_eq!(hub.resolve("smollm2").unwrap(), here(&first));
}

#[test]
fn models_in_folders_are_found_by_any_name() {
    let root = tempfile::tempdir().unwrap();
    let hub = empty_hub(root.path());
    let nfs = root.path().join("nfs");
    let copy = |from: &str, to: &str, files: &[&str]| {
        fs::create_dir_all(nfs.join(to)).unwrap();
        for file in files {
            fs::copy(fixture(from).join(file), nfs.join(to).join(file)).unwrap();
        }
    };
    let model = ["config.json", "model.safetensors"];
    copy("models/llama_plain", "plain", &model);
    copy("models/llama_plain", "org/name", &model);
    copy("models/llama_plain", "models--hf--cached/snapshots/0123", &model);
    copy("gguf", ".", &["llama-Q4_0.gguf"]);
    copy("gguf", "org/quantised", &["llama-Q8_0.gguf"]);
    for (name, place) in [
        ("plain", "plain"),
        ("org/name", "org/name"),
        ("hf/cached", "models--hf--cached/snapshots/0123"),
        ("llama-Q4_0", "llama-Q4_0.gguf"),
        ("llama-Q4_0.gguf", "llama-Q4_0.gguf"),
        ("org/quantised:llama-Q8_0.gguf", "org/quantised/llama-Q8_0.gguf"),
    ] {
        assert_eq!(hub.resolve(name).unwrap(), here(&nfs.join(place)), "{name}");
    }
    let names: Vec<String> = hub.list_local().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["llama-Q4_0.gguf", "org/name", "org/quantised", "plain", "hf/cached"]);
}

#[test]
fn names_lead_out_of_no_folder() {
    let root = tempfile::tempdir().unwrap();
    let mut hub = empty_hub(root.path());
    hub.folders = vec![root.path().join("a/b")];
    fs::create_dir_all(root.path().join("a/b")).unwrap();
    fs::write(root.path().join("a/secret.gguf"), "").unwrap();
    assert!(matches!(hub.resolve("../secret"), Err(HubError::Unknown { .. })));
}

#[test]
fn a_damaged_file_is_not_found_but_named() {
    let root = tempfile::tempdir().unwrap();
    let mut hub = empty_hub(root.path());
    let cached = root.path().join("cache/models/smollm2-135m-instruct").join(&smollm2().file);
    fs::create_dir_all(cached.parent().unwrap()).unwrap();
    fs::write(&cached, "GGUF").unwrap();
    let Resolved::NotHere { searched, damaged } = hub.resolve("smollm2").unwrap() else {
        panic!("a file cut short was taken")
    };
    assert!(searched.contains(&cached) && searched.iter().any(|p| p.starts_with(&hub.folders[0])));
    assert_eq!(damaged[0].path, cached);
    assert!(damaged[0].reason.contains("4 bytes"), "{damaged:?}");
    hollow(&cached, smollm2());
    assert_eq!(hub.resolve("smollm2").unwrap(), here(&cached));
    hub.verify = true;
    assert!(matches!(hub.resolve("smollm2").unwrap(), Resolved::NotHere { .. }));
}

#[test]
fn an_incomplete_folder_says_what_it_lacks() {
    let root = tempfile::tempdir().unwrap();
    let hub = empty_hub(root.path());
    fs::create_dir_all(root.path().join("nfs/half")).unwrap();
    fs::write(root.path().join("nfs/half/config.json"), "{}").unwrap();
    let e = hub.resolve("half").unwrap_err().to_string();
    assert!(e.contains("nfs/half") && e.contains("model.safetensors"), "{e}");
}

#[test]
fn what_is_nowhere_is_said_with_what_to_do() {
    let root = tempfile::tempdir().unwrap();
    let hub = empty_hub(root.path());
    let e = hub.pull("no-such-model", &Silent).unwrap_err().to_string();
    assert!(e.contains("smollm2-135m-instruct") && e.contains("nfs/no-such-model"), "{e}");
    let e = hub.pull("smollm2", &Silent).unwrap_err().to_string();
    assert!(e.contains("no-python") && e.contains("put the model's file at"), "{e}");
}
