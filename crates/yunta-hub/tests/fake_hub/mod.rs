//! A server on this machine that speaks as much of the Hugging Face hub's protocol as a download
//! needs, and misbehaves when told to.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};

use sha2::{Digest, Sha256};

/// How the server treats its clients.
#[derive(Default)]
pub(crate) struct Manners {
    /// Downloads of this file are cut off after so many bytes, so many times.
    pub(crate) cut: Option<(String, usize, usize)>,
    /// Downloads start at the beginning whatever was asked for.
    pub(crate) ignore_range: bool,
    /// Only who knows it is answered.
    pub(crate) token: Option<String>,
    /// Files that the list names, but which are answered with this status.
    pub(crate) broken: HashMap<String, u16>,
}

#[derive(Default)]
struct State {
    commit: String,
    files: HashMap<String, Vec<u8>>,
    manners: Manners,
    requests: Vec<Request>,
}

#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub(crate) path: String,
    /// First byte asked for; none if that is not said.
    pub(crate) from: Option<usize>,
    /// Only the headers are of interest (`bytes=0-0`).
    pub(crate) probe: bool,
    token: Option<String>,
}

/// The server, with one repository.
pub(crate) struct FakeHub {
    pub(crate) endpoint: String,
    id: String,
    state: Arc<Mutex<State>>,
}

impl FakeHub {
    /// Serves all files of a folder as the repository `id`.
    pub(crate) fn serve(id: &str, folder: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let hub = Self {
            endpoint: format!("http://{}", listener.local_addr().unwrap()),
            id: id.to_owned(),
            state: Arc::default(),
        };
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_str().unwrap();
            hub.put(name, std::fs::read(&path).unwrap());
        }
        hub.state().commit = "1".repeat(40);
        let (id, state) = (hub.id.clone(), hub.state.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (id, state) = (id.clone(), state.clone());
                // A client that hangs up early is none of the server's business.
                std::thread::spawn(move || answer(stream, &id, &state).ok());
            }
        });
        hub
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(crate) fn put(&self, name: &str, content: impl Into<Vec<u8>>) {
        self.state().files.insert(name.to_owned(), content.into());
    }

    pub(crate) fn set_commit(&self, commit: &str) {
        self.state().commit = commit.to_owned();
    }

    pub(crate) fn set_manners(&self, manners: Manners) {
        self.state().manners = manners;
    }

    /// Requests for the content of a file, as they came.
    pub(crate) fn downloads(&self, file: &str) -> Vec<Request> {
        let state = self.state();
        let digest = state.files.get(file).map(|c| etag(c)).unwrap_or_default();
        let of_file =
            |r: &&Request| r.path.ends_with(&format!("/{file}")) || r.path.ends_with(&digest);
        state.requests.iter().filter(|r| !r.probe).filter(of_file).cloned().collect()
    }

    pub(crate) fn request_count(&self) -> usize {
        self.state().requests.len()
    }
}

/// Large files are called by their SHA-256, as on the hub.
pub(crate) fn etag(content: &[u8]) -> String {
    Sha256::digest(content).iter().map(|b| format!("{b:02x}")).collect()
}

fn answer(stream: TcpStream, id: &str, state: &Mutex<State>) -> std::io::Result<()> {
    let Some(request) = read_request(&stream)? else { return Ok(()) };
    let mut state = state.lock().unwrap();
    state.requests.push(request.clone());
    if state.manners.token.is_some() && state.manners.token != request.token {
        return send(stream, "401 Unauthorized", &[], b"");
    }
    if request.path == format!("/api/models/{id}/revision/main") {
        let body = listing(&state);
        return send(stream, "200 OK", &[], body.as_bytes());
    }
    let commit = state.commit.clone();
    if let Some(file) = request.path.strip_prefix(&format!("/{id}/resolve/{commit}/")) {
        if let Some(status) = state.manners.broken.get(file) {
            return send(stream, &format!("{status} Broken"), &[], b"");
        }
        let Some(content) = state.files.get(file).cloned() else {
            return send(stream, "404 Not Found", &[], b"");
        };
        let etag = etag(&content);
        if file.ends_with(".safetensors") || file.ends_with(".gguf") {
            let headers = [
                ("Location", format!("http://{}/store/{etag}", stream.local_addr()?)),
                ("X-Linked-Etag", format!("\"{etag}\"")),
                ("X-Repo-Commit", commit),
            ];
            return send(stream, "302 Found", &headers, b"");
        }
        let headers = [("ETag", format!("\"{}\"", &etag[..40])), ("X-Repo-Commit", commit)];
        return send_range(stream, &request, &content, &headers, &state.manners, None);
    }
    if let Some(digest) = request.path.strip_prefix("/store/") {
        let found = state.files.iter().find(|(_, content)| etag(content) == digest);
        let (file, content) = found.map(|(f, c)| (f.clone(), c.clone())).unwrap();
        let cut = match &mut state.manners.cut {
            Some((name, bytes, times)) if *name == file && *times > 0 && !request.probe => {
                *times -= 1;
                Some(*bytes)
            }
            _ => None,
        };
        return send_range(stream, &request, &content, &[], &state.manners, cut);
    }
    send(stream, "404 Not Found", &[], b"")
}

fn listing(state: &State) -> String {
    let mut names: Vec<&String> = state.files.keys().collect();
    names.sort();
    let siblings: Vec<_> = names.iter().map(|n| serde_json::json!({ "rfilename": n })).collect();
    serde_json::json!({ "sha": state.commit, "siblings": siblings }).to_string()
}

fn read_request(stream: &TcpStream) -> std::io::Result<Option<Request>> {
    let mut lines = BufReader::new(stream).lines();
    let Some(first) = lines.next().transpose()? else { return Ok(None) };
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut request = Request { path, from: None, probe: false, token: None };
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "range" => {
                let (from, to) = value.strip_prefix("bytes=").unwrap().split_once('-').unwrap();
                request.from = from.parse().ok();
                request.probe = to == "0";
            }
            "authorization" => request.token = value.strip_prefix("Bearer ").map(str::to_owned),
            _ => {}
        }
    }
    Ok(Some(request))
}

fn send_range(
    stream: TcpStream,
    request: &Request,
    content: &[u8],
    headers: &[(&str, String)],
    manners: &Manners,
    cut: Option<usize>,
) -> std::io::Result<()> {
    let from = request.from.unwrap_or(0);
    if from >= content.len() {
        return send(stream, "416 Range Not Satisfiable", headers, b"");
    }
    if manners.ignore_range && !request.probe {
        return send(stream, "200 OK", headers, content);
    }
    let end = if request.probe { from + 1 } else { content.len() };
    let range = format!("bytes {from}-{}/{}", end - 1, content.len());
    let headers = [headers, &[("Content-Range", range)]].concat();
    let body = &content[from..end];
    let sent = &body[..cut.unwrap_or(body.len()).min(body.len())];
    send_claiming(stream, "206 Partial Content", &headers, sent, body.len())
}

fn send(
    stream: TcpStream,
    status: &str,
    headers: &[(&str, String)],
    body: &[u8],
) -> std::io::Result<()> {
    send_claiming(stream, status, headers, body, body.len())
}

fn send_claiming(
    mut stream: TcpStream,
    status: &str,
    headers: &[(&str, String)],
    body: &[u8],
    length: usize,
) -> std::io::Result<()> {
    let mut head =
        format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n");
    for (name, value) in headers {
        let _ = write!(head, "{name}: {value}\r\n");
    }
    stream.write_all(format!("{head}\r\n").as_bytes())?;
    stream.write_all(body)?;
    stream.shutdown(Shutdown::Write)
}
