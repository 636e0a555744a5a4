//! Counters of one worker: plain cells that only their worker writes, read by snapshot.
//!
//! A cell is an atomic that is loaded and stored without a locked instruction, which compiles to an
//! ordinary addition in memory: where nobody looks, nothing is paid.

use std::fmt;
use std::ops::{AddAssign, Deref};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::handler::CloseReason;

/// A counter with a single writer.
#[derive(Debug, Default)]
pub(crate) struct Cell(AtomicU64);

impl Cell {
    #[inline]
    pub(crate) fn add(&self, n: u64) {
        // One writer, so load and store need not be one step.
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// The cells themselves, padded so that two workers never share a cache line.
        #[derive(Debug, Default)]
        #[repr(align(128))]
        pub(crate) struct Counters {
            $(pub(crate) $name: Cell,)*
            pub(crate) closed: [Cell; CloseReason::KINDS],
        }

        /// What a worker has done since it started, or several workers together.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct Snapshot {
            $($(#[$doc])* pub $name: u64,)*
            /// Connections closed, by reason, indexed as [`CloseReason::index`].
            pub closed: [u64; CloseReason::KINDS],
        }

        impl Counters {
            /// Reads every cell. Cells are read one after the other, so sums over several may be off
            /// by what happens meanwhile.
            pub(crate) fn snapshot(&self) -> Snapshot {
                Snapshot {
                    $($name: self.$name.get(),)*
                    closed: std::array::from_fn(|index| self.closed[index].get()),
                }
            }
        }

        impl AddAssign for Snapshot {
            fn add_assign(&mut self, other: Snapshot) {
                $(self.$name += other.$name;)*
                for (mine, other) in self.closed.iter_mut().zip(other.closed) {
                    *mine += other;
                }
            }
        }

        impl Snapshot {
            /// Every counter with its name, closes by reason included (`closed_eof` and so on).
            pub fn iter(&self) -> impl Iterator<Item = (String, u64)> + '_ {
                let plain = [$((stringify!($name), self.$name),)*];
                let closed = (0..CloseReason::KINDS)
                    .map(|index| (format!("closed_{}", CloseReason::NAMES[index]), self.closed[index]));
                plain.into_iter().map(|(name, value)| (name.to_owned(), value)).chain(closed)
            }
        }
    };
}

counters! {
    /// Turns of the event loop.
    turns,
    /// Times that the kernel was entered: `io_uring_enter` calls; with epoll every system call of a wait, a
    /// receive, a send, an accept and so on. Divided by `messages` it is the cost of the kernel's door.
    enters,
    /// Submission queue entries given to the kernel; with epoll operations started.
    sqes,
    /// Completion queue entries taken; with epoll results reported.
    cqes,
    /// Completions that carried data.
    messages,
    /// Bytes received.
    bytes_received,
    /// Bytes that the kernel took for sending.
    bytes_sent,
    /// Sends that completed.
    sends,
    /// Sends that took less than they were given and went on with the rest.
    short_sends,
    /// Connections accepted.
    accepted,
    /// Accepted connections that the handler refused.
    refused,
    /// Accepts that failed (EMFILE, ENFILE, ENOBUFS and the like) and were tried again later.
    accept_errors,
    /// Times that accepting stopped because the connection limit was near or reached.
    accept_pauses,
    /// Outgoing connections established.
    connected,
    /// Receives armed, beyond the first of each connection.
    rearms,
    /// Receives that found no buffer and were parked until one returned.
    starved,
    /// Leases copied to the heap because a peer that does not read kept them from others.
    reclaimed,
    /// Times that a connection became congested (reached the high-water mark).
    congested,
    /// Receives paused, by congestion or by the handler.
    pauses,
    /// Sends refused because a connection's queue was at its limit.
    send_refusals,
    /// Submission queue found full: an extra system call each.
    sq_full,
    /// Completion queue overflows (the kernel keeps what does not fit; nothing is lost).
    cq_overflows,
    /// Completions of an earlier use of a slot, dropped.
    stale,
    /// Operations that ended with `EFAULT`: the kernel was given memory that it must not access. Never, but
    /// for a mistake in this library; see [`BufferConfig::guard`](crate::BufferConfig::guard).
    faults,
    /// Timers that fired.
    timers,
    /// Messages taken from the mailbox.
    mailbox,
    /// Wake-ups by other threads.
    wakes,
    /// Tasks spawned.
    tasks_spawned,
    /// Tasks that ended, however: those that panicked, were aborted, or were dropped with their worker included.
    tasks_finished,
    /// Tasks that panicked.
    tasks_panicked,
    /// Tasks that were aborted, or dropped with their worker.
    tasks_aborted,
    /// Polls of tasks.
    task_polls,
    /// Wakes of tasks that came from other threads; when the mailbox was full, several count as one.
    remote_wakes,
    /// Tasks that have not ended now.
    tasks,
    /// Connections now open (or being opened or closed).
    connections,
    /// Buffers now leased.
    buffers_out,
    /// Nanoseconds outside the kernel's wait.
    busy_ns,
    /// Nanoseconds inside the kernel's wait, its work on submissions included.
    parked_ns,
}

impl Snapshot {
    /// Connections closed, for whatever reason.
    pub fn closed_total(&self) -> u64 {
        self.closed.iter().sum()
    }

    /// Waits entered per message received; 0 when there was none.
    pub fn enters_per_message(&self) -> f64 {
        if self.messages == 0 { 0.0 } else { self.enters as f64 / self.messages as f64 }
    }

    /// Time outside the kernel's wait.
    pub fn busy(&self) -> Duration {
        Duration::from_nanos(self.busy_ns)
    }
}

/// Snapshots of all workers of a runtime.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metrics {
    /// One per worker, by index.
    pub workers: Vec<Snapshot>,
}

impl Metrics {
    /// All workers together.
    pub fn total(&self) -> Snapshot {
        let mut total = Snapshot::default();
        for worker in &self.workers {
            total += *worker;
        }
        total
    }
}

impl Deref for Metrics {
    type Target = [Snapshot];

    fn deref(&self) -> &[Snapshot] {
        &self.workers
    }
}

impl fmt::Display for Snapshot {
    /// One line of what an operator looks at first.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} connections, {} accepted, {} closed, {} messages, {} B in, {} B out, {:.3} enters/message, \
             {} starved, {} congested, {} buffers out",
            self.connections,
            self.accepted,
            self.closed_total(),
            self.messages,
            self.bytes_received,
            self.bytes_sent,
            self.enters_per_message(),
            self.starved,
            self.congested,
            self.buffers_out,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_names_every_counter_and_every_reason() {
        let counters = Counters::default();
        counters.messages.add(3);
        counters.closed[CloseReason::Eof.index()].add(2);
        let snapshot = counters.snapshot();
        let named: Vec<_> = snapshot.iter().collect();
        assert!(named.contains(&("messages".to_owned(), 3)));
        assert!(named.contains(&("closed_eof".to_owned(), 2)));
        assert_eq!(snapshot.closed_total(), 2);
    }
}
