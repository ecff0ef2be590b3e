//! The loop of a rank: rank 0 leads (schedules, announces steps, samples), the others follow.

use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use yunta_model::{LanguageModel, ModelError, Ranks, Step};

use crate::wire::ToLeader;
use crate::{Event, RequestId, Scheduler};

/// How often an idle leader tells the others that it is there.
pub const PING_INTERVAL: Duration = Duration::from_millis(200);

/// What rank 0 tells the others to do.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
    /// Forget these slots, then run this step.
    Step { clear: Vec<usize>, step: WireStep },
    /// Nothing to do; the leader lives.
    Ping,
    /// The end: return.
    Stop,
}

/// A [`Step`] in transit.
#[derive(Debug, Serialize, Deserialize)]
struct WireStep {
    /// Slot, position and length of each span.
    spans: Vec<(usize, usize, usize)>,
    tokens: Vec<u32>,
    outputs: Vec<usize>,
}

impl From<&Step> for WireStep {
    fn from(step: &Step) -> Self {
        Self {
            spans: step.spans.iter().map(|s| (s.slot, s.position, s.tokens)).collect(),
            tokens: step.tokens.clone(),
            outputs: step.outputs.clone(),
        }
    }
}

impl From<WireStep> for Step {
    fn from(wire: WireStep) -> Self {
        let span = |(slot, position, tokens)| yunta_model::Span { slot, position, tokens };
        Self {
            spans: wire.spans.into_iter().map(span).collect(),
            tokens: wire.tokens,
            outputs: wire.outputs,
        }
    }
}

/// Why a rank's loop ended before its time.
#[derive(Debug, thiserror::Error)]
pub enum RankError {
    /// The model failed, or a peer was lost.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The leader sent something that is no order: its version differs, or it is no leader.
    #[error("an order of rank 0 could not be read: {0}")]
    Order(String),
}

impl From<yunta_comm::CommError> for RankError {
    fn from(e: yunta_comm::CommError) -> Self {
        Self::Model(ModelError::Comm(e))
    }
}

fn announce(ranks: &mut dyn Ranks, order: &Order) -> Result<(), RankError> {
    let mut bytes = serde_json::to_vec(order).map_err(|e| RankError::Order(e.to_string()))?;
    Ok(ranks.announce(&mut bytes)?)
}

/// Runs one step on all ranks, as rank 0: the logits of its outputs, `[outputs, vocab]`.
///
/// # Errors
/// [`RankError`] if a rank is lost or the step makes no sense.
pub fn run_step(
    model: &mut dyn LanguageModel,
    ranks: &mut dyn Ranks,
    clear: Vec<usize>,
    step: &Step,
) -> Result<Vec<f32>, RankError> {
    for slot in &clear {
        model.clear(*slot);
    }
    announce(ranks, &Order::Step { clear, step: step.into() })?;
    Ok(model.forward(step, ranks)?.unwrap_or_default())
}

/// Tells the other ranks to return from [`follow`].
///
/// # Errors
/// [`RankError`] if a rank is lost.
pub fn stop(ranks: &mut dyn Ranks) -> Result<(), RankError> {
    announce(ranks, &Order::Stop)
}

/// The loop of every rank but 0: returns when rank 0 says so.
///
/// # Errors
/// [`RankError`] if a rank is lost or an order can't be read.
pub fn follow(model: &mut dyn LanguageModel, ranks: &mut dyn Ranks) -> Result<(), RankError> {
    loop {
        let mut bytes = Vec::new();
        ranks.announce(&mut bytes)?;
        match serde_json::from_slice(&bytes).map_err(|e| RankError::Order(e.to_string()))? {
            Order::Ping => {}
            Order::Stop => return Ok(()),
            Order::Step { clear, step } => {
                for slot in clear {
                    model.clear(slot);
                }
                model.forward(&step.into(), ranks)?;
            }
        }
    }
}

/// The loop of rank 0: runs requests from `inbox` until that closes, reporting to `report`.
///
/// # Errors
/// [`RankError`] if a rank is lost; requests under way are not reported then.
pub fn lead(
    model: &mut dyn LanguageModel,
    ranks: &mut dyn Ranks,
    scheduler: &mut Scheduler,
    inbox: &Receiver<ToLeader>,
    report: &mut dyn FnMut(RequestId, Event),
) -> Result<(), RankError> {
    loop {
        if !take_messages(scheduler, inbox, report) {
            return stop(ranks);
        }
        let Some(step) = scheduler.next_step() else {
            match inbox.recv_timeout(PING_INTERVAL) {
                Ok(message) => take(scheduler, message, report),
                Err(RecvTimeoutError::Timeout) => announce(ranks, &Order::Ping)?,
                Err(RecvTimeoutError::Disconnected) => return stop(ranks),
            }
            continue;
        };
        let clear = scheduler.take_freed();
        let logits = run_step(model, ranks, clear, &step)?;
        for (id, event) in scheduler.finish_step(&logits) {
            report(id, event);
        }
    }
}

/// Takes what has arrived; `false` when the inbox is closed.
fn take_messages(
    scheduler: &mut Scheduler,
    inbox: &Receiver<ToLeader>,
    report: &mut dyn FnMut(RequestId, Event),
) -> bool {
    loop {
        match inbox.try_recv() {
            Ok(message) => take(scheduler, message, report),
            Err(TryRecvError::Empty) => return true,
            Err(TryRecvError::Disconnected) => return false,
        }
    }
}

fn take(scheduler: &mut Scheduler, message: ToLeader, report: &mut dyn FnMut(RequestId, Event)) {
    match message {
        ToLeader::Submit(request) => {
            let id = request.id;
            if let Err(e) = scheduler.submit(request) {
                let retriable = matches!(e, crate::SubmitError::Busy { .. });
                report(id, Event::Failed { message: e.to_string(), retriable });
            }
        }
        ToLeader::Cancel(id) => {
            if let Some(event) = scheduler.cancel(id) {
                report(id, event);
            }
        }
    }
}
