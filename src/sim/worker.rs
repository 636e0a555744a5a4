//! Real workers on simulated rings.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::buffer::{BufferError, Memory};
use crate::clock::Time;
use crate::config::{ConfigError, ListenerConfig, Sharing, WorkerConfig};
use crate::driver::sim::{Shape, Shared, SimDriver, SimListener, When};
use crate::handler::Handler;
use crate::metrics::{Counters, Snapshot};
use crate::worker::{Permits, Remote, Setup, Worker, WorkerListener, directory};

use super::Sim;
use super::run::Station;

/// Virtual time that a worker which has stopped gives its operations to end.
const PATIENCE: Duration = Duration::from_secs(1);

/// A worker of a [`Sim`], seen from outside.
pub struct SimWorker<M> {
    world: Shared,
    ring: usize,
    counters: Arc<Counters>,
    memory: Memory,
    remote: Remote<M>,
    report: Rc<Cell<Option<SimReport>>>,
}

/// How a worker ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct SimReport {
    /// Connections that ended gracefully after the stop was asked for.
    pub finished: u64,
    /// Connections that were reset because the deadline passed.
    pub aborted: u64,
    /// Operations that the kernel did not give back.
    pub ops_in_kernel: u64,
    /// Buffers that were still leased.
    pub buffers_outstanding: u64,
    /// Messages that lay in the mailbox unread.
    pub messages_undelivered: u64,
    /// Tasks that had not ended and were dropped.
    pub tasks_dropped: u64,
}

impl<M> SimWorker<M> {
    /// Its counters.
    pub fn metrics(&self) -> Snapshot {
        self.counters.snapshot()
    }

    /// Reaches the workers of its runtime, as from another thread.
    pub fn remote(&self) -> Remote<M> {
        self.remote.clone()
    }

    /// Asks the workers of its runtime to stop, as [`Remote::stop`] does.
    pub fn stop(&self, deadline: Duration) {
        self.remote.stop(deadline);
    }

    /// How it ended; `None` while it runs.
    pub fn report(&self) -> Option<SimReport> {
        self.report.get()
    }

    /// Whether it has not ended.
    pub fn is_running(&self) -> bool {
        self.report.get().is_none()
    }

    /// Connections that it holds, those being opened or closed included.
    pub fn connections(&self) -> usize {
        self.counters.connections.get() as usize
    }

    /// Operations whose last completion it has not taken, armed accepts and receives included.
    pub fn ops_in_flight(&self) -> usize {
        self.world.borrow().rings[self.ring].in_flight
    }

    /// Buffers (receive and send) out of the pool now, without those that a
    /// [fault](super::Fault::HoldBuffers) holds.
    pub fn buffers_leased(&self) -> usize {
        let held = self.world.borrow().rings[self.ring].buffers_held();
        self.memory.pool.leased() as usize - held
    }

    /// Payloads that wait to be sent, are being sent, or are held back from a paused handler.
    pub fn payloads_queued(&self) -> usize {
        self.memory.chunks.used()
    }

    /// Whether everything is where it was before the first client came: no connection, no leased
    /// buffer, no payload, and no operation but armed accepts. To be asked when every peer is gone.
    ///
    /// # Errors
    /// What is left, as text.
    pub fn check_at_rest(&self) -> Result<(), String> {
        let accepts = self.world.borrow().rings[self.ring].accepts();
        let left = [
            (self.connections(), "connections"),
            (self.buffers_leased(), "leased buffers"),
            (self.payloads_queued(), "queued payloads"),
            (self.ops_in_flight().saturating_sub(accepts), "operations other than accepts"),
        ];
        let left: Vec<String> = left
            .iter()
            .filter(|(count, _)| *count > 0)
            .map(|(count, what)| format!("{count} {what}"))
            .collect();
        if left.is_empty() { Ok(()) } else { Err(format!("{self:?} still has {}", left.join(", "))) }
    }
}

impl When {
    /// Only on this worker.
    pub fn worker<M>(self, worker: &SimWorker<M>) -> Self {
        Self { ring: Some(worker.ring), ..self }
    }
}

impl<M> fmt::Debug for SimWorker<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimWorker({}, running: {})", self.ring, self.is_running())
    }
}

/// Where a worker sits between its turns.
struct Seat<H: Handler> {
    ring: usize,
    /// Empty while its turn runs, and when it has ended.
    worker: RefCell<Option<Worker<SimDriver, H>>>,
    busy_until: Cell<Time>,
    report: Rc<Cell<Option<SimReport>>>,
}

impl<H: Handler> Station for Seat<H> {
    fn ring(&self) -> Option<usize> {
        self.report.get().is_none().then_some(self.ring)
    }

    fn busy_until(&self) -> Time {
        self.busy_until.get()
    }

    fn pause(&self, until: Time) {
        self.busy_until.set(until);
    }

    fn turn(&self, busy_until: Time) {
        let taken = self.worker.borrow_mut().take();
        let mut worker = taken.expect("a handler must not run the simulation that runs it");
        self.busy_until.set(busy_until);
        if worker.turn().expect("a simulated wait does not fail") {
            *self.worker.borrow_mut() = Some(worker);
            return;
        }
        if let Some(failure) = worker.failure() {
            panic!("worker {} ended because its handler failed: {failure}", self.ring);
        }
        let report = worker.finish(PATIENCE);
        self.report.set(Some(SimReport {
            finished: report.finished,
            aborted: report.aborted,
            ops_in_kernel: report.ops_in_kernel,
            buffers_outstanding: report.buffers_outstanding,
            messages_undelivered: report.messages_undelivered,
            tasks_dropped: report.tasks_dropped,
        }));
    }
}

/// The workers of one runtime.
pub(super) fn start<H: Handler + 'static>(
    sim: &Sim,
    count: usize,
    config: WorkerConfig,
    listeners: &[ListenerConfig],
    mut handler: impl FnMut(usize) -> H,
) -> Result<Vec<SimWorker<H::Message>>, ConfigError> {
    config.check()?;
    let world = &sim.0.world;
    let host = listeners.first().map(|listener| listener.addr.ip()).filter(|ip| !ip.is_unspecified());
    let listen = |config: &ListenerConfig| world.borrow_mut().listen(config.addr, config.backlog);
    let shared: Vec<Option<u32>> =
        listeners.iter().map(|config| (config.sharing == Sharing::One).then(|| listen(config))).collect();
    let directory = directory(count, config.mailbox);
    let permits = Permits::new(sim.0.max_connections.unwrap_or(u64::MAX));
    let mut workers = Vec::with_capacity(count);
    for index in 0..count {
        let bytes = config.buffers.arena_bytes();
        if !sim.takes_memory(bytes) {
            let source = std::io::Error::from(std::io::ErrorKind::OutOfMemory);
            return Err(ConfigError::Buffers(BufferError::Memory { bytes, source }));
        }
        let memory = Memory::new(&config.buffers)?;
        let counters = Arc::new(Counters::default());
        let shape = Shape::new(&config, host);
        let driver = SimDriver::new(world, memory.clone(), counters.clone(), shape);
        let ring = driver.index();
        let own: Vec<WorkerListener<SimListener>> = listeners
            .iter()
            .zip(&shared)
            .map(|(config, shared)| WorkerListener {
                listener: SimListener(shared.unwrap_or_else(|| listen(config))),
                backlog: config.backlog,
                shared: shared.is_some() && count > 1,
            })
            .collect();
        let setup = Setup {
            index: index as u16,
            config: config.clone(),
            counters: counters.clone(),
            directory: directory.clone(),
            permits: permits.clone(),
        };
        let worker = Worker::new(driver, setup, own, handler(index))
            .expect("the world has every listener that was just made");
        let report = Rc::new(Cell::new(None));
        sim.0.stations.borrow_mut().push(Rc::new(Seat {
            ring,
            worker: RefCell::new(Some(worker)),
            busy_until: Cell::new(Time::ZERO),
            report: report.clone(),
        }));
        let remote = Remote::new(directory.clone());
        workers.push(SimWorker { world: world.clone(), ring, counters, memory, remote, report });
    }
    Ok(workers)
}
