//! Datagram sockets.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;

use crate::driver::{Address, CONTROL_ROOM, DatagramConfig, NAME_ROOM, PRELUDE, name_of};

use super::socket::{set_int, set_option};
use super::{check, check_size};

/// An address of any family as the kernel reads it, with its length.
#[derive(Clone, Copy)]
pub(crate) struct Name {
    bytes: [u64; NAME_ROOM / 8],
    len: libc::socklen_t,
}

impl Name {
    /// No address.
    pub(crate) const NONE: Name = Name { bytes: [0; NAME_ROOM / 8], len: 0 };

    /// Null for no address.
    pub(crate) fn as_ptr(&self) -> *const libc::sockaddr {
        if self.len == 0 { std::ptr::null() } else { self.bytes.as_ptr().cast() }
    }

    pub(crate) fn len(&self) -> libc::socklen_t {
        self.len
    }

    fn of(parts: &[&[u8]]) -> Self {
        let mut name = Self::NONE;
        let all = parts.iter().flat_map(|part| part.iter());
        for (at, &byte) in all.enumerate().take(NAME_ROOM) {
            // In memory's order, whatever that is.
            let mut word = name.bytes[at / 8].to_ne_bytes();
            word[at % 8] = byte;
            name.bytes[at / 8] = u64::from_ne_bytes(word);
            name.len = at as libc::socklen_t + 1;
        }
        name
    }
}

impl From<&Address> for Name {
    fn from(address: &Address) -> Self {
        match address {
            Address::Inet(address) => {
                let (bytes, len) = name_of(*address);
                Self::of(&[&bytes[..len]])
            }
            Address::Unix(address) => {
                let family = (libc::AF_UNIX as libc::sa_family_t).to_ne_bytes();
                match (address.as_pathname(), address.as_abstract_name()) {
                    (Some(path), _) => Self::of(&[&family, path.as_os_str().as_bytes(), &[0]]),
                    (None, Some(name)) => Self::of(&[&family, &[0], name]),
                    (None, None) => Self::of(&[&family]),
                }
            }
        }
    }
}

/// Room for the one control message of a send.
pub(crate) type Control = [u64; CONTROL_ROOM / 8];

/// A control message that has the kernel cut a payload into datagrams of `segment` bytes.
pub(crate) fn segment_control(segment: u16) -> (Control, usize) {
    let mut control = [0; CONTROL_ROOM / 8];
    // Length of header and value, then level and type, then the value; see cmsg(3).
    let header = size_of::<libc::cmsghdr>();
    control[0] = header as u64 + 2;
    let level = libc::SOL_UDP.to_ne_bytes();
    let kind = libc::UDP_SEGMENT.to_ne_bytes();
    control[1] =
        u64::from_ne_bytes([level[0], level[1], level[2], level[3], kind[0], kind[1], kind[2], kind[3]]);
    let value = segment.to_ne_bytes();
    control[2] = u64::from_ne_bytes([value[0], value[1], 0, 0, 0, 0, 0, 0]);
    (control, header + 8)
}

/// Opens, binds and connects a datagram socket.
///
/// # Errors
/// Of the system.
pub(crate) fn open(config: &DatagramConfig) -> io::Result<OwnedFd> {
    let family = match config.local.as_ref().or(config.peer.as_ref()) {
        Some(Address::Inet(address)) if address.is_ipv4() => libc::AF_INET,
        Some(Address::Inet(_)) => libc::AF_INET6,
        Some(Address::Unix(_)) | None => libc::AF_UNIX,
    };
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
    // SAFETY: takes no pointer (invariant 5).
    let fd = check(unsafe { libc::socket(family, kind, 0) })?;
    // SAFETY: the descriptor is new and nobody else's (invariant 5).
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    if config.reuse_port {
        set_int(&fd, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)?;
    }
    if config.broadcast {
        set_int(&fd, libc::SOL_SOCKET, libc::SO_BROADCAST, 1)?;
    }
    if config.gro {
        set_int(&fd, libc::SOL_UDP, libc::UDP_GRO, 1)?;
    }
    if family == libc::AF_INET6 {
        // As for listeners: an IPv6 address is one.
        set_option(&fd, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, &1)?;
    }
    if let Some(bytes) = config.recv_buffer {
        set_int(&fd, libc::SOL_SOCKET, libc::SO_RCVBUF, bytes)?;
    }
    if let Some(bytes) = config.send_buffer {
        set_int(&fd, libc::SOL_SOCKET, libc::SO_SNDBUF, bytes)?;
    }
    if let Some(local) = &config.local {
        let name = Name::from(local);
        // SAFETY: `name` outlives the call and knows its length (invariant 5).
        check(unsafe { libc::bind(fd.as_raw_fd(), name.as_ptr(), name.len()) })?;
    }
    if let Some(peer) = &config.peer {
        let name = Name::from(peer);
        // SAFETY: `name` outlives the call and knows its length (invariant 5).
        check(unsafe { libc::connect(fd.as_raw_fd(), name.as_ptr(), name.len()) })?;
    }
    Ok(fd)
}

/// Receives one datagram, as [`Received`](crate::driver::Received) reads it. Returns the bytes written, at
/// least [`PRELUDE`]. Does not wait.
///
/// # Errors
/// `EAGAIN` when there is none; what an earlier datagram came to; `EINVAL` when `room` is too small.
pub(crate) fn receive(fd: BorrowedFd<'_>, room: &mut [u8]) -> io::Result<usize> {
    let Some((prelude, payload)) = room.split_first_chunk_mut::<PRELUDE>() else {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    };
    let (header, rest) = prelude.split_at_mut(PRELUDE - NAME_ROOM - CONTROL_ROOM);
    let (name, control) = rest.split_at_mut(NAME_ROOM);
    let mut vector = libc::iovec { iov_base: payload.as_mut_ptr().cast(), iov_len: payload.len() };
    // SAFETY: a `msghdr` is made of integers and pointers, for which zero is a value (invariant 5).
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_name = name.as_mut_ptr().cast();
    message.msg_namelen = NAME_ROOM as libc::socklen_t;
    message.msg_iov = &raw mut vector;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = CONTROL_ROOM as _;
    let flags = libc::MSG_DONTWAIT;
    // SAFETY: header, vector and what they point to outlive the call, which writes at most the lengths
    // given (invariants 1 and 5).
    let len = check_size(unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, flags) })?;
    let words = [message.msg_namelen, message.msg_controllen as u32, len as u32, message.msg_flags as u32];
    for (place, word) in header.chunks_exact_mut(4).zip(words) {
        place.copy_from_slice(&word.to_ne_bytes());
    }
    Ok(PRELUDE + len)
}

/// Sends one datagram. Does not wait.
///
/// # Errors
/// `EAGAIN` when there is no room for it; why it cannot be.
pub(crate) fn send(fd: BorrowedFd<'_>, bytes: &[u8], to: &Name, segment: Option<u16>) -> io::Result<usize> {
    let mut vector = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let control = segment.map(segment_control);
    // SAFETY: a `msghdr` is made of integers and pointers, for which zero is a value (invariant 5).
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_name = to.as_ptr().cast_mut().cast();
    message.msg_namelen = to.len();
    message.msg_iov = &raw mut vector;
    message.msg_iovlen = 1;
    if let Some((control, len)) = &control {
        message.msg_control = control.as_ptr().cast_mut().cast();
        message.msg_controllen = *len as _;
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: header, vector, address, control message and bytes outlive the call, which only reads them
    // (invariants 3 and 5).
    check_size(unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, flags) })
}
