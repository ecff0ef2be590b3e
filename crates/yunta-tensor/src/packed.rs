//! Weights packed for the kernels.

use std::ops::Range;
use std::sync::Mutex;

use half::{bf16, f16};

use crate::dequant::dequantise_row;
use crate::error::check_row;
use crate::groups::{GroupForm, Groups};
use crate::kernels::dense::Element;
use crate::kernels::int;
use crate::kernels::simd::LANES;
use crate::pool::Pool;
use crate::{DType, TensorError};

/// A stored matrix `[rows, cols]` from which a rank takes its slice.
pub trait WeightSource: Sync {
    /// Rows of the whole matrix (outputs of the layer).
    fn rows(&self) -> usize;
    /// Columns of the whole matrix (inputs of the layer).
    fn cols(&self) -> usize;
    /// Type of the stored rows.
    fn dtype(&self) -> DType;
    /// The stored bytes of row `r`.
    ///
    /// # Errors
    /// Anything that keeps the row from being read, for a person.
    fn row(&self, r: usize) -> Result<&[u8], String>;
}

/// The part of a matrix that a rank owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Rows.
    pub rows: Range<usize>,
    /// Columns.
    pub cols: Range<usize>,
    /// Set for weights that are cut by columns, whose products are partial sums: the columns are
    /// summed in cells of so many, which no cut divides. `cols` lies on their borders.
    pub cell: Option<usize>,
}

/// How exactly a layer computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Weights stay in their stored type; inputs of quantised layers are rounded to 8 bits.
    Fast,
    /// All weights and activations in f32: the reference path.
    Float32,
}

/// A packed matrix.
pub struct PackedWeight {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    /// See [`Slice::cell`]; all columns if there is none.
    pub(crate) cell: usize,
    pub(crate) data: Data,
}

pub(crate) enum Data {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    Int(GroupForm, Vec<u8>),
}

impl PackedWeight {
    /// Packs `slice` of `source`.
    pub(crate) fn pack(
        source: &dyn WeightSource,
        slice: &Slice,
        precision: Precision,
        pool: &mut Pool,
    ) -> Result<Self, TensorError> {
        let (start, end, cols) = (slice.cols.start, slice.cols.end, source.cols());
        let on_border = slice.cell.is_none_or(|c| {
            c > 0 && start.is_multiple_of(c) && (end == cols || end.is_multiple_of(c))
        });
        let sliced = start != 0 || end != cols;
        if start > end || end > cols || !on_border || (sliced && slice.cell.is_none()) {
            return Err(TensorError::BadColumns { start, end, cols });
        }
        let packer = Packer { source, slice, cols: end - start };
        let form = GroupForm::of(source.dtype()).filter(|form| {
            // The choice of the kernel must not depend on the cut: ask for whole cells, not slices.
            let whole = |n: usize| n.is_multiple_of(form.group.max(int::ACT_BLOCK));
            precision == Precision::Fast && whole(cols) && slice.cell.is_none_or(whole)
        });
        let data = match (form, source.dtype(), precision) {
            (Some(form), ..) => Data::Int(form, packer.int(form, pool)?),
            (None, DType::F16, Precision::Fast) => Data::F16(packer.dense(pool)?),
            (None, DType::BF16, Precision::Fast) => Data::BF16(packer.dense(pool)?),
            _ => Data::F32(packer.dense(pool)?),
        };
        let cell = slice.cell.unwrap_or(cols).max(1);
        Ok(Self { rows: slice.rows.len(), cols: packer.cols, cell, data })
    }

    /// Rows of this slice.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of this slice.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        match &self.data {
            Data::F32(v) => v.len() * 4,
            Data::F16(v) => v.len() * 2,
            Data::BF16(v) => v.len() * 2,
            Data::Int(_, v) => v.len(),
        }
    }

    /// Writes the values of row `r`; `out` has `cols` elements.
    pub(crate) fn row(&self, r: usize, out: &mut [f32]) {
        fn dense<T: Element>(panel: &[T], row: usize, out: &mut [f32]) {
            for (o, column) in out.iter_mut().zip(panel.chunks_exact(LANES)) {
                *o = column[row].to_f32();
            }
        }
        let (panel, row) = (r / LANES * LANES * self.cols, r % LANES);
        match &self.data {
            Data::F32(v) => dense(&v[panel..], row, out),
            Data::F16(v) => dense(&v[panel..], row, out),
            Data::BF16(v) => dense(&v[panel..], row, out),
            Data::Int(form, v) => {
                let bytes = self.cols / form.group * int::block_bytes(*form);
                int::unpack_row(*form, &v[r / LANES * bytes..][..bytes], row, out);
            }
        }
    }
}

/// Fills a panel with the given rows of the source.
type FillPanel<'a, T> = dyn Fn(Range<usize>, &mut [T]) -> Result<(), TensorError> + Sync + 'a;

struct Packer<'a> {
    source: &'a dyn WeightSource,
    slice: &'a Slice,
    cols: usize,
}

impl Packer<'_> {
    fn panels(&self) -> usize {
        self.slice.rows.len().div_ceil(LANES)
    }

    /// Runs `fill(rows of the panel, panel)` for every panel, on all threads.
    fn each_panel<T: Send>(
        &self,
        out: &mut [T],
        pool: &mut Pool,
        fill: &FillPanel<'_, T>,
    ) -> Result<(), TensorError> {
        let size = out.len() / self.panels().max(1);
        if size == 0 {
            return Ok(());
        }
        let panels: Vec<Mutex<&mut [T]>> = out.chunks_exact_mut(size).map(Mutex::new).collect();
        let failure = Mutex::new(None);
        pool.for_each(panels.len(), &|p| {
            let first = self.slice.rows.start + p * LANES;
            let rows = first..(first + LANES).min(self.slice.rows.end);
            let Ok(mut panel) = panels[p].lock() else { return };
            if let (Err(e), Ok(mut failure)) = (fill(rows, &mut panel), failure.lock()) {
                *failure = Some(e);
            }
        });
        match failure.into_inner() {
            Ok(Some(e)) => Err(e),
            _ => Ok(()),
        }
    }

    /// The part of row `r` that whole blocks of the slice's columns lie in, and where the slice
    /// starts in it.
    fn row(&self, r: usize) -> Result<(&[u8], usize, usize), TensorError> {
        let (dtype, cols) = (self.source.dtype(), self.source.cols());
        let bytes = self.source.row(r).map_err(TensorError::Source)?;
        check_row(dtype, cols, bytes.len())?;
        let n = dtype.block_elements();
        let blocks = self.slice.cols.start / n..self.slice.cols.end.div_ceil(n);
        let part = &bytes[blocks.start * dtype.block_bytes()..blocks.end * dtype.block_bytes()];
        Ok((part, blocks.len() * n, self.slice.cols.start - blocks.start * n))
    }

    fn dense<T: Element>(&self, pool: &mut Pool) -> Result<Vec<T>, TensorError> {
        let mut out = vec![T::from_f32(0.0); self.panels() * LANES * self.cols];
        self.each_panel(&mut out, pool, &|rows, panel| {
            let mut values = Vec::new();
            for (lane, r) in rows.enumerate() {
                let (bytes, elements, skip) = self.row(r)?;
                values.resize(elements, 0.0);
                dequantise_row(self.source.dtype(), bytes, &mut values)?;
                for (column, x) in panel.chunks_exact_mut(LANES).zip(&values[skip..]) {
                    column[lane] = T::from_f32(*x);
                }
            }
            Ok(())
        })?;
        Ok(out)
    }

    fn int(&self, form: GroupForm, pool: &mut Pool) -> Result<Vec<u8>, TensorError> {
        let groups = self.cols / form.group;
        let mut out = vec![0u8; self.panels() * groups * int::block_bytes(form)];
        self.each_panel(&mut out, pool, &|rows, panel| {
            let mut decoded = Vec::with_capacity(LANES);
            for r in rows {
                let (bytes, elements, skip) = self.row(r)?;
                let mut row = Groups::new(form, elements);
                row.decode(self.source.dtype(), bytes)?;
                row.codes.drain(..skip);
                row.scales.drain(..skip / form.group);
                row.mins.drain(..skip / form.group);
                decoded.push(row);
            }
            int::pack_panel(form, &decoded, panel);
            Ok(())
        })?;
        Ok(out)
    }
}
