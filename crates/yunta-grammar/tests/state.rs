//! Masks, single tokens, and tokens taken back agree with each other.
#![allow(clippy::unwrap_used, clippy::expect_used)] // A test may fail by a panic.

mod support;

use serde_json::json;
use support::{Model, Random, SMALL, SMOLLM2, allowed, schema};
use yunta_grammar::{Constraint, Grammar, GrammarError};

fn grammars() -> Vec<Grammar> {
    let person = json!({
        "type": "object", "required": ["name", "age"], "additionalProperties": false,
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["x", "xy", "ñ"]}, "maxItems": 3},
        },
    });
    vec![
        Grammar::JsonObject,
        schema(&person),
        Grammar::Regex("[a-z]+(, [a-z]+)*\\.".to_owned()),
        Grammar::Lark("start: \"(\" start \")\" start | \"\"".to_owned()),
    ]
}

/// A mask, and the tokens accepted one by one, must be the same set.
fn agrees(model: &Model, constraint: &mut Constraint, sample: usize, random: &mut Random) {
    let mask = constraint.mask().unwrap().to_vec();
    assert_eq!(mask.len(), model.vocab.div_ceil(32));
    let tokens = allowed(&mask);
    for _ in 0..sample.min(tokens.len()) {
        let token = tokens[random.below(tokens.len())];
        assert_eq!(constraint.check(&[token]), 1, "{token}");
        constraint.accept(token).unwrap();
        constraint.rollback(1).unwrap();
    }
    for _ in 0..sample {
        let token = u32::try_from(random.below(model.vocab + 70)).unwrap();
        if !tokens.contains(&token) {
            assert_eq!(constraint.check(&[token]), 0, "{token}");
            assert_eq!(constraint.accept(token), Err(GrammarError::NotAllowed { token }));
        }
    }
    assert_eq!(constraint.mask().unwrap(), mask);
}

#[test]
fn a_token_is_accepted_if_and_only_if_its_bit_is_set() {
    for (seed, grammar) in (0..).zip(grammars()) {
        for (model, sample, steps) in [(&*SMALL, 400, 40), (&*SMOLLM2, 60, 25)] {
            let mut random = Random(seed);
            let mut constraint = model.start(&grammar);
            for step in 0..steps {
                agrees(model, &mut constraint, sample, &mut random);
                let tokens = allowed(constraint.mask().unwrap());
                let Some(_) = tokens.first() else { break };
                let token = model.choose(&tokens, step > steps / 2, &mut random);
                constraint.accept(token).unwrap();
            }
        }
    }
}

#[test]
fn every_token_of_a_mask_is_accepted() {
    for grammar in grammars() {
        let mut constraint = SMALL.start(&grammar);
        for token in allowed(constraint.mask().unwrap()) {
            SMALL.start(&grammar).accept(token).unwrap();
            constraint.accept(token).unwrap();
            constraint.rollback(1).unwrap();
        }
    }
}

#[test]
fn rolled_back_is_as_never_gone() {
    for (seed, grammar) in (0..40).flat_map(|s| grammars().into_iter().map(move |g| (s, g))) {
        let mut random = Random(seed);
        let mut constraint = SMALL.start(&grammar);
        let mut tokens = SMALL.walk(&mut constraint, seed).unwrap();
        tokens.push(SMALL.stop[random.below(2)]);
        // The walk may have ended with the other stop token.
        constraint.rollback(1).unwrap();
        assert_eq!(constraint.check(&tokens[tokens.len() - 1..]), 1);
        constraint.accept(tokens[tokens.len() - 1]).unwrap();
        assert!(constraint.has_ended());
        let all = tokens.len();
        let keep = random.below(all + 1);
        constraint.rollback(all - keep).unwrap();
        let mut fresh = SMALL.start(&grammar);
        assert_eq!(fresh.check(&tokens), all);
        tokens[..keep].iter().for_each(|t| fresh.accept(*t).unwrap());
        assert_eq!(constraint.mask().unwrap(), fresh.mask().unwrap());
        assert_eq!(constraint.check(&tokens[keep..]), all - keep);
        tokens[keep..].iter().for_each(|t| constraint.accept(*t).unwrap());
        let error = GrammarError::Rollback { asked: all + 1, accepted: all };
        assert_eq!(constraint.rollback(all + 1), Err(error));
        assert!(allowed(constraint.mask().unwrap()).is_empty());
    }
}

#[test]
fn every_stop_token_ends_and_only_where_the_output_may() {
    let id = |t: &str| SMALL.tokenizer.token_to_id(t).unwrap();
    let (a, b) = (id("a"), id("b"));
    let [eos, x] = SMALL.stop;
    let mut constraint = SMALL.start(&Grammar::Regex("[ax]b?".to_owned()));
    // "x" stops, so that it is no text.
    assert_eq!(allowed(constraint.mask().unwrap()), [a]);
    assert_eq!(constraint.check(&[a, b, x]), 3);
    assert_eq!(constraint.check(&[a, eos, b]), 2);
    assert_eq!(constraint.check(&[a, a]), 1);
    assert_eq!(constraint.check(&[u32::MAX, a]), 0);
    constraint.accept(a).unwrap();
    let mut expected = [b, eos, x];
    expected.sort_unstable();
    let may_end = allowed(constraint.mask().unwrap());
    assert!(expected.iter().all(|t| may_end.contains(t)), "{may_end:?}");
    constraint.accept(b).unwrap();
    let mut expected = [eos, x];
    expected.sort_unstable();
    assert_eq!(allowed(constraint.mask().unwrap()), expected);
    constraint.accept(x).unwrap();
    assert!(allowed(constraint.mask().unwrap()).is_empty());
    assert_eq!(constraint.check(&[eos]), 0);
    assert_eq!(constraint.accept(eos), Err(GrammarError::NotAllowed { token: eos }));
}

#[test]
fn a_text_that_no_token_spells_is_a_dead_end() {
    // "x" stops, and no other token has that letter.
    let mut constraint = SMALL.start(&Grammar::Regex("ax".to_owned()));
    constraint.accept(SMALL.tokenizer.token_to_id("a").unwrap()).unwrap();
    assert_eq!(constraint.mask(), Err(GrammarError::DeadEnd));
    assert_eq!(constraint.rollback(1), Err(GrammarError::DeadEnd));
    assert_eq!(constraint.check(&SMALL.stop), 0);
}

#[test]
fn constraints_of_one_grammar_are_independent() {
    fn is_send<T: Send>(_: &T) {}
    fn is_shared<T: Send + Sync>(_: &T) {}
    is_shared(&SMALL.compiler);
    is_send(&SMALL.start(&Grammar::JsonObject));
    let texts = || (0..4).map(|seed| SMALL.walk(&mut SMALL.start(&Grammar::JsonObject), seed));
    let alone: Vec<_> = texts().collect();
    std::thread::scope(|scope| {
        let together: Vec<_> =
            (0..4).map(|_| scope.spawn(|| texts().collect::<Vec<_>>())).collect();
        together.into_iter().for_each(|t| assert_eq!(t.join().unwrap(), alone));
    });
}
