//! System calls that are not part of a backend: sockets, limits, processors, signals.
//!
//! Every function here is safe to call; the `unsafe` blocks inside hand the kernel pointers to
//! values that outlive the call (SAFETY invariant 5). One folder per system, the same names in each.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(windows)]
mod windows;

#[cfg(target_os = "linux")]
pub(crate) use linux::{
    Epoll, Harvest, RawAddress, UnixConnect, accept_queue_limit, addresses, client, connect_unix, cpu_count,
    datagram, duplicate, eventfd, eventfd_write, kernel_version, listen, listener, memlock_limit,
    memlock_limit_enforced, nofile_limit, peer_address, pin_to_cpu, set_options_of_open, set_timer_slack,
    shutdown_write, stream, sysctl,
};
#[cfg(target_os = "linux")]
pub use linux::{Signals, raise_nofile_limit};
#[cfg(windows)]
pub(crate) use windows::{
    RawAddress, accept_queue_limit, accept_socket, client, cpu_count, datagram, kernel_version, listener,
    local_address, memlock_limit_enforced, nofile_limit, peer_address, pin_to_cpu, set_options,
    set_options_of_open, shutdown_write,
};
#[cfg(windows)]
pub use windows::{Signals, raise_nofile_limit};
