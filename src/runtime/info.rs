//! What was started, and how it ended.

use std::fmt;
use std::net::SocketAddr;

use crate::config::{Backend, Descriptors};
use crate::driver::Feature;
use crate::metrics::Metrics;
use crate::wait::WaitPolicy;
use crate::worker::WorkerReport;

/// What a runtime consists of, and what the kernel contributes.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RuntimeInfo {
    /// The kernel interface in use.
    pub backend: Backend,
    /// Why it is not the one that [`Backend::Auto`] prefers, and the remedy; `None` when it is.
    pub fallback: Option<String>,
    /// The kernel's release.
    pub kernel: String,
    /// Kernel features: which are in use, and why others are not.
    pub features: Vec<Feature>,
    /// The listening addresses, in the order of configuration.
    pub listeners: Vec<ListenerInfo>,
    /// The workers.
    pub workers: Vec<WorkerInfo>,
    /// Connections of all workers together, at most.
    pub max_connections: u64,
    /// What an operator should know: limits that were clamped, things that could not be had.
    pub warnings: Vec<String>,
}

/// What an operator wants to know at the start, one thing a line: backend, kernel, features in use, those that are
/// not and why, workers, and warnings.
impl fmt::Display for RuntimeInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on kernel {}:", self.backend, self.kernel)?;
        let mut separator = " ";
        for feature in self.features.iter().filter(|feature| feature.on) {
            write!(f, "{separator}{}", feature.name)?;
            separator = ", ";
        }
        for feature in self.features.iter().filter(|feature| !feature.on) {
            write!(f, "\nwithout {}: {}", feature.name, feature.why)?;
        }
        write!(f, "\n{} worker(s), at most {} connections", self.workers.len(), self.max_connections)?;
        for listener in &self.listeners {
            write!(f, ", listening on {}", listener.addr)?;
        }
        for warning in &self.warnings {
            write!(f, "\nwarning: {warning}")?;
        }
        Ok(())
    }
}

/// A listening address as it came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListenerInfo {
    /// The address, with the port that the kernel chose if 0 was asked for.
    pub addr: SocketAddr,
    /// The backlog that was asked for.
    pub backlog_asked: u32,
    /// The backlog that the kernel uses (one more connection fits).
    pub backlog: u32,
}

/// A worker as it came to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerInfo {
    /// Its index.
    pub index: usize,
    /// The processor that it is bound to.
    pub cpu: Option<usize>,
    /// How it holds sockets.
    pub descriptors: Descriptors,
    /// Connections that it holds at most.
    pub max_connections: u32,
    /// How it waits.
    pub wait: WaitPolicy,
}

/// How a runtime ended.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ShutdownReport {
    /// Connections that were open when the stop began and closed gracefully.
    pub finished: u64,
    /// Connections that had to be reset.
    pub aborted: u64,
    /// Operations that the kernel did not give back in time: 0 unless something is wrong. Their
    /// memory is leaked rather than freed.
    pub ops_in_kernel: u64,
    /// Buffers that were not back in their pool at the end: 0 unless a lease was leaked.
    pub buffers_outstanding: u64,
    /// Messages that lay in mailboxes unread.
    pub messages_undelivered: u64,
    /// Tasks that had not ended and were dropped.
    pub tasks_dropped: u64,
    /// Calls given to [`spawn_blocking`](crate::task::spawn_blocking) that had not returned by the deadline: their
    /// threads were left running.
    pub blocking_left: u64,
    /// The last counters.
    pub metrics: Metrics,
}

impl fmt::Display for ShutdownReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} connections finished, {} aborted, {} operations left in the kernel, {} buffers outstanding, \
             {} messages undelivered",
            self.finished,
            self.aborted,
            self.ops_in_kernel,
            self.buffers_outstanding,
            self.messages_undelivered,
        )?;
        // Of what only runtimes with tasks have.
        if self.tasks_dropped > 0 {
            write!(f, ", {} tasks dropped", self.tasks_dropped)?;
        }
        if self.blocking_left > 0 {
            write!(f, ", {} blocking calls left running", self.blocking_left)?;
        }
        Ok(())
    }
}

impl ShutdownReport {
    /// Adds one worker's part.
    pub(super) fn add(&mut self, worker: WorkerReport) {
        self.finished += worker.finished;
        self.aborted += worker.aborted;
        self.ops_in_kernel += worker.ops_in_kernel;
        self.buffers_outstanding += worker.buffers_outstanding;
        self.messages_undelivered += worker.messages_undelivered;
        self.tasks_dropped += worker.tasks_dropped;
        self.blocking_left += worker.blocking_left;
    }
}
