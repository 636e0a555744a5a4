//! No task keeps others, timers or sockets waiting, however busy it is; and combinators of other crates behave.
#![cfg(target_os = "linux")]

mod support;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::future::{Future, pending, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use corelane::net::{TcpListener, TcpStream};
use corelane::task::{block_on, spawn, yield_now};
use corelane::time::{Interval, MissedTicks, interval, now, sleep, sleep_until, timeout};
use corelane::{Runtime, WorkerConfig};
use futures::future::{Either, join_all, select, select_all};
use futures::stream::{self, FuturesUnordered};
use futures::{FutureExt, StreamExt};

const MILLI: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

async fn pair() -> (TcpStream, TcpStream) {
    let mut listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let addr = listener.local_addr().expect("it has one");
    let (here, there) = futures::join!(TcpStream::connect(addr), listener.accept());
    (here.expect("connected"), there.expect("accepted"))
}

/// Runs something that never ends beside a timer, an echo over a socket, and another task: all of those end.
fn leaves_room<F: Future<Output = ()> + 'static>(busy: impl Fn() -> F + 'static) {
    let config = WorkerConfig { turn_budget: 16, ..WorkerConfig::default() };
    let outcome = Runtime::builder().worker(config).block_on(SECOND, async move {
        for _ in 0..5 {
            drop(spawn(busy()));
        }
        let (mut here, mut there) = pair().await;
        drop(spawn(async move {
            while let Ok(Some(data)) = there.recv().await {
                there.send(data).await.expect("sent");
            }
        }));
        for _ in 0..20 {
            here.send("ping").await.expect("sent");
            here.recv().await.expect("no error").expect("an echo");
            sleep(MILLI).await;
            spawn(async {}).await.expect("no panic");
        }
    });
    outcome.expect("it runs");
}

#[test]
fn a_task_that_only_yields_leaves_room() {
    leaves_room(|| async {
        loop {
            yield_now().await;
        }
    });
}

#[test]
fn a_task_that_wakes_itself_leaves_room() {
    leaves_room(|| {
        poll_fn(|cx| {
            cx.waker().wake_by_ref();
            Poll::Pending
        })
    });
}

#[test]
fn a_task_whose_data_is_always_there_leaves_room() {
    leaves_room(|| async {
        let (mut here, mut there) = pair().await;
        drop(spawn(async move {
            loop {
                here.send("more").await.expect("sent");
            }
        }));
        loop {
            there.recv().await.expect("no error").expect("data");
        }
    });
}

#[test]
fn a_task_that_sleeps_until_what_is_past_leaves_room() {
    leaves_room(|| async {
        loop {
            sleep(Duration::ZERO).await;
        }
    });
}

#[test]
fn a_task_whose_ticks_are_always_due_leaves_room() {
    leaves_room(|| async {
        let mut ticks = interval(Duration::from_nanos(1));
        loop {
            ticks.tick().await;
        }
    });
}

#[test]
fn a_task_that_spawns_without_end_leaves_room() {
    async fn again() {
        let next: std::pin::Pin<Box<dyn Future<Output = ()>>> = Box::pin(again());
        drop(spawn(next));
    }
    leaves_room(again);
}

#[test]
fn a_limit_comes_to_a_future_that_always_uses_its_budget_up() {
    block_on(async {
        let late = timeout(20 * MILLI, async {
            loop {
                sleep(Duration::ZERO).await;
            }
        });
        assert!(late.await.is_err());
    })
    .expect("it runs");
}

#[test]
fn a_turn_polls_as_many_tasks_as_its_budget() {
    let config = WorkerConfig { turn_budget: 4, ..WorkerConfig::default() };
    let runtime = Runtime::builder()
        .worker(config)
        .start_tasks(|_| async {
            for _ in 0..1000 {
                drop(spawn(async { yield_now().await }));
            }
        })
        .expect("it starts");
    let total = support::counters(&runtime, "all have ended", |total| total.tasks_finished == 1001);
    assert_eq!(total.task_polls, 2001, "{total:?}");
    assert!(total.turns >= 2001 / 4, "{} turns for {} polls", total.turns, total.task_polls);
    runtime.shutdown(SECOND).expect("it ends");
}

#[test]
fn tasks_run_in_the_order_in_which_they_were_woken() {
    block_on(async {
        let order: Rc<RefCell<Vec<u32>>> = Rc::default();
        let tasks: Vec<_> = (0..50)
            .map(|number| {
                let order = order.clone();
                spawn(async move {
                    order.borrow_mut().push(number);
                    yield_now().await;
                    order.borrow_mut().push(100 + number);
                })
            })
            .collect();
        join_all(tasks).await.into_iter().for_each(|ended| ended.expect("no panic"));
        assert!(order.borrow().iter().copied().eq((0..50).chain(100..150)), "{:?}", order.borrow());
    })
    .expect("it runs");
}

#[test]
fn select_takes_the_first_and_drops_or_keeps_the_other() {
    block_on(async {
        let slow = sleep(SECOND * 60);
        match select(pin!(slow), pin!(sleep(MILLI))).await {
            Either::Right(((), slow)) => assert!(!slow.is_elapsed()),
            Either::Left(_) => panic!("a minute has passed"),
        }
        let (number, _, rest) =
            select_all((1..4u32).map(|n| Box::pin(async move { sleep(n * 3 * MILLI).map(|()| n).await })))
                .await;
        assert_eq!((number, rest.len()), (1, 2));
        let (number, _, rest) = select_all(rest).await;
        assert_eq!((number, rest.len()), (2, 1));

        let (mut here, mut there) = pair().await;
        let mut ticks = interval(MILLI);
        let mut seen = 0;
        here.send("x").await.expect("sent");
        let (mut got, mut ticked) = (0, 0);
        while got == 0 || ticked < 3 {
            futures::select_biased! {
                data = there.recv().fuse() => got += data.expect("no error").expect("data").len(),
                _ = ticks.tick().fuse() => ticked += 1,
            }
            seen += 1;
        }
        assert_eq!((got, seen), (1, got + ticked));
    })
    .expect("it runs");
}

#[test]
fn streams_and_sets_of_futures_poll_only_who_was_woken() {
    block_on(async {
        let polls = Rc::new(Cell::new(0));
        let mut set: FuturesUnordered<_> = (0..100u64)
            .map(|number| {
                let polls = polls.clone();
                let mut timer = Box::pin(sleep((number % 10) as u32 * MILLI));
                poll_fn(move |cx| {
                    polls.set(polls.get() + 1);
                    timer.as_mut().poll(cx).map(|()| number)
                })
            })
            .collect();
        let mut ended = BTreeSet::new();
        while let Some(number) = set.next().await {
            ended.insert(number);
        }
        assert_eq!(ended.len(), 100);
        assert!(polls.get() <= 2 * 100 + 10, "{} polls of 100 timers", polls.get());

        let most = Rc::new(Cell::new((0u32, 0u32)));
        let sum = stream::iter(0..50u32)
            .map(|number| {
                let most = most.clone();
                spawn(async move {
                    let (running, highest) = most.get();
                    most.set((running + 1, highest.max(running + 1)));
                    yield_now().await;
                    let (running, highest) = most.get();
                    most.set((running - 1, highest));
                    number
                })
            })
            .buffer_unordered(7)
            .fold(0, |sum, number| async move { sum + number.expect("no panic") })
            .await;
        assert_eq!(sum, 49 * 50 / 2);
        assert!(most.get().1 <= 7, "{} at a time", most.get().1);

        let ticks = stream::unfold(interval(MILLI), |mut ticks| async { Some((ticks.tick().await, ticks)) });
        let times: Vec<_> = ticks.take(4).collect().await;
        assert!(times.windows(2).all(|pair| pair[1].since(pair[0]) == MILLI), "{times:?}");
    })
    .expect("it runs");
}

#[test]
fn timers_that_are_dropped_leave_nothing_and_timers_never_fire_early() {
    block_on(async {
        let before = now();
        for _ in 0..100_000 {
            assert!(timeout(SECOND, async {}).await.is_ok());
            let mut timer = pin!(sleep(SECOND));
            assert!(futures::poll!(timer.as_mut()).is_pending());
        }
        let set: Vec<_> = (0..20_000u32).map(|n| sleep(SECOND * (n % 7 + 1))).collect();
        let mut all = Box::pin(join_all(set));
        assert!(futures::poll!(&mut all).is_pending());
        drop(all);
        sleep(5 * MILLI).await;
        assert!(now() >= before + 5 * MILLI);
        assert!(now() < before + 60 * SECOND);
    })
    .expect("it runs");
}

#[test]
fn extremes_of_time_neither_panic_nor_spin() {
    let started = Runtime::builder().start_tasks(|_| async {
        let end = corelane::Time::from_nanos(u64::MAX);
        drop(spawn(sleep(Duration::MAX)));
        drop(spawn(sleep_until(end)));
        drop(spawn(async {
            let mut ticks: Interval = interval(Duration::MAX);
            ticks.tick().await;
            ticks.tick().await;
        }));
        for missed in [MissedTicks::Burst, MissedTicks::Delay, MissedTicks::Skip] {
            let mut ticks = corelane::time::interval_at(corelane::Time::ZERO, Duration::MAX / 2);
            ticks.set_missed_ticks(missed);
            assert_eq!(ticks.tick().await, corelane::Time::ZERO);
            assert!(timeout(MILLI, ticks.tick()).await.is_err());
        }
        let mut timer = Box::pin(sleep(Duration::MAX));
        assert!(futures::poll!(&mut timer).is_pending());
        timer.reset(now());
        timer.await;
        assert!(timeout(Duration::MAX, async {}).await.is_ok());
        assert!(timeout(Duration::ZERO, pending::<()>()).await.is_err());
        sleep(Duration::ZERO).await;
    });
    let runtime = started.expect("it starts");
    let total = support::counters(&runtime, "the main future has ended", |total| total.tasks == 3);
    // Nothing is left to do but to wait.
    std::thread::sleep(50 * MILLI);
    let later = runtime.metrics().total();
    assert!(later.turns - total.turns <= 2, "{} turns of an idle worker", later.turns - total.turns);
    let report = runtime.shutdown(Duration::ZERO).expect("it ends");
    assert_eq!(report.tasks_dropped, 3, "{report}");
}

#[test]
fn a_combinator_polls_each_of_many_ready_futures_a_few_times() {
    const MANY: u64 = 20_000;
    let polls = Rc::new(Cell::new(0));
    let counted = polls.clone();
    let outcome = block_on(async move {
        let ready = sleep_until(now());
        let mut all: FuturesUnordered<_> = (0..MANY)
            .map(|_| {
                let polls = counted.clone();
                let mut future = Box::pin(sleep_until(ready.deadline()));
                poll_fn(move |cx| {
                    polls.set(polls.get() + 1);
                    future.as_mut().poll(cx)
                })
            })
            .collect();
        let mut done = 0;
        while all.next().await.is_some() {
            done += 1;
        }
        done
    });
    assert_eq!(outcome.expect("it runs"), MANY);
    assert!(polls.get() < 3 * MANY, "{} polls", polls.get());
}
