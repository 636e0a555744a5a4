//! Addresses and options of tasks' connections, asked for one at a time and several at once.
#![cfg(target_os = "linux")]

mod support;
mod task_common;

use std::io::{ErrorKind, Read, Write};
use std::net::SocketAddr;
use std::sync::mpsc;
use std::time::Duration;

use corelane::net::{TcpListener, TcpStream};
use corelane::{ConnectConfig, Descriptors, Keepalive, ListenerConfig, SocketOptions, WorkerConfig};
use support::{any_port, connect, read_to_eof};
use task_common::*;

/// Every backend, with both kinds of descriptors.
fn on_all(test: impl Fn(corelane::Builder, WorkerConfig)) {
    on_each_backend(|builder| {
        // Those of a ring's own table can be asked since Linux 6.8.
        test(builder, WorkerConfig { descriptors: Descriptors::Fd, ..small() });
    });
    if linux() >= (6, 8) {
        on_each_backend(|builder| {
            test(builder, WorkerConfig { descriptors: Descriptors::Direct, ..small() })
        });
    }
}

/// The kernel's version.
fn linux() -> (u32, u32) {
    let text = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("the kernel's version");
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse().expect("a number"));
    (numbers.next().expect("a major version"), numbers.next().expect("a minor version"))
}

#[test]
fn both_ends_know_both_addresses_also_when_asked_at_once() {
    on_all(|builder, config| {
        run(builder.worker(config), || async {
            let (to, theirs) = mpsc::channel::<(SocketAddr, SocketAddr)>();
            let stream = accepted(move |peer| {
                let ends = (peer.local_addr().expect("known"), peer.peer_addr().expect("known"));
                to.send(ends).expect("the test waits");
                assert_eq!(read_to_eof(peer), b"");
            })
            .await;
            let (theirs, ours) = theirs.recv().expect("the peer says");
            let (peer, local) = both(stream.peer_addr(), stream.local_addr()).await;
            assert_eq!((peer.expect("known"), local.expect("known")), (theirs, ours));
            // Questions of several kinds, one of whose askers goes away before the answer is there.
            assert!(poll_once(stream.local_addr()).await.is_pending());
            let options = SocketOptions { nodelay: false, ..SocketOptions::default() };
            assert!(poll_once(stream.set_options(&options)).await.is_pending());
            let usual = SocketOptions::default();
            let asked = both(
                both(stream.local_addr(), stream.set_options(&usual)),
                both(stream.peer_addr(), stream.local_addr()),
            );
            let ((a, b), (c, d)) = asked.await;
            b.expect("set");
            assert_eq!([a.expect("known"), d.expect("known")], [ours; 2]);
            assert_eq!(c.expect("known"), theirs);
        });
    });
}

#[test]
fn two_tasks_may_ask_about_one_connection() {
    on_all(|builder, config| {
        run(builder.worker(config), || async {
            let stream = std::rc::Rc::new(accepted(|peer| assert_eq!(read_to_eof(peer), b"")).await);
            let tasks: Vec<_> = (0..10)
                .map(|_| {
                    let stream = stream.clone();
                    corelane::task::spawn(async move { stream.local_addr().await })
                })
                .collect();
            let mut known = Vec::new();
            for task in tasks {
                known.push(task.await.expect("no panic").expect("known"));
            }
            known.dedup();
            assert_eq!(known.len(), 1);
        });
    });
}

#[test]
fn an_outgoing_connection_knows_its_peer_and_its_source_without_asking_twice() {
    on_all(|builder, config| {
        run(builder.worker(WorkerConfig { peer_addresses: true, ..config }), || async {
            let mut listener = TcpListener::bind(ListenerConfig::new(any_port())).await.expect("bound");
            let target = listener.local_addr().expect("its address");
            let config = ConnectConfig {
                source: Some("127.0.0.9:0".parse().expect("an address")),
                ..ConnectConfig::new(target)
            };
            let (near, far) = both(TcpStream::connect(config), listener.accept()).await;
            let (near, far) = (near.expect("connected"), far.expect("accepted"));
            let source = near.local_addr().await.expect("known");
            assert_eq!(source.ip().to_string(), "127.0.0.9");
            // Known at once: nothing is waited for.
            for (stream, wanted) in [(&near, target), (&far, source)] {
                match poll_once(stream.peer_addr()).await {
                    std::task::Poll::Ready(peer) => assert_eq!(peer.expect("known"), wanted),
                    std::task::Poll::Pending => panic!("it was asked for"),
                }
            }
        });
    });
}

/// Which timer of a connection runs, as `/proc/net/tcp` has it.
fn timer(local: SocketAddr, peer: SocketAddr) -> String {
    let table = std::fs::read_to_string("/proc/net/tcp").expect("the table");
    let ends = format!("0100007F:{:04X} 0100007F:{:04X}", local.port(), peer.port());
    let line = table.lines().find(|line| line.contains(&ends)).expect("the connection");
    let column = line.split_whitespace().nth(5).expect("the timer");
    column.split(':').next().expect("its kind").to_owned()
}

#[test]
fn options_are_checked_and_set() {
    on_all(|builder, config| {
        run(builder.worker(config), || async {
            let stream = accepted(|peer| assert_eq!(read_to_eof(peer), b"")).await;
            let wrong = SocketOptions { linger: Some(Duration::from_secs(3)), ..SocketOptions::default() };
            let error = stream.set_options(&wrong).await.expect_err("it would block the worker");
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.to_string().contains("linger"), "{error}");
            let keepalive =
                Keepalive { idle: Duration::from_secs(7), interval: Duration::from_secs(2), count: 3 };
            let options = SocketOptions { keepalive: Some(keepalive), ..SocketOptions::default() };
            let local = stream.local_addr().await.expect("known");
            let peer = stream.peer_addr().await.expect("known");
            assert_eq!(timer(local, peer), "00", "no timer runs");
            stream.set_options(&options).await.expect("set");
            assert_eq!(timer(local, peer), "02", "the kernel's keepalive timer runs");
            stream.set_options(&SocketOptions::default()).await.expect("set");
            assert_eq!(timer(local, peer), "02", "what is not given stays as it is");
        });
    });
}

#[test]
fn a_connection_that_is_over_says_why_it_cannot_be_asked() {
    on_all(|builder, config| {
        run(builder.worker(config), || async {
            let mut listener = listen(|addr| support::reset(connect(addr))).await;
            let mut stream = listener.accept().await.expect("accepted");
            assert_eq!(stream.recv().await.expect_err("a reset").kind(), ErrorKind::ConnectionReset);
            assert_eq!(stream.local_addr().await.expect_err("over").kind(), ErrorKind::ConnectionReset);
            let error = stream.set_options(&SocketOptions::default()).await.expect_err("over");
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            // One that ends while the answer is on its way.
            let mut stream = accepted(|mut peer| {
                peer.write_all(b"here").expect("written");
                assert_eq!(peer.read(&mut [0]).expect_err("a reset").kind(), ErrorKind::ConnectionReset);
            })
            .await;
            piece(&mut stream).await;
            stream.set_deadline(Some(Duration::from_millis(1)));
            loop {
                match stream.local_addr().await {
                    Ok(_) => corelane::task::yield_now().await,
                    Err(error) => break assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}"),
                }
            }
        });
    });
}
