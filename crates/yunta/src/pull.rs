//! `yunta pull`: fetch a model.

use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use yunta_hub::Hub;

use crate::start;

/// Arguments of `yunta pull`.
#[derive(Args)]
pub(crate) struct PullArgs {
    /// A short name from the catalogue, or a Hugging Face repository (org/name, org/name:file.gguf)
    #[arg(required_unless_present = "list")]
    model: Option<String>,
    /// Show the catalogue and the models that are here
    #[arg(long)]
    list: bool,
}

pub(crate) fn run(args: PullArgs) -> Result<ExitCode> {
    if args.list {
        list();
    }
    if let Some(model) = &args.model {
        println!("{}", start::find_model(model)?.display());
    }
    Ok(ExitCode::SUCCESS)
}

fn list() {
    let hub = Hub::from_env();
    for (name, path) in hub.list_local() {
        println!("{name}\t{}", path.display());
    }
    for entry in yunta_hub::catalogue() {
        println!("{}\t(in the catalogue)", entry.name);
    }
}
