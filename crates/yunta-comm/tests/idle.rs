//! Ranks that wait leave the cores to those that compute.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use yunta_comm::{CommError, Fabric, FabricConfig, Group, GroupConfig, local_mesh, shm_mesh};

/// Processor time of this thread so far.
fn spent() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for the call.
    let code = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    assert_eq!(code, 0);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[test]
fn a_rank_that_waits_leaves_its_core_alone() {
    let wait = Duration::from_secs(2);
    let config = GroupConfig { timeout: wait, ..GroupConfig::default() };
    let worlds: [(&str, Vec<Group>); 3] = [
        ("sockets", local_mesh(2, &config).unwrap()),
        ("shm", shm_mesh(2, &config).unwrap()),
        ("emulated", Fabric::new(FabricConfig::default()).mesh(2, &config).unwrap()),
    ];
    for (name, mut ranks) in worlds {
        let before = spent();
        let outcome = ranks[0].barrier();
        let used = spent() - before;
        assert!(matches!(outcome, Err(CommError::Timeout { .. })), "{name}: {outcome:?}");
        // A debug build, on a busy machine: twice what is promised. The emulated device must be
        // looked at, and is looked at often in the first moments.
        let most = if name == "emulated" { wait / 20 } else { wait / 50 };
        assert!(used < most, "{name}: {used:?} of {wait:?}");
    }
}
