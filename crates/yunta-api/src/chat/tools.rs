//! Tools: what a request offers, what an output may then be, and the calls in it.
//!
//! Calls are written as Hermes and Qwen models do, `<tool_call>\n{"name": …, "arguments": …}\n
//! </tool_call>`. Where a call must come (`tool_choice` is "required" or names a function), the
//! output is held to that form and to the schema of the function's parameters. Where one may come
//! and a function is `strict`, text is free, and calls are held to the form and, of strict
//! functions, to the schema.

use serde_json::{Map, Value, json};
use yunta_engine::{CallCount, CallTags, Grammar};

use crate::error::ApiError;
use crate::fields::{Fields, mismatch};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// Whether, and what, the model is to call.
#[derive(Debug, PartialEq)]
enum Choice {
    Auto,
    Required,
    Named(String),
}

#[derive(Debug, PartialEq)]
struct Function {
    name: String,
    /// A JSON schema.
    parameters: Value,
    /// Whether calls must obey the schema even where none need come.
    strict: bool,
}

/// The tools of a request.
#[derive(Debug, PartialEq)]
pub(crate) struct Tools {
    functions: Vec<Function>,
    choice: Choice,
    /// Whether there may be several calls.
    parallel: bool,
}

impl Tools {
    /// Reads `tools`, `tool_choice` and `parallel_tool_calls`. `None` if the model is not to call
    /// any.
    pub(crate) fn read(fields: Fields<'_>) -> Result<Option<Self>, ApiError> {
        let tools = fields.array("tools")?.map_or(&[][..], Vec::as_slice);
        let functions =
            tools.iter().enumerate().map(function).collect::<Result<Vec<_>, ApiError>>()?;
        let Some(choice) = choice(fields)? else { return Ok(None) };
        if functions.is_empty() {
            return Ok(None);
        }
        if let Choice::Named(name) = &choice
            && functions.iter().all(|known| known.name != *name)
        {
            let message = format!("tool_choice names `{name}`, which is none of the tools");
            return Err(ApiError::invalid("tool_choice", message));
        }
        let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
        Ok(Some(Self { functions, choice, parallel }))
    }

    /// What the output must obey, if calls must come or must be right where they come.
    pub(crate) fn grammar(&self) -> Option<Grammar> {
        let count = match (&self.choice, self.parallel) {
            (Choice::Auto, _) if self.functions.iter().all(|f| !f.strict) => return None,
            (Choice::Auto, true) => CallCount::Any,
            (Choice::Auto, false) => CallCount::PerhapsOne,
            (Choice::Required, true) => CallCount::Several,
            (Choice::Required, false) | (Choice::Named(_), _) => CallCount::One,
        };
        let callable = |f: &&Function| !matches!(&self.choice, Choice::Named(n) if *n != f.name);
        let calls: Vec<Value> =
            self.functions.iter().filter(callable).map(|f| self.call_schema(f)).collect();
        let call = match calls.as_slice() {
            [one] => one.clone(),
            _ => json!({"anyOf": calls}),
        };
        Some(Grammar::calls(CallTags { open: OPEN, close: CLOSE }, &call, count))
    }

    fn call_schema(&self, function: &Function) -> Value {
        let is_free = self.choice == Choice::Auto && !function.strict;
        let arguments =
            if is_free { json!({"type": "object"}) } else { function.parameters.clone() };
        json!({
            "type": "object",
            "properties": {"name": {"const": function.name}, "arguments": arguments},
            "required": ["name", "arguments"],
            "additionalProperties": false,
        })
    }
}

fn function((i, tool): (usize, &Value)) -> Result<Function, ApiError> {
    let at = format!("tools[{i}]");
    let object = tool.as_object().ok_or_else(|| mismatch(&at, "an object", tool))?;
    let Some(function) = object.get("function").and_then(Value::as_object) else {
        return Err(ApiError::invalid(format!("{at}.function"), "a tool must have a function"));
    };
    let Some(name) = function.get("name").and_then(Value::as_str) else {
        let message = "a function must have a name";
        return Err(ApiError::invalid(format!("{at}.function.name"), message));
    };
    let parameters = match function.get("parameters").filter(|p| !p.is_null()) {
        Some(parameters @ Value::Object(_)) => parameters.clone(),
        Some(other) => {
            return Err(mismatch(&format!("{at}.function.parameters"), "a JSON schema", other));
        }
        // OpenAI's rule: none means an empty list of parameters.
        None => json!({"type": "object", "properties": {}, "additionalProperties": false}),
    };
    let strict = match function.get("strict") {
        None | Some(Value::Null) => false,
        Some(Value::Bool(strict)) => *strict,
        Some(other) => return Err(mismatch(&format!("{at}.function.strict"), "a boolean", other)),
    };
    Ok(Function { name: name.to_owned(), parameters, strict })
}

/// `None` for "none".
fn choice(fields: Fields<'_>) -> Result<Option<Choice>, ApiError> {
    let expected = "\"none\", \"auto\", \"required\" or an object that names a function";
    match fields.get("tool_choice") {
        None => Ok(Some(Choice::Auto)),
        Some(Value::String(choice)) => match choice.as_str() {
            "none" => Ok(None),
            "auto" => Ok(Some(Choice::Auto)),
            "required" => Ok(Some(Choice::Required)),
            _ => Err(mismatch("tool_choice", expected, &json!(choice))),
        },
        Some(other) => {
            let name = other.pointer("/function/name").and_then(Value::as_str);
            let named = name.map(|name| Choice::Named(name.to_owned()));
            named.map(Some).ok_or_else(|| mismatch("tool_choice", expected, other))
        }
    }
}

/// A piece of an output.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Part {
    Text(String),
    /// A call: the function's name, and its arguments as JSON text.
    Call(String, String),
}

/// Finds the calls in an output that comes piece by piece. What is no call stays text: nothing is
/// lost.
#[derive(Debug, Default)]
pub(crate) struct CallParser {
    /// Text that may be, or is, the beginning of a call.
    held: String,
    inside: bool,
    /// A call was found: white space behind it is not shown.
    behind_call: bool,
}

impl CallParser {
    /// Takes the next piece.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        loop {
            let tag = if self.inside { CLOSE } else { OPEN };
            let Some((before, behind)) = self.held.split_once(tag) else { break };
            let (before, behind) = (before.to_owned(), behind.to_owned());
            self.held = behind;
            if self.inside {
                self.close(&before, CLOSE, &mut parts);
            } else {
                self.show(&before, &mut parts);
            }
            self.inside = !self.inside;
        }
        if !self.inside {
            let keep = possible_tag(&self.held);
            let text = self.held.drain(..self.held.len() - keep).collect::<String>();
            self.show(&text, &mut parts);
        }
        parts
    }

    /// The output has ended.
    pub(crate) fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        let held = std::mem::take(&mut self.held);
        if std::mem::take(&mut self.inside) {
            self.close(&held, "", &mut parts);
        } else {
            self.show(&held, &mut parts);
        }
        parts
    }

    /// Whether a call was found.
    pub(crate) fn has_calls(&self) -> bool {
        self.behind_call
    }

    fn close(&mut self, body: &str, tag: &str, parts: &mut Vec<Part>) {
        match call(body) {
            Some(call) => {
                self.behind_call = true;
                parts.push(call);
            }
            None => parts.push(Part::Text(format!("{OPEN}{body}{tag}"))),
        }
    }

    fn show(&self, text: &str, parts: &mut Vec<Part>) {
        if !(text.is_empty() || self.behind_call && text.trim().is_empty()) {
            parts.push(Part::Text(text.to_owned()));
        }
    }
}

/// Length of the end of `text` with which a tag could begin.
fn possible_tag(text: &str) -> usize {
    (1..OPEN.len()).rev().find(|n| text.ends_with(OPEN.get(..*n).unwrap_or(OPEN))).unwrap_or(0)
}

fn call(body: &str) -> Option<Part> {
    let call: Map<String, Value> = serde_json::from_str(body.trim()).ok()?;
    let name = call.get("name")?.as_str()?.to_owned();
    // Some models write the arguments as text already.
    let arguments = match call.get("arguments").or_else(|| call.get("parameters")) {
        Some(Value::String(text)) => text.clone(),
        Some(value) => value.to_string(),
        None => "{}".to_owned(),
    };
    Some(Part::Call(name, arguments))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(body: Value) -> Result<Option<Tools>, ApiError> {
        Tools::read(Fields::new(body.as_object().unwrap()))
    }

    fn tool(name: &str) -> Value {
        let parameters = json!({"type": "object", "properties": {"x": {"type": "integer"}}});
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    }

    fn parse(pieces: &[&str]) -> Vec<Part> {
        let mut parser = CallParser::default();
        let mut parts: Vec<Part> = pieces.iter().flat_map(|p| parser.push(p)).collect();
        parts.extend(parser.finish());
        // Neighbouring texts are one.
        let mut joined: Vec<Part> = Vec::new();
        for part in parts {
            match (joined.last_mut(), part) {
                (Some(Part::Text(a)), Part::Text(b)) => a.push_str(&b),
                (_, part) => joined.push(part),
            }
        }
        joined
    }

    #[test]
    fn calls_must_come_where_the_choice_says_so() {
        let with = |choice: Value| {
            let body = json!({"tools": [tool("f"), tool("g")], "tool_choice": choice});
            read(body).unwrap().map(|tools| tools.grammar())
        };
        assert_eq!(with(json!("none")), None);
        assert_eq!(with(json!("auto")), Some(None));
        let Some(Some(Grammar::Lark(both))) = with(json!("required")) else { panic!() };
        assert!(both.contains("anyOf") && both.contains(r#"{"const":"f"}"#) && both.contains(")*"));
        let named = json!({"type": "function", "function": {"name": "g"}});
        let Some(Some(Grammar::Lark(one))) = with(named) else { panic!() };
        assert!(one.contains(r#"{"const":"g"}"#) && !one.contains("\"f\"") && !one.contains(")*"));
        assert!(
            read(json!({"tools": [tool("f")], "tool_choice": {"function": {"name": "h"}}}))
                .is_err()
        );
        assert!(read(json!({"tools": [{"type": "function"}]})).is_err());
        assert_eq!(read(json!({})).unwrap(), None);
    }

    #[test]
    fn strict_functions_are_held_to_their_schema_where_calls_may_come() {
        let mut strict = tool("f");
        strict["function"]["strict"] = json!(true);
        let grammar = |parallel: bool| {
            let tools = json!([strict, tool("g")]);
            let body = json!({"tools": tools, "parallel_tool_calls": parallel});
            match read(body).unwrap().unwrap().grammar() {
                Some(Grammar::Lark(text)) => text,
                other => panic!("{other:?}"),
            }
        };
        assert!(grammar(true).contains(")* PLAIN") && grammar(false).contains(")? PLAIN"));
        // `g` may be called with whatever arguments.
        assert_eq!(grammar(true).matches("integer").count(), 1);
        strict["function"]["strict"] = json!("yes");
        assert!(read(json!({"tools": [strict]})).is_err());
    }

    #[test]
    fn calls_are_found_and_nothing_is_lost() {
        let call = |n: &str, a: &str| Part::Call(n.into(), a.into());
        let text = |t: &str| Part::Text(t.into());
        let one = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>";
        assert_eq!(parse(&[one]), [call("f", "{\"x\":1}")]);
        assert_eq!(
            parse(&["So: ", one, "\n", one]),
            [text("So: "), call("f", "{\"x\":1}"), call("f", "{\"x\":1}")]
        );
        // Cut off behind the object, as models do that stop at the tag.
        assert_eq!(parse(&["<tool_call>{\"name\": \"g\"}"]), [call("g", "{}")]);
        for plain in
            ["<tool_call>{\"name\": ", "<tool_call>x</tool_call> y", "a < b <tool", "<<tool_call"]
        {
            assert_eq!(parse(&[plain]), [text(plain)]);
        }
    }

    proptest! {
        #[test]
        fn where_the_pieces_end_does_not_matter(
            parts in prop::collection::vec(prop::sample::select(vec![
                "<tool_call>", "</tool_call>", "{\"name\": \"f\", \"arguments\": {}}", "<", "ü", "\n", "text", "<tool",
            ]), 0..8),
            cuts in prop::collection::vec(0usize..80, 0..6),
        ) {
            let all = parts.concat();
            let mut cuts: Vec<usize> =
                cuts.into_iter().filter(|c| *c <= all.len() && all.is_char_boundary(*c)).collect();
            cuts.extend([0, all.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|w| &all[w[0]..w[1]]).collect();
            prop_assert_eq!(parse(&pieces), parse(&[&all]));
        }
    }
}
