//! JSON as Python writes it: templates were made with `json.dumps`, down to the spaces.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::Value;
use serde_json::ser::{Formatter, Serializer};

use crate::text::python::float;

/// Python's `json.dumps(value, ensure_ascii=..., indent=..., separators=...)`.
pub(crate) fn dumps(value: &Value, style: &Style) -> serde_json::Result<String> {
    let mut out = Vec::new();
    let formatter = Python { style, depth: 0, is_empty: true };
    value.serialize(&mut Serializer::with_formatter(&mut out, formatter))?;
    String::from_utf8(out).map_err(serde::ser::Error::custom)
}

/// What `json.dumps` can be told.
pub(crate) struct Style {
    /// Written once for each level of nesting; `None` puts all on one line.
    pub(crate) indent: Option<String>,
    /// Between elements.
    pub(crate) comma: String,
    /// Between a key and its value.
    pub(crate) colon: String,
    /// Writes other characters as `\uXXXX`.
    pub(crate) ascii: bool,
}

struct Python<'a> {
    style: &'a Style,
    depth: usize,
    /// The innermost container has no elements so far.
    is_empty: bool,
}

impl Python<'_> {
    fn newline<W: ?Sized + Write>(&self, out: &mut W) -> io::Result<()> {
        let Some(indent) = &self.style.indent else { return Ok(()) };
        out.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| out.write_all(indent.as_bytes()))
    }

    fn begin<W: ?Sized + Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.is_empty = true;
        out.write_all(bracket)
    }

    fn element<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if !first {
            out.write_all(self.style.comma.as_bytes())?;
        }
        self.newline(out)
    }

    fn end<W: ?Sized + Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if !std::mem::take(&mut self.is_empty) {
            self.newline(out)?;
        }
        out.write_all(bracket)
    }
}

impl Formatter for Python<'_> {
    fn begin_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.element(out, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.is_empty = false;
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.element(out, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.style.colon.as_bytes())
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.is_empty = false;
        Ok(())
    }

    fn write_f64<W: ?Sized + Write>(&mut self, out: &mut W, x: f64) -> io::Result<()> {
        out.write_all(float(x).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + Write>(&mut self, out: &mut W, s: &str) -> io::Result<()> {
        if !self.style.ascii {
            return out.write_all(s.as_bytes());
        }
        s.chars().try_for_each(|c| match c {
            c if c.is_ascii() => write!(out, "{c}"),
            c => c.encode_utf16(&mut [0; 2]).iter().try_for_each(|u| write!(out, "\\u{u:04x}")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn style(indent: Option<&str>, ascii: bool) -> Style {
        let comma = if indent.is_some() { "," } else { ", " };
        let indent = indent.map(str::to_owned);
        Style { indent, comma: comma.to_owned(), colon: ": ".to_owned(), ascii }
    }

    // What follows is what Python 3 prints.

    #[test]
    fn one_line_has_spaces_behind_commas_and_colons() {
        let value = json!({"a": [1, -2, 0.5], "b": {}, "c": [], "d": null, "é<&>'": "x\"\n\u{7f}"});
        assert_eq!(
            dumps(&value, &style(None, false)).unwrap(),
            "{\"a\": [1, -2, 0.5], \"b\": {}, \"c\": [], \"d\": null, \"é<&>'\": \"x\\\"\\n\u{7f}\"}"
        );
    }

    #[test]
    fn indented_containers_are_closed_on_their_own_line() {
        let value = json!({"a": [1, {"b": []}], "c": {}});
        let expected = "{\n  \"a\": [\n    1,\n    {\n      \"b\": []\n    }\n  ],\n  \"c\": {}\n}";
        assert_eq!(dumps(&value, &style(Some("  "), false)).unwrap(), expected);
    }

    #[test]
    fn floats_are_written_as_python_does() {
        let value = json!([1e16, 1e-5, 1.5e300, 0.0001, 123456789012345.0, -0.0, 1.0]);
        assert_eq!(
            dumps(&value, &style(None, false)).unwrap(),
            "[1e+16, 1e-05, 1.5e+300, 0.0001, 123456789012345.0, -0.0, 1.0]"
        );
    }

    #[test]
    fn other_characters_can_be_escaped() {
        assert_eq!(dumps(&json!("aé😀"), &style(None, true)).unwrap(), r#""a\u00e9\ud83d\ude00""#);
    }
}
