//! pip as a child process: the user's own configuration, mirrors and proxies hold.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::HubError;

/// A child that writes not a byte for so long has failed. pip's own limits on the network (15 s
/// and five tries unless the user set others) are far shorter.
const STALL: Duration = Duration::from_secs(900);
const POLL: Duration = Duration::from_millis(100);

/// Exit status of [`PIP`] if there is no pip. No program that pip starts uses it.
const NO_PIP: i32 = 77;

/// Runs pip, and ends it when the program that waits for it is gone, however that ended: its
/// standard input is then closed. Nothing is imported from the current folder.
const PIP: &str = r#"
import sys
sys.path[:] = [folder for folder in sys.path if folder]
import importlib.util, os, runpy, threading
if importlib.util.find_spec("pip") is None:
    sys.exit(77)
def end_with_parent():
    os.read(0, 1)
    os._exit(130)
threading.Thread(target=end_with_parent, daemon=True).start()
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"#;

/// Why a package did not come.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Python or pip is missing; what was tried.
    NoInstaller(String),
    /// The package index can't be reached; pip's own words.
    Unreachable(String),
    /// pip failed; its last words.
    Pip(String),
    /// Not a byte came for so many seconds.
    Stalled(u64),
    /// Anything else, with its cause.
    Hub(HubError),
}

impl From<HubError> for Failure {
    fn from(e: HubError) -> Self {
        Self::Hub(e)
    }
}

/// A Python with pip.
#[derive(Debug)]
pub(crate) struct Pip {
    python: PathBuf,
}

impl Pip {
    /// Takes the Python's own pip, or that of a virtual environment made in `scratch`.
    pub(crate) fn find(python: &Path, scratch: &Path) -> Result<Self, Failure> {
        let log = scratch.join("version.log");
        let version = Self { python: python.to_owned() }.run(&["--version".as_ref()], &log, |_| {});
        if version?.code() != Some(NO_PIP) {
            return Ok(Self { python: python.to_owned() });
        }
        let environment = scratch.join("venv");
        let log = scratch.join("venv.log");
        let mut command = Command::new(python);
        command.args(["-m", "venv"]).arg(&environment);
        let status = run(command, &log, scratch, &mut |_| {})?;
        if status.success() {
            return Ok(Self { python: environment.join("bin").join("python") });
        }
        Err(Failure::NoInstaller(format!(
            "{} has no pip, and `-m venv` can't make one:\n{}",
            python.display(),
            last_words(&log)
        )))
    }

    /// Downloads one package into a folder of its own; `arrived` is told of each piece.
    pub(crate) fn download(
        &self,
        package: &str,
        folder: &Path,
        arrived: impl FnMut(u64),
    ) -> Result<PathBuf, Failure> {
        let log = folder.join("pip.log");
        let status = self.run(
            &[
                "download".as_ref(),
                "--no-deps".as_ref(),
                "--only-binary=:all:".as_ref(),
                // A copy in pip's cache would take the same space again.
                "--no-cache-dir".as_ref(),
                "--no-input".as_ref(),
                "--disable-pip-version-check".as_ref(),
                "--progress-bar=off".as_ref(),
                "--dest".as_ref(),
                folder.as_os_str(),
                package.as_ref(),
            ],
            &log,
            arrived,
        )?;
        if status.success() {
            return wheel_in(folder)
                .ok_or_else(|| Failure::Pip(format!("no wheel came; {}", last_words(&log))));
        }
        Err(explain(&log))
    }

    fn run(
        &self,
        args: &[&std::ffi::OsStr],
        log: &Path,
        mut arrived: impl FnMut(u64),
    ) -> Result<ExitStatus, Failure> {
        let folder = log.parent().unwrap_or(Path::new("."));
        let mut command = Command::new(&self.python);
        command.args(["-c", PIP]).args(args);
        run(command, log, folder, &mut arrived)
    }
}

/// Killed when dropped: a download must not outlive the function that waits for it.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It fails only for a child that has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a command to its end, with its output in a file (so that it can't block on a full pipe) and
/// its temporary files in `folder`, where their growth shows how far it is.
fn run(
    mut command: Command,
    log: &Path,
    folder: &Path,
    arrived: &mut dyn FnMut(u64),
) -> Result<ExitStatus, Failure> {
    let out = File::create(log).map_err(HubError::io(log))?;
    let err = out.try_clone().map_err(HubError::io(log))?;
    command.env("TMPDIR", folder).stdin(Stdio::piped()).stdout(out).stderr(err);
    let program = command.get_program().display().to_string();
    let failed = |e| Failure::NoInstaller(format!("{program} could not be run: {e}"));
    let mut child = Running(command.spawn().map_err(failed)?);
    let mut last_growth = Instant::now();
    let mut most = 0;
    loop {
        let status = child.0.try_wait().map_err(failed)?;
        let size = size_below(folder, 4);
        if size > most {
            arrived(size - most);
            most = size;
            last_growth = Instant::now();
        }
        if let Some(status) = status {
            return Ok(status);
        }
        if last_growth.elapsed() > STALL {
            return Err(Failure::Stalled(STALL.as_secs()));
        }
        std::thread::sleep(POLL);
    }
}

/// Bytes of all files below a folder, some levels deep.
fn size_below(folder: &Path, depth: u32) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(m) if m.is_dir() && depth > 0 => size_below(&entry.path(), depth - 1),
        Ok(m) => m.len(),
        Err(_) => 0,
    };
    entries.map(size).sum()
}

fn wheel_in(folder: &Path) -> Option<PathBuf> {
    let mut files = fs::read_dir(folder).ok()?.filter_map(|e| Some(e.ok()?.path()));
    files.find(|p| p.extension().is_some_and(|e| e == "whl"))
}

/// pip says "no matching distribution" also when it could ask nobody: its warnings tell.
fn explain(log: &Path) -> Failure {
    let text = fs::read_to_string(log).unwrap_or_default();
    let cause = text.lines().rev().find_map(|line| {
        let broken = line.split_once("connection broken by ").map(|(_, cause)| cause);
        broken.or_else(|| line.contains("Could not fetch URL").then_some(line))
    });
    match cause {
        Some(cause) => Failure::Unreachable(cause.trim().to_owned()),
        None => Failure::Pip(last_words(log)),
    }
}

/// The last lines of a log.
fn last_words(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().filter(|l| !l.trim().is_empty()).collect();
    lines.get(lines.len().saturating_sub(6)..).unwrap_or_default().join("\n")
}
