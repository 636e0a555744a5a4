//! One scenario under many seeds.

use std::error::Error;
use std::fmt;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::stuck::Repeat;
use super::{SEEDS, Sim, SimConfig, Stuck};
use crate::clock::Time;

/// The seeds of a test: `0..count`, or what the environment variable `CORELANE_SIM_SEEDS` asks for:
/// `1234` (a failure seen again) or `0..100000` (a longer search).
///
/// # Panics
/// When the variable says something else: a search that silently did not take place would be worse.
pub fn seeds(count: u64) -> Range<u64> {
    let Ok(asked) = std::env::var(SEEDS) else { return 0..count };
    parse(&asked).unwrap_or_else(|| panic!("{SEEDS} is {asked:?}: it must be N or A..B"))
}

fn parse(asked: &str) -> Option<Range<u64>> {
    let number = |text: &str| text.trim().parse::<u64>().ok();
    match asked.split_once("..") {
        Some((from, to)) => Some(number(from)?..number(to)?),
        None => {
            let seed = number(asked)?;
            Some(seed..seed.checked_add(1)?)
        }
    }
}

/// What makes the worlds of an exploration differ.
type Vary<'a> = Box<dyn FnMut(u64, &mut SimConfig) + 'a>;

/// A search for a seed under which a scenario fails.
///
/// A scenario makes workers and peers in the world that it is given, lets them run with faults
/// ([`Sim::run_for`], [`Sim::run_until`]: nothing may be *wrong*), then ends the faults and demands
/// progress ([`Sim::calm_until`]: something must get *done*). It fails by returning an error or by
/// panicking; either way the seed, how to ask for it again and the last events are printed.
#[must_use = "nothing runs before `run`"]
pub struct Exploration<'a> {
    config: SimConfig,
    seeds: Range<u64>,
    twice: bool,
    vary: Vary<'a>,
}

impl<'a> Exploration<'a> {
    /// Worlds like `config`, each with a seed of its own: 200, or what `CORELANE_SIM_SEEDS` asks for
    /// (see [`seeds`]).
    ///
    /// # Panics
    /// When that variable is not understood.
    pub fn new(config: SimConfig) -> Self {
        Self { config, seeds: seeds(200), twice: false, vary: Box::new(|_, _| {}) }
    }

    /// Runs `count` seeds, unless `CORELANE_SIM_SEEDS` asks for others.
    ///
    /// # Panics
    /// When that variable is not understood.
    pub fn seeds(self, count: u64) -> Self {
        Self { seeds: seeds(count), ..self }
    }

    /// Lets each seed have a configuration of its own: `vary` may change the given one.
    pub fn vary(self, vary: impl FnMut(u64, &mut SimConfig) + 'a) -> Self {
        Self { vary: Box::new(vary), ..self }
    }

    /// Runs every seed twice and fails if the two histories differ: the handler then depends on
    /// something that is not the seed's (real time, the order of a hash map, another thread).
    pub fn twice(self) -> Self {
        Self { twice: true, ..self }
    }

    /// Runs the scenario under every seed, up to the first that fails.
    ///
    /// # Errors
    /// [`Failure`]: the seed, what the scenario returned, and the last events.
    pub fn run(
        mut self,
        mut scenario: impl FnMut(&Sim) -> Result<(), Box<dyn Error>>,
    ) -> Result<Explored, Failure> {
        let begun = Instant::now();
        let mut explored = Explored::default();
        for seed in self.seeds.clone() {
            let mut config = SimConfig { seed, ..self.config.clone() };
            (self.vary)(seed, &mut config);
            config.seed = seed;
            let mut first = None;
            for _ in 0..1 + u32::from(self.twice) {
                let sim = Sim::new(config.clone());
                scenario(&sim).map_err(|error| Failure::new(&sim, error))?;
                let hash = sim.trace_hash();
                if first.is_some_and(|first| first != hash) {
                    let what = "two runs of this seed differ: something is not decided by the seed";
                    return Err(Failure::new(&sim, what.into()));
                }
                if first.replace(hash).is_none() {
                    explored.events += sim.events();
                    explored.virtual_time += sim.now().since(Time::ZERO);
                    explored.trace_hash = explored.trace_hash.rotate_left(1) ^ hash;
                }
            }
            explored.seeds += 1;
        }
        explored.elapsed = begun.elapsed();
        Ok(explored)
    }
}

impl fmt::Debug for Exploration<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exploration").field("config", &self.config).field("seeds", &self.seeds).finish()
    }
}

/// What an exploration went through without finding anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Explored {
    /// Seeds.
    pub seeds: u64,
    /// Events: completions, actions of peers, faults.
    pub events: u64,
    /// Virtual time, all seeds together.
    pub virtual_time: Duration,
    /// The trace hashes of all seeds in one: the same whenever the same seeds are run.
    pub trace_hash: u64,
    /// Real time.
    pub elapsed: Duration,
}

impl fmt::Display for Explored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.elapsed.as_secs_f64().max(1e-9);
        write!(
            f,
            "{} seeds, {} events, {:.1} s of virtual time in {seconds:.2} s ({:.0} seeds/s, {:.0} events/s), \
             trace hash {:016x}",
            self.seeds,
            self.events,
            self.virtual_time.as_secs_f64(),
            self.seeds as f64 / seconds,
            self.events as f64 / seconds,
            self.trace_hash,
        )
    }
}

/// A seed under which a scenario failed. Printing it (its `Debug` form too) shows what is needed to
/// see it again.
#[non_exhaustive]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// The virtual time of the failure.
    pub at: Time,
    /// What the scenario returned.
    pub error: Box<dyn Error>,
    /// The last events, the oldest first.
    pub tail: Vec<String>,
}

impl Failure {
    fn new(sim: &Sim, error: Box<dyn Error>) -> Self {
        Self { seed: sim.seed(), at: sim.now(), error, tail: sim.trace_tail(sim.0.tail) }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(stuck) = self.error.downcast_ref::<Stuck>() {
            // It says all of this already.
            return stuck.fmt(f);
        }
        write!(f, "seed {} failed at {}: {}", self.seed, self.at, self.error)?;
        write!(f, "{}", Repeat { seed: self.seed, tail: &self.tail })
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error for Failure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(self.error.as_ref())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_asked_for_one_by_one_or_as_a_range() {
        assert_eq!(parse("17"), Some(17..18));
        assert_eq!(parse(" 3..10 "), Some(3..10));
        for refused in ["", "x", "1..", "..5", "-1", "18446744073709551615"] {
            assert_eq!(parse(refused), None, "{refused:?}");
        }
    }
}
