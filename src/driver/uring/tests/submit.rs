//! Sends, waits and wakes, and the memory of what is queued.

use super::*;

#[test]
fn a_cancelled_send_gives_its_chain_back_with_what_was_taken() {
    for descriptors in BOTH {
        let Some(mut driver) = driver(&config(descriptors)) else { return };
        let (key, mut stream) = pair(&mut driver, 0);
        let bytes: Vec<u8> = (0..16u32 << 20).map(|n| (n % 251) as u8).collect();
        let stuck = chain(&driver, &[&bytes[..1000], &bytes[1000..]]);
        driver.send(key, stuck);
        quiet(&mut driver);
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
        driver.close(key, CloseHow::Fin);
        closed(&mut driver, key);
        let mut got = Vec::new();
        stream.read_to_end(&mut got).expect("what was taken, then FIN");
        assert!(got == bytes[..taken]);
        end(driver);
    }
}

#[test]
fn wakes_end_the_wait_of_another_thread_and_come_as_few() {
    let Some(mut driver) = driver(&config(Descriptors::Direct)) else { return };
    let waker = driver.waker();
    let thread = thread::spawn({
        let waker = waker.clone();
        move || waker.wake()
    });
    assert!(matches!(next(&mut driver), Event::Woken));
    thread.join().expect("the waking thread");
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
    assert!((1..=2).contains(&woken), "{woken} wakes");
    end(driver);
    // The counter lives as long as its handles.
    waker.wake();
}

#[test]
fn a_ring_wakes_another_and_a_ring_that_is_gone_does_no_harm() {
    let Some(mut driver) = driver(&config(Descriptors::Direct)) else { return };
    let (give, take) = std::sync::mpsc::channel();
    let (told, tell) = std::sync::mpsc::channel();
    let peer = thread::spawn(move || {
        let Some(mut peer) = self::driver(&config(Descriptors::Direct)) else { return };
        give.send(peer.waker()).expect("the test listens");
        for _ in 0..20 {
            assert!(matches!(next(&mut peer), Event::Woken));
            told.send(()).expect("the test listens");
        }
        end(peer);
    });
    let waker = take.recv_timeout(PATIENCE).expect("a waker");
    for _ in 0..20 {
        driver.wake_peer(&waker);
        driver.submit_and_wait(Some(Duration::ZERO)).expect("a wait");
        tell.recv_timeout(PATIENCE).expect("the peer woke up");
    }
    peer.join().expect("the peer");
    for _ in 0..20 {
        driver.wake_peer(&waker);
        quiet(&mut driver);
    }
    end(driver);
}

#[test]
fn a_wait_ends_in_time_and_tells_the_time() {
    let Some(mut driver) = driver(&config(Descriptors::Direct)) else { return };
    let before = driver.clock();
    driver.submit_and_wait(Some(Duration::from_millis(30))).expect("a wait");
    assert!(driver.next_event().is_none());
    let took = driver.now().since(before);
    assert!(took >= Duration::from_millis(30) && took < Duration::from_secs(5), "{took:?}");
    driver.submit_and_wait(Some(Duration::ZERO)).expect("a wait");
    assert!(driver.now().since(before) < Duration::from_secs(5));
    end(driver);
}

/// More messages with several parts than the scratch holds, through a queue of eight entries: every
/// entry's memory stays what it was until the kernel has taken it.
#[test]
fn the_memory_of_queued_entries_is_not_used_again_before_the_kernel_took_them() {
    let config = WorkerConfig { sq_entries: 8, max_connections: 600, ..config(Descriptors::Direct) };
    let Some(mut driver) = driver(&config) else { return };
    let (listener, addr) = listen(&mut driver);
    let mut streams = Vec::new();
    for slot in 0..600 {
        streams.push(client(addr));
        let socket = accept(&mut driver, listener);
        driver.adopt(key(slot, 0), socket);
    }
    for slot in 0..600u32 {
        let number = slot.to_le_bytes();
        let parts = chain(&driver, &[&number, b"-", &number, b"."]);
        driver.send(key(slot, 0), parts);
    }
    for _ in 0..600 {
        match next(&mut driver) {
            Event::Sent { chain, result, .. } => {
                assert_eq!(result.expect("sent"), 10);
                driver.memory().chunks.clear(chain);
            }
            other => panic!("{other:?}"),
        }
    }
    // Accepted in the order of connecting or not: each got its own number, twice, and once in all.
    let mut numbers: Vec<u32> = streams
        .iter_mut()
        .map(|stream| {
            let mut room = [0; 10];
            stream.read_exact(&mut room).expect("the message");
            assert_eq!((&room[..4], room[4], room[9]), (&room[5..9], b'-', b'.'));
            u32::from_le_bytes(room[..4].try_into().expect("four bytes"))
        })
        .collect();
    numbers.sort_unstable();
    assert!(numbers.iter().copied().eq(0..600));
    end(driver);
}
