//! How a connection's end reads as an [`io::Error`].

use std::io;

use crate::handler::{CloseReason, ConnectErrorKind};

/// The error of an operation on a connection that is over.
pub(super) fn of_close(reason: CloseReason) -> io::Error {
    use io::ErrorKind as Kind;
    let kind = match reason {
        CloseReason::ConnectFailed(code) | CloseReason::Failed(code) if code != 0 => {
            return io::Error::from_raw_os_error(code);
        }
        CloseReason::Reset => Kind::ConnectionReset,
        CloseReason::IdleTimeout
        | CloseReason::Deadline
        | CloseReason::ConnectTimeout
        | CloseReason::CloseTimeout => Kind::TimedOut,
        CloseReason::Shutdown => Kind::ConnectionAborted,
        CloseReason::Eof => Kind::BrokenPipe,
        CloseReason::Local => Kind::NotConnected,
        _ => Kind::Other,
    };
    io::Error::new(kind, Ended(reason))
}

/// The error of a connection that was not begun.
pub(super) fn of_connect(kind: ConnectErrorKind) -> io::Error {
    let of = match kind {
        ConnectErrorKind::WorkerFull | ConnectErrorKind::RuntimeFull => io::ErrorKind::QuotaExceeded,
        ConnectErrorKind::Stopping => io::ErrorKind::ConnectionAborted,
        _ => io::ErrorKind::InvalidInput,
    };
    io::Error::new(of, kind.to_string())
}

/// The error of a wish that cannot be.
pub(super) fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}

/// A reason as an error.
#[derive(Debug)]
struct Ended(CloseReason);

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Ended {}
