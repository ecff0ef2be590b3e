//! Queue pairs: a datagram socket each, and two threads that move frames.

use std::collections::VecDeque;
use std::fs;
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use yunta_comm::verbs::sys::{
    IBV_QPT_RC, IBV_WC_LOC_LEN_ERR, IBV_WC_RECV, IBV_WC_RETRY_EXC_ERR, IBV_WC_SEND, IBV_WC_SUCCESS,
    IBV_WC_WR_FLUSH_ERR, ibv_wc,
};

use crate::{BROKEN, CUT, Config};

/// How long a thread waits before it looks whether it is to end.
const TICK: Duration = Duration::from_millis(20);
/// When a frame is due: nanoseconds of the monotonic clock, before its bytes.
const HEADER: usize = 8;
const FRAME_MAX: usize = 1 << 17;

/// Completions that wait to be polled.
#[derive(Default)]
pub(crate) struct Completions {
    queue: Mutex<VecDeque<ibv_wc>>,
    capacity: usize,
    has_overrun: AtomicBool,
}

impl Completions {
    pub(crate) fn new(capacity: usize) -> Arc<Self> {
        Arc::new(Self { capacity, ..Self::default() })
    }

    fn push(&self, completion: ibv_wc) {
        let mut queue = lock(&self.queue);
        if queue.len() < self.capacity {
            queue.push_back(completion);
        } else {
            self.has_overrun.store(true, Ordering::Relaxed);
        }
    }

    /// `None` if completions were lost.
    pub(crate) fn pop(&self) -> Option<Option<ibv_wc>> {
        (!self.has_overrun.load(Ordering::Relaxed)).then(|| lock(&self.queue).pop_front())
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A receive that was posted.
struct Receive {
    id: u64,
    address: u64,
    length: usize,
}

struct State {
    receives: VecDeque<Receive>,
    /// Frames that the peer's socket had no room for, in order.
    /// The second of a doubled frame completes nothing.
    waiting: VecDeque<(Option<u64>, Vec<u8>)>,
    /// Sends that have not completed.
    sends: usize,
    random: u64,
    has_failed: bool,
}

struct Shared {
    socket: UnixDatagram,
    folder: PathBuf,
    path: PathBuf,
    number: u32,
    kind: i32,
    config: Config,
    completions: Arc<Completions>,
    state: Mutex<State>,
    changed: Condvar,
    is_over: AtomicBool,
}

/// What a queue pair does.
pub(crate) struct Queue {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    depth: usize,
}

/// The socket of a queue pair.
fn path(folder: &Path, device: &str, number: u32) -> PathBuf {
    folder.join(format!("{device}-{number:06x}.qp"))
}

/// Queue pairs of a device that live; what dead processes left is removed.
fn count(folder: &Path, device: &str) -> io::Result<usize> {
    let probe = UnixDatagram::unbound()?;
    let mut count = 0;
    for entry in fs::read_dir(folder)?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.strip_suffix(".qp").and_then(|n| n.rsplit_once('-')).is_none_or(|n| n.0 != device) {
            continue;
        }
        // One that is connected refuses others, and lives.
        match probe.connect(entry.path()) {
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                let _ = fs::remove_file(entry.path());
            }
            _ => count += 1,
        }
    }
    Ok(count)
}

impl Queue {
    pub(crate) fn new(
        folder: &Path,
        device: &str,
        config: &Config,
        kind: i32,
        depth: u32,
        completions: Arc<Completions>,
    ) -> io::Result<Self> {
        // Counted and taken in one step, whoever else is at it.
        let turn = fs::File::create(folder.join("lock"))?;
        turn.lock()?;
        if count(folder, device)? >= config.queue_pairs {
            return Err(io::Error::from_raw_os_error(libc::EBUSY));
        }
        let mut seed = std::process::id();
        let (number, path, socket) = loop {
            seed = seed.wrapping_mul(0x9E37_79B1).wrapping_add(0x1_2345);
            let number = (seed >> 8) | 1;
            let path = path(folder, device, number);
            match UnixDatagram::bind(&path) {
                Ok(socket) => break (number, path, socket),
                Err(e) if e.kind() == io::ErrorKind::AddrInUse => {}
                Err(e) => return Err(e),
            }
        };
        socket.set_read_timeout(Some(TICK))?;
        socket.set_write_timeout(Some(TICK))?;
        let state = State {
            receives: VecDeque::new(),
            waiting: VecDeque::new(),
            sends: 0,
            random: config.seed ^ u64::from(number),
            has_failed: false,
        };
        let shared = Arc::new(Shared {
            socket,
            folder: folder.to_owned(),
            path,
            number,
            kind,
            config: config.clone(),
            completions,
            state: Mutex::new(state),
            changed: Condvar::new(),
            is_over: AtomicBool::new(false),
        });
        let threads = [Shared::receive_all, Shared::send_all].map(|work| {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name("emulated-device".to_owned())
                .spawn(move || work(&shared))
        });
        let threads = threads.into_iter().collect::<io::Result<_>>()?;
        Ok(Self { shared, threads, depth: depth as usize })
    }

    pub(crate) fn number(&self) -> u32 {
        self.shared.number
    }

    /// Finds the peer's queue pair.
    pub(crate) fn connect(&self, device: &str, number: u32) -> io::Result<()> {
        self.shared.socket.connect(path(&self.shared.folder, device, number))
    }

    pub(crate) fn post_receive(&self, id: u64, address: u64, length: usize) -> Result<(), i32> {
        let mut state = lock(&self.shared.state);
        if state.receives.len() >= self.depth {
            return Err(libc::ENOMEM);
        }
        state.receives.push_back(Receive { id, address, length });
        self.shared.changed.notify_all();
        Ok(())
    }

    pub(crate) fn post_send(&self, id: u64, frame: &[u8]) -> Result<(), i32> {
        let shared = &self.shared;
        let mut state = lock(&shared.state);
        if state.sends >= self.depth {
            return Err(libc::ENOMEM);
        }
        state.sends += 1;
        if state.has_failed || shared.folder.join(BROKEN).exists() {
            state.has_failed = true;
            shared.sent(&mut state, id, IBV_WC_WR_FLUSH_ERR);
            return Ok(());
        }
        let c = &shared.config;
        let due = now() + c.latency_us * 1000;
        let mut bytes = [&due.to_le_bytes()[..], frame].concat();
        let (lost, doubled, wrong) = (draw(&mut state), draw(&mut state), draw(&mut state));
        // A reliable connection mends all of this by itself.
        let is_faulty = shared.kind != IBV_QPT_RC;
        if shared.folder.join(CUT).exists() || (is_faulty && lost < c.loss) {
            // Without an answer, a reliable send never completes within the patience of a test.
            if is_faulty {
                shared.sent(&mut state, id, IBV_WC_SUCCESS);
            }
            return Ok(());
        }
        let at = HEADER + (draw(&mut state) * frame.len() as f64) as usize;
        if let Some(byte) = bytes.get_mut(at).filter(|_| is_faulty && wrong < c.corruption) {
            *byte ^= 1 << (at % 8);
        }
        if is_faulty && doubled < c.duplication {
            shared.transmit(&mut state, None, bytes.clone());
        }
        shared.transmit(&mut state, Some(id), bytes);
        Ok(())
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        self.shared.changed.notify_all();
        let _ = self.shared.socket.shutdown(std::net::Shutdown::Both);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        let _ = fs::remove_file(&self.shared.path);
    }
}

/// Nanoseconds of a clock that all processes share.
fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` outlives the call.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// From 0 to 1; splitmix64.
fn draw(state: &mut State) -> f64 {
    state.random = state.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = state.random;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

impl Shared {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn sent(&self, state: &mut State, id: u64, status: i32) {
        state.sends -= 1;
        let number = self.number;
        let opcode = IBV_WC_SEND;
        self.completions.push(ibv_wc {
            wr_id: id,
            status,
            opcode,
            qp_num: number,
            ..ibv_wc::default()
        });
    }

    /// Sends at once if there is room at the peer, and nothing before it waits for some.
    fn transmit(&self, state: &mut State, id: Option<u64>, bytes: Vec<u8>) {
        if state.waiting.is_empty() {
            match try_send(&self.socket, &bytes) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                other => return self.has_sent(state, id, &other),
            }
        }
        state.waiting.push_back((id, bytes));
        self.changed.notify_all();
    }

    /// An unreliable send has done its part whatever became of it.
    fn has_sent(&self, state: &mut State, id: Option<u64>, outcome: &io::Result<()>) {
        let is_lost = outcome.is_err() && self.kind == IBV_QPT_RC;
        state.has_failed |= is_lost;
        if let Some(id) = id {
            self.sent(state, id, if is_lost { IBV_WC_RETRY_EXC_ERR } else { IBV_WC_SUCCESS });
        }
    }

    /// Sends what had no room at first.
    fn send_all(&self) {
        let mut state = lock(&self.state);
        while !self.is_over() {
            let Some((id, bytes)) = state.waiting.front().cloned() else {
                let waited = self.changed.wait_timeout(state, TICK);
                state = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            };
            drop(state);
            let outcome = self.socket.send(&bytes).map(drop);
            state = lock(&self.state);
            if outcome.as_ref().is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock) {
                continue;
            }
            state.waiting.pop_front();
            self.has_sent(&mut state, id, &outcome);
        }
    }

    /// Puts what comes into receives.
    fn receive_all(&self) {
        let mut bytes = vec![0; FRAME_MAX];
        while !self.is_over() {
            let frame = match self.socket.recv(&mut bytes) {
                Ok(n) => bytes.get(..n).and_then(|b| b.split_at_checked(HEADER)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => continue,
                // The peer is gone; another may come.
                Err(_) => {
                    std::thread::sleep(TICK);
                    continue;
                }
            };
            let Some((due, frame)) = frame else { continue };
            let due = due.first_chunk().map_or(0, |d| u64::from_le_bytes(*d));
            std::thread::sleep(Duration::from_nanos(due.saturating_sub(now())));
            self.arrive(frame);
        }
    }

    fn arrive(&self, frame: &[u8]) {
        let mut state = lock(&self.state);
        while state.receives.is_empty() && self.kind == IBV_QPT_RC && !self.is_over() {
            let waited = self.changed.wait_timeout(state, TICK);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let Some(receive) = state.receives.pop_front() else { return };
        let fits = frame.len() <= receive.length;
        if fits {
            // SAFETY: whoever posted the receive keeps its memory until it completes or the queue
            // pair is destroyed, which ends this thread first; its length was checked against a
            // registered region.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    frame.as_ptr(),
                    receive.address as *mut u8,
                    frame.len(),
                );
            }
        }
        self.completions.push(ibv_wc {
            wr_id: receive.id,
            status: if fits { IBV_WC_SUCCESS } else { IBV_WC_LOC_LEN_ERR },
            opcode: IBV_WC_RECV,
            byte_len: u32::try_from(frame.len()).unwrap_or(u32::MAX),
            qp_num: self.number,
            ..ibv_wc::default()
        });
    }
}

/// Without waiting for room.
fn try_send(socket: &UnixDatagram, bytes: &[u8]) -> io::Result<()> {
    use std::os::fd::AsRawFd;
    // SAFETY: `bytes` outlives the call.
    let sent = unsafe {
        libc::send(
            socket.as_raw_fd(),
            bytes.as_ptr().cast(),
            bytes.len(),
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        )
    };
    if sent < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
