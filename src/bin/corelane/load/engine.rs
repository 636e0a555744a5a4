//! The generator's runtime, of either tier.

use corelane::sync::channel::{self, Sender};
use corelane::{Builder, Metrics, Runtime, RuntimeError, RuntimeInfo, ShutdownReport, task};

use super::handler::{Command, Generator};
use super::tasks;
use crate::Failure;
use crate::units::Tier;

/// Running workers, and the way to tell them something.
pub enum Engine {
    Handler(Runtime<Command>),
    Async(Runtime<task::Message>, Vec<Sender<Command>>),
}

/// The runtime, whatever its messages are.
macro_rules! with {
    ($engine:expr, $runtime:ident => $act:expr) => {
        match $engine {
            Engine::Handler($runtime) => $act,
            Engine::Async($runtime, _) => $act,
        }
    };
}

impl Engine {
    /// Starts the workers, with the generator that `make` makes for each.
    ///
    /// # Errors
    /// Why they could not be started.
    pub fn start(
        tier: Tier,
        builder: Builder,
        make: impl Fn(usize) -> Generator + Clone + Send + Sync + 'static,
    ) -> Result<Self, Failure> {
        if tier == Tier::Handler {
            return Ok(Self::Handler(builder.start(make)?));
        }
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..MOST_WORKERS).map(|_| channel::unbounded()).unzip();
        let runtime =
            builder.start_tasks(move |worker| tasks::run(make(worker), receivers[worker].clone()))?;
        Ok(Self::Async(runtime, senders))
    }

    /// Tells a worker; false when it does not listen any more.
    pub fn tell(&self, worker: usize, command: Command) -> bool {
        match self {
            Self::Handler(runtime) => runtime.remote().post(worker, command).is_ok(),
            Self::Async(_, senders) => senders.get(worker).is_some_and(|to| to.try_send(command).is_ok()),
        }
    }

    /// What was started.
    pub fn info(&self) -> &RuntimeInfo {
        with!(self, runtime => runtime.info())
    }

    /// The workers' counters.
    pub fn metrics(&self) -> Metrics {
        with!(self, runtime => runtime.metrics())
    }

    /// Whether all workers run.
    pub fn is_running(&self) -> bool {
        with!(self, runtime => runtime.is_running())
    }

    /// Ends it.
    ///
    /// # Errors
    /// When a worker had failed.
    pub fn shutdown(self, deadline: std::time::Duration) -> Result<ShutdownReport, RuntimeError> {
        with!(self, runtime => runtime.shutdown(deadline))
    }
}

/// The most that a runtime starts: how many it will be is known only when it has.
const MOST_WORKERS: usize = 4096;
