//! A model served over RDMA: emulated devices, the real code for them.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{Server, signal, yunta_json};
use serde_json::json;
use yunta_verbs_emulator::{Config, FOLDER, library};

fn answer(server: &Server) -> String {
    let body = json!({
        "model": "smollm2", "prompt": "The three largest cities of France are", "max_tokens": 40,
        "temperature": 0,
    });
    let (status, answer) = server.json("POST", "/v1/completions", Some(&body));
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0]["text"].as_str().unwrap().to_owned()
}

/// Devices that lose, double and damage frames: the answer is the one of a single rank, also after a
/// rank was killed and its queue pairs with it.
#[test]
fn a_model_is_served_over_rdma() {
    let folder = tempfile::tempdir().unwrap();
    let (loss, duplication, corruption) = (0.002, 0.002, 0.002);
    let config = Config { loss, duplication, corruption, ..Config::default() };
    config.save(folder.path()).unwrap();
    // SAFETY: the only test of this process, and it has no other thread yet.
    unsafe { std::env::set_var(FOLDER, folder.path()) };
    let library = library().unwrap();
    let verbs = ["--transport", "verbs", "--rdma-kind", "uc", "--rdma-library"];
    let verbs = [&verbs[..], &[library.to_str().unwrap()]].concat();

    let bench = ["comm-bench", "--ranks", "3", "--sizes", "4096,300000", "--rounds", "5", "--json"];
    let report = yunta_json(&[&bench[..], &verbs].concat());
    assert!(report["links"].as_array().unwrap().iter().all(|l| l["transport"] == "verbs"));
    assert!(report["results"].as_array().unwrap().iter().all(|r| r["errors"] == 0), "{report}");

    let expected = answer(&Server::start(&["--tensor", "1"]));
    assert!(expected.len() > 20);
    let server = Server::start(&[&["--local-ranks", "3"], &verbs[..]].concat());
    assert_eq!(answer(&server), expected);
    signal(server.workers()[1], "-KILL");
    assert_eq!(answer(&server), expected);
    let open = std::fs::read_dir(folder.path()).unwrap().flatten();
    let open = open.filter(|e| e.path().extension().is_some_and(|x| x == "qp")).count();
    assert!(open >= 6, "{open} queue pairs: the ranks are linked otherwise");
}
