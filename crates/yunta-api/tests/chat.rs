//! Chat completions: what the engine is asked, and the shape of what comes back.
#![allow(clippy::unwrap_used, clippy::panic)] // also in helpers of tests

mod common;

use common::byte_text::{BOS, EOS};
use common::engine::{Act, ScriptedEngine, answer, say};
use common::{chat, start};
use serde_json::{Value, json};
use yunta_engine::FinishReason;

const CHAT: &str = "/v1/chat/completions";

#[test]
fn a_whole_answer_has_openais_shape() {
    let engine = ScriptedEngine::answering("Hi!");
    let reply = start(&engine).post(CHAT, &chat("hello", json!({"model": "Model"})));
    assert_eq!(reply.status, 200, "{reply:?}");
    let mut answer = reply.json();
    let id = answer["id"].take();
    assert!(id.as_str().unwrap().starts_with("chatcmpl-"));
    assert!(answer["created"].take().as_u64().unwrap() > 1_600_000_000);
    let prompt_tokens = "user:hello\nassistant:".len();
    let expected = json!({
        "id": null,
        "object": "chat.completion",
        "created": null,
        "model": "org/Model",
        "choices": [{
            "index": 0,
            "message": {"role": "assistant", "content": "Hi!", "refusal": null},
            "logprobs": null,
            "finish_reason": "stop",
        }],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 4,
            "total_tokens": prompt_tokens + 4,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    });
    assert_eq!(answer, expected);
}

#[test]
fn the_engine_gets_what_was_asked_for() {
    let engine = ScriptedEngine::answering("x");
    let fields = json!({
        "temperature": 0.5, "top_p": 0.25, "top_k": 40, "min_p": 0.125, "seed": 7,
        "max_completion_tokens": 3, "logprobs": true, "top_logprobs": 2, "unknown": {},
    });
    assert_eq!(start(&engine).post(CHAT, &chat("a", fields)).status, 200);
    let request = engine.request();
    let prompt: Vec<u32> = "user:a\nassistant:".bytes().map(u32::from).collect();
    assert_eq!(request.prompt, prompt);
    assert_eq!(request.max_tokens, 3);
    assert_eq!(request.stop_tokens, [EOS]);
    assert_eq!(request.logprobs, Some(2));
    let sampling = request.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.min_p), (0.5, 0.25, 0.125));
    assert_eq!((sampling.top_k, sampling.seed), (40, 7));
}

#[test]
fn max_tokens_is_what_remains_of_the_context() {
    for fields in [json!({}), json!({"max_tokens": 1000})] {
        let engine = ScriptedEngine::answering("x");
        assert_eq!(start(&engine).post(CHAT, &chat("a", fields)).status, 200);
        assert_eq!(engine.request().max_tokens, 100 - "user:a\nassistant:".len());
    }
}

#[test]
fn tools_and_template_variables_reach_the_template() {
    let prompt_for = |fields: Value| {
        let engine = ScriptedEngine::answering("x");
        let reply = start(&engine).post(CHAT, &chat("a", fields));
        assert_eq!(reply.status, 200, "{reply:?}");
        let bytes = engine.request().prompt.iter().map(|&token| token as u8).collect();
        String::from_utf8(bytes).unwrap()
    };
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let prompt = prompt_for(json!({"tools": tools, "tool_choice": "auto"}));
    assert!(prompt.contains(&format!("tools:{tools}")), "{prompt}");
    assert!(prompt.contains("tool_choice=\"auto\""), "{prompt}");
    let prompt = prompt_for(json!({"tools": tools, "tool_choice": "none"}));
    assert!(!prompt.contains("tools:"), "{prompt}");
    let prompt = prompt_for(json!({"chat_template_kwargs": {"enable_thinking": false}}));
    assert!(prompt.contains("enable_thinking=false"), "{prompt}");
}

#[test]
fn a_stream_is_role_then_text_then_finish_then_done() {
    let engine = ScriptedEngine::answering("é!");
    let reply = start(&engine).post(CHAT, &chat("a", json!({"stream": true})));
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("cache-control"), Some("no-cache"));
    let chunks = reply.chunks();
    let choices: Vec<&Value> = chunks.iter().map(|chunk| &chunk["choices"][0]).collect();
    let choice = |delta: Value, finish: Value| json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish});
    let expected = [
        choice(json!({"role": "assistant", "content": ""}), Value::Null),
        choice(json!({"content": "é"}), Value::Null),
        choice(json!({"content": "!"}), Value::Null),
        choice(json!({}), json!("stop")),
    ];
    assert_eq!(choices, expected.iter().collect::<Vec<_>>());
    for chunk in &chunks {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["id"], chunks[0]["id"]);
        assert_eq!(chunk["model"], "org/Model");
        assert_eq!(chunk.get("usage"), None);
    }
}

#[test]
fn usage_comes_last_and_is_null_before() {
    let engine = ScriptedEngine::answering("ab");
    let fields = json!({"stream": true, "stream_options": {"include_usage": true}});
    let mut chunks = start(&engine).post(CHAT, &chat("a", fields)).chunks();
    let last = chunks.pop().unwrap();
    assert_eq!(last["choices"], json!([]));
    let usage = json!({"prompt_tokens": 17, "completion_tokens": 3, "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 0}});
    assert_eq!(last["usage"], usage);
    assert_eq!(chunks.len(), 4);
    assert!(chunks.iter().all(|chunk| chunk.get("usage") == Some(&Value::Null)));
}

#[test]
fn a_stop_string_ends_the_answer_and_the_engines_work() {
    let script = |_: &_| vec![say("one STOP two"), Act::AwaitCancel];
    for stop in [json!("STOP"), json!(["never", "STOP"])] {
        let engine = ScriptedEngine::new(script);
        let reply = start(&engine).post(CHAT, &chat("a", json!({"stop": stop})));
        let choice = &reply.json()["choices"][0];
        assert_eq!(choice["message"]["content"], "one ");
        assert_eq!(choice["finish_reason"], "stop");
        assert_eq!(reply.json()["usage"]["completion_tokens"], 8);
        assert!(engine.was_cancelled(0));
    }
    let engine = ScriptedEngine::new(script);
    let fields = json!({"stop": "STOP", "stream": true});
    let chunks = start(&engine).post(CHAT, &chat("a", fields)).chunks();
    let texts = chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str());
    assert_eq!(texts.collect::<String>(), "one ");
    assert!(engine.was_cancelled(0));
}

#[test]
fn special_tokens_are_not_text() {
    let engine = ScriptedEngine::new(|_| {
        vec![say("a"), Act::Tokens(vec![BOS]), say("b"), Act::Finish(FinishReason::Length)]
    });
    let reply = start(&engine).post(CHAT, &chat("a", json!({"logprobs": true}))).json();
    let choice = &reply["choices"][0];
    assert_eq!(choice["message"]["content"], "ab");
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["logprobs"]["content"].as_array().unwrap().len(), 2);
}

#[test]
fn logprobs_have_token_bytes_and_alternatives() {
    let fields = json!({"logprobs": true, "top_logprobs": 2});
    let engine = ScriptedEngine::answering("é");
    let reply = start(&engine).post(CHAT, &chat("a", fields)).json();
    let content = &reply["choices"][0]["logprobs"]["content"];
    let expected = json!({
        "token": "\u{fffd}", "logprob": -0.5, "bytes": [0xC3],
        "top_logprobs": [
            {"token": "\u{fffd}", "logprob": -0.5, "bytes": [0xC3]},
            {"token": "\u{fffd}", "logprob": -1.5, "bytes": [0xC4]},
        ],
    });
    assert_eq!(content[0], expected);
    assert_eq!(content[1]["bytes"], json!([0xA9]));
    assert_eq!(content.as_array().unwrap().len(), 2);
}

#[test]
fn streamed_logprobs_travel_with_their_text() {
    let fields = json!({"logprobs": true, "stream": true, "stop": "!?"});
    let engine = ScriptedEngine::answering("é!a");
    let chunks = start(&engine).post(CHAT, &chat("a", fields)).chunks();
    let mut pieces = Vec::new();
    for choice in chunks.iter().map(|chunk| &chunk["choices"][0]) {
        if let Some(tokens) = choice["logprobs"]["content"].as_array() {
            let text = choice["delta"]["content"].as_str().unwrap();
            let bytes: Vec<u8> =
                tokens.iter().map(|token| token["bytes"][0].as_u64().unwrap() as u8).collect();
            assert_eq!(text.as_bytes(), bytes);
            pieces.push(text);
        }
    }
    assert_eq!(pieces, ["é", "!a"]);
}

#[test]
fn several_outputs_differ_in_seed_and_are_told_apart_by_index() {
    let engine = ScriptedEngine::new(|request| match request.sampling.seed {
        10 => answer("zero"),
        11 => answer("one"),
        _ => answer("two"),
    });
    let server = start(&engine);
    let fields = json!({"n": 3, "seed": 10});
    let whole = server.post(CHAT, &chat("a", fields.clone())).json();
    let mut fields = fields;
    fields["stream"] = json!(true);
    let chunks = server.post(CHAT, &chat("a", fields)).chunks();
    for (i, text) in ["zero", "one", "two"].into_iter().enumerate() {
        assert_eq!(whole["choices"][i]["index"], i);
        assert_eq!(whole["choices"][i]["message"]["content"], text);
        let of_choice = chunks.iter().map(|c| &c["choices"][0]).filter(|c| c["index"] == i);
        let of_choice: Vec<&Value> = of_choice.collect();
        let texts = of_choice.iter().filter_map(|choice| choice["delta"]["content"].as_str());
        assert_eq!(texts.collect::<String>(), text);
        assert_eq!(of_choice[0]["delta"]["role"], "assistant");
        assert_eq!(of_choice.last().unwrap()["finish_reason"], "stop");
    }
    assert_eq!(whole["usage"]["completion_tokens"], "zero".len() + "one".len() + "two".len() + 3);
    assert_eq!(whole["usage"]["prompt_tokens"], 17);
}
