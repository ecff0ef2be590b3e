//! Kernels that treat each row by itself: norms, activations, rotary embedding.

use super::simd::{F32x8, Isa, Job, LANES};

/// `out = x / rms(x) * weight` on rows of `weight.len()`, with rms = sqrt(mean(x²) + eps).
/// Source: Zhang and Sennrich, 2019.
pub(crate) struct RmsNorm<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
    pub(crate) out: &'a mut [f32],
}

impl Job for RmsNorm<'_> {
    #[inline(always)]
    unsafe fn run<S: Isa>(&mut self) {
        let n = self.weight.len();
        for (x, out) in self.x.chunks_exact(n).zip(self.out.chunks_exact_mut(n)) {
            let vectors = n / LANES * LANES;
            // SAFETY: offsets are under `vectors`, within all three slices.
            unsafe {
                let mut squares = S::F::splat(0.0);
                for i in (0..vectors).step_by(LANES) {
                    let v = S::F::load(x.as_ptr().add(i));
                    squares = v.fma(v, squares);
                }
                let mut sum = squares.sum();
                sum += x[vectors..].iter().map(|v| v * v).sum::<f32>();
                let scale = 1.0 / (sum / n as f32 + self.eps).sqrt();
                let scales = S::F::splat(scale);
                for i in (0..vectors).step_by(LANES) {
                    let v = S::F::load(x.as_ptr().add(i)).mul(scales);
                    v.mul(S::F::load(self.weight.as_ptr().add(i))).store(out.as_mut_ptr().add(i));
                }
                for i in vectors..n {
                    out[i] = x[i] * scale * self.weight[i];
                }
            }
        }
    }
}

/// `x / (1 + e^-x)`. A function, since a closure would not be compiled for the instruction set.
///
/// # Safety
/// That of [`F32x8`].
#[inline(always)]
unsafe fn silu<F: F32x8>(x: F) -> F {
    // SAFETY: the caller's.
    unsafe { x.div(F::splat(0.0).sub(x).exp().add(F::splat(1.0))) }
}

/// `gate = gate / (1 + e^-gate) * up`, element by element.
pub(crate) struct SiluMul<'a> {
    pub(crate) gate: &'a mut [f32],
    pub(crate) up: &'a [f32],
}

impl Job for SiluMul<'_> {
    #[inline(always)]
    unsafe fn run<S: Isa>(&mut self) {
        let vectors = self.gate.len() / LANES * LANES;
        // SAFETY: offsets are within both slices, which are of one length; the tail goes through
        // an array of eight so that every element sees the same arithmetic.
        unsafe {
            for i in (0..vectors).step_by(LANES) {
                let g = S::F::load(self.gate.as_ptr().add(i));
                let u = S::F::load(self.up.as_ptr().add(i));
                silu(g).mul(u).store(self.gate.as_mut_ptr().add(i));
            }
            let mut tail = [0.0; LANES];
            let rest = &mut self.gate[vectors..];
            tail[..rest.len()].copy_from_slice(rest);
            let tail = silu(S::F::load(tail.as_ptr())).lanes();
            for ((g, s), u) in rest.iter_mut().zip(tail).zip(&self.up[vectors..]) {
                *g = s * u;
            }
        }
    }
}

/// Rotates the heads of one token in place: element `i` and `i + half` by `angle[i]`
/// (the half-split convention of Hugging Face). Source: Su et al., 2021.
pub(crate) fn rotate(heads: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    for head in heads.chunks_exact_mut(head_dim) {
        let (a, rest) = head.split_at_mut(half);
        for (((a, b), c), s) in a.iter_mut().zip(rest).zip(cos).zip(sin) {
            (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
        }
    }
}
