//! The driver against the real kernel, without a worker: what it promises in `driver/mod.rs`.
//!
//! `life.rs`: connections, listeners and the driver itself, from their making to their end. `receive.rs`:
//! receiving, with much data waiting, without a buffer, cancelled. `submit.rs`: sends, waits and wakes.
//! `control.rs`: numbers of listeners. What every driver does alike: `driver/tests/`.

mod control;
mod datagram;
mod life;
mod receive;
mod submit;

use super::*;
use crate::buffer::{Buf, BufferConfig, Payload};
use crate::driver::{RecvEnd, Waker};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::thread;
use std::time::Instant;

const PATIENCE: Duration = Duration::from_secs(20);

fn key(slot: u32, generation: u32) -> Key {
    Key { slot, generation }
}

fn config() -> WorkerConfig {
    let buffers = BufferConfig { size: 1024, count: 256, send_count: 0, ..BufferConfig::default() };
    WorkerConfig { max_connections: 16, buffers, ..WorkerConfig::default() }
}

fn driver(config: &WorkerConfig) -> EpollDriver {
    EpollDriver::open(config, Arc::default(), None).expect("epoll").0
}

/// The next event; waits for it.
fn next(driver: &mut EpollDriver) -> Event {
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
fn quiet(driver: &mut EpollDriver) {
    for _ in 0..3 {
        driver.submit_and_wait(Some(Duration::from_millis(10))).expect("a wait");
        if let Some(event) = driver.next_event() {
            panic!("an event that nobody expects: {event:?}");
        }
    }
}

/// Lets waits pass until `done` holds of what the driver knows; nothing may be reported meanwhile.
fn until(driver: &mut EpollDriver, what: &str, mut done: impl FnMut(&mut EpollDriver) -> bool) {
    let until = Instant::now() + PATIENCE;
    while !done(driver) {
        assert!(Instant::now() < until, "waited in vain for: {what}");
        driver.submit_and_wait(Some(Duration::from_millis(1))).expect("a wait");
        if let Some(event) = driver.next_event() {
            panic!("an event that nobody expects: {event:?}");
        }
    }
}

fn listen(driver: &mut EpollDriver) -> (ListenerId, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let addr = listener.local_addr().expect("its address");
    (driver.add_listener(listener).expect("a driver that takes it"), addr)
}

fn client(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&addr, PATIENCE).expect("connect");
    stream.set_read_timeout(Some(PATIENCE)).expect("a read timeout");
    stream.set_write_timeout(Some(PATIENCE)).expect("a write timeout");
    stream
}

fn accept(driver: &mut EpollDriver, listener: ListenerId) -> Socket {
    driver.accept(listener, AcceptMode::Once);
    match next(driver) {
        Event::Accepted { socket, .. } => socket,
        other => panic!("{other:?}"),
    }
}

/// A connection in slot 0, and its peer.
fn pair(driver: &mut EpollDriver, generation: u32) -> (Key, TcpStream) {
    pair_in(driver, key(0, generation))
}

fn pair_in(driver: &mut EpollDriver, key: Key) -> (Key, TcpStream) {
    let (listener, addr) = listen(driver);
    let stream = client(addr);
    let socket = accept(driver, listener);
    driver.remove_listener(listener);
    driver.adopt(key, socket);
    (key, stream)
}

fn chain(driver: &EpollDriver, payloads: &[&[u8]]) -> Chain {
    let mut chain = Chain::EMPTY;
    for &payload in payloads {
        driver.memory().chunks.push(&mut chain, Payload::from(payload.to_vec()));
    }
    chain
}

fn received(driver: &mut EpollDriver, wanted: Key) -> (Buf, bool) {
    match next(driver) {
        Event::Received { key, buf, armed } if key == wanted => (buf, armed),
        other => panic!("{other:?}"),
    }
}

fn recv_ended(driver: &mut EpollDriver, wanted: Key) -> RecvEnd {
    match next(driver) {
        Event::RecvEnded { key, end } if key == wanted => end,
        other => panic!("{other:?}"),
    }
}

/// The end of a send: bytes taken, or why none was.
fn sent(driver: &mut EpollDriver, wanted: Key) -> io::Result<u64> {
    match next(driver) {
        Event::Sent { key, chain, result } if key == wanted => {
            driver.memory().chunks.clear(chain);
            result
        }
        other => panic!("{other:?}"),
    }
}

fn closed(driver: &mut EpollDriver, wanted: Key) {
    match next(driver) {
        Event::Closed { key } if key == wanted => {}
        other => panic!("{other:?}"),
    }
}

/// Ends a driver and checks that everything came back.
fn end(driver: EpollDriver) {
    let memory = driver.memory().clone();
    assert_eq!(driver.finish(PATIENCE), 0);
    assert_eq!(memory.pool.leased(), 0, "buffers out");
    assert_eq!(memory.chunks.used(), 0, "payloads out");
}

fn reset(stream: TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let len = size_of_val(&linger) as libc::socklen_t;
    let pointer: *const libc::linger = &raw const linger;
    // SAFETY: `linger` outlives the call and is `len` bytes long (invariant 5).
    let result = unsafe {
        libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, pointer.cast(), len)
    };
    assert_eq!(result, 0);
}
