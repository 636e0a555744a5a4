//! What is rare: Unix connections, and what is asked of a connection's socket.
//!
//! # Asking a socket of the ring's own table
//!
//! There is no operation that asks for addresses or sets options, and such a socket has no number that a system
//! call takes. So it is given one (`FIXED_FD_INSTALL`, Linux 6.8), which is used at once and closed. That is
//! done without a turn of the worker in between: the queue is given to the kernel at that moment, what has been
//! completed is taken out, and what is not the answer is kept in its order
//! ([`Submission::install`](super::submit::Submission::install)).
//!
//! # Connecting to a Unix socket
//!
//! Connecting is a matter of this machine alone and takes no time, except where the listener's queue is full. The
//! kernel would have a thread of its own wait for room then, after having tried 128 times; so that this costs
//! no thread per connection, and is the same with every backend, the system call is made here and does not wait.
//! What came of it is reported like any other operation's result, by way of the ring: a success when the
//! socket is in the descriptor table (or after an operation that does nothing, without a table), and a refusal after
//! an operation that does nothing.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::os::unix::net::SocketAddr;
use std::sync::atomic::Ordering;

use io_uring::opcode;

use crate::driver::sys::{self, RawAddress, UnixConnect};
use crate::driver::{Event, Key};

use super::UringDriver;
use super::slots::Ops;
use super::submit::SocketRef;
use super::user_data::{Kind, encode};

/// What is done with an outgoing socket once it is in the descriptor table.
#[derive(Clone, Copy)]
pub(super) enum Pending {
    Connect(RawAddress),
    /// It is connected already.
    Connected,
}

/// What to do where [`UringDriver::with_socket`] cannot.
const NO_INSTALL: &str = "a socket in the ring's own descriptor table can be asked for its addresses, or be given \
                          options, from Linux 6.8 on (IORING_OP_FIXED_FD_INSTALL): use ordinary descriptors \
                          (Descriptors::Fd)";

impl UringDriver {
    /// Moves an outgoing socket into the ring's table: the kernel reads its number from `exchange` and writes the
    /// table's index there. The number itself is free again once this is submitted, but not before, so it
    /// is closed by an entry behind.
    pub(super) fn register(&mut self, key: Key, fd: OwnedFd, pending: Pending) {
        let slot = self.slots.open(key, -1);
        slot.ops.insert(Ops::REGISTER);
        slot.exchange.store(fd.as_raw_fd(), Ordering::Relaxed);
        let exchange: *const i32 = slot.exchange.as_ptr();
        // IORING_FILE_INDEX_ALLOC: a free entry of the kernel's choice. (Since 5.19.)
        let entry = opcode::FilesUpdate::new(exchange, 1).offset(-1).build();
        let entry = entry.user_data(encode(Kind::Register, key));
        self.in_flight += 1;
        self.registering.insert(key.slot, pending);
        self.submission.push(&entry, &self.counters);
        let ignore = encode(Kind::Ignore, Key { slot: 0, generation: 0 });
        self.submission.close(SocketRef::Fd(fd.into_raw_fd()), ignore, &self.counters);
    }

    pub(super) fn start_unix_connect(&mut self, key: Key, target: &SocketAddr) -> io::Result<()> {
        let slot = match sys::connect_unix(target)? {
            UnixConnect::Made(fd) if self.direct => {
                self.register(key, fd, Pending::Connected);
                return Ok(());
            }
            UnixConnect::Made(fd) => self.slots.open(key, fd.into_raw_fd()),
            // The socket is of no use; without one there is nothing to close later.
            UnixConnect::Refused(_, error) => {
                self.refused.insert(key.slot, error);
                self.slots.open(key, -1)
            }
        };
        slot.ops.insert(Ops::CONNECT);
        self.in_flight += 1;
        let entry = opcode::Nop::new().build().user_data(encode(Kind::UnixConnect, key));
        self.submission.push(&entry, &self.counters);
        Ok(())
    }

    /// The operation that does nothing was done.
    pub(super) fn unix_connected(&mut self, key: Key) -> Option<Event> {
        self.in_flight = self.in_flight.saturating_sub(1);
        let refused = self.refused.remove(&key.slot);
        let Some(slot) = self.slots.get(key) else {
            self.counters.stale.add(1);
            return None;
        };
        slot.ops.remove(Ops::CONNECT);
        if slot.closing {
            return self.closed_if_done(key);
        }
        Some(Event::Connected { key, result: refused.map_or(Ok(()), Err) })
    }

    /// Does something with a connection's socket by way of an ordinary descriptor.
    ///
    /// # Errors
    /// `NotConnected` when there is no such socket; `Unsupported` where it can have no descriptor; those of `with`.
    pub(in crate::driver) fn with_socket<R>(
        &mut self,
        key: Key,
        with: impl FnOnce(BorrowedFd<'_>) -> io::Result<R>,
    ) -> io::Result<R> {
        let direct = self.direct;
        let slot = self.slots.get(key).filter(|slot| !slot.closing && slot.socket >= 0);
        match slot.ok_or(io::ErrorKind::NotConnected)?.socket(direct) {
            // SAFETY: the descriptor is the connection's, and is closed only after `close` (invariant 5).
            SocketRef::Fd(fd) => with(unsafe { BorrowedFd::borrow_raw(fd) }),
            SocketRef::Fixed(_) if !self.install => {
                Err(io::Error::new(io::ErrorKind::Unsupported, NO_INSTALL))
            }
            SocketRef::Fixed(index) => {
                // What is queued is submitted now, receives too, which shall find the buffers that are free.
                if let Some(buf_ring) = &mut self.buf_ring {
                    buf_ring.lend(&self.memory.pool);
                }
                with(self.submission.install(index, &self.counters)?.as_fd())
            }
        }
    }
}
