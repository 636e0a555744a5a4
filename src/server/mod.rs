//! A server of tasks: one per connection, within limits, ended in good order.
//!
//! | file | what is in it |
//! |---|---|
//! | `mod.rs` | [`Server`]: what can be set, and its accept loop |
//! | `serving.rs` | the connections that it serves: limits, counts, the drain |
//! | `listen.rs` | what it can accept from |
//! | `report.rs` | [`ServerReport`], [`ServeError`], [`HandlerFailure`] |

mod listen;
mod report;
mod serving;

use std::fmt;
use std::future::{Future, pending, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::{Poll, ready};
use std::time::Duration;

use crate::sync::ShutdownToken;
use crate::task::{Hub, MainOutcome};
use crate::time::{now, sleep_until};

pub use listen::{Listen, Listening};
pub use report::{HandlerFailure, ServeError, ServerReport};

use listen::sealed::Source;
use serving::{AbortAll, Serving};

/// An accept loop with a task for each connection, limits, and an end in good order.
///
/// A whole echo server:
///
/// ```
/// use std::time::Duration;
/// use corelane::net::TcpListener;
/// use corelane::{Runtime, Server};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let addr: std::net::SocketAddr = "127.0.0.1:0".parse()?;
/// let runtime = Runtime::builder().listen(addr).start_tasks(|_| {
///     Server::new().max_connections(10_000).serve(TcpListener::of_builder(0), |mut stream| async move {
///         while let Some(data) = stream.recv().await? {
///             stream.send(data).await?;
///         }
///         std::io::Result::Ok(())
///     })
/// })?;
/// // … until runtime.run_until(&signals, Duration::from_secs(5)), or:
/// println!("{}", runtime.shutdown(Duration::from_secs(5))?);
/// # Ok(())
/// # }
/// ```
///
/// # The end
///
/// When the runtime is asked to stop (or the server's [own token](Self::stop_on) is cancelled) the listener is closed: who
/// connects from then on is refused, or finds another process that listens there. What arrived before is still
/// given to the handlers; then their `recv` gives an error ("runtime shut down"), so that those who wait for a
/// request end at once. Those who have something under way get until the deadline: they end when they next receive,
/// and what they had sent by then is delivered. At the deadline the rest is dropped, and its connections are
/// reset. [`serve`](Self::serve) then gives the [report](ServerReport).
///
/// As the main future of its worker a server keeps the runtime until the last handler has ended, or until the
/// deadline. Tasks that a handler spawns are not the server's: it waits for the handler only.
///
/// # Limits
///
/// They are this worker's: every worker has a server of its own, and the system spreads connections over them.
pub struct Server {
    max_connections: Option<u32>,
    max_per_ip: Option<u32>,
    stop: Option<(ShutdownToken, Duration)>,
    on_failure: Option<OnFailure>,
}

type OnFailure = Box<dyn Fn(&HandlerFailure)>;

impl Server {
    /// A server without limits but its worker's.
    #[must_use]
    pub fn new() -> Self {
        Self { max_connections: None, max_per_ip: None, stop: None, on_failure: None }
    }

    /// Serves at most that many connections at a time. At the limit no more are accepted: clients wait in the kernel's queue
    /// (of the listener's [`backlog`](crate::ListenerConfig::backlog)) until others have gone; a few may have been
    /// accepted before it could be told, and wait with the listener. A connection counts until its handler has ended. 1 to
    /// [`WorkerConfig::max_connections`](crate::WorkerConfig::max_connections), which is the limit otherwise.
    #[must_use]
    pub fn max_connections(mut self, most: u32) -> Self {
        self.max_connections = Some(most);
        self
    }

    /// Serves at most that many connections of one IP address at a time, at least 1; of IPv6, of one network of 64 bits, since
    /// that is what one subscriber has. Those beyond it are accepted and reset at once, and
    /// [counted](ServerReport::refused). Needs [`WorkerConfig::peer_addresses`](crate::WorkerConfig::peer_addresses).
    #[must_use]
    pub fn max_per_ip(mut self, most: u32) -> Self {
        self.max_per_ip = Some(most);
        self
    }

    /// Ends the server when `token` is cancelled, whatever the runtime does, and gives its handlers `drain` to finish.
    ///
    /// ```
    /// use std::time::Duration;
    /// use corelane::net::{TcpListener, TcpStream};
    /// use corelane::{Server, ShutdownToken};
    ///
    /// corelane::task::block_on(async {
    ///     let token = ShutdownToken::new();
    ///     let listener = TcpListener::bind("127.0.0.1:0").await?;
    ///     let addr = listener.local_addr()?;
    ///     let server = Server::new().stop_on(token.clone(), Duration::from_secs(1));
    ///     let serving = corelane::task::spawn(server.serve(listener, |mut stream| async move {
    ///         while let Some(data) = stream.recv().await? {
    ///             stream.send(data).await?;
    ///         }
    ///         std::io::Result::Ok(())
    ///     }));
    ///     let mut client = TcpStream::connect(addr).await?;
    ///     client.send("ping").await?;
    ///     assert_eq!(&client.recv().await?.unwrap()[..], b"ping");
    ///     token.cancel();
    ///     assert!(client.recv().await?.is_none());
    ///     assert_eq!(serving.await.unwrap().unwrap().served, 1);
    ///     std::io::Result::Ok(())
    /// })??;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn stop_on(mut self, token: ShutdownToken, drain: Duration) -> Self {
        self.stop = Some((token, drain));
        self
    }

    /// Has `told` called when a handler ended with an error (other than the one of a shutdown) or panicked. It runs in the
    /// handler's task, when its connection is closed.
    ///
    /// ```
    /// use corelane::Server;
    ///
    /// let server = Server::new().on_failure(|failure| eprintln!("{failure}"));
    /// # drop(server);
    /// ```
    #[must_use]
    pub fn on_failure(mut self, told: impl Fn(&HandlerFailure) + 'static) -> Self {
        self.on_failure = Some(Box::new(told));
        self
    }

    fn check<L: Source>(&self, hub: &Hub) -> Result<(), ServeError> {
        let (worker, addresses) =
            hub.with_core(|core| (core.config.max_connections, core.config.peer_addresses));
        match self.max_connections {
            Some(0) => return Err(ServeError::NoConnections),
            Some(limit) if limit > worker => return Err(ServeError::TooManyConnections { limit, worker }),
            _ => {}
        }
        match self.max_per_ip {
            None => Ok(()),
            Some(0) => Err(ServeError::NoneOfAnAddress),
            Some(_) if !L::HAS_IP => Err(ServeError::NoAddresses),
            Some(_) if !addresses => Err(ServeError::AddressesUnknown),
            Some(_) => Ok(()),
        }
    }

    /// Serves: accepts, and runs `handler` for each connection as a task of its own, until the runtime is asked to stop or
    /// the server's token is cancelled, and everybody has ended or the deadline has passed.
    ///
    /// Dropped before that, it closes its listener, and its handlers and their connections with it, as at the deadline.
    ///
    /// # Errors
    /// [`ServeError`], at once, for limits that cannot be and for a listener that is not there.
    ///
    /// # Panics
    /// Outside of a task.
    pub async fn serve<I, H, F>(self, listener: I, handler: H) -> Result<ServerReport, ServeError>
    where
        I: Listening,
        H: Fn(<I::Listener as Listen>::Stream) -> F + 'static,
        F: Future + 'static,
        F::Output: MainOutcome,
    {
        let hub = Hub::current();
        self.check::<I::Listener>(&hub)?;
        let mut listener = listener.into_listener().ok_or(ServeError::NoListener)?;
        let (token, drain) = self.stop.unwrap_or_else(|| (ShutdownToken::new(), Duration::MAX));
        let handler = Rc::new(handler);
        let serving = Serving::new(
            hub.clone(),
            listener.handle().0,
            self.max_connections,
            self.max_per_ip,
            self.on_failure,
        );
        let _everything = AbortAll(serving.clone());
        {
            let mut told = pin!(token.cancelled());
            let mut stopped = pin!(hub.stop_token().cancelled());
            loop {
                let accepted = poll_fn(|cx| {
                    if told.as_mut().poll(cx).is_ready() || stopped.as_mut().poll(cx).is_ready() {
                        return Poll::Ready(None);
                    }
                    ready!(serving.poll_room(cx));
                    // It fails when the runtime is stopping, and not otherwise.
                    listener.poll_next(cx).map(Result::ok)
                });
                let Some(stream) = accepted.await else { break };
                let (id, peer) = I::Listener::name(&stream);
                serving.admit(id, peer, stream, &handler);
            }
        }
        serving.end_accepting();
        drop(listener);

        let stopping = hub.is_stopping();
        if !stopping {
            serving.end_idle();
        }
        let mut late = pin!(async {
            match stopping {
                // The runtime's deadline holds.
                true => pending().await,
                false => sleep_until(now() + drain).await,
            }
        });
        let mut over = pin!(hub.over_token().cancelled());
        let mut empty = pin!(serving.empty.notified());
        poll_fn(|cx| {
            let ended = serving.is_empty()
                || empty.as_mut().poll(cx).is_ready()
                || over.as_mut().poll(cx).is_ready()
                || late.as_mut().poll(cx).is_ready();
            if ended { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        serving.abort_all();
        Ok(serving.report())
    }
}

impl Default for Server {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("max_connections", &self.max_connections)
            .field("max_per_ip", &self.max_per_ip)
            .finish_non_exhaustive()
    }
}
