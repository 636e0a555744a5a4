//! What the kernel's statuses mean as error numbers of Winsock.
//!
//! A packet carries an `NTSTATUS`. `RtlNtStatusToDosError` makes Win32 codes of them, several of which say
//! less than the status did, and none of which [`std::io::ErrorKind`] knows: both tables here lead to the
//! numbers that Winsock's own synchronous calls give. In particular `ERROR_NETNAME_DELETED` is a **reset**,
//! and never an end of the stream.

use std::io;

use windows_sys::Win32::Foundation::{
    ERROR_BAD_NETPATH, ERROR_CONNECTION_ABORTED, ERROR_CONNECTION_INVALID, ERROR_CONNECTION_REFUSED,
    ERROR_DUP_NAME, ERROR_HOST_UNREACHABLE, ERROR_INVALID_HANDLE, ERROR_NETNAME_DELETED,
    ERROR_NETWORK_UNREACHABLE, ERROR_NO_SYSTEM_RESOURCES, ERROR_OPERATION_ABORTED, ERROR_PORT_UNREACHABLE,
    ERROR_SEM_TIMEOUT, NTSTATUS, RtlNtStatusToDosError, STATUS_ADDRESS_ALREADY_EXISTS,
    STATUS_BUFFER_OVERFLOW, STATUS_CANCELLED, STATUS_CONNECTION_ABORTED, STATUS_CONNECTION_DISCONNECTED,
    STATUS_CONNECTION_REFUSED, STATUS_CONNECTION_RESET, STATUS_HOST_UNREACHABLE,
    STATUS_INSUFFICIENT_RESOURCES, STATUS_INVALID_CONNECTION, STATUS_IO_TIMEOUT, STATUS_LOCAL_DISCONNECT,
    STATUS_NETWORK_UNREACHABLE, STATUS_PORT_UNREACHABLE, STATUS_REMOTE_DISCONNECT, STATUS_TOO_MANY_ADDRESSES,
    WIN32_ERROR,
};
use windows_sys::Win32::Networking::WinSock::{
    self, WSAEADDRINUSE, WSAECONNABORTED, WSAECONNREFUSED, WSAECONNRESET, WSAEHOSTUNREACH, WSAEMSGSIZE,
    WSAENETRESET, WSAENETUNREACH, WSAENOBUFS, WSAENOTCONN, WSAENOTSOCK, WSAEOPNOTSUPP, WSAETIMEDOUT,
};

/// An operation that was cancelled.
pub(super) const CANCELLED: i32 = ERROR_OPERATION_ABORTED as i32;

/// The peer aborted the connection.
pub(super) const RESET: i32 = WSAECONNRESET;

/// What there is no function for.
pub(super) const UNSUPPORTED: i32 = WSAEOPNOTSUPP;

/// A listener that is closed.
pub(super) const BAD_SOCKET: i32 = WSAENOTSOCK;

/// More at a time than there are objects for.
pub(super) const NO_ROOM: i32 = WSAENOBUFS;

/// `STATUS_HANDLES_CLOSED`: with it Wine ends the operations of a socket that is closed.
const STATUS_HANDLES_CLOSED: NTSTATUS = 0x8000_000A_u32 as i32;

/// The error number of a packet's status; `None` when it tells of success (or of no error at least).
pub(super) fn of_status(status: NTSTATUS) -> Option<i32> {
    let number = match status {
        STATUS_CANCELLED | STATUS_HANDLES_CLOSED => CANCELLED,
        _ if status >= 0 => return None,
        STATUS_CONNECTION_RESET
        | STATUS_LOCAL_DISCONNECT
        | STATUS_REMOTE_DISCONNECT
        | STATUS_CONNECTION_DISCONNECTED
        | STATUS_PORT_UNREACHABLE => WSAECONNRESET,
        STATUS_CONNECTION_ABORTED => WSAECONNABORTED,
        STATUS_CONNECTION_REFUSED => WSAECONNREFUSED,
        STATUS_BUFFER_OVERFLOW => WSAEMSGSIZE,
        STATUS_IO_TIMEOUT => WSAETIMEDOUT,
        STATUS_NETWORK_UNREACHABLE => WSAENETUNREACH,
        STATUS_HOST_UNREACHABLE => WSAEHOSTUNREACH,
        STATUS_INSUFFICIENT_RESOURCES => WSAENOBUFS,
        STATUS_ADDRESS_ALREADY_EXISTS | STATUS_TOO_MANY_ADDRESSES => WSAEADDRINUSE,
        STATUS_INVALID_CONNECTION => WSAENOTCONN,
        // SAFETY: takes no pointer (invariant 5).
        _ => of_win32(unsafe { RtlNtStatusToDosError(status) }),
    };
    Some(number)
}

/// The error number of Winsock for a Win32 code; others, Winsock's own among them, as they are.
pub(super) fn of_win32(code: WIN32_ERROR) -> i32 {
    match code {
        ERROR_NETNAME_DELETED | ERROR_PORT_UNREACHABLE => WSAECONNRESET,
        ERROR_CONNECTION_REFUSED => WSAECONNREFUSED,
        ERROR_CONNECTION_ABORTED => WSAECONNABORTED,
        ERROR_SEM_TIMEOUT => WSAETIMEDOUT,
        ERROR_NETWORK_UNREACHABLE => WSAENETUNREACH,
        ERROR_HOST_UNREACHABLE | ERROR_BAD_NETPATH => WSAEHOSTUNREACH,
        ERROR_NO_SYSTEM_RESOURCES => WSAENOBUFS,
        ERROR_CONNECTION_INVALID => WSAENOTCONN,
        ERROR_DUP_NAME => WSAEADDRINUSE,
        ERROR_INVALID_HANDLE => WSAENOTSOCK,
        code => code as i32,
    }
}

/// The calling thread's last error of Winsock, by its number.
pub(super) fn last() -> i32 {
    // SAFETY: takes no pointer (invariant 5).
    of_win32(unsafe { WinSock::WSAGetLastError() } as WIN32_ERROR)
}

/// For an event.
pub(super) fn io(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

/// Whether a connection is over with this error.
pub(super) fn ends_connections(number: i32) -> bool {
    matches!(number, WSAECONNRESET | WSAECONNABORTED | WSAENETRESET | WSAETIMEDOUT)
}

/// Why an accept failed: a peer that is gone before it was accepted concerns nobody but itself.
pub(super) fn of_accept(number: i32) -> i32 {
    match number {
        WSAECONNRESET | WSAENOTCONN => WSAECONNABORTED,
        number => number,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::ErrorKind;

    #[test]
    fn every_status_that_a_socket_ends_with_has_the_number_that_winsock_gives_it() {
        let table: [(u32, i32); 17] = [
            // A reset, in all its names.
            (0xC000_020D, 10054),
            (0xC000_013B, 10054),
            (0xC000_013C, 10054),
            (0xC000_020C, 10054),
            // STATUS_NETWORK_NAME_DELETED, by way of ERROR_NETNAME_DELETED.
            (0xC000_00C9, 10054),
            // A cancel, in all its names.
            (0xC000_0120, 995),
            (0x8000_000A, 995),
            // A datagram that is longer than the buffer.
            (0x8000_0005, 10040),
            (0xC000_0241, 10053),
            (0xC000_0236, 10061),
            (0xC000_00B5, 10060),
            (0xC000_023C, 10051),
            (0xC000_023D, 10065),
            (0xC000_009A, 10055),
            (0xC000_0140, 10057),
            (0xC000_020A, 10048),
            // STATUS_INVALID_HANDLE.
            (0xC000_0008, 10038),
        ];
        for (status, number) in table {
            assert_eq!(of_status(status as i32), Some(number), "{status:#x}");
        }
        for status in [0, 0x103, 0x0000_0102, 0x4000_0000] {
            assert_eq!(of_status(status), None, "{status:#x}");
        }
    }

    #[test]
    fn win32_codes_become_numbers_whose_kind_std_knows() {
        let table = [
            (64, 10054, ErrorKind::ConnectionReset),
            (1234, 10054, ErrorKind::ConnectionReset),
            (1225, 10061, ErrorKind::ConnectionRefused),
            (1236, 10053, ErrorKind::ConnectionAborted),
            (121, 10060, ErrorKind::TimedOut),
            (1231, 10051, ErrorKind::NetworkUnreachable),
            (1232, 10065, ErrorKind::HostUnreachable),
            (10054, 10054, ErrorKind::ConnectionReset),
        ];
        for (code, number, kind) in table {
            assert_eq!((of_win32(code), io(of_win32(code)).kind()), (number, kind), "{code}");
        }
        assert_eq!(of_win32(ERROR_OPERATION_ABORTED), CANCELLED);
        assert_eq!(of_win32(5), 5, "what no table knows stays what it was");
    }

    #[test]
    fn a_peer_that_did_not_wait_to_be_accepted_is_no_failure_of_the_listener() {
        for number in [10053, 10054, 10057] {
            assert_eq!(io(of_accept(number)).kind(), ErrorKind::ConnectionAborted, "{number}");
        }
        assert_eq!(of_accept(10055), 10055);
    }
}
