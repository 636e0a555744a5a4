//! The same bytes to many connections of one worker.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::rc::Rc;

use crate::buffer::Payload;
use crate::handler::{ConnId, SendErrorKind};
use crate::task::Hub;

use super::broadcast::Registered;
use super::list::List;

/// Connections of one worker that get the same bytes; cheap to clone, and all clones are the same group.
///
/// [`send`](Self::send) queues the bytes on every member without copying them: a lease or [shared](std::sync::Arc) bytes
/// by counting one reference more, a `Vec` after being moved to shared bytes once. It never waits. A member that has as many unsent
/// bytes as it may ([`send_limit`](crate::WorkerConfig::send_limit), or the group's own
/// [limit](Self::with_limit)) misses them; that is counted, and its task can act on it.
///
/// For members on several workers see [`Broadcast`](super::Broadcast).
///
/// ```
/// use corelane::net::{TcpListener, TcpStream};
/// use corelane::sync::Group;
///
/// corelane::task::block_on(async {
///     let mut listener = TcpListener::bind("127.0.0.1:0").await?;
///     let mut clients = Vec::new();
///     let mut members = Vec::new();
///     let group = Group::new();
///     for _ in 0..3 {
///         clients.push(TcpStream::connect(listener.local_addr()?).await?);
///         let stream = listener.accept().await?;
///         members.push((group.join(stream.id()), stream));
///     }
///     let sent = group.send("to all");
///     assert_eq!((sent.queued, sent.missed), (3, 0));
///     for client in &mut clients {
///         assert_eq!(&client.recv().await?.unwrap()[..], b"to all");
///     }
///     members.pop(); // leaves, and closes its connection
///     assert_eq!(group.len(), 2);
///     std::io::Result::Ok(())
/// })??;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct Group(Rc<Inner>);

struct Inner {
    members: RefCell<List<Entry>>,
    count: Cell<usize>,
    limit: u64,
}

struct Entry {
    id: ConnId,
    missed: Cell<u64>,
}

/// What became of bytes for a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GroupSent {
    /// Members on whom they were queued.
    pub queued: usize,
    /// Members that had too much unsent already.
    pub missed: usize,
    /// Members whose connection is over, or not open for sending.
    pub closed: usize,
}

impl Group {
    /// A group without members.
    pub fn new() -> Self {
        Self::with_limit(u64::MAX)
    }

    /// A group whose members miss what is sent while they have that many unsent bytes or more; that a peer which reads slowly
    /// may keep from being freed. [`send_limit`](crate::WorkerConfig::send_limit) holds in any case.
    ///
    /// # Panics
    /// When the limit is 0: nobody would ever get anything.
    pub fn with_limit(bytes: u64) -> Self {
        assert!(bytes > 0, "with a limit of 0 unsent bytes no member would get anything");
        Self(Rc::new(Inner { members: RefCell::default(), count: Cell::new(0), limit: bytes }))
    }

    /// Makes a connection a member, until what this returns is dropped. A connection that joins twice gets everything
    /// twice.
    ///
    /// # Panics
    /// When the connection is one of another worker (join a group there, or use a
    /// [`Broadcast`](super::Broadcast)); and outside of a task.
    pub fn join(&self, id: ConnId) -> Member {
        let worker = Hub::current().worker();
        assert!(
            id.worker() == worker,
            "connection {id} is one of worker {}, and this is worker {worker}: a group has connections of one worker",
            id.worker(),
        );
        self.add(id, None)
    }

    pub(super) fn add(&self, id: ConnId, registered: Option<Registered>) -> Member {
        let place = self.0.members.borrow_mut().push_back(Entry { id, missed: Cell::new(0) });
        self.0.count.set(self.0.count.get() + 1);
        Member { group: self.clone(), place, registered }
    }

    /// Queues bytes on every member.
    ///
    /// # Panics
    /// Outside of a task.
    pub fn send(&self, bytes: impl Into<Payload>) -> GroupSent {
        self.queue(&Hub::current(), bytes.into(), None)
    }

    /// Queues bytes on every member but one: on all others than who said them.
    ///
    /// # Panics
    /// Outside of a task.
    pub fn send_except(&self, member: &Member, bytes: impl Into<Payload>) -> GroupSent {
        self.queue(&Hub::current(), bytes.into(), Some(member.id()))
    }

    pub(super) fn queue(&self, hub: &Hub, bytes: Payload, except: Option<ConnId>) -> GroupSent {
        let bytes = bytes.into_shareable();
        let members = self.0.members.borrow();
        let mut sent = GroupSent::default();
        hub.with_core(|core| {
            let mut at = members.front();
            while let Some(place) = at {
                at = members.after(place);
                let member = members.get(place);
                if except == Some(member.id) {
                    continue;
                }
                let Some(slot) = core.find(member.id) else {
                    sent.closed += 1;
                    continue;
                };
                let refused = if core.unsent(slot) >= self.0.limit {
                    Err(SendErrorKind::Full)
                } else {
                    core.send(slot, bytes.clone()).map_err(|refused| refused.kind)
                };
                match refused {
                    Ok(()) => sent.queued += 1,
                    Err(SendErrorKind::Full) => {
                        sent.missed += 1;
                        member.missed.set(member.missed.get() + 1);
                    }
                    Err(SendErrorKind::Closed) => sent.closed += 1,
                }
            }
        });
        sent
    }

    /// Number of members.
    pub fn len(&self) -> usize {
        self.0.count.get()
    }

    /// Whether it has no member.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Default for Group {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Group({} members)", self.len())
    }
}

/// A connection's membership of a [`Group`] or a [`Broadcast`](super::Broadcast); dropping it leaves. It
/// keeps nothing open: a member whose connection ends is passed over.
///
/// ```
/// # use corelane::net::{TcpListener, TcpStream};
/// # use corelane::sync::Group;
/// # corelane::task::block_on(async {
/// # let mut listener = TcpListener::bind("127.0.0.1:0").await?;
/// # let stream = TcpStream::connect(listener.local_addr()?).await?;
/// let group = Group::new();
/// let member = group.join(stream.id());
/// group.send("hello");
/// if member.missed() > 0 {
///     stream.abort(); // too slow for this group
/// }
/// drop(member);
/// assert!(group.is_empty());
/// # std::io::Result::Ok(())
/// # })??;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "dropping a member leaves the group"]
pub struct Member {
    group: Group,
    place: u32,
    registered: Option<Registered>,
}

impl Member {
    /// The connection.
    pub fn id(&self) -> ConnId {
        self.group.0.members.borrow().get(self.place).id
    }

    /// How often it missed something because it had too much unsent.
    pub fn missed(&self) -> u64 {
        self.group.0.members.borrow().get(self.place).missed.get()
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.group.0.members.borrow_mut().take(self.place);
        self.group.0.count.set(self.group.0.count.get() - 1);
        if let Some(registered) = &self.registered
            && self.group.is_empty()
        {
            registered.forget();
        }
    }
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Member({}, missed: {})", self.id(), self.missed())
    }
}
