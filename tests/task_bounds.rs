//! What is bounded: connections, send buffers, those who wait to be accepted. Whoever finds no room waits in order, for as
//! long as he said, and is then told what was missing; nobody spins meanwhile.
#![cfg(target_os = "linux")]

mod support;
mod task_common;

use std::cell::RefCell;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener as StdListener, TcpStream as Std};
use std::rc::Rc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use corelane::net::{TcpListener, TcpStream, alloc};
use corelane::task::spawn;
use corelane::time::{sleep, timeout};
use corelane::{Backend, ConnectConfig, Runtime, WorkerConfig};
use support::{PATIENCE, any_port, connect, counters, full_listener, read_to_eof, sleeps, stop};
use task_common::*;

const SOON: Duration = Duration::from_millis(20);

/// A server of the standard library whose clients stay until they close.
fn std_server() -> (SocketAddr, StdListener) {
    let listener = StdListener::bind(any_port()).expect("bound");
    (listener.local_addr().expect("its address"), listener)
}

fn within(target: SocketAddr, timeout: Duration) -> ConnectConfig {
    ConnectConfig { timeout, ..ConnectConfig::new(target) }
}

fn of(connections: u32) -> WorkerConfig {
    WorkerConfig { max_connections: connections, ..small() }
}

#[test]
fn connecting_waits_for_room_and_is_then_told_that_the_worker_is_full() {
    on_each_backend(|builder| {
        let (addr, _server) = std_server();
        run(builder.worker(of(2)), move || async move {
            let first = TcpStream::connect(addr).await.expect("room");
            let second = TcpStream::connect(addr).await.expect("room");
            let begun = Instant::now();
            let error = TcpStream::connect(within(addr, SOON)).await.expect_err("no room");
            assert_eq!(error.kind(), ErrorKind::QuotaExceeded);
            assert!(error.to_string().contains("max_connections"), "{error}");
            assert!(begun.elapsed() >= SOON, "it has not waited");
            // What cannot be is said at once, room or not.
            let wrong = ConnectConfig {
                source: Some("[::1]:0".parse().expect("an address")),
                ..within(addr, PATIENCE)
            };
            assert_eq!(
                TcpStream::connect(wrong).await.expect_err("two families").kind(),
                ErrorKind::InvalidInput
            );
            let waiting = spawn(async move { TcpStream::connect(within(addr, PATIENCE)).await });
            sleep(SOON).await;
            assert!(!waiting.is_finished());
            // A reset, so that the room is there at once and not when the server has closed too.
            first.abort();
            waiting.await.expect("no panic").expect("room again").abort();
            second.abort();
        });
    });
}

#[test]
fn who_waits_longest_for_room_connects_first_and_one_who_gives_up_is_passed_over() {
    on_each_backend(|builder| {
        let (addr, _server) = std_server();
        run(builder.worker(of(1)), move || async move {
            let mut held = Some(TcpStream::connect(addr).await.expect("room"));
            let order = Rc::new(RefCell::new(Vec::new()));
            let waiting: Vec<_> = (0..6)
                .map(|n| {
                    let order = order.clone();
                    spawn(async move {
                        // The third gives up long before there is room.
                        let limit = if n == 2 { Duration::from_millis(5) } else { PATIENCE };
                        let connected = TcpStream::connect(within(addr, limit)).await;
                        order.borrow_mut().push((n, connected.is_ok()));
                        if let Ok(stream) = connected {
                            stream.abort();
                        }
                    })
                })
                .collect();
            until("the one who gives up", || order.borrow().len() == 1).await;
            // Somebody who comes just when there is room does not pass those who wait.
            held.take().expect("it was there").abort();
            for waiting in waiting {
                waiting.await.expect("no panic");
                drop(poll_once(TcpStream::connect(within(addr, PATIENCE))).await);
            }
            assert_eq!(*order.borrow(), [(2, false), (0, true), (1, true), (3, true), (4, true), (5, true)]);
        });
    });
}

#[test]
fn the_time_limit_of_a_connect_counts_waiting_for_room_and_for_the_peer_together() {
    on_each_backend(|builder| {
        let (addr, _server) = std_server();
        let (silent, silent_addr, _filling) = full_listener();
        run(builder.worker(of(1)), move || async move {
            let held = TcpStream::connect(addr).await.expect("room");
            let begun = Instant::now();
            let waiting = spawn(async move {
                TcpStream::connect(within(silent_addr, Duration::from_millis(400))).await.map(drop)
            });
            sleep(Duration::from_millis(250)).await;
            held.abort();
            let error = waiting.await.expect("no panic").expect_err("nobody answers");
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
            let took = begun.elapsed();
            assert!(took >= Duration::from_millis(400) && took < Duration::from_millis(640), "{took:?}");
            drop(silent);
        });
    });
}

#[test]
fn a_connect_that_is_dropped_leaves_no_connection() {
    on_each_backend(|builder| {
        let (addr, _server) = std_server();
        let (_silent, silent_addr, _filling) = full_listener();
        run(builder.worker(of(1)), move || async move {
            for _ in 0..20 {
                // Dropped when nothing was begun yet, and when the peer has not answered yet.
                assert!(poll_once(TcpStream::connect(silent_addr)).await.is_pending());
                assert!(timeout(Duration::from_millis(3), TcpStream::connect(silent_addr)).await.is_err());
            }
            let stream = TcpStream::connect(within(addr, PATIENCE)).await.expect("room");
            let refused = timeout(SOON, TcpStream::connect(addr)).await;
            assert!(refused.is_err(), "still waiting for room");
            stream.abort();
        });
    });
}

#[test]
fn a_full_runtime_is_told_as_such_and_room_on_another_worker_is_found() {
    for backend in [Backend::IoUring, Backend::Epoll] {
        let (addr, _server) = std_server();
        let (done, end) = mpsc::channel();
        let (have, told) = mpsc::channel::<()>();
        let told = std::sync::Arc::new(std::sync::Mutex::new(Some(told)));
        let builder = Runtime::builder().backend(backend).workers(2).worker(small()).max_connections(2);
        let started = builder.start_tasks(move |worker| {
            let (done, told) = (done.clone(), told.clone());
            async move {
                if worker == 1 {
                    return;
                }
                let mut held = Vec::new();
                let refused = loop {
                    match TcpStream::connect(within(addr, Duration::from_millis(200))).await {
                        Ok(stream) => held.push(stream),
                        Err(error) => break error,
                    }
                    assert!(held.len() <= 2, "more than the total");
                };
                assert_eq!(refused.kind(), ErrorKind::QuotaExceeded);
                done.send(refused.to_string()).expect("the test waits");
                let told = told.lock().expect("no panic").take().expect("one worker");
                until("the test", || told.try_recv().is_ok()).await;
                held.pop().expect("one is held").abort();
                TcpStream::connect(within(addr, PATIENCE)).await.expect("room again").abort();
                held.drain(..).for_each(TcpStream::abort);
                done.send(String::new()).expect("the test waits");
            }
        });
        let runtime = match started {
            Ok(runtime) => runtime,
            Err(error) => {
                println!("skipped on {backend}: {error}");
                continue;
            }
        };
        let text = end.recv_timeout(PATIENCE).expect("refused");
        assert!(text.contains("max_connections"), "{text}");
        have.send(()).expect("the task waits");
        end.recv_timeout(PATIENCE).expect("room again");
        stop(runtime);
    }
}

#[test]
fn send_buffers_are_waited_for_in_order_and_without_spinning() {
    on_each_backend(|builder| {
        let (go, told) = mpsc::channel::<()>();
        let (waits, waiting) = mpsc::channel::<()>();
        watch(
            builder.worker(small()),
            move || async move {
                let mut held = Vec::new();
                for _ in 0..4 {
                    held.push(alloc(SOON).await.expect("there are four"));
                }
                let error = alloc(SOON).await.expect_err("there are four only");
                assert_eq!(error.kind(), ErrorKind::QuotaExceeded);
                assert!(error.to_string().contains("send_count"), "{error}");
                let order = Rc::new(RefCell::new(Vec::new()));
                let tasks: Vec<_> = (0..8)
                    .map(|n| {
                        let order = order.clone();
                        spawn(async move {
                            let mut buffer = alloc(PATIENCE).await.expect("in time");
                            order.borrow_mut().push(n);
                            buffer.put(b"mine");
                            corelane::task::yield_now().await;
                        })
                    })
                    .collect();
                let mut until_told = accepted(move |_peer| told.recv().expect("told")).await;
                waits.send(()).expect("the test waits");
                // Not by a timer: nothing is to happen on this worker.
                assert!(until_told.recv().await.expect("received").is_none());
                assert!(order.borrow().is_empty());
                held.pop();
                for task in tasks {
                    task.await.expect("no panic");
                }
                assert_eq!(*order.borrow(), [0, 1, 2, 3, 4, 5, 6, 7]);
                // One that is sent comes back when the kernel has taken it.
                held.clear();
                let mut stream = accepted(|peer| assert_eq!(read_to_eof(peer).len(), 400)).await;
                for _ in 0..100 {
                    let mut buffer = alloc(PATIENCE).await.expect("one comes back");
                    buffer.put(b"four");
                    stream.send(buffer.freeze()).await.expect("sent");
                }
            },
            |runtime| {
                waiting.recv_timeout(PATIENCE).expect("they wait");
                sleeps(runtime, "tasks that wait for a buffer");
                go.send(()).expect("the task waits");
            },
        );
    });
}

#[test]
fn clients_wait_in_the_kernels_queue_while_nobody_accepts() {
    const CLIENTS: usize = 400;
    on_each_backend(|builder| {
        let (go, told) = mpsc::channel::<()>();
        let (addr_to, addr_of) = mpsc::channel();
        let (done, ended) = mpsc::channel::<()>();
        watch(
            builder.worker(WorkerConfig { max_connections: 1000, ..small() }),
            move || async move {
                let mut listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
                addr_to.send(listener.local_addr().expect("its address")).expect("the test waits");
                until("the test", || told.try_recv().is_ok()).await;
                for _ in 0..CLIENTS {
                    let mut stream = listener.accept().await.expect("accepted");
                    drop(spawn(async move {
                        stream.send("hi").await.expect("sent");
                    }));
                }
                until("the test", || ended.try_recv().is_ok()).await;
            },
            |runtime| {
                let addr = addr_of.recv_timeout(PATIENCE).expect("bound");
                let mut clients: Vec<Std> = (0..CLIENTS).map(|_| connect(addr)).collect();
                sleeps_but_for_timers(runtime);
                let accepted = runtime.metrics().total().accepted;
                assert!((64..200).contains(&accepted), "{accepted} of {CLIENTS} were accepted");
                go.send(()).expect("the task waits");
                for client in &mut clients {
                    let mut greeting = [0; 2];
                    client.read_exact(&mut greeting).expect("a greeting");
                    assert_eq!(&greeting, b"hi");
                }
                counters(runtime, "all to be accepted", |total| total.accepted == CLIENTS as u64);
                done.send(()).expect("the task waits");
            },
        );
    });
}

/// Waits until nothing more is accepted: twice the same number, a tenth of a second apart.
fn sleeps_but_for_timers(runtime: &Runtime<corelane::task::Message>) {
    let mut before = u64::MAX;
    support::eventually("accepting to stop", || {
        std::thread::sleep(Duration::from_millis(100));
        let now = runtime.metrics().total().accepted;
        std::mem::replace(&mut before, now) == now
    });
}

#[test]
fn a_listener_that_is_dropped_closes_those_who_wait_and_its_address_is_free_again() {
    on_each_backend(|builder| {
        run(builder, || async {
            let mut addr = any_port();
            for round in 0..30 {
                let mut listener = TcpListener::bind(addr).await.expect("bound");
                addr = listener.local_addr().expect("its address");
                let (done, told) = mpsc::channel();
                // Tries from the first moment on: whoever is in the queue before the task knows of its listener is served.
                let (started, starts) = mpsc::channel();
                peer(move || {
                    started.send(()).expect("the task waits");
                    let mut client = connect(addr);
                    let mut greeting = [0; 2];
                    client.read_exact(&mut greeting).unwrap_or_else(|error| panic!("round {round}: {error}"));
                    done.send(()).expect("the task waits");
                    assert_eq!(read_to_eof(client), b"");
                });
                until("the client", || starts.try_recv().is_ok()).await;
                let mut stream = listener.accept().await.expect("accepted");
                stream.send("hi").await.expect("sent");
                until("the client's word", || told.try_recv().is_ok()).await;
                // One who was accepted and not taken, and one who may not have been.
                let mut left: Vec<Std> = (0..2).map(|_| connect(addr)).collect();
                drop(listener);
                peer(move || {
                    for client in &mut left {
                        // Closed or reset, but not left alone.
                        let ended = client.read(&mut [0]);
                        assert!(
                            matches!(&ended, Ok(0))
                                || ended.is_err_and(|error| error.kind() != ErrorKind::WouldBlock)
                        );
                    }
                });
            }
        });
    });
}

#[test]
fn clients_that_come_while_a_listener_is_being_bound_are_served() {
    on_each_backend(|builder| {
        run(builder, || async {
            // A port that is known before anybody listens there.
            let addr = StdListener::bind(any_port()).expect("bound").local_addr().expect("its address");
            for round in 0..50 {
                let (trying, tries) = mpsc::channel();
                peer(move || {
                    trying.send(()).expect("the task waits");
                    let until = Instant::now() + PATIENCE;
                    let mut client = loop {
                        match Std::connect(addr) {
                            Ok(client) => break client,
                            Err(error) => assert!(Instant::now() < until, "round {round}: {error}"),
                        }
                    };
                    let mut greeting = Vec::new();
                    client
                        .read_to_end(&mut greeting)
                        .unwrap_or_else(|error| panic!("round {round}: {error}"));
                    assert_eq!(greeting, b"hi", "round {round}");
                });
                until("the client", || tries.try_recv().is_ok()).await;
                let mut listener = TcpListener::bind(addr).await.expect("bound");
                let mut stream = listener.accept().await.expect("accepted");
                stream.send("hi").await.expect("sent");
                drop(listener);
                until_refused(addr).await;
            }
        });
    });
}

/// Waits until nobody listens any more.
async fn until_refused(addr: SocketAddr) {
    let trying = async {
        // Who still finds the listener in the last moment is accepted by nobody.
        while !matches!(TcpStream::connect(addr).await, Err(error) if error.kind() == ErrorKind::ConnectionRefused)
        {
        }
    };
    timeout(PATIENCE, trying).await.expect("nobody listens any more");
}

#[test]
fn a_listener_of_the_builder_is_taken_once() {
    on_each_backend(|builder| {
        run(builder.listen(any_port()), || async {
            let listener = TcpListener::of_builder(0).expect("it was given one");
            assert!(TcpListener::of_builder(0).is_none(), "two who accept would not know of each other");
            assert!(TcpListener::of_builder(1).is_none());
            let addr = listener.local_addr().expect("its address");
            drop(listener);
            assert!(TcpListener::of_builder(0).is_none());
            until_refused(addr).await;
        });
    });
}

#[test]
fn a_stop_ends_receiving_of_accepted_connections_unless_they_are_to_go_on() {
    on_each_backend(|builder| {
        let (ready, is_ready) = mpsc::channel();
        let started = builder.listen(any_port()).start_tasks(move |_| {
            let ready = ready.clone();
            async move {
                let mut listener = TcpListener::of_builder(0).expect("it was given one");
                let mut ends = listener.accept().await.expect("accepted");
                let mut goes_on = listener.accept().await.expect("accepted");
                goes_on.keep_receiving_on_stop(true);
                let accepting = spawn(async move { listener.accept().await.map(drop) });
                ready.send(()).expect("the test waits");
                let error = ends.recv().await.expect_err("the stop");
                assert_eq!(error.kind(), ErrorKind::ConnectionAborted, "{error}");
                accepting.await.expect("no panic").expect_err("the stop");
                // What is under way may still be finished.
                ends.send_all("bye").await.expect("sent");
                drop(ends);
                goes_on.send_all("one more?").await.expect("sent");
                let more = goes_on.recv().await.expect("received").expect("data");
                assert_eq!(&more[..], b"yes");
                assert!(goes_on.recv().await.expect("received").is_none());
            }
        });
        let runtime = started.expect("started");
        let addr = support::addr(&runtime);
        let (mut first, mut second) = (connect(addr), connect(addr));
        is_ready.recv_timeout(PATIENCE).expect("both are accepted");
        let stopping = std::thread::spawn(move || stop(runtime));
        support::expect(&mut second, b"one more?");
        second.write_all(b"yes").expect("written");
        assert_eq!(read_to_eof(&mut first), b"bye");
        drop((first, second));
        let report = stopping.join().expect("the stop");
        assert_eq!((report.finished, report.aborted), (2, 0), "{report}");
    });
}
