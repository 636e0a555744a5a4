//! Mailboxes, several workers, and shutdown on the simulated kernel.

mod sim_common;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use corelane::sim::{Fault, Faults, Peer, Sim, SimConfig, When};
use corelane::{CloseReason, ConnId, ListenerConfig, RemoteError, WorkerConfig};
use sim_common::*;

/// A worker whose connections' names are readable.
fn named(probe: &mut Probe) -> Rc<RefCell<Vec<ConnId>>> {
    let ids = Rc::new(RefCell::new(Vec::new()));
    let sink = ids.clone();
    probe.accept = Box::new(move |_, accepted| {
        sink.borrow_mut().push(accepted.id);
        true
    });
    ids
}

#[test]
fn messages_from_outside_reach_the_connection_they_name_and_no_other() {
    for seed in seeds(50) {
        let sim = Sim::new(SimConfig::seeded(seed));
        let log = Log::default();
        let mut probe = Probe::new(&log);
        let ids = named(&mut probe);
        let config = WorkerConfig { max_connections: 1, ..small_on(seed) };
        let worker = sim.worker(config, &[listener()], probe).expect("it works");
        let remote = worker.remote();
        let first = sim.connect(addr());
        sim.run_until(SECOND, || ids.borrow().len() == 1).unwrap_or_else(|stuck| panic!("{stuck}"));
        let id = ids.borrow()[0];
        remote.send(id, "to the first").expect("room");
        sim.run_until(SECOND, || first.received() == b"to the first")
            .unwrap_or_else(|stuck| panic!("{stuck}"));
        remote.close(id).expect("room");
        sim.run_until(SECOND, || first.is_eof()).unwrap_or_else(|stuck| panic!("{stuck}"));
        first.close();
        let second = sim.connect(addr());
        sim.run_until(10 * SECOND, || ids.borrow().len() == 2).unwrap_or_else(|stuck| panic!("{stuck}"));
        // The same slot, another connection: the old name names nothing.
        remote.send(id, "to nobody").expect("room");
        remote.abort(id).expect("room");
        sim.run_for(SECOND);
        assert!(second.received().is_empty() && !second.is_over());
        remote.abort(ids.borrow()[1]).expect("room");
        sim.run_until(SECOND, || second.is_reset()).unwrap_or_else(|stuck| panic!("{stuck}"));
        assert_eq!(log.reasons(), [CloseReason::Local; 2]);
    }
}

#[test]
fn a_broadcast_reaches_every_open_connection_of_every_worker() {
    for seed in seeds(30) {
        let sim = Sim::new(SimConfig::seeded(seed));
        let log = Log::default();
        let workers = sim.workers(3, small_on(seed), &[listener()], |_| Probe::new(&log)).expect("it works");
        let clients: Vec<Peer> = (0..24).map(|_| sim.connect(addr())).collect();
        sim.run_until(MINUTE, || log.open() == 24).unwrap_or_else(|stuck| panic!("{stuck}"));
        let remote = workers[0].remote();
        remote.broadcast("one ").expect("room");
        remote.broadcast("two").expect("room");
        sim.run_until(SECOND, || clients.iter().all(|client| client.received() == b"one two"))
            .unwrap_or_else(|stuck| panic!("{stuck}"));
    }
}

#[test]
fn workers_reach_each_other_and_one_wake_up_carries_many_messages() {
    for seed in seeds(50) {
        let sim = Sim::new(SimConfig::seeded(seed));
        let log = Log::default();
        let workers = sim
            .workers(3, small_on(seed), &[], |_| {
                let mut probe = Probe::new(&log);
                probe.start = Box::new(|cx| {
                    for target in 0..cx.workers() {
                        for _ in 0..20 {
                            let order: Order = Box::new(|_| {});
                            cx.post(target, order).unwrap_or_else(|_| panic!("room"));
                        }
                    }
                });
                probe
            })
            .expect("it works");
        sim.run_until(SECOND, || log.0.messages.get() == 180).unwrap_or_else(|stuck| panic!("{stuck}"));
        for worker in &workers {
            assert_eq!(worker.metrics().mailbox, 60);
            assert!(worker.metrics().wakes <= 20, "{} wakes", worker.metrics().wakes);
        }
    }
}

#[test]
fn a_full_mailbox_refuses_and_is_emptied_in_order() {
    let sim = Sim::new(SimConfig::seeded(1));
    let log = Log::default();
    // More than a turn reads, so that the rest must not be forgotten.
    let config = WorkerConfig { mailbox: 8, turn_budget: 3, ..small() };
    let worker = sim.worker(config, &[listener()], Probe::new(&log)).expect("it works");
    sim.run_for(millis(1));
    let next = Arc::new(AtomicU64::new(0));
    let mut refused = 0;
    for n in 0..12 {
        let next = next.clone();
        let order: Order = Box::new(move |_| assert_eq!(next.fetch_add(1, Ordering::Relaxed), n));
        match worker.remote().post(0, order) {
            Ok(()) => {}
            Err(RemoteError::Full(_)) => refused += 1,
            Err(RemoteError::Stopped(_)) => panic!("it runs"),
        }
    }
    assert_eq!(refused, 4);
    sim.run_for(millis(1));
    assert_eq!(next.load(Ordering::Relaxed), 8);
}

#[test]
fn a_stop_lets_connections_finish_and_reports_it() {
    for seed in seeds(100) {
        let sim = Sim::new(SimConfig {
            faults: Faults::benign(if seed % 2 == 0 { 0.1 } else { 0.0 }),
            socket_buffer: 4_096,
            ..SimConfig::seeded(seed)
        });
        let log = Log::default();
        let mut probe = Probe::new(&log);
        let stops = Rc::new(Cell::new(0));
        let told = stops.clone();
        probe.stop = Box::new(move |cx| {
            told.set(told.get() + 1);
            let ids: Vec<ConnId> = cx.ids().collect();
            for id in ids {
                if let Some(mut conn) = cx.conn(id) {
                    conn.send(vec![b'.'; 10_000]).expect("it is open");
                }
            }
        });
        let worker = sim.worker(small_on(seed), &[listener()], probe).expect("it works");
        let clients: Vec<Peer> = (0..5).map(|_| sim.connect(addr())).collect();
        sim.run_until(MINUTE, || log.open() == 5).unwrap_or_else(|stuck| panic!("{stuck}"));
        worker.stop(10 * SECOND);
        // The last words are read to the end; closing in turn is what an honest peer does.
        sim.run_until(MINUTE, || {
            clients.iter().filter(|client| client.is_eof()).for_each(Peer::close);
            !worker.is_running()
        })
        .unwrap_or_else(|stuck| panic!("{stuck}"));
        let report = worker.report().expect("it has ended");
        assert_eq!((report.finished, report.aborted), (5, 0), "seed {seed}");
        assert_eq!((report.ops_in_kernel, report.buffers_outstanding), (0, 0));
        assert_eq!(stops.get(), 1);
        assert_eq!(log.reasons(), [CloseReason::Shutdown; 5]);
        assert!(clients.iter().all(|client| client.received_len() == 10_000 && !client.is_reset()));
        let late = sim.connect(addr());
        sim.run_until(SECOND, || late.is_refused()).unwrap_or_else(|stuck| panic!("{stuck}"));
        assert!(matches!(worker.remote().close(any_id()), Err(RemoteError::Stopped(()))));
    }
}

/// A name of a connection of worker 0, whichever.
fn any_id() -> ConnId {
    let sim = Sim::new(SimConfig::seeded(0));
    let log = Log::default();
    let mut probe = Probe::new(&log);
    let ids = named(&mut probe);
    let _worker = sim.worker(small(), &[listener()], probe).expect("it works");
    let _client = sim.connect(addr());
    sim.run_until(SECOND, || ids.borrow().len() == 1).unwrap_or_else(|stuck| panic!("{stuck}"));
    ids.borrow()[0]
}

#[test]
fn what_is_not_sent_by_the_deadline_is_reset_and_counted() {
    for seed in seeds(100) {
        let sim = Sim::new(SimConfig {
            socket_buffer: 2_048,
            faults: Faults { late_completion: 0.5, ..Faults::none() },
            ..SimConfig::seeded(seed)
        });
        let log = Log::default();
        let config = WorkerConfig { close_timeout: MINUTE, ..small_on(seed) };
        let worker = sim.worker(config, &[listener()], Probe::new(&log)).expect("it works");
        // Two that close in turn, one that never does though it has everything, three that do not
        // even read.
        let clients: Vec<Peer> = (0..6).map(|_| sim.connect(addr())).collect();
        for client in &clients[3..] {
            client.set_reading(false);
            client.send(&pattern(seed, 20_000));
        }
        sim.run_until(MINUTE, || log.open() == 6).unwrap_or_else(|stuck| panic!("{stuck}"));
        sim.run_for(millis(50));
        let asked = sim.now();
        worker.stop(2 * SECOND);
        sim.run_until(MINUTE, || {
            clients[..2].iter().filter(|client| client.is_eof()).for_each(Peer::close);
            !worker.is_running()
        })
        .unwrap_or_else(|stuck| panic!("{stuck}"));
        let report = worker.report().expect("it has ended");
        assert_eq!((report.finished, report.aborted), (3, 3), "seed {seed}");
        assert_eq!((report.ops_in_kernel, report.buffers_outstanding), (0, 0));
        assert_eq!(log.reasons(), [CloseReason::Shutdown; 6]);
        let took = sim.now().since(asked);
        assert!(took >= 2 * SECOND && took < 3 * SECOND, "{took:?}");
        clients.iter().for_each(|client| client.set_reading(true));
        sim.run_for(SECOND);
        assert!(clients[..3].iter().all(|client| client.is_eof() && !client.is_reset()));
        assert!(clients[3..].iter().all(Peer::is_reset));
    }
}

#[test]
fn operations_that_the_kernel_keeps_are_reported_not_awaited_for_ever() {
    for seed in seeds(30) {
        let sim = Sim::new(SimConfig { socket_buffer: 2_048, ..SimConfig::seeded(seed) });
        let log = Log::default();
        let worker = sim.worker(small_on(seed), &[listener()], Probe::new(&log)).expect("it works");
        let client = sim.connect(addr());
        client.set_reading(false);
        client.send(&pattern(seed, 20_000));
        sim.run_for(millis(50));
        sim.set_faults(Faults { stuck_cancel: 1.0, ..Faults::none() });
        let asked = sim.now();
        worker.stop(SECOND);
        sim.run_until(MINUTE, || !worker.is_running()).unwrap_or_else(|stuck| panic!("{stuck}"));
        let report = worker.report().expect("it has ended");
        assert!(report.ops_in_kernel > 0, "{report:?}");
        assert!(report.buffers_outstanding > 0, "the stuck send still reads them: {report:?}");
        assert!(sim.now().since(asked) < 10 * SECOND);
        assert_eq!(log.reasons(), [CloseReason::Shutdown]);
    }
}

#[test]
fn a_handler_can_stop_its_runtime_while_connections_are_being_made() {
    for seed in seeds(50) {
        let sim = Sim::new(SimConfig::seeded(seed));
        let log = Log::default();
        with_log(&log);
        sim.partition(other_addr());
        let mut probe = Probe::new(&log);
        probe.start = Box::new(|cx| {
            connect_from(cx, MINUTE).expect("there is room");
        });
        probe.data = Box::new(|conn, _| {
            connect_from(&mut conn.cx(), MINUTE);
            conn.cx().stop(SECOND);
            assert!(conn.send("last words").is_ok(), "it is open until the turn is over");
        });
        let worker = sim.worker(small_on(seed), &[listener()], probe).expect("it works");
        let client = sim.connect(addr());
        client.send(b"x");
        sim.run_until(SECOND, || client.is_eof()).unwrap_or_else(|stuck| panic!("{stuck}"));
        assert_eq!(client.received(), b"last words");
        client.close();
        sim.run_until(SECOND, || !worker.is_running()).unwrap_or_else(|stuck| panic!("{stuck}"));
        assert_eq!(log.reasons(), [CloseReason::Shutdown; 3]);
        let report = worker.report().expect("it has ended");
        assert_eq!((report.ops_in_kernel, report.buffers_outstanding), (0, 0));
    }
}

#[test]
fn a_stop_while_accepting_is_held_off_does_not_spin() {
    let sim = Sim::new(SimConfig::seeded(1));
    let log = Log::default();
    let worker = sim.worker(small(), &[listener()], Probe::new(&log)).expect("it works");
    // One that stays, so that stopping takes its time, and one that cannot be accepted.
    let _stays = sim.connect(addr());
    sim.run_until(SECOND, || log.open() == 1).unwrap_or_else(|stuck| panic!("{stuck}"));
    sim.set_faults(Faults { accept_error: 1.0, ..Faults::none() });
    let _waits = sim.connect(addr());
    sim.run_until(SECOND, || worker.metrics().accept_errors > 0).unwrap_or_else(|stuck| panic!("{stuck}"));
    let before = worker.metrics().turns;
    worker.stop(2 * SECOND);
    sim.run_until(MINUTE, || !worker.is_running()).unwrap_or_else(|stuck| panic!("{stuck}"));
    let turns = worker.metrics().turns - before;
    assert!(turns < 100, "{turns} turns while nothing happens");
}

#[test]
fn a_stop_of_several_workers_ends_them_all() {
    let sim = Sim::new(SimConfig::seeded(4));
    let log = Log::default();
    let second = ListenerConfig { backlog: 4, ..ListenerConfig::new(other_addr()) };
    let listeners = [listener(), second];
    let workers = sim.workers(4, small(), &listeners, |_| Probe::new(&log)).expect("it works");
    let clients: Vec<Peer> =
        (0..20).map(|n| sim.connect(if n % 2 == 0 { addr() } else { other_addr() })).collect();
    sim.run_until(MINUTE, || log.open() == 20).unwrap_or_else(|stuck| panic!("{stuck}"));
    workers[2].stop(SECOND);
    drop(clients);
    sim.run_until(MINUTE, || workers.iter().all(|worker| !worker.is_running()))
        .unwrap_or_else(|stuck| panic!("{stuck}"));
    let finished: u64 =
        workers.iter().filter_map(|worker| worker.report()).map(|report| report.finished).sum();
    assert_eq!(finished + log.reasons().iter().filter(|r| **r != CloseReason::Shutdown).count() as u64, 20);
}

#[test]
fn a_broadcast_is_not_overtaken_by_what_follows_it() {
    for seed in seeds(30) {
        let sim = Sim::new(SimConfig::seeded(seed));
        let log = Log::default();
        let mut probe = Probe::new(&log);
        let ids = Rc::new(RefCell::new(Vec::new()));
        let names = ids.clone();
        probe.accept = Box::new(move |_, accepted| {
            names.borrow_mut().push(accepted.id);
            true
        });
        let worker = sim.worker(small_on(seed), &[listener()], probe).expect("it works");
        let client = sim.connect(addr());
        sim.run_until(SECOND, || ids.borrow().len() == 1).unwrap_or_else(|stuck| panic!("{stuck}"));
        let remote = worker.remote();
        remote.broadcast("A").expect("room");
        remote.send(ids.borrow()[0], "B").expect("room");
        remote.broadcast("bye").expect("room");
        if seed % 2 == 0 {
            remote.close(ids.borrow()[0]).expect("room");
        } else {
            remote.stop(SECOND);
        }
        sim.run_until(SECOND, || client.is_eof()).unwrap_or_else(|stuck| panic!("{stuck}"));
        assert_eq!(client.received(), b"ABbye");
    }
}

#[test]
fn a_stop_from_the_first_callback_is_carried_out() {
    for seed in seeds(10) {
        let sim = Sim::new(SimConfig::seeded(seed));
        let log = Log::default();
        let mut probe = Probe::new(&log);
        probe.start = Box::new(|cx| cx.stop(SECOND));
        let worker = sim.worker(small_on(seed), &[listener()], probe).expect("it works");
        sim.run_until(SECOND, || worker.report().is_some()).unwrap_or_else(|stuck| panic!("{stuck}"));
    }
}

/// An accept that ends after the stop has begun, or even after its deadline: nobody would close what came
/// with it any more, so the handler must not get it.
#[test]
fn who_is_accepted_during_a_stop_is_turned_away() {
    for seed in seeds(60) {
        for late in [millis(50), millis(500)] {
            let sim = Sim::new(SimConfig::seeded(seed));
            let log = Log::default();
            let worker = sim.worker(small_on(seed), &[listener()], Probe::new(&log)).expect("it works");
            // One that stays makes the stop take its time.
            let stays = sim.connect(addr());
            sim.run_until(SECOND, || log.open() == 1).unwrap_or_else(|stuck| panic!("{stuck}"));
            sim.script(When::next(), Fault::LateCompletion { by: late });
            let comes = sim.connect(addr());
            sim.run_until(SECOND, || sim.script_left() == 0).unwrap_or_else(|stuck| panic!("{stuck}"));
            worker.stop(millis(200));
            sim.run_until(MINUTE, || !worker.is_running()).unwrap_or_else(|stuck| panic!("{stuck}"));
            sim.run_for(SECOND);
            assert_eq!((log.0.begun.get(), log.open()), (1, 0), "seed {seed}");
            assert!(comes.is_eof() || comes.is_reset(), "seed {seed}: it is told");
            assert_eq!(worker.connections(), 0);
            drop(stays);
        }
    }
}
