//! What the driver knows of each connection: its socket, what is in flight, what is ready.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::buffer::Chain;
use crate::driver::Key;

/// Pieces of data that one connection reports between two waits.
pub(super) const PIECES: u8 = 32;

/// What is in flight, and what is known of the socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct State(u16);

impl State {
    /// Receiving is armed.
    pub(super) const RECV: State = State(1);
    /// The armed receive has seen a wait.
    pub(super) const RECV_BEGUN: State = State(1 << 1);
    /// The slot holds a chain that is being sent, until `Sent` is taken.
    pub(super) const SEND: State = State(1 << 2);
    /// The send is over; `Sent` is to be taken.
    pub(super) const SEND_OVER: State = State(1 << 3);
    /// A connect is under way, until `Connected` is taken.
    pub(super) const CONNECT: State = State(1 << 4);
    /// The connect is over; `Connected` is to be taken.
    pub(super) const CONNECT_OVER: State = State(1 << 5);
    /// There may be something to receive: from an edge until the socket was found empty.
    pub(super) const READABLE: State = State(1 << 6);
    /// Something may stand behind a short read for which no further edge comes (the end, a failure,
    /// urgent data): read until the socket says that it is empty.
    pub(super) const READ_ON: State = State(1 << 7);
    /// The socket may take something: until it took less than it was given.
    pub(super) const WRITABLE: State = State(1 << 8);
    /// It is in the list of what is to be received from.
    pub(super) const QUEUED: State = State(1 << 9);
    /// The socket is watched for room to send, too.
    pub(super) const WATCHED_OUT: State = State(1 << 10);
    /// The socket could not be watched: nothing would tell of it.
    pub(super) const UNWATCHED: State = State(1 << 11);
    /// The receive in flight is to be cancelled.
    pub(super) const RECV_CANCELLED: State = State(1 << 12);
    /// The send in flight is to be cancelled.
    pub(super) const SEND_CANCELLED: State = State(1 << 13);
    /// A datagram socket.
    pub(super) const DATAGRAM: State = State(1 << 14);

    #[inline]
    pub(super) fn has(self, bit: State) -> bool {
        self.0 & bit.0 != 0
    }

    /// Whether all of the bits are set.
    #[inline]
    pub(super) fn all(self, bits: State) -> bool {
        self.0 & bits.0 == bits.0
    }

    #[inline]
    pub(super) fn insert(&mut self, bit: State) {
        self.0 |= bit.0;
    }

    #[inline]
    pub(super) fn remove(&mut self, bit: State) {
        self.0 &= !bit.0;
    }

    pub(super) const fn and(self, other: State) -> State {
        State(self.0 | other.0)
    }

    /// Operations in flight.
    pub(super) fn in_flight(self) -> usize {
        [Self::RECV, Self::SEND, Self::CONNECT].into_iter().filter(|&op| self.has(op)).count()
    }
}

/// One connection's record.
pub(super) struct Slot {
    pub(super) generation: u32,
    /// `None` for a vacant slot.
    fd: Option<OwnedFd>,
    pub(super) state: State,
    /// Pieces reported since the slot came into the list of what is to be received from.
    pub(super) served: u8,
    /// What the connect, or a send that took nothing, failed with; 0 if it did not.
    pub(super) result: i32,
    /// A failure that a send has met. The kernel tells it once only, so that receiving would see a clean
    /// end where there was none.
    pub(super) failure: i32,
    /// What is being sent.
    pub(super) chain: Chain,
    /// Bytes of it that the kernel has taken.
    pub(super) sent: u64,
}

impl Slot {
    fn vacant() -> Self {
        Self {
            generation: 0,
            fd: None,
            state: State::default(),
            served: 0,
            result: 0,
            failure: 0,
            chain: Chain::EMPTY,
            sent: 0,
        }
    }

    /// The socket; `None` for one that could not be had.
    #[inline]
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.fd.as_ref().map(AsFd::as_fd)
    }

    /// Makes the slot vacant; what it held is for the caller to close and to drop.
    pub(super) fn vacate(&mut self) -> (Option<OwnedFd>, Chain) {
        self.state = State::default();
        (self.fd.take(), self.chain.take())
    }
}

pub(super) struct Slots {
    slots: Vec<Slot>,
    capacity: usize,
}

impl Slots {
    /// Room for slots `0..capacity`, reserved so that nothing is moved later, and touched only as they
    /// come into use.
    pub(super) fn new(capacity: u32) -> Self {
        Self { slots: Vec::with_capacity(capacity as usize), capacity: capacity as usize }
    }

    /// Begins a connection's use of a slot.
    ///
    /// # Panics
    /// When the slot lies beyond the capacity: the worker's table has the same.
    pub(super) fn open(&mut self, key: Key, fd: OwnedFd) -> &mut Slot {
        let index = key.slot as usize;
        assert!(index < self.capacity, "slot {index} of {}", self.capacity);
        while self.slots.len() <= index {
            self.slots.push(Slot::vacant());
        }
        let slot = &mut self.slots[index];
        debug_assert!(slot.fd.is_none() && slot.chain.is_empty());
        *slot = Slot { generation: key.generation, fd: Some(fd), ..Slot::vacant() };
        slot
    }

    /// Slots that were ever used.
    pub(super) fn len(&self) -> u32 {
        self.slots.len() as u32
    }

    /// The key of the connection in a slot, if there is one.
    pub(super) fn open_key(&self, slot: u32) -> Option<Key> {
        let record = self.slots.get(slot as usize)?;
        record.fd.as_ref().map(|_| Key { slot, generation: record.generation })
    }

    /// The record of a connection, unless the key is out of date.
    #[inline]
    pub(super) fn get(&mut self, key: Key) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(key.slot as usize)?;
        (slot.generation == key.generation && slot.fd.is_some()).then_some(slot)
    }
}
