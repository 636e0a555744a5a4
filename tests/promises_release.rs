//! Promises 1 to 4 on the real kernel: memory that the kernel knows is not handed out before the last
//! completion, shutdown gets everything back, a late completion never reaches a slot's next
//! connection, and a buffer comes back on every path.
#![cfg(target_os = "linux")]

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::thread;

use corelane::{BufferConfig, CloseReason, ConnId, Descriptors, ListenerConfig, Runtime, WorkerConfig};
use support::*;

/// What the server does with what a client sends: its first byte says it.
fn obedient() -> Hooks<Option<u8>> {
    Hooks::new(|| None)
        .data(|conn, data| {
            let order = *conn.state().get_or_insert(data[0]);
            let last = data.last() == Some(&b'.');
            match order {
                b'a' => return conn.abort(),
                b'c' if last => {
                    let _ = conn.send(data);
                    return conn.close();
                }
                b'l' if last => return conn.close_with(CloseReason::Limit),
                b'h' if last => {
                    let _ = conn.send(data);
                    return conn.shutdown_write();
                }
                b'p' => {
                    conn.pause();
                    conn.set_timer(Some(std::time::Duration::from_millis(1)));
                }
                _ => {}
            }
            // Refused when the connection is closing, which is part of the game.
            let _ = conn.send(data);
        })
        .timer(|conn| conn.resume())
}

/// One connection, used and ended in one of many ways. The last byte that is sent is a dot.
fn cycle(addr: SocketAddr, rng: &mut Rng) {
    let mut stream = connect(addr);
    if rng.one_in(10) {
        return if rng.one_in(2) { reset(stream) } else { drop(stream) };
    }
    let size = if rng.one_in(8) { rng.within(1, 60_000) } else { rng.within(1, 300) };
    let mut bytes = pattern(rng.next(), size);
    bytes.iter_mut().filter(|byte| **byte == b'.').for_each(|byte| *byte = b'-');
    bytes[0] = b"eeepachl"[rng.within(0, 7)];
    bytes[size - 1] = b'.';
    let order = bytes[0];
    if stream.write_all(&bytes).is_err() {
        // Only who was aborted may be.
        assert_eq!(order, b'a');
        return;
    }
    match rng.within(0, 5) {
        // Leave without waiting.
        0 => drop(stream),
        1 => reset(stream),
        // Half-close, then read to whatever the end is.
        2 => {
            // Refused when the server has reset already.
            let _ = stream.shutdown(Shutdown::Write);
            let mut got = Vec::new();
            let result = stream.read_to_end(&mut got);
            if order == b'e' || order == b'p' {
                result.expect("no reset");
                same_bytes(&got, &bytes, "the echo before the end");
            }
        }
        // Read some of the echo, then leave.
        3 => {
            let _ = stream.read(&mut vec![0; size.div_ceil(2)]);
            if rng.one_in(2) { reset(stream) } else { drop(stream) }
        }
        _ if matches!(order, b'e' | b'p') && size > 1 => expect(&mut stream, &bytes),
        // The server ends it: read to there.
        _ if matches!(order, b'a' | b'c' | b'h' | b'l') => {
            let _ = stream.read_to_end(&mut Vec::new());
        }
        _ => {}
    }
}

fn churn(descriptors: Descriptors, cycles: usize) {
    const CLIENTS: usize = 4;
    let buffers = BufferConfig { size: 1024, count: 64, send_count: 4, ..BufferConfig::default() };
    let config = WorkerConfig { descriptors, buffers, max_connections: 4000, ..WorkerConfig::default() };
    let opened = Arc::new(AtomicU64::new(0));
    let ended = Arc::new(AtomicU64::new(0));
    let (opening, ending) = (opened.clone(), ended.clone());
    let make = move |_| {
        let (opened, ended) = (opening.clone(), ending.clone());
        obedient()
            .accept(move |_, _| {
                opened.fetch_add(1, Ordering::Relaxed);
                Some(None)
            })
            .closed(move |_, _| {
                ended.fetch_add(1, Ordering::Relaxed);
            })
    };
    let builder = Runtime::builder().worker(config).listen(any_port());
    let Some(runtime) = start(builder, make) else { return };
    let addr = addr(&runtime);
    thread::scope(|scope| {
        for client in 0..CLIENTS {
            scope.spawn(move || {
                let mut rng = Rng::new(client as u64 + 1);
                for _ in 0..cycles / CLIENTS {
                    cycle(addr, &mut rng);
                }
            });
        }
    });
    let total = empties(&runtime);
    assert_eq!(total.accepted, cycles as u64);
    assert_eq!(opened.load(Ordering::Relaxed), cycles as u64);
    assert_eq!(ended.load(Ordering::Relaxed), cycles as u64);
    assert_eq!(total.closed_total(), cycles as u64);
    for reason in [CloseReason::Eof, CloseReason::Reset, CloseReason::Local, CloseReason::Limit] {
        assert!(total.closed[reason.index()] > 0, "no connection ended by: {reason}");
    }
    assert_eq!(total.closed[CloseReason::CloseTimeout.index()], 0);
    // It works as on the first day.
    exchange(&mut connect(addr), &[b"e".to_vec(), pattern(1, 50_000)].concat());
    let report = stop(runtime);
    assert!(report.finished + report.aborted <= 1, "{report}");
}

#[test]
fn ten_thousand_random_lives_leave_nothing_behind_with_direct_descriptors() {
    churn(Descriptors::Direct, 10_000);
}

#[test]
fn ten_thousand_random_lives_leave_nothing_behind_with_ordinary_descriptors() {
    let before = open_descriptors();
    churn(Descriptors::Fd, 10_000);
    // Other tests of this program run beside this one, with some hundreds of sockets at most.
    let after = open_descriptors();
    assert!(after < before + 1000, "{before} descriptors before, {after} after");
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

/// A name that outlived its connection names nothing: what is sent to it never reaches who has the
/// slot now.
#[test]
fn a_stale_name_never_reaches_the_slots_next_connection() {
    let (seen, told) = channel();
    let config = WorkerConfig { max_connections: 8, mailbox: 1 << 16, ..WorkerConfig::default() };
    let builder = Runtime::builder().worker(config).listen(any_port());
    let Some(runtime) = start(builder, move |_| Hooks::telling(&seen)) else { return };
    let remote = runtime.remote();
    let mut stale: Vec<ConnId> = Vec::new();
    for round in 0..300u32 {
        let mut stream = connect(addr(&runtime));
        let id = opened(&told);
        assert!(!stale.contains(&id), "the name {id} was given twice");
        for &old in stale.iter().rev().take(20) {
            remote.send(old, "not for you").expect("room");
            remote.close(old).expect("room");
            remote.abort(old).expect("room");
        }
        assert!(ask(&remote, 0, {
            let stale = stale.clone();
            move |cx| stale.iter().all(|&old| cx.conn(old).is_none()) && cx.conn(id).is_some()
        }));
        remote.send(id, format!("{round}")).expect("room");
        remote.close(id).expect("room");
        assert_eq!(read_to_eof(&mut stream), format!("{round}").as_bytes());
        drop(stream);
        assert_eq!(closed(&told), (id, CloseReason::Local));
        stale.push(id);
        // The same slot again and again: only the generation tells the connections apart.
        counters(&runtime, "a vacant slot", |total| total.connections == 0);
    }
    let slots: std::collections::BTreeSet<_> =
        stale.iter().map(|id| id.to_string().split('.').nth(1).map(str::to_owned)).collect();
    assert_eq!(slots.len(), 1, "the slots were not reused: this test shows nothing");
    stop(runtime);
}

/// Late completions on purpose: every connection is reset by this side with a receive armed and a
/// send stuck in flight, and its slot is taken again at once.
#[test]
fn a_reset_with_operations_in_flight_gives_everything_back_before_the_slot_is_reused() {
    for descriptors in [Descriptors::Direct, Descriptors::Fd] {
        let config = WorkerConfig {
            descriptors,
            max_connections: 4,
            // The order to reset must be heard while the send is stuck.
            high_water: 1 << 20,
            ..WorkerConfig::default()
        };
        let mut listener = ListenerConfig::new(any_port());
        listener.options.send_buffer = Some(4096);
        listener.backlog = 128;
        let make = |_| {
            Hooks::plain().data(|conn, data| {
                if data[0] == b'a' {
                    return conn.abort();
                }
                let _ = conn.send(data);
                let _ = conn.send(vec![b'x'; 300_000]);
            })
        };
        let builder = Runtime::builder().worker(config).listen(listener);
        let Some(runtime) = start(builder, make) else { return };
        for round in 0..100u64 {
            let mut streams: Vec<_> = (0..4).map(|_| connect_narrow(addr(&runtime), 4096)).collect();
            let sent = pattern(round, 100).into_iter().map(|byte| byte | 0x80).collect::<Vec<_>>();
            for stream in &mut streams {
                stream.write_all(&sent).expect("write");
                expect(stream, &sent);
            }
            for stream in &mut streams {
                stream.write_all(b"abort").expect("write");
            }
            for stream in &mut streams {
                let (end, bytes) = end_of(stream);
                assert_eq!(end, End::Reset);
                assert!(bytes < 300_000, "a stuck send was finished");
            }
        }
        let total = empties(&runtime);
        assert_eq!(total.closed[CloseReason::Local.index()], 400);
        stop(runtime);
    }
}

#[test]
fn buffers_come_back_when_data_arrives_on_a_connection_that_is_being_closed() {
    let buffers = BufferConfig { size: 64, count: 8, send_count: 0, ..BufferConfig::default() };
    let config = WorkerConfig { buffers, ..WorkerConfig::default() };
    // Closes at the first data, while more is on the way.
    let make = |_| {
        Hooks::plain().data(|conn, _| match conn.id().to_string().len() % 2 {
            0 => conn.close(),
            _ => conn.abort(),
        })
    };
    let builder = Runtime::builder().worker(config).listen(any_port());
    let Some(runtime) = start(builder, make) else { return };
    for seed in 0..200 {
        let mut stream = connect(addr(&runtime));
        // The rest of it may find the connection reset.
        let _ = stream.write_all(&pattern(seed, 5000));
        let _ = stream.shutdown(Shutdown::Write);
        let _ = end_of(&mut stream);
    }
    empties(&runtime);
    stop(runtime);
}

#[test]
fn a_lease_may_be_kept_beyond_its_connection() {
    let buffers = BufferConfig { size: 256, count: 8, send_count: 2, ..BufferConfig::default() };
    let config = WorkerConfig { buffers, ..WorkerConfig::default() };
    let (seen, told) = channel();
    let make = move |_| {
        let seen = seen.clone();
        let mut kept = Vec::new();
        Hooks::plain()
            .data(move |_, data| {
                let sum: u64 = data.iter().map(|&byte| u64::from(byte)).sum();
                // The lease is dropped with the handler at the latest.
                kept.push((data, sum));
                assert!(
                    kept.iter()
                        .all(|(data, sum)| { *sum == data.iter().map(|&byte| u64::from(byte)).sum::<u64>() })
                );
            })
            .closed(move |_, _| seen.send(()).expect("the test listens"))
    };
    let builder = Runtime::builder().worker(config).listen(any_port());
    let Some(runtime) = start(builder, make) else { return };
    for seed in 0..4 {
        let mut stream = connect(addr(&runtime));
        stream.write_all(&pattern(seed, 200)).expect("write");
        counters(&runtime, "the data", |total| total.messages > seed);
        drop(stream);
        told.recv_timeout(PATIENCE).expect("a close");
    }
    let total = counters(&runtime, "no connection", |total| total.connections == 0);
    assert_eq!(total.buffers_out, 4);
    let report = runtime.shutdown(PATIENCE).expect("a clean shutdown");
    assert_eq!((report.ops_in_kernel, report.buffers_outstanding), (0, 0), "{report}");
}

#[test]
fn composed_buffers_come_back_when_sent_when_dropped_and_when_the_peer_resets() {
    let buffers = BufferConfig { size: 1024, count: 8, send_count: 4, ..BufferConfig::default() };
    let config = WorkerConfig { buffers, ..WorkerConfig::default() };
    let make = |_| {
        Hooks::plain().data(|conn, data| {
            for _ in 0..data.len() {
                let Some(mut reply) = conn.cx().alloc() else {
                    let _ = conn.send("none left\n");
                    return;
                };
                reply.put(b"composed\n");
                let _ = conn.send(reply.freeze());
                // And one that nobody sends.
                drop(conn.cx().alloc());
            }
        })
    };
    let builder = Runtime::builder().worker(config).listen(any_port());
    let Some(runtime) = start(builder, make) else { return };
    let mut stream = connect(addr(&runtime));
    for _ in 0..50 {
        stream.write_all(b"12").expect("write");
        expect(&mut stream, b"composed\ncomposed\n");
    }
    stream.write_all(b"12345").expect("write");
    expect(&mut stream, b"composed\ncomposed\ncomposed\ncomposed\nnone left\n");
    stream.write_all(b"123").expect("write");
    reset(stream);
    let total = empties(&runtime);
    assert_eq!(total.closed[CloseReason::Reset.index()], 1);
    stop(runtime);
}
