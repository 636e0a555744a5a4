//! The driver against the real kernel, without a worker: what it promises in `driver/mod.rs`.
//!
//! `life.rs`: connections and the driver itself, from their making to their end. `receive.rs`: multishot
//! receives. `guard.rs`: memory that the kernel must not touch. `submit.rs`: sends, waits, wakes, and the memory of what is queued.
//! `control.rs`: asking sockets of the descriptor table, late accepts. What every driver does alike: `driver/tests/`.

mod control;
mod datagram;
mod guard;
mod life;
mod receive;
mod submit;

use super::*;
use crate::buffer::{Buf, BufferConfig, Payload};
use crate::config::{Descriptors, UringFeatures};
use crate::driver::{RecvEnd, Waker};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;

const PATIENCE: Duration = Duration::from_secs(20);
const BOTH: [Descriptors; 2] = [Descriptors::Direct, Descriptors::Fd];

/// Kernels, as they are made of this one by leaving features off.
const KERNELS: [(&str, Descriptors, UringFeatures); 5] = [
    ("all features", Descriptors::Direct, UringFeatures::ALL),
    ("ordinary descriptors", Descriptors::Fd, UringFeatures::ALL),
    ("5.19", Descriptors::Direct, UringFeatures::LINUX_5_19),
    ("the least", Descriptors::Fd, UringFeatures::LEAST),
    ("the least, with direct descriptors", Descriptors::Direct, UringFeatures::LEAST),
];

/// A configuration for one of them.
fn kernel((name, descriptors, uring): (&str, Descriptors, UringFeatures)) -> WorkerConfig {
    println!("{name}");
    WorkerConfig { uring, ..config(descriptors) }
}

fn key(slot: u32, generation: u32) -> Key {
    Key { slot, generation }
}

fn config(descriptors: Descriptors) -> WorkerConfig {
    let buffers = BufferConfig { size: 1024, count: 256, send_count: 0, ..BufferConfig::default() };
    WorkerConfig { max_connections: 16, descriptors, buffers, ..WorkerConfig::default() }
}

/// A driver; `None`, with the reason printed, where the system forbids io_uring.
fn driver(config: &WorkerConfig) -> Option<UringDriver> {
    match UringDriver::open(config, Arc::default(), None) {
        Ok((driver, info)) => {
            assert_eq!(info.direct, config.descriptors == Descriptors::Direct);
            Some(driver)
        }
        Err(error @ (SetupError::NotImplemented | SetupError::Sysctl { .. } | SetupError::Seccomp)) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// The next event; waits for it.
fn next(driver: &mut UringDriver) -> Event {
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
fn quiet(driver: &mut UringDriver) {
    for _ in 0..3 {
        driver.submit_and_wait(Some(Duration::from_millis(10))).expect("a wait");
        if let Some(event) = driver.next_event() {
            panic!("an event that nobody expects: {event:?}");
        }
    }
}

fn listen(driver: &mut UringDriver) -> (ListenerId, SocketAddr) {
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

fn accept(driver: &mut UringDriver, listener: ListenerId) -> Socket {
    driver.accept(listener, AcceptMode::Once);
    match next(driver) {
        Event::Accepted { socket, .. } => socket,
        other => panic!("{other:?}"),
    }
}

/// A connection in slot 0, and its peer.
fn pair(driver: &mut UringDriver, generation: u32) -> (Key, TcpStream) {
    let (listener, addr) = listen(driver);
    let stream = client(addr);
    let socket = accept(driver, listener);
    driver.remove_listener(listener);
    let key = key(0, generation);
    driver.adopt(key, socket);
    (key, stream)
}

fn chain(driver: &UringDriver, payloads: &[&[u8]]) -> Chain {
    let mut chain = Chain::EMPTY;
    for &payload in payloads {
        driver.memory().chunks.push(&mut chain, Payload::from(payload.to_vec()));
    }
    chain
}

fn received(driver: &mut UringDriver, wanted: Key) -> (Buf, bool) {
    match next(driver) {
        Event::Received { key, buf, armed } if key == wanted => (buf, armed),
        other => panic!("{other:?}"),
    }
}

fn recv_ended(driver: &mut UringDriver, wanted: Key) -> RecvEnd {
    match next(driver) {
        Event::RecvEnded { key, end } if key == wanted => end,
        other => panic!("{other:?}"),
    }
}

fn closed(driver: &mut UringDriver, wanted: Key) {
    match next(driver) {
        Event::Closed { key } if key == wanted => {}
        other => panic!("{other:?}"),
    }
}

/// Ends a driver and checks that the kernel gave everything back.
fn end(driver: UringDriver) {
    let memory = driver.memory().clone();
    assert_eq!(driver.finish(PATIENCE), 0, "operations left in the kernel");
    assert_eq!(memory.pool.leased(), 0, "buffers out");
    assert_eq!(memory.chunks.used(), 0, "payloads out");
}

fn reset(stream: &TcpStream) {
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let len = size_of_val(&linger) as libc::socklen_t;
    let pointer: *const libc::linger = &raw const linger;
    // SAFETY: `linger` outlives the call and is `len` bytes long (invariant 5).
    let result = unsafe {
        libc::setsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, pointer.cast(), len)
    };
    assert_eq!(result, 0);
}
