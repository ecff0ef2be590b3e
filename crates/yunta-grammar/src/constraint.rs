//! One output under a grammar.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::TokenParser;
use llguidance::api::StopReason;
use llguidance::panic_utils::catch_unwind;

use crate::GrammarError;
use crate::error::{is_panic, reason};
use crate::vocabulary::{Vocabulary, clear, set};

/// One output under a grammar: which tokens may come next, after those that came.
///
/// Once a method fails with [`GrammarError::TooComplex`], [`GrammarError::DeadEnd`] or
/// [`GrammarError::Internal`], all do: the output can't be continued. The other errors change
/// nothing.
pub struct Constraint {
    vocabulary: Arc<Vocabulary>,
    parser: TokenParser,
    /// Tokens taken, a stop token included.
    accepted: usize,
    /// The last one was a stop token. The parser never sees those: it knows one way to end where
    /// models have several tokens.
    ended: bool,
    mask: Vec<u32>,
    /// The mask is that of this state.
    is_fresh: bool,
    broken: Option<GrammarError>,
}

impl Constraint {
    pub(crate) fn new(vocabulary: Arc<Vocabulary>, parser: TokenParser) -> Self {
        let mask = vec![0; vocabulary.size.div_ceil(32)];
        let (accepted, ended, is_fresh, broken) = (0, false, false, None);
        Self { vocabulary, parser, accepted, ended, mask, is_fresh, broken }
    }

    /// The tokens that may come next: a bit for each, from the lowest bit of the first word.
    ///
    /// All stop tokens are among them where the output may end, and they alone once it must end;
    /// none at all is after a stop token. Asking again costs nothing until the state changes.
    ///
    /// # Errors
    /// [`GrammarError::TooComplex`] if the step costs too much, [`GrammarError::DeadEnd`] if no
    /// token may come; [`GrammarError::Internal`] if the parser breaks.
    pub fn mask(&mut self) -> Result<&[u32], GrammarError> {
        if !self.is_fresh {
            match self.ended {
                true => self.mask.fill(0),
                false => self.compute_mask()?,
            }
            self.is_fresh = true;
        }
        Ok(&self.mask)
    }

    fn compute_mask(&mut self) -> Result<(), GrammarError> {
        let (set_of_tokens, may_end) =
            self.guarded(|parser| Ok((parser.compute_mask()?, parser.is_accepting())))?;
        let words = Vec::from(set_of_tokens).into_iter().chain(std::iter::repeat(0));
        for ((word, allowed), real) in self.mask.iter_mut().zip(words).zip(&self.vocabulary.real) {
            *word = allowed & real;
        }
        for stop in &self.vocabulary.stop {
            match may_end {
                true => set(&mut self.mask, *stop),
                false => clear(&mut self.mask, *stop),
            }
        }
        match self.mask.iter().any(|word| *word != 0) {
            true => Ok(()),
            false => Err(self.broken.insert(GrammarError::DeadEnd).clone()),
        }
    }

    /// Takes the next token.
    ///
    /// # Errors
    /// [`GrammarError::NotAllowed`] if it may not come next;
    /// [`GrammarError::TooComplex`] or [`GrammarError::Internal`] as for [`Constraint::mask`].
    pub fn accept(&mut self, token: u32) -> Result<(), GrammarError> {
        if self.allowed(&[token])? == 0 {
            return Err(GrammarError::NotAllowed { token });
        }
        match self.vocabulary.is_stop(token) {
            true => self.ended = true,
            false => {
                // How many tokens to take back: none, as that was not allowed when it was built.
                self.guarded(|parser| parser.consume_token(token).map(|_| ()))?;
            }
        }
        self.accepted = self.accepted.saturating_add(1);
        self.is_fresh = false;
        Ok(())
    }

    /// Takes the last `tokens` accepted tokens back.
    ///
    /// # Errors
    /// [`GrammarError::Rollback`] if there are not so many; [`GrammarError::Internal`] as for
    /// [`Constraint::mask`].
    pub fn rollback(&mut self, tokens: usize) -> Result<(), GrammarError> {
        let accepted = self.accepted;
        let left = accepted.checked_sub(tokens);
        let left = left.ok_or(GrammarError::Rollback { asked: tokens, accepted })?;
        if tokens > 0 {
            let of_parser = tokens - usize::from(self.ended);
            self.guarded(|parser| parser.rollback(of_parser))?;
            self.accepted = left;
            self.ended = false;
            self.is_fresh = false;
        }
        Ok(())
    }

    /// How many of these tokens could be accepted one after the other; nothing changes. None, if
    /// the output can't be continued.
    pub fn check(&mut self, tokens: &[u32]) -> usize {
        self.allowed(tokens).unwrap_or(0)
    }

    /// Whether a stop token was accepted: nothing can follow.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    fn allowed(&mut self, tokens: &[u32]) -> Result<usize, GrammarError> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        // The parser breaks at a token that is none.
        let vocabulary = &self.vocabulary;
        let real = tokens.iter().take_while(|t| vocabulary.is_real(**t) || vocabulary.is_stop(**t));
        let tokens = tokens.get(..real.count()).unwrap_or_default();
        match self.ended || tokens.is_empty() {
            true => Ok(0),
            false => self.guarded(|parser| parser.validate_tokens_raw(tokens)),
        }
    }

    /// Calls the parser, which panics where its makers thought that it can't be.
    fn guarded<T>(
        &mut self,
        call: impl FnOnce(&mut TokenParser) -> anyhow::Result<T>,
    ) -> Result<T, GrammarError> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        // After a panic the parser is never used again.
        let parser = &mut self.parser;
        let result = catch_unwind(AssertUnwindSafe(|| call(parser)));
        result.map_err(|e| {
            let reason = reason(&e);
            let error = match self.parser.stop_reason() {
                _ if is_panic(&reason) => GrammarError::Internal { reason },
                StopReason::LexerTooComplex | StopReason::ParserTooComplex => {
                    GrammarError::TooComplex { reason }
                }
                StopReason::NoExtensionBias => GrammarError::DeadEnd,
                _ => GrammarError::Internal { reason },
            };
            self.broken.insert(error).clone()
        })
    }
}
