//! Unix stream sockets.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::SocketAddr;

use crate::driver::Address;

use super::datagram::Name;
use super::{check, stream, sysctl};

/// A name as the kernel reads it.
fn raw(name: &SocketAddr) -> Name {
    Name::from(&Address::Unix(name.clone()))
}

fn open(flags: libc::c_int) -> io::Result<OwnedFd> {
    let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | flags;
    // SAFETY: takes no pointer (invariant 5).
    let fd = check(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })?;
    // SAFETY: the descriptor is new and nobody else's (invariant 5).
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A bound, listening socket and its effective backlog. Without a name the kernel gives it an abstract one. A
/// file of that name, be it a socket that nobody listens on any more, is not removed: then `EADDRINUSE`.
///
/// # Errors
/// Of the system.
pub(super) fn listener(name: &SocketAddr, backlog: u32) -> io::Result<(OwnedFd, u32)> {
    let raw = raw(name);
    let fd = open(0)?;
    // SAFETY: `raw` outlives the call and knows its length (invariant 5).
    check(unsafe { libc::bind(fd.as_raw_fd(), raw.as_ptr(), raw.len()) })?;
    // The kernel would clamp it silently.
    let most = sysctl("net/core/somaxconn").and_then(|text| text.parse().ok());
    let backlog = backlog.min(most.unwrap_or(u32::MAX));
    let number = libc::c_int::try_from(backlog).unwrap_or(libc::c_int::MAX);
    // SAFETY: takes no pointer (invariant 5).
    check(unsafe { libc::listen(fd.as_raw_fd(), number) })?;
    Ok((fd, backlog))
}

/// What came of a connect, which knows no time between: there is nobody to wait for.
pub(crate) enum UnixConnect {
    /// Connected. The socket's calls wait, as those of a TCP client's do.
    Made(OwnedFd),
    /// Refused, and the socket that was to be connected.
    Refused(OwnedFd, io::Error),
}

/// Connects to a listener, without waiting for room in its queue.
///
/// # Errors
/// When no socket could be made.
pub(crate) fn connect_unix(target: &SocketAddr) -> io::Result<UnixConnect> {
    let raw = raw(target);
    let fd = open(libc::SOCK_NONBLOCK)?;
    let connected = loop {
        // SAFETY: `raw` outlives the call and knows its length (invariant 5).
        match check(unsafe { libc::connect(fd.as_raw_fd(), raw.as_ptr(), raw.len()) }) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            connected => break connected,
        }
    };
    Ok(match connected {
        Ok(_) => {
            stream::set_nonblocking(fd.as_fd(), false)?;
            UnixConnect::Made(fd)
        }
        // Nothing tells when there is room, and asking in turns is the caller's decision, who knows how long.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            UnixConnect::Refused(fd, io::Error::new(io::ErrorKind::ResourceBusy, FULL))
        }
        Err(error) => UnixConnect::Refused(fd, error),
    })
}

const FULL: &str = "the listener's queue is full (EAGAIN): try again later, or give it a larger backlog (clamped to \
                    net.core.somaxconn)";

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn names_of_every_kind_are_the_kernels() {
        let longest = format!("/tmp/{}", "n".repeat(102));
        let path = SocketAddr::from_pathname(&longest).expect("107 bytes");
        assert_eq!(raw(&path).len(), 2 + 108);
        let name = SocketAddr::from_abstract_name([b'a'; 107]).expect("107 bytes");
        assert_eq!(raw(&name).len(), 2 + 108);
        let (fd, _) = listener(&name, 1).expect("listens");
        let bound = UnixListener::from(fd);
        assert_eq!(bound.local_addr().expect("its name").as_abstract_name(), Some(&[b'a'; 107][..]));
        UnixStream::connect_addr(&name).expect("the same name as std's");
        let none = UnixStream::pair().expect("a pair").0.local_addr().expect("no name");
        assert!(none.is_unnamed());
        let (fd, backlog) = listener(&none, 5).expect("a name of the kernel's choice");
        let chosen = UnixListener::from(fd).local_addr().expect("its name");
        assert_eq!((chosen.as_abstract_name().map(<[u8]>::len), backlog), (Some(5), 5));
    }
}
