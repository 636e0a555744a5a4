//! Why a simulated run did not get where it was to get.

use std::fmt;

use crate::clock::Time;

/// A run that ended without its condition coming true, or in which something was not as it must be.
/// Printing it (its `Debug` form too, so that `unwrap` and `?` do) shows what is needed to see it
/// again: the seed, how to ask for it, the time, and the last events.
#[derive(Clone)]
#[non_exhaustive]
pub struct Stuck {
    /// The seed of the world.
    pub seed: u64,
    /// The virtual time at which it was given up.
    pub at: Time,
    /// Why.
    pub reason: StuckReason,
    /// What exactly, where the reason leaves that open.
    pub detail: Option<String>,
    /// The last events, the oldest first; [`SimConfig::tail`](super::SimConfig::tail) of them.
    pub tail: Vec<String>,
}

/// Why a run was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StuckReason {
    /// The virtual time limit passed.
    Limit,
    /// Nothing is left that could happen: every worker sleeps for ever, nothing is on its way.
    Quiet,
    /// A worker takes turn after turn in which nothing happens.
    Spinning,
    /// An invariant does not hold: one of [`Sim::always`](super::Sim::always), or one that the
    /// simulation checks by itself.
    Violated,
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = match self.reason {
            StuckReason::Limit => "the time limit passed",
            StuckReason::Quiet => "nothing is left that could happen",
            StuckReason::Spinning => "a worker spins",
            StuckReason::Violated => "an invariant does not hold",
        };
        write!(f, "stuck at {} with seed {}: {reason}", self.at, self.seed)?;
        if let Some(detail) = &self.detail {
            write!(f, ": {detail}")?;
        }
        write!(f, "{}", Repeat { seed: self.seed, tail: &self.tail })
    }
}

impl fmt::Debug for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Stuck {}

/// How to see a failure again, and what happened last.
pub(super) struct Repeat<'a> {
    pub(super) seed: u64,
    pub(super) tail: &'a [String],
}

impl fmt::Display for Repeat<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\nto see it again: {}={}", super::SEEDS, self.seed)?;
        // The test harness names its threads after its tests.
        let thread = std::thread::current();
        if let Some(test) = thread.name().filter(|name| *name != "main") {
            write!(f, " cargo test {test}")?;
        }
        write!(f, "\nthe last {} events:", self.tail.len())?;
        self.tail.iter().try_for_each(|event| write!(f, "\n  {event}"))
    }
}
