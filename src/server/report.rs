//! What a server comes to: its report, its errors, and those of its handlers.

use std::any::Any;
use std::error::Error;
use std::fmt;
use std::iter::Sum;
use std::net::SocketAddr;
use std::ops::Add;

use crate::handler::ConnId;
use crate::task::panic_text;

/// What a [`Server`](super::Server) did. Of those that were accepted each is in one of the other numbers.
///
/// The reports of several workers can be added up:
///
/// ```
/// use corelane::ServerReport;
///
/// let mut report = ServerReport::default();
/// (report.accepted, report.served, report.failed) = (3, 2, 1);
/// let both: ServerReport = [report, report].into_iter().sum();
/// assert_eq!(
///     both.to_string(),
///     "6 accepted: 4 served, 2 failed, 0 panicked, 0 refused, 0 aborted at the deadline",
/// );
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerReport {
    /// Connections that were accepted.
    pub accepted: u64,
    /// Handlers that ended without an error, or with the one that says that there is a shutdown.
    pub served: u64,
    /// Handlers that ended with another error.
    pub failed: u64,
    /// Handlers that panicked; their connections were reset.
    pub panicked: u64,
    /// Connections beyond the limit per address; they were reset.
    pub refused: u64,
    /// Handlers that had not ended when the deadline came; their connections were reset.
    pub aborted: u64,
}

impl Add for ServerReport {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            accepted: self.accepted + other.accepted,
            served: self.served + other.served,
            failed: self.failed + other.failed,
            panicked: self.panicked + other.panicked,
            refused: self.refused + other.refused,
            aborted: self.aborted + other.aborted,
        }
    }
}

impl Sum for ServerReport {
    fn sum<I: Iterator<Item = Self>>(reports: I) -> Self {
        reports.fold(Self::default(), Add::add)
    }
}

impl fmt::Display for ServerReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { accepted, served, failed, panicked, refused, aborted } = self;
        write!(
            f,
            "{accepted} accepted: {served} served, {failed} failed, {panicked} panicked, {refused} refused, \
             {aborted} aborted at the deadline",
        )
    }
}

/// Why a [`Server`](super::Server) did not begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ServeError {
    /// There is no listener of that number, or it was taken already and dropped.
    NoListener,
    /// A limit of 0 connections.
    NoConnections,
    /// A limit that the worker's own one comes before.
    TooManyConnections {
        /// The server's.
        limit: u32,
        /// The worker's.
        worker: u32,
    },
    /// A limit of 0 connections per address.
    NoneOfAnAddress,
    /// A limit per address, where addresses are not asked for.
    AddressesUnknown,
    /// A limit per address, on a listener whose peers have none.
    NoAddresses,
}

impl fmt::Display for ServeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoListener => f.write_str(
                "there is no such listener: give the address to Builder::listen, and take each listener once",
            ),
            Self::NoConnections => {
                f.write_str("max_connections is 0, so nobody would be served: it must be at least 1")
            }
            Self::TooManyConnections { limit, worker } => write!(
                f,
                "max_connections is {limit}, but the worker holds {worker} at most: raise \
                 WorkerConfig::max_connections, or lower the server's",
            ),
            Self::NoneOfAnAddress => {
                f.write_str("max_per_ip is 0, so nobody would be served: it must be at least 1")
            }
            Self::AddressesUnknown => f.write_str(
                "max_per_ip needs the addresses of those who are accepted: set WorkerConfig::peer_addresses",
            ),
            Self::NoAddresses => f.write_str(
                "max_per_ip is for listeners whose peers have IP addresses, and this one's have none",
            ),
        }
    }
}

impl Error for ServeError {}

/// How a [`Server`](super::Server)'s handler failed, as [`Server::on_failure`](super::Server::on_failure) is told.
pub struct HandlerFailure {
    pub(super) id: ConnId,
    pub(super) peer: Option<SocketAddr>,
    pub(super) kind: FailureKind,
}

pub(super) enum FailureKind {
    Error(Box<dyn Error + Send + Sync>),
    Panic(Box<dyn Any + Send>),
}

impl HandlerFailure {
    /// The connection that it served.
    pub fn id(&self) -> ConnId {
        self.id
    }

    /// Who was served, where [`peer_addresses`](crate::WorkerConfig::peer_addresses) is on.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// The error that it ended with, if it did not panic.
    pub fn error(&self) -> Option<&(dyn Error + Send + Sync + 'static)> {
        match &self.kind {
            FailureKind::Error(error) => Some(&**error),
            FailureKind::Panic(_) => None,
        }
    }

    /// The text of its panic, if it panicked.
    pub fn panic_message(&self) -> Option<&str> {
        match &self.kind {
            FailureKind::Error(_) => None,
            FailureKind::Panic(panic) => Some(panic_text(&**panic)),
        }
    }
}

impl fmt::Display for HandlerFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "connection {}", self.id)?;
        if let Some(peer) = self.peer {
            write!(f, " of {peer}")?;
        }
        match &self.kind {
            FailureKind::Error(error) => write!(f, ": {error}"),
            FailureKind::Panic(panic) => write!(f, ": the handler panicked: {}", panic_text(&**panic)),
        }
    }
}

impl fmt::Debug for HandlerFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HandlerFailure({self})")
    }
}
