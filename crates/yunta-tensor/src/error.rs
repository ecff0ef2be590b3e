//! What can go wrong with tensors.

use crate::DType;

/// The bytes of a row of `cols` elements must be so many.
///
/// # Errors
/// [`TensorError::NotAWeight`] if no row of that length exists, [`TensorError::RowBytes`] if it has
/// another size.
pub(crate) fn check_row(dtype: DType, cols: usize, got: usize) -> Result<(), TensorError> {
    let expected = dtype.row_bytes(cols).ok_or(TensorError::NotAWeight { dtype, cols })?;
    if got == expected { Ok(()) } else { Err(TensorError::RowBytes { dtype, cols, expected, got }) }
}

/// Errors of this crate. All are caused by data from outside (a model file that disagrees with
/// its own description) or by the system refusing a resource.
#[derive(Debug, thiserror::Error)]
pub enum TensorError {
    /// The bytes of a row are not those of `cols` elements.
    #[error("a row of {cols} {dtype} elements has {got} bytes, expected {expected}")]
    RowBytes {
        /// Stored type.
        dtype: DType,
        /// Elements per row.
        cols: usize,
        /// Bytes expected.
        expected: usize,
        /// Bytes found.
        got: usize,
    },
    /// The type can't be used as a weight.
    #[error("{dtype} is no weight type (rows of {cols})")]
    NotAWeight {
        /// Stored type.
        dtype: DType,
        /// Elements per row.
        cols: usize,
    },
    /// A slice of the columns does not lie on the borders of cells.
    #[error("columns {start}..{end} of {cols} are no run of whole cells")]
    BadColumns {
        /// First column.
        start: usize,
        /// One past the last column.
        end: usize,
        /// Columns there are.
        cols: usize,
    },
    /// The source of a weight failed.
    #[error("{0}")]
    Source(String),
    /// A span goes beyond its sequence's table of blocks.
    #[error("sequence slot {slot} is full: {capacity} tokens are all that its blocks hold")]
    CacheFull {
        /// Slot.
        slot: usize,
        /// Tokens it can hold.
        capacity: usize,
    },
    /// A block outside the pool.
    #[error("KV cache block {block} is none of {blocks}")]
    NoSuchBlock {
        /// The block named.
        block: u32,
        /// Blocks there are.
        blocks: usize,
    },
    /// A sequence's table names a block that was never written.
    #[error("KV cache block {block} of sequence slot {slot} was never written")]
    EmptyBlock {
        /// Slot.
        slot: usize,
        /// Block.
        block: u32,
    },
    /// Saved contents of a block are of another shape.
    #[error("a saved KV cache block has {got} bytes, expected {expected}")]
    BlockBytes {
        /// Bytes expected.
        expected: usize,
        /// Bytes found.
        got: usize,
    },
    /// A worker thread could not be started.
    #[error("a compute thread could not be started: {0}")]
    Thread(#[from] std::io::Error),
}
