//! Every reference of the llama family, cut every way: logits within the tolerance of the
//! reference, continuations equal. The references are of public implementations.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::{Path, PathBuf};

use yunta_checkpoint::Checkpoint;
use yunta_engine::{LocalConfig, LocalModel, Reference};
use yunta_model::{KvType, Plan, Step};
use yunta_tensor::Precision;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

/// Checkpoints and the stem of their references.
fn references() -> Vec<(PathBuf, PathBuf)> {
    let list = |folder: &str| {
        let mut paths: Vec<PathBuf> = std::fs::read_dir(fixtures().join(folder))
            .unwrap()
            .map(|e| e.unwrap().path())
            .collect();
        paths.sort();
        paths
    };
    let folders = list("models").into_iter().map(|p| (p.clone(), p.join("reference")));
    let files = list("gguf").into_iter().filter(|p| p.extension().is_some_and(|e| e == "gguf"));
    let files = files.map(|p| {
        let stem = format!("{}.reference", p.file_stem().unwrap().to_str().unwrap());
        (p.clone(), p.with_file_name(stem))
    });
    folders.chain(files).collect()
}

fn with_extension(stem: &Path, extension: &str) -> PathBuf {
    PathBuf::from(format!("{}.{extension}", stem.display()))
}

/// Tensor and pipeline shares; uneven ones too.
fn cuts() -> Vec<(Vec<f64>, Vec<f64>)> {
    let even = |n: usize| vec![1.0; n];
    let mut cuts: Vec<_> = (1..=8).map(|n| (even(n), even(1))).collect();
    cuts.extend([
        (even(1), even(2)),
        (even(1), even(3)),
        (even(2), even(2)),
        (even(3), even(2)),
        (vec![3.0, 1.0], even(1)),
        (vec![1.0, 5.0, 2.0], even(1)),
        (even(1), vec![2.0, 1.0]),
        (vec![1.0, 2.0], vec![1.0, 2.0]),
    ]);
    cuts
}

fn load(checkpoint: &Checkpoint, plan: &Plan, context: usize, precision: Precision) -> LocalModel {
    let kv = match precision {
        Precision::Fast => KvType::F16,
        Precision::Float32 => KvType::F32,
    };
    let plan = plan.clone();
    let config = LocalConfig { plan, slots: 4, context, threads: 1, precision, kv };
    LocalModel::load(checkpoint, &config).unwrap()
}

#[test]
fn every_reference_is_met_however_the_model_is_cut() {
    let references = references();
    assert_eq!(references.len(), 30, "references of the llama family");
    let mut cells = 0;
    for (path, stem) in references {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let dims = yunta_model::dims(&checkpoint).unwrap();
        let reference = Reference::read(&with_extension(&stem, "json")).unwrap();
        let context = reference.longest() + 1;
        for (tensor, pipeline) in cuts() {
            if pipeline.len() > dims.layers {
                continue;
            }
            let plan = Plan::weighted(&dims, &tensor, &pipeline).unwrap();
            let mut model = load(&checkpoint, &plan, context, Precision::Float32);
            let tensors = with_extension(&stem, "safetensors");
            let verdict = reference.compare(&mut model, &tensors).unwrap();
            assert!(verdict.ok, "{tensor:?} x {pipeline:?}: {verdict:?}");
            cells += 1;
        }
    }
    assert!(cells > 400, "{cells} cells");
}

/// The fast path too: not a bit differs between the cuts, in whatever company a token is computed.
#[test]
fn logits_have_the_same_bits_however_the_model_is_cut_and_batched() {
    for (path, stem) in references() {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let dims = yunta_model::dims(&checkpoint).unwrap();
        let prompt: Vec<u32> = (0..75).map(|i| (i * 37 + 11) % dims.vocab as u32).collect();
        let mut whole: Option<Vec<f32>> = None;
        for (tensor, pipeline) in cuts() {
            if pipeline.len() > dims.layers {
                continue;
            }
            let plan = Plan::weighted(&dims, &tensor, &pipeline).unwrap();
            let mut model = load(&checkpoint, &plan, 128, Precision::Fast);
            let together = model.logits(&prompt, 8).unwrap();
            let whole = whole.get_or_insert_with(|| together.clone());
            assert!(*whole == together, "{}: {tensor:?} x {pipeline:?}", stem.display());
            assert!(*whole == in_company(&mut model, &prompt), "{}: in company", stem.display());
        }
    }
}

/// The same logits, with the prompt in chunks beside other sequences.
fn in_company(model: &mut LocalModel, prompt: &[u32]) -> Vec<f32> {
    let mut logits = Vec::new();
    let mut at = 0;
    for (i, n) in [1, 16, 7, 43, 5, 3].into_iter().enumerate() {
        let mut step = Step::default();
        step.push(0, i, &prompt[3..4], 0);
        step.push(2, at, &prompt[at..at + n], if i >= 4 { n } else { 0 });
        step.push(3, i * 2, &prompt[i..i + 2], 0);
        logits.extend(model.run(step).unwrap());
        at += n;
    }
    assert_eq!(at, prompt.len());
    logits
}
