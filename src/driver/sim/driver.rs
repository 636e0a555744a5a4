//! The simulated kernel as a [`Driver`].

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::super::event::{AcceptMode, CloseHow, Event, Key, ListenerId, Multishot, RecvEnd, Socket};
use super::super::{
    Addresses, DATAGRAM_SENDS, Datagram, DatagramConfig, Driver, ListenConfig, Listening, Wait, Waker,
    check_datagram_room,
};
use super::control::{Number, is_unix};
use super::errno;
use super::ring::{Cqe, End, Kind, Phase, Ring, Shape, Slot, Sqe};
use super::script::{Place, Shortage, Strike};
use super::tcp::{Owner, Sock};
use super::world::{Shared, World};
use crate::buffer::{Chain, Memory};
use crate::clock::Time;
use crate::config::{ConnectConfig, SocketOptions};
use crate::metrics::Counters;

/// A listening socket of the simulated kernel, on its way to a driver.
#[derive(Debug)]
pub(crate) struct SimListener(pub(crate) u32);

/// Wakes a simulated worker.
#[derive(Clone, Debug)]
pub(crate) struct SimWaker(Arc<AtomicBool>);

impl Waker for SimWaker {
    fn wake(&self) {
        self.0.store(true, Ordering::Release);
    }
}

/// One ring of the simulated kernel.
///
/// Waiting does not block: [`submit_and_wait`](Driver::submit_and_wait) makes available what is
/// due and notes how long the thread would have slept. Whoever runs the world turns this driver's
/// worker again when [`Ring::is_due`] says so.
pub(crate) struct SimDriver {
    world: Shared,
    ring: usize,
    memory: Memory,
    shape: Shape,
    now: Time,
}

/// Stops a test whose worker broke the driver's contract: in the simulation that is the finding.
macro_rules! contract {
    ($held:expr, $($text:tt)+) => {
        assert!($held, "driver contract broken: {}", format_args!($($text)+))
    };
}

impl SimDriver {
    /// A ring in the given world.
    pub(crate) fn new(world: &Shared, memory: Memory, counters: Arc<Counters>, shape: Shape) -> Self {
        let mut this = world.borrow_mut();
        let ring = this.rings.len();
        this.rings.push(Ring::new(memory.clone(), counters, shape));
        let now = this.now;
        drop(this);
        Self { world: world.clone(), ring, memory, shape, now }
    }

    /// Its number in the world.
    pub(crate) fn index(&self) -> usize {
        self.ring
    }

    /// Whether a multishot accept tells the peer's address: a descriptor can be asked for it.
    fn knows_peer(&self) -> bool {
        self.shape.table.is_none()
    }

    fn with<R>(&self, run: impl FnOnce(&mut World, usize) -> R) -> R {
        run(&mut self.world.borrow_mut(), self.ring)
    }

    /// Binds a socket to a vacant slot.
    fn occupy(world: &mut World, ring: usize, key: Key, sock: Sock) {
        let slots = &mut world.rings[ring].slots;
        let index = key.slot as usize;
        if slots.len() <= index {
            slots.resize(index + 1, Slot::default());
        }
        contract!(slots[index].phase == Phase::Vacant, "{key:?} is not vacant");
        slots[index] = Slot { generation: key.generation, phase: Phase::Open(sock), ..Slot::default() };
        world.set_owner(sock, Owner::Ring);
    }

    /// The open connection that the worker means.
    fn open(world: &mut World, ring: usize, key: Key) -> (&mut Slot, Sock) {
        let Some(slot) = world.rings[ring].slot_mut(key) else {
            panic!("driver contract broken: {key:?} is unknown or of an earlier generation")
        };
        let Phase::Open(sock) = slot.phase else {
            panic!("driver contract broken: {key:?} is {:?}, not open", slot.phase)
        };
        (slot, sock)
    }

    fn start_connect(world: &mut World, ring: usize, key: Key, from: SocketAddr, to: SocketAddr) {
        let sock = world.open(from, to, Owner::Nobody);
        Self::occupy(world, ring, key, sock);
        let full = world.rings[ring].is_table_full();
        world.rings[ring].sockets += usize::from(!full);
        Self::open(world, ring, key).0.no_entry = full;
        let op = world.start(ring, Kind::Connect { key, sock });
        let (slot, _) = Self::open(world, ring, key);
        slot.ops += 1;
        slot.connect = Some(op);
    }

    fn world_listener(world: &World, ring: usize, id: ListenerId) -> u32 {
        match world.rings[ring].listeners.get(usize::from(id.0)) {
            Some(Number { listener: Some(listener), .. }) => *listener,
            _ => panic!("driver contract broken: {id:?} is unknown or removed"),
        }
    }

    fn loose(world: &mut World, ring: usize, socket: &Socket) -> Sock {
        match world.rings[ring].loose.remove(&socket.0) {
            Some(sock) => sock,
            None => panic!("driver contract broken: {socket:?} was adopted or discarded before"),
        }
    }

    /// Turns a completion into what the worker is told; `None` when it is not told.
    fn event(world: &mut World, ring: usize, knows_peer: bool, cqe: Cqe) -> Option<Event> {
        let this = &mut world.rings[ring];
        match cqe {
            Cqe::Woken => Some(Event::Woken),
            Cqe::Accepted { id, socket, peer, mode, armed } => {
                this.in_flight -= usize::from(!armed);
                if !armed {
                    this.owe_accept(id, -1);
                }
                let peer = (mode == AcceptMode::Once || knows_peer).then_some(peer);
                let peer = peer.filter(|peer| !is_unix(*peer));
                Some(Event::Accepted { listener: id, socket, peer, mode, armed })
            }
            Cqe::AcceptFailed { id, mode, error } => {
                this.in_flight -= 1;
                this.owe_accept(id, -1);
                let error = io::Error::from_raw_os_error(error);
                Some(Event::AcceptFailed { listener: id, mode, error })
            }
            Cqe::Data { key, buf, armed } => {
                let event = Event::Received { key, buf, armed };
                this.settle(key, (!armed).then_some(Which::Recv)).pick(key, event)
            }
            Cqe::RecvEnded { key, end } => {
                let end = match end {
                    End::Eof => RecvEnd::Eof,
                    End::NoBuffer => RecvEnd::NoBuffer,
                    End::Stopped => RecvEnd::Stopped,
                    End::Error(error) => RecvEnd::Failed(io::Error::from_raw_os_error(error)),
                };
                let event = Event::RecvEnded { key, end };
                this.settle(key, Some(Which::Recv)).pick(key, event)
            }
            Cqe::Sent { key, chain, result } => {
                let fate = this.settle(key, Some(Which::Send));
                if fate != Fate::Told {
                    this.memory.chunks.clear(chain);
                    return fate.pick(key, Event::Woken);
                }
                let result = result.map_err(io::Error::from_raw_os_error);
                Some(Event::Sent { key, chain, result })
            }
            Cqe::Connected { key, result } => {
                let result = result.map_err(io::Error::from_raw_os_error);
                let event = Event::Connected { key, result };
                this.settle(key, Some(Which::Connect)).pick(key, event)
            }
            Cqe::DatagramSent { key, token, result } => {
                let result = result.map_err(io::Error::from_raw_os_error);
                let event = Event::DatagramSent { key, token, result };
                this.settle(key, Some(Which::Datagram)).pick(key, event)
            }
            Cqe::Closed { key } => this.settle(key, Some(Which::Close)).pick(key, Event::Closed { key }),
        }
    }

    /// Takes completions until one is for the worker.
    fn take_event(&mut self) -> Option<Event> {
        let knows_peer = self.knows_peer();
        self.with(|world, ring| {
            if world.rings[ring].gathering {
                return None;
            }
            loop {
                let cqe = world.rings[ring].cq.pop_front()?;
                world.rings[ring].counters.cqes.add(1);
                world.note_cqe(ring, &cqe);
                if let Some(event) = Self::event(world, ring, knows_peer, cqe) {
                    return Some(event);
                }
            }
        })
    }
}

/// Which of a connection's operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    Recv,
    Send,
    Connect,
    Datagram,
    Close,
}

/// What becomes of a completion of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// The worker is told.
    Told,
    /// The connection is being closed: nobody is told.
    Hidden,
    /// It was the last of a connection that is being closed.
    Last,
}

impl Fate {
    fn pick(self, key: Key, event: Event) -> Option<Event> {
        match self {
            Self::Told => Some(event),
            Self::Hidden => None,
            Self::Last => Some(Event::Closed { key }),
        }
    }
}

impl Ring {
    /// Books a completion; `ended` names the operation that it was the last of.
    fn settle(&mut self, key: Key, ended: Option<Which>) -> Fate {
        let Some(slot) = self.slot_mut(key) else {
            self.counters.stale.add(1);
            return Fate::Hidden;
        };
        if let Some(which) = ended {
            slot.ops -= 1;
            match which {
                Which::Recv => slot.recv = None,
                Which::Send => slot.send = None,
                Which::Connect => slot.connect = None,
                Which::Datagram => slot.datagrams -= 1,
                Which::Close => {}
            }
        }
        let fate = match slot.phase {
            Phase::Closing(..) if slot.ops == 0 => {
                slot.phase = Phase::Vacant;
                Fate::Last
            }
            Phase::Closing(..) => Fate::Hidden,
            Phase::Open(_) | Phase::Vacant => Fate::Told,
        };
        self.in_flight -= usize::from(ended.is_some());
        fate
    }
}

impl Driver for SimDriver {
    type Listener = SimListener;
    type Waker = SimWaker;

    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn now(&self) -> Time {
        self.now
    }

    fn clock(&self) -> Time {
        self.world.borrow().now
    }

    fn waker(&self) -> SimWaker {
        self.with(|world, ring| SimWaker(world.rings[ring].woken.clone()))
    }

    fn add_listener(&mut self, listener: SimListener) -> io::Result<ListenerId> {
        self.with(|world, ring| {
            let Some(shared) = world.listeners.get_mut(&listener.0) else {
                return Err(io::Error::from_raw_os_error(errno::EADDRNOTAVAIL));
            };
            let id = world.rings[ring].number(listener.0)?;
            shared.users += 1;
            Ok(id)
        })
    }

    fn multishot(&self) -> Multishot {
        match (self.shape.multishot_accept, self.knows_peer()) {
            (false, _) => Multishot::Absent,
            (true, false) => Multishot::WithoutPeer,
            (true, true) => Multishot::WithPeer,
        }
    }

    fn accept(&mut self, id: ListenerId, mode: AcceptMode) {
        self.with(|world, ring| {
            let listener = Self::world_listener(world, ring, id);
            world.rings[ring].owe_accept(id, 1);
            world.start(ring, Kind::Accept { listener, id, mode });
        });
    }

    fn cancel_accept(&mut self, id: ListenerId) {
        self.with(|world, ring| {
            let listener = Self::world_listener(world, ring, id);
            world.push(ring, Sqe::CancelAccept(listener));
        });
    }

    fn remove_listener(&mut self, id: ListenerId) {
        self.with(|world, ring| {
            let listener = Self::world_listener(world, ring, id);
            let number = &mut world.rings[ring].listeners[usize::from(id.0)];
            contract!(number.untold == 0, "{id:?} is removed with an accept armed");
            number.listener = None;
            world.push(ring, Sqe::Unlisten(listener));
        });
    }

    fn adopt(&mut self, key: Key, socket: Socket) {
        self.with(|world, ring| {
            let sock = Self::loose(world, ring, &socket);
            Self::occupy(world, ring, key, sock);
        });
    }

    fn discard(&mut self, socket: Socket) {
        self.with(|world, ring| {
            let sock = Self::loose(world, ring, &socket);
            world.push(ring, Sqe::Discard(sock));
        });
    }

    fn connect(&mut self, key: Key, config: &ConnectConfig) -> io::Result<()> {
        self.with(|world, ring| {
            let any = [Shortage::ProcessFiles, Shortage::SystemFiles, Shortage::Buffers, Shortage::Ports];
            let probability = world.settings.faults.connect_error;
            let shortage = world.strikes_short_of(Strike::ConnectError, Place::ring(ring), probability, &any);
            if let Some(shortage) = shortage {
                return Err(io::Error::from_raw_os_error(shortage.errno()));
            }
            let host = config.source.map(|source| source.ip()).or(world.rings[ring].shape.host);
            let port = config.source.map(|source| source.port()).filter(|port| *port != 0);
            let free = world.ephemeral(config.target);
            let host = host.filter(|host| host.is_ipv4() == config.target.is_ipv4()).unwrap_or(free.ip());
            let from = SocketAddr::new(host, port.unwrap_or(free.port()));
            Self::start_connect(world, ring, key, from, config.target);
            Ok(())
        })
    }

    fn open_datagram(&mut self, key: Key, config: &DatagramConfig) -> io::Result<()> {
        check_datagram_room(&self.memory)?;
        self.with(|world, ring| {
            let socket = world.open_datagram(ring, config)?;
            Self::occupy(world, ring, key, Sock { conn: socket, side: 0 });
            Self::open(world, ring, key).0.no_entry = true;
            Ok(())
        })
    }

    fn send_datagram(&mut self, key: Key, token: u32, datagram: Datagram) {
        self.with(|world, ring| {
            let (slot, sock) = Self::open(world, ring, key);
            contract!(slot.datagrams < DATAGRAM_SENDS, "{key:?} has too many datagrams under way");
            contract!(world.datagrams.contains_key(&sock.conn), "{key:?} is no datagram socket");
            world.start(ring, Kind::SendDatagram { key, sock, token, datagram: Some(datagram) });
            let (slot, _) = Self::open(world, ring, key);
            slot.ops += 1;
            slot.datagrams += 1;
        });
    }

    #[cfg(unix)]
    fn connect_unix(&mut self, key: Key, target: &std::os::unix::net::SocketAddr) -> io::Result<()> {
        self.with(|world, ring| {
            let any = [Shortage::ProcessFiles, Shortage::SystemFiles, Shortage::Buffers];
            let probability = world.settings.faults.connect_error;
            let shortage = world.strikes_short_of(Strike::ConnectError, Place::ring(ring), probability, &any);
            if let Some(shortage) = shortage {
                return Err(io::Error::from_raw_os_error(shortage.errno()));
            }
            let (from, target) = (world.unix_nowhere(), world.unix_address(target, false));
            Self::start_connect(world, ring, key, from, target);
            Ok(())
        })
    }

    fn listen(&mut self, config: &ListenConfig) -> io::Result<Listening> {
        self.with(|world, ring| world.listen_at_run_time(ring, config))
    }

    fn addresses(&mut self, key: Key) -> io::Result<Addresses> {
        self.with(|world, ring| world.addresses_of(ring, key))
    }

    /// Checks them; options are ignored here.
    fn set_options(&mut self, key: Key, options: &SocketOptions) -> io::Result<()> {
        self.with(|world, ring| world.check_options_of(ring, key, options))
    }

    fn recv(&mut self, key: Key) {
        self.with(|world, ring| {
            let (slot, sock) = Self::open(world, ring, key);
            contract!(slot.recv.is_none(), "{key:?} receives already");
            contract!(slot.connect.is_none(), "{key:?} is not connected yet");
            let op = world.start(ring, Kind::Recv { key, sock });
            let (slot, _) = Self::open(world, ring, key);
            slot.ops += 1;
            slot.recv = Some(op);
        });
    }

    fn cancel_recv(&mut self, key: Key) {
        self.with(|world, ring| {
            let op = Self::open(world, ring, key).0.recv;
            if let Some(op) = op {
                world.push(ring, Sqe::Cancel(op));
            }
        });
    }

    fn send(&mut self, key: Key, chain: Chain) {
        self.with(|world, ring| {
            let (slot, sock) = Self::open(world, ring, key);
            contract!(slot.send.is_none(), "{key:?} sends already");
            contract!(slot.connect.is_none(), "{key:?} is not connected yet");
            contract!(!chain.is_empty(), "{key:?} sends an empty chain");
            contract!(!world.datagrams.contains_key(&sock.conn), "{key:?} is a datagram socket");
            let op = world.start(ring, Kind::Send { key, sock, chain, taken: 0 });
            let (slot, _) = Self::open(world, ring, key);
            slot.ops += 1;
            slot.send = Some(op);
        });
    }

    fn cancel_send(&mut self, key: Key) {
        self.with(|world, ring| {
            let op = Self::open(world, ring, key).0.send;
            if let Some(op) = op {
                world.push(ring, Sqe::Cancel(op));
            }
        });
    }

    fn shutdown_write(&mut self, key: Key) {
        self.with(|world, ring| {
            let (slot, sock) = Self::open(world, ring, key);
            contract!(slot.send.is_none(), "{key:?} is shut down with a send in flight");
            world.push(ring, Sqe::Shutdown(sock));
        });
    }

    fn close(&mut self, key: Key, how: CloseHow) {
        self.with(|world, ring| {
            // Before the slot is closing: a close that is not in the queue yet must not be carried out.
            world.make_room(ring);
            let (slot, sock) = Self::open(world, ring, key);
            slot.phase = Phase::Closing(Some(sock), how);
            slot.ops += 1;
            let this = &mut world.rings[ring];
            this.sq.push(Sqe::Close(key));
            this.in_flight += 1;
        });
    }

    fn submit_and_wait(&mut self, wait: impl Into<Wait>) -> io::Result<()> {
        let wait = wait.into();
        self.now = self.with(|world, ring| {
            let until = wait.timeout.map(|timeout| world.now + timeout);
            let now = world.now;
            let before = &mut world.rings[ring];
            let still = before.asleep && before.wait_until.is_none_or(|until| until > now);
            let wait = if std::mem::take(&mut before.midway) { wait.for_one() } else { wait };
            world.enter(ring, until);
            world.rings[ring].gather(now, &wait, still);
            world.now
        });
        Ok(())
    }

    fn next_event(&mut self) -> Option<Event> {
        self.take_event()
    }

    fn has_events(&self) -> bool {
        self.with(|world, ring| !world.rings[ring].gathering && !world.rings[ring].cq.is_empty())
    }

    fn in_flight(&self) -> usize {
        self.with(|world, ring| world.rings[ring].in_flight)
    }

    /// Virtual time passes here, up to `patience`, while other workers stand still.
    fn finish(mut self, patience: Duration) -> usize {
        let limit = self.world.borrow().now + patience;
        self.with(|world, ring| world.rings[ring].gathering = false);
        self.with(|world, ring| world.release_buffers(ring, None));
        self.with(World::cancel_all);
        loop {
            while let Some(event) = self.take_event() {
                if let Event::Sent { chain, .. } = event {
                    self.memory.chunks.clear(chain);
                }
            }
            let left = self.in_flight();
            if left == 0 {
                return 0;
            }
            let mut world = self.world.borrow_mut();
            match world.next_time() {
                Some(at) if at <= limit => world.advance(at),
                _ => {
                    self.memory.leak();
                    return left;
                }
            }
            world.enter(self.ring, None);
        }
    }
}

impl Drop for SimDriver {
    /// The process is gone: its sockets are closed and nothing of it goes on.
    fn drop(&mut self) {
        // Borrowed only while a panic unwinds through the world: then there is nothing to tidy.
        if let Ok(mut world) = self.world.try_borrow_mut() {
            world.tear_down(self.ring);
        }
    }
}
