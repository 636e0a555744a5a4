//! Virtual UDP: sockets, and datagrams on their way.
//!
//! ```text
//!   send ──► faults ──(latency)──► partition, stall ──► which socket? ──► waiting ──► receive
//!             lost, twice, late       lost                 │   full: dropped
//!                                                          └ none: the sender, if it is connected to that
//!                                                            address, is told ECONNREFUSED, as late again
//! ```
//!
//! Nothing is repeated: what is lost stays lost. Without faults datagrams of one socket to one address keep
//! their order. As in Linux, an error comes before what waits, goes to one operation only (a send or a
//! receive), and is told to connected sockets alone; a connected socket has its peer's datagrams before others
//! on the same address.
//!
//! A socket of a worker is a [`Sock`] whose connection is the socket's number; of one side, since there is no
//! other. Its sockets are ordinary descriptors.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::super::event::Key;
use super::super::{Address, Addresses, Datagram, DatagramConfig, PRELUDE, Received};
use super::errno;
use super::ring::{Cqe, End, Kind};
use super::rng::mix;
use super::script::{Place, Shortage, Strike};
use super::tcp::Sock;
use super::trace::Actor;
use super::transfer::Piece;
use super::world::{Action, World};
use crate::clock::Time;

/// What a waiting datagram takes of its socket's room besides its bytes, so that empty ones take some.
const OVERHEAD: usize = 256;

/// Datagrams that one send is cut into at most: Linux's `UDP_MAX_SEGMENTS`.
const MOST_SEGMENTS: usize = 64;

/// Arrival times that a socket remembers before it forgets those that are past.
const ARRIVALS_KEPT: usize = 64;

/// Who has a socket.
#[derive(Debug)]
enum Owner {
    /// A ring, and its operation that waits for a datagram.
    Ring { reader: Option<(usize, u64)> },
    /// A foreign program, and what it received.
    Peer(Vec<(SocketAddr, Vec<u8>)>),
}

/// A datagram socket.
#[derive(Debug)]
pub(crate) struct DatagramSock {
    pub(crate) local: SocketAddr,
    peer: Option<SocketAddr>,
    owner: Owner,
    /// Others may have the same address (`SO_REUSEPORT`).
    shared: bool,
    broadcast: bool,
    /// Room for what waits, and how much of it is taken.
    room: usize,
    taken: usize,
    waiting: VecDeque<(SocketAddr, Vec<u8>)>,
    /// What the next operation will be told.
    error: Option<i32>,
    /// Until then nothing from or to it arrives.
    stalled_until: Time,
    /// When the last datagram to an address arrives; those behind it come no earlier.
    arrivals: BTreeMap<SocketAddr, Time>,
}

impl DatagramSock {
    fn is_readable(&self) -> bool {
        self.error.is_some() || !self.waiting.is_empty()
    }
}

/// Something on its way.
#[derive(Debug)]
pub(crate) struct Packet {
    /// The socket that sent the datagram that this is, or is the answer to.
    sender: u64,
    from: SocketAddr,
    to: SocketAddr,
    /// `None`: the news that nobody has the address `from` (ICMP's "port unreachable").
    bytes: Option<Vec<u8>>,
}

fn inet(address: &Address) -> Result<SocketAddr, i32> {
    match address {
        Address::Inet(address) => Ok(*address),
        #[cfg(unix)]
        Address::Unix(_) => Err(errno::EAFNOSUPPORT),
    }
}

// ---- sockets

impl World {
    /// Opens a worker's socket; its number.
    pub(crate) fn open_datagram(&mut self, ring: usize, config: &DatagramConfig) -> io::Result<u64> {
        let given = [&config.local, &config.peer].map(|address| address.as_ref().map(inet).transpose());
        let (Ok(local), Ok(peer)) = (given[0], given[1]) else { return Err(not_simulated()) };
        let any = match (local, peer) {
            (Some(local), _) => local,
            (None, Some(SocketAddr::V4(_))) => SocketAddr::from(([0; 4], 0)),
            (None, Some(SocketAddr::V6(_))) => SocketAddr::from(([0; 16], 0)),
            (None, None) => return Err(not_simulated()),
        };
        self.try_open_datagram(ring, config, any, peer).map_err(io::Error::from_raw_os_error)
    }

    fn try_open_datagram(
        &mut self,
        ring: usize,
        config: &DatagramConfig,
        local: SocketAddr,
        peer: Option<SocketAddr>,
    ) -> Result<u64, i32> {
        let any = [Shortage::ProcessFiles, Shortage::SystemFiles, Shortage::Buffers, Shortage::Ports];
        let any = &any[..if local.port() == 0 { 4 } else { 3 }];
        let probability = self.settings.faults.connect_error;
        let shortage = self.strikes_short_of(Strike::ConnectError, Place::ring(ring), probability, any);
        if let Some(shortage) = shortage {
            return Err(shortage.errno());
        }
        if let Some(peer) = peer {
            check_target(local, peer, config.broadcast)?;
        }
        let mut ip = self.own_host(ring, local.ip())?;
        if ip.is_unspecified() {
            // A worker without a host has the one of clients that did not choose theirs, always the first.
            ip = match ip {
                IpAddr::V4(_) => Ipv4Addr::new(10, 0, 0, 1).into(),
                IpAddr::V6(_) => Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1).into(),
            };
        }
        let local = self.free_address(SocketAddr::new(ip, local.port()), config.reuse_port)?;
        let room = config.recv_buffer.unwrap_or(self.settings.socket_buffer);
        let owner = Owner::Ring { reader: None };
        let id = self.add_datagram_sock(local, owner, room);
        if let Some(socket) = self.datagrams.get_mut(&id) {
            (socket.peer, socket.shared, socket.broadcast) = (peer, config.reuse_port, config.broadcast);
        }
        self.note(Actor::Ring(ring), "binds a datagram socket to port", local.port().into(), id);
        Ok(id)
    }

    /// A foreign program's socket; its number.
    pub(crate) fn open_datagram_peer(&mut self, local: SocketAddr) -> Result<u64, i32> {
        let local = self.free_address(local, false)?;
        let room = self.settings.socket_buffer;
        let id = self.add_datagram_sock(local, Owner::Peer(Vec::new()), room);
        self.note(Actor::Peer(id), "binds to port", local.port().into(), 0);
        Ok(id)
    }

    /// An address that nobody has, or everybody who has it shares.
    fn free_address(&mut self, wanted: SocketAddr, shared: bool) -> Result<SocketAddr, i32> {
        let has = |world: &Self, addr: SocketAddr, shared: bool| {
            world.datagrams.values().any(|socket| socket.local == addr && !(shared && socket.shared))
        };
        if wanted.port() != 0 {
            return if has(self, wanted, shared) { Err(errno::EADDRINUSE) } else { Ok(wanted) };
        }
        // As many as there are.
        for _ in 0..28_000 {
            let found = SocketAddr::new(wanted.ip(), self.ephemeral(wanted).port());
            if !has(self, found, false) {
                return Ok(found);
            }
        }
        Err(errno::EADDRINUSE)
    }

    fn add_datagram_sock(&mut self, local: SocketAddr, owner: Owner, room: u32) -> u64 {
        let id = self.fresh();
        let socket = DatagramSock {
            local,
            peer: None,
            owner,
            shared: false,
            broadcast: false,
            room: room as usize,
            taken: 0,
            waiting: VecDeque::new(),
            error: None,
            stalled_until: Time::ZERO,
            arrivals: BTreeMap::new(),
        };
        self.datagrams.insert(id, socket);
        id
    }

    pub(crate) fn close_datagram_sock(&mut self, id: u64) -> bool {
        self.datagrams.remove(&id).is_some()
    }

    pub(crate) fn datagram_addresses(&self, id: u64) -> Option<Addresses> {
        let socket = self.datagrams.get(&id)?;
        Some(Addresses { local: Address::Inet(socket.local), peer: socket.peer.map(Address::Inet) })
    }

    /// Whether a receive would come to something; `None` when that is no datagram socket.
    pub(crate) fn is_datagram_readable(&self, sock: Sock) -> Option<bool> {
        self.datagrams.get(&sock.conn).map(DatagramSock::is_readable)
    }

    pub(crate) fn set_datagram_reader(&mut self, sock: Sock, op: Option<(usize, u64)>) {
        if let Some(Owner::Ring { reader }) =
            self.datagrams.get_mut(&sock.conn).map(|socket| &mut socket.owner)
        {
            *reader = op;
        }
    }

    pub(crate) fn stall_datagrams(&mut self, id: u64, until: Time) {
        if let Some(socket) = self.datagrams.get_mut(&id) {
            socket.stalled_until = socket.stalled_until.max(until);
        }
    }

    pub(crate) fn calm_datagrams(&mut self) {
        for socket in self.datagrams.values_mut() {
            socket.stalled_until = Time::ZERO;
        }
    }
}

fn not_simulated() -> io::Error {
    let text = "Unix datagram sockets are not simulated: use UDP in a simulated world";
    io::Error::new(io::ErrorKind::Unsupported, text)
}

/// Whether a socket can send to an address at all.
fn check_target(local: SocketAddr, to: SocketAddr, broadcast: bool) -> Result<(), i32> {
    match (local, to) {
        (SocketAddr::V4(_), SocketAddr::V6(_)) => Err(errno::EAFNOSUPPORT),
        (SocketAddr::V6(_), SocketAddr::V4(_)) => Err(errno::ENETUNREACH),
        (_, to) if to.port() == 0 => Err(errno::EINVAL),
        (_, SocketAddr::V4(to)) if to.ip().is_broadcast() && !broadcast => Err(errno::EACCES),
        _ => Ok(()),
    }
}

// ---- sending

impl World {
    /// Lets a worker's send go on: always to its end.
    pub(crate) fn run_send_datagram(&mut self, ring: usize, op: u64) {
        let Some(this) = self.rings[ring].ops.get_mut(&op) else { return };
        let Kind::SendDatagram { key, sock, token, datagram } = &mut this.kind else { return };
        let (key, sock, token) = (*key, *sock, *token);
        let Some(datagram) = datagram.take() else { return };
        let result = self.send_of_worker(ring, sock.conn, &datagram);
        drop(datagram);
        self.end_op(ring, op, Cqe::DatagramSent { key, token, result });
    }

    fn send_of_worker(&mut self, ring: usize, id: u64, datagram: &Datagram) -> Result<usize, i32> {
        let to = datagram.to.as_ref().map(inet).transpose()?;
        let place = Place::conn(ring, id);
        let probability = self.settings.faults.datagram_error;
        let any = [Shortage::Buffers, Shortage::Memory];
        if let Some(shortage) = self.strikes_short_of(Strike::DatagramError, place, probability, &any) {
            return Err(shortage.errno());
        }
        self.send_bytes(Some(ring), id, to, datagram.payload.as_slice(), datagram.segment)
    }

    /// A foreign program sends.
    pub(crate) fn datagram_peer_sends(
        &mut self,
        id: u64,
        to: SocketAddr,
        bytes: &[u8],
    ) -> Result<usize, i32> {
        self.note(Actor::Peer(id), "sends to port", to.port().into(), bytes.len() as u64);
        self.trace.note_content(bytes);
        self.send_bytes(None, id, Some(to), bytes, None)
    }

    fn send_bytes(
        &mut self,
        ring: Option<usize>,
        id: u64,
        to: Option<SocketAddr>,
        bytes: &[u8],
        segment: Option<u16>,
    ) -> Result<usize, i32> {
        let socket = self.datagrams.get_mut(&id).ok_or(errno::ECANCELED)?;
        if let Some(error) = socket.error.take() {
            return Err(error);
        }
        let from = socket.local;
        let to = to.or(socket.peer).ok_or(errno::EDESTADDRREQ)?;
        check_target(from, to, socket.broadcast)?;
        // What is left of 65,535 behind the headers.
        let most = if from.is_ipv4() { 65_507 } else { 65_527 };
        if bytes.len() > most {
            return Err(errno::EMSGSIZE);
        }
        let size = segment.map(usize::from).filter(|size| *size > 0 && *size < bytes.len());
        let size = size.unwrap_or(bytes.len().max(1));
        if bytes.len().div_ceil(size) > MOST_SEGMENTS {
            return Err(errno::EINVAL);
        }
        if bytes.is_empty() {
            self.transmit_datagram(ring, id, from, to, bytes);
        }
        for part in bytes.chunks(size) {
            self.transmit_datagram(ring, id, from, to, part);
        }
        Ok(bytes.len())
    }

    fn transmit_datagram(
        &mut self,
        ring: Option<usize>,
        sender: u64,
        from: SocketAddr,
        to: SocketAddr,
        bytes: &[u8],
    ) {
        let place = Place { ring, conn: Some(sender) };
        let faults = &self.settings.faults;
        let (loss, duplicate) = (faults.datagram_loss, faults.datagram_duplicate);
        let (reorder, by) = (faults.datagram_reorder, faults.datagram_reorder_by);
        if self.strikes(Strike::DatagramLoss, place, loss) {
            return;
        }
        let twice = self.strikes(Strike::DatagramDuplicate, place, duplicate);
        let mut late = self.strikes_for(Strike::DatagramReorder, place, reorder, by);
        for _ in 0..=u8::from(twice) {
            let mut at = self.now + self.latency_between(from.ip(), to.ip());
            match (late.take(), self.datagrams.get_mut(&sender)) {
                // Those behind it do not wait for it.
                (Some(by), _) => at += by,
                (None, Some(socket)) => {
                    if socket.arrivals.len() >= ARRIVALS_KEPT {
                        let now = self.now;
                        socket.arrivals.retain(|_, last| *last > now);
                    }
                    let last = socket.arrivals.entry(to).or_insert(at);
                    at = at.max(*last);
                    *last = at;
                }
                (None, None) => {}
            }
            let packet = Packet { sender, from, to, bytes: Some(bytes.to_vec()) };
            self.schedule(at, Action::Datagram(Box::new(packet)));
        }
    }
}

// ---- arriving

impl World {
    pub(crate) fn datagram_arrives(&mut self, packet: Packet) {
        let Packet { sender, from, to, bytes } = packet;
        let Some(bytes) = bytes else { return self.unreachable_arrives(sender, from, to) };
        if self.net.is_cut(from, to) || self.is_stalled(sender) {
            return self.note(Actor::Net, "datagram does not get through from", sender, 0);
        }
        let Some(id) = self.receiver_of(from, to) else {
            self.note(Actor::Net, "datagram finds nobody at port", to.port().into(), 0);
            let at = self.now + self.latency_between(from.ip(), to.ip());
            let answer = Packet { sender, from: to, to: from, bytes: None };
            return self.schedule(at, Action::Datagram(Box::new(answer)));
        };
        let (stall, stall_for) = (self.settings.faults.stall, self.settings.faults.stall_for);
        if let Some(time) = self.strikes_for(Strike::Stall, Place::wire(id), stall, stall_for) {
            self.stall(id, time);
        }
        if self.is_stalled(id) {
            return self.note(Actor::Net, "datagram does not get through to", id, 0);
        }
        let Some(socket) = self.datagrams.get_mut(&id) else { return };
        let len = bytes.len() as u64;
        match &mut socket.owner {
            Owner::Peer(received) => {
                self.trace.note_content(&bytes);
                received.push((from, bytes));
                self.note(Actor::Peer(id), "received from port", from.port().into(), len);
            }
            // As Linux: the first one always fits.
            Owner::Ring { .. } if socket.taken > socket.room => {
                self.note(Actor::Net, "datagram finds no room in", id, len);
            }
            Owner::Ring { reader } => {
                let reader = *reader;
                socket.taken += bytes.len() + OVERHEAD;
                socket.waiting.push_back((from, bytes));
                if let Some((ring, op)) = reader {
                    self.wake_op(ring, op);
                }
            }
        }
    }

    /// A socket learns that nobody has the address of its peer.
    fn unreachable_arrives(&mut self, sender: u64, from: SocketAddr, to: SocketAddr) {
        if self.net.is_cut(from, to) || self.is_stalled(sender) {
            return;
        }
        let Some(socket) = self.datagrams.get_mut(&sender).filter(|socket| socket.peer == Some(from)) else {
            return;
        };
        socket.error = Some(errno::ECONNREFUSED);
        if let Owner::Ring { reader: Some((ring, op)) } = socket.owner {
            self.wake_op(ring, op);
        }
    }

    fn is_stalled(&self, id: u64) -> bool {
        self.datagrams.get(&id).is_some_and(|socket| self.now < socket.stalled_until)
    }

    /// Who gets what is sent to an address: whoever is connected to the sender before others; of several
    /// always the same for one sender.
    fn receiver_of(&self, from: SocketAddr, to: SocketAddr) -> Option<u64> {
        let of = |peer: Option<SocketAddr>| {
            let found = self.datagrams.iter().filter(move |(_, s)| s.local == to && s.peer == peer);
            found.map(|(id, _)| *id)
        };
        let ip = match from.ip() {
            IpAddr::V4(ip) => u64::from(ip.to_bits()),
            IpAddr::V6(ip) => (ip.to_bits() as u64) ^ (ip.to_bits() >> 64) as u64,
        };
        let pick = |group: Vec<u64>| {
            let index = mix((ip << 16) ^ u64::from(from.port())) % (group.len() as u64).max(1);
            group.get(index as usize).copied()
        };
        pick(of(Some(from)).collect()).or_else(|| pick(of(None).collect()))
    }

    /// What one attempt to receive comes to. A datagram is taken whole: what does not fit into the buffer is lost.
    pub(super) fn datagram_piece(&mut self, ring: usize, sock: Sock) -> Piece {
        let pool = self.rings[ring].memory.pool.clone();
        let no_buffer = self.settings.faults.no_buffer;
        if pool.available() == 0 || self.strikes(Strike::NoBuffer, Place::conn(ring, sock.conn), no_buffer) {
            return Piece::End(End::NoBuffer);
        }
        let Some(socket) = self.datagrams.get_mut(&sock.conn) else { return Piece::Nothing };
        if let Some(error) = socket.error.take() {
            return Piece::End(End::Error(error));
        }
        let Some((from, bytes)) = socket.waiting.pop_front() else { return Piece::Nothing };
        socket.taken -= bytes.len() + OVERHEAD;
        let buf = pool.lease_with(|room| {
            // `open_datagram` refused smaller buffers.
            let Some((prelude, payload)) = room.split_first_chunk_mut::<PRELUDE>() else { return 0 };
            let fits = bytes.len().min(payload.len());
            payload[..fits].copy_from_slice(&bytes[..fits]);
            Received::write_prelude(prelude, from, fits, fits < bytes.len());
            PRELUDE + fits
        });
        buf.map_or(Piece::End(End::NoBuffer), Piece::Data)
    }

    // ---- what a test asks a foreign program

    pub(crate) fn datagram_peer_received(&mut self, id: u64) -> &mut Vec<(SocketAddr, Vec<u8>)> {
        match self.datagrams.get_mut(&id).map(|socket| &mut socket.owner) {
            Some(Owner::Peer(received)) => received,
            _ => panic!("a peer's socket lives as long as its handle"),
        }
    }

    /// Operations that send datagrams of a connection.
    pub(crate) fn datagram_ops(&self, ring: usize, key: Key) -> Vec<u64> {
        let sends = |kind: &Kind| matches!(kind, Kind::SendDatagram { key: of, .. } if *of == key);
        self.rings[ring].ops.iter().filter(|(_, op)| sends(&op.kind)).map(|(id, _)| *id).collect()
    }
}
