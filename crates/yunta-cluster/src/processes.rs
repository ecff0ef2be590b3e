//! The worker processes of one epoch.

use std::io::BufReader;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::Sender;

use yunta_engine::wire::{read_line, write_line};

use crate::ClusterError;
use crate::control::{Assignment, FromWorker, ToWorker};

/// What a worker did, and of which epoch and rank it is.
pub(crate) struct Report {
    pub(crate) epoch: u64,
    pub(crate) rank: usize,
    pub(crate) what: What,
}

pub(crate) enum What {
    Said(FromWorker),
    /// The process ended: how, and whether by a signal.
    Exited(String, bool),
}

struct Worker {
    pid: u32,
    stdin: ChildStdin,
}

/// The processes of an epoch; killed when dropped.
pub(crate) struct Processes {
    workers: Vec<Worker>,
}

impl Processes {
    /// Starts one process per assignment: `program worker`, in a process group of its own, so that
    /// a Ctrl-C at the terminal reaches the supervisor alone.
    pub(crate) fn spawn(
        program: &Path,
        assignments: Vec<Assignment>,
        reports: &Sender<Report>,
    ) -> Result<Self, ClusterError> {
        let mut processes = Self { workers: Vec::new() };
        for assignment in assignments {
            let (rank, epoch) = (assignment.rank, assignment.epoch);
            let failed = |source| ClusterError::Spawn {
                rank,
                program: program.display().to_string(),
                source,
            };
            let mut child = Command::new(program)
                .arg("worker")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .process_group(0)
                .spawn()
                .map_err(failed)?;
            let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
                let _ = child.kill();
                return Err(failed(std::io::Error::other("no pipes")));
            };
            let mut worker = Worker { pid: child.id(), stdin };
            let reports = reports.clone();
            let watch = move || watch(child, BufReader::new(stdout), epoch, rank, &reports);
            std::thread::Builder::new()
                .name(format!("rank-{rank}"))
                .spawn(watch)
                .map_err(failed)?;
            let sent = write_line(&mut worker.stdin, &ToWorker::Assignment(Box::new(assignment)));
            processes.workers.push(worker);
            // A worker that died at once is reported by its watcher; nothing to add.
            if let Err(e) = sent {
                tracing::debug!(rank, error = %e, "assignment not delivered");
            }
        }
        Ok(processes)
    }

    /// Sends a message to all workers. One that can't be reached is reported by its watcher.
    pub(crate) fn tell_all(&mut self, message: &ToWorker) {
        for worker in &mut self.workers {
            if let Err(e) = write_line(&mut worker.stdin, message) {
                tracing::debug!(pid = worker.pid, error = %e, "message not delivered");
            }
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for worker in &self.workers {
            if let Ok(pid) = libc::pid_t::try_from(worker.pid) {
                // SAFETY: a plain system call. The watcher reaps the process only after its output
                // ended, and a worker's output ends with it; if it has been reaped already, its
                // number may at worst have been taken by a process of the last milliseconds.
                unsafe { libc::kill(pid, libc::SIGKILL) };
            }
        }
    }
}

/// Reports all that a worker says, and its end; reaps it.
fn watch(
    mut child: Child,
    mut stdout: BufReader<std::process::ChildStdout>,
    epoch: u64,
    rank: usize,
    reports: &Sender<Report>,
) {
    let tell = |what| {
        // Nobody listens when the instance is being dropped.
        let _ = reports.send(Report { epoch, rank, what });
    };
    loop {
        match read_line::<FromWorker>(&mut stdout) {
            Ok(Some(message)) => tell(What::Said(message)),
            Ok(None) => break,
            Err(e) => {
                tracing::warn!(rank, error = %e, "a worker says what can't be understood");
                let _ = child.kill();
                break;
            }
        }
    }
    let (how, signal) = match child.wait() {
        Ok(status) => describe(child.id(), status),
        Err(e) => (format!("(process {}) is lost: {e}", child.id()), false),
    };
    tell(What::Exited(how, signal));
}

fn describe(pid: u32, status: ExitStatus) -> (String, bool) {
    match (status.signal(), status.code()) {
        (Some(signal), _) => (format!("(process {pid}) was killed by signal {signal}"), true),
        (None, Some(code)) => (format!("(process {pid}) exited with code {code}"), false),
        (None, None) => (format!("(process {pid}) ended: {status}"), false),
    }
}
