//! Streams in two halves, and what one connection received sent on another: nothing is copied, nothing is lost, and whoever
//! does not read holds up only who sends to him.
#![cfg(target_os = "linux")]

mod support;
mod task_common;

use std::io::{ErrorKind, Write};
use std::net::Shutdown;
use std::sync::mpsc;
use std::time::Duration;

use corelane::net::{OwnedReadHalf, OwnedWriteHalf, TcpListener, TcpStream};
use corelane::task::{spawn, yield_now};
use corelane::{Buf, Payload};
use support::{PATIENCE, connect, connect_narrow, counters, expect, pattern, read_to_eof, same_bytes};
use task_common::*;

/// Two ends of one connection, both of them this worker's.
async fn pair() -> (TcpStream, TcpStream) {
    let mut listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let addr = listener.local_addr().expect("its address");
    let (near, far) = both(TcpStream::connect(addr), listener.accept()).await;
    (near.expect("connected"), far.expect("accepted"))
}

#[test]
fn borrowed_halves_receive_and_send_at_the_same_time_in_one_task() {
    on_each_backend(|builder| {
        run(builder, || async {
            let sent = pattern(1, 2_000_000);
            let wanted = sent.clone();
            // The peer gives everything back, so that neither side gets on unless both do.
            let mut stream = accepted(|mut peer| {
                let mut back = peer.try_clone().expect("cloned");
                std::io::copy(&mut peer, &mut back).expect("copied");
                back.shutdown(Shutdown::Write).expect("ended");
            })
            .await;
            let (mut from, mut to) = stream.split();
            assert_eq!(from.id(), to.id());
            let writing = async move {
                for part in sent.chunks(7_000) {
                    to.send(part.to_vec()).await.expect("sent");
                }
                to.flush().await.expect("sent");
                to.shutdown();
            };
            let reading = async move {
                let mut got = Vec::new();
                while let Some(piece) = from.recv().await.expect("received") {
                    got.extend_from_slice(&piece);
                }
                got
            };
            let ((), got) = both(writing, reading).await;
            same_bytes(&got, &wanted, "what came back");
            assert!(stream.recv().await.expect("received").is_none(), "whole again");
        });
    });
}

#[test]
fn owned_halves_work_in_two_tasks_and_a_dropped_writer_is_an_end_for_the_peer_only() {
    on_each_backend(|builder| {
        run(builder, || async {
            let stream = accepted(|mut peer| {
                expect(&mut peer, b"from a task of its own");
                // The writing half was dropped: nothing more comes, and this way is still open.
                assert_eq!(read_to_eof(&mut peer), b"");
                peer.write_all(b"answer").expect("written");
            })
            .await;
            let (mut from, mut to) = stream.into_split();
            let reading = spawn(async move {
                let got = from.recv().await.expect("received").expect("data").to_vec();
                assert!(from.recv().await.expect("received").is_none());
                got
            });
            let writing = spawn(async move { to.send("from a task of its own").await });
            writing.await.expect("no panic").expect("sent");
            assert_eq!(reading.await.expect("no panic"), b"answer");
        });
    });
}

#[test]
fn a_connection_is_closed_when_both_owned_halves_are_dropped() {
    on_each_backend(|builder| {
        let (go, told) = mpsc::channel();
        run(builder, move || async move {
            let stream = accepted(move |mut peer| {
                expect(&mut peer, b"x");
                told.recv().expect("told");
                assert_eq!(read_to_eof(&mut peer), b"");
            })
            .await;
            let (from, mut to) = stream.into_split();
            drop(from);
            to.send_all("x").await.expect("sending goes on without the other half");
            assert_eq!(to.close_reason(), None);
            drop(to);
            go.send(()).expect("the peer waits");
        });
    });
}

#[test]
fn halves_are_one_stream_again_or_come_back_when_they_are_not_of_one() {
    on_each_backend(|builder| {
        run(builder, || async {
            let ((near, mut far), (other, mut far_other)) = both(pair(), pair()).await;
            let peer = near.peer_addr().await.expect("it was connected to it");
            let id = near.id();
            let ((a_from, a_to), (b_from, b_to)) = (near.into_split(), other.into_split());
            let error = TcpStream::reunite(a_from, b_to).expect_err("of two streams");
            assert_eq!(error.to_string(), "the two halves are not of one stream of this kind");
            let (a_from, b_to): (OwnedReadHalf, OwnedWriteHalf) = (error.0, error.1);
            let mut near = TcpStream::reunite(a_from, a_to).expect("of one stream");
            assert_eq!((near.id(), near.peer_addr().await.expect("as before")), (id, peer));
            // Nothing was shut down on the way.
            near.send("still open").await.expect("sent");
            assert_eq!(&piece(&mut far).await[..], b"still open");
            drop(TcpStream::reunite(b_from, b_to).expect("of one stream"));
            assert!(far_other.recv().await.expect("received").is_none());
        });
    });
}

/// Copies one way until the end, as a proxy does, each piece behind `header`.
async fn forward(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    header: &'static str,
) -> std::io::Result<u64> {
    let mut bytes = 0;
    while let Some(piece) = from.recv().await? {
        bytes += piece.len() as u64;
        to.send_vectored([Payload::from(header), piece.into()]).await?;
    }
    Ok(bytes)
}

#[test]
fn a_forwarded_lease_is_the_received_buffer_itself() {
    on_each_backend(|builder| {
        let (go, told) = mpsc::channel::<()>();
        run(builder.worker(small()), move || async move {
            let mut from = accepted(|mut peer| {
                peer.write_all(b"one and the same buffer").expect("written");
                assert_eq!(read_to_eof(peer), b"");
            })
            .await;
            let mut to = listen(move |addr| {
                let mut peer = connect_narrow(addr, 4096);
                told.recv().expect("told");
                let got = read_to_eof(&mut peer);
                assert!(got.ends_with(b"0header|one and the same buffer"), "{} bytes", got.len());
            })
            .await
            .accept()
            .await
            .expect("accepted");
            // The peer does not read, and what is queued now stays so.
            while corelane::time::timeout(Duration::from_millis(200), to.send(vec![b'0'; 8 << 10]))
                .await
                .is_ok()
            {}
            let lease = from.recv().await.expect("received").expect("data");
            let mut kept: Buf = lease.clone();
            assert_eq!(kept.as_ptr(), lease.as_ptr());
            assert!(poll_once(to.send("dropped before it was queued")).await.is_pending());
            to.try_send("header|").expect("queued");
            to.try_send(lease).expect("queued");
            yield_now().await;
            assert!(
                kept.get_mut().is_none(),
                "the connection has a lease on the same buffer until it is sent"
            );
            go.send(()).expect("the peer waits");
            to.flush().await.expect("sent");
            assert!(kept.get_mut().is_some(), "and gave it back");
        });
    });
}

#[test]
fn a_proxy_brings_every_byte_both_ways_without_copying_one() {
    on_each_backend(|builder| {
        let (ended, end) = mpsc::channel();
        watch(
            builder,
            move || async move {
                let sent = pattern(5, 4_000_000);
                let wanted = sent.clone();
                // The target gives back what it gets.
                let mut targets = listen(|addr| {
                    let mut peer = connect(addr);
                    let mut back = peer.try_clone().expect("cloned");
                    std::io::copy(&mut peer, &mut back).expect("copied");
                    back.shutdown(Shutdown::Write).expect("ended");
                })
                .await;
                let mut clients = listen(move |addr| {
                    let client = connect(addr);
                    let mut writer = client.try_clone().expect("cloned");
                    let writing = std::thread::spawn(move || {
                        writer.write_all(&sent).expect("written");
                        writer.shutdown(Shutdown::Write).expect("ended");
                    });
                    let got = read_to_eof(client);
                    same_bytes(&got, &wanted, "through the proxy and back");
                    writing.join().expect("written");
                })
                .await;
                let (target, client) = both(targets.accept(), clients.accept()).await;
                let (from_target, to_target) = target.expect("accepted").into_split();
                let (from_client, to_client) = client.expect("accepted").into_split();
                let there = spawn(forward(from_client, to_target, ""));
                let back = spawn(forward(from_target, to_client, ""));
                assert_eq!(there.await.expect("no panic").expect("forwarded"), 4_000_000);
                assert_eq!(back.await.expect("no panic").expect("forwarded"), 4_000_000);
                ended.send(()).expect("the test waits");
            },
            |runtime| {
                end.recv_timeout(PATIENCE).expect("in time");
                let total = counters(runtime, "all to be sent", |total| total.bytes_sent >= 8_000_000);
                assert_eq!((total.bytes_received, total.bytes_sent), (8_000_000, 8_000_000));
                assert_eq!(total.reclaimed, 0, "leases were copied out: {total:#?}");
            },
        );
    });
}

#[test]
fn a_reader_who_does_not_read_holds_up_the_writer_on_the_other_side() {
    on_each_backend(|builder| {
        let (go, told) = mpsc::channel::<()>();
        watch(
            builder.worker(small()),
            move || async move {
                let sent = pattern(6, 30_000_000);
                let wanted = sent.clone();
                let mut sources = listen(move |addr| {
                    let mut source = connect(addr);
                    source.write_all(&sent).expect("written");
                    source.shutdown(Shutdown::Write).expect("ended");
                })
                .await;
                let mut sinks = listen(move |addr| {
                    let sink = connect_narrow(addr, 4096);
                    told.recv().expect("told");
                    same_bytes(&read_to_eof(sink), &wanted, "through the proxy");
                })
                .await;
                // Somebody else's connection, which the held-up one must not starve.
                let mut others = listen(|addr| {
                    let mut other = connect(addr);
                    for _ in 0..50 {
                        support::exchange(&mut other, b"still served");
                    }
                })
                .await;
                let ((source, sink), other) =
                    both(both(sources.accept(), sinks.accept()), others.accept()).await;
                let (from, to_source) = source.expect("accepted").into_split();
                let (from_sink, to) = sink.expect("accepted").into_split();
                let forwarding = spawn(forward(from, to, ""));
                let (served, serving) = both(forwarding, async {
                    let mut other = other.expect("accepted");
                    while let Some(data) = other.recv().await? {
                        other.send(data).await?;
                    }
                    std::io::Result::Ok(())
                })
                .await;
                assert_eq!(served.expect("no panic").expect("forwarded"), 30_000_000);
                serving.expect("served");
                drop((to_source, from_sink));
            },
            |runtime| {
                // Once nothing moves any more, what is inside is what the marks allow, and what receive operations bring
                // until their cancellation is there: never more than the pool, also when leases were copied out.
                let mut before =
                    counters(runtime, "something to arrive", |total| total.bytes_received > 100_000);
                support::eventually("nothing to move", || {
                    std::thread::sleep(Duration::from_millis(100));
                    let now = runtime.metrics().total();
                    let still =
                        now.bytes_received == before.bytes_received && now.bytes_sent == before.bytes_sent;
                    before = now;
                    still
                });
                let inside = before.bytes_received - before.bytes_sent;
                assert!(inside <= 256 * 4096, "{inside} bytes are queued: {before:#?}");
                assert!(before.bytes_received < 29_000_000, "the writer was not held up: {before:#?}");
                go.send(()).expect("the sink waits");
            },
        );
    });
}

#[test]
fn a_header_goes_in_front_of_every_forwarded_piece() {
    on_each_backend(|builder| {
        run(builder, || async {
            let (mut near, far) = pair().await;
            let (to, mut end) = pair().await;
            let (from, _open) = far.into_split();
            let (_unread, to) = to.into_split();
            let forwarding = spawn(forward(from, to, "> "));
            for text in ["one", "two", "three"] {
                near.send_all(text).await.expect("sent");
                let mut line = vec![0; text.len() + 2];
                end.recv_exact(&mut line).await.expect("received");
                assert_eq!(line, format!("> {text}").as_bytes());
            }
            drop(near);
            assert_eq!(forwarding.await.expect("no panic").expect("forwarded"), 11);
        });
    });
}

#[test]
fn a_forwarding_task_whose_target_resets_learns_why() {
    on_each_backend(|builder| {
        run(builder, || async {
            let ((near, far), (to, end)) = both(pair(), pair()).await;
            let (mut near_from, mut near_to) = near.into_split();
            let (from, open) = far.into_split();
            let (_unread, to) = to.into_split();
            let forwarding = spawn(forward(from, to, ""));
            end.abort();
            // Until the other side is gone.
            while !forwarding.is_finished() {
                near_to.send_all(vec![0; 1000]).await.expect("the first hop is open");
                yield_now().await;
            }
            let error = forwarding.await.expect("no panic").expect_err("a reset");
            assert!(matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{error}");
            // With its last half the first hop is closed too.
            drop(open);
            assert!(near_from.recv().await.expect("received").is_none());
        });
    });
}
