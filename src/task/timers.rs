//! The timers of one worker's tasks: a wheel of its own beside the connections', entries used again.

use std::cell::RefCell;
use std::task::Waker;

use crate::clock::Time;
use crate::worker::{Wheel, due_tick, tick_of, time_of};

pub(super) struct Timers(RefCell<Inner>);

struct Inner {
    wheel: Wheel,
    wakers: Vec<Option<Waker>>,
    free: Vec<u32>,
    fired: Vec<u32>,
}

impl Timers {
    pub(super) fn new(now: Time) -> Self {
        Self(RefCell::new(Inner {
            wheel: Wheel::new(tick_of(now)),
            wakers: Vec::new(),
            free: Vec::new(),
            fired: Vec::new(),
        }))
    }

    /// Sets a timer for the first tick at or after `due`.
    pub(super) fn set(&self, due: Time, waker: Waker) -> u32 {
        let inner = &mut *self.0.borrow_mut();
        let entry = inner.free.pop().unwrap_or_else(|| {
            inner.wakers.push(None);
            inner.wheel.grow(inner.wakers.len());
            inner.wakers.len() as u32 - 1
        });
        inner.wakers[entry as usize] = Some(waker);
        inner.wheel.set(entry, due_tick(due, std::time::Duration::ZERO));
        entry
    }

    /// Changes who is woken; sets it once more if it has fired.
    pub(super) fn update(&self, entry: u32, due: Time, waker: &Waker) {
        let inner = &mut *self.0.borrow_mut();
        let known = &mut inner.wakers[entry as usize];
        match known {
            Some(known) if known.will_wake(waker) => {}
            known => *known = Some(waker.clone()),
        }
        if inner.wheel.due(entry).is_none() {
            inner.wheel.set(entry, due_tick(due, std::time::Duration::ZERO));
        }
    }

    /// Takes a timer back.
    pub(super) fn cancel(&self, entry: u32) {
        let waker = {
            let inner = &mut *self.0.borrow_mut();
            inner.wheel.cancel(entry);
            inner.free.push(entry);
            inner.wakers[entry as usize].take()
        };
        // One of somebody else's making may do anything when it is dropped.
        drop(waker);
    }

    /// When the next timer is due.
    pub(super) fn next(&self) -> Option<Time> {
        self.0.borrow().wheel.next_stop().map(time_of)
    }

    /// Moves the wakers of all that are due by `now` to `woken`.
    pub(super) fn advance(&self, now: Time, woken: &RefCell<Vec<Waker>>) {
        let inner = &mut *self.0.borrow_mut();
        inner.wheel.advance(tick_of(now), &mut inner.fired);
        let mut woken = woken.borrow_mut();
        for entry in inner.fired.drain(..) {
            woken.extend(inner.wakers[entry as usize].take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn entries_are_used_again() {
        let timers = Timers::new(Time::from_nanos(1 << 40));
        let now = Time::from_nanos(1 << 40);
        for round in 0..100_000u64 {
            let entry = timers.set(now + Duration::from_millis(round), Waker::noop().clone());
            timers.cancel(entry);
        }
        let kept: Vec<u32> =
            (0..10).map(|n| timers.set(now + Duration::from_secs(n), Waker::noop().clone())).collect();
        assert_eq!(timers.0.borrow().wakers.len(), 10);
        // Those that have fired keep their entry until their owner gives it back.
        let woken = RefCell::default();
        timers.advance(now + Duration::from_millis(4001), &woken);
        assert_eq!(woken.borrow().len(), 5);
        assert!(timers.next().is_some());
        kept.into_iter().for_each(|entry| timers.cancel(entry));
        assert_eq!(timers.next(), None);
        assert_eq!(timers.0.borrow().free.len(), 10);
    }

    #[test]
    fn the_end_of_time_is_a_time() {
        let now = Time::from_nanos(5);
        let timers = Timers::new(now);
        let entry = timers.set(now + Duration::MAX, Waker::noop().clone());
        let woken = RefCell::default();
        let mut stops = 0;
        while let Some(next) = timers.next().filter(|next| next.as_nanos() < 1 << 62) {
            timers.advance(next, &woken);
            stops += 1;
        }
        assert!(stops < 200 && woken.borrow().is_empty(), "{stops} stops in 146 years");
        timers.cancel(entry);
    }
}
