//! Listeners as the async tier knows them: who was accepted and waits for a task, and who waits for them.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::driver::{Address, ListenConfig};
use crate::worker::Request;

use super::hub::Hub;
use super::link::{Link, Waiter};

/// Accepted connections that wait for a task until no more are accepted: the others wait in the kernel's queue.
const MOST_PENDING: usize = 64;
/// … and that wait when accepting goes on.
const FEW_PENDING: usize = 16;

/// A listener of the worker.
pub(crate) struct Accepting {
    index: usize,
    pub(crate) local: Address,
    pending: RefCell<VecDeque<Rc<Link>>>,
    paused: Cell<bool>,
    /// One of the runtime's that somebody has taken.
    taken: Cell<bool>,
    waiter: Waiter,
}

impl Accepting {
    fn new(index: usize, local: Address) -> Rc<Self> {
        Rc::new(Self {
            index,
            local,
            pending: RefCell::default(),
            paused: Cell::new(false),
            taken: Cell::new(false),
            waiter: Waiter::default(),
        })
    }

    /// The next accepted connection; an error once the runtime was asked to stop.
    pub(crate) fn poll_accept(&self, hub: &Hub, cx: &Context<'_>) -> Poll<io::Result<Rc<Link>>> {
        if hub.poll_budget(cx).is_pending() {
            return Poll::Pending;
        }
        let mut pending = self.pending.borrow_mut();
        if let Some(link) = pending.pop_front() {
            if self.paused.get() && pending.len() <= FEW_PENDING {
                self.paused.set(false);
                hub.request(Request::Accepting { listener: self.index, on: true });
            }
            return Poll::Ready(Ok(link));
        }
        if hub.is_stopping() {
            return Poll::Ready(Err(io::Error::other(
                "the runtime is shutting down: nothing more is accepted",
            )));
        }
        self.waiter.set(cx);
        Poll::Pending
    }

    /// Queues an accepted connection; returns who waits for one.
    pub(super) fn queue(&self, link: Rc<Link>) -> Option<Waker> {
        self.pending.borrow_mut().push_back(link);
        self.waiter.take()
    }

    /// Whether so many wait that accepting is to pause; true once.
    pub(super) fn must_pause(&self) -> bool {
        self.pending.borrow().len() >= MOST_PENDING && !self.paused.replace(true)
    }

    /// Has at most so many accepted, those included that no task has taken, until [`accept_more`](Self::accept_more)
    /// says that some are gone.
    pub(crate) fn limit(&self, hub: &Hub, most: u32) {
        let left = i64::from(most) - self.pending.borrow().len() as i64;
        hub.request(Request::LimitAccepting { listener: self.index, left });
    }

    /// So many of those who were accepted are gone.
    pub(crate) fn accept_more(&self, hub: &Hub, count: u32) {
        hub.request(Request::AcceptMore { listener: self.index, count });
    }

    /// Stops listening; who was accepted and not taken is closed.
    pub(crate) fn close(&self, hub: &Hub) {
        hub.listeners.forget(self.index);
        hub.with_core(|core| {
            core.requests.push(Request::Unlisten { listener: self.index });
            for link in self.pending.borrow_mut().drain(..) {
                if let Some(slot) = core.find(link.id.get()) {
                    core.close(slot, crate::CloseReason::Local);
                }
            }
        });
    }
}

/// A listener that is being bound.
struct Ticket {
    number: u64,
    bound: Cell<Option<io::Result<Rc<Accepting>>>>,
    waiter: Waiter,
}

#[derive(Default)]
pub(super) struct Listeners {
    all: RefCell<Vec<Option<Rc<Accepting>>>>,
    tickets: RefCell<Vec<Rc<Ticket>>>,
    last: Cell<u64>,
}

impl Listeners {
    /// Those that the worker was started with.
    pub(super) fn start(&self, bound: &[SocketAddr]) {
        let all = bound.iter().enumerate();
        *self.all.borrow_mut() =
            all.map(|(index, addr)| Some(Accepting::new(index, Address::Inet(*addr)))).collect();
    }

    pub(super) fn get(&self, index: usize) -> Option<Rc<Accepting>> {
        self.all.borrow().get(index)?.clone()
    }

    /// One that the worker was started with, if nobody has taken it yet.
    pub(super) fn take(&self, index: usize) -> Option<Rc<Accepting>> {
        self.get(index).filter(|listener| !listener.taken.replace(true))
    }

    fn forget(&self, index: usize) {
        if let Some(place) = self.all.borrow_mut().get_mut(index) {
            *place = None;
        }
    }

    pub(super) fn wake_all(&self) {
        for listener in self.all.borrow().iter().flatten() {
            if let Some(waker) = listener.waiter.take() {
                waker.wake();
            }
        }
    }

    /// Who was accepted and not taken by a task.
    pub(super) fn take_pending(&self) -> Vec<Rc<Link>> {
        let all = self.all.borrow();
        all.iter()
            .flatten()
            .flat_map(|listener| std::mem::take(&mut *listener.pending.borrow_mut()))
            .collect()
    }

    /// A listener was bound, or not.
    pub(super) fn bound(&self, hub: &Hub, number: u64, result: io::Result<(usize, Address)>) {
        let listener = result.map(|(index, local)| {
            let listener = Accepting::new(index, local);
            listener.taken.set(true);
            let mut all = self.all.borrow_mut();
            if all.len() <= index {
                all.resize(index + 1, None);
            }
            all[index] = Some(listener.clone());
            listener
        });
        let found = {
            let mut tickets = self.tickets.borrow_mut();
            let at = tickets.iter().position(|ticket| ticket.number == number);
            at.map(|at| tickets.swap_remove(at))
        };
        match (found, listener) {
            (Some(ticket), listener) => {
                if let Ok(listener) = &listener {
                    hub.request(Request::Accepting { listener: listener.index, on: true });
                }
                ticket.bound.set(Some(listener));
                if let Some(waker) = ticket.waiter.take() {
                    waker.wake();
                }
            }
            // Whoever asked has gone.
            (None, Ok(listener)) => listener.close(hub),
            (None, Err(_)) => {}
        }
    }

    pub(super) fn close(&self) {
        self.all.borrow_mut().clear();
        self.tickets.borrow_mut().clear();
    }
}

/// Waits for a listener to be bound; dropped before that, the listener is closed as soon as it is there.
pub(crate) struct Binding<'a> {
    hub: &'a Hub,
    ticket: Rc<Ticket>,
}

impl<'a> Binding<'a> {
    pub(crate) fn new(hub: &'a Hub, config: ListenConfig) -> Self {
        let number = hub.listeners.last.get() + 1;
        hub.listeners.last.set(number);
        let ticket = Rc::new(Ticket { number, bound: Cell::new(None), waiter: Waiter::default() });
        hub.listeners.tickets.borrow_mut().push(ticket.clone());
        hub.request(Request::Listen { ticket: number, config });
        Self { hub, ticket }
    }

    pub(crate) fn poll(&self, cx: &Context<'_>) -> Poll<io::Result<Rc<Accepting>>> {
        if let Some(bound) = self.ticket.bound.take() {
            return Poll::Ready(bound);
        }
        self.ticket.waiter.set(cx);
        Poll::Pending
    }
}

impl Drop for Binding<'_> {
    fn drop(&mut self) {
        self.hub.listeners.tickets.borrow_mut().retain(|ticket| ticket.number != self.ticket.number);
        if let Some(Ok(listener)) = self.ticket.bound.take() {
            listener.close(self.hub);
        }
    }
}
