//! Handlers on a simulated kernel: virtual sockets, a virtual clock, one seed.
//!
//! The worker is the real one; only what is below it is simulated. So a test can be exact about
//! time ("closed after thirty seconds of silence" takes microseconds), can meet what a real kernel
//! shows once a month (a cancel that loses its race, a pool that runs dry between two segments,
//! accepts that fail), and can repeat a failure: everything that could happen either way is drawn
//! from the seed, and [`Sim::trace_hash`] tells whether two runs were the same.
//!
//! ```
//! use std::time::Duration;
//! use corelane::sim::{Sim, SimConfig};
//! use corelane::{Accepted, Buf, Conn, Cx, Handler, ListenerConfig, WorkerConfig};
//!
//! struct Echo;
//!
//! impl Handler for Echo {
//!     type Conn = ();
//!     type Message = ();
//!
//!     fn on_accept(&mut self, _: &mut Cx<'_, Self>, _: Accepted) -> Option<()> {
//!         Some(())
//!     }
//!
//!     fn on_data(&mut self, conn: &mut Conn<'_, Self>, data: Buf) {
//!         let _ = conn.send(data);
//!     }
//! }
//!
//! let addr = "10.0.0.1:7".parse().unwrap();
//! for seed in 0..20 {
//!     let sim = Sim::new(SimConfig::seeded(seed));
//!     let worker = sim.worker(WorkerConfig::default(), &[ListenerConfig::new(addr)], Echo)?;
//!     let client = sim.connect(addr);
//!     client.send(b"hello");
//!     sim.run_until(Duration::from_secs(1), || client.received() == b"hello")?;
//!     assert_eq!(worker.connections(), 1);
//!
//!     client.close();
//!     sim.run_until(Duration::from_secs(1), || worker.connections() == 0)?;
//!     assert_eq!(worker.buffers_leased(), 0);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! What happens always, in an order and at times that the seed decides: packets take a time within
//! [`SimConfig::latency`], now and then thrice as long; data is cut into segments, and cut again
//! when it is received; sends are taken at once or a moment later, whole or in parts; completions of
//! different connections change places; cancels take effect at once or later; workers' turns take a
//! little time. What happens only when asked for is in [`Faults`].
//!
//! If a test panics while a [`Sim`] exists, its seed and the last events are printed.

mod peer;
mod run;
mod stuck;
mod worker;

use std::cell::RefCell;
use std::fmt;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

pub use crate::driver::sim::Faults;
pub use peer::{Peer, PeerListener};
pub use stuck::{Stuck, StuckReason};
pub use worker::{SimReport, SimWorker};

use crate::config::{ConfigError, ListenerConfig, WorkerConfig};
use crate::driver::sim::{Actor, Rng, Settings, Shared, World};
use crate::handler::Handler;
use crate::time::Time;
use run::Station;

/// What a simulated world is like.
#[derive(Clone, Debug, PartialEq)]
pub struct SimConfig {
    /// Decides everything that could happen either way.
    pub seed: u64,
    /// Time from one end of a connection to the other, least and most: 20 to 200 µs by default.
    pub latency: (Duration, Duration),
    /// Bytes that one direction of a connection holds at its sender, and again at its receiver;
    /// 64 KiB by default, at least 1.
    pub socket_buffer: u32,
    /// Time that a turn of a worker takes, least and most: 1 to 5 µs by default. With zero, a
    /// worker does any amount of work in no time, and its timers are exact to the nanosecond.
    pub turn_time: (Duration, Duration),
    /// Connections that all workers of one runtime hold at most together; `None` (the default)
    /// leaves it to [`WorkerConfig::max_connections`].
    pub max_connections: Option<u64>,
    /// What goes wrong from the beginning; nothing by default.
    pub faults: Faults,
}

impl SimConfig {
    /// The defaults, with a seed.
    pub fn seeded(seed: u64) -> Self {
        Self {
            seed,
            latency: (Duration::from_micros(20), Duration::from_micros(200)),
            socket_buffer: 64 << 10,
            turn_time: (Duration::from_micros(1), Duration::from_micros(5)),
            max_connections: None,
            faults: Faults::none(),
        }
    }
}

impl Default for SimConfig {
    fn default() -> Self {
        Self::seeded(0)
    }
}

/// A simulated world; a cheap handle.
///
/// Time passes only inside [`run_until`](Self::run_until), [`run_for`](Self::run_for) and their
/// like. A handler must not call them; everything else it may.
#[derive(Clone)]
pub struct Sim(Rc<Inner>);

struct Inner {
    world: Shared,
    seed: u64,
    turn_time: (Duration, Duration),
    max_connections: Option<u64>,
    stations: RefCell<Vec<Rc<dyn Station>>>,
    /// Chance for the run loop and for tests, apart from the world's so that a test's own draws do
    /// not change what the network does.
    dice: RefCell<Rng>,
}

impl Sim {
    /// A world without workers and peers, at time zero.
    pub fn new(config: SimConfig) -> Self {
        let world = World::shared(Settings {
            seed: config.seed,
            latency: config.latency,
            socket_buffer: config.socket_buffer.max(1),
            faults: config.faults,
        });
        Self(Rc::new(Inner {
            world,
            seed: config.seed,
            turn_time: config.turn_time,
            max_connections: config.max_connections,
            stations: RefCell::default(),
            dice: RefCell::new(Rng::new(config.seed ^ 0x5151_5151_5151_5151)),
        }))
    }

    /// The seed that it was made with.
    pub fn seed(&self) -> u64 {
        self.0.seed
    }

    /// The virtual time.
    pub fn now(&self) -> Time {
        self.0.world.borrow().now
    }

    /// Adds a worker that runs `handler` and listens on the given addresses, as a runtime of one
    /// worker. Several workers on one address share its connections.
    ///
    /// # Errors
    /// [`ConfigError`] when the configuration cannot work.
    pub fn worker<H: Handler + 'static>(
        &self,
        config: WorkerConfig,
        listeners: &[ListenerConfig],
        handler: H,
    ) -> Result<SimWorker<H::Message>, ConfigError> {
        let mut handler = Some(handler);
        let mut workers =
            self.workers(1, config, listeners, |_| handler.take().expect("one handler is asked for"))?;
        Ok(workers.remove(0))
    }

    /// Adds `count` workers of one runtime: they reach each other by
    /// [`Cx::post`](crate::Cx::post), and a [`Remote`](crate::Remote) of one reaches all.
    ///
    /// # Errors
    /// [`ConfigError`] when the configuration cannot work.
    pub fn workers<H: Handler + 'static>(
        &self,
        count: usize,
        config: WorkerConfig,
        listeners: &[ListenerConfig],
        handler: impl FnMut(usize) -> H,
    ) -> Result<Vec<SimWorker<H::Message>>, ConfigError> {
        worker::start(self, count, config, listeners, handler)
    }

    /// A foreign client that connects to `addr`.
    pub fn connect(&self, addr: SocketAddr) -> Peer {
        let id = self.0.world.borrow_mut().peer_connect(addr);
        Peer::new(self.0.world.clone(), id)
    }

    /// A foreign server on `addr`, in whose queue 128 connections may wait.
    pub fn listen(&self, addr: SocketAddr) -> PeerListener {
        let id = self.0.world.borrow_mut().listen(addr, 128);
        PeerListener::new(self.0.world.clone(), id)
    }

    /// Changes what goes wrong from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.0.world.borrow_mut().settings.faults = faults;
    }

    /// Cuts an address off: nothing from or to it arrives. What is sent meanwhile is repeated and
    /// arrives after [`heal`](Self::heal), except resets, which nobody repeats.
    pub fn partition(&self, addr: SocketAddr) {
        self.0.world.borrow_mut().set_reachable(addr, false);
    }

    /// Ends a [`partition`](Self::partition).
    pub fn heal(&self, addr: SocketAddr) {
        self.0.world.borrow_mut().set_reachable(addr, true);
    }

    /// A number in `0..below`, decided by the seed: for what a test wants to vary.
    pub fn random(&self, below: u64) -> u64 {
        self.0.dice.borrow_mut().below(below)
    }

    /// Lets the world go on until `done` says so; it is asked after everything that happens.
    ///
    /// # Errors
    /// [`Stuck`] when `limit` (virtual time) passes before, when nothing is left that could happen,
    /// or when a worker spins.
    pub fn run_until(&self, limit: Duration, done: impl FnMut() -> bool) -> Result<(), Stuck> {
        run::until(self, limit, done)
    }

    /// Lets the world go on for a length of virtual time.
    ///
    /// # Panics
    /// When a worker spins.
    pub fn run_for(&self, time: Duration) {
        run::for_time(self, time);
    }

    /// A hash of everything that happened: every event handed to a worker, every action of a peer,
    /// their times and their bytes.
    pub fn trace_hash(&self) -> u64 {
        self.0.world.borrow().trace.hash()
    }

    /// The last `n` events (of the last 1,024 that are kept), the oldest first.
    pub fn trace_tail(&self, n: usize) -> Vec<String> {
        self.0.world.borrow().trace.tail(n)
    }

    /// Puts a mark of the test's own into the trace.
    pub fn note(&self, what: &'static str, value: u64) {
        self.0.world.borrow_mut().note(Actor::Net, what, 0, value);
    }
}

impl fmt::Debug for Sim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sim(seed {}, {})", self.0.seed, self.now())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if std::thread::panicking()
            && let Ok(world) = self.world.try_borrow()
        {
            let tail = world.trace.tail(24).join("\n  ");
            eprintln!("simulation with seed {} at {}, last events:\n  {tail}", self.seed, world.now);
        }
    }
}
