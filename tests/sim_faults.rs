//! Faults, invariants and explorations as a user of the simulation meets them.

mod sim_common;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::error::Error;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use corelane::sim::{Exploration, Fault, Faults, Peer, Shortage, Sim, SimConfig, StuckReason, When};
use corelane::{BufferConfig, BufferError, CloseReason, ConfigError, WorkerConfig};
use sim_common::*;

/// Every scripted fault strikes an echo server somewhere; the echo is whole all the same, or the
/// connection ended for the reason that the fault gives.
#[test]
fn every_fault_on_demand_does_what_its_documentation_says() {
    let time = millis(300);
    let unnoticed = [
        Fault::AcceptError(Shortage::ProcessFiles),
        Fault::AcceptError(Shortage::Memory),
        Fault::ShortRecv { bytes: 1 },
        Fault::NoBuffer,
        Fault::ShortSend { bytes: 1 },
        Fault::LateCompletion { by: time },
        Fault::SegmentLoss,
        Fault::Stall { time },
        Fault::Pause { time },
        Fault::ClockJump { by: time },
    ];
    for seed in seeds(40) {
        for fault in unnoticed {
            let sim = Sim::new(SimConfig::seeded(seed));
            let log = Log::default();
            let worker = sim.worker(small_on(seed), &[listener()], Probe::new(&log)).expect("it works");
            sim.script(When::nth(1 + seed % 2), fault);
            // One more that waits for nothing is there to be counted.
            sim.script(When::at(sim.now() + MINUTE), Fault::RecvStop);
            // Two clients, so that everything has a second chance.
            let clients = [sim.connect(addr()), sim.connect(addr())];
            let bytes = pattern(seed, 5_000);
            for client in &clients {
                client.send(&bytes);
                client.shutdown();
            }
            sim.run_until(10 * SECOND, || clients.iter().all(Peer::is_eof))
                .unwrap_or_else(|stuck| panic!("{fault:?}: {stuck}"));
            assert_eq!(sim.script_left(), 1, "seed {seed}: {fault:?} did not strike");
            for client in &clients {
                assert!(client.received() == bytes, "seed {seed}: {fault:?} was noticed");
                client.close();
            }
            sim.run_until(MINUTE, || worker.check_at_rest().is_ok())
                .unwrap_or_else(|stuck| panic!("{fault:?}: {stuck}"));
        }
    }
}

#[test]
fn faults_that_end_connections_end_the_one_that_they_were_called_for() {
    for seed in seeds(60) {
        for fault in [Fault::Reset, Fault::TimedOut] {
            let sim = Sim::new(SimConfig::seeded(seed));
            let log = Log::default();
            let worker = sim.worker(small_on(seed), &[listener()], Probe::new(&log)).expect("it works");
            let (one, two) = (sim.connect(addr()), sim.connect(addr()));
            sim.run_until(SECOND, || worker.connections() == 2).unwrap_or_else(|stuck| panic!("{stuck}"));
            sim.script(When::next().peer(&two), fault);
            sim.run_until(SECOND, || log.ended() == 1).unwrap_or_else(|stuck| panic!("{stuck}"));
            match (fault, &log.reasons()[..]) {
                (Fault::Reset, [CloseReason::Reset]) => {}
                (Fault::TimedOut, [CloseReason::Failed(code)]) => {
                    let kind = std::io::Error::from_raw_os_error(*code).kind();
                    assert_eq!(kind, std::io::ErrorKind::TimedOut);
                }
                (fault, reasons) => panic!("seed {seed}: {fault:?} gave {reasons:?}"),
            }
            one.send(b"still here");
            two.send(b"and I?");
            sim.run_until(SECOND, || one.received() == b"still here" && two.is_reset())
                .unwrap_or_else(|stuck| panic!("{stuck}"));
        }
    }
}

#[test]
fn outgoing_connections_fail_as_the_system_says() {
    let faults = [
        (Fault::ConnectError(Shortage::Ports), std::io::ErrorKind::AddrNotAvailable),
        (Fault::Unreachable, std::io::ErrorKind::HostUnreachable),
    ];
    for (fault, kind) in faults {
        let mut kinds = BTreeSet::new();
        for seed in 0..8 {
            let sim = Sim::new(SimConfig::seeded(seed));
            let log = Log::default();
            with_log(&log);
            let _server = sim.listen(other_addr());
            let worker = sim.worker(small(), &[], Probe::new(&log)).expect("it works");
            sim.script(When::next().worker(&worker), fault);
            connect(&worker);
            sim.run_until(SECOND, || log.ended() == 1).unwrap_or_else(|stuck| panic!("{stuck}"));
            let [CloseReason::ConnectFailed(code)] = log.reasons()[..] else { panic!("{:?}", log.reasons()) };
            kinds.insert(format!("{:?}", std::io::Error::from_raw_os_error(code).kind()));
        }
        assert!(kinds.contains(&format!("{kind:?}")), "{fault:?}: {kinds:?}");
    }
}

/// A frozen machine: everything of an hour is due at once. The idle timeout is the peer's silence, and
/// nobody can tell it from the clock's leap; but a connection whose data waits is heard first.
#[test]
fn after_a_leap_of_the_clock_everything_due_happens_and_the_time_limit_is_not_used_up() {
    for seed in seeds(50) {
        let sim = Sim::new(SimConfig::seeded(seed));
        let log = Log::default();
        let fired = Rc::new(Cell::new(0));
        let count = fired.clone();
        let mut probe = Probe::new(&log);
        probe.connected = Box::new(|_| {});
        probe.accept = Box::new(|_, _| true);
        probe.data = Box::new(|conn, _| conn.set_timer(Some(30 * SECOND)));
        probe.timer = Box::new(move |_| count.set(count.get() + 1));
        let _worker = sim.worker(small_on(seed), &[listener()], probe).expect("it works");
        let client = sim.connect(addr());
        client.send(b"x");
        let at = sim.now() + 5 * SECOND;
        sim.script(When::at(at), Fault::ClockJump { by: 60 * MINUTE });
        sim.run_until(6 * SECOND, || fired.get() == 1).unwrap_or_else(|stuck| panic!("{stuck}"));
        let after = sim.now().since(at);
        assert!(after >= 60 * MINUTE && after < 60 * MINUTE + SECOND, "seed {seed}: {after:?}");
        assert_eq!(log.open(), 1);
    }
}

#[test]
fn a_pause_of_one_worker_does_not_hold_up_another() {
    let sim = Sim::new(SimConfig::seeded(3));
    let logs = [Log::default(), Log::default()];
    let first = sim.worker(small(), &[listener()], Probe::new(&logs[0])).expect("it works");
    let second_addr = other_addr();
    let second = corelane::ListenerConfig::new(second_addr);
    let _second = sim.worker(small(), &[second], Probe::new(&logs[1])).expect("it works");
    sim.script(When::next().worker(&first), Fault::Pause { time: 10 * SECOND });
    let (slow, quick) = (sim.connect(addr()), sim.connect(second_addr));
    slow.send(b"hello");
    quick.send(b"hello");
    sim.run_until(SECOND, || quick.received() == b"hello").unwrap_or_else(|stuck| panic!("{stuck}"));
    assert_eq!(first.metrics().turns, 0);
    sim.run_until(10 * SECOND, || slow.received() == b"hello").unwrap_or_else(|stuck| panic!("{stuck}"));
}

#[test]
fn a_pool_that_is_held_starves_and_recovers() {
    for seed in seeds(60) {
        let sim = Sim::new(SimConfig::seeded(seed));
        let log = Log::default();
        let worker = sim.worker(small_on(seed), &[listener()], Probe::new(&log)).expect("it works");
        let time = 2 * SECOND;
        sim.script(When::next().worker(&worker), Fault::HoldBuffers { recv: 64, send: 4, time });
        let client = sim.connect(addr());
        client.send(b"hello");
        sim.run_for(SECOND);
        assert!(client.received().is_empty(), "seed {seed}");
        assert!(worker.metrics().starved > 0);
        assert_eq!(worker.buffers_leased(), 0, "what is held is nobody's");
        let turns = worker.metrics().turns;
        assert!(turns < 200, "seed {seed}: {turns} turns without a buffer");
        sim.run_until(2 * SECOND, || client.received() == b"hello").unwrap_or_else(|stuck| panic!("{stuck}"));
    }
}

#[test]
fn memory_that_is_used_up_refuses_a_worker_at_its_start() {
    let buffers = BufferConfig { size: 1024, count: 64, send_count: 0, ..BufferConfig::default() };
    let config = WorkerConfig { buffers, ..small() };
    let memory_limit = Some(3 * buffers.arena_bytes() - 1);
    let sim = Sim::new(SimConfig { memory_limit, ..SimConfig::seeded(1) });
    let log = Log::default();
    let two = sim.workers(2, config.clone(), &[listener()], |_| Probe::new(&log)).expect("it is enough");
    let refused = sim.worker(config, &[], Probe::new(&log)).expect_err("it is not enough");
    assert!(matches!(refused, ConfigError::Buffers(BufferError::Memory { bytes: 65536, .. })), "{refused}");
    drop(two);
}

#[test]
fn two_hosts_that_do_not_reach_each_other_still_reach_others() {
    for seed in seeds(40) {
        let sim = Sim::new(SimConfig::seeded(seed));
        let log = Log::default();
        let _worker = sim.worker(small_on(seed), &[listener()], Probe::new(&log)).expect("it works");
        let host = |n| SocketAddr::from(([10, 5, 0, n], 0));
        let (cut, free) = (sim.connect_from(host(1), addr()), sim.connect_from(host(2), addr()));
        assert_eq!(cut.addr().ip(), host(1).ip());
        sim.run_until(SECOND, || log.open() == 2).unwrap_or_else(|stuck| panic!("{stuck}"));
        let time = 5 * SECOND;
        sim.script(When::next(), Fault::Partition { a: host(1).ip(), b: addr().ip(), time });
        sim.run_for(millis(1));
        cut.send(b"hello");
        free.send(b"hello");
        sim.run_until(SECOND, || free.received() == b"hello").unwrap_or_else(|stuck| panic!("{stuck}"));
        assert!(cut.received().is_empty());
        sim.run_until(20 * SECOND, || cut.received() == b"hello").unwrap_or_else(|stuck| panic!("{stuck}"));
        // A worker's outgoing connections come from its host too.
        sim.partition_between(addr().ip(), other_addr().ip());
        with_log(&log);
        let _server = sim.listen(other_addr());
        connect(&_worker);
        sim.run_until(10 * SECOND, || log.ended() == 1).unwrap_or_else(|stuck| panic!("{stuck}"));
        assert_eq!(log.reasons(), [CloseReason::ConnectTimeout], "seed {seed}");
    }
}

#[test]
fn a_violated_invariant_stops_the_run_and_says_which() {
    let sim = Sim::new(SimConfig { tail: 3, ..SimConfig::seeded(11) });
    let log = Log::default();
    let _worker = sim.worker(small(), &[listener()], Probe::new(&log)).expect("it works");
    let client = sim.connect(addr());
    client.send(b"hello");
    let seen = log.clone();
    sim.always("nobody is ever connected", move || match seen.open() {
        0 => Ok(()),
        n => Err(format!("{n} are")),
    });
    let stuck = sim.try_run_for(SECOND).expect_err("somebody is");
    assert_eq!(stuck.reason, StuckReason::Violated);
    assert_eq!(stuck.tail.len(), 3);
    let text = stuck.to_string();
    assert!(text.contains("nobody is ever connected: 1 are"), "{text}");
    assert!(text.contains("CORELANE_SIM_SEEDS=11 cargo test a_violated_invariant"), "{text}");
}

/// A server that forgets what it was to send when its connection is congested: under most seeds nobody
/// notices.
fn forgetful(sim: &Sim) -> Result<(), Box<dyn Error>> {
    let log = Log::default();
    let mut probe = Probe::new(&log);
    probe.data = Box::new(|conn, data| {
        if !conn.is_congested() {
            let _ = conn.send(data);
        }
    });
    let config = WorkerConfig { auto_pause: false, ..small() };
    let _worker = sim.worker(config, &[listener()], probe)?;
    let client = sim.connect(addr());
    client.set_reading(false);
    client.send(&pattern(sim.seed(), 4_000 + sim.random(20_000) as usize));
    sim.run_for(millis(100));
    client.set_reading(true);
    client.shutdown();
    sim.calm_until(20 * SECOND, || client.is_eof())?;
    if client.received() == pattern(sim.seed(), client.received_len() as usize) {
        Ok(())
    } else {
        Err("the echo is not what was sent".into())
    }
}

#[test]
fn an_exploration_finds_the_seed_under_which_a_scenario_fails_and_it_fails_again() {
    if !usual_seeds() {
        return;
    }
    let config = SimConfig { socket_buffer: 4_096, faults: Faults::benign(0.1), ..SimConfig::default() };
    let failure = Exploration::new(config.clone()).run(forgetful).expect_err("it forgets");
    let text = failure.to_string();
    let seed = failure.seed;
    assert!(text.contains(&format!("CORELANE_SIM_SEEDS={seed}")) && text.contains("last"), "{text}");
    let sim = Sim::new(SimConfig { seed, ..config });
    let error = forgetful(&sim).expect_err("it forgets again").to_string();
    assert_eq!(error, failure.error.to_string());
    assert_eq!(sim.trace_tail(40), failure.tail);
}

#[test]
fn an_exploration_tells_what_it_went_through_and_that_it_repeats() {
    let run = || {
        let config = SimConfig { faults: Faults::hostile(0.1), ..SimConfig::default() };
        Exploration::new(config)
            .seeds(30)
            .vary(|seed, config| config.socket_buffer = 1_000 << (seed % 5))
            .twice()
            .run(|sim| {
                let log = Log::default();
                let worker = sim.worker(small_on(sim.seed()), &[listener()], Probe::new(&log))?;
                let client = sim.connect(addr());
                client.send(&pattern(sim.seed(), 3_000));
                sim.try_run_for(millis(500))?;
                sim.calm_until(MINUTE, || {
                    client.received_len() == 3_000 || client.is_over() || client.is_refused()
                })?;
                drop(client);
                sim.run_until(20 * MINUTE, || worker.check_at_rest().is_ok())?;
                Ok(())
            })
            .unwrap_or_else(|failure| panic!("{failure}"))
    };
    let (one, two) = (run(), run());
    assert!(one.seeds > 0 && one.events > 0, "{one}");
    assert_eq!((one.events, one.trace_hash), (two.events, two.trace_hash));
}

#[test]
fn a_history_that_the_seed_does_not_decide_is_found_out() {
    let outside = RefCell::new(0);
    let failure = Exploration::new(SimConfig::default())
        .twice()
        .run(|sim| {
            *outside.borrow_mut() += 1;
            sim.note("from outside", *outside.borrow());
            Ok(())
        })
        .expect_err("it differs each time");
    assert!(failure.to_string().contains("differ"), "{failure}");
}

#[test]
fn calm_frees_what_a_fault_held_up() {
    for seed in seeds(40) {
        let sim = Sim::new(SimConfig::seeded(seed));
        let log = Log::default();
        let worker = sim.worker(small_on(seed), &[listener()], Probe::new(&log)).expect("it works");
        let client = sim.connect(addr());
        client.send(b"one");
        sim.run_until(SECOND, || client.received() == b"one").unwrap_or_else(|stuck| panic!("{stuck}"));
        sim.stall(&client, Duration::from_secs(1 << 40));
        sim.partition(addr());
        sim.script(When::next().always(), Fault::NoBuffer);
        sim.script(When::next(), Fault::HoldBuffers { recv: 64, send: 0, time: 1_000 * MINUTE });
        sim.set_faults(Faults { stuck_cancel: 1.0, accept_error: 1.0, ..Faults::none() });
        client.send(b"two");
        sim.run_for(SECOND / 2);
        assert_eq!(client.received(), b"one");
        sim.calm_until(5 * SECOND, || client.received() == b"onetwo")
            .unwrap_or_else(|stuck| panic!("{stuck}"));
        client.close();
        sim.run_until(SECOND, || worker.check_at_rest().is_ok()).unwrap_or_else(|stuck| panic!("{stuck}"));
        assert_eq!(sim.script_left(), 0);
    }
}
