//! What the driver knows of each connection: its socket, and what the kernel holds of it.
//!
//! One small record per connection, reused for the connection's whole life: the operation object of
//! `SocketAsyncEventArgs`, without an allocation per operation.

use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicI32;

use crate::buffer::Chain;
use crate::driver::Key;

use super::submit::SocketRef;

/// What is in flight, and what was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ops(u8);

impl Ops {
    pub(super) const RECV: Ops = Ops(1);
    pub(super) const SEND: Ops = Ops(1 << 1);
    pub(super) const CONNECT: Ops = Ops(1 << 2);
    pub(super) const REGISTER: Ops = Ops(1 << 3);
    pub(super) const SHUTDOWN: Ops = Ops(1 << 4);
    pub(super) const DISCONNECT: Ops = Ops(1 << 5);
    pub(super) const CLOSE: Ops = Ops(1 << 6);
    /// The receive in flight was cancelled.
    pub(super) const RECV_CANCELLED: Ops = Ops(1 << 7);

    #[inline]
    pub(super) fn has(self, op: Ops) -> bool {
        self.0 & op.0 != 0
    }

    #[inline]
    pub(super) fn insert(&mut self, op: Ops) {
        self.0 |= op.0;
    }

    #[inline]
    pub(super) fn remove(&mut self, op: Ops) {
        self.0 &= !op.0;
    }

    /// Whether the kernel holds nothing.
    pub(super) fn none_in_flight(self) -> bool {
        self.0 & !Self::RECV_CANCELLED.0 == 0
    }
}

/// No buffer of the pool.
pub(super) const NO_BUFFER: u32 = u32::MAX;

/// One connection's record.
pub(super) struct Slot {
    pub(super) generation: u32,
    /// Descriptor, or index of the descriptor table; -1 for none.
    pub(super) socket: i32,
    pub(super) ops: Ops,
    /// Completions of the armed receive that found more data behind them, until one did not
    /// (`BURST_OVER` from then on): see [`burst`](Self::burst).
    pub(super) burst: u8,
    /// The slot belongs to a connection.
    pub(super) open: bool,
    /// The socket is an ordinary descriptor, whatever others have: a datagram socket.
    pub(super) plain: bool,
    /// Datagrams of it that the kernel has, and the wait for room.
    pub(super) sends: u8,
    /// Its datagrams are sent one after the other: a Unix socket, which must not reorder them.
    pub(super) serial: bool,
    /// It has no room: what is to be sent waits.
    pub(super) stalled: bool,
    /// Close was asked for: only `Closed` is still reported.
    pub(super) closing: bool,
    /// What is being sent: the kernel reads it until the send's completion.
    pub(super) chain: Chain,
    /// The buffer that a polled connection's receive was given; `NO_BUFFER` for none.
    pub(super) buffer: u32,
    /// For registering a socket in the descriptor table: the kernel reads the descriptor here and
    /// writes the index.
    pub(super) exchange: AtomicI32,
}

pub(super) struct Slots {
    slots: Vec<Slot>,
    capacity: usize,
}

impl Slots {
    /// Room for slots `0..capacity`, reserved so that records never move (the kernel writes to
    /// `exchange`, SAFETY invariant 7), and touched only as they come into use.
    pub(super) fn new(capacity: u32) -> Self {
        Self { slots: Vec::with_capacity(capacity as usize), capacity: capacity as usize }
    }

    /// Begins a connection's use of a slot.
    ///
    /// # Panics
    /// When the slot lies beyond the capacity: the worker's table has the same.
    pub(super) fn open(&mut self, key: Key, socket: i32) -> &mut Slot {
        let index = key.slot as usize;
        assert!(index < self.capacity, "slot {index} of {}", self.capacity);
        while self.slots.len() <= index {
            self.slots.push(Slot {
                generation: 0,
                socket: -1,
                ops: Ops::default(),
                burst: 0,
                open: false,
                plain: false,
                sends: 0,
                serial: false,
                stalled: false,
                closing: false,
                chain: Chain::EMPTY,
                buffer: NO_BUFFER,
                exchange: AtomicI32::new(-1),
            });
        }
        let slot = &mut self.slots[index];
        debug_assert!(!slot.open && slot.ops.none_in_flight());
        slot.generation = key.generation;
        slot.socket = socket;
        slot.ops = Ops::default();
        slot.open = true;
        slot.plain = false;
        slot.serial = false;
        slot.stalled = false;
        slot.closing = false;
        slot
    }

    /// Slots that were ever used.
    pub(super) fn len(&self) -> u32 {
        self.slots.len() as u32
    }

    /// The key of the connection in a slot, if there is one.
    pub(super) fn open_key(&self, slot: u32) -> Option<Key> {
        let record = self.slots.get(slot as usize)?;
        record.open.then_some(Key { slot, generation: record.generation })
    }

    /// The record of a connection, unless the key is out of date.
    #[inline]
    pub(super) fn get(&mut self, key: Key) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(key.slot as usize)?;
        (slot.open && slot.generation == key.generation).then_some(slot)
    }
}

/// Pieces that a multishot receive takes at a time (`MULTISHOT_MAX_RETRY` of the kernel).
const BURST: u8 = 32;
const BURST_OVER: u8 = u8::MAX;

impl Slot {
    /// Notes a completion of the armed receive with data, and whether the socket held more; true when
    /// the receive is to be armed afresh.
    ///
    /// A receive that is armed when both much data and a reset are there already takes the data in
    /// several goes, and with the last of them the kernel (6.18 at least) forgets the hang-up that it saw
    /// when it began: no completion would ever tell of the reset. A fresh receive looks again.
    #[inline]
    pub(super) fn burst(&mut self, more_behind: bool) -> bool {
        if self.burst == BURST_OVER {
            return false;
        }
        if more_behind {
            self.burst = (self.burst + 1).min(BURST);
            return false;
        }
        std::mem::replace(&mut self.burst, BURST_OVER) == BURST
    }

    /// The descriptor of a datagram socket.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        if !self.plain || self.socket < 0 {
            return None;
        }
        // SAFETY: a plain slot's descriptor is open until its close is submitted, and that is after the
        // slot was told to close, when nothing borrows it any more (invariant 5).
        Some(unsafe { BorrowedFd::borrow_raw(self.socket) })
    }

    /// The socket as operations name it.
    #[inline]
    pub(super) fn socket(&self, direct: bool) -> SocketRef {
        if direct && !self.plain { SocketRef::Fixed(self.socket as u32) } else { SocketRef::Fd(self.socket) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `tests/promises_task_alloc.rs` counts on it.
    #[test]
    fn a_record_is_small() {
        assert!(size_of::<Slot>() <= 40, "{} bytes", size_of::<Slot>());
    }
}
