//! epoll: readiness made into completions, for systems that forbid io_uring.
//!
//! | file | what is in it |
//! |---|---|
//! | `setup.rs` | making the instance, limits, what a refusal means |
//! | `submit.rs` | operations started, carried out by the next wait; sending |
//! | `ready.rs` | readiness → events; receiving and accepting |
//! | `datagram.rs` | datagram sockets |
//! | `slots.rs` | the record of a connection |
//! | `listeners.rs` | accept operations, accepted sockets on their way |
//! | `control.rs` | listeners made at run time, Unix connections, addresses, options |
//! | `user_data.rs` | what comes back with readiness |
//! | `waker.rs` | event counter |
//!
//! Nothing is ever in the kernel asynchronously: every call that touches memory returns before anything
//! else happens, so closing and ending wait for nothing.
//!
//! # Sending
//!
//! ```text
//!          send                wait: tried                      next_event
//!  (none) ─────► Started ──────────────────────────────► Over ────────────► (none)
//!                   │                                     ▲        Sent
//!                   │ took less than all, or nothing      │ took the rest, failed, cancelled
//!                   └───────────────► Waiting ────────────┘
//!                                     (for room: EPOLLOUT)
//! ```
//!
//! The slot owns the chain from `send` until `Sent` is taken, or `close` drops it. The kernel reads it only
//! during a call. How much it has taken is noted beside it; the chain itself stays as it was given.
//!
//! # Receiving
//!
//! ```text
//!            recv          wait      edge, or known readable             next_event: one piece each
//!  (none) ──────► Started ─────► Armed ─────────────────────► Queued ───────────────────┐
//!     ▲                            ▲                            │ ▲   Received          │
//!     │ RecvEnded:                 └──── short read, EAGAIN ────┤ └──── full piece ─────┤
//!     │ end, failure, no buffer, cancelled                      │                       │
//!     └─────────────────────────────────────────────────────────┴───────────────────────┘
//! ```
//!
//! A buffer is taken from the pool only when there is something to receive, at the moment at which the event
//! is taken, and is the `Buf` in `Received` at once: an armed connection holds none, and the data is in
//! the cache when the handler sees it. Without a free buffer a readable connection's receive ends with
//! `NoBuffer`; it stays known to be readable. After [`PIECES`](slots::PIECES) pieces a connection is not looked
//! at until the next wait, which does not sleep then.
//!
//! # Edges
//!
//! Sockets are watched edge-triggered: one `epoll_ctl` when a connection begins (and one when a send first
//! finds no room), and what is known of it is kept in its slot: *readable* from an edge until a short read
//! or EAGAIN, *writable* from the beginning until a short write or EAGAIN. A short read means that the
//! socket is empty, unless an end, a failure or urgent data was announced: then it is read on, because no
//! other edge comes for what is behind.
//!
//! Level-triggered was measured beside it (Linux 6.18, virtual machine, echo of 64 B, the driver alone,
//! CPU time per message, the best of 1500 batches in three runs each): 1 connection 7.4 to 7.6 µs edge,
//! 7.3 to 7.6 level, both 3.00 system calls; 64 connections 5.4 to 5.6 edge, 5.5 to 5.7 level, both 2.02. So
//! the cost of a message does not decide. Edges need no `epoll_ctl` when receiving is paused, and cannot
//! spin on a hang-up that nobody wants to hear of.
//!
//! # The wait
//!
//! What was started is carried out first; most sends are over by that. Then epoll is asked: without sleeping
//! if something is to be reported, and not at all if that is only what is over by itself, so that a message
//! echoed costs one wait; but never twice in a row, so that readiness is not starved by a connection
//! that always has something to send.
//!
//! # Counters
//!
//! `enters` counts every system call (which is what the kernel's door costs here), `sqes` operations started
//! and cancels, `cqes` events taken.

mod control;
mod datagram;
mod listeners;
mod ready;
mod setup;
mod slots;
mod submit;
mod user_data;
mod waker;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use crate::buffer::{Chain, Memory};
use crate::clock::Time;
use crate::config::{ConnectConfig, SocketOptions, WorkerConfig};
use crate::metrics::Counters;

use super::sys::{self, Epoll, Harvest, stream};
use super::{
    AcceptMode, Addresses, CloseHow, Datagram, DatagramConfig, Driver, DriverInfo, Event, Key, ListenConfig,
    ListenerId, Listening, Multishot, Native, SetupError, Socket, Wait,
};

use datagram::Datagrams;
use listeners::Listeners;
use slots::{Slots, State};
use submit::{Done, Ready, Started, errno};
use user_data::Source;
use waker::EpollWaker;

/// Descriptors whose readiness one wait brings; more come with the next.
const HARVEST: usize = 256;

/// What every descriptor is watched for.
const INTEREST: u32 = (libc::EPOLLIN | libc::EPOLLRDHUP | libc::EPOLLPRI | libc::EPOLLET) as u32;
/// And from when room was needed first.
const INTEREST_OUT: u32 = INTEREST | libc::EPOLLOUT as u32;

/// A worker's epoll instance.
pub(crate) struct EpollDriver {
    epoll: Epoll,
    harvest: Harvest,
    memory: Memory,
    counters: Arc<Counters>,
    slots: Slots,
    listeners: Listeners,
    datagrams: Datagrams,
    /// What the next wait has to do.
    started: Vec<Started>,
    /// What is over and to be reported.
    done: VecDeque<Done>,
    /// What may have more to report.
    ready: VecDeque<Ready>,
    /// The last wait did not ask epoll.
    skipped: bool,
    /// When the last wait ended.
    now: Time,
    waker: EpollWaker,
    in_flight: usize,
    /// Why connections to Unix sockets were refused, until that is reported or they are closed, by slot.
    refused: BTreeMap<u32, io::Error>,
    peer_addresses: bool,
}

impl EpollDriver {
    fn start(&mut self, operation: Started) {
        self.counters.sqes.add(1);
        self.started.push(operation);
    }

    /// Closes what is left. Connections must have been closed by now; those that were not (the worker
    /// panicked) are reset.
    fn end(&mut self) {
        for slot in 0..self.slots.len() {
            if let Some(key) = self.slots.open_key(slot) {
                self.close(key, CloseHow::Reset);
            }
        }
        self.listeners.clear();
    }
}

impl Native for EpollDriver {
    fn open(
        config: &WorkerConfig,
        counters: Arc<Counters>,
        _memlock: Option<u64>,
    ) -> Result<(Self, DriverInfo), SetupError> {
        let (epoll, memory, info) = setup::parts(config)?;
        let waker =
            EpollWaker::new().map_err(|source| SetupError::os("making a wake-up descriptor", source))?;
        let likely = (config.max_connections as usize).min(1024);
        let mut driver = Self {
            epoll,
            harvest: Harvest::new(HARVEST),
            memory,
            counters,
            slots: Slots::new(config.max_connections),
            listeners: Listeners::default(),
            datagrams: Datagrams::default(),
            started: Vec::with_capacity(2 * likely),
            done: VecDeque::with_capacity(likely),
            ready: VecDeque::with_capacity(likely),
            skipped: false,
            now: Time::now(),
            waker: waker.clone(),
            in_flight: 0,
            refused: BTreeMap::new(),
            peer_addresses: config.peer_addresses,
        };
        driver
            .watch(waker.counter(), INTEREST, Source::Wake)
            .map_err(|source| SetupError::os("watching the wake-up descriptor", source))?;
        Ok((driver, info))
    }
}

impl Drop for EpollDriver {
    fn drop(&mut self) {
        self.end();
    }
}

impl Driver for EpollDriver {
    type Listener = TcpListener;
    type Waker = EpollWaker;

    fn memory(&self) -> &Memory {
        &self.memory
    }

    #[inline]
    fn now(&self) -> Time {
        self.now
    }

    fn clock(&self) -> Time {
        Time::now()
    }

    fn waker(&self) -> EpollWaker {
        self.waker.clone()
    }

    fn add_listener(&mut self, listener: TcpListener) -> io::Result<ListenerId> {
        self.take_listener(listener.into())
    }

    fn multishot(&self) -> Multishot {
        Multishot::WithPeer
    }

    fn accept(&mut self, listener: ListenerId, mode: AcceptMode) {
        if self.listeners.get(listener).is_some_and(|listener| listener.arm(mode)) {
            self.in_flight += 1;
            self.start(Started::Accept(listener));
        } else {
            if let Some(record) = self.listeners.get(listener) {
                record.owed += 1;
            }
            self.start(Started::Done(Done::AcceptFailed(listener, mode, libc::EBADF)));
        }
    }

    fn cancel_accept(&mut self, listener: ListenerId) {
        self.counters.sqes.add(1);
        let Some(record) = self.listeners.get(listener) else { return };
        while let Some(mode) = record.armed() {
            record.disarm(mode);
            record.owed += 1;
            self.in_flight -= 1;
            self.started.push(Started::Done(Done::AcceptFailed(listener, mode, libc::ECANCELED)));
        }
    }

    fn remove_listener(&mut self, listener: ListenerId) {
        let Some(socket) = self.listeners.get(listener).and_then(|listener| listener.socket.take()) else {
            return;
        };
        // Others may hold the same socket, so closing it here does not end watching it. An error would mean
        // that it is not watched.
        let _ = self.epoll.remove(socket.as_fd());
    }

    fn adopt(&mut self, key: Key, socket: Socket) {
        let Some(fd) = self.listeners.take(&socket) else {
            panic!("driver contract broken: {socket:?} was adopted or discarded before")
        };
        let watched = self.watch(fd.as_fd(), INTEREST, Source::Conn(key));
        let slot = self.slots.open(key, fd);
        slot.state.insert(State::WRITABLE);
        if let Err(error) = watched {
            // Told by whatever is started first.
            slot.failure = errno(&error);
            slot.state.insert(State::UNWATCHED.and(State::READABLE));
        }
    }

    fn discard(&mut self, socket: Socket) {
        drop(self.listeners.take(&socket));
    }

    fn connect(&mut self, key: Key, config: &ConnectConfig) -> io::Result<()> {
        let fd = sys::client(config)?;
        stream::set_nonblocking(fd.as_fd(), true)?;
        self.counters.enters.add(1);
        let over = match stream::connect(fd.as_fd(), config.target) {
            Ok(()) => Some(0),
            Err(error) if matches!(errno(&error), libc::EINPROGRESS | libc::EINTR) => None,
            Err(error) => Some(errno(&error)),
        };
        self.watch(fd.as_fd(), INTEREST_OUT, Source::Conn(key))?;
        let slot = self.slots.open(key, fd);
        slot.state.insert(State::CONNECT.and(State::WATCHED_OUT));
        self.in_flight += 1;
        self.counters.sqes.add(1);
        if let Some(result) = over {
            slot.state.insert(State::CONNECT_OVER.and(State::WRITABLE));
            slot.result = result;
            self.started.push(Started::Done(Done::Connected(key)));
        }
        Ok(())
    }

    fn connect_unix(&mut self, key: Key, target: &std::os::unix::net::SocketAddr) -> io::Result<()> {
        self.start_unix_connect(key, target)
    }

    fn listen(&mut self, config: &ListenConfig) -> io::Result<Listening> {
        let (socket, local, backlog) = sys::listen(config)?;
        Ok(Listening { id: self.take_listener(socket)?, local, backlog })
    }

    fn addresses(&mut self, key: Key) -> io::Result<Addresses> {
        self.with_socket(key, sys::addresses)
    }

    fn set_options(&mut self, key: Key, options: &SocketOptions) -> io::Result<()> {
        self.with_socket(key, |fd| sys::set_options_of_open(fd, options))
    }

    fn open_datagram(&mut self, key: Key, config: &DatagramConfig) -> io::Result<()> {
        super::check_datagram_room(&self.memory)?;
        let fd = sys::datagram::open(config)?;
        self.watch(fd.as_fd(), INTEREST_OUT, Source::Conn(key))?;
        let slot = self.slots.open(key, fd);
        slot.state.insert(State::DATAGRAM.and(State::WRITABLE).and(State::WATCHED_OUT));
        self.datagrams.open(key);
        Ok(())
    }

    fn send_datagram(&mut self, key: Key, token: u32, datagram: Datagram) {
        if self.slots.get(key).is_some() && self.datagrams.push(key, token, datagram) {
            self.in_flight += 1;
            self.start(Started::SendDatagram(key));
        }
    }

    fn recv(&mut self, key: Key) {
        let Some(slot) = self.slots.get(key) else { return };
        slot.state.insert(State::RECV);
        slot.state.remove(State::RECV_CANCELLED);
        self.in_flight += 1;
        self.start(Started::Recv(key));
    }

    fn cancel_recv(&mut self, key: Key) {
        let Some(slot) = self.slots.get(key) else { return };
        if slot.state.has(State::RECV) {
            slot.state.insert(State::RECV_CANCELLED);
            self.start(Started::CancelRecv(key));
        }
    }

    #[inline]
    fn send(&mut self, key: Key, chain: Chain) {
        let Some(slot) = self.slots.get(key) else {
            self.memory.chunks.clear(chain);
            return;
        };
        slot.state.insert(State::SEND);
        slot.state.remove(State::SEND_CANCELLED);
        slot.chain = chain;
        slot.sent = 0;
        self.in_flight += 1;
        self.start(Started::Send(key));
    }

    fn cancel_send(&mut self, key: Key) {
        let Some(slot) = self.slots.get(key) else { return };
        if slot.state.has(State::SEND) {
            slot.state.insert(State::SEND_CANCELLED);
            self.start(Started::CancelSend(key));
        }
    }

    fn shutdown_write(&mut self, key: Key) {
        let Some(slot) = self.slots.get(key) else { return };
        self.counters.sqes.add(1);
        self.counters.enters.add(1);
        if let Some(fd) = slot.fd() {
            // An error means that the connection is gone, which its receive reports.
            let _ = stream::shutdown_write(fd);
        }
    }

    fn close(&mut self, key: Key, how: CloseHow) {
        let Some(slot) = self.slots.get(key) else { return };
        let state = slot.state;
        let (fd, chain) = slot.vacate();
        self.in_flight -= state.in_flight();
        if state.has(State::CONNECT) {
            self.refused.remove(&key.slot);
        }
        if state.has(State::DATAGRAM) {
            self.in_flight -= self.datagrams.close(key);
        }
        self.memory.chunks.clear(chain);
        if let Some(fd) = fd {
            if how == CloseHow::Reset && !state.has(State::CONNECT.and(State::DATAGRAM)) {
                self.counters.enters.add(1);
                // An error means that there is nothing left to reset, or that it is a Unix socket.
                let _ = stream::reset(fd.as_fd());
            }
            self.counters.enters.add(1);
            drop(fd);
        }
        self.start(Started::Done(Done::Closed(key)));
    }

    fn submit_and_wait(&mut self, wait: impl Into<Wait>) -> io::Result<()> {
        let began = Time::now();
        self.counters.busy_ns.add(began.since(self.now).as_nanos() as u64);
        self.begin();
        let wait = wait.into();
        let wait = match self.try_paced() {
            Some(pace) => {
                Wait { timeout: Some(wait.timeout.map_or(pace, |timeout| timeout.min(pace))), ..wait }
            }
            None => wait,
        };
        let result = match (self.done.is_empty(), self.ready.is_empty()) {
            (false, true) if !self.skipped => {
                self.skipped = true;
                Ok(())
            }
            (none_done, none_ready) => {
                self.skipped = false;
                if none_done && none_ready {
                    self.poll_as(wait, began)
                } else {
                    self.poll(Some(Duration::ZERO))
                }
            }
        };
        self.now = Time::now();
        self.counters.parked_ns.add(self.now.since(began).as_nanos() as u64);
        result
    }

    #[inline]
    fn next_event(&mut self) -> Option<Event> {
        self.next()
    }

    fn has_events(&self) -> bool {
        !self.done.is_empty() || !self.ready.is_empty()
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Nothing is in the kernel, so there is nothing to wait for.
    fn finish(self, _patience: Duration) -> usize {
        0
    }
}

#[cfg(test)]
mod tests;
