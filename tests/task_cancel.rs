//! Futures that are dropped at any await point, on the real kernel, with peers that are not corelane: whatever was cut
//! off, every byte arrives once and in order, and nothing is left behind. `sim_cancel.rs` does the same in simulated
//! worlds, with resets and faults, over many more seeds; `CORELANE_CANCEL_SEEDS=0..500` widens the search here.
#![cfg(target_os = "linux")]

mod cancel_common;
#[path = "cancel_common/foreign.rs"]
mod foreign;
#[path = "cancel_common/stage.rs"]
mod stage;
mod support;
mod task_common;

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener as StdListener, UdpSocket as StdUdp};
use std::os::unix::net::UnixListener as StdUnixListener;
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

use corelane::net::{TcpStream, UdpSocket, UnixListener, UnixStream, alloc};
use corelane::sync::Semaphore;
use corelane::task::{JoinHandle, spawn, yield_now};
use corelane::time::sleep;
use corelane::{
    BufferConfig, Builder, ConnectConfig, Descriptors, Snapshot, SocketOptions, UringFeatures, WorkerConfig,
};
use foreign::*;
use stage::*;
use support::{PATIENCE, any_port, connect, counters, end_of, eventually, pattern, same_bytes};
use task_common::*;

/// Connections of a worker on which more are wanted, and send buffers, which are fewer still.
const CROWD: u32 = 3;
const BUFFERS: u32 = 2;

/// One receiving operation of any stream, cut off or not: what it brought, `None` at the end. At most so many bytes
/// will come unless the stream ends.
macro_rules! receive {
    ($stage:expr, $stream:expr, $most:expr) => {{
        let (stage, stream): (&Stage, _) = ($stage, &mut $stream);
        match stage.below(6) {
            0 | 1 => match stage.cut("recv", stream.recv()).await {
                Some(received) => received.expect("received").map(|piece| piece.to_vec()),
                None => Some(Vec::new()),
            },
            2 => {
                let mut room = vec![0; 1 + stage.below(3_000.min($most))];
                match stage.cut("recv_exact", stream.recv_exact(&mut room)).await {
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
                match stage.cut("recv_into", stream.recv_into(Vec::new(), most)).await {
                    Some((n, data)) => (n.expect("received") > 0).then_some(data),
                    None => Some(Vec::new()),
                }
            }
            4 => match stage.cut("peek", stream.peek()).await {
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
                    if let Some(readable) = stage.cut("readable", stream.readable()).await {
                        readable.expect("readable");
                    }
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
            0 | 1 => match stage.cut("send", stream.send(payload)).await {
                Some(sent) => sent.map(|()| len).expect("sent"),
                None => 0,
            },
            2 => {
                let (head, tail) = payload.split_at(len / 2);
                match stage.cut("send_vectored", stream.send_vectored([head.to_vec(), tail.to_vec()])).await {
                    Some(sent) => sent.map(|()| len).expect("sent"),
                    None => 0,
                }
            }
            3 => match stage.cut("alloc", alloc(Duration::from_millis(5))).await {
                Some(Ok(mut composed)) => {
                    let len = composed.put(&payload);
                    match stage.cut("send", stream.send(composed.freeze())).await {
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
                if let Some(flushed) = stage.cut("flush", stream.flush()).await {
                    flushed.expect("flushed");
                    assert_eq!(stream.unsent(), 0, "the kernel has taken everything");
                }
                0
            }
            5 => {
                if let Some(writable) = stage.cut("writable", stream.writable()).await {
                    writable.expect("writable");
                }
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
        stage.until_done("yield_now", yield_now).await;
        stream.flush().await.expect("sent");
    }};
}

/// Accepts so many connections by futures that are cut off, none of which is lost, and sends back what comes.
async fn serve_tcp(stage: &Shared, seed: u64, count: u64) -> Vec<JoinHandle<()>> {
    let (mut listener, addr) = stage.bind().await;
    (0..count).for_each(|n| peer(move || tcp_peer(addr, seed * 1000 + n)));
    let mut tasks = Vec::new();
    while (tasks.len() as u64) < count {
        let (stage, stream) = (stage.clone(), stage.accept(&mut listener).await);
        tasks.push(spawn(async move { echo!(stage, stream) }));
    }
    tasks
}

async fn serve_unix(stage: &Shared, seed: u64, count: u64) -> Vec<JoinHandle<()>> {
    let path = stage.path(seed);
    let mut listener = UnixListener::bind(&path).await.expect("bound");
    for n in 0..count {
        let path = path.clone();
        peer(move || unix_peer(&path, seed * 1000 + 500 + n));
    }
    let mut tasks = Vec::new();
    while (tasks.len() as u64) < count {
        let Some(stream) = stage.cut("accept", listener.accept()).await else { continue };
        let (stage, stream) = (stage.clone(), stream.expect("accepted"));
        tasks.push(spawn(async move { echo!(stage, stream) }));
    }
    std::fs::remove_file(&path).expect("removed");
    tasks
}

/// Talks to a foreign server that sends everything back, in both directions at once.
macro_rules! call {
    ($stage:expr, $connect:expr, $seed:expr) => {{
        let (stage, seed): (Shared, u64) = ($stage, $seed);
        let mut stream = stage.until_done("connect", $connect).await.expect("connected");
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
    }};
}

/// Runs a foreign echo server until the sender is dropped.
fn echo_server() -> (SocketAddr, mpsc::Sender<()>) {
    let (going, over) = mpsc::channel();
    let server = StdListener::bind(any_port()).expect("bound");
    let addr = server.local_addr().expect("its address");
    server.set_nonblocking(true).expect("set");
    let accept = move || {
        let (stream, _) = server.accept()?;
        stream.set_nonblocking(false).map(|()| stream)
    };
    peer(move || std_echo(accept, over));
    (addr, going)
}

/// Connections to foreign servers, by futures that are cut off.
fn calls(stage: &Shared, seed: u64) -> (Vec<JoinHandle<()>>, [mpsc::Sender<()>; 2]) {
    let (addr, tcp_going) = echo_server();
    let (unix_going, over) = mpsc::channel();
    let path = stage.path(seed);
    let server = StdUnixListener::bind(&path).expect("bound");
    server.set_nonblocking(true).expect("set");
    let removed = path.clone();
    let accept = move || {
        let (stream, _) = server.accept()?;
        stream.set_nonblocking(false).map(|()| stream)
    };
    peer(move || {
        std_echo(accept, over);
        std::fs::remove_file(removed).expect("removed");
    });
    let mut tasks: Vec<_> = (0..4)
        .map(|n| {
            let stage = stage.clone();
            spawn(async move { call!(stage, || TcpStream::connect(addr), seed * 1000 + 900 + n) })
        })
        .collect();
    let stage = stage.clone();
    tasks.push(spawn(async move { call!(stage, || UnixStream::connect(&path), seed * 1000 + 950) }));
    (tasks, [tcp_going, unix_going])
}

/// The two directions in tasks of their own. The last that is sent is a `send_all` that may be cut: it was sent as a
/// whole or not at all.
async fn halves(stage: Shared, seed: u64) {
    let (mut listener, addr) = stage.bind().await;
    let (tell, told) = mpsc::channel();
    let theirs = pattern(seed, 1 + stage.below(60_000));
    let wanted = theirs.clone();
    peer(move || {
        let to = connect(addr);
        let (got, outcome) = converse(to.try_clone().expect("cloned"), to, &theirs, seed);
        outcome.expect("sent everything, and read to the end");
        let (sent, perhaps): (usize, usize) = told.recv().expect("the task says");
        same_bytes(&got, &pattern(seed + 1, got.len()), &format!("seed {seed}"));
        let got = got.len();
        assert!(got == sent || got == sent + perhaps, "{got} bytes of {sent}, and {perhaps} or nothing");
    });
    let stream = stage.accept(&mut listener).await;
    let (mut from, mut to) = stream.into_split();
    let shared = stage.clone();
    let reader = spawn(async move {
        let mut got = Vec::new();
        while let Some(piece) = receive!(&shared, from, 3_000) {
            got.extend_from_slice(&piece);
        }
        (got, from)
    });
    let shared = stage.clone();
    let writer = spawn(async move {
        let ours = pattern(seed + 1, 1 + shared.below(60_000));
        let (body, last) = ours.split_at(shared.below(ours.len()));
        let mut sent = 0;
        while sent < body.len() {
            let rest = &body[sent..];
            sent += send!(&shared, to, rest);
        }
        let perhaps = match shared.cut("send_all", to.send_all(last.to_vec())).await {
            Some(done) => {
                done.expect("sent");
                sent += last.len();
                0
            }
            None => last.len(),
        };
        tell.send((sent, perhaps)).expect("the peer waits");
        // Dropped here, or together with the other half.
        (shared.below(2) == 0).then_some(to)
    });
    let to = stage.join(writer).await.expect("no panic");
    if let Some(mut to) = to {
        to.shutdown();
        let (got, from) = stage.join(reader).await.expect("no panic");
        same_bytes(&got, &wanted, &format!("seed {seed}"));
        drop(TcpStream::reunite(from, to).expect("halves of one stream"));
    } else {
        let (got, _from) = stage.join(reader).await.expect("no panic");
        same_bytes(&got, &wanted, &format!("seed {seed}"));
    }
}

/// A task that is aborted with everything in it: its peer sees an end or a reset, after the beginning of what it sent.
async fn aborted(stage: Shared, seed: u64) {
    let (mut listener, addr) = stage.bind().await;
    peer(move || {
        let to = connect(addr);
        let bytes = pattern(seed, 60_000);
        let (got, outcome) = converse(to.try_clone().expect("cloned"), to, &bytes, seed);
        same_bytes(&got, &bytes[..got.len()], &format!("seed {seed}"));
        if let Err(error) = outcome {
            let reset = [ErrorKind::ConnectionReset, ErrorKind::BrokenPipe, ErrorKind::NotConnected];
            assert!(reset.contains(&error.kind()), "seed {seed}: {error}");
        }
    });
    let stream = stage.accept(&mut listener).await;
    let shared = stage.clone();
    let task = spawn(async move { echo!(shared, stream) });
    sleep(Duration::from_micros(stage.below(8_000) as u64)).await;
    task.abort();
    if let Err(error) = stage.join(task).await {
        assert!(error.is_aborted(), "{error}");
    }
}

/// Asks about a connection: the answer to a question whose asker has gone is not taken for the answer to the next.
async fn questions(stage: Shared) {
    let (mut listener, own) = stage.bind().await;
    let (tell, told) = mpsc::channel();
    peer(move || {
        let client = connect(own);
        tell.send(client.local_addr().expect("its address")).expect("the task waits");
        // An abort, or an end.
        let _ = end_of(client);
    });
    let stream = stage.accept(&mut listener).await;
    let theirs = told.recv().expect("the peer says");
    for round in 0..40 {
        match stage.below(3) {
            0 => {
                let options = SocketOptions { nodelay: round % 2 == 0, ..SocketOptions::default() };
                let set = stage.cut("set_options", stream.set_options(&options)).await;
                set.into_iter().for_each(|set| set.expect("set"));
            }
            1 => {
                let peer = stage.cut("peer_addr", stream.peer_addr()).await;
                peer.into_iter().for_each(|peer| assert_eq!(peer.expect("known"), theirs));
            }
            _ => {
                let local = stage.cut("local_addr", stream.local_addr()).await;
                local.into_iter().for_each(|local| assert_eq!(local.expect("known"), own));
            }
        }
    }
    stream.abort();
}

/// Datagrams, a few on their way at a time: each arrives once and in order, whatever was cut.
async fn datagrams(stage: Shared, count: u32) {
    let mut socket = stage.until_done("bind_udp", || UdpSocket::bind(any_port())).await.expect("bound");
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
            if let Some(datagram) = stage.cut("recv_from", socket.recv_from()).await {
                break datagram.expect("received");
            }
        };
        assert_eq!(datagram.bytes[..], n.to_le_bytes(), "once, and in order");
        socket.send_to(datagram.bytes.to_vec(), datagram.from).await.expect("sent");
    }
}

/// Datagrams whose sending is cut off: one that was cut is sent or not, one that was not cut is, and none twice.
async fn cut_datagrams(stage: Shared) {
    let foreign = StdUdp::bind(any_port()).expect("bound");
    foreign.set_read_timeout(Some(PATIENCE)).expect("set");
    let addr = foreign.local_addr().expect("its address");
    let (tell, told) = mpsc::channel::<BTreeSet<u32>>();
    let (seen_all, all_seen) = mpsc::channel();
    peer(move || {
        let (mut seen, mut room) = (BTreeSet::new(), [0; 100]);
        for done in told {
            while !done.is_subset(&seen) {
                foreign.recv(&mut room).expect("what was sent");
                let n = u32::from_le_bytes(*room.first_chunk().expect("four bytes"));
                assert!(seen.insert(n), "{n} is not sent twice");
            }
            seen_all.send(()).expect("the task waits");
        }
    });
    let socket = stage.until_done("bind_udp", || UdpSocket::bind(any_port())).await.expect("bound");
    // No more at a time than the foreign socket's buffer has room for.
    for batch in 0..6u32 {
        let mut done = BTreeSet::new();
        for n in batch * 50..batch * 50 + 50 {
            // Of many lengths, so that the result of another is known as such.
            let mut bytes = n.to_le_bytes().to_vec();
            bytes.resize(4 + n as usize % 89, 0);
            let len = bytes.len();
            if let Some(sent) = stage.cut("send_to", socket.send_to(bytes, addr)).await {
                assert_eq!(sent.expect("sent"), len, "the result of this one");
                done.insert(n);
            }
        }
        tell.send(done).expect("the peer waits");
        until("the peer has all that were not cut", || all_seen.try_recv().is_ok()).await;
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
                    let permit =
                        stage.until_done("acquire", || semaphore.acquire()).await.expect("never closed");
                    stage.cut("sleep", sleep(Duration::from_micros(200))).await;
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

/// More tasks than there are connections and send buffers, waiting for them by futures that are cut off: at the end there
/// is as much to have as at first.
async fn crowd(stage: Shared, addr: SocketAddr) {
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let stage = stage.clone();
            spawn(async move {
                for _ in 0..6 {
                    let within = ConnectConfig { timeout: PATIENCE, ..ConnectConfig::new(addr) };
                    let connecting = || TcpStream::connect(within.clone());
                    let mut stream = stage.until_done("crowd_connect", connecting).await.expect("room");
                    let mut composed =
                        stage.until_done("crowd_alloc", || alloc(PATIENCE)).await.expect("a buffer");
                    composed.put(b"hello");
                    stage.cut("sleep", sleep(Duration::from_micros(200))).await;
                    stream.send(composed.freeze()).await.expect("sent");
                    let mut answer = [0; 5];
                    stream.recv_exact(&mut answer).await.expect("the answer");
                    assert_eq!(&answer, b"hello");
                    // Its room is there at once, and not when the server has closed too.
                    stream.abort();
                }
            })
        })
        .collect();
    for task in tasks {
        stage.join(task).await.expect("no panic");
    }
    let (mut streams, mut buffers) = (Vec::new(), Vec::new());
    for _ in 0..CROWD {
        streams.push(TcpStream::connect(addr).await.expect("room"));
    }
    for _ in 0..BUFFERS {
        buffers.push(alloc(PATIENCE).await.expect("a buffer"));
    }
    streams.into_iter().for_each(TcpStream::abort);
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("there").count()
}

/// Runs one worker's main task, after which it is at rest again, and not only when the worker has ended.
fn history<F: Future<Output = ()> + 'static>(
    builder: Builder,
    seed: u64,
    main: impl FnOnce(Shared) -> F + Send + 'static,
) -> Tally {
    let (say, said) = mpsc::channel();
    let (go, told) = mpsc::channel::<()>();
    let mut total = Tally::new();
    let main = move || async move {
        let before = open_descriptors();
        let stage = Stage::new(seed);
        main(stage.clone()).await;
        say.send((before, stage.tally.take())).expect("the test waits");
        // Until the test has seen enough, or has failed.
        while told.try_recv() == Err(mpsc::TryRecvError::Empty) {
            sleep(Duration::from_millis(1)).await;
        }
    };
    watch(builder, main, |runtime| {
        // One that panicked is told by the stop.
        let Ok((before, tally)) = said.recv_timeout(2 * PATIENCE) else { return };
        let rest = |now: &Snapshot| (now.tasks, now.connections, now.buffers_out) == (1, 0, 0);
        let now = counters(runtime, "no task but the first, no connection, no buffer", rest);
        assert_eq!((now.tasks_panicked, now.stale), (0, 0), "{now:#?}");
        eventually("as many descriptors as at first", || open_descriptors() == before);
        total = tally;
        go.send(()).expect("the main task waits");
    });
    total
}

/// Everything at once.
async fn everything(stage: Shared, seed: u64) {
    let (mut tasks, going) = calls(&stage, seed);
    tasks.extend(serve_tcp(&stage, seed, 6).await);
    tasks.extend(serve_unix(&stage, seed, 3).await);
    tasks.extend((0..3).map(|n| spawn(halves(stage.clone(), seed * 1000 + 600 + 10 * n))));
    tasks.extend((0..4).map(|n| spawn(aborted(stage.clone(), seed * 1000 + 700 + n))));
    if seed.is_multiple_of(2) {
        // Of a ring's own descriptors only later kernels can be asked.
        tasks.push(spawn(questions(stage.clone())));
    }
    tasks.push(spawn(datagrams(stage.clone(), 60)));
    tasks.push(spawn(cut_datagrams(stage.clone())));
    tasks.push(spawn(permits(stage.clone())));
    for task in tasks {
        stage.join(task).await.expect("no panic");
    }
    drop(going);
}

/// The only test of this file, because it counts the process's descriptors.
#[test]
fn futures_dropped_at_any_await_point_lose_no_byte_and_leave_nothing() {
    on_each_backend(|builder| {
        let kernels = [UringFeatures::ALL, UringFeatures::LINUX_5_19, UringFeatures::LEAST];
        let mut total = Tally::new();
        for seed in seeds() {
            println!("seed {seed}");
            let before = open_descriptors();
            let uring = kernels[seed as usize / 2 % 3];
            // The process's table shows what a worker holds as ordinary descriptors; others are in the ring's.
            let descriptors = if seed.is_multiple_of(2) { Descriptors::Fd } else { Descriptors::Direct };
            let config = WorkerConfig { uring, descriptors, ..small() };
            let builder = builder.clone();
            let crowded = builder.clone().worker(WorkerConfig {
                max_connections: CROWD,
                buffers: BufferConfig { send_count: BUFFERS, ..config.buffers },
                ..config.clone()
            });
            let everything = history(builder.worker(config), seed, move |stage| everything(stage, seed));
            let crowd = history(crowded, seed, |stage| async move {
                let (addr, _going) = echo_server();
                crowd(stage, addr).await;
            });
            for (what, [done, cut]) in everything.into_iter().chain(crowd) {
                let sum = total.entry(what).or_default();
                *sum = [sum[0] + done, sum[1] + cut];
            }
            assert_eq!(open_descriptors(), before, "seed {seed}: descriptors");
        }
        for (what, [done, cut]) in &total {
            println!("{what}: {done} done, {cut} cut");
        }
        // One seed alone need not have had everything in it.
        if std::env::var_os(SEEDS).is_none() {
            assert_eq!(total.len(), 26, "an operation was never tried");
            assert!(total.values().all(|[done, cut]| *done > 3 && *cut > 3), "{total:?}");
        }
    });
}
