//! What can be wrong with a grammar, or with a token under it.

use crate::MAX_GRAMMAR_BYTES;

/// Errors of this crate. [`GrammarError::is_of_the_request`] tells what a client can mend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The grammar's text is longer than any is read.
    #[error("{kind}: {bytes} bytes are too long: at most {MAX_GRAMMAR_BYTES} are allowed")]
    TooLong {
        /// What kind of grammar.
        kind: &'static str,
        /// Its length.
        bytes: usize,
    },
    /// The grammar makes no sense, uses what is not supported, or is too complex to compile.
    #[error("{kind}: {reason}")]
    Invalid {
        /// What kind of grammar.
        kind: &'static str,
        /// What is wrong, with the keyword or the place.
        reason: String,
    },
    /// The grammar compiled, but following it takes more than a step may cost.
    #[error("the grammar is too complex to follow, simplify it: {reason}")]
    TooComplex {
        /// Which limit.
        reason: String,
    },
    /// The output can neither go on nor end: no token spells what the grammar wants next.
    #[error("no token of the vocabulary continues the output as the grammar wants")]
    DeadEnd,
    /// The token may not come next.
    #[error("token {token} is not allowed here by the grammar")]
    NotAllowed {
        /// The token.
        token: u32,
    },
    /// More tokens were to be taken back than were accepted.
    #[error("{asked} tokens can't be taken back: {accepted} were accepted")]
    Rollback {
        /// How many were to be taken back.
        asked: usize,
        /// How many there are.
        accepted: usize,
    },
    /// The vocabulary can't be used.
    #[error("vocabulary: {reason}")]
    Vocabulary {
        /// What is wrong with it.
        reason: String,
    },
    /// The parser failed where it should not have.
    #[error("grammar parser: {reason}")]
    Internal {
        /// What it says.
        reason: String,
    },
}

impl GrammarError {
    /// Whether another grammar may help: the fault is in the request, not in the server.
    pub fn is_of_the_request(&self) -> bool {
        match self {
            Self::TooLong { .. }
            | Self::Invalid { .. }
            | Self::TooComplex { .. }
            | Self::DeadEnd => true,
            Self::NotAllowed { .. }
            | Self::Rollback { .. }
            | Self::Vocabulary { .. }
            | Self::Internal { .. } => false,
        }
    }
}

/// The words of `llguidance` without what is for its developers: dumps of its state, backtraces.
pub(crate) fn reason(error: &impl std::fmt::Display) -> String {
    const MAX_CHARS: usize = 1000;
    let text = format!("{error:#}");
    let end = ["\n<state>", "\n<non-verbose/>", "\n<backtrace>"];
    let end = end.iter().filter_map(|mark| text.find(mark)).min();
    let text = end.and_then(|end| text.get(..end)).unwrap_or(&text);
    // Some repeat the schema, which may be long.
    text.trim_end().chars().take(MAX_CHARS).collect()
}

/// Whether [`reason`] is of a panic that `llguidance` caught.
pub(crate) fn is_panic(reason: &str) -> bool {
    reason.starts_with("panic: ")
}
