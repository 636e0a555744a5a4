//! What all connected stream sockets do, whatever their addresses are.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use crate::buffer::{Buf, Payload};
use crate::config::SocketOptions;
use crate::driver::Addresses;
use crate::handler::{CloseReason, SendError, SendErrorKind, Taken};
use crate::task::{Hub, Life, Link, Question, Reply, TaskCore};

use super::error;

/// A connection from a task's side. Dropping it closes the connection gracefully.
pub(super) struct Stream {
    pub(super) hub: Rc<Hub>,
    pub(super) link: Rc<Link>,
}

/// What a stream is a stream of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Tcp,
    #[cfg(unix)]
    Unix,
}

impl Stream {
    pub(super) fn of(kind: Kind, hub: Rc<Hub>, link: Rc<Link>) -> Self {
        #[cfg(unix)]
        link.is_unix.set(kind == Kind::Unix);
        #[cfg(not(unix))]
        let Kind::Tcp = kind;
        Self { hub, link }
    }

    /// What it is a stream of. Kept with the link: a stream is moved about, and stands in its task's future twice.
    pub(super) fn kind(&self) -> Kind {
        #[cfg(unix)]
        if self.link.is_unix.get() {
            return Kind::Unix;
        }
        Kind::Tcp
    }

    /// Acts on the connection, if the worker still knows it.
    #[inline]
    pub(super) fn with<R>(&self, act: impl FnOnce(&mut TaskCore, u32) -> R) -> Option<R> {
        self.hub.with_core(|core| core.find(self.link.id.get()).map(|slot| act(core, slot)))
    }

    /// Why nothing can be done with a connection that the worker no longer knows.
    fn over(&self) -> CloseReason {
        match self.link.life.get() {
            Life::Over(reason) => reason,
            _ => CloseReason::Local,
        }
    }

    /// What there is to receive: something, the end, or `None` for nothing yet.
    #[inline]
    fn next(&self) -> Option<io::Result<Option<Buf>>> {
        Some(match self.with(|core, slot| core.take(slot)) {
            Some(Taken::Data(buf)) => Ok(Some(buf)),
            Some(Taken::End) => Ok(None),
            Some(Taken::Failed(reason)) => Err(error::of_close(reason)),
            Some(Taken::Nothing) if self.link.is_to_end(self.hub.is_stopping()) => {
                Err(error::of_close(CloseReason::Shutdown))
            }
            Some(Taken::Nothing) => return None,
            None => match (self.link.take_kept(), self.over()) {
                (Some(kept), _) => Ok(Some(kept)),
                (None, CloseReason::Eof) => Ok(None),
                (None, reason) => Err(error::of_close(reason)),
            },
        })
    }

    #[inline]
    pub(super) fn poll_recv(&self, cx: &Context<'_>) -> Poll<io::Result<Option<Buf>>> {
        ready!(self.hub.poll_budget(cx));
        match self.next() {
            Some(result) => Poll::Ready(result),
            None => {
                self.link.reader.set(cx);
                Poll::Pending
            }
        }
    }

    pub(super) fn try_recv(&self) -> io::Result<Option<Buf>> {
        self.next().unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()))
    }

    /// Another lease on what `poll_recv` would give.
    pub(super) fn poll_peek(&self, cx: &Context<'_>) -> Poll<io::Result<Option<Buf>>> {
        ready!(self.hub.poll_budget(cx));
        if let Some(buf) = self.with(|core, slot| core.peek(slot)).flatten() {
            return Poll::Ready(Ok(Some(buf)));
        }
        let next = ready!(self.poll_recv(cx));
        if let Ok(Some(buf)) = &next {
            // Of a connection that is over.
            self.put_back(buf.clone());
        }
        Poll::Ready(next)
    }

    /// Puts back what was taken and not used.
    fn put_back(&self, buf: Buf) {
        if buf.is_empty() {
            return;
        }
        let mut rest = Some(buf);
        self.with(|core, slot| rest = rest.take().and_then(|buf| core.put_back(slot, buf)));
        if let Some(buf) = rest {
            self.link.keep(buf);
        }
    }

    /// Moves at most `room.len()` bytes of `buf` to its front, and puts the rest back.
    fn move_some(&self, mut buf: Buf, room: &mut [u8]) -> usize {
        let n = buf.len().min(room.len());
        room[..n].copy_from_slice(&buf[..n]);
        if n < buf.len() {
            buf.advance(n);
            self.put_back(buf);
        }
        n
    }

    pub(super) async fn recv_into(&self, mut buf: Vec<u8>, most: usize) -> (io::Result<usize>, Vec<u8>) {
        if most == 0 {
            return (Ok(0), buf);
        }
        let first = match poll_fn(|cx| self.poll_recv(cx)).await {
            Ok(Some(first)) => first,
            Ok(None) => return (Ok(0), buf),
            Err(error) => return (Err(error), buf),
        };
        let before = buf.len();
        let mut next = Some(first);
        // No waiting from here on, so a future that is dropped has either taken nothing or is done.
        while let Some(mut piece) = next.take() {
            let n = piece.len().min(most - (buf.len() - before));
            buf.extend_from_slice(&piece[..n]);
            if n < piece.len() {
                piece.advance(n);
                self.put_back(piece);
            } else if buf.len() - before < most
                && let Some(Some(Taken::Data(more))) =
                    self.with(|core, slot| core.has_held(slot).then(|| core.take(slot)))
            {
                next = Some(more);
            }
        }
        (Ok(buf.len() - before), buf)
    }

    /// Ready when something may be queued: while less than the high-water mark waits.
    #[inline]
    pub(super) fn poll_writable(&self, cx: &Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.hub.poll_budget(cx));
        let state = self.with(|core, slot| core.send_failure(slot).map_or(Ok(core.is_congested(slot)), Err));
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
    #[inline]
    pub(super) fn try_send(&self, payload: Payload) -> Result<(), SendError> {
        if payload.is_empty() {
            // Dropped here and not while the worker's core is lent: bytes may be of somebody else's making.
            let sent =
                self.with(|core, slot| core.send(slot, Payload::from("")).map_err(|refused| refused.kind));
            let sent = sent.unwrap_or(Err(SendErrorKind::Closed));
            return sent.map_err(|kind| SendError { payload, kind });
        }
        let mut payload = Some(payload);
        let sent = self.with(|core, slot| payload.take().map_or(Ok(()), |payload| core.send(slot, payload)));
        match (sent, payload) {
            (Some(sent), _) => sent,
            (None, Some(payload)) => Err(SendError { payload, kind: SendErrorKind::Closed }),
            (None, None) => Ok(()),
        }
    }

    #[inline]
    fn push(&self, payload: Payload) -> io::Result<()> {
        self.try_send(payload).map_err(|refused| match refused.kind {
            // Not for one that has just waited for room: the limit is at least the high-water mark.
            SendErrorKind::Full => io::ErrorKind::WouldBlock.into(),
            SendErrorKind::Closed => match self.link.life.get() {
                Life::Over(reason) => error::of_close(reason),
                _ => io::ErrorKind::BrokenPipe.into(),
            },
        })
    }

    #[inline]
    pub(super) fn send(&self, payload: Payload) -> Send<'_> {
        Send { stream: self, payload: Some(payload) }
    }

    /// Queues all pieces, one behind the other with nothing in between, as soon as one may be queued.
    pub(super) async fn send_vectored(&self, pieces: impl Iterator<Item = Payload>) -> io::Result<()> {
        poll_fn(|cx| self.poll_writable(cx)).await?;
        for piece in pieces {
            let refused = match self.try_send(piece) {
                Ok(()) => continue,
                Err(refused) => refused,
            };
            if refused.kind == SendErrorKind::Closed {
                return self.push(refused.payload);
            }
            // So much at once that the connection's limit comes in between.
            let mut rest = Some(refused.payload);
            while let Some(payload) = rest.take() {
                poll_fn(|cx| self.poll_writable(cx)).await?;
                if let Err(refused) = self.try_send(payload) {
                    match refused.kind {
                        SendErrorKind::Full => rest = Some(refused.payload),
                        SendErrorKind::Closed => return self.push(refused.payload),
                    }
                }
            }
        }
        Ok(())
    }

    /// Ready when the kernel has taken everything.
    pub(super) fn poll_flush(&self, cx: &Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.hub.poll_budget(cx));
        let state = self.with(|core, slot| core.send_failure(slot).map_or(Ok(core.unsent(slot)), Err));
        match state {
            Some(Ok(0)) => Poll::Ready(Ok(())),
            Some(Ok(_)) => {
                self.link.writer.set(cx);
                Poll::Pending
            }
            Some(Err(reason)) => Poll::Ready(Err(error::of_close(reason))),
            // Both sides had finished, which is when everything was sent.
            None if self.over() == CloseReason::Eof => Poll::Ready(Ok(())),
            None => Poll::Ready(Err(error::of_close(self.over()))),
        }
    }

    pub(super) fn unsent(&self) -> u64 {
        self.with(|core, slot| core.unsent(slot)).unwrap_or(0)
    }

    pub(super) fn shutdown(&self) {
        self.with(|core, slot| core.shutdown_write(slot));
    }

    pub(super) fn abort(&self) {
        self.with(|core, slot| core.abort(slot));
    }

    pub(super) fn set_idle_timeout(&self, timeout: Option<Duration>) {
        self.with(|core, slot| core.set_idle_timeout(slot, timeout));
    }

    pub(super) fn set_deadline(&self, after: Option<Duration>) {
        self.with(|core, slot| core.set_deadline(slot, after));
    }

    pub(super) fn close_reason(&self) -> Option<CloseReason> {
        match self.link.life.get() {
            Life::Over(reason) => Some(reason),
            _ => None,
        }
    }

    /// Asks the system for both addresses.
    pub(super) async fn addresses(&self) -> io::Result<Addresses> {
        addresses(&self.hub, &self.link).await
    }

    pub(super) async fn set_options(&self, options: &SocketOptions) -> io::Result<()> {
        options.check().map_err(error::invalid)?;
        let question = Question::options(&self.hub, &self.link, options);
        match poll_fn(|cx| question.poll(cx)).await.map_err(error::of_close)? {
            Reply::Options(result) => result,
            Reply::Addresses(_) => unreachable!("answers come in the order of the questions"),
        }
    }
}

/// Asks the system for both addresses of a connection.
pub(super) async fn addresses(hub: &Hub, link: &Link) -> io::Result<Addresses> {
    let question = Question::addresses(hub, link);
    match poll_fn(|cx| question.poll(cx)).await.map_err(error::of_close)? {
        Reply::Addresses(result) => *result,
        Reply::Options(_) => unreachable!("answers come in the order of the questions"),
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.with(|core, slot| core.close(slot, CloseReason::Local));
    }
}

/// The next piece; a word, where an async function would be three.
pub(super) struct Recv<'a>(pub(super) &'a Stream);

impl Future for Recv<'_> {
    type Output = io::Result<Option<Buf>>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll_recv(cx)
    }
}

/// Queues a payload when there is room; holds it once, where nested async functions would hold it thrice.
pub(super) struct Send<'a> {
    stream: &'a Stream,
    payload: Option<Payload>,
}

impl Future for Send<'_> {
    type Output = io::Result<()>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.stream.poll_writable(cx))?;
        let payload = self.payload.take().expect("a future is not polled after it was ready");
        Poll::Ready(self.stream.push(payload))
    }
}

/// Fills a slice; dropped before that, what it had taken is there for the next receive.
pub(super) struct RecvExact<'a> {
    stream: &'a Stream,
    room: &'a mut [u8],
    filled: usize,
}

impl<'a> RecvExact<'a> {
    pub(super) fn new(stream: &'a Stream, room: &'a mut [u8]) -> Self {
        Self { stream, room, filled: 0 }
    }
}

impl Future for RecvExact<'_> {
    type Output = io::Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        while this.filled < this.room.len() {
            match ready!(this.stream.poll_recv(cx)) {
                Ok(Some(buf)) => this.filled += this.stream.move_some(buf, &mut this.room[this.filled..]),
                Ok(None) => {
                    // Now, not when this is dropped: what waits to be received keeps the connection.
                    this.put_back();
                    return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
                }
                Err(error) => {
                    this.put_back();
                    return Poll::Ready(Err(error));
                }
            }
        }
        this.filled = 0;
        this.room = &mut [];
        Poll::Ready(Ok(()))
    }
}

impl RecvExact<'_> {
    fn put_back(&mut self) {
        let filled = std::mem::take(&mut self.filled);
        if filled > 0 {
            self.stream.put_back(Buf::copied(&self.room[..filled]));
        }
    }
}

impl Drop for RecvExact<'_> {
    fn drop(&mut self) {
        self.put_back();
    }
}
