//! io_uring: multishot accept and receive, provided buffers, direct descriptors, one enter a turn.
//!
//! | file | what is in it |
//! |---|---|
//! | `setup.rs` | making the ring, probing features, what a refusal means |
//! | `submit.rs` | operations → submission queue entries, the enter |
//! | `complete.rs` | completion queue entries → events |
//! | `receive.rs` | receiving: multishot, one piece at a time, or polled |
//! | `datagram.rs` | datagram sockets |
//! | `slots.rs` | the record of a connection |
//! | `listeners.rs` | accept operations |
//! | `control.rs` | listeners made at run time, Unix connections, addresses, options |
//! | `buf_ring.rs` | lending receive buffers to the kernel |
//! | `user_data.rs` | what comes back with a completion |
//! | `waker.rs` | event counter and ring messages |
//!
//! Closing a connection: cancel what is armed by its exact user data, close the descriptor, both in
//! one submission (a close alone would leave an armed receive holding the socket: no FIN would go
//! out); then wait for every operation's last completion. Only then is the slot vacant.

mod buf_ring;
mod complete;
mod control;
mod datagram;
mod listeners;
mod receive;
mod setup;
mod slots;
mod submit;
mod user_data;
mod waker;

pub(crate) use setup::probe;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use io_uring::squeue::Flags;
use io_uring::{cqueue, opcode, types};

use crate::buffer::{Chain, Memory};
use crate::clock::Time;
use crate::config::{ConnectConfig, SocketOptions, WorkerConfig};
use crate::metrics::Counters;

use super::sys::{self, RawAddress};
use super::{
    AcceptMode, Addresses, CloseHow, Datagram, DatagramConfig, Driver, DriverInfo, Event, Key, ListenConfig,
    ListenerId, Listening, Multishot, Native, SetupError, Socket, Wait,
};

use buf_ring::BufRing;
use control::Pending;
use datagram::DatagramOps;
use listeners::Listeners;
use receive::RecvMode;
use slots::{Ops, Slots};
use submit::{SocketRef, Submission};
use user_data::{Kind, encode};
use waker::UringWaker;

/// A worker's io_uring.
pub(crate) struct UringDriver {
    submission: Submission,
    /// Where the kernel takes receive buffers from; `None` when connections are polled.
    buf_ring: Option<BufRing>,
    recv_mode: RecvMode,
    multishot_accept: bool,
    memory: Memory,
    counters: Arc<Counters>,
    slots: Slots,
    listeners: Listeners,
    datagrams: DatagramOps,
    /// What multishot receives of datagrams are started with.
    datagram_header: Box<libc::msghdr>,
    /// Ordinary descriptors that were accepted and wait to be adopted or discarded, the oldest first: whoever
    /// has them may panic, and they would stay open.
    passing: VecDeque<OwnedFd>,
    /// Outgoing connections whose sockets are being registered, by slot.
    registering: BTreeMap<u32, Pending>,
    /// Why connections to Unix sockets were refused, until that is reported, by slot.
    refused: BTreeMap<u32, io::Error>,
    /// Completions copied out of the queue, and how many of them are translated.
    entries: Vec<cqueue::Entry>,
    taken: usize,
    /// Events that no completion brings.
    ready: VecDeque<Event>,
    /// When the last wait ended.
    now: Time,
    waker: UringWaker,
    peers: Vec<UringWaker>,
    /// Where the event counter is read to.
    wake_value: Box<AtomicU64>,
    wake_armed: bool,
    in_flight: usize,
    /// A receive of two steps has taken the first: its data must not wait to be gathered once more.
    midway: bool,
    direct: bool,
    /// A socket of the descriptor table can be given an ordinary descriptor.
    install: bool,
    peer_addresses: bool,
    /// The driver is ending: its own operations are not armed any more.
    draining: bool,
    finished: bool,
}

impl UringDriver {
    fn arm_wake(&mut self) {
        if self.draining {
            return;
        }
        let value: *mut u64 = self.wake_value.as_ptr();
        // The box keeps its place until the read has ended or is leaked (invariant 7).
        let entry = opcode::Read::new(types::Fd(self.waker.eventfd()), value.cast(), 8).build();
        let entry = entry.user_data(encode(Kind::Wake, Key { slot: 0, generation: 0 }));
        self.wake_armed = true;
        self.submission.push(&entry, &self.counters);
    }

    fn start_connect(&mut self, key: Key, target: RawAddress) {
        let direct = self.direct;
        let Some(slot) = self.slots.get(key) else { return };
        slot.ops.insert(Ops::CONNECT);
        let socket = slot.socket(direct);
        self.in_flight += 1;
        self.submission.connect(socket, encode(Kind::Connect, key), target, &self.counters);
    }

    /// Queues the closing of a connection's socket.
    fn close_socket(&mut self, key: Key) {
        let direct = self.direct;
        let Some(slot) = self.slots.get(key) else { return };
        if slot.socket < 0 || slot.ops.has(Ops::CLOSE) {
            return;
        }
        slot.ops.insert(Ops::CLOSE);
        let socket = slot.socket(direct);
        self.in_flight += 1;
        self.submission.close(socket, encode(Kind::Close, key), &self.counters);
    }

    /// An accepted descriptor has found its place.
    fn passed(&mut self, socket: &Socket) {
        // The oldest goes first, unless it waits for a permit; so this looks at few.
        let found = self.passing.iter().position(|fd| fd.as_raw_fd() == socket.0);
        if let Some(fd) = found.and_then(|at| self.passing.remove(at)) {
            // Closed by an operation from now on.
            let _ = fd.into_raw_fd();
        }
    }

    fn cancel(&mut self, kind: Kind, key: Key, report: Kind) {
        self.submission.cancel(encode(kind, key), encode(report, key), &self.counters);
    }

    /// Cancels the driver's own operations and takes completions until the kernel holds nothing, or
    /// `patience` is over. Connections must have been closed by now; those that were not (the worker
    /// panicked) are closed here. Returns the number of operations left.
    fn drain(&mut self, patience: Duration) -> usize {
        self.draining = true;
        let until = Instant::now() + patience;
        for id in self.listeners.ids() {
            self.cancel_accept(id);
        }
        for slot in 0..self.slots.len() {
            if let Some(key) = self.slots.open_key(slot) {
                self.close(key, CloseHow::Reset);
            }
        }
        if self.wake_armed {
            self.cancel(Kind::Wake, Key { slot: 0, generation: 0 }, Kind::Cancel);
        }
        loop {
            while let Some(event) = self.next() {
                match event {
                    Event::Accepted { socket, .. } => self.discard(socket),
                    Event::Sent { chain, .. } => self.memory.chunks.clear(chain),
                    _ => {}
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            let held = self.in_flight + usize::from(self.wake_armed);
            let unsent = !self.submission.ring.submission().is_empty();
            if (held == 0 && !unsent) || left.is_zero() {
                return held;
            }
            let wait = if held == 0 { Duration::ZERO } else { left };
            if self.submission.enter(Some(wait), 1, Duration::ZERO, &self.counters).is_err() {
                return held;
            }
        }
    }

    /// The buffer ring's own memory is read by the kernel as well.
    fn leak_ring(&mut self) {
        if let Some(buf_ring) = &mut self.buf_ring {
            buf_ring.leak();
        }
    }

    /// Drains, then gives back what is registered, or leaks what the kernel still holds.
    fn end(&mut self, patience: Duration) -> usize {
        // A drain that did not come to its end (it panicked) is not begun again.
        let left = if self.draining { self.in_flight.max(1) } else { self.drain(patience) };
        self.finished = true;
        if left > 0 {
            // Memory that the kernel may still write or read is never freed (promises 1 and 2).
            self.memory.leak();
            let value = std::mem::replace(&mut self.wake_value, Box::new(AtomicU64::new(0)));
            std::mem::forget(value);
            std::mem::forget(std::mem::take(&mut self.listeners));
            std::mem::forget(std::mem::take(&mut self.datagrams));
            std::mem::forget(std::mem::replace(&mut self.datagram_header, datagram::receive_header()));
            std::mem::forget(std::mem::replace(&mut self.slots, Slots::new(0)));
            return left;
        }
        let submitter = self.submission.ring.submitter();
        // A handle that wakes this ring may outlive it and keep the ring itself alive, but not what
        // was registered. Errors mean that nothing was registered.
        if self.buf_ring.is_some() {
            let _ = submitter.unregister_buf_ring(buf_ring::GROUP);
        }
        self.memory.pool.take_all_back();
        let _ = submitter.unregister_buffers();
        let _ = submitter.unregister_files();
        0
    }
}

impl Native for UringDriver {
    fn open(
        config: &WorkerConfig,
        counters: Arc<Counters>,
        memlock: Option<u64>,
    ) -> Result<(Self, DriverInfo), SetupError> {
        let setup::Parts {
            ring,
            buf_ring,
            recv_mode,
            memory,
            table,
            no_iowait,
            install,
            min_wait,
            mut features,
            warnings,
        } = setup::parts(config, memlock)?;
        let waker = UringWaker::new(ring.as_raw_fd())
            .map_err(|source| SetupError::os("making a wake-up descriptor", source))?;
        if let Some(slack) = config.timer_slack {
            sys::set_timer_slack(slack)
                .map_err(|source| SetupError::os("setting the timer slack", source))?;
        }
        let multishot_accept = config.uring.multishot_accept;
        features.push(setup::feature(
            "MULTISHOT_ACCEPT",
            multishot_accept,
            "one accept operation for all connections (5.19)",
            "switched off: one accept operation each",
        ));
        let mut driver = Self {
            submission: Submission::new(ring, no_iowait, min_wait),
            buf_ring,
            recv_mode,
            multishot_accept,
            memory,
            counters,
            slots: Slots::new(config.max_connections),
            listeners: Listeners::default(),
            datagrams: DatagramOps::default(),
            datagram_header: datagram::receive_header(),
            passing: VecDeque::new(),
            registering: BTreeMap::new(),
            refused: BTreeMap::new(),
            entries: Vec::with_capacity(256),
            taken: 0,
            ready: VecDeque::with_capacity(16),
            now: submit::clock(),
            waker,
            peers: Vec::new(),
            wake_value: Box::new(AtomicU64::new(0)),
            wake_armed: false,
            in_flight: 0,
            midway: false,
            direct: table > 0,
            install,
            peer_addresses: config.peer_addresses,
            draining: false,
            finished: false,
        };
        driver.arm_wake();
        let info = DriverInfo { features, warnings, direct: driver.direct };
        Ok((driver, info))
    }
}

impl Drop for UringDriver {
    fn drop(&mut self) {
        if !self.finished && self.end(Duration::from_secs(1)) > 0 {
            self.leak_ring();
        }
    }
}

impl Driver for UringDriver {
    type Listener = TcpListener;
    type Waker = UringWaker;

    fn memory(&self) -> &Memory {
        &self.memory
    }

    #[inline]
    fn now(&self) -> Time {
        self.now
    }

    fn clock(&self) -> Time {
        submit::clock()
    }

    fn waker(&self) -> UringWaker {
        self.waker.clone()
    }

    fn wake_peer(&mut self, peer: &UringWaker) {
        let known = self.peers.iter().position(|known| known.is(peer));
        let index = known.unwrap_or_else(|| {
            self.peers.push(peer.clone());
            self.peers.len() - 1
        });
        let arrival = encode(Kind::PeerWake, Key { slot: 0, generation: 0 });
        let failed = encode(Kind::PeerFailed, Key { slot: index as u32, generation: 0 });
        let entry = opcode::MsgRingData::new(types::Fd(peer.ring()), 0, arrival, None).build();
        let entry = entry.flags(Flags::SKIP_SUCCESS).user_data(failed);
        self.submission.push(&entry, &self.counters);
    }

    fn add_listener(&mut self, listener: TcpListener) -> io::Result<ListenerId> {
        self.listeners.add(listener.into())
    }

    fn multishot(&self) -> Multishot {
        match (self.multishot_accept, self.direct) {
            (false, _) => Multishot::Absent,
            (true, true) => Multishot::WithoutPeer,
            (true, false) => Multishot::WithPeer,
        }
    }

    fn accept(&mut self, listener: ListenerId, mode: AcceptMode) {
        match self.listeners.arm(listener, mode, self.direct) {
            Some(entry) => {
                self.in_flight += 1;
                self.submission.push(&entry, &self.counters);
            }
            None => self.ready.push_back(Event::AcceptFailed {
                listener,
                mode,
                error: io::Error::from_raw_os_error(libc::EBADF),
            }),
        }
    }

    fn cancel_accept(&mut self, listener: ListenerId) {
        for target in self.listeners.armed(listener) {
            let report = encode(Kind::Cancel, Key { slot: 0, generation: 0 });
            self.submission.cancel(target, report, &self.counters);
        }
    }

    fn remove_listener(&mut self, listener: ListenerId) {
        self.listeners.remove(listener);
    }

    fn adopt(&mut self, key: Key, socket: Socket) {
        self.passed(&socket);
        self.slots.open(key, socket.0);
    }

    fn discard(&mut self, socket: Socket) {
        self.passed(&socket);
        let reference = if self.direct { SocketRef::Fixed(socket.0 as u32) } else { SocketRef::Fd(socket.0) };
        let ignore = encode(Kind::Ignore, Key { slot: 0, generation: 0 });
        self.submission.close(reference, ignore, &self.counters);
    }

    fn connect(&mut self, key: Key, config: &ConnectConfig) -> io::Result<()> {
        let fd = sys::client(config)?;
        let target = RawAddress::from(config.target);
        if !self.direct {
            self.slots.open(key, fd.into_raw_fd());
            self.start_connect(key, target);
            return Ok(());
        }
        self.register(key, fd, Pending::Connect(target));
        Ok(())
    }

    fn connect_unix(&mut self, key: Key, target: &std::os::unix::net::SocketAddr) -> io::Result<()> {
        self.start_unix_connect(key, target)
    }

    fn listen(&mut self, config: &ListenConfig) -> io::Result<Listening> {
        let (socket, local, backlog) = sys::listen(config)?;
        Ok(Listening { id: self.listeners.add(socket)?, local, backlog })
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
        let slot = self.slots.open(key, fd.into_raw_fd());
        slot.plain = true;
        let one = config.local.as_ref().or(config.peer.as_ref());
        slot.serial = !matches!(one, Some(super::Address::Inet(_)));
        Ok(())
    }

    fn send_datagram(&mut self, key: Key, token: u32, datagram: Datagram) {
        self.begin_datagram(key, token, datagram);
    }

    fn recv(&mut self, key: Key) {
        self.arm_recv(key);
    }

    fn cancel_recv(&mut self, key: Key) {
        let Some(slot) = self.slots.get(key) else { return };
        if slot.ops.has(Ops::RECV) {
            slot.ops.insert(Ops::RECV_CANCELLED);
            self.cancel(self.recv_kind(), key, Kind::CancelRecv);
        }
    }

    #[inline]
    fn send(&mut self, key: Key, chain: Chain) {
        let direct = self.direct;
        let Some(slot) = self.slots.get(key) else {
            self.memory.chunks.clear(chain);
            return;
        };
        slot.ops.insert(Ops::SEND);
        slot.chain = chain;
        let socket = slot.socket(direct);
        self.in_flight += 1;
        let (chain, submission, counters) = (&slot.chain, &mut self.submission, &self.counters);
        // The bytes stay where they are until the completion, whatever happens to the slot: the chain
        // owns them and only this driver owns the chain (invariant 3).
        match self.memory.chunks.only(chain) {
            Some((bytes, len)) => submission.send(socket, key, bytes, len, counters),
            None => submission.send_vectored(
                socket,
                key,
                |each| self.memory.chunks.for_each(chain, each),
                counters,
            ),
        }
    }

    fn cancel_send(&mut self, key: Key) {
        let Some(slot) = self.slots.get(key) else { return };
        if slot.ops.has(Ops::SEND) {
            self.cancel(Kind::Send, key, Kind::Cancel);
        }
    }

    fn shutdown_write(&mut self, key: Key) {
        let direct = self.direct;
        let Some(slot) = self.slots.get(key) else { return };
        match slot.socket(direct) {
            // An error means that the connection is gone, which its receive reports.
            SocketRef::Fd(fd) => drop(sys::shutdown_write(fd)),
            // The kernel gives this to a thread of its own, which costs more; but a socket of the
            // table has no descriptor for the system call.
            SocketRef::Fixed(index) => {
                slot.ops.insert(Ops::SHUTDOWN);
                let entry = opcode::Shutdown::new(types::Fixed(index), libc::SHUT_WR).build();
                self.in_flight += 1;
                let entry = entry.user_data(encode(Kind::Shutdown, key));
                self.submission.push(&entry, &self.counters);
            }
        }
    }

    fn close(&mut self, key: Key, how: CloseHow) {
        let direct = self.direct;
        let Some(slot) = self.slots.get(key) else { return };
        if slot.closing {
            return;
        }
        slot.closing = true;
        let (ops, socket, plain) = (slot.ops, slot.socket, slot.plain);
        if plain {
            self.cancel_datagrams(key);
        } else if how == CloseHow::Reset && socket >= 0 && !ops.has(Ops::CONNECT) {
            slot.ops.insert(Ops::DISCONNECT);
            let reference = slot.socket(direct);
            self.in_flight += 1;
            let user_data = encode(Kind::Disconnect, key);
            self.submission.connect(reference, user_data, RawAddress::UNSPECIFIED, &self.counters);
        }
        let recv = self.recv_kind();
        for (op, kind) in [(Ops::RECV, recv), (Ops::SEND, Kind::Send), (Ops::CONNECT, Kind::Connect)] {
            if ops.has(op) {
                self.cancel(kind, key, Kind::Cancel);
            }
        }
        // A shutdown runs on a thread of the kernel's, which looks its socket up only there: were the
        // table's entry free by then, it could hit the next connection. So it comes to its end first.
        if !ops.has(Ops::SHUTDOWN) {
            self.close_socket(key);
        }
        if let Some(closed) = self.closed_if_done(key) {
            self.ready.push_back(closed);
        }
    }

    fn submit_and_wait(&mut self, wait: impl Into<Wait>) -> io::Result<()> {
        if let Some(buf_ring) = &mut self.buf_ring {
            buf_ring.lend(&self.memory.pool);
        }
        let began = submit::clock();
        self.counters.busy_ns.add(began.since(self.now).as_nanos() as u64);
        let wait = wait.into();
        let wait = if std::mem::take(&mut self.midway) { wait.for_one() } else { wait };
        let result = self.submission.wait(wait, &self.counters);
        self.now = submit::clock();
        self.counters.parked_ns.add(self.now.since(began).as_nanos() as u64);
        result
    }

    #[inline]
    fn next_event(&mut self) -> Option<Event> {
        self.next()
    }

    fn has_events(&self) -> bool {
        self.taken < self.entries.len() || !self.ready.is_empty() || self.submission.has_spill()
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn finish(mut self, patience: Duration) -> usize {
        let left = self.end(patience);
        if left > 0 {
            self.leak_ring();
        }
        left
    }
}

#[cfg(test)]
mod tests;
