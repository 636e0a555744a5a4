//! Unix stream sockets of tasks against those of the standard library, and what becomes of the files.
#![cfg(target_os = "linux")]

mod support;
mod task_common;

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixListener as StdListener, UnixStream as Std};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use corelane::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use corelane::{Descriptors, Payload, WorkerConfig};
use support::{PATIENCE, pattern, read_to_eof, same_bytes};
use task_common::*;

/// A path of this test's own, removed with what is there.
struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        static LAST: AtomicU32 = AtomicU32::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed);
        Self(std::env::temp_dir().join(format!("corelane-unix-{}-{number}", std::process::id())))
    }
}

impl std::ops::Deref for Place {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn name(what: &str) -> SocketAddr {
    SocketAddr::from_abstract_name(format!("corelane-{what}-{}", std::process::id())).expect("a name")
}

fn client(path: &Path) -> Std {
    let stream = Std::connect(path).expect("connected");
    stream.set_read_timeout(Some(PATIENCE)).expect("a read timeout");
    stream
}

/// Every backend, with both kinds of descriptors, and with the addresses of those who are accepted asked for.
fn on_all(test: impl Fn(corelane::Builder)) {
    for (descriptors, peer_addresses) in [(Descriptors::Fd, true), (Descriptors::Direct, false)] {
        on_each_backend(|builder| {
            test(builder.worker(WorkerConfig { descriptors, peer_addresses, ..small() }))
        });
    }
}

#[test]
fn every_byte_comes_back_from_an_echo_and_the_file_goes_with_its_listener() {
    on_all(|builder| {
        let place = Place::new();
        let path = place.to_owned();
        run(builder, move || async move {
            let mut listener = UnixListener::bind(&path).await.expect("bound");
            assert_eq!(listener.local_addr().expect("known").as_pathname(), Some(&*path));
            let at = path.clone();
            peer(move || {
                let sent = pattern(9, 1_000_000);
                let mut reader = client(&at);
                let mut writer = reader.try_clone().expect("cloned");
                let bytes = sent.clone();
                let writing = std::thread::spawn(move || {
                    writer.write_all(&bytes).expect("written");
                    writer.shutdown(Shutdown::Write).expect("ended");
                });
                let mut got = Vec::new();
                reader.read_to_end(&mut got).expect("read");
                same_bytes(&got, &sent, "what came back");
                writing.join().expect("written");
            });
            let mut stream = listener.accept().await.expect("accepted");
            while let Some(data) = stream.recv().await.expect("received") {
                stream.send(data).await.expect("sent");
            }
            stream.flush().await.expect("sent");
            drop(listener);
            assert!(!path.exists(), "the file of a dropped listener");
            // And it can be bound again at once.
            drop(UnixListener::bind(&path).await.expect("bound again"));
        });
        assert!(!place.exists());
    });
}

#[test]
fn connecting_out_works_by_path_and_by_name_and_addresses_are_told() {
    on_all(|builder| {
        let place = Place::new();
        let std = StdListener::bind(&*place).expect("bound");
        let path = place.to_owned();
        run(builder, move || async move {
            peer(move || {
                let (mut stream, _) = std.accept().expect("accepted");
                stream.write_all(b"from std").expect("written");
                assert_eq!(read_to_eof(stream), b"to std");
            });
            let mut stream = UnixStream::connect(&path).await.expect("connected");
            let (ours, theirs) = both(stream.local_addr(), stream.peer_addr()).await;
            assert!(ours.expect("known").is_unnamed());
            assert_eq!(theirs.expect("known").as_pathname(), Some(&*path));
            assert_eq!(&stream.recv().await.expect("received").expect("data")[..], b"from std");
            stream.send("to std").await.expect("sent");
            stream.shutdown();
            assert!(stream.recv().await.expect("received").is_none());

            let abstract_name = name("out");
            let mut listener = UnixListener::bind_addr(abstract_name.clone()).await.expect("bound");
            let (near, far) = both(UnixStream::connect_addr(&abstract_name), listener.accept()).await;
            let (mut near, far) = (near.expect("connected"), far.expect("accepted"));
            assert_eq!(
                far.local_addr().await.expect("known").as_abstract_name(),
                abstract_name.as_abstract_name()
            );
            let error = UnixListener::bind_addr(abstract_name.clone()).await.expect_err("in use");
            assert_eq!(error.kind(), ErrorKind::AddrInUse);
            // Halves in two tasks, as with TCP.
            let (mut from, mut to) = far.into_split();
            let echo = corelane::task::spawn(async move {
                let data = from.recv().await?.expect("data");
                to.send_all(data).await?;
                std::io::Result::Ok((from, to))
            });
            near.send("by name").await.expect("sent");
            let mut room = [0; 7];
            near.recv_exact(&mut room).await.expect("received");
            assert_eq!(&room, b"by name");
            let (from, to) = echo.await.expect("no panic").expect("echoed");
            // They are halves of a Unix stream and of nothing else.
            let error = TcpStream::reunite(from, to).expect_err("of another kind");
            drop(UnixStream::reunite(error.0, error.1).expect("of one stream"));
            assert!(near.recv().await.expect("received").is_none());
        });
    });
}

#[test]
fn a_lease_is_forwarded_between_tcp_and_a_unix_socket() {
    on_all(|builder| {
        let place = Place::new();
        let path = place.to_owned();
        run(builder, move || async move {
            let mut backend = UnixListener::bind(&path).await.expect("bound");
            let mut front = TcpListener::bind("127.0.0.1:0").await.expect("bound");
            let (client, outside) =
                both(TcpStream::connect(front.local_addr().expect("known")), front.accept()).await;
            let (inside, server) = both(UnixStream::connect(&path), backend.accept()).await;
            let (mut client, mut outside) = (client.expect("connected"), outside.expect("accepted"));
            let (mut inside, mut server) = (inside.expect("connected"), server.expect("accepted"));
            client.send("request").await.expect("sent");
            let data = outside.recv().await.expect("received").expect("data");
            inside.send_vectored([Payload::from("tcp: "), data.into()]).await.expect("sent");
            let mut line = [0; 12];
            server.recv_exact(&mut line).await.expect("received");
            assert_eq!(&line, b"tcp: request");
            server.send("response").await.expect("sent");
            outside.send(inside.recv().await.expect("received").expect("data")).await.expect("sent");
            assert_eq!(&client.recv().await.expect("received").expect("data")[..], b"response");
            // There is no reset between processes of one machine: an abort is an end.
            server.abort();
            assert!(inside.recv().await.is_ok_and(|data| data.is_none()) || inside.close_reason().is_some());
        });
    });
}

#[test]
fn only_the_file_that_a_listener_made_is_removed_with_it() {
    on_all(|builder| {
        let place = Place::new();
        let path = place.to_owned();
        run(builder, move || async move {
            let listener = UnixListener::bind(&path).await.expect("bound");
            let ours = std::fs::symlink_metadata(&path).expect("there").ino();
            // Somebody takes the path over, as a new version of a server does.
            std::fs::remove_file(&path).expect("removed");
            let other = StdListener::bind(&path).expect("bound");
            let theirs = std::fs::symlink_metadata(&path).expect("there").ino();
            assert_ne!(ours, theirs, "the number is not free while the first listener is open");
            drop(listener);
            assert_eq!(std::fs::symlink_metadata(&path).expect("still there").ino(), theirs);
            drop(Std::connect(&path).expect("the other one still listens"));
            drop(other);

            // The file of a listener that is gone: an error that says what helps.
            let error = UnixListener::bind(&path).await.expect_err("in use");
            assert_eq!(error.kind(), ErrorKind::AddrInUse);
            let text = error.to_string();
            assert!(text.contains("remove the file") && text.contains(&*path.to_string_lossy()), "{text}");
            assert_eq!(
                UnixStream::connect(&path).await.expect_err("stale").kind(),
                ErrorKind::ConnectionRefused
            );
            std::fs::remove_file(&path).expect("removed");
            std::fs::write(&path, "no socket").expect("written");
            let text = UnixListener::bind(&path).await.expect_err("in use").to_string();
            assert!(text.contains("no socket"), "{text}");
            assert_eq!(std::fs::read(&path).expect("untouched"), b"no socket");
            std::fs::remove_file(&path).expect("removed");
            assert_eq!(UnixStream::connect(&path).await.expect_err("nothing").kind(), ErrorKind::NotFound);
            let long = format!("/tmp/{}", "n".repeat(120));
            assert_eq!(UnixListener::bind(long).await.expect_err("too long").kind(), ErrorKind::InvalidInput);
        });
    });
}

#[test]
fn connecting_waits_while_the_listeners_queue_is_full() {
    on_all(|builder| {
        run(builder, || async {
            let full = name("full");
            // As many wait as this worker accepts while no task does, and one in the queue.
            let mut listener = UnixListener::bind_with_backlog(full.clone(), 1).await.expect("bound");
            let mut clients = Vec::new();
            let mut pending = Vec::new();
            for _ in 0..90 {
                let addr = full.clone();
                pending.push(corelane::task::spawn(async move { UnixStream::connect_addr(&addr).await }));
            }
            corelane::time::sleep(Duration::from_millis(30)).await;
            let waiting = pending.iter().filter(|task| !task.is_finished()).count();
            assert!(waiting > 0, "a queue that is never full");
            let mut served = Vec::new();
            for _ in 0..90 {
                let accepted = corelane::time::timeout(PATIENCE, listener.accept()).await;
                served.push(accepted.expect("in time").expect("accepted"));
                corelane::task::yield_now().await;
                while served.len() > 20 {
                    served.swap_remove(0).abort();
                }
                while pending.first().is_some_and(corelane::task::JoinHandle::is_finished) {
                    clients.push(pending.remove(0).await.expect("no panic").expect("connected"));
                    if clients.len() > 20 {
                        clients.swap_remove(0).abort();
                    }
                }
            }
            for task in pending {
                task.await.expect("no panic").expect("connected").abort();
            }
            served.into_iter().for_each(UnixStream::abort);
            clients.into_iter().for_each(UnixStream::abort);
        });
    });
}

#[test]
fn limits_and_the_end_of_a_peer_are_told_as_with_tcp() {
    on_all(|builder| {
        let place = Place::new();
        let path = place.to_owned();
        run(builder, move || async move {
            let mut listener = UnixListener::bind(&path).await.expect("bound");
            let at = path.clone();
            peer(move || assert_eq!(read_to_eof(client(&at)), b""));
            let mut stream = listener.accept().await.expect("accepted");
            stream.set_idle_timeout(Some(Duration::from_millis(10)));
            assert_eq!(stream.recv().await.expect_err("idle").kind(), ErrorKind::TimedOut);
            let at = path.clone();
            peer(move || drop(client(&at)));
            let mut stream = listener.accept().await.expect("accepted");
            assert!(stream.recv().await.expect("received").is_none());
            // Nobody reads any more: sending fails sooner or later.
            let failed = async {
                while stream.send_all(vec![0; 1000]).await.is_ok() {
                    corelane::task::yield_now().await;
                }
            };
            corelane::time::timeout(PATIENCE, failed).await.expect("in time");
            stream.set_deadline(None);
        });
    });
}
