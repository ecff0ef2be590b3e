//! Whether what lies on disk is the whole model. Each check says what is wrong.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::name::{gguf_parts, is_further_part, is_plain_file};
use crate::search::Damage;

pub(crate) const CONFIG: &str = "config.json";
pub(crate) const INDEX: &str = "model.safetensors.index.json";
pub(crate) const WEIGHTS: &str = "model.safetensors";

/// Checks a file against its size, and against its hash if that is given.
pub(crate) fn file(path: &Path, bytes: u64, sha256: Option<&str>) -> Result<(), String> {
    let size = path.metadata().map_err(|e| e.to_string())?.len();
    if size != bytes {
        return Err(format!("it has {size} bytes instead of {bytes}"));
    }
    match sha256 {
        Some(expected) => hash_is(path, expected),
        None => Ok(()),
    }
}

/// Checks that a folder holds a model: a configuration and all its weights, or one GGUF file.
pub(crate) fn folder(path: &Path) -> Result<(), String> {
    if path.join(CONFIG).is_file() {
        return weights(path);
    }
    let entries = fs::read_dir(path).map_err(|e| e.to_string())?.filter_map(Result::ok);
    let files: Vec<PathBuf> = entries.map(|e| e.path()).filter(|p| is_gguf(p)).collect();
    match files.as_slice() {
        [] => Err(format!("it holds no {CONFIG}")),
        [file] => gguf(file),
        _ => Err("it holds several GGUF files: name one".to_owned()),
    }
}

/// Checks that all parts of a model in GGUF lie beside the one that is named.
pub(crate) fn gguf(path: &Path) -> Result<(), String> {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    let missing = |part: &String| !path.with_file_name(part).is_file();
    match gguf_parts(name).into_iter().find(missing) {
        Some(missing) => Err(format!("{missing} is missing beside it")),
        None => Ok(()),
    }
}

/// Checks that all weights lie beside a model's configuration.
pub(crate) fn weights(path: &Path) -> Result<(), String> {
    let index = path.join(INDEX);
    if !index.is_file() {
        let whole = path.join(WEIGHTS).is_file();
        return if whole { Ok(()) } else { Err(format!("it holds no {WEIGHTS}")) };
    }
    match shards(&index)?.into_iter().find(|shard| !path.join(shard).is_file()) {
        Some(missing) => Err(format!("{missing} is missing")),
        None => Ok(()),
    }
}

/// Whether this is a file by which a model in GGUF is opened, by its name.
pub(crate) fn is_gguf(path: &Path) -> bool {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default();
    name.ends_with(".gguf") && !is_further_part(name)
}

/// The files that an index (`model.safetensors.index.json`) names, sorted.
pub(crate) fn shards(index: &Path) -> Result<Vec<String>, String> {
    let text = fs::read_to_string(index).map_err(|e| e.to_string())?;
    let json: Value = serde_json::from_str(&text).map_err(|e| format!("{INDEX}: {e}"))?;
    let map = json.get("weight_map").and_then(Value::as_object);
    let map = map.ok_or_else(|| format!("{INDEX} has no `weight_map`"))?;
    let plain = |file: &Value| match file.as_str() {
        Some(name) if is_plain_file(name) => Ok(name.to_owned()),
        _ => Err(format!("{INDEX} names {file}, which is no plain file name")),
    };
    Ok(map.values().map(plain).collect::<Result<BTreeSet<_>, _>>()?.into_iter().collect())
}

/// Checks files of a Hugging Face cache: large ones lie under their SHA-256 as name, and are linked
/// to where the model's folder is.
pub(crate) fn cached_hashes(path: &Path, damaged: &mut Vec<Damage>) {
    if path.is_dir() {
        for entry in fs::read_dir(path).into_iter().flatten().filter_map(Result::ok) {
            cached_hashes(&entry.path(), damaged);
        }
        return;
    }
    let check = || {
        let blob = path.canonicalize().map_err(|e| e.to_string())?;
        match blob.file_name().and_then(|n| n.to_str()) {
            Some(name) if is_sha256(name) => hash_is(&blob, name),
            // Small files lie under another hash.
            _ => Ok(()),
        }
    };
    if let Err(reason) = check() {
        damaged.push(Damage { path: path.to_owned(), reason });
    }
}

fn is_sha256(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|b| b.is_ascii_hexdigit())
}

fn hash_is(path: &Path, expected: &str) -> Result<(), String> {
    let found = hash(path).map_err(|e| e.to_string())?;
    if found == expected {
        return Ok(());
    }
    Err(format!("its SHA-256 is {found} instead of {expected}"))
}

fn hash(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex(&hasher.finalize())),
            n => hasher.update(buffer.get(..n).unwrap_or_default()),
        }
    }
}

/// Bytes as lower-case hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_whole_by_size_and_by_hash() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("abc");
        fs::write(&path, "abc").unwrap();
        // FIPS 180-2, appendix B.1.
        let good = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(file(&path, 3, Some(good)), Ok(()));
        assert!(file(&path, 4, None).unwrap_err().contains("3 bytes instead of 4"));
        assert!(file(&path, 3, Some(&good.replace('b', "0"))).unwrap_err().contains(good));
        assert!(file(&root.path().join("none"), 3, None).is_err());
    }

    #[test]
    fn a_split_model_is_whole_only_with_all_its_parts() {
        let root = tempfile::tempdir().unwrap();
        let first = root.path().join("m-00001-of-00002.gguf");
        fs::write(&first, "").unwrap();
        assert!(gguf(&first).unwrap_err().contains("m-00002-of-00002.gguf"));
        assert!(folder(root.path()).is_err());
        fs::write(root.path().join("m-00002-of-00002.gguf"), "").unwrap();
        assert_eq!(gguf(&first), Ok(()));
        assert_eq!(folder(root.path()), Ok(()));
        fs::write(root.path().join("other.gguf"), "").unwrap();
        assert!(folder(root.path()).unwrap_err().contains("several"));
    }

    #[test]
    fn a_folder_is_whole_only_with_all_its_weights() {
        let root = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(root.path().join(name), text).unwrap();
        assert!(folder(root.path()).unwrap_err().contains("config.json"));
        write("config.json", "{}");
        assert!(folder(root.path()).unwrap_err().contains(WEIGHTS));
        write(INDEX, r#"{"weight_map": {"a": "m1.safetensors", "b": "m2.safetensors"}}"#);
        write("m1.safetensors", "");
        assert!(folder(root.path()).unwrap_err().contains("m2.safetensors"));
        write("m2.safetensors", "");
        assert_eq!(folder(root.path()), Ok(()));
        for bad in [r#"{"weight_map": {"a": "../m1"}}"#, r#"{"weight_map": {"a": 1}}"#, "{}", "["] {
            write(INDEX, bad);
            assert!(folder(root.path()).unwrap_err().contains(INDEX), "{bad}");
        }
    }
}
