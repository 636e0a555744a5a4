//! Runtimes whose workers run tasks.

use std::cell::Cell;
use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use crate::config::{ConfigError, ListenerConfig, WorkerConfig};
use crate::runtime::{Builder, ListenerInfo, Runtime, RuntimeError, StartError};
use crate::server::ServerReport;
use crate::sim::{Sim, SimWorker};

use super::blocking::Pool;
use super::{Message, Spawner, TaskHandler};

/// What a main future may come to: nothing, or a result whose error stops the runtime. (Of a server's handler: nothing, or a
/// result whose error is counted.)
pub trait MainOutcome {
    /// The error, if it is one.
    #[allow(clippy::missing_errors_doc)]
    fn into_result(self) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;
}

impl MainOutcome for () {
    fn into_result(self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        Ok(())
    }
}

impl<E: Into<Box<dyn std::error::Error + Send + Sync>>> MainOutcome for Result<(), E> {
    fn into_result(self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.map_err(Into::into)
    }
}

impl<E: Into<Box<dyn std::error::Error + Send + Sync>>> MainOutcome for Result<ServerReport, E> {
    fn into_result(self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        self.map(drop).map_err(Into::into)
    }
}

/// Where listeners listen.
fn addresses(bound: &[ListenerInfo]) -> Vec<SocketAddr> {
    bound.iter().map(|listener| listener.addr).collect()
}

impl Builder {
    /// Starts the workers with `main` as the first task of each: it is called with the worker's index, on the
    /// worker's own thread. A worker goes on, running what was spawned, when its main future has ended; it
    /// ends with the runtime. A main future that gives an error stops the runtime, which reports it
    /// ([`RuntimeError::Worker`]).
    ///
    /// The addresses given to [`listen`](Self::listen) are taken with
    /// [`TcpListener::of_builder`](crate::net::TcpListener::of_builder).
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_tasks<F, M>(self, main: M) -> Result<Runtime<Message>, StartError>
    where
        F: Future + 'static,
        F::Output: MainOutcome,
        M: Fn(usize) -> F + Clone + Send + Sync + 'static,
    {
        let pool = Pool::new(self.blocking_threads);
        self.launch(move |index, bound| {
            let main = main.clone();
            TaskHandler::new(&addresses(bound), pool.clone(), move || async move {
                main(index).await.into_result()
            })
        })
    }

    /// Runs a future to its end on this thread, as the first task of a worker of its own. When it has
    /// ended, connections get `deadline` to finish, and the worker stops; tasks that are left are dropped.
    ///
    /// With more than one [worker](Self::workers) the others get threads, for [`spawn_on`](super::spawn_on).
    ///
    /// It may be called inside a task, and then runs to its end while that task's whole worker stands still: nothing of
    /// that one (its sockets, its timers, its tasks) may be waited for inside.
    ///
    /// # Errors
    /// [`BlockOnError::Start`] as [`start`](Self::start); [`BlockOnError::Run`] when a worker failed, or when the
    /// runtime was stopped before the future had ended.
    ///
    /// # Panics
    /// When the future does, after every worker has ended.
    pub fn block_on<F>(self, deadline: Duration, future: F) -> Result<F::Output, BlockOnError>
    where
        F: Future + 'static,
    {
        let outcome = Rc::new(Cell::new(None));
        let place = outcome.clone();
        let pool = Pool::new(self.blocking_threads);
        let pool_here = pool.clone();
        let ended = self.run_here(
            move |bound| {
                let main = async move {
                    place.set(Some(future.await));
                    Ok(())
                };
                TaskHandler::new(&addresses(bound), pool_here, move || main).until_main(deadline)
            },
            move |_, bound| TaskHandler::idle(&addresses(bound), pool.clone()),
        );
        ended.map_err(BlockOnError::Start)?.map_err(|error| BlockOnError::Run(Some(error)))?;
        outcome.take().ok_or(BlockOnError::Run(None))
    }
}

/// [`Builder::block_on`] with the defaults: one worker, and one second for its connections to finish.
///
/// ```
/// let answer = corelane::task::block_on(async { 6 * 7 })?;
/// assert_eq!(answer, 42);
/// # Ok::<(), corelane::task::BlockOnError>(())
/// ```
///
/// # Errors
/// As [`Builder::block_on`].
///
/// # Panics
/// When the future does.
pub fn block_on<F>(future: F) -> Result<F::Output, BlockOnError>
where
    F: Future + 'static,
{
    Runtime::builder().block_on(Duration::from_secs(1), future)
}

/// Why a future was not run to its end.
#[derive(Debug)]
pub enum BlockOnError {
    /// The runtime could not be started.
    Start(StartError),
    /// A worker failed; or, without an error, the runtime was stopped first.
    Run(Option<RuntimeError>),
}

impl fmt::Display for BlockOnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Start(error) => error.fmt(f),
            Self::Run(Some(error)) => error.fmt(f),
            Self::Run(None) => f.write_str("the runtime was stopped before the future had ended"),
        }
    }
}

impl std::error::Error for BlockOnError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Start(error) => error.source(),
            Self::Run(error) => error.as_ref().and_then(std::error::Error::source),
        }
    }
}

impl Sim {
    /// Starts a worker that runs tasks, with `main` as its first; see [`Builder::start_tasks`].
    ///
    /// # Errors
    /// As [`Sim::worker`].
    ///
    /// # Panics
    /// In the worker's turn: when the main future gives an error.
    pub fn tasks<F>(
        &self,
        config: WorkerConfig,
        listeners: &[ListenerConfig],
        main: impl FnOnce() -> F + 'static,
    ) -> Result<SimWorker<Message>, ConfigError>
    where
        F: Future + 'static,
        F::Output: MainOutcome,
    {
        let bound: Vec<SocketAddr> = listeners.iter().map(|listener| listener.addr).collect();
        let main = move || async { main().await.into_result() };
        self.worker(config, listeners, TaskHandler::new(&bound, Pool::inline(), main))
    }

    /// Starts the workers of one runtime, each with `main` of its index as its first task.
    ///
    /// # Errors
    /// As [`Sim::workers`].
    pub fn tasks_on<F>(
        &self,
        workers: usize,
        config: WorkerConfig,
        listeners: &[ListenerConfig],
        main: impl Fn(usize) -> F + Clone + 'static,
    ) -> Result<Vec<SimWorker<Message>>, ConfigError>
    where
        F: Future + 'static,
        F::Output: MainOutcome,
    {
        let bound: Vec<SocketAddr> = listeners.iter().map(|listener| listener.addr).collect();
        self.workers(workers, config, listeners, |index| {
            let main = main.clone();
            TaskHandler::new(&bound, Pool::inline(), move || async move { main(index).await.into_result() })
        })
    }
}

impl SimWorker<Message> {
    /// Starts tasks on the workers of its runtime, as from another thread.
    pub fn spawner(&self) -> Spawner {
        Spawner::new(self.remote(), 0)
    }
}
