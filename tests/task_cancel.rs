//! Futures that are dropped at any await point, on the real kernel, with peers that are not corelane: whatever was cut
//! off, every byte arrives once and in order, and nothing is left behind. `sim_cancel.rs` does the same in simulated
//! worlds, with resets and faults, over many more seeds; `CORELANE_CANCEL_SEEDS=0..500` widens the search here.
#![cfg(target_os = "linux")]

mod support;
mod task_common;

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener as StdListener, UdpSocket as StdUdp};
use std::ops::Range;
use std::os::unix::net::UnixStream as StdUnix;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use corelane::net::{TcpListener, TcpStream, UdpSocket, UnixListener, alloc};
use corelane::sync::Semaphore;
use corelane::task::{JoinHandle, spawn, yield_now};
use corelane::time::{sleep, timeout};
use corelane::{UringFeatures, WorkerConfig};
use futures::future::{Either, select};
use support::{PATIENCE, Rng, any_port, connect, pattern, same_bytes};
use task_common::*;

fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var("CORELANE_CANCEL_SEEDS") else { return 0..12 };
    let parsed = text.split_once("..").map_or_else(
        || text.parse().map(|one: u64| one..one + 1),
        |(from, to)| from.parse().and_then(|from| to.parse().map(|to| from..to)),
    );
    parsed.unwrap_or_else(|_| panic!("CORELANE_CANCEL_SEEDS is {text:?}: write 7 or 0..500"))
}

/// Chance, and how often an operation was done and cut.
struct Stage {
    rng: RefCell<Rng>,
    done: Cell<u64>,
    cut: Cell<u64>,
}

type Shared = Rc<Stage>;

impl Stage {
    fn new(seed: u64) -> Shared {
        Rc::new(Self { rng: RefCell::new(Rng::new(seed)), done: Cell::new(0), cut: Cell::new(0) })
    }

    fn below(&self, n: usize) -> usize {
        self.rng.borrow_mut().within(0, n - 1)
    }

    /// Runs a future for so long as chance has it, and then drops it where it is.
    async fn cut<F: Future>(&self, future: F) -> Option<F::Output> {
        let outcome = match self.below(6) {
            0 => polled(future, self.below(4), self.below(2) == 0).await,
            1 | 2 => timeout(Duration::from_micros(self.below(2_000) as u64), future).await.ok(),
            3 => timeout(Duration::ZERO, future).await.ok(),
            4 => match select(pin!(future), pin!(yield_now())).await {
                Either::Left((output, _)) => Some(output),
                Either::Right(_) => None,
            },
            _ => Some(timeout(PATIENCE, future).await.expect("in time")),
        };
        let counter = if outcome.is_some() { &self.done } else { &self.cut };
        counter.set(counter.get() + 1);
        outcome
    }

    /// Tries an operation again and again until one try gets there.
    async fn until_done<T, F: Future<Output = T>>(&self, mut attempt: impl FnMut() -> F) -> T {
        loop {
            if let Some(output) = self.cut(attempt()).await {
                return output;
            }
        }
    }
}

/// Polls a future at most so many times, some of them for nothing.
async fn polled<F: Future>(future: F, times: usize, needlessly: bool) -> Option<F::Output> {
    let (mut future, mut limit) = (pin!(future), pin!(sleep(Duration::from_millis(2))));
    let mut left = times;
    poll_fn(|cx| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        if let Poll::Ready(output) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(output));
        }
        if left == 0 || limit.as_mut().poll(cx).is_ready() {
            return Poll::Ready(None);
        }
        if needlessly {
            cx.waker().wake_by_ref();
        }
        Poll::Pending
    })
    .await
}

/// One receiving operation of any stream, cut off or not: what it brought, `None` at the end. At most so many bytes
/// will come unless the stream ends.
macro_rules! receive {
    ($stage:expr, $stream:expr, $most:expr) => {{
        let (stage, stream): (&Stage, _) = ($stage, &mut $stream);
        match stage.below(6) {
            0 | 1 => match stage.cut(stream.recv()).await {
                Some(received) => received.expect("received").map(|piece| piece.to_vec()),
                None => Some(Vec::new()),
            },
            2 => {
                let mut room = vec![0; 1 + stage.below(3_000.min($most))];
                match stage.cut(stream.recv_exact(&mut room)).await {
                    Some(Ok(())) => Some(room),
                    // Fewer are left, and they are still there.
                    Some(Err(error)) => {
                        assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "{error}");
                        stream.recv().await.expect("received").map(|piece| piece.to_vec())
                    }
                    None => Some(Vec::new()),
                }
            }
            3 => {
                let most = 1 + stage.below(5_000);
                match stage.cut(stream.recv_into(Vec::new(), most)).await {
                    Some((n, data)) => (n.expect("received") > 0).then_some(data),
                    None => Some(Vec::new()),
                }
            }
            4 => match stage.cut(stream.peek()).await {
                Some(seen) => match seen.expect("looked") {
                    Some(seen) => {
                        let piece = stream.try_recv().expect("it is there").expect("not the end");
                        assert_eq!(piece[..], seen[..], "peek shows what the next receive gives");
                        Some(piece.to_vec())
                    }
                    None => None,
                },
                None => Some(Vec::new()),
            },
            _ => match stream.try_recv() {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    drop(stage.cut(stream.readable()).await);
                    Some(Vec::new())
                }
                received => received.expect("received").map(|piece| piece.to_vec()),
            },
        }
    }};
}

/// One sending operation of any stream, cut off or not: how many bytes of `pending` it took over.
macro_rules! send {
    ($stage:expr, $stream:expr, $pending:expr) => {{
        let (stage, stream): (&Stage, _) = ($stage, &mut $stream);
        let len = $pending.len().min(1 + stage.below(4_000));
        let payload = $pending[..len].to_vec();
        match stage.below(7) {
            0 | 1 => match stage.cut(stream.send(payload)).await {
                Some(sent) => sent.map(|()| len).expect("sent"),
                None => 0,
            },
            2 => {
                let (head, tail) = payload.split_at(len / 2);
                match stage.cut(stream.send_vectored([head.to_vec(), tail.to_vec()])).await {
                    Some(sent) => sent.map(|()| len).expect("sent"),
                    None => 0,
                }
            }
            3 => match stage.cut(alloc(Duration::from_millis(5))).await {
                Some(Ok(mut composed)) => {
                    let len = composed.put(&payload);
                    match stage.cut(stream.send(composed.freeze())).await {
                        Some(sent) => sent.map(|()| len).expect("sent"),
                        None => 0,
                    }
                }
                Some(Err(error)) => {
                    assert_eq!(error.kind(), ErrorKind::QuotaExceeded, "a named error: {error}");
                    0
                }
                None => 0,
            },
            4 => {
                drop(stage.cut(stream.flush()).await);
                0
            }
            5 => {
                drop(stage.cut(stream.writable()).await);
                0
            }
            _ => stream.try_send(payload).map_or(0, |()| len),
        }
    }};
}

/// Sends back everything that comes, by operations that are cut off.
macro_rules! echo {
    ($stage:expr, $stream:expr) => {{
        let (stage, mut stream): (Shared, _) = ($stage, $stream);
        let mut pending: Vec<u8> = Vec::new();
        let mut reads = true;
        while reads || !pending.is_empty() {
            if reads && (pending.len() < 20_000 && stage.below(2) == 0 || pending.is_empty()) {
                match receive!(&stage, stream, 3_000) {
                    Some(piece) => pending.extend_from_slice(&piece),
                    None => reads = false,
                }
            }
            if !pending.is_empty() {
                let taken = send!(&stage, stream, pending);
                pending.drain(..taken);
            }
        }
        stage.until_done(|| yield_now()).await;
        stream.flush().await.expect("sent");
    }};
}

/// Sends in pieces of any size while reading what comes back, and compares.
fn exchange<S: Read + Write + Send>(mut from: S, mut to: S, finish: impl FnOnce(&S) + Send, seed: u64) {
    let mut rng = Rng::new(seed ^ 0xabcd);
    let bytes = pattern(seed, rng.within(1, 120_000));
    let mut got = Vec::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let (piece, behind) = rest.split_at(rng.within(1, 9_000).min(rest.len()));
                to.write_all(piece).expect("written");
                if rng.one_in(4) {
                    std::thread::yield_now();
                }
                rest = behind;
            }
            finish(&to);
        });
        from.read_to_end(&mut got).expect("read to the end");
    });
    same_bytes(&got, &bytes, &format!("seed {seed}"));
}

fn tcp_peer(addr: SocketAddr, seed: u64) {
    let to = connect(addr);
    let from = to.try_clone().expect("cloned");
    exchange(from, to, |to| to.shutdown(Shutdown::Write).expect("finished"), seed);
}

fn unix_peer(path: &std::path::Path, seed: u64) {
    let to = StdUnix::connect(path).expect("connected");
    let from = to.try_clone().expect("cloned");
    exchange(from, to, |to| to.shutdown(Shutdown::Write).expect("finished"), seed);
}

/// Accepts so many connections by futures that are cut off; none is lost.
async fn serve_tcp(stage: &Shared, seed: u64, count: u64) -> Vec<JoinHandle<()>> {
    let mut listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let addr = listener.local_addr().expect("its address");
    (0..count).for_each(|n| peer(move || tcp_peer(addr, seed * 1000 + n)));
    let mut tasks = Vec::new();
    while (tasks.len() as u64) < count {
        let Some(stream) = stage.cut(listener.accept()).await else { continue };
        let (stage, stream) = (stage.clone(), stream.expect("accepted"));
        tasks.push(spawn(async move { echo!(stage, stream) }));
    }
    tasks
}

async fn serve_unix(stage: &Shared, seed: u64, count: u64) -> Vec<JoinHandle<()>> {
    let path = std::env::temp_dir().join(format!("corelane-cancel-{}-{seed}.sock", std::process::id()));
    drop(std::fs::remove_file(&path));
    let mut listener = UnixListener::bind(&path).await.expect("bound");
    for n in 0..count {
        let path = path.clone();
        peer(move || unix_peer(&path, seed * 1000 + 500 + n));
    }
    let mut tasks = Vec::new();
    while (tasks.len() as u64) < count {
        let Some(stream) = stage.cut(listener.accept()).await else { continue };
        let (stage, stream) = (stage.clone(), stream.expect("accepted"));
        tasks.push(spawn(async move { echo!(stage, stream) }));
    }
    std::fs::remove_file(&path).expect("removed");
    tasks
}

/// An echo server of the standard library: as many connections as come, until `over` says so.
fn std_echo(listener: StdListener, over: std::sync::mpsc::Receiver<()>) {
    let mut threads = Vec::new();
    listener.set_nonblocking(true).expect("set");
    while over.try_recv() != Err(std::sync::mpsc::TryRecvError::Disconnected) {
        match listener.accept() {
            Ok((mut stream, _)) => threads.push(std::thread::spawn(move || {
                stream.set_nonblocking(false).expect("set");
                let mut room = [0; 3_000];
                // An attempt that was given up is reset or closed.
                while let Ok(n) = stream.read(&mut room) {
                    if n == 0 || stream.write_all(&room[..n]).is_err() {
                        break;
                    }
                }
            })),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
                std::thread::park_timeout(Duration::from_millis(1));
            }
        }
    }
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
}

/// Connects by futures that are cut off, and talks to a foreign server in both directions at once.
async fn call(stage: Shared, addr: SocketAddr, seed: u64) {
    let mut stream = stage.until_done(|| TcpStream::connect(addr)).await.expect("connected");
    let bytes = pattern(seed, 1 + stage.below(60_000));
    let (mut sent, mut got) = (0, Vec::new());
    while got.len() < bytes.len() {
        if sent < bytes.len() && stage.below(2) == 0 {
            let rest = &bytes[sent..];
            sent += send!(&stage, stream, rest);
        } else if got.len() < sent {
            got.extend_from_slice(&receive!(&stage, stream, sent - got.len()).expect("not the end"));
        }
    }
    same_bytes(&got, &bytes, &format!("seed {seed}"));
    stream.shutdown();
    assert_eq!(stream.recv().await.expect("received").map(|piece| piece.len()), None);
}

/// Datagrams, a few on their way at a time: each arrives once and in order, whatever was cut.
async fn datagrams(stage: Shared, count: u32) {
    let mut socket = UdpSocket::bind(any_port()).await.expect("bound");
    let addr = socket.local_addr().expect("its address");
    peer(move || {
        let foreign = StdUdp::bind(any_port()).expect("bound");
        foreign.set_read_timeout(Some(PATIENCE)).expect("set");
        let mut room = [0; 16];
        let answers = |foreign: &StdUdp, n: u32, room: &mut [u8]| {
            let len = foreign.recv(room).expect("an answer");
            assert_eq!(room[..len], n.to_le_bytes(), "once, and in order");
        };
        for n in 0..count {
            foreign.send_to(&n.to_le_bytes(), addr).expect("sent");
            if n >= 4 {
                answers(&foreign, n - 4, &mut room);
            }
        }
        (count - 4..count).for_each(|n| answers(&foreign, n, &mut room));
    });
    for n in 0..count {
        let datagram = loop {
            if let Some(datagram) = stage.cut(socket.recv_from()).await {
                break datagram.expect("received");
            }
        };
        assert_eq!(datagram.bytes[..], n.to_le_bytes(), "once, and in order");
        socket.send_to(datagram.bytes.to_vec(), datagram.from).await.expect("sent");
    }
}

/// Permits that are waited for by futures that are cut off: none is lost.
async fn permits(stage: Shared) {
    let semaphore = Rc::new(Semaphore::new(3));
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let (stage, semaphore) = (stage.clone(), semaphore.clone());
            spawn(async move {
                for _ in 0..20 {
                    let permit = stage.until_done(|| semaphore.acquire()).await.expect("never closed");
                    stage.cut(sleep(Duration::from_micros(200))).await;
                    drop(permit);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    assert_eq!(semaphore.available_permits(), 3);
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("there").count()
}

/// The only test of this file, because it counts the process's descriptors.
#[test]
fn futures_dropped_at_any_await_point_lose_no_byte_and_leave_nothing() {
    on_each_backend(|builder| {
        let kernels = [UringFeatures::ALL, UringFeatures::LINUX_5_19, UringFeatures::LEAST];
        for (seed, uring) in seeds().zip(kernels.into_iter().cycle()) {
            println!("seed {seed}");
            let before = open_descriptors();
            let builder = builder.clone().worker(WorkerConfig { uring, ..small() });
            run(builder, move || async move {
                let stage = Stage::new(seed);
                let foreign = StdListener::bind(any_port()).expect("bound");
                let addr = foreign.local_addr().expect("its address");
                let (going, over) = std::sync::mpsc::channel::<()>();
                peer(move || std_echo(foreign, over));
                let mut tasks = serve_tcp(&stage, seed, 6).await;
                tasks.extend(serve_unix(&stage, seed, 3).await);
                tasks.extend((0..4).map(|n| spawn(call(stage.clone(), addr, seed * 1000 + 900 + n))));
                tasks.push(spawn(datagrams(stage.clone(), 60)));
                tasks.push(spawn(permits(stage.clone())));
                for task in tasks {
                    task.await.expect("no panic");
                }
                drop(going);
                let (done, cut) = (stage.done.get(), stage.cut.get());
                println!("{done} done, {cut} cut");
                assert!(done > 200 && cut > 200, "{done} done, {cut} cut");
            });
            assert_eq!(open_descriptors(), before, "seed {seed}: descriptors");
        }
    });
}
