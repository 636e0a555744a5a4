//! The same bytes to connections of all workers.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::buffer::{Detached, Payload};
use crate::handler::ConnId;
use crate::task::{Hub, Message};
use crate::worker::{Remote, RemoteError};

use super::group::{Group, GroupSent, Member};

/// A [`Group`] on every worker of a runtime under one name; may be sent to them and cloned.
///
/// What is sent is queued on the members of the sender's own worker at once, and goes to each of the other workers
/// as one message to its mailbox, however many members are there. Bytes of one sender reach every member in their order.
///
/// ```
/// use std::io::{Read, Write};
/// use std::time::Duration;
/// use corelane::net::TcpListener;
/// use corelane::sync::Broadcast;
/// use corelane::{Runtime, Server};
///
/// let room = Broadcast::new();
/// let addr: std::net::SocketAddr = "127.0.0.1:0".parse()?;
/// let runtime = Runtime::builder().workers(2).listen(addr).start_tasks(move |_| {
///     let room = room.clone();
///     Server::new().serve(TcpListener::of_builder(0), move |mut stream| {
///         let room = room.clone();
///         async move {
///             let member = room.join(stream.id());
///             stream.send("welcome\n").await?;
///             while let Some(words) = stream.recv().await? {
///                 room.send_except(&member, words);
///             }
///             std::io::Result::Ok(())
///         }
///     })
/// })?;
/// let addr = runtime.info().listeners[0].addr;
/// let mut chatters: Vec<_> = (0..4).map(|_| std::net::TcpStream::connect(addr)).collect::<Result<_, _>>()?;
/// for chatter in &mut chatters {
///     chatter.read_exact(&mut [0; 8])?;
/// }
/// chatters[0].write_all(b"hello")?;
/// for chatter in &mut chatters[1..] {
///     let mut words = [0; 5];
///     chatter.read_exact(&mut words)?;
///     assert_eq!(&words, b"hello");
/// }
/// runtime.shutdown(Duration::from_secs(1))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Broadcast {
    number: u64,
    limit: u64,
}

/// What became of bytes for a broadcast.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BroadcastSent {
    /// The members of the sender's own worker.
    pub here: GroupSent,
    /// Other workers that were told.
    pub workers: usize,
    /// Other workers whose mailbox was full: all of their members miss it.
    pub workers_full: usize,
    /// Other workers that have stopped.
    pub workers_stopped: usize,
}

impl BroadcastSent {
    fn count<T>(&mut self, posted: &Result<(), RemoteError<T>>) {
        match posted {
            Ok(()) => self.workers += 1,
            Err(RemoteError::Full(_)) => self.workers_full += 1,
            Err(RemoteError::Stopped(_)) => self.workers_stopped += 1,
        }
    }
}

impl Broadcast {
    /// A broadcast without members, different from every other one.
    pub fn new() -> Self {
        Self::with_limit(u64::MAX)
    }

    /// As [`Group::with_limit`].
    ///
    /// # Panics
    /// When the limit is 0.
    pub fn with_limit(bytes: u64) -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        assert!(bytes > 0, "with a limit of 0 unsent bytes no member would get anything");
        Self { number: LAST.fetch_add(1, Ordering::Relaxed), limit: bytes }
    }

    /// Makes a connection of this worker a member, until what this returns is dropped.
    ///
    /// # Panics
    /// When the connection is one of another worker; and outside of a task.
    pub fn join(&self, id: ConnId) -> Member {
        let hub = Hub::current();
        assert!(
            id.worker() == hub.worker(),
            "connection {id} is one of worker {}, and this is worker {}: let it join there",
            id.worker(),
            hub.worker(),
        );
        let group = {
            let mut groups = hub.groups().0.borrow_mut();
            groups.entry(self.number).or_insert_with(|| Group::with_limit(self.limit)).clone()
        };
        group.add(id, Some(Registered { hub, number: self.number }))
    }

    /// Queues bytes on every member, now on this worker and soon on the others.
    ///
    /// # Panics
    /// Outside of a task.
    pub fn send(&self, bytes: impl Into<Payload>) -> BroadcastSent {
        self.spread(bytes.into(), None)
    }

    /// Queues bytes on every member but one.
    ///
    /// # Panics
    /// Outside of a task.
    pub fn send_except(&self, member: &Member, bytes: impl Into<Payload>) -> BroadcastSent {
        self.spread(bytes.into(), Some(member.id()))
    }

    fn spread(self, bytes: Payload, except: Option<ConnId>) -> BroadcastSent {
        let hub = Hub::current();
        let mut sent = BroadcastSent::default();
        let mut bytes = bytes.into_shareable();
        let workers = hub.remote().workers();
        if workers > 1 {
            // A lease belongs to its worker: the others get a copy, all of them the same.
            let shared = bytes.into_shared();
            for worker in (0..workers).filter(|&worker| worker != hub.worker()) {
                let message = self.message(Detached::Shared(shared.clone()));
                // Noted, so that each worker is woken once for everything that this turn sends.
                let posted = hub.with_core(|core| core.post(worker, message));
                sent.count(&posted);
            }
            bytes = Payload::from(shared);
        }
        sent.here = self.queue_here(&hub, bytes, except);
        sent
    }

    /// Queues bytes on every member from anywhere: from a thread that runs no tasks, with
    /// [`Runtime::remote`](crate::Runtime::remote).
    pub fn send_from(&self, remote: &Remote<Message>, bytes: impl Into<Detached>) -> BroadcastSent {
        let shared = Payload::from(bytes.into()).into_shared();
        let mut sent = BroadcastSent::default();
        for worker in 0..remote.workers() {
            sent.count(&remote.post(worker, self.message(Detached::Shared(shared.clone()))));
        }
        sent
    }

    fn message(self, bytes: Detached) -> Message {
        Message::run(move || {
            let hub = Hub::current();
            // Who misses it there is counted there.
            let _ = self.queue_here(&hub, Payload::from(bytes), None);
        })
    }

    fn queue_here(self, hub: &Hub, bytes: Payload, except: Option<ConnId>) -> GroupSent {
        let group = hub.groups().0.borrow().get(&self.number).cloned();
        group.map_or_else(GroupSent::default, |group| group.queue(hub, bytes, except))
    }

    /// Number of members on this worker.
    ///
    /// # Panics
    /// Outside of a task.
    pub fn len_here(&self) -> usize {
        Hub::current().groups().0.borrow().get(&self.number).map_or(0, Group::len)
    }
}

impl Default for Broadcast {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Broadcast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Broadcast({})", self.number)
    }
}

/// A worker's part of all broadcasts: those that have members there.
#[derive(Default)]
pub(crate) struct Groups(RefCell<HashMap<u64, Group>>);

/// Where a member's group is noted.
pub(super) struct Registered {
    hub: Rc<Hub>,
    number: u64,
}

impl Registered {
    /// The last member has gone.
    pub(super) fn forget(&self) {
        let group = self.hub.groups().0.borrow_mut().remove(&self.number);
        drop(group);
    }
}
