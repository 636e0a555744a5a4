//! Bringing the driver in line with what connections should be doing.
//!
//! Events and callbacks only change a connection's flags and queues and mark it dirty. Here, once
//! per turn and connection, the difference between wish and fact becomes operations: everything
//! that queued up in the turn goes out as one send, a pause becomes a cancel, a close a close.

use crate::buffer::Payload;
use crate::clock::Time;
use crate::driver::{CloseHow, Driver, SEND_BATCH};
use crate::handler::{CloseReason, Closed, Cx, Handler};

use super::Worker;
use super::request::Opening;
use super::table::{Flags, Phase};
use super::wheel;

/// How long the pool must be empty, with connections waiting for buffers, until leases that peers
/// keep from others are copied out.
const RECLAIM_AFTER: std::time::Duration = std::time::Duration::from_millis(5);

/// How long nobody is fed from a pool that is nearly dry after somebody was, in vain: who is armed already takes
/// what comes back, and asking every time would end every wait for nothing.
const FEED_AGAIN: std::time::Duration = std::time::Duration::from_micros(500);

/// Free buffers from which on that does not hold.
const ENOUGH: u32 = 8;

/// How long until that is tried again when there was nothing to take: every lease is with the handler,
/// which is not to be asked hundreds of times a second.
const RECLAIM_AGAIN: std::time::Duration = std::time::Duration::from_millis(100);

/// The code of what a backend cannot do at all.
#[cfg(unix)]
const UNSUPPORTED: i32 = libc::EOPNOTSUPP;
/// `WSAEOPNOTSUPP`.
#[cfg(not(unix))]
const UNSUPPORTED: i32 = 10045;

/// Connections that a broadcast reaches in one turn.
const BROADCAST_BATCH: u32 = 512;

impl<D: Driver, H: Handler> Worker<D, H> {
    /// Carries out everything that was noted. Callbacks that run meanwhile (`on_closed`) may note
    /// more; each connection is closed once, so this ends.
    pub(super) fn reconcile_all(&mut self) {
        loop {
            if !self.core.requests.is_empty() {
                self.carry_out();
            }
            let mut connects = std::mem::take(&mut self.core.connects);
            for (slot, opening) in connects.drain(..) {
                self.begin_connect(slot, &opening);
            }
            if self.core.connects.is_empty() {
                self.core.connects = connects;
            }
            if self.core.dirty.is_empty() {
                break;
            }
            // Two lists take turns, so that marking while walking neither moves nor allocates.
            std::mem::swap(&mut self.core.dirty, &mut self.walking);
            let walking = std::mem::take(&mut self.walking);
            for &slot in &walking {
                self.reconcile(slot);
            }
            self.walking = walking;
            self.walking.clear();
        }
        while let Some(peer) = self.core.wakes.pop() {
            if !self.core.directory[peer as usize].notify() {
                continue;
            }
            if let Some(waker) = self.core.directory[peer as usize].waker::<D::Waker>() {
                self.driver.wake_peer(waker);
            }
        }
    }

    fn begin_connect(&mut self, slot: u32, opening: &Opening) {
        if self.core.table.get(slot).phase != Phase::Connecting {
            return;
        }
        // There is less room now, and more again if it fails at once.
        self.check_accept = true;
        let key = self.core.table.key(slot);
        let begun = match opening {
            Opening::Tcp(config) => self.driver.connect(key, config),
            #[cfg(unix)]
            Opening::Unix(target) => self.driver.connect_unix(key, target),
            Opening::Datagram(config) => self.driver.open_datagram(key, config),
        };
        match begun {
            Ok(()) if matches!(opening, Opening::Datagram(_)) => self.on_datagram_open(slot),
            Ok(()) => {}
            Err(error) => {
                // Nothing was begun, so no event will end it.
                let reason = CloseReason::ConnectFailed(error.raw_os_error().unwrap_or(UNSUPPORTED));
                self.retire(slot, CloseHow::Fin, reason);
                self.core.vacate(slot);
            }
        }
    }

    fn reconcile(&mut self, slot: u32) {
        let core = &mut self.core;
        let entry = core.table.get_mut(slot);
        entry.flags.remove(Flags::DIRTY);
        if matches!(entry.phase, Phase::Vacant | Phase::Closing) {
            return;
        }
        if entry.flags.has(Flags::ABORT) {
            let reason = entry.reason;
            let how = if entry.flags.has(Flags::DATAGRAM) { CloseHow::Fin } else { CloseHow::Reset };
            self.begin_close(slot, how, reason);
            return;
        }
        if entry.phase == Phase::Connecting {
            return;
        }
        let key = core.table.key(slot);
        let entry = core.table.get_mut(slot);

        if !entry.flags.has(Flags::SENDING) {
            if !entry.queue.is_empty() {
                let chain = core.memory.chunks.split_front(&mut entry.queue, SEND_BATCH);
                entry.flags.insert(Flags::SENDING);
                entry.flags.set(Flags::LEASED, core.memory.chunks.has_lease(&chain));
                self.driver.send(key, chain);
            } else if entry.flags.has(Flags::TX_ENDING) {
                let both_ended = entry.flags.has(Flags::RX_EOF) && entry.held.is_empty();
                match entry.phase {
                    Phase::Draining | Phase::Lingering if entry.flags.has(Flags::RX_EOF) => {
                        let reason = entry.reason;
                        self.begin_close(slot, CloseHow::Fin, reason);
                        return;
                    }
                    Phase::Open if both_ended && entry.flags.has(Flags::EOF_TOLD) => {
                        self.begin_close(slot, CloseHow::Fin, CloseReason::Eof);
                        return;
                    }
                    _ => {}
                }
                if !entry.flags.has(Flags::TX_ENDED) {
                    entry.flags.insert(Flags::TX_ENDED);
                    self.driver.shutdown_write(key);
                }
                if entry.phase == Phase::Draining {
                    entry.phase = Phase::Lingering;
                    // The peer gets the whole close timeout to finish, however long sending took.
                    let limit = core.due(core.config.close_timeout);
                    core.table.get_mut(slot).limit = limit;
                    core.retime(slot);
                }
            }
        }

        let deliver = core.may_deliver(slot);
        let entry = core.table.get_mut(slot);
        if H::PULL
            && entry.phase == Phase::Open
            && entry.flags.has(Flags::TX_FAILED)
            && entry.flags.has(Flags::RX_EOF)
            && entry.held.is_empty()
        {
            let reason = entry.reason;
            self.begin_close(slot, CloseHow::Fin, reason);
            return;
        }
        let held_up = entry.phase == Phase::Open
            && if H::PULL { core.is_backed_up(slot) } else { !(deliver && entry.held.is_empty()) };
        let entry = core.table.get_mut(slot);
        if held_up != entry.flags.has(Flags::HELD_UP) && !entry.flags.has(Flags::RX_EOF) {
            entry.flags.set(Flags::HELD_UP, held_up);
            core.counters.pauses.add(held_up.into());
        }
        let wanted = !held_up && !entry.flags.has(Flags::RX_EOF.and(Flags::STARVED).and(Flags::RX_FAULT));
        let armed = entry.flags.has(Flags::ARMED);
        if !wanted {
            entry.flags.remove(Flags::FED);
        }
        if wanted && !armed {
            if self.pressed && !entry.flags.has(Flags::FED) {
                // Others wait for buffers: whoever resumes meanwhile would take them away.
                core.starve(slot);
                return;
            }
            if entry.flags.has(Flags::WAS_ARMED) {
                core.counters.rearms.add(1);
            }
            entry.flags.insert(Flags::ARMED.and(Flags::WAS_ARMED));
            self.driver.recv(key);
        } else if !wanted && armed && !entry.flags.has(Flags::CANCELLING) {
            entry.flags.insert(Flags::CANCELLING);
            self.driver.cancel_recv(key);
        }
    }

    /// Ends a connection: drops its queues, tells the handler, hands the rest to the driver.
    pub(super) fn begin_close(&mut self, slot: u32, how: CloseHow, reason: CloseReason) {
        let key = self.core.table.key(slot);
        // A connection whose connect was only noted is unknown to the driver yet.
        let noted = self.core.connects.iter().position(|(noted, _)| *noted == slot);
        if let Some(noted) = noted {
            self.core.connects.swap_remove(noted);
        } else {
            self.driver.close(key, how);
        }
        self.retire(slot, how, reason);
        if noted.is_some() {
            self.core.vacate(slot);
            self.check_accept = true;
        }
    }

    /// The worker's half of an end: the slot enters Closing with nothing in it.
    fn retire(&mut self, slot: u32, how: CloseHow, reason: CloseReason) {
        self.core.wheel.cancel(slot);
        let id = self.core.id(slot);
        let entry = self.core.table.get_mut(slot);
        entry.phase = Phase::Closing;
        entry.flags = Flags::default();
        entry.pieces = 0;
        let queue = entry.queue.take();
        let held = entry.held.take();
        let state = entry.state.take();
        self.core.memory.chunks.clear(queue);
        self.core.memory.chunks.clear(held);
        self.core.counters.closed[reason.index()].add(1);
        if self.core.stopping {
            match how {
                CloseHow::Fin => self.finished += 1,
                CloseHow::Reset => self.aborted += 1,
            }
        }
        if let Some(state) = state {
            let mut cx = Cx { core: &mut self.core };
            self.handler.on_closed(&mut cx, Closed { id, state, reason });
        }
    }

    /// Arms receiving for connections that found no buffer, oldest first.
    ///
    /// With an empty pool a receive fails at once even if there is nothing to receive, so arming
    /// without a free buffer would spin. And one receive may take some thirty buffers, so only one
    /// connection is armed for every eight that are free.
    ///
    /// They are armed before anybody else is in this turn, who resumes in it (after congestion, say)
    /// queues behind them, and who is armed and finds no buffer again keeps its place: otherwise the
    /// same connections would take the buffers in turns and the others would never come to it.
    pub(super) fn feed_starved(&mut self) {
        self.pressed = self.core.starving();
        let free = self.core.memory.pool.available();
        // A pool in which one buffer goes round is dry too: every message would cost a receive of its own. It is so
        // for as long as nobody waits, too, which with few connections is every other turn.
        let is_dry = free < ENOUGH.min(self.core.memory.pool.capacity() / 4).max(1);
        if !is_dry {
            self.reclaim_at = None;
        }
        if !self.pressed {
            return;
        }
        if is_dry {
            let at = *self.reclaim_at.get_or_insert(self.core.now + RECLAIM_AFTER);
            if at <= self.core.now {
                let after = if self.reclaim() { RECLAIM_AFTER } else { RECLAIM_AGAIN };
                self.reclaim_at = Some(self.core.now + after);
            }
        }
        if !self.can_feed() {
            return;
        }
        let mut portion = (free / ENOUGH).max(1);
        while portion > 0 {
            let Some(slot) = self.core.next_starved() else { return };
            let entry = self.core.table.get_mut(slot);
            if !entry.flags.has(Flags::STARVED) {
                continue;
            }
            entry.flags.remove(Flags::STARVED);
            entry.flags.insert(Flags::FED);
            self.reconcile(slot);
            portion -= 1;
        }
    }

    /// Whether starved connections could be fed in the next turn.
    pub(super) fn can_feed(&self) -> bool {
        let free = self.core.memory.pool.available();
        let in_vain = free < ENOUGH && self.feed_at.is_some_and(|at| at > self.core.now);
        self.core.starving() && free > 0 && !in_vain
    }

    /// Takes note that somebody who was fed found no buffer all the same.
    pub(super) fn fed_in_vain(&mut self) {
        self.feed_at = Some(self.core.now + FEED_AGAIN);
    }

    /// Takes buffers back from connections whose peers do not read, or whose handler has paused
    /// them, by copying what they hold. Without this a few slow readers could keep every buffer
    /// from everybody else. False when there was nothing to take.
    fn reclaim(&mut self) -> bool {
        let mut found = false;
        for slot in 0..self.core.table.used() {
            let key = self.core.table.key(slot);
            let entry = self.core.table.get_mut(slot);
            let chunks = &self.core.memory.chunks;
            let copied = chunks.detach(&mut entry.queue) + chunks.detach(&mut entry.held);
            self.core.counters.reclaimed.add(copied.into());
            found |= copied > 0;
            let sending = entry.flags.has(Flags::SENDING)
                && entry.flags.has(Flags::LEASED)
                && !entry.flags.has(Flags::RECLAIM);
            if sending && entry.phase != Phase::Closing {
                entry.flags.insert(Flags::RECLAIM);
                self.driver.cancel_send(key);
                found = true;
            }
        }
        found
    }

    /// Gives every open connection of a broadcast's next portion its bytes.
    pub(super) fn broadcast(&mut self) {
        let mut budget = BROADCAST_BATCH;
        while budget > 0 {
            let Some(front) = self.core.broadcasts.front_mut() else { return };
            let bytes = front.bytes.clone();
            let from = front.next;
            let to = self.core.table.used().min(from.saturating_add(budget));
            front.next = to;
            let done = to == self.core.table.used();
            for slot in from..to {
                if self.core.table.get(slot).phase == Phase::Open {
                    // A refusal is counted; a connection that is behind misses the broadcast.
                    let _ = self.core.send(slot, Payload::from(bytes.clone()));
                }
            }
            budget -= (to - from).min(budget);
            if done {
                self.core.broadcasts.pop_front();
            }
        }
    }

    /// The next point in time at which the worker has something to do by itself.
    pub(super) fn next_due(&self) -> Option<Time> {
        let wheel = self.core.wheel.next_stop().map(wheel::time_of);
        let accept = self.acceptors.iter().filter_map(super::accept::Acceptor::retry_at).min();
        let stop = self.stop_at;
        let turn = self.handler.next_turn();
        let reclaim = self.reclaim_at.filter(|_| self.core.starving());
        let feed = self.feed_at.filter(|_| self.core.starving() && self.core.memory.pool.available() > 0);
        [turn, wheel, self.core.alarm, accept, self.admit_at, reclaim, feed, stop].into_iter().flatten().min()
    }
}
