//! What all connected stream sockets do, whatever their addresses are.

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use crate::buffer::{Buf, Payload};
use crate::handler::{CloseReason, SendErrorKind, Taken};
use crate::task::{Hub, Life, Link};

use super::error;

/// A connection from a task's side. Dropping it closes the connection gracefully.
pub(super) struct Stream {
    pub(super) hub: Rc<Hub>,
    pub(super) link: Rc<Link>,
}

impl Stream {
    pub(super) fn new(hub: Rc<Hub>, link: Rc<Link>) -> Self {
        Self { hub, link }
    }

    /// Why nothing can be done with a connection that the worker no longer knows.
    fn over(&self) -> CloseReason {
        match self.link.life.get() {
            Life::Over(reason) => reason,
            _ => CloseReason::Local,
        }
    }

    pub(super) fn poll_recv(&self, cx: &Context<'_>) -> Poll<io::Result<Option<Buf>>> {
        ready!(self.hub.poll_budget(cx));
        let taken = self.hub.with_core(|core| core.find(self.link.id.get()).map(|slot| core.take(slot)));
        Poll::Ready(match taken {
            Some(Taken::Data(buf)) => Ok(Some(buf)),
            Some(Taken::End) => Ok(None),
            Some(Taken::Failed(reason)) => Err(error::of_close(reason)),
            Some(Taken::Nothing) if self.link.is_to_end(self.hub.is_stopping()) => {
                Err(error::of_close(CloseReason::Shutdown))
            }
            Some(Taken::Nothing) => {
                self.link.reader.set(cx);
                return Poll::Pending;
            }
            None => match self.over() {
                CloseReason::Eof => Ok(None),
                reason => Err(error::of_close(reason)),
            },
        })
    }

    /// Ready when something may be queued: while less than the high-water mark waits.
    pub(super) fn poll_writable(&self, cx: &Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.hub.poll_budget(cx));
        let state = self.hub.with_core(|core| {
            let slot = core.find(self.link.id.get())?;
            Some(core.send_failure(slot).map_or(Ok(core.is_congested(slot)), Err))
        });
        match state {
            Some(Ok(true)) => {
                self.link.writer.set(cx);
                Poll::Pending
            }
            Some(Ok(false)) => Poll::Ready(Ok(())),
            Some(Err(reason)) => Poll::Ready(Err(error::of_close(reason))),
            None => Poll::Ready(Err(error::of_close(self.over()))),
        }
    }

    /// Queues a payload now.
    pub(super) fn push(&self, payload: Payload) -> io::Result<()> {
        let sent = self.hub.with_core(|core| {
            core.find(self.link.id.get()).map(|slot| core.send(slot, payload).map_err(|error| error.kind))
        });
        match sent {
            Some(Ok(())) => Ok(()),
            Some(Err(SendErrorKind::Full)) => Err(io::ErrorKind::WouldBlock.into()),
            Some(Err(SendErrorKind::Closed)) => Err(io::ErrorKind::BrokenPipe.into()),
            None => Err(error::of_close(self.over())),
        }
    }

    pub(super) async fn send(&self, payload: Payload) -> io::Result<()> {
        poll_fn(|cx| self.poll_writable(cx)).await?;
        self.push(payload)
    }

    /// Ready when the kernel has taken everything.
    pub(super) fn poll_flush(&self, cx: &Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.hub.poll_budget(cx));
        let state = self.hub.with_core(|core| {
            let slot = core.find(self.link.id.get())?;
            Some(core.send_failure(slot).map_or(Ok(core.unsent(slot)), Err))
        });
        match state {
            Some(Ok(0)) => Poll::Ready(Ok(())),
            Some(Ok(_)) => {
                self.link.writer.set(cx);
                Poll::Pending
            }
            Some(Err(reason)) => Poll::Ready(Err(error::of_close(reason))),
            None => Poll::Ready(Err(error::of_close(self.over()))),
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.hub.with_core(|core| {
            if let Some(slot) = core.find(self.link.id.get()) {
                core.close(slot, CloseReason::Local);
            }
        });
    }
}
