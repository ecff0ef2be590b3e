//! Tokenizers from GGUF metadata. Source: `llama-vocab.cpp` of llama.cpp for what the metadata
//! mean, `convert_slow_tokenizer.py` of transformers for how the library is told.

use std::collections::HashMap;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use tokenizers::AddedToken;
use tokenizers::models::bpe::{BPE, BpeBuilder, Merges, Vocab};

use crate::CheckpointError;
use crate::gguf::{Metadata, MetadataValue};
use crate::text::Tokenizer;
use crate::text::pre::pre;

/// `tokenizer.ggml.token_type` of the token for what no other token covers: special.
const UNKNOWN: u64 = 2;
/// Special tokens.
const CONTROL: u64 = 3;
/// Tokens that are matched before any other, but are text.
const USER_DEFINED: u64 = 4;

/// The tokenizer that a GGUF file describes.
pub(crate) fn from_gguf(file: &Path, metadata: &Metadata) -> Result<Tokenizer, CheckpointError> {
    let source = Source { file, metadata, tokens: texts(file, metadata, "tokens")? };
    let parts = match source.get("model").and_then(MetadataValue::text) {
        Some("gpt2") => byte_level(&source)?,
        Some("llama") => sentencepiece(&source)?,
        Some(other) => return Err(source.bad(format!("model `{other}` is not supported"))),
        None => return Err(source.bad("metadata `tokenizer.ggml.model` is missing")),
    };
    let tokenizer = parts.build(&source).map_err(|e| source.bad(e.to_string()))?;
    let owned = |key: &str| source.token(key).map(str::to_owned);
    Tokenizer::new(file, tokenizer, owned("bos_token_id"), owned("eos_token_id"))
}

/// A list of strings in the metadata.
fn texts<'a>(
    file: &Path,
    metadata: &'a Metadata,
    key: &str,
) -> Result<Vec<&'a str>, CheckpointError> {
    let key = format!("tokenizer.ggml.{key}");
    let list = metadata.get(&key).and_then(MetadataValue::array);
    let texts = list.and_then(|list| list.iter().map(MetadataValue::text).collect());
    texts.ok_or_else(|| CheckpointError::Tokenizer {
        file: file.to_owned(),
        reason: format!("metadata `{key}` is missing, or no list of texts"),
    })
}

/// What the library builds a tokenizer from. All but the model are as in tokenizer.json: vocabulary
/// and merges are too many to go that way.
struct Parts {
    model: BpeBuilder,
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
}

impl Parts {
    fn build(self, source: &Source<'_>) -> tokenizers::Result<tokenizers::Tokenizer> {
        fn part<T: DeserializeOwned>(json: Value) -> serde_json::Result<Option<T>> {
            serde_json::from_value(json)
        }
        let mut tokenizer = tokenizers::Tokenizer::new(self.model.build()?);
        tokenizer.with_normalizer(part::<tokenizers::NormalizerWrapper>(self.normalizer)?)?;
        tokenizer
            .with_pre_tokenizer(part::<tokenizers::PreTokenizerWrapper>(self.pre_tokenizer)?)
            .with_post_processor(part::<tokenizers::PostProcessorWrapper>(self.post_processor)?)
            .with_decoder(part::<tokenizers::DecoderWrapper>(self.decoder)?);
        tokenizer.add_tokens(source.added())?;
        Ok(tokenizer)
    }
}

struct Source<'a> {
    file: &'a Path,
    metadata: &'a Metadata,
    tokens: Vec<&'a str>,
}

impl<'a> Source<'a> {
    fn bad(&self, reason: impl Into<String>) -> CheckpointError {
        CheckpointError::Tokenizer { file: self.file.to_owned(), reason: reason.into() }
    }

    fn get(&self, key: &str) -> Option<&'a MetadataValue> {
        self.metadata.get(&format!("tokenizer.ggml.{key}"))
    }

    fn flag(&self, key: &str, default: bool) -> bool {
        self.get(key).and_then(MetadataValue::bool).unwrap_or(default)
    }

    fn token(&self, key: &str) -> Option<&'a str> {
        let id = usize::try_from(self.get(key)?.unsigned()?).ok()?;
        self.tokens.get(id).copied()
    }

    /// Of tokens with the same text the first counts.
    fn vocab(&self) -> Vocab {
        let mut vocab = Vocab::default();
        for (token, id) in self.tokens.iter().zip(0..) {
            vocab.entry((*token).to_owned()).or_insert(id);
        }
        vocab
    }

    /// Tokens that are not built from text.
    fn added(&self) -> Vec<AddedToken> {
        let types = self.get("token_type").and_then(MetadataValue::array).unwrap_or_default();
        let typed = self.tokens.iter().zip(types.iter().map(|kind| kind.unsigned().unwrap_or(0)));
        typed
            .filter(|(token, kind)| {
                matches!(*kind, UNKNOWN | CONTROL | USER_DEFINED) && !token.is_empty()
            })
            .map(|(token, kind)| AddedToken::from(*token, kind != USER_DEFINED).normalized(false))
            .collect()
    }

    /// Puts BOS before and EOS behind prompts, where the file says so.
    fn post_processor(&self, bos_default: bool) -> Value {
        let bos = self.token("bos_token_id").filter(|_| self.flag("add_bos_token", bos_default));
        let eos = self.token("eos_token_id").filter(|_| self.flag("add_eos_token", false));
        if bos.is_none() && eos.is_none() {
            return Value::Null;
        }
        let special = |t: &str| json!({"SpecialToken": {"id": t, "type_id": 0}});
        let sequence = |id: &str| json!({"Sequence": {"id": id, "type_id": 0}});
        let single = bos.map(special).into_iter().chain([sequence("A")]).chain(eos.map(special));
        let single: Vec<Value> = single.collect();
        let pair: Vec<Value> = single.iter().cloned().chain([sequence("B")]).collect();
        let tokens: Map<String, Value> = [("bos_token_id", bos), ("eos_token_id", eos)]
            .into_iter()
            .filter_map(|(key, token)| {
                let (token, id) = (token?, self.get(key)?.unsigned()?);
                Some((token.to_owned(), json!({"id": token, "ids": [id], "tokens": [token]})))
            })
            .collect();
        json!({
            "type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens,
        })
    }
}

fn byte_level(source: &Source<'_>) -> Result<Parts, CheckpointError> {
    let name = source.get("pre").and_then(MetadataValue::text).unwrap_or("default");
    let pre = pre(name).ok_or_else(|| {
        source
            .bad(format!("pre-tokenizer `{name}` is not known: put tokenizer.json beside the file"))
    })?;
    // A merge may be of tokens that begin with a space: it is not the separator.
    let pair = |merge: &&str| {
        let (at, _) = merge.char_indices().skip(1).find(|(_, c)| *c == ' ')?;
        let (left, right) = merge.split_at(at);
        Some((left.to_owned(), right.strip_prefix(' ')?.to_owned()))
    };
    let merges: Option<Merges> =
        texts(source.file, source.metadata, "merges")?.iter().map(pair).collect();
    let merges = merges.ok_or_else(|| source.bad("a merge is no pair of tokens"))?;
    let model = BPE::builder().vocab_and_merges(source.vocab(), merges);
    Ok(Parts {
        model: model.ignore_merges(pre.ignore_merges),
        normalizer: pre.normalizer,
        pre_tokenizer: pre.pre_tokenizer,
        post_processor: source.post_processor(pre.add_bos),
        decoder: json!({
            "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true,
        }),
    })
}

/// SentencePiece BPE: merges are ranked by the score of what they make.
fn sentencepiece(source: &Source<'_>) -> Result<Parts, CheckpointError> {
    let scores = source.get("scores").and_then(MetadataValue::array).unwrap_or_default();
    if scores.len() != source.tokens.len() {
        let (scores, tokens) = (scores.len(), source.tokens.len());
        return Err(source.bad(format!("{scores} scores for {tokens} tokens")));
    }
    let replace = |from: &str, to: &str| json!({"type": "Replace", "pattern": {"String": from}, "content": to});
    let mut normalizers = vec![replace(" ", "▁")];
    let mut decoders =
        vec![replace("▁", " "), json!({"type": "ByteFallback"}), json!({"type": "Fuse"})];
    if source.flag("add_space_prefix", true) {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": "▁"}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    let merges = merges_by_score(&source.tokens, scores);
    let mut model =
        BPE::builder().vocab_and_merges(source.vocab(), merges).fuse_unk(true).byte_fallback(true);
    if let Some(unknown) = source.token("unknown_token_id") {
        model = model.unk_token(unknown.to_owned());
    }
    Ok(Parts {
        model,
        normalizer: json!({"type": "Sequence", "normalizers": normalizers}),
        pre_tokenizer: Value::Null,
        post_processor: source.post_processor(true),
        decoder: json!({"type": "Sequence", "decoders": decoders}),
    })
}

/// All ways to build a token from two others, best score first (as `transformers` converts
/// SentencePiece models).
fn merges_by_score(tokens: &[&str], scores: &[MetadataValue]) -> Merges {
    let ids: HashMap<&str, usize> = tokens.iter().enumerate().map(|(i, t)| (*t, i)).collect();
    let mut merges: Vec<(f64, (&str, &str))> = Vec::new();
    for (token, score) in tokens.iter().zip(scores) {
        let score = score.float().unwrap_or(0.0);
        let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let mut pairs: Vec<(usize, usize, (&str, &str))> =
            cuts.filter_map(|(l, r)| Some((*ids.get(l)?, *ids.get(r)?, (l, r)))).collect();
        pairs.sort_unstable();
        merges.extend(pairs.into_iter().map(|(_, _, pair)| (score, pair)));
    }
    // Stable: of equal scores, the earlier token comes first.
    merges.sort_by(|a, b| b.0.total_cmp(&a.0));
    merges.into_iter().map(|(_, (l, r))| (l.to_owned(), r.to_owned())).collect()
}
