//! The shape of chat completions.

use std::sync::Arc;

use serde_json::{Value, json};

use crate::answer::Format;
use crate::generation::Finish;
use crate::logprobs;
use crate::text::Delta;
use crate::text_model::TextModel;

pub(crate) struct ChatFormat {
    text: Arc<dyn TextModel>,
    with_logprobs: bool,
}

impl ChatFormat {
    pub(super) fn new(text: Arc<dyn TextModel>, with_logprobs: bool) -> Self {
        Self { text, with_logprobs }
    }

    fn logprobs(&self, delta: &Delta) -> Value {
        match self.with_logprobs {
            true => logprobs::chat(self.text.as_ref(), &delta.tokens),
            false => Value::Null,
        }
    }
}

impl Format for ChatFormat {
    const ID_PREFIX: &'static str = "chatcmpl";
    const OBJECT: &'static str = "chat.completion";
    const CHUNK_OBJECT: &'static str = "chat.completion.chunk";

    fn whole(&self, choice: usize, output: &Delta, finish: Finish) -> Value {
        json!({
            "index": choice,
            "message": {"role": "assistant", "content": output.text, "refusal": null},
            "logprobs": self.logprobs(output),
            "finish_reason": finish.as_str(),
        })
    }

    fn opening(&self, choice: usize) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        Some(json!({"index": choice, "delta": delta, "logprobs": null, "finish_reason": null}))
    }

    fn piece(&self, choice: usize, delta: &Delta) -> Value {
        json!({
            "index": choice,
            "delta": {"content": delta.text},
            "logprobs": self.logprobs(delta),
            "finish_reason": null,
        })
    }

    fn closing(&self, choice: usize, finish: Finish) -> Value {
        json!({
            "index": choice,
            "delta": {},
            "logprobs": null,
            "finish_reason": finish.as_str(),
        })
    }
}
