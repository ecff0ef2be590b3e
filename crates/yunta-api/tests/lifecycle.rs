//! Health, models, and requests that do not end as they should.
#![allow(clippy::unwrap_used, clippy::panic)] // also in helpers of tests

mod common;

use std::io::Read;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use yunta_engine::Failure;

use common::client::{open, read_reply};
use common::engine::{Act, ScriptedEngine, answer, say};
use common::{Server, chat, start, start_with};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const JSON: (&str, &str) = ("content-type", "application/json");

fn open_chat(server: &Server, fields: Value) -> std::net::TcpStream {
    open(server.address, "POST", CHAT, &[JSON], chat("a", fields).to_string().as_bytes())
}

#[test]
fn health_is_ok_only_when_the_engine_is_ready() {
    let engine = ScriptedEngine::answering("x");
    let server = start(&engine);
    let reply = server.get("/health");
    assert_eq!((reply.status, &reply.json()["status"]), (200, &json!("ok")));
    assert_eq!(reply.json()["ranks"], 2);
    engine.ready.store(false, SeqCst);
    let reply = server.get("/health");
    assert_eq!((reply.status, &reply.json()["state"]), (503, &json!("loading")));
}

#[test]
fn models_are_listed_and_found_with_and_without_escapes() {
    let engine = ScriptedEngine::answering("x");
    let server = start(&engine);
    let list = server.get("/v1/models").json();
    let model = json!({
        "id": "org/Model", "object": "model", "created": 1_700_000_000, "owned_by": "yunta",
        "context_length": 100,
    });
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"][0], model);
    assert_eq!(list["data"][1]["id"], "nickname");
    assert_eq!(server.get("/v1/models/org/Model").json(), model);
    assert_eq!(server.get("/v1/models/org%2FModel").json(), model);
    assert_eq!(server.get("/v1/models/other").error()["code"], "model_not_found");
    assert!(server.get("/").body.contains("/v1"));
}

#[test]
fn local_pages_may_call_and_others_may_not() {
    let engine = ScriptedEngine::answering("x");
    let server = start(&engine);
    let preflight = |origin| {
        let headers = [
            ("origin", origin),
            ("access-control-request-method", "POST"),
            ("access-control-request-headers", "authorization,content-type"),
        ];
        server.send("OPTIONS", CHAT, &headers, "")
    };
    let reply = preflight("http://localhost:3000");
    assert_eq!(reply.status, 204);
    assert_eq!(reply.header("access-control-allow-origin"), Some("http://localhost:3000"));
    let allowed = reply.header("access-control-allow-headers");
    assert_eq!(allowed, Some("authorization,content-type"));
    assert_eq!(preflight("https://example.com").header("access-control-allow-origin"), None);
}

#[test]
fn a_failure_before_the_answer_is_an_error_status() {
    for (act, status, retry) in [
        (Act::Fail { cause: Failure::Retriable }, 503, true),
        (Act::Fail { cause: Failure::Internal }, 500, false),
        (Act::Vanish, 503, true),
    ] {
        let engine = ScriptedEngine::new(move |_| vec![say("half"), act.clone()]);
        let reply = start(&engine).post(CHAT, &chat("a", json!({})));
        assert_eq!(reply.status, status);
        assert_eq!(reply.error()["type"], "server_error");
        assert_eq!(reply.header("retry-after").is_some(), retry);
    }
}

#[test]
fn a_failure_in_mid_stream_is_the_last_event() {
    for act in [Act::Fail { cause: Failure::Retriable }, Act::Vanish] {
        let engine = ScriptedEngine::new(move |_| vec![say("half"), act.clone()]);
        let reply = start(&engine).post(CHAT, &chat("a", json!({"stream": true})));
        assert_eq!(reply.status, 200);
        let events = reply.events();
        assert_eq!(events.len(), 1 + 4 + 1, "{events:?}");
        let last: Value = serde_json::from_str(&events[5]).unwrap();
        assert_eq!(last["error"]["code"], "generation_failed");
        assert!(!last["error"]["message"].as_str().unwrap().is_empty());
    }
}

#[test]
fn one_failed_output_cancels_the_others() {
    let engine = ScriptedEngine::new(|request| match request.sampling.seed {
        0 => vec![say("a"), Act::AwaitCancel],
        _ => vec![Act::Fail { cause: Failure::Retriable }],
    });
    let reply = start(&engine).post(CHAT, &chat("a", json!({"n": 2, "seed": 0})));
    assert_eq!(reply.status, 503);
    assert!(engine.was_cancelled(0));
}

#[test]
fn a_missing_token_is_an_error_not_garbled_text() {
    let engine = ScriptedEngine::new(|_| vec![say("a"), Act::Skip, say("b")]);
    let reply = start(&engine).post(CHAT, &chat("a", json!({})));
    assert_eq!(reply.status, 500);
}

#[test]
fn a_client_that_hangs_up_cancels_its_request() {
    for stream in [false, true] {
        let engine = ScriptedEngine::new(|_| vec![say("a"), Act::AwaitCancel]);
        let server = start(&engine);
        let mut connection = open_chat(&server, json!({"stream": stream}));
        engine.await_request();
        if stream {
            let mut head = [0; 16];
            connection.read_exact(&mut head).unwrap();
            assert!(head.starts_with(b"HTTP/1.1 200"));
        }
        drop(connection);
        assert!(engine.was_cancelled(0), "stream: {stream}");
    }
}

#[test]
fn silence_is_filled_with_comments() {
    let engine = ScriptedEngine::new(|_| {
        let mut acts = vec![Act::Pause(Duration::from_millis(300))];
        acts.extend(answer("x"));
        acts
    });
    let server = start_with(&engine, |config| config.keep_alive = Duration::from_millis(20));
    let reply = server.post(CHAT, &chat("a", json!({"stream": true})));
    assert!(reply.body.starts_with(": keep-alive\n\n"), "{reply:?}");
    assert_eq!(reply.chunks().len(), 3);
}

#[test]
fn an_answer_beyond_its_time_is_ended_with_an_error() {
    for stream in [false, true] {
        let engine = ScriptedEngine::new(|_| vec![say("a"), Act::AwaitCancel]);
        let server =
            start_with(&engine, |config| config.request_timeout = Duration::from_millis(200));
        let reply = server.post(CHAT, &chat("a", json!({"stream": stream})));
        assert_eq!(reply.status, if stream { 200 } else { 504 });
        assert!(reply.body.contains("request_timeout"), "{reply:?}");
        assert!(engine.was_cancelled(0));
    }
}

#[test]
fn requests_beyond_the_bound_are_told_to_come_back() {
    let engine = ScriptedEngine::new(|_| vec![Act::AwaitCancel]);
    let server = start_with(&engine, |config| config.max_open_requests = 1);
    let first = open_chat(&server, json!({"stream": true}));
    engine.await_request();
    let reply = server.post(CHAT, &chat("a", json!({})));
    assert_eq!((reply.status, &reply.error()["code"]), (429, &json!("rate_limit_exceeded")));
    assert_eq!(reply.header("retry-after"), Some("1"));
    drop(first);
    assert!(engine.was_cancelled(0));
}

#[test]
fn shutdown_lets_open_requests_end() {
    let engine = ScriptedEngine::new(|_| {
        let mut acts = vec![Act::Pause(Duration::from_millis(300))];
        acts.extend(answer("late"));
        acts
    });
    let mut server = start(&engine);
    let connection = open_chat(&server, json!({}));
    engine.await_request();
    server.shut_down();
    let reply = read_reply(connection);
    assert_eq!(reply.json()["choices"][0]["message"]["content"], "late");
    server.ended().unwrap();
}

#[test]
fn what_outlives_the_drain_bound_is_told_so() {
    let engine = ScriptedEngine::new(|_| vec![say("a"), Act::AwaitCancel]);
    let mut server =
        start_with(&engine, |config| config.drain_timeout = Duration::from_millis(100));
    let connection = open_chat(&server, json!({"stream": true}));
    engine.await_request();
    server.shut_down();
    let reply = read_reply(connection);
    assert!(reply.events().last().unwrap().contains("service_unavailable"), "{reply:?}");
    server.ended().unwrap();
}
