//! How connections end: half-close both ways, graceful close, abort, reset, limits; what the peer sees
//! of it, and what the handler is told.
#![cfg(target_os = "linux")]

mod support;

use std::io::{Read, Write};
use std::net::Shutdown;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use corelane::{Builder, CloseReason, Descriptors, ListenerConfig, Runtime, SendErrorKind, WorkerConfig};
use support::*;

const BOTH: [Descriptors; 2] = [Descriptors::Direct, Descriptors::Fd];

fn builder(descriptors: Descriptors) -> Builder {
    let config = WorkerConfig { descriptors, ..WorkerConfig::default() };
    Runtime::builder().worker(config).listen(any_port())
}

/// A listener whose connections have small send buffers, so that what is queued stays queued.
fn narrow() -> ListenerConfig {
    let mut listener = ListenerConfig::new(any_port());
    listener.options.send_buffer = Some(8192);
    listener
}

#[test]
fn a_client_that_half_closes_still_gets_its_answer() {
    for descriptors in BOTH {
        let (seen, told) = channel();
        let make = move |_| Hooks::telling(&seen).data(|conn, data| drop(conn.send(data)));
        let Some(runtime) = start(builder(descriptors), make) else { return };
        let mut stream = connect(addr(&runtime));
        let bytes = pattern(1, 200_000);
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut stream = &stream;
                stream.write_all(&bytes).expect("write");
                stream.shutdown(Shutdown::Write).expect("half-close");
            });
            same_bytes(&read_to_eof(&stream), &bytes, "the answer");
        });
        let id = opened(&told);
        // Writable in between, as often as it was congested.
        assert_eq!(next_but_writable(&told), Seen::Eof(id));
        assert_eq!(next_but_writable(&told), Seen::Closed(id, CloseReason::Eof));
        assert_eq!(stream.read(&mut [0]).expect("still no reset"), 0);
        stop(runtime);
    }
}

#[test]
fn a_handler_may_go_on_sending_after_the_peers_end_of_data() {
    for descriptors in BOTH {
        let (seen, told) = channel();
        // Answers the end of data with a megabyte in portions, each when the last was taken.
        let make = move |_| {
            let mut left = 16;
            Hooks::telling(&seen)
                .eof(|conn| conn.send(vec![16; 1 << 16]).expect("open for sending"))
                .writable(move |conn| {
                    left -= 1;
                    if left == 0 {
                        conn.close();
                    } else {
                        conn.send(vec![left; 1 << 16]).expect("open for sending");
                    }
                })
        };
        let Some(runtime) = start(builder(descriptors), make) else { return };
        let mut stream = connect(addr(&runtime));
        stream.write_all(b"how much?").expect("write");
        stream.shutdown(Shutdown::Write).expect("half-close");
        let wanted: Vec<u8> = (1..=16).rev().flat_map(|n| vec![n; 1 << 16]).collect();
        same_bytes(&read_to_eof(&mut stream), &wanted, "the answer");
        let id = opened(&told);
        assert_eq!(next(&told), Seen::Data(id, b"how much?".to_vec()));
        assert_eq!(next(&told), Seen::Closed(id, CloseReason::Eof));
        stop(runtime);
    }
}

#[test]
fn a_server_that_half_closes_still_receives() {
    for descriptors in BOTH {
        let (seen, told) = channel();
        let make = move |_| {
            let seen = seen.clone();
            Hooks::telling(&seen).data(move |conn, data| {
                if &data[..] == b"hello" {
                    conn.send("good").expect("open");
                    conn.send("bye").expect("open");
                    conn.shutdown_write();
                    let refused = conn.send("too late").expect_err("finished");
                    assert_eq!(refused.kind, SendErrorKind::Closed);
                }
                seen.send(Seen::Data(conn.id(), data.to_vec())).expect("the test listens");
            })
        };
        let Some(runtime) = start(builder(descriptors), make) else { return };
        let mut stream = connect(addr(&runtime));
        stream.write_all(b"hello").expect("write");
        assert_eq!(read_to_eof(&mut stream), b"goodbye");
        let id = opened(&told);
        assert_eq!(next(&told), Seen::Data(id, b"hello".to_vec()));
        let bytes = pattern(2, 100_000);
        stream.write_all(&bytes).expect("the server still reads");
        stream.shutdown(Shutdown::Write).expect("half-close");
        let mut got = Vec::new();
        let reason = loop {
            match next(&told) {
                Seen::Data(_, data) => got.extend(data),
                Seen::Eof(_) => {}
                Seen::Closed(_, reason) => break reason,
                other => panic!("{other:?}"),
            }
        };
        same_bytes(&got, &bytes, "what came after the server's FIN");
        assert_eq!(reason, CloseReason::Eof);
        stop(runtime);
    }
}

#[test]
fn data_then_an_immediate_close_is_delivered_whole_before_the_end_is_told() {
    for descriptors in BOTH {
        let (seen, told) = channel();
        let Some(runtime) = start(builder(descriptors), move |_| Hooks::telling(&seen)) else { return };
        for seed in 0..50 {
            let bytes = pattern(seed, Rng::new(seed).within(1, 100_000));
            let mut stream = connect(addr(&runtime));
            stream.write_all(&bytes).expect("write");
            drop(stream);
            let id = opened(&told);
            let mut got = Vec::new();
            loop {
                match next(&told) {
                    Seen::Data(of, data) if of == id => got.extend(data),
                    Seen::Eof(of) if of == id => break,
                    other => panic!("{other:?}"),
                }
            }
            same_bytes(&got, &bytes, "what was sent before the close");
            assert_eq!(next(&told), Seen::Closed(id, CloseReason::Eof));
        }
        empties(&runtime);
        stop(runtime);
    }
}

#[test]
fn a_reset_before_any_data_is_told_as_a_reset() {
    for descriptors in BOTH {
        let (seen, told) = channel();
        let Some(runtime) = start(builder(descriptors), move |_| Hooks::telling(&seen)) else { return };
        for _ in 0..20 {
            reset(connect(addr(&runtime)));
            let id = opened(&told);
            assert_eq!(next(&told), Seen::Closed(id, CloseReason::Reset));
        }
        empties(&runtime);
        stop(runtime);
    }
}

/// The kernel hands out what arrived before a reset only if it was received before it came: the
/// handler may see the data or not, but the reset always, and nothing after it.
#[test]
fn a_reset_right_after_data_ends_the_connection_once() {
    for descriptors in BOTH {
        let (seen, told) = channel();
        let make = move |_| {
            let seen = seen.clone();
            Hooks::telling(&seen).data(move |conn, data| {
                seen.send(Seen::Data(conn.id(), data.to_vec())).expect("the test listens");
                let _ = conn.send(data);
            })
        };
        let Some(runtime) = start(builder(descriptors), make) else { return };
        for _ in 0..50 {
            let mut stream = connect(addr(&runtime));
            stream.write_all(b"last words").expect("write");
            reset(stream);
            let id = opened(&told);
            let mut event = next(&told);
            if event == Seen::Data(id, b"last words".to_vec()) {
                event = next(&told);
            }
            assert_eq!(event, Seen::Closed(id, CloseReason::Reset));
        }
        empties(&runtime);
        stop(runtime);
    }
}

#[test]
fn a_reset_while_a_send_is_stuck_gives_everything_back() {
    for descriptors in BOTH {
        let (seen, told) = channel();
        let make = move |_| {
            Hooks::telling(&seen).data(|conn, data| {
                let _ = conn.send(data.slice(..1));
                let _ = conn.send(vec![1; 2 << 20]);
                let _ = conn.send(data);
            })
        };
        let config = WorkerConfig { descriptors, ..WorkerConfig::default() };
        let Some(runtime) = start(Runtime::builder().worker(config).listen(narrow()), make) else {
            return;
        };
        for _ in 0..20 {
            let mut stream = connect_narrow(addr(&runtime), 4096);
            stream.write_all(b"go").expect("write");
            expect(&mut stream, b"g");
            // The lease is sent in part, and queued in full behind what is stuck.
            assert!(runtime.metrics().total().buffers_out > 0);
            reset(stream);
            let (_, reason) = closed(&told);
            assert_eq!(reason, CloseReason::Reset);
            empties(&runtime);
        }
        stop(runtime);
    }
}

#[test]
fn a_graceful_close_delivers_everything_that_is_queued_then_fin() {
    for descriptors in BOTH {
        let (seen, told) = channel();
        let make = move |_| {
            Hooks::telling(&seen).data(|conn, _| {
                if conn.unsent() > 0 {
                    return;
                }
                for seed in 0..100 {
                    conn.send(pattern(seed, 20_000)).expect("room");
                }
                conn.close();
                assert_eq!(conn.send("late").expect_err("closing").kind, SendErrorKind::Closed);
            })
        };
        let config = WorkerConfig { descriptors, ..WorkerConfig::default() };
        let Some(runtime) = start(Runtime::builder().worker(config).listen(narrow()), make) else {
            return;
        };
        let mut stream = connect_narrow(addr(&runtime), 16 << 10);
        stream.write_all(b"everything, please").expect("write");
        let id = opened(&told);
        silent(&told, Duration::from_millis(50));
        // What the client sends meanwhile must not turn the FIN into a reset that destroys the rest.
        stream.write_all(&pattern(500, 10_000)).expect("the server still reads");
        let wanted: Vec<u8> = (0..100).flat_map(|seed| pattern(seed, 20_000)).collect();
        let mut got = vec![0; wanted.len()];
        stream.read_exact(&mut got[..1_000_000]).expect("the first half");
        stream.write_all(&pattern(501, 10_000)).expect("the server still reads");
        stream.read_exact(&mut got[1_000_000..]).expect("the second half");
        same_bytes(&got, &wanted, "what was queued");
        assert_eq!(stream.read(&mut [0]).expect("a FIN, not a reset"), 0);
        silent(&told, Duration::from_millis(20));
        drop(stream);
        assert_eq!(next(&told), Seen::Closed(id, CloseReason::Local));
        empties(&runtime);
        stop(runtime);
    }
}

#[test]
fn an_abort_reaches_the_peer_as_a_reset() {
    for descriptors in BOTH {
        let (seen, told) = channel();
        let make = move |_| {
            Hooks::telling(&seen).data(|conn, _| {
                conn.send("never sent").expect("open");
                conn.abort();
                assert_eq!(conn.send("late").expect_err("aborted").kind, SendErrorKind::Closed);
            })
        };
        let Some(runtime) = start(builder(descriptors), make) else { return };
        for _ in 0..20 {
            let mut stream = connect(addr(&runtime));
            stream.write_all(b"x").expect("write");
            assert_eq!(end_of(&mut stream), (End::Reset, 0));
            assert_eq!(closed(&told).1, CloseReason::Local);
        }
        empties(&runtime);
        stop(runtime);
    }
}

/// An abort ends the callbacks at once, also when more data (or the end of it) is there already.
#[test]
fn nothing_is_told_after_an_abort_but_the_end() {
    for descriptors in BOTH {
        let (seen, told) = channel();
        let buffers = corelane::BufferConfig {
            size: 64,
            count: 64,
            send_count: 0,
            ..corelane::BufferConfig::default()
        };
        let config = WorkerConfig { descriptors, buffers, ..WorkerConfig::default() };
        let make = move |_| {
            let seen = seen.clone();
            Hooks::telling(&seen).data(move |conn, data| {
                seen.send(Seen::Data(conn.id(), data.to_vec())).expect("the test listens");
                conn.abort();
            })
        };
        let builder = Runtime::builder().worker(config).listen(any_port());
        let Some(runtime) = start(builder, make) else { return };
        for seed in 0..20 {
            let bytes = pattern(seed, 1000);
            let mut stream = connect(addr(&runtime));
            // May be reset in between.
            let _ = stream.write_all(&bytes);
            let _ = stream.shutdown(Shutdown::Write);
            let id = opened(&told);
            assert_eq!(next(&told), Seen::Data(id, bytes[..64].to_vec()));
            assert_eq!(next(&told), Seen::Closed(id, CloseReason::Local));
        }
        empties(&runtime);
        stop(runtime);
    }
}

#[test]
fn a_close_with_a_limit_is_told_and_counted_as_one() {
    for descriptors in BOTH {
        let (seen, told) = channel();
        let make = move |_| {
            Hooks::telling(&seen).data(|conn, data| {
                if data.len() > 10 {
                    conn.send("too long\n").expect("open");
                    conn.close_with(CloseReason::Limit);
                }
            })
        };
        let Some(runtime) = start(builder(descriptors), make) else { return };
        let mut stream = connect(addr(&runtime));
        stream.write_all(b"a line that is too long\n").expect("write");
        assert_eq!(read_to_eof(&mut stream), b"too long\n");
        drop(stream);
        assert_eq!(closed(&told).1, CloseReason::Limit);
        let total = empties(&runtime);
        assert_eq!(total.closed[CloseReason::Limit.index()], 1);
        assert_eq!(total.closed_total(), 1);
        stop(runtime);
    }
}

#[test]
fn a_full_send_queue_gives_the_payload_back_and_everything_taken_arrives() {
    let (seen, told) = channel();
    let config = WorkerConfig {
        high_water: 64 << 10,
        low_water: 16 << 10,
        send_limit: 128 << 10,
        ..WorkerConfig::default()
    };
    // Sends numbered pieces until refused; then again whenever it may; then closes.
    let fill = |conn: &mut corelane::Conn<'_, Hooks<u32>>| {
        while *conn.state() < 200 {
            let number = *conn.state();
            match conn.send(vec![number as u8; 10_000]) {
                Ok(()) => *conn.state() += 1,
                Err(refused) => {
                    assert_eq!(refused.kind, SendErrorKind::Full);
                    assert_eq!(refused.payload.as_slice(), vec![number as u8; 10_000]);
                    assert!(conn.is_congested() && conn.unsent() >= 128 << 10);
                    return;
                }
            }
        }
        conn.close();
    };
    let make = move |_| {
        let seen = seen.clone();
        Hooks::new(|| 0)
            .data(move |conn, _| fill(conn))
            .writable(move |conn| {
                assert!(conn.unsent() <= 16 << 10, "{} unsent", conn.unsent());
                fill(conn);
            })
            .closed(move |_, end| seen.send(end.reason).expect("the test listens"))
    };
    let Some(runtime) = start(Runtime::builder().worker(config).listen(narrow()), make) else { return };
    let mut stream = connect_narrow(addr(&runtime), 8192);
    stream.write_all(b"go").expect("write");
    let total = counters(&runtime, "a refusal", |total| total.send_refusals > 0);
    assert!(total.congested > 0);
    let wanted: Vec<u8> = (0..200u8).flat_map(|n| vec![n; 10_000]).collect();
    same_bytes(&read_to_eof(&mut stream), &wanted, "what was taken");
    drop(stream);
    assert_eq!(told.recv_timeout(PATIENCE).expect("an end"), CloseReason::Local);
    stop(runtime);
}

#[test]
fn a_graceful_close_towards_a_peer_that_does_not_read_ends_by_reset_in_time() {
    for descriptors in BOTH {
        let (seen, told) = channel();
        let close_timeout = Duration::from_millis(200);
        let config = WorkerConfig { descriptors, close_timeout, ..WorkerConfig::default() };
        let make = move |_| {
            Hooks::telling(&seen).data(|conn, _| {
                conn.send(vec![1; 4 << 20]).expect("room");
                conn.close();
            })
        };
        let Some(runtime) = start(Runtime::builder().worker(config).listen(narrow()), make) else {
            return;
        };
        let mut stream = connect_narrow(addr(&runtime), 4096);
        stream.write_all(b"x").expect("write");
        assert_eq!(closed(&told).1, CloseReason::CloseTimeout);
        assert_eq!(end_of(&mut stream).0, End::Reset);
        empties(&runtime);
        stop(runtime);
    }
}

#[test]
fn a_peer_that_never_closes_is_let_go_of_after_the_close_timeout() {
    for descriptors in BOTH {
        let (seen, told) = channel();
        let close_timeout = Duration::from_millis(200);
        let config = WorkerConfig { descriptors, close_timeout, ..WorkerConfig::default() };
        let make = move |_| Hooks::telling(&seen).data(|conn, _| conn.close());
        let builder = Runtime::builder().worker(config).listen(any_port());
        let Some(runtime) = start(builder, make) else { return };
        let mut stream = connect(addr(&runtime));
        stream.write_all(b"x").expect("write");
        assert_eq!(read_to_eof(&mut stream), b"");
        // The stream stays open: the server does not wait for ever.
        assert_eq!(closed(&told).1, CloseReason::Local);
        empties(&runtime);
        stop(runtime);
    }
}

#[test]
fn a_refused_connection_sees_its_end_and_no_close_is_told() {
    for descriptors in BOTH {
        let (seen, told) = channel();
        let make = move |_| Hooks::telling(&seen).accept(|_, _| None);
        let Some(runtime) = start(builder(descriptors), make) else { return };
        for _ in 0..50 {
            let mut stream = connect(addr(&runtime));
            assert_eq!(read_to_eof(&mut stream), b"");
        }
        let total = empties(&runtime);
        assert_eq!((total.accepted, total.refused, total.closed_total()), (50, 50, 0));
        assert!(told.try_recv().is_err(), "nothing is told of a refused connection");
        stop(runtime);
    }
}
