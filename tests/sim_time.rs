//! Time on the simulated kernel: limits and timers are exact, and silence costs nothing.

mod sim_common;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use corelane::sim::{Sim, SimConfig};
use corelane::{BufferConfig, CloseReason, ConnectConfig, Time, WorkerConfig};
use sim_common::*;

/// The wheel's tick: a timer may be late by less than this, never early.
const TICK: Duration = Duration::from_millis(1);

fn assert_due(at: Time, from: Time, after: Duration) {
    let passed = at.since(from);
    assert!(passed >= after && passed < after + TICK, "{passed:?} instead of {after:?}");
}

#[test]
fn an_idle_connection_is_closed_when_its_timeout_has_passed_since_it_was_last_heard() {
    for seed in seeds(100) {
        let sim = exact(seed);
        let log = Log::default();
        let config = WorkerConfig { idle_timeout: Some(30 * SECOND), ..small_on(seed) };
        let heard = Rc::new(Cell::new(Time::ZERO));
        let mark = heard.clone();
        let mut probe = Probe::new(&log);
        probe.data = Box::new(move |conn, _| mark.set(conn.now()));
        let worker = sim.worker(config, &[listener()], probe).expect("it works");
        let client = sim.connect(addr());
        for _ in 0..3 {
            client.send(b"x");
            sim.run_for(millis(25_000 + sim.random(4_900)));
            assert_eq!(worker.connections(), 1, "seed {seed}: it was heard in time");
        }
        sim.run_until(MINUTE, || log.ended() == 1).unwrap_or_else(|stuck| panic!("{stuck}"));
        let end = log.0.ends.borrow()[0];
        assert_eq!(end.reason, CloseReason::IdleTimeout);
        // The time of the last message is kept in whole ticks, rounded down.
        let passed = end.at.since(heard.get());
        assert!(passed > 30 * SECOND - TICK && passed <= 30 * SECOND + TICK, "{passed:?}");
    }
}

#[test]
fn a_connection_that_waits_for_a_buffer_is_not_called_idle() {
    for seed in seeds(50) {
        let sim = exact(seed);
        let log = Log::default();
        let kept = Rc::new(RefCell::new(Vec::new()));
        let keep = kept.clone();
        let mut probe = Probe::new(&log);
        probe.data = Box::new(move |conn, data| {
            if data[0] == b'k' {
                keep.borrow_mut().push(data);
            } else {
                let _ = conn.send(data);
            }
        });
        let config = WorkerConfig {
            buffers: BufferConfig { size: 64, count: 1, send_count: 0, ..BufferConfig::default() },
            idle_timeout: Some(SECOND),
            ..small_on(seed)
        };
        let worker = sim.worker(config, &[listener()], probe).expect("it works");
        let (keeper, other) = (sim.connect(addr()), sim.connect(addr()));
        sim.run_until(SECOND, || worker.connections() == 2).unwrap_or_else(|stuck| panic!("{stuck}"));
        keeper.send(b"k");
        sim.run_for(millis(10));
        assert_eq!(kept.borrow().len(), 1);
        other.send(b"hello");
        sim.run_for(millis(2_500));
        assert!(!other.is_over(), "it spoke, only nobody listened");
        kept.borrow_mut().clear();
        sim.run_until(SECOND, || other.received_len() == 5).unwrap_or_else(|stuck| panic!("{stuck}"));
        sim.run_for(millis(1_500));
        assert!(other.is_eof(), "now it is idle");
    }
}

#[test]
fn a_deadline_resets_a_connection_however_busy_it_is() {
    for seed in seeds(50) {
        let sim = exact(seed);
        let log = Log::default();
        let began = Rc::new(Cell::new(None));
        let mark = began.clone();
        let mut probe = Probe::new(&log);
        probe.data = Box::new(move |conn, data| {
            if mark.get().is_none() {
                mark.set(Some(conn.now()));
                conn.set_deadline(Some(millis(700)));
            }
            let _ = conn.send(data);
        });
        let _worker = sim.worker(small(), &[listener()], probe).expect("it works");
        let client = sim.connect(addr());
        while !client.is_reset() {
            client.send(b"busy");
            sim.run_for(millis(20));
        }
        let end = log.0.ends.borrow()[0];
        assert_eq!(end.reason, CloseReason::Deadline);
        assert_due(end.at, began.get().expect("it began"), millis(700));
    }
}

#[test]
fn a_timer_fires_once_and_can_be_replaced_or_taken_back() {
    let sim = exact(3);
    let log = Log::default();
    let (set, fired) = (Rc::new(Cell::new(Time::ZERO)), Rc::new(RefCell::new(Vec::new())));
    let (mark, times) = (set.clone(), fired.clone());
    let mut probe = Probe::new(&log);
    probe.data = Box::new(move |conn, data| {
        mark.set(conn.now());
        match data[0] {
            b's' => conn.set_timer(Some(millis(40))),
            b'l' => conn.set_timer(Some(millis(90))),
            _ => conn.set_timer(None),
        }
    });
    probe.timer = Box::new(move |conn| times.borrow_mut().push(conn.now()));
    let _worker = sim.worker(small(), &[listener()], probe).expect("it works");
    let client = sim.connect(addr());

    client.send(b"s");
    sim.run_for(SECOND);
    assert_eq!(fired.borrow().len(), 1);
    assert_due(fired.borrow()[0], set.get(), millis(40));

    client.send(b"s");
    sim.run_for(millis(20));
    client.send(b"l");
    sim.run_for(SECOND);
    assert_eq!(fired.borrow().len(), 2, "the later setting replaced the earlier");
    assert_due(fired.borrow()[1], set.get(), millis(90));

    client.send(b"s");
    sim.run_for(millis(20));
    client.send(b"c");
    sim.run_for(SECOND);
    assert_eq!(fired.borrow().len(), 2, "taken back");
}

#[test]
fn the_alarm_is_exact_to_the_nanosecond() {
    for seed in seeds(50) {
        let sim = exact(seed);
        let log = Log::default();
        let fired = Rc::new(RefCell::new(Vec::new()));
        let times = fired.clone();
        let first = Time::from_nanos(1 + sim.random(5_000_000_000));
        let mut probe = Probe::new(&log);
        probe.start = Box::new(move |cx| cx.set_alarm(first));
        let step = Duration::from_nanos(1 + sim.random(1_000_000));
        probe.alarm = Box::new(move |cx| {
            times.borrow_mut().push(cx.now());
            if times.borrow().len() < 5 {
                cx.set_alarm(cx.now() + step);
            }
        });
        let _worker = sim.worker(small(), &[listener()], probe).expect("it works");
        sim.run_for(10 * SECOND);
        let expected: Vec<Time> = (0..5).map(|n| first + n * step).collect();
        assert_eq!(*fired.borrow(), expected);
    }
}

#[test]
fn hours_of_silence_cost_a_few_turns() {
    let sim = exact(5);
    let log = Log::default();
    let config = WorkerConfig { idle_timeout: Some(7_200 * SECOND), ..small() };
    let worker = sim.worker(config, &[listener()], Probe::new(&log)).expect("it works");
    let clients: Vec<_> = (0..10).map(|_| sim.connect(addr())).collect();
    sim.run_until(SECOND, || worker.connections() == 10).unwrap_or_else(|stuck| panic!("{stuck}"));
    let before = worker.metrics().turns;
    sim.run_for(7_000 * SECOND);
    assert_eq!(worker.connections(), 10);
    let turns = worker.metrics().turns - before;
    assert!(turns < 40, "{turns} turns in two hours in which nothing happened");
    sim.run_for(400 * SECOND);
    assert_eq!(log.reasons(), [CloseReason::IdleTimeout; 10]);
    drop(clients);
}

#[test]
fn an_unanswered_connect_ends_at_its_timeout() {
    for seed in seeds(50) {
        let sim = exact(seed);
        let log = Log::default();
        let timeout = millis(200 + sim.random(3_000));
        let states = log.clone();
        let mut probe = Probe::new(&log);
        probe.start = Box::new(move |cx| {
            let config = ConnectConfig { timeout, ..ConnectConfig::new(other_addr()) };
            cx.connect(config, states.state()).expect("there is room");
        });
        let _server = sim.listen(other_addr());
        sim.partition(other_addr());
        let worker = sim.worker(small_on(seed), &[listener()], probe).expect("it works");
        sim.run_until(MINUTE, || log.ended() == 1).unwrap_or_else(|stuck| panic!("{stuck}"));
        let end = log.0.ends.borrow()[0];
        assert_eq!(end.reason, CloseReason::ConnectTimeout);
        assert_due(end.at, Time::ZERO, timeout);
        sim.run_for(SECOND);
        assert_eq!(worker.connections(), 0);
    }
}

#[test]
fn a_graceful_close_waits_for_its_peer_and_then_no_longer() {
    for seed in seeds(50) {
        let reads = seed % 2 == 0;
        let sim = Sim::new(SimConfig {
            socket_buffer: 4_096,
            turn_time: (Duration::ZERO, Duration::ZERO),
            ..SimConfig::seeded(seed)
        });
        let log = Log::default();
        let closed = Rc::new(Cell::new(Time::ZERO));
        let mark = closed.clone();
        let mut probe = Probe::new(&log);
        probe.data = Box::new(move |conn, _| {
            mark.set(conn.now());
            conn.send(vec![1; 30_000]).expect("the queue is empty");
            conn.close();
        });
        let worker = sim.worker(small_on(seed), &[listener()], probe).expect("it works");
        let client = sim.connect(addr());
        client.set_reading(reads);
        client.send(b"x");
        sim.run_until(MINUTE, || log.ended() == 1).unwrap_or_else(|stuck| panic!("{stuck}"));
        let end = log.0.ends.borrow()[0];
        if reads {
            // Everything was sent, the peer only never closes.
            assert_eq!(end.reason, CloseReason::Local);
            assert!(client.is_eof());
            assert_eq!(client.received_len(), 30_000);
            assert!(end.at.since(closed.get()) >= 5 * SECOND);
        } else {
            assert_eq!(end.reason, CloseReason::CloseTimeout);
            assert_due(end.at, closed.get(), 5 * SECOND);
        }
        sim.run_for(SECOND);
        assert_eq!(worker.connections(), 0);
        assert_eq!(worker.payloads_queued(), 0);
    }
}
