//! Relative probabilities of tokens.

/// Numbers added side by side, so that the compiler can use vector instructions.
const LANES: usize = 8;
/// Below this e^x is taken for 0: it is near the least normal number.
const LEAST: f32 = -87.0;

/// e^x for x ≤ 0, within 2 units in the last place; 0 for x below -87 and for NaN.
///
/// The coefficients and the reduction are those of `expf` in Moshier's Cephes library. Unlike the
/// standard library's, this is the same on all machines and can run on vectors.
pub(super) fn exp(x: f32) -> f32 {
    // Adding 1.5 * 2^23 rounds to a whole number and leaves it in the low bits.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x >= LEAST { x } else { LEAST };
    let rounded = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = clamped - n * LN_2_HIGH - n * LN_2_LOW;
    let p = 1.987_569_1e-4 * r + 1.398_199_9e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 0.5;
    let fraction = p * r * r + r + 1.0;
    let power = f32::from_bits((rounded.to_bits() << 23).wrapping_add(1f32.to_bits()));
    if x >= LEAST { fraction * power } else { 0.0 }
}

/// The exponent of a token's weight: 0 for the likeliest, and less for others.
pub(super) fn exponent(logit: f32, most: f32, temperature: f32) -> f32 {
    (logit - most) / temperature
}

/// Weights of all tokens, 1 for the likeliest.
pub(super) fn all(logits: &[f32], most: f32, temperature: f32) -> Vec<f32> {
    logits.iter().map(|x| exp(exponent(*x, most, temperature))).collect()
}

/// Their sum, in an order that depends on nothing but their number.
pub(super) fn sum(weights: &[f32]) -> f64 {
    let (rows, rest) = weights.as_chunks::<LANES>();
    let mut sums = [0f64; LANES];
    for row in rows {
        for (sum, w) in sums.iter_mut().zip(row) {
            *sum += f64::from(*w);
        }
    }
    sums.iter().sum::<f64>() + rest.iter().map(|w| f64::from(*w)).sum::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_to_the_true_value() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        for x in [-87.1, -1e30, f32::NEG_INFINITY, f32::NAN] {
            assert_eq!(exp(x), 0.0);
        }
        for i in 0..=870_000 {
            let x = -(i as f32) / 10_000.0;
            let (got, expected) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((got / expected - 1.0).abs() < 2.5e-7, "e^{x} is {expected}, not {got}");
        }
    }
}
