//! Text completions: forms of prompts, echo, log-probabilities.
#![allow(clippy::unwrap_used, clippy::panic)] // also in helpers of tests

mod common;

use common::byte_text::BOS;
use common::engine::{ScriptedEngine, answer};
use common::start;
use serde_json::json;

const COMPLETIONS: &str = "/v1/completions";

#[test]
fn a_whole_answer_has_openais_shape() {
    let engine = ScriptedEngine::answering("Hi");
    let reply = start(&engine).post(COMPLETIONS, &json!({"model": "org/Model", "prompt": "ab"}));
    let answer = reply.json();
    assert!(answer["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(answer["object"], "text_completion");
    let choice = json!({"index": 0, "text": "Hi", "logprobs": null, "finish_reason": "stop"});
    assert_eq!(answer["choices"], json!([choice]));
    let usage = json!({"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0}});
    assert_eq!(answer["usage"], usage);
    assert_eq!(engine.request().prompt, [BOS, 97, 98]);
}

#[test]
fn a_stream_has_texts_then_finish_then_done() {
    let engine = ScriptedEngine::answering("Hi");
    let body = json!({"prompt": "ab", "stream": true, "echo": true});
    let chunks = start(&engine).post(COMPLETIONS, &body).chunks();
    let choices = chunks.iter().map(|chunk| &chunk["choices"][0]);
    let texts: Vec<&str> = choices.map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["ab", "H", "i", ""]);
    assert_eq!(chunks[3]["choices"][0]["finish_reason"], "stop");
    assert!(chunks.iter().all(|chunk| chunk["object"] == "text_completion"));
}

#[test]
fn prompts_may_be_texts_or_tokens_one_or_many() {
    let cases = [
        (json!("a"), vec![vec![BOS, 97]]),
        (json!(["a", "b"]), vec![vec![BOS, 97], vec![BOS, 98]]),
        (json!([97, 98]), vec![vec![97, 98]]),
        (json!([[97], [98, 99]]), vec![vec![97], vec![98, 99]]),
    ];
    for (prompt, expected) in cases {
        let engine = ScriptedEngine::answering("x");
        let reply = start(&engine).post(COMPLETIONS, &json!({"prompt": prompt}));
        assert_eq!(reply.status, 200, "{reply:?}");
        let requests = engine.requests.lock().unwrap();
        let prompts: Vec<_> = requests.iter().map(|request| request.prompt.clone()).collect();
        assert_eq!(prompts, expected);
        assert_eq!(reply.json()["choices"].as_array().unwrap().len(), expected.len());
    }
}

#[test]
fn outputs_are_numbered_prompt_by_prompt_and_echo_their_prompt() {
    let engine = ScriptedEngine::new(|request| match request.sampling.seed {
        0 => answer("0"),
        _ => answer("1"),
    });
    let body = json!({"prompt": ["a", "b"], "n": 2, "seed": 0, "echo": true});
    let reply = start(&engine).post(COMPLETIONS, &body).json();
    let choices = reply["choices"].as_array().unwrap();
    let texts: Vec<&str> = choices.iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["a0", "a1", "b0", "b1"]);
    assert_eq!(reply["usage"]["prompt_tokens"], 4);
}

#[test]
fn logprobs_list_tokens_alternatives_and_offsets() {
    let engine = ScriptedEngine::answering("aé");
    let body = json!({"prompt": "x", "logprobs": 2, "temperature": 0});
    let reply = start(&engine).post(COMPLETIONS, &body).json();
    let expected = json!({
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [
            {"a": -0.5, "b": -1.5},
            {"bytes:\\xc3": -0.5, "bytes:\\xc4": -1.5},
            {"bytes:\\xa9": -0.5, "bytes:\\xaa": -1.5},
        ],
        "text_offset": [0, 1, 1],
    });
    assert_eq!(reply["choices"][0]["logprobs"], expected);
    assert_eq!(engine.request().sampling.temperature, 0.0);
}
