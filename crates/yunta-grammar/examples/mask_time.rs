//! How long masks take: `cargo run --release -p yunta-grammar --example mask_time MODEL`, where the
//! model is a GGUF file or a folder with a tokenizer.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // For developers.

use std::time::{Duration, Instant};

use yunta_checkpoint::Checkpoint;
use yunta_grammar::{Grammar, GrammarCompiler};

const PERSON: &str = r##"{"type": "object", "required": ["name", "age", "friends"],
    "additionalProperties": false, "properties": {
    "name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
    "state": {"enum": ["awake", "asleep"]}, "mail": {"type": "string", "format": "email"},
    "friends": {"type": "array", "items": {"$ref": "#"}}}}"##;

/// What a model would write under both grammars.
const TEXT: &str = r#"{"name": "Ana María de la Cruz", "age": 41, "state": "awake",
    "mail": "ana@example.com", "friends": [{"name": "Bo \"B\" Li", "age": 7, "friends": []},
    {"name": "A rather long name that goes on and on and on", "age": 99, "friends": []}]}"#;

fn main() {
    let path = std::env::args().nth(1).unwrap();
    let tokenizer = Checkpoint::open(path.as_ref()).unwrap().tokenizer().unwrap();
    let began = Instant::now();
    let stop = [tokenizer.eos().unwrap()];
    let compiler = GrammarCompiler::new(&tokenizer, tokenizer.vocab_size(), &stop).unwrap();
    println!("{} tokens; compiler built in {:.1?}", tokenizer.vocab_size(), began.elapsed());
    for (name, grammar) in
        [("any object", Grammar::JsonObject), ("schema", Grammar::JsonSchema(PERSON.to_owned()))]
    {
        let began = Instant::now();
        drop(compiler.start(&grammar).unwrap());
        let cold = began.elapsed();
        let (mut starts, mut masks, mut accepts) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..50 {
            let mut constraint = timed(&mut starts, || compiler.start(&grammar).unwrap());
            for token in tokenizer.encode(TEXT, false).unwrap() {
                timed(&mut masks, || constraint.mask().unwrap().len());
                timed(&mut accepts, || constraint.accept(token).unwrap());
            }
        }
        println!("{name}: compiled in {cold:.1?}");
        for (what, times) in [("start", starts), ("mask", masks), ("accept", accepts)] {
            let mut times: Vec<Duration> = times;
            times.sort();
            let at = |percent: usize| times[(times.len() - 1) * percent / 100];
            println!("  {what}: median {:.1?}, p99 {:.1?}, max {:.1?}", at(50), at(99), at(100));
        }
    }
}

fn timed<T>(times: &mut Vec<Duration>, call: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let result = call();
    times.push(began.elapsed());
    result
}
