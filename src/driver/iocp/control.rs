//! What is rare: listeners made at run time, and what is asked of a connection's socket.
//!
//! Accepted and connected sockets have their addresses because they were given the state of such sockets
//! (`SO_UPDATE_ACCEPT_CONTEXT`, `SO_UPDATE_CONNECT_CONTEXT`) when their operation ended.

use std::io;
use std::os::windows::io::{AsRawSocket, BorrowedSocket, RawSocket};

use windows_sys::Win32::Networking::WinSock::{INVALID_SOCKET, WSAENOTCONN};

use crate::driver::{Address, Addresses, Driver, Key, ListenConfig, Listening, sys};

use super::IocpDriver;
use super::listeners::IocpListener;

impl IocpDriver {
    /// A listener of this worker alone, whose packets come to its own port: no thread forwards them. Nobody else
    /// can listen on the address, so `sharing` makes no difference.
    pub(super) fn begin_listening(&mut self, config: &ListenConfig) -> io::Result<Listening> {
        let ListenConfig::Tcp(config) = config;
        let socket = sys::listener(config, false)?;
        let local = Address::Inet(socket.local_addr()?);
        let backlog = sys::accept_queue_limit(&socket).unwrap_or(config.backlog);
        let shared = IocpListener::alone(socket, &config.options)?;
        Ok(Listening { id: self.add_listener(shared)?, local, backlog })
    }

    /// Does something with a connection's socket.
    ///
    /// # Errors
    /// `NotConnected` when there is none; those of `with`.
    pub(in crate::driver) fn with_socket<R>(
        &mut self,
        key: Key,
        with: impl FnOnce(BorrowedSocket<'_>) -> io::Result<R>,
    ) -> io::Result<R> {
        let slot = self.slots.usable(key).filter(|slot| slot.socket != INVALID_SOCKET);
        let socket = slot.ok_or(io::ErrorKind::NotConnected)?.socket;
        // SAFETY: the socket is the connection's, and is closed only by `close` (invariant 5).
        with(unsafe { BorrowedSocket::borrow_raw(socket as RawSocket) })
    }
}

/// The addresses of both ends. A connection that is gone has no peer.
pub(super) fn addresses(socket: BorrowedSocket<'_>) -> io::Result<Addresses> {
    let socket = socket.as_raw_socket();
    let peer = match sys::peer_address(socket) {
        Ok(peer) => Some(Address::Inet(peer)),
        Err(error) if error.raw_os_error() == Some(WSAENOTCONN) => None,
        Err(error) => return Err(error),
    };
    Ok(Addresses { local: Address::Inet(sys::local_address(socket)?), peer })
}
