//! A server, as a script sees it.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use corelane::{CloseReason, Conn, ConnectConfig, ConnectErrorKind, Cx, Remote, Snapshot};

use super::{Bed, Ending, Peer, Report, Seat};
use crate::script::{Log, Script, Task};

/// A server of a scenario.
pub struct Server<'b> {
    pub(super) bed: &'b Bed,
    pub(super) seat: Rc<Seat>,
}

impl<'b> Server<'b> {
    pub fn log(&self) -> &Log {
        &self.seat.log
    }

    /// Its first listening address.
    pub fn addr(&self) -> SocketAddr {
        self.addrs()[0]
    }

    pub fn addrs(&self) -> &[SocketAddr] {
        self.seat.running.addrs()
    }

    pub fn metrics(&self) -> Snapshot {
        self.seat.running.metrics()
    }

    pub fn remote(&self) -> Remote<Task> {
        self.seat.running.remote()
    }

    /// Waits until the counters of all workers together say so.
    pub fn counters(&self, what: &str, mut done: impl FnMut(&Snapshot) -> bool) {
        self.bed.until(what, || done(&self.metrics()));
    }

    /// A client, and its connection's serial: it is accepted when this returns.
    pub fn join(&self) -> (Peer<'b>, usize) {
        let serial = self.log().begun();
        let peer = self.bed.connect(self.addr());
        self.bed.until("the client to be accepted", || self.log().begun() > serial);
        (peer, serial)
    }

    pub fn join_narrow(&self) -> (Peer<'b>, usize) {
        let serial = self.log().begun();
        let peer = self.bed.connect_narrow(self.addr());
        self.bed.until("the client to be accepted", || self.log().begun() > serial);
        (peer, serial)
    }

    /// Has the first worker's thread do something.
    pub fn tell(&self, act: impl FnOnce(&mut Cx<'_, Script>) + Send + 'static) {
        self.remote().post(0, Task::new(act)).expect("the worker takes messages");
    }

    /// Has the first worker's thread do something, and waits for what it gives.
    pub fn ask<T: Send + 'static>(&self, act: impl FnOnce(&mut Cx<'_, Script>) -> T + Send + 'static) -> T {
        let answer = Arc::new(Mutex::new(None));
        let slot = answer.clone();
        self.tell(move |cx| {
            let value = act(cx);
            *slot.lock().expect("nobody panics here") = Some(value);
        });
        let mut got = None;
        self.bed.until("the worker to answer", || {
            got = answer.lock().expect("nobody panics here").take();
            got.is_some()
        });
        got.expect("it answered")
    }

    /// Has a worker do something with a connection, which must be open.
    pub fn on<T: Send + 'static>(
        &self,
        serial: usize,
        act: impl FnOnce(&mut Conn<'_, Script>) -> T + Send + 'static,
    ) -> T {
        let id = self.log().id(serial);
        self.ask(move |cx| act(&mut cx.conn(id).expect("the connection is open")))
    }

    /// Begins an outgoing connection; returns its serial.
    pub fn connect(&self, config: ConnectConfig) -> Result<usize, ConnectErrorKind> {
        let log = self.log().clone();
        self.ask(move |cx| log.connect(cx, config))
    }

    /// Waits for a connection's end and returns why it was.
    pub fn closed(&self, serial: usize) -> CloseReason {
        self.bed.until("the connection's end", || self.log().closed(serial).is_some());
        self.log().closed(serial).expect("it ended")
    }

    /// Waits until the connection has received so many bytes.
    pub fn received(&self, serial: usize, bytes: usize) {
        self.bed.until("the server to receive everything", || self.log().data_len(serial) >= bytes);
    }

    /// Waits until no connection and no buffer is left.
    pub fn empties(&self) {
        self.counters("no connection and no buffer left", |total| {
            total.connections == 0 && total.buffers_out == 0
        });
    }

    /// Holds the worker up, so that what happens meanwhile it finds all at once; until the guard is dropped.
    /// In the simulation nothing is held up: there the order is chance's.
    pub fn hold(&self) -> Option<Hold> {
        if self.bed.is_sim() {
            return None;
        }
        let (release, wait) = channel::<()>();
        let held = Arc::new(Mutex::new(false));
        let here = held.clone();
        self.tell(move |_| {
            *here.lock().expect("nobody panics here") = true;
            // The other end is dropped, which is the signal.
            let _ = wait.recv();
        });
        self.bed.until("the worker to stand still", || *held.lock().expect("nobody panics here"));
        Some(Hold { _release: release })
    }

    /// Stops, and checks what must be true of every end.
    pub fn stop(&self, deadline: Duration) -> Report {
        self.ends(Ending::Stop(deadline)).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Waits for the end that is asked for; an error is what the runtime says of its failure.
    pub fn ends(&self, how: Ending) -> Result<Report, String> {
        self.end(how);
        self.ended()
    }

    /// Begins an end.
    pub fn end(&self, how: Ending) {
        self.seat.ending.set(true);
        self.seat.running.end(how);
    }

    /// Waits for an end that was begun.
    pub fn ended(&self) -> Result<Report, String> {
        let mut ended = None;
        self.bed.until("the server's end", || {
            ended = ended.take().or_else(|| self.seat.running.ended());
            ended.is_some()
        });
        let ended = ended.expect("it ended");
        *self.seat.report.borrow_mut() = Some(ended.clone());
        if let Ok(report) = &ended {
            assert_eq!(report.ops_in_kernel, 0, "operations left in the kernel: {report:?}");
            assert_eq!(report.buffers_outstanding, 0, "buffers out: {report:?}");
            assert_eq!(report.metrics.connections, 0, "connections held: {report:?}");
            assert_eq!(report.metrics.stale, 0, "completions that reached a wrong generation: {report:?}");
            assert!(self.log().all_ended(), "a connection without its end: {}", self.log());
        }
        ended
    }
}

/// Keeps a worker from going on.
pub struct Hold {
    _release: Sender<()>,
}
