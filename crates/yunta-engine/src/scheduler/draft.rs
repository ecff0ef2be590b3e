//! Speculation: tokens that may come next, to be checked several at a time.
//!
//! A draft changes how fast tokens come, never which: each position is sampled from the model's
//! own logits, and a drafted token stands only if it is the one sampled (Leviathan et al., 2023,
//! with draws that are a function of seed and position, so that acceptance is equality).

use super::pace::Pace;

/// Lengths of the ends that are looked up, longest first.
const ENDS: [usize; 3] = [4, 3, 2];
/// Lengths of drafts that are considered.
const LENGTHS: [usize; 5] = [1, 3, 7, 15, 31];
/// Weight of the newest outcome.
const NEWEST: f64 = 0.15;
/// A draft must promise at least so much.
const GAIN_MIN: f64 = 1.05;

/// What usually follows the end of `tokens` in `tokens` itself: the tokens after the last earlier
/// place with the same end (Saxena, 2023, "prompt lookup decoding"). Where that place reaches into
/// the end, the text repeats, and so does the draft.
pub(crate) fn look_up(tokens: &[u32], most: usize) -> Vec<u32> {
    let earlier = tokens.get(..tokens.len().saturating_sub(1)).unwrap_or_default();
    for n in ENDS {
        let Some(end) = tokens.len().checked_sub(n).and_then(|at| tokens.get(at..)) else {
            continue;
        };
        if let Some(at) = earlier.windows(n).rposition(|w| w == end) {
            let follow = tokens.get(at + n..).unwrap_or_default();
            return follow.iter().copied().cycle().take(most).collect();
        }
    }
    Vec::new()
}

/// Whether drafts have been good lately, for one sequence.
#[derive(Debug, Default)]
pub(crate) struct Acceptance {
    /// How likely a drafted token is right, if those before it are.
    rate: f64,
    /// Predictions judged so far.
    seen: u32,
}

impl Acceptance {
    /// A drafted token was (not) the one sampled. Tokens that were only predicted and not computed
    /// count as well: knowing whether drafts would help costs nothing.
    pub(crate) fn judge(&mut self, right: bool) {
        let weight = NEWEST.max(1.0 / f64::from(self.seen + 1));
        self.seen = self.seen.saturating_add(1);
        self.rate += weight * (f64::from(u8::from(right)) - self.rate);
    }

    /// How long a draft pays, where the step has so many tokens already; 0 if none does.
    pub(crate) fn worthwhile(&self, others: usize, pace: &Pace, most: usize) -> usize {
        if self.seen < 4 {
            return 0;
        }
        let Some(alone) = pace.step_seconds(others + 1) else { return 0 };
        let gain = |length: usize| {
            let rate = self.rate.min(0.999);
            let tokens = (1.0 - rate.powi(length as i32 + 1)) / (1.0 - rate);
            // A size that was never tried is taken to be as dear as so many single steps would be
            // at half price: enough to try it where drafts are nearly always right.
            let guess = || {
                let known = pace.step_seconds(others + 1 + length).unwrap_or(alone);
                known.max(alone * (1.0 + 0.25 * length as f64 / (others + 1) as f64))
            };
            let step = pace.seen(others + 1 + length).unwrap_or_else(guess);
            let drafting = pace.draft_seconds() * length as f64;
            tokens * alone / (step + drafting).max(1e-9)
        };
        let lengths = LENGTHS.into_iter().filter(|l| *l <= most);
        let best = lengths.map(|l| (l, gain(l))).max_by(|a, b| a.1.total_cmp(&b.1));
        best.filter(|(_, gain)| *gain >= GAIN_MIN).map_or(0, |(length, _)| length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_last_place_with_the_same_end_counts() {
        assert_eq!(look_up(&[1, 2, 3, 9, 1, 2, 4, 8, 1, 2], 2), [4, 8]);
        assert_eq!(look_up(&[1, 2, 3, 9, 7, 1, 2, 3], 6), [9, 7, 1, 2, 3, 9]);
        assert_eq!(look_up(&[5, 5, 5, 5], 3), [5, 5, 5]);
        assert_eq!(look_up(&[7, 1, 2, 1, 2], 4), [1, 2, 1, 2]);
        assert!(look_up(&[1, 2, 3], 8).is_empty() && look_up(&[], 8).is_empty());
    }

    #[test]
    fn drafts_are_long_where_they_are_right_and_stop_where_they_are_not() {
        let mut pace = Pace::default();
        for (tokens, ms) in [(1, 5), (2, 6), (4, 8), (8, 14), (16, 26), (32, 50)] {
            pace.observe(tokens, 0, Duration::from_millis(ms));
        }
        let mut a = Acceptance::default();
        assert_eq!(a.worthwhile(0, &pace, 16), 0);
        (0..20).for_each(|_| a.judge(true));
        assert!(a.worthwhile(0, &pace, 16) >= 7);
        assert!(a.worthwhile(0, &pace, 3) == 3);
        (0..40).for_each(|_| a.judge(false));
        assert_eq!(a.worthwhile(0, &pace, 16), 0);
    }
}
