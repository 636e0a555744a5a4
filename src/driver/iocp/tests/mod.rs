//! The driver against the real kernel (or Wine), without a worker: what it promises in `driver/mod.rs`.
//!
//! `life.rs`: connections and the driver itself, from their making to their end. `accept.rs`: accepts, and
//! listeners that several drivers share. `datagram.rs`: datagram sockets. `receive.rs`: receives. `send.rs`: sends, waits and wakes.
//! `packets.rs`: packets that come late, twice, or not at all.

mod accept;
mod datagram;
mod life;
mod packets;
mod receive;
mod send;

use super::*;
use crate::buffer::{Buf, BufferConfig, Payload};
use crate::config::SocketOptions;
use crate::driver::{RecvEnd, Waker};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;

const PATIENCE: Duration = Duration::from_secs(20);

fn key(slot: u32, generation: u32) -> Key {
    Key { slot, generation }
}

fn config() -> WorkerConfig {
    let buffers = BufferConfig { size: 1024, count: 256, send_count: 0, ..BufferConfig::default() };
    WorkerConfig { max_connections: 16, buffers, ..WorkerConfig::default() }
}

fn driver(config: &WorkerConfig) -> IocpDriver {
    let (driver, info) = IocpDriver::open(config, Arc::default(), None).expect("a completion port");
    assert!(!info.direct);
    driver
}

/// Drivers for which immediate successes bring no packet, and for which they do.
fn both() -> [IocpDriver; 2] {
    let (skipping, mut plain) = (driver(&config()), driver(&config()));
    assert!(skipping.skip, "no layered provider here");
    plain.skip = false;
    [skipping, plain]
}

/// The next event; waits for it.
fn next(driver: &mut IocpDriver) -> Event {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(event) = driver.next_event() {
            return event;
        }
        assert!(Instant::now() < until, "no event");
        driver.submit_and_wait(Some(Duration::from_secs(1))).expect("a wait");
    }
}

/// Nothing may be reported in a while.
fn quiet(driver: &mut IocpDriver) {
    for _ in 0..3 {
        driver.submit_and_wait(Some(Duration::from_millis(10))).expect("a wait");
        if let Some(event) = driver.next_event() {
            panic!("an event that nobody expects: {event:?}");
        }
    }
}

fn share(workers: usize) -> (Vec<IocpListener>, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let addr = listener.local_addr().expect("its address");
    (IocpListener::share(listener, &SocketOptions::default(), workers).expect("shared"), addr)
}

fn listen(driver: &mut IocpDriver) -> (ListenerId, SocketAddr) {
    let (mut listeners, addr) = share(1);
    let listener = listeners.pop().expect("one");
    (driver.add_listener(listener).expect("a driver that takes it"), addr)
}

fn client(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&addr, PATIENCE).expect("connect");
    stream.set_read_timeout(Some(PATIENCE)).expect("a read timeout");
    stream.set_write_timeout(Some(PATIENCE)).expect("a write timeout");
    stream
}

fn accept(driver: &mut IocpDriver, listener: ListenerId) -> Socket {
    driver.accept(listener, AcceptMode::Once);
    match next(driver) {
        Event::Accepted { socket, .. } => socket,
        other => panic!("{other:?}"),
    }
}

/// A connection in a slot, and its peer.
fn pair_in(driver: &mut IocpDriver, key: Key) -> TcpStream {
    let (listener, addr) = listen(driver);
    let stream = client(addr);
    let socket = accept(driver, listener);
    driver.remove_listener(listener);
    driver.adopt(key, socket);
    stream
}

/// A connection in slot 0, and its peer.
fn pair(driver: &mut IocpDriver, generation: u32) -> (Key, TcpStream) {
    let key = key(0, generation);
    let stream = pair_in(driver, key);
    (key, stream)
}

fn chain(driver: &IocpDriver, payloads: &[&[u8]]) -> Chain {
    let mut chain = Chain::EMPTY;
    for &payload in payloads {
        driver.memory().chunks.push(&mut chain, Payload::from(payload.to_vec()));
    }
    chain
}

fn received(driver: &mut IocpDriver, wanted: Key) -> (Buf, bool) {
    match next(driver) {
        Event::Received { key, buf, armed } if key == wanted => (buf, armed),
        other => panic!("{other:?}"),
    }
}

fn recv_ended(driver: &mut IocpDriver, wanted: Key) -> RecvEnd {
    match next(driver) {
        Event::RecvEnded { key, end } if key == wanted => end,
        other => panic!("{other:?}"),
    }
}

/// The result of the send in flight, whose chain is dropped.
fn sent(driver: &mut IocpDriver, wanted: Key) -> io::Result<u64> {
    match next(driver) {
        Event::Sent { key, chain, result } if key == wanted => {
            driver.memory().chunks.clear(chain);
            result
        }
        other => panic!("{other:?}"),
    }
}

fn closed(driver: &mut IocpDriver, wanted: Key) {
    match next(driver) {
        Event::Closed { key } if key == wanted => {}
        other => panic!("{other:?}"),
    }
}

/// Ends a driver and checks that the kernel gave everything back.
fn end(driver: IocpDriver) {
    let (memory, counters) = (driver.memory().clone(), driver.counters.clone());
    assert_eq!(driver.finish(PATIENCE), 0, "operations left in the kernel");
    assert_eq!(memory.pool.leased(), 0, "buffers out");
    assert_eq!(memory.chunks.used(), 0, "payloads out");
    assert_eq!(counters.stale.get(), 0, "packets that nobody waits for");
}

/// Has the close of a stream be a reset.
fn reset(stream: TcpStream) {
    socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).expect("linger");
    drop(stream);
}

/// Reads to the end, which must be a reset. (Under Wine a receive may find a plain end, see
/// `socket::is_gone`; the connection has no peer any more.)
fn sees_reset(stream: &mut TcpStream) {
    match stream.read_to_end(&mut Vec::new()) {
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        Ok(_) => assert!(stream.peer_addr().is_err(), "an end, not a reset"),
    }
}
