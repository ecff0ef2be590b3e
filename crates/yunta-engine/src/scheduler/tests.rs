//! The scheduler over a toy model whose next token depends on all tokens before it, read through
//! the block tables as a real cache would be: whatever is mixed up shows in the output.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;
use yunta_model::Step;

use super::*;
use crate::SamplingParams;

const VOCAB: usize = 50;

fn config() -> SchedulerConfig {
    SchedulerConfig {
        sequences: 3,
        context: 320,
        step_tokens: 48,
        queue: 100,
        vocab: VOCAB,
        blocks: 12,
        window: None,
        micro_batches: 1,
        stall_ratio: 2.0,
        draft_tokens: 7,
    }
}

fn request(id: u64, prompt: Vec<u32>, max_tokens: usize) -> Request {
    Request {
        sampling: SamplingParams::greedy(),
        stop_tokens: vec![0],
        ..Request::new(RequestId(id), prompt, max_tokens)
    }
}

fn prompt(salt: u64, length: usize) -> Vec<u32> {
    (0..length as u64).map(|i| ((salt * 7 + i * (1 + salt % 3)) % VOCAB as u64) as u32).collect()
}

/// Five tokens over and over, others for every 40 positions: drafts are right now and then.
fn next_token(seen: &[u32]) -> u32 {
    let before = &seen[..seen.len() / 40 * 40];
    let phase = before.iter().zip(3u32..).map(|(t, i)| i * t).sum::<u32>();
    1 + (phase + seen.len() as u32 % 5 * 3) % (VOCAB as u32 - 1)
}

/// The cache of a rank.
#[derive(Default)]
struct Toy {
    window: Option<usize>,
    blocks: HashMap<u32, Vec<Option<u32>>>,
    tables: HashMap<usize, Vec<u32>>,
}

impl Toy {
    fn edit(&mut self, edit: &CacheEdit) {
        match edit {
            CacheEdit::Table { slot, keep, blocks } => {
                let table = self.tables.entry(*slot).or_default();
                table.truncate(*keep);
                table.extend(blocks);
            }
            CacheEdit::Copy { from, to } => {
                let content = self.blocks[from].clone();
                self.blocks.insert(*to, content);
            }
        }
    }

    fn at(&mut self, slot: usize, position: usize) -> &mut Option<u32> {
        let block = self.tables[&slot][position / KV_BLOCK];
        let content = self.blocks.entry(block).or_insert_with(|| vec![None; KV_BLOCK]);
        &mut content[position % KV_BLOCK]
    }

    /// The logits of a step; all is stored before anything is read, as in a layer.
    fn run(&mut self, plan: &StepPlan) -> Vec<f32> {
        plan.edits.iter().for_each(|e| self.edit(e));
        let Step { spans, tokens, outputs } = &plan.step;
        let mut at = 0;
        for span in spans {
            for i in 0..span.tokens {
                *self.at(span.slot, span.position + i) = Some(tokens[at + i]);
            }
            at += span.tokens;
        }
        let mut logits = Vec::new();
        at = 0;
        for span in spans {
            for i in 0..span.tokens {
                if !outputs.contains(&(at + i)) {
                    continue;
                }
                let end = span.position + i + 1;
                let first = self.window.map_or(0, |w| end.saturating_sub(w));
                let mut seen = vec![0; first];
                seen.extend((first..end).map(|p| self.at(span.slot, p).expect("never written")));
                let mut row = vec![0.0; VOCAB];
                row[next_token(&seen) as usize] = 1.0;
                logits.extend(row);
            }
            at += span.tokens;
        }
        logits
    }
}

fn expected(request: &Request, context: usize) -> Vec<u32> {
    let mut tokens = request.prompt.clone();
    while tokens.len() - request.prompt.len() < request.max_tokens && tokens.len() < context {
        tokens.push(next_token(&tokens));
    }
    tokens[request.prompt.len()..].to_vec()
}

impl Scheduler {
    /// What must hold between any two steps.
    fn check(&self) {
        let mut held: HashMap<u32, u32> = HashMap::new();
        for s in self.slots.iter().flatten() {
            s.held().iter().for_each(|b| *held.entry(*b).or_default() += 1);
        }
        self.pool.check(&held);
        let promised: usize = self.slots.iter().flatten().map(Sequence::promised).sum();
        assert!(promised <= self.pool.available(), "more is promised than there is");
    }
}

/// Steps under way, and what the scheduler has reported.
struct Run {
    scheduler: Scheduler,
    toy: Toy,
    under_way: VecDeque<Vec<f32>>,
    now: Duration,
    output: HashMap<u64, Vec<u32>>,
    ended: HashMap<u64, Event>,
    /// Requests may have output from before.
    continues: bool,
}

impl Run {
    fn new(config: SchedulerConfig) -> Self {
        Self {
            scheduler: Scheduler::new(config),
            toy: Toy { window: config.window, ..Toy::default() },
            under_way: VecDeque::new(),
            now: Duration::ZERO,
            output: HashMap::new(),
            ended: HashMap::new(),
            continues: false,
        }
    }

    fn submit(&mut self, request: Request) {
        self.scheduler.submit(self.now, request).unwrap();
    }

    fn take(&mut self, events: Vec<(RequestId, Event)>) {
        for (id, event) in events {
            match event {
                Event::Started { .. } => {
                    let early = self.continues || !self.output.contains_key(&id.0);
                    assert!(early && !self.ended.contains_key(&id.0));
                }
                Event::Token { index, token, .. } => {
                    assert!(!self.ended.contains_key(&id.0), "a token after the end");
                    let output = self.output.entry(id.0).or_default();
                    assert_eq!(index, output.len());
                    output.push(token);
                }
                last => assert!(self.ended.insert(id.0, last).is_none(), "ended twice"),
            }
        }
    }

    /// Plans a step, or finishes one. Returns whether there was anything to do.
    fn round(&mut self, finish_first: bool) -> bool {
        self.now += Duration::from_millis(7);
        let late = self.scheduler.expire(self.now);
        self.take(late);
        let plan = if finish_first && !self.under_way.is_empty() {
            None
        } else {
            self.scheduler.next_step(self.now)
        };
        self.scheduler.check();
        match plan {
            Some(plan) => {
                assert!(plan.step.tokens.len() <= self.scheduler.config.step_tokens);
                let logits = self.toy.run(&plan);
                self.under_way.push_back(logits);
                true
            }
            None => {
                let Some(logits) = self.under_way.pop_front() else { return false };
                let events = self.scheduler.finish_step(self.now, &logits);
                self.take(events);
                self.scheduler.check();
                true
            }
        }
    }

    fn finish_all(&mut self) {
        for _ in 0..20_000 {
            if !self.round(false) {
                return;
            }
        }
        panic!("no end");
    }
}

#[test]
fn what_can_never_run_is_refused() {
    let mut s = Scheduler::new(config());
    let mut submit = |r| s.submit(Duration::ZERO, r).is_err();
    assert!(submit(request(1, vec![], 5)));
    assert!(submit(request(1, prompt(1, 320), 5)));
    assert!(submit(request(1, prompt(1, 4), 0)));
    assert!(submit(request(1, vec![1, VOCAB as u32], 4)));
    assert_eq!(s.open(), 0);
}

#[test]
fn a_full_queue_says_so() {
    let mut s = Scheduler::new(SchedulerConfig { queue: 2, ..config() });
    s.submit(Duration::ZERO, request(1, prompt(1, 4), 4)).unwrap();
    s.submit(Duration::ZERO, request(2, prompt(1, 4), 4)).unwrap();
    let refused = s.submit(Duration::ZERO, request(3, prompt(1, 4), 4));
    assert_eq!(refused, Err(SubmitError::Busy { waiting: 2 }));
}

#[test]
fn a_continued_request_goes_on_where_it_was() {
    let whole = request(5, prompt(5, 60), 30);
    let tokens = expected(&whole, 320);
    let mut run = Run::new(config());
    run.continues = true;
    run.output.insert(5, tokens[..12].to_vec());
    run.submit(Request { emitted: tokens[..12].to_vec(), ..whole });
    run.finish_all();
    assert_eq!(run.output[&5], tokens);
}

#[test]
fn a_prompt_that_was_seen_is_not_computed_again() {
    let mut run = Run::new(config());
    run.submit(request(1, prompt(3, 200), 20));
    run.finish_all();
    let first = run.scheduler.stats();
    run.submit(request(2, prompt(3, 200), 20));
    run.finish_all();
    let second = run.scheduler.stats();
    assert_eq!(second.prompt_tokens - first.prompt_tokens, 1);
    assert_eq!(second.cached_tokens - first.cached_tokens, 199);
    assert_eq!(run.output[&1], run.output[&2]);
    // The next turn of a conversation: the answer is known too.
    let next = [prompt(3, 200), run.output[&1].clone(), prompt(9, 10)].concat();
    run.submit(request(3, next.clone(), 5));
    run.finish_all();
    assert!(run.scheduler.stats().cached_tokens - second.cached_tokens >= 219);
    assert_eq!(run.output[&3], expected(&request(3, next, 5), 320));
}

#[test]
fn several_outputs_of_one_prompt_compute_it_once() {
    let mut run = Run::new(SchedulerConfig { sequences: 6, ..config() });
    (0..4).for_each(|id| run.submit(request(id, prompt(3, 100), 10)));
    run.finish_all();
    let stats = run.scheduler.stats();
    // Four tables with the first block shared, and copies of the second.
    assert!(stats.prompt_tokens <= 100 + 3 * WORTH_WAITING as u64, "{stats:?}");
    assert_eq!(stats.prompt_tokens + stats.cached_tokens, 400);
    assert_eq!(run.output.values().collect::<HashSet<_>>().len(), 1);
}

#[test]
fn drafts_save_steps_and_change_nothing() {
    let steps = |draft_tokens| {
        let mut run = Run::new(SchedulerConfig { draft_tokens, ..config() });
        let r = request(1, vec![1, 2, 3], 200);
        run.submit(r.clone());
        run.finish_all();
        assert_eq!(run.output[&1], expected(&r, 320));
        run.scheduler.stats()
    };
    let (plain, fast) = (steps(0), steps(15));
    assert_eq!(plain.drafted_tokens, 0);
    assert!(fast.accepted_tokens > 50 && fast.steps < plain.steps / 2, "{fast:?}");
}

#[test]
fn a_deadline_ends_a_request_that_runs_and_one_that_waits() {
    let mut run = Run::new(SchedulerConfig { sequences: 1, ..config() });
    run.submit(Request { timeout_ms: Some(300), ..request(1, prompt(1, 10), 250) });
    run.submit(Request { timeout_ms: Some(200), ..request(2, prompt(2, 10), 5) });
    run.submit(request(3, prompt(3, 10), 5));
    run.finish_all();
    assert!(matches!(run.ended[&1], Event::Failed { .. }) && !run.output[&1].is_empty());
    assert!(matches!(run.ended[&2], Event::Failed { .. }) && !run.output.contains_key(&2));
    assert!(matches!(run.ended[&3], Event::Finished { .. }));
}

/// The order in which requests get their first token, one at a time.
fn order(requests: Vec<Request>) -> Vec<u64> {
    let mut run = Run::new(SchedulerConfig { sequences: 1, ..config() });
    requests.into_iter().for_each(|r| run.submit(r));
    let mut order = Vec::new();
    while run.round(false) {
        let new = run.output.keys().find(|id| !order.contains(*id)).copied();
        order.extend(new);
    }
    order
}

#[test]
fn a_client_with_many_requests_does_not_hold_up_the_others() {
    let of =
        |id, client: &str| Request { client: client.to_owned(), ..request(id, prompt(id, 20), 9) };
    let mut requests: Vec<Request> = (0..8).map(|id| of(id, "busy")).collect();
    requests.push(of(100, "other"));
    requests.push(of(101, "third"));
    let order = order(requests);
    assert_eq!(order[..3], [0, 100, 101]);
}

#[test]
fn urgent_requests_go_first_and_patience_is_rewarded() {
    let of = |id, priority| Request { priority, ..request(id, prompt(id, 20), 5) };
    assert_eq!(order(vec![of(0, 0), of(1, 0), of(2, -5), of(3, 5)]), [2, 0, 1, 3]);
    let mut queue = Queue::default();
    queue.push(Duration::ZERO, of(1, 3), None);
    queue.push(Duration::from_secs(29), of(2, 0), None);
    let first = |s| queue.next(Duration::from_secs(s)).unwrap().request.id.0;
    assert_eq!((first(29), first(40)), (2, 1));
}

#[test]
fn a_window_frees_what_is_behind_it() {
    let config = SchedulerConfig { window: Some(40), blocks: 6, context: 384, ..config() };
    let mut run = Run::new(config);
    let r = request(1, prompt(1, 150), 220);
    run.submit(r.clone());
    let mut most = 0;
    while run.round(false) {
        most = most.max(run.scheduler.slots.iter().flatten().map(|s| s.held().len()).sum());
    }
    assert!(most <= 5, "{most} blocks held");
    // The toy sees 40 tokens, and its length.
    let mut tokens = r.prompt.clone();
    while tokens.len() < 370 {
        let first = tokens.len().saturating_sub(40);
        let seen = [vec![0; first], tokens[first..].to_vec()].concat();
        tokens.push(next_token(&seen));
    }
    assert_eq!(run.output[&1], tokens[150..]);
}

/// A request of a random workload.
#[derive(Clone, Debug)]
struct Work {
    /// Its prompt: a family of equal beginnings, how much of it, and something of its own.
    family: u64,
    shared: usize,
    own: usize,
    max_tokens: usize,
    arrives: usize,
    cancelled_after: Option<usize>,
    client: u8,
    priority: i32,
}

fn work() -> impl Strategy<Value = Work> {
    let cancel = prop::option::weighted(0.2, 0usize..60);
    (0u64..3, 0usize..200, 0usize..80, 1usize..60, 0usize..80, cancel, 0u8..3, -2i32..3).prop_map(
        |(family, shared, own, max_tokens, arrives, cancelled_after, client, priority)| Work {
            family,
            shared,
            own,
            max_tokens,
            arrives,
            cancelled_after,
            client,
            priority,
        },
    )
}

impl Work {
    fn request(&self, id: u64) -> Request {
        let own = prompt(1000 + id, self.own + 1);
        let prompt = [prompt(self.family, self.shared), own].concat();
        Request {
            client: self.client.to_string(),
            priority: self.priority,
            ..request(id, prompt, self.max_tokens)
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("YUNTA_SIM_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(2_000)
    ))]

    /// Any mix of requests, cancellations and steps under way: every request ends once, with the
    /// tokens that it would have had alone; blocks are never short, and all are given back.
    #[test]
    fn every_request_ends_with_its_own_tokens(
        work in prop::collection::vec(work(), 1..14),
        sequences in 1usize..6,
        blocks in 5usize..24,
        micro_batches in 1usize..4,
        draft_tokens in prop::sample::select(vec![0usize, 3, 15]),
        step_tokens in 4usize..64,
        finish_first in prop::collection::vec(any::<bool>(), 1..40),
    ) {
        let config = SchedulerConfig {
            sequences, blocks, micro_batches, draft_tokens, step_tokens, ..config()
        };
        let context = config.context.min(blocks * KV_BLOCK);
        let mut run = Run::new(config);
        let mut cancelled = HashSet::new();
        let mut round = 0;
        loop {
            for (id, w) in work.iter().enumerate() {
                let id = id as u64;
                if w.arrives == round {
                    run.submit(w.request(id));
                }
                if w.cancelled_after.is_some_and(|after| w.arrives + after == round) {
                    let known = run.scheduler.cancel(RequestId(id)).is_some();
                    prop_assert_eq!(known, !run.ended.contains_key(&id));
                    if known {
                        cancelled.insert(id);
                    }
                }
            }
            let busy = run.round(finish_first[round % finish_first.len()]);
            round += 1;
            prop_assert!(round < 50_000, "no end");
            if !busy && round > 150 {
                break;
            }
        }
        prop_assert_eq!(run.scheduler.open(), 0);
        prop_assert_eq!(run.scheduler.pool.available(), blocks);
        for (id, w) in work.iter().enumerate() {
            let id = id as u64;
            let expected = expected(&w.request(id), context);
            let output = run.output.get(&id).cloned().unwrap_or_default();
            if cancelled.contains(&id) {
                prop_assert!(expected.starts_with(&output) && !run.ended.contains_key(&id));
            } else {
                prop_assert_eq!(&output, &expected);
                let finished = matches!(run.ended[&id], Event::Finished { .. });
                prop_assert!(finished);
            }
        }
    }
}
