//! From a driver's event to the handler's callback.

use std::io;

use crate::buffer::{Buf, Chain, Payload};
use crate::driver::{CloseHow, Driver, Event, Key, RecvEnd};
use crate::handler::{CloseReason, Conn, Handler};

use super::Worker;
use super::accept::is_cancelled;
use super::request::Answer;
use super::table::{Flags, Phase};
use super::wheel;

impl<D: Driver, H: Handler> Worker<D, H> {
    #[inline]
    pub(super) fn dispatch(&mut self, event: Event) {
        match event {
            Event::Received { key, buf, armed } => self.on_received(key, buf, armed),
            Event::Sent { key, chain, result } => self.on_sent(key, chain, result),
            Event::RecvEnded { key, end } => self.on_recv_ended(key, end),
            Event::Accepted { listener, socket, peer, mode, armed } => {
                self.on_accepted(listener, socket, peer, mode, armed);
            }
            Event::AcceptFailed { listener, mode, error } => {
                self.on_accept_failed(listener, mode, &error);
            }
            Event::DatagramSent { key, token, result } => self.on_datagram_sent(key, token, result),
            Event::Connected { key, result } => self.on_connected(key, result),
            Event::Closed { key } => self.on_driver_closed(key),
            Event::Woken => self.core.counters.wakes.add(1),
        }
    }

    /// The slot of a key that events may still reach.
    #[inline]
    fn live(&self, key: Key) -> Option<u32> {
        let slot = self.core.table.find(key);
        let slot = slot.filter(|&slot| self.core.table.get(slot).phase != Phase::Closing);
        if slot.is_none() {
            self.core.counters.stale.add(1);
        }
        slot
    }

    #[inline]
    fn conn(&mut self, slot: u32) -> (&mut H, Conn<'_, H>) {
        (&mut self.handler, Conn { core: &mut self.core, slot })
    }

    #[inline]
    fn on_received(&mut self, key: Key, buf: Buf, armed: bool) {
        let Some(slot) = self.live(key) else { return };
        self.core.counters.messages.add(1);
        self.core.counters.bytes_received.add(buf.len() as u64);
        let tick = wheel::tick_of(self.core.now);
        let deliver = self.core.may_deliver(slot);
        let entry = self.core.table.get_mut(slot);
        entry.last_active = tick;
        entry.flags.remove(Flags::FED);
        if !armed {
            entry.flags.remove(Flags::ARMED.and(Flags::CANCELLING));
            self.core.mark_dirty(slot);
        }
        let entry = self.core.table.get_mut(slot);
        if !entry.is_heard() {
            // Closing gracefully: nobody wants it, but reading it lets the peer finish.
            return;
        }
        if H::PULL {
            entry.pieces = entry.pieces.saturating_add(1);
            self.core.memory.chunks.push(&mut entry.held, Payload::from(buf));
            if self.core.is_backed_up(slot) {
                self.core.mark_dirty(slot);
            }
            let (handler, mut conn) = self.conn(slot);
            handler.on_readable(&mut conn);
            return;
        }
        if !deliver || !entry.held.is_empty() {
            self.core.memory.chunks.push(&mut entry.held, Payload::from(buf));
            return;
        }
        let (handler, mut conn) = self.conn(slot);
        handler.on_data(&mut conn, buf);
    }

    fn on_recv_ended(&mut self, key: Key, end: RecvEnd) {
        let Some(slot) = self.live(key) else { return };
        let entry = self.core.table.get_mut(slot);
        entry.flags.remove(Flags::ARMED.and(Flags::CANCELLING));
        match end {
            RecvEnd::Stopped => self.core.mark_dirty(slot),
            RecvEnd::NoBuffer => {
                if entry.flags.has(Flags::FED) {
                    self.fed_in_vain();
                }
                self.core.counters.starved.add(1);
                self.core.starve(slot);
                self.core.mark_dirty(slot);
            }
            RecvEnd::Eof => {
                entry.flags.insert(Flags::RX_EOF);
                self.core.mark_dirty(slot);
                self.tell_eof(slot);
            }
            RecvEnd::Failed(error) if entry.flags.has(Flags::DATAGRAM) => {
                // One datagram's fate, not the socket's: receiving goes on when somebody has taken note.
                entry.flags.insert(Flags::RX_FAULT);
                self.core.answers.push_back(Answer::Fault { id: self.core.id(slot), error });
            }
            RecvEnd::Failed(error) => {
                let flags = entry.flags;
                let reason = match entry.phase {
                    // The close was this side's; how the peer takes it changes nothing.
                    Phase::Draining | Phase::Lingering => entry.reason,
                    _ if flags.has(Flags::TX_FAILED) => entry.reason,
                    _ => CloseReason::from_error(&error),
                };
                if entry.phase == Phase::Open && !entry.held.is_empty() {
                    // What arrived before it is still delivered when the handler resumes.
                    entry.flags.insert(Flags::RX_EOF);
                    self.fail_later(slot, reason);
                    return;
                }
                self.begin_close(slot, CloseHow::Fin, reason);
            }
        }
    }

    /// Tells the handler of the peer's FIN, once, after all data.
    fn tell_eof(&mut self, slot: u32) {
        let deliver = self.core.may_deliver(slot);
        let entry = self.core.table.get_mut(slot);
        if H::PULL {
            if entry.is_heard() {
                let (handler, mut conn) = self.conn(slot);
                handler.on_readable(&mut conn);
            }
            return;
        }
        if !entry.is_heard()
            || !entry.flags.has(Flags::RX_EOF)
            || entry.flags.has(Flags::EOF_TOLD)
            || !entry.held.is_empty()
        {
            return;
        }
        if entry.flags.has(Flags::TX_FAILED) {
            let reason = entry.reason;
            self.begin_close(slot, CloseHow::Fin, reason);
            return;
        }
        // While paused by the handler its end of data waits behind its data; congestion does not
        // hold it up, since nothing more can come.
        if !deliver && entry.flags.has(Flags::PAUSED) {
            return;
        }
        entry.flags.insert(Flags::EOF_TOLD);
        let (handler, mut conn) = self.conn(slot);
        handler.on_eof(&mut conn);
    }

    /// Delivers what was held while connections were paused.
    pub(super) fn deliver_held(&mut self) {
        let mut budget = self.core.config.turn_budget;
        while budget > 0 {
            let Some(slot) = self.core.ready.pop_front() else { return };
            let entry = self.core.table.get_mut(slot);
            if !entry.flags.has(Flags::READY) {
                continue;
            }
            entry.flags.remove(Flags::READY);
            while budget > 0 && self.core.may_deliver(slot) {
                let entry = self.core.table.get_mut(slot);
                if !entry.is_heard() {
                    break;
                }
                let Some(payload) = self.core.memory.chunks.pop(&mut entry.held) else { break };
                budget -= 1;
                // Only received leases are held.
                let Some(buf) = payload.into_lease() else { continue };
                let (handler, mut conn) = self.conn(slot);
                handler.on_data(&mut conn, buf);
            }
            let entry = self.core.table.get(slot);
            if entry.phase == Phase::Open && entry.held.is_empty() {
                self.tell_eof(slot);
                self.core.mark_dirty(slot);
            } else if budget == 0 {
                self.core.mark_ready(slot);
            }
        }
    }

    #[inline]
    fn on_sent(&mut self, key: Key, mut chain: Chain, result: io::Result<u64>) {
        let Some(slot) = self.live(key) else {
            self.core.memory.chunks.clear(chain);
            return;
        };
        let core = &mut self.core;
        let entry = core.table.get_mut(slot);
        let reclaim = entry.flags.has(Flags::RECLAIM);
        entry.flags.remove(Flags::SENDING.and(Flags::RECLAIM));
        core.counters.sends.add(1);
        let failure = match result {
            Ok(sent) => {
                core.counters.bytes_sent.add(sent);
                // Zero already where the connection failed meanwhile.
                entry.unsent = entry.unsent.saturating_sub(sent);
                if entry.flags.has(Flags::CONGESTED) && sent > 0 {
                    entry.last_active = wheel::tick_of(core.now);
                }
                core.memory.chunks.consume(&mut chain, sent);
                if !chain.is_empty() {
                    core.counters.short_sends.add(1);
                }
                // A stream that takes nothing without an error would be asked for ever.
                let stuck = sent == 0 && !chain.is_empty() && !reclaim;
                stuck.then(|| io::Error::from(io::ErrorKind::WriteZero))
            }
            // Cancelled to get its leases back, or by a kernel that cancels by socket: to be sent again.
            Err(error) if is_cancelled(&error) => None,
            Err(error) => Some(error),
        };
        if let Some(error) = failure {
            core.memory.chunks.clear(chain);
            self.on_send_failed(slot, &error);
            return;
        }
        if !chain.is_empty() {
            if reclaim {
                core.counters.reclaimed.add(core.memory.chunks.detach(&mut chain).into());
            }
            core.memory.chunks.join_front(&mut entry.queue, chain);
        }
        if !entry.queue.is_empty() || entry.phase != Phase::Open || entry.flags.has(Flags::TX_ENDING) {
            core.mark_dirty(slot);
        }
        let entry = core.table.get_mut(slot);
        if entry.flags.has(Flags::CONGESTED) && entry.unsent <= u64::from(core.config.low_water) {
            entry.flags.remove(Flags::CONGESTED);
            core.mark_dirty(slot);
            core.mark_ready(slot);
            if core.table.get(slot).is_heard() {
                let (handler, mut conn) = self.conn(slot);
                handler.on_writable(&mut conn);
            }
        }
        let entry = self.core.table.get(slot);
        if entry.unsent == 0 && entry.is_heard() {
            let (handler, mut conn) = self.conn(slot);
            handler.on_drained(&mut conn);
        }
    }

    /// A send failed. What the peer sent before is still there to be received, so the connection is
    /// closed when receiving has come to its end, if it is going on.
    fn on_send_failed(&mut self, slot: u32, error: &io::Error) {
        let deliver = self.core.may_deliver(slot);
        let entry = self.core.table.get_mut(slot);
        let reason = match (entry.phase, entry.reason) {
            (Phase::Open, _) => CloseReason::from_error(error),
            // The peer had not just finished: it is gone, and with it what was still to be sent.
            (_, CloseReason::Eof) => CloseReason::from_error(error),
            (_, reason) => reason,
        };
        let receiving = entry.phase == Phase::Open
            && (entry.flags.has(Flags::ARMED) && !entry.flags.has(Flags::CANCELLING)
                // Between two receives: the next one is armed at the end of this turn.
                || !entry.flags.has(Flags::ARMED.and(Flags::RX_EOF)) && deliver
                || entry.flags.has(Flags::STARVED.and(Flags::TX_FAILED))
                || !entry.held.is_empty());
        if !receiving {
            self.begin_close(slot, CloseHow::Fin, reason);
        } else if !entry.flags.has(Flags::TX_FAILED) {
            self.fail_later(slot, reason);
        }
    }

    /// Lets a failed connection deliver what it received before; it is closed after that, or when the
    /// close timeout has passed.
    fn fail_later(&mut self, slot: u32, reason: CloseReason) {
        let entry = self.core.table.get_mut(slot);
        entry.flags.insert(Flags::TX_FAILED);
        entry.flags.remove(Flags::CONGESTED);
        entry.reason = reason;
        entry.unsent = 0;
        let queue = entry.queue.take();
        self.core.memory.chunks.clear(queue);
        let limit = self.core.due(self.core.config.close_timeout);
        self.core.table.get_mut(slot).limit = limit;
        self.core.retime(slot);
        self.core.mark_ready(slot);
        self.core.mark_dirty(slot);
        if H::PULL {
            // Whoever waits to send, or for the end, learns it now.
            let (handler, mut conn) = self.conn(slot);
            handler.on_writable(&mut conn);
            let (handler, mut conn) = self.conn(slot);
            handler.on_readable(&mut conn);
        }
    }

    fn on_connected(&mut self, key: Key, result: io::Result<()>) {
        let Some(slot) = self.live(key) else { return };
        let tick = wheel::tick_of(self.core.now);
        let entry = self.core.table.get_mut(slot);
        match result {
            Ok(()) => {
                entry.phase = Phase::Open;
                entry.limit = 0;
                entry.last_active = tick;
                let aborting = entry.flags.has(Flags::ABORT);
                let closing = entry.flags.has(Flags::CLOSE_LATER);
                let reason = entry.reason;
                self.core.counters.connected.add(1);
                self.core.retime(slot);
                self.core.mark_dirty(slot);
                if closing && !aborting {
                    let entry = self.core.table.get_mut(slot);
                    entry.flags.remove(Flags::TX_ENDING.and(Flags::CLOSE_LATER));
                    self.core.close(slot, reason);
                } else if !aborting {
                    let (handler, mut conn) = self.conn(slot);
                    handler.on_connected(&mut conn);
                }
            }
            Err(error) => {
                let reason =
                    CloseReason::ConnectFailed(error.raw_os_error().unwrap_or_else(|| code_of(error.kind())));
                self.begin_close(slot, CloseHow::Fin, reason);
            }
        }
    }

    /// The kernel holds nothing of a connection any more: its slot may be used again.
    fn on_driver_closed(&mut self, key: Key) {
        let Some(slot) = self.core.table.find(key) else {
            self.core.counters.stale.add(1);
            return;
        };
        self.core.vacate(slot);
        self.check_accept = true;
        self.admit_at = None;
    }

    /// Everything that is due for a connection at this tick.
    pub(super) fn on_tick(&mut self, slot: u32) {
        let now = wheel::tick_of(self.core.now);
        let reached = |tick: u64| tick > 0 && tick <= now;
        let entry = self.core.table.get_mut(slot);
        if matches!(entry.phase, Phase::Vacant | Phase::Closing) {
            return;
        }
        if reached(entry.limit) {
            self.core.counters.timers.add(1);
            let (how, reason) = match entry.phase {
                Phase::Connecting => (CloseHow::Fin, CloseReason::ConnectTimeout),
                // Everything was sent and FIN too; only the peer's is missing.
                Phase::Lingering => (CloseHow::Fin, entry.reason),
                Phase::Open => (CloseHow::Fin, entry.reason),
                _ => (CloseHow::Reset, CloseReason::CloseTimeout),
            };
            self.begin_close(slot, how, reason);
            return;
        }
        if reached(entry.deadline) {
            self.core.counters.timers.add(1);
            self.begin_close(slot, CloseHow::Reset, CloseReason::Deadline);
            return;
        }
        if entry.phase == Phase::Open && reached(entry.idle_due()) {
            let waits_for_us = Flags::PAUSED.and(Flags::STARVED);
            let waits_for_us = if H::PULL { waits_for_us.and(Flags::HELD_UP) } else { waits_for_us };
            // In pull mode also when what it sent was not taken yet.
            let is_taken = !H::PULL || entry.held.is_empty();
            if is_taken && !entry.flags.has(waits_for_us) {
                self.core.counters.timers.add(1);
                self.begin_close(slot, CloseHow::Fin, CloseReason::IdleTimeout);
                return;
            }
            // It is this side that does not receive: the peer is not to blame.
            entry.last_active = now;
        }
        if reached(entry.timer) {
            entry.timer = 0;
            self.core.counters.timers.add(1);
            if entry.is_heard() {
                let (handler, mut conn) = self.conn(slot);
                handler.on_timer(&mut conn);
            }
        }
        self.core.retime(slot);
    }
}

/// The code of an error that is not the system's own; 0 for one that has none.
fn code_of(kind: io::ErrorKind) -> i32 {
    match kind {
        // A listener's queue is full.
        #[cfg(unix)]
        io::ErrorKind::ResourceBusy => libc::EBUSY,
        _ => 0,
    }
}
