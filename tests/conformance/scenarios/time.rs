//! What happens after a while: never too early, and on the simulated kernel not too late.

use std::time::Duration;

use corelane::{CloseReason, WorkerConfig};

use crate::bed::{Bed, Listen, Peer, Plan, Server, config};
use crate::bytes::pattern;
use crate::script::{Script, Step, millis};

/// Waits for a connection's end; returns how long after its beginning that was.
fn lifetime(server: &Server<'_>, serial: usize, reason: CloseReason) -> Duration {
    assert_eq!(server.closed(serial), reason);
    server.log().life(serial, |life| life.when(Step::Closed(reason)).expect("it ended").since(life.begun))
}

fn within(bed: &Bed, what: &str, took: Duration, least: Duration) {
    assert!(took >= least, "{what} after {took:?} instead of {least:?}");
    if let Some(slack) = bed.slack() {
        assert!(took <= least + slack, "{what} only after {took:?} instead of {least:?}");
    }
}

pub fn silent_connection_is_closed_and_a_talking_one_is_not(bed: &Bed) {
    let worker = WorkerConfig { idle_timeout: Some(millis(400)), ..config() };
    let server = bed.serve(Plan::config(worker), Script::echo);
    let (talking, spared) = server.join();
    let (silent, serial) = server.join();
    while server.log().closed(serial).is_none() {
        talking.exchange(b"still here");
        bed.pass(millis(5));
    }
    within(bed, "closed", lifetime(&server, serial, CloseReason::IdleTimeout), millis(400));
    silent.end();
    // As long again, and it is spared still.
    for _ in 0..100 {
        talking.exchange(b"still here");
        bed.pass(millis(5));
    }
    assert_eq!(server.log().closed(spared), None);
    drop(talking);
}

pub fn idle_timeout_of_one_connection_may_differ(bed: &Bed) {
    let worker = WorkerConfig { idle_timeout: Some(millis(50)), ..config() };
    let server = bed.serve(Plan::config(worker), |script| {
        script.accepted(|conn| match conn.state().serial {
            0 => conn.set_idle_timeout(None),
            1 => conn.set_idle_timeout(Some(millis(150))),
            _ => {}
        })
    });
    let peers: Vec<(Peer, usize)> = (0..3).map(|_| server.join()).collect();
    within(bed, "closed", lifetime(&server, 2, CloseReason::IdleTimeout), millis(50));
    within(bed, "closed", lifetime(&server, 1, CloseReason::IdleTimeout), millis(150));
    assert_eq!(server.log().closed(0), None);
    drop(peers);
}

pub fn deadline_ends_a_connection_whatever_it_does(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| {
        script.echo().accepted(|conn| {
            conn.set_deadline(Some(millis(120)));
            if conn.state().serial == 1 {
                conn.set_deadline(None);
            }
        })
    });
    let (peer, serial) = server.join();
    let (spared, other) = server.join();
    while server.log().closed(serial).is_none() {
        peer.send(b"x");
        spared.exchange(b"y");
        bed.pass(millis(3));
    }
    within(bed, "ended", lifetime(&server, serial, CloseReason::Deadline), millis(120));
    peer.expect_reset();
    spared.exchange(b"its own was taken back");
    assert_eq!(server.log().closed(other), None);
}

pub fn timers_fire_in_the_order_of_their_times(bed: &Bed) {
    const AFTER: [u64; 6] = [90, 30, 150, 60, 120, 45];
    let server = bed.serve(Plan::default(), |script| script);
    let peers: Vec<Peer> = AFTER.iter().map(|_| server.join().0).collect();
    // All at once, so that they count from one point in time.
    let log = server.log().clone();
    let set = server.ask(move |cx| {
        for (serial, after) in AFTER.iter().enumerate() {
            let mut conn = cx.conn(log.id(serial)).expect("it is open");
            conn.set_timer(Some(millis(1)));
            conn.set_timer(Some(millis(*after)));
        }
        cx.now()
    });
    bed.until("all timers", || server.log().timers().len() == AFTER.len());
    assert_eq!(server.log().timers(), [1, 5, 3, 0, 4, 2]);
    for (serial, after) in AFTER.iter().enumerate() {
        let fired = server.log().life(serial, |life| life.when(Step::Timer).expect("it fired"));
        within(bed, "fired", fired.since(set), millis(*after));
    }
    drop(peers);
}

pub fn timer_taken_back_does_not_fire(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| {
        script.accepted(|conn| {
            conn.set_timer(Some(millis(20)));
            if conn.state().serial == 0 {
                conn.set_timer(None);
            }
        })
    });
    let (_first, taken_back) = server.join();
    let (_second, kept) = server.join();
    bed.until("the other timer", || server.log().has(kept, Step::Timer));
    // One more of the same length, set after both.
    server.on(kept, |conn| conn.set_timer(Some(millis(30))));
    bed.until("one more", || server.log().timers().len() == 2);
    assert!(!server.log().has(taken_back, Step::Timer));
    assert_eq!(server.log().timers(), [kept, kept]);
}

/// The timer is set again from inside its own callback, and ends with its connection.
pub fn periodic_timer_keeps_its_distance(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| {
        script.accepted(|conn| conn.set_timer(Some(millis(10)))).timer(|conn| {
            conn.send("tick").expect("it is open");
            conn.set_timer(Some(millis(10)));
        })
    });
    let (peer, serial) = server.join();
    for _ in 0..10 {
        peer.expect(b"tick");
    }
    peer.close();
    server.closed(serial);
    server.log().life(serial, |life| {
        let ticks: Vec<_> =
            life.steps.iter().filter(|(_, step)| *step == Step::Timer).map(|(at, _)| *at).collect();
        assert!(ticks.len() >= 10);
        for pair in ticks.windows(2) {
            within(bed, "fired", pair[1].since(pair[0]), millis(10));
        }
    });
}

pub fn alarm_fires_once_and_not_early(bed: &Bed) {
    let log = crate::script::Log::default();
    let seen = log.clone();
    let server = bed.serve_logged(Plan::default(), log, move |_| {
        let (started, rang) = (seen.clone(), seen.clone());
        Script::new(&seen)
            .start(move |cx| {
                started.note(cx.now(), 0);
                cx.set_alarm(cx.now() + millis(5));
                cx.set_alarm(cx.now() + millis(60));
            })
            .alarm(move |cx| {
                rang.note(cx.now(), 1);
                if rang.noted().len() == 2 {
                    cx.set_alarm(cx.now() + millis(20));
                } else {
                    cx.set_alarm(cx.now() + millis(1));
                    cx.clear_alarm();
                }
            })
    });
    bed.until("two alarms", || server.log().noted() == [0, 1, 1]);
    bed.pass(millis(20));
    let notes = server.log().notes();
    assert_eq!(notes.len(), 3, "one that was taken back rang");
    within(bed, "rang", notes[1].0.since(notes[0].0), millis(60));
    within(bed, "rang", notes[2].0.since(notes[1].0), millis(20));
}

/// A peer that does not read what is queued for it: at the end of the close timeout it is reset.
pub fn close_that_cannot_be_finished_is_a_reset(bed: &Bed) {
    let worker = WorkerConfig { close_timeout: millis(150), ..config() };
    let server = bed.serve(Plan { config: worker, ..Plan::listen([Listen::narrow()]) }, |script| {
        script.accepted(|conn| {
            conn.send(pattern(1, 1 << 20)).expect("room");
            conn.close();
        })
    });
    let (peer, serial) = {
        let serial = server.log().begun();
        let peer = bed.connect_narrow(server.addr());
        peer.set_reading(false);
        bed.until("it to be accepted", || server.log().begun() > serial);
        (peer, serial)
    };
    within(bed, "reset", lifetime(&server, serial, CloseReason::CloseTimeout), millis(150));
    peer.set_reading(true);
    peer.expect_reset();
    server.empties();
}

/// A peer that takes everything and does not finish: it is let go of, without a reset.
pub fn peer_that_never_finishes_is_let_go_of(bed: &Bed) {
    let worker = WorkerConfig { close_timeout: millis(100), ..config() };
    let server = bed.serve(Plan::config(worker), |script| {
        script.accepted(|conn| {
            conn.send("the end").expect("room");
            conn.close();
        })
    });
    let (peer, serial) = server.join();
    peer.expect(b"the end");
    peer.expect_eof();
    within(bed, "closed", lifetime(&server, serial, CloseReason::Local), millis(100));
    server.empties();
}
