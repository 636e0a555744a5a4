//! Listeners made at run time, addresses, options, Unix streams.

use std::net::IpAddr;

use super::super::super::{Address, CloseHow, ListenConfig, Listening};
use super::*;
use crate::config::{ConnectConfig, ListenerConfig, Sharing, SocketOptions};

fn tcp(addr: SocketAddr, sharing: Sharing) -> ListenConfig {
    ListenConfig::Tcp(ListenerConfig { sharing, ..ListenerConfig::new(addr) })
}

fn inet(address: &Address) -> SocketAddr {
    match address {
        Address::Inet(addr) => *addr,
        #[cfg(unix)]
        Address::Unix(name) => panic!("{name:?}"),
    }
}

fn listen(rig: &mut Rig, config: &ListenConfig) -> Listening {
    rig.driver.listen(config).expect("listens")
}

#[test]
fn listeners_come_and_go_under_one_number_and_a_free_port_is_found() {
    for seed in 0..20 {
        let mut rig = Rig::new(seed, Faults { late_completion: 0.3, ..Faults::none() });
        let mut ports = Vec::new();
        for round in 0..30u64 {
            let listening = listen(&mut rig, &tcp(addr(0), Sharing::One));
            assert_eq!((listening.id, listening.backlog), (ListenerId(0), 1024));
            let local = inet(&listening.local);
            assert_eq!(local.ip(), addr(0).ip());
            ports.push(local.port());
            let mode = if round % 2 == 0 { AcceptMode::Multishot } else { AcceptMode::Once };
            rig.driver.accept(listening.id, mode);
            let peer = rig.world.borrow_mut().peer_connect(None, local);
            while rig.sockets.is_empty() {
                rig.run(millis(1));
            }
            let socket = rig.sockets.pop().expect("one");
            rig.driver.discard(socket);
            rig.driver.cancel_accept(listening.id);
            while rig.driver.in_flight() > 0 {
                rig.run(millis(1));
            }
            rig.driver.remove_listener(listening.id);
            rig.run(millis(1));
            assert!(rig.world.borrow().peers.contains_key(&peer));
            assert!(rig.world.borrow().listeners.is_empty());
        }
        assert!(ports.iter().all(|&port| port >= 32_768), "{ports:?}");
        assert_eq!(rig.counters.stale.get(), 0);
    }
}

#[test]
fn an_address_is_shared_by_those_who_all_want_to() {
    let mut rig = Rig::new(1, Faults::none());
    let kind = |rig: &mut Rig, port, sharing| {
        rig.driver
            .listen(&tcp(addr(port), sharing))
            .map(|listening| listening.id.0)
            .map_err(|error| error.kind())
    };
    let in_use = Err(std::io::ErrorKind::AddrInUse);
    assert_eq!(kind(&mut rig, 80, Sharing::One), Ok(0));
    assert_eq!(kind(&mut rig, 80, Sharing::One), in_use);
    assert_eq!(kind(&mut rig, 80, Sharing::PerWorker), in_use);
    assert_eq!(kind(&mut rig, 81, Sharing::PerWorker), Ok(1));
    assert_eq!(kind(&mut rig, 81, Sharing::PerWorker), Ok(2));
    assert_eq!(kind(&mut rig, 81, Sharing::One), in_use);
    rig.driver.remove_listener(ListenerId(0));
    rig.run(millis(1));
    assert_eq!(kind(&mut rig, 80, Sharing::One), Ok(0));
}

#[test]
fn a_worker_listens_on_its_own_host() {
    let mut rig = Rig::new(1, Faults::none());
    let host: IpAddr = addr(0).ip();
    rig.world.borrow_mut().rings[0].shape.host = Some(host);
    let local = |rig: &mut Rig, ip: &str| {
        let wanted = SocketAddr::new(ip.parse().expect("an address"), 700);
        let listening = rig.driver.listen(&tcp(wanted, Sharing::One));
        listening.map(|listening| inet(&listening.local).ip().to_string()).map_err(|error| error.kind())
    };
    assert_eq!(local(&mut rig, "0.0.0.0"), Ok(host.to_string()));
    assert_eq!(local(&mut rig, &host.to_string()), Err(std::io::ErrorKind::AddrInUse));
    assert_eq!(local(&mut rig, "127.0.0.1"), Ok("127.0.0.1".to_owned()));
    assert_eq!(local(&mut rig, "10.77.0.1"), Err(std::io::ErrorKind::AddrNotAvailable));
}

#[test]
#[should_panic(expected = "removed with an accept armed")]
fn a_listener_is_not_removed_before_its_last_event_was_taken() {
    let mut rig = Rig::new(1, Faults::none());
    let listening = listen(&mut rig, &tcp(addr(80), Sharing::One));
    rig.driver.accept(listening.id, AcceptMode::Once);
    rig.driver.cancel_accept(listening.id);
    rig.driver.submit_and_wait(None).expect("never fails");
    rig.driver.remove_listener(listening.id);
}

#[test]
fn addresses_of_both_ends_are_known_and_options_are_checked() {
    let mut rig = Rig::new(3, Faults::none());
    let listening = listen(&mut rig, &tcp(addr(80), Sharing::One));
    rig.driver.accept(listening.id, AcceptMode::Once);
    rig.driver.connect(key(1), &ConnectConfig::new(addr(80))).expect("begun");
    // Bound, but not connected yet.
    assert!(rig.driver.addresses(key(1)).expect("a socket").peer.is_none());
    rig.run(millis(5));
    assert_eq!(rig.count("1 connected Ok(())"), 1);
    let socket = rig.sockets.pop().expect("accepted");
    rig.driver.adopt(key(2), socket);
    let (ours, theirs) =
        (rig.driver.addresses(key(1)).expect("ours"), rig.driver.addresses(key(2)).expect("theirs"));
    assert_eq!(inet(&ours.peer.expect("connected")), addr(80));
    assert_eq!(inet(&theirs.local), addr(80));
    assert_eq!(inet(&theirs.peer.expect("connected")), inet(&ours.local));
    rig.driver.set_options(key(1), &SocketOptions::default()).expect("in range");
    let wrong = SocketOptions { linger: Some(millis(1)), ..SocketOptions::default() };
    let error = rig.driver.set_options(key(1), &wrong).expect_err("out of range");
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
    rig.driver.close(key(1), CloseHow::Fin);
    for key in [key(1), key(9)] {
        let error = rig.driver.addresses(key).expect_err("not open");
        assert_eq!(error.kind(), std::io::ErrorKind::NotConnected);
        let error = rig.driver.set_options(key, &SocketOptions::default()).expect_err("not open");
        assert_eq!(error.kind(), std::io::ErrorKind::NotConnected);
    }
}

#[cfg(unix)]
mod unix {
    use super::*;
    use std::os::unix::net::SocketAddr as Name;

    fn name(path: &str) -> Name {
        Name::from_pathname(path).expect("a short path")
    }

    fn path(address: &Address) -> Option<String> {
        match address {
            Address::Unix(name) => name.as_pathname().map(|path| path.display().to_string()),
            Address::Inet(addr) => panic!("{addr}"),
        }
    }

    /// Both ends of a stream, in slots 1 (connected) and 2 (accepted).
    fn pair(rig: &mut Rig) -> ListenerId {
        let listening = listen(rig, &ListenConfig::Unix(name("/run/there"), 4));
        assert_eq!(path(&listening.local).as_deref(), Some("/run/there"));
        rig.driver.accept(listening.id, AcceptMode::Once);
        rig.driver.connect_unix(key(1), &name("/run/there")).expect("begun");
        rig.run(millis(5));
        assert_eq!(rig.count("1 connected Ok(())"), 1);
        let socket = rig.sockets.pop().expect("accepted");
        rig.driver.adopt(key(2), socket);
        listening.id
    }

    #[test]
    fn a_stream_between_names_carries_what_it_is_given() {
        for seed in 0..20 {
            let mut rig = Rig::new(seed, Faults::none());
            pair(&mut rig);
            let (ours, theirs) =
                (rig.driver.addresses(key(1)).expect("ours"), rig.driver.addresses(key(2)).expect("theirs"));
            assert_eq!(path(&ours.local), None);
            assert_eq!(path(&ours.peer.expect("one")).as_deref(), Some("/run/there"));
            assert_eq!(path(&theirs.local).as_deref(), Some("/run/there"));
            assert_eq!(path(&theirs.peer.expect("one")), None);
            rig.rearm = true;
            rig.driver.recv(key(2));
            let bytes = pattern(20_000);
            rig.send(1, bytes.clone());
            rig.run(millis(100));
            assert!(rig.data[&2] == bytes);
            rig.driver.shutdown_write(key(1));
            rig.run(millis(5));
            assert_eq!(rig.count("2 Eof"), 1);
            rig.driver.recv(key(1));
            // A reset of a Unix stream is a close.
            rig.driver.close(key(2), CloseHow::Reset);
            rig.run(millis(5));
            assert_eq!(rig.count("1 Eof"), 1, "{:?}", rig.log);
        }
    }

    #[test]
    fn a_name_without_a_listener_and_a_full_queue_refuse_at_once() {
        let mut rig = Rig::new(1, Faults::none());
        rig.driver.connect_unix(key(0), &name("/run/nobody")).expect("begun");
        rig.turn();
        let refused = format!("0 connected Err({})", crate::driver::sim::errno::ECONNREFUSED);
        assert_eq!(rig.count(&refused), 1, "{:?}", rig.log);
        let listening = listen(&mut rig, &ListenConfig::Unix(name("/run/full"), 1));
        for slot in 1..4 {
            rig.driver.connect_unix(key(slot), &name("/run/full")).expect("begun");
            rig.run(millis(5));
        }
        let busy = format!("3 connected Err({})", crate::driver::sim::errno::EBUSY);
        assert_eq!(rig.count(&busy), 1, "{:?}", rig.log);
        let again = rig.driver.listen(&ListenConfig::Unix(name("/run/full"), 1)).expect_err("taken");
        assert_eq!(again.kind(), std::io::ErrorKind::AddrInUse);
        rig.driver.remove_listener(listening.id);
        rig.run(millis(5));
        let again = listen(&mut rig, &ListenConfig::Unix(name("/run/full"), 1));
        assert_eq!(again.id, listening.id);
    }

    #[test]
    fn a_listener_without_a_name_gets_one_of_its_own() {
        let mut rig = Rig::new(1, Faults::none());
        let unnamed = ListenConfig::Unix(name(""), 1);
        let (one, two) = (listen(&mut rig, &unnamed), listen(&mut rig, &unnamed));
        let (Address::Unix(one), Address::Unix(two)) = (one.local, two.local) else { panic!("no names") };
        assert!(!one.is_unnamed() && !two.is_unnamed());
        assert_ne!(format!("{one:?}"), format!("{two:?}"));
    }
}
