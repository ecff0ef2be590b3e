//! x86-64 with AVX2, FMA and F16C.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::int::IntForm;
use super::simd::{F32x8, Isa, LANES};
use crate::groups::Codes;

/// Eight f32 in a ymm register.
#[derive(Clone, Copy)]
pub(crate) struct Ymm(__m256);

const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

// SAFETY of all functions: the trait's: AVX2, FMA and F16C are there, pointers are valid for eight
// elements.
#[allow(clippy::undocumented_unsafe_blocks)]
impl F32x8 for Ymm {
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        unsafe { Self(_mm256_set1_ps(x)) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        unsafe { Self(_mm256_loadu_ps(p)) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self {
        unsafe { Self(_mm256_cvtph_ps(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self {
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            Self(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide)))
        }
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        unsafe { Self(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        unsafe { _mm256_storeu_ps(p, self.0) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16) {
        unsafe { _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0)) }
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8) {
        unsafe {
            let wide = _mm256_cvtps_epi32(self.0);
            let half =
                _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256::<1>(wide));
            _mm_storel_epi64(p.cast(), _mm_packs_epi16(half, half));
        }
    }
    #[inline(always)]
    unsafe fn add(self, o: Self) -> Self {
        unsafe { Self(_mm256_add_ps(self.0, o.0)) }
    }
    #[inline(always)]
    unsafe fn sub(self, o: Self) -> Self {
        unsafe { Self(_mm256_sub_ps(self.0, o.0)) }
    }
    #[inline(always)]
    unsafe fn mul(self, o: Self) -> Self {
        unsafe { Self(_mm256_mul_ps(self.0, o.0)) }
    }
    #[inline(always)]
    unsafe fn div(self, o: Self) -> Self {
        unsafe { Self(_mm256_div_ps(self.0, o.0)) }
    }
    #[inline(always)]
    unsafe fn max(self, o: Self) -> Self {
        unsafe { Self(_mm256_max_ps(self.0, o.0)) }
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        unsafe { Self(_mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0)) }
    }
    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        unsafe { Self(_mm256_fmadd_ps(self.0, b.0, c.0)) }
    }
    #[inline(always)]
    unsafe fn round(self) -> Self {
        unsafe { Self(_mm256_round_ps::<NEAREST>(self.0)) }
    }
    #[inline(always)]
    unsafe fn exp2_integral(self) -> Self {
        unsafe {
            let n = _mm256_add_epi32(_mm256_cvtps_epi32(self.0), _mm256_set1_epi32(127));
            Self(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(n)))
        }
    }
    #[inline(always)]
    unsafe fn add_to_grid(self, sums: &mut [f64; LANES]) {
        unsafe {
            let magic = _mm256_set1_pd(super::simd::GRID_MAGIC);
            let halves = [_mm256_castps256_ps128(self.0), _mm256_extractf128_ps::<1>(self.0)];
            for (i, half) in halves.into_iter().enumerate() {
                let at = sums.as_mut_ptr().add(4 * i);
                let x = _mm256_sub_pd(_mm256_add_pd(_mm256_cvtps_pd(half), magic), magic);
                _mm256_storeu_pd(at, _mm256_add_pd(_mm256_loadu_pd(at), x));
            }
        }
    }
}

/// AVX2, FMA and F16C.
pub(crate) struct Avx2;

impl Isa for Avx2 {
    type F = Ymm;
    type Codes = [__m256i; 8];

    #[inline(always)]
    unsafe fn codes<W: IntForm>(block: *const u8) -> [__m256i; 8] {
        // SAFETY: the caller's.
        unsafe { load_codes::<W>(block) }
    }

    #[inline(always)]
    unsafe fn dots<W: IntForm>(codes: [__m256i; 8], acts: *const i8) -> Ymm {
        // SAFETY: the caller's.
        unsafe { Ymm(_mm256_cvtepi32_ps(dot::<W>(&codes, acts))) }
    }
}

/// The codes of a block, columns `4v..4v + 4` of the eight rows in vector `v`.
#[inline(always)]
unsafe fn load_codes<W: IntForm>(block: *const u8) -> [__m256i; 8] {
    // SAFETY: the caller's: a whole block.
    unsafe {
        let load = |j: usize| _mm256_loadu_si256(block.add(32 * j).cast());
        let mut codes = [_mm256_setzero_si256(); 8];
        if W::CODES == Codes::U4 {
            let low = _mm256_set1_epi8(15);
            let half = W::GROUP / 8;
            for j in 0..half {
                let packed = load(j);
                codes[j] = _mm256_and_si256(packed, low);
                codes[half + j] = _mm256_and_si256(_mm256_srli_epi16::<4>(packed), low);
            }
        } else {
            for (j, code) in codes.iter_mut().enumerate().take(W::GROUP / 4) {
                *code = load(j);
            }
        }
        codes
    }
}

/// Integer dot products of a block with one activation row: a lane per row of the panel.
#[inline(always)]
unsafe fn dot<W: IntForm>(codes: &[__m256i; 8], acts: *const i8) -> __m256i {
    // How many products of pairs fit an i16: 2 * greatest code * 127 each.
    let chain = match W::CODES {
        Codes::U4 => 8,
        Codes::U5 => 4,
        Codes::U6 => 2,
        Codes::I8 => 1,
    };
    // SAFETY: the caller's: a group of activations.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let mut total = _mm256_setzero_si256();
        let mut pairs = _mm256_setzero_si256();
        for (v, &code) in codes.iter().enumerate().take(W::GROUP / 4) {
            let a = _mm256_set1_epi32(acts.add(4 * v).cast::<i32>().read_unaligned());
            let products = if W::CODES == Codes::I8 {
                // `maddubs` wants an unsigned side: move the sign of the weight to the activation.
                _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(a, code))
            } else {
                _mm256_maddubs_epi16(code, a)
            };
            pairs = if v % chain == 0 { products } else { _mm256_add_epi16(pairs, products) };
            if v % chain == chain - 1 || v + 1 == W::GROUP / 4 {
                let wide = _mm256_madd_epi16(pairs, ones);
                total = if v < chain { wide } else { _mm256_add_epi32(total, wide) };
            }
        }
        total
    }
}
