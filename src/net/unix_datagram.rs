//! Datagrams between processes of one machine.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::os::unix::net::SocketAddr;
use std::path::Path;
use std::task::{Context, Poll};

use crate::buffer::{Buf, Payload};
use crate::driver::{Address, Datagram, DatagramConfig};

use super::datagram::Port;

/// A Unix datagram socket of this worker.
///
/// A socket that was bound to a path leaves the socket's file behind; remove it before binding again.
///
/// ```
/// use corelane::net::UnixDatagram;
///
/// let path = std::env::temp_dir().join(format!("corelane-doc-{}", std::process::id()));
/// let at = path.clone();
/// corelane::task::block_on(async move {
///     let mut inbox = UnixDatagram::bind(&at).await?;
///     let outbox = UnixDatagram::unbound().await?;
///     outbox.send_to("hello", &at).await?;
///     assert_eq!(&inbox.recv_from().await?.bytes[..], b"hello");
///     std::io::Result::Ok(())
/// })??;
/// std::fs::remove_file(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct UnixDatagram {
    port: Port,
}

impl UnixDatagram {
    /// Opens a socket on a path.
    ///
    /// # Errors
    /// Of the system: `AddrInUse` when the file is there already, also when its owner is gone; a path of more than
    /// 107 bytes; a worker that is full.
    ///
    /// # Panics
    /// Outside of a task.
    pub async fn bind(path: impl AsRef<Path>) -> io::Result<Self> {
        Self::open(Some(SocketAddr::from_pathname(path)?), None).await
    }

    /// Opens a socket on an address, which may be an abstract name.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    ///
    /// # Panics
    /// Outside of a task.
    pub async fn bind_addr(addr: SocketAddr) -> io::Result<Self> {
        Self::open(Some(addr), None).await
    }

    /// Opens a socket without an address, which nobody can answer.
    ///
    /// # Errors
    /// Of the system; a worker that is full.
    ///
    /// # Panics
    /// Outside of a task.
    pub async fn unbound() -> io::Result<Self> {
        Self::open(None, None).await
    }

    /// Opens a socket on `local`, if that is given, that is connected to `peer`.
    ///
    /// # Errors
    /// As [`bind`](Self::bind); `ConnectionRefused` or `NotFound` when the peer is not there.
    ///
    /// # Panics
    /// Outside of a task.
    pub async fn connect(local: Option<SocketAddr>, peer: SocketAddr) -> io::Result<Self> {
        Self::open(local, Some(peer)).await
    }

    async fn open(local: Option<SocketAddr>, peer: Option<SocketAddr>) -> io::Result<Self> {
        let config = DatagramConfig {
            local: local.map(Address::Unix),
            peer: peer.map(Address::Unix),
            reuse_port: false,
            broadcast: false,
            gro: false,
            recv_buffer: None,
            send_buffer: None,
        };
        Ok(Self { port: Port::open(config).await? })
    }

    /// Waits for a datagram. Dropped before it is done, it has taken none.
    ///
    /// # Errors
    /// What the system reports of an earlier datagram; receiving goes on after that. When the worker is ending.
    pub async fn recv_from(&mut self) -> io::Result<UnixIncoming> {
        poll_fn(|cx| self.poll_recv_from(cx)).await
    }

    /// [`recv_from`](Self::recv_from), for use in a stream.
    pub fn poll_recv_from(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<UnixIncoming>> {
        self.port.poll_recv(cx).map_ok(|received| UnixIncoming {
            bytes: received.bytes,
            from: match received.from {
                Some(Address::Unix(from)) => Some(from),
                _ => None,
            },
            truncated: received.truncated,
        })
    }

    /// Sends a datagram to the socket on a path, and waits until the kernel has it. Returns its size.
    ///
    /// # Errors
    /// Of the system, such as `NotFound`, `ConnectionRefused`, or a datagram that is too long.
    pub async fn send_to(&self, payload: impl Into<Payload>, path: impl AsRef<Path>) -> io::Result<usize> {
        self.send_to_addr(payload, SocketAddr::from_pathname(path)?).await
    }

    /// Sends a datagram to an address, such as that of a received one or an abstract name.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to).
    pub async fn send_to_addr(&self, payload: impl Into<Payload>, to: SocketAddr) -> io::Result<usize> {
        let to = Some(Address::Unix(to));
        self.port.sender().send(Datagram { payload: payload.into(), to, segment: None }).await
    }

    /// Sends a datagram to the peer of a connected socket.
    ///
    /// # Errors
    /// As [`send_to`](Self::send_to).
    pub async fn send(&self, payload: impl Into<Payload>) -> io::Result<usize> {
        self.port.sender().send(Datagram { payload: payload.into(), to: None, segment: None }).await
    }

    /// Where it is bound; an address without a name when it is not.
    ///
    /// # Errors
    /// When the system did not tell.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match &self.port.addresses {
            Ok(addresses) => match &addresses.local {
                Address::Unix(addr) => Ok(addr.clone()),
                Address::Inet(_) => Err(io::ErrorKind::InvalidData.into()),
            },
            Err(error) => Err(error.kind().into()),
        }
    }
}

impl fmt::Debug for UnixDatagram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnixDatagram").field("local", &self.local_addr().ok()).finish_non_exhaustive()
    }
}

/// A datagram that was received from a process of this machine.
#[derive(Debug)]
#[non_exhaustive]
pub struct UnixIncoming {
    /// Its bytes, in the buffer that they were received into; may be none.
    pub bytes: Buf,
    /// Who sent it, if that socket has an address.
    pub from: Option<SocketAddr>,
    /// It was longer than a buffer, and its end is lost.
    pub truncated: bool,
}
