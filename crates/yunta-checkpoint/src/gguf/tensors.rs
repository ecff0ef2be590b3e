//! The descriptions of tensors in a GGUF file, checked against the file.

use std::path::Path;

use yunta_tensor::DType;

use super::reader::Reader;
use super::{Metadata, names};
use crate::CheckpointError;
use crate::tensor::{Entry, RowOrder};

const ALIGNMENT_DEFAULT: u64 = 32;
const ALIGNMENT_MAX: u64 = 1 << 20;
/// A hundred times more than any model has.
const TENSORS_MAX: u64 = 1 << 20;

/// A tensor's description as it stands in the file.
struct Info {
    name: String,
    /// Innermost dimension first.
    dims: Vec<u64>,
    kind: u32,
    offset: u64,
}

/// Reads the descriptions, which follow the metadata: canonical names and places in the file of
/// number `file`, which ends at `end`.
pub(crate) fn tensors(
    r: &mut Reader<'_>,
    path: &Path,
    count: u64,
    metadata: &Metadata,
    (file, end): (usize, u64),
) -> Result<Vec<(String, Entry)>, CheckpointError> {
    let infos = infos(r, count)?;
    let alignment = alignment(path, metadata)?;
    let start = (r.position() as u64).next_multiple_of(alignment);
    let placement = Placement { path, start, end, alignment, file };
    let mut tensors = Vec::new();
    let mut extents = Vec::new();
    for info in infos {
        let entry = placement.entry(&info)?;
        extents.push((entry.offset, entry.offset + entry.bytes, tensors.len()));
        tensors.push((names::canonical(&info.name), entry));
    }
    extents.sort_unstable();
    for pair in extents.windows(2) {
        if let [(_, end, first), (start, _, second)] = pair
            && start < end
            && let (Some((first, _)), Some((second, _))) =
                (tensors.get(*first), tensors.get(*second))
        {
            let reason = format!("overlaps tensor `{first}`");
            return Err(CheckpointError::tensor(path, second, reason));
        }
    }
    Ok(tensors)
}

fn infos(r: &mut Reader<'_>, count: u64) -> Result<Vec<Info>, CheckpointError> {
    /// Length of a name, number of dimensions, one dimension, type, offset.
    const LEAST: u64 = 8 + 4 + 8 + 4 + 8;
    r.room_for(count, LEAST, "tensors")?;
    if count > TENSORS_MAX {
        return Err(r.bad(format!("{count} tensors are not meant seriously")));
    }
    let mut infos = Vec::new();
    for _ in 0..count {
        let name = r.string()?;
        let dims = match r.u32()? {
            n @ 1..=4 => (0..n).map(|_| r.u64()).collect::<Result<_, _>>()?,
            n => return Err(r.bad(format!("tensor `{name}` has {n} dimensions (1 to 4 exist)"))),
        };
        infos.push(Info { name, dims, kind: r.u32()?, offset: r.u64()? });
    }
    Ok(infos)
}

fn alignment(path: &Path, metadata: &Metadata) -> Result<u64, CheckpointError> {
    let Some(value) = metadata.get("general.alignment") else { return Ok(ALIGNMENT_DEFAULT) };
    let alignment = value.unsigned().filter(|a| a.is_power_of_two() && *a <= ALIGNMENT_MAX);
    alignment.ok_or_else(|| {
        let reason = format!("general.alignment is no power of two up to {ALIGNMENT_MAX}");
        CheckpointError::malformed(path, reason)
    })
}

/// Where tensors may lie.
struct Placement<'a> {
    path: &'a Path,
    /// Offsets count from here.
    start: u64,
    /// Length of the file.
    end: u64,
    alignment: u64,
    file: usize,
}

impl Placement<'_> {
    /// Checks a description against the file.
    fn entry(&self, info: &Info) -> Result<Entry, CheckpointError> {
        let bad = |reason: String| CheckpointError::tensor(self.path, &info.name, reason);
        let shape = shape(&info.dims).map_err(bad)?;
        let offset = self.offset(info.offset).map_err(bad)?;
        let order = RowOrder::Natural;
        let Some(dtype) = dtype(info.kind) else {
            // Unknown to us, so is its size. The model may do without it.
            let dtype = Err(format!("GGUF type {} is not supported", info.kind));
            return Ok(Entry { file: self.file, offset, bytes: 0, dtype, shape, order });
        };
        let bytes = size(dtype, &shape).map_err(bad)?;
        let left = self.end - offset;
        if bytes > left {
            let missing = bytes - left;
            return Err(bad(format!(
                "ends {missing} bytes behind the end of the file: truncated?"
            )));
        }
        Ok(Entry { file: self.file, offset, bytes, dtype: Ok(dtype), shape, order })
    }

    /// From the beginning of the file, and not behind its end.
    fn offset(&self, offset: u64) -> Result<u64, String> {
        if !offset.is_multiple_of(self.alignment) {
            return Err(format!("offset {offset} is not aligned to {}", self.alignment));
        }
        let place = self.start.checked_add(offset).filter(|place| *place <= self.end);
        place.ok_or_else(|| format!("offset {offset} lies behind the end of the file: truncated?"))
    }
}

/// Outermost dimension first. The product of all does not overflow.
fn shape(dims: &[u64]) -> Result<Vec<usize>, String> {
    let mut elements = 1usize;
    let mut shape = Vec::new();
    for d in dims.iter().rev() {
        let d = usize::try_from(*d).ok().filter(|d| *d > 0);
        let d = d.ok_or_else(|| format!("dimensions {dims:?} make no sense"))?;
        let product = elements.checked_mul(d);
        elements = product.ok_or_else(|| format!("dimensions {dims:?} overflow"))?;
        shape.push(d);
    }
    Ok(shape)
}

/// Bytes of a tensor.
fn size(dtype: DType, shape: &[usize]) -> Result<u64, String> {
    let (cols, outer) = shape.split_last().unwrap_or((&1, &[]));
    let block = dtype.block_elements();
    if !cols.is_multiple_of(block) {
        return Err(format!("rows of {cols} are no whole blocks of {block} ({dtype})"));
    }
    let rows: usize = outer.iter().product();
    let bytes = dtype.row_bytes(*cols).and_then(|row| row.checked_mul(rows));
    bytes.map(|n| n as u64).ok_or_else(|| format!("the size of shape {shape:?} overflows"))
}

/// `ggml_type` numbers.
fn dtype(kind: u32) -> Option<DType> {
    Some(match kind {
        0 => DType::F32,
        1 => DType::F16,
        2 => DType::Q4_0,
        3 => DType::Q4_1,
        6 => DType::Q5_0,
        7 => DType::Q5_1,
        8 => DType::Q8_0,
        10 => DType::Q2K,
        11 => DType::Q3K,
        12 => DType::Q4K,
        13 => DType::Q5K,
        14 => DType::Q6K,
        20 => DType::IQ4NL,
        23 => DType::IQ4XS,
        24 => DType::I8,
        25 => DType::I16,
        26 => DType::I32,
        27 => DType::I64,
        28 => DType::F64,
        30 => DType::BF16,
        39 => DType::MXFP4,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dimensions_are_multiplied_with_care() {
        assert_eq!(shape(&[3, 2]).unwrap(), [2, 3]);
        assert!(shape(&[1 << 40, 1 << 40]).is_err());
        assert!(shape(&[0, 1 << 40]).is_err());
        assert_eq!(size(DType::Q8_0, &[2, 64]).unwrap(), 136);
        assert!(size(DType::Q8_0, &[2, 48]).is_err());
        assert!(size(DType::F64, &[1 << 30, 1 << 33]).is_err());
    }
}
