//! Receiving: with much data waiting, with an end behind it, without a buffer, cancelled.

use super::slots::PIECES;
use super::*;

#[test]
fn an_idle_receive_holds_no_buffer_and_stays_armed_over_many_pieces() {
    let mut driver = driver(&config());
    let (key, mut stream) = pair(&mut driver, 0);
    driver.recv(key);
    quiet(&mut driver);
    for round in 0..50u8 {
        assert_eq!(driver.memory().pool.leased(), 0);
        stream.write_all(&[round; 10]).expect("write");
        let (buf, armed) = received(&mut driver, key);
        assert_eq!((&buf[..], armed, driver.in_flight()), (&[round; 10][..], true, 1));
        assert_eq!(driver.memory().pool.leased(), 1);
    }
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    end(driver);
}

/// Also with an end that comes while the data before it is only half taken.
#[test]
fn what_arrived_before_the_end_is_delivered_before_it() {
    for fails in [false, true] {
        let mut driver = driver(&config());
        for pieces in [1usize, 2, 31, 32, 33, 100] {
            for late in [false, true] {
                let (key, mut stream) = pair(&mut driver, pieces as u32 * 2 + u32::from(late));
                // A last piece that is not full, and one that is.
                let bytes = vec![3; pieces * 1024 - usize::from(pieces % 2 == 0)];
                stream.write_all(&bytes).expect("write");
                let mut got = 0;
                driver.recv(key);
                if late {
                    got += received(&mut driver, key).0.len();
                }
                if fails {
                    reset(stream);
                } else {
                    drop(stream);
                }
                let ended = loop {
                    match next(&mut driver) {
                        Event::Received { buf, armed, .. } => {
                            assert!(armed);
                            got += buf.len();
                        }
                        Event::RecvEnded { end, .. } => break end,
                        other => panic!("{other:?}"),
                    }
                };
                assert_eq!(got, bytes.len());
                match ended {
                    RecvEnd::Eof if !fails => {}
                    RecvEnd::Failed(error) if fails => {
                        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
                    }
                    other => panic!("{other:?} behind {pieces} pieces"),
                }
                assert_eq!(driver.in_flight(), 0);
                driver.close(key, CloseHow::Fin);
                closed(&mut driver, key);
            }
        }
        end(driver);
    }
}

#[test]
fn a_flooder_reports_a_bounded_number_of_pieces_between_two_waits_in_turn_with_others() {
    let mut driver = driver(&config());
    let (flooded, mut flooder) = pair_in(&mut driver, key(0, 0));
    let (other, mut stream) = pair_in(&mut driver, key(1, 0));
    let bytes: Vec<u8> = (0..100 * 1024).map(|n| (n % 251) as u8).collect();
    flooder.write_all(&bytes).expect("write");
    stream.write_all(b"quiet").expect("write");
    driver.recv(flooded);
    driver.recv(other);
    assert!(driver.next_event().is_none() && !driver.has_events(), "nothing before a wait");
    let (mut got, mut waits, mut heard) = (Vec::new(), 0, None);
    while got.len() < bytes.len() {
        // Everything is there: no wait sleeps.
        driver.submit_and_wait(Some(PATIENCE)).expect("a wait");
        waits += 1;
        let mut pieces = 0;
        while let Some(event) = driver.next_event() {
            match event {
                Event::Received { key, buf, .. } if key == flooded => {
                    got.extend_from_slice(&buf);
                    pieces += 1;
                }
                Event::Received { key, buf, .. } if key == other => {
                    assert_eq!(&buf[..], b"quiet");
                    heard = Some((waits, pieces));
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(pieces <= u32::from(PIECES) && !driver.has_events());
    }
    assert!(got == bytes);
    assert!((4..=6).contains(&waits), "{waits} waits");
    let (wait, before) = heard.expect("the quiet one is heard");
    assert!(wait <= 2 && before <= 2, "heard in wait {wait} after {before} pieces");
    for key in [flooded, other] {
        driver.close(key, CloseHow::Fin);
        closed(&mut driver, key);
    }
    end(driver);
}

#[test]
fn a_cancelled_receive_ends_with_one_event_and_loses_nothing() {
    let mut driver = driver(&config());
    let (key, mut stream) = pair(&mut driver, 0);
    let mut got = Vec::new();
    for round in 0..200u8 {
        driver.recv(key);
        // Armed only, or at it for a while already; what an earlier round left lying comes now.
        while round % 3 == 0 && got.len() < usize::from(round) * 10 {
            got.extend_from_slice(&received(&mut driver, key).0);
        }
        stream.write_all(&[round; 10]).expect("write");
        driver.cancel_recv(key);
        driver.cancel_recv(key);
        loop {
            match next(&mut driver) {
                Event::Received { buf, .. } => got.extend_from_slice(&buf),
                Event::RecvEnded { end: RecvEnd::Stopped, .. } => break,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(driver.in_flight(), 0);
        if round % 5 == 0 {
            quiet(&mut driver);
        }
    }
    assert!(got.len() < 2000, "no cancel came before the data");
    driver.recv(key);
    drop(stream);
    loop {
        match next(&mut driver) {
            Event::Received { buf, .. } => got.extend_from_slice(&buf),
            Event::RecvEnded { end: RecvEnd::Eof, .. } => break,
            other => panic!("{other:?}"),
        }
    }
    let wanted: Vec<u8> = (0..200).flat_map(|round| [round; 10]).collect();
    assert_eq!(got, wanted);
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    end(driver);
}

/// In the same turn as events are still to be taken: they come first, what was begun anew does not.
#[test]
fn a_receive_begun_while_events_are_taken_reports_only_after_the_next_wait() {
    let mut driver = driver(&config());
    let (key, mut stream) = pair(&mut driver, 0);
    stream.write_all(&[1; 3000]).expect("write");
    driver.recv(key);
    let mut got = received(&mut driver, key).0.len();
    driver.cancel_recv(key);
    driver.submit_and_wait(Some(Duration::ZERO)).expect("a wait");
    let stopped = driver.next_event();
    assert!(matches!(stopped, Some(Event::RecvEnded { end: RecvEnd::Stopped, .. })), "{stopped:?}");
    driver.recv(key);
    assert!(driver.next_event().is_none());
    while got < 3000 {
        got += received(&mut driver, key).0.len();
    }
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    end(driver);
}

#[test]
fn a_receive_without_a_buffer_says_so_and_goes_on_with_one() {
    let buffers = BufferConfig { size: 64, count: 1, send_count: 0, ..BufferConfig::default() };
    let mut driver = driver(&WorkerConfig { buffers, ..config() });
    let (key, mut stream) = pair(&mut driver, 0);
    driver.recv(key);
    stream.write_all(&[5; 100]).expect("write");
    let (first, _) = received(&mut driver, key);
    assert_eq!(&first[..], [5; 64]);
    assert!(matches!(recv_ended(&mut driver, key), RecvEnd::NoBuffer));
    // Told once, not again and again.
    quiet(&mut driver);
    drop(first);
    driver.recv(key);
    let (second, _) = received(&mut driver, key);
    assert_eq!(&second[..], [5; 36]);
    // Idle, and nobody has a buffer: that concerns it only when there is something to receive.
    quiet(&mut driver);
    // Only an end is there, and it needs a buffer to be seen.
    drop(stream);
    assert!(matches!(recv_ended(&mut driver, key), RecvEnd::NoBuffer));
    drop(second);
    driver.recv(key);
    assert!(matches!(recv_ended(&mut driver, key), RecvEnd::Eof));
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    end(driver);
}

/// A short read at the mark of urgent data is not the end of what is there, and no edge tells of the rest.
#[test]
fn data_behind_urgent_data_is_not_left_lying() {
    let mut driver = driver(&config());
    let (key, mut stream) = pair(&mut driver, 0);
    driver.recv(key);
    for _ in 0..20 {
        stream.write_all(b"before").expect("write");
        // SAFETY: one byte that outlives the call (invariant 5).
        let urgent = unsafe { libc::send(stream.as_raw_fd(), b"!".as_ptr().cast(), 1, libc::MSG_OOB) };
        assert_eq!(urgent, 1);
        stream.write_all(b"behind").expect("write");
        let mut got = Vec::new();
        while got.len() < 12 {
            got.extend_from_slice(&received(&mut driver, key).0);
        }
        assert_eq!(got, b"beforebehind");
    }
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    end(driver);
}

/// The kernel tells a failure once. If sending has met it, receiving must not see a clean end.
#[test]
fn a_reset_that_a_send_has_met_is_not_taken_for_the_end() {
    let mut driver = driver(&config());
    let (key, mut stream) = pair(&mut driver, 0);
    stream.write_all(b"last words").expect("write");
    reset(stream);
    until(&mut driver, "the reset", |driver| {
        driver.slots.get(key).is_some_and(|slot| slot.state.has(State::READ_ON))
    });
    for _ in 0..2 {
        let bytes = chain(&driver, &[b"too late"]);
        driver.send(key, bytes);
        let error = sent(&mut driver, key).expect_err("reset");
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    driver.recv(key);
    assert_eq!(&received(&mut driver, key).0[..], b"last words");
    match recv_ended(&mut driver, key) {
        RecvEnd::Failed(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        other => panic!("{other:?}"),
    }
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    end(driver);
}

/// Nobody receives, and a peer sends, ends and resets: each wakes the driver a bounded number of times.
#[test]
fn a_connection_that_is_not_received_from_does_not_spin() {
    let mut driver = driver(&config());
    let (key, mut stream) = pair(&mut driver, 0);
    stream.write_all(&[1; 5000]).expect("write");
    reset(stream);
    until(&mut driver, "the reset", |driver| {
        driver.slots.get(key).is_some_and(|slot| slot.state.has(State::READ_ON))
    });
    let before = driver.clock();
    driver.submit_and_wait(Some(Duration::from_millis(50))).expect("a wait");
    assert!(driver.now().since(before) >= Duration::from_millis(50), "woken again");
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    end(driver);
}
