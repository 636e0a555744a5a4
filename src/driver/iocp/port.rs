//! The completion port: where packets are waited for and posted.

use std::io;
use std::os::windows::io::{AsRawHandle, FromRawHandle, OwnedHandle};
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use windows_sys::Win32::Foundation::{HANDLE, INVALID_HANDLE_VALUE, WAIT_TIMEOUT};
use windows_sys::Win32::Networking::WinSock::SOCKET;
use windows_sys::Win32::System::IO::{
    CreateIoCompletionPort, GetQueuedCompletionStatusEx, OVERLAPPED, OVERLAPPED_ENTRY,
    PostQueuedCompletionStatus,
};
use windows_sys::Win32::System::Threading::INFINITE;

/// The completion key of operations: the packet's `OVERLAPPED` is the beginning of an
/// [`Op`](super::op::Op).
pub(super) const OP: usize = 0;
/// The completion key of a wake-up.
pub(super) const WAKE: usize = 1;
/// The completion key that ends the thread that waits.
pub(super) const QUIT: usize = 2;

/// One completion port. It lives as long as anybody who may post to it.
pub(super) struct Port {
    handle: OwnedHandle,
    /// A wake-up was posted and not taken yet: another one would say nothing new.
    pub(super) waking: AtomicBool,
}

impl Port {
    /// Makes a port that one thread waits on.
    ///
    /// # Errors
    /// What the system says when it has no memory for one.
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: takes no pointer; no handle is associated yet (invariant 5).
        let handle = unsafe { CreateIoCompletionPort(INVALID_HANDLE_VALUE, std::ptr::null_mut(), 0, 1) };
        if handle.is_null() {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the handle is new and nobody else's (invariant 5).
        let handle = unsafe { OwnedHandle::from_raw_handle(handle) };
        Ok(Self { handle, waking: AtomicBool::new(false) })
    }

    fn raw(&self) -> HANDLE {
        self.handle.as_raw_handle()
    }

    /// Has the packets of a socket's operations come to this port: once and for the socket's life.
    ///
    /// # Errors
    /// `ERROR_INVALID_PARAMETER` when it belongs to a port already.
    pub(super) fn associate(&self, socket: SOCKET) -> io::Result<()> {
        // SAFETY: takes no pointer (invariant 5).
        let port = unsafe { CreateIoCompletionPort(socket as HANDLE, self.raw(), OP, 0) };
        if port.is_null() { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Posts a packet. The system refuses only while it has no memory for one, and a packet that is not
    /// posted would be an operation that never ends: so it is tried again.
    pub(super) fn post(&self, bytes: u32, key: usize, overlapped: *mut OVERLAPPED) {
        loop {
            // SAFETY: the pointer is handed through, nobody looks at what it points to (invariant 5).
            let posted = unsafe { PostQueuedCompletionStatus(self.raw(), bytes, key, overlapped) };
            if posted != 0 {
                return;
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Takes packets, as many as there is room for, and waits for the first one; returns their number, which
    /// is 0 when `timeout` has passed (`None`: never).
    ///
    /// # Errors
    /// What the system says; none is known for a port that is open.
    pub(super) fn wait(
        &self,
        entries: &mut [OVERLAPPED_ENTRY],
        timeout: Option<Duration>,
    ) -> io::Result<usize> {
        let mut taken = 0;
        let room = u32::try_from(entries.len()).unwrap_or(u32::MAX);
        let millis = millis(timeout);
        // SAFETY: there is room for as many entries as is said, and they and `taken` outlive the call
        // (invariant 5).
        let result = unsafe {
            GetQueuedCompletionStatusEx(self.raw(), entries.as_mut_ptr(), room, &raw mut taken, millis, 0)
        };
        if result != 0 {
            return Ok(taken as usize);
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() == Some(WAIT_TIMEOUT as i32) { Ok(0) } else { Err(error) }
    }
}

/// A timeout as the system takes it. Rounded up: cut off, the last part of a millisecond would be a wait of
/// none, again and again.
fn millis(timeout: Option<Duration>) -> u32 {
    let Some(timeout) = timeout else { return INFINITE };
    let millis = timeout.as_nanos().div_ceil(1_000_000);
    u32::try_from(millis).unwrap_or(INFINITE).min(INFINITE - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeout_is_never_cut_off_to_none() {
        assert_eq!(millis(None), INFINITE);
        assert_eq!(millis(Some(Duration::ZERO)), 0);
        assert_eq!(millis(Some(Duration::from_nanos(1))), 1);
        assert_eq!(millis(Some(Duration::from_micros(1001))), 2);
        assert_eq!(millis(Some(Duration::from_millis(5))), 5);
        assert_eq!(millis(Some(Duration::MAX)), INFINITE - 1);
    }

    #[test]
    fn packets_come_in_order_and_in_batches() {
        let port = Port::new().expect("a port");
        let mut entries = [OVERLAPPED_ENTRY::default(); 4];
        for number in 0..6 {
            port.post(number, QUIT, std::ptr::null_mut());
        }
        let mut numbers = Vec::new();
        for wanted in [4, 2, 0] {
            let taken = port.wait(&mut entries, Some(Duration::ZERO)).expect("a wait");
            assert_eq!(taken, wanted);
            numbers.extend(entries[..taken].iter().map(|entry| entry.dwNumberOfBytesTransferred));
        }
        assert_eq!(numbers, [0, 1, 2, 3, 4, 5]);
    }
}
