//! When the ranks of an instance are started, probed, blamed and started again: a pure core.
//!
//! Time is what the caller says it is, counted from any origin; nothing here reads a clock or
//! touches a process.

use std::net::SocketAddr;
use std::time::Duration;

/// How long after the first sign of a loss others are awaited, to tell cause from consequence.
const SETTLE: Duration = Duration::from_millis(100);
/// How long the probe token may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause before a start that follows a failed start; doubles up to [`BACKOFF_MAX`].
const BACKOFF: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(10);

/// What happened to an epoch's ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Input {
    /// Time has passed.
    Tick,
    /// A rank listens for its peers.
    Listening(usize, SocketAddr),
    /// A rank is connected with its peers.
    Joined(usize),
    /// The leader has reached the gateway.
    LeaderConnected,
    /// The probe went through all ranks.
    ProbePassed,
    /// The probe came back as a failure.
    ProbeFailed(String),
    /// A rank says that it can't go on; the flag: because it lost a peer.
    Failed(usize, String, bool),
    /// A rank's process ended; the flag: by a signal.
    Exited(usize, String, bool),
    /// The processes could not be started.
    SpawnFailed(String),
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    /// Start all ranks of this epoch.
    Spawn(u64),
    /// Tell all ranks where their peers listen.
    SendPeers(Vec<SocketAddr>),
    /// Send a token through all ranks.
    Probe,
    /// Let requests in.
    Open,
    /// Kill what is left of the ranks, and end open requests with this message.
    Lost(String),
    /// Never start again.
    GiveUp(String),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// Ranks load and join.
    Starting { addresses: Vec<Option<SocketAddr>>, joined: Vec<bool>, leader: bool },
    /// A token is under way.
    Probing { until: Duration },
    /// Requests are served.
    Ready,
    /// A loss was noticed; its cause is being found.
    Settling { until: Duration, was_ready: bool },
    /// The next start waits.
    Pausing { until: Duration },
    /// Given up.
    Dead,
}

/// How likely a sign is to be the cause rather than a consequence.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Blame {
    PeerLost,
    Exited,
    Failed,
    Killed,
}

/// The life of an instance's ranks, epoch after epoch.
pub(crate) struct Lifecycle {
    ranks: usize,
    epoch: u64,
    state: State,
    causes: Vec<(Blame, String)>,
    /// Starts that failed since the last one that became ready.
    failed_starts: u32,
    ever_ready: bool,
}

impl Lifecycle {
    /// Ranks to be started; the first action.
    pub(crate) fn new(ranks: usize) -> (Self, Vec<Action>) {
        let mut life = Self {
            ranks,
            epoch: 0,
            state: State::Dead,
            causes: Vec::new(),
            failed_starts: 0,
            ever_ready: false,
        };
        let actions = life.spawn();
        (life, actions)
    }

    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// When [`Input::Tick`] is due, at the latest.
    pub(crate) fn deadline(&self) -> Option<Duration> {
        match self.state {
            State::Probing { until } | State::Settling { until, .. } | State::Pausing { until } => {
                Some(until)
            }
            _ => None,
        }
    }

    /// Takes an input of epoch `epoch`. Inputs of other epochs are echoes, and ignored.
    pub(crate) fn step(&mut self, now: Duration, epoch: u64, input: Input) -> Vec<Action> {
        if epoch != self.epoch || self.state == State::Dead {
            return Vec::new();
        }
        match input {
            Input::Tick => self.tick(now),
            Input::Listening(rank, address) => self.listening(rank, address),
            Input::Joined(rank) => {
                if let State::Starting { joined, .. } = &mut self.state
                    && let Some(flag) = joined.get_mut(rank)
                {
                    *flag = true;
                }
                self.probe_if_complete(now)
            }
            Input::LeaderConnected => {
                if let State::Starting { leader, .. } = &mut self.state {
                    *leader = true;
                }
                self.probe_if_complete(now)
            }
            Input::ProbePassed => self.open(),
            Input::ProbeFailed(reason) => {
                self.lost(now, Blame::Failed, format!("the probe token failed: {reason}"))
            }
            Input::Failed(rank, message, peer_lost) => {
                let blame = if peer_lost { Blame::PeerLost } else { Blame::Failed };
                self.lost(now, blame, format!("rank {rank}: {message}"))
            }
            Input::Exited(rank, how, signal) => {
                let blame = if signal { Blame::Killed } else { Blame::Exited };
                self.lost(now, blame, format!("rank {rank} {how}"))
            }
            Input::SpawnFailed(reason) => self.lost(now, Blame::Failed, reason),
        }
    }

    fn spawn(&mut self) -> Vec<Action> {
        self.epoch += 1;
        self.causes.clear();
        self.state = State::Starting {
            addresses: vec![None; self.ranks],
            joined: vec![false; self.ranks],
            leader: false,
        };
        vec![Action::Spawn(self.epoch)]
    }

    fn listening(&mut self, rank: usize, address: SocketAddr) -> Vec<Action> {
        let State::Starting { addresses, .. } = &mut self.state else { return Vec::new() };
        if let Some(slot) = addresses.get_mut(rank) {
            *slot = Some(address);
        }
        match addresses.iter().copied().collect::<Option<Vec<_>>>() {
            Some(all) => vec![Action::SendPeers(all)],
            None => Vec::new(),
        }
    }

    fn probe_if_complete(&mut self, now: Duration) -> Vec<Action> {
        match &self.state {
            State::Starting { joined, leader: true, .. } if joined.iter().all(|j| *j) => {
                self.state = State::Probing { until: now + PROBE_TIMEOUT };
                vec![Action::Probe]
            }
            _ => Vec::new(),
        }
    }

    fn open(&mut self) -> Vec<Action> {
        if !matches!(self.state, State::Probing { .. }) {
            return Vec::new();
        }
        self.state = State::Ready;
        self.failed_starts = 0;
        self.ever_ready = true;
        vec![Action::Open]
    }

    fn lost(&mut self, now: Duration, blame: Blame, cause: String) -> Vec<Action> {
        match self.state {
            State::Pausing { .. } | State::Dead => return Vec::new(),
            State::Settling { .. } => {}
            _ => {
                let was_ready = self.state == State::Ready;
                self.state = State::Settling { until: now + SETTLE, was_ready };
            }
        }
        self.causes.push((blame, cause));
        Vec::new()
    }

    fn tick(&mut self, now: Duration) -> Vec<Action> {
        match self.state {
            State::Settling { until, was_ready } if now >= until => self.blame(now, was_ready),
            State::Probing { until } if now >= until => {
                let limit = PROBE_TIMEOUT.as_secs();
                self.lost(now, Blame::Failed, format!("no probe token came back in {limit} s"))
            }
            State::Pausing { until } if now >= until => self.spawn(),
            _ => Vec::new(),
        }
    }

    /// Names the likeliest cause (the first of the gravest signs), and plans what comes next.
    fn blame(&mut self, now: Duration, was_ready: bool) -> Vec<Action> {
        let gravest = self.causes.iter().map(|(b, _)| b.clone()).max();
        let cause = self
            .causes
            .iter()
            .find(|(b, _)| Some(b) == gravest.as_ref())
            .map_or_else(|| "a rank was lost".to_owned(), |(_, cause)| cause.clone());
        let mut actions = vec![Action::Lost(cause.clone())];
        if !self.ever_ready {
            // What fails before it ever ran will fail again: say so instead of trying.
            self.state = State::Dead;
            actions.push(Action::GiveUp(cause));
            return actions;
        }
        let pause = if was_ready {
            Duration::ZERO
        } else {
            self.failed_starts += 1;
            BACKOFF_MAX.min(BACKOFF * 2u32.pow((self.failed_starts - 1).min(8)))
        };
        if pause.is_zero() {
            actions.extend(self.spawn());
        } else {
            self.state = State::Pausing { until: now + pause };
        }
        actions
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    fn address(rank: usize) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], 1000 + rank as u16))
    }

    /// Brings an epoch to where requests are let in.
    fn make_ready(life: &mut Lifecycle, ranks: usize, now: Duration) {
        let epoch = life.epoch();
        for r in 0..ranks {
            life.step(now, epoch, Input::Listening(r, address(r)));
        }
        life.step(now, epoch, Input::LeaderConnected);
        let mut probed = false;
        for r in 0..ranks {
            probed |= life.step(now, epoch, Input::Joined(r)).contains(&Action::Probe);
        }
        assert!(probed);
        assert_eq!(life.step(now, epoch, Input::ProbePassed), [Action::Open]);
    }

    #[test]
    fn ready_means_that_a_token_went_through() {
        let (mut life, first) = Lifecycle::new(2);
        assert_eq!(first, [Action::Spawn(1)]);
        assert!(life.step(MS, 1, Input::Listening(0, address(0))).is_empty());
        let peers = vec![address(0), address(1)];
        let sent = life.step(MS, 1, Input::Listening(1, address(1)));
        assert_eq!(sent, [Action::SendPeers(peers)]);
        assert!(life.step(MS, 1, Input::Joined(0)).is_empty());
        assert!(life.step(MS, 1, Input::Joined(1)).is_empty(), "the leader is not connected yet");
        assert_eq!(life.step(MS, 1, Input::LeaderConnected), [Action::Probe]);
        assert_eq!(life.step(MS, 1, Input::ProbePassed), [Action::Open]);
    }

    #[test]
    fn the_killed_rank_is_blamed_not_those_that_missed_it() {
        let (mut life, _) = Lifecycle::new(3);
        make_ready(&mut life, 3, MS);
        life.step(10 * MS, 1, Input::Failed(0, "peer 2 lost".into(), true));
        life.step(11 * MS, 1, Input::Exited(0, "exited".into(), false));
        life.step(12 * MS, 1, Input::Exited(2, "was killed by signal 9".into(), true));
        let actions = life.step(110 * MS, 1, Input::Tick);
        let message = "rank 2 was killed by signal 9".to_owned();
        assert_eq!(actions, [Action::Lost(message), Action::Spawn(2)]);
    }

    #[test]
    fn a_first_start_that_fails_is_final() {
        let (mut life, _) = Lifecycle::new(1);
        life.step(MS, 1, Input::Failed(0, "no such file".into(), false));
        let actions = life.step(200 * MS, 1, Input::Tick);
        assert_eq!(actions[1], Action::GiveUp("rank 0: no such file".into()));
        assert!(life.step(300 * MS, 1, Input::Tick).is_empty());
    }

    #[test]
    fn later_starts_that_fail_are_tried_again_ever_more_slowly() {
        let (mut life, _) = Lifecycle::new(1);
        make_ready(&mut life, 1, MS);
        let mut now = MS;
        let mut pauses = Vec::new();
        for _ in 0..8 {
            let epoch = life.epoch();
            life.step(now, epoch, Input::Exited(0, "exited".into(), false));
            let lost_at = life.deadline().unwrap();
            let mut actions = life.step(lost_at, epoch, Input::Tick);
            now = lost_at;
            if let Some(until) = life.deadline() {
                actions = life.step(until, epoch, Input::Tick);
                now = until;
            }
            assert_eq!(actions.last(), Some(&Action::Spawn(epoch + 1)));
            pauses.push((now - lost_at).as_millis());
        }
        assert_eq!(pauses, [0, 500, 1000, 2000, 4000, 8000, 10_000, 10_000]);
    }

    proptest! {
        /// Whatever happens in whatever order: requests are let in only after a probe of the same
        /// epoch, every opening is closed before the next, and the core never gets stuck.
        #[test]
        fn epochs_open_and_close_in_turn(
            inputs in prop::collection::vec((0usize..9, 0usize..3, 0u64..3, 0u64..300), 0..200),
        ) {
            let (mut life, _) = Lifecycle::new(3);
            let mut now = Duration::ZERO;
            let (mut open, mut probing) = (false, false);
            for (kind, rank, back, ms) in inputs {
                now += ms as u32 * MS;
                let input = match kind {
                    0 => Input::Tick,
                    1 => Input::Listening(rank, address(rank)),
                    2 | 3 => Input::Joined(rank),
                    4 => Input::LeaderConnected,
                    5 => Input::ProbePassed,
                    6 => Input::Failed(rank, "x".into(), true),
                    7 => Input::Exited(rank, "x".into(), true),
                    _ => Input::ProbeFailed("x".into()),
                };
                let epoch = life.epoch().saturating_sub(back);
                for action in life.step(now, epoch, input) {
                    match action {
                        Action::Probe => { prop_assert!(!probing && !open); probing = true; }
                        Action::Open => { prop_assert!(probing && !open); open = true; }
                        Action::Lost(_) => { open = false; probing = false; }
                        Action::Spawn(e) => { prop_assert!(!open && !probing); prop_assert_eq!(e, life.epoch()); }
                        _ => {}
                    }
                }
            }
        }
    }
}
