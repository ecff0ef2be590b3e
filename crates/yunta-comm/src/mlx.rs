//! MLX's files and environment variables, so that `mlx.launch` can start ranks
//! (`mlx/distributed/ring/ring.cpp`, `mlx/distributed/jaccl`, `python/mlx/_distributed_utils/launch.py`).

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};

use serde_json::Value;

use crate::{CommError, Group, MeshConfig, connect, meet};

/// The first port of a rank that `mlx.launch` gives none.
const STARTING_PORT: u16 = 32323;
/// The most hosts, or cables of one, that are read.
const MOST: usize = 1024;

/// What is wrong with a file or a variable of MLX's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MlxError {
    /// A variable is not what it must be.
    #[error("{name}: {reason}")]
    Variable {
        /// Which.
        name: String,
        /// Why.
        reason: String,
    },
    /// A hostfile makes no sense.
    #[error("hostfile: {0}")]
    Hostfile(String),
    /// A device file makes no sense.
    #[error("device file: {0}")]
    Devices(String),
}

/// What `mlx.launch` tells a rank.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Environment {
    /// `MLX_RANK`, or `JACCL_RANK`, which wins.
    pub rank: usize,
    /// Where each rank listens: what `MLX_HOSTFILE` names holds.
    pub addresses: Option<Vec<Vec<SocketAddr>>>,
    /// RDMA devices: what `MLX_IBV_DEVICES` or `JACCL_IBV_DEVICES` names holds.
    pub devices: Option<Devices>,
    /// `MLX_JACCL_COORDINATOR` or `JACCL_COORDINATOR`.
    pub coordinator: Option<SocketAddr>,
    /// Whether `MLX_JACCL_RING` or `JACCL_RING` is there, whatever it says.
    pub prefers_ring: bool,
}

impl Environment {
    /// Of this process; `None` if there is no rank.
    ///
    /// # Errors
    /// [`MlxError`] that names the variable, or says what is wrong in a file.
    pub fn read() -> Result<Option<Self>, MlxError> {
        Self::of(&|name| std::env::var(name).ok(), &|path| {
            std::fs::read_to_string(path).map_err(|e| format!("{path}: {e}"))
        })
    }

    fn of(
        variable: &dyn Fn(&str) -> Option<String>,
        file: &dyn Fn(&str) -> Result<String, String>,
    ) -> Result<Option<Self>, MlxError> {
        let either = |name: &str| {
            let names =
                [format!("JACCL_{name}"), format!("MLX_{name}"), format!("MLX_JACCL_{name}")];
            names.into_iter().find_map(|n| variable(&n).map(|value| (n, value)))
        };
        let bad = |name: &str, reason: String| MlxError::Variable { name: name.to_owned(), reason };
        let Some((name, rank)) = either("RANK") else { return Ok(None) };
        let rank = rank.trim().parse().map_err(|_| bad(&name, format!("{rank:?} is no rank")))?;
        let mut found = Self { rank, ..Self::default() };
        if let Some(path) = variable("MLX_HOSTFILE") {
            let text = file(&path).map_err(|e| bad("MLX_HOSTFILE", e))?;
            found.addresses = Some(hostfile(&text)?);
        }
        if let Some((name, path)) = either("IBV_DEVICES") {
            let text = file(&path).map_err(|e| bad(&name, e))?;
            found.devices = Some(Devices::parse(&text)?);
        }
        if let Some((name, address)) = either("COORDINATOR") {
            found.coordinator = Some(resolve(&address).map_err(|e| bad(&name, e))?);
        }
        found.prefers_ring = either("RING").is_some();
        match found.size() {
            Some(n) if rank >= n => Err(bad(&name, format!("there is no rank {rank} among {n}"))),
            _ => Ok(Some(found)),
        }
    }

    /// Ranks that were started, if a file says so.
    pub fn size(&self) -> Option<usize> {
        let addresses = self.addresses.as_ref().map(Vec::len);
        addresses.or(self.devices.as_ref().map(Devices::size))
    }

    /// Joins the ranks that were started with this one. Rank and addresses of `config` are replaced;
    /// its RDMA devices are, if a device file names some.
    ///
    /// # Errors
    /// [`CommError::Rendezvous`], also if the environment does not say where the others are.
    pub fn connect(&self, mut config: MeshConfig) -> Result<Group, CommError> {
        let rank = self.rank;
        let failed = |reason: String| CommError::Rendezvous { rank, reason };
        let listen = |address: SocketAddr| {
            let bound = TcpListener::bind(address);
            bound.map_err(|e| failed(format!("can't listen at {address}: {e}")))
        };
        config.rank = rank;
        if let Some(addresses) = &self.addresses {
            let own = addresses.get(rank).map_or(&[][..], Vec::as_slice);
            let listeners = own.iter().map(|a| listen(*a)).collect::<Result<_, _>>()?;
            config.addresses.clone_from(addresses);
            return connect(config, listeners);
        }
        let (Some(devices), Some(coordinator)) = (&self.devices, self.coordinator) else {
            return Err(failed(
                "the other ranks are not known: neither MLX_HOSTFILE is set, nor MLX_IBV_DEVICES \
                 and MLX_JACCL_COORDINATOR"
                    .to_owned(),
            ));
        };
        let meeting = if rank == 0 { Some(listen(coordinator)?) } else { None };
        let own = facing(coordinator).map_err(|e| failed(format!("{coordinator}: {e}")))?;
        let listener = listen(own)?;
        let own = listener.local_addr().map_err(|e| failed(e.to_string()))?;
        config.addresses = vec![Vec::new(); devices.size()];
        let all = meet(config.clone(), coordinator, meeting, own)?;
        config.addresses = all.into_iter().map(|address| vec![address]).collect();
        let row = (0..devices.size()).map(|peer| devices.between(rank, peer).to_vec());
        config.links.verbs.devices = row.collect();
        connect(config, vec![listener])
    }
}

/// This host's address on the way to another, with any port.
fn facing(other: SocketAddr) -> io::Result<SocketAddr> {
    let any = match other {
        SocketAddr::V4(_) => SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0),
        SocketAddr::V6(_) => SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0),
    };
    let probe = UdpSocket::bind(any)?;
    // Sends nothing: the system picks the route.
    probe.connect(other)?;
    Ok(SocketAddr::new(probe.local_addr()?.ip(), 0))
}

/// Reads a hostfile: a rank's `["ip:port", ..]` per row, as ranks get it, or the launcher's own, a
/// list of `{"ssh", "ips", ..}` with or without `{"hosts": ..}` around it.
///
/// # Errors
/// [`MlxError::Hostfile`].
pub fn hostfile(text: &str) -> Result<Vec<Vec<SocketAddr>>, MlxError> {
    let bad = |reason: String| MlxError::Hostfile(reason);
    let whole: Value = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
    let rows = whole.get("hosts").unwrap_or(&whole);
    let rows = rows.as_array().ok_or_else(|| bad("it is no list of hosts".to_owned()))?;
    if rows.is_empty() || rows.len() > MOST {
        return Err(bad(format!("it has {} hosts", rows.len())));
    }
    let mut hosts = Vec::with_capacity(rows.len());
    let mut port = STARTING_PORT;
    for (rank, row) in rows.iter().enumerate() {
        let texts = row.get("ips").unwrap_or(row).as_array();
        let texts = texts.ok_or_else(|| bad(format!("rank {rank} has no list of addresses")))?;
        let mut addresses = Vec::with_capacity(texts.len());
        for text in texts {
            let text =
                text.as_str().ok_or_else(|| bad(format!("rank {rank}: {text} is no address")))?;
            let address = match text.parse() {
                // The launcher gives each address of each rank the next port.
                Ok(ip) => SocketAddr::new(ip, port),
                Err(_) => resolve(text).map_err(|e| bad(format!("rank {rank}: {e}")))?,
            };
            port = port.saturating_add(1);
            addresses.push(address);
        }
        if addresses.is_empty() || addresses.len() > MOST {
            return Err(bad(format!("rank {rank} has {} addresses", addresses.len())));
        }
        hosts.push(addresses);
    }
    Ok(hosts)
}

fn resolve(text: &str) -> Result<SocketAddr, String> {
    let found = text.to_socket_addrs().map_err(|e| format!("{text:?}: {e}"))?.next();
    found.ok_or_else(|| format!("{text:?} has no address"))
}

/// JACCL's device file: which RDMA devices lead from each rank to each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Devices {
    rows: Vec<Vec<Vec<String>>>,
}

impl Devices {
    /// Reads a square matrix whose cells are `null`, a name, or a list of names: one per cable. The
    /// k-th name on both sides is of the same cable.
    ///
    /// # Errors
    /// [`MlxError::Devices`].
    pub fn parse(text: &str) -> Result<Self, MlxError> {
        let bad = |reason: String| MlxError::Devices(reason);
        let whole: Vec<Vec<Value>> = serde_json::from_str(text).map_err(|e| bad(e.to_string()))?;
        let n = whole.len();
        if n == 0 || n > MOST {
            return Err(bad(format!("it has {n} rows")));
        }
        let mut rows = Vec::with_capacity(n);
        let mut cables: HashMap<(usize, usize), usize> = HashMap::new();
        for (a, row) in whole.iter().enumerate() {
            if row.len() != n {
                return Err(bad(format!("row {a} has {} cells instead of {n}", row.len())));
            }
            let cells: Result<Vec<Vec<String>>, String> = row.iter().map(names).collect();
            let cells = cells.map_err(|e| bad(format!("row {a}: {e}")))?;
            for (b, cell) in cells.iter().enumerate() {
                if a == b && !cell.is_empty() {
                    return Err(bad(format!("rank {a} has a cable to itself")));
                }
                cables.insert((a, b), cell.len());
                let back = cables.get(&(b, a)).copied();
                if back.is_some_and(|back| back != cell.len()) {
                    return Err(bad(format!("ranks {b} and {a} name different numbers of cables")));
                }
            }
            rows.push(cells);
        }
        Ok(Self { rows })
    }

    /// Ranks.
    pub fn size(&self) -> usize {
        self.rows.len()
    }

    /// The devices of `a` that lead to `b`, one per cable.
    pub fn between(&self, a: usize, b: usize) -> &[String] {
        self.rows.get(a).and_then(|row| row.get(b)).map_or(&[], Vec::as_slice)
    }

    /// Whether every rank has a cable to every other.
    pub fn is_mesh(&self) -> bool {
        let n = self.size();
        n >= 2 && (0..n).all(|a| (0..n).all(|b| a == b || !self.between(a, b).is_empty()))
    }

    /// Whether every rank has as many cables to the next.
    pub fn is_ring(&self) -> bool {
        let n = self.size();
        let cables = |a: usize| self.between(a, (a + 1) % n).len();
        n >= 2 && cables(0) > 0 && (1..n).all(|a| cables(a) == cables(0))
    }
}

fn names(cell: &Value) -> Result<Vec<String>, String> {
    let name = |v: &Value| v.as_str().map(str::to_owned).ok_or_else(|| format!("{v} is no device"));
    match cell {
        Value::Null => Ok(Vec::new()),
        Value::Array(all) if all.len() <= MOST => all.iter().map(name).collect(),
        other => Ok(vec![name(other)?]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn both_forms_of_hostfile_are_read() {
        let ring = r#"[["10.0.0.1:5000", "10.0.1.1:5001"], ["10.0.0.2:5000", "[::1]:5001"]]"#;
        let ring = hostfile(ring).unwrap();
        assert_eq!(ring[0], [address("10.0.0.1:5000"), address("10.0.1.1:5001")]);
        assert_eq!(ring[1][1], address("[::1]:5001"));
        let launcher = r#"{"backend": "ring", "envs": ["A=B"], "hosts": [
            {"ssh": "m1", "ips": ["10.0.0.1"], "rdma": [null, "rdma_en5"]},
            {"ssh": "m2", "ips": ["10.0.0.2"], "rdma": ["rdma_en5", null]}]}"#;
        let hosts = hostfile(launcher).unwrap();
        assert_eq!(hosts, [[address("10.0.0.1:32323")], [address("10.0.0.2:32324")]]);
        let plain = r#"[{"ssh": "m1", "ips": ["10.0.0.1"]}]"#;
        assert_eq!(hostfile(plain).unwrap(), [[address("10.0.0.1:32323")]]);
    }

    #[test]
    fn hostfiles_that_make_no_sense_are_explained() {
        for (text, says) in [
            ("[", "EOF"),
            ("{}", "no list"),
            ("[]", "0 hosts"),
            (r#"[["10.0.0.1:1"], 7]"#, "rank 1 has no list"),
            (r#"[[7]]"#, "rank 0: 7 is no address"),
            (r#"[[]]"#, "rank 0 has 0 addresses"),
            (r#"[["10.0.0.1:99999"]]"#, "rank 0"),
        ] {
            let e = hostfile(text).unwrap_err().to_string();
            assert!(e.contains(says), "{text}: {e}");
        }
    }

    #[test]
    fn device_files_say_who_is_cabled_with_whom() {
        let text = r#"[[null, "rdma_en5", ["rdma_en3", "rdma_en4"]],
                       ["rdma_en5", null, null],
                       [["rdma_en3", "rdma_en4"], null, null]]"#;
        let devices = Devices::parse(text).unwrap();
        assert_eq!(devices.between(0, 2), ["rdma_en3", "rdma_en4"]);
        assert!(devices.between(1, 2).is_empty());
        assert!(!devices.is_mesh() && !devices.is_ring());
        let pair = Devices::parse(r#"[[[], ["a"]], ["b", []]]"#).unwrap();
        assert!(pair.is_mesh() && pair.is_ring());
        for (text, says) in [
            (r#"[["a"]]"#, "cable to itself"),
            (r#"[[null, "a"], ["b"]]"#, "row 1 has 1 cells"),
            (r#"[[null, "a"], [["b", "c"], null]]"#, "different numbers"),
            (r#"[[null, 5], ["b", null]]"#, "5 is no device"),
        ] {
            let e = Devices::parse(text).unwrap_err().to_string();
            assert!(e.contains(says), "{text}: {e}");
        }
    }

    #[test]
    fn the_environment_is_read_and_jaccl_wins() {
        let environment = |variables: &[(&str, &str)]| {
            let of: HashMap<String, String> =
                variables.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
            Environment::of(&|name| of.get(name).cloned(), &|path| match path {
                "hosts" => Ok(r#"[["10.0.0.1:1"], ["10.0.0.2:1"]]"#.to_owned()),
                "devices" => Ok(r#"[[null, "a"], ["b", null]]"#.to_owned()),
                other => Err(format!("{other}: not found")),
            })
        };
        assert_eq!(environment(&[]), Ok(None));
        let ring = environment(&[("MLX_RANK", "1"), ("MLX_HOSTFILE", "hosts")]).unwrap().unwrap();
        assert_eq!((ring.rank, ring.addresses.unwrap().len()), (1, 2));
        let jaccl = environment(&[
            ("MLX_RANK", "0"),
            ("JACCL_RANK", "1"),
            ("MLX_IBV_DEVICES", "devices"),
            ("MLX_JACCL_COORDINATOR", "10.0.0.1:32323"),
            ("MLX_JACCL_RING", "0"),
        ]);
        let jaccl = jaccl.unwrap().unwrap();
        assert_eq!((jaccl.rank, jaccl.prefers_ring), (1, true));
        assert_eq!(jaccl.coordinator, Some(address("10.0.0.1:32323")));
        assert!(jaccl.devices.unwrap().is_mesh());
        let e = environment(&[("MLX_RANK", "2"), ("MLX_HOSTFILE", "hosts")]).unwrap_err();
        assert!(e.to_string().contains("no rank 2 among 2"), "{e}");
        let e = environment(&[("MLX_RANK", "x")]).unwrap_err();
        assert!(e.to_string().contains("MLX_RANK"), "{e}");
        let e = environment(&[("MLX_RANK", "0"), ("MLX_HOSTFILE", "none")]).unwrap_err();
        assert!(e.to_string().contains("none: not found"), "{e}");
    }
}
