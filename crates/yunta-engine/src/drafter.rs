//! A small model that guesses what a large one will say.
//!
//! It runs on rank 0 alone, between the steps of the large model, and keeps a KV cache of its own:
//! per slot the tokens that it has seen, of which the wrong guesses are overwritten.

use yunta_model::{Alone, CacheEdit, KV_BLOCK, LanguageModel, ModelError, Step};

use crate::sampling::{Draw, SamplingParams, sample};

/// A sequence that may get a draft.
#[derive(Clone, Debug, PartialEq)]
pub struct DraftRequest {
    /// Its slot.
    pub slot: usize,
    /// Prompt and output so far.
    pub tokens: Vec<u32>,
    /// Tokens wanted at most.
    pub most: usize,
}

/// A draft model, and what it has computed.
pub struct Drafter {
    model: Box<dyn LanguageModel>,
    context: usize,
    /// By slot: the tokens in the cache.
    seen: Vec<Vec<u32>>,
}

impl Drafter {
    /// Blocks that the draft model's cache needs for so many sequences.
    pub fn blocks(sequences: usize, context: usize) -> usize {
        sequences * context.div_ceil(KV_BLOCK)
    }

    /// A drafter for so many slots of so many tokens; `model` must have [`Drafter::blocks`].
    ///
    /// # Errors
    /// [`ModelError`] if it has not.
    pub fn new(
        mut model: Box<dyn LanguageModel>,
        sequences: usize,
        context: usize,
    ) -> Result<Self, ModelError> {
        let each = Self::blocks(1, context) as u32;
        for slot in 0..sequences {
            let first = slot as u32 * each;
            let blocks = (first..first + each).collect();
            model.edit(&CacheEdit::Table { slot, keep: 0, blocks })?;
        }
        Ok(Self { model, context, seen: vec![Vec::new(); sequences] })
    }

    /// The likeliest continuations, as the draft model sees it: one per request.
    ///
    /// # Errors
    /// [`ModelError`] if the model fails.
    pub fn propose(&mut self, requests: &[DraftRequest]) -> Result<Vec<Vec<u32>>, ModelError> {
        let mut drafts: Vec<Vec<u32>> = vec![Vec::new(); requests.len()];
        loop {
            let mut step = Step::default();
            let mut asked = Vec::new();
            for (i, (request, draft)) in requests.iter().zip(&drafts).enumerate() {
                let tokens = [request.tokens.as_slice(), draft].concat();
                if draft.len() >= request.most || tokens.len() >= self.context {
                    continue;
                }
                let Some(seen) = self.seen.get_mut(request.slot) else { continue };
                // The last token is computed in any case: its logits are wanted.
                let equal = seen.iter().zip(&tokens).take_while(|(a, b)| a == b).count();
                let known = equal.min(tokens.len().saturating_sub(1));
                step.push(request.slot, known, tokens.get(known..).unwrap_or_default(), 1);
                *seen = tokens;
                asked.push(i);
            }
            if asked.is_empty() {
                return Ok(drafts);
            }
            let pending = self.model.compute(&step, &mut Alone)?;
            let logits = self.model.collect(pending, &mut Alone)?;
            for (i, row) in asked.into_iter().zip(logits.chunks_exact(self.model.vocab().max(1))) {
                let token = sample(row, &SamplingParams::greedy(), &Draw::default());
                if let (Some(draft), Some(token)) = (drafts.get_mut(i), token) {
                    draft.push(token);
                }
            }
        }
    }
}
