//! Receives: idle, cancelled, without a buffer, with much data waiting, at the end.

use super::*;

#[test]
fn a_connection_that_waits_for_data_holds_no_buffer() {
    let mut driver = driver(&config());
    let (key, mut stream) = pair(&mut driver, 0);
    driver.recv(key);
    quiet(&mut driver);
    let pool = driver.memory().pool.clone();
    assert_eq!((driver.in_flight(), pool.available(), pool.leased()), (1, 256, 0));
    stream.write_all(b"x").expect("write");
    let (buf, _) = received(&mut driver, key);
    assert_eq!(pool.leased(), 1);
    drop(buf);
    // Armed again, and idle again.
    quiet(&mut driver);
    assert_eq!((driver.in_flight(), pool.leased()), (1, 0));
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    end(driver);
}

#[test]
fn a_reset_is_never_an_end_and_comes_behind_what_was_received() {
    for mut driver in both() {
        for (generation, pieces) in [0usize, 1, 15, 16, 17, 40].into_iter().enumerate() {
            for armed_before in [false, true] {
                let generation = 2 * generation as u32 + u32::from(armed_before);
                let (key, mut stream) = pair(&mut driver, generation);
                if armed_before {
                    driver.recv(key);
                    quiet(&mut driver);
                }
                stream.write_all(&vec![3; pieces * 1024]).expect("write");
                reset(stream);
                if !armed_before {
                    driver.recv(key);
                }
                let mut got = 0;
                let end = loop {
                    match next(&mut driver) {
                        Event::Received { buf, armed, .. } => {
                            assert!(armed);
                            got += buf.len();
                        }
                        Event::RecvEnded { end, .. } => break end,
                        other => panic!("{other:?}"),
                    }
                };
                match end {
                    RecvEnd::Failed(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
                    other => panic!("{other:?} behind {pieces} pieces"),
                }
                // Windows throws away what was not received when a reset comes, Linux (under Wine) does not.
                assert!(got <= pieces * 1024);
                driver.close(key, CloseHow::Fin);
                closed(&mut driver, key);
            }
        }
        end(driver);
    }
}

/// The send and the receive find out about it in either order: neither reports a plain end.
#[test]
fn a_reset_with_a_send_in_flight_is_a_reset_for_both() {
    let mut driver = driver(&config());
    for generation in 0..5 {
        let (key, stream) = pair(&mut driver, generation);
        driver.recv(key);
        let stuck = chain(&driver, &[&vec![1; 8 << 20]]);
        driver.send(key, stuck);
        quiet(&mut driver);
        reset(stream);
        let (mut receive, mut send) = (None, None);
        while receive.is_none() || send.is_none() {
            match next(&mut driver) {
                Event::RecvEnded { end, .. } => receive = Some(end),
                Event::Sent { chain, result, .. } => {
                    driver.memory().chunks.clear(chain);
                    send = Some(result);
                }
                other => panic!("{other:?}"),
            }
        }
        match (receive, send) {
            (Some(RecvEnd::Failed(error)), Some(result)) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset);
                if let Err(error) = result {
                    let kinds =
                        [ErrorKind::ConnectionReset, ErrorKind::ConnectionAborted, ErrorKind::BrokenPipe];
                    assert!(kinds.contains(&error.kind()), "{error:?}");
                }
            }
            other => panic!("{other:?}"),
        }
        driver.close(key, CloseHow::Fin);
        closed(&mut driver, key);
    }
    end(driver);
}

#[test]
fn a_cancelled_receive_ends_with_an_event_and_loses_nothing() {
    for mut driver in both() {
        let (key, mut stream) = pair(&mut driver, 0);
        let mut got = Vec::new();
        for round in 0..100u8 {
            driver.recv(key);
            if round % 3 == 0 {
                // What earlier rounds left there comes now, or is in the middle of it when it is cancelled.
                driver.submit_and_wait(Some(Duration::from_millis(2))).expect("a wait");
            }
            stream.write_all(&[round; 10]).expect("write");
            driver.cancel_recv(key);
            driver.cancel_recv(key);
            loop {
                match next(&mut driver) {
                    Event::Received { buf, armed, .. } => {
                        assert!(armed);
                        got.extend_from_slice(&buf);
                    }
                    Event::RecvEnded { end: RecvEnd::Stopped, .. } => break,
                    other => panic!("{other:?}"),
                }
            }
        }
        driver.recv(key);
        drop(stream);
        loop {
            match next(&mut driver) {
                Event::Received { buf, .. } => got.extend_from_slice(&buf),
                Event::RecvEnded { end: RecvEnd::Eof, .. } => break,
                other => panic!("{other:?}"),
            }
        }
        let wanted: Vec<u8> = (0..100).flat_map(|round| [round; 10]).collect();
        assert_eq!(got, wanted);
        driver.close(key, CloseHow::Fin);
        closed(&mut driver, key);
        end(driver);
    }
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
    drop(first);
    driver.recv(key);
    let (second, _) = received(&mut driver, key);
    assert_eq!(&second[..], [5; 36]);
    // The end needs no buffer, nor does waiting for it.
    quiet(&mut driver);
    drop(stream);
    assert!(matches!(recv_ended(&mut driver, key), RecvEnd::Eof));
    drop(second);
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    end(driver);
}

/// One connection has always something, the other one byte: it comes in the same wait.
#[test]
fn a_busy_connection_reports_so_many_pieces_a_wait_and_hides_nobody() {
    for mut driver in both() {
        let (busy, quiet_one) = (key(0, 0), key(1, 0));
        let mut hog = pair_in(&mut driver, busy);
        let mut light = pair_in(&mut driver, quiet_one);
        driver.recv(busy);
        driver.recv(quiet_one);
        let total = 100 * 1024;
        hog.write_all(&vec![1; total]).expect("write");
        light.write_all(&[2]).expect("write");
        let (mut heard, mut heard_light, mut waits) = (0, 0, 0);
        let until = Instant::now() + PATIENCE;
        while heard < total || heard_light == 0 {
            assert!(Instant::now() < until, "{heard} of {total} bytes, {heard_light} of 1");
            driver.submit_and_wait(Some(Duration::from_secs(1))).expect("a wait");
            waits += 1;
            let mut pieces = 0;
            while let Some(event) = driver.next_event() {
                match event {
                    Event::Received { key, buf, .. } if key == busy => {
                        heard += buf.len();
                        pieces += 1;
                    }
                    Event::Received { key, buf, .. } if key == quiet_one => heard_light += buf.len(),
                    other => panic!("{other:?}"),
                }
            }
            assert!(pieces <= PIECES, "{pieces} pieces between two waits");
            if heard > total / 2 {
                assert_eq!(heard_light, 1, "hidden behind {heard} bytes");
            }
        }
        assert!(waits >= 100 / u32::from(PIECES), "{waits} waits");
        for key in [busy, quiet_one] {
            driver.close(key, CloseHow::Fin);
            closed(&mut driver, key);
        }
        end(driver);
    }
}
