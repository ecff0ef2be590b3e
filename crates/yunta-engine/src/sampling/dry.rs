//! DRY: a penalty on tokens that would lengthen a repetition.
//!
//! As in text-generation-webui, pull request 5677, but with no bound on the length of a
//! repetition: all are found in time linear in the text, as in llama.cpp.

use std::collections::BTreeMap;

use super::penalties::of;
use super::{Draw, SamplingParams};

/// The penalty stays below this, so that it never forbids what is the only choice.
const PENALTY_MAX: f64 = 1e30;

/// Lowers the logit of each token that followed an earlier occurrence of the text's end.
pub(super) fn penalise(logits: &mut [f32], params: &SamplingParams, draw: &Draw<'_>) {
    let range = if params.dry_range == 0 { usize::MAX } else { params.dry_range };
    let backwards: Vec<u32> =
        draw.output.iter().rev().chain(draw.prompt.iter().rev()).take(range).copied().collect();
    for (token, length) in repetitions(&backwards, params) {
        let growth = length.saturating_sub(params.dry_allowed_length);
        let growth = i32::try_from(growth).unwrap_or(i32::MAX);
        let penalty = f64::from(params.dry_multiplier) * f64::from(params.dry_base).powi(growth);
        if let Some(x) = of(logits, token).filter(|_| penalty > 0.0) {
            *x -= penalty.min(PENALTY_MAX) as f32;
        }
    }
}

/// The tokens to penalise, each with the length of the longest repetition that it would continue.
fn repetitions(backwards: &[u32], params: &SamplingParams) -> BTreeMap<u32, usize> {
    let mut longest = BTreeMap::new();
    let breaks = |token: &u32| params.dry_breakers.contains(token);
    let end = backwards.iter().position(breaks).unwrap_or(backwards.len());
    if end == 0 {
        return longest;
    }
    let matches = matches(backwards, end);
    // What is behind a place in the reversed text is what followed it.
    for (length, token) in matches.iter().skip(1).zip(backwards) {
        if *length >= params.dry_allowed_length.max(1) && !breaks(token) {
            let most = longest.entry(*token).or_insert(0);
            *most = (*length).max(*most);
        }
    }
    longest
}

/// For each place, how many tokens from there on equal the first tokens of the text; at most
/// `most`.
///
/// The Z algorithm (Gusfield, "Algorithms on Strings, Trees, and Sequences", 1997, section 1.4):
/// linear, since the stretch that matched furthest tells what later places begin with.
fn matches(text: &[u32], most: usize) -> Vec<usize> {
    let mut lengths = Vec::with_capacity(text.len());
    lengths.push(most);
    let (mut from, mut to) = (0, 0);
    for at in 1..text.len() {
        let known = lengths.get(at - from).map_or(0, |length| *length);
        let mut length = if at < to { known.min(to - at) } else { 0 };
        while length < most && text.get(at + length) == text.get(length) {
            length += 1;
        }
        lengths.push(length);
        if at + length > to {
            (from, to) = (at, at + length);
        }
    }
    lengths
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn params() -> SamplingParams {
        SamplingParams { dry_multiplier: 0.5, dry_base: 2.0, ..SamplingParams::default() }
    }

    /// Penalties of tokens 0 to 9 after a text.
    fn penalties(text: &[u32], params: &SamplingParams) -> Vec<f32> {
        let mut logits = vec![0.0; 10];
        let (prompt, output) = text.split_at(text.len() / 2);
        penalise(&mut logits, params, &Draw { prompt, output, ..Draw::default() });
        logits.iter().map(|x| 0.0 - x).collect()
    }

    fn only(token: usize, penalty: f32) -> Vec<f32> {
        let mut all = vec![0.0; 10];
        all[token] = penalty;
        all
    }

    #[test]
    fn the_penalty_grows_with_the_repetition() {
        // "1 2 3" came before, followed by 4: multiplier * base ^ (3 - 2).
        assert_eq!(penalties(&[1, 2, 3, 4, 5, 1, 2, 3], &params()), only(4, 1.0));
        assert_eq!(penalties(&[1, 2, 3, 4, 5, 2, 3], &params()), only(4, 0.5));
        assert_eq!(penalties(&[1, 2, 3, 4, 5, 3], &params()), only(4, 0.0));
        // The longest of two counts: "1 2 3" before "2 3".
        assert_eq!(penalties(&[1, 2, 3, 4, 2, 3, 4, 1, 2, 3], &params()), only(4, 1.0));
        // Overlapping: "6 6 6" at the end of "6 6 6 6".
        assert_eq!(penalties(&[6, 6, 6, 6], &params()), only(6, 1.0));
    }

    #[test]
    fn breakers_end_a_repetition() {
        let text = [1, 2, 3, 4, 5, 1, 2, 3];
        let broken_by =
            |token| penalties(&text, &SamplingParams { dry_breakers: vec![token], ..params() });
        assert_eq!(broken_by(1), only(4, 0.5)); // "2 3" is left
        assert_eq!(broken_by(2), only(4, 0.0)); // "3" is left
        assert_eq!(broken_by(3), only(4, 0.0)); // nothing is left
        assert_eq!(broken_by(4), only(4, 0.0)); // breakers themselves are never penalised
        assert_eq!(broken_by(5), only(4, 1.0));
    }

    #[test]
    fn the_range_bounds_what_is_looked_at() {
        let text = [1, 2, 3, 4, 5, 1, 2, 3];
        let within = |dry_range| penalties(&text, &SamplingParams { dry_range, ..params() });
        assert_eq!(within(8), only(4, 1.0));
        assert_eq!(within(7), only(4, 0.5)); // the first "1" is out of sight
        assert_eq!(within(5), only(4, 0.0));
    }

    #[test]
    fn a_long_repetition_forbids_nothing_for_good() {
        let penalty = penalties(&[7; 5_000], &params())[7];
        assert!(penalty >= 1e29 && penalty.is_finite());
    }

    proptest! {
        #[test]
        fn repetitions_are_those_that_a_plain_search_finds(
            text in prop::collection::vec(0u32..4, 1..60), breaker in 2u32..6, least in 0usize..4,
        ) {
            let params = SamplingParams {
                dry_breakers: vec![breaker], dry_allowed_length: least, ..params()
            };
            // text-generation-webui's loop, without its bound.
            let mut expected = BTreeMap::new();
            let last = text.len() - 1;
            for i in 0..last {
                if text[last] == breaker || text[i] != text[last] || text[i + 1] == breaker {
                    continue;
                }
                let same = |n: &usize| {
                    *n <= i && text[i - n] == text[last - n] && text[last - n] != breaker
                };
                let length = (0..).take_while(same).count();
                if length >= least {
                    let most = expected.entry(text[i + 1]).or_insert(0);
                    *most = length.max(*most);
                }
            }
            let backwards: Vec<u32> = text.iter().rev().copied().collect();
            prop_assert_eq!(repetitions(&backwards, &params), expected);
        }
    }
}
