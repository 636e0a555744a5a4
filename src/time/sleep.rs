//! Waiting for a point in time.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::clock::Time;
use crate::task::Hub;

/// The time of this turn; it does not advance while tasks run.
///
/// # Panics
/// Outside of a task.
pub fn now() -> Time {
    Hub::current().now()
}

/// Waits for `duration`.
///
/// ```
/// use std::time::Duration;
///
/// corelane::task::block_on(async {
///     let before = corelane::time::now();
///     corelane::time::sleep(Duration::from_millis(5)).await;
///     assert!(corelane::time::now() >= before + Duration::from_millis(5));
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Panics
/// Outside of a task.
pub fn sleep(duration: Duration) -> Sleep {
    let hub = Hub::current();
    let due = hub.now() + duration;
    Sleep { hub, due, entry: None }
}

/// Waits until `due`; not at all when that is past.
///
/// # Panics
/// Outside of a task.
pub fn sleep_until(due: Time) -> Sleep {
    Sleep { hub: Hub::current(), due, entry: None }
}

/// Waits for a point in time; made by [`sleep`] and [`sleep_until`].
#[must_use = "futures do nothing unless they are awaited"]
pub struct Sleep {
    hub: Rc<Hub>,
    due: Time,
    /// The timer, once it is set.
    entry: Option<u32>,
}

impl Sleep {
    /// When it is over.
    pub fn deadline(&self) -> Time {
        self.due
    }

    /// Moves its end, whether it is past or not.
    pub fn reset(&mut self, due: Time) {
        if let Some(entry) = self.entry.take() {
            self.hub.cancel_timer(entry);
        }
        self.due = due;
    }

    /// Whether it is over.
    pub fn is_elapsed(&self) -> bool {
        self.hub.now() >= self.due
    }

    /// Polls it as the limit of something else, which has a budget of its own: a task that always uses all of
    /// that up would never see its limit otherwise.
    pub(super) fn poll_limit(mut self: Pin<&mut Self>, cx: &Context<'_>) -> Poll<()> {
        if self.is_elapsed() {
            if let Some(entry) = self.entry.take() {
                self.hub.cancel_timer(entry);
            }
            return Poll::Ready(());
        }
        match self.entry {
            Some(entry) => self.hub.update_timer(entry, self.due, cx.waker()),
            None => {
                let entry = self.hub.set_timer(self.due, cx.waker().clone());
                self.entry = Some(entry);
            }
        }
        Poll::Pending
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        // A task that sleeps until what is past again and again is put off as well.
        if self.is_elapsed() && self.hub.poll_budget(cx).is_pending() {
            return Poll::Pending;
        }
        self.poll_limit(cx)
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let Some(entry) = self.entry.take() {
            self.hub.cancel_timer(entry);
        }
    }
}

impl fmt::Debug for Sleep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sleep(until {})", self.due)
    }
}
