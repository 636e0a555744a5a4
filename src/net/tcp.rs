//! TCP.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::config::{ConnectConfig, ListenerConfig, SocketOptions};
use crate::driver::{Address, ListenConfig};
use crate::handler::CloseReason;
use crate::task::{Accepting, Binding, Hub, TaskCore};

use super::connect;
use super::error::invalid;
use super::methods::{connection, reading, writing};
use super::split::{self, OwnedReadHalf, OwnedWriteHalf, ReadHalf, ReuniteError, WriteHalf};
use super::stream::{Kind, Stream};

/// A listening socket of this worker. Dropping it closes it, and whoever was accepted and not taken.
///
/// ```
/// use corelane::net::{TcpListener, TcpStream};
///
/// corelane::task::block_on(async {
///     let mut listener = TcpListener::bind("127.0.0.1:0").await?;
///     let client = TcpStream::connect(listener.local_addr()?).await?;
///     let server = listener.accept().await?;
///     assert_eq!(server.peer_addr().await?, client.local_addr().await?);
///     std::io::Result::Ok(())
/// })??;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct TcpListener {
    hub: Rc<Hub>,
    accepting: Rc<Accepting>,
}

impl TcpListener {
    /// Listens on an address: a [`SocketAddr`], its text, or a [`ListenerConfig`] with the options.
    ///
    /// With [`Sharing::PerWorker`](crate::Sharing::PerWorker), which is the default, other listeners of the same user may share the
    /// address, so that every worker can bind it; also those of another process. With
    /// [`Sharing::One`](crate::Sharing::One) it is this listener's alone, and an address in use is an error.
    ///
    /// # Errors
    /// Of the system, such as an address in use; text that is no address (names are not looked up) and a
    /// configuration that cannot be, as `InvalidInput`.
    ///
    /// # Panics
    /// Outside of a task.
    pub async fn bind<C>(config: C) -> io::Result<Self>
    where
        C: TryInto<ListenerConfig, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
    {
        let hub = Hub::current();
        let config = config.try_into().map_err(invalid)?;
        config.options.check().map_err(invalid)?;
        let accepting = {
            let binding = Binding::new(&hub, ListenConfig::Tcp(config));
            poll_fn(|cx| binding.poll(cx)).await?
        };
        Ok(Self { hub, accepting })
    }

    /// The listener that the runtime was built with: number `index` of [`Builder::listen`](crate::Builder::listen), this worker's
    /// share of it. `None` when there is none of that number, or it was taken before.
    ///
    /// # Panics
    /// Outside of a task.
    pub fn of_builder(index: usize) -> Option<Self> {
        let hub = Hub::current();
        let accepting = hub.take_listener(index)?;
        Some(Self { hub, accepting })
    }

    /// Waits for a connection. Dropped before it is done, it has taken none. While 64 connections wait for this, no more
    /// are accepted: clients wait in the kernel's queue.
    ///
    /// # Errors
    /// When the runtime was asked to stop.
    pub async fn accept(&mut self) -> io::Result<TcpStream> {
        poll_fn(|cx| self.poll_accept(cx)).await
    }

    /// [`accept`](Self::accept), for use in streams and other futures.
    pub fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<TcpStream>> {
        self.accepting
            .poll_accept(&self.hub, cx)
            .map_ok(|link| TcpStream { stream: Stream::of(Kind::Tcp, self.hub.clone(), link) })
    }

    pub(crate) fn accepting(&self) -> &Rc<Accepting> {
        &self.accepting
    }

    /// Its address, with the port that the system chose.
    ///
    /// # Errors
    /// None today; fallible as elsewhere.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match &self.accepting.local {
            Address::Inet(addr) => Ok(*addr),
            #[cfg(unix)]
            Address::Unix(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

impl Drop for TcpListener {
    fn drop(&mut self) {
        self.accepting.close(&self.hub);
    }
}

/// A TCP connection of this worker. Dropping it closes it gracefully: what is queued is sent, the peer is told, and given
/// [`close_timeout`](crate::WorkerConfig::close_timeout) to finish; that goes on without the task.
///
/// ```
/// use corelane::net::{TcpListener, TcpStream};
///
/// corelane::task::block_on(async {
///     let mut listener = TcpListener::bind("127.0.0.1:0").await?;
///     let mut client = TcpStream::connect(listener.local_addr()?).await?;
///     let mut server = listener.accept().await?;
///     client.send("question").await?;
///     let question = server.recv().await?.expect("a question");
///     // A header of its own in front of the received buffer: neither is copied.
///     server.send_vectored(["re: ".into(), corelane::Payload::from(question)]).await?;
///     let mut answer = [0; 12];
///     client.recv_exact(&mut answer).await?;
///     assert_eq!(&answer, b"re: question");
///     std::io::Result::Ok(())
/// })??;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct TcpStream {
    stream: Stream,
}

impl TcpStream {
    /// Connects to an address: a [`SocketAddr`], its text, or a [`ConnectConfig`] with source, options and time
    /// limit. While the worker or the runtime holds as many connections as it may, it waits for room, within the
    /// same time limit. Dropped before it is done, no connection is left.
    ///
    /// # Errors
    /// Of the system, such as a refused connection; `QuotaExceeded` when there was no room in time; text that is no
    /// address (names are not looked up) and a configuration that cannot be, as `InvalidInput`.
    ///
    /// # Panics
    /// Outside of a task.
    pub async fn connect<C>(config: C) -> io::Result<Self>
    where
        C: TryInto<ConnectConfig, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
    {
        let config = config.try_into().map_err(invalid)?;
        let begin = |core: &mut TaskCore, left, link| {
            core.connect(ConnectConfig { timeout: left, ..config.clone() }, link)
        };
        Ok(Self { stream: connect::stream(Kind::Tcp, Some(config.target), config.timeout, begin).await? })
    }

    reading!(stream);
    writing!(stream);
    connection!(stream);

    /// The peer's address, where it came with the accepted connection.
    pub(crate) fn accepted_from(&self) -> Option<SocketAddr> {
        self.stream.link.peer()
    }

    /// The peer's address. Known at once on outgoing connections, and on accepted ones where
    /// [`peer_addresses`](crate::WorkerConfig::peer_addresses) is on; else the system is asked, which
    /// takes a few system calls (with direct descriptors Linux 6.8).
    ///
    /// # Errors
    /// When the connection has ended; when the system cannot tell.
    pub async fn peer_addr(&self) -> io::Result<SocketAddr> {
        if let Some(peer) = self.stream.link.peer() {
            return Ok(peer);
        }
        inet(self.stream.addresses().await?.peer)
    }

    /// This end's address, which the system is asked for.
    ///
    /// # Errors
    /// As [`peer_addr`](Self::peer_addr).
    pub async fn local_addr(&self) -> io::Result<SocketAddr> {
        inet(Some(self.stream.addresses().await?.local))
    }

    /// Sets those of the socket's options that are given, and `nodelay` either way; one that is `None` stays as it is.
    /// Those of a listener are inherited by what it accepts at no cost; this takes some system calls (with direct
    /// descriptors Linux 6.8).
    ///
    /// # Errors
    /// `InvalidInput` for an option out of its range; else as [`peer_addr`](Self::peer_addr).
    pub async fn set_options(&self, options: &SocketOptions) -> io::Result<()> {
        self.stream.set_options(options).await
    }

    /// Closes the connection when nothing was received for so long; `None` turns that off. Resolution: 1 ms.
    pub fn set_idle_timeout(&self, timeout: Option<Duration>) {
        self.stream.set_idle_timeout(timeout);
    }

    /// Resets the connection if it is still there after so long, whatever it does; `None` takes that back. Resolution:
    /// 1 ms.
    pub fn set_deadline(&self, after: Option<Duration>) {
        self.stream.set_deadline(after);
    }

    /// Whether receiving goes on when the runtime was asked to stop, until the deadline. Off for accepted connections,
    /// whose `recv` then gives an error as soon as nothing that arrived is left: a server ends between two
    /// requests. On for outgoing ones, which answers to requests under way may depend on.
    pub fn keep_receiving_on_stop(&self, on: bool) {
        self.stream.link.ends_on_stop.set(!on);
    }

    /// Closes the connection as dropping it does, with the reason that counters shall show.
    pub fn close_with(self, reason: CloseReason) {
        self.stream.with(|core, slot| core.close(slot, reason));
    }

    /// Resets the connection; what is queued is dropped.
    pub fn abort(self) {
        self.stream.abort();
    }

    /// Two halves that borrow the stream, to receive and send at the same time in one task.
    pub fn split(&mut self) -> (ReadHalf<'_>, WriteHalf<'_>) {
        split::borrowed(&mut self.stream)
    }

    /// Two halves that own the stream together, for two tasks.
    pub fn into_split(self) -> (OwnedReadHalf, OwnedWriteHalf) {
        split::owned(self.stream)
    }

    /// Puts two halves together again.
    ///
    /// # Errors
    /// [`ReuniteError`] with both when they are not of one stream, or of one of another kind.
    pub fn reunite(from: OwnedReadHalf, to: OwnedWriteHalf) -> Result<Self, ReuniteError> {
        split::reunite(Kind::Tcp, from, to).map(|stream| Self { stream })
    }
}

fn inet(address: Option<Address>) -> io::Result<SocketAddr> {
    match address {
        Some(Address::Inet(address)) => Ok(address),
        _ => Err(io::ErrorKind::NotConnected.into()),
    }
}

impl fmt::Debug for TcpStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TcpStream({})", self.id())
    }
}

impl fmt::Debug for TcpListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TcpListener({:?})", self.accepting.local)
    }
}
