//! Errors as clients see them: one enum, and its form in OpenAI's error object.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use yunta_engine::{Failure, SubmitError};

use crate::text_model::TextError;

/// What went wrong with a request. The text is meant for whoever wrote the client.
#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    /// A field has a value that can't be used.
    #[error("{message}")]
    InvalidParameter {
        /// Path of the field, as in `messages[0].content`.
        param: String,
        /// What is wrong, and what would be right.
        message: String,
    },
    /// The body is not a JSON object.
    #[error("the request body is not a JSON object: {reason}")]
    InvalidJson {
        /// The parser's complaint.
        reason: String,
    },
    /// The body is not declared as JSON.
    #[error("send the body as JSON, with the header `Content-Type: application/json`")]
    UnsupportedMediaType,
    /// The body could not be read.
    #[error("the request body could not be read: {reason}")]
    UnreadableBody {
        /// The complaint of the HTTP layer.
        reason: String,
    },
    /// The body did not arrive in time.
    #[error("the request body did not arrive within {seconds} s")]
    BodyTimeout {
        /// The bound.
        seconds: u64,
    },
    /// The body is longer than the server takes.
    #[error("the request body is longer than {limit_bytes} bytes, the most this server takes")]
    BodyTooLarge {
        /// The bound.
        limit_bytes: usize,
    },
    /// No key, though the server wants one.
    #[error("no API key was given: send it as `Authorization: Bearer KEY`")]
    MissingApiKey,
    /// Another key than the server's.
    #[error("the API key is not the one this server was started with")]
    WrongApiKey,
    /// The model is not served here.
    #[error("the model `{name}` is not served here; this server has {served}")]
    UnknownModel {
        /// What was asked for.
        name: String,
        /// What there is.
        served: String,
    },
    /// No such path.
    #[error("there is nothing at {method} {path}; the API is under /v1")]
    UnknownRoute {
        /// HTTP method.
        method: String,
        /// Path.
        path: String,
    },
    /// The path exists, but not with this method.
    #[error("{path} does not take {method}")]
    MethodNotAllowed {
        /// HTTP method.
        method: String,
        /// Path.
        path: String,
    },
    /// The prompt leaves no room for an answer.
    #[error(
        "this model's context holds {context_tokens} tokens, and the prompt has {prompt_tokens}: \
         shorten it to at most {} tokens", context_tokens.saturating_sub(1)
    )]
    ContextLengthExceeded {
        /// Length of the prompt.
        prompt_tokens: usize,
        /// Length of the context.
        context_tokens: usize,
        /// The field that holds the prompt.
        param: &'static str,
    },
    /// Too many requests are open.
    #[error("{reason}")]
    Busy {
        /// Which bound was met.
        reason: String,
    },
    /// The ranks can't answer now.
    #[error("{reason}")]
    Unavailable {
        /// What is going on.
        reason: String,
    },
    /// The engine gave the request up.
    #[error("{message}")]
    Failed {
        /// The engine's words.
        message: String,
        /// What kind of failure it is.
        cause: Failure,
    },
    /// The answer was not complete in time.
    #[error("the answer was not complete after {seconds} s, the most this server spends on one")]
    RequestTimeout {
        /// The bound.
        seconds: u64,
    },
    /// A fault of the server.
    #[error("internal error: {reason}")]
    Internal {
        /// For the server's maintainers.
        reason: String,
    },
}

/// Seconds after which a client may try again when the queue is full: a request may end any moment.
const RETRY_BUSY_S: u32 = 1;
/// The same when the ranks are being started or replaced.
const RETRY_UNAVAILABLE_S: u32 = 3;

impl ApiError {
    /// A field with a value that can't be used.
    pub(crate) fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self::InvalidParameter { param: param.into(), message: message.into() }
    }

    /// The HTTP status.
    pub fn status(&self) -> StatusCode {
        match self {
            Self::InvalidParameter { .. }
            | Self::InvalidJson { .. }
            | Self::UnreadableBody { .. }
            | Self::ContextLengthExceeded { .. }
            | Self::Failed { cause: Failure::Request, .. } => StatusCode::BAD_REQUEST,
            Self::MissingApiKey | Self::WrongApiKey => StatusCode::UNAUTHORIZED,
            Self::UnknownModel { .. } | Self::UnknownRoute { .. } => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::BodyTimeout { .. } => StatusCode::REQUEST_TIMEOUT,
            Self::BodyTooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::Busy { .. } => StatusCode::TOO_MANY_REQUESTS,
            Self::Unavailable { .. } | Self::Failed { cause: Failure::Retriable, .. } => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Self::RequestTimeout { .. } | Self::Failed { cause: Failure::Deadline, .. } => {
                StatusCode::GATEWAY_TIMEOUT
            }
            Self::Failed { cause: Failure::Internal, .. } | Self::Internal { .. } => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
        }
    }

    fn kind(&self) -> &'static str {
        match self.status() {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::UNAUTHORIZED => "authentication_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    fn code(&self) -> Option<&'static str> {
        match self {
            Self::InvalidJson { .. } => Some("invalid_json"),
            Self::UnsupportedMediaType => Some("unsupported_media_type"),
            Self::BodyTimeout { .. } => Some("body_timeout"),
            Self::BodyTooLarge { .. } => Some("body_too_large"),
            Self::MissingApiKey | Self::WrongApiKey => Some("invalid_api_key"),
            Self::UnknownModel { .. } => Some("model_not_found"),
            Self::UnknownRoute { .. } => Some("unknown_url"),
            Self::MethodNotAllowed { .. } => Some("method_not_allowed"),
            Self::ContextLengthExceeded { .. } => Some("context_length_exceeded"),
            Self::Busy { .. } => Some("rate_limit_exceeded"),
            Self::Unavailable { .. } => Some("service_unavailable"),
            Self::Failed { .. } => Some("generation_failed"),
            Self::RequestTimeout { .. } => Some("request_timeout"),
            Self::InvalidParameter { .. } => Some("invalid_value"),
            Self::UnreadableBody { .. } | Self::Internal { .. } => None,
        }
    }

    fn param(&self) -> Option<&str> {
        match self {
            Self::InvalidParameter { param, .. } => Some(param),
            Self::ContextLengthExceeded { param, .. } => Some(param),
            Self::UnknownModel { .. } => Some("model"),
            _ => None,
        }
    }

    fn retry_after_s(&self) -> Option<u32> {
        match self.status() {
            StatusCode::TOO_MANY_REQUESTS => Some(RETRY_BUSY_S),
            StatusCode::SERVICE_UNAVAILABLE => Some(RETRY_UNAVAILABLE_S),
            _ => None,
        }
    }

    /// OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`.
    pub fn body(&self) -> Value {
        json!({"error": {
            "message": self.to_string(),
            "type": self.kind(),
            "param": self.param(),
            "code": self.code(),
        }})
    }
}

/// The text of an error, left in a response's extensions for the access log.
#[derive(Clone)]
pub(crate) struct ErrorText(pub(crate) String);

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status(), Json(self.body())).into_response();
        if let Some(seconds) = self.retry_after_s() {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status() == StatusCode::UNAUTHORIZED {
            let challenge = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
        }
        response.extensions_mut().insert(ErrorText(self.to_string()));
        response
    }
}

impl From<SubmitError> for ApiError {
    fn from(error: SubmitError) -> Self {
        let reason = error.to_string();
        match error {
            SubmitError::Busy { .. } => Self::Busy { reason },
            SubmitError::Unavailable { .. } => Self::Unavailable { reason },
            SubmitError::Invalid { .. } => Self::invalid("prompt", reason),
        }
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        let reason = error.to_string();
        match error {
            TextError::Template { .. } | TextError::NoTemplate => Self::invalid("messages", reason),
            TextError::Tokenizer { .. } => Self::Internal { reason },
        }
    }
}
