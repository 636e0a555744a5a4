//! Why a simulated run did not get where it was to get.

use std::fmt;

use crate::time::Time;

/// A run that ended without its condition coming true. Printing it shows what is needed to see it
/// again: the seed, the time, and the last events.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Stuck {
    /// The seed of the world.
    pub seed: u64,
    /// The virtual time at which it was given up.
    pub at: Time,
    /// Why.
    pub reason: StuckReason,
    /// The last events, the oldest first.
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
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = match self.reason {
            StuckReason::Limit => "the time limit passed",
            StuckReason::Quiet => "nothing is left that could happen",
            StuckReason::Spinning => "a worker spins",
        };
        write!(f, "stuck at {} with seed {}: {reason}; the last events:", self.at, self.seed)?;
        for event in &self.tail {
            write!(f, "\n  {event}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Stuck {}
