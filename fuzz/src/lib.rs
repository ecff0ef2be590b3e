//! Coverage-guided fuzzing of all that reads files of models, and of frames between ranks.
//!
//! `cargo +nightly fuzz run gguf -- -max_len=65536`; corpora start well from the fixtures:
//! `fuzz/corpus/gguf` from `fixtures/gguf/*.gguf`, the others from `fixtures/models/*`.
//! A target fails by a panic, a hang, or too much memory: errors are answers.

use std::path::Path;

use serde_json::{Map, json};
use yunta_checkpoint::Checkpoint;

/// A tensor `w` of one byte.
const WEIGHTS: &[u8] =
    b"\x34\0\0\0\0\0\0\0{\"w\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}\x07";

/// A sound folder but for one file, which has these bytes.
pub fn folder_with(file: &str, bytes: &[u8]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder for temporary files");
    let write = |file: &str, bytes: &[u8]| {
        std::fs::write(folder.path().join(file), bytes).expect("space for temporary files");
    };
    write("config.json", b"{}");
    write("model.safetensors", WEIGHTS);
    write(file, bytes);
    folder
}

/// Reads all that can be read of a checkpoint.
pub fn read_everything(path: &Path) {
    let Ok(checkpoint) = Checkpoint::open(path) else { return };
    for name in checkpoint.names() {
        let Ok(tensor) = checkpoint.tensor(name) else { continue };
        let _ = tensor.bytes();
        for r in 0..tensor.rows() {
            let _ = tensor.row(r);
        }
    }
    checkpoint.stop_tokens();
    if let Ok(tokenizer) = checkpoint.tokenizer() {
        let ids = tokenizer.encode("Hello, wörld! <s> 123", true).unwrap_or_default();
        let _ = tokenizer.decode(&ids, false);
        let mut stream = tokenizer.stream_decoder(true);
        for id in ids {
            let _ = stream.push(id);
        }
        let _ = stream.flush();
    }
    if let Ok(Some(template)) = checkpoint.chat_template() {
        let messages = json!([{"role": "user", "content": "Hi"}, {"role": "tool", "content": []}]);
        let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]);
        let _ = template.render(&messages, None, true, &Map::new());
        let _ = template.render(&messages, Some(&tools), false, &Map::new());
    }
}
