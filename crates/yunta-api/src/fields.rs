//! Reading a JSON object field by field, so that an error names the field and what it should be.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::error::ApiError;

/// An object of a request. `null` counts as absent everywhere, as with OpenAI.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    pub(crate) fn new(object: &'a Map<String, Value>) -> Self {
        Self(object)
    }

    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    pub(crate) fn number(
        &self,
        name: &str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f64>, ApiError> {
        let expected = || format!("a number from {} to {}", range.start(), range.end());
        self.read(name, expected, |value| value.as_f64().filter(|v| range.contains(v)))
    }

    pub(crate) fn integer(
        &self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let expected = || match *range.end() {
            i64::MAX => format!("a whole number, {} or more", range.start()),
            end => format!("a whole number from {} to {end}", range.start()),
        };
        self.read(name, expected, |value| value.as_i64().filter(|v| range.contains(v)))
    }

    pub(crate) fn boolean(&self, name: &str) -> Result<Option<bool>, ApiError> {
        self.read(name, || "true or false".into(), Value::as_bool)
    }

    pub(crate) fn string(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.read(name, || "a string".into(), Value::as_str)
    }

    pub(crate) fn array(&self, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        self.read(name, || "an array".into(), Value::as_array)
    }

    pub(crate) fn object(&self, name: &str) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        self.read(name, || "an object".into(), Value::as_object)
    }

    fn read<T>(
        &self,
        name: &str,
        expected: impl Fn() -> String,
        convert: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => Err(mismatch(name, &expected(), value)),
        }
    }
}

/// The error for a field that is there but is not what it should be.
pub(crate) fn mismatch(param: &str, expected: &str, value: &Value) -> ApiError {
    ApiError::invalid(param, format!("{param} must be {expected}, and is {}", excerpt(value)))
}

/// The beginning of a value, for an error message.
fn excerpt(value: &Value) -> String {
    const CHARS_MAX: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_error_names_field_expectation_and_value() {
        let object = json!({"temperature": 3, "n": "two", "stop": null});
        let fields = Fields::new(object.as_object().unwrap());
        let error = fields.number("temperature", 0.0..=2.0).unwrap_err();
        assert_eq!(error.to_string(), "temperature must be a number from 0 to 2, and is 3");
        let error = fields.integer("n", 1..=16).unwrap_err();
        assert_eq!(error.to_string(), "n must be a whole number from 1 to 16, and is \"two\"");
        assert_eq!(fields.string("stop").unwrap(), None);
        assert_eq!(fields.string("absent").unwrap(), None);
    }

    #[test]
    fn a_long_value_is_shortened() {
        let error = mismatch("x", "short", &json!("é".repeat(1000)));
        assert!(error.to_string().chars().count() < 100);
    }
}
