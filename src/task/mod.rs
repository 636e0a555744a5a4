//! Tasks: `async` code on a worker, single-threaded, on the same engine as every [`Handler`](crate::Handler).
//!
//! There is no second event loop. The async tier is a handler in [pull mode](crate::Handler::PULL): its callbacks note
//! whom to wake, and once a turn, after all callbacks and before what they noted becomes operations, the tasks that were woken
//! are polled. What they send goes out with that same turn's one system call.
//!
//! ```
//! use corelane::net::{TcpListener, TcpStream};
//!
//! corelane::task::block_on(async {
//!     let mut listener = TcpListener::bind("127.0.0.1:0").await?;
//!     let addr = listener.local_addr()?;
//!     let server = corelane::task::spawn(async move {
//!         let mut stream = listener.accept().await?;
//!         while let Some(data) = stream.recv().await? {
//!             stream.send(data).await?; // the received buffer itself, not a copy
//!         }
//!         std::io::Result::Ok(())
//!     });
//!     let mut stream = TcpStream::connect(addr).await?;
//!     stream.send("hello").await?;
//!     assert_eq!(&stream.recv().await?.expect("an echo")[..], b"hello");
//!     drop(stream); // closes it
//!     server.await.unwrap()
//! })??;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! * Tasks are not `Send`: a task stays on the worker that spawned it. [`spawn_on`] starts one on another worker.
//! * A wake on the task's own thread is a push to a queue, without atomic operations; from anywhere else it
//!   is a message to the worker's mailbox. Wakers hold no memory and may be sent and kept anywhere.
//! * A turn polls at most [`turn_budget`](crate::WorkerConfig::turn_budget) tasks, and a task that never has to
//!   wait is put off after 128 operations, so that neither keeps connections or other tasks waiting.
//! * A task that panics ends alone: its [`JoinHandle`] says so. A panic of the main future ends the worker.
//!
//! | file | what is in it |
//! |---|---|
//! | `run.rs` | the handler: callbacks → wakes; once a turn, tasks |
//! | `hub.rs` | what a worker's futures share, and how they reach the worker's core |
//! | `table.rs` | tasks, and who is to be polled |
//! | `join.rs` | a task's future and outcome: [`JoinHandle`] |
//! | `remote.rs` | what runs elsewhere, and who waits for it: [`RemoteHandle`] |
//! | `spawner.rs` | starting tasks on other workers: [`Spawner`] |
//! | `blocking.rs` | calls that block, on a pool of threads: [`spawn_blocking`] |
//! | `waker.rs` | wakers that are names (the only `unsafe` here) |
//! | `link.rs` | who waits for a connection |
//! | `accept.rs` | listeners: who was accepted, who waits for them |
//! | `question.rs` | questions about a connection: addresses, options |
//! | `queue.rs` | who waits for room: connections, send buffers |
//! | `datagrams.rs` | datagrams under way, who waits for them |
//! | `timers.rs` | timers of tasks |
//! | `start.rs` | [`block_on`], [`Builder::start_tasks`](crate::Builder::start_tasks) |
//!
//! What may not enter this room: sockets' manners (see [`net`](crate::net)), system calls.

mod accept;
mod blocking;
mod datagrams;
mod hub;
mod join;
mod link;
mod message;
mod question;
mod queue;
mod remote;
mod run;
mod spawner;
mod start;
mod table;
mod timers;
mod waker;

use std::future::{Future, poll_fn};
use std::task::Poll;

pub(crate) use accept::{Accepting, Binding};
pub(crate) use blocking::THREADS;
pub use blocking::{Blocking, spawn_blocking};
pub(crate) use datagrams::Sends;
pub(crate) use hub::{Hub, TaskCore};
pub(crate) use join::panic_text;
pub use join::{JoinError, JoinHandle};
pub(crate) use link::{Life, Link, Waiter};
pub use message::Message;
pub(crate) use question::{Question, Reply};
pub(crate) use queue::Place;
pub use remote::RemoteHandle;
pub(crate) use run::TaskHandler;
pub use spawner::{SpawnError, SpawnErrorKind, Spawner};
pub use start::{BlockOnError, MainOutcome, block_on};

/// Makes a task of a future, on this worker.
///
/// # Panics
/// Outside of a task; and when the worker holds 16 million tasks.
pub fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + 'static,
{
    join::spawn(&Hub::current(), future)
}

/// Index of the worker that runs this task.
///
/// # Panics
/// Outside of a task.
pub fn worker() -> usize {
    Hub::current().worker()
}

/// Number of workers in this task's runtime.
///
/// # Panics
/// Outside of a task.
pub fn workers() -> usize {
    Hub::current().remote().workers()
}

/// Starts a task on a worker of this task's runtime: `make` is sent there and makes the future, which need not be
/// `Send`. The handle may be awaited here, or be sent anywhere.
///
/// # Errors
/// [`SpawnError`] with `make` when that worker's mailbox is full, or it has ended, or there is none of that index.
///
/// # Panics
/// Outside of a task.
pub fn spawn_on<M, F>(worker: usize, make: M) -> Result<RemoteHandle<F::Output>, SpawnError<M>>
where
    M: FnOnce() -> F + Send + 'static,
    F: Future + 'static,
    F::Output: Send + 'static,
{
    Hub::current().spawner.spawn_on(worker, make)
}

/// Starts a task on one worker of this task's runtime after the other, where it stays; see [`Spawner::spawn_pinned`].
///
/// # Errors
/// [`SpawnError`] with `make` when no worker takes it.
///
/// # Panics
/// Outside of a task.
pub fn spawn_pinned<M, F>(make: M) -> Result<RemoteHandle<F::Output>, SpawnError<M>>
where
    M: FnOnce() -> F + Send + 'static,
    F: Future + 'static,
    F::Output: Send + 'static,
{
    Hub::current().spawner.spawn_pinned(make)
}

/// Starts tasks on the workers of this task's runtime, from any thread.
///
/// # Panics
/// Outside of a task.
pub fn spawner() -> Spawner {
    Hub::current().spawner.clone()
}

/// Lets other tasks, and what happened to connections, come first: the task goes on in the worker's next turn.
///
/// # Panics
/// Outside of a task.
pub async fn yield_now() {
    let mut yielded = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        Hub::current().wake_next_turn(cx);
        Poll::Pending
    })
    .await;
}

/// Counts as one operation of the task: one that has done 128 since it was polled goes on in the worker's next turn. For loops
/// whose futures are not of this crate and may always be ready, such as a channel's.
///
/// # Panics
/// Outside of a task.
pub async fn consume_budget() {
    poll_fn(|cx| Hub::current().poll_budget(cx)).await;
}

/// Waits until the runtime is asked to stop: for tasks that are to end in good order then.
///
/// From that moment on nothing is accepted, [`accept`](crate::net::TcpListener::accept) gives an error, and an accepted connection's
/// `recv` gives one as soon as nothing that arrived is left, so that a task which serves a client ends between
/// two requests without knowing of the stop. What is still there when the deadline comes is reset and dropped.
///
/// # Panics
/// Outside of a task.
pub async fn stopped() {
    let hub = Hub::current();
    hub.stop_token().cancelled().await;
}
