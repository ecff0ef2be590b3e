//! Data types, quantised formats, CPU kernels and the backend boundary.
//!
//! Floor 1 of the house: knows nothing of files, sockets or models.
//!
//! - [`DType`] names the stored formats, [`dequantise_row`] defines them.
//! - [`Backend`] is what model code computes with; [`CpuBackend`] is ours.
//! - [`WeightSource`] and [`Slice`] say where a weight comes from and which part a rank packs.
//!
//! ```
//! use yunta_tensor::{DType, dequantise_row};
//!
//! // One Q4_0 block: scale 0.5, all codes 9, that is 0.5 * (9 - 8).
//! let mut block = vec![0x99; 18];
//! block[..2].copy_from_slice(&half::f16::from_f32(0.5).to_le_bytes());
//! let mut row = [0.0; 32];
//! dequantise_row(DType::Q4_0, &block, &mut row)?;
//! assert_eq!(row, [0.5; 32]);
//! # Ok::<(), yunta_tensor::TensorError>(())
//! ```

// Kernels index slices whose lengths their callers establish; data from outside is checked before
// it reaches them (`dequantise_row`, `PackedWeight::pack`).

mod backend;
mod cache;
mod cpu;
mod dequant;
mod dtype;
mod error;
mod groups;
mod kernels;
mod packed;
mod pool;

pub use backend::{Attention, Backend, CacheEdit, CacheShape, KV_BLOCK, KvType, Span};
pub use cache::CpuCache;
pub use cpu::{CpuBackend, CpuTensor};
pub use dequant::dequantise_row;
pub use dtype::DType;
pub use error::TensorError;
pub use kernels::InstructionSet;
pub use packed::{PackedWeight, Precision, Slice, WeightSource};
pub use pool::Pool;
