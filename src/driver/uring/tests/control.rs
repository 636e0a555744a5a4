//! Asking a socket of the descriptor table, and what is late.

use super::*;
use crate::config::ListenerConfig;
use crate::driver::{Address, ListenConfig};

#[test]
fn before_6_8_a_socket_of_the_table_cannot_be_asked_and_the_error_says_what_can() {
    for descriptors in BOTH {
        let Some(mut driver) = driver(&config(descriptors)) else { return };
        driver.install = false;
        let (key, _stream) = pair(&mut driver, 1);
        match (driver.addresses(key), driver.set_options(key, &SocketOptions::default())) {
            (Ok(_), Ok(())) => assert!(!driver.direct),
            (Err(addresses), Err(options)) => {
                assert!(driver.direct);
                for error in [addresses, options] {
                    assert_eq!(error.kind(), ErrorKind::Unsupported);
                    let text = error.to_string();
                    assert!(text.contains("6.8") && text.contains("Descriptors::Fd"), "{text}");
                }
            }
            other => panic!("{other:?}"),
        }
        end(driver);
    }
}

/// The completion queue is far too small for what happens, so the answer is behind an overflow.
#[test]
fn an_answer_behind_a_full_completion_queue_is_found_and_what_is_before_it_kept() {
    let config = WorkerConfig { sq_entries: 8, cq_entries: 16, ..config(Descriptors::Direct) };
    let Some(mut driver) = driver(&config) else { return };
    if !driver.install {
        println!("skipped: no FIXED_FD_INSTALL");
        return;
    }
    let (key, stream) = pair(&mut driver, 1);
    let wanted = stream.local_addr().expect("its address");
    for _ in 0..50 {
        // More completions than the queue holds, none of them taken.
        let done_at_once =
            opcode::Nop::new().build().user_data(encode(Kind::PeerWake, Key { slot: 0, generation: 0 }));
        for _ in 0..100 {
            driver.submission.push(&done_at_once, &driver.counters);
        }
        match driver.addresses(key).expect("both").peer {
            Some(Address::Inet(peer)) => assert_eq!(peer, wanted),
            other => panic!("{other:?}"),
        }
        let mut woken = 0;
        while woken < 100 {
            assert!(matches!(next(&mut driver), Event::Woken));
            woken += 1;
        }
    }
    quiet(&mut driver);
    assert_eq!(driver.counters.stale.get(), 0);
    end(driver);
}

#[test]
fn asking_leaves_no_descriptor_behind() {
    let Some(mut driver) = driver(&config(Descriptors::Direct)) else { return };
    if !driver.install {
        println!("skipped: no FIXED_FD_INSTALL");
        return;
    }
    let (key, mut stream) = pair(&mut driver, 1);
    // The number that is free next does not grow. Tests beside this one take numbers too, but not thousands.
    for _ in 0..5000 {
        driver.addresses(key).expect("both");
    }
    let next_number =
        driver.submission.install(driver.slots.get(key).expect("open").socket as u32, &driver.counters);
    let number = next_number.expect("a descriptor").as_raw_fd();
    assert!(number < 4000, "descriptor {number} after 5000 questions");
    // Nor does one keep the socket open.
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    assert_eq!(stream.read(&mut [0]).expect("the end"), 0);
    end(driver);
}

/// As no kernel should do: an accept that a number's last use had armed ends in its present one.
#[test]
fn a_late_accept_reaches_nobody() {
    let Some(mut driver) = driver(&config(Descriptors::Direct)) else { return };
    for _ in 0..3 {
        let config = ListenConfig::Tcp(ListenerConfig::new(SocketAddr::from(([127, 0, 0, 1], 0))));
        let id = driver.listen(&config).expect("listens").id;
        assert_eq!((id, driver.listeners.len()), (ListenerId(0), 1));
        driver.remove_listener(id);
    }
    let (present, _) = listen(&mut driver);
    assert_eq!(present, ListenerId(0));
    for kind in [Kind::AcceptMulti, Kind::AcceptOnce] {
        let late = opcode::Nop::new().build().user_data(encode(kind, key(0, 2)));
        driver.in_flight += 1;
        driver.submission.push(&late, &driver.counters);
    }
    quiet(&mut driver);
    assert_eq!((driver.counters.stale.get(), driver.in_flight()), (2, 0));
    end(driver);
}
