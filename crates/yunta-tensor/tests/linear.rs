//! Linear layers of every format against a plain f64 product of the dequantised weight.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use proptest::prelude::*;
use yunta_tensor::{Backend, CpuBackend, DType, Precision, Slice, WeightSource, dequantise_row};

const TYPES: [DType; 16] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q2K,
    DType::Q3K,
    DType::Q4K,
    DType::Q5K,
    DType::Q6K,
    DType::IQ4NL,
    DType::IQ4XS,
    DType::MXFP4,
];

/// A deterministic stream of bits (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
    fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// Offsets of the f16 scales within a block.
fn scale_offsets(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 | DType::IQ4NL | DType::IQ4XS => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => &[0, 2],
        DType::Q2K => &[80, 82],
        DType::Q3K => &[108],
        DType::Q6K => &[208],
        _ => &[],
    }
}

struct Matrix {
    dtype: DType,
    rows: usize,
    cols: usize,
    bytes: Vec<u8>,
}

impl Matrix {
    fn random(dtype: DType, rows: usize, cols: usize, random: &mut Random) -> Self {
        let size = dtype.row_bytes(cols).unwrap() * rows;
        let mut bytes: Vec<u8> = (0..size).map(|_| random.next() as u8).collect();
        for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
            match dtype {
                DType::F32 => block.copy_from_slice(&random.float().to_le_bytes()),
                DType::F16 => {
                    block.copy_from_slice(&half::f16::from_f32(random.float()).to_le_bytes());
                }
                DType::BF16 => {
                    block.copy_from_slice(&half::bf16::from_f32(random.float()).to_le_bytes());
                }
                DType::MXFP4 => block[0] = 120 + block[0] % 10,
                _ => {
                    for &at in scale_offsets(dtype) {
                        let scale = half::f16::from_f32(random.float() * 0.1);
                        block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
                    }
                }
            }
        }
        Self { dtype, rows, cols, bytes }
    }

    fn all(&self) -> Slice {
        Slice { rows: 0..self.rows, cols: 0..self.cols, cell: None }
    }

    fn values(&self, r: usize) -> Vec<f32> {
        let mut out = vec![0.0; self.cols];
        dequantise_row(self.dtype, self.row(r).unwrap(), &mut out).unwrap();
        out
    }
}

impl WeightSource for Matrix {
    fn rows(&self) -> usize {
        self.rows
    }
    fn cols(&self) -> usize {
        self.cols
    }
    fn dtype(&self) -> DType {
        self.dtype
    }
    fn row(&self, r: usize) -> Result<&[u8], String> {
        let n = self.dtype.row_bytes(self.cols).unwrap();
        self.bytes.get(r * n..(r + 1) * n).ok_or_else(|| "no such row".to_owned())
    }
}

fn activations(tokens: usize, cols: usize, random: &mut Random) -> Vec<f32> {
    (0..tokens * cols).map(|_| random.float() * 3.0).collect()
}

/// The greatest difference from the f64 product, and the greatest magnitude that was summed.
fn compare(m: &Matrix, x: &[f32], y: &[f32]) -> (f64, f64) {
    let (mut worst, mut scale) = (0.0f64, 0.0f64);
    for (t, x) in x.chunks_exact(m.cols).enumerate() {
        for r in 0..m.rows {
            let products =
                m.values(r).into_iter().zip(x).map(|(w, x)| f64::from(w) * f64::from(*x));
            let products: Vec<f64> = products.collect();
            let norm = products.iter().map(|p| p * p).sum::<f64>().sqrt();
            let error = (products.iter().sum::<f64>() - f64::from(y[t * m.rows + r])).abs();
            worst = worst.max(error);
            scale = scale.max(norm);
        }
    }
    (worst, scale)
}

fn backends(precision: Precision) -> [CpuBackend; 2] {
    [CpuBackend::new(2, precision).unwrap(), CpuBackend::portable(1, precision).unwrap()]
}

#[test]
fn every_format_multiplies_as_its_definition_says() {
    let mut random = Random(1);
    for dtype in TYPES {
        for (rows, cols, tokens) in [(1, 256, 1), (19, 512, 1), (40, 768, 5), (7, 256, 9)] {
            let m = Matrix::random(dtype, rows, cols, &mut random);
            let x = activations(tokens, cols, &mut random);
            for precision in [Precision::Fast, Precision::Float32] {
                for mut b in backends(precision) {
                    let w = b.weight(&m, &m.all()).unwrap();
                    let x_in = b.tensor(x.clone(), cols);
                    let y = b.linear(&x_in, &[(&w, None)]).remove(0);
                    let (error, scale) = compare(&m, &x, &b.to_host(&y));
                    let exact = precision == Precision::Float32 || !dtype.is_quantised();
                    let bound = scale * if exact { 5e-6 } else { 0.02 };
                    assert!(error <= bound, "{dtype} {rows}x{cols}, {tokens} tokens: {error:.2e}");
                }
            }
        }
    }
}

#[test]
fn a_row_of_an_embedding_is_its_dequantised_value() {
    let mut random = Random(2);
    for dtype in TYPES {
        let m = Matrix::random(dtype, 11, 256, &mut random);
        for mut b in backends(Precision::Fast) {
            let w = b.weight(&m, &m.all()).unwrap();
            let rows = b.embed(&w, &[Some(10), None, Some(0)]);
            let rows = b.to_host(&rows);
            for (at, r) in [(0, 10), (2, 0)] {
                for (got, want) in rows[at * 256..][..256].iter().zip(m.values(r)) {
                    let bound = 1e-5 * want.abs().max(0.1);
                    assert!((got - want).abs() <= bound, "{dtype}: {got} is not {want}");
                }
            }
            assert!(rows[256..512].iter().all(|&x| x == 0.0));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// What a token gets must not depend on the tokens computed with it.
    #[test]
    fn results_do_not_depend_on_the_batch(seed: u64, tokens in 2usize..9, kind in 0..TYPES.len()) {
        let mut random = Random(seed);
        let m = Matrix::random(TYPES[kind], 37, 512, &mut random);
        let x = activations(tokens, 512, &mut random);
        for mut b in backends(Precision::Fast) {
            let w = b.weight(&m, &m.all()).unwrap();
            let together = b.tensor(x.clone(), 512);
            let together = b.linear(&together, &[(&w, None)]).remove(0);
            let together = b.to_host(&together);
            for (t, row) in x.chunks_exact(512).enumerate() {
                let alone = b.tensor(row.to_vec(), 512);
                let alone = b.linear(&alone, &[(&w, None)]).remove(0);
                let alone = b.to_host(&alone);
                prop_assert_eq!(&together[t * 37..(t + 1) * 37], &alone[..]);
            }
        }
    }

    /// Partial sums over any cut of the columns at cells add up to the same bits.
    #[test]
    fn results_do_not_depend_on_the_cut(seed: u64, cut in 0usize..9, kind in 0..TYPES.len()) {
        let mut random = Random(seed);
        let (cols, cell) = (512, 64);
        let m = Matrix::random(TYPES[kind], 21, cols, &mut random);
        let x = activations(3, cols, &mut random);
        for mut b in backends(Precision::Fast) {
            let mut partial = |range: std::ops::Range<usize>| {
                let slice = Slice { rows: 0..21, cols: range.clone(), cell: Some(cell) };
                let w = b.weight(&m, &slice).unwrap();
                let part = x.chunks_exact(cols).flat_map(|row| row[range.clone()].to_vec());
                let input = b.tensor(part.collect(), range.len());
                b.linear_partial(&input, &w)
            };
            let whole = partial(0..cols);
            let (left, right) = (partial(0..cut * cell), partial(cut * cell..cols));
            for (i, sum) in whole.iter().enumerate() {
                let left = left.get(i).copied().unwrap_or(0.0);
                let right = right.get(i).copied().unwrap_or(0.0);
                prop_assert_eq!((left + right).to_bits(), sum.to_bits());
            }
        }
    }
}
