//! What is refused before `llguidance` sees it: where it would recurse without a limit, take time
//! that grows with the square of the text, or compute with numbers that overflow.

use std::collections::HashSet;

use serde_json::{Number, Value};

/// How deep brackets may be nested in a regular expression or a Lark grammar; `serde_json` limits
/// JSON likewise.
const MAX_NESTING: usize = 100;

/// How many rules a Lark grammar, or targets of `$ref` a schema, may have: they are followed by
/// recursion. Schemas inside a Lark grammar count their members as rules.
const MAX_RULES: usize = 4000;

/// How many properties one object may have: from some 500 optional ones on, the parser fails.
const MAX_PROPERTIES: usize = 1000;

/// How many properties a schema may have in all, as they may all be merged into one object.
const MAX_PROPERTIES_IN_ALL: usize = 4000;

/// How many patterns of properties a schema may have in all: automata of each pair are compared.
const MAX_PATTERNS_IN_ALL: usize = 64;

/// How many members a `oneOf` may have: each is compared with each.
const MAX_ONE_OF: usize = 200;

/// Remainders are computed in 32 bits, with a digit added.
const MAX_MULTIPLE: u64 = 100_000_000;

pub(crate) fn check_regex(text: &str) -> Result<(), String> {
    at_most(MAX_NESTING, nesting(text), "levels of brackets")
}

pub(crate) fn check_lark(text: &str) -> Result<(), String> {
    at_most(MAX_NESTING, nesting(text), "levels of brackets")?;
    at_most(MAX_RULES, text.matches(':').count(), "rules")
}

pub(crate) fn check_schema(schema: &Value) -> Result<(), String> {
    let mut found = Found::default();
    found.collect(schema)?;
    at_most(MAX_RULES, found.targets.len(), "targets of $ref")?;
    at_most(MAX_PROPERTIES_IN_ALL, found.properties, "properties")?;
    at_most(MAX_PATTERNS_IN_ALL, found.patterns, "patternProperties")?;
    found.check_multiples()
}

fn at_most(limit: usize, count: usize, what: &str) -> Result<(), String> {
    match count <= limit {
        true => Ok(()),
        false => Err(format!("too many {what}: {count}, at most {limit} are allowed")),
    }
}

/// How deep brackets are nested, those in literals and negations counted too: never less than what
/// a parser would find.
fn nesting(text: &str) -> usize {
    let mut deepest = 0_usize;
    let mut depth = 0_usize;
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' | b'~' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    deepest
}

/// What counts in a schema.
#[derive(Default)]
struct Found<'a> {
    targets: HashSet<&'a str>,
    properties: usize,
    patterns: usize,
    multiples: Vec<&'a Number>,
}

impl<'a> Found<'a> {
    /// Goes through all values, whether schemas or not: names of keywords are rare elsewhere.
    fn collect(&mut self, value: &'a Value) -> Result<(), String> {
        match value {
            Value::Object(object) => {
                for (key, value) in object {
                    self.keyword(key, value)?;
                    self.collect(value)?;
                }
                Ok(())
            }
            Value::Array(list) => list.iter().try_for_each(|value| self.collect(value)),
            _ => Ok(()),
        }
    }

    fn keyword(&mut self, key: &str, value: &'a Value) -> Result<(), String> {
        match (key, value) {
            ("$ref", Value::String(target)) => {
                self.targets.insert(target);
                Ok(())
            }
            ("properties", Value::Object(object)) => {
                self.properties += object.len();
                at_most(MAX_PROPERTIES, object.len(), key)
            }
            ("patternProperties", Value::Object(object)) => {
                self.patterns += object.len();
                Ok(())
            }
            ("oneOf", Value::Array(list)) => at_most(MAX_ONE_OF, list.len(), key),
            ("multipleOf", Value::Number(number)) => {
                self.multiples.push(number);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Schemas may be merged, and their multiples with them.
    fn check_multiples(&self) -> Result<(), String> {
        let numbers: Option<Vec<(u64, u32)>> = self.multiples.iter().map(|n| decimal(n)).collect();
        let common = numbers.and_then(|numbers| {
            let scale = numbers.iter().map(|(_, scale)| *scale).max().unwrap_or(0);
            numbers.iter().try_fold(1, |common, (digits, own)| {
                let scaled = digits.checked_mul(10_u64.checked_pow(scale - own)?)?;
                least_common_multiple(common, scaled).filter(|m| *m <= MAX_MULTIPLE)
            })
        });
        common.map(|_| ()).ok_or_else(|| {
            format!("multipleOf: more than {MAX_MULTIPLE} steps of the last digit to a multiple")
        })
    }
}

/// The digits of a number without its point, and how many are behind it.
fn decimal(number: &Number) -> Option<(u64, u32)> {
    const MAX_SCALE: usize = 8;
    let text = number.to_string();
    let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
    let fraction = fraction.trim_end_matches('0');
    let digits = format!("{whole}{fraction}").parse().ok().filter(|digits| *digits > 0)?;
    let scale = u32::try_from(fraction.len()).ok().filter(|_| fraction.len() <= MAX_SCALE)?;
    Some((digits, scale))
}

fn least_common_multiple(a: u64, b: u64) -> Option<u64> {
    let (mut divisor, mut rest) = (a, b);
    while rest != 0 {
        (divisor, rest) = (rest, divisor % rest);
    }
    a.checked_div(divisor)?.checked_mul(b)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn brackets_are_counted_by_their_depth() {
        assert_eq!(nesting("a(b)(c[d{1}])~e"), 3);
        assert_eq!(nesting("))(("), 2);
    }

    #[test]
    fn multiples_are_allowed_as_far_as_they_are_computed() {
        let multiples = |list: Value| check_schema(&json!({"multipleOf": 1, "allOf": list}));
        let of = |m: Value| json!({"multipleOf": m});
        assert!(multiples(json!([of(json!(0.01)), of(json!(250)), of(json!(1000.0))])).is_ok());
        assert!(multiples(json!([of(json!(100_000_000))])).is_ok());
        for beyond in [json!(100_000_001), json!(0), json!(-3), json!(1e-9), json!(1e20)] {
            let error = multiples(json!([of(beyond)])).unwrap_err();
            assert!(error.contains("multipleOf"), "{error}");
        }
        assert!(multiples(json!([of(json!(9973)), of(json!(10_007))])).is_ok());
        assert!(multiples(json!([of(json!(99_991)), of(json!(10_007))])).is_err());
    }
}
