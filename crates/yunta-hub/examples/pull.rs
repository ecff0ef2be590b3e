//! Fetches models by name and prints where they are: `cargo run -p yunta-hub --example pull --
//! smollm2`.

use std::process::ExitCode;

use yunta_hub::{Hub, TerminalProgress};

fn main() -> ExitCode {
    let mut hub = Hub::from_env();
    let mut models: Vec<String> = std::env::args().skip(1).collect();
    hub.verify = models.iter().any(|m| m == "--verify");
    models.retain(|m| m != "--verify");
    let progress = TerminalProgress::new();
    for model in models {
        match hub.pull(&model, &progress) {
            Ok(path) => println!("{}", path.display()),
            Err(e) => {
                eprintln!("{e}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}
