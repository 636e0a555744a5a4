//! The connection table: slots with generations, and what the worker knows of each connection.
//!
//! ```text
//!                 accepted ─────────────► Open ──close()──► Draining ──all sent──► Lingering
//!   (vacant) ─┤                            ▲  │                 │    FIN sent,        │ peer's FIN,
//!                 connect ► Connecting ────┘  │ eof + sent,     │ error, timeout      │ timeout
//!                               │             │ error, abort    ▼                     │
//!                               └─────────────┴───────────► Closing ◄─────────────────┘
//!                                 failed, timeout              │ Event::Closed
//!                                                              ▼
//!                                                           (vacant), generation + 1
//! ```
//!
//! `on_closed` is called when a connection enters Closing; the slot is used again only after the
//! driver reported that the kernel holds nothing of it.

use crate::buffer::Chain;
use crate::driver::Key;
use crate::handler::CloseReason;

/// Where a connection is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Vacant,
    Connecting,
    Open,
    /// Closing gracefully: what is queued is still being sent; what arrives is dropped.
    Draining,
    /// FIN is sent; waiting for the peer's.
    Lingering,
    /// The driver is closing it.
    Closing,
}

/// What is true of a connection besides its phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Flags(u32);

impl Flags {
    /// In the dirty list: something is to be brought in line with the driver.
    pub(crate) const DIRTY: Flags = Flags(1);
    /// A receive is armed in the driver.
    pub(crate) const ARMED: Flags = Flags(1 << 1);
    /// Its cancellation was asked for.
    pub(crate) const CANCELLING: Flags = Flags(1 << 2);
    /// Waiting in the starved list for a buffer.
    pub(crate) const STARVED: Flags = Flags(1 << 3);
    /// The handler paused receiving.
    pub(crate) const PAUSED: Flags = Flags(1 << 4);
    /// Unsent bytes reached the high-water mark and have not fallen to the low one.
    pub(crate) const CONGESTED: Flags = Flags(1 << 5);
    /// In the list of those whose held data may be delivered.
    pub(crate) const READY: Flags = Flags(1 << 6);
    /// The peer's FIN arrived.
    pub(crate) const RX_EOF: Flags = Flags(1 << 7);
    /// … and the handler was told.
    pub(crate) const EOF_TOLD: Flags = Flags(1 << 8);
    /// A send is in flight.
    pub(crate) const SENDING: Flags = Flags(1 << 9);
    /// Nothing more will be sent after what is queued.
    pub(crate) const TX_ENDING: Flags = Flags(1 << 10);
    /// FIN was given to the driver.
    pub(crate) const TX_ENDED: Flags = Flags(1 << 11);
    /// A send failed: nothing more is sent, what was received before is still delivered.
    pub(crate) const TX_FAILED: Flags = Flags(1 << 12);
    /// Reset it as soon as the callback has returned.
    pub(crate) const ABORT: Flags = Flags(1 << 13);
    /// The send in flight was cancelled to get its leases back.
    pub(crate) const RECLAIM: Flags = Flags(1 << 14);
    /// A receive was armed before (so that the next is a re-arm).
    pub(crate) const WAS_ARMED: Flags = Flags(1 << 15);
    /// Its turn in the starved list has come.
    pub(crate) const FED: Flags = Flags(1 << 16);
    /// Receiving pauses by itself while the connection is congested.
    pub(crate) const AUTO_PAUSE: Flags = Flags(1 << 17);
    /// The send in flight holds buffers of the arena.
    pub(crate) const LEASED: Flags = Flags(1 << 18);
    /// To be closed gracefully as soon as it is connected.
    pub(crate) const CLOSE_LATER: Flags = Flags(1 << 19);
    /// Receiving is paused, by congestion or by the handler, and that was counted.
    pub(crate) const HELD_UP: Flags = Flags(1 << 20);

    /// A datagram socket.
    pub(crate) const DATAGRAM: Flags = Flags(1 << 21);
    /// Receiving has failed, and goes on when the handler has been told.
    pub(crate) const RX_FAULT: Flags = Flags(1 << 22);

    #[inline]
    pub(crate) fn has(self, any: Flags) -> bool {
        self.0 & any.0 != 0
    }

    #[inline]
    pub(crate) fn insert(&mut self, flags: Flags) {
        self.0 |= flags.0;
    }

    #[inline]
    pub(crate) fn remove(&mut self, flags: Flags) {
        self.0 &= !flags.0;
    }

    #[inline]
    pub(crate) fn set(&mut self, flags: Flags, on: bool) {
        if on {
            self.insert(flags);
        } else {
            self.remove(flags);
        }
    }

    pub(crate) const fn and(self, other: Flags) -> Flags {
        Flags(self.0 | other.0)
    }
}

/// One connection.
pub(crate) struct Slot<S> {
    pub(crate) generation: u32,
    /// Next vacant slot, while vacant.
    next_vacant: u32,
    pub(crate) phase: Phase,
    /// Payloads held back, in pull mode.
    pub(crate) pieces: u16,
    pub(crate) flags: Flags,
    /// Why it is being closed; meaningful from Draining on, and with `TX_FAILED`.
    pub(crate) reason: CloseReason,
    /// Idle timeout in ticks; 0 for none.
    pub(crate) idle: u32,
    /// Waiting to be sent (not what is in flight).
    pub(crate) queue: Chain,
    /// Received while paused, to be delivered on resume; in pull mode, received and not taken.
    pub(crate) held: Chain,
    /// Bytes queued and in flight.
    pub(crate) unsent: u64,
    /// Tick of the last receive, or of a send's progress while congested.
    pub(crate) last_active: u64,
    /// Ticks of the handler's deadline, the handler's timer, and the phase's own time limit; 0 for none.
    pub(crate) deadline: u64,
    pub(crate) timer: u64,
    pub(crate) limit: u64,
    pub(crate) state: Option<S>,
}

impl<S> Slot<S> {
    /// Whether the handler is told of what happens on the connection: no longer when it has closed or
    /// aborted it.
    #[inline]
    pub(crate) fn is_heard(&self) -> bool {
        self.phase == Phase::Open && !self.flags.has(Flags::ABORT)
    }

    /// The tick at which the idle timeout is over; 0 for none. What happened last did so within its
    /// tick, so the timeout is over one tick after as many as it has: late, never early.
    #[inline]
    pub(crate) fn idle_due(&self) -> u64 {
        if self.idle == 0 { 0 } else { self.last_active + u64::from(self.idle) + 1 }
    }
}

const NONE: u32 = u32::MAX;

pub(crate) struct Table<S> {
    slots: Vec<Slot<S>>,
    vacant: u32,
    live: u32,
    capacity: u32,
}

impl<S> Table<S> {
    /// A table of at most `capacity` connections. The memory is reserved at once, so that it never
    /// moves, and touched only as slots come into use.
    pub(crate) fn new(capacity: u32) -> Self {
        Self { slots: Vec::with_capacity(capacity as usize), vacant: NONE, live: 0, capacity }
    }

    /// Slots in use, those being closed included.
    pub(crate) fn live(&self) -> u32 {
        self.live
    }

    /// Slots that can still be taken.
    pub(crate) fn room(&self) -> u32 {
        self.capacity - self.live
    }

    /// Slots that were ever used: the range of valid slot numbers.
    pub(crate) fn used(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Takes a vacant slot, the most recently used first; `None` when the table is full.
    pub(crate) fn take(&mut self, phase: Phase, state: Option<S>, tick: u64) -> Option<u32> {
        let index = if self.vacant != NONE {
            let index = self.vacant;
            self.vacant = self.slots[index as usize].next_vacant;
            index
        } else {
            if self.slots.len() >= self.capacity as usize {
                return None;
            }
            self.slots.push(Slot {
                generation: 0,
                next_vacant: NONE,
                phase: Phase::Vacant,
                pieces: 0,
                flags: Flags::default(),
                reason: CloseReason::Local,
                idle: 0,
                queue: Chain::EMPTY,
                held: Chain::EMPTY,
                unsent: 0,
                last_active: 0,
                deadline: 0,
                timer: 0,
                limit: 0,
                state: None,
            });
            self.slots.len() as u32 - 1
        };
        let slot = &mut self.slots[index as usize];
        slot.phase = phase;
        slot.flags = Flags::default();
        slot.pieces = 0;
        slot.reason = CloseReason::Local;
        slot.last_active = tick;
        slot.state = state;
        self.live += 1;
        Some(index)
    }

    /// Makes a slot vacant; every name of its connection becomes invalid.
    pub(crate) fn vacate(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        debug_assert!(slot.queue.is_empty() && slot.held.is_empty() && slot.state.is_none());
        slot.phase = Phase::Vacant;
        slot.generation = slot.generation.wrapping_add(1);
        slot.unsent = 0;
        slot.idle = 0;
        slot.deadline = 0;
        slot.timer = 0;
        slot.limit = 0;
        slot.next_vacant = self.vacant;
        self.vacant = index;
        self.live -= 1;
    }

    #[inline]
    pub(crate) fn get(&self, index: u32) -> &Slot<S> {
        &self.slots[index as usize]
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, index: u32) -> &mut Slot<S> {
        &mut self.slots[index as usize]
    }

    pub(crate) fn key(&self, index: u32) -> Key {
        Key { slot: index, generation: self.slots[index as usize].generation }
    }

    /// The slot of a key, if the key is not out of date.
    #[inline]
    pub(crate) fn find(&self, key: Key) -> Option<u32> {
        let slot = self.slots.get(key.slot as usize)?;
        (slot.generation == key.generation && slot.phase != Phase::Vacant).then_some(key.slot)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_never_reaches_the_slots_next_connection() {
        let mut table = Table::new(2);
        let first = table.take(Phase::Open, Some('a'), 0).expect("room");
        let name = table.key(first);
        assert_eq!(table.find(name), Some(first));
        table.get_mut(first).state = None;
        table.vacate(first);
        assert_eq!(table.find(name), None);
        let second = table.take(Phase::Open, Some('b'), 0).expect("room");
        assert_eq!(second, first, "slots are reused");
        assert_eq!(table.find(name), None);
    }

    #[test]
    fn a_full_table_refuses() {
        let mut table = Table::new(1);
        assert!(table.take(Phase::Open, Some(()), 0).is_some());
        assert_eq!(table.room(), 0);
        assert!(table.take(Phase::Open, Some(()), 0).is_none());
    }

    #[test]
    fn a_slot_is_small() {
        // With the async tier's state, a pointer; `tests/promises_task_alloc.rs` counts on it.
        assert!(size_of::<Slot<Box<()>>>() <= 112, "{} bytes", size_of::<Slot<Box<()>>>());
    }
}
