//! The shape of chat completions.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use super::tools::{CallParser, Part};
use crate::answer::Format;
use crate::generation::Finish;
use crate::logprobs;
use crate::params::random_u64;
use crate::text::Delta;
use crate::text_model::TextModel;

pub(crate) struct ChatFormat {
    text: Arc<dyn TextModel>,
    with_logprobs: bool,
    /// Whether calls of tools are looked for.
    with_tools: bool,
    /// Of streamed outputs.
    streams: Mutex<HashMap<usize, Calls>>,
}

/// The calls of one output.
#[derive(Default)]
struct Calls {
    parser: CallParser,
    count: usize,
}

impl ChatFormat {
    pub(super) fn new(text: Arc<dyn TextModel>, with_logprobs: bool, with_tools: bool) -> Self {
        Self { text, with_logprobs, with_tools, streams: Mutex::default() }
    }

    fn logprobs(&self, delta: &Delta) -> Value {
        match self.with_logprobs {
            true => logprobs::chat(self.text.as_ref(), &delta.tokens),
            false => Value::Null,
        }
    }

    fn streams(&self) -> MutexGuard<'_, HashMap<usize, Calls>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn call_object(name: &str, arguments: &str) -> Value {
    json!({
        "id": format!("call_{:016x}", random_u64()),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    })
}

/// Why an output with or without calls has ended, in OpenAI's words.
fn reason(finish: Finish, calls: bool) -> &'static str {
    match finish {
        Finish::Stop if calls => "tool_calls",
        other => other.as_str(),
    }
}

impl Calls {
    /// The deltas of some parts.
    fn deltas(&mut self, parts: Vec<Part>) -> Vec<Value> {
        let delta = |part| match part {
            Part::Text(text) => json!({"content": text}),
            Part::Call(name, arguments) => {
                let mut call = call_object(&name, &arguments);
                call["index"] = json!(self.count);
                self.count += 1;
                json!({"tool_calls": [call]})
            }
        };
        parts.into_iter().map(delta).collect()
    }
}

impl Format for ChatFormat {
    const ID_PREFIX: &'static str = "chatcmpl";
    const OBJECT: &'static str = "chat.completion";
    const CHUNK_OBJECT: &'static str = "chat.completion.chunk";

    fn whole(&self, choice: usize, output: &Delta, finish: Finish) -> Value {
        let mut message = json!({"role": "assistant", "content": output.text, "refusal": null});
        let mut calls = Vec::new();
        if self.with_tools {
            let mut parser = CallParser::default();
            let mut text = String::new();
            for part in parser.push(&output.text).into_iter().chain(parser.finish()) {
                match part {
                    Part::Text(part) => text.push_str(&part),
                    Part::Call(name, arguments) => calls.push(call_object(&name, &arguments)),
                }
            }
            if !calls.is_empty() {
                message["content"] = if text.is_empty() { Value::Null } else { json!(text) };
                message["tool_calls"] = json!(calls);
            }
        }
        json!({
            "index": choice,
            "message": message,
            "logprobs": self.logprobs(output),
            "finish_reason": reason(finish, !calls.is_empty()),
        })
    }

    fn opening(&self, choice: usize) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        Some(json!({"index": choice, "delta": delta, "logprobs": null, "finish_reason": null}))
    }

    fn piece(&self, choice: usize, delta: &Delta) -> Vec<Value> {
        let chunk = |part: Value, logprobs: Value| json!({"index": choice, "delta": part, "logprobs": logprobs, "finish_reason": null});
        if !self.with_tools {
            return vec![chunk(json!({"content": delta.text}), self.logprobs(delta))];
        }
        let mut streams = self.streams();
        let calls = streams.entry(choice).or_default();
        let parts = calls.parser.push(&delta.text);
        let mut deltas = calls.deltas(parts);
        // Log-probabilities go out even where their text is held back.
        if deltas.is_empty() && self.with_logprobs && !delta.tokens.is_empty() {
            deltas.push(json!({}));
        }
        let first = deltas.into_iter().enumerate();
        first
            .map(|(i, part)| chunk(part, if i == 0 { self.logprobs(delta) } else { Value::Null }))
            .collect()
    }

    fn closing(&self, choice: usize, finish: Finish) -> Vec<Value> {
        let mut calls = self.streams().remove(&choice).unwrap_or_default();
        let parts = calls.parser.finish();
        let mut chunks: Vec<Value> = calls
            .deltas(parts)
            .into_iter()
            .map(|d| json!({"index": choice, "delta": d, "logprobs": null, "finish_reason": null}))
            .collect();
        chunks.push(json!({
            "index": choice,
            "delta": {},
            "logprobs": null,
            "finish_reason": reason(finish, calls.parser.has_calls()),
        }));
        chunks
    }
}
