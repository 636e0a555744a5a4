//! UDP.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::net::{AddrParseError, SocketAddr};
use std::task::{Context, Poll};

use crate::buffer::{Buf, Payload};
use crate::driver::{Address, Datagram, DatagramConfig, Received};

use super::datagram::{Port, Sender};
use super::error::invalid;

/// A UDP socket to open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UdpConfig {
    /// The local address; port 0 lets the kernel choose.
    pub local: SocketAddr,
    /// The only peer: the socket is connected to it, receives from it alone, and is told when nobody listens there
    /// (`ConnectionRefused`).
    pub peer: Option<SocketAddr>,
    /// Whether other sockets, such as those of other workers, may be bound to the same address
    /// (`SO_REUSEPORT`): the kernel spreads senders over them. Off by default; on Windows, which has nothing of the
    /// kind, opening fails (`Unsupported`).
    pub reuse_port: bool,
    /// Whether it may send to broadcast addresses. Off by default.
    pub broadcast: bool,
    /// Whether the kernel may hand over several datagrams of one sender and size as one
    /// ([`UdpDatagram::segment`]); Linux 5.0. Buffers should then be large
    /// ([`BufferConfig::size`](crate::BufferConfig::size)). Off by default.
    pub gro: bool,
    /// `SO_RCVBUF` in bytes; the system's default if `None`.
    pub recv_buffer: Option<u32>,
    /// `SO_SNDBUF` in bytes; the system's default if `None`.
    pub send_buffer: Option<u32>,
}

impl UdpConfig {
    /// A socket on `local` with the defaults.
    pub fn new(local: SocketAddr) -> Self {
        Self {
            local,
            peer: None,
            reuse_port: false,
            broadcast: false,
            gro: false,
            recv_buffer: None,
            send_buffer: None,
        }
    }
}

impl From<SocketAddr> for UdpConfig {
    fn from(local: SocketAddr) -> Self {
        Self::new(local)
    }
}

impl TryFrom<&str> for UdpConfig {
    type Error = AddrParseError;

    fn try_from(local: &str) -> Result<Self, AddrParseError> {
        local.parse().map(Self::new)
    }
}

/// A UDP socket of this worker.
///
/// ```
/// use corelane::net::UdpSocket;
///
/// corelane::task::block_on(async {
///     let mut server = UdpSocket::bind("127.0.0.1:0").await?;
///     let mut client = UdpSocket::bind("127.0.0.1:0").await?;
///     client.send_to("hello", server.local_addr()?).await?;
///     let question = server.recv_from().await?;
///     server.send_to(question.bytes, question.from).await?; // the received buffer itself
///     assert_eq!(&client.recv_from().await?.bytes[..], b"hello");
///     std::io::Result::Ok(())
/// })??;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct UdpSocket {
    port: Port,
}

impl UdpSocket {
    /// Opens a socket: on a [`SocketAddr`], its text, or as a [`UdpConfig`] says.
    ///
    /// # Errors
    /// Of the system, such as an address in use; a worker that is full; text that is no address, as `InvalidInput`.
    ///
    /// # Panics
    /// Outside of a task.
    pub async fn bind<C>(config: C) -> io::Result<Self>
    where
        C: TryInto<UdpConfig, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
    {
        let config = config.try_into().map_err(invalid)?;
        if config.peer.is_some_and(|peer| peer.is_ipv4() != config.local.is_ipv4()) {
            return Err(invalid("local and peer address are not of one family"));
        }
        let config = DatagramConfig {
            local: Some(Address::Inet(config.local)),
            peer: config.peer.map(Address::Inet),
            reuse_port: config.reuse_port,
            broadcast: config.broadcast,
            gro: config.gro,
            recv_buffer: config.recv_buffer,
            send_buffer: config.send_buffer,
        };
        Ok(Self { port: Port::open(config).await? })
    }

    /// Opens a socket that is connected to `peer`, on an address of the system's choice.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    ///
    /// # Panics
    /// Outside of a task.
    pub async fn connect(peer: SocketAddr) -> io::Result<Self> {
        let local = match peer {
            SocketAddr::V4(_) => SocketAddr::from(([0; 4], 0)),
            SocketAddr::V6(_) => SocketAddr::from(([0; 16], 0)),
        };
        Self::bind(UdpConfig { peer: Some(peer), ..UdpConfig::new(local) }).await
    }

    /// Waits for a datagram. Dropped before it is done, it has taken none.
    ///
    /// # Errors
    /// What the system reports of an earlier datagram (on a connected socket `ConnectionRefused` when nobody
    /// listens there); receiving goes on after that. When the worker is ending.
    pub async fn recv_from(&mut self) -> io::Result<UdpDatagram> {
        poll_fn(|cx| self.poll_recv_from(cx)).await
    }

    /// [`recv_from`](Self::recv_from), for use in a stream.
    pub fn poll_recv_from(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<UdpDatagram>> {
        self.port.poll_recv(cx).map(|received| UdpDatagram::try_from(received?))
    }

    /// Sends a datagram, without copying it, and waits until the kernel has it. Returns its size.
    ///
    /// Dropped while it waits for one of the 64 sends that a socket may have under way, it has sent
    /// nothing; later, the datagram is sent all the same.
    ///
    /// # Errors
    /// Of the system, such as a datagram that is too long.
    pub async fn send_to(&self, payload: impl Into<Payload>, to: SocketAddr) -> io::Result<usize> {
        self.sender().0.send(datagram(payload, Some(to), None)).await
    }

    /// [`send_to`](Self::send_to) the peer of a connected socket.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to).
    pub async fn send(&self, payload: impl Into<Payload>) -> io::Result<usize> {
        self.sender().0.send(datagram(payload, None, None)).await
    }

    /// A handle that sends through this socket from other tasks of this worker.
    pub fn sender(&self) -> UdpSender {
        UdpSender(self.port.sender())
    }

    /// Where it is bound.
    ///
    /// # Errors
    /// When the system did not tell.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match &self.port.addresses {
            Ok(addresses) => inet(Some(&addresses.local)),
            Err(error) => Err(error.kind().into()),
        }
    }

    /// Whom it is connected to.
    ///
    /// # Errors
    /// `NotConnected`, when it is not; when the system did not tell.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        match &self.port.addresses {
            Ok(addresses) => inet(addresses.peer.as_ref()),
            Err(error) => Err(error.kind().into()),
        }
    }
}

fn inet(address: Option<&Address>) -> io::Result<SocketAddr> {
    match address {
        Some(Address::Inet(address)) => Ok(*address),
        _ => Err(io::ErrorKind::NotConnected.into()),
    }
}

fn datagram(payload: impl Into<Payload>, to: Option<SocketAddr>, segment: Option<u16>) -> Datagram {
    Datagram { payload: payload.into(), to: to.map(Address::Inet), segment }
}

impl fmt::Debug for UdpSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UdpSocket").field("local", &self.local_addr().ok()).finish_non_exhaustive()
    }
}

/// Sends through a [`UdpSocket`]; any number of tasks may at a time.
///
/// ```
/// use corelane::net::UdpSocket;
///
/// corelane::task::block_on(async {
///     let mut inbox = UdpSocket::bind("127.0.0.1:0").await?;
///     let to = inbox.local_addr()?;
///     let sender = UdpSocket::bind("127.0.0.1:0").await?.sender();
///     // The socket itself was dropped: it is closed, and its senders know.
///     assert!(sender.send_to("late", to).await.is_err());
///     let socket = UdpSocket::bind("127.0.0.1:0").await?;
///     let (sent, result) = socket.sender().send_batch((0..100).map(|n| (vec![n], to))).await;
///     result?;
///     assert_eq!(sent, 100);
///     assert_eq!(inbox.recv_from().await?.bytes[0], 0);
///     std::io::Result::Ok(())
/// })??;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct UdpSender(Sender);

impl UdpSender {
    /// As [`UdpSocket::send_to`].
    ///
    /// # Errors
    /// As [`UdpSocket::send_to`].
    pub async fn send_to(&self, payload: impl Into<Payload>, to: SocketAddr) -> io::Result<usize> {
        self.0.send(datagram(payload, Some(to), None)).await
    }

    /// As [`UdpSocket::send`].
    ///
    /// # Errors
    /// As [`UdpSocket::send_to`].
    pub async fn send(&self, payload: impl Into<Payload>) -> io::Result<usize> {
        self.0.send(datagram(payload, None, None)).await
    }

    /// Gives the system a datagram without waiting for what comes of it: what an error would say is lost, as the datagram
    /// itself may be.
    ///
    /// # Errors
    /// The payload with `WouldBlock` when 64 sends are under way; or with why the socket is closed.
    pub fn try_send_to(
        &self,
        payload: impl Into<Payload>,
        to: SocketAddr,
    ) -> Result<(), (Payload, io::Error)> {
        let begun = self.0.try_begin(datagram(payload, Some(to), None));
        begun.map_err(|(datagram, error)| (datagram.payload, error))
    }

    /// Sends many datagrams; they go to the kernel in one system call, up to 64 of them. Returns how many the
    /// kernel took, and the first error, after which no more were begun.
    pub async fn send_batch<P: Into<Payload>>(
        &self,
        datagrams: impl IntoIterator<Item = (P, SocketAddr)>,
    ) -> (usize, io::Result<()>) {
        self.0.send_batch(datagrams.into_iter().map(|(payload, to)| datagram(payload, Some(to), None))).await
    }

    /// Sends one payload as datagrams of `segment` bytes each (the last may be shorter), which the kernel or the
    /// network card cuts (`UDP_SEGMENT`, Linux 4.18; on Windows this program does). Returns the bytes sent.
    ///
    /// # Errors
    /// As [`UdpSocket::send_to`]; more than 64 segments, or more than 65,507 bytes, are too long.
    pub async fn send_segmented(
        &self,
        payload: impl Into<Payload>,
        segment: u16,
        to: Option<SocketAddr>,
    ) -> io::Result<usize> {
        if segment == 0 {
            return Err(invalid("a segment has at least one byte"));
        }
        self.0.send(datagram(payload, to, Some(segment))).await
    }
}

impl fmt::Debug for UdpSender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UdpSender")
    }
}

/// A datagram that was received.
#[derive(Debug)]
#[non_exhaustive]
pub struct UdpDatagram {
    /// Its bytes, in the buffer that they were received into; may be none.
    pub bytes: Buf,
    /// Who sent it.
    pub from: SocketAddr,
    /// With [`gro`](UdpConfig::gro): these are several datagrams of this size (the last may be shorter).
    pub segment: Option<u16>,
    /// It was longer than a buffer ([`BufferConfig::size`](crate::BufferConfig::size), less 160 bytes), and its end is lost.
    pub truncated: bool,
}

impl UdpDatagram {
    /// The datagrams that this one is made of: one, unless [`segment`](Self::segment) says otherwise.
    pub fn segments(&self) -> impl Iterator<Item = Buf> + '_ {
        let size = self.segment.map_or(usize::MAX, |size| usize::from(size.max(1)));
        let count = self.bytes.len().div_ceil(size).max(1);
        (0..count).map(move |n| {
            let from = n.saturating_mul(size);
            self.bytes.slice(from..from.saturating_add(size).min(self.bytes.len()))
        })
    }
}

impl TryFrom<Received> for UdpDatagram {
    type Error = io::Error;

    fn try_from(received: Received) -> io::Result<Self> {
        let Received { bytes, from, segment, truncated } = received;
        match from {
            Some(Address::Inet(from)) => Ok(Self { bytes, from, segment, truncated }),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}
