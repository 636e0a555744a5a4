//! Winsock's extension functions, which are asked for by their identifiers.
//!
//! Asked for are `AcceptEx`, `GetAcceptExSockaddrs` and `ConnectEx`. Not used, and where they would go:
//!
//! * `DisconnectEx` with `TF_REUSE_SOCKET` would make sockets that were closed by both sides ready for
//!   another `AcceptEx`, instead of `closesocket` in `submit.rs` and a new one in `listeners.rs`. Not built:
//!   such a socket stays bound to the port of the worker that had it, can sit in TIME_WAIT for minutes, and
//!   under Wine 8 `AcceptEx` on it succeeds and gives a connection that is dead.
//! * `TransmitFile` would be another kind of operation on a connection's object for sending. Not built: a
//!   driver's `send` takes memory only, on every system.
//! * The registered I/O functions (RIO) are the counterpart of registered buffers, but want sockets made for
//!   them, have no accept of their own, and are not there under Wine. They would be a backend of their own.

use std::io;
use std::net::SocketAddr;
use std::os::windows::io::{AsRawSocket, OwnedSocket};

use windows_sys::Win32::Networking::WinSock::{
    LPFN_ACCEPTEX, LPFN_CONNECTEX, LPFN_GETACCEPTEXSOCKADDRS, SIO_GET_EXTENSION_FUNCTION_POINTER,
    SO_PROTOCOL_INFOW, SOCKADDR, SOCKADDR_IN6, SOCKET, SOCKET_ERROR, SOL_SOCKET, WSAID_ACCEPTEX,
    WSAID_CONNECTEX, WSAID_GETACCEPTEXSOCKADDRS, WSAIoctl, WSAPROTOCOL_INFOW, XP1_IFS_HANDLES, getsockopt,
};
use windows_sys::core::GUID;

use crate::driver::sys::{self, RawAddress};

use super::error;
use super::op::{AcceptOp, Op};
use super::socket::Started;

/// Bytes that `AcceptEx` needs for one address of any family: 16 more than the address has.
pub(super) const ADDRESS_ROOM: usize = size_of::<RawAddress>() + 16;

/// The functions for sockets of one family.
#[derive(Clone, Copy)]
pub(super) struct Extensions {
    accept: LPFN_ACCEPTEX,
    connect: LPFN_CONNECTEX,
    addresses: LPFN_GETACCEPTEXSOCKADDRS,
    /// Sockets are handles of the file system: no layered provider stands between that completes
    /// operations by itself.
    pub(super) ifs: bool,
}

impl Extensions {
    /// Asks for the functions.
    ///
    /// # Errors
    /// When there are no sockets of this family, or a function is not there.
    pub(super) fn load(ipv6: bool) -> io::Result<Self> {
        let socket = sys::accept_socket(ipv6)?;
        Ok(Self {
            accept: function(&socket, &WSAID_ACCEPTEX)?,
            connect: function(&socket, &WSAID_CONNECTEX)?,
            addresses: function(&socket, &WSAID_GETACCEPTEXSOCKADDRS)?,
            ifs: is_ifs(&socket),
        })
    }

    /// Starts accepting a connection into a socket of the listener's family. Nothing is received with it:
    /// otherwise a client that is silent would hold the operation.
    ///
    /// A listener keeps packets for immediate successes too, so that all of them take the same way.
    pub(super) fn accept(&self, listener: SOCKET, socket: SOCKET, op: &AcceptOp) -> Started {
        let Some(accept) = self.accept else { return Started::Failed(error::UNSUPPORTED) };
        let (mut received, room) = (0, ADDRESS_ROOM as u32);
        let overlapped = op.op.overlapped();
        // SAFETY: the object, with the room for two addresses in it, keeps its place until the packet was
        // taken (invariant 8).
        let result = unsafe {
            accept(listener, socket, op.addresses().cast(), 0, room, room, &raw mut received, overlapped)
        };
        Started::of(result != 0, 0, false)
    }

    /// Starts connecting a bound socket. `skip`: an immediate success brings no packet.
    pub(super) fn connect(&self, socket: SOCKET, target: &RawAddress, op: &Op, skip: bool) -> Started {
        let Some(connect) = self.connect else { return Started::Failed(error::UNSUPPORTED) };
        let (mut sent, nothing) = (0, std::ptr::null());
        // SAFETY: the address is read within the call, the object keeps its place until the packet was taken
        // (invariants 5, 8).
        let result = unsafe {
            connect(socket, target.as_ptr(), target.len(), nothing, 0, &raw mut sent, op.overlapped())
        };
        Started::of(result != 0, 0, skip)
    }

    /// The peer's address among those that an accept wrote.
    pub(super) fn peer(&self, addresses: &[u8; 2 * ADDRESS_ROOM]) -> Option<SocketAddr> {
        let parse = self.addresses?;
        let (mut local, mut local_len): (*mut SOCKADDR, i32) = (std::ptr::null_mut(), 0);
        let (mut peer, mut peer_len): (*mut SOCKADDR, i32) = (std::ptr::null_mut(), 0);
        let room = ADDRESS_ROOM as u32;
        // SAFETY: the addresses are where an accept of the same lengths wrote them; the function writes
        // pointers into them (invariant 5).
        unsafe {
            parse(
                addresses.as_ptr().cast(),
                0,
                room,
                room,
                &raw mut local,
                &raw mut local_len,
                &raw mut peer,
                &raw mut peer_len,
            );
        }
        let len = usize::try_from(peer_len).ok()?.min(size_of::<SOCKADDR_IN6>());
        if peer.is_null() {
            return None;
        }
        let mut raw = RawAddress::UNSPECIFIED;
        let into: *mut u8 = raw.as_mut_ptr().cast();
        // SAFETY: the function found an address of that length among `addresses`, and a `RawAddress` has
        // room for the longest (invariant 5).
        unsafe { std::ptr::copy_nonoverlapping(peer.cast(), into, len) };
        raw.to_std()
    }
}

/// A function pointer, as `F` (one of the `LPFN_` types, an `Option` of a function).
fn function<F: Default>(socket: &OwnedSocket, id: &GUID) -> io::Result<F> {
    let mut found = F::default();
    let mut written = 0;
    let id: *const GUID = id;
    // SAFETY: identifier and pointer outlive the call, which is not overlapped and writes one pointer, or
    // fails (invariant 5).
    let result = unsafe {
        WSAIoctl(
            socket.as_raw_socket() as SOCKET,
            SIO_GET_EXTENSION_FUNCTION_POINTER,
            id.cast(),
            size_of::<GUID>() as u32,
            (&raw mut found).cast(),
            size_of::<F>() as u32,
            &raw mut written,
            std::ptr::null_mut(),
            None,
        )
    };
    if result == SOCKET_ERROR { Err(error::io(error::last())) } else { Ok(found) }
}

/// Whether the provider's sockets are handles of the file system.
fn is_ifs(socket: &OwnedSocket) -> bool {
    let mut info = WSAPROTOCOL_INFOW::default();
    let mut len = size_of::<WSAPROTOCOL_INFOW>() as i32;
    let (socket, pointer) = (socket.as_raw_socket() as SOCKET, &raw mut info);
    // SAFETY: `info` and `len` outlive the call, which writes at most `len` bytes (invariant 5).
    let result = unsafe { getsockopt(socket, SOL_SOCKET, SO_PROTOCOL_INFOW, pointer.cast(), &raw mut len) };
    result == 0 && info.dwServiceFlags1 & XP1_IFS_HANDLES != 0
}
