//! Attention over a blocked key-value cache, one block at a time with a running softmax
//! (Milakov and Gimelshein, 2018; Dao et al., 2022).
//!
//! Blocks are aligned to absolute positions and every query goes through them by itself, so its
//! result does not depend on what else is computed with it, nor on how a prompt was chunked.

use super::dense::Element;
use super::simd::{F32x8, Isa, Job, LANES};

/// Positions per block.
pub(crate) const BLOCK: usize = 64;

/// Keys and values of [`BLOCK`] consecutive positions, for all key-value heads of a layer.
/// Keys: `[head][position / 8][dim][8 positions]`; values: `[head][position][dim]`.
pub(crate) struct KvBlock<T> {
    keys: Box<[T]>,
    values: Box<[T]>,
}

impl<T: Element> KvBlock<T> {
    /// An empty block for `heads` of `dim` (a multiple of 8).
    pub(crate) fn new(heads: usize, dim: usize) -> Self {
        let zeros = vec![T::from_f32(0.0); heads * BLOCK * dim].into_boxed_slice();
        Self { keys: zeros.clone(), values: zeros }
    }

    /// Stores one position: `key` and `value` are `[heads, head_dim]`, `head_dim <= dim`.
    pub(crate) fn put(
        &mut self,
        at: usize,
        head_dim: usize,
        dim: usize,
        key: &[f32],
        value: &[f32],
    ) {
        let keys = self.keys.chunks_exact_mut(BLOCK * dim).zip(key.chunks_exact(head_dim));
        for (block, key) in keys {
            let vector = &mut block[at / LANES * dim * LANES..];
            for (d, &x) in key.iter().enumerate() {
                vector[d * LANES + at % LANES] = T::from_f32(x);
            }
        }
        let values = self.values.chunks_exact_mut(BLOCK * dim).zip(value.chunks_exact(head_dim));
        for (block, value) in values {
            for (slot, &x) in block[at * dim..].iter_mut().zip(value) {
                *slot = T::from_f32(x);
            }
        }
    }
}

/// Attention of some query heads, which share a key-value head, at consecutive positions.
pub(crate) struct Attend<'a, T> {
    /// `[tokens, heads, head_dim]`.
    pub(crate) queries: &'a [f32],
    /// The same shape; this job writes its own rows and heads.
    pub(crate) out: *mut f32,
    /// Query heads in a row.
    pub(crate) heads: usize,
    pub(crate) head_dim: usize,
    /// `head_dim` rounded up to a multiple of 8.
    pub(crate) dim: usize,
    /// The sequence's blocks in this layer, from position 0 on.
    pub(crate) blocks: &'a [KvBlock<T>],
    pub(crate) kv_head: usize,
    /// The rows of `queries` to do, and the position of the first.
    pub(crate) rows: std::ops::Range<usize>,
    pub(crate) position: usize,
    pub(crate) query_heads: std::ops::Range<usize>,
    pub(crate) scale: f32,
    /// How many positions back a query sees, itself included.
    pub(crate) window: Option<usize>,
}

/// What the running softmax of one query remembers.
struct Running {
    most: f32,
    sum: f32,
}

impl<T: Element> Job for Attend<'_, T> {
    /// Safety: `out` must be valid and not written by others at these rows and heads; the blocks
    /// must cover all positions of the rows.
    #[inline(always)]
    unsafe fn run<S: Isa>(&mut self) {
        let heads = self.query_heads.len();
        let queries = self.rows.len() * heads;
        let mut states: Vec<Running> =
            (0..queries).map(|_| Running { most: f32::NEG_INFINITY, sum: 0.0 }).collect();
        let mut sums = vec![0.0f32; queries * self.dim];
        let last = self.position + self.rows.len() - 1;
        let first = self.window.map_or(0, |w| (self.position + 1).saturating_sub(w)) / BLOCK;
        for (b, block) in self.blocks.iter().enumerate().take(last / BLOCK + 1).skip(first) {
            for (i, state) in states.iter_mut().enumerate() {
                let at = self.position + i / heads;
                let low = self.window.map_or(0, |w| (at + 1).saturating_sub(w));
                let seen = low.max(b * BLOCK)..(at + 1).min((b + 1) * BLOCK);
                if seen.is_empty() {
                    continue;
                }
                let seen = seen.start - b * BLOCK..seen.end - b * BLOCK;
                let sum = &mut sums[i * self.dim..][..self.dim];
                // SAFETY: the block holds `BLOCK` positions of `dim`, `seen` lies within.
                unsafe { self.block::<S>(block, self.offset(i), seen, state, sum) };
            }
        }
        for (i, state) in states.iter().enumerate() {
            let inverse = 1.0 / state.sum;
            let sum = &sums[i * self.dim..][..self.head_dim];
            for (d, x) in sum.iter().enumerate() {
                // SAFETY: `out` has the shape of `queries`, and this row and head are ours.
                unsafe { *self.out.add(self.offset(i) + d) = x * inverse };
            }
        }
    }
}

impl<T: Element> Attend<'_, T> {
    /// Where query `i` of this job starts in `queries` and `out`.
    #[inline(always)]
    fn offset(&self, i: usize) -> usize {
        let heads = self.query_heads.len();
        let (row, head) = (self.rows.start + i / heads, self.query_heads.start + i % heads);
        (row * self.heads + head) * self.head_dim
    }

    /// Takes one block into a query's running softmax.
    ///
    /// # Safety
    /// As [`Job::run`]; `seen` within `0..BLOCK`, `sum` of `dim` elements.
    #[inline(always)]
    unsafe fn block<S: Isa>(
        &self,
        block: &KvBlock<T>,
        query: usize,
        seen: std::ops::Range<usize>,
        state: &mut Running,
        sum: &mut [f32],
    ) {
        let mut p = [0.0f32; BLOCK];
        let query = &self.queries[query..][..self.head_dim];
        let base = self.kv_head * BLOCK * self.dim;
        // SAFETY: the caller's.
        unsafe {
            self.scores::<S>(block.keys.as_ptr().add(base), query, &mut p);
            let most = p[seen.clone()].iter().copied().fold(state.most, f32::max);
            let shrink = S::F::splat(state.most - most).exp().lanes()[0];
            let shrink = if state.most == f32::NEG_INFINITY { 0.0 } else { shrink };
            let mut total = S::F::splat(0.0);
            for v in 0..BLOCK / LANES {
                let at = p.as_mut_ptr().add(v * LANES);
                S::F::load(at).sub(S::F::splat(most)).exp().store(at);
            }
            p[..seen.start].fill(0.0);
            p[seen.end..].fill(0.0);
            for v in 0..BLOCK / LANES {
                total = total.add(S::F::load(p.as_ptr().add(v * LANES)));
            }
            state.sum = state.sum * shrink + total.sum();
            state.most = most;
            self.weigh::<S>(block.values.as_ptr().add(base), &p, seen.end, shrink, sum);
        }
    }

    /// Scaled dot products of the query with all keys of the block.
    ///
    /// # Safety
    /// `keys` must be those of one head.
    #[inline(always)]
    unsafe fn scores<S: Isa>(&self, keys: *const T, query: &[f32], p: &mut [f32; BLOCK]) {
        // SAFETY: the caller's.
        unsafe {
            let mut dots = [S::F::splat(0.0); BLOCK / LANES];
            for (d, &q) in query.iter().enumerate() {
                let q = S::F::splat(q);
                for (v, dot) in dots.iter_mut().enumerate() {
                    *dot = T::load8::<S::F>(keys.add((v * self.dim + d) * LANES)).fma(q, *dot);
                }
            }
            for (v, dot) in dots.into_iter().enumerate() {
                dot.mul(S::F::splat(self.scale)).store(p.as_mut_ptr().add(v * LANES));
            }
        }
    }

    /// `sum = sum * shrink + p · values` over the first `end` positions.
    ///
    /// # Safety
    /// `values` must be those of one head.
    #[inline(always)]
    unsafe fn weigh<S: Isa>(
        &self,
        values: *const T,
        p: &[f32; BLOCK],
        end: usize,
        shrink: f32,
        sum: &mut [f32],
    ) {
        /// Vectors of a head that are summed at once.
        const WIDE: usize = 8;
        let mut d = 0;
        // SAFETY: the caller's; `sum` has `dim` elements, a multiple of 8.
        unsafe {
            while d + WIDE * LANES <= self.dim {
                columns::<S, T, WIDE>(values.add(d), self.dim, &p[..end], shrink, &mut sum[d..]);
                d += WIDE * LANES;
            }
            while d < self.dim {
                columns::<S, T, 1>(values.add(d), self.dim, &p[..end], shrink, &mut sum[d..]);
                d += LANES;
            }
        }
    }
}

/// # Safety
/// `values` must have `p.len()` rows of stride `dim` with `N` vectors each, `sum` `N` vectors.
#[inline(always)]
unsafe fn columns<S: Isa, T: Element, const N: usize>(
    values: *const T,
    dim: usize,
    p: &[f32],
    shrink: f32,
    sum: &mut [f32],
) {
    // SAFETY: the caller's.
    unsafe {
        let mut totals = [S::F::splat(0.0); N];
        for (v, total) in totals.iter_mut().enumerate() {
            *total = S::F::load(sum.as_ptr().add(v * LANES)).mul(S::F::splat(shrink));
        }
        for (j, &p) in p.iter().enumerate() {
            let p = S::F::splat(p);
            for (v, total) in totals.iter_mut().enumerate() {
                *total = T::load8::<S::F>(values.add(j * dim + v * LANES)).fma(p, *total);
            }
        }
        for (v, total) in totals.into_iter().enumerate() {
            total.store(sum.as_mut_ptr().add(v * LANES));
        }
    }
}
