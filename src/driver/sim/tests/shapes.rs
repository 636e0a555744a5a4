//! Kinds of kernels: without multishot, without provided buffers, with short queues and tables.

use super::super::super::event::{CloseHow, Multishot};
use super::super::errno;
use super::super::peer::PeerPhase;
use super::*;
use crate::config::ConnectConfig;

fn buffers() -> BufferConfig {
    BufferConfig { size: BUFFER, count: BUFFERS, send_count: 0, ..BufferConfig::default() }
}

#[test]
fn what_multishot_accepts_can_do_follows_from_the_configuration() {
    let multishot = |uring, descriptors| {
        let config = WorkerConfig { uring, descriptors, buffers: buffers(), ..WorkerConfig::default() };
        Rig::with(1, Faults::none(), config).driver.multishot()
    };
    assert_eq!(multishot(UringFeatures::ALL, Descriptors::Direct), Multishot::WithoutPeer);
    assert_eq!(multishot(UringFeatures::ALL, Descriptors::Fd), Multishot::WithPeer);
    assert_eq!(multishot(UringFeatures::LEAST, Descriptors::Fd), Multishot::Absent);
}

#[test]
fn without_multishot_each_piece_ends_its_operation() {
    for uring in [UringFeatures::LINUX_5_19, UringFeatures::LEAST] {
        let mut rig = Rig::with_features(1, uring);
        let peer = rig.connection(0);
        rig.driver.recv(key(0));
        rig.world.borrow_mut().peer_send(peer, &pattern(BUFFER as usize * 2));
        rig.run(millis(10));
        assert_eq!(rig.log, ["0 data armed=false"], "{uring:?}");
        assert_eq!(rig.driver.in_flight(), 0);
        rig.rearm = true;
        rig.driver.recv(key(0));
        rig.world.borrow_mut().peer_shutdown(peer);
        rig.run(millis(10));
        assert_eq!(rig.data[&0], pattern(BUFFER as usize * 2));
        assert_eq!(rig.log.last().map(String::as_str), Some("0 Eof"));
        // The end is there for everyone who asks again.
        rig.driver.recv(key(0));
        rig.run(millis(1));
        assert_eq!(rig.count("0 Eof"), 2);
    }
}

#[test]
fn a_polled_receive_asks_for_a_buffer_only_when_there_is_something() {
    let ready = UringFeatures { provided_buffers: false, ..UringFeatures::ALL };
    for (uring, polled) in [(UringFeatures::LINUX_5_19, false), (UringFeatures::LEAST, true), (ready, true)] {
        let mut rig = Rig::with_features(2, uring);
        let peer = rig.connection(0);
        while let Some(buf) = rig.memory.pool.lease_with(|_| 1) {
            rig.kept.push(buf);
        }
        rig.driver.recv(key(0));
        rig.run(millis(10));
        assert_eq!(rig.count("0 NoBuffer"), usize::from(!polled), "{uring:?}");
        if polled {
            rig.world.borrow_mut().peer_send(peer, b"now");
            rig.run(millis(10));
            assert_eq!(rig.log, ["0 NoBuffer"]);
        }
        rig.kept.clear();
    }
}

#[test]
fn a_connection_for_which_the_table_has_no_entry_is_closed() {
    // The table has 64 entries more than connections.
    let config = WorkerConfig { max_connections: 1, buffers: buffers(), ..WorkerConfig::default() };
    let mut rig = Rig::with(3, Faults::none(), config);
    let listener = rig.listen(80, 100);
    let peers: Vec<u64> = (0..66).map(|_| rig.peer(80)).collect();
    rig.driver.accept(listener, AcceptMode::Multishot);
    rig.run(millis(20));
    assert_eq!(rig.sockets.len(), 65);
    assert_eq!(rig.log.last(), Some(&format!("accept failed {}", errno::ENFILE)));
    let closed = peers.iter().filter(|peer| rig.world.borrow().peers[peer].eof).count();
    assert_eq!(closed, 1, "it was accepted, so its client is told");
    rig.driver.connect(key(0), &ConnectConfig::new(addr(80))).expect("the error comes later");
    rig.run(millis(1));
    assert_eq!(rig.log.last(), Some(&format!("0 connected Err({})", errno::ENFILE)));
    rig.driver.close(key(0), CloseHow::Fin);
    // An entry that is given back serves the next connection.
    let socket = rig.sockets.pop().expect("one of 65");
    rig.driver.discard(socket);
    rig.driver.accept(listener, AcceptMode::Once);
    let _late = rig.peer(80);
    rig.run(millis(10));
    assert_eq!(rig.log.last().map(String::as_str), Some("accepted armed=false"));
}

#[test]
fn a_full_submission_queue_is_given_to_the_kernel_and_loses_nothing() {
    let config = WorkerConfig { sq_entries: 8, buffers: buffers(), ..WorkerConfig::default() };
    let mut rig = Rig::with(4, Faults::none(), config);
    let listener = rig.listen(80, 100);
    for _ in 0..30 {
        rig.driver.accept(listener, AcceptMode::Once);
    }
    assert_eq!(rig.counters.sq_full.get(), 3);
    let _peers: Vec<u64> = (0..30).map(|_| rig.peer(80)).collect();
    rig.run(millis(20));
    assert_eq!(rig.count("accepted armed=false"), 30);
    assert_eq!(rig.counters.sqes.get(), 30);
}

#[test]
fn a_multishot_that_meets_a_full_completion_queue_ends_with_a_valid_result() {
    let buffers = BufferConfig { size: 64, count: 64, send_count: 0, ..BufferConfig::default() };
    let config = WorkerConfig { sq_entries: 8, cq_entries: 16, buffers, ..WorkerConfig::default() };
    let mut rig = Rig::with(5, Faults::none(), config);
    let peer = rig.connection(0);
    rig.world.borrow_mut().peer_send(peer, &pattern(2_000));
    let now = rig.now();
    rig.world.borrow_mut().advance(now + millis(5));
    rig.driver.recv(key(0));
    rig.turn();
    assert_eq!(rig.log.len(), 17, "sixteen, and the one that found no room");
    assert_eq!(rig.log.last().map(String::as_str), Some("0 data armed=false"));
    assert_eq!(rig.counters.cq_overflows.get(), 1);
    rig.rearm = true;
    rig.driver.recv(key(0));
    rig.run(millis(10));
    assert_eq!(rig.data[&0], pattern(2_000));
}

#[test]
fn a_multishot_receive_reports_thirty_three_pieces_before_others_come() {
    let buffers = BufferConfig { size: 64, count: 400, send_count: 0, ..BufferConfig::default() };
    let mut rig = Rig::with(6, Faults::none(), WorkerConfig { buffers, ..WorkerConfig::default() });
    rig.world.borrow_mut().settings.socket_buffer = 1 << 16;
    let peer = rig.connection(0);
    rig.world.borrow_mut().peer_send(peer, &pattern(20_000));
    let now = rig.now();
    rig.world.borrow_mut().advance(now + millis(5));
    rig.driver.recv(key(0));
    // The submission itself, and the task work that it leaves; then the task work alone.
    for pieces in [66, 33, 33] {
        rig.turn();
        assert_eq!(rig.log.len(), pieces);
        rig.log.clear();
    }
    rig.run(millis(10));
    assert_eq!(rig.data[&0], pattern(20_000));
}

/// What a full queue does to the last packet of a handshake: it is ignored, and the client believes that
/// it is connected.
#[test]
fn a_client_that_finds_the_queue_full_believes_that_it_is_connected() {
    let mut rig = Rig::new(7, Faults::none());
    let listener = rig.listen(80, 0);
    let peers: Vec<u64> = (0..4).map(|_| rig.peer(80)).collect();
    rig.run(millis(10));
    let connected = |rig: &Rig| {
        let world = rig.world.borrow();
        peers.iter().filter(|peer| world.peers[peer].phase == PeerPhase::Connected).count()
    };
    assert_eq!(connected(&rig), 4);
    rig.driver.accept(listener, AcceptMode::Once);
    rig.run(millis(10));
    assert_eq!(rig.sockets.len(), 1);
    // Those whose packet was ignored are found again when it is repeated, after 1, 3, 7 s ...
    rig.driver.accept(listener, AcceptMode::Multishot);
    rig.run(Duration::from_secs(2));
    assert_eq!(rig.sockets.len(), 4);

    // ... but not after a minute: then what they send is answered by a reset.
    let _full = rig.listen(90, 0);
    let late: Vec<u64> = (0..2).map(|_| rig.peer(90)).collect();
    rig.run(Duration::from_secs(70));
    for peer in &late {
        rig.world.borrow_mut().peer_send(*peer, b"is anybody there?");
    }
    rig.run(millis(10));
    let reset = late.iter().filter(|peer| rig.world.borrow().peers[peer].reset).count();
    assert_eq!(reset, 1, "one of them waits in the queue");
}
