//! A connection and the bytes on it: a pattern goes out, and what comes back has to be the same.

use std::io::{self, ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;

use mio::net::TcpStream;
use socket2::{Domain, Protocol, Socket, Type};

use crate::Plan;

/// Length of the pattern: prime, so that no power of two lines up with it.
const PERIOD: usize = 65_521;

/// Bytes to send, twice the period, so that any `PERIOD` bytes from any position are in one piece.
pub struct Pattern(Vec<u8>);

impl Pattern {
    pub fn new() -> Self {
        let mut state = 0x2545_F491_4F6C_DD1D_u64;
        let mut period = Vec::with_capacity(2 * PERIOD);
        for _ in 0..PERIOD {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            period.push(state as u8);
        }
        period.extend_from_within(..);
        Self(period)
    }

    /// What comes at this position of a stream, at most `PERIOD` bytes.
    fn at(&self, position: u64, length: usize) -> &[u8] {
        let start = (position % PERIOD as u64) as usize;
        &self.0[start..start + length.min(PERIOD)]
    }
}

/// `bind` to an address alone leaves the port open until the connection's other end is known: one port then serves
/// connections to different targets.
fn bind_address_no_port(socket: &Socket) -> io::Result<()> {
    let on: libc::c_int = 1;
    let (value, length) = ((&raw const on).cast(), size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: the option's value is a local `int`, which the call reads.
    let done = unsafe {
        libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, value, length)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// One connection.
pub struct Flow {
    pub stream: TcpStream,
    /// Where in the pattern this connection begins: no two neighbours send the same.
    pub offset: u64,
    pub sent: u64,
    pub received: u64,
}

impl Flow {
    /// Begins to connect from the next source address.
    pub fn connect(plan: &Plan, number: usize) -> io::Result<Self> {
        let socket = Socket::new(Domain::for_address(plan.target), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_nonblocking(true)?;
        socket.set_tcp_nodelay(true)?;
        if !plan.sources.is_empty() {
            // The port is chosen when connecting, by the whole pair of addresses.
            bind_address_no_port(&socket)?;
            socket.bind(&SocketAddr::from((plan.sources[number % plan.sources.len()], 0)).into())?;
        }
        match socket.connect(&plan.target.into()) {
            Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error),
            _ => {}
        }
        Ok(Self {
            stream: TcpStream::from_std(socket.into()),
            offset: number as u64 * 7919,
            sent: 0,
            received: 0,
        })
    }

    /// Whether it is established; an error when it was refused.
    pub fn established(&self) -> io::Result<bool> {
        if let Some(error) = self.stream.take_error()? {
            return Err(error);
        }
        match self.stream.peer_addr() {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotConnected => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Sends until `limit` bytes have been sent in all, or the socket takes no more. Returns whether the limit was reached.
    pub fn send_up_to(&mut self, pattern: &Pattern, limit: u64) -> io::Result<bool> {
        while self.sent < limit {
            let length = usize::try_from(limit - self.sent).unwrap_or(usize::MAX);
            match self.stream.write(pattern.at(self.offset + self.sent, length)) {
                Ok(sent) => self.sent += sent as u64,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Reads once and compares. Returns whether there may be more; the end of the stream is an error.
    pub fn read_once(&mut self, pattern: &Pattern, buffer: &mut [u8]) -> io::Result<bool> {
        match self.stream.read(buffer) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(length) => {
                let mut rest = &buffer[..length];
                while !rest.is_empty() {
                    let expected = pattern.at(self.offset + self.received, rest.len());
                    if rest[..expected.len()] != *expected {
                        let what = format!("other bytes came back than were sent, near {}", self.received);
                        return Err(io::Error::new(ErrorKind::InvalidData, what));
                    }
                    self.received += expected.len() as u64;
                    rest = &rest[expected.len()..];
                }
                Ok(length == buffer.len())
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(true),
            Err(error) => Err(error),
        }
    }
}
