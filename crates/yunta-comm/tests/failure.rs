//! What goes wrong, and what every surviving rank is told: in time, by name, and for good.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use yunta_comm::{
    CommError, Group, GroupConfig, Link, MeshConfig, ReduceOp, StreamLink, connect, local_mesh,
};

const BOUND: Duration = Duration::from_millis(300);
/// What a busy machine may add.
const MARGIN: Duration = Duration::from_secs(3);

type Collective = (&'static str, fn(&mut Group) -> Result<(), CommError>);

/// Every collective, in a form in which every rank waits for rank 2.
const COLLECTIVES: [Collective; 8] = [
    ("all_reduce", |g| g.all_reduce(&mut [1.0f32; 9], ReduceOp::Sum)),
    ("large all_reduce", |g| g.all_reduce(&mut vec![1.0f32; 100_000], ReduceOp::Sum)),
    ("all_gather", |g| g.all_gather(&[1u8], &[1; 3], &mut [0; 3])),
    ("reduce_scatter", |g| g.reduce_scatter(&[1u8; 3], &[1; 3], &mut [0], ReduceOp::Max)),
    ("broadcast", |g| g.broadcast(&mut [1u8; 4], 2)),
    ("broadcast_bytes", |g| g.broadcast_bytes(&mut vec![1; 4], 2)),
    ("recv", |g| if g.rank() == 2 { Ok(()) } else { g.recv(&mut [0u8; 4], 2) }),
    ("barrier", Group::barrier),
];

/// Runs ranks 0 and 1 through `work` while rank 2 does `fault`; errors of 0 and 1.
fn survivors(
    work: fn(&mut Group) -> Result<(), CommError>,
    fault: impl FnOnce(Group) + Send + 'static,
) -> Vec<CommError> {
    let config = GroupConfig { timeout: BOUND, ..GroupConfig::default() };
    let mut ranks = local_mesh(3, &config).unwrap();
    let third = ranks.pop().unwrap();
    let faulty = std::thread::spawn(move || fault(third));
    let start = Instant::now();
    let threads: Vec<_> = ranks
        .into_iter()
        .map(|mut g| {
            std::thread::spawn(move || {
                let first = work(&mut g).expect_err("a rank is missing");
                let again = g.barrier().expect_err("the group has failed");
                assert_eq!(first, again, "later operations fail at once, for the same cause");
                first
            })
        })
        .collect();
    let errors: Vec<CommError> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    assert!(start.elapsed() < BOUND + MARGIN, "told after {:?}", start.elapsed());
    faulty.join().unwrap();
    errors
}

fn for_each_collective(fault: fn(Group), is_right: fn(&CommError) -> bool) {
    for (name, work) in COLLECTIVES {
        let errors = survivors(work, fault);
        assert!(errors.iter().any(is_right), "{name}: {errors:?}");
        // A survivor may learn of it from the other, which then names rank 2 in its words.
        let told = |e: &CommError| {
            is_right(e) || matches!(e, CommError::PeerAborted { .. } | CommError::PeerLost { .. })
        };
        assert!(errors.iter().all(told), "{name}: {errors:?}");
        assert!(errors.iter().all(|e| e.to_string().contains("rank 2") || !is_right(e)), "{name}");
    }
    // And a group can be formed again in the same process.
    let again: Vec<_> = local_mesh(3, &GroupConfig::default())
        .unwrap()
        .into_iter()
        .map(|mut g| std::thread::spawn(move || g.barrier()))
        .collect();
    assert!(again.into_iter().all(|t| t.join().unwrap().is_ok()));
}

#[test]
fn a_rank_that_ends_is_lost() {
    for_each_collective(drop, |e| matches!(e, CommError::PeerLost { peer: 2, .. }));
}

#[test]
fn a_silent_rank_is_reported_within_the_bound() {
    let silent = |group: Group| {
        std::thread::sleep(BOUND + Duration::from_millis(700));
        drop(group);
    };
    for_each_collective(silent, |e| matches!(e, CommError::Timeout { peer: 2, .. }));
}

#[test]
fn a_rank_that_does_something_else_is_out_of_step() {
    let other = |mut group: Group| {
        let _ = group.gather(&[1u16; 7], &[7; 3], &mut [], 0);
        let _ = group.gather(&[1u16; 7], &[7; 3], &mut [], 1);
        std::thread::sleep(Duration::from_millis(200));
    };
    let (name, work) = COLLECTIVES[0];
    let errors = survivors(work, other);
    assert!(
        errors.iter().any(|e| matches!(e, CommError::Mismatch { peer: 2, .. })),
        "{name}: {errors:?}"
    );
}

#[test]
fn a_rank_with_another_length_is_out_of_step() {
    let errors = survivors(
        |g| g.all_reduce(&mut [1.0f32; 9], ReduceOp::Sum),
        |mut g| drop(g.all_reduce(&mut [1.0f32; 8], ReduceOp::Sum)),
    );
    let right = |e: &CommError| {
        matches!(
            e,
            CommError::Mismatch { .. } | CommError::PeerAborted { .. } | CommError::PeerLost { .. }
        )
    };
    assert!(errors.iter().all(right), "{errors:?}");
    assert!(
        errors.iter().any(|e| e.to_string().contains("32 bytes, 36 were expected")),
        "{errors:?}"
    );
}

#[test]
fn a_rank_that_leaves_says_why() {
    let errors = survivors(Group::barrier, |mut g| g.leave("the device is on fire"));
    assert!(errors.iter().any(|e| e.to_string().contains("on fire")), "{errors:?}");
}

#[test]
fn an_abort_ends_a_wait() {
    let config = GroupConfig { timeout: Duration::from_secs(60), ..GroupConfig::default() };
    let mut ranks = local_mesh(2, &config).unwrap();
    let mut first = ranks.remove(0);
    let handle = first.abort_handle();
    let waiting = std::thread::spawn(move || first.barrier());
    std::thread::sleep(Duration::from_millis(50));
    let start = Instant::now();
    handle.abort();
    assert!(matches!(waiting.join().unwrap(), Err(CommError::Aborted { .. })));
    assert!(start.elapsed() < MARGIN);
}

/// A group of two whose peer is the test itself, over TCP.
fn with_stranger(epoch: u64) -> (Group, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (own, _) = listener.accept().unwrap();
    let link: Box<dyn Link> = Box::new(StreamLink::tcp(own).unwrap());
    let config = GroupConfig { epoch, timeout: BOUND, ..GroupConfig::default() };
    (Group::new(0, vec![None, Some(link)], &config), peer)
}

#[test]
fn garbage_never_reaches_a_tensor() {
    let header = |kind: u8, epoch: u64, number: u64, length: u64| {
        let words = [epoch, number, length].map(u64::to_le_bytes).concat();
        let mut header = [&b"YNTA"[..], &[kind, 1, 0, 0], &words, &[0; 12]].concat();
        header.extend(crc32c::crc32c(&header).to_le_bytes());
        header
    };
    let damaged = |at: usize| {
        let mut frame = header(7, 3, 1, 0);
        frame[at] ^= 4;
        frame
    };
    let (barrier, all_reduce) = (7, 1);
    for (what, bytes, says) in [
        ("noise", vec![0xA5; 64], "starts with"),
        ("a web request", b"GET / HTTP/1.1\r\nHost: 127.0.0.1:80\r\n\r\n".to_vec(), "starts with"),
        ("an unknown operation", header(99, 3, 1, 0), "does not exist"),
        ("another epoch", header(barrier, 2, 1, 0), "epoch 2"),
        ("another operation", header(all_reduce, 3, 1, 0), "out of step"),
        ("a damaged header", damaged(17), "checksum"),
        ("a damaged payload", [header(barrier, 3, 1, 0), vec![1; 16]].concat(), "checksum"),
        ("an operation to come", header(barrier, 3, 9, 0), "out of step"),
        ("an absurd length", header(barrier, 3, 1, u64::MAX), "were expected"),
        ("an endless reason", header(0xAB, 3, 1, u64::MAX), "a reason of"),
        ("half a header", header(barrier, 3, 1, 0)[..9].to_vec(), "closed"),
    ] {
        let (mut group, mut stranger) = with_stranger(3);
        stranger.write_all(&bytes).unwrap();
        if what == "half a header" {
            drop(stranger);
        }
        let e = group.barrier().expect_err(what).to_string();
        assert!(e.contains(says), "{what}: {e}");
    }
}

#[test]
fn a_message_beyond_the_bound_is_not_read() {
    let config = GroupConfig { message_bytes_max: 10, timeout: BOUND, ..GroupConfig::default() };
    let mut ranks = local_mesh(2, &config).unwrap();
    let e = ranks[0].broadcast_bytes(&mut vec![0; 11], 0).unwrap_err();
    assert!(matches!(e, CommError::Arguments { .. }));
}

fn mesh_config(rank: usize, listeners: &[TcpListener]) -> MeshConfig {
    let addresses = listeners.iter().map(|l| vec![l.local_addr().unwrap()]).collect();
    MeshConfig {
        config_digest: [2; 32],
        join_timeout: Duration::from_secs(5),
        group: GroupConfig { epoch: 4, ..GroupConfig::default() },
        ..MeshConfig::new(rank, addresses, [1; 32])
    }
}

/// Changes the configuration of one rank.
type Change = fn(usize, &mut MeshConfig);

/// Lets ranks join, each with its configuration changed.
fn join(size: usize, change: Change, strangers: fn(&TcpListener)) -> Vec<Result<(), CommError>> {
    let listeners: Vec<_> = (0..size).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    listeners.iter().for_each(strangers);
    let configs: Vec<_> = (0..size)
        .map(|r| {
            let mut config = mesh_config(r, &listeners);
            change(r, &mut config);
            config
        })
        .collect();
    let threads: Vec<_> = configs
        .into_iter()
        .zip(listeners)
        .map(|(c, l)| std::thread::spawn(move || connect(c, vec![l])?.barrier()))
        .collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

#[test]
fn ranks_come_together_whatever_strangers_do() {
    let outcome = join(
        4,
        |_, _| {},
        |listener| {
            let address = listener.local_addr().unwrap();
            // One that says nothing (kept open), one that talks nonsense, one that hangs up.
            std::mem::forget(TcpStream::connect(address).unwrap());
            let mut noisy = TcpStream::connect(address).unwrap();
            noisy.write_all(&[0x55; 200]).unwrap();
            std::mem::forget(noisy);
            drop(TcpStream::connect(address).unwrap());
        },
    );
    assert!(outcome.iter().all(Result::is_ok), "{outcome:?}");
}

#[test]
fn ranks_that_do_not_belong_together_are_told_why() {
    let cases: [(&str, Change, &str); 5] = [
        (
            "token",
            |r, c| {
                // The other waits for it in vain: not for long.
                c.join_timeout = Duration::from_millis(600);
                if r == 1 {
                    c.token = [9; 32]
                }
            },
            "does not know the token",
        ),
        (
            "epoch",
            |r, c| {
                if r == 1 {
                    c.group.epoch = 3
                }
            },
            "the epochs differ",
        ),
        (
            "digest",
            |r, c| {
                if r == 1 {
                    c.config_digest = [0; 32]
                }
            },
            "the configurations differ",
        ),
        (
            "size",
            |r, c| {
                if r == 1 {
                    c.addresses.push(c.addresses[0].clone())
                }
            },
            "the world sizes differ",
        ),
        (
            "rank",
            |r, c| {
                if r == 1 {
                    c.rank = 7
                }
            },
            "there is no rank 7",
        ),
    ];
    for (what, change, says) in cases {
        let outcome = join(2, change, |_| {});
        let told =
            outcome.iter().filter_map(|o| o.as_ref().err()).any(|e| e.to_string().contains(says));
        assert!(told, "{what}: {outcome:?}");
    }
}

#[test]
fn a_rank_that_never_comes_is_named_in_time() {
    let listeners: Vec<_> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    let mut config = mesh_config(0, &listeners);
    config.join_timeout = Duration::from_millis(300);
    let start = Instant::now();
    let e = connect(config, vec![listeners[0].try_clone().unwrap()]).err().unwrap().to_string();
    assert!(e.contains("ranks [1, 2] did not connect"), "{e}");
    assert!(start.elapsed() < MARGIN);
}
