//! Wakers on other threads: whenever they are woken, nothing is lost and nothing is harmed.
#![cfg(target_os = "linux")]

mod support;

use std::cell::Cell;
use std::future::{pending, poll_fn};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::thread;
use std::time::Duration;

use corelane::task::{self, block_on, spawn, yield_now};
use corelane::{Runtime, WorkerConfig};
use support::eventually;

/// One test at a time: a worker's number is given to the next one, and a waker that is out of date may wake a task of
/// that for nothing. Here polls are counted.
static TURN: Mutex<()> = Mutex::new(());

const SECOND: Duration = Duration::from_secs(1);

/// A number that threads raise, and one task that waits for it.
#[derive(Default)]
struct Level {
    value: AtomicU64,
    waker: Mutex<Option<Waker>>,
}

impl Level {
    fn raise(&self) {
        self.value.fetch_add(1, SeqCst);
        let waker = self.waker.lock().expect("no panic").clone();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    async fn reaches(&self, wanted: u64) {
        poll_fn(|cx| {
            *self.waker.lock().expect("no panic") = Some(cx.waker().clone());
            if self.value.load(SeqCst) >= wanted { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

/// A task sleeps between any two wakes that other threads give it, thousands of times, with a mailbox that is always
/// full. A lost wake would be a hang.
fn ping_pong(mailbox: u32, threads: u64, tasks: u64, rounds: u64) {
    let config = WorkerConfig { mailbox, ..WorkerConfig::default() };
    let counters = Runtime::builder().worker(config).block_on(SECOND, async move {
        let levels: Vec<Arc<Level>> = (0..tasks).map(|_| Arc::default()).collect();
        let asked = Arc::new(Level::default());
        let threads: Vec<_> = (0..threads)
            .map(|_| {
                let (levels, asked) = (levels.clone(), asked.clone());
                thread::spawn(move || {
                    for round in 1..=rounds {
                        while asked.value.load(SeqCst) < round {
                            thread::yield_now();
                        }
                        levels.iter().for_each(|level| level.raise());
                    }
                })
            })
            .collect();
        let number = threads.len() as u64;
        for round in 1..=rounds {
            let waiting: Vec<_> = levels
                .iter()
                .map(|level| {
                    let level = level.clone();
                    spawn(async move { level.reaches(round * number).await })
                })
                .collect();
            asked.raise();
            for waiting in waiting {
                waiting.await.expect("no panic");
            }
        }
        for thread in threads {
            thread.join().expect("no panic");
        }
    });
    counters.expect("it runs");
}

#[test]
fn a_storm_of_wakes_on_a_full_mailbox_loses_none() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    ping_pong(1, 4, 8, 300);
}

#[test]
fn a_storm_of_wakes_on_a_mailbox_with_room_loses_none() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    ping_pong(4096, 4, 8, 300);
}

#[test]
fn a_single_sleeping_task_is_woken_every_time() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    ping_pong(1, 1, 1, 3000);
}

#[test]
fn wakes_during_a_poll_have_the_task_polled_again_once() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    block_on(async {
        let polls = Rc::new(Cell::new(0));
        let seen = polls.clone();
        let handle = spawn(poll_fn(move |cx| {
            seen.set(seen.get() + 1);
            if seen.get() == 1 {
                for _ in 0..5 {
                    cx.waker().wake_by_ref();
                }
                return Poll::Pending;
            }
            if seen.get() == 2 {
                // From another thread, still during the poll.
                let waker = cx.waker().clone();
                thread::spawn(move || waker.wake()).join().expect("no panic");
                return Poll::Pending;
            }
            Poll::Ready(())
        }));
        handle.await.expect("no panic");
        assert_eq!(polls.get(), 3);
    })
    .expect("it runs");
}

#[test]
fn wakers_are_harmless_after_their_task_their_worker_and_their_runtime() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let kept: Arc<Mutex<Vec<Waker>>> = Arc::default();
    let taken = kept.clone();
    block_on(async move {
        for _ in 0..100 {
            let taken = taken.clone();
            let ended = spawn(poll_fn(move |cx| {
                taken.lock().expect("no panic").push(cx.waker().clone());
                Poll::Ready(())
            }));
            ended.await.expect("no panic");
        }
        // Their slots are used by others now; a wake of the old name polls none of them.
        let polls = Rc::new(Cell::new(0));
        let seen = polls.clone();
        let other = spawn(poll_fn(move |_| {
            seen.set(seen.get() + 1);
            Poll::<()>::Pending
        }));
        yield_now().await;
        let wakers = taken.lock().expect("no panic").clone();
        thread::spawn(move || wakers.iter().for_each(Waker::wake_by_ref)).join().expect("no panic");
        yield_now().await;
        yield_now().await;
        assert_eq!(polls.get(), 1);
        other.abort();
    })
    .expect("it runs");
    // Of a runtime that is gone, here and elsewhere, also while another one has its number.
    let wakers = std::mem::take(&mut *kept.lock().expect("no panic"));
    let elsewhere = wakers.clone();
    wakers.iter().for_each(Waker::wake_by_ref);
    block_on(async move {
        let woken = thread::spawn(move || elsewhere.into_iter().for_each(Waker::wake));
        wakers.into_iter().for_each(Waker::wake);
        yield_now().await;
        woken.join().expect("no panic");
    })
    .expect("it runs");
}

#[test]
fn threads_that_wake_all_the_time_survive_the_end_of_runtimes() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let current: Arc<Mutex<Option<Waker>>> = Arc::default();
    let (over, woken) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let (current, over, woken) = (current.clone(), over.clone(), woken.clone());
            thread::spawn(move || {
                while !over.load(SeqCst) {
                    let waker = current.lock().expect("no panic").clone();
                    if let Some(waker) = waker {
                        waker.wake();
                        woken.fetch_add(1, SeqCst);
                    }
                }
            })
        })
        .collect();
    for _ in 0..30 {
        let (current, woken) = (current.clone(), woken.clone());
        block_on(async move {
            let before = woken.load(SeqCst);
            poll_fn(|cx| {
                *current.lock().expect("no panic") = Some(cx.waker().clone());
                if woken.load(SeqCst) > before + 3 { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
        })
        .expect("it runs");
    }
    over.store(true, SeqCst);
    for thread in threads {
        thread.join().expect("no panic");
    }
}

#[test]
fn remote_wakes_are_counted() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let runtime = Runtime::builder()
        .start_tasks(|_| async {
            let waker = poll_fn(|cx| Poll::Ready(cx.waker().clone())).await;
            drop(thread::spawn(move || waker.wake()));
            pending::<()>().await;
        })
        .expect("it starts");
    eventually("it was woken", || runtime.metrics().total().remote_wakes == 1);
    let report = runtime.shutdown(Duration::ZERO).expect("it ends");
    assert_eq!(report.metrics.total().task_polls, 2);
    assert_eq!(report.tasks_dropped, 1);
}

/// What lies in a mailbox when its worker is gone is dropped on some thread, and may wake there.
#[test]
fn a_closure_that_wakes_when_it_is_dropped_unread_does_no_harm() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    struct WakesWhenDropped(Waker, Arc<AtomicBool>);
    impl Drop for WakesWhenDropped {
        fn drop(&mut self) {
            self.0.wake_by_ref();
            self.1.store(true, SeqCst);
        }
    }
    let dropped = Arc::new(AtomicBool::new(false));
    let flag = dropped.clone();
    block_on(async move {
        let waker = poll_fn(|cx| Poll::Ready(cx.waker().clone())).await;
        let bomb = WakesWhenDropped(waker, flag);
        // A task that never reads: the main future's end comes in the same turn.
        let order = move || {
            let _bomb = bomb;
            pending::<()>()
        };
        drop(task::spawn_on(0, order).expect("there is room"));
    })
    .expect("it runs");
    assert!(dropped.load(SeqCst));
}
