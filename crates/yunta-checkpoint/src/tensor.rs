//! A view of one tensor in a mapped file.

use std::borrow::Cow;
use std::path::Path;

use yunta_tensor::DType;

use crate::CheckpointError;

/// Order of the rows in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// As Hugging Face has them.
    Natural,
    /// Within each head of so many rows, the two halves interleaved.
    Interleaved { head_dim: usize },
}

impl RowOrder {
    /// Where canonical row `r` lies in the file.
    fn place(self, r: usize) -> usize {
        match self {
            Self::Natural => r,
            Self::Interleaved { head_dim } => {
                let (head, i, half) = (r / head_dim, r % head_dim, head_dim / 2);
                head * head_dim + if i < half { 2 * i } else { 2 * (i - half) + 1 }
            }
        }
    }
}

/// Where a tensor lies, checked against its file.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    /// Which of the checkpoint's files.
    pub(crate) file: usize,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    /// The type, or why it can't be read.
    pub(crate) dtype: Result<DType, String>,
    /// Outermost dimension first.
    pub(crate) shape: Vec<usize>,
    pub(crate) order: RowOrder,
}

/// A stored tensor: a matrix of packed rows (a vector is one row).
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    name: &'a str,
    path: &'a Path,
    entry: &'a Entry,
    dtype: DType,
    /// Exactly `rows * row_bytes`.
    data: &'a [u8],
    row_bytes: usize,
}

impl<'a> Tensor<'a> {
    pub(crate) fn new(
        name: &'a str,
        path: &'a Path,
        entry: &'a Entry,
        file: &'a [u8],
    ) -> Result<Self, CheckpointError> {
        let bad = |reason: String| CheckpointError::tensor(path, name, reason);
        let dtype = entry.dtype.clone().map_err(bad)?;
        let cols = entry.shape.last().copied().unwrap_or(1);
        let row_bytes =
            dtype.row_bytes(cols).ok_or_else(|| bad(format!("rows of {cols} {dtype}")))?;
        let range = usize::try_from(entry.offset)
            .and_then(|start| Ok(start..start.saturating_add(usize::try_from(entry.bytes)?)))
            .map_err(|e| bad(e.to_string()))?;
        let data = file.get(range).ok_or_else(|| bad("lies outside its file".to_owned()))?;
        Ok(Self { name, path, entry, dtype, data, row_bytes })
    }

    /// Canonical name.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// Type of the elements, or of the blocks.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Outermost dimension first.
    pub fn shape(&self) -> &'a [usize] {
        &self.entry.shape
    }

    /// Number of rows: the product of all dimensions but the last; 0 if there are no elements.
    pub fn rows(&self) -> usize {
        match self.entry.shape.split_last() {
            Some((0, _)) => 0,
            Some((_, outer)) => outer.iter().product(),
            None => 1,
        }
    }

    /// Elements of a row: the last dimension.
    pub fn cols(&self) -> usize {
        self.entry.shape.last().copied().unwrap_or(1)
    }

    /// The packed bytes of row `r`, in Hugging Face's order of rows.
    ///
    /// # Errors
    /// [`CheckpointError::Tensor`] if there is no such row, or if the tensor is a vector whose
    /// elements lie in another order: [`Tensor::bytes`] reads those.
    pub fn row(&self, r: usize) -> Result<&'a [u8], CheckpointError> {
        if r >= self.rows() {
            return Err(self.bad(format!("row {r} of {} does not exist", self.rows())));
        }
        let order = self.entry.order;
        if order != RowOrder::Natural && self.entry.shape.len() < 2 {
            return Err(self.bad("its elements are interleaved: read all bytes"));
        }
        self.piece(order.place(r), self.row_bytes)
    }

    /// All bytes, in the file's order.
    pub(crate) fn data(&self) -> &'a [u8] {
        self.data
    }

    /// All bytes, in Hugging Face's order.
    ///
    /// # Errors
    /// [`CheckpointError::Tensor`] if its order can't be restored.
    pub fn bytes(&self) -> Result<Cow<'a, [u8]>, CheckpointError> {
        let order = self.entry.order;
        if order == RowOrder::Natural {
            return Ok(Cow::Borrowed(self.data));
        }
        let is_vector = self.entry.shape.len() < 2;
        if is_vector && self.dtype.is_quantised() {
            return Err(self.bad("the elements of a quantised vector can't be put in order"));
        }
        let (pieces, size) = match is_vector {
            true => (self.cols(), self.dtype.block_bytes()),
            false => (self.rows(), self.row_bytes),
        };
        let mut out = Vec::with_capacity(self.data.len());
        for i in 0..pieces {
            out.extend_from_slice(self.piece(order.place(i), size)?);
        }
        Ok(Cow::Owned(out))
    }

    /// The `i`th of pieces of so many bytes.
    fn piece(&self, i: usize, size: usize) -> Result<&'a [u8], CheckpointError> {
        i.checked_mul(size)
            .and_then(|start| self.data.get(start..start.checked_add(size)?))
            .ok_or_else(|| self.bad("its shape contradicts its size"))
    }

    fn bad(&self, reason: impl Into<String>) -> CheckpointError {
        CheckpointError::tensor(self.path, self.name, reason)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_rows_are_put_back() {
        let order = RowOrder::Interleaved { head_dim: 4 };
        assert_eq!((0..8).map(|r| order.place(r)).collect::<Vec<_>>(), [0, 2, 1, 3, 4, 6, 5, 7]);
    }

    fn entry(dtype: DType, shape: &[usize], bytes: u64, order: RowOrder) -> Entry {
        Entry { file: 0, offset: 1, bytes, dtype: Ok(dtype), shape: shape.to_vec(), order }
    }

    #[test]
    fn a_bias_is_put_in_order_by_elements() {
        let order = RowOrder::Interleaved { head_dim: 4 };
        let bias = entry(DType::I8, &[8], 8, order);
        let file = [9, 10, 11, 12, 13, 14, 15, 16, 17, 9];
        let bias = Tensor::new("b", Path::new("f"), &bias, &file).unwrap();
        assert_eq!(*bias.bytes().unwrap(), [10, 12, 11, 13, 14, 16, 15, 17]);
        assert!(bias.row(0).is_err(), "a row would be in the order of the file");
    }

    #[test]
    fn a_quantised_vector_out_of_order_is_refused() {
        let bias = entry(DType::Q8_0, &[32], 34, RowOrder::Interleaved { head_dim: 4 });
        let file = [0; 40];
        assert!(Tensor::new("b", Path::new("f"), &bias, &file).unwrap().bytes().is_err());
    }

    #[test]
    fn rows_end_where_the_tensor_ends() {
        let matrix = entry(DType::I8, &[2, 3], 6, RowOrder::Natural);
        let file = [0, 1, 2, 3, 4, 5, 6, 7];
        let matrix = Tensor::new("m", Path::new("f"), &matrix, &file).unwrap();
        assert_eq!(matrix.row(1).unwrap(), [4, 5, 6]);
        assert!(matrix.row(2).is_err() && matrix.row(usize::MAX).is_err());
    }

    #[test]
    fn a_tensor_without_elements_has_no_rows() {
        let empty = entry(DType::F32, &[1 << 40, 0], 0, RowOrder::Natural);
        assert_eq!(Tensor::new("e", Path::new("f"), &empty, &[0]).unwrap().rows(), 0);
    }
}
