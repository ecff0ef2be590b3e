//! An operation under way.

use std::ops::Range;

use crate::element::Fold;
use crate::exchange::{Exchange, Incoming, Outgoing, Peers, Reduction, Sink, Surroundings};
use crate::frame::{Header, Kind};
use crate::topology::Topology;
use crate::{CommError, ReduceOp};

/// An operation under way. Ranks are counted within the group.
pub(super) struct Running<'g> {
    pub(super) peers: &'g mut Peers,
    pub(super) sent: &'g mut Vec<u32>,
    pub(super) received: &'g mut Vec<u32>,
    pub(super) members: &'g [usize],
    pub(super) topology: &'g Topology,
    pub(super) rank: usize,
    pub(super) group: u16,
    pub(super) number: u64,
    pub(super) around: &'g Surroundings<'g>,
}

/// Frames to and from other ranks: to or from whom, and the place of the payload in bytes.
#[derive(Default)]
pub(super) struct Moves<'a> {
    /// What is sent, if not the buffer.
    pub(super) source: Option<&'a [u8]>,
    /// Where payloads go.
    pub(super) buffer: &'a mut [u8],
    pub(super) sends: Vec<(usize, Range<usize>)>,
    pub(super) receives: Vec<(usize, Range<usize>)>,
    /// What is folded into the buffer, instead of received.
    pub(super) fold: Option<Folding>,
    /// From whom a message comes whose length it decides, up to a bound.
    pub(super) message: Option<(usize, &'a mut Vec<u8>, u64)>,
}

/// How what all other ranks send is folded with this rank's own.
pub(super) struct Folding {
    /// This rank's own, in the buffer.
    pub(super) range: Range<usize>,
    pub(super) fold: Fold,
    pub(super) op: ReduceOp,
    /// Bytes of an element.
    pub(super) unit: usize,
    /// Whether the same place is being sent.
    pub(super) is_sent: bool,
}

impl Running<'_> {
    pub(super) fn size(&self) -> usize {
        self.members.len()
    }

    pub(super) fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.size()).filter(move |peer| *peer != rank)
    }

    /// Runs until all frames are through.
    pub(super) fn exchange(&mut self, moves: Moves<'_>) -> Result<(), CommError> {
        let mut outgoing = Vec::with_capacity(moves.sends.len());
        for (to, range) in moves.sends {
            let peer = self.world(to);
            let header = self.header(peer, range.len(), true);
            outgoing.push(Outgoing::new(peer, range, &header));
        }
        let mut incoming = Vec::with_capacity(moves.receives.len() + self.size());
        for (from, range) in moves.receives {
            self.expect(&mut incoming, from, Sink::Place(range));
        }
        if let Some((from, message, most)) = moves.message {
            self.expect(&mut incoming, from, Sink::Message(message, most));
        }
        if let Some(f) = &moves.fold {
            for peer in self.others() {
                self.expect(&mut incoming, peer, Sink::Fold(f.range.len()));
            }
        }
        let place = self.rank;
        let reduction = moves.fold.map(|f| {
            let Folding { range, fold, op, unit, is_sent } = f;
            Reduction { range, fold, op, place, unit, is_sent }
        });
        let mut exchange = Exchange {
            source: moves.source,
            buffer: moves.buffer,
            outgoing,
            incoming,
            reduction,
            folded: 0,
        };
        exchange.run(self.peers, self.around)
    }

    fn expect<'a>(&mut self, incoming: &mut Vec<Incoming<'a>>, from: usize, sink: Sink<'a>) {
        let peer = self.world(from);
        let expected = self.header(peer, 0, false);
        incoming.push(Incoming::new(peer, expected, sink));
    }

    fn world(&self, member: usize) -> usize {
        self.members.get(member).copied().unwrap_or(usize::MAX)
    }

    /// The header of the next frame to or from a peer.
    fn header(&mut self, peer: usize, length: usize, is_sent: bool) -> Header {
        let count = if is_sent { self.sent.get_mut(peer) } else { self.received.get_mut(peer) };
        let part = count.map_or(0, |c| std::mem::replace(c, c.wrapping_add(1)));
        let link = self.peers.get(peer).and_then(Option::as_ref);
        Header {
            kind: Kind::Data(self.around.operation),
            is_checked: link.is_some_and(|p| !p.link.is_checked()),
            group: self.group,
            epoch: self.around.epoch,
            number: self.number,
            length: length as u64,
            part,
        }
    }
}
