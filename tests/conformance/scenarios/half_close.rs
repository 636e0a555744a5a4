//! One side finishes, the other goes on.

use corelane::{CloseReason, SendErrorKind};

use crate::bed::{Bed, End, Listen, Plan};
use crate::bytes::{pattern, same};
use crate::script::{Script, Step};

pub fn peer_that_finishes_first_still_receives_everything(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| {
        script.eof(|conn| {
            for part in pattern(1, 200_000).chunks(10_000) {
                conn.send(part.to_vec()).expect("its own direction is open");
            }
            conn.close();
        })
    });
    let (peer, serial) = server.join();
    peer.send(b"that is all");
    peer.shutdown();
    peer.expect(&pattern(1, 200_000));
    peer.expect_eof();
    peer.close();
    assert_eq!(server.closed(serial), CloseReason::Eof);
    assert_eq!(server.log().data(serial), b"that is all");
}

pub fn server_that_finishes_first_still_receives_everything(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| {
        script.accepted(|conn| {
            conn.send("last words").expect("it is open");
            conn.shutdown_write();
        })
    });
    let (peer, serial) = server.join();
    peer.expect(b"last words");
    peer.expect_eof();
    let bytes = pattern(2, 200_000);
    peer.send(&bytes);
    peer.shutdown();
    assert_eq!(server.closed(serial), CloseReason::Eof);
    assert!(server.log().has(serial, Step::Eof));
    same(&server.log().data(serial), &bytes, "what was sent to a server that had finished");
}

/// liburing's `shutdown`: a write on a socket that was shut down fails, and no signal comes of it (this
/// process would die of SIGPIPE: see `bed/real.rs`).
pub fn nothing_is_sent_after_the_finish(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| {
        script.data(|conn, data| {
            conn.send("once").expect("it is open");
            conn.shutdown_write();
            conn.shutdown_write();
            let refused = conn.send(data).expect_err("it is finished");
            assert_eq!((refused.kind, refused.payload.len()), (SendErrorKind::Closed, 1));
        })
    });
    let (peer, serial) = server.join();
    peer.send(b"x");
    peer.expect(b"once");
    peer.expect_eof();
    let kind = server.on(serial, |conn| conn.send("late").map_err(|error| error.kind));
    assert_eq!(kind, Err(SendErrorKind::Closed));
    peer.shutdown();
    assert_eq!(server.closed(serial), CloseReason::Eof);
}

pub fn graceful_close_delivers_what_is_queued(bed: &Bed) {
    let server = bed.serve(Plan::listen([Listen::narrow()]), |script| {
        script.data(|conn, _| {
            conn.send(pattern(3, 300_000)).expect("room");
            conn.close();
            // Closing twice is closing once, and nothing is taken any more.
            conn.close();
            assert_eq!(conn.send("more").map_err(|error| error.kind), Err(SendErrorKind::Closed));
        })
    });
    let (peer, serial) = server.join_narrow();
    peer.send(b"?");
    peer.expect(&pattern(3, 300_000));
    peer.expect_eof();
    assert_eq!(server.log().closed(serial), None, "it waits for its peer to finish");
    peer.close();
    assert_eq!(server.closed(serial), CloseReason::Local);
}

/// What the peer still sends to a server that closed is dropped, and no reason to reset it.
pub fn graceful_close_does_not_reset_a_peer_that_still_sends(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| {
        script.data(|conn, _| {
            conn.send(pattern(4, 50_000)).expect("room");
            conn.close();
        })
    });
    let (peer, serial) = server.join();
    peer.send(b"?");
    peer.send(&pattern(5, 500_000));
    peer.expect(&pattern(4, 50_000));
    assert_eq!(peer.end(), End::Fin);
    bed.until("the rest to be taken", || peer.sent_all());
    peer.close();
    assert_eq!(server.closed(serial), CloseReason::Local);
}

/// liburing's `mshot-shutdown-race`: data and the end right after it are both seen.
pub fn data_and_an_immediate_finish_are_both_seen(bed: &Bed) {
    let server = bed.echo();
    for n in 0..bed.rounds(60, 12) {
        let bytes = pattern(n as u64, bed.random(1, 6000));
        let (peer, serial) = server.join();
        peer.send(&bytes);
        peer.shutdown();
        peer.expect(&bytes);
        peer.expect_eof();
        peer.close();
        assert_eq!(server.closed(serial), CloseReason::Eof);
        same(&server.log().data(serial), &bytes, "what was sent before the finish");
    }
}

pub fn data_and_an_immediate_close_are_both_seen(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| script);
    for n in 0..bed.rounds(60, 12) {
        let bytes = pattern(n as u64, bed.random(1, 20_000));
        let (peer, serial) = server.join();
        peer.send_now(&bytes);
        peer.close();
        assert_eq!(server.closed(serial), CloseReason::Eof);
        assert!(server.log().has(serial, Step::Eof));
        same(&server.log().data(serial), &bytes, "what was sent before the close");
    }
}

pub fn end_without_data_is_an_end(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| script);
    for n in 0..20 {
        let (peer, serial) = server.join();
        if n % 2 == 0 {
            peer.close();
        } else {
            peer.shutdown();
            peer.expect_eof();
        }
        assert_eq!(server.closed(serial), CloseReason::Eof);
        let steps =
            server.log().life(serial, |life| life.steps.iter().map(|(_, step)| *step).collect::<Vec<_>>());
        assert_eq!(steps, [Step::Begun, Step::Eof, Step::Closed(CloseReason::Eof)]);
    }
}

/// Both FINs cross on their way.
pub fn both_may_finish_at_once(bed: &Bed) {
    let server = bed.serve(Plan::default(), Script::echo);
    for _ in 0..bed.rounds(30, 10) {
        let (peer, serial) = server.join();
        peer.exchange(b"hello");
        let id = server.log().id(serial);
        server.tell(move |cx| {
            if let Some(mut conn) = cx.conn(id) {
                conn.shutdown_write();
            }
        });
        peer.shutdown();
        peer.expect_eof();
        assert_eq!(server.closed(serial), CloseReason::Eof);
    }
}
