//! Memory that two processes share: two rings, one per direction.
//!
//! Each ring is mapped twice, end to end: what wraps around lies in one piece nevertheless.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};

use super::ring::Control;

/// Bytes of a ring. A message of 64 KiB, the most that is sent in one piece, leaves room for the next.
pub(super) const CAPACITY: usize = 256 << 10;
/// Where the bytes of the rings start: a multiple of any page size.
const DATA: usize = 64 << 10;
const LENGTH: usize = DATA + 2 * CAPACITY;
/// Bytes of address space.
const SPAN: usize = DATA + 4 * CAPACITY;
const CONTROL: usize = size_of::<Control>();
const _: () = assert!(2 * CONTROL <= DATA, "the control blocks fit before the data");

/// A mapping of the region.
pub(super) struct Region(NonNull<u8>);

// SAFETY: the mapping belongs to this value alone; what is in it is shared with another process
// anyway, by the rules of `ring`.
unsafe impl Send for Region {}

impl Region {
    /// New memory, and what to hand to the other process.
    pub(super) fn create() -> io::Result<(Self, OwnedFd)> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = File::from(rustix::fs::memfd_create("yunta-link", flags)?);
        memory.set_len(LENGTH as u64)?;
        // Else the peer could shrink it under us: every access would be a fatal signal.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&memory, seals)?;
        Ok((Self::map(&memory)?, memory.into()))
    }

    /// Memory of another process.
    pub(super) fn open(memory: OwnedFd) -> io::Result<Self> {
        let memory = File::from(memory);
        let seals = rustix::fs::fcntl_get_seals(&memory)?;
        let is_fit = memory.metadata()?.len() == LENGTH as u64
            && seals.contains(SealFlags::SHRINK | SealFlags::GROW);
        if !is_fit {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "unfit shared memory"));
        }
        Self::map(&memory)
    }

    fn map(memory: &File) -> io::Result<Self> {
        // SAFETY: a new mapping, which overlaps none.
        let base = unsafe {
            mmap_anonymous(ptr::null_mut(), SPAN, ProtFlags::empty(), MapFlags::PRIVATE)?
        };
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        let region = Self(base);
        let ring = |i: usize| DATA + i * CAPACITY;
        // Where in the address space, how much, and from where in the memory.
        for (to, length, from) in [
            (0, DATA, 0),
            (ring(0), CAPACITY, ring(0)),
            (ring(1), CAPACITY, ring(0)),
            (ring(2), CAPACITY, ring(1)),
            (ring(3), CAPACITY, ring(1)),
        ] {
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            let access = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: replaces a part of the mapping made above, which nothing uses yet; the sum
            // of the parts is `SPAN`.
            unsafe {
                let at = base.as_ptr().add(to).cast();
                mmap(at, length, access, flags, memory, from as u64)?;
            }
        }
        Ok(region)
    }

    pub(super) fn control(&self, ring: usize) -> &Control {
        // SAFETY: the mapping is page-aligned, holds two control blocks at its start (asserted
        // above), lives as long as `self`, and starts as zeros, which is a valid `Control`: atomics.
        unsafe { &*self.0.as_ptr().add((ring & 1) * CONTROL).cast::<Control>() }
    }

    /// A ring's bytes: `2 * CAPACITY` of them, the second half being the first once more.
    pub(super) fn data(&self, ring: usize) -> NonNull<u8> {
        // SAFETY: the offset is within the mapping.
        unsafe { self.0.add(DATA + (ring & 1) * 2 * CAPACITY) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, made by `map`; all references into it borrow `self`. A failure
        // would leave it mapped, which harms nothing.
        unsafe {
            let _ = munmap(self.0.as_ptr().cast(), SPAN);
        }
    }
}
