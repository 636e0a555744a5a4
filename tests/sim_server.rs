//! The server of tasks in a simulated world: limits, counts, and the end, exact to the millisecond.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use corelane::net::{TcpListener, TcpStream};
use corelane::sim::{Exploration, Faults, Peer, Sim, SimConfig, SimWorker};
use corelane::task::Message;
use corelane::time::sleep;
use corelane::{
    BufferConfig, ListenerConfig, Server, ServerReport, ShutdownToken, UringFeatures, WorkerConfig,
};

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);

fn addr() -> SocketAddr {
    "10.0.0.1:80".parse().expect("an address")
}

fn small() -> WorkerConfig {
    let buffers = BufferConfig { count: 64, send_count: 8, ..BufferConfig::default() };
    WorkerConfig { max_connections: 64, mailbox: 64, buffers, ..WorkerConfig::default() }
}

/// What a server came to, for the test.
#[derive(Clone, Default)]
struct Outcome(Rc<Cell<Option<ServerReport>>>);

impl Outcome {
    fn get(&self) -> Option<ServerReport> {
        self.0.get()
    }

    fn is(&self, accepted: u64, served: u64, failed: u64, panicked: u64, refused: u64, aborted: u64) {
        let report = self.get().expect("the server has ended");
        let is =
            (report.accepted, report.served, report.failed, report.panicked, report.refused, report.aborted);
        assert_eq!(is, (accepted, served, failed, panicked, refused, aborted), "{report}");
    }
}

/// A worker whose main future is a server; its outcome.
fn start<F>(
    sim: &Sim,
    config: WorkerConfig,
    server: impl FnOnce() -> Server + 'static,
    handler: impl Fn(TcpStream) -> F + 'static,
) -> (SimWorker<Message>, Outcome)
where
    F: Future<Output = std::io::Result<()>> + 'static,
{
    let outcome = Outcome::default();
    let place = outcome.clone();
    let started = sim.tasks(config, &[ListenerConfig::new(addr())], move || async move {
        let report = server().serve(TcpListener::of_builder(0), handler).await?;
        place.0.set(Some(report));
        Ok::<(), corelane::ServeError>(())
    });
    (started.expect("started"), outcome)
}

async fn echo(mut stream: TcpStream) -> std::io::Result<()> {
    while let Some(data) = stream.recv().await? {
        stream.send(data).await?;
    }
    Ok(())
}

/// Answers each request, a byte, after that many tenths of a second.
async fn slowly(mut stream: TcpStream) -> std::io::Result<()> {
    while let Some(data) = stream.recv().await? {
        sleep(100 * MS * u32::from(data[0])).await;
        stream.send("done").await?;
    }
    Ok(())
}

fn connected(sim: &Sim, count: usize) -> Vec<Peer> {
    (0..count).map(|_| sim.connect(addr())).collect()
}

fn answered(sim: &Sim, peers: &[Peer], answer: &[u8]) {
    sim.run_until(SEC, || peers.iter().all(|peer| peer.received() == answer)).expect("answered");
}

#[test]
fn at_a_stop_the_idle_end_at_once_the_busy_finish_and_the_late_are_reset() {
    let sim = Sim::new(SimConfig::seeded(1));
    let (worker, outcome) = start(&sim, small(), Server::new, slowly);
    let idle = connected(&sim, 5);
    for peer in &idle {
        peer.send(&[0]);
    }
    answered(&sim, &idle, b"done");
    let (busy, late) = (sim.connect(addr()), sim.connect(addr()));
    busy.send(&[30]);
    late.send(&[80]);
    sim.run_for(10 * MS);
    worker.stop(5 * SEC);
    let began = sim.now();

    sim.run_until(5 * MS, || idle.iter().all(Peer::is_eof)).expect("the idle end at once");
    assert!(idle.iter().all(|peer| !peer.is_reset()));
    let newcomer = sim.connect(addr());
    sim.run_until(10 * MS, || newcomer.is_refused()).expect("the listener is closed");

    sim.run_until(5 * SEC, || busy.is_eof()).expect("the busy one ends");
    assert_eq!(busy.received(), b"done", "its answer arrives");
    let took = sim.now().since(began);
    assert!(took >= 2900 * MS && took < 3000 * MS, "{took:?}");
    assert!(!late.is_over() && worker.is_running() && outcome.get().is_none());

    sim.run_until(5 * SEC, || late.is_reset()).expect("the late one is reset");
    let took = sim.now().since(began);
    assert!(took >= 5000 * MS && took < 5005 * MS, "{took:?}");
    assert_eq!(late.received(), b"");
    sim.run_until(SEC, || !worker.is_running()).expect("the worker ends");
    outcome.is(7, 6, 0, 0, 0, 1);
    let report = worker.report().expect("it has ended");
    assert_eq!((report.aborted, report.ops_in_kernel, report.buffers_outstanding), (1, 0, 0));
}

#[test]
fn a_stop_with_nobody_left_ends_long_before_the_deadline() {
    let sim = Sim::new(SimConfig::seeded(2));
    let (worker, outcome) = start(&sim, small(), Server::new, slowly);
    let busy = sim.connect(addr());
    busy.send(&[10]);
    sim.run_for(10 * MS);
    worker.stop(3600 * SEC);
    sim.run_until(2 * SEC, || busy.is_eof()).expect("it is served");
    assert_eq!(busy.received(), b"done");
    busy.close();
    sim.run_until(100 * MS, || !worker.is_running()).expect("it ends with its last handler");
    outcome.is(1, 1, 0, 0, 0, 0);
}

#[test]
fn a_handler_that_is_busy_without_its_connection_is_aborted_too() {
    let sim = Sim::new(SimConfig::seeded(3));
    let (worker, outcome) = start(&sim, small(), Server::new, |stream: TcpStream| async move {
        drop(stream);
        sleep(100 * SEC).await;
        Ok(())
    });
    let peer = sim.connect(addr());
    sim.run_until(SEC, || peer.is_eof()).expect("closed in good order");
    worker.stop(2 * SEC);
    let began = sim.now();
    sim.run_until(3 * SEC, || !worker.is_running()).expect("the deadline ends it");
    assert!(sim.now().since(began) >= 2 * SEC);
    outcome.is(1, 0, 0, 0, 0, 1);
}

#[test]
fn what_arrived_before_the_stop_is_still_served() {
    for seed in 0..50 {
        let sim = Sim::new(SimConfig::seeded(seed));
        // Three requests at once; the stop comes in the middle of the first.
        let (worker, outcome) = start(&sim, small(), Server::new, |mut stream: TcpStream| async move {
            while let Some(data) = stream.recv().await? {
                for _ in data.iter() {
                    sleep(100 * MS).await;
                    stream.send("done ").await?;
                }
            }
            Ok(())
        });
        let peer = sim.connect(addr());
        for _ in 0..3 {
            peer.send(&[1]);
            sim.run_for(2 * MS);
        }
        sim.run_for(20 * MS);
        worker.stop(5 * SEC);
        sim.run_until(SEC, || peer.is_eof()).expect("it is served");
        assert_eq!(peer.received(), b"done done done ", "seed {seed}");
        peer.close();
        sim.run_until(100 * MS, || !worker.is_running()).expect("it ends");
        outcome.is(1, 1, 0, 0, 0, 0);
    }
}

#[test]
fn at_the_limit_clients_wait_in_the_kernels_queue_and_each_gets_its_turn() {
    // With a short queue and a high limit many are accepted with one operation until the limit is near.
    let cases =
        [(3, 128, true), (3, 128, false), (20, 4, true), (20, 4, false), (40, 4, true), (40, 1, true)];
    for (seed, (limit, backlog, multishot)) in (0..60).zip(cases.into_iter().cycle()) {
        let config = SimConfig { faults: Faults::benign(0.02), ..SimConfig::seeded(seed) };
        let sim = Sim::new(config);
        let uring = UringFeatures { multishot_accept: multishot, ..UringFeatures::default() };
        let (active, ended) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        let (counted, counting) = (active.clone(), ended.clone());
        let handler = move |mut stream: TcpStream| {
            let (active, ended) = (counted.clone(), counting.clone());
            async move {
                active.set(active.get() + 1);
                assert!(active.get() <= limit, "{} at a time", active.get());
                let served = async {
                    stream.recv().await?;
                    sleep(20 * MS).await;
                    stream.send("done").await?;
                    stream.flush().await
                };
                let served = served.await;
                active.set(active.get() - 1);
                ended.set(ended.get() + 1);
                served
            }
        };
        let worker = WorkerConfig { uring, max_connections: 512, ..small() };
        let listener = ListenerConfig { backlog, ..ListenerConfig::new(addr()) };
        let outcome = Outcome::default();
        let place = outcome.clone();
        let worker = sim.tasks(worker, &[listener], move || async move {
            let server = Server::new().max_connections(limit);
            place.0.set(Some(server.serve(TcpListener::of_builder(0), handler).await?));
            Ok::<(), corelane::ServeError>(())
        });
        let worker = Rc::new(worker.expect("started"));
        let mut peers: Vec<Peer> = Vec::new();
        let seen = worker.clone();
        // One operation that accepts many may accept more until it is cancelled, if they come faster than a turn;
        // who is beyond the limit then waits for its handler.
        let is_exact = !multishot || limit < 2 * (backlog + 1);
        let surplus = if is_exact { 0 } else { 64 };
        sim.always("no more are accepted than the limit", move || {
            let (accepted, ended) = (seen.metrics().accepted, ended.get());
            let most = ended + u64::from(limit) + surplus;
            if accepted <= most { Ok(()) } else { Err(format!("{accepted} accepted, {ended} ended")) }
        });
        while peers.len() < 120 {
            peers.extend(connected(&sim, 1 + sim.random(30) as usize));
            peers.iter().rev().take(30).filter(|peer| peer.sent_all()).for_each(|peer| peer.send(b"x"));
            sim.run_for(MS * sim.random(10) as u32);
        }
        let served = || peers.iter().all(|peer| peer.received().starts_with(b"done"));
        sim.run_until(60 * SEC, served).unwrap_or_else(|stuck| panic!("{stuck}"));
        worker.stop(SEC);
        sim.run_until(5 * SEC, || !worker.is_running()).expect("it ends");
        let report = outcome.get().expect("a report");
        let all = peers.len() as u64;
        assert_eq!((report.accepted, report.served), (all, all), "{report}");
    }
}

#[test]
fn while_the_limit_is_reached_the_worker_holds_no_more_connections_than_it() {
    let sim = Sim::new(SimConfig::seeded(9));
    let (worker, outcome) = start(&sim, small(), || Server::new().max_connections(3), echo);
    let peers = connected(&sim, 10);
    for peer in &peers {
        peer.send(b"x");
    }
    sim.run_for(SEC);
    assert_eq!((worker.connections(), worker.metrics().accepted), (3, 3));
    let served = peers.iter().filter(|peer| peer.received() == b"x").count();
    assert_eq!(served, 3);
    // One goes, the next one comes.
    let first = peers.iter().find(|peer| peer.received() == b"x").expect("one was served");
    first.close();
    sim.run_until(SEC, || peers.iter().filter(|peer| peer.received() == b"x").count() == 4)
        .expect("the next");
    sim.run_for(SEC);
    assert_eq!((worker.connections(), worker.metrics().accepted), (3, 4));
    worker.stop(SEC);
    sim.run_until(2 * SEC, || !worker.is_running()).expect("it ends");
    outcome.is(4, 4, 0, 0, 0, 0);
}

#[test]
fn a_server_that_begins_late_counts_those_who_were_accepted_before() {
    for seed in 0..20 {
        let sim = Sim::new(SimConfig::seeded(seed));
        let ended = Rc::new(Cell::new(0));
        let counting = ended.clone();
        // With a budget of one many are accepted and not yet handed to the tier.
        let config = WorkerConfig { accept_budget: if seed % 2 == 0 { 1 } else { 64 }, ..small() };
        let worker = sim.tasks(config, &[ListenerConfig::new(addr())], move || async move {
            sleep(100 * MS).await;
            let handler = move |mut stream: TcpStream| {
                let ended = counting.clone();
                async move {
                    stream.send("done").await?;
                    sleep(50 * MS).await;
                    ended.set(ended.get() + 1);
                    Ok::<(), std::io::Error>(())
                }
            };
            Server::new().max_connections(3).serve(TcpListener::of_builder(0), handler).await
        });
        let worker = Rc::new(worker.expect("started"));
        let mut peers = connected(&sim, 10);
        // It begins while others arrive.
        sim.run_for(100 * MS + MS / 100 * sim.random(100) as u32);
        peers.extend(connected(&sim, 20));
        sim.run_for(10 * MS);
        let before = worker.metrics().accepted;
        peers.extend(connected(&sim, 20));
        let seen = worker.clone();
        sim.always("no more are accepted than the limit", move || {
            let (accepted, most) = (seen.metrics().accepted, before.max(ended.get() + 3));
            if accepted <= most { Ok(()) } else { Err(format!("{accepted} accepted, {most} at most")) }
        });
        let served = || peers.iter().all(|peer| peer.received() == b"done");
        sim.run_until(20 * SEC, served).unwrap_or_else(|stuck| panic!("{stuck}"));
    }
}

#[test]
fn one_address_gets_no_more_than_its_share() {
    let sim = Sim::new(SimConfig::seeded(4));
    let config = WorkerConfig { peer_addresses: true, ..small() };
    let (worker, outcome) = start(&sim, config, || Server::new().max_per_ip(2), echo);
    let from = |ip: &str| {
        let from: SocketAddr = format!("{ip}:0").parse().expect("an address");
        let peer = sim.connect_from(from, addr());
        peer.send(b"hi");
        peer
    };
    let greedy: Vec<Peer> = (0..5).map(|_| from("10.0.0.7")).collect();
    let modest = from("10.0.0.8");
    sim.run_for(100 * MS);
    assert_eq!(modest.received(), b"hi");
    let served = greedy.iter().filter(|peer| peer.received() == b"hi").count();
    let reset = greedy.iter().filter(|peer| peer.is_reset()).count();
    assert_eq!((served, reset), (2, 3));
    assert_eq!(worker.connections(), 3, "those who were refused hold nothing");
    // Whoever goes makes room for one of the same address.
    greedy.iter().find(|peer| !peer.is_over()).expect("two are served").close();
    sim.run_for(100 * MS);
    let again = from("10.0.0.7");
    let beyond = from("10.0.0.7");
    sim.run_for(100 * MS);
    assert_eq!(usize::from(again.is_reset()) + usize::from(beyond.is_reset()), 1);
    worker.stop(SEC);
    sim.run_until(2 * SEC, || !worker.is_running()).expect("it ends");
    outcome.is(8, 4, 0, 0, 4, 0);
}

#[test]
fn errors_and_panics_end_one_connection_and_are_told() {
    let sim = Sim::new(SimConfig::seeded(5));
    let told: Rc<RefCell<Vec<String>>> = Rc::default();
    let telling = told.clone();
    let server = move || {
        Server::new().on_failure(move |failure| {
            assert_eq!(failure.error().is_none(), failure.panic_message().is_some());
            assert_eq!(failure.id().worker(), 0);
            assert!(failure.peer().is_none_or(|peer| peer.ip() == addr().ip()));
            telling.borrow_mut().push(failure.to_string());
        })
    };
    let (worker, outcome) = start(&sim, small(), server, |mut stream: TcpStream| async move {
        while let Some(data) = stream.recv().await? {
            match &data[..] {
                b"error" => return Err(std::io::Error::other("no such thing")),
                b"panic" => {
                    stream.send("half an ans").await?;
                    panic!("at the wrong moment");
                }
                _ => stream.send(data).await?,
            }
        }
        Ok(())
    });
    let (fine, error, panic) = (sim.connect(addr()), sim.connect(addr()), sim.connect(addr()));
    error.send(b"error");
    panic.send(b"panic");
    sim.run_until(SEC, || error.is_eof() && panic.is_reset()).expect("both end");
    fine.send(b"fine");
    answered(&sim, std::slice::from_ref(&fine), b"fine");
    worker.stop(SEC);
    sim.run_until(2 * SEC, || !worker.is_running()).expect("it ends");
    outcome.is(3, 1, 1, 1, 0, 0);
    let mut told = told.take();
    told.sort_by_key(|text| text.contains("panicked"));
    assert!(told[0].starts_with("connection 0.") && told[0].ends_with(": no such thing"), "{told:?}");
    assert!(told[1].ends_with(": the handler panicked: at the wrong moment"), "{told:?}");
    assert_eq!(told.len(), 2);
}

#[test]
fn a_handler_that_panics_before_it_is_one_and_a_hook_that_panics_end_nobody_else() {
    let sim = Sim::new(SimConfig::seeded(8));
    let told = Rc::new(Cell::new(0));
    let telling = told.clone();
    let server = move || {
        Server::new().max_connections(1).on_failure(move |_| {
            telling.set(telling.get() + 1);
            panic!("a hook panics");
        })
    };
    let first = Cell::new(true);
    let (worker, outcome) = start(&sim, small(), server, move |stream: TcpStream| {
        assert!(!first.replace(false), "not even begun");
        echo(stream)
    });
    let unlucky = sim.connect(addr());
    sim.run_until(SEC, || unlucky.is_reset()).expect("reset");
    let next = sim.connect(addr());
    next.send(b"fine");
    answered(&sim, std::slice::from_ref(&next), b"fine");
    worker.stop(SEC);
    sim.run_until(2 * SEC, || !worker.is_running()).expect("it ends");
    outcome.is(2, 1, 0, 1, 0, 0);
    assert_eq!(told.get(), 1);
}

#[test]
fn a_server_with_a_token_of_its_own_ends_alone() {
    let sim = Sim::new(SimConfig::seeded(6));
    let place: Rc<RefCell<Option<ShutdownToken>>> = Rc::default();
    let (given, outcome) = (place.clone(), Outcome::default());
    let ended = outcome.clone();
    let stopped = Rc::new(Cell::new(false));
    let seen = stopped.clone();
    let other: SocketAddr = "10.0.0.1:81".parse().expect("an address");
    let listeners = [ListenerConfig::new(addr()), ListenerConfig::new(other)];
    let worker = sim.tasks(small(), &listeners, move || async move {
        let token = ShutdownToken::new();
        *given.borrow_mut() = Some(token.clone());
        let server = Server::new().stop_on(token, 2 * SEC);
        let report = server.serve(TcpListener::of_builder(0), slowly).await?;
        ended.0.set(Some(report));
        // The runtime goes on.
        let report = Server::new().max_connections(1).serve(TcpListener::of_builder(1), echo).await?;
        seen.set(report.served == 1);
        Ok::<(), corelane::ServeError>(())
    });
    let worker = worker.expect("started");
    let (idle, busy, late) = (sim.connect(addr()), sim.connect(addr()), sim.connect(addr()));
    busy.send(&[10]);
    late.send(&[50]);
    sim.run_for(10 * MS);
    place.borrow().as_ref().expect("it runs").cancel();
    sim.run_until(5 * MS, || idle.is_eof()).expect("the idle one ends at once");
    let newcomer = sim.connect(addr());
    sim.run_until(10 * MS, || newcomer.is_refused()).expect("the listener is closed");
    sim.run_until(2 * SEC, || busy.is_eof()).expect("the busy one ends");
    assert_eq!(busy.received(), b"done");
    sim.run_until(2 * SEC, || late.is_reset()).expect("the late one is reset");
    sim.run_until(SEC, || outcome.get().is_some()).expect("the server has ended");
    outcome.is(3, 2, 0, 0, 0, 1);

    let again = sim.connect(other);
    again.send(b"still there");
    answered(&sim, std::slice::from_ref(&again), b"still there");
    worker.stop(SEC);
    sim.run_until(2 * SEC, || !worker.is_running()).expect("it ends");
    assert!(again.is_eof() && stopped.get());
}

#[test]
fn a_server_that_is_dropped_takes_everything_with_it() {
    let sim = Sim::new(SimConfig::seeded(7));
    let worker = sim.tasks(small(), &[ListenerConfig::new(addr())], || async {
        let serving = Server::new().serve(TcpListener::of_builder(0), echo);
        assert!(corelane::time::timeout(SEC, serving).await.is_err());
        corelane::task::stopped().await;
    });
    let worker = worker.expect("started");
    let peers = connected(&sim, 5);
    sim.run_until(2 * SEC, || peers.iter().all(Peer::is_reset)).expect("all are reset");
    assert!(sim.now() >= corelane::Time::ZERO + SEC);
    let newcomer = sim.connect(addr());
    sim.run_until(SEC, || newcomer.is_refused()).expect("nobody listens");
    assert!(worker.is_running());
    drop(peers);
    sim.run_until(SEC, || worker.check_at_rest().is_ok()).expect("nothing is left");
}

/// Whatever goes wrong, every accepted connection is counted once, and nothing is left.
#[test]
fn every_connection_is_counted_once_whatever_goes_wrong() {
    let config = SimConfig { faults: Faults::benign(0.05), ..SimConfig::default() };
    let explored = Exploration::new(config).seeds(150).run(|sim| {
        let limit = 1 + sim.random(6) as u32;
        let config = WorkerConfig { peer_addresses: true, ..small() };
        let server = move || Server::new().max_connections(limit).max_per_ip(2);
        let (worker, outcome) = start(sim, config, server, slowly);
        let mut peers = Vec::new();
        for _ in 0..30 {
            let from = SocketAddr::from(([10, 0, 0, 2 + sim.random(4) as u8], 0));
            let peer = sim.connect_from(from, addr());
            for _ in 0..sim.random(3) {
                peer.send(&[sim.random(12) as u8]);
            }
            match sim.random(6) {
                0 => peer.reset(),
                1 => peer.close(),
                _ => peers.push(peer),
            }
            sim.run_for(MS * sim.random(40) as u32);
        }
        worker.stop(SEC);
        sim.run_until(10 * SEC, || !worker.is_running())?;
        let report = outcome.get().expect("a server gives its report");
        let ServerReport { accepted, served, failed, panicked, refused, aborted, .. } = report;
        assert_eq!(accepted, served + failed + panicked + refused + aborted, "{report}");
        assert_eq!(panicked, 0, "{report}");
        let left = worker.report().expect("it has ended");
        assert_eq!((left.ops_in_kernel, left.buffers_outstanding), (0, 0));
        Ok(())
    });
    explored.unwrap_or_else(|failure| panic!("{failure}"));
}
