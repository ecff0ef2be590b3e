//! Links, groups and collectives between ranks, with a deadline on every wait.
//!
//! Floor 2 of the house: knows nothing of models. Blocking, without threads of its own (but for
//! links with an [`Outbox`]).
//!
//! - [`Link`] is an ordered stream of bytes to one peer: [`StreamLink`] over TCP, or over a local
//!   socket pair for ranks within one process ([`local_mesh`]).
//! - [`connect`] brings the ranks of a mesh together: configuration compared, both sides proven to
//!   know the same token, strangers dropped.
//! - [`Group`] has the collectives. Reductions are folded in rank order: all ranks hold the same
//!   bits. An error is final for the group: it closes its links, so that all ranks learn of it.
//!
//! ```
//! use yunta_comm::{GroupConfig, ReduceOp, local_mesh};
//!
//! let ranks = local_mesh(2, &GroupConfig::default())?;
//! let threads: Vec<_> = ranks
//!     .into_iter()
//!     .map(|mut group| {
//!         std::thread::spawn(move || {
//!             let mut x = [1.0f32, group.rank() as f32];
//!             group.all_reduce(&mut x, ReduceOp::Sum).map(|()| x)
//!         })
//!     })
//!     .collect();
//! for thread in threads {
//!     assert_eq!(thread.join().unwrap()?, [2.0, 1.0]);
//! }
//! # Ok::<(), yunta_comm::CommError>(())
//! ```
#![cfg_attr(not(test), deny(clippy::indexing_slicing))]

mod element;
mod error;
mod exchange;
mod fabric;
mod frame;
mod group;
mod link;
mod measure;
pub mod mlx;
mod names;
mod outbox;
mod reliable;
mod rendezvous;
#[cfg(target_os = "linux")]
mod shm;
mod striped;
mod tls;
mod topology;
mod tuning;
pub mod verbs;

pub use element::{Element, ReduceOp};
pub use error::{CommError, Operation};
pub use fabric::{Fabric, FabricConfig, FabricPort};
#[doc(hidden)]
pub use frame::fuzz_header;
#[cfg(target_os = "linux")]
pub use group::shm_mesh;
pub use group::{AbortHandle, Ends, Group, GroupConfig, local_mesh, mesh_of};
pub use link::{Interest, Link, Socket, StreamLink, Transport, Wait};
pub use measure::{Collective, Pair, Sample, check_pairs, measure};
pub use outbox::Outbox;
pub use reliable::{FramePort, Mended, ReliableLink};
pub use rendezvous::{LinkConfig, MeshConfig, connect, meet, token};
#[cfg(target_os = "linux")]
pub use shm::ShmLink;
pub use topology::Topology;
pub use tuning::Algorithm;
