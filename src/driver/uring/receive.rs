//! Receiving, in the best of three ways that the kernel (and the configuration) has.
//!
//! | mode | operations | who holds a buffer |
//! |---|---|---|
//! | [`Multishot`](RecvMode::Multishot) (6.0) | one `RECV` for all data; ends at its end, at a cancel, without a buffer | the kernel takes one from the ring when data is there |
//! | [`Selected`](RecvMode::Selected) (5.19) | one `RECV` for each piece of data | likewise |
//! | [`Polled`](RecvMode::Polled) | `POLL_ADD`, then a `RECV` that does not wait, for each piece of data | nobody while polling; the kernel from the `RECV`'s submission to its completion |
//!
//! ```text
//!                  recv()                      readable, a buffer is free
//!   (not armed) ───────────► POLL in flight ───────────────────────────────► RECV in flight
//!        ▲                        │  readable, none is: RecvEnded(NoBuffer)        │
//!        └────────────────────────┴────────────────────────────────────────────────┘
//!                 cancelled: RecvEnded(Stopped)       Received{armed: false} or RecvEnded
//! ```
//!
//! Either way an idle connection holds no buffer. A `RECV` that does not wait completes while it is
//! submitted, so only the poll is ever cancelled.

use io_uring::{cqueue, opcode, squeue, types};

use crate::buffer::Buf;
use crate::driver::{Driver, Event, Key, RecvEnd};

use super::UringDriver;
use super::buf_ring::GROUP;
use super::complete::error;
use super::slots::{NO_BUFFER, Ops};
use super::submit::SocketRef;
use super::user_data::{Kind, encode};

/// How connections receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RecvMode {
    /// One operation for all data, into buffers of the ring.
    Multishot,
    /// One operation for each piece of data, into a buffer of the ring.
    Selected,
    /// Poll, then receive into a buffer of the driver's choice.
    Polled,
}

impl RecvMode {
    /// The entry that begins to receive, and what it is for.
    fn entry(self, socket: SocketRef) -> (squeue::Entry, Kind) {
        let none = std::ptr::null_mut();
        // The length of a selected buffer is the ring's; the kernel wants 0 or the most to receive.
        let entry = match (self, socket) {
            (Self::Multishot, SocketRef::Fixed(at)) => {
                opcode::RecvMulti::new(types::Fixed(at), GROUP).build()
            }
            (Self::Multishot, SocketRef::Fd(fd)) => opcode::RecvMulti::new(types::Fd(fd), GROUP).build(),
            (Self::Selected, SocketRef::Fixed(at)) => {
                let entry = opcode::Recv::new(types::Fixed(at), none, 0).buf_group(GROUP).build();
                entry.flags(squeue::Flags::BUFFER_SELECT)
            }
            (Self::Selected, SocketRef::Fd(fd)) => {
                let entry = opcode::Recv::new(types::Fd(fd), none, 0).buf_group(GROUP).build();
                entry.flags(squeue::Flags::BUFFER_SELECT)
            }
            (Self::Polled, SocketRef::Fixed(at)) => opcode::PollAdd::new(types::Fixed(at), READABLE).build(),
            (Self::Polled, SocketRef::Fd(fd)) => opcode::PollAdd::new(types::Fd(fd), READABLE).build(),
        };
        (entry, if self == Self::Polled { Kind::Poll } else { Kind::Recv })
    }
}

/// Data, the end of data, or an error (which is always reported).
const READABLE: u32 = (libc::POLLIN | libc::POLLRDHUP) as u32;

impl UringDriver {
    /// Arms receiving.
    pub(super) fn arm_recv(&mut self, key: Key) {
        let (direct, mode) = (self.direct, self.recv_mode);
        let Some(slot) = self.slots.get(key) else { return };
        slot.ops.insert(Ops::RECV);
        slot.ops.remove(Ops::RECV_CANCELLED);
        slot.burst = 0;
        self.in_flight += 1;
        if slot.plain {
            let fd = slot.socket;
            let entry = self.recv_datagrams(fd, key);
            self.submission.push(&entry, &self.counters);
            return;
        }
        let (entry, kind) = mode.entry(slot.socket(direct));
        self.submission.push(&entry.user_data(encode(kind, key)), &self.counters);
    }

    /// What a receive that waits was started for: what a cancel must name.
    pub(super) fn recv_kind(&self) -> Kind {
        match self.recv_mode {
            RecvMode::Multishot | RecvMode::Selected => Kind::Recv,
            RecvMode::Polled => Kind::Poll,
        }
    }

    /// A polled connection is readable, or its poll was cancelled.
    pub(super) fn readable(&mut self, key: Key, result: i32) -> Option<Event> {
        let direct = self.direct;
        let Some(slot) = self.slots.get(key) else {
            self.in_flight = self.in_flight.saturating_sub(1);
            self.counters.stale.add(1);
            return None;
        };
        let over = slot.closing || slot.ops.has(Ops::RECV_CANCELLED);
        if slot.plain && result >= 0 && !over {
            self.in_flight = self.in_flight.saturating_sub(1);
            slot.ops.remove(Ops::RECV);
            return self.take_datagram(key);
        }
        let lent = if result < 0 || over { None } else { self.memory.pool.lend_one() };
        if let Some(buffer) = lent {
            // The same operation goes on: what is in flight is counted once.
            slot.buffer = buffer;
            let (at, size) = (self.memory.pool.address(buffer).as_ptr(), self.memory.pool.buffer_size());
            let entry = match slot.socket(direct) {
                SocketRef::Fixed(index) => opcode::Recv::new(types::Fixed(index), at, size),
                SocketRef::Fd(fd) => opcode::Recv::new(types::Fd(fd), at, size),
            };
            let entry = entry.flags(libc::MSG_DONTWAIT).build().user_data(encode(Kind::Recv, key));
            self.submission.push(&entry, &self.counters);
            self.midway = true;
            return None;
        }
        self.in_flight = self.in_flight.saturating_sub(1);
        slot.ops.remove(Ops::RECV);
        slot.ops.remove(Ops::RECV_CANCELLED);
        if slot.closing {
            return self.closed_if_done(key);
        }
        let end = match result {
            _ if over => RecvEnd::Stopped,
            0.. => RecvEnd::NoBuffer,
            _ if result == -libc::ECANCELED || result == -libc::EINTR => RecvEnd::Stopped,
            _ => RecvEnd::Failed(error(result)),
        };
        Some(Event::RecvEnded { key, end })
    }

    /// Takes back the buffer that a polled connection's receive was given, as a lease if there is data.
    fn take_lent(&mut self, key: Key, result: i32) -> Option<Buf> {
        let slot = self.slots.get(key)?;
        let buffer = std::mem::replace(&mut slot.buffer, NO_BUFFER);
        if buffer == NO_BUFFER {
            return None;
        }
        if result > 0 {
            return self.memory.pool.lease(buffer, result as u32);
        }
        self.memory.pool.take_back(buffer);
        None
    }

    /// Takes the buffer first, whoever the completion is for.
    #[inline]
    pub(super) fn received(&mut self, key: Key, result: i32, flags: u32) -> Option<Event> {
        let more = cqueue::more(flags);
        let selected = cqueue::buffer_select(flags);
        let message =
            self.recv_mode == RecvMode::Selected && self.slots.get(key).is_some_and(|slot| slot.plain);
        let buf = match selected {
            _ if message && result >= 0 => self.take_message(key, selected, result as u32),
            Some(id) if result > 0 => {
                let lease = self.memory.pool.lease(id.into(), result as u32);
                if lease.is_none() {
                    // The kernel named a buffer that it was not lent: not to be believed.
                    self.counters.stale.add(1);
                }
                lease
            }
            Some(id) => {
                self.memory.pool.take_back(id.into());
                None
            }
            None => self.take_lent(key, result),
        };
        if !more {
            self.in_flight = self.in_flight.saturating_sub(1);
        }
        let Some(slot) = self.slots.get(key) else {
            self.counters.stale.add(1);
            return None;
        };
        let cancelled = slot.ops.has(Ops::RECV_CANCELLED);
        if !more {
            slot.ops.remove(Ops::RECV);
            slot.ops.remove(Ops::RECV_CANCELLED);
        }
        if slot.closing {
            drop(buf);
            return if more { None } else { self.closed_if_done(key) };
        }
        if let Some(buf) = buf {
            if more && slot.burst(cqueue::sock_nonempty(flags)) {
                // Ends with an event of its own, after which the worker arms it again.
                self.cancel_recv(key);
            }
            return Some(Event::Received { key, buf, armed: more });
        }
        if more {
            return None;
        }
        let end = match result {
            0 => RecvEnd::Eof,
            _ if result > 0 => RecvEnd::Stopped,
            // Kernels before 6.5 report a cancelled multishot in these ways too.
            _ if cancelled && (result == -libc::ENOENT || result == -libc::ENOBUFS) => RecvEnd::Stopped,
            _ if result == -libc::ENOBUFS => RecvEnd::NoBuffer,
            _ if result == -libc::ECANCELED || result == -libc::EINTR || result == -libc::EAGAIN => {
                RecvEnd::Stopped
            }
            _ => RecvEnd::Failed(error(result)),
        };
        Some(Event::RecvEnded { key, end })
    }

    /// Some kernels do not find a multishot receive by its user data (6.11, liburing issue 1375);
    /// by its socket they do.
    pub(super) fn cancel_recv_failed(&mut self, key: Key, result: i32) {
        let direct = self.direct;
        if result != -libc::ENOENT {
            return;
        }
        let Some(slot) = self.slots.get(key) else { return };
        if !slot.ops.has(Ops::RECV) || !slot.ops.has(Ops::RECV_CANCELLED) {
            return;
        }
        use io_uring::types::{CancelBuilder, Fd, Fixed};
        let by_socket = match slot.socket(direct) {
            SocketRef::Fixed(index) => CancelBuilder::fd(Fixed(index)),
            SocketRef::Fd(fd) => CancelBuilder::fd(Fd(fd)),
        };
        let entry = io_uring::opcode::AsyncCancel2::new(by_socket).build();
        let entry = entry.flags(io_uring::squeue::Flags::SKIP_SUCCESS);
        let entry = entry.user_data(encode(Kind::Cancel, key));
        self.submission.push(&entry, &self.counters);
    }
}
