//! A model that runs over local worker processes, and comes back when they are lost.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use yunta_comm::LinkConfig;
use yunta_engine::{
    Engine, EngineStatus, Event, EventSink, Request, RequestId, SamplingParams, SubmitError,
};
use yunta_model::{CacheOptions, Plan};

use crate::ClusterError;
use crate::control::{Assignment, FromWorker, ToWorker};
use crate::gateway::{Gateway, Notice};
use crate::lifecycle::{Action, Input, Lifecycle};
use crate::processes::{Processes, Report, What};
use crate::secret::Secret;

/// What an instance holds memory for, and how it shares its time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Limits {
    /// Sequences that run at once.
    pub sequences: usize,
    /// Tokens per sequence, prompt and output together.
    pub context: usize,
    /// Tokens per step: the size of prefill chunks.
    pub step_tokens: usize,
    /// Requests that may wait beside those that run.
    pub queue: usize,
    /// The KV cache that all sequences share.
    pub cache: CacheOptions,
    /// How much longer a step may take for the sake of a new prompt, beside running streams.
    pub stall_ratio: f64,
    /// Tokens per draft, 0 for no speculation.
    pub draft_tokens: usize,
}

/// A prefix cache on disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefixCache {
    /// Its folder, of this model alone.
    pub folder: PathBuf,
    /// Bytes that each rank may keep there.
    pub bytes_max: u64,
}

/// What makes ranks of one machine resemble several machines, for experiments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Emulation {
    /// Every rank keeps to cores of its own.
    pub pin: bool,
    /// Whatever a rank sends arrives so many microseconds later.
    pub latency_us: u64,
    /// Gigabits per second of each link.
    pub gbps: Option<f64>,
}

/// What to run, and how.
#[derive(Clone, Debug)]
pub struct InstanceConfig {
    /// The program whose `worker` subcommand calls [`run_worker`](crate::run_worker).
    pub program: PathBuf,
    /// The checkpoint.
    pub model: PathBuf,
    /// The cut of the model, one process per rank.
    pub plan: Plan,
    /// What it serves.
    pub limits: Limits,
    /// Compute threads of each rank.
    pub threads: usize,
    /// All arithmetic in f32.
    pub float32: bool,
    /// Bound on each collective within a step.
    pub step_timeout: Duration,
    /// A checkpoint that guesses ahead, on rank 0: of the same vocabulary.
    pub draft_model: Option<PathBuf>,
    /// Where blocks of the KV cache outlive the process, if they shall.
    pub prefix_cache: Option<PrefixCache>,
    /// What links the ranks.
    pub links: LinkConfig,
    /// For experiments.
    pub emulation: Emulation,
}

/// What the manager thread waits for.
enum Message {
    Report(Report),
    Notice(Notice),
    Probe(u64, Result<(), String>),
    /// Asks all ranks for their memory.
    Memory,
    Shutdown,
}

/// What the outside may see of the manager.
#[derive(Clone, Debug, Default)]
struct Public {
    ready: bool,
    /// Set when there will be no further attempt.
    dead: Option<String>,
    state: String,
    epoch: u64,
    /// Per rank, bytes of weights loaded so far in this epoch.
    loaded: Vec<u64>,
    /// Per rank, answers to the last question for memory.
    memory: Vec<Option<u64>>,
}

#[derive(Default)]
struct Watch {
    public: Mutex<Public>,
    changed: Condvar,
}

impl Watch {
    fn lock(&self) -> MutexGuard<'_, Public> {
        self.public.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn update(&self, change: impl FnOnce(&mut Public)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits until `done`, at most until `deadline`.
    fn wait_until(&self, deadline: Instant, mut done: impl FnMut(&Public) -> bool) -> bool {
        let mut public = self.lock();
        while !done(&public) {
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return false };
            let left = left.min(Duration::from_millis(100));
            public = self
                .changed
                .wait_timeout(public, left)
                .map_or_else(|e| e.into_inner().0, |(guard, _)| guard);
        }
        true
    }
}

/// A running model. Dropping it kills its processes.
pub struct Instance {
    config: InstanceConfig,
    gateway: Arc<Gateway>,
    watch: Arc<Watch>,
    messages: Sender<Message>,
    manager: Option<std::thread::JoinHandle<()>>,
    next_id: AtomicU64,
}

impl Instance {
    /// Starts the ranks; see [`Instance::wait_ready`].
    ///
    /// # Errors
    /// [`ClusterError`] if the system refuses a thread, a port or random numbers.
    pub fn start(config: InstanceConfig) -> Result<Self, ClusterError> {
        if config.plan.size() == 0 || config.limits.sequences == 0 || config.limits.context < 2 {
            return Err(ClusterError::Config(
                "an instance needs ranks, slots and a context".into(),
            ));
        }
        let (messages, inbox) = mpsc::channel();
        let notices = Mutex::new(messages.clone());
        let notify = Arc::new(move |notice| {
            let sender = notices.lock().unwrap_or_else(PoisonError::into_inner);
            // The manager is gone when the instance is being dropped.
            let _ = sender.send(Message::Notice(notice));
        });
        let secret = Secret::random()?;
        let gateway = Gateway::open(secret.clone(), notify).map_err(ClusterError::Gateway)?;
        let watch = Arc::new(Watch::default());
        let manager = Manager {
            config: config.clone(),
            secret,
            gateway: Arc::clone(&gateway),
            watch: Arc::clone(&watch),
            messages: messages.clone(),
            processes: None,
            origin: Instant::now(),
        };
        let manager = std::thread::Builder::new()
            .name("instance".to_owned())
            .spawn(move || manager.run(&inbox))
            .map_err(ClusterError::Gateway)?;
        Ok(Self {
            config,
            gateway,
            watch,
            messages,
            manager: Some(manager),
            next_id: AtomicU64::new(1),
        })
    }

    /// Waits until a token has gone through all ranks. `progress` gets the bytes of weights loaded
    /// so far, all ranks together.
    ///
    /// # Errors
    /// [`ClusterError::Start`] if the ranks fail, or `timeout` passes.
    pub fn wait_ready(
        &self,
        timeout: Duration,
        mut progress: impl FnMut(u64),
    ) -> Result<(), ClusterError> {
        let in_time = self.watch.wait_until(Instant::now() + timeout, |p| {
            progress(p.loaded.iter().sum());
            p.ready || p.dead.is_some()
        });
        let public = self.watch.lock();
        match &public.dead {
            Some(reason) => Err(ClusterError::Start(reason.clone())),
            None if in_time => Ok(()),
            None => Err(ClusterError::Start(format!(
                "not ready after {} s: {}",
                timeout.as_secs(),
                public.state
            ))),
        }
    }

    /// The greatest resident set of each rank so far, in bytes; empty if a rank does not answer
    /// within a second.
    pub fn peak_memory(&self) -> Vec<u64> {
        self.watch.update(|p| p.memory = vec![None; self.config.plan.size()]);
        let _ = self.messages.send(Message::Memory);
        let complete = |p: &Public| p.memory.iter().all(Option::is_some);
        if self.watch.wait_until(Instant::now() + Duration::from_secs(1), complete) {
            self.watch.lock().memory.iter().flatten().copied().collect()
        } else {
            Vec::new()
        }
    }
}

impl Engine for Instance {
    fn next_id(&self) -> RequestId {
        RequestId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    fn submit(&self, request: Request, sink: Box<dyn EventSink>) -> Result<(), SubmitError> {
        if let Some(reason) = &self.watch.lock().dead {
            return Err(SubmitError::Unavailable { reason: reason.clone() });
        }
        let (length, context) =
            (request.prompt.len() + request.emitted.len(), self.config.limits.context);
        if length >= context {
            return Err(SubmitError::Invalid {
                reason: format!(
                    "a prompt of {length} tokens leaves no room in a context of {context}"
                ),
            });
        }
        let waiting = self.gateway.open_requests();
        if waiting >= self.config.limits.sequences + self.config.limits.queue {
            return Err(SubmitError::Busy { waiting });
        }
        self.gateway.submit(request, sink);
        Ok(())
    }

    fn cancel(&self, id: RequestId) {
        self.gateway.cancel(id);
    }

    fn status(&self) -> EngineStatus {
        let public = self.watch.lock().clone();
        EngineStatus {
            ready: public.ready,
            state: public.state,
            epoch: public.epoch,
            ranks: self.config.plan.size(),
            open_requests: self.gateway.open_requests(),
        }
    }

    fn context_length(&self) -> usize {
        self.config.limits.context
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        let _ = self.messages.send(Message::Shutdown);
        if let Some(manager) = self.manager.take() {
            // Its panic would have been reported; nothing to do here.
            let _ = manager.join();
        }
        self.gateway.fail_all("the server is shutting down");
        self.gateway.close();
    }
}

/// The thread that owns the processes and carries out what the lifecycle decides.
struct Manager {
    config: InstanceConfig,
    secret: Secret,
    gateway: Arc<Gateway>,
    watch: Arc<Watch>,
    messages: Sender<Message>,
    processes: Option<Processes>,
    origin: Instant,
}

impl Manager {
    fn run(mut self, inbox: &Receiver<Message>) {
        let (mut life, actions) = Lifecycle::new(self.config.plan.size());
        self.carry_out(&mut life, actions);
        loop {
            let wait = match life.deadline() {
                Some(at) => at.saturating_sub(self.origin.elapsed()),
                None => Duration::from_secs(1),
            };
            let inputs = match inbox.recv_timeout(wait) {
                Ok(Message::Shutdown) | Err(RecvTimeoutError::Disconnected) => return,
                Ok(message) => self.inputs(message),
                Err(RecvTimeoutError::Timeout) => None,
            };
            let (epoch, input) = inputs.unwrap_or((life.epoch(), Input::Tick));
            let actions = life.step(self.origin.elapsed(), epoch, input);
            self.carry_out(&mut life, actions);
            let actions = life.step(self.origin.elapsed(), life.epoch(), Input::Tick);
            self.carry_out(&mut life, actions);
        }
    }

    /// What a message means to the lifecycle.
    fn inputs(&mut self, message: Message) -> Option<(u64, Input)> {
        match message {
            Message::Report(Report { epoch, rank, what }) => {
                Some((epoch, self.report(epoch, rank, what)?))
            }
            Message::Notice(Notice::LeaderConnected(epoch)) => {
                Some((epoch, Input::LeaderConnected))
            }
            Message::Notice(Notice::Broken(epoch, how)) => Some((
                epoch,
                Input::Failed(0, format!("its report can't be trusted: {how}"), false),
            )),
            Message::Probe(epoch, Ok(())) => Some((epoch, Input::ProbePassed)),
            Message::Probe(epoch, Err(reason)) => Some((epoch, Input::ProbeFailed(reason))),
            Message::Memory => {
                if let Some(processes) = &mut self.processes {
                    processes.tell_all(&ToWorker::Memory);
                }
                None
            }
            Message::Shutdown => None,
        }
    }

    fn report(&self, epoch: u64, rank: usize, what: What) -> Option<Input> {
        let loaded = |bytes| {
            self.watch.update(|p| {
                if let (true, Some(slot)) = (p.epoch == epoch, p.loaded.get_mut(rank)) {
                    *slot = bytes;
                }
            });
        };
        match what {
            What::Exited(how, signal) => Some(Input::Exited(rank, how, signal)),
            What::Said(FromWorker::Listening(address)) => Some(Input::Listening(rank, address)),
            What::Said(FromWorker::Joined) => Some(Input::Joined(rank)),
            What::Said(FromWorker::Failed { message, peer_lost }) => {
                Some(Input::Failed(rank, message, peer_lost))
            }
            What::Said(FromWorker::Loading { bytes }) => {
                loaded(bytes);
                None
            }
            What::Said(FromWorker::Loaded { weight_bytes }) => {
                loaded(weight_bytes);
                None
            }
            What::Said(FromWorker::Memory { peak_bytes }) => {
                self.watch.update(|p| {
                    if let Some(slot) = p.memory.get_mut(rank) {
                        *slot = Some(peak_bytes);
                    }
                });
                None
            }
        }
    }

    fn carry_out(&mut self, life: &mut Lifecycle, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Spawn(epoch) => {
                    if let Err(e) = self.spawn(epoch) {
                        let failed = Input::SpawnFailed(e.to_string());
                        let more = life.step(self.origin.elapsed(), epoch, failed);
                        self.carry_out(life, more);
                    }
                }
                Action::SendPeers(peers) => {
                    if let Some(processes) = &mut self.processes {
                        processes.tell_all(&ToWorker::Peers(peers));
                    }
                }
                Action::Probe => self.probe(life.epoch()),
                Action::Open => {
                    self.watch.update(|p| {
                        p.ready = true;
                        p.state = "ready".to_owned();
                    });
                    tracing::info!(epoch = life.epoch(), "the model is ready");
                    self.gateway.let_through();
                }
                Action::Lost(cause) => self.lost(&cause),
                Action::GiveUp(cause) => {
                    self.gateway.fail_all(&cause);
                    self.watch.update(|p| p.dead = Some(cause));
                }
            }
        }
    }

    fn spawn(&mut self, epoch: u64) -> Result<(), ClusterError> {
        let ranks = self.config.plan.size();
        self.gateway.begin(epoch);
        self.watch.update(|p| {
            p.epoch = epoch;
            p.loaded = vec![0; ranks];
            p.state = "loading the model".to_owned();
        });
        let assignments = (0..ranks).map(|rank| self.assignment(rank, epoch)).collect();
        let (sender, reports) = mpsc::channel();
        let messages = self.messages.clone();
        std::thread::Builder::new()
            .name("reports".to_owned())
            .spawn(move || {
                for report in reports {
                    if messages.send(Message::Report(report)).is_err() {
                        return;
                    }
                }
            })
            .map_err(ClusterError::Gateway)?;
        let processes = Processes::spawn(&self.config.program, assignments, &sender)?;
        self.processes = Some(processes);
        Ok(())
    }

    fn assignment(&self, rank: usize, epoch: u64) -> Assignment {
        let c = &self.config;
        Assignment {
            rank,
            epoch,
            plan: c.plan.clone(),
            model: c.model.clone(),
            limits: Limits {
                // The gateway refuses what exceeds the bound on both; the leader need not.
                queue: c.limits.queue + c.limits.sequences,
                ..c.limits
            },
            threads: c.threads,
            float32: c.float32,
            secret: self.secret.hex(),
            gateway: self.gateway.address(),
            step_timeout_ms: u64::try_from(c.step_timeout.as_millis()).unwrap_or(u64::MAX),
            draft_model: c.draft_model.clone(),
            prefix_cache: c.prefix_cache.clone(),
            emulation: c.emulation,
            links: c.links.clone(),
        }
    }

    /// Sends one token through all ranks: ready means that it came back.
    fn probe(&self, epoch: u64) {
        let messages = Mutex::new(self.messages.clone());
        let sink = move |event: Event| {
            let outcome = match event {
                Event::Started { .. } | Event::Token { .. } => return true,
                Event::Finished { .. } => Ok(()),
                Event::Failed { message, .. } => Err(message),
            };
            let sender = messages.lock().unwrap_or_else(PoisonError::into_inner);
            sender.send(Message::Probe(epoch, outcome)).is_ok()
        };
        let request = Request {
            sampling: SamplingParams::greedy(),
            // Above all ids that requests will have.
            ..Request::new(RequestId(u64::MAX - epoch), vec![0], 1)
        };
        self.gateway.probe(request, Box::new(sink));
    }

    fn lost(&mut self, cause: &str) {
        // Dropping kills what is left of the ranks.
        self.processes = None;
        self.watch.update(|p| {
            p.ready = false;
            p.state = format!("restarting: {cause}");
        });
        let (kept, ended) = self.gateway.ranks_lost(&format!("the model was interrupted: {cause}"));
        tracing::error!(cause, requests_kept = kept, requests_ended = ended, "ranks lost");
    }
}
