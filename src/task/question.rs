//! Questions to the system about a connection, and their answers.
//!
//! A connection's questions are answered in the order in which they were asked, so each answer is for the first
//! that waits. One whose asker has gone keeps its place: its answer is then nobody's, and not the next one's.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::config::SocketOptions;
use crate::driver::Addresses;
use crate::worker::Request;

use super::hub::Hub;
use super::link::{Life, Link, Waiter};

/// What the system said.
pub(crate) enum Reply {
    Addresses(Box<io::Result<Addresses>>),
    Options(io::Result<()>),
}

#[derive(Default)]
struct Asked {
    reply: Cell<Option<Reply>>,
    waiter: Waiter,
}

/// A connection's questions under way, the oldest first.
#[derive(Default)]
pub(crate) struct Questions(RefCell<VecDeque<Rc<Asked>>>);

impl Questions {
    /// Hands over the answer to the oldest; returns who waits for it.
    pub(super) fn answer(&self, reply: Reply) -> Option<Waker> {
        let asked = self.0.borrow_mut().pop_front()?;
        asked.reply.set(Some(reply));
        asked.waiter.take()
    }

    /// Nothing more is answered, since the connection is over; returns who waits.
    pub(super) fn end(&self) -> Vec<Waker> {
        let asked = std::mem::take(&mut *self.0.borrow_mut());
        asked.iter().filter_map(|asked| asked.waiter.take()).collect()
    }
}

/// Waits for an answer.
pub(crate) struct Question<'a> {
    link: &'a Link,
    asked: Rc<Asked>,
}

impl<'a> Question<'a> {
    /// Asks for both addresses.
    pub(crate) fn addresses(hub: &Hub, link: &'a Link) -> Self {
        Self::ask(hub, link, Request::Addresses(link.id.get()))
    }

    /// Has options set.
    pub(crate) fn options(hub: &Hub, link: &'a Link, options: &SocketOptions) -> Self {
        Self::ask(hub, link, Request::SetOptions(link.id.get(), Box::new(options.clone())))
    }

    fn ask(hub: &Hub, link: &'a Link, request: Request) -> Self {
        let asked = Rc::new(Asked::default());
        link.rare().questions.0.borrow_mut().push_back(asked.clone());
        hub.request(request);
        Self { link, asked }
    }

    /// The answer; without one, and the connection over, that.
    pub(crate) fn poll(&self, cx: &Context<'_>) -> Poll<Result<Reply, crate::CloseReason>> {
        if let Some(reply) = self.asked.reply.take() {
            return Poll::Ready(Ok(reply));
        }
        if let Life::Over(reason) = self.link.life.get() {
            return Poll::Ready(Err(reason));
        }
        self.asked.waiter.set(cx);
        Poll::Pending
    }
}
