//! Sends, waits and wakes.

use super::*;

#[test]
fn a_cancelled_send_gives_its_chain_back_with_what_was_taken() {
    let mut driver = driver(&config());
    let (key, mut stream) = pair(&mut driver, 0);
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
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    let mut got = Vec::new();
    stream.read_to_end(&mut got).expect("what was taken, then FIN");
    assert!(got == bytes[..taken]);
    end(driver);
}

#[test]
fn a_send_of_many_parts_is_taken_whole() {
    for mut driver in both() {
        let (key, mut stream) = pair(&mut driver, 0);
        let parts: Vec<Vec<u8>> = (0..SEND_PARTS).map(|n| vec![n as u8; n * 997]).collect();
        let borrowed: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        let whole = parts.concat();
        let reader = thread::spawn({
            let len = whole.len();
            move || {
                let mut got = vec![0; len];
                stream.read_exact(&mut got).expect("everything");
                (got, stream)
            }
        });
        let bytes = chain(&driver, &borrowed);
        driver.send(key, bytes);
        assert_eq!(sent(&mut driver, key).expect("sent"), whole.len() as u64);
        let (got, mut stream) = reader.join().expect("the reader");
        assert!(got == whole);
        // Payloads without bytes are sent too: there is nothing to it.
        let nothing = chain(&driver, &[b"", b""]);
        driver.send(key, nothing);
        assert_eq!(sent(&mut driver, key).expect("sent"), 0);
        let something = chain(&driver, &[b"", b"x", b""]);
        driver.send(key, something);
        assert_eq!(sent(&mut driver, key).expect("sent"), 1);
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("a byte");
        assert_eq!(&byte, b"x");
        driver.close(key, CloseHow::Fin);
        closed(&mut driver, key);
        end(driver);
    }
}

/// As many as a worker gives at a time.
const SEND_PARTS: usize = crate::driver::SEND_BATCH;

#[test]
fn a_send_to_nobody_fails_with_an_event() {
    let mut driver = driver(&config());
    let (key, stream) = pair(&mut driver, 0);
    reset(stream);
    let until = Instant::now() + PATIENCE;
    let error = loop {
        assert!(Instant::now() < until, "sends to nobody succeed");
        let bytes = chain(&driver, &[b"anybody?"]);
        driver.send(key, bytes);
        if let Err(error) = sent(&mut driver, key) {
            break error;
        }
    };
    let kinds = [ErrorKind::ConnectionReset, ErrorKind::ConnectionAborted, ErrorKind::BrokenPipe];
    assert!(kinds.contains(&error.kind()), "{error:?}");
    driver.close(key, CloseHow::Reset);
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
    assert_eq!(woken, 1);
    // One that comes after the report is told of again.
    waker.wake();
    assert!(matches!(next(&mut driver), Event::Woken));
    end(driver);
    // The port lives as long as its handles.
    waker.wake();
    waker.wake();
}

/// A thread that wakes while the driver reports: none of its wakes may be the last one and unheard.
#[test]
fn no_wake_is_lost_between_two_waits() {
    let mut driver = driver(&config());
    let (waker, done) = (driver.waker(), Arc::new(std::sync::atomic::AtomicU32::new(0)));
    let thread = thread::spawn({
        let done = Arc::clone(&done);
        move || {
            for number in 1..=500 {
                done.store(number, std::sync::atomic::Ordering::Release);
                waker.wake();
            }
        }
    });
    let mut seen = 0;
    while seen < 500 {
        assert!(matches!(next(&mut driver), Event::Woken));
        seen = done.load(std::sync::atomic::Ordering::Acquire);
    }
    thread.join().expect("the waking thread");
    end(driver);
}

#[test]
fn a_wait_ends_in_time_and_tells_the_time() {
    let mut driver = driver(&config());
    let before = driver.clock();
    driver.submit_and_wait(Some(Duration::from_millis(30))).expect("a wait");
    assert!(driver.next_event().is_none());
    let took = driver.now().since(before);
    assert!(took >= Duration::from_millis(28) && took < Duration::from_secs(5), "{took:?}");
    // Less than a millisecond is waited for, not spun through.
    let enters = driver.counters.enters.get();
    let before = driver.clock();
    while driver.clock().since(before) < Duration::from_millis(20) {
        driver.submit_and_wait(Some(Duration::from_micros(100))).expect("a wait");
    }
    let waits = driver.counters.enters.get() - enters;
    assert!(waits <= 40, "{waits} waits in 20 ms");
    driver.submit_and_wait(Some(Duration::ZERO)).expect("a wait");
    assert!(driver.now().since(before) < Duration::from_secs(5));
    end(driver);
}
