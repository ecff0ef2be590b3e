//! A queue pair as a port for frames.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use super::destination::Destination;
use super::device::Route;
use super::queue::QueuePair;
use super::{Library, UNIT, VerbsConfig, VerbsError};
use crate::Transport;
use crate::reliable::FramePort;
use crate::rendezvous::random;

/// A queue pair that does not know its peer yet.
pub(crate) struct Unconnected {
    queue: QueuePair,
    route: Route,
    own: Destination,
}

impl Unconnected {
    pub(super) fn new(
        library: &Arc<Library>,
        route: Route,
        config: &VerbsConfig,
    ) -> Result<(Self, Destination), VerbsError> {
        let queue = QueuePair::new(library, &route, config.kind, config.frame, config.depth)?;
        let psn = random::<4>().map_err(|e| VerbsError::call("random", &route.device, e))?;
        let own = Destination {
            kind: config.kind,
            is_global: route.is_global,
            mtu: u8::try_from(route.mtu).unwrap_or(1),
            lid: route.lid,
            depth: u16::try_from(config.depth).unwrap_or(u16::MAX),
            number: queue.number(),
            // 24 bits are counted.
            psn: u32::from_le_bytes(psn) >> 8,
            frame: u32::try_from(config.frame).unwrap_or(u32::MAX),
            gid: route.gid.gid,
        };
        Ok((Self { queue, route, own }, own))
    }

    /// With a peer: ready to receive what it sends, once it is told so.
    pub(crate) fn connect(mut self, peer: &Destination) -> Result<VerbsPort, VerbsError> {
        if peer.kind != self.own.kind {
            return Err(VerbsError::Peer("is of another kind (RC and UC don't mix)"));
        }
        if peer.frame != self.own.frame || peer.depth != self.own.depth {
            return Err(VerbsError::Peer("has other frames, or another depth"));
        }
        self.queue.connect(&self.route, &self.own, peer)?;
        let depth = usize::from(self.own.depth);
        // Not before RTS: Apple's devices refuse receives until then.
        for slot in 0..depth {
            let failed = |e| VerbsError::call("ibv_post_recv", &self.route.device, e);
            self.queue.receive_into(slot).map_err(failed)?;
        }
        Ok(VerbsPort {
            name: format!("rdma {} to queue pair {:#x}", self.route.device, peer.number),
            frame: self.own.frame as usize,
            depth,
            free: (depth..2 * depth).collect(),
            arrived: VecDeque::with_capacity(depth),
            queue: self.queue,
        })
    }
}

/// A connected queue pair. Slots below `depth` are receives, the others sends.
pub(crate) struct VerbsPort {
    name: String,
    queue: QueuePair,
    frame: usize,
    depth: usize,
    /// Send slots that are not under way.
    free: Vec<usize>,
    /// Receives that have completed, with the bytes that came.
    arrived: VecDeque<(usize, usize)>,
}

impl VerbsPort {
    fn poll(&mut self) -> io::Result<()> {
        let Self { queue, free, arrived, depth, .. } = self;
        queue.poll(&mut |done| {
            if done.slot < *depth {
                arrived.push_back((done.slot, done.bytes));
            } else {
                free.push(done.slot);
            }
        })
    }
}

impl FramePort for VerbsPort {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn transport(&self) -> Transport {
        Transport::Verbs
    }

    fn frame_max(&self) -> usize {
        self.frame
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn try_post(&mut self, frame: &[u8]) -> io::Result<bool> {
        if self.free.is_empty() {
            self.poll()?;
        }
        let Some(slot) = self.free.pop() else { return Ok(false) };
        // A message must span as many of Apple's units as the receive that it meets.
        let bytes = if self.frame > UNIT { self.frame } else { frame.len() };
        match self.queue.send_from(slot, frame, bytes) {
            Ok(()) => Ok(true),
            Err(e) => {
                self.free.push(slot);
                // The device counts otherwise than we do: there is room once something completes.
                if e.kind() == io::ErrorKind::OutOfMemory { Ok(false) } else { Err(e) }
            }
        }
    }

    fn try_take(&mut self, take: &mut dyn FnMut(&[u8])) -> io::Result<bool> {
        if self.arrived.is_empty() {
            self.poll()?;
        }
        let Some((slot, bytes)) = self.arrived.pop_front() else { return Ok(false) };
        take(self.queue.received(slot, bytes));
        self.queue.receive_into(slot)?;
        Ok(true)
    }
}
