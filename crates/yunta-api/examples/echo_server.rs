//! Serves a model that repeats the end of its prompt, one byte per token: for trying clients.
//!
//! `cargo run -p yunta-api --example echo_server -- 127.0.0.1:8080`
//!
//! A prompt that contains `fail` fails after a few tokens, and one with `busy` is not taken.

#[path = "../tests/common/byte_text.rs"]
#[allow(unreachable_pub)] // shared with the tests
mod byte_text;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use byte_text::{ByteText, EOS};
use yunta_api::{ApiState, ServerConfig, serve};
use yunta_engine::{
    Engine, EngineStatus, Event, EventSink, Failure, FinishReason, Request, RequestId, SubmitError,
    TokenLogprobs,
};

#[tokio::main]
async fn main() -> io::Result<()> {
    tracing_subscriber::fmt().init();
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:8080".into());
    let listener = tokio::net::TcpListener::bind(&address).await?;
    tracing::info!("listening on {address}");
    let state =
        ApiState::new(ServerConfig::new("echo"), Arc::new(Echo::default()), Arc::new(ByteText));
    serve(listener, state, async { tokio::signal::ctrl_c().await.unwrap_or(()) }).await
}

/// Repeats the last words of a prompt.
#[derive(Default)]
struct Echo {
    next_id: AtomicU64,
    open: Arc<AtomicUsize>,
}

impl Engine for Echo {
    fn next_id(&self) -> RequestId {
        RequestId(self.next_id.fetch_add(1, SeqCst))
    }

    fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<(), SubmitError> {
        let prompt: Vec<u8> = request.prompt.iter().flat_map(|&id| u8::try_from(id)).collect();
        let prompt = String::from_utf8_lossy(&prompt).into_owned();
        if prompt.contains("busy") {
            return Err(SubmitError::Busy { waiting: 1 });
        }
        self.open.fetch_add(1, SeqCst);
        let open = self.open.clone();
        std::thread::spawn(move || {
            speak(&request, &prompt, sink);
            open.fetch_sub(1, SeqCst);
        });
        Ok(())
    }

    /// A cancelled request ends at its next token, when its sink says that nobody listens.
    fn cancel(&self, _: RequestId) {}

    fn status(&self) -> EngineStatus {
        let open_requests = self.open.load(SeqCst);
        EngineStatus { ready: true, state: "serving".into(), epoch: 1, ranks: 1, open_requests }
    }

    fn context_length(&self) -> usize {
        4096
    }
}

fn speak(request: &Request, prompt: &str, mut sink: Box<dyn EventSink>) {
    let said = prompt.trim_end_matches("assistant:").trim_end();
    let said = said.rsplit_once("user:").map_or(said, |(_, last)| last);
    let tokens = said.bytes().map(u32::from).chain([EOS]);
    for (index, token) in tokens.enumerate() {
        std::thread::sleep(Duration::from_millis(5));
        if index == 4 && said.contains("fail") {
            let message = "rank 1 was lost during all_reduce".into();
            sink.emit(Event::Failed { message, cause: Failure::Retriable });
            return;
        }
        if index == request.max_tokens {
            sink.emit(Event::Finished { reason: FinishReason::Length });
            return;
        }
        let logprobs = request.logprobs.map(|k| TokenLogprobs {
            chosen: -0.5,
            top: (0..k as u32).map(|i| ((token + i) % 256, -0.5 - i as f32)).collect(),
        });
        if !sink.emit(Event::Token { index, token, logprobs }) {
            return;
        }
    }
    sink.emit(Event::Finished { reason: FinishReason::Stop });
}
