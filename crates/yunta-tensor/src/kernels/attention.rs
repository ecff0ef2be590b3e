//! Attention over a blocked key-value cache, one block at a time with a running softmax
//! (Milakov and Gimelshein, 2018; Dao et al., 2022).
//!
//! Blocks are aligned to absolute positions and every query goes through them by itself, so its
//! result does not depend on what else is computed with it, nor on how a prompt was chunked.

use super::kv::{BLOCK, BlockShape, KvBlock, KvElement, SCALED_RUN, widen};
use super::simd::{F32x8, Isa, Job, LANES};

/// Attention of some query heads, which share a key-value head, at consecutive positions.
pub(crate) struct Attend<'a, T> {
    /// `[tokens, heads, head_dim]`.
    pub(crate) queries: &'a [f32],
    /// The same shape; this job writes its own rows and heads.
    pub(crate) out: *mut f32,
    /// Query heads in a row.
    pub(crate) heads: usize,
    pub(crate) shape: BlockShape,
    /// The layer's blocks, and which of them are the sequence's, from position 0 on.
    pub(crate) pool: &'a [Option<KvBlock<T>>],
    pub(crate) table: &'a [u32],
    pub(crate) kv_head: usize,
    /// The rows of `queries` to do, and the position of the first.
    pub(crate) rows: std::ops::Range<usize>,
    pub(crate) position: usize,
    pub(crate) query_heads: std::ops::Range<usize>,
    pub(crate) scale: f32,
    /// How many positions back a query sees, itself included.
    pub(crate) window: Option<usize>,
}

/// Queries that share the loads of a block which all of them see.
const TOGETHER: usize = 4;

/// What the running softmax of one query remembers.
struct Running {
    most: f32,
    sum: f32,
}

impl<T: KvElement> Job for Attend<'_, T> {
    /// Safety: `out` must be valid and not written by others at these rows and heads; the blocks
    /// must be there for all positions that the rows see.
    #[inline(always)]
    unsafe fn run<S: Isa>(&mut self) {
        let heads = self.query_heads.len();
        let queries = self.rows.len() * heads;
        let mut states: Vec<Running> =
            (0..queries).map(|_| Running { most: f32::NEG_INFINITY, sum: 0.0 }).collect();
        let BlockShape { head_dim, dim, .. } = self.shape;
        let mut sums = vec![0.0f32; queries * dim];
        let last = self.position + self.rows.len() - 1;
        let first = self.window.map_or(0, |w| (self.position + 1).saturating_sub(w)) / BLOCK;
        let is_single = self.rows.len() == 1;
        // Of use only where several rows share a block.
        let mut wide = Vec::new();
        for (b, id) in self.table.iter().enumerate().take(last / BLOCK + 1).skip(first) {
            let Some(block) = &self.pool[*id as usize] else { continue };
            // SAFETY: the block is one of `self.shape`, and has this head.
            let head = unsafe { Head::of(block, self.kv_head, self.shape) };
            let mut done = 0;
            if is_single {
                let seen = self.seen(0, b);
                // SAFETY: as below.
                unsafe { self.take_row::<S>(&head, seen, &mut states, &mut sums) };
                continue;
            }
            if queries >= TOGETHER && self.all_see(b) {
                wide.resize(2 * self.shape.head_len(), T::Wide::ZERO);
                // SAFETY: `wide` has room for the keys and values of a head.
                let head = unsafe { head.widen::<S>(self.shape, &mut wide) };
                while done + TOGETHER <= queries {
                    // SAFETY: as below.
                    unsafe {
                        self.take::<S, T::Wide, TOGETHER, 2>(
                            &head,
                            done,
                            0..BLOCK,
                            &mut states,
                            &mut sums,
                        );
                    }
                    done += TOGETHER;
                }
            }
            for i in done..queries {
                let seen = self.seen(i / heads, b);
                if seen.is_empty() {
                    continue;
                }
                // SAFETY: the block holds `BLOCK` positions of `dim`, `seen` lies within, and query
                // `i` exists.
                unsafe { self.take::<S, T, 1, 8>(&head, i, seen, &mut states, &mut sums) };
            }
        }
        for (i, state) in states.iter().enumerate() {
            let inverse = 1.0 / state.sum;
            let sum = &sums[i * dim..][..head_dim];
            for (d, x) in sum.iter().enumerate() {
                // SAFETY: `out` has the shape of `queries`, and this row and head are ours.
                unsafe { *self.out.add(self.offset(i) + d) = x * inverse };
            }
        }
    }
}

impl<T: KvElement> Attend<'_, T> {
    /// Where query `i` of this job starts in `queries` and `out`.
    #[inline(always)]
    fn offset(&self, i: usize) -> usize {
        let heads = self.query_heads.len();
        let (row, head) = (self.rows.start + i / heads, self.query_heads.start + i % heads);
        (row * self.heads + head) * self.shape.head_dim
    }

    /// Whether all queries of this job see all positions of a block.
    fn all_see(&self, block: usize) -> bool {
        let last = self.position + self.rows.len() - 1;
        let low = self.window.map_or(0, |w| (last + 1).saturating_sub(w));
        low <= block * BLOCK && (block + 1) * BLOCK <= self.position + 1
    }

    /// Which positions of a block the queries of a row see, counted from the block's first.
    fn seen(&self, row: usize, block: usize) -> std::ops::Range<usize> {
        let at = self.position + row;
        let low = self.window.map_or(0, |w| (at + 1).saturating_sub(w));
        let (low, high) = (low.max(block * BLOCK), (at + 1).min((block + 1) * BLOCK));
        low.min(high) - block * BLOCK..high - block * BLOCK
    }

    /// Takes one block into the softmax of all queries, which are of one row: they see the same and
    /// share what is loaded.
    ///
    /// # Safety
    /// As [`Attend::take`].
    #[inline(always)]
    unsafe fn take_row<S: Isa>(
        &self,
        head: &Head<T>,
        seen: std::ops::Range<usize>,
        states: &mut [Running],
        sums: &mut [f32],
    ) {
        let mut done = 0;
        while done < states.len() && !seen.is_empty() {
            let seen = seen.clone();
            // SAFETY: the caller's.
            done += unsafe {
                match states.len() - done {
                    1 => self.take::<S, T, 1, 8>(head, done, seen, states, sums),
                    2 => self.take::<S, T, 2, 4>(head, done, seen, states, sums),
                    3 => self.take::<S, T, 3, 4>(head, done, seen, states, sums),
                    _ => self.take::<S, T, TOGETHER, 2>(head, done, seen, states, sums),
                }
            };
        }
    }

    /// Takes one block into the running softmax of the queries `first..first + Q`. The arithmetic
    /// of a query is the same whatever `Q` and `V` are. Returns `Q`.
    ///
    /// # Safety
    /// As [`Job::run`]; `seen` within `0..BLOCK`.
    #[inline(always)]
    unsafe fn take<S: Isa, E: KvElement, const Q: usize, const V: usize>(
        &self,
        head: &Head<E>,
        first: usize,
        seen: std::ops::Range<usize>,
        states: &mut [Running],
        sums: &mut [f32],
    ) -> usize {
        let dim = self.shape.dim;
        let mut p = [[0.0f32; BLOCK]; Q];
        let mut shrink = [0.0f32; Q];
        // SAFETY: the caller's.
        unsafe {
            let queries: [*const f32; Q] =
                std::array::from_fn(|q| self.queries.as_ptr().add(self.offset(first + q)));
            scores::<S, E, Q, V>(head, self.shape, queries, self.scale, &mut p);
            for (q, (p, shrink)) in p.iter_mut().zip(&mut shrink).enumerate() {
                *shrink = states[first + q].take::<S>(p, seen.clone());
            }
            let sums = sums[first * dim..(first + Q) * dim].as_mut_ptr();
            let sums: [*mut f32; Q] = std::array::from_fn(|q| sums.add(q * dim));
            weigh::<S, E, Q>(head, dim, &p, seen.end, shrink, sums);
        }
        Q
    }
}

impl Running {
    /// Turns scores into weights, relative to the greatest so far; returns by how much earlier sums
    /// shrink.
    ///
    /// # Safety
    /// That of `S`.
    #[inline(always)]
    unsafe fn take<S: Isa>(&mut self, p: &mut [f32; BLOCK], seen: std::ops::Range<usize>) -> f32 {
        p[..seen.start].fill(f32::NEG_INFINITY);
        p[seen.end..].fill(f32::NEG_INFINITY);
        // SAFETY: offsets are multiples of 8 below `BLOCK`.
        unsafe {
            let at = |v: usize| v * LANES;
            let mut greatest = S::F::load(p.as_ptr());
            for v in 1..BLOCK / LANES {
                greatest = greatest.max(S::F::load(p.as_ptr().add(at(v))));
            }
            let most = self.most.max(greatest.greatest());
            let shrink = S::F::splat(self.most - most).exp().lanes()[0];
            let shrink = if self.most == f32::NEG_INFINITY { 0.0 } else { shrink };
            for v in 0..BLOCK / LANES {
                let at = p.as_mut_ptr().add(at(v));
                S::F::load(at).sub(S::F::splat(most)).exp().store(at);
            }
            p[..seen.start].fill(0.0);
            p[seen.end..].fill(0.0);
            let mut total = S::F::splat(0.0);
            for v in 0..BLOCK / LANES {
                total = total.add(S::F::load(p.as_ptr().add(at(v))));
            }
            self.sum = self.sum * shrink + total.sum();
            self.most = most;
            shrink
        }
    }
}

/// Keys and values of one head of a block.
struct Head<T> {
    keys: *const T,
    values: *const T,
    key_scales: *const f32,
    value_scales: *const f32,
}

impl<T: KvElement> Head<T> {
    /// # Safety
    /// The block must be of that shape and have the head.
    unsafe fn of(block: &KvBlock<T>, head: usize, shape: BlockShape) -> Self {
        let (elements, scales) = (head * shape.head_len(), head * shape.head_scales::<T>());
        // SAFETY: the caller's.
        unsafe {
            Self {
                keys: block.keys.as_ptr().add(elements),
                values: block.values.as_ptr().add(elements),
                key_scales: block.key_scales.as_ptr().add(scales),
                value_scales: block.value_scales.as_ptr().add(scales),
            }
        }
    }

    /// # Safety
    /// `to` must have room for the keys and values of a head.
    #[inline(always)]
    unsafe fn widen<S: Isa>(&self, shape: BlockShape, to: &mut [T::Wide]) -> Head<T::Wide> {
        let (keys, values) = to.split_at_mut(shape.head_len());
        // SAFETY: the caller's.
        unsafe {
            widen::<S, T>(self.keys, keys);
            widen::<S, T>(self.values, values);
        }
        let (keys, values) = (keys.as_ptr(), values.as_ptr());
        Head { keys, values, key_scales: self.key_scales, value_scales: self.value_scales }
    }
}

/// Scaled dot products of `Q` queries with all keys of a head, `V` vectors of positions at a time.
///
/// # Safety
/// The queries must have `head_dim` elements.
#[inline(always)]
unsafe fn scores<S: Isa, E: KvElement, const Q: usize, const V: usize>(
    head: &Head<E>,
    shape: BlockShape,
    queries: [*const f32; Q],
    scale: f32,
    p: &mut [[f32; BLOCK]; Q],
) {
    let BlockShape { head_dim, dim, .. } = shape;
    let run = if E::SCALED { SCALED_RUN } else { dim };
    for first in (0..BLOCK / LANES).step_by(V) {
        // SAFETY: the caller's; `first + V` vectors of positions are within the block.
        unsafe {
            let mut totals = [[S::F::splat(0.0); V]; Q];
            for start in (0..head_dim).step_by(run) {
                let mut dots = [[S::F::splat(0.0); V]; Q];
                for d in start..head_dim.min(start + run) {
                    let keys: [S::F; V] = load_keys::<S, E, V>(head.keys, dim, first, d);
                    for (dots, query) in dots.iter_mut().zip(queries) {
                        let x = S::F::splat(*query.add(d));
                        for (dot, key) in dots.iter_mut().zip(keys) {
                            *dot = key.fma(x, *dot);
                        }
                    }
                }
                if !E::SCALED {
                    totals = dots;
                    break;
                }
                let scales = head.key_scales.add(start / run * BLOCK);
                for (totals, dots) in totals.iter_mut().zip(dots) {
                    for (v, (total, dot)) in totals.iter_mut().zip(dots).enumerate() {
                        let scale = S::F::load(scales.add((first + v) * LANES));
                        *total = scale.fma(dot, *total);
                    }
                }
            }
            for (p, totals) in p.iter_mut().zip(totals) {
                for (v, total) in totals.into_iter().enumerate() {
                    let at = p.as_mut_ptr().add((first + v) * LANES);
                    total.mul(S::F::splat(scale)).store(at);
                }
            }
        }
    }
}

/// Element `d` of `V` vectors of keys.
///
/// # Safety
/// `keys` must be those of a head of `dim`.
#[inline(always)]
unsafe fn load_keys<S: Isa, E: KvElement, const V: usize>(
    keys: *const E,
    dim: usize,
    first: usize,
    d: usize,
) -> [S::F; V] {
    // SAFETY: the caller's.
    unsafe {
        let mut out = [S::F::splat(0.0); V];
        for (v, out) in out.iter_mut().enumerate() {
            *out = E::load8::<S::F>(keys.add(((first + v) * dim + d) * LANES));
        }
        out
    }
}

/// `sum = sum * shrink + p · values` over the first `end` positions, for each query.
///
/// # Safety
/// The sums must have `dim` elements each.
#[inline(always)]
unsafe fn weigh<S: Isa, E: KvElement, const Q: usize>(
    head: &Head<E>,
    dim: usize,
    p: &[[f32; BLOCK]; Q],
    end: usize,
    shrink: [f32; Q],
    sums: [*mut f32; Q],
) {
    let run = if E::SCALED { SCALED_RUN } else { dim };
    let mut scaled = *p;
    for start in (0..dim).step_by(run) {
        let width = run.min(dim - start);
        // SAFETY: the caller's.
        unsafe {
            if E::SCALED {
                let scales = head.value_scales.add(start / run * BLOCK);
                for (scaled, p) in scaled.iter_mut().zip(p) {
                    for v in (0..BLOCK).step_by(LANES) {
                        let x = S::F::load(p.as_ptr().add(v)).mul(S::F::load(scales.add(v)));
                        x.store(scaled.as_mut_ptr().add(v));
                    }
                }
            }
            let mut d = start;
            while Q == 1 && d + 8 * LANES <= start + width {
                columns::<S, E, Q, 8>(head.values, dim, d, &scaled, end, shrink, sums);
                d += 8 * LANES;
            }
            while Q < TOGETHER && d + 4 * LANES <= start + width {
                columns::<S, E, Q, 4>(head.values, dim, d, &scaled, end, shrink, sums);
                d += 4 * LANES;
            }
            while d + 2 * LANES <= start + width {
                columns::<S, E, Q, 2>(head.values, dim, d, &scaled, end, shrink, sums);
                d += 2 * LANES;
            }
            while d < start + width {
                columns::<S, E, Q, 1>(head.values, dim, d, &scaled, end, shrink, sums);
                d += LANES;
            }
        }
    }
}

/// [`weigh`] of `N` vectors from element `d` on.
///
/// # Safety
/// As there; these elements must exist.
#[inline(always)]
unsafe fn columns<S: Isa, E: KvElement, const Q: usize, const N: usize>(
    values: *const E,
    dim: usize,
    d: usize,
    p: &[[f32; BLOCK]; Q],
    end: usize,
    shrink: [f32; Q],
    sums: [*mut f32; Q],
) {
    // SAFETY: the caller's.
    unsafe {
        let mut totals = [[S::F::splat(0.0); N]; Q];
        for ((totals, sum), shrink) in totals.iter_mut().zip(sums).zip(shrink) {
            for (v, total) in totals.iter_mut().enumerate() {
                *total = S::F::load(sum.add(d + v * LANES)).mul(S::F::splat(shrink));
            }
        }
        for j in 0..end {
            let mut row = [S::F::splat(0.0); N];
            for (v, x) in row.iter_mut().enumerate() {
                *x = E::load8::<S::F>(values.add(j * dim + d + v * LANES));
            }
            for (totals, p) in totals.iter_mut().zip(p) {
                let weight = S::F::splat(*p.as_ptr().add(j));
                for (total, x) in totals.iter_mut().zip(row) {
                    *total = x.fma(weight, *total);
                }
            }
        }
        for (totals, sum) in totals.into_iter().zip(sums) {
            for (v, total) in totals.into_iter().enumerate() {
                total.store(sum.add(d + v * LANES));
            }
        }
    }
}

// SAFETY: a job writes its own rows and heads of `out`, and only reads the rest.
unsafe impl<T: KvElement> Send for Attend<'_, T> {}
