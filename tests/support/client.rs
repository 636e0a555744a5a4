//! Clients on blocking sockets of the standard library, none of which waits for ever.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

use super::{PATIENCE, same_bytes};

fn prepared(stream: TcpStream) -> TcpStream {
    stream.set_read_timeout(Some(PATIENCE)).expect("a read timeout");
    stream.set_write_timeout(Some(PATIENCE)).expect("a write timeout");
    stream.set_nodelay(true).expect("no delay");
    stream
}

/// A connection to a server that listens (it need not accept yet).
pub fn connect(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&addr, PATIENCE);
    prepared(stream.unwrap_or_else(|error| panic!("connect to {addr}: {error}")))
}

/// A connection whose receive buffer is `bytes`, so that a reader who does not read is felt soon.
pub fn connect_narrow(addr: SocketAddr, bytes: i32) -> TcpStream {
    let SocketAddr::V4(v4) = addr else { panic!("IPv4 only") };
    // SAFETY: takes no pointer.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0, "socket: {}", io::Error::last_os_error());
    // SAFETY: the descriptor is new and nobody else's.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    set_int(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, bytes);
    let raw = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: v4.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(*v4.ip()).to_be() },
        sin_zero: [0; 8],
    };
    let len = size_of_val(&raw) as libc::socklen_t;
    // SAFETY: `raw` outlives the call and is `len` bytes long.
    let result = unsafe { libc::connect(fd.as_raw_fd(), (&raw const raw).cast(), len) };
    assert_eq!(result, 0, "connect to {addr}: {}", io::Error::last_os_error());
    prepared(TcpStream::from(fd))
}

fn set_int(fd: RawFd, level: i32, name: i32, value: i32) {
    let len = size_of_val(&value) as libc::socklen_t;
    // SAFETY: `value` outlives the call and is `len` bytes long.
    let result = unsafe { libc::setsockopt(fd, level, name, (&raw const value).cast(), len) };
    assert_eq!(result, 0, "setsockopt: {}", io::Error::last_os_error());
}

/// An integer socket option.
pub fn get_int(fd: RawFd, level: i32, name: i32) -> i32 {
    let mut value = 0i32;
    let mut len = size_of_val(&value) as libc::socklen_t;
    // SAFETY: value and length outlive the call, which writes at most `len` bytes.
    let result = unsafe { libc::getsockopt(fd, level, name, (&raw mut value).cast(), &raw mut len) };
    assert_eq!(result, 0, "getsockopt: {}", io::Error::last_os_error());
    value
}

/// Closes with a reset instead of FIN.
pub fn reset(stream: TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let len = size_of_val(&linger) as libc::socklen_t;
    // SAFETY: `linger` outlives the call and is `len` bytes long.
    let result = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            len,
        )
    };
    assert_eq!(result, 0, "setsockopt: {}", io::Error::last_os_error());
    drop(stream);
}

/// Bytes that lie in the socket's receive queue.
pub fn readable(stream: &TcpStream) -> usize {
    let mut bytes = 0i32;
    // SAFETY: `bytes` outlives the call, which writes one integer.
    let result = unsafe { libc::ioctl(stream.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
    assert_eq!(result, 0, "FIONREAD: {}", io::Error::last_os_error());
    usize::try_from(bytes).expect("a count")
}

/// Bytes written that the peer's kernel has not acknowledged.
pub fn unacknowledged(stream: &TcpStream) -> usize {
    let mut bytes = 0i32;
    // SAFETY: `bytes` outlives the call, which writes one integer.
    let result = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    assert_eq!(result, 0, "SIOCOUTQ: {}", io::Error::last_os_error());
    usize::try_from(bytes).expect("a count")
}

/// A listener whose queue is full: connecting to it neither succeeds nor fails. The streams keep it so.
pub fn full_listener() -> (TcpListener, SocketAddr, Vec<TcpStream>) {
    let listener = TcpListener::bind(super::any_port()).expect("a listener");
    let addr = listener.local_addr().expect("its address");
    // SAFETY: takes no pointer. (Listening again changes the backlog.)
    let result = unsafe { libc::listen(listener.as_raw_fd(), 0) };
    assert_eq!(result, 0, "listen: {}", io::Error::last_os_error());
    let mut filling = Vec::new();
    while let Ok(stream) = TcpStream::connect_timeout(&addr, Duration::from_millis(300)) {
        filling.push(stream);
        assert!(filling.len() < 8, "a queue of one that is never full");
    }
    (listener, addr, filling)
}

/// Sends `bytes` and expects the same back.
pub fn exchange(mut stream: impl Read + Write, bytes: &[u8]) {
    stream.write_all(bytes).expect("write");
    expect(stream, bytes);
}

/// Expects exactly these bytes next.
pub fn expect(mut stream: impl Read, wanted: &[u8]) {
    let mut got = vec![0; wanted.len()];
    if let Err(error) = stream.read_exact(&mut got) {
        panic!("read of {} bytes: {error}", wanted.len());
    }
    same_bytes(&got, wanted, "what came back");
}

/// Everything until the peer's FIN.
pub fn read_to_eof(mut stream: impl Read) -> Vec<u8> {
    let mut all = Vec::new();
    stream.read_to_end(&mut all).unwrap_or_else(|error| panic!("after {} bytes: {error}", all.len()));
    all
}

/// How a connection ended for its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Fin,
    Reset,
}

/// Reads to the end, whichever it is; returns it with the number of bytes before it.
pub fn end_of(mut stream: impl Read) -> (End, usize) {
    let mut all = Vec::new();
    match stream.read_to_end(&mut all) {
        Ok(_) => (End::Fin, all.len()),
        Err(error) if error.kind() == ErrorKind::ConnectionReset => (End::Reset, all.len()),
        Err(error) => panic!("neither FIN nor reset after {} bytes: {error}", all.len()),
    }
}

/// Writes until the peer takes nothing for a while; returns the number of bytes taken. The stream
/// is blocking again afterwards.
pub fn write_until_stuck(stream: &mut TcpStream, bytes: &[u8]) -> usize {
    stream.set_write_timeout(Some(Duration::from_millis(200))).expect("a write timeout");
    let mut taken = 0;
    while taken < bytes.len() {
        match stream.write(&bytes[taken..]) {
            Ok(n) => taken += n,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break,
            Err(error) => panic!("write after {taken} bytes: {error}"),
        }
    }
    stream.set_write_timeout(Some(PATIENCE)).expect("a write timeout");
    taken
}

/// Whether anything (data, FIN or a reset) arrives within `time`.
pub fn stays_silent(stream: &TcpStream, time: Duration) -> bool {
    stream.set_read_timeout(Some(time)).expect("a read timeout");
    let mut result = stream.peek(&mut [0]);
    // A read with a timeout is interrupted also when the process is merely stopped and continued.
    while matches!(&result, Err(error) if error.kind() == ErrorKind::Interrupted) {
        result = stream.peek(&mut [0]);
    }
    stream.set_read_timeout(Some(PATIENCE)).expect("a read timeout");
    matches!(result, Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut))
}
