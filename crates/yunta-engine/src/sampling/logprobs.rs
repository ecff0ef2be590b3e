//! Log-probabilities to report.

use super::select::likeliest;
use crate::TokenLogprobs;

/// Log-probabilities of the chosen token and of the `k` likeliest, in the model's own
/// distribution: before bias, penalties, temperature and truncation.
pub fn logprobs(logits: &[f32], chosen: u32, k: usize) -> TokenLogprobs {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - most).exp()).sum();
    let normal = f64::from(most) + sum.ln();
    let of = |x: f32| (f64::from(x) - normal) as f32;
    TokenLogprobs {
        chosen: logits.get(chosen as usize).map_or(f32::NEG_INFINITY, |x| of(*x)),
        top: likeliest(logits, k).into_iter().map(|(token, x)| (token, of(x))).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logprobs_are_a_log_softmax() {
        let got = logprobs(&[1.0, 2.0, 3.0], 0, 2);
        let z = (1f64.exp() + 2f64.exp() + 3f64.exp()).ln();
        assert!((f64::from(got.chosen) - (1.0 - z)).abs() < 1e-6);
        assert_eq!(got.top.iter().map(|t| t.0).collect::<Vec<_>>(), [2, 1]);
        assert!((f64::from(got.top[0].1) - (3.0 - z)).abs() < 1e-6);
        assert!(logprobs(&[1.0, 2.0], 0, 0).top.is_empty());
    }
}
