//! Chat templates: Jinja with the functions and filters that Hugging Face gives them.

use std::io;

use jiff::Zoned;
use minijinja::value::{Kwargs, Value as Jinja};
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior, context};
use serde_json::{Map, Value};

use crate::CheckpointError;
use crate::text::json::{Style, dumps};
use crate::text::python;

/// Instructions a template may execute: hundreds of times what long conversations need.
const FUEL: u64 = 20_000_000;
/// No model reads more text.
const RENDERED_BYTES_MAX: usize = 64 << 20;
/// Names of the templates within a model.
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// Renders conversations as the model was trained to read them.
///
/// The number of instructions and the length of the text are limited, so that a template can
/// not run for ever. Size and nesting of values in between are not: a template made for it can
/// exhaust memory or the stack, so take templates from where you would take the model.
pub struct ChatTemplate {
    environment: Environment<'static>,
    has_tool_use: bool,
    bos: Option<String>,
    eos: Option<String>,
}

impl ChatTemplate {
    /// From the `chat_template` field of a configuration: the text of a template, or a list of
    /// named ones.
    pub(crate) fn from_value(
        template: &Value,
        bos: Option<String>,
        eos: Option<String>,
    ) -> Result<Self, CheckpointError> {
        let mut named: Vec<(String, String)> = Vec::new();
        match template {
            Value::String(text) => named.push((DEFAULT.to_owned(), text.clone())),
            Value::Array(list) => {
                let text = |entry: &Value, key: &str| entry.get(key)?.as_str().map(str::to_owned);
                named.extend(
                    list.iter().filter_map(|e| Some((text(e, "name")?, text(e, "template")?))),
                );
            }
            _ => {}
        }
        if !named.iter().any(|(name, _)| name == DEFAULT) {
            return Err(bad("there is no template named `default`"));
        }
        let mut environment = environment();
        let has_tool_use = named.iter().any(|(name, _)| name == TOOL_USE);
        for (name, text) in named {
            let text = without_generation_tags(&text);
            environment.add_template_owned(name, text).map_err(|e| bad(describe(&e)))?;
        }
        Ok(Self { environment, has_tool_use, bos, eos })
    }

    /// Renders a conversation.
    ///
    /// `messages` is a list of objects with `role` and `content`; `tools` a list of tool
    /// descriptions; `extra` further variables that the template knows.
    ///
    /// # Errors
    /// [`CheckpointError::Template`] if the template refuses the conversation (in its own words)
    /// or fails.
    pub fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String, CheckpointError> {
        self.render_at(Zoned::now(), messages, tools, add_generation_prompt, extra)
    }

    /// As [`ChatTemplate::render`], at a given time.
    fn render_at(
        &self,
        now: Zoned,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String, CheckpointError> {
        let name = if tools.is_some() && self.has_tool_use { TOOL_USE } else { DEFAULT };
        let template = self.environment.get_template(name).map_err(|e| bad(describe(&e)))?;
        let strftime_now = move |format: String| {
            jiff::fmt::strtime::format(&format, &now)
                .map_err(|e| Error::new(ErrorKind::InvalidOperation, e.to_string()))
        };
        let token = |text: &Option<String>| text.clone().map_or(Jinja::UNDEFINED, Jinja::from);
        let variables = context! {
            messages => Jinja::from_serialize(messages),
            tools => tools.map(Jinja::from_serialize),
            // Present in any case: templates ask whether it is none.
            documents => extra.get("documents").map(Jinja::from_serialize),
            add_generation_prompt,
            bos_token => token(&self.bos),
            eos_token => token(&self.eos),
            strftime_now => Jinja::from_function(strftime_now),
            ..Jinja::from_serialize(extra),
        };
        let mut out = Bounded(Vec::new());
        template.render_captured_to(variables, &mut out).map_err(|e| bad(describe(&e)))?;
        String::from_utf8(out.0).map_err(|e| bad(e.to_string()))
    }
}

/// Collects a text up to [`RENDERED_BYTES_MAX`].
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > RENDERED_BYTES_MAX - self.0.len() {
            return Err(io::Error::other(format!("the text exceeds {RENDERED_BYTES_MAX} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn bad(reason: impl Into<String>) -> CheckpointError {
    CheckpointError::Template { reason: reason.into() }
}

/// The words of `raise_exception` alone; else what went wrong, and where.
fn describe(error: &Error) -> String {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let mut text = String::new();
    while let Some(e) = cause {
        let detail = e.downcast_ref().and_then(Error::detail);
        if let Some(words) = detail.and_then(|detail| detail.strip_prefix(RAISED)) {
            return words.to_owned();
        }
        text += if text.is_empty() { "" } else { ": " };
        text += &e.to_string();
        cause = e.source();
    }
    text
}

/// Marks errors that the template itself raised.
const RAISED: &str = "raised: ";

/// `{% generation %}` marks what the model said, for training; it changes no text. Jinja does not
/// know it, so it becomes a condition that always holds.
fn without_generation_tags(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some((before, tag)) = rest.split_once("{%") {
        out.push_str(before);
        out.push_str("{%");
        let inner = tag.strip_prefix(['-', '+']).unwrap_or(tag).trim_start();
        out.push_str(tag.get(..tag.len() - inner.len()).unwrap_or_default());
        let ends = |inner: &str| {
            let inner = inner.trim_start();
            inner.strip_prefix(['-', '+']).unwrap_or(inner).starts_with("%}")
        };
        rest = inner;
        for (word, replacement) in [("generation", "if true"), ("endgeneration", "endif")] {
            if let Some(behind) = inner.strip_prefix(word).filter(|behind| ends(behind)) {
                out.push_str(replacement);
                rest = behind;
            }
        }
    }
    out.push_str(rest);
    out
}

fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    env.set_trim_blocks(true);
    env.set_lstrip_blocks(true);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_fuel(Some(FUEL));
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.add_function("raise_exception", |message: String| -> Result<String, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
    });
    env.add_filter("tojson", to_json);
    // Where Python and the engine differ on values, Python is what templates were tried with.
    env.set_formatter(|out, _, value| match value.as_str() {
        Some(text) => Ok(out.write_str(text)?),
        None => Ok(out.write_str(&python::str(value))?),
    });
    env.add_filter("string", |value: &Jinja| python::str(value));
    env.add_filter("trim", |value: &Jinja, chars: Option<String>| match chars {
        Some(chars) => python::str(value).trim_matches(|c| chars.contains(c)).to_owned(),
        None => python::str(value).trim().to_owned(),
    });
    env.add_test("iterable", |value: &Jinja| !value.is_none() && value.try_iter().is_ok());
    env
}

/// Hugging Face's `tojson`: `json.dumps` with `ensure_ascii=False`; nothing is escaped for HTML.
fn to_json(value: &Jinja, options: Kwargs) -> Result<String, Error> {
    let failed = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    let indent = options.get::<Option<Jinja>>("indent")?.filter(|v| !v.is_none());
    let indent = indent.map(|indent| match indent.as_str() {
        Some(text) => text.to_owned(),
        None => " ".repeat(indent.as_usize().unwrap_or(0).min(64)),
    });
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let comma = if indent.is_some() { "," } else { ", " };
    let separators = separators.unwrap_or_else(|| vec![comma.to_owned(), ": ".to_owned()]);
    let [comma, colon] = <[String; 2]>::try_from(separators)
        .map_err(|_| Error::new(ErrorKind::InvalidOperation, "`separators` must be a pair"))?;
    let mut value = serde_json::to_value(value).map_err(failed)?;
    if sort_keys {
        value.sort_all_objects();
    }
    dumps(&value, &Style { indent, comma, colon, ascii }).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(template: &str, messages: Value, tools: Option<&Value>) -> Result<String, String> {
        let template =
            ChatTemplate::from_value(&json!(template), Some("<s>".into()), None).unwrap();
        template.render(&messages, tools, true, &Map::new()).map_err(|e| e.to_string())
    }

    #[test]
    fn a_template_refuses_in_its_own_words() {
        let macros = "{% macro check(m) %}{{ raise_exception('no ' ~ m.role) }}{% endmacro %}\
            {% for m in messages %}{{ check(m) }}{% endfor %}";
        let e = render(macros, json!([{"role": "system"}]), None).unwrap_err();
        assert_eq!(e, "chat template: no system");
        let template =
            "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}";
        let e = render(template, json!([{"role": "system"}]), None).unwrap_err();
        assert_eq!(e, "chat template: user first");
    }

    #[test]
    fn tojson_is_json_dumps() {
        let value = json!([{"a": 1, "b": ["<ü>", null, true, 1.5]}]);
        assert_eq!(
            render("{{ messages | tojson }}", value.clone(), None).unwrap(),
            r#"[{"a": 1, "b": ["<ü>", null, true, 1.5]}]"#
        );
        assert_eq!(
            render("{{ messages[0].b | tojson(indent=2) }}", value, None).unwrap(),
            "[\n  \"<ü>\",\n  null,\n  true,\n  1.5\n]"
        );
    }

    #[test]
    fn tojson_takes_the_arguments_of_json_dumps() {
        let value = json!([{"b": "é", "a": 1}]);
        let call = |arguments: &str| {
            render(&format!("{{{{ messages | tojson({arguments}) }}}}"), value.clone(), None)
        };
        assert_eq!(call("sort_keys=true").unwrap(), r#"[{"a": 1, "b": "é"}]"#);
        assert_eq!(call("separators=(',', ':')").unwrap(), r#"[{"b":"é","a":1}]"#);
        assert_eq!(call("ensure_ascii=true").unwrap(), r#"[{"b": "\u00e9", "a": 1}]"#);
        assert!(call("no_such=1").is_err());
    }

    #[test]
    fn python_methods_loop_controls_and_namespaces_work() {
        let template = "{%- set ns = namespace(n=0) -%}
            {%- for m in messages -%}
                {%- if m.content.startswith('skip') %}{% continue %}{% endif -%}
                {%- if loop.index0 > 2 %}{% break %}{% endif -%}
                {%- set ns.n = ns.n + 1 -%}
                {{ bos_token }}{{ m['content'].strip().split('|')[-1] | trim }};
            {%- endfor -%}
            {{ ns.n }}";
        let messages =
            json!([{"content": " a|b "}, {"content": "skip"}, {"content": "c"}, {"content": "d"}]);
        assert_eq!(render(template, messages, None).unwrap(), "<s>b;<s>c;2");
    }

    #[test]
    fn the_date_is_that_of_the_clock() {
        let template = "{{ strftime_now('%d %b %Y') }}, {{ strftime_now('%Y-%m-%d') }}";
        let template = ChatTemplate::from_value(&json!(template), None, None).unwrap();
        let now = "2024-07-26T12:00:00+00:00[UTC]".parse().unwrap();
        let text = template.render_at(now, &json!([]), None, true, &Map::new()).unwrap();
        assert_eq!(text, "26 Jul 2024, 2024-07-26");
    }

    #[test]
    fn generation_marks_leave_no_trace() {
        let template =
            "a\n  {%- generation -%}\n b\n  {% endgeneration %}\nc{% set generation = 1 %}";
        assert_eq!(render(template, json!([]), None).unwrap(), "ab\nc");
        assert_eq!(without_generation_tags("x {% generation"), "x {% generation");
        assert_eq!(without_generation_tags("{%"), "{%");
    }

    #[test]
    fn absent_things_are_absent_as_in_python() {
        let template = "{{ documents is none }} {{ tools is none }} {{ eos_token is defined }} \
            {{ bos_token }}{{ extra }}";
        let template =
            ChatTemplate::from_value(&json!(template), Some("<s>".into()), None).unwrap();
        let extra =
            Map::from_iter([("extra".to_owned(), json!(1)), ("bos_token".to_owned(), json!(2))]);
        let text = template.render(&json!([]), None, true, &extra).unwrap();
        assert_eq!(text, "True True False <s>1");
    }

    #[test]
    fn none_is_not_iterable_and_values_print_as_in_python() {
        let template = "{{ tools is iterable }} {{ messages is iterable }} {{ messages }} \
            {{ messages | string | length }}{{ none }}{{ no_such }}";
        let text = render(template, json!([{"a": true}]), None).unwrap();
        assert_eq!(text, "False True [{'a': True}] 13None");
    }

    #[test]
    fn an_endless_text_is_cut_off() {
        let template = "{% for i in range(1000) %}{{ 'x' * 1000000 }}{% endfor %}";
        let e = render(template, json!([]), None).unwrap_err();
        assert!(e.contains("exceeds"), "{e}");
    }

    #[test]
    fn an_endless_template_is_stopped() {
        let template = "{% for i in range(10000) %}{% for j in range(10000) %}{{ i * j }}{% endfor %}{% endfor %}";
        assert!(render(template, json!([]), None).is_err());
    }

    #[test]
    fn named_templates_are_chosen_by_need() {
        let list = json!([
            {"name": "default", "template": "plain"},
            {"name": "tool_use", "template": "{{ tools | length }} tools"},
        ]);
        let template = ChatTemplate::from_value(&list, None, None).unwrap();
        let tools = json!([{}, {}]);
        let none = Map::new();
        assert_eq!(template.render(&json!([]), None, false, &none).unwrap(), "plain");
        assert_eq!(template.render(&json!([]), Some(&tools), false, &none).unwrap(), "2 tools");
        assert!(ChatTemplate::from_value(&json!([]), None, None).is_err());
    }

    #[test]
    fn nonsense_is_an_error() {
        assert!(ChatTemplate::from_value(&json!("{% for %}"), None, None).is_err());
        assert!(render("{{ messages | no_such_filter }}", json!([]), None).is_err());
    }
}
