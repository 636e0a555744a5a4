//! Accepting: how many, how fast, and what when the system refuses.
//!
//! A multishot accept may bring everything that waits in the listener's queue at once, and a
//! connection that finds no place would be lost to its client. So multishot is armed only while
//! there is room for two full queues; nearer to the limit single accepts are armed, at the limit
//! none, and clients wait in the kernel's queue. An error of the system (EMFILE and its like) pauses
//! accepting for 10 to 200 ms.
//!
//! What is accepted waits here until it is handed to the handler, `accept_budget` a turn, so that a
//! burst does not hold up those who are connected already. It then takes one of the runtime's
//! permits. Other workers may have taken the last one in the meantime: it goes on waiting then, so the
//! total that handlers see is exact, and nobody is turned away.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use crate::clock::Time;
use crate::driver::{AcceptMode, Driver, ListenerId, Socket};
use crate::handler::{Accepted, Conn, Cx, Handler};

use super::Worker;
use super::table::{Flags, Phase};

/// Single accepts armed at a time per listener.
const ONCE_ARMED: u32 = 8;
const BACKOFF_FIRST: Duration = Duration::from_millis(10);
const BACKOFF_LAST: Duration = Duration::from_millis(200);
/// How often a worker that is held up by the runtime's total looks whether others made room.
const RECHECK: Duration = Duration::from_millis(50);

/// One listener of a worker, and what is armed on it.
pub(crate) struct Acceptor {
    id: ListenerId,
    /// Connections that may wait in the listener's queue.
    burst: u32,
    /// Never multishot: the listener is shared between workers, or peer addresses are wanted.
    once_only: bool,
    multishot: bool,
    once: u32,
    cancelling: bool,
    backoff: Duration,
    retry_at: Option<Time>,
    /// An accept has failed and none was armed since: whoever it failed for waits in the queue, and those that
    /// are still armed may be told of newcomers only.
    failed: bool,
    /// Whether accepting is held up by a limit (for counting the change only).
    limited: bool,
    removed: bool,
    /// Nobody takes whom it accepts at the moment: they wait in the kernel's queue.
    paused: bool,
    /// How many more may be accepted before some of those are gone, if that is limited; below zero when more came while
    /// the limit was being set.
    quota: Option<i64>,
    /// To be closed.
    closing: bool,
}

/// An accepted connection that waits to be handed to the handler.
pub(crate) struct Waiting {
    acceptor: usize,
    socket: Socket,
    peer: Option<SocketAddr>,
}

impl Acceptor {
    pub(crate) fn new(id: ListenerId, backlog: u32, once_only: bool) -> Self {
        Self {
            id,
            burst: backlog.saturating_add(1),
            once_only,
            multishot: false,
            once: 0,
            cancelling: false,
            backoff: BACKOFF_FIRST,
            retry_at: None,
            failed: false,
            limited: false,
            removed: false,
            paused: false,
            quota: None,
            closing: false,
        }
    }

    /// Leaves who comes in the queue until told otherwise: the handler does not know of it yet.
    pub(crate) fn paused(mut self) -> Self {
        self.paused = true;
        self
    }

    /// Whether its place can be used again.
    pub(crate) fn is_over(&self) -> bool {
        self.removed
    }

    pub(crate) fn is_idle(&self) -> bool {
        !self.multishot && self.once == 0
    }

    pub(crate) fn retry_at(&self) -> Option<Time> {
        self.retry_at
    }

    fn ended(&mut self, mode: AcceptMode) {
        match mode {
            AcceptMode::Multishot => self.multishot = false,
            AcceptMode::Once => self.once = self.once.saturating_sub(1),
        }
        if self.is_idle() {
            self.cancelling = false;
        }
    }
}

impl Waiting {
    /// The listener that it came from.
    pub(crate) fn acceptor(&self) -> usize {
        self.acceptor
    }
}

impl<D: Driver, H: Handler> Worker<D, H> {
    /// Accepts from a listener, or leaves who comes in its queue.
    pub(super) fn set_accepting(&mut self, listener: usize, on: bool) {
        if let Some(acceptor) = self.acceptors.get_mut(listener) {
            acceptor.paused = !on;
            self.check_accept = true;
        }
    }

    /// Accepts at most so many more from a listener (below zero: fewer than have been already), until [`accept_more`](Self::accept_more) says otherwise. The others wait in
    /// the kernel's queue.
    pub(super) fn limit_accepting(&mut self, listener: usize, left: i64) {
        let waiting = self.waiting.iter().filter(|waiting| waiting.acceptor == listener).count();
        if let Some(acceptor) = self.acceptors.get_mut(listener) {
            acceptor.quota = Some(left - waiting as i64);
            self.check_accept = true;
        }
    }

    /// Some of those whom a limited listener has accepted are gone.
    pub(super) fn accept_more(&mut self, listener: usize, count: u32) {
        if let Some(quota) = self.acceptors.get_mut(listener).and_then(|acceptor| acceptor.quota.as_mut()) {
            *quota += i64::from(count);
            self.check_accept = true;
        }
    }

    /// Closes a listener, and whoever was accepted from it and not handed over yet.
    pub(super) fn unlisten(&mut self, listener: usize) {
        let Some(acceptor) = self.acceptors.get_mut(listener) else { return };
        acceptor.closing = true;
        self.check_accept = true;
        for _ in 0..self.waiting.len() {
            let Some(waiting) = self.waiting.pop_front() else { break };
            if waiting.acceptor == listener {
                self.driver.discard(waiting.socket);
            } else {
                self.waiting.push_back(waiting);
            }
        }
    }

    /// Whether a listener is being closed. That takes until its accept operations have ended.
    pub(super) fn is_unlistening(&self) -> bool {
        self.acceptors.iter().any(|acceptor| acceptor.closing && !acceptor.removed)
    }

    fn acceptor(&self, id: ListenerId) -> Option<usize> {
        self.acceptors.iter().position(|acceptor| acceptor.id == id && !acceptor.removed)
    }

    pub(super) fn on_accepted(
        &mut self,
        listener: ListenerId,
        socket: Socket,
        peer: Option<SocketAddr>,
        mode: AcceptMode,
        armed: bool,
    ) {
        let Some(index) = self.acceptor(listener) else {
            self.driver.discard(socket);
            return;
        };
        let acceptor = &mut self.acceptors[index];
        if !armed {
            acceptor.ended(mode);
        }
        acceptor.backoff = BACKOFF_FIRST;
        if acceptor.closing {
            self.check_accept = true;
            self.driver.discard(socket);
            return;
        }
        if let Some(quota) = &mut acceptor.quota {
            *quota -= 1;
        }
        self.core.counters.accepted.add(1);
        self.waiting.push_back(Waiting { acceptor: index, socket, peer });
        self.check_accept = true;
    }

    pub(super) fn on_accept_failed(&mut self, listener: ListenerId, mode: AcceptMode, error: &io::Error) {
        let Some(index) = self.acceptor(listener) else { return };
        let acceptor = &mut self.acceptors[index];
        let cancelled = acceptor.cancelling && is_cancelled(error);
        acceptor.ended(mode);
        self.check_accept = true;
        if cancelled {
            return;
        }
        acceptor.failed = true;
        if is_transient(error) {
            return;
        }
        self.core.counters.accept_errors.add(1);
        acceptor.retry_at = Some(self.core.now + acceptor.backoff);
        acceptor.backoff = (acceptor.backoff * 2).min(BACKOFF_LAST);
    }

    /// Hands accepted connections to the handler, `accept_budget` of them.
    pub(super) fn admit(&mut self) {
        self.admit_at = None;
        for _ in 0..self.core.config.accept_budget {
            if self.waiting.is_empty() {
                return;
            }
            if !self.core.permits.try_take() {
                // Nobody tells when another worker makes room.
                self.admit_at = Some(self.core.now + RECHECK);
                return;
            }
            let Some(waiting) = self.waiting.pop_front() else { return };
            // The slot is taken before the handler is asked, so that what it does meanwhile cannot
            // take it; Closing hides it until it is whole.
            let Some(slot) = self.core.insert(Phase::Closing, None) else {
                // Cannot be: room for everything that waits is kept. (Or the handler filled the table
                // with outgoing connections in this very turn.)
                self.core.permits.give_back(1);
                self.waiting.push_front(waiting);
                self.admit_at = Some(self.core.now + RECHECK);
                return;
            };
            let accepted =
                Accepted { id: self.core.id(slot), listener: waiting.acceptor, peer: waiting.peer };
            let state = self.handler.on_accept(&mut Cx { core: &mut self.core }, accepted);
            let Some(state) = state else {
                self.core.counters.refused.add(1);
                self.core.vacate(slot);
                self.check_accept = true;
                self.driver.discard(waiting.socket);
                continue;
            };
            let entry = self.core.table.get_mut(slot);
            entry.state = Some(state);
            entry.phase = Phase::Open;
            entry.flags.set(Flags::AUTO_PAUSE, self.core.config.auto_pause);
            self.driver.adopt(self.core.table.key(slot), waiting.socket);
            self.core.retime(slot);
            self.core.mark_dirty(slot);
            self.handler.on_accepted(&mut Conn { core: &mut self.core, slot });
        }
    }

    /// Closes what was accepted but not handed over; for the end of a worker.
    pub(super) fn turn_all_away(&mut self) {
        self.admit_at = None;
        while let Some(waiting) = self.waiting.pop_front() {
            self.driver.discard(waiting.socket);
        }
    }

    /// Arms, or cancels, accept operations as the limits allow.
    pub(super) fn control_accept(&mut self) {
        self.check_accept = false;
        let bursts: u64 = self.acceptors.iter().map(|acceptor| u64::from(acceptor.burst)).sum();
        for index in 0..self.acceptors.len() {
            let promised: u32 = self.acceptors.iter().map(|acceptor| acceptor.once).sum();
            let promised = promised + self.waiting.len() as u32;
            let room = u64::from(self.core.table.room().saturating_sub(promised));
            let total = self.core.permits.free().saturating_sub(promised.into());
            let acceptor = &mut self.acceptors[index];
            if acceptor.removed {
                continue;
            }
            let own = acceptor
                .quota
                .map_or(u64::MAX, |quota| u64::try_from(quota - i64::from(acceptor.once)).unwrap_or(0));
            let room = room.min(own);
            if self.core.stopping || acceptor.closing {
                // Nothing is tried again; a time that stays would be due in every turn.
                acceptor.retry_at = None;
                if acceptor.is_idle() {
                    acceptor.removed = true;
                    self.driver.remove_listener(acceptor.id);
                } else if !acceptor.is_idle() && !acceptor.cancelling {
                    acceptor.cancelling = true;
                    self.driver.cancel_accept(acceptor.id);
                }
                continue;
            }
            if acceptor.paused {
                acceptor.retry_at = None;
                if !acceptor.is_idle() && !acceptor.cancelling {
                    acceptor.cancelling = true;
                    self.driver.cancel_accept(acceptor.id);
                }
                continue;
            }
            if acceptor.retry_at.is_some_and(|at| at > self.core.now) {
                continue;
            }
            acceptor.retry_at = None;
            // A little more room is needed to begin multishot than to keep it, so that a worker at
            // the border does not arm and cancel for every connection.
            let queues = if acceptor.multishot { 4 } else { 5 };
            let workers = self.core.directory.len() as u64;
            let roomy = !acceptor.once_only
                && room >= bursts * queues / 2
                && total >= workers.saturating_mul(bursts * queues / 2);
            if roomy {
                acceptor.limited = false;
                if !acceptor.multishot && !acceptor.cancelling {
                    acceptor.multishot = true;
                    acceptor.failed = false;
                    self.driver.accept(acceptor.id, AcceptMode::Multishot);
                }
                continue;
            }
            if acceptor.multishot {
                if !acceptor.cancelling {
                    acceptor.cancelling = true;
                    self.driver.cancel_accept(acceptor.id);
                }
                continue;
            }
            if acceptor.cancelling {
                continue;
            }
            let more = ONCE_ARMED.saturating_sub(acceptor.once);
            let more = room.min(total).min(more.into()) as u32;
            if std::mem::take(&mut acceptor.failed) && more == 0 && acceptor.once > 0 {
                // There is no room for one more that would find out whether it goes now: so all are armed anew.
                acceptor.cancelling = true;
                self.driver.cancel_accept(acceptor.id);
                continue;
            }
            for _ in 0..more {
                self.driver.accept(acceptor.id, AcceptMode::Once);
            }
            acceptor.once += more;
            let limited = acceptor.once == 0;
            if limited && !acceptor.limited {
                self.core.counters.accept_pauses.add(1);
            }
            acceptor.limited = limited;
            if workers > 1 && total < u64::from(ONCE_ARMED) {
                // The total is used up, perhaps by others, and nobody tells when they make room.
                acceptor.retry_at = Some(self.core.now + RECHECK);
            }
        }
    }
}

/// The error of an operation that was cancelled.
pub(super) fn is_cancelled(error: &io::Error) -> bool {
    error.raw_os_error() == Some(CANCELLED)
}

#[cfg(unix)]
const CANCELLED: i32 = libc::ECANCELED;
/// `ERROR_OPERATION_ABORTED`.
#[cfg(not(unix))]
const CANCELLED: i32 = 995;

/// Errors that concern one connection that is gone already, not the listener.
fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted)
}
