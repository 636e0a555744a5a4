//! The middle room: policy. One worker is one thread's event loop over one driver.
//!
//! A turn is a one-way street: submit and wait → completions to callbacks → accepted connections,
//! mailbox, timers → what all of that noted becomes operations → submit and wait.
//!
//! | file | behaviour |
//! |---|---|
//! | `mod.rs` | the turn, the mailbox's messages, stopping |
//! | `core.rs` | what callbacks may do: send, pause, close, connect, timers |
//! | `dispatch.rs` | from a completion to a callback; time limits |
//! | `reconcile.rs` | from a wish to an operation; starved receivers; broadcast |
//! | `accept.rs` | how many connections are accepted, limits, back-off |
//! | `table.rs` | slots, generations, the life of a connection |
//! | `wheel.rs` | timers |
//! | `pace.rs` | how to wait: asleep, looking, or for several messages |
//! | `pull.rs` | what was received waits until it is taken |
//! | `request.rs` | the async tier's wishes to the driver: listeners, datagrams, addresses |
//! | `mailbox/` | reaching a worker from other threads |
//! | `permits.rs` | the total over all workers |
//!
//! What may not enter this room: system calls, `unsafe`, anything that only one kernel has.

mod accept;
mod core;
mod dispatch;
mod mailbox;
mod pace;
mod permits;
mod pull;
mod reconcile;
mod request;
mod table;
mod wheel;

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use crate::buffer::Payload;
use crate::clock::Time;
use crate::driver::{CloseHow, Driver, Multishot};
use crate::handler::{CloseReason, Cx, Handler};

use accept::{Acceptor, Waiting};
use mailbox::Envelope;
use pace::Pace;

pub(crate) use self::core::{Core, Setup};
pub(crate) use mailbox::{Directory, directory};
pub use mailbox::{Remote, RemoteError};
pub(crate) use permits::Permits;
pub(crate) use request::{Answer, Opening, Request};
pub(crate) use table::Phase;
pub(crate) use wheel::{Wheel, due_tick, tick_of, time_of};

/// After the deadline of a stop, how long resets may take until the worker gives up waiting.
const LAST_GRACE: Duration = Duration::from_secs(2);

/// How long a stop waits for the mailbox to be empty, if others keep filling it.
const LAST_ORDERS: Duration = Duration::from_millis(100);

/// A listener for a worker, with what accepting must know of it.
pub(crate) struct WorkerListener<L> {
    pub(crate) listener: L,
    /// Connections that may wait in its queue.
    pub(crate) backlog: u32,
    /// Whether other workers accept from it too.
    pub(crate) shared: bool,
}

/// How a worker ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WorkerReport {
    pub(crate) finished: u64,
    pub(crate) aborted: u64,
    pub(crate) ops_in_kernel: u64,
    pub(crate) buffers_outstanding: u64,
    pub(crate) messages_undelivered: u64,
    pub(crate) tasks_dropped: u64,
    pub(crate) blocking_left: u64,
}

pub(crate) struct Worker<D: Driver, H: Handler> {
    // The driver comes first so that it is dropped first: it then awaits or leaks what the kernel
    // still holds before anything else goes (SAFETY invariant 2).
    driver: D,
    // In a box, so that the async tier can take it by moving a pointer.
    core: Box<Core<H::Conn, H::Message>>,
    handler: H,
    pace: Pace,
    /// Connections accepted when the last turn began.
    accepted_before: u64,
    acceptors: Vec<Acceptor>,
    /// Whether the driver cannot accept many with one operation as it is wanted here.
    once_only: bool,
    waiting: VecDeque<Waiting>,
    /// When to try again to hand over what waits, while the runtime's total is used up.
    admit_at: Option<Time>,
    check_accept: bool,
    fired: Vec<u32>,
    walking: Vec<u32>,
    reclaim_at: Option<Time>,
    /// When somebody who waits for a buffer may be fed again from a pool that is nearly dry.
    feed_at: Option<Time>,
    /// Connections waited for buffers when this turn's operations were begun.
    pressed: bool,
    /// When a stop was first seen.
    stop_seen: Option<Time>,
    /// The next step of stopping: the deadline, then the end of the last grace.
    stop_at: Option<Time>,
    gave_up_on_grace: bool,
    finished: u64,
    aborted: u64,
    started: bool,
}

impl<D: Driver, H: Handler> Worker<D, H> {
    pub(crate) fn new(
        mut driver: D,
        setup: Setup<H::Message>,
        listeners: Vec<WorkerListener<D::Listener>>,
        handler: H,
    ) -> io::Result<Self> {
        let once_only = match driver.multishot() {
            Multishot::WithPeer => false,
            Multishot::WithoutPeer => setup.config.peer_addresses,
            Multishot::Absent => true,
        };
        let mut acceptors = Vec::with_capacity(listeners.len());
        for WorkerListener { listener, backlog, shared } in listeners {
            let id = driver.add_listener(listener)?;
            acceptors.push(Acceptor::new(id, backlog, shared || once_only));
        }
        setup.directory[usize::from(setup.index)].attach(driver.waker());
        let mut core = Box::new(Core::new(setup, driver.memory().clone(), driver.now()));
        core.pull = H::PULL;
        let pace = Pace::new(core.config.wait, core.now);
        Ok(Self {
            driver,
            core,
            handler,
            pace,
            accepted_before: 0,
            acceptors,
            once_only,
            waiting: VecDeque::with_capacity(64),
            admit_at: None,
            check_accept: true,
            fired: Vec::with_capacity(1024),
            walking: Vec::with_capacity(1024),
            reclaim_at: None,
            feed_at: None,
            pressed: false,
            stop_seen: None,
            stop_at: None,
            gave_up_on_grace: false,
            finished: 0,
            aborted: 0,
            started: false,
        })
    }

    /// One pass of the loop. `Ok(false)`: the worker has stopped and is to be finished.
    ///
    /// # Errors
    /// What the driver cannot go on from.
    pub(crate) fn turn(&mut self) -> io::Result<bool> {
        if !self.started {
            self.started = true;
            self.core.now = self.driver.clock();
            self.handler.on_start(&mut Cx { core: &mut self.core });
            self.handler.on_turn(&mut Cx { core: &mut self.core });
            self.settle();
        }
        let timeout = self.patience();
        let mut wait = self.pace.plan(timeout);
        // Who waits in a listener's queue is accepted one after the other, and each would wait for others.
        let accepted = self.core.counters.accepted.get();
        if std::mem::replace(&mut self.accepted_before, accepted) != accepted {
            wait.gather = Duration::ZERO;
        }
        let began = match self.pace {
            Pace::Adaptive(_) if !wait.is_look() => Some(self.driver.clock()),
            _ => None,
        };
        self.driver.submit_and_wait(wait)?;
        self.core.now = self.driver.now();
        self.core.counters.turns.add(1);

        let before = self.core.counters.messages.get();
        for _ in 0..self.core.config.turn_budget {
            let Some(event) = self.driver.next_event() else { break };
            self.dispatch(event);
        }
        if let Pace::Adaptive(adaptive) = &mut self.pace {
            let messages = self.core.counters.messages.get() - before;
            match began {
                Some(began) => adaptive.observe(began, self.core.now, messages),
                None => adaptive.observe_busy(messages),
            }
        }
        if !self.core.ready.is_empty() {
            self.deliver_held();
        }
        if self.can_admit() {
            self.admit();
        }
        if self.core.directory[self.core.index()].is_notified() {
            self.read_mailbox();
        }
        if !self.core.broadcasts.is_empty() {
            self.broadcast();
        }
        self.ring_timers();
        self.stopping();
        self.handler.on_turn(&mut Cx { core: &mut self.core });
        self.settle();
        Ok(!self.is_done())
    }

    /// Makes operations of everything that was noted.
    fn settle(&mut self) {
        self.feed_starved();
        self.reconcile_all();
        let retry = self.acceptors.iter().filter_map(Acceptor::retry_at).min();
        if self.check_accept || retry.is_some_and(|at| at <= self.core.now) {
            self.control_accept();
        }
        self.core.counters.buffers_out.set(self.core.memory.pool.leased().into());
    }

    /// Whether somebody who was accepted can be handed to the handler. Not while stopping: whoever is
    /// accepted then, because the cancel of the accept lost its race, came after all were closed.
    fn can_admit(&self) -> bool {
        !self.core.stopping && !self.waiting.is_empty() && self.admit_at.is_none_or(|at| at <= self.core.now)
    }

    /// How long the next wait may take.
    fn patience(&self) -> Option<Duration> {
        let busy = self.driver.has_events()
            || !self.core.ready.is_empty()
            || self.can_admit()
            || !self.core.broadcasts.is_empty()
            || self.can_feed()
            || !self.core.connects.is_empty()
            || !self.core.answers.is_empty()
            || (!self.core.requests.is_empty() && !self.is_unlistening())
            || (self.core.stop_requested.is_some() && !self.core.stopping)
            || self.core.directory[self.core.index()].is_notified();
        if busy {
            return Some(Duration::ZERO);
        }
        let due = self.next_due()?;
        Some(due.since(self.driver.clock()))
    }

    fn read_mailbox(&mut self) {
        let index = self.core.index();
        self.core.directory[index].begin_drain();
        if let Some(deadline) = self.core.directory[index].stop_request() {
            self.core.request_stop(deadline);
        }
        for _ in 0..self.core.config.turn_budget {
            if !self.core.broadcasts.is_empty() {
                break;
            }
            let Some(envelope) = self.core.directory[index].pop() else { return };
            self.core.counters.mailbox.add(1);
            match envelope {
                Envelope::Send(id, bytes) => {
                    if let Some(slot) = self.core.find(id) {
                        // Closing or full: dropped, as documented; the latter is counted.
                        let _ = self.core.send(slot, Payload::from(bytes));
                    }
                }
                Envelope::Close(id) => {
                    if let Some(slot) = self.core.find(id) {
                        self.core.close(slot, CloseReason::Local);
                    }
                }
                Envelope::Abort(id) => {
                    if let Some(slot) = self.core.find(id) {
                        self.core.abort(slot);
                    }
                }
                Envelope::Broadcast(bytes) => {
                    self.core.broadcasts.push_back(self::core::Broadcast { bytes, next: 0 });
                }
                Envelope::User(message) => {
                    self.handler.on_message(&mut Cx { core: &mut self.core }, message);
                }
            }
        }
        self.core.directory[index].mark_again();
    }

    fn ring_timers(&mut self) {
        let tick = wheel::tick_of(self.core.now);
        let mut fired = std::mem::take(&mut self.fired);
        self.core.wheel.advance(tick, &mut fired);
        for &slot in &fired {
            self.on_tick(slot);
        }
        fired.clear();
        self.fired = fired;
        if self.core.alarm.is_some_and(|at| at <= self.core.now) {
            self.core.alarm = None;
            self.core.counters.timers.add(1);
            self.handler.on_alarm(&mut Cx { core: &mut self.core });
        }
    }

    /// The steps of a stop: close everything gracefully; at the deadline reset what is left.
    fn stopping(&mut self) {
        if let Some(deadline) = self.core.stop_requested
            && !self.core.stopping
        {
            // What was sent from outside before the stop still goes out, unless it never ends.
            let seen = *self.stop_seen.get_or_insert(self.core.now);
            let unread =
                !self.core.broadcasts.is_empty() || self.core.directory[self.core.index()].is_notified();
            if unread && self.core.now.since(seen) < deadline.min(LAST_ORDERS) {
                return;
            }
            self.handler.on_stop(&mut Cx { core: &mut self.core });
            self.core.stopping = true;
            self.stop_at = Some(self.core.now + deadline);
            self.check_accept = true;
            // In pull mode that is the handler's to do, in its own order.
            let to_close = if H::PULL { 0 } else { self.core.table.used() };
            for slot in 0..to_close {
                self.core.close(slot, CloseReason::Shutdown);
            }
        }
        if self.stop_at.is_some_and(|at| at <= self.core.now) {
            if self.gave_up_on_grace {
                self.stop_at = None;
                return;
            }
            self.gave_up_on_grace = true;
            self.core.over = true;
            self.stop_at = Some(self.core.now + LAST_GRACE);
            for slot in 0..self.core.table.used() {
                match self.core.table.get(slot).phase {
                    // Everything was sent, FIN too; the peer just does not finish.
                    Phase::Lingering => {
                        let reason = self.core.table.get(slot).reason;
                        self.begin_close(slot, CloseHow::Fin, reason);
                    }
                    Phase::Vacant | Phase::Closing => {}
                    _ => self.core.abort_with(slot, CloseReason::Shutdown),
                }
            }
        }
        if self.core.stopping {
            self.turn_all_away();
        }
    }

    fn is_done(&self) -> bool {
        let over = self.gave_up_on_grace && self.stop_at.is_none();
        let empty = self.core.table.live() == 0
            && self.waiting.is_empty()
            && self.acceptors.iter().all(Acceptor::is_idle);
        let idle = self.core.over || !self.handler.is_busy();
        self.core.stopping && (empty && idle || over)
    }

    /// The error that the handler stopped for, if it did.
    pub(crate) fn failure(&mut self) -> Option<io::Error> {
        self.handler.failure()
    }

    /// Ends the worker: lets go of the handler, then of the kernel.
    pub(crate) fn finish(self, patience: Duration) -> WorkerReport {
        let Self { driver, core, handler, finished, aborted, .. } = self;
        let index = core.index();
        let messages_undelivered = core.directory[index].close() as u64;
        let pool = core.memory.pool.clone();
        let (tasks_dropped, blocking_left) = (core.tasks_left, core.blocking_left);
        drop(handler);
        drop(core);
        let ops_in_kernel = driver.finish(patience) as u64;
        WorkerReport {
            finished,
            aborted,
            ops_in_kernel,
            buffers_outstanding: pool.leased().into(),
            messages_undelivered,
            tasks_dropped,
            blocking_left,
        }
    }
}
