//! On Windows as on Linux: in steady state nothing is allocated, nor freed. A program of its own, because it
//! counts with its own allocator. Small numbers: under Wine every operation goes through another process.
#![cfg(windows)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use corelane::{Accepted, Buf, BufferConfig, Conn, Cx, Handler, Runtime, WorkerConfig};

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
        conn.send(data).expect("there is room for an echo");
    }
}

/// One round: every connection sends a message of several buffers, then takes its echo.
fn round(streams: &mut [TcpStream], sent: &[u8], room: &mut [u8]) {
    for stream in streams.iter_mut() {
        stream.write_all(sent).expect("write");
    }
    for stream in streams.iter_mut() {
        stream.read_exact(room).expect("the echo");
        assert!(room == sent, "a wrong echo");
    }
}

#[test]
fn echoed_messages_allocate_nothing() {
    const CONNECTIONS: usize = 8;
    const ROUNDS: u64 = 150;
    let any_port: SocketAddr = "127.0.0.1:0".parse().expect("an address");
    let buffers = BufferConfig { size: 256, count: 64, ..BufferConfig::default() };
    let config = WorkerConfig { buffers, ..WorkerConfig::default() };
    let runtime = Runtime::builder().worker(config).listen(any_port).start(|_| Echo).expect("a runtime");
    let addr = runtime.info().listeners[0].addr;
    let mut streams: Vec<_> = (0..CONNECTIONS)
        .map(|_| {
            let stream = TcpStream::connect(addr).expect("connect");
            stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a read timeout");
            stream
        })
        .collect();
    let sent: Vec<u8> = (0..700u32).map(|n| (n % 251) as u8).collect();
    let mut room = vec![0; sent.len()];
    // Tables and queues grow to what they need.
    for _ in 0..50 {
        round(&mut streams, &sent, &mut room);
    }
    let (before, messages) = (counted(), runtime.metrics().total().messages);
    for _ in 0..ROUNDS {
        round(&mut streams, &sent, &mut room);
    }
    let (after, echoed) = (counted(), runtime.metrics().total().messages - messages);
    assert!(echoed >= ROUNDS * CONNECTIONS as u64, "{echoed} messages");
    assert_eq!(after, before, "allocations and frees on the worker's thread in {echoed} messages");
    assert!(after.0 > 0, "the allocator counts nothing");
    drop(streams);
    let report = runtime.shutdown(Duration::from_secs(5)).expect("the worker ends");
    assert_eq!((report.ops_in_kernel, report.buffers_outstanding), (0, 0));
}
