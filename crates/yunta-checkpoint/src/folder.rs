//! Hugging Face folders: config.json and safetensors files, one or several.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use yunta_tensor::DType;

use crate::CheckpointError;
use crate::map::{map, read_text};
use crate::tensor::{Entry, RowOrder};

/// No configuration is larger.
const CONFIG_BYTES_MAX: u64 = 16 << 20;
/// The index of a model of a million tensors is smaller.
const INDEX_BYTES_MAX: u64 = 256 << 20;

/// An opened folder.
pub(crate) struct Folder {
    pub(crate) maps: Vec<(PathBuf, Mmap)>,
    pub(crate) tensors: HashMap<String, Entry>,
    pub(crate) config: Value,
}

impl Folder {
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let config = read_json(&path.join("config.json"), CONFIG_BYTES_MAX)?;
        let mut folder = Self { maps: Vec::new(), tensors: HashMap::new(), config };
        let index = path.join("model.safetensors.index.json");
        if index.is_file() {
            folder.add_shards(path, &index)?;
        } else {
            folder.add(&path.join("model.safetensors"), None)?;
        }
        Ok(folder)
    }

    /// Adds the files that the index names, and sees that each tensor is where the index says.
    fn add_shards(&mut self, path: &Path, index: &Path) -> Result<(), CheckpointError> {
        let json = read_json(index, INDEX_BYTES_MAX)?;
        let bad = |reason: String| CheckpointError::malformed(index, reason);
        let weights = json.get("weight_map").and_then(Value::as_object);
        let weights = weights.ok_or_else(|| bad("it has no `weight_map`".to_owned()))?;
        let mut by_file: HashMap<&str, HashSet<&str>> = HashMap::new();
        for (tensor, file) in weights {
            let file = file.as_str().filter(|f| is_plain_name(f)).ok_or_else(|| {
                bad(format!("tensor `{tensor}` is in {file}, which is no name of a file beside it"))
            })?;
            by_file.entry(file).or_default().insert(tensor);
        }
        let mut files: Vec<_> = by_file.into_iter().collect();
        files.sort_unstable_by_key(|(file, _)| *file);
        for (file, tensors) in files {
            let file = path.join(file);
            self.add(&file, Some(&tensors))?;
            if let Some(tensor) = tensors.into_iter().find(|t| !self.tensors.contains_key(*t)) {
                return Err(CheckpointError::Missing { file, tensor: tensor.to_owned() });
            }
        }
        Ok(())
    }

    /// Adds the tensors of one file, those in `wanted` if that is given.
    fn add(&mut self, path: &Path, wanted: Option<&HashSet<&str>>) -> Result<(), CheckpointError> {
        let map = map(path)?;
        let bad = |reason: String| CheckpointError::malformed(path, reason);
        let file = SafeTensors::deserialize(&map).map_err(|e| bad(e.to_string()))?;
        let number = self.maps.len();
        for (name, view) in file.iter() {
            if wanted.is_some_and(|w| !w.contains(name)) {
                continue;
            }
            let data = view.data();
            let offset = (data.as_ptr() as usize).wrapping_sub(map.as_ptr() as usize) as u64;
            let entry = Entry {
                file: number,
                offset,
                bytes: data.len() as u64,
                dtype: dtype(view.dtype()),
                shape: view.shape().to_vec(),
                order: RowOrder::Natural,
            };
            self.tensors.insert(name.to_owned(), entry);
        }
        self.maps.push((path.to_owned(), map));
        Ok(())
    }
}

/// A file name without any way out of its folder.
fn is_plain_name(name: &str) -> bool {
    !name.is_empty() && name != "." && name != ".." && !name.contains(['/', '\\', '\0'])
}

fn dtype(dtype: Dtype) -> Result<DType, String> {
    Ok(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::I16 => DType::I16,
        Dtype::I8 => DType::I8,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool,
        other => return Err(format!("safetensors type {other:?} is not supported")),
    })
}

/// Reads a JSON file of bounded size.
pub(crate) fn read_json(path: &Path, bytes_max: u64) -> Result<Value, CheckpointError> {
    let text = read_text(path, bytes_max)?;
    serde_json::from_str(&text).map_err(|e| CheckpointError::malformed(path, e.to_string()))
}
