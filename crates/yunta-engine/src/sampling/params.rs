//! The parameters of a draw, each with the source of its definition.

use serde::{Deserialize, Serialize};

/// How the next token is chosen. Sampling is a function of (`seed`, position): the same request
/// continued elsewhere draws the same tokens.
///
/// Fields are listed in the order in which they apply, and the defaults change nothing. A value
/// outside the range that a field names is never an error here, but what it does is unspecified.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SamplingParams {
    /// Added to the logits of these tokens; tokens named twice get both. Default: none.
    ///
    /// Source: OpenAI's API reference, `logit_bias`.
    pub logit_bias: Vec<(u32, f32)>,
    /// Stop tokens can't be drawn before the output has this many tokens, unless a grammar allows
    /// nothing else. Default: 0.
    ///
    /// Source: `min_tokens` of vLLM's `SamplingParams`.
    pub min_tokens: usize,
    /// Divides positive and multiplies negative logits of tokens in the prompt or the output; above
    /// 0. Default: 1.
    ///
    /// Source: Keskar et al., "CTRL", 2019 (arXiv:1909.05858), section 4.1, with the treatment of
    /// negative logits of Hugging Face's `RepetitionPenaltyLogitsProcessor`, which vLLM shares.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens as often as they are in the output. Default: 0.
    ///
    /// Source: OpenAI's API reference, `frequency_penalty`.
    pub frequency_penalty: f32,
    /// Subtracted from the logits of tokens that are in the output. Default: 0.
    ///
    /// Source: OpenAI's API reference, `presence_penalty`.
    pub presence_penalty: f32,
    /// Strength of the penalty on tokens that would lengthen a repetition ("don't repeat
    /// yourself"): `dry_multiplier * dry_base ^ (length - dry_allowed_length)`, where `length` is
    /// that of the longest earlier passage that equals the end of the text and that the token
    /// followed. Default: 0, which is off.
    ///
    /// Source: P. E. Weidmann's DRY, text-generation-webui pull request 5677; also llama.cpp.
    pub dry_multiplier: f32,
    /// Growth of the DRY penalty with each token; 1 or more. Default: 1.75.
    pub dry_base: f32,
    /// Repetitions of fewer tokens are free of the DRY penalty; those of one token never are if
    /// this is 0 or 1. Default: 2.
    pub dry_allowed_length: usize,
    /// How many of the last tokens DRY looks at. Default: 0, which is all.
    pub dry_range: usize,
    /// Tokens that DRY takes no repetition across. Default: none.
    pub dry_breakers: Vec<u32>,
    /// Divides the logits. Default: 1. With 0 the likeliest token is taken, and nothing below
    /// matters.
    pub temperature: f32,
    /// Keep the `top_k` likeliest tokens. Default: 0, which keeps all.
    ///
    /// Source: Fan et al., "Hierarchical Neural Story Generation", 2018 (arXiv:1805.04833).
    pub top_k: usize,
    /// Keep the smallest set of tokens of the most typical information content whose
    /// probabilities reach `typical_p`. Default: 1, which keeps all.
    ///
    /// Source: Meister et al., "Locally Typical Sampling", 2022 (arXiv:2202.00666).
    pub typical_p: f32,
    /// Keep the smallest set of likeliest tokens whose probabilities reach `top_p`. Default: 1,
    /// which keeps all.
    ///
    /// Source: Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019
    /// (arXiv:1904.09751).
    pub top_p: f32,
    /// Drop tokens less likely than `min_p` times the likeliest. Default: 0, which keeps all.
    ///
    /// Source: Nguyen et al., "Turning Up the Heat: Min-p Sampling", 2024 (arXiv:2407.01082).
    pub min_p: f32,
    /// How often to exclude top choices: all tokens that are at least `xtc_threshold` likely but
    /// the least likely of them. Default: 0, which is never.
    ///
    /// Source: P. E. Weidmann's XTC, text-generation-webui pull request 6335; also llama.cpp.
    pub xtc_probability: f32,
    /// How likely a top choice is; above 0.5 nothing is excluded, and 0 is off. Default: 0.1.
    pub xtc_threshold: f32,
    /// Seed of the random draws. Default: 0.
    pub seed: u64,
}

impl SamplingParams {
    /// The likeliest token, always.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, ..Self::default() }
    }
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            logit_bias: Vec::new(),
            min_tokens: 0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_range: 0,
            dry_breakers: Vec::new(),
            temperature: 1.0,
            top_k: 0,
            typical_p: 1.0,
            top_p: 1.0,
            min_p: 0.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            seed: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_that_an_older_gateway_leaves_out_are_neutral() {
        let params: SamplingParams =
            serde_json::from_str(r#"{"temperature": 0.5, "seed": 3}"#).unwrap();
        let expected = SamplingParams { temperature: 0.5, seed: 3, ..SamplingParams::default() };
        assert_eq!(params, expected);
    }
}
