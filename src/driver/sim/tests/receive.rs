//! Receiving: pieces, exhaustion, cancels, errors.

use super::super::errno;
use super::*;

#[test]
fn what_a_peer_sends_arrives_whole_and_in_order() {
    for seed in 0..50 {
        let mut rig = Rig::new(seed, Faults::benign(0.1));
        let peer = rig.connection(0);
        rig.rearm = true;
        rig.driver.recv(key(0));
        let sent = pattern(20_000);
        for part in sent.chunks(7_001) {
            rig.world.borrow_mut().peer_send(peer, part);
        }
        rig.world.borrow_mut().peer_shutdown(peer);
        rig.run(Duration::from_secs(20));
        assert_eq!(rig.data[&0], sent, "seed {seed}");
        assert_eq!(rig.log.last().map(String::as_str), Some("0 Eof"));
        assert_eq!(rig.memory.pool.leased(), 0);
        assert_eq!(rig.driver.in_flight(), 0);
    }
}

#[test]
fn an_empty_pool_ends_a_receive_at_once_even_with_nothing_to_receive() {
    let mut rig = Rig::new(4, Faults::none());
    let peer = rig.connection(0);
    rig.keep = true;
    rig.driver.recv(key(0));
    rig.world.borrow_mut().peer_send(peer, &pattern(BUFFER as usize * BUFFERS as usize * 2));
    rig.run(millis(10));
    assert_eq!(rig.log.last().map(String::as_str), Some("0 NoBuffer"));
    assert_eq!(rig.memory.pool.available(), 0);
    let _other = rig.connection(1);
    rig.driver.recv(key(1));
    rig.turn();
    assert_eq!(rig.log, ["1 NoBuffer"]);
    // The data that found no buffer waits in the socket.
    rig.kept.clear();
    rig.keep = false;
    rig.rearm = true;
    rig.driver.recv(key(0));
    rig.run(millis(10));
    assert_eq!(rig.data[&0].len(), BUFFER as usize * BUFFERS as usize * 2);
}

#[test]
fn the_end_of_a_stream_hides_behind_an_empty_pool() {
    for seed in 0..20 {
        let mut rig = Rig::new(seed, Faults::none());
        let peer = rig.connection(0);
        rig.keep = true;
        rig.driver.recv(key(0));
        rig.run(millis(1));
        // Takes the buffers away, so that only the end of the stream is left to be seen.
        while let Some(buf) = rig.memory.pool.lease_with(|_| 1) {
            rig.kept.push(buf);
        }
        rig.world.borrow_mut().peer_shutdown(peer);
        rig.run(millis(10));
        assert_eq!(rig.log, ["0 NoBuffer"]);
        rig.kept.clear();
        rig.driver.recv(key(0));
        rig.run(millis(10));
        assert_eq!(rig.log, ["0 NoBuffer", "0 Eof"]);
    }
}

#[test]
fn a_cancelled_receive_ends_once_perhaps_after_more_data() {
    let mut raced = 0;
    for seed in 0..100 {
        let mut rig = Rig::new(seed, Faults { late_completion: 0.2, ..Faults::none() });
        let peer = rig.connection(0);
        rig.driver.recv(key(0));
        rig.run(millis(1));
        rig.world.borrow_mut().peer_send(peer, b"late");
        let now = rig.world.borrow().now;
        rig.world.borrow_mut().advance(now + Duration::from_micros(seed * 8));
        rig.driver.cancel_recv(key(0));
        rig.driver.cancel_recv(key(0));
        rig.run(millis(50));
        assert_eq!(rig.count("0 Stopped"), 1, "{:?}", rig.log);
        assert_eq!(rig.log.last().map(String::as_str), Some("0 Stopped"));
        raced += usize::from(rig.log.len() > 1);
        // What the cancel kept from being reported is still there.
        rig.driver.recv(key(0));
        rig.run(millis(10));
        assert_eq!(rig.data[&0], b"late");
    }
    assert!((5..95).contains(&raced), "both happen: {raced} of 100");
}

#[test]
fn a_multishot_receive_that_meets_a_full_queue_ends_with_valid_data() {
    let mut rig = Rig::new(6, Faults { cq_overflow: 1.0, ..Faults::none() });
    let peer = rig.connection(0);
    rig.driver.recv(key(0));
    rig.world.borrow_mut().peer_send(peer, b"once");
    rig.run(millis(10));
    assert_eq!(rig.log[0], "0 data armed=false");
    assert_eq!(rig.driver.in_flight(), 0);
    assert_eq!(rig.counters.cq_overflows.get(), 1);
}

#[test]
fn a_reset_is_reported_after_the_data_before_it() {
    for seed in 0..30 {
        let mut rig = Rig::new(seed, Faults::none());
        let peer = rig.connection(0);
        rig.driver.recv(key(0));
        rig.world.borrow_mut().peer_send(peer, &pattern(1_000));
        rig.run(Duration::from_micros(50));
        rig.world.borrow_mut().peer_reset(peer);
        rig.run(millis(10));
        assert_eq!(rig.data[&0], pattern(1_000));
        let failed = format!("0 failed {}", errno::ECONNRESET);
        assert_eq!(rig.log.last(), Some(&failed));
        // The error is told once; the next operation meets a broken pipe.
        rig.send(0, vec![1; 9]);
        rig.run(millis(1));
        assert_eq!(rig.log.last(), Some(&format!("0 sent Err({})", errno::EPIPE)));
    }
}

#[test]
fn one_busy_connection_does_not_hide_another() {
    let mut rig = Rig::with_buffers(7, Faults::none(), 64);
    rig.world.borrow_mut().settings.socket_buffer = 1 << 20;
    let (busy, quiet) = (rig.connection(0), rig.connection(1));
    rig.world.borrow_mut().peer_send(busy, &vec![0; 1 << 20]);
    rig.world.borrow_mut().peer_send(quiet, b"me too");
    let now = rig.world.borrow().now;
    rig.world.borrow_mut().advance(now + millis(10));
    rig.rearm = true;
    rig.driver.recv(key(0));
    rig.turn();
    rig.driver.recv(key(1));
    rig.turn();
    let quiet_at = rig.position("1 data armed=true").expect("it is heard");
    assert!(quiet_at < 120, "after {quiet_at} events of the busy one");
    assert!(rig.data[&0].len() < 1 << 20, "the busy one has more to say");
}
