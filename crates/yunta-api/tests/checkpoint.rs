//! The server over the text side of a real model file.

#![allow(clippy::unwrap_used, clippy::panic)] // also in helpers of tests

mod common;

use std::path::{Path, PathBuf};

use common::engine::{Act, ScriptedEngine};
use common::{chat, start_text};
use serde_json::{Value, json};
use yunta_api::{CheckpointText, TextModel};
use yunta_checkpoint::Checkpoint;
use yunta_engine::FinishReason;

fn fixture(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(path)
}

fn text_of(path: &str) -> CheckpointText {
    CheckpointText::read(&Checkpoint::open(&fixture(path)).unwrap()).unwrap()
}

#[test]
fn a_chat_is_rendered_by_the_models_template_and_answered_in_its_tokens() {
    let text = text_of("gguf/llama-F16.gguf");
    let prompt = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n";
    let prompt = text.encode(prompt, false).unwrap();
    let mut answer = text.encode("naïve café", false).unwrap();
    answer.push(text.stop_tokens()[0]);
    let engine = ScriptedEngine::new(move |_| {
        vec![Act::Tokens(answer.clone()), Act::Finish(FinishReason::Stop)]
    });
    let server = start_text(&engine, text, |_| {});
    let chunks = server
        .post("/v1/chat/completions", &chat("Hello", json!({"stream": true, "logprobs": true})))
        .chunks();
    let mut content = String::new();
    let mut bytes = Vec::new();
    for choice in chunks.iter().map(|chunk| &chunk["choices"][0]) {
        content += choice["delta"]["content"].as_str().unwrap_or_default();
        let tokens = choice["logprobs"]["content"].as_array().into_iter().flatten();
        let of_tokens = tokens.flat_map(|token| token["bytes"].as_array().unwrap());
        bytes.extend(of_tokens.map(|byte| byte.as_u64().unwrap() as u8));
    }
    assert_eq!(content, "naïve café");
    assert_eq!(bytes, content.as_bytes());
    assert_eq!(engine.request().prompt, prompt);
    assert_eq!(engine.request().sampling.temperature, 1.0);
}

#[test]
fn a_model_without_a_template_says_so() {
    let text = CheckpointText { template: None, ..text_of("models/llama_plain") };
    let engine = ScriptedEngine::new(|_| vec![Act::Finish(FinishReason::Stop)]);
    let server = start_text(&engine, text, |_| {});
    let reply = server.post("/v1/chat/completions", &chat("Hello", json!({})));
    assert_eq!(reply.status, 400);
    let message = reply.error()["message"].as_str().unwrap().to_owned();
    assert!(message.contains("/v1/completions"), "{message}");
    assert_eq!(server.post("/v1/completions", &json!({"prompt": "Hello"})).status, 200);
}

#[test]
fn decoding_a_stream_gives_the_text_of_all_tokens() {
    let text = text_of("models/llama_plain");
    let reference = std::fs::read_to_string(fixture("models/llama_plain/reference.json")).unwrap();
    let reference: Value = serde_json::from_str(&reference).unwrap();
    for prompt in reference["prompts"].as_array().unwrap() {
        let ids = [&prompt["ids"], &prompt["greedy"]].map(|ids| ids.as_array().unwrap().clone());
        let ids: Vec<u32> = ids.concat().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        let mut decoder = text.decoder();
        let pieces: String = ids.iter().map(|&id| decoder.push(id).unwrap()).collect();
        let streamed = pieces + &decoder.flush().unwrap();
        assert_eq!(streamed, text.tokenizer.decode(&ids, true).unwrap());
    }
}
