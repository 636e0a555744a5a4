//! One connection never hides the others.

use crate::bed::{Bed, Peer, Plan};
use crate::bytes::pattern;
use crate::script::Script;

/// liburing's `recv-mshot-fair`: streams progress side by side. Counted, not timed: while one client sends
/// without end, every one of a hundred quiet ones is answered, several times.
pub fn flood_does_not_hide_a_hundred_quiet_connections(bed: &Bed) {
    let server = bed.serve(Plan::default(), Script::echo);
    let (flood, flooding) = server.join();
    let quiet: Vec<Peer> = (0..100).map(|_| server.join().0).collect();
    let bytes = pattern(1, 1 << 20);
    let more = || {
        // There is always something on its way.
        if flood.sent_all() {
            flood.send(&bytes);
        }
    };
    for round in 0..bed.rounds(5, 2) {
        more();
        for (n, peer) in quiet.iter().enumerate() {
            peer.send(&pattern((round * 100 + n) as u64, 100));
        }
        bed.until("every quiet one to be answered", || {
            more();
            flood.take();
            quiet.iter().all(|peer| peer.waiting() == 100)
        });
        for (n, peer) in quiet.iter().enumerate() {
            peer.expect(&pattern((round * 100 + n) as u64, 100));
        }
    }
    let flooded = server.log().data_len(flooding);
    assert!(flooded > 100 * 100, "{flooded} bytes are no flood");
    flood.reset();
}

/// Two floods share: neither gets ten times as much as the other while both have something to send.
pub fn two_floods_progress_side_by_side(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| script);
    let (one, first) = server.join();
    let (two, second) = server.join();
    let bytes = pattern(2, bed.size(4 << 20, 1 << 20));
    let hold = server.hold();
    one.send(&bytes);
    two.send(&bytes);
    drop(hold);
    bed.until("one of them to be halfway", || {
        server.log().data_len(first).max(server.log().data_len(second)) >= bytes.len() / 2
    });
    let (a, b) = (server.log().data_len(first), server.log().data_len(second));
    assert!(a.min(b) * 10 >= a.max(b), "{a} and {b} bytes");
    server.received(first, bytes.len());
    server.received(second, bytes.len());
}

/// A handler that has the worker call it again and again, with nothing from outside.
pub fn handler_that_always_has_something_to_do_hides_nobody(bed: &Bed) {
    fn again(cx: &mut corelane::Cx<'_, Script>, left: u32) {
        if left > 0 {
            let this = cx.worker();
            cx.post(this, crate::script::Task::new(move |cx| again(cx, left - 1))).expect("room for one");
        }
    }
    let server = bed.serve(Plan::default(), Script::echo);
    let (peer, _) = server.join();
    let times = bed.rounds(50_000, 5_000) as u32;
    server.tell(move |cx| again(cx, times));
    for n in 0..20 {
        peer.exchange(&pattern(n, 1000));
    }
    server.counters("the handler's own messages", |total| total.mailbox > times.into());
}
