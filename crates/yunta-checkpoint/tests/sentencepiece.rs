//! Tokenizers of SentencePiece's kind, from GGUF metadata.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test may fail by a panic.

mod support;

use support::{Gguf, Value};
use yunta_checkpoint::Tokenizer;

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const BYTE: i32 = 6;

/// `<unk>`, `<s>`, `</s>`, 256 bytes, then these pieces with falling scores.
fn tokenizer(pieces: &[(&str, i32)], space_prefix: bool) -> Tokenizer {
    let mut tokens = vec![
        ("<unk>".to_owned(), UNKNOWN),
        ("<s>".to_owned(), CONTROL),
        ("</s>".to_owned(), CONTROL),
    ];
    tokens.extend((0..=255).map(|b| (format!("<0x{b:02X}>"), BYTE)));
    tokens.extend(pieces.iter().map(|(text, kind)| ((*text).to_owned(), *kind)));
    let scores = (0..tokens.len()).map(|i| -(i as f32)).collect();
    let (tokens, kinds): (Vec<String>, Vec<i32>) = tokens.into_iter().unzip();
    Gguf::new("llama")
        .with("tokenizer.ggml.model", Value::Text("llama".into()))
        .with("tokenizer.ggml.tokens", Value::Texts(tokens))
        .with("tokenizer.ggml.scores", Value::F32s(scores))
        .with("tokenizer.ggml.token_type", Value::I32s(kinds))
        .with("tokenizer.ggml.bos_token_id", Value::U32(1))
        .with("tokenizer.ggml.eos_token_id", Value::U32(2))
        .with("tokenizer.ggml.unknown_token_id", Value::U32(0))
        .with("tokenizer.ggml.add_space_prefix", Value::Bool(space_prefix))
        .open()
        .unwrap()
        .tokenizer()
        .unwrap()
}

/// Ids from 259 on: "▁t" 259, "he" 260, "▁the" 261, "▁" 262, "t" 263, "h" 264, "e" 265, "▁▁" 266.
const PIECES: [(&str, i32); 8] = [
    ("▁t", NORMAL),
    ("he", NORMAL),
    ("▁the", NORMAL),
    ("▁", NORMAL),
    ("t", NORMAL),
    ("h", NORMAL),
    ("e", NORMAL),
    ("▁▁", NORMAL),
];

fn streamed(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> String {
    let mut stream = tokenizer.stream_decoder(skip_special);
    let text: String = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    text + &stream.flush().unwrap()
}

#[test]
fn pieces_are_joined_by_score_and_text_begins_with_a_space() {
    let tokenizer = tokenizer(&PIECES, true);
    assert_eq!(tokenizer.encode("the the", false).unwrap(), [261, 261]);
    assert_eq!(tokenizer.encode("the", true).unwrap(), [1, 261]);
    assert_eq!(tokenizer.encode("", false).unwrap(), [0u32; 0]);
    // Behind a special token text begins anew.
    assert_eq!(tokenizer.encode("the</s>the", false).unwrap(), [261, 2, 261]);
}

#[test]
fn without_the_prefix_text_stays_as_it_is() {
    let tokenizer = tokenizer(&PIECES, false);
    assert_eq!(tokenizer.encode("the the", false).unwrap(), [263, 260, 261]);
    assert_eq!(tokenizer.decode(&[261], false).unwrap(), " the");
    assert_eq!(streamed(&tokenizer, &[261, 261], false), " the the");
}

#[test]
fn unknown_characters_are_spelled_in_bytes() {
    let tokenizer = tokenizer(&PIECES, true);
    // é is C3 A9: bytes begin at 3.
    let ids = tokenizer.encode("é", false).unwrap();
    assert_eq!(ids, [262, 3 + 0xC3, 3 + 0xA9]);
    assert_eq!(tokenizer.token_bytes(3 + 0xC3).unwrap(), [0xC3]);
    let mut stream = tokenizer.stream_decoder(true);
    let pieces: Vec<String> = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    assert_eq!(pieces, ["", "", "é"]);
    assert_eq!(stream.flush().unwrap(), "");
}

#[test]
fn a_stream_of_pieces_is_what_decoding_makes_of_them() {
    let tokenizer = tokenizer(&PIECES, true);
    let (c3, a9) = (3 + 0xC3, 3 + 0xA9);
    for ids in [
        &[261, 261][..],
        &[266, 261, 266],
        &[262, 262, 263],
        &[1, 261, 2, 261],
        &[c3, a9, 262, 263],
        // Half a character, then text, then half a character.
        &[c3, 263, c3],
        &[a9, a9, 263],
        &[u32::MAX, 261],
    ] {
        for skip_special in [false, true] {
            let whole = tokenizer.decode(ids, skip_special).unwrap();
            assert_eq!(streamed(&tokenizer, ids, skip_special), whole, "{ids:?}");
        }
    }
}

#[test]
fn user_defined_tokens_are_text_that_is_matched_first() {
    let mut pieces = PIECES.to_vec();
    pieces.push(("  ", USER_DEFINED));
    let tokenizer = tokenizer(&pieces, false);
    assert_eq!(tokenizer.encode("  the", false).unwrap(), [267, 263, 260]);
    assert!(!tokenizer.is_special(267));
    assert_eq!(tokenizer.decode(&[267], true).unwrap(), "  ");
}

#[test]
fn what_is_missing_is_named() {
    let e = Gguf::new("llama").open().unwrap().tokenizer().err().unwrap().to_string();
    assert!(e.contains("tokenizer.ggml.tokens"), "{e}");
    let gguf = |model: &str| {
        Gguf::new("llama")
            .with("tokenizer.ggml.model", Value::Text(model.into()))
            .with("tokenizer.ggml.tokens", Value::Texts(vec!["a".into()]))
            .with("tokenizer.ggml.pre", Value::Text("no-such".into()))
    };
    let refused = |gguf: &Gguf| gguf.open().unwrap().tokenizer().err().unwrap().to_string();
    assert!(refused(&gguf("bert")).contains("`bert`"));
    assert!(refused(&gguf("gpt2")).contains("`no-such`"));
    assert!(refused(&gguf("llama")).contains("0 scores for 1 tokens"));
}
