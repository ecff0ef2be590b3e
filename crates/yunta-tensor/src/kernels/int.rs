//! Linear layers on integer codes: quantised weights times activations quantised to 8 bits.
//!
//! Layout of a packed panel of eight rows: for each group of columns one block, the codes first
//! and then eight scales and (if the form has them) eight minima.
//! Byte codes: vector `j` of 32 bytes holds columns `4j..4j+4` of the eight rows, row by row.
//! Nibbles: the low halves of vector `j` hold columns `4j..`, the high halves columns
//! `group/2 + 4j..`. So one four-byte broadcast of activations serves eight rows.

use half::f16;

use super::simd::{F32x8, Isa, Job, LANES};
use crate::groups::{Codes, GroupForm, Groups};

/// Elements that share one activation scale.
pub(crate) const ACT_BLOCK: usize = 32;

/// A packed integer form, as constants for the kernels.
pub(crate) trait IntForm {
    const CODES: Codes;
    const GROUP: usize;
    const HALF: bool;

    const HAS_MIN: bool = !matches!(Self::CODES, Codes::I8);
    const CODE_BYTES: usize = match Self::CODES {
        Codes::U4 => Self::GROUP * LANES / 2,
        _ => Self::GROUP * LANES,
    };
    const SCALE_BYTES: usize = if Self::HALF { 2 * LANES } else { 4 * LANES };
    const BLOCK_BYTES: usize =
        Self::CODE_BYTES + Self::SCALE_BYTES * if Self::HAS_MIN { 2 } else { 1 };

    /// Scales and minima of a block.
    ///
    /// # Safety
    /// `block` must point to a whole block.
    #[inline(always)]
    unsafe fn scales<F: F32x8>(block: *const u8) -> (F, F) {
        // SAFETY: both vectors lie within the block.
        unsafe {
            let at = block.add(Self::CODE_BYTES);
            let min_at = if Self::HAS_MIN { at.add(Self::SCALE_BYTES) } else { at };
            if Self::HALF {
                (F::load_f16(at.cast()), F::load_f16(min_at.cast()))
            } else {
                (F::load(at.cast()), F::load(min_at.cast()))
            }
        }
    }

    /// The code of `row` at column `k` of the group.
    ///
    /// # Safety
    /// `block` must point to a whole block; `row < 8`, `k < GROUP`.
    #[inline(always)]
    unsafe fn code(block: *const u8, row: usize, k: usize) -> i32 {
        let (at, high) = place(Self::CODES, Self::GROUP, row, k);
        // SAFETY: `at` lies within the block.
        let byte = unsafe { *block.add(at) };
        match Self::CODES {
            Codes::U4 if high => i32::from(byte >> 4),
            Codes::U4 => i32::from(byte & 15),
            Codes::I8 => i32::from(byte as i8),
            _ => i32::from(byte),
        }
    }
}

/// Byte offset within a block, and whether the code is in the high half of that byte.
#[inline(always)]
fn place(codes: Codes, group: usize, row: usize, k: usize) -> (usize, bool) {
    let high = codes == Codes::U4 && k >= group / 2;
    let k = if high { k - group / 2 } else { k };
    (k / 4 * 32 + row * 4 + k % 4, high)
}

macro_rules! forms {
    ($($name:ident = $codes:ident, $group:literal, $half:literal;)*) => {
        $(pub(crate) struct $name;
        impl IntForm for $name {
            const CODES: Codes = Codes::$codes;
            const GROUP: usize = $group;
            const HALF: bool = $half;
        })*
        /// Bytes of one block of a form.
        pub(crate) fn block_bytes(form: GroupForm) -> usize {
            match (form.codes, form.group, form.half_scales) {
                $((Codes::$codes, $group, $half) => <$name as IntForm>::BLOCK_BYTES,)*
                _ => 0,
            }
        }
        /// Runs `job` with the constants of `form`.
        ///
        /// # Safety
        /// That of [`linear`].
        #[inline(always)]
        unsafe fn with_form<S: Isa>(job: &IntLinear<'_>) {
            let form = job.form;
            match (form.codes, form.group, form.half_scales) {
                // SAFETY: the caller's.
                $((Codes::$codes, $group, $half) => unsafe { linear::<S, $name>(job) },)*
                _ => {}
            }
        }
    };
}

forms! {
    U4x32Half = U4, 32, true;
    U4x32 = U4, 32, false;
    U4x16 = U4, 16, false;
    U5x32Half = U5, 32, true;
    U5x32 = U5, 32, false;
    U6x16 = U6, 16, false;
    I8x32Half = I8, 32, true;
    I8x32 = I8, 32, false;
}

/// Packs up to eight rows (fewer: the rest is zero) into `out`, blocks of groups in order.
pub(crate) fn pack_panel(form: GroupForm, rows: &[Groups], out: &mut [u8]) {
    let bytes = block_bytes(form);
    let scale_bytes = if form.half_scales { 2 } else { 4 };
    let scales_at = if form.codes == Codes::U4 { form.group * 4 } else { form.group * LANES };
    for (g, block) in out.chunks_exact_mut(bytes).enumerate() {
        for (row, groups) in rows.iter().enumerate() {
            for (k, &code) in groups.codes[g * form.group..][..form.group].iter().enumerate() {
                let (at, high) = place(form.codes, form.group, row, k);
                block[at] |= if high { code << 4 } else { code };
            }
            let mut put = |vector: usize, x: f32| {
                let at = scales_at + (vector * LANES + row) * scale_bytes;
                if form.half_scales {
                    block[at..at + 2].copy_from_slice(&f16::from_f32(x).to_le_bytes());
                } else {
                    block[at..at + 4].copy_from_slice(&x.to_le_bytes());
                }
            };
            put(0, groups.scales[g]);
            if form.codes != Codes::I8 {
                put(1, groups.mins[g]);
            }
        }
    }
}

/// Writes the values of `row` (0..8) of a packed panel.
pub(crate) fn unpack_row(form: GroupForm, panel: &[u8], row: usize, out: &mut [f32]) {
    let bytes = block_bytes(form);
    let scale_bytes = if form.half_scales { 2 } else { 4 };
    let scales_at = if form.codes == Codes::U4 { form.group * 4 } else { form.group * LANES };
    for (block, out) in panel.chunks_exact(bytes).zip(out.chunks_exact_mut(form.group)) {
        let get = |vector: usize| {
            let at = scales_at + (vector * LANES + row) * scale_bytes;
            if form.half_scales {
                f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
            } else {
                f32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
            }
        };
        let scale = get(0);
        let min = if form.codes == Codes::I8 { 0.0 } else { get(1) };
        for (k, o) in out.iter_mut().enumerate() {
            let (at, high) = place(form.codes, form.group, row, k);
            let code = match form.codes {
                Codes::U4 if high => f32::from(block[at] >> 4),
                Codes::U4 => f32::from(block[at] & 15),
                Codes::I8 => f32::from(block[at] as i8),
                _ => f32::from(block[at]),
            };
            *o = scale * code + min;
        }
    }
}

/// Activations quantised to 8 bits: `x = scale * code` over blocks of 32 columns.
pub(crate) struct QuantRows {
    pub(crate) cols: usize,
    codes: Vec<i8>,
    scales: Vec<f32>,
    /// `scale * sum of codes` per 16 and per 32 columns: what minima of weights multiply.
    sums16: Vec<f32>,
    sums32: Vec<f32>,
}

impl QuantRows {
    /// Room for `rows` of `cols` (a multiple of 32).
    pub(crate) fn new(rows: usize, cols: usize) -> Self {
        let blocks = rows * cols / ACT_BLOCK;
        Self {
            cols,
            codes: vec![0; rows * cols],
            scales: vec![0.0; blocks],
            sums16: vec![0.0; blocks * 2],
            sums32: vec![0.0; blocks],
        }
    }

    /// The activations from row `t` on.
    #[inline(always)]
    fn rows_from(&self, t: usize) -> IntActivations {
        let blocks = self.cols / ACT_BLOCK;
        IntActivations {
            cols: self.cols,
            codes: self.codes[t * self.cols..].as_ptr(),
            scales: self.scales[t * blocks..].as_ptr(),
            sums16: self.sums16[t * blocks * 2..].as_ptr(),
            sums32: self.sums32[t * blocks..].as_ptr(),
        }
    }
}

/// Pointers to quantised rows, for the kernels.
pub(crate) struct IntActivations {
    cols: usize,
    codes: *const i8,
    scales: *const f32,
    sums16: *const f32,
    sums32: *const f32,
}

impl IntActivations {
    /// # Safety
    /// Row `t` and column `k` must exist (so for the functions below).
    #[inline(always)]
    pub(crate) unsafe fn codes(&self, t: usize, k: usize) -> *const i8 {
        // SAFETY: the caller's.
        unsafe { self.codes.add(t * self.cols + k) }
    }
    /// # Safety
    /// As above.
    #[inline(always)]
    pub(crate) unsafe fn scale(&self, t: usize, block: usize) -> f32 {
        // SAFETY: the caller's.
        unsafe { *self.scales.add(t * (self.cols / ACT_BLOCK) + block) }
    }
    /// # Safety
    /// As above.
    #[inline(always)]
    pub(crate) unsafe fn offset<W: IntForm>(&self, t: usize, group: usize) -> f32 {
        let sums = if W::GROUP == 16 { self.sums16 } else { self.sums32 };
        // SAFETY: the caller's.
        unsafe { *sums.add(t * (self.cols / W::GROUP) + group) }
    }
}

/// Quantises a run of whole blocks.
pub(crate) struct Quantise<'a> {
    pub(crate) x: &'a [f32],
    codes: &'a mut [i8],
    scales: &'a mut [f32],
    sums16: &'a mut [f32],
    sums32: &'a mut [f32],
}

impl<'a> Quantise<'a> {
    /// Jobs for `x`, row-major with `out.cols` columns, each of at most `rows` rows.
    pub(crate) fn jobs(x: &'a [f32], out: &'a mut QuantRows, rows: usize) -> Vec<Self> {
        let n = (rows * out.cols).max(ACT_BLOCK);
        let blocks = n / ACT_BLOCK;
        x.chunks(n)
            .zip(out.codes.chunks_mut(n))
            .zip(out.scales.chunks_mut(blocks))
            .zip(out.sums16.chunks_mut(2 * blocks).zip(out.sums32.chunks_mut(blocks)))
            .map(|(((x, codes), scales), (sums16, sums32))| Self {
                x,
                codes,
                scales,
                sums16,
                sums32,
            })
            .collect()
    }
}

impl Job for Quantise<'_> {
    #[inline(always)]
    unsafe fn run<S: Isa>(&mut self) {
        for (b, x) in self.x.chunks_exact(ACT_BLOCK).enumerate() {
            let codes = &mut self.codes[b * ACT_BLOCK..][..ACT_BLOCK];
            // SAFETY: `x` and `codes` have 32 elements.
            unsafe {
                let mut most = S::F::splat(0.0);
                for i in 0..4 {
                    most = most.max(S::F::load(x.as_ptr().add(8 * i)).abs());
                }
                let scale = most.greatest() / 127.0;
                let inverse = S::F::splat(if scale > 0.0 { 1.0 / scale } else { 0.0 });
                for i in 0..4 {
                    let v = S::F::load(x.as_ptr().add(8 * i)).mul(inverse);
                    v.store_i8(codes.as_mut_ptr().add(8 * i));
                }
                let sum = |half: &[i8]| half.iter().map(|&c| i32::from(c)).sum::<i32>();
                let (low, high) = (sum(&codes[..16]), sum(&codes[16..]));
                self.scales[b] = scale;
                self.sums16[2 * b] = scale * low as f32;
                self.sums16[2 * b + 1] = scale * high as f32;
                self.sums32[b] = scale * (low + high) as f32;
            }
        }
    }
}

/// Where a linear layer writes: row-major `[tokens, rows]`, each call its own columns.
#[derive(Clone, Copy)]
pub(crate) enum Out {
    /// Final values.
    Float(*mut f32),
    /// Partial sums over cells of so many columns, each rounded to the grid: see
    /// [`grid`](super::simd::grid).
    Grid(*mut f64, usize),
}

/// A linear layer over some panels.
pub(crate) struct IntLinear<'a> {
    pub(crate) form: GroupForm,
    /// All panels, one after the other.
    pub(crate) weights: &'a [u8],
    /// Rows of the whole weight.
    pub(crate) rows: usize,
    pub(crate) x: &'a QuantRows,
    pub(crate) tokens: usize,
    /// The panels to do.
    pub(crate) panels: std::ops::Range<usize>,
    pub(crate) out: Out,
}

/// Tokens done before moving to the next panel: their codes stay in the second-level cache.
const TOKEN_BLOCK: usize = 64;

impl Job for IntLinear<'_> {
    #[inline(always)]
    unsafe fn run<S: Isa>(&mut self) {
        // SAFETY: the caller's.
        unsafe { with_form::<S>(self) };
    }
}

/// # Safety
/// `job.out` must be valid for `tokens * rows` elements, and no other thread may write the columns
/// of these panels. The weights must be packed in the form `W`.
#[inline(always)]
unsafe fn linear<S: Isa, W: IntForm>(job: &IntLinear<'_>) {
    let mut block = 0;
    while block < job.tokens {
        let end = (block + TOKEN_BLOCK).min(job.tokens);
        for panel in job.panels.clone() {
            let mut t = block;
            // SAFETY: the caller's; tiles stay within `tokens`.
            unsafe {
                while t + 4 <= end {
                    tile::<S, W, 4>(job, panel, t);
                    t += 4;
                }
                while t < end {
                    tile::<S, W, 1>(job, panel, t);
                    t += 1;
                }
            }
        }
        block = end;
    }
}

/// Dot products of `MT` activation rows with the eight rows of a panel, over the groups
/// `from..to`, accumulated in group order.
///
/// # Safety
/// `panel` must hold at least `to` blocks of the form `W`, and `acts` at least `MT` rows of `to`
/// groups.
#[inline(always)]
unsafe fn span<S: Isa, W: IntForm, const MT: usize>(
    panel: *const u8,
    from: usize,
    to: usize,
    acts: &IntActivations,
) -> [S::F; MT] {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [S::F::splat(0.0); MT];
        for g in from..to {
            let block = panel.add(g * W::BLOCK_BYTES);
            let codes = S::codes::<W>(block);
            let (scales, mins) = W::scales::<S::F>(block);
            for (t, sum) in sums.iter_mut().enumerate() {
                let dots = S::dots::<W>(codes, acts.codes(t, g * W::GROUP));
                let scale = S::F::splat(acts.scale(t, g * W::GROUP / ACT_BLOCK));
                *sum = dots.fma(scales.mul(scale), *sum);
                if W::HAS_MIN {
                    *sum = mins.fma(S::F::splat(acts.offset::<W>(t, g)), *sum);
                }
            }
        }
        sums
    }
}

/// # Safety
/// That of [`linear`]; tokens `t..t + MT` exist.
#[inline(always)]
unsafe fn tile<S: Isa, W: IntForm, const MT: usize>(job: &IntLinear<'_>, panel: usize, t: usize) {
    let groups = job.x.cols / W::GROUP;
    let weights = job.weights[panel * groups * W::BLOCK_BYTES..].as_ptr();
    let acts = job.x.rows_from(t);
    let at = t * job.rows + panel * LANES;
    let width = LANES.min(job.rows - panel * LANES);
    // SAFETY: the panel has `groups` blocks, the activations `MT` rows; output by the caller.
    unsafe {
        match job.out {
            Out::Float(out) => {
                let sums = span::<S, W, MT>(weights, 0, groups, &acts);
                for (i, sum) in sums.into_iter().enumerate() {
                    store_float(sum, out.add(at + i * job.rows), width);
                }
            }
            Out::Grid(out, cell) => {
                let step = cell / W::GROUP;
                let mut totals = [[0.0f64; LANES]; MT];
                let mut g = 0;
                while g < groups {
                    let end = (g + step).min(groups);
                    let sums = span::<S, W, MT>(weights, g, end, &acts);
                    for (total, sum) in totals.iter_mut().zip(sums) {
                        sum.add_to_grid(total);
                    }
                    g = end;
                }
                for (i, total) in totals.iter().enumerate() {
                    store_grid(total, out.add(at + i * job.rows), width);
                }
            }
        }
    }
}

/// # Safety
/// `out` must be valid for `width <= 8` elements.
#[inline(always)]
pub(crate) unsafe fn store_float<F: F32x8>(v: F, out: *mut f32, width: usize) {
    // SAFETY: the caller's.
    unsafe {
        if width == LANES {
            v.store(out);
        } else {
            std::ptr::copy_nonoverlapping(v.lanes().as_ptr(), out, width);
        }
    }
}

/// # Safety
/// As [`store_float`].
#[inline(always)]
pub(crate) unsafe fn store_grid(v: &[f64; LANES], out: *mut f64, width: usize) {
    // SAFETY: the caller's.
    unsafe { std::ptr::copy_nonoverlapping(v.as_ptr(), out, width) };
}
