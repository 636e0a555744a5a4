//! Receives of every kind: cancelled, without a buffer, with much data waiting.

use super::*;

/// The kernel forgets a hang-up that was there when a receive was armed, if much data was before it.
#[test]
fn a_receive_that_found_much_data_is_ended_so_that_a_fresh_one_finds_what_is_behind() {
    for kernel in KERNELS {
        let Some(mut driver) = driver(&super::kernel(kernel)) else { return };
        let multishot = driver.recv_mode == RecvMode::Multishot;
        for pieces in [1usize, 32, 33, 34, 60, 100] {
            let (key, mut stream) = pair(&mut driver, pieces as u32);
            stream.write_all(&vec![3; pieces * 1024]).expect("write");
            reset(&stream);
            drop(stream);
            let (mut got, mut arms) = (0, 0);
            let error = loop {
                driver.recv(key);
                arms += 1;
                let end = loop {
                    match next(&mut driver) {
                        Event::Received { buf, armed, .. } => {
                            assert_eq!(armed, multishot);
                            got += buf.len();
                            if !armed {
                                driver.recv(key);
                            }
                        }
                        Event::RecvEnded { end, .. } => break end,
                        other => panic!("{other:?}"),
                    }
                };
                match end {
                    RecvEnd::Stopped => assert!(arms < 3, "ended again and again"),
                    RecvEnd::Failed(error) => break error,
                    other => panic!("{other:?} behind {pieces} pieces"),
                }
            };
            assert_eq!(error.kind(), ErrorKind::ConnectionReset);
            assert_eq!(got, pieces * 1024);
            driver.close(key, CloseHow::Fin);
            closed(&mut driver, key);
        }
        end(driver);
    }
}

#[test]
fn a_busy_receive_is_ended_for_that_at_most_once_a_burst() {
    let Some(mut driver) = driver(&config(Descriptors::Direct)) else { return };
    // Twenty pieces at a time: never; sixty at a time, from the first on: each costs one at most.
    for (pieces, most) in [(20, 0), (60, 50)] {
        let (key, mut stream) = pair(&mut driver, pieces);
        driver.recv(key);
        let bytes = vec![4; pieces as usize * 1024];
        let mut ended = 0;
        for _ in 0..50 {
            stream.write_all(&bytes).expect("write");
            let mut got = 0;
            while got < bytes.len() {
                match next(&mut driver) {
                    Event::Received { buf, .. } => got += buf.len(),
                    Event::RecvEnded { end: RecvEnd::Stopped, .. } => {
                        ended += 1;
                        driver.recv(key);
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        assert!(ended <= most, "ended {ended} times in fifty bursts of {pieces}");
        driver.close(key, CloseHow::Fin);
        closed(&mut driver, key);
    }
    end(driver);
}

#[test]
fn a_cancelled_receive_ends_with_an_event_and_loses_nothing() {
    for kernel in KERNELS {
        let Some(mut driver) = driver(&super::kernel(kernel)) else { return };
        let (key, mut stream) = pair(&mut driver, 0);
        let mut got = Vec::new();
        for round in 0..200u8 {
            driver.recv(key);
            if round % 3 == 0 {
                // Long enough to be armed in earnest. (What the round before left in the socket is
                // received in this one.)
                driver.submit_and_wait(Some(Duration::from_millis(5))).expect("a wait");
            }
            stream.write_all(&[round; 10]).expect("write");
            driver.cancel_recv(key);
            driver.cancel_recv(key);
            loop {
                match next(&mut driver) {
                    Event::Received { buf, armed, .. } => {
                        got.extend_from_slice(&buf);
                        if !armed {
                            break;
                        }
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
                Event::Received { buf, armed, .. } => {
                    got.extend_from_slice(&buf);
                    if !armed {
                        driver.recv(key);
                    }
                }
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
}

#[test]
fn a_receive_without_a_buffer_says_so_and_goes_on_with_one() {
    let buffers = BufferConfig { size: 64, count: 1, send_count: 0, ..BufferConfig::default() };
    for kernel in KERNELS {
        let Some(mut driver) = driver(&WorkerConfig { buffers, ..super::kernel(kernel) }) else { return };
        let (key, mut stream) = pair(&mut driver, 0);
        driver.recv(key);
        stream.write_all(&[5; 100]).expect("write");
        let (first, armed) = received(&mut driver, key);
        assert_eq!(&first[..], [5; 64]);
        if !armed {
            driver.recv(key);
        }
        assert!(matches!(recv_ended(&mut driver, key), RecvEnd::NoBuffer));
        drop(first);
        driver.recv(key);
        let (second, _) = received(&mut driver, key);
        assert_eq!(&second[..], [5; 36]);
        drop(second);
        driver.close(key, CloseHow::Fin);
        // Perhaps the receive had found no buffer before it was cancelled: nobody is told.
        closed(&mut driver, key);
        end(driver);
    }
}

/// Of the ways to receive, polling alone holds a buffer of its own choice, and only while there is data.
#[test]
fn an_idle_connection_holds_no_buffer_however_it_receives() {
    for kernel in KERNELS {
        let Some(mut driver) = driver(&super::kernel(kernel)) else { return };
        let (key, mut stream) = pair(&mut driver, 0);
        let count = driver.memory().pool.capacity();
        driver.recv(key);
        quiet(&mut driver);
        assert_eq!(driver.memory().pool.available(), count);
        stream.write_all(b"once").expect("write");
        let (buf, armed) = received(&mut driver, key);
        assert_eq!(driver.memory().pool.available(), count - 1);
        drop(buf);
        if !armed {
            driver.recv(key);
            quiet(&mut driver);
        }
        assert_eq!(driver.memory().pool.available(), count);
        if driver.recv_mode == RecvMode::Polled {
            assert_eq!(driver.memory().pool.lend_all(|_| true), count, "a buffer is with the kernel");
        }
        driver.close(key, CloseHow::Reset);
        closed(&mut driver, key);
        end(driver);
    }
}
