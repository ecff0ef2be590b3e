//! Routes, admission, and the life of the server.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{ConnectInfo, DefaultBodyLimit, Extension, FromRequest, Path, Request, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use axum::{Json, Router};
use serde_json::{Map, Value, json};
use socket2::TcpKeepalive;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, sleep, timeout, timeout_at};
use yunta_engine::Engine;

use crate::access_log::{RequestLog, log_request};
use crate::answer::{Format, respond};
use crate::config::ServerConfig;
use crate::cors::allow_local_origins;
use crate::error::ApiError;
use crate::generation::{Job, OpenRequests, Ticket};
use crate::params::unknown_model;
use crate::text_model::TextModel;
use crate::{chat, completions};

/// How long clients have to read the last words of requests that were cancelled at shutdown.
const LAST_WORDS: Duration = Duration::from_secs(1);

const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

/// What all requests share. Clones are cheap and refer to the same state.
#[derive(Clone)]
pub struct ApiState(Arc<Shared>);

struct Shared {
    config: ServerConfig,
    engine: Arc<dyn Engine>,
    text: Arc<dyn TextModel>,
    places: Arc<Semaphore>,
    open: OpenRequests,
}

impl ApiState {
    /// Brings settings, engine and text model together. `engine` and `text` must be of the same
    /// model.
    pub fn new(config: ServerConfig, engine: Arc<dyn Engine>, text: Arc<dyn TextModel>) -> Self {
        let places = config.max_open_requests.min(Semaphore::MAX_PERMITS);
        let places = Arc::new(Semaphore::new(places));
        Self(Arc::new(Shared { config, engine, text, places, open: OpenRequests::default() }))
    }

    pub(crate) fn config(&self) -> &ServerConfig {
        &self.0.config
    }

    pub(crate) fn engine(&self) -> &dyn Engine {
        self.0.engine.as_ref()
    }

    pub(crate) fn text(&self) -> &Arc<dyn TextModel> {
        &self.0.text
    }

    pub(crate) fn open_requests(&self) -> &OpenRequests {
        &self.0.open
    }

    pub(crate) fn request_timeout_error(&self) -> ApiError {
        ApiError::RequestTimeout { seconds: self.config().request_timeout.as_secs() }
    }

    fn request_deadline(&self) -> Instant {
        let now = Instant::now();
        // A sum beyond what the clock can hold means no bound; a year is none either.
        now.checked_add(self.config().request_timeout).unwrap_or_else(|| now + YEAR)
    }

    fn admit(&self) -> Result<OwnedSemaphorePermit, ApiError> {
        self.0.places.clone().try_acquire_owned().map_err(|_| {
            let open = self.config().max_open_requests;
            let reason =
                format!("{open} requests are open, and no more are taken: try again later");
            ApiError::Busy { reason }
        })
    }
}

/// The routes, with logging, authentication and limits.
pub fn router(state: ApiState) -> Router {
    let v1 = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/chat/completions", post(chat_completions))
        .route("/v1/completions", post(text_completions))
        .route_layer(from_fn_with_state(state.clone(), require_key));
    Router::new()
        .route("/", get(welcome))
        .route("/health", get(health))
        .merge(v1)
        .fallback(unknown_route)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(DefaultBodyLimit::max(state.config().max_body_bytes))
        .layer(from_fn(log_request))
        .layer(from_fn(allow_local_origins))
        .with_state(state)
}

/// Serves until `shutdown` is ready, then takes no more connections and lets open requests go on
/// for [`ServerConfig::drain_timeout`]. What is still open then is cancelled, and its clients are
/// told so. Returns at the latest a second later; connections that are stuck even then are left
/// to the runtime.
///
/// # Errors
/// If the listener fails.
///
/// # Cancel safety
/// Dropping the future stops accepting; open connections go on.
pub async fn serve(
    listener: TcpListener,
    state: ApiState,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    let (draining_sender, draining) = oneshot::channel();
    let signal = async move {
        shutdown.await;
        let _ = draining_sender.send(()); // nobody listens if the server has failed
    };
    let client_timeout = state.config().client_timeout;
    let listener = listener.tap_io(move |stream| {
        if let Err(error) = set_socket_options(stream, client_timeout) {
            tracing::debug!(%error, "a connection goes without its socket options");
        }
    });
    let routes = router(state.clone()).into_make_service_with_connect_info::<SocketAddr>();
    let server = axum::serve(listener, routes).with_graceful_shutdown(signal);
    let bound = async {
        if draining.await.is_err() {
            std::future::pending::<()>().await; // the server ended by itself
        }
        sleep(state.config().drain_timeout).await;
        state.open_requests().cancel_all(state.engine());
        sleep(LAST_WORDS).await;
    };
    tokio::select! {
        result = server.into_future() => result,
        () = bound => Ok(()),
    }
}

fn set_socket_options(stream: &TcpStream, client_timeout: Duration) -> io::Result<()> {
    // Tokens are small packets that nobody wants to wait for.
    stream.set_nodelay(true)?;
    let socket = socket2::SockRef::from(stream);
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(client_timeout))?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(client_timeout))?;
    Ok(())
}

async fn welcome(State(state): State<ApiState>) -> String {
    let model = &state.config().model_id;
    format!(
        "Yunta serves {model}.\nThe OpenAI-compatible API is under /v1, the state at /health.\n"
    )
}

async fn health(State(state): State<ApiState>) -> Response {
    let engine = state.engine().status();
    let (code, status) = match engine.ready {
        true => (StatusCode::OK, "ok"),
        false => (StatusCode::SERVICE_UNAVAILABLE, "unavailable"),
    };
    let body = json!({
        "status": status,
        "model": state.config().model_id,
        "ready": engine.ready,
        "state": engine.state,
        "epoch": engine.epoch,
        "ranks": engine.ranks,
        "open_requests": engine.open_requests,
    });
    (code, Json(body)).into_response()
}

async fn models(State(state): State<ApiState>) -> Json<Value> {
    let data: Vec<Value> = state.config().names().map(|name| model_object(&state, name)).collect();
    Json(json!({"object": "list", "data": data}))
}

async fn model(
    State(state): State<ApiState>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    match state.config().answers_to(&id) {
        true => Ok(Json(model_object(&state, &id))),
        false => Err(unknown_model(&id, state.config())),
    }
}

fn model_object(state: &ApiState, name: &str) -> Value {
    json!({
        "id": name,
        "object": "model",
        "created": state.config().created,
        "owned_by": "yunta",
        "context_length": state.engine().context_length(),
    })
}

async fn chat_completions(
    State(state): State<ApiState>,
    Extension(log): Extension<Arc<RequestLog>>,
    request: Request,
) -> Result<Response, ApiError> {
    generate(state, log, request, chat::prepare).await
}

async fn text_completions(
    State(state): State<ApiState>,
    Extension(log): Extension<Arc<RequestLog>>,
    request: Request,
) -> Result<Response, ApiError> {
    generate(state, log, request, completions::prepare).await
}

type Prepare<F> = fn(&ApiState, &Map<String, Value>) -> Result<(Job, F), ApiError>;

async fn generate<F: Format>(
    state: ApiState,
    log: Arc<RequestLog>,
    request: Request,
    prepare: Prepare<F>,
) -> Result<Response, ApiError> {
    let deadline = state.request_deadline();
    let peer = request.extensions().get::<ConnectInfo<SocketAddr>>();
    let client = peer.map_or_else(String::new, |p| p.0.ip().to_string());
    let ticket = Ticket { _place: state.admit()?, log, deadline, client };
    let body = read_body(state.config(), request).await?;
    // The ticket goes along, so that work whose client has left still takes up its place.
    let preparing = {
        let state = state.clone();
        tokio::task::spawn_blocking(move || {
            let prepared = parse_object(&body).and_then(|object| prepare(&state, &object));
            (prepared, ticket)
        })
    };
    let done = timeout_at(deadline, preparing).await.map_err(|_| state.request_timeout_error())?;
    let (prepared, ticket) =
        done.map_err(|error| ApiError::Internal { reason: error.to_string() })?;
    let (job, format) = prepared?;
    respond(&state, &job, format, ticket).await
}

async fn read_body(config: &ServerConfig, request: Request) -> Result<Bytes, ApiError> {
    // A page from elsewhere could post a form or plain text here without asking; JSON it can't.
    let content_type = request.headers().get(header::CONTENT_TYPE);
    let content_type = content_type.and_then(|value| value.to_str().ok()).unwrap_or_default();
    let media_type = content_type.split(';').next().unwrap_or_default().trim();
    if !media_type.eq_ignore_ascii_case("application/json") {
        return Err(ApiError::UnsupportedMediaType);
    }
    let arrived = timeout(config.body_timeout, Bytes::from_request(request, &())).await;
    let arrived =
        arrived.map_err(|_| ApiError::BodyTimeout { seconds: config.body_timeout.as_secs() })?;
    arrived.map_err(|error| match error.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            ApiError::BodyTooLarge { limit_bytes: config.max_body_bytes }
        }
        _ => ApiError::UnreadableBody { reason: error.to_string() },
    })
}

fn parse_object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    serde_json::from_slice(body).map_err(|e| ApiError::InvalidJson { reason: e.to_string() })
}

async fn require_key(
    State(state): State<ApiState>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let Some(key) = &state.config().api_key else { return Ok(next.run(request).await) };
    let header = request.headers().get(header::AUTHORIZATION).map(|value| value.as_bytes());
    let candidate = header.and_then(|value| value.split_at_checked(b"Bearer ".len()));
    match candidate {
        Some((scheme, candidate)) if scheme.eq_ignore_ascii_case(b"Bearer ") => {
            match key.matches(candidate) {
                true => Ok(next.run(request).await),
                false => Err(ApiError::WrongApiKey),
            }
        }
        _ => Err(ApiError::MissingApiKey),
    }
}

async fn unknown_route(method: Method, uri: Uri) -> ApiError {
    ApiError::UnknownRoute { method: method.to_string(), path: uri.path().to_owned() }
}

async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    ApiError::MethodNotAllowed { method: method.to_string(), path: uri.path().to_owned() }
}
