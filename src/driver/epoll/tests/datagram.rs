//! Datagram sockets, as all drivers have them.

use super::*;
use crate::driver::tests::datagram::{self as scenarios, Bed};

fn bed() -> Bed<EpollDriver> {
    Bed::new(driver(&WorkerConfig { buffers: scenarios::buffers(), ..config() }))
}

fn run(scenario: impl Fn(&mut Bed<EpollDriver>)) {
    let mut bed = bed();
    scenario(&mut bed);
    bed.end();
}

#[test]
fn what_arrives_is_told_with_its_sender_and_can_be_sent_back() {
    run(scenarios::echo);
    run(scenarios::two_sockets);
}

#[test]
fn unix_senders_are_told_by_path_and_name() {
    run(scenarios::unix_names);
}

#[test]
fn datagrams_of_no_bytes_are_datagrams() {
    run(scenarios::empty);
}

#[test]
fn what_does_not_fit_is_cut_and_said_to_be() {
    run(scenarios::truncated);
}

#[test]
fn a_refused_datagram_is_told_and_ends_nothing() {
    run(scenarios::refused);
}

#[test]
fn all_sends_of_a_turn_are_told_and_one_that_fails_stops_none() {
    run(scenarios::many_sends);
}

#[test]
fn more_than_a_turn_takes_arrives_in_order() {
    run(scenarios::many_received);
}

#[test]
fn receiving_without_a_buffer_ends_and_goes_on_with_one() {
    run(scenarios::no_buffer);
}

#[test]
fn a_cancelled_receive_loses_nothing() {
    run(scenarios::cancelled);
}

#[test]
fn the_kernel_cuts_and_joins() {
    run(scenarios::segments);
}

#[test]
fn a_slow_unix_receiver_gets_everything_in_order() {
    run(scenarios::slow_receiver);
    run(scenarios::busy_receiver);
}

#[test]
fn a_queue_that_others_filled_is_waited_for() {
    run(scenarios::crowded_receiver);
}

#[test]
fn closing_with_everything_in_flight_gives_everything_back() {
    run(scenarios::close_in_flight);
    scenarios::end_in_flight(bed());
}
