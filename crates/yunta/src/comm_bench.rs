//! `yunta comm-bench`: what links between ranks can do, in the manner of nccl-tests.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use serde_json::{Value, json};
use yunta_comm::mlx::Environment;
use yunta_comm::{
    Algorithm, Collective, Group, GroupConfig, MeshConfig, Pair, Sample, Transport, check_pairs,
    connect, measure, token,
};

use crate::args::LinkArgs;

/// Options of `yunta comm-bench`.
#[derive(Args)]
pub(crate) struct CommBenchArgs {
    /// Local processes to measure between
    #[arg(long, short = 'n', default_value_t = 2, conflicts_with = "hosts")]
    ranks: usize,
    /// Measure between machines instead: where each rank listens (host:port), in rank order. Start
    /// the command on each of them with its own --rank; under mlx.launch neither is needed
    #[arg(long, value_delimiter = ',', requires = "rank")]
    hosts: Option<Vec<String>>,
    /// This machine's place among --hosts, counted from 0
    #[arg(long, requires = "hosts")]
    rank: Option<usize>,
    /// A secret that all ranks share
    #[arg(long, env = "YUNTA_TOKEN", hide_env_values = true)]
    token: Option<String>,
    #[command(flatten)]
    links: LinkArgs,
    /// all_reduce, all_gather, reduce_scatter, broadcast, send_recv, barrier
    #[arg(long, value_delimiter = ',', default_value = "all_reduce")]
    op: Vec<Collective>,
    /// Bytes of data, separated by commas
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1024,4096,16384,65536,262144,1048576,16777216,67108864"
    )]
    sizes: Vec<usize>,
    /// Rounds per size [default: fewer for larger sizes]
    #[arg(long)]
    rounds: Option<usize>,
    /// How to all_reduce: one-shot, doubling, two-step, line, relay [default: by size]
    #[arg(long)]
    algorithm: Option<Algorithm>,
    /// Microseconds that a wait tries before it sleeps [default: 100 if every rank has a core]
    #[arg(long)]
    spin: Option<u64>,
    /// Seconds within which each operation must happen
    #[arg(long, default_value_t = 30)]
    timeout: u64,
    /// Show what links whom, and which algorithm is chosen, and measure nothing
    #[arg(long)]
    show: bool,
    /// Skip the measurement of every single link beforehand
    #[arg(long)]
    no_preflight: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// One of the local processes; started by the command itself
    #[arg(long, hide = true)]
    local_rank: Option<usize>,
}

/// What becomes of a run, from the rank that speaks.
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
enum Said {
    Listening(SocketAddr),
    /// What links two ranks, by name.
    Linked {
        a: usize,
        b: usize,
        transport: Option<Transport>,
    },
    Checked(Pair),
    Chosen {
        bytes: usize,
        algorithm: String,
    },
    Sample(Sample),
    Failed(String),
    Done,
}

pub(crate) fn run(args: CommBenchArgs) -> Result<ExitCode> {
    if let Some(rank) = args.local_rank {
        return child(rank, &args);
    }
    if let Some(hosts) = &args.hosts {
        let resolve = |host: &String| -> Result<Vec<SocketAddr>> {
            let found = host.to_socket_addrs().with_context(|| format!("host {host:?}"))?.next();
            Ok(vec![found.ok_or_else(|| anyhow!("host {host:?} has no address"))?])
        };
        let addresses = hosts.iter().map(resolve).collect::<Result<_>>()?;
        let rank = args.rank.unwrap_or_default();
        let given = Environment { rank, addresses: Some(addresses), ..Environment::default() };
        return one_of_many(&given, &args);
    }
    match Environment::read()? {
        Some(environment) => one_of_many(&environment, &args),
        None => all_here(&args),
    }
}

/// One rank among machines; rank 0 reports.
fn one_of_many(environment: &Environment, args: &CommBenchArgs) -> Result<ExitCode> {
    let (rank, size) = (environment.rank, environment.size().unwrap_or_default());
    let token = match &args.token {
        Some(secret) => token(secret),
        None => {
            if rank == 0 {
                eprintln!("yunta: no --token: whoever reaches these ports can take part");
            }
            token(&format!("{:?} {:?}", environment.addresses, environment.coordinator))
        }
    };
    let mut report = Report::new(size, args);
    let mut tell = |said: Said| if rank == 0 { report.take(said) } else { Ok(()) };
    let mut config = mesh(MeshConfig::new(rank, Vec::new(), token), size, args);
    if environment.prefers_ring {
        config.group.algorithm = config.group.algorithm.or(Some(Algorithm::Line));
    }
    bench(environment.connect(config)?, args, &mut tell)?;
    if rank == 0 {
        return report.end();
    }
    Ok(ExitCode::SUCCESS)
}

/// How a world of so many ranks comes together.
fn mesh(base: MeshConfig, size: usize, args: &CommBenchArgs) -> MeshConfig {
    let timeout = Duration::from_secs(args.timeout.max(1));
    let spin = args.spin.map_or(GroupConfig::spin_for(size), Duration::from_micros);
    let algorithm = args.algorithm;
    MeshConfig {
        links: args.links.config(),
        join_timeout: timeout,
        group: GroupConfig { timeout, spin, algorithm, ..GroupConfig::default() },
        ..base
    }
}

/// Measures, on all ranks alike, and tells.
fn bench(
    mut group: Group,
    args: &CommBenchArgs,
    tell: &mut dyn FnMut(Said) -> Result<()>,
) -> Result<()> {
    if args.show {
        for (a, b) in pairs(group.size()) {
            tell(Said::Linked { a, b, transport: group.topology().link(a, b) })?;
        }
        for bytes in &args.sizes {
            let algorithm = group.algorithm(*bytes).to_string();
            tell(Said::Chosen { bytes: *bytes, algorithm })?;
        }
        group.barrier()?;
        return tell(Said::Done);
    }
    if !args.no_preflight {
        for pair in check_pairs(&mut group)? {
            tell(Said::Checked(pair))?;
        }
    }
    for op in &args.op {
        let nothing = [0];
        let sizes = if *op == Collective::Barrier { &nothing[..] } else { &args.sizes };
        for bytes in sizes {
            let rounds = args.rounds.unwrap_or(match bytes {
                0..=0x1_0000 => 1000,
                0x1_0001..=0x10_0000 => 200,
                0x10_0001..=0x100_0000 => 20,
                _ => 5,
            });
            tell(Said::Sample(measure(&mut group, *op, *bytes, rounds)?))?;
        }
    }
    tell(Said::Done)
}

fn pairs(size: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..size).flat_map(move |a| (a + 1..size).map(move |b| (a, b)))
}

/// One local process: learns on its standard input where the others are, and reports on its output.
fn child(rank: usize, args: &CommBenchArgs) -> Result<ExitCode> {
    let tell = |said: Said| -> Result<()> {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", serde_json::to_string(&said)?)?;
        Ok(out.flush()?)
    };
    let listener = TcpListener::bind("127.0.0.1:0")?;
    tell(Said::Listening(listener.local_addr()?))?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let (addresses, token): (Vec<Vec<SocketAddr>>, [u8; 32]) =
        serde_json::from_str(&line).context("started by hand? use --ranks")?;
    std::thread::spawn(|| {
        // The command is gone when its end of the pipe is.
        let _ = std::io::stdin().read_line(&mut String::new());
        std::process::exit(0);
    });
    let mut speak = |said: Said| if rank == 0 { tell(said) } else { Ok(()) };
    let size = addresses.len();
    let config = mesh(MeshConfig::new(rank, addresses, token), size, args);
    let outcome = connect(config, vec![listener])
        .map_err(anyhow::Error::from)
        .and_then(|group| bench(group, args, &mut speak));
    if let Err(e) = outcome {
        tell(Said::Failed(e.to_string()))?;
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

/// Kills what is left.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// All ranks as processes of this machine.
fn all_here(args: &CommBenchArgs) -> Result<ExitCode> {
    if !(2..=64).contains(&args.ranks) {
        bail!("--ranks {}: from 2 to 64 can be measured", args.ranks);
    }
    let program = std::env::current_exe().context("where this program lies is not known")?;
    let mut children = Children(Vec::new());
    let mut inputs = Vec::new();
    let (sender, said) = mpsc::channel();
    for rank in 0..args.ranks {
        let mut child = Command::new(&program)
            .args(std::env::args_os().skip(1))
            .args(["--local-rank", &rank.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (input, output) = (child.stdin.take(), child.stdout.take());
        children.0.push(child);
        inputs.push(input.context("no pipe")?);
        let (sender, output) = (sender.clone(), output.context("no pipe")?);
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Ok(said) = serde_json::from_str::<Said>(&line)
                    && sender.send((rank, said)).is_err()
                {
                    return;
                }
            }
            // If nothing else was said, it died.
            let _ = sender.send((rank, Said::Failed("the process ended".to_owned())));
        });
    }
    let mut report = Report::new(args.ranks, args);
    let mut addresses = vec![Vec::new(); args.ranks];
    let mut failures = Vec::new();
    let patience = Duration::from_secs(args.timeout.max(1) * 4);
    while let Ok((rank, what)) = said.recv_timeout(patience) {
        match what {
            Said::Listening(address) => {
                if let Some(slot) = addresses.get_mut(rank) {
                    *slot = vec![address];
                }
                if addresses.iter().all(|a| !a.is_empty()) {
                    let mut secret = [0; 32];
                    std::fs::File::open("/dev/urandom")?.read_exact(&mut secret)?;
                    let line = serde_json::to_string(&(&addresses, secret))?;
                    for input in &mut inputs {
                        writeln!(input, "{line}")?;
                    }
                }
            }
            Said::Done => return report.end(),
            Said::Failed(reason) => {
                failures.push(format!("rank {rank}: {reason}"));
                if failures.len() == args.ranks {
                    break;
                }
            }
            other => report.take(other)?,
        }
    }
    bail!(
        "{}",
        if failures.is_empty() { "no rank answers".to_owned() } else { failures.join("\n") }
    )
}

/// Prints what is said, as a table or as one object.
struct Report {
    is_json: bool,
    shows: bool,
    ranks: usize,
    links: Vec<Value>,
    chosen: Vec<Value>,
    results: Vec<Sample>,
}

impl Report {
    fn new(ranks: usize, args: &CommBenchArgs) -> Self {
        let (is_json, shows) = (args.json, args.show);
        Self { is_json, shows, ranks, links: Vec::new(), chosen: Vec::new(), results: Vec::new() }
    }

    fn take(&mut self, said: Said) -> Result<()> {
        match said {
            Said::Linked { a, b, transport } => {
                if !self.is_json {
                    let name = transport.map_or_else(|| "-".to_owned(), |t| t.to_string());
                    println!("ranks {a} and {b}: {name}");
                }
                self.links.push(json!({"a": a, "b": b, "transport": transport}));
            }
            Said::Checked(pair) => {
                if !self.is_json {
                    print_pair(&pair);
                }
                self.links.push(serde_json::to_value(pair)?);
            }
            Said::Chosen { bytes, algorithm } => {
                if !self.is_json {
                    println!("all_reduce of {bytes:>10} bytes: {algorithm}");
                }
                self.chosen.push(json!({"bytes": bytes, "algorithm": algorithm}));
            }
            Said::Sample(sample) => {
                if !self.is_json {
                    self.print_sample(&sample);
                }
                self.results.push(sample);
            }
            Said::Listening(_) | Said::Failed(_) | Said::Done => {}
        }
        Ok(())
    }

    fn print_sample(&self, s: &Sample) {
        if self.results.is_empty() {
            println!(
                "\n{:<14} {:>10} {:<9} {:>10} {:>10} {:>10} {:>10} {:>7}",
                "op", "bytes", "algorithm", "median us", "p99 us", "alg GB/s", "bus GB/s", "errors"
            );
        }
        let algorithm = s.algorithm.as_deref().unwrap_or("-");
        println!(
            "{:<14} {:>10} {algorithm:<9} {:>10.1} {:>10.1} {:>10.3} {:>10.3} {:>7}",
            s.op, s.bytes, s.median_us, s.p99_us, s.alg_gbps, s.bus_gbps, s.errors
        );
    }

    fn end(&self) -> Result<ExitCode> {
        if self.is_json {
            let mut whole = json!({"ranks": self.ranks, "links": self.links});
            let (name, list) = if self.shows {
                ("algorithms", json!(self.chosen))
            } else {
                ("results", json!(self.results))
            };
            if let Some(whole) = whole.as_object_mut() {
                whole.insert(name.to_owned(), list);
            }
            println!("{whole}");
        }
        let is_bad = self.results.iter().any(|s| s.errors > 0);
        Ok(if is_bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }
}

fn print_pair(pair: &Pair) {
    let Pair { a, b, transport, latency_us, gbps, complaint } = pair;
    let complaint = complaint.as_ref().map_or(String::new(), |c| format!("  BAD: {c}"));
    let transport = transport.to_string();
    println!("ranks {a} and {b}: {transport:5} {latency_us:8.1} us {gbps:7.2} GB/s{complaint}");
}
