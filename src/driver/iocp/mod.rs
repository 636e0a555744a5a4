//! I/O completion ports: overlapped operations on one port per worker, several packets a wait.
//!
//! | file | what is in it |
//! |---|---|
//! | `port.rs` | the completion port: waiting, posting, associating |
//! | `op.rs` | operation objects: what the kernel knows an operation by |
//! | `slots.rs` | the record of a connection |
//! | `socket.rs` | the system calls on a connection's socket |
//! | `ext.rs` | Winsock's extension functions; what of them is not used, and why |
//! | `control.rs` | listeners made at run time, addresses, options |
//! | `listeners.rs` | accepts, and the thread that forwards those of a shared listener |
//! | `datagram.rs` | datagram sockets |
//! | `submit.rs` | operations are started, cancelled and given up |
//! | `complete.rs` | packets → events |
//! | `error.rs` | what statuses mean |
//! | `waker.rs` | wake-ups |
//!
//! # Who owns what
//!
//! A connection has two operation objects, one for receiving and one for sending (and, before, connecting).
//! (Sends of datagrams have theirs in a table: `datagram.rs`.)
//! Each is idle or with the kernel, from the call that starts an operation until its **packet was taken
//! from the port**: not until it was cancelled, not until the socket was closed. Per direction:
//!
//! ```text
//!   receiving                                            sending
//!
//!   Idle ◄──────────────────────────┐                    Idle ◄───────────────────────────┐
//!    │ recv                         │                     │ send: the driver has the chain│
//!    ▼             packet: there    │ RecvEnded           ▼              packet           │ Sent
//!   Waiting ─────────────────────► Reading               Sending ──────────────────────►──┤
//!    ▲   │ done at once             │ │ Received*         │  │ done at once              │
//!    │   └──(after the next wait)──►┘ │                   │  └──(after the next wait)────►┘
//!    └────────────────────────────────┘ nothing more      └ close: Closing until the packet, then
//!                                                            the chain is dropped
//! ```
//!
//! | state | operation object | buffer | chain |
//! |---|---|---|---|
//! | Idle | driver | – | worker |
//! | Waiting (receive of **no bytes**) | kernel | none: an idle connection holds no memory | |
//! | Reading | driver | taken from the pool for the length of one `recv` call; a filled one is the `Buf` in `Received` | |
//! | Sending | kernel | | driver; the kernel reads it |
//! | done at once, not reported | driver | | driver |
//! | Closing | kernel, until each packet was taken | none | driver, until the send's packet was taken, then dropped |
//!
//! `Closed` is reported when both objects are idle; only then can the slot, and with it the objects, come to
//! serve another connection. So a late packet cannot reach one (promise 3); one that comes for an object
//! that is not in flight is counted (`stale`) and dropped all the same.
//!
//! # Fairness
//!
//! Operations that succeed at once bring no packet (`FILE_SKIP_COMPLETION_PORT_ON_SUCCESS`), which spares a
//! round through the port, and is the trap of that mode: a connection where there always is something
//! would keep the worker from ever looking at the port. Here what is done at once is noted and reported after
//! the next wait, which takes what has come to the port first; between two waits a connection reports at
//! most `PIECES` pieces of data and one send.
//!
//! # Counters
//!
//! `enters`: waits on the port. `sqes`: operations started, cancels and closes: a system call each. `cqes`:
//! packets taken, so fewer than operations where they succeed at once. `sq_full` and `cq_overflows` stay 0:
//! there is no queue that could be full.
//!
//! # Not built
//!
//! * Receiving directly into a buffer where data is always on its way would spare the receive of no bytes, one
//!   of three calls per message, and hold a buffer meanwhile: `start_recv` is where it would be decided.
//! * What of Winsock's extensions is left out is told in `ext.rs`.
//!
//! # What is different on other systems
//!
//! A wait's timeout ends with a tick of Windows' clock, every 15.6 ms unless a program has asked for a finer
//! one: timers may be that late. (A worker that is woken early waits again.)
//!
//! Wine ends the operations of a closed socket with `STATUS_HANDLES_CLOSED` instead of `STATUS_CANCELLED`:
//! both are cancels. Wine's server also takes the error of a reset off the socket, and the next receive finds
//! a plain end: under Wine an end is only believed of a connection that still has a peer.
//!
//! Wine's server also stops looking at a connected datagram socket that was told of an error (nobody is there): a
//! receive from it that has to wait does not end any more. What is there already is received.
//!
//! Windows may abort a stream of which a send was cancelled after a part was taken, since it cannot say what
//! is on its way; the next operation tells then.

mod complete;
mod control;
mod datagram;
mod error;
mod ext;
mod listeners;
mod op;
mod port;
mod slots;
mod socket;
mod submit;
mod waker;

pub(crate) use listeners::IocpListener;

use std::collections::VecDeque;
use std::io;
use std::os::windows::io::{AsRawSocket, IntoRawSocket, OwnedSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use windows_sys::Win32::System::IO::OVERLAPPED_ENTRY;

use crate::buffer::{Chain, Memory};
use crate::clock::Time;
use crate::config::{ConnectConfig, SocketOptions, WorkerConfig};
use crate::metrics::Counters;

use super::sys;
use super::{
    AcceptMode, Addresses, CloseHow, Datagram, DatagramConfig, Driver, DriverInfo, Event, Feature, Key,
    ListenConfig, ListenerId, Listening, Multishot, Native, SetupError, Socket, Wait,
};

use datagram::DatagramOps;
use ext::Extensions;
use listeners::Listeners;
use op::OpTable;
use port::Port;
use slots::{Ops, Slots};
use waker::IocpWaker;

/// Packets taken from the port at a time.
const BATCH: usize = 256;

/// Pieces of data that one connection reports between two waits.
const PIECES: u8 = 16;

/// What is to be done without a packet.
#[derive(Clone, Copy, Debug)]
enum Work {
    /// There is something to receive.
    Read(Key),
    /// A send is done.
    Sent(Key),
    /// A connect is done.
    Connected(Key),
    /// A datagram's send is done: the name of its object.
    DatagramSent(Key),
}

/// A worker's completion port.
pub(crate) struct IocpDriver {
    port: Arc<Port>,
    memory: Memory,
    counters: Arc<Counters>,
    slots: Slots,
    ops: OpTable,
    datagrams: DatagramOps,
    listeners: Listeners,
    /// Accepted sockets between `Accepted` and `adopt` or `discard`: kept here, so that they are closed with
    /// the driver if it comes to neither (a handler panicked).
    passing: VecDeque<OwnedSocket>,
    /// For IPv4 and for IPv6, where there are sockets of it.
    extensions: [Option<Extensions>; 2],
    /// Operations that succeed at once bring no packet.
    skip: bool,
    /// The system is Wine's.
    wine: bool,
    /// Packets, how many of them there are, and how many of those are translated.
    entries: Box<[OVERLAPPED_ENTRY]>,
    filled: usize,
    taken: usize,
    /// Events that no packet brings.
    ready: VecDeque<Event>,
    /// What is to be done before the next wait, in turn.
    work: VecDeque<Work>,
    /// What is to be done after the next wait.
    later: VecDeque<Work>,
    /// Waits so far.
    waits: u64,
    /// When the last wait ended.
    now: Time,
    in_flight: usize,
    peer_addresses: bool,
    /// The driver is ending.
    draining: bool,
    finished: bool,
}

impl IocpDriver {
    /// Cancels everything and takes packets until the kernel holds nothing, or `patience` is over.
    /// Connections must have been closed by now; those that were not (the worker panicked) are closed here.
    /// Returns the number of operations left.
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
        loop {
            while let Some(event) = self.next() {
                match event {
                    Event::Accepted { socket, .. } => self.discard(socket),
                    Event::Sent { chain, .. } => self.memory.chunks.clear(chain),
                    _ => {}
                }
            }
            let left = until.saturating_duration_since(Instant::now());
            if self.in_flight == 0 || left.is_zero() || self.harvest(Some(left)).is_err() {
                return self.in_flight;
            }
        }
    }

    /// Drains, then leaks what the kernel still holds.
    fn end(&mut self, patience: Duration) -> usize {
        // A drain that did not come to its end (it panicked) is not begun again.
        let left = if self.draining { self.in_flight.max(1) } else { self.drain(patience) };
        self.finished = true;
        if left > 0 {
            // Memory that the kernel may still write or read is never freed (promises 1 and 2). The accepts'
            // objects keep this port, and their listeners the threads that forward to it.
            self.memory.leak();
            std::mem::forget(std::mem::take(&mut self.ops));
            std::mem::forget(std::mem::take(&mut self.datagrams));
            std::mem::forget(std::mem::take(&mut self.listeners));
            std::mem::forget(std::mem::replace(&mut self.slots, Slots::new(0)));
            std::mem::forget(Arc::clone(&self.port));
        }
        left
    }

    /// An accepted socket has found its place.
    fn passed(&mut self, socket: &Socket) -> Option<OwnedSocket> {
        // The oldest goes first, unless it waits for a permit; so this looks at few.
        let handle = socket.handle() as std::os::windows::io::RawSocket;
        let found = self.passing.iter().position(|passing| passing.as_raw_socket() == handle)?;
        self.passing.remove(found)
    }

    /// Takes packets; waits for the first one if there is nothing else to do.
    fn harvest(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let busy = self.has_events() || !self.later.is_empty();
        let timeout = if busy { Some(Duration::ZERO) } else { timeout };
        // What was not taken yet comes first; there is no room behind it.
        if self.taken == self.filled {
            self.taken = 0;
            self.filled = 0;
            self.counters.enters.add(1);
            self.filled = self.port.wait(&mut self.entries, timeout)?;
        }
        self.waits += 1;
        self.work.append(&mut self.later);
        Ok(())
    }

    /// Takes what is there, waiting as it is told since `began`: looking first, or, once something is there, for more
    /// to come, in the whole milliseconds that this system sleeps for.
    fn harvest_as(&mut self, wait: Wait, began: Time) -> io::Result<()> {
        let busy = self.has_events() || !self.later.is_empty();
        if busy || wait.is_look() {
            return self.harvest(Some(Duration::ZERO));
        }
        let spin = wait.spin();
        while Time::now().since(began) < spin {
            self.harvest(Some(Duration::ZERO))?;
            if self.has_events() {
                return Ok(());
            }
        }
        self.harvest(wait.less(Time::now().since(began)).timeout)?;
        let gather = wait.gather().saturating_sub(Time::now().since(began)).as_millis() as u64;
        if gather > 0 && self.has_events() {
            // What comes meanwhile is taken by the next wait, which finds it there.
            std::thread::sleep(Duration::from_millis(gather));
        }
        Ok(())
    }
}

/// What is said of the driver where a runtime is asked what it runs on.
fn features(skip: bool) -> Vec<Feature> {
    let why = if skip {
        "operations that succeed at once bring no packet"
    } else {
        "a layered provider stands between Winsock and the kernel, so every operation brings a packet: a few \
         microseconds more each"
    };
    vec![
        Feature { name: "SKIP_COMPLETION_PORT_ON_SUCCESS", on: skip, why: why.to_owned() },
        Feature {
            name: "ZERO_BYTE_RECV",
            on: true,
            why: "a connection that waits for data holds no buffer".to_owned(),
        },
        Feature {
            name: "TF_REUSE_SOCKET",
            on: false,
            why: "not built: reused sockets stay bound to one worker's port and may wait minutes in TIME_WAIT; a \
                  new socket per connection instead"
                .to_owned(),
        },
        Feature {
            name: "RIO",
            on: false,
            why: "not built: registered I/O has no accept of its own; ordinary overlapped operations instead"
                .to_owned(),
        },
    ]
}

impl Native for IocpDriver {
    fn open(
        config: &WorkerConfig,
        counters: Arc<Counters>,
        _memlock: Option<u64>,
    ) -> Result<(Self, DriverInfo), SetupError> {
        let failed = |what| move |source| SetupError::Os { what, source };
        let memory = Memory::new(&config.buffers)?;
        let port = Port::new().map_err(failed("making a completion port"))?;
        let v4 = Extensions::load(false).map_err(failed("asking Winsock for its extension functions"))?;
        // Without IPv6 its addresses are refused when they are used.
        let v6 = Extensions::load(true).ok();
        let skip = v4.ifs && v6.is_none_or(|v6| v6.ifs);
        let mut warnings = Vec::new();
        if config.timer_slack.is_some() {
            warnings.push("timer_slack is ignored: Windows has no such setting of a thread".to_owned());
        }
        let mut features = features(skip);
        if config.wait.may_gather() {
            let why = "once it was woken the worker sleeps for the rest of the delay, in whole milliseconds";
            features.push(Feature { name: "MIN_WAIT", on: false, why: why.to_owned() });
        }
        let driver = Self {
            port: Arc::new(port),
            memory,
            counters,
            slots: Slots::new(config.max_connections),
            ops: OpTable::default(),
            datagrams: DatagramOps::default(),
            listeners: Listeners::default(),
            passing: VecDeque::new(),
            extensions: [Some(v4), v6],
            skip,
            wine: sys::kernel_version().contains("wine"),
            entries: vec![OVERLAPPED_ENTRY::default(); BATCH].into_boxed_slice(),
            filled: 0,
            taken: 0,
            ready: VecDeque::with_capacity(16),
            work: VecDeque::with_capacity(2 * BATCH),
            later: VecDeque::with_capacity(2 * BATCH),
            waits: 0,
            now: Time::now(),
            in_flight: 0,
            peer_addresses: config.peer_addresses,
            draining: false,
            finished: false,
        };
        Ok((driver, DriverInfo { features, warnings, direct: false }))
    }
}

impl Drop for IocpDriver {
    fn drop(&mut self) {
        if !self.finished {
            self.end(Duration::from_secs(1));
        }
    }
}

impl Driver for IocpDriver {
    type Listener = IocpListener;
    type Waker = IocpWaker;

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

    fn waker(&self) -> IocpWaker {
        IocpWaker::new(&self.port)
    }

    fn add_listener(&mut self, listener: IocpListener) -> io::Result<ListenerId> {
        self.listeners.add(listener, &self.port)
    }

    fn multishot(&self) -> Multishot {
        Multishot::Absent
    }

    fn accept(&mut self, listener: ListenerId, mode: AcceptMode) {
        self.start_accept(listener, mode);
    }

    fn cancel_accept(&mut self, listener: ListenerId) {
        self.counters.sqes.add(self.listeners.cancel(listener));
    }

    fn remove_listener(&mut self, listener: ListenerId) {
        self.listeners.remove(listener);
    }

    fn adopt(&mut self, key: Key, socket: Socket) {
        if let Some(passed) = self.passed(&socket) {
            // Closed by `close` from now on.
            let _ = passed.into_raw_socket();
        }
        self.open_accepted(key, &socket);
    }

    fn discard(&mut self, socket: Socket) {
        self.counters.sqes.add(1);
        drop(self.passed(&socket));
    }

    fn connect(&mut self, key: Key, config: &ConnectConfig) -> io::Result<()> {
        self.start_connect(key, config)
    }

    fn open_datagram(&mut self, key: Key, config: &DatagramConfig) -> io::Result<()> {
        self.open_datagrams(key, config)
    }

    fn send_datagram(&mut self, key: Key, token: u32, datagram: Datagram) {
        self.begin_datagram(key, token, datagram);
    }

    fn listen(&mut self, config: &ListenConfig) -> io::Result<Listening> {
        self.begin_listening(config)
    }

    fn addresses(&mut self, key: Key) -> io::Result<Addresses> {
        self.with_socket(key, control::addresses)
    }

    fn set_options(&mut self, key: Key, options: &SocketOptions) -> io::Result<()> {
        let is_datagram = self.slots.usable(key).is_some_and(|slot| slot.datagram);
        self.with_socket(key, |socket| match is_datagram {
            true => sys::datagram::set_options(socket.as_raw_socket(), options),
            false => sys::set_options_of_open(socket.as_raw_socket(), options),
        })
    }

    #[inline]
    fn recv(&mut self, key: Key) {
        self.start_recv(key);
    }

    fn cancel_recv(&mut self, key: Key) {
        self.stop_recv(key);
    }

    #[inline]
    fn send(&mut self, key: Key, chain: Chain) {
        self.start_send(key, chain);
    }

    fn cancel_send(&mut self, key: Key) {
        self.stop_send(key);
    }

    fn shutdown_write(&mut self, key: Key) {
        if let Some(slot) = self.slots.usable(key) {
            slot.ops.insert(Ops::SHUT);
            // An error means that the connection is gone, which its receive reports.
            let _ = sys::shutdown_write(slot.socket as std::os::windows::io::RawSocket);
        }
    }

    fn close(&mut self, key: Key, how: CloseHow) {
        self.begin_close(key, how);
    }

    fn submit_and_wait(&mut self, wait: impl Into<Wait>) -> io::Result<()> {
        let began = Time::now();
        self.counters.busy_ns.add(began.since(self.now).as_nanos() as u64);
        let result = self.harvest_as(wait.into(), began);
        self.now = Time::now();
        self.counters.parked_ns.add(self.now.since(began).as_nanos() as u64);
        result
    }

    #[inline]
    fn next_event(&mut self) -> Option<Event> {
        self.next()
    }

    fn has_events(&self) -> bool {
        self.taken < self.filled || !self.ready.is_empty() || !self.work.is_empty()
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn finish(mut self, patience: Duration) -> usize {
        self.end(patience)
    }
}

#[cfg(test)]
mod tests;
