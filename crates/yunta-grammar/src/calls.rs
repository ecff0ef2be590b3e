//! Outputs with calls between tags.

use std::fmt::Write;

use serde_json::Value;

use crate::Grammar;

/// How a call of a tool is written: a tag, a line with a JSON object, a line with another tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallTags<'a> {
    /// Before the object. Of letters, digits, `<`, `>`, `_` and the like: no `"`, `\` or newline.
    pub open: &'a str,
    /// Behind it.
    pub close: &'a str,
}

/// Which calls an output has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallCount {
    /// One, and nothing else.
    One,
    /// One or more, a line break between them, and nothing else.
    Several,
    /// Any text, with at most one.
    PerhapsOne,
    /// Any text, with as many as the model likes. Wherever the opening tag comes, a call follows.
    Any,
}

impl Grammar {
    /// Outputs whose calls obey `schema`.
    pub fn calls(tags: CallTags<'_>, schema: &Value, count: CallCount) -> Self {
        let CallTags { open, close } = tags;
        let start = match count {
            CallCount::One => format!("\"{open}\\n\" call"),
            CallCount::Several => format!("\"{open}\\n\" call (\"\\n{open}\\n\" call)*"),
            CallCount::PerhapsOne => "(UNTIL \"\\n\" call)? PLAIN".to_owned(),
            CallCount::Any => "(UNTIL \"\\n\" call)* PLAIN".to_owned(),
        };
        let mut text = format!("start: {start}\ncall: json \"\\n{close}\"\njson: %json {schema}\n");
        if matches!(count, CallCount::PerhapsOne | CallCount::Any) {
            // Neither holds the tag but at its end, so at each byte only one can be meant. Both are
            // text: else bytes that are none could still follow a tag, and hence anything.
            let tag = escaped(open);
            let _ = writeln!(text, "UNTIL: (PLAIN \"{open}\") & ~/(?s:.*{tag}.+)/");
            let _ = writeln!(text, "PLAIN: /(?s:.*)/ & ~/(?s:.*{tag}.*)/");
        }
        Self::Lark(text)
    }
}

/// As a regular expression between slashes.
fn escaped(tag: &str) -> String {
    let mut text = String::new();
    for c in tag.chars() {
        if !(c.is_alphanumeric() || matches!(c, '<' | '>' | '_')) {
            text.push('\\');
        }
        text.push(c);
    }
    text
}
