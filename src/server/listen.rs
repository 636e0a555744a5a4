//! What a server can accept from.

use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::handler::ConnId;
use crate::net::{TcpListener, TcpStream};
#[cfg(unix)]
use crate::net::{UnixListener, UnixStream};
use crate::task::Accepting;

/// A listener that a [`Server`](super::Server) can accept from: a [`TcpListener`], on Unix systems also a
/// [`UnixListener`](crate::net::UnixListener).
///
/// ```
/// use corelane::{Listen, Server, ServerReport, net::TcpListener};
///
/// /// Serves whatever listener it is given, until the runtime stops.
/// async fn discard<L: Listen<Stream = corelane::net::TcpStream>>(listener: L) -> ServerReport {
///     let served = Server::new().serve(listener, |mut stream| async move {
///         while stream.recv().await?.is_some() {}
///         std::io::Result::Ok(())
///     });
///     served.await.expect("nothing was limited")
/// }
///
/// corelane::task::block_on(async {
///     let listener = TcpListener::bind("127.0.0.1:0").await?;
///     drop(corelane::task::spawn(discard(listener)));
///     std::io::Result::Ok(())
/// })??;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Listen: sealed::Source + 'static {
    /// What it gives: a connection.
    type Stream: 'static;
}

/// A [`Listen`], or an `Option` of one, as [`TcpListener::of_builder`] gives it.
///
/// ```
/// use corelane::{ServeError, Server, net::{TcpListener, TcpStream}};
///
/// let error = corelane::task::block_on(async {
///     // This runtime was built with no listener.
///     Server::new().serve(TcpListener::of_builder(0), |_: TcpStream| async {}).await.unwrap_err()
/// })?;
/// assert_eq!(error, ServeError::NoListener);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Listening {
    /// The listener.
    type Listener: Listen;

    /// It, if it is there.
    fn into_listener(self) -> Option<Self::Listener>;
}

impl<L: Listen> Listening for L {
    type Listener = L;

    fn into_listener(self) -> Option<L> {
        Some(self)
    }
}

impl<L: Listen> Listening for Option<L> {
    type Listener = L;

    fn into_listener(self) -> Option<L> {
        self
    }
}

pub(super) mod sealed {
    use super::{Accepting, ConnId, Context, Poll, Rc, SocketAddr, io};

    /// The worker's side of a listener.
    pub struct Handle(pub(in crate::server) Rc<Accepting>);

    /// What nobody else implements.
    pub trait Source {
        /// Whether its peers have IP addresses.
        const HAS_IP: bool;

        fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<<Self as super::Listen>::Stream>>
        where
            Self: super::Listen;

        fn handle(&self) -> Handle;

        /// The name and, where it is known, the address of one who was accepted.
        fn name(stream: &<Self as super::Listen>::Stream) -> (ConnId, Option<SocketAddr>)
        where
            Self: super::Listen;
    }
}

#[cfg(unix)]
impl Listen for UnixListener {
    type Stream = UnixStream;
}

#[cfg(unix)]
impl sealed::Source for UnixListener {
    const HAS_IP: bool = false;

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<UnixStream>> {
        self.poll_accept(cx)
    }

    fn handle(&self) -> sealed::Handle {
        sealed::Handle(self.accepting().clone())
    }

    fn name(stream: &UnixStream) -> (ConnId, Option<SocketAddr>) {
        (stream.id(), None)
    }
}

impl Listen for TcpListener {
    type Stream = TcpStream;
}

impl sealed::Source for TcpListener {
    const HAS_IP: bool = true;

    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<TcpStream>> {
        self.poll_accept(cx)
    }

    fn handle(&self) -> sealed::Handle {
        sealed::Handle(self.accepting().clone())
    }

    fn name(stream: &TcpStream) -> (ConnId, Option<SocketAddr>) {
        (stream.id(), stream.accepted_from())
    }
}
