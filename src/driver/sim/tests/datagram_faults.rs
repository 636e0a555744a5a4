//! What may happen to datagrams.

use super::super::script::Shortage;
use super::datagram::*;
use super::*;
use crate::driver::sim::errno;

#[test]
fn no_socket_can_be_made_when_a_fault_says_so() {
    let mut rig = rig(1, Faults::none());
    rig.script(When::next(), Fault::ConnectError(Shortage::ProcessFiles));
    assert_eq!(refused(&mut rig, 0, &udp(addr(1))), errno::EMFILE);
    open(&mut rig, 0, &udp(addr(1)));
}

/// What a peer got of ten numbered datagrams of a worker.
fn ten(seed: u64, faults: Faults, script: &[(When, Fault)]) -> Vec<usize> {
    let mut rig = rig(seed, faults);
    let peer = peer(&mut rig, 1);
    open(&mut rig, 0, &connected(addr(1), foreign(1)));
    for (when, fault) in script {
        rig.script(*when, *fault);
    }
    for n in 0..10 {
        send(&mut rig, 0, 0, numbered(n).as_bytes(), None);
        rig.run(Duration::from_micros(30));
    }
    rig.run(millis(100));
    let all = peer_received(&mut rig, peer).into_iter();
    all.map(|(_, bytes)| String::from_utf8(bytes).expect("text").parse().expect("a number")).collect()
}

#[test]
fn scripted_faults_strike_the_datagram_that_was_meant() {
    for seed in 0..10 {
        let script = [
            (When::nth(3), Fault::DatagramLoss),
            (When::nth(2), Fault::DatagramDuplicate),
            (When::nth(5), Fault::DatagramReorder { by: millis(5) }),
        ];
        // Of those not lost, the second is 1, and the fifth 5.
        assert_eq!(ten(seed, Faults::none(), &script), [0, 1, 1, 3, 4, 6, 7, 8, 9, 5], "seed {seed}");
        assert_eq!(ten(seed, Faults::none(), &[]), Vec::from_iter(0..10));
    }
}

#[test]
fn faults_by_chance_lose_repeat_and_reorder() {
    let never = Faults { datagram_loss: 1.0, ..Faults::none() };
    assert_eq!(ten(1, never, &[]), []);
    let twice = Faults { datagram_duplicate: 1.0, ..Faults::none() };
    assert_eq!(ten(1, twice, &[]), (0..10).flat_map(|n| [n, n]).collect::<Vec<_>>());
    let mut reordered = 0;
    for seed in 0..20 {
        let late = Faults { datagram_reorder: 0.3, ..Faults::none() };
        let mut got = ten(seed, late, &[]);
        reordered += usize::from(!got.is_sorted());
        got.sort_unstable();
        assert_eq!(got, Vec::from_iter(0..10));
    }
    assert!(reordered > 10, "{reordered} of 20");
    assert_eq!(ten(2, Faults { datagram_error: 1.0, ..Faults::none() }, &[]), []);
}

#[test]
fn partitions_and_stalls_swallow_datagrams_and_the_news_that_nobody_is_there() {
    let mut rig = rig(11, Faults::none());
    (rig.keep, rig.rearm) = (true, true);
    let peer = peer(&mut rig, 1);
    open(&mut rig, 0, &connected(addr(1), foreign(1)));
    open(&mut rig, 1, &connected(addr(2), foreign(2)));
    rig.driver.recv(key(0));
    rig.driver.recv(key(1));
    let exchange = |rig: &mut Rig, text: &str| {
        send(rig, 0, 0, text.as_bytes(), None);
        send(rig, 1, 0, text.as_bytes(), None);
        peer_sends(rig, peer, addr(1), text.as_bytes());
        rig.log.clear();
        rig.run(millis(10));
        let failed = rig.log.iter().filter(|line| line.contains("failed")).count();
        if failed > 0 {
            rig.driver.recv(key(1));
        }
        (peer_received(rig, peer).len(), texts(rig).len(), failed)
    };
    assert_eq!(exchange(&mut rig, "open"), (1, 1, 1));
    rig.world.borrow_mut().net.cut_between(addr(1).ip(), foreign(1).ip());
    assert_eq!(exchange(&mut rig, "cut"), (0, 0, 0));
    rig.world.borrow_mut().net.heal_between(addr(1).ip(), foreign(1).ip());
    rig.world.borrow_mut().net.cut_one_way(foreign(1).ip(), addr(1).ip());
    assert_eq!(exchange(&mut rig, "one way"), (1, 0, 0));
    rig.world.borrow_mut().net.heal_all();
    rig.world.borrow_mut().strike_now(Fault::Stall { time: Duration::from_secs(1) }, None, Some(peer));
    assert_eq!(exchange(&mut rig, "stalled"), (0, 0, 1));
    rig.world.borrow_mut().calm();
    assert_eq!(exchange(&mut rig, "calm"), (1, 1, 1));
    let stall = Fault::Stall { time: Duration::from_secs(1) };
    rig.script(When::nth(1), stall);
    let (to_peer, to_socket, _) = exchange(&mut rig, "the first stalls its receiver");
    assert!(to_peer + to_socket <= 1);
    rig.run(Duration::from_secs(1));
    assert_eq!(exchange(&mut rig, "over"), (1, 1, 1));
}

#[test]
fn a_seed_names_a_history_of_datagrams() {
    let history = |seed: u64| {
        let mut rig = rig(seed, Faults::hostile(0.1));
        rig.rearm = true;
        let peers = [peer(&mut rig, 1), peer(&mut rig, 2)];
        let bound = (0..3).filter(|slot| {
            let config = udp(addr(10 + *slot as u16));
            rig.driver.open_datagram(key(*slot), &config).is_ok_and(|()| {
                rig.driver.recv(key(*slot));
                true
            })
        });
        let bound: Vec<u32> = bound.collect();
        for n in 0..50u32 {
            for slot in &bound {
                send(&mut rig, *slot, n, &pattern(n as usize * 9), Some(foreign(1 + (n % 3) as u16)));
            }
            peer_sends(&mut rig, peers[n as usize % 2], addr(10 + (n % 4) as u16), &pattern(n as usize));
            rig.run(Duration::from_micros(40));
        }
        rig.run(millis(50));
        let world = rig.world.borrow();
        (world.trace.hash(), world.trace.tail(1_000))
    };
    let mut hashes = Vec::new();
    for seed in 0..20 {
        let (first, again) = (history(seed), history(seed));
        assert_eq!(first, again, "seed {seed}");
        hashes.push(first.0);
    }
    hashes.sort_unstable();
    hashes.dedup();
    assert_eq!(hashes.len(), 20);
}
