//! Whatever is sampled from the masks obeys the grammar.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test may fail by a panic.

mod support;

use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use serde_json::{Value, json};
use support::{Model, Random, SMALL, SMOLLM2, allowed, schema};
use yunta_grammar::{CallCount, CallTags, Constraint, Grammar};

fn leaf() -> impl Strategy<Value = Value> {
    let string = (0..3_u32, 3..6_u32)
        .prop_map(|(min, max)| json!({"type": "string", "minLength": min, "maxLength": max}));
    let integer = (-50..50_i32, 0..2000_i32)
        .prop_map(|(min, more)| json!({"type": "integer", "minimum": min, "maximum": min + more}));
    let names = vec![json!("red"), json!("a \"b\""), json!("ñ"), json!(7), json!(null)];
    let one_of = subsequence(names, 1..4).prop_map(|values| json!({"enum": values}));
    prop_oneof![
        string,
        integer,
        one_of,
        select(vec!["string", "integer", "boolean", "null"]).prop_map(|t| json!({"type": t})),
    ]
}

fn any_schema() -> impl Strategy<Value = Value> {
    leaf().prop_recursive(3, 16, 4, |inner| {
        let array = (inner.clone(), 0..3_u32, 0..3_u32).prop_map(|(items, min, more)| {
            json!({"type": "array", "items": items, "minItems": min, "maxItems": min + more})
        });
        let property = (select(vec!["a", "key", "two words", "é\\"]), inner.clone(), any::<bool>());
        let object =
            (prop::collection::vec(property, 0..4), any::<bool>()).prop_map(|(list, is_open)| {
                let mut properties = serde_json::Map::new();
                let mut required = Vec::new();
                for (name, schema, is_required) in list {
                    if properties.insert(name.to_owned(), schema).is_none() && is_required {
                        required.push(name);
                    }
                }
                let others = if is_open { json!({"type": "boolean"}) } else { json!(false) };
                json!({
                    "type": "object", "properties": properties, "required": required,
                    "additionalProperties": others,
                })
            });
        let either = (inner.clone(), inner).prop_map(|(a, b)| json!({"anyOf": [a, b]}));
        prop_oneof![array, object.clone(), object, either]
    })
}

fn obeys(model: &Model, wanted: &Value, seed: u64) {
    let tokens = model.walk(&mut model.start(&schema(wanted)), seed);
    let text = model.text(&tokens.unwrap_or_else(|| panic!("no end under {wanted}")));
    let value: Value =
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text:?} under {wanted}"));
    let validator = jsonschema::validator_for(wanted).unwrap();
    assert!(validator.is_valid(&value), "{text} under {wanted}");
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) }
}

proptest! {
    #![proptest_config(config(300))]
    #[test]
    fn any_walk_is_valid_under_its_schema(wanted in any_schema(), seed: u64) {
        obeys(&SMALL, &wanted, seed);
    }
}

proptest! {
    #![proptest_config(config(60))]
    #[test]
    fn so_it_is_with_a_real_vocabulary(wanted in any_schema(), seed: u64) {
        obeys(&SMOLLM2, &wanted, seed);
    }
}

#[test]
fn references_within_a_schema_are_followed() {
    let tree = json!({
        "$defs": {"node": {
            "type": "object", "additionalProperties": false, "required": ["name", "kids"],
            "properties": {
                "name": {"type": "string", "maxLength": 3},
                "kids": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/node"}},
            },
        }},
        "$ref": "#/$defs/node",
    });
    (0..20).for_each(|seed| obeys(&SMALL, &tree, seed));
}

#[test]
fn alternatives_told_apart_by_a_constant_may_be_one_of() {
    let variant = |kind, value| {
        json!({
            "type": "object", "required": ["kind", "value"], "additionalProperties": false,
            "properties": {"kind": {"const": kind}, "value": value},
        })
    };
    let union = json!({"oneOf": [
        variant("note", json!({"type": "string"})), variant("count", json!({"type": "integer"})),
    ]});
    (0..20).for_each(|seed| obeys(&SMALL, &union, seed));
}

#[test]
fn any_object_is_an_object() {
    for (model, seed) in [&*SMALL, &*SMOLLM2].into_iter().flat_map(|m| (0..20).map(move |s| (m, s)))
    {
        let tokens = model.walk(&mut model.start(&Grammar::JsonObject), seed).unwrap();
        let text = model.text(&tokens);
        assert!(text.trim_start().starts_with('{'), "{text}");
        // Numbers may be beyond any float, hence no value.
        serde_json::from_str::<serde::de::IgnoredAny>(&text).unwrap();
    }
}

#[test]
fn a_regex_matches_the_whole_output() {
    let regex = Grammar::Regex("(red|green|/)( (red|green|/)){0,3}\n?".to_owned());
    for seed in 0..50 {
        let text = SMOLLM2.text(&SMOLLM2.walk(&mut SMOLLM2.start(&regex), seed).unwrap());
        let words: Vec<&str> = text.strip_suffix('\n').unwrap_or(&text).split(' ').collect();
        assert!((1..=4).contains(&words.len()), "{text:?}");
        assert!(words.iter().all(|w| ["red", "green", "/"].contains(w)), "{text:?}");
    }
}

/// What is left of a text behind a sum of numbers and parentheses.
fn after_sum(text: &str) -> Option<&str> {
    let rest = match text.strip_prefix('(') {
        Some(inner) => after_sum(inner)?.strip_prefix(')')?,
        None => {
            let rest = text.trim_start_matches(|c: char| c.is_ascii_digit());
            Some(rest).filter(|rest| rest.len() < text.len())?
        }
    };
    match rest.strip_prefix('+') {
        Some(more) => after_sum(more),
        None => Some(rest),
    }
}

#[test]
fn a_lark_grammar_is_followed() {
    let sum = "start: sum\nsum: term (\"+\" term)*\nterm: NUMBER | \"(\" sum \")\"\n\
               NUMBER: /[0-9]+/\n";
    for seed in 0..50 {
        let mut constraint = SMOLLM2.start(&Grammar::Lark(sum.to_owned()));
        let text = SMOLLM2.text(&SMOLLM2.walk(&mut constraint, seed).unwrap());
        assert_eq!(after_sum(&text), Some(""), "{text:?}");
    }
}

const TAGS: CallTags<'static> = CallTags { open: "<tool_call>", close: "</tool_call>" };

fn call_schema() -> Value {
    json!({
        "type": "object", "required": ["name", "arguments"], "additionalProperties": false,
        "properties": {
            "name": {"const": "f"},
            "arguments": {
                "type": "object", "required": ["count"], "additionalProperties": false,
                "properties": {"count": {"type": "integer", "minimum": -9, "maximum": 99}},
            },
        },
    })
}

/// Whether each call in an output obeys the schema; how many there are.
fn count_calls(text: &str) -> usize {
    let validator = jsonschema::validator_for(&call_schema()).unwrap();
    let mut pieces = text.split(TAGS.open);
    pieces.next();
    pieces
        .map(|piece| {
            let (body, _) = piece.split_once(TAGS.close).unwrap_or_else(|| panic!("{text:?}"));
            let body = body.strip_prefix('\n').unwrap().strip_suffix('\n').unwrap();
            assert!(validator.is_valid(&serde_json::from_str(body).unwrap()), "{text:?}");
        })
        .count()
}

#[test]
fn calls_that_must_come_do() {
    for seed in 0..20 {
        for (count, most) in [(CallCount::One, 1), (CallCount::Several, 500)] {
            let grammar = Grammar::calls(TAGS, &call_schema(), count);
            let text = SMOLLM2.text(&SMOLLM2.walk(&mut SMOLLM2.start(&grammar), seed).unwrap());
            assert!(text.starts_with(TAGS.open), "{text:?}");
            assert!((1..=most).contains(&count_calls(&text)), "{text:?}");
        }
    }
}

/// A random walk would hardly write a tag: this one is made to, as often as it may.
#[test]
fn calls_amid_any_text_obey_their_schema() {
    let write = |constraint: &mut Constraint, text: &str| -> Option<Vec<u32>> {
        let tokens = SMOLLM2.tokenizer.encode(text, false).unwrap();
        for token in &tokens {
            if !allowed(constraint.mask().unwrap()).contains(token) {
                return None;
            }
            constraint.accept(*token).unwrap();
        }
        Some(tokens)
    };
    for (seed, count, most) in
        (0..15).flat_map(|s| [(s, CallCount::PerhapsOne, 1), (s, CallCount::Any, 3)])
    {
        let grammar = Grammar::calls(TAGS, &call_schema(), count);
        let mut constraint = SMOLLM2.start(&grammar);
        // What only begins as a tag does is text.
        let mut tokens = write(&mut constraint, "I\ncall <tool_<").unwrap();
        for i in 0..most {
            let tag = if i == 0 { "tool_call>\n{" } else { "\nand <tool_call>\n{" };
            tokens.extend(write(&mut constraint, tag).unwrap());
            let mut random = Random(seed);
            while SMOLLM2.text(&tokens).matches(TAGS.close).count() <= i {
                let token = SMOLLM2.choose(&allowed(constraint.mask().unwrap()), true, &mut random);
                constraint.accept(token).unwrap();
                tokens.push(token);
                assert!(tokens.len() < 1000, "{:?}", SMOLLM2.text(&tokens));
            }
        }
        assert!(allowed(constraint.mask().unwrap()).contains(&SMOLLM2.stop[0]));
        if count == CallCount::PerhapsOne {
            assert_eq!(write(&mut constraint, " <tool_call>"), None);
        }
        assert_eq!(count_calls(&SMOLLM2.text(&tokens)), most);
    }
}

#[test]
fn any_text_may_have_no_call() {
    for count in [CallCount::PerhapsOne, CallCount::Any] {
        let grammar = Grammar::calls(TAGS, &call_schema(), count);
        let mut constraint = SMOLLM2.start(&grammar);
        for token in SMOLLM2.tokenizer.encode("No: a < b, <tool_bar>.\n", false).unwrap() {
            let mask = allowed(constraint.mask().unwrap());
            assert!(mask.contains(&token) && mask.contains(&SMOLLM2.stop[0]));
            constraint.accept(token).unwrap();
        }
        assert!(allowed(constraint.mask().unwrap()).contains(&SMOLLM2.stop[0]));
    }
}
