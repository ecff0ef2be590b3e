//! What is wrong with a grammar is said; nothing panics, hangs or overflows.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test may fail by a panic.

mod support;

use std::fmt::Write as _;
use std::time::Instant;

use serde_json::{Value, json};
use support::{Random, SMALL, SMOLLM2, allowed, schema};
use yunta_grammar::{Grammar, GrammarCompiler, GrammarError, MAX_GRAMMAR_BYTES};

fn refused(grammar: &Grammar) -> String {
    let error = SMALL.compiler.start(grammar).err().unwrap();
    assert!(error.is_of_the_request(), "{error}");
    error.to_string()
}

fn lark(text: &str) -> Grammar {
    Grammar::Lark(text.to_owned())
}

#[test]
fn what_is_wrong_is_said() {
    let text = |text: &str| Grammar::JsonSchema(text.to_owned());
    for (grammar, part) in [
        (text("{\"type\": "), "JSON schema: EOF"),
        (text("7"), "JSON schema: "),
        (schema(&json!({"type": "nonsense"})), "nonsense"),
        (schema(&json!({"type": "object", "if": {}, "then": {}})), "if"),
        (schema(&json!({"type": "array", "uniqueItems": true})), "uniqueItems"),
        (schema(&json!({"not": {"type": "string"}})), "not"),
        (schema(&json!({"$ref": "#/$defs/none"})), "none"),
        (schema(&json!({"$ref": "https://example.com/schema"})), "example.com"),
        (schema(&json!({"type": "string", "pattern": "("})), "JSON schema: "),
        (schema(&json!({"enum": []})), "JSON schema: "),
        (Grammar::Regex("(a".to_owned()), "regular expression: "),
        (Grammar::Regex("a{2,1}".to_owned()), "regular expression: "),
        (lark("start: \"a"), "Lark grammar: "),
        (lark("start: missing"), "missing"),
        (lark("other: \"a\""), "start"),
        (lark(""), "Lark grammar: "),
    ] {
        let said = refused(&grammar);
        assert!(said.contains(part), "{grammar:?}: {said}");
        assert!(!said.contains("state>") && !said.contains("verbose"), "{said}");
        println!("{said}");
    }
}

#[test]
fn a_text_too_long_is_not_read() {
    let long = " ".repeat(MAX_GRAMMAR_BYTES + 1);
    for grammar in [Grammar::JsonSchema(long.clone()), Grammar::Regex(long.clone()), lark(&long)] {
        let error = SMALL.compiler.start(&grammar).err().unwrap();
        assert!(matches!(error, GrammarError::TooLong { bytes, .. } if bytes == long.len()));
    }
}

fn nested(levels: usize, inner: Value, wrap: impl Fn(Value) -> Value) -> Value {
    (0..levels).fold(inner, |schema, _| wrap(schema))
}

fn schemas() -> Vec<(&'static str, Value)> {
    let either = |n: usize, salt: usize| {
        let option = |i| json!({"properties": {(format!("p{salt}_{i}")): {"type": "string"}}});
        json!({"anyOf": (0..n).map(option).collect::<Vec<_>>()})
    };
    let chain = |n: usize, wrap: fn(Value) -> Value| {
        let link = |i| (format!("d{i}"), wrap(json!({"$ref": format!("#/$defs/d{}", i + 1)})));
        let links = (0..n).map(link).chain([(format!("d{n}"), json!({"type": "null"}))]);
        let links: serde_json::Map<String, Value> = links.collect();
        json!({"$defs": links, "$ref": "#/$defs/d0"})
    };
    let inner = |s| json!({"anyOf": [{"type": "array", "items": s}, {"type": "object"}]});
    let doubling: serde_json::Map<String, Value> = (0..40)
        .map(|i| {
            let next = json!({"$ref": format!("#/$defs/d{}", i + 1)});
            (format!("d{i}"), json!({"allOf": [next, next]}))
        })
        .chain([("d40".to_owned(), json!({"type": "string"}))])
        .collect();
    let property = |i| (format!("property{i}"), json!({"type": "string", "maxLength": i}));
    let wide = |n: u32| {
        let properties: serde_json::Map<String, Value> = (0..n).map(property).collect();
        json!({"type": "object", "properties": properties})
    };
    let variant = |i| json!({"type": "object", "properties": {"kind": {"const": format!("k{i}")}}, "required": ["kind"]});
    let patterns: serde_json::Map<String, Value> =
        (0..64).map(|i| (format!("^x{i}_[a-z]*$"), json!({}))).collect();
    vec![
        ("product", json!({"allOf": (0..12).map(|i| either(20, i)).collect::<Vec<_>>()})),
        ("chain", chain(20_000, |s| s)),
        ("allowed chain", chain(3999, |s| s)),
        ("chain of arrays", chain(3999, |s| json!({"type": "array", "items": s}))),
        ("chain of eithers", chain(3999, inner)),
        ("chain of all", chain(3999, |s| json!({"allOf": [s, {}]}))),
        ("doubling", json!({"$defs": doubling, "$ref": "#/$defs/d0"})),
        ("loop", json!({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})),
        ("loop of all", json!({"allOf": [{"$ref": "#"}, {"type": "object"}]})),
        ("loop of any", json!({"anyOf": [{"$ref": "#"}, {"type": "object"}]})),
        ("wide", wide(10_000)),
        ("allowed wide", wide(1000)),
        ("few optional", wide(300)),
        ("one of", json!({"oneOf": (0..100).map(variant).collect::<Vec<_>>()})),
        ("any of", json!({"anyOf": (0..9000).map(variant).collect::<Vec<_>>()})),
        ("many patterns", json!({"patternProperties": patterns})),
        ("many items", json!({"type": "array", "minItems": 1_000_000, "items": {"type": "null"}})),
        ("items", json!({"type": "array", "maxItems": 4_000_000_000_u64, "items": {}})),
        ("long", json!({"type": "string", "minLength": 1_000_000_000})),
        ("pattern", json!({"type": "string", "pattern": "((a{1,1000}){1,1000}){1,1000}"})),
        ("lookahead", json!({"type": "string", "pattern": "^(?=a)b"})),
        ("multiples", json!({"type": "integer", "multipleOf": 987_654_321})),
        ("tiny multiples", json!({"type": "number", "multipleOf": 1e-300})),
        ("bounds", json!({"type": "number", "minimum": -1.7e308, "maximum": 1.7e308})),
        ("enum", json!({"enum": (0..50_000).collect::<Vec<_>>()})),
        ("arrays", nested(60, json!({}), |s| json!({"type": "array", "items": s}))),
        ("eithers", nested(60, json!({}), |s| json!({"anyOf": [s, {"type": "null"}]}))),
        ("objects", nested(40, json!({}), |s| json!({"properties": {"a": s}}))),
        ("required", json!({"type": "object", "required": (0..5000).collect::<Vec<_>>()})),
        ("patterns", json!({"patternProperties": {"(a|b)*c{500}": {}, "(b|c)*a{500}": {}}})),
    ]
}

fn others() -> Vec<(&'static str, Grammar)> {
    let mut rules = String::from("start: r0\n");
    (0..3990).for_each(|i| writeln!(rules, "r{i}: r{} r{}", i + 1, i + 1).unwrap());
    rules.push_str("r3990: \"a\"\n");
    let braces = |n: usize| format!("start: {}\"a\"{}", "(".repeat(n), ")".repeat(n));
    let mut terminals = String::from("start: T0\n");
    (0..60).for_each(|i| writeln!(terminals, "T{i}: T{} T{}", i + 1, i + 1).unwrap());
    terminals.push_str("T60: \"a\"\n");
    let mut deep = String::from("start: T0\n");
    (0..3990).for_each(|i| writeln!(deep, "T{i}: \"a\" (T{} | \"b\")", i + 1).unwrap());
    deep.push_str("T3990: \"a\"\n");
    let mut tail = String::from("start: T0\n");
    (0..3990).for_each(|i| writeln!(tail, "T{i}: (\"a\" | T{}) \"b\"", i + 1).unwrap());
    tail.push_str("T3990: \"a\"\n");
    vec![
        ("deep terminals", lark(&deep)),
        ("deep heads", lark(&tail)),
        ("nested braces", lark(&braces(99))),
        ("open braces", lark(&format!("start: {}", "(".repeat(MAX_GRAMMAR_BYTES / 2)))),
        ("braces", lark(&braces(100_000))),
        ("some braces", lark(&braces(500))),
        ("square brackets", lark(&format!("start: {}", "[".repeat(100_000)))),
        ("negations", lark(&format!("start: {}\"a\"", "~".repeat(100_000)))),
        ("doubling rules", lark(&rules)),
        ("doubling terminals", lark(&terminals)),
        ("left recursion", lark("start: start start | \"a\" | \"\"")),
        ("no end", lark("start: \"a\" start")),
        ("repetition", lark("start: (\"a\"{1,100000}){1,100000}")),
        ("ambiguous", lark("start: x{1,500}\nx: \"a\" | \"aa\" | \"aaa\" | x x")),
        ("groups", Grammar::Regex("(".repeat(200_000))),
        ("closed groups", Grammar::Regex(format!("{}a{}", "(".repeat(9999), ")".repeat(9999)))),
        ("powers", Grammar::Regex("((((a{99}){99}){99}){99}){99}".to_owned())),
        ("far", Grammar::Regex("(a|b)*a(a|b){3000}".to_owned())),
        ("alternatives", Grammar::Regex("a|".repeat(200_000))),
        ("stars", Grammar::Regex(format!("a{}", "*".repeat(200_000)))),
        ("classes", Grammar::Regex(r"\p{L}{1,5000}\P{L}{1,5000}".to_owned())),
    ]
}

/// Each either fails with an error of the request, or gives an output or such an error for some
/// steps.
#[test]
fn no_grammar_breaks_the_process() {
    let schemas = schemas().into_iter().map(|(name, value)| (name, schema(&value)));
    for (name, grammar) in schemas.chain(others()) {
        println!("{name} …"); // An overflow ends the process here.
        let began = Instant::now();
        let outcome = SMOLLM2.compiler.start(&grammar).and_then(|mut constraint| {
            println!("{name}: compiled in {:.0?}", began.elapsed());
            let mut random = Random(1);
            for _ in 0..20 {
                let tokens = allowed(constraint.mask()?);
                let token = SMOLLM2.choose(&tokens, false, &mut random);
                constraint.accept(token)?;
                if constraint.has_ended() {
                    break;
                }
            }
            Ok(())
        });
        let said = outcome.as_ref().map_or_else(ToString::to_string, |()| "accepted".to_owned());
        let said: String = said.chars().take(200).collect();
        println!("{name}: {:.0?}: {said}", began.elapsed());
        assert!(outcome.is_ok() || outcome.is_err_and(|e| e.is_of_the_request()), "{name}");
    }
}

#[test]
fn a_vocabulary_without_an_end_is_refused() {
    let refused = |vocab, stop: &[u32]| {
        let error = GrammarCompiler::new(&SMALL.tokenizer, vocab, stop).err().unwrap();
        assert!(!error.is_of_the_request());
        error.to_string()
    };
    assert!(refused(100, &[]).contains("stop"));
    assert!(refused(100, &[100]).contains("100"));
    assert!(refused(0, &[0]).contains("none"));
    assert!(refused(1 << 24, &[0]).contains("too many"));
}
