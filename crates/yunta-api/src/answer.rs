//! Answers to generation requests, whole or as a stream of server-sent events. What an output
//! looks like is up to a [`Format`]; everything around it is here.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::Json;
use axum::http::{HeaderName, HeaderValue, header};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio_stream::{Stream, StreamExt};

use crate::config::unix_seconds;
use crate::error::ApiError;
use crate::generation::{Finish, Generation, Job, Ticket, Update, Usage};
use crate::params::{StreamOptions, random_u64};
use crate::server::ApiState;
use crate::text::Delta;

/// The shape of one endpoint's outputs: each method gives an element of `choices`.
pub(crate) trait Format: Send + Unpin + 'static {
    /// Begins the ids of answers.
    const ID_PREFIX: &'static str;
    /// `object` of a whole answer.
    const OBJECT: &'static str;
    /// `object` of a chunk.
    const CHUNK_OBJECT: &'static str;

    /// A complete output.
    fn whole(&self, choice: usize, output: &Delta, finish: Finish) -> Value;
    /// What a stream sends of an output before its first token, if anything.
    fn opening(&self, choice: usize) -> Option<Value>;
    /// What a stream sends for a piece of an output.
    fn piece(&self, choice: usize, delta: &Delta) -> Vec<Value>;
    /// What a stream sends at the end of an output.
    fn closing(&self, choice: usize, finish: Finish) -> Vec<Value>;
}

/// Runs the job and answers in the way it asks for.
pub(crate) async fn respond<F: Format>(
    state: &ApiState,
    job: &Job,
    format: F,
    ticket: Ticket,
) -> Result<Response, ApiError> {
    let generation = Generation::start(state, job, ticket)?;
    let envelope = Envelope::new::<F>(&state.config().model_id);
    match job.params.stream {
        Some(options) => {
            let chunks = Chunks::new(generation, format, envelope, options);
            Ok(stream_response(state, chunks))
        }
        None => Ok(Json(collect(generation, &format, &envelope).await?).into_response()),
    }
}

/// What all parts of an answer have in common.
struct Envelope {
    id: String,
    created: u64,
    model: String,
}

impl Envelope {
    fn new<F: Format>(model: &str) -> Self {
        let id = format!("{}-{:016x}{:016x}", F::ID_PREFIX, random_u64(), random_u64());
        Self { id, created: unix_seconds(), model: model.to_owned() }
    }

    fn around(&self, object: &str, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }
}

fn usage_object(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    })
}

async fn collect<F: Format>(
    mut generation: Generation,
    format: &F,
    envelope: &Envelope,
) -> Result<Value, ApiError> {
    let mut outputs = vec![(Delta::default(), Finish::Length); generation.len()];
    while let Some(update) = generation.next().await {
        let Update { choice, delta, finish } = update?;
        outputs[choice].0.extend(delta);
        outputs[choice].1 = finish.unwrap_or(outputs[choice].1);
    }
    let choices = outputs.iter().enumerate();
    let choices = choices.map(|(i, (output, finish))| format.whole(i, output, *finish)).collect();
    let mut answer = envelope.around(F::OBJECT, choices);
    answer["usage"] = usage_object(generation.usage());
    Ok(answer)
}

fn stream_response<F: Format>(state: &ApiState, chunks: Chunks<F>) -> Response {
    let keep_alive = KeepAlive::new().interval(state.config().keep_alive).text("keep-alive");
    let mut response = Sse::new(chunks).keep_alive(keep_alive).into_response();
    let headers = response.headers_mut();
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Tells nginx not to hold events back.
    let buffering = HeaderName::from_static("x-accel-buffering");
    headers.insert(buffering, HeaderValue::from_static("no"));
    response
}

/// The events of a streamed answer. A stream that succeeds ends with `[DONE]`. One that fails ends
/// with an event `{"error": {..}}`, which clients take for a failure, and without `[DONE]`.
struct Chunks<F> {
    generation: Generation,
    format: F,
    envelope: Envelope,
    options: StreamOptions,
    opened: Vec<bool>,
    /// The few events that one update makes.
    ready: VecDeque<SseEvent>,
    ended: bool,
}

impl<F: Format> Chunks<F> {
    fn new(generation: Generation, format: F, envelope: Envelope, options: StreamOptions) -> Self {
        let opened = vec![false; generation.len()];
        let ready = VecDeque::new();
        Self { generation, format, envelope, options, opened, ready, ended: false }
    }

    fn digest(&mut self, update: Option<Result<Update, ApiError>>) {
        match update {
            Some(Ok(update)) => self.send_update(&update),
            Some(Err(error)) => {
                self.send(&error.body());
                self.ended = true;
            }
            None => {
                self.send_usage();
                self.ready.push_back(SseEvent::default().data("[DONE]"));
                self.ended = true;
            }
        }
    }

    fn send_update(&mut self, update: &Update) {
        let choice = update.choice;
        if !std::mem::replace(&mut self.opened[choice], true)
            && let Some(opening) = self.format.opening(choice)
        {
            self.send_choice(opening);
        }
        if !update.delta.is_empty() {
            let pieces = self.format.piece(choice, &update.delta);
            pieces.into_iter().for_each(|piece| self.send_choice(piece));
        }
        if let Some(finish) = update.finish {
            let last = self.format.closing(choice, finish);
            last.into_iter().for_each(|piece| self.send_choice(piece));
        }
    }

    fn send_choice(&mut self, choice: Value) {
        let mut chunk = self.envelope.around(F::CHUNK_OBJECT, vec![choice]);
        if self.options.include_usage {
            chunk["usage"] = Value::Null;
        }
        self.send(&chunk);
    }

    fn send_usage(&mut self) {
        if self.options.include_usage {
            let mut chunk = self.envelope.around(F::CHUNK_OBJECT, Vec::new());
            chunk["usage"] = usage_object(self.generation.usage());
            self.send(&chunk);
        }
    }

    fn send(&mut self, data: &Value) {
        self.ready.push_back(SseEvent::default().data(data.to_string()));
    }
}

impl<F: Format> Stream for Chunks<F> {
    type Item = Result<SseEvent, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Poll::Ready(Some(Ok(event)));
            }
            if self.ended {
                return Poll::Ready(None);
            }
            let update = ready!(Pin::new(&mut self.generation).poll_next(cx));
            self.digest(update);
        }
    }
}
