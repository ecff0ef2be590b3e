//! An emulated fabric: devices within one process that move frames as RDMA's unreliable connections
//! do, with faults drawn from a seed.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::group::mesh_of;
use crate::reliable::{FramePort, ReliableLink};
use crate::{CommError, Group, GroupConfig, StreamLink, Topology, Transport};

/// What a fabric does to frames. Shares are of 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FabricConfig {
    /// Where the faults come from.
    pub seed: u64,
    /// Share of frames that are lost.
    pub loss: f64,
    /// Share that arrives twice.
    pub duplication: f64,
    /// Share in which a bit is wrong.
    pub corruption: f64,
    /// Everything arrives so much later.
    pub latency: Duration,
    /// Bytes of a frame, at most.
    pub frame_max: usize,
    /// Receives posted per direction.
    pub depth: usize,
}

impl Default for FabricConfig {
    fn default() -> Self {
        Self {
            seed: 0,
            loss: 0.0,
            duplication: 0.0,
            corruption: 0.0,
            latency: Duration::ZERO,
            frame_max: 4096,
            depth: 64,
        }
    }
}

/// One direction of a cable.
#[derive(Default)]
struct Way {
    frames: VecDeque<(Instant, Vec<u8>)>,
}

struct State {
    config: FabricConfig,
    random: u64,
    ways: Vec<Way>,
    /// Cables, by number, that carry nothing.
    cut: Vec<usize>,
    /// Frames that met no receive.
    refused: u64,
}

/// A fabric, whose cables can be cut and mended.
#[derive(Clone)]
pub struct Fabric(Arc<Mutex<State>>);

impl Fabric {
    /// Without cables.
    pub fn new(config: FabricConfig) -> Self {
        let random = config.seed ^ 0x9E37_79B9_7F4A_7C15;
        let state = State { config, random, ways: Vec::new(), cut: Vec::new(), refused: 0 };
        Self(Arc::new(Mutex::new(state)))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Both ends of a new cable; its number counts from 0.
    pub fn cable(&self) -> (FabricPort, FabricPort) {
        let mut state = self.lock();
        let at = state.ways.len();
        state.ways.extend([Way::default(), Way::default()]);
        let port = |out: usize| FabricPort { fabric: self.clone(), out };
        (port(at), port(at + 1))
    }

    /// From now on the cable swallows all frames, in silence.
    pub fn cut(&self, cable: usize) {
        self.lock().cut.push(cable);
    }

    /// The cable works again.
    pub fn mend(&self, cable: usize) {
        self.lock().cut.retain(|c| *c != cable);
    }

    /// Frames that arrived where no receive was posted: there must be none.
    pub fn refused(&self) -> u64 {
        self.lock().refused
    }

    /// A world of `size` ranks, all cabled with each other: cable by cable (0, 1), (0, 2), (1, 2) and
    /// so on for the lower rank first.
    ///
    /// # Errors
    /// [`CommError::Rendezvous`] if the system has no more sockets or threads.
    pub fn mesh(&self, size: usize, config: &GroupConfig) -> Result<Vec<Group>, CommError> {
        mesh_of(&Topology::full(size, Transport::Emulated), config, |_, _| {
            let (a, b) = self.cable();
            let (side_a, side_b) = StreamLink::pair()?;
            let link = |port: FabricPort, side| {
                ReliableLink::new(Box::new(port), Box::new(side), config.epoch)
            };
            Ok((Box::new(link(a, side_a)?), Box::new(link(b, side_b)?)))
        })
    }
}

impl State {
    /// From 0 to 1; splitmix64.
    fn draw(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn send(&mut self, way: usize, frame: &[u8]) {
        let c = self.config;
        let (lost, doubled, wrong) = (self.draw(), self.draw(), self.draw());
        if self.cut.contains(&(way / 2)) || lost < c.loss {
            return;
        }
        let mut frame = frame.to_vec();
        let at = (self.draw() * frame.len() as f64) as usize;
        if let Some(byte) = frame.get_mut(at).filter(|_| wrong < c.corruption) {
            *byte ^= 1 << (at % 8);
        }
        let due = Instant::now() + c.latency;
        // Twice as many as are posted: the doubled ones are the fabric's own doing.
        let room = c.depth * 2;
        let Some(way) = self.ways.get_mut(way) else { return };
        for _ in 0..if doubled < c.duplication { 2 } else { 1 } {
            if way.frames.len() < room {
                way.frames.push_back((due, frame.clone()));
            } else {
                self.refused += 1;
            }
        }
    }
}

/// One end of a cable.
pub struct FabricPort {
    fabric: Fabric,
    out: usize,
}

impl FramePort for FabricPort {
    fn name(&self) -> String {
        format!("emulated cable {}", self.out / 2)
    }

    fn transport(&self) -> Transport {
        Transport::Emulated
    }

    fn frame_max(&self) -> usize {
        self.fabric.lock().config.frame_max
    }

    fn depth(&self) -> usize {
        self.fabric.lock().config.depth
    }

    fn try_post(&mut self, frame: &[u8]) -> io::Result<bool> {
        self.fabric.lock().send(self.out, frame);
        Ok(true)
    }

    fn try_take(&mut self, take: &mut dyn FnMut(&[u8])) -> io::Result<bool> {
        let frame = {
            let mut state = self.fabric.lock();
            let way = state.ways.get_mut(self.out ^ 1);
            way.and_then(|w| w.frames.pop_front_if(|(due, _)| *due <= Instant::now()))
        };
        let Some((_, frame)) = frame else { return Ok(false) };
        take(&frame);
        Ok(true)
    }
}
