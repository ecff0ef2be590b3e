//! A running sequence.

use std::time::Duration;

use yunta_grammar::Constraint;
use yunta_model::{CacheEdit, KV_BLOCK};

use super::SchedulerConfig;
use super::blocks::{BlockPool, ChainHash, Known};
use super::draft::{Acceptance, look_up};
use super::pace::Pace;
use super::queue::Waiting;
use crate::sampling::{Draw, logprobs, sample};
use crate::{Event, Failure, FinishReason, GrammarError, Request, RequestId};

/// Fewer known tokens than this are computed rather than copied from another block.
const COPY_MIN: usize = 4;

pub(super) struct Sequence {
    pub(super) request: Request,
    /// Prompt and output.
    pub(super) tokens: Vec<u32>,
    /// How many of `tokens` are in the KV cache, or under way.
    pub(super) computed: usize,
    /// Order of admission.
    pub(super) turn: u64,
    /// The last step that had a part of it.
    pub(super) last_step: u64,
    pub(super) expires: Option<Duration>,
    pub(super) slot: usize,
    /// What a draft model expects to come next.
    pub(super) offered: Option<Vec<u32>>,
    /// Blocks, in the order of positions.
    table: Vec<u32>,
    /// How many of them were given back, from the front.
    given_back: usize,
    /// Blocks that it may hold at once, at most.
    reserve: usize,
    /// Hashes behind the blocks whose whole content is known.
    chain: Vec<ChainHash>,
    /// Tokens whose block says that it has them.
    noted: usize,
    constraint: Option<Constraint>,
    acceptance: Acceptance,
    /// What was expected to be the next token.
    expected: Option<u32>,
}

/// Blocks that a request may hold at once.
pub(super) fn reach(config: &SchedulerConfig, request: &Request) -> usize {
    let tokens = request.prompt.len().saturating_add(request.max_tokens).min(config.context);
    let known = (request.prompt.len() + request.emitted.len()).div_ceil(KV_BLOCK);
    let blocks = tokens.div_ceil(KV_BLOCK);
    match config.window {
        // What it looks back on, the tokens of a step and of the one before, and the ends of all;
        // blocks that the cache knows are all taken at first.
        Some(window) => {
            let seen = window.saturating_add(2 * config.step_tokens) / KV_BLOCK + 3;
            blocks.min(seen.max(known))
        }
        None => blocks,
    }
}

impl Sequence {
    pub(super) fn new(
        waiting: Waiting,
        tokens: Vec<u32>,
        slot: usize,
        turn: u64,
        reserve: usize,
    ) -> Self {
        Self {
            request: waiting.request,
            tokens,
            computed: 0,
            turn,
            last_step: 0,
            expires: waiting.expires,
            slot,
            offered: None,
            table: Vec::new(),
            given_back: 0,
            reserve,
            chain: Vec::new(),
            noted: 0,
            constraint: waiting.constraint,
            acceptance: Acceptance::default(),
            expected: None,
        }
    }

    /// Takes over what the cache knows of its beginning.
    pub(super) fn begin(&mut self, known: Known, pool: &mut BlockPool, edits: &mut Vec<CacheEdit>) {
        known.blocks.iter().for_each(|b| pool.acquire(*b));
        self.computed = known.blocks.len() * KV_BLOCK;
        self.chain = known.chain;
        self.table = known.blocks;
        edits.push(CacheEdit::Table { slot: self.slot, keep: 0, blocks: self.table.clone() });
        let Some((from, tokens)) = known.partly.filter(|(_, n)| *n >= COPY_MIN) else {
            self.noted = self.computed;
            return;
        };
        // Held while its copy is made: it may be the oldest there is.
        pool.acquire(from);
        if let Some(to) = pool.allocate() {
            edits.push(CacheEdit::Copy { from, to });
            self.append(to, edits);
            self.computed += tokens;
        }
        pool.release(&[from]);
        self.noted = self.computed;
    }

    fn append(&mut self, block: u32, edits: &mut Vec<CacheEdit>) {
        let keep = self.table.len();
        self.table.push(block);
        edits.push(CacheEdit::Table { slot: self.slot, keep, blocks: vec![block] });
    }

    /// Makes room up to a position.
    pub(super) fn grow(
        &mut self,
        positions: usize,
        pool: &mut BlockPool,
        edits: &mut Vec<CacheEdit>,
    ) {
        while self.table.len() * KV_BLOCK < positions {
            // There is one: it was promised at admission.
            let Some(block) = pool.allocate() else { return };
            self.append(block, edits);
        }
    }

    /// Blocks that it may still ask for.
    pub(super) fn promised(&self) -> usize {
        self.reserve.saturating_sub(self.held().len())
    }

    pub(super) fn held(&self) -> &[u32] {
        self.table.get(self.given_back..).unwrap_or_default()
    }

    /// Tokens that are known and not computed.
    pub(super) fn pending(&self) -> usize {
        self.tokens.len() - self.computed
    }

    /// Whether its prompt is done.
    pub(super) fn generates(&self) -> bool {
        self.tokens.len() > self.request.prompt.len() + self.request.emitted.len()
    }

    fn emitted(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// The next pending tokens, which count as computed from now on.
    pub(super) fn take_pending(&mut self, n: usize) -> Vec<u32> {
        let pending =
            self.tokens.get(self.computed..self.computed + n).unwrap_or_default().to_vec();
        self.computed += pending.len();
        pending
    }

    /// Tokens that may come after the last known one, as many as pay in a step of so many others.
    pub(super) fn draft(
        &mut self,
        config: &SchedulerConfig,
        pace: &Pace,
        others: usize,
        most: usize,
    ) -> Vec<u32> {
        if config.draft_tokens == 0 {
            return Vec::new();
        }
        let length = self.draft_length(config, pace, others).min(most);
        let mut draft = match self.offered.take() {
            Some(offered) => offered,
            None => look_up(&self.tokens, length.max(1)),
        };
        self.expected = draft.first().copied();
        draft.truncate(length);
        if let Some(constraint) = &mut self.constraint {
            draft.truncate(constraint.check(&draft));
        }
        draft
    }

    /// How long a draft pays, in a step of so many others.
    pub(super) fn draft_length(
        &self,
        config: &SchedulerConfig,
        pace: &Pace,
        others: usize,
    ) -> usize {
        // Drafts stay within what was promised; the last token of all needs no successor.
        let left = (self.request.max_tokens - self.emitted())
            .min(config.context - self.tokens.len())
            .saturating_sub(1);
        self.acceptance.worthwhile(others, pace, config.draft_tokens.min(left))
    }

    /// Records in the pool what its blocks contain, so that others can share them.
    pub(super) fn note(&mut self, pool: &mut BlockPool) {
        let computed = self.computed.min(self.tokens.len());
        while self.noted < computed {
            let index = self.noted / KV_BLOCK;
            let end = computed.min((index + 1) * KV_BLOCK);
            let parent = match index.checked_sub(1) {
                Some(before) => self.chain.get(before).copied(),
                None => Some(ChainHash::default()),
            };
            let (Some(parent), Some(block)) = (parent, self.table.get(index)) else { return };
            let tokens = self.tokens.get(index * KV_BLOCK..end).unwrap_or_default();
            self.chain.extend(pool.note(*block, parent, tokens));
            self.noted = end;
        }
    }

    /// Gives back blocks that no layer looks at any more.
    pub(super) fn give_back(&mut self, config: &SchedulerConfig, pool: &mut BlockPool) {
        let Some(window) = config.window else { return };
        // The first token of the step that was just planned looks from so much further back.
        let unseen = self.computed.saturating_sub(window + config.step_tokens) / KV_BLOCK;
        if let Some(blocks) = self.table.get(self.given_back..unseen) {
            pool.release(blocks);
            self.given_back = unseen;
        }
    }

    /// Draws the next tokens: those of the draft that are right, and the one after them. `rows` are
    /// the logits behind the last known token and behind each of the draft. Returns whether the
    /// sequence has ended.
    pub(super) fn advance(
        &mut self,
        config: &SchedulerConfig,
        draft: &[u32],
        rows: &[&[f32]],
        events: &mut Vec<(RequestId, Event)>,
    ) -> bool {
        for (i, row) in rows.iter().enumerate() {
            let index = self.emitted();
            let token = match self.choose(row) {
                Ok(token) => token,
                Err((message, cause)) => {
                    events.push((self.request.id, Event::Failed { message, cause }));
                    return true;
                }
            };
            let drafted = draft.get(i).copied();
            if let Some(expected) = drafted.or(self.expected.filter(|_| i == 0)) {
                self.acceptance.judge(expected == token);
            }
            let logprobs = self.request.logprobs.map(|k| logprobs(row, token, k));
            events.push((self.request.id, Event::Token { index, token, logprobs }));
            self.tokens.push(token);
            self.computed = self.tokens.len() - 1;
            if let Some(reason) = self.end(config, token) {
                events.push((self.request.id, Event::Finished { reason }));
                return true;
            }
            if drafted != Some(token) {
                break;
            }
        }
        false
    }

    /// The next token, as sampling and grammar have it.
    fn choose(&mut self, logits: &[f32]) -> Result<u32, (String, Failure)> {
        let of_grammar = |e: GrammarError| {
            let cause = if e.is_of_the_request() { Failure::Request } else { Failure::Internal };
            (e.to_string(), cause)
        };
        let allowed = match &mut self.constraint {
            Some(constraint) => Some(constraint.mask().map_err(of_grammar)?),
            None => None,
        };
        let (prompt, output) = self.tokens.split_at(self.request.prompt.len());
        let draw = Draw { prompt, output, stop_tokens: &self.request.stop_tokens, allowed };
        let Some(token) = sample(logits, &self.request.sampling, &draw) else {
            let message = "the model produced no finite logits: a rank may compute garbage";
            return Err((message.to_owned(), Failure::Internal));
        };
        if let Some(constraint) = &mut self.constraint {
            constraint.accept(token).map_err(of_grammar)?;
        }
        Ok(token)
    }

    fn end(&self, config: &SchedulerConfig, token: u32) -> Option<FinishReason> {
        let complete = self.constraint.as_ref().is_some_and(Constraint::has_ended);
        if complete || self.request.stop_tokens.contains(&token) {
            return Some(FinishReason::Stop);
        }
        let full = self.emitted() >= self.request.max_tokens;
        (full || self.tokens.len() >= config.context).then_some(FinishReason::Length)
    }
}
