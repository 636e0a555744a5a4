//! Streams on the simulated kernel: nothing lost, nothing changed, nobody starved, nothing spun.

mod sim_common;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use corelane::sim::{Faults, Peer, Sim, SimConfig};
use corelane::{BufferConfig, CloseReason, ListenerConfig, SendErrorKind, WorkerConfig};
use sim_common::*;

#[test]
fn echo_returns_every_byte_in_order_whatever_the_network_does() {
    for seed in seeds(300) {
        let sim = Sim::new(SimConfig {
            socket_buffer: if seed % 3 == 0 { 3_000 } else { 64 << 10 },
            faults: Faults::benign(if seed % 2 == 0 { 0.1 } else { 0.0 }),
            ..SimConfig::seeded(seed)
        });
        let log = Log::default();
        let worker = sim.worker(small_on(seed), &[listener()], Probe::new(&log)).expect("it works");
        sim.run_for(millis(1));
        let clients: Vec<(Peer, Vec<u8>)> = (0..4)
            .map(|n| {
                let client = sim.connect(addr());
                let bytes = pattern(seed * 4 + n, 1 + sim.random(20_000) as usize);
                for part in bytes.chunks(1 + sim.random(5_000) as usize) {
                    client.send(part);
                }
                client.shutdown();
                (client, bytes)
            })
            .collect();
        sim.run_until(MINUTE, || clients.iter().all(|(client, _)| client.is_eof()))
            .unwrap_or_else(|stuck| panic!("{stuck}"));
        for (client, bytes) in &clients {
            assert!(client.received() == *bytes, "seed {seed}: bytes differ");
            assert!(!client.is_reset());
        }
        sim.run_for(SECOND);
        assert_eq!(log.reasons(), [CloseReason::Eof; 4], "seed {seed}");
        assert_eq!(worker.connections(), 0);
        assert_eq!(worker.buffers_leased(), 0);
        assert_eq!(worker.payloads_queued(), 0);
    }
}

#[test]
fn a_slow_reader_congests_its_connection_and_holds_few_buffers() {
    for seed in seeds(100) {
        let config = SimConfig { socket_buffer: 4_096, ..SimConfig::seeded(seed) };
        let sim = Sim::new(config);
        let log = Log::default();
        // Buffers enough for all that is sent, so that only the pause bounds what is leased.
        let buffers = BufferConfig { size: 1024, count: 512, send_count: 0, ..BufferConfig::default() };
        let config = WorkerConfig { buffers, ..small_on(seed) };
        let worker = sim.worker(config.clone(), &[listener()], Probe::new(&log)).expect("it works");
        let client = sim.connect(addr());
        client.set_reading(false);
        let bytes = pattern(seed, 200_000);
        client.send(&bytes);
        let most = Cell::new(0);
        let watched = || {
            most.set(most.get().max(worker.buffers_leased()));
            false
        };
        sim.run_until(SECOND, watched).expect_err("nobody reads, so nothing gets done");
        assert!(!client.sent_all(), "the sender is slowed down by TCP");
        assert_eq!(worker.metrics().congested, 1);
        assert!(worker.metrics().pauses >= 1);
        assert_eq!(log.0.writable.get(), 0);
        // What is unsent, what came between the pause and its effect, and one buffer's roundings.
        let bound = config.high_water as usize / 256 + 33;
        assert!(most.get() <= bound, "seed {seed}: {} buffers", most.get());
        client.set_reading(true);
        sim.run_until(MINUTE, || client.received_len() == bytes.len() as u64)
            .unwrap_or_else(|stuck| panic!("{stuck}"));
        assert!(client.received() == bytes, "seed {seed}: bytes differ");
        assert!(log.0.writable.get() >= 1);
        sim.run_for(millis(10));
        assert_eq!(worker.buffers_leased(), 0);
    }
}

#[test]
fn a_writer_that_waits_for_writable_is_never_refused_and_sends_everything() {
    for seed in seeds(50) {
        let sim = Sim::new(SimConfig {
            socket_buffer: 4_096,
            faults: Faults::benign(0.05),
            ..SimConfig::seeded(seed)
        });
        let log = Log::default();
        let bytes = pattern(seed, 100_000);
        let rest = Rc::new(RefCell::new(bytes.clone()));
        let mut probe = Probe::new(&log);
        let pump = move |conn: &mut corelane::Conn<'_, Probe>| {
            let mut rest = rest.borrow_mut();
            while !conn.is_congested() && !rest.is_empty() {
                let n = rest.len().min(1_500);
                let part: Vec<u8> = rest.drain(..n).collect();
                conn.send(part).expect("not congested, so not full");
            }
            if rest.is_empty() {
                conn.shutdown_write();
            }
        };
        let again = pump.clone();
        probe.data = Box::new(move |conn, _| pump(conn));
        probe.writable = Box::new(again);
        let worker = sim.worker(small_on(seed), &[listener()], probe).expect("it works");
        let client = sim.connect(addr());
        client.send(b"go");
        sim.run_until(MINUTE, || client.is_eof()).unwrap_or_else(|stuck| panic!("{stuck}"));
        assert!(client.received() == bytes);
        assert_eq!(worker.metrics().send_refusals, 0);
        client.close();
        sim.run_until(SECOND, || worker.connections() == 0).unwrap_or_else(|stuck| panic!("{stuck}"));
    }
}

#[test]
fn a_full_send_queue_refuses_and_gives_the_payload_back() {
    let sim = Sim::new(SimConfig { socket_buffer: 4_096, ..SimConfig::seeded(1) });
    let log = Log::default();
    let refused = Rc::new(Cell::new(0));
    let seen = refused.clone();
    let mut probe = Probe::new(&log);
    probe.data = Box::new(move |conn, data| {
        if data[0] != b'g' {
            // The rest of "go", if it came in two pieces.
            return;
        }
        for _ in 0..100 {
            if let Err(error) = conn.send(vec![7; 1_000]) {
                assert_eq!(error.kind, SendErrorKind::Full);
                assert_eq!(error.payload.len(), 1_000);
                seen.set(seen.get() + 1);
            }
        }
        conn.shutdown_write();
        let error = conn.send(vec![7; 1]).expect_err("after the end");
        assert_eq!(error.kind, SendErrorKind::Closed);
    });
    let worker = sim.worker(small(), &[listener()], probe).expect("it works");
    let client = sim.connect(addr());
    client.send(b"go");
    sim.run_until(MINUTE, || client.is_eof()).unwrap_or_else(|stuck| panic!("{stuck}"));
    // 64 KiB are the limit, which the payload that reaches it may exceed.
    assert_eq!(refused.get(), 34);
    assert_eq!(client.received_len(), 66_000);
    assert_eq!(worker.metrics().send_refusals, 34);
}

#[test]
fn more_senders_than_buffers_lose_nothing_and_never_spin() {
    for seed in seeds(60) {
        let sim = Sim::new(SimConfig {
            faults: Faults::benign(if seed % 2 == 0 { 0.0 } else { 0.05 }),
            ..SimConfig::seeded(seed)
        });
        let log = Log::default();
        let config = WorkerConfig {
            buffers: BufferConfig { size: 512, count: 4, send_count: 0, ..BufferConfig::default() },
            ..small_on(seed)
        };
        let worker = sim.worker(config, &[listener()], Probe::new(&log)).expect("it works");
        let clients: Vec<(Peer, Vec<u8>)> = (0..24)
            .map(|n| {
                let client = sim.connect(addr());
                let bytes = pattern(seed * 32 + n, 4_000);
                client.send(&bytes);
                client.shutdown();
                (client, bytes)
            })
            .collect();
        sim.run_until(MINUTE, || clients.iter().all(|(client, _)| client.is_eof()))
            .unwrap_or_else(|stuck| panic!("{stuck}"));
        for (client, bytes) in &clients {
            assert!(client.received() == *bytes, "seed {seed}: bytes differ");
        }
        let metrics = worker.metrics();
        assert!(metrics.starved > 0, "the pool was too large for this test");
        // Each message costs a receive and a send, and a wait is a turn or two; a worker that asked
        // again while the pool is empty would take thousands.
        let fair = 6 * metrics.messages + 8 * 24;
        assert!(metrics.turns < fair, "{} turns for {} messages", metrics.turns, metrics.messages);
        assert!(metrics.starved < fair, "starved {} times", metrics.starved);
    }
}

#[test]
fn leases_that_slow_readers_keep_are_taken_back_for_the_others() {
    for seed in seeds(40) {
        let sim = Sim::new(SimConfig { socket_buffer: 2_048, ..SimConfig::seeded(seed) });
        let log = Log::default();
        let config = WorkerConfig {
            buffers: BufferConfig { size: 512, count: 8, send_count: 0, ..BufferConfig::default() },
            high_water: 16 << 10,
            ..small_on(seed)
        };
        let worker = sim.worker(config, &[listener()], Probe::new(&log)).expect("it works");
        let slow: Vec<Peer> = (0..3)
            .map(|n| {
                let client = sim.connect(addr());
                client.set_reading(false);
                client.send(&pattern(n, 30_000));
                client
            })
            .collect();
        sim.run_for(millis(100));
        let quick = sim.connect(addr());
        quick.send(b"am I heard?");
        sim.run_until(SECOND, || quick.received_len() == 11).unwrap_or_else(|stuck| panic!("{stuck}"));
        assert!(worker.metrics().reclaimed > 0);
        for (n, client) in slow.iter().enumerate() {
            client.set_reading(true);
            sim.run_until(MINUTE, || client.received_len() == 30_000)
                .unwrap_or_else(|stuck| panic!("{stuck}"));
            assert!(client.received() == pattern(n as u64, 30_000), "seed {seed}: bytes differ");
        }
    }
}

#[test]
fn few_buffers_that_go_round_beside_slow_readers_do_not_cost_a_receive_for_every_message() {
    for seed in seeds(40) {
        let sim = Sim::new(SimConfig { socket_buffer: 2_048, ..SimConfig::seeded(seed) });
        let log = Log::default();
        let config = WorkerConfig {
            buffers: BufferConfig { size: 512, count: 32, send_count: 0, ..BufferConfig::default() },
            high_water: 3_000,
            low_water: 100,
            ..small_on(seed)
        };
        let worker = sim.worker(config, &[listener()], Probe::new(&log)).expect("it works");
        // Four take nearly all buffers; the rest goes round among the others.
        let slow: Vec<Peer> = (0..4).map(|_| sim.connect(addr())).collect();
        for (n, client) in slow.iter().enumerate() {
            client.set_reading(false);
            client.send(&pattern(n as u64, 30_000));
        }
        sim.run_for(millis(20));
        let before = worker.metrics();
        let quick: Vec<Peer> = (0..12).map(|_| sim.connect(addr())).collect();
        for round in 1..=60 {
            quick.iter().for_each(|client| client.send(&[7; 100]));
            let answered = || quick.iter().all(|client| client.received_len() == round * 100);
            sim.run_until(SECOND, answered).unwrap_or_else(|stuck| panic!("{stuck}"));
        }
        let now = worker.metrics();
        let (messages, starved) = (now.messages - before.messages, now.starved - before.starved);
        assert!(starved < messages / 3, "seed {seed}: {starved} receives in vain for {messages} messages");
    }
}

#[test]
fn what_arrives_during_a_pause_is_delivered_in_order_after_it() {
    for seed in seeds(100) {
        let sim = Sim::new(SimConfig {
            faults: Faults::benign(if seed % 2 == 0 { 0.1 } else { 0.0 }),
            ..SimConfig::seeded(seed)
        });
        let log = Log::default();
        let (got, paused) = (Rc::new(RefCell::new(Vec::new())), Rc::new(Cell::new(false)));
        let (sink, told) = (got.clone(), paused.clone());
        let mut probe = Probe::new(&log);
        probe.data = Box::new(move |conn, data| {
            assert!(!told.get(), "data during a pause");
            sink.borrow_mut().extend_from_slice(&data);
            if data.len() % 3 == 0 {
                told.set(true);
                conn.pause();
                conn.set_timer(Some(millis(3)));
            }
        });
        let told = paused.clone();
        probe.timer = Box::new(move |conn| {
            told.set(false);
            conn.resume();
        });
        let told = paused.clone();
        probe.eof = Box::new(move |conn| {
            assert!(!told.get(), "the end during a pause");
            conn.close();
        });
        let worker = sim.worker(small_on(seed), &[listener()], probe).expect("it works");
        let client = sim.connect(addr());
        let bytes = pattern(seed, 15_000);
        for part in bytes.chunks(333) {
            client.send(part);
            sim.run_for(std::time::Duration::from_micros(sim.random(300)));
        }
        client.shutdown();
        sim.run_until(MINUTE, || client.is_eof()).unwrap_or_else(|stuck| panic!("{stuck}"));
        assert!(*got.borrow() == bytes, "seed {seed}: bytes differ");
        sim.run_for(SECOND);
        assert_eq!(log.reasons(), [CloseReason::Eof]);
        assert_eq!(worker.buffers_leased(), 0);
    }
}

#[test]
fn a_half_closed_client_still_gets_its_answer() {
    for seed in seeds(50) {
        let sim = Sim::new(SimConfig::seeded(seed));
        let log = Log::default();
        let mut probe = Probe::new(&log);
        probe.data = Box::new(|_, _| {});
        probe.eof = Box::new(|conn| conn.set_timer(Some(millis(50))));
        probe.timer = Box::new(|conn| {
            conn.send("the answer").expect("this direction is open");
            conn.close();
        });
        let worker = sim.worker(small_on(seed), &[listener()], probe).expect("it works");
        let client = sim.connect(addr());
        client.send(b"the question");
        client.shutdown();
        sim.run_until(SECOND, || client.is_eof()).unwrap_or_else(|stuck| panic!("{stuck}"));
        assert_eq!(client.received(), b"the answer");
        sim.run_until(SECOND, || worker.connections() == 0).unwrap_or_else(|stuck| panic!("{stuck}"));
        assert_eq!(log.reasons(), [CloseReason::Eof]);
    }
}

#[test]
fn a_half_closed_server_still_receives() {
    for seed in seeds(50) {
        let sim = Sim::new(SimConfig::seeded(seed));
        let log = Log::default();
        let got = Rc::new(RefCell::new(Vec::new()));
        let sink = got.clone();
        let mut probe = Probe::new(&log);
        probe.data = Box::new(move |conn, data| {
            sink.borrow_mut().extend_from_slice(&data);
            conn.shutdown_write();
        });
        probe.eof = Box::new(|_| {});
        let worker = sim.worker(small_on(seed), &[listener()], probe).expect("it works");
        let client = sim.connect(addr());
        client.send(b"first");
        sim.run_until(SECOND, || client.is_eof()).unwrap_or_else(|stuck| panic!("{stuck}"));
        client.send(b" and second");
        sim.run_until(SECOND, || got.borrow().len() == 16).unwrap_or_else(|stuck| panic!("{stuck}"));
        assert_eq!(worker.connections(), 1);
        // Both directions ended: the connection is over without being closed by the handler.
        client.shutdown();
        sim.run_until(SECOND, || worker.connections() == 0).unwrap_or_else(|stuck| panic!("{stuck}"));
        assert_eq!(log.reasons(), [CloseReason::Eof]);
        assert!(!client.is_reset());
    }
}

#[test]
fn one_flooding_client_does_not_hold_up_another() {
    for seed in heavy_seeds(30) {
        let sim = Sim::new(SimConfig { socket_buffer: 1 << 20, ..SimConfig::seeded(seed) });
        let log = Log::default();
        let mut probe = Probe::new(&log);
        // The flood is only swallowed; a short message is answered.
        probe.data = Box::new(|conn, data| {
            if data.len() < 8 {
                let _ = conn.send(data);
            }
        });
        let worker = sim.worker(small_on(seed), &[listener()], probe).expect("it works");
        let (flood, quiet) = (sim.connect(addr()), sim.connect(addr()));
        sim.run_until(SECOND, || worker.connections() == 2).unwrap_or_else(|stuck| panic!("{stuck}"));
        flood.send(&vec![0; 4 << 20]);
        sim.run_for(millis(1));
        quiet.send(b"hello");
        sim.run_until(millis(10), || quiet.received_len() == 5).unwrap_or_else(|stuck| panic!("{stuck}"));
    }
}

/// Connections that resume after congestion must not take the buffers of those who wait for one, nor
/// may who finds none lose its place: each of many bulk senders gets its share, within a quarter, as
/// long as all of them have something to send.
#[test]
fn who_waits_for_a_buffer_is_not_overtaken_for_ever() {
    let mut pressed = 0;
    for seed in heavy_seeds(2) {
        let sim = Sim::new(SimConfig { socket_buffer: 1 << 20, ..SimConfig::seeded(seed) });
        let log = Log::default();
        let config = WorkerConfig {
            buffers: BufferConfig { size: 1024, count: 64, send_count: 0, ..BufferConfig::default() },
            ..small_on(seed)
        };
        let listener = ListenerConfig { backlog: 64, ..listener() };
        let worker = sim.worker(config, &[listener], Probe::new(&log)).expect("it works");
        let clients: Vec<Peer> = (0..16).map(|_| sim.connect(addr())).collect();
        sim.run_until(SECOND, || worker.connections() == 16).unwrap_or_else(|stuck| panic!("{stuck}"));
        for client in &clients {
            client.send(&vec![7; 8 << 20]);
        }
        let total = || clients.iter().map(Peer::received_len).sum::<u64>();
        sim.run_until(MINUTE, || total() > 32 << 20).unwrap_or_else(|stuck| panic!("{stuck}"));
        let metrics = worker.metrics();
        // Few networks are so fast that nobody is ever congested.
        pressed += u32::from(metrics.starved > 0 && metrics.congested > 0);
        let fair = total() / 16;
        for (number, client) in clients.iter().enumerate() {
            let share = client.received_len();
            let within = fair * 3 / 4..fair * 5 / 4;
            assert!(within.contains(&share), "seed {seed}: client {number} got {share}, {fair} are fair");
        }
    }
    assert!(pressed > 0 || !usual_seeds(), "no pressure in any world");
}
