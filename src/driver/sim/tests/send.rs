//! Sending: back-pressure, cancels, short sends.

use super::super::errno;
use super::*;

#[test]
fn a_send_waits_for_a_slow_reader_and_arrives_whole() {
    for seed in 0..30 {
        let mut rig = Rig::new(seed, Faults::none());
        let peer = rig.connection(0);
        rig.world.borrow_mut().peer_set_reading(peer, false, None);
        let sent = pattern(5 * SOCKET_BUFFER as usize);
        rig.send(0, sent.clone());
        rig.run(millis(50));
        assert!(rig.log.is_empty(), "both socket buffers are full: {:?}", rig.log);
        rig.world.borrow_mut().peer_set_reading(peer, true, None);
        rig.run(millis(100));
        assert_eq!(rig.log, [format!("0 sent Ok({})", sent.len())]);
        assert_eq!(rig.peer_received(peer), sent);
        assert_eq!(rig.memory.chunks.used(), 0);
    }
}

#[test]
fn a_cancelled_send_reports_what_was_taken() {
    for seed in 0..30 {
        let mut rig = Rig::new(seed, Faults::none());
        let peer = rig.connection(0);
        rig.world.borrow_mut().peer_set_reading(peer, false, None);
        rig.send(0, pattern(5 * SOCKET_BUFFER as usize));
        rig.run(millis(50));
        rig.driver.cancel_send(key(0));
        rig.run(millis(50));
        // One socket buffer at either side.
        let taken = 2 * SOCKET_BUFFER as usize;
        assert_eq!(rig.log, [format!("0 sent Ok({taken})")]);
        rig.send(0, pattern(100));
        rig.run(millis(1));
        rig.driver.cancel_send(key(0));
        rig.run(millis(50));
        assert_eq!(rig.log[1], format!("0 sent Err({})", errno::ECANCELED));
        rig.world.borrow_mut().peer_set_reading(peer, true, None);
        rig.run(millis(50));
        assert_eq!(rig.peer_received(peer), pattern(5 * SOCKET_BUFFER as usize)[..taken]);
    }
}

#[test]
fn short_sends_can_be_continued() {
    for seed in 0..30 {
        let mut rig = Rig::new(seed, Faults { short_send: 0.7, ..Faults::none() });
        let peer = rig.connection(0);
        let all = pattern(10_000);
        let mut at = 0;
        let mut sends = 0;
        while at < all.len() {
            rig.send(0, all[at..].to_vec());
            rig.run(millis(100));
            let line = rig.log.pop().expect("it ends");
            let n = line.strip_prefix("0 sent Ok(").and_then(|rest| rest.strip_suffix(')'));
            at += n.and_then(|n| n.parse::<usize>().ok()).expect("bytes");
            sends += 1;
        }
        assert!(sends > 1);
        assert_eq!(rig.peer_received(peer), all);
    }
}

#[test]
#[should_panic(expected = "driver contract broken")]
fn a_second_send_in_flight_is_a_broken_contract() {
    let mut rig = Rig::new(14, Faults::none());
    let _peer = rig.connection(0);
    rig.send(0, vec![1; 9]);
    rig.send(0, vec![2; 9]);
}
