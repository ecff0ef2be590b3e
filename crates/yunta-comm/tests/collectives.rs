//! Collectives against a serial reference: every element type, odd sizes, worlds of 1 to 8.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use half::{bf16, f16};
use proptest::prelude::*;
use yunta_comm::{CommError, Element, Group, GroupConfig, ReduceOp, local_mesh};

/// Runs `work` on every rank of a world; the results in rank order.
fn on_all<R: Send + 'static>(
    size: usize,
    work: impl Fn(&mut Group) -> Result<R, CommError> + Send + Sync + Clone + 'static,
) -> Vec<R> {
    let config =
        GroupConfig { timeout: std::time::Duration::from_secs(20), ..GroupConfig::default() };
    let threads: Vec<_> = local_mesh(size, &config)
        .unwrap()
        .into_iter()
        .map(|mut group| {
            let work = work.clone();
            std::thread::spawn(move || work(&mut group))
        })
        .collect();
    threads.into_iter().map(|t| t.join().unwrap().unwrap()).collect()
}

/// Data of a rank: small whole numbers, so that sums are exact in every type.
trait Toy: Element + std::fmt::Debug {
    fn of(n: u64) -> Self;
    /// The reference: folds in rank order.
    fn fold(values: &[Self], op: ReduceOp) -> Self;
}

macro_rules! toys {
    ($($t:ty, $of:expr, $add:expr;)*) => {$(
        impl Toy for $t {
            fn of(n: u64) -> Self {
                $of(n)
            }
            fn fold(values: &[Self], op: ReduceOp) -> Self {
                values[1..].iter().fold(values[0], |a, b| match op {
                    ReduceOp::Sum => $add(a, *b),
                    ReduceOp::Max => if *b > a { *b } else { a },
                    ReduceOp::Min => if *b < a { *b } else { a },
                })
            }
        }
    )*};
}

toys! {
    f32, |n| (n % 97) as f32 - 48.0, |a, b| a + b;
    f64, |n| (n % 97) as f64 - 48.0, |a, b| a + b;
    f16, |n| f16::from_f32((n % 97) as f32 - 48.0), |a: f16, b: f16| f16::from_f32(a.to_f32() + b.to_f32());
    bf16, |n| bf16::from_f32((n % 29) as f32 - 14.0), |a: bf16, b: bf16| bf16::from_f32(a.to_f32() + b.to_f32());
    i8, |n| n as i8, i8::wrapping_add;
    i16, |n| n as i16, i16::wrapping_add;
    i32, |n| n as i32, i32::wrapping_add;
    i64, |n| n as i64, i64::wrapping_add;
    u8, |n| n as u8, u8::wrapping_add;
    u16, |n| n as u16, u16::wrapping_add;
    u32, |n| n as u32, u32::wrapping_add;
    u64, |n| n, u64::wrapping_add;
}

fn data<T: Toy>(rank: usize, len: usize, seed: u64) -> Vec<T> {
    let at = |i: usize| seed.wrapping_add(rank as u64 * 1_000_003).wrapping_add(i as u64 * 7919);
    (0..len).map(|i| T::of(at(i) % 100_000)).collect()
}

/// All collectives of one type, in a row on the same group.
fn check<T: Toy>(size: usize, len: usize, seed: u64, op: ReduceOp) {
    let counts: Vec<usize> = (0..size).map(|r| (seed as usize + r * 5) % 4 * len / 3).collect();
    let total: usize = counts.iter().sum();
    let root = seed as usize % size;
    let of_all = |len: usize| -> Vec<Vec<T>> { (0..size).map(|r| data(r, len, seed)).collect() };
    let reduced = |len: usize| -> Vec<T> {
        let all = of_all(len);
        let column = |i: usize| all.iter().map(|d| d[i]).collect::<Vec<_>>();
        (0..len).map(|i| T::fold(&column(i), op)).collect()
    };
    let starts: Vec<usize> =
        counts.iter().scan(0, |at, c| Some(std::mem::replace(at, *at + c))).collect();
    let gathered: Vec<T> = (0..size).flat_map(|r| data::<T>(r, counts[r], seed)).collect();

    let my_counts = counts.clone();
    let results = on_all(size, move |group| {
        let (rank, counts) = (group.rank(), &my_counts);
        let mut all_reduce = data::<T>(rank, len, seed);
        group.all_reduce(&mut all_reduce, op)?;
        let mut all_gather = vec![T::of(0); total];
        group.all_gather(&data::<T>(rank, counts[rank], seed), counts, &mut all_gather)?;
        let mut scattered = vec![T::of(0); counts[rank]];
        group.reduce_scatter(&data::<T>(rank, total, seed), counts, &mut scattered, op)?;
        let mut broadcast = data::<T>(rank, len, seed);
        group.broadcast(&mut broadcast, root)?;
        let mut gathered = vec![T::of(0); if rank == root { total } else { 0 }];
        group.gather(&data::<T>(rank, counts[rank], seed), counts, &mut gathered, root)?;
        let mut message = format!("from {rank}").into_bytes();
        group.broadcast_bytes(&mut message, root)?;
        group.barrier()?;
        Ok((all_reduce, all_gather, scattered, broadcast, gathered, message))
    });
    let sum = reduced(len);
    let sums = reduced(total);
    for (rank, (all_reduce, all_gather, scattered, broadcast, at_root, message)) in
        results.into_iter().enumerate()
    {
        assert_eq!(all_reduce, sum, "all_reduce");
        assert_eq!(all_gather, gathered, "all_gather");
        assert_eq!(scattered, sums[starts[rank]..starts[rank] + counts[rank]], "reduce_scatter");
        assert_eq!(broadcast, data::<T>(root, len, seed), "broadcast");
        assert_eq!(at_root, if rank == root { gathered.clone() } else { Vec::new() }, "gather");
        assert_eq!(message, format!("from {root}").into_bytes(), "broadcast_bytes");
    }
}

fn check_kind(kind: usize, size: usize, len: usize, seed: u64, op: ReduceOp) {
    let checks: [fn(usize, usize, u64, ReduceOp); 12] = [
        check::<f32>,
        check::<f64>,
        check::<f16>,
        check::<bf16>,
        check::<i8>,
        check::<i16>,
        check::<i32>,
        check::<i64>,
        check::<u8>,
        check::<u16>,
        check::<u32>,
        check::<u64>,
    ];
    checks[kind](size, len, seed, op);
}

const OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];

#[test]
fn every_type_in_every_world_at_the_odd_sizes() {
    for kind in 0..12 {
        for size in 1..=8 {
            let len = [0, 1, 3, 7, 1023, 4097][(kind + size) % 6];
            check_kind(kind, size, len, 17 * size as u64, OPS[(kind + size) % 3]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn collectives_are_what_a_serial_loop_computes(
        kind in 0usize..12, size in 1usize..=8, len in 0usize..2000, seed: u32, op in 0usize..3,
    ) {
        check_kind(kind, size, len, seed.into(), OPS[op]);
    }
}

/// Beyond one message: reduce-scatter and all-gather, both sides sending at once.
#[test]
fn large_reductions_take_the_other_algorithm_and_do_not_block() {
    for size in [2, 3, 5] {
        let len = (3 << 20) + 5;
        let sums = on_all(size, move |group| {
            let mut x: Vec<f32> = (0..len).map(|i| ((i + group.rank()) % 11) as f32).collect();
            group.all_reduce(&mut x, ReduceOp::Sum)?;
            Ok(x)
        });
        let expected = |i: usize| (0..size).map(|r| ((i + r) % 11) as f32).sum::<f32>();
        for x in &sums {
            assert!(x.iter().enumerate().all(|(i, v)| *v == expected(i)));
        }
    }
}

/// Values whose sum depends on the order: all ranks get the bits of the fold in rank order.
#[test]
fn all_ranks_hold_the_same_bits() {
    for len in [5, 100_000] {
        let values = |rank: usize, i: usize| 10f32.powi((rank as i32 * 5 + i as i32) % 9 - 4) / 3.0;
        let results = on_all(6, move |group| {
            let mut x: Vec<f32> = (0..len).map(|i| values(group.rank(), i)).collect();
            group.all_reduce(&mut x, ReduceOp::Sum)?;
            Ok(x.iter().map(|v| v.to_bits()).collect::<Vec<_>>())
        });
        let fold = |i: usize| (1..6).fold(values(0, i), |a, r| a + values(r, i)).to_bits();
        let expected: Vec<u32> = (0..len).map(fold).collect();
        assert!(results.iter().all(|r| *r == expected));
    }
}

/// Stages of two ranks within a world of four, used in turn with it.
#[test]
fn groups_split_off_act_in_turn_with_the_world() {
    let results = on_all(4, |world| {
        let rank = world.rank();
        let first = rank / 2 * 2;
        let mut stage = world.split(&[first, first + 1])?.unwrap();
        let mut pair = None;
        for low in 0..2 {
            let split = world.split(&[low, low + 2])?;
            pair = pair.or(split);
        }
        let mut pair = pair.unwrap();
        let mut seen = Vec::new();
        for round in 0..50u32 {
            let mut x = [rank as u32 + round];
            stage.all_reduce(&mut x, ReduceOp::Sum)?;
            if pair.rank() == 0 {
                pair.send(&x, 1)?;
            } else {
                pair.recv(&mut x, 0)?;
            }
            world.broadcast(&mut x, 3)?;
            seen.push(x[0]);
        }
        Ok(seen)
    });
    // Rank 3 passes on what rank 1 got in its stage: 0 + 1 + 2 * round.
    let expected: Vec<u32> = (0..50).map(|round| 1 + 2 * round).collect();
    assert!(results.iter().all(|r| *r == expected), "{results:?}");
}
