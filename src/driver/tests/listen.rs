//! Listeners made at run time.

use super::*;

on_every_driver!(
    listeners_come_and_go_under_one_number,
    a_number_is_not_given_to_another_before_its_last_event_was_taken,
    an_address_in_use_is_an_error_and_leaves_nothing,
    several_listeners_at_once_have_numbers_of_their_own,
    options_of_the_listener_are_those_of_its_connections,
);

/// Bound and dropped again and again, with accepts of every kind ended in every way: one number serves all, and
/// what is reported is always of the present one.
fn listeners_come_and_go_under_one_number<D: Driver>(mut driver: D) {
    let multishot = driver.multishot() != Multishot::Absent;
    let mut numbers = Vec::new();
    for round in 0..300 {
        let (id, addr) = listen_tcp(&mut driver, any_port()).expect("listens");
        numbers.push(id);
        let mode = if multishot && round % 2 == 0 { AcceptMode::Multishot } else { AcceptMode::Once };
        driver.accept(id, mode);
        driver.accept(id, AcceptMode::Once);
        let mut streams = Vec::new();
        for _ in 0..round % 3 {
            let stream = client(addr);
            match next(&mut driver) {
                Event::Accepted { listener, socket, armed, .. } => {
                    assert_eq!(listener, id);
                    driver.discard(socket);
                    if !armed {
                        driver.accept(id, AcceptMode::Once);
                    }
                }
                other => panic!("{other:?}"),
            }
            streams.push(stream);
        }
        driver.cancel_accept(id);
        while driver.in_flight() > 0 || driver.has_events() {
            driver.submit_and_wait(Some(Duration::from_secs(1))).expect("a wait");
            while let Some(event) = driver.next_event() {
                assert!(matches!(event, Event::AcceptFailed { listener, .. } if listener == id), "{event:?}");
            }
        }
        // Carried out by the next wait where that takes one.
        driver.submit_and_wait(Some(Duration::ZERO)).expect("a wait");
        while let Some(event) = driver.next_event() {
            assert!(matches!(event, Event::AcceptFailed { listener, .. } if listener == id), "{event:?}");
        }
        driver.remove_listener(id);
        // Not every time: Windows takes two seconds to be refused.
        if round % 100 == 0 {
            assert!(TcpStream::connect(addr).is_err(), "round {round}: it listens still");
        }
    }
    assert!(numbers.iter().all(|&number| number == numbers[0]), "{numbers:?}");
    quiet(&mut driver);
    end(driver);
}

fn a_number_is_not_given_to_another_before_its_last_event_was_taken<D: Driver>(mut driver: D) {
    let (first, _) = listen_tcp(&mut driver, any_port()).expect("listens");
    driver.accept(first, AcceptMode::Once);
    quiet(&mut driver);
    driver.cancel_accept(first);
    // Too early: the cancel's event was not taken.
    driver.remove_listener(first);
    let (second, addr) = listen_tcp(&mut driver, any_port()).expect("listens");
    assert_ne!(first, second);
    match next(&mut driver) {
        Event::AcceptFailed { listener, .. } => assert_eq!(listener, first),
        other => panic!("{other:?}"),
    }
    let (third, _) = listen_tcp(&mut driver, any_port()).expect("listens");
    assert_eq!(first, third);
    let stream = client(addr);
    let socket = accept(&mut driver, second);
    driver.discard(socket);
    driver.remove_listener(second);
    driver.remove_listener(third);
    drop(stream);
    quiet(&mut driver);
    end(driver);
}

fn an_address_in_use_is_an_error_and_leaves_nothing<D: Driver>(mut driver: D) {
    let one = ListenerConfig { sharing: Sharing::One, ..any_port() };
    let (id, addr) = listen_tcp(&mut driver, one.clone()).expect("listens");
    for sharing in [Sharing::One, Sharing::PerWorker] {
        let again = ListenerConfig { addr, sharing, ..one.clone() };
        let error = listen_tcp(&mut driver, again).expect_err("taken");
        let kinds = [ErrorKind::AddrInUse, ErrorKind::PermissionDenied];
        assert!(kinds.contains(&error.kind()), "{error}");
    }
    let elsewhere = ListenerConfig { addr: SocketAddr::from(([192, 0, 2, 77], 0)), ..one.clone() };
    let error = listen_tcp(&mut driver, elsewhere).expect_err("not an address of this machine");
    assert_eq!(error.kind(), ErrorKind::AddrNotAvailable);
    // A refusal takes no number.
    let (next_id, _) = listen_tcp(&mut driver, one.clone()).expect("listens");
    assert_eq!((id, next_id), (ListenerId(0), ListenerId(1)));
    driver.remove_listener(id);
    let (again, _) = listen_tcp(&mut driver, ListenerConfig { addr, ..one }).expect("free again");
    assert_eq!(again, id);
    end(driver);
}

fn several_listeners_at_once_have_numbers_of_their_own<D: Driver>(mut driver: D) {
    let mut open: Vec<_> = (0..40).map(|_| listen_tcp(&mut driver, any_port()).expect("listens")).collect();
    for index in (0..40).step_by(3).collect::<Vec<_>>() {
        driver.remove_listener(open[index].0);
        open[index] = listen_tcp(&mut driver, any_port()).expect("listens");
    }
    let mut numbers: Vec<u16> = open.iter().map(|(id, _)| id.0).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (0..40).collect::<Vec<u16>>());
    for (index, &(id, addr)) in open.iter().enumerate() {
        let stream = client(addr);
        let socket = accept(&mut driver, id);
        let key = key(index as u32, 1);
        driver.adopt(key, socket);
        let ends = driver.addresses(key).expect("both");
        assert_eq!(inet(&ends.local), addr);
        assert_eq!(inet(&ends.peer.expect("connected")), stream.local_addr().expect("its address"));
        close(&mut driver, key, CloseHow::Fin);
    }
    end(driver);
}

fn options_of_the_listener_are_those_of_its_connections<D: Look>(mut driver: D) {
    for nodelay in [false, true] {
        let options = SocketOptions { nodelay, recv_buffer: Some(40_000), ..SocketOptions::default() };
        let config = ListenerConfig { options, backlog: 7, ..any_port() };
        let listening = driver.listen(&ListenConfig::Tcp(config)).expect("listens");
        assert_eq!(listening.backlog, 7);
        let _stream = client(inet(&listening.local));
        let socket = accept(&mut driver, listening.id);
        driver.adopt(key(0, nodelay.into()), socket);
        let seen = driver.look(key(0, nodelay.into())).expect("an open socket");
        assert_eq!(seen.nodelay, nodelay);
        assert!(seen.recv_buffer >= 40_000, "{seen:?}");
        close(&mut driver, key(0, nodelay.into()), CloseHow::Fin);
        driver.remove_listener(listening.id);
    }
    end(driver);
}
