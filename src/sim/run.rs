//! Who goes next: workers that have something to do, else the clock.

use std::time::Duration;

use super::{Inner, Sim, Stuck, StuckReason};
use crate::time::Time;

/// Turns in a row without an event after which a worker counts as spinning. An honest worker takes
/// one such turn before it sleeps, and a few while it puts off work to its next turn.
const IDLE_TURNS: u32 = 10_000;

/// A worker, whatever its handler.
pub(super) trait Station {
    /// Its ring in the world; `None` when it has ended.
    fn ring(&self) -> Option<usize>;

    /// When its last turn is over.
    fn busy_until(&self) -> Time;

    /// One turn; the thread is then busy until the given time.
    fn turn(&self, busy_until: Time);
}

/// What a step was.
enum Step {
    Turn,
    /// The clock moved; `slept`: because no worker had anything to do.
    Clock {
        slept: bool,
    },
    /// Nothing happens up to the limit.
    Limit,
    /// Nothing happens ever.
    Quiet,
}

impl Inner {
    /// Turns one of the workers that are due, or moves the clock to the next time that matters.
    fn step(&self, limit: Time) -> Step {
        let stations = self.stations.borrow().clone();
        let mut due = Vec::new();
        let (mut next, mut slept): (Option<Time>, bool) = (None, true);
        {
            let world = self.world.borrow();
            let mut sooner = |at: Time| next = Some(next.map_or(at, |next| next.min(at)));
            for station in &stations {
                let Some(ring) = station.ring().map(|ring| &world.rings[ring]) else { continue };
                let busy = station.busy_until();
                if !ring.is_due(world.now) {
                    ring.wait_until.into_iter().for_each(&mut sooner);
                } else if busy > world.now {
                    slept = false;
                    sooner(busy);
                } else {
                    due.push(station);
                }
            }
            world.next_time().into_iter().for_each(&mut sooner);
        }
        if !due.is_empty() {
            let mut dice = self.dice.borrow_mut();
            let pick = dice.below(due.len() as u64) as usize;
            let (least, most) = self.turn_time;
            let nanos = dice.between(least.as_nanos() as u64, most.as_nanos() as u64);
            drop(dice);
            let busy_until = self.world.borrow().now + Duration::from_nanos(nanos);
            due[pick].turn(busy_until);
            return Step::Turn;
        }
        let Some(next) = next else { return Step::Quiet };
        self.world.borrow_mut().advance(next.min(limit));
        if next > limit { Step::Limit } else { Step::Clock { slept } }
    }
}

/// Notices a worker that takes turns without anything happening.
struct SpinGuard {
    events: u64,
    idle: u32,
}

impl SpinGuard {
    fn new(sim: &Sim) -> Self {
        Self { events: sim.0.world.borrow().trace.count(), idle: 0 }
    }

    /// Whether the step was one too many.
    fn sees(&mut self, sim: &Sim, step: &Step) -> bool {
        match step {
            Step::Clock { slept: true } => self.idle = 0,
            Step::Turn => {
                let events = sim.0.world.borrow().trace.count();
                self.idle = if events == self.events { self.idle + 1 } else { 0 };
                self.events = events;
            }
            Step::Clock { .. } | Step::Limit | Step::Quiet => {}
        }
        self.idle >= IDLE_TURNS
    }
}

fn stuck(sim: &Sim, reason: StuckReason) -> Stuck {
    Stuck { seed: sim.0.seed, at: sim.now(), reason, tail: sim.trace_tail(40) }
}

pub(super) fn until(sim: &Sim, limit: Duration, mut done: impl FnMut() -> bool) -> Result<(), Stuck> {
    let end = sim.now() + limit;
    let mut guard = SpinGuard::new(sim);
    while !done() {
        let step = sim.0.step(end);
        if guard.sees(sim, &step) {
            return Err(stuck(sim, StuckReason::Spinning));
        }
        match step {
            Step::Turn | Step::Clock { .. } => {}
            Step::Limit => return Err(stuck(sim, StuckReason::Limit)),
            Step::Quiet => return Err(stuck(sim, StuckReason::Quiet)),
        }
    }
    Ok(())
}

pub(super) fn for_time(sim: &Sim, time: Duration) {
    let end = sim.now() + time;
    let mut guard = SpinGuard::new(sim);
    loop {
        let step = sim.0.step(end);
        assert!(!guard.sees(sim, &step), "{}", stuck(sim, StuckReason::Spinning));
        match step {
            Step::Turn | Step::Clock { .. } => {}
            Step::Limit => return,
            Step::Quiet => {
                sim.0.world.borrow_mut().advance(end);
                return;
            }
        }
    }
}
