//! Rates of linear layers at the shapes of SmolLM2 (feed-forward up): decode and prefill.
//!
//! Prints weight bytes per second (to be held against memory bandwidth) and operations per second
//! (against the peak of the instruction set), medians of several runs.

use std::time::Instant;

use yunta_tensor::{Backend, CpuBackend, DType, Precision, Slice, WeightSource};

struct Zeros {
    dtype: DType,
    rows: usize,
    cols: usize,
    row: Vec<u8>,
}

impl WeightSource for Zeros {
    fn rows(&self) -> usize {
        self.rows
    }
    fn cols(&self) -> usize {
        self.cols
    }
    fn dtype(&self) -> DType {
        self.dtype
    }
    fn row(&self, _: usize) -> Result<&[u8], String> {
        Ok(&self.row)
    }
}

fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}

/// What exact sums cost: the output and down projections of SmolLM2, whose inputs are cut, with the
/// sums of each cell on the grid, against plain sums.
fn exactness() {
    println!(
        "{:12} {:>6} {:>10} {:>10} {:>6}",
        "exactness", "tokens", "plain us", "exact us", "more"
    );
    for (name, rows, cols, cell) in [("output", 576, 576, 64), ("down", 576, 1536, 64)] {
        let dtype = DType::Q4_1;
        let row = vec![0u8; dtype.row_bytes(cols).unwrap_or(0)];
        let source = Zeros { dtype, rows, cols, row };
        let Ok(mut b) = CpuBackend::new(2, Precision::Fast) else { return };
        let slice = |cell| Slice { rows: 0..rows, cols: 0..cols, cell };
        let mut weights = |cell| -> Vec<_> {
            (0..30).filter_map(|_| b.weight(&source, &slice(cell)).ok()).collect()
        };
        let (plain, exact) = (weights(None), weights(Some(cell)));
        for tokens in [1, 512] {
            let x = b.tensor(vec![0.5; tokens * cols], cols);
            let mut y = b.tensor(vec![0.5; tokens * rows], rows);
            let (mut a, mut e) = (Vec::new(), Vec::new());
            for _ in 0..15 {
                let start = Instant::now();
                for w in &plain {
                    std::hint::black_box(b.linear(&x, &[(w, None)]));
                }
                a.push(start.elapsed().as_secs_f64() / plain.len() as f64);
                let start = Instant::now();
                for w in &exact {
                    let sums = b.linear_partial(&x, w);
                    b.add_sums(&mut y, &sums, None);
                }
                e.push(start.elapsed().as_secs_f64() / exact.len() as f64);
            }
            let (a, e) = (median(a), median(e));
            let more = (e / a - 1.0) * 100.0;
            println!("{name:12} {tokens:>6} {:>10.1} {:>10.1} {more:>5.0}%", a * 1e6, e * 1e6);
        }
    }
}

fn main() {
    exactness();
    let (rows, cols) = (1536, 768);
    println!("{:8} {:>7} {:>6} {:>10} {:>10}", "type", "threads", "tokens", "GB/s", "Gop/s");
    for dtype in [DType::Q4_1, DType::Q8_0, DType::Q4K, DType::Q6K, DType::BF16, DType::F32] {
        let row = vec![0u8; dtype.row_bytes(cols).unwrap_or(0)];
        let source = Zeros { dtype, rows, cols, row };
        for threads in [1, 2] {
            let Ok(mut b) = CpuBackend::new(threads, Precision::Fast) else { return };
            // As many copies as exceed the caches, so that decode reads from memory.
            let copies = 64;
            let slice = Slice { rows: 0..rows, cols: 0..cols, cell: None };
            let weights: Vec<_> =
                (0..copies).filter_map(|_| b.weight(&source, &slice).ok()).collect();
            for tokens in [1, 4, 256] {
                let x = b.tensor(vec![0.5; tokens * cols], cols);
                let times = (0..7)
                    .map(|_| {
                        let start = Instant::now();
                        let n = if tokens > 4 { 4 } else { copies };
                        for w in &weights[..n] {
                            std::hint::black_box(b.linear(&x, &[(w, None)]));
                        }
                        start.elapsed().as_secs_f64() / n as f64
                    })
                    .collect();
                let time = median(times);
                let bytes = b.weight_bytes(&weights[0]) as f64;
                let ops = 2.0 * (rows * cols * tokens) as f64;
                println!(
                    "{:8} {threads:>7} {tokens:>6} {:>10.2} {:>10.1}",
                    dtype.to_string(),
                    bytes / time / 1e9,
                    ops / time / 1e9
                );
            }
        }
    }
}
