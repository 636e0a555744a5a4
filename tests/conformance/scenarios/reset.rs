//! A reset is told as one, whenever it comes, and never as a clean end.

use corelane::CloseReason;

use crate::bed::{Bed, Listen, Plan};
use crate::bytes::{pattern, prefix, same};
use crate::script::{Script, Step};

pub fn reset_of_an_idle_connection_is_no_clean_end(bed: &Bed) {
    let server = bed.echo();
    for n in 0..20 {
        let (peer, serial) = server.join();
        if n % 2 == 0 {
            peer.exchange(b"some words first");
        }
        peer.reset();
        assert_eq!(server.closed(serial), CloseReason::Reset);
        assert!(!server.log().has(serial, Step::Eof));
    }
}

/// A send is in flight, and more is queued behind it.
pub fn reset_during_a_send_ends_the_connection(bed: &Bed) {
    let server = bed.serve(Plan::listen([Listen::narrow()]), |script| {
        script.data(|conn, _| {
            for _ in 0..30 {
                // Refused when the queue is at its limit: enough is enough.
                drop(conn.send(pattern(1, 100_000)));
            }
        })
    });
    for n in 0..bed.rounds(12, 4) {
        let (peer, serial) = server.join_narrow();
        peer.set_reading(false);
        peer.send(b"?");
        bed.until("the send to be under way", || server.log().data_len(serial) == 1);
        if n % 2 == 0 {
            peer.read_limit(50_000);
            bed.until("some of it", || peer.waiting() == 50_000);
        }
        peer.reset();
        let reason = server.closed(serial);
        // A system tells an error once. A send that had taken a part of its bytes may swallow it, and
        // receiving then sees the end of the stream: so the reason may be that of a peer that finished.
        assert!(matches!(reason, CloseReason::Reset | CloseReason::Eof), "{reason}");
    }
    server.empties();
}

pub fn reset_after_a_send_ends_the_connection(bed: &Bed) {
    let server = bed.echo();
    for n in 0..bed.rounds(20, 8) {
        let (peer, serial) = server.join();
        peer.exchange(&pattern(n as u64, 20_000));
        peer.reset();
        assert_eq!(server.closed(serial), CloseReason::Reset);
        assert_eq!(server.log().data_len(serial), 20_000);
    }
    server.empties();
}

/// The worker is held up, so that both are there when it looks.
pub fn data_before_a_reset_is_delivered(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| script);
    for n in 0..bed.rounds(20, 8) {
        let bytes = pattern(n as u64, 3000);
        let (peer, serial) = server.join();
        let hold = server.hold();
        peer.send_now(&bytes);
        if bed.is_sim() {
            // Sent is not arrived, and a reset does not wait for what is on its way.
            server.received(serial, bytes.len());
        }
        peer.reset();
        drop(hold);
        assert_eq!(server.closed(serial), CloseReason::Reset);
        assert!(!server.log().has(serial, Step::Eof));
        let got = server.log().data(serial);
        if bed.differs() {
            prefix(&got, &bytes, "what was sent before a reset");
        } else {
            same(&got, &bytes, "what was sent before a reset");
        }
    }
}

pub fn abort_is_a_reset_for_the_peer(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| {
        script.data(|conn, _| {
            conn.send(pattern(2, 100_000)).expect("room");
            conn.abort();
            conn.close();
        })
    });
    for _ in 0..10 {
        let (peer, serial) = server.join();
        peer.send(b"?");
        peer.expect_reset();
        assert_eq!(server.closed(serial), CloseReason::Local);
    }
    server.empties();
}

/// liburing's `shutdown`: sending to a peer that is gone is an error that ends the connection, and no
/// signal.
pub fn sending_to_a_peer_that_closed_ends_the_connection(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| {
        // It does not close when the peer has finished, but goes on talking.
        script.eof(|conn| conn.set_timer(Some(crate::script::millis(1)))).timer(|conn| {
            drop(conn.send("is anybody there?"));
            conn.set_timer(Some(crate::script::millis(1)));
        })
    });
    for _ in 0..bed.rounds(10, 5) {
        let (peer, serial) = server.join();
        peer.close();
        assert_eq!(server.closed(serial), CloseReason::Reset);
        assert!(server.log().has(serial, Step::Eof), "it did finish before");
    }
}

/// `close(2)` with unread bytes in the socket is a reset on its way; the server sees one end.
pub fn peer_that_closes_with_answers_unread_is_gone_once(bed: &Bed) {
    let server = bed.serve(Plan::default(), Script::echo);
    for n in 0..bed.rounds(20, 8) {
        let (peer, serial) = server.join();
        peer.set_reading(false);
        peer.send_now(&pattern(n as u64, 5000));
        server.received(serial, 5000);
        peer.close();
        let reason = server.closed(serial);
        assert!(matches!(reason, CloseReason::Reset | CloseReason::Eof), "{reason}");
    }
    server.empties();
}
