//! An engine that plays a script.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use yunta_engine::{
    Engine, EngineStatus, Event, EventSink, Failure, FinishReason, Request, RequestId, SubmitError,
    TokenLogprobs,
};

use super::byte_text::EOS;

/// No wait of a test takes longer.
pub const PATIENCE: Duration = Duration::from_secs(10);

/// One thing the engine does for a request.
#[derive(Clone)]
pub enum Act {
    /// Draws these tokens, one by one.
    Tokens(Vec<u32>),
    /// Waits for the request to be cancelled.
    AwaitCancel,
    /// Waits that long.
    Pause(Duration),
    /// Ends.
    Finish(FinishReason),
    /// Gives up.
    Fail { cause: Failure },
    /// Counts a token that it does not report.
    Skip,
    /// Drops the sink without a word.
    Vanish,
}

/// Draws the bytes of `text`.
pub fn say(text: &str) -> Act {
    Act::Tokens(text.bytes().map(u32::from).collect())
}

/// Says `text` and ends with a stop token.
pub fn answer(text: &str) -> Vec<Act> {
    vec![say(text), Act::Tokens(vec![EOS]), Act::Finish(FinishReason::Stop)]
}

type Script = dyn Fn(&Request) -> Vec<Act> + Send + Sync;

/// See the module.
pub struct ScriptedEngine {
    script: Box<Script>,
    shared: Arc<Shared>,
    next_id: AtomicU64,
    /// 100 tokens, unless a test needs more.
    pub context: AtomicUsize,
    pub ready: AtomicBool,
    pub refusal: Mutex<Option<SubmitError>>,
    pub requests: Mutex<Vec<Request>>,
}

#[derive(Default)]
struct Shared {
    cancelled: Mutex<HashSet<RequestId>>,
    changed: Condvar,
}

impl ScriptedEngine {
    pub fn new(script: impl Fn(&Request) -> Vec<Act> + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self {
            script: Box::new(script),
            shared: Arc::default(),
            next_id: AtomicU64::new(1),
            context: AtomicUsize::new(100),
            ready: AtomicBool::new(true),
            refusal: Mutex::new(None),
            requests: Mutex::default(),
        })
    }

    /// Answers every request alike.
    pub fn answering(text: &'static str) -> Arc<Self> {
        Self::new(move |_| answer(text))
    }

    /// Waits until the i-th request is cancelled; `false` if that does not happen.
    pub fn was_cancelled(&self, i: usize) -> bool {
        let id = self.requests.lock().unwrap()[i].id;
        self.shared.await_cancel(id)
    }

    /// The only request so far.
    pub fn request(&self) -> Request {
        let requests = self.requests.lock().unwrap();
        assert_eq!(requests.len(), 1);
        requests[0].clone()
    }

    /// Waits for the first request.
    pub fn await_request(&self) {
        let until = Instant::now() + PATIENCE;
        while self.requests.lock().unwrap().is_empty() {
            assert!(Instant::now() < until, "no request came");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Shared {
    fn await_cancel(&self, id: RequestId) -> bool {
        let cancelled = self.cancelled.lock().unwrap();
        let waited = self.changed.wait_timeout_while(cancelled, PATIENCE, |ids| !ids.contains(&id));
        waited.unwrap().0.contains(&id)
    }
}

impl Engine for ScriptedEngine {
    fn next_id(&self) -> RequestId {
        RequestId(self.next_id.fetch_add(1, SeqCst))
    }

    fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<(), SubmitError> {
        if let Some(refusal) = self.refusal.lock().unwrap().clone() {
            return Err(refusal);
        }
        let acts = (self.script)(&request);
        self.requests.lock().unwrap().push(request.clone());
        let shared = self.shared.clone();
        std::thread::spawn(move || play(&request, acts, sink, &shared));
        Ok(())
    }

    fn cancel(&self, id: RequestId) {
        self.shared.cancelled.lock().unwrap().insert(id);
        self.shared.changed.notify_all();
    }

    fn status(&self) -> EngineStatus {
        let ready = self.ready.load(SeqCst);
        let state = if ready { "serving" } else { "loading" }.to_owned();
        EngineStatus { ready, state, epoch: 1, ranks: 2, open_requests: 0 }
    }

    fn context_length(&self) -> usize {
        self.context.load(SeqCst)
    }
}

fn play(request: &Request, acts: Vec<Act>, mut sink: Box<dyn EventSink>, shared: &Shared) {
    let mut index = 0;
    for act in acts {
        match act {
            Act::Tokens(tokens) => {
                for token in tokens {
                    if index == request.max_tokens {
                        sink.emit(Event::Finished { reason: FinishReason::Length });
                        return;
                    }
                    let logprobs = request.logprobs.map(|k| logprobs(token, k));
                    sink.emit(Event::Token { index, token, logprobs });
                    index += 1;
                }
            }
            Act::AwaitCancel => {
                shared.await_cancel(request.id);
                sink.emit(Event::Finished { reason: FinishReason::Cancelled });
                return;
            }
            Act::Pause(time) => std::thread::sleep(time),
            Act::Finish(reason) => {
                sink.emit(Event::Finished { reason });
            }
            Act::Fail { cause } => {
                let message = "rank 1 was lost during all_reduce".into();
                sink.emit(Event::Failed { message, cause });
            }
            Act::Skip => index += 1,
            Act::Vanish => return,
        }
    }
}

/// The token itself at -0.5, then the ids that follow it.
fn logprobs(token: u32, k: usize) -> TokenLogprobs {
    let top = (0..k as u32).map(|i| ((token + i) % 256, -0.5 - i as f32)).collect();
    TokenLogprobs { chosen: -0.5, top }
}
