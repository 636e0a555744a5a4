//! A handler made of closures, so that a test shows what its server does where it does it.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use corelane::{Accepted, Buf, CloseReason, Closed, Conn, ConnId, Cx, Handler, Remote};

use super::PATIENCE;

type OnCx<S> = Box<dyn FnMut(&mut Cx<'_, Hooks<S>>)>;
type OnConn<S> = Box<dyn FnMut(&mut Conn<'_, Hooks<S>>)>;
type OnAccept<S> = Box<dyn FnMut(&mut Cx<'_, Hooks<S>>, Accepted) -> Option<S>>;
type OnData<S> = Box<dyn FnMut(&mut Conn<'_, Hooks<S>>, Buf)>;
type OnClosed<S> = Box<dyn FnMut(&mut Cx<'_, Hooks<S>>, Closed<S>)>;

/// A handler made of closures. What is not given does what the trait does by default; data that
/// nobody asked for is dropped.
pub struct Hooks<S: 'static = ()> {
    start: OnCx<S>,
    accept: OnAccept<S>,
    connected: OnConn<S>,
    data: OnData<S>,
    eof: OnConn<S>,
    writable: OnConn<S>,
    timer: OnConn<S>,
    alarm: OnCx<S>,
    closed: OnClosed<S>,
    stop: OnCx<S>,
}

/// Work for a worker's thread: the message type of [`Hooks`].
pub struct Task<S: 'static>(Act<S>);

type Act<S> = Box<dyn FnOnce(&mut Cx<'_, Hooks<S>>) + Send>;

impl<S: 'static> std::fmt::Debug for Task<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Task")
    }
}

macro_rules! setters {
    ($($name:ident: ($($arg:ty),*);)*) => {
        $(pub fn $name(mut self, act: impl FnMut($($arg),*) + 'static) -> Self {
            self.$name = Box::new(act);
            self
        })*
    };
}

impl<S: 'static> Hooks<S> {
    /// A handler that accepts everybody, with states that `state` makes.
    pub fn new(mut state: impl FnMut() -> S + 'static) -> Self {
        Self {
            start: Box::new(|_| {}),
            accept: Box::new(move |_, _| Some(state())),
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

    pub fn accept(mut self, act: impl FnMut(&mut Cx<'_, Self>, Accepted) -> Option<S> + 'static) -> Self {
        self.accept = Box::new(act);
        self
    }

    setters! {
        start: (&mut Cx<'_, Self>);
        connected: (&mut Conn<'_, Self>);
        data: (&mut Conn<'_, Self>, Buf);
        eof: (&mut Conn<'_, Self>);
        writable: (&mut Conn<'_, Self>);
        timer: (&mut Conn<'_, Self>);
        alarm: (&mut Cx<'_, Self>);
        closed: (&mut Cx<'_, Self>, Closed<S>);
        stop: (&mut Cx<'_, Self>);
    }
}

impl Hooks {
    /// A handler that does nothing but accept everybody.
    pub fn plain() -> Self {
        Self::new(|| ())
    }

    /// A handler that sends everything back.
    pub fn echo() -> Self {
        Self::plain().data(|conn, data| drop(conn.send(data)))
    }

    /// A handler that tells a test what happens to its connections.
    pub fn telling(seen: &Sender<Seen>) -> Self {
        let tell = |seen: &Sender<Seen>| {
            let seen = seen.clone();
            // A test that is over no longer listens.
            move |what| drop(seen.send(what))
        };
        let (accepted, connected, data) = (tell(seen), tell(seen), tell(seen));
        let (eof, writable, timer, closed) = (tell(seen), tell(seen), tell(seen), tell(seen));
        Self::plain()
            .accept(move |_, accept| {
                accepted(Seen::Accepted(accept.id));
                Some(())
            })
            .connected(move |conn| connected(Seen::Connected(conn.id())))
            .data(move |conn, bytes| data(Seen::Data(conn.id(), bytes.to_vec())))
            .eof(move |conn| {
                eof(Seen::Eof(conn.id()));
                conn.close();
            })
            .writable(move |conn| writable(Seen::Writable(conn.id())))
            .timer(move |conn| timer(Seen::Timer(conn.id())))
            .closed(move |_, end| closed(Seen::Closed(end.id, end.reason)))
    }
}

impl<S: 'static> Handler for Hooks<S> {
    type Conn = S;
    type Message = Task<S>;

    fn on_start(&mut self, cx: &mut Cx<'_, Self>) {
        (self.start)(cx);
    }

    fn on_accept(&mut self, cx: &mut Cx<'_, Self>, accepted: Accepted) -> Option<S> {
        (self.accept)(cx, accepted)
    }

    fn on_connected(&mut self, conn: &mut Conn<'_, Self>) {
        (self.connected)(conn);
    }

    fn on_data(&mut self, conn: &mut Conn<'_, Self>, data: Buf) {
        (self.data)(conn, data);
    }

    fn on_eof(&mut self, conn: &mut Conn<'_, Self>) {
        (self.eof)(conn);
    }

    fn on_writable(&mut self, conn: &mut Conn<'_, Self>) {
        (self.writable)(conn);
    }

    fn on_timer(&mut self, conn: &mut Conn<'_, Self>) {
        (self.timer)(conn);
    }

    fn on_alarm(&mut self, cx: &mut Cx<'_, Self>) {
        (self.alarm)(cx);
    }

    fn on_message(&mut self, cx: &mut Cx<'_, Self>, Task(act): Task<S>) {
        act(cx);
    }

    fn on_closed(&mut self, cx: &mut Cx<'_, Self>, closed: Closed<S>) {
        (self.closed)(cx, closed);
    }

    fn on_stop(&mut self, cx: &mut Cx<'_, Self>) {
        (self.stop)(cx);
    }
}

/// Has a worker's thread do something.
pub fn tell<S>(
    remote: &Remote<Task<S>>,
    worker: usize,
    act: impl FnOnce(&mut Cx<'_, Hooks<S>>) + Send + 'static,
) {
    remote.post(worker, Task(Box::new(act))).expect("a worker that takes messages");
}

/// A task to be posted by the test itself.
pub fn task<S>(act: impl FnOnce(&mut Cx<'_, Hooks<S>>) + Send + 'static) -> Task<S> {
    Task(Box::new(act))
}

/// Has a worker's thread do something, and waits for what it gives.
pub fn ask<S, T: Send + 'static>(
    remote: &Remote<Task<S>>,
    worker: usize,
    act: impl FnOnce(&mut Cx<'_, Hooks<S>>) -> T + Send + 'static,
) -> T {
    let (answer, answers) = channel();
    tell(remote, worker, move |cx| drop(answer.send(act(cx))));
    answers.recv_timeout(PATIENCE).expect("an answer of the worker")
}

/// Has a worker's thread do something with a connection that must be there.
pub fn on_conn<S, T: Send + 'static>(
    remote: &Remote<Task<S>>,
    id: ConnId,
    act: impl FnOnce(&mut Conn<'_, Hooks<S>>) -> T + Send + 'static,
) -> T {
    ask(remote, id.worker(), move |cx| act(&mut cx.conn(id).expect("the connection is open")))
}

/// What a telling handler tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    Accepted(ConnId),
    Connected(ConnId),
    Data(ConnId, Vec<u8>),
    Eof(ConnId),
    Writable(ConnId),
    Timer(ConnId),
    Closed(ConnId, CloseReason),
}

/// The next thing that is told.
pub fn next(seen: &Receiver<Seen>) -> Seen {
    seen.recv_timeout(PATIENCE).expect("something to happen")
}

/// The next thing that is told, other than that a connection became writable again.
pub fn next_but_writable(seen: &Receiver<Seen>) -> Seen {
    loop {
        match next(seen) {
            Seen::Writable(_) => {}
            other => return other,
        }
    }
}

/// The name of the next connection that is accepted (or established); nothing else may happen before.
pub fn opened(seen: &Receiver<Seen>) -> ConnId {
    match next(seen) {
        Seen::Accepted(id) | Seen::Connected(id) => id,
        other => panic!("a new connection expected, not {other:?}"),
    }
}

/// Waits for the next end of a connection, dropping what is told before it.
pub fn closed(seen: &Receiver<Seen>) -> (ConnId, CloseReason) {
    loop {
        if let Seen::Closed(id, reason) = next(seen) {
            return (id, reason);
        }
    }
}

/// Nothing may be told for this long.
pub fn silent(seen: &Receiver<Seen>, time: Duration) {
    match seen.recv_timeout(time) {
        Err(RecvTimeoutError::Timeout) => {}
        other => panic!("nothing should happen, but: {other:?}"),
    }
}
