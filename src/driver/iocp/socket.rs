//! The system calls on a connection's socket, each a function of its own.
//!
//! Those that start an operation take its object, which was made ready by [`Op::begin`]; they hand the kernel
//! a pointer to it, which is why objects keep their place (invariant 8).

use std::io;
use std::os::windows::io::RawSocket;

use windows_sys::Win32::Foundation::{ERROR_IO_PENDING, HANDLE};
use windows_sys::Win32::Networking::WinSock::{
    self, FIONBIO, LINGER, MSG_PEEK, SO_LINGER, SO_UPDATE_ACCEPT_CONTEXT, SO_UPDATE_CONNECT_CONTEXT, SOCKET,
    SOCKET_ERROR, SOL_SOCKET, WSABUF,
};
use windows_sys::Win32::Storage::FileSystem::SetFileCompletionNotificationModes;
use windows_sys::Win32::System::IO::CancelIoEx;
use windows_sys::Win32::System::WindowsProgramming::{
    FILE_SKIP_COMPLETION_PORT_ON_SUCCESS, FILE_SKIP_SET_EVENT_ON_HANDLE,
};

use crate::buffer::{Chain, Chunks};
use crate::driver::{SEND_BATCH, Socket, sys};

use super::error;
use super::op::Op;

/// What came of starting an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Started {
    /// The object is with the kernel until its packet comes.
    Pending,
    /// It is done, with so many bytes, and brings no packet.
    Done(u32),
    /// It failed with this error number, and brings no packet.
    Failed(i32),
}

impl Started {
    /// From what the call said, directly after it. `skip`: immediate successes bring no packet.
    #[inline]
    pub(super) fn of(succeeded: bool, bytes: u32, skip: bool) -> Self {
        if succeeded {
            return if skip { Self::Done(bytes) } else { Self::Pending };
        }
        match error::last() {
            number if number == ERROR_IO_PENDING as i32 => Self::Pending,
            number => Self::Failed(number),
        }
    }
}

fn check(result: i32) -> Result<(), i32> {
    if result == SOCKET_ERROR { Err(error::last()) } else { Ok(()) }
}

fn set<T>(socket: SOCKET, name: i32, value: &T) -> Result<(), i32> {
    let pointer: *const T = value;
    // SAFETY: `value` outlives the call and is as long as is said (invariant 5).
    check(unsafe { WinSock::setsockopt(socket, SOL_SOCKET, name, pointer.cast(), size_of::<T>() as i32) })
}

impl Socket {
    /// For the worker. A handle has 32 significant bits also where it is stored in 64, so that it can be
    /// handed between programs of both kinds.
    pub(super) fn from_handle(socket: SOCKET) -> Self {
        Self(socket as u32 as i32)
    }

    pub(super) fn handle(&self) -> SOCKET {
        self.0 as isize as SOCKET
    }
}

/// Makes the synchronous calls return at once where they would wait. Overlapped ones never wait.
pub(super) fn set_nonblocking(socket: SOCKET) -> Result<(), i32> {
    let mut on = 1;
    // SAFETY: `on` outlives the call, which reads it (invariant 5).
    check(unsafe { WinSock::ioctlsocket(socket, FIONBIO, &raw mut on) })
}

/// From now on operations that succeed at once bring no packet (those that fail at once never do).
pub(super) fn skip_packets_of_successes(socket: SOCKET) -> io::Result<()> {
    let modes = (FILE_SKIP_COMPLETION_PORT_ON_SUCCESS | FILE_SKIP_SET_EVENT_ON_HANDLE) as u8;
    // SAFETY: takes no pointer (invariant 5).
    let result = unsafe { SetFileCompletionNotificationModes(socket as HANDLE, modes) };
    if result == 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Starts a receive of no bytes: it ends when there is something to receive, be it data, the end of it, or
/// an error.
#[inline]
pub(super) fn wait_readable(socket: SOCKET, op: &Op, skip: bool) -> Started {
    let buffer = WSABUF { len: 0, buf: std::ptr::NonNull::dangling().as_ptr() };
    let (mut received, mut flags) = (0, 0);
    // SAFETY: the vector is read within the call and names no bytes; the object keeps its place until the
    // packet was taken (invariants 5, 8).
    let result = unsafe {
        WinSock::WSARecv(
            socket,
            &raw const buffer,
            1,
            &raw mut received,
            &raw mut flags,
            op.overlapped(),
            None,
        )
    };
    Started::of(result == 0, 0, skip)
}

/// Receives what is there; 0 is the end of it.
#[inline]
pub(super) fn receive(socket: SOCKET, room: &mut [u8]) -> Result<usize, i32> {
    received(socket, room, 0)
}

/// Whether there is data (1) or the end of it (0), leaving it there.
pub(super) fn peek(socket: SOCKET) -> Result<usize, i32> {
    received(socket, &mut [0], MSG_PEEK)
}

#[inline]
fn received(socket: SOCKET, room: &mut [u8], flags: i32) -> Result<usize, i32> {
    let len = i32::try_from(room.len()).unwrap_or(i32::MAX);
    // SAFETY: there is room for `len` bytes, which are written within the call: it is not overlapped
    // (invariant 5).
    let result = unsafe { WinSock::recv(socket, room.as_mut_ptr(), len, flags) };
    usize::try_from(result).map_err(|_| error::last())
}

/// Whether a connection whose peer has ended the stream, and this side has not, is gone altogether.
///
/// For Wine only: its server takes the error of a reset off the socket when it comes, and the next receive
/// finds nothing but the end. The system below knows no peer any more then; after a plain FIN it does.
pub(super) fn is_gone(socket: SOCKET) -> bool {
    sys::peer_address(socket as RawSocket).is_err()
}

/// Most bytes that one send is given: their number has 32 bits where it comes back.
const MOST: u64 = 1 << 30;

/// Starts sending a chain. The vectors are read within the call; the bytes must stay until the packet.
#[inline]
pub(super) fn send(socket: SOCKET, chunks: &Chunks, chain: &Chain, op: &Op, skip: bool) -> Started {
    if let Some((bytes, len)) = chunks.only(chain) {
        return send_parts(socket, &[vector(bytes, len.min(MOST as usize))], op, skip);
    }
    let mut vectors = [vector(std::ptr::null(), 0); SEND_BATCH];
    let (mut count, mut room) = (0, MOST);
    chunks.for_each(chain, |bytes| {
        let len = bytes.len().min(room as usize);
        if len > 0 && count < SEND_BATCH {
            vectors[count] = vector(bytes.as_ptr(), len);
            count += 1;
            // Nothing may follow a part that was cut off.
            room = if len < bytes.len() { 0 } else { room - len as u64 };
        }
    });
    send_parts(socket, &vectors[..count.max(1)], op, skip)
}

fn vector(bytes: *const u8, len: usize) -> WSABUF {
    // The kernel only reads; the type serves receiving too.
    WSABUF { len: len as u32, buf: bytes.cast_mut() }
}

#[inline]
fn send_parts(socket: SOCKET, vectors: &[WSABUF], op: &Op, skip: bool) -> Started {
    let (mut sent, count) = (0, vectors.len() as u32);
    // SAFETY: the vectors are read within the call; what they name is owned by the chain, which the driver
    // keeps until the packet was taken, and the object keeps its place until then (invariants 3, 8).
    let result =
        unsafe { WinSock::WSASend(socket, vectors.as_ptr(), count, &raw mut sent, 0, op.overlapped(), None) };
    Started::of(result == 0, sent, skip)
}

/// Asks the kernel to end an operation. Its packet comes in any case: that the kernel finds nothing to cancel
/// (`ERROR_NOT_FOUND`) means that the packet is on its way already.
pub(super) fn cancel(socket: SOCKET, op: &Op) {
    // SAFETY: the kernel compares the pointer with those of its operations (invariant 5).
    unsafe { CancelIoEx(socket as HANDLE, op.overlapped()) };
}

/// Gives an accepted socket the state and the name of one.
pub(super) fn finish_accept(socket: SOCKET, listener: SOCKET) -> Result<(), i32> {
    set(socket, SO_UPDATE_ACCEPT_CONTEXT, &listener)
}

/// Likewise for a connected one.
pub(super) fn finish_connect(socket: SOCKET) -> Result<(), i32> {
    // SAFETY: the option takes no value (invariant 5).
    check(unsafe { WinSock::setsockopt(socket, SOL_SOCKET, SO_UPDATE_CONNECT_CONTEXT, std::ptr::null(), 0) })
}

/// Makes the close a reset.
pub(super) fn reset_on_close(socket: SOCKET) {
    // An error means that the connection is gone, so that there is nobody to tell.
    let _ = set(socket, SO_LINGER, &LINGER { l_onoff: 1, l_linger: 0 });
}

/// Closes a socket: at once, because no socket here lingers for a time.
pub(super) fn close(socket: SOCKET) {
    // SAFETY: takes no pointer; the driver owns the socket and forgets it with this call (invariant 5).
    // An error would mean that there is no such socket.
    unsafe { WinSock::closesocket(socket) };
}
