//! Real clients against a served model: the `openai` Python package and curl.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::process::Command;

use common::{Server, python};

#[test]
fn the_openai_package_gets_what_it_asks_for() {
    let server = Server::start(&["--local-ranks", "3"]);
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/openai_client.py");
    let out = Command::new(python()).args([script, &server.url]).output().unwrap();
    let (stdout, stderr) =
        (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success(), "{stdout}\n{stderr}");
}

#[test]
fn curl_streams_to_the_last_line() {
    let server = Server::start(&["--local-ranks", "2"]);
    let body = r#"{"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 8,
                   "temperature": 0, "stream": true, "stream_options": {"include_usage": true}}"#;
    let out = Command::new("curl")
        .args(["-sSN", "--max-time", "60", "-H", "Content-Type: application/json", "-d", body])
        .arg(format!("{}/v1/completions", server.url))
        .output()
        .expect("curl starts");
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success(), "{text}");
    let data: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("data: ")).collect();
    assert_eq!(data.last(), Some(&"[DONE]"), "{text}");
    let chunks: Vec<serde_json::Value> =
        data[..data.len() - 1].iter().map(|d| serde_json::from_str(d).unwrap()).collect();
    let said: String =
        chunks.iter().filter_map(|c| c["choices"].get(0)?["text"].as_str()).collect();
    assert!(said.starts_with(" Paris."), "{said}");
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 8, "{text}");
}
