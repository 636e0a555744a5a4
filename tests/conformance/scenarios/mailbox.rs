//! What other threads send, and what workers send each other.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use corelane::{CloseReason, RemoteError, WorkerConfig};

use crate::bed::{Bed, Peer, Plan, config};
use crate::bytes::{pattern, prefix};
use crate::script::{Log, Script, Step, Task, millis};

pub fn sends_from_outside_keep_their_order(bed: &Bed) {
    let server = bed.echo();
    let (peer, serial) = server.join();
    let id = server.log().id(serial);
    for n in 0..1000u32 {
        server.remote().send(id, n.to_be_bytes().to_vec()).expect("4,096 fit");
    }
    let wanted: Vec<u8> = (0..1000u32).flat_map(u32::to_be_bytes).collect();
    peer.expect(&wanted);
}

pub fn sends_from_outside_and_from_inside_keep_their_order(bed: &Bed) {
    let server = bed.echo();
    let (peer, serial) = server.join();
    let id = server.log().id(serial);
    let mut wanted = Vec::new();
    for n in 0..300u32 {
        let bytes = pattern(n.into(), 30);
        wanted.extend_from_slice(&bytes);
        if n % 2 == 0 {
            server.remote().send(id, bytes).expect("there is room");
        } else {
            server.tell(move |cx| cx.conn(id).expect("it is open").send(bytes).expect("room"));
        }
    }
    peer.expect(&wanted);
}

/// The slot has a new connection when the old one's name is used.
pub fn name_of_a_closed_connection_reaches_nobody(bed: &Bed) {
    let server = bed.serve(Plan::config(WorkerConfig { max_connections: 1, ..config() }), Script::echo);
    for _ in 0..bed.rounds(20, 8) {
        let (old, serial) = server.join();
        let id = server.log().id(serial);
        old.exchange(b"hello");
        old.close();
        server.closed(serial);
        let (new, _) = server.join();
        server.remote().send(id, "not for you").expect("there is room");
        server.remote().close(id).expect("there is room");
        server.remote().abort(id).expect("there is room");
        assert!(server.ask(move |cx| cx.conn(id).is_none()), "the name of a closed connection");
        new.exchange(b"undisturbed");
        new.close();
        server.empties();
    }
}

/// On a real kernel a second thread sends without end while the connection closes.
pub fn sends_from_outside_during_a_close_are_taken_or_dropped(bed: &Bed) {
    let server = bed.echo();
    let line = pattern(1, 50);
    for n in 0..bed.rounds(20, 8) {
        let (peer, serial) = server.join();
        let id = server.log().id(serial);
        let remote = server.remote();
        let enough = Arc::new(AtomicBool::new(false));
        let sending = (!bed.is_sim()).then(|| {
            let (enough, line) = (enough.clone(), line.clone());
            std::thread::spawn(move || {
                while !enough.load(Ordering::Relaxed) {
                    match remote.send(id, line.clone()) {
                        Ok(()) => {}
                        Err(RemoteError::Full(_)) => std::thread::yield_now(),
                        Err(RemoteError::Stopped(_)) => panic!("the worker runs"),
                    }
                }
            })
        });
        let remote = server.remote();
        for _ in 0..10 {
            remote.send(id, line.clone()).or_else(full).expect("the worker runs");
        }
        if n % 2 == 0 {
            bed.until("some of it", || peer.waiting() > 0);
        }
        while let Err(error) = remote.close(id) {
            assert_eq!(error, RemoteError::Full(()));
            std::thread::yield_now();
        }
        remote.send(id, line.clone()).or_else(full).expect("the worker runs");
        peer.end();
        let got = peer.take();
        assert_eq!(got.len() % 50, 0, "part of a payload");
        prefix(&got, &line.repeat(got.len() / 50), "what was sent before the close");
        peer.close();
        assert_eq!(server.closed(serial), CloseReason::Local);
        enough.store(true, Ordering::Relaxed);
        if let Some(sending) = sending {
            sending.join().expect("the sending thread");
        }
    }
    server.empties();
}

/// The other thread may have filled the mailbox.
fn full<T>(error: RemoteError<T>) -> Result<(), RemoteError<T>> {
    match error {
        RemoteError::Full(_) => Ok(()),
        stopped @ RemoteError::Stopped(_) => Err(stopped),
    }
}

pub fn broadcast_reaches_everybody_once(bed: &Bed) {
    let server = bed.serve(Plan { workers: 2, ..Plan::default() }, Script::echo);
    let peers: Vec<Peer> = (0..60).map(|_| bed.connect(server.addr())).collect();
    for peer in &peers {
        peer.exchange(b"here");
    }
    for n in 0..5u64 {
        server.remote().broadcast(pattern(n, 5000)).expect("there is room");
    }
    for peer in &peers {
        for n in 0..5 {
            peer.expect(&pattern(n, 5000));
        }
        peer.exchange(b"and nothing else");
    }
}

/// What one worker posts to another arrives in order, and on that worker's thread (which is checked).
pub fn workers_post_to_each_other_in_order(bed: &Bed) {
    let log = Log::default();
    let seen = log.clone();
    let plan = Plan { workers: 2, listen: Vec::new(), ..Plan::default() };
    let server = bed.serve_logged(plan, log, move |_| Script::new(&seen));
    let log = server.log().clone();
    for round in 0..10 {
        let log = log.clone();
        server.tell(move |cx| {
            assert_eq!((cx.worker(), cx.workers()), (0, 2));
            for n in 0..100 {
                let log = log.clone();
                let task = Task::new(move |cx: &mut corelane::Cx<'_, Script>| {
                    assert_eq!(cx.worker(), 1);
                    log.note(cx.now(), round * 100 + n);
                });
                assert!(cx.post(1, task).is_ok(), "4,096 fit");
            }
            let nobody = cx.post(2, Task::new(|_| {}));
            assert!(matches!(nobody, Err(RemoteError::Stopped(_))), "there is no worker 2");
        });
    }
    bed.until("all messages", || log.noted().len() == 1000);
    assert_eq!(log.noted(), (0..1000).collect::<Vec<u64>>());
}

pub fn full_mailbox_gives_the_message_back(bed: &Bed) {
    let server = bed.serve(Plan::config(WorkerConfig { mailbox: 8, ..config() }), Script::echo);
    let (peer, serial) = server.join();
    let id = server.log().id(serial);
    let hold = server.hold();
    let mut taken = 0u8;
    let back = loop {
        match server.remote().send(id, vec![taken]) {
            Ok(()) => taken += 1,
            Err(error) => break error,
        }
        assert!(taken < 100, "a mailbox of 8 that is never full");
    };
    assert!(matches!(back, RemoteError::Full(ref bytes) if bytes.as_slice() == [taken]), "{back:?}");
    assert!(matches!(server.remote().post(0, Task::new(|_| {})), Err(RemoteError::Full(_))));
    drop(hold);
    peer.expect(&(0..taken).collect::<Vec<u8>>());
    peer.exchange(b"and then it is empty");
}

/// Somebody who knows the worker is told when it is gone.
pub fn stopped_worker_says_so(bed: &Bed) {
    let server = bed.echo();
    let (peer, serial) = server.join();
    let (id, remote) = (server.log().id(serial), server.remote());
    peer.close();
    server.stop(millis(5000));
    assert!(matches!(remote.send(id, "late"), Err(RemoteError::Stopped(_))));
    assert_eq!(remote.close(id), Err(RemoteError::Stopped(())));
    assert_eq!(remote.broadcast("late"), Err(RemoteError::Stopped(())));
    assert!(matches!(remote.post(0, Task::new(|_| {})), Err(RemoteError::Stopped(_))));
    remote.stop(millis(1));
}

/// A message that was posted when the stop came is still handled before `on_stop`.
pub fn what_was_posted_before_a_stop_is_handled_first(bed: &Bed) {
    let log = Log::default();
    let seen = log.clone();
    let server = bed.serve_logged(Plan::default(), log, move |_| {
        let stopped = seen.clone();
        Script::new(&seen).stop(move |cx| stopped.note(cx.now(), 99))
    });
    let (peer, serial) = server.join();
    let id = server.log().id(serial);
    let hold = server.hold();
    for n in 0..20 {
        let log = server.log().clone();
        server.tell(move |cx| log.note(cx.now(), n));
    }
    server.remote().send(id, "the last thing").expect("there is room");
    server.end(crate::bed::Ending::Stop(millis(10_000)));
    drop(hold);
    peer.expect(b"the last thing");
    peer.expect_eof();
    peer.close();
    let report = server.ended().expect("a clean end");
    assert_eq!((report.finished, report.messages_undelivered), (1, 0), "{report:?}");
    assert_eq!(server.log().noted(), (0..20).chain([99]).collect::<Vec<u64>>());
    assert!(!server.log().has(serial, Step::Timer));
}

/// A task that is posted from every thread at once runs once each.
pub fn messages_of_many_threads_are_all_handled(bed: &Bed) {
    let server = bed.serve(Plan::listen([]), |script| script);
    let total = Arc::new(Mutex::new(0));
    let senders: Vec<_> = (0..4)
        .map(|_| {
            let (remote, total) = (server.remote(), total.clone());
            std::thread::spawn(move || {
                for _ in 0..500 {
                    let total = total.clone();
                    remote.post(0, Task::new(move |_| *total.lock().expect("no panic") += 1)).expect("room");
                }
            })
        })
        .collect();
    for sender in senders {
        sender.join().expect("a sender");
    }
    bed.until("all of them", || *total.lock().expect("no panic") == 2000);
}
