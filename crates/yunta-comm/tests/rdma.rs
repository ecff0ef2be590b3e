//! The code for RDMA devices, from the opening of the library to collectives, on devices that lose,
//! damage, refuse and break.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::net::TcpListener;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use yunta_comm::mlx::{Devices, Environment};
use yunta_comm::verbs::{QueueKind, VerbsConfig};
use yunta_comm::{
    CommError, Group, GroupConfig, LinkConfig, MeshConfig, ReduceOp, Transport, connect,
};
use yunta_verbs_emulator::{BROKEN, CUT, Config, Device, FOLDER, library};

/// The environment names one folder: tests of one process take turns.
static TURN: Mutex<()> = Mutex::new(());

struct Folder {
    folder: TempDir,
    _turn: MutexGuard<'static, ()>,
}

fn devices(config: &Config) -> Folder {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = tempfile::tempdir().unwrap();
    config.save(folder.path()).unwrap();
    // SAFETY: the turn is ours: no other test of this process reads or writes the environment.
    unsafe { std::env::set_var(FOLDER, folder.path()) };
    Folder { folder, _turn: turn }
}

impl Folder {
    fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Queue pairs that are open.
    fn left(&self) -> usize {
        let entries = std::fs::read_dir(self.path()).unwrap().flatten();
        entries.filter(|e| e.path().extension().is_some_and(|x| x == "qp")).count()
    }

    /// Waits until none is left: links that are closed go on answering for a moment.
    fn none_left(&self) {
        let patience = Instant::now() + Duration::from_secs(5);
        while self.left() > 0 {
            assert!(Instant::now() < patience, "{} queue pairs are left", self.left());
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn rdma(kind: QueueKind) -> LinkConfig {
    let verbs = VerbsConfig { library: Some(library().unwrap()), kind, ..VerbsConfig::default() };
    LinkConfig { transport: Some(Transport::Verbs), verbs, ..LinkConfig::default() }
}

const BOUND: Duration = Duration::from_millis(500);

/// A world over loopback addresses; each rank's links as it wants them.
fn join(
    size: usize,
    addresses: usize,
    timeout: Duration,
    links: impl Fn(usize) -> LinkConfig,
) -> Vec<Result<Group, CommError>> {
    let bind = |_| TcpListener::bind("127.0.0.1:0").unwrap();
    let listeners: Vec<Vec<TcpListener>> =
        (0..size).map(|_| (0..addresses).map(bind).collect()).collect();
    let of = |l: &Vec<TcpListener>| l.iter().map(|l| l.local_addr().unwrap()).collect();
    let all: Vec<Vec<_>> = listeners.iter().map(of).collect();
    let threads: Vec<_> = listeners
        .into_iter()
        .enumerate()
        .map(|(rank, listeners)| {
            let config = MeshConfig {
                links: links(rank),
                join_timeout: Duration::from_secs(5),
                group: GroupConfig { timeout, epoch: 3, ..GroupConfig::default() },
                ..MeshConfig::new(rank, all.clone(), [1; 32])
            };
            std::thread::spawn(move || connect(config, listeners))
        })
        .collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

fn on_all<T: Send + 'static>(
    groups: Vec<Result<Group, CommError>>,
    work: impl Fn(Group) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let threads: Vec<_> = groups
        .into_iter()
        .map(|group| {
            let (group, work) = (group.unwrap(), work.clone());
            std::thread::spawn(move || work(group))
        })
        .collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

/// Sums of many sizes, which must be right whatever the device does to frames.
fn reduce_many(mut group: Group) {
    let size = group.size();
    for len in [1, 7, 1000, 5003, 60_001] {
        let value = |i: usize, rank: usize| ((i * 7 + rank) % 13) as f32;
        let mut x: Vec<f32> = (0..len).map(|i| value(i, group.rank())).collect();
        group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
        let expected = |i: usize| (0..size).map(|r| value(i, r)).sum::<f32>();
        assert!(x.iter().enumerate().all(|(i, v)| *v == expected(i)), "{len}");
    }
    let mut all = vec![0; size];
    group.all_gather(&[group.rank() as u8], &vec![1; size], &mut all).unwrap();
    assert!(all.iter().enumerate().all(|(i, v)| i == usize::from(*v)));
    group.barrier().unwrap();
}

#[test]
fn collectives_are_right_over_both_kinds_of_queue_pairs() {
    for kind in [QueueKind::Unreliable, QueueKind::Reliable] {
        for size in [2, 3, 4] {
            let devices = devices(&Config { queue_pairs: 12, ..Config::default() });
            let groups = join(size, 1, Duration::from_secs(20), |_| rdma(kind));
            on_all(groups, move |group| {
                let peer = usize::from(group.rank() == 0);
                let link = group.link_name(peer).unwrap();
                assert!(link.starts_with("rdma emu0"), "{link}");
                let topology = group.topology();
                assert_eq!(topology.link(group.rank(), peer), Some(Transport::Verbs));
                reduce_many(group);
            });
            devices.none_left();
        }
    }
}

#[test]
fn frames_that_are_lost_doubled_or_damaged_never_reach_a_tensor() {
    for seed in 0..5 {
        let (loss, duplication, corruption) = (0.03, 0.03, 0.03);
        let config = Config { seed, loss, duplication, corruption, ..Config::default() };
        let _devices = devices(&config);
        let groups = join(3, 1, Duration::from_secs(20), |_| rdma(QueueKind::Unreliable));
        on_all(groups, reduce_many);
    }
}

#[test]
fn every_call_that_fails_is_named_and_leaves_nothing_behind() {
    for (call, says) in [
        ("ibv_get_device_list", "ibv_get_device_list"),
        ("ibv_open_device", "active port"),
        ("ibv_query_port", "active port"),
        ("ibv_alloc_pd", "ibv_alloc_pd failed on RDMA device emu0"),
        ("ibv_create_cq", "ibv_create_cq failed on RDMA device emu0"),
        ("ibv_create_qp", "ibv_create_qp failed on RDMA device emu0"),
        ("ibv_reg_mr", "ibv_reg_mr failed on RDMA device emu0"),
        ("ibv_modify_qp", "ibv_modify_qp to RTR failed on RDMA device emu0"),
    ] {
        let devices = devices(&Config { failing: vec![call.to_owned()], ..Config::default() });
        let refused = join(2, 1, BOUND, |_| rdma(QueueKind::Unreliable));
        for group in refused {
            let e = group.map(|_| ()).unwrap_err().to_string();
            assert!(e.contains(says), "{call}: {e}");
        }
        assert_eq!(devices.left(), 0, "{call}");
        // The same process, once the device is well again.
        Config::default().save(devices.path()).unwrap();
        on_all(join(2, 1, Duration::from_secs(10), |_| rdma(QueueKind::Unreliable)), reduce_many);
    }
}

#[test]
fn a_port_that_is_down_is_named() {
    let down = Config { ports_down: vec!["emu0".to_owned()], ..Config::default() };
    let _devices = devices(&down);
    for group in join(2, 1, BOUND, |_| rdma(QueueKind::Unreliable)) {
        let e = group.map(|_| ()).unwrap_err().to_string();
        assert!(e.contains("active port (found: [\"emu0\"])"), "{e}");
    }
}

#[test]
fn kinds_that_a_device_lacks_or_that_differ_are_named() {
    let devices = devices(&Config { has_rc: false, ..Config::default() });
    for group in join(2, 1, BOUND, |_| rdma(QueueKind::Reliable)) {
        let e = group.map(|_| ()).unwrap_err().to_string();
        assert!(e.contains("ibv_create_qp"), "{e}");
    }
    Config::default().save(devices.path()).unwrap();
    let kinds = [QueueKind::Reliable, QueueKind::Unreliable];
    for group in join(2, 1, BOUND, |rank| rdma(kinds[rank])) {
        let e = group.map(|_| ()).unwrap_err().to_string();
        assert!(e.contains("RC and UC"), "{e}");
    }
}

#[test]
fn budgets_are_checked_before_anything_is_made() {
    let devices = devices(&Config::default());
    let tight = |_| {
        let mut links = rdma(QueueKind::Unreliable);
        links.verbs.queue_pairs_max = 2;
        links
    };
    for group in join(4, 1, BOUND, tight) {
        let e = group.map(|_| ()).unwrap_err().to_string();
        assert!(e.contains("3 queue pairs are needed on one RDMA device, which has 2"), "{e}");
    }
    assert_eq!(devices.left(), 0);
    // And what the device itself refuses is said by the rank that it refuses.
    Config { queue_pairs: 1, ..Config::default() }.save(devices.path()).unwrap();
    let errors: Vec<String> = join(2, 1, BOUND, |_| rdma(QueueKind::Unreliable))
        .into_iter()
        .map(|g| g.map(|_| ()).unwrap_err().to_string())
        .collect();
    assert!(errors.iter().all(|e| e.contains("ibv_create_qp")), "{errors:?}");
}

#[test]
fn groups_can_be_formed_again_and_again() {
    let devices = devices(&Config::default());
    for _ in 0..15 {
        let groups = join(3, 1, Duration::from_secs(10), |_| rdma(QueueKind::Unreliable));
        on_all(groups, |mut group| group.barrier().unwrap());
    }
    devices.none_left();
}

/// Ranks 0 and 1 of 3, in an operation that rank 2 has no part in any more.
fn survivors(devices: &Folder, fault: impl Fn(&Path) + Clone + Send + 'static) -> Vec<CommError> {
    let groups = join(3, 1, BOUND, |_| rdma(QueueKind::Unreliable));
    let folder = devices.path().to_owned();
    let outcomes = on_all(groups, move |mut group| {
        group.barrier().unwrap();
        if group.rank() == 2 {
            fault(&folder);
            return None;
        }
        let start = Instant::now();
        let outcome = (0..1000).try_for_each(|_| {
            std::thread::sleep(Duration::from_millis(1));
            group.all_reduce(&mut [1.0f32; 64], ReduceOp::Sum)
        });
        assert!(start.elapsed() < BOUND + Duration::from_secs(3), "{:?}", start.elapsed());
        Some(outcome.unwrap_err())
    });
    outcomes.into_iter().flatten().collect()
}

#[test]
fn a_dead_peer_a_cut_cable_and_a_broken_device_are_errors_in_time() {
    let devices = devices(&Config::default());
    // The peer ends: its side channel says so.
    for e in survivors(&devices, |_| ()) {
        assert!(e.is_peer_lost() && e.to_string().contains("rank 2"), "{e}");
    }
    // The cable is cut, and nothing says so.
    let errors = survivors(&devices, |folder| {
        std::fs::write(folder.join(CUT), b"").unwrap();
        std::thread::sleep(3 * BOUND);
    });
    assert!(errors.iter().all(CommError::is_peer_lost), "{errors:?}");
    assert!(errors.iter().any(|e| e.to_string().contains("rdma emu0")), "{errors:?}");
    std::fs::remove_file(devices.path().join(CUT)).unwrap();
    // The device breaks: completions say so.
    let errors = survivors(&devices, |folder| {
        std::fs::write(folder.join(BROKEN), b"").unwrap();
        std::thread::sleep(BOUND);
    });
    let says = "the queue pair is in an error state (status 5";
    assert!(errors.iter().any(|e| e.to_string().contains(says)), "{errors:?}");
    std::fs::remove_file(devices.path().join(BROKEN)).unwrap();
    // And all is well again in the same process.
    on_all(join(3, 1, Duration::from_secs(10), |_| rdma(QueueKind::Unreliable)), reduce_many);
}

#[test]
fn a_cable_that_is_out_for_a_moment_loses_nothing() {
    let devices = devices(&Config::default());
    let groups = join(2, 1, Duration::from_secs(10), |_| rdma(QueueKind::Unreliable));
    let cut = devices.path().join(CUT);
    on_all(groups, move |mut group| {
        for round in 0..3 {
            group.barrier().unwrap();
            if group.rank() == 1 && round == 1 {
                std::fs::write(&cut, b"").unwrap();
                let cut = cut.clone();
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(300));
                    std::fs::remove_file(cut).unwrap();
                });
            }
            let mut x = [round as f32; 3000];
            group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
            assert!(x.iter().all(|v| *v == 2.0 * round as f32));
        }
    });
    assert!(!devices.path().join(CUT).exists(), "the cable was out to the end");
}

/// Two hosts' devices, two cables: en2 to en4, and en3 to en5.
fn cabled() -> Config {
    let device =
        |name: &str, last| Device { name: name.to_owned(), address: [169, 254, 0, last].into() };
    let cable = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    Config {
        devices: vec![device("en2", 2), device("en3", 3), device("en4", 4), device("en5", 5)],
        cables: vec![cable("en2", "en4"), cable("en3", "en5")],
        ..Config::default()
    }
}

fn named(rank: usize, names: [[&str; 2]; 2]) -> LinkConfig {
    let mut links = rdma(QueueKind::Unreliable);
    let own = names[rank].iter().map(|n| (*n).to_owned()).collect();
    links.verbs.devices = if rank == 0 { vec![vec![], own] } else { vec![own, vec![]] };
    links
}

#[test]
fn several_cables_are_striped() {
    let _devices = devices(&cabled());
    let names = [["en2", "en3"], ["en4", "en5"]];
    let groups = join(2, 1, Duration::from_secs(20), |rank| named(rank, names));
    on_all(groups, move |group| {
        let link = group.link_name(1 - group.rank()).unwrap();
        assert!(link.contains(names[group.rank()][0]) && link.contains("and 1 more"), "{link}");
        reduce_many(group);
    });
}

#[test]
fn a_device_whose_cable_leads_elsewhere_is_named() {
    let _devices = devices(&cabled());
    for group in join(2, 1, BOUND, |rank| named(rank, [["en2", "en3"], ["en5", "en4"]])) {
        let e = group.map(|_| ()).unwrap_err().to_string();
        assert!(e.contains("ibv_modify_qp to RTR failed") && e.contains("cable"), "{e}");
    }
}

#[test]
fn without_a_library_or_a_wish_ranks_are_linked_otherwise() {
    let _devices = devices(&Config::default());
    // One side has no library: the other is told.
    let groups = join(2, 1, BOUND, |rank| {
        let mut links = rdma(QueueKind::Unreliable);
        if rank == 1 {
            links.verbs.library = Some("/nowhere/libibverbs.so.1".into());
        }
        links
    });
    let errors: Vec<String> =
        groups.into_iter().map(|g| g.map(|_| ()).unwrap_err().to_string()).collect();
    assert!(errors[1].contains("RDMA is not available: /nowhere/libibverbs.so.1"), "{errors:?}");
    // Nobody asked for RDMA: no error.
    let groups = join(2, 1, Duration::from_secs(10), |_| LinkConfig {
        transport: None,
        verbs: VerbsConfig { library: Some("/nowhere".into()), ..VerbsConfig::default() },
        ..LinkConfig::default()
    });
    on_all(groups, |group| {
        assert_eq!(group.topology().link(0, 1), Some(Transport::Shm));
        reduce_many(group);
    });
}

/// Three ranks in a row: the ends have no cable to each other.
const ROW: &str = r#"[[null, "en2", null], ["en4", null, "en3"], [null, "en5", null]]"#;

#[test]
fn ranks_that_know_a_device_file_and_a_coordinator_find_each_other() {
    let mut config = cabled();
    config.cables[1] = ("en3".to_owned(), "en5".to_owned());
    let _devices = devices(&config);
    let coordinator = {
        // A port that was free a moment ago.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap()
    };
    let threads: Vec<_> = (0..3)
        .map(|rank| {
            let environment = Environment {
                rank,
                devices: Some(Devices::parse(ROW).unwrap()),
                coordinator: Some(coordinator),
                ..Environment::default()
            };
            std::thread::spawn(move || {
                let links = LinkConfig { transport: None, ..rdma(QueueKind::Unreliable) };
                let timeout = Duration::from_secs(20);
                environment.connect(MeshConfig {
                    links,
                    join_timeout: timeout,
                    group: GroupConfig { timeout, ..GroupConfig::default() },
                    ..MeshConfig::new(0, Vec::new(), [4; 32])
                })
            })
        })
        .collect();
    let groups = threads.into_iter().map(|t| t.join().unwrap()).collect();
    on_all(groups, |group| {
        let link = |a, b| group.topology().link(a, b);
        assert_eq!(link(0, 1), Some(Transport::Verbs));
        assert_eq!(link(1, 2), Some(Transport::Verbs));
        assert_eq!(link(0, 2), Some(Transport::Shm), "no cable: linked otherwise");
        reduce_many(group);
    });
}
