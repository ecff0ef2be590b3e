//! The text of an output does not depend on where its tokens end.
#![allow(clippy::unwrap_used, clippy::panic)] // also in helpers of tests

mod common;

use common::byte_text::{BOS, ByteText};
use proptest::prelude::*;
use yunta_api::TextModel;
use yunta_api::text::{Delta, StopStrings, TextAssembler};
use yunta_engine::TokenLogprobs;

/// What a reader of single characters shows: everything until a stop string is complete, without it.
fn reference(tokens: &[u32], stops: &[String]) -> (String, bool) {
    let bytes: Vec<u8> = tokens.iter().filter_map(|&token| u8::try_from(token).ok()).collect();
    let mut read = String::new();
    for character in String::from_utf8_lossy(&bytes).chars() {
        read.push(character);
        let complete = stops.iter().filter(|stop| read.ends_with(*stop));
        if let Some(stop) = complete.max_by_key(|stop| stop.len()) {
            read.truncate(read.len() - stop.len());
            return (read, true);
        }
    }
    (read, false)
}

fn run(tokens: &[u32], stops: &[String]) -> (Vec<Delta>, bool) {
    let stops = StopStrings::new(stops.to_vec());
    let mut assembler = TextAssembler::new(ByteText.decoder(), stops);
    let mut deltas = Vec::new();
    for &token in tokens {
        let logprobs = TokenLogprobs { chosen: -1.0, top: Vec::new() };
        let listed = (!ByteText.is_special(token)).then_some(logprobs);
        let step = assembler.push(token, listed).unwrap();
        deltas.push(step.delta);
        if step.stopped {
            return (deltas, true);
        }
    }
    let step = assembler.finish().unwrap();
    deltas.push(step.delta);
    (deltas, step.stopped)
}

fn token() -> impl Strategy<Value = u32> {
    // Few letters, so that stop strings are met; pieces of characters; special tokens.
    prop_oneof![
        6 => 97u32..=99,
        1 => Just(0xC3u32),
        1 => Just(0xA9u32),
        1 => any::<u8>().prop_map(u32::from),
        1 => Just(BOS),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(2000) })]

    #[test]
    fn deltas_make_the_text_of_a_reader_of_characters(
        tokens in prop::collection::vec(token(), 0..40),
        stops in prop::collection::vec("[abcé]{1,4}", 0..4),
    ) {
        let (deltas, stopped) = run(&tokens, &stops);
        let text: String = deltas.iter().map(|delta| delta.text.as_str()).collect();
        prop_assert_eq!((text.clone(), stopped), reference(&tokens, &stops));
        for stop in &stops {
            prop_assert!(!text.contains(stop));
        }
    }

    #[test]
    fn tokens_come_in_order_with_the_text_they_begin_in(
        tokens in prop::collection::vec(token(), 0..40),
        stops in prop::collection::vec("[abcé]{1,4}", 0..4),
    ) {
        let (deltas, stopped) = run(&tokens, &stops);
        let mut shown = 0;
        let mut listed = Vec::new();
        for delta in &deltas {
            let end = shown + delta.text.chars().count();
            for placed in &delta.tokens {
                prop_assert!((shown..end).contains(&placed.offset));
                listed.push(placed.token);
            }
            shown = end;
        }
        let plain: Vec<u32> = tokens.iter().copied().filter(|&t| !ByteText.is_special(t)).collect();
        prop_assert!(plain.starts_with(&listed));
        prop_assert!(stopped || plain == listed);
    }
}

#[test]
fn text_is_held_only_while_a_stop_string_can_begin_in_it() {
    let tokens: Vec<u32> = "abxSTabSTOP".bytes().map(u32::from).collect();
    let (deltas, stopped) = run(&tokens, &["STOP".to_owned()]);
    let texts: Vec<&str> = deltas.iter().map(|delta| delta.text.as_str()).collect();
    assert_eq!(texts, ["a", "b", "x", "", "", "STa", "b", "", "", "", ""]);
    assert!(stopped);
}
