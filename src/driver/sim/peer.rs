//! Scripted peers: foreign programs, each with one socket, that do what the test tells them.

use std::collections::VecDeque;
use std::net::SocketAddr;

use super::tcp::{Io, Owner, Sock, take_front};
use super::trace::Actor;
use super::world::{Action, World};

/// Most bytes that a peer takes in one read.
const READ_SIZE: usize = 64 << 10;

/// What a peer does when everything it was told to send is with its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Finish {
    Shutdown,
    Close,
}

/// How far a peer's connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerPhase {
    Connecting,
    Connected,
    /// Not established: refused, or not answered for two minutes.
    Refused,
}

#[derive(Debug)]
pub(crate) struct PeerState {
    pub(crate) sock: Sock,
    pub(crate) addr: SocketAddr,
    pub(crate) phase: PeerPhase,
    /// Told to send, not yet with the kernel.
    pub(crate) outgoing: VecDeque<u8>,
    finish: Option<Finish>,
    pub(crate) received: Vec<u8>,
    pub(crate) total: u64,
    reading: bool,
    /// Bytes that it will still read.
    allowance: Option<u64>,
    /// A look at what arrived is on the agenda.
    scheduled: bool,
    pub(crate) eof: bool,
    pub(crate) reset: bool,
    pub(crate) closed: bool,
    /// Nobody holds its handle.
    dropped: bool,
}

impl World {
    fn add_peer(&mut self, sock: Sock, addr: SocketAddr, phase: PeerPhase) -> u64 {
        let id = self.fresh();
        self.peers.insert(
            id,
            PeerState {
                sock,
                addr,
                phase,
                outgoing: VecDeque::new(),
                finish: None,
                received: Vec::new(),
                total: 0,
                reading: true,
                allowance: None,
                scheduled: false,
                eof: false,
                reset: false,
                closed: false,
                dropped: false,
            },
        );
        self.set_owner(sock, Owner::Peer(id));
        id
    }

    /// A foreign client connects to `to`, from `from` (port 0: any port) or from anywhere.
    pub(crate) fn peer_connect(&mut self, from: Option<SocketAddr>, to: SocketAddr) -> u64 {
        let free = self.ephemeral(to);
        let from = match from {
            Some(from) if from.port() != 0 => from,
            Some(from) => SocketAddr::new(from.ip(), free.port()),
            None => free,
        };
        let sock = self.open(from, to, Owner::Nobody);
        let id = self.add_peer(sock, from, PeerPhase::Connecting);
        self.note(Actor::Peer(id), "connects to port", to.port().into(), 0);
        self.send_syn(sock);
        id
    }

    /// A foreign server takes a connection from its queue.
    pub(crate) fn peer_accept(&mut self, listener: u32) -> Option<u64> {
        let sock = self.listeners.get_mut(&listener)?.queue.pop_front()?;
        let addr = self.conns.get(&sock.conn)?.ends[1 - sock.side].addr;
        let id = self.add_peer(sock, addr, PeerPhase::Connected);
        self.note(Actor::Peer(id), "accepted on", listener.into(), 0);
        self.peer_readable(id);
        Some(id)
    }

    pub(crate) fn peer_send(&mut self, id: u64, bytes: &[u8]) {
        self.note(Actor::Peer(id), "sends", 0, bytes.len() as u64);
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if peer.finish.is_none() && !peer.closed {
            peer.outgoing.extend(bytes);
            self.peer_writable(id);
        }
    }

    pub(crate) fn peer_shutdown(&mut self, id: u64) {
        self.note(Actor::Peer(id), "shuts down", 0, 0);
        let Some(peer) = self.peers.get_mut(&id) else { return };
        peer.finish.get_or_insert(Finish::Shutdown);
        self.peer_writable(id);
    }

    pub(crate) fn peer_close(&mut self, id: u64) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if peer.closed || peer.finish == Some(Finish::Close) {
            return;
        }
        peer.finish = Some(Finish::Close);
        self.note(Actor::Peer(id), "closes", 0, 0);
        self.peer_writable(id);
    }

    pub(crate) fn peer_reset(&mut self, id: u64) {
        let Some(peer) = self.peers.get_mut(&id).filter(|peer| !peer.closed) else { return };
        peer.closed = true;
        peer.outgoing.clear();
        let sock = peer.sock;
        self.note(Actor::Peer(id), "resets", 0, 0);
        self.close_sock(sock, true);
    }

    /// Lets a peer read, or not; `allowance` bounds how much.
    pub(crate) fn peer_set_reading(&mut self, id: u64, reading: bool, allowance: Option<u64>) {
        self.note(Actor::Peer(id), "reads", reading.into(), allowance.unwrap_or(0));
        let Some(peer) = self.peers.get_mut(&id) else { return };
        peer.reading = reading;
        peer.allowance = allowance;
        self.peer_readable(id);
    }

    /// The handle is gone: so is the program that held it, once its kernel has what it sent.
    pub(crate) fn peer_dropped(&mut self, id: u64) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.dropped = true;
        }
        self.peer_close(id);
        self.forget_peer(id);
    }

    fn forget_peer(&mut self, id: u64) {
        if self.peers.get(&id).is_some_and(|peer| peer.dropped && peer.closed) {
            self.peers.remove(&id);
        }
    }

    /// Something arrived: the program looks at it a moment later.
    pub(crate) fn peer_readable(&mut self, id: u64) {
        let delay = self.rng.between(0, 20_000);
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if !peer.scheduled {
            peer.scheduled = true;
            self.schedule_in(delay, Action::PeerRead { peer: id });
        }
    }

    pub(crate) fn peer_read(&mut self, id: u64) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        peer.scheduled = false;
        loop {
            let Some(peer) = self.peers.get(&id) else { return };
            let most = peer.allowance.map_or(READ_SIZE, |left| left.min(READ_SIZE as u64) as usize);
            let connected = peer.phase == PeerPhase::Connected;
            if peer.closed || !connected || !peer.reading || most == 0 {
                return;
            }
            let sock = peer.sock;
            match self.readable(sock) {
                Io::WouldBlock => return,
                Io::Ready(n) => self.peer_take(id, sock, n.min(most)),
                Io::Eof => {
                    let Some(peer) = self.peers.get_mut(&id) else { return };
                    if !peer.eof && !peer.reset {
                        peer.eof = true;
                        self.note(Actor::Peer(id), "sees the end", 0, 0);
                    }
                    return;
                }
                Io::Error(error) => {
                    self.peer_failed(id, error);
                    return;
                }
            }
        }
    }

    fn peer_take(&mut self, id: u64, sock: Sock, n: usize) {
        let mut bytes = vec![0; n];
        let n = self.read(sock, &mut bytes);
        self.note(Actor::Peer(id), "received", 0, n as u64);
        self.trace.note_content(&bytes[..n]);
        let Some(peer) = self.peers.get_mut(&id) else { return };
        peer.received.extend_from_slice(&bytes[..n]);
        peer.total += n as u64;
        if let Some(left) = &mut peer.allowance {
            *left -= n as u64;
        }
    }

    fn peer_failed(&mut self, id: u64, error: i32) {
        self.note(Actor::Peer(id), "failed", 0, error as u64);
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.reset = true;
            peer.outgoing.clear();
        }
        self.peer_writable(id);
    }

    /// Established, failed, or room to write: goes on with what the peer was told to send.
    pub(crate) fn peer_writable(&mut self, id: u64) {
        let Some(peer) = self.peers.get(&id).filter(|peer| !peer.closed) else { return };
        let sock = peer.sock;
        if peer.phase == PeerPhase::Connecting && !self.peer_connecting(id, sock) {
            return;
        }
        loop {
            let Some(peer) = self.peers.get(&id) else { return };
            if peer.outgoing.is_empty() {
                return self.peer_finish(id, sock);
            }
            match self.writable(sock) {
                Io::WouldBlock => return,
                Io::Ready(room) => {
                    let Some(peer) = self.peers.get_mut(&id) else { return };
                    let n = room.min(peer.outgoing.len());
                    let bytes = take_front(&mut peer.outgoing, n);
                    self.write(sock, &bytes);
                }
                Io::Eof => return,
                Io::Error(error) => return self.peer_failed(id, error),
            }
        }
    }

    /// Whether the connection is established.
    fn peer_connecting(&mut self, id: u64, sock: Sock) -> bool {
        let result = self.connecting(sock);
        let Some(peer) = self.peers.get_mut(&id) else { return false };
        match result {
            Io::WouldBlock => {
                // Not established: there is nothing to send off first.
                if peer.finish == Some(Finish::Close) && peer.outgoing.is_empty() {
                    peer.closed = true;
                    self.close_sock(sock, false);
                    self.forget_peer(id);
                }
                false
            }
            Io::Ready(_) | Io::Eof => {
                peer.phase = PeerPhase::Connected;
                self.note(Actor::Peer(id), "is connected", 0, 0);
                self.peer_readable(id);
                true
            }
            Io::Error(error) => {
                peer.phase = PeerPhase::Refused;
                peer.closed = true;
                peer.outgoing.clear();
                self.note(Actor::Peer(id), "is refused", 0, error as u64);
                self.close_sock(sock, false);
                self.forget_peer(id);
                false
            }
        }
    }

    fn peer_finish(&mut self, id: u64, sock: Sock) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        match peer.finish {
            None => {}
            Some(Finish::Shutdown) => self.shutdown(sock),
            Some(Finish::Close) => {
                peer.closed = true;
                self.close_sock(sock, false);
                self.forget_peer(id);
            }
        }
    }
}
