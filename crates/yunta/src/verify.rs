//! `yunta verify`: compare with reference logits and continuations.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::json;
use yunta_checkpoint::Checkpoint;
use yunta_engine::{LocalConfig, LocalModel, Reference, Verdict};
use yunta_model::KvType;
use yunta_tensor::Precision;

use crate::args::CutArgs;

/// Arguments of `yunta verify`.
#[derive(Args)]
pub(crate) struct VerifyArgs {
    /// Folders with a checkpoint, reference.json and reference.safetensors; or GGUF files with
    /// NAME.reference.json and NAME.reference.safetensors beside them
    #[arg(required = true)]
    references: Vec<PathBuf>,
    #[command(flatten)]
    cut: CutArgs,
    /// Compute threads per rank
    #[arg(long, short = 't', default_value_t = 1)]
    threads: usize,
    /// Print one JSON object per line
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: VerifyArgs) -> Result<ExitCode> {
    let mut all_ok = true;
    for path in references(&args.references)? {
        let (json, verdict) = match verify(&path, &args) {
            Ok(verdict) => (serde_json::to_value(&verdict)?, Some(verdict)),
            Err(e) => {
                let name = path.display().to_string();
                (json!({"name": name, "ok": false, "error": format!("{e:#}")}), None)
            }
        };
        let ok = verdict.as_ref().is_some_and(|v| v.ok);
        all_ok &= ok;
        match (args.json, verdict) {
            (true, _) => println!("{json}"),
            (false, None) => println!("FAIL  {}: {}", path.display(), json["error"]),
            (false, Some(v)) => println!("{}", line(&v)),
        }
    }
    Ok(if all_ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn line(v: &Verdict) -> String {
    let divergence = match v.first_divergence {
        None => "continuations equal".to_owned(),
        Some((prompt, position)) => format!("prompt {prompt} diverges at token {position}"),
    };
    format!(
        "{}  {}: max error {:.2e} of {:.2e}, {divergence}",
        if v.ok { "ok  " } else { "FAIL" },
        v.name,
        v.max_abs_error,
        v.tolerance
    )
}

/// The given paths; a folder without a reference of its own stands for all references in it.
fn references(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for path in paths {
        if path.is_file() || path.join("reference.json").is_file() {
            all.push(path.clone());
            continue;
        }
        let entries =
            std::fs::read_dir(path).with_context(|| format!("can't read {}", path.display()))?;
        let mut inside: Vec<PathBuf> = entries
            .filter_map(|e| Some(e.ok()?.path()))
            .filter(|p| p.join("reference.json").is_file() || gguf_reference(p).is_some())
            .collect();
        if inside.is_empty() {
            bail!("{} holds no reference", path.display());
        }
        inside.sort();
        all.extend(inside);
    }
    Ok(all)
}

/// The reference beside a GGUF file, without its last extension.
fn gguf_reference(path: &Path) -> Option<PathBuf> {
    let stem = path.extension().filter(|e| *e == "gguf").map(|_| path.with_extension(""))?;
    let mut name = stem.into_os_string();
    name.push(".reference");
    let base = PathBuf::from(name);
    let mut json = base.clone().into_os_string();
    json.push(".json");
    PathBuf::from(json).is_file().then_some(base)
}

fn verify(path: &Path, args: &VerifyArgs) -> Result<Verdict> {
    let base = if path.is_file() {
        gguf_reference(path).context("no NAME.reference.json stands beside it")?
    } else {
        path.join("reference")
    };
    let with = |extension: &str| {
        let mut name = base.clone().into_os_string();
        name.push(extension);
        PathBuf::from(name)
    };
    let reference = Reference::read(&with(".json"))?;
    let checkpoint = Checkpoint::open(path)?;
    let config = LocalConfig {
        plan: args.cut.plan(&yunta_model::dims(&checkpoint)?)?,
        slots: 1,
        context: reference.longest() + 1,
        threads: args.threads.max(1),
        precision: Precision::Float32,
        kv: KvType::F32,
    };
    let mut model = LocalModel::load(&checkpoint, &config)?;
    Ok(reference.compare(&mut model, &with(".safetensors"))?)
}
