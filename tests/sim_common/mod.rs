//! What the simulated scenarios share: a handler that a test steers by closures, and checks that
//! hold for every connection whatever the scenario is.

#![allow(dead_code, reason = "each test file uses its own part of this")]

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use corelane::sim::{Sim, SimConfig, SimWorker};
use corelane::{
    Accepted, Buf, BufferConfig, CloseReason, Closed, Conn, ConnId, ConnectConfig, Cx, Descriptors, Handler,
    ListenerConfig, Time, UringFeatures, WorkerConfig,
};

/// Something that a test lets the worker do, from outside.
pub type Order = Box<dyn FnOnce(&mut Cx<'_, Probe>) + Send>;
type OnConn = Box<dyn FnMut(&mut Conn<'_, Probe>)>;
type OnCx = Box<dyn FnMut(&mut Cx<'_, Probe>)>;
type OnAccept = Box<dyn FnMut(&mut Cx<'_, Probe>, Accepted) -> bool>;
type OnData = Box<dyn FnMut(&mut Conn<'_, Probe>, Buf)>;
type OnClosed = Box<dyn FnMut(&mut Cx<'_, Probe>, CloseReason)>;

/// What a connection's state knows: its number and, once it was seen, its name.
#[derive(Debug)]
pub struct State {
    pub number: u64,
    pub id: Cell<Option<ConnId>>,
}

/// The end of a connection.
#[derive(Clone, Copy, Debug)]
pub struct End {
    pub number: u64,
    pub at: Time,
    pub reason: CloseReason,
}

/// What happened, readable while the worker runs.
#[derive(Clone, Default)]
pub struct Log(pub Rc<Inner>);

#[derive(Default)]
pub struct Inner {
    pub begun: Cell<u64>,
    pub open: RefCell<BTreeSet<u64>>,
    pub most_open: Cell<usize>,
    pub ends: RefCell<Vec<End>>,
    pub writable: Cell<u64>,
    pub messages: Cell<u64>,
}

impl Log {
    pub fn reasons(&self) -> Vec<CloseReason> {
        self.0.ends.borrow().iter().map(|end| end.reason).collect()
    }

    pub fn ended(&self) -> usize {
        self.0.ends.borrow().len()
    }

    pub fn open(&self) -> usize {
        self.0.open.borrow().len()
    }

    /// A new connection's state.
    pub fn state(&self) -> State {
        let number = self.0.begun.get();
        self.0.begun.set(number + 1);
        let mut open = self.0.open.borrow_mut();
        open.insert(number);
        self.0.most_open.set(self.0.most_open.get().max(open.len()));
        State { number, id: Cell::new(None) }
    }

    /// A state that was made for a connection which was not begun.
    pub fn forget(&self, number: u64) {
        self.0.open.borrow_mut().remove(&number);
        let end = End { number, at: Time::ZERO, reason: CloseReason::Local };
        self.0.ends.borrow_mut().push(end);
    }
}

/// A handler made of closures. By default it echoes, and closes when the peer has finished.
pub struct Probe {
    pub log: Log,
    pub start: OnCx,
    pub accept: OnAccept,
    pub connected: OnConn,
    pub data: OnData,
    pub eof: OnConn,
    pub writable: OnConn,
    pub timer: OnConn,
    pub alarm: OnCx,
    pub closed: OnClosed,
    pub stop: OnCx,
}

impl Probe {
    pub fn new(log: &Log) -> Self {
        Self {
            log: log.clone(),
            start: Box::new(|_| {}),
            accept: Box::new(|_, _| true),
            connected: Box::new(|_| {}),
            data: Box::new(|conn, data| {
                let _ = conn.send(data);
            }),
            eof: Box::new(|conn| conn.close()),
            writable: Box::new(|_| {}),
            timer: Box::new(|_| {}),
            alarm: Box::new(|_| {}),
            closed: Box::new(|_, _| {}),
            stop: Box::new(|_| {}),
        }
    }

    /// Every callback of a connection meets the same state under the same name, while it is open.
    fn check(&self, conn: &mut Conn<'_, Self>) {
        let id = conn.id();
        let state = conn.state();
        let known = state.id.replace(Some(id)).unwrap_or(id);
        assert_eq!(known, id, "a callback reached another connection's state");
        let number = state.number;
        assert!(self.log.0.open.borrow().contains(&number), "a callback after on_closed");
    }
}

impl Handler for Probe {
    type Conn = State;
    type Message = Order;

    fn on_start(&mut self, cx: &mut Cx<'_, Self>) {
        (self.start)(cx);
    }

    fn on_accept(&mut self, cx: &mut Cx<'_, Self>, accepted: Accepted) -> Option<State> {
        (self.accept)(cx, accepted).then(|| self.log.state())
    }

    fn on_connected(&mut self, conn: &mut Conn<'_, Self>) {
        self.check(conn);
        (self.connected)(conn);
    }

    fn on_data(&mut self, conn: &mut Conn<'_, Self>, data: Buf) {
        self.check(conn);
        assert!(!data.is_empty(), "data is never empty");
        (self.data)(conn, data);
    }

    fn on_eof(&mut self, conn: &mut Conn<'_, Self>) {
        self.check(conn);
        (self.eof)(conn);
    }

    fn on_writable(&mut self, conn: &mut Conn<'_, Self>) {
        self.check(conn);
        self.log.0.writable.set(self.log.0.writable.get() + 1);
        (self.writable)(conn);
    }

    fn on_timer(&mut self, conn: &mut Conn<'_, Self>) {
        self.check(conn);
        (self.timer)(conn);
    }

    fn on_alarm(&mut self, cx: &mut Cx<'_, Self>) {
        (self.alarm)(cx);
    }

    fn on_message(&mut self, cx: &mut Cx<'_, Self>, order: Order) {
        self.log.0.messages.set(self.log.0.messages.get() + 1);
        order(cx);
    }

    fn on_closed(&mut self, cx: &mut Cx<'_, Self>, closed: Closed<State>) {
        let State { number, id } = closed.state;
        assert!(self.log.0.open.borrow_mut().remove(&number), "on_closed was called twice");
        assert!(id.get().is_none_or(|id| id == closed.id), "on_closed with another one's state");
        assert!(cx.conn(closed.id).is_none(), "the name of a closed connection names nothing");
        let end = End { number, at: cx.now(), reason: closed.reason };
        self.log.0.ends.borrow_mut().push(end);
        (self.closed)(cx, closed.reason);
    }

    fn on_stop(&mut self, cx: &mut Cx<'_, Self>) {
        (self.stop)(cx);
    }
}

pub const SECOND: Duration = Duration::from_secs(1);
pub const MINUTE: Duration = Duration::from_secs(60);

pub fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

pub fn addr() -> SocketAddr {
    SocketAddr::from(([10, 1, 0, 1], 7000))
}

pub fn other_addr() -> SocketAddr {
    SocketAddr::from(([10, 2, 0, 1], 7001))
}

/// A worker small enough for its limits to be met.
pub fn small() -> WorkerConfig {
    WorkerConfig {
        max_connections: 64,
        buffers: BufferConfig { size: 1024, count: 64, send_count: 4, ..BufferConfig::default() },
        high_water: 8 << 10,
        low_water: 2 << 10,
        send_limit: 64 << 10,
        // A mailbox of thousands would cost more than most of these histories.
        mailbox: 256,
        ..WorkerConfig::default()
    }
}

pub fn listener() -> ListenerConfig {
    ListenerConfig { backlog: 8, ..ListenerConfig::new(addr()) }
}

/// A world in which the worker is never late, for tests about time.
pub fn exact(seed: u64) -> Sim {
    Sim::new(SimConfig { turn_time: (Duration::ZERO, Duration::ZERO), ..SimConfig::seeded(seed) })
}

/// `len` bytes that tell where they belong: a shift, a loss or a repetition shows.
pub fn pattern(salt: u64, len: usize) -> Vec<u8> {
    let mut x = salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            (x >> 32) as u8
        })
        .collect()
}

/// What must be true when every peer is gone: everything is back at its starting level.
pub fn assert_at_rest<M>(worker: &SimWorker<M>, accepts: usize) {
    assert_eq!(worker.connections(), 0, "connections");
    assert_eq!(worker.buffers_leased(), 0, "leased buffers");
    assert_eq!(worker.payloads_queued(), 0, "queued payloads");
    assert_eq!(worker.ops_in_flight(), accepts, "operations in flight, beyond armed accepts");
    assert_eq!(worker.metrics().stale, 0, "completions that reached a wrong generation");
}

thread_local! {
    /// Where orders, which must be `Send`, find the log of their test's thread.
    static LOG: RefCell<Option<Log>> = const { RefCell::new(None) };
}

/// Sets the log in which connections that [`connect`] makes are noted.
pub fn with_log(log: &Log) {
    LOG.with(|kept| *kept.borrow_mut() = Some(log.clone()));
}

/// Begins a connection to `other_addr` from inside a callback, if the worker lets it.
pub fn connect_from(cx: &mut Cx<'_, Probe>, timeout: Duration) -> Option<ConnId> {
    let log = LOG.with(|kept| kept.borrow().clone()).expect("the test has set its log");
    let config = ConnectConfig { timeout, ..ConnectConfig::new(other_addr()) };
    match cx.connect(config, log.state()) {
        Ok(id) => Some(id),
        Err(refused) => {
            log.forget(refused.state.number);
            None
        }
    }
}

/// Lets a worker begin a connection to `other_addr`.
pub fn connect(worker: &SimWorker<Order>) {
    let order: Order = Box::new(|cx| {
        connect_from(cx, SECOND);
    });
    worker.remote().post(0, order).unwrap_or_else(|_| panic!("the mailbox has room"));
}

/// Whether the seeds are those that the test was written for, so that it may say what is common
/// among them.
pub fn usual_seeds() -> bool {
    std::env::var_os("CORELANE_SIM_SEEDS").is_none()
}

pub use corelane::sim::seeds;

/// The seeds of a scenario that moves megabytes: of a longer search every hundredth.
pub fn heavy_seeds(count: u64) -> impl Iterator<Item = u64> {
    let range = seeds(count);
    let step = if range.end - range.start > 1_000 { 100 } else { 1 };
    range.step_by(step)
}

/// What the kernel can do, by seed: everything, what Linux 5.19 has, what readiness kernels and Windows
/// are like, and the least.
pub fn features(seed: u64) -> UringFeatures {
    match seed % 4 {
        0 => UringFeatures::ALL,
        1 => UringFeatures::LINUX_5_19,
        2 => UringFeatures { provided_buffers: false, ..UringFeatures::ALL },
        _ => UringFeatures::LEAST,
    }
}

/// A [`small`] worker on a kernel of the seed's kind.
pub fn small_on(seed: u64) -> WorkerConfig {
    let descriptors = if (seed / 4).is_multiple_of(2) { Descriptors::Direct } else { Descriptors::Fd };
    WorkerConfig { uring: features(seed / 2), descriptors, ..small() }
}
