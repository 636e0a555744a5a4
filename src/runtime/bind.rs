//! Listening addresses.

use std::io;
use std::net::TcpListener;
use std::time::Duration;

use crate::config::ListenerConfig;
#[cfg(target_os = "linux")]
use crate::config::Sharing;
use crate::driver::{NativeListener, sys};

use super::{ListenerInfo, StartError};

/// Binds a listening address for every worker.
///
/// # Errors
/// [`StartError::Bind`], with the remedy.
#[cfg(target_os = "linux")]
pub(super) fn for_workers(
    wanted: &ListenerConfig,
    workers: usize,
) -> Result<(Vec<NativeListener>, ListenerInfo), StartError> {
    let failed = |source| StartError::Bind { addr: wanted.addr, source };
    let reuse = wanted.sharing == Sharing::PerWorker && workers > 1;
    let mut config = wanted.clone();
    if reuse && wanted.addr.port() != 0 {
        // Sockets with SO_REUSEPORT share an address with any other of the same user that has it set:
        // a second server would silently take half of the first one's clients. One without is refused.
        drop(patiently(|| sys::listener(&config, false)).map_err(failed)?);
    }
    let first = patiently(|| sys::listener(&config, reuse)).map_err(failed)?;
    config.addr = first.local_addr().map_err(failed)?;
    let backlog = sys::accept_queue_limit(&first).unwrap_or(config.backlog);
    let mut sockets = vec![first];
    while sockets.len() < workers {
        let socket = match wanted.sharing {
            Sharing::PerWorker => sys::listener(&config, reuse),
            Sharing::One => sockets[0].try_clone(),
        };
        sockets.push(socket.map_err(failed)?);
    }
    let info = ListenerInfo { addr: config.addr, backlog_asked: wanted.backlog, backlog };
    Ok((sockets, info))
}

/// Binds a listening address for all workers: a socket belongs to one completion port on Windows, so there
/// is one listener, and every worker accepts from it ([`Sharing::One`], whatever was asked for).
///
/// # Errors
/// [`StartError::Bind`], with the remedy.
#[cfg(windows)]
pub(super) fn for_workers(
    wanted: &ListenerConfig,
    workers: usize,
) -> Result<(Vec<NativeListener>, ListenerInfo), StartError> {
    let failed = |source| StartError::Bind { addr: wanted.addr, source };
    let socket = patiently(|| sys::listener(wanted, false)).map_err(failed)?;
    let addr = socket.local_addr().map_err(failed)?;
    let backlog = sys::accept_queue_limit(&socket).unwrap_or(wanted.backlog);
    let sockets = NativeListener::share(socket, &wanted.options, workers).map_err(failed)?;
    Ok((sockets, ListenerInfo { addr, backlog_asked: wanted.backlog, backlog }))
}

/// Tries again for a moment while an address is in use: the kernel takes some 20 ms to let go of the
/// sockets of a process with io_urings that was killed, and its successor is started at once.
fn patiently(listen: impl Fn() -> io::Result<TcpListener>) -> io::Result<TcpListener> {
    for _ in 0..10 {
        match listen() {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                std::thread::sleep(Duration::from_millis(15));
            }
            outcome => return outcome,
        }
    }
    listen()
}
