//! What the async tier keeps of a connection: who waits for what, and how it ended.
//!
//! The worker has the connection itself (data received, data queued, limits). A link is shared by the
//! worker's slot and the user's stream, so either may go first: a stream that is dropped closes the
//! connection, a connection that ends leaves its reason here for the stream.

use std::cell::{Cell, OnceCell};
use std::io;
use std::net::SocketAddr;
use std::task::{Context, Poll, Waker};

use crate::buffer::Buf;
use crate::handler::{CloseReason, ConnId};

use super::question::Questions;

/// One who waits.
#[derive(Default)]
pub(crate) struct Waiter(Cell<Option<Waker>>);

impl Waiter {
    /// Notes who is to be woken.
    #[inline]
    pub(crate) fn set(&self, cx: &Context<'_>) {
        // Usually the same task as before.
        let waker = self.0.take().filter(|waker| waker.will_wake(cx.waker()));
        self.0.set(Some(waker.unwrap_or_else(|| cx.waker().clone())));
    }

    #[inline]
    pub(crate) fn take(&self) -> Option<Waker> {
        self.0.take()
    }
}

/// Where a connection is in its life, as its stream sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    Opening,
    Open,
    Over(CloseReason),
}

pub(crate) struct Link {
    pub(crate) id: Cell<ConnId>,
    pub(crate) life: Cell<Life>,
    /// Whether receiving ends when the runtime is asked to stop.
    pub(crate) ends_on_stop: Cell<bool>,
    /// Whether it ends now, whatever the runtime does: its server stops.
    pub(crate) is_ending: Cell<bool>,
    /// Whether it is a datagram socket.
    pub(crate) is_datagram: Cell<bool>,
    /// Whether it is a Unix socket.
    #[cfg(unix)]
    pub(crate) is_unix: Cell<bool>,
    pub(crate) reader: Waiter,
    pub(crate) writer: Waiter,
    /// What few connections need, made when it is.
    rare: OnceCell<Box<Rare>>,
}

/// What few connections need.
#[derive(Default)]
pub(crate) struct Rare {
    /// The peer's address, where it came with the connection.
    peer: Cell<Option<SocketAddr>>,
    pub(crate) questions: Questions,
    /// A datagram socket's receiving failed.
    pub(crate) fault: Cell<Option<io::Error>>,
    /// Taken by a receive that was not done when the connection was over: there for the next one.
    leftover: Cell<Option<Buf>>,
}

impl Link {
    pub(crate) fn new(id: ConnId, life: Life, peer: Option<SocketAddr>) -> Self {
        let link = Self {
            id: Cell::new(id),
            life: Cell::new(life),
            ends_on_stop: Cell::new(false),
            is_ending: Cell::new(false),
            is_datagram: Cell::new(false),
            #[cfg(unix)]
            is_unix: Cell::new(false),
            reader: Waiter::default(),
            writer: Waiter::default(),
            rare: OnceCell::new(),
        };
        if peer.is_some() {
            link.rare().peer.set(peer);
        }
        link
    }

    /// What few connections need, made if it is not there.
    pub(crate) fn rare(&self) -> &Rare {
        self.rare.get_or_init(Box::default)
    }

    /// The same, if it is there.
    pub(crate) fn if_rare(&self) -> Option<&Rare> {
        self.rare.get().map(|rare| &**rare)
    }

    /// The peer's address, where it came with the connection.
    pub(crate) fn peer(&self) -> Option<SocketAddr> {
        self.if_rare().and_then(|rare| rare.peer.get())
    }

    /// Whether receiving ends when nothing that arrived is left.
    pub(crate) fn is_to_end(&self, stopping: bool) -> bool {
        self.ends_on_stop.get() && (stopping || self.is_ending.get())
    }

    /// Keeps what a receive had taken of a connection that is over.
    pub(crate) fn keep(&self, buf: Buf) {
        let leftover = &self.rare().leftover;
        let joined = match leftover.take() {
            Some(later) => Buf::copied(&[&buf[..], &later[..]].concat()),
            None => buf,
        };
        leftover.set(Some(joined));
    }

    /// What [`keep`](Self::keep) kept.
    pub(crate) fn take_kept(&self) -> Option<Buf> {
        self.if_rare()?.leftover.take()
    }

    /// Ready when the connection is there, or with why it is not.
    pub(crate) fn poll_open(&self, cx: &Context<'_>) -> Poll<Result<(), CloseReason>> {
        match self.life.get() {
            Life::Opening => {
                self.writer.set(cx);
                Poll::Pending
            }
            Life::Open => Poll::Ready(Ok(())),
            Life::Over(reason) => Poll::Ready(Err(reason)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `tests/promises_task_alloc.rs` adds what is allocated for an idle connection to what is reserved for it here.
    #[test]
    fn what_is_kept_of_a_connection_is_small() {
        assert!(size_of::<Link>() <= 72, "{} bytes", size_of::<Link>());
    }
}
