//! Collectives over an emulated fabric that loses, doubles and damages frames.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use proptest::prelude::*;
use yunta_comm::{CommError, Fabric, FabricConfig, Group, GroupConfig, ReduceOp};

fn on_all<R: Send + 'static>(
    fabric: &Fabric,
    size: usize,
    timeout: Duration,
    work: impl Fn(&mut Group) -> R + Send + Clone + 'static,
) -> Vec<R> {
    let config = GroupConfig { timeout, epoch: 5, ..GroupConfig::default() };
    let threads: Vec<_> = fabric
        .mesh(size, &config)
        .unwrap()
        .into_iter()
        .map(|mut group| {
            let work = work.clone();
            std::thread::spawn(move || work(&mut group))
        })
        .collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

/// Several collectives in a row; every value checked.
fn work(group: &mut Group, len: usize) -> Result<(), CommError> {
    let (rank, size) = (group.rank(), group.size());
    let sum = |i: usize| (0..size).map(|r| ((i + r) % 17) as f32).sum::<f32>();
    for round in 0..3 {
        let mut x: Vec<f32> = (0..len).map(|i| ((i + rank) % 17) as f32).collect();
        group.all_reduce(&mut x, ReduceOp::Sum)?;
        assert!(x.iter().enumerate().all(|(i, v)| *v == sum(i)));
        let mut all = vec![0; size];
        group.all_gather(&[rank as u64 + round], &vec![1; size], &mut all)?;
        assert!(all.iter().enumerate().all(|(r, v)| *v == r as u64 + round));
    }
    group.barrier()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn faults_of_the_fabric_never_reach_a_tensor(
        seed: u64, size in 2usize..5, len in 1usize..20_000,
        loss in 0.0f64..0.1, duplication in 0.0f64..0.1, corruption in 0.0f64..0.1,
        frame_max in 64usize..5000, depth in 2usize..80,
    ) {
        let config = FabricConfig {
            seed, loss, duplication, corruption, frame_max: frame_max.max(len / 20), depth,
            ..FabricConfig::default()
        };
        let fabric = Fabric::new(config);
        let outcomes = on_all(&fabric, size, Duration::from_secs(20), move |g| work(g, len));
        for outcome in outcomes {
            prop_assert!(outcome.is_ok(), "{:?}", outcome);
        }
    }
}

#[test]
fn credits_keep_frames_from_absent_receives() {
    for depth in [1, 3, 64] {
        let fabric = Fabric::new(FabricConfig { depth, ..FabricConfig::default() });
        let outcomes = on_all(&fabric, 3, Duration::from_secs(20), |g| work(g, 300_000));
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        assert_eq!(fabric.refused(), 0);
    }
}

#[test]
fn a_cut_cable_is_named_within_the_bound() {
    let fabric = Fabric::new(FabricConfig::default());
    // Between ranks 1 and 2.
    fabric.cut(2);
    let bound = Duration::from_millis(400);
    let start = std::time::Instant::now();
    let outcomes = on_all(&fabric, 3, bound, Group::barrier);
    assert!(start.elapsed() < bound + Duration::from_secs(3));
    let named = outcomes.iter().filter_map(|o| o.as_ref().err()).any(|e| {
        matches!(e, CommError::Timeout { rank: 1, peer: 2, link, .. } if link.contains("cable 2"))
            || matches!(e, CommError::Timeout { rank: 2, peer: 1, link, .. } if link.contains("cable 2"))
    });
    assert!(named, "{outcomes:?}");
}

#[test]
fn a_cable_that_is_mended_in_time_loses_nothing() {
    let fabric = Fabric::new(FabricConfig::default());
    fabric.cut(0);
    let mending = fabric.clone();
    let mender = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        mending.mend(0);
    });
    let outcomes = on_all(&fabric, 2, Duration::from_secs(10), |g| work(g, 50_000));
    mender.join().unwrap();
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
}
