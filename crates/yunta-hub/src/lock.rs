//! One process at a time fetches a model; the others wait and then find it.

use std::fs::{self, File, TryLockError};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::{HubError, Progress};

/// A large model over a slow line takes hours.
const WAIT: Duration = Duration::from_secs(12 * 3600);
const POLL: Duration = Duration::from_millis(100);

/// Held until dropped; the system frees it when the process ends, however it ends.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Waits for other processes that fetch the same model, and says so.
    pub(crate) fn acquire(path: &Path, progress: &dyn Progress) -> Result<Self, HubError> {
        Self::acquire_within(path, progress, WAIT)
    }

    fn acquire_within(
        path: &Path,
        progress: &dyn Progress,
        wait: Duration,
    ) -> Result<Self, HubError> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(HubError::io(folder))?;
        }
        let file = File::create(path).map_err(HubError::io(path))?;
        let start = Instant::now();
        let mut told = false;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self { _file: file }),
                Err(TryLockError::Error(e)) => return Err(HubError::io(path)(e)),
                Err(TryLockError::WouldBlock) if start.elapsed() >= wait => {
                    return Err(HubError::Busy { lock: path.into(), seconds: wait.as_secs() });
                }
                Err(TryLockError::WouldBlock) => {}
            }
            if !told {
                progress.message("another process is fetching this model; waiting for it");
                told = true;
            }
            std::thread::sleep(POLL);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Silent;

    #[test]
    fn waiting_for_another_process_has_an_end() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("locks/toy.lock");
        let first = Lock::acquire(&path, &Silent).unwrap();
        let second = Lock::acquire_within(&path, &Silent, Duration::ZERO);
        assert!(matches!(second, Err(HubError::Busy { .. })), "{second:?}");
        drop(first);
        Lock::acquire_within(&path, &Silent, Duration::ZERO).unwrap();
    }
}
