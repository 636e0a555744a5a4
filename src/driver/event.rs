//! What a driver reports.

use std::io;
use std::net::SocketAddr;

use crate::buffer::{Buf, Chain};

/// A connection as worker and driver call it: a slot of the connection table and the generation
/// of its use. A completion whose generation is not the slot's is late and is dropped (promise 3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

/// A listener, as a driver numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenerId(pub(crate) u16);

/// An accepted socket that is not bound to a slot yet: must be adopted or discarded.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "an accepted socket must be adopted or discarded"]
pub struct Socket(pub(crate) i32);

/// How to accept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceptMode {
    /// Until told otherwise; may deliver everything that waits in the listener's queue at once.
    Multishot,
    /// One connection; may be armed several times.
    Once,
}

/// What a multishot accept can do on a driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Multishot {
    /// There is none: connections are accepted one at a time.
    Absent,
    /// It brings connections, but not their peers' addresses.
    WithoutPeer,
    /// It brings both.
    WithPeer,
}

/// How to close.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseHow {
    /// As `close(2)` does: what was sent is delivered, then FIN.
    Fin,
    /// Reset: the peer learns that the connection was aborted.
    Reset,
}

/// A completion, in the order in which the kernel reported it.
#[derive(Debug)]
pub enum Event {
    /// A connection was accepted. `armed`: the accept operation goes on (multishot).
    Accepted {
        /// On which listener.
        listener: ListenerId,
        /// The new socket.
        socket: Socket,
        /// The peer's address, where it was asked for and is known.
        peer: Option<SocketAddr>,
        /// How the operation was armed, and whether it still is.
        mode: AcceptMode,
        /// Whether it still is.
        armed: bool,
    },
    /// An accept operation ended without a connection: refused, or cancelled.
    AcceptFailed {
        /// On which listener.
        listener: ListenerId,
        /// How it had been armed.
        mode: AcceptMode,
        /// Why it ended; `ECANCELED` after a cancel.
        error: io::Error,
    },
    /// Data arrived. `armed`: receiving goes on without being asked for again.
    Received {
        /// On which connection.
        key: Key,
        /// The data: never empty.
        buf: Buf,
        /// Whether more data will be reported without arming again.
        armed: bool,
    },
    /// Receiving ended and must be armed anew, or is over.
    RecvEnded {
        /// On which connection.
        key: Key,
        /// Why.
        end: RecvEnd,
    },
    /// The send of a chain ended; the kernel no longer reads its memory.
    Sent {
        /// On which connection.
        key: Key,
        /// The chain, as it was given.
        chain: Chain,
        /// Bytes taken by the kernel: all, or fewer (sent short, cancelled or failed in between: what
        /// is left may be sent again and then shows the error), or why none was.
        result: io::Result<u64>,
    },
    /// A datagram was sent, or was not.
    DatagramSent {
        /// From which socket.
        key: Key,
        /// The token that it was given with.
        token: u32,
        /// Bytes sent, or why it was not.
        result: io::Result<usize>,
    },
    /// An outgoing connection is established, or failed (and must be closed all the same).
    Connected {
        /// Which.
        key: Key,
        /// Established, or why not.
        result: io::Result<()>,
    },
    /// The last event of a connection: the kernel holds none of its operations or memory.
    Closed {
        /// Which.
        key: Key,
    },
    /// Somebody called a [`Waker`](super::Waker).
    Woken,
}

/// Why receiving ended.
#[derive(Debug)]
pub enum RecvEnd {
    /// The peer will send no more.
    Eof,
    /// The pool had no buffer; the data waits in the socket.
    NoBuffer,
    /// By [`cancel_recv`](super::Driver::cancel_recv), or by a kernel that wants to be asked again.
    Stopped,
    /// The connection failed.
    Failed(io::Error),
}
