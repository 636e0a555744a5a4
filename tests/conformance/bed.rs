//! Where a scenario is played: a server on some backend, and foreign programs that talk to it.
//!
//! A bed hides who makes the world go on. On a real kernel the script's thread plays all foreign programs,
//! on sockets that do not block; on the simulated kernel it turns the simulation. Either happens in
//! [`Bed::until`] and whatever waits by it, and nowhere else: between two waits a script may tell its peers
//! and its server any number of things, and nothing can hang.

mod real;
mod sim;

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use corelane::{
    Backend, BufferConfig, Conn, ConnectConfig, ConnectErrorKind, Cx, ListenerConfig, Remote, Snapshot,
    SocketOptions, WorkerConfig,
};

use crate::bytes::same;
use crate::list::{Column, Scenario};
use crate::script::{Log, Script, Task};

/// No script waits longer than this for any one thing.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A listening address to be had.
#[derive(Clone, Debug)]
pub struct Listen {
    /// Of which family; the port is the bed's choice.
    pub ip: IpAddr,
    pub backlog: u32,
    pub dual_stack: bool,
    pub options: SocketOptions,
}

impl Default for Listen {
    fn default() -> Self {
        Self {
            ip: Ipv4Addr::LOCALHOST.into(),
            backlog: 256,
            dual_stack: false,
            options: SocketOptions::default(),
        }
    }
}

impl Listen {
    /// Accepted sockets whose send buffers are small, so that what is queued stays with the worker.
    pub fn narrow() -> Self {
        let options = SocketOptions { send_buffer: Some(4096), ..SocketOptions::default() };
        Self { options, ..Self::default() }
    }

    fn config(&self, addr: SocketAddr) -> ListenerConfig {
        ListenerConfig {
            backlog: self.backlog,
            dual_stack: self.dual_stack,
            options: self.options.clone(),
            ..ListenerConfig::new(addr)
        }
    }
}

/// A server to be started.
#[derive(Clone, Debug)]
pub struct Plan {
    pub workers: usize,
    pub config: WorkerConfig,
    pub listen: Vec<Listen>,
}

impl Default for Plan {
    fn default() -> Self {
        Self { workers: 1, config: config(), listen: vec![Listen::default()] }
    }
}

impl Plan {
    pub fn config(config: WorkerConfig) -> Self {
        Self { config, ..Self::default() }
    }

    pub fn listen(listen: impl Into<Vec<Listen>>) -> Self {
        Self { listen: listen.into(), ..Self::default() }
    }
}

/// A worker small enough to be started hundreds of times, and for its limits to be met.
pub fn config() -> WorkerConfig {
    WorkerConfig {
        max_connections: 1024,
        buffers: BufferConfig { size: 2048, count: 128, send_count: 8, ..BufferConfig::default() },
        sq_entries: 256,
        cq_entries: 4096,
        ..WorkerConfig::default()
    }
}

/// How a server ended.
#[derive(Clone, Debug, Default)]
pub struct Report {
    pub finished: u64,
    pub aborted: u64,
    pub ops_in_kernel: u64,
    pub buffers_outstanding: u64,
    pub messages_undelivered: u64,
    pub metrics: Snapshot,
}

/// How a server is to end.
#[derive(Clone, Copy, Debug)]
pub enum Ending {
    /// It is asked to stop, and to reset after this time who is left.
    Stop(Duration),
    /// By itself.
    Join,
    /// Its handle is dropped; nobody waits for it, and there is no report.
    Drop,
}

/// A handler's constructor, called on its worker's thread.
pub type Make = Arc<dyn Fn(usize) -> Script + Send + Sync>;

/// A kernel, real or not, with everything that a script needs of it.
pub trait World {
    /// Lets the world go on until `done`.
    fn until(&self, what: &str, done: &mut dyn FnMut() -> bool);
    /// Lets the world go on for a while.
    fn pass(&self, time: Duration);
    fn start(&self, plan: &Plan, make: Make) -> Box<dyn Running>;
    /// A foreign client; it is connected when this returns. `narrow`: with a small receive buffer.
    fn connect(&self, to: SocketAddr, narrow: bool) -> Rc<dyn Socket>;
    /// A foreign server.
    fn listen(&self) -> Box<dyn Listening>;
    /// An address where connecting neither succeeds nor fails, while the second value lives.
    fn full(&self) -> (SocketAddr, Box<dyn Any>);
    /// An address where nobody listens, while the second value lives.
    fn refusing(&self) -> (SocketAddr, Box<dyn Any>);
    /// Closes every foreign socket.
    fn close_all(&self);
    /// A number below `below`.
    fn random(&self, below: u64) -> u64;
}

/// A server that runs.
pub trait Running {
    fn addrs(&self) -> &[SocketAddr];
    fn metrics(&self) -> Snapshot;
    fn remote(&self) -> Remote<Task>;
    fn end(&self, how: Ending);
    /// How it ended; `None` while it has not. An error is what the runtime says of its failure.
    fn ended(&self) -> Option<Result<Report, String>>;
    /// Whether no worker ended without being told to.
    fn is_well(&self) -> bool;
}

/// A foreign program's socket.
pub trait Socket {
    fn addr(&self) -> SocketAddr;
    fn send(&self, bytes: &[u8]);
    /// Whether its kernel has everything that it was told to send.
    fn sent_all(&self) -> bool;
    /// Takes out what was read.
    fn take(&self) -> Vec<u8>;
    /// Bytes read since the beginning.
    fn total(&self) -> u64;
    fn set_reading(&self, reading: bool);
    /// Reads so many further bytes, then no more.
    fn read_limit(&self, bytes: u64);
    /// FIN, after what it was told to send.
    fn shutdown(&self);
    /// Closes, after what it was told to send.
    fn close(&self);
    fn reset(&self);
    fn is_eof(&self) -> bool;
    fn is_reset(&self) -> bool;
}

/// A foreign server's listener.
pub trait Listening {
    fn addr(&self) -> SocketAddr;
    fn accept(&self) -> Option<Rc<dyn Socket>>;
}

/// A scenario's stage.
pub struct Bed {
    world: Rc<dyn World>,
    column: Column,
    differs: bool,
    servers: RefCell<Vec<Rc<Seat>>>,
}

/// A server as the bed keeps it.
struct Seat {
    running: Box<dyn Running>,
    log: Log,
    /// It was told to end, or is expected to fail.
    ending: Cell<bool>,
    report: RefCell<Option<Result<Report, String>>>,
}

impl Bed {
    /// A stage on the kernel of `column`.
    ///
    /// # Errors
    /// Why the system does not have it.
    pub fn open(column: Column, scenario: &Scenario, seed: u64) -> Result<Self, String> {
        let world: Rc<dyn World> = match column {
            Column::Sim => Rc::new(sim::SimWorld::new(seed, false)),
            Column::SimFaults => Rc::new(sim::SimWorld::new(seed, true)),
            Column::Auto => Rc::new(real::RealWorld::new(Backend::Auto, column)?),
            Column::Uring | Column::UringFd | Column::Uring519 | Column::UringLeast => {
                Rc::new(real::RealWorld::new(Backend::IoUring, column)?)
            }
            Column::Epoll => Rc::new(real::RealWorld::new(Backend::Epoll, column)?),
            Column::Iocp => Rc::new(real::RealWorld::new(Backend::Iocp, column)?),
        };
        let differs = scenario.differs(column).is_some();
        Ok(Self { world, column, differs, servers: RefCell::default() })
    }

    /// Whether the list says that this scenario ends otherwise here.
    pub fn differs(&self) -> bool {
        self.differs
    }

    pub fn is_sim(&self) -> bool {
        matches!(self.column, Column::Sim | Column::SimFaults)
    }

    /// How late something timed may be; `None` where that depends on the machine.
    pub fn slack(&self) -> Option<Duration> {
        (self.column == Column::Sim).then_some(Duration::from_millis(10))
    }

    /// How many rounds to make: what is cheap on one kernel is not on the other.
    pub fn rounds(&self, real: usize, sim: usize) -> usize {
        match self.column {
            Column::Sim | Column::SimFaults => sim,
            // Under Wine everything goes through one more process.
            Column::Iocp => real.div_ceil(4),
            _ => real,
        }
    }

    pub fn random(&self, low: usize, high: usize) -> usize {
        low + self.world.random((high - low + 1) as u64) as usize
    }

    pub fn one_in(&self, n: u64) -> bool {
        self.world.random(n) == 0
    }

    /// Lets the world go on until `done`.
    pub fn until(&self, what: &str, mut done: impl FnMut() -> bool) {
        self.world.until(what, &mut || {
            for seat in self.servers.borrow().iter() {
                if !seat.ending.get() && !seat.running.is_well() {
                    seat.running.end(Ending::Join);
                    seat.ending.set(true);
                    panic!("a worker ended by itself while waiting for: {what}; {}", seat.log);
                }
            }
            done()
        });
    }

    /// Lets the world go on for a while, for what must *not* happen meanwhile.
    pub fn pass(&self, time: Duration) {
        self.world.pass(time);
    }

    pub fn serve(&self, plan: Plan, shape: impl Fn(Script) -> Script + Send + Sync + 'static) -> Server<'_> {
        let log = Log::default();
        let seen = log.clone();
        self.serve_logged(plan, log, move |_| shape(Script::new(&seen)))
    }

    /// As [`serve`](Self::serve), for a handler that knows its worker, or writes into the log itself.
    pub fn serve_logged(
        &self,
        plan: Plan,
        log: Log,
        make: impl Fn(usize) -> Script + Send + Sync + 'static,
    ) -> Server<'_> {
        let running = self.world.start(&plan, Arc::new(make));
        let seat = Rc::new(Seat { running, log, ending: Cell::new(false), report: RefCell::default() });
        self.servers.borrow_mut().push(seat.clone());
        Server { bed: self, seat }
    }

    pub fn echo(&self) -> Server<'_> {
        self.serve(Plan::default(), Script::echo)
    }

    pub fn connect(&self, to: SocketAddr) -> Peer<'_> {
        self.peer(self.world.connect(to, false))
    }

    /// A client that is felt soon when it does not read.
    pub fn connect_narrow(&self, to: SocketAddr) -> Peer<'_> {
        self.peer(self.world.connect(to, true))
    }

    pub fn listen(&self) -> Listener<'_> {
        Listener { bed: self, inner: self.world.listen() }
    }

    pub fn full(&self) -> (SocketAddr, Box<dyn Any>) {
        self.world.full()
    }

    pub fn refusing(&self) -> (SocketAddr, Box<dyn Any>) {
        self.world.refusing()
    }

    fn peer(&self, socket: Rc<dyn Socket>) -> Peer<'_> {
        Peer { bed: self, socket, inbox: RefCell::default(), taken: Cell::new(0) }
    }

    /// The end of every scenario: foreign programs leave, servers are stopped, and nothing may be left.
    pub fn close(self) {
        self.world.close_all();
        let seats = self.servers.borrow().clone();
        for seat in seats {
            let server = Server { bed: &self, seat };
            if server.seat.report.borrow().is_none() && !matches!(server.seat.ending.get(), true) {
                server.stop(Duration::from_secs(10));
            }
        }
    }
}

/// A server of a scenario.
pub struct Server<'b> {
    bed: &'b Bed,
    seat: Rc<Seat>,
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
    pub fn closed(&self, serial: usize) -> corelane::CloseReason {
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

/// A foreign listener.
pub struct Listener<'b> {
    bed: &'b Bed,
    inner: Box<dyn Listening>,
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
    bed: &'b Bed,
    socket: Rc<dyn Socket>,
    /// Read from the socket, not expected yet.
    inbox: RefCell<Vec<u8>>,
    /// Bytes that expectations have used up.
    taken: Cell<u64>,
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
