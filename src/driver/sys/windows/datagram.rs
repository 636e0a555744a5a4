//! Datagram sockets.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::windows::io::{FromRawSocket, OwnedSocket, RawSocket};

use windows_sys::Win32::Networking::WinSock::{
    self, AF_INET, AF_INET6, INVALID_SOCKET, IPPROTO_IPV6, IPPROTO_UDP, IPV6_V6ONLY, SIO_UDP_CONNRESET,
    SIO_UDP_NETRESET, SO_BROADCAST, SO_EXCLUSIVEADDRUSE, SO_RCVBUF, SO_SNDBUF, SOCK_DGRAM, SOCKET,
    SOL_SOCKET, WSA_FLAG_NO_HANDLE_INHERIT, WSA_FLAG_OVERLAPPED, WSAEMSGSIZE, WSAEOPNOTSUPP, WSAIoctl,
};

use crate::config::SocketOptions;
use crate::driver::{Address, DatagramConfig, PRELUDE, Received};

use super::socket::{bind, peer_address, set_int, start_winsock};
use super::{RawAddress, check, socket_error};

/// Opens, binds and connects a socket for overlapped operations that child processes do not inherit.
///
/// # Errors
/// Of the system; `Unsupported` for `reuse_port`.
pub(crate) fn open(config: &DatagramConfig) -> io::Result<OwnedSocket> {
    if config.reuse_port {
        // SO_REUSEADDR there lets a program take another's datagrams away; it spreads none.
        let text = "reuse_port needs the socket option SO_REUSEPORT, which Windows lacks";
        return Err(io::Error::new(io::ErrorKind::Unsupported, text));
    }
    let inet = |address: &Address| match address {
        Address::Inet(address) => *address,
    };
    let (local, peer) = (config.local.as_ref().map(inet), config.peer.as_ref().map(inet));
    let local = match (local, peer) {
        (Some(local), _) => local,
        (None, Some(SocketAddr::V6(_))) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
        (None, _) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
    };
    start_winsock()?;
    let family = i32::from(if local.is_ipv6() { AF_INET6 } else { AF_INET });
    let flags = WSA_FLAG_OVERLAPPED | WSA_FLAG_NO_HANDLE_INHERIT;
    // SAFETY: no protocol description is given (invariant 5).
    let socket = unsafe { WinSock::WSASocketW(family, SOCK_DGRAM, IPPROTO_UDP, std::ptr::null(), 0, flags) };
    if socket == INVALID_SOCKET {
        return Err(socket_error());
    }
    // SAFETY: the socket is new and nobody else's (invariant 5).
    let owned = unsafe { OwnedSocket::from_raw_socket(socket as RawSocket) };
    set_int(socket, SOL_SOCKET, SO_EXCLUSIVEADDRUSE, 1)?;
    if local.is_ipv6() {
        // As for listeners: an IPv6 address is one.
        set_int(socket, IPPROTO_IPV6, IPV6_V6ONLY, 1)?;
    }
    if config.broadcast {
        set_int(socket, SOL_SOCKET, SO_BROADCAST, 1)?;
    }
    set_sizes(socket, config.recv_buffer, config.send_buffer)?;
    if peer.is_none() {
        ignore_resets(socket);
    }
    bind(&owned, local)?;
    if let Some(peer) = peer {
        let peer = RawAddress::from(peer);
        // SAFETY: `peer` outlives the call and knows its length (invariant 5).
        check(unsafe { WinSock::connect(socket, peer.as_ptr(), peer.len()) })?;
    }
    Ok(owned)
}

fn set_sizes(socket: SOCKET, recv: Option<u32>, send: Option<u32>) -> io::Result<()> {
    if let Some(bytes) = recv {
        set_int(socket, SOL_SOCKET, SO_RCVBUF, bytes)?;
    }
    if let Some(bytes) = send {
        set_int(socket, SOL_SOCKET, SO_SNDBUF, bytes)?;
    }
    Ok(())
}

/// Sets those options of an open socket that are given and that datagrams know: the buffers' sizes.
///
/// # Errors
/// `InvalidInput` for an option out of its range, before anything is set; of the system.
pub(crate) fn set_options(socket: RawSocket, options: &SocketOptions) -> io::Result<()> {
    options.check().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error.to_string()))?;
    set_sizes(socket as SOCKET, options.recv_buffer, options.send_buffer)
}

/// Without this a receive fails with `WSAECONNRESET` after a datagram to *anybody* who is not there, which other
/// systems tell connected sockets only.
fn ignore_resets(socket: SOCKET) {
    for code in [SIO_UDP_CONNRESET, SIO_UDP_NETRESET] {
        let (off, mut written) = (0i32, 0);
        let pointer: *const i32 = &raw const off;
        // SAFETY: the value and the count outlive the call, which is not overlapped (invariant 5).
        let _ = unsafe {
            WSAIoctl(
                socket,
                code,
                pointer.cast(),
                size_of::<i32>() as u32,
                std::ptr::null_mut(),
                0,
                &raw mut written,
                std::ptr::null_mut(),
                None,
            )
        };
        // A system that refuses has these errors, which whoever receives passes over.
    }
}

/// Receives one datagram, as [`Received`] reads it, from a socket that does not wait. Returns the bytes written, at
/// least [`PRELUDE`].
///
/// # Errors
/// Error numbers: `WSAEWOULDBLOCK` when there is none; what an earlier datagram came to.
pub(crate) fn receive(socket: RawSocket, room: &mut [u8]) -> Result<usize, i32> {
    let Some((prelude, payload)) = room.split_first_chunk_mut::<PRELUDE>() else {
        return Err(WSAEMSGSIZE);
    };
    let len = i32::try_from(payload.len()).unwrap_or(i32::MAX);
    let mut from = RawAddress::UNSPECIFIED;
    let (pointer, from_len) = (from.as_mut_ptr(), from.len_mut());
    // SAFETY: there is room for `len` bytes and for an address, which are written within the call: it is not
    // overlapped (invariant 5).
    let result =
        unsafe { WinSock::recvfrom(socket as SOCKET, payload.as_mut_ptr(), len, 0, pointer, from_len) };
    let (bytes, truncated) = match usize::try_from(result) {
        Ok(bytes) => (bytes, false),
        Err(_) => match socket_error().raw_os_error().unwrap_or(WSAEOPNOTSUPP) {
            // The buffer is full of its beginning.
            WSAEMSGSIZE => (payload.len(), true),
            number => return Err(number),
        },
    };
    let from = from.to_std().or_else(|| peer_address(socket).ok()).ok_or(WSAEOPNOTSUPP)?;
    Received::write_prelude(prelude, from, bytes, truncated);
    Ok(PRELUDE + bytes)
}
