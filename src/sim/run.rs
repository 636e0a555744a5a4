//! Who goes next: workers that have something to do, else the clock.

use std::rc::Rc;
use std::time::Duration;

use super::{Inner, Sim, Stuck, StuckReason};
use crate::clock::Time;
use crate::driver::sim::{Place, Strike};

/// Turns in a row without an event after which a worker counts as spinning. An honest worker takes
/// one such turn before it sleeps, and a few while it puts off work to its next turn.
const IDLE_TURNS: u32 = 10_000;

/// A worker, whatever its handler.
pub(super) trait Station {
    /// Its ring in the world; `None` when it has ended.
    fn ring(&self) -> Option<usize>;

    /// When its last turn is over.
    fn busy_until(&self) -> Time;

    /// Its thread does nothing until the given time.
    fn pause(&self, until: Time);

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

/// What a step is to be.
enum Next {
    Turn(Rc<dyn Station>, usize),
    Clock { at: Time, slept: bool },
    Nothing,
}

impl Inner {
    fn next(&self) -> Next {
        let stations = self.stations.borrow();
        let mut due = self.due.borrow_mut();
        due.clear();
        let (mut next, mut slept): (Option<Time>, bool) = (None, true);
        let world = self.world.borrow();
        let mut sooner = |at: Time| next = Some(next.map_or(at, |next| next.min(at)));
        for (index, station) in stations.iter().enumerate() {
            let Some(number) = station.ring() else { continue };
            let ring = &world.rings[number];
            let busy = station.busy_until();
            if !ring.is_due(world.now) {
                ring.alarm().into_iter().for_each(&mut sooner);
            } else if busy > world.now {
                slept = false;
                sooner(busy);
            } else {
                due.push((index, number));
            }
        }
        if !due.is_empty() {
            let pick = self.dice.borrow_mut().below(due.len() as u64) as usize;
            let (index, ring) = due[pick];
            return Next::Turn(stations[index].clone(), ring);
        }
        world.next_time().into_iter().for_each(&mut sooner);
        next.map_or(Next::Nothing, |at| Next::Clock { at, slept })
    }

    /// Turns one of the workers that are due, or moves the clock to the next time that matters.
    fn step(&self, limit: Time) -> Step {
        match self.next() {
            Next::Turn(station, ring) => {
                if let Some(until) = self.paused(ring) {
                    station.pause(until);
                    return Step::Turn;
                }
                let (least, most) = self.turn_time;
                let nanos = self.dice.borrow_mut().between(least.as_nanos() as u64, most.as_nanos() as u64);
                let busy_until = self.world.borrow().now + Duration::from_nanos(nanos);
                station.turn(busy_until);
                Step::Turn
            }
            Next::Clock { at, slept } => {
                self.world.borrow_mut().advance(at.min(limit));
                if at > limit {
                    return Step::Limit;
                }
                self.leap();
                Step::Clock { slept }
            }
            Next::Nothing => Step::Quiet,
        }
    }

    /// Until when a fault keeps a worker's thread from running.
    fn paused(&self, ring: usize) -> Option<Time> {
        let mut world = self.world.borrow_mut();
        let (pause, most) = (world.settings.faults.pause, world.settings.faults.pause_for);
        let time = world.strikes_for(Strike::Pause, Place::ring(ring), pause, most)?;
        Some(world.now + time)
    }

    /// Lets the clock leap, if a fault says so.
    fn leap(&self) {
        let mut world = self.world.borrow_mut();
        let (jump, most) = (world.settings.faults.clock_jump, world.settings.faults.clock_jump_by);
        if let Some(by) = world.strikes_for(Strike::ClockJump, Place::default(), jump, most) {
            world.leapt += by;
            let to = world.now + by;
            world.advance(to);
        }
    }

    /// What is not as it must always be.
    fn violation(&self) -> Option<String> {
        if let Some(found) = self.world.borrow().violation() {
            return Some(found);
        }
        let mut rules = self.rules.borrow_mut();
        rules.iter_mut().find_map(|(what, holds)| Some(format!("{what}: {}", holds().err()?)))
    }
}

/// Notices a worker that takes turns without anything happening.
struct SpinGuard {
    events: u64,
    idle: u32,
}

impl SpinGuard {
    fn new(sim: &Sim) -> Self {
        Self { events: sim.events(), idle: 0 }
    }

    /// Whether the step was one too many.
    fn sees(&mut self, sim: &Sim, step: &Step) -> bool {
        match step {
            Step::Clock { slept: true } => self.idle = 0,
            Step::Turn => {
                let events = sim.events();
                self.idle = if events == self.events { self.idle + 1 } else { 0 };
                self.events = events;
            }
            Step::Clock { .. } | Step::Limit | Step::Quiet => {}
        }
        self.idle >= IDLE_TURNS
    }
}

fn stuck(sim: &Sim, reason: StuckReason, detail: Option<String>) -> Stuck {
    Stuck { seed: sim.0.seed, at: sim.now(), reason, detail, tail: sim.trace_tail(sim.0.tail) }
}

/// One step, and everything that is looked at after each.
fn guarded(sim: &Sim, guard: &mut SpinGuard, limit: Time) -> Result<Step, Stuck> {
    let step = sim.0.step(limit);
    if let Some(found) = sim.0.violation() {
        return Err(stuck(sim, StuckReason::Violated, Some(found)));
    }
    if guard.sees(sim, &step) {
        return Err(stuck(sim, StuckReason::Spinning, None));
    }
    Ok(step)
}

pub(super) fn until(sim: &Sim, limit: Duration, mut done: impl FnMut() -> bool) -> Result<(), Stuck> {
    let start = sim.now();
    let leapt = sim.0.world.borrow().leapt;
    let mut guard = SpinGuard::new(sim);
    while !done() {
        // In a leap of the clock nobody can do anything, so it does not count.
        let end = start + limit + (sim.0.world.borrow().leapt - leapt);
        match guarded(sim, &mut guard, end)? {
            Step::Turn | Step::Clock { .. } => {}
            Step::Limit => return Err(stuck(sim, StuckReason::Limit, None)),
            Step::Quiet => return Err(stuck(sim, StuckReason::Quiet, None)),
        }
    }
    Ok(())
}

pub(super) fn for_time(sim: &Sim, time: Duration) -> Result<(), Stuck> {
    let end = sim.now() + time;
    let mut guard = SpinGuard::new(sim);
    loop {
        match guarded(sim, &mut guard, end)? {
            Step::Turn | Step::Clock { .. } => {}
            Step::Limit => return Ok(()),
            Step::Quiet => {
                sim.0.world.borrow_mut().advance(end);
                return Ok(());
            }
        }
    }
}
