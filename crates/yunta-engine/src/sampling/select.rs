//! The greatest of many logits, without sorting them.

use std::cmp::Ordering;

/// Logits compared side by side, so that the compiler can use vector instructions.
const LANES: usize = 16;
/// Logits searched for the position of a new maximum.
const CHUNK: usize = 16 * LANES;

/// The first of the greatest logits, in one pass; `None` if that is not finite or if there is a
/// NaN.
pub(super) fn argmax(logits: &[f32]) -> Option<usize> {
    let (mut most, mut best) = (f32::NEG_INFINITY, None);
    for (i, chunk) in logits.chunks(CHUNK).enumerate() {
        let greatest = maximum(chunk)?;
        if greatest > most {
            most = greatest;
            best = chunk.iter().position(|x| *x == greatest).map(|at| i * CHUNK + at);
        }
    }
    best.filter(|_| most.is_finite())
}

/// The greatest number; `None` if there is a NaN.
fn maximum(numbers: &[f32]) -> Option<f32> {
    let (rows, rest) = numbers.as_chunks::<LANES>();
    let mut most = [f32::NEG_INFINITY; LANES];
    let mut nan = [false; LANES];
    for row in rows {
        for ((most, nan), x) in most.iter_mut().zip(&mut nan).zip(row) {
            *most = if *x > *most { *x } else { *most };
            *nan |= x.is_nan();
        }
    }
    if nan.contains(&true) || rest.iter().any(|x| x.is_nan()) {
        return None;
    }
    Some(most.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max))
}

/// The `k` greatest logits above -∞ with their tokens, greatest first; of equal ones those of
/// lower tokens.
pub(super) fn likeliest(logits: &[f32], k: usize) -> Vec<(u32, f32)> {
    let k = k.min(logits.len());
    if k == 0 {
        return Vec::new();
    }
    // Whenever as many again have been found, the lesser half goes: a constant cost per token, and
    // with the rising floor few get this far.
    let room = (2 * k).max(256);
    let mut found = Vec::with_capacity(room.min(logits.len()));
    let mut floor = f32::NEG_INFINITY;
    for (token, x) in (0u32..).zip(logits) {
        if *x > floor {
            found.push((token, *x));
            if found.len() >= room {
                found.select_nth_unstable_by(k - 1, greater_first);
                found.truncate(k);
                floor = found.last().map_or(floor, |last| last.1);
            }
        }
    }
    if k < found.len() {
        found.select_nth_unstable_by(k - 1, greater_first);
        found.truncate(k);
    }
    found.sort_unstable_by(greater_first);
    found
}

/// Greater numbers first, then lower tokens: a total order.
pub(super) fn greater_first(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_first_of_equals_is_the_argmax_wherever_it_is() {
        for at in [0, 1, 15, 16, 255, 256, 299, 300] {
            let mut logits = vec![-1.0; 301];
            logits[at] = 2.0;
            logits[300] = 2.0;
            assert_eq!(argmax(&logits), Some(at));
            logits[at] = f32::NAN;
            assert_eq!(argmax(&logits), None);
            logits[at] = f32::INFINITY;
            assert_eq!(argmax(&logits), None);
        }
    }

    proptest! {
        #[test]
        fn selecting_is_sorting(
            // Whole numbers, for ties.
            logits in prop::collection::vec((-40i8..40).prop_map(f32::from), 1..2_000),
            k in 0usize..400,
        ) {
            let mut sorted: Vec<_> = (0u32..).zip(logits.iter().copied()).collect();
            sorted.sort_by(greater_first);
            prop_assert_eq!(argmax(&logits), Some(sorted[0].0 as usize));
            sorted.truncate(k);
            prop_assert_eq!(likeliest(&logits, k), sorted);
        }
    }
}
