//! A tokenizer's vocabulary in the form of `toktrie`.

use std::sync::Arc;

use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use yunta_checkpoint::Tokenizer;

use crate::GrammarError;
use crate::error::reason;

/// Deeper, the trie has no room; what so long a token says can be said with others.
const MAX_TOKEN_BYTES: usize = 1024;

/// Token ids in the trie are 24 bits wide, the last one is taken.
const MAX_VOCAB: usize = 0xFF_FFFF;

/// The trie of a vocabulary, and what must be known of its tokens besides.
pub(crate) struct Vocabulary {
    pub(crate) env: TokEnv,
    /// Width of the logits.
    pub(crate) size: usize,
    pub(crate) stop: Vec<u32>,
    /// A bit for each token that stands for something: padding of the logits is left out.
    pub(crate) real: Vec<u32>,
}

impl Vocabulary {
    pub(crate) fn new(
        tokenizer: &Tokenizer,
        size: usize,
        stop_tokens: &[u32],
    ) -> Result<Self, GrammarError> {
        let bad = |reason: String| GrammarError::Vocabulary { reason };
        let width = u32::try_from(size).ok().filter(|w| *w > 0 && size < MAX_VOCAB);
        let width = width.ok_or_else(|| bad(format!("{size} tokens are none or too many")))?;
        let mut stop = stop_tokens.to_vec();
        stop.sort_unstable();
        stop.dedup();
        let first = *stop.first().ok_or_else(|| bad("no stop token could end an output".into()))?;
        if let Some(beyond) = stop.iter().find(|s| **s >= width) {
            return Err(bad(format!("stop token {beyond} is beyond the {size} logits")));
        }
        let words: Vec<Vec<u8>> = (0..width)
            .map(|id| word(tokenizer, id, stop.binary_search(&id).is_ok()).unwrap_or_default())
            .collect();
        let mut real = vec![0; size.div_ceil(32)];
        for (id, _) in (0..).zip(&words).filter(|(_, word)| !word.is_empty()) {
            set(&mut real, id);
        }
        // The trie asserts that it has room.
        let build = || {
            let trie = TokTrie::from(&TokRxInfo::new(width, first), &words);
            Ok(trie.with_eos_tokens(&stop))
        };
        let trie = catch_unwind(build).map_err(|e| bad(reason(&e)))?;
        // Not canonical: any way to cut the wanted text into tokens is allowed, so that no text is
        // ever tokenised here and the model chooses.
        Ok(Self { env: Arc::new(ApproximateTokEnv::new(trie)), size, stop, real })
    }

    pub(crate) fn is_stop(&self, token: u32) -> bool {
        self.stop.binary_search(&token).is_ok()
    }

    /// Whether there is such a token.
    pub(crate) fn is_real(&self, token: u32) -> bool {
        get(&self.real, token)
    }
}

/// The bytes of a token as `toktrie` wants them; none if it never stands in a text.
fn word(tokenizer: &Tokenizer, id: u32, is_stop: bool) -> Option<Vec<u8>> {
    const MARKER: u8 = TokTrie::SPECIAL_TOKEN_MARKER;
    // A stop token ends the output wherever it comes, so its text must not count as text, special
    // or not.
    if is_stop || tokenizer.is_special(id) {
        let name = tokenizer.id_to_token(id)?;
        return Some([&[MARKER], name.as_bytes()].concat());
    }
    // The marker is no byte of UTF-8, but byte-fallback vocabularies have a token for it.
    let is_text = |bytes: &Vec<u8>| bytes.len() <= MAX_TOKEN_BYTES && !bytes.contains(&MARKER);
    tokenizer.token_bytes(id).filter(is_text)
}

/// Sets the bit of a token, if the mask is wide enough.
pub(crate) fn set(mask: &mut [u32], token: u32) {
    if let Some(word) = mask.get_mut(token as usize / 32) {
        *word |= 1 << (token % 32);
    }
}

/// Clears the bit of a token.
pub(crate) fn clear(mask: &mut [u32], token: u32) {
    if let Some(word) = mask.get_mut(token as usize / 32) {
        *word &= !(1 << (token % 32));
    }
}

/// The bit of a token.
pub(crate) fn get(mask: &[u32], token: u32) -> bool {
    mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}
