//! A hierarchical timer wheel: one entry per connection, O(1) to set and to cancel, no allocation
//! beyond the entry itself, which is made when its slot is first used.
//!
//! Six levels of 64 slots; a tick is a millisecond, so level 0 spans 64 ms, level 1 4 s, … and the
//! whole wheel some 800 days. An entry lies in the level of the highest six-bit digit in which its
//! due tick differs from the current tick, and moves down a level when its slot is reached. (The
//! scheme is that of Varghese and Lauck, 1987.)

use std::time::Duration;

use crate::clock::Time;

const BITS: u32 = 6;
const SLOTS: usize = 1 << BITS;
const LEVELS: usize = 6;
const NONE: u32 = u32::MAX;
/// Ticks that the wheel spans; later entries are put at its end and looked at again there. One top
/// slot short of a full turn, so that no entry lands in the slot that the wheel stands in.
const SPAN: u64 = (SLOTS as u64 - 1) << (BITS as u64 * (LEVELS as u64 - 1));

/// Nanoseconds of a tick.
const TICK_NS: u64 = 1_000_000;

/// The tick that contains `time`.
#[inline]
pub(crate) fn tick_of(time: Time) -> u64 {
    time.as_nanos() / TICK_NS
}

/// The first tick at or after `time` plus `after`: a timer may be late, never early.
#[inline]
pub(crate) fn due_tick(time: Time, after: Duration) -> u64 {
    (time + after).as_nanos().div_ceil(TICK_NS)
}

/// When `tick` begins.
pub(crate) fn time_of(tick: u64) -> Time {
    Time::from_nanos(tick.saturating_mul(TICK_NS))
}

#[derive(Clone, Copy)]
struct Entry {
    due: u64,
    next: u32,
    prev: u32,
    /// `level * SLOTS + slot` of the list that the entry is in, or `NONE`.
    list: u32,
}

pub(crate) struct Wheel {
    now: u64,
    heads: [u32; LEVELS * SLOTS],
    occupied: [u64; LEVELS],
    entries: Vec<Entry>,
    len: usize,
}

impl Wheel {
    pub(crate) fn new(now: u64) -> Self {
        Self { now, heads: [NONE; LEVELS * SLOTS], occupied: [0; LEVELS], entries: Vec::new(), len: 0 }
    }

    /// Makes room for entries `0..count`.
    pub(crate) fn grow(&mut self, count: usize) {
        if self.entries.len() < count {
            let idle = Entry { due: u64::MAX, next: NONE, prev: NONE, list: NONE };
            self.entries.resize(count, idle);
        }
    }

    /// Entries that are set.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.len
    }

    /// When `entry` is due, if it is set.
    #[inline]
    pub(crate) fn due(&self, entry: u32) -> Option<u64> {
        let entry = &self.entries[entry as usize];
        (entry.list != NONE).then_some(entry.due)
    }

    /// Sets `entry` to fire at tick `due`, or moves it there. A tick that is past fires at the next advance.
    pub(crate) fn set(&mut self, entry: u32, due: u64) {
        self.cancel(entry);
        self.entries[entry as usize].due = due;
        self.link(entry);
        self.len += 1;
    }

    /// Takes `entry` out, if it is set.
    pub(crate) fn cancel(&mut self, entry: u32) {
        if self.entries[entry as usize].list != NONE {
            self.unlink(entry);
            self.len -= 1;
        }
    }

    /// Moves the wheel to tick `now` and appends every entry that is due to `fired`.
    pub(crate) fn advance(&mut self, now: u64, fired: &mut Vec<u32>) {
        while let Some(next) = self.next_stop() {
            if next > now {
                break;
            }
            self.now = next;
            self.stop(fired);
        }
        self.now = self.now.max(now);
    }

    /// The tick at which `advance` has something to do: an entry fires, or moves down a level.
    /// Never later than the earliest entry.
    pub(crate) fn next_stop(&self) -> Option<u64> {
        let mut earliest: Option<u64> = None;
        for level in 0..LEVELS {
            if self.occupied[level] == 0 {
                continue;
            }
            let shift = BITS * level as u32;
            let digit = (self.now >> shift) as usize % SLOTS;
            // Slots at or after the current digit come in this round; level 0's current slot holds
            // what is due now, a higher level's was emptied when the wheel stopped there.
            let ahead = self.occupied[level].rotate_right(digit as u32).trailing_zeros() as u64;
            let round = (self.now >> shift) + ahead;
            let at = round << shift;
            let at = at.max(self.now);
            earliest = Some(earliest.map_or(at, |found| found.min(at)));
        }
        earliest
    }

    /// Handles the lists that begin at the current tick: from the top level down, so that what
    /// moves down is seen on its new level in the same stop.
    fn stop(&mut self, fired: &mut Vec<u32>) {
        for level in (0..LEVELS).rev() {
            let shift = BITS * level as u32;
            let slot = (self.now >> shift) as usize % SLOTS;
            if self.occupied[level] & (1 << slot) == 0 {
                continue;
            }
            let list = level * SLOTS + slot;
            let mut at = std::mem::replace(&mut self.heads[list], NONE);
            self.occupied[level] &= !(1 << slot);
            while at != NONE {
                let next = self.entries[at as usize].next;
                self.entries[at as usize].list = NONE;
                if self.entries[at as usize].due <= self.now {
                    self.len -= 1;
                    fired.push(at);
                } else {
                    self.link(at);
                }
                at = next;
            }
        }
    }

    fn link(&mut self, entry: u32) {
        let due = self.entries[entry as usize].due.max(self.now);
        let placed = due.min(self.now + SPAN);
        let differs = placed ^ self.now;
        let level = if differs == 0 { 0 } else { (63 - differs.leading_zeros()) / BITS };
        let level = (level as usize).min(LEVELS - 1);
        let slot = (placed >> (BITS * level as u32)) as usize % SLOTS;
        let list = level * SLOTS + slot;
        let head = self.heads[list];
        let this = &mut self.entries[entry as usize];
        this.list = list as u32;
        this.prev = NONE;
        this.next = head;
        if head != NONE {
            self.entries[head as usize].prev = entry;
        }
        self.heads[list] = entry;
        self.occupied[level] |= 1 << slot;
    }

    fn unlink(&mut self, entry: u32) {
        let Entry { next, prev, list, .. } = self.entries[entry as usize];
        if next != NONE {
            self.entries[next as usize].prev = prev;
        }
        if prev != NONE {
            self.entries[prev as usize].next = next;
        } else {
            self.heads[list as usize] = next;
            if next == NONE {
                self.occupied[list as usize / SLOTS] &= !(1 << (list as usize % SLOTS));
            }
        }
        self.entries[entry as usize].list = NONE;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        /// Against the obvious model: a sorted map of due ticks.
        #[test]
        fn fires_exactly_what_is_due(
            start in 0u64..1 << 40,
            steps in prop::collection::vec((0u32..24, 0u64..3_000_000, 0u64..200_000, any::<bool>()), 1..80),
        ) {
            let mut wheel = Wheel::new(start);
            wheel.grow(24);
            let mut model: BTreeMap<u32, u64> = BTreeMap::new();
            let mut now = start;
            for (entry, after, step, cancel) in steps {
                if cancel {
                    wheel.cancel(entry);
                    model.remove(&entry);
                } else {
                    wheel.set(entry, now + after);
                    model.insert(entry, now + after);
                }
                if let Some(&first) = model.values().min() {
                    let stop = wheel.next_stop().expect("something is set");
                    prop_assert!(stop <= first.max(now), "stop {stop} after the first entry {first}");
                }
                now += step;
                let mut fired = Vec::new();
                wheel.advance(now, &mut fired);
                fired.sort_unstable();
                let due: Vec<u32> =
                    model.iter().filter(|(_, due)| **due <= now).map(|(entry, _)| *entry).collect();
                prop_assert_eq!(&fired, &due);
                for entry in due {
                    model.remove(&entry);
                }
                prop_assert_eq!(wheel.len(), model.len());
            }
        }
    }

    #[test]
    fn a_timer_is_never_early() {
        let now = Time::from_nanos(1_999_999);
        assert_eq!(tick_of(now), 1);
        assert_eq!(due_tick(now, Duration::from_nanos(1)), 2);
        assert_eq!(due_tick(now, Duration::from_nanos(2)), 3);
        assert!(time_of(3) >= now + Duration::from_nanos(2));
    }

    #[test]
    fn an_entry_beyond_the_span_fires_when_it_is_due() {
        let mut wheel = Wheel::new(5);
        wheel.grow(1);
        let due = 5 + 3 * SPAN + 77;
        wheel.set(0, due);
        let mut fired = Vec::new();
        wheel.advance(due - 1, &mut fired);
        assert!(fired.is_empty());
        wheel.advance(due, &mut fired);
        assert_eq!(fired, [0]);
    }
}
