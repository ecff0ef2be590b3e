//! The sampling parameters of a request: OpenAI's, and those of vLLM and llama.cpp under the names
//! that they have there.

use std::ops::RangeInclusive;

use serde_json::Value;
use yunta_engine::SamplingParams;

use crate::error::ApiError;
use crate::fields::{Fields, mismatch};
use crate::params::random_u64;

/// Tokens whose logits a request may change.
const BIASES_MAX: usize = 1024;
const BREAKERS_MAX: usize = 64;
const BREAKER_BYTES_MAX: usize = 64;
/// What no repetition reaches across if a request does not say (llama.cpp's).
const BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];

/// Reads everything that decides how tokens are chosen, but for the DRY breakers.
pub(crate) fn read(fields: Fields<'_>) -> Result<SamplingParams, ApiError> {
    let neutral = SamplingParams::default();
    let number = |name: &str, range: RangeInclusive<f64>, default: f32| {
        Ok::<_, ApiError>(fields.number(name, range)?.map_or(default, |x| x as f32))
    };
    let count = |name: &str, default: usize| {
        Ok::<_, ApiError>(
            fields.integer(name, 0..=i64::from(u32::MAX))?.map_or(default, |n| n as usize),
        )
    };
    let top_p = number("top_p", 0.0..=1.0, 1.0)?;
    let temperature = number("temperature", 0.0..=2.0, 1.0)?;
    Ok(SamplingParams {
        // The smallest nucleus is the likeliest token alone.
        temperature: if top_p == 0.0 { 0.0 } else { temperature },
        top_p: if top_p == 0.0 { 1.0 } else { top_p },
        // -1 is the customary spelling of "all" beside 0.
        top_k: fields.integer("top_k", -1..=i64::from(u32::MAX))?.unwrap_or(0).max(0) as usize,
        min_p: number("min_p", 0.0..=1.0, neutral.min_p)?,
        typical_p: number("typical_p", 0.0..=1.0, neutral.typical_p)?,
        xtc_probability: number("xtc_probability", 0.0..=1.0, neutral.xtc_probability)?,
        xtc_threshold: number("xtc_threshold", 0.0..=1.0, neutral.xtc_threshold)?,
        repetition_penalty: repetition_penalty(fields)?,
        presence_penalty: number("presence_penalty", -2.0..=2.0, neutral.presence_penalty)?,
        frequency_penalty: number("frequency_penalty", -2.0..=2.0, neutral.frequency_penalty)?,
        dry_multiplier: number("dry_multiplier", 0.0..=100.0, neutral.dry_multiplier)?,
        dry_base: number("dry_base", 1.0..=100.0, neutral.dry_base)?,
        dry_allowed_length: count("dry_allowed_length", neutral.dry_allowed_length)?,
        dry_range: dry_range(fields)?,
        dry_breakers: Vec::new(),
        logit_bias: logit_bias(fields)?,
        min_tokens: count("min_tokens", 0)?,
        seed: seed(fields)?.unwrap_or_else(random_u64),
    })
}

/// vLLM's name, or llama.cpp's.
fn repetition_penalty(fields: Fields<'_>) -> Result<f32, ApiError> {
    for name in ["repetition_penalty", "repeat_penalty"] {
        if let Some(x) = fields.number(name, 0.01..=10.0)? {
            return Ok(x as f32);
        }
    }
    Ok(1.0)
}

/// llama.cpp's name; -1 is the whole context.
fn dry_range(fields: Fields<'_>) -> Result<usize, ApiError> {
    for name in ["dry_range", "dry_penalty_last_n"] {
        if let Some(n) = fields.integer(name, -1..=i64::from(u32::MAX))? {
            return Ok(n.max(0) as usize);
        }
    }
    Ok(0)
}

fn logit_bias(fields: Fields<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(object) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    if object.len() > BIASES_MAX {
        let reason = format!("logit_bias must have at most {BIASES_MAX} tokens");
        return Err(ApiError::invalid("logit_bias", reason));
    }
    let entry = |(token, bias): (&String, &Value)| {
        let id = token.parse::<u32>().ok();
        let bias = bias.as_f64().filter(|b| (-100.0..=100.0).contains(b));
        let pair = id.zip(bias).map(|(id, bias)| (id, bias as f32));
        pair.ok_or_else(|| {
            let expected = "token ids with numbers from -100 to 100";
            mismatch("logit_bias", expected, &Value::Object(object.clone()))
        })
    };
    object.iter().map(entry).collect()
}

/// Texts that no repetition reaches across.
pub(crate) fn breakers(fields: Fields<'_>) -> Result<Vec<String>, ApiError> {
    let name = "dry_sequence_breakers";
    let Some(array) = fields.array(name)? else {
        return Ok(BREAKERS.map(str::to_owned).to_vec());
    };
    let fits = |text: &&str| (1..=BREAKER_BYTES_MAX).contains(&text.len());
    let text = |value: &Value| value.as_str().filter(fits).map(str::to_owned);
    let texts: Option<Vec<String>> = array.iter().map(text).collect();
    texts.filter(|texts| texts.len() <= BREAKERS_MAX).ok_or_else(|| {
        let expected = format!(
            "an array of at most {BREAKERS_MAX} strings, each of 1 to {BREAKER_BYTES_MAX} bytes"
        );
        mismatch(name, &expected, &Value::Array(array.clone()))
    })
}

fn seed(fields: Fields<'_>) -> Result<Option<u64>, ApiError> {
    let Some(value) = fields.get("seed") else { return Ok(None) };
    let bits = value.as_u64().or_else(|| value.as_i64().map(i64::cast_unsigned));
    bits.map(Some).ok_or_else(|| mismatch("seed", "a whole number of at most 64 bits", value))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn sampling(body: Value) -> Result<SamplingParams, ApiError> {
        read(Fields::new(body.as_object().unwrap()))
    }

    #[test]
    fn negative_seeds_are_kept_bit_by_bit() {
        assert_eq!(sampling(json!({"seed": -1})).unwrap().seed, u64::MAX);
        assert_eq!(sampling(json!({"seed": u64::MAX})).unwrap().seed, u64::MAX);
    }

    #[test]
    fn absent_seeds_differ() {
        let seed = || sampling(json!({})).unwrap().seed;
        assert_ne!(seed(), seed());
    }

    #[test]
    fn an_empty_nucleus_is_greedy() {
        let sampling = sampling(json!({"top_p": 0})).unwrap();
        assert_eq!((sampling.temperature, sampling.top_p), (0.0, 1.0));
    }

    #[test]
    fn what_is_not_said_changes_nothing() {
        let read = sampling(json!({"seed": 5, "logit_bias": {}})).unwrap();
        assert_eq!(read, SamplingParams { seed: 5, ..SamplingParams::default() });
    }

    #[test]
    fn every_parameter_is_read() {
        let read = sampling(json!({
            "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.8,
            "xtc_probability": 0.3, "xtc_threshold": 0.2, "repeat_penalty": 1.1,
            "presence_penalty": -1, "frequency_penalty": 2, "dry_multiplier": 0.8,
            "dry_base": 2, "dry_allowed_length": 3, "dry_penalty_last_n": -1,
            "logit_bias": {"17": -100}, "min_tokens": 4, "seed": 9,
        }));
        let expected = SamplingParams {
            temperature: 0.5,
            top_k: 40,
            top_p: 0.9,
            min_p: 0.05,
            typical_p: 0.8,
            xtc_probability: 0.3,
            xtc_threshold: 0.2,
            repetition_penalty: 1.1,
            presence_penalty: -1.0,
            frequency_penalty: 2.0,
            dry_multiplier: 0.8,
            dry_base: 2.0,
            dry_allowed_length: 3,
            dry_range: 0,
            dry_breakers: Vec::new(),
            logit_bias: vec![(17, -100.0)],
            min_tokens: 4,
            seed: 9,
        };
        assert_eq!(read.unwrap(), expected);
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        for (name, value) in [
            ("frequency_penalty", json!(2.1)),
            ("presence_penalty", json!("1")),
            ("repetition_penalty", json!(0)),
            ("logit_bias", json!({"x": 1})),
            ("logit_bias", json!({"1": 101})),
            ("min_tokens", json!(-1)),
            ("dry_base", json!(0.5)),
            ("typical_p", json!(1.5)),
        ] {
            let error = sampling(json!({ name: value })).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
        let body = json!({"dry_sequence_breakers": [""]});
        assert!(breakers(Fields::new(body.as_object().unwrap())).is_err());
    }
}
