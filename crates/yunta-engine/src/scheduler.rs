//! Which tokens are computed next: a pure core without clock, socket or thread.
//!
//! Requests wait in a bounded queue for a slot of the KV cache. Each step takes one token of every
//! running sequence, and fills the rest of its budget with prompt tokens, first come first served,
//! so that a long prompt does not stall the others for longer than a step.

use std::collections::VecDeque;

use yunta_model::Step;

use crate::sampling::{logprobs, sample};
use crate::{Event, FinishReason, Request, RequestId, SubmitError};

/// Bounds of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Sequences that run at once.
    pub slots: usize,
    /// Tokens per sequence, prompt and output together.
    pub context: usize,
    /// Tokens per step.
    pub step_tokens: usize,
    /// Requests that may wait for a slot.
    pub queue: usize,
    /// Tokens in the vocabulary.
    pub vocab: usize,
}

struct Sequence {
    request: Request,
    /// Prompt and output.
    tokens: Vec<u32>,
    /// How many of `tokens` are in the KV cache.
    computed: usize,
    /// Order of admission.
    turn: u64,
}

impl Sequence {
    fn emitted(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }
}

/// Schedules the sequences of one engine.
pub struct Scheduler {
    config: SchedulerConfig,
    waiting: VecDeque<Request>,
    slots: Vec<Option<Sequence>>,
    /// Slots whose sequences ended since the last step.
    freed: Vec<usize>,
    /// Slots of the step under way, in the order of its outputs.
    in_step: Vec<usize>,
    turns: u64,
}

impl Scheduler {
    /// An idle scheduler.
    pub fn new(config: SchedulerConfig) -> Self {
        let slots = (0..config.slots.max(1)).map(|_| None).collect();
        Self {
            config,
            waiting: VecDeque::new(),
            slots,
            freed: Vec::new(),
            in_step: Vec::new(),
            turns: 0,
        }
    }

    /// Queues a request.
    ///
    /// # Errors
    /// [`SubmitError::Busy`] if the queue is full, [`SubmitError::Invalid`] if the request can
    /// never run.
    pub fn submit(&mut self, request: Request) -> Result<(), SubmitError> {
        check(&self.config, &request)?;
        if self.waiting.len() >= self.config.queue {
            return Err(SubmitError::Busy { waiting: self.waiting.len() });
        }
        self.waiting.push_back(request);
        Ok(())
    }

    /// Ends a request. `None` if it is not known (any more).
    pub fn cancel(&mut self, id: RequestId) -> Option<Event> {
        let known = if let Some(i) = self.waiting.iter().position(|r| r.id == id) {
            self.waiting.remove(i).is_some()
        } else if let Some(slot) = self.slot_of(id) {
            self.release(slot);
            true
        } else {
            false
        };
        known.then_some(Event::Finished { reason: FinishReason::Cancelled })
    }

    /// Requests that wait or run.
    pub fn open(&self) -> usize {
        self.waiting.len() + self.slots.iter().flatten().count()
    }

    /// Slots to forget before the next step.
    pub fn take_freed(&mut self) -> Vec<usize> {
        std::mem::take(&mut self.freed)
    }

    /// The next step, or `None` if there is nothing to do.
    pub fn next_step(&mut self) -> Option<Step> {
        self.admit();
        let mut order: Vec<usize> =
            (0..self.slots.len()).filter(|&s| self.slots[s].is_some()).collect();
        // One token each for the sequences that generate; then prompts, oldest first.
        order.sort_by_key(|&s| {
            self.slots[s].as_ref().map(|q| (q.tokens.len() - q.computed > 1, q.turn))
        });
        let mut step = Step::default();
        let mut left = self.config.step_tokens.max(1);
        self.in_step.clear();
        for slot in order {
            let Some(sequence) = &mut self.slots[slot] else { continue };
            let pending = &sequence.tokens[sequence.computed..];
            let n = pending.len().min(left);
            if n == 0 {
                break;
            }
            let wants_logits = n == pending.len();
            step.push(slot, sequence.computed, &pending[..n], usize::from(wants_logits));
            sequence.computed += n;
            left -= n;
            if wants_logits {
                self.in_step.push(slot);
            }
        }
        (!step.tokens.is_empty()).then_some(step)
    }

    /// Takes the logits of the step's outputs (`[outputs, vocab]`), and returns what to report.
    pub fn finish_step(&mut self, logits: &[f32]) -> Vec<(RequestId, Event)> {
        let vocab = self.config.vocab.max(1);
        let slots = std::mem::take(&mut self.in_step);
        let mut rows = logits.chunks_exact(vocab);
        let mut events = Vec::new();
        for slot in slots {
            let row = rows.next().unwrap_or(&[]);
            let Some(sequence) = &mut self.slots[slot] else { continue };
            let ended = advance(&self.config, sequence, row, &mut events);
            if ended {
                self.release(slot);
            }
        }
        events
    }

    fn admit(&mut self) {
        for slot in 0..self.slots.len() {
            if self.slots[slot].is_some() {
                continue;
            }
            let Some(request) = self.waiting.pop_front() else { break };
            let mut tokens = request.prompt.clone();
            tokens.extend_from_slice(&request.emitted);
            self.turns += 1;
            self.slots[slot] = Some(Sequence { request, tokens, computed: 0, turn: self.turns });
        }
    }

    fn slot_of(&self, id: RequestId) -> Option<usize> {
        self.slots.iter().position(|s| s.as_ref().is_some_and(|q| q.request.id == id))
    }

    fn release(&mut self, slot: usize) {
        self.slots[slot] = None;
        self.freed.push(slot);
        self.in_step.retain(|&s| s != slot);
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

/// Draws the next token of a sequence. Returns whether the sequence has ended.
fn advance(
    config: &SchedulerConfig,
    sequence: &mut Sequence,
    logits: &[f32],
    events: &mut Vec<(RequestId, Event)>,
) -> bool {
    let request = &sequence.request;
    let index = sequence.emitted();
    let Some(token) = sample(logits, &request.sampling, index) else {
        let message = "the model produced no finite logits: a rank may compute garbage".to_owned();
        events.push((request.id, Event::Failed { message, retriable: false }));
        return true;
    };
    let logprobs = request.logprobs.map(|k| logprobs(logits, token, k));
    events.push((request.id, Event::Token { index, token, logprobs }));
    sequence.tokens.push(token);
    let reason = if request.stop_tokens.contains(&token) {
        Some(FinishReason::Stop)
    } else if index + 1 >= request.max_tokens || sequence.tokens.len() >= config.context {
        Some(FinishReason::Length)
    } else {
        None
    };
    if let Some(reason) = reason {
        events.push((request.id, Event::Finished { reason }));
    }
    reason.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SamplingParams;
    use proptest::prelude::*;
    use std::collections::HashMap;

    const VOCAB: usize = 50;

    fn config() -> SchedulerConfig {
        SchedulerConfig { slots: 3, context: 64, step_tokens: 8, queue: 100, vocab: VOCAB }
    }

    fn request(id: u64, prompt: usize, max_tokens: usize) -> Request {
        Request {
            id: RequestId(id),
            prompt: (0..prompt).map(|i| ((id as usize * 7 + i) % VOCAB) as u32).collect(),
            emitted: Vec::new(),
            max_tokens,
            sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
            stop_tokens: vec![0],
            logprobs: None,
        }
    }

    /// A model whose next token is a function of the sequence so far, kept per slot as a cache
    /// would be: a wrong position or a slot mixed up shows in the output.
    #[derive(Default)]
    struct Toy {
        cache: HashMap<usize, Vec<u32>>,
    }

    fn next_token(sequence: &[u32]) -> u32 {
        let sum = sequence.iter().enumerate().map(|(i, t)| (i as u32 + 3) * t).sum::<u32>();
        1 + sum % (VOCAB as u32 - 1)
    }

    impl Toy {
        fn run(&mut self, step: &Step) -> Vec<f32> {
            let mut at = 0;
            let mut logits = Vec::new();
            for span in &step.spans {
                let cache = self.cache.entry(span.slot).or_default();
                cache.truncate(span.position);
                assert_eq!(cache.len(), span.position, "a position was skipped");
                for t in &step.tokens[at..at + span.tokens] {
                    cache.push(*t);
                    if step.outputs.contains(&at) {
                        let mut row = vec![0.0; VOCAB];
                        row[next_token(cache) as usize] = 1.0;
                        logits.extend(row);
                    }
                    at += 1;
                }
            }
            logits
        }
    }

    fn expected(request: &Request) -> Vec<u32> {
        let mut tokens = request.prompt.clone();
        while tokens.len() - request.prompt.len() < request.max_tokens && tokens.len() < 64 {
            tokens.push(next_token(&tokens));
        }
        tokens[request.prompt.len()..].to_vec()
    }

    #[test]
    fn what_can_never_run_is_refused() {
        let mut s = Scheduler::new(config());
        assert!(s.submit(request(1, 0, 5)).is_err());
        assert!(s.submit(request(1, 64, 5)).is_err());
        assert!(s.submit(request(1, 4, 0)).is_err());
        let mut outside = request(1, 4, 4);
        outside.prompt[2] = VOCAB as u32;
        assert!(s.submit(outside).is_err());
        assert_eq!(s.open(), 0);
    }

    #[test]
    fn a_full_queue_says_so() {
        let mut s = Scheduler::new(SchedulerConfig { queue: 2, ..config() });
        s.submit(request(1, 4, 4)).unwrap();
        s.submit(request(2, 4, 4)).unwrap();
        assert_eq!(s.submit(request(3, 4, 4)), Err(SubmitError::Busy { waiting: 2 }));
    }

    #[test]
    fn a_continued_request_goes_on_where_it_was() {
        let whole = request(5, 6, 12);
        let tokens = expected(&whole);
        let mut s = Scheduler::new(config());
        s.submit(Request { emitted: tokens[..5].to_vec(), ..whole }).unwrap();
        let mut toy = Toy::default();
        let mut got = tokens[..5].to_vec();
        while let Some(step) = s.next_step() {
            for (_, event) in s.finish_step(&toy.run(&step)) {
                if let Event::Token { index, token, .. } = event {
                    assert_eq!(index, got.len());
                    got.push(token);
                }
            }
        }
        assert_eq!(got, tokens);
    }

    proptest! {
        /// Any mix of requests and cancellations: every request ends once, with the tokens that it
        /// would have had alone; steps stay within bounds; all slots are given back.
        #[test]
        fn every_request_ends_with_its_own_tokens(
            work in prop::collection::vec((1usize..40, 1usize..20, 0usize..12, any::<bool>()), 1..12),
        ) {
            let mut s = Scheduler::new(config());
            let mut toy = Toy::default();
            let mut requests = HashMap::new();
            let mut output: HashMap<u64, Vec<u32>> = HashMap::new();
            let mut ended: HashMap<u64, usize> = HashMap::new();
            let mut arrivals: Vec<_> = work.iter().enumerate().collect();
            arrivals.sort_by_key(|(_, w)| w.2);
            let mut arrivals = arrivals.into_iter().peekable();
            for round in 0..2_000 {
                while let Some((i, w)) = arrivals.next_if(|(_, w)| w.2 <= round) {
                    let r = request(i as u64, w.0, w.1);
                    requests.insert(i as u64, r.clone());
                    s.submit(r).unwrap();
                    if w.3 && i % 3 == 0 {
                        prop_assert!(s.cancel(RequestId(i as u64)).is_some());
                        prop_assert!(s.cancel(RequestId(i as u64)).is_none());
                        *ended.entry(i as u64).or_default() += 1;
                        requests.remove(&(i as u64));
                    }
                }
                for slot in s.take_freed() {
                    toy.cache.remove(&slot);
                }
                let Some(step) = s.next_step() else { continue };
                prop_assert!(step.tokens.len() <= 8 && step.spans.len() <= 3);
                for (id, event) in s.finish_step(&toy.run(&step)) {
                    match event {
                        Event::Token { index, token, .. } => {
                            let o = output.entry(id.0).or_default();
                            prop_assert_eq!(index, o.len());
                            o.push(token);
                        }
                        _ => *ended.entry(id.0).or_default() += 1,
                    }
                }
            }
            prop_assert_eq!(s.open(), 0);
            prop_assert_eq!(ended.len(), work.len());
            prop_assert!(ended.values().all(|&n| n == 1));
            for (id, r) in &requests {
                prop_assert_eq!(&output[id], &expected(r));
            }
        }
    }
}
