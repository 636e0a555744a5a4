//! What every driver of a real kernel promises of datagram sockets: scenarios over any of them, which the tests
//! beside each driver run. The counterpart is std's sockets wherever that is possible.
//!
//! `receive.rs`: what arrives. `send.rs`: what goes. `unix.rs`: names, and receivers whose queue is full.

mod receive;
mod send;
mod unix;

pub(in crate::driver) use receive::*;
pub(in crate::driver) use send::*;
pub(in crate::driver) use unix::*;

use std::collections::VecDeque;
use std::net::{SocketAddr, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixDatagram};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::buffer::{BufferConfig, Payload};

use crate::driver::{
    Address, CloseHow, DATAGRAM_SENDS, Datagram, DatagramConfig, Driver, Event, Key, PRELUDE, Received,
    RecvEnd,
};

const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of a datagram that fit into one of the [`buffers`].
const ROOM: usize = 1024 - PRELUDE;

/// Few buffers, so that none can be lost unnoticed.
pub(in crate::driver) fn buffers() -> BufferConfig {
    BufferConfig { size: 1024, count: 8, send_count: 0, guard: false }
}

fn key(slot: u32, generation: u32) -> Key {
    Key { slot, generation }
}

fn local(address: Address) -> DatagramConfig {
    DatagramConfig {
        local: Some(address),
        peer: None,
        reuse_port: false,
        broadcast: false,
        gro: false,
        recv_buffer: None,
        send_buffer: None,
    }
}

fn v4() -> DatagramConfig {
    local(Address::Inet(SocketAddr::from(([127, 0, 0, 1], 0))))
}

/// A name that no other test uses.
fn name() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("corelane-datagram-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// A path that no other test uses; the file goes with it.
struct Path(PathBuf);

impl Path {
    fn new() -> Self {
        Self(std::env::temp_dir().join(name()))
    }

    fn address(&self) -> UnixAddr {
        UnixAddr::from_pathname(&self.0).expect("a short path")
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        // Not there if the test ended before it was bound.
        let _ = std::fs::remove_file(&self.0);
    }
}

fn udp() -> (UdpSocket, SocketAddr) {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let address = socket.local_addr().expect("its address");
    (socket, address)
}

fn unix_peer() -> (UnixDatagram, UnixAddr) {
    let address = UnixAddr::from_abstract_name(name()).expect("a name");
    let socket = UnixDatagram::bind_addr(&address).expect("a socket");
    socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    (socket, address)
}

/// A driver, and what it has reported that nobody asked for yet.
pub(in crate::driver) struct Bed<D: Driver> {
    pub(in crate::driver) driver: D,
    events: VecDeque<Event>,
    armed: [bool; 16],
}

impl<D: Driver> Bed<D> {
    pub(in crate::driver) fn new(driver: D) -> Self {
        Self { driver, events: VecDeque::new(), armed: [false; 16] }
    }

    /// The next event that `wanted` takes; others wait for their turn.
    fn wait<T>(&mut self, what: &str, mut wanted: impl FnMut(Event) -> Result<T, Event>) -> T {
        let until = Instant::now() + PATIENCE;
        for _ in 0..self.events.len() {
            let Some(event) = self.events.pop_front() else { break };
            match wanted(event) {
                Ok(found) => {
                    return found;
                }
                Err(event) => self.events.push_back(event),
            }
        }
        loop {
            while let Some(event) = self.driver.next_event() {
                match wanted(event) {
                    Ok(found) => return found,
                    Err(event) => self.events.push_back(event),
                }
            }
            assert!(Instant::now() < until, "waited in vain for {what}; there are {:?}", self.events);
            self.driver.submit_and_wait(Some(Duration::from_millis(100))).expect("a wait");
        }
    }

    fn turn(&mut self) {
        self.driver.submit_and_wait(Some(Duration::ZERO)).expect("a wait");
        while let Some(event) = self.driver.next_event() {
            self.events.push_back(event);
        }
    }

    /// Nothing may be reported in a while.
    fn quiet(&mut self) {
        for _ in 0..3 {
            self.driver.submit_and_wait(Some(Duration::from_millis(5))).expect("a wait");
            self.events.extend(self.driver.next_event());
            assert!(self.events.is_empty(), "{:?}", self.events);
        }
    }

    fn open(&mut self, key: Key, config: &DatagramConfig) -> Key {
        self.driver.open_datagram(key, config).expect("a socket");
        self.armed[key.slot as usize] = false;
        key
    }

    fn send(&mut self, key: Key, token: u32, bytes: impl Into<Payload>, to: Option<Address>) {
        let datagram = Datagram { payload: bytes.into(), to, segment: None };
        self.driver.send_datagram(key, token, datagram);
    }

    fn sent(&mut self, wanted: Key) -> (u32, std::io::Result<usize>) {
        self.wait("a datagram sent", |event| match event {
            Event::DatagramSent { key, token, result } if key == wanted => Ok((token, result)),
            other => Err(other),
        })
    }

    /// Sends one datagram, and waits until it is sent.
    fn send_now(&mut self, key: Key, bytes: &[u8], to: Option<Address>) {
        self.send(key, 7, bytes.to_vec(), to);
        let (token, result) = self.sent(key);
        assert_eq!((token, result.expect("sent")), (7, bytes.len()));
    }

    fn arm(&mut self, key: Key) {
        if !std::mem::replace(&mut self.armed[key.slot as usize], true) {
            self.driver.recv(key);
        }
    }

    /// The next datagram, or why there is none; arms when need be.
    fn try_received(&mut self, wanted: Key) -> Result<Received, RecvEnd> {
        loop {
            self.arm(wanted);
            let outcome = self.wait("a datagram", |event| match event {
                Event::Received { key, buf, armed } if key == wanted => Ok((Ok(buf), armed)),
                Event::RecvEnded { key, end } if key == wanted => Ok((Err(end), false)),
                other => Err(other),
            });
            self.armed[wanted.slot as usize] = outcome.1;
            match outcome.0 {
                Ok(buf) => return Ok(Received::parse(buf).expect("a whole prelude")),
                Err(RecvEnd::Stopped) => {}
                Err(end) => return Err(end),
            }
        }
    }

    fn received(&mut self, key: Key) -> Received {
        self.try_received(key).expect("a datagram")
    }

    /// As [`received`](Self::received), where the one buffer that is free may be taken by the datagram before.
    fn received_at_last(&mut self, key: Key) -> Received {
        let until = Instant::now() + PATIENCE;
        loop {
            match self.try_received(key) {
                Ok(received) => return received,
                Err(RecvEnd::NoBuffer) => assert!(Instant::now() < until, "no buffer for ever"),
                Err(end) => panic!("{end:?}"),
            }
        }
    }

    fn close(&mut self, wanted: Key) {
        self.driver.close(wanted, CloseHow::Fin);
        self.events.retain(|event| {
            !matches!(event, Event::Received { key, .. } | Event::RecvEnded { key, .. }
            | Event::DatagramSent { key, .. } if *key == wanted)
        });
        self.wait("the close", |event| match event {
            Event::Closed { key } if key == wanted => Ok(()),
            Event::Received { key, .. } | Event::RecvEnded { key, .. } | Event::DatagramSent { key, .. }
                if key == wanted =>
            {
                panic!("reported after close: {event:?}")
            }
            other => Err(other),
        });
        self.armed[wanted.slot as usize] = false;
    }

    /// Where a socket is bound: it tells somebody, who looks at the sender.
    fn address(&mut self, key: Key) -> SocketAddr {
        let (witness, address) = udp();
        self.send_now(key, b"where am I", Some(Address::Inet(address)));
        persist(|| witness.recv_from(&mut [0; 20])).expect("a datagram").1
    }

    /// Ends the driver: nothing may be left anywhere.
    pub(in crate::driver) fn end(mut self) {
        assert!(self.events.is_empty(), "nobody wanted {:?}", self.events);
        self.quiet();
        self.end_in_flight();
    }

    fn end_in_flight(self) {
        let memory = self.driver.memory().clone();
        drop(self.events);
        assert_eq!(self.driver.finish(PATIENCE), 0, "operations left in the kernel");
        assert_eq!(memory.pool.leased(), 0, "buffers out");
        assert!(memory.pool.is_balanced(), "buffers lost");
    }
}

fn inet(received: &Received) -> SocketAddr {
    match &received.from {
        Some(Address::Inet(address)) => *address,
        other => panic!("{other:?}"),
    }
}

/// Receives with std's sockets. (A ring whose completions interrupt its thread ends a receive that has a time limit.)
fn persist<T>(mut receive: impl FnMut() -> std::io::Result<T>) -> std::io::Result<T> {
    loop {
        match receive() {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}
