//! From a grammar to a constraint.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::api::ParserLimits;
use llguidance::panic_utils::catch_unwind;
use llguidance::{ParserFactory, TokenParser};
use yunta_checkpoint::Tokenizer;

use crate::cache::Cache;
use crate::error::{is_panic, reason};
use crate::vocabulary::Vocabulary;
use crate::{Constraint, Grammar, GrammarError};

/// Enough for the deepest grammar within the limits, several times over; memory is only taken as it
/// is touched.
const STACK_BYTES: usize = 256 << 20;

/// Compiles grammars for one model's vocabulary; shared by all threads.
pub struct GrammarCompiler {
    vocabulary: Arc<Vocabulary>,
    factory: ParserFactory,
    compiled: Cache,
}

impl GrammarCompiler {
    /// For a model with a `tokenizer`, logits for `vocab` tokens (there may be fewer or more tokens
    /// than that), and tokens that end its output.
    ///
    /// # Errors
    /// [`GrammarError::Vocabulary`] if there are too many tokens, or no stop tokens, or some beyond
    /// the logits.
    pub fn new(
        tokenizer: &Tokenizer,
        vocab: usize,
        stop_tokens: &[u32],
    ) -> Result<Self, GrammarError> {
        let vocabulary = Vocabulary::new(tokenizer, vocab, stop_tokens)?;
        let build = AssertUnwindSafe(|| ParserFactory::new_simple(&vocabulary.env));
        let factory = catch_unwind(build);
        let mut factory = factory.map_err(|e| GrammarError::Vocabulary { reason: reason(&e) })?;
        factory.quiet();
        *factory.limits_mut() = limits();
        Ok(Self { vocabulary: Arc::new(vocabulary), factory, compiled: Cache::default() })
    }

    /// A constraint at the start of an output. The last grammars are kept compiled.
    ///
    /// # Errors
    /// [`GrammarError::TooLong`] and [`GrammarError::Invalid`], which a client can act on;
    /// [`GrammarError::Internal`] if the parser breaks.
    pub fn start(&self, grammar: &Grammar) -> Result<Constraint, GrammarError> {
        let parser = match self.compiled.get(grammar) {
            Some(parser) => parser,
            None => {
                let parser = self.compile(grammar)?;
                self.compiled.put(grammar, &parser);
                parser
            }
        };
        Ok(Constraint::new(self.vocabulary.clone(), parser))
    }

    /// Compiles on a thread of its own: `llguidance` follows rules by recursion, deeper than the
    /// caller's stack may be.
    fn compile(&self, grammar: &Grammar) -> Result<TokenParser, GrammarError> {
        let internal = |reason: String| GrammarError::Internal { reason };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(STACK_BYTES);
            let thread = thread.spawn_scoped(scope, || self.compile_here(grammar));
            let thread = thread.map_err(|e| internal(format!("no thread to compile: {e}")))?;
            thread.join().unwrap_or_else(|_| Err(internal("the compiler panicked".to_owned())))
        })
    }

    fn compile_here(&self, grammar: &Grammar) -> Result<TokenParser, GrammarError> {
        let parsed = grammar.parse()?;
        let parser = self.factory.create_parser(parsed);
        let mut parser = parser.map_err(|e| match reason(&e) {
            reason if is_panic(&reason) => GrammarError::Internal { reason },
            reason => grammar.invalid(reason),
        })?;
        parser.start_without_prompt();
        Ok(parser)
    }
}

/// What a grammar may cost: `llguidance`'s own limits, but for the memory of one output, which
/// would be up to half a gigabyte.
fn limits() -> ParserLimits {
    ParserLimits { max_lexer_states: 50_000, verbose_errors: false, ..ParserLimits::default() }
}
