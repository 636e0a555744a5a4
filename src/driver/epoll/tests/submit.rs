//! Sends, waits and wakes.

use super::*;

/// What a peer that begins to read only now gets until the end.
fn all(mut stream: TcpStream) -> Vec<u8> {
    let mut got = Vec::new();
    stream.read_to_end(&mut got).expect("everything, then FIN");
    got
}

#[test]
fn a_send_is_over_in_the_wait_that_begins_it_which_does_not_sleep() {
    let mut driver = driver(&config());
    let (key, mut stream) = pair(&mut driver, 0);
    let before = driver.counters.enters.get();
    for round in 0..100u8 {
        let bytes = chain(&driver, &[&[round], b"", &[round; 9]]);
        driver.send(key, bytes);
        assert!(driver.next_event().is_none() && !driver.has_events(), "inside the call");
        driver.submit_and_wait(None).expect("a wait");
        match driver.next_event() {
            Some(Event::Sent { chain, result, .. }) => {
                assert_eq!((result.expect("sent"), chain.bytes()), (10, 10));
                driver.memory().chunks.clear(chain);
            }
            other => panic!("{other:?}"),
        }
        let mut room = [0; 10];
        stream.read_exact(&mut room).expect("the message");
        assert_eq!(room, [round; 10]);
    }
    // Every other wait asks epoll as well, so that readiness is not starved.
    assert_eq!(driver.counters.enters.get() - before, 100 + 50);
    let nothing = chain(&driver, &[b"", b""]);
    driver.send(key, nothing);
    assert_eq!(sent(&mut driver, key).expect("nothing to do"), 0);
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    end(driver);
}

#[test]
fn a_send_that_fills_the_socket_goes_on_where_it_stopped_and_does_not_spin() {
    let mut driver = driver(&config());
    for shape in [1usize, 7, 64] {
        let (key, stream) = pair(&mut driver, shape as u32);
        let bytes: Vec<u8> = (0..12u32 << 20).map(|n| (n % 251) as u8).collect();
        let parts: Vec<&[u8]> = bytes.chunks(bytes.len().div_ceil(shape)).collect();
        let stuck = chain(&driver, &parts);
        driver.send(key, stuck);
        quiet(&mut driver);
        let before = driver.clock();
        driver.submit_and_wait(Some(Duration::from_millis(50))).expect("a wait");
        assert!(driver.now().since(before) >= Duration::from_millis(50), "woken without room");
        let peer = thread::spawn(move || all(stream));
        assert_eq!(sent(&mut driver, key).expect("all of it"), bytes.len() as u64);
        // Once more, now that room was waited for.
        let more = chain(&driver, &parts);
        driver.send(key, more);
        assert_eq!(sent(&mut driver, key).expect("all of it"), bytes.len() as u64);
        driver.shutdown_write(key);
        let got = peer.join().expect("the peer");
        assert!(got.len() == 2 * bytes.len() && got[..bytes.len()] == bytes && got[bytes.len()..] == bytes);
        driver.close(key, CloseHow::Fin);
        closed(&mut driver, key);
    }
    end(driver);
}

#[test]
fn a_cancelled_send_gives_its_chain_back_with_what_was_taken() {
    let mut driver = driver(&config());
    let (key, stream) = pair(&mut driver, 0);
    let bytes: Vec<u8> = (0..16u32 << 20).map(|n| (n % 251) as u8).collect();
    let stuck = chain(&driver, &[&bytes[..1000], &bytes[1000..]]);
    driver.send(key, stuck);
    quiet(&mut driver);
    driver.cancel_send(key);
    driver.cancel_send(key);
    let taken = match next(&mut driver) {
        Event::Sent { mut chain, result, .. } => {
            let taken = result.expect("a part was taken");
            assert_eq!(chain.bytes(), bytes.len() as u64, "as it was given");
            driver.memory().chunks.consume(&mut chain, taken);
            let (mut left, mut same) = (taken as usize, true);
            driver.memory().chunks.for_each(&chain, |part| {
                same &= part == &bytes[left..left + part.len()];
                left += part.len();
            });
            assert!(same && left == bytes.len());
            driver.memory().chunks.clear(chain);
            taken as usize
        }
        other => panic!("{other:?}"),
    };
    assert!(taken > 0 && taken < bytes.len(), "{taken}");
    quiet(&mut driver);
    // The socket is full: of this one nothing is taken.
    let second = chain(&driver, &[b"second"]);
    driver.send(key, second);
    quiet(&mut driver);
    driver.cancel_send(key);
    let error = sent(&mut driver, key).expect_err("nothing was taken");
    assert_eq!((error.raw_os_error(), driver.in_flight()), (Some(libc::ECANCELED), 0));
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    assert!(all(stream) == bytes[..taken]);
    end(driver);
}

/// Taken in part, then failed: the part is told, the failure with the next send.
#[test]
fn a_send_that_fails_half_way_tells_what_was_taken_and_the_next_one_why() {
    let mut driver = driver(&config());
    let (key, stream) = pair(&mut driver, 0);
    let stuck = chain(&driver, &[&vec![1; 16 << 20]]);
    driver.send(key, stuck);
    quiet(&mut driver);
    reset(stream);
    let taken = sent(&mut driver, key).expect("a part was taken");
    assert!(taken > 0 && taken < 16 << 20);
    let rest = chain(&driver, &[b"the rest"]);
    driver.send(key, rest);
    assert_eq!(sent(&mut driver, key).expect_err("reset").kind(), ErrorKind::ConnectionReset);
    driver.recv(key);
    assert!(matches!(recv_ended(&mut driver, key), RecvEnd::Failed(_)));
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    end(driver);
}

#[test]
fn wakes_end_the_wait_of_another_thread_and_come_as_few() {
    let mut driver = driver(&config());
    let waker = driver.waker();
    let thread = thread::spawn({
        let waker = waker.clone();
        move || waker.wake()
    });
    driver.submit_and_wait(None).expect("a wait");
    assert!(matches!(driver.next_event(), Some(Event::Woken)));
    thread.join().expect("the waking thread");
    quiet(&mut driver);
    for _ in 0..1000 {
        waker.wake();
    }
    let mut woken = 0;
    for _ in 0..5 {
        driver.submit_and_wait(Some(Duration::from_millis(10))).expect("a wait");
        while let Some(event) = driver.next_event() {
            assert!(matches!(event, Event::Woken));
            woken += 1;
        }
    }
    assert_eq!(woken, 1);
    // Nobody reads the counter, and still every wake is told.
    for _ in 0..100 {
        driver.wake_peer(&waker);
        driver.submit_and_wait(None).expect("a wait");
        assert!(matches!(driver.next_event(), Some(Event::Woken)));
    }
    end(driver);
    // The counter lives as long as its handles.
    waker.wake();
}

#[test]
fn a_wait_ends_in_time_and_tells_the_time() {
    let mut driver = driver(&config());
    for timeout in [Duration::from_millis(30), Duration::from_micros(300)] {
        let before = driver.clock();
        driver.submit_and_wait(Some(timeout)).expect("a wait");
        assert!(driver.next_event().is_none());
        let took = driver.now().since(before);
        assert!(took >= timeout && took < Duration::from_secs(5), "{took:?}");
    }
    let before = driver.clock();
    driver.submit_and_wait(Some(Duration::ZERO)).expect("a wait");
    assert!(driver.now().since(before) < Duration::from_secs(5));
    end(driver);
}
