//! Ctrl-C: while something is generated it stops that; else, or pressed again, it ends the program.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Exit status of a program that Ctrl-C ended.
const INTERRUPTED: i32 = 130;

/// Remembers that Ctrl-C was pressed.
#[derive(Clone, Default)]
pub(crate) struct Interrupt {
    pressed: Arc<AtomicBool>,
    generating: Arc<AtomicBool>,
}

/// While it lives, Ctrl-C stops what is generated instead of the program.
pub(crate) struct Generating<'a>(&'a Interrupt);

impl Interrupt {
    /// Listens for Ctrl-C from now on. (The workers of a process that ends end with it.)
    pub(crate) fn install() -> std::io::Result<Self> {
        let interrupt = Self::default();
        let seen = interrupt.clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        std::thread::Builder::new().name("interrupt".to_owned()).spawn(move || {
            runtime.block_on(async {
                while tokio::signal::ctrl_c().await.is_ok() {
                    let again = seen.pressed.swap(true, Ordering::SeqCst);
                    if again || !seen.generating.load(Ordering::SeqCst) {
                        eprintln!();
                        std::process::exit(INTERRUPTED);
                    }
                }
            });
        })?;
        Ok(interrupt)
    }

    /// Something is being generated from now on.
    pub(crate) fn generating(&self) -> Generating<'_> {
        self.pressed.store(false, Ordering::SeqCst);
        self.generating.store(true, Ordering::SeqCst);
        Generating(self)
    }
}

impl Generating<'_> {
    /// Whether Ctrl-C was pressed meanwhile.
    pub(crate) fn is_interrupted(&self) -> bool {
        self.0.pressed.load(Ordering::SeqCst)
    }
}

impl Drop for Generating<'_> {
    fn drop(&mut self) {
        self.0.generating.store(false, Ordering::SeqCst);
    }
}
