//! Changes to the logits before any token is dropped.

use super::select::argmax;
use super::{Draw, SamplingParams, dry};

/// The logits after bias, mask and penalties; `None` if there is nothing to change.
pub(super) fn changed(
    logits: &[f32],
    params: &SamplingParams,
    draw: &Draw<'_>,
) -> Option<Vec<f32>> {
    let too_early = draw.output.len() < params.min_tokens;
    let barred = if too_early { draw.stop_tokens } else { &[] };
    let repetition = params.repetition_penalty > 0.0 && params.repetition_penalty != 1.0;
    let counted = params.frequency_penalty != 0.0 || params.presence_penalty != 0.0;
    let dry = params.dry_multiplier > 0.0;
    let masked = draw.allowed.is_some() || !barred.is_empty();
    if !(masked || repetition || counted || dry || !params.logit_bias.is_empty()) {
        return None;
    }
    let mut changed = logits.to_vec();
    bias(&mut changed, &params.logit_bias);
    if let Some(allowed) = draw.allowed {
        forbid(&mut changed, allowed);
    }
    bar(&mut changed, barred);
    if repetition {
        penalise_repetition(&mut changed, params.repetition_penalty, draw);
    }
    if counted {
        penalise_counts(&mut changed, params, draw.output);
    }
    if dry {
        dry::penalise(&mut changed, params, draw);
    }
    Some(changed)
}

/// The logit of a token; `None` if it is outside the vocabulary.
pub(super) fn of(logits: &mut [f32], token: u32) -> Option<&mut f32> {
    logits.get_mut(usize::try_from(token).ok()?)
}

fn bias(logits: &mut [f32], biases: &[(u32, f32)]) {
    let mut sorted = biases.to_vec();
    // A map has no order: neither may the sum for a token that is in it twice.
    sorted.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    for (token, bias) in sorted {
        if let Some(x) = of(logits, token) {
            *x += bias;
        }
    }
}

/// Leaves the tokens whose bits are set.
fn forbid(logits: &mut [f32], allowed: &[u32]) {
    let words = allowed.iter().copied().chain(std::iter::repeat(0));
    for (logits, word) in logits.chunks_mut(32).zip(words) {
        match word {
            0 => logits.fill(f32::NEG_INFINITY),
            u32::MAX => {}
            _ => {
                for (bit, x) in logits.iter_mut().enumerate() {
                    if word >> bit & 1 == 0 {
                        *x = f32::NEG_INFINITY;
                    }
                }
            }
        }
    }
}

/// Forbids the stop tokens, unless there is nothing else: a grammar that is complete knows better
/// than a wish for length.
fn bar(logits: &mut [f32], stop_tokens: &[u32]) {
    if stop_tokens.is_empty() {
        return;
    }
    let mut before = Vec::with_capacity(stop_tokens.len());
    for token in stop_tokens {
        if let Some(x) = of(logits, *token) {
            before.push((*token, std::mem::replace(x, f32::NEG_INFINITY)));
        }
    }
    if argmax(logits).is_none() {
        // Backwards, so that a token listed twice ends with its first value.
        for (token, value) in before.into_iter().rev() {
            if let Some(x) = of(logits, token) {
                *x = value;
            }
        }
    }
}

/// A token counts once, however often it occurs, in the prompt as in the output.
fn penalise_repetition(logits: &mut [f32], penalty: f32, draw: &Draw<'_>) {
    let mut seen = vec![false; logits.len()];
    for token in draw.prompt.iter().chain(draw.output) {
        let (Some(seen), Some(x)) = (seen.get_mut(*token as usize), of(logits, *token)) else {
            continue;
        };
        if !std::mem::replace(seen, true) {
            *x = if *x < 0.0 { *x * penalty } else { *x / penalty };
        }
    }
}

/// Frequency and presence, of the output only.
fn penalise_counts(logits: &mut [f32], params: &SamplingParams, output: &[u32]) {
    let mut counts = vec![0u32; logits.len()];
    for token in output {
        if let Some(count) = counts.get_mut(*token as usize) {
            *count += 1;
        }
    }
    for token in output {
        // Taken at the first occurrence, so that each token is changed once.
        let count = counts.get_mut(*token as usize).map_or(0, std::mem::take);
        if let Some(x) = of(logits, *token).filter(|_| count > 0) {
            *x -= params.frequency_penalty * count as f32;
            *x -= params.presence_penalty;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER: f32 = f32::NEG_INFINITY;

    fn neutral() -> SamplingParams {
        SamplingParams::default()
    }

    #[test]
    fn nothing_to_change_copies_nothing() {
        let draw = Draw { prompt: &[0], output: &[1], stop_tokens: &[0], allowed: None };
        assert_eq!(changed(&[1.0, 2.0], &neutral(), &draw), None);
        let reached = SamplingParams { min_tokens: 1, ..neutral() };
        assert_eq!(changed(&[1.0, 2.0], &reached, &draw), None);
    }

    #[test]
    fn the_repetition_penalty_divides_positive_and_multiplies_negative_logits() {
        let params = SamplingParams { repetition_penalty: 2.0, ..neutral() };
        // Token 0 is in the prompt, 1 in the output, 2 in both and twice, 9 does not exist.
        let draw = Draw { prompt: &[0, 2, 2, 9], output: &[1, 2], stop_tokens: &[], allowed: None };
        let got = changed(&[3.0, -3.0, 8.0, 8.0, -1.0], &params, &draw).unwrap();
        assert_eq!(got, [1.5, -6.0, 4.0, 8.0, -1.0]);
    }

    #[test]
    fn frequency_counts_and_presence_does_not() {
        let params = SamplingParams { frequency_penalty: 0.5, presence_penalty: 0.25, ..neutral() };
        let draw = Draw { prompt: &[3], output: &[1, 2, 1, 1], stop_tokens: &[], allowed: None };
        let got = changed(&[1.0; 4], &params, &draw).unwrap();
        assert_eq!(got, [1.0, 1.0 - 1.5 - 0.25, 1.0 - 0.5 - 0.25, 1.0]);
    }

    #[test]
    fn biases_add_up_in_any_order() {
        let biases = [(1, 0.1), (2, -100.0), (1, 1e7), (1, -1e7), (7, 1.0)];
        let params = |logit_bias| SamplingParams { logit_bias, ..neutral() };
        let once = changed(&[0.5; 3], &params(biases.to_vec()), &Draw::default()).unwrap();
        let reversed = biases.iter().rev().copied().collect();
        assert_eq!(changed(&[0.5; 3], &params(reversed), &Draw::default()).unwrap(), once);
        assert_eq!((once[0], once[2]), (0.5, -99.5));
    }

    #[test]
    fn a_mask_forbids_what_it_does_not_name() {
        let mut logits = vec![1.0; 70];
        forbid(&mut logits, &[u32::MAX, 0b10]);
        let left: Vec<usize> = (0..70).filter(|i| logits[*i] == 1.0).collect();
        assert_eq!(left, (0..32).chain([33]).collect::<Vec<_>>());
    }

    #[test]
    fn stop_tokens_are_barred_unless_nothing_else_is_allowed() {
        let params = SamplingParams { min_tokens: 2, ..neutral() };
        let draw = Draw { output: &[0], stop_tokens: &[1, 1, 8], ..Draw::default() };
        assert_eq!(changed(&[1.0, 2.0, 3.0], &params, &draw).unwrap(), [1.0, NEVER, 3.0]);
        let only_stop = Draw { allowed: Some(&[0b10]), ..draw };
        assert_eq!(changed(&[1.0, 2.0, 3.0], &params, &only_stop).unwrap(), [NEVER, 2.0, NEVER]);
    }
}
