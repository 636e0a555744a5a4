//! Addresses and options of connections.

use super::*;
use std::io::{Read, Write};

on_every_driver!(
    both_ends_of_a_connection_have_addresses,
    asking_takes_nothing_out_of_its_order,
    options_of_an_open_connection_can_be_set,
    what_is_not_open_has_neither,
);
#[cfg(target_os = "linux")]
mod datagrams {
    use super::super::*;

    on_every_driver!(a_datagram_socket_has_an_address_and_a_peer_if_it_is_connected);

    fn a_datagram_socket_has_an_address_and_a_peer_if_it_is_connected<D: Look>(mut driver: D) {
        let there =
            std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket").local_addr().expect("its address");
        for (slot, peer) in [None, Some(there)].into_iter().enumerate() {
            let config = DatagramConfig {
                local: Some(Address::Inet(SocketAddr::from(([127, 0, 0, 1], 0)))),
                peer: peer.map(Address::Inet),
                reuse_port: false,
                broadcast: false,
                gro: false,
                recv_buffer: None,
                send_buffer: None,
            };
            let key = key(slot as u32, 1);
            driver.open_datagram(key, &config).expect("opened");
            let ends = driver.addresses(key).expect("open");
            assert_ne!(inet(&ends.local).port(), 0);
            assert_eq!(ends.peer.map(|peer| inet(&peer)), peer);
            let options = SocketOptions { send_buffer: Some(30_000), ..SocketOptions::default() };
            driver.set_options(key, &options).expect("the buffer's size");
            close(&mut driver, key, CloseHow::Fin);
        }
        end(driver);
    }
}

fn both_ends_of_a_connection_have_addresses<D: Driver>(mut driver: D) {
    let mut addrs = vec![SocketAddr::from(([127, 0, 0, 1], 0))];
    if std::net::TcpListener::bind("[::1]:0").is_ok() {
        addrs.push("[::1]:0".parse().expect("an address"));
    }
    for (round, addr) in addrs.into_iter().enumerate() {
        let (id, addr) = listen_tcp(&mut driver, ListenerConfig::new(addr)).expect("listens");
        let (here, there) = (key(0, round as u32), key(1, round as u32));
        driver.connect(here, &ConnectConfig::new(addr)).expect("begun");
        connected(&mut driver, here).expect("connected");
        let socket = accept(&mut driver, id);
        driver.adopt(there, socket);
        let ours = driver.addresses(here).expect("ours");
        let theirs = driver.addresses(there).expect("theirs");
        assert_eq!(inet(&ours.peer.expect("connected")), addr);
        assert_eq!(inet(&theirs.local), addr);
        assert_eq!(inet(&theirs.peer.expect("connected")), inet(&ours.local));
        assert_ne!(inet(&ours.local).port(), 0);
        for key in [here, there] {
            close(&mut driver, key, CloseHow::Fin);
        }
        driver.remove_listener(id);
    }
    quiet(&mut driver);
    end(driver);
}

/// Sixteen connections on which everything happens at once, and between any two operations one is asked for
/// its addresses: every byte comes once and in order, every send is told.
fn asking_takes_nothing_out_of_its_order<D: Driver>(mut driver: D) {
    const CONNECTIONS: u32 = 16;
    const ROUNDS: usize = 60;
    let (id, addr) = listen_tcp(&mut driver, any_port()).expect("listens");
    let mut streams = Vec::new();
    for slot in 0..CONNECTIONS {
        streams.push(client(addr));
        let socket = accept(&mut driver, id);
        driver.adopt(key(slot, 1), socket);
        driver.recv(key(slot, 1));
    }
    let mut seen = vec![Vec::new(); CONNECTIONS as usize];
    let mut told = 0;
    let mut take = |driver: &mut D, seen: &mut Vec<Vec<u8>>, event: Event| match event {
        Event::Received { key, buf, armed } => {
            seen[key.slot as usize].extend_from_slice(&buf);
            if !armed {
                driver.recv(key);
            }
        }
        Event::RecvEnded { key, end: RecvEnd::Stopped | RecvEnd::NoBuffer } => driver.recv(key),
        Event::Sent { chain, result, .. } => {
            assert_eq!(result.expect("sent"), 8);
            driver.memory().chunks.clear(chain);
            told += 1;
        }
        other => panic!("{other:?}"),
    };
    for round in 0..ROUNDS {
        for slot in 0..CONNECTIONS {
            let number = (round as u32 * CONNECTIONS + slot).to_be_bytes();
            streams[slot as usize].write_all(&number).expect("write");
            let bytes = chain(&driver, &[number, number].concat());
            driver.send(key(slot, 1), bytes);
            let asked = key((slot + 1) % CONNECTIONS, 1);
            let ends = driver.addresses(asked).expect("both");
            let wanted = streams[asked.slot as usize].local_addr().expect("its address");
            assert_eq!((inet(&ends.local), inet(&ends.peer.expect("one"))), (addr, wanted));
            // What has come so far, of which some may be there without a wait.
            while let Some(event) = driver.next_event() {
                take(&mut driver, &mut seen, event);
            }
        }
        let until = Instant::now() + PATIENCE;
        let bytes = 4 * (round + 1);
        while told_less(&seen, bytes) || driver.in_flight() > CONNECTIONS as usize {
            assert!(Instant::now() < until, "round {round}: something is lost");
            let timeout = if driver.has_events() { Duration::ZERO } else { Duration::from_millis(50) };
            driver.submit_and_wait(Some(timeout)).expect("a wait");
            while let Some(event) = driver.next_event() {
                take(&mut driver, &mut seen, event);
            }
        }
    }
    assert_eq!(told, ROUNDS * CONNECTIONS as usize);
    for slot in 0..CONNECTIONS {
        let numbers: Vec<u8> =
            (0..ROUNDS as u32).flat_map(|round| (round * CONNECTIONS + slot).to_be_bytes()).collect();
        assert_eq!(seen[slot as usize], numbers, "connection {slot}");
        close(&mut driver, key(slot, 1), CloseHow::Fin);
        let mut back = Vec::new();
        streams[slot as usize].read_to_end(&mut back).expect("what was sent");
        let twice: Vec<u8> = numbers.chunks(4).flat_map(|number| [number, number].concat()).collect();
        assert_eq!(back, twice, "connection {slot}");
    }
    end(driver);
}

fn told_less(seen: &[Vec<u8>], bytes: usize) -> bool {
    seen.iter().any(|seen| seen.len() < bytes)
}

fn options_of_an_open_connection_can_be_set<D: Look>(mut driver: D) {
    let (id, addr) = listen_tcp(&mut driver, any_port()).expect("listens");
    let stream = client(addr);
    let socket = accept(&mut driver, id);
    driver.adopt(key(0, 1), socket);
    assert!(driver.look(key(0, 1)).expect("open").nodelay, "the default");
    let options = SocketOptions {
        nodelay: false,
        keepalive: Some(crate::config::Keepalive {
            idle: Duration::from_secs(30),
            interval: Duration::from_secs(3),
            count: 5,
        }),
        recv_buffer: Some(40_000),
        send_buffer: Some(50_000),
        ..SocketOptions::default()
    };
    driver.set_options(key(0, 1), &options).expect("set");
    let seen = driver.look(key(0, 1)).expect("open");
    assert!(!seen.nodelay && seen.keepalive && seen.linger.is_none(), "{seen:?}");
    assert!(seen.recv_buffer >= 40_000 && seen.send_buffer >= 50_000, "{seen:?}");
    // What is not given stays.
    driver.set_options(key(0, 1), &SocketOptions::default()).expect("set");
    let seen = driver.look(key(0, 1)).expect("open");
    assert!(seen.nodelay && seen.keepalive && seen.send_buffer >= 50_000, "{seen:?}");
    let wrong = SocketOptions { linger: Some(Duration::from_secs(1)), ..SocketOptions::default() };
    let error = driver.set_options(key(0, 1), &wrong).expect_err("would stop the worker");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("linger"), "{error}");
    // A linger time of nothing: the peer sees that it was set when a plain close is a reset.
    let reset = SocketOptions { linger: Some(Duration::ZERO), ..SocketOptions::default() };
    driver.set_options(key(0, 1), &reset).expect("set");
    close(&mut driver, key(0, 1), CloseHow::Fin);
    match read(&mut &stream) {
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
        // Wine may forget about the reset, but not that there is no peer any more.
        Ok(_) => assert!(cfg!(windows) && stream.peer_addr().is_err(), "an end, not a reset"),
    }
    end(driver);
}

fn what_is_not_open_has_neither<D: Driver>(mut driver: D) {
    let (id, addr) = listen_tcp(&mut driver, any_port()).expect("listens");
    let _stream = client(addr);
    let socket = accept(&mut driver, id);
    driver.adopt(key(0, 5), socket);
    driver.addresses(key(0, 5)).expect("open");
    let nothing = |driver: &mut D, key: Key| {
        let error = driver.addresses(key).expect_err("not open");
        assert_eq!(error.kind(), ErrorKind::NotConnected);
        let error = driver.set_options(key, &SocketOptions::default()).expect_err("not open");
        assert_eq!(error.kind(), ErrorKind::NotConnected);
    };
    nothing(&mut driver, key(0, 4));
    nothing(&mut driver, key(63, 5));
    close(&mut driver, key(0, 5), CloseHow::Fin);
    nothing(&mut driver, key(0, 5));
    end(driver);
}
