//! Promise 7: an exhausted buffer pool, a full completion queue, a full submission queue, EMFILE and a
//! slow reader each degrade by back-pressure, are counted, lose nothing and never spin.
#![cfg(target_os = "linux")]

mod support;

use std::net::TcpStream;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use corelane::{
    Backend, BufferConfig, ConnectConfig, Descriptors, ListenerConfig, Runtime, Snapshot, WaitPolicy,
    WorkerConfig,
};
use support::*;

use std::io::Write;

/// Every stream sends its own pattern; then each must get it back.
fn rounds(streams: &mut [TcpStream], rounds: u64, size: usize) {
    for round in 0..rounds {
        let seed = |index: usize| round * 100_000 + index as u64;
        for (index, stream) in streams.iter_mut().enumerate() {
            stream.write_all(&pattern(seed(index), size)).expect("write");
        }
        for (index, stream) in streams.iter_mut().enumerate() {
            expect(stream, &pattern(seed(index), size));
        }
    }
}

#[test]
fn more_senders_than_buffers_lose_nothing_and_the_worker_does_not_spin() {
    const SENDERS: usize = 200;
    const ROUNDS: u64 = 10;
    const SIZE: usize = 2000;
    for descriptors in [Descriptors::Direct, Descriptors::Fd] {
        let buffers = BufferConfig { size: 256, count: 4, send_count: 0, ..BufferConfig::default() };
        let config = WorkerConfig { buffers, descriptors, max_connections: 2000, ..WorkerConfig::default() };
        let builder = Runtime::builder().worker(config).listen(any_port());
        let Some(runtime) = start(builder, |_| Hooks::echo()) else { return };
        let silent: Vec<_> = (0..100).map(|_| connect(addr(&runtime))).collect();
        let mut streams: Vec<_> = (0..SENDERS).map(|_| connect(addr(&runtime))).collect();
        rounds(&mut streams, ROUNDS, SIZE);
        let total = counters(&runtime, "all buffers back", |total| total.buffers_out == 0);
        let bytes = SENDERS as u64 * ROUNDS * SIZE as u64;
        assert_eq!((total.bytes_received, total.bytes_sent), (bytes, bytes));
        assert!(total.starved > 0, "four buffers were enough for 200 senders: {total}");
        // A turn feeds at most four connections, each of which brings a message or is starved anew.
        assert!(
            total.enters < 3 * total.messages && total.starved < 3 * total.messages,
            "{} enters and {} starved receives for {} messages",
            total.enters,
            total.starved,
            total.messages
        );
        sleeps(&runtime, "idle after exhaustion");
        drop(streams);
        drop(silent);
        empties(&runtime);
        stop(runtime);
    }
}

#[test]
fn receivers_starved_by_leases_that_a_handler_keeps_wait_without_spinning() {
    let buffers = BufferConfig { size: 256, count: 4, send_count: 0, ..BufferConfig::default() };
    let config = WorkerConfig { buffers, ..WorkerConfig::default() };
    let builder = Runtime::builder().worker(config).listen(any_port());
    // Keeps every lease of the first connection until it is told to let go; echoes for the others.
    let make = |_| Hooks::new(Vec::new).data(|conn, data| conn.state().push(data));
    let Some(runtime) = start(builder, make) else { return };
    let mut streams: Vec<_> = (0..20).map(|_| connect(addr(&runtime))).collect();
    for stream in &mut streams {
        stream.write_all(&[7; 100]).expect("write");
    }
    // Who is accepted when others wait already waits behind them, without a receive in vain.
    let used_up = |total: &Snapshot| total.buffers_out == 4 && total.accepted == 20 && total.starved > 0;
    counters(&runtime, "a pool that is used up", used_up);
    sleeps(&runtime, "starved while the handler keeps all leases");
    let held = ask(&runtime.remote(), 0, |cx| {
        let ids: Vec<_> = cx.ids().collect();
        let held = ids.iter().map(|&id| {
            let mut conn = cx.conn(id).expect("open");
            std::mem::take(conn.state()).len()
        });
        held.sum::<usize>()
    });
    assert_eq!(held, 4);
    // Sixteen messages wait in the kernel: they come as leases are let go of.
    let mut taken = 4;
    eventually("the other messages", || {
        taken += ask(&runtime.remote(), 0, |cx| {
            let ids: Vec<_> = cx.ids().collect();
            let taken = ids.iter().map(|&id| {
                let mut conn = cx.conn(id).expect("open");
                std::mem::take(conn.state()).len()
            });
            taken.sum::<usize>()
        });
        taken == 20
    });
    assert_eq!(runtime.metrics().total().bytes_received, 2000);
    drop(streams);
    empties(&runtime);
    stop(runtime);
}

#[test]
fn slow_readers_that_pin_every_buffer_do_not_keep_others_from_service() {
    for descriptors in [Descriptors::Direct, Descriptors::Fd] {
        let buffers = BufferConfig { size: 1024, count: 16, send_count: 0, ..BufferConfig::default() };
        let config = WorkerConfig { buffers, descriptors, high_water: 1 << 20, ..WorkerConfig::default() };
        let mut listener = ListenerConfig::new(any_port());
        listener.options.send_buffer = Some(4096);
        let builder = Runtime::builder().worker(config).listen(listener);
        let Some(runtime) = start(builder, |_| Hooks::echo()) else { return };
        let addr = addr(&runtime);
        let sent: Vec<_> = (0..8).map(|seed| pattern(seed, 400_000)).collect();
        let flooders: Vec<_> = sent.iter().map(|_| connect_narrow(addr, 4096)).collect();
        thread::scope(|scope| {
            let writers: Vec<_> = flooders
                .iter()
                .zip(&sent)
                .map(|(mut stream, bytes)| {
                    scope.spawn(move || stream.write_all(bytes).expect("what is written is taken"))
                })
                .collect();
            counters(&runtime, "every buffer pinned", |total| total.starved > 0);
            let mut other = connect(addr);
            for seed in 100..120 {
                exchange(&mut other, &pattern(seed, 3000));
            }
            counters(&runtime, "buffers taken back", |total| total.reclaimed > 0);
            // What was taken from the slow readers is not lost to them.
            for ((index, mut stream), bytes) in flooders.iter().enumerate().zip(&sent) {
                let mut got = vec![0; bytes.len()];
                std::io::Read::read_exact(&mut stream, &mut got).expect("the whole echo");
                same_bytes(&got, bytes, &format!("flooder {index}"));
            }
            for writer in writers {
                writer.join().expect("a writer");
            }
        });
        drop(flooders);
        empties(&runtime);
        stop(runtime);
    }
}

#[test]
fn a_slow_reader_pauses_its_own_receiving_only() {
    let config = WorkerConfig { high_water: 16 << 10, low_water: 4 << 10, ..WorkerConfig::default() };
    let mut listener = ListenerConfig::new(any_port());
    listener.options.send_buffer = Some(8192);
    listener.options.recv_buffer = Some(8192);
    let (tell, told) = channel();
    let make = move |_| {
        let tell = tell.clone();
        Hooks::echo().writable(move |conn| {
            assert!(!conn.is_congested() && conn.unsent() <= 4 << 10, "{} unsent", conn.unsent());
            tell.send(()).expect("the test listens");
        })
    };
    let Some(runtime) = start(Runtime::builder().worker(config).listen(listener), make) else { return };
    let mut slow = connect_narrow(addr(&runtime), 8192);
    let bytes = pattern(3, 4 << 20);
    let taken = write_until_stuck(&mut slow, &bytes);
    assert!(taken < bytes.len(), "four megabytes went into a server that should hold some kilobytes");
    let total = runtime.metrics().total();
    assert!(total.congested > 0 && total.pauses > 0, "{total:#?}");
    let before = told.try_iter().count() as u64;
    assert_eq!(before + 1, total.congested, "it is not writable yet");
    sleeps(&runtime, "one paused connection");
    let mut other = connect(addr(&runtime));
    exchange(&mut other, b"unimpressed");
    expect(&mut slow, &bytes[..taken]);
    exchange(&mut slow, b"as before");
    let writable = before + told.try_iter().count() as u64;
    assert_eq!(writable, runtime.metrics().total().congested, "every congestion ends");
    drop((slow, other));
    empties(&runtime);
    stop(runtime);
}

/// However it waits: what only delays or spins while there is work costs nothing when there is none.
#[test]
fn a_worker_with_nothing_to_do_sleeps_under_every_wait_policy() {
    let micros = Duration::from_micros;
    for wait in [
        WaitPolicy::Block,
        WaitPolicy::Spin { max: micros(50) },
        WaitPolicy::Coalesce { max_delay: micros(200), batch: 64 },
        WaitPolicy::Adaptive { budget: micros(300) },
    ] {
        let config = WorkerConfig { wait, max_connections: 100, ..WorkerConfig::default() };
        let builder = Runtime::builder().worker(config).listen(any_port());
        let Some(runtime) = start(builder, |_| Hooks::echo()) else { return };
        let mut streams: Vec<_> = (0..10).map(|_| connect(addr(&runtime))).collect();
        rounds(&mut streams, 3, 500);
        sleeps(&runtime, &format!("idle with {wait:?}"));
        drop(streams);
        empties(&runtime);
        stop(runtime);
    }
}

/// The kernel counts a minimum wait in whole microseconds: one that is less must not become a wait for a full batch.
#[test]
fn the_shortest_delay_to_coalesce_does_not_hold_a_message_back() {
    let one = Duration::from_micros(1);
    for wait in [WaitPolicy::Coalesce { max_delay: one, batch: 64 }, WaitPolicy::Adaptive { budget: one }] {
        let config = WorkerConfig { wait, ..WorkerConfig::default() };
        let builder = Runtime::builder().worker(config).listen(any_port());
        let Some(runtime) = start(builder, |_| Hooks::echo()) else { return };
        let mut stream = connect(addr(&runtime));
        rounds(std::slice::from_mut(&mut stream), 50, 20);
        drop(stream);
        empties(&runtime);
        stop(runtime);
    }
}

#[test]
fn tiny_submission_and_completion_queues_lose_nothing() {
    for descriptors in [Descriptors::Direct, Descriptors::Fd] {
        let config = WorkerConfig {
            sq_entries: 8,
            cq_entries: 16,
            descriptors,
            max_connections: 4000,
            ..WorkerConfig::default()
        };
        let builder = Runtime::builder().worker(config).listen(any_port());
        let Some(runtime) = start(builder, |_| Hooks::echo()) else { return };
        let mut streams: Vec<_> = (0..400).map(|_| connect(addr(&runtime))).collect();
        rounds(&mut streams, 4, 5000);
        // What all have sent waits for the worker, so that one turn has more to submit than the queue takes.
        let (go_on, held) = std::sync::mpsc::channel::<()>();
        tell(&runtime.remote(), 0, move |_| {
            let _ = held.recv();
        });
        for stream in &mut streams {
            stream.write_all(&pattern(7, 5000)).expect("write");
        }
        drop(go_on);
        for stream in &mut streams {
            expect(stream, &pattern(7, 5000));
        }
        let total = runtime.metrics().total();
        // Only io_uring has queues that could be full.
        let has_queues = runtime.info().backend == Backend::IoUring;
        assert_eq!(total.sq_full > 0, has_queues, "{total:#?}");
        assert_eq!(total.accepted, 400);
        assert_eq!(total.bytes_sent, 400 * 5 * 5000);
        assert_eq!(total.closed_total(), 0);
        sleeps(&runtime, "idle with tiny queues");
        // All at once: half of them by reset.
        for (index, stream) in streams.into_iter().enumerate() {
            if index % 2 == 0 { reset(stream) } else { drop(stream) }
        }
        let total = empties(&runtime);
        assert_eq!(total.closed_total(), 400);
        stop(runtime);
    }
}

/// More multi-part sends in one turn than the submission's scratch holds, with a queue of 8 entries:
/// headers and vectors must stay where they are until the kernel has taken them.
#[test]
fn more_coalesced_sends_than_the_scratch_holds_go_out_unharmed() {
    for sq_entries in [8, 4096] {
        let config = WorkerConfig { sq_entries, ..WorkerConfig::default() };
        let builder = Runtime::builder().worker(config).listen(any_port());
        // Every client first tells its number.
        let make = |_| {
            Hooks::new(|| 0).data(|conn, data| {
                *conn.state() = u64::from_le_bytes(data[..].try_into().expect("a number"));
            })
        };
        let Some(runtime) = start(builder, make) else { return };
        let mut streams: Vec<_> = (0..600).map(|_| connect(addr(&runtime))).collect();
        for (index, stream) in streams.iter_mut().enumerate() {
            stream.write_all(&(index as u64).to_le_bytes()).expect("write");
        }
        counters(&runtime, "all numbers", |total| total.bytes_received == 600 * 8);
        tell(&runtime.remote(), 0, |cx| {
            let ids: Vec<_> = cx.ids().collect();
            for id in ids {
                let mut conn = cx.conn(id).expect("open");
                let number = *conn.state();
                for part in 0..10 {
                    conn.send(pattern(number * 10 + part, 50)).expect("room");
                }
            }
        });
        for (index, stream) in streams.iter_mut().enumerate() {
            for part in 0..10 {
                expect(&*stream, &pattern(index as u64 * 10 + part, 50));
            }
        }
        drop(streams);
        empties(&runtime);
        stop(runtime);
    }
}

const EMFILE: &str = "emfile_on_accept_waits_without_losing_anybody_or_spinning";

/// The server runs in a process that may open very few descriptors; its clients in this one.
#[test]
fn emfile_on_accept_waits_without_losing_anybody_or_spinning() {
    if role().is_some() {
        return short_of_descriptors();
    }
    let mut child = rerun(EMFILE, "server", &["sh", "-c", "ulimit -n 64; exec \"$0\" \"$@\""]);
    let first = child.hears();
    let Ok(addr) = first.parse() else {
        assert!(first.starts_with("skipped"), "{first}");
        return;
    };
    let mut streams: Vec<_> = (0..20).map(|_| connect(addr)).collect();
    let mut served = 0;
    for (index, stream) in streams.iter_mut().enumerate() {
        stream.write_all(&pattern(index as u64, 100)).expect("write");
    }
    // As many as there are descriptors for are served, the others wait; nobody is closed.
    while served < 10 {
        expect(&mut streams[served], &pattern(served as u64, 100));
        served += 1;
    }
    for stream in &streams[served..] {
        assert!(stays_silent(stream, Duration::from_millis(20)), "served or closed beyond the limit");
    }
    child.tells("errors");
    let errors: u64 = child.hears().parse().expect("a count");
    assert!(errors > 0, "EMFILE was not counted");
    child.tells("sleeps");
    assert_eq!(child.hears(), "yes");
    // As the first leave, those who wait are served.
    let mut waiting = streams.split_off(served);
    for stream in &mut streams {
        exchange(stream, b"still here");
    }
    drop(streams);
    for (index, stream) in waiting.iter_mut().enumerate() {
        expect(stream, &pattern((served + index) as u64, 100));
    }
    drop(waiting);
    child.tells("empties");
    assert_eq!(child.hears(), "20 accepted, 20 closed");
    child.ends();
}

fn short_of_descriptors() {
    let config =
        WorkerConfig { descriptors: Descriptors::Fd, max_connections: 30, ..WorkerConfig::default() };
    let mut listener = ListenerConfig::new(any_port());
    listener.backlog = 64;
    let builder = Runtime::builder().worker(config).listen(listener);
    let Some(runtime) = start(builder, |_| Hooks::echo()) else { return say("skipped") };
    // All descriptors but ten are taken, when the worker has armed its accepts: each takes one for a moment.
    sleeps(&runtime, "waiting for connections");
    let mut filling = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        filling.push(file);
    }
    filling.truncate(filling.len() - 10);
    say(&addr(&runtime).to_string());
    while let Some(question) = hear() {
        match question.as_str() {
            "errors" => {
                let total = counters(&runtime, "an accept error", |total| total.accept_errors > 0);
                say(&total.accept_errors.to_string());
            }
            "sleeps" => {
                sleeps(&runtime, "short of descriptors");
                say("yes");
            }
            "empties" => {
                let total = empties(&runtime);
                say(&format!("{} accepted, {} closed", total.accepted, total.closed_total()));
            }
            other => panic!("{other}"),
        }
    }
    drop(filling);
    stop(runtime);
}

const NO_ROOM_LEFT: &str = "who_waited_for_a_descriptor_is_served_though_no_accept_is_armed_anew";

/// An accept fails for want of a descriptor while others stay armed, and until it may be tried again an
/// outgoing connection takes the place that it would have been armed for.
#[test]
fn who_waited_for_a_descriptor_is_served_though_no_accept_is_armed_anew() {
    if let Some(role) = role() {
        return no_room_left(role.parse().expect("a backend"));
    }
    for backend in [Backend::IoUring, Backend::Epoll] {
        let limit = ["sh", "-c", "ulimit -n 64; exec \"$0\" \"$@\""];
        let mut child = rerun(NO_ROOM_LEFT, backend.as_str(), &limit);
        let first = child.hears();
        let Ok(addr) = first.parse() else {
            assert!(first.starts_with("skipped"), "{first}");
            continue;
        };
        let mut stream = connect(addr);
        stream.write_all(b"waiting").expect("write");
        assert_eq!(child.hears(), "room again");
        expect(&mut stream, b"waiting");
        drop(stream);
        child.ends();
    }
}

fn no_room_left(backend: Backend) {
    let config = WorkerConfig { descriptors: Descriptors::Fd, max_connections: 8, ..WorkerConfig::default() };
    let builder = Runtime::builder().backend(backend).worker(config).listen(any_port());
    let Some(runtime) = start(builder, |_| Hooks::echo()) else { return say("skipped") };
    let target = std::net::TcpListener::bind(any_port()).expect("a listener");
    let target_addr = target.local_addr().expect("its address");
    sleeps(&runtime, "waiting for connections");
    let mut filling = Vec::new();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        filling.push(file);
    }
    say(&addr(&runtime).to_string());
    // By now the next attempt is 200 ms away.
    counters(&runtime, "failed accepts", |total| total.accept_errors >= 6);
    ask(&runtime.remote(), 0, move |cx| {
        drop(filling);
        cx.connect(ConnectConfig::new(target_addr), ()).expect("room for one");
    });
    say("room again");
    assert_eq!(hear(), None);
    drop(target);
    stop(runtime);
}
