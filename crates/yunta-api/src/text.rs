//! From tokens to text: incremental detokenisation, stop strings across token borders, and
//! log-probabilities that travel with the text they belong to. No I/O, no clock.

use std::collections::VecDeque;

use yunta_engine::TokenLogprobs;

use crate::text_model::{TextDecoder, TextError};

/// Strings at which generation ends.
///
/// Of several matches the one that *ends* first counts, and of those the longest: this is what a
/// reader of single characters would find, so the result does not depend on where tokens end.
#[derive(Clone, Debug, Default)]
pub struct StopStrings(Vec<String>);

impl StopStrings {
    /// Empty strings are dropped: they would match everywhere.
    pub fn new(strings: Vec<String>) -> Self {
        Self(strings.into_iter().filter(|s| !s.is_empty()).collect())
    }

    /// Byte position at which the first match in `text` begins.
    pub fn find(&self, text: &str) -> Option<usize> {
        self.0
            .iter()
            .filter_map(|stop| text.find(stop.as_str()).map(|start| (start + stop.len(), start)))
            .min()
            .map(|(_, start)| start)
    }

    /// Length in bytes of the longest end of `text` with which a stop string could begin.
    pub fn possible_beginning(&self, text: &str) -> usize {
        self.0.iter().map(|stop| overlap(text, stop)).max().unwrap_or(0)
    }
}

/// Length of the longest proper prefix of `stop` that `text` ends with.
fn overlap(text: &str, stop: &str) -> usize {
    stop.char_indices()
        .map(|(end, _)| end)
        .rev()
        .find(|&end| text.ends_with(&stop[..end]))
        .unwrap_or(0)
}

/// A token with its log-probabilities and its place in the output.
#[derive(Clone, Debug, PartialEq)]
pub struct PlacedToken {
    /// The token.
    pub token: u32,
    /// Where its text begins, in characters (Unicode scalar values) from the output's beginning.
    pub offset: usize,
    /// Its log-probabilities.
    pub logprobs: TokenLogprobs,
}

/// A piece of output that is safe to show.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// The text; never any part of a stop string that was met.
    pub text: String,
    /// The tokens whose text begins in this piece (or before it, if they had none until now).
    pub tokens: Vec<PlacedToken>,
}

impl Delta {
    /// Whether there is nothing to show.
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.tokens.is_empty()
    }

    /// Appends `next`.
    pub fn extend(&mut self, next: Delta) {
        self.text.push_str(&next.text);
        self.tokens.extend(next.tokens);
    }
}

/// What came of one token, or of the end.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Step {
    /// What can be shown now.
    pub delta: Delta,
    /// A stop string was met: `delta` is the last piece, and no more tokens are wanted.
    pub stopped: bool,
}

/// The state of one output: text that is decoded but held back, since a stop string may begin
/// in it, and tokens that wait for their text.
pub struct TextAssembler {
    decoder: Box<dyn TextDecoder>,
    stops: StopStrings,
    held: String,
    waiting: VecDeque<PlacedToken>,
    decoded_chars: usize,
    shown_chars: usize,
}

impl TextAssembler {
    /// Begins an empty output.
    pub fn new(decoder: Box<dyn TextDecoder>, stops: StopStrings) -> Self {
        Self {
            decoder,
            stops,
            held: String::new(),
            waiting: VecDeque::new(),
            decoded_chars: 0,
            shown_chars: 0,
        }
    }

    /// Takes the next token. Pass `logprobs` only for tokens that are to be listed.
    ///
    /// # Errors
    /// [`TextError`] if the token can't be decoded.
    pub fn push(&mut self, token: u32, logprobs: Option<TokenLogprobs>) -> Result<Step, TextError> {
        let piece = self.decoder.push(token)?;
        if let Some(logprobs) = logprobs {
            self.waiting.push_back(PlacedToken { token, offset: self.decoded_chars, logprobs });
        }
        Ok(self.append(&piece))
    }

    /// Takes the end of the output: shows what was held back.
    ///
    /// # Errors
    /// [`TextError`] if the last bytes can't be decoded.
    pub fn finish(&mut self) -> Result<Step, TextError> {
        let tail = self.decoder.flush()?;
        let mut step = self.append(&tail);
        if !step.stopped {
            let rest = self.show(self.held.len());
            step.delta.extend(rest);
            step.delta.tokens.extend(self.waiting.drain(..));
        }
        Ok(step)
    }

    fn append(&mut self, piece: &str) -> Step {
        self.held.push_str(piece);
        self.decoded_chars += piece.chars().count();
        // What was shown can't be the beginning of a stop string, so `held` is all there is to search.
        match self.stops.find(&self.held) {
            Some(cut) => Step { delta: self.show(cut), stopped: true },
            None => {
                let safe = self.held.len() - self.stops.possible_beginning(&self.held);
                Step { delta: self.show(safe), stopped: false }
            }
        }
    }

    /// Moves the first `bytes` of the held text out, and the tokens that begin in them.
    fn show(&mut self, bytes: usize) -> Delta {
        let rest = self.held.split_off(bytes);
        let text = std::mem::replace(&mut self.held, rest);
        self.shown_chars += text.chars().count();
        let ready = self.waiting.partition_point(|token| token.offset < self.shown_chars);
        Delta { text, tokens: self.waiting.drain(..ready).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stops(strings: &[&str]) -> StopStrings {
        StopStrings::new(strings.iter().map(|s| s.to_string()).collect())
    }

    #[test]
    fn the_match_that_ends_first_counts() {
        assert_eq!(stops(&["abcd", "bc"]).find("abcd"), Some(1));
        assert_eq!(stops(&["c", "abc"]).find("abc"), Some(0));
        assert_eq!(stops(&["x"]).find("abc"), None);
    }

    #[test]
    fn the_longest_possible_beginning_is_held() {
        assert_eq!(stops(&["abab", "b"]).possible_beginning("xaba"), 3);
        assert_eq!(stops(&["é!"]).possible_beginning("caf\u{e9}"), 2);
        assert_eq!(stops(&["abc"]).possible_beginning("abd"), 0);
        assert_eq!(stops(&[]).possible_beginning("abd"), 0);
    }

    #[test]
    fn empty_stop_strings_never_match() {
        assert_eq!(stops(&[""]).find("abc"), None);
    }
}
