//! UDP sockets of tasks in a simulated world: between workers, and with foreign programs.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use corelane::net::{UdpConfig, UdpSocket};
use corelane::sim::{Exploration, Fault, Faults, Sim, SimConfig, When};
use corelane::{BufferConfig, ListenerConfig, UringFeatures, WorkerConfig, time};

const SECOND: Duration = Duration::from_secs(1);

fn addr(host: u8, port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, host], port))
}

/// A small worker on a kernel that the seed chooses.
fn small(seed: u64) -> WorkerConfig {
    let ready = UringFeatures { provided_buffers: false, ..UringFeatures::ALL };
    let kernels = [UringFeatures::ALL, UringFeatures::LINUX_5_19, ready, UringFeatures::LEAST];
    let buffers = BufferConfig { size: 1024, count: 16, ..BufferConfig::default() };
    let uring = kernels[seed as usize % 4];
    WorkerConfig { max_connections: 16, buffers, uring, ..WorkerConfig::default() }
}

/// Sends everything back, until the worker ends.
async fn echo(local: SocketAddr) -> io::Result<()> {
    let mut socket = UdpSocket::bind(UdpConfig::new(local)).await?;
    while let Ok(question) = socket.recv_from().await {
        // What the system has no room for is lost on the way, like anything else.
        let _ = socket.send_to(question.bytes, question.from).await;
    }
    Ok(())
}

#[test]
fn every_question_is_answered_once_and_in_order_while_nothing_is_lost() {
    // The room is enough for all, so that nothing may be dropped.
    let config = SimConfig { faults: Faults::benign(0.1), socket_buffer: 1 << 20, ..SimConfig::default() };
    let explored = Exploration::new(config).seeds(60).twice().run(|sim| {
        let server = addr(1, 7);
        let worker = sim.tasks(small(sim.seed()), &[], move || echo(server))?;
        let clients = [sim.datagram(addr(2, 0)), sim.datagram(addr(3, 9))];
        assert_ne!(clients[0].addr().port(), 0);
        sim.run_for(Duration::from_millis(100));
        let mut asked = [Vec::new(), Vec::new()];
        for n in 0..60u32 {
            let which = sim.random(2) as usize;
            let question = vec![n as u8; sim.random(800) as usize];
            clients[which].send_to(&question, server);
            asked[which].push((server, question));
            sim.run_for(Duration::from_micros(sim.random(300)));
        }
        let counts =
            || clients.iter().zip(&asked).all(|(client, asked)| client.received().len() >= asked.len());
        sim.run_until(10 * SECOND, counts)?;
        sim.run_for(SECOND);
        for (client, asked) in clients.iter().zip(&asked) {
            assert!(client.take_received() == *asked, "seed {}", sim.seed());
        }
        worker.stop(SECOND);
        sim.run_until(10 * SECOND, || !worker.is_running())?;
        let report = worker.report().expect("it ended");
        assert_eq!((report.ops_in_kernel, report.buffers_outstanding), (0, 0));
        Ok(())
    });
    assert!(explored.unwrap_or_else(|failure| panic!("{failure}")).seeds > 0);
}

/// Asks until it is answered.
async fn ask(socket: &mut UdpSocket, question: &[u8]) -> u32 {
    for tries in 1.. {
        // An error is one more thing that may happen to a datagram.
        let _ = socket.send(question.to_vec()).await;
        let answered = time::timeout(Duration::from_millis(20), async {
            loop {
                match socket.recv_from().await {
                    Ok(answer) if &answer.bytes[..] == question => return,
                    // An answer to an earlier question, once more; or that nobody is there, yet.
                    Ok(_) | Err(_) => {}
                }
            }
        });
        if answered.await.is_ok() {
            return tries;
        }
    }
    unreachable!("there is no last try")
}

#[test]
fn whoever_asks_again_gets_every_answer_whatever_happens_to_datagrams() {
    let tries = Rc::new(Cell::new(0));
    let config = SimConfig { faults: Faults::hostile(0.1), ..SimConfig::default() };
    let explored = Exploration::new(config).seeds(60).run(|sim| {
        // Opening may fail in such a world: that is not the point here.
        sim.set_faults(Faults { connect_error: 0.0, ..Faults::hostile(0.1) });
        let server = addr(1, 7);
        let answering = sim.tasks(small(sim.seed()), &[], move || echo(server))?;
        let (done, counted) = (Rc::new(Cell::new(0)), tries.clone());
        let progress = done.clone();
        let asking = sim.tasks(small(sim.seed() / 4), &[], move || async move {
            let mut socket = UdpSocket::connect(server).await?;
            assert_eq!(socket.peer_addr()?, server);
            for n in 0..20u8 {
                counted.set(counted.get() + ask(&mut socket, &[n; 100]).await);
                progress.set(n + 1);
            }
            io::Result::Ok(())
        })?;
        sim.run_for(Duration::from_millis(200));
        sim.calm_until(60 * SECOND, || done.get() == 20)?;
        for worker in [&answering, &asking] {
            worker.stop(SECOND);
            sim.run_until(10 * SECOND, || !worker.is_running())?;
            let report = worker.report().expect("it ended");
            assert_eq!((report.ops_in_kernel, report.buffers_outstanding), (0, 0));
        }
        Ok(())
    });
    let seeds = explored.unwrap_or_else(|failure| panic!("{failure}")).seeds;
    // One seed alone may be lucky.
    assert!(
        seeds < 5 || u64::from(tries.get()) > 20 * seeds,
        "some questions were lost: {} tries",
        tries.get()
    );
}

#[test]
fn a_connected_socket_is_told_that_nobody_is_there_and_goes_on() {
    for seed in 0..20 {
        let sim = Sim::new(SimConfig::seeded(seed));
        let refused = Rc::new(Cell::new(0));
        let answer = Rc::new(RefCell::new(Vec::new()));
        let (told, heard) = (refused.clone(), answer.clone());
        let _worker = sim.tasks(small(seed), &[], move || async move {
            let mut socket = UdpSocket::connect(addr(2, 7)).await?;
            while heard.borrow().is_empty() {
                let _ = socket.send("anybody?").await;
                match time::timeout(Duration::from_millis(1), socket.recv_from()).await {
                    Ok(Ok(answer)) => heard.borrow_mut().extend_from_slice(&answer.bytes),
                    Ok(Err(error)) => {
                        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
                        told.set(told.get() + 1);
                    }
                    Err(_) => {}
                }
            }
            io::Result::Ok(())
        });
        sim.run_until(SECOND, || refused.get() >= 3).unwrap_or_else(|stuck| panic!("{stuck}"));
        let peer = sim.datagram(addr(2, 7));
        sim.run_until(SECOND, || !peer.received().is_empty()).unwrap_or_else(|stuck| panic!("{stuck}"));
        peer.send_to(b"me", peer.received()[0].0);
        sim.run_until(SECOND, || answer.borrow()[..] == *b"me").unwrap_or_else(|stuck| panic!("{stuck}"));
    }
}

#[test]
fn workers_share_an_address_and_each_sender_has_its_worker() {
    let sim = Sim::new(SimConfig::seeded(5));
    let heard: Rc<RefCell<Vec<(usize, SocketAddr)>>> = Rc::default();
    let log = heard.clone();
    let workers = sim.tasks_on(3, small(0), &[ListenerConfig::new(addr(1, 80))], move |index| {
        let log = log.clone();
        async move {
            // Any address is that of the worker's host.
            let any = SocketAddr::from(([0; 4], 53));
            let mut socket = UdpSocket::bind(UdpConfig { reuse_port: true, ..UdpConfig::new(any) }).await?;
            assert_eq!(socket.local_addr()?, addr(1, 53));
            loop {
                let from = socket.recv_from().await?.from;
                log.borrow_mut().push((index, from));
            }
            #[allow(unreachable_code)]
            io::Result::Ok(())
        }
    });
    let _workers = workers.expect("it works");
    sim.run_for(Duration::from_millis(1));
    let peers: Vec<_> = (1..=30).map(|port| sim.datagram(addr(9, port))).collect();
    for _ in 0..4 {
        peers.iter().for_each(|peer| peer.send_to(b"x", addr(1, 53)));
        sim.run_for(Duration::from_millis(1));
    }
    let heard = heard.borrow();
    assert_eq!(heard.len(), 4 * 30);
    let pairs: BTreeSet<_> = heard.iter().copied().collect();
    assert_eq!(pairs.len(), 30, "one worker for each sender");
    let used: BTreeSet<_> = heard.iter().map(|(worker, _)| *worker).collect();
    assert_eq!(used.len(), 3, "every worker has some");
}

#[test]
fn scripts_choose_workers_and_peers_and_what_is_closed_is_gone() {
    let sim = Sim::new(SimConfig::seeded(6));
    let server = addr(1, 7);
    let worker = sim.tasks(small(0), &[], move || echo(server)).expect("it works");
    let (one, two) = (sim.datagram(addr(2, 1)), sim.datagram(addr(2, 2)));
    sim.run_for(Duration::from_millis(1));
    let round = || {
        one.send_to(b"1", server);
        two.send_to(b"2", server);
        sim.run_for(Duration::from_millis(5));
        [one.take_received().len(), two.take_received().len()]
    };
    assert_eq!(round(), [1, 1]);
    sim.script(When::next().datagram_peer(&two), Fault::DatagramLoss);
    assert_eq!(round(), [1, 0]);
    sim.script(When::next().times(2).worker(&worker), Fault::DatagramDuplicate);
    assert_eq!(round(), [2, 2]);
    sim.script(When::nth(2).worker(&worker), Fault::DatagramLoss);
    assert_eq!(round().iter().sum::<usize>(), 1);
    assert_eq!(sim.script_left(), 0);
    one.stall(Duration::from_millis(8));
    assert_eq!(round(), [0, 1]);
    sim.run_for(Duration::from_millis(8));
    sim.partition_between(addr(1, 0).ip(), addr(2, 0).ip());
    assert_eq!(round(), [0, 0]);
    sim.calm();
    assert_eq!(round(), [1, 1]);
    sim.set_latency(addr(1, 0).ip(), addr(2, 0).ip(), (SECOND, SECOND));
    assert_eq!(round(), [0, 0]);
    sim.run_for(10 * SECOND);
    assert_eq!((one.received().len(), two.received().len()), (1, 1));
    drop(one);
    let again = sim.datagram(addr(2, 1));
    assert_eq!(again.addr(), addr(2, 1));
    worker.stop(SECOND);
    sim.run_until(10 * SECOND, || !worker.is_running()).expect("it ends");
    let _theirs = sim.datagram(server);
}

#[test]
#[should_panic(expected = "10.0.0.1:5 is in use")]
fn an_address_in_use_is_a_slip_of_the_test() {
    let sim = Sim::new(SimConfig::default());
    let _first = sim.datagram(addr(1, 5));
    let _second = sim.datagram(addr(1, 5));
}
