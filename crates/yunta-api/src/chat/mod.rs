//! `POST /v1/chat/completions`.

mod format;
mod messages;
mod tools;

use serde_json::{Map, Value};

pub(crate) use self::format::ChatFormat;
use self::tools::Tools;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::Job;
use crate::params::Params;
use crate::server::ApiState;

const TOP_LOGPROBS_MAX: i64 = 20;

/// Checks a request and turns its conversation into a prompt. Takes time in proportion to the
/// length of the text: not for asynchronous threads.
pub(crate) fn prepare(
    state: &ApiState,
    body: &Map<String, Value>,
) -> Result<(Job, ChatFormat), ApiError> {
    let fields = Fields::new(body);
    let mut params = Params::read(fields, state.config())?;
    let logprobs = logprobs(fields)?;
    let messages = messages::read(fields)?;
    let tools = Tools::read(fields)?;
    if let Some(calls) = tools.as_ref().and_then(Tools::grammar) {
        if params.grammar.is_some() {
            let message = "an output can't be both a tool call and of a response format";
            return Err(ApiError::invalid("response_format", message));
        }
        params.grammar = Some(calls);
    }
    let variables = template_variables(fields)?;
    let shown = fields.get("tools").filter(|_| tools.is_some());
    let prompt = state.text().render_chat(&messages, shown, &variables)?;
    // Templates write the beginning of the sequence themselves.
    let tokens = state.text().encode(&prompt, false)?;
    if tokens.is_empty() {
        return Err(ApiError::invalid("messages", "the messages make an empty prompt"));
    }
    let job = Job { prompts: vec![tokens], logprobs, prompt_param: "messages", params };
    Ok((job, ChatFormat::new(state.text().clone(), logprobs.is_some(), tools.is_some())))
}

/// `Some(k)`: with the log-probabilities of the `k` likeliest tokens.
fn logprobs(fields: Fields<'_>) -> Result<Option<usize>, ApiError> {
    let wanted = fields.boolean("logprobs")?.unwrap_or(false);
    let top = fields.integer("top_logprobs", 0..=TOP_LOGPROBS_MAX)?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0) as usize)),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => {
            Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs to be true"))
        }
    }
}

/// Variables of the template: those the client sets in `chat_template_kwargs` (as vLLM and
/// llama.cpp have it), and `tool_choice`.
fn template_variables(fields: Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let mut variables = fields.object("chat_template_kwargs")?.cloned().unwrap_or_default();
    for reserved in ["messages", "tools", "add_generation_prompt"] {
        if variables.contains_key(reserved) {
            let message = format!("chat_template_kwargs must not set {reserved}");
            return Err(ApiError::invalid("chat_template_kwargs", message));
        }
    }
    if let Some(choice) = fields.get("tool_choice") {
        variables.insert("tool_choice".into(), choice.clone());
    }
    Ok(variables)
}
