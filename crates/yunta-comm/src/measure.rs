//! How fast a group is, in the manner of nccl-tests: per collective and size, and per pair.

use std::time::Instant;

use serde::{Deserialize, Serialize};

use crate::names::names;
use crate::{CommError, Group, ReduceOp, Transport};

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Sum on all ranks.
    AllReduce,
    /// Every rank's part on all ranks; the size is that of all parts.
    AllGather,
    /// Every rank's part of the sum; the size is that of all parts.
    ReduceScatter,
    /// From rank 0 to all.
    Broadcast,
    /// From rank 0 to rank 1 and back; the time is that of one way.
    SendRecv,
    /// No data.
    Barrier,
}

names!(Collective {
    AllReduce => "all_reduce",
    AllGather => "all_gather",
    ReduceScatter => "reduce_scatter",
    Broadcast => "broadcast",
    SendRecv => "send_recv",
    Barrier => "barrier",
});

impl Collective {
    /// All there are.
    pub const ALL: [Self; 6] = [
        Self::AllReduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Broadcast,
        Self::SendRecv,
        Self::Barrier,
    ];

    /// Bytes that must pass each rank's links per byte of data, in one direction, at the least
    /// (<https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md>).
    fn bus_factor(self, ranks: usize) -> f64 {
        let n = ranks.max(1) as f64;
        match self {
            Self::AllReduce => 2.0 * (n - 1.0) / n,
            Self::AllGather | Self::ReduceScatter => (n - 1.0) / n,
            Self::Broadcast | Self::SendRecv => 1.0,
            Self::Barrier => 0.0,
        }
    }
}

/// What was measured of a collective at one size.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The collective.
    pub op: String,
    /// Bytes of data.
    pub bytes: usize,
    /// How an all_reduce went.
    pub algorithm: Option<String>,
    /// Timed rounds.
    pub rounds: usize,
    /// Microseconds of the slowest rank, median over the rounds.
    pub median_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// Gigabytes of data per second.
    pub alg_gbps: f64,
    /// Gigabytes per second and direction that a rank's links carried at the least.
    pub bus_gbps: f64,
    /// Elements that were wrong, on all ranks.
    pub errors: u64,
}

/// Buffers of a measurement.
struct Bench {
    data: Vec<f32>,
    part: Vec<f32>,
    counts: Vec<usize>,
    /// The ranks that send to each other, for those.
    two: Option<Group>,
}

impl Bench {
    fn new(group: &mut Group, op: Collective, elements: usize) -> Result<Self, CommError> {
        let n = group.size();
        let counts: Vec<usize> =
            (0..n).map(|r| elements / n + usize::from(r < elements % n)).collect();
        let own = counts.get(group.rank()).copied().unwrap_or_default();
        let two = if op == Collective::SendRecv { group.split(&[0, 1])? } else { None };
        Ok(Self { data: vec![0.0; elements], part: vec![0.0; own], counts, two })
    }

    fn fill(&mut self, rank: usize) {
        let value = |i: usize| ((i + rank) % 13) as f32;
        self.data.iter_mut().enumerate().for_each(|(i, x)| *x = value(i));
        let start: usize = self.counts.iter().take(rank).sum();
        self.part.iter_mut().enumerate().for_each(|(i, x)| *x = value(start + i));
    }

    fn run(&mut self, group: &mut Group, op: Collective, fold: ReduceOp) -> Result<(), CommError> {
        let Self { data, part, counts, two } = self;
        match op {
            Collective::AllReduce => group.all_reduce(data, fold),
            Collective::AllGather => group.all_gather(part, counts, data),
            Collective::ReduceScatter => group.reduce_scatter(data, counts, part, fold),
            Collective::Broadcast => group.broadcast(data, 0),
            Collective::SendRecv => match two {
                Some(two) if two.rank() == 0 => two.send(data, 1).and_then(|()| two.recv(data, 1)),
                Some(two) => two.recv(data, 0).and_then(|()| two.send(data, 0)),
                None => Ok(()),
            },
            Collective::Barrier => group.barrier(),
        }
    }

    /// Elements that are not what they must be after one run on filled buffers.
    fn wrong(&self, op: Collective, rank: usize) -> u64 {
        let n = self.counts.len();
        let sum = |i: usize| (0..n).map(|r| ((i + r) % 13) as f32).sum::<f32>();
        let start: usize = self.counts.iter().take(rank).sum();
        let owner = |i: usize| {
            let ends = self.counts.iter().scan(0, |end, c| {
                *end += c;
                Some(*end)
            });
            ends.take_while(|end| *end <= i).count()
        };
        let all = self.data.iter().enumerate();
        let count = match op {
            Collective::AllReduce => all.filter(|(i, x)| **x != sum(*i)).count(),
            Collective::AllGather => {
                all.filter(|(i, x)| **x != ((i + owner(*i)) % 13) as f32).count()
            }
            Collective::ReduceScatter => {
                self.part.iter().enumerate().filter(|(i, x)| **x != sum(start + i)).count()
            }
            Collective::Broadcast => all.filter(|(i, x)| **x != (i % 13) as f32).count(),
            Collective::SendRecv if rank < 2 => all.filter(|(i, x)| **x != (i % 13) as f32).count(),
            Collective::SendRecv | Collective::Barrier => 0,
        };
        count as u64
    }
}

/// Measures a collective of `bytes` (whole f32). All ranks call it alike, and all get the same.
///
/// # Errors
/// As the collective's; [`CommError::Arguments`] if it takes more ranks.
pub fn measure(
    group: &mut Group,
    op: Collective,
    bytes: usize,
    rounds: usize,
) -> Result<Sample, CommError> {
    let (rank, size, rounds) = (group.rank(), group.size(), rounds.max(1));
    let elements = if op == Collective::Barrier { 0 } else { (bytes / 4).max(1) };
    let mut bench = Bench::new(group, op, elements)?;
    bench.fill(rank);
    bench.run(group, op, ReduceOp::Sum)?;
    let mut errors = [bench.wrong(op, rank)];
    group.all_reduce(&mut errors, ReduceOp::Sum)?;
    let [errors] = errors;

    let mut times = Vec::with_capacity(rounds);
    let warm_up = (rounds / 10).clamp(1, 50);
    for round in 0..warm_up + rounds {
        let start = Instant::now();
        // Folds to the same in every round: the data need not be filled in again.
        bench.run(group, op, ReduceOp::Max)?;
        if round >= warm_up {
            times.push(start.elapsed().as_secs_f64() * 1e6);
        }
    }
    group.all_reduce(&mut times, ReduceOp::Max)?;
    if op == Collective::SendRecv {
        times.iter_mut().for_each(|t| *t /= 2.0);
    }
    times.sort_by(f64::total_cmp);
    let at = |q: f64| times.get(((rounds - 1) as f64 * q).round() as usize).copied();
    let median_us = at(0.5).unwrap_or_default();
    let alg_gbps = (elements * 4) as f64 / (median_us.max(1e-3) * 1e3);
    let algorithm = Some(group.algorithm(elements * 4).to_string());
    Ok(Sample {
        op: op.to_string(),
        bytes: elements * 4,
        algorithm: algorithm.filter(|_| op == Collective::AllReduce),
        rounds,
        median_us,
        p99_us: at(0.99).unwrap_or_default(),
        alg_gbps,
        bus_gbps: alg_gbps * op.bus_factor(size),
        errors,
    })
}

/// What was measured between two ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pair {
    /// The lower rank.
    pub a: usize,
    /// The higher rank.
    pub b: usize,
    /// What links them.
    pub transport: Transport,
    /// Microseconds of a small message, one way: median.
    pub latency_us: f64,
    /// Gigabytes per second of large messages, one way.
    pub gbps: f64,
    /// What is wrong with it, in comparison with the others.
    pub complaint: Option<String>,
}

const PING: usize = 64;
const LARGE: usize = 4 << 20;

/// Measures every link alone. All ranks call it, and all get the same.
///
/// # Errors
/// [`CommError`] that names the link that failed.
pub fn check_pairs(group: &mut Group) -> Result<Vec<Pair>, CommError> {
    let n = group.size();
    let links: Vec<(usize, usize, Transport)> = (0..n)
        .flat_map(|a| (a + 1..n).map(move |b| (a, b)))
        .filter_map(|(a, b)| Some((a, b, group.topology().link(a, b)?)))
        .collect();
    let mut figures = vec![0f64; 2 * links.len()];
    for ((a, b, _), place) in links.iter().zip(figures.chunks_mut(2)) {
        if let Some(mut two) = group.split(&[*a, *b])? {
            let small = measure(&mut two, Collective::SendRecv, PING, 200)?;
            let large = measure(&mut two, Collective::SendRecv, LARGE, 10)?;
            place.copy_from_slice(&[small.median_us, large.alg_gbps]);
        }
        // One pair at a time: the others wait here.
        group.barrier()?;
    }
    group.all_reduce(&mut figures, ReduceOp::Max)?;
    let mut pairs: Vec<Pair> = links
        .iter()
        .zip(figures.chunks(2))
        .filter_map(|((a, b, transport), figures)| {
            let [latency_us, gbps] = *figures.first_chunk()?;
            let (a, b, transport) = (*a, *b, *transport);
            Some(Pair { a, b, transport, latency_us, gbps, complaint: None })
        })
        .collect();
    complain(&mut pairs);
    Ok(pairs)
}

/// A link that is much worse than most of its kind has a bad cable, or a busy host.
fn complain(pairs: &mut [Pair]) {
    // Memory has no cables; what it does depends on where the kernel lets the ranks run.
    for transport in Transport::ALL.into_iter().filter(|t| *t != Transport::Shm) {
        let of_kind = |p: &&Pair| p.transport == transport;
        let median = |figure: fn(&Pair) -> f64| -> f64 {
            let mut all: Vec<f64> = pairs.iter().filter(of_kind).map(figure).collect();
            all.sort_by(f64::total_cmp);
            all.get(all.len() / 2).copied().unwrap_or_default()
        };
        let (latency, gbps) = (median(|p| p.latency_us), median(|p| p.gbps));
        for p in pairs.iter_mut().filter(|p| p.transport == transport) {
            let slow = gbps / p.gbps.max(1e-9);
            let late = p.latency_us / latency.max(1e-9);
            p.complaint = if slow >= 2.0 {
                Some(format!("{slow:.1} times slower than the median of {transport} links"))
            } else if late >= 4.0 {
                Some(format!("answers {late:.1} times later than the median of {transport} links"))
            } else {
                None
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{GroupConfig, local_mesh};

    fn on_all<R: Send + 'static>(size: usize, work: fn(&mut Group) -> R) -> Vec<R> {
        let timeout = std::time::Duration::from_secs(20);
        let ranks = local_mesh(size, &GroupConfig { timeout, ..GroupConfig::default() }).unwrap();
        let threads: Vec<_> =
            ranks.into_iter().map(|mut g| std::thread::spawn(move || work(&mut g))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    }

    #[test]
    fn all_collectives_are_measured_and_right() {
        let samples = on_all(3, |group| {
            Collective::ALL.map(|op| measure(group, op, 4_004, 5).unwrap()).to_vec()
        });
        assert!(samples.iter().all(|s| *s == samples[0]), "all ranks say the same");
        for s in &samples[0] {
            assert_eq!(s.errors, 0, "{s:?}");
            assert!(s.median_us > 0.0 && s.p99_us >= s.median_us);
        }
        let reduce = &samples[0][0];
        assert!((reduce.bus_gbps / reduce.alg_gbps - 4.0 / 3.0).abs() < 1e-9);
    }

    #[test]
    fn every_pair_is_measured() {
        let pairs = on_all(3, |group| check_pairs(group).unwrap()).remove(0);
        let ends: Vec<_> = pairs.iter().map(|p| (p.a, p.b)).collect();
        assert_eq!(ends, [(0, 1), (0, 2), (1, 2)]);
        assert!(pairs.iter().all(|p| p.latency_us > 0.0 && p.gbps > 0.0));
    }

    #[test]
    fn a_bad_cable_is_named() {
        let pair = |b: usize, latency_us: f64, gbps: f64| {
            let transport = Transport::Tcp;
            Pair { a: 0, b, transport, latency_us, gbps, complaint: None }
        };
        let mut pairs =
            vec![pair(1, 20.0, 3.0), pair(2, 21.0, 0.3), pair(3, 19.0, 2.9), pair(4, 200.0, 2.5)];
        complain(&mut pairs);
        let said: Vec<_> = pairs.iter().map(|p| p.complaint.as_deref().unwrap_or("")).collect();
        assert_eq!(said[0], "");
        assert!(said[1].contains("times slower"), "{said:?}");
        assert_eq!(said[2], "");
        assert!(said[3].contains("later"), "{said:?}");
    }
}
