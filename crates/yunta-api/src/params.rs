//! The parameters that chat and text completions share.

use std::hash::{BuildHasher, RandomState};
use std::ops::RangeInclusive;

use serde_json::Value;
use yunta_engine::{Grammar, SamplingParams};

use crate::config::ServerConfig;
use crate::error::ApiError;
use crate::fields::{Fields, mismatch};
use crate::text::StopStrings;
use crate::{response_format, sampling};

const CHOICES_MAX: i64 = 16;
const STOP_STRINGS_MAX: usize = 16;
const STOP_BYTES_MAX: usize = 1024;
const PRIORITIES: RangeInclusive<i64> = -100..=100;

/// What a request says about generation, besides the prompt.
#[derive(Clone, Debug)]
pub(crate) struct Params {
    /// Outputs per prompt; the i-th is drawn with `sampling.seed + i`.
    pub(crate) n: usize,
    pub(crate) sampling: SamplingParams,
    /// Texts that no repetition reaches across, for the DRY penalty.
    pub(crate) breakers: Vec<String>,
    /// What the output must obey.
    pub(crate) grammar: Option<Grammar>,
    /// Whether the model's end-of-sequence tokens are tokens like others.
    pub(crate) ignore_eos: bool,
    /// Who asks, as far as the request says: service is shared fairly between clients.
    pub(crate) client: String,
    /// Lower goes first.
    pub(crate) priority: i32,
    /// `None`: up to the end of the context.
    pub(crate) max_tokens: Option<usize>,
    pub(crate) stops: StopStrings,
    /// `Some` if the answer is to be streamed.
    pub(crate) stream: Option<StreamOptions>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamOptions {
    pub(crate) include_usage: bool,
}

impl Params {
    pub(crate) fn read(fields: Fields<'_>, config: &ServerConfig) -> Result<Self, ApiError> {
        check_model(fields, config)?;
        Ok(Self {
            n: fields.integer("n", 1..=CHOICES_MAX)?.map_or(1, |n| n as usize),
            sampling: sampling::read(fields)?,
            breakers: sampling::breakers(fields)?,
            grammar: response_format::read(fields)?,
            ignore_eos: fields.boolean("ignore_eos")?.unwrap_or(false),
            client: fields.string("user")?.unwrap_or_default().to_owned(),
            priority: fields.integer("priority", PRIORITIES)?.unwrap_or(0) as i32,
            max_tokens: max_tokens(fields)?,
            stops: StopStrings::new(stop_strings(fields)?),
            stream: stream_options(fields)?,
        })
    }
}

fn check_model(fields: Fields<'_>, config: &ServerConfig) -> Result<(), ApiError> {
    match fields.string("model")? {
        Some(name) if !config.answers_to(name) => Err(unknown_model(name, config)),
        _ => Ok(()),
    }
}

/// The error for a model name that this server does not answer to.
pub(crate) fn unknown_model(name: &str, config: &ServerConfig) -> ApiError {
    let served = config.names().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    ApiError::UnknownModel { name: name.to_owned(), served }
}

/// The error for something that is valid, but not offered.
pub(crate) fn unsupported(param: &str, hint: &str) -> ApiError {
    ApiError::invalid(param, format!("{param} is not supported yet: {hint}"))
}

/// A number nobody can predict; enough for seeds and ids, not for keys.
pub(crate) fn random_u64() -> u64 {
    // Each `RandomState` has fresh keys, and the first of a thread come from the system.
    RandomState::new().hash_one(0)
}

fn max_tokens(fields: Fields<'_>) -> Result<Option<usize>, ApiError> {
    // `max_completion_tokens` is the newer name and wins.
    let newer = fields.integer("max_completion_tokens", 1..=i64::MAX)?;
    let older = fields.integer("max_tokens", 1..=i64::MAX)?;
    Ok(newer.or(older).map(|tokens| usize::try_from(tokens).unwrap_or(usize::MAX)))
}

fn stop_strings(fields: Fields<'_>) -> Result<Vec<String>, ApiError> {
    let Some(value) = fields.get("stop") else { return Ok(Vec::new()) };
    let strings: Option<Vec<String>> = match value {
        Value::String(stop) => Some(vec![stop.clone()]),
        Value::Array(stops) => stops.iter().map(|stop| stop.as_str().map(str::to_owned)).collect(),
        _ => None,
    };
    let acceptable = |strings: &Vec<String>| {
        strings.len() <= STOP_STRINGS_MAX
            && strings.iter().all(|stop| (1..=STOP_BYTES_MAX).contains(&stop.len()))
    };
    strings.filter(acceptable).ok_or_else(|| {
        let expected = format!(
            "a string or an array of at most {STOP_STRINGS_MAX} strings, each of 1 to \
             {STOP_BYTES_MAX} bytes"
        );
        mismatch("stop", &expected, value)
    })
}

fn stream_options(fields: Fields<'_>) -> Result<Option<StreamOptions>, ApiError> {
    let include_usage = match fields.object("stream_options")? {
        Some(options) => Fields::new(options).boolean("include_usage")?.unwrap_or(false),
        None => false,
    };
    let streamed = fields.boolean("stream")?.unwrap_or(false);
    Ok(streamed.then_some(StreamOptions { include_usage }))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(body: Value) -> Result<Params, ApiError> {
        Params::read(Fields::new(body.as_object().unwrap()), &ServerConfig::new("m"))
    }

    #[test]
    fn defaults_are_openais() {
        let params = read(json!({})).unwrap();
        assert_eq!(params.n, 1);
        assert_eq!(params.sampling.temperature, 1.0);
        assert_eq!(params.sampling.top_p, 1.0);
        assert_eq!(params.sampling.top_k, 0);
        assert_eq!(params.max_tokens, None);
        assert!(params.stream.is_none());
    }

    #[test]
    fn the_newer_name_of_max_tokens_wins() {
        let params = read(json!({"max_tokens": 5, "max_completion_tokens": 7})).unwrap();
        assert_eq!(params.max_tokens, Some(7));
    }

    #[test]
    fn neutral_values_of_unsupported_parameters_pass() {
        read(json!({
            "response_format": {"type": "text"}, "user": "u", "unheard_of": [1],
        }))
        .unwrap();
    }
}
