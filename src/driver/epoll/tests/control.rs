//! Listeners whose number is used again.

use super::*;
use crate::config::ListenerConfig;
use crate::driver::ListenConfig;

/// Readiness of a listener that is gone, whose number another one has, does not make that one look.
#[test]
fn late_readiness_of_a_number_is_dropped() {
    let mut driver = driver(&config());
    for _ in 0..3 {
        let config = ListenConfig::Tcp(ListenerConfig::new(SocketAddr::from(([127, 0, 0, 1], 0))));
        let id = driver.listen(&config).expect("listens").id;
        assert_eq!((id, driver.listeners.len()), (ListenerId(0), 1));
        driver.remove_listener(id);
    }
    let (present, addr) = listen(&mut driver);
    assert_eq!(present, ListenerId(0));
    driver.accept(present, AcceptMode::Once);
    driver.submit_and_wait(Some(Duration::ZERO)).expect("a wait");
    let enters = driver.counters.enters.get();
    driver.listener_ready(present, 3);
    assert_eq!((driver.counters.stale.get(), driver.has_events()), (1, false));
    assert_eq!(driver.counters.enters.get(), enters, "it has looked");
    let stream = client(addr);
    match next(&mut driver) {
        Event::Accepted { socket, .. } => driver.discard(socket),
        other => panic!("{other:?}"),
    }
    drop(stream);
    end(driver);
}

/// A listener is removed while it waits to be looked at, which is too early: its number is vacant only afterwards.
#[test]
fn a_listener_that_is_to_be_looked_at_keeps_its_number() {
    let mut driver = driver(&config());
    let (first, addr) = listen(&mut driver);
    let stream = client(addr);
    driver.accept(first, AcceptMode::Once);
    let until = Instant::now() + PATIENCE;
    while !driver.has_events() {
        assert!(Instant::now() < until, "no readiness");
        driver.submit_and_wait(Some(Duration::from_millis(10))).expect("a wait");
    }
    driver.cancel_accept(first);
    driver.remove_listener(first);
    let (second, _) = listen(&mut driver);
    assert_eq!(second, ListenerId(1));
    match next(&mut driver) {
        Event::AcceptFailed { listener, .. } => assert_eq!(listener, first),
        other => panic!("{other:?}"),
    }
    quiet(&mut driver);
    let (third, _) = listen(&mut driver);
    assert_eq!((third, driver.listeners.len()), (first, 2));
    drop(stream);
    end(driver);
}
