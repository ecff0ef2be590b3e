//! Eight floats at a time: the one interface the floating-point kernels are written against.
//!
//! A kernel is a [`Job`] generic over an [`Isa`]; [`dispatch`](super::dispatch) compiles it once
//! per instruction set and chooses at run time. Operations act lane by lane in a fixed order, so
//! a kernel's result does not depend on how its work was tiled.

use half::{bf16, f16};

use super::int::IntForm;

/// Lanes of a vector; rows of a packed panel.
pub(crate) const LANES: usize = 8;

/// 1.5 * 2^16: adding and subtracting it in f64 rounds to the grid of 2^-36, see [`grid`].
pub(crate) const GRID_MAGIC: f64 = 98_304.0;

/// Rounds to the nearest multiple of 2^-36.
///
/// Sums of such numbers are exact in f64 while they stay under 2^16 in magnitude, and thereby
/// independent of order: this is what makes a sharded reduction bit-equal to an unsharded one.
/// Greater numbers keep f64's precision and lose only that independence.
#[inline(always)]
pub(crate) fn grid(x: f32) -> f64 {
    (f64::from(x) + GRID_MAGIC) - GRID_MAGIC
}

/// Eight f32 lanes.
///
/// # Safety
/// All functions need the instruction set of the implementor; loads and stores need their
/// pointers to be valid for eight elements (any alignment).
#[allow(clippy::missing_safety_doc)]
pub(crate) trait F32x8: Copy {
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(p: *const f32) -> Self;
    unsafe fn load_f16(p: *const f16) -> Self;
    unsafe fn load_bf16(p: *const bf16) -> Self;
    unsafe fn load_i8(p: *const i8) -> Self;
    unsafe fn store(self, p: *mut f32);
    /// Rounds to nearest even.
    unsafe fn store_f16(self, p: *mut f16);
    /// Rounds to nearest even and stores the low bytes; lanes must lie in -128..=127.
    unsafe fn store_i8(self, p: *mut i8);
    unsafe fn add(self, o: Self) -> Self;
    unsafe fn sub(self, o: Self) -> Self;
    unsafe fn mul(self, o: Self) -> Self;
    unsafe fn div(self, o: Self) -> Self;
    unsafe fn max(self, o: Self) -> Self;
    unsafe fn abs(self) -> Self;
    /// `self * b + c`.
    unsafe fn fma(self, b: Self, c: Self) -> Self;
    /// Nearest integer.
    unsafe fn round(self) -> Self;
    /// 2 to the power of integral lanes in -126..=127.
    unsafe fn exp2_integral(self) -> Self;
    /// Adds each lane, rounded by [`grid`], to `sums`.
    unsafe fn add_to_grid(self, sums: &mut [f64; LANES]);

    /// The lanes as an array.
    #[inline(always)]
    unsafe fn lanes(self) -> [f32; LANES] {
        let mut a = [0.0; LANES];
        // SAFETY: `a` has eight elements.
        unsafe { self.store(a.as_mut_ptr()) };
        a
    }

    /// Sum of the lanes, in a fixed order.
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the caller's.
        let a = unsafe { self.lanes() };
        ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
    }

    /// Greatest lane.
    #[inline(always)]
    unsafe fn greatest(self) -> f32 {
        // SAFETY: the caller's.
        let a = unsafe { self.lanes() };
        a.iter().copied().fold(f32::NEG_INFINITY, f32::max)
    }

    /// e to the power of the lanes, to about 2 units in the last place; below -87 it is 0-ish
    /// (2^-126), above 88 it is clamped.
    #[inline(always)]
    unsafe fn exp(self) -> Self {
        // SAFETY: the caller's; no pointers are involved.
        unsafe {
            let x = self.max(Self::splat(-87.0));
            let x = Self::splat(0.0).sub(Self::splat(0.0).sub(x).max(Self::splat(-88.0)));
            let n = x.mul(Self::splat(std::f32::consts::LOG2_E)).round();
            // ln 2 in two parts (Cody and Waite).
            let r = n.fma(Self::splat(-0.693_359_4), x);
            let r = n.fma(Self::splat(2.121_944_4e-4), r);
            // Minimax polynomial of Cephes' expf.
            let mut p = Self::splat(1.987_569_1e-4);
            for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
                p = p.fma(r, Self::splat(c));
            }
            let p = p.fma(r.mul(r), r.add(Self::splat(1.0)));
            p.mul(n.exp2_integral())
        }
    }
}

/// An instruction set: its vector type and its integer dot products.
#[allow(clippy::missing_safety_doc)]
pub(crate) trait Isa {
    type F: F32x8;
    /// The codes of a packed block, ready for dot products with several activation rows.
    type Codes: Copy;

    /// # Safety
    /// `block` must point to a whole block of the form `W`.
    unsafe fn codes<W: IntForm>(block: *const u8) -> Self::Codes;

    /// Integer dot products of the block's eight rows with one group of activations.
    ///
    /// # Safety
    /// `acts` must be valid for `W::GROUP` codes.
    unsafe fn dots<W: IntForm>(codes: Self::Codes, acts: *const i8) -> Self::F;
}

/// A kernel with its arguments.
pub(crate) trait Job {
    /// Runs it.
    ///
    /// # Safety
    /// The processor must have the instruction set `S`; further conditions are the job's.
    unsafe fn run<S: Isa>(&mut self);
}

/// Portable lanes: correct everywhere, and what the compiler vectorises as it can.
#[derive(Clone, Copy)]
pub(crate) struct Portable8([f32; LANES]);

macro_rules! lanewise {
    ($($name:ident($($o:ident),*) = |$a:ident $(, $b:ident)*| $e:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name(self $(, $o: Self)*) -> Self {
            Self(std::array::from_fn(|i| {
                let $a = self.0[i];
                $(let $b = $o.0[i];)*
                $e
            }))
        }
    )*};
}

impl F32x8 for Portable8 {
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; LANES])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the caller's.
        Self(unsafe { p.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self {
        // SAFETY: the caller's.
        Self(unsafe { p.cast::<[f16; LANES]>().read_unaligned() }.map(f16::to_f32))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self {
        // SAFETY: the caller's.
        Self(unsafe { p.cast::<[bf16; LANES]>().read_unaligned() }.map(bf16::to_f32))
    }
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        // SAFETY: the caller's.
        Self(unsafe { p.cast::<[i8; LANES]>().read_unaligned() }.map(f32::from))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the caller's.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(self.0) };
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut f16) {
        // SAFETY: the caller's.
        unsafe { p.cast::<[f16; LANES]>().write_unaligned(self.0.map(f16::from_f32)) };
    }
    #[inline(always)]
    unsafe fn store_i8(self, p: *mut i8) {
        let bytes = self.0.map(|x| x.round_ties_even() as i8);
        // SAFETY: the caller's.
        unsafe { p.cast::<[i8; LANES]>().write_unaligned(bytes) };
    }
    lanewise! {
        add(o) = |a, b| a + b;
        sub(o) = |a, b| a - b;
        mul(o) = |a, b| a * b;
        div(o) = |a, b| a / b;
        max(o) = |a, b| if a > b { a } else { b };
        abs() = |a| a.abs();
        fma(m, c) = |a, b, d| a * b + d;
        round() = |a| a.round_ties_even();
        exp2_integral() = |a| f32::from_bits((((a as i32) + 127) as u32) << 23);
    }
    #[inline(always)]
    unsafe fn add_to_grid(self, sums: &mut [f64; LANES]) {
        for (sum, x) in sums.iter_mut().zip(self.0) {
            *sum += grid(x);
        }
    }
}

/// No particular instruction set.
pub(crate) struct Portable;

impl Isa for Portable {
    type F = Portable8;
    type Codes = *const u8;

    #[inline(always)]
    unsafe fn codes<W: IntForm>(block: *const u8) -> *const u8 {
        block
    }

    #[inline(always)]
    unsafe fn dots<W: IntForm>(block: *const u8, acts: *const i8) -> Portable8 {
        Portable8(std::array::from_fn(|row| {
            // SAFETY: the caller's: a whole block and a group of activations.
            let product = |k| unsafe { W::code(block, row, k) * i32::from(*acts.add(k)) };
            (0..W::GROUP).map(product).sum::<i32>() as f32
        }))
    }
}
