//! Collectives against a serial reference: every element type, odd sizes, worlds of 1 to 8.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use half::{bf16, f16};
use proptest::prelude::*;
use yunta_comm::{
    Algorithm, CommError, Element, Ends, Group, GroupConfig, ReduceOp, ShmLink, StreamLink,
    Topology, Transport, mesh_of,
};

/// How the ranks of a world are linked.
#[derive(Clone, Copy, Debug)]
struct World {
    size: usize,
    shape: Shape,
    is_shm: bool,
    algorithm: Option<Algorithm>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Shape {
    Full,
    Line,
    Ring,
    /// All linked with the last rank alone.
    Star,
}

const SHAPES: [Shape; 4] = [Shape::Full, Shape::Line, Shape::Ring, Shape::Star];
/// What a full mesh can do.
const ALGORITHMS: [Algorithm; 5] = [
    Algorithm::OneShot,
    Algorithm::Doubling,
    Algorithm::TwoStep,
    Algorithm::Line,
    Algorithm::Relay,
];

impl World {
    fn of(size: usize) -> Self {
        Self { size, shape: Shape::Full, is_shm: false, algorithm: None }
    }

    fn topology(self) -> Topology {
        let n = self.size;
        let transport = if self.is_shm { Transport::Shm } else { Transport::Tcp };
        let is_linked = |a: usize, b: usize| match self.shape {
            Shape::Full => true,
            Shape::Line => a.abs_diff(b) == 1,
            Shape::Ring => (a + 1) % n == b || (b + 1) % n == a,
            Shape::Star => a == n - 1 || b == n - 1,
        };
        let row = |a| (0..n).map(|b| Some(transport).filter(|_| is_linked(a, b))).collect();
        Topology::new((0..n).map(row).collect())
    }

    fn groups(self) -> Vec<Group> {
        let timeout = std::time::Duration::from_secs(20);
        let config = GroupConfig { timeout, algorithm: self.algorithm, ..GroupConfig::default() };
        let link = |_, _| -> std::io::Result<Ends> {
            if self.is_shm {
                let (a, b) = ShmLink::pair()?;
                return Ok((Box::new(a), Box::new(b)));
            }
            let (a, b) = StreamLink::pair()?;
            Ok((Box::new(a), Box::new(b)))
        };
        mesh_of(&self.topology(), &config, link).unwrap()
    }
}

/// Runs `work` on every rank of a world; the results in rank order.
fn on_all<R: Send + 'static>(
    world: World,
    work: impl Fn(&mut Group) -> Result<R, CommError> + Send + Sync + Clone + 'static,
) -> Vec<R> {
    let threads: Vec<_> = world
        .groups()
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
fn check<T: Toy>(world: World, len: usize, seed: u64, op: ReduceOp) {
    let size = world.size;
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
    let results = on_all(world, move |group| {
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

fn check_kind(kind: usize, world: World, len: usize, seed: u64, op: ReduceOp) {
    let checks: [fn(World, usize, u64, ReduceOp); 12] = [
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
    checks[kind](world, len, seed, op);
}

const OPS: [ReduceOp; 3] = [ReduceOp::Sum, ReduceOp::Max, ReduceOp::Min];

#[test]
fn every_type_in_every_world_at_the_odd_sizes() {
    for kind in 0..12 {
        for size in 1..=8 {
            let len = [0, 1, 3, 7, 1023, 4097][(kind + size) % 6];
            let world = World { is_shm: (kind + size) % 2 == 0, ..World::of(size) };
            check_kind(kind, world, len, 17 * size as u64, OPS[(kind + size) % 3]);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn collectives_are_what_a_serial_loop_computes(
        kind in 0usize..12, size in 1usize..=8, len in 0usize..2000, seed: u32, op in 0usize..3,
        shape in 0usize..4, algorithm in 0usize..6, is_shm: bool,
    ) {
        let shape = SHAPES[shape];
        let algorithm = ALGORITHMS.get(algorithm).copied().filter(|_| shape == Shape::Full);
        let world = World { size, shape, is_shm, algorithm };
        check_kind(kind, world, len, seed.into(), OPS[op]);
    }
}

/// Beyond what links hold: both sides send at once, and fold what they are sending.
#[test]
fn large_reductions_do_not_block() {
    let mut worlds: Vec<World> = [2, 3, 5].map(World::of).to_vec();
    worlds.extend(ALGORITHMS.map(|a| World { algorithm: Some(a), ..World::of(3) }));
    worlds.extend(SHAPES.map(|shape| World { shape, ..World::of(4) }));
    for world in worlds.iter().flat_map(|w| [false, true].map(|is_shm| World { is_shm, ..*w })) {
        let len = (1 << 20) + 5;
        let sums = on_all(world, move |group| {
            let mut x: Vec<f32> = (0..len).map(|i| ((i + group.rank()) % 11) as f32).collect();
            group.all_reduce(&mut x, ReduceOp::Sum)?;
            Ok(x)
        });
        let expected = |i: usize| (0..world.size).map(|r| ((i + r) % 11) as f32).sum::<f32>();
        for x in &sums {
            assert!(x.iter().enumerate().all(|(i, v)| *v == expected(i)), "{world:?}");
        }
    }
}

/// Values whose sum depends on the order: all ranks get the bits of the fold in rank order.
#[test]
fn all_ranks_hold_the_same_bits_whatever_the_algorithm() {
    let mut worlds: Vec<World> =
        ALGORITHMS.map(|a| World { algorithm: Some(a), ..World::of(6) }).to_vec();
    worlds.extend(SHAPES.map(|shape| World { shape, ..World::of(6) }));
    for (len, world) in
        [5, 100_000].into_iter().flat_map(|len| worlds.iter().map(move |w| (len, *w)))
    {
        let values = |rank: usize, i: usize| 10f32.powi((rank as i32 * 5 + i as i32) % 9 - 4) / 3.0;
        let results = on_all(world, move |group| {
            let mut x: Vec<f32> = (0..len).map(|i| values(group.rank(), i)).collect();
            group.all_reduce(&mut x, ReduceOp::Sum)?;
            Ok(x.iter().map(|v| v.to_bits()).collect::<Vec<_>>())
        });
        let fold = |i: usize| (1..6).fold(values(0, i), |a, r| a + values(r, i)).to_bits();
        let expected: Vec<u32> = (0..len).map(fold).collect();
        assert!(results.iter().all(|r| *r == expected), "{world:?}");
    }
}

#[test]
fn an_algorithm_that_the_links_do_not_allow_is_refused() {
    let world = World { shape: Shape::Line, algorithm: Some(Algorithm::OneShot), ..World::of(3) };
    let errors = world.groups().into_iter().map(|mut g| g.all_reduce(&mut [1], ReduceOp::Sum));
    for e in errors {
        assert!(matches!(e, Err(CommError::Arguments { .. })), "{e:?}");
    }
}

/// Stages of two ranks within a world of four, used in turn with it.
#[test]
fn groups_split_off_act_in_turn_with_the_world() {
    let results = on_all(World::of(4), |world| {
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
