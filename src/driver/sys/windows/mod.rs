//! Windows.

mod address;
pub(crate) mod datagram;
mod limits;
mod signal;
mod socket;
mod thread;

pub(crate) use address::RawAddress;
pub use limits::raise_nofile_limit;
pub(crate) use limits::{kernel_version, memlock_limit_enforced, nofile_limit};
pub use signal::Signals;
pub(crate) use socket::{
    accept_queue_limit, accept_socket, client, listener, local_address, peer_address, set_options,
    set_options_of_open, shutdown_write,
};
pub(crate) use thread::{cpu_count, pin_to_cpu};

use std::io;

use windows_sys::Win32::Networking::WinSock;

/// The last error of Winsock on the calling thread.
fn socket_error() -> io::Error {
    // SAFETY: takes no pointer (invariant 5).
    io::Error::from_raw_os_error(unsafe { WinSock::WSAGetLastError() })
}

/// The result of a Winsock call that returns `SOCKET_ERROR` on failure.
fn check(result: i32) -> io::Result<()> {
    if result == WinSock::SOCKET_ERROR { Err(socket_error()) } else { Ok(()) }
}
