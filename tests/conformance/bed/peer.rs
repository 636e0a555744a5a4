//! Foreign programs, as a script sees them.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;

use super::{Bed, Listening, Socket};
use crate::bytes::same;

/// A foreign listener.
pub struct Listener<'b> {
    pub(super) bed: &'b Bed,
    pub(super) inner: Box<dyn Listening>,
}

impl<'b> Listener<'b> {
    pub fn addr(&self) -> SocketAddr {
        self.inner.addr()
    }

    /// The next connection.
    pub fn accept(&self) -> Peer<'b> {
        let mut taken = None;
        self.bed.until("a connection to a foreign server", || {
            taken = taken.take().or_else(|| self.inner.accept());
            taken.is_some()
        });
        self.bed.peer(taken.expect("it was accepted"))
    }

    /// Whether somebody waits to be taken.
    pub fn try_accept(&self) -> Option<Peer<'b>> {
        self.inner.accept().map(|socket| self.bed.peer(socket))
    }
}

/// How a connection ended for its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Fin,
    Reset,
}

/// A foreign program. It reads by itself while the script waits for something, unless told not to.
pub struct Peer<'b> {
    pub(super) bed: &'b Bed,
    pub(super) socket: Rc<dyn Socket>,
    /// Read from the socket, not expected yet.
    pub(super) inbox: RefCell<Vec<u8>>,
    /// Bytes that expectations have used up.
    pub(super) taken: Cell<u64>,
}

impl Peer<'_> {
    /// The address that the server sees.
    pub fn addr(&self) -> SocketAddr {
        self.socket.addr()
    }

    pub fn send(&self, bytes: &[u8]) {
        self.socket.send(bytes);
    }

    /// Sends, and waits until the kernel has it.
    pub fn send_now(&self, bytes: &[u8]) {
        self.socket.send(bytes);
        self.bed.until("a kernel to take what a client sends", || self.socket.sent_all());
    }

    pub fn sent_all(&self) -> bool {
        self.socket.sent_all()
    }

    pub fn set_reading(&self, reading: bool) {
        self.socket.set_reading(reading);
    }

    pub fn read_limit(&self, bytes: u64) {
        self.socket.read_limit(bytes);
    }

    pub fn shutdown(&self) {
        self.socket.shutdown();
    }

    pub fn close(&self) {
        self.socket.close();
    }

    pub fn reset(&self) {
        self.socket.reset();
    }

    pub fn is_over(&self) -> bool {
        self.socket.is_eof() || self.socket.is_reset()
    }

    /// Bytes received and not expected yet.
    pub fn waiting(&self) -> u64 {
        self.socket.total() - self.taken.get()
    }

    /// Everything received and not expected yet.
    pub fn take(&self) -> Vec<u8> {
        let mut inbox = self.inbox.borrow_mut();
        inbox.extend(self.socket.take());
        self.taken.set(self.taken.get() + inbox.len() as u64);
        std::mem::take(&mut inbox)
    }

    /// Expects exactly these bytes next; more may follow.
    pub fn expect(&self, wanted: &[u8]) {
        self.bed.until("a client to receive what it should", || {
            self.waiting() >= wanted.len() as u64 || self.is_over()
        });
        let mut inbox = self.inbox.borrow_mut();
        inbox.extend(self.socket.take());
        let n = inbox.len().min(wanted.len());
        same(&inbox[..n], wanted, "what a client received");
        inbox.drain(..n);
        self.taken.set(self.taken.get() + n as u64);
    }

    /// Sends `bytes` and expects the same back.
    pub fn exchange(&self, bytes: &[u8]) {
        self.send(bytes);
        self.expect(bytes);
    }

    /// Waits for the end of the stream, whichever it is.
    pub fn end(&self) -> End {
        self.bed.until("a client to see its connection's end", || self.is_over());
        if self.socket.is_reset() { End::Reset } else { End::Fin }
    }

    /// Expects a clean end, and nothing before it.
    pub fn expect_eof(&self) {
        assert_eq!((self.end(), self.waiting()), (End::Fin, 0), "a clean end, with nothing before it");
    }

    pub fn expect_reset(&self) {
        assert_eq!(self.end(), End::Reset);
    }
}
