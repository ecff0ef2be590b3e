//! Quantised rows as groups: integer codes with a scale and a minimum each.
//!
//! Every integer format of the files is `value = scale * code + min` over groups of 16 or 32
//! elements, with unsigned codes of at most 6 bits, or signed codes of 8 bits and no minimum.
//! Packing works on this one form.

use crate::dequant::{self, f16_at};
use crate::error::check_row;
use crate::{DType, TensorError};

/// How the codes of a format are held in packed weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Codes {
    /// 0..16, two to a byte.
    U4,
    /// 0..32, a byte each.
    U5,
    /// 0..64, a byte each.
    U6,
    /// -128..128, a byte each; no minimum.
    I8,
}

/// The integer form of a stored format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GroupForm {
    pub(crate) codes: Codes,
    /// Elements per group: 16 or 32.
    pub(crate) group: usize,
    /// Scales and minima are representable in f16.
    pub(crate) half_scales: bool,
}

impl GroupForm {
    /// The form of a stored type, if it has one.
    pub(crate) fn of(dtype: DType) -> Option<Self> {
        let (codes, group, half_scales) = match dtype {
            DType::Q4_0 | DType::Q4_1 => (Codes::U4, 32, true),
            DType::Q5_0 | DType::Q5_1 => (Codes::U5, 32, true),
            DType::Q8_0 | DType::IQ4NL => (Codes::I8, 32, true),
            DType::Q2K | DType::Q3K => (Codes::U4, 16, false),
            DType::Q4K => (Codes::U4, 32, false),
            DType::Q5K => (Codes::U5, 32, false),
            DType::Q6K => (Codes::U6, 16, false),
            DType::IQ4XS | DType::MXFP4 => (Codes::I8, 32, false),
            _ => return None,
        };
        Some(Self { codes, group, half_scales })
    }
}

/// One row taken apart. Codes of [`Codes::I8`] are stored as their two's complement byte.
pub(crate) struct Groups {
    pub(crate) codes: Vec<u8>,
    pub(crate) scales: Vec<f32>,
    pub(crate) mins: Vec<f32>,
}

impl Groups {
    pub(crate) fn new(form: GroupForm, cols: usize) -> Self {
        let groups = cols / form.group;
        Self { codes: vec![0; cols], scales: vec![0.0; groups], mins: vec![0.0; groups] }
    }

    /// Fills from the bytes of one row.
    pub(crate) fn decode(&mut self, dtype: DType, bytes: &[u8]) -> Result<(), TensorError> {
        let cols = self.codes.len();
        check_row(dtype, cols, bytes.len())?;
        let block: fn(&[u8], Block<'_>) = match dtype {
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
            _ => return Err(TensorError::NotAWeight { dtype, cols }),
        };
        let elements = dtype.block_elements();
        let groups = elements * self.scales.len() / cols.max(1);
        let parts = self
            .codes
            .chunks_exact_mut(elements)
            .zip(self.scales.chunks_exact_mut(groups).zip(self.mins.chunks_exact_mut(groups)));
        for (b, (codes, (scales, mins))) in bytes.chunks_exact(dtype.block_bytes()).zip(parts) {
            block(b, Block { codes, scales, mins });
        }
        Ok(())
    }
}

struct Block<'a> {
    codes: &'a mut [u8],
    scales: &'a mut [f32],
    mins: &'a mut [f32],
}

impl Block<'_> {
    fn fill(&mut self, code: impl Fn(usize) -> u8) {
        for (i, c) in self.codes.iter_mut().enumerate() {
            *c = code(i);
        }
    }
}

/// Code `i` of 32 nibbles: low halves of 16 bytes, then high halves.
fn nibble(qs: &[u8], i: usize) -> u8 {
    if i < 16 { qs[i] & 15 } else { qs[i - 16] >> 4 }
}

fn q4_0(b: &[u8], mut o: Block<'_>) {
    let d = f16_at(b, 0);
    (o.scales[0], o.mins[0]) = (d, -8.0 * d);
    o.fill(|i| nibble(&b[2..], i));
}

fn q4_1(b: &[u8], mut o: Block<'_>) {
    (o.scales[0], o.mins[0]) = (f16_at(b, 0), f16_at(b, 2));
    o.fill(|i| nibble(&b[4..], i));
}

fn q5_0(b: &[u8], mut o: Block<'_>) {
    let d = f16_at(b, 0);
    (o.scales[0], o.mins[0]) = (d, -16.0 * d);
    o.fill(|i| dequant::q5_code(b, 2, i));
}

fn q5_1(b: &[u8], mut o: Block<'_>) {
    (o.scales[0], o.mins[0]) = (f16_at(b, 0), f16_at(b, 2));
    o.fill(|i| dequant::q5_code(b, 4, i));
}

fn q8_0(b: &[u8], o: Block<'_>) {
    o.scales[0] = f16_at(b, 0);
    o.codes.copy_from_slice(&b[2..34]);
}

fn q2_k(b: &[u8], mut o: Block<'_>) {
    let (d, dmin) = (f16_at(b, 80), f16_at(b, 82));
    for (g, packed) in b[..16].iter().enumerate() {
        o.scales[g] = d * f32::from(packed & 15);
        o.mins[g] = -(dmin * f32::from(packed >> 4));
    }
    o.fill(|i| dequant::k2_code(&b[16..80], i));
}

fn q3_k(b: &[u8], mut o: Block<'_>) {
    let d = f16_at(b, 108);
    for (g, scale) in dequant::q3k_scales(&b[96..108]).into_iter().enumerate() {
        o.scales[g] = d * f32::from(scale);
        o.mins[g] = -4.0 * o.scales[g];
    }
    o.fill(|i| dequant::q3k_code(b, i));
}

fn k4_scales(b: &[u8], o: &mut Block<'_>) {
    let (d, dmin) = (f16_at(b, 0), f16_at(b, 2));
    for g in 0..8 {
        let (sc, m) = dequant::k4_scale_min(&b[4..16], g);
        o.scales[g] = d * f32::from(sc);
        o.mins[g] = -(dmin * f32::from(m));
    }
}

fn q4_k(b: &[u8], mut o: Block<'_>) {
    k4_scales(b, &mut o);
    o.fill(|i| dequant::k4_code(&b[16..144], i));
}

fn q5_k(b: &[u8], mut o: Block<'_>) {
    k4_scales(b, &mut o);
    o.fill(|i| dequant::q5k_code(b, i));
}

fn q6_k(b: &[u8], mut o: Block<'_>) {
    let d = f16_at(b, 208);
    for g in 0..16 {
        o.scales[g] = d * f32::from(b[192 + g] as i8);
        o.mins[g] = -32.0 * o.scales[g];
    }
    o.fill(|i| dequant::q6k_code(b, i));
}

fn iq4_nl(b: &[u8], mut o: Block<'_>) {
    o.scales[0] = f16_at(b, 0);
    o.fill(|i| dequant::IQ4_VALUES[usize::from(nibble(&b[2..], i))] as u8);
}

fn iq4_xs(b: &[u8], mut o: Block<'_>) {
    let d = f16_at(b, 0);
    for g in 0..8 {
        o.scales[g] = d * f32::from(dequant::iq4xs_scale(b, g));
    }
    o.fill(|i| dequant::IQ4_VALUES[usize::from(nibble(&b[8 + 16 * (i / 32)..], i % 32))] as u8);
}

fn mxfp4(b: &[u8], mut o: Block<'_>) {
    o.scales[0] = dequant::e8m0_half(b[0]);
    o.fill(|i| dequant::FP4_VALUES_DOUBLED[usize::from(nibble(&b[1..], i))] as u8);
}
