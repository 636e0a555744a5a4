//! What runs somewhere else, and who waits for it from any thread: tasks of other workers, calls on other threads.
//!
//! Both sides share a cell: whoever does the work has its [`Completion`], whoever wants the outcome its
//! [`RemoteHandle`]. A completion that is dropped without an outcome (because a worker ended, or a mailbox was
//! closed with the work in it) says so; therefore nobody waits for ever.

use std::fmt;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use super::join::{JoinError, Why};
use super::waker::with_current;

struct Shared<T> {
    state: Mutex<State<T>>,
    /// Written before the lock is taken for the task's waker, so that a task which leaves its waker sees it.
    aborted: AtomicBool,
}

struct State<T> {
    outcome: Option<Result<T, JoinError>>,
    over: bool,
    /// Who wants the outcome.
    waiter: Option<Waker>,
    /// The task, once it runs.
    task: Option<Waker>,
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Nothing that can panic happens under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Both sides of something that is to run elsewhere.
pub(super) fn pair<T>() -> (Completion<T>, RemoteHandle<T>) {
    let state = State { outcome: None, over: false, waiter: None, task: None };
    let shared = Arc::new(Shared { state: Mutex::new(state), aborted: AtomicBool::new(false) });
    (Completion { shared: shared.clone(), known: false, done: false }, RemoteHandle { shared })
}

/// The working side.
pub(super) struct Completion<T> {
    shared: Arc<Shared<T>>,
    /// The task's waker was left for an abort.
    known: bool,
    done: bool,
}

impl<T> Completion<T> {
    /// Whether nobody wants it done any more.
    pub(super) fn is_aborted(&self) -> bool {
        self.shared.aborted.load(Ordering::Acquire)
    }

    /// The same for a task, which is woken when it is aborted from now on.
    fn poll_aborted(&mut self, cx: &Context<'_>) -> bool {
        if !self.known {
            self.known = true;
            self.shared.lock().task = Some(cx.waker().clone());
        }
        self.is_aborted()
    }

    /// Leaves the outcome.
    pub(super) fn finish(mut self, outcome: Result<T, JoinError>) {
        self.leave(outcome);
    }

    fn leave(&mut self, outcome: Result<T, JoinError>) {
        self.done = true;
        let (waiter, task) = {
            let mut state = self.shared.lock();
            state.outcome = Some(outcome);
            state.over = true;
            (state.waiter.take(), state.task.take())
        };
        drop(task);
        if let Some(waiter) = waiter {
            waiter.wake();
        }
    }
}

impl<T> Drop for Completion<T> {
    fn drop(&mut self) {
        if !self.done {
            self.leave(Err(JoinError(Why::Aborted)));
        }
    }
}

/// The task that makes a future and runs it for whoever has the handle.
pub(super) async fn serve<F: Future>(make: impl FnOnce() -> F, mut done: Completion<F::Output>) {
    // Whatever a panic leaves half done is dropped with the future and seen by nobody.
    let mut future = Some(Box::pin(async move { make().await }));
    let outcome = poll_fn(|cx| {
        if done.poll_aborted(cx) {
            return Poll::Ready(Err(JoinError(Why::Aborted)));
        }
        let Some(future) = &mut future else { return Poll::Pending };
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
            Ok(polled) => polled.map(Ok),
            Err(panic) => Poll::Ready(Err(JoinError::of_panic(panic))),
        }
    })
    .await;
    let dropped = catch_unwind(AssertUnwindSafe(|| drop(future.take())));
    let outcome = dropped.map_err(JoinError::of_panic).and(outcome);
    with_current(|hub| match (hub, &outcome) {
        (Some(hub), Err(JoinError(Why::Panicked(_)))) => hub.counters.tasks_panicked.add(1),
        (Some(hub), Err(_)) => hub.counters.tasks_aborted.add(1),
        _ => {}
    });
    done.finish(outcome);
}

/// Waits, on any thread and in any runtime, for a task of another worker: a future that gives what the task's future
/// gave, or why it did not. Made by [`spawn_on`](super::spawn_on), [`spawn_pinned`](super::spawn_pinned) and
/// [`Spawner`](super::Spawner).
///
/// Dropping it lets the task go on by itself. When the worker ends first, the outcome is an error that
/// [is "aborted"](JoinError::is_aborted).
///
/// ```
/// use corelane::task::{self, RemoteHandle};
/// use std::time::Duration;
///
/// let sum = corelane::Runtime::builder().workers(2).block_on(Duration::ZERO, async {
///     let there: RemoteHandle<usize> = task::spawn_on(1, || async { task::worker() + 41 }).expect("it runs");
///     there.await.expect("no panic")
/// })?;
/// assert_eq!(sum, 42);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a RemoteHandle does nothing by itself; drop it to let the task go on alone"]
pub struct RemoteHandle<T> {
    shared: Arc<Shared<T>>,
}

impl<T> RemoteHandle<T> {
    /// Ends the task: its worker drops its future as soon as it gets to it, and the handle gives an error. What has not
    /// begun never does. Does nothing to a task that has finished.
    pub fn abort(&self) {
        self.shared.aborted.store(true, Ordering::Release);
        let task = self.shared.lock().task.clone();
        if let Some(task) = task {
            task.wake();
        }
    }

    /// Whether it is over, however it ended.
    pub fn is_finished(&self) -> bool {
        self.shared.lock().over
    }

    /// Blocks this thread until the outcome is there: for threads that run no tasks.
    ///
    /// # Errors
    /// [`JoinError`], as awaiting it gives.
    ///
    /// # Panics
    /// Inside a task, whose whole worker would stand still: await it there.
    pub fn wait(mut self) -> Result<T, JoinError> {
        let is_task = with_current(|hub| hub.is_some());
        assert!(!is_task, "RemoteHandle::wait blocks the thread: inside a task, await the handle");
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut cx = Context::from_waker(&waker);
        loop {
            match Pin::new(&mut self).poll(&mut cx) {
                Poll::Ready(outcome) => return outcome,
                // It may return for no reason, and returns at once when it was unparked before.
                Poll::Pending => thread::park(),
            }
        }
    }
}

/// Wakes a thread that waits.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.unpark();
    }
}

impl<T> Future for RemoteHandle<T> {
    type Output = Result<T, JoinError>;

    /// # Panics
    /// When it is polled after it has given the outcome.
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.shared.lock();
        let outcome = state.outcome.take();
        if outcome.is_none() && !state.over {
            if !state.waiter.as_ref().is_some_and(|waiter| waiter.will_wake(cx.waker())) {
                let before = state.waiter.replace(cx.waker().clone());
                drop(state);
                // One of somebody else's making may do anything when it is dropped.
                drop(before);
            }
            return Poll::Pending;
        }
        drop(state);
        Poll::Ready(outcome.expect("a RemoteHandle was polled after it had given the outcome"))
    }
}

impl<T> Unpin for RemoteHandle<T> {}

impl<T> Drop for RemoteHandle<T> {
    fn drop(&mut self) {
        let waiter = self.shared.lock().waiter.take();
        drop(waiter);
    }
}

impl<T> fmt::Debug for RemoteHandle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteHandle(finished: {})", self.is_finished())
    }
}
