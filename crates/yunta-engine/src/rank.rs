//! The loop of a rank: rank 0 leads (schedules, announces steps, samples), the others follow.
//!
//! Steps may overlap: rank 0 announces and computes the next one while later stages are still at
//! the one before, and collects the logits of each when its order says so. Every rank delivers and
//! collects at the same places in the sequence of orders, so that the operations match.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use yunta_model::{CacheEdit, KV_BLOCK, LanguageModel, ModelError, Pending, Ranks, Step};

use crate::prefix_store::{PrefixStore, SavedBlock};
use crate::scheduler::{ChainHash, Content};
use crate::wire::ToLeader;
use crate::{Drafter, Event, Failure, RequestId, Scheduler, StepPlan, SubmitError};

/// How often an idle leader tells the others that it is there.
pub const PING_INTERVAL: Duration = Duration::from_millis(200);

/// The prefix cache is saved when there has been nothing to do for so long.
const SAVE_AFTER: Duration = Duration::from_secs(2);

/// What rank 0 tells the others to do.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
    /// Deliver the results of the `collect` oldest steps, change the cache, compute the step; then
    /// deliver all results if `last`.
    Step { collect: usize, edits: Vec<CacheEdit>, step: Step, last: bool },
    /// Deliver the results of the oldest steps.
    Collect(usize),
    /// Save these blocks of the KV cache as an edition.
    Save { edition: u64, blocks: Vec<u32> },
    /// Fill these blocks with what was saved.
    Restore { edition: u64, blocks: Vec<u32> },
    /// Nothing to do; the leader lives.
    Ping,
    /// The end: return.
    Stop,
}

/// Why a rank's loop ended before its time.
#[derive(Debug, thiserror::Error)]
pub enum RankError {
    /// The model failed, or a peer was lost.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The leader sent something that is no order: its version differs, or it is no leader.
    #[error("an order of rank 0 could not be read: {0}")]
    Order(String),
}

impl From<yunta_comm::CommError> for RankError {
    fn from(e: yunta_comm::CommError) -> Self {
        Self::Model(ModelError::Comm(e))
    }
}

/// A number that no earlier edition has.
fn edition() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.map_or(0, |t| u64::try_from(t.as_nanos()).unwrap_or(u64::MAX))
}

fn announce(ranks: &mut dyn Ranks, order: &Order) -> Result<(), RankError> {
    let mut bytes = serde_json::to_vec(order).map_err(|e| RankError::Order(e.to_string()))?;
    Ok(ranks.announce(&mut bytes)?)
}

/// A rank at work: its model, its peers, and the steps whose results are still to be delivered.
struct Worker<'a> {
    model: &'a mut dyn LanguageModel,
    ranks: &'a mut dyn Ranks,
    pending: VecDeque<Pending>,
    store: Option<&'a PrefixStore>,
}

impl<'a> Worker<'a> {
    fn new(
        model: &'a mut dyn LanguageModel,
        ranks: &'a mut dyn Ranks,
        store: Option<&'a PrefixStore>,
    ) -> Self {
        Self { model, ranks, pending: VecDeque::new(), store }
    }

    /// Saves or restores this rank's blocks. On rank 0: whether all ranks could.
    fn keep(&mut self, order: &Order) -> Result<bool, RankError> {
        let outcome = match (self.store, order) {
            (Some(store), Order::Save { edition, blocks }) => {
                store.save_blocks(*edition, blocks.iter().map(|b| self.model.export(*b)))
            }
            (Some(store), Order::Restore { edition, blocks }) => {
                let bytes = self.model.block_bytes();
                store.load_blocks(*edition, blocks.len(), bytes, |place, bytes| {
                    let block = blocks.get(place).copied().unwrap_or(u32::MAX);
                    self.model.import(block, bytes).map_err(std::io::Error::other)
                })
            }
            _ => Err(std::io::Error::other("this rank has no prefix cache on disk")),
        };
        // A rank that can't is no reason to fail: what was not saved is computed again.
        let mine = [f32::from(u8::from(outcome.is_ok()))];
        let all = self.ranks.gather(&mine, &vec![1; self.ranks.size()])?;
        Ok(all.is_some_and(|all| all.iter().all(|ok| *ok == 1.0)))
    }

    fn compute(&mut self, edits: &[CacheEdit], step: &Step) -> Result<(), RankError> {
        edits.iter().try_for_each(|edit| self.model.edit(edit))?;
        self.pending.push_back(self.model.compute(step, self.ranks)?);
        Ok(())
    }

    /// Delivers the result of the oldest step; on rank 0 its logits come back.
    fn collect(&mut self) -> Result<Vec<f32>, RankError> {
        let Some(oldest) = self.pending.pop_front() else {
            return Err(RankError::Order("no step is under way".to_owned()));
        };
        Ok(self.model.collect(oldest, self.ranks)?)
    }
}

/// Runs one step on all ranks, as rank 0: the logits of its outputs, `[outputs, vocab]`.
///
/// # Errors
/// [`RankError`] if a rank is lost or the step makes no sense.
pub fn run_step(
    model: &mut dyn LanguageModel,
    ranks: &mut dyn Ranks,
    plan: StepPlan,
) -> Result<Vec<f32>, RankError> {
    let mut worker = Worker::new(model, ranks, None);
    let StepPlan { edits, step } = plan;
    let order = Order::Step { collect: 0, edits, step, last: true };
    announce(worker.ranks, &order)?;
    if let Order::Step { edits, step, .. } = &order {
        worker.compute(edits, step)?;
    }
    worker.collect()
}

/// Tells the other ranks to return from [`follow`].
///
/// # Errors
/// [`RankError`] if a rank is lost.
pub fn stop(ranks: &mut dyn Ranks) -> Result<(), RankError> {
    announce(ranks, &Order::Stop)
}

/// The loop of every rank but 0: returns when rank 0 says so.
///
/// # Errors
/// [`RankError`] if a rank is lost or an order can't be read.
pub fn follow(
    model: &mut dyn LanguageModel,
    ranks: &mut dyn Ranks,
    store: Option<&PrefixStore>,
) -> Result<(), RankError> {
    let mut worker = Worker::new(model, ranks, store);
    loop {
        let mut bytes = Vec::new();
        worker.ranks.announce(&mut bytes)?;
        match serde_json::from_slice(&bytes).map_err(|e| RankError::Order(e.to_string()))? {
            order @ (Order::Save { .. } | Order::Restore { .. }) => {
                worker.keep(&order)?;
            }
            Order::Ping => {}
            Order::Stop => return Ok(()),
            Order::Collect(steps) => {
                for _ in 0..steps {
                    worker.collect()?;
                }
            }
            Order::Step { collect, edits, step, last } => {
                for _ in 0..collect {
                    worker.collect()?;
                }
                worker.compute(&edits, &step)?;
                while last && !worker.pending.is_empty() {
                    worker.collect()?;
                }
            }
        }
    }
}

/// What rank 0 may have besides the model.
#[derive(Default)]
pub struct Helpers<'a> {
    /// Keeps the prefix cache on disk. All ranks have one, or none.
    pub store: Option<&'a PrefixStore>,
    /// Guesses ahead.
    pub drafter: Option<&'a mut Drafter>,
}

/// The loop of rank 0: runs requests from `inbox` until that closes, reporting to `report`.
///
/// # Errors
/// [`RankError`] if a rank is lost; requests under way are not reported then.
pub fn lead(
    model: &mut dyn LanguageModel,
    ranks: &mut dyn Ranks,
    scheduler: &mut Scheduler,
    inbox: &Receiver<ToLeader>,
    report: &mut dyn FnMut(RequestId, Event),
    help: Helpers<'_>,
) -> Result<(), RankError> {
    let Helpers { store, drafter } = help;
    let worker = Worker::new(model, ranks, store);
    let mut leader = Leader {
        worker,
        scheduler,
        drafter,
        start: Instant::now(),
        report,
        saved: 0,
        idle: Duration::ZERO,
    };
    leader.restore()?;
    leader.run(inbox)
}

struct Leader<'a> {
    worker: Worker<'a>,
    scheduler: &'a mut Scheduler,
    drafter: Option<&'a mut Drafter>,
    start: Instant,
    report: &'a mut dyn FnMut(RequestId, Event),
    /// Tokens that had been computed when the prefix cache was saved last.
    saved: u64,
    /// How long there has been nothing to do.
    idle: Duration,
}

impl Leader<'_> {
    /// Fills the cache with what an earlier run has saved, if that is there and whole.
    fn restore(&mut self) -> Result<(), RankError> {
        let Some(store) = self.worker.store else { return Ok(()) };
        let Ok((edition, saved)) = store.load_index() else { return Ok(()) };
        let content = |s: SavedBlock| Content { parent: ChainHash(s.parent), tokens: s.tokens };
        let contents: Vec<Content> = saved.into_iter().map(content).collect();
        if contents.iter().any(|c| c.tokens.len() != KV_BLOCK) {
            return Ok(());
        }
        let Some(blocks) = self.scheduler.make_room(contents.len()) else { return Ok(()) };
        let order = Order::Restore { edition, blocks };
        announce(self.worker.ranks, &order)?;
        let restored = self.worker.keep(&order)?;
        if let Order::Restore { blocks, .. } = &order {
            self.scheduler.adopt(blocks, restored.then_some(&contents));
        }
        Ok(())
    }

    /// Saves the cache, if there is anything new in it.
    fn save(&mut self) -> Result<(), RankError> {
        let Some(store) = self.worker.store else { return Ok(()) };
        let stats = self.scheduler.stats();
        let computed = stats.prompt_tokens + stats.output_tokens;
        if computed == self.saved {
            return Ok(());
        }
        self.saved = computed;
        // A block is worth nothing without those before it, and they were used at the same time.
        let mut known = self.scheduler.known_blocks();
        let room = store.room(self.worker.model.block_bytes());
        known.drain(..known.len().saturating_sub(room));
        let edition = edition();
        let blocks = known.iter().map(|(block, _)| *block).collect();
        let order = Order::Save { edition, blocks };
        announce(self.worker.ranks, &order)?;
        if self.worker.keep(&order)? {
            let saved =
                |(_, c): (u32, Content)| SavedBlock { parent: c.parent.0, tokens: c.tokens };
            // As above: what can't be saved is computed again.
            let _ = store.save_index(edition, known.into_iter().map(saved).collect());
        }
        Ok(())
    }

    fn run(&mut self, inbox: &Receiver<ToLeader>) -> Result<(), RankError> {
        loop {
            if !self.take_messages(inbox) {
                return stop(self.worker.ranks);
            }
            let now = self.start.elapsed();
            for (id, event) in self.scheduler.expire(now) {
                (self.report)(id, event);
            }
            self.draft()?;
            if let Some(plan) = self.scheduler.next_step(now) {
                self.idle = Duration::ZERO;
                self.step(plan)?;
            } else if !self.worker.pending.is_empty() {
                announce(self.worker.ranks, &Order::Collect(1))?;
                self.finish_oldest()?;
            } else {
                match inbox.recv_timeout(PING_INTERVAL) {
                    Ok(message) => self.take(message),
                    Err(RecvTimeoutError::Timeout) => {
                        self.idle += PING_INTERVAL;
                        if self.idle >= SAVE_AFTER {
                            self.save()?;
                        }
                        announce(self.worker.ranks, &Order::Ping)?;
                    }
                    Err(RecvTimeoutError::Disconnected) => return stop(self.worker.ranks),
                }
            }
        }
    }

    /// Lets the draft model guess ahead for the sequences whose turn it may be.
    fn draft(&mut self) -> Result<(), RankError> {
        let Some(drafter) = &mut self.drafter else { return Ok(()) };
        let requests = self.scheduler.draft_requests();
        if !requests.is_empty() {
            let start = Instant::now();
            let drafts = drafter.propose(&requests)?;
            self.scheduler.offer_drafts(&requests, drafts, start.elapsed());
        }
        Ok(())
    }

    fn step(&mut self, plan: StepPlan) -> Result<(), RankError> {
        let (under_way, depth) = (self.worker.pending.len(), self.scheduler.micro_batches());
        // What later stages are done with by the time that this rank has computed its part.
        let due = self.scheduler.awaits_outputs() || under_way >= depth;
        let collect = usize::from(under_way > 0 && due);
        // With nothing to overlap, the result is wanted as soon as it is there.
        let last = depth == 1 || (under_way == 0 && !self.scheduler.has_more());
        let StepPlan { edits, step } = plan;
        let order = Order::Step { collect, edits, step, last };
        announce(self.worker.ranks, &order)?;
        if let Order::Step { edits, step, .. } = &order {
            self.worker.compute(edits, step)?;
        }
        for _ in 0..collect {
            self.finish_oldest()?;
        }
        while last && !self.worker.pending.is_empty() {
            self.finish_oldest()?;
        }
        Ok(())
    }

    fn finish_oldest(&mut self) -> Result<(), RankError> {
        let logits = self.worker.collect()?;
        for (id, event) in self.scheduler.finish_step(self.start.elapsed(), &logits) {
            (self.report)(id, event);
        }
        Ok(())
    }

    /// Takes what has arrived; `false` when the inbox is closed.
    fn take_messages(&mut self, inbox: &Receiver<ToLeader>) -> bool {
        loop {
            match inbox.try_recv() {
                Ok(message) => self.take(message),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    fn take(&mut self, message: ToLeader) {
        match message {
            ToLeader::Submit(request) => {
                let id = request.id;
                if let Err(e) = self.scheduler.submit(self.start.elapsed(), *request) {
                    let cause = match e {
                        SubmitError::Invalid { .. } => Failure::Request,
                        SubmitError::Busy { .. } | SubmitError::Unavailable { .. } => {
                            Failure::Retriable
                        }
                    };
                    (self.report)(id, Event::Failed { message: e.to_string(), cause });
                }
            }
            ToLeader::Cancel(id) => {
                if let Some(event) = self.scheduler.cancel(id) {
                    (self.report)(id, event);
                }
            }
        }
    }
}
