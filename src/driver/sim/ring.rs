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
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::event::{AcceptMode, CloseHow, Key, ListenerId, Socket};
use super::errno;
use super::tcp::{Io, Sock};
use super::world::{Action, World};
use crate::buffer::{Buf, Chain, Memory};
use crate::metrics::Counters;
use crate::time::Time;

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
}

/// An operation that the kernel has.
#[derive(Debug)]
pub(crate) struct Op {
    pub(crate) kind: Kind,
    /// Its turn in `work` is noted.
    queued: bool,
    cancelling: bool,
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
    Closed { key: Key },
    Woken,
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
    pub(crate) cq_entries: usize,
    pub(crate) sq: Vec<Sqe>,
    pub(crate) cq: VecDeque<Cqe>,
    /// Operations that go on at the next wait.
    pub(crate) work: VecDeque<u64>,
    pub(crate) ops: BTreeMap<u64, Op>,
    pub(crate) slots: Vec<Slot>,
    /// The world's listeners, by [`ListenerId`].
    pub(crate) listeners: Vec<Option<u32>>,
    /// Accepted, not adopted.
    pub(crate) loose: BTreeMap<i32, Sock>,
    pub(crate) next_socket: i32,
    /// When the last wait would have ended without a completion.
    pub(crate) wait_until: Option<Time>,
    /// The last wait found nothing: its thread sleeps.
    pub(crate) asleep: bool,
    pub(crate) woken: Arc<AtomicBool>,
    /// Operations whose last completion the driver has not taken.
    pub(crate) in_flight: usize,
}

impl Ring {
    /// Whether the thread that waits on this ring has something to do at `now`.
    pub(crate) fn is_due(&self, now: Time) -> bool {
        !self.asleep
            || !self.cq.is_empty()
            || !self.work.is_empty()
            || !self.sq.is_empty()
            || self.woken.load(Ordering::Acquire)
            || self.wait_until.is_some_and(|until| until <= now)
    }

    pub(crate) fn slot_mut(&mut self, key: Key) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(key.slot as usize)?;
        (slot.generation == key.generation).then_some(slot)
    }
}

impl World {
    /// Notes a started operation; its number.
    pub(crate) fn start(&mut self, ring: usize, kind: Kind) -> u64 {
        let op = self.fresh();
        let ring = &mut self.rings[ring];
        ring.ops.insert(op, Op { kind, queued: false, cancelling: false });
        ring.sq.push(Sqe::Start(op));
        ring.in_flight += 1;
        op
    }

    /// One `io_uring_enter`: takes the submissions, runs task work, says whether it found anything.
    pub(crate) fn enter(&mut self, ring: usize, until: Option<Time>) {
        let submissions = std::mem::take(&mut self.rings[ring].sq);
        let counters = self.rings[ring].counters.clone();
        counters.enters.add(1);
        counters.sqes.add(submissions.len() as u64);
        for sqe in submissions {
            self.issue(ring, sqe);
        }
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
            Sqe::Discard(sock) => self.close_sock(sock, false),
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
                if self.rng.one_in(4) {
                    // Not at once, as when the kernel hands it to another thread.
                    let delay = self.rng.between(0, 20_000);
                    self.schedule_in(delay, Action::Run { ring, op: id });
                } else {
                    self.run(ring, id);
                }
            }
            Kind::Connect { sock, .. } => {
                self.set_writer(sock, Some((ring, id)));
                self.send_syn(sock);
            }
        }
    }

    /// Lets an operation go on at its ring's next wait.
    pub(crate) fn wake_op(&mut self, ring: usize, id: u64) {
        let ring = &mut self.rings[ring];
        if let Some(op) = ring.ops.get_mut(&id)
            && !op.queued
        {
            op.queued = true;
            ring.work.push_back(id);
        }
    }

    fn run(&mut self, ring: usize, id: u64) {
        let Some(op) = self.rings[ring].ops.get(&id) else { return };
        match op.kind {
            Kind::Accept { listener, id: lid, mode } => {
                self.run_accept(ring, id, listener, lid, mode);
            }
            Kind::Recv { key, sock } => self.run_recv(ring, id, key, sock),
            Kind::Send { key, sock, .. } => self.run_send(ring, id, key, sock),
            Kind::Connect { key, sock } => match self.connecting(sock) {
                Io::WouldBlock => {}
                Io::Error(error) => self.connected(ring, id, key, Err(error)),
                Io::Ready(_) | Io::Eof => self.connected(ring, id, key, Ok(())),
            },
        }
    }

    fn connected(&mut self, ring: usize, id: u64, key: Key, result: Result<(), i32>) {
        self.end_op(ring, id, Cqe::Connected { key, result });
    }

    // ---- ends

    /// The kernel lets go of an operation and reports its last completion.
    pub(crate) fn end_op(&mut self, ring: usize, id: u64, cqe: Cqe) {
        self.drop_op(ring, id);
        self.post(ring, cqe);
    }

    /// As [`end_op`](Self::end_op), but the completion may be seen later than it happened.
    pub(crate) fn end_op_late(&mut self, ring: usize, id: u64, cqe: Cqe) {
        let faults = self.faults();
        if self.rng.chance(faults.late_completion) {
            self.drop_op(ring, id);
            let delay = self.rng.between(0, faults.late_by.as_nanos() as u64);
            self.schedule_in(delay, Action::Post { ring, cqe });
        } else {
            self.end_op(ring, id, cqe);
        }
    }

    fn drop_op(&mut self, ring: usize, id: u64) {
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
        }
    }

    pub(crate) fn post(&mut self, ring: usize, cqe: Cqe) {
        self.rings[ring].cq.push_back(cqe);
    }

    // ---- cancel and close

    /// Asks for the end of an operation. It obeys at once or a little later, and may well complete
    /// before that.
    fn cancel(&mut self, ring: usize, id: u64) {
        match self.rings[ring].ops.get_mut(&id) {
            Some(op) if !op.cancelling => op.cancelling = true,
            _ => return,
        }
        let faults = self.faults();
        if self.rng.chance(faults.stuck_cancel) {
            return;
        }
        let delay = if self.rng.chance(faults.late_completion) {
            self.rng.between(0, faults.late_by.as_nanos() as u64)
        } else if self.rng.one_in(2) {
            self.rng.between(0, 50_000)
        } else {
            self.cancelled(ring, id);
            return;
        };
        self.schedule_in(delay, Action::Cancelled { ring, op: id });
    }

    pub(crate) fn cancelled(&mut self, ring: usize, id: u64) {
        let Some(op) = self.rings[ring].ops.get_mut(&id) else { return };
        if let Kind::Recv { key, sock } = op.kind {
            // The cancel may lose the race against data that is there.
            if self.is_readable(sock) && self.rng.one_in(4) {
                self.run_recv(ring, id, key, sock);
            }
            if self.rings[ring].ops.contains_key(&id) {
                self.end_op(ring, id, Cqe::RecvEnded { key, end: End::Stopped });
            }
            return;
        }
        let cqe = match &mut op.kind {
            Kind::Accept { id, mode, .. } => {
                Cqe::AcceptFailed { id: *id, mode: *mode, error: errno::ECANCELED }
            }
            Kind::Send { key, chain, taken, .. } => {
                let result = if *taken == 0 { Err(errno::ECANCELED) } else { Ok(*taken) };
                Cqe::Sent { key: *key, chain: chain.take(), result }
            }
            Kind::Recv { key, .. } => Cqe::RecvEnded { key: *key, end: End::Stopped },
            Kind::Connect { key, .. } => Cqe::Connected { key: *key, result: Err(errno::ECANCELED) },
        };
        self.end_op(ring, id, cqe);
    }

    fn begin_close(&mut self, ring: usize, key: Key) {
        let Some(slot) = self.rings[ring].slot_mut(key) else { return };
        let ops = [slot.recv, slot.send, slot.connect];
        self.post(ring, Cqe::Closed { key });
        for op in ops.into_iter().flatten() {
            self.cancel(ring, op);
        }
        self.release_if_idle(ring, key);
    }

    /// Closes the socket of a connection that is being closed when no operation holds it any more.
    fn release_if_idle(&mut self, ring: usize, key: Key) {
        let this = &mut self.rings[ring];
        let Some(slot) = this.slots.get(key.slot as usize).copied() else { return };
        let Phase::Closing(Some(sock), how) = slot.phase else { return };
        // A close that waits to be submitted has not happened.
        let pending = this.sq.iter().any(|sqe| matches!(sqe, Sqe::Close(k) if *k == key));
        let mut ops = [slot.recv, slot.send, slot.connect].into_iter().flatten();
        if pending || ops.any(|op| this.ops.contains_key(&op)) {
            return;
        }
        this.slots[key.slot as usize].phase = Phase::Closing(None, how);
        self.close_sock(sock, how == CloseHow::Reset);
    }

    /// Asks for the end of everything that is in flight.
    pub(crate) fn cancel_all(&mut self, ring: usize) {
        self.enter(ring, None);
        let ops: Vec<u64> = self.rings[ring].ops.keys().copied().collect();
        for op in ops {
            self.cancel(ring, op);
        }
    }

    /// Closes every socket of a ring whose driver is gone. Operations that are left keep their
    /// memory, as in a kernel that has not finished with them, but find no socket any more.
    pub(crate) fn tear_down(&mut self, ring: usize) {
        let this = &mut self.rings[ring];
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
        for id in std::mem::take(&mut self.rings[ring].listeners).into_iter().flatten() {
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
