//! Why a runtime did not start, or did not end well: each with its cause and its remedy.

use std::fmt;
use std::io;
use std::net::SocketAddr;

use crate::config::ConfigError;
use crate::driver::{SetupError, sys};

/// What to do about an address or a processor that cannot be had, in this system's words.
#[cfg(not(windows))]
mod remedy {
    pub(super) const IN_USE: &str =
        "; another process listens there (see `ss -ltnp`): stop it or choose another port";
    pub(super) const NOT_AVAILABLE: &str =
        "; no interface of this machine has the address: use one that `ip address` shows";
    pub(super) const DENIED: &str =
        "; ports below net.ipv4.ip_unprivileged_port_start need CAP_NET_BIND_SERVICE";
    pub(super) const PROCESSORS: &str = " (see `taskset -p $$`)";
}

/// What to do about an address or a processor that cannot be had, in this system's words.
#[cfg(windows)]
mod remedy {
    pub(super) const IN_USE: &str =
        "; another process listens there (see `netstat -ano`): stop it or choose another port";
    pub(super) const NOT_AVAILABLE: &str =
        "; no interface of this machine has the address: use one that `ipconfig` shows";
    pub(super) const DENIED: &str = "; another process holds the port for itself (see `netstat -ano`), or Windows has \
         reserved it (see `netsh interface ipv4 show excludedportrange protocol=tcp`): choose another port";
    pub(super) const PROCESSORS: &str = " (see the affinity that it was started with)";
}

/// Why a runtime did not start.
#[non_exhaustive]
pub enum StartError {
    /// A setting is out of range.
    Config(ConfigError),
    /// The kernel refuses what is needed.
    Kernel(SetupError),
    /// A listening address cannot be had.
    Bind {
        /// The address.
        addr: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// A worker cannot run on the processor asked for.
    Pin {
        /// The processor.
        cpu: usize,
        /// What the system said.
        source: io::Error,
    },
    /// A listener could not be registered.
    Listener {
        /// What the system said.
        source: io::Error,
    },
    /// A thread could not be started.
    Thread {
        /// Which worker's.
        index: usize,
        /// What the system said.
        source: io::Error,
    },
    /// A handler's constructor panicked.
    Panicked,
}

impl StartError {
    /// Whether the system (not the caller's settings) stands in the way: a kernel without
    /// something, a limit, an address in use.
    pub fn is_preflight(&self) -> bool {
        matches!(self, Self::Kernel(_) | Self::Bind { .. } | Self::Pin { .. } | Self::Thread { .. })
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config(error) => error.fmt(f),
            Self::Kernel(error) if error.is_refusal() => {
                write!(f, "{error}; or let epoll take its place (backend auto or epoll)")
            }
            Self::Kernel(error) => error.fmt(f),
            Self::Bind { addr, source } => {
                write!(f, "cannot listen on {addr}: {source}")?;
                f.write_str(match source.kind() {
                    io::ErrorKind::AddrInUse => remedy::IN_USE,
                    io::ErrorKind::AddrNotAvailable => remedy::NOT_AVAILABLE,
                    io::ErrorKind::PermissionDenied => remedy::DENIED,
                    _ => "",
                })
            }
            Self::Pin { cpu, source } => write!(
                f,
                "cannot bind a worker to processor {cpu}: {source}; this process may use {} processors{}",
                sys::cpu_count(),
                remedy::PROCESSORS,
            ),
            Self::Listener { source } => write!(f, "cannot register a listener: {source}"),
            Self::Thread { index, source } => write!(f, "cannot start worker {index}: {source}"),
            Self::Panicked => f.write_str("a handler's constructor panicked"),
        }
    }
}

impl std::error::Error for StartError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Config(error) => Some(error),
            Self::Kernel(error) => Some(error),
            Self::Bind { source, .. }
            | Self::Pin { source, .. }
            | Self::Listener { source }
            | Self::Thread { source, .. } => Some(source),
            Self::Panicked => None,
        }
    }
}

/// As [`Display`](fmt::Display): it is what `fn main() -> Result<…>` prints, and a user should read the
/// cause and the remedy there.
impl fmt::Debug for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// How a running runtime failed.
#[non_exhaustive]
pub enum RuntimeError {
    /// A worker's kernel interface failed in a way that it cannot go on from.
    Worker {
        /// Which worker.
        index: usize,
        /// What the system said.
        source: io::Error,
    },
    /// Signals could not be waited for.
    Signals {
        /// What the system said.
        source: io::Error,
    },
    /// A handler panicked. Its worker's connections are closed and its memory is accounted for.
    Panicked {
        /// Which worker's.
        index: usize,
        /// The panic's message.
        message: String,
    },
}

/// As [`Display`](fmt::Display), for the same reason as [`StartError`]'s.
impl fmt::Debug for RuntimeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for RuntimeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Worker { index, source } => write!(f, "worker {index} failed: {source}"),
            Self::Signals { source } => write!(f, "cannot wait for signals: {source}"),
            Self::Panicked { index, message } => write!(f, "worker {index} panicked: {message}"),
        }
    }
}

impl std::error::Error for RuntimeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Worker { source, .. } | Self::Signals { source } => Some(source),
            Self::Panicked { .. } => None,
        }
    }
}
