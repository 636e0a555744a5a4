//! The way down: operations are noted when they are started and carried out by the next wait.

use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use crate::clock::Time;
use crate::driver::sys::stream;
use crate::driver::{AcceptMode, Driver, Key, ListenerId, SEND_BATCH, Wait};

use super::slots::State;
use super::user_data::Source;
use super::{EpollDriver, INTEREST_OUT};

/// What the next wait has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Started {
    /// A receive that was armed, or that has reported its share since the last wait.
    Recv(Key),
    Send(Key),
    /// A datagram that was given.
    SendDatagram(Key),
    CancelRecv(Key),
    CancelSend(Key),
    /// An accept that was armed, or a listener that has reported its share since the last wait.
    Accept(ListenerId),
    /// What was over when it was begun.
    Done(Done),
}

/// An event that is to be taken. What belongs to it is in the slot until then, so that closing finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Done {
    Sent(Key),
    DatagramSent(Key),
    Connected(Key),
    /// The armed receive was cancelled.
    Stopped(Key),
    Closed(Key),
    AcceptFailed(ListenerId, AcceptMode, i32),
    Woken,
}

/// What may have more to report, one piece each time that it is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ready {
    Conn(Key),
    Listener(ListenerId),
}

/// What came of an attempt to send.
enum Attempt {
    Over,
    Full,
}

pub(super) fn errno(error: &io::Error) -> i32 {
    // Every error here comes from the system and has a number.
    error.raw_os_error().unwrap_or(libc::EIO)
}

impl EpollDriver {
    /// Carries out what was started since the last wait.
    pub(super) fn begin(&mut self) {
        let mut started = std::mem::take(&mut self.started);
        for operation in started.drain(..) {
            match operation {
                Started::Recv(key) => {
                    if let Some(slot) = self.slots.get(key) {
                        slot.state.insert(State::RECV_BEGUN);
                        self.queue(key);
                    }
                }
                Started::Send(key) => self.try_send(key),
                Started::SendDatagram(key) => self.try_send_datagrams(key),
                // It may have ended meanwhile, and another have been armed, which is not meant.
                Started::CancelRecv(key) => {
                    if let Some(slot) = self.slots.get(key)
                        && slot.state.all(State::RECV.and(State::RECV_CANCELLED))
                    {
                        slot.state.remove(State::RECV_BEGUN.and(State::RECV_CANCELLED));
                        self.done.push_back(Done::Stopped(key));
                    }
                }
                Started::CancelSend(key) => {
                    if self.slots.get(key).is_some_and(|slot| slot.state.has(State::SEND_CANCELLED)) {
                        self.end_send(key, libc::ECANCELED);
                    }
                }
                Started::Accept(id) => self.queue_listener(id),
                Started::Done(done) => self.done.push_back(done),
            }
        }
        debug_assert!(self.started.is_empty(), "begun while beginning");
        self.started = started;
    }

    /// Waits, at most `timeout`, and notes what became ready.
    pub(super) fn poll(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.counters.enters.add(1);
        match self.epoll.wait(&mut self.harvest, timeout) {
            Ok(()) => {}
            // Nothing is ready then.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(()),
            Err(error) => return Err(error),
        }
        for index in 0..self.harvest.len() {
            let (bits, user_data) = self.harvest.get(index);
            match Source::decode(user_data) {
                Some(Source::Conn(key)) => self.conn_ready(key, bits),
                Some(Source::Listener(id, generation)) => self.listener_ready(id, generation),
                Some(Source::Wake) => self.done.push_back(Done::Woken),
                None => self.counters.stale.add(1),
            }
        }
        Ok(())
    }

    /// Asks what is ready, waiting as it is told since `began`: looking first, or, once something is ready, for more
    /// to become so.
    pub(super) fn poll_as(&mut self, wait: Wait, began: Time) -> io::Result<()> {
        let spin = wait.spin();
        while Time::now().since(began) < spin {
            self.poll(Some(Duration::ZERO))?;
            if self.has_events() {
                return Ok(());
            }
        }
        self.poll(wait.less(Time::now().since(began)).timeout)?;
        let gather = wait.gather().saturating_sub(Time::now().since(began));
        if gather.is_zero() || !self.has_events() {
            return Ok(());
        }
        std::thread::sleep(gather);
        self.poll(Some(Duration::ZERO))
    }

    /// Sends what the socket takes of a connection's chain, if it may take something.
    #[inline]
    pub(super) fn try_send(&mut self, key: Key) {
        let Some(slot) = self.slots.get(key) else { return };
        if !slot.state.all(State::SEND.and(State::WRITABLE)) || slot.state.has(State::SEND_OVER) {
            return;
        }
        match self.attempt(key) {
            Ok(Attempt::Over) => self.end_send(key, 0),
            Ok(Attempt::Full) => self.await_room(key),
            Err(error) => {
                if errno(&error) == libc::EFAULT {
                    self.counters.faults.add(1);
                    self.memory.fault(format_args!("sending of {key:?}"));
                }
                self.fail_send(key, errno(&error));
            }
        }
    }

    #[inline]
    fn attempt(&mut self, key: Key) -> io::Result<Attempt> {
        let Some(slot) = self.slots.get(key) else { return Ok(Attempt::Over) };
        if slot.failure != 0 {
            return Err(io::Error::from_raw_os_error(slot.failure));
        }
        loop {
            // A chain may consist of payloads of no bytes.
            if slot.sent == slot.chain.bytes() {
                return Ok(Attempt::Over);
            }
            let Some(fd) = slot.fd() else { return Ok(Attempt::Over) };
            self.counters.enters.add(1);
            let (asked, sent) =
                self.memory.chunks.with_slices::<SEND_BATCH, _>(&slot.chain, slot.sent, |slices| {
                    let asked = slices.iter().map(|slice| slice.len() as u64).sum::<u64>();
                    (asked.min(stream::MAX_SEND), stream::send(fd, slices))
                });
            match sent {
                Ok(sent) => {
                    slot.sent += sent as u64;
                    if (sent as u64) < asked {
                        // Full: having said so, it tells when there is room (epoll(7), question 9).
                        return Ok(Attempt::Full);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Attempt::Full),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn await_room(&mut self, key: Key) {
        let Some(slot) = self.slots.get(key) else { return };
        slot.state.remove(State::WRITABLE);
        if slot.state.has(State::WATCHED_OUT) {
            return;
        }
        let unwatched = slot.state.has(State::UNWATCHED);
        slot.state.insert(State::WATCHED_OUT);
        let Some(fd) = slot.fd() else { return };
        self.counters.enters.add(1);
        // Reports at once if there is room by now.
        let watched = if unwatched {
            Err(io::Error::from_raw_os_error(libc::ENOSPC))
        } else {
            self.epoll.modify(fd, INTEREST_OUT, Source::Conn(key).encode())
        };
        if let Err(error) = watched {
            self.fail_send(key, errno(&error));
        }
    }

    fn fail_send(&mut self, key: Key, error: i32) {
        if let Some(slot) = self.slots.get(key)
            && error != libc::EPIPE
        {
            slot.failure = error;
        }
        self.end_send(key, error);
    }

    /// Ends a connection's send, if there is one that is not over: with what was taken, or with `error` if
    /// nothing was.
    fn end_send(&mut self, key: Key, error: i32) {
        let Some(slot) = self.slots.get(key) else { return };
        if !slot.state.has(State::SEND) || slot.state.has(State::SEND_OVER) {
            return;
        }
        slot.state.insert(State::SEND_OVER);
        slot.result = if slot.sent == 0 { error } else { 0 };
        self.done.push_back(Done::Sent(key));
    }

    /// Begins to watch a socket.
    pub(super) fn watch(&mut self, fd: BorrowedFd<'_>, interest: u32, source: Source) -> io::Result<()> {
        self.counters.enters.add(1);
        self.epoll.add(fd, interest, source.encode())
    }
}
