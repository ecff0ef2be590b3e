//! Ranks that MLX's own launcher starts.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::process::Command;

use common::python;
use serde_json::Value;
use yunta_verbs_emulator::{Config, Device, FOLDER, library};

/// What `yunta comm-bench` reports when `mlx.launch` starts two ranks of it.
fn launch(backend: &[&str], links: &[&str]) -> Value {
    // The launcher gives ranks the ports from one on.
    let port = 20_000 + std::process::id() % 12_000;
    let out = Command::new(python().with_file_name("mlx.launch"))
        .args(backend)
        .args(["--starting-port", &port.to_string(), "--", env!("CARGO_BIN_EXE_yunta")])
        .args(["comm-bench", "--token", "secret", "--sizes", "4096", "--rounds", "20", "--json"])
        .args(links)
        .output()
        .expect("mlx.launch starts");
    let text = String::from_utf8_lossy(&out.stdout);
    let object = text.find('{').map(|at| &text[at..]);
    let object = object.unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&out.stderr)));
    serde_json::Deserializer::from_str(object).into_iter().next().unwrap().unwrap()
}

#[test]
fn the_ring_backends_ranks_find_each_other() {
    let report = launch(&["-n", "2", "--backend", "ring"], &[]);
    assert_eq!(report["ranks"], 2);
    assert_eq!(report["links"][0]["transport"], "shm");
    assert_eq!(report["results"][0]["errors"], 0);
}

#[test]
fn the_jaccl_backends_ranks_use_the_devices_of_the_hostfile() {
    let folder = tempfile::tempdir().unwrap();
    let device =
        |name: &str, last| Device { name: name.to_owned(), address: [169, 254, 0, last].into() };
    let devices = vec![device("rdma_en2", 2), device("rdma_en3", 3)];
    Config { devices, ..Config::default() }.save(folder.path()).unwrap();
    let hostfile = folder.path().join("hosts.json");
    let text = r#"[{"ssh": "127.0.0.1", "ips": ["127.0.0.1"], "rdma": [null, "rdma_en2"]},
                   {"ssh": "127.0.0.1", "ips": ["127.0.0.1"], "rdma": ["rdma_en3", null]}]"#;
    std::fs::write(&hostfile, text).unwrap();
    let emulated = format!("{FOLDER}={}", folder.path().display());
    let backend =
        ["--backend", "jaccl", "--hostfile", hostfile.to_str().unwrap(), "--env", &emulated];
    let library = library().unwrap();
    let report = launch(&backend, &["--rdma-library", library.to_str().unwrap()]);
    assert_eq!(report["links"][0]["transport"], "verbs");
    assert_eq!(report["results"][0]["errors"], 0);
}
