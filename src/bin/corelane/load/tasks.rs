//! The generator as async code: a task for each connection, and one that keeps the schedule.
//!
//! They share the [`Generator`], which knows neither tasks nor callbacks. Its borrow ends before anything is waited
//! for.

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

use corelane::net::{OwnedReadHalf, OwnedWriteHalf, TcpStream};
use corelane::sync::channel::Receiver;
use corelane::time::{now, sleep_until};
use corelane::{Buf, CloseReason, ConnId, ConnectConfig, Time, task};

use super::door::{Door, Lane};
use super::handler::{Command, Generator, NEVER, Peer};

/// An open connection.
struct Open {
    peer: Peer,
    to: OwnedWriteHalf,
    /// When the generator wants to be asked which replies are overdue.
    timer: Time,
    /// Its task, while that waits.
    waiting: Option<Waker>,
}

/// What the tasks of a worker share.
struct Shared {
    generator: RefCell<Generator>,
    open: RefCell<HashMap<ConnId, Open>>,
    alarm: RefCell<Option<Time>>,
    is_over: RefCell<bool>,
}

/// A worker's tasks, as the generator acts on them.
struct TaskLane<'a> {
    shared: &'a Rc<Shared>,
    open: std::cell::RefMut<'a, HashMap<ConnId, Open>>,
}

/// A connection, as the generator acts on it.
struct TaskDoor<'a>(&'a mut Open);

impl Door for TaskDoor<'_> {
    fn now(&self) -> Time {
        now()
    }

    fn peer(&mut self) -> &mut Peer {
        &mut self.0.peer
    }

    fn send(&mut self, bytes: &'static [u8]) -> bool {
        self.0.to.try_send(bytes).is_ok()
    }

    fn set_timer(&mut self, after: Duration) {
        self.0.timer = now() + after;
        if let Some(waiting) = self.0.waiting.take() {
            waiting.wake();
        }
    }

    fn abort(&mut self) {
        self.0.to.abort();
    }
}

impl Lane for TaskLane<'_> {
    type Door<'a>
        = TaskDoor<'a>
    where
        Self: 'a;

    fn now(&self) -> Time {
        now()
    }

    fn door(&mut self, id: ConnId) -> Option<TaskDoor<'_>> {
        self.open.get_mut(&id).map(TaskDoor)
    }

    fn connect(&mut self, config: ConnectConfig, peer: Peer) -> bool {
        drop(task::spawn(connection(self.shared.clone(), config, peer)));
        true
    }

    fn set_alarm(&mut self, at: Option<Time>) {
        *self.shared.alarm.borrow_mut() = at;
    }
}

fn lane(shared: &Rc<Shared>) -> TaskLane<'_> {
    TaskLane { shared, open: shared.open.borrow_mut() }
}

/// Runs a worker's generator until the runtime stops.
pub async fn run(mut generator: Generator, commands: Receiver<Command>) {
    generator.start(task::workers());
    let shared = Rc::new(Shared {
        generator: RefCell::new(generator),
        open: RefCell::default(),
        alarm: RefCell::default(),
        is_over: RefCell::new(false),
    });
    let mut stopped = pin!(task::stopped());
    loop {
        let alarm = shared.alarm.borrow().unwrap_or(NEVER);
        let mut due = pin!(sleep_until(alarm));
        let mut command = pin!(commands.recv());
        let what = poll_fn(|cx| {
            if stopped.as_mut().poll(cx).is_ready() {
                return Poll::Ready(None);
            }
            if let Poll::Ready(command) = command.as_mut().poll(cx) {
                // The conductor is gone only when the runtime is.
                return Poll::Ready(command.ok().map(Some));
            }
            due.as_mut().poll(cx).map(|()| Some(None))
        });
        match what.await {
            None => break,
            Some(Some(command)) => shared.generator.borrow_mut().command(&mut lane(&shared), command),
            Some(None) => shared.generator.borrow_mut().advance(&mut lane(&shared)),
        }
    }
    // Every connection is closed by its own task.
    *shared.is_over.borrow_mut() = true;
    for open in shared.open.borrow_mut().values_mut() {
        if let Some(waiting) = open.waiting.take() {
            waiting.wake();
        }
    }
}

/// What a connection's task waits for.
enum Next {
    Received(io::Result<Option<Buf>>),
    Timer,
    Over,
}

async fn connection(shared: Rc<Shared>, config: ConnectConfig, mut peer: Peer) {
    let stream = match TcpStream::connect(config).await {
        Ok(stream) => stream,
        Err(error) => {
            shared.generator.borrow_mut().closed(peer, refused(&error), now());
            return;
        }
    };
    let id = stream.id();
    let (mut from, to) = stream.into_split();
    shared.generator.borrow_mut().connected(&mut peer, id, now());
    let open = Open { peer, to, timer: NEVER, waiting: None };
    shared.open.borrow_mut().insert(id, open);
    let reason = loop {
        match next(&shared, id, &mut from).await {
            Next::Received(Ok(Some(data))) => {
                let mut lane = lane(&shared);
                let Some(mut door) = lane.door(id) else { break CloseReason::Local };
                shared.generator.borrow_mut().verify(&mut door, &data);
                shared.generator.borrow_mut().finish_if_drained(now());
            }
            Next::Received(Ok(None)) => break CloseReason::Eof,
            Next::Received(Err(_)) => break from.close_reason().unwrap_or(CloseReason::Reset),
            Next::Timer => {
                let mut lane = lane(&shared);
                let Some(mut door) = lane.door(id) else { break CloseReason::Local };
                door.0.timer = NEVER;
                shared.generator.borrow_mut().expire(&mut door);
                shared.generator.borrow_mut().finish_if_drained(now());
            }
            Next::Over => break CloseReason::Shutdown,
        }
    };
    let closed = shared.open.borrow_mut().remove(&id);
    if let Some(open) = closed {
        shared.generator.borrow_mut().closed(open.peer, reason, now());
    }
}

async fn next(shared: &Shared, id: ConnId, from: &mut OwnedReadHalf) -> Next {
    let mut timer = pin!(sleep_until(NEVER));
    poll_fn(|cx| {
        if let Poll::Ready(received) = from.poll_recv(cx) {
            return Poll::Ready(Next::Received(received));
        }
        if *shared.is_over.borrow() {
            return Poll::Ready(Next::Over);
        }
        let mut open = shared.open.borrow_mut();
        let Some(open) = open.get_mut(&id) else { return Poll::Ready(Next::Over) };
        open.waiting = Some(cx.waker().clone());
        if timer.deadline() != open.timer {
            timer.reset(open.timer);
        }
        if open.timer == NEVER {
            return Poll::Pending;
        }
        timer.as_mut().poll(cx).map(|()| Next::Timer)
    })
    .await
}

/// Why a connection was not established, as callbacks would be told.
fn refused(error: &io::Error) -> CloseReason {
    match (error.raw_os_error(), error.kind()) {
        (Some(code), _) => CloseReason::ConnectFailed(code),
        (None, io::ErrorKind::TimedOut) => CloseReason::ConnectTimeout,
        (None, io::ErrorKind::ConnectionReset) => CloseReason::Reset,
        (None, io::ErrorKind::ConnectionAborted) => CloseReason::Shutdown,
        _ => CloseReason::ConnectFailed(0),
    }
}
