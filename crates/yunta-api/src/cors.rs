//! Web pages served from this machine may call the API; pages from elsewhere may not, as they
//! could use a model that is only meant for those who can reach its port.

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

/// Middleware: answers preflight requests and marks answers, for local origins.
pub(crate) async fn allow_local_origins(request: Request, next: Next) -> Response {
    let origin = request.headers().get(header::ORIGIN).filter(|origin| is_local(origin)).cloned();
    let Some(origin) = origin else { return next.run(request).await };
    let wanted_headers = request.headers().get(header::ACCESS_CONTROL_REQUEST_HEADERS).cloned();
    let preflight = request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD);
    let mut response = match preflight {
        true => StatusCode::NO_CONTENT.into_response(),
        false => next.run(request).await,
    };
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(header::VARY, HeaderValue::from_static("origin"));
    if preflight {
        allow(headers, header::ACCESS_CONTROL_ALLOW_METHODS, "GET, POST");
        allow(headers, header::ACCESS_CONTROL_MAX_AGE, "600");
        if let Some(wanted) = wanted_headers {
            headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, wanted);
        }
    }
    response
}

fn allow(headers: &mut HeaderMap, name: HeaderName, value: &'static str) {
    headers.insert(name, HeaderValue::from_static(value));
}

fn is_local(origin: &HeaderValue) -> bool {
    let Ok(origin) = origin.to_str() else { return false };
    let Some((_, authority)) = origin.split_once("://") else { return false };
    let host = match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => authority,
    };
    matches!(host, "localhost" | "127.0.0.1" | "[::1]") || host.ends_with(".localhost")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pages_of_this_machine_are_local() {
        for origin in ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:80"] {
            assert!(is_local(&HeaderValue::from_static(origin)), "{origin}");
        }
        for origin in [
            "null",
            "https://example.com",
            "https://localhost.example.com",
            "http://127.0.0.1.example.com:80",
            "http://evil:localhost",
        ] {
            assert!(!is_local(&HeaderValue::from_static(origin)), "{origin}");
        }
    }
}
