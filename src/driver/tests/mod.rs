//! What every real driver does alike, met at the driver's door, with counterparts of std's.
//!
//! `listen.rs`: listeners made at run time. `ask.rs`: addresses and options. `unix.rs`: Unix streams.
//! `datagram/`: datagram sockets.
//!
//! What is particular to one driver is tested in its own folder.

mod ask;
#[cfg(target_os = "linux")]
pub(super) mod datagram;
mod listen;
#[cfg(unix)]
mod unix;

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::*;
use crate::buffer::{BufferConfig, Payload};
use crate::config::Sharing;
#[cfg(target_os = "linux")]
use crate::config::{Descriptors, UringFeatures};

const PATIENCE: Duration = Duration::from_secs(20);

/// Makes one test per driver of each generic function.
macro_rules! on_every_driver {
    ($($name:ident),+ $(,)?) => {
        #[cfg(target_os = "linux")]
        mod uring_direct {
            $(#[test] fn $name() {
                if let Some(driver) = super::super::uring(crate::config::Descriptors::Direct, crate::config::UringFeatures::ALL) {
                    super::$name(driver);
                }
            })+
        }
        #[cfg(target_os = "linux")]
        mod uring_fd {
            $(#[test] fn $name() {
                if let Some(driver) = super::super::uring(crate::config::Descriptors::Fd, crate::config::UringFeatures::ALL) {
                    super::$name(driver);
                }
            })+
        }
        #[cfg(target_os = "linux")]
        mod uring_least {
            $(#[test] fn $name() {
                if let Some(driver) = super::super::uring(crate::config::Descriptors::Direct, crate::config::UringFeatures::LEAST) {
                    super::$name(driver);
                }
            })+
        }
        #[cfg(target_os = "linux")]
        mod epoll {
            $(#[test] fn $name() { super::$name(super::super::epoll()); })+
        }
        #[cfg(windows)]
        mod iocp {
            $(#[test] fn $name() { super::$name(super::super::iocp()); })+
        }
    };
}
use on_every_driver;

fn config() -> WorkerConfig {
    let buffers = BufferConfig { size: 1024, count: 256, send_count: 0, ..BufferConfig::default() };
    WorkerConfig { max_connections: 64, buffers, peer_addresses: true, ..WorkerConfig::default() }
}

/// `None`, with the reason printed, where the system forbids io_uring.
#[cfg(target_os = "linux")]
fn uring(descriptors: Descriptors, uring: UringFeatures) -> Option<uring::UringDriver> {
    let config = WorkerConfig { descriptors, uring, ..config() };
    match super::uring::UringDriver::open(&config, Arc::default(), None) {
        Ok((driver, _)) => Some(driver),
        Err(error @ (SetupError::NotImplemented | SetupError::Sysctl { .. } | SetupError::Seccomp)) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[cfg(target_os = "linux")]
fn epoll() -> epoll::EpollDriver {
    epoll::EpollDriver::open(&config(), Arc::default(), None).expect("epoll").0
}

#[cfg(windows)]
fn iocp() -> iocp::IocpDriver {
    iocp::IocpDriver::open(&config(), Arc::default(), None).expect("a completion port").0
}

/// Options of a socket, read back past the driver.
#[derive(Debug)]
struct Seen {
    nodelay: bool,
    keepalive: bool,
    recv_buffer: usize,
    send_buffer: usize,
    linger: Option<Duration>,
}

impl Seen {
    fn of(socket: &socket2::SockRef<'_>) -> io::Result<Self> {
        Ok(Self {
            nodelay: socket.tcp_nodelay()?,
            keepalive: socket.keepalive()?,
            recv_buffer: socket.recv_buffer_size()?,
            send_buffer: socket.send_buffer_size()?,
            linger: socket.linger()?,
        })
    }
}

/// A driver whose sockets can be looked at.
trait Look: Driver {
    fn look(&mut self, key: Key) -> io::Result<Seen>;
}

#[cfg(target_os = "linux")]
impl Look for uring::UringDriver {
    fn look(&mut self, key: Key) -> io::Result<Seen> {
        self.with_socket(key, |fd| Seen::of(&socket2::SockRef::from(&fd)))
    }
}

#[cfg(target_os = "linux")]
impl Look for epoll::EpollDriver {
    fn look(&mut self, key: Key) -> io::Result<Seen> {
        self.with_socket(key, |fd| Seen::of(&socket2::SockRef::from(&fd)))
    }
}

#[cfg(windows)]
impl Look for iocp::IocpDriver {
    fn look(&mut self, key: Key) -> io::Result<Seen> {
        self.with_socket(key, |socket| Seen::of(&socket2::SockRef::from(&socket)))
    }
}

fn key(slot: u32, generation: u32) -> Key {
    Key { slot, generation }
}

/// The next event; waits for it.
fn next<D: Driver>(driver: &mut D) -> Event {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(event) = driver.next_event() {
            return event;
        }
        assert!(Instant::now() < until, "no event");
        let timeout = if driver.has_events() { Duration::ZERO } else { Duration::from_secs(1) };
        driver.submit_and_wait(Some(timeout)).expect("a wait");
    }
}

/// Nothing may be reported in a while.
fn quiet<D: Driver>(driver: &mut D) {
    for _ in 0..3 {
        driver.submit_and_wait(Some(Duration::from_millis(10))).expect("a wait");
        if let Some(event) = driver.next_event() {
            panic!("an event that nobody expects: {event:?}");
        }
    }
}

fn any_port() -> ListenerConfig {
    ListenerConfig::new(SocketAddr::from(([127, 0, 0, 1], 0)))
}

/// A TCP listener and its address.
fn listen_tcp<D: Driver>(driver: &mut D, config: ListenerConfig) -> io::Result<(ListenerId, SocketAddr)> {
    let listening = driver.listen(&ListenConfig::Tcp(config))?;
    Ok((listening.id, inet(&listening.local)))
}

fn inet(address: &Address) -> SocketAddr {
    match address {
        Address::Inet(address) => *address,
        #[cfg(unix)]
        other => panic!("{other:?}"),
    }
}

fn client(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect_timeout(&addr, PATIENCE).expect("connect");
    stream.set_read_timeout(Some(PATIENCE)).expect("a read timeout");
    stream.set_write_timeout(Some(PATIENCE)).expect("a write timeout");
    stream
}

/// Reads a byte. (A ring whose completions interrupt its thread ends a read that has a time limit.)
fn read(stream: &mut impl std::io::Read) -> io::Result<usize> {
    loop {
        match stream.read(&mut [0]) {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}

fn accept<D: Driver>(driver: &mut D, listener: ListenerId) -> Socket {
    driver.accept(listener, AcceptMode::Once);
    match next(driver) {
        Event::Accepted { listener: of, socket, armed, .. } => {
            assert_eq!((of, armed), (listener, false));
            socket
        }
        other => panic!("{other:?}"),
    }
}

fn connected<D: Driver>(driver: &mut D, wanted: Key) -> io::Result<()> {
    assert!(driver.in_flight() > 0, "reported inside the call");
    match next(driver) {
        Event::Connected { key, result } if key == wanted => result,
        other => panic!("{other:?}"),
    }
}

fn chain<D: Driver>(driver: &D, bytes: &[u8]) -> Chain {
    let mut chain = Chain::EMPTY;
    driver.memory().chunks.push(&mut chain, Payload::from(bytes.to_vec()));
    chain
}

fn close<D: Driver>(driver: &mut D, wanted: Key, how: CloseHow) {
    driver.close(wanted, how);
    match next(driver) {
        Event::Closed { key } if key == wanted => {}
        other => panic!("{other:?}"),
    }
}

/// Ends a driver and checks that the kernel gave everything back.
fn end<D: Driver>(driver: D) {
    let memory = driver.memory().clone();
    assert_eq!(driver.finish(PATIENCE), 0, "operations left in the kernel");
    assert_eq!(memory.pool.leased(), 0, "buffers out");
    assert_eq!(memory.chunks.used(), 0, "payloads out");
}
