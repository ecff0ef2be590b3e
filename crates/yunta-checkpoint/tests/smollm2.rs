//! The tokenizer and template of a real GGUF file, against what `transformers` makes of it.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test may fail by a panic.

mod support;

use std::path::PathBuf;
use std::sync::LazyLock;

use serde_json::{Map, Value, json};
use support::{fixture, json as read};
use yunta_checkpoint::{Checkpoint, Tokenizer};

static REFERENCE: LazyLock<Value> = LazyLock::new(|| read(&fixture("tokenizer/smollm2.json")));
static MODEL: LazyLock<Checkpoint> = LazyLock::new(|| Checkpoint::open(&path()).unwrap());

fn path() -> PathBuf {
    const CACHED: &str =
        ".cache/yunta/models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf";
    let path = std::env::var_os("YUNTA_SMOLLM2")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(CACHED)))
        .unwrap_or_default();
    assert!(
        path.is_file(),
        "`{}` is not there: run `cargo xtask test`, which fetches it, or set YUNTA_SMOLLM2",
        path.display()
    );
    path
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> String {
    let mut stream = tokenizer.stream_decoder(skip_special);
    let text: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    text + &stream.flush().unwrap()
}

#[test]
fn every_text_has_the_tokens_of_the_reference() {
    let tokenizer = MODEL.tokenizer().unwrap();
    assert_eq!(json!(tokenizer.vocab_size()), REFERENCE["vocab_size"]);
    let cases = REFERENCE["strings"].as_array().unwrap();
    assert!(cases.len() >= 60);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let ids = tokenizer.encode(text, false).unwrap();
        assert_eq!(json!(ids), case["ids"], "{text:?}");
        assert_eq!(json!(tokenizer.encode(text, true).unwrap()), case["with_special"], "{text:?}");
        for (skip_special, decoded) in [(false, "decoded"), (true, "decoded_skip_special")] {
            let decoded = case[decoded].as_str().unwrap();
            assert_eq!(tokenizer.decode(&ids, skip_special).unwrap(), decoded);
            assert_eq!(streamed(&tokenizer, &ids, skip_special), decoded);
        }
        let bytes: Vec<u8> =
            ids.iter().flat_map(|id| tokenizer.token_bytes(*id).unwrap()).collect();
        assert_eq!(bytes, text.as_bytes());
    }
}

#[test]
fn every_conversation_is_rendered_as_in_the_reference() {
    let (tokenizer, template) = (MODEL.tokenizer().unwrap(), MODEL.chat_template().unwrap());
    let template = template.unwrap();
    let chats = REFERENCE["chats"].as_array().unwrap();
    assert!(!chats.is_empty());
    for chat in chats {
        let tools = Some(&chat["tools"]).filter(|tools| !tools.is_null());
        let prompt = chat["add_generation_prompt"].as_bool().unwrap();
        let text = template.render(&chat["messages"], tools, prompt, &Map::new()).unwrap();
        assert_eq!(json!(text), chat["rendered"]);
        assert_eq!(json!(tokenizer.encode(&text, false).unwrap()), chat["ids"]);
    }
}

#[test]
fn special_tokens_are_those_of_the_reference() {
    let tokenizer = MODEL.tokenizer().unwrap();
    for (token, id) in REFERENCE["control_tokens"].as_object().unwrap() {
        let id = id.as_u64().unwrap() as u32;
        assert_eq!(tokenizer.token_to_id(token), Some(id));
        assert_eq!(tokenizer.id_to_token(id).as_ref(), Some(token));
        assert!(tokenizer.is_special(id));
    }
    assert!(!tokenizer.is_special(1000));
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (Some(1), Some(2)));
    // <|im_start|>, which begins a turn, ends none.
    assert_eq!(MODEL.stop_tokens(), [2]);
    assert_eq!((tokenizer.token_bytes(u32::MAX), tokenizer.id_to_token(u32::MAX)), (None, None));
}

#[test]
fn a_stream_of_any_tokens_is_what_decoding_makes_of_them() {
    let tokenizer = MODEL.tokenizer().unwrap();
    // All tokens, near ones and far ones beside each other; some are halves of characters.
    for stride in [1, 7919, 31337] {
        let ids: Vec<u32> = (0..20_000u32).map(|i| (i * stride) % 49_200).collect();
        for skip_special in [false, true] {
            let whole = tokenizer.decode(&ids, skip_special).unwrap();
            assert!(streamed(&tokenizer, &ids, skip_special) == whole, "stride {stride}");
        }
    }
}

#[test]
fn the_configuration_is_that_of_the_model() {
    let config = MODEL.config();
    for (field, expected) in [
        ("model_type", json!("llama")),
        ("hidden_size", json!(576)),
        ("intermediate_size", json!(1536)),
        ("num_hidden_layers", json!(30)),
        ("num_attention_heads", json!(9)),
        ("num_key_value_heads", json!(3)),
        ("head_dim", json!(64)),
        ("vocab_size", json!(49152)),
        ("tie_word_embeddings", json!(true)),
        ("rope_theta", json!(100_000.0)),
    ] {
        assert_eq!(config[field], expected, "{field}");
    }
}
