//! Damaged and deceitful files: they are refused or read, but never panic, hang, or ask for more
//! memory than makes sense.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test may fail by a panic.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use support::{fixture, read_everything};
use tempfile::TempDir;
use yunta_checkpoint::Checkpoint;

/// A header of a fixture is smaller than this, its tensors larger.
const HEADER: usize = 8192;
/// No single request for memory may be larger: the files have less than a megabyte.
const REQUEST_BYTES_MAX: usize = 64 << 20;

/// Notes the largest request of each thread.
struct Watched;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

fn note(size: usize) {
    // A thread that ends has no more use for it.
    let _ = LARGEST.try_with(|largest| largest.set(largest.get().max(size)));
}

fn assert_modest() {
    let largest = LARGEST.get();
    assert!(largest <= REQUEST_BYTES_MAX, "{largest} bytes were asked for at once");
}

// SAFETY: all is left to the system's allocator.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: as our caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as our caller promises.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size);
        // SAFETY: as our caller promises.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

/// Writes the bytes and reads all that can be read of them; whether they were refused.
fn is_refused(path: &Path, bytes: &[u8], opened: &Path) -> bool {
    // A new file each time: the old one may still be mapped.
    let _ = std::fs::remove_file(path);
    std::fs::write(path, bytes).unwrap();
    let refused = read_everything(opened).is_err();
    assert_modest();
    refused
}

fn is_gguf_refused(folder: &TempDir, bytes: &[u8]) -> bool {
    let path = folder.path().join("m.gguf");
    is_refused(&path, bytes, &path)
}

/// A folder of links to a fixture, with one file that can be replaced.
fn folder(model: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture(model)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    folder
}

fn gguf_bytes() -> Vec<u8> {
    std::fs::read(fixture("gguf/llama-F16.gguf")).unwrap()
}

/// Values that counts, lengths, offsets and dimensions are most vulnerable to.
fn extreme() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(u64::MAX),
        Just(u64::MAX - 31),
        Just(1 << 63),
        Just(1 << 40),
        Just(u64::from(u32::MAX)),
        Just(0),
        (0..64u32).prop_map(|shift| 1 << shift),
        0..1024u64,
    ]
}

/// Changes to make at places of a file.
fn damage(limit: usize) -> impl Strategy<Value = Vec<(usize, Vec<u8>)>> {
    let bytes = prop_oneof![
        any::<u8>().prop_map(|b| vec![b]),
        extreme().prop_map(|n| n.to_le_bytes().to_vec()),
        extreme().prop_map(|n| (n as u32).to_le_bytes().to_vec()),
    ];
    prop::collection::vec((0..limit, bytes), 1..6)
}

fn apply(bytes: &mut [u8], changes: &[(usize, Vec<u8>)]) {
    for (at, new) in changes {
        bytes.iter_mut().skip(*at).zip(new).for_each(|(old, new)| *old = *new);
    }
}

#[test]
fn a_gguf_file_cut_anywhere_is_refused() {
    let (folder, bytes) = (tempfile::tempdir().unwrap(), gguf_bytes());
    let header = (0..HEADER).step_by(3);
    let data = (HEADER..bytes.len()).step_by(4099);
    for end in (0..512).chain(header).chain(data).chain([bytes.len() - 1]) {
        assert!(is_gguf_refused(&folder, &bytes[..end]), "cut at {end}");
    }
    assert!(!is_gguf_refused(&folder, &bytes));
}

#[test]
fn safetensors_cut_anywhere_are_refused() {
    let folder = folder("models/llama_plain");
    let path = folder.path().join("model.safetensors");
    let bytes = std::fs::read(&path).unwrap();
    for end in (0..bytes.len()).step_by(997).chain([1, 7, 8, 9, bytes.len() - 1]) {
        assert!(is_refused(&path, &bytes[..end], folder.path()), "cut at {end}");
    }
    assert!(!is_refused(&path, &bytes, folder.path()));
}

#[test]
fn every_count_of_a_gguf_header_may_lie() {
    let (folder, bytes) = (tempfile::tempdir().unwrap(), gguf_bytes());
    for at in (0..1024).chain((1024..HEADER).step_by(61)) {
        for lie in [u64::MAX, 1 << 40, 1 << 24] {
            let mut bytes = bytes.clone();
            apply(&mut bytes, &[(at, lie.to_le_bytes().to_vec())]);
            is_gguf_refused(&folder, &bytes);
        }
    }
}

#[test]
fn arrays_nested_without_end_are_refused() {
    let mut bytes = b"GGUF".to_vec();
    bytes.extend(3u32.to_le_bytes());
    bytes.extend(0u64.to_le_bytes());
    bytes.extend(1u64.to_le_bytes());
    bytes.extend(1u64.to_le_bytes());
    bytes.push(b'k');
    for _ in 0..100_000 {
        bytes.extend(9u32.to_le_bytes());
        bytes.extend(1u64.to_le_bytes());
    }
    assert!(is_gguf_refused(&tempfile::tempdir().unwrap(), &bytes));
}

#[test]
fn small_elements_in_great_numbers_are_refused_before_they_take_memory() {
    let folder = tempfile::tempdir().unwrap();
    let mut bytes = support::Gguf::new("llama").bytes();
    // A second pair: an array of 32 million booleans, all of which are there.
    bytes[16] = 2;
    bytes.truncate(24 + 8 + "general.architecture".len() + 4 + 8 + "llama".len());
    bytes.extend(1u64.to_le_bytes());
    bytes.push(b'k');
    bytes.extend(9u32.to_le_bytes());
    bytes.extend(7u32.to_le_bytes());
    bytes.extend((32u64 << 20).to_le_bytes());
    let path = folder.path().join("m.gguf");
    std::fs::write(&path, &bytes).unwrap();
    let length = bytes.len() as u64 + (32 << 20);
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(length).unwrap();
    let e = Checkpoint::open(&path).err().unwrap().to_string();
    assert!(e.contains("elements"), "{e}");
    assert_modest();
}

#[test]
fn a_hostile_template_comes_to_an_end() {
    let folder = folder("models/llama_f16");
    for template in [
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ range(10 ** 18) | list | length }}",
        "{{ 'x' * 10 ** 12 }}",
        "{% for i in range(10000) %}{{ 'x' * 100000 }}{% endfor %}",
        "{% include 'default' %}",
        "{% extends 'default' %}",
        "{{ messages | tojson(indent=10 ** 12) }}",
    ] {
        std::fs::write(folder.path().join("chat_template.jinja"), template).unwrap();
        let template = Checkpoint::open(folder.path()).unwrap().chat_template();
        // What it says does not matter.
        let _ = template.map(|t| t.unwrap().render(&json!([]), None, true, &Map::new()));
    }
    let depth = 20_000;
    let nested = format!("{}1{}", "{{ (".repeat(depth), ")".repeat(depth));
    std::fs::write(folder.path().join("chat_template.jinja"), nested).unwrap();
    assert!(Checkpoint::open(folder.path()).unwrap().chat_template().is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_damaged_gguf_header_is_survived(changes in damage(HEADER)) {
        let mut bytes = gguf_bytes();
        apply(&mut bytes, &changes);
        is_gguf_refused(&tempfile::tempdir().unwrap(), &bytes);
    }

    #[test]
    fn bits_of_a_gguf_header_may_flip(at in 0..HEADER, bit in 0..8u32) {
        let mut bytes = gguf_bytes();
        bytes[at] ^= 1 << bit;
        is_gguf_refused(&tempfile::tempdir().unwrap(), &bytes);
    }

    #[test]
    fn noise_behind_the_magic_is_survived(noise in prop::collection::vec(any::<u8>(), 0..512)) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(noise);
        prop_assert!(is_gguf_refused(&tempfile::tempdir().unwrap(), &bytes));
    }

    #[test]
    fn damaged_safetensors_are_survived(changes in damage(2048)) {
        let folder = folder("models/llama_f16");
        let path = folder.path().join("model.safetensors");
        let mut bytes = std::fs::read(&path).unwrap();
        apply(&mut bytes, &changes);
        is_refused(&path, &bytes, folder.path());
    }

    #[test]
    fn damaged_text_files_are_survived(
        file in prop::sample::select(vec!["tokenizer.json", "tokenizer_config.json", "config.json"]),
        changes in damage(9000),
        end in 0..20_000usize,
    ) {
        let folder = folder("models/llama_f16");
        let path = folder.path().join(file);
        let mut bytes = std::fs::read(&path).unwrap();
        apply(&mut bytes, &changes);
        bytes.truncate(end);
        is_refused(&path, &bytes, folder.path());
    }

    #[test]
    fn a_tokenizer_with_wrong_values_is_survived(
        key in prop::sample::select(vec![
            "normalizer", "pre_tokenizer", "post_processor", "decoder", "model", "added_tokens",
        ]),
        value in prop_oneof![
            Just(Value::Null), Just(json!([])), Just(json!({})), Just(json!("x")), Just(json!(-1)),
            Just(json!({"type": "Strip", "content": " ", "start": 1, "stop": 9})),
            Just(json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"})),
            Just(json!({"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"})),
            Just(json!({"type": "BPE", "vocab": {"a": 4294967295u32}, "merges": [["a", "b"]]})),
            Just(json!({"type": "Unigram", "unk_id": 7, "vocab": []})),
            Just(json!([{"id": 4294967295u32, "content": "", "single_word": false,
                "lstrip": true, "rstrip": true, "normalized": true, "special": true}])),
        ],
    ) {
        let folder = folder("models/llama_f16");
        let path = folder.path().join("tokenizer.json");
        let mut tokenizer: Value = support::json(&path);
        tokenizer[key] = value;
        is_refused(&path, tokenizer.to_string().as_bytes(), folder.path());
    }
}
