//! What the driver knows of each connection: its socket, and what is in flight.

use windows_sys::Win32::Networking::WinSock::{INVALID_SOCKET, SOCKET};

use crate::buffer::Chain;
use crate::driver::Key;

/// What is in flight, and what was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Ops(u8);

impl Ops {
    /// The receive object is with the kernel.
    pub(super) const RECV: Ops = Ops(1);
    /// The send object is with the kernel, for sending.
    pub(super) const SEND: Ops = Ops(1 << 1);
    /// The send object is with the kernel, for connecting.
    pub(super) const CONNECT: Ops = Ops(1 << 2);
    /// There is something to receive: the driver's list of work has the connection.
    pub(super) const READING: Ops = Ops(1 << 3);
    /// The send is done without a packet, and to be reported.
    pub(super) const SENT: Ops = Ops(1 << 4);
    /// The connect is done without a packet, and to be reported.
    pub(super) const CONNECTED: Ops = Ops(1 << 5);
    /// Receiving was cancelled.
    pub(super) const CANCELLED: Ops = Ops(1 << 6);
    /// This side has ended its stream.
    pub(super) const SHUT: Ops = Ops(1 << 7);

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
    pub(super) fn none_in_kernel(self) -> bool {
        self.0 & (Self::RECV.0 | Self::SEND.0 | Self::CONNECT.0) == 0
    }
}

/// One connection's record.
pub(super) struct Slot {
    pub(super) generation: u32,
    /// `INVALID_SOCKET` for none.
    pub(super) socket: SOCKET,
    pub(super) ops: Ops,
    /// The slot belongs to a connection.
    pub(super) open: bool,
    /// Close was asked for: only `Closed` is still reported.
    pub(super) closing: bool,
    /// It is a datagram socket, with one peer or without; and how many of its datagrams the kernel has.
    pub(super) datagram: bool,
    pub(super) connected: bool,
    pub(super) sends: u32,
    /// The wait in which `pieces` were received.
    pub(super) wait: u64,
    pub(super) pieces: u8,
    /// Error number with which the connection failed where that could not be reported at once: it is when
    /// nothing more can be received. 0 for none.
    pub(super) failed: i32,
    /// What came of an operation that is done without a packet.
    pub(super) outcome: Result<u32, i32>,
    /// What is being sent: the kernel reads it until the send's packet was taken.
    pub(super) chain: Chain,
}

pub(super) struct Slots {
    slots: Vec<Slot>,
    capacity: usize,
}

impl Slots {
    /// Room for slots `0..capacity`.
    pub(super) fn new(capacity: u32) -> Self {
        Self { slots: Vec::new(), capacity: capacity as usize }
    }

    /// Begins a connection's use of a slot.
    ///
    /// # Panics
    /// When the slot lies beyond the capacity: the worker's table has the same.
    pub(super) fn open(&mut self, key: Key, socket: SOCKET) -> &mut Slot {
        let index = key.slot as usize;
        assert!(index < self.capacity, "slot {index} of {}", self.capacity);
        while self.slots.len() <= index {
            self.slots.push(Slot {
                generation: 0,
                socket: INVALID_SOCKET,
                ops: Ops::default(),
                open: false,
                closing: false,
                datagram: false,
                connected: false,
                sends: 0,
                wait: 0,
                pieces: 0,
                failed: 0,
                outcome: Ok(0),
                chain: Chain::EMPTY,
            });
        }
        let slot = &mut self.slots[index];
        debug_assert!(!slot.open && slot.ops.none_in_kernel() && slot.sends == 0);
        slot.generation = key.generation;
        slot.socket = socket;
        slot.ops = Ops::default();
        slot.open = true;
        slot.closing = false;
        (slot.datagram, slot.connected) = (false, false);
        slot.failed = 0;
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

    /// The record of a connection that operations may be started for.
    #[inline]
    pub(super) fn usable(&mut self, key: Key) -> Option<&mut Slot> {
        self.get(key).filter(|slot| !slot.closing)
    }
}
