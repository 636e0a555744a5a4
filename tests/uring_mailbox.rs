//! Reaching workers from other threads, and one worker from another.
#![cfg(target_os = "linux")]

mod support;

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::thread;

use corelane::{Accepted, Buf, CloseReason, Conn, Cx, Detached, Handler, RemoteError, Runtime, WorkerConfig};
use support::*;

#[test]
fn other_threads_send_close_and_abort() {
    let (seen, told) = channel();
    let Some(runtime) =
        start(Runtime::builder().workers(2).listen(any_port()), move |_| Hooks::telling(&seen))
    else {
        return;
    };
    let remote = runtime.remote();
    assert_eq!(remote.workers(), 2);
    for _ in 0..20 {
        let stream = connect(addr(&runtime));
        let id = opened(&told);
        let shared: Arc<[u8]> = pattern(1, 100_000).into();
        thread::scope(|scope| {
            scope.spawn(|| {
                remote.send(id, "static, ").expect("room");
                remote.send(id, String::from("owned, ")).expect("room");
                remote.send(id, shared.clone()).expect("room");
                remote.close(id).expect("room");
                // Behind the close: dropped silently.
                remote.send(id, "too late").expect("room");
            });
        });
        expect(&stream, b"static, owned, ");
        same_bytes(&read_to_eof(&stream), &shared, "the shared bytes");
        drop(stream);
        assert_eq!(closed(&told), (id, CloseReason::Local));
        let stream = connect(addr(&runtime));
        let id = opened(&told);
        remote.abort(id).expect("room");
        assert_eq!(end_of(&stream), (End::Reset, 0));
        assert_eq!(next(&told), Seen::Closed(id, CloseReason::Local));
    }
    empties(&runtime);
    stop(runtime);
}

#[test]
fn what_is_sent_to_a_connection_that_is_over_is_dropped() {
    let (seen, told) = channel();
    let Some(runtime) = start(Runtime::builder().listen(any_port()), move |_| Hooks::telling(&seen)) else {
        return;
    };
    let remote = runtime.remote();
    drop(connect(addr(&runtime)));
    let id = opened(&told);
    assert_eq!(closed(&told), (id, CloseReason::Eof));
    let shared: Arc<[u8]> = pattern(1, 1000).into();
    for _ in 0..100 {
        remote.send(id, shared.clone()).expect("room");
        remote.close(id).expect("room");
        remote.abort(id).expect("room");
    }
    counters(&runtime, "all of it read", |total| total.mailbox == 300);
    eventually("the bytes dropped", || Arc::strong_count(&shared) == 1);
    let total = runtime.metrics().total();
    assert_eq!((total.sends, total.closed_total(), total.send_refusals), (0, 1, 0));
    stop(runtime);
}

#[test]
fn a_full_mailbox_gives_the_value_back_and_works_again_when_it_is_read() {
    let config = WorkerConfig { mailbox: 8, ..WorkerConfig::default() };
    let (ran, told) = channel();
    let builder = Runtime::builder().worker(config).listen(any_port());
    let Some(runtime) = start(builder, |_| Hooks::plain()) else { return };
    let remote = runtime.remote();
    // The worker is held up in a callback.
    let (here, there) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let (in_callback, go_on) = (here.clone(), there.clone());
    tell(&remote, 0, move |_| {
        in_callback.wait();
        go_on.wait();
    });
    here.wait();
    let mut posted = 0;
    let refused = loop {
        let ran = ran.clone();
        match remote.post(0, task(move |_| ran.send(posted).expect("the test listens"))) {
            Ok(()) => posted += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(posted, 8);
    assert!(matches!(refused, RemoteError::Full(_)));
    assert!(refused.to_string().contains("mailbox is full"), "{refused}");
    assert_eq!(remote.broadcast("to nobody"), Err(RemoteError::Full(())));
    there.wait();
    for number in 0..posted {
        assert_eq!(told.recv_timeout(PATIENCE), Ok(number), "in order");
    }
    // What came back is whole: it can be posted now.
    let RemoteError::Full(back) = refused else { panic!("{refused:?}") };
    remote.post(0, back).expect("room again");
    assert_eq!(told.recv_timeout(PATIENCE), Ok(posted));
    stop(runtime);
    for worker in [0, 99] {
        let after = remote.post(worker, task(|_| {})).expect_err("nobody there");
        assert!(matches!(after, RemoteError::Stopped(_)), "{after:?}");
    }
}

#[test]
fn a_broadcast_reaches_every_open_connection_of_every_worker_once() {
    let Some(runtime) = start(Runtime::builder().workers(2).listen(any_port()), |_| Hooks::echo()) else {
        return;
    };
    let streams: Vec<_> = (0..1500).map(|_| connect(addr(&runtime))).collect();
    counters(&runtime, "all accepted", |total| total.connections == 1500);
    let bytes: Arc<[u8]> = pattern(2, 5000).into();
    runtime.remote().broadcast(bytes.clone()).expect("room");
    runtime.remote().broadcast("end".to_owned().into_bytes()).expect("room");
    for stream in &streams {
        expect(stream, &bytes);
        expect(stream, b"end");
    }
    eventually("the bytes dropped", || Arc::strong_count(&bytes) == 1);
    for stream in streams.iter().step_by(100) {
        exchange(stream, b"nothing else came");
    }
    drop(streams);
    empties(&runtime);
    stop(runtime);
}

/// A handler that passes every message on to the next worker, as often as the message says.
struct Relay {
    /// Who sent what, in the order of arrival: shared with the test.
    log: std::sync::mpsc::Sender<(usize, u64, u64)>,
}

struct Parcel {
    sender: u64,
    number: u64,
    hops: u32,
}

impl Handler for Relay {
    type Conn = ();
    type Message = Parcel;

    fn on_accept(&mut self, _: &mut Cx<'_, Self>, _: Accepted) -> Option<()> {
        None
    }

    fn on_data(&mut self, _: &mut Conn<'_, Self>, _: Buf) {}

    fn on_message(&mut self, cx: &mut Cx<'_, Self>, mut parcel: Parcel) {
        if parcel.hops == 0 {
            let told = (cx.worker(), parcel.sender, parcel.number);
            return self.log.send(told).expect("the test listens");
        }
        parcel.hops -= 1;
        let next = (cx.worker() + 1) % cx.workers();
        assert!(cx.post(next, parcel).is_ok(), "the mailbox is large enough");
    }
}

/// From worker to worker by ring messages: nothing is lost, the order of each sender is kept, and an
/// idle worker is woken.
#[test]
fn workers_pass_messages_on_without_losing_any_or_their_order() {
    const MESSAGES: u64 = 20_000;
    for workers in [1, 2, 3] {
        let (log, told) = channel();
        let config = WorkerConfig { mailbox: 1 << 18, ..WorkerConfig::default() };
        let builder = Runtime::builder().workers(workers).worker(config);
        let Some(runtime) = start(builder, move |_| Relay { log: log.clone() }) else { return };
        let remote = runtime.remote();
        thread::scope(|scope| {
            for sender in 0..3 {
                let remote = &remote;
                scope.spawn(move || {
                    for number in 0..MESSAGES {
                        let parcel = Parcel { sender, number, hops: 5 };
                        assert!(remote.post(0, parcel).is_ok(), "the mailbox is large enough");
                    }
                });
            }
        });
        let mut expected = [0; 3];
        for _ in 0..3 * MESSAGES {
            let (worker, sender, number) = told.recv_timeout(PATIENCE).expect("a message");
            assert_eq!(worker, 5 % workers);
            assert_eq!(number, expected[sender as usize], "sender {sender}");
            expected[sender as usize] += 1;
        }
        // One at a time, so that each finds the next worker asleep.
        for number in 0..500 {
            let parcel = Parcel { sender: 9, number, hops: 7 };
            assert!(remote.post(0, parcel).is_ok());
            assert_eq!(told.recv_timeout(PATIENCE), Ok((7 % workers, 9, number)));
        }
        let total = runtime.metrics().total();
        assert_eq!(total.mailbox, 3 * MESSAGES * 6 + 500 * 8);
        assert!(total.wakes > 0 && total.wakes < total.mailbox, "{} wakes", total.wakes);
        sleeps(&runtime, "after the last message");
        stop(runtime);
    }
}

#[test]
fn many_messages_to_a_busy_worker_cost_few_wake_ups() {
    let ran = Arc::new(AtomicUsize::new(0));
    let config = WorkerConfig { mailbox: 1 << 17, ..WorkerConfig::default() };
    let Some(runtime) = start(Runtime::builder().worker(config), |_| Hooks::plain()) else { return };
    let remote = runtime.remote();
    let (here, there) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let (in_callback, go_on) = (here.clone(), there.clone());
    tell(&remote, 0, move |_| {
        in_callback.wait();
        go_on.wait();
    });
    here.wait();
    let before = runtime.metrics().total().wakes;
    for _ in 0..100_000 {
        let ran = ran.clone();
        tell(&remote, 0, move |_| {
            ran.fetch_add(1, Ordering::Relaxed);
        });
    }
    there.wait();
    eventually("all messages", || ran.load(Ordering::Relaxed) == 100_000);
    let wakes = runtime.metrics().total().wakes - before;
    assert!(wakes <= 2, "{wakes} wake-ups while the worker was busy");
    stop(runtime);
}

/// Sends from outside interleave with the connection's own echoes, each whole and each in its order.
#[test]
fn sends_from_outside_and_from_inside_keep_their_order() {
    let (seen, told) = channel();
    let make = move |_| Hooks::telling(&seen).data(|conn, data| drop(conn.send(data)));
    let config = WorkerConfig { mailbox: 1 << 17, ..WorkerConfig::default() };
    let Some(runtime) = start(Runtime::builder().worker(config).listen(any_port()), make) else { return };
    let stream = connect(addr(&runtime));
    let id = opened(&told);
    let remote = runtime.remote();
    const LINES: u32 = 20_000;
    let line = |from: char, number: u32| format!("{from}{number:06}\n");
    let got = thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0..LINES {
                remote.send(id, line('o', number)).expect("room");
            }
        });
        scope.spawn(|| {
            let mut stream = &stream;
            for number in 0..LINES {
                stream.write_all(line('i', number).as_bytes()).expect("write");
            }
        });
        let mut got = vec![0; 2 * 8 * LINES as usize];
        std::io::Read::read_exact(&mut { &stream }, &mut got).expect("everything");
        String::from_utf8(got).expect("text")
    });
    // Echoed pieces begin and end anywhere, so lines from outside may stand inside a line; taken out,
    // they leave the others whole. They are found by their first letter: no line holds the other's.
    let (mut outside, mut inside, mut rest) = (Vec::new(), String::new(), got.as_str());
    while let Some(at) = rest.find('o') {
        inside.push_str(&rest[..at]);
        outside.push(&rest[at..at + 8]);
        rest = &rest[at + 8..];
    }
    inside.push_str(rest);
    let wanted: String = (0..LINES).map(|number| line('i', number)).collect();
    same_bytes(inside.as_bytes(), wanted.as_bytes(), "what was echoed");
    let wanted: String = (0..LINES).map(|number| line('o', number)).collect();
    same_bytes(outside.concat().as_bytes(), wanted.as_bytes(), "what came from outside");
    drop(stream);
    empties(&runtime);
    stop(runtime);
}

#[test]
fn a_send_from_outside_beyond_the_queues_limit_is_counted() {
    let (seen, told) = channel();
    let config = WorkerConfig {
        high_water: 64 << 10,
        send_limit: 64 << 10,
        mailbox: 1 << 10,
        ..WorkerConfig::default()
    };
    let mut listener = corelane::ListenerConfig::new(any_port());
    listener.options.send_buffer = Some(4096);
    let builder = Runtime::builder().worker(config).listen(listener);
    let Some(runtime) = start(builder, move |_| Hooks::telling(&seen)) else { return };
    let stream = connect_narrow(addr(&runtime), 4096);
    let id = opened(&told);
    for _ in 0..200 {
        runtime.remote().send(id, vec![1; 10_000]).expect("room in the mailbox");
    }
    let total = counters(&runtime, "all of it read", |total| total.mailbox == 200);
    assert!(total.send_refusals > 0, "{total:#?}");
    runtime.remote().close(id).expect("room");
    let got = read_to_eof(&stream).len() as u64;
    assert_eq!(got, (200 - total.send_refusals) * 10_000, "what was not refused arrives");
    drop(stream);
    empties(&runtime);
    stop(runtime);
}

/// A remote's types give bytes back where they are refused.
#[test]
fn bytes_refused_by_a_stopped_worker_come_back() {
    let (seen, told) = channel();
    let Some(runtime) = start(Runtime::builder().listen(any_port()), move |_| Hooks::telling(&seen)) else {
        return;
    };
    let remote = runtime.remote();
    let stream = connect(addr(&runtime));
    let id = opened(&told);
    drop(stream);
    stop(runtime);
    match remote.send(id, b"come back".to_vec()) {
        Err(RemoteError::Stopped(Detached::Owned(bytes))) => assert_eq!(bytes, b"come back"),
        other => panic!("{other:?}"),
    }
    assert_eq!(remote.close(id), Err(RemoteError::Stopped(())));
    assert_eq!(remote.abort(id), Err(RemoteError::Stopped(())));
    assert_eq!(remote.broadcast("to nobody"), Err(RemoteError::Stopped(())));
}
