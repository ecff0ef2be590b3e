//! What several tests share: the fixtures, and a writer of GGUF files.
#![allow(dead_code, unreachable_pub)] // Each test takes what it needs.

use std::path::{Path, PathBuf};

use yunta_checkpoint::{Checkpoint, CheckpointError};

/// A file or folder of the reference fixtures.
pub fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(path)
}

/// A JSON file.
pub fn json(path: &Path) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Folders of the reference models.
pub fn models() -> Vec<PathBuf> {
    entries("models").into_iter().filter(|p| p.is_dir()).collect()
}

/// The reference GGUF files.
pub fn ggufs() -> Vec<PathBuf> {
    entries("gguf").into_iter().filter(|p| p.extension().is_some_and(|e| e == "gguf")).collect()
}

fn entries(folder: &str) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(fixture(folder)).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty());
    paths
}

/// Reads all that can be read of a checkpoint; errors are answers too.
pub fn read_everything(path: &Path) -> Result<(), CheckpointError> {
    let checkpoint = Checkpoint::open(path)?;
    let mut bytes = 0;
    for name in checkpoint.names() {
        let Ok(tensor) = checkpoint.tensor(name) else { continue };
        let _ = tensor.bytes();
        for r in 0..tensor.rows() {
            bytes += tensor.row(r).map_or(0, <[u8]>::len);
        }
    }
    assert!(bytes as u64 <= checkpoint.total_bytes(), "no more than there is");
    let _ = (checkpoint.config(), checkpoint.stop_tokens());
    if let Ok(tokenizer) = checkpoint.tokenizer() {
        let ids = tokenizer.encode("Hello, wörld! <|im_end|> 123", true).unwrap_or_default();
        let _ = tokenizer.decode(&ids, false);
        let mut stream = tokenizer.stream_decoder(true);
        for id in ids.into_iter().chain([0, u32::MAX]) {
            stream.push(id).unwrap();
        }
        stream.flush().unwrap();
    }
    if let Ok(Some(template)) = checkpoint.chat_template() {
        let messages = serde_json::json!([{"role": "user", "content": "Hi"}]);
        let _ = template.render(&messages, None, true, &serde_json::Map::new());
    }
    Ok(())
}

/// Values of metadata.
pub enum Value {
    U32(u32),
    U64(u64),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    F32s(Vec<f32>),
    I32s(Vec<i32>),
}

/// Writes GGUF files, well-formed or not.
pub struct Gguf {
    pub magic: [u8; 4],
    pub version: u32,
    pub metadata: Vec<(String, Value)>,
    /// Name, dimensions (innermost first), type, offset.
    pub tensors: Vec<(String, Vec<u64>, u32, u64)>,
    pub data: Vec<u8>,
}

impl Gguf {
    pub fn new(architecture: &str) -> Self {
        let metadata = vec![];
        let gguf = Self { magic: *b"GGUF", version: 3, metadata, tensors: vec![], data: vec![] };
        gguf.with("general.architecture", Value::Text(architecture.to_owned()))
    }

    pub fn with(mut self, key: &str, value: Value) -> Self {
        self.metadata.push((key.to_owned(), value));
        self
    }

    /// Adds a tensor behind the others.
    pub fn tensor(mut self, name: &str, dims: &[u64], kind: u32, data: &[u8]) -> Self {
        let offset = self.data.len().next_multiple_of(32);
        self.data.resize(offset, 0);
        self.data.extend_from_slice(data);
        self.tensors.push((name.to_owned(), dims.to_vec(), kind, offset as u64));
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            text(&mut out, key);
            write_value(&mut out, value);
        }
        for (name, dims, kind, offset) in &self.tensors {
            text(&mut out, name);
            out.extend((dims.len() as u32).to_le_bytes());
            dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend_from_slice(&self.data);
        out
    }

    /// Writes the file and opens it.
    pub fn open(&self) -> Result<Checkpoint, CheckpointError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        std::fs::write(&path, self.bytes()).unwrap();
        // The map outlives the name.
        Checkpoint::open(&path)
    }
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn write_value(out: &mut Vec<u8>, value: &Value) {
    let list = |out: &mut Vec<u8>, kind: u32, len: usize| {
        out.extend(9u32.to_le_bytes());
        out.extend(kind.to_le_bytes());
        out.extend((len as u64).to_le_bytes());
    };
    match value {
        Value::U32(n) => {
            out.extend(4u32.to_le_bytes());
            out.extend(n.to_le_bytes());
        }
        Value::U64(n) => {
            out.extend(10u32.to_le_bytes());
            out.extend(n.to_le_bytes());
        }
        Value::F32(x) => {
            out.extend(6u32.to_le_bytes());
            out.extend(x.to_le_bytes());
        }
        Value::Bool(b) => {
            out.extend(7u32.to_le_bytes());
            out.push(u8::from(*b));
        }
        Value::Text(s) => {
            out.extend(8u32.to_le_bytes());
            text(out, s);
        }
        Value::Texts(texts) => {
            list(out, 8, texts.len());
            texts.iter().for_each(|t| text(out, t));
        }
        Value::F32s(xs) => {
            list(out, 6, xs.len());
            xs.iter().for_each(|x| out.extend(x.to_le_bytes()));
        }
        Value::I32s(xs) => {
            list(out, 5, xs.len());
            xs.iter().for_each(|x| out.extend(x.to_le_bytes()));
        }
    }
}
