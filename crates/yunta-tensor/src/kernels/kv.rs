//! Blocks of a key-value cache: their layout, and the kernel that fills them.

use half::f16;

use super::simd::{F32x8, Isa, Job, LANES};

/// Positions per block.
pub(crate) const BLOCK: usize = 64;

/// Elements of a head that share a scale, where elements are scaled.
pub(crate) const SCALED_RUN: usize = 32;

/// An element of a key-value cache.
pub(crate) trait KvElement: Copy + Send + Sync + 'static {
    /// Elements are multiplied by a scale, one per position and [`SCALED_RUN`] elements of a head.
    const SCALED: bool;
    const ZERO: Self;
    /// The same numbers as `f32`, for a block that is read many times.
    type Wide: KvElement;

    /// Loads eight, without their scale.
    ///
    /// # Safety
    /// `p` must be valid for eight elements.
    unsafe fn load8<F: F32x8>(p: *const Self) -> F;

    /// Stores eight, which have been divided by their scale.
    ///
    /// # Safety
    /// `p` must be valid for eight elements.
    unsafe fn store8<F: F32x8>(x: F, p: *mut Self);
}

macro_rules! kv_element {
    ($t:ty, $wide:ty, $scaled:expr, $zero:expr, $load:ident, $store:ident) => {
        impl KvElement for $t {
            type Wide = $wide;
            const SCALED: bool = $scaled;
            const ZERO: Self = $zero;
            #[inline(always)]
            unsafe fn load8<F: F32x8>(p: *const Self) -> F {
                // SAFETY: the caller's.
                unsafe { F::$load(p) }
            }
            #[inline(always)]
            unsafe fn store8<F: F32x8>(x: F, p: *mut Self) {
                // SAFETY: the caller's.
                unsafe { x.$store(p) }
            }
        }
    };
}

kv_element!(f32, f32, false, 0.0, load, store);
kv_element!(f16, f32, false, f16::ZERO, load_f16, store_f16);
kv_element!(i8, WideI8, true, 0, load_i8, store_i8);

/// An `i8` as `f32`: still without its scale.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct WideI8(f32);

impl KvElement for WideI8 {
    type Wide = Self;
    const SCALED: bool = true;
    const ZERO: Self = Self(0.0);
    #[inline(always)]
    unsafe fn load8<F: F32x8>(p: *const Self) -> F {
        // SAFETY: the caller's; a `WideI8` is an `f32`.
        unsafe { F::load(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store8<F: F32x8>(x: F, p: *mut Self) {
        // SAFETY: the caller's; a `WideI8` is an `f32`.
        unsafe { x.store(p.cast()) }
    }
}

/// Widens elements, a multiple of 8 of them.
///
/// # Safety
/// `from` must be valid for `to.len()` elements.
#[inline(always)]
pub(crate) unsafe fn widen<S: Isa, T: KvElement>(from: *const T, to: &mut [T::Wide]) {
    for i in (0..to.len()).step_by(LANES) {
        // SAFETY: the caller's.
        unsafe { T::Wide::store8(T::load8::<S::F>(from.add(i)), to.as_mut_ptr().add(i)) };
    }
}

/// Shape of a block: key-value heads, elements per head, and those rounded up to a multiple of 8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockShape {
    pub(crate) heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) dim: usize,
}

impl BlockShape {
    pub(crate) fn new(heads: usize, head_dim: usize) -> Self {
        Self { heads, head_dim, dim: head_dim.next_multiple_of(LANES) }
    }

    /// Elements of a head's keys, and of its values.
    pub(crate) fn head_len(self) -> usize {
        BLOCK * self.dim
    }

    /// Scales of a head's keys, and of its values.
    pub(crate) fn head_scales<T: KvElement>(self) -> usize {
        if T::SCALED { BLOCK * self.dim.div_ceil(SCALED_RUN) } else { 0 }
    }

    /// Bytes of a block of `T`.
    pub(crate) fn bytes<T: KvElement>(self) -> usize {
        let head = self.head_len() * size_of::<T>() + self.head_scales::<T>() * size_of::<f32>();
        2 * self.heads * head
    }
}

/// Keys and values of [`BLOCK`] consecutive positions, for all key-value heads of a layer.
///
/// Keys: `[head][position / 8][dim][8 positions]`; values: `[head][position][dim]`; scales, if
/// elements have any, `[head][dim / 32][position]`.
pub(crate) struct KvBlock<T> {
    pub(crate) keys: Box<[T]>,
    pub(crate) values: Box<[T]>,
    pub(crate) key_scales: Box<[f32]>,
    pub(crate) value_scales: Box<[f32]>,
}

impl<T: KvElement> KvBlock<T> {
    pub(crate) fn new(shape: BlockShape) -> Self {
        let elements = vec![T::ZERO; shape.heads * shape.head_len()].into_boxed_slice();
        let scales = vec![0.0; shape.heads * shape.head_scales::<T>()].into_boxed_slice();
        Self {
            keys: elements.clone(),
            values: elements,
            key_scales: scales.clone(),
            value_scales: scales,
        }
    }

    pub(crate) fn copy_from(&mut self, other: &Self) {
        self.keys.copy_from_slice(&other.keys);
        self.values.copy_from_slice(&other.values);
        self.key_scales.copy_from_slice(&other.key_scales);
        self.value_scales.copy_from_slice(&other.value_scales);
    }
}

/// Stores the keys and values of one head at consecutive positions of one block.
pub(crate) struct Store<'a, T> {
    /// `[tokens, kv heads, head_dim]`.
    pub(crate) k: &'a [f32],
    pub(crate) v: &'a [f32],
    pub(crate) shape: BlockShape,
    pub(crate) head: usize,
    /// Rows of `k` and `v`, and the place of the first within the block.
    pub(crate) rows: std::ops::Range<usize>,
    pub(crate) at: usize,
    /// The block's parts; this job writes its own head and places.
    pub(crate) keys: *mut T,
    pub(crate) values: *mut T,
    pub(crate) key_scales: *mut f32,
    pub(crate) value_scales: *mut f32,
}

// SAFETY: a job writes its own head and positions of a block, and only reads the rest.
unsafe impl<T: KvElement> Send for Store<'_, T> {}

impl<T: KvElement> Job for Store<'_, T> {
    /// Safety: the pointers must be those of a whole block, and nobody else may touch this head
    /// and these places.
    #[inline(always)]
    unsafe fn run<S: Isa>(&mut self) {
        let BlockShape { heads, head_dim, dim } = self.shape;
        let mut row = vec![0.0f32; dim];
        let mut encoded = vec![T::ZERO; dim];
        let (elements, scales) =
            (self.head * self.shape.head_len(), self.head * self.shape.head_scales::<T>());
        for (i, r) in self.rows.clone().enumerate() {
            let (at, from) = (self.at + i, (r * heads + self.head) * head_dim);
            // SAFETY: `row` and `encoded` have `dim` elements; the pointers are the caller's.
            unsafe {
                row[..head_dim].copy_from_slice(&self.v[from..from + head_dim]);
                encode::<S, T>(&row, &mut encoded, self.value_scales.add(scales + at));
                let value = self.values.add(elements + at * dim);
                std::ptr::copy_nonoverlapping(encoded.as_ptr(), value, dim);

                row[..head_dim].copy_from_slice(&self.k[from..from + head_dim]);
                encode::<S, T>(&row, &mut encoded, self.key_scales.add(scales + at));
                let key = self.keys.add(elements + at / LANES * dim * LANES + at % LANES);
                for (d, x) in encoded.iter().enumerate() {
                    *key.add(d * LANES) = *x;
                }
            }
        }
    }
}

/// Encodes the row of one position; its scales go to every [`BLOCK`]th place from `scales` on.
///
/// # Safety
/// Both slices have the same length, a multiple of 8; `scales` must be valid where elements are
/// scaled.
#[inline(always)]
unsafe fn encode<S: Isa, T: KvElement>(row: &[f32], encoded: &mut [T], scales: *mut f32) {
    let run = if T::SCALED { SCALED_RUN } else { row.len().max(1) };
    for (g, (row, encoded)) in row.chunks(run).zip(encoded.chunks_mut(run)).enumerate() {
        // SAFETY: the caller's; offsets are multiples of 8 within both chunks.
        unsafe {
            let mut inverse = S::F::splat(1.0);
            if T::SCALED {
                let mut most = S::F::splat(0.0);
                for d in (0..row.len()).step_by(LANES) {
                    most = most.max(S::F::load(row.as_ptr().add(d)).abs());
                }
                let most = most.greatest();
                *scales.add(g * BLOCK) = most / 127.0;
                inverse = S::F::splat(if most > 0.0 { 127.0 / most } else { 0.0 });
            }
            for d in (0..row.len()).step_by(LANES) {
                let mut x = S::F::load(row.as_ptr().add(d));
                if T::SCALED {
                    x = x.mul(inverse);
                }
                T::store8(x, encoded.as_mut_ptr().add(d));
            }
        }
    }
}

/// A block as bytes, in the machine's byte order: for files that only the same kind of rank reads.
impl<T: KvElement> KvBlock<T> {
    /// An empty block for a pool, whose element type it takes.
    pub(crate) fn new_like(_: &[Option<Self>], shape: BlockShape) -> Self {
        Self::new(shape)
    }

    pub(crate) fn write(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(bytes_of(&self.keys));
        to.extend_from_slice(bytes_of(&self.values));
        to.extend_from_slice(bytes_of(&self.key_scales));
        to.extend_from_slice(bytes_of(&self.value_scales));
    }

    /// Takes its bytes from the front of `from`; what is missing there stays as it is.
    pub(crate) fn read<'b>(&mut self, from: &'b [u8]) -> &'b [u8] {
        let from = fill(&mut self.keys, from);
        let from = fill(&mut self.values, from);
        let from = fill(&mut self.key_scales, from);
        fill(&mut self.value_scales, from)
    }
}

fn bytes_of<T: KvElement>(elements: &[T]) -> &[u8] {
    // SAFETY: elements are plain numbers without padding.
    unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

fn fill<'b, T: KvElement>(elements: &mut [T], from: &'b [u8]) -> &'b [u8] {
    let Some((own, rest)) = from.split_at_checked(size_of_val(elements)) else { return from };
    // SAFETY: elements are plain numbers, for which any bits are valid; the lengths are equal.
    unsafe { std::ptr::copy_nonoverlapping(own.as_ptr(), elements.as_mut_ptr().cast(), own.len()) };
    rest
}
