//! Accepting, connecting, closing, waking, finishing, and the trace.

use super::super::super::Waker;
use super::super::super::event::CloseHow;
use super::super::errno;
use super::super::peer::PeerPhase;
use super::*;
use crate::config::ConnectConfig;

#[test]
fn multishot_accept_takes_all_that_wait_and_backlog_plus_one_may_wait() {
    let mut rig = Rig::new(1, Faults::none());
    let listener = rig.listen(80, 1);
    let _peers: Vec<u64> = (0..5).map(|_| rig.peer(80)).collect();
    rig.run(millis(10));
    rig.driver.accept(listener, AcceptMode::Multishot);
    rig.run(millis(10));
    assert_eq!(rig.log, ["accepted armed=true", "accepted armed=true"]);
    // The others repeat their SYN after 1 s.
    rig.run(millis(1100));
    assert_eq!(rig.count("accepted armed=true"), 5);
    assert_eq!(rig.driver.in_flight(), 1);
}

#[test]
fn a_failed_accept_leaves_the_connection_in_the_queue() {
    let mut rig = Rig::new(2, Faults { accept_error: 1.0, ..Faults::none() });
    let listener = rig.listen(80, 4);
    let peer = rig.peer(80);
    rig.driver.accept(listener, AcceptMode::Multishot);
    rig.run(millis(10));
    assert_eq!(rig.log.len(), 1);
    assert!(rig.log[0].starts_with("accept failed"), "{:?}", rig.log);
    assert_eq!(rig.driver.in_flight(), 0);
    rig.world.borrow_mut().settings.faults = Faults::none();
    rig.driver.accept(listener, AcceptMode::Once);
    rig.run(millis(10));
    assert_eq!(rig.log[1], "accepted armed=false");
    assert_eq!(rig.world.borrow().peers[&peer].phase, PeerPhase::Connected);
}

#[test]
fn every_cancelled_accept_ends_once_even_if_another_accept_won() {
    let (mut won, mut lost) = (0, 0);
    for seed in 0..50 {
        let mut rig = Rig::new(seed, Faults { late_completion: 0.3, ..Faults::none() });
        let listener = rig.listen(80, 4);
        for _ in 0..3 {
            rig.driver.accept(listener, AcceptMode::Once);
        }
        rig.turn();
        let _peer = rig.peer(80);
        rig.run(Duration::from_micros(300));
        rig.driver.cancel_accept(listener);
        rig.run(millis(50));
        let cancelled = rig.count(&format!("accept failed {}", errno::ECANCELED));
        let accepted = rig.count("accepted armed=false");
        assert_eq!(cancelled + accepted, 3, "{:?}", rig.log);
        assert_eq!(rig.driver.in_flight(), 0);
        rig.driver.remove_listener(listener);
        rig.run(millis(1));
        if accepted == 1 { won += 1 } else { lost += 1 }
    }
    assert!(won > 5 && lost > 5, "both happen: {won} and {lost}");
}

#[test]
fn close_yields_exactly_one_event_and_every_buffer_comes_back() {
    for seed in 0..100 {
        let faults = Faults { late_completion: 0.5, ..Faults::none() };
        let mut rig = Rig::new(seed, faults);
        let peer = rig.connection(0);
        rig.world.borrow_mut().peer_set_reading(peer, false, None);
        rig.world.borrow_mut().peer_send(peer, &pattern(1_500));
        rig.driver.recv(key(0));
        rig.send(0, pattern(20_000));
        rig.run(Duration::from_micros(seed * 10));
        let how = if seed % 2 == 0 { CloseHow::Fin } else { CloseHow::Reset };
        rig.driver.close(key(0), how);
        rig.log.clear();
        rig.run(millis(100));
        assert_eq!(rig.log, ["0 closed"], "seed {seed}");
        assert_eq!(rig.driver.in_flight(), 0);
        assert_eq!(rig.memory.pool.leased(), 0);
        assert_eq!(rig.memory.chunks.used(), 0);
        assert_eq!(rig.counters.stale.get(), 0);
        // The slot serves again.
        let again = rig.connection(1);
        rig.driver.recv(key(1));
        rig.world.borrow_mut().peer_send(again, b"new");
        rig.run(millis(10));
        assert_eq!(rig.data[&1], b"new");
    }
}

#[test]
fn a_close_with_unread_data_resets_and_one_without_finishes() {
    for unread in [false, true] {
        let mut rig = Rig::new(9, Faults::none());
        let peer = rig.connection(0);
        rig.send(0, b"bye".to_vec());
        if unread {
            rig.world.borrow_mut().peer_send(peer, b"never read");
        }
        rig.run(millis(10));
        rig.driver.close(key(0), CloseHow::Fin);
        rig.run(millis(10));
        let world = rig.world.borrow();
        let peer = &world.peers[&peer];
        assert_eq!((peer.eof, peer.reset), (!unread, unread));
        assert_eq!(peer.received, b"bye");
    }
}

#[test]
fn a_half_closed_connection_goes_on_in_the_other_direction() {
    let mut rig = Rig::new(10, Faults::none());
    let peer = rig.connection(0);
    rig.driver.recv(key(0));
    rig.send(0, b"last words".to_vec());
    rig.run(millis(10));
    rig.driver.shutdown_write(key(0));
    rig.run(millis(10));
    assert!(rig.world.borrow().peers[&peer].eof);
    rig.world.borrow_mut().peer_send(peer, b"not mine");
    rig.run(millis(10));
    assert_eq!(rig.data[&0], b"not mine");
}

#[test]
fn connecting_is_established_refused_or_unanswered() {
    let mut rig = Rig::new(11, Faults::none());
    let listener = rig.world.borrow_mut().listen(addr(80), 4);
    rig.world.borrow_mut().listen(addr(90), 4);
    rig.world.borrow_mut().set_reachable(addr(90), false);
    for (slot, port) in [(0, 80), (1, 81), (2, 90)] {
        rig.driver.connect(key(slot), &ConnectConfig::new(addr(port))).expect("no fault");
    }
    rig.run(millis(10));
    rig.log.sort();
    let refused = format!("1 connected Err({})", errno::ECONNREFUSED);
    assert_eq!(rig.log, ["0 connected Ok(())", refused.as_str()]);
    let peer = rig.world.borrow_mut().peer_accept(listener).expect("it waits");
    rig.send(0, b"hello".to_vec());
    rig.run(millis(10));
    assert_eq!(rig.peer_received(peer), b"hello");
    // The black hole: closing ends it, and shows one event.
    rig.log.clear();
    rig.run(Duration::from_secs(30));
    assert!(rig.log.is_empty());
    rig.driver.close(key(2), CloseHow::Reset);
    rig.driver.close(key(1), CloseHow::Reset);
    rig.run(millis(10));
    rig.log.sort();
    assert_eq!(rig.log, ["1 closed", "2 closed"]);
}

#[test]
fn a_healed_partition_delivers_what_it_held_back() {
    for seed in 0..20 {
        let mut rig = Rig::new(seed, Faults::none());
        let peer = rig.connection(0);
        rig.rearm = true;
        rig.driver.recv(key(0));
        let sent = pattern(9_000);
        rig.world.borrow_mut().peer_send(peer, &sent[..4_000]);
        rig.run(Duration::from_micros(100));
        rig.world.borrow_mut().set_reachable(addr(100), false);
        rig.world.borrow_mut().peer_send(peer, &sent[4_000..]);
        rig.run(Duration::from_secs(3));
        let before = rig.data.get(&0).map_or(0, Vec::len);
        assert!(before < sent.len());
        rig.world.borrow_mut().set_reachable(addr(100), true);
        // The next repetition may be as far away as the partition was long.
        rig.run(Duration::from_secs(5));
        assert_eq!(rig.data[&0], sent);
    }
}

#[test]
fn a_wake_is_reported_once_for_any_number() {
    let mut rig = Rig::new(12, Faults::none());
    rig.turn();
    let waker = rig.driver.waker();
    std::thread::spawn(move || {
        waker.wake();
        waker.wake();
    })
    .join()
    .expect("wakers work from any thread");
    rig.run(millis(1));
    assert_eq!(rig.log, ["woken"]);
}

#[test]
fn finish_awaits_what_ends_and_counts_what_does_not() {
    for stuck in [0.0, 1.0] {
        let faults = Faults { late_completion: 1.0, ..Faults::none() };
        let mut rig = Rig::new(13, faults);
        let peer = rig.connection(0);
        rig.world.borrow_mut().peer_set_reading(peer, false, None);
        rig.driver.recv(key(0));
        rig.send(0, pattern(20_000));
        rig.run(millis(5));
        rig.world.borrow_mut().settings.faults.stuck_cancel = stuck;
        let Rig { driver, memory, world, .. } = rig;
        let left = driver.finish(Duration::from_secs(1));
        assert_eq!(left, if stuck > 0.0 { 2 } else { 0 });
        assert_eq!(memory.chunks.used(), if stuck > 0.0 { 3 } else { 0 });
        world.borrow_mut().peer_set_reading(peer, true, None);
        let now = world.borrow().now;
        world.borrow_mut().advance(now + millis(10));
        assert!(world.borrow().peers[&peer].eof, "the socket is closed");
    }
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let hash = |seed| {
        let mut rig = Rig::new(seed, Faults::benign(0.2));
        let peer = rig.connection(0);
        rig.rearm = true;
        rig.driver.recv(key(0));
        rig.world.borrow_mut().peer_send(peer, &pattern(10_000));
        rig.send(0, pattern(9_000));
        rig.run(Duration::from_secs(2));
        rig.driver.close(key(0), CloseHow::Fin);
        rig.run(Duration::from_secs(1));
        let world = rig.world.borrow();
        (world.trace.hash(), world.trace.count())
    };
    for seed in 0..10 {
        assert_eq!(hash(seed), hash(seed));
        assert_ne!(hash(seed), hash(seed + 1));
    }
}

#[test]
fn nothing_is_left_of_connections_that_both_sides_closed() {
    for seed in 0..50 {
        let mut rig = Rig::new(seed, Faults::benign(0.1));
        let peer = rig.connection(0);
        rig.driver.recv(key(0));
        rig.send(0, pattern(3_000));
        rig.world.borrow_mut().peer_send(peer, &pattern(500));
        rig.run(Duration::from_micros(seed * 20));
        rig.driver.close(key(0), CloseHow::Fin);
        rig.run(millis(seed % 3));
        rig.world.borrow_mut().peer_dropped(peer);
        rig.run(Duration::from_secs(5));
        let world = rig.world.borrow();
        assert!(world.conns.is_empty(), "seed {seed}: {:?}", world.conns);
        assert!(world.peers.is_empty(), "seed {seed}");
        assert_eq!(world.next_time(), None, "seed {seed}");
    }
}
