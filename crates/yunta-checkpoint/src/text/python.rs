//! Values as Python prints them: templates were made for `str()` of Python's values.

use minijinja::value::{Value, ValueKind};

/// Deeper values are not meant to be printed.
const DEPTH_MAX: usize = 64;

/// Python's `str(value)`.
pub(crate) fn str(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_undefined() => String::new(),
        None => repr(value, 0),
    }
}

/// Python's `repr(value)`.
fn repr(value: &Value, depth: usize) -> String {
    if depth > DEPTH_MAX {
        return "...".to_owned();
    }
    match value.kind() {
        ValueKind::None => "None".to_owned(),
        ValueKind::Bool => if value.is_true() { "True" } else { "False" }.to_owned(),
        ValueKind::String => quoted(value.as_str().unwrap_or_default()),
        ValueKind::Number => number(value),
        ValueKind::Seq => format!("[{}]", items(value, |item| repr(item, depth + 1))),
        ValueKind::Map => {
            let pair = |key: &Value| {
                let item = value.get_item(key).unwrap_or_default();
                format!("{}: {}", repr(key, depth + 1), repr(&item, depth + 1))
            };
            format!("{{{}}}", items(value, pair))
        }
        _ => value.to_string(),
    }
}

fn items(value: &Value, show: impl Fn(&Value) -> String) -> String {
    let items = value.try_iter().into_iter().flatten();
    items.map(|item| show(&item)).collect::<Vec<_>>().join(", ")
}

fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(x) if !value.is_integer() => float(x),
        _ => value.to_string(),
    }
}

/// Python's `repr` of a float: the exponent has a sign and at least two digits.
pub(crate) fn float(x: f64) -> String {
    let text = format!("{x:?}");
    let Some((mantissa, exponent)) = text.split_once('e') else { return text };
    let (sign, digits) = match exponent.strip_prefix('-') {
        Some(digits) => ('-', digits),
        None => ('+', exponent),
    };
    format!("{mantissa}e{sign}{digits:0>2}")
}

/// In single quotes, or in double quotes if that spares escapes.
fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if c.is_control() => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    // What follows is what Python 3 prints.

    #[test]
    fn values_are_printed_as_by_python() {
        let value = json!({"a": [true, false, null, 1, 1.0, 1e-7], "b": {"c": "it's", "d": "x\n"}});
        let expected =
            "{'a': [True, False, None, 1, 1.0, 1e-07], 'b': {'c': \"it's\", 'd': 'x\\n'}}";
        assert_eq!(str(&Value::from_serialize(value)), expected);
        assert_eq!(str(&Value::from("it's")), "it's");
        assert_eq!(quoted("'\"\\\u{1}é"), "'\\'\"\\\\\\x01é'");
        assert_eq!(str(&Value::UNDEFINED), "");
    }
}
