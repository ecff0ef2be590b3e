//! `cargo xtask opencode`: a turn of a real coding agent.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::{binary, model, root};

const VERSION: &str = "1.18.33";

/// A served model, killed when dropped.
struct Served(Child);

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Serves the test model over three ranks, and runs one turn of OpenCode against it.
pub(crate) fn run() -> Result<()> {
    let yunta = binary()?;
    let model = model(&yunta)?;
    let scratch = root()?.join("target/opencode");
    std::fs::create_dir_all(&scratch)?;
    let package = format!("opencode-ai@{VERSION}");
    let npm = ["install", "--no-fund", "--no-audit", "--prefix"];
    crate::run(Command::new("npm").args(npm).arg(&scratch).arg(package))?;
    let mut serve = Command::new(&yunta);
    serve.args(["serve", &model, "--local-ranks", "3", "--port", "0", "--served-name", "smollm2"]);
    let mut served = Served(serve.stderr(Stdio::piped()).spawn()?);
    let stderr = served.0.stderr.take().context("no standard error")?;
    let url = url(BufReader::new(stderr))?;
    std::fs::write(scratch.join("opencode.json"), config(&url))?;
    let start = Instant::now();
    let turn = Command::new(scratch.join("node_modules/.bin/opencode"))
        .args(["run", "-m", "local/smollm2", "Say hello"])
        .current_dir(&scratch)
        // OpenCode believes PWD rather than the system.
        .env("PWD", &scratch)
        .env("HOME", &scratch)
        .env("OPENCODE_DISABLE_MODELS_FETCH", "1")
        .stdin(Stdio::null())
        .status()
        .context("opencode could not be started")?;
    if !turn.success() {
        bail!("opencode: {turn}");
    }
    println!("the turn took {:.1} s", start.elapsed().as_secs_f64());
    Ok(())
}

/// The address that the server announces; its further output is passed on.
fn url(mut stderr: impl BufRead + Send + 'static) -> Result<String> {
    let mut line = String::new();
    while stderr.read_line(&mut line)? > 0 {
        if let Some(at) = line.find("http://") {
            let url = line[at..].split_whitespace().next().unwrap_or_default().to_owned();
            std::thread::spawn(move || {
                for line in stderr.lines().map_while(Result::ok) {
                    eprintln!("{line}");
                }
            });
            return Ok(url);
        }
        eprint!("{line}");
        line.clear();
    }
    bail!("the server ended before it was ready")
}

fn config(url: &str) -> String {
    format!(
        r#"{{
  "$schema": "https://opencode.ai/config.json",
  "autoupdate": false,
  "share": "disabled",
  "provider": {{
    "local": {{
      "npm": "@ai-sdk/openai-compatible",
      "name": "local",
      "options": {{ "baseURL": "{url}", "apiKey": "x" }},
      "models": {{ "smollm2": {{ "name": "smollm2", "limit": {{ "context": 8192, "output": 256 }} }} }}
    }}
  }},
  "model": "local/smollm2",
  "small_model": "local/smollm2"
}}
"#
    )
}
