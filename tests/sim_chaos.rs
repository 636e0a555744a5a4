//! Everything that can go wrong does, for clients, servers and handler alike. Whatever happened,
//! each connection ends once, no byte is invented, moved or repeated, and at the end everything is
//! where it was.

mod sim_common;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use corelane::sim::{Fault, Faults, Peer, PeerListener, Shortage, Sim, SimConfig, SimWorker, When};
use corelane::{BufferConfig, CloseReason, Conn, Sharing, WorkerConfig};
use sim_common::*;

/// What a handler's whims are drawn from.
#[derive(Clone)]
struct Dice(Rc<RefCell<u64>>);

impl Dice {
    fn below(&self, n: u64) -> u64 {
        let mut state = self.0.borrow_mut();
        *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*state >> 33) % n
    }
}

/// Something that a handler may do in any callback of a connection.
fn whim(conn: &mut Conn<'_, Probe>, dice: &Dice) {
    match dice.below(40) {
        0 => conn.close(),
        1 => conn.abort(),
        2 => conn.shutdown_write(),
        3 => {
            conn.pause();
            conn.set_timer(Some(millis(1 + dice.below(20))));
        }
        4 => conn.resume(),
        5 => conn.set_deadline(Some(millis(1 + dice.below(50)))),
        6 => conn.set_deadline(None),
        7 => conn.close_with(CloseReason::Limit),
        8 => conn.set_idle_timeout(Some(millis(1 + dice.below(200)))),
        9 => {
            let id = conn.id();
            let _ = conn.cx().remote().close(id);
        }
        10 => {
            connect_from(&mut conn.cx(), millis(1 + dice.below(100)));
        }
        11 => {
            // Twice in one callback: the second must find the first done, not undone.
            conn.shutdown_write();
            conn.close();
            conn.abort();
        }
        _ => {}
    }
}

/// A handler that echoes, and has whims.
fn moody(log: &Log, seed: u64) -> Probe {
    let dice = Dice(Rc::new(RefCell::new(seed)));
    let mut probe = Probe::new(log);
    let d = dice.clone();
    probe.accept = Box::new(move |_, _| d.below(10) > 0);
    let d = dice.clone();
    probe.connected = Box::new(move |conn| whim(conn, &d));
    let d = dice.clone();
    probe.data = Box::new(move |conn, mut data| {
        // The echo itself in several ways: the lease, a part of it twice, a copy, a composed reply.
        // An echo that is refused would leave a hole, so the connection ends there.
        let sent = match d.below(4) {
            0 => {
                let head = data.split_to(data.len() / 2);
                conn.send(head).and_then(|()| conn.send(data))
            }
            1 => conn.send(data.to_vec()),
            2 => match conn.cx().alloc() {
                Some(mut reply) => {
                    assert_eq!(reply.put(&data), data.len());
                    conn.send(reply.freeze())
                }
                None => conn.send(data),
            },
            _ => conn.send(data),
        };
        if sent.is_err() {
            conn.abort();
        }
        whim(conn, &d);
    });
    let d = dice.clone();
    probe.eof = Box::new(move |conn| {
        whim(conn, &d);
        if d.below(3) > 0 {
            conn.close();
        }
    });
    let d = dice.clone();
    probe.writable = Box::new(move |conn| whim(conn, &d));
    let d = dice.clone();
    probe.timer = Box::new(move |conn| {
        conn.resume();
        whim(conn, &d);
    });
    probe.closed = Box::new(move |cx, _| {
        if dice.below(20) == 0 {
            connect_from(cx, millis(50));
        }
    });
    probe
}

struct Client {
    peer: Peer,
    sent: Vec<u8>,
}

impl Client {
    fn send(&mut self, salt: u64, len: usize) {
        let bytes = pattern(salt, len);
        self.peer.send(&bytes);
        self.sent.extend_from_slice(&bytes);
    }

    fn check(&self, seed: u64) {
        let got = self.peer.received();
        assert!(self.sent.starts_with(&got), "seed {seed}: {:?} got what it did not send", self.peer);
    }
}

/// One fault on demand, somewhere, soon.
fn mischief(sim: &Sim, workers: &[SimWorker<Order>], clients: &[Client]) {
    let time = millis(sim.random(200));
    let shortage = [Shortage::ProcessFiles, Shortage::Buffers, Shortage::Ports][sim.random(3) as usize];
    let few = 1 + sim.random(20) as u32;
    let faults = [
        Fault::AcceptError(shortage),
        Fault::AcceptAborted,
        Fault::ConnectError(shortage),
        Fault::Unreachable,
        Fault::ShortRecv { bytes: few },
        Fault::NoBuffer,
        Fault::RecvStop,
        Fault::CqOverflow,
        Fault::ShortSend { bytes: few },
        Fault::LateCompletion { by: time },
        Fault::LostCancel,
        Fault::StuckCancel,
        Fault::SegmentLoss,
        Fault::Stall { time },
        Fault::Reset,
        Fault::TimedOut,
        Fault::Pause { time },
        Fault::HoldBuffers { recv: few, send: few, time },
        Fault::ClockJump { by: time * 20 },
        Fault::Partition { a: addr().ip(), b: other_addr().ip(), time },
    ];
    let mut when = match sim.random(3) {
        0 => When::nth(1 + sim.random(10)).times(1 + sim.random(3)),
        1 => When::at(sim.now() + millis(sim.random(20))),
        _ => When::after_bytes(sim.random(20_000)),
    };
    if sim.random(3) == 0 {
        when = when.worker(&workers[0]);
    }
    if sim.random(3) == 0 && !clients.is_empty() {
        when = when.peer(&clients[sim.random(clients.len() as u64) as usize].peer);
    }
    sim.script(when, faults[sim.random(faults.len() as u64) as usize]);
}

fn step(sim: &Sim, workers: &[SimWorker<Order>], server: &PeerListener, clients: &mut Vec<Client>) {
    let any = |clients: &Vec<Client>| sim.random(clients.len() as u64) as usize;
    match sim.random(17) {
        0..=2 => {
            let client = Client { peer: sim.connect(addr()), sent: Vec::new() };
            client.peer.set_reading(sim.random(3) > 0);
            clients.push(client);
        }
        3 => connect(&workers[sim.random(workers.len() as u64) as usize]),
        4 => clients.extend(server.accept().map(|peer| Client { peer, sent: Vec::new() })),
        5..=8 if !clients.is_empty() => {
            let salt = sim.random(1 << 20);
            let len = sim.random(9_000) as usize;
            let client = any(clients);
            clients[client].send(salt, len);
        }
        9 if !clients.is_empty() => {
            clients[any(clients)].peer.set_reading(sim.random(2) == 0);
        }
        10 if !clients.is_empty() => clients[any(clients)].peer.shutdown(),
        11 if !clients.is_empty() => clients[any(clients)].peer.reset(),
        12 if !clients.is_empty() => {
            let client = clients.swap_remove(any(clients));
            client.check(0);
        }
        13 => {
            let cut = if sim.random(2) == 0 { addr() } else { other_addr() };
            sim.partition(cut);
            connect(&workers[0]);
            sim.run_for(millis(sim.random(300)));
            sim.heal(cut);
        }
        14 | 15 => mischief(sim, workers, clients),
        16 => {
            let (a, b) = (addr().ip(), [other_addr().ip(), addr().ip()][sim.random(2) as usize]);
            sim.partition_one_way(a, b);
            sim.run_for(millis(sim.random(300)));
            sim.heal_between(a, b);
        }
        _ => {}
    }
    sim.run_for(Duration::from_micros(sim.random(3_000)));
}

#[test]
fn after_any_history_every_table_and_pool_is_at_its_starting_level() {
    let mut total = corelane::Snapshot::default();
    for seed in seeds(400) {
        let faults = match seed % 4 {
            0 => Faults { connect_error: 0.05, reset: 0.01, ..Faults::none() },
            1 => Faults::hostile(0.1),
            _ => Faults { connect_error: 0.05, reset: 0.01, late_by: millis(5), ..Faults::benign(0.1) },
        };
        let sim =
            Sim::new(SimConfig { socket_buffer: 1 << (9 + seed % 7), faults, ..SimConfig::seeded(seed) });
        let log = Log::default();
        with_log(&log);
        let config = WorkerConfig {
            max_connections: 12,
            buffers: BufferConfig {
                size: 256,
                count: 3 + seed as u32 % 30,
                send_count: 2,
                ..BufferConfig::default()
            },
            high_water: 3_000,
            low_water: 500,
            send_limit: 3_000,
            auto_pause: seed % 5 > 0,
            idle_timeout: Some(5 * SECOND),
            close_timeout: millis(200),
            turn_budget: if seed % 3 == 0 { 3 } else { 512 },
            accept_budget: 2,
            sq_entries: if seed % 5 == 0 { 8 } else { 1024 },
            cq_entries: if seed % 5 == 0 { 16 } else { 32768 },
            ..small_on(seed)
        };
        let sharing = if seed % 2 == 0 { Sharing::One } else { Sharing::PerWorker };
        let listeners = [corelane::ListenerConfig { sharing, ..listener() }];
        let count = 1 + seed as usize % 2;
        let workers = sim
            .workers(count, config, &listeners, |index| moody(&log, seed * 2 + index as u64))
            .expect("it works");
        let server = sim.listen(other_addr());
        let mut clients: Vec<Client> = Vec::new();
        for _ in 0..60 {
            step(&sim, &workers, &server, &mut clients);
        }
        let stopped = seed % 3 == 0;
        if stopped {
            workers[0].stop(millis(sim.random(500)));
            sim.run_for(millis(sim.random(20)));
        }
        sim.calm();
        clients.iter().for_each(|client| client.check(seed));
        drop(clients);
        drop(server);
        sim.run_for(2 * MINUTE);
        assert_eq!(log.open(), 0, "seed {seed}");
        assert_eq!(log.ended() as u64, log.0.begun.get(), "seed {seed}");
        for worker in &workers {
            total += worker.metrics();
            assert_eq!(worker.is_running(), !stopped, "seed {seed}");
            if let Some(report) = worker.report() {
                assert_eq!((report.ops_in_kernel, report.buffers_outstanding), (0, 0));
            } else {
                assert!(worker.ops_in_flight() > 0, "seed {seed}: it still accepts");
            }
            assert_eq!(worker.connections(), 0, "seed {seed}");
            assert_eq!(worker.buffers_leased(), 0, "seed {seed}");
            assert_eq!(worker.payloads_queued(), 0, "seed {seed}");
            assert_eq!(worker.metrics().stale, 0, "seed {seed}");
        }
    }
    assert_eq!(total.faults, 0, "this kernel touches only what it has");
    if usual_seeds() {
        // The histories had everything in them that they are for.
        let rare = ["closed_failed", "sq_full", "stale", "refused", "faults"];
        let gauges = ["connections", "buffers_out", "busy_ns", "parked_ns"];
        for (name, value) in total.iter() {
            // Histories of tasks are `sim_cancel`'s.
            let expected = !rare.contains(&name.as_str())
                && !gauges.contains(&name.as_str())
                && !["task", "remote_wakes"].iter().any(|tasks| name.starts_with(tasks));
            assert!(value > 0 || !expected, "no history had {name}");
        }
    }
}
