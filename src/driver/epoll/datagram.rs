//! Datagram sockets: received one at a time when readable, sent at once if there is room.
//!
//! ```text
//!               send_datagram          next wait: tried                    next_event
//!  datagram: ───────────────► queued ─────────────────────► result noted ────────────► (gone)
//!                               ▲  │ no room: stays first               DatagramSent
//!                               └──┘ until the socket is writable
//! ```
//!
//! Queues are few (one per socket that has something to send) and keep their memory.
//!
//! A Unix socket that is not connected is told nothing of room in its receiver's queue, and worse: each attempt that
//! finds none frees a buffer of its own, which the kernel reports as room. So it tries again after [`PACE`], and
//! not when it is said to be writable.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use crate::clock::Time;
use crate::driver::sys::datagram::{self, Name};
use crate::driver::{Address, Datagram, Event, Key, RecvEnd};

use super::EpollDriver;
use super::slots::{PIECES, State};
use super::submit::{Done, Ready, Started, errno};

/// When a send is tried again for whose room nobody tells.
const PACE: Duration = Duration::from_millis(1);

/// What waits to be sent, and what was and is to be reported, of one socket.
#[derive(Default)]
struct Queue {
    key: Option<Key>,
    waiting: VecDeque<(u32, Datagram)>,
    sent: VecDeque<(u32, io::Result<usize>)>,
    /// Nothing is tried before.
    not_before: Option<Time>,
}

/// The queues of all datagram sockets.
#[derive(Default)]
pub(super) struct Datagrams {
    queues: Vec<Queue>,
    /// Some of them have a time before which nothing is tried.
    paced: bool,
}

impl Datagrams {
    fn get(&mut self, key: Key) -> Option<&mut Queue> {
        self.queues.iter_mut().find(|queue| queue.key == Some(key))
    }

    /// Begins a socket's use of a queue.
    pub(super) fn open(&mut self, key: Key) {
        if let Some(free) = self.queues.iter_mut().find(|queue| queue.key.is_none()) {
            free.key = Some(key);
            return;
        }
        self.queues.push(Queue { key: Some(key), ..Queue::default() });
    }

    /// Ends it. Returns how many sends were under way.
    pub(super) fn close(&mut self, key: Key) -> usize {
        let Some(queue) = self.get(key) else { return 0 };
        let under_way = queue.waiting.len() + queue.sent.len();
        queue.key = None;
        queue.waiting.clear();
        queue.sent.clear();
        queue.not_before = None;
        under_way
    }

    /// Queues a datagram; it is tried with the next wait.
    pub(super) fn push(&mut self, key: Key, token: u32, datagram: Datagram) -> bool {
        let Some(queue) = self.get(key) else { return false };
        queue.waiting.push_back((token, datagram));
        true
    }
}

impl EpollDriver {
    /// Sends what the socket takes of what waits.
    pub(super) fn try_send_datagrams(&mut self, key: Key) {
        let (Some(slot), Some(queue)) = (self.slots.get(key), self.datagrams.get(key)) else { return };
        let mut paced = false;
        if queue.not_before.is_some() {
            slot.state.remove(State::WRITABLE);
        }
        while slot.state.has(State::WRITABLE) {
            let Some((token, datagram)) = queue.waiting.pop_front() else { break };
            let Some(fd) = slot.fd() else { break };
            let name = datagram.to.as_ref().map_or(Name::NONE, Name::from);
            self.counters.enters.add(1);
            let sent = loop {
                match datagram::send(fd, datagram.payload.as_slice(), &name, datagram.segment) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    sent => break sent,
                }
            };
            match sent {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if matches!(datagram.to, Some(Address::Unix(_))) {
                        queue.not_before = Some(Time::now() + PACE);
                        paced = true;
                    }
                    queue.waiting.push_front((token, datagram));
                    slot.state.remove(State::WRITABLE);
                }
                sent => {
                    queue.sent.push_back((token, sent));
                    self.done.push_back(Done::DatagramSent(key));
                }
            }
        }
        self.datagrams.paced |= paced;
    }

    /// Tries again what has waited for its time. Returns how long the next has to wait, if there is one.
    pub(super) fn try_paced(&mut self) -> Option<Duration> {
        if !std::mem::take(&mut self.datagrams.paced) {
            return None;
        }
        let now = Time::now();
        for at in 0..self.datagrams.queues.len() {
            let queue = &mut self.datagrams.queues[at];
            if let (Some(key), Some(time)) = (queue.key, queue.not_before)
                && time <= now
            {
                queue.not_before = None;
                if let Some(slot) = self.slots.get(key) {
                    slot.state.insert(State::WRITABLE);
                }
                self.try_send_datagrams(key);
            }
        }
        let next = self.datagrams.queues.iter().filter_map(|queue| queue.not_before).min()?;
        self.datagrams.paced = true;
        Some(next.since(now))
    }

    /// Reports the send that was over first.
    pub(super) fn datagram_sent(&mut self, key: Key) -> Option<Event> {
        let (token, result) = self.datagrams.get(key)?.sent.pop_front()?;
        self.in_flight -= 1;
        Some(Event::DatagramSent { key, token, result })
    }

    /// Receives one datagram.
    pub(super) fn receive_datagram(&mut self, key: Key) -> Option<Event> {
        let slot = self.slots.get(key)?;
        let fd = slot.fd()?;
        let mut received = Ok(0);
        let buf = self.memory.pool.lease_with(|room| {
            self.counters.enters.add(1);
            received = loop {
                match datagram::receive(fd, room) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    received => break received,
                }
            };
            *received.as_ref().unwrap_or(&0)
        });
        let Some(buf) = buf else { return Some(self.end_recv(key, RecvEnd::NoBuffer)) };
        match received {
            Ok(_) => {
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
                    self.memory.fault(format_args!("receiving a datagram of {key:?}"));
                }
                Some(self.end_recv(key, RecvEnd::Failed(error)))
            }
        }
    }
}
