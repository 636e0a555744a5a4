//! Ticks.

use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use crate::clock::Time;

use super::sleep::{Sleep, now, sleep_until};

/// What happens to ticks for which nobody was there in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MissedTicks {
    /// They all come at once, until the schedule is caught up with.
    #[default]
    Burst,
    /// They are left out; the next one comes a whole period after the late one.
    Delay,
    /// They are left out; the next one comes at the schedule's next time.
    Skip,
}

/// A tick every `period`, the first one at once.
///
/// ```
/// use std::time::Duration;
///
/// corelane::task::block_on(async {
///     let mut ticks = corelane::time::interval(Duration::from_millis(2));
///     let first = ticks.tick().await;
///     assert_eq!(ticks.tick().await, first + Duration::from_millis(2));
/// })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Panics
/// When `period` is zero; and outside of a task.
pub fn interval(period: Duration) -> Interval {
    interval_at(now(), period)
}

/// A tick every `period`, the first one at `first`.
///
/// # Panics
/// When `period` is zero; and outside of a task.
pub fn interval_at(first: Time, period: Duration) -> Interval {
    assert!(!period.is_zero(), "the period of an interval must not be zero");
    Interval { sleep: sleep_until(first), period, missed: MissedTicks::default() }
}

/// Ticks; made by [`interval`] and [`interval_at`].
pub struct Interval {
    sleep: Sleep,
    period: Duration,
    missed: MissedTicks,
}

impl Interval {
    /// Decides what happens to missed ticks; [`MissedTicks::Burst`] at first.
    pub fn set_missed_ticks(&mut self, missed: MissedTicks) {
        self.missed = missed;
    }

    /// The time between two ticks.
    pub fn period(&self) -> Duration {
        self.period
    }

    /// Waits for the next tick; returns when it was due. A tick that is not waited for to its end is not lost.
    pub async fn tick(&mut self) -> Time {
        poll_fn(|cx| self.poll_tick(cx)).await
    }

    /// [`tick`](Self::tick), for use in a stream.
    pub fn poll_tick(&mut self, cx: &mut Context<'_>) -> Poll<Time> {
        ready!(Future::poll(Pin::new(&mut self.sleep), cx));
        let (due, now) = (self.sleep.deadline(), now());
        let next = match self.missed {
            MissedTicks::Burst => due + self.period,
            MissedTicks::Delay if now.since(due) > SLACK => now + self.period,
            MissedTicks::Delay => due + self.period,
            MissedTicks::Skip => {
                let period = self.period.as_nanos();
                let after = (now.since(due).as_nanos() / period + 1).saturating_mul(period);
                due + Duration::from_nanos(u64::try_from(after).unwrap_or(u64::MAX))
            }
        };
        self.sleep.reset(next);
        Poll::Ready(due)
    }
}

/// Lateness that is the wheel's, not the task's.
const SLACK: Duration = Duration::from_millis(5);

impl fmt::Debug for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interval")
            .field("next", &self.sleep.deadline())
            .field("period", &self.period)
            .finish()
    }
}
