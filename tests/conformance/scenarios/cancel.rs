//! Taking back what may complete at the same moment: either happens, never both, never neither.

use corelane::{CloseReason, ConnectConfig, WorkerConfig};

use crate::bed::{Bed, Ending, Listen, Peer, Plan, config};
use crate::bytes::{pattern, prefix, same};
use crate::script::{Script, Step, millis};

/// liburing's `cancel-race`: a receive is cancelled in the moment in which data arrives.
pub fn pause_racing_data_loses_nothing(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| {
        // Every piece of data pauses; the next timer, or the script, resumes.
        script
            .data(|conn, _| {
                conn.pause();
                conn.set_timer(Some(millis(1)));
            })
            .timer(|conn| conn.resume())
    });
    let (peer, serial) = server.join();
    let bytes = pattern(1, 60_000);
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        let (part, later) = rest.split_at(bed.random(1, 3000).min(rest.len()));
        peer.send(part);
        rest = later;
        let id = server.log().id(serial);
        let (pause, resume) = (bed.one_in(2), bed.one_in(2));
        server.tell(move |cx| {
            let mut conn = cx.conn(id).expect("it is open");
            if pause {
                conn.pause();
                conn.set_timer(Some(millis(1)));
            }
            if resume {
                conn.resume();
            }
        });
        if bed.one_in(4) {
            bed.until("the kernel to have it", || peer.sent_all());
        }
    }
    peer.shutdown();
    assert_eq!(server.closed(serial), CloseReason::Eof);
    same(&server.log().data(serial), &bytes, "what arrived between pauses");
}

/// A close, or an abort, in the moment in which a send completes.
pub fn close_racing_a_send_ends_once(bed: &Bed) {
    let server = bed.serve(Plan::listen([Listen::narrow()]), |script| {
        script.data(|conn, data| {
            // What to do comes from the client: how much to send, and how to end.
            for byte in data.iter() {
                drop(conn.send(pattern(9, usize::from(byte >> 2) * 700)));
                match byte & 3 {
                    0 => conn.close(),
                    1 => conn.abort(),
                    _ => {}
                }
            }
        })
    });
    let rounds = bed.rounds(150, 30);
    for _ in 0..rounds {
        let (peer, serial) = server.join();
        let (size, how) = (bed.random(0, 63) as u8, bed.random(0, 3) as u8);
        peer.send(&[size << 2 | how]);
        let id = server.log().id(serial);
        match how {
            0 | 1 => {}
            2 => server.remote().close(id).expect("there is room"),
            _ => server.remote().abort(id).expect("there is room"),
        }
        peer.end();
        prefix(&peer.take(), &pattern(9, usize::from(size) * 700), "what was sent before the end");
        peer.close();
        assert_eq!(server.closed(serial), CloseReason::Local);
    }
    server.empties();
    assert_eq!((server.log().begun(), server.log().ended()), (rounds, rounds));
}

/// A close while the peer sends and sends: receiving goes on until the peer has finished.
pub fn close_racing_data_ends_once(bed: &Bed) {
    let server = bed.echo();
    for n in 0..bed.rounds(30, 10) {
        let (peer, serial) = server.join();
        let id = server.log().id(serial);
        peer.send(&pattern(n as u64, 200_000));
        server.received(serial, bed.random(1, 100_000));
        if bed.one_in(2) {
            server.remote().close(id).expect("there is room");
        } else {
            server.remote().abort(id).expect("there is room");
        }
        peer.end();
        prefix(&peer.take(), &pattern(n as u64, 200_000), "the echo before the end");
        peer.close();
        assert_eq!(server.closed(serial), CloseReason::Local);
        prefix(&server.log().data(serial), &pattern(n as u64, 200_000), "what was received before the end");
    }
    server.empties();
}

/// A receive is armed, a send is stuck in the kernel, more is queued, leases are held back: then it ends.
pub fn abort_with_everything_in_flight_gives_everything_back(bed: &Bed) {
    let server = bed.serve(Plan::listen([Listen::narrow()]), |script| {
        script.data(|conn, data| {
            conn.set_auto_pause(false);
            conn.state().kept.push(data.clone());
            drop(conn.send(data));
            drop(conn.send(pattern(2, 300_000)));
        })
    });
    for round in 0..bed.rounds(10, 4) {
        let peers: Vec<(Peer, usize)> = (0..8).map(|_| server.join_narrow()).collect();
        for (peer, serial) in &peers {
            peer.set_reading(false);
            peer.send_now(b"x");
            server.received(*serial, 1);
        }
        for (n, (_, serial)) in peers.iter().enumerate() {
            let id = server.log().id(*serial);
            if (n + round) % 2 == 0 {
                server.remote().abort(id).expect("there is room");
            } else {
                peers[n].0.reset();
            }
        }
        for (_, serial) in &peers {
            server.closed(*serial);
        }
        server.empties();
    }
}

/// liburing's `exit-no-cleanup`, the orderly half: whatever is in flight when the deadline comes is taken
/// back from the kernel, and the report says that nothing is left (checked for every end of every server).
pub fn stop_with_everything_in_flight_leaves_nothing(bed: &Bed) {
    let config = WorkerConfig { auto_pause: false, ..config() };
    let server = bed.serve(Plan { config, ..Plan::listen([Listen::narrow()]) }, |script| {
        script.data(|conn, data| {
            conn.state().kept.push(data.clone());
            drop(conn.send(data));
            drop(conn.send(pattern(3, 1 << 20)));
        })
    });
    let (nowhere, _full) = bed.full();
    let peers: Vec<(Peer, usize)> = (0..10).map(|_| server.join_narrow()).collect();
    for (peer, serial) in &peers {
        peer.set_reading(false);
        peer.send_now(b"x");
        server.received(*serial, 1);
    }
    let idle: Vec<(Peer, usize)> = (0..5).map(|_| server.join()).collect();
    let connecting: Vec<usize> =
        (0..5).map(|_| server.connect(ConnectConfig::new(nowhere)).expect("it is begun")).collect();
    let report = server.stop(millis(0));
    assert_eq!(report.finished + report.aborted, 20, "{report:?}");
    assert!(report.aborted >= 10, "{report:?}");
    for serial in connecting {
        assert_eq!(server.log().closed(serial), Some(CloseReason::Shutdown));
        assert!(!server.log().has(serial, Step::Connected));
    }
    for (peer, _) in peers.iter().chain(&idle) {
        peer.set_reading(true);
        peer.end();
    }
}

/// liburing's `thread-exit`: a runtime that nobody waits for frees its sockets and its addresses.
pub fn dropped_runtime_lets_go_of_everything(bed: &Bed) {
    let server = bed.serve(Plan::listen([Listen::narrow()]), |script| {
        script.data(|conn, _| drop(conn.send(pattern(3, 1 << 20))))
    });
    let addr = server.addr();
    let peers: Vec<(Peer, usize)> = (0..10).map(|_| server.join_narrow()).collect();
    for (n, (peer, serial)) in peers.iter().enumerate() {
        if n % 2 == 0 {
            peer.set_reading(false);
            peer.send_now(b"x");
            server.received(*serial, 1);
        }
    }
    server.end(Ending::Drop);
    for (peer, _) in &peers {
        peer.set_reading(true);
        peer.end();
    }
    bed.until("every connection's end", || server.log().all_ended());
    bed.until("the address to be free", || std::net::TcpListener::bind(addr).is_ok());
}

/// Arming and cancelling in every turn, by whoever likes.
pub fn pause_and_resume_without_end_change_nothing(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script: Script| {
        script.data(|conn, data| {
            for _ in 0..3 {
                conn.pause();
                conn.resume();
            }
            drop(conn.send(data));
        })
    });
    let (peer, serial) = server.join();
    let id = server.log().id(serial);
    for n in 0..bed.rounds(100, 30) {
        peer.send(&pattern(n as u64, 900));
        server.tell(move |cx| {
            let mut conn = cx.conn(id).expect("it is open");
            conn.pause();
            conn.resume();
            conn.pause();
        });
        server.tell(move |cx| cx.conn(id).expect("it is open").resume());
        peer.expect(&pattern(n as u64, 900));
    }
}
