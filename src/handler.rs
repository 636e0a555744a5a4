//! The upper door: the user's code, and what it can do from inside a callback.
//!
//! Callbacks never nest. What a callback asks for (sending, closing, pausing, connecting) is noted
//! and carried out by the worker when the callback has returned, so a completion that is there at
//! once cannot recurse, and the kernel sees one submission per turn.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use crate::buffer::{Buf, BufMut, Payload};
use crate::clock::Time;
use crate::config::ConnectConfig;
use crate::worker::{Core, Remote, RemoteError};

/// The user's code: one value per worker, called by that worker's thread only.
///
/// A minimal echo server is `on_accept` returning `Some(())` and `on_data` sending the lease back:
///
/// ```
/// use corelane::{Accepted, Buf, Conn, Cx, Handler};
///
/// struct Echo;
///
/// impl Handler for Echo {
///     type Conn = ();
///     type Message = ();
///
///     fn on_accept(&mut self, _: &mut Cx<'_, Self>, _: Accepted) -> Option<()> {
///         Some(())
///     }
///
///     fn on_data(&mut self, conn: &mut Conn<'_, Self>, data: Buf) {
///         // The buffer that was received is the buffer that is sent. A refusal can only mean that
///         // the connection is closing: its receiving pauses long before its queue is full.
///         let _ = conn.send(data);
///     }
/// }
/// ```
pub trait Handler: Sized {
    /// State of one connection; lives in the connection's slot.
    type Conn;
    /// What other threads may send to this handler.
    type Message: Send + 'static;

    /// Who decides when data is handed over: the worker, by calling [`on_data`](Self::on_data) as it arrives
    /// (`false`, the default), or the handler, by calling [`Conn::take`] when it wants some (`true`). What
    /// was not taken waits with the connection; receiving pauses by itself while
    /// [`high_water`](crate::WorkerConfig::high_water) bytes or 32 pieces wait. In pull mode `on_readable` is
    /// called instead of `on_data` and `on_eof`, a stop closes no connection before its deadline (the handler
    /// does, from [`on_stop`](Self::on_stop) on), and `pause` and `resume` do nothing.
    const PULL: bool = false;

    /// The worker starts: the place for outgoing connections and the first alarm.
    fn on_start(&mut self, cx: &mut Cx<'_, Self>) {
        let _ = cx;
    }

    /// A connection was accepted. Returns its state, or `None` to refuse (close) it. It cannot be acted on
    /// yet ([`Cx::conn`] does not find it): [`on_accepted`](Self::on_accepted) follows for that.
    fn on_accept(&mut self, cx: &mut Cx<'_, Self>, accepted: Accepted) -> Option<Self::Conn>;

    /// An accepted connection is open, right after [`on_accept`](Self::on_accept) made its state: the place
    /// to speak first, or to set its deadline and timers.
    fn on_accepted(&mut self, conn: &mut Conn<'_, Self>) {
        let _ = conn;
    }

    /// A connection made by [`Cx::connect`] is established.
    fn on_connected(&mut self, conn: &mut Conn<'_, Self>) {
        let _ = conn;
    }

    /// Data arrived, in the order in which it was sent, in pieces of the kernel's choice. Never empty.
    fn on_data(&mut self, conn: &mut Conn<'_, Self>, data: Buf);

    /// The peer will send no more. By default the connection is closed when what is queued is sent;
    /// an implementation that does not close it may go on sending.
    fn on_eof(&mut self, conn: &mut Conn<'_, Self>) {
        conn.close();
    }

    /// The connection was congested and is no longer: its unsent bytes fell to the low-water mark.
    fn on_writable(&mut self, conn: &mut Conn<'_, Self>) {
        let _ = conn;
    }

    /// In [pull mode](Self::PULL): there is something to [take](Conn::take), or its end.
    fn on_readable(&mut self, conn: &mut Conn<'_, Self>) {
        let _ = conn;
    }

    /// The kernel has taken everything that was queued for sending.
    fn on_drained(&mut self, conn: &mut Conn<'_, Self>) {
        let _ = conn;
    }

    /// Every callback of this turn is through: the last chance to send something that goes out with
    /// this turn's operations.
    fn on_turn(&mut self, cx: &mut Cx<'_, Self>) {
        let _ = cx;
    }

    /// When `on_turn` wants to be called next, should nothing else happen before: a past time for at
    /// once, `None` for never.
    fn next_turn(&self) -> Option<Time> {
        None
    }

    /// Asked once the handler wished to stop or was stopped: whether it has still something to do before the
    /// deadline, other than its connections.
    fn is_busy(&self) -> bool {
        false
    }

    /// Asked when the worker has stopped: whether that is because the handler failed. The runtime then
    /// reports [`RuntimeError::Worker`](crate::RuntimeError) with this error.
    fn failure(&mut self) -> Option<io::Error> {
        None
    }

    /// The timer set by [`Conn::set_timer`] fired.
    fn on_timer(&mut self, conn: &mut Conn<'_, Self>) {
        let _ = conn;
    }

    /// The alarm set by [`Cx::set_alarm`] fired.
    fn on_alarm(&mut self, cx: &mut Cx<'_, Self>) {
        let _ = cx;
    }

    /// A message from another thread, or another worker.
    fn on_message(&mut self, cx: &mut Cx<'_, Self>, message: Self::Message) {
        let _ = (cx, message);
    }

    /// The connection is over, whoever ended it; called exactly once for every connection whose
    /// state was made. Its id is no longer valid.
    fn on_closed(&mut self, cx: &mut Cx<'_, Self>, closed: Closed<Self::Conn>) {
        let _ = (cx, closed);
    }

    /// The worker was asked to stop. Nothing more is accepted; every connection is closed
    /// gracefully after this call, and what was queued by then is still sent until the deadline.
    fn on_stop(&mut self, cx: &mut Cx<'_, Self>) {
        let _ = cx;
    }
}

/// A connection, named so that it can be kept and sent anywhere: a name that outlives its
/// connection names nothing, never another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnId {
    pub(crate) worker: u16,
    pub(crate) slot: u32,
    pub(crate) generation: u32,
}

impl ConnId {
    /// Index of the worker that holds the connection.
    pub fn worker(self) -> usize {
        self.worker.into()
    }
}

impl fmt::Display for ConnId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.worker, self.slot, self.generation)
    }
}

/// A connection that was just accepted.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Accepted {
    /// Its name, if it is not refused.
    pub id: ConnId,
    /// Which listener it came from, in the order of configuration.
    pub listener: usize,
    /// The peer's address, if [`peer_addresses`](crate::WorkerConfig::peer_addresses) is on.
    pub peer: Option<SocketAddr>,
}

/// A connection that is over.
#[derive(Debug)]
#[non_exhaustive]
pub struct Closed<S> {
    /// The name that it had.
    pub id: ConnId,
    /// Its state.
    pub state: S,
    /// Why it is over.
    pub reason: CloseReason,
}

/// Why a connection is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CloseReason {
    /// The peer finished sending, and this side closed after it.
    Eof,
    /// The peer reset the connection, or closed it while data was on the way to it.
    Reset,
    /// Nothing was received for the idle timeout.
    IdleTimeout,
    /// The deadline set by [`Conn::set_deadline`] passed.
    Deadline,
    /// An outgoing connection was not established in time.
    ConnectTimeout,
    /// A graceful close did not end in time; the connection was reset.
    CloseTimeout,
    /// A limit was exceeded (given by the handler through [`Conn::close_with`]).
    Limit,
    /// This side closed it.
    Local,
    /// The runtime shut down.
    Shutdown,
    /// An outgoing connection could not be made: the system's error code.
    ConnectFailed(i32),
    /// Another error of the system: its code.
    Failed(i32),
}

impl CloseReason {
    /// Number of kinds.
    pub const KINDS: usize = 11;

    /// Name of each kind, by [`index`](Self::index).
    pub const NAMES: [&'static str; Self::KINDS] = [
        "eof",
        "reset",
        "idle_timeout",
        "deadline",
        "connect_timeout",
        "close_timeout",
        "limit",
        "local",
        "shutdown",
        "connect_failed",
        "failed",
    ];

    /// Position of the kind in [`NAMES`](Self::NAMES) and in
    /// [`Snapshot::closed`](crate::Snapshot::closed).
    pub const fn index(self) -> usize {
        match self {
            Self::Eof => 0,
            Self::Reset => 1,
            Self::IdleTimeout => 2,
            Self::Deadline => 3,
            Self::ConnectTimeout => 4,
            Self::CloseTimeout => 5,
            Self::Limit => 6,
            Self::Local => 7,
            Self::Shutdown => 8,
            Self::ConnectFailed(_) => 9,
            Self::Failed(_) => 10,
        }
    }

    /// The reason that an error on an established connection amounts to.
    pub(crate) fn from_error(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionAborted | io::ErrorKind::BrokenPipe => {
                Self::Reset
            }
            _ => Self::Failed(error.raw_os_error().unwrap_or(0)),
        }
    }
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Eof => f.write_str("closed by the peer"),
            Self::Reset => f.write_str("reset by the peer"),
            Self::IdleTimeout => f.write_str("nothing received for the idle timeout"),
            Self::Deadline => f.write_str("deadline passed"),
            Self::ConnectTimeout => f.write_str("not connected in time"),
            Self::CloseTimeout => f.write_str("graceful close not finished in time"),
            Self::Limit => f.write_str("limit exceeded"),
            Self::Local => f.write_str("closed by this side"),
            Self::Shutdown => f.write_str("runtime shut down"),
            Self::ConnectFailed(code) => {
                write!(f, "could not connect: {}", io::Error::from_raw_os_error(*code))
            }
            Self::Failed(code) => write!(f, "failed: {}", io::Error::from_raw_os_error(*code)),
        }
    }
}

/// What [`Conn::take`] found.
#[derive(Debug)]
pub enum Taken {
    /// The next piece; never empty.
    Data(Buf),
    /// Nothing at the moment: `on_readable` follows.
    Nothing,
    /// The peer has finished and everything is taken.
    End,
    /// The connection has failed and everything that came before is taken.
    Failed(CloseReason),
}

/// A payload that was not taken, and why. The payload comes back in the error.
#[derive(Debug)]
pub struct SendError {
    /// What was to be sent.
    pub payload: Payload,
    /// Why it was not taken.
    pub kind: SendErrorKind,
}

/// Why a payload was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendErrorKind {
    /// The connection has [`send_limit`](crate::WorkerConfig::send_limit) or more unsent bytes:
    /// wait for `on_writable`.
    Full,
    /// The connection is not open for sending (finished, closing or failed).
    Closed,
}

impl fmt::Display for SendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            SendErrorKind::Full => f.write_str(
                "the connection's send queue is at its limit: wait for on_writable, or raise send_limit",
            ),
            SendErrorKind::Closed => f.write_str("the connection is not open for sending"),
        }
    }
}

impl std::error::Error for SendError {}

/// Why an outgoing connection was not begun. The state comes back in the error.
#[derive(Debug)]
pub struct ConnectError<S> {
    /// The state that was to be the connection's.
    pub state: S,
    /// Why it was not begun.
    pub kind: ConnectErrorKind,
}

/// Why an outgoing connection was not begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectErrorKind {
    /// The worker holds [`max_connections`](crate::WorkerConfig::max_connections) already.
    WorkerFull,
    /// The runtime holds its total of connections already.
    RuntimeFull,
    /// The worker is stopping.
    Stopping,
    /// The source address is of another family than the target.
    FamilyMismatch,
    /// The timeout is zero or longer than 24 days.
    Timeout,
    /// A socket option is out of range; [`SocketOptions::check`](crate::SocketOptions::check) says which.
    Options,
}

impl fmt::Display for ConnectErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::WorkerFull => "the worker holds max_connections already: raise it or add workers",
            Self::RuntimeFull => "the runtime holds its total of connections already: raise the limit",
            Self::Stopping => "the worker is stopping",
            Self::FamilyMismatch => "source and target address are not of one family",
            Self::Timeout => "the connect timeout must be 1 ms to 24 days",
            Self::Options => "a socket option is out of range: SocketOptions::check says which",
        })
    }
}

/// A worker, seen from inside a callback.
pub struct Cx<'a, H: Handler> {
    pub(crate) core: &'a mut Box<Core<H::Conn, H::Message>>,
}

impl<H: Handler> Cx<'_, H> {
    /// The time of this turn; costs nothing. It does not advance while callbacks run.
    pub fn now(&self) -> Time {
        self.core.now()
    }

    /// Index of this worker.
    pub fn worker(&self) -> usize {
        self.core.index()
    }

    /// Number of workers in the runtime.
    pub fn workers(&self) -> usize {
        self.core.workers()
    }

    /// Connections that this worker holds, those being opened or closed included.
    pub fn connections(&self) -> usize {
        self.core.connections()
    }

    /// A connection of this worker by its name; `None` when it is over or is another worker's.
    pub fn conn(&mut self, id: ConnId) -> Option<Conn<'_, H>> {
        let slot = self.core.find(id)?;
        Some(Conn { core: self.core, slot })
    }

    /// The names of all connections of this worker that are open.
    pub fn ids(&self) -> impl Iterator<Item = ConnId> + '_ {
        self.core.ids()
    }

    /// Begins an outgoing connection with the given state. `on_connected` follows, or `on_closed`
    /// with [`CloseReason::ConnectFailed`] or [`CloseReason::ConnectTimeout`].
    ///
    /// # Errors
    /// [`ConnectError`] when it was not begun; the state comes back in it.
    pub fn connect(
        &mut self,
        config: ConnectConfig,
        state: H::Conn,
    ) -> Result<ConnId, ConnectError<H::Conn>> {
        self.core.connect(config, state)
    }

    /// A preregistered buffer to compose a reply in; `None` when all
    /// [`send_count`](crate::BufferConfig::send_count) are in use (send a `Vec` then).
    pub fn alloc(&mut self) -> Option<BufMut> {
        self.core.alloc()
    }

    /// Sets the worker's one alarm, exact to the kernel's timer: `on_alarm` is called in the first
    /// turn at or after `at`. Replaces an earlier setting.
    pub fn set_alarm(&mut self, at: Time) {
        self.core.set_alarm(Some(at));
    }

    /// Takes the alarm back.
    pub fn clear_alarm(&mut self) {
        self.core.set_alarm(None);
    }

    /// Sends a message to a worker's handler (this one's included), waking it at most once for any
    /// number of messages.
    ///
    /// # Errors
    /// [`RemoteError::Full`] with the message when that worker's mailbox is full.
    pub fn post(&mut self, worker: usize, message: H::Message) -> Result<(), RemoteError<H::Message>> {
        self.core.post(worker, message)
    }

    /// A handle for other threads.
    pub fn remote(&self) -> Remote<H::Message> {
        self.core.remote()
    }

    /// Begins this worker's shutdown, as [`Remote::stop`] does for all.
    pub fn stop(&mut self, deadline: Duration) {
        self.core.request_stop(deadline);
    }
}

/// A connection, seen from inside a callback.
pub struct Conn<'a, H: Handler> {
    pub(crate) core: &'a mut Box<Core<H::Conn, H::Message>>,
    pub(crate) slot: u32,
}

impl<H: Handler> Conn<'_, H> {
    /// Its name.
    pub fn id(&self) -> ConnId {
        self.core.id(self.slot)
    }

    /// Its state.
    pub fn state(&mut self) -> &mut H::Conn {
        self.core.state(self.slot)
    }

    /// The worker.
    pub fn cx(&mut self) -> Cx<'_, H> {
        Cx { core: self.core }
    }

    /// The time of this turn.
    pub fn now(&self) -> Time {
        self.core.now()
    }

    /// Another connection of this worker by its name, for forwarding from one to the other.
    pub fn other(&mut self, id: ConnId) -> Option<Conn<'_, H>> {
        let slot = self.core.find(id)?;
        Some(Conn { core: self.core, slot })
    }

    /// Queues bytes for sending: leases, owned, shared or static bytes, none of them copied. What
    /// is queued in one turn, and what queues up behind a send in flight, goes out together. On an
    /// outgoing connection that is not established yet, bytes wait until it is.
    ///
    /// # Errors
    /// [`SendError`] with the payload when the queue is at its limit or the connection is not open
    /// for sending.
    #[inline]
    pub fn send(&mut self, payload: impl Into<Payload>) -> Result<(), SendError> {
        self.core.send(self.slot, payload.into())
    }

    /// In [pull mode](Handler::PULL): the next piece of what was received.
    pub fn take(&mut self) -> Taken {
        self.core.take(self.slot)
    }

    /// Bytes queued or in flight that the kernel has not taken yet.
    pub fn unsent(&self) -> u64 {
        self.core.unsent(self.slot)
    }

    /// Whether the unsent bytes reached the high-water mark and have not fallen to the low one yet.
    pub fn is_congested(&self) -> bool {
        self.core.is_congested(self.slot)
    }

    /// Stops `on_data` until [`resume`](Self::resume). Data that is on the way already is kept; the
    /// peer is slowed down by TCP.
    pub fn pause(&mut self) {
        self.core.set_paused(self.slot, true);
    }

    /// Ends a [`pause`](Self::pause).
    pub fn resume(&mut self) {
        self.core.set_paused(self.slot, false);
    }

    /// Whether receiving pauses by itself while the connection is congested. On for accepted
    /// connections (unless [`auto_pause`](crate::WorkerConfig::auto_pause) is off), off for outgoing
    /// ones: two ends that both stop reading until the other reads wait for ever.
    pub fn set_auto_pause(&mut self, on: bool) {
        self.core.set_auto_pause(self.slot, on);
    }

    /// Half-close: tells the peer, after what is queued, that nothing more will be sent. Receiving
    /// goes on; the connection closes when the peer finishes too.
    pub fn shutdown_write(&mut self) {
        self.core.shutdown_write(self.slot);
    }

    /// Closes gracefully: sends what is queued, tells the peer, waits for the peer to close (at
    /// most [`close_timeout`](crate::WorkerConfig::close_timeout)) so that it can read everything.
    /// What is received from now on is dropped.
    pub fn close(&mut self) {
        self.core.close(self.slot, CloseReason::Local);
    }

    /// [`close`](Self::close), with the reason that `on_closed` and the counters shall show.
    pub fn close_with(&mut self, reason: CloseReason) {
        self.core.close(self.slot, reason);
    }

    /// Resets the connection; what is queued is dropped.
    pub fn abort(&mut self) {
        self.core.abort(self.slot);
    }

    /// Changes this connection's idle timeout; `None` turns it off. Resolution: 1 ms, at most 24 days.
    pub fn set_idle_timeout(&mut self, timeout: Option<Duration>) {
        self.core.set_idle_timeout(self.slot, timeout);
    }

    /// Closes the connection (by reset, with [`CloseReason::Deadline`]) if it is still there after
    /// `after`, whatever it does; `None` takes that back. Resolution: 1 ms, at most 24 days.
    pub fn set_deadline(&mut self, after: Option<Duration>) {
        self.core.set_deadline(self.slot, after);
    }

    /// Calls `on_timer` after `after`; replaces an earlier setting, `None` takes it back.
    /// Resolution: 1 ms, at most 24 days.
    pub fn set_timer(&mut self, after: Option<Duration>) {
        self.core.set_timer(self.slot, after);
    }
}
