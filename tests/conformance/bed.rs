//! Where a scenario is played: a server on some backend, and foreign programs that talk to it.
//!
//! A bed hides who makes the world go on. On a real kernel the script's thread plays all foreign programs,
//! on sockets that do not block; on the simulated kernel it turns the simulation. Either happens in
//! [`Bed::until`] and whatever waits by it, and nowhere else: between two waits a script may tell its peers
//! and its server any number of things, and nothing can hang.

mod peer;
mod real;
mod server;
mod sim;

pub use peer::{End, Listener, Peer};
pub use server::Server;

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use corelane::{Backend, BufferConfig, ListenerConfig, Remote, Snapshot, SocketOptions, WorkerConfig};

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

    /// How much to send: more than a kernel keeps for one connection, if it is to fill up.
    pub fn size(&self, real: usize, sim: usize) -> usize {
        if self.is_sim() { sim } else { real }
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
            if server.seat.report.borrow().is_none() && !server.seat.ending.get() {
                server.stop(Duration::from_secs(10));
            }
        }
    }
}
