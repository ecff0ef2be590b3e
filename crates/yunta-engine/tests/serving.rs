//! Requests served together: with each other, in chunks, on blocks that others have filled, with
//! drafts, over any cut of the model. Each gets the tokens that it gets alone on one rank, and
//! log-probabilities with the same bits.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use proptest::prelude::*;
use yunta_checkpoint::Checkpoint;
use yunta_comm::{GroupConfig, Outbox, local_mesh};
use yunta_engine::wire::ToLeader;
use yunta_engine::{
    Drafter, Event, Helpers, Request, RequestId, SamplingParams, Scheduler, SchedulerConfig,
    SchedulerStats, follow, lead,
};
use yunta_model::{
    Alone, CacheOptions, GroupRanks, KvType, LanguageModel, LoadOptions, Plan, Ranks, load,
};
use yunta_tensor::{CpuBackend, Precision};

const CONTEXT: usize = 192;
const BLOCKS: usize = 24;
const TIMEOUT: Duration = Duration::from_secs(60);

fn models() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    paths
}

fn load_rank(
    checkpoint: &Checkpoint,
    plan: &Plan,
    rank: usize,
    kind: KvType,
    blocks: usize,
) -> Box<dyn LanguageModel> {
    let backend = CpuBackend::new(1, Precision::Fast).unwrap();
    let cache = CacheOptions { blocks, kind };
    let options = LoadOptions { plan, rank, cache, context: CONTEXT, progress: &mut |_| {} };
    load(checkpoint, backend, options).unwrap()
}

/// How requests are served.
#[derive(Clone, Copy)]
struct Config {
    scheduler: SchedulerConfig,
    /// With the model as its own draft model.
    drafts_by_itself: bool,
}

/// Tokens, and the bits of their log-probabilities.
type Output = Vec<(u32, u32)>;

/// Runs requests over threads as ranks; each is submitted when as many tokens have come in all.
fn serve(
    checkpoint: &Checkpoint,
    plan: &Plan,
    kind: KvType,
    config: Config,
    requests: &[(usize, Request)],
) -> (HashMap<u64, Output>, SchedulerStats) {
    let outbox = Outbox { bytes_max: 64 << 20, latency: Duration::ZERO, bandwidth: None };
    let outbox = (plan.pipeline > 1).then_some(outbox);
    let group = GroupConfig { timeout: TIMEOUT, outbox, ..GroupConfig::default() };
    let mut worlds = local_mesh(plan.size(), &group).unwrap().into_iter();
    let world = worlds.next().unwrap();
    let mut outputs: HashMap<u64, Output> = HashMap::new();
    let mut scheduler = Scheduler::new(config.scheduler);
    std::thread::scope(|scope| {
        for (rank, world) in (1..).zip(worlds) {
            scope.spawn(move || {
                let mut model = load_rank(checkpoint, plan, rank, kind, BLOCKS);
                let mut ranks = GroupRanks::new(world, plan, TIMEOUT, TIMEOUT).unwrap();
                follow(&mut *model, &mut ranks, None).unwrap();
            });
        }
        let mut model = load_rank(checkpoint, plan, 0, kind, BLOCKS);
        let mut ranks: Box<dyn Ranks> = match plan.size() {
            1 => Box::new(Alone),
            _ => Box::new(GroupRanks::new(world, plan, TIMEOUT, TIMEOUT).unwrap()),
        };
        let (sender, inbox) = mpsc::channel();
        let mut waiting: Vec<&(usize, Request)> = requests.iter().collect();
        waiting.sort_by_key(|(at, _)| *at);
        let (mut sender, mut open, mut tokens) = (Some(sender), requests.len(), 0);
        let mut submit_due =
            |sender: &Option<mpsc::Sender<ToLeader>>, tokens: usize, idle: bool| {
                let mut sent = 0;
                while waiting.first().is_some_and(|(at, _)| *at <= tokens || (idle && sent == 0)) {
                    let request = Box::new(waiting.remove(0).1.clone());
                    sender.as_ref().unwrap().send(ToLeader::Submit(request)).unwrap();
                    sent += 1;
                }
            };
        submit_due(&sender, 0, true);
        let mut running: i64 = 1;
        let mut report = |id: RequestId, event: Event| match event {
            Event::Token { index, token, logprobs } => {
                let output = outputs.entry(id.0).or_default();
                assert_eq!(index, output.len());
                output.push((token, logprobs.unwrap().chosen.to_bits()));
                tokens += 1;
                submit_due(&sender, tokens, false);
            }
            Event::Finished { .. } => {
                open -= 1;
                running -= 1;
                submit_due(&sender, tokens, true);
                if open == 0 {
                    sender = None;
                }
            }
            Event::Started { .. } => {}
            Event::Failed { message, .. } => panic!("request {}: {message}", id.0),
        };
        let mut drafter = config.drafts_by_itself.then(|| {
            let blocks = Drafter::blocks(config.scheduler.sequences, CONTEXT);
            let whole = Plan::even(&yunta_model::dims(checkpoint).unwrap(), 1, 1).unwrap();
            let model = load_rank(checkpoint, &whole, 0, kind, blocks);
            Drafter::new(model, config.scheduler.sequences, CONTEXT).unwrap()
        });
        let help = Helpers { drafter: drafter.as_mut(), ..Helpers::default() };
        lead(&mut *model, &mut *ranks, &mut scheduler, &inbox, &mut report, help).unwrap();
    });
    (outputs, scheduler.stats())
}

fn config(vocab: usize) -> SchedulerConfig {
    SchedulerConfig {
        sequences: 1,
        context: CONTEXT,
        step_tokens: CONTEXT,
        queue: 100,
        vocab,
        blocks: BLOCKS,
        window: None,
        micro_batches: 1,
        stall_ratio: 2.0,
        draft_tokens: 0,
    }
}

/// What a request gets with nothing else in the world.
fn alone(
    checkpoint: &Checkpoint,
    plan: &Plan,
    kind: KvType,
    vocab: usize,
    request: &Request,
) -> Output {
    let config = Config { scheduler: config(vocab), drafts_by_itself: false };
    let requests = [(0, request.clone())];
    let (mut outputs, _) = serve(checkpoint, plan, kind, config, &requests);
    outputs.remove(&request.id.0).unwrap()
}

#[derive(Clone, Debug)]
struct Work {
    shared: usize,
    own: usize,
    max_tokens: usize,
    /// Comes when so many tokens were generated.
    at: usize,
    sampled: bool,
    repetitive: bool,
}

fn work() -> impl Strategy<Value = Work> {
    (0usize..90, 1usize..60, 1usize..24, 0usize..30, any::<bool>(), any::<bool>()).prop_map(
        |(shared, own, max_tokens, at, sampled, repetitive)| Work {
            shared,
            own,
            max_tokens,
            at,
            sampled,
            repetitive,
        },
    )
}

impl Work {
    fn request(&self, id: u64, vocab: usize) -> Request {
        let shared = (0..self.shared).map(|i| (i * 31 + 7) % vocab);
        let period = if self.repetitive { 3 } else { 1000 };
        let own = (0..self.own).map(|i| ((i % period) * 17 + id as usize * 13 + 1) % vocab);
        let prompt = shared.chain(own).map(|t| t as u32).collect();
        Request {
            sampling: SamplingParams {
                temperature: if self.sampled { 0.8 } else { 0.0 },
                top_p: 0.95,
                repetition_penalty: if self.sampled { 1.1 } else { 1.0 },
                seed: id,
                // The same token over and over, so that drafts are right.
                logit_bias: if self.repetitive { vec![(5, 100.0)] } else { Vec::new() },
                ..SamplingParams::default()
            },
            logprobs: Some(0),
            ..Request::new(RequestId(id), prompt, self.max_tokens)
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_request_gets_what_it_gets_alone(
        model in 0usize..1000,
        tensor in prop::sample::select(vec![vec![1.0], vec![1.0; 2], vec![1.0; 3], vec![1.0; 5], vec![2.0, 1.0]]),
        pipeline in prop::sample::select(vec![vec![1.0], vec![1.0], vec![1.0; 2], vec![2.0, 1.0]]),
        work in prop::collection::vec(work(), 1..7),
        sequences in 1usize..6,
        step_tokens in prop::sample::select(vec![7usize, 16, 50, CONTEXT]),
        draft_tokens in prop::sample::select(vec![0usize, 3, 7]),
        eight_bits in any::<bool>(),
        drafts_by_itself in any::<bool>(),
    ) {
        let models = models();
        let checkpoint = Checkpoint::open(&models[model % models.len()]).unwrap();
        let dims = yunta_model::dims(&checkpoint).unwrap();
        prop_assume!(pipeline.len() <= dims.layers);
        let kind = if eight_bits { KvType::I8 } else { KvType::F16 };
        let (whole, cut) = (
            Plan::even(&dims, 1, 1).unwrap(),
            Plan::weighted(&dims, &tensor, &pipeline).unwrap(),
        );
        let requests: Vec<(usize, Request)> =
            (0..).zip(&work).map(|(id, w)| (w.at, w.request(id, dims.vocab))).collect();
        let served = SchedulerConfig {
            sequences,
            step_tokens,
            draft_tokens,
            micro_batches: pipeline.len(),
            ..config(dims.vocab)
        };
        let served = Config { scheduler: served, drafts_by_itself };
        let (outputs, _) = serve(&checkpoint, &cut, kind, served, &requests);
        for (_, request) in &requests {
            let expected = alone(&checkpoint, &whole, kind, dims.vocab, request);
            prop_assert_eq!(&outputs[&request.id.0], &expected, "request {:?}", request.id);
        }
    }
}

/// That the property above is about something: blocks are shared, and drafts are right.
#[test]
fn prefixes_and_drafts_take_part() {
    let checkpoint = Checkpoint::open(&models()[0]).unwrap();
    let dims = yunta_model::dims(&checkpoint).unwrap();
    let plan = Plan::even(&dims, 2, 1).unwrap();
    let work =
        |at| Work { shared: 80, own: 12, max_tokens: 60, at, sampled: false, repetitive: true };
    let requests: Vec<(usize, Request)> =
        (0..4).map(|id| (id * 10, work(id * 10).request(id as u64, dims.vocab))).collect();
    for drafts_by_itself in [false, true] {
        let scheduler = SchedulerConfig { sequences: 4, draft_tokens: 7, ..config(dims.vocab) };
        let served = Config { scheduler, drafts_by_itself };
        let (outputs, stats) = serve(&checkpoint, &plan, KvType::F16, served, &requests);
        assert!(outputs.values().all(|o| o.len() == 60));
        assert!(stats.cached_tokens >= 3 * 80, "{stats:?}");
        if !drafts_by_itself {
            assert!(stats.accepted_tokens > 20, "{stats:?}");
        }
    }
}
