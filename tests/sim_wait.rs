//! How a worker waits, in virtual time: what is coalesced comes together and not too late, and nothing else is late.

mod sim_common;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use corelane::sim::{Peer, Sim};
use corelane::{ListenerConfig, Time, WaitPolicy, WorkerConfig};
use sim_common::*;

/// When each message was handed to the handler.
type Heard = Rc<RefCell<Vec<Time>>>;

/// A worker that waits like this, with as many connections, and what it hears.
fn bed(
    seed: u64,
    wait: WaitPolicy,
    peers: usize,
) -> (Sim, corelane::sim::SimWorker<Order>, Vec<Peer>, Heard) {
    let sim = exact(seed);
    let log = Log::default();
    let heard = Heard::default();
    let mut probe = Probe::new(&log);
    let mark = heard.clone();
    probe.data = Box::new(move |conn, _| mark.borrow_mut().push(conn.now()));
    let worker = sim.worker(WorkerConfig { wait, ..small_on(seed) }, &[listener()], probe).expect("it works");
    let peers: Vec<Peer> = (0..peers).map(|_| sim.connect(addr())).collect();
    sim.run_until(SECOND, || worker.connections() == peers.len()).unwrap_or_else(|stuck| panic!("{stuck}"));
    sim.run_for(SECOND);
    (sim, worker, peers, heard)
}

#[test]
fn what_comes_after_a_quiet_time_is_not_delayed() {
    for seed in seeds(30) {
        let (sim, _worker, peers, heard) =
            bed(seed, WaitPolicy::Coalesce { max_delay: millis(50), batch: 64 }, 1);
        for n in 1..4 {
            let sent = sim.now();
            peers[0].send(b"x");
            sim.run_until(SECOND, || heard.borrow().len() == n).unwrap_or_else(|stuck| panic!("{stuck}"));
            let took = heard.borrow()[n - 1].since(sent);
            assert!(took < millis(5), "seed {seed}: {took:?}");
            sim.run_for(SECOND);
        }
    }
}

#[test]
fn what_comes_soon_after_is_taken_together_and_not_later_than_the_delay() {
    for seed in seeds(30) {
        let (sim, worker, peers, heard) =
            bed(seed, WaitPolicy::Coalesce { max_delay: millis(50), batch: 64 }, 6);
        peers[0].send(b"1");
        sim.run_until(SECOND, || heard.borrow().len() == 1).unwrap_or_else(|stuck| panic!("{stuck}"));
        let turns = worker.metrics().turns;
        let mut sent = Vec::new();
        for peer in &peers[1..] {
            sent.push(sim.now());
            peer.send(b"x");
            sim.run_for(millis(2));
        }
        assert_eq!(heard.borrow().len(), 1, "seed {seed}: the others wait for each other");
        sim.run_until(SECOND, || heard.borrow().len() == 6).unwrap_or_else(|stuck| panic!("{stuck}"));
        for (at, sent) in heard.borrow()[1..].iter().zip(sent) {
            let took = at.since(sent);
            assert!(took <= millis(55), "seed {seed}: {took:?}");
        }
        // The one that ends it and, where pieces come late to the socket, one more.
        let turns = worker.metrics().turns - turns;
        assert!(turns <= 3, "seed {seed}: {turns} turns for five messages");
    }
}

#[test]
fn a_full_batch_does_not_wait() {
    for seed in seeds(30) {
        let (sim, _worker, peers, heard) =
            bed(seed, WaitPolicy::Coalesce { max_delay: millis(90), batch: 3 }, 4);
        peers[0].send(b"1");
        sim.run_until(SECOND, || heard.borrow().len() == 1).unwrap_or_else(|stuck| panic!("{stuck}"));
        let sent = sim.now();
        peers[1..].iter().for_each(|peer| peer.send(b"x"));
        sim.run_until(SECOND, || heard.borrow().len() == 4).unwrap_or_else(|stuck| panic!("{stuck}"));
        let took = sim.now().since(sent);
        assert!(took < millis(20), "seed {seed}: {took:?}");
    }
}

#[test]
fn timers_and_stops_are_on_time_whatever_is_waited_for() {
    let policies = [
        WaitPolicy::Spin { max: millis(10) },
        WaitPolicy::Coalesce { max_delay: millis(100), batch: 1000 },
        WaitPolicy::Adaptive { budget: millis(100) },
    ];
    for (seed, wait) in seeds(30).flat_map(|seed| policies.map(|wait| (seed, wait))) {
        let sim = exact(seed);
        let log = Log::default();
        let rung = Rc::new(RefCell::new(Vec::new()));
        let mut probe = Probe::new(&log);
        probe.data = Box::new(|conn, _| conn.set_timer(Some(millis(7))));
        let mark = rung.clone();
        probe.timer = Box::new(move |conn| mark.borrow_mut().push(conn.now()));
        let worker =
            sim.worker(WorkerConfig { wait, ..small_on(seed) }, &[listener()], probe).expect("it works");
        let (peer, other) = (sim.connect(addr()), sim.connect(addr()));
        sim.run_until(SECOND, || worker.connections() == 2).unwrap_or_else(|stuck| panic!("{stuck}"));
        sim.run_for(SECOND);
        peer.send(b"x");
        sim.run_for(Duration::from_millis(3));
        // Waits to be gathered when the timer is due, and does not hold it up.
        other.send(b"y");
        sim.run_until(millis(20), || !rung.borrow().is_empty())
            .unwrap_or_else(|stuck| panic!("{wait}: {stuck}"));
        worker.stop(SECOND);
        sim.run_until(MINUTE, || !worker.is_running()).unwrap_or_else(|stuck| panic!("{wait}: {stuck}"));
    }
}

/// Everything at once: histories with each policy lose nothing, and come to their end.
#[test]
fn echoes_are_whole_however_it_waits() {
    for seed in seeds(120) {
        let delay = Duration::from_micros(1 + 37 * (seed % 50));
        let wait = match seed % 3 {
            0 => WaitPolicy::Spin { max: delay },
            1 => WaitPolicy::Coalesce { max_delay: delay, batch: 1 + seed as u32 % 40 },
            _ => WaitPolicy::Adaptive { budget: delay },
        };
        let sim = Sim::new(corelane::sim::SimConfig {
            faults: corelane::sim::Faults::benign(0.1),
            ..corelane::sim::SimConfig::seeded(seed)
        });
        let log = Log::default();
        let config = WorkerConfig { wait, ..small_on(seed) };
        let worker = sim.worker(config, &[listener()], Probe::new(&log)).expect("it works");
        let peers: Vec<Peer> = (0..12).map(|_| sim.connect(addr())).collect();
        let mut sent = vec![Vec::new(); peers.len()];
        for n in 0..300_u32 {
            let at = sim.random(peers.len() as u64) as usize;
            peers[at].send(&n.to_le_bytes());
            sent[at].extend_from_slice(&n.to_le_bytes());
            sim.run_for(Duration::from_micros(sim.random(400)));
        }
        sim.calm();
        let whole = || peers.iter().zip(&sent).all(|(peer, sent)| peer.received_len() == sent.len() as u64);
        sim.run_until(MINUTE, whole).unwrap_or_else(|stuck| panic!("seed {seed}, {wait}: {stuck}"));
        for (peer, sent) in peers.iter().zip(&sent) {
            assert_eq!(&peer.received(), sent, "seed {seed}, {wait}");
        }
        drop(peers);
        worker.stop(SECOND);
        sim.run_until(MINUTE, || !worker.is_running()).unwrap_or_else(|stuck| panic!("{wait}: {stuck}"));
        let report = worker.report().expect("it ended");
        assert_eq!((report.ops_in_kernel, report.buffers_outstanding), (0, 0), "seed {seed}, {wait}");
    }
}

#[test]
fn a_queue_of_connections_is_accepted_without_delay() {
    for seed in seeds(30) {
        let sim = exact(seed);
        let log = Log::default();
        let wait = WaitPolicy::Coalesce { max_delay: millis(100), batch: 1000 };
        // Single accepts, one after the other: there is never room for two full queues.
        let config = WorkerConfig { wait, max_connections: 40, ..small_on(seed) };
        let listeners = [ListenerConfig { backlog: 64, ..listener() }];
        let worker = sim.worker(config, &listeners, Probe::new(&log)).expect("it works");
        let _peers: Vec<Peer> = (0..40).map(|_| sim.connect(addr())).collect();
        sim.run_until(SECOND, || worker.connections() == 40).unwrap_or_else(|stuck| panic!("{stuck}"));
        let took = sim.now().since(Time::ZERO);
        assert!(took < millis(250), "seed {seed}: {took:?}");
    }
}
