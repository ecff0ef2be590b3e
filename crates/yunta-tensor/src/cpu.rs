//! The backend that computes on this processor.

use crate::cache::CpuCache;
use crate::kernels::dense::{DenseLinear, Element};
use crate::kernels::int::{IntLinear, Out, QuantRows, Quantise};
use crate::kernels::rows::{self, RmsNorm, SiluMul};
use crate::kernels::simd::{Job, LANES};
use crate::kernels::{InstructionSet, dispatch};
use crate::packed::Data;
use crate::pool::Pool;
use crate::{
    Attention, Backend, CacheEdit, CacheShape, PackedWeight, Precision, Slice, Span, TensorError,
    WeightSource,
};

/// Activations in memory: `[rows, cols]`, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct CpuTensor {
    values: Vec<f32>,
    /// Kept apart from the values: a rank without heads has rows of no columns.
    rows: usize,
    cols: usize,
}

impl CpuTensor {
    pub(crate) fn values(&self) -> &[f32] {
        &self.values
    }

    pub(crate) fn values_mut(&mut self) -> &mut [f32] {
        &mut self.values
    }
}

/// The CPU backend.
pub struct CpuBackend {
    pool: Pool,
    isa: InstructionSet,
    precision: Precision,
}

/// One weight's share of a parallel linear operation.
struct Task<'a> {
    weight: &'a PackedWeight,
    out: Out,
    panels: std::ops::Range<usize>,
}
// SAFETY: tasks write disjoint columns of their outputs.
unsafe impl Sync for Task<'_> {}

/// An input in the forms that weights may want.
struct Input<'a> {
    x: &'a CpuTensor,
    quantised: Option<QuantRows>,
}

impl CpuBackend {
    /// A backend with so many threads, on the best instruction set there is.
    ///
    /// # Errors
    /// If a thread can't be started.
    pub fn new(threads: usize, precision: Precision) -> Result<Self, TensorError> {
        Self::with_instructions(threads, precision, InstructionSet::detect())
    }

    /// As [`CpuBackend::new`], without special instructions: for tests and comparisons.
    ///
    /// # Errors
    /// If a thread can't be started.
    pub fn portable(threads: usize, precision: Precision) -> Result<Self, TensorError> {
        Self::with_instructions(threads, precision, InstructionSet::Portable)
    }

    fn with_instructions(
        threads: usize,
        precision: Precision,
        isa: InstructionSet,
    ) -> Result<Self, TensorError> {
        Ok(Self { pool: Pool::new(threads)?, isa, precision })
    }

    /// Runs independent jobs on all threads.
    ///
    /// # Safety
    /// The jobs' own conditions must hold.
    unsafe fn run_all<J: Job + Send>(&mut self, jobs: Vec<J>) {
        let isa = self.isa;
        let jobs: Vec<std::sync::Mutex<J>> = jobs.into_iter().map(std::sync::Mutex::new).collect();
        self.pool.for_each(jobs.len(), &|i| {
            if let Ok(mut job) = jobs[i].lock() {
                // SAFETY: the caller's.
                unsafe { dispatch(isa, &mut *job) };
            }
        });
    }

    /// Runs independent jobs, on all threads if they are worth it.
    ///
    /// # Safety
    /// The jobs' own conditions must hold.
    pub(crate) unsafe fn run_jobs<J: Job + Send>(&mut self, mut jobs: Vec<J>, parallel: bool) {
        // SAFETY: the caller's.
        unsafe {
            if parallel {
                self.run_all(jobs);
            } else {
                jobs.iter_mut().for_each(|job| dispatch(self.isa, job));
            }
        }
    }

    pub(crate) fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Rows per job so that each thread gets a few jobs, but none of trifling size.
    fn rows_per_job(&self, rows: usize, cols: usize) -> usize {
        let least = (16 * 1024 / cols.max(1)).max(1);
        rows.div_ceil(4 * self.pool.threads()).max(least)
    }

    fn input<'a>(&mut self, x: &'a CpuTensor, weights: &[&PackedWeight]) -> Input<'a> {
        let wanted = weights.iter().any(|w| matches!(w.data, Data::Int(..)));
        let quantised = wanted.then(|| {
            let mut out = QuantRows::new(x.rows, x.cols);
            let rows = self.rows_per_job(x.rows, x.cols);
            let jobs = Quantise::jobs(&x.values, &mut out, rows);
            // SAFETY: no conditions beyond the instruction set.
            unsafe { self.run_all(jobs) };
            out
        });
        Input { x, quantised }
    }

    /// Computes several linear layers of one input; all have outputs of their own.
    fn run_linear(&mut self, input: &Input<'_>, layers: &[(&PackedWeight, Out)]) {
        let panels: usize = layers.iter().map(|(w, _)| w.rows.div_ceil(LANES)).sum();
        // Multiples of 4 panels: what the dense kernel does at once.
        let step = panels.div_ceil(8 * self.pool.threads()).clamp(1, 32).next_multiple_of(4);
        let tasks: Vec<Task<'_>> = layers
            .iter()
            .flat_map(|&(weight, out)| {
                let panels = weight.rows.div_ceil(LANES);
                (0..panels).step_by(step).map(move |first| Task {
                    weight,
                    out,
                    panels: first..(first + step).min(panels),
                })
            })
            .collect();
        let isa = self.isa;
        // SAFETY: outputs have room for `tokens * rows` each, and tasks own their columns.
        self.pool.for_each(tasks.len(), &|i| unsafe { linear_task(isa, &tasks[i], input) });
    }
}

/// # Safety
/// `task.out` must be valid for `tokens * rows`, and nobody else may write the task's columns.
unsafe fn linear_task(isa: InstructionSet, task: &Task<'_>, input: &Input<'_>) {
    /// # Safety
    /// As [`linear_task`].
    unsafe fn dense<T: Element>(
        isa: InstructionSet,
        weights: &[T],
        task: &Task<'_>,
        x: &CpuTensor,
    ) {
        let mut job = DenseLinear {
            weights,
            rows: task.weight.rows,
            cols: task.weight.cols,
            x: &x.values,
            tokens: x.rows,
            panels: task.panels.clone(),
            out: task.out,
        };
        // SAFETY: the caller's.
        unsafe { dispatch(isa, &mut job) };
    }
    // SAFETY: the caller's.
    unsafe {
        match &task.weight.data {
            Data::F32(w) => dense(isa, w, task, input.x),
            Data::F16(w) => dense(isa, w, task, input.x),
            Data::BF16(w) => dense(isa, w, task, input.x),
            Data::Int(form, weights) => {
                let Some(x) = &input.quantised else { return };
                let mut job = IntLinear {
                    form: *form,
                    weights,
                    rows: task.weight.rows,
                    x,
                    tokens: input.x.rows,
                    panels: task.panels.clone(),
                    out: task.out,
                };
                dispatch(isa, &mut job);
            }
        }
    }
}

impl Backend for CpuBackend {
    type Tensor = CpuTensor;
    type Weight = PackedWeight;
    type Cache = CpuCache;

    fn weight(
        &mut self,
        source: &dyn WeightSource,
        slice: &Slice,
    ) -> Result<PackedWeight, TensorError> {
        PackedWeight::pack(source, slice, self.precision, &mut self.pool)
    }

    fn weight_bytes(&self, weight: &PackedWeight) -> usize {
        weight.bytes()
    }

    fn tensor(&mut self, values: Vec<f32>, cols: usize) -> CpuTensor {
        CpuTensor { rows: values.len() / cols.max(1), values, cols }
    }

    fn to_host(&mut self, x: &CpuTensor) -> Vec<f32> {
        x.values.clone()
    }

    fn cache(&mut self, shape: CacheShape) -> CpuCache {
        CpuCache::new(shape)
    }

    fn edit(&mut self, cache: &mut CpuCache, edit: &CacheEdit) -> Result<(), TensorError> {
        cache.edit(edit)
    }

    fn export(&mut self, cache: &CpuCache, block: u32) -> Vec<u8> {
        cache.export(block)
    }

    fn import(
        &mut self,
        cache: &mut CpuCache,
        block: u32,
        bytes: &[u8],
    ) -> Result<(), TensorError> {
        cache.import(block, bytes)
    }

    fn embed(&mut self, table: &PackedWeight, rows: &[Option<usize>]) -> CpuTensor {
        let cols = table.cols;
        let mut values = vec![0.0; rows.len() * cols];
        for (out, row) in values.chunks_exact_mut(cols).zip(rows) {
            if let Some(r) = row.filter(|&r| r < table.rows) {
                table.row(r, out);
            }
        }
        CpuTensor { values, rows: rows.len(), cols }
    }

    fn rms_norm(&mut self, x: &CpuTensor, weight: &CpuTensor, eps: f32) -> CpuTensor {
        let mut values = vec![0.0; x.values.len()];
        let run = self.rows_per_job(x.rows, x.cols) * x.cols.max(1);
        let jobs = x.values.chunks(run).zip(values.chunks_mut(run));
        let jobs = jobs.map(|(x, out)| RmsNorm { x, weight: &weight.values, eps, out }).collect();
        // SAFETY: no conditions beyond the instruction set.
        unsafe { self.run_all::<RmsNorm<'_>>(jobs) };
        CpuTensor { values, rows: x.rows, cols: x.cols }
    }

    fn linear(
        &mut self,
        x: &CpuTensor,
        layers: &[(&PackedWeight, Option<&CpuTensor>)],
    ) -> Vec<CpuTensor> {
        let weights: Vec<&PackedWeight> = layers.iter().map(|(w, _)| *w).collect();
        let input = self.input(x, &weights);
        let mut outs: Vec<CpuTensor> = weights
            .iter()
            .map(|w| CpuTensor { values: vec![0.0; x.rows * w.rows], rows: x.rows, cols: w.rows })
            .collect();
        let pairs: Vec<(&PackedWeight, Out)> = weights
            .iter()
            .zip(&mut outs)
            .map(|(w, out)| (*w, Out::Float(out.values.as_mut_ptr())))
            .collect();
        self.run_linear(&input, &pairs);
        for (out, (_, bias)) in outs.iter_mut().zip(layers) {
            let Some(bias) = bias else { continue };
            for row in out.values.chunks_exact_mut(out.cols.max(1)) {
                row.iter_mut().zip(&bias.values).for_each(|(x, b)| *x += b);
            }
        }
        outs
    }

    fn linear_partial(&mut self, x: &CpuTensor, weight: &PackedWeight) -> Vec<f64> {
        let input = self.input(x, &[weight]);
        let mut sums = vec![0.0f64; x.rows * weight.rows];
        self.run_linear(&input, &[(weight, Out::Grid(sums.as_mut_ptr(), weight.cell))]);
        sums
    }

    fn add_sums(&mut self, x: &mut CpuTensor, sums: &[f64], bias: Option<&CpuTensor>) {
        let cols = x.cols.max(1);
        for (row, sums) in x.values.chunks_exact_mut(cols).zip(sums.chunks_exact(cols)) {
            match bias {
                None => row.iter_mut().zip(sums).for_each(|(x, s)| *x += *s as f32),
                Some(bias) => {
                    for ((x, s), b) in row.iter_mut().zip(sums).zip(&bias.values) {
                        *x += *s as f32 + b;
                    }
                }
            }
        }
    }

    fn rotate(&mut self, x: &mut CpuTensor, head_dim: usize, angles: &CpuTensor) {
        let half = angles.cols / 2;
        if x.cols == 0 || half == 0 {
            return;
        }
        let tokens = x.values.chunks_exact_mut(x.cols);
        for (row, angles) in tokens.zip(angles.values.chunks_exact(2 * half)) {
            rows::rotate(row, head_dim, &angles[..half], &angles[half..]);
        }
    }

    fn attend(
        &mut self,
        cache: &mut CpuCache,
        layer: usize,
        spans: &[Span],
        q: &CpuTensor,
        k: &CpuTensor,
        v: &CpuTensor,
        how: &Attention,
    ) -> Result<CpuTensor, TensorError> {
        let mut out = CpuTensor { values: vec![0.0; q.values.len()], rows: q.rows, cols: q.cols };
        cache.attend(self, layer, spans, q, k, v, how, &mut out)?;
        Ok(out)
    }

    fn silu_mul(&mut self, mut gate: CpuTensor, up: &CpuTensor) -> CpuTensor {
        let run = self.rows_per_job(gate.rows, gate.cols) * gate.cols.max(1);
        let jobs = gate.values.chunks_mut(run).zip(up.values.chunks(run));
        let jobs = jobs.map(|(gate, up)| SiluMul { gate, up }).collect();
        // SAFETY: no conditions beyond the instruction set.
        unsafe { self.run_all::<SiluMul<'_>>(jobs) };
        gate
    }

    fn rows(&mut self, x: &CpuTensor, rows: &[usize]) -> CpuTensor {
        let values = rows
            .iter()
            .filter_map(|r| x.values.get(r * x.cols..(r + 1) * x.cols))
            .flatten()
            .copied()
            .collect();
        CpuTensor { values, rows: rows.len(), cols: x.cols }
    }

    fn cache_bytes(&self, cache: &CpuCache) -> usize {
        cache.bytes()
    }

    fn block_bytes(&self, cache: &CpuCache) -> usize {
        cache.block_bytes()
    }
}
