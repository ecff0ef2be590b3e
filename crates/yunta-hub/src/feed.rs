//! Work on a thread of its own, watched: a library without time limits can't hold up the program.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use crate::Progress;
use crate::progress::Transfer;

/// Events that may wait.
const QUEUE: usize = 64;
/// Progress is passed on this often at most.
const INTERVAL: Duration = Duration::from_millis(100);

enum Event {
    Start { what: String, total: u64 },
    Advance(u64),
    Finish,
}

/// Why the work gave no result.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoResult {
    /// Nothing was heard of it for the time allowed. The thread may still hang.
    Stalled,
    /// It ended without one.
    Died,
}

/// Runs `work`, shows its progress, and gives up when it shows none for as long as `patience`.
pub(crate) fn watch<T: Send + 'static>(
    progress: &dyn Progress,
    patience: Duration,
    work: impl FnOnce(&Feed) -> T + Send + 'static,
) -> Result<T, NoResult> {
    let (events, heard) = sync_channel(QUEUE);
    let builder = std::thread::Builder::new().name("download".to_owned());
    let worker = builder.spawn(move || work(&Feed { events })).map_err(|_| NoResult::Died)?;
    show(progress, patience, &heard)?;
    worker.join().map_err(|_| NoResult::Died)
}

/// Until the work has dropped its end.
fn show(
    progress: &dyn Progress,
    patience: Duration,
    heard: &Receiver<Event>,
) -> Result<(), NoResult> {
    let mut transfer = None;
    loop {
        match heard.recv_timeout(patience) {
            Ok(Event::Start { what, total }) => {
                // The last file ends before the next begins.
                drop(transfer.take());
                transfer = Some(Transfer::start(progress, Some(total), &what));
            }
            Ok(Event::Advance(bytes)) => {
                if let Some(transfer) = transfer.as_ref().filter(|_| bytes > 0) {
                    transfer.advance(bytes);
                }
            }
            Ok(Event::Finish) => transfer = None,
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
            Err(RecvTimeoutError::Timeout) => return Err(NoResult::Stalled),
        }
    }
}

/// The worker's end.
pub(crate) struct Feed {
    events: SyncSender<Event>,
}

impl Feed {
    /// Says that the work goes on; false if nobody waits for it any more.
    pub(crate) fn alive(&self) -> bool {
        self.send(Event::Advance(0))
    }

    /// A file, fetched in one or more attempts.
    pub(crate) fn file(&self, what: &str) -> Meter<'_> {
        let what = what.to_owned();
        Meter { feed: self, what, total: None, received: 0, reported: 0, last: Instant::now() }
    }

    fn send(&self, event: Event) -> bool {
        self.events.send(event).is_ok()
    }
}

/// Counts the bytes of a file; those that came twice because of a failed attempt, once.
pub(crate) struct Meter<'a> {
    feed: &'a Feed,
    what: String,
    total: Option<u64>,
    received: u64,
    reported: u64,
    last: Instant,
}

impl Meter<'_> {
    /// The size that the server told.
    pub(crate) fn total(&self) -> Option<u64> {
        self.total
    }

    /// The most bytes that an attempt brought the file to.
    pub(crate) fn arrived(&self) -> u64 {
        self.received.max(self.reported)
    }

    fn report(&mut self) {
        self.last = Instant::now();
        self.feed.send(Event::Advance(self.received.saturating_sub(self.reported)));
        self.reported = self.arrived();
    }
}

impl hf_hub::api::Progress for &mut Meter<'_> {
    fn init(&mut self, size: usize, _: &str) {
        let total = size as u64;
        if self.total.is_none() {
            self.feed.send(Event::Start { what: self.what.clone(), total });
        }
        self.total = Some(total);
        self.report();
        self.received = 0;
    }

    fn update(&mut self, size: usize) {
        self.received += size as u64;
        if self.last.elapsed() >= INTERVAL {
            self.report();
        }
    }

    fn finish(&mut self) {
        self.report();
    }
}

impl Drop for Meter<'_> {
    fn drop(&mut self) {
        if self.total.is_some() {
            self.feed.send(Event::Finish);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use hf_hub::api::Progress as _;

    use super::*;
    use crate::Silent;

    #[test]
    fn silent_work_is_given_up() {
        let (release, blocked) = sync_channel::<()>(1);
        let stalled = watch(&Silent, Duration::from_millis(20), move |_| blocked.recv());
        assert_eq!(stalled.unwrap_err(), NoResult::Stalled);
        drop(release);
    }

    #[test]
    fn work_that_panics_is_reported() {
        let died: Result<(), _> = watch(&Silent, Duration::from_secs(60), |_| {
            std::panic::resume_unwind(Box::new("a panic without a message on the terminal"))
        });
        assert_eq!(died, Err(NoResult::Died));
    }

    #[derive(Default)]
    struct Record(RefCell<Vec<String>>);

    impl Progress for Record {
        fn start(&self, total: Option<u64>, what: &str) {
            self.0.borrow_mut().push(format!("{what} {}", total.unwrap()));
        }
        fn advance(&self, bytes: u64) {
            self.0.borrow_mut().push(format!("+{bytes}"));
        }
        fn finish(&self) {
            self.0.borrow_mut().push("end".to_owned());
        }
        fn message(&self, _: &str) {}
    }

    #[test]
    fn a_resumed_file_is_shown_once_and_its_bytes_counted_once() {
        let record = Record::default();
        let result = watch(&record, Duration::from_secs(60), |feed| {
            let mut meter = feed.file("a");
            for received in [[0, 60], [60, 40]] {
                let mut attempt = &mut meter;
                attempt.init(100, "a");
                for bytes in received {
                    attempt.update(bytes);
                }
                attempt.finish();
            }
            7
        });
        assert_eq!(result, Ok(7));
        assert_eq!(*record.0.borrow(), ["a 100", "+60", "+40", "end"]);
    }
}
