//! The simulated kernel, met at the driver's door.

mod control;
mod datagram;
mod datagram_faults;
mod faults;
mod life;
mod receive;
mod send;
mod shapes;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::super::Driver;
use super::super::event::{AcceptMode, Event, Key, ListenerId, RecvEnd, Socket};
use super::driver::{SimDriver, SimListener};
use super::faults::Faults;
use super::ring::Shape;
use super::script::{Fault, When};
use super::world::{Settings, Shared, World};
use crate::buffer::{Buf, BufferConfig, Chain, Memory, Payload};
use crate::clock::Time;
use crate::config::{Descriptors, UringFeatures, WorkerConfig};
use crate::metrics::Counters;

const BUFFER: u32 = 256;
const BUFFERS: u32 = 8;
const SOCKET_BUFFER: u32 = 4096;

/// A world with one ring, and what that ring reported, in short.
struct Rig {
    world: Shared,
    driver: SimDriver,
    counters: Arc<Counters>,
    memory: Memory,
    /// Received bytes by slot.
    data: BTreeMap<u32, Vec<u8>>,
    log: Vec<String>,
    sockets: Vec<Socket>,
    /// Whether received buffers are kept instead of dropped.
    keep: bool,
    kept: Vec<Buf>,
    /// Whether receiving is armed again when it ends for want of buffers or without reason.
    rearm: bool,
}

fn addr(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 9, 0, 1], port))
}

fn key(slot: u32) -> Key {
    Key { slot, generation: 1 }
}

fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

impl Rig {
    fn new(seed: u64, faults: Faults) -> Self {
        Self::with_buffers(seed, faults, BUFFERS)
    }

    fn with_buffers(seed: u64, faults: Faults, count: u32) -> Self {
        let buffers = BufferConfig { size: BUFFER, count, send_count: 0, ..BufferConfig::default() };
        Self::with(seed, faults, WorkerConfig { buffers, ..WorkerConfig::default() })
    }

    /// A ring of the given shape, with small buffers.
    fn with_features(seed: u64, uring: UringFeatures) -> Self {
        let buffers = BufferConfig { size: BUFFER, count: BUFFERS, send_count: 0, ..BufferConfig::default() };
        Self::with(seed, Faults::none(), WorkerConfig { buffers, uring, ..WorkerConfig::default() })
    }

    fn with(seed: u64, faults: Faults, config: WorkerConfig) -> Self {
        let world = World::shared(Settings {
            seed,
            latency: (Duration::from_micros(20), Duration::from_micros(200)),
            socket_buffer: SOCKET_BUFFER,
            faults,
        });
        let memory = Memory::new(&config.buffers).expect("a small pool");
        let counters = Arc::new(Counters::default());
        let driver = SimDriver::new(&world, memory.clone(), counters.clone(), Shape::new(&config, None));
        Self {
            world,
            driver,
            counters,
            memory,
            data: BTreeMap::new(),
            log: Vec::new(),
            sockets: Vec::new(),
            keep: false,
            kept: Vec::new(),
            rearm: false,
        }
    }

    fn listen(&mut self, port: u16, backlog: u32) -> ListenerId {
        let listener = self.world.borrow_mut().listen(addr(port), backlog);
        self.driver.add_listener(SimListener(listener)).expect("it was just made")
    }

    fn turn(&mut self) {
        self.driver.submit_and_wait(None).expect("the simulation never fails here");
        while let Some(event) = self.driver.next_event() {
            self.note(event);
        }
    }

    fn note(&mut self, event: Event) {
        let line = match event {
            Event::Accepted { socket, armed, .. } => {
                self.sockets.push(socket);
                format!("accepted armed={armed}")
            }
            Event::AcceptFailed { error, .. } => {
                format!("accept failed {}", error.raw_os_error().unwrap_or(0))
            }
            Event::Received { key, buf, armed } => {
                assert!(!buf.is_empty());
                self.data.entry(key.slot).or_default().extend_from_slice(&buf);
                if self.keep {
                    self.kept.push(buf);
                }
                if !armed && self.rearm {
                    self.driver.recv(key);
                }
                format!("{} data armed={armed}", key.slot)
            }
            Event::DatagramSent { key, token, .. } => format!("{} datagram {token} sent", key.slot),
            Event::RecvEnded { key, end } => {
                let again = matches!(end, RecvEnd::NoBuffer | RecvEnd::Stopped);
                if again && self.rearm {
                    self.driver.recv(key);
                }
                match end {
                    RecvEnd::Failed(error) => {
                        format!("{} failed {}", key.slot, error.raw_os_error().unwrap_or(0))
                    }
                    end => format!("{} {end:?}", key.slot),
                }
            }
            Event::Sent { key, chain, result } => {
                self.memory.chunks.clear(chain);
                let result = result.map_err(|error| error.raw_os_error().unwrap_or(0));
                format!("{} sent {result:?}", key.slot)
            }
            Event::Connected { key, result } => {
                let result = result.map_err(|error| error.raw_os_error().unwrap_or(0));
                format!("{} connected {result:?}", key.slot)
            }
            Event::Closed { key } => format!("{} closed", key.slot),
            Event::Woken => "woken".to_owned(),
        };
        self.log.push(line);
    }

    /// Turns the ring whenever something is due, for that much virtual time.
    fn run(&mut self, time: Duration) {
        let limit = self.world.borrow().now + time;
        loop {
            let due = {
                let world = self.world.borrow();
                world.rings[0].is_due(world.now)
            };
            if due {
                self.turn();
                continue;
            }
            let next = self.world.borrow().next_time().filter(|at| *at <= limit);
            self.world.borrow_mut().advance(next.unwrap_or(limit));
            if next.is_none() {
                return;
            }
        }
    }

    fn peer(&mut self, port: u16) -> u64 {
        self.world.borrow_mut().peer_connect(None, addr(port))
    }

    /// An accepted connection in `slot`, and the peer at its other end.
    fn connection(&mut self, slot: u32) -> u64 {
        let listener = self.listen(100 + slot as u16, 8);
        self.driver.accept(listener, AcceptMode::Once);
        let peer = self.peer(100 + slot as u16);
        while self.sockets.is_empty() {
            self.run(millis(1));
            // A fault may have ended the accept; slots without accepts get a new one.
            if self.driver.in_flight() == 0 && self.sockets.is_empty() {
                self.driver.accept(listener, AcceptMode::Once);
            }
        }
        let socket = self.sockets.pop().expect("one");
        self.driver.adopt(key(slot), socket);
        self.log.clear();
        peer
    }

    fn send(&mut self, slot: u32, bytes: Vec<u8>) {
        let mut chain = Chain::EMPTY;
        // In three payloads, so that offsets into chains are met.
        let third = bytes.len() / 3;
        let (a, rest) = bytes.split_at(third);
        let (b, c) = rest.split_at(third);
        for part in [a, b, c] {
            self.memory.chunks.push(&mut chain, Payload::from(part.to_vec()));
        }
        self.driver.send(key(slot), chain);
    }

    /// Calls for a fault.
    fn script(&mut self, when: When, fault: Fault) {
        self.world.borrow_mut().call_for(when, fault);
    }

    /// The connection of a peer.
    fn conn_of(&self, peer: u64) -> u64 {
        self.world.borrow().peers[&peer].sock.conn
    }

    fn now(&self) -> Time {
        self.world.borrow().now
    }

    fn peer_received(&self, peer: u64) -> Vec<u8> {
        self.world.borrow().peers[&peer].received.clone()
    }

    fn count(&self, line: &str) -> usize {
        self.log.iter().filter(|entry| entry.as_str() == line).count()
    }

    fn position(&self, line: &str) -> Option<usize> {
        self.log.iter().position(|entry| entry == line)
    }
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 7 + n / 251) as u8).collect()
}
