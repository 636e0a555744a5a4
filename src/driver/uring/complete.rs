//! The way up: completion queue entries become events.
//!
//! Two rules hold throughout (`io_uring(7)`, and what kernels do in practice): whether an operation
//! goes on is decided by `F_MORE` alone, what it brought by the result alone. And a buffer that comes
//! with a completion is taken first, whoever the completion is for, so that it returns on every path.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

use io_uring::cqueue;

use crate::driver::{AcceptMode, Driver, Event, Key, ListenerId, Socket, sys};

use super::UringDriver;
use super::control::Pending;
use super::listeners::once_of;
use super::slots::Ops;
use super::submit::Submission;
use super::user_data::{Kind, decode};

/// Completions copied out of the queue at a time.
const BATCH: usize = 256;

/// A completion's result as an error.
pub(super) fn error(result: i32) -> io::Error {
    io::Error::from_raw_os_error(-result)
}

impl UringDriver {
    #[inline]
    pub(super) fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.taken == self.entries.len() {
                self.submission.fill(&mut self.entries, BATCH);
                self.taken = 0;
                if self.entries.is_empty() {
                    return None;
                }
            }
            let entry = self.entries[self.taken].clone();
            self.taken += 1;
            self.counters.cqes.add(1);
            if let Some(event) = self.translate(&entry) {
                return Some(event);
            }
        }
    }

    #[inline]
    fn translate(&mut self, entry: &cqueue::Entry) -> Option<Event> {
        let (result, flags) = (entry.result(), entry.flags());
        let Some((kind, key)) = decode(entry.user_data()) else {
            self.counters.stale.add(1);
            return None;
        };
        if result == -libc::EFAULT {
            self.counters.faults.add(1);
            self.memory.fault(format_args!("{kind:?} of {key:?}"));
        }
        match kind {
            Kind::Recv => self.received(key, result, flags),
            Kind::Poll => self.readable(key, result),
            Kind::Send => self.sent(key, result),
            Kind::SendDatagram => self.datagram_sent(key, result),
            Kind::Room => self.room(key),
            Kind::AcceptMulti => self.accepted_multi(key, result, cqueue::more(flags)),
            Kind::AcceptOnce => self.accepted_once(key, result),
            Kind::Connect => self.connected(key, result),
            Kind::Register => self.registered(key, result),
            Kind::Shutdown => self.op_ended(key, Ops::SHUTDOWN),
            Kind::Disconnect => self.op_ended(key, Ops::DISCONNECT),
            Kind::Close => self.op_ended(key, Ops::CLOSE),
            Kind::CancelRecv => {
                self.cancel_recv_failed(key, result);
                None
            }
            Kind::Wake => {
                self.wake_armed = false;
                if result == -libc::ECANCELED {
                    return None;
                }
                self.arm_wake();
                Some(Event::Woken)
            }
            Kind::PeerWake => Some(Event::Woken),
            Kind::PeerFailed => {
                // The peer's ring could not take the message (it is full or gone): the counter can.
                if let Some(peer) = self.peers.get(key.slot as usize) {
                    crate::driver::Waker::wake(peer);
                }
                None
            }
            Kind::UnixConnect => self.unix_connected(key),
            Kind::Install => {
                Submission::installed_late(result);
                None
            }
            Kind::Ignore | Kind::Cancel => None,
        }
    }

    #[inline]
    fn sent(&mut self, key: Key, result: i32) -> Option<Event> {
        self.in_flight = self.in_flight.saturating_sub(1);
        let Some(slot) = self.slots.get(key) else {
            self.counters.stale.add(1);
            return None;
        };
        slot.ops.remove(Ops::SEND);
        let chain = slot.chain.take();
        if slot.closing {
            self.memory.chunks.clear(chain);
            return self.closed_if_done(key);
        }
        let result = if result < 0 { Err(error(result)) } else { Ok(result as u64) };
        Some(Event::Sent { key, chain, result })
    }

    fn accepted_multi(&mut self, key: Key, result: i32, armed: bool) -> Option<Event> {
        let listener = ListenerId(key.slot as u16);
        if !armed {
            self.in_flight = self.in_flight.saturating_sub(1);
        }
        if !self.listeners.is_present(listener, key.generation) {
            self.late_accept(result);
            return None;
        }
        if !armed {
            self.listeners.multishot_ended(listener);
        }
        let mode = AcceptMode::Multishot;
        if result < 0 {
            return Some(Event::AcceptFailed { listener, mode, error: error(result) });
        }
        let peer = if self.peer_addresses && !self.direct { sys::peer_address(result).ok() } else { None };
        let socket = self.accepted(result);
        Some(Event::Accepted { listener, socket, peer, mode, armed })
    }

    fn accepted_once(&mut self, key: Key, result: i32) -> Option<Event> {
        self.in_flight = self.in_flight.saturating_sub(1);
        let (listener, index) = once_of(key.slot);
        if !self.listeners.is_present(listener, key.generation) {
            self.late_accept(result);
            return None;
        }
        let peer = self.listeners.once_ended(listener, index).flatten().filter(|_| self.peer_addresses);
        let mode = AcceptMode::Once;
        if result < 0 {
            return Some(Event::AcceptFailed { listener, mode, error: error(result) });
        }
        let socket = self.accepted(result);
        Some(Event::Accepted { listener, socket, peer, mode, armed: false })
    }

    /// An accept of a listener whose number has another one by now: cannot be, and if it is, it reaches nobody.
    fn late_accept(&mut self, result: i32) {
        self.counters.stale.add(1);
        if result >= 0 {
            let socket = self.accepted(result);
            Driver::discard(self, socket);
        }
    }

    /// Keeps an accepted descriptor until it is adopted or discarded.
    fn accepted(&mut self, socket: i32) -> Socket {
        if !self.direct {
            // SAFETY: the kernel has just made this descriptor, for this completion alone (invariant 5).
            self.passing.push_back(unsafe { OwnedFd::from_raw_fd(socket) });
        }
        Socket(socket)
    }

    /// An outgoing socket is in the descriptor table (or not): now it can be connected.
    fn registered(&mut self, key: Key, result: i32) -> Option<Event> {
        self.in_flight = self.in_flight.saturating_sub(1);
        let pending = self.registering.remove(&key.slot);
        let Some(slot) = self.slots.get(key) else {
            self.counters.stale.add(1);
            return None;
        };
        slot.ops.remove(Ops::REGISTER);
        if result == 1 {
            slot.socket = slot.exchange.load(std::sync::atomic::Ordering::Relaxed);
        }
        if slot.closing {
            if result == 1 {
                self.close_socket(key);
            }
            return self.closed_if_done(key);
        }
        match pending {
            Some(Pending::Connect(target)) if result == 1 => {
                self.start_connect(key, target);
                None
            }
            Some(Pending::Connected) if result == 1 => Some(Event::Connected { key, result: Ok(()) }),
            _ => {
                let failed = if result < 0 { error(result) } else { io::Error::from(io::ErrorKind::Other) };
                Some(Event::Connected { key, result: Err(failed) })
            }
        }
    }

    fn connected(&mut self, key: Key, result: i32) -> Option<Event> {
        self.in_flight = self.in_flight.saturating_sub(1);
        let Some(slot) = self.slots.get(key) else {
            self.counters.stale.add(1);
            return None;
        };
        slot.ops.remove(Ops::CONNECT);
        if slot.closing {
            return self.closed_if_done(key);
        }
        let result = if result < 0 { Err(error(result)) } else { Ok(()) };
        Some(Event::Connected { key, result })
    }

    /// An operation that only closing waits for has ended.
    fn op_ended(&mut self, key: Key, op: Ops) -> Option<Event> {
        self.in_flight = self.in_flight.saturating_sub(1);
        let Some(slot) = self.slots.get(key) else {
            self.counters.stale.add(1);
            return None;
        };
        slot.ops.remove(op);
        if op == Ops::CLOSE {
            slot.socket = -1;
        }
        if !slot.closing {
            return None;
        }
        if op == Ops::SHUTDOWN {
            // The close waited for it.
            self.close_socket(key);
        }
        self.closed_if_done(key)
    }

    /// Reports the end of a closing connection when the kernel holds nothing of it any more.
    pub(super) fn closed_if_done(&mut self, key: Key) -> Option<Event> {
        let slot = self.slots.get(key)?;
        if !slot.closing || !slot.ops.none_in_flight() || slot.sends > 0 {
            return None;
        }
        slot.open = false;
        slot.closing = false;
        slot.socket = -1;
        Some(Event::Closed { key })
    }
}
