//! A bed on the kernel of this machine: a runtime, and sockets of the standard library that do not block.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::rc::{Rc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use corelane::{
    Backend, Builder, Descriptors, Remote, Runtime, RuntimeError, RuntimeInfo, SetupError, ShutdownReport,
    Snapshot, StartError, UringFeatures,
};
use socket2::{Domain, SockRef, Type};

use super::{Ending, Listening, Make, PATIENCE, Plan, Report, Running, Socket, World};
use crate::list::{Column, once};
use crate::script::{Log, Script, Task};

/// Reads and writes of one socket before others have their turn.
const PORTION: usize = 16;
/// How long nothing must have happened until the script's thread sleeps a little between its looks.
const EAGER: u32 = 20;

/// Names the backend that `Backend::Auto` has to come to.
const EXPECTED: &str = "CORELANE_EXPECT_BACKEND";

type Sockets = Rc<RefCell<Vec<Weak<RealSocket>>>>;

pub struct RealWorld {
    backend: Backend,
    column: Column,
    sockets: Sockets,
    dice: Cell<u64>,
}

impl RealWorld {
    /// # Errors
    /// Why the system does not have the backend.
    pub fn new(backend: Backend, column: Column) -> Result<Self, String> {
        #[cfg(unix)]
        die_of_sigpipe();
        let dice = Cell::new(0x9E37_79B9_7F4A_7C15);
        let world = Self { backend, column, sockets: Sockets::default(), dice };
        once(column, || world.attempt())?;
        Ok(world)
    }

    /// Starts and stops a runtime, to know whether the system lets it.
    fn attempt(&self) -> Result<(), String> {
        use SetupError::{NotImplemented, Seccomp, Sysctl};
        let runtime = match self.builder(&Plan::default()).start(|_| Script::new(&Log::default())) {
            Ok(runtime) => runtime,
            Err(StartError::Kernel(error @ (NotImplemented | Sysctl { .. } | Seccomp))) => {
                return Err(error.to_string());
            }
            Err(error) => panic!("the runtime does not start: {error}"),
        };
        if let (Column::Auto, Ok(wanted)) = (self.column, std::env::var(EXPECTED)) {
            assert_eq!(runtime.info().backend.as_str(), wanted, "what Auto comes to");
        }
        self.check_features(runtime.info());
        runtime.shutdown(PATIENCE).map(drop).map_err(|error| error.to_string())
    }

    /// What a column leaves out must not be in use: it would be another one's name.
    fn check_features(&self, info: &RuntimeInfo) {
        let off: &[&str] = match self.column {
            Column::UringFd => &["DIRECT_DESCRIPTORS"],
            Column::Uring519 => &["MULTISHOT_RECV", "DEFER_TASKRUN"],
            Column::UringLeast => &["MULTISHOT_RECV", "DEFER_TASKRUN", "PBUF_RING", "DIRECT_DESCRIPTORS"],
            _ => &[],
        };
        for name in off {
            let feature = info.features.iter().find(|feature| feature.name == *name);
            assert_eq!(feature.map(|feature| feature.on), Some(false), "{name}: {:?}", info.features);
        }
    }

    fn builder(&self, plan: &Plan) -> Builder {
        let mut config = plan.config.clone();
        match self.column {
            Column::UringFd => config.descriptors = Descriptors::Fd,
            Column::Uring519 => config.uring = UringFeatures::LINUX_5_19,
            Column::UringLeast => {
                config.uring = UringFeatures::LEAST;
                config.descriptors = Descriptors::Fd;
            }
            _ => {}
        }
        Runtime::builder().backend(self.backend).workers(plan.workers).worker(config)
    }

    /// Plays every foreign program once; whether any of them got on.
    fn pump(&self) -> bool {
        let mut sockets = self.sockets.borrow_mut();
        let mut got_on = false;
        sockets.retain(|socket| {
            let Some(socket) = socket.upgrade() else { return false };
            got_on |= socket.pump();
            true
        });
        got_on
    }

    fn keep(&self, stream: TcpStream) -> Rc<RealSocket> {
        let addr = stream.local_addr().expect("its address");
        keep(&self.sockets, stream, addr)
    }
}

/// A write to a connection that is gone must be an error, never a signal: this process, which as a Rust
/// program would not notice one, is made to die of it.
#[cfg(unix)]
fn die_of_sigpipe() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        // SAFETY: the default action is no handler of this program's.
        let before = unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        assert_ne!(before, libc::SIG_ERR, "signal: {}", std::io::Error::last_os_error());
    });
}

fn keep(sockets: &Sockets, stream: TcpStream, addr: SocketAddr) -> Rc<RealSocket> {
    stream.set_nonblocking(true).expect("a socket that does not block");
    stream.set_nodelay(true).expect("no delay");
    let socket = Rc::new(RealSocket {
        addr,
        stream: RefCell::new(Some(stream)),
        outgoing: RefCell::default(),
        finish: Cell::new(None),
        inbox: RefCell::default(),
        total: Cell::new(0),
        allowance: Cell::new(u64::MAX),
        eof: Cell::new(false),
        reset: Cell::new(false),
    });
    sockets.borrow_mut().push(Rc::downgrade(&socket));
    socket
}

impl World for RealWorld {
    fn until(&self, what: &str, done: &mut dyn FnMut() -> bool) {
        let until = Instant::now() + PATIENCE;
        let mut quiet = 0;
        loop {
            let got_on = self.pump();
            if done() {
                return;
            }
            assert!(Instant::now() < until, "waited {PATIENCE:?} in vain for: {what}");
            quiet = if got_on { 0 } else { quiet + 1 };
            if quiet > EAGER {
                std::thread::sleep(Duration::from_micros(100));
            } else {
                std::thread::yield_now();
            }
        }
    }

    fn pass(&self, time: Duration) {
        let until = Instant::now() + time;
        while Instant::now() < until {
            if !self.pump() {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    fn start(&self, plan: &Plan, make: Make) -> Box<dyn Running> {
        let mut builder = self.builder(plan);
        for listen in &plan.listen {
            builder = builder.listen(listen.config(SocketAddr::new(listen.ip, 0)));
        }
        let runtime = builder.start(move |index| make(index)).expect("the runtime starts, as it did before");
        let addrs = runtime.info().listeners.iter().map(|listener| listener.addr).collect();
        let remote = runtime.remote();
        Box::new(RealServer { addrs, remote, state: RefCell::new(State::Running(Box::new(runtime))) })
    }

    fn connect(&self, to: SocketAddr, narrow: bool) -> Rc<dyn Socket> {
        let stream = if narrow {
            let socket = socket2::Socket::new(Domain::for_address(to), Type::STREAM, None).expect("a socket");
            socket.set_recv_buffer_size(4096).expect("a small receive buffer");
            socket.connect_timeout(&to.into(), PATIENCE).map(|()| socket.into())
        } else {
            TcpStream::connect_timeout(&to, PATIENCE)
        };
        self.keep(stream.unwrap_or_else(|error| panic!("connect to {to}: {error}")))
    }

    fn listen(&self) -> Box<dyn Listening> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a listener");
        listener.set_nonblocking(true).expect("a listener that does not block");
        Box::new(RealListener { listener, sockets: self.sockets.clone() })
    }

    fn full(&self) -> (SocketAddr, Box<dyn Any>) {
        let listener = bound();
        listener.listen(0).expect("a listener");
        let addr = local_addr(&listener);
        let mut filling = Vec::new();
        while let Ok(stream) = TcpStream::connect_timeout(&addr, Duration::from_millis(300)) {
            filling.push(stream);
            assert!(filling.len() < 8, "a queue of one that is never full");
        }
        (addr, Box::new((listener, filling)))
    }

    fn refusing(&self) -> (SocketAddr, Box<dyn Any>) {
        // Bound, so that nobody else takes the port, and not listening.
        let socket = bound();
        (local_addr(&socket), Box::new(socket))
    }

    fn close_all(&self) {
        for socket in self.sockets.borrow().iter().filter_map(Weak::upgrade) {
            socket.leave();
        }
    }

    fn random(&self, below: u64) -> u64 {
        let mut x = self.dice.get();
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        self.dice.set(x);
        x.wrapping_mul(0x2545_F491_4F6C_DD1D) % below
    }
}

fn bound() -> socket2::Socket {
    let socket = socket2::Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).expect("an address");
    socket
}

fn local_addr(socket: &socket2::Socket) -> SocketAddr {
    socket.local_addr().expect("its address").as_socket().expect("an IP address")
}

enum State {
    Running(Box<Runtime<Task>>),
    Ending(JoinHandle<Result<ShutdownReport, RuntimeError>>),
    Ended(Box<Report>),
}

struct RealServer {
    addrs: Vec<SocketAddr>,
    remote: Remote<Task>,
    state: RefCell<State>,
}

impl Running for RealServer {
    fn addrs(&self) -> &[SocketAddr] {
        &self.addrs
    }

    fn metrics(&self) -> Snapshot {
        match &*self.state.borrow() {
            State::Running(runtime) => runtime.metrics().total(),
            State::Ending(_) => panic!("no counters are to be had while the runtime ends"),
            State::Ended(report) => report.metrics,
        }
    }

    fn remote(&self) -> Remote<Task> {
        self.remote.clone()
    }

    fn end(&self, how: Ending) {
        let mut state = self.state.borrow_mut();
        let State::Running(runtime) = std::mem::replace(&mut *state, State::Ended(Box::default())) else {
            panic!("a server ends once");
        };
        // By a thread, because the foreign programs have to go on meanwhile.
        *state = match how {
            Ending::Drop => return,
            Ending::Stop(deadline) => State::Ending(std::thread::spawn(move || runtime.shutdown(deadline))),
            Ending::Join => State::Ending(std::thread::spawn(move || runtime.join())),
        };
    }

    fn ended(&self) -> Option<Result<Report, String>> {
        let mut state = self.state.borrow_mut();
        match &*state {
            State::Running(_) => return None,
            State::Ended(report) => return Some(Ok((**report).clone())),
            State::Ending(thread) if !thread.is_finished() => return None,
            State::Ending(_) => {}
        }
        let State::Ending(thread) = std::mem::replace(&mut *state, State::Ended(Box::default())) else {
            return None;
        };
        let ended = thread.join().expect("stopping does not panic");
        let report = ended.map(|report| Report {
            finished: report.finished,
            aborted: report.aborted,
            ops_in_kernel: report.ops_in_kernel,
            buffers_outstanding: report.buffers_outstanding,
            messages_undelivered: report.messages_undelivered,
            metrics: report.metrics.total(),
        });
        if let Ok(report) = &report {
            *state = State::Ended(Box::new(report.clone()));
        }
        Some(report.map_err(|error| error.to_string()))
    }

    fn is_well(&self) -> bool {
        match &*self.state.borrow() {
            State::Running(runtime) => runtime.is_running(),
            State::Ending(_) | State::Ended(_) => true,
        }
    }
}

/// What a socket does when everything it was told to send is with its kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Finish {
    Shutdown,
    Close,
    Done,
}

struct RealSocket {
    addr: SocketAddr,
    /// `None`: closed.
    stream: RefCell<Option<TcpStream>>,
    outgoing: RefCell<VecDeque<u8>>,
    finish: Cell<Option<Finish>>,
    inbox: RefCell<Vec<u8>>,
    total: Cell<u64>,
    /// Bytes that it will still read.
    allowance: Cell<u64>,
    eof: Cell<bool>,
    reset: Cell<bool>,
}

/// Whether an error says that the connection was reset. The system tells that to one operation only, be it
/// a read or a write.
fn is_reset(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted | ErrorKind::BrokenPipe)
}

impl RealSocket {
    /// Goes on with what it was told; whether it got anywhere.
    fn pump(&self) -> bool {
        let written = self.write();
        let read = self.read();
        written || read
    }

    fn write(&self) -> bool {
        let mut slot = self.stream.borrow_mut();
        let Some(stream) = slot.as_mut() else { return false };
        let mut outgoing = self.outgoing.borrow_mut();
        let mut got_on = false;
        for _ in 0..PORTION {
            let (front, _) = outgoing.as_slices();
            if front.is_empty() {
                break;
            }
            match stream.write(front) {
                Ok(n) => {
                    outgoing.drain(..n);
                    got_on = true;
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => break,
                Err(error) if is_reset(error.kind()) => {
                    self.reset.set(true);
                    outgoing.clear();
                }
                Err(error) => panic!("a client's write: {error}"),
            }
        }
        if outgoing.is_empty() {
            match self.finish.get() {
                Some(Finish::Shutdown) => {
                    self.finish.set(Some(Finish::Done));
                    // A connection that was reset meanwhile is not connected any more.
                    drop(stream.shutdown(Shutdown::Write));
                }
                Some(Finish::Close) => drop(slot.take()),
                Some(Finish::Done) | None => {}
            }
        }
        got_on
    }

    fn read(&self) -> bool {
        let mut slot = self.stream.borrow_mut();
        let Some(stream) = slot.as_mut() else { return false };
        let mut got_on = false;
        let mut room = [0; 16 << 10];
        for _ in 0..PORTION {
            let most = self.allowance.get().min(room.len() as u64) as usize;
            if most == 0 || self.eof.get() {
                break;
            }
            match stream.read(&mut room[..most]) {
                Ok(0) => {
                    let ended = if self.is_gone(stream) { &self.reset } else { &self.eof };
                    got_on = !ended.replace(true);
                    break;
                }
                Ok(n) => {
                    self.inbox.borrow_mut().extend_from_slice(&room[..n]);
                    self.total.set(self.total.get() + n as u64);
                    if self.allowance.get() != u64::MAX {
                        self.allowance.set(self.allowance.get() - n as u64);
                    }
                    got_on = true;
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => break,
                Err(error) if is_reset(error.kind()) => {
                    got_on = !self.reset.replace(true);
                    break;
                }
                Err(error) => panic!("a client's read: {error}"),
            }
        }
        got_on
    }

    /// Whether an end that was read is a reset that Wine forgot about: its server takes the error of a reset off
    /// the socket, and the next receive finds a plain end. The system below knows no peer any more then, which
    /// after a plain FIN it does as long as this side has not finished.
    fn is_gone(&self, stream: &TcpStream) -> bool {
        cfg!(windows) && self.finish.get().is_none() && stream.peer_addr().is_err()
    }

    /// The program ends: what it was told to send and could not is lost.
    fn leave(&self) {
        self.pump();
        drop(self.stream.borrow_mut().take());
    }
}

impl Socket for RealSocket {
    fn addr(&self) -> SocketAddr {
        self.addr
    }

    fn send(&self, bytes: &[u8]) {
        if self.finish.get().is_none() {
            self.outgoing.borrow_mut().extend(bytes);
            self.write();
        }
    }

    fn sent_all(&self) -> bool {
        self.outgoing.borrow().is_empty()
    }

    fn take(&self) -> Vec<u8> {
        std::mem::take(&mut self.inbox.borrow_mut())
    }

    fn total(&self) -> u64 {
        self.total.get()
    }

    fn set_reading(&self, reading: bool) {
        self.allowance.set(if reading { u64::MAX } else { 0 });
    }

    fn read_limit(&self, bytes: u64) {
        self.allowance.set(bytes);
    }

    fn shutdown(&self) {
        self.finish.set(self.finish.get().or(Some(Finish::Shutdown)));
        self.write();
    }

    fn close(&self) {
        self.finish.set(Some(Finish::Close));
        self.write();
    }

    fn reset(&self) {
        if let Some(stream) = self.stream.borrow_mut().take() {
            SockRef::from(&stream).set_linger(Some(Duration::ZERO)).expect("a close that resets");
        }
    }

    fn is_eof(&self) -> bool {
        self.eof.get()
    }

    fn is_reset(&self) -> bool {
        self.reset.get()
    }
}

struct RealListener {
    listener: TcpListener,
    sockets: Sockets,
}

impl Listening for RealListener {
    fn addr(&self) -> SocketAddr {
        self.listener.local_addr().expect("its address")
    }

    fn accept(&self) -> Option<Rc<dyn Socket>> {
        match self.listener.accept() {
            Ok((stream, from)) => Some(keep(&self.sockets, stream, from)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            Err(error) => panic!("a foreign server's accept: {error}"),
        }
    }
}
