//! What an output must obey.

use llguidance::api::TopLevelGrammar;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{GrammarError, limits};

/// The longest text of a grammar. `llguidance` bounds what it builds from one; this bounds what it
/// reads.
pub const MAX_GRAMMAR_BYTES: usize = 1 << 20;

/// What an output must obey, as a client writes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grammar {
    /// Any JSON object.
    JsonObject,
    /// The text of a JSON schema. `$ref` may point into the schema itself (`#/...`).
    JsonSchema(String),
    /// A regular expression in the syntax of Rust's `regex`, which the whole output matches.
    Regex(String),
    /// A grammar in `llguidance`'s variant of Lark, from its rule `start`.
    Lark(String),
}

impl Grammar {
    /// How errors call it.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::JsonObject => "JSON object",
            Self::JsonSchema(_) => "JSON schema",
            Self::Regex(_) => "regular expression",
            Self::Lark(_) => "Lark grammar",
        }
    }

    pub(crate) fn invalid(&self, reason: impl ToString) -> GrammarError {
        GrammarError::Invalid { kind: self.kind(), reason: reason.to_string() }
    }

    /// As `llguidance` wants it, once its size and (for JSON) its syntax are checked.
    pub(crate) fn parse(&self) -> Result<TopLevelGrammar, GrammarError> {
        let text = match self {
            Self::JsonObject => "",
            Self::JsonSchema(text) | Self::Regex(text) | Self::Lark(text) => text,
        };
        if text.len() > MAX_GRAMMAR_BYTES {
            return Err(GrammarError::TooLong { kind: self.kind(), bytes: text.len() });
        }
        Ok(match self {
            Self::JsonObject => TopLevelGrammar::from_json_schema(json!({"type": "object"})),
            Self::JsonSchema(text) => {
                let schema: Value = serde_json::from_str(text).map_err(|e| self.invalid(e))?;
                limits::check_schema(&schema).map_err(|e| self.invalid(e))?;
                TopLevelGrammar::from_json_schema(schema)
            }
            Self::Regex(text) => {
                limits::check_regex(text).map_err(|e| self.invalid(e))?;
                TopLevelGrammar::from_regex(text)
            }
            Self::Lark(text) => {
                limits::check_lark(text).map_err(|e| self.invalid(e))?;
                TopLevelGrammar::from_lark(text.clone())
            }
        })
    }
}
