//! Every error is OpenAI's error object, with the status and code that clients act on.
#![allow(clippy::unwrap_used, clippy::panic)] // also in helpers of tests

mod common;

use common::engine::ScriptedEngine;
use common::{chat, start, start_with};
use serde_json::{Value, json};
use yunta_api::ApiKey;
use yunta_engine::SubmitError;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const JSON: (&str, &str) = ("content-type", "application/json");

#[test]
fn a_bad_field_is_named() {
    let engine = ScriptedEngine::answering("x");
    let server = start(&engine);
    let image = json!([{"type": "image_url", "image_url": {"url": "u"}}]);
    let cases = [
        (CHAT, json!({}), "messages"),
        (CHAT, json!({"messages": [{"role": "user", "content": image}]}), "messages[0].content[0]"),
        (CHAT, chat("refuse me", json!({})), "messages"),
        (CHAT, chat("a", json!({"temperature": 3})), "temperature"),
        (CHAT, chat("a", json!({"temperature": "hot"})), "temperature"),
        (CHAT, chat("a", json!({"top_p": -0.1})), "top_p"),
        (CHAT, chat("a", json!({"top_k": 1.5})), "top_k"),
        (CHAT, chat("a", json!({"min_p": 2})), "min_p"),
        (CHAT, chat("a", json!({"seed": 0.5})), "seed"),
        (CHAT, chat("a", json!({"n": 0})), "n"),
        (CHAT, chat("a", json!({"n": 17})), "n"),
        (CHAT, chat("a", json!({"max_tokens": 0})), "max_tokens"),
        (CHAT, chat("a", json!({"stop": vec!["a"; 17]})), "stop"),
        (CHAT, chat("a", json!({"stop": ""})), "stop"),
        (CHAT, chat("a", json!({"stop": [1]})), "stop"),
        (CHAT, chat("a", json!({"stream": 1})), "stream"),
        (CHAT, chat("a", json!({"top_logprobs": 2})), "top_logprobs"),
        (CHAT, chat("a", json!({"logprobs": true, "top_logprobs": 21})), "top_logprobs"),
        (CHAT, chat("a", json!({"frequency_penalty": 2.5})), "frequency_penalty"),
        (CHAT, chat("a", json!({"presence_penalty": "1"})), "presence_penalty"),
        (CHAT, chat("a", json!({"logit_bias": {"1": 101}})), "logit_bias"),
        (CHAT, chat("a", json!({"response_format": {"type": "xml"}})), "response_format.type"),
        (CHAT, chat("a", json!({"tools": {}})), "tools"),
        (CHAT, chat("a", json!({"tools": [1]})), "tools[0]"),
        (CHAT, chat("a", json!({"tool_choice": "some"})), "tool_choice"),
        (CHAT, chat("a", json!({"chat_template_kwargs": {"tools": 1}})), "chat_template_kwargs"),
        (COMPLETIONS, json!({}), "prompt"),
        (COMPLETIONS, json!({"prompt": 5}), "prompt"),
        (COMPLETIONS, json!({"prompt": []}), "prompt"),
        (COMPLETIONS, json!({"prompt": [[]]}), "prompt"),
        (COMPLETIONS, json!({"prompt": [97, 258]}), "prompt[1]"),
        (COMPLETIONS, json!({"prompt": [[97], [-1]]}), "prompt[1][0]"),
        (COMPLETIONS, json!({"prompt": ["a", 5]}), "prompt[1]"),
        (COMPLETIONS, json!({"prompt": "a", "logprobs": true}), "logprobs"),
        (COMPLETIONS, json!({"prompt": "a", "logprobs": 1, "echo": true}), "echo"),
        (COMPLETIONS, json!({"prompt": "a", "best_of": 2}), "best_of"),
        (COMPLETIONS, json!({"prompt": "a", "suffix": "b"}), "suffix"),
    ];
    for (path, body, param) in cases {
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 400, "{body}: {reply:?}");
        let error = reply.error();
        assert_eq!(error["param"], param, "{body}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(!error["message"].as_str().unwrap().is_empty());
    }
    assert!(engine.requests.lock().unwrap().is_empty());
}

#[test]
fn an_unknown_model_is_answered_with_the_known_ones() {
    let engine = ScriptedEngine::answering("x");
    let server = start(&engine);
    let reply = server.post(CHAT, &chat("a", json!({"model": "gpt-4"})));
    assert_eq!(reply.status, 404);
    let error = reply.error();
    assert_eq!(error["code"], "model_not_found");
    assert_eq!(error["param"], "model");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("org/Model") && message.contains("nickname"), "{message}");
    for model in ["org/Model", "Model", "nickname"] {
        assert_eq!(server.post(CHAT, &chat("a", json!({"model": model}))).status, 200);
    }
}

#[test]
fn a_prompt_that_fills_the_context_is_refused_with_numbers() {
    let engine = ScriptedEngine::answering("x");
    let server = start(&engine);
    let prompt = |tokens: usize| json!({"prompt": vec![97; tokens]});
    assert_eq!(server.post(COMPLETIONS, &prompt(99)).status, 200);
    let reply = server.post(COMPLETIONS, &prompt(100));
    assert_eq!(reply.status, 400);
    let error = reply.error();
    assert_eq!(error["code"], "context_length_exceeded");
    assert_eq!(error["param"], "prompt");
    assert!(error["message"].as_str().unwrap().contains("100"), "{error}");
}

#[test]
fn bodies_that_are_not_json_objects_are_refused() {
    let engine = ScriptedEngine::answering("x");
    let server = start(&engine);
    let deep = format!("{{\"a\":{}", "[".repeat(100_000));
    for body in ["", "{", "[]", "\"text\"", "{\"messages\": NaN}", deep.as_str()] {
        let reply = server.send("POST", CHAT, &[JSON], body);
        assert_eq!((reply.status, reply.error()["code"].as_str()), (400, Some("invalid_json")));
    }
    let reply = server.send("POST", CHAT, &[JSON], b"{\"a\": \"\xff\"}");
    assert_eq!(reply.error()["code"], "invalid_json");
    let reply = server.send("POST", CHAT, &[("content-type", "text/plain")], "{}");
    assert_eq!((reply.status, &reply.error()["code"]), (415, &json!("unsupported_media_type")));
}

#[test]
fn a_body_beyond_the_limit_is_refused() {
    let engine = ScriptedEngine::answering("x");
    let server = start_with(&engine, |config| config.max_body_bytes = 1000);
    let reply = server.post(CHAT, &chat(&"a".repeat(1000), json!({})));
    assert_eq!((reply.status, &reply.error()["code"]), (413, &json!("body_too_large")));
}

#[test]
fn a_body_that_does_not_arrive_is_given_up() {
    let engine = ScriptedEngine::answering("x");
    let server =
        start_with(&engine, |config| config.body_timeout = std::time::Duration::from_millis(50));
    let stream = common::client::open_unfinished(server.address, CHAT);
    let reply = common::client::read_reply(stream);
    assert_eq!((reply.status, &reply.error()["code"]), (408, &json!("body_timeout")));
}

#[test]
fn routes_and_methods_that_do_not_exist_are_told() {
    let engine = ScriptedEngine::answering("x");
    let server = start(&engine);
    let reply = server.get("/v1/embeddings");
    assert_eq!((reply.status, &reply.error()["code"]), (404, &json!("unknown_url")));
    let reply = server.get(CHAT);
    assert_eq!((reply.status, &reply.error()["code"]), (405, &json!("method_not_allowed")));
    assert_eq!(reply.header("allow"), Some("POST"));
}

#[test]
fn with_a_key_the_api_is_closed_and_health_is_open() {
    let engine = ScriptedEngine::answering("x");
    let server = start_with(&engine, |config| config.api_key = Some(ApiKey::new("secret")));
    let with = |value: &str| server.send("GET", "/v1/models", &[("authorization", value)], "");
    for reply in [server.get("/v1/models"), with("Bearer wrong"), with("Basic secret"), with("B")] {
        assert_eq!(reply.status, 401);
        assert_eq!(reply.error()["code"], "invalid_api_key");
        assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
    }
    assert_eq!(server.post(CHAT, &chat("a", json!({}))).status, 401);
    assert_eq!(with("Bearer secret").status, 200);
    assert_eq!(with("bearer secret").status, 200);
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn an_engines_refusal_says_whether_to_come_back() {
    let cases = [
        (SubmitError::Busy { waiting: 8 }, 429, "rate_limit_exceeded", true),
        (SubmitError::Unavailable { reason: "loading".into() }, 503, "service_unavailable", true),
        (SubmitError::Invalid { reason: "too odd".into() }, 400, "invalid_value", false),
    ];
    for (refusal, status, code, retry) in cases {
        for stream in [false, true] {
            let engine = ScriptedEngine::answering("x");
            *engine.refusal.lock().unwrap() = Some(refusal.clone());
            let reply = start(&engine).post(CHAT, &chat("a", json!({"stream": stream})));
            assert_eq!(reply.status, status);
            assert_eq!(reply.error()["code"], code);
            assert_eq!(reply.header("retry-after").is_some(), retry);
        }
    }
}

#[test]
fn error_objects_have_openais_four_fields() {
    let engine = ScriptedEngine::answering("x");
    let error = start(&engine).get("/nowhere").json();
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&error), ["error"]);
    assert_eq!(keys(&error["error"]), ["message", "type", "param", "code"]);
}

#[test]
fn no_value_of_any_field_breaks_the_server() {
    let engine = ScriptedEngine::answering("x");
    let server = start(&engine);
    let fields = [
        "model",
        "messages",
        "prompt",
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_tokens",
        "max_completion_tokens",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
        "top_logprobs",
        "echo",
        "best_of",
        "suffix",
        "tools",
        "tool_choice",
        "response_format",
        "logit_bias",
        "frequency_penalty",
        "chat_template_kwargs",
        "user",
    ];
    let values = [
        json!(null),
        json!(true),
        json!(0),
        json!(-1),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(1e308),
        json!(0.5),
        json!(""),
        json!("é\u{0}"),
        json!([]),
        json!([null]),
        json!([[]]),
        json!([{}]),
        json!([u64::MAX]),
        json!({}),
        json!({"type": []}),
    ];
    for (field, value) in fields.iter().flat_map(|f| values.iter().map(move |v| (f, v))) {
        for path in [CHAT, COMPLETIONS] {
            let mut body = chat("a", json!({"prompt": "a", "logprobs": null}));
            body[*field] = value.clone();
            let reply = server.post(path, &body);
            assert!([200, 400, 404].contains(&reply.status), "{body}: {reply:?}");
        }
    }
    assert_eq!(server.get("/health").status, 200);
}
