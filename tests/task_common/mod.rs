//! What tests of the async tier on the real kernel share: a worker of their own per backend, checked when it has ended.

#![allow(dead_code)]

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::net::{SocketAddr, TcpStream as Std};
use std::pin::pin;
use std::sync::mpsc;
use std::task::Poll;
use std::thread::JoinHandle;
use std::time::Duration;

use corelane::net::{TcpListener, TcpStream};
use corelane::task::Message;
use corelane::time::timeout;
use corelane::{Backend, Buf, BufferConfig, Builder, Runtime, SetupError, StartError, WorkerConfig};

use super::support::{PATIENCE, connect, stop};

/// Runs a test on every backend that there is here.
pub fn on_each_backend(test: impl Fn(Builder)) {
    for backend in [Backend::IoUring, Backend::Epoll] {
        let builder = || Runtime::builder().backend(backend).workers(1);
        match builder().start_tasks(|_| async {}) {
            Ok(runtime) => drop(stop(runtime)),
            Err(StartError::Kernel(
                error @ (SetupError::NotImplemented | SetupError::Sysctl { .. } | SetupError::Seccomp),
            )) => {
                println!("skipped on {backend}: {error}");
                continue;
            }
            Err(error) => panic!("the runtime does not start: {error}"),
        }
        println!("on {backend}");
        test(builder());
    }
}

/// Runs a future as the main task of a worker and, when it has ended, stops the worker and checks that nothing is left.
pub fn run<F>(builder: Builder, main: impl FnOnce() -> F + Send + 'static)
where
    F: Future<Output = ()> + 'static,
{
    watch(builder, main, |_| ());
}

/// [`run`], with the runtime to be looked at from outside meanwhile.
pub fn watch<F>(
    builder: Builder,
    main: impl FnOnce() -> F + Send + 'static,
    meanwhile: impl FnOnce(&Runtime<Message>),
) where
    F: Future<Output = ()> + 'static,
{
    let (ended, end) = mpsc::channel();
    let once = std::sync::Arc::new(std::sync::Mutex::new(Some((main, ended))));
    let started = builder.start_tasks(move |_| {
        let taken = once.lock().expect("nobody panicked").take();
        async move {
            let (main, ended) = taken.expect("one worker");
            main().await;
            ended.send(PEERS.take()).expect("the test waits");
        }
    });
    let runtime = started.expect("started");
    meanwhile(&runtime);
    // One that panicked is told by the stop.
    let peers = match end.recv_timeout(PATIENCE) {
        Ok(peers) => peers,
        Err(mpsc::RecvTimeoutError::Disconnected) => Vec::new(),
        Err(mpsc::RecvTimeoutError::Timeout) => {
            panic!("the main task has not ended after {PATIENCE:?}: {:#?}", runtime.metrics().total())
        }
    };
    stop(runtime);
    for peer in peers {
        peer.join().expect("the peer found what it expected");
    }
}

thread_local! {
    /// Threads that a worker's main task has started.
    static PEERS: RefCell<Vec<JoinHandle<()>>> = const { RefCell::new(Vec::new()) };
}

/// Runs the other side of a connection in a thread of its own; a test whose peer panics fails.
pub fn peer(run: impl FnOnce() + Send + 'static) {
    PEERS.with_borrow_mut(|peers| peers.push(std::thread::spawn(run)));
}

/// Listens, and has `run` run as a [`peer`] that is given the address.
pub async fn listen(run: impl FnOnce(SocketAddr) + Send + 'static) -> TcpListener {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let addr = listener.local_addr().expect("its address");
    peer(move || run(addr));
    listener
}

/// The stream whose other end is the connection that the peer `run` is given.
pub async fn accepted(run: impl FnOnce(Std) + Send + 'static) -> TcpStream {
    let mut listener = listen(move |addr| run(connect(addr))).await;
    listener.accept().await.expect("accepted")
}

/// The next piece.
pub async fn piece(stream: &mut TcpStream) -> Buf {
    timeout(PATIENCE, stream.recv()).await.expect("in time").expect("received").expect("not the end")
}

/// A worker with little of everything.
pub fn small() -> WorkerConfig {
    let buffers = BufferConfig { size: 4096, count: 256, send_count: 4, ..BufferConfig::default() };
    WorkerConfig {
        max_connections: 128,
        buffers,
        high_water: 16 << 10,
        low_water: 4 << 10,
        send_limit: 64 << 10,
        ..WorkerConfig::default()
    }
}

/// Waits for two futures at a time, in one task.
pub async fn both<A: Future, B: Future>(a: A, b: B) -> (A::Output, B::Output) {
    let (mut a, mut b) = (pin!(a), pin!(b));
    let (mut from_a, mut from_b) = (None, None);
    poll_fn(|cx| {
        if from_a.is_none()
            && let Poll::Ready(value) = a.as_mut().poll(cx)
        {
            from_a = Some(value);
        }
        if from_b.is_none()
            && let Poll::Ready(value) = b.as_mut().poll(cx)
        {
            from_b = Some(value);
        }
        if from_a.is_none() || from_b.is_none() {
            return Poll::Pending;
        }
        Poll::Ready((from_a.take().expect("there"), from_b.take().expect("there")))
    })
    .await
}

/// Polls a future once, without waiting for it.
pub async fn poll_once<F: Future>(future: F) -> Poll<F::Output> {
    let mut future = pin!(future);
    poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await
}

/// Waits in a task until `done` holds; it is asked every millisecond.
pub async fn until(what: &str, mut done: impl FnMut() -> bool) {
    let asking = async {
        while !done() {
            corelane::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let asked = corelane::time::timeout(PATIENCE, asking).await;
    assert!(asked.is_ok(), "waited {PATIENCE:?} in vain for: {what}");
}
