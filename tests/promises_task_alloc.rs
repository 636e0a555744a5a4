//! Promise 5 for tasks: in steady state nothing is allocated (nor freed) per operation; and what an idle connection with a
//! task costs. A program of its own, because it counts with its own allocator.
#![cfg(target_os = "linux")]

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io::{Read, Write};
use std::net::TcpStream as Std;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use corelane::net::{TcpListener, TcpStream, UdpSocket};
use corelane::task::{self, Message};
use corelane::time::timeout;
use corelane::{Builder, Runtime, WorkerConfig};
use support::*;

/// The system's allocator, counting what workers ask of it.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static FREES: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicI64 = AtomicI64::new(0);

thread_local! {
    /// Whether this thread is a worker's.
    static WORKER: Cell<bool> = const { Cell::new(false) };
}

fn count(counter: &AtomicU64, bytes: i64) {
    if WORKER.get() {
        counter.fetch_add(1, Ordering::Relaxed);
        BYTES.fetch_add(bytes, Ordering::Relaxed);
    }
}

// SAFETY: hands everything to the system's allocator as it comes.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(&ALLOCATIONS, layout.size() as i64);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(&FREES, -(layout.size() as i64));
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

async fn echo(mut stream: TcpStream) -> std::io::Result<()> {
    while let Some(data) = stream.recv().await? {
        stream.send(data).await?;
    }
    Ok(())
}

/// A limit around everything, set and taken back with each message.
async fn limited_echo(mut stream: TcpStream) -> std::io::Result<()> {
    let limit = Duration::from_secs(30);
    while let Some(data) = timeout(limit, stream.recv()).await?? {
        timeout(limit, stream.send(data)).await??;
        timeout(limit, stream.flush()).await??;
    }
    Ok(())
}

fn server(builder: Builder, limited: bool) -> Option<Runtime<Message>> {
    let started = builder.listen(any_port()).start_tasks(move |_| async move {
        WORKER.set(true);
        let mut listener = TcpListener::of_builder(0).expect("it was given one");
        while let Ok(stream) = listener.accept().await {
            if limited {
                drop(task::spawn(limited_echo(stream)));
            } else {
                drop(task::spawn(echo(stream)));
            }
        }
    });
    started_or_skipped(started)
}

const CONNECTIONS: usize = 64;

/// Echoes `rounds` messages of 64 bytes on every connection after a warm-up; nothing may be allocated meanwhile.
fn echoes_without_allocating(runtime: &Runtime<Message>, rounds: u64) {
    let mut streams: Vec<_> = (0..CONNECTIONS)
        .map(|_| Std::connect(runtime.info().listeners[0].addr).expect("connected"))
        .collect();
    let sent = pattern(8, 64);
    let mut room = vec![0; sent.len()];
    let mut round = || {
        for stream in &mut streams {
            stream.write_all(&sent).expect("write");
        }
        for stream in &mut streams {
            stream.read_exact(&mut room).expect("the echo");
            assert!(room == sent, "a wrong echo");
        }
    };
    (0..200).for_each(|_| round());
    let before = counted();
    (0..rounds).for_each(|_| round());
    let after = counted();
    let messages = rounds * CONNECTIONS as u64;
    assert_eq!(
        (after.0 - before.0, after.1 - before.1),
        (0, 0),
        "allocations and frees in {messages} messages"
    );
    assert!(before.0 > 0, "the allocator counts nothing");
}

#[test]
fn a_million_messages_echoed_by_tasks_allocate_nothing() {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let Some(runtime) = server(Runtime::builder(), false) else { return };
    echoes_without_allocating(&runtime, 15_700);
    nothing_left(&runtime.shutdown(PATIENCE).expect("a clean shutdown"));
}

#[test]
fn time_limits_and_flushes_with_every_message_allocate_nothing() {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let Some(runtime) = server(Runtime::builder(), true) else { return };
    echoes_without_allocating(&runtime, 3_000);
    nothing_left(&runtime.shutdown(PATIENCE).expect("a clean shutdown"));
}

#[test]
fn datagrams_echoed_by_a_task_allocate_nothing() {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let (tell, told) = std::sync::mpsc::channel();
    let started = Runtime::builder().start_tasks(move |_| {
        let tell = tell.clone();
        async move {
            WORKER.set(true);
            let mut socket = UdpSocket::bind("127.0.0.1:0").await?;
            tell.send(socket.local_addr()?).expect("somebody listens");
            loop {
                let got = next_or_stop(&mut socket).await?;
                let Some(got) = got else { return std::io::Result::Ok(()) };
                socket.send_to(got.bytes, got.from).await?;
            }
        }
    });
    let Some(runtime) = started_or_skipped(started) else { return };
    let to = told.recv().expect("bound");
    let client = std::net::UdpSocket::bind("127.0.0.1:0").expect("bound");
    client.set_read_timeout(Some(PATIENCE)).expect("set");
    let mut room = [0; 100];
    let mut exchange = |n: u32| {
        client.send_to(&n.to_ne_bytes(), to).expect("sent");
        let len = client.recv(&mut room).expect("the echo");
        assert_eq!(room[..len], n.to_ne_bytes());
    };
    (0..500).for_each(&mut exchange);
    let before = counted();
    (0..20_000).for_each(&mut exchange);
    let after = counted();
    assert_eq!((after.0 - before.0, after.1 - before.1), (0, 0), "allocations and frees in 20,000 datagrams");
    nothing_left(&runtime.shutdown(PATIENCE).expect("a clean shutdown"));
}

/// The next datagram, or `None` when the runtime stops.
async fn next_or_stop(socket: &mut UdpSocket) -> std::io::Result<Option<corelane::net::UdpDatagram>> {
    use std::future::{Future, poll_fn};
    use std::task::Poll;
    let mut stopped = std::pin::pin!(task::stopped());
    poll_fn(|cx| {
        if let Poll::Ready(got) = socket.poll_recv_from(cx) {
            return Poll::Ready(got.map(Some));
        }
        stopped.as_mut().poll(cx).map(|()| Ok(None))
    })
    .await
}

#[test]
fn an_idle_connection_with_its_task_takes_at_most_512_bytes() {
    let _turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let config = WorkerConfig { max_connections: 4000, ..WorkerConfig::default() };
    let Some(runtime) = server(Runtime::builder().worker(config), false) else { return };
    let open = |count: usize| -> Vec<Std> {
        let connected = (0..count).map(|_| {
            let mut stream = Std::connect(runtime.info().listeners[0].addr).expect("connected");
            // It is there, and waits. One after the other: the list of those who wait to be admitted, which a burst
            // makes grow, is the worker's and no connection's.
            stream.write_all(b"x").expect("written");
            stream.read_exact(&mut [0]).expect("echo");
            stream
        });
        connected.collect()
    };
    let first = open(240);
    let before = BYTES.load(Ordering::Relaxed);
    // Tables double, and at 2,040 the last doubling is used up.
    let rest = open(1800);
    let heap = (BYTES.load(Ordering::Relaxed) - before) as f64 / 1800.0;
    // Reserved when the worker starts, for all connections that it may hold.
    let slot = SLOT as f64;
    println!("{heap:.0} bytes of heap and {slot:.0} bytes of tables per idle connection with its task");
    assert!(heap + slot <= 512.0, "{heap:.0} + {slot:.0} bytes");
    drop((first, rest));
    nothing_left(&runtime.shutdown(PATIENCE).expect("a clean shutdown"));
}

/// What the tables of worker and driver reserve for one connection: see the tests beside them that hold their
/// records to this.
const SLOT: usize = 112 + 40;
