//! The life of a worker process: one rank of one epoch.

use std::io::{BufRead, BufReader, Stdout};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use yunta_checkpoint::{Checkpoint, CheckpointError};
use yunta_comm::{GroupConfig, MeshConfig, Outbox};
use yunta_engine::wire::{FromLeader, ToLeader, read_line, write_line};
use yunta_engine::{
    Drafter, Event, GrammarCompiler, GrammarError, GrammarSource, Helpers, PrefixStore, RankError,
    RequestId, Scheduler, SchedulerConfig, follow, lead,
};
use yunta_model::{
    Alone, CacheOptions, GroupRanks, LanguageModel, LoadOptions, ModelError, Plan, Ranks, load,
};
use yunta_tensor::{CpuBackend, InstructionSet, Precision};

use crate::ClusterError;
use crate::control::{Assignment, FromWorker, ToWorker};
use crate::secret::Secret;

/// How long a rank waits for the others to come up: loading is slow from a cold disk.
const JOIN_TIMEOUT: Duration = Duration::from_secs(600);
/// How long a worker waits for its assignment.
const ASSIGNMENT_TIMEOUT: Duration = Duration::from_secs(30);
/// A follower gives an idle leader at least this long between two signs of life.
const IDLE_TIMEOUT_MIN: Duration = Duration::from_secs(5);
/// Messages of the gateway that wait for the leader's next step.
const INBOX: usize = 1024;
/// Activations of a few steps, of the largest models.
const OUTBOX_BYTES: usize = 256 << 20;
/// Progress reports are no closer together than this.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(50);

/// Standard output, shared by the threads of a worker.
#[derive(Clone)]
struct Supervisor(Arc<Mutex<Stdout>>);

impl Supervisor {
    fn tell(&self, message: &FromWorker) -> Result<(), ClusterError> {
        let mut out = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(write_line(&mut *out, message)?)
    }
}

/// What the supervisor sends after the assignment.
enum Signal {
    Assignment(Box<Assignment>),
    Peers(Vec<SocketAddr>),
}

/// Runs a worker on its standard input and output, until its work is done or its supervisor gone.
///
/// The process ends when its input does: a worker never outlives its supervisor.
///
/// # Errors
/// Anything that ended the work; it has been reported on the control channel as well.
pub fn run_worker() -> Result<(), ClusterError> {
    end_with_parent();
    let supervisor = Supervisor(Arc::new(Mutex::new(std::io::stdout())));
    let (sender, signals) = mpsc::channel();
    let replies = supervisor.clone();
    std::thread::Builder::new()
        .name("control".to_owned())
        .spawn(move || {
            listen(&mut BufReader::new(std::io::stdin()), &sender, &replies);
            // The supervisor is gone, or speaks another language.
            std::process::exit(0);
        })
        .map_err(|source| ClusterError::Config(format!("no control thread: {source}")))?;
    let outcome = work(&signals, &supervisor);
    if let Err((message, peer_lost)) = &outcome {
        let _ = supervisor
            .tell(&FromWorker::Failed { message: message.clone(), peer_lost: *peer_lost });
    }
    outcome.map_err(|(message, _)| ClusterError::Config(message))
}

/// Passes on what the supervisor says until the channel ends.
fn listen(from: &mut impl BufRead, signals: &Sender<Signal>, supervisor: &Supervisor) {
    while let Ok(Some(message)) = read_line::<ToWorker>(from) {
        let sent = match message {
            ToWorker::Assignment(a) => signals.send(Signal::Assignment(a)).is_ok(),
            ToWorker::Peers(p) => signals.send(Signal::Peers(p)).is_ok(),
            ToWorker::Memory => {
                supervisor.tell(&FromWorker::Memory { peak_bytes: peak_memory() }).is_ok()
            }
        };
        if !sent {
            return;
        }
    }
}

/// A failure, and whether a peer's loss was its cause.
type Failure = (String, bool);

fn failed(e: impl std::fmt::Display) -> Failure {
    (e.to_string(), false)
}

fn work(signals: &Receiver<Signal>, supervisor: &Supervisor) -> Result<(), Failure> {
    let Ok(Signal::Assignment(a)) = signals.recv_timeout(ASSIGNMENT_TIMEOUT) else {
        return Err(failed("no assignment came from the supervisor"));
    };
    if a.emulation.pin {
        pin(a.rank * a.threads..(a.rank + 1) * a.threads).map_err(failed)?;
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    supervisor.tell(&FromWorker::Listening(address)).map_err(failed)?;
    let mut model = load_model(&a, supervisor)?;
    let weight_bytes = model.weight_bytes();
    supervisor.tell(&FromWorker::Loaded { weight_bytes }).map_err(failed)?;
    let store = prefix_store(&a).map_err(failed)?;
    let mut drafter = drafter(&a).map_err(failed)?;
    let mut ranks = join(&a, listener, signals)?;
    let gateway = if a.rank == 0 { Some(connect(&a)?) } else { None };
    supervisor.tell(&FromWorker::Joined).map_err(failed)?;
    let outcome = match gateway {
        Some(gateway) => {
            let help = Helpers { store: store.as_ref(), drafter: drafter.as_mut() };
            serve(&a, &mut *model, &mut *ranks, &gateway, help)
        }
        None => follow(&mut *model, &mut *ranks, store.as_ref()),
    };
    outcome.map_err(|e| {
        let RankError::Model(yunta_model::ModelError::Comm(comm)) = &e else { return failed(e) };
        (comm.to_string(), comm.is_peer_lost())
    })
}

fn load_model(a: &Assignment, supervisor: &Supervisor) -> Result<Box<dyn LanguageModel>, Failure> {
    let precision = if a.float32 { Precision::Float32 } else { Precision::Fast };
    let backend = CpuBackend::new(a.threads, precision).map_err(failed)?;
    let checkpoint = Checkpoint::open(&a.model).map_err(failed)?;
    let mut last = Instant::now();
    let mut progress = |bytes| {
        if last.elapsed() >= PROGRESS_INTERVAL {
            last = Instant::now();
            // If the supervisor is gone, the control thread ends the process.
            let _ = supervisor.tell(&FromWorker::Loading { bytes });
        }
    };
    let options = LoadOptions {
        plan: &a.plan,
        rank: a.rank,
        cache: a.limits.cache,
        context: a.limits.context,
        progress: &mut progress,
    };
    load(&checkpoint, backend, options).map_err(failed)
}

fn join(
    a: &Assignment,
    listener: TcpListener,
    signals: &Receiver<Signal>,
) -> Result<Box<dyn Ranks>, Failure> {
    if a.plan.size() == 1 {
        return Ok(Box::new(Alone));
    }
    let Ok(Signal::Peers(addresses)) = signals.recv_timeout(JOIN_TIMEOUT) else {
        return Err(failed("the supervisor did not say where the other ranks are"));
    };
    let step_timeout = Duration::from_millis(a.step_timeout_ms);
    let token = Secret::from_hex(&a.secret).map_err(failed)?.bytes();
    let addresses = addresses.into_iter().map(|address| vec![address]).collect();
    // All ranks have their assignment from one supervisor: there is no configuration to compare.
    let mesh = MeshConfig {
        links: a.links.clone(),
        join_timeout: JOIN_TIMEOUT,
        group: GroupConfig {
            epoch: a.epoch,
            timeout: step_timeout,
            spin: GroupConfig::spin_for(a.plan.size() * a.threads),
            outbox: outbox(a),
            ..GroupConfig::default()
        },
        ..MeshConfig::new(a.rank, addresses, token)
    };
    let world = yunta_comm::connect(mesh, vec![listener]).map_err(failed)?;
    let idle_timeout = step_timeout.max(IDLE_TIMEOUT_MIN);
    let ranks = GroupRanks::new(world, &a.plan, step_timeout, idle_timeout).map_err(failed)?;
    Ok(Box::new(ranks))
}

/// Stages of a pipeline go on computing while what they have sent is on its way.
fn outbox(a: &Assignment) -> Option<Outbox> {
    let e = a.emulation;
    let wanted = a.plan.pipeline > 1 || e.latency_us > 0 || e.gbps.is_some();
    wanted.then(|| Outbox {
        bytes_max: OUTBOX_BYTES,
        latency: Duration::from_micros(e.latency_us),
        bandwidth: e.gbps.map(|g| g * 1e9 / 8.0),
    })
}

fn connect(a: &Assignment) -> Result<TcpStream, Failure> {
    let stream = TcpStream::connect_timeout(&a.gateway, Duration::from_secs(10)).map_err(failed)?;
    stream.set_nodelay(true).map_err(failed)?;
    stream.set_write_timeout(Some(Duration::from_secs(10))).map_err(failed)?;
    write_line(&stream, &FromLeader::Hello { secret: a.secret.clone(), epoch: a.epoch })
        .map_err(failed)?;
    Ok(stream)
}

/// Rank 0: takes requests from the gateway and reports tokens to it.
fn serve(
    a: &Assignment,
    model: &mut dyn LanguageModel,
    ranks: &mut dyn Ranks,
    gateway: &TcpStream,
    help: Helpers<'_>,
) -> Result<(), RankError> {
    let mut scheduler = Scheduler::new(SchedulerConfig {
        sequences: a.limits.sequences,
        context: a.limits.context,
        step_tokens: a.limits.step_tokens,
        queue: a.limits.queue,
        vocab: model.vocab(),
        blocks: a.limits.cache.blocks,
        window: model.window(),
        micro_batches: a.plan.pipeline,
        stall_ratio: a.limits.stall_ratio,
        draft_tokens: a.limits.draft_tokens,
    })
    .with_grammars(grammars(a, model.vocab()));
    // Full, it holds up the connection, and that the gateway.
    let (sender, inbox) = mpsc::sync_channel(INBOX);
    let from_gateway = gateway.try_clone().map_err(|e| RankError::Order(e.to_string()))?;
    std::thread::Builder::new()
        .name("gateway".to_owned())
        .spawn(move || {
            let mut from = BufReader::new(from_gateway);
            while let Ok(Some(message)) = read_line::<ToLeader>(&mut from) {
                if sender.send(message).is_err() {
                    return;
                }
            }
        })
        .map_err(|e| RankError::Order(e.to_string()))?;
    let mut report = |id: RequestId, event: Event| {
        // A gateway that is gone closes the inbox too, and that ends the loop.
        let _ = write_line(gateway, &FromLeader::Event { id, event });
    };
    lead(model, ranks, &mut scheduler, &inbox, &mut report, help)
}

/// The draft model, if there is one: whole, on rank 0.
fn drafter(a: &Assignment) -> Result<Option<Drafter>, ModelError> {
    let Some(path) = a.draft_model.as_ref().filter(|_| a.rank == 0) else { return Ok(None) };
    let checkpoint = Checkpoint::open(path)?;
    let (sequences, context) = (a.limits.sequences, a.limits.context);
    let backend = CpuBackend::new(a.threads, Precision::Fast)?;
    let plan = Plan::even(&yunta_model::dims(&checkpoint)?, 1, 1)?;
    let cache =
        CacheOptions { blocks: Drafter::blocks(sequences, context), kind: a.limits.cache.kind };
    let options = LoadOptions { plan: &plan, rank: 0, cache, context, progress: &mut |_| {} };
    let model = load(&checkpoint, backend, options)?;
    Ok(Some(Drafter::new(model, sequences, context)?))
}

/// The rank's place in the prefix cache on disk. Its key names all that the blocks depend on.
fn prefix_store(a: &Assignment) -> Result<Option<PrefixStore>, CheckpointError> {
    let Some(cache) = &a.prefix_cache else { return Ok(None) };
    let weights = Checkpoint::open(&a.model)?.fingerprint()?;
    let version = env!("CARGO_PKG_VERSION");
    let kind = a.limits.cache.kind;
    let instructions = InstructionSet::detect();
    let key = format!("{version} {weights} {kind:?} {instructions:?} {} {:?}", a.float32, a.plan);
    Ok(Some(PrefixStore::new(&cache.folder, &key, a.rank, cache.bytes_max)))
}

/// Compiles grammars for the model's tokenizer, which is read again when they are first wanted.
fn grammars(a: &Assignment, vocab: usize) -> GrammarSource {
    let path = a.model.clone();
    Box::new(move || {
        let unreadable = |e: CheckpointError| GrammarError::Vocabulary { reason: e.to_string() };
        let checkpoint = Checkpoint::open(&path).map_err(unreadable)?;
        let tokenizer = checkpoint.tokenizer().map_err(unreadable)?;
        GrammarCompiler::new(&tokenizer, vocab, &checkpoint.stop_tokens())
    })
}

/// Keeps this process, and the threads that it starts, to some cores.
fn pin(cores: std::ops::Range<usize>) -> std::io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: `set` is plain data; the cores are within its 1024 (else they are left out).
        let outcome = unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            cores.filter(|c| *c < 1024).for_each(|c| libc::CPU_SET(c, &mut set));
            libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
        };
        if outcome == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    }
    #[cfg(not(target_os = "linux"))]
    {
        let reason = format!("cores {cores:?} can't be had for one process on this system");
        Err(std::io::Error::new(std::io::ErrorKind::Unsupported, reason))
    }
}

/// The greatest resident set of this process so far, in bytes.
fn peak_memory() -> u64 {
    // SAFETY: `usage` is plain data, which the call fills.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &raw mut usage);
        usage
    };
    // Linux counts in KiB, macOS in bytes.
    let unit = if cfg!(target_os = "macos") { 1 } else { 1024 };
    u64::try_from(usage.ru_maxrss).unwrap_or(0) * unit
}

/// Asks the kernel to kill this process when its parent dies, so that not even a worker that is
/// stuck in a system call or a kernel is left behind. (The control channel's end does the same for
/// all others, and on other systems.)
fn end_with_parent() {
    #[cfg(target_os = "linux")]
    // SAFETY: sets an attribute of this process.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
    }
}
