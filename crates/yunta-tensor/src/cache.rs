//! The CPU's key-value cache: a pool of blocks per layer, and a table of blocks per sequence.

use half::f16;

use crate::cpu::{CpuBackend, CpuTensor};
use crate::kernels::attention::Attend;
use crate::kernels::kv::{BLOCK, BlockShape, KvBlock, KvElement, Store};
use crate::{Attention, CacheEdit, CacheShape, KvType, Span, TensorError};

/// Rows of a prompt that one attention job does: they share the keys that it has in the cache.
const ROWS_PER_JOB: usize = 16;

/// Tokens in a step from which storing them is worth a parallel operation.
const PARALLEL_STORE: usize = 16;

/// Key-value caches of a rank.
pub struct CpuCache {
    block: BlockShape,
    pools: Pools,
    /// By slot: the sequence's blocks, in the order of positions.
    tables: Vec<Vec<u32>>,
}

/// `[layer][block]`; memory is taken when a block is first written.
type Pool<T> = Vec<Vec<Option<KvBlock<T>>>>;

enum Pools {
    F32(Pool<f32>),
    F16(Pool<f16>),
    I8(Pool<i8>),
}

/// Does the same on a pool, whatever its elements are.
macro_rules! on_pool {
    ($pools:expr, $pool:ident => $e:expr) => {
        match $pools {
            Pools::F32($pool) => $e,
            Pools::F16($pool) => $e,
            Pools::I8($pool) => $e,
        }
    };
}

impl CpuCache {
    pub(crate) fn new(shape: CacheShape) -> Self {
        fn empty<T>(shape: CacheShape) -> Pool<T> {
            (0..shape.layers).map(|_| (0..shape.blocks).map(|_| None).collect()).collect()
        }
        let pools = match shape.kind {
            KvType::F32 => Pools::F32(empty(shape)),
            KvType::F16 => Pools::F16(empty(shape)),
            KvType::I8 => Pools::I8(empty(shape)),
        };
        let block = BlockShape::new(shape.kv_heads, shape.head_dim);
        Self { block, pools, tables: Vec::new() }
    }

    pub(crate) fn edit(&mut self, edit: &CacheEdit) -> Result<(), TensorError> {
        match edit {
            CacheEdit::Table { slot, keep, blocks } => self.extend(*slot, *keep, blocks),
            CacheEdit::Copy { from, to } => {
                self.check_block(*from)?;
                self.check_block(*to)?;
                on_pool!(&mut self.pools, pool => copy(pool, self.block, *from, *to));
                Ok(())
            }
        }
    }

    fn extend(&mut self, slot: usize, keep: usize, blocks: &[u32]) -> Result<(), TensorError> {
        if slot >= self.tables.len() {
            self.tables.resize_with(slot + 1, Vec::new);
        }
        blocks.iter().try_for_each(|b| self.check_block(*b))?;
        let Some(table) = self.tables.get_mut(slot) else { return Ok(()) };
        table.truncate(keep);
        table.extend_from_slice(blocks);
        Ok(())
    }

    fn check_block(&self, block: u32) -> Result<(), TensorError> {
        let blocks = on_pool!(&self.pools, pool => pool.first().map_or(0, Vec::len));
        // A rank without layers has nothing to keep.
        if self.layers() == 0 || (block as usize) < blocks {
            return Ok(());
        }
        Err(TensorError::NoSuchBlock { block, blocks })
    }

    fn layers(&self) -> usize {
        on_pool!(&self.pools, pool => pool.len())
    }

    pub(crate) fn bytes(&self) -> usize {
        fn count<T: KvElement>(pool: &Pool<T>, shape: BlockShape) -> usize {
            pool.iter().flatten().flatten().count() * shape.bytes::<T>()
        }
        on_pool!(&self.pools, pool => count(pool, self.block))
    }

    pub(crate) fn block_bytes(&self) -> usize {
        fn of<T: KvElement>(_: &Pool<T>, shape: BlockShape) -> usize {
            shape.bytes::<T>()
        }
        self.layers() * on_pool!(&self.pools, pool => of(pool, self.block))
    }

    /// Appends the spans' keys and values, and attends; `out` has the shape of `q`.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn attend(
        &mut self,
        backend: &mut CpuBackend,
        layer: usize,
        spans: &[Span],
        q: &CpuTensor,
        k: &CpuTensor,
        v: &CpuTensor,
        how: &Attention,
        out: &mut CpuTensor,
    ) -> Result<(), TensorError> {
        let tables = tables_of(&self.tables, spans)?;
        let shape = self.block;
        on_pool!(&mut self.pools, pools => {
            let Some(pool) = pools.get_mut(layer) else { return Ok(()) };
            let step = Layer { shape, spans, tables: &tables };
            step.store(backend, pool, k, v);
            step.check(pool, how)?;
            step.attend(backend, pool, q, how, out);
        });
        Ok(())
    }

    /// A block's contents in all layers, for [`CpuCache::import`] on a rank of the same shape.
    pub(crate) fn export(&self, block: u32) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.block_bytes());
        on_pool!(&self.pools, pool => {
            for layer in pool {
                match layer.get(block as usize).and_then(Option::as_ref) {
                    Some(b) => b.write(&mut bytes),
                    None => KvBlock::new_like(layer, self.block).write(&mut bytes),
                }
            }
        });
        bytes
    }

    /// Fills a block with what [`CpuCache::export`] gave.
    pub(crate) fn import(&mut self, block: u32, bytes: &[u8]) -> Result<(), TensorError> {
        self.check_block(block)?;
        let expected = self.block_bytes();
        if bytes.len() != expected {
            return Err(TensorError::BlockBytes { expected, got: bytes.len() });
        }
        let shape = self.block;
        on_pool!(&mut self.pools, pool => {
            let mut rest = bytes;
            for layer in pool {
                let mut filled = KvBlock::new_like(layer, shape);
                rest = filled.read(rest);
                if let Some(place) = layer.get_mut(block as usize) {
                    *place = Some(filled);
                }
            }
        });
        Ok(())
    }
}

/// The table of each span's sequence, which must cover the span.
fn tables_of<'a>(tables: &'a [Vec<u32>], spans: &[Span]) -> Result<Vec<&'a [u32]>, TensorError> {
    let table = |span: &Span| {
        let (slot, end) = (span.slot, span.position.saturating_add(span.tokens));
        let table = tables.get(slot).map_or(&[][..], Vec::as_slice);
        let capacity = table.len() * BLOCK;
        if end <= capacity { Ok(table) } else { Err(TensorError::CacheFull { slot, capacity }) }
    };
    spans.iter().map(table).collect()
}

fn copy<T: KvElement>(pool: &mut Pool<T>, shape: BlockShape, from: u32, to: u32) {
    for layer in pool {
        let Some(source) = layer.get_mut(from as usize).and_then(Option::take) else { continue };
        if let Some(target) = layer.get_mut(to as usize) {
            target.get_or_insert_with(|| KvBlock::new(shape)).copy_from(&source);
        }
        if let Some(place) = layer.get_mut(from as usize) {
            *place = Some(source);
        }
    }
}

/// One layer of a step.
struct Layer<'a> {
    shape: BlockShape,
    spans: &'a [Span],
    /// By span.
    tables: &'a [&'a [u32]],
}

impl Layer<'_> {
    /// Puts the keys and values of all spans into their blocks.
    fn store<T: KvElement>(
        &self,
        backend: &mut CpuBackend,
        pool: &mut [Option<KvBlock<T>>],
        k: &CpuTensor,
        v: &CpuTensor,
    ) {
        let mut jobs = Vec::new();
        let mut row = 0;
        for (span, table) in self.spans.iter().zip(self.tables) {
            let end = span.position + span.tokens;
            let mut at = span.position;
            while at < end {
                let upto = end.min((at / BLOCK + 1) * BLOCK);
                let place = table.get(at / BLOCK).and_then(|b| pool.get_mut(*b as usize));
                let Some(place) = place else { break };
                let block = place.get_or_insert_with(|| KvBlock::new(self.shape));
                let first = row + at - span.position;
                jobs.extend((0..self.shape.heads).map(|head| Store {
                    k: k.values(),
                    v: v.values(),
                    shape: self.shape,
                    head,
                    rows: first..first + upto - at,
                    at: at % BLOCK,
                    keys: block.keys.as_mut_ptr(),
                    values: block.values.as_mut_ptr(),
                    key_scales: block.key_scales.as_mut_ptr(),
                    value_scales: block.value_scales.as_mut_ptr(),
                }));
                at = upto;
            }
            row += span.tokens;
        }
        // SAFETY: the pointers are those of blocks in `pool`, which is borrowed for the call; each
        // job has its own head and places.
        unsafe { backend.run_jobs(jobs, row >= PARALLEL_STORE) };
    }

    /// All blocks that the spans look back on must have been written: a table of another rank's
    /// making may be wrong.
    fn check<T: KvElement>(
        &self,
        pool: &[Option<KvBlock<T>>],
        how: &Attention,
    ) -> Result<(), TensorError> {
        for (span, table) in self.spans.iter().zip(self.tables) {
            let first = how.window.map_or(0, |w| (span.position + 1).saturating_sub(w)) / BLOCK;
            let end = (span.position + span.tokens).div_ceil(BLOCK);
            for block in table.iter().take(end).skip(first) {
                if pool.get(*block as usize).is_none_or(Option::is_none) {
                    return Err(TensorError::EmptyBlock { slot: span.slot, block: *block });
                }
            }
        }
        Ok(())
    }

    fn attend<T: KvElement>(
        &self,
        backend: &mut CpuBackend,
        pool: &[Option<KvBlock<T>>],
        q: &CpuTensor,
        how: &Attention,
        out: &mut CpuTensor,
    ) {
        if how.heads == 0 {
            return;
        }
        let out = out.values_mut().as_mut_ptr();
        // The heads of a group go together, to share the keys that they have in the cache; where
        // there are fewer groups than threads, each is split between several.
        let groups = (self.spans.len() * self.shape.heads).max(1);
        let part = how.group.div_ceil(backend.threads().div_ceil(groups)).max(1);
        let mut jobs = Vec::new();
        let mut row = 0;
        for (span, table) in self.spans.iter().zip(self.tables) {
            let mut head = 0;
            while head < how.heads {
                let kv_head = (how.first_in_group + head) / how.group;
                let group_end = (kv_head + 1) * how.group - how.first_in_group;
                let most = if span.tokens == 1 { head + part } else { how.heads };
                let end = group_end.min(how.heads).min(most);
                for first in (0..span.tokens).step_by(ROWS_PER_JOB) {
                    jobs.push(Attend {
                        queries: q.values(),
                        out,
                        heads: how.heads,
                        shape: self.shape,
                        pool,
                        table,
                        kv_head,
                        rows: row + first..row + (first + ROWS_PER_JOB).min(span.tokens),
                        position: span.position + first,
                        query_heads: head..end,
                        scale: how.scale,
                        window: how.window,
                    });
                }
                head = end;
            }
            row += span.tokens;
        }
        // The last rows of a long prompt cost the most: start with them.
        jobs.reverse();
        // SAFETY: `check` has found all blocks; jobs own their rows and heads of `out`.
        unsafe { backend.run_jobs(jobs, true) };
    }
}
