//! `POST /v1/completions`.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::answer::Format;
use crate::error::ApiError;
use crate::fields::{Fields, mismatch};
use crate::generation::{Finish, Job};
use crate::logprobs;
use crate::params::{Params, unsupported};
use crate::server::ApiState;
use crate::text::{Delta, PlacedToken};
use crate::text_model::TextModel;

const LOGPROBS_MAX: i64 = 20;
/// Prompts in one request.
const PROMPTS_MAX: usize = 64;

/// Checks a request and tokenises its prompts. Takes time in proportion to the length of the text:
/// not for asynchronous threads.
pub(crate) fn prepare(
    state: &ApiState,
    body: &Map<String, Value>,
) -> Result<(Job, CompletionFormat), ApiError> {
    let fields = Fields::new(body);
    let params = Params::read(fields, state.config())?;
    let logprobs = fields.integer("logprobs", 0..=LOGPROBS_MAX)?.map(|top| top as usize);
    let echo = fields.boolean("echo")?.unwrap_or(false);
    refuse_what_is_not_supported(fields, &params, echo && logprobs.is_some())?;
    let text = state.text();
    let prompts = prompts(fields)?;
    let tokens =
        prompts.iter().map(|prompt| prompt.tokens(text.as_ref())).collect::<Result<Vec<_>, _>>()?;
    let mut echoes = Vec::new();
    if echo {
        for prompt in &prompts {
            let shown = prompt.shown(text.as_ref())?;
            echoes.extend(std::iter::repeat_n(shown, params.n));
        }
    }
    let job = Job { prompts: tokens, logprobs, prompt_param: "prompt", params };
    let with_logprobs = logprobs.is_some();
    Ok((job, CompletionFormat { text: text.clone(), with_logprobs, echoes }))
}

fn refuse_what_is_not_supported(
    fields: Fields<'_>,
    params: &Params,
    prompt_logprobs: bool,
) -> Result<(), ApiError> {
    if prompt_logprobs {
        let hint = "log-probabilities of the prompt are not computed; leave logprobs or echo out";
        return Err(unsupported("echo", hint));
    }
    if fields.integer("best_of", 1..=i64::MAX)?.is_some_and(|best| best != params.n as i64) {
        return Err(unsupported("best_of", "it must be absent or equal to n"));
    }
    if fields.string("suffix")?.is_some_and(|suffix| !suffix.is_empty()) {
        return Err(unsupported("suffix", "leave it out"));
    }
    Ok(())
}

/// A prompt as the client gave it.
enum Prompt<'a> {
    Text(&'a str),
    Tokens { path: String, ids: &'a [Value] },
}

fn prompts(fields: Fields<'_>) -> Result<Vec<Prompt<'_>>, ApiError> {
    let expected = "a string, an array of strings, an array of token ids, or an array of those";
    let Some(value) = fields.get("prompt") else {
        return Err(ApiError::invalid(
            "prompt",
            format!("prompt is missing: it must be {expected}"),
        ));
    };
    match value {
        Value::String(text) => Ok(vec![Prompt::Text(text)]),
        Value::Array(ids) if ids.first().is_some_and(Value::is_number) => {
            Ok(vec![Prompt::Tokens { path: "prompt".into(), ids }])
        }
        Value::Array(prompts) if (1..=PROMPTS_MAX).contains(&prompts.len()) => {
            let indexed = prompts.iter().enumerate();
            indexed.map(|(i, prompt)| element(format!("prompt[{i}]"), prompt)).collect()
        }
        Value::Array(prompts) => {
            let message = format!("prompt has {} elements: 1 to {PROMPTS_MAX} go", prompts.len());
            Err(ApiError::invalid("prompt", message))
        }
        other => Err(mismatch("prompt", expected, other)),
    }
}

fn element(path: String, value: &Value) -> Result<Prompt<'_>, ApiError> {
    match value {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(ids) => Ok(Prompt::Tokens { path, ids }),
        other => Err(mismatch(&path, "a string or an array of token ids", other)),
    }
}

impl Prompt<'_> {
    fn tokens(&self, text: &dyn TextModel) -> Result<Vec<u32>, ApiError> {
        let tokens = match self {
            Self::Text(prompt) => text.encode(prompt, true)?,
            Self::Tokens { path, ids } => token_ids(path, ids, text.vocab_size())?,
        };
        match tokens.is_empty() {
            true => Err(ApiError::invalid("prompt", "the prompt is empty: it needs a token")),
            false => Ok(tokens),
        }
    }

    fn shown(&self, text: &dyn TextModel) -> Result<String, ApiError> {
        match self {
            Self::Text(prompt) => Ok((*prompt).to_owned()),
            Self::Tokens { path, ids } => {
                let mut decoder = text.decoder();
                let mut shown = String::new();
                for id in token_ids(path, ids, text.vocab_size())? {
                    shown += &decoder.push(id)?;
                }
                Ok(shown + &decoder.flush()?)
            }
        }
    }
}

fn token_ids(path: &str, ids: &[Value], vocab_size: usize) -> Result<Vec<u32>, ApiError> {
    let id = |value: &Value| {
        let id = value.as_u64().filter(|&id| id < vocab_size as u64)?;
        u32::try_from(id).ok()
    };
    let expected = || format!("a token id below {vocab_size}");
    let indexed = ids.iter().enumerate();
    indexed
        .map(|(i, value)| {
            id(value).ok_or_else(|| mismatch(&format!("{path}[{i}]"), &expected(), value))
        })
        .collect()
}

/// The shape of text completions.
pub(crate) struct CompletionFormat {
    text: Arc<dyn TextModel>,
    with_logprobs: bool,
    /// Text of the prompt per output; empty if it is not to be repeated.
    echoes: Vec<String>,
}

impl CompletionFormat {
    fn choice(
        &self,
        choice: usize,
        text: &str,
        tokens: Option<&[PlacedToken]>,
        finish: Option<Finish>,
    ) -> Value {
        let tokens = tokens.filter(|_| self.with_logprobs);
        json!({
            "index": choice,
            "text": text,
            "logprobs": tokens.map(|tokens| logprobs::completion(self.text.as_ref(), tokens)),
            "finish_reason": finish.map(Finish::as_str),
        })
    }
}

impl Format for CompletionFormat {
    const ID_PREFIX: &'static str = "cmpl";
    const OBJECT: &'static str = "text_completion";
    const CHUNK_OBJECT: &'static str = "text_completion";

    fn whole(&self, choice: usize, output: &Delta, finish: Finish) -> Value {
        let echo = self.echoes.get(choice).map_or("", String::as_str);
        let text = echo.to_owned() + &output.text;
        self.choice(choice, &text, Some(&output.tokens), Some(finish))
    }

    fn opening(&self, choice: usize) -> Option<Value> {
        let echo = self.echoes.get(choice)?;
        Some(self.choice(choice, echo, None, None))
    }

    fn piece(&self, choice: usize, delta: &Delta) -> Vec<Value> {
        vec![self.choice(choice, &delta.text, Some(&delta.tokens), None)]
    }

    fn closing(&self, choice: usize, finish: Finish) -> Vec<Value> {
        vec![self.choice(choice, "", None, Some(finish))]
    }
}
