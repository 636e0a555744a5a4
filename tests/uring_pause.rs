//! Receiving that was held up, by the handler or by congestion: nothing is told meanwhile, nothing is
//! lost, and what is behind the data (its end, a reset) is told after it.
#![cfg(target_os = "linux")]

mod support;

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use corelane::{Builder, CloseReason, Descriptors, ListenerConfig, Runtime, WorkerConfig};
use support::*;

const BOTH: [Descriptors; 2] = [Descriptors::Direct, Descriptors::Fd];

fn builder(descriptors: Descriptors) -> Builder {
    let config = WorkerConfig { descriptors, ..WorkerConfig::default() };
    Runtime::builder().worker(config).listen(any_port())
}

#[test]
fn a_paused_connection_gets_no_data_and_loses_none() {
    for descriptors in BOTH {
        let (seen, told) = channel();
        let buffers = corelane::BufferConfig {
            size: 1024,
            count: 32,
            send_count: 0,
            ..corelane::BufferConfig::default()
        };
        let config = WorkerConfig { descriptors, buffers, ..WorkerConfig::default() };
        // Pauses itself at every piece.
        let make = move |_| {
            let seen = seen.clone();
            Hooks::telling(&seen).data(move |conn, data| {
                conn.pause();
                seen.send(Seen::Data(conn.id(), data.to_vec())).expect("the test listens");
            })
        };
        let builder = Runtime::builder().worker(config).listen(any_port());
        let Some(runtime) = start(builder, make) else { return };
        let remote = runtime.remote();
        let mut stream = connect(addr(&runtime));
        let id = opened(&told);
        let bytes = pattern(9, 300_000);
        thread::scope(|scope| {
            let writer = scope.spawn(|| {
                stream.write_all(&bytes).expect("write");
                stream.shutdown(Shutdown::Write).expect("half-close");
            });
            let mut got = Vec::new();
            let mut pieces = 0;
            while got.len() < bytes.len() {
                match next(&told) {
                    Seen::Data(_, data) => got.extend(data),
                    other => panic!("{other:?}"),
                }
                pieces += 1;
                if pieces % 50 == 1 {
                    // Data waits, in the pool and in the kernel, and stays there.
                    silent(&told, Duration::from_millis(10));
                }
                on_conn(&remote, id, |conn| conn.resume());
            }
            same_bytes(&got, &bytes, "what was sent");
            writer.join().expect("the writer");
        });
        // The end of data comes after the data, and it waits as well.
        assert_eq!(next(&told), Seen::Eof(id));
        assert_eq!(next(&told), Seen::Closed(id, CloseReason::Eof));
        stop(runtime);
    }
}

#[test]
fn the_end_of_data_waits_while_paused() {
    let (seen, told) = channel();
    let make = move |_| Hooks::telling(&seen);
    let Some(runtime) = start(builder(Descriptors::Direct), make) else { return };
    let remote = runtime.remote();
    let mut stream = connect(addr(&runtime));
    let id = opened(&told);
    on_conn(&remote, id, |conn| conn.pause());
    stream.write_all(b"wait").expect("write");
    stream.shutdown(Shutdown::Write).expect("half-close");
    silent(&told, Duration::from_millis(50));
    on_conn(&remote, id, |conn| conn.resume());
    assert_eq!(next(&told), Seen::Data(id, b"wait".to_vec()));
    assert_eq!(next(&told), Seen::Eof(id));
    assert_eq!(next(&told), Seen::Closed(id, CloseReason::Eof));
    stop(runtime);
}

#[test]
fn pausing_and_resuming_at_once_loses_nothing() {
    for descriptors in BOTH {
        let (seen, told) = channel();
        let make = move |_| {
            let seen = seen.clone();
            let mut rng = Rng::new(3);
            Hooks::telling(&seen)
                .data(move |conn, data| {
                    seen.send(Seen::Data(conn.id(), data.to_vec())).expect("the test listens");
                    for _ in 0..rng.within(0, 3) {
                        conn.pause();
                        conn.resume();
                    }
                    if rng.one_in(3) {
                        conn.pause();
                        conn.set_timer(Some(Duration::from_millis(1)));
                    }
                })
                .timer(|conn| {
                    conn.resume();
                    conn.pause();
                    conn.resume();
                })
        };
        let Some(runtime) = start(builder(descriptors), make) else { return };
        let mut stream = connect(addr(&runtime));
        let bytes = pattern(4, 2 << 20);
        stream.write_all(&bytes).expect("write");
        drop(stream);
        let id = opened(&told);
        let mut got = Vec::new();
        loop {
            match next(&told) {
                Seen::Data(_, data) => got.extend(data),
                Seen::Eof(_) => break,
                other => panic!("{other:?}"),
            }
        }
        same_bytes(&got, &bytes, "what was sent");
        assert_eq!(next(&told), Seen::Closed(id, CloseReason::Eof));
        stop(runtime);
    }
}

/// A connection that was held up, by the handler or by a pool that was used up, has much data waiting
/// and behind it its end: everything is delivered, then the end is told, without a time limit's help.
fn end_behind_data(ending: fn(TcpStream), reason: CloseReason) {
    for descriptors in BOTH {
        for pieces in [1, 31, 32, 33, 34, 40, 300] {
            let (seen, told) = channel();
            let buffers = corelane::BufferConfig {
                size: 1024,
                count: 1024,
                send_count: 0,
                ..corelane::BufferConfig::default()
            };
            let config = WorkerConfig { descriptors, buffers, ..WorkerConfig::default() };
            let mut listener = ListenerConfig::new(any_port());
            listener.options.recv_buffer = Some(1 << 20);
            let builder = Runtime::builder().worker(config).listen(listener);
            let Some(runtime) = start(builder, move |_| Hooks::telling(&seen)) else { return };
            let remote = runtime.remote();
            let mut stream = connect(addr(&runtime));
            let id = opened(&told);
            on_conn(&remote, id, |conn| conn.pause());
            // The receive, if one was armed, has ended when the worker sleeps again.
            sleeps(&runtime, "paused");
            let bytes = pattern(5, pieces * 1024);
            stream.write_all(&bytes).expect("write");
            eventually("it waits in the server's kernel", || unacknowledged(&stream) == 0);
            ending(stream);
            on_conn(&remote, id, |conn| conn.resume());
            let mut got = Vec::new();
            let end = loop {
                match next(&told) {
                    Seen::Data(_, data) => got.extend(data),
                    Seen::Eof(_) => {}
                    end => break end,
                }
            };
            assert_eq!(end, Seen::Closed(id, reason), "behind {pieces} pieces");
            same_bytes(&got, &bytes, "what was sent before the end");
            empties(&runtime);
            stop(runtime);
        }
    }
}

#[test]
fn a_reset_behind_much_data_is_told_when_receiving_goes_on() {
    end_behind_data(reset, CloseReason::Reset);
}

#[test]
fn a_fin_behind_much_data_is_told_when_receiving_goes_on() {
    end_behind_data(drop, CloseReason::Eof);
}
