//! `corelane serve`, seen from outside: by std's sockets, by Python's, by signals.
#![cfg(all(feature = "cli", target_os = "linux"))]

mod cli_support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use cli_support::{PATIENCE, Server, connect, corelane, python, run};

#[test]
fn echo_returns_every_byte_in_order() {
    let server = Server::start(&["echo", "--buffers", "4KiBx64"]);
    let sent: Vec<u8> = (0..1_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut reader = server.connect();
    let mut writer = reader.try_clone().expect("clone");
    let bytes = sent.clone();
    let writing = thread::spawn(move || {
        writer.write_all(&bytes).expect("writes");
        writer.shutdown(Shutdown::Write).expect("half-close");
    });
    let mut back = Vec::new();
    reader.read_to_end(&mut back).expect("reads until the server closes too");
    writing.join().expect("writer");
    assert!(back == sent, "{} of {} bytes came back", back.len(), sent.len());
}

#[test]
fn heartbeat_answers_whatever_the_segmentation() {
    let server = Server::start(&["heartbeat"]);
    let mut stream = server.connect();
    let pings = b"ping\n".repeat(6);
    for size in [1, 2, 3, 4, 5, 7, 30] {
        for piece in pings.chunks(size) {
            stream.write_all(piece).expect("writes");
        }
        let mut pongs = [0; 30];
        stream.read_exact(&mut pongs).expect("pongs");
        assert_eq!(&pongs[..], b"pong\n".repeat(6), "pieces of {size}");
    }
    // More in one piece than one static answer holds.
    stream.write_all(&b"ping\n".repeat(1000)).expect("writes");
    let mut pongs = vec![0; 5000];
    stream.read_exact(&mut pongs).expect("pongs");
    assert_eq!(pongs, b"pong\n".repeat(1000));
}

#[test]
fn heartbeat_says_what_it_refuses_and_closes() {
    let server = Server::start(&["heartbeat", "--max-line", "16"]);
    let too_long = [b'x'; 17];
    for (input, answer) in [
        (&b"ping\nGET / HTTP/1.1\n"[..], "pong\nerror: expected ping\n"),
        (&too_long[..], "error: line too long\n"),
    ] {
        let mut stream = server.connect();
        stream.write_all(input).expect("writes");
        let mut said = String::new();
        stream.read_to_string(&mut said).expect("reads until the server closes");
        assert_eq!(said, answer);
    }
    let ended = server.stop();
    assert!(ended.stderr.contains("limit 2"), "{}", ended.stderr);
}

#[test]
fn heartbeat_closes_silent_peers() {
    let server = Server::start(&["heartbeat", "--idle-timeout", "300ms"]);
    let mut silent = server.connect();
    let begun = Instant::now();
    // Closed in order or reset: either way it is over, without a word and not before its time.
    assert!(matches!(silent.read(&mut [0; 8]), Ok(0) | Err(_)));
    let after = begun.elapsed();
    assert!(after > Duration::from_millis(200) && after < Duration::from_secs(25), "{after:?}");
    let ended = server.stop();
    assert!(ended.stderr.contains("idle_timeout 1"), "{}", ended.stderr);
}

#[test]
fn discard_takes_everything_and_says_nothing() {
    let server = Server::start(&["discard"]);
    let mut stream = server.connect();
    stream.write_all(&[7; 300_000]).expect("writes");
    stream.shutdown(Shutdown::Write).expect("half-close");
    let mut said = Vec::new();
    stream.read_to_end(&mut said).expect("reads until the server closes too");
    assert!(said.is_empty());
    let ended = server.stop();
    assert!(ended.stderr.contains("300000 B in"), "{}", ended.stderr);
}

#[test]
fn several_addresses_of_both_families() {
    let mut server = Server::start(&["echo", "--listen", "127.0.0.1:0,[::1]:0", "--stats", "100ms"]);
    let second = server.process.line();
    let second = second.strip_prefix("listening on ").expect("a second address").parse().expect("address");
    for addr in [server.addr, second] {
        let mut stream = connect(addr);
        stream.write_all(b"hello").expect("writes");
        let mut back = [0; 5];
        stream.read_exact(&mut back).expect("reads");
        assert_eq!(&back, b"hello");
    }
}

#[test]
fn dual_stack_takes_ipv4_on_an_ipv6_address() {
    let server = Server::start(&["echo", "--listen", "[::]:0", "--dual-stack"]);
    for host in ["127.0.0.1", "[::1]"] {
        let mut stream = connect(format!("{host}:{}", server.addr.port()).parse().expect("address"));
        stream.write_all(b"hello").expect("writes");
        let mut back = [0; 5];
        stream.read_exact(&mut back).expect("reads");
    }
}

#[test]
fn a_port_in_use_is_refused_with_the_address() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = taken.local_addr().expect("address").to_string();
    let ended = run(&["serve", "echo", "--listen", &addr]);
    assert!(matches!(ended.code, Some(1 | 4)), "{ended:?}");
    assert!(ended.stderr.contains(&addr), "{ended:?}");
    assert_eq!(ended.stdout, "");
}

#[test]
fn sigterm_shuts_down_in_order_and_reports() {
    for descriptors in ["direct", "fd"] {
        let server = Server::start(&["echo", "--descriptors", descriptors, "--workers", "2"]);
        let mut stream = server.connect();
        stream.write_all(b"hello").expect("writes");
        let mut back = [0; 5];
        stream.read_exact(&mut back).expect("reads");
        server.process.signal("-TERM");
        // The server tells its peers before it goes.
        assert_eq!(stream.read(&mut back).expect("closed in order"), 0);
        drop(stream);
        let ended = server.process.end();
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.stderr.contains("signal: shutting down"), "{ended:?}");
        assert!(ended.stderr.contains("0 operations left in the kernel, 0 buffers outstanding"), "{ended:?}");
        assert!(ended.stderr.contains("1 messages, 5 B in, 5 B out"), "{ended:?}");
    }
}

#[test]
fn it_outlives_the_reader_of_its_standard_error() {
    // Its standard input ends, and it with it, when this test does, however.
    let mut child = corelane(&["serve", "echo", "--listen", "127.0.0.1:0", "--stats", "100ms"])
        .arg("--until-stdin-ends")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("piped")).read_line(&mut line).expect("a line");
    let addr = line.trim().strip_prefix("listening on ").expect("ready").parse().expect("address");
    drop(child.stderr.take());
    let mut stream = connect(addr);
    for _ in 0..5 {
        thread::sleep(Duration::from_millis(100));
        stream.write_all(b"hello").expect("writes");
        let mut back = [0; 5];
        stream.read_exact(&mut back).expect("reads");
        assert_eq!(&back, b"hello");
    }
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().expect("kill").success());
    assert_eq!(stream.read(&mut [0; 5]).expect("closed in order"), 0);
    drop(stream);
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        match child.try_wait().expect("waits") {
            Some(status) => break status,
            None if Instant::now() > deadline => panic!("it does not end"),
            None => thread::sleep(Duration::from_millis(20)),
        }
    };
    assert_eq!(status.code(), Some(0), "{status}");
}

#[test]
fn it_stops_when_its_standard_input_ends() {
    let mut server = Server::start(&["echo", "--until-stdin-ends"]);
    drop(server.process.stdin.take());
    let ended = server.process.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("end of standard input: shutting down"), "{ended:?}");
}

#[test]
fn a_foreign_client_is_served() {
    let server = Server::start(&["heartbeat"]);
    let script = format!(
        r#"
import socket
sockets = [socket.create_connection(("127.0.0.1", {}), timeout=20) for _ in range(50)]
for turn in range(20):
    for s in sockets:
        s.sendall(b"ping\n")
    for s in sockets:
        answer = b""
        while len(answer) < 5:
            piece = s.recv(5 - len(answer))
            assert piece, "closed"
            answer += piece
        assert answer == b"pong\n", answer
for s in sockets:
    s.shutdown(socket.SHUT_WR)
    assert s.recv(1) == b"", "closes after us"
print("well served")
"#,
        server.addr.port()
    );
    let Some(client) = python(&script) else { return };
    let ended = client.end();
    assert_eq!(ended.stdout, "well served\n", "{ended:?}");
    let ended = server.stop();
    assert!(ended.stderr.contains("eof 50"), "{}", ended.stderr);
}
