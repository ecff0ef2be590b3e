//! `yunta serve`: an OpenAI-compatible server.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Args;
use yunta_api::{ApiKey, ApiState, CheckpointText, ServerConfig};

use crate::args::ModelArgs;
use crate::start;

/// Arguments of `yunta serve`.
#[derive(Args)]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Address to listen on; 0.0.0.0 lets other machines in
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8080)]
    port: u16,
    /// Name under which the model is served [default: its own]
    #[arg(long)]
    served_name: Option<String>,
    /// Ask clients for this key
    #[arg(long, env = "YUNTA_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
}

pub(crate) fn run(args: ServeArgs) -> Result<ExitCode> {
    let prepared = start::prepare(&args.model)?;
    let text = CheckpointText::read(&prepared.checkpoint)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    // Take the port before the model is loaded: a port in use is said at once.
    let address = format!("{}:{}", args.host, args.port);
    let listener = runtime
        .block_on(tokio::net::TcpListener::bind(&address))
        .with_context(|| format!("can't listen on {address}"))?;
    let local = listener.local_addr()?;
    let instance = Arc::new(start::launch(&prepared)?);
    let name =
        args.served_name.unwrap_or_else(|| yunta_hub::served_name(&args.model.compute.model));
    announce(&name, local, prepared.config.plan.size());
    // What the user typed is a name too: clients will be given it.
    let typed = args.model.compute.model;
    let is_name = typed != name && !std::path::Path::new(&typed).exists();
    let config = ServerConfig {
        api_key: args.api_key.map(ApiKey::new),
        aliases: if is_name { vec![typed] } else { Vec::new() },
        ..ServerConfig::new(name)
    };
    let state = ApiState::new(config, instance.clone(), Arc::new(text));
    runtime.block_on(yunta_api::serve(listener, state, shutdown()))?;
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    drop(instance);
    Ok(ExitCode::SUCCESS)
}

fn announce(name: &str, address: SocketAddr, ranks: usize) {
    let ranks = if ranks == 1 { "1 rank".to_owned() } else { format!("{ranks} ranks") };
    eprintln!("{name} over {ranks} at http://{address}/v1 (Ctrl-C ends)");
}

/// Ends on Ctrl-C or SIGTERM.
async fn shutdown() {
    let mut terminate =
        match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
            Ok(signal) => signal,
            Err(_) => return std::future::pending().await,
        };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => {}
        _ = terminate.recv() => {}
    }
    eprintln!("finishing open requests (Ctrl-C again to drop them)");
    tokio::spawn(async {
        if tokio::signal::ctrl_c().await.is_ok() {
            std::process::exit(130);
        }
    });
}
