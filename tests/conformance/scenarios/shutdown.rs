//! Ending: gracefully, at a deadline, from inside, by a panic.

use std::sync::{Arc, Mutex};

use corelane::{CloseReason, ConnectConfig, ConnectErrorKind, WorkerConfig};

use crate::bed::{Bed, End, Ending, Listen, Peer, Plan, config};
use crate::bytes::pattern;
use crate::script::{Log, Script, millis};

/// A megabyte for whoever asks.
fn generous(script: Script) -> Script {
    script.data(|conn, _| conn.send(pattern(1, 1 << 20)).expect("room"))
}

pub fn stop_delivers_what_is_queued(bed: &Bed) {
    let server = bed.serve(Plan::listen([Listen::narrow()]), generous);
    let peers: Vec<(Peer, usize)> = (0..4).map(|_| server.join_narrow()).collect();
    let (idle, _) = server.join();
    for (peer, serial) in &peers {
        peer.set_reading(false);
        peer.send(b"?");
        server.received(*serial, 1);
    }
    server.end(Ending::Stop(millis(20_000)));
    for (peer, _) in &peers {
        peer.set_reading(true);
    }
    for (peer, serial) in &peers {
        peer.expect(&pattern(1, 1 << 20));
        peer.expect_eof();
        peer.close();
        assert!(matches!(server.log().closed(*serial), None | Some(CloseReason::Shutdown)));
    }
    idle.expect_eof();
    idle.close();
    let report = server.ended().expect("a clean end");
    assert_eq!((report.finished, report.aborted), (5, 0), "{report:?}");
    assert_eq!(report.metrics.closed[CloseReason::Shutdown.index()], 5);
}

pub fn stalled_peers_are_reset_at_the_deadline_and_counted(bed: &Bed) {
    let server = bed.serve(Plan::listen([Listen::narrow()]), generous);
    let stalled: Vec<(Peer, usize)> = (0..3).map(|_| server.join_narrow()).collect();
    for (peer, serial) in &stalled {
        peer.set_reading(false);
        peer.send(b"?");
        server.received(*serial, 1);
    }
    let (leaving, _) = server.join();
    let asked = server.ask(|cx| cx.now());
    server.end(Ending::Stop(millis(200)));
    leaving.expect_eof();
    leaving.close();
    let report = server.ended().expect("a clean end");
    assert_eq!((report.finished, report.aborted), (1, 3), "{report:?}");
    for (peer, serial) in &stalled {
        assert_eq!(server.log().closed(*serial), Some(CloseReason::Shutdown));
        let ended = server.log().life(*serial, |life| life.steps.last().expect("it ended").0);
        assert!(ended.since(asked) >= millis(200), "reset before the deadline");
        peer.set_reading(true);
        assert_eq!(peer.end(), End::Reset);
    }
}

pub fn clients_that_wait_to_be_accepted_are_let_go_of(bed: &Bed) {
    let server = bed.serve(Plan::config(WorkerConfig { max_connections: 2, ..config() }), Script::echo);
    let peers: Vec<Peer> = (0..8).map(|_| bed.connect(server.addr())).collect();
    server.counters("the limit", |total| total.connections == 2);
    server.end(Ending::Stop(millis(10_000)));
    for peer in &peers {
        peer.end();
        assert_eq!(peer.waiting(), 0);
        peer.close();
    }
    let report = server.ended().expect("a clean end");
    assert_eq!(report.finished + report.aborted, 2, "{report:?}");
}

/// `on_stop` may say goodbye, and nothing new begins after it.
pub fn goodbye_in_on_stop_is_sent_and_nothing_new_begins(bed: &Bed) {
    let log = Log::default();
    let seen = log.clone();
    let refused = Arc::new(Mutex::new(None));
    let told = refused.clone();
    let server = bed.serve_logged(Plan::default(), log, move |_| {
        let (log, told) = (seen.clone(), told.clone());
        Script::new(&seen)
            .stop(|cx| {
                let ids: Vec<_> = cx.ids().collect();
                for id in ids {
                    cx.conn(id).expect("it is open").send("goodbye").expect("it is open");
                }
            })
            .closed(move |cx, _| {
                // The first close comes after the stop.
                let target = std::net::SocketAddr::from(([127, 0, 0, 1], 1));
                let begun = log.connect(cx, ConnectConfig::new(target));
                told.lock().expect("no panic").get_or_insert(begun);
            })
    });
    let peers: Vec<Peer> = (0..20).map(|_| server.join().0).collect();
    server.end(Ending::Stop(millis(10_000)));
    for peer in &peers {
        peer.expect(b"goodbye");
        peer.expect_eof();
        peer.close();
    }
    let report = server.ended().expect("a clean end");
    assert_eq!((report.finished, report.aborted), (20, 0), "{report:?}");
    assert_eq!(*refused.lock().expect("no panic"), Some(Err(ConnectErrorKind::Stopping)));
}

pub fn handler_may_stop_its_worker(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| {
        script.data(|conn, data| {
            conn.send(data).expect("it is open");
            conn.cx().stop(millis(10_000));
            // The callback goes on, and so does the connection until the turn is over.
            conn.send(" and bye").expect("it is open");
        })
    });
    let (peer, _) = server.join();
    // What follows is told before anything waits: a worker that ends now was asked to.
    server.end(Ending::Join);
    peer.send(b"!");
    peer.expect(b"! and bye");
    peer.expect_eof();
    peer.close();
    let report = server.ended().expect("a clean end");
    assert_eq!((report.finished, report.aborted), (1, 0), "{report:?}");
}

/// Everything is in flight when the handler panics: its worker's sockets are closed, the other workers end
/// too, and the runtime says what happened.
pub fn panic_of_a_handler_is_reported_and_closes_everything(bed: &Bed) {
    let config = WorkerConfig { auto_pause: false, ..config() };
    let server = bed.serve(Plan { workers: 2, config, ..Plan::listen([Listen::narrow()]) }, |script| {
        script.data(|conn, data| {
            assert!(data[0] != b'!', "a handler's own mistake");
            conn.state().kept.push(data.clone());
            conn.send(data).expect("it is open");
            conn.send(pattern(2, 1 << 20)).expect("room");
        })
    });
    let peers: Vec<Peer> = (0..20).map(|_| bed.connect_narrow(server.addr())).collect();
    for peer in &peers {
        peer.set_reading(false);
        peer.send_now(b"x");
    }
    server.counters("all of them", |total| total.messages == 20);
    server.end(Ending::Join);
    peers[7].send(b"!");
    let error = server.ended().expect_err("the panic");
    assert!(error.contains("panicked") && error.contains("a handler's own mistake"), "{error}");
    for peer in &peers {
        peer.set_reading(true);
        peer.end();
    }
}

/// A stop while connections come in: whoever was accepted is closed, whoever was not is let go of.
pub fn burst_in_the_moment_of_a_stop_is_let_go_of(bed: &Bed) {
    let server = bed.serve(Plan::config(WorkerConfig { accept_budget: 1, ..config() }), Script::echo);
    let hold = server.hold();
    let peers: Vec<Peer> = (0..50).map(|_| bed.connect(server.addr())).collect();
    server.end(Ending::Stop(millis(10_000)));
    drop(hold);
    for peer in &peers {
        peer.end();
        peer.close();
    }
    let report = server.ended().expect("a clean end");
    assert_eq!(report.finished + report.aborted, report.metrics.closed_total(), "{report:?}");
}
