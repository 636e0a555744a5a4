//! Cancelling and closing, and what a fault does to a ring.

use std::time::Duration;

use super::super::event::{CloseHow, Key};
use super::errno;
use super::ring::{Cqe, End, Hold, Kind, Phase, Sqe};
use super::script::{Place, Strike};
use super::tcp::State;
use super::world::{Action, World};

impl World {
    /// Asks for the end of an operation. It obeys at once or a little later, and may well complete
    /// before that.
    pub(crate) fn cancel(&mut self, ring: usize, id: u64) {
        let place = Place { ring: Some(ring), conn: self.conn_of(ring, id) };
        match self.rings[ring].ops.get_mut(&id) {
            Some(op) if !op.cancelling => op.cancelling = true,
            _ => return,
        }
        if self.strikes(Strike::StuckCancel, place, self.settings.faults.stuck_cancel) {
            if let Some(op) = self.rings[ring].ops.get_mut(&id) {
                op.stuck = true;
            }
            return;
        }
        let faults = &self.settings.faults;
        let (late, by) = (faults.late_completion, faults.late_by.as_nanos() as u64);
        let delay = if self.rng.chance(late) {
            self.rng.between(0, by)
        } else if self.rng.one_in(2) {
            self.rng.between(0, 50_000)
        } else {
            self.cancelled(ring, id);
            return;
        };
        self.schedule_in(delay, Action::Cancelled { ring, op: id });
    }

    /// A cancel takes effect, unless it lost the race: then the operation ends by itself if it can.
    pub(crate) fn cancelled(&mut self, ring: usize, id: u64) {
        let place = Place { ring: Some(ring), conn: self.conn_of(ring, id) };
        let Some(op) = self.rings[ring].ops.get(&id) else { return };
        let sock = match op.kind {
            Kind::Recv { sock, .. } => Some(sock),
            _ => None,
        };
        let mut lost = self.strikes(Strike::LostCancel, place, self.settings.faults.lost_cancel);
        // Data that is there wins now and then without any fault.
        lost |= sock.is_some_and(|sock| self.is_readable(sock)) && self.rng.one_in(4);
        if lost {
            self.run_to_its_end(ring, id);
        }
        let Some(op) = self.rings[ring].ops.get_mut(&id) else { return };
        let cqe = match &mut op.kind {
            Kind::Accept { id, mode, .. } => {
                Cqe::AcceptFailed { id: *id, mode: *mode, error: errno::ECANCELED }
            }
            // A cancelled transfer that has taken a part reports the part, not the cancel.
            Kind::Send { key, chain, taken, .. } => {
                let result = if *taken == 0 { Err(errno::ECANCELED) } else { Ok(*taken) };
                Cqe::Sent { key: *key, chain: chain.take(), result }
            }
            Kind::Recv { key, .. } => Cqe::RecvEnded { key: *key, end: End::Stopped },
            Kind::Connect { key, .. } => Cqe::Connected { key: *key, result: Err(errno::ECANCELED) },
            Kind::SendDatagram { key, token, .. } => {
                Cqe::DatagramSent { key: *key, token: *token, result: Err(errno::ECANCELED) }
            }
        };
        self.end_op(ring, id, cqe);
    }

    /// Lets an operation do what it can do now.
    fn run_to_its_end(&mut self, ring: usize, id: u64) {
        let Some(op) = self.rings[ring].ops.get_mut(&id) else { return };
        // A poll that is over is followed by the receive at once: both raced the cancel.
        op.polled = true;
        let can = match op.kind {
            Kind::Connect { sock, .. } => {
                self.conns.get(&sock.conn).is_none_or(|conn| conn.ends[sock.side].state != State::Connecting)
            }
            Kind::Recv { sock, .. } => self.is_readable(sock),
            Kind::Accept { .. } | Kind::Send { .. } | Kind::SendDatagram { .. } => true,
        };
        if can {
            self.run(ring, id);
        }
    }

    // ---- closing

    pub(crate) fn begin_close(&mut self, ring: usize, key: Key) {
        let Some(slot) = self.rings[ring].slot_mut(key) else { return };
        let (ops, sends) = ([slot.recv, slot.send, slot.connect], slot.datagrams > 0);
        let datagrams = if sends { self.datagram_ops(ring, key) } else { Vec::new() };
        self.post(ring, Cqe::Closed { key });
        for op in ops.into_iter().flatten().chain(datagrams) {
            self.cancel(ring, op);
        }
        self.release_if_idle(ring, key);
    }

    /// Closes the socket of a connection that is being closed when no operation holds it any more.
    pub(crate) fn release_if_idle(&mut self, ring: usize, key: Key) {
        let this = &mut self.rings[ring];
        let Some(slot) = this.slots.get(key.slot as usize).copied() else { return };
        let Phase::Closing(Some(sock), how) = slot.phase else { return };
        // A close that waits to be submitted has not happened.
        let pending = this.sq.iter().any(|sqe| matches!(sqe, Sqe::Close(k) if *k == key));
        let mut ops = [slot.recv, slot.send, slot.connect].into_iter().flatten();
        if pending || ops.any(|op| this.ops.contains_key(&op)) {
            return;
        }
        if slot.datagrams > 0 && !self.datagram_ops(ring, key).is_empty() {
            return;
        }
        let this = &mut self.rings[ring];
        this.slots[key.slot as usize].phase = Phase::Closing(None, how);
        this.sockets -= usize::from(!slot.no_entry);
        // A Unix stream cannot be reset.
        self.close_sock(sock, how == CloseHow::Reset && !self.is_local(sock));
    }

    /// Asks for the end of everything that is in flight.
    pub(crate) fn cancel_all(&mut self, ring: usize) {
        self.enter(ring, None);
        let ops: Vec<u64> = self.rings[ring].ops.keys().copied().collect();
        for op in ops {
            self.cancel(ring, op);
        }
    }

    // ---- faults of a ring

    /// Takes buffers out of the pools of one ring or of all.
    pub(crate) fn hold_buffers(&mut self, ring: Option<usize>, recv: u32, send: u32, time: Duration) {
        for ring in ring.map_or(0..self.rings.len(), |ring| ring..ring + 1) {
            if self.rings[ring].gone {
                continue;
            }
            let id = self.fresh();
            let pool = self.rings[ring].memory.pool.clone();
            let hold = Hold {
                id,
                recv: (0..recv).map_while(|_| pool.lease_with(|_| 1)).collect(),
                send: (0..send).map_while(|_| pool.alloc()).collect(),
            };
            self.rings[ring].holds.push(hold);
            self.schedule(self.now + time, Action::Release { ring, hold: id });
        }
    }

    /// Gives back what was held of a ring's buffers: one lot, or all.
    pub(crate) fn release_buffers(&mut self, ring: usize, hold: Option<u64>) {
        let this = &mut self.rings[ring];
        let before = this.holds.len();
        this.holds.retain(|held| hold.is_some_and(|hold| held.id != hold));
        if this.holds.len() < before {
            // A worker that sleeps because it had no buffer finds out as if somebody had woken it:
            // whoever kept them would have run on its thread.
            this.woken.store(true, std::sync::atomic::Ordering::Release);
        }
    }

    /// Everything that a fault holds up goes on: operations obey their cancels, buffers come back.
    pub(crate) fn calm_rings(&mut self) {
        for ring in 0..self.rings.len() {
            self.release_buffers(ring, None);
            let stuck: Vec<u64> =
                self.rings[ring].ops.iter().filter(|(_, op)| op.stuck).map(|(id, _)| *id).collect();
            for op in stuck {
                self.schedule_in(0, Action::Cancelled { ring, op });
            }
        }
    }
}
