//! Slots are used again and again; names are not.

use corelane::WorkerConfig;

use crate::bed::{Bed, Listen, Peer, Plan, config};
use crate::bytes::pattern;
use crate::script::{Script, millis};

/// Few slots, many lives, every kind of end. Each client's bytes are all its own number, and the handler
/// checks that a connection never sees another one's. (That no name is given twice, and no callback reaches
/// another connection's state, is checked for every scenario.)
pub fn thousands_of_short_lives_are_never_confused(bed: &Bed) {
    let plan = Plan::config(WorkerConfig { max_connections: 5, ..config() });
    let server = bed.serve(plan, |script: Script| {
        script.data(|conn, data| {
            if conn.state().count == 0 {
                conn.state().count = usize::from(data[0]) + 1;
            }
            let own = (conn.state().count - 1) as u8;
            assert!(data.iter().all(|byte| *byte == own), "another connection's bytes");
            drop(conn.send(data));
        })
    });
    let rounds = bed.rounds(500, 20);
    for round in 0..rounds {
        let peers: Vec<(u8, Peer)> = (0..4)
            .map(|n| {
                let own = (round * 4 + n) as u8;
                let peer = bed.connect(server.addr());
                peer.send(&vec![own; bed.random(1, 4000)]);
                (own, peer)
            })
            .collect();
        for (own, peer) in peers {
            match bed.random(0, 3) {
                0 => {}
                1 => peer.shutdown(),
                _ => bed.until("some of it", || peer.waiting() > 0),
            }
            let got = peer.take();
            assert!(got.iter().all(|byte| *byte == own), "another connection's bytes");
            if bed.one_in(2) {
                peer.reset();
            } else {
                peer.close();
            }
        }
    }
    server.empties();
    assert_eq!(server.metrics().stale, 0);
}

/// Every operation of the old life is still with the kernel when the slot has its next one.
pub fn late_completions_do_not_reach_the_next_connection(bed: &Bed) {
    let config = WorkerConfig { max_connections: 1, auto_pause: false, ..config() };
    let server = bed.serve(Plan { config, ..Plan::listen([Listen::narrow()]) }, |script| {
        script
            .data(|conn, data| {
                if data[0] == b'?' {
                    drop(conn.send(pattern(1, 1 << 20)));
                    conn.set_timer(Some(millis(1)));
                } else {
                    drop(conn.send(data));
                }
            })
            .timer(|conn| conn.abort())
    });
    for n in 0..bed.rounds(30, 10) {
        let (old, serial) = server.join_narrow();
        old.set_reading(false);
        old.send(b"?");
        // The next one waits for the slot already.
        let new = bed.connect(server.addr());
        new.send(&pattern(n as u64 * 2, 1).repeat(300));
        server.closed(serial);
        let wanted = pattern(n as u64 * 2, 1).repeat(300);
        if wanted[0] == b'?' {
            new.close();
        } else {
            new.expect(&wanted);
            new.close();
        }
        server.empties();
        old.set_reading(true);
        old.expect_reset();
    }
}

/// A slot is used by outgoing and by accepted connections in turn.
pub fn slot_serves_both_kinds_of_connections_in_turn(bed: &Bed) {
    let server = bed
        .serve(Plan::config(WorkerConfig { max_connections: 1, ..config() }), |script: Script| {
            script.echo().connected(|conn| conn.send("from inside").expect("it is open"))
        });
    let foreign = bed.listen();
    for n in 0..bed.rounds(20, 8) {
        let (peer, serial) = server.join();
        peer.exchange(&pattern(n as u64, 2000));
        peer.close();
        server.closed(serial);
        server.empties();
        let config = corelane::ConnectConfig::new(foreign.addr());
        let serial = server.connect(config).expect("the slot is free");
        let peer = foreign.accept();
        peer.expect(b"from inside");
        peer.exchange(&pattern(n as u64, 2000));
        peer.close();
        server.closed(serial);
        server.empties();
    }
}
