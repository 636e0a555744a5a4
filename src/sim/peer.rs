//! Foreign programs, played by the test.

use std::fmt;
use std::net::SocketAddr;

use crate::driver::sim::{PeerPhase, Shared, When};

/// A foreign program with one connection: a client made by [`Sim::connect`](super::Sim::connect),
/// or a server's end of a connection taken from a [`PeerListener`].
///
/// What it is told happens while the simulation runs, not in the call. It reads by itself, as soon
/// as something arrives, unless told not to. Dropping it is ending the program: what it was told to
/// send is handed to its kernel, then the connection is [closed](Self::close).
#[must_use = "dropping a peer closes its connection"]
pub struct Peer {
    world: Shared,
    id: u64,
}

impl Peer {
    pub(super) fn new(world: Shared, id: u64) -> Self {
        Self { world, id }
    }

    fn state<R>(&self, read: impl FnOnce(&crate::driver::sim::PeerState) -> R) -> R {
        let world = self.world.borrow();
        read(world.peers.get(&self.id).expect("a peer's state lives as long as its handle"))
    }

    /// Its connection in the world.
    pub(super) fn connection(&self) -> u64 {
        self.state(|peer| peer.sock.conn)
    }

    /// The foreign address: the client's own, or the client's that the server sees.
    pub fn addr(&self) -> SocketAddr {
        self.state(|peer| peer.addr)
    }

    /// Sends bytes, after those that it was told to send before; waits for the connection if need
    /// be. Ignored after [`shutdown`](Self::shutdown), [`close`](Self::close) and
    /// [`reset`](Self::reset).
    pub fn send(&self, bytes: &[u8]) {
        self.world.borrow_mut().peer_send(self.id, bytes);
    }

    /// Whether everything that it was told to send is with its kernel (which may still hold some).
    pub fn sent_all(&self) -> bool {
        self.state(|peer| peer.outgoing.is_empty())
    }

    /// What it received and was not yet [taken](Self::take_received).
    pub fn received(&self) -> Vec<u8> {
        self.state(|peer| peer.received.clone())
    }

    /// Bytes received since the beginning, those taken included.
    pub fn received_len(&self) -> u64 {
        self.state(|peer| peer.total)
    }

    /// Takes out what it received.
    pub fn take_received(&self) -> Vec<u8> {
        let mut world = self.world.borrow_mut();
        world.peers.get_mut(&self.id).map(|peer| std::mem::take(&mut peer.received)).unwrap_or_default()
    }

    /// Whether it reads what arrives (it does, until told otherwise), without limit.
    pub fn set_reading(&self, reading: bool) {
        self.world.borrow_mut().peer_set_reading(self.id, reading, None);
    }

    /// Reads up to that many further bytes, then no more.
    pub fn read_limit(&self, bytes: u64) {
        self.world.borrow_mut().peer_set_reading(self.id, true, Some(bytes));
    }

    /// Half-close: FIN after what it was told to send. It goes on reading.
    pub fn shutdown(&self) {
        self.world.borrow_mut().peer_shutdown(self.id);
    }

    /// Closes, as a program that calls `close(2)` when its kernel has taken everything it was told
    /// to send: if data is left unread then, the connection is reset, as Linux does.
    pub fn close(&self) {
        self.world.borrow_mut().peer_close(self.id);
    }

    /// Resets the connection at once.
    pub fn reset(&self) {
        self.world.borrow_mut().peer_reset(self.id);
    }

    /// Whether the connection was established (it may be over since).
    pub fn is_connected(&self) -> bool {
        self.state(|peer| peer.phase == PeerPhase::Connected)
    }

    /// Whether the connection could not be made: refused, or not answered for two minutes.
    pub fn is_refused(&self) -> bool {
        self.state(|peer| peer.phase == PeerPhase::Refused)
    }

    /// Whether it read to the end of what the other side sent.
    pub fn is_eof(&self) -> bool {
        self.state(|peer| peer.eof)
    }

    /// Whether it learnt that the connection was reset.
    pub fn is_reset(&self) -> bool {
        self.state(|peer| peer.reset)
    }

    /// Whether the connection is over for it: refused, closed or reset by itself, ended or reset
    /// by the other side.
    pub fn is_over(&self) -> bool {
        self.state(|peer| peer.closed || peer.eof || peer.reset)
    }
}

impl When {
    /// Only on this peer's connection.
    pub fn peer(self, peer: &Peer) -> Self {
        Self { conn: Some(peer.connection()), ..self }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // A world that is borrowed now is being unwound through: there is nobody left to tell.
        if let Ok(mut world) = self.world.try_borrow_mut() {
            world.peer_dropped(self.id);
        }
    }
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Peer({})", self.id)
    }
}

/// A foreign server: connections to its address are established by its kernel and wait to be taken.
/// Dropping it closes it; what waits is reset.
#[must_use = "dropping a listener closes it"]
pub struct PeerListener {
    world: Shared,
    id: u32,
}

impl PeerListener {
    pub(super) fn new(world: Shared, id: u32) -> Self {
        Self { world, id }
    }

    /// The connection that waited longest.
    pub fn accept(&self) -> Option<Peer> {
        let id = self.world.borrow_mut().peer_accept(self.id)?;
        Some(Peer::new(self.world.clone(), id))
    }

    /// Connections that wait.
    pub fn waiting(&self) -> usize {
        self.world.borrow().listeners.get(&self.id).map_or(0, |listener| listener.queue.len())
    }
}

impl Drop for PeerListener {
    fn drop(&mut self) {
        if let Ok(mut world) = self.world.try_borrow_mut() {
            world.unlisten(self.id);
        }
    }
}

impl fmt::Debug for PeerListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerListener({})", self.id)
    }
}
