//! Log-probabilities in the shapes of the two endpoints.

use serde_json::{Map, Value, json};

use crate::text::PlacedToken;
use crate::text_model::TextModel;

/// JSON has no minus infinity; OpenAI writes this for "as good as impossible".
const IMPOSSIBLE: f32 = -9999.0;

fn number(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { IMPOSSIBLE }
}

/// `choices[].logprobs` of a chat completion.
pub(crate) fn chat(text: &dyn TextModel, tokens: &[PlacedToken]) -> Value {
    let content: Vec<Value> = tokens
        .iter()
        .map(|placed| {
            let mut entry = chat_entry(text, placed.token, placed.logprobs.chosen);
            let top = placed.logprobs.top.iter();
            entry["top_logprobs"] =
                top.map(|&(token, logprob)| chat_entry(text, token, logprob)).collect();
            entry
        })
        .collect();
    json!({"content": content, "refusal": null})
}

fn chat_entry(text: &dyn TextModel, token: u32, logprob: f32) -> Value {
    let bytes = text.token_bytes(token);
    let shown = bytes.as_deref().map(String::from_utf8_lossy).unwrap_or_default();
    json!({"token": shown, "logprob": number(logprob), "bytes": bytes})
}

/// `choices[].logprobs` of a text completion. Offsets are in characters from the beginning of
/// the output.
pub(crate) fn completion(text: &dyn TextModel, tokens: &[PlacedToken]) -> Value {
    let names: Vec<String> = tokens.iter().map(|placed| token_name(text, placed.token)).collect();
    let chosen: Vec<f32> = tokens.iter().map(|placed| number(placed.logprobs.chosen)).collect();
    let offsets: Vec<usize> = tokens.iter().map(|placed| placed.offset).collect();
    let top: Vec<Map<String, Value>> = tokens.iter().map(|placed| top_map(text, placed)).collect();
    json!({"tokens": names, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets})
}

/// The likeliest tokens, and the chosen one, which need not be among them.
fn top_map(text: &dyn TextModel, placed: &PlacedToken) -> Map<String, Value> {
    let chosen = (placed.token, placed.logprobs.chosen);
    let all = placed.logprobs.top.iter().copied().chain([chosen]);
    all.map(|(token, logprob)| (token_name(text, token), json!(number(logprob)))).collect()
}

/// The token's text, or, where that is no text, `bytes:\xe2\x80` as OpenAI writes it.
fn token_name(text: &dyn TextModel, token: u32) -> String {
    let bytes = text.token_bytes(token).unwrap_or_default();
    String::from_utf8(bytes).unwrap_or_else(|error| {
        let escaped = error.as_bytes().iter().map(|byte| format!("\\x{byte:02x}"));
        format!("bytes:{}", escaped.collect::<String>())
    })
}
