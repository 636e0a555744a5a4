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

/// Whether an error says, by itself or as its cause, that the runtime or a server is shutting down.
pub(crate) fn is_shutdown(error: &(dyn std::error::Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let ended = match error.downcast_ref::<io::Error>() {
            Some(error) => error.get_ref().and_then(|inner| inner.downcast_ref::<Ended>()),
            None => error.downcast_ref::<Ended>(),
        };
        if ended.is_some_and(|ended| ended.0 == CloseReason::Shutdown) {
            return true;
        }
        next = error.source();
    }
    false
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
