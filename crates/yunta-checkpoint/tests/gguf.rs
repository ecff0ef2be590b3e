//! GGUF files: those of the fixtures, and such as must be refused.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test may fail by a panic.

mod support;

use support::{Gguf, Value, fixture, ggufs, json};
use yunta_checkpoint::{Checkpoint, CheckpointError, Format};

/// Why a file is refused.
fn refusal(gguf: &Gguf) -> String {
    gguf.open().err().expect("it must be refused").to_string()
}

#[test]
fn fixtures_have_the_configuration_and_types_of_their_reference() {
    for path in ggufs() {
        let reference = json(&path.with_extension("reference.json"));
        let checkpoint = Checkpoint::open(&path).unwrap();
        assert_eq!(checkpoint.format(), Format::Gguf);
        for (field, expected) in reference["hf_config"].as_object().unwrap() {
            let got = &checkpoint.config()[field];
            // GGUF holds f32.
            let same = match (got.as_f64(), expected.as_f64()) {
                (Some(got), Some(expected)) => (got - expected).abs() <= 1e-6 * expected.abs(),
                // How scaling of frequencies is stored is another matter: as factors.
                _ if field == "rope_scaling" => checkpoint.contains("rope_freqs.weight"),
                _ => got == expected,
            };
            assert!(same, "{}: {field}: {got} for {expected}", path.display());
        }
        let types = reference["tensor_types"].as_object().unwrap();
        assert_eq!(types.len(), checkpoint.names().count());
        let embedding = checkpoint.tensor("model.embed_tokens.weight").unwrap();
        assert_eq!(embedding.dtype().to_string(), types["token_embd.weight"].as_str().unwrap());
        assert_eq!(embedding.shape()[0], embedding.rows());
        let total: usize = checkpoint
            .names()
            .map(|name| checkpoint.tensor(name).unwrap().bytes().unwrap().len())
            .sum();
        assert_eq!(total as u64, checkpoint.total_bytes());
    }
}

#[test]
fn the_text_side_of_a_fixture_is_that_of_its_metadata() {
    let checkpoint = Checkpoint::open(&fixture("gguf/llama-F16.gguf")).unwrap();
    let tokenizer = checkpoint.tokenizer().unwrap();
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.vocab_size()), (Some(0), Some(1), 320));
    assert!(checkpoint.stop_tokens().contains(&1));
    // The fixtures of both formats share a tokenizer.
    let reference = json(&fixture("models/llama_plain/reference.json"));
    for case in reference["tokenizer_checks"].as_array().unwrap() {
        let ids = tokenizer.encode(case["text"].as_str().unwrap(), false).unwrap();
        assert_eq!(serde_json::json!(ids), case["ids"]);
    }
    assert!(checkpoint.chat_template().unwrap().is_some());
}

/// A matrix of 8 rows of 2 bytes, which are the number of the row.
fn rows() -> Vec<u8> {
    (0..8).flat_map(|r| [r, r]).collect()
}

fn attention(architecture: &str) -> Gguf {
    const I8: u32 = 24;
    Gguf::new(architecture)
        .with(&format!("{architecture}.attention.head_count"), Value::U32(2))
        .with(&format!("{architecture}.attention.head_count_kv"), Value::U32(1))
        .tensor("blk.0.attn_q.weight", &[2, 8], I8, &rows())
        .tensor("blk.0.attn_k.weight", &[2, 8], I8, &rows())
        .tensor("blk.0.attn_v.weight", &[2, 8], I8, &rows())
        .tensor("blk.0.attn_q.bias", &[8], I8, &[0, 1, 2, 3, 4, 5, 6, 7])
}

#[test]
fn rows_of_queries_and_keys_are_in_the_order_of_hugging_face() {
    let checkpoint = attention("llama").open().unwrap();
    let order = |name: &str| -> Vec<u8> {
        let tensor = checkpoint.tensor(&format!("model.layers.0.self_attn.{name}")).unwrap();
        (0..tensor.rows()).map(|r| tensor.row(r).unwrap()[0]).collect()
    };
    // numpy: arange(8).reshape(heads, d // 2, 2).swapaxes(1, 2), the inverse of llama.cpp's.
    assert_eq!(order("q_proj.weight"), [0, 2, 1, 3, 4, 6, 5, 7]);
    assert_eq!(order("k_proj.weight"), [0, 2, 4, 6, 1, 3, 5, 7]);
    assert_eq!(order("v_proj.weight"), [0, 1, 2, 3, 4, 5, 6, 7]);
    let bias = checkpoint.tensor("model.layers.0.self_attn.q_proj.bias").unwrap();
    assert_eq!(*bias.bytes().unwrap(), [0, 2, 1, 3, 4, 6, 5, 7]);
    assert_eq!(checkpoint.config()["attention_bias"], true);
    assert_eq!(checkpoint.config()["mlp_bias"], false);

    let qwen = attention("qwen2").open().unwrap();
    let tensor = qwen.tensor("model.layers.0.self_attn.q_proj.weight").unwrap();
    assert_eq!(*tensor.bytes().unwrap(), rows());
}

#[test]
fn rows_that_are_no_heads_can_not_be_read_out_of_order() {
    let gguf = Gguf::new("llama").with("llama.attention.head_count", Value::U32(3)).tensor(
        "blk.0.attn_q.weight",
        &[2, 8],
        24,
        &rows(),
    );
    let checkpoint = gguf.open().unwrap();
    let e = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight").err().unwrap();
    assert!(e.to_string().contains("8 rows are not 3 heads"), "{e}");
}

#[test]
fn a_type_we_do_not_know_is_an_error_of_its_tensor_alone() {
    let gguf = Gguf::new("llama").tensor("strange.weight", &[256], 16, &[0; 66]).tensor(
        "plain.weight",
        &[4],
        24,
        &[1, 2, 3, 4],
    );
    let checkpoint = gguf.open().unwrap();
    assert_eq!(checkpoint.tensor("plain.weight").unwrap().row(0).unwrap(), [1, 2, 3, 4]);
    let e = checkpoint.tensor("strange.weight").err().unwrap().to_string();
    assert!(e.contains("strange.weight") && e.contains("type 16"), "{e}");
    let e = checkpoint.tensor("absent").err().unwrap();
    assert!(matches!(&e, CheckpointError::Missing { .. }) && e.to_string().contains("model.gguf"));
}

#[test]
fn headers_of_other_kinds_are_named() {
    let mut gguf = Gguf::new("llama");
    gguf.magic = *b"GGML";
    assert!(refusal(&gguf).contains("does not start with"));
    gguf.magic = *b"GGUF";
    for (version, reason) in [(1, "version 1"), (3 << 24, "big-endian"), (9, "version 9")] {
        gguf.version = version;
        assert!(refusal(&gguf).contains(reason));
    }
    gguf.version = 2;
    assert!(gguf.open().is_ok());
}

#[test]
fn lies_about_tensors_are_found() {
    let tensor = |dims: &[u64], kind, offset| {
        let mut gguf = Gguf::new("llama").tensor("a", &[32], 24, &[0; 32]);
        gguf.tensors.push(("b".to_owned(), dims.to_vec(), kind, offset));
        gguf.data.resize(64, 0);
        refusal(&gguf)
    };
    assert!(tensor(&[32], 24, 0).contains("overlaps"));
    assert!(tensor(&[33], 24, 32).contains("behind the end"));
    assert!(tensor(&[32], 24, 1 << 40).contains("behind the end"));
    assert!(tensor(&[32], 24, u64::MAX - 31).contains("behind the end"));
    assert!(tensor(&[32], 99, 1 << 40).contains("behind the end"));
    assert!(tensor(&[32], 24, 33).contains("aligned"));
    assert!(tensor(&[1 << 32, 1 << 32], 24, 32).contains("overflow"));
    assert!(tensor(&[u64::MAX], 0, 32).contains("overflow"));
    assert!(tensor(&[0, 1 << 40], 24, 32).contains("make no sense"));
    assert!(tensor(&[33], 8, 32).contains("no whole blocks"));
    assert!(tensor(&[], 24, 32).contains("0 dimensions"));
    assert!(tensor(&[1; 5], 24, 32).contains("5 dimensions"));

    let twice = Gguf::new("llama").tensor("a", &[1], 24, &[0]).tensor("a", &[1], 24, &[0]);
    assert!(refusal(&twice).contains("twice"));
    // Two names for the same thing.
    let twice = Gguf::new("llama").tensor("output.weight", &[1], 24, &[0]).tensor(
        "lm_head.weight",
        &[1],
        24,
        &[0],
    );
    assert!(refusal(&twice).contains("twice"));
}

#[test]
fn lies_in_metadata_are_found() {
    let twice = Gguf::new("llama").with("a", Value::U32(1)).with("a", Value::U32(2));
    assert!(refusal(&twice).contains("twice"));
    let alignment = Gguf::new("llama").with("general.alignment", Value::U32(24));
    assert!(refusal(&alignment).contains("alignment"));
    let mut nameless = Gguf::new("llama");
    nameless.metadata.clear();
    assert!(refusal(&nameless).contains("general.architecture"));
    let per_layer =
        Gguf::new("llama").with("llama.attention.head_count_kv", Value::I32s(vec![2, 4]));
    assert!(refusal(&per_layer).contains("head_count_kv"));
}

#[test]
fn a_model_in_parts_is_one_model() {
    let part = |no: u32, name: &str| {
        Gguf::new("llama")
            .with("split.no", Value::U32(no))
            .with("split.count", Value::U32(2))
            .tensor(name, &[1], 24, &[no as u8 + 1])
    };
    let folder = tempfile::tempdir().unwrap();
    let path = |no| folder.path().join(format!("m-{no:05}-of-00002.gguf"));
    std::fs::write(path(1), part(0, "one").bytes()).unwrap();
    let e = Checkpoint::open(&path(1)).err().unwrap().to_string();
    assert!(e.contains("m-00002-of-00002.gguf"), "the missing part is named: {e}");

    std::fs::write(path(2), part(1, "two").bytes()).unwrap();
    for opened in [path(1), folder.path().to_owned()] {
        let checkpoint = Checkpoint::open(&opened).unwrap();
        assert_eq!(checkpoint.tensor("one").unwrap().row(0).unwrap(), [1]);
        assert_eq!(checkpoint.tensor("two").unwrap().row(0).unwrap(), [2]);
    }
    assert!(Checkpoint::open(&path(2)).err().unwrap().to_string().contains("part 2 of 2"));

    std::fs::write(path(2), part(1, "one").bytes()).unwrap();
    assert!(Checkpoint::open(&path(1)).err().unwrap().to_string().contains("twice"));
}

#[test]
fn paths_that_are_no_checkpoint_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let reason = |path: &std::path::Path| Checkpoint::open(path).err().unwrap().to_string();
    assert!(reason(&folder.path().join("none")).contains("no such file"));
    assert!(reason(folder.path()).contains("neither"));
    let bytes = Gguf::new("llama").bytes();
    std::fs::write(folder.path().join("a.gguf"), &bytes).unwrap();
    assert!(Checkpoint::open(folder.path()).is_ok());
    std::fs::write(folder.path().join("b.gguf"), &bytes).unwrap();
    assert!(reason(folder.path()).contains("several"));
    std::fs::write(folder.path().join("empty.gguf"), "").unwrap();
    assert!(reason(&folder.path().join("empty.gguf")).contains("empty"));
}
