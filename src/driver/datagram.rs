//! Datagrams as drivers take and bring them.
//!
//! A datagram socket is a connection to a driver: a [`Key`](super::Key), `recv`, `cancel_recv`, `close` and their
//! events are the same. Different are how it is opened ([`open_datagram`](super::Driver::open_datagram)), how it
//! sends ([`send_datagram`](super::Driver::send_datagram)), and what is in a received buffer: not the bytes
//! alone, but a whole [`Received`] in the layout of `io_uring_recvmsg_out`, on every backend, so that the sender's
//! address travels in the buffer and takes no memory of its own.

use std::net::SocketAddr;

use crate::buffer::Payload;

/// Datagrams of one socket that may be given to a driver at a time.
pub(crate) const DATAGRAM_SENDS: u32 = 64;

/// An address of a socket.
#[derive(Clone, Debug)]
pub enum Address {
    /// Of the internet protocols.
    Inet(SocketAddr),
    /// Of this machine: a path, an abstract name, or none.
    #[cfg(unix)]
    Unix(std::os::unix::net::SocketAddr),
}

/// A datagram socket to open.
#[derive(Clone, Debug)]
pub struct DatagramConfig {
    /// The local address; `None` only for Unix sockets that nobody needs to answer.
    pub local: Option<Address>,
    /// The only peer, of a connected socket.
    pub peer: Option<Address>,
    /// `SO_REUSEPORT`.
    pub reuse_port: bool,
    /// `SO_BROADCAST`.
    pub broadcast: bool,
    /// Whether the kernel may join datagrams of one sender (`UDP_GRO`, Linux 5.0).
    pub gro: bool,
    /// `SO_RCVBUF` in bytes.
    pub recv_buffer: Option<u32>,
    /// `SO_SNDBUF` in bytes.
    pub send_buffer: Option<u32>,
}

/// A datagram to send.
#[derive(Debug)]
pub struct Datagram {
    /// Its bytes; may be none.
    pub payload: Payload,
    /// Where to; `None` on a connected socket.
    pub to: Option<Address>,
    /// The kernel cuts the bytes into datagrams of this size (`UDP_SEGMENT`, Linux 4.18).
    pub segment: Option<u16>,
}
