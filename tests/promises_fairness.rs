//! Promise 6: one busy connection (or mailbox, or burst of new connections) never starves the others.
//! Measured in callbacks and bytes, not in time.
#![cfg(target_os = "linux")]

mod support;

use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use corelane::{BufferConfig, Descriptors, ListenerConfig, Runtime, WorkerConfig};
use support::*;

/// Everybody's data waits in the kernel, the flooder's first and a thousand times as much: once all
/// may be received from, the others are heard after a bounded number of the flooder's pieces.
#[test]
fn quiet_connections_are_heard_after_a_bounded_number_of_a_flooders_pieces() {
    const QUIET: usize = 100;
    for descriptors in [Descriptors::Direct, Descriptors::Fd] {
        let buffers = BufferConfig { size: 1024, count: 256, send_count: 0, ..BufferConfig::default() };
        let config = WorkerConfig { descriptors, buffers, ..WorkerConfig::default() };
        let mut listener = ListenerConfig::new(any_port());
        listener.options.recv_buffer = Some(2 << 20);
        let (heard, told) = channel();
        // Paused from the start, and told in the order of what comes.
        let make = move |_| {
            let heard = heard.clone();
            let mut flood = 0u64;
            Hooks::plain().data(move |conn, data| {
                match data[0] {
                    b'f' => flood += 1,
                    _ => heard.send(flood).expect("the test listens"),
                }
                assert!(data.len() <= 1024);
                let _ = conn.send(data.slice(..1));
            })
        };
        let builder = Runtime::builder().worker(config).listen(listener);
        let Some(runtime) = start(builder, make) else { return };
        let addr = addr(&runtime);
        let mut flooder = connect(addr);
        counters(&runtime, "the flooder", |total| total.connections == 1);
        let mut quiet: Vec<_> = (0..QUIET).map(|_| connect(addr)).collect();
        counters(&runtime, "all of them", |total| total.connections == 1 + QUIET as u64);
        let remote = runtime.remote();
        let pause = |on: bool| {
            ask(&remote, 0, move |cx| {
                // In the order of slots: the flooder is the first.
                let ids: Vec<_> = cx.ids().collect();
                for id in ids {
                    let mut conn = cx.conn(id).expect("open");
                    if on { conn.pause() } else { conn.resume() }
                }
            });
        };
        pause(true);
        sleeps(&runtime, "all paused");
        let written = write_until_stuck(&mut flooder, &vec![b'f'; 8 << 20]);
        assert!(written > 1 << 20, "only {written} bytes wait");
        for stream in &mut quiet {
            stream.write_all(b"q").expect("write");
        }
        eventually("all of it in the server's kernel", || {
            quiet.iter().all(|stream| unacknowledged(stream) == 0)
        });
        pause(false);
        let mut before: Vec<_> =
            (0..QUIET).map(|_| told.recv_timeout(PATIENCE).expect("a quiet one")).collect();
        before.sort_unstable();
        // The kernel takes a connection's turn after 32 pieces; a turn or two of that.
        let worst = before[QUIET - 1];
        assert!(worst <= 200, "the last quiet one waited for {worst} of the flooder's pieces");
        drop((flooder, quiet));
        empties(&runtime);
        stop(runtime);
    }
}

/// Under a flood that never ends, everybody is served, for a bounded number of the flooder's bytes.
#[test]
fn quiet_connections_get_their_echo_while_a_flood_goes_on() {
    const QUIET: usize = 100;
    const ROUNDS: u64 = 10;
    let Some(runtime) = start(Runtime::builder().listen(any_port()), |_| Hooks::echo()) else { return };
    let addr = addr(&runtime);
    let (over, echoed) = (AtomicBool::new(false), AtomicU64::new(0));
    let flooder = connect(addr);
    thread::scope(|scope| {
        scope.spawn(|| {
            let bytes = vec![b'f'; 256 << 10];
            while !over.load(Ordering::Relaxed) {
                (&flooder).write_all(&bytes).expect("write");
            }
            flooder.shutdown(std::net::Shutdown::Write).expect("half-close");
        });
        scope.spawn(|| {
            let mut room = vec![0; 256 << 10];
            while let Ok(n @ 1..) = (&flooder).read(&mut room) {
                echoed.fetch_add(n as u64, Ordering::Relaxed);
            }
        });
        eventually("the flood", || echoed.load(Ordering::Relaxed) > 1 << 20);
        let quiet: Vec<_> = (0..QUIET).map(|_| connect(addr)).collect();
        let before = runtime.metrics().total();
        for round in 0..ROUNDS {
            for (index, stream) in quiet.iter().enumerate() {
                exchange(stream, &pattern(round * 1000 + index as u64, 64));
            }
        }
        let after = runtime.metrics().total();
        over.store(true, Ordering::Relaxed);
        let exchanges = QUIET as u64 * ROUNDS;
        let bytes = (after.bytes_received - before.bytes_received) / exchanges;
        let turns = (after.turns - before.turns) / exchanges;
        println!("per exchange: {bytes} bytes of flood, {turns} turns");
        assert!(bytes > 1000, "there was no flood: this shows nothing");
        // The client itself waits for a processor with three other threads: most of it is that.
        assert!(bytes < 64 << 20, "{bytes} bytes of flood per exchange");
        assert!(turns < 2000, "{turns} turns per exchange");
    });
    drop(flooder);
    empties(&runtime);
    stop(runtime);
}

/// Holds worker 0 in a callback until the returned function is called.
fn hold(runtime: &Runtime<Task<()>>) -> impl FnOnce() + use<> {
    let (here, there) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let (in_callback, go_on) = (here.clone(), there.clone());
    tell(&runtime.remote(), 0, move |_| {
        in_callback.wait();
        go_on.wait();
    });
    here.wait();
    move || {
        there.wait();
    }
}

#[test]
fn a_burst_of_new_connections_does_not_hold_up_who_is_connected() {
    const BUDGET: u64 = 16;
    let (heard, told) = channel();
    let make = move |_| {
        let heard = heard.clone();
        let accepted = std::rc::Rc::new(std::cell::Cell::new(0u64));
        let counting = accepted.clone();
        Hooks::plain()
            .accept(move |_, _| {
                counting.set(counting.get() + 1);
                Some(())
            })
            .data(move |_, _| heard.send(accepted.get()).expect("the test listens"))
    };
    let config = WorkerConfig { accept_budget: BUDGET as u32, ..WorkerConfig::default() };
    let builder = Runtime::builder().worker(config).listen(any_port());
    let Some(runtime) = start(builder, make) else { return };
    let mut first = connect(addr(&runtime));
    counters(&runtime, "the first", |total| total.connections == 1);
    let release = hold(&runtime);
    let burst: Vec<_> = (0..400).map(|_| connect(addr(&runtime))).collect();
    first.write_all(b"x").expect("write");
    eventually("it waits in the server's kernel", || unacknowledged(&first) == 0);
    release();
    let before = told.recv_timeout(PATIENCE).expect("the first one's data");
    assert!(before <= 1 + 3 * BUDGET, "heard after {before} new connections");
    counters(&runtime, "all of the burst", |total| total.connections == 401);
    drop((first, burst));
    empties(&runtime);
    stop(runtime);
}

#[test]
fn a_flood_of_messages_does_not_hold_up_connections() {
    const BUDGET: u64 = 64;
    let (heard, told) = channel();
    let ran = Arc::new(AtomicU64::new(0));
    let seen = ran.clone();
    let make = move |_| {
        let (heard, ran) = (heard.clone(), seen.clone());
        Hooks::plain().data(move |_, _| heard.send(ran.load(Ordering::Relaxed)).expect("the test listens"))
    };
    let config = WorkerConfig { turn_budget: BUDGET as u32, mailbox: 1 << 16, ..WorkerConfig::default() };
    let builder = Runtime::builder().worker(config).listen(any_port());
    let Some(runtime) = start(builder, make) else { return };
    let mut stream = connect(addr(&runtime));
    counters(&runtime, "the connection", |total| total.connections == 1);
    let release = hold(&runtime);
    for _ in 0..20_000 {
        let ran = ran.clone();
        tell(&runtime.remote(), 0, move |_| {
            ran.fetch_add(1, Ordering::Relaxed);
        });
    }
    stream.write_all(b"x").expect("write");
    eventually("it waits in the server's kernel", || unacknowledged(&stream) == 0);
    release();
    let before = told.recv_timeout(PATIENCE).expect("the data");
    assert!(before <= 3 * BUDGET, "heard after {before} messages");
    eventually("all messages", || ran.load(Ordering::Relaxed) == 20_000);
    drop(stream);
    empties(&runtime);
    stop(runtime);
}

/// A broadcast to thousands goes out in portions.
#[test]
fn a_broadcast_does_not_hold_up_an_echo() {
    const CONNECTIONS: usize = 3000;
    let (heard, told) = channel();
    let make = move |_| {
        let heard = heard.clone();
        Hooks::plain().data(move |conn, _| {
            let ids: Vec<_> = conn.cx().ids().collect();
            let reached = ids.iter().filter(|&&id| conn.cx().conn(id).expect("open").unsent() > 0).count();
            heard.send(reached).expect("the test listens");
        })
    };
    // High water above what is sent: nobody is to be paused by the broadcast itself.
    let config = WorkerConfig { max_connections: 6000, high_water: 1 << 20, ..WorkerConfig::default() };
    let mut listener = ListenerConfig::new(any_port());
    listener.options.send_buffer = Some(4096);
    let builder = Runtime::builder().worker(config).listen(listener);
    let Some(runtime) = start(builder, make) else { return };
    let mut streams: Vec<_> = (0..CONNECTIONS).map(|_| connect(addr(&runtime))).collect();
    counters(&runtime, "all of them", |total| total.connections == CONNECTIONS as u64);
    let release = hold(&runtime);
    // More than a peer's window takes at once, so that it shows as unsent.
    let bytes: Arc<[u8]> = pattern(1, 400_000).into();
    runtime.remote().broadcast(bytes.clone()).expect("room");
    streams[0].write_all(b"x").expect("write");
    eventually("it waits in the server's kernel", || unacknowledged(&streams[0]) == 0);
    release();
    let reached = told.recv_timeout(PATIENCE).expect("the data");
    assert!(reached <= 1600, "heard when the broadcast had reached {reached}");
    for (index, stream) in streams.iter().enumerate().step_by(500) {
        let mut got = vec![0; bytes.len()];
        let mut stream = stream;
        stream.read_exact(&mut got).unwrap_or_else(|error| panic!("{index}: {error}"));
        same_bytes(&got, &bytes, "the broadcast");
    }
    drop(streams);
    empties(&runtime);
    let report = runtime.shutdown(Duration::from_secs(10)).expect("a clean shutdown");
    nothing_left(&report);
    assert_eq!(Arc::strong_count(&bytes), 1);
}
