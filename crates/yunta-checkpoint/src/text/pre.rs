//! How byte-level tokenizers cut text into words, by the name that GGUF files give it
//! (`tokenizer.ggml.pre`). Source: `llama-vocab.cpp` of llama.cpp for the names, the models'
//! tokenizer.json for the patterns.

use serde_json::{Value, json};

/// A pre-tokenizer and what goes with it.
pub(crate) struct Pre {
    /// As in tokenizer.json.
    pub(crate) pre_tokenizer: Value,
    /// As in tokenizer.json.
    pub(crate) normalizer: Value,
    /// Words that are tokens are not built from merges.
    pub(crate) ignore_merges: bool,
    /// Prompts begin with BOS, unless the file says otherwise.
    pub(crate) add_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const BAILING: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT_4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
const DIGIT: &str = r"\p{N}";
const FALCON: [&str; 3] = [r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"];
const DEEPSEEK_CODER: [&str; 5] = ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", DIGIT];
const DEEPSEEK_LLM: [&str; 6] = [
    "[\r\n]",
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    "[一-龥ࠀ-一가-퟿]+",
    DIGIT,
];
const DEEPSEEK_V3: [&str; 3] = [
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];

/// The pre-tokenizer of this name.
pub(crate) fn pre(name: &str) -> Option<Pre> {
    let patterns: &[&str] = match name {
        "default" | "gpt-2" | "gpt2" | "phi-2" | "olmo" | "jais" | "mpt" | "trillion"
        | "granite-docling" | "gigachat" | "a.x-4.0" | "mellum" | "modern-bert" | "exaone4" => {
            &[GPT2]
        }
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" | "minerva-7b"
        | "mellum2" => &[DIGIT, GPT2],
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0"
        | "lfm2" | "dbrx" | "smaug-bpe" | "chatglm-bpe" | "glm4" | "glm5" => &[LLAMA3],
        "qwen2" | "deepseek-r1-qwen" | "kormo" | "f2llmv2" | "megrez" | "stablelm2" | "hunyuan"
        | "solar-open" | "grok-2" => &[QWEN2],
        "qwen35" => &[QWEN35],
        "seed-coder" => &[SEED],
        "bailingmoe" | "bailingmoe2" | "llada-moe" => &[BAILING],
        "tekken" => &[TEKKEN],
        "gpt-4o" | "llama4" | "kanana2" | "talkie" | "minimax-m2" => &[GPT_4O],
        "bloom" | "poro-chat" | "gpt3-finnish" => &[BLOOM],
        "viking" => &[BLOOM, DIGIT],
        "falcon" => &FALCON,
        "deepseek-llm" => &DEEPSEEK_LLM,
        "deepseek-coder" => &DEEPSEEK_CODER,
        "deepseek-v3" | "hunyuan-dense" | "joyai-llm" | "hy_v4" => &DEEPSEEK_V3,
        _ => return None,
    };
    let takes_words_whole =
        patterns == [LLAMA3] && !matches!(name, "dbrx" | "smaug-bpe" | "chatglm-bpe");
    let is_glm = matches!(name, "glm4" | "glm5");
    Some(Pre {
        pre_tokenizer: isolating(patterns),
        // Qwen 2's tokenizer composes characters.
        normalizer: if name == "qwen2" { json!({"type": "NFC"}) } else { Value::Null },
        ignore_merges: takes_words_whole || name == "tekken",
        add_bos: takes_words_whole && !is_glm || name == "tekken",
    })
}

/// Cuts out what each pattern matches, one after the other, and spells the parts in bytes.
fn isolating(patterns: &[&str]) -> Value {
    let split = |pattern: &&str| {
        json!({
            "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false,
        })
    };
    let bytes = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
    });
    let parts: Vec<Value> = patterns.iter().map(split).chain([bytes]).collect();
    json!({"type": "Sequence", "pretokenizers": parts})
}

#[cfg(test)]
mod tests {
    use std::str::FromStr;

    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    use super::*;

    fn words(name: &str, text: &str) -> Vec<String> {
        let json = json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null,
            "decoder": null, "pre_tokenizer": pre(name).unwrap().pre_tokenizer,
            "model": {"type": "BPE", "vocab": {}, "merges": []},
        });
        let tokenizer = tokenizers::Tokenizer::from_str(&json.to_string()).unwrap();
        let mut words = PreTokenizedString::from(text);
        tokenizer.get_pre_tokenizer().unwrap().pre_tokenize(&mut words).unwrap();
        let splits = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.iter().map(|(_, (start, end), _)| text[*start..*end].to_owned()).collect()
    }

    #[test]
    fn digits_are_cut_as_the_models_learned_them() {
        let text = "ab 12345";
        assert_eq!(words("gpt-2", text), ["ab", " 12345"]);
        assert_eq!(words("smollm", text), ["ab", " ", "1", "2", "3", "4", "5"]);
        assert_eq!(words("llama-bpe", text), ["ab", " ", "123", "45"]);
        assert_eq!(words("qwen2", text), ["ab", " ", "1", "2", "3", "4", "5"]);
        assert_eq!(words("deepseek-v3", text), ["ab", " ", "123", "45"]);
        assert_eq!(words("falcon", text), ["ab", " ", "123", "45"].map(String::from).as_slice());
    }

    #[test]
    fn capitals_begin_words_where_the_models_learned_so() {
        assert_eq!(words("tekken", "helloWorld IT'S"), ["hello", "World", " IT", "'S"]);
        assert_eq!(words("gpt-4o", "helloWorld IT'S"), ["hello", "World", " IT'S"]);
        assert_eq!(words("llama-bpe", "helloWorld IT'S"), ["helloWorld", " IT", "'S"]);
    }

    #[test]
    fn every_pattern_is_a_regular_expression_and_loses_nothing() {
        let text = "It's 1234\r\n\t  naïve 東京タワー, ΑΒΓ — x²  ";
        for name in [
            "gpt-2",
            "smollm",
            "llama-bpe",
            "qwen2",
            "qwen35",
            "seed-coder",
            "bailingmoe",
            "tekken",
            "gpt-4o",
            "bloom",
            "viking",
            "falcon",
            "deepseek-llm",
            "deepseek-coder",
            "deepseek-v3",
        ] {
            assert_eq!(words(name, text).concat(), text, "{name}");
        }
        assert!(pre("no-such-model").is_none());
    }
}
