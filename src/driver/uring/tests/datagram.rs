//! Datagram sockets, as all drivers have them.

use super::*;
use crate::driver::tests::datagram::{self as scenarios, Bed};
use crate::driver::{Address, DATAGRAM_SENDS};

fn bed(kernel: (&str, Descriptors, UringFeatures)) -> Option<Bed<UringDriver>> {
    driver(&WorkerConfig { buffers: scenarios::buffers(), ..super::kernel(kernel) }).map(Bed::new)
}

fn run(scenario: impl Fn(&mut Bed<UringDriver>)) {
    for kernel in KERNELS {
        let Some(mut bed) = bed(kernel) else { return };
        scenario(&mut bed);
        bed.end();
    }
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
    for kernel in KERNELS {
        let Some(bed) = bed(kernel) else { return };
        scenarios::end_in_flight(bed);
    }
}

/// All of a turn go to the kernel together, and their objects are used again.
#[test]
fn the_sends_of_a_turn_cost_one_enter_and_no_new_objects() {
    for kernel in KERNELS {
        let Some(mut driver) = driver(&super::kernel(kernel)) else { return };
        let peer = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let to = Address::Inet(peer.local_addr().expect("its address"));
        let config = DatagramConfig {
            local: Some(Address::Inet(SocketAddr::from(([127, 0, 0, 1], 0)))),
            peer: None,
            reuse_port: false,
            broadcast: false,
            gro: false,
            recv_buffer: None,
            send_buffer: None,
        };
        driver.open_datagram(key(0, 0), &config).expect("a socket");
        for round in 0..3 {
            let enters = driver.counters.enters.get();
            for token in 0..DATAGRAM_SENDS {
                let datagram = Datagram { payload: "some".into(), to: Some(to.clone()), segment: None };
                driver.send_datagram(key(0, 0), token, datagram);
            }
            assert_eq!(driver.in_flight(), DATAGRAM_SENDS as usize);
            for wanted in 0..DATAGRAM_SENDS {
                match next(&mut driver) {
                    Event::DatagramSent { token, result: Ok(4), .. } => assert_eq!(token, wanted),
                    other => panic!("{other:?}"),
                }
            }
            assert_eq!(driver.counters.enters.get() - enters, 1, "round {round}");
            assert_eq!((driver.datagrams.objects(), driver.in_flight()), (DATAGRAM_SENDS as usize, 0));
        }
        driver.close(key(0, 0), CloseHow::Fin);
        closed(&mut driver, key(0, 0));
        end(driver);
    }
}
