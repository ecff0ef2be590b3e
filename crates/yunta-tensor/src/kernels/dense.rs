//! Linear layers on floating-point weights.
//!
//! A packed panel holds eight rows, column by column: one broadcast activation serves eight rows.
//! Each output is the sum of two chains (even and odd columns), in column order: the same
//! arithmetic whatever the tile.

use half::{bf16, f16};

use super::int::{Out, store_float, store_grid};
use super::simd::{F32x8, Isa, Job, LANES};

/// A floating-point element of packed weights or caches.
pub(crate) trait Element: Copy + Send + Sync + 'static {
    /// Loads eight.
    ///
    /// # Safety
    /// `p` must be valid for eight elements.
    unsafe fn load8<F: F32x8>(p: *const Self) -> F;
    fn from_f32(x: f32) -> Self;
    fn to_f32(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load8<F: F32x8>(p: *const Self) -> F {
        // SAFETY: the caller's.
        unsafe { F::load(p) }
    }
    fn from_f32(x: f32) -> Self {
        x
    }
    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for f16 {
    #[inline(always)]
    unsafe fn load8<F: F32x8>(p: *const Self) -> F {
        // SAFETY: the caller's.
        unsafe { F::load_f16(p) }
    }
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
}

impl Element for bf16 {
    #[inline(always)]
    unsafe fn load8<F: F32x8>(p: *const Self) -> F {
        // SAFETY: the caller's.
        unsafe { F::load_bf16(p) }
    }
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }
    fn to_f32(self) -> f32 {
        bf16::to_f32(self)
    }
}

/// A linear layer over some panels of floating-point weights.
pub(crate) struct DenseLinear<'a, T> {
    /// All panels, `[panel][column][8]`.
    pub(crate) weights: &'a [T],
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// Activations `[tokens, cols]`.
    pub(crate) x: &'a [f32],
    pub(crate) tokens: usize,
    pub(crate) panels: std::ops::Range<usize>,
    pub(crate) out: Out,
}

impl<T: Element> Job for DenseLinear<'_, T> {
    /// Safety: `out` as for the integer kernel.
    #[inline(always)]
    unsafe fn run<S: Isa>(&mut self) {
        let mut panel = self.panels.start;
        // SAFETY: tiles stay within panels and tokens; output by the caller.
        unsafe {
            while panel < self.panels.end {
                let panels = (self.panels.end - panel).min(4);
                let mut t = 0;
                while t + 4 <= self.tokens {
                    for p in panel..panel + panels {
                        self.tile::<S, 4, 1>(p, t);
                    }
                    t += 4;
                }
                while t < self.tokens {
                    if panels == 4 {
                        self.tile::<S, 1, 4>(panel, t);
                    } else {
                        for p in panel..panel + panels {
                            self.tile::<S, 1, 1>(p, t);
                        }
                    }
                    t += 1;
                }
                panel += panels;
            }
        }
    }
}

impl<T: Element> DenseLinear<'_, T> {
    /// # Safety
    /// Panels `panel..panel + NP` and tokens `t..t + MT` must exist.
    #[inline(always)]
    unsafe fn tile<S: Isa, const MT: usize, const NP: usize>(&self, panel: usize, t: usize) {
        // SAFETY: the caller's.
        unsafe {
            match self.out {
                Out::Float(out) => {
                    let sums = self.span::<S, MT, NP>(panel, t, 0, self.cols);
                    self.each_output::<MT, NP>(panel, t, |i, p, at, width| {
                        store_float(sums[i][p], out.add(at), width);
                    });
                }
                Out::Grid(out, cell) => {
                    let mut totals = [[[0.0f64; LANES]; NP]; MT];
                    let mut k = 0;
                    while k < self.cols {
                        let end = (k + cell).min(self.cols);
                        let sums = self.span::<S, MT, NP>(panel, t, k, end);
                        for (totals, sums) in totals.iter_mut().zip(sums) {
                            for (total, sum) in totals.iter_mut().zip(sums) {
                                sum.add_to_grid(total);
                            }
                        }
                        k = end;
                    }
                    self.each_output::<MT, NP>(panel, t, |i, p, at, width| {
                        store_grid(&totals[i][p], out.add(at), width);
                    });
                }
            }
        }
    }

    #[inline(always)]
    fn each_output<const MT: usize, const NP: usize>(
        &self,
        panel: usize,
        t: usize,
        mut put: impl FnMut(usize, usize, usize, usize),
    ) {
        for i in 0..MT {
            for p in 0..NP {
                let row = (panel + p) * LANES;
                put(i, p, (t + i) * self.rows + row, LANES.min(self.rows - row));
            }
        }
    }

    /// # Safety
    /// As [`Self::tile`]; `from..to` are columns.
    #[inline(always)]
    unsafe fn span<S: Isa, const MT: usize, const NP: usize>(
        &self,
        panel: usize,
        t: usize,
        from: usize,
        to: usize,
    ) -> [[S::F; NP]; MT] {
        // SAFETY: the caller's.
        unsafe {
            let mut even = [[S::F::splat(0.0); NP]; MT];
            let mut odd = even;
            let weights = self.weights.as_ptr().add(panel * self.cols * LANES);
            let x = self.x.as_ptr().add(t * self.cols);
            let mut k = from;
            while k + 2 <= to {
                self.column::<S, MT, NP>(weights, x, k, &mut even);
                self.column::<S, MT, NP>(weights, x, k + 1, &mut odd);
                k += 2;
            }
            if k < to {
                self.column::<S, MT, NP>(weights, x, k, &mut even);
            }
            for (even, odd) in even.iter_mut().zip(odd) {
                for (e, o) in even.iter_mut().zip(odd) {
                    *e = e.add(o);
                }
            }
            even
        }
    }

    /// # Safety
    /// As [`Self::span`].
    #[inline(always)]
    unsafe fn column<S: Isa, const MT: usize, const NP: usize>(
        &self,
        weights: *const T,
        x: *const f32,
        k: usize,
        sums: &mut [[S::F; NP]; MT],
    ) {
        // SAFETY: the caller's.
        unsafe {
            let mut w = [S::F::splat(0.0); NP];
            for (p, w) in w.iter_mut().enumerate() {
                *w = T::load8::<S::F>(weights.add((p * self.cols + k) * LANES));
            }
            for (i, sums) in sums.iter_mut().enumerate() {
                let a = S::F::splat(*x.add(i * self.cols + k));
                for (sum, w) in sums.iter_mut().zip(w) {
                    *sum = w.fma(a, *sum);
                }
            }
        }
    }
}
