//! The random draw among the tokens that are left.

use super::truncate::Candidate;
use super::weights;

/// Weights summed at a time in the search for the token drawn.
const CHUNK: usize = 1024;

/// A number in [0, 1) from (seed, position): two rounds of SplitMix64 (Steele et al., 2014).
pub(super) fn uniform(seed: u64, position: usize) -> f64 {
    let mix = |mut z: u64| {
        z = z.wrapping_add(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    let bits = mix(mix(seed) ^ position as u64);
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// Draws one of the candidates.
///
/// They are in the order of their tokens, and not of their probabilities: so the token drawn
/// changes as little as possible when logits differ in their last bits, as they do between a
/// prompt computed at once and token by token.
pub(super) fn pick(candidates: &[Candidate], seed: u64, position: usize) -> Option<u32> {
    let total: f64 = candidates.iter().map(Candidate::weight).sum();
    let weighted = candidates.iter().map(|c| (c.token, c.weight()));
    walk(weighted, uniform(seed, position) * total).token
}

/// Draws any token, given the weights of all.
pub(super) fn pick_any(all: &[f32], seed: u64, position: usize) -> Option<u32> {
    let sums: Vec<f64> = all.chunks(CHUNK).map(weights::sum).collect();
    let total: f64 = sums.iter().sum();
    let chunk = walk((0u32..).zip(sums), uniform(seed, position) * total);
    let first = chunk.token?.checked_mul(CHUNK as u32)?;
    let chosen = all.get(first as usize..)?.iter().take(CHUNK);
    walk((first..).zip(chosen.map(|w| f64::from(*w))), chunk.left).token
}

/// Where a walk along weights ended.
struct Found {
    token: Option<u32>,
    /// How far into the token's weight.
    left: f64,
}

/// Goes along the weights as far as `left`. Rounding can make the way longer than the weights: the
/// rest belongs to the last token that has any weight.
fn walk(weighted: impl Iterator<Item = (u32, f64)>, mut left: f64) -> Found {
    let mut last = Found { token: None, left: 0.0 };
    for (token, weight) in weighted {
        if weight > 0.0 {
            last = Found { token: Some(token), left };
            left -= weight;
            if left < 0.0 {
                break;
            }
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_change_no_draw() {
        let weights: Vec<f32> = (0..5_000).map(|i| (i % 7) as f32).collect();
        let candidates: Vec<_> =
            (0u32..).zip(&weights).map(|(t, w)| Candidate::new(t, 0.0, *w)).collect();
        for position in 0..1_000 {
            assert_eq!(pick_any(&weights, 3, position), pick(&candidates, 3, position));
        }
    }

    #[test]
    fn a_crumb_goes_to_the_last_token_with_weight() {
        assert_eq!(walk([(4, 1.0), (5, 0.0)].into_iter(), 1.0 + 1e-9).token, Some(4));
        assert_eq!(walk([(4, 0.0)].into_iter(), 0.0).token, None);
    }
}
