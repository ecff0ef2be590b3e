//! GGUF tensor names in their Hugging Face form.

/// The canonical name; names that have none stay as they are.
pub(crate) fn canonical(name: &str) -> String {
    let (stem, suffix) = match name.rsplit_once('.') {
        Some((stem, suffix @ ("weight" | "bias"))) => (stem, suffix),
        _ => return name.to_owned(),
    };
    let whole = match stem {
        "token_embd" => Some("model.embed_tokens"),
        "output_norm" => Some("model.norm"),
        "output" => Some("lm_head"),
        _ => None,
    };
    if let Some(whole) = whole {
        return format!("{whole}.{suffix}");
    }
    let block = stem.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let part = block.and_then(|(layer, part)| {
        let part = match part {
            "attn_norm" => "input_layernorm",
            "attn_q" => "self_attn.q_proj",
            "attn_k" => "self_attn.k_proj",
            "attn_v" => "self_attn.v_proj",
            "attn_output" => "self_attn.o_proj",
            "attn_q_norm" => "self_attn.q_norm",
            "attn_k_norm" => "self_attn.k_norm",
            "ffn_norm" => "post_attention_layernorm",
            "ffn_gate" => "mlp.gate_proj",
            "ffn_up" => "mlp.up_proj",
            "ffn_down" => "mlp.down_proj",
            _ => return None,
        };
        Some(format!("model.layers.{layer}.{part}.{suffix}"))
    });
    part.unwrap_or_else(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use super::canonical;

    #[test]
    fn names_are_those_of_hugging_face() {
        assert_eq!(canonical("token_embd.weight"), "model.embed_tokens.weight");
        assert_eq!(canonical("blk.12.attn_q.bias"), "model.layers.12.self_attn.q_proj.bias");
        assert_eq!(canonical("rope_freqs.weight"), "rope_freqs.weight");
        assert_eq!(canonical("blk.0.ssm_conv1d.weight"), "blk.0.ssm_conv1d.weight");
    }
}
