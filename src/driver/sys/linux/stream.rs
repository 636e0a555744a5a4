//! What is done with a stream socket that is ready. None of these waits, whatever the socket's own mode
//! is (connecting excepted, which knows no flag for that).

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::{RawAddress, check, check_size};

/// Bytes that one call sends at most (`MAX_RW_COUNT` of the kernel, with pages of 64 KiB at the largest).
pub(crate) const MAX_SEND: u64 = 0x7fff_0000;

/// Receives what is there, as much as fits. 0: the peer sends no more.
///
/// # Errors
/// `EAGAIN` when there is nothing; what the connection failed with.
#[inline]
pub(crate) fn receive(fd: BorrowedFd<'_>, room: &mut [u8]) -> io::Result<usize> {
    let pointer = room.as_mut_ptr();
    // SAFETY: `room` outlives the call, which writes at most its length (invariants 1 and 5).
    check_size(unsafe { libc::recv(fd.as_raw_fd(), pointer.cast(), room.len(), libc::MSG_DONTWAIT) })
}

/// Sends slices in order, as much as the socket takes.
///
/// # Errors
/// `EAGAIN` when it takes nothing; what the connection failed with. Never a signal.
#[inline]
pub(crate) fn send(fd: BorrowedFd<'_>, slices: &[IoSlice<'_>]) -> io::Result<usize> {
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    if let [only] = slices {
        // SAFETY: the bytes outlive the call, which reads them (invariants 3 and 5).
        return check_size(unsafe { libc::send(fd.as_raw_fd(), only.as_ptr().cast(), only.len(), flags) });
    }
    // SAFETY: a `msghdr` is made of integers and pointers, for which zero is a value (invariant 5).
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    // An `IoSlice` is an `iovec`; sending writes to neither.
    header.msg_iov = slices.as_ptr().cast::<libc::iovec>().cast_mut();
    header.msg_iovlen = slices.len() as _;
    // SAFETY: header, vectors and bytes outlive the call, which reads them (invariants 3 and 5).
    check_size(unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const header, flags) })
}

/// Takes a connection from a listener's queue, and its peer's internet address if that is wanted. The listener
/// must have been made non-blocking.
///
/// # Errors
/// `EAGAIN` when none waits; `EMFILE` and its like, with the connection still in the queue.
pub(crate) fn accept(listener: BorrowedFd<'_>, with_peer: bool) -> io::Result<(OwnedFd, Option<SocketAddr>)> {
    let mut raw = RawAddress::UNSPECIFIED;
    let (address, len) = if with_peer {
        (raw.as_mut_ptr(), raw.len_mut())
    } else {
        (std::ptr::null_mut(), std::ptr::null_mut())
    };
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: address and length outlive the call, or are null, which asks for none (invariant 5).
    let fd = check(unsafe { libc::accept4(listener.as_raw_fd(), address, len, flags) })?;
    // SAFETY: the descriptor is new and nobody else's (invariant 5).
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    Ok((fd, raw.to_std().filter(|_| with_peer)))
}

/// Makes the socket's calls return instead of wait, or wait again.
///
/// # Errors
/// Never in practice.
pub(crate) fn set_nonblocking(fd: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    let mut on = libc::c_int::from(on);
    // SAFETY: `on` outlives the call, which reads it (invariant 5).
    check(unsafe { libc::ioctl(fd.as_raw_fd(), libc::FIONBIO, &raw mut on) })?;
    Ok(())
}

/// Connects, or begins to.
///
/// # Errors
/// `EINPROGRESS` when a non-blocking socket's connection is under way; why it cannot be.
pub(crate) fn connect(fd: BorrowedFd<'_>, target: SocketAddr) -> io::Result<()> {
    connect_raw(fd, &RawAddress::from(target))
}

/// Resets the connection: its peer learns that it was aborted. (Connecting a TCP socket to nowhere.)
///
/// # Errors
/// When there is nothing to reset; always on a Unix socket, which cannot be disconnected (`EINVAL`).
pub(crate) fn reset(fd: BorrowedFd<'_>) -> io::Result<()> {
    connect_raw(fd, &RawAddress::UNSPECIFIED)
}

fn connect_raw(fd: BorrowedFd<'_>, raw: &RawAddress) -> io::Result<()> {
    // SAFETY: the address outlives the call and knows its length (invariant 5).
    check(unsafe { libc::connect(fd.as_raw_fd(), raw.as_ptr(), raw.len()) })?;
    Ok(())
}

/// Sends FIN.
///
/// # Errors
/// When the connection is gone.
pub(crate) fn shutdown_write(fd: BorrowedFd<'_>) -> io::Result<()> {
    super::shutdown_write(fd.as_raw_fd())
}

/// Takes the error that waits on a socket: what became of a connect. `Ok(())` if there is none.
///
/// # Errors
/// That error.
pub(crate) fn take_error(fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut error: libc::c_int = 0;
    let mut len = size_of_val(&error) as libc::socklen_t;
    let pointer: *mut libc::c_int = &raw mut error;
    // SAFETY: `error` and `len` outlive the call, which writes at most `len` bytes (invariant 5).
    check(unsafe {
        libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_ERROR, pointer.cast(), &raw mut len)
    })?;
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}
