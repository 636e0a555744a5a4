//! What tasks share: permits, tokens, groups and broadcasts, in runtimes and in simulated ones.
#![cfg(target_os = "linux")]

use std::cell::{Cell, RefCell};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream as Std};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use corelane::net::{TcpListener, TcpStream};
use corelane::sim::{Exploration, Faults, Peer, Sim, SimConfig};
use corelane::sync::{Broadcast, Group, GroupSent, Notify, Semaphore};
use corelane::task::{block_on, spawn, yield_now};
use corelane::time::{sleep, timeout};
use corelane::{BufferConfig, ListenerConfig, Runtime, ServeError, Server, ShutdownToken, WorkerConfig};

/// No test waits longer than this for any one thing.
const PATIENCE: Duration = Duration::from_secs(30);

const MS: Duration = Duration::from_millis(1);
const SEC: Duration = Duration::from_secs(1);

#[test]
fn no_more_tasks_than_permits_are_inside_and_all_get_in() {
    let (most, entered) = block_on(async {
        let permits = Rc::new(Semaphore::new(3));
        let (inside, most, entered) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        let mut tasks = Vec::new();
        for n in 0..200u32 {
            let (permits, inside) = (permits.clone(), inside.clone());
            let (most, entered) = (most.clone(), entered.clone());
            tasks.push(spawn(async move {
                if n % 5 == 4 {
                    // Those who give up lose no permit, whether they had been called or not.
                    drop(timeout(MS * (n % 3), permits.acquire()).await);
                    return;
                }
                let _permit = permits.acquire().await.expect("nobody closes it");
                inside.set(inside.get() + 1);
                most.set(inside.get().max(most.get()));
                if n % 2 == 0 {
                    yield_now().await
                } else {
                    sleep(MS).await
                }
                inside.set(inside.get() - 1);
                entered.set(entered.get() + 1);
            }));
        }
        for task in tasks {
            task.await.expect("no task panics");
        }
        assert_eq!(permits.available_permits(), 3);
        (most.get(), entered.get())
    })
    .expect("run");
    assert_eq!((most, entered), (3, 160));
}

#[test]
fn a_closed_semaphore_tells_all_who_wait() {
    block_on(async {
        let permits = Rc::new(Semaphore::new(0));
        let waiting: Vec<_> = (0..10)
            .map(|_| {
                let permits = permits.clone();
                spawn(async move { permits.acquire().await.map(|permit| permit.count()) })
            })
            .collect();
        yield_now().await;
        permits.close();
        for task in waiting {
            let error = task.await.expect("no task panics").expect_err("it is closed");
            assert_eq!(error.to_string(), "the semaphore was closed");
        }
    })
    .expect("run");
}

#[test]
fn everybody_who_waits_for_the_stop_is_told_and_those_who_gave_up_leave_nothing() {
    let told = Rc::new(Cell::new(0));
    let sim = Sim::new(SimConfig::seeded(1));
    let telling = told.clone();
    let worker = sim.tasks(small(), &[], move || async move {
        for n in 0..300 {
            let told = telling.clone();
            drop(spawn(async move {
                let token = ShutdownToken::of_runtime();
                // Begun and dropped many times, as a select does it.
                for _ in 0..n % 7 {
                    assert!(timeout(MS, corelane::task::stopped()).await.is_err());
                    assert!(timeout(MS, token.cancelled()).await.is_err());
                }
                if n % 2 == 0 {
                    corelane::task::stopped().await
                } else {
                    token.child().cancelled().await
                }
                assert!(token.is_cancelled());
                told.set(told.get() + 1);
            }));
        }
        let mine = ShutdownToken::of_runtime();
        mine.cancel();
        assert!(!ShutdownToken::of_runtime().is_cancelled(), "a task does not stop the others");
        corelane::task::stopped().await;
        // They run in the order in which they were woken.
        sleep(MS).await;
    });
    let worker = worker.expect("started");
    sim.run_for(50 * MS);
    assert_eq!(told.get(), 0);
    worker.stop(SEC);
    sim.run_until(100 * MS, || !worker.is_running()).expect("it ends");
    assert_eq!(told.get(), 300);
}

fn server_addr() -> SocketAddr {
    "10.0.0.1:80".parse().expect("an address")
}

fn small() -> WorkerConfig {
    let buffers = BufferConfig { count: 64, send_count: 8, ..BufferConfig::default() };
    WorkerConfig { max_connections: 64, mailbox: 64, buffers, ..WorkerConfig::default() }
}

#[test]
fn a_slow_member_misses_what_the_others_get_and_gets_the_rest_whole() {
    let config = SimConfig { socket_buffer: 4096, ..SimConfig::seeded(2) };
    let sim = Sim::new(config);
    let (group, ticks) = (Group::with_limit(20_000), Rc::new(RefCell::new(Vec::<GroupSent>::new())));
    let (joined, noted, missed) = (group.clone(), ticks.clone(), Rc::new(Cell::new(0)));
    let slowest = missed.clone();
    let worker = sim.tasks(small(), &[ListenerConfig::new(server_addr())], move || async move {
        let telling = spawn({
            let group = joined.clone();
            async move {
                sleep(100 * MS).await;
                for n in 0..100u8 {
                    noted.borrow_mut().push(group.send(vec![n; 1000]));
                    sleep(10 * MS).await;
                }
            }
        });
        let served = Server::new().serve(TcpListener::of_builder(0), move |mut stream: TcpStream| {
            let (group, slowest) = (joined.clone(), slowest.clone());
            async move {
                let member = group.join(stream.id());
                while stream.recv().await?.is_some() {}
                slowest.set(member.missed().max(slowest.get()));
                Ok::<(), std::io::Error>(())
            }
        });
        served.await.expect("no limits");
        telling.await.expect("no task panics");
    });
    let worker = worker.expect("started");
    let (fast, slow) = (sim.connect(server_addr()), sim.connect(server_addr()));
    sim.run_for(50 * MS);
    slow.set_reading(false);
    sim.run_until(5 * SEC, || ticks.borrow().len() == 100).expect("all are sent");
    let all: Vec<u8> = (0..100).flat_map(|n| vec![n; 1000]).collect();
    sim.run_until(SEC, || fast.received_len() == 100_000).expect("the fast one has them");
    assert!(fast.received() == all);
    let lost = ticks.borrow().iter().filter(|sent| sent.missed == 1).count();
    // Two socket buffers of 4 KiB and the limit are what it may have.
    assert!((70..=80).contains(&lost), "{lost} of 100 missed");
    for sent in ticks.borrow().iter() {
        assert_eq!((sent.queued + sent.missed, sent.closed), (2, 0));
    }
    slow.set_reading(true);
    sim.run_until(SEC, || slow.received_len() == 1000 * (100 - lost as u64)).expect("it gets the rest");
    assert!(
        slow.received().chunk_by(|a, b| a == b).all(|message| message.len() == 1000),
        "messages are whole"
    );
    slow.close();
    sim.run_until(SEC, || group.len() == 1).expect("whoever ends leaves");
    assert_eq!(missed.get(), lost as u64);
    fast.close();
    sim.run_until(SEC, || worker.check_at_rest().is_ok()).expect("nothing is left");
    assert!(group.is_empty());
}

#[test]
fn what_one_member_says_reaches_all_in_the_buffer_that_it_came_in() {
    let sim = Sim::new(SimConfig { socket_buffer: 100, ..SimConfig::seeded(3) });
    let worker = sim.tasks(small(), &[ListenerConfig::new(server_addr())], || async {
        let group = Group::new();
        let served = Server::new().serve(TcpListener::of_builder(0), move |mut stream: TcpStream| {
            let group = group.clone();
            async move {
                let member = group.join(stream.id());
                while let Some(words) = stream.recv().await? {
                    group.send_except(&member, words);
                }
                Ok::<(), std::io::Error>(())
            }
        });
        served.await.expect("no limits");
    });
    let worker = worker.expect("started");
    let peers: Vec<Peer> = (0..20).map(|_| sim.connect(server_addr())).collect();
    sim.run_for(20 * MS);
    for peer in &peers[1..] {
        peer.set_reading(false);
    }
    peers[0].send(&[7; 100]);
    sim.run_for(50 * MS);
    peers[0].send(&[8; 2000]);
    sim.run_for(200 * MS);
    // 19 members have up to 2 kB unsent each; each piece of it is in the one buffer that it was received into.
    let (leased, payloads) = (worker.buffers_leased(), worker.payloads_queued());
    assert!(payloads >= 19 * 10, "{payloads} payloads");
    assert!(leased <= payloads.div_ceil(19) + 2, "{leased} buffers for {payloads} payloads");
    for peer in &peers[1..] {
        peer.set_reading(true);
    }
    let expected: Vec<u8> = [vec![7; 100], vec![8; 2000]].concat();
    sim.run_until(5 * SEC, || peers[1..].iter().all(|peer| peer.received() == expected))
        .expect("all have it");
    assert_eq!(peers[0].received_len(), 0, "whoever says it does not get it");
    drop(peers);
    sim.run_until(SEC, || worker.check_at_rest().is_ok()).expect("nothing is left");
}

/// A chat on three workers: everybody gets what the others say, each one's words in their order.
#[test]
fn a_broadcast_reaches_the_members_of_all_workers_in_each_senders_order() {
    let config = SimConfig { faults: Faults::benign(0.05), ..SimConfig::default() };
    let explored = Exploration::new(config).seeds(60).run(|sim| {
        let room = Broadcast::new();
        let chat = move |_| async move {
            let served =
                Server::new().serve(TcpListener::of_builder(0), move |mut stream: TcpStream| async move {
                    let member = room.join(stream.id());
                    while let Some(words) = stream.recv().await? {
                        let sent = room.send_except(&member, words);
                        assert_eq!((sent.workers, sent.workers_full, sent.workers_stopped), (2, 0, 0));
                    }
                    Ok::<(), std::io::Error>(())
                });
            let report = served.await?;
            assert_eq!((report.panicked, report.aborted), (0, 0), "{report}");
            assert_eq!(room.len_here(), 0);
            Ok::<(), ServeError>(())
        };
        let workers = sim.tasks_on(3, small(), &[ListenerConfig::new(server_addr())], chat)?;
        let peers: Vec<Peer> = (0..9).map(|_| sim.connect(server_addr())).collect();
        let accepted = || workers.iter().map(|worker| worker.metrics().accepted).sum::<u64>() == 9;
        sim.run_until(5 * SEC, accepted)?;
        // Their handlers have run, and joined.
        sim.run_for(10 * MS);
        let said: Vec<Vec<u8>> = (0..3).map(|n| vec![b'a' + n; 100 + n as usize]).collect();
        for (peer, words) in peers.iter().zip(&said) {
            for chunk in words.chunks(7) {
                peer.send(chunk);
                sim.run_for(MS);
            }
        }
        let total: usize = said.iter().map(Vec::len).sum();
        let wanted = |n: usize| (total - said.get(n).map_or(0, Vec::len)) as u64;
        let done = || peers.iter().enumerate().all(|(n, peer)| peer.received_len() == wanted(n));
        sim.calm_until(20 * SEC, done)?;
        for (n, peer) in peers.iter().enumerate() {
            for (speaker, words) in said.iter().enumerate().filter(|(speaker, _)| *speaker != n) {
                let of = b'a' + speaker as u8;
                let heard = peer.received().iter().filter(|&&byte| byte == of).count();
                assert_eq!(heard, words.len());
            }
        }
        drop(peers);
        workers[0].stop(SEC);
        sim.run_until(5 * SEC, || workers.iter().all(|worker| !worker.is_running()))?;
        Ok(())
    });
    explored.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn another_thread_reaches_the_members_of_all_workers() {
    let room = Broadcast::new();
    let started =
        Runtime::builder().workers(2).listen(SocketAddr::from(([127, 0, 0, 1], 0))).start_tasks(move |_| {
            Server::new().serve(TcpListener::of_builder(0), move |mut stream: TcpStream| async move {
                let member = room.join(stream.id());
                stream.send("welcome").await?;
                while let Some(words) = stream.recv().await? {
                    room.send_except(&member, words);
                }
                Ok::<(), std::io::Error>(())
            })
        });
    let runtime = started.expect("started");
    let mut clients: Vec<Std> =
        (0..12).map(|_| Std::connect(runtime.info().listeners[0].addr).expect("connected")).collect();
    for client in &mut clients {
        client.set_read_timeout(Some(PATIENCE)).expect("a read timeout");
        client.read_exact(&mut [0; 7]).expect("welcome");
    }
    let everybody: Arc<[u8]> = Arc::from(&b"to everybody;"[..]);
    let sent = room.send_from(&runtime.remote(), everybody.clone());
    assert_eq!((sent.workers, sent.workers_full, sent.workers_stopped), (2, 0, 0));
    for client in &mut clients {
        let mut words = [0; 13];
        client.read_exact(&mut words).expect("what was said");
        assert_eq!(words, everybody[..]);
    }
    // It was shared and not copied: when all have it, the workers let go of it.
    let until = Instant::now() + PATIENCE;
    while Arc::strong_count(&everybody) > 1 {
        assert!(Instant::now() < until, "the bytes are let go of");
        std::thread::sleep(MS);
    }
    clients[0].write_all(b"hello, others").expect("written");
    for client in &mut clients[1..] {
        let mut words = [0; 13];
        client.read_exact(&mut words).expect("what was said");
        assert_eq!(&words, b"hello, others");
    }
    let remote = runtime.remote();
    drop(clients);
    runtime.shutdown(PATIENCE).expect("a report");
    assert_eq!(room.send_from(&remote, "nobody").workers_stopped, 2);
}

#[test]
fn a_foreign_connection_cannot_join() {
    let sim = Sim::new(SimConfig::seeded(4));
    let ids: Rc<RefCell<Vec<corelane::ConnId>>> = Rc::default();
    let (noted, refused) = (ids.clone(), Rc::new(Cell::new(0)));
    let counting = refused.clone();
    let workers = sim.tasks_on(2, small(), &[ListenerConfig::new(server_addr())], move |index| {
        let (noted, refused) = (noted.clone(), counting.clone());
        async move {
            let mut listener = TcpListener::of_builder(0).expect("it has one");
            let first = timeout(SEC, listener.accept()).await;
            if let Ok(Ok(stream)) = &first {
                noted.borrow_mut().push(stream.id());
            }
            sleep(SEC).await;
            let others: Vec<_> = noted.borrow().iter().copied().filter(|id| id.worker() != index).collect();
            for id in others {
                assert!(
                    spawn(async move { drop(Group::new().join(id)) })
                        .await
                        .expect_err("it panics")
                        .is_panic()
                );
                assert!(spawn(async move { drop(Broadcast::new().join(id)) }).await.is_err());
                refused.set(refused.get() + 1);
            }
            corelane::task::stopped().await;
        }
    });
    let workers = workers.expect("started");
    let peer = sim.connect(server_addr());
    sim.run_for(5 * SEC);
    assert_eq!((ids.borrow().len(), refused.get()), (1, 1));
    drop(peer);
    workers[0].stop(SEC);
    sim.run_until(5 * SEC, || workers.iter().all(|worker| !worker.is_running())).expect("they end");
}

#[test]
fn a_notification_wakes_who_waits_and_is_kept_for_who_comes() {
    block_on(async {
        let notify = Rc::new(Notify::new());
        notify.notify_one();
        notify.notify_one();
        notify.notified().await;
        assert!(timeout(MS, notify.notified()).await.is_err(), "stored once");
        let order = Rc::new(RefCell::new(Vec::new()));
        let waiting: Vec<_> = (0..3)
            .map(|n| {
                let (notify, order) = (notify.clone(), order.clone());
                spawn(async move {
                    notify.notified().await;
                    order.borrow_mut().push(n);
                })
            })
            .collect();
        yield_now().await;
        notify.notify_one();
        yield_now().await;
        assert_eq!(*order.borrow(), [0]);
        notify.notify_waiters();
        for task in waiting {
            task.await.expect("no task panics");
        }
        assert_eq!(*order.borrow(), [0, 1, 2]);
    })
    .expect("run");
}

#[test]
fn a_worker_that_is_behind_is_told_of_and_the_sender_never_waits() {
    let sim = Sim::new(SimConfig::seeded(5));
    let room = Broadcast::new();
    let told = Rc::new(Cell::new((0, 0)));
    let counting = told.clone();
    let config = WorkerConfig { mailbox: 4, ..small() };
    let workers = sim.tasks_on(2, config, &[ListenerConfig::new(server_addr())], move |index| {
        let told = counting.clone();
        async move {
            let joined = move |mut stream: TcpStream| async move {
                let _member = room.join(stream.id());
                while stream.recv().await?.is_some() {}
                Ok::<(), std::io::Error>(())
            };
            if index == 0 {
                sleep(100 * MS).await;
                // All in one turn, so that the other worker has no chance to read its mailbox.
                for n in 0..10u8 {
                    let sent = room.send(vec![n; 10]);
                    assert_eq!((sent.workers_stopped, sent.here.missed, sent.here.closed), (0, 0, 0));
                    told.set((told.get().0 + sent.workers, told.get().1 + sent.workers_full));
                }
            }
            Server::new().serve(TcpListener::of_builder(0), joined).await.map(drop)
        }
    });
    let workers = workers.expect("started");
    let peers: Vec<Peer> = (0..8).map(|_| sim.connect(server_addr())).collect();
    sim.run_for(SEC);
    assert_eq!(told.get(), (4, 6));
    // Worker 0 serves from then on only; those of worker 1 got what fitted, in its order.
    let there = workers[1].metrics().accepted as usize;
    let got: Vec<Vec<u8>> = peers.iter().map(Peer::received).collect();
    let expected: Vec<u8> = (0..4).flat_map(|n| vec![n; 10]).collect();
    assert!(there > 0, "the seed gives worker 1 somebody");
    assert_eq!(got.iter().filter(|got| **got == expected).count(), there);
    assert_eq!(got.iter().filter(|got| got.is_empty()).count(), 8 - there);
    drop(peers);
    workers[0].stop(SEC);
    sim.run_until(5 * SEC, || workers.iter().all(|worker| !worker.is_running())).expect("they end");
}
