//! The protocol that makes a stream out of frames which may be lost, doubled, damaged or late: a
//! state machine without clock, thread or socket.
//!
//! Each frame carries epoch, sequence number, length, what its sender has consumed, and a CRC32C of
//! all that. A sender keeps no more frames on the way than the receiver has room for (credits): a
//! frame never meets an absent receive. What is missing is asked for over the side channel, and all
//! from there on is sent again.
//!
//! Frame, little-endian: magic (4), payload bytes (4), epoch (8), sequence (8), consumed (8), CRC32C of
//! header and payload (4), zero (4), payload.
//! Side message: kind (1), zero (7), sequence (8).

use std::collections::VecDeque;

/// Bytes of a frame's header.
pub(super) const HEADER: usize = 40;
/// Bytes of a message on the side channel.
pub(super) const SIDE: usize = 16;
const MAGIC: [u8; 4] = *b"YNTF";
/// Where the checksum lies.
const CHECKSUM: std::ops::Range<usize> = 32..36;

/// What goes over the side channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    /// All frames before this one are consumed: there is room for as many more.
    Consumed(u64),
    /// This frame is missing: send it, and what came after it, again.
    Missing(u64),
    /// No frames come after so many.
    Finished(u64),
    /// All frames have come, and the stream is at its end.
    Received(u64),
}

impl Side {
    pub(super) fn encode(self) -> [u8; SIDE] {
        let (kind, sequence) = match self {
            Self::Consumed(s) => (1, s),
            Self::Missing(s) => (2, s),
            Self::Finished(s) => (3, s),
            Self::Received(s) => (4, s),
        };
        let mut out = [0; SIDE];
        if let Some((head, tail)) = out.split_at_mut_checked(8) {
            if let Some(first) = head.first_mut() {
                *first = kind;
            }
            tail.copy_from_slice(&u64::to_le_bytes(sequence));
        }
        out
    }

    pub(super) fn decode(bytes: &[u8; SIDE]) -> Result<Self, String> {
        let sequence = u64::from_le_bytes(field(bytes, 8));
        match bytes.first() {
            Some(1) => Ok(Self::Consumed(sequence)),
            Some(2) => Ok(Self::Missing(sequence)),
            Some(3) => Ok(Self::Finished(sequence)),
            Some(4) => Ok(Self::Received(sequence)),
            other => Err(format!("side message {other:?} does not exist")),
        }
    }
}

/// How much went wrong on a link, and was mended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mended {
    /// Frames that were sent again.
    pub repeated: u64,
    /// Frames that came damaged, or were no frames.
    pub damaged: u64,
    /// Frames that came twice.
    pub doubled: u64,
    /// Frames of another epoch.
    pub stale: u64,
    /// Frames that came before one that was missing.
    pub early: u64,
}

/// One end of the stream.
pub(super) struct Core {
    epoch: u64,
    /// Payload bytes of a frame, at most.
    payload_max: usize,
    /// Frames that may be on the way: the receiver's room.
    window: u64,
    /// The next frame to make.
    next: u64,
    /// Frames that are not known to be consumed; the first is `acknowledged`.
    kept: VecDeque<Vec<u8>>,
    acknowledged: u64,
    /// The next kept frame to post.
    to_post: u64,
    /// The next frame to come.
    expected: u64,
    /// Payloads in order, whose first bytes may be consumed.
    inbox: VecDeque<Vec<u8>>,
    /// Bytes of the first that are consumed.
    taken: usize,
    /// Frames consumed, and how many of them the peer was told over the side channel.
    consumed: u64,
    told: u64,
    /// The frame that was last asked for.
    asked: Option<u64>,
    out: VecDeque<Side>,
    /// Frames that the peer sends in all, once it says so.
    last: Option<u64>,
    /// Whether the peer has all frames, and knows that no more come.
    is_through: bool,
    pub(super) mended: Mended,
}

impl Core {
    /// `depth` receives are posted on both sides, of `frame_max` bytes each.
    pub(super) fn new(epoch: u64, frame_max: usize, depth: usize) -> Self {
        Self {
            epoch,
            payload_max: frame_max.saturating_sub(HEADER).max(1),
            window: depth.max(1) as u64,
            next: 0,
            kept: VecDeque::new(),
            acknowledged: 0,
            to_post: 0,
            expected: 0,
            inbox: VecDeque::new(),
            taken: 0,
            consumed: 0,
            told: 0,
            asked: None,
            out: VecDeque::new(),
            last: None,
            is_through: false,
            mended: Mended::default(),
        }
    }

    /// Payload bytes that can be taken now.
    pub(super) fn room(&self) -> usize {
        let frames = self.window.saturating_sub(self.next - self.acknowledged);
        frames as usize * self.payload_max
    }

    /// Takes some of the stream, at most [`Core::room`].
    pub(super) fn push(&mut self, mut payload: &[u8]) {
        while let Some((chunk, rest)) = payload
            .split_at_checked(payload.len().min(self.payload_max))
            .filter(|c| !c.0.is_empty())
        {
            let mut frame = Vec::with_capacity(HEADER + chunk.len());
            frame.extend_from_slice(&MAGIC);
            frame.extend_from_slice(&(chunk.len() as u32).to_le_bytes());
            for word in [self.epoch, self.next, 0] {
                frame.extend_from_slice(&word.to_le_bytes());
            }
            frame.extend_from_slice(&[0; 8]);
            frame.extend_from_slice(chunk);
            self.kept.push_back(frame);
            self.next += 1;
            payload = rest;
        }
    }

    /// The next frame to post, if there is one. Call [`Core::posted`] once it is.
    pub(super) fn next_frame(&mut self) -> Option<&[u8]> {
        let at = usize::try_from(self.to_post.checked_sub(self.acknowledged)?).ok()?;
        let consumed = self.consumed;
        let frame = self.kept.get_mut(at)?;
        frame.get_mut(24..32)?.copy_from_slice(&consumed.to_le_bytes());
        let sum = checksum(frame).to_le_bytes();
        frame.get_mut(CHECKSUM)?.copy_from_slice(&sum);
        Some(frame)
    }

    pub(super) fn posted(&mut self) {
        self.to_post += 1;
    }

    /// A frame came. Whatever it is, it does no harm.
    pub(super) fn on_frame(&mut self, frame: &[u8]) {
        let length = u32::from_le_bytes(field(frame, 4)) as usize;
        let payload = frame.get(HEADER..HEADER.saturating_add(length));
        let Some(payload) = payload.filter(|_| field::<4>(frame, 0) == MAGIC) else {
            self.mended.damaged += 1;
            return;
        };
        let whole = frame.get(..HEADER + length).unwrap_or_default();
        if field::<4>(frame, CHECKSUM.start) != checksum(whole).to_le_bytes() {
            self.mended.damaged += 1;
            return;
        }
        let [epoch, sequence, consumed] =
            [8, 16, 24].map(|at| u64::from_le_bytes(field(frame, at)));
        if epoch != self.epoch {
            self.mended.stale += 1;
            return;
        }
        self.acknowledge(consumed);
        match sequence.cmp(&self.expected) {
            std::cmp::Ordering::Less => self.mended.doubled += 1,
            std::cmp::Ordering::Equal if self.inbox.len() as u64 <= self.window => {
                self.inbox.push_back(payload.to_vec());
                self.expected += 1;
                self.asked = None;
                self.answer_end();
            }
            _ => {
                self.mended.early += 1;
                if self.asked != Some(self.expected) {
                    self.ask();
                }
            }
        }
    }

    /// Asks for what is expected: when it is missing, or when nothing has come for a while.
    pub(super) fn ask(&mut self) {
        self.asked = Some(self.expected);
        self.out.push_back(Side::Missing(self.expected));
    }

    /// A message came over the side channel.
    pub(super) fn on_side(&mut self, side: Side) -> Result<(), String> {
        match side {
            Side::Consumed(s) if s <= self.next => self.acknowledge(s),
            Side::Missing(s) if s <= self.next => {
                // Frames before it have come, but may not be consumed yet: they stay kept.
                if s >= self.acknowledged && s < self.to_post {
                    self.mended.repeated += self.to_post - s;
                    self.to_post = s;
                }
            }
            Side::Finished(s) if s >= self.expected => {
                self.last = Some(s);
                self.answer_end();
                if s > self.expected {
                    self.ask();
                }
            }
            Side::Received(s) if s == self.next => self.is_through = true,
            other => return Err(format!("{other:?}, but only {} frames were sent", self.next)),
        }
        Ok(())
    }

    fn answer_end(&mut self) {
        if self.last == Some(self.expected) {
            self.out.push_back(Side::Received(self.expected));
        }
    }

    /// Says that no more comes; call it once.
    pub(super) fn finish(&mut self) {
        self.out.push_back(Side::Finished(self.next));
    }

    /// Whether the peer has all that was sent.
    pub(super) fn is_through(&self) -> bool {
        self.is_through
    }

    fn acknowledge(&mut self, consumed: u64) {
        while self.acknowledged < consumed.min(self.next) {
            self.kept.pop_front();
            self.acknowledged += 1;
        }
        self.to_post = self.to_post.max(self.acknowledged);
    }

    /// What to send over the side channel.
    pub(super) fn next_side(&mut self) -> Option<Side> {
        if let Some(side) = self.out.pop_front() {
            return Some(side);
        }
        // Often enough that the sender never starves.
        let is_due = self.consumed - self.told >= (self.window / 4).max(1);
        is_due.then(|| {
            self.told = self.consumed;
            Side::Consumed(self.consumed)
        })
    }

    /// What has come, in order: one piece of it.
    pub(super) fn front(&self) -> &[u8] {
        self.inbox.front().and_then(|p| p.get(self.taken..)).unwrap_or_default()
    }

    /// Gives back the first bytes of [`Core::front`].
    pub(super) fn consume(&mut self, bytes: usize) {
        self.taken += bytes;
        if self.inbox.front().is_some_and(|p| self.taken >= p.len()) {
            self.inbox.pop_front();
            self.taken = 0;
            self.consumed += 1;
        }
    }
}

fn checksum(frame: &[u8]) -> u32 {
    let before = crc32c::crc32c(frame.get(..CHECKSUM.start).unwrap_or_default());
    crc32c::crc32c_append(before, frame.get(CHECKSUM.end..).unwrap_or_default())
}

/// Zeros where the bytes end.
fn field<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..).and_then(<[u8]>::first_chunk).copied().unwrap_or([0; N])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A channel that does to frames what it likes.
    struct Channel {
        state: u64,
        percent: u64,
        frames: Vec<Vec<u8>>,
    }

    impl Channel {
        fn roll(&mut self, n: u64) -> u64 {
            self.state = self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (self.state >> 33) % n
        }

        fn put(&mut self, frame: &[u8]) {
            let mut frame = frame.to_vec();
            if self.roll(100) < self.percent {
                match self.roll(4) {
                    0 => return,
                    1 => self.frames.push(frame.clone()),
                    2 => {
                        let bit = self.roll(frame.len() as u64 * 8) as usize;
                        frame[bit / 8] ^= 1 << (bit % 8);
                    }
                    _ => {
                        let end = self.roll(frame.len() as u64) as usize;
                        frame.truncate(end);
                    }
                }
            }
            let place = self.frames.len() - self.roll(2).min(self.frames.len() as u64) as usize;
            self.frames.insert(if self.percent > 0 { place } else { self.frames.len() }, frame);
        }
    }

    /// Two ends that both send; what each receives.
    fn talk(seed: u64, percent: u64, window: usize, sizes: [usize; 2]) -> [Core; 2] {
        let text =
            |of: usize| -> Vec<u8> { (0..sizes[of]).map(|i| (i * (of + 3) % 251) as u8).collect() };
        let mut ends = [0, 1].map(|_| Core::new(7, HEADER + 10, window));
        let mut ways = [1, 2].map(|s| Channel { state: seed ^ s, percent, frames: Vec::new() });
        let mut sent = [0, 0];
        let mut got = [Vec::new(), Vec::new()];
        let mut has_finished = [false; 2];
        for round in 0..100_000 {
            let is_over = |e: &usize| got[*e].len() == sizes[1 - e] && ends[*e].is_through();
            if [0, 1].iter().all(is_over) {
                assert_eq!(got[0], text(1));
                assert_eq!(got[1], text(0));
                return ends;
            }
            for end in [0, 1] {
                let core = &mut ends[end];
                let n =
                    core.room().min(sizes[end] - sent[end]).min(1 + ways[end].roll(60) as usize);
                core.push(&text(end)[sent[end]..sent[end] + n]);
                sent[end] += n;
                while let Some(frame) = core.next_frame() {
                    let frame = frame.to_vec();
                    core.posted();
                    ways[end].put(&frame);
                }
                for frame in std::mem::take(&mut ways[end].frames) {
                    ends[1 - end].on_frame(&frame);
                    assert!(ends[1 - end].inbox.len() <= window, "within the receiver's room");
                }
                let other = &mut ends[1 - end];
                while !other.front().is_empty() && ways[end].roll(4) > 0 {
                    let n = other.front().len().min(1 + ways[end].roll(12) as usize);
                    got[1 - end].extend_from_slice(&other.front()[..n]);
                    other.consume(n);
                }
                if round % 5 == 4 {
                    other.ask();
                }
                if sent[end] == sizes[end] && !std::mem::replace(&mut has_finished[end], true) {
                    ends[end].finish();
                }
                while let Some(side) = ends[1 - end].next_side() {
                    let side = Side::decode(&side.encode()).unwrap();
                    ends[end].on_side(side).unwrap();
                }
            }
        }
        panic!("no end in sight: {:?} of {sizes:?}", got.map(|g| g.len()));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn the_stream_is_whole_whatever_becomes_of_frames(
            seed: u64, percent in 0u64..60, window in 1usize..20, a in 0usize..1500, b in 0usize..1500,
        ) {
            talk(seed, percent, window, [a, b]);
        }

        #[test]
        fn garbage_is_dropped(bytes: Vec<u8>) {
            let mut core = Core::new(1, 100, 4);
            core.on_frame(&bytes);
            prop_assert!(core.front().is_empty());
            prop_assert_eq!(core.mended.damaged, 1);
        }
    }

    #[test]
    fn nothing_is_repeated_on_a_channel_without_faults() {
        for end in talk(5, 0, 8, [3000, 2000]) {
            let Mended { damaged, doubled, stale, early, .. } = end.mended;
            assert_eq!((damaged, doubled, stale, early), (0, 0, 0, 0));
        }
    }

    #[test]
    fn frames_of_another_epoch_are_dropped() {
        let (mut old, mut new) = (Core::new(1, 100, 4), Core::new(2, 100, 4));
        old.push(b"from the past");
        new.on_frame(old.next_frame().unwrap());
        assert!(new.front().is_empty());
        assert_eq!(new.mended.stale, 1);
    }

    #[test]
    fn a_peer_that_asks_for_what_was_never_sent_lies() {
        let mut core = Core::new(1, 100, 4);
        assert!(core.on_side(Side::Missing(1)).is_err());
        assert!(core.on_side(Side::Consumed(1)).is_err());
        assert!(Side::decode(&[9; SIDE]).is_err());
    }
}
