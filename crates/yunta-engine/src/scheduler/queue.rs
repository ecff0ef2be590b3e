//! Requests that wait for admission, and whose turn it is.

use std::collections::HashMap;
use std::time::Duration;

use yunta_grammar::Constraint;

use crate::{Request, RequestId};

/// A request that has waited so long counts as one step more urgent: nobody starves.
const AGEING: Duration = Duration::from_secs(10);

/// Clients whose use is remembered while they have no request open.
const CLIENTS_MAX: usize = 1024;

/// What an output token costs a client, in prompt tokens (Sheng et al., 2023, section 4).
pub(crate) const OUTPUT_COST: u64 = 2;

/// A request that waits.
pub(crate) struct Waiting {
    pub(crate) request: Request,
    pub(crate) constraint: Option<Constraint>,
    arrived: Duration,
    pub(crate) expires: Option<Duration>,
    /// Order of arrival.
    number: u64,
}

/// A client's account.
#[derive(Default)]
struct Account {
    /// Tokens served so far, lifted to what the others had when it came back.
    served: u64,
    open: usize,
}

/// A bounded queue, fair between clients: the virtual token counter of Sheng et al., 2023
/// ("Fairness in Serving Large Language Models").
#[derive(Default)]
pub(crate) struct Queue {
    waiting: Vec<Waiting>,
    accounts: HashMap<String, Account>,
    arrivals: u64,
}

impl Queue {
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(crate) fn push(&mut self, now: Duration, request: Request, constraint: Option<Constraint>) {
        self.open(&request.client);
        self.arrivals += 1;
        let expires = request.timeout_ms.map(|ms| now + Duration::from_millis(ms));
        let number = self.arrivals;
        self.waiting.push(Waiting { request, constraint, arrived: now, expires, number });
    }

    /// The request whose turn it is: by priority, then the client that was served least, then
    /// order of arrival.
    pub(crate) fn next(&self, now: Duration) -> Option<&Waiting> {
        self.waiting.iter().min_by_key(|w| {
            let waited = now.saturating_sub(w.arrived).as_secs() / AGEING.as_secs();
            let urgency = i64::from(w.request.priority) - waited as i64;
            (urgency, self.served(&w.request.client), w.number)
        })
    }

    /// Takes a request out of the queue; its client still has it open.
    pub(crate) fn take(&mut self, id: RequestId) -> Option<Waiting> {
        let at = self.waiting.iter().position(|w| w.request.id == id)?;
        Some(self.waiting.remove(at))
    }

    /// Requests whose deadline has passed.
    pub(crate) fn expired(&self, now: Duration) -> Vec<RequestId> {
        let late = |w: &&Waiting| w.expires.is_some_and(|at| at <= now);
        self.waiting.iter().filter(late).map(|w| w.request.id).collect()
    }

    fn served(&self, client: &str) -> u64 {
        self.accounts.get(client).map_or(0, |a| a.served)
    }

    /// Counts tokens that were computed for a client.
    pub(crate) fn charge(&mut self, client: &str, tokens: u64) {
        if let Some(account) = self.accounts.get_mut(client) {
            account.served = account.served.saturating_add(tokens);
        }
    }

    fn open(&mut self, client: &str) {
        // Who was away does not come back with a credit over those who were not.
        let least = self.accounts.values().filter(|a| a.open > 0).map(|a| a.served).min();
        let account = self.accounts.entry(client.to_owned()).or_default();
        if account.open == 0 {
            account.served = account.served.max(least.unwrap_or(0));
        }
        account.open += 1;
    }

    /// A client's request has ended.
    pub(crate) fn close(&mut self, client: &str) {
        if let Some(account) = self.accounts.get_mut(client) {
            account.open = account.open.saturating_sub(1);
        }
        if self.accounts.len() > CLIENTS_MAX {
            self.accounts.retain(|_, a| a.open > 0);
        }
    }
}
