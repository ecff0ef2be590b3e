//! A server on a loopback socket over a scripted engine, and a small HTTP client.
#![allow(dead_code, unreachable_pub, missing_docs)] // each test file uses a part of it

pub mod byte_text;
pub mod client;
pub mod engine;

use std::net::SocketAddr;
use std::sync::Arc;

use serde_json::Value;
use tokio::sync::oneshot;
use yunta_api::{ApiState, ServerConfig, TextModel};

use self::byte_text::ByteText;
use self::client::{Reply, exchange};
use self::engine::ScriptedEngine;

/// A running server. Dropping it shuts it down.
pub struct Server {
    pub address: SocketAddr,
    shutdown: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<std::io::Result<()>>>,
}

pub fn start(engine: &Arc<ScriptedEngine>) -> Server {
    start_with(engine, |_| {})
}

pub fn start_with(
    engine: &Arc<ScriptedEngine>,
    configure: impl FnOnce(&mut ServerConfig),
) -> Server {
    start_text(engine, ByteText, configure)
}

pub fn start_text(
    engine: &Arc<ScriptedEngine>,
    text: impl TextModel,
    configure: impl FnOnce(&mut ServerConfig),
) -> Server {
    let mut config = ServerConfig::new("org/Model");
    config.aliases.push("nickname".into());
    config.created = 1_700_000_000;
    configure(&mut config);
    let state = ApiState::new(config, engine.clone(), Arc::new(text));
    let (shutdown, asked) = oneshot::channel::<()>();
    let (bound, address) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
            bound.send(listener.local_addr()?).unwrap();
            yunta_api::serve(listener, state, async { asked.await.unwrap_or(()) }).await
        })
    });
    let address = address.recv().unwrap();
    Server { address, shutdown: Some(shutdown), thread: Some(thread) }
}

impl Server {
    pub fn get(&self, path: &str) -> Reply {
        exchange(self.address, "GET", path, &[], b"")
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.send("POST", path, &[("content-type", "application/json")], body.to_string())
    }

    pub fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl AsRef<[u8]>,
    ) -> Reply {
        exchange(self.address, method, path, headers, body.as_ref())
    }

    /// Asks the server to end; [`Server::ended`] waits for it.
    pub fn shut_down(&mut self) {
        self.shutdown.take();
    }

    pub fn ended(&mut self) -> std::io::Result<()> {
        self.thread.take().unwrap().join().unwrap()
    }
}

/// A chat request with this text, and further fields.
pub fn chat(text: &str, fields: Value) -> Value {
    let mut body = serde_json::json!({"messages": [{"role": "user", "content": text}]});
    let fields = fields.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(fields);
    body
}
