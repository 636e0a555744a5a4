//! The driver room: mechanism. A driver starts operations and reports completions.
//!
//! A driver knows sockets and buffers. It knows nothing of send queues, back-pressure, timeouts,
//! limits or user code: whatever every backend would have to repeat belongs in the
//! [worker](crate::worker). Backends are chosen per worker type and statically dispatched.
//!
//! | backend | where | file |
//! |---|---|---|
//! | `uring` | Linux 5.19 and later; at its best from 6.1 on | `uring/` |
//! | `epoll` | Linux, where io_uring is forbidden | `epoll/` |
//! | `iocp` | Windows | `iocp/` |
//! | `sim` | anywhere: a simulated kernel with a virtual clock and a seed | `sim/` |
//!
//! # The life of a connection in a driver
//!
//! ```text
//!             adopt / connect                     close
//!   (vacant) ────────────────► Open ───────────────────────► Closing ──────────────► (vacant)
//!                               │  ▲                            │   last operation done:
//!               recv, send, ... │  │ Received, Sent, ...        │   Event::Closed, exactly once
//!                               ▼  │                            ▼
//!                          operations in flight            (reports nothing else)
//! ```
//!
//! Who owns what, in each state:
//!
//! | state | receive buffers | the chain being sent | the slot |
//! |---|---|---|---|
//! | Open, nothing armed | pool | – | worker may use it |
//! | receive armed | pool and kernel (shared ring); a filled one is the `Buf` in `Received` | – | |
//! | send in flight | | **driver**, from `send` to `Sent` | |
//! | Closing | as above until the receive's last completion | driver, until the send's last completion, then dropped | **driver**, until `Closed` |
//!
//! # What a backend must promise
//!
//! 1. Memory handed in by [`send`](Driver::send) is read by the kernel only until `Sent` or `Closed`
//!    is reported, and kept alive until then; buffers lent to the kernel are written only while
//!    lent. If the driver is dropped with operations in flight it cancels and awaits them, and
//!    leaks the memory of those that do not end.
//! 2. After [`close`](Driver::close), exactly one event follows for the connection: `Closed`.
//! 3. At most one receive and one send are in flight per connection; the worker keeps to that.
//! 4. Starting an operation never reports its result inside the call (no recursion): results come
//!    from [`next_event`](Driver::next_event) after the next
//!    [`submit_and_wait`](Driver::submit_and_wait), in order per connection.
//! 5. Between two waits at most a bounded number of completions per connection is reported, so that
//!    one busy connection does not hide the others.
//! 6. A full submission or completion queue loses nothing.
//!
//! # Numbers of listeners
//!
//! A [`ListenerId`] is used again, so that a program may bind and drop listeners for ever. The rule is that of
//! the slots: **a number is vacant when its listener was removed and no accept operation of it is armed**, and
//! an operation is armed until its last event was taken by [`next_event`](Driver::next_event). So no event that
//! names a number can come after the number was given to another listener. The worker's part: it calls
//! [`remove_listener`](Driver::remove_listener) when it has taken the last event of every accept, and does not
//! use the number from then on. (A driver keeps to its part even if the worker does not: a number whose accepts
//! have not ended is not given out.) Besides, io_uring's completions and epoll's readiness carry how often the number was given
//! before, and what is late is dropped. At most [`MAX_LISTENERS`] are open at a time.
//!
//! The numbered SAFETY invariants that every `unsafe` block refers to are in `SAFETY.md`.

mod datagram;
#[cfg(target_os = "linux")]
pub(crate) mod epoll;
mod event;
#[cfg(windows)]
pub(crate) mod iocp;
mod setup;
pub(crate) mod sim;
pub(crate) mod sys;
#[cfg(target_os = "linux")]
pub(crate) mod uring;
mod wait;

pub use event::{AcceptMode, CloseHow, Event, Key, ListenerId, Multishot, RecvEnd, Socket};

pub use datagram::{Address, Datagram, DatagramConfig, Received};
#[cfg(target_os = "linux")]
pub(crate) use datagram::{CONTROL_ROOM, NAME_ROOM, name_of};
pub(crate) use datagram::{DATAGRAM_SENDS, PRELUDE};
pub(crate) use setup::{DriverInfo, FD_RESERVE};
pub use setup::{Feature, SetupError};
pub use wait::Wait;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::buffer::{Chain, Memory};
use crate::clock::Time;
use crate::config::{ConnectConfig, ListenerConfig, SocketOptions, WorkerConfig};
use crate::metrics::Counters;

/// A listener of this system, as its real drivers take it over.
#[cfg(target_os = "linux")]
pub(crate) type NativeListener = std::net::TcpListener;
/// A listener of this system, as its real drivers take it over.
#[cfg(windows)]
pub(crate) type NativeListener = iocp::IocpListener;

/// Largest number of connections of one driver: slot numbers have 24 bits wherever they travel with an
/// operation.
pub(crate) const MAX_SLOTS: u32 = 1 << 24;

/// Listeners that one driver has at most at a time.
pub(crate) const MAX_LISTENERS: usize = 1 << 16;

/// The error of one listener too many.
pub(crate) fn too_many_listeners() -> io::Error {
    let text = format!("a worker has {MAX_LISTENERS} listeners at most");
    io::Error::new(io::ErrorKind::QuotaExceeded, text)
}

/// Payloads that a chain given to [`send`](Driver::send) has at most, so that a driver can reserve room
/// for their vectors.
pub(crate) const SEND_BATCH: usize = 64;

/// Ends another thread's [`submit_and_wait`](Driver::submit_and_wait), now or the next one.
pub trait Waker: Clone + Send + Sync + 'static {
    /// Wakes the driver's thread. The wakes that come before it looks may arrive as one.
    fn wake(&self);
}

/// One kernel interface, owned by one worker. See the [module documentation](self) for the contract.
pub trait Driver: Sized {
    /// A bound, listening socket, made on any thread.
    type Listener: Send + 'static;
    /// Wakes this driver from any thread.
    type Waker: Waker;

    /// The memory that this driver's kernel may know.
    fn memory(&self) -> &Memory;

    /// The time when the last wait ended; costs nothing.
    fn now(&self) -> Time;

    /// Reads the clock.
    fn clock(&self) -> Time;

    /// A handle that wakes this driver.
    fn waker(&self) -> Self::Waker;

    /// Wakes another worker's driver, from this one's thread: at the latest with the next submission.
    fn wake_peer(&mut self, peer: &Self::Waker) {
        peer.wake();
    }

    /// Takes over a listener; nothing is accepted until [`accept`](Self::accept).
    ///
    /// # Errors
    /// When the system refuses to register it, or [`MAX_LISTENERS`] are there.
    fn add_listener(&mut self, listener: Self::Listener) -> io::Result<ListenerId>;

    /// What [`AcceptMode::Multishot`] can do here.
    fn multishot(&self) -> Multishot;

    /// Arms an accept operation.
    fn accept(&mut self, listener: ListenerId, mode: AcceptMode);

    /// Cancels all accept operations of a listener; each still ends with an event of its own.
    fn cancel_accept(&mut self, listener: ListenerId);

    /// Closes a listener; whoever waits in its queue is turned away. The worker calls it when no accept operation
    /// is armed. The number may belong to another listener as soon as one is added: see the module's
    /// documentation.
    fn remove_listener(&mut self, listener: ListenerId);

    /// Binds an accepted socket to a connection.
    fn adopt(&mut self, key: Key, socket: Socket);

    /// Closes an accepted socket that nobody wants.
    fn discard(&mut self, socket: Socket);

    /// Starts an outgoing connection; `Connected` follows.
    ///
    /// # Errors
    /// When no socket could be made or bound; the connection is then vacant and no event follows.
    fn connect(&mut self, key: Key, config: &ConnectConfig) -> io::Result<()>;

    /// Opens a datagram socket, bound and, if it has one peer, connected. It is open when this returns.
    ///
    /// # Errors
    /// When no socket could be made, bound or connected; the connection is then vacant and no event follows.
    fn open_datagram(&mut self, key: Key, config: &DatagramConfig) -> io::Result<()> {
        let _ = (key, config);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Sends a datagram; [`Event::DatagramSent`] with the same token follows. At most [`DATAGRAM_SENDS`] may be
    /// under way per socket.
    fn send_datagram(&mut self, key: Key, token: u32, datagram: Datagram) {
        let _ = (key, token, datagram);
    }

    /// Starts an outgoing connection to a Unix stream socket; `Connected` follows. What is local takes no time: it
    /// is made or refused at once, and a listener whose queue is full is not waited for (`ResourceBusy`).
    ///
    /// From then on it is a connection like any other, and so is one that was accepted from a Unix listener, except
    /// that [`CloseHow::Reset`] is a plain close: Linux cannot disconnect a Unix stream. (A peer of which unread
    /// data was thrown away with it sees a reset.)
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    #[cfg(unix)]
    fn connect_unix(&mut self, key: Key, target: &std::os::unix::net::SocketAddr) -> io::Result<()> {
        let _ = (key, target);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Binds a listener and takes it over; nothing is accepted until [`accept`](Self::accept). It is tried once,
    /// without waiting for an address that is in use. The file of a Unix listener is neither removed before
    /// (`EADDRINUSE` if there is one) nor after.
    ///
    /// # Errors
    /// When the system refuses, or [`MAX_LISTENERS`] are there; nothing is left then, except that the file of a Unix
    /// listener may be.
    fn listen(&mut self, config: &ListenConfig) -> io::Result<Listening> {
        let _ = config;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The addresses of both ends of an open connection or datagram socket. Costs some system calls.
    ///
    /// # Errors
    /// Of the system; `NotConnected` of a connection that is not open (or has no socket yet); `Unsupported` where a
    /// descriptor of a ring's own table cannot be asked (before Linux 6.8).
    fn addresses(&mut self, key: Key) -> io::Result<Addresses> {
        let _ = key;
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Sets the options of an open connection that are given, and `nodelay` either way; of one that is not TCP
    /// only the buffers' sizes. Costs some system calls.
    ///
    /// # Errors
    /// As [`addresses`](Self::addresses); `InvalidInput` for a value out of its range, before anything is set.
    fn set_options(&mut self, key: Key, options: &SocketOptions) -> io::Result<()> {
        let _ = (key, options);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Arms receiving: `Received` until `armed` is false, or `RecvEnded`.
    fn recv(&mut self, key: Key);

    /// Cancels receiving; it ends with an event of its own, perhaps after further data.
    fn cancel_recv(&mut self, key: Key);

    /// Sends a chain that is not empty; `Sent` follows.
    fn send(&mut self, key: Key, chain: Chain);

    /// Cancels the send in flight; `Sent` still follows, with what was taken.
    fn cancel_send(&mut self, key: Key);

    /// Tells the peer that nothing more will be sent (FIN). The worker calls it with no send in flight.
    fn shutdown_write(&mut self, key: Key);

    /// Cancels whatever is in flight and closes the socket; `Closed` follows.
    fn close(&mut self, key: Key, how: CloseHow);

    /// Gives the kernel what was started and waits until something is reported, the wait's time passes or a
    /// wake arrives.
    ///
    /// # Errors
    /// Only what the driver cannot go on from.
    fn submit_and_wait(&mut self, wait: impl Into<Wait>) -> io::Result<()>;

    /// The next completion of the last wait.
    fn next_event(&mut self) -> Option<Event>;

    /// Whether completions of the last wait are still to be taken.
    fn has_events(&self) -> bool;

    /// Operations that the kernel may still complete, other than the driver's own wake-up.
    fn in_flight(&self) -> usize;

    /// Ends the driver: cancels what is left, awaits it until `patience` has passed, and leaks the
    /// memory of what does not end. Returns how many operations that were.
    fn finish(self, patience: Duration) -> usize;
}

/// A listener for one worker to make.
#[derive(Clone, Debug)]
pub enum ListenConfig {
    /// TCP. `sharing` says whether others may listen on the same address too (`SO_REUSEPORT`).
    Tcp(ListenerConfig),
    /// A Unix stream socket on an address, and its backlog.
    #[cfg(unix)]
    Unix(std::os::unix::net::SocketAddr, u32),
}

/// A listener that was made.
#[derive(Clone, Debug)]
pub struct Listening {
    /// Its number.
    pub id: ListenerId,
    /// Its address, with the port that was chosen.
    pub local: Address,
    /// Connections that may wait in its queue.
    pub backlog: u32,
}

/// Both ends of a connection.
#[derive(Clone, Debug)]
pub struct Addresses {
    /// This end.
    pub local: Address,
    /// The other end; none of an unconnected datagram socket, and of a connection that is gone.
    pub peer: Option<Address>,
}

/// Checks that buffers have room for what stands before a datagram, and then some.
///
/// # Errors
/// `InvalidInput`, with the remedy.
fn check_datagram_room(memory: &Memory) -> io::Result<()> {
    if memory.pool.buffer_size() as usize > 2 * PRELUDE {
        return Ok(());
    }
    let text = format!(
        "buffers of {} bytes are too small for datagrams: raise BufferConfig::size to more than {}",
        memory.pool.buffer_size(),
        2 * PRELUDE
    );
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

/// A driver of a real kernel, as a runtime opens it.
pub(crate) trait Native: Driver<Listener = NativeListener> {
    /// Opens the kernel interface for the calling thread, which is the one that will use it.
    /// `memlock`: this worker's share of `RLIMIT_MEMLOCK`, if that applies.
    ///
    /// # Errors
    /// [`SetupError`], naming the cause and the remedy.
    fn open(
        config: &WorkerConfig,
        counters: Arc<Counters>,
        memlock: Option<u64>,
    ) -> Result<(Self, DriverInfo), SetupError>;
}

#[cfg(test)]
#[cfg(any(target_os = "linux", windows))]
mod tests;
