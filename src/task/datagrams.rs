//! Sends of datagram sockets: which are under way, which are done, who waits for what.
//!
//! ```text
//!            begin                  the kernel is done              taken
//!   (free) ─────────► UnderWay ───────────────────────► Done ───────────────► (free)
//!                        │ dropped                                               ▲
//!                        └─────────► Abandoned ──────── the kernel is done ──────┘
//! ```
//!
//! The driver owns the datagram while it is under way, also when nobody waits for it any more.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::driver::{DATAGRAM_SENDS, Datagram};
use crate::handler::{CloseReason, ConnId};
use crate::worker::Request;

use super::hub::Hub;

enum Place {
    Free,
    UnderWay(Option<Waker>),
    Done(io::Result<usize>),
    Abandoned,
}

/// The sends of one socket.
pub(crate) struct Sends {
    id: Cell<ConnId>,
    places: RefCell<Vec<Place>>,
    /// Who waits for a free place.
    waiters: RefCell<Vec<Waker>>,
    /// Why nothing is sent any more.
    over: Cell<Option<CloseReason>>,
}

impl Sends {
    pub(crate) fn new(id: ConnId) -> Rc<Self> {
        let places = (0..DATAGRAM_SENDS).map(|_| Place::Free).collect();
        Rc::new(Self {
            id: Cell::new(id),
            places: RefCell::new(places),
            waiters: RefCell::default(),
            over: Cell::new(None),
        })
    }

    /// Why nothing is sent any more, if so.
    pub(crate) fn over(&self) -> Option<CloseReason> {
        self.over.get()
    }

    /// A free place for one send, if there is one.
    pub(crate) fn take(&self) -> Option<u32> {
        let mut places = self.places.borrow_mut();
        let free = places.iter().position(|place| matches!(place, Place::Free))?;
        places[free] = Place::UnderWay(None);
        Some(free as u32)
    }

    /// Waits for a free place; `Err` when nothing is sent any more.
    pub(crate) fn poll_take(&self, cx: &Context<'_>) -> Poll<Result<u32, CloseReason>> {
        if let Some(reason) = self.over.get() {
            return Poll::Ready(Err(reason));
        }
        if let Some(token) = self.take() {
            return Poll::Ready(Ok(token));
        }
        let mut waiters = self.waiters.borrow_mut();
        if !waiters.iter().any(|waiter| waiter.will_wake(cx.waker())) {
            waiters.push(cx.waker().clone());
        }
        Poll::Pending
    }

    /// Gives a datagram to the worker, under a place that was taken.
    pub(crate) fn begin(&self, hub: &Hub, token: u32, datagram: Datagram) {
        hub.request(Request::SendDatagram(self.id.get(), token, datagram));
    }

    /// Waits until a send is done; its place is free then.
    pub(crate) fn poll_done(&self, token: u32, cx: &Context<'_>) -> Poll<io::Result<usize>> {
        let mut places = self.places.borrow_mut();
        let place = &mut places[token as usize];
        match place {
            Place::Done(_) => {}
            Place::UnderWay(waker) => {
                *waker = Some(cx.waker().clone());
                return Poll::Pending;
            }
            Place::Free | Place::Abandoned => return Poll::Pending,
        }
        let Place::Done(result) = std::mem::replace(place, Place::Free) else { return Poll::Pending };
        drop(places);
        self.wake_waiters();
        Poll::Ready(result)
    }

    /// Nobody waits for a send any more.
    pub(crate) fn abandon(&self, token: u32) {
        let mut places = self.places.borrow_mut();
        let place = &mut places[token as usize];
        match place {
            Place::UnderWay(_) => drop(std::mem::replace(place, Place::Abandoned)),
            Place::Done(_) => {
                drop(std::mem::replace(place, Place::Free));
                drop(places);
                self.wake_waiters();
            }
            Place::Free | Place::Abandoned => {}
        }
    }

    /// The kernel is done with a send.
    fn done(&self, token: u32, result: io::Result<usize>) {
        let mut places = self.places.borrow_mut();
        let Some(place) = places.get_mut(token as usize) else { return };
        match std::mem::replace(place, Place::Free) {
            Place::UnderWay(waker) => {
                *place = Place::Done(result);
                drop(places);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            // An error that nobody waits for is the network's business, as with any datagram.
            Place::Abandoned => {
                drop(places);
                self.wake_waiters();
            }
            Place::Free => {}
            Place::Done(before) => *place = Place::Done(before),
        }
    }

    /// The socket was dropped: nothing more is begun. What is under way is answered, or ended with it.
    pub(crate) fn shut(&self) {
        self.over.set(Some(CloseReason::Local));
        self.wake_waiters();
    }

    /// The socket is closed: nothing more comes of what is under way.
    fn end(&self, reason: CloseReason) {
        self.over.set(Some(reason));
        for token in 0..DATAGRAM_SENDS {
            self.done(token, Err(io::ErrorKind::NotConnected.into()));
        }
        self.wake_waiters();
    }

    /// Everybody who waits tries again: one of them alone might be gone by now, and its wake lost.
    fn wake_waiters(&self) {
        let waiters = std::mem::take(&mut *self.waiters.borrow_mut());
        for waiter in waiters {
            waiter.wake();
        }
    }
}

/// The datagram sockets of a worker: few, so a list.
#[derive(Default)]
pub(super) struct Datagrams(RefCell<Vec<Rc<Sends>>>);

impl Datagrams {
    pub(super) fn add(&self, sends: Rc<Sends>) {
        self.0.borrow_mut().push(sends);
    }

    fn find(&self, id: ConnId) -> Option<Rc<Sends>> {
        self.0.borrow().iter().find(|sends| sends.id.get() == id).cloned()
    }

    pub(super) fn done(&self, id: ConnId, token: u32, result: io::Result<usize>) {
        if let Some(sends) = self.find(id) {
            sends.done(token, result);
        }
    }

    /// A connection is over; it may have been a datagram socket.
    pub(super) fn over(&self, id: ConnId, reason: CloseReason) {
        let found = {
            let mut all = self.0.borrow_mut();
            let at = all.iter().position(|sends| sends.id.get() == id);
            at.map(|at| all.swap_remove(at))
        };
        if let Some(sends) = found {
            sends.end(reason);
        }
    }

    pub(super) fn close(&self) {
        self.0.borrow_mut().clear();
    }
}
