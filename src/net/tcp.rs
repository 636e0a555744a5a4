//! TCP.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;

use crate::buffer::{Buf, Payload};
use crate::config::{ConnectConfig, ListenerConfig};
use crate::driver::{Address, ListenConfig};
use crate::handler::{CloseReason, ConnId};
use crate::task::{Accepting, Binding, Hub, Life, Link};

use super::error;
use super::stream::Stream;

/// A listening socket of this worker.
pub struct TcpListener {
    hub: Rc<Hub>,
    accepting: Rc<Accepting>,
}

impl TcpListener {
    /// Listens on an address: a [`SocketAddr`], its text, or a [`ListenerConfig`] with the options.
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
    /// share of it. `None` when there is none of that number, or it was dropped.
    ///
    /// # Panics
    /// Outside of a task.
    pub fn of_builder(index: usize) -> Option<Self> {
        let hub = Hub::current();
        let accepting = hub.listener(index)?;
        Some(Self { hub, accepting })
    }

    /// Waits for a connection.
    ///
    /// # Errors
    /// When the runtime was asked to stop.
    pub async fn accept(&mut self) -> io::Result<TcpStream> {
        let link = poll_fn(|cx| self.accepting.poll_accept(&self.hub, cx)).await?;
        Ok(TcpStream { stream: Stream::new(self.hub.clone(), link) })
    }

    pub(crate) fn poll_accept_here(
        &self,
        cx: &std::task::Context<'_>,
    ) -> std::task::Poll<io::Result<TcpStream>> {
        let link = std::task::ready!(self.accepting.poll_accept(&self.hub, cx));
        std::task::Poll::Ready(link.map(|link| TcpStream { stream: Stream::new(self.hub.clone(), link) }))
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

/// The error of a wish that cannot be.
fn invalid(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, error)
}

/// A TCP connection of this worker. Dropping it closes it: what is queued is sent, then the peer is told.
pub struct TcpStream {
    stream: Stream,
}

impl TcpStream {
    /// Connects to an address: a [`SocketAddr`], its text, or a [`ConnectConfig`] with source, options and time
    /// limit.
    ///
    /// # Errors
    /// Of the system, such as a refused connection; a worker that is full; text that is no address (names are
    /// not looked up) and a configuration that cannot be, as `InvalidInput`.
    ///
    /// # Panics
    /// Outside of a task.
    pub async fn connect<C>(config: C) -> io::Result<Self>
    where
        C: TryInto<ConnectConfig, Error: Into<Box<dyn std::error::Error + Send + Sync>>>,
    {
        let hub = Hub::current();
        let config = config.try_into().map_err(invalid)?;
        let nobody = ConnId { worker: 0, slot: 0, generation: 0 };
        let link = Rc::new(Link::new(nobody, Life::Opening, None));
        let begun = hub.with_core(|core| core.connect(config, link.clone()));
        let id = begun.map_err(|refused| error::of_connect(refused.kind))?;
        link.id.set(id);
        let stream = Stream::new(hub, link);
        poll_fn(|cx| stream.link.poll_open(cx)).await.map_err(error::of_close)?;
        Ok(Self { stream })
    }

    /// Its name, as [`Remote`](crate::Remote) takes it.
    pub fn id(&self) -> ConnId {
        self.stream.link.id.get()
    }

    /// The peer's address, where it came with the accepted connection.
    pub(crate) fn accepted_from(&self) -> Option<SocketAddr> {
        self.stream.link.peer
    }

    /// The next piece of what the peer sent; `None` when it has finished.
    ///
    /// # Errors
    /// When the connection failed or was closed by a limit; once everything that came before was received.
    pub async fn recv(&mut self) -> io::Result<Option<Buf>> {
        poll_fn(|cx| self.stream.poll_recv(cx)).await
    }

    /// Queues bytes for sending, as soon as less than the high-water mark is waiting to be sent. It goes
    /// out with this turn's operations; use [`flush`](Self::flush) to wait for it.
    ///
    /// Dropped before it is done, it has sent nothing.
    ///
    /// # Errors
    /// When the connection has ended, or its writing side was shut down.
    pub async fn send(&mut self, payload: impl Into<Payload>) -> io::Result<()> {
        self.stream.send(payload.into()).await
    }

    /// Waits until the kernel has taken everything that was queued.
    ///
    /// # Errors
    /// When it cannot: the connection has ended.
    pub async fn flush(&mut self) -> io::Result<()> {
        poll_fn(|cx| self.stream.poll_flush(cx)).await
    }

    /// Tells the peer, after what is queued, that nothing more will be sent.
    pub fn shutdown(&mut self) {
        let id = self.id();
        self.stream.hub.with_core(|core| {
            if let Some(slot) = core.find(id) {
                core.shutdown_write(slot);
            }
        });
    }

    /// Resets the connection; what is queued is dropped.
    pub fn abort(self) {
        let id = self.id();
        self.stream.hub.with_core(|core| {
            if let Some(slot) = core.find(id) {
                core.abort(slot);
            }
        });
    }

    /// Why the connection ended, if it has.
    pub fn close_reason(&self) -> Option<CloseReason> {
        match self.stream.link.life.get() {
            Life::Over(reason) => Some(reason),
            _ => None,
        }
    }
}

impl fmt::Debug for TcpStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TcpStream({})", self.id())
    }
}

impl fmt::Debug for TcpListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TcpListener({:?})", self.local_addr())
    }
}
