//! The configuration of the llama family, from the Hugging Face fields.

use serde_json::Value;
use yunta_checkpoint::Checkpoint;
use yunta_tensor::dequantise_row;

use crate::rope::Rope;
use crate::{Dims, ModelError};

/// `model_type`s whose layers are those of `llama.rs`.
const KNOWN: &str = "llama, mistral, qwen2, qwen3, smollm3";

/// GGUF files with Llama 3.1's scaling carry its factors as a tensor.
const ROPE_FACTORS: &str = "rope_freqs.weight";

/// What the equations need to know.
pub(crate) struct Config {
    pub(crate) dims: Dims,
    pub(crate) eps: f32,
    pub(crate) rope: Rope,
    /// The output projection is the embedding table.
    pub(crate) tied: bool,
    /// Per layer.
    pub(crate) layers: Vec<LayerConfig>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LayerConfig {
    /// Whether positions are rotated in.
    pub(crate) rotary: bool,
    /// Sliding window, in tokens.
    pub(crate) window: Option<usize>,
}

struct Fields<'a> {
    file: String,
    json: &'a Value,
}

impl Fields<'_> {
    fn bad(&self, field: &str, reason: impl Into<String>) -> ModelError {
        ModelError::Config { file: self.file.clone(), field: field.into(), reason: reason.into() }
    }

    fn get(&self, field: &str) -> Option<&Value> {
        self.json.get(field).filter(|v| !v.is_null())
    }

    /// A count within bounds that no real model exceeds, so that products can't overflow.
    fn count(&self, field: &str, default: Option<usize>) -> Result<usize, ModelError> {
        const MOST: u64 = 1 << 30;
        let Some(v) = self.get(field) else {
            return default.ok_or_else(|| self.bad(field, "is missing"));
        };
        match v.as_u64() {
            Some(n) if (1..=MOST).contains(&n) => Ok(n as usize),
            _ => Err(self.bad(field, format!("{v} is not a whole number from 1 to {MOST}"))),
        }
    }

    fn real(&self, field: &str, default: f64) -> Result<f64, ModelError> {
        match self.get(field).map(Value::as_f64) {
            None => Ok(default),
            Some(Some(x)) if x.is_finite() && x > 0.0 => Ok(x),
            _ => Err(self.bad(field, "must be a positive number")),
        }
    }

    fn flag(&self, field: &str, default: bool) -> bool {
        self.get(field).and_then(Value::as_bool).unwrap_or(default)
    }
}

impl Config {
    pub(crate) fn parse(checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let file = checkpoint.path().display().to_string();
        let fields = Fields { file, json: checkpoint.config() };
        let model_type = fields.get("model_type").and_then(Value::as_str).unwrap_or("");
        if !KNOWN.split(", ").any(|known| known == model_type) {
            return Err(ModelError::UnknownArchitecture {
                file: fields.file.clone(),
                model_type: model_type.to_owned(),
                known: KNOWN,
            });
        }
        if let Some(act) = fields.get("hidden_act").filter(|a| a.as_str() != Some("silu")) {
            return Err(fields.bad("hidden_act", format!("{act} is not supported (silu is)")));
        }
        let dims = dims(&fields)?;
        let layers =
            (0..dims.layers).map(|i| layer(&fields, model_type, i)).collect::<Result<_, _>>()?;
        Ok(Self {
            eps: fields.real("rms_norm_eps", 1e-6)? as f32,
            rope: rope(&fields, checkpoint, &dims)?,
            tied: !checkpoint.contains("lm_head.weight")
                || fields.flag("tie_word_embeddings", false),
            layers,
            dims,
        })
    }
}

fn dims(fields: &Fields<'_>) -> Result<Dims, ModelError> {
    let heads = fields.count("num_attention_heads", None)?;
    let hidden = fields.count("hidden_size", None)?;
    let kv_heads = fields.count("num_key_value_heads", Some(heads))?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(
            fields.bad("num_key_value_heads", format!("{heads} heads can't share {kv_heads}"))
        );
    }
    let head_dim = fields.count("head_dim", Some((hidden / heads).max(1)))?;
    if !head_dim.is_multiple_of(2) {
        return Err(fields.bad("head_dim", format!("{head_dim} is odd: it can't be rotated")));
    }
    Ok(Dims {
        layers: fields.count("num_hidden_layers", None)?,
        hidden,
        heads,
        kv_heads,
        head_dim,
        feed_forward: fields.count("intermediate_size", None)?,
        vocab: fields.count("vocab_size", None)?,
        context: fields.count("max_position_embeddings", Some(2048))?,
    })
}

fn rope(fields: &Fields<'_>, checkpoint: &Checkpoint, dims: &Dims) -> Result<Rope, ModelError> {
    // transformers 5 writes `rope_parameters`, with the base frequency inside.
    let scaling = fields.get("rope_scaling").or_else(|| fields.get("rope_parameters"));
    let inner = scaling.and_then(|s| s.get("rope_theta")).and_then(Value::as_f64);
    let theta = fields.real("rope_theta", inner.unwrap_or(10_000.0))?;
    let bad = |reason| fields.bad("rope_scaling", reason);
    let rope = Rope::new(dims.head_dim, theta, scaling, dims.context).map_err(bad)?;
    if !checkpoint.contains(ROPE_FACTORS) {
        return Ok(rope);
    }
    let tensor = checkpoint.tensor(ROPE_FACTORS)?;
    let mut factors = vec![0.0; tensor.cols()];
    dequantise_row(tensor.dtype(), tensor.row(0)?, &mut factors)
        .map_err(|source| ModelError::Weight { tensor: ROPE_FACTORS.into(), source })?;
    rope.divided_by(&factors).map_err(bad)
}

fn layer(fields: &Fields<'_>, model_type: &str, i: usize) -> Result<LayerConfig, ModelError> {
    // smollm3: 0 marks a layer without rotary embedding.
    let rotary = fields
        .get("no_rope_layers")
        .and_then(|v| v.get(i))
        .and_then(Value::as_u64)
        .is_none_or(|flag| flag != 0);
    let slides = match model_type {
        "mistral" => true,
        "smollm3" => fields.flag("use_sliding_window", false),
        "qwen2" | "qwen3" => {
            fields.flag("use_sliding_window", false)
                && i >= fields.count("max_window_layers", Some(usize::MAX >> 34)).unwrap_or(0)
        }
        _ => false,
    };
    let full = fields.get("layer_types").and_then(|v| v.get(i)).and_then(Value::as_str)
        == Some("full_attention");
    let window = match fields.get("sliding_window") {
        Some(_) if slides && !full => Some(fields.count("sliding_window", None)?),
        _ => None,
    };
    Ok(LayerConfig { rotary, window })
}
