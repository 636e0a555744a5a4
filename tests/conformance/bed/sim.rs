//! A bed on the simulated kernel: everything that waits turns the simulation.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::net::{IpAddr, SocketAddr};
use std::rc::{Rc, Weak};
use std::time::{Duration, Instant};

use corelane::sim::{Faults, Peer, PeerListener, Sim, SimConfig, SimWorker};
use corelane::{Remote, Snapshot};

use super::{Ending, Listening, Make, Plan, Report, Running, Socket, World};
use crate::script::Task;

/// Virtual time that nothing may take longer than.
const LIMIT: Duration = Duration::from_secs(120);
/// Real time that no wait may take longer than, on however busy a machine.
const WATCH: Duration = Duration::from_secs(120);
/// Connections that wait in a foreign listener's queue, and one more.
const QUEUE: usize = 129;

pub struct SimWorld {
    sim: Sim,
    next_port: Cell<u16>,
    sockets: Rc<RefCell<Vec<Weak<SimSocket>>>>,
}

impl SimWorld {
    pub fn new(seed: u64, faults: bool) -> Self {
        let faults = if faults { Faults::benign(0.1) } else { Faults::none() };
        Self {
            sim: Sim::new(SimConfig { faults, ..SimConfig::seeded(seed) }),
            next_port: Cell::new(7000),
            sockets: Rc::default(),
        }
    }

    fn fresh_addr(&self, ip: IpAddr) -> SocketAddr {
        let port = self.next_port.get();
        self.next_port.set(port + 1);
        let ip = if ip.is_ipv4() {
            IpAddr::from([10, 1, 0, 1])
        } else {
            IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, 1])
        };
        SocketAddr::new(ip, port)
    }
}

fn keep(sockets: &RefCell<Vec<Weak<SimSocket>>>, peer: Peer) -> Rc<SimSocket> {
    let socket = Rc::new(SimSocket(peer));
    sockets.borrow_mut().push(Rc::downgrade(&socket));
    socket
}

impl World for SimWorld {
    fn until(&self, what: &str, done: &mut dyn FnMut() -> bool) {
        // A world in which something always happens and nothing comes of it must end too.
        let began = Instant::now();
        let mut looks = 0u32;
        let watched = || {
            looks = looks.wrapping_add(1);
            assert!(!looks.is_multiple_of(4096) || began.elapsed() < WATCH, "{what}: takes for ever");
            done()
        };
        self.sim.run_until(LIMIT, watched).unwrap_or_else(|stuck| panic!("{what}: {stuck}"));
    }

    fn pass(&self, time: Duration) {
        self.sim.run_for(time);
    }

    fn start(&self, plan: &Plan, make: Make) -> Box<dyn Running> {
        let listeners: Vec<_> =
            plan.listen.iter().map(|listen| listen.config(self.fresh_addr(listen.ip))).collect();
        let workers = self.sim.workers(plan.workers, plan.config.clone(), &listeners, |index| make(index));
        let addrs = listeners.iter().map(|listener| listener.addr).collect();
        Box::new(SimServer { addrs, workers: workers.expect("a configuration that works") })
    }

    fn connect(&self, to: SocketAddr, _narrow: bool) -> Rc<dyn Socket> {
        let peer = self.sim.connect(to);
        self.until("a client to be connected", &mut || peer.is_connected() || peer.is_refused());
        assert!(peer.is_connected(), "connect to {to}: refused");
        keep(&self.sockets, peer)
    }

    fn listen(&self) -> Box<dyn Listening> {
        let addr = self.fresh_addr(IpAddr::from([10, 1, 0, 1]));
        Box::new(SimListener { addr, listener: self.sim.listen(addr), sockets: self.sockets.clone() })
    }

    fn full(&self) -> (SocketAddr, Box<dyn Any>) {
        let addr = self.fresh_addr(IpAddr::from([10, 1, 0, 1]));
        let listener = self.sim.listen(addr);
        let filling: Vec<Peer> = (0..QUEUE).map(|_| self.sim.connect(addr)).collect();
        self.until("a queue to be full", &mut || listener.waiting() == QUEUE);
        (addr, Box::new((listener, filling)))
    }

    fn refusing(&self) -> (SocketAddr, Box<dyn Any>) {
        (self.fresh_addr(IpAddr::from([10, 1, 0, 1])), Box::new(()))
    }

    fn close_all(&self) {
        for socket in self.sockets.borrow().iter().filter_map(Weak::upgrade) {
            if socket.0.sent_all() { socket.0.close() } else { socket.0.reset() }
        }
    }

    fn random(&self, below: u64) -> u64 {
        self.sim.random(below)
    }
}

struct SimServer {
    addrs: Vec<SocketAddr>,
    workers: Vec<SimWorker<Task>>,
}

impl Running for SimServer {
    fn addrs(&self) -> &[SocketAddr] {
        &self.addrs
    }

    fn metrics(&self) -> Snapshot {
        let mut total = Snapshot::default();
        for worker in &self.workers {
            total += worker.metrics();
        }
        total
    }

    fn remote(&self) -> Remote<Task> {
        self.workers[0].remote()
    }

    fn end(&self, how: Ending) {
        match how {
            Ending::Stop(deadline) => self.workers[0].stop(deadline),
            Ending::Join => {}
            Ending::Drop => panic!("a simulated worker lives as long as its world"),
        }
    }

    fn ended(&self) -> Option<Result<Report, String>> {
        let mut total = Report { metrics: self.metrics(), ..Report::default() };
        for worker in &self.workers {
            let report = worker.report()?;
            total.finished += report.finished;
            total.aborted += report.aborted;
            total.ops_in_kernel += report.ops_in_kernel;
            total.buffers_outstanding += report.buffers_outstanding;
            total.messages_undelivered += report.messages_undelivered;
        }
        // The simulated kernel can also be asked itself.
        for worker in &self.workers {
            let left = (worker.ops_in_flight(), worker.buffers_leased(), worker.payloads_queued());
            assert_eq!(left, (0, 0, 0), "operations, buffers and payloads left");
        }
        Some(Ok(total))
    }

    fn is_well(&self) -> bool {
        self.workers.iter().all(SimWorker::is_running)
    }
}

struct SimSocket(Peer);

impl Socket for SimSocket {
    fn addr(&self) -> SocketAddr {
        self.0.addr()
    }

    fn send(&self, bytes: &[u8]) {
        self.0.send(bytes);
    }

    fn sent_all(&self) -> bool {
        self.0.sent_all()
    }

    fn take(&self) -> Vec<u8> {
        self.0.take_received()
    }

    fn total(&self) -> u64 {
        self.0.received_len()
    }

    fn set_reading(&self, reading: bool) {
        self.0.set_reading(reading);
    }

    fn read_limit(&self, bytes: u64) {
        self.0.read_limit(bytes);
    }

    fn shutdown(&self) {
        self.0.shutdown();
    }

    fn close(&self) {
        self.0.close();
    }

    fn reset(&self) {
        self.0.reset();
    }

    fn is_eof(&self) -> bool {
        self.0.is_eof()
    }

    fn is_reset(&self) -> bool {
        self.0.is_reset()
    }
}

struct SimListener {
    addr: SocketAddr,
    listener: PeerListener,
    sockets: Rc<RefCell<Vec<Weak<SimSocket>>>>,
}

impl Listening for SimListener {
    fn addr(&self) -> SocketAddr {
        self.addr
    }

    fn accept(&self) -> Option<Rc<dyn Socket>> {
        let peer = self.listener.accept()?;
        Some(keep(&self.sockets, peer))
    }
}
