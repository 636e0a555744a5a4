//! Tasks of other workers, and threads that run none: handles, aborts, ends, full mailboxes.
#![cfg(target_os = "linux")]

mod support;

use std::cell::Cell;
use std::future::pending;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::task::{Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use corelane::task::{self, Message, RemoteHandle, SpawnErrorKind, Spawner};
use corelane::{Runtime, WorkerConfig};
use futures::future::join_all;
use support::{PATIENCE, eventually};

const SECOND: Duration = Duration::from_secs(1);

fn runtime(workers: usize) -> Runtime<Message> {
    Runtime::builder().workers(workers).start_tasks(|_| async {}).expect("it starts")
}

/// Says when it is dropped, on whatever thread.
struct Flag(Arc<AtomicBool>);

impl Drop for Flag {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

#[test]
fn a_task_of_another_worker_gives_its_outcome_to_whoever_awaits_it() {
    let sum = Runtime::builder().workers(3).block_on(SECOND, async {
        let handles = (0..300usize).map(|number| {
            task::spawn_on(number % 3, move || {
                // Not `Send`, and need not be.
                let own = Rc::new(Cell::new(number));
                async move {
                    task::yield_now().await;
                    own.set(own.get() + task::worker());
                    own.get()
                }
            })
            .expect("there is room")
        });
        let outcomes = join_all(handles.collect::<Vec<_>>()).await;
        outcomes.into_iter().map(|outcome| outcome.expect("no panic")).sum::<usize>()
    });
    assert_eq!(sum.expect("it runs"), (0..300).map(|number| number + number % 3).sum());
}

#[test]
fn a_panic_over_there_is_an_error_here_wherever_it_comes_from() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }
    let runtime = runtime(1);
    let spawner = runtime.spawner();
    let fails: [RemoteHandle<()>; 3] = [
        spawner.spawn_on(0, || async { panic!("polled") }).expect("room"),
        spawner.spawn_on(0, || -> std::future::Ready<()> { panic!("made") }).expect("room"),
        spawner
            .spawn_on(0, || {
                let bomb = Bomb;
                std::future::poll_fn(move |_| {
                    let _ = &bomb;
                    Poll::Ready(())
                })
            })
            .expect("room"),
    ];
    let texts = fails.map(|handle| handle.wait().expect_err("it panicked").to_string());
    assert_eq!(texts, ["polled", "made", "dropped"].map(|text| format!("the task panicked: {text}")));
    let report = runtime.shutdown(SECOND).expect("the worker goes on");
    assert_eq!(report.metrics.total().tasks_panicked, 3, "{report}");
}

#[test]
fn an_abort_from_another_thread_drops_the_future_over_there() {
    let runtime = runtime(2);
    let dropped = Arc::new(AtomicBool::new(false));
    let started = Arc::new(AtomicBool::new(false));
    let (flag, running) = (Flag(dropped.clone()), started.clone());
    let handle: RemoteHandle<()> = runtime
        .spawner()
        .spawn_on(1, move || async move {
            let _flag = flag;
            running.store(true, SeqCst);
            pending().await
        })
        .expect("room");
    eventually("it runs", || started.load(SeqCst));
    assert!(!handle.is_finished() && !dropped.load(SeqCst));
    handle.abort();
    assert!(handle.wait().expect_err("aborted").is_aborted());
    assert!(dropped.load(SeqCst), "its future was dropped before it said so");
    runtime.shutdown(SECOND).expect("it ends");
}

#[test]
fn an_abort_races_with_the_start_and_the_end_without_a_hang() {
    let runtime = runtime(1);
    let spawner = runtime.spawner();
    let (mut aborted, mut finished) = (0, 0);
    for round in 0..2000 {
        let handle = spawner.spawn_on(0, move || async move {
            for _ in 0..round % 4 {
                task::yield_now().await;
            }
            round
        });
        let handle = handle.expect("room");
        for _ in 0..round % 7 {
            thread::yield_now();
        }
        handle.abort();
        match handle.wait() {
            Ok(number) => finished += u32::from(number == round),
            Err(error) => aborted += u32::from(error.is_aborted()),
        }
    }
    assert_eq!(aborted + finished, 2000);
    runtime.shutdown(SECOND).expect("it ends");
}

#[test]
fn a_dropped_remote_handle_lets_its_task_go_on() {
    let runtime = runtime(1);
    let done = Arc::new(AtomicBool::new(false));
    let inside = Flag(done.clone());
    drop(runtime.spawner().spawn_on(0, move || async move {
        corelane::time::sleep(Duration::from_millis(5)).await;
        drop(inside);
    }));
    eventually("it has ended by itself", || done.load(SeqCst));
    assert_eq!(runtime.shutdown(SECOND).expect("it ends").tasks_dropped, 0);
}

#[test]
fn a_worker_that_ends_resolves_every_handle() {
    for _ in 0..20 {
        let runtime = runtime(2);
        let spawner = runtime.spawner();
        // Some run, some lie in the mailbox, some come too late.
        let spawning = thread::spawn(move || {
            let mut handles: Vec<RemoteHandle<()>> = Vec::new();
            loop {
                match spawner.spawn_on(1, pending::<()>) {
                    Ok(handle) => handles.push(handle),
                    Err(error) if error.kind == SpawnErrorKind::Full => thread::yield_now(),
                    Err(_) => return handles,
                }
            }
        });
        let report = runtime.shutdown(Duration::ZERO).expect("it ends");
        let handles = spawning.join().expect("it spawned until the end");
        let count = handles.len() as u64;
        for handle in handles {
            assert!(handle.wait().expect_err("its worker ended").is_aborted());
        }
        assert_eq!(report.tasks_dropped + report.messages_undelivered, count, "{report}");
    }
}

#[test]
fn a_full_mailbox_gives_the_closure_back_and_a_missing_worker_too() {
    let config = WorkerConfig { mailbox: 1, ..WorkerConfig::default() };
    let outcome = Runtime::builder().worker(config).workers(2).block_on(SECOND, async {
        let spawner = task::spawner();
        // This worker does not read its mailbox while this task runs.
        let first = spawner.spawn_on(0, || async { 1 }).expect("there is room for one");
        let text = String::from("kept");
        let error = spawner.spawn_on(0, move || async move { text.len() }).expect_err("it is full");
        assert_eq!(error.kind, SpawnErrorKind::Full);
        assert!(error.to_string().contains("mailbox is full"), "{error}");
        assert_eq!((error.make)().await, 4);
        assert_eq!(first.await.expect("no panic"), 1);
        let error = spawner.spawn_on(2, || async {}).expect_err("there is none");
        assert_eq!(
            (error.kind, format!("{error:?}")),
            (SpawnErrorKind::Stopped, "SpawnError(Stopped)".into())
        );
        spawner.spawn_on(0, || async { 2 }).expect("there is room again").await.expect("no panic")
    });
    assert_eq!(outcome.expect("it runs"), 2);
}

#[test]
fn pinned_tasks_go_to_one_worker_after_the_other_and_past_a_full_one() {
    let runtime = runtime(3);
    let spawner = runtime.spawner();
    let handles: Vec<_> =
        (0..9).map(|_| spawner.spawn_pinned(|| async { task::worker() }).expect("room")).collect();
    let workers: Vec<usize> = handles.into_iter().map(|handle| handle.wait().expect("no panic")).collect();
    assert_eq!(workers, [0, 1, 2, 0, 1, 2, 0, 1, 2]);
    runtime.shutdown(SECOND).expect("it ends");
    assert_eq!(spawner.spawn_pinned(|| async {}).expect_err("it ended").kind, SpawnErrorKind::Stopped);

    let config = WorkerConfig { mailbox: 1, ..WorkerConfig::default() };
    let outcome = Runtime::builder().worker(config).workers(2).block_on(SECOND, async {
        let full = task::spawn_on(0, || async {}).expect("there is room for one");
        let one = task::spawn_pinned(|| async { task::worker() }).expect("it is the other's turn");
        let one = one.await.expect("no panic");
        full.await.expect("no panic");
        let full = task::spawn_on(0, || async {}).expect("there is room for one");
        let two = task::spawn_pinned(|| async { task::worker() }).expect("the next one has room");
        let two = two.await.expect("no panic");
        full.await.expect("no panic");
        (one, two)
    });
    assert_eq!(outcome.expect("it runs"), (1, 1));
}

#[test]
fn waiting_inside_a_task_is_refused() {
    let error = task::block_on(async {
        let handle = task::spawn_on(0, || async {}).expect("room");
        task::spawn(async move { handle.wait().is_ok() }).await
    });
    let error = error.expect("it runs").expect_err("it panicked").to_string();
    assert!(error.contains("inside a task, await the handle"), "{error}");
}

#[test]
fn handles_can_be_awaited_by_another_runtime() {
    let there = runtime(1);
    let handle = there.spawner().spawn_on(0, || async {
        corelane::time::sleep(Duration::from_millis(10)).await;
        "there"
    });
    let handle = handle.expect("room");
    assert_eq!(task::block_on(handle).expect("it runs").expect("no panic"), "there");
    there.shutdown(SECOND).expect("it ends");
}

#[test]
fn channels_of_other_crates_work_between_workers() {
    const MANY: u64 = 5000;
    let outcome = Runtime::builder().workers(3).block_on(SECOND, async {
        let (sender, receiver) = async_channel::bounded::<u64>(4);
        let (back, results) = futures::channel::mpsc::channel::<u64>(1);
        for worker in 1..3 {
            let (receiver, mut back) = (receiver.clone(), back.clone());
            drop(task::spawn_on(worker, move || async move {
                while let Ok(number) = receiver.recv().await {
                    futures::SinkExt::send(&mut back, number * 2).await.expect("somebody listens");
                }
            }));
        }
        drop((receiver, back));
        drop(task::spawn(async move {
            for number in 0..MANY {
                sender.send(number).await.expect("somebody listens");
            }
        }));
        let (told, asked) = futures::channel::oneshot::channel();
        drop(task::spawn_on(2, move || async move { told.send(task::worker()).expect("somebody waits") }));
        let sum = futures::StreamExt::fold(results, 0, |sum, number| async move { sum + number }).await;
        (sum, asked.await.expect("it was told"))
    });
    assert_eq!(outcome.expect("it runs"), (MANY * (MANY - 1), 2));
}

#[test]
fn a_wake_that_comes_while_the_outcome_is_asked_for_is_not_lost() {
    struct Count(AtomicUsize);
    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, SeqCst);
        }
    }
    let runtime = runtime(1);
    let spawner = runtime.spawner();
    for _ in 0..2000 {
        let mut handle = Box::pin(spawner.spawn_on(0, || async {}).expect("room"));
        let count = Arc::new(Count(AtomicUsize::new(0)));
        let waker = Waker::from(count.clone());
        let polled = handle.as_mut().poll(&mut std::task::Context::from_waker(&waker));
        if polled.is_pending() {
            let until = std::time::Instant::now() + PATIENCE;
            while count.0.load(SeqCst) == 0 {
                assert!(std::time::Instant::now() < until, "the wake was lost");
                thread::yield_now();
            }
            let polled = handle.as_mut().poll(&mut std::task::Context::from_waker(&waker));
            assert!(polled.is_ready());
        }
    }
    runtime.shutdown(SECOND).expect("it ends");
}

fn is_shared<T: Clone + Send + Sync>() {}
fn is_sent<T: Send + Sync>() {}

#[test]
fn what_is_for_other_threads_may_go_there() {
    is_shared::<Spawner>();
    is_sent::<RemoteHandle<u8>>();
    is_sent::<Waker>();
}
