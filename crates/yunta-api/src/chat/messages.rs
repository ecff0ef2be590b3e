//! The conversation: checked, and brought into the one form that chat templates agree on.

use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::fields::{Fields, mismatch};

/// Reads `messages`. In the result each `content` is a string, `developer` is `system`, and the
/// arguments of tool calls are objects.
pub(super) fn read(fields: Fields<'_>) -> Result<Value, ApiError> {
    let messages = fields.array("messages")?.filter(|messages| !messages.is_empty());
    let messages = messages.ok_or_else(|| {
        ApiError::invalid("messages", "messages must be an array of at least one message")
    })?;
    messages.iter().enumerate().map(|(i, m)| message(&format!("messages[{i}]"), m)).collect()
}

fn message(path: &str, value: &Value) -> Result<Value, ApiError> {
    let object = value.as_object().ok_or_else(|| mismatch(path, "an object", value))?;
    let role = role(path, object)?;
    let mut message = object.clone();
    message.insert("role".into(), role.into());
    message.insert("content".into(), content(path, role, object)?.into());
    if object.get("tool_calls").is_some_and(|calls| !calls.is_null()) {
        message.insert("tool_calls".into(), tool_calls(path, object)?);
    } else {
        message.remove("tool_calls");
    }
    Ok(Value::Object(message))
}

fn role(path: &str, message: &Map<String, Value>) -> Result<&'static str, ApiError> {
    let role = message.get("role").unwrap_or(&Value::Null);
    match role.as_str() {
        Some("system" | "developer") => Ok("system"),
        Some("user") => Ok("user"),
        Some("assistant") => Ok("assistant"),
        Some("tool") => Ok("tool"),
        _ => {
            let expected = "\"system\", \"developer\", \"user\", \"assistant\" or \"tool\"";
            Err(mismatch(&format!("{path}.role"), expected, role))
        }
    }
}

/// The text of a message. Parts are joined by line breaks, as vLLM and llama.cpp do it.
fn content(path: &str, role: &str, message: &Map<String, Value>) -> Result<String, ApiError> {
    let path = format!("{path}.content");
    match message.get("content") {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let texts = parts.iter().enumerate().map(|(i, p)| part(&format!("{path}[{i}]"), p));
            Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
        }
        None | Some(Value::Null) if role == "assistant" => Ok(String::new()),
        None => Err(ApiError::invalid(&path, format!("{path} is missing"))),
        Some(other) => Err(mismatch(&path, "a string or an array of content parts", other)),
    }
}

fn part<'a>(path: &str, part: &'a Value) -> Result<&'a str, ApiError> {
    match part.get("type").and_then(Value::as_str) {
        Some("text") => {
            let text = part.get("text").unwrap_or(&Value::Null);
            text.as_str().ok_or_else(|| mismatch(&format!("{path}.text"), "a string", text))
        }
        Some(kind) => {
            let message = format!("{path} has type `{kind}`, and this model reads `text` only");
            Err(ApiError::invalid(path, message))
        }
        None => Err(mismatch(path, "an object with a type", part)),
    }
}

/// Tool calls with their arguments as objects: clients send them as JSON text, but templates
/// write them with `tojson`, which would quote a text once more.
fn tool_calls(path: &str, message: &Map<String, Value>) -> Result<Value, ApiError> {
    let path = format!("{path}.tool_calls");
    let calls = &message["tool_calls"];
    let calls = calls.as_array().ok_or_else(|| mismatch(&path, "an array", calls))?;
    calls.iter().enumerate().map(|(i, call)| tool_call(&format!("{path}[{i}]"), call)).collect()
}

fn tool_call(path: &str, call: &Value) -> Result<Value, ApiError> {
    let function = call.get("function").and_then(Value::as_object);
    let function = function.ok_or_else(|| mismatch(path, "an object with a function", call))?;
    let name = Fields::new(function).string("name").ok().flatten();
    let name = name.ok_or_else(|| mismatch(path, "an object with a function.name", call))?;
    let arguments = match function.get("arguments") {
        Some(Value::String(text)) => {
            let parsed = serde_json::from_str(text).ok().filter(Value::is_object);
            parsed.unwrap_or_else(|| json!(text))
        }
        Some(other) => other.clone(),
        None => json!({}),
    };
    let mut call = call.clone();
    call["function"] = json!({"name": name, "arguments": arguments});
    Ok(call)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_messages(messages: Value) -> Result<Value, ApiError> {
        let body = json!({"messages": messages});
        read(Fields::new(body.as_object().unwrap()))
    }

    fn param_of(error: ApiError) -> String {
        match error {
            ApiError::InvalidParameter { param, .. } => param,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn text_parts_are_joined_and_developer_is_system() {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let messages = read_messages(json!([
            {"role": "developer", "content": "d"},
            {"role": "user", "content": parts, "name": "Ada"},
        ]));
        let expected = json!([
            {"role": "system", "content": "d"},
            {"role": "user", "content": "a\nb", "name": "Ada"},
        ]);
        assert_eq!(messages.unwrap(), expected);
    }

    #[test]
    fn tool_call_arguments_become_objects() {
        let call = |arguments| {
            json!([{"role": "assistant", "content": null, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}},
            ]}])
        };
        let read = |arguments| {
            let messages = read_messages(call(arguments)).unwrap();
            messages[0]["tool_calls"][0]["function"]["arguments"].clone()
        };
        assert_eq!(read(json!("{\"x\": 1}")), json!({"x": 1}));
        assert_eq!(read(json!({"x": 1})), json!({"x": 1}));
        assert_eq!(read(json!("not json")), json!("not json"));
        assert_eq!(read_messages(call(json!("{}"))).unwrap()[0]["content"], "");
    }

    #[test]
    fn errors_name_the_place() {
        let image = json!([{"type": "image_url", "image_url": {"url": "x"}}]);
        let cases = [
            (json!([]), "messages"),
            (json!("hi"), "messages"),
            (json!(["hi"]), "messages[0]"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": 3}]), "messages[0].content"),
            (json!([{"role": "user", "content": image}]), "messages[0].content[0]"),
            (json!([{"role": "robot", "content": ""}]), "messages[0].role"),
            (json!([{"role": "assistant", "tool_calls": [1]}]), "messages[0].tool_calls[0]"),
        ];
        for (messages, param) in cases {
            assert_eq!(param_of(read_messages(messages).unwrap_err()), param);
        }
    }
}
