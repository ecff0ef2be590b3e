//! Measures of quality: perplexity, and comparison with reference logits.

use std::path::Path;

use safetensors::SafeTensors;
use serde::{Deserialize, Serialize};
use yunta_model::Step;

use crate::{LocalModel, RankError};

/// Why an evaluation could not be made.
#[derive(Debug, thiserror::Error)]
pub enum EvaluationError {
    /// The model failed.
    #[error(transparent)]
    Rank(#[from] RankError),
    /// A reference file can't be used.
    #[error("{file}: {reason}")]
    Reference {
        /// The file.
        file: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The text is too short.
    #[error("the text has {tokens} tokens: less than two contexts of {context}")]
    TooShort {
        /// Tokens in the text.
        tokens: usize,
        /// Tokens per chunk.
        context: usize,
    },
}

/// Perplexity of a text, with what it was computed over.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Perplexity {
    /// exp of the mean negative log-likelihood.
    pub perplexity: f64,
    /// Its standard error.
    pub error: f64,
    /// Chunks of `context` tokens.
    pub chunks: usize,
    /// Tokens that were predicted.
    pub tokens: usize,
}

/// Perplexity in the manner of llama-perplexity: the text is cut in chunks of `context` tokens,
/// each evaluated by itself, and the second half of each is scored.
///
/// # Errors
/// [`EvaluationError`] if the text is shorter than two contexts, or the model fails.
pub fn perplexity(
    model: &mut LocalModel,
    tokens: &[u32],
    context: usize,
    bos: Option<u32>,
    mut progress: impl FnMut(usize, usize),
) -> Result<Perplexity, EvaluationError> {
    if context < 4 || tokens.len() < 2 * context {
        return Err(EvaluationError::TooShort { tokens: tokens.len(), context });
    }
    let chunks = tokens.len() / context;
    let first = context / 2;
    let (mut sum, mut squares, mut count) = (0.0f64, 0.0f64, 0usize);
    for (i, chunk) in tokens.chunks_exact(context).enumerate() {
        let mut chunk = chunk.to_vec();
        if let (Some(bos), Some(start)) = (bos, chunk.first_mut()) {
            *start = bos;
        }
        let scored = context - 1 - first;
        let logits = model.logits(&chunk[..context - 1], scored)?;
        for (row, target) in logits.chunks_exact(model.vocab()).zip(&chunk[first + 1..]) {
            let nll = -f64::from(crate::logprobs(row, *target, 0).chosen);
            sum += nll;
            squares += nll * nll;
            count += 1;
        }
        progress(i + 1, chunks);
    }
    let n = count as f64;
    let mean = sum / n;
    let deviation = ((squares / n - mean * mean).max(0.0) / (n - 1.0).max(1.0)).sqrt();
    let perplexity = mean.exp();
    Ok(Perplexity { perplexity, error: deviation * perplexity, chunks, tokens: count })
}

/// `reference.json`: what a public implementation computed.
#[derive(Debug, Deserialize)]
pub struct Reference {
    name: String,
    prompts: Vec<ReferencePrompt>,
    suggested_atol_f32: f64,
}

#[derive(Debug, Deserialize)]
struct ReferencePrompt {
    ids: Vec<u32>,
    greedy: Vec<u32>,
}

/// The outcome of a comparison.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    /// The reference's name.
    pub name: String,
    /// Logits within the tolerance and continuations equal.
    pub ok: bool,
    /// Greatest difference of a logit.
    pub max_abs_error: f64,
    /// What the reference allows.
    pub tolerance: f64,
    /// The first greedy token that differs: prompt and position.
    pub first_divergence: Option<(usize, usize)>,
}

impl Reference {
    /// Reads `reference.json`.
    ///
    /// # Errors
    /// [`EvaluationError::Reference`] if it can't be read.
    pub fn read(json: &Path) -> Result<Self, EvaluationError> {
        let bad = |reason: String| EvaluationError::Reference {
            file: json.display().to_string(),
            reason,
        };
        let text = std::fs::read_to_string(json).map_err(|e| bad(e.to_string()))?;
        serde_json::from_str(&text).map_err(|e| bad(e.to_string()))
    }

    /// Tokens of the longest prompt with its continuation.
    pub fn longest(&self) -> usize {
        self.prompts.iter().map(|p| p.ids.len() + p.greedy.len()).max().unwrap_or(0)
    }

    /// Compares a model with the logits in `tensors` (`reference.safetensors`).
    ///
    /// # Errors
    /// [`EvaluationError`] if the file can't be used or the model fails.
    pub fn compare(
        &self,
        model: &mut LocalModel,
        tensors: &Path,
    ) -> Result<Verdict, EvaluationError> {
        let bad = |reason: String| EvaluationError::Reference {
            file: tensors.display().to_string(),
            reason,
        };
        let data = std::fs::read(tensors).map_err(|e| bad(e.to_string()))?;
        let file = SafeTensors::deserialize(&data).map_err(|e| bad(e.to_string()))?;
        let rows = |name: String| -> Result<Vec<f32>, EvaluationError> {
            let tensor = file.tensor(&name).map_err(|e| bad(format!("{name}: {e}")))?;
            let bytes = tensor.data().chunks_exact(4);
            Ok(bytes.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect())
        };
        let (mut worst, mut divergence) = (0.0f64, None);
        for (p, prompt) in self.prompts.iter().enumerate() {
            let prefill = rows(format!("p{p}.prefill"))?;
            let decode = rows(format!("p{p}.decode"))?;
            let vocab = model.vocab();
            let got = model.logits(&prompt.ids, prefill.len() / vocab)?;
            worst = worst.max(difference(&got, &prefill));
            let mut last = got[got.len() - vocab.min(got.len())..].to_vec();
            for (i, token) in prompt.greedy.iter().enumerate() {
                let expected = decode.get(i * vocab..(i + 1) * vocab).unwrap_or(&[]);
                worst = worst.max(difference(&last, expected));
                let own =
                    crate::sample(&last, &crate::SamplingParams::greedy(), &crate::Draw::default());
                if own != Some(*token) && divergence.is_none() {
                    divergence = Some((p, i));
                }
                // Follow the reference, so that each position is compared on the same text.
                last = model.next_logits(prompt.ids.len() + i, *token)?;
            }
        }
        let tolerance = self.suggested_atol_f32;
        Ok(Verdict {
            name: self.name.clone(),
            ok: worst <= tolerance && divergence.is_none(),
            max_abs_error: worst,
            tolerance,
            first_divergence: divergence,
        })
    }
}

/// Greatest difference; infinite if the lengths differ or a number is none.
fn difference(a: &[f32], b: &[f32]) -> f64 {
    if a.len() != b.len() {
        return f64::INFINITY;
    }
    let worst = a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs()));
    worst.fold(0.0, |most, d| if d.is_nan() { f64::INFINITY } else { most.max(d) })
}

impl LocalModel {
    /// Runs a prompt as a new sequence: the logits at its last `outputs` tokens.
    ///
    /// # Errors
    /// [`RankError`] if a rank fails.
    pub fn logits(&mut self, tokens: &[u32], outputs: usize) -> Result<Vec<f32>, RankError> {
        let mut step = Step::default();
        step.push(0, 0, tokens, outputs.min(tokens.len()));
        self.run(step)
    }

    /// Appends one token at `position` to the sequence: the logits behind it.
    ///
    /// # Errors
    /// [`RankError`] if a rank fails.
    pub fn next_logits(&mut self, position: usize, token: u32) -> Result<Vec<f32>, RankError> {
        let mut step = Step::default();
        step.push(0, position, &[token], 1);
        self.run(step)
    }
}
