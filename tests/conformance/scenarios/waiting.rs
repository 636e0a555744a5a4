//! How a worker waits when there is nothing to do.

use std::time::Duration;

use corelane::{WaitPolicy, WorkerConfig};

use crate::bed::{Bed, Peer, Plan, config};
use crate::bytes::pattern;
use crate::script::{Script, Step, millis};

/// What follows alternates between one peer that waits for every answer, and many at once.
fn answers_everybody(bed: &Bed, wait: WaitPolicy) {
    let server = bed.serve(Plan::config(WorkerConfig { wait, ..config() }), Script::echo);
    let peers: Vec<Peer> = (0..8).map(|_| bed.connect(server.addr())).collect();
    for round in 0..bed.rounds(200, 40) {
        let bytes = pattern(round as u64, bed.random(1, 3000));
        if round % 3 > 0 {
            peers[round % 8].exchange(&bytes);
            continue;
        }
        peers.iter().for_each(|peer| peer.send(&bytes));
        peers.iter().for_each(|peer| peer.expect(&bytes));
    }
    assert_eq!(server.metrics().connections, 8);
}

pub fn worker_that_spins_answers_everybody(bed: &Bed) {
    answers_everybody(bed, WaitPolicy::Spin { max: Duration::from_micros(50) });
}

pub fn worker_that_coalesces_answers_everybody(bed: &Bed) {
    answers_everybody(bed, WaitPolicy::Coalesce { max_delay: millis(1), batch: 8 });
}

pub fn worker_that_adapts_answers_everybody(bed: &Bed) {
    answers_everybody(bed, WaitPolicy::Adaptive { budget: Duration::from_micros(300) });
}

/// The longest delay, and a batch that is never full.
pub fn coalescing_delays_no_timer(bed: &Bed) {
    let wait = WaitPolicy::Coalesce { max_delay: WaitPolicy::LONGEST_DELAY, batch: 1000 };
    let server = bed.serve(Plan::config(WorkerConfig { wait, ..config() }), |script| {
        script.data(|conn, _| conn.set_timer(Some(millis(5))))
    });
    let (peer, serial) = server.join();
    let (other, _) = server.join();
    peer.send(b"!");
    bed.until("the message", || server.log().has(serial, Step::Data(1)));
    // Waits to be gathered meanwhile.
    other.send(b"x");
    bed.until("the timer", || server.log().has(serial, Step::Timer));
    let (heard, rung) = server.log().life(serial, |life| {
        (life.when(Step::Data(1)).expect("heard"), life.when(Step::Timer).expect("rung"))
    });
    let took = rung.since(heard);
    assert!(took >= millis(5), "{took:?}");
    assert!(bed.slack().is_none_or(|slack| took <= millis(5) + slack), "{took:?}");
}
