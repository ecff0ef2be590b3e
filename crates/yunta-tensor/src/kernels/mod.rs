//! Kernels, written once over [`simd`] and compiled for each instruction set.

pub(crate) mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
pub(crate) mod dense;
pub(crate) mod int;
pub(crate) mod kv;
#[cfg(target_arch = "aarch64")]
mod neon;
pub(crate) mod rows;
pub(crate) mod simd;

use simd::Job;

/// An instruction set found on this processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionSet {
    /// No particular instructions: what the compiler makes of plain loops.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AArch64 with Advanced SIMD (every AArch64 processor that runs an operating system).
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl InstructionSet {
    /// The best that this processor has.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        if std::is_x86_feature_detected!("avx2")
            && std::is_x86_feature_detected!("fma")
            && std::is_x86_feature_detected!("f16c")
        {
            return Self::Avx2;
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            return Self::Neon;
        }
        #[allow(unreachable_code)]
        Self::Portable
    }
}

/// Runs a kernel on an instruction set.
///
/// # Safety
/// `isa` must come from [`InstructionSet::detect`] or be `Portable`; the rest is the job's.
pub(crate) unsafe fn dispatch<J: Job>(isa: InstructionSet, job: &mut J) {
    // SAFETY: the instruction set is there (the caller's promise); the rest is the caller's too.
    unsafe {
        match isa {
            InstructionSet::Portable => job.run::<simd::Portable>(),
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => run_avx2(job),
            #[cfg(target_arch = "aarch64")]
            InstructionSet::Neon => job.run::<neon::Neon>(),
        }
    }
}

/// # Safety
/// That of [`dispatch`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_avx2<J: Job>(job: &mut J) {
    // SAFETY: the caller's.
    unsafe { job.run::<avx2::Avx2>() };
}
