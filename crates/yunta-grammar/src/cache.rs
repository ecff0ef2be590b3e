//! The last grammars that were compiled.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use llguidance::TokenParser;

use crate::Grammar;

/// A compiled grammar may take tens of megabytes if someone tries.
const MAX_COMPILED: usize = 16;

/// Parsers that have seen no token, the last used first.
#[derive(Default)]
pub(crate) struct Cache(Mutex<VecDeque<(Grammar, TokenParser)>>);

impl Cache {
    /// A copy of the parser of a grammar.
    pub(crate) fn get(&self, grammar: &Grammar) -> Option<TokenParser> {
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = entries.iter().position(|(g, _)| g == grammar)?;
        let entry = entries.remove(at)?;
        // Deep: a plain clone shares the states of the lexer and a limit on their number, so that
        // one output could make another fail.
        let parser = entry.1.deep_clone();
        entries.push_front(entry);
        Some(parser)
    }

    /// Keeps a copy of a parser.
    pub(crate) fn put(&self, grammar: &Grammar, parser: &TokenParser) {
        let copy = (grammar.clone(), parser.deep_clone());
        let mut entries = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have compiled the same.
        entries.retain(|(g, _)| g != grammar);
        entries.push_front(copy);
        entries.truncate(MAX_COMPILED);
    }
}
