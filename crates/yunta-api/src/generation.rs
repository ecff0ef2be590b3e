//! From a prepared job to a stream of updates: submits to the engine, turns its events into text,
//! and ends the engine's work when nobody wants it any more.

use std::collections::HashSet;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_stream::Stream;
use yunta_engine::{Engine, Event, EventSink, Failure, FinishReason, Request, RequestId};

use crate::access_log::RequestLog;
use crate::error::ApiError;
use crate::params::Params;
use crate::server::ApiState;
use crate::text::{Delta, TextAssembler};

/// What is to be generated: `params.n` outputs for each prompt.
pub(crate) struct Job {
    /// Token ids, at least one each.
    pub(crate) prompts: Vec<Vec<u32>>,
    /// `Some(k)`: with log-probabilities.
    pub(crate) logprobs: Option<usize>,
    /// Name of the request's field that holds the prompt, for errors.
    pub(crate) prompt_param: &'static str,
    pub(crate) params: Params,
}

/// What an HTTP request brings along until its answer is complete.
pub(crate) struct Ticket {
    /// One of the places for open requests.
    pub(crate) _place: OwnedSemaphorePermit,
    pub(crate) log: Arc<RequestLog>,
    /// When the answer must be complete.
    pub(crate) deadline: Instant,
    /// Where the request came from.
    pub(crate) client: String,
}

/// Why an output is complete, in OpenAI's words.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Finish {
    Stop,
    Length,
}

impl Finish {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
        }
    }
}

/// News about one output.
pub(crate) struct Update {
    pub(crate) choice: usize,
    pub(crate) delta: Delta,
    pub(crate) finish: Option<Finish>,
}

/// Token counts over all prompts and outputs; a stop token counts as well.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    /// Of these, found in the KV cache.
    pub(crate) cached_tokens: usize,
    pub(crate) completion_tokens: usize,
}

/// The running outputs of one HTTP request, as a stream of [`Update`]s. It ends after every output
/// has finished, or after the first error. Dropping it cancels what still runs.
pub(crate) struct Generation {
    state: ApiState,
    choices: Vec<Choice>,
    unfinished: usize,
    events: mpsc::Receiver<(usize, Event)>,
    deadline: Pin<Box<Sleep>>,
    usage: Usage,
    ticket: Ticket,
    ignore_eos: bool,
}

struct Choice {
    text: TextAssembler,
    tokens: usize,
    /// Present until the output has finished.
    open: Option<OpenRequest>,
}

impl Generation {
    /// Submits all outputs of the job, or none.
    pub(crate) fn start(state: &ApiState, job: &Job, ticket: Ticket) -> Result<Self, ApiError> {
        let requests = engine_requests(state, job, &ticket)?;
        // Each sink sends at most one first event, its `max_tokens` tokens and one last event: the
        // channel is never full.
        let capacity = requests.iter().map(|request| request.max_tokens + 2).sum();
        let (sender, events) = mpsc::channel(capacity);
        let mut choices = Vec::with_capacity(requests.len());
        for request in requests {
            let sink = Sink::new(choices.len(), request.max_tokens, sender.clone());
            let open = OpenRequest::new(state.clone(), request.id);
            state.engine().submit(request, Box::new(sink))?;
            let text = TextAssembler::new(state.text().decoder(), job.params.stops.clone());
            choices.push(Choice { text, tokens: 0, open: Some(open) });
        }
        let prompt_tokens = job.prompts.iter().map(Vec::len).sum();
        let usage = Usage { prompt_tokens, ..Usage::default() };
        ticket.log.count_tokens(usage);
        Ok(Self {
            state: state.clone(),
            unfinished: choices.len(),
            choices,
            events,
            deadline: Box::pin(sleep_until(ticket.deadline)),
            usage,
            ticket,
            ignore_eos: job.params.ignore_eos,
        })
    }

    pub(crate) fn usage(&self) -> Usage {
        self.usage
    }

    /// Number of outputs.
    pub(crate) fn len(&self) -> usize {
        self.choices.len()
    }

    fn handle(&mut self, index: usize, event: Event) -> Result<Option<Update>, ApiError> {
        let Some(choice) = self.choices.get_mut(index).filter(|choice| choice.open.is_some())
        else {
            return Ok(None); // events that were under way when a stop string was met
        };
        let (delta, finish) = match event {
            Event::Started { cached } => {
                self.usage.cached_tokens += cached;
                return Ok(None);
            }
            Event::Token { index: position, token, logprobs } => {
                choice.expect_position(position)?;
                self.usage.completion_tokens += 1;
                self.ticket.log.count_tokens(self.usage);
                if !self.ignore_eos && self.state.text().stop_tokens().contains(&token) {
                    return Ok(None); // not shown; `Finished` follows
                }
                let listed = logprobs.filter(|_| !self.state.text().is_special(token));
                let step = choice.text.push(token, listed)?;
                (step.delta, step.stopped.then_some(Finish::Stop))
            }
            Event::Finished { reason } => {
                choice.settle();
                let step = choice.text.finish()?;
                let finish = if step.stopped { Finish::Stop } else { finish_of(reason)? };
                (step.delta, Some(finish))
            }
            Event::Failed { message, cause } => {
                choice.settle();
                return Err(ApiError::Failed { message, cause });
            }
        };
        if finish.is_some() {
            choice.open = None; // cancels, unless the engine has finished by itself
            self.unfinished -= 1;
        }
        Ok((finish.is_some() || !delta.is_empty()).then_some(Update {
            choice: index,
            delta,
            finish,
        }))
    }

    fn fail(&mut self, error: ApiError) -> ApiError {
        self.unfinished = 0;
        self.choices.iter_mut().for_each(|choice| choice.open = None);
        self.ticket.log.set_error(error.to_string());
        error
    }
}

impl Stream for Generation {
    type Item = Result<Update, ApiError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            if self.unfinished == 0 {
                return Poll::Ready(None);
            }
            if self.deadline.as_mut().poll(cx).is_ready() {
                let error = self.state.request_timeout_error();
                return Poll::Ready(Some(Err(self.fail(error))));
            }
            let outcome = match ready!(self.events.poll_recv(cx)) {
                Some((index, event)) => self.handle(index, event),
                None => Err(ApiError::Internal { reason: "all event sinks are gone".into() }),
            };
            match outcome {
                Ok(Some(update)) => return Poll::Ready(Some(Ok(update))),
                Ok(None) => {}
                Err(error) => return Poll::Ready(Some(Err(self.fail(error)))),
            }
        }
    }
}

impl Choice {
    /// A repeated or missing token would be garbled text: better an error.
    fn expect_position(&mut self, position: usize) -> Result<(), ApiError> {
        if position != self.tokens {
            let reason = format!("token {position} came in place of token {}", self.tokens);
            return Err(ApiError::Internal { reason });
        }
        self.tokens += 1;
        Ok(())
    }

    /// The engine has ended the request: there is nothing to cancel.
    fn settle(&mut self) {
        if let Some(open) = &mut self.open {
            open.settled = true;
        }
    }
}

fn finish_of(reason: FinishReason) -> Result<Finish, ApiError> {
    match reason {
        FinishReason::Stop => Ok(Finish::Stop),
        FinishReason::Length => Ok(Finish::Length),
        FinishReason::Cancelled => Err(ApiError::Unavailable {
            reason: "the server cancelled the request; it is probably shutting down".into(),
        }),
    }
}

fn engine_requests(state: &ApiState, job: &Job, ticket: &Ticket) -> Result<Vec<Request>, ApiError> {
    let left = ticket.deadline.saturating_duration_since(Instant::now());
    let timeout_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
    // Service is fair between the users that a front end names, or between addresses.
    let client = match job.params.client.as_str() {
        "" => &ticket.client,
        user => user,
    };
    let context_tokens = state.engine().context_length();
    let params = &job.params;
    let mut sampling = params.sampling.clone();
    // Only the penalty needs the breakers; each is known by its last token.
    if sampling.dry_multiplier != 0.0 {
        for text in &params.breakers {
            sampling.dry_breakers.extend(state.text().encode(text, false)?.last());
        }
    }
    let stop_tokens = match params.ignore_eos {
        true => Vec::new(),
        false => state.text().stop_tokens().to_vec(),
    };
    let mut requests = Vec::with_capacity(job.prompts.len() * job.params.n);
    for prompt in &job.prompts {
        let room = context_tokens.saturating_sub(prompt.len());
        if room == 0 {
            return Err(ApiError::ContextLengthExceeded {
                prompt_tokens: prompt.len(),
                context_tokens,
                param: job.prompt_param,
            });
        }
        for i in 0..params.n {
            let mut sampling = sampling.clone();
            sampling.seed = sampling.seed.wrapping_add(i as u64);
            requests.push(Request {
                sampling,
                stop_tokens: stop_tokens.clone(),
                client: client.to_owned(),
                priority: params.priority,
                timeout_ms: Some(timeout_ms),
                logprobs: job.logprobs,
                grammar: params.grammar.clone(),
                ..Request::new(
                    state.engine().next_id(),
                    prompt.clone(),
                    params.max_tokens.map_or(room, |asked| asked.min(room)),
                )
            });
        }
    }
    Ok(requests)
}

/// The engine's end of a request's channel. Sends a bounded number of events, the last of which
/// is always an end: an engine that drops it without a word is reported as a failure.
struct Sink {
    index: usize,
    tokens_left: usize,
    started: bool,
    ended: bool,
    events: mpsc::Sender<(usize, Event)>,
}

impl Sink {
    fn new(index: usize, max_tokens: usize, events: mpsc::Sender<(usize, Event)>) -> Self {
        Self { index, tokens_left: max_tokens, started: false, ended: false, events }
    }
}

impl EventSink for Sink {
    fn emit(&mut self, event: Event) -> bool {
        match event {
            _ if self.ended => return false,
            Event::Started { .. } if self.started => return true,
            Event::Started { .. } => self.started = true,
            Event::Token { .. } if self.tokens_left == 0 => return false,
            Event::Token { .. } => self.tokens_left -= 1,
            Event::Finished { .. } | Event::Failed { .. } => self.ended = true,
        }
        self.events.try_send((self.index, event)).is_ok()
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        let message = "the engine gave the request up without saying why".into();
        self.emit(Event::Failed { message, cause: Failure::Retriable });
    }
}

/// The requests that the engine works on for this server.
#[derive(Default)]
pub(crate) struct OpenRequests(Mutex<HashSet<RequestId>>);

impl OpenRequests {
    /// Ends them all; their clients are told so.
    pub(crate) fn cancel_all(&self, engine: &dyn Engine) {
        let ids: Vec<RequestId> = self.lock().iter().copied().collect();
        ids.into_iter().for_each(|id| engine.cancel(id));
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<RequestId>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request known to the engine; dropping it cancels it, unless it is settled.
struct OpenRequest {
    state: ApiState,
    id: RequestId,
    settled: bool,
}

impl OpenRequest {
    fn new(state: ApiState, id: RequestId) -> Self {
        state.open_requests().lock().insert(id);
        Self { state, id, settled: false }
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        self.state.open_requests().lock().remove(&self.id);
        if !self.settled {
            self.state.engine().cancel(self.id);
        }
    }
}
