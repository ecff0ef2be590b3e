//! GGUF files, versions 2 and 3. Source: `docs/gguf.md` of the ggml project.

mod config;
mod names;
mod reader;
mod split;
mod tensors;

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use serde_json::Value;

use crate::CheckpointError;
use crate::tensor::{Entry, RowOrder};
use reader::Reader;
pub(crate) use reader::{Metadata, MetadataValue};
pub(crate) use split::is_further_part;

const MAGIC: &[u8] = b"GGUF";

/// Architectures whose files hold the rows of queries and keys in the order of interleaved rotary
/// embedding (`permute` in llama.cpp's conversion); Hugging Face has the halves one after the
/// other. Mistral's models are `llama` here.
const INTERLEAVED: [&str; 2] = ["llama", "smollm3"];

/// A parsed GGUF model, of one file or several.
pub(crate) struct Gguf {
    pub(crate) maps: Vec<(PathBuf, Mmap)>,
    /// Of the first file: the others have none of interest.
    pub(crate) metadata: Metadata,
    /// By canonical (Hugging Face) name.
    pub(crate) tensors: HashMap<String, Entry>,
    pub(crate) config: Value,
}

impl Gguf {
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let mut maps = Vec::new();
        let mut tensors = HashMap::new();
        let metadata = add_file(path, &mut maps, &mut tensors)?;
        for part in split::further_parts(path, &metadata)? {
            add_file(&part, &mut maps, &mut tensors)?;
        }
        let architecture = config::architecture(path, &metadata)?;
        let config = config::config(path, &architecture, &metadata, &tensors)?;
        if INTERLEAVED.contains(&architecture.as_str()) {
            let heads = |field: &str| config.get(field).and_then(Value::as_u64).unwrap_or(0);
            restore_order(&mut tensors, ".self_attn.q_proj.", heads("num_attention_heads"));
            restore_order(&mut tensors, ".self_attn.k_proj.", heads("num_key_value_heads"));
        }
        Ok(Self { maps, metadata, tensors, config })
    }
}

/// Maps a file and adds its tensors; its metadata.
fn add_file(
    path: &Path,
    maps: &mut Vec<(PathBuf, Mmap)>,
    tensors: &mut HashMap<String, Entry>,
) -> Result<Metadata, CheckpointError> {
    let map = crate::map::map(path)?;
    let mut r = Reader::new(&map, path);
    let (count, metadata) = header(&mut r)?;
    let place = (maps.len(), map.len() as u64);
    for (name, entry) in tensors::tensors(&mut r, path, count, &metadata, place)? {
        if tensors.contains_key(&name) {
            return Err(CheckpointError::tensor(path, &name, "occurs twice"));
        }
        tensors.insert(name, entry);
    }
    maps.push((path.to_owned(), map));
    Ok(metadata)
}

fn header(r: &mut Reader<'_>) -> Result<(u64, Metadata), CheckpointError> {
    if r.bytes(4)? != MAGIC {
        return Err(r.bad("it does not start with `GGUF`"));
    }
    match r.u32()? {
        2 | 3 => {}
        1 => return Err(r.bad("GGUF version 1 is not supported: convert the file again")),
        v if v.swap_bytes() == 2 || v.swap_bytes() == 3 => {
            return Err(r.bad("big-endian GGUF files are not supported"));
        }
        v => return Err(r.bad(format!("GGUF version {v} is not known"))),
    }
    let (tensors, pairs) = (r.u64()?, r.u64()?);
    Ok((tensors, r.metadata(pairs)?))
}

/// Notes that the tensors of such names are interleaved within each of so many heads.
fn restore_order(tensors: &mut HashMap<String, Entry>, part: &str, heads: u64) {
    let heads = usize::try_from(heads).unwrap_or(0);
    for (_, entry) in tensors.iter_mut().filter(|(name, _)| name.contains(part)) {
        // Rows of a weight, elements of a bias.
        let rows = entry.shape.first().copied().unwrap_or(0);
        match rows.checked_div(heads) {
            Some(head_dim) if head_dim > 0 && head_dim % 2 == 0 && head_dim * heads == rows => {
                entry.order = RowOrder::Interleaved { head_dim };
            }
            _ => entry.dtype = Err(format!("{rows} rows are not {heads} heads of even size")),
        }
    }
}
