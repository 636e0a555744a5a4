//! TCP sockets before and besides the completion port.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::windows::io::{AsRawSocket, FromRawSocket, OwnedSocket, RawSocket};
use std::sync::OnceLock;
use std::time::Duration;

use windows_sys::Win32::Networking::WinSock::{
    self, AF_INET, AF_INET6, INVALID_SOCKET, IPPROTO_IPV6, IPPROTO_TCP, IPV6_V6ONLY, LINGER, SD_SEND,
    SIO_KEEPALIVE_VALS, SO_EXCLUSIVEADDRUSE, SO_KEEPALIVE, SO_LINGER, SO_RCVBUF, SO_SNDBUF, SOCK_STREAM,
    SOCKET, SOL_SOCKET, TCP_KEEPCNT, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_MAXRT, TCP_NODELAY,
    WSA_FLAG_NO_HANDLE_INHERIT, WSA_FLAG_OVERLAPPED, WSADATA, WSAENOPROTOOPT, WSAEOPNOTSUPP, tcp_keepalive,
};

use crate::config::{ConnectConfig, Keepalive, ListenerConfig, SocketOptions};

use super::{RawAddress, check, socket_error};

/// The largest backlog for which `listen` takes the number as it is; for more it wants the negative one
/// (`SOMAXCONN_HINT`), and clamps that to 65,535.
const PLAIN_BACKLOG: u32 = 200;
const MOST_BACKLOG: u32 = 65_535;

/// Winsock has to be started before its first call, once per process. It is never stopped: std, which does
/// the same for itself, counts separately.
pub(super) fn start_winsock() -> io::Result<()> {
    static STARTED: OnceLock<i32> = OnceLock::new();
    let result = *STARTED.get_or_init(|| {
        let mut data = WSADATA::default();
        // SAFETY: `data` outlives the call, which writes one `WSADATA` (invariant 5).
        unsafe { WinSock::WSAStartup(0x0202, &raw mut data) }
    });
    if result == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(result)) }
}

/// A TCP socket for overlapped operations that child processes do not inherit.
fn open(ipv6: bool) -> io::Result<OwnedSocket> {
    start_winsock()?;
    let family = i32::from(if ipv6 { AF_INET6 } else { AF_INET });
    let flags = WSA_FLAG_OVERLAPPED | WSA_FLAG_NO_HANDLE_INHERIT;
    // SAFETY: no protocol description is given (invariant 5).
    let socket = unsafe { WinSock::WSASocketW(family, SOCK_STREAM, IPPROTO_TCP, std::ptr::null(), 0, flags) };
    if socket == INVALID_SOCKET {
        return Err(socket_error());
    }
    // SAFETY: the socket is new and nobody else's (invariant 5).
    Ok(unsafe { OwnedSocket::from_raw_socket(socket as RawSocket) })
}

fn set<T>(socket: SOCKET, level: i32, name: i32, value: &T) -> io::Result<()> {
    let pointer: *const T = value;
    // SAFETY: `value` outlives the call and is as long as is said (invariant 5).
    check(unsafe { WinSock::setsockopt(socket, level, name, pointer.cast(), size_of::<T>() as i32) })
}

pub(super) fn set_int(socket: SOCKET, level: i32, name: i32, value: u32) -> io::Result<()> {
    set(socket, level, name, &i32::try_from(value).unwrap_or(i32::MAX))
}

/// Whole seconds, rounded up, at least one.
fn seconds(duration: Duration) -> u32 {
    let whole = duration.as_secs() + u64::from(duration.subsec_nanos() > 0);
    u32::try_from(whole.max(1)).unwrap_or(u32::MAX)
}

/// Whether the system does not know an option.
fn is_unknown(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(WSAENOPROTOOPT | WSAEOPNOTSUPP))
}

/// Keepalive with its times. Before Windows 10 1709 (and under Wine) there is one call for both times, and
/// the number of probes is the system's, 10.
fn set_keepalive(socket: SOCKET, keepalive: Keepalive) -> io::Result<()> {
    let (idle, interval) = (seconds(keepalive.idle), seconds(keepalive.interval));
    match set_int(socket, IPPROTO_TCP, TCP_KEEPIDLE, idle) {
        Ok(()) => {
            set_int(socket, IPPROTO_TCP, TCP_KEEPINTVL, interval)?;
            set_int(socket, IPPROTO_TCP, TCP_KEEPCNT, keepalive.count)?;
            return set_int(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
        }
        Err(error) if is_unknown(&error) => {}
        Err(error) => return Err(error),
    }
    let values = tcp_keepalive {
        onoff: 1,
        keepalivetime: idle.saturating_mul(1000),
        keepaliveinterval: interval.saturating_mul(1000),
    };
    let (pointer, mut written) = (&raw const values, 0u32);
    // SAFETY: `values` and `written` outlive the call, which is not overlapped and writes nothing else
    // (invariant 5).
    check(unsafe {
        WinSock::WSAIoctl(
            socket,
            SIO_KEEPALIVE_VALS,
            pointer.cast(),
            size_of::<tcp_keepalive>() as u32,
            std::ptr::null_mut(),
            0,
            &raw mut written,
            std::ptr::null_mut(),
            None,
        )
    })
}

/// Sets the options of a socket that is open. Accepted sockets need it too: what they inherit by
/// `SO_UPDATE_ACCEPT_CONTEXT` is not documented for each option.
///
/// # Errors
/// What the system says. `Unsupported` for [`SocketOptions::user_timeout`] where the system has none: who
/// asks for a limit must not be left without it unawares.
pub(crate) fn set_options(socket: RawSocket, options: &SocketOptions) -> io::Result<()> {
    let socket = socket as SOCKET;
    if options.nodelay {
        set_int(socket, IPPROTO_TCP, TCP_NODELAY, 1)?;
    }
    if let Some(keepalive) = options.keepalive {
        set_keepalive(socket, keepalive)?;
    }
    if let Some(timeout) = options.user_timeout {
        set_int(socket, IPPROTO_TCP, TCP_MAXRT, seconds(timeout)).map_err(|error| {
            if !is_unknown(&error) {
                return error;
            }
            let text =
                format!("user_timeout needs the socket option TCP_MAXRT, which this system lacks ({error})");
            io::Error::new(io::ErrorKind::Unsupported, text)
        })?;
    }
    if let Some(bytes) = options.recv_buffer {
        set_int(socket, SOL_SOCKET, SO_RCVBUF, bytes)?;
    }
    if let Some(bytes) = options.send_buffer {
        set_int(socket, SOL_SOCKET, SO_SNDBUF, bytes)?;
    }
    if let Some(linger) = options.linger {
        let seconds = u16::try_from(linger.as_secs()).unwrap_or(u16::MAX);
        set(socket, SOL_SOCKET, SO_LINGER, &LINGER { l_onoff: 1, l_linger: seconds })?;
    }
    Ok(())
}

pub(super) fn bind(socket: &OwnedSocket, address: SocketAddr) -> io::Result<()> {
    let address = RawAddress::from(address);
    // SAFETY: `address` outlives the call and knows its length (invariant 5).
    check(unsafe { WinSock::bind(socket.as_raw_socket() as SOCKET, address.as_ptr(), address.len()) })
}

/// A bound, listening socket with its options set.
///
/// The address is the socket's alone (`SO_EXCLUSIVEADDRUSE`): `SO_REUSEADDR` would let any process of the
/// user take the port over, and is not needed to listen again after a restart. `reuse_port` has no meaning
/// here: Windows does not spread connections over several listeners.
pub(crate) fn listener(config: &ListenerConfig, _reuse_port: bool) -> io::Result<TcpListener> {
    let socket = open(config.addr.is_ipv6())?;
    set_int(socket.as_raw_socket() as SOCKET, SOL_SOCKET, SO_EXCLUSIVEADDRUSE, 1)?;
    if config.addr.is_ipv6() {
        set_int(socket.as_raw_socket() as SOCKET, IPPROTO_IPV6, IPV6_V6ONLY, u32::from(!config.dual_stack))?;
    }
    set_options(socket.as_raw_socket(), &config.options)?;
    bind(&socket, config.addr)?;
    let backlog = config.backlog.min(MOST_BACKLOG) as i32;
    let backlog = if config.backlog > PLAIN_BACKLOG { -backlog } else { backlog };
    // SAFETY: takes no pointer (invariant 5).
    check(unsafe { WinSock::listen(socket.as_raw_socket() as SOCKET, backlog) })?;
    Ok(TcpListener::from(socket))
}

/// The effective backlog of a listening socket: Windows does not tell.
pub(crate) fn accept_queue_limit(_: &TcpListener) -> Option<u32> {
    None
}

/// A socket to accept a connection into, of the listener's family; its options are set when it is accepted.
pub(crate) fn accept_socket(ipv6: bool) -> io::Result<OwnedSocket> {
    open(ipv6)
}

/// A socket for an outgoing connection, with its options set, and bound, as `ConnectEx` wants it: to the
/// source address or to any.
pub(crate) fn client(config: &ConnectConfig) -> io::Result<OwnedSocket> {
    let socket = open(config.target.is_ipv6())?;
    set_options(socket.as_raw_socket(), &config.options)?;
    let any = match config.target {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    bind(&socket, config.source.unwrap_or(any))?;
    Ok(socket)
}

/// The peer's address of a connected socket; of an accepted one after `SO_UPDATE_ACCEPT_CONTEXT`.
pub(crate) fn peer_address(socket: RawSocket) -> io::Result<SocketAddr> {
    let mut address = RawAddress::UNSPECIFIED;
    let (pointer, len) = (address.as_mut_ptr(), address.len_mut());
    // SAFETY: address and length outlive the call (invariant 5).
    check(unsafe { WinSock::getpeername(socket as SOCKET, pointer, len) })?;
    address.to_std().ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))
}

/// The address that a socket is bound to.
pub(crate) fn local_address(socket: RawSocket) -> io::Result<SocketAddr> {
    let mut address = RawAddress::UNSPECIFIED;
    let (pointer, len) = (address.as_mut_ptr(), address.len_mut());
    // SAFETY: address and length outlive the call (invariant 5).
    check(unsafe { WinSock::getsockname(socket as SOCKET, pointer, len) })?;
    address.to_std().ok_or_else(|| io::Error::from(io::ErrorKind::Unsupported))
}

/// Sets the options of an open socket that are given, and `nodelay` either way.
///
/// # Errors
/// `InvalidInput` for an option out of its range, before anything is set; as [`set_options`], with those before
/// it set.
pub(crate) fn set_options_of_open(socket: RawSocket, options: &SocketOptions) -> io::Result<()> {
    options.check().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error.to_string()))?;
    if !options.nodelay {
        set_int(socket as SOCKET, IPPROTO_TCP, TCP_NODELAY, 0)?;
    }
    set_options(socket, options)
}

/// Sends FIN.
pub(crate) fn shutdown_write(socket: RawSocket) -> io::Result<()> {
    // SAFETY: takes no pointer (invariant 5).
    check(unsafe { WinSock::shutdown(socket as SOCKET, SD_SEND) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpStream;

    fn any_port() -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, 0))
    }

    fn get_int(socket: RawSocket, level: i32, name: i32) -> i32 {
        // Some systems write fewer bytes than asked for.
        let mut value = 0i32;
        let mut len = size_of::<i32>() as i32;
        let pointer = &raw mut value;
        // SAFETY: value and length outlive the call (invariant 5).
        let result =
            unsafe { WinSock::getsockopt(socket as SOCKET, level, name, pointer.cast(), &raw mut len) };
        check(result).expect("getsockopt");
        value
    }

    fn linger(socket: RawSocket) -> (u16, u16) {
        let mut value = LINGER::default();
        let mut len = size_of::<LINGER>() as i32;
        let pointer = &raw mut value;
        // SAFETY: value and length outlive the call (invariant 5).
        let result = unsafe {
            WinSock::getsockopt(socket as SOCKET, SOL_SOCKET, SO_LINGER, pointer.cast(), &raw mut len)
        };
        check(result).expect("getsockopt");
        (value.l_onoff, value.l_linger)
    }

    #[test]
    fn options_are_set_and_what_the_system_lacks_is_an_error_that_says_so() {
        let options = SocketOptions {
            nodelay: true,
            keepalive: Some(Keepalive {
                idle: Duration::from_secs(30),
                interval: Duration::from_millis(1500),
                count: 4,
            }),
            recv_buffer: Some(50_000),
            send_buffer: Some(60_000),
            linger: Some(Duration::ZERO),
            ..SocketOptions::default()
        };
        let socket = accept_socket(false).expect("a socket");
        let socket = socket.as_raw_socket();
        assert_eq!(get_int(socket, IPPROTO_TCP, TCP_NODELAY), 0);
        set_options(socket, &options).expect("all of them");
        assert_ne!(get_int(socket, IPPROTO_TCP, TCP_NODELAY), 0);
        assert_ne!(get_int(socket, SOL_SOCKET, SO_KEEPALIVE), 0);
        assert!(get_int(socket, SOL_SOCKET, SO_RCVBUF) >= 50_000);
        assert!(get_int(socket, SOL_SOCKET, SO_SNDBUF) >= 60_000);
        assert_eq!(linger(socket), (1, 0));
        let limited =
            SocketOptions { user_timeout: Some(Duration::from_millis(1)), ..SocketOptions::default() };
        match set_options(socket, &limited) {
            Ok(()) => assert_eq!(get_int(socket, IPPROTO_TCP, TCP_MAXRT), 1),
            Err(error) => {
                assert_eq!(error.kind(), io::ErrorKind::Unsupported, "{error}");
                assert!(error.to_string().contains("user_timeout needs"), "{error}");
            }
        }
    }

    #[test]
    fn a_listening_address_is_not_shared_and_is_free_again_after_its_last_connection() {
        for backlog in [1, 4096, u32::MAX] {
            let first = listener(&ListenerConfig { backlog, ..any_port().into() }, false).expect("listens");
            let config = ListenerConfig::new(first.local_addr().expect("an address"));
            let error = listener(&config, true).expect_err("taken");
            let kinds = [io::ErrorKind::AddrInUse, io::ErrorKind::PermissionDenied];
            assert!(kinds.contains(&error.kind()), "{error}");
            let mut there = TcpStream::connect(config.addr).expect("connects");
            let (mut here, _) = first.accept().expect("accepts");
            there.write_all(b"hello").expect("writes");
            let mut data = [0; 5];
            here.read_exact(&mut data).expect("reads");
            // Closed here first: the connection stays behind in TIME_WAIT.
            drop((here, first));
            assert_eq!(there.read(&mut data).expect("the end"), 0);
            drop(there);
            drop(listener(&config, false).expect("listens again"));
        }
    }

    #[test]
    fn an_ipv6_listener_takes_ipv4_only_if_it_should() {
        for dual_stack in [true, false] {
            let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
            let listener = listener(&ListenerConfig { dual_stack, ..any.into() }, false).expect("listens");
            let port = listener.local_addr().expect("an address").port();
            TcpStream::connect((Ipv6Addr::LOCALHOST, port)).expect("connects");
            let mapped = TcpStream::connect((Ipv4Addr::LOCALHOST, port));
            assert_eq!(mapped.is_ok(), dual_stack, "{mapped:?}");
        }
    }

    #[test]
    fn a_client_is_bound_to_its_source_and_knows_its_peer() {
        let server = listener(&any_port().into(), false).expect("listens");
        let target = server.local_addr().expect("an address");
        let mut config = ConnectConfig::new(target);
        let bound = TcpStream::from(client(&config).expect("a socket"));
        assert_ne!(bound.local_addr().expect("bound").port(), 0);
        config.source = Some(SocketAddr::from(([127, 0, 0, 9], 0)));
        let bound = TcpStream::from(client(&config).expect("a socket"));
        assert_eq!(bound.local_addr().expect("bound").ip(), Ipv4Addr::new(127, 0, 0, 9));
        peer_address(bound.as_raw_socket()).expect_err("not connected");
        config.source = Some(SocketAddr::from(([192, 0, 2, 77], 0)));
        let error = client(&config).expect_err("no such interface");
        assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable);
        let there = TcpStream::connect(target).expect("connects");
        assert_eq!(peer_address(there.as_raw_socket()).expect("connected"), target);
        let (mut here, _) = server.accept().expect("accepts");
        shutdown_write(there.as_raw_socket()).expect("connected");
        assert_eq!(here.read(&mut [0]).expect("the end"), 0);
    }
}
