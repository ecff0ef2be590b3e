//! What the end-to-end tests share: the model, and a served instance of it.

// Each test file uses its part.
#![allow(dead_code, unreachable_pub)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::Value;

pub const YUNTA: &str = env!("CARGO_BIN_EXE_yunta");

/// SmolLM2-135M-Instruct Q4_1, which `cargo xtask test` has fetched.
pub fn smollm2() -> PathBuf {
    let default = || {
        let home = std::env::var("HOME").expect("HOME is set");
        let file = ".cache/yunta/models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf";
        Path::new(&home).join(file)
    };
    let path = std::env::var("YUNTA_SMOLLM2").map_or_else(|_| default(), PathBuf::from);
    assert!(path.is_file(), "{} is missing: run `cargo xtask test`", path.display());
    path
}

pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

/// The Python that has the clients.
pub fn python() -> PathBuf {
    let venv = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/bin/python");
    let path = std::env::var("YUNTA_PYTHON").map_or(venv, PathBuf::from);
    assert!(path.is_file(), "{} is missing: run `cargo xtask test`", path.display());
    path
}

/// Runs a command to its end, at most two minutes.
pub fn yunta(args: &[&str]) -> Output {
    Command::new(YUNTA).args(args).output().expect("yunta starts")
}

/// The JSON object that a command prints.
pub fn yunta_json(args: &[&str]) -> Value {
    let out = yunta(args);
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "yunta {args:?}: {}\n{stderr}", out.status);
    serde_json::from_slice(&out.stdout).expect("one JSON object")
}

/// `yunta serve` on a free port, killed when dropped.
pub struct Server {
    child: Child,
    pub url: String,
    lines: Mutex<Receiver<String>>,
}

impl Server {
    pub fn start(args: &[&str]) -> Self {
        let model = smollm2();
        let mut child = Command::new(YUNTA)
            .args(["serve", model.to_str().unwrap(), "--port", "0", "--served-name", "smollm2"])
            .args(args)
            .env("YUNTA_LOG", "info")
            .stderr(Stdio::piped())
            .spawn()
            .expect("yunta starts");
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                eprintln!("| {line}");
                let _ = sender.send(line);
            }
        });
        let mut server = Self { child, url: String::new(), lines: Mutex::new(lines) };
        let line = server.wait_for("http://", Duration::from_secs(60));
        let at = line.find("http://").unwrap();
        server.url =
            line[at..].split_whitespace().next().unwrap().trim_end_matches("/v1").to_owned();
        server
    }

    /// The first line of the log from now on that has `what` in it.
    pub fn wait_for(&self, what: &str, timeout: Duration) -> String {
        let end = Instant::now() + timeout;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let line = self.lines.lock().unwrap().recv_timeout(left);
            let line = line.unwrap_or_else(|_| panic!("no `{what}` within {timeout:?}"));
            if line.contains(what) {
                return line;
            }
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Process ids of the ranks, in the order of their start.
    pub fn workers(&self) -> Vec<u32> {
        children(self.pid())
    }

    /// A request as raw text: status line and headers, and the body as it comes.
    pub fn open(&self, method: &str, path: &str, body: Option<&Value>) -> Response {
        let address = self.url.trim_start_matches("http://");
        let mut stream = TcpStream::connect(address).expect("the server takes connections");
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        let body = body.map(Value::to_string).unwrap_or_default();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).unwrap();
        let mut reader = BufReader::new(stream);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            assert!(reader.read_line(&mut head).unwrap() > 0, "the connection ended: {head}");
        }
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Response { status, reader }
    }

    /// Status and JSON body of a whole answer.
    pub fn json(&self, method: &str, path: &str, body: Option<&Value>) -> (u16, Value) {
        let mut response = self.open(method, path, body);
        let mut text = String::new();
        response.reader.read_to_string(&mut text).unwrap();
        (response.status, serde_json::from_str(&text).unwrap_or(Value::String(text)))
    }
}

pub struct Response {
    pub status: u16,
    reader: BufReader<TcpStream>,
}

impl Response {
    /// The next `data:` line of a stream; `None` at its end.
    pub fn data(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.reader.read_line(&mut line).unwrap_or(0) == 0 {
                return None;
            }
            if let Some(data) = line.trim_end().strip_prefix("data: ") {
                return Some(data.to_owned());
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Living children of a process, by number.
pub fn children(pid: u32) -> Vec<u32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().filter_map(Result::ok) {
        let Ok(child) = entry.file_name().to_string_lossy().parse::<u32>() else { continue };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        // `pid (name) state parent ...`: the name may hold anything.
        let mut rest = stat.rsplit(") ").next().unwrap_or("").split(' ');
        let (state, parent) = (rest.next(), rest.next());
        if parent == Some(pid.to_string().as_str()) && state != Some("Z") {
            found.push(child);
        }
    }
    found.sort_unstable();
    found
}

pub fn alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !stat.is_empty() && !stat.contains(") Z ")
}

pub fn signal(pid: u32, signal: &str) {
    let status = Command::new("kill").args([signal, &pid.to_string()]).status().unwrap();
    assert!(status.success());
}
