//! Accepting on the simulated kernel: nobody is lost, no limit is passed.

mod sim_common;

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use corelane::sim::{Faults, Peer, Sim, SimConfig};
use corelane::{Descriptors, ListenerConfig, Sharing, WorkerConfig};
use sim_common::*;

#[test]
fn failing_accepts_are_tried_again_later_and_lose_nobody() {
    for seed in seeds(100) {
        let sim = Sim::new(SimConfig {
            faults: Faults { accept_error: 0.7, cq_overflow: 0.2, ..Faults::none() },
            ..SimConfig::seeded(seed)
        });
        let log = Log::default();
        let worker = sim.worker(small_on(seed), &[listener()], Probe::new(&log)).expect("it works");
        let clients: Vec<Peer> = (0..20)
            .map(|_| {
                let client = sim.connect(addr());
                client.send(b"hello");
                client
            })
            .collect();
        sim.run_until(MINUTE, || clients.iter().all(|client| client.received() == b"hello"))
            .unwrap_or_else(|stuck| panic!("{stuck}"));
        let metrics = worker.metrics();
        assert!(metrics.accept_errors > 0);
        assert_eq!(metrics.accepted, 20);
        // Each failure is followed by at least 10 ms of patience, not by a spin.
        let spent = sim.now().since(corelane::Time::ZERO);
        assert!(u128::from(metrics.accept_errors) <= spent.as_millis() / 10 * 8 + 8);
    }
}

#[test]
fn a_lasting_failure_to_accept_is_waited_out_without_spinning() {
    let sim = Sim::new(SimConfig {
        faults: Faults { accept_error: 1.0, ..Faults::none() },
        ..SimConfig::seeded(1)
    });
    let log = Log::default();
    let worker = sim.worker(small(), &[listener()], Probe::new(&log)).expect("it works");
    let client = sim.connect(addr());
    client.send(b"hello");
    sim.run_for(10 * SECOND);
    let turns = worker.metrics().turns;
    assert!(turns < 1_000, "{turns} turns in ten seconds without success");
    sim.set_faults(Faults::none());
    sim.run_until(SECOND, || client.received() == b"hello").unwrap_or_else(|stuck| panic!("{stuck}"));
}

#[test]
fn the_connection_limit_is_never_passed_and_those_who_wait_get_in_later() {
    for seed in seeds(60) {
        let max = 1 + seed as u32 % 7;
        let sim = Sim::new(SimConfig {
            faults: Faults::benign(if seed % 2 == 0 { 0.1 } else { 0.0 }),
            ..SimConfig::seeded(seed)
        });
        let log = Log::default();
        let config = WorkerConfig { max_connections: max, ..small_on(seed) };
        let worker = sim.worker(config, &[listener()], Probe::new(&log)).expect("it works");
        let mut waiting: Vec<Peer> = (0..30)
            .map(|_| {
                let client = sim.connect(addr());
                client.send(b"hello");
                client
            })
            .collect();
        while !waiting.is_empty() {
            let served = || waiting.iter().any(|client| client.received() == b"hello");
            sim.run_until(20 * MINUTE, || {
                assert!(worker.connections() as u32 <= max, "{} of {max}", worker.connections());
                served()
            })
            .unwrap_or_else(|stuck| panic!("{stuck}"));
            assert!(waiting.iter().all(|client| !client.is_refused() && !client.is_reset()));
            // Those who were served leave, and so make room.
            waiting.retain(|client| client.received() != b"hello");
        }
        sim.run_for(MINUTE);
        assert_eq!(log.ended(), 30);
        assert!(log.0.most_open.get() as u32 <= max);
        assert_eq!(worker.metrics().refused, 0, "nobody was accepted only to be turned away");
    }
}

#[test]
fn the_runtimes_total_is_never_passed_and_those_who_wait_get_in_later() {
    for seed in seeds(60) {
        let total = 1 + seed % 9;
        let sim = Sim::new(SimConfig {
            max_connections: Some(total),
            faults: Faults::benign(if seed % 2 == 0 { 0.1 } else { 0.0 }),
            ..SimConfig::seeded(seed)
        });
        // One log for all workers, so that what is open is counted together.
        let log = Log::default();
        let sharing = if seed % 3 == 0 { Sharing::One } else { Sharing::PerWorker };
        let listeners = [ListenerConfig { sharing, ..listener() }];
        let workers = sim.workers(3, small_on(seed), &listeners, |_| Probe::new(&log)).expect("it works");
        let mut waiting: Vec<Peer> = (0..30)
            .map(|_| {
                let client = sim.connect(addr());
                client.send(b"hello");
                client
            })
            .collect();
        while !waiting.is_empty() {
            sim.run_until(20 * MINUTE, || waiting.iter().any(|client| client.received_len() == 5))
                .unwrap_or_else(|stuck| panic!("{stuck}"));
            assert!(waiting.iter().all(|client| !client.is_refused() && !client.is_over()));
            waiting.retain(|client| client.received_len() < 5);
        }
        assert!(log.0.most_open.get() as u64 <= total);
        sim.run_for(MINUTE);
        assert_eq!(log.ended(), 30);
        assert!(workers.iter().all(|worker| worker.connections() == 0));
    }
}

#[test]
fn a_refused_connection_is_closed_and_leaves_no_state() {
    let sim = Sim::new(SimConfig::seeded(1));
    let log = Log::default();
    let mut probe = Probe::new(&log);
    let mut count = 0;
    probe.accept = Box::new(move |_, _| {
        count += 1;
        count % 2 == 0
    });
    let worker = sim.worker(small(), &[listener()], probe).expect("it works");
    let clients: Vec<Peer> = (0..10).map(|_| sim.connect(addr())).collect();
    sim.run_for(SECOND);
    assert_eq!(clients.iter().filter(|client| client.is_eof()).count(), 5);
    assert_eq!(worker.metrics().refused, 5);
    assert_eq!(worker.connections(), 5);
    assert_eq!(log.open(), 5);
}

#[test]
fn workers_that_share_an_address_serve_everyone() {
    for seed in seeds(40) {
        for sharing in [Sharing::PerWorker, Sharing::One] {
            let sim = Sim::new(SimConfig {
                faults: Faults::benign(if seed % 2 == 0 { 0.1 } else { 0.0 }),
                ..SimConfig::seeded(seed)
            });
            let logs: Vec<Log> = (0..3).map(|_| Log::default()).collect();
            let shared = ListenerConfig { sharing, ..listener() };
            let workers = sim
                .workers(3, small_on(seed), &[shared], |index| Probe::new(&logs[index]))
                .expect("it works");
            let clients: Vec<Peer> = (0..30)
                .map(|_| {
                    let client = sim.connect(addr());
                    client.send(b"hello");
                    client
                })
                .collect();
            sim.run_until(MINUTE, || clients.iter().all(|client| client.received() == b"hello"))
                .unwrap_or_else(|stuck| panic!("{stuck}"));
            let busy = workers.iter().filter(|worker| worker.connections() > 0).count();
            assert!(busy >= 2, "seed {seed}, {sharing:?}: one worker got everybody");
            drop(clients);
            sim.run_for(SECOND);
            assert!(workers.iter().all(|worker| worker.connections() == 0));
        }
    }
}

#[test]
fn the_peers_address_is_told_where_it_is_wanted() {
    for descriptors in [Descriptors::Direct, Descriptors::Fd] {
        for wanted in [true, false] {
            let sim = Sim::new(SimConfig::seeded(1));
            let log = Log::default();
            let told = Rc::new(RefCell::new(Vec::new()));
            let sink = told.clone();
            let mut probe = Probe::new(&log);
            probe.accept = Box::new(move |_, accepted| {
                sink.borrow_mut().push(accepted.peer);
                true
            });
            let config = WorkerConfig { descriptors, peer_addresses: wanted, ..small() };
            let _worker = sim.worker(config, &[listener()], probe).expect("it works");
            let client = sim.connect(addr());
            sim.run_until(SECOND, || told.borrow().len() == 1).unwrap_or_else(|stuck| panic!("{stuck}"));
            if wanted {
                assert_eq!(told.borrow()[0], Some(client.addr()));
            }
        }
    }
}

#[test]
fn a_burst_is_handed_over_in_portions() {
    let sim = Sim::new(SimConfig::seeded(1));
    let log = Log::default();
    let (most, now) = (Rc::new(Cell::new(0)), Rc::new(Cell::new((corelane::Time::ZERO, 0))));
    let (peak, count) = (most.clone(), now.clone());
    let mut probe = Probe::new(&log);
    probe.accept = Box::new(move |cx, _| {
        let (at, n) = count.get();
        let n = if at == cx.now() { n + 1 } else { 1 };
        count.set((cx.now(), n));
        peak.set(peak.get().max(n));
        true
    });
    let config = WorkerConfig { accept_budget: 2, ..small() };
    let worker = sim.worker(config, &[listener()], probe).expect("it works");
    let _clients: Vec<Peer> = (0..30).map(|_| sim.connect(addr())).collect();
    sim.run_until(MINUTE, || worker.connections() == 30).unwrap_or_else(|stuck| panic!("{stuck}"));
    assert!(most.get() <= 2, "{} in one turn", most.get());
}
