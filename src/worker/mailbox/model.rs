//! The mailbox in every interleaving, and with every value that the memory model lets a load see
//! (`ci/loom.sh`). What runs here is the mailbox itself; the worker is reduced to what `Worker::turn` does
//! with it, the kernel to a bell that wakes whoever waits.
//!
//! A lost wake shows as a deadlock: the worker waits for a bell that nobody will ring.

use std::sync::Arc;
use std::time::Duration;

use loom::sync::Notify;
use loom::thread;

use super::*;

/// Wakes a worker. Like the event counter it keeps one wake for a worker that is not waiting yet.
#[derive(Clone)]
struct Bell(Arc<Notify>);

impl Bell {
    fn new() -> Self {
        Self(Arc::new(Notify::new()))
    }
}

impl Waker for Bell {
    fn wake(&self) {
        self.0.notify();
    }
}

/// A worker's view: what it read, and whether it was told to stop.
struct Reader {
    directory: Directory<u32>,
    bell: Bell,
    budget: usize,
    read: Vec<u32>,
    stop: Option<Duration>,
}

impl Reader {
    fn new(directory: &Directory<u32>, budget: usize) -> Self {
        let (directory, bell) = (directory.clone(), Bell::new());
        Self { directory, bell, budget, read: Vec::new(), stop: None }
    }

    fn attach(&self) {
        self.directory[0].attach(self.bell.clone());
    }

    /// As `Worker::turn`: waits unless it has something to do, then reads the mailbox.
    fn turn(&mut self) {
        let mailbox = &self.directory[0];
        if !mailbox.is_notified() {
            self.bell.0.wait();
        }
        if !mailbox.is_notified() {
            return;
        }
        mailbox.begin_drain();
        if let Some(deadline) = mailbox.stop_request() {
            self.stop.get_or_insert(deadline);
        }
        for _ in 0..self.budget {
            match mailbox.pop() {
                Some(Envelope::User(message)) => self.read.push(message),
                Some(_) => panic!("only user messages are sent here"),
                None => return,
            }
        }
        mailbox.mark_again();
    }
}

/// Explores everything that `preemptions` forced switches allow (besides those at waits and ends).
fn explore(preemptions: usize, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.max_branches = 10_000;
    builder.check(model);
}

fn sender(directory: &Directory<u32>, message: u32) -> thread::JoinHandle<Result<(), RemoteError<u32>>> {
    let remote = Remote::new(directory.clone());
    thread::spawn(move || remote.post(0, message))
}

/// Two threads send one message each; the worker sleeps whenever it may. It gets both.
#[test]
fn no_message_is_left_unread_by_a_worker_that_sleeps() {
    explore(3, || {
        let directory = directory::<u32>(1, 2);
        let mut reader = Reader::new(&directory, 8);
        reader.attach();
        let senders = [sender(&directory, 1), sender(&directory, 2)];
        while reader.read.len() < 2 {
            reader.turn();
        }
        for sender in senders {
            sender.join().expect("sender").expect("room");
        }
        reader.read.sort_unstable();
        assert_eq!(reader.read, [1, 2]);
    });
}

/// The same with a budget of one message a turn: what is left keeps the worker awake.
#[test]
fn a_worker_that_stops_reading_early_comes_back_for_the_rest() {
    explore(3, || {
        let directory = directory::<u32>(1, 2);
        let mut reader = Reader::new(&directory, 1);
        reader.attach();
        let senders = [sender(&directory, 1), sender(&directory, 2)];
        while reader.read.len() < 2 {
            reader.turn();
        }
        for sender in senders {
            sender.join().expect("sender").expect("room");
        }
    });
}

/// A message may be there before the worker has given its waker.
#[test]
fn what_comes_before_the_waker_is_read_in_the_first_turn() {
    explore(4, || {
        let directory = directory::<u32>(1, 2);
        let mut reader = Reader::new(&directory, 8);
        let sender = sender(&directory, 1);
        reader.attach();
        while reader.read.is_empty() {
            reader.turn();
        }
        sender.join().expect("sender").expect("room");
    });
}

/// One worker leaves a message for another during a callback, and marks and wakes it at the end of its turn,
/// while a third party sends as well.
#[test]
fn a_message_that_is_queued_first_and_marked_later_is_read() {
    explore(3, || {
        let directory = directory::<u32>(1, 2);
        let mut reader = Reader::new(&directory, 8);
        reader.attach();
        let peer = {
            let directory = directory.clone();
            thread::spawn(move || {
                queue(&directory, 0, Envelope::User(1)).map_err(|_| "room").expect("room");
                if directory[0].notify() {
                    Waker::wake(directory[0].waker::<Bell>().expect("attached before"));
                }
            })
        };
        let sender = sender(&directory, 2);
        while reader.read.len() < 2 {
            reader.turn();
        }
        peer.join().expect("peer");
        sender.join().expect("sender").expect("room");
    });
}

/// A stop is seen, whatever else is on its way, and also by a mailbox that is full.
#[test]
fn a_stop_is_never_missed() {
    for budget in [1, 8] {
        explore(3, move || {
            let directory = directory::<u32>(1, 1);
            let mut reader = Reader::new(&directory, budget);
            reader.attach();
            let sender = sender(&directory, 1);
            let stopper = {
                let remote = Remote::new(directory.clone());
                thread::spawn(move || remote.stop(Duration::from_secs(1)))
            };
            while reader.stop.is_none() {
                reader.turn();
            }
            assert_eq!(reader.stop, Some(Duration::from_secs(1)));
            sender.join().expect("sender").expect("room for one");
            stopper.join().expect("stopper");
        });
    }
}

/// A worker ends while others send: what was accepted was read or is counted as undelivered, and everything
/// else was refused. Nothing disappears.
#[test]
fn what_a_closing_mailbox_accepts_is_counted() {
    // With more switches two senders and the closing one wait for each other in more ways than can be tried.
    for (senders, preemptions) in [(1, 5), (2, 1)] {
        explore(preemptions, move || {
            let directory = directory::<u32>(1, 2);
            let mut reader = Reader::new(&directory, 8);
            reader.attach();
            let senders: Vec<_> = (0..senders).map(|message| sender(&directory, message)).collect();
            // The waker's mark makes this a turn that does not wait.
            reader.turn();
            let undelivered = directory[0].close();
            let mut accepted = 0;
            for sender in senders {
                match sender.join().expect("sender") {
                    Ok(()) => accepted += 1,
                    Err(RemoteError::Stopped(_)) => {}
                    Err(RemoteError::Full(_)) => panic!("there was room for all, until it was closed"),
                }
            }
            assert_eq!(accepted, reader.read.len() + undelivered);
            assert_eq!(Remote::new(directory.clone()).post(0, 3), Err(RemoteError::Stopped(3)));
            assert_eq!(directory[0].close(), 0, "everything was counted the first time");
        });
    }
}

/// Wakes of tasks, on a mailbox with room for one: a task whose wake found no place is polled all the same, by a worker
/// that sleeps whenever it may, and its poll sees what was done before the wake.
#[test]
fn a_wake_that_finds_the_mailbox_full_is_not_lost() {
    for budget in [1, 8] {
        // With three senders several marks are set before one is taken.
        for (senders, preemptions) in [(2, 3), (3, 1)] {
            explore(preemptions, move || {
                let directory = directory::<u32>(1, 1);
                let mut reader = Reader::new(&directory, budget);
                reader.attach();
                let done: Vec<Arc<AtomicBool>> =
                    (0..senders).map(|_| Arc::new(AtomicBool::new(false))).collect();
                let senders: Vec<_> = (0..senders)
                    .map(|task| {
                        let (remote, done) = (Remote::new(directory.clone()), done[task].clone());
                        thread::spawn(move || {
                            // Only the wake makes this visible.
                            done.store(true, Ordering::Relaxed);
                            remote.post_or_mark(0, task as u32);
                        })
                    })
                    .collect();
                let mut ended = vec![false; senders.len()];
                while ended.contains(&false) {
                    reader.turn();
                    let mut polled: Vec<usize> = reader.read.drain(..).map(|task| task as usize).collect();
                    // As `Hub::turn`, at the end of every turn.
                    if directory[0].is_overrun() && directory[0].take_overrun() {
                        polled = (0..ended.len()).collect();
                    }
                    for task in polled {
                        ended[task] |= done[task].load(Ordering::Relaxed);
                    }
                }
                for sender in senders {
                    sender.join().expect("sender");
                }
            });
        }
    }
}

/// As the waker of a completion port: a wake posts nothing while another was posted and not taken.
#[derive(Clone)]
struct PostedBell {
    waking: Arc<AtomicBool>,
    bell: Bell,
}

impl Waker for PostedBell {
    fn wake(&self) {
        if !self.waking.swap(true, Ordering::AcqRel) {
            Waker::wake(&self.bell);
        }
    }
}

/// Two threads send one message each, to a worker whose waker keeps a mark of its own beside the mailbox's. The
/// worker takes the mark down by a swap: with a store its look into the mailbox could come before it.
#[test]
fn a_wake_that_is_saved_because_another_is_on_its_way_loses_nothing() {
    explore(3, || {
        let directory = directory::<u32>(1, 2);
        let mut reader = Reader::new(&directory, 8);
        let waker = PostedBell { waking: Arc::new(AtomicBool::new(false)), bell: reader.bell.clone() };
        directory[0].attach(waker.clone());
        let senders = [sender(&directory, 1), sender(&directory, 2)];
        while reader.read.len() < 2 {
            if !directory[0].is_notified() {
                reader.bell.0.wait();
                waker.waking.swap(false, Ordering::AcqRel);
            }
            if directory[0].is_notified() {
                reader.turn();
            }
        }
        for sender in senders {
            sender.join().expect("sender").expect("room");
        }
    });
}
