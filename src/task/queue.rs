//! Who waits for one of something that is bounded, the longest first.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::task::{Context, Poll, Waker};

/// Those who wait, by the number of their ticket.
#[derive(Default)]
pub(crate) struct Queue {
    waiting: RefCell<VecDeque<(u64, Option<Waker>)>>,
    /// Those whose turn has come.
    called: RefCell<Vec<u64>>,
    last: Cell<u64>,
}

impl Queue {
    /// Takes a place at the end.
    pub(crate) fn wait(&self) -> Place<'_> {
        let ticket = self.last.get() + 1;
        self.last.set(ticket);
        self.waiting.borrow_mut().push_back((ticket, None));
        Place { queue: self, ticket }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.borrow().is_empty()
    }

    /// Calls the first `count`, and returns whom to wake.
    pub(crate) fn call(&self, count: usize, woken: &mut Vec<Waker>) {
        let mut waiting = self.waiting.borrow_mut();
        let mut called = self.called.borrow_mut();
        let count = count.min(waiting.len());
        for (ticket, waker) in waiting.drain(..count) {
            called.push(ticket);
            woken.extend(waker);
        }
    }
}

/// A place in a [`Queue`]; dropping it leaves the queue. One who was called and has gone takes nothing along: the others are
/// called as long as there is something to have.
pub(crate) struct Place<'a> {
    queue: &'a Queue,
    ticket: u64,
}

impl Place<'_> {
    /// Ready when its turn has come, to try again.
    pub(crate) fn poll(&mut self, cx: &Context<'_>) -> Poll<()> {
        if self.queue.called.borrow().contains(&self.ticket) {
            return Poll::Ready(());
        }
        let mut waiting = self.queue.waiting.borrow_mut();
        if let Some((_, waker)) = waiting.iter_mut().find(|(ticket, _)| *ticket == self.ticket) {
            *waker = Some(cx.waker().clone());
        }
        Poll::Pending
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.queue.called.borrow_mut().retain(|ticket| *ticket != self.ticket);
        self.queue.waiting.borrow_mut().retain(|(ticket, _)| *ticket != self.ticket);
    }
}
