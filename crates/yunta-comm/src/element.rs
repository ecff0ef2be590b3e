//! Element types and their reductions.

use std::borrow::Cow;

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
    type Wide: Pod;
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

/// Folds what other ranks contribute, in bytes, into this rank's own: those of lower ranks come
/// `before` it in the order of the fold, those of higher ranks `after`. All of one length.
pub(crate) type Fold = fn(ReduceOp, &[&[u8]], &mut [u8], &[&[u8]]);

/// Values that are folded at a time where there are more than two: their sums stay in the cache.
const BLOCK: usize = 512;

/// [`Fold`] of elements of one type.
pub(crate) fn fold<T: Element>(op: ReduceOp, before: &[&[u8]], own: &mut [u8], after: &[&[u8]]) {
    let Ok(own) = bytemuck::try_cast_slice_mut::<u8, T>(own) else { return };
    let before: Vec<Cow<'_, [T]>> = before.iter().map(|part| elements(part)).collect();
    let after: Vec<Cow<'_, [T]>> = after.iter().map(|part| elements(part)).collect();
    // Two ranks are the rule: one pass over memory.
    match (before.as_slice(), after.as_slice()) {
        ([a], []) => {
            for (own, a) in own.iter_mut().zip(a.iter()) {
                *own = T::narrow(T::combine(op, a.widen(), own.widen()));
            }
        }
        ([], [b]) => {
            for (own, b) in own.iter_mut().zip(b.iter()) {
                *own = T::narrow(T::combine(op, own.widen(), b.widen()));
            }
        }
        _ => {
            let mut sums = [T::zeroed().widen(); BLOCK];
            for (i, own) in own.chunks_mut(BLOCK).enumerate() {
                let sums = sums.get_mut(..own.len()).unwrap_or_default();
                let mut is_first = true;
                let mut add = |part: &[T]| {
                    if std::mem::take(&mut is_first) {
                        sums.iter_mut().zip(part).for_each(|(sum, x)| *sum = x.widen());
                    } else {
                        combine(op, sums, part);
                    }
                };
                let block = |part: &[T]| -> std::ops::Range<usize> {
                    (i * BLOCK).min(part.len())..((i + 1) * BLOCK).min(part.len())
                };
                before.iter().for_each(|p| add(p.get(block(p)).unwrap_or_default()));
                add(own);
                after.iter().for_each(|p| add(p.get(block(p)).unwrap_or_default()));
                own.iter_mut().zip(sums.iter()).for_each(|(own, sum)| *own = T::narrow(*sum));
            }
        }
    }
}

/// Adds the next rank's values to sums of those before it.
pub(crate) fn combine<T: Element>(op: ReduceOp, sums: &mut [T::Wide], next: &[T]) {
    for (sum, x) in sums.iter_mut().zip(next) {
        *sum = T::combine(op, *sum, x.widen());
    }
}

/// Bytes as elements; copied only where they are not aligned.
fn elements<T: Element>(bytes: &[u8]) -> Cow<'_, [T]> {
    bytemuck::try_cast_slice(bytes).map_or_else(
        |_| {
            let values = bytes.chunks_exact(size_of::<T>());
            Cow::Owned(values.map(bytemuck::pod_read_unaligned).collect())
        },
        Cow::Borrowed,
    )
}
