//! The generator's messages: sending them when they are due, matching replies to them, and saying
//! of each one, exactly once, what became of it.
//!
//! ```text
//!   due ──┬─► sent ──┬─► replied              (late_replies, if it had timed out)
//!         │          ├─► timed_out
//!         │          └─► lost                 its connection ended
//!         ├─► owed ──► sent, timed_out, lost  waits for earlier replies (overlap: queue)
//!         ├─► missed                          is dropped for that      (overlap: skip)
//!         └─► gone                            its connection had ended
//! ```

use std::time::Duration;

use corelane::Time;

use super::door::{Door, Lane};
use super::handler::{Generator, MESSAGES_PER_TURN, NEVER, Peer, Slot, Stamp};
use super::plan::{Overlap, Traffic};
use super::stats::{ErrorClass, Stats};
use crate::units;

impl Generator {
    /// Closed loop: gives connections their first messages.
    pub(super) fn kick(&mut self, cx: &mut impl Lane, now: Time) -> Time {
        let Some(mut slot) = self.next_kick else {
            return NEVER;
        };
        if self.plan.warmup.is_zero() && now < self.from {
            return self.from;
        }
        let pipeline = self.plan.traffic.depth();
        let mut sent = 0;
        while slot < self.slots.len() && !self.stopped {
            if sent >= MESSAGES_PER_TURN {
                self.next_kick = Some(slot);
                return now;
            }
            if let Slot::Open(id) = self.slots[slot]
                && let Some(mut conn) = cx.door(id)
            {
                for _ in 0..pipeline {
                    self.transmit(&mut conn, now);
                }
                sent += pipeline as usize;
            }
            slot += 1;
        }
        self.next_kick = None;
        NEVER
    }

    /// Open loop: sends what is due; returns when the next message is.
    pub(super) fn beat_due(&mut self, cx: &mut impl Lane, now: Time) -> Time {
        let Traffic::Open { schedule, overlap, depth } = self.plan.traffic else {
            return NEVER;
        };
        if self.slots.is_empty() {
            return NEVER;
        }
        for _ in 0..MESSAGES_PER_TURN {
            let slot = self.next_beat;
            let intended = self.origin + schedule.due(self.index(slot), self.round);
            if intended >= self.until {
                return NEVER;
            }
            if intended > now {
                return intended;
            }
            let round = self.round;
            self.next_beat += 1;
            if self.next_beat == self.slots.len() {
                self.next_beat = 0;
                self.round += 1;
            }
            match self.slots[slot] {
                Slot::Waiting | Slot::Connecting | Slot::Failed => {}
                Slot::Gone => {
                    let counts = &mut self.stats(intended).counts;
                    counts.planned += 1;
                    counts.gone += 1;
                }
                Slot::Open(id) => {
                    let late = now.since(intended);
                    let stats = self.stats(intended);
                    stats.counts.planned += 1;
                    stats.lag.record(late);
                    if late > schedule.tolerance() {
                        stats.error(ErrorClass::GeneratorLate);
                    }
                    match cx.door(id) {
                        Some(mut conn) => self.beat(&mut conn, intended, round, overlap, depth),
                        None => self.stats(intended).counts.gone += 1,
                    }
                }
            }
        }
        now
    }

    /// One message is due on an open connection.
    fn beat(&mut self, conn: &mut impl Door, intended: Time, round: u64, overlap: Overlap, depth: u32) {
        let peer = conn.peer();
        if peer.owed == 0 && peer.outstanding.len() < depth as usize {
            self.transmit(conn, intended);
            return;
        }
        match overlap {
            Overlap::Skip => self.stats(intended).counts.missed += 1,
            Overlap::Queue => {
                if peer.owed == 0 {
                    peer.owed_round = round;
                }
                peer.owed += 1;
                self.owed += 1;
            }
        }
    }

    /// Sends the connection's next message.
    #[inline]
    pub(super) fn transmit(&mut self, conn: &mut impl Door, intended: Time) {
        let now = conn.now();
        let peer = conn.peer();
        let (index, sequence) = (peer.index, peer.sent);
        peer.sent = sequence.wrapping_add(1);
        peer.outstanding.push_back(Stamp { intended, sent: now });
        let start_timer = !peer.timed;
        peer.timed = true;
        self.outstanding += 1;
        let closed_loop = matches!(self.plan.traffic, Traffic::Closed { .. });
        let counts = &mut self.stats(intended).counts;
        counts.sent += 1;
        counts.planned += u64::from(closed_loop);
        if start_timer {
            conn.set_timer(self.plan.timeout);
        }
        if !conn.send(self.plan.content.request(index, sequence)) {
            self.condemn(conn, ErrorClass::SendFailed);
        }
    }

    /// Ends a connection on which something went wrong; what was outstanding on it is lost.
    pub(super) fn condemn(&mut self, conn: &mut impl Door, class: ErrorClass) {
        if !std::mem::replace(&mut conn.peer().condemned, true) {
            let now = conn.now();
            self.stats(now).error(class);
            conn.abort();
        }
    }

    /// The oldest outstanding message is answered.
    #[inline]
    pub(super) fn answered(&mut self, conn: &mut impl Door, stamp: Stamp) {
        let now = conn.now();
        let peer = conn.peer();
        if peer.expired > 0 {
            peer.expired -= 1;
            self.stats(stamp.intended).counts.late_replies += 1;
        } else {
            self.outstanding -= 1;
            let open_loop = matches!(self.plan.traffic, Traffic::Open { .. });
            let stats = self.stats(stamp.intended);
            stats.counts.replied += 1;
            stats.response.record(now.since(stamp.intended));
            if open_loop {
                stats.service.record(now.since(stamp.sent));
            }
        }
        match self.plan.traffic {
            Traffic::Closed { .. } => {
                if now < self.until {
                    self.transmit(conn, now);
                }
            }
            Traffic::Open { schedule, .. } => {
                let peer = conn.peer();
                if peer.owed > 0 {
                    let intended = self.origin + schedule.due(peer.index, peer.owed_round);
                    peer.owed -= 1;
                    peer.owed_round += 1;
                    self.owed -= 1;
                    self.transmit(conn, intended);
                }
            }
        }
    }

    /// A wrong reply: notes what was wrong with the first one, and ends the connection.
    pub(super) fn mismatch(&mut self, conn: &mut impl Door, expected: &[u8], got: &[u8]) {
        if self.interval.mismatch.is_none() {
            let shown = |bytes: &[u8]| units::escape(&bytes[..bytes.len().min(32)]);
            let peer = conn.peer();
            self.interval.mismatch = Some(if expected.is_empty() {
                format!("connection {}: '{}' arrived, which answers nothing", peer.index, shown(got))
            } else {
                format!(
                    "connection {}, reply {}, byte {}: expected '{}', got '{}'",
                    peer.index,
                    peer.answered,
                    peer.matched,
                    shown(expected),
                    shown(got)
                )
            });
        }
        self.condemn(conn, ErrorClass::ReplyMismatch);
    }

    /// The time for replies is over: whatever is still owed was not answered in time.
    pub(super) fn give_up(&mut self, cx: &mut impl Lane, now: Time) {
        for slot in 0..self.slots.len() {
            let Slot::Open(id) = self.slots[slot] else { continue };
            let Some(mut conn) = cx.door(id) else { continue };
            self.forget(conn.peer(), now, |stats, intended| {
                stats.counts.timed_out += 1;
                stats.error(ErrorClass::ReplyTimeout);
                stats.response.record(now.since(intended));
            });
        }
    }

    /// Takes everything outstanding and owed off a connection; `count` gets each message.
    pub(super) fn forget(&mut self, peer: &mut Peer, now: Time, mut count: impl FnMut(&mut Stats, Time)) {
        for stamp in peer.outstanding.drain(..).skip(peer.expired as usize) {
            self.outstanding -= 1;
            count(self.failed_in(stamp.intended, now), stamp.intended);
        }
        peer.expired = 0;
        if let Traffic::Open { schedule, .. } = self.plan.traffic {
            for round in (peer.owed_round..).take(peer.owed as usize) {
                let intended = self.origin + schedule.due(peer.index, round);
                count(self.stats(intended), intended);
            }
        }
        self.owed -= u64::from(peer.owed);
        peer.owed = 0;
    }

    /// The counters for a message that fails now.
    ///
    /// In a closed loop a connection that waits in vain sends nothing: what it sent before the
    /// window, and failed in it, is all that the window will see of it, and counts there.
    fn failed_in(&mut self, intended: Time, now: Time) -> &mut Stats {
        let closed_loop = matches!(self.plan.traffic, Traffic::Closed { .. });
        if closed_loop && intended < self.from && now >= self.from {
            self.interval.window.counts.planned += 1;
            return &mut self.interval.window;
        }
        self.stats(intended)
    }

    /// Whether everything that was due by the end of the window has been attended to.
    pub(super) fn schedule_over(&self) -> bool {
        match self.plan.traffic {
            Traffic::Closed { .. } => true,
            Traffic::Open { schedule, .. } => {
                self.slots.is_empty()
                    || self.origin + schedule.due(self.index(self.next_beat), self.round) >= self.until
            }
        }
    }

    /// Compares what arrived with the replies that are due.
    #[inline]
    pub(super) fn verify(&mut self, conn: &mut impl Door, mut rest: &[u8]) {
        while !rest.is_empty() {
            let peer = conn.peer();
            if peer.condemned {
                return;
            }
            let Some(&stamp) = peer.outstanding.front() else {
                return self.mismatch(conn, &[], rest);
            };
            let reply = self.plan.content.reply(peer.index, peer.answered);
            let expected = &reply[peer.matched as usize..];
            let here = expected.len().min(rest.len());
            if expected[..here] != rest[..here] {
                return self.mismatch(conn, expected, rest);
            }
            rest = &rest[here..];
            if here < expected.len() {
                peer.matched += here as u32;
                return;
            }
            peer.matched = 0;
            peer.answered = peer.answered.wrapping_add(1);
            peer.outstanding.pop_front();
            self.answered(conn, stamp);
        }
    }

    /// The reply timer fired: the oldest messages may have waited too long.
    pub(super) fn expire(&mut self, conn: &mut impl Door) {
        let (now, timeout) = (conn.now(), self.plan.timeout);
        let peer = conn.peer();
        peer.timed = false;
        while let Some(&stamp) = peer.outstanding.get(peer.expired as usize) {
            let deadline = stamp.sent + timeout;
            if deadline > now {
                peer.timed = true;
                // The wheel turns in milliseconds; shorter waits would fire early and again.
                conn.set_timer(deadline.since(now).max(Duration::from_millis(1)));
                break;
            }
            peer.expired += 1;
            self.outstanding -= 1;
            let stats = self.failed_in(stamp.intended, now);
            stats.counts.timed_out += 1;
            stats.error(ErrorClass::ReplyTimeout);
            stats.response.record(now.since(stamp.intended).max(timeout));
        }
    }
}
