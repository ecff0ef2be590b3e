//! What the server is told at its start.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Settings of a server. Start from [`ServerConfig::new`].
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Name of the model, as clients see it.
    pub model_id: String,
    /// Further names under which it answers.
    pub aliases: Vec<String>,
    /// When the model came to be, in seconds since 1970; shown in `/v1/models`.
    pub created: u64,
    /// If set, requests under `/v1` must carry `Authorization: Bearer KEY`.
    pub api_key: Option<ApiKey>,
    /// The longest request body taken.
    pub max_body_bytes: usize,
    /// How long a request body may take to arrive.
    pub body_timeout: Duration,
    /// How long one request may take, from its arrival to its last token.
    pub request_timeout: Duration,
    /// Generation requests open at once; more are answered with 429.
    pub max_open_requests: usize,
    /// Silence on a stream after which a comment is sent, so that nobody in between hangs up.
    pub keep_alive: Duration,
    /// How long a client's machine may leave what was sent to it unacknowledged, or its reader
    /// may leave it unread, before the connection counts as lost.
    pub client_timeout: Duration,
    /// How long open requests may go on after shutdown was asked for.
    pub drain_timeout: Duration,
}

impl ServerConfig {
    /// The defaults, for a model of this name.
    pub fn new(model_id: impl Into<String>) -> Self {
        Self {
            model_id: model_id.into(),
            aliases: Vec::new(),
            created: unix_seconds(),
            api_key: None,
            max_body_bytes: 16 << 20,
            body_timeout: Duration::from_secs(60),
            request_timeout: Duration::from_secs(3600),
            max_open_requests: 256,
            keep_alive: Duration::from_secs(10),
            client_timeout: Duration::from_secs(60),
            drain_timeout: Duration::from_secs(30),
        }
    }

    /// The names in `/v1/models`: the id, then the aliases.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(self.model_id.as_str()).chain(self.aliases.iter().map(String::as_str))
    }

    /// Whether a client that asks for `name` means this model: by a listed name, or by the last
    /// component of the id, as `Model` for `org/Model`.
    pub(crate) fn answers_to(&self, name: &str) -> bool {
        let last = self.model_id.trim_end_matches('/').rsplit('/').next();
        self.names().any(|known| known == name) || last == Some(name)
    }
}

/// A secret that is not shown when printed.
#[derive(Clone)]
pub struct ApiKey(String);

impl ApiKey {
    /// Wraps a key.
    pub fn new(key: impl Into<String>) -> Self {
        Self(key.into())
    }

    /// Compares in a time that depends on the lengths alone.
    pub(crate) fn matches(&self, candidate: &[u8]) -> bool {
        let key = self.0.as_bytes();
        let differing = key.iter().zip(candidate).fold(0, |acc, (a, b)| acc | (a ^ b));
        key.len() == candidate.len() && std::hint::black_box(differing) == 0
    }
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ApiKey(..)")
    }
}

/// Now, in seconds since 1970.
pub(crate) fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_answers_to_id_alias_and_last_path_component() {
        let mut config = ServerConfig::new("org/Model");
        config.aliases.push("other".into());
        for name in ["org/Model", "Model", "other"] {
            assert!(config.answers_to(name), "{name}");
        }
        for name in ["", "org", "model", "org/Model/"] {
            assert!(!config.answers_to(name), "{name}");
        }
    }

    #[test]
    fn a_key_matches_itself_alone() {
        let key = ApiKey::new("abc");
        assert!(key.matches(b"abc"));
        assert!(!key.matches(b"ab") && !key.matches(b"abcd") && !key.matches(b"abd"));
    }
}
