//! The kernel's side of one ring: submissions, operations, task work, completions.
//!
//! ```text
//!   start ──► sq ──(wait)──► issued ──► waits on its socket ──(woken)──► work ──(wait)──► cq
//!                              └──────────── done at once ─────────────────────────────────┘
//! ```
//!
//! An operation is in `ops` from its start to its last completion; that is the time in which the
//! kernel may touch its memory. Its number is never used again, so whatever still refers to it
//! later (an agenda entry, a cancel) finds nothing.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::event::{AcceptMode, CloseHow, Key, ListenerId, Socket};
use super::super::{Datagram, Wait};
use super::control::Number;
use super::errno;
use super::script::{Place, Strike};
use super::tcp::{Io, Sock};
use super::world::{Action, World};
use crate::buffer::{Buf, BufMut, Chain, Memory};
use crate::clock::Time;
use crate::config::{Descriptors, WorkerConfig};
use crate::metrics::Counters;

/// Task work that one wait runs, as measured on Linux 6.18: the rest has to wait for the next.
const WORK_PER_WAIT: usize = 20;

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
    count: u32,
    /// When the last of them becomes visible.
    last: Time,
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
    fn lane(&self) -> Option<Lane> {
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

impl World {
    /// Notes a started operation; its number.
    pub(crate) fn start(&mut self, ring: usize, kind: Kind) -> u64 {
        self.make_room(ring);
        let op = self.fresh();
        let ring = &mut self.rings[ring];
        ring.ops.insert(op, Op { kind, queued: false, cancelling: false, stuck: false, polled: false });
        ring.sq.push(Sqe::Start(op));
        ring.in_flight += 1;
        op
    }

    /// Notes a submission that is not an operation of its own.
    pub(crate) fn push(&mut self, ring: usize, sqe: Sqe) {
        self.make_room(ring);
        self.rings[ring].sq.push(sqe);
    }

    /// Gives a full submission queue to the kernel, which takes it without doing more.
    pub(crate) fn make_room(&mut self, ring: usize) {
        let this = &self.rings[ring];
        if this.sq.len() >= this.shape.sq_entries {
            this.counters.sq_full.add(1);
            self.submit(ring);
        }
    }

    fn submit(&mut self, ring: usize) {
        let submissions = std::mem::take(&mut self.rings[ring].sq);
        let counters = &self.rings[ring].counters;
        counters.enters.add(1);
        counters.sqes.add(submissions.len() as u64);
        for sqe in submissions {
            self.issue(ring, sqe);
        }
    }

    /// One `io_uring_enter`: takes the submissions, runs task work, says whether it found anything.
    pub(crate) fn enter(&mut self, ring: usize, until: Option<Time>) {
        self.submit(ring);
        // What is put back while this runs has to wait for the next time: that is what keeps one
        // busy connection from hiding the others.
        let mut left = self.rings[ring].work.len().min(WORK_PER_WAIT);
        while left > 0 {
            left -= 1;
            // Wake-ups of different sockets may come in another order than the data.
            let near = self.rings[ring].work.len().min(left + 1).min(4) as u64;
            let pick = if self.rng.one_in(4) { self.rng.below(near) as usize } else { 0 };
            let Some(op) = self.rings[ring].work.remove(pick) else { break };
            if let Some(op) = self.rings[ring].ops.get_mut(&op) {
                op.queued = false;
            }
            self.run(ring, op);
        }
        let ring = &mut self.rings[ring];
        if ring.woken.swap(false, Ordering::AcqRel) {
            ring.cq.push_back(Cqe::Woken);
        }
        ring.asleep = ring.cq.is_empty() && ring.work.is_empty();
        ring.wait_until = until;
    }

    fn issue(&mut self, ring: usize, sqe: Sqe) {
        match sqe {
            Sqe::Start(op) => self.begin(ring, op),
            Sqe::Cancel(op) => self.cancel(ring, op),
            Sqe::CancelAccept(listener) => {
                let armed: Vec<u64> = match self.listeners.get(&listener) {
                    Some(listener) => listener.waiting.iter().filter(|w| w.0 == ring).map(|w| w.1).collect(),
                    None => Vec::new(),
                };
                for op in armed {
                    self.cancel(ring, op);
                }
            }
            Sqe::Shutdown(sock) => self.shutdown(sock),
            Sqe::Close(key) => self.begin_close(ring, key),
            Sqe::Discard(sock) => {
                self.rings[ring].sockets -= 1;
                self.close_sock(sock, false);
            }
            Sqe::Unlisten(listener) => self.leave_listener(listener),
        }
    }

    /// The first attempt of an operation, in the submission itself.
    fn begin(&mut self, ring: usize, id: u64) {
        let Some(op) = self.rings[ring].ops.get(&id) else { return };
        match op.kind {
            Kind::Accept { listener, .. } => {
                if let Some(listener) = self.listeners.get_mut(&listener) {
                    listener.waiting.push_back((ring, id));
                }
                self.run(ring, id);
            }
            Kind::Recv { sock, .. } => {
                self.set_reader(sock, Some((ring, id)));
                self.run(ring, id);
            }
            Kind::Send { sock, .. } => {
                self.set_writer(sock, Some((ring, id)));
                self.run_soon(ring, id);
            }
            Kind::SendDatagram { .. } => self.run_soon(ring, id),
            Kind::Connect { key, sock } => self.begin_connect(ring, id, key, sock),
        }
    }

    fn run_soon(&mut self, ring: usize, op: u64) {
        if self.rng.one_in(4) {
            // Not at once, as when the kernel hands it to another thread.
            let delay = self.rng.between(0, 20_000);
            self.schedule_in(delay, Action::Run { ring, op });
        } else {
            self.run(ring, op);
        }
    }

    /// Lets an operation go on at its ring's next wait; a receive perhaps later. Nothing has been taken
    /// from its socket then: a late receive is late data, not data in a buffer that nobody sees.
    pub(crate) fn wake_op(&mut self, ring: usize, id: u64) {
        let Some(op) = self.rings[ring].ops.get_mut(&id).filter(|op| !op.queued) else { return };
        op.queued = true;
        if let Kind::Recv { sock, .. } = op.kind {
            let place = Place::conn(ring, sock.conn);
            let (late, by) = (self.settings.faults.late_completion, self.settings.faults.late_by);
            if let Some(delay) = self.strikes_for(Strike::LateCompletion, place, late, by) {
                self.schedule(self.now + delay, Action::Late { ring, op: id });
                return;
            }
        }
        self.rings[ring].work.push_back(id);
    }

    /// An operation whose turn was put off has it.
    pub(crate) fn wake_late(&mut self, ring: usize, id: u64) {
        let ring = &mut self.rings[ring];
        if ring.ops.contains_key(&id) {
            ring.work.push_back(id);
        }
    }

    fn begin_connect(&mut self, ring: usize, id: u64, key: Key, sock: Sock) {
        if self.rings[ring].slots.get(key.slot as usize).is_some_and(|slot| slot.no_entry) {
            return self.connected(ring, id, key, Err(errno::ENFILE));
        }
        let place = Place::conn(ring, sock.conn);
        if self.strikes(Strike::Unreachable, place, self.settings.faults.unreachable) {
            let error = if self.rng.one_in(2) { errno::EHOSTUNREACH } else { errno::ENETUNREACH };
            return self.connected(ring, id, key, Err(error));
        }
        if let Some(error) = self.refused_at_once(sock) {
            return self.connected(ring, id, key, Err(error));
        }
        self.set_writer(sock, Some((ring, id)));
        self.send_syn(sock);
    }

    pub(crate) fn run(&mut self, ring: usize, id: u64) {
        let Some(op) = self.rings[ring].ops.get(&id) else { return };
        match op.kind {
            Kind::Accept { listener, id: lid, mode } => {
                self.run_accept(ring, id, listener, lid, mode);
            }
            Kind::Recv { key, sock } => self.run_recv(ring, id, key, sock),
            Kind::Send { key, sock, .. } => self.run_send(ring, id, key, sock),
            Kind::SendDatagram { .. } => self.run_send_datagram(ring, id),
            Kind::Connect { key, sock } => match self.connecting(sock) {
                Io::WouldBlock => {}
                Io::Error(error) => self.connected(ring, id, key, Err(error)),
                Io::Ready(_) | Io::Eof => self.connected(ring, id, key, Ok(())),
            },
        }
    }

    pub(crate) fn connected(&mut self, ring: usize, id: u64, key: Key, result: Result<(), i32>) {
        self.end_op(ring, id, Cqe::Connected { key, result });
    }

    // ---- ends

    /// The kernel lets go of an operation and reports its last completion.
    pub(crate) fn end_op(&mut self, ring: usize, id: u64, cqe: Cqe) {
        let conn = self.conn_of(ring, id);
        self.drop_op(ring, id);
        self.post_of(ring, conn, cqe);
    }

    /// The connection that an operation is for.
    pub(crate) fn conn_of(&self, ring: usize, id: u64) -> Option<u64> {
        match self.rings[ring].ops.get(&id)?.kind {
            Kind::Recv { sock, .. }
            | Kind::Send { sock, .. }
            | Kind::Connect { sock, .. }
            | Kind::SendDatagram { sock, .. } => Some(sock.conn),
            Kind::Accept { .. } => None,
        }
    }

    pub(crate) fn drop_op(&mut self, ring: usize, id: u64) {
        let Some(op) = self.rings[ring].ops.remove(&id) else { return };
        match op.kind {
            Kind::Accept { listener: index, .. } => {
                if let Some(listener) = self.listeners.get_mut(&index) {
                    listener.waiting.retain(|waiting| *waiting != (ring, id));
                }
                // Who is next shall not sleep beside a queue that this one left.
                self.wake_acceptors(index);
            }
            Kind::Recv { key, sock } => {
                self.set_reader(sock, None);
                self.release_if_idle(ring, key);
            }
            Kind::Send { key, sock, chain, .. } => {
                // The chain was moved into the completion, unless the ring is being torn down.
                self.rings[ring].memory.chunks.clear(chain);
                self.set_writer(sock, None);
                self.release_if_idle(ring, key);
            }
            Kind::Connect { key, sock } => {
                self.set_writer(sock, None);
                self.release_if_idle(ring, key);
            }
            Kind::SendDatagram { key, .. } => self.release_if_idle(ring, key),
        }
    }

    pub(crate) fn post(&mut self, ring: usize, cqe: Cqe) {
        self.rings[ring].cq.push_back(cqe);
    }

    /// Reports a completion of a connection's or a listener's operation: at once, unless it is late,
    /// or one of its lane is.
    pub(crate) fn post_of(&mut self, ring: usize, conn: Option<u64>, cqe: Cqe) {
        let Some(lane) = cqe.lane() else { return self.post(ring, cqe) };
        let place = Place { ring: Some(ring), conn };
        let (late, by) = (self.settings.faults.late_completion, self.settings.faults.late_by);
        let delay = self.strikes_for(Strike::LateCompletion, place, late, by);
        let now = self.now;
        let before = self.rings[ring].held.get(&lane).map(|held| held.last);
        if delay.is_none() && before.is_none() {
            return self.post(ring, cqe);
        }
        let at = (now + delay.unwrap_or_default()).max(before.unwrap_or_default());
        let held = self.rings[ring].held.entry(lane).or_insert(Held { count: 0, last: at });
        held.count += 1;
        held.last = at;
        self.schedule(at, Action::Post { ring, lane, cqe });
    }

    /// A completion that was held back becomes visible.
    pub(crate) fn post_late(&mut self, ring: usize, lane: Lane, cqe: Cqe) {
        let this = &mut self.rings[ring];
        if let Some(held) = this.held.get_mut(&lane) {
            held.count -= 1;
            if held.count == 0 {
                this.held.remove(&lane);
            }
        }
        match cqe {
            Cqe::Sent { chain, .. } if this.gone => this.memory.chunks.clear(chain),
            _ if this.gone => {}
            cqe => self.post(ring, cqe),
        }
    }

    // ---- the end

    /// Closes every socket of a ring whose driver is gone. Operations that are left keep their
    /// memory, as in a kernel that has not finished with them, but find no socket any more.
    pub(crate) fn tear_down(&mut self, ring: usize) {
        self.release_buffers(ring, None);
        let this = &mut self.rings[ring];
        this.gone = true;
        this.sq.clear();
        let mut socks: Vec<Sock> = std::mem::take(&mut this.loose).into_values().collect();
        for slot in std::mem::take(&mut this.slots) {
            if let Phase::Open(sock) | Phase::Closing(Some(sock), _) = slot.phase {
                socks.push(sock);
            }
        }
        for cqe in std::mem::take(&mut this.cq) {
            if let Cqe::Sent { chain, .. } = cqe {
                this.memory.chunks.clear(chain);
            }
        }
        for sock in socks {
            self.close_sock(sock, false);
        }
        for id in std::mem::take(&mut self.rings[ring].listeners).into_iter().filter_map(|n| n.listener) {
            if let Some(listener) = self.listeners.get_mut(&id) {
                listener.waiting.retain(|waiting| waiting.0 != ring);
            }
            self.leave_listener(id);
        }
    }

    fn leave_listener(&mut self, id: u32) {
        let Some(listener) = self.listeners.get_mut(&id) else { return };
        listener.users -= 1;
        if listener.users == 0 {
            self.unlisten(id);
        }
    }
}
