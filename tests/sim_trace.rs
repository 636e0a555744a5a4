//! A seed names a whole history (promise 10).

mod sim_common;

use std::time::Duration;

use corelane::sim::{Faults, Peer, Sim, SimConfig, StuckReason};
use sim_common::*;

/// A busy history: several workers, peers that come, talk, stall and go, everything going wrong.
fn history(seed: u64) -> (u64, Vec<String>) {
    let faults = Faults { reset: 0.005, ..Faults::benign(0.1) };
    let config = SimConfig { socket_buffer: 4_096, faults, ..SimConfig::seeded(seed) };
    let sim = Sim::new(config);
    let log = Log::default();
    let workers = sim.workers(2, small_on(seed), &[listener()], |_| Probe::new(&log)).expect("it works");
    let mut peers: Vec<Peer> = Vec::new();
    for _ in 0..60 {
        match sim.random(5) {
            0 => peers.push(sim.connect(addr())),
            1 if !peers.is_empty() => {
                drop(peers.swap_remove(sim.random(peers.len() as u64) as usize));
            }
            _ if !peers.is_empty() => {
                let peer = &peers[sim.random(peers.len() as u64) as usize];
                peer.set_reading(sim.random(4) > 0);
                peer.send(&pattern(seed, sim.random(3_000) as usize));
            }
            _ => {}
        }
        sim.run_for(Duration::from_micros(sim.random(2_000)));
    }
    workers[0].stop(SECOND);
    sim.run_until(MINUTE, || workers.iter().all(|worker| !worker.is_running()))
        .unwrap_or_else(|stuck| panic!("{stuck}"));
    (sim.trace_hash(), sim.trace_tail(1_024))
}

#[test]
fn the_same_seed_gives_the_same_trace_and_another_seed_another() {
    let mut hashes = Vec::new();
    for seed in seeds(60) {
        let (hash, tail) = history(seed);
        let (again, tail_again) = history(seed);
        assert_eq!(tail, tail_again, "seed {seed}");
        assert_eq!(hash, again, "seed {seed}");
        hashes.push(hash);
    }
    let count = hashes.len();
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), count);
}

#[test]
fn a_run_that_gets_nowhere_says_what_is_needed_to_see_it_again() {
    let sim = Sim::new(SimConfig::seeded(4_711));
    let log = Log::default();
    let _worker = sim.worker(small(), &[listener()], Probe::new(&log)).expect("it works");
    let client = sim.connect(addr());
    client.send(b"hello");
    let stuck = sim.run_until(SECOND, || false).expect_err("it never comes true");
    assert!(matches!(stuck.reason, StuckReason::Quiet | StuckReason::Limit));
    let text = stuck.to_string();
    assert!(text.contains("seed 4711") && text.contains("received"), "{text}");
    assert_eq!(stuck.at, sim.now());
}

#[test]
fn a_worker_that_turns_without_end_is_caught() {
    let sim = Sim::new(SimConfig::seeded(1));
    let log = Log::default();
    fn again(cx: &mut corelane::Cx<'_, Probe>) {
        let order: Order = Box::new(again);
        cx.post(0, order).unwrap_or_else(|_| panic!("the mailbox has room"));
    }
    let mut probe = Probe::new(&log);
    probe.start = Box::new(again);
    let _worker = sim.worker(small(), &[], probe).expect("it works");
    let stuck = sim.run_until(MINUTE, || false).expect_err("it never comes true");
    assert_eq!(stuck.reason, StuckReason::Spinning);
}
