//! The connections that a server serves.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::error::Error;
use std::future::Future;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use crate::handler::{CloseReason, ConnId};
use crate::net::is_shutdown;
use crate::sync::{List, Notify};
use crate::task::{Accepting, Hub, JoinHandle, MainOutcome, Waiter, spawn};
use crate::worker::Phase;

use super::OnFailure;
use super::report::{FailureKind, HandlerFailure, ServerReport};

pub(super) struct Serving {
    hub: Rc<Hub>,
    /// The listener, while it is to accept one more for each who goes.
    limited: RefCell<Option<Rc<Accepting>>>,
    max_connections: u32,
    max_per_ip: Option<u32>,
    per_ip: RefCell<HashMap<IpAddr, u32>>,
    on_failure: Option<OnFailure>,
    active: RefCell<List<Active>>,
    count: Cell<u32>,
    /// Who accepts, while it is full.
    room: Waiter,
    report: Cell<ServerReport>,
    /// Accepting has ended: somebody waits for the last one to go.
    draining: Cell<bool>,
    pub(super) empty: Notify,
}

/// A connection whose handler has not ended.
struct Active {
    id: ConnId,
    task: Option<JoinHandle<()>>,
}

impl Serving {
    pub(super) fn new(
        hub: Rc<Hub>,
        listener: Rc<Accepting>,
        max_connections: Option<u32>,
        max_per_ip: Option<u32>,
        on_failure: Option<OnFailure>,
    ) -> Rc<Self> {
        if let Some(most) = max_connections {
            listener.limit(&hub, most);
        }
        Rc::new(Self {
            hub,
            limited: RefCell::new(max_connections.map(|_| listener)),
            max_connections: max_connections.unwrap_or(u32::MAX),
            max_per_ip,
            per_ip: RefCell::default(),
            on_failure,
            active: RefCell::default(),
            count: Cell::new(0),
            room: Waiter::default(),
            report: Cell::default(),
            draining: Cell::new(false),
            empty: Notify::new(),
        })
    }

    fn count(&self, count: impl FnOnce(&mut ServerReport)) {
        let mut report = self.report.get();
        count(&mut report);
        self.report.set(report);
    }

    pub(super) fn report(&self) -> ServerReport {
        self.report.get()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.active.borrow().is_empty()
    }

    /// Ready when one more may be taken. More than the limit may have been accepted, by an operation that accepts
    /// many, until it was cancelled; they wait with the listener.
    pub(super) fn poll_room(&self, cx: &Context<'_>) -> Poll<()> {
        if self.count.get() < self.max_connections {
            return Poll::Ready(());
        }
        self.room.set(cx);
        Poll::Pending
    }

    /// Takes one who was accepted in, or turns him away.
    pub(super) fn admit<S, H, F>(
        self: &Rc<Self>,
        id: ConnId,
        peer: Option<SocketAddr>,
        stream: S,
        handler: &Rc<H>,
    ) where
        S: 'static,
        H: Fn(S) -> F + 'static,
        F: Future + 'static,
        F::Output: MainOutcome,
    {
        self.count(|report| report.accepted += 1);
        // One whose address the system could not tell any more has gone already.
        if let Some(ip) = self.counted(peer)
            && !self.takes_one_of(ip)
        {
            self.count(|report| report.refused += 1);
            self.reset(id);
            drop(stream);
            self.one_is_gone();
            return;
        }
        let place = self.active.borrow_mut().push_back(Active { id, task: None });
        self.count.set(self.count.get() + 1);
        let mut ticket = Ticket { serving: self.clone(), place, peer, end: End::Aborted };
        // Whatever a panic leaves half done inside the handler is dropped with it and seen by nobody.
        match catch_unwind(AssertUnwindSafe(|| Box::pin(handler(stream)))) {
            Ok(handling) => {
                let task = spawn(Handling { handling, ticket });
                if !task.is_finished() {
                    self.active.borrow_mut().get_mut(place).task = Some(task);
                }
            }
            Err(panic) => ticket.finish(Err(panic)),
        }
    }

    /// What one who was accepted counts for, if that is limited.
    fn counted(&self, peer: Option<SocketAddr>) -> Option<IpAddr> {
        self.max_per_ip.and(peer).map(|peer| network(peer.ip()))
    }

    /// Counts one more of an address, if there may be one.
    fn takes_one_of(&self, ip: IpAddr) -> bool {
        let mut per_ip = self.per_ip.borrow_mut();
        let count = per_ip.entry(ip).or_insert(0);
        let takes = self.max_per_ip.is_none_or(|most| *count < most);
        *count += u32::from(takes);
        takes
    }

    fn one_is_gone(&self) {
        if let Some(listener) = &*self.limited.borrow() {
            listener.accept_more(&self.hub, 1);
        }
    }

    fn reset(&self, id: ConnId) {
        self.hub.with_core(|core| {
            if let Some(slot) = core.find(id) {
                core.abort(slot);
            }
        });
    }

    /// The listener is about to be closed; its place may become another one's.
    pub(super) fn end_accepting(&self) {
        self.limited.borrow_mut().take();
        self.draining.set(true);
    }

    /// Ends those who wait for a request.
    pub(super) fn end_idle(&self) {
        for id in self.ids() {
            self.hub.end_receiving(id);
        }
    }

    fn places(&self) -> Vec<u32> {
        let active = self.active.borrow();
        std::iter::successors(active.front(), |&place| active.after(place)).collect()
    }

    fn ids(&self) -> Vec<ConnId> {
        let places = self.places();
        let active = self.active.borrow();
        places.into_iter().map(|place| active.get(place).id).collect()
    }

    /// Drops every handler that has not ended, and resets its connection.
    pub(super) fn abort_all(&self) {
        // Dropping one may end others, whose places are then free, but nobody takes them any more.
        while let Some(place) = {
            let active = self.active.borrow();
            std::iter::successors(active.front(), |&place| active.after(place))
                .find(|&place| active.get(place).task.is_some())
        } {
            let (id, task) = {
                let mut active = self.active.borrow_mut();
                let active = active.get_mut(place);
                (active.id, active.task.take())
            };
            self.hub.with_core(|core| {
                // One whose stream the handler has dropped is about to end in good order.
                if let Some(slot) = core.find(id)
                    && core.table.get(slot).phase == Phase::Open
                {
                    core.abort_with(slot, CloseReason::Shutdown);
                }
            });
            if let Some(task) = task {
                task.abort();
            }
        }
    }
}

/// Ends what is left when the server is dropped.
pub(super) struct AbortAll(pub(super) Rc<Serving>);

impl Drop for AbortAll {
    fn drop(&mut self) {
        self.0.end_accepting();
        self.0.abort_all();
    }
}

/// What is counted as one: an address, or of IPv6 the network that one subscriber has.
fn network(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64)),
        ip => ip,
    }
}

/// How a handler ended.
#[derive(Clone, Copy)]
enum End {
    Served,
    Failed,
    Panicked,
    Aborted,
}

/// A connection's place in the server; given back by dropping it, however the handler ends.
struct Ticket {
    serving: Rc<Serving>,
    place: u32,
    peer: Option<SocketAddr>,
    end: End,
}

/// What a handler came to, or what it panicked with.
type Outcome = Result<Result<(), Box<dyn Error + Send + Sync>>, Box<dyn Any + Send>>;

impl Ticket {
    /// Takes note of how the handler ended, and tells whoever wants to know of failures.
    fn finish(&mut self, outcome: Outcome) {
        let serving = &self.serving;
        let id = serving.active.borrow().get(self.place).id;
        let kind = match outcome {
            Ok(Ok(())) => {
                self.end = End::Served;
                return;
            }
            Ok(Err(error)) if is_shutdown(&*error) => {
                let is_late = serving.hub.over_token().is_cancelled();
                self.end = if is_late { End::Aborted } else { End::Served };
                return;
            }
            Ok(Err(error)) => {
                self.end = End::Failed;
                FailureKind::Error(error)
            }
            Err(panic) => {
                self.end = End::Panicked;
                // A client must not take what was sent of an answer for a whole one.
                serving.reset(id);
                FailureKind::Panic(panic)
            }
        };
        if let Some(told) = &serving.on_failure {
            let failure = HandlerFailure { id, peer: self.peer, kind };
            // A panic there is printed as every panic is; it must not end those who are served.
            let _ = catch_unwind(AssertUnwindSafe(|| told(&failure)));
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let serving = &self.serving;
        serving.count(|report| match self.end {
            End::Served => report.served += 1,
            End::Failed => report.failed += 1,
            End::Panicked => report.panicked += 1,
            End::Aborted => report.aborted += 1,
        });
        if let Some(ip) = serving.counted(self.peer) {
            let mut per_ip = serving.per_ip.borrow_mut();
            if let Some(count) = per_ip.get_mut(&ip) {
                *count -= 1;
                if *count == 0 {
                    per_ip.remove(&ip);
                }
            }
        }
        let gone = serving.active.borrow_mut().take(self.place);
        drop(gone);
        serving.count.set(serving.count.get() - 1);
        if let Some(waker) = serving.room.take() {
            waker.wake();
        }
        serving.one_is_gone();
        if serving.draining.get() && serving.is_empty() {
            serving.empty.notify_one();
        }
    }
}

/// A connection's task. Written out because an `async` block would keep the handler's future twice: as what it
/// was given, and as what it polls.
struct Handling<F> {
    // First, so that it is dropped first.
    handling: Pin<Box<F>>,
    ticket: Ticket,
}

impl<F> Future for Handling<F>
where
    F: Future,
    F::Output: MainOutcome,
{
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let handling = self.handling.as_mut();
        // As above.
        let polled = catch_unwind(AssertUnwindSafe(|| handling.poll(cx).map(MainOutcome::into_result)));
        let outcome = match polled {
            Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(outcome)) => Ok(outcome),
            Err(panic) => Err(panic),
        };
        self.ticket.finish(outcome);
        Poll::Ready(())
    }
}
