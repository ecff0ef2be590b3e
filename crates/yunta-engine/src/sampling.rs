//! Choosing the next token.
//!
//! A pure function of the logits, the parameters and the position, so that a request continued on
//! other machines draws the same tokens.

use crate::{SamplingParams, TokenLogprobs};

/// Chooses the token at output position `position` (counted from 0).
///
/// Temperature is applied first, then top-k, top-p and min-p, in this order. `None` if the logits
/// hold no finite maximum: the model computed garbage.
pub fn sample(logits: &[f32], params: &SamplingParams, position: usize) -> Option<u32> {
    let best = argmax(logits)?;
    if params.temperature <= 0.0 || params.top_k == 1 {
        return Some(best as u32);
    }
    let most = logits[best];
    let weight = |i: usize| f64::from((logits[i] - most) / params.temperature).exp();
    let mut kept: Vec<(usize, f64)> = (0..logits.len()).map(|i| (i, weight(i))).collect();
    let keeps_all = params.top_k == 0 && params.top_p >= 1.0 && params.min_p <= 0.0;
    if !keeps_all {
        truncate(&mut kept, params);
    }
    let total: f64 = kept.iter().map(|(_, w)| w).sum();
    let mut left = uniform(params.seed, position) * total;
    for &(token, w) in &kept {
        left -= w;
        if left < 0.0 {
            return Some(token as u32);
        }
    }
    // Rounding can leave a crumb: it belongs to the last token that has any weight.
    kept.iter().rev().find(|(_, w)| *w > 0.0).map(|(token, _)| *token as u32)
}

/// Keeps the candidates that top-k, top-p and min-p allow, likeliest first; at least one.
fn truncate(kept: &mut Vec<(usize, f64)>, params: &SamplingParams) {
    // Equal weights are ordered by token, so that the order is total.
    let order = |a: &(usize, f64), b: &(usize, f64)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if params.top_k > 0 && params.top_k < kept.len() {
        kept.select_nth_unstable_by(params.top_k - 1, order);
        kept.truncate(params.top_k);
    }
    let best = kept.iter().map(|(_, w)| *w).fold(0.0, f64::max);
    kept.retain(|(_, w)| *w >= f64::from(params.min_p) * best);
    kept.sort_unstable_by(order);
    if params.top_p < 1.0 {
        let enough = f64::from(params.top_p) * kept.iter().map(|(_, w)| w).sum::<f64>();
        let mut sum = 0.0;
        let reached = kept.iter().position(|(_, w)| {
            sum += w;
            sum >= enough
        });
        kept.truncate(reached.map_or(kept.len(), |i| i + 1));
    }
}

/// The first of the greatest logits; `None` if that is not finite.
fn argmax(logits: &[f32]) -> Option<usize> {
    let mut best: Option<usize> = None;
    for (i, x) in logits.iter().enumerate() {
        if x.is_nan() {
            return None;
        }
        if best.is_none_or(|b| *x > logits[b]) {
            best = Some(i);
        }
    }
    best.filter(|&b| logits[b].is_finite())
}

/// A number in [0, 1) from (seed, position): two rounds of SplitMix64 (Steele et al., 2014).
fn uniform(seed: u64, position: usize) -> f64 {
    let mix = |mut z: u64| {
        z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    let bits = mix(mix(seed) ^ position as u64);
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// Log-probabilities of the chosen token and of the `k` likeliest.
pub fn logprobs(logits: &[f32], chosen: u32, k: usize) -> TokenLogprobs {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - most).exp()).sum();
    let normal = f64::from(most) + sum.ln();
    let of = |x: f32| (f64::from(x) - normal) as f32;
    let mut order: Vec<usize> = (0..logits.len()).collect();
    let by = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    if k > 0 && k < order.len() {
        order.select_nth_unstable_by(k - 1, by);
    }
    order.truncate(k);
    order.sort_unstable_by(by);
    TokenLogprobs {
        chosen: logits.get(chosen as usize).map_or(f32::NEG_INFINITY, |x| of(*x)),
        top: order.into_iter().map(|i| (i as u32, of(logits[i]))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn params(temperature: f32) -> SamplingParams {
        SamplingParams { temperature, ..SamplingParams::default() }
    }

    #[test]
    fn temperature_zero_takes_the_likeliest() {
        assert_eq!(sample(&[0.5, 3.0, -1.0, 3.0], &params(0.0), 7), Some(1));
    }

    #[test]
    fn garbage_draws_nothing() {
        assert_eq!(sample(&[], &params(1.0), 0), None);
        assert_eq!(sample(&[1.0, f32::NAN], &params(1.0), 0), None);
        assert_eq!(sample(&[f32::NEG_INFINITY; 3], &params(1.0), 0), None);
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = [0.0f32, 1.0, 2.0, -30.0];
        let mut counts = [0usize; 4];
        let n = 40_000;
        for position in 0..n {
            let p = SamplingParams { seed: 42, ..params(0.7) };
            counts[sample(&logits, &p, position).unwrap() as usize] += 1;
        }
        let weights = logits.map(|x| f64::from(x / 0.7).exp());
        let total: f64 = weights.iter().sum();
        for (count, w) in counts.iter().zip(weights) {
            let (expected, got) = (w / total, *count as f64 / n as f64);
            let deviation = (expected * (1.0 - expected) / n as f64).sqrt();
            assert!((got - expected).abs() <= 4.0 * deviation + 1e-9, "{got} for {expected}");
        }
    }

    #[test]
    fn truncation_keeps_what_it_promises() {
        let logits: Vec<f32> = [0.5f32, 0.25, 0.15, 0.1].iter().map(|p| p.ln()).collect();
        let seen = |p: SamplingParams| {
            let mut seen = [false; 4];
            for position in 0..2_000 {
                seen[sample(&logits, &p, position).unwrap() as usize] = true;
            }
            seen
        };
        let base = params(1.0);
        assert_eq!(seen(SamplingParams { top_k: 2, ..base.clone() }), [true, true, false, false]);
        assert_eq!(seen(SamplingParams { top_p: 0.7, ..base.clone() }), [true, true, false, false]);
        assert_eq!(seen(SamplingParams { top_p: 0.8, ..base.clone() }), [true, true, true, false]);
        assert_eq!(seen(SamplingParams { min_p: 0.4, ..base.clone() }), [true, true, false, false]);
        assert_eq!(seen(base), [true; 4]);
    }

    #[test]
    fn logprobs_are_a_log_softmax() {
        let got = logprobs(&[1.0, 2.0, 3.0], 0, 2);
        let z = (1f64.exp() + 2f64.exp() + 3f64.exp()).ln();
        assert!((f64::from(got.chosen) - (1.0 - z)).abs() < 1e-6);
        assert_eq!(got.top.iter().map(|t| t.0).collect::<Vec<_>>(), [2, 1]);
        assert!((f64::from(got.top[0].1) - (3.0 - z)).abs() < 1e-6);
    }

    proptest! {
        #[test]
        fn a_draw_is_a_function_of_seed_and_position(
            logits in prop::collection::vec(-20.0f32..20.0, 1..200),
            seed: u64, position in 0usize..100_000,
            temperature in 0.0f32..3.0, top_k in 0usize..10, top_p in 0.0f32..1.0, min_p in 0.0f32..1.0,
        ) {
            let p = SamplingParams { temperature, top_k, top_p, min_p, seed };
            let token = sample(&logits, &p, position);
            prop_assert!(token.is_some_and(|t| (t as usize) < logits.len()));
            prop_assert_eq!(token, sample(&logits, &p, position));
        }
    }
}
