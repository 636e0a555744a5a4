//! "Something has changed", for tasks of one worker.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use super::list::List;

/// Wakes tasks of one worker that wait for something which the value itself knows nothing of: one at a time
/// ([`notify_one`](Self::notify_one)), or all ([`notify_waiters`](Self::notify_waiters)).
///
/// It belongs to one thread and uses no atomic operation.
///
/// ```
/// use std::cell::Cell;
/// use std::rc::Rc;
/// use corelane::sync::Notify;
///
/// corelane::task::block_on(async {
///     let (value, changed) = (Rc::new(Cell::new(0)), Rc::new(Notify::new()));
///     let seen = corelane::task::spawn({
///         let (value, changed) = (value.clone(), changed.clone());
///         async move {
///             while value.get() == 0 {
///                 changed.notified().await;
///             }
///             value.get()
///         }
///     });
///     value.set(7);
///     changed.notify_one(); // kept for whoever comes first, should nobody wait yet
///     assert_eq!(seen.await.unwrap(), 7);
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Default)]
pub struct Notify {
    /// A notification that found nobody.
    stored: Cell<bool>,
    /// How often everybody was notified.
    rounds: Cell<u64>,
    waiting: RefCell<List<Waiting>>,
}

struct Waiting {
    notified: Option<How>,
    waker: Waker,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    /// Alone: it is passed on if he goes without taking it.
    One,
    All,
}

impl Notify {
    /// One without a stored notification.
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits for a notification: a stored one, the next one that comes to it in turn, or the next to all; of the latter also
    /// one that comes after this call and before the future is first polled. Dropped before it is done, it has taken none.
    pub fn notified(&self) -> Notified<'_> {
        Notified { notify: self, round: self.rounds.get(), place: None }
    }

    /// Wakes whoever has waited longest. When nobody waits, whoever comes next does not wait; that is
    /// stored once, however often this is called.
    pub fn notify_one(&self) {
        if let Some(waker) = self.call_first(How::One) {
            waker.wake();
        } else {
            self.stored.set(true);
        }
    }

    /// Wakes all who wait. Nothing is stored for those who come later.
    pub fn notify_waiters(&self) {
        self.rounds.set(self.rounds.get() + 1);
        // Those who begin to wait while others are woken belong to the next round.
        let mut wakers = Vec::new();
        while let Some(waker) = self.call_first(How::All) {
            wakers.push(waker);
        }
        for waker in wakers {
            waker.wake();
        }
    }

    fn call_first(&self, how: How) -> Option<Waker> {
        let mut waiting = self.waiting.borrow_mut();
        let first = waiting.front()?;
        waiting.unlink(first);
        let called = waiting.get_mut(first);
        called.notified = Some(how);
        Some(called.waker.clone())
    }
}

impl fmt::Debug for Notify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Notify(stored: {})", self.stored.get())
    }
}

/// Waits for a notification; made by [`Notify::notified`].
///
/// ```
/// let notify = corelane::sync::Notify::new();
/// notify.notify_one();
/// corelane::task::block_on(async move { notify.notified().await })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "futures do nothing unless they are awaited"]
#[derive(Debug)]
pub struct Notified<'a> {
    notify: &'a Notify,
    round: u64,
    place: Option<u32>,
}

impl Future for Notified<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let notify = this.notify;
        let Some(place) = this.place else {
            if this.round != notify.rounds.get() || notify.stored.replace(false) {
                return Poll::Ready(());
            }
            let waiting = Waiting { notified: None, waker: cx.waker().clone() };
            this.place = Some(notify.waiting.borrow_mut().push_back(waiting));
            return Poll::Pending;
        };
        let mut waiting = notify.waiting.borrow_mut();
        let state = waiting.get_mut(place);
        if state.notified.is_none() {
            let before = (!state.waker.will_wake(cx.waker()))
                .then(|| std::mem::replace(&mut state.waker, cx.waker().clone()));
            drop(waiting);
            drop(before);
            return Poll::Pending;
        }
        let ended = waiting.take(place);
        drop(waiting);
        drop(ended);
        this.place = None;
        Poll::Ready(())
    }
}

impl Drop for Notified<'_> {
    fn drop(&mut self) {
        let Some(place) = self.place.take() else { return };
        let left = self.notify.waiting.borrow_mut().take(place);
        if left.notified == Some(How::One) {
            self.notify.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Bell;
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Debug)]
    enum Step {
        /// Make a future; it is polled later.
        Make,
        Poll(usize),
        Cancel(usize),
        One,
        All,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => Just(Step::Make),
            5 => any::<usize>().prop_map(Step::Poll),
            2 => any::<usize>().prop_map(Step::Cancel),
            2 => Just(Step::One),
            1 => Just(Step::All),
        ]
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Is {
        Made,
        Waiting(u64),
        One,
        All,
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        #[test]
        fn notifications_reach_who_has_waited_longest_and_none_is_lost(
            steps in proptest::collection::vec(step(), 0..80),
        ) {
            let notify = Notify::new();
            let mut stored = false;
            let mut waiters: Vec<(Pin<Box<Notified<'_>>>, Bell, Is)> = Vec::new();
            // The model's notification of one: the longest waiting, else it is stored.
            fn one(stored: &mut bool, waiters: &mut [(Pin<Box<Notified<'_>>>, Bell, Is)]) {
                let since = |is: Is| match is {
                    Is::Waiting(since) => since,
                    _ => u64::MAX,
                };
                match waiters.iter_mut().min_by_key(|(_, _, is)| since(*is)) {
                    Some((_, _, is)) if matches!(is, Is::Waiting(_)) => *is = Is::One,
                    _ => *stored = true,
                }
            }
            for (time, step) in (0u64..).zip(steps) {
                match step {
                    Step::Make => waiters.push((Box::pin(notify.notified()), Bell::default(), Is::Made)),
                    Step::Poll(which) if !waiters.is_empty() => {
                        let which = which % waiters.len();
                        let (future, bell, is) = &mut waiters[which];
                        let polled = future.as_mut().poll(&mut Context::from_waker(&bell.waker()));
                        let done = match is {
                            Is::One | Is::All => true,
                            Is::Made => std::mem::take(&mut stored),
                            Is::Waiting(_) => false,
                        };
                        prop_assert_eq!(polled.is_ready(), done);
                        if done {
                            drop(waiters.remove(which));
                        } else if *is == Is::Made {
                            *is = Is::Waiting(time);
                        }
                    }
                    Step::Cancel(which) if !waiters.is_empty() => {
                        let (future, _, is) = waiters.remove(which % waiters.len());
                        drop(future);
                        if is == Is::One {
                            one(&mut stored, &mut waiters);
                        }
                    }
                    Step::One => {
                        notify.notify_one();
                        one(&mut stored, &mut waiters);
                    }
                    Step::All => {
                        notify.notify_waiters();
                        for (_, _, is) in &mut waiters {
                            if matches!(is, Is::Waiting(_) | Is::Made) {
                                *is = Is::All;
                            }
                        }
                    }
                    Step::Poll(_) | Step::Cancel(_) => {}
                }
                prop_assert_eq!(notify.stored.get(), stored);
                for (future, bell, is) in &waiters {
                    // Those who were never polled have nobody to wake.
                    let expected = matches!(is, Is::One | Is::All) && future.place.is_some();
                    prop_assert_eq!(bell.has_rung(), expected);
                }
            }
            drop(waiters);
            prop_assert!(notify.waiting.borrow().is_empty());
        }
    }
}
