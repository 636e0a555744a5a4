//! A handler that does not want to be given anything for a while.

use corelane::{BufferConfig, CloseReason, WorkerConfig};

use crate::bed::{Bed, Plan, config};
use crate::bytes::{pattern, same};
use crate::script::{Script, Step, millis};

/// A server that pauses a connection as soon as it is there, in buffers so small that much is needed.
fn paused(bed: &Bed) -> crate::bed::Server<'_> {
    let buffers = BufferConfig { size: 256, ..config().buffers };
    bed.serve(Plan::config(WorkerConfig { buffers, ..config() }), |script| {
        script.accepted(|conn| conn.pause())
    })
}

pub fn data_waits_for_the_end_of_a_pause(bed: &Bed) {
    let server = paused(bed);
    let (peer, serial) = server.join();
    let other = server.join();
    let bytes = pattern(1, 20_000);
    peer.send(&bytes);
    // Others are not paused, and what they do shows that time went by.
    server.on(other.1, |conn| conn.resume());
    for _ in 0..20 {
        other.0.send_now(b"x");
    }
    server.received(other.1, 20);
    assert_eq!(server.log().data_len(serial), 0);
    server.on(serial, |conn| conn.resume());
    server.received(serial, bytes.len());
    same(&server.log().data(serial), &bytes, "what arrived during the pause");
}

pub fn end_waits_behind_data_during_a_pause(bed: &Bed) {
    let server = paused(bed);
    for n in 0..bed.rounds(20, 8) {
        let (peer, serial) = server.join();
        let bytes = pattern(n as u64, bed.random(0, 5000));
        peer.send_now(&bytes);
        peer.shutdown();
        if bed.one_in(2) {
            bed.pass(millis(2));
        }
        assert!(!server.log().has(serial, Step::Eof) && server.log().data_len(serial) == 0);
        server.on(serial, |conn| conn.resume());
        assert_eq!(server.closed(serial), CloseReason::Eof);
        same(&server.log().data(serial), &bytes, "what arrived during the pause");
        assert!(server.log().has(serial, Step::Eof));
        peer.expect_eof();
    }
}

/// The pause begins in the middle: what is on the way already is kept and comes first.
pub fn pause_in_the_middle_keeps_the_order(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script: Script| {
        script
            .data(|conn, _| {
                conn.pause();
                conn.set_timer(Some(millis(2)));
            })
            .timer(|conn| conn.resume())
    });
    let (peer, serial) = server.join();
    let bytes = pattern(2, 30_000);
    peer.send(&bytes);
    peer.shutdown();
    assert_eq!(server.closed(serial), CloseReason::Eof);
    same(&server.log().data(serial), &bytes, "what arrived between pauses");
}

pub fn reset_during_a_pause_comes_after_the_data(bed: &Bed) {
    // Paused by the first piece, so that the rest is with the worker or in the socket.
    let buffers = BufferConfig { size: 256, ..config().buffers };
    let server = bed.serve(Plan::config(WorkerConfig { buffers, ..config() }), |script| {
        script.data(|conn, _| {
            conn.state().count += 1;
            if conn.state().count == 1 {
                conn.pause();
            }
        })
    });
    for n in 0..bed.rounds(10, 6) {
        let (peer, serial) = server.join();
        let bytes = pattern(n as u64, 2000);
        peer.send_now(&bytes);
        server.received(serial, 1);
        bed.pass(millis(5));
        peer.reset();
        bed.pass(millis(5));
        // It may be over already for a worker that was told of the reset: then everything was delivered.
        let id = server.log().id(serial);
        server.ask(move |cx| cx.conn(id).map(|mut conn| conn.resume()));
        let reason = server.closed(serial);
        assert_eq!(reason, CloseReason::Reset);
        if !bed.differs() {
            same(&server.log().data(serial), &bytes, "what was sent before the reset");
        }
    }
}

/// Nobody reads a paused connection, so its peer's kernel fills up, and TCP slows the peer down.
pub fn pause_slows_the_peer_down(bed: &Bed) {
    let server = paused(bed);
    let (peer, serial) = server.join();
    let bytes = pattern(3, bed.size(16 << 20, 1 << 20));
    peer.send(&bytes);
    bed.pass(millis(50));
    assert!(!peer.sent_all(), "everything went to where nobody reads");
    assert_eq!(server.log().data_len(serial), 0);
    server.on(serial, |conn| conn.resume());
    server.received(serial, bytes.len());
    same(&server.log().data(serial), &bytes, "what was held back");
}
