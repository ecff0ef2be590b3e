//! Reads a rank's slices of a checkpoint into a backend.

use std::ops::Range;

use yunta_checkpoint::{Checkpoint, Tensor};
use yunta_tensor::{Backend, DType, Slice, WeightSource, dequantise_row};

use crate::ModelError;

/// How a weight `[outputs, inputs]` is shared among the ranks of a tensor group.
pub(crate) enum Split {
    /// By output features (rows): each rank computes its own features.
    Output(Range<usize>),
    /// By input features (columns), in cells of so many: each rank computes partial sums of all
    /// outputs, and a reduction follows.
    Input(Range<usize>, usize),
}

/// A linear layer on a backend.
pub(crate) struct Linear<B: Backend> {
    pub(crate) weight: B::Weight,
    /// Of this rank's outputs.
    pub(crate) bias: Option<B::Tensor>,
}

impl<B: Backend> Linear<B> {
    /// As [`Backend::linear`] takes it.
    pub(crate) fn parts(&self) -> (&B::Weight, Option<&B::Tensor>) {
        (&self.weight, self.bias.as_ref())
    }
}

/// Loads tensors by name, checking their shapes.
pub(crate) struct Loader<'a, B: Backend> {
    checkpoint: &'a Checkpoint,
    pub(crate) backend: &'a mut B,
    progress: &'a mut dyn FnMut(u64),
    bytes: u64,
}

struct Source<'a>(Tensor<'a>);

impl WeightSource for Source<'_> {
    fn rows(&self) -> usize {
        self.0.rows()
    }
    fn cols(&self) -> usize {
        self.0.cols()
    }
    fn dtype(&self) -> DType {
        self.0.dtype()
    }
    fn row(&self, r: usize) -> Result<&[u8], String> {
        self.0.row(r).map_err(|e| e.to_string())
    }
}

impl<'a, B: Backend> Loader<'a, B> {
    pub(crate) fn new(
        checkpoint: &'a Checkpoint,
        backend: &'a mut B,
        progress: &'a mut dyn FnMut(u64),
    ) -> Self {
        Self { checkpoint, backend, progress, bytes: 0 }
    }

    pub(crate) fn contains(&self, name: &str) -> bool {
        self.checkpoint.contains(name)
    }

    /// Bytes loaded so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The tensor, if its shape is `[rows, cols]` (or `[cols]`, for one row).
    fn tensor(&self, name: &str, expected: [usize; 2]) -> Result<Tensor<'a>, ModelError> {
        let tensor = self.checkpoint.tensor(name)?;
        if [tensor.rows(), tensor.cols()] != expected {
            return Err(ModelError::Shape {
                file: self.checkpoint.path().display().to_string(),
                tensor: name.to_owned(),
                expected,
                got: tensor.shape().to_vec(),
            });
        }
        Ok(tensor)
    }

    /// This rank's slice of a weight of shape `[outputs, inputs]`.
    pub(crate) fn weight(
        &mut self,
        name: &str,
        [outputs, inputs]: [usize; 2],
        split: &Split,
    ) -> Result<B::Weight, ModelError> {
        let source = Source(self.tensor(name, [outputs, inputs])?);
        let slice = match split {
            Split::Output(rows) => Slice { rows: rows.clone(), cols: 0..inputs, cell: None },
            Split::Input(cols, cell) => {
                Slice { rows: 0..outputs, cols: cols.clone(), cell: Some(*cell) }
            }
        };
        let weight = self
            .backend
            .weight(&source, &slice)
            .map_err(|source| ModelError::Weight { tensor: name.to_owned(), source })?;
        self.loaded(self.backend.weight_bytes(&weight));
        Ok(weight)
    }

    /// A linear layer `name.weight`, with `name.bias` if the checkpoint has it.
    pub(crate) fn linear(
        &mut self,
        name: &str,
        shape: [usize; 2],
        split: &Split,
    ) -> Result<Linear<B>, ModelError> {
        let weight = self.weight(&format!("{name}.weight"), shape, split)?;
        let outputs = match split {
            Split::Output(rows) => rows.clone(),
            Split::Input(..) => 0..shape[0],
        };
        let bias = format!("{name}.bias");
        let bias =
            if self.contains(&bias) { Some(self.vector(&bias, shape[0], outputs)?) } else { None };
        Ok(Linear { weight, bias })
    }

    /// Elements `part` of a vector of `len`.
    pub(crate) fn vector(
        &mut self,
        name: &str,
        len: usize,
        part: Range<usize>,
    ) -> Result<B::Tensor, ModelError> {
        let tensor = self.tensor(name, [1, len])?;
        let mut values = vec![0.0; len];
        dequantise_row(tensor.dtype(), &tensor.bytes()?, &mut values)
            .map_err(|source| ModelError::Weight { tensor: name.to_owned(), source })?;
        let part = values.get(part).unwrap_or_default().to_vec();
        self.loaded(4 * part.len());
        let cols = part.len();
        Ok(self.backend.tensor(part, cols))
    }

    fn loaded(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        (self.progress)(self.bytes);
    }
}
