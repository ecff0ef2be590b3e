//! A link whose sends never wait for the peer: what the peer does not take at once goes out from a
//! queue, while this rank computes. The stages of a pipeline overlap through it.
//!
//! The queue can also delay what it sends, so that ranks on one machine are as far apart as they
//! would be on a given network.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::link::{Interest, Link, Transport, Wait, window};

/// How long a closed link still tries to send what is queued.
const LINGER: Duration = Duration::from_millis(200);
/// How long the queue's thread waits for room before it looks at the time.
const PARK: Duration = Duration::from_millis(20);
/// How often a sender that found the queue full looks again.
const ROOM_CHECK: Duration = Duration::from_millis(1);
/// Sleeps end late by about this much: the rest of a delay is spent trying.
const SLEEP_SLACK: Duration = Duration::from_micros(80);

/// Settings of a link's queue.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outbox {
    /// Bytes that may wait; beyond, sends wait for the peer.
    pub bytes_max: usize,
    /// Everything arrives so much later.
    pub latency: Duration,
    /// Bytes per second that go through, if not as many as can.
    pub bandwidth: Option<f64>,
}

impl Outbox {
    fn is_shaped(&self) -> bool {
        !self.latency.is_zero() || self.bandwidth.is_some()
    }
}

struct Part {
    due: Instant,
    bytes: Vec<u8>,
    sent: usize,
}

#[derive(Default)]
struct Queue {
    parts: VecDeque<Part>,
    bytes: usize,
    /// When the emulated line is free again.
    free_at: Option<Instant>,
    /// Kept for the next send.
    error: Option<(io::ErrorKind, String)>,
    close_by: Option<Instant>,
}

struct Shared {
    /// Locked after the queue, where both are.
    link: Mutex<Box<dyn Link>>,
    queue: Mutex<Queue>,
    changed: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A link with a queue.
pub(crate) struct OutboxLink {
    shared: Arc<Shared>,
    config: Outbox,
    name: String,
    transport: Transport,
    is_checked: bool,
    /// Started when there is something to queue.
    thread: Option<JoinHandle<()>>,
}

impl OutboxLink {
    pub(crate) fn new(link: Box<dyn Link>, config: Outbox) -> Self {
        let (name, transport, is_checked) = (link.name(), link.transport(), link.is_checked());
        let shared = Shared {
            link: Mutex::new(link),
            queue: Mutex::new(Queue::default()),
            changed: Condvar::new(),
        };
        Self { shared: Arc::new(shared), config, name, transport, is_checked, thread: None }
    }

    fn start_thread(&mut self) -> io::Result<()> {
        if self.thread.is_none() {
            let shared = Arc::clone(&self.shared);
            let builder = std::thread::Builder::new().name("outbox".to_owned());
            self.thread = Some(builder.spawn(move || shared.drain())?);
        }
        Ok(())
    }
}

impl Link for OutboxLink {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn transport(&self) -> Transport {
        self.transport
    }

    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.start_thread()?;
        let mut queue = lock(&self.shared.queue);
        if let Some((kind, reason)) = &queue.error {
            return Err(io::Error::new(*kind, reason.clone()));
        }
        let mut taken = 0;
        if queue.parts.is_empty() && !self.config.is_shaped() {
            taken = lock(&self.shared.link).try_send(parts)?;
        }
        let room = self.config.bytes_max.saturating_sub(queue.bytes);
        let rest = window(parts, taken, room).concat();
        if rest.is_empty() {
            return Ok(taken);
        }
        let now = Instant::now();
        let seconds = self.config.bandwidth.map_or(0.0, |b| rest.len() as f64 / b.max(1.0));
        let free = queue.free_at.map_or(now, |at| at.max(now)) + Duration::from_secs_f64(seconds);
        queue.free_at = Some(free);
        queue.bytes += rest.len();
        taken += rest.len();
        queue.parts.push_back(Part { due: free + self.config.latency, bytes: rest, sent: 0 });
        self.shared.changed.notify_one();
        Ok(taken)
    }

    fn try_recv(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        lock(&self.shared.link).try_recv(buffer)
    }

    fn arm(&mut self, interest: Interest) -> io::Result<Option<Wait>> {
        let queue = lock(&self.shared.queue);
        let mut wait = lock(&self.shared.link).arm(interest)?;
        // Room in the queue is what counts, and nothing announces that; and while the queue's thread
        // waits on the link as well, it may take the signal that was meant for this one.
        if let Some(wait) = &mut wait
            && (interest == Interest::Write || !queue.parts.is_empty())
        {
            wait.at_most = wait.at_most.min(ROOM_CHECK);
        }
        Ok(wait)
    }

    fn is_checked(&self) -> bool {
        self.is_checked
    }

    fn close(&mut self) {
        let mut queue = lock(&self.shared.queue);
        if queue.parts.is_empty() {
            lock(&self.shared.link).close();
        }
        queue.close_by.get_or_insert(Instant::now() + LINGER);
        self.shared.changed.notify_one();
    }
}

impl Drop for OutboxLink {
    fn drop(&mut self) {
        self.close();
        if let Some(thread) = self.thread.take() {
            // Bounded by `LINGER`; there is nothing to learn from how it ended.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Sends what is queued until the link is closed or fails.
    fn drain(&self) {
        let mut queue = lock(&self.queue);
        loop {
            let now = Instant::now();
            if queue.close_by.is_some_and(|by| queue.parts.is_empty() || now >= by) {
                lock(&self.link).close();
                return;
            }
            let Some(part) = queue.parts.front_mut() else {
                queue = self.wait(queue, PARK * 50);
                continue;
            };
            if let Some(left) = part.due.checked_duration_since(now).filter(|d| !d.is_zero()) {
                queue = match left.checked_sub(SLEEP_SLACK) {
                    Some(long) => self.wait(queue, long),
                    None => {
                        drop(queue);
                        std::hint::spin_loop();
                        lock(&self.queue)
                    }
                };
                continue;
            }
            let bytes = part.bytes.get(part.sent..).unwrap_or_default();
            // Apart, so that the link is free again when its answer is looked at.
            let sent = lock(&self.link).try_send(&[IoSlice::new(bytes)]);
            match sent {
                Ok(0) => {
                    drop(queue);
                    self.wait_for_room();
                    queue = lock(&self.queue);
                }
                Ok(n) => {
                    part.sent += n;
                    if part.sent >= part.bytes.len() {
                        queue.parts.pop_front();
                    }
                    queue.bytes = queue.bytes.saturating_sub(n);
                }
                Err(e) => {
                    queue.error = Some((e.kind(), e.to_string()));
                    queue.parts.clear();
                    queue.bytes = 0;
                }
            }
        }
    }

    /// Errors are left to the next attempt.
    fn wait_for_room(&self) {
        let Ok(Some(wait)) = lock(&self.link).arm(Interest::Write) else { return };
        let mut poll = libc::pollfd { fd: wait.descriptor, events: wait.events, revents: 0 };
        let most = wait.at_most.min(PARK).as_millis().max(1) as libc::c_int;
        // SAFETY: one entry. However the wait ends, the caller tries again.
        unsafe { libc::poll(&raw mut poll, 1, most) };
    }

    fn wait<'a>(&self, queue: MutexGuard<'a, Queue>, most: Duration) -> MutexGuard<'a, Queue> {
        self.changed.wait_timeout(queue, most).map_or_else(|e| e.into_inner().0, |(guard, _)| guard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StreamLink;

    fn ends(outbox: Outbox) -> (OutboxLink, Box<dyn Link>) {
        let (a, b) = StreamLink::pair().unwrap();
        (OutboxLink::new(Box::new(a), outbox), Box::new(b))
    }

    fn plain(bytes_max: usize) -> Outbox {
        Outbox { bytes_max, latency: Duration::ZERO, bandwidth: None }
    }

    fn read(link: &mut dyn Link, n: usize) -> Vec<u8> {
        let mut all = vec![0; n];
        let mut at = 0;
        let until = Instant::now() + Duration::from_secs(20);
        while at < n {
            assert!(Instant::now() < until, "{at} of {n} bytes came");
            at += link.try_recv(&mut all[at..]).unwrap();
        }
        all
    }

    #[test]
    fn nothing_waits_for_a_peer_that_does_not_read_yet() {
        let (mut a, mut b) = ends(plain(64 << 20));
        let data: Vec<u8> = (0..10_000_000usize).map(|i| (i * 31 % 251) as u8).collect();
        for part in data.chunks(1_000_000) {
            let (head, rest) = part.split_at(16);
            let n = a.try_send(&[IoSlice::new(head), IoSlice::new(rest)]).unwrap();
            assert_eq!(n, part.len());
        }
        assert!(read(&mut *b, data.len()) == data);
        // What the other side says comes through as ever.
        b.try_send(&[IoSlice::new(b"thanks")]).unwrap();
        assert_eq!(read(&mut a, 6), b"thanks");
    }

    #[test]
    fn the_queue_is_bounded() {
        let (mut a, _b) = ends(plain(1000));
        let data = vec![1; 1 << 20];
        let mut taken = 0;
        for _ in 0..50 {
            taken += a.try_send(&[IoSlice::new(&data)]).unwrap();
        }
        // The socket's own buffer, and the queue.
        assert!(taken < 8 << 20, "{taken}");
    }

    #[test]
    fn what_was_sent_before_closing_arrives() {
        let (mut a, mut b) = ends(plain(64 << 20));
        let data = vec![7; 4 << 20];
        assert_eq!(a.try_send(&[IoSlice::new(&data)]).unwrap(), data.len());
        let reader = std::thread::spawn(move || read(&mut *b, 4 << 20).len());
        a.close();
        assert_eq!(reader.join().unwrap(), data.len());
    }

    #[test]
    fn a_lost_peer_is_an_error_of_the_next_send() {
        let (mut a, b) = ends(plain(64 << 20));
        a.try_send(&[IoSlice::new(&vec![7; 4 << 20])]).unwrap();
        drop(b);
        let until = Instant::now() + Duration::from_secs(5);
        while a.try_send(&[IoSlice::new(b"more")]).is_ok() {
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_shaped_line_delays_and_keeps_order() {
        let latency = Duration::from_millis(20);
        let (mut a, mut b) = ends(Outbox { bytes_max: 1 << 20, latency, bandwidth: Some(1e6) });
        let start = Instant::now();
        for i in 0..10u8 {
            a.try_send(&[IoSlice::new(&[i; 2_000])]).unwrap();
        }
        let got = read(&mut *b, 20_000);
        // 20 ms for 20 kB at 1 MB/s, and as much for the way.
        assert!(start.elapsed() >= Duration::from_millis(40), "{:?}", start.elapsed());
        assert!(got.chunks(2_000).zip(0u8..).all(|(part, i)| part == [i; 2_000]));
    }
}
