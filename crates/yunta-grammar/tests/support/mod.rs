//! Vocabularies and random walks.
#![allow(dead_code)] // Each test file uses a part.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use yunta_checkpoint::{Checkpoint, Tokenizer};
use yunta_grammar::{Constraint, Grammar, GrammarCompiler};

/// A tokenizer and its compiler, with two stop tokens and logits wider than the vocabulary.
pub(crate) struct Model {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) compiler: GrammarCompiler,
    pub(crate) vocab: usize,
    pub(crate) stop: [u32; 2],
}

impl Model {
    fn new(path: &Path) -> Self {
        let tokenizer = Checkpoint::open(path).unwrap().tokenizer().unwrap();
        let vocab = tokenizer.vocab_size() + 37;
        let eos = tokenizer.eos().unwrap();
        // The second is no special token: some models stop at one of those too.
        let stop = [eos, tokenizer.token_to_id("x").unwrap()];
        let compiler = GrammarCompiler::new(&tokenizer, vocab, &stop).unwrap();
        Self { tokenizer, compiler, vocab, stop }
    }

    pub(crate) fn start(&self, grammar: &Grammar) -> Constraint {
        self.compiler.start(grammar).unwrap()
    }

    pub(crate) fn text(&self, tokens: &[u32]) -> String {
        let bytes = tokens.iter().flat_map(|t| self.tokenizer.token_bytes(*t).unwrap());
        String::from_utf8(bytes.collect()).unwrap()
    }

    /// The tokens of a random output without the stop token; `None` if it does not end.
    pub(crate) fn walk(&self, constraint: &mut Constraint, seed: u64) -> Option<Vec<u32>> {
        let mut random = Random(seed);
        let mut tokens = Vec::new();
        for step in 0..500 {
            let allowed = allowed(constraint.mask().unwrap());
            let token = self.choose(&allowed, step > 25, &mut random);
            constraint.accept(token).unwrap();
            if self.stop.contains(&token) {
                return Some(tokens);
            }
            tokens.push(token);
        }
        None
    }

    /// Any of these tokens, or one that brings a long output nearer to its end.
    pub(crate) fn choose(&self, allowed: &[u32], is_long: bool, random: &mut Random) -> u32 {
        if !is_long {
            return allowed[random.below(allowed.len())];
        }
        let stop = self.stop.iter().copied().find(|s| allowed.contains(s));
        let closing = ["\"", "}", "]", ")"].map(|t| self.tokenizer.token_to_id(t));
        let closing = closing.into_iter().flatten().find(|t| allowed.contains(t));
        stop.or(closing).unwrap_or_else(|| {
            let is_space = |t: &u32| {
                self.tokenizer.token_bytes(*t).unwrap().iter().all(u8::is_ascii_whitespace)
            };
            let others: Vec<u32> = allowed.iter().copied().filter(|t| !is_space(t)).collect();
            // A space may be the next character of a constant.
            let choice = if others.is_empty() { allowed } else { &others };
            choice[random.below(choice.len())]
        })
    }
}

/// The fixtures' tokenizer, of a few hundred tokens.
pub(crate) static SMALL: LazyLock<Model> = LazyLock::new(|| {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/llama_plain");
    Model::new(&root)
});

/// SmolLM2's tokenizer, of 49152 tokens.
pub(crate) static SMOLLM2: LazyLock<Model> = LazyLock::new(|| {
    const CACHED: &str =
        ".cache/yunta/models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf";
    let path = std::env::var_os("YUNTA_SMOLLM2")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(CACHED)))
        .unwrap_or_default();
    assert!(
        path.is_file(),
        "`{}` is not there: run `cargo xtask test`, which fetches it, or set YUNTA_SMOLLM2",
        path.display()
    );
    Model::new(&path)
});

pub(crate) fn schema(schema: &serde_json::Value) -> Grammar {
    Grammar::JsonSchema(schema.to_string())
}

/// The tokens whose bits are set.
pub(crate) fn allowed(mask: &[u32]) -> Vec<u32> {
    let width = u32::try_from(mask.len() * 32).unwrap();
    (0..width).filter(|t| mask[*t as usize / 32] >> (t % 32) & 1 == 1).collect()
}

/// SplitMix64.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((z ^ (z >> 31)) % u64::try_from(bound).unwrap()).unwrap()
    }
}
