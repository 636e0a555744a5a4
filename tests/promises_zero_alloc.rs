//! Promise 5: in steady state nothing is allocated (nor freed); and the kernel is entered far less
//! than once a message. A program of its own, because it counts with its own allocator.
#![cfg(target_os = "linux")]

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use corelane::{
    Accepted, Backend, Buf, Conn, ConnectConfig, Cx, Descriptors, Handler, Runtime, WorkerConfig,
};
use support::*;

/// The system's allocator, counting what workers ask of it.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static FREES: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Whether this thread is a worker's.
    static WORKER: Cell<bool> = const { Cell::new(false) };
}

fn count(counter: &AtomicU64) {
    if WORKER.get() {
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: hands everything to the system's allocator as it comes.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(&ALLOCATIONS);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(&ALLOCATIONS);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(&ALLOCATIONS);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(&FREES);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn counted() -> (u64, u64) {
    (ALLOCATIONS.load(Ordering::Relaxed), FREES.load(Ordering::Relaxed))
}

/// The counts are the whole program's, so its tests take turns.
static TURN: Mutex<()> = Mutex::new(());

struct Echo;

impl Handler for Echo {
    type Conn = ();
    type Message = ();

    fn on_start(&mut self, _: &mut Cx<'_, Self>) {
        WORKER.set(true);
    }

    fn on_accept(&mut self, _: &mut Cx<'_, Self>, _: Accepted) -> Option<()> {
        Some(())
    }

    fn on_data(&mut self, conn: &mut Conn<'_, Self>, data: Buf) {
        let _ = conn.send(data);
    }
}

const CONNECTIONS: usize = 64;
const MESSAGE: usize = 64;

/// One round: every connection sends `pipeline` messages of 64 bytes, then takes all its echoes.
fn round(streams: &mut [TcpStream], sent: &[u8], room: &mut [u8]) {
    for stream in streams.iter_mut() {
        stream.write_all(sent).expect("write");
    }
    for stream in streams.iter_mut() {
        stream.read_exact(room).expect("the echo");
        assert!(room == sent, "a wrong echo");
    }
}

/// Echoes at least `messages` messages with `pipeline` of them per connection on the way, and
/// returns the counters before and after, and what the worker allocated meanwhile.
fn echo(runtime: &Runtime, messages: u64, pipeline: usize) -> [corelane::Snapshot; 2] {
    let mut streams: Vec<_> = (0..CONNECTIONS).map(|_| connect(addr(runtime))).collect();
    let sent = pattern(8, MESSAGE * pipeline);
    let mut room = vec![0; sent.len()];
    // Tables and queues grow to what they need.
    for _ in 0..200 {
        round(&mut streams, &sent, &mut room);
    }
    let before = runtime.metrics().total();
    let allocated = counted();
    let rounds = messages.div_ceil((CONNECTIONS * pipeline) as u64);
    for _ in 0..rounds {
        round(&mut streams, &sent, &mut room);
    }
    let after = runtime.metrics().total();
    let (allocations, frees) = counted();
    assert_eq!(
        (allocations - allocated.0, frees - allocated.1),
        (0, 0),
        "allocations and frees on the worker's thread in {} messages",
        rounds * (CONNECTIONS * pipeline) as u64
    );
    drop(streams);
    empties(runtime);
    [before, after]
}

fn server(descriptors: Descriptors) -> Option<Runtime> {
    let config = WorkerConfig { descriptors, ..WorkerConfig::default() };
    start(Runtime::builder().worker(config).listen(any_port()), |_| Echo)
}

#[test]
fn a_million_echoed_messages_allocate_nothing() {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let Some(runtime) = server(Descriptors::Direct) else { return };
    let [before, after] = echo(&runtime, 1_000_000, 1);
    let messages = after.messages - before.messages;
    assert!(messages >= 1_000_000, "{messages} completions with data");
    assert!(counted().0 > 0, "the allocator counts nothing");
    assert_eq!(after.sq_full, 0);
    stop(runtime);
}

/// The other end of an echo, on a ring of its own: a message on the way on each connection, always.
struct Pinger {
    sent: Arc<[u8]>,
    wrong: Arc<AtomicU64>,
}

impl Handler for Pinger {
    /// Bytes of the echo that have come.
    type Conn = usize;
    type Message = SocketAddr;

    fn on_start(&mut self, _: &mut Cx<'_, Self>) {
        WORKER.set(true);
    }

    fn on_accept(&mut self, _: &mut Cx<'_, Self>, _: Accepted) -> Option<usize> {
        None
    }

    fn on_message(&mut self, cx: &mut Cx<'_, Self>, server: SocketAddr) {
        for _ in 0..CONNECTIONS {
            assert!(cx.connect(ConnectConfig::new(server), 0).is_ok());
        }
    }

    fn on_connected(&mut self, conn: &mut Conn<'_, Self>) {
        conn.send(self.sent.clone()).expect("open");
    }

    fn on_data(&mut self, conn: &mut Conn<'_, Self>, data: Buf) {
        let got = *conn.state();
        if self.sent.get(got..got + data.len()) != Some(&data[..]) {
            self.wrong.fetch_add(1, Ordering::Relaxed);
            return conn.abort();
        }
        *conn.state() = got + data.len();
        if *conn.state() == MESSAGE {
            *conn.state() = 0;
            let _ = conn.send(self.sent.clone());
        }
    }
}

/// A generator that is as fast as the server, so that the server is at full load: it then finds the
/// completions of many connections at every turn, and neither end allocates anything.
#[test]
fn at_full_load_of_64_connections_one_enter_serves_many_messages() {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let Some(server) = server(Descriptors::Direct) else { return };
    let wrong = Arc::new(AtomicU64::new(0));
    let pinger = {
        let wrong = wrong.clone();
        let sent: Arc<[u8]> = pattern(8, MESSAGE).into();
        move |_| Pinger { sent: sent.clone(), wrong: wrong.clone() }
    };
    let Some(client) = start(Runtime::builder(), pinger) else { return };
    client.remote().post(0, addr(&server)).expect("room");
    let before = counters(&server, "the load", |total| total.messages > 30_000);
    let allocated = counted();
    let after = counters(&server, "its end", |total| total.messages > before.messages + 300_000);
    let (allocations, frees) = counted();
    assert_eq!((allocations - allocated.0, frees - allocated.1), (0, 0), "on either end");
    let ratio = (after.enters - before.enters) as f64 / (after.messages - before.messages) as f64;
    println!("{ratio:.4} enters per message");
    // With epoll a receive and a send for each message are system calls of their own.
    let own = if server.info().backend == Backend::Epoll { 2.0 } else { 0.0 };
    assert!(ratio < own + 0.15, "{ratio:.4} enters per message at {CONNECTIONS} connections");
    assert_eq!(wrong.load(Ordering::Relaxed), 0, "a wrong echo");
    assert_eq!(after.connections, CONNECTIONS as u64);
    let report = client.shutdown(PATIENCE).expect("a clean shutdown");
    nothing_left(&report);
    empties(&server);
    stop(server);
}

#[test]
fn pipelined_messages_on_ordinary_descriptors_allocate_nothing() {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let Some(runtime) = server(Descriptors::Fd) else { return };
    let [before, after] = echo(&runtime, 1_000_000, 40);
    assert_eq!((after.bytes_received - before.bytes_received) % MESSAGE as u64, 0);
    assert!(after.bytes_received - before.bytes_received >= 1_000_000 * MESSAGE as u64);
    stop(runtime);
}

/// Timers are moved, not made: idle timeouts, deadlines and timers that are set on every message.
#[test]
fn timers_set_on_every_message_allocate_nothing() {
    struct Timed;
    impl Handler for Timed {
        type Conn = u32;
        type Message = ();

        fn on_start(&mut self, _: &mut Cx<'_, Self>) {
            WORKER.set(true);
        }

        fn on_accept(&mut self, _: &mut Cx<'_, Self>, _: Accepted) -> Option<u32> {
            Some(0)
        }

        fn on_data(&mut self, conn: &mut Conn<'_, Self>, data: Buf) {
            let ms = std::time::Duration::from_millis;
            *conn.state() += 1;
            let n = u64::from(*conn.state());
            if n % 16 == 0 {
                conn.set_timer(Some(ms(1)));
            }
            conn.set_deadline(Some(ms(60_000 + n % 5000)));
            conn.set_idle_timeout(Some(ms(50_000 + n % 77)));
            let _ = conn.send(data);
        }
    }
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let Some(runtime) = start(Runtime::builder().listen(any_port()), |_| Timed) else { return };
    let [before, after] = echo(&runtime, 100_000, 1);
    assert!(after.timers > before.timers, "no timer fired");
    stop(runtime);
}
