//! The gateway's memory of open requests: what was asked, and what has been answered.
//!
//! Prompt plus emitted tokens are all it takes to go on elsewhere. Today a request that has
//! emitted nothing is run again when its ranks are lost, unseen by its client; one that has is
//! ended with an error.

use std::collections::HashMap;

use yunta_engine::{Event, EventSink, Failure, Request, RequestId};

/// Runs of one request at most: a request that brings ranks down must not do so for ever.
const ATTEMPTS_MAX: u32 = 3;

struct Entry {
    request: Request,
    /// Tokens received so far.
    emitted: Vec<u32>,
    sink: Box<dyn EventSink>,
    /// Whether the present epoch's leader has it.
    sent: bool,
    attempts: u32,
}

impl Entry {
    /// The request as the next leader gets it: to go on behind what has been emitted.
    fn take(&mut self) -> Request {
        self.sent = true;
        self.attempts += 1;
        Request { emitted: self.emitted.clone(), ..self.request.clone() }
    }
}

/// Open requests by id.
#[derive(Default)]
pub(crate) struct Journal {
    entries: HashMap<RequestId, Entry>,
}

/// What became of an event.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// It was passed on, or belongs to no open request.
    Done,
    /// Nobody listens any more: the leader should stop.
    Unwanted,
    /// The stream has a gap or a repetition: the epoch can't be trusted.
    OutOfOrder {
        /// The position expected next.
        expected: usize,
        /// The position that came.
        got: usize,
    },
}

impl Journal {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn insert(&mut self, request: Request, sink: Box<dyn EventSink>) {
        let emitted = request.emitted.clone();
        let entry = Entry { request, emitted, sink, sent: false, attempts: 0 };
        self.entries.insert(entry.request.id, entry);
    }

    /// Requests that the present leader does not have, oldest first; they count as sent.
    pub(crate) fn take_unsent(&mut self) -> Vec<Request> {
        let mut unsent: Vec<&mut Entry> = self.entries.values_mut().filter(|e| !e.sent).collect();
        unsent.sort_by_key(|e| e.request.id);
        unsent.into_iter().map(Entry::take).collect()
    }

    /// One of them.
    pub(crate) fn take_one(&mut self, id: RequestId) -> Option<Request> {
        self.entries.get_mut(&id).map(Entry::take)
    }

    /// Ends a request at its client's wish. Returns whether the leader has to be told.
    pub(crate) fn cancel(&mut self, id: RequestId) -> bool {
        let Some(mut entry) = self.entries.remove(&id) else { return false };
        entry.sink.emit(Event::Finished { reason: yunta_engine::FinishReason::Cancelled });
        entry.sent
    }

    /// Takes an event of the present epoch's leader.
    pub(crate) fn deliver(&mut self, id: RequestId, event: Event) -> Delivery {
        let Some(entry) = self.entries.get_mut(&id) else { return Delivery::Done };
        let last = match &event {
            // Of the first attempt: the client need not know of others.
            Event::Started { .. } if entry.attempts > 1 => return Delivery::Done,
            Event::Started { .. } => false,
            Event::Token { index, token, .. } => {
                let expected = entry.emitted.len();
                if *index != expected {
                    return Delivery::OutOfOrder { expected, got: *index };
                }
                entry.emitted.push(*token);
                false
            }
            Event::Finished { .. } | Event::Failed { .. } => true,
        };
        let heard = entry.sink.emit(event);
        if last || !heard {
            self.entries.remove(&id);
        }
        if heard || last { Delivery::Done } else { Delivery::Unwanted }
    }

    /// The ranks are lost: requests whose client has seen nothing will be sent again, the others
    /// end with `message`. Returns how many of each.
    pub(crate) fn ranks_lost(&mut self, message: &str) -> (usize, usize) {
        let before = self.entries.len();
        self.entries.retain(|_, entry| {
            if !entry.sent {
                return true;
            }
            entry.sent = false;
            let unseen = entry.emitted.len() == entry.request.emitted.len();
            if unseen && entry.attempts < ATTEMPTS_MAX {
                return true;
            }
            entry
                .sink
                .emit(Event::Failed { message: message.to_owned(), cause: Failure::Retriable });
            false
        });
        (self.entries.len(), before - self.entries.len())
    }

    /// Nothing will run again: ends all requests.
    pub(crate) fn fail_all(&mut self, message: &str) {
        for (_, mut entry) in self.entries.drain() {
            entry
                .sink
                .emit(Event::Failed { message: message.to_owned(), cause: Failure::Internal });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};
    use yunta_engine::FinishReason;

    type Log = Arc<Mutex<Vec<Event>>>;

    fn open(journal: &mut Journal, id: u64) -> Log {
        let log = Log::default();
        let sink = Arc::clone(&log);
        let request = Request::new(RequestId(id), vec![1, 2], 10);
        journal.insert(
            request,
            Box::new(move |e| {
                sink.lock().unwrap().push(e);
                true
            }),
        );
        log
    }

    fn token(index: usize) -> Event {
        Event::Token { index, token: index as u32 + 5, logprobs: None }
    }

    #[test]
    fn a_request_nobody_has_seen_answered_is_sent_again() {
        let mut journal = Journal::default();
        let (seen, unseen) = (open(&mut journal, 1), open(&mut journal, 2));
        assert_eq!(journal.take_unsent().len(), 2);
        assert_eq!(journal.deliver(RequestId(1), token(0)), Delivery::Done);
        assert_eq!(journal.ranks_lost("rank 1 died"), (1, 1));
        assert!(matches!(seen.lock().unwrap()[1], Event::Failed { cause: Failure::Retriable, .. }));
        assert!(unseen.lock().unwrap().is_empty());
        assert_eq!(journal.take_unsent()[0].id, RequestId(2));
    }

    #[test]
    fn a_request_that_brings_ranks_down_is_given_up() {
        let mut journal = Journal::default();
        let log = open(&mut journal, 1);
        for attempt in 1..=3 {
            assert_eq!(journal.take_unsent().len(), 1, "attempt {attempt}");
            journal.ranks_lost("again");
        }
        assert!(journal.take_unsent().is_empty());
        assert!(matches!(log.lock().unwrap()[..], [Event::Failed { .. }]));
    }

    #[test]
    fn tokens_out_of_order_are_never_passed_on() {
        let mut journal = Journal::default();
        let log = open(&mut journal, 1);
        journal.take_unsent();
        assert_eq!(journal.deliver(RequestId(1), token(0)), Delivery::Done);
        let again = journal.deliver(RequestId(1), token(0));
        assert_eq!(again, Delivery::OutOfOrder { expected: 1, got: 0 });
        let gap = journal.deliver(RequestId(1), token(2));
        assert_eq!(gap, Delivery::OutOfOrder { expected: 1, got: 2 });
        assert_eq!(log.lock().unwrap().len(), 1);
    }

    #[test]
    fn events_end_with_the_request() {
        let mut journal = Journal::default();
        let log = open(&mut journal, 1);
        journal.take_unsent();
        journal.deliver(RequestId(1), Event::Finished { reason: FinishReason::Stop });
        assert_eq!(journal.deliver(RequestId(1), token(0)), Delivery::Done);
        assert!(!journal.cancel(RequestId(1)));
        assert_eq!(log.lock().unwrap().len(), 1);
        assert_eq!(journal.len(), 0);
    }
}
