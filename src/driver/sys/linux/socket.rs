//! TCP sockets before and besides io_uring.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use crate::config::{ConnectConfig, ListenerConfig, SocketOptions};

use super::{RawAddress, check};

fn open(address: &SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: takes no pointer (invariant 5).
    let fd = check(unsafe { libc::socket(family, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: the descriptor is new and nobody else's (invariant 5).
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(super) fn set_option<T>(fd: &impl AsRawFd, level: i32, name: i32, value: &T) -> io::Result<()> {
    let pointer: *const T = value;
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` outlives the call and is `len` bytes long (invariant 5).
    check(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, pointer.cast(), len) })?;
    Ok(())
}

pub(super) fn set_int(fd: &impl AsRawFd, level: i32, name: i32, value: u32) -> io::Result<()> {
    set_option(fd, level, name, &libc::c_int::try_from(value).unwrap_or(libc::c_int::MAX))
}

fn seconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_secs().max(1)).unwrap_or(u32::MAX)
}

pub(super) fn set_options(fd: &impl AsRawFd, options: &SocketOptions) -> io::Result<()> {
    if options.nodelay {
        set_int(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 1)?;
    }
    if let Some(keepalive) = options.keepalive {
        set_int(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1)?;
        set_int(fd, libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, seconds(keepalive.idle))?;
        set_int(fd, libc::IPPROTO_TCP, libc::TCP_KEEPINTVL, seconds(keepalive.interval))?;
        set_int(fd, libc::IPPROTO_TCP, libc::TCP_KEEPCNT, keepalive.count)?;
    }
    if let Some(timeout) = options.user_timeout {
        let millis = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        set_option(fd, libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT, &millis)?;
    }
    set_buffers(fd, options)?;
    if let Some(linger) = options.linger {
        let seconds = libc::c_int::try_from(linger.as_secs()).unwrap_or(libc::c_int::MAX);
        let linger = libc::linger { l_onoff: 1, l_linger: seconds };
        set_option(fd, libc::SOL_SOCKET, libc::SO_LINGER, &linger)?;
    }
    Ok(())
}

/// The buffers' sizes: the options that a socket of any kind has.
pub(super) fn set_buffers(fd: &impl AsRawFd, options: &SocketOptions) -> io::Result<()> {
    if let Some(bytes) = options.recv_buffer {
        set_int(fd, libc::SOL_SOCKET, libc::SO_RCVBUF, bytes)?;
    }
    if let Some(bytes) = options.send_buffer {
        set_int(fd, libc::SOL_SOCKET, libc::SO_SNDBUF, bytes)?;
    }
    Ok(())
}

fn bind(fd: &OwnedFd, address: SocketAddr) -> io::Result<()> {
    let raw = RawAddress::from(address);
    // SAFETY: `raw` outlives the call and knows its length (invariant 5).
    check(unsafe { libc::bind(fd.as_raw_fd(), raw.as_ptr(), raw.len()) })?;
    Ok(())
}

/// A bound, listening socket with its options set. `reuse_port`: others of this process will
/// listen on the same address.
pub(crate) fn listener(config: &ListenerConfig, reuse_port: bool) -> io::Result<TcpListener> {
    let fd = open(&config.addr)?;
    set_int(&fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    if reuse_port {
        set_int(&fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)?;
    }
    if config.addr.is_ipv6() {
        let v6_only = u32::from(!config.dual_stack);
        set_int(&fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, v6_only)?;
    }
    set_options(&fd, &config.options)?;
    bind(&fd, config.addr)?;
    let backlog = libc::c_int::try_from(config.backlog).unwrap_or(libc::c_int::MAX);
    // SAFETY: takes no pointer (invariant 5).
    check(unsafe { libc::listen(fd.as_raw_fd(), backlog) })?;
    Ok(TcpListener::from(fd))
}

/// The effective backlog of a listening socket: what the kernel made of the one asked for
/// (`tcpi_sacked` of a listening socket's `TCP_INFO`).
pub(crate) fn accept_queue_limit(listener: &TcpListener) -> Option<u32> {
    // The kernel's `struct tcp_info` begins with 8 bytes of small fields, then u32s: rto, ato,
    // snd_mss, rcv_mss, unacked, sacked.
    let mut info = [0u32; 8];
    let mut len = size_of_val(&info) as libc::socklen_t;
    // SAFETY: `info` and `len` outlive the call, which writes at most `len` bytes (invariant 5).
    let result = unsafe {
        libc::getsockopt(
            listener.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut len,
        )
    };
    (result == 0 && len as usize >= size_of_val(&info)).then_some(info[7])
}

/// A socket for an outgoing connection, with its options set and its source address bound.
pub(crate) fn client(config: &ConnectConfig) -> io::Result<OwnedFd> {
    let fd = open(&config.target)?;
    set_options(&fd, &config.options)?;
    if let Some(source) = config.source {
        if source.port() == 0 {
            set_int(&fd, libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, 1)?;
        } else {
            set_int(&fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
        }
        bind(&fd, source)?;
    }
    Ok(fd)
}

/// The peer's address of a connected socket.
pub(crate) fn peer_address(fd: RawFd) -> io::Result<SocketAddr> {
    let mut raw = RawAddress::UNSPECIFIED;
    let (address, len) = (raw.as_mut_ptr(), raw.len_mut());
    // SAFETY: address and length outlive the call (invariant 5).
    check(unsafe { libc::getpeername(fd, address, len) })?;
    raw.to_std().ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))
}

/// Sends FIN.
pub(crate) fn shutdown_write(fd: RawFd) -> io::Result<()> {
    // SAFETY: takes no pointer (invariant 5).
    check(unsafe { libc::shutdown(fd, libc::SHUT_WR) })?;
    Ok(())
}

/// Another descriptor for the same file.
pub(crate) fn duplicate(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: takes no pointer (invariant 5).
    let fd = check(unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) })?;
    // SAFETY: the descriptor is new and nobody else's (invariant 5).
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A counter that can be waited for.
pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: takes no pointer (invariant 5).
    let fd = check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) })?;
    // SAFETY: the descriptor is new and nobody else's (invariant 5).
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Adds one to an event counter. Cannot fail while the descriptor is open: the counter would have
/// to reach 2^64 - 1.
pub(crate) fn eventfd_write(fd: &OwnedFd) {
    let one = 1u64;
    let pointer: *const u64 = &raw const one;
    // SAFETY: eight bytes that outlive the call (invariant 5).
    unsafe { libc::write(fd.as_raw_fd(), pointer.cast(), size_of::<u64>()) };
}
