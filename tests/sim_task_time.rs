//! Tasks in virtual time: timers exact to the tick, hours in microseconds, the same history for the same seed.

mod sim_common;

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use corelane::net::{TcpListener, TcpStream};
use corelane::sim::{Exploration, Faults, Sim, SimConfig, SimWorker};
use corelane::task::{self, Message, spawn, spawn_blocking, yield_now};
use corelane::time::{Interval, MissedTicks, interval, now, sleep, sleep_until, timeout};
use corelane::{BufferConfig, ListenerConfig, Time, WorkerConfig};
use futures::future::join_all;
use sim_common::*;

const HOUR: Duration = Duration::from_secs(3600);
const TICK: Duration = Duration::from_millis(1);

/// Runs a main future in a world of its own until it has ended.
fn run<F: Future<Output = ()> + 'static>(
    seed: u64,
    main: impl FnOnce() -> F + 'static,
) -> (Sim, SimWorker<Message>) {
    let sim = exact(seed);
    let ended = Rc::new(Cell::new(false));
    let flag = ended.clone();
    let main = move || async move {
        main().await;
        flag.set(true);
    };
    let worker = sim.tasks(small_on(seed), &[], main).expect("it starts");
    sim.run_until(1_000_000 * HOUR, || ended.get()).unwrap_or_else(|stuck| panic!("{stuck}"));
    (sim, worker)
}

#[test]
fn a_timer_fires_in_the_tick_in_which_it_is_due() {
    for seed in seeds(50) {
        run(seed, || async {
            for (number, length) in [0, 1, 999_999, 1_000_000, 1_000_001, 64_000_000, 4_096_000_001, 1 << 45]
                .into_iter()
                .enumerate()
            {
                // From everywhere within a tick.
                sleep(Duration::from_nanos(123_456 * number as u64)).await;
                let length = Duration::from_nanos(length);
                let before = now();
                sleep(length).await;
                let passed = now().since(before);
                assert!(passed >= length && passed < length + TICK, "{passed:?} instead of {length:?}");
            }
        });
    }
}

#[test]
fn hours_of_sleep_take_no_real_time_and_few_turns() {
    let (sim, worker) = run(1, || async {
        for _ in 0..1000 {
            sleep(HOUR).await;
        }
        let sleeps = (1..=1000u32).map(|n| spawn(sleep(HOUR / n)));
        join_all(sleeps.collect::<Vec<_>>()).await.into_iter().for_each(|ended| ended.expect("no panic"));
    });
    assert!(sim.now() >= Time::ZERO + 1001 * HOUR);
    assert!(worker.metrics().turns < 20_000, "{} turns", worker.metrics().turns);
}

#[test]
fn ticks_are_exact_and_missed_ones_come_as_was_asked() {
    async fn ticks_of(ticks: &mut Interval, count: usize) -> Vec<(u64, u64)> {
        let mut seen = Vec::new();
        for _ in 0..count {
            let due = ticks.tick().await;
            seen.push((due.as_nanos() / 1_000_000, now().as_nanos() / 1_000_000));
        }
        seen
    }
    run(2, || async {
        let start = |missed| async move {
            // At the beginning of a second.
            let second = Time::from_nanos((now().as_nanos() / 1_000_000_000 + 1) * 1_000_000_000);
            sleep_until(second).await;
            let mut ticks = interval(Duration::from_millis(10));
            ticks.set_missed_ticks(missed);
            (ticks, second.as_nanos() / 1_000_000)
        };
        for (missed, after) in [
            (MissedTicks::Burst, [(20, 35), (30, 35), (40, 40), (50, 50)]),
            (MissedTicks::Delay, [(20, 35), (45, 45), (55, 55), (65, 65)]),
            (MissedTicks::Skip, [(20, 35), (40, 40), (50, 50), (60, 60)]),
        ] {
            let (mut ticks, zero) = start(missed).await;
            let shift = |(due, at): (u64, u64)| (zero + due, zero + at);
            assert_eq!(ticks_of(&mut ticks, 2).await, [(0, 0), (10, 10)].map(shift), "{missed:?}");
            sleep(Duration::from_millis(25)).await;
            assert_eq!(ticks_of(&mut ticks, 4).await, after.map(shift), "{missed:?}");
            assert_eq!(ticks.period(), Duration::from_millis(10));
        }
        // More ticks were missed than 32 bits count.
        let (_, _) = start(MissedTicks::Skip).await;
        let mut ticks = interval(Duration::from_nanos(1));
        ticks.set_missed_ticks(MissedTicks::Skip);
        ticks.tick().await;
        sleep(HOUR).await;
        ticks.tick().await;
        let next = ticks.tick().await;
        assert!(now().since(next) <= 2 * TICK, "{next} at {}", now());
    });
}

#[test]
fn a_tick_that_is_not_waited_for_to_its_end_is_not_lost() {
    run(3, || async {
        let mut ticks = interval(Duration::from_millis(10));
        let first = ticks.tick().await;
        for _ in 0..3 {
            assert!(timeout(Duration::from_millis(2), ticks.tick()).await.is_err());
        }
        assert_eq!(ticks.tick().await, first + Duration::from_millis(10));
    });
}

#[test]
fn a_timer_that_is_moved_fires_at_its_new_time_only() {
    run(4, || async {
        let zero = now();
        let mut timer = sleep(Duration::from_millis(10));
        assert!(futures::poll!(&mut timer).is_pending());
        timer.reset(zero + Duration::from_millis(50));
        assert_eq!(timer.deadline(), zero + Duration::from_millis(50));
        sleep(Duration::from_millis(20)).await;
        assert!(futures::poll!(&mut timer).is_pending());
        (&mut timer).await;
        assert!(now() >= zero + Duration::from_millis(50) && timer.is_elapsed());
        // Earlier than it was, and from what is past.
        timer.reset(now() + HOUR);
        assert!(futures::poll!(&mut timer).is_pending());
        let soon = now() + Duration::from_millis(5);
        timer.reset(soon);
        (&mut timer).await;
        assert!(now() >= soon && now() < soon + 2 * TICK);
    });
}

#[test]
fn timers_that_are_dropped_do_not_wake_the_worker() {
    let (sim, worker) = run(5, || async {
        for round in 0..100_000u64 {
            let limit = Duration::from_millis(round % 5000 + 1);
            assert!(timeout(limit, yield_if(round % 16 == 0)).await.is_ok());
        }
    });
    let (turns, now) = (worker.metrics().turns, sim.now());
    sim.run_for(HOUR);
    assert!(worker.metrics().turns - turns <= 1, "{} turns", worker.metrics().turns - turns);
    assert_eq!(sim.now(), now + HOUR);
}

async fn yield_if(really: bool) {
    if really {
        yield_now().await;
    }
}

#[test]
fn calls_that_block_take_no_virtual_time() {
    run(6, || async {
        let before = now();
        assert_eq!(spawn_blocking(|| 6 * 7).await.expect("no panic"), 42);
        assert!(
            spawn_blocking(|| panic!("in the call")).await.map(|_: ()| ()).expect_err("it did").is_panic()
        );
        assert!(now().since(before) < TICK);
    });
}

#[test]
fn tasks_of_several_workers_reach_each_other() {
    for seed in seeds(30) {
        let sim = exact(seed);
        let sum = Rc::new(Cell::new(0));
        let total = sum.clone();
        let config = WorkerConfig { mailbox: 2, ..small_on(seed) };
        let workers = sim
            .tasks_on(3, config, &[], move |worker| {
                let total = total.clone();
                async move {
                    if worker > 0 {
                        return;
                    }
                    for round in 0..60 {
                        let handle = loop {
                            match task::spawn_on(round % 3, move || async move {
                                sleep(Duration::from_millis(3)).await;
                                task::worker()
                            }) {
                                Ok(handle) => break handle,
                                Err(_) => yield_now().await,
                            }
                        };
                        total.set(total.get() + handle.await.expect("no panic"));
                    }
                }
            })
            .expect("they start");
        sim.run_until(MINUTE, || sum.get() == 60).unwrap_or_else(|stuck| panic!("{stuck}"));
        workers[0].stop(SECOND);
        sim.run_until(MINUTE, || workers.iter().all(|worker| !worker.is_running()))
            .unwrap_or_else(|stuck| panic!("{stuck}"));
        assert!(workers.iter().all(|worker| worker.report().is_some_and(|report| report.tasks_dropped == 0)));
    }
}

#[test]
fn tasks_that_are_left_are_in_the_report() {
    let sim = exact(7);
    let main = || async {
        for _ in 0..5 {
            drop(spawn(std::future::pending::<()>()));
        }
    };
    let worker = sim.tasks(small_on(7), &[], main).expect("it starts");
    sim.run_for(SECOND);
    worker.stop(Duration::ZERO);
    sim.run_until(MINUTE, || !worker.is_running()).unwrap_or_else(|stuck| panic!("{stuck}"));
    assert_eq!(worker.report().expect("it has ended").tasks_dropped, 5);
    assert_eq!((worker.metrics().tasks, worker.metrics().tasks_aborted), (0, 5));
}

/// A busy world: echoes with time limits, ticks, tasks that come and go, on two workers.
fn busy(sim: &Sim) -> Result<(), Box<dyn std::error::Error>> {
    let addr = addr();
    let done = Rc::new(RefCell::new(Vec::new()));
    let seen = done.clone();
    let config = WorkerConfig { max_connections: 32, buffers: BufferConfig::default(), ..small_on(1) };
    let listener = ListenerConfig::new(addr);
    let workers = sim.tasks_on(2, config, &[listener], move |worker| {
        let seen = seen.clone();
        async move {
            let mut listener = TcpListener::of_builder(0).expect("it was given one");
            drop(spawn(async move {
                while let Ok(mut stream) = listener.accept().await {
                    drop(spawn(async move {
                        while let Ok(Ok(Some(data))) = timeout(30 * SECOND, stream.recv()).await {
                            if stream.send(data).await.is_err() {
                                break;
                            }
                        }
                    }));
                }
            }));
            let clients = (0..6u64).map(|number| {
                spawn(async move {
                    let mut stream = TcpStream::connect(addr).await?;
                    let mut ticks = interval(Duration::from_millis(3));
                    for _ in 0..5 {
                        ticks.tick().await;
                        stream.send(vec![number as u8; 700]).await?;
                        let mut back = 0;
                        while back < 700 {
                            back += stream.recv().await?.ok_or(std::io::ErrorKind::UnexpectedEof)?.len();
                        }
                    }
                    std::io::Result::Ok(())
                })
            });
            if worker == 0 {
                let there = task::spawn_on(1, || async { sleep(TICK).await }).expect("room");
                there.await.expect("no panic");
            }
            for client in join_all(clients.collect::<Vec<_>>()).await {
                seen.borrow_mut().push(client.expect("no panic").is_ok());
            }
        }
    })?;
    sim.run_until(5 * MINUTE, || done.borrow().len() == 12)?;
    workers[0].stop(SECOND);
    sim.run_until(MINUTE, || workers.iter().all(|worker| !worker.is_running()))?;
    for worker in &workers {
        let report = worker.report().ok_or("it has ended")?;
        assert_eq!((report.ops_in_kernel, report.buffers_outstanding), (0, 0), "{report:?}");
    }
    Ok(())
}

#[test]
fn the_same_seed_gives_the_same_history_with_tasks() {
    let config = SimConfig { faults: Faults::benign(0.05), ..SimConfig::default() };
    Exploration::new(config).seeds(25).twice().run(busy).unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn budgets_hold_in_virtual_time() {
    let sim = Sim::new(SimConfig { turn_time: (TICK / 10, TICK / 10), ..SimConfig::seeded(8) });
    let config = WorkerConfig { turn_budget: 8, ..small_on(8) };
    let lateness: Rc<Cell<Duration>> = Rc::default();
    let (worst, ended) = (lateness.clone(), Rc::new(Cell::new(false)));
    let flag = ended.clone();
    let main = move || async move {
        for _ in 0..20 {
            drop(spawn(async {
                loop {
                    yield_now().await;
                }
            }));
        }
        for _ in 0..100 {
            let due = now() + Duration::from_millis(2);
            sleep_until(due).await;
            worst.set(worst.get().max(now().since(due)));
        }
        flag.set(true);
    };
    let worker = sim.tasks(config, &[], main).expect("it starts");
    for _ in 0..100_000 {
        if ended.get() {
            break;
        }
        // In pieces: a worker that is busy for ever without an event is otherwise taken for one that spins.
        sim.run_for(Duration::from_millis(1));
    }
    assert!(ended.get());
    // It comes after 20 others, 8 of which are polled in a turn of a tenth of a tick; and a timer is late by up to a tick.
    assert!(lateness.get() <= TICK + TICK / 2, "{:?} late", lateness.get());
    let metrics = worker.metrics();
    assert!(metrics.task_polls <= 8 * (metrics.turns + 1), "{metrics:?}");
}
