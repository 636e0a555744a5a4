//! Packets that come late, twice, or not at all: the bugs that programs on completion ports are known for.

use super::*;

/// Counts the packets that are taken from the port while `run` runs.
fn packets(driver: &mut IocpDriver, run: impl FnOnce(&mut IocpDriver)) -> u64 {
    let before = driver.counters.cqes.get();
    run(driver);
    driver.counters.cqes.get() - before
}

#[test]
fn what_succeeds_at_once_is_reported_once_with_a_packet_or_without() {
    const ROUNDS: u64 = 50;
    for mut driver in both() {
        let skip = driver.skip;
        let (key, mut stream) = pair(&mut driver, 0);
        let taken = packets(&mut driver, |driver| {
            for _ in 0..ROUNDS {
                let bytes = chain(driver, &[b"small"]);
                driver.send(key, bytes);
                // Never inside the call that starts it.
                assert!(driver.next_event().is_none());
                assert_eq!(sent(driver, key).expect("sent"), 5);
            }
            quiet(driver);
        });
        assert_eq!(taken, if skip { 0 } else { ROUNDS });
        let mut room = vec![0; 5 * ROUNDS as usize];
        stream.read_exact(&mut room).expect("all of it");
        // Data that is there already: the receive of no bytes succeeds at once.
        stream.write_all(b"here").expect("write");
        let mut room = [0; 4];
        while socket::peek(driver.slots.get(key).expect("open").socket) != Ok(1) {
            thread::yield_now();
        }
        let taken = packets(&mut driver, |driver| {
            driver.recv(key);
            assert_eq!(driver.in_flight(), usize::from(!skip));
            assert!(driver.next_event().is_none());
            room.copy_from_slice(&received(driver, key).0);
        });
        assert_eq!((&room, taken), (b"here", u64::from(!skip)));
        quiet(&mut driver);
        driver.close(key, CloseHow::Fin);
        closed(&mut driver, key);
        end(driver);
    }
}

/// Cancels that come when the operation is done already, or just before: one end each, whatever wins.
#[test]
fn a_cancel_that_races_with_the_completion_ends_an_operation_once() {
    let mut driver = driver(&config());
    let (key, mut stream) = pair(&mut driver, 0);
    let writer = thread::spawn(move || {
        for _ in 0..200 {
            stream.write_all(b"x").expect("write");
            thread::yield_now();
        }
        stream
    });
    let (mut ends, mut heard, mut taken) = (0, 0, 0);
    for round in 0..200 {
        driver.recv(key);
        let byte = chain(&driver, &[b"y"]);
        driver.send(key, byte);
        if round % 2 == 0 {
            driver.submit_and_wait(Some(Duration::ZERO)).expect("a wait");
        }
        driver.cancel_recv(key);
        driver.cancel_send(key);
        let (mut stopped, mut was_sent) = (false, false);
        while !stopped || !was_sent {
            match next(&mut driver) {
                Event::Received { buf, .. } => heard += buf.len(),
                Event::RecvEnded { end: RecvEnd::Stopped, .. } => {
                    assert!(!std::mem::replace(&mut stopped, true), "ended twice");
                    ends += 1;
                }
                Event::Sent { chain, result, .. } => {
                    assert!(!std::mem::replace(&mut was_sent, true), "sent twice");
                    driver.memory().chunks.clear(chain);
                    match result {
                        Ok(bytes) => taken += bytes,
                        Err(error) => assert_eq!(error.raw_os_error(), Some(error::CANCELLED)),
                    }
                }
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(ends, 200);
    let mut stream = writer.join().expect("the writer");
    driver.recv(key);
    while heard < 200 {
        heard += received(&mut driver, key).0.len();
    }
    assert_eq!(heard, 200);
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    let mut got = Vec::new();
    stream.read_to_end(&mut got).expect("to the end");
    assert_eq!(got.len() as u64, taken);
    end(driver);
}

/// A socket that is closed under its operation ends it with another status than a cancel does.
#[test]
fn an_operation_whose_socket_is_closed_counts_as_cancelled() {
    for mut driver in both() {
        let (key, _stream) = pair(&mut driver, 0);
        driver.recv(key);
        quiet(&mut driver);
        let slot = driver.slots.get(key).expect("open");
        // Taken away from the driver, which must not close another socket of the same number.
        let handle =
            std::mem::replace(&mut slot.socket, windows_sys::Win32::Networking::WinSock::INVALID_SOCKET);
        socket::close(handle);
        match recv_ended(&mut driver, key) {
            RecvEnd::Stopped => {}
            other => panic!("{other:?}"),
        }
        driver.close(key, CloseHow::Fin);
        closed(&mut driver, key);
        end(driver);
    }
}

/// The packets of a slot's last connection, posted again when the slot has the next one.
#[test]
fn a_late_packet_never_reaches_the_next_connection_of_its_slot() {
    let mut driver = driver(&config());
    let (old, _stream) = pair(&mut driver, 0);
    driver.recv(old);
    let stuck = chain(&driver, &[&vec![1; 8 << 20]]);
    driver.send(old, stuck);
    quiet(&mut driver);
    driver.close(old, CloseHow::Reset);
    closed(&mut driver, old);
    let ops = driver.ops.get(0);
    let late = [ops.recv.overlapped(), ops.send.overlapped()];
    let (new, mut stream) = pair(&mut driver, 1);
    for overlapped in late {
        driver.port.post(3, port::OP, overlapped);
    }
    driver.port.post(3, port::OP, std::ptr::null_mut());
    quiet(&mut driver);
    assert_eq!(driver.counters.stale.get(), 3);
    assert_eq!(driver.in_flight(), 0);
    // The new connection is as it was.
    driver.recv(new);
    stream.write_all(b"mine").expect("write");
    assert_eq!(&received(&mut driver, new).0[..], b"mine");
    let reply = chain(&driver, &[b"yours"]);
    driver.send(new, reply);
    assert_eq!(sent(&mut driver, new).expect("sent"), 5);
    driver.close(new, CloseHow::Fin);
    closed(&mut driver, new);
    assert_eq!(driver.finish(PATIENCE), 0);
}

/// Slots, objects and socket numbers are used again at once, with packets of the last connection on their way.
#[test]
fn a_slot_is_used_again_and_again_without_a_stray_packet() {
    let mut driver = driver(&config());
    let (listener, addr) = listen(&mut driver);
    for round in 0..60 {
        let mut stream = client(addr);
        let socket = accept(&mut driver, listener);
        let key = key(0, round);
        driver.adopt(key, socket);
        driver.recv(key);
        stream.write_all(b"hello").expect("write");
        if round % 2 == 0 {
            assert_eq!(&received(&mut driver, key).0[..], b"hello");
        }
        let reply = chain(&driver, &[b"bye"]);
        driver.send(key, reply);
        let how = if round % 3 == 0 { CloseHow::Reset } else { CloseHow::Fin };
        driver.close(key, how);
        closed(&mut driver, key);
    }
    quiet(&mut driver);
    end(driver);
}

/// More packets than are taken at a time.
#[test]
fn a_burst_of_packets_is_taken_in_portions_and_none_is_lost() {
    let count = 2 * BATCH as u32 + 17;
    let mut driver = driver(&WorkerConfig { max_connections: count, ..config() });
    let (listener, addr) = listen(&mut driver);
    let mut streams = Vec::new();
    for slot in 0..count {
        streams.push(client(addr));
        let socket = accept(&mut driver, listener);
        driver.adopt(key(slot, 0), socket);
        driver.recv(key(slot, 0));
    }
    quiet(&mut driver);
    assert_eq!(driver.in_flight(), count as usize);
    for (slot, stream) in streams.iter_mut().enumerate() {
        stream.write_all(&(slot as u32).to_le_bytes()).expect("write");
    }
    let mut heard = vec![0; count as usize];
    for _ in 0..count {
        match next(&mut driver) {
            Event::Received { key, buf, .. } => {
                assert_eq!(buf.len(), 4);
                heard[key.slot as usize] += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(heard.iter().all(|&times| times == 1));
    for slot in 0..count {
        driver.close(key(slot, 0), CloseHow::Fin);
    }
    for _ in 0..count {
        assert!(matches!(next(&mut driver), Event::Closed { .. }));
    }
    end(driver);
}
