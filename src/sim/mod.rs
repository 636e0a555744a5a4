//! A simulated kernel for tests of your own servers: virtual sockets, a virtual clock, one seed.
//!
//! The worker is the real one; only what is below it is simulated. So a test can be exact about
//! time ("closed after thirty seconds of silence" takes microseconds), can meet what a real kernel
//! shows once a month (a cancel that loses its race, a pool that runs dry between two segments,
//! accepts that fail), and can repeat a failure: everything that could happen either way is drawn
//! from the seed, and [`Sim::trace_hash`] tells whether two runs were the same.
//!
//! ```
//! use std::rc::Rc;
//! use std::time::Duration;
//! use corelane::sim::{Exploration, Faults, SimConfig};
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
//!         if conn.send(data).is_err() {
//!             conn.abort(); // an echo with a hole would be a lie
//!         }
//!     }
//! }
//!
//! let addr = "10.0.0.1:7".parse().unwrap();
//! let config = SimConfig { faults: Faults::benign(0.1), ..SimConfig::default() };
//! let explored = Exploration::new(config).seeds(20).run(|sim| {
//!     let worker = sim.worker(WorkerConfig::default(), &[ListenerConfig::new(addr)], Echo)?;
//!     let client = Rc::new(sim.connect(addr));
//!     // Safety: while everything goes wrong, nothing wrong may come back ...
//!     sim.always("the echo is what was sent", {
//!         let client = client.clone();
//!         move || if b"hello".starts_with(&client.received()) { Ok(()) } else { Err("it is not".into()) }
//!     });
//!     client.send(b"hello");
//!     sim.run_for(Duration::from_millis(50));
//!     // ... and liveness: when the faults end, it must get done.
//!     sim.calm_until(Duration::from_secs(5), || client.received() == b"hello")?;
//!     client.close();
//!     sim.run_until(Duration::from_secs(5), || worker.check_at_rest().is_ok())?;
//!     Ok(())
//! })?;
//! assert_eq!(explored.seeds, 20);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What there is
//!
//! A [`Sim`] is a world with a clock and a network. In it are *workers* ([`Sim::worker`], [`Sim::workers`]),
//! which run your handlers on the addresses of your listeners, and *peers*, foreign programs that your test
//! plays: clients ([`Sim::connect`], [`Sim::connect_from`]) and servers ([`Sim::listen`]) for what your
//! handlers connect to, and sockets for datagrams ([`Sim::datagram`]). Hosts are told apart by their IP
//! addresses; a worker's host is that of its first listener. Time passes only in [`Sim::run_for`],
//! [`Sim::run_until`] and [`Sim::calm_until`].
//!
//! What happens always, in an order and at times that the seed decides: packets take a time within
//! [`SimConfig::latency`] (or the one of their [link](Sim::set_latency)), now and then thrice as
//! long; data is cut into segments, and cut again when it is received; sends are taken at once or a
//! moment later, whole or in parts; completions of different connections change places; cancels take
//! effect at once or later, and may find that the operation has ended; workers' turns take a little
//! time. Everything else that goes wrong does so only when asked for: by chance ([`Faults`]), or once
//! at a chosen moment ([`Sim::script`]).
//!
//! Which kernel it is follows from the worker's configuration, as with the real drivers.
//! [`WorkerConfig::uring`](crate::WorkerConfig::uring) decides how data is received:
//!
//! | `provided_buffers` | `multishot_recv` | one operation for | its buffer is taken |
//! |---|---|---|---|
//! | yes | yes | all data of a connection | when data is there; none left ends it even without data |
//! | yes | no | each piece | the same |
//! | no | yes | all data | only when there is something to receive: epoll and Windows are like that |
//! | no | no | each piece, polled first | only when there is something to receive |
//!
//! `multishot_accept` decides between one accept for all connections and one for each.
//! [`WorkerConfig::descriptors`](crate::WorkerConfig::descriptors) decides between a descriptor table
//! and ordinary descriptors; `sq_entries` and `cq_entries` are the lengths of the queues.
//!
//! A worker for tests should be small (`max_connections`, `buffers`, `mailbox`): its limits are met
//! then, and a world costs microseconds to make instead of milliseconds.
//!
//! # Datagrams
//!
//! UDP sockets of workers reach each other and [`DatagramPeer`]s. Without faults every datagram arrives once, in
//! the order of its socket, if the receiver has room: each takes its bytes and 256 more of
//! [`UdpConfig::recv_buffer`](crate::net::UdpConfig::recv_buffer) (of [`SimConfig::socket_buffer`] if that is not
//! given), and what finds no room is dropped, as Linux does. Where nobody has the address, a *connected* sender
//! is told so once, after the time of both ways (`ConnectionRefused` of the next send or receive). Partitions and
//! stalls swallow datagrams. A send of segments is cut. Who binds to any address is bound to the worker's host,
//! or, if the worker has none, to 10.0.0.1 or fd00::1. A socket that is closed may take with it what it was just
//! given to send. Unix datagram sockets are refused (`Unsupported`); broadcast and multicast reach nobody, and no
//! datagrams are joined (`UDP_GRO`).
//!
//! # Safety and liveness
//!
//! While faults strike, nothing may be *wrong*. After every step the simulation checks what must
//! hold for any handler (no completion reaches a connection of another generation; every buffer is in
//! one hand; no table overflows; every operation is counted; no worker spins; and your worker's
//! driver is used as its contract says), and what you add with [`Sim::always`].
//!
//! When the faults end ([`Sim::calm`]: no more of them, partitions heal, stalls are over, operations
//! obey their cancels, buffers come back), something must get *done*: [`Sim::calm_until`] fails with
//! [`Stuck`] when it does not within a virtual time. Leave TCP time to recover: after a partition of a
//! minute the next repetition of a lost packet may be a minute away, as on a real network.
//!
//! # Seeing a failure again
//!
//! A failure prints its seed and the last events ([`SimConfig::tail`] of them); so does a panic while a
//! [`Sim`] exists. `CORELANE_SIM_SEEDS=1234 cargo test the_test` runs only that seed in every
//! [`Exploration`] and every loop over [`seeds`]; `CORELANE_SIM_SEEDS=0..100000` searches longer. Events
//! name a worker's connection by slot and generation, the network's by a number. [`Sim::note`] adds
//! events of your own.
//!
//! A history depends on the seed only as far as your handler does: real time, threads, the order of
//! a `HashMap` and random numbers from elsewhere make it another one each time.
//! [`Exploration::twice`] finds that out; [`Sim::random`] gives numbers that the seed decides.
//!
//! # Faults
//!
//! "Kernel" is Linux 6.18 unless said otherwise, as found by probing it and in its source; what is
//! named `TCP` is the protocol's.
//!
//! | fault | by chance | on a real system | a correct program |
//! |---|---|---|---|
//! | [`AcceptError`](Fault::AcceptError) | [`accept_error`](Faults::accept_error) | EMFILE, ENFILE, ENOBUFS, ENOMEM of `accept(2)`; raised before a connection is taken, which stays queued; ends a multishot | serves it later |
//! | [`AcceptAborted`](Fault::AcceptAborted) | [`accept_aborted`](Faults::accept_aborted) | ECONNABORTED of `accept(2)`: gone while it waited (BSD, Windows, Linux security modules) | goes on accepting |
//! | – | – | ENFILE of a full descriptor table: comes after the connection is taken, which is closed; the simulated table has 64 entries more than connections | never meets it |
//! | [`ConnectError`](Fault::ConnectError) | [`connect_error`](Faults::connect_error) | `socket(2)`, `bind(2)` | is told: `ConnectFailed` |
//! | [`Unreachable`](Fault::Unreachable) | [`unreachable`](Faults::unreachable) | ICMP answers during `connect(2)` | is told: `ConnectFailed` |
//! | [`ShortRecv`](Fault::ShortRecv) | [`short_recv`](Faults::short_recv) | a segment came in parts | does not notice |
//! | [`NoBuffer`](Fault::NoBuffer) | [`no_buffer`](Faults::no_buffer) | ENOBUFS of a receive from an empty buffer ring; even with nothing to receive, so it hides data and end alike | does not notice |
//! | [`HoldBuffers`](Fault::HoldBuffers) | – | someone keeps buffers: the pool is small for a while, or empty | is slow |
//! | [`RecvStop`](Fault::RecvStop) | [`recv_stop`](Faults::recv_stop) | a completion without `IORING_CQE_F_MORE` that no one asked for (EINTR, EAGAIN, resources) | does not notice |
//! | [`CqOverflow`](Fault::CqOverflow) | [`cq_overflow`](Faults::cq_overflow) | a multishot that finds the completion queue full ends with a *valid* result and without `IORING_CQE_F_MORE`; also happens by itself when `cq_entries` is small | does not notice |
//! | [`ShortSend`](Fault::ShortSend) | [`short_send`](Faults::short_send) | a send that was interrupted reports the part | does not notice |
//! | [`LateCompletion`](Fault::LateCompletion) | [`late_completion`](Faults::late_completion) | task work beyond twenty items a wait; completions of a receive and a send of one connection in either order | does not notice |
//! | [`LostCancel`](Fault::LostCancel) | [`lost_cancel`](Faults::lost_cancel) | the operation ended before `IORING_OP_ASYNC_CANCEL` found it | does not notice |
//! | [`StuckCancel`](Fault::StuckCancel) | [`stuck_cancel`](Faults::stuck_cancel) | a kernel bug, a worker thread in an uninterruptible sleep; a stop then leaks the memory and says so | is told by the report |
//! | [`SegmentLoss`](Fault::SegmentLoss) | [`segment_loss`](Faults::segment_loss) | TCP's repetition after at least 200 ms | is slow |
//! | [`Stall`](Fault::Stall), [`Sim::stall`] | [`stall`](Faults::stall) | a path that drops everything for a while; TCP repeats after 0.2, 0.4, 0.8 s and so on; resets are lost and not repeated, so an end may stay half open until it sends (or [`Sim::calm`]) | has time limits |
//! | [`Partition`](Fault::Partition), [`Sim::partition`] and its like | – | the same for an address, between two hosts, or one way; resets are lost and not repeated; after 15 minutes ETIMEDOUT | has time limits |
//! | [`Reset`](Fault::Reset), [`Peer::reset`] | [`reset`](Faults::reset) | RST from a middlebox or the peer: data before it is delivered first, then ECONNRESET (once; a later send gets EPIPE) | closes |
//! | [`TimedOut`](Fault::TimedOut) | [`timed_out`](Faults::timed_out) | ETIMEDOUT of keepalive or `TCP_USER_TIMEOUT`; the other end learns nothing until it sends | closes |
//! | [`DatagramLoss`](Fault::DatagramLoss) | [`datagram_loss`](Faults::datagram_loss) | UDP: nobody repeats it | asks again |
//! | [`DatagramDuplicate`](Fault::DatagramDuplicate) | [`datagram_duplicate`](Faults::datagram_duplicate) | UDP: two copies arrive, such as over two paths | knows what it has had |
//! | [`DatagramReorder`](Fault::DatagramReorder) | [`datagram_reorder`](Faults::datagram_reorder) | UDP: a longer path, another queue of a network card | does not count on an order |
//! | [`DatagramError`](Fault::DatagramError) | [`datagram_error`](Faults::datagram_error) | ENOBUFS or ENOMEM of `sendmsg(2)` | takes it for a loss |
//! | [`Pause`](Fault::Pause) | [`pause`](Faults::pause) | the thread is not scheduled, or stopped in a debugger | is late |
//! | [`ClockJump`](Fault::ClockJump) | [`clock_jump`](Faults::clock_jump) | a virtual machine that was frozen: `CLOCK_MONOTONIC` leaps forward, never back; everything of that time is due at once | does not take it for silence of one peer |
//! | [`SimConfig::memory_limit`] | – | ENOMEM of `mmap(2)` for the buffers | is told at start |
//!
//! # What is not modelled
//!
//! Bandwidth, congestion control and real loss patterns; keepalive, `TCP_USER_TIMEOUT` and all other
//! socket options (a [`TimedOut`](Fault::TimedOut) stands for what they do); `TIME_WAIT` and addresses in
//! use; urgent data; signals; processor time beyond [`SimConfig::turn_time`]; a heap that
//! refuses memory (Rust ends the process then). A client gets the same listener of a group that shares
//! an address every time; which one is the seed's choice, not Linux's hash.

mod datagram;
mod explore;
mod peer;
mod run;
mod stuck;
mod worker;

use std::cell::{Cell, RefCell};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

pub use crate::driver::sim::{Fault, Faults, Shortage, When};
pub use datagram::DatagramPeer;
pub use explore::{Exploration, Explored, Failure, seeds};
pub use peer::{Peer, PeerListener};
pub use stuck::{Stuck, StuckReason};
pub use worker::{SimReport, SimWorker};

use crate::clock::Time;
use crate::config::{ConfigError, ListenerConfig, WorkerConfig};
use crate::driver::sim::{Actor, Rng, Settings, Shared, World};
use crate::handler::Handler;
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
    /// Bytes of [buffers](crate::BufferConfig) that all workers take at most together; `None` (the
    /// default) for no limit. Beyond it a worker's start is refused, as when `mmap(2)` says ENOMEM.
    pub memory_limit: Option<usize>,
    /// What goes wrong from the beginning; nothing by default.
    pub faults: Faults,
    /// How many of the last events a failure shows (at most 1,024 are kept); 40 by default.
    pub tail: usize,
}

/// The environment variable that chooses the seeds.
const SEEDS: &str = "CORELANE_SIM_SEEDS";

impl SimConfig {
    /// The defaults, with a seed.
    pub fn seeded(seed: u64) -> Self {
        Self {
            seed,
            latency: (Duration::from_micros(20), Duration::from_micros(200)),
            socket_buffer: 64 << 10,
            turn_time: (Duration::from_micros(1), Duration::from_micros(5)),
            max_connections: None,
            memory_limit: None,
            faults: Faults::none(),
            tail: 40,
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

type Rule = (&'static str, Box<dyn FnMut() -> Result<(), String>>);

struct Inner {
    world: Shared,
    seed: u64,
    tail: usize,
    memory_left: Cell<usize>,
    rules: RefCell<Vec<Rule>>,
    /// Scratch of a step: workers that are due, by station and ring.
    due: RefCell<Vec<(usize, usize)>>,
    turn_time: (Duration, Duration),
    max_connections: Option<u64>,
    stations: RefCell<Vec<Rc<dyn Station>>>,
    /// Chance for the run loop and for tests, apart from the world's so that a test's own draws do
    /// not change what the network does.
    dice: RefCell<Rng>,
}

impl Sim {
    /// A world without workers and peers, at time zero.
    ///
    /// # Panics
    /// When a probability of its faults is not within 0 to 1.
    pub fn new(config: SimConfig) -> Self {
        config.faults.check();
        let world = World::shared(Settings {
            seed: config.seed,
            latency: config.latency,
            socket_buffer: config.socket_buffer.max(1),
            faults: config.faults,
        });
        Self(Rc::new(Inner {
            world,
            seed: config.seed,
            tail: config.tail,
            memory_left: Cell::new(config.memory_limit.unwrap_or(usize::MAX)),
            rules: RefCell::default(),
            due: RefCell::default(),
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

    /// A foreign client that connects to `addr`, from a port that nobody else has: on the same host, as over
    /// loopback. Partitions between hosts need [`connect_from`](Self::connect_from).
    pub fn connect(&self, addr: SocketAddr) -> Peer {
        let id = self.0.world.borrow_mut().peer_connect(None, addr);
        Peer::new(self.0.world.clone(), id)
    }

    /// A foreign client on a host of its own that connects to `addr`; port 0 of `from` is any port.
    pub fn connect_from(&self, from: SocketAddr, addr: SocketAddr) -> Peer {
        let id = self.0.world.borrow_mut().peer_connect(Some(from), addr);
        Peer::new(self.0.world.clone(), id)
    }

    /// A foreign server on `addr`, in whose queue 128 connections may wait.
    pub fn listen(&self, addr: SocketAddr) -> PeerListener {
        let id = self.0.world.borrow_mut().listen(addr, 128);
        PeerListener::new(self.0.world.clone(), id)
    }

    // ---- what goes wrong

    /// Changes what goes wrong by chance from now on.
    ///
    /// # Panics
    /// When a probability is not within 0 to 1.
    pub fn set_faults(&self, faults: Faults) {
        faults.check();
        self.0.world.borrow_mut().settings.faults = faults;
    }

    /// Lets one thing go wrong at a chosen moment.
    ///
    /// ```
    /// use corelane::sim::{Fault, Shortage, Sim, SimConfig, When};
    /// # use std::time::Duration;
    /// # let sim = Sim::new(SimConfig::seeded(1));
    /// // The third receive anywhere takes one byte.
    /// sim.script(When::nth(3), Fault::ShortRecv { bytes: 1 });
    /// // The process has no descriptor for the next two connections.
    /// sim.script(When::next().times(2), Fault::AcceptError(Shortage::ProcessFiles));
    /// // Whichever connection first gets 10,000 bytes is reset.
    /// sim.script(When::after_bytes(10_000), Fault::Reset);
    /// // In 5 s the clock leaps by a minute.
    /// sim.script(
    ///     When::at(sim.now() + Duration::from_secs(5)),
    ///     Fault::ClockJump { by: Duration::from_secs(60) },
    /// );
    /// ```
    pub fn script(&self, when: When, fault: Fault) {
        self.0.world.borrow_mut().call_for(when, fault);
    }

    /// Scripted faults that still wait for their chance, for a test that wants to know whether all of
    /// its script was played. Those that happen at a moment by themselves do not count.
    pub fn script_left(&self) -> usize {
        self.0.world.borrow().script.len()
    }

    /// Ends everything that goes wrong: no faults any more, partitions heal, stalls are over, operations
    /// that ignored a cancel obey it, buffers that were held come back, and who waits on a connection whose
    /// other end is gone learns of it (as keepalive would tell). What is already late stays so.
    pub fn calm(&self) {
        self.0.world.borrow_mut().calm();
    }

    /// Ends everything that goes wrong ([`calm`](Self::calm)) and demands progress: `done` must come
    /// true within `limit` of virtual time.
    ///
    /// # Errors
    /// [`Stuck`], as for [`run_until`](Self::run_until).
    pub fn calm_until(&self, limit: Duration, done: impl FnMut() -> bool) -> Result<(), Stuck> {
        self.calm();
        self.run_until(limit, done)
    }

    /// Cuts an address off: nothing from or to it arrives. What is sent meanwhile is repeated, as TCP
    /// does, and arrives some time after [`heal`](Self::heal), except resets, which nobody repeats.
    pub fn partition(&self, addr: SocketAddr) {
        self.0.world.borrow_mut().set_reachable(addr, false);
    }

    /// Ends a [`partition`](Self::partition).
    pub fn heal(&self, addr: SocketAddr) {
        self.0.world.borrow_mut().set_reachable(addr, true);
    }

    /// Cuts two hosts off from each other; both go on reaching all others.
    pub fn partition_between(&self, a: IpAddr, b: IpAddr) {
        self.0.world.borrow_mut().net.cut_between(a, b);
    }

    /// Lets nothing pass from one host to another, while the way back is open.
    pub fn partition_one_way(&self, from: IpAddr, to: IpAddr) {
        self.0.world.borrow_mut().net.cut_one_way(from, to);
    }

    /// Ends what [`partition_between`](Self::partition_between) and
    /// [`partition_one_way`](Self::partition_one_way) began between these two, in both directions.
    pub fn heal_between(&self, a: IpAddr, b: IpAddr) {
        self.0.world.borrow_mut().net.heal_between(a, b);
    }

    /// Gives the link between two hosts a latency of its own, least and most, in both directions.
    pub fn set_latency(&self, a: IpAddr, b: IpAddr, latency: (Duration, Duration)) {
        self.0.world.borrow_mut().net.set_latency(a, b, latency);
    }

    /// Lets nothing of a peer's connection pass for some time, in both directions.
    pub fn stall(&self, peer: &Peer, time: Duration) {
        let conn = peer.connection();
        self.0.world.borrow_mut().strike_now(Fault::Stall { time }, None, Some(conn));
    }

    // ---- what must hold

    /// Demands that something always holds: `holds` is asked after every step, and the run fails with
    /// [`StuckReason::Violated`], this name and its text when it does not. It must not run the
    /// simulation.
    pub fn always(&self, what: &'static str, holds: impl FnMut() -> Result<(), String> + 'static) {
        self.0.rules.borrow_mut().push((what, Box::new(holds)));
    }

    /// A number in `0..below`, decided by the seed: for what a test wants to vary.
    pub fn random(&self, below: u64) -> u64 {
        self.0.dice.borrow_mut().below(below)
    }

    /// Lets the world go on until `done` says so; it is asked after everything that happens.
    ///
    /// # Errors
    /// [`Stuck`] when `limit` (virtual time, leaps of the clock not counted) passes before, when
    /// nothing is left that could happen, when an invariant does not hold, or when a worker spins.
    pub fn run_until(&self, limit: Duration, done: impl FnMut() -> bool) -> Result<(), Stuck> {
        run::until(self, limit, done)
    }

    /// Lets the world go on for a length of virtual time (more, if the clock leaps at its end).
    ///
    /// # Panics
    /// When a worker spins, or an invariant does not hold, with what [`Stuck`] says; to get that as
    /// an error use [`try_run_for`](Self::try_run_for).
    pub fn run_for(&self, time: Duration) {
        if let Err(stuck) = run::for_time(self, time) {
            panic!("{stuck}");
        }
    }

    /// As [`run_for`](Self::run_for), with an error instead of a panic.
    ///
    /// # Errors
    /// [`Stuck`] when a worker spins, or an invariant does not hold.
    pub fn try_run_for(&self, time: Duration) -> Result<(), Stuck> {
        run::for_time(self, time)
    }

    /// Events so far: completions that workers took, actions of peers, faults, notes.
    pub fn events(&self) -> u64 {
        self.0.world.borrow().trace.count()
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

    /// Takes a worker's buffers from what there is of memory; false when there is not enough.
    fn takes_memory(&self, bytes: usize) -> bool {
        let left = self.0.memory_left.get().checked_sub(bytes);
        self.0.memory_left.set(left.unwrap_or(self.0.memory_left.get()));
        left.is_some()
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
            let tail = world.trace.tail(self.tail);
            let repeat = stuck::Repeat { seed: self.seed, tail: &tail };
            eprintln!("simulation with seed {} at {}{repeat}", self.seed, world.now);
        }
    }
}
