//! The kernel's side of one ring: what is in it, and when the thread that waits on it has something to do. What
//! happens in it is in `operate.rs`.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::event::{AcceptMode, CloseHow, Key, ListenerId, Socket};
use super::super::{Datagram, Wait};
use super::control::Number;
use super::tcp::Sock;
use crate::buffer::{Buf, BufMut, Chain, Memory};
use crate::clock::Time;
use crate::config::{Descriptors, WorkerConfig};
use crate::metrics::Counters;

/// What a submission asks for.
#[derive(Debug)]
pub(crate) enum Sqe {
    Start(u64),
    Cancel(u64),
    CancelAccept(u32),
    Shutdown(Sock),
    Close(Key),
    Discard(Sock),
    Unlisten(u32),
}

#[derive(Debug)]
pub(crate) enum Kind {
    Accept { listener: u32, id: ListenerId, mode: AcceptMode },
    Recv { key: Key, sock: Sock },
    Send { key: Key, sock: Sock, chain: Chain, taken: u64 },
    Connect { key: Key, sock: Sock },
    SendDatagram { key: Key, sock: Sock, token: u32, datagram: Option<Datagram> },
}

/// An operation that the kernel has.
#[derive(Debug)]
pub(crate) struct Op {
    pub(crate) kind: Kind,
    /// Its turn in `work` is noted.
    pub(crate) queued: bool,
    pub(crate) cancelling: bool,
    /// It ignores its cancel.
    pub(crate) stuck: bool,
    /// A polled receive has found its socket readable.
    pub(crate) polled: bool,
}

/// How a ring receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Receiving {
    /// One operation for all data.
    Multishot,
    /// One operation for each piece; the kernel picks the buffer.
    Once,
    /// One operation for all data, but the driver takes the buffers, and only when there is
    /// something to receive: readiness kernels and Windows.
    Ready,
    /// One operation for each piece: a poll first, then a receive into a buffer of the driver's.
    Polled,
}

/// What a ring can do and how much it holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) sq_entries: usize,
    pub(crate) cq_entries: usize,
    pub(crate) multishot_accept: bool,
    pub(crate) receiving: Receiving,
    /// Entries of the descriptor table; `None` when sockets are ordinary descriptors.
    pub(crate) table: Option<usize>,
    /// Where its outgoing connections come from; `None`: from anywhere.
    pub(crate) host: Option<IpAddr>,
    pub(crate) max_connections: u64,
}

/// Entries of a descriptor table beyond one for each connection, as the io_uring driver has them.
const TABLE_RESERVE: usize = 64;

impl Shape {
    pub(crate) fn new(config: &WorkerConfig, host: Option<IpAddr>) -> Self {
        let receiving = match (config.uring.provided_buffers, config.uring.multishot_recv) {
            (true, true) => Receiving::Multishot,
            (true, false) => Receiving::Once,
            (false, true) => Receiving::Ready,
            (false, false) => Receiving::Polled,
        };
        let direct = config.descriptors == Descriptors::Direct;
        Self {
            sq_entries: config.sq_entries as usize,
            cq_entries: config.cq_entries as usize,
            multishot_accept: config.uring.multishot_accept,
            receiving,
            table: direct.then_some(config.max_connections as usize + TABLE_RESERVE),
            host,
            max_connections: config.max_connections.into(),
        }
    }
}

/// Completions that keep their order: those of one kind of one connection or listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Lane {
    kind: u64,
    slot: u32,
    generation: u32,
}

/// The completions of a lane that are held back.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) count: u32,
    /// When the last of them becomes visible.
    pub(crate) last: Time,
}

/// Buffers that are kept from a worker for a time.
#[derive(Debug)]
pub(crate) struct Hold {
    pub(crate) id: u64,
    pub(crate) recv: Vec<Buf>,
    pub(crate) send: Vec<BufMut>,
}

/// Why a receive ended, in a completion.
#[derive(Clone, Copy, Debug)]
pub(crate) enum End {
    Eof,
    NoBuffer,
    Stopped,
    Error(i32),
}

/// A completion.
#[derive(Debug)]
pub(crate) enum Cqe {
    Accepted { id: ListenerId, socket: Socket, peer: SocketAddr, mode: AcceptMode, armed: bool },
    AcceptFailed { id: ListenerId, mode: AcceptMode, error: i32 },
    Data { key: Key, buf: Buf, armed: bool },
    RecvEnded { key: Key, end: End },
    Sent { key: Key, chain: Chain, result: Result<u64, i32> },
    Connected { key: Key, result: Result<(), i32> },
    DatagramSent { key: Key, token: u32, result: Result<usize, i32> },
    Closed { key: Key },
    Woken,
}

impl Cqe {
    pub(crate) fn lane(&self) -> Option<Lane> {
        let of = |kind, key: &Key| Lane { kind, slot: key.slot, generation: key.generation };
        let accept = |id: &ListenerId| Lane { kind: 0, slot: id.0.into(), generation: 0 };
        match self {
            Self::Accepted { id, .. } | Self::AcceptFailed { id, .. } => Some(accept(id)),
            Self::Sent { key, .. } => Some(of(1, key)),
            Self::Connected { key, .. } => Some(of(2, key)),
            // Each by itself: those of one socket may overtake each other.
            Self::DatagramSent { key, token, .. } => Some(of(3 + u64::from(*token), key)),
            // What is received late was taken late: see `wake_op`.
            Self::Data { .. } | Self::RecvEnded { .. } | Self::Closed { .. } | Self::Woken => None,
        }
    }
}

/// A connection as its driver knows it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Slot {
    pub(crate) generation: u32,
    pub(crate) phase: Phase,
    /// Operations whose last completion the driver has not taken.
    pub(crate) ops: u32,
    pub(crate) recv: Option<u64>,
    pub(crate) send: Option<u64>,
    pub(crate) connect: Option<u64>,
    /// Datagrams among the operations.
    pub(crate) datagrams: u32,
    /// Its socket has no entry in the descriptor table.
    pub(crate) no_entry: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    #[default]
    Vacant,
    Open(Sock),
    /// Close was asked for; the socket lives until the kernel has no operation on it.
    Closing(Option<Sock>, CloseHow),
}

pub(crate) struct Ring {
    pub(crate) memory: Memory,
    pub(crate) counters: Arc<Counters>,
    pub(crate) shape: Shape,
    pub(crate) sq: Vec<Sqe>,
    pub(crate) cq: VecDeque<Cqe>,
    /// Completions that are held back, by lane.
    pub(crate) held: BTreeMap<Lane, Held>,
    /// Operations that go on at the next wait.
    pub(crate) work: VecDeque<u64>,
    pub(crate) ops: BTreeMap<u64, Op>,
    pub(crate) slots: Vec<Slot>,
    /// The world's listeners, by [`ListenerId`].
    pub(crate) listeners: Vec<Number>,
    /// Accepted, not adopted.
    pub(crate) loose: BTreeMap<i32, Sock>,
    pub(crate) next_socket: i32,
    /// When the last wait would have ended without a completion.
    pub(crate) wait_until: Option<Time>,
    /// Until when, and for how many completions, the wait goes on although there are some.
    pub(crate) gather: (Time, u32),
    /// It does go on: what is there is not to be seen yet.
    pub(crate) gathering: bool,
    /// A receive of two steps has taken the first.
    pub(crate) midway: bool,
    /// The last wait found nothing: its thread sleeps.
    pub(crate) asleep: bool,
    pub(crate) woken: Arc<AtomicBool>,
    /// Operations whose last completion the driver has not taken.
    pub(crate) in_flight: usize,
    /// Sockets that have an entry in the descriptor table.
    pub(crate) sockets: usize,
    pub(crate) holds: Vec<Hold>,
    /// Its driver has ended.
    pub(crate) gone: bool,
}

impl Ring {
    pub(crate) fn new(memory: Memory, counters: Arc<Counters>, shape: Shape) -> Self {
        Self {
            memory,
            counters,
            shape,
            sq: Vec::new(),
            cq: VecDeque::new(),
            held: BTreeMap::new(),
            work: VecDeque::new(),
            ops: BTreeMap::new(),
            slots: Vec::new(),
            listeners: Vec::new(),
            loose: BTreeMap::new(),
            next_socket: 0,
            wait_until: None,
            gather: (Time::ZERO, 1),
            gathering: false,
            midway: false,
            asleep: false,
            woken: Arc::default(),
            in_flight: 0,
            sockets: 0,
            holds: Vec::new(),
            gone: false,
        }
    }

    /// Whether the descriptor table has no entry for another socket.
    pub(crate) fn is_table_full(&self) -> bool {
        self.shape.table.is_some_and(|entries| self.sockets >= entries)
    }

    /// Buffers that a fault keeps from the worker.
    pub(crate) fn buffers_held(&self) -> usize {
        self.holds.iter().map(|hold| hold.recv.len() + hold.send.len()).sum()
    }

    /// What is not as it must be at any time. Cheap: it is asked after every step.
    pub(crate) fn violation(&self) -> Option<&'static str> {
        let counters = &self.counters;
        if self.gone {
            None
        } else if counters.stale.get() > 0 {
            Some("a completion reached a connection of another generation")
        } else if !self.memory.pool.is_balanced() {
            Some("a buffer is in two hands, or in none")
        } else if counters.connections.get() > self.shape.max_connections {
            Some("there are more connections than its table holds")
        } else if self.ops.len() > self.in_flight {
            Some("an operation is not counted")
        } else {
            None
        }
    }

    /// Accept operations that are armed.
    pub(crate) fn accepts(&self) -> usize {
        self.ops.values().filter(|op| matches!(op.kind, Kind::Accept { .. })).count()
    }

    /// Whether the thread that waits on this ring has something to do at `now`.
    pub(crate) fn is_due(&self, now: Time) -> bool {
        let (until, batch) = self.gather;
        let found = self.found();
        !self.asleep
            || !self.sq.is_empty()
            || found >= batch as usize
            || found > 0 && until <= now
            || self.wait_until.is_some_and(|until| until <= now)
    }

    /// Notes for how long, and for how many completions, a wait goes on although there are some. Here every turn
    /// enters anew; if the last one left the thread asleep, this is still the wait that it began.
    pub(crate) fn gather(&mut self, now: Time, wait: &Wait, still: bool) {
        let found = self.found();
        if !still || found == 0 {
            self.gather = (now + wait.gather(), wait.batch);
        }
        let (until, batch) = self.gather;
        self.gathering = found > 0 && found < batch as usize && now < until && !wait.is_look();
        self.asleep |= self.gathering;
    }

    /// When that thread will have something to do, whatever else happens; `None`: perhaps never.
    pub(crate) fn alarm(&self) -> Option<Time> {
        let gathered = (self.found() > 0).then_some(self.gather.0);
        self.wait_until.into_iter().chain(gathered).min()
    }

    /// What a wait would find.
    fn found(&self) -> usize {
        self.cq.len() + self.work.len() + usize::from(self.woken.load(Ordering::Acquire))
    }

    pub(crate) fn slot_mut(&mut self, key: Key) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(key.slot as usize)?;
        (slot.generation == key.generation).then_some(slot)
    }
}
