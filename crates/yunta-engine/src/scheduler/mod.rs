//! Which tokens are computed next: a pure core without clock, socket or thread.
//!
//! Requests wait in a bounded queue, fair between clients, until the KV cache has room for all that
//! they can reach: a request that runs never runs out of memory. Each step takes one token of
//! every running sequence (more where a draft is likely to be right), and prompt tokens as many as
//! the running streams can spare. Equal beginnings of sequences share blocks of the cache.
//!
//! With several micro-batches, as many steps are under way at once: the stages of a pipeline work
//! on different sequences, or on consecutive pieces of one prompt.

mod blocks;
mod draft;
mod pace;
mod queue;
mod sequence;

use std::collections::VecDeque;
use std::time::Duration;

use yunta_model::{CacheEdit, KV_BLOCK, Step};

use crate::{
    DraftRequest, Event, Failure, FinishReason, GrammarCompiler, GrammarError, Request, RequestId,
    SubmitError,
};
use yunta_grammar::Constraint;

use blocks::BlockPool;
pub(crate) use blocks::{ChainHash, Content};
use pace::Pace;
use queue::{OUTPUT_COST, Queue};
use sequence::Sequence;

/// Tokens that another sequence is about to compute, from which waiting for them is worth it.
const WORTH_WAITING: usize = 16;

/// Steps with streams and prompts between two with streams alone.
const MEASURE_EVERY: u32 = 50;

/// Streams may be slowed so many times more by many prompts than by one.
const CROWD_MAX: f64 = 64.0;

/// Bounds of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SchedulerConfig {
    /// Sequences that run at once.
    pub sequences: usize,
    /// Tokens per sequence, prompt and output together.
    pub context: usize,
    /// Tokens per step.
    pub step_tokens: usize,
    /// Requests that may wait for admission.
    pub queue: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Blocks of the KV cache, of [`KV_BLOCK`] positions each.
    pub blocks: usize,
    /// How far back all layers look, if they have a bound: blocks beyond it are given back.
    pub window: Option<usize>,
    /// Steps under way at once: the stages of the pipeline.
    pub micro_batches: usize,
    /// How much longer a step may take for the sake of a prompt: 2 for twice as long. Where many
    /// prompts wait, up to 64 times as much is added.
    pub stall_ratio: f64,
    /// Tokens per draft; 0 for no speculation.
    pub draft_tokens: usize,
}

/// A step, and what has to be done to the KV cache before it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepPlan {
    /// In this order.
    pub edits: Vec<CacheEdit>,
    /// Then this.
    pub step: Step,
}

/// What the scheduler has done so far, for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SchedulerStats {
    /// Prompt tokens that were computed.
    pub prompt_tokens: u64,
    /// Prompt tokens that were found in the KV cache.
    pub cached_tokens: u64,
    /// Tokens that were generated.
    pub output_tokens: u64,
    /// Drafted tokens that were computed.
    pub drafted_tokens: u64,
    /// Of these, right ones.
    pub accepted_tokens: u64,
    /// Steps.
    pub steps: u64,
}

/// Part of a step under way: a sequence whose next token comes out of it.
struct Entry {
    slot: usize,
    turn: u64,
    /// Tokens after the last known one, whose outputs come too.
    draft: Vec<u32>,
}

/// Makes what compiles grammars for the model's tokenizer.
pub type GrammarSource = Box<dyn FnMut() -> Result<GrammarCompiler, GrammarError> + Send>;

/// A step under way.
struct Flight {
    /// In the order of the outputs.
    entries: Vec<Entry>,
    started: Duration,
    generated: usize,
    prompt: usize,
}

/// Schedules the sequences of one engine.
pub struct Scheduler {
    config: SchedulerConfig,
    grammar_source: Option<GrammarSource>,
    /// Made when a request first needs it.
    grammars: Option<GrammarCompiler>,
    queue: Queue,
    slots: Vec<Option<Sequence>>,
    pool: BlockPool,
    pace: Pace,
    flights: VecDeque<Flight>,
    /// Steps with streams and prompts since the last one with streams alone.
    mixed_steps: u32,
    /// Edits to go with the next step.
    edits: Vec<CacheEdit>,
    /// What to report when the next step is finished.
    news: Vec<(RequestId, Event)>,
    turns: u64,
    stats: SchedulerStats,
    /// When the last step came back: a step that was sent before it had to wait until then.
    last_finish: Duration,
}

impl Scheduler {
    /// An idle scheduler.
    pub fn new(config: SchedulerConfig) -> Self {
        let blocks = config.blocks.max(1);
        let config = SchedulerConfig {
            sequences: config.sequences.max(1),
            context: config.context.min(blocks.saturating_mul(KV_BLOCK)),
            step_tokens: config.step_tokens.max(1),
            micro_batches: config.micro_batches.max(1),
            blocks,
            ..config
        };
        Self {
            config,
            grammar_source: None,
            grammars: None,
            queue: Queue::default(),
            slots: (0..config.sequences).map(|_| None).collect(),
            pool: BlockPool::new(config.blocks),
            pace: Pace::default(),
            flights: VecDeque::new(),
            mixed_steps: 0,
            edits: Vec::new(),
            news: Vec::new(),
            turns: 0,
            stats: SchedulerStats::default(),
            last_finish: Duration::ZERO,
        }
    }

    /// Lets requests have grammars; `source` is called when the first one does.
    #[must_use]
    pub fn with_grammars(self, source: GrammarSource) -> Self {
        Self { grammar_source: Some(source), ..self }
    }

    /// Queues a request. `now` counts from any fixed moment, here and below.
    ///
    /// # Errors
    /// [`SubmitError::Busy`] if the queue is full, [`SubmitError::Invalid`] if the request can
    /// never run.
    pub fn submit(&mut self, now: Duration, request: Request) -> Result<(), SubmitError> {
        check(&self.config, &request)?;
        if self.queue.len() >= self.config.queue {
            return Err(SubmitError::Busy { waiting: self.queue.len() });
        }
        let constraint = self.constraint(&request)?;
        self.queue.push(now, request, constraint);
        Ok(())
    }

    /// What a request's grammar allows behind what it has emitted already.
    fn constraint(&mut self, request: &Request) -> Result<Option<Constraint>, SubmitError> {
        let Some(grammar) = &request.grammar else { return Ok(None) };
        let invalid = |e: GrammarError| SubmitError::Invalid { reason: e.to_string() };
        if self.grammars.is_none() {
            let source = self.grammar_source.as_mut().map(|make| make());
            self.grammars = source.transpose().map_err(invalid)?;
        }
        let Some(grammars) = &self.grammars else {
            let reason = "this engine does not know the model's tokenizer".to_owned();
            return Err(SubmitError::Invalid { reason });
        };
        let mut constraint = grammars.start(grammar).map_err(invalid)?;
        request.emitted.iter().try_for_each(|t| constraint.accept(*t)).map_err(invalid)?;
        Ok(Some(constraint))
    }

    /// Ends a request and frees all that it holds. `None` if it is not known (any more).
    pub fn cancel(&mut self, id: RequestId) -> Option<Event> {
        self.remove(id).then_some(Event::Finished { reason: FinishReason::Cancelled })
    }

    /// Ends the requests whose deadline has passed.
    pub fn expire(&mut self, now: Duration) -> Vec<(RequestId, Event)> {
        let running = self.slots.iter().flatten();
        let late = running.filter(|s| s.expires.is_some_and(|at| at <= now)).map(|s| s.request.id);
        let ids: Vec<RequestId> = late.chain(self.queue.expired(now)).collect();
        let message = "the request's deadline has passed".to_owned();
        ids.into_iter()
            .filter(|id| self.remove(*id))
            .map(|id| (id, Event::Failed { message: message.clone(), cause: Failure::Deadline }))
            .collect()
    }

    fn remove(&mut self, id: RequestId) -> bool {
        if let Some(waiting) = self.queue.take(id) {
            self.queue.close(&waiting.request.client);
            return true;
        }
        let running = |s: &Option<Sequence>| s.as_ref().is_some_and(|s| s.request.id == id);
        let Some(slot) = self.slots.iter().position(running) else { return false };
        self.release(slot);
        true
    }

    /// Requests that wait or run.
    pub fn open(&self) -> usize {
        self.queue.len() + self.slots.iter().flatten().count()
    }

    /// Steps that were planned and not finished.
    pub fn in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Steps that are to be under way at once.
    pub fn micro_batches(&self) -> usize {
        self.config.micro_batches
    }

    /// Whether the oldest step under way has outputs.
    pub fn awaits_outputs(&self) -> bool {
        self.flights.front().is_some_and(|f| !f.entries.is_empty())
    }

    /// Whole blocks that are known, with their contents: those used last come last.
    pub(crate) fn known_blocks(&self) -> Vec<(u32, Content)> {
        self.pool.contents()
    }

    /// Makes room for blocks that were saved; `None` if there is not enough.
    pub(crate) fn make_room(&mut self, blocks: usize) -> Option<Vec<u32>> {
        if blocks > self.pool.available() {
            return None;
        }
        Some((0..blocks).map_while(|_| self.pool.allocate()).collect())
    }

    /// The blocks of [`Scheduler::make_room`] hold these contents now, or nothing.
    pub(crate) fn adopt(&mut self, blocks: &[u32], contents: Option<&[Content]>) {
        for (block, content) in blocks.iter().zip(contents.unwrap_or_default()) {
            self.pool.note(*block, content.parent, &content.tokens);
        }
        // The first of them were used least recently: they are the first to go again.
        let newest_first: Vec<u32> = blocks.iter().rev().copied().collect();
        self.pool.release(&newest_first);
    }

    /// Whether there are tokens that can be computed while a step is under way.
    pub fn has_more(&self) -> bool {
        self.slots.iter().flatten().any(|s| s.pending() > 0)
    }

    /// What was done so far.
    pub fn stats(&self) -> SchedulerStats {
        self.stats
    }

    /// The next step, or `None` if there is nothing to do before a step under way is finished.
    pub fn next_step(&mut self, now: Duration) -> Option<StepPlan> {
        if self.flights.len() > self.config.micro_batches {
            return None;
        }
        self.admit(now);
        let mut step = Step::default();
        let mut flight = Flight { entries: Vec::new(), started: now, generated: 0, prompt: 0 };
        self.take_generating(&mut step, &mut flight);
        self.take_prompts(&mut step, &mut flight);
        if step.tokens.is_empty() {
            return None;
        }
        self.stats.steps += 1;
        self.flights.push_back(flight);
        Some(StepPlan { edits: std::mem::take(&mut self.edits), step })
    }

    /// One token each for the sequences that generate, and drafts; a share of them if several
    /// steps are to be under way.
    fn take_generating(&mut self, step: &mut Step, flight: &mut Flight) {
        let generating = self.slots.iter().flatten().filter(|s| s.generates()).count();
        let share = generating.div_ceil(self.config.micro_batches).min(self.config.step_tokens);
        let mut ready: Vec<usize> = self.slots_where(|s| s.generates() && s.pending() == 1);
        ready.sort_by_key(|&s| self.slots[s].as_ref().map(|q| (q.last_step, q.turn)));
        ready.truncate(share);
        let count = ready.len();
        // All drafts together lengthen the step for every stream: not by much where there are many.
        let drafts = self.config.draft_tokens.max(2 * count);
        let mut left = (self.config.step_tokens - count).min(drafts);
        for (i, slot) in ready.into_iter().enumerate() {
            let Some(sequence) = &mut self.slots[slot] else { continue };
            let most = self.config.draft_tokens.min(left / (count - i));
            let others = flight.generated + count - i - 1;
            let draft = sequence.draft(&self.config, &self.pace, others, most);
            left -= draft.len();
            sequence.grow(sequence.computed + 1 + draft.len(), &mut self.pool, &mut self.edits);
            let mut tokens = sequence.take_pending(1);
            tokens.extend_from_slice(&draft);
            step.push(slot, sequence.computed - 1, &tokens, tokens.len());
            sequence.last_step = self.stats.steps;
            flight.generated += tokens.len();
            self.stats.drafted_tokens += draft.len() as u64;
            flight.entries.push(Entry { slot, turn: sequence.turn, draft });
        }
    }

    /// Prompt tokens: half of what there is room for goes to the oldest prompt, the rest to the
    /// shortest ones.
    fn take_prompts(&mut self, step: &mut Step, flight: &mut Flight) {
        let mut room = self.config.step_tokens.saturating_sub(step.tokens.len());
        let mut prompts = self.slots_where(|s| !s.generates() && s.pending() > 0);
        let streams = self.slots.iter().flatten().filter(|s| s.generates()).count();
        if streams > 0 {
            if self.must_measure(flight.generated) {
                return;
            }
            // One prompt may slow the streams by the ratio; a crowd, which waits longer, by more,
            // and more still where it outnumbers them: else few streams run fast while many wait.
            let waiting = (prompts.len() + self.queue.len()) as f64;
            let crowd = waiting / 2.0 * (waiting / streams as f64).max(1.0);
            let ratio = 1.0 + (self.config.stall_ratio - 1.0) * crowd.clamp(1.0, CROWD_MAX);
            room = room.min(self.pace.prompt_budget(flight.generated.max(1), ratio));
        }
        prompts.sort_by_key(|&s| self.slots[s].as_ref().map(|q| (q.request.priority, q.turn)));
        let mut shares: Vec<(usize, usize)> = Vec::new();
        let pending = |s: usize| self.slots[s].as_ref().map_or(0, Sequence::pending);
        if let Some(oldest) = prompts.first() {
            let n = pending(*oldest).min(room.div_ceil(2));
            shares.push((*oldest, n));
            room -= n;
        }
        prompts.sort_by_key(|&s| (pending(s), self.slots[s].as_ref().map(|q| q.turn)));
        for slot in prompts {
            let share = match shares.iter().position(|(s, _)| *s == slot) {
                Some(at) => at,
                None => {
                    shares.push((slot, 0));
                    shares.len() - 1
                }
            };
            let n = (pending(slot) - shares[share].1).min(room);
            shares[share].1 += n;
            room -= n;
        }
        for (slot, n) in shares.into_iter().filter(|(_, n)| *n > 0) {
            self.take_prompt(slot, n, step, flight);
        }
    }

    /// Whether a step goes without prompts, to see what the streams take by themselves: what prompts
    /// may cost is reckoned from that.
    fn must_measure(&mut self, generated: usize) -> bool {
        if generated == 0 {
            return false;
        }
        self.mixed_steps += 1;
        let due = self.mixed_steps > MEASURE_EVERY || self.pace.seen(generated).is_none();
        if due {
            self.mixed_steps = 0;
        }
        due
    }

    fn take_prompt(&mut self, slot: usize, n: usize, step: &mut Step, flight: &mut Flight) {
        let Some(sequence) = &mut self.slots[slot] else { return };
        sequence.grow(sequence.computed + n, &mut self.pool, &mut self.edits);
        let tokens = sequence.take_pending(n);
        let done = sequence.pending() == 0;
        step.push(slot, sequence.computed - n, &tokens, usize::from(done));
        sequence.last_step = self.stats.steps;
        sequence.note(&mut self.pool);
        sequence.give_back(&self.config, &mut self.pool);
        flight.prompt += n;
        self.stats.prompt_tokens += n as u64;
        self.queue.charge(&sequence.request.client, n as u64);
        if done {
            flight.entries.push(Entry { slot, turn: sequence.turn, draft: Vec::new() });
        }
    }

    fn slots_where(&self, want: impl Fn(&Sequence) -> bool) -> Vec<usize> {
        let has = |s: &usize| self.slots[*s].as_ref().is_some_and(&want);
        (0..self.slots.len()).filter(has).collect()
    }

    /// Sequences that would take a draft of a draft model in the next step.
    pub fn draft_requests(&self) -> Vec<DraftRequest> {
        let ready = self.slots.iter().flatten().filter(|s| s.generates() && s.pending() == 1);
        let count = ready.clone().count();
        let request = |s: &Sequence| DraftRequest {
            slot: s.slot,
            tokens: s.tokens.clone(),
            // One token at least, to learn whether more would be right.
            most: s.draft_length(&self.config, &self.pace, count.saturating_sub(1)).max(1),
        };
        ready.map(request).collect()
    }

    /// Drafts for [`Scheduler::draft_requests`], and what they took.
    pub fn offer_drafts(
        &mut self,
        requests: &[DraftRequest],
        drafts: Vec<Vec<u32>>,
        took: Duration,
    ) {
        let tokens: usize = drafts.iter().map(Vec::len).sum();
        self.pace.observe_drafts(tokens, took);
        for (request, draft) in requests.iter().zip(drafts) {
            if let Some(sequence) = self.slots.get_mut(request.slot).and_then(Option::as_mut) {
                sequence.offered = Some(draft);
            }
        }
    }

    /// Takes the logits of the oldest step under way (`[outputs, vocab]`), and returns what to
    /// report.
    pub fn finish_step(&mut self, now: Duration, logits: &[f32]) -> Vec<(RequestId, Event)> {
        let Some(flight) = self.flights.pop_front() else { return Vec::new() };
        // Behind another step, its own time began when that one was done.
        let began = flight.started.max(self.last_finish);
        self.last_finish = now;
        self.pace.observe(flight.generated, flight.prompt, now.saturating_sub(began));
        let vocab = self.config.vocab.max(1);
        let mut rows = logits.chunks_exact(vocab);
        let mut events = std::mem::take(&mut self.news);
        for entry in flight.entries {
            let rows: Vec<&[f32]> =
                (0..=entry.draft.len()).map(|_| rows.next().unwrap_or(&[])).collect();
            self.finish_entry(&entry, &rows, &mut events);
        }
        events
    }

    fn finish_entry(
        &mut self,
        entry: &Entry,
        rows: &[&[f32]],
        events: &mut Vec<(RequestId, Event)>,
    ) {
        let slot = self.slots.get_mut(entry.slot).and_then(Option::as_mut);
        // The request may have been cancelled meanwhile, and its slot taken by another.
        let Some(sequence) = slot.filter(|s| s.turn == entry.turn) else { return };
        let before = sequence.tokens.len();
        let ended = sequence.advance(&self.config, &entry.draft, rows, events);
        let new = (sequence.tokens.len() - before) as u64;
        self.stats.output_tokens += new;
        self.stats.accepted_tokens += new.saturating_sub(1);
        sequence.note(&mut self.pool);
        sequence.give_back(&self.config, &mut self.pool);
        self.queue.charge(&sequence.request.client, new * OUTPUT_COST);
        if ended {
            self.release(entry.slot);
        }
    }

    /// Admits requests while there are slots, and blocks for all that the next one can reach. The
    /// one whose turn it is is never passed over: large requests get their place too.
    fn admit(&mut self, now: Duration) {
        while let Some(slot) = self.slots.iter().position(Option::is_none) {
            let Some(next) = self.queue.next(now) else { break };
            let tokens = [&next.request.prompt[..], &next.request.emitted].concat();
            // The last token is computed in any case: its logits are wanted.
            let known = self.pool.lookup(tokens.split_last().map_or(&[], |(_, before)| before));
            if self.computes_soon(&tokens, known.tokens()) {
                break;
            }
            let reach = sequence::reach(&self.config, &next.request);
            let idle = known.blocks.iter().filter(|b| self.pool.is_idle(**b)).count();
            let promised: usize = self.slots.iter().flatten().map(Sequence::promised).sum();
            let free = self.pool.available().saturating_sub(idle + promised);
            if reach.saturating_sub(known.blocks.len()) > free {
                break;
            }
            let id = next.request.id;
            let Some(waiting) = self.queue.take(id) else { break };
            self.turns += 1;
            let mut sequence = Sequence::new(waiting, tokens, slot, self.turns, reach);
            sequence.begin(known, &mut self.pool, &mut self.edits);
            self.stats.cached_tokens += sequence.computed as u64;
            self.news.push((id, Event::Started { cached: sequence.computed }));
            self.slots[slot] = Some(sequence);
        }
    }

    /// Whether a running sequence is about to compute more of the same beginning: waiting for it
    /// is cheaper than computing it twice.
    fn computes_soon(&self, tokens: &[u32], known: usize) -> bool {
        self.slots.iter().flatten().any(|s| {
            let equal = s.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
            let equal = equal.min(tokens.len() - 1);
            s.pending() > 1 && s.computed < equal && equal >= known + WORTH_WAITING
        })
    }

    fn release(&mut self, slot: usize) {
        let Some(sequence) = self.slots.get_mut(slot).and_then(Option::take) else { return };
        self.queue.close(&sequence.request.client);
        self.news.retain(|(id, _)| *id != sequence.request.id);
        self.pool.release(sequence.held());
        self.edits.push(CacheEdit::Table { slot, keep: 0, blocks: Vec::new() });
    }
}

/// Whether a request can be served at all.
pub(crate) fn check(config: &SchedulerConfig, request: &Request) -> Result<(), SubmitError> {
    let invalid = |reason: String| Err(SubmitError::Invalid { reason });
    let length = request.prompt.len() + request.emitted.len();
    if request.prompt.is_empty() {
        return invalid("the prompt is empty".to_owned());
    }
    if request.max_tokens <= request.emitted.len() {
        return invalid("max_tokens leaves nothing to generate".to_owned());
    }
    if length >= config.context {
        let context = config.context;
        return invalid(format!(
            "a prompt of {length} tokens leaves no room in a context of {context}"
        ));
    }
    let tokens = request.prompt.iter().chain(&request.emitted);
    if let Some(t) = tokens.copied().find(|&t| t as usize >= config.vocab) {
        return invalid(format!("token {t} is outside the vocabulary of {}", config.vocab));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
