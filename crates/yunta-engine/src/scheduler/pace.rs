//! How long steps take, learnt from those that were run: so that a long prompt is taken in pieces
//! that the running streams hardly notice, and drafts are tried only where they pay.

use std::time::Duration;

/// Weight of the newest observation.
const NEWEST: f64 = 0.25;
/// Prompt tokens beside running streams while nothing is known.
const FIRST_GUESS: usize = 32;
/// The least number of prompt tokens in a step: a prompt must get on.
const LEAST: usize = 4;
/// Estimates are a little off, and contexts grow: not all of the room is used.
const MARGIN: f64 = 0.85;
/// What a further token of a batch costs, as a share of the first, where that is not known.
const GROWTH: f64 = 0.33;
/// Batch sizes are told apart by their binary logarithm.
const SIZES: usize = 12;

#[derive(Default)]
pub(crate) struct Pace {
    /// Seconds of a step of so many generated tokens, without prompts.
    decode: [Option<f64>; SIZES],
    /// Seconds per prompt token.
    prompt: Option<f64>,
    /// Seconds per token of a draft model.
    draft: Option<f64>,
}

fn size(tokens: usize) -> usize {
    (tokens.max(1).next_power_of_two().trailing_zeros() as usize).min(SIZES - 1)
}

fn learn(known: &mut Option<f64>, seen: f64) {
    *known = Some(known.map_or(seen, |old| old + NEWEST * (seen - old)));
}

impl Pace {
    /// A step has taken so long.
    pub(crate) fn observe(&mut self, generated: usize, prompt: usize, took: Duration) {
        let took = took.as_secs_f64();
        if prompt == 0 {
            if generated > 0
                && let Some(known) = self.decode.get_mut(size(generated))
            {
                learn(known, took);
            }
            return;
        }
        // A few tokens tell little about the cost of each.
        if prompt >= LEAST {
            let rest = took - self.step_seconds(generated).unwrap_or(0.0);
            if rest > 0.0 {
                learn(&mut self.prompt, rest / prompt as f64);
            }
        }
    }

    /// A draft model has taken so long.
    pub(crate) fn observe_drafts(&mut self, tokens: usize, took: Duration) {
        if tokens > 0 {
            learn(&mut self.draft, took.as_secs_f64() / tokens as f64);
        }
    }

    /// Seconds per token that a draft model drafts; 0 if there is none.
    pub(crate) fn draft_seconds(&self) -> f64 {
        self.draft.unwrap_or(0.0)
    }

    /// Seconds of a step of so many generated tokens, if there is anything to go by.
    pub(crate) fn step_seconds(&self, generated: usize) -> Option<f64> {
        if generated == 0 {
            return Some(0.0);
        }
        let want = size(generated);
        let known = |i: usize| Some((i, self.decode.get(i).copied().flatten()?));
        // The nearest size that was seen; a larger batch takes longer, but not in proportion.
        let (at, seconds) = (0..SIZES).find_map(|distance| {
            let below = want.checked_sub(distance).and_then(known);
            below.or_else(|| known(want + distance))
        })?;
        let grown = |sizes: usize| 1.0 + GROWTH * ((1u32 << sizes) - 1) as f64;
        Some(match want.checked_sub(at) {
            Some(larger) => seconds * grown(larger),
            None => seconds / grown(at - want),
        })
    }

    /// How many prompt tokens may go beside so many generated ones, if the streams shall wait at
    /// most `ratio` times as long as without.
    pub(crate) fn prompt_budget(&self, generated: usize, ratio: f64) -> usize {
        let guess = self.step_seconds(generated).zip(self.prompt);
        let Some((alone, each)) = guess else { return FIRST_GUESS };
        let room = MARGIN * (ratio - 1.0).max(0.0) * alone / each.max(1e-9);
        (room as usize).max(LEAST)
    }

    /// Seconds of a step by its exact size class, if seen.
    pub(crate) fn seen(&self, generated: usize) -> Option<f64> {
        self.decode.get(size(generated)).copied().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_gets_what_the_streams_can_spare() {
        let mut pace = Pace::default();
        assert_eq!(pace.prompt_budget(4, 2.0), FIRST_GUESS);
        for _ in 0..50 {
            pace.observe(8, 0, Duration::from_millis(20));
            pace.observe(0, 100, Duration::from_millis(100));
        }
        // Not quite 20 ms more, at 1 ms per token.
        assert!((16..=17).contains(&pace.prompt_budget(8, 2.0)), "{}", pace.prompt_budget(8, 2.0));
        assert_eq!(pace.prompt_budget(8, 1.0), LEAST);
        // Prompt tokens beside the streams are told apart from them.
        for _ in 0..50 {
            pace.observe(8, 20, Duration::from_millis(60));
        }
        assert!((8..=9).contains(&pace.prompt_budget(8, 2.0)));
    }
}
