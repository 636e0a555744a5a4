//! Listeners made at run time, and what is asked of sockets that are open.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use crate::config::{Sharing, SocketOptions};
use crate::driver::{Address, Addresses, ListenConfig};

use super::{RawAddress, check, socket, unix};

/// A bound, listening socket, its address and its effective backlog. It is tried once: whoever wants to wait
/// for an address must not do so on a worker's thread.
///
/// # Errors
/// Of the system.
pub(crate) fn listen(config: &ListenConfig) -> io::Result<(OwnedFd, Address, u32)> {
    match config {
        ListenConfig::Tcp(config) => {
            let listener = socket::listener(config, config.sharing == Sharing::PerWorker)?;
            let local = Address::Inet(listener.local_addr()?);
            let backlog = socket::accept_queue_limit(&listener).unwrap_or(config.backlog);
            Ok((listener.into(), local, backlog))
        }
        ListenConfig::Unix(name, backlog) => {
            let (fd, backlog) = unix::listener(name, *backlog)?;
            let local = local_address(fd.as_fd())?;
            Ok((fd, local, backlog))
        }
    }
}

/// The addresses of both ends of a socket. One that is not connected, or not any more, has no peer.
///
/// # Errors
/// Of the system; `Unsupported` for a family that is not known here.
pub(crate) fn addresses(fd: BorrowedFd<'_>) -> io::Result<Addresses> {
    let peer = match peer_address(fd) {
        Ok(peer) => Some(peer),
        Err(error) if error.kind() == io::ErrorKind::NotConnected => None,
        Err(error) => return Err(error),
    };
    Ok(Addresses { local: local_address(fd)?, peer })
}

fn local_address(fd: BorrowedFd<'_>) -> io::Result<Address> {
    if domain(fd)? == libc::AF_UNIX {
        return Ok(Address::Unix(as_unix(fd)?.local_addr()?));
    }
    let mut raw = RawAddress::UNSPECIFIED;
    let (address, len) = (raw.as_mut_ptr(), raw.len_mut());
    // SAFETY: address and length outlive the call (invariant 5).
    check(unsafe { libc::getsockname(fd.as_raw_fd(), address, len) })?;
    raw.to_std().map(Address::Inet).ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))
}

fn peer_address(fd: BorrowedFd<'_>) -> io::Result<Address> {
    if domain(fd)? == libc::AF_UNIX {
        return Ok(Address::Unix(as_unix(fd)?.peer_addr()?));
    }
    socket::peer_address(fd.as_raw_fd()).map(Address::Inet)
}

/// As std's, which knows how to read names.
fn as_unix(fd: BorrowedFd<'_>) -> io::Result<UnixStream> {
    Ok(UnixStream::from(fd.try_clone_to_owned()?))
}

/// Sets the options of an open socket that are given, and `nodelay` either way. On a socket that is not TCP
/// only what applies: the buffers.
///
/// # Errors
/// `InvalidInput` for an option out of its range, before anything is set; of the system, with those before
/// it set.
pub(crate) fn set_options_of_open(fd: BorrowedFd<'_>, options: &SocketOptions) -> io::Result<()> {
    options.check().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error.to_string()))?;
    let inet = matches!(domain(fd)?, libc::AF_INET | libc::AF_INET6);
    if !inet || option(fd, libc::SOL_SOCKET, libc::SO_TYPE)? != libc::SOCK_STREAM {
        return socket::set_buffers(&fd, options);
    }
    if !options.nodelay {
        socket::set_int(&fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, 0)?;
    }
    socket::set_options(&fd, options)
}

/// The family of a socket.
fn domain(fd: BorrowedFd<'_>) -> io::Result<libc::c_int> {
    option(fd, libc::SOL_SOCKET, libc::SO_DOMAIN)
}

fn option(fd: BorrowedFd<'_>, level: libc::c_int, name: libc::c_int) -> io::Result<libc::c_int> {
    let mut value: libc::c_int = 0;
    let mut len = size_of_val(&value) as libc::socklen_t;
    let pointer: *mut libc::c_int = &raw mut value;
    // SAFETY: value and length outlive the call, which writes at most `len` bytes (invariant 5).
    check(unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, pointer.cast(), &raw mut len) })?;
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, UdpSocket};
    use std::time::Duration;

    use crate::config::Keepalive;

    #[test]
    fn options_reach_the_sockets_that_have_them() {
        let options = SocketOptions {
            nodelay: true,
            keepalive: Some(Keepalive {
                idle: Duration::from_secs(31),
                interval: Duration::from_secs(32),
                count: 33,
            }),
            user_timeout: Some(Duration::from_millis(4321)),
            send_buffer: Some(50_000),
            ..SocketOptions::default()
        };
        let tcp = TcpListener::bind("127.0.0.1:0").expect("a socket");
        set_options_of_open(tcp.as_fd(), &options).expect("set");
        let of_tcp = |name| option(tcp.as_fd(), libc::IPPROTO_TCP, name).expect("an option");
        assert_eq!(
            [of_tcp(libc::TCP_KEEPIDLE), of_tcp(libc::TCP_KEEPINTVL), of_tcp(libc::TCP_KEEPCNT)],
            [31, 32, 33]
        );
        assert_eq!([of_tcp(libc::TCP_USER_TIMEOUT), of_tcp(libc::TCP_NODELAY)], [4321, 1]);
        set_options_of_open(tcp.as_fd(), &SocketOptions { nodelay: false, ..options.clone() }).expect("set");
        assert_eq!(of_tcp(libc::TCP_NODELAY), 0);
        let udp = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let (stream, _other) = UnixStream::pair().expect("a pair");
        for fd in [udp.as_fd(), stream.as_fd()] {
            set_options_of_open(fd, &options).expect("the buffer");
            assert_eq!(option(fd, libc::SOL_SOCKET, libc::SO_SNDBUF).expect("an option"), 100_000, "doubled");
            assert_eq!(option(fd, libc::SOL_SOCKET, libc::SO_KEEPALIVE).expect("an option"), 0);
        }
        let ends = addresses(udp.as_fd()).expect("one address");
        assert!(matches!(ends, Addresses { local: Address::Inet(_), peer: None }));
        let ends = addresses(stream.as_fd()).expect("two names, of nothing");
        assert!(matches!(ends.peer, Some(Address::Unix(name)) if name.is_unnamed()));
    }
}
