//! Linux.

mod address;
mod control;
pub(crate) mod datagram;
mod epoll;
mod limits;
mod signal;
mod socket;
pub(crate) mod stream;
mod thread;
mod unix;

pub(crate) use address::RawAddress;
pub(crate) use control::{addresses, listen, set_options_of_open};
pub(crate) use epoll::{Epoll, Harvest};
pub use limits::raise_nofile_limit;
pub(crate) use limits::{kernel_version, memlock_limit, memlock_limit_enforced, nofile_limit, sysctl};
pub use signal::Signals;
pub(crate) use socket::{
    accept_queue_limit, client, duplicate, eventfd, eventfd_write, listener, peer_address, shutdown_write,
};
pub(crate) use thread::{cpu_count, pin_to_cpu, set_timer_slack};
pub(crate) use unix::{UnixConnect, connect_unix};

use std::io;

/// The result of a system call that returns a size, or -1 on failure.
fn check_size(result: libc::ssize_t) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// The result of a system call that returns -1 on failure.
fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
