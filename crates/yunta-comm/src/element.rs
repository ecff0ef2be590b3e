//! Element types and their reductions.

use bytemuck::Pod;
use half::{bf16, f16};

/// How values are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// Sum; integers wrap around.
    Sum,
    /// Greatest.
    Max,
    /// Least.
    Min,
}

mod sealed {
    pub trait Sealed {}
}

/// A type that collectives move and reduce.
pub trait Element: Pod + Send + Sync + PartialEq + sealed::Sealed + 'static {
    /// What sums are formed in.
    #[doc(hidden)]
    type Wide: Copy;
    #[doc(hidden)]
    fn widen(self) -> Self::Wide;
    #[doc(hidden)]
    fn narrow(wide: Self::Wide) -> Self;
    #[doc(hidden)]
    fn combine(op: ReduceOp, a: Self::Wide, b: Self::Wide) -> Self::Wide;
}

macro_rules! elements {
    ($($t:ty, $wide:ty, $widen:expr, $narrow:expr, $add:expr;)*) => {$(
        impl sealed::Sealed for $t {}
        impl Element for $t {
            type Wide = $wide;
            #[inline]
            fn widen(self) -> $wide {
                $widen(self)
            }
            #[inline]
            fn narrow(wide: $wide) -> Self {
                $narrow(wide)
            }
            #[inline]
            fn combine(op: ReduceOp, a: $wide, b: $wide) -> $wide {
                match op {
                    ReduceOp::Sum => $add(a, b),
                    ReduceOp::Max => if b > a { b } else { a },
                    ReduceOp::Min => if b < a { b } else { a },
                }
            }
        }
    )*};
}

elements! {
    f32, f32, |x| x, |x| x, |a, b| a + b;
    f64, f64, |x| x, |x| x, |a, b| a + b;
    // Sums of 16-bit floats are formed in 32 bits and rounded once.
    f16, f32, f16::to_f32, f16::from_f32, |a, b| a + b;
    bf16, f32, bf16::to_f32, bf16::from_f32, |a, b| a + b;
    i8, i8, |x| x, |x| x, i8::wrapping_add;
    i16, i16, |x| x, |x| x, i16::wrapping_add;
    i32, i32, |x| x, |x| x, i32::wrapping_add;
    i64, i64, |x| x, |x| x, i64::wrapping_add;
    u8, u8, |x| x, |x| x, u8::wrapping_add;
    u16, u16, |x| x, |x| x, u16::wrapping_add;
    u32, u32, |x| x, |x| x, u32::wrapping_add;
    u64, u64, |x| x, |x| x, u64::wrapping_add;
}

/// Folds `parts`, which are of `out`'s length, in their order.
pub(crate) fn reduce<T: Element>(parts: &[&[T]], out: &mut [T], op: ReduceOp) {
    match parts {
        // Few ranks are the rule: one pass over memory.
        [a] => out.copy_from_slice(a),
        [a, b] => {
            for ((o, a), b) in out.iter_mut().zip(*a).zip(*b) {
                *o = T::narrow(T::combine(op, a.widen(), b.widen()));
            }
        }
        [a, b, c] => {
            for (((o, a), b), c) in out.iter_mut().zip(*a).zip(*b).zip(*c) {
                let ab = T::combine(op, a.widen(), b.widen());
                *o = T::narrow(T::combine(op, ab, c.widen()));
            }
        }
        _ => {
            for (i, o) in out.iter_mut().enumerate() {
                let mut values = parts.iter().filter_map(|p| p.get(i)).map(|x| x.widen());
                if let Some(first) = values.next() {
                    *o = T::narrow(values.fold(first, |a, b| T::combine(op, a, b)));
                }
            }
        }
    }
}
