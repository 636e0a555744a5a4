//! What a worker knows and has noted: everything but the driver and the handler.
//!
//! Callbacks act on the core only. They change what a connection *should* be doing and mark it
//! dirty; [`reconcile`](super::reconcile) then makes the driver do it. That is why the types a
//! handler sees need not name the driver, and why nothing a handler does can recurse.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::buffer::{BufMut, Detached, Memory, Payload};
use crate::clock::Time;
use crate::config::{ConnectConfig, MAX_TIMEOUT, WorkerConfig};
use crate::handler::{CloseReason, ConnId, ConnectError, ConnectErrorKind, SendError, SendErrorKind};
use crate::metrics::Counters;

use super::mailbox::{self, Directory, Envelope, Remote, RemoteError};
use super::permits::Permits;
use super::request::{Answer, Opening, Request};
use super::table::{Flags, Phase, Table};
use super::wheel::{self, Wheel};

/// A broadcast that has reached the connections below `next`.
pub(crate) struct Broadcast {
    pub(crate) bytes: Detached,
    pub(crate) next: u32,
}

pub(crate) struct Core<S, M> {
    index: u16,
    pub(crate) config: WorkerConfig,
    pub(crate) memory: Memory,
    pub(crate) table: Table<S>,
    pub(crate) wheel: Wheel,
    pub(crate) now: Time,
    pub(crate) counters: Arc<Counters>,
    pub(crate) directory: Directory<M>,
    pub(crate) permits: Permits,
    /// Connections whose wishes differ from what the driver does.
    pub(crate) dirty: Vec<u32>,
    /// Connections that were resumed and hold data (or an end of data) for the handler.
    pub(crate) ready: VecDeque<u32>,
    /// Connections without a buffer to receive into, oldest first.
    pub(crate) starved: VecDeque<u32>,
    /// Those whose turn had come and who found no buffer once more.
    pub(crate) starved_again: VecDeque<u32>,
    /// Outgoing connections, and datagram sockets, to begin.
    pub(crate) connects: Vec<(u32, Opening)>,
    /// Workers to wake.
    pub(crate) wakes: Vec<u16>,
    pub(crate) broadcasts: VecDeque<Broadcast>,
    /// What is to be asked of the driver, in order (the async tier's wishes).
    pub(crate) requests: Vec<Request>,
    /// What came of it.
    pub(crate) answers: VecDeque<Answer>,
    /// Whether the handler takes data when it wants some.
    pub(crate) pull: bool,
    /// The deadline of a stop has passed: nothing new begins.
    pub(crate) over: bool,
    pub(crate) alarm: Option<Time>,
    pub(crate) stop_requested: Option<Duration>,
    pub(crate) stopping: bool,
    /// Tasks, and calls on other threads, that have not ended: kept up to date while stopping.
    pub(crate) tasks_left: u64,
    pub(crate) blocking_left: u64,
    idle_ticks: u32,
}

/// The parts that a worker is given at start.
pub(crate) struct Setup<M> {
    pub(crate) index: u16,
    pub(crate) config: WorkerConfig,
    pub(crate) counters: Arc<Counters>,
    pub(crate) directory: Directory<M>,
    pub(crate) permits: Permits,
}

impl<S, M> Core<S, M> {
    pub(crate) fn new(setup: Setup<M>, memory: Memory, now: Time) -> Self {
        let Setup { index, config, counters, directory, permits } = setup;
        Self {
            index,
            memory,
            table: Table::new(config.max_connections),
            wheel: Wheel::new(wheel::tick_of(now)),
            now,
            counters,
            directory,
            permits,
            dirty: Vec::with_capacity(1024),
            ready: VecDeque::with_capacity(256),
            starved: VecDeque::with_capacity(256),
            starved_again: VecDeque::with_capacity(256),
            connects: Vec::new(),
            wakes: Vec::new(),
            broadcasts: VecDeque::new(),
            requests: Vec::new(),
            answers: VecDeque::new(),
            pull: false,
            over: false,
            alarm: None,
            stop_requested: None,
            stopping: false,
            tasks_left: 0,
            blocking_left: 0,
            idle_ticks: config.idle_timeout.map_or(0, ticks),
            config,
        }
    }

    /// A core that knows no connection and can open none, for the time that this one is lent.
    pub(crate) fn stand_in(&self) -> Self {
        let setup = Setup {
            index: self.index,
            config: WorkerConfig { max_connections: 0, ..self.config.clone() },
            counters: self.counters.clone(),
            directory: self.directory.clone(),
            permits: self.permits.clone(),
        };
        let mut core = Self::new(setup, self.memory.clone(), self.now);
        core.over = true;
        core.stopping = true;
        core
    }

    pub(crate) fn now(&self) -> Time {
        self.now
    }

    pub(crate) fn index(&self) -> usize {
        self.index.into()
    }

    pub(crate) fn workers(&self) -> usize {
        self.directory.len()
    }

    pub(crate) fn connections(&self) -> usize {
        self.table.live() as usize
    }

    pub(crate) fn id(&self, slot: u32) -> ConnId {
        self.name(self.table.key(slot))
    }

    pub(crate) fn name(&self, key: crate::driver::Key) -> ConnId {
        ConnId { worker: self.index, slot: key.slot, generation: key.generation }
    }

    /// The slot of a connection that a handler may act on.
    pub(crate) fn find(&self, id: ConnId) -> Option<u32> {
        if id.worker != self.index {
            return None;
        }
        let slot = self.table.find(crate::driver::Key { slot: id.slot, generation: id.generation })?;
        (self.table.get(slot).phase != Phase::Closing).then_some(slot)
    }

    pub(crate) fn ids(&self) -> impl Iterator<Item = ConnId> + '_ {
        (0..self.table.used())
            .filter(|&slot| self.table.get(slot).phase == Phase::Open)
            .map(|slot| self.id(slot))
    }

    /// The state of a connection that is not over.
    ///
    /// # Panics
    /// Never for a slot that a [`Conn`](crate::Conn) names: the state is taken only when the
    /// connection enters Closing, and no `Conn` exists then.
    pub(crate) fn state(&mut self, slot: u32) -> &mut S {
        self.table.get_mut(slot).state.as_mut().expect("a connection has its state until it is over")
    }

    /// Why nothing more can be sent, if sending has failed.
    pub(crate) fn send_failure(&self, slot: u32) -> Option<CloseReason> {
        let entry = self.table.get(slot);
        entry.flags.has(Flags::TX_FAILED).then_some(entry.reason)
    }

    pub(crate) fn unsent(&self, slot: u32) -> u64 {
        self.table.get(slot).unsent
    }

    pub(crate) fn is_congested(&self, slot: u32) -> bool {
        self.table.get(slot).flags.has(Flags::CONGESTED)
    }

    #[inline]
    pub(crate) fn mark_dirty(&mut self, slot: u32) {
        let entry = self.table.get_mut(slot);
        if !entry.flags.has(Flags::DIRTY) {
            entry.flags.insert(Flags::DIRTY);
            self.dirty.push(slot);
        }
    }

    #[inline]
    pub(crate) fn send(&mut self, slot: u32, payload: Payload) -> Result<(), SendError> {
        let entry = self.table.get_mut(slot);
        if !matches!(entry.phase, Phase::Open | Phase::Connecting)
            || entry.flags.has(Flags::TX_ENDING.and(Flags::TX_FAILED).and(Flags::ABORT))
        {
            return Err(SendError { payload, kind: SendErrorKind::Closed });
        }
        if entry.unsent >= u64::from(self.config.send_limit) {
            self.counters.send_refusals.add(1);
            return Err(SendError { payload, kind: SendErrorKind::Full });
        }
        if payload.is_empty() {
            return Ok(());
        }
        entry.unsent += payload.len() as u64;
        self.memory.chunks.push(&mut entry.queue, payload);
        if entry.unsent >= u64::from(self.config.high_water) && !entry.flags.has(Flags::CONGESTED) {
            entry.flags.insert(Flags::CONGESTED);
            self.counters.congested.add(1);
        }
        self.mark_dirty(slot);
        Ok(())
    }

    /// Whether data may be handed to the handler now.
    #[inline]
    pub(crate) fn may_deliver(&self, slot: u32) -> bool {
        let flags = self.table.get(slot).flags;
        !(flags.has(Flags::PAUSED) || flags.has(Flags::AUTO_PAUSE) && flags.has(Flags::CONGESTED))
    }

    pub(crate) fn set_paused(&mut self, slot: u32, paused: bool) {
        let entry = self.table.get_mut(slot);
        if entry.flags.has(Flags::PAUSED) == paused {
            return;
        }
        entry.flags.set(Flags::PAUSED, paused);
        if !paused {
            self.mark_ready(slot);
        }
        self.mark_dirty(slot);
    }

    pub(crate) fn set_auto_pause(&mut self, slot: u32, on: bool) {
        self.table.get_mut(slot).flags.set(Flags::AUTO_PAUSE, on);
        self.mark_ready(slot);
        self.mark_dirty(slot);
    }

    /// Puts a connection among those who wait for a buffer to receive into: at the end, or, if its
    /// turn had come and there was none after all, before everybody whose turn has not.
    pub(crate) fn starve(&mut self, slot: u32) {
        let entry = self.table.get_mut(slot);
        if entry.flags.has(Flags::STARVED) {
            return;
        }
        entry.flags.insert(Flags::STARVED);
        if entry.flags.has(Flags::FED) {
            entry.flags.remove(Flags::FED);
            self.starved_again.push_back(slot);
        } else {
            self.starved.push_back(slot);
        }
    }

    /// Whether connections wait for a buffer.
    pub(crate) fn starving(&self) -> bool {
        !self.starved.is_empty() || !self.starved_again.is_empty()
    }

    /// Who has waited longest for a buffer.
    pub(crate) fn next_starved(&mut self) -> Option<u32> {
        self.starved_again.pop_front().or_else(|| self.starved.pop_front())
    }

    /// Notes that held data may be deliverable again.
    pub(crate) fn mark_ready(&mut self, slot: u32) {
        if self.pull || !self.may_deliver(slot) {
            return;
        }
        let entry = self.table.get_mut(slot);
        let waiting =
            !entry.held.is_empty() || (entry.flags.has(Flags::RX_EOF) && !entry.flags.has(Flags::EOF_TOLD));
        if waiting && !entry.flags.has(Flags::READY) {
            entry.flags.insert(Flags::READY);
            self.ready.push_back(slot);
        }
    }

    pub(crate) fn shutdown_write(&mut self, slot: u32) {
        let entry = self.table.get_mut(slot);
        let open = matches!(entry.phase, Phase::Open | Phase::Connecting);
        if open && !entry.flags.has(Flags::TX_ENDING) {
            entry.flags.insert(Flags::TX_ENDING);
            self.mark_dirty(slot);
        }
    }

    pub(crate) fn close(&mut self, slot: u32, reason: CloseReason) {
        let entry = self.table.get_mut(slot);
        if entry.flags.has(Flags::DATAGRAM) {
            // There is nothing to finish: what was sent is with the kernel.
            return self.abort_with(slot, reason);
        }
        match entry.phase {
            // Aborted in the same callback: that stands.
            Phase::Open if entry.flags.has(Flags::ABORT) => {}
            Phase::Open => {
                if entry.flags.has(Flags::TX_FAILED) {
                    entry.flags.insert(Flags::ABORT);
                } else {
                    let after_peer = reason == CloseReason::Local && entry.flags.has(Flags::RX_EOF);
                    entry.reason = if after_peer { CloseReason::Eof } else { reason };
                    entry.flags.insert(Flags::TX_ENDING);
                }
                entry.phase = Phase::Draining;
                let held = entry.held.take();
                entry.pieces = 0;
                self.memory.chunks.clear(held);
                let limit = self.due(self.config.close_timeout);
                self.table.get_mut(slot).limit = limit;
                self.retime(slot);
                self.mark_dirty(slot);
            }
            // What waits for the connection is still sent when it is there.
            Phase::Connecting if !entry.queue.is_empty() && reason != CloseReason::Shutdown => {
                entry.reason = reason;
                entry.flags.insert(Flags::TX_ENDING.and(Flags::CLOSE_LATER));
            }
            Phase::Connecting => self.abort_with(slot, reason),
            Phase::Vacant | Phase::Draining | Phase::Lingering | Phase::Closing => {}
        }
    }

    pub(crate) fn abort(&mut self, slot: u32) {
        self.abort_with(slot, CloseReason::Local);
    }

    pub(crate) fn abort_with(&mut self, slot: u32, reason: CloseReason) {
        let entry = self.table.get_mut(slot);
        if matches!(entry.phase, Phase::Vacant | Phase::Closing) || entry.flags.has(Flags::ABORT) {
            return;
        }
        entry.flags.insert(Flags::ABORT);
        entry.reason = reason;
        self.mark_dirty(slot);
    }

    pub(crate) fn set_idle_timeout(&mut self, slot: u32, timeout: Option<Duration>) {
        self.table.get_mut(slot).idle = timeout.map_or(0, ticks);
        self.retime(slot);
    }

    pub(crate) fn set_deadline(&mut self, slot: u32, after: Option<Duration>) {
        self.table.get_mut(slot).deadline = after.map_or(0, |after| self.due(after));
        self.retime(slot);
    }

    pub(crate) fn set_timer(&mut self, slot: u32, after: Option<Duration>) {
        self.table.get_mut(slot).timer = after.map_or(0, |after| self.due(after));
        self.retime(slot);
    }

    pub(crate) fn due(&self, after: Duration) -> u64 {
        wheel::due_tick(self.now, after.min(MAX_TIMEOUT)).max(1)
    }

    /// The earliest tick at which anything is due for a connection; `None` if nothing ever is.
    pub(crate) fn earliest(&self, slot: u32) -> Option<u64> {
        let entry = self.table.get(slot);
        let idle = match entry.phase {
            Phase::Open => entry.idle_due(),
            _ => 0,
        };
        [idle, entry.deadline, entry.timer, entry.limit].into_iter().filter(|&tick| tick > 0).min()
    }

    /// Brings the wheel in line with a connection's times. An entry that became later is left where
    /// it is: it is looked at and moved when it comes up, so activity costs the wheel nothing.
    pub(crate) fn retime(&mut self, slot: u32) {
        match (self.earliest(slot), self.wheel.due(slot)) {
            (None, Some(_)) => self.wheel.cancel(slot),
            (Some(due), Some(set)) if due < set => self.wheel.set(slot, due),
            (Some(due), None) => self.wheel.set(slot, due),
            _ => {}
        }
    }

    /// Gives a new connection its slot. The caller holds a permit for it.
    pub(crate) fn insert(&mut self, phase: Phase, state: Option<S>) -> Option<u32> {
        let slot = self.table.take(phase, state, wheel::tick_of(self.now))?;
        self.wheel.grow(self.table.used() as usize);
        self.table.get_mut(slot).idle = self.idle_ticks;
        self.counters.connections.set(self.table.live().into());
        Some(slot)
    }

    /// Ends a slot's use.
    pub(crate) fn vacate(&mut self, slot: u32) {
        self.table.vacate(slot);
        self.permits.give_back(1);
        self.counters.connections.set(self.table.live().into());
    }

    pub(crate) fn connect(&mut self, config: ConnectConfig, state: S) -> Result<ConnId, ConnectError<S>> {
        let refuse = |state, kind| Err(ConnectError { state, kind });
        if config.source.is_some_and(|source| source.is_ipv4() != config.target.is_ipv4()) {
            return refuse(state, ConnectErrorKind::FamilyMismatch);
        }
        if config.timeout < Duration::from_millis(1) || config.timeout > MAX_TIMEOUT {
            return refuse(state, ConnectErrorKind::Timeout);
        }
        if config.options.check().is_err() {
            return refuse(state, ConnectErrorKind::Options);
        }
        let timeout = config.timeout;
        self.open(Opening::Tcp(config), timeout, state)
    }

    /// Notes that a socket is to be opened, by the system if it has done so within `timeout`.
    pub(crate) fn open(
        &mut self,
        opening: Opening,
        timeout: Duration,
        state: S,
    ) -> Result<ConnId, ConnectError<S>> {
        let refuse = |state, kind| Err(ConnectError { state, kind });
        if self.over || self.stopping && !self.pull {
            return refuse(state, ConnectErrorKind::Stopping);
        }
        if self.table.room() == 0 {
            return refuse(state, ConnectErrorKind::WorkerFull);
        }
        if !self.permits.try_take() {
            return refuse(state, ConnectErrorKind::RuntimeFull);
        }
        let limit = self.due(timeout);
        let Some(slot) = self.insert(Phase::Connecting, None) else {
            self.permits.give_back(1);
            return refuse(state, ConnectErrorKind::WorkerFull);
        };
        let entry = self.table.get_mut(slot);
        entry.state = Some(state);
        entry.limit = limit;
        self.retime(slot);
        self.connects.push((slot, opening));
        Ok(self.id(slot))
    }

    pub(crate) fn alloc(&mut self) -> Option<BufMut> {
        self.memory.pool.alloc()
    }

    pub(crate) fn set_alarm(&mut self, at: Option<Time>) {
        self.alarm = at;
    }

    pub(crate) fn post(&mut self, worker: usize, message: M) -> Result<(), RemoteError<M>> {
        mailbox::queue(&self.directory, worker, Envelope::User(message)).map_err(mailbox::unwrap_message)?;
        if worker == self.index() {
            // Found in the next turn: the mark alone keeps it awake.
            self.directory[worker].notify();
        } else if !self.wakes.contains(&(worker as u16)) {
            self.wakes.push(worker as u16);
        }
        Ok(())
    }

    pub(crate) fn remote(&self) -> Remote<M> {
        Remote::new(self.directory.clone())
    }

    pub(crate) fn request_stop(&mut self, deadline: Duration) {
        self.stop_requested.get_or_insert(deadline);
    }
}

/// A duration in ticks, at least one.
fn ticks(duration: Duration) -> u32 {
    let millis = duration.min(MAX_TIMEOUT).as_nanos().div_ceil(1_000_000);
    u32::try_from(millis.max(1)).unwrap_or(u32::MAX)
}
