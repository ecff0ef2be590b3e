//! The blocks of the KV cache, as the leader counts them: who holds which, and what is in them.
//!
//! A block that was filled stays known by its content after its sequence has ended, until its
//! place is needed: least recently used first. Content is named by a chain of hashes, so that
//! equal names mean equal tokens from the start of the sequence on.

use std::collections::{BTreeMap, HashMap};

use sha2::{Digest, Sha256};
use yunta_model::KV_BLOCK;

/// Names the tokens of a sequence from its start to the end of a block (SHA-256, cut to 128 bits).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ChainHash(pub(crate) u128);

impl ChainHash {
    fn then(self, tokens: &[u32]) -> Self {
        let mut hash = Sha256::new();
        hash.update(self.0.to_le_bytes());
        tokens.iter().for_each(|t| hash.update(t.to_le_bytes()));
        let digest = hash.finalize();
        let first = digest.iter().take(16).fold(0u128, |n, b| (n << 8) | u128::from(*b));
        Self(first)
    }
}

/// Partly equal blocks that are looked at when a sequence leaves the known ones.
const BRANCHES_MAX: usize = 64;

/// What a block holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Content {
    /// The tokens before it.
    pub(crate) parent: ChainHash,
    /// Its own, at most [`KV_BLOCK`].
    pub(crate) tokens: Vec<u32>,
}

#[derive(Default)]
struct Block {
    refs: u32,
    /// When it was given back last.
    stamp: u64,
    content: Option<Content>,
}

/// The longest known beginning of a sequence.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Known {
    /// Whole blocks, to be shared.
    pub(crate) blocks: Vec<u32>,
    /// The hash behind each of them.
    pub(crate) chain: Vec<ChainHash>,
    /// A block whose first so many tokens follow: to be copied.
    pub(crate) partly: Option<(u32, usize)>,
}

impl Known {
    /// Tokens in all.
    pub(crate) fn tokens(&self) -> usize {
        self.blocks.len() * KV_BLOCK + self.partly.map_or(0, |(_, n)| n)
    }
}

/// All blocks of a KV cache.
pub(crate) struct BlockPool {
    blocks: Vec<Block>,
    /// Blocks that nobody holds and that hold nothing.
    free: Vec<u32>,
    /// Blocks that nobody holds, but whose content is known: oldest first.
    idle: BTreeMap<u64, u32>,
    whole: HashMap<ChainHash, u32>,
    /// By what is before them: all blocks with known content.
    children: HashMap<ChainHash, Vec<u32>>,
    clock: u64,
}

impl BlockPool {
    pub(crate) fn new(blocks: usize) -> Self {
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        Self {
            blocks: (0..blocks).map(|_| Block::default()).collect(),
            free: (0..blocks).rev().collect(),
            idle: BTreeMap::new(),
            whole: HashMap::new(),
            children: HashMap::new(),
            clock: 0,
        }
    }

    /// Blocks that can be allocated now.
    pub(crate) fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Whether nobody holds the block.
    pub(crate) fn is_idle(&self, block: u32) -> bool {
        self.get(block).is_some_and(|b| b.refs == 0)
    }

    fn get(&self, block: u32) -> Option<&Block> {
        self.blocks.get(block as usize)
    }

    fn get_mut(&mut self, block: u32) -> Option<&mut Block> {
        self.blocks.get_mut(block as usize)
    }

    /// The longest known beginning of `tokens`.
    pub(crate) fn lookup(&self, tokens: &[u32]) -> Known {
        let mut known = Known::default();
        let mut parent = ChainHash::default();
        let mut rest = tokens;
        while let Some((own, next)) = rest.split_at_checked(KV_BLOCK) {
            let hash = parent.then(own);
            let Some(block) = self.whole.get(&hash) else { break };
            known.blocks.push(*block);
            known.chain.push(hash);
            (parent, rest) = (hash, next);
        }
        let branches = self.children.get(&parent).map_or(&[][..], Vec::as_slice);
        let shared = |block: &u32| {
            let content = self.get(*block)?.content.as_ref()?;
            let equal = content.tokens.iter().zip(rest).take_while(|(a, b)| a == b).count();
            Some((*block, equal))
        };
        let best = branches.iter().rev().take(BRANCHES_MAX).filter_map(shared);
        known.partly = best.max_by_key(|(_, equal)| *equal).filter(|(_, equal)| *equal > 0);
        known
    }

    /// Takes a block that is known; it can't be reused until it is released.
    pub(crate) fn acquire(&mut self, block: u32) {
        let Some(b) = self.blocks.get_mut(block as usize) else { return };
        if b.refs == 0 {
            self.idle.remove(&b.stamp);
        }
        b.refs += 1;
    }

    /// An empty block for one holder, in the place of the oldest known one if need be.
    pub(crate) fn allocate(&mut self) -> Option<u32> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let (_, block) = self.idle.pop_first()?;
                self.forget(block);
                block
            }
        };
        if let Some(b) = self.get_mut(block) {
            b.refs = 1;
        }
        Some(block)
    }

    /// Gives back blocks of a sequence, in the order of positions: the last ones are the first to
    /// be reused, since they are worth nothing without those before them.
    pub(crate) fn release(&mut self, blocks: &[u32]) {
        for block in blocks.iter().rev() {
            self.clock += 1;
            let stamp = self.clock;
            let Some(b) = self.blocks.get_mut(*block as usize) else { continue };
            b.refs = b.refs.saturating_sub(1);
            if b.refs > 0 {
                continue;
            }
            b.stamp = stamp;
            if b.content.is_some() {
                self.idle.insert(stamp, *block);
            } else {
                self.free.push(*block);
            }
        }
    }

    /// Says what a held block contains by now. Returns the chain's hash behind it if it is whole.
    pub(crate) fn note(
        &mut self,
        block: u32,
        parent: ChainHash,
        tokens: &[u32],
    ) -> Option<ChainHash> {
        let whole = (tokens.len() >= KV_BLOCK).then(|| parent.then(tokens));
        // Another block may have been filled with the same meanwhile: one is enough.
        let known = whole.is_some_and(|hash| self.whole.contains_key(&hash));
        if known {
            if self.whole.get(&whole?) != Some(&block) {
                self.forget(block);
            }
            return whole;
        }
        let b = self.blocks.get_mut(block as usize)?;
        match &mut b.content {
            Some(content) => content.tokens = tokens.to_vec(),
            None => {
                b.content = Some(Content { parent, tokens: tokens.to_vec() });
                self.children.entry(parent).or_default().push(block);
            }
        }
        if let Some(hash) = whole {
            self.whole.insert(hash, block);
        }
        whole
    }

    fn forget(&mut self, block: u32) {
        let Some(content) = self.get_mut(block).and_then(|b| b.content.take()) else { return };
        if let Some(siblings) = self.children.get_mut(&content.parent) {
            siblings.retain(|b| *b != block);
            if siblings.is_empty() {
                self.children.remove(&content.parent);
            }
        }
        if content.tokens.len() >= KV_BLOCK {
            let hash = content.parent.then(&content.tokens);
            if self.whole.get(&hash) == Some(&block) {
                self.whole.remove(&hash);
            }
        }
    }

    /// Whole blocks with their contents, each behind the one before it, oldest use first.
    pub(crate) fn contents(&self) -> Vec<(u32, Content)> {
        let mut known: Vec<(u64, u32, &Content)> = self
            .whole
            .values()
            .filter_map(|block| {
                let b = self.get(*block)?;
                Some((b.stamp, *block, b.content.as_ref()?))
            })
            .collect();
        known.sort_by_key(|(stamp, block, _)| (*stamp, *block));
        known.into_iter().map(|(_, block, content)| (block, content.clone())).collect()
    }

    /// Checks what must always hold; for tests.
    #[cfg(test)]
    pub(crate) fn check(&self, held: &HashMap<u32, u32>) {
        let mut idle: Vec<u32> = self.idle.values().copied().collect();
        let mut free = self.free.clone();
        idle.sort_unstable();
        free.sort_unstable();
        let (mut want_idle, mut want_free) = (Vec::new(), Vec::new());
        for (i, b) in self.blocks.iter().enumerate() {
            let i = i as u32;
            assert_eq!(b.refs, held.get(&i).copied().unwrap_or(0), "holders of block {i}");
            match (b.refs, &b.content) {
                (0, Some(_)) => want_idle.push(i),
                (0, None) => want_free.push(i),
                _ => {}
            }
        }
        assert_eq!((idle, free), (want_idle, want_free));
        for (hash, block) in &self.whole {
            let content = self.blocks[*block as usize].content.as_ref().unwrap();
            assert_eq!(content.parent.then(&content.tokens), *hash);
        }
        let children: usize = self.children.values().map(Vec::len).sum();
        assert_eq!(children, self.blocks.iter().filter(|b| b.content.is_some()).count());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(n: usize, salt: u32) -> Vec<u32> {
        (0..n as u32).map(|i| i * 7 + salt).collect()
    }

    /// Fills blocks with a sequence, as a request would, and gives them back.
    fn run(pool: &mut BlockPool, tokens: &[u32]) -> Vec<u32> {
        let mut parent = ChainHash::default();
        let mut held = Vec::new();
        for part in tokens.chunks(KV_BLOCK) {
            let block = pool.allocate().unwrap();
            parent = pool.note(block, parent, part).unwrap_or(parent);
            held.push(block);
        }
        pool.release(&held);
        held
    }

    #[test]
    fn what_was_computed_is_known_by_content() {
        let mut pool = BlockPool::new(8);
        let first = tokens(150, 1);
        let blocks = run(&mut pool, &first);
        let known = pool.lookup(&first);
        assert_eq!((&known.blocks[..], known.partly), (&blocks[..2], Some((blocks[2], 22))));
        assert_eq!(known.tokens(), 150);
        let mut other = first.clone();
        other[70] = 9999;
        let known = pool.lookup(&other);
        assert_eq!((&known.blocks[..], known.partly), (&blocks[..1], Some((blocks[1], 6))));
        assert_eq!(pool.lookup(&tokens(150, 2)), Known::default());
    }

    #[test]
    fn the_same_tokens_after_others_are_not_the_same() {
        let mut pool = BlockPool::new(8);
        let (a, b) = (tokens(64, 1), tokens(64, 2));
        run(&mut pool, &[a.clone(), b.clone()].concat());
        assert_eq!(pool.lookup(&b).tokens(), 0);
        assert_eq!(pool.lookup(&[b, a].concat()).tokens(), 0);
    }

    #[test]
    fn the_least_recently_used_block_goes_first() {
        let mut pool = BlockPool::new(4);
        let (old, new) = (tokens(128, 1), tokens(128, 2));
        run(&mut pool, &old);
        run(&mut pool, &new);
        assert_eq!(pool.available(), 4);
        let block = pool.allocate().unwrap();
        // The tail of the older sequence went: its head is still worth something.
        assert_eq!(pool.lookup(&old).blocks.len(), 1);
        assert_eq!(pool.lookup(&new).blocks.len(), 2);
        pool.release(&[block]);
        pool.check(&HashMap::new());
    }

    #[test]
    fn equal_blocks_are_kept_once() {
        let mut pool = BlockPool::new(4);
        let same = tokens(64, 1);
        run(&mut pool, &same);
        let block = pool.allocate().unwrap();
        assert!(pool.note(block, ChainHash::default(), &same).is_some());
        pool.release(&[block]);
        assert_eq!(pool.lookup(&same).blocks.len(), 1);
        pool.check(&HashMap::new());
    }
}
