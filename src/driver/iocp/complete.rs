//! The way up: packets, and what was done without one, become events.

use std::os::windows::io::AsRawSocket;

use windows_sys::Win32::Networking::WinSock::{SOCKET, WSAEWOULDBLOCK};
use windows_sys::Win32::System::IO::OVERLAPPED_ENTRY;

use std::sync::atomic::Ordering;

use crate::driver::{AcceptMode, Event, Key, ListenerId, RecvEnd, Socket};

use super::op::{Kind, Op};
use super::slots::Ops;
use super::{IocpDriver, PIECES, Work, error, port, socket};

/// What came of asking a connection's socket for data.
pub(super) enum Read {
    Data(crate::buffer::Buf),
    Nothing,
    NoBuffer,
    Eof,
    Failed(i32),
}

impl IocpDriver {
    #[inline]
    pub(super) fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                if let Event::AcceptFailed { listener, .. } = &event {
                    self.listeners.owe(*listener, -1);
                }
                return Some(event);
            }
            let event = if self.taken < self.filled {
                let entry = self.entries[self.taken];
                self.taken += 1;
                self.counters.cqes.add(1);
                self.translate(&entry)
            } else {
                match self.work.pop_front()? {
                    Work::Read(key) => self.read(key),
                    Work::Sent(key) => self.sent_at_once(key),
                    Work::Connected(key) => self.connected_at_once(key),
                    Work::DatagramSent(name) => self.datagram_sent(name),
                }
            };
            if event.is_some() {
                return event;
            }
        }
    }

    #[inline]
    fn translate(&mut self, entry: &OVERLAPPED_ENTRY) -> Option<Event> {
        if entry.lpCompletionKey == port::WAKE {
            // First this, then the event: a wake from now on posts a packet of its own. A swap, not a store:
            // whoever still found the mark set must have what he left before seen by this thread from here on,
            // and a store could come after the worker's look into its mailbox.
            self.port.waking.swap(false, Ordering::AcqRel);
            return Some(Event::Woken);
        }
        if entry.lpOverlapped.is_null() {
            self.counters.stale.add(1);
            return None;
        }
        let op = Op::of(entry.lpOverlapped);
        let (kind, key, status, bytes) = (op.kind(), op.key(), op.status(), entry.dwNumberOfBytesTransferred);
        match kind {
            Kind::Recv => self.readable(key, status),
            Kind::Send => self.sent(key, status, bytes),
            Kind::SendDatagram => self.datagram_packet(key, status),
            Kind::Connect => self.connected(key, status),
            Kind::Accept => self.accepted(key),
        }
    }

    /// Takes an operation off a connection's record; false when it was not there: a packet that nobody
    /// waits for, which is dropped.
    #[inline]
    fn take_op(&mut self, key: Key, op: Ops) -> bool {
        let slot = self.slots.get(key).filter(|slot| slot.ops.has(op));
        let Some(slot) = slot else {
            self.counters.stale.add(1);
            return false;
        };
        slot.ops.remove(op);
        self.in_flight = self.in_flight.saturating_sub(1);
        true
    }

    /// The receive of no bytes ended.
    #[inline]
    fn readable(&mut self, key: Key, status: i32) -> Option<Event> {
        if !self.take_op(key, Ops::RECV) {
            return None;
        }
        let slot = self.slots.get(key)?;
        if slot.closing {
            return self.closed_if_done(key);
        }
        let failed = error::of_status(status);
        let stopped = failed == Some(error::CANCELLED);
        if slot.datagram {
            if let Some(number) = failed.filter(|_| !stopped) {
                self.note_datagram_failure(key, number);
            }
        } else if let Some(number) = failed.filter(|_| !stopped) {
            // Data may be there before it, which comes first; the error is told behind it.
            slot.failed = number;
        }
        let slot = self.slots.get(key)?;
        if slot.ops.has(Ops::CANCELLED) || stopped {
            slot.ops.remove(Ops::CANCELLED);
            return Some(Event::RecvEnded { key, end: RecvEnd::Stopped });
        }
        slot.ops.insert(Ops::READING);
        self.work.push_back(Work::Read(key));
        None
    }

    /// Receives one piece where there is something to receive.
    #[inline]
    fn read(&mut self, key: Key) -> Option<Event> {
        let wait = self.waits;
        // Closed meanwhile: nobody is to be told.
        let slot = self.slots.usable(key)?;
        if slot.ops.has(Ops::CANCELLED) {
            slot.ops.remove(Ops::CANCELLED);
            slot.ops.remove(Ops::READING);
            return Some(Event::RecvEnded { key, end: RecvEnd::Stopped });
        }
        if slot.wait != wait {
            slot.wait = wait;
            slot.pieces = 0;
        }
        if slot.pieces == PIECES {
            self.later.push_back(Work::Read(key));
            return None;
        }
        slot.pieces += 1;
        if slot.datagram {
            return self.read_datagram(key);
        }
        let (handle, failed) = (slot.socket, slot.failed);
        let end = match self.read_piece(handle) {
            Read::Data(buf) => {
                if buf.len() == self.memory.pool.buffer_size() as usize {
                    // There may be more: behind the others, it is this connection's turn again.
                    self.work.push_back(Work::Read(key));
                } else {
                    self.rearm(key);
                }
                return Some(Event::Received { key, buf, armed: true });
            }
            Read::Nothing if failed == 0 => {
                self.rearm(key);
                return None;
            }
            Read::NoBuffer => RecvEnd::NoBuffer,
            Read::Eof if failed == 0 && self.is_reset(key) => RecvEnd::Failed(error::io(error::RESET)),
            Read::Eof if failed == 0 => RecvEnd::Eof,
            // The end of a stream that has failed is not its end.
            Read::Nothing | Read::Eof => RecvEnd::Failed(error::io(failed)),
            Read::Failed(number) => RecvEnd::Failed(error::io(number)),
        };
        self.slots.get(key)?.ops.remove(Ops::READING);
        Some(Event::RecvEnded { key, end })
    }

    /// Whether the end of a stream is a reset that Wine forgot about.
    fn is_reset(&mut self, key: Key) -> bool {
        self.wine
            && self
                .slots
                .get(key)
                .is_some_and(|slot| !slot.ops.has(Ops::SHUT) && socket::is_gone(slot.socket))
    }

    pub(super) fn rearm(&mut self, key: Key) {
        if let Some(slot) = self.slots.get(key) {
            slot.ops.remove(Ops::READING);
            self.start_recv(key);
        }
    }

    #[inline]
    fn read_piece(&mut self, handle: SOCKET) -> Read {
        let pool = &self.memory.pool;
        let mut result = Ok(0);
        let buf = pool.lease_with(|room| {
            result = socket::receive(handle, room);
            result.unwrap_or(0)
        });
        match (buf, result) {
            (Some(buf), Ok(1..)) => Read::Data(buf),
            (Some(_), Ok(0)) => Read::Eof,
            (_, Err(WSAEWOULDBLOCK)) => Read::Nothing,
            (_, Err(number)) => Read::Failed(number),
            // Only for data a buffer is needed: the end is told without one.
            (None, Ok(_)) => match socket::peek(handle) {
                Ok(0) => Read::Eof,
                Ok(_) => Read::NoBuffer,
                Err(WSAEWOULDBLOCK) => Read::Nothing,
                Err(number) => Read::Failed(number),
            },
        }
    }

    /// The packet of a send: everything was taken; or a part, if it was cancelled or failed in between.
    #[inline]
    fn sent(&mut self, key: Key, status: i32, bytes: u32) -> Option<Event> {
        if !self.take_op(key, Ops::SEND) {
            return None;
        }
        let result = match error::of_status(status) {
            Some(number) if bytes == 0 => Err(number),
            _ => Ok(bytes),
        };
        self.send_ended(key, result)
    }

    /// A send that was done without a packet.
    #[inline]
    fn sent_at_once(&mut self, key: Key) -> Option<Event> {
        let slot = self.slots.usable(key)?;
        slot.ops.remove(Ops::SENT);
        let outcome = slot.outcome;
        self.send_ended(key, outcome)
    }

    #[inline]
    fn send_ended(&mut self, key: Key, result: Result<u32, i32>) -> Option<Event> {
        let slot = self.slots.get(key)?;
        let chain = slot.chain.take();
        if slot.closing {
            self.memory.chunks.clear(chain);
            return self.closed_if_done(key);
        }
        if let Some(number) = result.err().filter(|&number| error::ends_connections(number)) {
            // Some systems tell each error once only, so that receiving would find a plain end.
            slot.failed = number;
        }
        Some(Event::Sent { key, chain, result: result.map(u64::from).map_err(error::io) })
    }

    fn connected(&mut self, key: Key, status: i32) -> Option<Event> {
        if !self.take_op(key, Ops::CONNECT) {
            return None;
        }
        self.connect_ended(key, error::of_status(status).map_or(Ok(()), Err))
    }

    /// A connect that was done without a packet.
    fn connected_at_once(&mut self, key: Key) -> Option<Event> {
        let slot = self.slots.usable(key)?;
        slot.ops.remove(Ops::CONNECTED);
        let outcome = slot.outcome.map(|_| ());
        self.connect_ended(key, outcome)
    }

    fn connect_ended(&mut self, key: Key, result: Result<(), i32>) -> Option<Event> {
        let slot = self.slots.get(key)?;
        if slot.closing {
            return self.closed_if_done(key);
        }
        let result = result.and_then(|()| socket::finish_connect(slot.socket));
        // What is asked of a connection that never was is refused.
        slot.failed = result.err().unwrap_or(0);
        Some(Event::Connected { key, result: result.map_err(error::io) })
    }

    fn accepted(&mut self, key: Key) -> Option<Event> {
        let (listener, mode) = (ListenerId(key.slot as u16), AcceptMode::Once);
        let wants_peer = self.peer_addresses;
        let Some(ended) = self.listeners.ended(listener, key.generation, &self.extensions, wants_peer) else {
            self.counters.stale.add(1);
            return None;
        };
        self.in_flight = self.in_flight.saturating_sub(1);
        match ended {
            Ok(ended) => {
                let socket = Socket::from_handle(ended.socket.as_raw_socket() as SOCKET);
                self.passing.push_back(ended.socket);
                Some(Event::Accepted { listener, socket, peer: ended.peer, mode, armed: false })
            }
            Err(number) => Some(Event::AcceptFailed { listener, mode, error: error::io(number) }),
        }
    }

    /// Reports the end of a closing connection when the kernel holds nothing of it any more.
    pub(super) fn closed_if_done(&mut self, key: Key) -> Option<Event> {
        let slot = self.slots.get(key)?;
        if !slot.closing || !slot.ops.none_in_kernel() || slot.sends > 0 {
            return None;
        }
        slot.open = false;
        slot.closing = false;
        slot.ops = Ops::default();
        Some(Event::Closed { key })
    }
}
