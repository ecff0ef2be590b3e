//! Scalar dequantisation: the definition of each stored format, bit for bit what the `gguf`
//! Python package computes. Kernels are tested against it; loading uses it where no packed
//! kernel exists.
//!
//! Source: `ggml-common.h` (block layouts) and `ggml-quants.c` of the ggml project.

use crate::error::check_row;
use crate::{DType, TensorError};
use half::{bf16, f16};

/// The 16 values of IQ4_NL and IQ4_XS.
pub(crate) const IQ4_VALUES: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// The 16 values of an MXFP4 (E2M1) code, doubled to be integers.
pub(crate) const FP4_VALUES_DOUBLED: [i8; 16] =
    [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Half of the value of an E8M0 exponent byte: 2^(e - 128).
pub(crate) fn e8m0_half(e: u8) -> f32 {
    // Below 2 the result is subnormal and has no exponent field to write.
    let bits = if e < 2 { 0x0020_0000 << e } else { u32::from(e - 1) << 23 };
    f32::from_bits(bits)
}

pub(crate) fn f16_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

/// The 6-bit scale and minimum `j` (0..8) of a Q4_K or Q5_K block.
pub(crate) fn k4_scale_min(packed: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        let low = packed[j + 4];
        ((low & 15) | (packed[j - 4] >> 6) << 4, (low >> 4) | (packed[j] >> 6) << 4)
    }
}

/// The 16 signed 6-bit scales of a Q3_K block.
pub(crate) fn q3k_scales(packed: &[u8]) -> [i8; 16] {
    std::array::from_fn(|j| {
        let low = if j < 8 { packed[j] & 15 } else { packed[j - 8] >> 4 };
        let high = (packed[8 + j % 4] >> (2 * (j / 4))) & 3;
        (low | high << 4) as i8 - 32
    })
}

/// Writes the values of one row of `out.len()` elements.
///
/// # Errors
/// [`TensorError::RowBytes`] if `bytes` is not exactly that row, [`TensorError::NotAWeight`] for
/// integer types.
pub fn dequantise_row(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), TensorError> {
    check_row(dtype, out.len(), bytes.len())?;
    let block: fn(&[u8], &mut [f32]) = match dtype {
        DType::F64 => |b, o| {
            o[0] = f64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]) as f32;
        },
        DType::F32 => |b, o| o[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
        DType::F16 => |b, o| o[0] = f16_at(b, 0),
        DType::BF16 => |b, o| o[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32(),
        DType::Q4_0 => q4_0,
        DType::Q4_1 => q4_1,
        DType::Q5_0 => q5_0,
        DType::Q5_1 => q5_1,
        DType::Q8_0 => q8_0,
        DType::Q2K => q2_k,
        DType::Q3K => q3_k,
        DType::Q4K => q4_k,
        DType::Q5K => q5_k,
        DType::Q6K => q6_k,
        DType::IQ4NL => iq4_nl,
        DType::IQ4XS => iq4_xs,
        DType::MXFP4 => mxfp4,
        _ => return Err(TensorError::NotAWeight { dtype, cols: out.len() }),
    };
    let blocks = bytes.chunks_exact(dtype.block_bytes());
    for (b, o) in blocks.zip(out.chunks_exact_mut(dtype.block_elements())) {
        block(b, o);
    }
    Ok(())
}

fn q4_0(b: &[u8], o: &mut [f32]) {
    let d = f16_at(b, 0);
    for (i, q) in b[2..18].iter().enumerate() {
        o[i] = d * (f32::from(q & 15) - 8.0);
        o[i + 16] = d * (f32::from(q >> 4) - 8.0);
    }
}

fn q4_1(b: &[u8], o: &mut [f32]) {
    let (d, m) = (f16_at(b, 0), f16_at(b, 2));
    for (i, q) in b[4..20].iter().enumerate() {
        o[i] = d * f32::from(q & 15) + m;
        o[i + 16] = d * f32::from(q >> 4) + m;
    }
}

/// The 5-bit code `i` of a Q5_0 or Q5_1 block, whose high bits start at `high`.
pub(crate) fn q5_code(b: &[u8], high: usize, i: usize) -> u8 {
    let nibble = if i < 16 { b[high + 4 + i] & 15 } else { b[high + 4 + i - 16] >> 4 };
    nibble | ((b[high + i / 8] >> (i % 8)) & 1) << 4
}

fn q5_0(b: &[u8], o: &mut [f32]) {
    let d = f16_at(b, 0);
    for (i, o) in o.iter_mut().enumerate() {
        *o = d * (f32::from(q5_code(b, 2, i)) - 16.0);
    }
}

fn q5_1(b: &[u8], o: &mut [f32]) {
    let (d, m) = (f16_at(b, 0), f16_at(b, 2));
    for (i, o) in o.iter_mut().enumerate() {
        *o = d * f32::from(q5_code(b, 4, i)) + m;
    }
}

fn q8_0(b: &[u8], o: &mut [f32]) {
    let d = f16_at(b, 0);
    for (o, q) in o.iter_mut().zip(&b[2..34]) {
        *o = d * f32::from(*q as i8);
    }
}

/// The 2-bit code `i` of 256, as Q2_K and Q3_K lay them out: 32 bytes for each half, four codes
/// of a byte 32 elements apart.
pub(crate) fn k2_code(qs: &[u8], i: usize) -> u8 {
    (qs[32 * (i / 128) + i % 32] >> (2 * (i / 32 % 4))) & 3
}

fn q2_k(b: &[u8], o: &mut [f32]) {
    let (d, dmin) = (f16_at(b, 80), f16_at(b, 82));
    for (i, o) in o.iter_mut().enumerate() {
        let scale = b[i / 16];
        let (dl, ml) = (d * f32::from(scale & 15), dmin * f32::from(scale >> 4));
        *o = dl * f32::from(k2_code(&b[16..80], i)) - ml;
    }
}

/// The 3-bit code `i` of a Q3_K block, 0..8.
pub(crate) fn q3k_code(b: &[u8], i: usize) -> u8 {
    k2_code(&b[32..96], i) | ((b[i % 32] >> (i / 32)) & 1) << 2
}

fn q3_k(b: &[u8], o: &mut [f32]) {
    let d = f16_at(b, 108);
    let scales = q3k_scales(&b[96..108]);
    for (i, o) in o.iter_mut().enumerate() {
        *o = d * f32::from(scales[i / 16]) * (f32::from(q3k_code(b, i)) - 4.0);
    }
}

/// The 4-bit code `i` of 256, as Q4_K and Q5_K lay them out: low nibbles of 32 bytes, then high.
pub(crate) fn k4_code(qs: &[u8], i: usize) -> u8 {
    (qs[32 * (i / 64) + i % 32] >> (4 * (i / 32 % 2))) & 15
}

fn q4_k(b: &[u8], o: &mut [f32]) {
    let (d, dmin) = (f16_at(b, 0), f16_at(b, 2));
    for (i, o) in o.iter_mut().enumerate() {
        let (sc, m) = k4_scale_min(&b[4..16], i / 32);
        *o = d * f32::from(sc) * f32::from(k4_code(&b[16..144], i)) - dmin * f32::from(m);
    }
}

/// The 5-bit code `i` of a Q5_K block.
pub(crate) fn q5k_code(b: &[u8], i: usize) -> u8 {
    k4_code(&b[48..176], i) | ((b[16 + i % 32] >> (i / 32)) & 1) << 4
}

fn q5_k(b: &[u8], o: &mut [f32]) {
    let (d, dmin) = (f16_at(b, 0), f16_at(b, 2));
    for (i, o) in o.iter_mut().enumerate() {
        let (sc, m) = k4_scale_min(&b[4..16], i / 32);
        *o = d * f32::from(sc) * f32::from(q5k_code(b, i)) - dmin * f32::from(m);
    }
}

/// The 6-bit code `i` of a Q6_K block, 0..64.
pub(crate) fn q6k_code(b: &[u8], i: usize) -> u8 {
    let (half, quarter, at) = (i / 128, i / 32 % 4, i % 32);
    let low = b[64 * half + 32 * (quarter % 2) + at] >> (4 * (quarter / 2));
    let high = b[128 + 32 * half + at] >> (2 * quarter);
    (low & 15) | (high & 3) << 4
}

fn q6_k(b: &[u8], o: &mut [f32]) {
    let d = f16_at(b, 208);
    for (i, o) in o.iter_mut().enumerate() {
        let scale = f32::from(b[192 + i / 16] as i8);
        *o = d * scale * (f32::from(q6k_code(b, i)) - 32.0);
    }
}

fn iq4_nl(b: &[u8], o: &mut [f32]) {
    let d = f16_at(b, 0);
    for (i, q) in b[2..18].iter().enumerate() {
        o[i] = d * f32::from(IQ4_VALUES[usize::from(q & 15)]);
        o[i + 16] = d * f32::from(IQ4_VALUES[usize::from(q >> 4)]);
    }
}

/// The signed 6-bit scale of group `g` (0..8) of an IQ4_XS block.
pub(crate) fn iq4xs_scale(b: &[u8], g: usize) -> i8 {
    let high = u16::from_le_bytes([b[2], b[3]]);
    let low = (b[4 + g / 2] >> (4 * (g % 2))) & 15;
    (low | (((high >> (2 * g)) & 3) as u8) << 4) as i8 - 32
}

fn iq4_xs(b: &[u8], o: &mut [f32]) {
    let d = f16_at(b, 0);
    for g in 0..8 {
        let dl = d * f32::from(iq4xs_scale(b, g));
        for i in 0..16 {
            let q = b[8 + 16 * g + i];
            o[32 * g + i] = dl * f32::from(IQ4_VALUES[usize::from(q & 15)]);
            o[32 * g + i + 16] = dl * f32::from(IQ4_VALUES[usize::from(q >> 4)]);
        }
    }
}

fn mxfp4(b: &[u8], o: &mut [f32]) {
    let d = e8m0_half(b[0]);
    for (i, q) in b[1..17].iter().enumerate() {
        o[i] = d * f32::from(FP4_VALUES_DOUBLED[usize::from(q & 15)]);
        o[i + 16] = d * f32::from(FP4_VALUES_DOUBLED[usize::from(q >> 4)]);
    }
}
