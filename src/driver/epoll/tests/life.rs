//! Connections, listeners and the driver, from their making to their end.

use super::listeners::ACCEPTS;
use super::*;

#[test]
fn data_goes_both_ways_and_the_end_is_told() {
    let mut driver = driver(&config());
    let (key, mut stream) = pair(&mut driver, 7);
    driver.recv(key);
    stream.write_all(b"hello").expect("write");
    let (buf, armed) = received(&mut driver, key);
    assert_eq!((&buf[..], armed), (&b"hello"[..], true));
    // The lease itself goes back, with other payloads around it, in one send.
    let mut reply = chain(&driver, &[b"<"]);
    driver.memory().chunks.push(&mut reply, Payload::from(buf));
    driver.memory().chunks.push(&mut reply, Payload::from(&b">"[..]));
    driver.send(key, reply);
    assert_eq!(sent(&mut driver, key).expect("sent"), 7);
    let mut room = [0; 7];
    stream.read_exact(&mut room).expect("the reply");
    assert_eq!(&room, b"<hello>");
    // Half-closed by the peer: sending goes on.
    stream.shutdown(std::net::Shutdown::Write).expect("FIN");
    assert!(matches!(recv_ended(&mut driver, key), RecvEnd::Eof));
    let answer = chain(&driver, &[b"answer"]);
    driver.send(key, answer);
    assert_eq!(sent(&mut driver, key).expect("sent"), 6);
    driver.shutdown_write(key);
    let mut rest = String::new();
    stream.read_to_string(&mut rest).expect("the answer, then FIN");
    assert_eq!(rest, "answer");
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    assert_eq!(driver.in_flight(), 0);
    quiet(&mut driver);
    end(driver);
}

#[test]
fn closing_with_everything_in_flight_reports_closed_once_and_nothing_else() {
    for how in [CloseHow::Fin, CloseHow::Reset] {
        let mut driver = driver(&config());
        for generation in 0..20 {
            let (key, mut stream) = pair(&mut driver, generation);
            driver.recv(key);
            let stuck = chain(&driver, &[&vec![1; 8 << 20]]);
            driver.send(key, stuck);
            quiet(&mut driver);
            assert_eq!(driver.in_flight(), 2);
            stream.write_all(&[2; 10_000]).expect("write");
            if generation % 2 == 0 {
                // With events of it that nobody has taken.
                driver.cancel_send(key);
                driver.submit_and_wait(Some(Duration::ZERO)).expect("a wait");
                assert!(driver.has_events());
            }
            driver.close(key, how);
            driver.close(key, how);
            driver.recv(key);
            assert!(driver.next_event().is_none(), "inside the call");
            closed(&mut driver, key);
            assert_eq!((driver.in_flight(), driver.memory().chunks.used()), (0, 0));
            // What its name is used for now concerns nobody.
            driver.cancel_recv(key);
            driver.cancel_send(key);
            driver.shutdown_write(key);
            driver.close(key, how);
            let late = chain(&driver, &[b"late"]);
            driver.send(key, late);
            assert_eq!((driver.in_flight(), driver.memory().chunks.used()), (0, 0));
            // Unread data, so that the peer sees a reset either way.
            let end = stream.read_to_end(&mut Vec::new()).expect_err("reset");
            assert_eq!(end.kind(), ErrorKind::ConnectionReset);
        }
        quiet(&mut driver);
        end(driver);
    }
}

#[test]
fn a_close_delivers_what_was_taken_and_a_reset_resets() {
    let mut driver = driver(&config());
    for how in [CloseHow::Fin, CloseHow::Reset] {
        let (key, mut stream) = pair(&mut driver, 0);
        let bytes = chain(&driver, &[b"bytes"]);
        driver.send(key, bytes);
        assert_eq!(sent(&mut driver, key).expect("sent"), 5);
        let mut room = [0; 5];
        stream.read_exact(&mut room).expect("the bytes");
        driver.close(key, how);
        closed(&mut driver, key);
        match (how, stream.read(&mut [0])) {
            (CloseHow::Fin, Ok(0)) => {}
            (CloseHow::Reset, Err(error)) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
            (how, end) => panic!("{how:?}: {end:?}"),
        }
    }
    end(driver);
}

/// A descriptor that a child of this process still holds goes on being watched under its old name.
#[test]
fn late_readiness_never_reaches_the_slots_next_connection() {
    let mut driver = driver(&config());
    let (first, mut stream) = pair(&mut driver, 1);
    driver.recv(first);
    let held = driver.slots.get(first).and_then(|slot| slot.fd()).expect("open").as_raw_fd();
    let held = sys::duplicate(held).expect("another descriptor");
    driver.close(first, CloseHow::Fin);
    closed(&mut driver, first);
    let (second, mut other) = pair(&mut driver, 2);
    driver.recv(second);
    quiet(&mut driver);
    let before = driver.counters.stale.get();
    stream.write_all(b"for nobody").expect("write");
    let until = Instant::now() + PATIENCE;
    while driver.counters.stale.get() == before {
        assert!(Instant::now() < until, "no late readiness");
        driver.submit_and_wait(Some(Duration::from_millis(1))).expect("a wait");
        assert!(driver.next_event().is_none(), "it reached somebody");
    }
    other.write_all(b"for the second").expect("write");
    assert_eq!(&received(&mut driver, second).0[..], b"for the second");
    drop(held);
    driver.close(second, CloseHow::Fin);
    closed(&mut driver, second);
    end(driver);
}

/// The number of a closed descriptor is the next one's; what was noted for the first must not reach it.
#[test]
fn what_was_started_on_a_connection_never_reaches_the_slots_next_one() {
    let mut driver = driver(&config());
    let (listener, addr) = listen(&mut driver);
    for round in 0..200 {
        let (first, second) = (client(addr), client(addr));
        let socket = accept(&mut driver, listener);
        let (old, new) = (key(0, 2 * round), key(0, 2 * round + 1));
        driver.adopt(old, socket);
        driver.recv(old);
        let bytes = chain(&driver, &[b"for the first"]);
        driver.send(old, bytes);
        driver.cancel_recv(old);
        driver.close(old, CloseHow::Fin);
        driver.accept(listener, AcceptMode::Once);
        closed(&mut driver, old);
        match next(&mut driver) {
            Event::Accepted { socket, .. } => driver.adopt(new, socket),
            other => panic!("{other:?}"),
        }
        quiet_once(&mut driver);
        let bytes = chain(&driver, &[b"for the second"]);
        driver.send(new, bytes);
        assert_eq!(sent(&mut driver, new).expect("not the old one's end"), 14);
        driver.close(new, CloseHow::Fin);
        closed(&mut driver, new);
        drop((first, second));
    }
    end(driver);
}

fn quiet_once(driver: &mut EpollDriver) {
    driver.submit_and_wait(Some(Duration::ZERO)).expect("a wait");
    let event = driver.next_event();
    assert!(event.is_none(), "{event:?}");
}

/// Nothing is closed, everything is in flight, and the driver goes.
#[test]
fn a_driver_that_ends_closes_everything_and_gives_everything_back() {
    for dropped in [false, true] {
        let mut driver = driver(&config());
        let (listener, addr) = listen(&mut driver);
        for _ in 0..8 {
            driver.accept(listener, AcceptMode::Once);
        }
        let (other, _) = listen(&mut driver);
        driver.accept(other, AcceptMode::Multishot);
        let mut streams: Vec<_> = (0..5).map(|_| client(addr)).collect();
        let mut slot = 0;
        while slot < 5 {
            if let Event::Accepted { socket, .. } = next(&mut driver) {
                // The last one is neither adopted nor discarded.
                if slot < 4 {
                    driver.adopt(key(slot, 3), socket);
                }
                slot += 1;
            }
        }
        for slot in 0..4 {
            driver.recv(key(slot, 3));
            let stuck = chain(&driver, &[b"x", &vec![1; 8 << 20]]);
            driver.send(key(slot, 3), stuck);
        }
        quiet(&mut driver);
        assert_eq!(driver.in_flight(), 4 * 2 + 3 + 1);
        streams[0].write_all(b"unheard").expect("write");
        driver.cancel_send(key(1, 3));
        driver.submit_and_wait(Some(Duration::ZERO)).expect("a wait");
        driver.connect(key(4, 3), &ConnectConfig::new(addr)).expect("begun");
        let memory = driver.memory().clone();
        if dropped {
            drop(driver);
        } else {
            assert_eq!(driver.finish(PATIENCE), 0);
        }
        assert_eq!((memory.pool.leased(), memory.chunks.used()), (0, 0));
        let loose = streams.pop().expect("five");
        for stream in &mut streams {
            let end = stream.read_to_end(&mut Vec::new()).expect_err("reset");
            assert_eq!(end.kind(), ErrorKind::ConnectionReset);
        }
        assert_eq!((&loose).read(&mut [0]).expect("closed"), 0);
        assert!(TcpStream::connect(addr).is_err(), "the listener lives on");
    }
}

#[test]
fn a_lease_outlives_its_driver() {
    let mut driver = driver(&config());
    let (key, mut stream) = pair(&mut driver, 0);
    driver.recv(key);
    stream.write_all(b"kept").expect("write");
    let (buf, _) = received(&mut driver, key);
    let pool = driver.memory().pool.clone();
    assert_eq!(driver.finish(PATIENCE), 0);
    assert_eq!((&buf[..], pool.leased()), (&b"kept"[..], 1));
    drop(buf);
    assert_eq!(pool.leased(), 0);
}

#[test]
fn accepts_tell_the_peer_and_end_when_cancelled() {
    let mut driver = driver(&WorkerConfig { peer_addresses: true, ..config() });
    assert_eq!(driver.multishot(), Multishot::WithPeer);
    let (listener, addr) = listen(&mut driver);
    for mode in [AcceptMode::Once, AcceptMode::Multishot] {
        driver.accept(listener, mode);
        let mut stream = client(addr);
        match next(&mut driver) {
            Event::Accepted { listener: of, socket, peer, mode: how, armed } => {
                assert_eq!((of, how, armed), (listener, mode, mode == AcceptMode::Multishot));
                assert_eq!(peer, Some(stream.local_addr().expect("its address")));
                driver.discard(socket);
            }
            other => panic!("{other:?}"),
        }
        quiet(&mut driver);
        assert_eq!(stream.read(&mut [0]).expect("a discarded socket is closed"), 0);
    }
    for _ in 0..3 {
        driver.accept(listener, AcceptMode::Once);
    }
    quiet(&mut driver);
    driver.cancel_accept(listener);
    let mut multishot = 0;
    for _ in 0..4 {
        match next(&mut driver) {
            Event::AcceptFailed { mode, error, .. } => {
                assert_eq!(error.raw_os_error(), Some(libc::ECANCELED));
                multishot += u32::from(mode == AcceptMode::Multishot);
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((multishot, driver.in_flight()), (1, 0));
    driver.remove_listener(listener);
    assert!(TcpStream::connect(addr).is_err(), "the listener is closed");
    // What cannot be armed is told as an event too.
    driver.accept(listener, AcceptMode::Once);
    assert!(matches!(next(&mut driver), Event::AcceptFailed { .. }));
    quiet(&mut driver);
    end(driver);
}

#[test]
fn a_single_accept_takes_one_and_a_multishot_a_bounded_number_between_two_waits() {
    let mut driver = driver(&config());
    let (listener, addr) = listen(&mut driver);
    let clients: Vec<_> = (0..100).map(|_| client(addr)).collect();
    // Nobody accepts: their arrival was one edge, and is no reason to wake up again.
    quiet(&mut driver);
    driver.accept(listener, AcceptMode::Once);
    driver.accept(listener, AcceptMode::Once);
    for _ in 0..2 {
        match next(&mut driver) {
            Event::Accepted { socket, peer, armed, .. } => {
                assert_eq!((peer, armed), (None, false), "nobody asked for the peer");
                driver.discard(socket);
            }
            other => panic!("{other:?}"),
        }
    }
    quiet(&mut driver);
    driver.accept(listener, AcceptMode::Multishot);
    let mut portions = Vec::new();
    while portions.iter().sum::<u32>() < 98 {
        driver.submit_and_wait(Some(PATIENCE)).expect("a wait");
        let mut portion = 0;
        while let Some(event) = driver.next_event() {
            match event {
                Event::Accepted { socket, .. } => driver.discard(socket),
                other => panic!("{other:?}"),
            }
            portion += 1;
        }
        portions.push(portion);
    }
    assert_eq!(portions, [ACCEPTS, 98 - ACCEPTS]);
    driver.cancel_accept(listener);
    assert!(matches!(next(&mut driver), Event::AcceptFailed { .. }));
    drop(clients);
    end(driver);
}

/// Two drivers, one listening socket: whoever does not accept leaves everything to the other, at once.
#[test]
fn a_shared_listener_is_served_by_whoever_accepts_and_outlives_one_of_them() {
    let (mut one, mut two) = (driver(&config()), driver(&config()));
    let listener = TcpListener::bind("127.0.0.1:0").expect("a listener");
    let addr = listener.local_addr().expect("its address");
    let twin = listener.try_clone().expect("another descriptor");
    let first = one.add_listener(listener).expect("a driver that takes it");
    let second = two.add_listener(twin).expect("a driver that takes it");
    for mode in [AcceptMode::Once, AcceptMode::Multishot] {
        // The first has one operation for two connections; the second is woken for both.
        one.accept(first, AcceptMode::Once);
        two.accept(second, mode);
        two.accept(second, AcceptMode::Once);
        quiet(&mut one);
        quiet(&mut two);
        let clients = [client(addr), client(addr)];
        for driver in [&mut one, &mut two] {
            match next(driver) {
                Event::Accepted { socket, .. } => driver.discard(socket),
                other => panic!("{other:?}"),
            }
        }
        two.cancel_accept(second);
        while two.in_flight() > 0 || two.has_events() || !two.started.is_empty() {
            if let Event::Accepted { .. } = next(&mut two) {
                panic!("a third connection");
            }
        }
        drop(clients);
    }
    one.remove_listener(first);
    let stale = one.counters.stale.get();
    let waiting = client(addr);
    quiet(&mut one);
    assert_eq!(one.counters.stale.get(), stale, "it is still told of a listener that it has given up");
    let socket = accept(&mut two, second);
    two.discard(socket);
    drop(waiting);
    end(one);
    end(two);
}

#[test]
fn a_connect_is_told_when_it_is_made_and_when_it_is_refused() {
    let mut driver = driver(&config());
    let (listener, addr) = listen(&mut driver);
    for generation in 0..20 {
        driver.connect(key(3, generation), &ConnectConfig::new(addr)).expect("begun");
        assert!(driver.next_event().is_none(), "inside the call");
        assert_eq!(driver.in_flight(), 1);
        assert!(matches!(next(&mut driver), Event::Connected { result: Ok(()), .. }));
        let socket = accept(&mut driver, listener);
        driver.adopt(key(4, generation), socket);
        driver.recv(key(4, generation));
        let bytes = chain(&driver, &[b"over there"]);
        driver.send(key(3, generation), bytes);
        assert_eq!(sent(&mut driver, key(3, generation)).expect("sent"), 10);
        assert_eq!(&received(&mut driver, key(4, generation)).0[..], b"over there");
        for slot in [3, 4] {
            driver.close(key(slot, generation), CloseHow::Fin);
            closed(&mut driver, key(slot, generation));
        }
    }
    driver.remove_listener(listener);
    for generation in 20..40 {
        driver.connect(key(3, generation), &ConnectConfig::new(addr)).expect("begun");
        match next(&mut driver) {
            Event::Connected { result, .. } => {
                let error = result.expect_err("nobody listens");
                assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
            }
            other => panic!("{other:?}"),
        }
        driver.close(key(3, generation), CloseHow::Fin);
        closed(&mut driver, key(3, generation));
    }
    // Closed before it is known how it ended: that is not told.
    driver.connect(key(3, 99), &ConnectConfig::new(addr)).expect("begun");
    driver.close(key(3, 99), CloseHow::Reset);
    closed(&mut driver, key(3, 99));
    quiet(&mut driver);
    end(driver);
}

#[test]
fn what_cannot_be_connected_at_all_is_told_as_an_event() {
    let mut driver = driver(&config());
    // A broadcast address: refused by the call itself.
    let target = "255.255.255.255:9".parse().expect("an address");
    driver.connect(key(0, 0), &ConnectConfig::new(target)).expect("begun");
    match next(&mut driver) {
        Event::Connected { result, .. } => assert!(result.is_err()),
        other => panic!("{other:?}"),
    }
    driver.close(key(0, 0), CloseHow::Fin);
    closed(&mut driver, key(0, 0));
    end(driver);
}

/// As beyond `fs.epoll.max_user_watches`: nothing would ever tell of the connection.
#[test]
fn a_connection_that_cannot_be_watched_fails_with_whatever_is_begun() {
    let mut driver = driver(&config());
    let (listener, addr) = listen(&mut driver);
    let stream = client(addr);
    let socket = accept(&mut driver, listener);
    // Watched already, so that watching it is refused.
    let fd = driver.listeners.take(&socket).expect("accepted");
    driver.epoll.add(fd.as_fd(), 0, Source::Wake.encode()).expect("watched");
    let socket = driver.listeners.keep(fd);
    driver.adopt(key(0, 0), socket);
    let bytes = chain(&driver, &[b"bytes"]);
    driver.send(key(0, 0), bytes);
    driver.recv(key(0, 0));
    assert_eq!(sent(&mut driver, key(0, 0)).expect_err("refused").raw_os_error(), Some(libc::EEXIST));
    match recv_ended(&mut driver, key(0, 0)) {
        RecvEnd::Failed(error) => assert_eq!(error.raw_os_error(), Some(libc::EEXIST)),
        other => panic!("{other:?}"),
    }
    driver.close(key(0, 0), CloseHow::Fin);
    closed(&mut driver, key(0, 0));
    drop(stream);
    end(driver);
}
