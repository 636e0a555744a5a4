//! Runtimes whose main futures end early, fail, panic, or are stopped from outside; runtimes within runtimes.
#![cfg(target_os = "linux")]

mod support;

use std::cell::RefCell;
use std::future::pending;
use std::io::{Read, Write};
use std::net::TcpStream as Std;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use corelane::net::{TcpListener, TcpStream};
use corelane::task::{self, BlockOnError, block_on, spawn};
use corelane::time::{sleep, timeout};
use corelane::{Runtime, RuntimeError};
use support::{PATIENCE, any_port, eventually};

const SECOND: Duration = Duration::from_secs(1);

/// Open descriptors of this process.
#[cfg(target_os = "linux")]
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("it is there").count()
}

struct Flag(Arc<AtomicBool>);

impl Drop for Flag {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

#[test]
fn a_runtime_within_a_runtime_runs_to_its_end_and_the_outer_one_goes_on() {
    let outcome = block_on(async {
        let outer = spawn(async {
            sleep(Duration::from_millis(1)).await;
            task::worker()
        });
        let inner = block_on(async {
            let mut listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
            let addr = listener.local_addr().expect("it has one");
            let server = spawn(async move {
                let mut stream = listener.accept().await.expect("accepted");
                stream.recv().await.expect("no error").expect("data").to_vec()
            });
            let mut stream = TcpStream::connect(addr).await.expect("connected");
            stream.send("within").await.expect("sent");
            server.await.expect("no panic")
        });
        assert_eq!(inner.expect("it runs"), b"within");
        outer.await.expect("the outer one's task")
    });
    assert_eq!(outcome.expect("it runs"), 0);
}

#[test]
fn wakes_from_within_reach_the_outer_runtime() {
    block_on(async {
        let (told, asked) = futures::channel::oneshot::channel();
        let waiting = spawn(asked);
        task::yield_now().await;
        block_on(async move { told.send("from within").expect("somebody waits") }).expect("it runs");
        assert_eq!(waiting.await.expect("no panic").expect("told"), "from within");
    })
    .expect("it runs");
}

#[test]
#[cfg(target_os = "linux")]
fn a_main_future_that_panics_panics_here_and_leaves_nothing_behind() {
    // In a process of its own, whose descriptors nobody else opens and closes.
    if support::role().is_none() {
        let name = "a_main_future_that_panics_panics_here_and_leaves_nothing_behind";
        support::rerun(name, "panics", &[]).ends();
        return;
    }
    block_on(async {}).expect("it runs");
    let before = descriptors();
    let dropped = Arc::new(AtomicBool::new(false));
    let elsewhere = Arc::new(AtomicBool::new(false));
    for _ in 0..5 {
        dropped.store(false, SeqCst);
        let (flag, other) = (Flag(dropped.clone()), Flag(elsewhere.clone()));
        let panic = catch_unwind(AssertUnwindSafe(|| {
            Runtime::builder().workers(3).block_on(SECOND, async move {
                let mut listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
                let addr = listener.local_addr().expect("it has one");
                drop(spawn(async move {
                    let _flag = flag;
                    let _stream = TcpStream::connect(addr).await;
                    pending::<()>().await
                }));
                drop(task::spawn_on(2, move || async move {
                    let _flag = other;
                    pending::<()>().await
                }));
                let _stream = listener.accept().await.expect("accepted");
                panic!("on purpose");
            })
        }));
        let panic = panic.map(|_: Result<(), _>| ()).expect_err("it panicked");
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"on purpose"));
        assert!(dropped.load(SeqCst) && elsewhere.load(SeqCst), "every worker has ended");
        assert_eq!(descriptors(), before, "everything is closed");
    }
}

#[test]
fn a_stop_from_outside_ends_a_main_future_that_waits_for_ever() {
    let (to, from) = mpsc::channel();
    let stopping = thread::spawn(move || {
        let spawner: task::Spawner = from.recv_timeout(PATIENCE).expect("it is sent");
        let (told, asked) = mpsc::channel();
        let handle = spawner.spawn_on(0, move || async move { told.send(task::worker()) }).expect("room");
        assert_eq!(asked.recv_timeout(PATIENCE), Ok(0));
        handle.wait().expect("no panic").expect("somebody listens");
        spawner.stop(Duration::from_millis(20));
    });
    let error = Runtime::builder().workers(2).block_on(Duration::from_millis(20), async move {
        to.send(task::spawner()).expect("somebody waits");
        pending::<()>().await
    });
    stopping.join().expect("no panic");
    assert!(matches!(error, Err(BlockOnError::Run(None))), "{error:?}");
    assert_eq!(
        error.expect_err("stopped").to_string(),
        "the runtime was stopped before the future had ended"
    );
}

#[test]
fn a_main_future_that_hears_of_the_stop_ends_in_good_order() {
    let order: Arc<Mutex<Vec<&str>>> = Arc::default();
    let inside = order.clone();
    let runtime = Runtime::builder()
        .start_tasks(move |_| {
            let inside = inside.clone();
            async move {
                task::stopped().await;
                inside.lock().expect("no panic").push("heard");
                sleep(Duration::from_millis(5)).await;
                inside.lock().expect("no panic").push("done");
            }
        })
        .expect("it starts");
    let before = Instant::now();
    let report = runtime.shutdown(PATIENCE).expect("it ends");
    assert!(before.elapsed() < PATIENCE, "it did not wait for its deadline");
    assert_eq!(*order.lock().expect("no panic"), ["heard", "done"]);
    assert_eq!(report.tasks_dropped, 0);
    assert!(!report.to_string().contains("tasks"), "{report}");
}

#[test]
fn a_main_future_that_fails_stops_the_others_and_is_reported_even_when_another_would_go_on() {
    let started = Runtime::builder().workers(3).start_tasks(|worker| async move {
        if worker == 2 {
            sleep(Duration::from_millis(5)).await;
            return Err(std::io::Error::other("out of luck"));
        }
        pending::<std::io::Result<()>>().await
    });
    match started.expect("it starts").join().expect_err("it failed") {
        RuntimeError::Worker { index, source } => {
            assert_eq!((index, source.to_string().as_str()), (2, "out of luck"));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn a_main_future_that_panics_is_reported_by_the_runtime() {
    let started = Runtime::builder().workers(2).start_tasks(|worker| async move {
        assert_ne!(worker, 1, "on purpose");
        pending::<()>().await
    });
    match started.expect("it starts").join().expect_err("it failed") {
        RuntimeError::Panicked { index, message } => {
            assert!(index == 1 && message.contains("on purpose"), "{index}: {message}");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn tasks_go_on_when_their_main_future_has_ended() {
    let started = Runtime::builder().listen(any_port()).start_tasks(|_| async {
        let mut listener = TcpListener::of_builder(0).expect("it was given one");
        drop(spawn(async move {
            while let Ok(mut stream) = listener.accept().await {
                drop(spawn(async move {
                    while let Ok(Some(data)) = stream.recv().await {
                        if stream.send(data).await.is_err() {
                            break;
                        }
                    }
                }));
            }
        }));
    });
    let runtime = started.expect("it starts");
    let mut client = Std::connect(runtime.info().listeners[0].addr).expect("connected");
    client.write_all(b"still there").expect("sent");
    let mut back = [0; 11];
    client.read_exact(&mut back).expect("an echo");
    assert_eq!(&back, b"still there");
    drop(client);
    let report = runtime.shutdown(SECOND).expect("it ends");
    assert_eq!((report.aborted, report.buffers_outstanding), (0, 0), "{report}");
}

#[test]
fn what_the_main_future_leaves_in_flight_is_finished_before_block_on_returns() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bound");
    let addr = listener.local_addr().expect("it has one");
    let reading = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("accepted");
        let mut got = Vec::new();
        stream.read_to_end(&mut got).expect("to its end");
        got.len()
    });
    Runtime::builder()
        .block_on(PATIENCE, async move {
            let mut stream = TcpStream::connect(addr).await.expect("connected");
            stream.send(vec![7; 100_000]).await.expect("queued");
        })
        .expect("it runs");
    assert_eq!(reading.join().expect("no panic"), 100_000);
}

#[test]
fn one_runtime_after_the_other_and_several_at_a_time() {
    for round in 0..20 {
        assert_eq!(block_on(async move { round }).expect("it runs"), round);
    }
    let runtimes: Vec<_> = (0..4)
        .map(|_| Runtime::builder().workers(2).start_tasks(|_| pending::<()>()).expect("it starts"))
        .collect();
    let handles: Vec<_> = runtimes
        .iter()
        .map(|runtime| {
            runtime
                .spawner()
                .spawn_on(1, || async {
                    sleep(Duration::from_millis(1)).await;
                    task::workers()
                })
                .expect("room")
        })
        .collect();
    for handle in handles {
        assert_eq!(handle.wait().expect("no panic"), 2);
    }
    for runtime in runtimes {
        let report = runtime.shutdown(Duration::ZERO).expect("it ends");
        assert_eq!(report.tasks_dropped, 2, "{report}");
    }
}

#[test]
fn a_runtime_that_is_dropped_drops_its_tasks() {
    let dropped = Arc::new(AtomicUsize::new(0));
    struct Counts(Arc<AtomicUsize>);
    impl Drop for Counts {
        fn drop(&mut self) {
            self.0.fetch_add(1, SeqCst);
        }
    }
    let inside = dropped.clone();
    let runtime = Runtime::builder().workers(2).start_tasks(move |_| {
        let (main, other) = (Counts(inside.clone()), Counts(inside.clone()));
        async move {
            let _main = main;
            drop(spawn(async move {
                let _other = other;
                pending::<()>().await
            }));
            pending::<()>().await
        }
    });
    let spawner = runtime.as_ref().expect("it starts").spawner();
    drop(runtime);
    eventually("all are dropped", || dropped.load(SeqCst) == 4);
    eventually("it takes no more", || spawner.spawn_pinned(|| async {}).is_err());
}

#[test]
fn what_belongs_to_a_worker_that_has_ended_may_be_dropped_later() {
    let (kept, stream, timer) = block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        let stream = TcpStream::connect(listener.local_addr().expect("it has one")).await.expect("connected");
        let timer = sleep(SECOND);
        let kept: Rc<RefCell<Vec<TcpListener>>> = Rc::new(RefCell::new(vec![listener]));
        (kept, stream, timer)
    })
    .expect("it runs");
    // In another runtime they do nothing, and nothing bad.
    block_on(async move {
        let mut stream = stream;
        assert!(timeout(Duration::from_millis(5), stream.recv()).await.is_ok_and(|got| got.is_err()));
        drop((kept, stream, timer));
    })
    .expect("it runs");
}

#[test]
fn outside_of_a_task_it_is_said_what_is_missing() {
    let panic = catch_unwind(|| drop(spawn(async {}))).expect_err("there is no task");
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).expect("a text");
    assert!(text.contains("run it with corelane::task::block_on"), "{text}");
}
