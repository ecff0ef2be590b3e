//! Every collective, over every transport, with every fault: a typed error on every rank within the
//! bound, or nothing lost; and nothing left behind.
//!
//! Ranks 0 and 1 are threads of the test, rank 2 is a process of its own, which can be killed and
//! stopped. Its TCP connections go through a relay, which can be cut, frozen, slowed, and made to
//! lose, double and damage what passes.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use yunta_comm::verbs::{QueueKind, VerbsConfig};
use yunta_comm::{
    CommError, Group, GroupConfig, LinkConfig, MeshConfig, ReduceOp, Transport, connect,
};
use yunta_verbs_emulator::{CUT, Config, FOLDER, library};

const BOUND: Duration = Duration::from_millis(300);
/// What a busy machine may add.
const MARGIN: Duration = Duration::from_secs(3);
const SIZE: usize = 3;
/// Rounds where nothing is lost: long enough for the fault to come and go.
const ROUNDS: usize = 120;
/// The environment variable that makes the test binary rank 2.
const CHILD: &str = "YUNTA_TEST_RANK";

type Collective = (&'static str, fn(&mut Group, usize) -> Result<bool, CommError>);

/// Each with whether its result is right.
const COLLECTIVES: [Collective; 8] = [
    ("all_reduce", |g, round| reduce(g, round, 9)),
    ("large all_reduce", |g, round| reduce(g, round, 60_000)),
    ("all_gather", |g, round| {
        let mut all = [0; SIZE];
        g.all_gather(&[(g.rank() + round) as u8], &[1; SIZE], &mut all)?;
        Ok(all.iter().enumerate().all(|(rank, v)| *v == (rank + round) as u8))
    }),
    ("reduce_scatter", |g, round| {
        let mut own = [0u32];
        g.reduce_scatter(&[round as u32, 1, 2], &[1; SIZE], &mut own, ReduceOp::Sum)?;
        Ok(own[0] == 3 * [round as u32, 1, 2][g.rank()])
    }),
    ("broadcast", |g, round| {
        let mut x = [if g.rank() == 2 { round as u32 } else { 0 }; 40];
        g.broadcast(&mut x, 2)?;
        Ok(x == [round as u32; 40])
    }),
    ("broadcast_bytes", |g, round| {
        let mut x = if g.rank() == 2 { vec![round as u8; round % 50] } else { Vec::new() };
        g.broadcast_bytes(&mut x, 2)?;
        Ok(x == vec![round as u8; round % 50])
    }),
    ("send/recv", |g, round| {
        if g.rank() == 2 {
            g.send(&[round as u32; 5], 0)?;
            g.send(&[round as u32; 5], 1)?;
            return Ok(true);
        }
        let mut x = [0; 5];
        g.recv(&mut x, 2)?;
        Ok(x == [round as u32; 5])
    }),
    ("barrier", |g, _| g.barrier().map(|()| true)),
];

/// Those in which rank 2 only sends.
const ONE_WAY: std::ops::Range<usize> = 4..7;

fn reduce(g: &mut Group, round: usize, len: usize) -> Result<bool, CommError> {
    let mut x = vec![(g.rank() * 10 + round) as f32; len];
    g.all_reduce(&mut x, ReduceOp::Sum)?;
    Ok(x.iter().all(|v| *v == (30 + 3 * round) as f32))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Over {
    Shm,
    Tcp,
    Tls,
    Rdma,
}

impl Over {
    fn links(self) -> LinkConfig {
        let transport = match self {
            Self::Shm => Transport::Shm,
            Self::Tcp | Self::Tls => Transport::Tcp,
            Self::Rdma => Transport::Verbs,
        };
        let library = Some(library().unwrap());
        LinkConfig {
            transport: Some(transport),
            is_encrypted: self == Self::Tls,
            verbs: VerbsConfig { library, kind: QueueKind::Unreliable, ..VerbsConfig::default() },
            ..LinkConfig::default()
        }
    }
}

fn join(rank: usize, addresses: Vec<SocketAddr>, over: Over, listener: TcpListener) -> Group {
    let addresses = addresses.into_iter().map(|a| vec![a]).collect();
    let config = MeshConfig {
        links: over.links(),
        join_timeout: Duration::from_secs(20),
        group: GroupConfig { timeout: BOUND, epoch: 9, ..GroupConfig::default() },
        ..MeshConfig::new(rank, addresses, [7; 32])
    };
    connect(config, vec![listener]).unwrap()
}

/// Runs a collective over and over; the error that ends it.
fn run(group: &mut Group, collective: usize, rounds: usize) -> Result<(), CommError> {
    let (name, work) = COLLECTIVES[collective];
    for round in 0..rounds {
        assert!(work(group, round)?, "{name} has a wrong result in round {round}");
        thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Rank 2, in its own process.
#[test]
#[ignore = "started by the other tests"]
fn child() {
    let Ok(text) = std::env::var(CHILD) else { return };
    let mut words = text.split(' ');
    let mut word = || words.next().unwrap();
    let over = match word() {
        "Shm" => Over::Shm,
        "Tcp" => Over::Tcp,
        "Tls" => Over::Tls,
        _ => Over::Rdma,
    };
    let (collective, rounds) = (word().parse().unwrap(), word().parse().unwrap());
    let addresses = [word(), word(), word()].map(|a| a.parse().unwrap()).to_vec();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut group = join(2, addresses, over, listener);
    println!("\nrank 2: joined");
    match run(&mut group, collective, rounds) {
        Ok(()) => println!("\nrank 2: well"),
        Err(e) => println!("\nrank 2: {e}"),
    }
}

struct Process {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Process {
    fn start(over: Over, collective: usize, rounds: usize, addresses: &[SocketAddr]) -> Self {
        let addresses: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["child", "--exact", "--ignored", "--nocapture"])
            .env(CHILD, format!("{over:?} {collective} {rounds} {}", addresses.join(" ")))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines }
    }

    /// What it says next.
    fn said(&mut self) -> String {
        let line = self.lines.by_ref().map_while(Result::ok).find(|l| l.starts_with("rank 2: "));
        line.map_or_else(String::new, |l| l["rank 2: ".len()..].to_owned())
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.child.id().to_string()]).status();
        assert!(sent.unwrap().success());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Passing {
    Whole,
    Cut,
    Frozen,
    Slow,
    Crawling,
    Losing,
    Doubling,
    Damaging,
}

const PASSINGS: [Passing; 8] = [
    Passing::Whole,
    Passing::Cut,
    Passing::Frozen,
    Passing::Slow,
    Passing::Crawling,
    Passing::Losing,
    Passing::Doubling,
    Passing::Damaging,
];

/// Passes connections on, as it is told.
struct Relay {
    address: SocketAddr,
    how: Arc<AtomicU8>,
    sockets: Arc<Mutex<Vec<TcpStream>>>,
    threads: Vec<JoinHandle<()>>,
}

impl Relay {
    /// For one connection to `to`.
    fn new(to: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let how = Arc::new(AtomicU8::new(0));
        let sockets = Arc::new(Mutex::new(Vec::new()));
        let (passing, kept) = (Arc::clone(&how), Arc::clone(&sockets));
        let accept = thread::spawn(move || {
            let near = listener.accept().unwrap().0;
            let far = TcpStream::connect(to).unwrap();
            let clone = |s: &TcpStream| s.try_clone().unwrap();
            kept.lock().unwrap().extend([clone(&near), clone(&far)]);
            let back = {
                let (from, to, how) = (clone(&far), clone(&near), Arc::clone(&passing));
                thread::spawn(move || pass(from, to, &how))
            };
            pass(near, far, &passing);
            back.join().unwrap();
        });
        Self { address, how, sockets, threads: vec![accept] }
    }

    fn set(&self, how: Passing) {
        self.how.store(how as u8, Ordering::Relaxed);
        if how == Passing::Cut {
            self.close();
        }
    }

    fn close(&self) {
        for socket in self.sockets.lock().unwrap().drain(..) {
            let _ = socket.shutdown(Shutdown::Both);
        }
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.set(Passing::Cut);
        self.threads.drain(..).for_each(|t| t.join().unwrap());
    }
}

/// Faults of the stream happen once; then it passes as it is.
fn pass(mut from: TcpStream, mut to: TcpStream, how: &AtomicU8) {
    let _ = (from.set_nodelay(true), to.set_nodelay(true));
    let mut buffer = vec![0; 1 << 16];
    while let Ok(n) = from.read(&mut buffer) {
        let once = |fault: Passing| {
            let (fault, whole) = (fault as u8, Passing::Whole as u8);
            how.compare_exchange(fault, whole, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        };
        let mut bytes = buffer[..n].to_vec();
        match PASSINGS[usize::from(how.load(Ordering::Relaxed))] {
            Passing::Whole | Passing::Cut => {}
            Passing::Frozen => {
                while how.load(Ordering::Relaxed) == Passing::Frozen as u8 {
                    thread::sleep(Duration::from_millis(5));
                }
            }
            Passing::Slow => thread::sleep(Duration::from_millis(3)),
            Passing::Crawling => {
                let end = Instant::now() + 3 * BOUND;
                while Instant::now() < end && how.load(Ordering::Relaxed) != Passing::Cut as u8 {
                    thread::sleep(Duration::from_millis(5));
                }
            }
            Passing::Losing if once(Passing::Losing) => drop(bytes.drain(..n.min(3))),
            Passing::Doubling if once(Passing::Doubling) => bytes.extend_from_slice(&buffer[..n]),
            Passing::Damaging if once(Passing::Damaging) => {
                // The last few are padding.
                if let Some(byte) = bytes.get_mut(n / 2) {
                    *byte ^= 4;
                }
            }
            Passing::Losing | Passing::Doubling | Passing::Damaging => {}
        }
        if n == 0 || to.write_all(&bytes).is_err() {
            break;
        }
    }
    let _ = (to.shutdown(Shutdown::Both), from.shutdown(Shutdown::Both));
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    Killed,
    Stopped,
    /// For less than the bound.
    Paused,
    Link(Passing),
    /// A cable of RDMA, which says nothing.
    CableOut,
    /// For less than the bound.
    CableOutShortly,
    /// Of frames: lost, doubled, damaged.
    Frames(f64, f64, f64),
}

impl Fault {
    fn is_survived(self) -> bool {
        matches!(
            self,
            Self::Paused | Self::Link(Passing::Slow) | Self::CableOutShortly | Self::Frames(..)
        )
    }

    fn is_of_the_stream(self) -> bool {
        let of_the_stream = [Passing::Losing, Passing::Doubling, Passing::Damaging];
        matches!(self, Self::Link(how) if of_the_stream.contains(&how))
    }

    /// Whether an error is one that this fault may cause at first hand.
    fn causes(self, e: &CommError) -> bool {
        match self {
            Self::Killed | Self::Link(Passing::Cut) => matches!(e, CommError::PeerLost { .. }),
            Self::Stopped | Self::CableOut | Self::Link(Passing::Frozen | Passing::Crawling) => {
                matches!(e, CommError::Timeout { .. })
            }
            Self::Link(_) => matches!(
                e,
                CommError::Protocol { .. } | CommError::Mismatch { .. } | CommError::Timeout { .. }
            ),
            _ => false,
        }
    }
}

/// What this process holds: descriptors and threads.
fn held() -> (usize, usize) {
    let count = |path: &str| std::fs::read_dir(path).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

/// Time on processors so far, of all threads.
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = text.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
    Duration::from_millis(ticks * 10)
}

fn resident_bytes() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    text.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

/// One cell of the table.
fn cell(over: Over, collective: usize, fault: Fault, devices: &Path) {
    let name = format!("{} over {over:?}, {fault:?}", COLLECTIVES[collective].0);
    eprintln!("{name}");
    if let Fault::Frames(loss, duplication, corruption) = fault {
        Config { loss, duplication, corruption, ..Config::default() }.save(devices).unwrap();
    }
    let rounds = if fault.is_survived() { ROUNDS } else { 100 * ROUNDS };
    let listeners = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    let own: Vec<SocketAddr> = listeners.iter().map(|l| l.local_addr().unwrap()).collect();
    let nowhere: SocketAddr = "127.0.0.1:1".parse().unwrap();
    let relays: Vec<Relay> = own.iter().map(|a| Relay::new(*a)).collect();
    let mut third =
        Process::start(over, collective, rounds, &[relays[0].address, relays[1].address, nowhere]);
    let ranks: Vec<_> = listeners
        .into_iter()
        .enumerate()
        .map(|(rank, listener)| {
            let addresses = [&own[..], &[nowhere]].concat();
            thread::spawn(move || {
                let mut group = join(rank, addresses, over, listener);
                let outcome = run(&mut group, collective, rounds);
                if outcome.is_err() {
                    assert_eq!(group.barrier(), outcome, "an error is final");
                }
                (outcome, Instant::now(), group)
            })
        })
        .collect();
    assert_eq!(third.said(), "joined", "{name}");
    thread::sleep(Duration::from_millis(20));
    let start = Instant::now();
    match fault {
        Fault::Killed => third.child.kill().unwrap(),
        Fault::Stopped => third.signal("-STOP"),
        Fault::Paused => {
            third.signal("-STOP");
            thread::sleep(BOUND / 4);
            third.signal("-CONT");
        }
        Fault::Link(how) => relays.iter().for_each(|r| r.set(how)),
        Fault::CableOut => std::fs::write(devices.join(CUT), b"").unwrap(),
        Fault::CableOutShortly => {
            std::fs::write(devices.join(CUT), b"").unwrap();
            thread::sleep(BOUND / 4);
            std::fs::remove_file(devices.join(CUT)).unwrap();
        }
        Fault::Frames(..) => {}
    }
    let ends: Vec<_> = ranks.into_iter().map(|r| r.join().unwrap()).collect();
    if fault.is_survived() {
        for (outcome, ..) in &ends {
            assert_eq!(*outcome, Ok(()), "{name}");
        }
        assert_eq!(third.said(), "well", "{name}");
    } else {
        let errors: Vec<&CommError> =
            ends.iter().map(|(outcome, ..)| outcome.as_ref().unwrap_err()).collect();
        for (_, end, _) in &ends {
            let after = end.saturating_duration_since(start);
            assert!(after < BOUND + MARGIN, "{name}: told after {after:?}");
        }
        // Who notices first tells the others, and may be rank 2 itself if the stream was wrong.
        let is_first = |e: &&&CommError| fault.causes(e);
        let is_told =
            |e: &CommError| matches!(e, CommError::PeerAborted { .. } | CommError::PeerLost { .. });
        let first: Vec<&&CommError> = errors.iter().filter(is_first).collect();
        assert!(!first.is_empty() || fault.is_of_the_stream(), "{name}: {errors:?}");
        assert!(errors.iter().all(|e| fault.causes(e) || is_told(e)), "{name}: {errors:?}");
        // One that waits for another that waits for rank 2 names that one.
        let is_named = first.iter().any(|e| e.to_string().contains("rank 2"));
        let names_another = first.is_empty() || fault == Fault::CableOut;
        assert!(is_named || names_another, "{name}: {errors:?}");
        // Nobody spins: neither those that hold a failed group, nor what serves its links.
        if collective == 0 {
            let before = processor_time();
            thread::sleep(Duration::from_millis(400));
            let spent = processor_time() - before;
            assert!(spent < Duration::from_millis(100), "{name}: {spent:?} of 400 ms");
        }
        // One that only sends over a link that takes all and delivers nothing is told when the link
        // has no more room, which takes too long here.
        let is_silent = matches!(fault, Fault::Link(Passing::Frozen | Passing::Crawling));
        let learns = fault != Fault::Killed && !(is_silent && ONE_WAY.contains(&collective));
        if learns {
            if fault == Fault::Stopped {
                third.signal("-CONT");
            }
            drop(ends);
            let said = third.said();
            assert!(said.contains("rank 2"), "{name}: rank 2 says {said:?}");
        }
    }
    let _ = std::fs::remove_file(devices.join(CUT));
    if matches!(fault, Fault::Frames(..)) {
        Config::default().save(devices).unwrap();
    }
}

/// Every collective with each of the faults; what is left afterwards is what was there before.
fn table(over: Over, faults: &[Fault]) {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let devices = tempfile::tempdir().unwrap();
    Config::default().save(devices.path()).unwrap();
    // SAFETY: the turn is ours: no other test of this process reads or writes the environment.
    unsafe { std::env::set_var(FOLDER, devices.path()) };
    // Whatever is made once and kept.
    cell(over, 0, faults[0], devices.path());
    thread::sleep(Duration::from_secs(1));
    let (before, memory) = (held(), resident_bytes());
    let are_left = || {
        let patience = Instant::now() + Duration::from_secs(5);
        while held() != before && Instant::now() < patience {
            thread::sleep(Duration::from_millis(20));
        }
        held()
    };
    for fault in faults {
        for collective in 0..COLLECTIVES.len() {
            cell(over, collective, *fault, devices.path());
        }
        assert_eq!(are_left(), before, "descriptors and threads, {over:?}, {fault:?}");
    }
    let grown = resident_bytes().saturating_sub(memory);
    assert!(grown < 16 << 20, "{over:?}: {grown} bytes more than at first");
}

const STREAM: [Fault; 7] = [
    Fault::Link(Passing::Cut),
    Fault::Link(Passing::Frozen),
    Fault::Link(Passing::Slow),
    Fault::Link(Passing::Crawling),
    Fault::Link(Passing::Losing),
    Fault::Link(Passing::Doubling),
    Fault::Link(Passing::Damaging),
];
const PROCESS: [Fault; 3] = [Fault::Killed, Fault::Stopped, Fault::Paused];

#[test]
fn over_shared_memory() {
    table(Over::Shm, &PROCESS);
}

#[test]
fn over_tcp() {
    table(Over::Tcp, &[&PROCESS[..], &STREAM].concat());
}

#[test]
fn over_tls() {
    table(Over::Tls, &[&PROCESS[..], &STREAM].concat());
}

#[test]
fn over_rdma() {
    let frames = [
        Fault::CableOut,
        Fault::CableOutShortly,
        Fault::Frames(0.05, 0.0, 0.0),
        Fault::Frames(0.0, 0.05, 0.0),
        Fault::Frames(0.0, 0.0, 0.05),
    ];
    table(Over::Rdma, &[&PROCESS[..], &frames].concat());
}
