//! The least of an HTTP client: one exchange per connection, written from RFC 9112.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};

use serde_json::Value;

use super::engine::PATIENCE;

/// An answer.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {self:?}"))
    }

    pub fn error(&self) -> Value {
        self.json()["error"].clone()
    }

    /// The `data` of all events of a stream.
    pub fn events(&self) -> Vec<String> {
        assert_eq!(self.header("content-type"), Some("text/event-stream"), "{self:?}");
        assert!(self.body.ends_with("\n\n"), "{self:?}");
        let blocks = self.body.split_terminator("\n\n").filter(|block| !block.starts_with(':'));
        blocks.map(|block| block.strip_prefix("data: ").unwrap().to_owned()).collect()
    }

    /// The chunks of a stream that ends as it should.
    pub fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop().as_deref(), Some("[DONE]"), "{self:?}");
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }
}

/// Sends a request and reads the whole answer.
pub fn exchange(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> Reply {
    read_reply(open(address, method, path, headers, body))
}

/// Sends a request; the answer is to be read from the stream.
pub fn open(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n");
    head += &format!("content-length: {}\r\n", body.len());
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    stream.write_all((head + "\r\n").as_bytes()).unwrap();
    stream.write_all(body).unwrap();
    stream
}

/// Reads an answer to its end.
pub fn read_reply(stream: TcpStream) -> Reply {
    let mut reader = BufReader::new(stream);
    let status = line(&mut reader).split(' ').nth(1).unwrap().parse().unwrap();
    let mut headers = Vec::new();
    loop {
        let line = line(&mut reader);
        let Some((name, value)) = line.split_once(": ") else { break };
        headers.push((name.to_ascii_lowercase(), value.to_owned()));
    }
    let mut reply = Reply { status, headers, body: String::new() };
    reply.body = match reply.header("transfer-encoding") {
        Some("chunked") => chunked(&mut reader),
        _ => {
            let mut body = String::new();
            reader.read_to_string(&mut body).unwrap();
            body
        }
    };
    reply
}

fn chunked(reader: &mut impl BufRead) -> String {
    let mut body = Vec::new();
    loop {
        let length = usize::from_str_radix(&line(reader), 16).unwrap();
        let mut chunk = vec![0; length + 2];
        reader.read_exact(&mut chunk).unwrap();
        if length == 0 {
            return String::from_utf8(body).unwrap();
        }
        body.extend_from_slice(&chunk[..length]);
    }
}

fn line(reader: &mut impl BufRead) -> String {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}

/// Sends the head of a JSON request whose body never comes.
pub fn open_unfinished(address: SocketAddr, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: 10\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    stream
}
