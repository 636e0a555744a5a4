//! What goes wrong on demand: one fault, at one moment.

use std::net::IpAddr;
use std::time::Duration;

use super::errno;
use super::trace::Actor;
use super::world::{Action, World};
use crate::clock::Time;

/// What the system is short of when it refuses a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Shortage {
    /// Descriptors of the process: EMFILE.
    ProcessFiles,
    /// Descriptors of the system: ENFILE.
    SystemFiles,
    /// Memory for socket buffers: ENOBUFS.
    Buffers,
    /// Memory: ENOMEM.
    Memory,
    /// Local ports: EADDRNOTAVAIL; outgoing connections only.
    Ports,
}

impl Shortage {
    pub(crate) fn errno(self) -> i32 {
        match self {
            Self::ProcessFiles => errno::EMFILE,
            Self::SystemFiles => errno::ENFILE,
            Self::Buffers => errno::ENOBUFS,
            Self::Memory => errno::ENOMEM,
            Self::Ports => errno::EADDRNOTAVAIL,
        }
    }
}

/// One thing that goes wrong, for [`Sim::script`](crate::sim::Sim::script).
///
/// Each fault has its own *chances*: the moments at which it can strike, and that [`When::nth`] counts;
/// those that happen "at the moment itself" heed only its time. What it looks like on a real system is in
/// the [table of faults](crate::sim#faults).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// Accepting fails; the connection stays in the queue. Chance: an attempt to accept a connection
    /// that waits.
    AcceptError(Shortage),
    /// The connection that was to be accepted is gone: ECONNABORTED. Chance: as above.
    AcceptAborted,
    /// No socket for an outgoing connection, or for datagrams. Chance: an outgoing connection, or a datagram socket,
    /// of a worker.
    ConnectError(Shortage),
    /// No way to the target: EHOSTUNREACH. Chance: an outgoing connection of a worker.
    Unreachable,
    /// A receive takes no more than so many bytes (at least one). Chance: a piece received by a worker.
    ShortRecv {
        /// The most that it takes.
        bytes: u32,
    },
    /// The kernel has no buffer for a receive although the pool has: ENOBUFS. Chance: an attempt of a
    /// worker to receive.
    NoBuffer,
    /// A multishot receive ends without data or reason. Chance: its last look after some data.
    RecvStop,
    /// A multishot operation ends with a valid result, as when the completion queue is full. Chance: a
    /// piece received, or a connection accepted, by a multishot operation of a worker.
    CqOverflow,
    /// A send ends after no more than so many bytes (at least one). Chance: a worker's send that can
    /// take something.
    ShortSend {
        /// The most that it takes.
        bytes: u32,
    },
    /// A completion becomes visible later than it happened; a receive looks at its socket later than
    /// it was woken. Chance: a completion of an accept, a send or a connect of a worker; a wake-up of a
    /// receive.
    LateCompletion {
        /// How much later.
        by: Duration,
    },
    /// A cancel comes too late: the operation ends by itself, if it can. Chance: a cancel that takes
    /// effect.
    LostCancel,
    /// An operation ignores its cancel until the faults [end](crate::sim::Sim::calm). Chance: a cancel.
    StuckCancel,
    /// A segment is lost once, and arrives 200 ms later. Chance: a segment that is sent.
    SegmentLoss,
    /// Nothing of a connection or a datagram socket passes, in both directions. Chance: a segment that arrives, a
    /// datagram that arrives (its receiver's socket stalls), or, for a connection chosen by [`When::peer`] (a
    /// socket by [`When::datagram_peer`]) alone, the moment itself.
    Stall {
        /// For how long.
        time: Duration,
    },
    /// Something in between resets a connection. Chance: as for [`Stall`](Self::Stall).
    Reset,
    /// A segment's receiver (for a connection chosen by [`When::peer`] alone: the other end than the
    /// peer's) has given the connection up: ETIMEDOUT. Chance: as for [`Stall`](Self::Stall).
    TimedOut,
    /// A datagram is lost. Chance: a datagram that is sent, of a worker chosen by [`When::worker`] or of a peer
    /// chosen by [`When::datagram_peer`].
    DatagramLoss,
    /// A datagram arrives twice. Chance: a datagram that is sent and not lost.
    DatagramDuplicate,
    /// A datagram is late, and those behind it do not wait. Chance: as above.
    DatagramReorder {
        /// How much later.
        by: Duration,
    },
    /// The system has no room for a datagram. Chance: a datagram that a worker sends.
    DatagramError(Shortage),
    /// A worker's thread is not scheduled. Chance: a turn of a worker.
    Pause {
        /// For how long.
        time: Duration,
    },
    /// Buffers are taken out of a worker's pool (of every worker's, unless [`When::worker`] says
    /// otherwise) as far as they are free, and come back later. At the moment itself.
    HoldBuffers {
        /// Receive buffers.
        recv: u32,
        /// Send buffers.
        send: u32,
        /// For how long.
        time: Duration,
    },
    /// The clock leaps forward; everything of that time is due at once. Chance: a move of the clock.
    ClockJump {
        /// How far.
        by: Duration,
    },
    /// Two hosts do not reach each other. At the moment itself.
    Partition {
        /// One of them.
        a: IpAddr,
        /// The other.
        b: IpAddr,
        /// For how long.
        time: Duration,
    },
}

/// What a fault is called, whatever its numbers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Strike {
    AcceptError,
    AcceptAborted,
    ConnectError,
    Unreachable,
    ShortRecv,
    NoBuffer,
    RecvStop,
    CqOverflow,
    ShortSend,
    LateCompletion,
    LostCancel,
    StuckCancel,
    SegmentLoss,
    Stall,
    Reset,
    TimedOut,
    DatagramLoss,
    DatagramDuplicate,
    DatagramReorder,
    DatagramError,
    Pause,
    HoldBuffers,
    ClockJump,
    Partition,
}

impl Strike {
    fn name(self) -> &'static str {
        match self {
            Self::AcceptError => "fault: accept error on",
            Self::AcceptAborted => "fault: accept aborted on",
            Self::ConnectError => "fault: connect error on",
            Self::Unreachable => "fault: unreachable for",
            Self::ShortRecv => "fault: short receive on",
            Self::NoBuffer => "fault: no buffer for",
            Self::RecvStop => "fault: receive stops on",
            Self::CqOverflow => "fault: completion queue full for",
            Self::ShortSend => "fault: short send on",
            Self::LateCompletion => "fault: late completion on",
            Self::LostCancel => "fault: lost cancel on",
            Self::StuckCancel => "fault: stuck cancel on",
            Self::SegmentLoss => "fault: segment lost on",
            Self::Stall => "fault: stall of",
            Self::Reset => "fault: reset of",
            Self::TimedOut => "fault: time-out of",
            Self::DatagramLoss => "fault: datagram lost from",
            Self::DatagramDuplicate => "fault: datagram twice from",
            Self::DatagramReorder => "fault: datagram late from",
            Self::DatagramError => "fault: datagram refused to",
            Self::Pause => "fault: pause of",
            Self::HoldBuffers => "fault: buffers held of",
            Self::ClockJump => "fault: clock jump",
            Self::Partition => "fault: partition",
        }
    }
}

impl Fault {
    fn strike(self) -> Strike {
        match self {
            Self::AcceptError(_) => Strike::AcceptError,
            Self::AcceptAborted => Strike::AcceptAborted,
            Self::ConnectError(_) => Strike::ConnectError,
            Self::Unreachable => Strike::Unreachable,
            Self::ShortRecv { .. } => Strike::ShortRecv,
            Self::NoBuffer => Strike::NoBuffer,
            Self::RecvStop => Strike::RecvStop,
            Self::CqOverflow => Strike::CqOverflow,
            Self::ShortSend { .. } => Strike::ShortSend,
            Self::LateCompletion { .. } => Strike::LateCompletion,
            Self::LostCancel => Strike::LostCancel,
            Self::StuckCancel => Strike::StuckCancel,
            Self::SegmentLoss => Strike::SegmentLoss,
            Self::Stall { .. } => Strike::Stall,
            Self::Reset => Strike::Reset,
            Self::TimedOut => Strike::TimedOut,
            Self::DatagramLoss => Strike::DatagramLoss,
            Self::DatagramDuplicate => Strike::DatagramDuplicate,
            Self::DatagramReorder { .. } => Strike::DatagramReorder,
            Self::DatagramError(_) => Strike::DatagramError,
            Self::Pause { .. } => Strike::Pause,
            Self::HoldBuffers { .. } => Strike::HoldBuffers,
            Self::ClockJump { .. } => Strike::ClockJump,
            Self::Partition { .. } => Strike::Partition,
        }
    }
}

/// When, where and how often a scripted fault strikes: first that much has to be true
/// ([`at`](Self::at), [`after_bytes`](Self::after_bytes)), then its chances are counted
/// ([`nth`](Self::nth)), of the chosen [`worker`](Self::worker) and connection
/// ([`peer`](Self::peer)) only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a moment is for `Sim::script`"]
pub struct When {
    pub(crate) from: Time,
    pub(crate) nth: Option<u64>,
    pub(crate) bytes: Option<u64>,
    pub(crate) times: u64,
    pub(crate) ring: Option<usize>,
    pub(crate) conn: Option<u64>,
}

impl When {
    /// The next chance.
    pub fn next() -> Self {
        Self { from: Time::ZERO, nth: None, bytes: None, times: 1, ring: None, conn: None }
    }

    /// The `n`-th chance from now on, counted from 1.
    pub fn nth(n: u64) -> Self {
        Self { nth: Some(n.max(1)), ..Self::next() }
    }

    /// At this time, or at the first chance after it.
    pub fn at(time: Time) -> Self {
        Self { from: time, ..Self::next() }
    }

    /// The first chance on a connection of which so many bytes have arrived, both directions
    /// together.
    pub fn after_bytes(bytes: u64) -> Self {
        Self { bytes: Some(bytes), ..Self::next() }
    }

    /// Not only once but at so many chances in a row.
    pub fn times(self, times: u64) -> Self {
        Self { times, ..self }
    }

    /// Whenever there is a chance, from then on.
    pub fn always(self) -> Self {
        self.times(u64::MAX)
    }
}

/// A fault that was called for.
#[derive(Clone, Copy, Debug)]
struct Rule {
    fault: Fault,
    strike: Strike,
    when: When,
}

/// Where a chance is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Place {
    pub(crate) ring: Option<usize>,
    pub(crate) conn: Option<u64>,
}

impl Place {
    pub(crate) fn ring(ring: usize) -> Self {
        Self { ring: Some(ring), conn: None }
    }

    pub(crate) fn conn(ring: usize, conn: u64) -> Self {
        Self { ring: Some(ring), conn: Some(conn) }
    }

    pub(crate) fn wire(conn: u64) -> Self {
        Self { ring: None, conn: Some(conn) }
    }
}

/// Whether a fault strikes.
#[derive(Clone, Copy, Debug)]
enum Hit {
    No,
    Chance,
    Script(Fault),
}

/// The faults that were called for and have not struck.
#[derive(Debug, Default)]
pub(crate) struct Script(Vec<Rule>);

impl Script {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

impl World {
    pub(crate) fn call_for(&mut self, when: When, fault: Fault) {
        let strike = fault.strike();
        let itself = match strike {
            Strike::HoldBuffers | Strike::Partition => true,
            Strike::Stall | Strike::Reset | Strike::TimedOut => {
                when.conn.is_some() && when.nth.is_none() && when.bytes.is_none()
            }
            _ => false,
        };
        if itself {
            self.schedule(when.from, Action::Strike { fault, ring: when.ring, conn: when.conn });
            return;
        }
        if when.from > self.now {
            // So that the clock stops there even if nothing else happens then.
            self.schedule(when.from, Action::Look);
        }
        self.script.0.push(Rule { fault, strike, when });
    }

    /// A scripted fault whose moment this is.
    fn scripted(&mut self, strike: Strike, place: Place) -> Option<Fault> {
        if self.script.0.is_empty() {
            return None;
        }
        let arrived = place.conn.and_then(|conn| self.conns.get(&conn)).map(|conn| conn.arrived);
        let now = self.now;
        let mut found = None;
        // Every rule that is meant counts the chance, also those whose turn it is not.
        for (index, rule) in self.script.0.iter_mut().enumerate() {
            let when = &mut rule.when;
            let meant = rule.strike == strike
                && when.from <= now
                && when.ring.is_none_or(|ring| place.ring == Some(ring))
                && when.conn.is_none_or(|conn| place.conn == Some(conn))
                && when.bytes.is_none_or(|bytes| arrived.is_some_and(|arrived| arrived >= bytes));
            if !meant {
                continue;
            }
            if let Some(nth) = &mut when.nth {
                *nth = nth.saturating_sub(1);
            }
            if found.is_none() && when.nth.is_none_or(|nth| nth == 0) {
                found = Some(index);
            }
        }
        let index = found?;
        let fault = self.script.0[index].fault;
        let times = &mut self.script.0[index].when.times;
        *times = times.saturating_sub(1);
        if *times == 0 {
            self.script.0.remove(index);
        }
        Some(fault)
    }

    fn hit(&mut self, strike: Strike, place: Place, probability: f64) -> Hit {
        let hit = match self.scripted(strike, place) {
            Some(fault) => Hit::Script(fault),
            None if self.rng.chance(probability) => Hit::Chance,
            None => return Hit::No,
        };
        let actor = place.ring.map_or(Actor::Net, Actor::Ring);
        self.note(actor, strike.name(), place.conn.unwrap_or(0), 0);
        hit
    }

    /// Whether a fault without numbers strikes.
    pub(crate) fn strikes(&mut self, strike: Strike, place: Place, probability: f64) -> bool {
        !matches!(self.hit(strike, place, probability), Hit::No)
    }

    /// How long a fault that strikes lasts: by chance up to `most`.
    pub(crate) fn strikes_for(
        &mut self,
        strike: Strike,
        place: Place,
        probability: f64,
        most: Duration,
    ) -> Option<Duration> {
        match self.hit(strike, place, probability) {
            Hit::No => None,
            Hit::Script(
                Fault::Stall { time }
                | Fault::Pause { time }
                | Fault::LateCompletion { by: time }
                | Fault::DatagramReorder { by: time }
                | Fault::ClockJump { by: time },
            ) => Some(time),
            Hit::Chance | Hit::Script(_) => {
                Some(Duration::from_nanos(self.rng.between(0, most.as_nanos() as u64)))
            }
        }
    }

    /// To how many bytes (of `most`, and at least one) a fault that strikes cuts an operation down.
    pub(crate) fn strikes_down_to(
        &mut self,
        strike: Strike,
        place: Place,
        probability: f64,
        most: u64,
    ) -> Option<u64> {
        match self.hit(strike, place, probability) {
            Hit::No => None,
            Hit::Script(Fault::ShortRecv { bytes } | Fault::ShortSend { bytes }) => {
                Some(u64::from(bytes.max(1)).min(most))
            }
            Hit::Chance | Hit::Script(_) => Some(self.rng.between(1, most)),
        }
    }

    /// What there is a shortage of: by chance one of `any`.
    pub(crate) fn strikes_short_of(
        &mut self,
        strike: Strike,
        place: Place,
        probability: f64,
        any: &[Shortage],
    ) -> Option<Shortage> {
        match self.hit(strike, place, probability) {
            Hit::No => None,
            Hit::Script(
                Fault::AcceptError(shortage) | Fault::ConnectError(shortage) | Fault::DatagramError(shortage),
            ) => Some(shortage),
            Hit::Chance | Hit::Script(_) => {
                let pick = self.rng.below(any.len() as u64) as usize;
                any.get(pick).copied()
            }
        }
    }

    /// A fault that happens at its moment, to whom it was meant for.
    pub(crate) fn strike_now(&mut self, fault: Fault, ring: Option<usize>, conn: Option<u64>) {
        let actor = ring.map_or(Actor::Net, Actor::Ring);
        self.note(actor, fault.strike().name(), conn.unwrap_or(0), 0);
        match (fault, conn) {
            (Fault::HoldBuffers { recv, send, time }, _) => self.hold_buffers(ring, recv, send, time),
            (Fault::Partition { a, b, time }, _) => {
                self.net.cut_between(a, b);
                self.schedule(self.now + time, Action::Heal { a, b });
            }
            (Fault::Stall { time }, Some(conn)) => self.stall(conn, time),
            (Fault::Reset, Some(conn)) => self.reset_from_the_middle(conn),
            (Fault::TimedOut, Some(conn)) => self.time_out(conn, None),
            _ => {}
        }
    }
}
