//! A task's future, its outcome, and who waits for it.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use super::hub::Hub;
use super::waker::TaskName;

/// A task whose type is not known.
pub(super) trait AnyTask {
    /// Polls it; `Ready` when it is over.
    fn poll(&self, cx: &mut Context<'_>) -> Poll<End>;
    /// Drops the future, if there is one and it is not being polled, and says so to whoever waits for it.
    fn cancel(&self) -> Option<End>;
}

/// How a task ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Finished,
    Aborted,
    Panicked,
}

/// What a task came to, for whoever has its handle.
trait Joinable<T> {
    fn poll_join(&self, cx: &mut Context<'_>) -> Poll<Result<T, JoinError>>;
    fn is_finished(&self) -> bool;
}

enum Stage<F: Future> {
    Running(Pin<Box<F>>),
    /// With the outcome, until somebody has taken it.
    Over(Option<Result<F::Output, JoinError>>),
}

/// One allocation for everything about a task but its future.
struct Task<F: Future> {
    stage: RefCell<Stage<F>>,
    /// Aborted while it was being polled.
    aborted: Cell<bool>,
    finished: Cell<bool>,
    waiter: Cell<Option<Waker>>,
}

impl<F: Future> Task<F> {
    fn finish(&self, outcome: Result<F::Output, JoinError>) -> End {
        let end = match &outcome {
            Ok(_) => End::Finished,
            Err(JoinError(Why::Panicked(_))) => End::Panicked,
            Err(_) => End::Aborted,
        };
        self.finished.set(true);
        *self.stage.borrow_mut() = Stage::Over(Some(outcome));
        if let Some(waiter) = self.waiter.take() {
            waiter.wake();
        }
        end
    }
}

impl<F: Future> AnyTask for Task<F> {
    fn poll(&self, cx: &mut Context<'_>) -> Poll<End> {
        let mut stage = self.stage.borrow_mut();
        // One that is over has left its slot, so that this is not met.
        let Stage::Running(future) = &mut *stage else { return Poll::Ready(End::Aborted) };
        // Whatever a panic leaves half done inside the task is dropped with it and seen by nobody.
        let polled = catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx)));
        let outcome = match polled {
            Ok(Poll::Pending) if !self.aborted.get() => return Poll::Pending,
            Ok(Poll::Pending) => Err(JoinError(Why::Aborted)),
            Ok(Poll::Ready(value)) => Ok(value),
            Err(panic) => Err(JoinError::of_panic(panic)),
        };
        let over = std::mem::replace(&mut *stage, Stage::Over(None));
        drop(stage);
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(over)));
        Poll::Ready(self.finish(dropped.map_err(JoinError::of_panic).and(outcome)))
    }

    fn cancel(&self) -> Option<End> {
        let Ok(mut stage) = self.stage.try_borrow_mut() else {
            self.aborted.set(true);
            return None;
        };
        let over = std::mem::replace(&mut *stage, Stage::Over(None));
        drop(stage);
        if let Stage::Over(outcome) = over {
            *self.stage.borrow_mut() = Stage::Over(outcome);
            return None;
        }
        let outcome = match catch_unwind(AssertUnwindSafe(|| drop(over))) {
            Ok(()) => JoinError(Why::Aborted),
            Err(panic) => JoinError::of_panic(panic),
        };
        Some(self.finish(Err(outcome)))
    }
}

impl<F: Future> Joinable<F::Output> for Task<F> {
    fn poll_join(&self, cx: &mut Context<'_>) -> Poll<Result<F::Output, JoinError>> {
        // Borrowed by a poll of the task itself, which somebody waits for from inside: not yet.
        if let Ok(mut stage) = self.stage.try_borrow_mut()
            && let Stage::Over(outcome) = &mut *stage
            && let Some(outcome) = outcome.take()
        {
            return Poll::Ready(outcome);
        }
        assert!(!self.finished.get(), "a JoinHandle was polled after it had given the outcome");
        self.waiter.set(Some(cx.waker().clone()));
        Poll::Pending
    }

    fn is_finished(&self) -> bool {
        self.finished.get()
    }
}

/// Makes a task of a future.
pub(super) fn spawn<F>(hub: &Rc<Hub>, future: F) -> JoinHandle<F::Output>
where
    F: Future + 'static,
{
    let task = Rc::new(Task {
        stage: RefCell::new(Stage::Running(Box::pin(future))),
        aborted: Cell::new(false),
        finished: Cell::new(false),
        waiter: Cell::new(None),
    });
    let name = hub.tasks.insert(task.clone());
    if name.is_none() {
        // The worker has ended: it counts no more tasks.
        let _ = task.cancel();
    }
    JoinHandle { task, name, hub: hub.clone() }
}

/// Waits for a task: a future that gives what the task's future gave, or why it did not.
///
/// Dropping it lets the task go on by itself.
///
/// ```
/// corelane::task::block_on(async {
///     let sum = corelane::task::spawn(async { 1 + 2 });
///     assert_eq!(sum.await.unwrap(), 3);
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "a JoinHandle does nothing by itself; drop it to let the task go on alone"]
pub struct JoinHandle<T> {
    task: Rc<dyn Handled<T>>,
    name: Option<TaskName>,
    hub: Rc<Hub>,
}

/// Both sides of a task.
trait Handled<T>: Joinable<T> + AnyTask {}
impl<F: Future> Handled<F::Output> for Task<F> {}

impl<T> JoinHandle<T> {
    /// Ends the task: its future is dropped at once (when the task aborts itself, as soon as it waits), and
    /// the handle gives an error. Does nothing to a task that has finished.
    pub fn abort(&self) {
        // One that is running takes itself out.
        if let Some(name) = self.name
            && let Some(end) = self.task.cancel()
        {
            drop(self.hub.tasks.remove(name, end));
        }
    }

    /// The outcome, if there is one already.
    pub(super) fn into_outcome(self) -> Option<Result<T, JoinError>> {
        match self.task.poll_join(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(outcome) => Some(outcome),
            Poll::Pending => None,
        }
    }

    /// Whether the task is over, however it ended.
    pub fn is_finished(&self) -> bool {
        self.task.is_finished()
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = Result<T, JoinError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.task.poll_join(cx)
    }
}

impl<T> Unpin for JoinHandle<T> {}

impl<T> fmt::Debug for JoinHandle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinHandle(finished: {})", self.is_finished())
    }
}

/// Why a task gave nothing.
pub struct JoinError(pub(super) Why);

pub(super) enum Why {
    Aborted,
    /// What it panicked with; in a lock, so that the error can be shared, as `Box<dyn Error + Send + Sync>` wants.
    Panicked(Box<Mutex<Box<dyn Any + Send>>>),
    /// A call that blocks found no thread.
    NoThread(io::Error),
}

impl JoinError {
    pub(super) fn of_panic(panic: Box<dyn Any + Send>) -> Self {
        Self(Why::Panicked(Box::new(Mutex::new(panic))))
    }

    /// Whether it was aborted, by its handle or because its worker ended.
    pub fn is_aborted(&self) -> bool {
        matches!(self.0, Why::Aborted)
    }

    /// Whether it panicked.
    pub fn is_panic(&self) -> bool {
        matches!(self.0, Why::Panicked(_))
    }

    /// What it panicked with, for [`resume_unwind`](std::panic::resume_unwind).
    ///
    /// # Errors
    /// The error itself when it did not panic.
    pub fn try_into_panic(self) -> Result<Box<dyn Any + Send>, JoinError> {
        match self.0 {
            Why::Panicked(panic) => Ok(panic.into_inner().unwrap_or_else(PoisonError::into_inner)),
            Why::Aborted | Why::NoThread(_) => Err(self),
        }
    }
}

/// The text of a panic.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("a panic without a message")
}

impl fmt::Display for JoinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Why::Aborted => f.write_str("the task was aborted"),
            Why::Panicked(panic) => {
                let panic = panic.lock().unwrap_or_else(PoisonError::into_inner);
                write!(f, "the task panicked: {}", panic_text(&**panic))
            }
            Why::NoThread(error) => write!(f, "no thread could be started for the call: {error}"),
        }
    }
}

impl fmt::Debug for JoinError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "JoinError({self})")
    }
}

impl std::error::Error for JoinError {}
