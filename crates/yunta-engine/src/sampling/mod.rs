//! Choosing the next token.
//!
//! A pure function of the logits, the parameters and the text so far, so that a request continued
//! on other machines draws the same tokens.

mod dry;
mod logprobs;
mod params;
mod penalties;
mod pick;
mod select;
#[cfg(test)]
mod tests;
mod truncate;
mod weights;

pub use logprobs::logprobs;
pub use params::SamplingParams;

use pick::{pick, pick_any};
use select::argmax;

/// What a draw depends on, besides logits and parameters.
#[derive(Clone, Copy, Debug, Default)]
pub struct Draw<'a> {
    /// The prompt's tokens.
    pub prompt: &'a [u32],
    /// The output so far; its length is the position of the draw.
    pub output: &'a [u32],
    /// Tokens that end the output: `min_tokens` is about them.
    pub stop_tokens: &'a [u32],
    /// Tokens that a grammar allows, one bit per token, in little-endian words: token `t` is bit
    /// `t % 32` of word `t / 32`. Tokens beyond the last word are forbidden.
    pub allowed: Option<&'a [u32]>,
}

/// Chooses the token that follows `draw.output`.
///
/// First the logits change: bias, forbidden tokens, penalties for repetition, frequency and
/// presence, DRY. Then comes the temperature, and then top-k, typical-p, top-p, min-p and XTC each
/// drop tokens of what the one before has left. `None` if the logits hold a NaN or no finite
/// maximum (the model computed garbage), or if no token that may be drawn has a finite logit.
pub fn sample(logits: &[f32], params: &SamplingParams, draw: &Draw<'_>) -> Option<u32> {
    // Before anything is changed, so that a mask can't hide garbage.
    let best = argmax(logits)?;
    match penalties::changed(logits, params, draw) {
        None => choose(logits, best, params, draw.output.len()),
        Some(changed) => choose(&changed, argmax(&changed)?, params, draw.output.len()),
    }
}

/// Chooses by the final logits, of which `best` is the greatest.
fn choose(logits: &[f32], best: usize, params: &SamplingParams, position: usize) -> Option<u32> {
    // All other truncations leave a single token alone.
    if params.temperature > 0.0 && params.top_k != 1 {
        let most = logits.get(best).copied()?;
        match truncate::kept(logits, most, params, position) {
            truncate::Kept::All(weights) => pick_any(&weights, params.seed, position),
            truncate::Kept::Few(candidates) => pick(&candidates, params.seed, position),
        }
    } else {
        u32::try_from(best).ok()
    }
}
