//! Accepting: limits, sharing between workers, address families, what a listener reports.
#![cfg(target_os = "linux")]

mod support;

use std::collections::BTreeSet;
use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::mpsc::channel;
use std::time::Duration;

use corelane::{Descriptors, Keepalive, ListenerConfig, Runtime, Sharing, SocketOptions, WorkerConfig};
use support::*;

const BOTH: [Descriptors; 2] = [Descriptors::Direct, Descriptors::Fd];

fn v6(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

/// Every client sends its number; those who are served get it back. Returns which those are, once
/// there are `count` of them and the others have stayed unserved for a while.
fn served(streams: &[TcpStream], count: usize) -> BTreeSet<usize> {
    let mut served = BTreeSet::new();
    eventually("as many clients served as there is room for", || {
        served.extend((0..streams.len()).filter(|&index| readable(&streams[index]) > 0));
        served.len() >= count
    });
    for (index, stream) in streams.iter().enumerate() {
        if !served.contains(&index) {
            assert!(stays_silent(stream, Duration::from_millis(10)), "served or closed beyond the limit");
        }
    }
    assert_eq!(served.len(), count);
    served
}

/// `clients` clients at a server that takes `room` at a time: all of them are served in the end, as
/// others leave; none is closed.
fn all_served_in_turn(runtime: &Runtime<Task<()>>, clients: usize, room: usize) {
    let mut streams: Vec<_> = (0..clients).map(|_| connect(addr(runtime))).collect();
    for (index, stream) in streams.iter_mut().enumerate() {
        stream.write_all(&pattern(index as u64, 50)).expect("write");
    }
    let mut numbers: Vec<_> = (0..clients as u64).collect();
    while !streams.is_empty() {
        let now = served(&streams, room.min(streams.len()));
        for &index in now.iter().rev() {
            expect(&streams[index], &pattern(numbers[index], 50));
            exchange(&streams[index], b"and again");
            drop(streams.remove(index));
            numbers.remove(index);
        }
    }
}

#[test]
fn beyond_a_workers_limit_clients_wait_and_are_served_when_others_leave() {
    for descriptors in BOTH {
        for peer_addresses in [false, true] {
            let config =
                WorkerConfig { descriptors, peer_addresses, max_connections: 4, ..WorkerConfig::default() };
            let most = Arc::new(AtomicI64::new(0));
            let seen = most.clone();
            let make = move |_| {
                let most = seen.clone();
                Hooks::echo().accept(move |cx, _| {
                    most.fetch_max(cx.connections() as i64, Ordering::Relaxed);
                    Some(())
                })
            };
            let builder = Runtime::builder().worker(config).listen(any_port());
            let Some(runtime) = start(builder, make) else { return };
            all_served_in_turn(&runtime, 20, 4);
            let total = empties(&runtime);
            assert_eq!((total.accepted, total.refused, total.closed_total()), (20, 0, 20));
            assert!(total.accept_pauses > 0, "{total:#?}");
            assert_eq!(most.load(Ordering::Relaxed), 4);
            sleeps(&runtime, "after a time at the limit");
            stop(runtime);
        }
    }
}

#[test]
fn a_worker_at_its_limit_sleeps() {
    let config = WorkerConfig { max_connections: 2, ..WorkerConfig::default() };
    let builder = Runtime::builder().worker(config).listen(any_port());
    let Some(runtime) = start(builder, |_| Hooks::echo()) else { return };
    let streams: Vec<_> = (0..10).map(|_| connect(addr(&runtime))).collect();
    counters(&runtime, "the limit", |total| total.connections == 2 && total.accept_pauses > 0);
    sleeps(&runtime, "at the limit with clients waiting");
    assert_eq!(runtime.metrics().total().accepted, 2);
    drop(streams);
    // Those who waited are accepted and found gone.
    counters(&runtime, "everybody", |total| total.accepted == 10);
    empties(&runtime);
    stop(runtime);
}

#[test]
fn beyond_the_total_of_two_workers_clients_wait_and_are_served_when_others_leave() {
    for sharing in [Sharing::PerWorker, Sharing::One] {
        let (now, most) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicI64::new(0)));
        let (counting, highest) = (now.clone(), most.clone());
        let make = move |_| {
            let (up, down, most) = (counting.clone(), counting.clone(), highest.clone());
            Hooks::echo()
                .accept(move |_, _| {
                    let held = up.fetch_add(1, Ordering::Relaxed) + 1;
                    most.fetch_max(held, Ordering::Relaxed);
                    Some(())
                })
                .closed(move |_, _| {
                    down.fetch_sub(1, Ordering::Relaxed);
                })
        };
        let mut listener = ListenerConfig::new(any_port());
        listener.sharing = sharing;
        let builder = Runtime::builder().workers(2).max_connections(6).listen(listener);
        let Some(runtime) = start(builder, make) else { return };
        all_served_in_turn(&runtime, 30, 6);
        let total = empties(&runtime);
        assert_eq!((total.accepted, total.closed_total()), (30, 30));
        assert_eq!(most.load(Ordering::Relaxed), 6, "{sharing:?}");
        assert_eq!(now.load(Ordering::Relaxed), 0);
        stop(runtime);
    }
}

/// A burst larger than what is handed over in a turn, and larger than the room that is left.
#[test]
fn a_burst_is_accepted_in_portions_and_nobody_is_lost() {
    for descriptors in BOTH {
        let config =
            WorkerConfig { descriptors, accept_budget: 3, max_connections: 700, ..WorkerConfig::default() };
        let mut listener = ListenerConfig::new(any_port());
        listener.backlog = 200;
        let builder = Runtime::builder().worker(config).listen(listener);
        let Some(runtime) = start(builder, |_| Hooks::echo()) else { return };
        let mut streams: Vec<_> = (0..690).map(|_| connect(addr(&runtime))).collect();
        for (index, stream) in streams.iter_mut().enumerate() {
            stream.write_all(&pattern(index as u64, 20)).expect("write");
        }
        for (index, stream) in streams.iter().enumerate() {
            expect(stream, &pattern(index as u64, 20));
        }
        assert_eq!(runtime.metrics().total().accepted, 690);
        drop(streams);
        let total = empties(&runtime);
        assert_eq!((total.refused, total.accept_errors, total.closed_total()), (0, 0, 690));
        stop(runtime);
    }
}

#[test]
fn the_peers_address_is_told_in_both_descriptor_modes_and_families() {
    for descriptors in BOTH {
        let (seen, told) = channel();
        let config = WorkerConfig { descriptors, peer_addresses: true, ..WorkerConfig::default() };
        let make = move |_| {
            let seen = seen.clone();
            Hooks::plain().accept(move |_, accepted| {
                seen.send((accepted.listener, accepted.peer)).expect("the test listens");
                Some(())
            })
        };
        let builder = Runtime::builder().worker(config).listen(any_port()).listen(v6("[::1]:0"));
        let Some(runtime) = start(builder, make) else { return };
        for _ in 0..20 {
            for (index, listener) in runtime.info().listeners.iter().enumerate() {
                let stream = connect(listener.addr);
                let (from, peer) = told.recv_timeout(PATIENCE).expect("an accept");
                assert_eq!(from, index);
                assert_eq!(peer, Some(stream.local_addr().expect("its address")));
            }
        }
        empties(&runtime);
        stop(runtime);
    }
}

#[test]
fn peer_addresses_are_left_out_where_nobody_asked() {
    let (seen, told) = channel();
    let make = move |_| {
        let seen = seen.clone();
        Hooks::plain().accept(move |_, accepted| {
            seen.send(accepted.peer).expect("the test listens");
            Some(())
        })
    };
    let Some(runtime) = start(Runtime::builder().listen(any_port()), make) else { return };
    drop(connect(addr(&runtime)));
    assert_eq!(told.recv_timeout(PATIENCE).expect("an accept"), None);
    empties(&runtime);
    stop(runtime);
}

#[test]
fn dual_stack_takes_both_families_and_plain_ipv6_only_its_own() {
    let (seen, told) = channel();
    let config = WorkerConfig { peer_addresses: true, ..WorkerConfig::default() };
    let make = move |_| {
        let seen = seen.clone();
        Hooks::echo().accept(move |_, accepted| {
            seen.send(accepted.peer.expect("asked for").ip()).expect("the test listens");
            Some(())
        })
    };
    let mut both = ListenerConfig::new(v6("[::]:0"));
    both.dual_stack = true;
    let builder = Runtime::builder().worker(config).listen(both).listen(v6("[::]:0"));
    let Some(runtime) = start(builder, make) else { return };
    let ports: Vec<_> = runtime.info().listeners.iter().map(|listener| listener.addr.port()).collect();
    exchange(connect(SocketAddr::from(([127, 0, 0, 1], ports[0]))), b"four");
    let mapped: IpAddr = "::ffff:127.0.0.1".parse().expect("an address");
    assert_eq!(told.recv_timeout(PATIENCE).expect("an accept"), mapped);
    for port in &ports {
        exchange(connect(v6(&format!("[::1]:{port}"))), b"six");
        let six: IpAddr = "::1".parse().expect("an address");
        assert_eq!(told.recv_timeout(PATIENCE).expect("an accept"), six);
    }
    let refused = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], ports[1])));
    assert_eq!(refused.expect_err("IPv6 only").kind(), std::io::ErrorKind::ConnectionRefused);
    empties(&runtime);
    stop(runtime);
}

#[test]
fn two_workers_each_get_connections_however_the_address_is_shared() {
    for sharing in [Sharing::PerWorker, Sharing::One] {
        let mut listener = ListenerConfig::new(any_port());
        listener.sharing = sharing;
        let builder = Runtime::builder().workers(2).listen(listener);
        let Some(runtime) = start(builder, |_| Hooks::echo()) else { return };
        assert_eq!(runtime.info().listeners.len(), 1);
        assert_eq!(runtime.info().workers.len(), 2);
        // One after the other: of a burst on a shared listener a worker takes what it finds.
        let streams: Vec<_> = (0..64)
            .map(|seed| {
                let stream = connect(addr(&runtime));
                exchange(&stream, &pattern(seed, 100));
                stream
            })
            .collect();
        let metrics = runtime.metrics();
        assert_eq!(metrics.total().accepted, 64);
        for (index, worker) in metrics.iter().enumerate() {
            assert!(worker.accepted > 0, "worker {index} got none of 64 ({sharing:?})");
        }
        drop(streams);
        empties(&runtime);
        stop(runtime);
    }
}

#[test]
fn several_listeners_are_told_apart() {
    let (seen, told) = channel();
    let make = move |_| {
        let seen = seen.clone();
        Hooks::plain().accept(move |_, accepted| {
            seen.send(accepted.listener).expect("the test listens");
            Some(())
        })
    };
    let mut builder = Runtime::builder().workers(2);
    for _ in 0..5 {
        builder = builder.listen(any_port());
    }
    let Some(runtime) = start(builder, make) else { return };
    for index in [3, 0, 4, 1, 2, 2] {
        let _stream = connect(runtime.info().listeners[index].addr);
        assert_eq!(told.recv_timeout(PATIENCE).expect("an accept"), index);
    }
    empties(&runtime);
    stop(runtime);
}

/// What is set on a listener holds for the connections that it accepts: seen by a server on ordinary
/// descriptors, which a test of the same process can look at.
#[test]
fn accepted_connections_inherit_the_listeners_options() {
    let mut listener = ListenerConfig::new(any_port());
    listener.options = SocketOptions {
        keepalive: Some(Keepalive {
            idle: Duration::from_secs(77),
            interval: Duration::from_secs(7),
            count: 3,
        }),
        user_timeout: Some(Duration::from_millis(12_345)),
        recv_buffer: Some(50_000),
        send_buffer: Some(60_000),
        ..SocketOptions::default()
    };
    let config = WorkerConfig { descriptors: Descriptors::Fd, ..WorkerConfig::default() };
    let builder = Runtime::builder().worker(config).listen(listener);
    let Some(runtime) = start(builder, |_| Hooks::echo()) else { return };
    let stream = connect(addr(&runtime));
    exchange(&stream, b"accepted");
    let peer = stream.local_addr().expect("its address");
    // The server's end is the socket of this process whose peer is this client's address.
    let server =
        (0..4096).find(|&fd| peer_of(fd) == Some(peer)).expect("the server's descriptor in this process");
    let option = |level, name| get_int(server, level, name);
    assert_eq!(option(libc::IPPROTO_TCP, libc::TCP_NODELAY), 1);
    assert_eq!(option(libc::SOL_SOCKET, libc::SO_KEEPALIVE), 1);
    assert_eq!(option(libc::IPPROTO_TCP, libc::TCP_KEEPIDLE), 77);
    assert_eq!(option(libc::IPPROTO_TCP, libc::TCP_KEEPINTVL), 7);
    assert_eq!(option(libc::IPPROTO_TCP, libc::TCP_KEEPCNT), 3);
    assert_eq!(option(libc::IPPROTO_TCP, libc::TCP_USER_TIMEOUT), 12_345);
    // The kernel doubles these.
    assert_eq!(option(libc::SOL_SOCKET, libc::SO_RCVBUF), 100_000);
    assert_eq!(option(libc::SOL_SOCKET, libc::SO_SNDBUF), 120_000);
    assert_ne!(server, stream.as_raw_fd());
    drop(stream);
    empties(&runtime);
    stop(runtime);
}

/// The peer's address of a descriptor, if it is a connected IPv4 socket.
fn peer_of(fd: i32) -> Option<SocketAddr> {
    // Borrowed for the call only, and never closed here.
    let stream = std::mem::ManuallyDrop::new({
        use std::os::fd::FromRawFd;
        // SAFETY: the descriptor is only asked for its peer, and not closed, whatever it is.
        unsafe { TcpStream::from_raw_fd(fd) }
    });
    stream.peer_addr().ok()
}
