//! Permits for tasks of one worker.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::ops::Deref;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use super::list::List;

/// Permits that tasks of one worker share: at most so many of them do something at a time.
///
/// It is fair: whoever has waited longest is served first, and nobody overtakes, so that somebody who wants
/// many permits gets them in the end. It belongs to one thread and uses no atomic operation.
///
/// ```
/// use std::rc::Rc;
/// use corelane::sync::Semaphore;
///
/// corelane::task::block_on(async {
///     let lookups = Rc::new(Semaphore::new(2));
///     let first = lookups.acquire().await?;
///     let second = lookups.clone().acquire_owned().await?; // for another task
///     assert!(lookups.try_acquire().is_err());
///     drop(first);
///     assert_eq!(lookups.available_permits(), 1);
///     corelane::task::spawn(async move { drop(second) }).await.unwrap();
///     assert_eq!(lookups.available_permits(), 2);
///     Ok::<(), corelane::sync::AcquireError>(())
/// })??;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Default)]
pub struct Semaphore {
    free: Cell<usize>,
    closed: Cell<bool>,
    waiting: RefCell<List<Waiting>>,
}

/// One who waits, or whose permits wait for him.
struct Waiting {
    wanted: usize,
    granted: bool,
    waker: Waker,
}

impl Semaphore {
    /// A semaphore with that many permits; 0 is allowed, for permits that are [added](Self::add_permits) later.
    pub fn new(permits: usize) -> Self {
        Self { free: Cell::new(permits), ..Self::default() }
    }

    /// Permits that nobody has.
    pub fn available_permits(&self) -> usize {
        self.free.get()
    }

    /// Waits for one permit. Dropped before it is done, it has taken none.
    ///
    /// # Errors
    /// [`AcquireError`] when the semaphore is closed.
    pub async fn acquire(&self) -> Result<Permit<'_>, AcquireError> {
        self.acquire_many(1).await
    }

    /// Waits for several permits at once, in one place of the queue: for ever, if there are never so many.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub async fn acquire_many(&self, count: usize) -> Result<Permit<'_>, AcquireError> {
        Acquire { semaphore: self, wanted: count, place: None }.await?;
        Ok(Permit { semaphore: self, count })
    }

    /// [`acquire`](Self::acquire), for a permit that may go to another task.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub async fn acquire_owned(self: Rc<Self>) -> Result<OwnedPermit, AcquireError> {
        self.acquire_many_owned(1).await
    }

    /// [`acquire_many`](Self::acquire_many), for permits that may go to another task.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub async fn acquire_many_owned(self: Rc<Self>, count: usize) -> Result<OwnedPermit, AcquireError> {
        Acquire { semaphore: self.clone(), wanted: count, place: None }.await?;
        Ok(OwnedPermit { semaphore: self, count })
    }

    /// Takes a permit if there is one and nobody waits.
    ///
    /// # Errors
    /// [`TryAcquireError`].
    pub fn try_acquire(&self) -> Result<Permit<'_>, TryAcquireError> {
        self.try_acquire_many(1)
    }

    /// Takes several permits if they are there and nobody waits.
    ///
    /// # Errors
    /// [`TryAcquireError`].
    pub fn try_acquire_many(&self, count: usize) -> Result<Permit<'_>, TryAcquireError> {
        self.try_take(count)?;
        Ok(Permit { semaphore: self, count })
    }

    /// [`try_acquire`](Self::try_acquire), for a permit that may go to another task.
    ///
    /// # Errors
    /// [`TryAcquireError`].
    pub fn try_acquire_owned(self: Rc<Self>) -> Result<OwnedPermit, TryAcquireError> {
        self.try_take(1)?;
        Ok(OwnedPermit { semaphore: self, count: 1 })
    }

    /// Adds permits.
    ///
    /// # Panics
    /// When there would be more than `usize::MAX`.
    pub fn add_permits(&self, count: usize) {
        let free = self.free.get().checked_add(count);
        self.free.set(free.expect("a semaphore has at most usize::MAX permits"));
        self.serve();
    }

    /// Gives no more permits: everybody who waits gets an error, now and later. Permits that are out stay valid.
    pub fn close(&self) {
        self.closed.set(true);
        // One after the other: a waker of somebody else's making may do anything here.
        loop {
            let waker = {
                let mut waiting = self.waiting.borrow_mut();
                let Some(first) = waiting.front() else { return };
                waiting.unlink(first);
                waiting.get(first).waker.clone()
            };
            waker.wake();
        }
    }

    /// Whether it was closed.
    pub fn is_closed(&self) -> bool {
        self.closed.get()
    }

    fn try_take(&self, count: usize) -> Result<(), TryAcquireError> {
        if self.closed.get() {
            return Err(TryAcquireError::Closed);
        }
        if count > 0 && !self.waiting.borrow().is_empty() || count > self.free.get() {
            return Err(TryAcquireError::NoPermits);
        }
        self.free.set(self.free.get() - count);
        Ok(())
    }

    /// Gives those who have waited longest what they want, as long as there is enough.
    fn serve(&self) {
        loop {
            let waker = {
                let mut waiting = self.waiting.borrow_mut();
                let Some(first) = waiting.front() else { return };
                let place = waiting.get_mut(first);
                let Some(rest) = self.free.get().checked_sub(place.wanted) else { return };
                self.free.set(rest);
                place.granted = true;
                let waker = place.waker.clone();
                waiting.unlink(first);
                waker
            };
            waker.wake();
        }
    }
}

impl fmt::Debug for Semaphore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Semaphore({} free, closed: {})", self.free.get(), self.closed.get())
    }
}

/// Waits for permits.
struct Acquire<S: Deref<Target = Semaphore>> {
    semaphore: S,
    wanted: usize,
    place: Option<u32>,
}

impl<S: Deref<Target = Semaphore> + Unpin> Future for Acquire<S> {
    type Output = Result<(), AcquireError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let semaphore = &*this.semaphore;
        let Some(place) = this.place else {
            return match semaphore.try_take(this.wanted) {
                Ok(()) => Poll::Ready(Ok(())),
                Err(TryAcquireError::Closed) => Poll::Ready(Err(AcquireError(()))),
                Err(TryAcquireError::NoPermits) => {
                    let waiting = Waiting { wanted: this.wanted, granted: false, waker: cx.waker().clone() };
                    this.place = Some(semaphore.waiting.borrow_mut().push_back(waiting));
                    Poll::Pending
                }
            };
        };
        let mut waiting = semaphore.waiting.borrow_mut();
        let state = waiting.get_mut(place);
        if !state.granted && !semaphore.closed.get() {
            let before = (!state.waker.will_wake(cx.waker()))
                .then(|| std::mem::replace(&mut state.waker, cx.waker().clone()));
            drop(waiting);
            drop(before);
            return Poll::Pending;
        }
        let ended = waiting.take(place);
        drop(waiting);
        this.place = None;
        // What was granted before the close is valid.
        Poll::Ready(if ended.granted { Ok(()) } else { Err(AcquireError(())) })
    }
}

impl<S: Deref<Target = Semaphore>> Drop for Acquire<S> {
    fn drop(&mut self) {
        let Some(place) = self.place.take() else { return };
        let left = self.semaphore.waiting.borrow_mut().take(place);
        if left.granted {
            self.semaphore.add_permits(left.wanted);
        } else {
            // Somebody who wanted many may have kept others from few.
            self.semaphore.serve();
        }
    }
}

/// Permits of a [`Semaphore`]; dropping it gives them back.
///
/// ```
/// let semaphore = corelane::sync::Semaphore::new(3);
/// let permit = semaphore.try_acquire_many(2)?;
/// assert_eq!((permit.count(), semaphore.available_permits()), (2, 1));
/// drop(permit);
/// semaphore.try_acquire()?.forget(); // one less from now on
/// assert_eq!(semaphore.available_permits(), 2);
/// # Ok::<(), corelane::sync::TryAcquireError>(())
/// ```
#[must_use = "dropping a permit gives it back"]
#[derive(Debug)]
pub struct Permit<'a> {
    semaphore: &'a Semaphore,
    count: usize,
}

/// Permits of a [`Semaphore`] that may go to another task; dropping it gives them back.
///
/// ```
/// use std::rc::Rc;
///
/// let semaphore = Rc::new(corelane::sync::Semaphore::new(1));
/// let permit = semaphore.clone().try_acquire_owned()?;
/// assert!(semaphore.clone().try_acquire_owned().is_err());
/// drop(permit);
/// assert!(semaphore.try_acquire_owned().is_ok());
/// # Ok::<(), corelane::sync::TryAcquireError>(())
/// ```
#[must_use = "dropping a permit gives it back"]
#[derive(Debug)]
pub struct OwnedPermit {
    semaphore: Rc<Semaphore>,
    count: usize,
}

impl Permit<'_> {
    /// How many permits it is.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Never gives them back.
    pub fn forget(mut self) {
        self.count = 0;
    }
}

impl OwnedPermit {
    /// How many permits it is.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Never gives them back.
    pub fn forget(mut self) {
        self.count = 0;
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        self.semaphore.add_permits(self.count);
    }
}

impl Drop for OwnedPermit {
    fn drop(&mut self) {
        self.semaphore.add_permits(self.count);
    }
}

/// The semaphore was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcquireError(());

impl fmt::Display for AcquireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the semaphore was closed")
    }
}

impl std::error::Error for AcquireError {}

/// Why there was no permit at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TryAcquireError {
    /// There are not enough, or others wait for them.
    NoPermits,
    /// The semaphore was closed.
    Closed,
}

impl fmt::Display for TryAcquireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoPermits => "the semaphore has no permit to give at the moment",
            Self::Closed => "the semaphore was closed",
        })
    }
}

impl std::error::Error for TryAcquireError {}

#[cfg(test)]
mod tests {
    use super::super::tests::Bell;
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        /// Begin to wait for so many.
        Acquire(usize),
        Try(usize),
        /// Poll one who was begun.
        Poll(usize),
        /// Drop one who waits (or whose permits wait for him).
        Cancel(usize),
        /// Give back one who has permits.
        Release(usize),
        Add(usize),
        Close,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            6 => (0usize..4).prop_map(Step::Acquire),
            2 => (0usize..4).prop_map(Step::Try),
            4 => any::<usize>().prop_map(Step::Poll),
            3 => any::<usize>().prop_map(Step::Cancel),
            4 => any::<usize>().prop_map(Step::Release),
            1 => (0usize..3).prop_map(Step::Add),
            1 => Just(Step::Close),
        ]
    }

    /// One who was begun, in the model.
    struct Waiter {
        future: Pin<Box<dyn Future<Output = Result<OwnedPermit, AcquireError>>>>,
        bell: Bell,
        wanted: usize,
        granted: bool,
        failed: bool,
    }

    /// What the model says happens when there are permits: the first in the queue, as long as there is enough.
    fn serve(free: &mut usize, waiters: &mut [Waiter]) {
        for waiter in waiters.iter_mut().filter(|waiter| !waiter.granted && !waiter.failed) {
            if waiter.wanted > *free {
                return;
            }
            *free -= waiter.wanted;
            waiter.granted = true;
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn permits_are_never_lost_nor_made_and_nobody_overtakes(
            permits in 0usize..4, steps in proptest::collection::vec(step(), 0..80),
        ) {
            let semaphore = Rc::new(Semaphore::new(permits));
            let (mut total, mut free, mut closed) = (permits, permits, false);
            let mut waiters: Vec<Waiter> = Vec::new();
            let mut held: Vec<OwnedPermit> = Vec::new();
            for step in steps {
                match step {
                    Step::Acquire(wanted) => {
                        let mut future: Pin<Box<dyn Future<Output = _>>> =
                            Box::pin(semaphore.clone().acquire_many_owned(wanted));
                        let bell = Bell::default();
                        let polled = future.as_mut().poll(&mut Context::from_waker(&bell.waker()));
                        let queue = waiters.iter().any(|waiter| !waiter.granted && !waiter.failed);
                        match polled {
                            Poll::Ready(Err(_)) => prop_assert!(closed),
                            Poll::Ready(Ok(permit)) => {
                                prop_assert!(!closed && wanted <= free && (wanted == 0 || !queue));
                                free -= wanted;
                                held.push(permit);
                            }
                            Poll::Pending => {
                                prop_assert!(!closed && (wanted > free || queue && wanted > 0));
                                waiters.push(Waiter { future, bell, wanted, granted: false, failed: false });
                            }
                        }
                    }
                    Step::Try(wanted) => {
                        let queue = waiters.iter().any(|waiter| !waiter.granted && !waiter.failed);
                        match semaphore.try_acquire_many(wanted) {
                            Ok(permit) => {
                                prop_assert!(!closed && wanted <= free && (wanted == 0 || !queue));
                                drop(permit);
                            }
                            Err(TryAcquireError::Closed) => prop_assert!(closed),
                            Err(TryAcquireError::NoPermits) => {
                                prop_assert!(!closed && (wanted > free || queue && wanted > 0));
                            }
                        }
                    }
                    Step::Poll(which) if !waiters.is_empty() => {
                        let which = which % waiters.len();
                        let waiter = &mut waiters[which];
                        let waker = waiter.bell.waker();
                        match waiter.future.as_mut().poll(&mut Context::from_waker(&waker)) {
                            Poll::Ready(Ok(permit)) => {
                                prop_assert!(waiter.granted && waiter.bell.has_rung());
                                prop_assert_eq!(permit.count(), waiter.wanted);
                                held.push(permit);
                                waiters.remove(which);
                            }
                            Poll::Ready(Err(_)) => {
                                prop_assert!(waiter.failed && waiter.bell.has_rung());
                                waiters.remove(which);
                            }
                            Poll::Pending => prop_assert!(!waiter.granted && !waiter.failed),
                        }
                    }
                    Step::Cancel(which) if !waiters.is_empty() => {
                        let gone = waiters.remove(which % waiters.len());
                        if gone.granted {
                            free += gone.wanted;
                        }
                        drop(gone);
                        serve(&mut free, &mut waiters);
                    }
                    Step::Release(which) if !held.is_empty() => {
                        let permit = held.swap_remove(which % held.len());
                        free += permit.count();
                        drop(permit);
                        serve(&mut free, &mut waiters);
                    }
                    Step::Add(count) => {
                        semaphore.add_permits(count);
                        total += count;
                        free += count;
                        serve(&mut free, &mut waiters);
                    }
                    Step::Close => {
                        semaphore.close();
                        closed = true;
                        for waiter in waiters.iter_mut().filter(|waiter| !waiter.granted) {
                            waiter.failed = true;
                        }
                    }
                    Step::Poll(_) | Step::Cancel(_) | Step::Release(_) => {}
                }
                prop_assert_eq!(semaphore.available_permits(), free);
                let out: usize = held.iter().map(OwnedPermit::count).sum();
                let kept: usize =
                    waiters.iter().filter(|waiter| waiter.granted).map(|waiter| waiter.wanted).sum();
                prop_assert_eq!(free + out + kept, total);
                for waiter in &waiters {
                    prop_assert_eq!(waiter.bell.has_rung(), waiter.granted || waiter.failed);
                }
            }
            drop((waiters, held));
            prop_assert_eq!(semaphore.available_permits(), total);
            prop_assert!(semaphore.waiting.borrow().is_empty());
        }
    }

    #[test]
    fn adding_too_many_permits_is_said() {
        let semaphore = Semaphore::new(usize::MAX);
        let said = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| semaphore.add_permits(1)));
        assert!(said.is_err());
        assert_eq!(semaphore.available_permits(), usize::MAX);
    }
}
