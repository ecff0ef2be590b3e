//! What a team sees of the serving engine: prefixes that are known, grammars, several clients.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::time::{Duration, Instant};

use common::Server;
use serde_json::{Value, json};

fn chat(text: &str, more: Value) -> Value {
    let mut body = json!({
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 8,
    });
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn ask(server: &Server, body: &Value) -> Value {
    let (status, answer) = server.json("POST", "/v1/chat/completions", Some(body));
    assert_eq!(status, 200, "{answer}");
    answer
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

fn text(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().unwrap()
}

#[test]
fn a_known_prefix_is_not_computed_again_not_even_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().to_str().unwrap();
    let options = ["--local-ranks", "2", "--prefix-cache", store];
    let long = "The oxen pull the plough through the field. ".repeat(40);
    let (first, second) =
        (chat(&format!("{long}Why?"), json!({})), chat(&format!("{long}How?"), json!({})));
    let (before, prompt) = {
        let server = Server::start(&options);
        let answer = ask(&server, &first);
        assert_eq!(cached(&answer), 0);
        let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap();
        let other = ask(&server, &second);
        assert!(cached(&other) + 10 > prompt, "{other}");
        // The whole conversation, with one more turn.
        let mut next = first.clone();
        let messages = next["messages"].as_array_mut().unwrap();
        messages.push(json!({"role": "assistant", "content": text(&answer)}));
        messages.push(json!({"role": "user", "content": "And then?"}));
        assert!(cached(&ask(&server, &next)) >= prompt - 1);
        // Saved when there has been nothing to do for a while.
        let until = Instant::now() + Duration::from_secs(30);
        while !folder.path().join("index.json").is_file() {
            assert!(Instant::now() < until, "nothing is saved");
            std::thread::sleep(Duration::from_millis(50));
        }
        (other, prompt)
    };
    let after = ask(&Server::start(&options), &second);
    assert!(cached(&after) + 64 >= prompt, "{after}");
    assert_eq!(text(&after), text(&before));
    // Another cut does not take what this one has saved.
    let other = Server::start(&["--local-ranks", "3", "--prefix-cache", store]);
    let answer = ask(&other, &second);
    assert_eq!((cached(&answer), text(&answer)), (0, text(&before)));
}

#[test]
fn several_answers_of_one_prompt_compute_it_once() {
    let server = Server::start(&[]);
    let prompt = "Name a colour of the sky. ".repeat(12);
    let more = json!({"n": 4, "temperature": 1, "seed": 3});
    let answer = ask(&server, &chat(&prompt, more));
    let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(cached(&answer) + 3 * 16 >= 3 * prompt, "{answer}");
    let texts: std::collections::HashSet<&str> = answer["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| c["message"]["content"].as_str().unwrap())
        .collect();
    assert!(texts.len() > 1, "four draws are the same");
}

/// Sampling parameters reach the ranks.
#[test]
fn penalties_and_bias_change_the_answer() {
    let server = Server::start(&[]);
    let plain = ask(&server, &chat("Say hello.", json!({"max_tokens": 30})));
    let penalised = json!({"max_tokens": 30, "repetition_penalty": 1.8});
    assert_ne!(text(&plain), text(&ask(&server, &chat("Say hello.", penalised))));
    let longer = json!({"max_tokens": 60, "min_tokens": 60});
    let longer = ask(&server, &chat("Say hello.", longer));
    assert_eq!(longer["usage"]["completion_tokens"], 60);
    // Token 28 and nothing else.
    let only = json!({"max_tokens": 4, "logit_bias": {"28": 100}, "ignore_eos": true});
    let only = ask(&server, &chat("Say hello.", only));
    let mut letters: Vec<char> = text(&only).chars().collect();
    letters.dedup();
    assert_eq!(letters.len(), 1, "{only}");
}

/// However small the model is: what comes out is valid, greedy and drawn, in one rank and in three.
#[test]
fn outputs_obey_their_schema() {
    let schema = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "oxen": {"type": "integer", "minimum": 0, "maximum": 99},
            "ploughs": {"type": "array", "items": {"enum": ["light", "heavy"]}, "maxItems": 3},
            "rested": {"type": "boolean"},
        },
        "required": ["name", "oxen", "ploughs", "rested"],
        "additionalProperties": false,
    });
    let format = json!({"type": "json_schema", "json_schema": {"name": "farm", "schema": schema}});
    for ranks in ["1", "3"] {
        let server = Server::start(&["--local-ranks", ranks]);
        for seed in 0..6 {
            let more = json!({
                "response_format": format,
                "max_tokens": 200,
                "temperature": if seed == 0 { 0.0 } else { 1.2 },
                "seed": seed,
            });
            let answer = ask(&server, &chat("Describe a farm.", more));
            assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
            let farm: Value = serde_json::from_str(text(&answer)).expect("it is JSON");
            assert_eq!(farm.as_object().unwrap().len(), 4, "{farm}");
            assert!(farm["name"].as_str().unwrap().chars().count() <= 12, "{farm}");
            assert!(farm["oxen"].as_u64().unwrap() < 100, "{farm}");
            assert!(farm["rested"].is_boolean(), "{farm}");
            let ploughs = farm["ploughs"].as_array().unwrap();
            assert!(ploughs.len() <= 3 && ploughs.iter().all(|p| p == "light" || p == "heavy"));
        }
        let digits = json!({"guided_regex": "[0-9]{3}-[0-9]{2}", "max_tokens": 20});
        let digits = ask(&server, &chat("A number, please.", digits));
        let parts: Vec<&str> = text(&digits).split('-').collect();
        assert!(parts.len() == 2 && parts[0].len() == 3 && parts[1].len() == 2, "{digits}");
        // A schema that can't be is the client's mistake, and named.
        let wrong = json!({"type": "json_schema", "json_schema": {"schema": {"type": "ox"}}});
        let body = chat("x", json!({"response_format": wrong}));
        let (status, answer) = server.json("POST", "/v1/chat/completions", Some(&body));
        assert_eq!(status, 400, "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains("schema"), "{answer}");
    }
}

/// A call that must come does, and its arguments obey the function's schema.
#[test]
fn a_required_tool_is_called_as_its_schema_says() {
    let server = Server::start(&[]);
    let parameters = json!({
        "type": "object",
        "properties": {
            "field": {"enum": ["north", "south"]},
            "furrows": {"type": "integer", "minimum": 1, "maximum": 99},
        },
        "required": ["field", "furrows"],
        "additionalProperties": false,
    });
    let tools = json!([
        {"type": "function", "function": {"name": "plough", "strict": true, "parameters": parameters}},
        {"type": "function", "function": {"name": "rest"}},
    ]);
    let named = json!({"type": "function", "function": {"name": "plough"}});
    for (choice, seed) in [(json!("required"), 1), (named.clone(), 2), (named, 3)] {
        let more = json!({
            "tools": tools, "tool_choice": choice, "max_tokens": 120, "temperature": 1, "seed": seed,
            "parallel_tool_calls": false,
        });
        let answer = ask(&server, &chat("Plough the north field.", more));
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
        let call = &choice["message"]["tool_calls"][0]["function"];
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        if call["name"] == "plough" {
            assert!(arguments["field"] == "north" || arguments["field"] == "south", "{call}");
            assert!((1..100).contains(&arguments["furrows"].as_u64().unwrap()), "{call}");
        } else {
            assert_eq!((&call["name"], &arguments), (&json!("rest"), &json!({})));
        }
    }
}
