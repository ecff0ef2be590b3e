//! A pool of compute threads for fork-join operations of microseconds.
//!
//! The calling thread does its share of the items; the others join in as they find the job. A
//! thread that the system does not run just then is not waited for: on a busy machine the caller
//! does the work alone. Between jobs the threads spin for a bounded time, because the next
//! operation of a step follows at once, and then park, because an idle server must not burn a core.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Looks for a job before a thread parks: some 50 microseconds.
const SPINS_MAX: u32 = 1_000;

/// The job may be joined.
const OPEN: u64 = 1 << 32;
/// One job further; above it the number of the job, below `OPEN` the threads that work on it.
const NEXT: u64 = 1 << 33;

type Item = *const (dyn Fn(usize) + Sync);

/// A job as threads find it.
#[derive(Clone, Copy)]
struct Job {
    item: Item,
    count: usize,
}

struct Shared {
    /// Number of the job, whether it is open, and how many threads have joined.
    state: AtomicU64,
    job: UnsafeCell<Option<Job>>,
    /// The next item of the job.
    next: AtomicUsize,
    stop: AtomicBool,
    panicked: AtomicBool,
    sleepers: Mutex<usize>,
    wake: Condvar,
}

// SAFETY: `job` is written only by the one caller (which holds `&mut Pool`) while the state is
// closed and no thread has joined; threads read it only after they joined an open job.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is to a `Sync` closure, used only while `for_each` borrows it.
unsafe impl Send for Shared {}

/// A fixed set of compute threads.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Starts `threads - 1` threads beside the caller's.
    ///
    /// # Errors
    /// The system's, if a thread can't be started.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            sleepers: Mutex::new(0),
            wake: Condvar::new(),
        });
        let mut pool = Self { shared, threads: Vec::new() };
        for index in 1..threads.max(1) {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("compute-{index}"));
            pool.threads.push(builder.spawn(move || work(&shared))?);
        }
        Ok(pool)
    }

    /// Threads that may take part in a job, the caller's included.
    pub fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    /// Runs `item(i)` once for every `i` in `0..count`, on whichever thread is free first, and
    /// returns when all are done.
    ///
    /// # Panics
    /// If an item panicked on another thread: a defect of a kernel, never of its input.
    #[allow(clippy::panic)]
    pub fn for_each(&mut self, count: usize, item: &(dyn Fn(usize) + Sync)) {
        if self.threads.is_empty() || count <= 1 {
            (0..count).for_each(item);
            return;
        }
        let shared = &*self.shared;
        // SAFETY: the lifetime is erased, but threads use the pointer only between joining and
        // leaving the job, and this function does not return or unwind before all have left and
        // none can join any more (`Close`).
        let item: Item = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Item>(item) };
        let job = Job { item, count };
        // SAFETY: the last job is closed and left, and `&mut self` excludes other callers.
        unsafe { *shared.job.get() = Some(job) };
        shared.next.store(0, Ordering::Relaxed);
        // Closed and left: only the number is set. Open the next.
        shared.state.fetch_add(NEXT + OPEN, Ordering::SeqCst);
        if *shared.sleepers.lock().unwrap_or_else(PoisonError::into_inner) > 0 {
            shared.wake.notify_all();
        }
        let close = Close(shared);
        run_items(shared, job);
        drop(close);
        if shared.panicked.load(Ordering::Acquire) {
            panic!("a compute thread panicked");
        }
    }
}

/// Claims items until there are none.
fn run_items(shared: &Shared, job: Job) {
    loop {
        let i = shared.next.fetch_add(1, Ordering::Relaxed);
        if i >= job.count {
            return;
        }
        // SAFETY: the job is joined (or is the caller's own), so its closure is alive.
        unsafe { (*job.item)(i) };
    }
}

/// Closes the job and waits for those who joined; in `drop`, so that a panic of the caller's own
/// share can't free the closure under the others.
struct Close<'a>(&'a Shared);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut spins = 0u32;
        while self.0.state.load(Ordering::Acquire) & (OPEN - 1) != 0 {
            spins += 1;
            if spins < SPINS_MAX {
                std::hint::spin_loop();
            } else {
                // Fewer cores than threads: let the others have this one.
                std::thread::yield_now();
            }
        }
    }
}

fn work(shared: &Shared) {
    let mut last = 0;
    loop {
        let seen = wait_for_job(shared, last);
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        last = seen / NEXT;
        // Join, unless the job was closed meanwhile.
        let join = shared.state.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |now| {
            (now & OPEN != 0 && now / NEXT == last).then_some(now + 1)
        });
        if join.is_err() {
            continue;
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: joined: the job is set and stays until this thread leaves.
            if let Some(job) = unsafe { *shared.job.get() } {
                run_items(shared, job);
            }
        }));
        if outcome.is_err() {
            shared.panicked.store(true, Ordering::Release);
        }
        shared.state.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Waits until there is an open job with another number than `last`; returns the state.
fn wait_for_job(shared: &Shared, last: u64) -> u64 {
    let fresh = |state: u64| state & OPEN != 0 && state / NEXT != last;
    for _ in 0..SPINS_MAX {
        let state = shared.state.load(Ordering::Acquire);
        if fresh(state) || shared.stop.load(Ordering::Relaxed) {
            return state;
        }
        for _ in 0..16 {
            std::hint::spin_loop();
        }
    }
    let mut sleepers = shared.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
    *sleepers += 1;
    loop {
        let state = shared.state.load(Ordering::SeqCst);
        if fresh(state) || shared.stop.load(Ordering::SeqCst) {
            *sleepers -= 1;
            return state;
        }
        sleepers = shared.wake.wait(sleepers).unwrap_or_else(PoisonError::into_inner);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.sleepers.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A panic of an item was reported by `for_each`.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn every_item_runs_once_on_any_number_of_threads() {
        for threads in 1..5 {
            let mut pool = Pool::new(threads).unwrap();
            for count in [0, 1, 2, 17, 1000] {
                let hits: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                pool.for_each(count, &|i| {
                    hits[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn many_short_jobs_in_a_row_are_all_done() {
        let mut pool = Pool::new(3).unwrap();
        let sum = AtomicUsize::new(0);
        for job in 0..20_000 {
            pool.for_each(3, &|i| {
                sum.fetch_add(i + job, Ordering::Relaxed);
            });
        }
        assert_eq!(sum.load(Ordering::Relaxed), 3 * 20_000 + 3 * (20_000 * 19_999 / 2));
    }

    #[test]
    fn parked_threads_wake_for_the_next_job() {
        let mut pool = Pool::new(2).unwrap();
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(20));
            let threads = Mutex::new(std::collections::HashSet::new());
            pool.for_each(2, &|_| {
                threads.lock().unwrap().insert(std::thread::current().id());
                std::thread::sleep(Duration::from_millis(100));
            });
            assert_eq!(threads.lock().unwrap().len(), 2);
        }
    }

    #[test]
    fn a_panic_of_an_item_reaches_the_caller_after_all_threads_are_done() {
        let mut pool = Pool::new(2).unwrap();
        let caller = std::thread::current().id();
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.for_each(2, &|_| {
                std::thread::sleep(Duration::from_millis(100));
                assert!(std::thread::current().id() == caller, "not the caller");
            });
        }));
        assert!(outcome.is_err());
    }
}
