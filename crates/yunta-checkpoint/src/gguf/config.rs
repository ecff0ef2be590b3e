//! A Hugging Face configuration from GGUF metadata.

use std::collections::HashMap;
use std::path::Path;

use serde_json::{Map, Value, json};

use super::{Metadata, MetadataValue};
use crate::CheckpointError;
use crate::tensor::Entry;

/// SmolLM3's files do not say that every fourth layer goes without rotary embedding.
const SMOLLM3_NO_ROPE_INTERVAL: u64 = 4;

/// `general.architecture`.
pub(crate) fn architecture(path: &Path, metadata: &Metadata) -> Result<String, CheckpointError> {
    let architecture = metadata.get("general.architecture").and_then(MetadataValue::text);
    architecture.map(str::to_owned).ok_or_else(|| {
        CheckpointError::malformed(path, "metadata `general.architecture` is missing")
    })
}

/// Metadata of one architecture.
struct Source<'a> {
    path: &'a Path,
    architecture: &'a str,
    metadata: &'a Metadata,
}

impl<'a> Source<'a> {
    fn get(&self, key: &str) -> Option<&'a MetadataValue> {
        self.metadata.get(&format!("{}.{key}", self.architecture))
    }

    fn float(&self, key: &str) -> Option<f64> {
        self.get(key).and_then(MetadataValue::float)
    }

    /// A count. A list, one for each layer, is accepted where all layers agree.
    fn count(&self, key: &str) -> Result<Option<u64>, CheckpointError> {
        let value = match self.get(key) {
            None => return Ok(None),
            Some(MetadataValue::Array(list)) => match list.split_first() {
                Some((first, rest)) if rest.iter().all(|v| v == first) => Some(first),
                _ => None,
            },
            Some(value) => Some(value),
        };
        match value.and_then(MetadataValue::unsigned) {
            Some(n) => Ok(Some(n)),
            None => {
                let key = format!("{}.{key}", self.architecture);
                let reason = format!("metadata `{key}` is not one count for all layers");
                Err(CheckpointError::malformed(self.path, reason))
            }
        }
    }
}

/// The configuration with the fields that models need, under their Hugging Face names. Fields that
/// the file lacks are left out: whoever needs one says so.
pub(crate) fn config(
    path: &Path,
    architecture: &str,
    metadata: &Metadata,
    tensors: &HashMap<String, Entry>,
) -> Result<Value, CheckpointError> {
    let source = Source { path, architecture, metadata };
    let mut config = Map::new();
    config.insert("model_type".into(), json!(architecture));
    for (field, key) in [
        ("hidden_size", "embedding_length"),
        ("intermediate_size", "feed_forward_length"),
        ("num_hidden_layers", "block_count"),
        ("num_attention_heads", "attention.head_count"),
        ("num_key_value_heads", "attention.head_count_kv"),
        ("max_position_embeddings", "context_length"),
        ("vocab_size", "vocab_size"),
        ("sliding_window", "attention.sliding_window"),
    ] {
        if let Some(n) = source.count(key)? {
            config.insert(field.into(), json!(n));
        }
    }
    for (field, key) in
        [("rms_norm_eps", "attention.layer_norm_rms_epsilon"), ("rope_theta", "rope.freq_base")]
    {
        if let Some(x) = source.float(key) {
            config.insert(field.into(), json!(x));
        }
    }
    heads(&source, &mut config)?;
    from_tensors(tensors, &mut config);
    if let Some(scaling) = rope_scaling(&source)? {
        config.insert("rope_scaling".into(), scaling);
    }
    for field in ["bos_token_id", "eos_token_id"] {
        let id = metadata.get(&format!("tokenizer.ggml.{field}"));
        if let Some(id) = id.and_then(MetadataValue::unsigned) {
            config.insert(field.into(), json!(id));
        }
    }
    Ok(Value::Object(config))
}

/// What attention heads are like, where the file leaves it to a rule.
fn heads(source: &Source<'_>, config: &mut Map<String, Value>) -> Result<(), CheckpointError> {
    let field = |config: &Map<String, Value>, name| config.get(name).and_then(Value::as_u64);
    let heads = field(config, "num_attention_heads");
    if let (Some(heads), None) = (heads, field(config, "num_key_value_heads")) {
        config.insert("num_key_value_heads".into(), json!(heads));
    }
    let said = source.count("attention.key_length")?.or(source.count("rope.dimension_count")?);
    let shared = || field(config, "hidden_size")?.checked_div(heads?);
    if let Some(head_dim) = said.or_else(shared) {
        config.insert("head_dim".into(), json!(head_dim));
    }
    Ok(())
}

/// What only the tensors tell.
fn from_tensors(tensors: &HashMap<String, Entry>, config: &mut Map<String, Value>) {
    if let Some(rows) = tensors.get("model.embed_tokens.weight").and_then(|e| e.shape.first()) {
        // The table is what there is; the metadata may count padding differently.
        config.insert("vocab_size".into(), json!(rows));
    }
    let has = |name: &str| tensors.keys().any(|tensor| tensor.ends_with(name));
    config.insert("tie_word_embeddings".into(), json!(!has("lm_head.weight")));
    config.insert("attention_bias".into(), json!(has(".self_attn.q_proj.bias")));
    config.insert("mlp_bias".into(), json!(has(".mlp.up_proj.bias")));
    let layers = config.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or(0);
    // More layers than tensors are not meant seriously.
    if config.get("model_type") == Some(&json!("smollm3")) && layers <= tensors.len() as u64 {
        let rotary = |layer: u64| u64::from(!layer.is_multiple_of(SMOLLM3_NO_ROPE_INTERVAL));
        config.insert("no_rope_layers".into(), (1..=layers).map(rotary).collect());
    }
}

fn rope_scaling(source: &Source<'_>) -> Result<Option<Value>, CheckpointError> {
    let kind = source.get("rope.scaling.type").and_then(MetadataValue::text);
    // Old files know linear scaling only, under another key.
    let old = source.float("rope.scale_linear").filter(|factor| *factor != 1.0);
    let kind = match (kind, old) {
        (None, Some(_)) => "linear",
        (None | Some("none"), _) => return Ok(None),
        (Some(kind), _) => kind,
    };
    let mut scaling = Map::new();
    scaling.insert("rope_type".into(), json!(kind));
    let factor = source.float("rope.scaling.factor").or(old);
    for (field, value) in [
        ("factor", factor),
        ("beta_fast", source.float("rope.scaling.yarn_beta_fast")),
        ("beta_slow", source.float("rope.scaling.yarn_beta_slow")),
        ("attention_factor", attention_factor(source, kind, factor)),
    ] {
        if let Some(x) = value {
            scaling.insert(field.into(), json!(x));
        }
    }
    if let Some(n) = source.count("rope.scaling.original_context_length")? {
        scaling.insert("original_max_position_embeddings".into(), json!(n));
    }
    Ok(Some(Value::Object(scaling)))
}

/// Hugging Face's factor on attention, which includes the one that YaRN prescribes.
fn attention_factor(source: &Source<'_>, kind: &str, factor: Option<f64>) -> Option<f64> {
    let whole = source.float("rope.scaling.yarn_attn_factor");
    // llama.cpp multiplies this one by what YaRN prescribes.
    let own = || source.float("rope.scaling.attn_factor");
    let prescribed = match (kind, factor) {
        ("yarn", Some(factor)) if factor > 1.0 => 0.1 * factor.ln() + 1.0,
        _ => 1.0,
    };
    whole.or_else(|| Some(own()? * prescribed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use MetadataValue::{Array, Float, Text, Unsigned};

    fn config_of(
        architecture: &str,
        pairs: &[(&str, MetadataValue)],
    ) -> Result<Value, CheckpointError> {
        let key = |key: &str| format!("{architecture}.{key}");
        let metadata = pairs.iter().map(|(k, v)| (key(k), v.clone())).collect();
        config(Path::new("f"), architecture, &metadata, &HashMap::new())
    }

    #[test]
    fn heads_follow_the_rules_where_the_file_is_silent() {
        let silent = [("embedding_length", Unsigned(64)), ("attention.head_count", Unsigned(4))];
        let config = config_of("llama", &silent).unwrap();
        assert_eq!(config["num_key_value_heads"], 4);
        assert_eq!(config["head_dim"], 16);
        let said = [("rope.dimension_count", Unsigned(8)), ("attention.key_length", Unsigned(32))];
        assert_eq!(config_of("qwen3", &said).unwrap()["head_dim"], 32);
    }

    #[test]
    fn a_list_per_layer_must_be_uniform() {
        let list = |a, b| [("feed_forward_length", Array(vec![Unsigned(a), Unsigned(b)]))];
        assert_eq!(config_of("llama", &list(7, 7)).unwrap()["intermediate_size"], 7);
        assert!(config_of("llama", &list(7, 8)).is_err());
        assert!(config_of("llama", &[("feed_forward_length", Array(Vec::new()))]).is_err());
    }

    #[test]
    fn scaling_has_the_form_of_hugging_face() {
        let yarn = [
            ("rope.scaling.type", Text("yarn".into())),
            ("rope.scaling.factor", Float(4.0)),
            ("rope.scaling.original_context_length", Unsigned(32768)),
        ];
        let expected = json!({
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
        });
        assert_eq!(config_of("qwen3", &yarn).unwrap()["rope_scaling"], expected);
        let old = config_of("llama", &[("rope.scale_linear", Float(2.0))]).unwrap();
        assert_eq!(old["rope_scaling"], json!({"rope_type": "linear", "factor": 2.0}));
        let none = [("rope.scaling.type", Text("none".into()))];
        assert!(config_of("llama", &none).unwrap().get("rope_scaling").is_none());
    }

    #[test]
    fn a_hostile_number_of_layers_costs_nothing() {
        let config = config_of("smollm3", &[("block_count", Unsigned(u64::MAX))]).unwrap();
        assert!(config.get("no_rope_layers").is_none());
    }
}
