//! Hugging Face repositories: fetched from a hub on this machine, over its real protocol.

#![allow(clippy::unwrap_used, clippy::panic)] // also in helpers of tests

mod fake_hub;
mod support;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use fake_hub::{FakeHub, Manners, etag};
use support::{empty_hub, fixture};
use tempfile::TempDir;
use yunta_hub::{Hub, HubError, Progress, Resolved, Silent, Token, served_name};

const ID: &str = "yunta/llama-plain";
const WEIGHTS: &str = "model.safetensors";

struct Setup {
    root: TempDir,
    server: FakeHub,
    hub: Hub,
}

fn serving(folder: &str) -> Setup {
    let root = tempfile::tempdir().unwrap();
    let server = FakeHub::serve(ID, &fixture(folder));
    let mut hub = empty_hub(root.path());
    hub.huggingface.endpoint = Some(server.endpoint.clone());
    Setup { root, server, hub }
}

fn plain() -> Setup {
    serving("models/llama_plain")
}

fn same_as_fixture(found: &Path, folder: &str, files: &[&str]) {
    for file in files {
        let wanted = fs::read(fixture(folder).join(file)).unwrap();
        assert!(fs::read(found.join(file)).unwrap() == wanted, "{file} differs");
    }
}

/// Unfinished download of the weights, as an earlier run may have left it.
fn leave_part(setup: &Setup, content: &[u8]) {
    let weights = fs::read(fixture("models/llama_plain").join(WEIGHTS)).unwrap();
    let blobs = setup.root.path().join("hf/hub/models--yunta--llama-plain/blobs");
    fs::create_dir_all(&blobs).unwrap();
    fs::write(blobs.join(format!("{}.part", etag(&weights))), content).unwrap();
}

#[derive(Default)]
struct Record {
    files: RefCell<Vec<(String, u64, u64)>>,
    messages: RefCell<Vec<String>>,
}

impl Progress for Record {
    fn start(&self, total: Option<u64>, what: &str) {
        self.files.borrow_mut().push((what.to_owned(), total.unwrap(), 0));
    }
    fn advance(&self, bytes: u64) {
        self.files.borrow_mut().last_mut().unwrap().2 += bytes;
    }
    fn finish(&self) {}
    fn message(&self, text: &str) {
        self.messages.borrow_mut().push(text.to_owned());
    }
}

#[test]
fn a_repository_becomes_a_folder_and_is_fetched_once() {
    let s = plain();
    let record = Record::default();
    let folder = s.hub.pull(ID, &record).unwrap();
    let files = ["config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS];
    same_as_fixture(&folder, "models/llama_plain", &files);
    assert!(!folder.join("reference.json").exists());
    let shown = record.files.borrow();
    assert_eq!(shown.iter().map(|f| f.0.as_str()).collect::<Vec<_>>(), files);
    assert!(shown.iter().all(|(_, total, arrived)| total == arrived), "{shown:?}");
    let requests = s.server.request_count();
    assert_eq!(s.hub.pull(ID, &Silent).unwrap(), folder);
    assert_eq!(s.hub.resolve(ID).unwrap(), Resolved::Here(folder.clone()));
    assert_eq!(s.server.request_count(), requests);
    assert_eq!(served_name(folder.to_str().unwrap()), ID);
    assert_eq!(s.hub.list_local(), [(ID.to_owned(), folder)]);
}

#[test]
fn all_shards_that_the_index_names_are_fetched() {
    let s = serving("models/llama_linear_bias_sharded");
    let folder = s.hub.pull(ID, &Silent).unwrap();
    let files = [
        "config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ];
    same_as_fixture(&folder, "models/llama_linear_bias_sharded", &files);
}

#[test]
fn one_gguf_file_is_fetched_alone() {
    let s = serving("gguf");
    let file = s.hub.pull(&format!("{ID}:llama-Q4_0.gguf"), &Silent).unwrap();
    same_as_fixture(file.parent().unwrap(), "gguf", &["llama-Q4_0.gguf"]);
    assert_eq!(fs::read_dir(file.parent().unwrap()).unwrap().count(), 1);
    assert_eq!(s.hub.list_local(), [(format!("{ID}:llama-Q4_0.gguf"), file)]);
    let e = s.hub.pull(ID, &Silent).unwrap_err().to_string();
    assert!(e.contains("config.json") && e.contains("llama-Q4_0.gguf"), "{e}");
}

#[test]
fn any_part_of_a_split_model_fetches_all_of_them() {
    let s = serving("gguf");
    for n in 1..=3 {
        s.server.put(&format!("m-0000{n}-of-00003.gguf"), format!("part {n}"));
    }
    let first = s.hub.pull(&format!("{ID}:m-00002-of-00003.gguf"), &Silent).unwrap();
    assert_eq!(first.file_name().unwrap(), "m-00001-of-00003.gguf");
    assert_eq!(fs::read_dir(first.parent().unwrap()).unwrap().count(), 3);
    let name = format!("{ID}:m-00001-of-00003.gguf");
    assert_eq!(s.hub.resolve(&name).unwrap(), Resolved::Here(first.clone()));
    assert_eq!(s.hub.list_local(), [(name.clone(), first.clone())]);
    fs::remove_file(first.with_file_name("m-00003-of-00003.gguf")).unwrap();
    assert!(matches!(s.hub.resolve(&name).unwrap(), Resolved::NotHere { .. }));
    assert_eq!(s.hub.pull(&name, &Silent).unwrap(), first);
}

#[test]
fn a_download_that_is_cut_off_again_and_again_goes_on_where_it_was() {
    let s = plain();
    s.server.set_manners(Manners { cut: Some((WEIGHTS.into(), 100_000, 4)), ..Manners::default() });
    let record = Record::default();
    let folder = s.hub.pull(ID, &record).unwrap();
    same_as_fixture(&folder, "models/llama_plain", &[WEIGHTS]);
    for from in [0, 100_000, 200_000, 300_000, 400_000] {
        assert!(s.server.downloads(WEIGHTS).iter().any(|r| r.from == Some(from)), "{from}");
    }
    let (_, total, arrived) = record.files.borrow().last().unwrap().clone();
    assert_eq!(arrived, total);
}

#[test]
fn what_an_earlier_run_left_is_used() {
    let s = plain();
    let weights = fs::read(fixture("models/llama_plain").join(WEIGHTS)).unwrap();
    leave_part(&s, &weights[..200_000]);
    let folder = s.hub.pull(ID, &Silent).unwrap();
    same_as_fixture(&folder, "models/llama_plain", &[WEIGHTS]);
    assert!(s.server.downloads(WEIGHTS).iter().all(|r| r.from == Some(200_000)));
}

#[test]
fn a_leftover_that_cannot_be_resumed_does_not_block_the_download() {
    let weights = fs::read(fixture("models/llama_plain").join(WEIGHTS)).unwrap();
    for leftover in [weights.clone(), [&weights[..], b"more"].concat()] {
        let s = plain();
        leave_part(&s, &leftover);
        let folder = s.hub.pull(ID, &Silent).unwrap();
        same_as_fixture(&folder, "models/llama_plain", &[WEIGHTS]);
    }
}

#[test]
fn a_server_that_cannot_resume_is_asked_for_the_whole() {
    let s = plain();
    s.server.set_manners(Manners { ignore_range: true, ..Manners::default() });
    leave_part(&s, b"something");
    let folder = s.hub.pull(ID, &Silent).unwrap();
    same_as_fixture(&folder, "models/llama_plain", &[WEIGHTS]);
}

#[test]
fn private_repositories_need_the_token() {
    let mut s = plain();
    s.server.set_manners(Manners { token: Some("hf_secret".into()), ..Manners::default() });
    let e = s.hub.pull(ID, &Silent).unwrap_err();
    assert!(matches!(e, HubError::Refused { status: 401, .. }), "{e}");
    assert!(e.to_string().contains("HF_TOKEN"), "{e}");
    s.hub.huggingface.token = Token::new("hf_secret");
    s.hub.pull(ID, &Silent).unwrap();
}

#[test]
fn a_repository_that_does_not_exist_is_reported_at_once() {
    let s = plain();
    let e = s.hub.pull("yunta/none", &Silent).unwrap_err();
    assert!(matches!(e, HubError::Refused { status: 404, .. }), "{e}");
    assert_eq!(s.server.request_count(), 1);
    let e = s.hub.pull(&format!("{ID}:none.gguf"), &Silent).unwrap_err();
    assert!(matches!(&e, HubError::Refused { what, .. } if what.contains("none.gguf")), "{e}");
}

#[test]
fn without_network_what_is_here_works_and_the_rest_says_so() {
    let mut s = plain();
    let folder = s.hub.pull(ID, &Silent).unwrap();
    s.hub.huggingface.endpoint = Some("http://127.0.0.1:9".to_owned());
    assert_eq!(s.hub.pull(ID, &Silent).unwrap(), folder);
    let e = s.hub.pull("yunta/other", &Silent).unwrap_err();
    assert!(matches!(e, HubError::Unreachable { .. }), "{e}");
    let text = e.to_string();
    for part in ["no network", "http://127.0.0.1:9", "models--yunta--other", "nfs/yunta/other"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    s.hub.huggingface.offline = true;
    assert_eq!(s.hub.pull(ID, &Silent).unwrap(), folder);
    let e = s.hub.pull("yunta/other", &Silent).unwrap_err();
    assert!(matches!(e, HubError::Offline { .. }), "{e}");
}

#[test]
fn a_hub_that_changes_meanwhile_leaves_no_mixture() {
    let s = plain();
    let broken = HashMap::from([(WEIGHTS.to_owned(), 404)]);
    s.server.set_manners(Manners { broken, ..Manners::default() });
    s.hub.pull(ID, &Silent).unwrap_err();
    assert!(matches!(s.hub.resolve(ID).unwrap(), Resolved::NotHere { .. }));
    s.server.set_manners(Manners::default());
    s.server.set_commit(&"2".repeat(40));
    s.server.put("config.json", "{\"new\": true}");
    let folder = s.hub.pull(ID, &Silent).unwrap();
    assert_eq!(fs::read(folder.join("config.json")).unwrap(), b"{\"new\": true}");
    same_as_fixture(&folder, "models/llama_plain", &["tokenizer.json", WEIGHTS]);
}

#[test]
fn damage_is_found_when_asked_said_and_repaired() {
    let mut s = plain();
    let folder = s.hub.pull(ID, &Silent).unwrap();
    let mut weights = fs::read(folder.join(WEIGHTS)).unwrap();
    weights[1000] ^= 1;
    fs::write(folder.join(WEIGHTS), &weights).unwrap();
    assert_eq!(s.hub.resolve(ID).unwrap(), Resolved::Here(folder.clone()));
    s.hub.verify = true;
    let Resolved::NotHere { damaged, .. } = s.hub.resolve(ID).unwrap() else { panic!("not seen") };
    assert_eq!(damaged[0].path, folder.join(WEIGHTS));
    let record = Record::default();
    assert_eq!(s.hub.pull(ID, &record).unwrap(), folder);
    same_as_fixture(&folder, "models/llama_plain", &[WEIGHTS]);
    let messages = record.messages.borrow().join("\n");
    assert!(messages.contains(WEIGHTS) && messages.contains("SHA-256"), "{messages}");
    assert_eq!(s.server.downloads("tokenizer.json").len(), 1);
}

#[test]
fn two_at_once_fetch_it_once() {
    let s = plain();
    let pull = || s.hub.pull(ID, &Silent).unwrap();
    let found: Vec<PathBuf> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(pull)).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(found.iter().all(|f| *f == found[0]));
    assert_eq!(s.server.downloads("tokenizer.json").len(), 1);
}

#[test]
fn an_index_cannot_lead_out_of_the_cache() {
    let s = plain();
    s.server.put(
        "model.safetensors.index.json",
        r#"{"weight_map": {"a": "../../../../../../evil.safetensors"}}"#,
    );
    let e = s.hub.pull(ID, &Silent).unwrap_err().to_string();
    assert!(e.contains("evil"), "{e}");
    s.server.set_commit("../../../../evil");
    let e = s.hub.pull(ID, &Silent).unwrap_err().to_string();
    assert!(e.contains("evil"), "{e}");
    let below = fs::read_dir(s.root.path()).unwrap().map(|e| e.unwrap().file_name());
    assert!(below.into_iter().all(|name| !name.to_string_lossy().contains("evil")));
}
