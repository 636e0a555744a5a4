//! Outgoing connections: made, refused, not answered, from a chosen address, many at once.
#![cfg(target_os = "linux")]

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use corelane::{
    Builder, CloseReason, ConnectConfig, ConnectErrorKind, Descriptors, Runtime, Time, WorkerConfig,
};
use support::*;

const BOTH: [Descriptors; 2] = [Descriptors::Direct, Descriptors::Fd];

fn builder(descriptors: Descriptors) -> Builder {
    let config = WorkerConfig { descriptors, ..WorkerConfig::default() };
    Runtime::builder().worker(config)
}

/// A runtime that greets whom it connects to and tells what happens to its connections.
fn telling(descriptors: Descriptors) -> Option<(Runtime<Task<()>>, Receiver<Seen>)> {
    let (seen, told) = channel();
    let make = move |_| {
        Hooks::telling(&seen).connected({
            let seen = seen.clone();
            move |conn| {
                conn.send("hello").expect("open for sending");
                seen.send(Seen::Connected(conn.id())).expect("the test listens");
            }
        })
    };
    Some((start(builder(descriptors), make)?, told))
}

fn begin(runtime: &Runtime<Task<()>>, config: ConnectConfig) -> corelane::ConnId {
    ask(&runtime.remote(), 0, move |cx| cx.connect(config, ()).expect("begun"))
}

/// The next connection that a foreign listener gets.
fn accept(listener: &TcpListener) -> (TcpStream, SocketAddr) {
    let (stream, peer) = listener.accept().expect("accept");
    stream.set_read_timeout(Some(PATIENCE)).expect("a read timeout");
    (stream, peer)
}

#[test]
fn a_connection_to_a_foreign_listener_works_both_ways() {
    for descriptors in BOTH {
        for target in ["127.0.0.1:0", "[::1]:0"] {
            let Some((runtime, told)) = telling(descriptors) else { return };
            let listener = TcpListener::bind(target).expect("a listener");
            let target = listener.local_addr().expect("its address");
            let id = begin(&runtime, ConnectConfig::new(target));
            let (mut stream, _) = accept(&listener);
            expect(&mut stream, b"hello");
            assert_eq!(next(&told), Seen::Connected(id));
            stream.write_all(b"and hello to you").expect("write");
            assert_eq!(next(&told), Seen::Data(id, b"and hello to you".to_vec()));
            drop(stream);
            assert_eq!(next(&told), Seen::Eof(id));
            assert_eq!(next(&told), Seen::Closed(id, CloseReason::Eof));
            let total = empties(&runtime);
            assert_eq!((total.connected, total.accepted), (1, 0));
            stop(runtime);
        }
    }
}

#[test]
fn a_refused_connection_is_told_with_the_systems_code_every_time() {
    for descriptors in BOTH {
        let Some((runtime, told)) = telling(descriptors) else { return };
        let listener = TcpListener::bind(any_port()).expect("a listener");
        let target = listener.local_addr().expect("its address");
        drop(listener);
        for _ in 0..50 {
            let id = begin(&runtime, ConnectConfig::new(target));
            let refused = CloseReason::ConnectFailed(libc::ECONNREFUSED);
            assert_eq!(next(&told), Seen::Closed(id, refused));
            assert!(refused.to_string().contains("refused"), "{refused}");
        }
        let total = empties(&runtime);
        assert_eq!((total.connected, total.closed_total()), (0, 50));
        stop(runtime);
    }
}

#[test]
fn a_target_that_does_not_answer_times_out_and_leaves_nothing() {
    for descriptors in BOTH {
        let Some((runtime, told)) = telling(descriptors) else { return };
        let (listener, target, filling) = full_listener();
        let timeout = Duration::from_millis(300);
        let (id, began) = ask(&runtime.remote(), 0, move |cx| {
            let config = ConnectConfig { timeout, ..ConnectConfig::new(target) };
            (cx.connect(config, ()).expect("begun"), cx.now())
        });
        assert_eq!(next(&told), Seen::Closed(id, CloseReason::ConnectTimeout));
        let took = Time::now().since(began);
        assert!(took >= timeout && took < timeout + Duration::from_secs(5), "{took:?}");
        assert_eq!(empties(&runtime).connected, 0);
        drop((listener, filling));
        stop(runtime);
    }
}

#[test]
fn a_connection_being_made_can_be_aborted_and_closed() {
    for descriptors in BOTH {
        let Some((runtime, told)) = telling(descriptors) else { return };
        let (_listener, target, _filling) = full_listener();
        let remote = runtime.remote();
        let id = begin(&runtime, ConnectConfig::new(target));
        remote.abort(id).expect("room");
        assert_eq!(next(&told), Seen::Closed(id, CloseReason::Local));
        let id = begin(&runtime, ConnectConfig::new(target));
        remote.close(id).expect("room");
        assert_eq!(next(&told), Seen::Closed(id, CloseReason::Local));
        // In the very callback that began it, before the driver heard of it.
        let id = ask(&remote, 0, move |cx| {
            let id = cx.connect(ConnectConfig::new(target), ()).expect("begun");
            cx.conn(id).expect("being made").abort();
            id
        });
        assert_eq!(next(&told), Seen::Closed(id, CloseReason::Local));
        empties(&runtime);
        // And at the runtime's end.
        let id = begin(&runtime, ConnectConfig::new(target));
        let report = stop(runtime);
        assert_eq!(next(&told), Seen::Closed(id, CloseReason::Shutdown));
        assert_eq!(report.finished + report.aborted, 1, "{report}");
    }
}

#[test]
fn a_connection_comes_from_the_source_address_asked_for() {
    for descriptors in BOTH {
        let Some((runtime, told)) = telling(descriptors) else { return };
        let listener = TcpListener::bind(any_port()).expect("a listener");
        let target = listener.local_addr().expect("its address");
        let source: SocketAddr = "127.0.0.5:0".parse().expect("an address");
        let config = ConnectConfig { source: Some(source), ..ConnectConfig::new(target) };
        let id = begin(&runtime, config.clone());
        let (stream, peer) = accept(&listener);
        assert_eq!(peer.ip(), source.ip());
        assert_eq!(next(&told), Seen::Connected(id));
        drop(stream);
        closed(&told);
        // A port that is asked for is the port that is used.
        let probe = TcpListener::bind("127.0.0.5:0").expect("a free port");
        let source = probe.local_addr().expect("its address");
        drop(probe);
        begin(&runtime, ConnectConfig { source: Some(source), ..config.clone() });
        let (stream, peer) = accept(&listener);
        assert_eq!(peer, source);
        drop(stream);
        closed(&told);
        // An address that is not of this machine.
        let source = Some("192.0.2.1:0".parse().expect("an address"));
        let id = begin(&runtime, ConnectConfig { source, ..config });
        let failed = CloseReason::ConnectFailed(libc::EADDRNOTAVAIL);
        assert_eq!(next(&told), Seen::Closed(id, failed));
        empties(&runtime);
        stop(runtime);
    }
}

#[test]
fn what_cannot_be_begun_is_refused_with_the_state_and_a_reason() {
    let config = WorkerConfig { max_connections: 2, ..WorkerConfig::default() };
    let make = |_| Hooks::new(|| 0u32);
    let Some(runtime) = start(Runtime::builder().worker(config), make) else { return };
    let (_listener, target, _filling) = full_listener();
    let kinds = ask(&runtime.remote(), 0, move |cx| {
        let good = ConnectConfig::new(target);
        let mut refused = |config: ConnectConfig, state| {
            let error = cx.connect(config, state).expect_err("refused");
            assert_eq!(error.state, state);
            error.kind
        };
        let source = Some("[::1]:0".parse().expect("an address"));
        let mut kinds = vec![
            refused(ConnectConfig { source, ..good.clone() }, 1),
            refused(ConnectConfig { timeout: Duration::ZERO, ..good.clone() }, 2),
            refused(ConnectConfig { timeout: Duration::MAX, ..good.clone() }, 3),
        ];
        for state in 0..2 {
            cx.connect(good.clone(), state).expect("room for two");
        }
        let full = cx.connect(good, 9).expect_err("no room for a third");
        assert_eq!(full.state, 9);
        kinds.push(full.kind);
        kinds
    });
    use ConnectErrorKind::{FamilyMismatch, Timeout, WorkerFull};
    assert_eq!(kinds, [FamilyMismatch, Timeout, Timeout, WorkerFull]);
    assert!(WorkerFull.to_string().contains("max_connections"));
    stop(runtime);
}

#[test]
fn the_runtimes_total_counts_outgoing_connections_too() {
    let Some(runtime) = start(Runtime::builder().max_connections(3).workers(2), |_| Hooks::plain()) else {
        return;
    };
    let (_listener, target, _filling) = full_listener();
    let begun = |worker, count| {
        ask(&runtime.remote(), worker, move |cx| {
            let begin = |_| cx.connect(ConnectConfig::new(target), ()).map_err(|error| error.kind);
            (0..count).map(begin).collect::<Vec<_>>()
        })
    };
    assert!(begun(0, 2).iter().all(Result::is_ok));
    let begun = begun(1, 2);
    assert!(begun[0].is_ok());
    assert_eq!(begun[1].as_ref().err(), Some(&ConnectErrorKind::RuntimeFull));
    stop(runtime);
}

/// More addresses in one turn than the submission's scratch holds, all of them to the right target.
#[test]
fn a_thousand_connections_begun_in_one_turn_are_all_made() {
    for descriptors in BOTH {
        for sq_entries in [8, 1024] {
            const COUNT: u32 = 1000;
            let (seen, told) = channel();
            let config =
                WorkerConfig { descriptors, sq_entries, max_connections: 2000, ..WorkerConfig::default() };
            let listeners: Vec<_> =
                (0..4).map(|_| TcpListener::bind(any_port()).expect("a listener")).collect();
            let targets: Vec<_> =
                listeners.iter().map(|listener| listener.local_addr().expect("an address")).collect();
            let make = move |_| {
                let (targets, seen) = (targets.clone(), seen.clone());
                Hooks::new(|| 0u32)
                    .start(move |cx| {
                        for number in 0..COUNT {
                            let target = targets[number as usize % targets.len()];
                            cx.connect(ConnectConfig::new(target), number).expect("begun");
                        }
                    })
                    .connected(|conn| {
                        let number = *conn.state();
                        conn.send(number.to_le_bytes().to_vec()).expect("open for sending");
                    })
                    .closed(move |_, end| seen.send(end.reason).expect("the test listens"))
            };
            let builder = Runtime::builder().worker(config);
            let Some(runtime) = start(builder, make) else { return };
            let mut numbers: Vec<u32> = thread::scope(|scope| {
                let count = listeners.len();
                let accepting: Vec<_> = listeners
                    .iter()
                    .enumerate()
                    .map(|(index, listener)| {
                        scope.spawn(move || {
                            let number = |_| {
                                let mut bytes = [0; 4];
                                accept(listener).0.read_exact(&mut bytes).expect("its number");
                                let number = u32::from_le_bytes(bytes);
                                assert_eq!(number as usize % count, index, "the wrong target");
                                number
                            };
                            (0..COUNT as usize / count).map(number).collect::<Vec<_>>()
                        })
                    })
                    .collect();
                accepting.into_iter().flat_map(|thread| thread.join().expect("accepting")).collect()
            });
            numbers.sort_unstable();
            assert!(numbers.iter().copied().eq(0..COUNT));
            for _ in 0..COUNT {
                let reason = told.recv_timeout(PATIENCE).expect("an end");
                assert_eq!(reason, CloseReason::Eof);
            }
            let total = empties(&runtime);
            assert_eq!(total.connected, u64::from(COUNT));
            stop(runtime);
        }
    }
}

#[test]
fn connections_ended_at_any_stage_of_their_making_leave_nothing_behind() {
    const COUNT: u64 = 3000;
    for descriptors in BOTH {
        let Some((runtime, told)) = telling(descriptors) else { return };
        let remote = runtime.remote();
        let (_full, unanswered, _filling) = full_listener();
        let listener = TcpListener::bind(any_port()).expect("a listener");
        let answered = listener.local_addr().expect("its address");
        let closed_port = TcpListener::bind(any_port()).expect("a listener").local_addr().expect("one");
        thread::scope(|scope| {
            // Ends with the connection that the test makes last.
            scope.spawn(|| {
                while let Ok((mut stream, _)) = listener.accept() {
                    if matches!(stream.read(&mut [0; 4]), Ok(3)) {
                        return;
                    }
                }
            });
            let mut rng = Rng::new(77);
            for _ in 0..COUNT {
                let target = [answered, answered, unanswered, closed_port][rng.within(0, 3)];
                let at_once = rng.one_in(3);
                let id = ask(&remote, 0, move |cx| {
                    let id = cx.connect(ConnectConfig::new(target), ()).expect("begun");
                    if at_once {
                        cx.conn(id).expect("being made").abort();
                    }
                    id
                });
                if rng.one_in(4) {
                    // By now it may be made, refused, or neither.
                    let _: usize = ask(&remote, 0, |cx| cx.connections());
                }
                if rng.one_in(2) {
                    remote.abort(id).expect("room");
                } else {
                    remote.close(id).expect("room");
                }
                closed_as(&told, id);
            }
            TcpStream::connect(answered).expect("connect").write_all(b"end").expect("write");
        });
        let total = empties(&runtime);
        assert_eq!(total.closed_total(), COUNT);
        assert_eq!(total.closed[CloseReason::ConnectTimeout.index()], 0);
        stop(runtime);
    }
}

/// Waits for the end of one connection; no other may end.
fn closed_as(told: &Receiver<Seen>, id: corelane::ConnId) {
    assert_eq!(closed(told).0, id);
}

/// One worker talks to itself: what completes at once is handled in the next turn, never from inside
/// a callback, so depth does not grow with the number of rounds.
#[test]
fn a_hundred_thousand_rounds_between_two_connections_of_one_worker_do_not_recurse() {
    const ROUNDS: u32 = 100_000;
    for descriptors in BOTH {
        let (seen, told) = channel();
        let make = move |_| {
            let seen = seen.clone();
            let mut rounds = 0;
            let mut depth_marks = (usize::MAX, 0);
            Hooks::plain().connected(|conn| conn.send("x").expect("open")).data(move |conn, data| {
                let mark = &raw const data as usize;
                depth_marks = (depth_marks.0.min(mark), depth_marks.1.max(mark));
                rounds += 1;
                if rounds < ROUNDS {
                    conn.send(data).expect("open");
                } else {
                    seen.send(depth_marks.1 - depth_marks.0).expect("the test listens");
                    conn.close();
                }
            })
        };
        let Some(runtime) = start(builder(descriptors).listen(any_port()), make) else { return };
        let target = addr(&runtime);
        tell(&runtime.remote(), 0, move |cx| {
            cx.connect(ConnectConfig::new(target), ()).expect("begun");
        });
        let depth = told.recv_timeout(PATIENCE).expect("a hundred thousand rounds");
        assert!(depth < 4096, "callbacks nest: their stacks span {depth} bytes");
        let total = empties(&runtime);
        assert_eq!((total.connected, total.accepted), (1, 1));
        stop(runtime);
    }
}

/// A connection that fails at once (here its source address is not this machine's) ends without an
/// event of the kernel; what its `on_closed` begins must not wait for the next one.
#[test]
fn a_connection_begun_when_another_failed_at_once_is_made_at_once() {
    let target = TcpListener::bind(any_port()).expect("a listener");
    let to = target.local_addr().expect("its address");
    let (told, events) = channel();
    let told = std::sync::Mutex::new(told);
    let make = move |_| {
        let (connected, mut first) = (told.lock().expect("whole").clone(), true);
        let source = Some("203.0.113.7:0".parse().expect("an address"));
        Hooks::plain()
            .start(move |cx| {
                cx.connect(ConnectConfig { source, ..ConnectConfig::new(to) }, ()).expect("begun");
            })
            .closed(move |cx, _| {
                if std::mem::take(&mut first) {
                    // Its own timeout would wake the worker some time; not within this test's patience.
                    let config =
                        ConnectConfig { timeout: Duration::from_secs(3600), ..ConnectConfig::new(to) };
                    cx.connect(config, ()).expect("begun");
                }
            })
            .connected(move |_| connected.send(()).expect("the test listens"))
    };
    let Some(runtime) = start(Runtime::builder(), make) else { return };
    events.recv_timeout(PATIENCE).expect("connected");
    stop(runtime);
}
