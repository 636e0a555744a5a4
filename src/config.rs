//! What can be chosen: per socket, per listener, per worker.

use std::fmt;
use std::net::{AddrParseError, SocketAddr};
use std::time::Duration;

use crate::buffer::{BufferConfig, BufferError};
use crate::wait::WaitPolicy;

/// The kernel interface that a runtime stands on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Backend {
    /// What the environment variable `CORELANE_BACKEND` says (`auto`, `io_uring`, `epoll` or `iocp`); if it
    /// says nothing, the best that the system allows: io_uring, and epoll where io_uring is refused,
    /// which is said in one line on standard error (once per process) and in [`RuntimeInfo::fallback`](crate::RuntimeInfo).
    /// On Windows: I/O completion ports.
    #[default]
    Auto,
    /// io_uring, or an error that says why not. Linux 5.19 and later.
    IoUring,
    /// epoll: readiness instead of completions, for systems that forbid io_uring. Linux. Sockets are
    /// ordinary descriptors ([`Descriptors::Fd`]).
    Epoll,
    /// I/O completion ports. Windows.
    Iocp,
}

impl Backend {
    /// The environment variable that decides where [`Backend::Auto`] is asked for.
    pub const VARIABLE: &str = "CORELANE_BACKEND";

    /// Its name, as [`FromStr`](std::str::FromStr) reads it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::IoUring => "io_uring",
            Self::Epoll => "epoll",
            Self::Iocp => "iocp",
        }
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl std::str::FromStr for Backend {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text {
            "auto" => Ok(Self::Auto),
            "io_uring" | "io-uring" | "uring" => Ok(Self::IoUring),
            "epoll" => Ok(Self::Epoll),
            "iocp" => Ok(Self::Iocp),
            _ => Err(ConfigError::Range {
                what: "backend",
                value: format!("{text:?}"),
                allowed: "auto, io_uring, epoll or iocp".to_owned(),
            }),
        }
    }
}

/// What of io_uring may be used, where the kernel has it. Everything by default; less is for
/// trying on a new kernel what an older one gets, and for measuring what a feature is worth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UringFeatures {
    /// One accept operation for all connections (Linux 5.19). Without: one operation each.
    pub multishot_accept: bool,
    /// One receive operation for all data of a connection (Linux 6.0). Without: one operation for each
    /// piece of data.
    pub multishot_recv: bool,
    /// Receive buffers that the kernel picks from a ring when data is there (Linux 5.19). Without: an idle
    /// connection is polled, and receives into a buffer taken when it is readable; it still holds none.
    pub provided_buffers: bool,
    /// Completions are worked off only when the loop asks (Linux 6.1). Without: they interrupt it.
    pub defer_taskrun: bool,
    /// Waiting for several completions for a time, and then for one (Linux 6.12), which
    /// [`WaitPolicy::Coalesce`] uses. Without: the worker sleeps for the rest of the delay once it was woken.
    pub min_wait: bool,
}

impl UringFeatures {
    /// Everything.
    pub const ALL: Self = Self {
        multishot_accept: true,
        multishot_recv: true,
        provided_buffers: true,
        defer_taskrun: true,
        min_wait: true,
    };

    /// What Linux 5.19, the oldest supported, has.
    pub const LINUX_5_19: Self =
        Self { multishot_recv: false, defer_taskrun: false, min_wait: false, ..Self::ALL };

    /// The least that the backend works with.
    pub const LEAST: Self = Self {
        multishot_accept: false,
        multishot_recv: false,
        provided_buffers: false,
        defer_taskrun: false,
        min_wait: false,
    };
}

impl Default for UringFeatures {
    fn default() -> Self {
        Self::ALL
    }
}

/// Keepalive probing of a silent peer by the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keepalive {
    /// Silence before the first probe (`TCP_KEEPIDLE`), whole seconds.
    pub idle: Duration,
    /// Time between probes (`TCP_KEEPINTVL`), whole seconds.
    pub interval: Duration,
    /// Unanswered probes until the connection is reset (`TCP_KEEPCNT`).
    pub count: u32,
}

/// Options of a TCP socket. On a listener they are inherited by every accepted connection, so they
/// cost no system call per connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketOptions {
    /// `TCP_NODELAY`: send small messages at once. On by default; off costs some 40 ms per
    /// write-write-read exchange.
    pub nodelay: bool,
    /// `SO_KEEPALIVE` and its times; off by default. Windows before 10 1709 has its own number of probes, 10.
    pub keepalive: Option<Keepalive>,
    /// `TCP_USER_TIMEOUT`: how long sent data may stay unacknowledged; the kernel's default if `None`. On
    /// Windows `TCP_MAXRT`, rounded up to whole seconds; where that is missing (Wine), opening the socket
    /// fails and says so.
    pub user_timeout: Option<Duration>,
    /// `SO_RCVBUF` in bytes (the kernel doubles it and stops tuning it); tuned by the kernel if `None`.
    pub recv_buffer: Option<u32>,
    /// `SO_SNDBUF` in bytes (the kernel doubles it and stops tuning it); tuned by the kernel if `None`.
    pub send_buffer: Option<u32>,
    /// `SO_LINGER`; the kernel's default if `None`. `Some(Duration::ZERO)` makes every close a
    /// reset, which can destroy data that the peer has not read. Other values are refused: they would
    /// let one peer that does not read stop the worker's thread inside a close.
    pub linger: Option<Duration>,
}

impl Default for SocketOptions {
    fn default() -> Self {
        Self {
            nodelay: true,
            keepalive: None,
            user_timeout: None,
            recv_buffer: None,
            send_buffer: None,
            linger: None,
        }
    }
}

impl SocketOptions {
    /// Checks every option against its range.
    ///
    /// # Errors
    /// [`ConfigError`] naming the option, its value and what is allowed.
    pub fn check(&self) -> Result<(), ConfigError> {
        let within = |what, value: Option<Duration>, low: Duration, high: Duration| match value {
            Some(value) if value < low || value > high => Err(ConfigError::Range {
                what,
                value: format!("{value:?}"),
                allowed: format!("{low:?} to {high:?}"),
            }),
            _ => Ok(()),
        };
        if self.linger.is_some_and(|linger| !linger.is_zero()) {
            return Err(ConfigError::Range {
                what: "linger",
                value: format!("{:?}", self.linger.unwrap_or_default()),
                allowed: "zero, or none (a close that waits would stop the worker)".to_owned(),
            });
        }
        let second = Duration::from_secs(1);
        // The kernel's own limits (MAX_TCP_KEEPIDLE and its like).
        let keepalive = self.keepalive;
        within("keepalive idle", keepalive.map(|k| k.idle), second, Duration::from_secs(32767))?;
        within("keepalive interval", keepalive.map(|k| k.interval), second, Duration::from_secs(32767))?;
        if keepalive.is_some_and(|keepalive| !(1..=127).contains(&keepalive.count)) {
            return Err(ConfigError::Range {
                what: "keepalive count",
                value: keepalive.map_or(0, |keepalive| keepalive.count).to_string(),
                allowed: "1 to 127".to_owned(),
            });
        }
        within("user_timeout", self.user_timeout, Duration::from_millis(1), MAX_TIMEOUT)
    }
}

/// How the workers of a runtime share a listening address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sharing {
    /// Every worker has a listener of its own on the address (`SO_REUSEPORT`); the kernel spreads
    /// new connections over them by a hash of the addresses. On Windows, where there is no such thing,
    /// as [`One`](Self::One).
    #[default]
    PerWorker,
    /// All workers accept from one listener, one connection at a time in turn.
    One,
}

/// A listening address and what goes with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenerConfig {
    /// The address; port 0 lets the kernel choose (the same port for every worker).
    pub addr: SocketAddr,
    /// Connections that may wait to be accepted, per listener. The kernel clamps it to
    /// `net.core.somaxconn`; the effective value is in
    /// [`RuntimeInfo`](crate::RuntimeInfo::listeners). Windows clamps it to 65,535 and does not tell.
    /// 1024 by default.
    pub backlog: u32,
    /// For an IPv6 address: take IPv4 connections too (as mapped addresses). Off by default.
    pub dual_stack: bool,
    /// One listener per worker, or one for all.
    pub sharing: Sharing,
    /// Options that accepted connections inherit.
    pub options: SocketOptions,
}

impl ListenerConfig {
    /// A listener on `addr` with the defaults.
    pub fn new(addr: SocketAddr) -> Self {
        Self {
            addr,
            backlog: 1024,
            dual_stack: false,
            sharing: Sharing::PerWorker,
            options: SocketOptions::default(),
        }
    }
}

impl From<SocketAddr> for ListenerConfig {
    fn from(addr: SocketAddr) -> Self {
        Self::new(addr)
    }
}

impl TryFrom<&str> for ListenerConfig {
    type Error = AddrParseError;

    fn try_from(addr: &str) -> Result<Self, AddrParseError> {
        addr.parse().map(Self::new)
    }
}

/// An outgoing connection to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectConfig {
    /// Where to.
    pub target: SocketAddr,
    /// Local address to connect from (`None`: the kernel's choice). Port 0 leaves the port to the
    /// kernel, chosen only when the target is known (`IP_BIND_ADDRESS_NO_PORT`), so that one
    /// local address serves many targets.
    pub source: Option<SocketAddr>,
    /// How long the handshake may take; 10 s by default.
    pub timeout: Duration,
    /// Socket options.
    pub options: SocketOptions,
}

impl ConnectConfig {
    /// A connection to `target` with the defaults.
    pub fn new(target: SocketAddr) -> Self {
        Self { target, source: None, timeout: Duration::from_secs(10), options: SocketOptions::default() }
    }
}

impl From<SocketAddr> for ConnectConfig {
    fn from(target: SocketAddr) -> Self {
        Self::new(target)
    }
}

impl TryFrom<&str> for ConnectConfig {
    type Error = AddrParseError;

    fn try_from(target: &str) -> Result<Self, AddrParseError> {
        target.parse().map(Self::new)
    }
}

/// How sockets are held by a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Descriptors {
    /// In the ring's own table (direct descriptors): cheaper per operation and outside the
    /// process's `RLIMIT_NOFILE` (each ring's table is capped at that number instead). Where the
    /// kernel refuses the table, ordinary descriptors are used and
    /// [`RuntimeInfo`](crate::RuntimeInfo) says why.
    #[default]
    Direct,
    /// As ordinary file descriptors of the process: visible to `ss -p` and `/proc`.
    Fd,
}

/// Everything that shapes one worker.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerConfig {
    /// Connections (accepted and outgoing) that this worker holds at most; the tables for them are
    /// reserved at start and touched as they fill. 1 to 1,000,000; 16,384 by default.
    pub max_connections: u32,
    /// The receive and send buffers.
    pub buffers: BufferConfig,
    /// How sockets are held.
    pub descriptors: Descriptors,
    /// What of io_uring may be used.
    pub uring: UringFeatures,
    /// Whether [`Accepted::peer`](crate::Accepted::peer) is filled in. Costs a system call per
    /// connection with [`Descriptors::Fd`], and with [`Descriptors::Direct`] the multishot accept.
    /// Off by default.
    pub peer_addresses: bool,
    /// Unsent bytes of a connection at which it counts as congested: its receiving pauses (see
    /// [`auto_pause`](Self::auto_pause)). 64 KiB by default.
    pub high_water: u32,
    /// Unsent bytes at which a congested connection becomes writable again: `on_writable` is
    /// called. Below [`high_water`](Self::high_water); 16 KiB by default.
    pub low_water: u32,
    /// Unsent bytes at which [`Conn::send`](crate::Conn::send) refuses more. At least
    /// [`high_water`](Self::high_water); 4 MiB by default.
    pub send_limit: u32,
    /// Whether a congested accepted connection's receiving pauses by itself, so that a peer that
    /// does not read cannot make the server hold what it sends. On by default;
    /// [`Conn::set_auto_pause`](crate::Conn::set_auto_pause) sets it for one connection.
    pub auto_pause: bool,
    /// A connection that receives nothing for this long (and, while congested, takes nothing of what
    /// waits for it) is closed; `None` (the default) never. Time while the handler has paused it, or
    /// while no buffer is free for it, does not count.
    pub idle_timeout: Option<Duration>,
    /// How long a gracefully closing connection may take to send what is queued, and then to be
    /// closed by its peer. 5 s by default.
    pub close_timeout: Duration,
    /// Entries of the submission queue; more operations in one turn cost an extra system call.
    /// 1024 by default.
    pub sq_entries: u32,
    /// Entries of the completion queue. 32,768 by default: it also sizes the kernel's table for
    /// cancelling, which becomes slow below 8,192.
    pub cq_entries: u32,
    /// Messages from other threads that may wait for this worker. 4,096 by default.
    pub mailbox: u32,
    /// Completions handled in one turn before new submissions are given to the kernel. 512 by default.
    pub turn_budget: u32,
    /// Connections accepted in one turn; the others wait, so that a burst does not delay those who
    /// are connected already. 64 by default.
    pub accept_budget: u32,
    /// How much later than asked the kernel may end a wait to save wake-ups (`PR_SET_TIMERSLACK`);
    /// `None` leaves the system's default of 50 µs.
    pub timer_slack: Option<Duration>,
    /// How the worker waits when it has nothing to do: its price in CPU against latency.
    pub wait: WaitPolicy,
}

impl Default for WorkerConfig {
    fn default() -> Self {
        Self {
            max_connections: 16384,
            buffers: BufferConfig::default(),
            descriptors: Descriptors::Direct,
            uring: UringFeatures::ALL,
            peer_addresses: false,
            high_water: 64 << 10,
            low_water: 16 << 10,
            send_limit: 4 << 20,
            auto_pause: true,
            idle_timeout: None,
            close_timeout: Duration::from_secs(5),
            sq_entries: 1024,
            cq_entries: 32768,
            mailbox: 4096,
            turn_budget: 512,
            accept_budget: 64,
            timer_slack: None,
            wait: WaitPolicy::Block,
        }
    }
}

/// Longest idle timeout, deadline or timer: about 24 days.
pub(crate) const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 24 * 3600);

/// A configuration that cannot work.
#[derive(Debug)]
pub enum ConfigError {
    /// A value is out of range.
    Range {
        /// The field.
        what: &'static str,
        /// Its value.
        value: String,
        /// What is allowed.
        allowed: String,
    },
    /// The buffers cannot be made.
    Buffers(BufferError),
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range { what, value, allowed } => {
                write!(f, "{what} {value} is out of range: allowed is {allowed}")
            }
            Self::Buffers(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for ConfigError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Range { .. } => None,
            Self::Buffers(error) => Some(error),
        }
    }
}

impl From<BufferError> for ConfigError {
    fn from(error: BufferError) -> Self {
        Self::Buffers(error)
    }
}

impl WorkerConfig {
    /// Checks every field against its range and the fields against each other.
    ///
    /// # Errors
    /// [`ConfigError`] naming the field, its value and what is allowed.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.buffers.check()?;
        let within = |what, value: u32, low: u32, high: u32| {
            if (low..=high).contains(&value) {
                return Ok(());
            }
            Err(ConfigError::Range { what, value: value.to_string(), allowed: format!("{low} to {high}") })
        };
        within("max_connections", self.max_connections, 1, 1_000_000)?;
        within("high_water", self.high_water, 1, 1 << 30)?;
        within("low_water", self.low_water, 0, self.high_water - 1)?;
        within("send_limit", self.send_limit, self.high_water, u32::MAX)?;
        within("sq_entries", self.sq_entries, 8, 32768)?;
        within("cq_entries", self.cq_entries, self.sq_entries.next_power_of_two().max(16), 65536)?;
        within("mailbox", self.mailbox, 1, 1 << 24)?;
        within("turn_budget", self.turn_budget, 1, 1 << 20)?;
        within("accept_budget", self.accept_budget, 1, 1 << 20)?;
        self.wait.check()?;
        let timeouts = [("idle_timeout", self.idle_timeout), ("close_timeout", Some(self.close_timeout))];
        for (what, timeout) in timeouts {
            let Some(timeout) = timeout else { continue };
            if timeout < Duration::from_millis(1) || timeout > MAX_TIMEOUT {
                return Err(ConfigError::Range {
                    what,
                    value: format!("{timeout:?}"),
                    allowed: "1 ms to 24 days".to_owned(),
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_allowed() {
        WorkerConfig::default().check().expect("defaults");
    }

    #[test]
    fn options_that_would_block_or_that_the_kernel_refuses_are_refused_by_name() {
        let lingering = SocketOptions { linger: Some(Duration::from_secs(3)), ..SocketOptions::default() };
        assert!(lingering.check().expect_err("blocks").to_string().starts_with("linger 3s"));
        let resetting = SocketOptions { linger: Some(Duration::ZERO), ..SocketOptions::default() };
        resetting.check().expect("a reset does not wait");
        let forever = SocketOptions { user_timeout: Some(Duration::MAX), ..SocketOptions::default() };
        assert!(forever.check().expect_err("too long").to_string().starts_with("user_timeout"));
        let idle = Keepalive { idle: Duration::MAX, interval: Duration::from_secs(1), count: 3 };
        let keepalive = SocketOptions { keepalive: Some(idle), ..SocketOptions::default() };
        assert!(keepalive.check().expect_err("too long").to_string().starts_with("keepalive idle"));
    }

    #[test]
    fn a_refusal_names_field_value_and_range() {
        let config = WorkerConfig { low_water: 70_000, ..WorkerConfig::default() };
        let text = config.check().expect_err("above high water").to_string();
        assert_eq!(text, "low_water 70000 is out of range: allowed is 0 to 65535");
        let config = WorkerConfig { idle_timeout: Some(Duration::ZERO), ..WorkerConfig::default() };
        let text = config.check().expect_err("zero").to_string();
        assert!(text.starts_with("idle_timeout 0ns"), "{text}");
    }
}
