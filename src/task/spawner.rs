//! Starting tasks on other workers, from tasks and from foreign threads.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::runtime::Runtime;
use crate::worker::{Remote, RemoteError};

use super::hub::Hub;
use super::join;
use super::message::{Kind, Message};
use super::remote::{Completion, RemoteHandle, pair, serve};

/// Something that becomes a task on the worker that it is sent to.
pub(super) trait Order: Send {
    /// Makes a task of it.
    fn begin(self: Box<Self>, hub: &Rc<Hub>);
    /// For getting it back when it cannot be sent.
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
}

struct Call<M, T> {
    make: M,
    done: Completion<T>,
}

impl<M, F, T> Order for Call<M, T>
where
    M: FnOnce() -> F + Send + 'static,
    F: Future<Output = T> + 'static,
    T: Send + 'static,
{
    fn begin(self: Box<Self>, hub: &Rc<Hub>) {
        let Self { make, done } = *self;
        if !done.is_aborted() {
            drop(join::spawn(hub, serve(make, done)));
        }
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }
}

/// Starts tasks on the workers of a runtime, from any thread. Cheap to clone.
///
/// ```
/// use corelane::{Runtime, task};
/// use std::time::Duration;
///
/// let runtime = Runtime::builder().workers(2).start_tasks(|_| async {})?;
/// let spawner = runtime.spawner();
/// let there = std::thread::spawn(move || {
///     let handle = spawner.spawn_on(1, || async { task::worker() }).expect("it runs");
///     handle.wait().expect("no panic")
/// });
/// assert_eq!(there.join().unwrap(), 1);
/// runtime.shutdown(Duration::from_secs(1))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Spawner {
    remote: Remote<Message>,
    /// Whose turn it is.
    next: Arc<AtomicUsize>,
}

impl Spawner {
    pub(super) fn new(remote: Remote<Message>, first: usize) -> Self {
        Self { remote, next: Arc::new(AtomicUsize::new(first)) }
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.remote.workers()
    }

    /// Asks every worker to stop, as [`Remote::stop`] does: nothing more is accepted, and what has not ended by
    /// `deadline` is reset and dropped. Only the first call counts.
    pub fn stop(&self, deadline: Duration) {
        self.remote.stop(deadline);
    }

    /// Starts a task on a worker: `make` is sent there and makes the future, which need not be `Send`.
    ///
    /// # Errors
    /// [`SpawnError`] with `make` when that worker's mailbox is full, or it has ended, or there is none of that index.
    pub fn spawn_on<M, F>(&self, worker: usize, make: M) -> Result<RemoteHandle<F::Output>, SpawnError<M>>
    where
        M: FnOnce() -> F + Send + 'static,
        F: Future + 'static,
        F::Output: Send + 'static,
    {
        let (done, handle) = pair();
        let order: Box<dyn Order> = Box::new(Call { make, done });
        let (message, kind) = match self.remote.post(worker, Message(Kind::Begin(order))) {
            Ok(()) => return Ok(handle),
            Err(RemoteError::Full(message)) => (message, SpawnErrorKind::Full),
            Err(RemoteError::Stopped(message)) => (message, SpawnErrorKind::Stopped),
        };
        let Kind::Begin(order) = message.0 else { unreachable!("it is the message that was posted") };
        let call = order.into_any().downcast::<Call<M, F::Output>>();
        let Call { make, .. } = *call.unwrap_or_else(|_| unreachable!("it is the order that was posted"));
        Err(SpawnError { make, kind })
    }

    /// Starts a task on the worker whose turn it is, or the next one that takes it. It stays there to its end: there is
    /// no stealing of work between workers.
    ///
    /// # Errors
    /// [`SpawnError`] with `make` when no worker takes it: of kind `Full` if one of them may later.
    pub fn spawn_pinned<M, F>(&self, make: M) -> Result<RemoteHandle<F::Output>, SpawnError<M>>
    where
        M: FnOnce() -> F + Send + 'static,
        F: Future + 'static,
        F::Output: Send + 'static,
    {
        let workers = self.workers();
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let (mut make, mut worst) = (make, SpawnErrorKind::Stopped);
        for offset in 0..workers {
            match self.spawn_on(first.wrapping_add(offset) % workers, make) {
                Ok(handle) => return Ok(handle),
                Err(error) => {
                    make = error.make;
                    if error.kind == SpawnErrorKind::Full {
                        worst = SpawnErrorKind::Full;
                    }
                }
            }
        }
        Err(SpawnError { make, kind: worst })
    }
}

impl fmt::Debug for Spawner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Spawner({} workers)", self.workers())
    }
}

impl Runtime<Message> {
    /// Starts tasks on this runtime's workers, from any thread.
    pub fn spawner(&self) -> Spawner {
        Spawner::new(self.remote(), 0)
    }
}

/// A task that was not started.
pub struct SpawnError<M> {
    /// What would have made its future.
    pub make: M,
    /// Why not.
    pub kind: SpawnErrorKind,
}

/// Why a task was not started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SpawnErrorKind {
    /// The worker's mailbox is full: it is behind. Try again later, or raise
    /// [`mailbox`](crate::WorkerConfig::mailbox).
    Full,
    /// The worker has ended, or there is none of that index.
    Stopped,
}

impl<M> fmt::Display for SpawnError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self.kind {
            SpawnErrorKind::Full => RemoteError::Full(()),
            SpawnErrorKind::Stopped => RemoteError::Stopped(()),
        };
        write!(f, "the task was not started: {why}")
    }
}

impl<M> fmt::Debug for SpawnError<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SpawnError({:?})", self.kind)
    }
}

impl<M> std::error::Error for SpawnError<M> {}
