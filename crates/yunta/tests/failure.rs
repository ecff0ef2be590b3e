//! A rank that dies, and a server that does.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::time::{Duration, Instant};

use common::{Server, alive, signal};
use serde_json::{Value, json};

fn long_request() -> Value {
    json!({
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Tell me a long story about the sea."}],
        "max_tokens": 2000,
        "temperature": 0,
        "stream": true,
    })
}

fn short_request() -> Value {
    json!({
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 5,
        "temperature": 0,
    })
}

/// Kills rank after rank in mid-stream: each time the client gets a clear error within two
/// seconds, no process stays behind, and the next request is served.
#[test]
fn a_killed_rank_is_told_to_the_client_and_replaced() {
    let server = Server::start(&["--local-ranks", "3"]);
    for victim in 0..3 {
        let workers = server.workers();
        assert_eq!(workers.len(), 3);
        let mut stream = server.open("POST", "/v1/chat/completions", Some(&long_request()));
        assert_eq!(stream.status, 200);
        for _ in 0..5 {
            assert!(stream.data().is_some(), "tokens come");
        }
        signal(workers[victim], "-KILL");
        let killed = Instant::now();
        let error = loop {
            let data = stream.data().expect("the stream does not end without a word");
            let data: Value = serde_json::from_str(&data).expect("JSON");
            if let Some(error) = data.get("error") {
                break error["message"].as_str().unwrap().to_owned();
            }
        };
        let pause = killed.elapsed();
        assert!(pause < Duration::from_secs(2), "told after {pause:?}");
        let named = format!("rank {victim} (process {}) was killed by signal 9", workers[victim]);
        assert!(error.contains(&named), "`{error}` does not say that {named}");

        // The next request waits for the new ranks, and is answered.
        let (status, answer) = server.json("POST", "/v1/chat/completions", Some(&short_request()));
        assert_eq!(status, 200, "{answer}");
        assert!(!answer["choices"][0]["message"]["content"].as_str().unwrap().is_empty());
        for worker in workers {
            assert!(!alive(worker), "process {worker} of the old epoch is left");
        }
        let (status, health) = server.json("GET", "/health", None);
        assert_eq!((status, &health["epoch"]), (200, &json!(victim + 2)));
    }
}

#[test]
fn a_request_that_nobody_saw_answered_survives_a_killed_rank() {
    let server = Server::start(&["--local-ranks", "2"]);
    let workers = server.workers();
    let (status, answer) = std::thread::scope(|scope| {
        let request = scope.spawn(|| {
            let mut request = short_request();
            // Long enough to be in its prefill when the rank dies.
            request["messages"][0]["content"] = json!("sea ".repeat(3000));
            server.json("POST", "/v1/chat/completions", Some(&request))
        });
        std::thread::sleep(Duration::from_millis(300));
        signal(workers[1], "-KILL");
        request.join().unwrap()
    });
    assert_eq!(status, 200, "{answer}");
    assert_eq!(answer["usage"]["completion_tokens"], 5);
}

/// Not even a killed supervisor leaves its ranks behind.
#[test]
fn no_rank_outlives_its_supervisor() {
    for how in ["-KILL", "-TERM", "-INT"] {
        let server = Server::start(&["--local-ranks", "3"]);
        let workers = server.workers();
        assert_eq!(workers.len(), 3);
        // A stopped rank can't notice anything by itself.
        signal(workers[1], "-STOP");
        signal(server.pid(), how);
        let end = Instant::now() + Duration::from_secs(10);
        while workers.iter().any(|w| alive(*w)) {
            assert!(Instant::now() < end, "{how}: ranks are left behind");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
