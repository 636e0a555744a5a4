//! Operations of a ring: from their submission to their completion.
//!
//! ```text
//!   start ──► sq ──(wait)──► issued ──► waits on its socket ──(woken)──► work ──(wait)──► cq
//!                              └──────────── done at once ─────────────────────────────────┘
//! ```
//!
//! An operation is in `ops` from its start to its last completion; that is the time in which the
//! kernel may touch its memory. Its number is never used again, so whatever still refers to it
//! later (an agenda entry, a cancel) finds nothing.

use std::sync::atomic::Ordering;

use super::super::event::Key;
use super::errno;
use super::ring::{Cqe, Held, Kind, Lane, Op, Phase, Sqe};
use super::script::{Place, Strike};
use super::tcp::{Io, Sock};
use super::world::{Action, World};
use crate::clock::Time;

/// Task work that one wait runs, as measured on Linux 6.18: the rest has to wait for the next.
const WORK_PER_WAIT: usize = 20;

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
