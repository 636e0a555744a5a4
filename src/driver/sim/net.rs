//! Who reaches whom, how fast, and what becomes of packets that do not get through.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::errno;
use super::script::{Place, Strike};
use super::tcp::{Packet, RETRANSMIT, Sock, State};
use super::trace::Actor;
use super::world::{Action, World};
use crate::clock::Time;

/// How far apart two repetitions of a packet get at most: Linux's `TCP_RTO_MAX`.
const RETRANSMIT_LAST: Duration = Duration::from_secs(120);

/// How long data is repeated without an answer until the connection is given up: what Linux makes
/// of `tcp_retries2` = 15.
const GIVE_UP: Duration = Duration::from_millis(924_600);

/// How long a handshake is repeated: six SYNs, the last one waited for (`tcp_syn_retries`).
const GIVE_UP_HANDSHAKE: Duration = Duration::from_secs(127);

/// How long a server repeats its answer to a client whose last packet of the handshake it could not
/// take because its queue was full (`tcp_synack_retries` = 5).
const GIVE_UP_FULL: Duration = Duration::from_secs(63);

/// The network between hosts. Empty sets and maps, the usual case, cost nothing per packet.
#[derive(Debug, Default)]
pub(crate) struct Net {
    /// Addresses that nothing reaches and that reach nothing.
    cut: BTreeSet<SocketAddr>,
    /// From whom to whom nothing passes.
    cut_pairs: BTreeSet<(IpAddr, IpAddr)>,
    /// Latencies that differ from the usual one, by the smaller and the larger address.
    links: BTreeMap<(IpAddr, IpAddr), (Duration, Duration)>,
}

impl Net {
    /// True when that is news.
    pub(crate) fn set_reachable(&mut self, addr: SocketAddr, reachable: bool) -> bool {
        if reachable { self.cut.remove(&addr) } else { self.cut.insert(addr) }
    }

    pub(crate) fn cut_one_way(&mut self, from: IpAddr, to: IpAddr) {
        self.cut_pairs.insert((from, to));
    }

    pub(crate) fn cut_between(&mut self, a: IpAddr, b: IpAddr) {
        self.cut_pairs.extend([(a, b), (b, a)]);
    }

    pub(crate) fn heal_between(&mut self, a: IpAddr, b: IpAddr) {
        self.cut_pairs.remove(&(a, b));
        self.cut_pairs.remove(&(b, a));
    }

    pub(crate) fn heal_all(&mut self) {
        self.cut.clear();
        self.cut_pairs.clear();
    }

    pub(crate) fn set_latency(&mut self, a: IpAddr, b: IpAddr, latency: (Duration, Duration)) {
        self.links.insert((a.min(b), a.max(b)), latency);
    }

    fn latency(&self, a: IpAddr, b: IpAddr) -> Option<(Duration, Duration)> {
        if self.links.is_empty() {
            return None;
        }
        self.links.get(&(a.min(b), a.max(b))).copied()
    }

    pub(crate) fn is_cut(&self, from: SocketAddr, to: SocketAddr) -> bool {
        let one = !self.cut.is_empty() && (self.cut.contains(&from) || self.cut.contains(&to));
        one || (!self.cut_pairs.is_empty() && self.cut_pairs.contains(&(from.ip(), to.ip())))
    }
}

impl World {
    pub(crate) fn set_reachable(&mut self, addr: SocketAddr, reachable: bool) {
        if self.net.set_reachable(addr, reachable) {
            let what = if reachable { "healed port" } else { "partitioned port" };
            self.note(Actor::Net, what, addr.port().into(), 0);
        }
    }

    /// Whether the network carries packets of a connection from `side` to the other one, now.
    pub(crate) fn is_cut(&self, conn: u64, side: usize) -> bool {
        let Some(conn) = self.conns.get(&conn) else { return false };
        self.now < conn.stalled_until || self.net.is_cut(conn.ends[side].addr, conn.ends[1 - side].addr)
    }

    /// How long a packet of a connection takes.
    pub(crate) fn latency(&mut self, conn: u64) -> Duration {
        let ends = self.conns.get(&conn).map(|conn| (conn.ends[0].addr.ip(), conn.ends[1].addr.ip()));
        let own = ends.and_then(|(a, b)| self.net.latency(a, b));
        self.travel_time(own)
    }

    /// How long a datagram from one host to another takes.
    pub(crate) fn latency_between(&mut self, from: IpAddr, to: IpAddr) -> Duration {
        let own = self.net.latency(from, to);
        self.travel_time(own)
    }

    fn travel_time(&mut self, own: Option<(Duration, Duration)>) -> Duration {
        let (least, most) = own.unwrap_or(self.settings.latency);
        let nanos = self.rng.between(least.as_nanos() as u64, most.as_nanos() as u64);
        // One packet in sixteen met a queue somewhere.
        let nanos = if self.rng.one_in(16) { nanos * 3 } else { nanos };
        Duration::from_nanos(nanos)
    }

    /// The first packet on its way to this end does not get through: it is repeated after twice the
    /// time as before, and given up when that has gone on for too long.
    pub(crate) fn hold_back(&mut self, to: Sock) {
        let from = to.other();
        let now = self.now;
        let Some(conn) = self.conns.get_mut(&to.conn) else { return };
        let pipe = &mut conn.pipes[from.side];
        if now < pipe.retry_at {
            // One of those behind it: they wait together, so their order stays.
            let at = pipe.retry_at;
            self.schedule(at, Action::Deliver { to });
            return;
        }
        let (first, patience) = match pipe.wire.front() {
            Some(Packet::SynAck) => (Duration::from_secs(1), GIVE_UP_HANDSHAKE),
            Some(Packet::Ack) => (Duration::from_secs(1), GIVE_UP_FULL),
            _ => (RETRANSMIT, GIVE_UP),
        };
        let since = *pipe.blocked_since.get_or_insert(now);
        if now.since(since) >= patience {
            self.give_up(from);
            return;
        }
        pipe.rto = if pipe.rto.is_zero() { first } else { (pipe.rto * 2).min(RETRANSMIT_LAST) };
        pipe.retry_at = now + pipe.rto;
        let at = pipe.retry_at;
        self.schedule(at, Action::Deliver { to });
    }

    /// Nobody answered for too long.
    fn give_up(&mut self, from: Sock) {
        let Some(conn) = self.conns.get_mut(&from.conn) else { return };
        match conn.pipes[from.side].wire.front() {
            // The server forgets a client that does not answer; the client, which hears nothing, gives
            // up at the same time.
            Some(Packet::SynAck) => {
                conn.pipes[from.side].wire.clear();
                self.forget_half_open(from);
                self.die(from.other(), errno::ETIMEDOUT);
            }
            // The server forgets a client for which it had no room; the client believes that it is
            // connected, until what it sends is answered by a reset.
            Some(Packet::Ack) => {
                conn.pipes[from.side].wire.pop_front();
                self.forget_half_open(from.other());
            }
            _ => {
                conn.pipes[from.side].wire.clear();
                self.die(from, errno::ETIMEDOUT);
            }
        }
        let pipe = self.conns.get_mut(&from.conn).map(|conn| &mut conn.pipes[from.side]);
        if let Some(pipe) = pipe {
            (pipe.retry_at, pipe.rto, pipe.blocked_since) = (Time::ZERO, Duration::ZERO, None);
        }
        self.forget(from.conn);
    }

    /// Whether the last packet of a handshake finds the listener's queue full: it is ignored then,
    /// and the client believes that it is connected.
    pub(crate) fn is_turned_away(&self, server: Sock) -> bool {
        let Some(conn) = self.conns.get(&server.conn) else { return false };
        conn.ends[1].state == State::Connecting
            && conn.listener.is_some_and(|id| self.listeners.contains_key(&id) && !self.has_room(id))
    }

    /// Nothing of a connection, or of a datagram socket, passes for some time.
    pub(crate) fn stall(&mut self, conn_or_socket: u64, time: Duration) {
        let until = self.now + time;
        if let Some(conn) = self.conns.get_mut(&conn_or_socket) {
            conn.stalled_until = conn.stalled_until.max(until);
        }
        self.stall_datagrams(conn_or_socket, until);
    }

    /// Ends whose other end is gone, or is to be reset, with the news lost on the way, learn of it, as
    /// keepalive would tell them some time: otherwise who only waits for an answer would wait for ever.
    pub(crate) fn tell_half_open(&mut self) {
        let mut gone = Vec::new();
        for (id, conn) in &self.conns {
            for side in [0, 1] {
                let dead = conn.ends[side].state == State::Dead;
                if (dead || conn.reset_lost) && conn.ends[1 - side].state == State::Open {
                    gone.push(Sock { conn: *id, side });
                }
            }
        }
        for sock in gone {
            self.transmit(sock, Packet::Rst);
        }
    }

    pub(crate) fn reset_from_the_middle(&mut self, conn: u64) {
        for side in [0, 1] {
            self.transmit(Sock { conn, side }, Packet::Rst);
        }
    }

    /// An end gives the connection up: `end`, or whichever a worker has.
    pub(crate) fn time_out(&mut self, conn: u64, end: Option<Sock>) {
        use super::tcp::Owner;
        let Some(found) = self.conns.get(&conn) else { return };
        for side in [0, 1] {
            let sock = Sock { conn, side };
            let meant = end.map_or(!matches!(found.ends[side].owner, Owner::Peer(_)), |end| end == sock);
            if meant && found.ends[side].state == State::Open {
                self.die(sock, errno::ETIMEDOUT);
                return;
            }
        }
    }

    /// What may happen with a segment that arrives; true when it is not to be delivered after all.
    pub(crate) fn segment_meets_fault(&mut self, to: Sock) -> bool {
        let place = Place::wire(to.conn);
        let faults = &self.settings.faults;
        let (stall, stall_for) = (faults.stall, faults.stall_for);
        let (timed_out, reset) = (faults.timed_out, faults.reset);
        if self.strikes(Strike::TimedOut, place, timed_out) {
            self.time_out(to.conn, Some(to));
        }
        if self.strikes(Strike::Reset, place, reset) {
            self.reset_from_the_middle(to.conn);
        }
        if let Some(time) = self.strikes_for(Strike::Stall, place, stall, stall_for) {
            self.stall(to.conn, time);
            return self.is_cut(to.conn, to.other().side);
        }
        false
    }
}
