//! Calls that block: on threads that are made when needed, up to a maximum, and never in the way of a stop.
#![cfg(target_os = "linux")]

mod support;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use corelane::task::{self, block_on, spawn_blocking};
use corelane::{Builder, Runtime};
use futures::future::join_all;
use support::{PATIENCE, eventually};

const SECOND: Duration = Duration::from_secs(1);

/// Holds threads up until it is opened.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    fn pass(&self) {
        let (open, changed) = &*self.0;
        let guard = open.lock().expect("no panic");
        let (guard, _) = changed.wait_timeout_while(guard, PATIENCE, |open| !*open).expect("no panic");
        assert!(*guard, "nobody opened the gate");
    }

    fn open(&self) {
        *self.0.0.lock().expect("no panic") = true;
        self.0.1.notify_all();
    }
}

/// One thread at most.
fn single() -> Builder {
    Runtime::builder().blocking_threads(1)
}

#[test]
fn a_call_runs_on_another_thread_and_gives_its_outcome_or_its_panic() {
    let here = thread::current().id();
    let outcome = single().block_on(SECOND, async move {
        let there = spawn_blocking(|| thread::current().id()).await.expect("no panic");
        assert_ne!(there, here);
        let error = spawn_blocking(|| panic!("in the call")).await.map(|_: ()| ()).expect_err("it panicked");
        assert!(error.is_panic());
        assert_eq!(error.to_string(), "the task panicked: in the call");
        let again = spawn_blocking(|| thread::current().id()).await.expect("no panic");
        assert_eq!(there, again, "its thread waits for more, also after a panic");
    });
    outcome.expect("it runs");
}

#[test]
fn calls_of_several_workers_share_threads_up_to_the_maximum() {
    let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let ids = Runtime::builder().workers(3).blocking_threads(4).block_on(SECOND, async move {
        let workers = (0..3).map(|worker| {
            let (running, most) = (running.clone(), most.clone());
            let order = move || async move {
                let calls = (0..200).map(|_| {
                    let (running, most) = (running.clone(), most.clone());
                    spawn_blocking(move || {
                        most.fetch_max(running.fetch_add(1, SeqCst) + 1, SeqCst);
                        thread::yield_now();
                        running.fetch_sub(1, SeqCst);
                        thread::current().id()
                    })
                });
                let ids = join_all(calls.collect::<Vec<_>>()).await;
                (ids.into_iter().map(|id| id.expect("no panic")).collect::<Vec<_>>(), most.load(SeqCst))
            };
            task::spawn_on(worker, order).expect("room")
        });
        let mut ids = HashSet::new();
        for outcome in join_all(workers.collect::<Vec<_>>()).await {
            let (own, most) = outcome.expect("no panic");
            assert_eq!(own.len(), 200);
            assert!(most <= 4, "{most} at a time");
            ids.extend(own);
        }
        ids.len()
    });
    assert!((1..=4).contains(&ids.expect("it runs")));
}

#[test]
fn as_many_calls_as_threads_run_at_the_same_time() {
    // Each waits for all others.
    let barrier = Arc::new(std::sync::Barrier::new(64));
    block_on(async move {
        let calls = (0..64).map(|_| {
            let barrier = barrier.clone();
            spawn_blocking(move || barrier.wait().is_leader())
        });
        let leaders = join_all(calls.collect::<Vec<_>>()).await;
        assert_eq!(leaders.into_iter().filter(|leader| *leader.as_ref().expect("no panic")).count(), 1);
    })
    .expect("it runs");
}

#[test]
fn more_calls_than_the_queue_holds_wait_and_all_are_made() {
    let gate = Gate::default();
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let outcome = single().block_on(SECOND, async move {
        let (begun, seen) = mpsc::channel();
        let holder = {
            let gate = gate.clone();
            spawn_blocking(move || {
                begun.send(()).expect("somebody waits");
                gate.pass();
            })
        };
        seen.recv_timeout(PATIENCE).expect("it begins");
        let mut calls: Vec<_> = (0..3000)
            .map(|number| {
                let count = counted.clone();
                spawn_blocking(move || {
                    count.fetch_add(1, SeqCst);
                    number
                })
            })
            .collect();
        // Of those that wait for a place, many go away, woken or not.
        let waiting: Vec<_> = calls.drain(1500..2500).collect();
        let mut waiting = Box::pin(join_all(waiting));
        assert!(futures::poll!(&mut waiting).is_pending());
        let rest = task::spawn(join_all(calls));
        task::yield_now().await;
        gate.open();
        drop(waiting);
        holder.await.expect("no panic");
        let rest = rest.await.expect("no panic");
        assert!(rest.into_iter().map(|number| number.expect("no panic")).eq((0..1500).chain(2500..3000)));
    });
    outcome.expect("it runs");
    assert_eq!(count.load(SeqCst), 2000, "those that had no place and were dropped were not made");
}

#[test]
fn an_abort_keeps_a_call_from_beginning_and_not_from_ending() {
    let gate = Gate::default();
    let (begun, seen) = mpsc::channel();
    single()
        .block_on(SECOND, async move {
            let holder = {
                let gate = gate.clone();
                spawn_blocking(move || {
                    begun.send(()).expect("somebody waits");
                    gate.pass();
                    "to its end"
                })
            };
            let queued = spawn_blocking(|| unreachable!("it was aborted"));
            seen.recv_timeout(PATIENCE).expect("it begins");
            queued.abort();
            holder.abort();
            gate.open();
            assert_eq!(holder.await.expect("it had begun"), "to its end");
            let error = queued.await.map(|_: ()| ()).expect_err("aborted");
            assert!(error.is_aborted());
        })
        .expect("it runs");
}

#[test]
fn a_dropped_future_lets_its_call_go_on_and_a_stop_waits_for_it() {
    let done = Arc::new(AtomicBool::new(false));
    let inside = done.clone();
    Runtime::builder()
        .block_on(PATIENCE, async move {
            let gate = Gate::default();
            let call = gate.clone();
            drop(spawn_blocking(move || {
                call.pass();
                inside.store(true, SeqCst);
            }));
            drop(task::spawn(async move {
                corelane::time::sleep(Duration::from_millis(20)).await;
                gate.open();
            }));
        })
        .expect("it runs");
    assert!(done.load(SeqCst), "the worker ended when the call had, long before its deadline");
}

#[test]
fn a_stuck_call_does_not_hold_up_a_stop_beyond_its_deadline_and_is_reported() {
    let gate = Gate::default();
    let (call, done) = (gate.clone(), Arc::new(AtomicBool::new(false)));
    let inside = done.clone();
    let runtime = single()
        .workers(2)
        .start_tasks(move |worker| {
            let (call, inside) = (call.clone(), inside.clone());
            async move {
                if worker == 1 {
                    drop(spawn_blocking(move || {
                        call.pass();
                        inside.store(true, SeqCst);
                    }));
                    // It does not begin before the other has ended.
                    drop(spawn_blocking(|| ()));
                }
            }
        })
        .expect("it starts");
    let before = Instant::now();
    let report = runtime.shutdown(Duration::from_millis(100)).expect("it ends");
    assert!(before.elapsed() < PATIENCE / 2, "it took {:?}", before.elapsed());
    assert_eq!(report.blocking_left, 2);
    assert!(report.to_string().ends_with(", 2 blocking calls left running"), "{report}");
    assert!(!done.load(SeqCst));
    gate.open();
    eventually("its thread goes on by itself", || done.load(SeqCst));
}

#[test]
fn a_call_that_outlives_its_runtime_still_gives_its_outcome() {
    let gate = Gate::default();
    let inside = gate.clone();
    let (begun, seen) = mpsc::channel();
    let (call, queued) = single()
        .block_on(Duration::ZERO, async move {
            let call = spawn_blocking(move || {
                begun.send(()).expect("somebody waits");
                inside.pass();
            });
            seen.recv_timeout(PATIENCE).expect("it begins");
            (call, spawn_blocking(|| unreachable!("no thread begins it")))
        })
        .expect("it runs");
    assert!(!call.is_finished());
    gate.open();
    block_on(call).expect("it runs").expect("no panic");
    let error: Result<(), _> = block_on(queued).expect("it runs");
    assert!(error.expect_err("the pool has ended").is_aborted());
}
