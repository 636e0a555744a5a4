//! A handler that pulls ([`Handler::PULL`]), in a simulated world: what is received waits with its connection, in bounds,
//! until it is taken, and takes nothing from others.

mod sim_common;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use corelane::sim::{Fault, Faults, Peer, Sim, SimConfig, SimWorker, When};
use corelane::{
    Accepted, Buf, BufferConfig, CloseReason, Closed, Conn, Cx, Handler, ListenerConfig, Taken,
    UringFeatures, WorkerConfig,
};
use sim_common::*;

/// Received pieces that may wait, as the documentation of [`Handler::PULL`] has it.
const MOST_PIECES: usize = 32;

/// What a connection's handler has seen.
#[derive(Clone, Debug, Default)]
struct Seen {
    got: Vec<u8>,
    /// `Taken::End` was found.
    end: bool,
    failed: Option<CloseReason>,
    closed: Option<CloseReason>,
}

/// What the test decides, and what it sees.
#[derive(Default)]
struct Desk {
    /// Connections whose data is taken as it comes: all from this number on.
    takes_from: Cell<usize>,
    /// Sends these bytes to everybody who comes.
    greeting: Cell<usize>,
    /// Closes when the end is found.
    keeps_open: Cell<bool>,
    readable: Cell<u64>,
    seen: RefCell<Vec<Seen>>,
    /// Leases that the handler keeps.
    kept: RefCell<Vec<Buf>>,
}

impl Desk {
    fn seen(&self, number: usize) -> Seen {
        self.seen.borrow()[number].clone()
    }

    fn got(&self, number: usize) -> Vec<u8> {
        self.seen(number).got
    }
}

struct Puller(Rc<Desk>);

/// What the test asks for from outside.
enum Order {
    /// Take everything of a connection, and go on taking.
    TakeAll(usize),
    /// Take that many pieces of it.
    Take(usize, usize),
    Close(usize),
    Send(usize, usize),
}

impl Puller {
    /// Takes at most so many pieces.
    fn take(&self, conn: &mut Conn<'_, Self>, most: usize) {
        let number = *conn.state();
        for _ in 0..most {
            match conn.take() {
                Taken::Data(piece) => {
                    assert!(!piece.is_empty());
                    let mut seen = self.0.seen.borrow_mut();
                    assert!(!seen[number].end && seen[number].failed.is_none(), "data after the end");
                    seen[number].got.extend_from_slice(&piece);
                }
                Taken::Nothing => break,
                Taken::End => {
                    self.0.seen.borrow_mut()[number].end = true;
                    if !self.0.keeps_open.get() {
                        conn.close();
                    }
                    break;
                }
                Taken::Failed(reason) => {
                    self.0.seen.borrow_mut()[number].failed = Some(reason);
                    break;
                }
            }
        }
    }

    fn find(cx: &mut Cx<'_, Self>, number: usize) -> Option<corelane::ConnId> {
        let ids: Vec<_> = cx.ids().collect();
        ids.into_iter().find(|&id| cx.conn(id).is_some_and(|mut conn| *conn.state() == number))
    }
}

impl Handler for Puller {
    /// Its number.
    type Conn = usize;
    type Message = Order;
    const PULL: bool = true;

    fn on_accept(&mut self, _: &mut Cx<'_, Self>, _: Accepted) -> Option<usize> {
        let mut seen = self.0.seen.borrow_mut();
        seen.push(Seen::default());
        Some(seen.len() - 1)
    }

    fn on_accepted(&mut self, conn: &mut Conn<'_, Self>) {
        let greeting = self.0.greeting.get();
        if greeting > 0 {
            conn.send(pattern(1, greeting)).expect("open");
        }
    }

    fn on_data(&mut self, _: &mut Conn<'_, Self>, _: Buf) {
        panic!("data was pushed to a handler that pulls");
    }

    fn on_eof(&mut self, _: &mut Conn<'_, Self>) {
        panic!("the end was pushed to a handler that pulls");
    }

    fn on_readable(&mut self, conn: &mut Conn<'_, Self>) {
        self.0.readable.set(self.0.readable.get() + 1);
        if *conn.state() >= self.0.takes_from.get() {
            self.take(conn, usize::MAX);
        }
    }

    fn on_message(&mut self, cx: &mut Cx<'_, Self>, order: Order) {
        let (Order::TakeAll(number) | Order::Take(number, _) | Order::Close(number) | Order::Send(number, _)) =
            order;
        let Some(id) = Self::find(cx, number) else { return };
        let Some(mut conn) = cx.conn(id) else { return };
        match order {
            Order::TakeAll(number) => {
                self.0.takes_from.set(self.0.takes_from.get().min(number));
                self.take(&mut conn, usize::MAX);
            }
            Order::Take(_, most) => self.take(&mut conn, most),
            Order::Close(_) => conn.close(),
            Order::Send(_, len) => {
                // Refused where the connection has failed.
                let _ = conn.send(pattern(1, len));
            }
        }
    }

    fn on_closed(&mut self, _: &mut Cx<'_, Self>, closed: Closed<usize>) {
        let before = self.0.seen.borrow_mut()[closed.state].closed.replace(closed.reason);
        assert_eq!(before, None, "closed twice");
    }
}

/// A world with one worker whose handler takes nothing yet.
struct Stage {
    sim: Sim,
    worker: SimWorker<Order>,
    desk: Rc<Desk>,
}

fn stage_of(config: SimConfig, worker: WorkerConfig) -> Stage {
    let sim = Sim::new(config);
    let desk = Rc::new(Desk::default());
    desk.takes_from.set(usize::MAX);
    let listener = ListenerConfig { backlog: 64, ..listener() };
    let worker = sim.worker(worker, &[listener], Puller(desk.clone())).expect("it works");
    Stage { sim, worker, desk }
}

fn stage(seed: u64) -> Stage {
    let faults = if seed.is_multiple_of(2) { Faults::none() } else { Faults::benign(0.1) };
    stage_of(SimConfig { faults, ..SimConfig::seeded(seed) }, small_on(seed))
}

impl Stage {
    fn order(&self, order: Order) {
        self.worker.remote().post(0, order).unwrap_or_else(|_| panic!("the mailbox has room"));
    }

    fn until(&self, what: &str, done: impl FnMut() -> bool) {
        self.sim.run_until(10 * MINUTE, done).unwrap_or_else(|stuck| panic!("{what}: {stuck}"));
    }

    /// A client that is connection number `number`.
    fn client(&self) -> Peer {
        let number = self.desk.seen.borrow().len();
        let peer = self.sim.connect(addr());
        self.until("connected", || self.desk.seen.borrow().len() > number);
        peer
    }

    /// Everything is where it was.
    fn end(&self) {
        self.desk.kept.borrow_mut().clear();
        self.sim.calm();
        self.sim.run_for(MINUTE);
        self.worker.check_at_rest().unwrap_or_else(|left| panic!("seed {}: {left}", self.sim.seed()));
        assert_eq!(self.worker.metrics().stale, 0);
    }
}

#[test]
fn receiving_pauses_at_the_high_water_mark_and_resumes_below_the_low_one() {
    for seed in seeds(60) {
        let faults = if seed.is_multiple_of(2) { Faults::none() } else { Faults::benign(0.1) };
        let config = SimConfig { faults, socket_buffer: 4 << 10, ..SimConfig::seeded(seed) };
        let stage = stage_of(config, small_on(seed));
        let sent = pattern(seed, 200_000);
        let client = stage.client();
        client.send(&sent);
        stage.sim.run_for(SECOND);
        let held = stage.worker.metrics().bytes_received;
        let least = u64::from(small().high_water);
        // What was with the kernel when receiving paused may be received before the cancel is there, and a cancel
        // that loses its race leaves time for more.
        let late = if seed.is_multiple_of(2) { 8 << 10 } else { 24 << 10 };
        let most = least + late + u64::from(small().buffers.size);
        assert!(held >= least && held <= most, "seed {seed}: {held} bytes wait");
        assert!(stage.worker.metrics().pauses > 0 && !client.sent_all(), "seed {seed}: it does not pause");
        stage.sim.run_for(SECOND);
        assert_eq!(
            stage.worker.metrics().bytes_received,
            held,
            "seed {seed}: it goes on although nobody takes"
        );
        assert_eq!(stage.desk.got(0), b"");

        stage.order(Order::TakeAll(0));
        stage.until("all of it", || stage.desk.got(0).len() == sent.len());
        assert!(stage.desk.got(0) == sent, "seed {seed}: other bytes");
        client.close();
        stage.until("the end", || stage.desk.seen(0).closed == Some(CloseReason::Eof));
        stage.end();
    }
}

#[test]
fn pieces_of_a_byte_pause_it_too_and_it_resumes_when_few_are_left() {
    for seed in seeds(60) {
        // Without faults, so that each byte is a piece.
        let stage = stage_of(SimConfig::seeded(seed), small_on(seed));
        let sent = pattern(seed, 300);
        let client = stage.client();
        for byte in &sent {
            client.send(&[*byte]);
            stage.sim.run_for(millis(1));
        }
        stage.sim.run_for(SECOND);
        let metrics = stage.worker.metrics();
        let pieces = metrics.messages as usize;
        assert!((MOST_PIECES..=MOST_PIECES + 8).contains(&pieces), "seed {seed}: {pieces} pieces wait");
        // With no one short of buffers each keeps its own.
        assert!(stage.worker.buffers_leased() <= pieces);

        stage.order(Order::Take(0, 10));
        stage.sim.run_for(SECOND);
        assert_eq!(stage.worker.metrics().messages as usize, pieces, "seed {seed}: resumed too early");
        stage.order(Order::Take(0, pieces - 10));
        stage.sim.run_for(SECOND);
        assert!(stage.worker.metrics().messages as usize > pieces, "seed {seed}: not resumed");
        stage.order(Order::TakeAll(0));
        stage.until("all of it", || stage.desk.got(0).len() == sent.len());
        assert!(stage.desk.got(0) == sent, "seed {seed}: other bytes");
        drop(client);
        stage.end();
    }
}

/// Many connections that nobody takes from hold every buffer; one whose data is taken gets some all the same, because
/// what waits is copied out.
#[test]
fn data_that_nobody_takes_keeps_no_buffers_from_others() {
    for seed in seeds(40) {
        let config = WorkerConfig {
            buffers: BufferConfig { size: 1024, count: 16, send_count: 2, ..BufferConfig::default() },
            ..small_on(seed)
        };
        let stage = stage_of(SimConfig::seeded(seed), config);
        let idle: Vec<Peer> = (0..20).map(|_| stage.client()).collect();
        for _ in 0..50 {
            for peer in &idle {
                peer.send(b"x");
            }
            stage.sim.run_for(millis(1));
        }
        stage.desk.takes_from.set(idle.len());
        let busy = stage.client();
        let sent = pattern(seed, 50_000);
        busy.send(&sent);
        stage.until("the one that is taken from", || stage.desk.got(idle.len()).len() == sent.len());
        assert!(stage.desk.got(idle.len()) == sent, "seed {seed}: other bytes");
        let metrics = stage.worker.metrics();
        assert!(metrics.reclaimed > 0, "seed {seed}: nothing was copied out, so nothing was short");

        // They lose nothing by it.
        for number in 0..idle.len() {
            stage.order(Order::TakeAll(number));
            stage.until("what was sent byte by byte", || stage.desk.got(number).len() == 50);
            assert_eq!(stage.desk.got(number), [b'x'; 50]);
        }
        drop((idle, busy));
        stage.end();
    }
}

#[test]
fn buffers_that_run_out_with_unread_data_everywhere_come_back() {
    for seed in seeds(40) {
        let config = WorkerConfig {
            buffers: BufferConfig { size: 256, count: 4, send_count: 2, ..BufferConfig::default() },
            ..small_on(seed)
        };
        let stage = stage_of(SimConfig { faults: Faults::benign(0.05), ..SimConfig::seeded(seed) }, config);
        let clients: Vec<Peer> = (0..30).map(|_| stage.client()).collect();
        for (number, client) in clients.iter().enumerate() {
            client.send(&pattern(number as u64, 5_000));
        }
        stage.sim.run_for(SECOND);
        for number in (0..clients.len()).rev() {
            stage.order(Order::TakeAll(number));
        }
        stage.sim.calm();
        for number in 0..clients.len() {
            stage.until("its data", || stage.desk.got(number).len() == 5_000);
            assert!(stage.desk.got(number) == pattern(number as u64, 5_000), "seed {seed}: other bytes");
        }
        drop(clients);
        stage.end();
    }
}

#[test]
fn the_end_comes_after_the_data_and_as_often_as_asked() {
    for seed in seeds(60) {
        let stage = stage(seed);
        stage.desk.keeps_open.set(true);
        let client = stage.client();
        let sent = pattern(seed, 3_000);
        client.send(&sent);
        client.shutdown();
        stage.sim.run_for(SECOND);
        assert!(!stage.desk.seen(0).end, "nothing was taken yet");
        stage.order(Order::TakeAll(0));
        stage.until("the end", || stage.desk.seen(0).end);
        assert!(stage.desk.got(0) == sent, "seed {seed}: the end came before all of it");
        // It stays the end, and sending goes on.
        stage.desk.seen.borrow_mut()[0].end = false;
        stage.order(Order::Send(0, 2_000));
        stage.order(Order::Take(0, 1));
        stage.until("the end once more", || stage.desk.seen(0).end && client.received_len() == 2_000);
        assert_eq!(client.received(), pattern(1, 2_000));
        stage.order(Order::Close(0));
        stage.until("closed", || stage.desk.seen(0).closed == Some(CloseReason::Eof));
        drop(client);
        stage.end();
    }
}

#[test]
fn a_reset_comes_after_the_data_before_it() {
    for seed in seeds(60) {
        let stage = stage(seed);
        let client = stage.client();
        let sent = pattern(seed, 3_000);
        client.send(&sent);
        stage.until("received", || stage.worker.metrics().bytes_received == 3_000);
        client.reset();
        stage.sim.run_for(millis(100));
        assert_eq!(
            stage.desk.seen(0).closed,
            None,
            "seed {seed}: what was received is still there to be taken"
        );
        // A piece at a time: the failure only after the last.
        for _ in 0..MOST_PIECES {
            stage.order(Order::Take(0, 1));
            stage.sim.run_for(millis(1));
        }
        stage.until("closed", || stage.desk.seen(0).closed.is_some());
        let seen = stage.desk.seen(0);
        assert!(seen.got == sent, "seed {seed}: {} bytes before the reset", seen.got.len());
        assert_eq!(seen.closed, Some(CloseReason::Reset), "seed {seed}");
        assert!(!seen.end, "seed {seed}: a reset is no end");
        stage.end();
    }
}

#[test]
fn what_was_received_before_a_send_failed_can_still_be_taken_within_the_close_timeout() {
    for seed in seeds(60) {
        let taken = seed % 2 == 0;
        let stage = stage_of(SimConfig::seeded(seed), small_on(seed));
        let client = stage.client();
        let sent = pattern(seed, 3_000);
        client.send(&sent);
        stage.until("received", || stage.worker.metrics().bytes_received == 3_000);
        client.set_reading(false);
        client.reset();
        stage.sim.run_for(millis(5));
        stage.order(Order::Send(0, 10_000));
        stage.sim.run_for(millis(5));
        assert_eq!(stage.desk.seen(0).closed, None, "seed {seed}: data waits");
        if taken {
            stage.order(Order::TakeAll(0));
            stage.until("closed", || stage.desk.seen(0).closed.is_some());
            assert!(stage.desk.got(0) == sent, "seed {seed}: not all of it");
        } else {
            // Nobody takes it: it is not kept for ever.
            stage.sim.run_for(small().close_timeout + SECOND);
            assert!(stage.desk.seen(0).closed.is_some(), "seed {seed}: kept for ever");
        }
        drop(client);
        stage.end();
    }
}

#[test]
fn silence_is_not_held_against_a_peer_whose_data_waits() {
    for seed in seeds(40) {
        let config = WorkerConfig { idle_timeout: Some(SECOND), ..small_on(seed) };
        let stage = stage_of(SimConfig::seeded(seed), config);
        let (ignored, flooding, silent) = (stage.client(), stage.client(), stage.client());
        ignored.send(b"hello");
        // More than is received: it is this side that does not read.
        flooding.send(&pattern(seed, 200_000));
        stage.sim.run_for(5 * SECOND);
        assert_eq!(stage.desk.seen(2).closed, Some(CloseReason::IdleTimeout), "seed {seed}: it sent nothing");
        assert_eq!(stage.desk.seen(0).closed, None, "seed {seed}: its data was not taken");
        assert_eq!(stage.desk.seen(1).closed, None, "seed {seed}: nothing more was received");
        stage.order(Order::TakeAll(0));
        stage.until("its data", || stage.desk.got(0) == b"hello");
        // Now it is the peer who is silent.
        stage.sim.run_for(3 * SECOND);
        assert_eq!(stage.desk.seen(0).closed, Some(CloseReason::IdleTimeout), "seed {seed}");
        // The end of one that is not received from is not seen.
        stage.order(Order::TakeAll(1));
        drop((ignored, flooding, silent));
        stage.end();
    }
}

#[test]
fn a_close_with_data_that_nobody_took_is_graceful_and_gives_its_buffers_back() {
    for seed in seeds(60) {
        let stage = stage(seed);
        stage.desk.greeting.set(4_000);
        let client = stage.client();
        client.send(&pattern(seed, 50_000));
        stage.sim.run_for(millis(500));
        stage.order(Order::Close(0));
        stage.until("the answer and the end", || client.is_eof() || client.is_reset());
        assert!(!client.is_reset(), "seed {seed}: unread data must not cost the peer its answer");
        assert_eq!(client.received(), pattern(1, 4_000), "seed {seed}");
        assert_eq!(stage.desk.got(0), b"", "seed {seed}: nothing is taken of a connection that closes");
        client.close();
        stage.until("closed", || stage.desk.seen(0).closed == Some(CloseReason::Local));
        stage.end();
    }
}

/// Takers of one piece a call, now and then, under faults: every byte once and in order, whatever waits.
#[test]
fn however_it_is_taken_every_byte_comes_once_and_in_order() {
    for seed in seeds(150) {
        let config = WorkerConfig {
            buffers: BufferConfig {
                size: 256,
                count: 3 + seed as u32 % 20,
                send_count: 2,
                ..BufferConfig::default()
            },
            high_water: 2_000,
            low_water: 300,
            uring: if seed.is_multiple_of(5) { UringFeatures::LEAST } else { features(seed) },
            ..small()
        };
        let faults = if seed.is_multiple_of(3) { Faults::benign(0.3) } else { Faults::benign(0.05) };
        let stage = stage_of(SimConfig { faults, ..SimConfig::seeded(seed) }, config);
        stage.sim.script(When::nth(1 + stage.sim.random(20)).times(3), Fault::RecvStop);
        let clients: Vec<Peer> = (0..6).map(|_| stage.client()).collect();
        let lens: Vec<usize> = clients.iter().map(|_| 1 + stage.sim.random(8_000) as usize).collect();
        for (number, client) in clients.iter().enumerate() {
            let sent = pattern(number as u64, lens[number]);
            for piece in sent.chunks(1 + stage.sim.random(700) as usize) {
                client.send(piece);
                stage.sim.run_for(Duration::from_micros(stage.sim.random(400)));
                stage.order(Order::Take(stage.sim.random(6) as usize, stage.sim.random(4) as usize));
            }
            client.shutdown();
        }
        stage.sim.calm();
        for number in 0..clients.len() {
            stage.order(Order::TakeAll(number));
        }
        for (number, len) in lens.into_iter().enumerate() {
            stage.until("the end", || stage.desk.seen(number).end);
            assert!(stage.desk.got(number) == pattern(number as u64, len), "seed {seed}: other bytes");
        }
        drop(clients);
        stage.end();
    }
}
