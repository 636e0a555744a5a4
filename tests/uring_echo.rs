//! The main job on the real kernel: what is sent comes back, whole and in order, however it is cut
//! into pieces and however slowly it is read.
#![cfg(target_os = "linux")]

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use corelane::{BufferConfig, Descriptors, ListenerConfig, Runtime, WorkerConfig};
use support::*;

/// Writes `bytes` in pieces of random sizes, many of them tiny, then half-closes.
fn write_in_pieces(mut stream: &TcpStream, bytes: &[u8], seed: u64) {
    let mut rng = Rng::new(seed);
    let mut rest = bytes;
    while !rest.is_empty() {
        let most = if rng.one_in(4) { 7 } else { 40_000 };
        let (piece, after) = rest.split_at(rng.within(1, most).min(rest.len()));
        stream.write_all(piece).expect("write");
        rest = after;
    }
    stream.shutdown(Shutdown::Write).expect("half-close");
}

/// Reads to the end in pieces of random sizes.
fn read_in_pieces(mut stream: &TcpStream, seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let (mut all, mut room) = (Vec::new(), vec![0; 20_000]);
    loop {
        let most = rng.within(1, room.len());
        let n = match stream.read(&mut room[..most]) {
            // A read with a timeout is interrupted also when the process is merely stopped and continued.
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            read => read.expect("read"),
        };
        if n == 0 {
            return all;
        }
        all.extend_from_slice(&room[..n]);
    }
}

fn integrity(descriptors: Descriptors) {
    const SIZES: [usize; 9] = [1, 2, 4095, 4096, 4097, 65_537, 300_001, 1 << 20, 1 << 20];
    const HIGH_WATER: u32 = 32 << 10;
    let buffers = BufferConfig { size: 4096, count: 64, send_count: 0, ..BufferConfig::default() };
    let config = WorkerConfig {
        descriptors,
        buffers,
        high_water: HIGH_WATER,
        low_water: 8 << 10,
        ..WorkerConfig::default()
    };
    let mut listener = ListenerConfig::new(any_port());
    listener.options.send_buffer = Some(32 << 10);
    let most_unsent = Arc::new(AtomicU64::new(0));
    let most = most_unsent.clone();
    let make = move |_| {
        let most = most.clone();
        Hooks::plain().data(move |conn, data| {
            conn.send(data).expect("receiving pauses before the queue is full");
            most.fetch_max(conn.unsent(), Ordering::Relaxed);
        })
    };
    let Some(runtime) = start(Runtime::builder().worker(config).listen(listener), make) else { return };
    let addr = addr(&runtime);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let readers: Vec<_> = SIZES
            .iter()
            .enumerate()
            .map(|(index, &size)| {
                let (runtime, seed) = (&runtime, index as u64 + 1);
                // The last one does not read before the server has felt it.
                let slow = index == SIZES.len() - 1;
                scope.spawn(move || {
                    let stream = if slow { connect_narrow(addr, 16 << 10) } else { connect(addr) };
                    let sent = pattern(seed, size);
                    thread::scope(|scope| {
                        scope.spawn(|| write_in_pieces(&stream, &sent, seed));
                        if slow {
                            counters(runtime, "back-pressure", |total| {
                                total.congested > 0 && total.pauses > 0
                            });
                        }
                        let got = read_in_pieces(&stream, seed + 100);
                        same_bytes(&got, &sent, "the echo");
                    });
                })
            })
            .collect();
        let watch = scope.spawn(|| {
            let mut most = 0;
            while !over.load(Ordering::Relaxed) {
                most = most.max(runtime.metrics().total().buffers_out);
                thread::yield_now();
            }
            most
        });
        let results: Vec<_> = readers.into_iter().map(|reader| reader.join()).collect();
        over.store(true, Ordering::Relaxed);
        let most_leased = watch.join().expect("the watcher");
        assert!(most_leased <= u64::from(buffers.count), "{most_leased} of {} leased", buffers.count);
        for result in results {
            result.expect("a reader");
        }
    });
    let total = empties(&runtime);
    let bytes: usize = SIZES.iter().sum();
    assert_eq!(total.bytes_received, bytes as u64);
    assert_eq!(total.bytes_sent, bytes as u64);
    assert_eq!(total.send_refusals, 0);
    // What the worker holds for one connection: the high-water mark, and the piece that reached it.
    let bound = u64::from(HIGH_WATER + buffers.size);
    let most = most_unsent.load(Ordering::Relaxed);
    assert!(most <= bound, "{most} unsent bytes on one connection, bound {bound}");
    assert_eq!(total.closed[corelane::CloseReason::Eof.index()], SIZES.len() as u64);
    stop(runtime);
}

#[test]
fn echo_is_whole_and_memory_bounded_with_direct_descriptors() {
    integrity(Descriptors::Direct);
}

#[test]
fn echo_is_whole_and_memory_bounded_with_ordinary_descriptors() {
    integrity(Descriptors::Fd);
}

/// With pieces much smaller than what is sent, everything that queues up behind a send in flight is
/// sent together, 64 pieces at a time, and stays in order.
#[test]
fn pieces_that_queue_up_behind_a_send_go_out_together_and_in_order() {
    let buffers = BufferConfig { size: 64, count: 2048, send_count: 0, ..BufferConfig::default() };
    let config = WorkerConfig { buffers, ..WorkerConfig::default() };
    let builder = Runtime::builder().worker(config).listen(any_port());
    let Some(runtime) = start(builder, |_| Hooks::echo()) else { return };
    let stream = connect(addr(&runtime));
    let sent = pattern(5, 256 << 10);
    thread::scope(|scope| {
        scope.spawn(|| write_in_pieces(&stream, &sent, 5));
        same_bytes(&read_in_pieces(&stream, 6), &sent, "the echo");
    });
    let total = empties(&runtime);
    assert!(total.messages >= 4096, "{} pieces of 64 bytes", total.messages);
    assert!(
        total.sends * 4 < total.messages,
        "{} sends for {} pieces: they were not sent together",
        total.sends,
        total.messages
    );
    stop(runtime);
}

/// A client that shares no code with us, over IPv4 and IPv6.
#[test]
fn pythons_socket_module_gets_its_echo_over_ipv4_and_ipv6() {
    if !has_program("python3") {
        println!("skipped: python3 is not installed");
        return;
    }
    let v6 = "[::1]:0".parse::<std::net::SocketAddr>().expect("an address");
    let builder = Runtime::builder().listen(any_port()).listen(v6);
    let Some(runtime) = start(builder, |_| Hooks::echo()) else { return };
    const SCRIPT: &str = r#"
import hashlib, random, socket, sys, threading
rng = random.Random(7)
for host, port in zip(sys.argv[1::2], sys.argv[2::2]):
    with socket.create_connection((host, int(port)), timeout=30) as s:
        for word in [b'ping\n', b'x', bytes(range(256)) * 16]:
            s.sendall(word)
            got = b''
            while len(got) < len(word):
                got += s.recv(65536)
            assert got == word, (host, len(word), got[:50])
        sent = rng.randbytes(3_000_000)
        writer = threading.Thread(target=lambda: (s.sendall(sent), s.shutdown(socket.SHUT_WR)))
        writer.start()
        digest, n = hashlib.sha256(), 0
        while piece := s.recv(rng.randint(1, 100_000)):
            digest.update(piece)
            n += len(piece)
        writer.join()
        assert n == len(sent), (host, n)
        assert digest.digest() == hashlib.sha256(sent).digest(), host
        print('echoed', n, 'bytes over', s.family.name, flush=True)
"#;
    let mut command = Command::new("python3");
    command.args(["-c", SCRIPT]);
    for listener in &runtime.info().listeners {
        command.arg(listener.addr.ip().to_string()).arg(listener.addr.port().to_string());
    }
    let mut python = Process::spawn(command);
    assert_eq!(python.line(), "echoed 3000000 bytes over AF_INET");
    assert_eq!(python.line(), "echoed 3000000 bytes over AF_INET6");
    python.ends();
    assert_eq!(empties(&runtime).accepted, 2);
    stop(runtime);
}
