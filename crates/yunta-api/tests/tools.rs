//! Calls of tools, in whole and streamed answers.
#![allow(clippy::unwrap_used, clippy::panic)] // also in helpers of tests

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use common::engine::ScriptedEngine;
use common::{chat, start};
use serde_json::{Value, json};
use yunta_engine::Grammar;

const CHAT: &str = "/v1/chat/completions";
const ANSWER: &str = "I look.\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Jaén\"}}\n\
                      </tool_call>\n<tool_call>\n{\"name\": \"time\", \"arguments\": {}}\n</tool_call>";

fn tools() -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    json!([
        {"type": "function", "function": {"name": "weather", "parameters": schema}},
        {"type": "function", "function": {"name": "time"}},
    ])
}

/// An engine with room for tools.
fn answering(text: &'static str) -> Arc<ScriptedEngine> {
    let engine = ScriptedEngine::answering(text);
    engine.context.store(1000, Ordering::SeqCst);
    engine
}

fn is_id(id: &Value) -> bool {
    id.as_str().unwrap().starts_with("call_")
}

#[test]
fn calls_in_a_whole_answer_are_told_apart_from_text() {
    let engine = answering(ANSWER);
    let reply = start(&engine).post(CHAT, &chat("a", json!({"tools": tools()}))).json();
    let choice = &reply["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "I look.\n");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    let functions: Vec<&Value> = calls.iter().map(|c| &c["function"]).collect();
    assert_eq!(functions[0], &json!({"name": "weather", "arguments": "{\"city\":\"Jaén\"}"}));
    assert_eq!(functions[1], &json!({"name": "time", "arguments": "{}"}));
    assert!(calls.iter().all(|c| is_id(&c["id"]) && c["type"] == "function"));
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    assert_eq!(engine.request().grammar, None);
}

/// The scripted engine gives a byte at a time: tags come in pieces.
#[test]
fn calls_in_a_stream_come_whole() {
    let engine = answering(ANSWER);
    let body = chat("a", json!({"tools": tools(), "stream": true}));
    let chunks = start(&engine).post(CHAT, &body).chunks();
    let deltas: Vec<&Value> = chunks.iter().map(|c| &c["choices"][0]["delta"]).collect();
    let text: String = deltas.iter().filter_map(|d| d["content"].as_str()).collect();
    assert_eq!(text, "I look.\n");
    let calls: Vec<&Value> = deltas.iter().filter_map(|d| d["tool_calls"].get(0)).collect();
    assert_eq!(calls.len(), 2);
    assert_eq!((&calls[0]["index"], &calls[1]["index"]), (&json!(0), &json!(1)));
    assert_eq!(calls[0]["function"]["arguments"], "{\"city\":\"Jaén\"}");
    assert!(is_id(&calls[1]["id"]));
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
}

#[test]
fn without_tools_the_text_stays_as_it_is() {
    let engine = answering(ANSWER);
    for fields in [json!({}), json!({"tools": tools(), "tool_choice": "none"})] {
        let reply = start(&engine).post(CHAT, &chat("a", fields)).json();
        assert_eq!(reply["choices"][0]["message"]["content"], ANSWER);
        assert_eq!(reply["choices"][0]["finish_reason"], "stop");
    }
}

#[test]
fn what_is_no_call_is_text() {
    let engine = answering("a <tool_call>{\"name\": 5}</tool_call> b <tool");
    for stream in [false, true] {
        let server = start(&engine);
        let reply = server.post(CHAT, &chat("a", json!({"tools": tools(), "stream": stream})));
        let text = match stream {
            false => reply.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned(),
            true => reply
                .chunks()
                .iter()
                .filter_map(|c| c["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
                .collect(),
        };
        assert_eq!(text, "a <tool_call>{\"name\": 5}</tool_call> b <tool");
    }
}

#[test]
fn a_call_that_must_come_is_asked_of_the_engine() {
    let engine = answering(ANSWER);
    let fields = json!({"tools": tools(), "tool_choice": "required"});
    assert_eq!(start(&engine).post(CHAT, &chat("a", fields)).status, 200);
    let Some(Grammar::Lark(grammar)) = engine.request().grammar else { panic!("no grammar") };
    assert!(grammar.contains("weather") && grammar.contains("city"), "{grammar}");
    let both = json!({
        "tools": tools(), "tool_choice": "required", "response_format": {"type": "json_object"},
    });
    assert_eq!(start(&engine).post(CHAT, &chat("a", both)).status, 400);
}

#[test]
fn a_response_format_is_asked_of_the_engine() {
    let engine = answering("{}");
    let fields = json!({"response_format": {"type": "json_object"}});
    assert_eq!(start(&engine).post(CHAT, &chat("a", fields)).status, 200);
    assert_eq!(engine.request().grammar, Some(Grammar::JsonObject));
}
