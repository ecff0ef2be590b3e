//! Links over devices that move frames and promise nothing: unreliable connections of RDMA, and the
//! emulated fabric.

mod core;

use std::io::{self, IoSlice};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub use self::core::Mended;
use self::core::{Core, SIDE, Side};
use crate::link::{Interest, Link, Transport, Wait};

/// A wait looks at the device this often: frames announce themselves to nobody.
const LOOK: Duration = Duration::from_micros(50);
/// And this often once nothing has come for a while: a rank that idles must not burn a core.
const LOOK_IDLE: Duration = Duration::from_millis(4);
/// A rank that waits asks again after so long: the last frame may be lost, and the request with the
/// frame that was to answer it.
const ASK: Duration = Duration::from_millis(2);
/// And after so long once nothing has come for a while.
const ASK_IDLE: Duration = Duration::from_millis(50);
/// How often the service thread looks at the time.
const PARK: Duration = Duration::from_millis(100);
/// How long a closed link still answers a peer that misses something.
const LINGER: Duration = Duration::from_millis(500);

/// A device that moves frames to one peer: each arrives once, or not, or twice, or damaged; into
/// receives that are posted at the peer, and else nowhere.
pub trait FramePort: Send {
    /// For error messages.
    fn name(&self) -> String;

    /// What it is.
    fn transport(&self) -> Transport;

    /// Bytes of a frame, at most.
    fn frame_max(&self) -> usize;

    /// Receives that are posted on either side, always.
    fn depth(&self) -> usize;

    /// Posts a frame; `false` if there is no room for now.
    ///
    /// # Errors
    /// If the device fails.
    fn try_post(&mut self, frame: &[u8]) -> io::Result<bool>;

    /// Hands over a frame that came, and posts its receive again; `false` if there is none.
    ///
    /// # Errors
    /// If the device fails.
    fn try_take(&mut self, take: &mut dyn FnMut(&[u8])) -> io::Result<bool>;
}

/// The end of a link that two threads share: the rank's own, and one that answers the peer while
/// the rank computes.
struct End {
    core: Core,
    port: Box<dyn FramePort>,
    side: Box<dyn Link>,
    /// What the side channel has not taken yet, or what came of a message.
    side_out: Vec<u8>,
    side_in: Vec<u8>,
    /// When something came last.
    heard: Instant,
    /// When the peer was asked last.
    asked: Instant,
    error: Option<(io::ErrorKind, String)>,
    close_by: Option<Instant>,
}

/// An ordered, reliable stream over a [`FramePort`].
pub struct ReliableLink {
    end: Arc<Mutex<End>>,
    name: String,
    transport: Transport,
    service: Option<JoinHandle<()>>,
}

impl ReliableLink {
    /// Over a port, with a reliable link to the same peer for requests; both of an epoch.
    ///
    /// # Errors
    /// The system's, if there are no more threads.
    pub fn new(port: Box<dyn FramePort>, side: Box<dyn Link>, epoch: u64) -> io::Result<Self> {
        let (name, transport) = (port.name(), port.transport());
        let end = Arc::new(Mutex::new(End {
            core: Core::new(epoch, port.frame_max(), port.depth()),
            port,
            side,
            side_out: Vec::new(),
            side_in: Vec::new(),
            heard: Instant::now(),
            asked: Instant::now(),
            error: None,
            close_by: None,
        }));
        let shared = Arc::clone(&end);
        // Ends with the link: at the latest `LINGER` after it is closed.
        let service = std::thread::Builder::new()
            .name("link-service".to_owned())
            .spawn(move || serve(&shared))?;
        Ok(Self { end, name, transport, service: Some(service) })
    }

    /// What went wrong so far, and was mended.
    pub fn mended(&self) -> Mended {
        lock(&self.end).core.mended
    }
}

fn lock(end: &Mutex<End>) -> MutexGuard<'_, End> {
    end.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers the peer's requests for what it misses.
fn serve(end: &Mutex<End>) {
    loop {
        let wait = {
            let mut end = lock(end);
            let pumped = end.pump();
            let is_over = |by: Instant| end.core.is_through() || Instant::now() >= by;
            if pumped.is_err() || end.close_by.is_some_and(is_over) {
                return end.side.close();
            }
            end.side.arm(Interest::Read)
        };
        let Ok(Some(wait)) = wait else { return };
        let mut poll = libc::pollfd { fd: wait.descriptor, events: wait.events, revents: 0 };
        // SAFETY: one entry. However the wait ends, the loop looks again; the descriptor is open, as
        // the link that it is of lives as long as `end`.
        unsafe { libc::poll(&raw mut poll, 1, PARK.as_millis() as libc::c_int) };
    }
}

impl End {
    /// Moves all that can be moved, in both directions.
    fn pump(&mut self) -> io::Result<()> {
        if let Some((kind, reason)) = &self.error {
            return Err(io::Error::new(*kind, reason.clone()));
        }
        self.try_pump().inspect_err(|e| self.error = Some((e.kind(), e.to_string())))
    }

    fn try_pump(&mut self) -> io::Result<()> {
        let lies = |e: String| io::Error::new(io::ErrorKind::InvalidData, e);
        let Self { core, port, heard, .. } = self;
        while port.try_take(&mut |frame| {
            core.on_frame(frame);
            *heard = Instant::now();
        })? {}
        // What came before the peer's end counts: its frames were taken above.
        let mut bytes = [0; 16 * SIDE];
        loop {
            match self.side.try_recv(&mut bytes)? {
                0 => break,
                n => self.side_in.extend_from_slice(bytes.get(..n).unwrap_or_default()),
            }
        }
        let whole = self.side_in.len() / SIDE * SIDE;
        for message in self.side_in.drain(..whole).as_slice().chunks_exact(SIDE) {
            if let Some(message) = message.first_chunk() {
                self.core.on_side(Side::decode(message).map_err(lies)?).map_err(lies)?;
            }
        }
        while let Some(frame) = self.core.next_frame() {
            if !self.port.try_post(frame)? {
                break;
            }
            self.core.posted();
        }
        while let Some(side) = self.core.next_side() {
            self.side_out.extend_from_slice(&side.encode());
        }
        if !self.side_out.is_empty() {
            let n = self.side.try_send(&[IoSlice::new(&self.side_out)])?;
            self.side_out.drain(..n);
        }
        Ok(())
    }
}

impl Link for ReliableLink {
    fn name(&self) -> String {
        self.name.clone()
    }

    fn transport(&self) -> Transport {
        self.transport
    }

    fn try_send(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let mut end = lock(&self.end);
        end.pump()?;
        let mut taken = 0;
        for part in parts {
            let n = part.len().min(end.core.room());
            end.core.push(part.get(..n).unwrap_or_default());
            taken += n;
            if n < part.len() {
                break;
            }
        }
        if taken > 0 {
            end.pump()?;
        }
        Ok(taken)
    }

    fn try_recv(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut end = lock(&self.end);
        let pumped = end.pump();
        let mut taken = 0;
        while let Some(rest) = buffer.get_mut(taken..).filter(|r| !r.is_empty()) {
            let front = end.core.front();
            let n = front.len().min(rest.len());
            if n == 0 {
                break;
            }
            if let (Some(to), Some(from)) = (rest.get_mut(..n), front.get(..n)) {
                to.copy_from_slice(from);
            }
            end.core.consume(n);
            taken += n;
        }
        match pumped {
            // What came before the peer's end is read first.
            Err(e) if taken == 0 => Err(e),
            _ => Ok(taken),
        }
    }

    fn arm(&mut self, interest: Interest) -> io::Result<Option<Wait>> {
        let mut end = lock(&self.end);
        let pumped = end.pump();
        let is_ready = match interest {
            Interest::Read => !end.core.front().is_empty(),
            Interest::Write => end.core.room() > 0 && pumped.is_ok(),
        };
        if is_ready {
            return Ok(None);
        }
        pumped?;
        let quiet = end.heard.elapsed();
        // Ever more rarely: a silent peer may be computing for long.
        if quiet >= ASK && end.asked.elapsed() >= (quiet / 8).clamp(ASK, ASK_IDLE) {
            end.asked = Instant::now();
            end.core.ask();
            end.pump()?;
        }
        let wait = end.side.arm(Interest::Read)?;
        let look = (quiet / 32).clamp(LOOK, LOOK_IDLE);
        Ok(wait.map(|w| Wait { at_most: w.at_most.min(look), ..w }))
    }

    fn is_checked(&self) -> bool {
        true
    }

    fn close(&mut self) {
        let mut end = lock(&self.end);
        if end.close_by.is_none() {
            end.close_by = Some(Instant::now() + LINGER);
            end.core.finish();
            // An error here is one that ends the service as well.
            let _ = end.pump();
        }
    }
}

impl Drop for ReliableLink {
    /// Waits until the peer has all that was sent, at most `LINGER`: the process may end after.
    fn drop(&mut self) {
        self.close();
        if let Some(service) = self.service.take() {
            // A panic there was reported when it happened.
            let _ = service.join();
        }
    }
}
