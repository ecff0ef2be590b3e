//! How a download shows itself.

use std::sync::{Mutex, PoisonError};

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};

/// Told what a download does. Files come one after the other: `start`, `advance` many times,
/// `finish`; `finish` comes also when the download fails.
pub trait Progress {
    /// A file begins; its size in bytes, if it is known.
    fn start(&self, total: Option<u64>, what: &str);
    /// So many bytes more are there.
    fn advance(&self, bytes: u64);
    /// No more comes of this file.
    fn finish(&self);
    /// Something the user should know.
    fn message(&self, text: &str);
}

/// Shows nothing.
#[derive(Clone, Copy, Debug)]
pub struct Silent;

impl Progress for Silent {
    fn start(&self, _: Option<u64>, _: &str) {}
    fn advance(&self, _: u64) {}
    fn finish(&self) {}
    fn message(&self, _: &str) {}
}

/// A bar on standard error; if that is no terminal, one line per file.
#[derive(Debug, Default)]
pub struct TerminalProgress {
    bar: Mutex<Option<ProgressBar>>,
}

impl TerminalProgress {
    /// Nothing is shown before the first file begins.
    pub fn new() -> Self {
        Self::default()
    }

    fn bar(&self) -> Option<ProgressBar> {
        self.bar.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_bar(&self, bar: Option<ProgressBar>) {
        *self.bar.lock().unwrap_or_else(PoisonError::into_inner) = bar;
    }
}

impl Progress for TerminalProgress {
    fn start(&self, total: Option<u64>, what: &str) {
        let (bar, template) = match total {
            Some(n) => (
                ProgressBar::new(n),
                "fetching {msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            ),
            None => (ProgressBar::new_spinner(), "fetching {msg} {spinner} {bytes}"),
        };
        if bar.is_hidden() {
            let size = total.map(|n| format!(" ({})", HumanBytes(n))).unwrap_or_default();
            eprintln!("fetching {what}{size}");
        }
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(what.to_owned());
        self.set_bar(Some(bar));
    }

    fn advance(&self, bytes: u64) {
        if let Some(bar) = self.bar() {
            bar.inc(bytes);
        }
    }

    fn finish(&self) {
        if let Some(bar) = self.bar() {
            bar.finish_and_clear();
        }
        self.set_bar(None);
    }

    fn message(&self, text: &str) {
        match self.bar() {
            Some(bar) => bar.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }
}

/// A file under way: finished when dropped, whatever happens.
pub(crate) struct Transfer<'a> {
    progress: &'a dyn Progress,
}

impl<'a> Transfer<'a> {
    pub(crate) fn start(progress: &'a dyn Progress, total: Option<u64>, what: &str) -> Self {
        progress.start(total, what);
        Self { progress }
    }

    pub(crate) fn advance(&self, bytes: u64) {
        self.progress.advance(bytes);
    }
}

impl Drop for Transfer<'_> {
    fn drop(&mut self) {
        self.progress.finish();
    }
}
