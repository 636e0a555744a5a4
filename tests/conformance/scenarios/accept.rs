//! How connections come in.

use corelane::{CloseReason, WorkerConfig};

use crate::bed::{Bed, End, Listen, Peer, Plan, config};
use crate::bytes::pattern;
use crate::script::{Script, Step};

pub fn burst_of_connections_is_served(bed: &Bed) {
    let server = bed.echo();
    let peers: Vec<Peer> = (0..200).map(|_| bed.connect(server.addr())).collect();
    for (n, peer) in peers.iter().enumerate() {
        peer.send(&pattern(n as u64, 300));
    }
    for (n, peer) in peers.iter().enumerate() {
        peer.expect(&pattern(n as u64, 300));
    }
    assert_eq!(server.metrics().accepted, 200);
    assert_eq!(server.metrics().connections, 200);
}

/// liburing's `accept-mshot-stress`: churn, bursts and reconnects lose no connection.
pub fn churn_loses_no_connection(bed: &Bed) {
    let server = bed.echo();
    let mut connected = 0;
    for round in 0..bed.rounds(40, 10) {
        let peers: Vec<Peer> = (0..bed.random(1, 12)).map(|_| bed.connect(server.addr())).collect();
        connected += peers.len();
        for peer in &peers {
            peer.exchange(&pattern(round as u64, 50));
        }
        for peer in peers {
            if bed.one_in(3) {
                peer.reset();
            } else {
                peer.close();
            }
        }
    }
    server.empties();
    assert_eq!(server.log().begun(), connected);
    assert_eq!(server.metrics().closed_total(), connected as u64);
}

/// A burst that waits in the listener's queue when the worker comes to it.
pub fn burst_that_waited_is_served_in_one_go(bed: &Bed) {
    let server = bed.echo();
    let hold = server.hold();
    let peers: Vec<Peer> = (0..100).map(|_| bed.connect(server.addr())).collect();
    for peer in &peers {
        peer.send(b"early");
    }
    drop(hold);
    for peer in &peers {
        peer.expect(b"early");
    }
    assert_eq!(server.log().begun(), 100);
}

pub fn at_the_limit_the_next_waits_until_there_is_room(bed: &Bed) {
    let server = bed.serve(Plan::config(WorkerConfig { max_connections: 4, ..config() }), Script::echo);
    let peers: Vec<Peer> = (0..16).map(|_| bed.connect(server.addr())).collect();
    for (n, peer) in peers.iter().enumerate() {
        peer.send(&pattern(n as u64, 100));
    }
    // Everybody is answered sooner or later; whoever is done makes room.
    let mut left: Vec<(usize, Peer)> = peers.into_iter().enumerate().collect();
    while !left.is_empty() {
        bed.until("one of those who are connected to be answered", || {
            left.iter().any(|(_, peer)| peer.waiting() == 100 || peer.is_over())
        });
        assert!(server.metrics().connections <= 4);
        let (done, rest) = left.into_iter().partition(|(_, peer)| peer.waiting() == 100 || peer.is_over());
        left = rest;
        for (n, peer) in done {
            peer.expect(&pattern(n as u64, 100));
            peer.close();
        }
    }
    server.empties();
    assert_eq!((server.log().begun(), server.log().ended()), (16, 16));
}

/// The limit is a limit of this worker's table: whoever is refused by the handler does not count.
pub fn connection_refused_by_the_handler_is_closed(bed: &Bed) {
    let server = bed.serve(Plan::config(WorkerConfig { max_connections: 3, ..config() }), |script| {
        let mut asked = 0;
        script.echo().accept(move |_, _| {
            asked += 1;
            asked % 2 == 0
        })
    });
    for round in 0..12 {
        let peer = bed.connect(server.addr());
        if round % 2 == 0 {
            peer.end();
            assert_eq!(peer.waiting(), 0);
        } else {
            peer.exchange(b"and the next one is served");
            peer.close();
        }
    }
    server.empties();
    assert_eq!((server.metrics().refused, server.log().begun(), server.log().ended()), (6, 6, 6));
}

pub fn listeners_are_told_apart(bed: &Bed) {
    let server = bed.serve(Plan::listen(vec![Listen::default(); 16]), Script::echo);
    let addrs = server.addrs().to_vec();
    assert_eq!(addrs.len(), 16);
    let mut peers = Vec::new();
    for round in 0..2 {
        for (index, addr) in addrs.iter().enumerate() {
            let serial = server.log().begun();
            let peer = bed.connect(*addr);
            peer.exchange(&pattern((round * 16 + index) as u64, 200));
            assert_eq!(server.log().life(serial, |life| life.listener), Some(index));
            peers.push(peer);
        }
    }
}

pub fn server_may_speak_first(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| {
        script.echo().accepted(|conn| conn.send("welcome\n").expect("it is open"))
    });
    for _ in 0..20 {
        let peer = bed.connect(server.addr());
        peer.expect(b"welcome\n");
        peer.exchange(b"thanks");
        peer.close();
    }
    server.empties();
}

/// What a client sent, and that it finished, is not lost because it left before it was accepted.
pub fn client_that_left_before_it_was_accepted_is_heard(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| script);
    let hold = server.hold();
    for n in 0..20 {
        let peer = bed.connect(server.addr());
        peer.send_now(&pattern(n, 500));
        peer.close();
    }
    drop(hold);
    bed.until("all of them", || server.log().ended() == 20);
    server.log().lives(|lives| {
        let mut got: Vec<&[u8]> = lives.iter().map(|life| &life.data[..]).collect();
        let mut sent: Vec<Vec<u8>> = (0..20).map(|n| pattern(n, 500)).collect();
        got.sort_unstable();
        sent.sort_unstable();
        assert_eq!(got, sent);
        assert!(lives.iter().all(|life| life.closed == Some(CloseReason::Eof) && life.has(Step::Eof)));
    });
}

/// A connection that was reset while it waited to be accepted is either never seen, or seen and over.
pub fn reset_before_the_accept_is_handled_harms_nobody(bed: &Bed) {
    let server = bed.echo();
    let hold = server.hold();
    let gone: Vec<Peer> = (0..20).map(|_| bed.connect(server.addr())).collect();
    let stays = bed.connect(server.addr());
    for peer in &gone {
        peer.reset();
    }
    drop(hold);
    stays.exchange(b"still here");
    bed.until("those who are gone to be over", || server.log().begun() - server.log().ended() == 1);
    server.log().lives(|lives| {
        for life in lives.iter().filter(|life| life.closed.is_some()) {
            assert_eq!(life.closed, Some(CloseReason::Reset));
            assert!(!life.has(Step::Eof), "a reset is no clean end");
        }
    });
    stays.shutdown();
    assert_eq!(stays.end(), End::Fin);
}
