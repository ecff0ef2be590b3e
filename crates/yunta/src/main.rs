//! The `yunta` command.

mod args;
mod bench;
mod chat;
mod comm_bench;
mod generate;
mod interrupt;
mod perplexity;
mod pull;
mod serve;
mod session;
mod start;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Run one large language model over several processes, cut layer by layer or block by block,
/// and bring it back when one of them dies.
#[derive(Parser)]
#[command(name = "yunta", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Talk to a model in the terminal
    Chat(chat::ChatArgs),
    /// Complete a prompt (for scripts: --json)
    Generate(generate::GenerateArgs),
    /// Serve a model over an OpenAI-compatible API
    Serve(serve::ServeArgs),
    /// Measure prompt and generation speed
    Bench(bench::BenchArgs),
    /// Measure the perplexity of a text, in llama-perplexity's manner
    Perplexity(perplexity::PerplexityArgs),
    /// Compare a model with reference logits and continuations
    Verify(verify::VerifyArgs),
    /// Fetch a model, or list what is here
    Pull(pull::PullArgs),
    /// Measure collectives and links between ranks, and name the bad cable
    CommBench(comm_bench::CommBenchArgs),
    /// One rank of a model; started by the other commands
    #[command(hide = true)]
    Worker,
}

fn main() -> ExitCode {
    start::init_logging();
    let outcome = match Cli::parse().command {
        Command::Chat(args) => chat::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Perplexity(args) => perplexity::run(args),
        Command::Verify(args) => verify::run(args),
        Command::CommBench(args) => comm_bench::run(args),
        Command::Pull(args) => pull::run(args),
        // A worker's failure goes to its supervisor over the control channel.
        Command::Worker => match yunta_cluster::run_worker() {
            Ok(()) => return ExitCode::SUCCESS,
            Err(_) => return ExitCode::FAILURE,
        },
    };
    match outcome {
        Ok(code) => code,
        Err(e) => {
            eprintln!("yunta: {e:#}");
            ExitCode::FAILURE
        }
    }
}
