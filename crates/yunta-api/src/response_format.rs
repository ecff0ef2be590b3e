//! What an output must obey: OpenAI's `response_format`, and vLLM's `guided_…` fields.

use serde_json::Value;
use yunta_engine::Grammar;

use crate::error::ApiError;
use crate::fields::{Fields, mismatch};

/// Reads the grammar of a request, if it asks for one.
pub(crate) fn read(fields: Fields<'_>) -> Result<Option<Grammar>, ApiError> {
    let format = match fields.object("response_format")? {
        Some(format) => of_format(Fields::new(format))?,
        None => None,
    };
    let guided = [
        fields.get("guided_json").map(|schema| Grammar::JsonSchema(schema_text(schema))),
        fields.string("guided_regex")?.map(|text| Grammar::Regex(text.to_owned())),
        fields.string("guided_grammar")?.map(|text| Grammar::Lark(text.to_owned())),
    ];
    let mut all = format.into_iter().chain(guided.into_iter().flatten());
    let first = all.next();
    if all.next().is_some() {
        let message = "a request can have one of response_format, guided_json, guided_regex and \
                       guided_grammar, not several";
        return Err(ApiError::invalid("response_format", message));
    }
    Ok(first)
}

fn of_format(format: Fields<'_>) -> Result<Option<Grammar>, ApiError> {
    match format.string("type")? {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Grammar::JsonObject)),
        Some("json_schema") => {
            let Some(wrapper) = format.object("json_schema")? else {
                let message = "response_format.json_schema must be an object with a schema";
                return Err(ApiError::invalid("response_format.json_schema", message));
            };
            match Fields::new(wrapper).get("schema") {
                Some(schema @ (Value::Object(_) | Value::Bool(_))) => {
                    Ok(Some(Grammar::JsonSchema(schema.to_string())))
                }
                other => {
                    let got = other.unwrap_or(&Value::Null);
                    Err(mismatch("response_format.json_schema.schema", "a JSON schema", got))
                }
            }
        }
        _ => {
            let message =
                "response_format.type must be \"text\", \"json_object\" or \"json_schema\"";
            Err(ApiError::invalid("response_format.type", message))
        }
    }
}

/// vLLM takes a schema as an object or as text.
fn schema_text(schema: &Value) -> String {
    schema.as_str().map_or_else(|| schema.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn grammar(body: Value) -> Result<Option<Grammar>, ApiError> {
        read(Fields::new(body.as_object().unwrap()))
    }

    #[test]
    fn formats_become_grammars() {
        let schema = json!({"type": "object", "required": ["b", "a"]});
        let text = schema.to_string();
        let of = |format: Value| grammar(json!({"response_format": format})).unwrap();
        assert_eq!(of(json!({"type": "text"})), None);
        assert_eq!(of(json!({"type": "json_object"})), Some(Grammar::JsonObject));
        let wrapped =
            json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}});
        assert_eq!(of(wrapped), Some(Grammar::JsonSchema(text.clone())));
        let guided = |body| grammar(body).unwrap().unwrap();
        assert_eq!(guided(json!({"guided_json": schema})), Grammar::JsonSchema(text.clone()));
        assert_eq!(guided(json!({"guided_json": text})), Grammar::JsonSchema(text));
        assert_eq!(guided(json!({"guided_regex": "a+"})), Grammar::Regex("a+".into()));
        assert_eq!(guided(json!({"guided_grammar": "start: X"})), Grammar::Lark("start: X".into()));
        assert_eq!(grammar(json!({})).unwrap(), None);
    }

    #[test]
    fn wrong_formats_are_named() {
        for (body, name) in [
            (json!({"response_format": "json"}), "response_format"),
            (json!({"response_format": {}}), "response_format.type"),
            (json!({"response_format": {"type": "xml"}}), "response_format.type"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}}),
                "response_format.json_schema.schema",
            ),
            (json!({"guided_regex": 5}), "guided_regex"),
            (
                json!({"guided_regex": "a", "response_format": {"type": "json_object"}}),
                "response_format",
            ),
        ] {
            match grammar(body).unwrap_err() {
                ApiError::InvalidParameter { param, .. } => assert_eq!(param, name),
                other => panic!("{other}"),
            }
        }
    }
}
