//! The generator itself: a [`Handler`] that connects, sends on schedule, verifies and counts.
//!
//! ```text
//!   Ramp ──────────► Run ──────────────► Stop (or the window's end)
//!   connect at the   messages inside     nothing new; waits for what is outstanding
//!   ramp's rate      [from, until) count
//! ```
//!
//! A message belongs to the span of time that it was *intended* for: by the schedule in an open
//! loop, by its sending in a closed one. A reply that takes long therefore counts where it hurt,
//! and a delay of this program is never hidden.
//!
//! Nothing is allocated per message: payloads are slices of one leaked block, the times of what is
//! outstanding stand in a ring made with the connection, counters are handed over once a second.

use std::collections::VecDeque;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use corelane::{Accepted, Buf, CloseReason, Closed, Conn, ConnId, Cx, Handler, Time};

use super::door::Lane;
use super::plan::{Plan, Traffic};
use super::stats::{ErrorClass, Gauges, Interval, Stats};

/// What the conductor tells every worker.
#[derive(Clone, Copy, Debug)]
pub enum Command {
    /// Begin to connect; this moment is the origin of the ramp and of the schedule.
    Ramp(Time),
    /// Messages intended for `from..until` count.
    Run {
        /// Beginning of the window.
        from: Time,
        /// Its end.
        until: Time,
    },
    /// The window, begun or not, ends here.
    Stop(Time),
}

/// What the workers and the signal thread tell the conductor.
pub enum Event {
    /// What a worker saw up to `end`.
    Interval {
        /// Which worker.
        worker: usize,
        /// The moment at which it was due to be handed over: the same for all workers.
        end: Time,
        /// What it saw.
        data: Box<Interval>,
    },
    /// A worker's connections are all established or failed.
    Ramped {
        /// Which worker.
        worker: usize,
        /// When that was.
        at: Time,
        /// How many are established and how many failed.
        gauges: Gauges,
    },
    /// The last of a worker's connections ended.
    Ended {
        /// Which worker.
        worker: usize,
        /// How it stands.
        gauges: Gauges,
    },
    /// A worker has nothing outstanding any more, and its last interval is handed over.
    Done,
    /// A signal arrived.
    Signal,
}

/// Intervals that were read and cleared, to be filled again.
pub type Spares = Arc<Mutex<Vec<Box<Interval>>>>;

/// Times of one message that waits for its reply.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stamp {
    pub(super) intended: Time,
    pub(super) sent: Time,
}

/// State of one connection.
pub struct Peer {
    /// Position among this worker's connections.
    pub(super) slot: u32,
    /// Number among all connections.
    pub(super) index: u32,
    /// Messages answered, which is the number of the one that is answered next.
    pub(super) answered: u32,
    /// Messages sent, which is the number of the next one.
    pub(super) sent: u32,
    /// Bytes of the next reply that arrived and are right.
    pub(super) matched: u32,
    /// How many of the oldest outstanding messages have timed out already.
    pub(super) expired: u32,
    /// Messages that are due but wait for earlier replies ([`Overlap::Queue`]).
    pub(super) owed: u32,
    pub(super) established: bool,
    /// Whether this side ended it for an error that is counted already.
    pub(super) condemned: bool,
    /// Whether the reply timer runs.
    pub(super) timed: bool,
    pub(super) begun: Time,
    /// Round of the schedule that the oldest owed message belongs to.
    pub(super) owed_round: u64,
    pub(super) outstanding: VecDeque<Stamp>,
}

/// Where one of this worker's connections is in its life.
#[derive(Clone, Copy, Debug)]
pub(super) enum Slot {
    Waiting,
    Connecting,
    Open(ConnId),
    Failed,
    Gone,
}

/// Never: a time that no clock reaches.
pub(super) const NEVER: Time = Time::from_nanos(u64::MAX);

/// Connections begun in one turn. From Linux 6.13 on one enter runs at most 20 pieces of deferred
/// work (`IO_LOCAL_TW_DEFAULT_MAX`), and an established connection is one: begun faster, they would
/// stand established and unnoticed until the ramp is over.
const CONNECTS_PER_TURN: usize = 16;

/// Messages sent in one turn; the rest waits for the next, so that replies are read in between.
pub(super) const MESSAGES_PER_TURN: usize = 64;

/// Time between hand-overs.
const TICK: Duration = Duration::from_secs(1);

/// Time too short for an interval of its own.
const SCRAP: Duration = Duration::from_millis(100);

/// Time allowed beyond the timeout for the last replies.
const GRACE: Duration = Duration::from_millis(250);

/// One worker's part of the generator.
pub struct Generator {
    pub(super) plan: Arc<Plan>,
    pub(super) events: Sender<Event>,
    pub(super) spares: Spares,
    pub(super) worker: usize,
    pub(super) workers: usize,

    /// Origin of ramp and schedule.
    pub(super) origin: Time,
    pub(super) from: Time,
    pub(super) until: Time,
    pub(super) next_tick: Time,
    pub(super) stopped: bool,
    pub(super) done: bool,

    pub(super) slots: Vec<Slot>,
    /// Next slot to connect, and how many are neither established nor failed.
    pub(super) next_connect: usize,
    pub(super) unresolved: usize,
    /// Next slot to give its first messages to (closed loop); all of them once the run began.
    pub(super) next_kick: Option<usize>,
    /// Next slot and round of the schedule (open loop).
    pub(super) next_beat: usize,
    pub(super) round: u64,

    /// Messages sent and neither answered nor timed out.
    pub(super) outstanding: u64,
    /// Sum of the connections' owed messages.
    pub(super) owed: u64,
    pub(super) interval: Box<Interval>,
}

impl Generator {
    /// The part of worker `worker`.
    pub fn new(plan: Arc<Plan>, events: Sender<Event>, spares: Spares, worker: usize) -> Self {
        Self {
            plan,
            events,
            spares,
            worker,
            workers: 1,
            origin: NEVER,
            from: NEVER,
            until: NEVER,
            next_tick: NEVER,
            stopped: false,
            done: false,
            slots: Vec::new(),
            next_connect: 0,
            unresolved: 0,
            next_kick: None,
            next_beat: 0,
            round: 0,
            outstanding: 0,
            owed: 0,
            interval: Box::new(Interval::new()),
        }
    }

    /// Connections are dealt out in turn: slot `s` of worker `w` is number `s * workers + w`.
    pub(super) fn index(&self, slot: usize) -> u32 {
        (slot * self.workers + self.worker) as u32
    }

    /// The counters of the span of time that `intended` lies in.
    #[inline]
    pub(super) fn stats(&mut self, intended: Time) -> &mut Stats {
        if intended >= self.from { &mut self.interval.window } else { &mut self.interval.before }
    }

    /// Does everything that is due and sets the alarm for what is due next.
    pub(super) fn advance(&mut self, cx: &mut impl Lane) {
        if self.done || self.origin == NEVER {
            return;
        }
        let now = cx.now();
        if now >= self.until {
            self.stopped = true;
        }
        let mut next = self.connect_due(cx, now);
        next = next.min(self.kick(cx, now));
        next = next.min(self.beat_due(cx, now));
        if now >= self.next_tick {
            let end = self.next_tick;
            self.hand_over(end);
            self.next_tick += TICK;
            while self.next_tick <= now {
                self.next_tick += TICK;
            }
            if end < self.until {
                // One hand-over falls on the window's end, so that no interval lies across it.
                self.next_tick = self.next_tick.min(self.until);
            }
        }
        if self.stopped {
            let last = self.until + self.plan.timeout + GRACE;
            if now >= last {
                self.give_up(cx, now);
            }
            next = next.min(last);
            self.finish_if_drained(now);
        }
        if self.done {
            cx.set_alarm(None);
        } else {
            let end = if self.stopped { NEVER } else { self.until };
            cx.set_alarm(Some(next.min(self.next_tick).min(end)));
        }
    }

    /// Begins the connections that are due; returns when the next one is.
    fn connect_due(&mut self, cx: &mut impl Lane, now: Time) -> Time {
        for _ in 0..CONNECTS_PER_TURN {
            if self.next_connect == self.slots.len() || self.stopped {
                return NEVER;
            }
            let slot = self.next_connect;
            let index = self.index(slot);
            let due = self.origin + self.plan.ramp(index);
            if due > now {
                return due;
            }
            self.next_connect += 1;
            let peer = Peer {
                slot: slot as u32,
                index,
                answered: 0,
                sent: 0,
                matched: 0,
                expired: 0,
                owed: 0,
                established: false,
                condemned: false,
                timed: false,
                begun: now,
                owed_round: 0,
                outstanding: VecDeque::with_capacity(self.plan.traffic.depth() as usize),
            };
            if cx.connect(self.plan.connect(index), peer) {
                self.slots[slot] = Slot::Connecting;
                self.interval.gauges.connecting += 1;
            } else {
                self.failed(slot, ErrorClass::LocalFdLimit, now);
            }
        }
        now
    }

    fn failed(&mut self, slot: usize, class: ErrorClass, now: Time) {
        self.slots[slot] = Slot::Failed;
        self.stats(now).error(class);
        self.interval.gauges.failed += 1;
        self.resolved(now);
    }

    /// One more connection is established or failed.
    fn resolved(&mut self, now: Time) {
        self.unresolved -= 1;
        if self.unresolved == 0 {
            let _ = self.events.send(Event::Ramped {
                worker: self.worker,
                at: now,
                gauges: self.interval.gauges,
            });
        }
    }

    /// Hands the interval that ends at `end` to the conductor.
    fn hand_over(&mut self, end: Time) {
        let gauges = self.interval.gauges;
        let spare = self.spares.lock().ok().and_then(|mut spares| spares.pop());
        let fresh = spare.unwrap_or_else(|| Box::new(Interval::new()));
        let data = std::mem::replace(&mut self.interval, fresh);
        self.interval.gauges = gauges;
        let _ = self.events.send(Event::Interval { worker: self.worker, end, data });
    }

    pub(super) fn finish_if_drained(&mut self, now: Time) {
        if self.stopped && !self.done && self.outstanding == 0 && self.owed == 0 && self.schedule_over() {
            self.done = true;
            self.hand_over(now);
            let _ = self.events.send(Event::Done);
        }
    }

    /// The worker has started.
    pub(super) fn start(&mut self, workers: usize) {
        self.workers = workers;
        let share = (self.plan.connections as usize + self.workers - 1 - self.worker) / self.workers;
        self.slots = vec![Slot::Waiting; share];
        self.unresolved = share;
    }

    /// The conductor said something.
    pub(super) fn command(&mut self, cx: &mut impl Lane, command: Command) {
        match command {
            Command::Ramp(origin) => {
                self.origin = origin;
                self.next_tick = origin + TICK;
                if self.unresolved == 0 {
                    let _ = self.events.send(Event::Ramped {
                        worker: self.worker,
                        at: origin,
                        gauges: self.interval.gauges,
                    });
                }
            }
            Command::Run { from, until } => {
                self.from = from;
                self.until = until;
                if matches!(self.plan.traffic, Traffic::Closed { .. }) {
                    self.next_kick = Some(0);
                }
                // From here on intervals end on whole seconds of the window, for all workers alike. A
                // scrap before the first of them goes with the second that follows.
                let mut to_go = from.since(cx.now()).as_nanos() as u64 % TICK.as_nanos() as u64;
                if to_go < SCRAP.as_nanos() as u64 {
                    to_go += TICK.as_nanos() as u64;
                }
                self.next_tick = (cx.now() + Duration::from_nanos(to_go)).min(until);
            }
            Command::Stop(at) => {
                self.until = self.until.min(at);
                self.from = self.from.min(self.until);
            }
        }
        self.advance(cx);
    }

    /// A connection is established.
    pub(super) fn connected(&mut self, peer: &mut Peer, id: ConnId, now: Time) {
        peer.established = true;
        self.slots[peer.slot as usize] = Slot::Open(id);
        self.interval.connect.record(now.since(peer.begun));
        self.interval.gauges.connecting -= 1;
        self.interval.gauges.open += 1;
        self.resolved(now);
    }

    /// A connection is over, or was never there.
    pub(super) fn closed(&mut self, mut peer: Peer, reason: CloseReason, now: Time) {
        if self.done {
            return;
        }
        let slot = peer.slot as usize;
        if !peer.established {
            self.interval.gauges.connecting -= 1;
            if reason == CloseReason::Shutdown {
                self.slots[slot] = Slot::Failed;
            } else {
                self.failed(slot, ErrorClass::of_connect(reason), now);
            }
            return;
        }
        self.slots[slot] = Slot::Gone;
        self.interval.gauges.open -= 1;
        self.interval.gauges.gone += 1;
        if self.interval.gauges.open == 0 && self.unresolved == 0 {
            // Not left to the next hand-over: the run may be over before it.
            let _ = self.events.send(Event::Ended { worker: self.worker, gauges: self.interval.gauges });
        }
        if !peer.condemned
            && let Some(class) = ErrorClass::of_close(reason)
        {
            self.stats(now).error(class);
        }
        self.forget(&mut peer, now, |stats, _| stats.counts.lost += 1);
        self.finish_if_drained(now);
    }
}

impl Handler for Generator {
    type Conn = Peer;
    type Message = Command;

    fn on_start(&mut self, cx: &mut Cx<'_, Self>) {
        self.start(cx.workers());
    }

    fn on_accept(&mut self, _: &mut Cx<'_, Self>, _: Accepted) -> Option<Peer> {
        None
    }

    fn on_message(&mut self, cx: &mut Cx<'_, Self>, command: Command) {
        self.command(cx, command);
    }

    fn on_alarm(&mut self, cx: &mut Cx<'_, Self>) {
        self.advance(cx);
    }

    fn on_connected(&mut self, conn: &mut Conn<'_, Self>) {
        let (now, id) = (conn.now(), conn.id());
        self.connected(conn.state(), id, now);
    }

    fn on_data(&mut self, conn: &mut Conn<'_, Self>, data: Buf) {
        self.verify(conn, &data);
        self.finish_if_drained(conn.now());
    }

    fn on_timer(&mut self, conn: &mut Conn<'_, Self>) {
        self.expire(conn);
        self.finish_if_drained(conn.now());
    }

    fn on_closed(&mut self, cx: &mut Cx<'_, Self>, closed: Closed<Peer>) {
        self.closed(closed.state, closed.reason, cx.now());
    }
}
