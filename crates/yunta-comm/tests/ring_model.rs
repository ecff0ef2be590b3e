//! The rings of shared memory under a model checker: every order in which the two sides can act, and
//! every value that their atomics may show each other.

#![allow(clippy::unwrap_used)]

use loom::sync::{Arc, Condvar, Mutex, atomic};

#[path = "../src/shm/ring.rs"]
#[allow(dead_code)]
mod ring;

use ring::{Control, Reader, Writer};

/// Stands for the doorbell: rung once for each wake.
#[derive(Default)]
struct Doorbell {
    rings: Mutex<u32>,
    rung: Condvar,
}

impl Doorbell {
    fn ring(&self) {
        *self.rings.lock().unwrap() += 1;
        self.rung.notify_one();
    }

    fn wait(&self) {
        let mut rings = self.rings.lock().unwrap();
        while *rings == 0 {
            rings = self.rung.wait(rings).unwrap();
        }
        *rings = 0;
    }
}

#[derive(Default)]
struct Shared {
    control: Control,
    to_reader: Doorbell,
    to_writer: Doorbell,
}

/// `total` bytes through a ring of `capacity`, each side asleep whenever it can't go on. A wake that
/// is missed is a deadlock, which the checker reports.
fn model(capacity: u64, total: u64, step: u64) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let shared = Arc::new(Shared::default());
        let other = Arc::clone(&shared);
        let writing = loom::thread::spawn(move || {
            let (control, mut writer) = (&other.control, Writer::new(capacity));
            let mut left = total;
            while left > 0 {
                let wanted = step.min(left);
                let (_, room) = writer.room(control, wanted).unwrap();
                let n = room.min(wanted);
                if n > 0 {
                    writer.publish(control, n);
                    left -= n;
                    if writer.must_wake(control) {
                        other.to_reader.ring();
                    }
                } else if writer.park(control).unwrap() {
                    other.to_writer.wait();
                }
            }
        });
        let (control, mut reader) = (&shared.control, Reader::new(capacity));
        let mut left = total;
        while left > 0 {
            let (_, there) = reader.available(control).unwrap();
            if there > 0 {
                reader.release(control, there);
                left -= there;
                if reader.must_wake(control) {
                    shared.to_writer.ring();
                }
            } else if reader.park(control).unwrap() {
                shared.to_reader.wait();
            }
        }
        writing.join().unwrap();
    });
}

#[test]
fn no_wake_is_missed_by_a_reader() {
    model(4, 2, 1);
}

#[test]
fn no_wake_is_missed_by_a_writer() {
    model(1, 3, 1);
}

#[test]
fn no_wake_is_missed_when_both_sleep_in_turn() {
    model(2, 4, 2);
}
