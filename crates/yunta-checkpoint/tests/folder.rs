//! Hugging Face folders: those of the fixtures, and damaged ones.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test may fail by a panic.

mod support;

use std::path::Path;

use serde_json::{Map, Value, json};
use support::{fixture, json as read, models};
use tempfile::TempDir;
use yunta_checkpoint::{Checkpoint, CheckpointError, Format};

const SHARDED: &str = "models/llama_linear_bias_sharded";
const INDEX: &str = "model.safetensors.index.json";

/// A copy of a fixture that can be damaged.
fn copy(model: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture(model)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    folder
}

fn refusal(folder: &Path) -> String {
    Checkpoint::open(folder).err().expect("it must be refused").to_string()
}

#[test]
fn every_fixture_opens_and_reads() {
    for path in models() {
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert_eq!(checkpoint.format(), Format::Safetensors);
        assert_eq!(checkpoint.path(), path);
        let config = checkpoint.config();
        let embedding = checkpoint.tensor("model.embed_tokens.weight").unwrap();
        assert_eq!(json!(embedding.rows()), config["vocab_size"]);
        assert_eq!(json!(embedding.cols()), config["hidden_size"]);
        support::read_everything(&path).unwrap();
    }
}

#[test]
fn tokenizers_agree_with_the_reference() {
    for path in models() {
        let tokenizer = Checkpoint::open(&path).unwrap().tokenizer().unwrap();
        for case in read(&path.join("reference.json"))["tokenizer_checks"].as_array().unwrap() {
            let ids = tokenizer.encode(case["text"].as_str().unwrap(), false).unwrap();
            assert_eq!(json!(ids), case["ids"], "{}: {}", path.display(), case["text"]);
            let mut stream = tokenizer.stream_decoder(false);
            let mut text: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
            text += &stream.flush().unwrap();
            assert_eq!(text, case["text"].as_str().unwrap());
        }
    }
}

#[test]
fn shards_are_found_by_the_index() {
    let checkpoint = Checkpoint::open(&fixture(SHARDED)).unwrap();
    let index = read(&fixture(SHARDED).join(INDEX));
    let weights = index["weight_map"].as_object().unwrap();
    assert_eq!(checkpoint.names().count(), weights.len());
    assert!(weights.keys().all(|name| checkpoint.contains(name)));
    assert_eq!(json!(checkpoint.total_bytes()), index["metadata"]["total_size"]);
}

#[test]
fn a_missing_shard_is_named() {
    let folder = copy(SHARDED);
    std::fs::remove_file(folder.path().join("model-00002-of-00002.safetensors")).unwrap();
    assert!(refusal(folder.path()).contains("model-00002-of-00002.safetensors"));
}

#[test]
fn a_tensor_that_its_shard_lacks_is_named() {
    let folder = copy(SHARDED);
    let mut index = read(&folder.path().join(INDEX));
    index["weight_map"]["ghost"] = json!("model-00001-of-00002.safetensors");
    std::fs::write(folder.path().join(INDEX), index.to_string()).unwrap();
    let e = Checkpoint::open(folder.path()).err().unwrap();
    assert!(matches!(&e, CheckpointError::Missing { tensor, .. } if tensor == "ghost"), "{e}");
    assert!(e.to_string().contains("model-00001-of-00002.safetensors"), "{e}");
}

#[test]
fn an_index_leads_nowhere_else() {
    let folder = copy(SHARDED);
    for file in ["../model.safetensors", "/etc/passwd", "..", "", "a\\b", "sub/a.safetensors"] {
        std::fs::write(folder.path().join(INDEX), json!({"weight_map": {"w": file}}).to_string())
            .unwrap();
        assert!(refusal(folder.path()).contains("no name of a file"), "{file}");
    }
    for index in ["{}", "[]", "{\"weight_map\": {\"w\": 1}}", "{"] {
        std::fs::write(folder.path().join(INDEX), index).unwrap();
        assert!(refusal(folder.path()).contains(INDEX), "{index}");
    }
}

#[test]
fn missing_and_damaged_files_are_named() {
    let folder = copy("models/llama_f16");
    let weights = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    std::fs::write(&weights, &bytes[..bytes.len() - 1]).unwrap();
    assert!(refusal(folder.path()).contains("model.safetensors"));
    std::fs::remove_file(&weights).unwrap();
    assert!(refusal(folder.path()).contains("model.safetensors"));
    std::fs::write(&weights, &bytes).unwrap();
    std::fs::write(folder.path().join("config.json"), "{").unwrap();
    assert!(refusal(folder.path()).contains("config.json"));
}

#[test]
fn a_folder_without_tokenizer_still_has_weights() {
    let folder = copy("models/llama_f16");
    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert!(checkpoint.tokenizer().err().unwrap().to_string().contains("tokenizer.json"));
    assert!(checkpoint.tensor("model.norm.weight").is_ok());
}

#[test]
fn limits_of_training_do_not_cut_prompts() {
    let folder = copy("models/llama_f16");
    let path = folder.path().join("tokenizer.json");
    let mut tokenizer = read(&path);
    tokenizer["truncation"] = json!({
        "max_length": 2, "stride": 0, "strategy": "LongestFirst", "direction": "Right",
    });
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    let tokenizer = Checkpoint::open(folder.path()).unwrap().tokenizer().unwrap();
    assert!(tokenizer.encode("the quick brown fox", false).unwrap().len() > 2);
}

#[test]
fn stop_tokens_are_gathered_once_each() {
    let folder = copy("models/llama_f16");
    let stop = || Checkpoint::open(folder.path()).unwrap().stop_tokens();
    std::fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id": [3, 1, 3]}"#)
        .unwrap();
    let mut config = read(&folder.path().join("config.json"));
    config["eos_token_id"] = json!(2);
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    // 1 is also `eos_token` of tokenizer_config.json.
    assert_eq!(stop(), [3, 1, 2]);
    std::fs::write(folder.path().join("generation_config.json"), "{").unwrap();
    assert_eq!(stop(), [2, 1]);
}

#[test]
fn chat_templates_are_taken_from_where_they_are() {
    let folder = copy("models/llama_f16");
    let render = |tools: Option<&Value>| {
        let template = Checkpoint::open(folder.path()).unwrap().chat_template().unwrap().unwrap();
        template.render(&json!([{"role": "user", "content": "Hi"}]), tools, true, &Map::new())
    };
    let of_config = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(render(None).unwrap(), of_config);

    let named = json!({"bos_token": {"content": "<s>"}, "chat_template": [
        {"name": "tool_use", "template": "{{ tools | length }}"},
        {"name": "default", "template": "{{ bos_token }}plain"},
    ]});
    std::fs::write(folder.path().join("tokenizer_config.json"), named.to_string()).unwrap();
    assert_eq!(render(None).unwrap(), "<s>plain");
    assert_eq!(render(Some(&json!([{}, {}]))).unwrap(), "2");

    let processor = json!({"chat_template": "processor"}).to_string();
    std::fs::write(folder.path().join("chat_template.json"), processor).unwrap();
    assert_eq!(render(None).unwrap(), "processor");
    std::fs::write(folder.path().join("chat_template.jinja"), "{{ messages[0].role }}").unwrap();
    assert_eq!(render(None).unwrap(), "user");
}
