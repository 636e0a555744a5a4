//! Stopping: gracefully, at a deadline, from inside, by a panic, without being asked.
#![cfg(target_os = "linux")]

mod support;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{channel, sync_channel};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use corelane::{
    CloseReason, ConnectConfig, ConnectErrorKind, Descriptors, ListenerConfig, RemoteError, Runtime,
    RuntimeError, WorkerConfig,
};
use support::*;

const BOTH: [Descriptors; 2] = [Descriptors::Direct, Descriptors::Fd];

/// A listener whose connections have small send buffers, so that what is queued stays queued.
fn narrow() -> ListenerConfig {
    let mut listener = ListenerConfig::new(any_port());
    listener.options.send_buffer = Some(4096);
    listener
}

/// Sends a megabyte when it hears anything, and goes on listening.
fn generous() -> Hooks {
    Hooks::plain().data(|conn, _| conn.send(pattern(1, 1 << 20)).expect("room"))
}

#[test]
fn what_is_queued_when_the_stop_comes_is_still_delivered_to_who_reads() {
    for descriptors in BOTH {
        // Whoever reads slowly (a sanitizer does) is not to be taken for one who does not read.
        let config = WorkerConfig { descriptors, close_timeout: PATIENCE, ..WorkerConfig::default() };
        let builder = Runtime::builder().worker(config).listen(narrow());
        let Some(runtime) = start(builder, |_| generous()) else { return };
        let streams: Vec<_> = (0..4).map(|_| connect_narrow(addr(&runtime), 4096)).collect();
        let idle = connect(addr(&runtime));
        for mut stream in &streams {
            stream.write_all(b"x").expect("write");
        }
        counters(&runtime, "all asked", |total| total.messages == 4);
        let readers: Vec<_> =
            streams.into_iter().map(|stream| thread::spawn(move || read_to_eof(&stream))).collect();
        let idle = thread::spawn(move || read_to_eof(&idle));
        let report = runtime.shutdown(PATIENCE).expect("a clean shutdown");
        nothing_left(&report);
        assert_eq!((report.finished, report.aborted), (5, 0), "{report}");
        assert_eq!(report.metrics.total().closed[CloseReason::Shutdown.index()], 5);
        for reader in readers {
            same_bytes(&reader.join().expect("a reader"), &pattern(1, 1 << 20), "what was queued");
        }
        assert_eq!(idle.join().expect("a reader"), b"");
    }
}

#[test]
fn a_peer_that_does_not_read_is_reset_at_the_deadline() {
    for descriptors in BOTH {
        let (seen, told) = channel();
        let config = WorkerConfig { descriptors, ..WorkerConfig::default() };
        let make =
            move |_| Hooks::telling(&seen).data(|conn, _| conn.send(pattern(1, 1 << 20)).expect("room"));
        let builder = Runtime::builder().worker(config).listen(narrow());
        let Some(runtime) = start(builder, make) else { return };
        let mut streams: Vec<_> = (0..3).map(|_| connect_narrow(addr(&runtime), 4096)).collect();
        for stream in &mut streams {
            stream.write_all(b"x").expect("write");
        }
        counters(&runtime, "all asked", |total| total.messages == 3);
        // The turn that answered is over: a turn's time stands still.
        ask(&runtime.remote(), 0, |_| ());
        let began = Instant::now();
        let deadline = Duration::from_millis(300);
        let report = runtime.shutdown(deadline).expect("a clean shutdown");
        let took = began.elapsed();
        assert!(took >= deadline && took < deadline + Duration::from_secs(3), "{took:?}");
        nothing_left(&report);
        assert_eq!((report.finished, report.aborted), (0, 3), "{report}");
        for stream in &mut streams {
            assert_eq!(end_of(stream).0, End::Reset);
            assert_eq!(closed(&told).1, CloseReason::Shutdown);
        }
    }
}

/// Whoever finishes in time is not held up, nor reset, because of others who do not.
#[test]
fn the_report_tells_finished_from_aborted() {
    let Some(runtime) = start(Runtime::builder().workers(2).listen(narrow()), |_| generous()) else {
        return;
    };
    let stalled: Vec<_> = (0..2).map(|_| connect_narrow(addr(&runtime), 4096)).collect();
    let leaving: Vec<_> = (0..3).map(|_| connect(addr(&runtime))).collect();
    for mut stream in &stalled {
        stream.write_all(b"x").expect("write");
    }
    counters(&runtime, "all of them", |total| total.messages == 2 && total.connections == 5);
    let readers: Vec<_> =
        leaving.into_iter().map(|stream| thread::spawn(move || read_to_eof(&stream))).collect();
    let report = runtime.shutdown(Duration::from_millis(500)).expect("a clean shutdown");
    nothing_left(&report);
    assert_eq!((report.finished, report.aborted), (3, 2), "{report}");
    for reader in readers {
        assert_eq!(reader.join().expect("a reader"), b"");
    }
    let text = report.to_string();
    assert!(text.contains("3 connections finished, 2 aborted, 0 operations left"), "{text}");
}

#[test]
fn clients_that_wait_to_be_accepted_are_let_go_of_when_the_runtime_stops() {
    for descriptors in BOTH {
        let config = WorkerConfig { descriptors, max_connections: 2, ..WorkerConfig::default() };
        let builder = Runtime::builder().worker(config).listen(any_port());
        let Some(runtime) = start(builder, |_| Hooks::echo()) else { return };
        let mut streams: Vec<_> = (0..6).map(|_| connect(addr(&runtime))).collect();
        counters(&runtime, "the limit", |total| total.connections == 2);
        let ends = thread::spawn(move || streams.iter_mut().map(|stream| end_of(stream).1).sum::<usize>());
        let report = stop(runtime);
        assert_eq!(report.finished + report.aborted, 2, "{report}");
        assert_eq!(ends.join().expect("every client sees an end"), 0);
    }
}

#[test]
fn a_burst_that_is_being_accepted_when_the_stop_comes_is_let_go_of() {
    for descriptors in BOTH {
        let config = WorkerConfig { descriptors, accept_budget: 1, ..WorkerConfig::default() };
        let builder = Runtime::builder().worker(config).listen(any_port());
        let Some(runtime) = start(builder, |_| Hooks::echo()) else { return };
        let remote = runtime.remote();
        let (here, there) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
        let (in_callback, go_on) = (here.clone(), there.clone());
        tell(&remote, 0, move |_| {
            in_callback.wait();
            go_on.wait();
        });
        here.wait();
        let mut streams: Vec<_> = (0..200).map(|_| connect(addr(&runtime))).collect();
        remote.stop(PATIENCE);
        there.wait();
        let ends = thread::spawn(move || streams.iter_mut().map(end_of).count());
        let report = runtime.join().expect("a clean shutdown");
        nothing_left(&report);
        assert_eq!(ends.join().expect("every client sees an end"), 200);
        let total = report.metrics.total();
        assert_eq!(report.finished + report.aborted, total.closed_total(), "{report}");
    }
}

#[test]
fn a_handler_stops_its_worker_and_join_returns_the_report() {
    let (seen, told) = channel();
    let make = move |_| {
        let seen = seen.clone();
        Hooks::echo()
            .data(|conn, data| {
                conn.send(data).expect("open");
                conn.cx().stop(Duration::from_secs(5));
                // The callback goes on, and so does the connection until the turn is over.
                conn.send(" and bye").expect("open");
            })
            .stop(move |cx| {
                let refused = cx.connect(ConnectConfig::new(any_port()), ());
                seen.send(refused.map_err(|error| error.kind)).expect("the test listens");
            })
    };
    let Some(runtime) = start(Runtime::builder().listen(any_port()), make) else { return };
    let mut stream = connect(addr(&runtime));
    stream.write_all(b"stop").expect("write");
    let reader = thread::spawn(move || read_to_eof(&stream));
    let report = runtime.join().expect("a clean shutdown");
    nothing_left(&report);
    assert_eq!(reader.join().expect("a reader"), b"stop and bye");
    assert_eq!(report.finished, 1, "{report}");
    // What was begun in on_stop is not refused silently: it is either made and ended, or refused.
    let begun = told.recv_timeout(PATIENCE).expect("on_stop was called");
    assert!(begun.is_ok() || begun == Err(ConnectErrorKind::Stopping), "{begun:?}");
}

#[test]
fn on_stop_may_say_goodbye_to_everybody() {
    let make = |_| {
        Hooks::plain().stop(|cx| {
            let ids: Vec<_> = cx.ids().collect();
            for id in ids {
                cx.conn(id).expect("open").send("goodbye").expect("open");
            }
        })
    };
    let Some(runtime) = start(Runtime::builder().workers(2).listen(any_port()), make) else { return };
    let streams: Vec<_> = (0..20).map(|_| connect(addr(&runtime))).collect();
    counters(&runtime, "all accepted", |total| total.connections == 20);
    let readers: Vec<_> =
        streams.into_iter().map(|stream| thread::spawn(move || read_to_eof(&stream))).collect();
    let report = stop(runtime);
    assert_eq!((report.finished, report.aborted), (20, 0), "{report}");
    for reader in readers {
        assert_eq!(reader.join().expect("a reader"), b"goodbye");
    }
}

#[test]
fn messages_that_nobody_reads_any_more_are_reported() {
    let Some(runtime) = start(Runtime::builder(), |_| Hooks::plain()) else { return };
    let remote = runtime.remote();
    let (here, there) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let (in_callback, go_on) = (here.clone(), there.clone());
    tell(&remote, 0, move |cx| {
        in_callback.wait();
        go_on.wait();
        cx.stop(Duration::ZERO);
    });
    here.wait();
    // More than one turn reads.
    for _ in 0..2000 {
        tell(&remote, 0, |_| {});
    }
    there.wait();
    let report = runtime.join().expect("a clean shutdown");
    assert_eq!(report.messages_undelivered + report.metrics.total().mailbox, 2001, "{report}");
    assert!(report.messages_undelivered > 0, "{report}");
}

fn message_of(error: RuntimeError) -> (usize, String) {
    match error {
        RuntimeError::Panicked { index, message } => (index, message),
        other => panic!("a panic expected, not: {other}"),
    }
}

/// Everything is in flight when the handler panics: sends that are stuck, receives, accepts, leases.
#[test]
fn a_panic_in_a_callback_ends_everything_in_order() {
    for descriptors in BOTH {
        let config = WorkerConfig { descriptors, ..WorkerConfig::default() };
        let make = |_| {
            Hooks::new(Vec::new).data(|conn, data| {
                assert!(data[0] != b'!', "a handler's own mistake");
                conn.state().push(data.clone());
                conn.send(data).expect("open");
                conn.send(vec![0; 1 << 20]).expect("room");
            })
        };
        let builder = Runtime::builder().worker(config).listen(narrow());
        let Some(runtime) = start(builder, make) else { return };
        let mut streams: Vec<_> = (0..20).map(|_| connect_narrow(addr(&runtime), 4096)).collect();
        for stream in &mut streams[..19] {
            stream.write_all(b"ordinary").expect("write");
        }
        counters(&runtime, "all of it under way", |total| total.messages == 19);
        assert!(runtime.is_running());
        streams[19].write_all(b"!").expect("write");
        eventually("the end of the worker", || !runtime.is_running());
        let ends: Vec<_> = streams.iter_mut().map(|stream| end_of(stream).0).collect();
        // Those with stuck sends are reset; nobody is left hanging.
        assert!(ends[..19].iter().all(|&end| end == End::Reset), "{ends:?}");
        let error = runtime.shutdown(PATIENCE).expect_err("it panicked");
        assert!(error.to_string().contains("worker 0 panicked: a handler's own mistake"), "{error}");
        assert_eq!(message_of(error), (0, "a handler's own mistake".to_owned()));
    }
}

#[test]
fn a_panic_in_every_kind_of_callback_is_reported() {
    type Make = fn() -> Hooks;
    let makes: [(&str, Make); 7] = [
        ("start", || Hooks::plain().start(|_| panic!("in start"))),
        ("accept", || Hooks::plain().accept(|_, _| panic!("in accept"))),
        ("data", || Hooks::plain().data(|_, _| panic!("in data"))),
        ("eof", || Hooks::plain().eof(|_| panic!("in eof"))),
        ("closed", || Hooks::plain().closed(|_, _| panic!("in closed"))),
        ("timer", || {
            Hooks::plain()
                .data(|conn, _| conn.set_timer(Some(Duration::from_millis(1))))
                .timer(|_| panic!("in timer"))
        }),
        ("alarm", || {
            Hooks::plain()
                .data(|conn, _| {
                    let at = conn.now();
                    conn.cx().set_alarm(at);
                })
                .alarm(|_| panic!("in alarm"))
        }),
    ];
    for (place, make) in makes {
        let Some(runtime) = start(Runtime::builder().listen(any_port()), move |_| make()) else { return };
        if let Ok(mut stream) = TcpStream::connect(addr(&runtime)) {
            // It may be gone already.
            let _ = stream.write_all(b"x");
            if matches!(place, "eof" | "closed") {
                drop(stream);
            } else {
                let _ = stream.set_read_timeout(Some(PATIENCE));
                let _ = stream.read_to_end(&mut Vec::new());
            }
        }
        eventually("the end of the worker", || !runtime.is_running());
        let error = runtime.join().expect_err("it panicked");
        assert_eq!(message_of(error), (0, format!("in {place}")));
    }
}

/// Who was accepted but not yet handed over when a handler panicked belongs to nobody but the driver.
#[test]
fn a_panic_closes_those_who_were_accepted_and_waited_for_their_turn() {
    for descriptors in BOTH {
        let config = WorkerConfig { descriptors, ..WorkerConfig::default() };
        // Nobody is handed over before all of them have been accepted: the first takes the worker's time.
        let (go, gone) = channel::<()>();
        let gone = Mutex::new(Some(gone));
        let make = move |_| {
            let gone = gone.lock().expect("one worker").take().expect("one worker");
            Hooks::plain().accept(|_, _| panic!("in accept")).start(move |_| while gone.recv().is_ok() {})
        };
        let builder = Runtime::builder().worker(config).listen(any_port());
        // The worker is up before its handler's start.
        let Some(runtime) = start(builder, make) else { return };
        let streams: Vec<_> = (0..20).map(|_| connect(addr(&runtime))).collect();
        drop(go);
        eventually("the end of the worker", || !runtime.is_running());
        assert_eq!(message_of(runtime.join().expect_err("it panicked")), (0, "in accept".to_owned()));
        // FIN or a reset: never silence.
        for stream in &streams {
            let _: (End, usize) = end_of(stream);
        }
    }
}

/// One worker less is not what was asked for: the others stop too, whichever of them it was, and
/// whoever waits for the runtime hears of it.
#[test]
fn a_panic_of_one_worker_stops_the_others() {
    for panicking in [0, 1] {
        let make = move |_| Hooks::echo();
        let Some(runtime) = start(Runtime::builder().workers(2).listen(any_port()), make) else { return };
        let remote = runtime.remote();
        let stream = connect(addr(&runtime));
        exchange(&stream, b"all is well");
        tell(&remote, panicking, |_| panic!("on purpose"));
        eventually("the end of the worker", || !runtime.is_running());
        let (result, results) = channel();
        thread::spawn(move || result.send(runtime.join()).expect("the test listens"));
        let joined = results.recv_timeout(PATIENCE).unwrap_or_else(|_| {
            panic!("join() hangs when worker {panicking} has panicked and nobody asked for a stop")
        });
        assert_eq!(message_of(joined.expect_err("it panicked")), (panicking, "on purpose".to_owned()));
        end_of(&stream);
    }
}

/// A worker that panicked takes no messages: whoever sends to it hears that it has stopped.
#[test]
fn messages_to_a_worker_that_panicked_are_refused() {
    let Some(runtime) = start(Runtime::builder().workers(2), |_| Hooks::plain()) else { return };
    let remote = runtime.remote();
    tell(&remote, 1, |_| panic!("on purpose"));
    eventually("a refusal", || matches!(remote.post(1, task(|_| {})), Err(RemoteError::Stopped(_))));
    runtime.shutdown(PATIENCE).expect_err("it panicked");
}

#[test]
fn a_panic_while_other_threads_send_does_no_harm() {
    for round in 0..10 {
        let Some(runtime) = start(Runtime::builder().workers(2).listen(any_port()), |_| Hooks::echo()) else {
            return;
        };
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            for worker in 0..2 {
                let (remote, over) = (runtime.remote(), &over);
                scope.spawn(move || {
                    while !over.load(Ordering::Relaxed) {
                        // Refused when it is full or gone, and that is fine.
                        let _ = remote.post(
                            worker,
                            task(move |cx| {
                                let other = 1 - cx.worker();
                                let _ = cx.post(other, task(|_| {}));
                            }),
                        );
                    }
                });
            }
            let stream = connect(addr(&runtime));
            exchange(&stream, b"all is well");
            while runtime.remote().post(round % 2, task(|_| panic!("on purpose"))).is_err() {}
            eventually("the end of the worker", || !runtime.is_running());
            over.store(true, Ordering::Relaxed);
        });
        let error = runtime.shutdown(PATIENCE).expect_err("it panicked");
        assert_eq!(message_of(error), (round % 2, "on purpose".to_owned()));
    }
}

#[test]
fn dropping_a_runtime_stops_its_workers_without_waiting() {
    let (gone, told) = sync_channel::<()>(0);
    let make = move |_| {
        let gone = gone.clone();
        // Lives as long as the handler.
        Hooks::echo().stop(move |_| {
            let _: &std::sync::mpsc::SyncSender<()> = &gone;
        })
    };
    let Some(runtime) = start(Runtime::builder().workers(2).listen(any_port()), make) else { return };
    let addr = addr(&runtime);
    let stream = connect(addr);
    exchange(&stream, b"all is well");
    drop(runtime);
    end_of(&stream);
    // Every sender is gone when both handlers (and what made them) are.
    match told.recv_timeout(PATIENCE) {
        Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {}
        other => panic!("the handlers live on: {other:?}"),
    }
    eventually("the listener closed", || TcpStream::connect(addr).is_err());
}

#[test]
fn a_runtime_can_be_started_and_stopped_many_times() {
    let before = std::fs::read_dir("/proc/self/fd").expect("procfs").count();
    for round in 0..50 {
        let Some(runtime) = start(Runtime::builder().workers(2).listen(any_port()), |_| Hooks::echo()) else {
            return;
        };
        let stream = connect(addr(&runtime));
        exchange(&stream, b"once more");
        if round % 2 == 0 {
            drop(stream);
            stop(runtime);
        } else {
            let report = runtime.shutdown(Duration::ZERO).expect("a clean shutdown");
            nothing_left(&report);
        }
    }
    // Rings and listeners are closed when their threads end. (Other tests run beside this one.)
    let after = std::fs::read_dir("/proc/self/fd").expect("procfs").count();
    assert!(after < before + 250, "{before} descriptors before, {after} after");
}

/// A worker that posted to another one and panicked before it could wake it: the other must still
/// hear of the end.
#[test]
fn a_panic_right_after_a_post_leaves_nobody_asleep() {
    let Some(runtime) = start(Runtime::builder().workers(2), |_| Hooks::plain()) else { return };
    tell(&runtime.remote(), 0, |cx| {
        cx.post(1, task(|_| {})).expect("room");
        panic!("on purpose");
    });
    let (result, results) = channel();
    thread::spawn(move || result.send(runtime.join()).expect("the test listens"));
    let joined = results.recv_timeout(PATIENCE).expect("join() returns");
    assert_eq!(message_of(joined.expect_err("it panicked")), (0, "on purpose".to_owned()));
}

/// What a handler hides from its worker lives as long as the thread. It is reported as outstanding, and can be
/// read when the worker, its driver and the runtime's report are made long since.
#[test]
fn a_lease_that_outlives_its_worker_is_reported_and_still_readable() {
    struct Kept(Vec<corelane::Buf>, Option<std::sync::mpsc::Sender<Vec<u8>>>);
    impl Drop for Kept {
        fn drop(&mut self) {
            // As late as it gets: while the thread ends.
            let bytes = self.0.iter().flat_map(|buf| buf.to_vec()).collect();
            if let Some(told) = &self.1 {
                told.send(bytes).expect("the test listens");
            }
        }
    }
    thread_local! {
        static KEPT: std::cell::RefCell<Kept> = const { std::cell::RefCell::new(Kept(Vec::new(), None)) };
    }
    for descriptors in BOTH {
        let config = WorkerConfig { descriptors, ..WorkerConfig::default() };
        let (told, bytes) = channel();
        let make = move |_| {
            let told = told.clone();
            Hooks::plain().data(move |conn, data| {
                KEPT.with_borrow_mut(|kept| {
                    kept.0.push(data.clone());
                    kept.1 = Some(told.clone());
                });
                conn.send(data).expect("room");
            })
        };
        let builder = Runtime::builder().worker(config).listen(any_port());
        let Some(runtime) = start(builder, make) else { return };
        let stream = connect(addr(&runtime));
        exchange(&stream, b"first");
        exchange(&stream, b"second");
        drop(stream);
        let report = runtime.shutdown(PATIENCE).expect("a clean shutdown");
        assert_eq!((report.ops_in_kernel, report.buffers_outstanding), (0, 2), "{report}");
        assert_eq!(bytes.recv_timeout(PATIENCE).expect("the thread's end"), b"firstsecond");
    }
}
