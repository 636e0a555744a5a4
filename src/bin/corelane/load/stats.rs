//! What the generator counts: latencies, messages, errors by class and side.
//!
//! A worker fills one [`Interval`] at a time and hands it over whole once a second, so the hot path
//! records into memory of its own, and merging, percentiles and printing happen on another thread.

use std::io;
use std::time::Duration;

use corelane::CloseReason;
use hdrhistogram::Histogram;

/// Latencies from 100 ns to one hour, to three significant digits.
#[derive(Clone)]
pub struct Latency(Histogram<u64>);

const LOWEST_NS: u64 = 100;
const HIGHEST_NS: u64 = 3_600_000_000_000;

impl Latency {
    /// An empty one. All memory it will ever need is allocated here.
    pub fn new() -> Self {
        let histogram = Histogram::new_with_bounds(LOWEST_NS, HIGHEST_NS, 3);
        Self(histogram.expect("constant bounds that the histogram accepts"))
    }

    /// Records one latency; what exceeds an hour counts as an hour.
    #[inline]
    pub fn record(&mut self, latency: Duration) {
        self.0.saturating_record(latency.as_nanos().min(HIGHEST_NS.into()) as u64);
    }

    /// Adds all that `other` recorded.
    pub fn add(&mut self, other: &Self) {
        if !other.0.is_empty() {
            // Cannot fail: both have the same bounds.
            let _ = self.0.add(&other.0);
        }
    }

    /// Forgets everything recorded, keeps the memory.
    pub fn clear(&mut self) {
        if !self.0.is_empty() {
            self.0.reset();
        }
    }

    /// Number of latencies recorded.
    pub fn count(&self) -> u64 {
        self.0.len()
    }

    /// The latency, in nanoseconds, that the given share did not exceed; `None` when empty.
    pub fn quantile(&self, share: f64) -> Option<u64> {
        (!self.0.is_empty()).then(|| self.0.value_at_quantile(share).min(self.0.max()))
    }

    /// Smallest and largest, in nanoseconds, and the mean.
    pub fn extremes(&self) -> Option<(u64, f64, u64)> {
        (!self.0.is_empty()).then(|| (self.0.min(), self.0.mean(), self.0.max()))
    }
}

/// Who is to blame for an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The server, or the network to it.
    Server,
    /// This program or this machine: such errors say nothing about the server and make the
    /// result invalid.
    Generator,
}

macro_rules! error_classes {
    ($($variant:ident $name:literal $side:ident,)*) => {
        /// Kinds of errors.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum ErrorClass { $(#[doc = $name] $variant,)* }

        impl ErrorClass {
            /// All of them, in the order of their counters.
            pub const ALL: &[ErrorClass] = &[$(Self::$variant,)*];
            /// Number of them.
            pub const COUNT: usize = Self::ALL.len();

            /// The name in reports.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Who is to blame.
            pub const fn side(self) -> Side {
                match self { $(Self::$variant => Side::$side,)* }
            }
        }
    };
}

error_classes! {
    ConnectRefused "connect_refused" Server,
    ConnectReset "connect_reset" Server,
    ConnectTimeout "connect_timeout" Server,
    ConnectUnreachable "connect_unreachable" Server,
    ConnectFailed "connect_failed" Server,
    RecvReset "recv_reset" Server,
    RecvEof "recv_eof" Server,
    ReplyTimeout "reply_timeout" Server,
    ReplyMismatch "reply_mismatch" Server,
    SendFailed "send_failed" Server,
    LocalFdLimit "local_fd_limit" Generator,
    LocalAddrUnavailable "local_addr_unavailable" Generator,
    LocalNobufs "local_nobufs" Generator,
    GeneratorLate "generator_late" Generator,
}

/// Linux's codes for the errors that [`io::ErrorKind`] has no kind for.
const ENFILE: i32 = 23;
const EMFILE: i32 = 24;
const ENOBUFS: i32 = 105;

impl ErrorClass {
    /// Class of a connection that was not established.
    pub fn of_connect(reason: CloseReason) -> Self {
        let code = match reason {
            CloseReason::ConnectTimeout => return Self::ConnectTimeout,
            CloseReason::ConnectFailed(code) | CloseReason::Failed(code) => code,
            CloseReason::Reset => return Self::ConnectReset,
            _ => return Self::ConnectFailed,
        };
        if let ENFILE | EMFILE = code {
            return Self::LocalFdLimit;
        }
        match io::Error::from_raw_os_error(code).kind() {
            io::ErrorKind::ConnectionRefused => Self::ConnectRefused,
            io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted => Self::ConnectReset,
            io::ErrorKind::TimedOut => Self::ConnectTimeout,
            io::ErrorKind::HostUnreachable | io::ErrorKind::NetworkUnreachable => Self::ConnectUnreachable,
            io::ErrorKind::AddrNotAvailable | io::ErrorKind::AddrInUse => Self::LocalAddrUnavailable,
            io::ErrorKind::OutOfMemory => Self::LocalNobufs,
            _ if code == ENOBUFS => Self::LocalNobufs,
            _ => Self::ConnectFailed,
        }
    }

    /// Class of the end of an established connection; `None` when that is no error.
    pub fn of_close(reason: CloseReason) -> Option<Self> {
        match reason {
            CloseReason::Reset => Some(Self::RecvReset),
            CloseReason::Eof => Some(Self::RecvEof),
            CloseReason::Failed(_) => Some(Self::SendFailed),
            _ => None,
        }
    }
}

/// Messages, each counted in the span of time that it was *intended* for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Messages that were to be sent on connections that had been established.
    pub planned: u64,
    /// Messages sent.
    pub sent: u64,
    /// Messages answered correctly and in time.
    pub replied: u64,
    /// Messages not answered within the timeout.
    pub timed_out: u64,
    /// Messages sent whose connection ended before the reply came.
    pub lost: u64,
    /// Messages not sent because the reply to an earlier one was still missing.
    pub missed: u64,
    /// Messages not sent because the connection was gone.
    pub gone: u64,
    /// Replies that came after their timeout.
    pub late_replies: u64,
}

impl Counts {
    /// Messages that were not answered correctly and in time.
    pub fn failed(&self) -> u64 {
        self.timed_out + self.lost + self.missed + self.gone
    }

    /// Share of the decided messages that failed; 0 when there were none.
    pub fn error_rate(&self) -> f64 {
        let decided = self.failed() + self.replied;
        if decided == 0 { 0.0 } else { self.failed() as f64 / decided as f64 }
    }

    /// Adds what `other` counted.
    pub fn add(&mut self, other: &Self) {
        self.planned += other.planned;
        self.sent += other.sent;
        self.replied += other.replied;
        self.timed_out += other.timed_out;
        self.lost += other.lost;
        self.missed += other.missed;
        self.gone += other.gone;
        self.late_replies += other.late_replies;
    }
}

/// Everything about the messages of one span of time.
#[derive(Clone)]
pub struct Stats {
    /// Messages.
    pub counts: Counts,
    /// Errors, by position in [`ErrorClass::ALL`].
    pub errors: [u64; ErrorClass::COUNT],
    /// From the moment a message was intended to be sent to its reply; timeouts included.
    pub response: Latency,
    /// From the moment a message was sent to its reply (open loop only).
    pub service: Latency,
    /// From the moment a message was due to the moment this program attended to it.
    pub lag: Latency,
}

impl Stats {
    /// Nothing yet.
    pub fn new() -> Self {
        Self {
            counts: Counts::default(),
            errors: [0; ErrorClass::COUNT],
            response: Latency::new(),
            service: Latency::new(),
            lag: Latency::new(),
        }
    }

    /// Counts an error.
    pub fn error(&mut self, class: ErrorClass) {
        self.errors[class as usize] += 1;
    }

    /// Number of errors of a side.
    pub fn errors_of(&self, side: Side) -> u64 {
        ErrorClass::ALL
            .iter()
            .filter(|class| class.side() == side)
            .map(|&class| self.errors[class as usize])
            .sum()
    }

    /// Adds what `other` counted.
    pub fn add(&mut self, other: &Self) {
        self.counts.add(&other.counts);
        for (mine, other) in self.errors.iter_mut().zip(other.errors) {
            *mine += other;
        }
        self.response.add(&other.response);
        self.service.add(&other.service);
        self.lag.add(&other.lag);
    }

    /// Back to nothing, keeping the memory.
    pub fn clear(&mut self) {
        self.counts = Counts::default();
        self.errors = [0; ErrorClass::COUNT];
        self.response.clear();
        self.service.clear();
        self.lag.clear();
    }
}

/// How many connections a worker has, by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauges {
    /// Established and still there.
    pub open: u64,
    /// Begun and not established yet.
    pub connecting: u64,
    /// Never established.
    pub failed: u64,
    /// Established once, ended before the run did.
    pub gone: u64,
}

impl Gauges {
    /// Adds another worker's.
    pub fn add(&mut self, other: &Self) {
        self.open += other.open;
        self.connecting += other.connecting;
        self.failed += other.failed;
        self.gone += other.gone;
    }
}

/// What one worker saw between two hand-overs.
pub struct Interval {
    /// Messages of the measured window.
    pub window: Stats,
    /// Messages before it: of the ramp and the warm-up.
    pub before: Stats,
    /// Time to establish a connection.
    pub connect: Latency,
    /// Connections at the end of the interval.
    pub gauges: Gauges,
    /// What was wrong with the first wrong reply.
    pub mismatch: Option<String>,
}

impl Interval {
    /// Nothing yet.
    pub fn new() -> Self {
        Self {
            window: Stats::new(),
            before: Stats::new(),
            connect: Latency::new(),
            gauges: Gauges::default(),
            mismatch: None,
        }
    }

    /// Adds what `other` saw, but for the gauges, which are states and not events.
    pub fn add(&mut self, other: &Self) {
        self.window.add(&other.window);
        self.before.add(&other.before);
        self.connect.add(&other.connect);
        if self.mismatch.is_none() {
            self.mismatch.clone_from(&other.mismatch);
        }
    }

    /// Back to nothing, keeping the memory.
    pub fn clear(&mut self) {
        self.window.clear();
        self.before.clear();
        self.connect.clear();
        self.gauges = Gauges::default();
        self.mismatch = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_keep_three_digits_and_merge() {
        let mut first = Latency::new();
        for micros in 1..=1000 {
            first.record(Duration::from_micros(micros));
        }
        let mut both = Latency::new();
        assert_eq!(both.quantile(0.5), None);
        both.add(&first);
        both.record(Duration::from_secs(10_000));
        assert_eq!(both.count(), 1001);
        let median = both.quantile(0.5).expect("not empty") as f64;
        assert!((median / 501_000.0 - 1.0).abs() < 0.002, "{median}");
        let longest = both.quantile(1.0).expect("not empty") as f64;
        assert!((longest / HIGHEST_NS as f64 - 1.0).abs() < 0.002, "more than an hour counts as one");
        both.clear();
        assert_eq!(both.count(), 0);
    }

    #[test]
    fn connect_errors_are_told_apart_by_side() {
        let class = |code| ErrorClass::of_connect(CloseReason::ConnectFailed(code));
        if cfg!(target_os = "linux") {
            assert_eq!(class(111), ErrorClass::ConnectRefused);
            assert_eq!(class(113), ErrorClass::ConnectUnreachable);
            assert_eq!(class(98), ErrorClass::LocalAddrUnavailable);
            assert_eq!(class(99), ErrorClass::LocalAddrUnavailable);
            assert_eq!(class(24), ErrorClass::LocalFdLimit);
            assert_eq!(class(105), ErrorClass::LocalNobufs);
        }
        assert_eq!(class(24).side(), Side::Generator);
        assert_eq!(ErrorClass::of_connect(CloseReason::ConnectTimeout).side(), Side::Server);
        assert_eq!(ErrorClass::of_close(CloseReason::Local), None);
        assert_eq!(ErrorClass::of_close(CloseReason::Eof), Some(ErrorClass::RecvEof));
    }

    #[test]
    fn every_planned_message_that_was_not_answered_is_an_error() {
        let counts = Counts {
            planned: 10,
            sent: 7,
            replied: 5,
            timed_out: 1,
            lost: 1,
            missed: 2,
            gone: 1,
            late_replies: 1,
        };
        assert_eq!(counts.failed(), 5);
        assert_eq!(counts.error_rate(), 0.5);
        assert_eq!(Counts::default().error_rate(), 0.0);
        let mut stats = Stats::new();
        stats.error(ErrorClass::RecvEof);
        stats.error(ErrorClass::GeneratorLate);
        assert_eq!(stats.errors_of(Side::Server), 1);
        let mut sum = Stats::new();
        sum.add(&stats);
        sum.add(&stats);
        assert_eq!(sum.errors_of(Side::Generator), 2);
    }
}
