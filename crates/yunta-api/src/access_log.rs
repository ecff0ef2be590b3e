//! One log line per HTTP request, written when its answer has been sent or given up.

use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use axum::extract::Request;
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;

use crate::error::ErrorText;
use crate::generation::Usage;

/// Logged for a request whose client left before the answer began (nginx's convention).
const CLIENT_CLOSED_REQUEST: u16 = 499;

/// What is known of a request so far. The line is written when the last holder drops it: the
/// middleware for short answers, the stream for streamed ones.
pub(crate) struct RequestLog {
    method: Method,
    route: String,
    started: Instant,
    status: AtomicU16,
    prompt_tokens: AtomicUsize,
    cached_tokens: AtomicUsize,
    completion_tokens: AtomicUsize,
    /// When the first token came.
    first_token: OnceLock<Instant>,
    error: OnceLock<String>,
}

impl RequestLog {
    fn new(request: &Request) -> Self {
        Self {
            method: request.method().clone(),
            route: request.uri().path().to_owned(),
            started: Instant::now(),
            status: AtomicU16::new(CLIENT_CLOSED_REQUEST),
            prompt_tokens: AtomicUsize::new(0),
            cached_tokens: AtomicUsize::new(0),
            completion_tokens: AtomicUsize::new(0),
            first_token: OnceLock::new(),
            error: OnceLock::new(),
        }
    }

    pub(crate) fn count_tokens(&self, usage: Usage) {
        self.prompt_tokens.store(usage.prompt_tokens, Relaxed);
        self.cached_tokens.store(usage.cached_tokens, Relaxed);
        self.completion_tokens.store(usage.completion_tokens, Relaxed);
        if usage.completion_tokens > 0 {
            self.first_token.get_or_init(Instant::now);
        }
    }

    /// The first error stays.
    pub(crate) fn set_error(&self, text: String) {
        self.error.get_or_init(|| text);
    }
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        let ttft = self.first_token.get().map(|t| t.duration_since(self.started));
        tracing::info!(
            method = %self.method,
            route = self.route,
            status = self.status.load(Relaxed),
            prompt_tokens = self.prompt_tokens.load(Relaxed),
            cached_tokens = self.cached_tokens.load(Relaxed),
            completion_tokens = self.completion_tokens.load(Relaxed),
            ttft_ms = ttft.map(|t| t.as_millis() as u64),
            ms = self.started.elapsed().as_millis() as u64,
            error = self.error.get(),
            "request"
        );
    }
}

/// Middleware: gives each request its [`RequestLog`], as an extension.
pub(crate) async fn log_request(mut request: Request, next: Next) -> Response {
    let log = Arc::new(RequestLog::new(&request));
    request.extensions_mut().insert(log.clone());
    let response = next.run(request).await;
    log.status.store(response.status().as_u16(), Relaxed);
    if let Some(ErrorText(text)) = response.extensions().get() {
        log.set_error(text.clone());
    }
    response
}
