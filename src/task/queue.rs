//! Who waits for one of something that is bounded, the longest first.
//!
//! Whoever is called has one kept for him until he has tried; who comes meanwhile goes to the end and does not
//! take it away. So nobody waits for ever while others come and go.

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

    /// Whether one who does not wait may take one of the `count` that there are.
    pub(crate) fn may_pass(&self, count: usize) -> bool {
        self.is_empty() && self.called.borrow().len() < count
    }

    /// Calls as many as there are things to have, those who were called before included, and adds whom to wake.
    pub(crate) fn call(&self, count: usize, woken: &mut Vec<Waker>) {
        let mut waiting = self.waiting.borrow_mut();
        let mut called = self.called.borrow_mut();
        let count = count.saturating_sub(called.len()).min(waiting.len());
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
    /// Ready when its turn has come, to try.
    pub(crate) fn poll(&mut self, cx: &Context<'_>) -> Poll<()> {
        if self.queue.called.borrow().contains(&self.ticket) {
            return Poll::Ready(());
        }
        let waker = cx.waker().clone();
        let before = {
            let mut waiting = self.queue.waiting.borrow_mut();
            let place = waiting.iter_mut().find(|(ticket, _)| *ticket == self.ticket);
            place.and_then(|(_, known)| known.replace(waker))
        };
        // One of somebody else's making may do anything when it is dropped.
        drop(before);
        Poll::Pending
    }

    /// Goes back to the front: it was called, and there was nothing after all.
    pub(crate) fn again(&mut self) {
        self.queue.called.borrow_mut().retain(|ticket| *ticket != self.ticket);
        self.queue.waiting.borrow_mut().push_front((self.ticket, None));
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.queue.called.borrow_mut().retain(|ticket| *ticket != self.ticket);
        let left = {
            let mut waiting = self.queue.waiting.borrow_mut();
            let at = waiting.iter().position(|(ticket, _)| *ticket == self.ticket);
            at.and_then(|at| waiting.remove(at))
        };
        drop(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn poll(place: &mut Place<'_>) -> bool {
        place.poll(&Context::from_waker(Waker::noop())).is_ready()
    }

    #[test]
    fn who_waits_longest_is_called_first_and_nobody_passes() {
        let queue = Queue::default();
        assert!(queue.may_pass(1) && !queue.may_pass(0));
        let (mut a, mut b, mut c) = (queue.wait(), queue.wait(), queue.wait());
        assert!(!poll(&mut a) && !poll(&mut b) && !poll(&mut c) && !queue.may_pass(9));
        let mut woken = Vec::new();
        queue.call(2, &mut woken);
        assert_eq!(woken.len(), 2);
        assert!(poll(&mut a) && poll(&mut b) && !poll(&mut c));
        queue.call(2, &mut woken);
        assert!(!poll(&mut c), "both are kept for those who were called");
        b.again();
        assert!(!poll(&mut b));
        queue.call(2, &mut woken);
        assert!(poll(&mut b) && !poll(&mut c), "back at the front");
        drop(a);
        queue.call(2, &mut woken);
        assert!(poll(&mut c) && queue.is_empty());
        assert!(!queue.may_pass(2) && queue.may_pass(3));
        drop((b, c));
        assert!(queue.may_pass(1));
    }
}
