//! The server of tasks on the real kernel: the end, the limits, what is counted and told.
#![cfg(target_os = "linux")]

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream as Std};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use corelane::net::{TcpListener, TcpStream};
use corelane::task::Message;
use corelane::time::sleep;
use corelane::{Backend, Runtime, ServeError, Server, ServerReport, WorkerConfig};

/// No test waits longer than this for any one thing.
const PATIENCE: Duration = Duration::from_secs(30);

/// Loopback, with a port of the kernel's choice.
fn any_port() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// Waits until so many bytes were received.
fn received(runtime: &Runtime<Message>, bytes: u64) {
    let until = Instant::now() + PATIENCE;
    while runtime.metrics().total().bytes_received != bytes {
        assert!(Instant::now() < until, "waited in vain for {bytes} bytes");
        std::thread::sleep(Duration::from_millis(1));
    }
}

struct Running {
    runtime: Runtime<Message>,
    addr: SocketAddr,
    reports: Receiver<ServerReport>,
}

/// A runtime whose workers each run such a server, and send their reports.
fn start<F>(
    backend: Backend,
    workers: usize,
    config: WorkerConfig,
    server: impl Fn() -> Server + Clone + Send + Sync + 'static,
    handler: impl Fn(TcpStream) -> F + Clone + Send + Sync + 'static,
) -> Running
where
    F: Future<Output = std::io::Result<()>> + 'static,
{
    let (to, reports) = channel();
    let builder = Runtime::builder().backend(backend).workers(workers).worker(config).listen(any_port());
    let runtime = builder.start_tasks(move |_| {
        let (server, handler, to) = (server.clone(), handler.clone(), to.clone());
        async move {
            let report = server().serve(TcpListener::of_builder(0), handler).await?;
            to.send(report).expect("the test waits for it");
            Ok::<(), ServeError>(())
        }
    });
    let runtime = runtime.expect("started");
    let addr = runtime.info().listeners[0].addr;
    Running { runtime, addr, reports }
}

fn connect(addr: SocketAddr) -> Std {
    let client = Std::connect(addr).expect("connected");
    client.set_read_timeout(Some(PATIENCE)).expect("a read timeout");
    client
}

/// Answers each request, a byte, after that many tenths of a second.
async fn slowly(mut stream: TcpStream) -> std::io::Result<()> {
    while let Some(data) = stream.recv().await? {
        sleep(Duration::from_millis(100) * u32::from(data[0])).await;
        stream.send("done").await?;
    }
    Ok(())
}

fn request(client: &mut Std, tenths: u8) {
    client.write_all(&[tenths]).expect("written");
}

fn answer(client: &mut Std) {
    let mut answer = [0; 4];
    client.read_exact(&mut answer).expect("an answer");
    assert_eq!(&answer, b"done");
}

fn backends() -> &'static [Backend] {
    if cfg!(target_os = "linux") { &[Backend::Auto, Backend::Epoll] } else { &[Backend::Auto] }
}

#[test]
fn at_a_stop_the_idle_end_at_once_and_the_busy_finish() {
    for &backend in backends() {
        let Running { runtime, addr, reports } =
            start(backend, 2, WorkerConfig::default(), Server::new, slowly);
        let mut idle: Vec<Std> = (0..20).map(|_| connect(addr)).collect();
        for client in &mut idle {
            request(client, 0);
            answer(client);
        }
        let mut busy = connect(addr);
        let began = Instant::now();
        request(&mut busy, 30);
        received(&runtime, 21);
        let stopping = std::thread::spawn(move || runtime.shutdown(PATIENCE).expect("a report"));
        for client in &mut idle {
            assert_eq!(client.read(&mut [0]).expect("no reset"), 0);
        }
        assert!(began.elapsed() < Duration::from_secs(3), "the idle ones did not wait for the busy one");
        // The listener is closed when its last accept has ended, a turn later: until then the kernel may take one in,
        // which is reset.
        while !matches!(Std::connect(addr), Err(error) if error.kind() == ErrorKind::ConnectionRefused) {
            assert!(began.elapsed() < PATIENCE, "the listener is not closed");
            std::thread::sleep(Duration::from_millis(1));
        }
        drop(idle);
        answer(&mut busy);
        assert_eq!(busy.read(&mut [0]).expect("no reset"), 0);
        drop(busy);
        let report = stopping.join().expect("the stop");
        assert_eq!((report.aborted, report.ops_in_kernel, report.buffers_outstanding), (0, 0, 0), "{report}");
        assert!(began.elapsed() < PATIENCE, "long before the deadline");
        let report: ServerReport = reports.iter().sum();
        assert_eq!((report.accepted, report.served, report.aborted), (21, 21, 0), "{report}");
    }
}

#[test]
fn whoever_is_busy_at_the_deadline_is_reset_and_counted() {
    for &backend in backends() {
        let Running { runtime, addr, reports } =
            start(backend, 1, WorkerConfig::default(), Server::new, slowly);
        let mut late = connect(addr);
        request(&mut late, 250);
        let mut idle = connect(addr);
        request(&mut idle, 0);
        answer(&mut idle);
        received(&runtime, 2);
        let began = Instant::now();
        let report = runtime.shutdown(Duration::from_millis(300)).expect("a report");
        assert!(began.elapsed() >= Duration::from_millis(300));
        assert!(began.elapsed() < Duration::from_secs(20), "the deadline ends it, not the handler");
        let error = late.read(&mut [0]).expect_err("it is reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        assert_eq!(idle.read(&mut [0]).expect("no reset"), 0);
        assert_eq!((report.ops_in_kernel, report.buffers_outstanding), (0, 0), "{report}");
        let report = reports.recv().expect("a report");
        assert_eq!((report.accepted, report.served, report.aborted), (2, 1, 1), "{report}");
    }
}

#[test]
fn at_the_limit_clients_wait_for_their_turn() {
    for &backend in backends() {
        let (active, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (counting, highest) = (active.clone(), most.clone());
        let server = || Server::new().max_connections(4);
        let handler = move |mut stream: TcpStream| {
            let (active, most) = (counting.clone(), highest.clone());
            async move {
                most.fetch_max(active.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                let served = async {
                    stream.send("welcome").await?;
                    while stream.recv().await?.is_some() {}
                    Ok(())
                };
                let served = served.await;
                active.fetch_sub(1, Ordering::SeqCst);
                served
            }
        };
        let Running { runtime, addr, reports } = start(backend, 1, WorkerConfig::default(), server, handler);
        // All of them are connected, by the kernel; one after the other is served.
        let clients: Vec<Std> = (0..40).map(|_| connect(addr)).collect();
        let served: Vec<_> = clients
            .into_iter()
            .map(|mut client| {
                std::thread::spawn(move || client.read_exact(&mut [0; 7]).expect("its turn comes"))
            })
            .collect();
        for client in served {
            client.join().expect("served");
        }
        assert!(most.load(Ordering::SeqCst) <= 4);
        runtime.shutdown(PATIENCE).expect("a report");
        let report = reports.recv().expect("a report");
        assert_eq!((report.accepted, report.served), (40, 40), "{report}");
    }
}

#[test]
fn one_address_gets_no_more_than_its_share() {
    for &backend in backends() {
        let config = WorkerConfig { peer_addresses: true, ..WorkerConfig::default() };
        let server = || Server::new().max_per_ip(2);
        let Running { runtime, addr, reports } = start(backend, 1, config, server, |mut stream| async move {
            stream.send("welcome").await?;
            while stream.recv().await?.is_some() {}
            Ok(())
        });
        let from = |ip: &str| {
            let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None);
            let socket = socket.expect("a socket");
            let source: SocketAddr = format!("{ip}:0").parse().expect("an address");
            socket.bind(&source.into()).expect("bound");
            socket.connect(&addr.into()).expect("connected");
            socket.set_read_timeout(Some(PATIENCE)).expect("a read timeout");
            Std::from(socket)
        };
        let welcome = |client: &mut Std| client.read_exact(&mut [0; 7]).map_err(|error| error.kind());
        let mut first: Vec<Std> = (0..2).map(|_| from("127.0.0.1")).collect();
        for client in &mut first {
            assert_eq!(welcome(client), Ok(()));
        }
        assert_eq!(welcome(&mut from("127.0.0.1")), Err(ErrorKind::ConnectionReset));
        assert_eq!(welcome(&mut from("127.0.0.2")), Ok(()));
        drop(first.pop());
        // Its place is free as soon as its handler has seen the end.
        let began = Instant::now();
        let mut refused = 1;
        while welcome(&mut from("127.0.0.1")).is_err() {
            refused += 1;
            assert!(began.elapsed() < PATIENCE, "the place of one who has gone is free");
        }
        drop(first);
        runtime.shutdown(PATIENCE).expect("a report");
        let report = reports.recv().expect("a report");
        assert_eq!((report.accepted, report.served, report.refused), (4 + refused, 4, refused), "{report}");
    }
}

#[test]
fn errors_and_panics_are_counted_and_told() {
    let told = Arc::new(Mutex::new(Vec::new()));
    let telling = told.clone();
    let server = move || {
        let telling = telling.clone();
        Server::new().on_failure(move |failure| {
            telling.lock().expect("nobody panics with it").push(failure.to_string());
        })
    };
    let Running { runtime, addr, reports } =
        start(Backend::Auto, 2, WorkerConfig::default(), server, |mut stream| async move {
            let Some(what) = stream.recv().await? else { return Ok(()) };
            match &what[..] {
                b"panic" => panic!("a test panics here"),
                _ => Err(std::io::Error::other("a test fails here")),
            }
        });
    for n in 0..20 {
        let mut client = connect(addr);
        client.write_all(if n % 4 == 0 { b"panic" } else { b"error" }).expect("written");
        let read = client.read(&mut [0]).map_err(|error| error.kind());
        // After a panic no client may take what it got for the whole.
        let expected = if n % 4 == 0 { Err(ErrorKind::ConnectionReset) } else { Ok(0) };
        assert_eq!(read, expected);
    }
    runtime.shutdown(PATIENCE).expect("a report");
    let report: ServerReport = reports.iter().sum();
    assert_eq!((report.accepted, report.failed, report.panicked, report.served), (20, 15, 5, 0), "{report}");
    let told = told.lock().expect("nobody panicked with it");
    assert_eq!(told.iter().filter(|text| text.ends_with(": a test fails here")).count(), 15, "{told:?}");
    let panics = told.iter().filter(|text| text.ends_with("the handler panicked: a test panics here"));
    assert_eq!(panics.count(), 5, "{told:?}");
}

/// What a server says that cannot begin, as the runtime reports it.
fn refusal(config: WorkerConfig, server: impl Fn() -> Server + Clone + Send + Sync + 'static) -> String {
    let started = Runtime::builder().worker(config).listen(any_port()).start_tasks(move |_| {
        let server = server.clone();
        server().serve(TcpListener::of_builder(0), slowly)
    });
    started.expect("started").join().expect_err("it cannot begin").to_string()
}

#[test]
fn limits_that_cannot_be_are_refused_with_what_to_do() {
    let plain = WorkerConfig::default;
    let text = refusal(plain(), || Server::new().max_connections(0));
    assert!(text.contains("max_connections is 0") && text.contains("at least 1"), "{text}");
    let text = refusal(plain(), || Server::new().max_connections(1_000_000));
    assert!(text.contains("1000000") && text.contains("16384") && text.contains("raise"), "{text}");
    let text = refusal(plain(), || Server::new().max_per_ip(3));
    assert!(text.contains("set WorkerConfig::peer_addresses"), "{text}");
    let known = WorkerConfig { peer_addresses: true, ..plain() };
    let text = refusal(known, || Server::new().max_per_ip(0));
    assert!(text.contains("max_per_ip is 0"), "{text}");
}

#[test]
fn a_listener_that_is_not_there_is_an_error() {
    let started = Runtime::builder().start_tasks(|_| Server::new().serve(TcpListener::of_builder(0), slowly));
    let text = started.expect("started").join().expect_err("there is none").to_string();
    assert!(text.contains("no such listener") && text.contains("Builder::listen"), "{text}");
}
