//! Which tokens are left to draw from.

use std::cmp::Ordering;

use super::SamplingParams;
use super::pick::uniform;
use super::select::likeliest;
use super::weights::{self, exp, exponent};

/// XTC tosses its own coin: this makes another seed of the request's.
const XTC_STREAM: u64 = 0x5854_4320_636F_696E;

/// Fewer candidates than this are sorted rather than searched.
const FEW: usize = 64;

/// A token that may be drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Candidate {
    pub(super) token: u32,
    /// Logarithm of the weight, and exact where the weight is rounded.
    exponent: f32,
    /// Probability relative to the likeliest token's.
    weight: f32,
}

impl Candidate {
    pub(super) fn new(token: u32, exponent: f32, weight: f32) -> Self {
        Self { token, exponent, weight }
    }

    pub(super) fn weight(&self) -> f64 {
        f64::from(self.weight)
    }

    /// Likelier first, then lower tokens.
    fn likelier_first(&self, other: &Self) -> Ordering {
        other.exponent.total_cmp(&self.exponent).then(self.token.cmp(&other.token))
    }
}

/// What is left.
pub(super) enum Kept {
    /// Every token: their weights.
    All(Vec<f32>),
    /// Some, in the order of their tokens; at least one.
    Few(Vec<Candidate>),
}

/// Applies temperature, top-k, typical-p, top-p, min-p and XTC to logits of which `most` is the
/// greatest.
pub(super) fn kept(logits: &[f32], most: f32, params: &SamplingParams, position: usize) -> Kept {
    let exclude = excludes_top_choices(params, position);
    let (mut candidates, mass) = if (1..logits.len()).contains(&params.top_k) {
        top_k(logits, most, params)
    } else {
        let weights = weights::all(logits, most, params.temperature);
        let shortens = params.typical_p < 1.0 || params.top_p < 1.0 || params.min_p > 0.0;
        if !(shortens || exclude) {
            return Kept::All(weights);
        }
        possible(logits, most, &weights, params)
    };
    shorten(&mut candidates, mass, params);
    if exclude {
        exclude_top_choices(&mut candidates, params.xtc_threshold);
    }
    Kept::Few(candidates)
}

/// The likeliest tokens, and their weight.
fn top_k(logits: &[f32], most: f32, params: &SamplingParams) -> (Vec<Candidate>, f64) {
    let mut found = likeliest(logits, params.top_k);
    found.sort_unstable_by_key(|(token, _)| *token);
    let candidates = found.into_iter().map(|(token, x)| {
        let exponent = exponent(x, most, params.temperature);
        Candidate::new(token, exponent, exp(exponent))
    });
    let candidates: Vec<_> = candidates.filter(|c| c.weight > 0.0).collect();
    let mass = sum(&candidates);
    (candidates, mass)
}

/// The tokens that truncation may leave, and the weight of all tokens. Those that it surely drops
/// are left out: in a vocabulary nearly all are.
fn possible(
    logits: &[f32],
    most: f32,
    weights: &[f32],
    params: &SamplingParams,
) -> (Vec<Candidate>, f64) {
    let mass = weights::sum(weights);
    let mut floor = f64::from(f32::MIN_POSITIVE);
    // The most typical tokens may be unlikely ones.
    if params.typical_p >= 1.0 {
        if params.top_p < 1.0 {
            // All tokens below this together are less than what top-p leaves over, so that the
            // others reach it. The factor is for rounding.
            let spare = f64::from(1.0 - params.top_p.max(0.0)) * mass;
            floor = floor.max(0.999 * spare / weights.len() as f64);
        }
        // The likeliest token's weight is 1.
        floor = floor.max(f64::from(params.min_p.min(1.0)));
    }
    let floor = floor.min(1.0) as f32;
    let mut candidates = Vec::new();
    for ((token, weight), x) in (0u32..).zip(weights).zip(logits) {
        if *weight >= floor {
            let exponent = exponent(*x, most, params.temperature);
            candidates.push(Candidate::new(token, exponent, *weight));
        }
    }
    (candidates, mass)
}

/// Applies typical-p, top-p and min-p. `mass` is the weight of the distribution's tokens, of which
/// some that would be dropped may be absent.
fn shorten(candidates: &mut Vec<Candidate>, mut mass: f64, params: &SamplingParams) {
    if params.typical_p < 1.0 {
        let weighted = candidates.iter().map(|c| c.weight() * f64::from(c.exponent));
        // Entropy and information content both are this far from the mean exponent and the token's.
        let mean = weighted.sum::<f64>() / mass;
        let distance = |c: &Candidate| (f64::from(c.exponent) - mean).abs();
        keep_until(candidates, f64::from(params.typical_p) * mass, |a, b| {
            distance(a).total_cmp(&distance(b)).then(a.token.cmp(&b.token))
        });
        mass = sum(candidates);
    }
    if params.top_p < 1.0 {
        keep_until(candidates, f64::from(params.top_p) * mass, Candidate::likelier_first);
    }
    if params.min_p > 0.0 {
        let best = candidates.iter().map(|c| c.weight).fold(0.0, f32::max);
        let least = params.min_p.min(1.0) * best;
        candidates.retain(|c| c.weight >= least);
    }
}

/// Keeps the candidates that come first in `order`, as many as are needed for the weight
/// `enough`; at least one.
///
/// Halves the range in which the last of them is, instead of sorting: linear on average.
fn keep_until(
    candidates: &mut Vec<Candidate>,
    enough: f64,
    order: impl Fn(&Candidate, &Candidate) -> Ordering,
) {
    let mut ranked = candidates.clone();
    let mut rest = ranked.as_mut_slice();
    let mut reached = 0.0;
    while rest.len() > FEW {
        let middle = rest.len() / 2;
        rest.select_nth_unstable_by(middle, &order);
        let (first, second) = rest.split_at_mut(middle);
        let both = reached + sum(first);
        if both >= enough {
            rest = first;
        } else {
            reached = both;
            rest = second;
        }
    }
    rest.sort_unstable_by(&order);
    let crossing = rest.iter().find(|c| {
        reached += c.weight();
        reached >= enough
    });
    // Rounding can hide the crossing: then it is at the range's end.
    if let Some(last) = crossing.or(rest.last()).copied() {
        candidates.retain(|c| order(c, &last) != Ordering::Greater);
    }
}

fn sum(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(Candidate::weight).sum()
}

/// Whether XTC is on at this position.
fn excludes_top_choices(params: &SamplingParams, position: usize) -> bool {
    params.xtc_threshold > 0.0
        && params.xtc_probability > 0.0
        && uniform(params.seed ^ XTC_STREAM, position) < f64::from(params.xtc_probability)
}

/// Drops the tokens of at least this probability, but for the least likely of them.
fn exclude_top_choices(candidates: &mut Vec<Candidate>, threshold: f32) {
    let least = f64::from(threshold) * sum(candidates);
    let top = |c: &&Candidate| c.weight() >= least;
    if let Some(last) = candidates.iter().filter(top).max_by(|a, b| a.likelier_first(b)).copied() {
        candidates.retain(|c| !top(&c) || c.token == last.token);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn neutral() -> SamplingParams {
        SamplingParams::default()
    }

    /// The tokens left of a distribution.
    fn left(probabilities: &[f32], params: &SamplingParams) -> Vec<u32> {
        let logits: Vec<f32> = probabilities.iter().map(|p| p.ln()).collect();
        let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        match kept(&logits, most, params, 0) {
            Kept::All(weights) => (0u32..).zip(weights).map(|(token, _)| token).collect(),
            Kept::Few(candidates) => candidates.iter().map(|c| c.token).collect(),
        }
    }

    #[test]
    fn truncation_keeps_what_it_promises() {
        let p = [0.25, 0.5, 0.1, 0.15];
        assert_eq!(left(&p, &neutral()), [0, 1, 2, 3]);
        assert_eq!(left(&p, &SamplingParams { top_k: 2, ..neutral() }), [0, 1]);
        assert_eq!(left(&p, &SamplingParams { top_p: 0.7, ..neutral() }), [0, 1]);
        assert_eq!(left(&p, &SamplingParams { top_p: 0.8, ..neutral() }), [0, 1, 3]);
        assert_eq!(left(&p, &SamplingParams { top_p: 0.0, ..neutral() }), [1]);
        assert_eq!(left(&p, &SamplingParams { min_p: 0.4, ..neutral() }), [0, 1]);
        assert_eq!(left(&p, &SamplingParams { min_p: 1.0, ..neutral() }), [1]);
    }

    #[test]
    fn top_p_is_of_what_top_k_left() {
        // Of 0.5 and 0.25 the first is two thirds.
        let params = SamplingParams { top_k: 2, top_p: 0.66, ..neutral() };
        assert_eq!(left(&[0.25, 0.5, 0.1, 0.15], &params), [1]);
        let params = SamplingParams { top_p: 0.67, ..params };
        assert_eq!(left(&[0.25, 0.5, 0.1, 0.15], &params), [0, 1]);
    }

    #[test]
    fn the_typical_set_is_around_the_entropy() {
        // Entropy 1.125 nats; information contents 0.511, 1.609, 1.897 and 2.996 nats, at distances
        // 0.57, 0.53, 0.81 and 1.91: token 1 before token 0, then 2, then 3.
        let p = [0.6, 0.2, 0.15, 0.05];
        let typical = |typical_p| left(&p, &SamplingParams { typical_p, ..neutral() });
        assert_eq!(typical(0.1), [1]);
        assert_eq!(typical(0.3), [0, 1]);
        assert_eq!(typical(0.85), [0, 1, 2]);
        assert_eq!(typical(0.99), [0, 1, 2, 3]);
    }

    #[test]
    fn xtc_leaves_the_least_likely_top_choice() {
        let p = [0.25, 0.5, 0.1, 0.15];
        let always = SamplingParams { xtc_probability: 1.0, ..neutral() };
        let xtc = |xtc_threshold| left(&p, &SamplingParams { xtc_threshold, ..always.clone() });
        assert_eq!(xtc(0.2), [0, 2, 3]);
        assert_eq!(xtc(0.14), [2, 3]);
        assert_eq!(xtc(0.3), [0, 1, 2, 3]);
        assert_eq!(xtc(0.0), [0, 1, 2, 3]);
        // Of what top-k left: 0.25 becomes a third.
        let params = SamplingParams { top_k: 2, xtc_threshold: 0.33, ..always };
        assert_eq!(left(&p, &params), [0]);
    }

    #[test]
    fn xtc_happens_as_often_as_asked() {
        let params = SamplingParams { xtc_probability: 0.25, seed: 9, ..neutral() };
        let count = (0..40_000).filter(|i| excludes_top_choices(&params, *i)).count();
        assert!((9_650..10_350).contains(&count), "{count} of 10000"); // 4 deviations
    }

    proptest! {
        /// Searching gives what sorting everything gives, with ties and without.
        #[test]
        fn keeping_is_sorting_and_cutting(
            weights in prop::collection::vec(1u8..30, 1..600), fraction in 0.0f64..1.1,
        ) {
            let mut candidates: Vec<Candidate> = (0u32..)
                .zip(&weights)
                .map(|(t, w)| Candidate::new(t, f32::from(*w), f32::from(*w)))
                .collect();
            let enough = fraction * sum(&candidates);
            let mut sorted = candidates.clone();
            sorted.sort_by(Candidate::likelier_first);
            let mut reached = 0.0;
            let crossing = sorted.iter().position(|c| {
                reached += c.weight();
                reached >= enough
            });
            sorted.truncate(crossing.map_or(sorted.len(), |at| at + 1));
            sorted.sort_by_key(|c| c.token);
            keep_until(&mut candidates, enough, Candidate::likelier_first);
            prop_assert_eq!(candidates, sorted);
        }

        /// Leaving out early what top-p and min-p drop anyway changes nothing.
        #[test]
        fn the_floor_drops_only_what_would_be_dropped(
            logits in prop::collection::vec(-12.0f32..12.0, 1..400),
            top_p in 0.0f32..1.0, min_p in 0.0f32..0.2,
        ) {
            let params = SamplingParams { top_p, min_p, ..neutral() };
            let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let weights = weights::all(&logits, most, 1.0);
            let mut every: Vec<Candidate> = (0u32..)
                .zip(&weights)
                .zip(&logits)
                .map(|((t, w), x)| Candidate::new(t, x - most, *w))
                .collect();
            shorten(&mut every, weights::sum(&weights), &params);
            let Kept::Few(got) = kept(&logits, most, &params, 0) else { unreachable!() };
            prop_assert_eq!(got, every);
        }
    }
}
