//! The gateway's side of the token stream: takes the leader's connection, passes requests to it
//! and its events to the journal.

use std::io::BufReader;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use yunta_engine::wire::{FromLeader, ToLeader, WireError, read_line, write_line};
use yunta_engine::{Event, EventSink, Request, RequestId};

use crate::journal::{Delivery, Journal};
use crate::secret::Secret;

/// How long a connection may take to prove itself.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the leader may leave the gateway's messages unread.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// What the gateway learns and its supervisor must know.
pub(crate) enum Notice {
    /// The leader of this epoch is connected.
    LeaderConnected(u64),
    /// The leader of this epoch broke the protocol.
    Broken(u64, String),
}

struct State {
    journal: Journal,
    /// The present epoch and its leader's connection.
    epoch: u64,
    leader: Option<TcpStream>,
    /// Whether requests are passed on (else they wait in the journal).
    open: bool,
    /// The probe of the present epoch, if it is under way.
    probe: Option<RequestId>,
}

/// Open requests and the way to the leader.
pub(crate) struct Gateway {
    address: SocketAddr,
    secret: Secret,
    state: Mutex<State>,
}

impl Gateway {
    /// Opens a local port for leaders and accepts them on a thread of its own, for the life of the
    /// process or until the gateway is dropped. `notify` gets what happens.
    pub(crate) fn open(
        secret: Secret,
        notify: Arc<dyn Fn(Notice) + Send + Sync>,
    ) -> std::io::Result<Arc<Self>> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let gateway = Arc::new(Self {
            address: listener.local_addr()?,
            secret,
            state: Mutex::new(State {
                journal: Journal::default(),
                epoch: 0,
                leader: None,
                open: false,
                probe: None,
            }),
        });
        let weak = Arc::downgrade(&gateway);
        std::thread::Builder::new().name("gateway".to_owned()).spawn(move || {
            for stream in listener.incoming() {
                let Some(gateway) = weak.upgrade() else { return };
                let (Ok(stream), notify) = (stream, Arc::clone(&notify)) else { continue };
                let serve = move || gateway.serve_leader(stream, &*notify);
                // No thread, no leader: its epoch fails to start, and says so.
                let _ = std::thread::Builder::new().name("leader".to_owned()).spawn(serve);
            }
        })?;
        Ok(gateway)
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests that wait or run.
    pub(crate) fn open_requests(&self) -> usize {
        self.lock().journal.len()
    }

    /// Takes a request; it goes to the leader now or when there is one.
    pub(crate) fn submit(&self, request: Request, sink: Box<dyn EventSink>) {
        let mut state = self.lock();
        state.journal.insert(request, sink);
        if state.open {
            send_unsent(&mut state);
        }
    }

    /// Sends the probe of an epoch, past the queue of requests that wait for it.
    pub(crate) fn probe(&self, request: Request, sink: Box<dyn EventSink>) {
        let mut state = self.lock();
        let id = request.id;
        state.probe = Some(id);
        state.journal.insert(request, sink);
        if let Some(request) = state.journal.take_one(id) {
            send(&mut state, &ToLeader::Submit(Box::new(request)));
        }
    }

    pub(crate) fn cancel(&self, id: RequestId) {
        let mut state = self.lock();
        if state.journal.cancel(id) {
            send(&mut state, &ToLeader::Cancel(id));
        }
    }

    /// A new epoch begins: leaders of older ones are refused.
    pub(crate) fn begin(&self, epoch: u64) {
        let mut state = self.lock();
        (state.epoch, state.leader, state.open) = (epoch, None, false);
    }

    /// Lets requests through to the leader.
    pub(crate) fn let_through(&self) {
        let mut state = self.lock();
        state.open = true;
        send_unsent(&mut state);
    }

    /// The ranks are lost; see [`Journal::ranks_lost`].
    pub(crate) fn ranks_lost(&self, message: &str) -> (usize, usize) {
        let mut state = self.lock();
        (state.leader, state.open) = (None, false);
        // A probe belongs to its epoch.
        if let Some(probe) = state.probe.take() {
            state.journal.cancel(probe);
        }
        state.journal.ranks_lost(message)
    }

    /// Ends all requests for good.
    pub(crate) fn fail_all(&self, message: &str) {
        self.lock().journal.fail_all(message);
    }

    /// Lets the accepting thread notice that the gateway is gone.
    pub(crate) fn close(&self) {
        let _ = TcpStream::connect_timeout(&self.address, Duration::from_millis(100));
    }

    fn serve_leader(&self, stream: TcpStream, notify: &(dyn Fn(Notice) + Send + Sync)) {
        let Some((epoch, mut from)) = self.admit(stream) else { return };
        notify(Notice::LeaderConnected(epoch));
        loop {
            match read_line::<FromLeader>(&mut from) {
                Ok(Some(FromLeader::Event { id, event })) => {
                    if let Err(broken) = self.deliver(epoch, id, event) {
                        return notify(Notice::Broken(epoch, broken));
                    }
                }
                Ok(Some(FromLeader::Hello { .. })) => {
                    return notify(Notice::Broken(epoch, "it said hello twice".to_owned()));
                }
                // The process's end tells more than the connection's.
                Ok(None) | Err(WireError::Io(_)) => return,
                Err(e) => return notify(Notice::Broken(epoch, e.to_string())),
            }
        }
    }

    /// Checks who is there; strangers and leaders of other epochs are dropped.
    fn admit(&self, stream: TcpStream) -> Option<(u64, BufReader<TcpStream>)> {
        stream.set_read_timeout(Some(HELLO_TIMEOUT)).ok()?;
        stream.set_write_timeout(Some(WRITE_TIMEOUT)).ok()?;
        stream.set_nodelay(true).ok()?;
        let mut from = BufReader::new(stream.try_clone().ok()?);
        let Ok(Some(FromLeader::Hello { secret, epoch })) = read_line(&mut from) else {
            return None;
        };
        stream.set_read_timeout(None).ok()?;
        let mut state = self.lock();
        if !self.secret.matches(&secret) || epoch != state.epoch || state.leader.is_some() {
            tracing::warn!(epoch, "refused a connection that is not this epoch's leader");
            return None;
        }
        state.leader = Some(stream);
        Some((epoch, from))
    }

    fn deliver(&self, epoch: u64, id: RequestId, event: Event) -> Result<(), String> {
        let mut state = self.lock();
        if state.epoch != epoch {
            return Err("its epoch is over".to_owned());
        }
        match state.journal.deliver(id, event) {
            Delivery::Done => Ok(()),
            Delivery::Unwanted => {
                send(&mut state, &ToLeader::Cancel(id));
                Ok(())
            }
            Delivery::OutOfOrder { expected, got } => {
                Err(format!("it sent token {got} of request {}, {expected} was due", id.0))
            }
        }
    }
}

fn send_unsent(state: &mut State) {
    for request in state.journal.take_unsent() {
        send(state, &ToLeader::Submit(Box::new(request)));
    }
}

/// Sends to the leader. If that fails the leader is as good as dead: its connection is cut, and
/// the supervisor will hear of its end.
fn send(state: &mut State, message: &ToLeader) {
    let Some(leader) = &state.leader else { return };
    if let Err(e) = write_line(leader, message) {
        tracing::warn!(error = %e, "the leader does not take messages");
        let _ = leader.shutdown(std::net::Shutdown::Both);
        state.leader = None;
    }
}
