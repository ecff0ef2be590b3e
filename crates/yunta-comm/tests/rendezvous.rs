//! Ranks that come together over every transport, and what they agree on.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::net::TcpListener;
use std::time::Duration;

use yunta_comm::{
    CommError, Group, GroupConfig, LinkConfig, MeshConfig, ReduceOp, Transport, connect,
};

/// How a world is to be linked: addresses and connections per rank, and what all or some want.
#[derive(Clone, Copy)]
struct Wish {
    addresses: usize,
    connections: usize,
    transport: fn(usize) -> Option<Transport>,
}

fn join(size: usize, wish: Wish) -> Vec<Result<Group, CommError>> {
    join_over(size, wish.addresses, |rank| LinkConfig {
        connections: wish.connections,
        transport: (wish.transport)(rank),
        ..LinkConfig::default()
    })
}

fn join_over(
    size: usize,
    addresses: usize,
    links: impl Fn(usize) -> LinkConfig,
) -> Vec<Result<Group, CommError>> {
    let bind = |_| TcpListener::bind("127.0.0.1:0").unwrap();
    let listeners: Vec<Vec<TcpListener>> =
        (0..size).map(|_| (0..addresses).map(bind).collect()).collect();
    let of = |l: &Vec<TcpListener>| l.iter().map(|l| l.local_addr().unwrap()).collect();
    let addresses: Vec<Vec<_>> = listeners.iter().map(of).collect();
    let timeout = Duration::from_secs(10);
    let threads: Vec<_> = listeners
        .into_iter()
        .enumerate()
        .map(|(rank, listeners)| {
            let config = MeshConfig {
                links: links(rank),
                join_timeout: Duration::from_secs(3),
                group: GroupConfig { timeout, ..GroupConfig::default() },
                ..MeshConfig::new(rank, addresses.clone(), [1; 32])
            };
            std::thread::spawn(move || connect(config, listeners))
        })
        .collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

#[test]
fn encrypted_connections_carry_the_same() {
    for connections in [1, 3] {
        let links = |_: usize| LinkConfig {
            transport: Some(Transport::Tcp),
            connections,
            is_encrypted: true,
            ..LinkConfig::default()
        };
        let groups = join_over(3, 1, links);
        let threads: Vec<_> = groups
            .into_iter()
            .map(|group| {
                let group = group.unwrap();
                let link = group.link_name(usize::from(group.rank() == 0)).unwrap();
                assert!(link.starts_with("tls 127.0.0.1"), "{link}");
                std::thread::spawn(move || reduce(group, 700_001))
            })
            .collect();
        for thread in threads {
            let sums = thread.join().unwrap();
            let expected = |i: usize| (0..3).map(|r| ((i + r) % 11) as f32).sum::<f32>();
            assert!(sums.iter().enumerate().all(|(i, v)| *v == expected(i)), "{connections}");
        }
    }
}

#[test]
fn ranks_that_do_not_all_encrypt_are_told() {
    let links = |rank: usize| LinkConfig {
        transport: Some(Transport::Tcp),
        is_encrypted: rank == 1,
        ..LinkConfig::default()
    };
    let errors: Vec<String> = join_over(2, 1, links)
        .into_iter()
        .map(|g| g.map(|_| ()).unwrap_err().to_string())
        .collect();
    assert!(errors[1].contains("only one of the two encrypts"), "{errors:?}");
    // RDMA can't be.
    let links = |_: usize| LinkConfig {
        transport: Some(Transport::Verbs),
        is_encrypted: true,
        ..LinkConfig::default()
    };
    for group in join_over(2, 1, links) {
        let e = group.map(|_| ()).unwrap_err().to_string();
        assert!(e.contains("RDMA can't be encrypted"), "{e}");
    }
}

fn reduce(mut group: Group, len: usize) -> Vec<f32> {
    let mut x: Vec<f32> = (0..len).map(|i| ((i + group.rank()) % 11) as f32).collect();
    group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
    x
}

#[test]
fn any_number_of_connections_carries_the_same() {
    let tcp = |_| Some(Transport::Tcp);
    let any = |_| None;
    for (transport, addresses, connections, name) in [
        (tcp as fn(usize) -> Option<Transport>, 1, 1, "tcp 127.0.0.1"),
        (tcp, 1, 3, "and 2 more"),
        (tcp, 2, 1, "and 1 more"),
        (any, 1, 1, "shm"),
        (any, 2, 4, "shm"),
    ] {
        let (size, len) = (3, 700_001);
        let groups = join(size, Wish { addresses, connections, transport });
        let threads: Vec<_> = groups
            .into_iter()
            .map(|group| {
                let group = group.unwrap();
                for peer in (0..size).filter(|p| *p != group.rank()) {
                    let link = group.link_name(peer).unwrap();
                    assert!(link.contains(name), "{link}");
                    let expected = if name == "shm" { Transport::Shm } else { Transport::Tcp };
                    assert_eq!(group.topology().link(group.rank(), peer), Some(expected));
                }
                std::thread::spawn(move || reduce(group, len))
            })
            .collect();
        for thread in threads {
            let sums = thread.join().unwrap();
            let expected = |i: usize| (0..size).map(|r| ((i + r) % 11) as f32).sum::<f32>();
            assert!(sums.iter().enumerate().all(|(i, v)| *v == expected(i)), "{name}");
        }
    }
}

#[test]
fn one_rank_that_insists_is_enough() {
    let transport = |rank| Some(Transport::Tcp).filter(|_| rank == 1);
    for group in join(3, Wish { addresses: 1, connections: 1, transport }) {
        let group = group.unwrap();
        let link = |a, b| group.topology().link(a, b);
        assert_eq!(link(0, 1), Some(Transport::Tcp));
        assert_eq!(link(1, 2), Some(Transport::Tcp));
        assert_eq!(link(0, 2), Some(Transport::Shm));
    }
}

#[test]
fn ranks_that_want_different_transports_are_told() {
    let transport = |rank| Some(if rank == 0 { Transport::Tcp } else { Transport::Shm });
    let outcome = join(2, Wish { addresses: 1, connections: 1, transport });
    let told = |r: &Result<Group, CommError>| {
        r.as_ref().err().is_some_and(|e| e.to_string().contains("transport that is wanted"))
    };
    assert!(outcome.iter().any(told));
}
