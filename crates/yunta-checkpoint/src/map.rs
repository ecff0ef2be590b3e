//! Read-only memory maps.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use memmap2::Mmap;

use crate::CheckpointError;

/// Maps a file into memory.
pub(crate) fn map(path: &Path) -> Result<Mmap, CheckpointError> {
    let file = File::open(path).map_err(CheckpointError::io(path))?;
    let length = file.metadata().map_err(CheckpointError::io(path))?.len();
    if length == 0 {
        return Err(CheckpointError::malformed(path, "the file is empty"));
    }
    // SAFETY: the map is read-only. Should another process truncate the file while it is mapped,
    // the system ends this one; model files are not changed in place by anything we know.
    unsafe { Mmap::map(&file) }.map_err(CheckpointError::io(path))
}

/// Reads a small text file whole, refusing one that is too large to be what it should.
pub(crate) fn read_text(path: &Path, bytes_max: u64) -> Result<String, CheckpointError> {
    let file = File::open(path).map_err(CheckpointError::io(path))?;
    let mut text = String::new();
    // One byte more than may be there tells whether there is more.
    let read = file.take(bytes_max + 1).read_to_string(&mut text);
    if read.map_err(CheckpointError::io(path))? as u64 > bytes_max {
        let reason = format!("more than the {bytes_max} bytes that make sense here");
        return Err(CheckpointError::malformed(path, reason));
    }
    Ok(text)
}
