//! Latency of all_reduce between threads over loopback TCP: median and 99th percentile.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use yunta_comm::{CommError, Group, GroupConfig, MeshConfig, ReduceOp, connect};

fn mesh(size: usize) -> Result<Vec<Group>, CommError> {
    let listeners: Vec<TcpListener> =
        (0..size).filter_map(|_| TcpListener::bind("127.0.0.1:0").ok()).collect();
    let addresses: Vec<_> = listeners.iter().filter_map(|l| l.local_addr().ok()).collect();
    let threads: Vec<_> = listeners
        .into_iter()
        .enumerate()
        .map(|(rank, listener)| {
            let config = MeshConfig {
                rank,
                addresses: addresses.clone(),
                token: [7; 32],
                config_digest: [0; 32],
                join_timeout: Duration::from_secs(5),
                group: GroupConfig { timeout: Duration::from_secs(10), ..GroupConfig::default() },
            };
            std::thread::spawn(move || connect(config, listener))
        })
        .collect();
    threads.into_iter().filter_map(|t| t.join().ok()).collect()
}

fn main() -> Result<(), CommError> {
    println!("{:>6} {:>9} {:>10} {:>10}", "ranks", "bytes", "median us", "p99 us");
    for size in [2, 3, 4] {
        for bytes in [4 << 10, 16 << 10, 64 << 10, 4 << 20] {
            let rounds = if bytes > 1 << 20 { 20 } else { 1000 };
            let threads: Vec<_> = mesh(size)?
                .into_iter()
                .map(|mut group| {
                    std::thread::spawn(move || -> Result<Vec<f64>, CommError> {
                        let mut data = vec![1.0f32; bytes / 4];
                        (0..rounds)
                            .map(|_| {
                                let start = Instant::now();
                                group.all_reduce(&mut data, ReduceOp::Max)?;
                                Ok(start.elapsed().as_secs_f64() * 1e6)
                            })
                            .collect()
                    })
                })
                .collect();
            let mut times = Vec::new();
            for thread in threads {
                if let Ok(t) = thread.join() {
                    times.extend(t?);
                }
            }
            times.sort_by(f64::total_cmp);
            let at = |q: f64| times[((times.len() - 1) as f64 * q) as usize];
            println!("{size:>6} {bytes:>9} {:>10.1} {:>10.1}", at(0.5), at(0.99));
        }
    }
    Ok(())
}
