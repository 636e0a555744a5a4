//! Connections and the driver, from their making to their end.

use super::*;

#[test]
fn data_goes_both_ways_and_the_end_is_told() {
    for mut driver in both() {
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
        match next(&mut driver) {
            Event::Sent { key: of, chain, result } => {
                assert_eq!((of, result.expect("sent"), chain.bytes()), (key, 7, 7));
                driver.memory().chunks.clear(chain);
            }
            other => panic!("{other:?}"),
        }
        let mut room = [0; 7];
        stream.read_exact(&mut room).expect("the reply");
        assert_eq!(&room, b"<hello>");
        drop(stream);
        assert!(matches!(recv_ended(&mut driver, key), RecvEnd::Eof));
        driver.close(key, CloseHow::Fin);
        closed(&mut driver, key);
        assert_eq!(driver.in_flight(), 0);
        quiet(&mut driver);
        end(driver);
    }
}

#[test]
fn closing_with_everything_in_flight_reports_closed_once_and_nothing_else() {
    for how in [CloseHow::Fin, CloseHow::Reset] {
        let mut driver = driver(&config());
        for generation in 0..10 {
            let (key, mut stream) = pair(&mut driver, generation);
            driver.recv(key);
            let stuck = chain(&driver, &[&vec![1; 8 << 20]]);
            driver.send(key, stuck);
            quiet(&mut driver);
            assert_eq!(driver.in_flight(), 2);
            stream.write_all(&[2; 10_000]).expect("write");
            driver.close(key, how);
            driver.close(key, how);
            driver.recv(key);
            // Not before the packets were taken, cancelled or not (promise 3).
            assert_eq!(driver.in_flight(), 2);
            assert!(driver.next_event().is_none());
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
            sees_reset(&mut stream);
        }
        quiet(&mut driver);
        end(driver);
    }
}

/// What was done without a packet and is not reported yet goes with the connection.
#[test]
fn closing_with_everything_done_but_not_reported_leaves_nothing_behind() {
    let mut driver = driver(&config());
    for generation in 0..10 {
        let (key, mut stream) = pair(&mut driver, generation);
        stream.write_all(b"unheard").expect("write");
        driver.recv(key);
        let small = chain(&driver, &[b"x"]);
        driver.send(key, small);
        driver.close(key, CloseHow::Reset);
        closed(&mut driver, key);
        assert_eq!((driver.in_flight(), driver.memory().chunks.used()), (0, 0));
    }
    // The notes of the old connections must not mean the new one.
    let (key, _stream) = pair(&mut driver, 10);
    driver.recv(key);
    quiet(&mut driver);
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    end(driver);
}

#[test]
fn a_shutdown_ends_this_side_only() {
    let mut driver = driver(&config());
    let (key, mut stream) = pair(&mut driver, 0);
    let bytes = chain(&driver, &[b"the last"]);
    driver.send(key, bytes);
    assert_eq!(sent(&mut driver, key).expect("sent"), 8);
    driver.shutdown_write(key);
    let mut got = Vec::new();
    stream.read_to_end(&mut got).expect("to the end");
    assert_eq!(got, b"the last");
    driver.recv(key);
    stream.write_all(b"answer").expect("write");
    assert_eq!(&received(&mut driver, key).0[..], b"answer");
    drop(stream);
    assert!(matches!(recv_ended(&mut driver, key), RecvEnd::Eof));
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    end(driver);
}

#[test]
fn a_connection_is_made_refused_and_given_up() {
    for mut driver in both() {
        let (listener, addr) = listen(&mut driver);
        driver.accept(listener, AcceptMode::Once);
        let out = key(1, 0);
        driver.connect(out, &ConnectConfig::new(addr)).expect("begun");
        let mut accepted = None;
        let mut connected = false;
        while accepted.is_none() || !connected {
            match next(&mut driver) {
                Event::Accepted { socket, .. } => accepted = Some(socket),
                Event::Connected { key, result } => {
                    assert_eq!(key, out);
                    result.expect("connected");
                    connected = true;
                }
                other => panic!("{other:?}"),
            }
        }
        let inner = key(0, 0);
        driver.adopt(inner, accepted.expect("accepted"));
        driver.recv(inner);
        let bytes = chain(&driver, &[b"through ", b"both"]);
        driver.send(out, bytes);
        let (mut heard, mut told) = (0, false);
        while heard < 12 || !told {
            match next(&mut driver) {
                Event::Received { key, buf, .. } if key == inner => heard += buf.len(),
                Event::Sent { key, chain, result } if key == out => {
                    assert_eq!(result.expect("sent"), 12);
                    driver.memory().chunks.clear(chain);
                    told = true;
                }
                other => panic!("{other:?}"),
            }
        }
        // With its name known on both sides: a half-made connection could not be shut down.
        driver.shutdown_write(out);
        assert!(matches!(recv_ended(&mut driver, inner), RecvEnd::Eof));
        driver.close(inner, CloseHow::Fin);
        closed(&mut driver, inner);
        driver.close(out, CloseHow::Fin);
        closed(&mut driver, out);

        // A port where nobody listens.
        driver.remove_listener(listener);
        let refused = key(1, 1);
        driver.connect(refused, &ConnectConfig::new(addr)).expect("begun");
        match next(&mut driver) {
            Event::Connected { key, result } => {
                assert_eq!(key, refused);
                assert_eq!(result.expect_err("refused").kind(), ErrorKind::ConnectionRefused);
            }
            other => panic!("{other:?}"),
        }
        driver.close(refused, CloseHow::Fin);
        closed(&mut driver, refused);

        // One that is closed before it came to anything.
        let given_up = key(1, 2);
        driver.connect(given_up, &ConnectConfig::new(addr)).expect("begun");
        driver.close(given_up, CloseHow::Reset);
        closed(&mut driver, given_up);

        // One that cannot be bound: nothing follows.
        let mut config = ConnectConfig::new(addr);
        config.source = Some("192.0.2.1:0".parse().expect("an address"));
        driver.connect(key(1, 3), &config).expect_err("not an address of this machine");
        quiet(&mut driver);
        end(driver);
    }
}

/// Nothing is closed, everything is in flight, and the driver goes.
#[test]
fn a_driver_that_ends_gets_everything_back_first() {
    for dropped in [false, true] {
        let mut driver = driver(&config());
        let (listener, addr) = listen(&mut driver);
        for _ in 0..8 {
            driver.accept(listener, AcceptMode::Once);
        }
        let mut streams: Vec<_> = (0..4).map(|_| client(addr)).collect();
        let mut slot = 0;
        while slot < 4 {
            if let Event::Accepted { socket, .. } = next(&mut driver) {
                driver.adopt(key(slot, 3), socket);
                slot += 1;
            }
        }
        for slot in 0..4 {
            driver.recv(key(slot, 3));
            let stuck = chain(&driver, &[b"x", &vec![1; 8 << 20]]);
            driver.send(key(slot, 3), stuck);
        }
        quiet(&mut driver);
        assert_eq!(driver.in_flight(), 4 * 2 + 4);
        // One that has just heard something, and one that is being made.
        streams[0].write_all(b"unheard").expect("write");
        driver.shutdown_write(key(1, 3));
        driver.connect(key(4, 3), &ConnectConfig::new(addr)).expect("begun");
        let memory = driver.memory().clone();
        if dropped {
            drop(driver);
        } else {
            assert_eq!(driver.finish(PATIENCE), 0);
        }
        assert_eq!((memory.pool.leased(), memory.chunks.used()), (0, 0));
        for stream in &mut streams {
            sees_reset(stream);
        }
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

/// Promise 2 to the end: without patience the memory is leaked rather than freed, and the number is told.
#[test]
fn what_the_kernel_does_not_give_back_in_time_is_leaked_and_counted() {
    let mut driver = driver(&config());
    let (key, mut stream) = pair(&mut driver, 0);
    let (listener, _) = listen(&mut driver);
    driver.accept(listener, AcceptMode::Once);
    driver.accept(listener, AcceptMode::Once);
    driver.recv(key);
    let stuck = chain(&driver, &[&vec![1; 8 << 20]]);
    driver.send(key, stuck);
    quiet(&mut driver);
    let memory = driver.memory().clone();
    assert_eq!(driver.finish(Duration::ZERO), 4);
    assert_eq!(memory.chunks.used(), 1, "what the kernel may still read was freed");
    // The connection is closed all the same, and its packets harm nobody.
    sees_reset(&mut stream);
}
