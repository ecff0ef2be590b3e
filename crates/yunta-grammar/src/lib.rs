//! Outputs that obey a JSON schema, a regular expression or a grammar.
//!
//! Floor 4 of the house: knows tokenizers, never models, requests or sampling. It says which tokens
//! may come next; who samples does so among them. Parsing is `llguidance`'s.
//!
//! - [`Grammar`] is what an output must obey; it crosses the wire with a request.
//! - [`GrammarCompiler`] holds what a model's vocabulary needs, once per model, and starts a
//!   [`Constraint`] for each sequence.
//! - [`Constraint`] gives the mask of the next token, takes tokens, and takes them back.
//!
//! ```no_run
//! use yunta_checkpoint::Checkpoint;
//! use yunta_grammar::{Grammar, GrammarCompiler};
//!
//! let tokenizer = Checkpoint::open("model.gguf".as_ref())?.tokenizer()?;
//! let stop: Vec<u32> = tokenizer.eos().into_iter().collect();
//! let compiler = GrammarCompiler::new(&tokenizer, tokenizer.vocab_size(), &stop)?;
//! let mut constraint = compiler.start(&Grammar::Regex("yes|no".to_owned()))?;
//! let mask = constraint.mask()?; // a bit for each token
//! # assert!(mask.iter().any(|word| *word != 0));
//! constraint.accept(42)?; // what was sampled
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

mod cache;
mod calls;
mod compiler;
mod constraint;
mod error;
mod grammar;
mod limits;
mod vocabulary;

pub use calls::{CallCount, CallTags};
pub use compiler::GrammarCompiler;
pub use constraint::Constraint;
pub use error::GrammarError;
pub use grammar::{Grammar, MAX_GRAMMAR_BYTES};
