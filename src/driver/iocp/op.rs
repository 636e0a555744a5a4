//! Operation objects: what the kernel knows an operation by, from its start to its packet.
//!
//! The idea of `SocketAsyncEventArgs`: an object for receiving and one for sending per connection (never one
//! for both: the two are in flight at the same time), made once, used for every operation of every
//! connection that the slot ever has. An object is either
//!
//! * **idle**: nobody but the driver knows it; or
//! * **with the kernel**: from the call that started an operation until its packet was taken from the port.
//!   The kernel writes the `OVERLAPPED`; the driver neither moves, frees nor reuses it.
//!
//! Objects never move: they live in boxes that are freed only when no operation is with the kernel
//! (invariant 8).

use std::cell::{Cell, UnsafeCell};
use std::net::SocketAddr;
use std::os::windows::io::OwnedSocket;
use std::sync::Arc;

use windows_sys::Win32::Foundation::NTSTATUS;
use windows_sys::Win32::System::IO::OVERLAPPED;

use crate::driver::Key;

use super::ext::{ADDRESS_ROOM, Extensions};
use super::port::Port;

/// What an operation was started for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A receive of no bytes, which ends when there is something to receive.
    Recv,
    Send,
    /// The key's slot is the object's place in its table, its generation the number of its use.
    SendDatagram,
    Connect,
    /// The key's slot is the listener, its generation the number of the operation there.
    Accept,
}

/// An operation object. `OVERLAPPED` comes first, so that a packet's pointer is the object's.
#[repr(C)]
pub(super) struct Op {
    overlapped: UnsafeCell<OVERLAPPED>,
    kind: Cell<Kind>,
    key: Cell<Key>,
}

impl Op {
    pub(super) fn new() -> Self {
        Self {
            overlapped: UnsafeCell::new(OVERLAPPED::default()),
            kind: Cell::new(Kind::Recv),
            key: Cell::new(Key { slot: 0, generation: 0 }),
        }
    }

    /// Makes an idle object ready for an operation, and gives the pointer to start it with.
    #[inline]
    pub(super) fn begin(&self, kind: Kind, key: Key) -> *mut OVERLAPPED {
        self.kind.set(kind);
        self.key.set(key);
        let overlapped = self.overlapped.get();
        // SAFETY: the object is idle, so the kernel does not know it (invariant 8).
        unsafe { overlapped.write(OVERLAPPED::default()) };
        overlapped
    }

    /// The pointer by which an operation is cancelled.
    pub(super) fn overlapped(&self) -> *mut OVERLAPPED {
        self.overlapped.get()
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind.get()
    }

    pub(super) fn key(&self) -> Key {
        self.key.get()
    }

    /// How the operation ended; to be asked when its packet was taken.
    #[inline]
    pub(super) fn status(&self) -> NTSTATUS {
        // SAFETY: the packet was taken, so the kernel writes no more (invariant 8).
        let internal = unsafe { (*self.overlapped.get()).Internal };
        // The kernel writes 32 bits of it.
        internal as u32 as NTSTATUS
    }

    /// The object of a packet with the key [`OP`](super::port::OP).
    #[inline]
    pub(super) fn of<'a>(overlapped: *mut OVERLAPPED) -> &'a Op {
        let op = overlapped.cast::<Op>();
        // SAFETY: packets with this key come only from operations that were started with a pointer that
        // `begin` gave, and their objects live until the packet was taken (invariant 8).
        unsafe { &*op }
    }
}

/// The two objects of a connection. Connecting uses the one for sending.
pub(super) struct ConnOps {
    pub(super) recv: Op,
    pub(super) send: Op,
}

/// Connections whose objects are allocated together.
const CHUNK: usize = 64;

/// The objects of all connections, by slot; allocated as slots come into use, and never moved.
#[derive(Default)]
pub(super) struct OpTable {
    chunks: Vec<Box<[ConnOps; CHUNK]>>,
}

impl OpTable {
    /// Has objects for slot `slot` and all before it.
    pub(super) fn reach(&mut self, slot: u32) {
        while self.chunks.len() * CHUNK <= slot as usize {
            let chunk = std::array::from_fn(|_| ConnOps { recv: Op::new(), send: Op::new() });
            self.chunks.push(Box::new(chunk));
        }
    }

    #[inline]
    pub(super) fn get(&self, slot: u32) -> &ConnOps {
        &self.chunks[slot as usize / CHUNK][slot as usize % CHUNK]
    }
}

/// The object of an accept, with what goes with it. The base comes first, as `OVERLAPPED` does there.
#[repr(C)]
pub(super) struct AcceptOp {
    pub(super) op: Op,
    /// Whose operation it is: where the packet of a listener that is shared is forwarded to.
    target: Arc<Port>,
    /// The socket to accept into; there is one while the operation is with the kernel.
    pub(super) socket: Cell<Option<OwnedSocket>>,
    pub(super) armed: Cell<bool>,
    /// Where the kernel writes both addresses of the connection.
    addresses: UnsafeCell<[u8; 2 * ADDRESS_ROOM]>,
}

impl AcceptOp {
    pub(super) fn new(target: &Arc<Port>) -> Self {
        Self {
            op: Op::new(),
            target: Arc::clone(target),
            socket: Cell::new(None),
            armed: Cell::new(false),
            addresses: UnsafeCell::new([0; 2 * ADDRESS_ROOM]),
        }
    }

    /// Where the kernel may write the addresses.
    pub(super) fn addresses(&self) -> *mut u8 {
        self.addresses.get().cast()
    }

    /// The peer's address, when the operation has succeeded.
    pub(super) fn peer(&self, extensions: &Extensions) -> Option<SocketAddr> {
        // SAFETY: the operation's packet was taken, so the kernel writes no more (invariant 8).
        let addresses = unsafe { &*self.addresses.get() };
        extensions.peer(addresses)
    }

    /// The port that the packet of an accept belongs to; for the thread that forwards packets. The thread that
    /// owns the object may use and free it as soon as the packet is forwarded, so nothing else of it may be
    /// touched here.
    pub(super) fn target_of(overlapped: *mut OVERLAPPED) -> Arc<Port> {
        let op = overlapped.cast::<AcceptOp>();
        // SAFETY: on a shared listener only accepts are started, with the pointer of an `AcceptOp` that
        // lives until its owner has taken the forwarded packet (invariant 9).
        let target = unsafe { &raw const (*op).target };
        // SAFETY: `target` is written when the object is made, and only read from then on (invariant 9).
        Arc::clone(unsafe { &*target })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packets_pointer_leads_to_its_operation_and_objects_stay_where_they_are() {
        let mut table = OpTable::default();
        table.reach(0);
        let key = Key { slot: 0, generation: 9 };
        let first = table.get(0).send.begin(Kind::Connect, key);
        table.reach(1000);
        assert_eq!(table.get(0).send.overlapped(), first);
        let found = Op::of(first);
        assert_eq!((found.kind(), found.key(), found.status()), (Kind::Connect, key, 0));
        assert!(!std::ptr::eq(&table.get(63).recv, &table.get(64).recv));
    }

    #[test]
    fn a_forwarded_packet_knows_whose_it_is() {
        let port = Arc::new(Port::new().expect("a port"));
        let op = Box::new(AcceptOp::new(&port));
        let pointer = op.op.begin(Kind::Accept, Key { slot: 3, generation: 4 });
        assert!(Arc::ptr_eq(&AcceptOp::target_of(pointer), &port));
        assert_eq!(Op::of(pointer).key(), Key { slot: 3, generation: 4 });
    }
}
