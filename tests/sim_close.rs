//! How connections begin and end on the simulated kernel: once each, for the right reason, and
//! leaving nothing behind.

mod sim_common;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use corelane::sim::{Faults, Peer, Sim, SimConfig, SimWorker};
use corelane::{BufferConfig, CloseReason, WorkerConfig};
use sim_common::*;

/// A worker that connects to `other_addr` when told so, and the log of it.
fn connector(sim: &Sim, log: &Log) -> SimWorker<Order> {
    let mut probe = Probe::new(log);
    probe.connected = Box::new(|conn| conn.send("hello").expect("it is open"));
    sim.worker(small_on(sim.seed()), &[listener()], probe).expect("it works")
}

#[test]
fn an_outgoing_connection_is_established_and_carries_data_both_ways() {
    for seed in seeds(100) {
        let sim = Sim::new(SimConfig {
            faults: Faults::benign(if seed % 2 == 0 { 0.1 } else { 0.0 }),
            ..SimConfig::seeded(seed)
        });
        let log = Log::default();
        with_log(&log);
        let server = sim.listen(other_addr());
        let worker = connector(&sim, &log);
        connect(&worker);
        let taken: RefCell<Option<Peer>> = RefCell::new(None);
        sim.run_until(SECOND, || {
            let mut taken = taken.borrow_mut();
            if taken.is_none() {
                *taken = server.accept();
            }
            taken.as_ref().is_some_and(|peer| peer.received() == b"hello")
        })
        .unwrap_or_else(|stuck| panic!("{stuck}"));
        let peer = taken.take().expect("it was accepted");
        peer.take_received();
        peer.send(b"and back");
        sim.run_until(SECOND, || peer.received() == b"and back").unwrap_or_else(|stuck| panic!("{stuck}"));
        assert_eq!(worker.metrics().connected, 1);
        peer.close();
        sim.run_until(SECOND, || worker.connections() == 0).unwrap_or_else(|stuck| panic!("{stuck}"));
        assert_eq!(log.reasons(), [CloseReason::Eof]);
    }
}

#[test]
fn what_is_sent_before_a_connection_is_established_waits_for_it_or_goes_with_it() {
    for seed in seeds(60) {
        let sim = Sim::new(SimConfig::seeded(seed));
        let log = Log::default();
        with_log(&log);
        let server = (seed % 2 == 0).then(|| sim.listen(other_addr()));
        let mut probe = Probe::new(&log);
        probe.start = Box::new(|cx| {
            let id = connect_from(cx, SECOND).expect("there is room");
            let mut conn = cx.conn(id).expect("it is being connected");
            conn.send(vec![b'a'; 3_000]).expect("it waits");
            conn.send("b").expect("it waits");
            conn.shutdown_write();
        });
        let worker = sim.worker(small_on(seed), &[listener()], probe).expect("it works");
        sim.run_for(millis(10));
        let Some(server) = server else {
            assert!(matches!(log.reasons()[..], [CloseReason::ConnectFailed(_)]));
            assert_eq!(worker.payloads_queued(), 0);
            continue;
        };
        let peer = server.accept().expect("it waits");
        sim.run_until(SECOND, || peer.is_eof()).unwrap_or_else(|stuck| panic!("{stuck}"));
        assert_eq!(peer.received_len(), 3_001);
        assert!(peer.received().ends_with(b"ab"));
    }
}

#[test]
fn a_refused_or_impossible_connect_is_reported_with_the_systems_error() {
    for seed in seeds(50) {
        let faults = Faults { connect_error: (seed % 2) as f64, ..Faults::none() };
        let sim = Sim::new(SimConfig { faults, ..SimConfig::seeded(seed) });
        let log = Log::default();
        with_log(&log);
        let worker = connector(&sim, &log);
        connect(&worker);
        sim.run_until(SECOND, || worker.metrics().closed_total() == 1)
            .unwrap_or_else(|stuck| panic!("{stuck}"));
        sim.run_for(millis(10));
        let error = match log.reasons()[..] {
            [CloseReason::ConnectFailed(code)] => std::io::Error::from_raw_os_error(code),
            ref other => panic!("{other:?}"),
        };
        let refused = error.kind() == std::io::ErrorKind::ConnectionRefused;
        assert_eq!(refused, seed % 2 == 0, "seed {seed}: {error}");
        assert_eq!(worker.connections(), 0);
    }
}

#[test]
fn a_reset_at_any_moment_closes_the_connection_once() {
    let mut resets = 0;
    for seed in seeds(300) {
        let sim = Sim::new(SimConfig { socket_buffer: 4_096, ..SimConfig::seeded(seed) });
        let log = Log::default();
        let worker = sim.worker(small_on(seed), &[listener()], Probe::new(&log)).expect("it works");
        sim.run_for(millis(1));
        let accepts = worker.ops_in_flight();
        let client = sim.connect(addr());
        client.set_reading(sim.random(2) == 0);
        client.send(&pattern(seed, sim.random(40_000) as usize));
        sim.run_for(Duration::from_micros(sim.random(3_000)));
        client.reset();
        sim.run_for(SECOND);
        match log.reasons()[..] {
            // Before it was established: it was never accepted.
            [] => assert_eq!(log.0.begun.get(), 0),
            [CloseReason::Reset] => resets += 1,
            // Linux tells an error to one operation only. A send that had taken a part before
            // swallows it, and receiving then sees the end of the stream.
            [CloseReason::Eof] => assert!(worker.metrics().short_sends > 0, "seed {seed}"),
            ref other => panic!("seed {seed}: {other:?}"),
        }
        assert_at_rest(&worker, accepts);
    }
    assert!(resets > 200 || !usual_seeds(), "{resets} of 300");
}

#[test]
fn a_close_with_unread_answers_reaches_the_worker_as_a_reset_or_an_end() {
    let mut kinds = [0; 2];
    for seed in seeds(200) {
        let sim = Sim::new(SimConfig { socket_buffer: 4_096, ..SimConfig::seeded(seed) });
        let log = Log::default();
        let worker = sim.worker(small_on(seed), &[listener()], Probe::new(&log)).expect("it works");
        let client = sim.connect(addr());
        client.set_reading(false);
        client.send(&pattern(seed, 1 + sim.random(3_000) as usize));
        sim.run_for(Duration::from_micros(sim.random(2_000)));
        client.close();
        sim.run_for(10 * SECOND);
        match log.reasons()[..] {
            [CloseReason::Eof] => kinds[0] += 1,
            [CloseReason::Reset] => kinds[1] += 1,
            ref other => panic!("seed {seed}: {other:?}"),
        }
        assert_eq!(worker.connections(), 0);
        assert_eq!(worker.buffers_leased(), 0);
    }
    assert!((kinds[0] > 5 && kinds[1] > 5) || !usual_seeds(), "both happen: {kinds:?}");
}

#[test]
fn what_a_peer_sent_before_it_vanished_is_delivered_although_answers_fail() {
    for seed in seeds(400) {
        let sim = Sim::new(SimConfig::seeded(seed));
        let log = Log::default();
        let got = Rc::new(RefCell::new(Vec::new()));
        let sink = got.clone();
        let mut probe = Probe::new(&log);
        probe.data = Box::new(move |conn, data| {
            sink.borrow_mut().extend_from_slice(&data);
            let _ = conn.send("ok");
        });
        let worker = sim.worker(small_on(seed), &[listener()], probe).expect("it works");
        let client = sim.connect(addr());
        client.set_reading(false);
        let bytes = pattern(seed, 1 + sim.random(50_000) as usize);
        for part in bytes.chunks(7_000) {
            client.send(part);
            sim.run_for(Duration::from_micros(sim.random(500)));
        }
        sim.run_until(SECOND, || client.sent_all()).unwrap_or_else(|stuck| panic!("{stuck}"));
        // By reset, if an answer is there that was not read.
        client.close();
        sim.run_for(10 * SECOND);
        assert_eq!(log.ended(), 1, "seed {seed}");
        let lost = bytes.len() - got.borrow().len();
        assert!(bytes.starts_with(&got.borrow()), "seed {seed}: bytes differ");
        assert_eq!(lost, 0, "seed {seed}: {:?}", log.reasons());
        assert_eq!(worker.connections(), 0);
    }
}

#[test]
fn aborting_tells_the_peer_and_drops_what_was_queued() {
    for seed in seeds(100) {
        let sim = Sim::new(SimConfig {
            faults: Faults { late_completion: 0.5, ..Faults::none() },
            ..SimConfig::seeded(seed)
        });
        let log = Log::default();
        let mut probe = Probe::new(&log);
        probe.data = Box::new(|conn, _| {
            conn.send(vec![1; 50_000]).expect("the queue is empty");
            conn.abort();
        });
        let worker = sim.worker(small_on(seed), &[listener()], probe).expect("it works");
        let client = sim.connect(addr());
        client.send(b"x");
        sim.run_until(SECOND, || client.is_reset()).unwrap_or_else(|stuck| panic!("{stuck}"));
        sim.run_for(SECOND);
        assert_eq!(log.reasons(), [CloseReason::Local]);
        assert_eq!(worker.connections(), 0);
        assert_eq!(worker.payloads_queued(), 0);
    }
}

#[test]
fn a_reason_given_by_the_handler_is_the_reason_that_is_reported() {
    let sim = Sim::new(SimConfig::seeded(1));
    let log = Log::default();
    let mut probe = Probe::new(&log);
    probe.data = Box::new(|conn, _| conn.close_with(CloseReason::Limit));
    let worker = sim.worker(small(), &[listener()], probe).expect("it works");
    let client = sim.connect(addr());
    client.send(b"x");
    sim.run_until(SECOND, || client.is_eof()).unwrap_or_else(|stuck| panic!("{stuck}"));
    client.close();
    sim.run_until(SECOND, || worker.connections() == 0).unwrap_or_else(|stuck| panic!("{stuck}"));
    assert_eq!(log.reasons(), [CloseReason::Limit]);
    assert_eq!(worker.metrics().closed[CloseReason::Limit.index()], 1);
}

/// Few slots, many connections, completions that come late: each client numbers its bytes, and the
/// handler checks that a connection never sees another one's.
#[test]
fn a_late_completion_never_reaches_the_next_connection_in_the_slot() {
    for seed in seeds(100) {
        let sim = Sim::new(SimConfig {
            socket_buffer: 2_048,
            faults: Faults {
                late_completion: 0.6,
                late_by: Duration::from_millis(30),
                short_send: 0.1,
                cq_overflow: 0.1,
                ..Faults::none()
            },
            ..SimConfig::seeded(seed)
        });
        let log = Log::default();
        let mut probe = Probe::new(&log);
        // The first byte names the client; all others are the same.
        let names: Rc<RefCell<std::collections::BTreeMap<u64, u8>>> = Rc::default();
        let seen = names.clone();
        probe.data = Box::new(move |conn, data| {
            let number = conn.state().number;
            let name = *seen.borrow_mut().entry(number).or_insert(data[0]);
            assert!(data.iter().all(|byte| *byte == name), "another connection's bytes");
            let _ = conn.send(data);
        });
        let config = WorkerConfig { max_connections: 3, ..small_on(seed) };
        let worker = sim.worker(config, &[listener()], probe).expect("it works");
        sim.run_for(millis(5));
        let accepts = worker.ops_in_flight();
        for round in 0..20u64 {
            let clients: Vec<Peer> = (0..3)
                .map(|n| {
                    let client = sim.connect(addr());
                    let name = (round * 3 + n) as u8;
                    client.set_reading(sim.random(3) > 0);
                    client.send(&vec![name; 1 + sim.random(6_000) as usize]);
                    client
                })
                .collect();
            sim.run_for(Duration::from_micros(sim.random(5_000)));
            for (n, client) in clients.iter().enumerate() {
                let name = (round * 3 + n as u64) as u8;
                assert!(client.received().iter().all(|byte| *byte == name));
                match sim.random(3) {
                    0 => client.reset(),
                    1 => client.close(),
                    _ => {}
                }
            }
        }
        sim.run_for(20 * SECOND);
        assert_eq!(log.open(), 0, "seed {seed}");
        assert_at_rest(&worker, accepts);
    }
}

#[test]
fn what_arrived_during_a_pause_is_delivered_although_a_reset_followed() {
    for seed in seeds(60) {
        let sim = Sim::new(SimConfig::seeded(seed));
        let log = Log::default();
        let got = Rc::new(Cell::new(0));
        let sum = got.clone();
        let mut probe = Probe::new(&log);
        probe.data = Box::new(move |conn, data| {
            if sum.replace(sum.get() + data.len()) == 0 {
                conn.pause();
                conn.set_timer(Some(millis(50)));
            }
        });
        probe.timer = Box::new(|conn| conn.resume());
        let config =
            WorkerConfig { buffers: BufferConfig { size: 64, ..small_on(seed).buffers }, ..small_on(seed) };
        let worker = sim.worker(config, &[listener()], probe).expect("it works");
        let client = sim.connect(addr());
        client.send(&[1; 1000]);
        // All of it is with the worker, or in its socket, when the reset comes.
        sim.run_until(SECOND, || client.sent_all()).unwrap_or_else(|stuck| panic!("{stuck}"));
        sim.run_for(millis(10));
        client.reset();
        sim.run_until(SECOND, || worker.connections() == 0).unwrap_or_else(|stuck| panic!("{stuck}"));
        assert_eq!((got.get(), log.reasons()), (1000, vec![CloseReason::Reset]), "seed {seed}");
    }
}

#[test]
fn a_close_before_a_connection_is_established_still_sends_what_waits() {
    for seed in seeds(40) {
        let sim = Sim::new(SimConfig::seeded(seed));
        let log = Log::default();
        with_log(&log);
        let server = sim.listen(other_addr());
        let mut probe = Probe::new(&log);
        probe.start = Box::new(|cx| {
            let id = connect_from(cx, SECOND).expect("it is begun");
            let mut conn = cx.conn(id).expect("it is being made");
            conn.send("precious").expect("it waits");
            conn.close();
        });
        let worker = sim.worker(small_on(seed), &[], probe).expect("it works");
        let taken: RefCell<Option<Peer>> = RefCell::new(None);
        sim.run_until(SECOND, || {
            let mut taken = taken.borrow_mut();
            if taken.is_none() {
                *taken = server.accept();
            }
            taken.as_ref().is_some_and(|peer| peer.is_eof())
        })
        .unwrap_or_else(|stuck| panic!("{stuck}"));
        let peer = taken.take().expect("it was accepted");
        assert_eq!(peer.received(), b"precious");
        peer.close();
        sim.run_until(MINUTE, || worker.connections() == 0).unwrap_or_else(|stuck| panic!("{stuck}"));
        assert_eq!(log.reasons(), [CloseReason::Local]);
    }
}
