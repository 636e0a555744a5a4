//! Calls that block, on threads of their own: a bounded pool that the workers of a runtime share.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use super::hub::Hub;
use super::join::{JoinError, Why};
use super::remote::{Completion, RemoteHandle, pair};
use super::waker::Reach;

/// Threads at most, if nothing else is asked for.
pub(crate) const THREADS: usize = 64;
/// Calls that wait for a thread at most; those that come then wait in their tasks.
const QUEUE: usize = 1024;
/// How long a thread waits for the next call until it ends.
const IDLE: Duration = Duration::from_secs(10);

/// A call on its way to a thread. `Err`: no thread can be had for it.
trait Job: Send {
    fn run(self: Box<Self>, may: io::Result<()>);
}

struct Inner {
    queue: VecDeque<Box<dyn Job>>,
    /// Who waits for room in the queue, the longest first.
    waiting: VecDeque<(u64, Waker)>,
    last: u64,
    threads: usize,
    idle: usize,
    closed: bool,
}

struct Shared {
    inner: Mutex<Inner>,
    work: Condvar,
    /// Threads at most; 0 makes every call on the thread that asks for it.
    most: usize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // No call is made under the lock.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a call to the pool. Full: it comes back, and `waker` is woken when there is room again.
    fn submit(
        self: &Arc<Self>,
        job: Box<dyn Job>,
        ticket: &mut u64,
        waker: Option<&Waker>,
    ) -> Result<(), Box<dyn Job>> {
        if self.most == 0 {
            run(job, Ok(()));
            return Ok(());
        }
        let mut inner = self.lock();
        if inner.closed {
            drop(inner);
            // Says to whoever waits for it that it was aborted.
            drop(job);
            return Ok(());
        }
        let at = inner.waiting.iter().position(|(known, _)| known == ticket);
        if inner.queue.len() >= QUEUE {
            if let Some(waker) = waker {
                match at {
                    Some(at) => inner.waiting[at].1 = waker.clone(),
                    None => {
                        inner.last += 1;
                        *ticket = inner.last;
                        let entry = (inner.last, waker.clone());
                        inner.waiting.push_back(entry);
                    }
                }
            }
            return Err(job);
        }
        let known = at.and_then(|at| inner.waiting.remove(at));
        inner.queue.push_back(job);
        let mut failed = None;
        // Those that are idle may all have been called for what came before.
        if inner.idle >= inner.queue.len() {
            self.work.notify_one();
        } else if inner.threads < self.most {
            inner.threads += 1;
            let shared = self.clone();
            let thread = std::thread::Builder::new().name("corelane-blocking".to_owned());
            if let Err(error) = thread.spawn(move || shared.serve()) {
                inner.threads -= 1;
                // Those that there are will take it.
                if inner.threads == 0 {
                    failed = inner.queue.pop_back().map(|job| (job, error));
                }
            }
        }
        drop(inner);
        drop(known);
        if let Some((job, error)) = failed {
            run(job, Err(error));
        }
        Ok(())
    }

    /// Takes back a wish for room in the queue; who is next gets it.
    fn withdraw(&self, ticket: u64) {
        let mut inner = self.lock();
        let known = inner.waiting.iter().position(|(known, _)| *known == ticket);
        let known = known.and_then(|at| inner.waiting.remove(at));
        let room = inner.queue.len() < QUEUE;
        let next = room.then(|| inner.waiting.pop_front()).flatten();
        drop(inner);
        drop(known);
        if let Some((_, waker)) = next {
            waker.wake();
        }
    }

    /// The life of a thread.
    fn serve(&self) {
        let mut inner = self.lock();
        loop {
            if let Some(job) = inner.queue.pop_front() {
                let next = inner.waiting.pop_front();
                drop(inner);
                if let Some((_, waker)) = next {
                    waker.wake();
                }
                run(job, Ok(()));
                inner = self.lock();
                continue;
            }
            if inner.closed {
                break;
            }
            inner.idle += 1;
            let (woken, waited) = self.work.wait_timeout(inner, IDLE).unwrap_or_else(PoisonError::into_inner);
            inner = woken;
            inner.idle -= 1;
            if waited.timed_out() && inner.queue.is_empty() {
                break;
            }
        }
        inner.threads -= 1;
    }

    /// Takes no more calls, and drops those that have not begun.
    fn close(&self) {
        let (queue, waiting) = {
            let mut inner = self.lock();
            inner.closed = true;
            (std::mem::take(&mut inner.queue), std::mem::take(&mut inner.waiting))
        };
        self.work.notify_all();
        for job in queue {
            // What a destructor panics with has nobody who waits for it.
            let _ = catch_unwind(AssertUnwindSafe(|| drop(job)));
        }
        for (_, waker) in waiting {
            waker.wake();
        }
    }
}

/// A panic of the call is in its outcome; what is caught here is that of a destructor, for which nobody waits.
fn run(job: Box<dyn Job>, may: io::Result<()>) {
    let _ = catch_unwind(AssertUnwindSafe(|| job.run(may)));
}

/// The pool of a runtime. It ends when the last worker does: then what has not begun is dropped, and what runs goes on by
/// itself.
pub(crate) struct Pool {
    shared: Arc<Shared>,
}

impl Pool {
    pub(crate) fn new(threads: usize) -> Arc<Self> {
        Self::of(threads.max(1))
    }

    /// Makes every call at once, where it was asked for: a simulated kernel's time does not pass on real threads.
    pub(crate) fn inline() -> Arc<Self> {
        Self::of(0)
    }

    fn of(most: usize) -> Arc<Self> {
        let inner = Inner {
            queue: VecDeque::new(),
            waiting: VecDeque::new(),
            last: 0,
            threads: 0,
            idle: 0,
            closed: false,
        };
        Arc::new(Self { shared: Arc::new(Shared { inner: Mutex::new(inner), work: Condvar::new(), most }) })
    }

    /// For the calls of one worker.
    pub(super) fn part(&self, reach: Arc<Reach>) -> Part {
        let calls = Arc::new(Calls { unfinished: AtomicUsize::new(0), reach });
        Part { shared: self.shared.clone(), calls }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.close();
    }
}

/// A worker's part in the pool.
pub(super) struct Part {
    shared: Arc<Shared>,
    calls: Arc<Calls>,
}

struct Calls {
    unfinished: AtomicUsize,
    reach: Arc<Reach>,
}

impl Part {
    /// Calls of this worker that have not returned.
    pub(super) fn unfinished(&self) -> usize {
        self.calls.unfinished.load(Ordering::Acquire)
    }
}

/// Counts a call as long as it is there. A worker that stops may wait for it.
struct Counted(Arc<Calls>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.unfinished.fetch_sub(1, Ordering::Release);
        self.0.reach.nudge();
    }
}

struct Call<C, T> {
    call: C,
    done: Completion<T>,
    counted: Counted,
}

impl<T: Send, C: FnOnce() -> T + Send> Job for Call<C, T> {
    fn run(self: Box<Self>, may: io::Result<()>) {
        let Self { call, done, counted } = *self;
        let outcome = match may {
            Ok(()) if done.is_aborted() => {
                drop(call);
                Err(JoinError(Why::Aborted))
            }
            Ok(()) => {
                // Whatever a panic leaves half done inside the call is seen by nobody.
                catch_unwind(AssertUnwindSafe(call)).map_err(JoinError::of_panic)
            }
            Err(error) => Err(JoinError(Why::NoThread(error))),
        };
        // In this order: a worker that is told finds it done.
        done.finish(outcome);
        drop(counted);
    }
}

/// Makes a call that blocks, or computes for long, on a thread of its own, so that the worker's other tasks go on.
///
/// The threads are shared by all workers of the runtime: made when they are needed, up to
/// [`blocking_threads`](crate::Builder::blocking_threads) (64), and ended after ten seconds without work. 1,024 calls wait
/// for a thread; further ones wait, in the future that is returned, for a place among those, and begin only if that
/// is polled. On a [simulated kernel](crate::sim) the call is made at once, on the same thread, in no time.
///
/// Dropping the future lets the call go on by itself, if it has a place. A stop gives the calls of a worker until its deadline;
/// those that have not returned by then are left running, and counted in
/// [`ShutdownReport::blocking_left`](crate::ShutdownReport): no thread can be made to end.
///
/// ```
/// corelane::task::block_on(async {
///     let text = corelane::task::spawn_blocking(|| std::fs::read_to_string("Cargo.toml")).await;
///     assert!(text.expect("no panic")?.contains("corelane"));
///     std::io::Result::Ok(())
/// })??;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Panics
/// Outside of a task.
pub fn spawn_blocking<C, T>(call: C) -> Blocking<T>
where
    C: FnOnce() -> T + Send + 'static,
    T: Send + 'static,
{
    let hub = Hub::current();
    let (shared, calls) = (hub.blocking.shared.clone(), hub.blocking.calls.clone());
    drop(hub);
    calls.unfinished.fetch_add(1, Ordering::Relaxed);
    let (done, handle) = pair();
    let mut ticket = 0;
    let job = Box::new(Call { call, done, counted: Counted(calls) });
    let job = shared.submit(job, &mut ticket, None).err();
    Blocking { handle, job, ticket, shared }
}

/// Waits for a call on another thread; made by [`spawn_blocking`].
#[must_use = "a Blocking does nothing by itself; drop it to let the call go on alone"]
pub struct Blocking<T> {
    handle: RemoteHandle<T>,
    /// What has no place in the queue yet.
    job: Option<Box<dyn Job>>,
    ticket: u64,
    shared: Arc<Shared>,
}

impl<T> Blocking<T> {
    /// Keeps the call from being made, if it has not begun; it gives an error then. One that has begun goes on.
    pub fn abort(&self) {
        self.handle.abort();
    }

    /// Whether it is over, however it ended.
    pub fn is_finished(&self) -> bool {
        self.handle.is_finished()
    }
}

impl<T> Future for Blocking<T> {
    type Output = Result<T, JoinError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if let Some(job) = this.job.take()
            && let Err(job) = this.shared.submit(job, &mut this.ticket, Some(cx.waker()))
        {
            this.job = Some(job);
            return Poll::Pending;
        }
        Pin::new(&mut this.handle).poll(cx)
    }
}

impl<T> Unpin for Blocking<T> {}

impl<T> Drop for Blocking<T> {
    fn drop(&mut self) {
        if self.job.is_some() {
            self.shared.withdraw(self.ticket);
        }
    }
}

impl<T> fmt::Debug for Blocking<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Blocking(finished: {})", self.is_finished())
    }
}
