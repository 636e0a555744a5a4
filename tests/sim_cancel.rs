//! Futures that are dropped at any await point, in a simulated world: programs of random operations, each cut off after
//! a random number of polls or at a random time. Whatever was cut, both sides have received exactly what was sent, in
//! order and each byte once; what a cut future had begun is gone; and at the end everything is where it was.

mod cancel_common;
mod sim_common;

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use corelane::net::{OwnedReadHalf, OwnedWriteHalf, TcpListener, TcpStream, alloc};
use corelane::sim::{Faults, Peer, PeerListener, Sim, SimConfig, SimWorker, StuckReason};
use corelane::task::{JoinHandle, Message, spawn, yield_now};
use corelane::time::{sleep, timeout};
use corelane::{Buf, BufferConfig, ConnectConfig, WorkerConfig};
use futures::future::{Either, select};
use sim_common::*;

/// Where programs bind listeners of their own.
fn late_addr(index: u64) -> SocketAddr {
    SocketAddr::from(([10, 1, 0, 1], 7100 + index as u16))
}

/// Byte `at` of the stream of that number: the number itself, then what belongs at that place and nowhere else.
fn byte(number: u32, at: usize) -> u8 {
    if at < 4 {
        return number.to_le_bytes()[at];
    }
    let mixed = (u64::from(number) << 32 | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 40) as u8
}

fn bytes(number: u32, from: usize, len: usize) -> Vec<u8> {
    (from..from + len).map(|at| byte(number, at)).collect()
}

/// Whether these are the first bytes of somebody's stream.
fn is_prefix(got: &[u8]) -> bool {
    let Some(head) = got.first_chunk() else { return true };
    let number = u32::from_le_bytes(*head);
    got.iter().enumerate().all(|(at, &got)| got == byte(number, at))
}

/// Numbers of streams that tasks send; those of peers are without it. Tasks connect to each other too.
const OURS: u32 = 1 << 31;

/// How a side's receiving ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum End {
    #[default]
    NotSeen,
    Eof,
    Failed,
}

/// What a connection's tasks know of it.
#[derive(Default)]
struct Side {
    number: u32,
    got: Vec<u8>,
    end: End,
    /// Bytes that were accepted for sending, and those of a `send_all` that was cut: sent or not, as a whole.
    sent: usize,
    perhaps: usize,
    aborted: bool,
}

impl Side {
    fn take(&mut self, piece: &[u8]) {
        assert!(!piece.is_empty(), "a received piece is never empty");
        assert_eq!(self.end, End::NotSeen, "something after the end");
        self.got.extend_from_slice(piece);
        assert!(
            is_prefix(&self.got),
            "connection {}: not what was sent, in {} bytes",
            self.number,
            self.got.len()
        );
    }

    /// Takes note of what a receive came to; whether there may be more.
    fn note(&mut self, received: std::io::Result<Option<Buf>>) -> Option<Buf> {
        match received {
            Ok(Some(piece)) => {
                self.take(&piece);
                return Some(piece);
            }
            Ok(None) => self.end = End::Eof,
            Err(_) if self.end == End::NotSeen => self.end = End::Failed,
            Err(_) => {}
        }
        None
    }

    /// The next bytes to send.
    fn next(&self, len: usize) -> Vec<u8> {
        bytes(self.number, self.sent, len)
    }
}

/// How often operations were done, and cut.
#[derive(Clone, Copy, Default)]
struct Tally {
    done: u64,
    cut: u64,
}

/// What the programs of a history share.
struct Stage {
    dice: Cell<u64>,
    ending: Cell<bool>,
    sides: RefCell<Vec<Rc<RefCell<Side>>>>,
    handles: RefCell<Vec<JoinHandle<()>>>,
    tally: RefCell<Vec<(&'static str, Tally)>>,
}

type Shared = Rc<Stage>;

impl Stage {
    fn new(seed: u64) -> Shared {
        Rc::new(Self {
            dice: Cell::new(seed ^ 0x00c0_ffee),
            ending: Cell::new(false),
            sides: RefCell::default(),
            handles: RefCell::default(),
            tally: RefCell::default(),
        })
    }

    fn below(&self, n: u64) -> u64 {
        let next =
            self.dice.get().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.dice.set(next);
        (next >> 33) % n
    }

    fn count(&self, what: &'static str, done: bool) {
        let mut tally = self.tally.borrow_mut();
        let at = tally.iter().position(|(name, _)| *name == what).unwrap_or_else(|| {
            tally.push((what, Tally::default()));
            tally.len() - 1
        });
        if done {
            tally[at].1.done += 1;
        } else {
            tally[at].1.cut += 1;
        }
    }

    fn side(&self) -> Rc<RefCell<Side>> {
        let mut sides = self.sides.borrow_mut();
        let side = Side { number: OURS | sides.len() as u32, ..Side::default() };
        let side = Rc::new(RefCell::new(side));
        sides.push(side.clone());
        side
    }

    fn spawn(self: &Rc<Self>, future: impl Future<Output = ()> + 'static) {
        self.handles.borrow_mut().push(spawn(future));
    }

    /// Runs a future for so long as chance has it, and then drops it where it is, when it is done, or when it did not
    /// get there in a second.
    async fn cut<F: Future>(&self, what: &'static str, future: F) -> Option<F::Output> {
        let outcome = match self.below(cancel_common::WAYS + 1) {
            cancel_common::WAYS => timeout(SECOND, future).await.ok(),
            way => cancel_common::cut(way, |n| self.below(n), millis(3), millis(50), future).await,
        };
        self.count(what, outcome.is_some());
        outcome
    }
}

/// What comes after an operation.
#[derive(PartialEq, Eq)]
enum Next {
    Go,
    Over,
}

fn go(on: bool) -> Next {
    if on { Next::Go } else { Next::Over }
}

/// One receiving operation.
macro_rules! receive {
    ($stage:expr, $side:expr, $kept:expr, $stream:expr) => {{
        let (stage, side): (&Shared, &RefCell<Side>) = ($stage, $side);
        match stage.below(6) {
            0 | 1 => match stage.cut("recv", $stream.recv()).await {
                Some(received) => match side.borrow_mut().note(received) {
                    Some(piece) => {
                        // Leases that are kept keep buffers from everybody.
                        if stage.below(4) == 0 {
                            $kept.push(piece);
                        }
                        Next::Go
                    }
                    None => Next::Over,
                },
                None => Next::Go,
            },
            2 => {
                let mut room = vec![0; 1 + stage.below(2_000) as usize];
                match stage.cut("recv_exact", $stream.recv_exact(&mut room)).await {
                    Some(Ok(())) => {
                        side.borrow_mut().take(&room);
                        Next::Go
                    }
                    // What it had found is there to be received, and then the end.
                    Some(Err(_)) => loop {
                        let received = $stream.recv().await;
                        if side.borrow_mut().note(received).is_none() {
                            break Next::Over;
                        }
                    },
                    None => Next::Go,
                }
            }
            3 => {
                let most = 1 + stage.below(3_000) as usize;
                match stage.cut("recv_into", $stream.recv_into(Vec::new(), most)).await {
                    Some((Ok(0), _)) => {
                        side.borrow_mut().end = End::Eof;
                        Next::Over
                    }
                    Some((Ok(n), data)) => {
                        assert!(n == data.len() && n <= most);
                        side.borrow_mut().take(&data);
                        Next::Go
                    }
                    Some((Err(_), _)) => {
                        side.borrow_mut().end = End::Failed;
                        Next::Over
                    }
                    None => Next::Go,
                }
            }
            4 => match stage.cut("peek", $stream.peek()).await {
                Some(Ok(Some(seen))) => {
                    let before = side.borrow().got.len();
                    match $stream.try_recv() {
                        Ok(Some(piece)) => {
                            assert_eq!(piece[..], seen[..], "peek shows what the next receive gives");
                            side.borrow_mut().take(&piece);
                        }
                        other => panic!("peek had {} bytes after {before}, then: {other:?}", seen.len()),
                    }
                    Next::Go
                }
                Some(Ok(None)) => {
                    side.borrow_mut().end = End::Eof;
                    Next::Over
                }
                Some(Err(_)) => {
                    side.borrow_mut().end = End::Failed;
                    Next::Over
                }
                None => Next::Go,
            },
            _ => match $stream.try_recv() {
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Next::Go,
                received => go(side.borrow_mut().note(received).is_some()),
            },
        }
    }};
}

/// One sending operation.
macro_rules! send {
    ($stage:expr, $side:expr, $stream:expr) => {{
        let (stage, side): (&Shared, &RefCell<Side>) = ($stage, $side);
        let len = 1 + stage.below(1_500) as usize;
        let payload = side.borrow().next(len);
        let sent = match stage.below(8) {
            0..=2 => stage.cut("send", $stream.send(payload)).await.map(|sent| sent.map(|()| len)),
            3 => {
                let (head, tail) = payload.split_at(len / 2);
                let pieces = [head.to_vec(), tail.to_vec()];
                stage.cut("send_vectored", $stream.send_vectored(pieces)).await.map(|sent| sent.map(|()| len))
            }
            4 => match stage.cut("alloc", alloc(millis(1 + stage.below(20)))).await {
                Some(Ok(mut composed)) => {
                    let len = composed.put(&payload);
                    stage.cut("send", $stream.send(composed.freeze())).await.map(|sent| sent.map(|()| len))
                }
                Some(Err(_)) | None => None,
            },
            5 => stage.cut("flush", $stream.flush()).await.map(|flushed| flushed.map(|()| 0)),
            6 => stage.cut("writable", $stream.writable()).await.map(|writable| writable.map(|()| 0)),
            // The last that is sent, because nobody knows whether one that is cut was sent.
            _ if stage.below(6) == 0 => {
                side.borrow_mut().perhaps = len;
                match stage.cut("send_all", $stream.send_all(payload)).await {
                    Some(Ok(())) => side.borrow_mut().sent += len,
                    // Of one that failed a part may have arrived.
                    Some(Err(_)) | None => {}
                }
                $stream.shutdown();
                Some(Err(std::io::ErrorKind::BrokenPipe.into()))
            }
            _ => match $stream.try_send(payload) {
                Ok(()) => Some(Ok(len)),
                Err(_) => None,
            },
        };
        match sent {
            Some(Ok(len)) => {
                side.borrow_mut().sent += len;
                Next::Go
            }
            Some(Err(_)) => Next::Over,
            None => Next::Go,
        }
    }};
}

/// What a task does with a connection of its own.
async fn program(stage: Shared, mut stream: TcpStream) {
    let side = stage.side();
    let mut kept: Vec<Buf> = Vec::new();
    let (mut reads, mut writes) = (true, true);
    for _ in 0..5 + stage.below(60) {
        if stage.ending.get() {
            break;
        }
        match stage.below(24) {
            0..=8 if reads => reads = receive!(&stage, &side, kept, stream) == Next::Go,
            9..=15 if writes => writes = send!(&stage, &side, stream) == Next::Go,
            16 if reads && writes => {
                let payload = side.borrow().next(100);
                let (mut from, mut to) = stream.split();
                match select(pin!(from.recv()), pin!(to.send(payload))).await {
                    Either::Left((received, _)) => {
                        reads = side.borrow_mut().note(received).is_some();
                        stage.count("select", false);
                    }
                    Either::Right((sent, _)) => {
                        writes = sent.is_ok();
                        side.borrow_mut().sent += if writes { 100 } else { 0 };
                        stage.count("select", true);
                    }
                }
            }
            17 => drop(stage.cut("sleep", sleep(Duration::from_micros(stage.below(5_000)))).await),
            18 => kept.clear(),
            19 if stage.below(10) == 0 => {
                stream.shutdown();
                writes = false;
            }
            20 => yield_now().await,
            21 if stage.below(6) == 0 => return halves(&stage, &side, stream, reads, writes).await,
            22 if stage.below(20) == 0 => {
                side.borrow_mut().aborted = true;
                return stream.abort();
            }
            23 if stage.below(20) == 0 => return,
            _ => {}
        }
    }
    drop(kept);
    // Another task may wait for this end, as this one does for its.
    stream.shutdown();
    while reads && stage.ending.get() {
        let received = stream.recv().await;
        reads = side.borrow_mut().note(received).is_some();
    }
}

/// The two directions in tasks of their own, either of which may be aborted.
async fn halves(stage: &Shared, side: &Rc<RefCell<Side>>, stream: TcpStream, reads: bool, writes: bool) {
    let (from, to) = stream.into_split();
    let reader = spawn(reading(stage.clone(), side.clone(), from, reads));
    let writer = spawn(writing(stage.clone(), side.clone(), to, writes));
    if stage.below(2) == 0 {
        sleep(Duration::from_micros(stage.below(20_000))).await;
        if stage.below(2) == 0 { reader.abort() } else { writer.abort() }
    }
    let from = stage.cut("join", reader).await;
    let to = writer.await;
    if let (Some(Ok(Some(from))), Ok(Some(to))) = (from, to) {
        let mut stream = TcpStream::reunite(from, to).expect("halves of one stream");
        let mut reads = side.borrow().end == End::NotSeen;
        stream.shutdown();
        while reads && stage.ending.get() {
            let received = stream.recv().await;
            reads = side.borrow_mut().note(received).is_some();
        }
    }
}

async fn reading(
    stage: Shared,
    side: Rc<RefCell<Side>>,
    mut from: OwnedReadHalf,
    mut reads: bool,
) -> Option<OwnedReadHalf> {
    let mut kept: Vec<Buf> = Vec::new();
    for _ in 0..stage.below(30) {
        if !reads || stage.ending.get() {
            break;
        }
        reads = receive!(&stage, &side, kept, from) == Next::Go;
        if stage.below(3) == 0 {
            kept.clear();
        }
    }
    (stage.below(2) == 0).then_some(from)
}

async fn writing(
    stage: Shared,
    side: Rc<RefCell<Side>>,
    mut to: OwnedWriteHalf,
    mut writes: bool,
) -> Option<OwnedWriteHalf> {
    for _ in 0..stage.below(30) {
        if !writes || stage.ending.get() {
            break;
        }
        writes = send!(&stage, &side, to) == Next::Go;
    }
    (stage.below(2) == 0).then_some(to)
}

/// Connects, for as long as chance has it.
async fn outgoing(stage: Shared) {
    let limit = millis(1 + stage.below(200));
    let to = match stage.below(4) {
        0 => late_addr(stage.below(3)),
        _ => other_addr(),
    };
    let config = ConnectConfig { timeout: limit, ..ConnectConfig::new(to) };
    if let Some(Ok(stream)) = stage.cut("connect", TcpStream::connect(config)).await {
        program(stage, stream).await;
    }
}

/// A listener of a task's own, which is dropped whoever waits in it.
async fn listening(stage: Shared) {
    let bound = stage.cut("bind", TcpListener::bind(late_addr(stage.below(3)))).await;
    let Some(Ok(mut listener)) = bound else { return };
    for _ in 0..stage.below(6) {
        if let Some(Ok(stream)) = stage.cut("accept", listener.accept()).await {
            stage.spawn(program(stage.clone(), stream));
        }
    }
}

async fn main(stage: Shared) {
    let mut listener = TcpListener::of_builder(0).expect("it was given one");
    while !stage.ending.get() {
        match stage.below(12) {
            0 => stage.spawn(outgoing(stage.clone())),
            1 => stage.spawn(listening(stage.clone())),
            2 => {
                let mut handles = stage.handles.borrow_mut();
                handles.retain(|handle| !handle.is_finished());
                if !handles.is_empty() {
                    let victim = stage.below(handles.len() as u64) as usize;
                    handles[victim].abort();
                }
            }
            // Detached.
            3 if stage.below(4) == 0 => drop(stage.handles.borrow_mut().pop()),
            _ => match stage.cut("accept", listener.accept()).await {
                Some(Ok(stream)) => stage.spawn(program(stage.clone(), stream)),
                // The stop.
                Some(Err(_)) => return,
                None => {}
            },
        }
    }
    // From here on nothing has a time limit.
    while let Ok(stream) = listener.accept().await {
        drop(stream);
    }
}

struct Client {
    number: u32,
    peer: Peer,
    sent: usize,
    /// It sends no more.
    finished: bool,
    /// It has closed or reset the connection.
    gone: bool,
}

impl Client {
    fn new(number: u32, peer: Peer) -> Self {
        Self { number, peer, sent: 0, finished: false, gone: false }
    }

    fn send(&mut self, len: usize) {
        // Not without end: who is not read keeps it all.
        if !self.finished && self.sent < 40_000 {
            self.peer.send(&bytes(self.number, self.sent, len));
            self.sent += len;
        }
    }

    fn finish(&mut self, how: impl FnOnce(&Peer)) {
        how(&self.peer);
        self.finished = true;
    }
}

/// What peers do.
fn step(sim: &Sim, server: &PeerListener, clients: &mut Vec<Client>) {
    let number = clients.len() as u32;
    let any = |clients: &[Client]| sim.random(clients.len() as u64) as usize;
    match sim.random(16) {
        0..=2 => {
            let to = if sim.random(4) == 0 { late_addr(sim.random(3)) } else { addr() };
            clients.push(Client::new(number, sim.connect(to)));
        }
        3 | 4 => clients.extend(server.accept().map(|peer| Client::new(number, peer))),
        5..=10 if !clients.is_empty() => {
            let one = any(clients);
            // Bytes one by one too.
            let len = if sim.random(3) == 0 { 1 } else { 1 + sim.random(4_000) };
            clients[one].send(len as usize);
        }
        11 if !clients.is_empty() => clients[any(clients)].peer.set_reading(sim.random(2) == 0),
        12 if !clients.is_empty() => {
            let one = any(clients);
            clients[one].finish(Peer::shutdown);
        }
        13 if !clients.is_empty() && sim.random(3) == 0 => {
            let one = any(clients);
            clients[one].finish(Peer::reset);
            clients[one].gone = true;
        }
        14 if !clients.is_empty() && sim.random(3) == 0 => {
            let one = any(clients);
            clients[one].finish(Peer::close);
            clients[one].gone = true;
        }
        _ => {}
    }
    sim.run_for(Duration::from_micros(sim.random(3_000)));
}

/// Both sides have exactly what was sent, up to where they received. `settled`: and everybody knows how it ended.
fn compare(seed: u64, stage: &Stage, clients: &[Client], settled: bool) -> (u64, u64) {
    let late = faults(seed).late_completion > 0.0;
    let lonely = faults(seed).timed_out > 0.0;
    let (mut whole_in, mut whole_out) = (0, 0);
    let sides = stage.sides.borrow();
    let from = |got: &[u8]| got.first_chunk().map(|head| u32::from_le_bytes(*head));
    // What was received of a task, against what that had queued; whether it was all of it.
    let check = |receiver: &dyn std::fmt::Debug, number: u32, got: usize, at_end: bool| {
        let sender = sides[(number & !OURS) as usize].borrow();
        let most = sender.sent + sender.perhaps;
        assert!(got <= most, "seed {seed}: {receiver:?} has {got} bytes of {sender:?}");
        let whole = got == sender.sent || got == most;
        // As below, between two tasks, of whom one has seen the reset.
        let late = late && (!settled || lonely || sender.end == End::Failed);
        assert!(
            whole || !at_end || sender.aborted || late,
            "seed {seed}: the end of {sender:?} after {got} bytes for {receiver:?}"
        );
        whole && at_end
    };
    for side in sides.iter() {
        let side = side.borrow();
        let (got, at_end) = (side.got.len(), side.end == End::Eof);
        match from(&side.got) {
            None => {}
            Some(number) if number & OURS != 0 => whole_out += u64::from(check(&*side, number, got, at_end)),
            Some(number) => {
                let client = &clients[number as usize];
                assert!(got <= client.sent, "seed {seed}: more than was sent: {client:?} {side:?}");
                // A send that met a reset may be told of it after the receive that it left only an end to. A peer
                // whose connection was reset by the network learns of it later, and of a time-out perhaps never.
                let late = late && (!settled || lonely || client.gone || client.peer.is_reset());
                assert!(
                    got == client.sent || !at_end || late,
                    "seed {seed}: the end came before all of {client:?} for {side:?}"
                );
                whole_in += u64::from(at_end && got == client.sent);
            }
        }
    }
    for client in clients {
        let got = client.peer.received();
        assert!(is_prefix(&got), "seed {seed}: {client:?} got what was not sent");
        let Some(number) = from(&got) else { continue };
        let at_end = client.peer.is_eof() && !client.peer.is_reset();
        whole_out += u64::from(check(client, number, got.len(), at_end));
    }
    (whole_in, whole_out)
}

impl std::fmt::Debug for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { number, got, end, sent, perhaps, aborted } = self;
        let got = got.len();
        write!(
            f,
            "connection {number}: {got} bytes received, {end:?}, {sent} sent and {perhaps} perhaps, aborted: {aborted}"
        )
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "client {} ({:?}) that sent {} bytes", self.number, self.peer, self.sent)
    }
}

fn faults(seed: u64) -> Faults {
    match seed % 4 {
        0 => Faults::none(),
        1 => Faults::benign(0.1),
        2 => Faults { reset: 0.005, connect_error: 0.05, late_by: millis(3), ..Faults::benign(0.3) },
        _ => Faults::hostile(0.05),
    }
}

fn worker(sim: &Sim, seed: u64, stage: &Shared) -> SimWorker<Message> {
    let config = WorkerConfig {
        max_connections: 16,
        buffers: BufferConfig {
            size: 512,
            count: 3 + seed as u32 % 40,
            send_count: 2,
            ..BufferConfig::default()
        },
        high_water: 3_000,
        low_water: 500,
        send_limit: 6_000,
        close_timeout: millis(500),
        turn_budget: if seed.is_multiple_of(3) { 3 } else { 512 },
        sq_entries: if seed.is_multiple_of(5) { 8 } else { 1024 },
        cq_entries: if seed.is_multiple_of(5) { 16 } else { 32768 },
        ..small_on(seed)
    };
    let stage = stage.clone();
    sim.tasks(config, &[listener()], move || main(stage)).expect("it works")
}

#[test]
fn whatever_is_dropped_wherever_no_byte_is_lost_and_nothing_is_left() {
    let (mut whole_in, mut whole_out) = (0, 0);
    let mut tally: Vec<(&str, Tally)> = Vec::new();
    for seed in seeds(400) {
        let config =
            SimConfig { socket_buffer: 1 << (9 + seed % 7), faults: faults(seed), ..SimConfig::seeded(seed) };
        let sim = Sim::new(config);
        let stage = Stage::new(seed);
        let worker = worker(&sim, seed, &stage);
        let server = sim.listen(other_addr());
        let mut clients = Vec::new();
        for _ in 0..60 {
            step(&sim, &server, &mut clients);
        }
        let stopped = seed % 5 == 4;
        if stopped {
            worker.stop(millis(sim.random(500)));
            sim.run_for(millis(sim.random(20)));
        }
        sim.calm();
        compare(seed, &stage, &clients, false);
        stage.ending.set(true);
        for client in &mut clients {
            client.peer.set_reading(true);
            client.finish(Peer::shutdown);
        }
        drop(server);
        let metrics = || worker.metrics();
        let settled = || {
            if stopped { !worker.is_running() } else { metrics().tasks == 1 && metrics().connections == 0 }
        };
        if let Err(stuck) = sim.run_until(5 * MINUTE, settled) {
            panic!("seed {seed}: {} tasks, {} connections: {stuck}", metrics().tasks, metrics().connections);
        }
        let (ins, outs) = compare(seed, &stage, &clients, true);
        (whole_in, whole_out) = (whole_in + ins, whole_out + outs);
        drop(clients);
        stage.handles.borrow_mut().clear();
        if !stopped {
            sim.run_for(MINUTE);
            worker.check_at_rest().unwrap_or_else(|left| panic!("seed {seed}: {left}"));
            assert_eq!(worker.metrics().stale, 0, "seed {seed}");
            // No timer is set, of a task or of a connection: nothing will ever happen again by itself.
            let quiet = sim.run_until(1_000 * MINUTE, || false).expect_err("it never says so");
            assert_eq!(quiet.reason, StuckReason::Quiet, "seed {seed}: {quiet}");
            worker.stop(SECOND);
            sim.run_until(2 * SECOND, || !worker.is_running()).unwrap_or_else(|stuck| panic!("{stuck}"));
        }
        let report = worker.report().expect("it has ended");
        assert_eq!((report.ops_in_kernel, report.buffers_outstanding), (0, 0), "seed {seed}: {report:?}");
        let total = worker.metrics();
        assert_eq!((total.tasks_panicked, total.tasks), (0, 0), "seed {seed}");
        for &(what, count) in stage.tally.borrow().iter() {
            match tally.iter_mut().find(|(name, _)| *name == what) {
                Some((_, total)) => {
                    total.done += count.done;
                    total.cut += count.cut;
                }
                None => tally.push((what, count)),
            }
        }
    }
    if usual_seeds() {
        // The histories had everything in them that they are for.
        for (what, Tally { done, cut }) in &tally {
            println!("{what}: {done} done, {cut} cut");
            assert!(*done > 20 && *cut > 20, "{what}: {done} done, {cut} cut");
        }
        println!("received whole: {whole_in} here, {whole_out} there");
        assert!(whole_in > 200 && whole_out > 1_000, "{whole_in} here, {whole_out} there");
        assert_eq!(tally.len(), 16, "an operation was never tried");
    }
}

/// An echo whose every receive, send and flush is cut again and again until one gets there. Nothing resets these
/// connections, so not a byte may be missing.
#[test]
fn receives_and_sends_that_time_out_and_are_tried_again_lose_nothing() {
    async fn echo(stage: Shared, mut stream: TcpStream) {
        loop {
            let received = match stage.below(8) {
                // Less than its room is put back and comes with the next receive.
                0 => {
                    let mut room = vec![0; 64];
                    match stage.cut("recv_exact", stream.recv_exact(&mut room)).await {
                        Some(Ok(())) => Some(Ok(Some(room))),
                        Some(Err(_)) | None => None,
                    }
                }
                1 => {
                    let _ = stage.cut("peek", stream.peek()).await;
                    None
                }
                _ => stage
                    .cut("recv", stream.recv())
                    .await
                    .map(|received| received.map(|piece| piece.map(|piece| piece.to_vec()))),
            };
            let piece = match received {
                None => continue,
                Some(received) => match received.expect("nothing resets it") {
                    Some(piece) => piece,
                    None => return,
                },
            };
            while stage.cut("send", stream.send(piece.clone())).await.is_none() {}
            if stage.below(4) == 0 {
                let _ = stage.cut("flush", stream.flush()).await;
            }
        }
    }
    for seed in seeds(150) {
        let faults = if seed.is_multiple_of(3) { Faults::none() } else { Faults::benign(0.1) };
        let sim =
            Sim::new(SimConfig { socket_buffer: 1 << (9 + seed % 7), faults, ..SimConfig::seeded(seed) });
        let stage = Stage::new(seed);
        let shared = stage.clone();
        let main = move || async move {
            let mut listener = TcpListener::of_builder(0).expect("it was given one");
            while let Ok(stream) = listener.accept().await {
                drop(spawn(echo(shared.clone(), stream)));
            }
        };
        let config = WorkerConfig { max_connections: 16, ..small_on(seed) };
        let worker = sim.tasks(config, &[listener()], main).expect("it works");
        let clients: Vec<(Peer, Vec<u8>)> = (0..4)
            .map(|number| {
                let sent = pattern(seed + number, 1 + sim.random(6_000) as usize);
                (sim.connect(addr()), sent)
            })
            .collect();
        for (peer, sent) in &clients {
            for piece in sent.chunks(1 + sim.random(500) as usize) {
                peer.send(piece);
                sim.run_for(Duration::from_micros(sim.random(1_000)));
            }
            peer.shutdown();
        }
        sim.calm();
        for (peer, sent) in &clients {
            sim.run_until(10 * MINUTE, || peer.is_over()).unwrap_or_else(|stuck| panic!("{stuck}"));
            assert!(!peer.is_reset(), "seed {seed}");
            assert!(peer.received() == *sent, "seed {seed}: {} bytes of {}", peer.received_len(), sent.len());
        }
        drop(clients);
        sim.run_for(MINUTE);
        worker.check_at_rest().unwrap_or_else(|left| panic!("seed {seed}: {left}"));
        assert_eq!((worker.metrics().tasks, worker.metrics().tasks_panicked), (1, 0), "seed {seed}");
    }
}
