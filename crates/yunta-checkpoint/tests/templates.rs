//! Chat templates in the idioms of well-known models, against Jinja2 as transformers sets it up.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test may fail by a panic.

mod support;

use std::path::Path;

use serde_json::json;
use support::{fixture, json as read};
use yunta_checkpoint::{ChatTemplate, Checkpoint, CheckpointError};

/// A template of `tests/templates`, in a folder as models have it.
fn template(name: &str) -> ChatTemplate {
    let folder = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture("models/llama_f16").join(file), folder.path().join(file)).unwrap();
    }
    let tokens = json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}}).to_string();
    std::fs::write(folder.path().join("tokenizer_config.json"), tokens).unwrap();
    let source = templates().join(format!("{name}.jinja"));
    std::fs::copy(source, folder.path().join("chat_template.jinja")).unwrap();
    Checkpoint::open(folder.path()).unwrap().chat_template().unwrap().unwrap()
}

fn templates() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/templates"))
}

fn agrees(name: &str) {
    let template = template(name);
    let reference = read(&templates().join("reference.json"));
    let cases = reference["cases"].as_array().unwrap().iter().filter(|c| c["template"] == name);
    let mut count = 0;
    for case in cases {
        let tools = Some(&case["tools"]).filter(|tools| !tools.is_null());
        let extra = case["extra"].as_object().unwrap();
        let result = template.render(&case["messages"], tools, true, extra);
        match case.get("refused") {
            None => assert_eq!(result.unwrap(), case["text"].as_str().unwrap()),
            Some(words) => {
                let e = result.unwrap_err();
                assert!(
                    matches!(&e, CheckpointError::Template { reason } if reason == words),
                    "{e} for {words}"
                );
            }
        }
        count += 1;
    }
    assert!(count >= 10);
}

#[test]
fn llama_3_1_with_tools_and_the_date() {
    agrees("llama31");
}

#[test]
fn qwen_3_with_namespaces_and_thoughts() {
    agrees("qwen3");
}

#[test]
fn mistral_which_refuses_roles_that_do_not_alternate() {
    agrees("mistral");
}

#[test]
fn marks_of_training_loop_controls_and_values_of_python() {
    agrees("marks");
}
