//! Developer commands: `cargo xtask test` sets up and runs all tests, `cargo xtask opencode` runs
//! a turn of a real coding agent against a served model.

mod opencode;
mod test;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

const USAGE: &str = "usage: cargo xtask COMMAND

  test [ARGS]   set up (Python clients in .venv, the test model in the cache, cargo-nextest) and
                run all tests; ARGS go to cargo nextest run
  opencode      run a turn of OpenCode against `yunta serve` over 3 ranks (needs npm)";

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let command = args.next();
    let rest: Vec<String> = args.collect();
    let outcome = match command.as_deref() {
        Some("test") => test::run(&rest),
        Some("opencode") => opencode::run(),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("xtask: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// The workspace's folder.
fn root() -> Result<PathBuf> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    Ok(here.parent().context("xtask lies in the workspace")?.to_owned())
}

/// Says and runs a command in the workspace; its failure is an error.
fn run(command: &mut Command) -> Result<()> {
    let shown = format!("{command:?}").replace('"', "");
    eprintln!("$ {shown}");
    let status = command
        .current_dir(root()?)
        .status()
        .with_context(|| format!("{shown}: could not be started"))?;
    if !status.success() {
        bail!("{shown}: {status}");
    }
    Ok(())
}

/// The output of a command, if it succeeds.
fn output(command: &mut Command) -> Option<String> {
    let out = command.output().ok().filter(|o| o.status.success())?;
    Some(String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

/// The release binary, built.
fn binary() -> Result<PathBuf> {
    run(Command::new("cargo").args(["build", "--release", "--locked", "--package", "yunta"]))?;
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or(root()?.join("target"), PathBuf::from);
    Ok(target.join("release/yunta"))
}

/// The path of the test model, fetched if it is not here.
fn model(yunta: &Path) -> Result<String> {
    eprintln!("$ yunta pull smollm2");
    let out = Command::new(yunta)
        .args(["pull", "smollm2"])
        .stderr(std::process::Stdio::inherit())
        .output()
        .context("yunta pull could not be started")?;
    if !out.status.success() {
        bail!("the test model could not be fetched");
    }
    Ok(String::from_utf8(out.stdout)?.trim().to_owned())
}
