//! The server's side of a scenario: a handler made of closures, and the log of what happened to it.
//!
//! Whatever a scenario is about, every callback is checked here against what is true of all of them: a name
//! means one connection, nothing follows its end, data is never empty and never follows the end of the
//! stream, and one worker is one thread.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use corelane::{
    Accepted, Buf, CloseReason, Closed, Conn, ConnId, ConnectConfig, ConnectErrorKind, Cx, Handler, Time,
};

/// What a scenario may keep with a connection.
#[derive(Default)]
pub struct State {
    /// Its number among all that the server had, in the order of their beginning.
    pub serial: usize,
    pub bytes: Vec<u8>,
    pub count: usize,
    pub kept: Vec<Buf>,
}

/// Something that happened to a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Begun,
    Connected,
    Data(usize),
    Eof,
    Writable,
    Timer,
    Closed(CloseReason),
}

/// One connection, from its beginning to its end.
#[derive(Clone, Debug, Default)]
pub struct Life {
    pub id: Option<ConnId>,
    /// Which listener it came from; `None` for an outgoing one.
    pub listener: Option<usize>,
    pub peer: Option<SocketAddr>,
    pub begun: Time,
    pub data: Vec<u8>,
    pub steps: Vec<(Time, Step)>,
    pub eof: bool,
    pub closed: Option<CloseReason>,
}

impl Life {
    /// When something happened for the first time.
    pub fn when(&self, step: Step) -> Option<Time> {
        self.steps.iter().find(|(_, what)| *what == step).map(|(at, _)| *at)
    }

    pub fn count(&self, step: Step) -> usize {
        self.steps.iter().filter(|(_, what)| *what == step).count()
    }

    pub fn has(&self, step: Step) -> bool {
        self.count(step) > 0
    }
}

#[derive(Default)]
struct Inner {
    lives: Vec<Life>,
    /// States that were made for connections which were then not begun.
    void: usize,
    ids: HashSet<ConnId>,
    /// In the order of their firing.
    timers: Vec<usize>,
    notes: Vec<(Time, u64)>,
}

/// What happened, readable from the script while workers run.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Inner>>);

impl Log {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A callback that panicked has its own report; the log is whole all the same.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connections begun so far.
    pub fn begun(&self) -> usize {
        self.lock().lives.len()
    }

    /// Connections that ended.
    pub fn ended(&self) -> usize {
        self.lock().lives.iter().filter(|life| life.closed.is_some()).count()
    }

    /// Connections that should end: those begun, without those that were refused to begin.
    pub fn all_ended(&self) -> bool {
        let inner = self.lock();
        inner.lives.iter().filter(|life| life.closed.is_none()).count() == inner.void
    }

    /// Looks at one connection's life.
    pub fn life<R>(&self, serial: usize, look: impl FnOnce(&Life) -> R) -> R {
        look(&self.lock().lives[serial])
    }

    /// Everything at once, for what concerns several.
    pub fn lives<R>(&self, look: impl FnOnce(&[Life]) -> R) -> R {
        look(&self.lock().lives)
    }

    pub fn id(&self, serial: usize) -> ConnId {
        self.life(serial, |life| life.id.expect("it was begun"))
    }

    pub fn closed(&self, serial: usize) -> Option<CloseReason> {
        self.life(serial, |life| life.closed)
    }

    pub fn data(&self, serial: usize) -> Vec<u8> {
        self.life(serial, |life| life.data.clone())
    }

    pub fn data_len(&self, serial: usize) -> usize {
        self.life(serial, |life| life.data.len())
    }

    pub fn has(&self, serial: usize, step: Step) -> bool {
        self.life(serial, |life| life.has(step))
    }

    /// Serials in the order in which their timers fired.
    pub fn timers(&self) -> Vec<usize> {
        self.lock().timers.clone()
    }

    /// A mark of the scenario's own.
    pub fn note(&self, at: Time, what: u64) {
        self.lock().notes.push((at, what));
    }

    pub fn notes(&self) -> Vec<(Time, u64)> {
        self.lock().notes.clone()
    }

    /// The marks without their times.
    pub fn noted(&self) -> Vec<u64> {
        self.lock().notes.iter().map(|(_, what)| *what).collect()
    }

    fn begin(&self, at: Time, accepted: Option<&Accepted>) -> State {
        let mut inner = self.lock();
        let serial = inner.lives.len();
        let (id, listener, peer) =
            accepted.map_or((None, None, None), |a| (Some(a.id), Some(a.listener), a.peer));
        let steps = vec![(at, Step::Begun)];
        inner.lives.push(Life { id, listener, peer, begun: at, steps, ..Life::default() });
        if let Some(id) = id {
            assert!(inner.ids.insert(id), "{id} was another connection's name before");
        }
        State { serial, ..State::default() }
    }

    fn named(&self, serial: usize, id: ConnId) {
        let mut inner = self.lock();
        assert!(inner.ids.insert(id), "{id} was another connection's name before");
        inner.lives[serial].id = Some(id);
    }

    fn step(&self, serial: usize, id: ConnId, at: Time, step: Step) {
        let mut inner = self.lock();
        if step == Step::Timer {
            inner.timers.push(serial);
        }
        let life = &mut inner.lives[serial];
        assert_eq!(life.id, Some(id), "a callback reached another connection's state");
        assert_eq!(life.closed, None, "{step:?} after the end of {id}");
        match step {
            Step::Eof => assert!(!std::mem::replace(&mut life.eof, true), "two ends of one stream"),
            Step::Data(len) => {
                assert!(len > 0, "data is never empty");
                assert!(!life.eof, "data after the end of the stream");
            }
            Step::Closed(reason) => life.closed = Some(reason),
            Step::Begun | Step::Connected | Step::Writable | Step::Timer => {}
        }
        life.steps.push((at, step));
    }

    fn data_arrived(&self, serial: usize, id: ConnId, at: Time, data: &[u8]) {
        self.step(serial, id, at, Step::Data(data.len()));
        self.lock().lives[serial].data.extend_from_slice(data);
    }

    /// Begins an outgoing connection from inside a callback; returns its serial.
    pub fn connect(&self, cx: &mut Cx<'_, Script>, config: ConnectConfig) -> Result<usize, ConnectErrorKind> {
        let state = self.begin(cx.now(), None);
        let serial = state.serial;
        match cx.connect(config, state) {
            Ok(id) => {
                self.named(serial, id);
                Ok(serial)
            }
            Err(refused) => {
                assert_eq!(refused.state.serial, serial, "another state came back");
                self.lock().void += 1;
                Err(refused.kind)
            }
        }
    }
}

impl std::fmt::Display for Log {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let inner = self.lock();
        write!(f, "{} connections begun", inner.lives.len())?;
        for (serial, life) in inner.lives.iter().enumerate().rev().take(12) {
            let last = life.steps.last().map(|(_, step)| step);
            write!(f, "\n  #{serial}: {} bytes, last {last:?}, closed {:?}", life.data.len(), life.closed)?;
        }
        Ok(())
    }
}

type OnCx = Box<dyn FnMut(&mut Cx<'_, Script>)>;
type OnConn = Box<dyn FnMut(&mut Conn<'_, Script>)>;
type OnAccept = Box<dyn FnMut(&mut Cx<'_, Script>, &Accepted) -> bool>;
type OnData = Box<dyn FnMut(&mut Conn<'_, Script>, Buf)>;
type OnClosed = Box<dyn FnMut(&mut Cx<'_, Script>, &Closed<State>)>;

/// A handler made of closures. What is not given does what the trait does by default; data that nobody
/// asked for is logged and dropped.
pub struct Script {
    log: Log,
    thread: Option<ThreadId>,
    start: OnCx,
    accept: OnAccept,
    accepted: OnConn,
    connected: OnConn,
    data: OnData,
    eof: OnConn,
    writable: OnConn,
    timer: OnConn,
    alarm: OnCx,
    closed: OnClosed,
    stop: OnCx,
}

/// Work for a worker's thread.
pub struct Task(Act);

type Act = Box<dyn FnOnce(&mut Cx<'_, Script>) + Send>;

impl Task {
    pub fn new(act: impl FnOnce(&mut Cx<'_, Script>) + Send + 'static) -> Self {
        Self(Box::new(act))
    }
}

impl std::fmt::Debug for Task {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Task")
    }
}

macro_rules! setters {
    ($($(#[$doc:meta])* $name:ident: ($($arg:ty),*) $(-> $result:ty)?;)*) => {
        $($(#[$doc])* pub fn $name(mut self, act: impl FnMut($($arg),*) $(-> $result)? + 'static) -> Self {
            self.$name = Box::new(act);
            self
        })*
    };
}

impl Script {
    pub fn new(log: &Log) -> Self {
        Self {
            log: log.clone(),
            thread: None,
            start: Box::new(|_| {}),
            accept: Box::new(|_, _| true),
            accepted: Box::new(|_| {}),
            connected: Box::new(|_| {}),
            data: Box::new(|_, _| {}),
            eof: Box::new(|conn| conn.close()),
            writable: Box::new(|_| {}),
            timer: Box::new(|_| {}),
            alarm: Box::new(|_| {}),
            closed: Box::new(|_, _| {}),
            stop: Box::new(|_| {}),
        }
    }

    /// Sends back what arrives, until the connection no longer takes it.
    pub fn echo(self) -> Self {
        // A connection that is closing takes nothing; its peer is told by the close.
        self.data(|conn, data| drop(conn.send(data)))
    }

    setters! {
        start: (&mut Cx<'_, Self>);
        /// Says whether the connection is taken.
        accept: (&mut Cx<'_, Self>, &Accepted) -> bool;
        accepted: (&mut Conn<'_, Self>);
        connected: (&mut Conn<'_, Self>);
        data: (&mut Conn<'_, Self>, Buf);
        eof: (&mut Conn<'_, Self>);
        writable: (&mut Conn<'_, Self>);
        timer: (&mut Conn<'_, Self>);
        alarm: (&mut Cx<'_, Self>);
        closed: (&mut Cx<'_, Self>, &Closed<State>);
        stop: (&mut Cx<'_, Self>);
    }

    /// One worker is one thread, whatever calls.
    fn on_thread(&mut self) {
        let this = std::thread::current().id();
        assert_eq!(*self.thread.get_or_insert(this), this, "a callback on another thread");
    }

    fn step(&mut self, conn: &mut Conn<'_, Self>, step: Step) {
        self.on_thread();
        let serial = conn.state().serial;
        self.log.step(serial, conn.id(), conn.now(), step);
    }
}

impl Handler for Script {
    type Conn = State;
    type Message = Task;

    fn on_start(&mut self, cx: &mut Cx<'_, Self>) {
        self.on_thread();
        (self.start)(cx);
    }

    fn on_accept(&mut self, cx: &mut Cx<'_, Self>, accepted: Accepted) -> Option<State> {
        self.on_thread();
        (self.accept)(cx, &accepted).then(|| self.log.begin(cx.now(), Some(&accepted)))
    }

    fn on_accepted(&mut self, conn: &mut Conn<'_, Self>) {
        self.on_thread();
        (self.accepted)(conn);
    }

    fn on_connected(&mut self, conn: &mut Conn<'_, Self>) {
        self.step(conn, Step::Connected);
        (self.connected)(conn);
    }

    fn on_data(&mut self, conn: &mut Conn<'_, Self>, data: Buf) {
        self.on_thread();
        let serial = conn.state().serial;
        self.log.data_arrived(serial, conn.id(), conn.now(), &data);
        (self.data)(conn, data);
    }

    fn on_eof(&mut self, conn: &mut Conn<'_, Self>) {
        self.step(conn, Step::Eof);
        (self.eof)(conn);
    }

    fn on_writable(&mut self, conn: &mut Conn<'_, Self>) {
        self.step(conn, Step::Writable);
        (self.writable)(conn);
    }

    fn on_timer(&mut self, conn: &mut Conn<'_, Self>) {
        self.step(conn, Step::Timer);
        (self.timer)(conn);
    }

    fn on_alarm(&mut self, cx: &mut Cx<'_, Self>) {
        self.on_thread();
        (self.alarm)(cx);
    }

    fn on_message(&mut self, cx: &mut Cx<'_, Self>, Task(act): Task) {
        self.on_thread();
        act(cx);
    }

    fn on_closed(&mut self, cx: &mut Cx<'_, Self>, closed: Closed<State>) {
        self.on_thread();
        assert!(cx.conn(closed.id).is_none(), "the name of a closed connection names nothing");
        (self.closed)(cx, &closed);
        // Last, so that whoever waits for it finds everything done.
        self.log.step(closed.state.serial, closed.id, cx.now(), Step::Closed(closed.reason));
    }

    fn on_stop(&mut self, cx: &mut Cx<'_, Self>) {
        self.on_thread();
        (self.stop)(cx);
    }
}

/// So many milliseconds.
pub const fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}
