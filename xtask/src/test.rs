//! `cargo xtask test`.

use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use crate::{binary, model, output, root};

/// The version that is installed where none is.
const NEXTEST: &str = "0.9.143";

/// Sets up what the tests need, and runs them all.
pub(crate) fn run(args: &[String]) -> Result<()> {
    let python = python()?;
    let yunta = binary()?;
    let model = model(&yunta)?;
    nextest()?;
    let cargo = |args: &[&str]| {
        let mut command = Command::new("cargo");
        command.args(args).env("YUNTA_PYTHON", &python).env("YUNTA_SMOLLM2", &model);
        command
    };
    let common = ["--workspace", "--release", "--locked"];
    crate::run(cargo(&["nextest", "run"]).args(common).args(args))?;
    crate::run(cargo(&["test", "--doc", "--quiet"]).args(common))
}

/// Python with the clients that the tests use, in a virtual environment of the workspace.
fn python() -> Result<PathBuf> {
    let venv = root()?.join(".venv");
    let python = venv.join("bin/python");
    if !python.exists() {
        crate::run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    }
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
    crate::run(Command::new(&python).args(pip).args(["-r", "tests/requirements.txt"]))?;
    Ok(python)
}

fn nextest() -> Result<()> {
    if output(Command::new("cargo").args(["nextest", "--version"])).is_some() {
        return Ok(());
    }
    crate::run(Command::new("cargo").args([
        "install",
        "--locked",
        "cargo-nextest",
        "--version",
        NEXTEST,
    ]))
}
