//! The async tier's handler: from callbacks to wakes, and once a turn the tasks that were woken.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::buffer::Buf;
use crate::clock::Time;
use crate::handler::{Accepted, Closed, Conn, Cx, Handler};
use crate::worker::Request;

use super::blocking::Pool;
use super::hub::Hub;
use super::join::{JoinHandle, spawn};
use super::link::{Life, Link};
use super::message::{Kind, Message};

/// What a worker's main future comes to.
type Outcome = Result<(), Box<dyn std::error::Error + Send + Sync>>;
/// Makes a worker's main future, inside that worker.
type Main = Box<dyn FnOnce() -> Pin<Box<dyn Future<Output = Outcome>>>>;

/// A handler that runs tasks.
pub(crate) struct TaskHandler {
    main: Option<Main>,
    /// Where the listeners listen that the worker is started with.
    listeners: Vec<SocketAddr>,
    /// Stop the runtime when the main future has ended, giving connections so long.
    until_main: Option<Duration>,
    hub: Option<Rc<Hub>>,
    root: Option<JoinHandle<Outcome>>,
    failure: Option<io::Error>,
    pool: Arc<Pool>,
}

impl TaskHandler {
    /// A handler that runs `main` first; it goes on running other tasks when that has ended.
    pub(crate) fn new<F>(bound: &[SocketAddr], pool: Arc<Pool>, main: impl FnOnce() -> F + 'static) -> Self
    where
        F: Future<Output = Outcome> + 'static,
    {
        let main: Main = Box::new(move || Box::pin(main()));
        let mut handler = Self::idle(bound, pool);
        handler.main = Some(main);
        handler
    }

    /// A handler that only runs what others spawn on it.
    pub(crate) fn idle(bound: &[SocketAddr], pool: Arc<Pool>) -> Self {
        let listeners = bound.to_vec();
        Self { main: None, listeners, until_main: None, hub: None, root: None, failure: None, pool }
    }

    /// Stops the runtime when the main future has ended.
    pub(crate) fn until_main(mut self, deadline: Duration) -> Self {
        self.until_main = Some(deadline);
        self
    }

    fn hub(&self) -> &Rc<Hub> {
        self.hub.as_ref().expect("the worker has started")
    }

    fn wake_reader(&self, link: &Link) {
        self.hub().woken.borrow_mut().extend(link.reader.take());
    }

    fn wake_writer(&self, link: &Link) {
        self.hub().woken.borrow_mut().extend(link.writer.take());
    }

    /// Looks whether the main future has ended, and with what.
    fn look_at_main(&mut self, cx: &mut Cx<'_, Self>) {
        if !self.root.as_ref().is_some_and(JoinHandle::is_finished) {
            return;
        }
        let Some(outcome) = self.root.take().and_then(JoinHandle::into_outcome) else { return };
        match outcome {
            Ok(Ok(())) => {
                if let Some(deadline) = self.until_main {
                    cx.remote().stop(deadline);
                }
            }
            Ok(Err(error)) => {
                self.failure = Some(io::Error::other(error));
                cx.remote().stop(Duration::ZERO);
            }
            // As with any other handler: the worker's thread ends with it, and the runtime says so.
            Err(error) => {
                if let Ok(panic) = error.try_into_panic() {
                    std::panic::resume_unwind(panic);
                }
            }
        }
    }
}

impl Handler for TaskHandler {
    type Conn = Rc<Link>;
    type Message = Message;
    const PULL: bool = true;

    fn on_start(&mut self, cx: &mut Cx<'_, Self>) {
        let hub = Hub::new(cx, &self.pool);
        self.hub = Some(hub.clone());
        hub.listeners.start(&self.listeners);
        if let Some(main) = self.main.take() {
            self.root = Some(hub.enter(cx, |hub| spawn(hub, main())));
        }
    }

    fn on_accept(&mut self, cx: &mut Cx<'_, Self>, accepted: Accepted) -> Option<Rc<Link>> {
        let link = Rc::new(Link::new(accepted.id, Life::Open, accepted.peer));
        link.ends_on_stop.set(true);
        let listener = self.hub().listeners.get(accepted.listener)?;
        self.hub().woken.borrow_mut().extend(listener.queue(link.clone()));
        if listener.must_pause() {
            cx.core.requests.push(Request::Accepting { listener: accepted.listener, on: false });
        }
        Some(link)
    }

    fn on_accepted(&mut self, conn: &mut Conn<'_, Self>) {
        // Tasks decide when they receive and how much they send.
        conn.set_auto_pause(false);
    }

    fn on_connected(&mut self, conn: &mut Conn<'_, Self>) {
        let link = conn.state().clone();
        link.life.set(Life::Open);
        self.wake_writer(&link);
    }

    fn on_data(&mut self, _: &mut Conn<'_, Self>, data: Buf) {
        debug_assert!(false, "{data:?} pushed to a handler that pulls");
    }

    #[inline]
    fn on_readable(&mut self, conn: &mut Conn<'_, Self>) {
        if let Some(waker) = conn.state().reader.take() {
            self.hub().woken.borrow_mut().push(waker);
        }
    }

    fn on_writable(&mut self, conn: &mut Conn<'_, Self>) {
        if let Some(waker) = conn.state().writer.take() {
            self.hub().woken.borrow_mut().push(waker);
        }
    }

    #[inline]
    fn on_drained(&mut self, conn: &mut Conn<'_, Self>) {
        if let Some(waker) = conn.state().writer.take() {
            self.hub().woken.borrow_mut().push(waker);
        }
    }

    fn on_message(&mut self, cx: &mut Cx<'_, Self>, message: Message) {
        let hub = self.hub().clone();
        match message.0 {
            Kind::Wake(name) => {
                hub.counters.remote_wakes.add(1);
                hub.tasks.make_ready(name);
            }
            Kind::Begin(order) => hub.enter(cx, |hub| order.begin(hub)),
            Kind::Run(run) => hub.enter(cx, |_| run()),
        }
    }

    fn on_closed(&mut self, cx: &mut Cx<'_, Self>, closed: Closed<Rc<Link>>) {
        let link = closed.state;
        if link.is_datagram.get() {
            let hub = self.hub().clone();
            hub.enter(cx, |hub| hub.datagrams.over(closed.id, closed.reason));
        }
        link.life.set(Life::Over(closed.reason));
        self.wake_reader(&link);
        self.wake_writer(&link);
        if let Some(rare) = link.if_rare() {
            self.hub().woken.borrow_mut().extend(rare.questions.end());
        }
    }

    fn on_stop(&mut self, cx: &mut Cx<'_, Self>) {
        let hub = self.hub().clone();
        hub.enter(cx, |hub| hub.stop());
    }

    fn on_turn(&mut self, cx: &mut Cx<'_, Self>) {
        let Some(hub) = &self.hub else { return };
        if hub.is_stopping() {
            cx.core.tasks_left = hub.tasks.len() as u64;
            cx.core.blocking_left = hub.blocking.unfinished() as u64;
        }
        hub.call_waiting(cx.core);
        let now = cx.now();
        let due = hub.timers.next().is_some_and(|at| at <= now);
        let over = cx.core.over && !hub.over_token().is_cancelled();
        if !over && !due && !hub.has_work() && cx.core.answers.is_empty() && !hub.is_told_to_poll_all() {
            return;
        }
        let hub = hub.clone();
        let budget = cx.core.config.turn_budget;
        hub.enter(cx, |hub| {
            if over {
                hub.over_token().cancel();
            }
            hub.turn(budget);
        });
        if hub.is_stopping() {
            cx.core.tasks_left = hub.tasks.len() as u64;
        }
        // What tasks let go of is for those who wait for it, in the next turn.
        hub.call_waiting(cx.core);
        self.look_at_main(cx);
    }

    fn next_turn(&self) -> Option<Time> {
        let hub = self.hub.as_ref()?;
        if hub.has_work() { Some(Time::ZERO) } else { hub.timers.next() }
    }

    fn is_busy(&self) -> bool {
        self.root.is_some() || self.hub.as_ref().is_some_and(|hub| hub.blocking.unfinished() > 0)
    }

    fn failure(&mut self) -> Option<io::Error> {
        self.failure.take()
    }
}

impl Drop for TaskHandler {
    fn drop(&mut self) {
        drop(self.root.take());
        if let Some(hub) = self.hub.take() {
            hub.close();
        }
    }
}
