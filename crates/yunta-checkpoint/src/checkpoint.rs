//! A model's files, whatever their format.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::folder::{Folder, read_json};
use crate::gguf::{Gguf, Metadata, MetadataValue, is_further_part};
use crate::tensor::{Entry, Tensor};
use crate::text::{ChatTemplate, Tokenizer, from_gguf};
use crate::{CheckpointError, map};

/// Tokenizer files of real models are below 40 MiB.
const TOKENIZER_BYTES_MAX: u64 = 256 << 20;
const SMALL_JSON_BYTES_MAX: u64 = 16 << 20;

/// How a checkpoint is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// GGUF: one file, or one cut into several.
    Gguf,
    /// A Hugging Face folder with safetensors.
    Safetensors,
}

enum Source {
    Gguf(Box<Gguf>),
    Folder(Folder),
}

/// An opened checkpoint.
pub struct Checkpoint {
    path: PathBuf,
    source: Source,
}

impl Checkpoint {
    /// Opens a GGUF file, a Hugging Face folder, or a folder that holds one GGUF file. Of a GGUF
    /// file that is cut into several (`-00001-of-0000N.gguf`), name the first.
    ///
    /// # Errors
    /// [`CheckpointError`] if there is no checkpoint, or its headers are damaged.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let none = |reason: &str| CheckpointError::NotACheckpoint {
            file: path.to_owned(),
            reason: reason.to_owned(),
        };
        if path.is_file() {
            let gguf = Gguf::open(path)?;
            return Ok(Self { path: path.to_owned(), source: Source::Gguf(Box::new(gguf)) });
        }
        if !path.is_dir() {
            return Err(none("there is no such file or folder"));
        }
        if path.join("config.json").is_file() {
            let source = Source::Folder(Folder::open(path)?);
            return Ok(Self { path: path.to_owned(), source });
        }
        let entries = std::fs::read_dir(path).map_err(CheckpointError::io(path))?;
        let is_gguf =
            |p: &PathBuf| p.extension().is_some_and(|e| e == "gguf") && !is_further_part(p);
        let files: Vec<PathBuf> =
            entries.filter_map(|e| Some(e.ok()?.path())).filter(is_gguf).collect();
        match files.as_slice() {
            [file] => Self::open(file),
            [] => Err(none("the folder holds neither config.json nor a GGUF file")),
            _ => Err(none("the folder holds several GGUF files: name one")),
        }
    }

    /// What was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How it is stored.
    pub fn format(&self) -> Format {
        match self.source {
            Source::Gguf(_) => Format::Gguf,
            Source::Folder(_) => Format::Safetensors,
        }
    }

    /// The configuration in the form of Hugging Face's config.json (for GGUF made from metadata).
    pub fn config(&self) -> &Value {
        match &self.source {
            Source::Gguf(g) => &g.config,
            Source::Folder(f) => &f.config,
        }
    }

    fn entries(&self) -> &HashMap<String, Entry> {
        match &self.source {
            Source::Gguf(g) => &g.tensors,
            Source::Folder(f) => &f.tensors,
        }
    }

    /// Whether there is a tensor of this (Hugging Face) name.
    pub fn contains(&self, name: &str) -> bool {
        self.entries().contains_key(name)
    }

    /// All tensor names, in no order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries().keys().map(String::as_str)
    }

    /// Bytes of all tensors.
    pub fn total_bytes(&self) -> u64 {
        self.entries().values().map(|e| e.bytes).sum()
    }

    /// Tells checkpoints apart by what is in them, without reading all of it: the configuration,
    /// and the beginning and end of every tensor.
    ///
    /// # Errors
    /// [`CheckpointError::Tensor`] if a tensor's type can't be read.
    pub fn fingerprint(&self) -> Result<String, CheckpointError> {
        const ENDS: usize = 4096;
        let mut names: Vec<&str> = self.names().collect();
        names.sort_unstable();
        let mut hash = Sha256::new();
        hash.update(self.config().to_string());
        for name in names {
            let data = self.tensor(name)?.data();
            hash.update(name);
            hash.update((data.len() as u64).to_le_bytes());
            hash.update(data.get(..ENDS).unwrap_or(data));
            hash.update(data.get(data.len().saturating_sub(ENDS)..).unwrap_or_default());
        }
        Ok(hash.finalize().iter().take(16).map(|b| format!("{b:02x}")).collect())
    }

    /// A tensor by its Hugging Face name.
    ///
    /// # Errors
    /// [`CheckpointError::Missing`], or [`CheckpointError::Tensor`] if its type can't be read.
    pub fn tensor(&self, name: &str) -> Result<Tensor<'_>, CheckpointError> {
        let missing =
            || CheckpointError::Missing { file: self.path.clone(), tensor: name.to_owned() };
        let (name, entry) = self.entries().get_key_value(name).ok_or_else(missing)?;
        let (path, map) = self.maps().get(entry.file).ok_or_else(missing)?;
        Tensor::new(name, path, entry, map)
    }

    fn maps(&self) -> &[(PathBuf, Mmap)] {
        match &self.source {
            Source::Gguf(g) => &g.maps,
            Source::Folder(f) => &f.maps,
        }
    }

    /// The tokenizer: of a folder, from its tokenizer.json; of a GGUF file, from its metadata, or
    /// from a tokenizer.json beside it if there is none of use in it.
    ///
    /// # Errors
    /// [`CheckpointError::Tokenizer`] if there is none, or it can't be built.
    pub fn tokenizer(&self) -> Result<Tokenizer, CheckpointError> {
        let path = self.beside("tokenizer.json");
        let missing = match &self.source {
            Source::Gguf(g) => match from_gguf(&self.path, &g.metadata) {
                Ok(tokenizer) => return Ok(tokenizer),
                Err(e) => e,
            },
            Source::Folder(_) => CheckpointError::Tokenizer {
                file: path.clone(),
                reason: "the file is missing".to_owned(),
            },
        };
        if !path.is_file() {
            return Err(missing);
        }
        let text = map::read_text(&path, TOKENIZER_BYTES_MAX)?;
        let (bos, eos) = (self.special_token("bos_token"), self.special_token("eos_token"));
        Tokenizer::from_json(&path, &text, bos, eos)
    }

    /// The chat template, if the model has one: from GGUF metadata, or from chat_template.jinja,
    /// chat_template.json or tokenizer_config.json in the folder or beside the GGUF file.
    ///
    /// # Errors
    /// [`CheckpointError`] if a file can't be read or the template has no meaning.
    pub fn chat_template(&self) -> Result<Option<ChatTemplate>, CheckpointError> {
        let (bos, eos) = (self.special_token("bos_token"), self.special_token("eos_token"));
        let from = |template: &Value| ChatTemplate::from_value(template, bos.clone(), eos.clone());
        if let Source::Gguf(g) = &self.source
            && let Some(text) = g.metadata.get("tokenizer.chat_template")
        {
            return text.text().map(|t| from(&Value::from(t))).transpose();
        }
        let jinja = self.beside("chat_template.jinja");
        if jinja.is_file() {
            return from(&Value::from(map::read_text(&jinja, SMALL_JSON_BYTES_MAX)?)).map(Some);
        }
        for file in ["chat_template.json", "tokenizer_config.json"] {
            let template = self.json_beside(file)?.and_then(|j| j.get("chat_template").cloned());
            if let Some(template) = template.filter(|t| !t.is_null()) {
                return from(&template).map(Some);
            }
        }
        Ok(None)
    }

    /// Tokens that end an answer, each once.
    pub fn stop_tokens(&self) -> Vec<u32> {
        let ids = match &self.source {
            Source::Gguf(g) => gguf_stop_tokens(&g.metadata),
            Source::Folder(f) => self.folder_stop_tokens(&f.config),
        };
        let mut stop: Vec<u32> = Vec::new();
        for id in ids.into_iter().filter_map(|id| u32::try_from(id).ok()) {
            if !stop.contains(&id) {
                stop.push(id);
            }
        }
        stop
    }

    fn folder_stop_tokens(&self, config: &Value) -> Vec<u64> {
        // A damaged optional file has been, or will be, reported by who needs it.
        let generation = self.json_beside("generation_config.json").ok().flatten();
        let mut stop = Vec::new();
        for source in [generation.as_ref(), Some(config)].into_iter().flatten() {
            match source.get("eos_token_id") {
                Some(Value::Array(ids)) => stop.extend(ids.iter().filter_map(Value::as_u64)),
                Some(id) => stop.extend(id.as_u64()),
                None => {}
            }
        }
        let tokenizer = self.special_token("eos_token").and_then(|_| self.tokenizer().ok());
        stop.extend(tokenizer.and_then(|t| t.eos()).map(u64::from));
        stop
    }

    /// A file in the folder, or beside the GGUF file.
    fn beside(&self, name: &str) -> PathBuf {
        match &self.source {
            Source::Gguf(_) => self.path.with_file_name(name),
            Source::Folder(_) => self.path.join(name),
        }
    }

    fn json_beside(&self, name: &str) -> Result<Option<Value>, CheckpointError> {
        let path = self.beside(name);
        if path.is_file() { read_json(&path, SMALL_JSON_BYTES_MAX).map(Some) } else { Ok(None) }
    }

    /// The text of a special token: `bos_token` or `eos_token`.
    fn special_token(&self, name: &str) -> Option<String> {
        if let Source::Gguf(g) = &self.source {
            let id = g.metadata.get(&format!("tokenizer.ggml.{name}_id"))?.unsigned()?;
            let tokens = g.metadata.get("tokenizer.ggml.tokens")?.array()?;
            return tokens.get(usize::try_from(id).ok()?)?.text().map(str::to_owned);
        }
        let config = self.json_beside("tokenizer_config.json").ok().flatten()?;
        let token = config.get(name)?;
        // Either the text itself, or an object that describes the token.
        token.as_str().or_else(|| token.get("content")?.as_str()).map(str::to_owned)
    }
}

/// What the metadata names, and tokens that end a turn by what they are called: many files name
/// one of several only. Names as in `llama-vocab.cpp` of llama.cpp, of models that are known here.
fn gguf_stop_tokens(metadata: &Metadata) -> Vec<u64> {
    const ENDS: [&str; 5] = ["<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"];
    let get = |key: &str| metadata.get(&format!("tokenizer.ggml.{key}"));
    let named = ["eos_token_id", "eot_token_id", "eom_token_id"].into_iter();
    let mut stop: Vec<u64> = named.filter_map(|key| get(key)?.unsigned()).collect();
    let tokens = get("tokens").and_then(MetadataValue::array).unwrap_or_default();
    let ends = |token: &MetadataValue| token.text().is_some_and(|text| ENDS.contains(&text));
    stop.extend(tokens.iter().zip(0..).filter(|(token, _)| ends(token)).map(|(_, id)| id));
    stop
}
