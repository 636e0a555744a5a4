//! How other threads reach a worker: a bounded mailbox each, and one coalesced wake-up.
//!
//! `sync.rs`: what a mailbox is made of. `model.rs`: the mailbox in every interleaving.

#[cfg(all(test, loom))]
mod model;
mod sync;

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::buffer::Detached;
use crate::driver::Waker;
use crate::handler::ConnId;

use sync::{ArrayQueue, AtomicBool, OnceLock};

/// What may lie in a mailbox.
pub(crate) enum Envelope<M> {
    Send(ConnId, Detached),
    Close(ConnId),
    Abort(ConnId),
    Broadcast(Detached),
    User(M),
}

/// A waker whose driver is not known to the type.
trait AnyWaker: Send + Sync {
    fn wake(&self);
    fn as_any(&self) -> &dyn Any;
}

impl<W: Waker> AnyWaker for W {
    fn wake(&self) {
        Waker::wake(self);
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

pub(crate) struct Mailbox<M> {
    /// What waits, oldest first; empty places only in a closed mailbox.
    queue: ArrayQueue<Option<Envelope<M>>>,
    /// Set by the first sender after the worker looked; the others need not wake it.
    notified: AtomicBool,
    /// Set when a message that a mark may stand for found no place; see [`Remote::post_or_mark`].
    overrun: AtomicBool,
    /// Set when the worker no longer takes messages.
    closed: AtomicBool,
    /// A stop that was asked for: kept beside the queue, so that a full mailbox cannot refuse it.
    stop: OnceLock<Duration>,
    waker: OnceLock<Box<dyn AnyWaker>>,
}

impl<M> Mailbox<M> {
    pub(crate) fn new(capacity: u32) -> Self {
        Self {
            queue: ArrayQueue::new(capacity as usize),
            notified: AtomicBool::new(false),
            overrun: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            stop: OnceLock::new(),
            waker: OnceLock::new(),
        }
    }

    /// Gives the mailbox the waker of its worker; senders before that are seen in the first turn.
    ///
    /// A sender may have queued and marked, and found no waker, without this thread seeing the mark yet. So
    /// the mark is set here as well: whoever marked before, this step orders him before the first drain;
    /// whoever marks after it sees the waker.
    pub(crate) fn attach<W: Waker>(&self, waker: W) {
        let is_first = self.waker.set(Box::new(waker)).is_ok();
        debug_assert!(is_first, "a mailbox has one worker");
        self.notify();
    }

    /// The waker, as the driver type that made it.
    pub(crate) fn waker<W: Waker>(&self) -> Option<&W> {
        self.waker.get()?.as_any().downcast_ref()
    }

    /// Queues an envelope, without marking.
    fn queue(&self, envelope: Envelope<M>) -> Result<(), RemoteError<Envelope<M>>> {
        if self.closed.load(Ordering::Acquire) {
            return Err(RemoteError::Stopped(envelope));
        }
        // The place that is refused holds what was to be put there.
        let Err(Some(envelope)) = self.queue.push(Some(envelope)) else { return Ok(()) };
        // A closed mailbox is full for ever.
        let closed = self.closed.load(Ordering::Acquire);
        Err(if closed { RemoteError::Stopped(envelope) } else { RemoteError::Full(envelope) })
    }

    /// Marks that there is something to look at; true for the first who does.
    ///
    /// The order "queue, then mark" here and "unmark, then drain" in [`begin_drain`](Self::begin_drain)
    /// (both sequentially consistent) leaves no envelope behind unseen: a sender that finds the
    /// mark set queued before the worker's unmarking, hence before its draining.
    pub(crate) fn notify(&self) -> bool {
        !self.notified.swap(true, Ordering::SeqCst)
    }

    fn wake(&self) {
        if let Some(waker) = self.waker.get() {
            waker.wake();
        }
    }

    /// Whether there is something to look at. One plain load: asked every turn.
    #[inline]
    pub(crate) fn is_notified(&self) -> bool {
        self.notified.load(Ordering::Relaxed)
    }

    /// Takes the mark away; must come before the envelopes are taken.
    pub(crate) fn begin_drain(&self) {
        self.notified.swap(false, Ordering::SeqCst);
    }

    /// Puts the mark back because the worker stopped before the mailbox was empty.
    ///
    /// A swap, not a store: a sender may have marked meanwhile, and a store would cut the next drain off
    /// from what he queued before.
    pub(crate) fn mark_again(&self) {
        self.notified.swap(true, Ordering::SeqCst);
    }

    pub(crate) fn pop(&self) -> Option<Envelope<M>> {
        self.queue.pop().flatten()
    }

    pub(crate) fn stop_request(&self) -> Option<Duration> {
        self.stop.get().copied()
    }

    /// Whether a mark stands for messages that found no place. One plain load: asked every turn, after the mailbox was
    /// read.
    #[inline]
    pub(crate) fn is_overrun(&self) -> bool {
        self.overrun.load(Ordering::Relaxed)
    }

    /// Takes that mark; must come before what the messages would have caused is done.
    pub(crate) fn take_overrun(&self) -> bool {
        self.overrun.swap(false, Ordering::SeqCst)
    }

    /// Refuses what comes from now on. Returns how many lay there unread, which are dropped.
    ///
    /// A sender that looked just before may still be about to queue something that nobody would read or
    /// count. So the mailbox is filled with empty places, the first half of which makes it full (if such
    /// senders do not), and the second half pushes out what is left. After that nobody finds room in it.
    pub(crate) fn close(&self) -> usize {
        self.closed.store(true, Ordering::Release);
        let pushed_out = (0..2 * self.queue.capacity()).filter_map(|_| self.queue.force_push(None));
        pushed_out.filter(Option::is_some).count()
    }
}

/// All mailboxes of a runtime.
pub(crate) type Directory<M> = Arc<[Mailbox<M>]>;

pub(crate) fn directory<M>(workers: usize, capacity: u32) -> Directory<M> {
    (0..workers).map(|_| Mailbox::new(capacity)).collect()
}

/// Reaches the workers of a runtime from any thread. Cheap to clone.
///
/// Everything sent here goes through the worker's bounded mailbox and is handled in order of
/// arrival per worker. A message to a connection that is over is dropped silently, because it may
/// end at any moment while the message is on its way.
pub struct Remote<M> {
    directory: Directory<M>,
}

impl<M> Clone for Remote<M> {
    fn clone(&self) -> Self {
        Self { directory: self.directory.clone() }
    }
}

impl<M> fmt::Debug for Remote<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Remote({} workers)", self.directory.len())
    }
}

/// Why something was not put into a mailbox; what it was comes back in the error.
#[derive(Debug, PartialEq, Eq)]
pub enum RemoteError<T> {
    /// The worker's mailbox is full: it is behind. Try again later, or raise
    /// [`mailbox`](crate::WorkerConfig::mailbox).
    Full(T),
    /// The worker has stopped, or there is none of that index.
    Stopped(T),
}

impl<T> RemoteError<T> {
    fn map<U>(self, f: impl FnOnce(T) -> U) -> RemoteError<U> {
        match self {
            Self::Full(value) => RemoteError::Full(f(value)),
            Self::Stopped(value) => RemoteError::Stopped(f(value)),
        }
    }
}

impl<T> fmt::Display for RemoteError<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full(_) => "the worker's mailbox is full: it is behind; try later or raise `mailbox`",
            Self::Stopped(_) => "the worker has stopped or does not exist",
        })
    }
}

impl<T: fmt::Debug> std::error::Error for RemoteError<T> {}

impl<M> Remote<M> {
    pub(crate) fn new(directory: Directory<M>) -> Self {
        Self { directory }
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.directory.len()
    }

    fn deliver(&self, worker: usize, envelope: Envelope<M>) -> Result<(), RemoteError<Envelope<M>>> {
        if post(&self.directory, worker, envelope)? {
            self.directory[worker].wake();
        }
        Ok(())
    }

    /// Queues bytes for sending on a connection, as [`Conn::send`](crate::Conn::send) does there.
    /// They are dropped, and counted in `send_refusals`, if its queue is at its limit.
    ///
    /// # Errors
    /// [`RemoteError`] with the bytes when the worker's mailbox is full or the worker has stopped.
    pub fn send(&self, id: ConnId, bytes: impl Into<Detached>) -> Result<(), RemoteError<Detached>> {
        let sent = self.deliver(id.worker(), Envelope::Send(id, bytes.into()));
        sent.map_err(|error| {
            error.map(|envelope| match envelope {
                Envelope::Send(_, bytes) => bytes,
                _ => Detached::Static(b""),
            })
        })
    }

    /// Closes a connection gracefully.
    ///
    /// # Errors
    /// [`RemoteError`] when the worker's mailbox is full or the worker has stopped.
    pub fn close(&self, id: ConnId) -> Result<(), RemoteError<()>> {
        self.deliver(id.worker(), Envelope::Close(id)).map_err(|error| error.map(drop))
    }

    /// Resets a connection.
    ///
    /// # Errors
    /// [`RemoteError`] when the worker's mailbox is full or the worker has stopped.
    pub fn abort(&self, id: ConnId) -> Result<(), RemoteError<()>> {
        self.deliver(id.worker(), Envelope::Abort(id)).map_err(|error| error.map(drop))
    }

    /// Sends the same bytes on every connection of every worker that is open when the worker gets
    /// to it (it does some hundreds a turn, so that others are not held up). The bytes are shared,
    /// not copied. A connection whose queue is at its limit is skipped and counted in
    /// `send_refusals`.
    ///
    /// # Errors
    /// [`RemoteError`] when a worker's mailbox is full or it has stopped; the other workers have
    /// been told all the same.
    pub fn broadcast(&self, bytes: impl Into<Detached>) -> Result<(), RemoteError<()>> {
        let shared = match bytes.into() {
            Detached::Owned(bytes) => Detached::Shared(bytes.into()),
            shared => shared,
        };
        let mut outcome = Ok(());
        for worker in 0..self.directory.len() {
            let told = self.deliver(worker, Envelope::Broadcast(shared.clone()));
            if let Err(error) = told {
                outcome = Err(error.map(drop));
            }
        }
        outcome
    }

    /// Sends a message to a worker's handler.
    ///
    /// # Errors
    /// [`RemoteError`] with the message when the worker's mailbox is full or the worker has stopped.
    pub fn post(&self, worker: usize, message: M) -> Result<(), RemoteError<M>> {
        match self.deliver(worker, Envelope::User(message)) {
            Ok(()) => Ok(()),
            Err(error) => Err(unwrap_message(error)),
        }
    }

    /// Sends a message that is not lost when the mailbox is full: a [mark](Mailbox::take_overrun) is set instead, upon
    /// which the worker does what every message of this kind could have asked for. One for a worker that has
    /// stopped is dropped.
    ///
    /// The mark is set by a swap, not a store: the worker that takes it sees what all of those did before who set it,
    /// not only the last of them. And before the other one, so that whoever is sent to look finds it.
    pub(crate) fn post_or_mark(&self, worker: usize, message: M) {
        if let Err(RemoteError::Full(_)) = self.post(worker, message) {
            self.directory[worker].overrun.swap(true, Ordering::SeqCst);
            self.nudge(worker);
        }
    }

    /// The mailbox of a worker.
    pub(crate) fn mailbox(&self, worker: usize) -> &Mailbox<M> {
        &self.directory[worker]
    }

    /// The deadline that a stop was asked for with, if one was.
    pub(crate) fn stop_deadline(&self) -> Option<Duration> {
        self.directory.first()?.stop_request()
    }

    /// Makes a worker look, though nothing was put into its mailbox.
    pub(crate) fn nudge(&self, worker: usize) {
        if let Some(mailbox) = self.directory.get(worker)
            && mailbox.notify()
        {
            mailbox.wake();
        }
    }

    /// Asks every worker to stop: to accept nothing more, to close every connection gracefully, to
    /// reset what is left after `deadline`, and to end. Only the first call counts. Never refused.
    pub fn stop(&self, deadline: Duration) {
        for mailbox in self.directory.iter() {
            let _ = mailbox.stop.set(deadline);
            mailbox.notify();
            mailbox.wake();
        }
    }
}

/// Puts an envelope into a worker's mailbox; true when that worker must be woken.
pub(crate) fn post<M>(
    directory: &Directory<M>,
    worker: usize,
    envelope: Envelope<M>,
) -> Result<bool, RemoteError<Envelope<M>>> {
    let Some(mailbox) = directory.get(worker) else {
        return Err(RemoteError::Stopped(envelope));
    };
    mailbox.queue(envelope)?;
    Ok(mailbox.notify())
}

/// Puts an envelope into a worker's mailbox without marking it: the caller marks and wakes.
pub(crate) fn queue<M>(
    directory: &Directory<M>,
    worker: usize,
    envelope: Envelope<M>,
) -> Result<(), RemoteError<Envelope<M>>> {
    let Some(mailbox) = directory.get(worker) else { return Err(RemoteError::Stopped(envelope)) };
    mailbox.queue(envelope)
}

/// The message in a refused user envelope.
pub(crate) fn unwrap_message<M>(error: RemoteError<Envelope<M>>) -> RemoteError<M> {
    error.map(|envelope| match envelope {
        Envelope::User(message) => message,
        _ => unreachable!("only user envelopes are unwrapped"),
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[derive(Clone)]
    struct Counting(Arc<AtomicUsize>);

    impl Waker for Counting {
        fn wake(&self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn many_messages_make_one_wake_up() {
        let directory = directory::<u32>(1, 8);
        let wakes = Arc::new(AtomicUsize::new(0));
        directory[0].attach(Counting(wakes.clone()));
        let remote = Remote::new(directory.clone());
        remote.post(0, 0).expect("room");
        assert_eq!(wakes.load(Ordering::SeqCst), 0, "the worker's first turn is still to come");
        directory[0].begin_drain();
        for n in 0..5 {
            remote.post(0, n).expect("room");
        }
        assert_eq!(wakes.load(Ordering::SeqCst), 1);
        directory[0].begin_drain();
        while directory[0].pop().is_some() {}
        remote.post(0, 9).expect("room");
        assert_eq!(wakes.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_full_mailbox_gives_the_message_back_and_still_takes_a_stop() {
        let directory = directory::<String>(1, 1);
        let remote = Remote::new(directory.clone());
        remote.post(0, "first".to_owned()).expect("room");
        let refused = remote.post(0, "second".to_owned()).expect_err("full");
        assert_eq!(refused, RemoteError::Full("second".to_owned()));
        remote.stop(Duration::from_secs(1));
        assert_eq!(directory[0].stop_request(), Some(Duration::from_secs(1)));
        assert_eq!(directory[0].close(), 1);
        let refused = remote.post(0, "third".to_owned()).expect_err("closed");
        assert_eq!(refused, RemoteError::Stopped("third".to_owned()));
        assert!(matches!(remote.post(7, String::new()), Err(RemoteError::Stopped(_))));
    }

    /// Many senders against one drainer: every message that was taken is seen, however the marks
    /// and drains interleave.
    #[test]
    fn no_message_is_left_behind_by_a_coalesced_wake_up() {
        let directory = directory::<u64>(1, 64);
        let woken = Arc::new(AtomicUsize::new(0));
        directory[0].attach(Counting(woken.clone()));
        let senders: Vec<_> = (0..4u64)
            .map(|sender| {
                let remote = Remote::new(directory.clone());
                std::thread::spawn(move || {
                    for n in 0..20_000u64 {
                        let mut message = sender << 32 | n;
                        while let Err(RemoteError::Full(back)) = remote.post(0, message) {
                            message = back;
                            std::thread::yield_now();
                        }
                    }
                })
            })
            .collect();
        let mut seen = 0;
        while seen < 80_000 {
            // The worker would sleep here; it may only do so while it is not notified.
            if !directory[0].is_notified() {
                std::thread::yield_now();
                continue;
            }
            directory[0].begin_drain();
            while directory[0].pop().is_some() {
                seen += 1;
            }
        }
        for sender in senders {
            sender.join().expect("sender");
        }
        assert!(directory[0].pop().is_none());
    }
}
