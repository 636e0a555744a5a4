//! Starting workers, one thread and one ring each, and stopping them.

mod bind;
mod choose;
mod error;
mod info;
mod plan;

pub use error::{RuntimeError, StartError};
pub use info::{ListenerInfo, RuntimeInfo, ShutdownReport, WorkerInfo};

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::config::{Backend, Descriptors, ListenerConfig, Sharing, WorkerConfig};
use crate::driver::sys::{self, Signals};
use crate::driver::{Feature, Native, NativeListener};
use crate::handler::Handler;
use crate::metrics::{Counters, Metrics};
use crate::worker::{self, Directory, Permits, Remote, Setup, Worker, WorkerListener, WorkerReport};

use plan::{Plan, plan};

/// How long a stopped worker waits for operations that the kernel does not give back.
const FINISH_PATIENCE: Duration = Duration::from_secs(2);
/// Prepares a [`Runtime`].
#[derive(Clone, Debug)]
pub struct Builder {
    workers: usize,
    cpus: Vec<usize>,
    backend: Backend,
    listeners: Vec<ListenerConfig>,
    max_connections: Option<u64>,
    worker: WorkerConfig,
    name: String,
    pub(crate) blocking_threads: usize,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            workers: 1,
            cpus: Vec::new(),
            backend: Backend::Auto,
            listeners: Vec::new(),
            max_connections: None,
            worker: WorkerConfig::default(),
            name: "corelane".to_owned(),
            blocking_threads: crate::task::THREADS,
        }
    }
}

impl Builder {
    /// Number of workers, each a thread with a ring of its own; 1 by default. 1 to 4096. One per
    /// core is the rule; [`max_connections`](Self::max_connections) may raise it.
    #[must_use]
    pub fn workers(mut self, workers: usize) -> Self {
        self.workers = workers;
        self
    }

    /// Binds worker `i` to processor `cpus[i % cpus.len()]`. Not bound by default.
    #[must_use]
    pub fn cpus(mut self, cpus: Vec<usize>) -> Self {
        self.cpus = cpus;
        self
    }

    /// The kernel interface to use; [`Backend::Auto`] by default.
    #[must_use]
    pub fn backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }

    /// Adds a listening address, by itself or with its options.
    #[must_use]
    pub fn listen(mut self, listener: impl Into<ListenerConfig>) -> Self {
        self.listeners.push(listener.into());
        self
    }

    /// Connections of all workers together, at most. When they are more than the workers' descriptor
    /// tables hold (`RLIMIT_NOFILE` entries each), more workers are started: several rings per core.
    ///
    /// Sets [`WorkerConfig::max_connections`] of every worker to what its table can hold of them.
    #[must_use]
    pub fn max_connections(mut self, total: u64) -> Self {
        self.max_connections = Some(total);
        self
    }

    /// What shapes each worker.
    #[must_use]
    pub fn worker(mut self, config: WorkerConfig) -> Self {
        self.worker = config;
        self
    }

    /// Prefix of the threads' names; `corelane` by default.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Threads at most for [`spawn_blocking`](crate::task::spawn_blocking), of all workers together; 64 by default,
    /// at least 1. They are started when they are needed.
    #[must_use]
    pub fn blocking_threads(mut self, most: usize) -> Self {
        self.blocking_threads = most;
        self
    }

    /// Starts the workers; returns when all of them listen. `make` makes each worker's handler, on
    /// the worker's own thread, from its index.
    ///
    /// # Errors
    /// [`StartError`], naming the cause and the remedy. Whatever was started is stopped again.
    pub fn start<H, F>(self, make: F) -> Result<Runtime<H::Message>, StartError>
    where
        H: Handler + 'static,
        F: Fn(usize) -> H + Send + Sync + 'static,
    {
        self.launch(move |index, _| make(index))
    }

    /// [`start`](Self::start), with handlers that are told where their listeners listen.
    pub(crate) fn launch<H, F>(self, make: F) -> Result<Runtime<H::Message>, StartError>
    where
        H: Handler + 'static,
        F: Fn(usize, &[ListenerInfo]) -> H + Send + Sync + 'static,
    {
        let mut prepared = prepare::<H::Message>(self)?;
        let (ready, outcomes) = mpsc::channel();
        let make = Arc::new(make);
        for index in 0..prepared.workers {
            if let Err(error) = prepared.spawn(index, make.clone(), ready.clone()) {
                drop(prepared.runtime.shutdown(Duration::ZERO));
                return Err(error);
            }
        }
        drop(ready);
        prepared.collect(outcomes)
    }

    /// Runs worker 0 on the calling thread, with the handler that `here` makes, until it has stopped, and the
    /// others on threads of their own. Returns when all have ended.
    ///
    /// # Errors
    /// The outer: [`StartError`], as [`start`](Self::start). The inner: [`RuntimeError`] of the others, or of this one.
    pub(crate) fn run_here<H, F>(
        self,
        here: impl FnOnce(&[ListenerInfo]) -> H,
        make: F,
    ) -> Result<Result<ShutdownReport, RuntimeError>, StartError>
    where
        H: Handler + 'static,
        F: Fn(usize, &[ListenerInfo]) -> H + Send + Sync + 'static,
    {
        let prepared = prepare::<H::Message>(self)?;
        #[cfg(target_os = "linux")]
        match prepared.backend {
            Backend::Epoll => prepared.run_here::<crate::driver::epoll::EpollDriver, H, F>(here, make),
            _ => prepared.run_here::<crate::driver::uring::UringDriver, H, F>(here, make),
        }
        #[cfg(windows)]
        prepared.run_here::<crate::driver::iocp::IocpDriver, H, F>(here, make)
    }
}

/// Everything that is there before the first worker.
struct Prepared<M: Send + 'static> {
    workers: usize,
    cpus: Vec<usize>,
    name: String,
    backend: Backend,
    config: WorkerConfig,
    total: Option<u64>,
    /// Of each worker, until it has them.
    listeners: Vec<Vec<WorkerListener<NativeListener>>>,
    bound: Arc<[ListenerInfo]>,
    directory: Directory<M>,
    permits: Permits,
    memlock: Option<u64>,
    runtime: Runtime<M>,
}

/// Checks what is wanted, and binds the listeners.
fn prepare<M: Send + 'static>(builder: Builder) -> Result<Prepared<M>, StartError> {
    let mut warnings = Vec::new();
    let (backend, fallback) = choose::backend(builder.backend)?;
    let mut wishes = builder.clone();
    if backend != Backend::IoUring {
        // Only a ring has a table of its own.
        wishes.worker.descriptors = Descriptors::Fd;
    }
    let Plan { workers, config, total } = plan(&wishes, sys::nofile_limit(), &mut warnings)?;
    let mut info = Vec::new();
    let mut listeners: Vec<Vec<WorkerListener<NativeListener>>> = (0..workers).map(|_| Vec::new()).collect();
    for wanted in &builder.listeners {
        wanted.options.check().map_err(StartError::Config)?;
        let (sockets, bound) = bind::for_workers(wanted, workers)?;
        if bound.backlog < bound.backlog_asked {
            warnings.push(format!(
                "backlog {} on {} is clamped to {} by net.core.somaxconn; raise it with `sysctl \
                 net.core.somaxconn={}`",
                bound.backlog_asked, bound.addr, bound.backlog, bound.backlog_asked,
            ));
        }
        let shared = wanted.sharing == Sharing::One && workers > 1;
        for (worker, listener) in sockets.into_iter().enumerate() {
            let listener = WorkerListener { listener, backlog: bound.backlog, shared };
            listeners[worker].push(listener);
        }
        info.push(bound);
    }
    let directory = worker::directory::<M>(workers, config.mailbox);
    let runtime = Runtime {
        threads: Vec::with_capacity(workers),
        counters: Vec::with_capacity(workers),
        remote: Remote::new(directory.clone()),
        running: Arc::new(AtomicUsize::new(workers)),
        info: RuntimeInfo {
            backend,
            fallback,
            kernel: sys::kernel_version(),
            features: Vec::new(),
            listeners: info.clone(),
            workers: Vec::with_capacity(workers),
            max_connections: 0,
            warnings,
        },
    };
    Ok(Prepared {
        workers,
        cpus: builder.cpus,
        name: builder.name,
        backend,
        config,
        total,
        listeners,
        bound: info.into(),
        directory,
        permits: Permits::new(total.unwrap_or(u64::MAX)),
        memlock: sys::memlock_limit_enforced().map(|limit| limit / workers as u64),
        runtime,
    })
}

impl<M: Send + 'static> Prepared<M> {
    /// What worker `index` starts with. To be called once for each, in order.
    fn start_of<F>(&mut self, index: usize, make: F) -> Start<M, F> {
        let counters = Arc::new(Counters::default());
        self.runtime.counters.push(counters.clone());
        let cpu = (!self.cpus.is_empty()).then(|| self.cpus[index % self.cpus.len()]);
        let setup = Setup {
            index: index as u16,
            config: self.config.clone(),
            counters,
            directory: self.directory.clone(),
            permits: self.permits.clone(),
        };
        Start {
            backend: self.backend,
            setup,
            listeners: std::mem::take(&mut self.listeners[index]),
            bound: self.bound.clone(),
            cpu,
            memlock: self.memlock,
            make,
        }
    }

    fn guard(&self, index: usize) -> RunningGuard<M> {
        RunningGuard {
            running: self.runtime.running.clone(),
            directory: self.directory.clone(),
            index,
            // Until it is known better: a panic does not come back to say so.
            failed: true,
        }
    }

    /// Starts worker `index` on a thread.
    fn spawn<H, F>(
        &mut self,
        index: usize,
        make: Arc<F>,
        ready: mpsc::Sender<Result<Started, StartError>>,
    ) -> Result<(), StartError>
    where
        H: Handler<Message = M> + 'static,
        F: Fn(usize, &[ListenerInfo]) -> H + Send + Sync + 'static,
    {
        let start = self.start_of(index, move |bound: &[ListenerInfo]| make(index, bound));
        let guard = self.guard(index);
        let thread = std::thread::Builder::new().name(format!("{}-{index}", self.name));
        let spawned = thread.spawn(move || {
            let mut guard = guard;
            let ended = start.run(ready);
            guard.failed = ended.is_err();
            ended
        });
        let thread = spawned.map_err(|source| StartError::Thread { index, source })?;
        self.runtime.threads.push(thread);
        Ok(())
    }

    /// Waits until every worker has said how its start went.
    fn collect(
        self,
        outcomes: mpsc::Receiver<Result<Started, StartError>>,
    ) -> Result<Runtime<M>, StartError> {
        let Self { mut runtime, workers, total, .. } = self;
        let mut failed = None;
        // Every worker answers once, or hangs up by panicking.
        for outcome in outcomes {
            match outcome {
                Ok(started) => {
                    // Workers may differ where memory is short: what the last of them got is shown.
                    let last = runtime.info.workers.iter().all(|worker| worker.index < started.worker.index);
                    if last {
                        runtime.info.features = started.features;
                    }
                    // The workers are alike, and so are their warnings.
                    for warning in started.warnings {
                        if !runtime.info.warnings.contains(&warning) {
                            runtime.info.warnings.push(warning);
                        }
                    }
                    runtime.info.workers.push(started.worker);
                }
                Err(error) => {
                    failed.get_or_insert(error);
                }
            }
        }
        if failed.is_none() && runtime.info.workers.len() < workers {
            failed = Some(StartError::Panicked);
        }
        if let Some(error) = failed {
            drop(runtime.shutdown(Duration::ZERO));
            return Err(error);
        }
        runtime.info.workers.sort_by_key(|worker| worker.index);
        let held: u64 = runtime.info.workers.iter().map(|worker| u64::from(worker.max_connections)).sum();
        runtime.info.max_connections = total.map_or(held, |total| total.min(held));
        Ok(runtime)
    }

    /// See [`Builder::run_here`].
    fn run_here<D, H, F>(
        mut self,
        here: impl FnOnce(&[ListenerInfo]) -> H,
        make: F,
    ) -> Result<Result<ShutdownReport, RuntimeError>, StartError>
    where
        D: Native,
        H: Handler<Message = M> + 'static,
        F: Fn(usize, &[ListenerInfo]) -> H + Send + Sync + 'static,
    {
        let (ready, outcomes) = mpsc::channel();
        let start = self.start_of(0, here);
        let mut guard = self.guard(0);
        let make = Arc::new(make);
        for index in 1..self.workers {
            if let Err(error) = self.spawn(index, make.clone(), ready.clone()) {
                drop(self.runtime.shutdown(Duration::ZERO));
                return Err(error);
            }
        }
        let begun = match start.begin::<D, H>() {
            Ok((worker, started)) => {
                // The receiver is in this function.
                let _ = ready.send(Ok(started));
                Some(worker)
            }
            Err(error) => {
                let _ = ready.send(Err(error));
                None
            }
        };
        drop(ready);
        let runtime = self.collect(outcomes)?;
        let Some(worker) = begun else { return Err(StartError::Panicked) };
        // A panic of the handler is the caller's, but not before the other workers have ended.
        let ended = catch_unwind(AssertUnwindSafe(|| drive(worker)));
        guard.failed = !matches!(ended, Ok(Ok(_)));
        drop(guard);
        let deadline = runtime.remote.stop_deadline().unwrap_or(Duration::ZERO);
        let others = runtime.shutdown(deadline);
        let ended = ended.unwrap_or_else(|panic| resume_unwind(panic));
        Ok(match (ended, others) {
            (Err(source), _) => Err(RuntimeError::Worker { index: 0, source }),
            (Ok(here), Ok(mut report)) => {
                report.add(here);
                Ok(report)
            }
            (Ok(_), Err(error)) => Err(error),
        })
    }
}

/// Runs a worker to its end.
fn drive<D: Native, H: Handler>(mut worker: Worker<D, H>) -> Result<WorkerReport, io::Error> {
    while worker.turn()? {}
    match worker.failure() {
        Some(failure) => {
            // Nobody asks for the report of a worker that failed.
            let _ = worker.finish(FINISH_PATIENCE);
            Err(failure)
        }
        None => Ok(worker.finish(FINISH_PATIENCE)),
    }
}

/// Counts a worker's thread as ended, and closes its mailbox, however it ends. If it failed, the
/// other workers are stopped: one worker less is not what was asked for, and nobody might be watching.
struct RunningGuard<M> {
    running: Arc<AtomicUsize>,
    directory: Directory<M>,
    index: usize,
    failed: bool,
}

impl<M> Drop for RunningGuard<M> {
    fn drop(&mut self) {
        self.directory[self.index].close();
        if self.failed {
            Remote::new(self.directory.clone()).stop(Duration::ZERO);
        }
        self.running.fetch_sub(1, Ordering::Release);
    }
}

/// What a worker's thread starts with.
struct Start<M, F> {
    backend: Backend,
    setup: Setup<M>,
    listeners: Vec<WorkerListener<NativeListener>>,
    /// What all of them are.
    bound: Arc<[ListenerInfo]>,
    cpu: Option<usize>,
    /// Share of `RLIMIT_MEMLOCK`, if that applies to this process.
    memlock: Option<u64>,
    make: F,
}

struct Started {
    worker: WorkerInfo,
    features: Vec<Feature>,
    warnings: Vec<String>,
}

impl<M: Send + 'static, F> Start<M, F> {
    /// The whole life of a worker's thread.
    fn run<H>(self, ready: mpsc::Sender<Result<Started, StartError>>) -> Result<WorkerReport, io::Error>
    where
        H: Handler<Message = M>,
        F: FnOnce(&[ListenerInfo]) -> H,
    {
        #[cfg(target_os = "linux")]
        match self.backend {
            Backend::Epoll => self.run_on::<crate::driver::epoll::EpollDriver, H>(ready),
            _ => self.run_on::<crate::driver::uring::UringDriver, H>(ready),
        }
        #[cfg(windows)]
        {
            debug_assert_eq!(self.backend, Backend::Iocp, "chosen by `choose`");
            self.run_on::<crate::driver::iocp::IocpDriver, H>(ready)
        }
    }

    fn run_on<D, H>(self, ready: mpsc::Sender<Result<Started, StartError>>) -> Result<WorkerReport, io::Error>
    where
        D: Native,
        H: Handler<Message = M>,
        F: FnOnce(&[ListenerInfo]) -> H,
    {
        let (worker, outcome) = match self.begin::<D, H>() {
            Ok((worker, started)) => (Some(worker), Ok(started)),
            Err(error) => (None, Err(error)),
        };
        // Nobody listens only when `start` is gone, and then nobody asks.
        let _ = ready.send(outcome);
        drop(ready);
        worker.map_or_else(|| Ok(WorkerReport::default()), drive)
    }

    /// Makes the worker, on the thread that will run it.
    fn begin<D, H>(self) -> Result<(Worker<D, H>, Started), StartError>
    where
        D: Native,
        H: Handler<Message = M>,
        F: FnOnce(&[ListenerInfo]) -> H,
    {
        let Self { setup, listeners, bound, cpu, memlock, make, .. } = self;
        let index = usize::from(setup.index);
        if let Some(cpu) = cpu {
            sys::pin_to_cpu(cpu).map_err(|source| StartError::Pin { cpu, source })?;
        }
        let (driver, found) =
            D::open(&setup.config, setup.counters.clone(), memlock).map_err(StartError::Kernel)?;
        let descriptors = if found.direct { Descriptors::Direct } else { Descriptors::Fd };
        let WorkerConfig { max_connections, wait, .. } = setup.config;
        let info = WorkerInfo { index, cpu, descriptors, max_connections, wait };
        let worker = Worker::new(driver, setup, listeners, make(&bound))
            .map_err(|source| StartError::Listener { source })?;
        Ok((worker, Started { worker: info, features: found.features, warnings: found.warnings }))
    }
}

/// Running workers.
///
/// Dropping it without [`shutdown`](Self::shutdown) asks the workers to stop at once and does not
/// wait for them.
#[derive(Debug)]
pub struct Runtime<M: Send + 'static = ()> {
    threads: Vec<JoinHandle<Result<WorkerReport, io::Error>>>,
    counters: Vec<Arc<Counters>>,
    remote: Remote<M>,
    running: Arc<AtomicUsize>,
    info: RuntimeInfo,
}

impl Runtime {
    /// Begins the preparation of a runtime.
    pub fn builder() -> Builder {
        Builder::default()
    }
}

impl<M: Send + 'static> Runtime<M> {
    /// What was started, and with which features of the kernel.
    pub fn info(&self) -> &RuntimeInfo {
        &self.info
    }

    /// A handle for other threads.
    pub fn remote(&self) -> Remote<M> {
        self.remote.clone()
    }

    /// The workers' counters as they are now.
    pub fn metrics(&self) -> Metrics {
        Metrics { workers: self.counters.iter().map(|counters| counters.snapshot()).collect() }
    }

    /// Whether every worker is still running; false once one has stopped or failed.
    pub fn is_running(&self) -> bool {
        self.running.load(Ordering::Acquire) == self.threads.len()
    }

    /// Stops: accepts nothing more, closes every connection gracefully, resets what is left after
    /// `deadline`, waits for the kernel to give everything back, and reports.
    ///
    /// # Errors
    /// [`RuntimeError`] when a worker had failed or panicked; the others are stopped all the same.
    pub fn shutdown(self, deadline: Duration) -> Result<ShutdownReport, RuntimeError> {
        self.remote.stop(deadline);
        self.join()
    }

    /// Runs until one of [`Signals`] arrives (SIGINT, SIGTERM; on Windows Ctrl-C and its like) or the workers
    /// end by themselves (asked by [`Remote::stop`] or [`Cx::stop`](crate::Cx::stop), or because a handler
    /// panicked), then shuts down as [`shutdown`](Self::shutdown) does: what a server's `main` ends with.
    ///
    /// # Errors
    /// [`RuntimeError`] when a worker failed or panicked, so that a supervisor may start it anew.
    pub fn run_until(self, signals: &Signals, deadline: Duration) -> Result<ShutdownReport, RuntimeError> {
        // Looking twice a second is cheap, and a failed worker cannot signal its own process safely.
        while self.is_running() {
            let signal = signals.wait(Some(Duration::from_millis(500)));
            if signal.map_err(|source| RuntimeError::Signals { source })?.is_some() {
                break;
            }
        }
        self.shutdown(deadline)
    }

    /// Waits until every worker has stopped by itself (through [`Remote::stop`] or
    /// [`Cx::stop`](crate::Cx::stop)), and reports.
    ///
    /// # Errors
    /// [`RuntimeError`] when a worker failed or panicked.
    pub fn join(mut self) -> Result<ShutdownReport, RuntimeError> {
        let mut report = ShutdownReport::default();
        let mut failed = None;
        for (index, thread) in std::mem::take(&mut self.threads).into_iter().enumerate() {
            match thread.join() {
                Ok(Ok(worker)) => report.add(worker),
                Ok(Err(source)) => {
                    failed.get_or_insert(RuntimeError::Worker { index, source });
                }
                Err(panic) => {
                    let message = panic
                        .downcast_ref::<String>()
                        .cloned()
                        .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
                        .unwrap_or_else(|| "a panic without a message".to_owned());
                    failed.get_or_insert(RuntimeError::Panicked { index, message });
                }
            }
        }
        report.metrics = self.metrics();
        match failed {
            None => Ok(report),
            Some(error) => Err(error),
        }
    }
}

impl<M: Send + 'static> Drop for Runtime<M> {
    fn drop(&mut self) {
        if !self.threads.is_empty() {
            self.remote.stop(Duration::ZERO);
        }
    }
}
