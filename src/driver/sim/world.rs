//! The simulated machine room: clock, agenda, listeners.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use super::datagram::{DatagramSock, Packet};
use super::faults::Faults;
use super::net::Net;
use super::peer::PeerState;
use super::ring::{Cqe, Lane, Ring};
use super::rng::{Rng, mix};
use super::script::{Fault, Script};
use super::tcp::{Conn, Owner, Sock};
use super::trace::{Actor, Trace};
use crate::clock::Time;

/// The world, shared by drivers, peers and the test.
pub(crate) type Shared = Rc<RefCell<World>>;

/// How the world behaves when nothing goes wrong.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) seed: u64,
    /// Time from one end of a connection to the other, least and most.
    pub(crate) latency: (Duration, Duration),
    /// Bytes that each direction of a connection holds at the sender, and again at the receiver.
    pub(crate) socket_buffer: u32,
    pub(crate) faults: Faults,
}

/// Something that will happen.
#[derive(Debug)]
pub(crate) enum Action {
    /// A client's attempt to connect arrives.
    Syn { conn: u64, attempt: u32 },
    /// The first packet on its way to this end arrives.
    Deliver { to: Sock },
    /// The sender learns that the receiver has room again.
    Credit { from: Sock, bytes: usize },
    /// A scripted peer looks at what has arrived.
    PeerRead { peer: u64 },
    /// A datagram arrives, or news of one.
    Datagram(Box<Packet>),
    /// An operation goes on.
    Run { ring: usize, op: u64 },
    /// An operation whose turn was put off has it.
    Late { ring: usize, op: u64 },
    /// A cancel takes effect.
    Cancelled { ring: usize, op: u64 },
    /// A completion that was held back becomes visible.
    Post { ring: usize, lane: Lane, cqe: Cqe },
    /// A fault that was called for at this moment.
    Strike { fault: Fault, ring: Option<usize>, conn: Option<u64> },
    /// A partition between two hosts ends.
    Heal { a: IpAddr, b: IpAddr },
    /// Buffers that were held come back.
    Release { ring: usize, hold: u64 },
    /// The clock shall stop here.
    Look,
}

/// A listening socket and its queue of established connections.
pub(crate) struct Listener {
    pub(crate) addr: SocketAddr,
    pub(crate) backlog: u32,
    /// Established, not accepted.
    pub(crate) queue: VecDeque<Sock>,
    /// Armed accept operations, in the order of arming: ring and operation.
    pub(crate) waiting: VecDeque<(usize, u64)>,
    /// Rings that accept from it; 0 for a scripted peer's.
    pub(crate) users: u32,
    /// Others may listen on the address too (`SO_REUSEPORT`).
    pub(crate) shared: bool,
}

impl Listener {
    /// Linux compares with `>`, so one connection more than the backlog fits.
    fn is_full(&self) -> bool {
        self.queue.len() as u32 > self.backlog
    }
}

pub(crate) struct World {
    pub(crate) settings: Settings,
    pub(crate) now: Time,
    pub(crate) rng: Rng,
    pub(crate) trace: Trace,
    /// By time, then by order of scheduling.
    agenda: BTreeMap<(Time, u64), Action>,
    serial: u64,
    pub(crate) conns: BTreeMap<u64, Conn>,
    /// By number, which is none of a connection.
    pub(crate) datagrams: BTreeMap<u64, DatagramSock>,
    pub(crate) listeners: BTreeMap<u32, Listener>,
    pub(crate) rings: Vec<Ring>,
    pub(crate) peers: BTreeMap<u64, PeerState>,
    pub(crate) net: Net,
    /// Names of Unix sockets.
    #[cfg(unix)]
    pub(crate) names: super::control::Names,
    pub(crate) script: Script,
    next_port: u16,
    /// By how much the clock leapt, all leaps together.
    pub(crate) leapt: Duration,
}

impl World {
    pub(crate) fn new(settings: Settings) -> Self {
        let rng = Rng::new(settings.seed);
        Self {
            settings,
            now: Time::ZERO,
            rng,
            trace: Trace::default(),
            agenda: BTreeMap::new(),
            serial: 0,
            conns: BTreeMap::new(),
            datagrams: BTreeMap::new(),
            listeners: BTreeMap::new(),
            rings: Vec::new(),
            peers: BTreeMap::new(),
            net: Net::default(),
            #[cfg(unix)]
            names: Default::default(),
            script: Script::default(),
            next_port: 0,
            leapt: Duration::ZERO,
        }
    }

    pub(crate) fn shared(settings: Settings) -> Shared {
        Rc::new(RefCell::new(Self::new(settings)))
    }

    pub(crate) fn note(&mut self, actor: Actor, what: &'static str, which: u64, value: u64) {
        self.trace.note(self.now, actor, what, which, value);
    }

    /// A number that no one had before.
    pub(crate) fn fresh(&mut self) -> u64 {
        self.serial += 1;
        self.serial
    }

    /// A local address for a client that did not choose one.
    pub(crate) fn ephemeral(&mut self, of: SocketAddr) -> SocketAddr {
        self.next_port = self.next_port % 28_000 + 1;
        let host = 1 + self.fresh() / 28_000;
        let ip = match of {
            SocketAddr::V4(_) => std::net::Ipv4Addr::from(0x0a00_0000 + host as u32).into(),
            SocketAddr::V6(_) => std::net::Ipv6Addr::from((0xfd00_u128 << 112) + host as u128).into(),
        };
        SocketAddr::new(ip, 32_767 + self.next_port)
    }

    // ---- clock and agenda

    pub(crate) fn schedule(&mut self, at: Time, action: Action) {
        let serial = self.fresh();
        self.agenda.insert((at.max(self.now), serial), action);
    }

    pub(crate) fn schedule_in(&mut self, nanos: u64, action: Action) {
        self.schedule(self.now + Duration::from_nanos(nanos), action);
    }

    /// When the next thing happens.
    pub(crate) fn next_time(&self) -> Option<Time> {
        self.agenda.first_key_value().map(|((at, _), _)| *at)
    }

    /// Moves the clock to `to` and lets everything happen that is due by then.
    pub(crate) fn advance(&mut self, to: Time) {
        while let Some(entry) = self.agenda.first_entry()
            && entry.key().0 <= to
        {
            let ((at, _), action) = entry.remove_entry();
            self.now = self.now.max(at);
            self.act(action);
        }
        self.now = self.now.max(to);
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Syn { conn, attempt } => self.syn(conn, attempt),
            Action::Deliver { to } => self.deliver(to),
            Action::Credit { from, bytes } => self.credit(from, bytes),
            Action::PeerRead { peer } => self.peer_read(peer),
            Action::Datagram(packet) => self.datagram_arrives(*packet),
            Action::Run { ring, op } => self.wake_op(ring, op),
            Action::Late { ring, op } => self.wake_late(ring, op),
            Action::Cancelled { ring, op } => self.cancelled(ring, op),
            Action::Post { ring, lane, cqe } => self.post_late(ring, lane, cqe),
            Action::Strike { fault, ring, conn } => self.strike_now(fault, ring, conn),
            Action::Heal { a, b } => {
                self.net.heal_between(a, b);
                self.note(Actor::Net, "healed", 0, 0);
            }
            Action::Release { ring, hold } => self.release_buffers(ring, Some(hold)),
            Action::Look => {}
        }
    }

    /// Ends everything that goes wrong.
    pub(crate) fn calm(&mut self) {
        self.note(Actor::Net, "faults end", 0, 0);
        self.settings.faults = Faults::none();
        self.script.clear();
        self.agenda.retain(|_, action| !matches!(action, Action::Strike { .. }));
        self.net.heal_all();
        for conn in self.conns.values_mut() {
            conn.stalled_until = Time::ZERO;
        }
        self.calm_datagrams();
        self.tell_half_open();
        self.calm_rings();
    }

    /// What is not as it must be at any time, whatever the handlers do.
    pub(crate) fn violation(&self) -> Option<String> {
        self.rings.iter().enumerate().find_map(|(index, ring)| {
            let found = ring.violation()?;
            Some(format!("worker {index}: {found}"))
        })
    }

    // ---- listeners

    /// Makes a listener on `addr`. Several on one address share its connections, as with
    /// `SO_REUSEPORT`.
    pub(crate) fn listen(&mut self, addr: SocketAddr, backlog: u32) -> u32 {
        let id = self.fresh() as u32;
        self.listeners.insert(
            id,
            Listener {
                addr,
                backlog,
                queue: VecDeque::new(),
                waiting: VecDeque::new(),
                users: 0,
                shared: true,
            },
        );
        id
    }

    /// The listener that a connection to `addr` goes to: always the same while the group is.
    pub(crate) fn listener_for(&self, addr: SocketAddr, conn: u64) -> Option<u32> {
        let group: Vec<u32> =
            self.listeners.iter().filter(|(_, l)| l.addr == addr).map(|(id, _)| *id).collect();
        group.get(mix(conn) as usize % group.len().max(1)).copied()
    }

    pub(crate) fn has_room(&self, listener: u32) -> bool {
        self.listeners.get(&listener).is_some_and(|listener| !listener.is_full())
    }

    /// Closes a listener: what waits in its queue is reset, as Linux does.
    pub(crate) fn unlisten(&mut self, id: u32) {
        let Some(listener) = self.listeners.remove(&id) else { return };
        for sock in listener.queue {
            self.close_sock(sock, true);
        }
    }

    /// Wakes as many armed accepts as connections wait, the longest armed first.
    pub(crate) fn wake_acceptors(&mut self, id: u32) {
        let Some(listener) = self.listeners.get(&id) else { return };
        let woken: Vec<(usize, u64)> = listener.waiting.iter().take(listener.queue.len()).copied().collect();
        for (ring, op) in woken {
            self.wake_op(ring, op);
        }
    }

    /// Whoever holds this end learns that there is something to read (data, end or error).
    pub(crate) fn wake_reader(&mut self, sock: Sock) {
        let Some(end) = self.conns.get(&sock.conn).map(|conn| &conn.ends[sock.side]) else { return };
        match end.owner {
            Owner::Ring => {
                if let Some((ring, op)) = end.reader {
                    self.wake_op(ring, op);
                }
            }
            Owner::Peer(peer) => self.peer_readable(peer),
            Owner::Nobody => {}
        }
    }

    /// Whoever holds this end learns that it can be written to (or failed).
    pub(crate) fn wake_writer(&mut self, sock: Sock) {
        let Some(end) = self.conns.get(&sock.conn).map(|conn| &conn.ends[sock.side]) else { return };
        match end.owner {
            Owner::Ring => {
                if let Some((ring, op)) = end.writer {
                    self.wake_op(ring, op);
                }
            }
            Owner::Peer(peer) => self.peer_writable(peer),
            Owner::Nobody => {}
        }
    }
}
