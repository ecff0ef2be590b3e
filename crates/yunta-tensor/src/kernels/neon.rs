//! AArch64 with Advanced SIMD.

use std::arch::aarch64::*;

use half::{bf16, f16};

use super::int::IntForm;
use super::simd::{F32x8, GRID_MAGIC, Isa, LANES};
use crate::groups::Codes;

/// Eight f32 in two vector registers.
#[derive(Clone, Copy)]
pub(crate) struct Pair(float32x4_t, float32x4_t);

macro_rules! both {
    ($f:ident, $a:expr $(, $b:expr)*) => {
        Pair($f($a.0 $(, $b.0)*), $f($a.1 $(, $b.1)*))
    };
}

// SAFETY of all functions: the trait's: Advanced SIMD is there, pointers are valid for eight
// elements.
#[allow(clippy::undocumented_unsafe_blocks)]
impl F32x8 for Pair {
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        unsafe { Self(vdupq_n_f32(x), vdupq_n_f32(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { Self(vld1q_f32(p), vld1q_f32(p.add(4))) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self {
        let wide = unsafe { p.cast::<[f16; LANES]>().read_unaligned() }.map(f16::to_f32);
        unsafe { Self::load(wide.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self {
        unsafe {
            let half = vld1q_u16(p.cast());
            let low = vshll_n_u16::<16>(vget_low_u16(half));
            let high = vshll_high_n_u16::<16>(half);
            Self(vreinterpretq_f32_u32(low), vreinterpretq_f32_u32(high))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        unsafe {
            let half = vmovl_s8(vld1_s8(p));
            let low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(half)));
            Self(low, vcvtq_f32_s32(vmovl_high_s16(half)))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16) {
        let halves = unsafe { self.lanes() }.map(f16::from_f32);
        unsafe { p.cast::<[f16; LANES]>().write_unaligned(halves) };
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe {
            vst1q_f32(p, self.0);
            vst1q_f32(p.add(4), self.1);
        }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8) {
        unsafe {
            let half = vcombine_s16(
                vqmovn_s32(vcvtnq_s32_f32(self.0)),
                vqmovn_s32(vcvtnq_s32_f32(self.1)),
            );
            vst1_s8(p, vqmovn_s16(half));
        }
    }
    #[inline(always)]
    unsafe fn add(self, o: Self) -> Self {
        unsafe { both!(vaddq_f32, self, o) }
    }
    #[inline(always)]
    unsafe fn sub(self, o: Self) -> Self {
        unsafe { both!(vsubq_f32, self, o) }
    }
    #[inline(always)]
    unsafe fn mul(self, o: Self) -> Self {
        unsafe { both!(vmulq_f32, self, o) }
    }
    #[inline(always)]
    unsafe fn div(self, o: Self) -> Self {
        unsafe { both!(vdivq_f32, self, o) }
    }
    #[inline(always)]
    unsafe fn max(self, o: Self) -> Self {
        unsafe { both!(vmaxq_f32, self, o) }
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        unsafe { both!(vabsq_f32, self) }
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        unsafe { both!(vfmaq_f32, c, self, b) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        unsafe { both!(vrndnq_f32, self) }
    }
    #[inline(always)]
    unsafe fn exp2_integral(self) -> Self {
        unsafe {
            let exponent = |n: float32x4_t| {
                let biased = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
                vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
            };
            Self(exponent(self.0), exponent(self.1))
        }
    }
    #[inline(always)]
    unsafe fn add_to_grid(self, sums: &mut [f64; LANES]) {
        unsafe {
            let magic = vdupq_n_f64(GRID_MAGIC);
            let quarters = [
                vcvt_f64_f32(vget_low_f32(self.0)),
                vcvt_high_f64_f32(self.0),
                vcvt_f64_f32(vget_low_f32(self.1)),
                vcvt_high_f64_f32(self.1),
            ];
            for (i, x) in quarters.into_iter().enumerate() {
                let at = sums.as_mut_ptr().add(2 * i);
                let x = vsubq_f64(vaddq_f64(x, magic), magic);
                vst1q_f64(at, vaddq_f64(vld1q_f64(at), x));
            }
        }
    }
}

/// Advanced SIMD, without the dot-product extension.
pub(crate) struct Neon;

impl Isa for Neon {
    type F = Pair;
    type Codes = *const u8;

    #[inline(always)]
    unsafe fn codes<W: IntForm>(block: *const u8) -> *const u8 {
        block
    }

    #[inline(always)]
    unsafe fn dots<W: IntForm>(block: *const u8, acts: *const i8) -> Pair {
        // SAFETY: the caller's.
        unsafe { dot::<W>(block, acts) }
    }
}

/// Integer dot products of a block with one activation row: a lane per row of the panel.
#[inline(always)]
unsafe fn dot<W: IntForm>(block: *const u8, acts: *const i8) -> Pair {
    // SAFETY: the caller's: a whole block and a group of activations.
    unsafe {
        // Two rows each.
        let mut totals = [vdupq_n_s32(0); 4];
        let mut add = |codes: [uint8x16_t; 2], k: usize| {
            let a = vdupq_n_s32(acts.add(k).cast::<i32>().read_unaligned());
            let a = vreinterpretq_s8_s32(a);
            for (half, codes) in codes.into_iter().enumerate() {
                let codes = vreinterpretq_s8_u8(codes);
                let low = vmull_s8(vget_low_s8(codes), vget_low_s8(a));
                let high = vmull_high_s8(codes, a);
                totals[2 * half] = vpadalq_s16(totals[2 * half], low);
                totals[2 * half + 1] = vpadalq_s16(totals[2 * half + 1], high);
            }
        };
        let load = |j: usize| [vld1q_u8(block.add(32 * j)), vld1q_u8(block.add(32 * j + 16))];
        if W::CODES == Codes::U4 {
            let nibble = vdupq_n_u8(15);
            for j in 0..W::GROUP / 8 {
                let [a, b] = load(j);
                add([vandq_u8(a, nibble), vandq_u8(b, nibble)], 4 * j);
                add([vshrq_n_u8::<4>(a), vshrq_n_u8::<4>(b)], W::GROUP / 2 + 4 * j);
            }
        } else {
            for j in 0..W::GROUP / 4 {
                add(load(j), 4 * j);
            }
        }
        let [a, b, c, d] = totals;
        Pair(vcvtq_f32_s32(vpaddq_s32(a, b)), vcvtq_f32_s32(vpaddq_s32(c, d)))
    }
}
