//! The way up: readiness becomes events, one piece at a time, as they are taken.

use std::io;
use std::os::fd::AsFd;

use crate::driver::sys::stream;
use crate::driver::{AcceptMode, Event, Key, ListenerId, RecvEnd};

use super::EpollDriver;
use super::listeners::ACCEPTS;
use super::slots::{PIECES, State};
use super::submit::{Done, Ready, Started, errno};

/// Bits that say that receiving has something to report.
const IN: u32 = (libc::EPOLLIN | libc::EPOLLPRI | libc::EPOLLRDHUP | libc::EPOLLHUP | libc::EPOLLERR) as u32;
/// Those of them that announce something behind the data, for which no further edge comes.
const READ_ON: u32 = IN & !(libc::EPOLLIN as u32);
/// Bits that say that sending has something to report.
const OUT: u32 = (libc::EPOLLOUT | libc::EPOLLHUP | libc::EPOLLERR) as u32;

impl EpollDriver {
    #[inline]
    pub(super) fn conn_ready(&mut self, key: Key, bits: u32) {
        let Some(slot) = self.slots.get(key) else {
            self.counters.stale.add(1);
            return;
        };
        if bits & IN != 0 {
            slot.state.insert(State::READABLE);
        }
        if bits & READ_ON != 0 {
            slot.state.insert(State::READ_ON);
        }
        if bits & OUT != 0 {
            slot.state.insert(State::WRITABLE);
            if slot.state.has(State::DATAGRAM) {
                self.try_send_datagrams(key);
            } else if slot.state.has(State::CONNECT) {
                self.connect_over(key);
            } else {
                self.try_send(key);
            }
        }
        self.queue(key);
    }

    fn connect_over(&mut self, key: Key) {
        let Some(slot) = self.slots.get(key) else { return };
        if slot.state.has(State::CONNECT_OVER) {
            return;
        }
        slot.state.insert(State::CONNECT_OVER);
        self.counters.enters.add(1);
        let Some(fd) = slot.fd() else { return };
        let result = stream::take_error(fd);
        slot.result = result.err().map_or(0, |error| errno(&error));
        self.done.push_back(Done::Connected(key));
    }

    pub(super) fn listener_ready(&mut self, id: ListenerId, generation: u32) {
        match self.listeners.get(id) {
            Some(listener) if listener.socket.is_some() && listener.generation == generation => {
                listener.ready = true;
                self.queue_listener(id);
            }
            _ => self.counters.stale.add(1),
        }
    }

    /// Has a connection looked at that is armed and may be readable.
    #[inline]
    pub(super) fn queue(&mut self, key: Key) {
        const WANTED: State = State::RECV.and(State::RECV_BEGUN).and(State::READABLE);
        let Some(slot) = self.slots.get(key) else { return };
        if slot.state.all(WANTED) && !slot.state.has(State::QUEUED) {
            slot.state.insert(State::QUEUED);
            slot.served = 0;
            self.ready.push_back(Ready::Conn(key));
        }
    }

    /// Has a listener looked at that is armed and may have connections.
    pub(super) fn queue_listener(&mut self, id: ListenerId) {
        let Some(listener) = self.listeners.get(id) else { return };
        if listener.ready && listener.armed().is_some() && !listener.queued {
            listener.queued = true;
            listener.served = 0;
            self.ready.push_back(Ready::Listener(id));
        }
    }

    /// The next event: of what is over first, then one piece each of what is ready, in turn.
    #[inline]
    pub(super) fn next(&mut self) -> Option<Event> {
        loop {
            let event = if let Some(done) = self.done.pop_front() {
                self.report(done)
            } else {
                match self.ready.pop_front()? {
                    Ready::Conn(key) => self.receive(key),
                    Ready::Listener(id) => self.take_connection(id),
                }
            };
            if event.is_some() {
                self.counters.cqes.add(1);
                return event;
            }
        }
    }

    /// `None` for a connection that was closed meanwhile: only `Closed` is reported of it.
    #[inline]
    fn report(&mut self, done: Done) -> Option<Event> {
        match done {
            Done::Sent(key) => {
                let slot = self.slots.get(key)?;
                slot.state.remove(State::SEND.and(State::SEND_OVER));
                self.in_flight -= 1;
                let chain = slot.chain.take();
                let result = match slot.result {
                    0 => Ok(slot.sent),
                    error => Err(io::Error::from_raw_os_error(error)),
                };
                Some(Event::Sent { key, chain, result })
            }
            Done::DatagramSent(key) => self.datagram_sent(key),
            Done::Connected(key) => {
                let slot = self.slots.get(key)?;
                slot.state.remove(State::CONNECT.and(State::CONNECT_OVER));
                self.in_flight -= 1;
                let result = match slot.result {
                    0 => self.refused.remove(&key.slot).map_or(Ok(()), Err),
                    error => Err(io::Error::from_raw_os_error(error)),
                };
                Some(Event::Connected { key, result })
            }
            Done::Stopped(key) => {
                self.slots.get(key)?;
                Some(self.end_recv(key, RecvEnd::Stopped))
            }
            Done::Closed(key) => Some(Event::Closed { key }),
            Done::AcceptFailed(listener, mode, error) => {
                if let Some(record) = self.listeners.get(listener) {
                    record.owed = record.owed.saturating_sub(1);
                }
                let error = io::Error::from_raw_os_error(error);
                Some(Event::AcceptFailed { listener, mode, error })
            }
            Done::Woken => Some(Event::Woken),
        }
    }

    pub(super) fn end_recv(&mut self, key: Key, end: RecvEnd) -> Event {
        if let Some(slot) = self.slots.get(key) {
            slot.state.remove(State::RECV.and(State::RECV_BEGUN));
            self.in_flight -= 1;
        }
        Event::RecvEnded { key, end }
    }

    /// Receives one piece.
    #[inline]
    fn receive(&mut self, key: Key) -> Option<Event> {
        let slot = self.slots.get(key)?;
        slot.state.remove(State::QUEUED);
        if !slot.state.all(State::RECV.and(State::RECV_BEGUN)) {
            return None;
        }
        if slot.state.has(State::UNWATCHED) {
            let failure = io::Error::from_raw_os_error(slot.failure);
            return Some(self.end_recv(key, RecvEnd::Failed(failure)));
        }
        if slot.state.has(State::DATAGRAM) {
            return self.receive_datagram(key);
        }
        let fd = slot.fd()?;
        let size = self.memory.pool.buffer_size() as usize;
        let mut received = Ok(0);
        let buf = self.memory.pool.lease_with(|room| {
            self.counters.enters.add(1);
            received = loop {
                match stream::receive(fd, room) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    received => break received,
                }
            };
            *received.as_ref().unwrap_or(&0)
        });
        // The socket stays readable, to be looked at when it is armed again.
        let Some(buf) = buf else { return Some(self.end_recv(key, RecvEnd::NoBuffer)) };
        match received {
            Ok(0) => {
                let end = match slot.failure {
                    0 => RecvEnd::Eof,
                    error => RecvEnd::Failed(io::Error::from_raw_os_error(error)),
                };
                Some(self.end_recv(key, end))
            }
            Ok(len) => {
                if len < size && !slot.state.has(State::READ_ON) {
                    // Empty: what comes from now on is told.
                    slot.state.remove(State::READABLE);
                    return Some(Event::Received { key, buf, armed: true });
                }
                slot.served += 1;
                if slot.served < PIECES {
                    slot.state.insert(State::QUEUED);
                    self.ready.push_back(Ready::Conn(key));
                } else {
                    self.started.push(Started::Recv(key));
                }
                Some(Event::Received { key, buf, armed: true })
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                slot.state.remove(State::READABLE.and(State::READ_ON));
                None
            }
            Err(error) => {
                if errno(&error) == libc::EFAULT {
                    self.counters.faults.add(1);
                    self.memory.fault(format_args!("receiving of {key:?}"));
                }
                Some(self.end_recv(key, RecvEnd::Failed(error)))
            }
        }
    }

    /// Accepts one connection.
    fn take_connection(&mut self, id: ListenerId) -> Option<Event> {
        let listener = self.listeners.get(id)?;
        listener.queued = false;
        let (mode, socket) = (listener.armed()?, listener.socket.as_ref()?);
        self.counters.enters.add(1);
        let accepted = match stream::accept(socket.as_fd(), self.peer_addresses) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                listener.ready = false;
                return None;
            }
            accepted => accepted,
        };
        let armed = mode == AcceptMode::Multishot && accepted.is_ok();
        if !armed {
            listener.disarm(mode);
            self.in_flight -= 1;
        }
        match accepted {
            Ok((fd, peer)) => {
                listener.served += 1;
                if listener.armed().is_some() && listener.served < ACCEPTS {
                    listener.queued = true;
                    self.ready.push_back(Ready::Listener(id));
                } else {
                    self.started.push(Started::Accept(id));
                }
                let socket = self.listeners.keep(fd);
                Some(Event::Accepted { listener: id, socket, peer, mode, armed })
            }
            // The connection is still in the queue. It is tried for again with the next operation that
            // is armed, or when another one arrives, so that nothing spins.
            Err(error) => Some(Event::AcceptFailed { listener: id, mode, error }),
        }
    }
}
