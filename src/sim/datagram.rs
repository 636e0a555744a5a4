//! Foreign programs with a datagram socket, played by the test.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use crate::driver::sim::{Fault, Shared, When};

use super::Sim;

/// A foreign program with one UDP socket, made by [`Sim::datagram`].
///
/// It takes everything that arrives at once, so it loses nothing for want of room. Dropping it closes its
/// socket: what comes later finds nobody, which a connected sender is told (`ConnectionRefused`).
#[must_use = "dropping a peer closes its socket"]
pub struct DatagramPeer {
    world: Shared,
    id: u64,
    addr: SocketAddr,
}

impl Sim {
    /// A foreign program whose UDP socket is bound to `addr`; port 0 is any that is free.
    ///
    /// ```
    /// use std::time::Duration;
    /// use corelane::WorkerConfig;
    /// use corelane::net::UdpSocket;
    /// use corelane::sim::{Sim, SimConfig};
    ///
    /// let sim = Sim::new(SimConfig::seeded(1));
    /// let worker = sim.tasks(WorkerConfig::default(), &[], || async {
    ///     let mut socket = UdpSocket::bind("10.0.0.1:7").await?;
    ///     loop {
    ///         let question = socket.recv_from().await?;
    ///         socket.send_to(question.bytes, question.from).await?;
    ///     }
    ///     #[allow(unreachable_code)]
    ///     std::io::Result::Ok(())
    /// })?;
    /// let client = sim.datagram("10.0.0.2:0".parse()?);
    /// sim.run_for(Duration::from_millis(1));
    /// let server = "10.0.0.1:7".parse()?;
    /// client.send_to(b"hello", server);
    /// sim.run_until(Duration::from_secs(1), || !client.received().is_empty())?;
    /// assert_eq!(client.take_received(), [(server, b"hello".to_vec())]);
    /// # drop(worker);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Panics
    /// When a socket has that address.
    pub fn datagram(&self, addr: SocketAddr) -> DatagramPeer {
        let mut world = self.0.world.borrow_mut();
        let opened = world.open_datagram_peer(addr);
        let id = opened.unwrap_or_else(|_| panic!("{addr} is in use by another datagram socket"));
        let addr = world.datagrams[&id].local;
        drop(world);
        DatagramPeer { world: self.0.world.clone(), id, addr }
    }
}

impl DatagramPeer {
    /// Where its socket is bound.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Sends a datagram; it arrives, if it does, while the simulation runs.
    ///
    /// # Panics
    /// When that cannot be sent: more than 65,507 bytes (65,527 with IPv6), an address of the other family, or
    /// port 0.
    pub fn send_to(&self, bytes: &[u8], to: SocketAddr) {
        let sent = self.world.borrow_mut().datagram_peer_sends(self.id, to, bytes);
        if let Err(error) = sent {
            panic!("{} bytes to {to}: {}", bytes.len(), std::io::Error::from_raw_os_error(error));
        }
    }

    /// What it received, with the senders' addresses, and was not yet [taken](Self::take_received).
    pub fn received(&self) -> Vec<(SocketAddr, Vec<u8>)> {
        self.world.borrow_mut().datagram_peer_received(self.id).clone()
    }

    /// Takes out what it received.
    pub fn take_received(&self) -> Vec<(SocketAddr, Vec<u8>)> {
        std::mem::take(self.world.borrow_mut().datagram_peer_received(self.id))
    }

    /// Lets nothing from or to its socket pass for some time.
    pub fn stall(&self, time: Duration) {
        self.world.borrow_mut().strike_now(Fault::Stall { time }, None, Some(self.id));
    }
}

impl When {
    /// Only of this peer's socket: what it sends, for faults of sending; what comes to it, for a
    /// [`Fault::Stall`].
    pub fn datagram_peer(self, peer: &DatagramPeer) -> Self {
        Self { conn: Some(peer.id), ..self }
    }
}

impl Drop for DatagramPeer {
    fn drop(&mut self) {
        // A world that is borrowed now is being unwound through: there is nobody left to tell.
        if let Ok(mut world) = self.world.try_borrow_mut() {
            world.close_datagram_sock(self.id);
        }
    }
}

impl fmt::Debug for DatagramPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DatagramPeer({}, {})", self.id, self.addr)
    }
}
