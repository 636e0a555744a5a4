//! Time for tasks: on the worker's clock, which is virtual on a [simulated kernel](crate::sim).
//!
//! Timers lie on a wheel of 1 ms ticks: they may be late by a millisecond and what else a turn takes, never
//! early. Setting one allocates nothing once as many were set at a time before.

mod interval;
mod sleep;
mod timeout;

pub use interval::{Interval, MissedTicks, interval, interval_at};
pub use sleep::{Sleep, now, sleep, sleep_until};
pub use timeout::{Elapsed, timeout, timeout_at};
