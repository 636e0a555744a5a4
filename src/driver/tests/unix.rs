//! Unix streams.

use super::*;
use crate::buffer::Buf;
use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::{SocketAddr as Name, UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

on_every_driver!(
    a_mebibyte_goes_there_and_back_past_a_slow_reader,
    half_closed_both_ways,
    names_of_both_ends_are_told,
    a_client_with_a_long_name_is_accepted_and_known,
    a_listener_on_a_path_leaves_its_file_alone,
    a_full_queue_is_an_error_of_its_own_and_the_next_attempt_may_succeed,
    refusals_are_events_and_closing_hides_them,
    a_reset_is_a_close,
    only_what_applies_is_set,
);

/// A directory of its own, removed in the end.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("corelane-unix-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory");
        Self(path)
    }

    fn name(&self, file: &str) -> Name {
        Name::from_pathname(self.0.join(file)).expect("a short path")
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // What is left behind in the temporary directory harms nobody.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn abstract_name() -> Name {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    Name::from_abstract_name(format!("corelane-{}-{number}", std::process::id())).expect("short")
}

fn listen_unix<D: Driver>(driver: &mut D, name: &Name) -> ListenerId {
    driver.listen(&ListenConfig::Unix(name.clone(), 16)).expect("listens").id
}

fn unix_client(name: &Name) -> UnixStream {
    let stream = UnixStream::connect_addr(name).expect("connect");
    stream.set_read_timeout(Some(PATIENCE)).expect("a read timeout");
    stream.set_write_timeout(Some(PATIENCE)).expect("a write timeout");
    stream
}

/// Data, after which receiving is armed in any case.
fn received<D: Driver>(driver: &mut D, wanted: Key) -> Buf {
    match next(driver) {
        Event::Received { key, buf, armed } if key == wanted => {
            if !armed {
                driver.recv(key);
            }
            buf
        }
        other => panic!("{other:?}"),
    }
}

/// Echoes what comes of one connection until its end, then ends too.
fn echo<D: Driver>(driver: &mut D, key: Key) {
    driver.recv(key);
    let (mut waiting, mut sending, mut armed, mut ended) = (Vec::new(), false, true, false);
    while !ended || sending || !waiting.is_empty() {
        match next(driver) {
            Event::Received { key: of, buf, armed: still } => {
                assert_eq!(of, key);
                waiting.extend_from_slice(&buf);
                armed = still;
            }
            Event::RecvEnded { end: RecvEnd::Eof, .. } => ended = true,
            Event::RecvEnded { end: RecvEnd::NoBuffer | RecvEnd::Stopped, .. } => armed = false,
            Event::Sent { chain, result, .. } => {
                assert_eq!(result.expect("sent"), chain.bytes());
                driver.memory().chunks.clear(chain);
                sending = false;
            }
            other => panic!("{other:?}"),
        }
        if !armed && !ended {
            driver.recv(key);
            armed = true;
        }
        if !sending && !waiting.is_empty() {
            let bytes = chain(driver, &std::mem::take(&mut waiting));
            driver.send(key, bytes);
            sending = true;
        }
    }
    driver.shutdown_write(key);
    // With a ring it is an operation, which the next wait submits.
    driver.submit_and_wait(Some(Duration::ZERO)).expect("a wait");
}

/// One connection accepted and one made, each with a counterpart that writes a mebibyte at once and reads
/// what comes back in small pieces.
fn a_mebibyte_goes_there_and_back_past_a_slow_reader<D: Driver>(mut driver: D) {
    const LEN: usize = 1 << 20;
    let bytes: Vec<u8> = (0..LEN).map(|n| (n * 7 + n / 251) as u8).collect();
    let counterpart = |mut stream: UnixStream| {
        let bytes = bytes.clone();
        std::thread::spawn(move || {
            let mut writing = stream.try_clone().expect("another handle");
            let writer = std::thread::spawn({
                let bytes = bytes.clone();
                move || {
                    writing.write_all(&bytes).expect("write");
                    writing.shutdown(std::net::Shutdown::Write).expect("the end");
                }
            });
            let (mut back, mut piece) = (Vec::new(), [0; 777]);
            loop {
                match stream.read(&mut piece).expect("read") {
                    0 => break,
                    len => back.extend_from_slice(&piece[..len]),
                }
                // Slow: others are let in between every two pieces.
                std::thread::yield_now();
            }
            writer.join().expect("it wrote everything");
            assert!(back == bytes, "{} bytes came back, or others", back.len());
        })
    };
    let name = abstract_name();
    let id = listen_unix(&mut driver, &name);
    let stream = unix_client(&name);
    let socket = accept(&mut driver, id);
    driver.adopt(key(0, 1), socket);
    let thread = counterpart(stream);
    echo(&mut driver, key(0, 1));
    thread.join().expect("everything came back");
    close(&mut driver, key(0, 1), CloseHow::Fin);

    let other = abstract_name();
    let listener = UnixListener::bind_addr(&other).expect("listens");
    driver.connect_unix(key(0, 2), &other).expect("begun");
    connected(&mut driver, key(0, 2)).expect("connected");
    let (stream, _) = listener.accept().expect("accepted");
    stream.set_read_timeout(Some(PATIENCE)).expect("a read timeout");
    let thread = counterpart(stream);
    echo(&mut driver, key(0, 2));
    thread.join().expect("everything came back");
    close(&mut driver, key(0, 2), CloseHow::Fin);
    end(driver);
}

fn half_closed_both_ways<D: Driver>(mut driver: D) {
    let name = abstract_name();
    let id = listen_unix(&mut driver, &name);
    let mut stream = unix_client(&name);
    let socket = accept(&mut driver, id);
    driver.adopt(key(0, 1), socket);
    // This side ends first and still receives.
    driver.shutdown_write(key(0, 1));
    driver.submit_and_wait(Some(Duration::ZERO)).expect("a wait");
    assert_eq!(read(&mut stream).expect("the end"), 0);
    driver.recv(key(0, 1));
    stream.write_all(b"late words").expect("write");
    assert_eq!(&received(&mut driver, key(0, 1))[..], b"late words");
    drop(stream);
    loop {
        match next(&mut driver) {
            Event::RecvEnded { end: RecvEnd::Eof, .. } => break,
            Event::RecvEnded { end: RecvEnd::Stopped, .. } => driver.recv(key(0, 1)),
            other => panic!("{other:?}"),
        }
    }
    close(&mut driver, key(0, 1), CloseHow::Fin);
    // The other side ends first and still receives.
    let mut stream = unix_client(&name);
    let socket = accept(&mut driver, id);
    driver.adopt(key(0, 2), socket);
    stream.shutdown(std::net::Shutdown::Write).expect("the end");
    driver.recv(key(0, 2));
    assert!(matches!(next(&mut driver), Event::RecvEnded { end: RecvEnd::Eof, .. }));
    let bytes = chain(&driver, b"answer");
    driver.send(key(0, 2), bytes);
    match next(&mut driver) {
        Event::Sent { chain, result, .. } => {
            assert_eq!(result.expect("sent"), 6);
            driver.memory().chunks.clear(chain);
        }
        other => panic!("{other:?}"),
    }
    close(&mut driver, key(0, 2), CloseHow::Fin);
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).expect("the answer");
    assert_eq!(answer, b"answer");
    end(driver);
}

fn unix(address: &Address) -> &Name {
    match address {
        Address::Unix(name) => name,
        Address::Inet(other) => panic!("{other}"),
    }
}

fn names_of_both_ends_are_told<D: Driver>(mut driver: D) {
    let directory = Directory::new();
    let (path, word) = (directory.name("server"), abstract_name());
    for (round, name) in [path, word].into_iter().enumerate() {
        let listening = driver.listen(&ListenConfig::Unix(name.clone(), 16)).expect("listens");
        assert_eq!(format!("{:?}", unix(&listening.local)), format!("{name:?}"));
        assert_eq!(listening.backlog, 16);
        let (here, there) = (key(0, round as u32), key(1, round as u32));
        driver.connect_unix(here, &name).expect("begun");
        connected(&mut driver, here).expect("connected");
        let socket = accept(&mut driver, listening.id);
        driver.adopt(there, socket);
        let (ours, theirs) =
            (driver.addresses(here).expect("ours"), driver.addresses(there).expect("theirs"));
        assert!(unix(&ours.local).is_unnamed());
        assert_eq!(format!("{:?}", unix(&ours.peer.expect("one"))), format!("{name:?}"));
        assert_eq!(format!("{:?}", unix(&theirs.local)), format!("{name:?}"));
        assert!(unix(&theirs.peer.expect("one")).is_unnamed());
        for key in [here, there] {
            close(&mut driver, key, CloseHow::Fin);
        }
        driver.remove_listener(listening.id);
    }
    end(driver);
}

/// Room for its name is nowhere but where it is asked for.
fn a_client_with_a_long_name_is_accepted_and_known<D: Driver>(mut driver: D) {
    let directory = Directory::new();
    let name = abstract_name();
    let id = listen_unix(&mut driver, &name);
    let room = 107 - directory.0.as_os_str().len() - 1;
    let multishot = driver.multishot() != Multishot::Absent;
    for (round, len) in [1, room].into_iter().enumerate() {
        let own = directory.name(&"c".repeat(len));
        let path = own.as_pathname().expect("a path");
        let socket =
            socket2::Socket::new(socket2::Domain::UNIX, socket2::Type::STREAM, None).expect("a socket");
        socket.bind(&socket2::SockAddr::unix(path).expect("a name")).expect("bound");
        let target = name.as_abstract_name().expect("abstract");
        let target = [&[0], target].concat();
        let target = std::ffi::OsString::from_vec(target);
        socket.connect(&socket2::SockAddr::unix(target).expect("a name")).expect("connected");
        let mode = if round == 1 && multishot { AcceptMode::Multishot } else { AcceptMode::Once };
        driver.accept(id, mode);
        let key = key(0, round as u32);
        match next(&mut driver) {
            Event::Accepted { socket, peer, .. } => {
                assert_eq!(peer, None, "not an address of the internet");
                driver.adopt(key, socket);
            }
            other => panic!("{other:?}"),
        }
        let ends = driver.addresses(key).expect("both");
        assert_eq!(unix(&ends.peer.expect("one")).as_pathname(), Some(path));
        close(&mut driver, key, CloseHow::Fin);
    }
    driver.cancel_accept(id);
    end(driver);
}

fn a_listener_on_a_path_leaves_its_file_alone<D: Driver>(mut driver: D) {
    let directory = Directory::new();
    let name = directory.name("server");
    let id = listen_unix(&mut driver, &name);
    for _ in 0..2 {
        let again = driver.listen(&ListenConfig::Unix(name.clone(), 16));
        assert_eq!(again.expect_err("taken").kind(), ErrorKind::AddrInUse);
        // Also when nobody listens on it any more.
        driver.remove_listener(id);
    }
    let file = name.as_pathname().expect("a path").to_owned();
    assert!(file.exists());
    let error = UnixStream::connect_addr(&name).expect_err("nobody listens");
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    std::fs::remove_file(&file).expect("removed");
    for _ in 0..100 {
        assert_eq!(listen_unix(&mut driver, &name), id);
        driver.remove_listener(id);
        std::fs::remove_file(&file).expect("removed");
    }
    let nowhere = directory.name("no/such/directory");
    let error = driver.listen(&ListenConfig::Unix(nowhere, 16)).expect_err("no directory");
    assert_eq!(error.kind(), ErrorKind::NotFound);
    end(driver);
}

fn a_full_queue_is_an_error_of_its_own_and_the_next_attempt_may_succeed<D: Driver>(mut driver: D) {
    let name = abstract_name();
    let id = driver.listen(&ListenConfig::Unix(name.clone(), 1)).expect("listens").id;
    let mut waiting = Vec::new();
    let mut slot = 0;
    let error = loop {
        assert!(slot < 16, "a queue that is never full");
        driver.connect_unix(key(slot, 1), &name).expect("begun");
        match connected(&mut driver, key(slot, 1)) {
            Ok(()) => waiting.push(key(slot, 1)),
            Err(error) => break error,
        }
        slot += 1;
    };
    assert_eq!(error.kind(), ErrorKind::ResourceBusy);
    assert!(error.to_string().contains("queue is full"), "{error}");
    assert_eq!(waiting.len(), 2, "one more than the backlog");
    close(&mut driver, key(slot, 1), CloseHow::Fin);
    let socket = accept(&mut driver, id);
    driver.discard(socket);
    driver.connect_unix(key(slot, 2), &name).expect("begun");
    connected(&mut driver, key(slot, 2)).expect("there is room");
    for key in waiting.into_iter().chain([key(slot, 2)]) {
        close(&mut driver, key, CloseHow::Fin);
    }
    end(driver);
}

fn refusals_are_events_and_closing_hides_them<D: Driver>(mut driver: D) {
    let directory = Directory::new();
    let (gone, missing) = (directory.name("gone"), directory.name("missing"));
    drop(UnixListener::bind_addr(&gone).expect("listens"));
    let wanted = [(&gone, ErrorKind::ConnectionRefused), (&missing, ErrorKind::NotFound)];
    for round in 0..20 {
        for (name, kind) in wanted {
            driver.connect_unix(key(0, round), name).expect("begun");
            assert_eq!(connected(&mut driver, key(0, round)).expect_err("refused").kind(), kind);
            // There is a socket that is not connected, or none.
            match driver.addresses(key(0, round)) {
                Ok(ends) => assert!(ends.peer.is_none()),
                Err(error) => assert_eq!(error.kind(), ErrorKind::NotConnected),
            }
            close(&mut driver, key(0, round), CloseHow::Reset);
        }
    }
    let name = abstract_name();
    let listener = UnixListener::bind_addr(&name).expect("listens");
    for (name, how) in [(&gone, CloseHow::Fin), (&missing, CloseHow::Reset), (&name, CloseHow::Reset)] {
        driver.connect_unix(key(1, 1), name).expect("begun");
        close(&mut driver, key(1, 1), how);
    }
    // The one that was connected is closed.
    let (mut stream, _) = listener.accept().expect("it was connected");
    stream.set_read_timeout(Some(PATIENCE)).expect("a read timeout");
    quiet(&mut driver);
    assert_eq!(read(&mut stream).expect("the end"), 0);
    // A slot whose last connection was refused is connected all the same.
    driver.connect_unix(key(1, 2), &name).expect("begun");
    connected(&mut driver, key(1, 2)).expect("connected");
    close(&mut driver, key(1, 2), CloseHow::Fin);
    assert_eq!(driver.in_flight(), 0);
    end(driver);
}

fn a_reset_is_a_close<D: Driver>(mut driver: D) {
    let name = abstract_name();
    let id = listen_unix(&mut driver, &name);
    for unread in [false, true] {
        let mut stream = unix_client(&name);
        let socket = accept(&mut driver, id);
        driver.adopt(key(0, unread.into()), socket);
        if unread {
            stream.write_all(b"unread").expect("write");
        } else {
            driver.recv(key(0, 0));
        }
        close(&mut driver, key(0, unread.into()), CloseHow::Reset);
        let seen = read(&mut stream).map_err(|error| error.kind());
        assert_eq!(seen, if unread { Err(ErrorKind::ConnectionReset) } else { Ok(0) });
    }
    quiet(&mut driver);
    end(driver);
}

fn only_what_applies_is_set<D: Driver>(mut driver: D) {
    let name = abstract_name();
    let id = listen_unix(&mut driver, &name);
    let mut stream = unix_client(&name);
    let socket = accept(&mut driver, id);
    driver.adopt(key(0, 1), socket);
    let options = SocketOptions {
        keepalive: Some(crate::config::Keepalive {
            idle: Duration::from_secs(9),
            interval: Duration::from_secs(9),
            count: 9,
        }),
        user_timeout: Some(Duration::from_secs(9)),
        linger: Some(Duration::ZERO),
        send_buffer: Some(30_000),
        ..SocketOptions::default()
    };
    driver.set_options(key(0, 1), &options).expect("the buffer's size");
    let bytes = chain(&driver, &[1; 1000]);
    driver.send(key(0, 1), bytes);
    match next(&mut driver) {
        Event::Sent { chain, .. } => driver.memory().chunks.clear(chain),
        other => panic!("{other:?}"),
    }
    close(&mut driver, key(0, 1), CloseHow::Fin);
    let mut all = Vec::new();
    stream.read_to_end(&mut all).expect("no reset");
    assert_eq!(all, [1; 1000]);
    end(driver);
}
