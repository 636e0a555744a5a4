//! Connections, listeners and the driver, from their making to their end.

use super::*;

#[test]
fn data_goes_both_ways_and_the_end_is_told() {
    for descriptors in BOTH {
        let Some(mut driver) = driver(&config(descriptors)) else { return };
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
    for descriptors in BOTH {
        for how in [CloseHow::Fin, CloseHow::Reset] {
            let Some(mut driver) = driver(&config(descriptors)) else { return };
            for generation in 0..20 {
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
}

/// In the descriptor table a shutdown is carried out by a thread of the kernel's, later. Closing must
/// wait for it, or it hits the connection that has the table's entry by then.
#[test]
fn a_shutdown_followed_by_a_close_never_reaches_the_next_connection() {
    for descriptors in BOTH {
        let Some(mut driver) = driver(&config(descriptors)) else { return };
        let (listener, addr) = listen(&mut driver);
        for round in 0..3000 {
            let first = client(addr);
            let second = client(addr);
            let socket = accept(&mut driver, listener);
            driver.adopt(key(0, round), socket);
            driver.shutdown_write(key(0, round));
            driver.close(key(0, round), CloseHow::Fin);
            driver.accept(listener, AcceptMode::Once);
            let (mut socket, mut is_closed) = (None, false);
            while socket.is_none() || !is_closed {
                match next(&mut driver) {
                    Event::Accepted { socket: accepted, .. } => socket = Some(accepted),
                    Event::Closed { .. } => is_closed = true,
                    other => panic!("{other:?}"),
                }
            }
            let next_key = key(1, round);
            driver.adopt(next_key, socket.expect("accepted"));
            let bytes = chain(&driver, &[b"for the second"]);
            driver.send(next_key, bytes);
            match next(&mut driver) {
                Event::Sent { chain, result, .. } => {
                    assert_eq!(result.expect("not shut down"), 14, "round {round}");
                    driver.memory().chunks.clear(chain);
                }
                other => panic!("{other:?}"),
            }
            driver.close(next_key, CloseHow::Fin);
            closed(&mut driver, next_key);
            drop((first, second));
        }
        end(driver);
    }
}

/// Nothing is closed, everything is in flight, and the driver goes.
#[test]
fn a_driver_that_ends_gets_everything_back_first() {
    for descriptors in BOTH {
        for dropped in [false, true] {
            let Some(mut driver) = driver(&config(descriptors)) else { return };
            let (listener, addr) = listen(&mut driver);
            for _ in 0..8 {
                driver.accept(listener, AcceptMode::Once);
            }
            let (other, _) = listen(&mut driver);
            driver.accept(other, AcceptMode::Multishot);
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
            assert_eq!(driver.in_flight(), 4 * 2 + 4 + 1);
            // One that is submitted by the ending itself, and one that is being refused.
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
                let end = stream.read_to_end(&mut Vec::new()).expect_err("reset");
                assert_eq!(end.kind(), ErrorKind::ConnectionReset);
            }
            assert!(TcpStream::connect(addr).is_err(), "the listener lives on");
        }
    }
}

#[test]
fn a_lease_outlives_its_driver() {
    let Some(mut driver) = driver(&config(Descriptors::Direct)) else { return };
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
fn single_accepts_tell_the_peer_and_end_when_cancelled() {
    for descriptors in BOTH {
        let config = WorkerConfig { peer_addresses: true, ..config(descriptors) };
        let Some(mut driver) = driver(&config) else { return };
        let (listener, addr) = listen(&mut driver);
        for mode in [AcceptMode::Once, AcceptMode::Multishot] {
            driver.accept(listener, mode);
            let stream = client(addr);
            match next(&mut driver) {
                Event::Accepted { listener: of, socket, peer, mode: how, armed } => {
                    assert_eq!((of, how, armed), (listener, mode, mode == AcceptMode::Multishot));
                    let known = mode == AcceptMode::Once || driver.multishot() == Multishot::WithPeer;
                    assert_eq!(peer, known.then(|| stream.local_addr().expect("its address")));
                    driver.discard(socket);
                }
                other => panic!("{other:?}"),
            }
            let (mut stream, mut room) = (stream, Vec::new());
            quiet(&mut driver);
            stream.read_to_end(&mut room).expect("a discarded socket is closed");
        }
        for _ in 0..3 {
            driver.accept(listener, AcceptMode::Once);
        }
        quiet(&mut driver);
        driver.cancel_accept(listener);
        let mut modes: Vec<_> = (0..4)
            .map(|_| match next(&mut driver) {
                Event::AcceptFailed { mode, error, .. } => {
                    assert_eq!(error.raw_os_error(), Some(libc::ECANCELED));
                    mode == AcceptMode::Multishot
                }
                other => panic!("{other:?}"),
            })
            .collect();
        modes.sort_unstable();
        assert_eq!(modes, [false, false, false, true]);
        driver.remove_listener(listener);
        assert!(TcpStream::connect(addr).is_err(), "the listener is closed");
        // What cannot be armed is told as an event too.
        driver.accept(listener, AcceptMode::Once);
        assert!(matches!(next(&mut driver), Event::AcceptFailed { .. }));
        end(driver);
    }
}

#[test]
fn a_full_descriptor_table_fails_a_connect_and_nothing_leaks() {
    let config = config(Descriptors::Direct);
    let Some(mut driver) = driver(&config) else { return };
    let (listener, addr) = listen(&mut driver);
    let mut streams = Vec::new();
    let mut sockets = Vec::new();
    for _ in 0..config.max_connections + 64 {
        streams.push(client(addr));
        sockets.push(accept(&mut driver, listener));
    }
    for generation in 0..3 {
        driver.connect(key(0, generation), &ConnectConfig::new(addr)).expect("begun");
        match next(&mut driver) {
            Event::Connected { key: of, result } => {
                assert_eq!(of, key(0, generation));
                assert_eq!(result.expect_err("full").raw_os_error(), Some(libc::ENFILE));
            }
            other => panic!("{other:?}"),
        }
        driver.close(key(0, generation), CloseHow::Fin);
        closed(&mut driver, key(0, generation));
    }
    driver.discard(sockets.pop().expect("many"));
    driver.connect(key(0, 9), &ConnectConfig::new(addr)).expect("begun");
    assert!(matches!(next(&mut driver), Event::Connected { result: Ok(()), .. }));
    driver.close(key(0, 9), CloseHow::Fin);
    closed(&mut driver, key(0, 9));
    for socket in sockets {
        driver.discard(socket);
    }
    quiet(&mut driver);
    for mut stream in streams {
        assert_eq!(stream.read(&mut [0]).expect("closed"), 0);
    }
    end(driver);
}
