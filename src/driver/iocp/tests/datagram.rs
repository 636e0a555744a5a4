//! Datagram sockets.

use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};

use super::*;
use crate::driver::{Address, DATAGRAM_SENDS, Datagram, DatagramConfig, PRELUDE, Received};

fn udp(local: SocketAddr) -> DatagramConfig {
    DatagramConfig {
        local: Some(Address::Inet(local)),
        peer: None,
        reuse_port: false,
        broadcast: false,
        gro: false,
        recv_buffer: None,
        send_buffer: None,
    }
}

fn any() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 0))
}

fn connected(peer: SocketAddr) -> DatagramConfig {
    DatagramConfig { peer: Some(Address::Inet(peer)), ..udp(any()) }
}

fn skipping() -> IocpDriver {
    let [skipping, plain] = both();
    end(plain);
    skipping
}

/// Opens a socket; where it is bound.
fn open(driver: &mut IocpDriver, key: Key, config: &DatagramConfig) -> SocketAddr {
    driver.open_datagram(key, config).expect("it opens");
    match driver.addresses(key).expect("it is open").local {
        Address::Inet(local) => local,
    }
}

fn peer() -> (UdpSocket, SocketAddr) {
    let socket = UdpSocket::bind(any()).expect("a socket");
    socket.set_read_timeout(Some(PATIENCE)).expect("a read timeout");
    let addr = socket.local_addr().expect("its address");
    (socket, addr)
}

fn send(driver: &mut IocpDriver, key: Key, token: u32, bytes: &[u8], to: Option<SocketAddr>) {
    let to = to.map(Address::Inet);
    let datagram = Datagram { payload: Payload::from(bytes.to_vec()), to, segment: None };
    driver.send_datagram(key, token, datagram);
}

fn datagram_sent(driver: &mut IocpDriver, wanted: Key) -> (u32, io::Result<usize>) {
    match next(driver) {
        Event::DatagramSent { key, token, result } if key == wanted => (token, result),
        other => panic!("{other:?}"),
    }
}

/// The next datagram, with its sender and whether its end was cut off.
fn datagram(driver: &mut IocpDriver, wanted: Key) -> (Vec<u8>, SocketAddr, bool) {
    let (buf, armed) = received(driver, wanted);
    assert!(armed);
    let received = Received::parse(buf).expect("a driver's layout");
    match received.from {
        Some(Address::Inet(from)) => (received.bytes.to_vec(), from, received.truncated),
        None => panic!("no sender"),
    }
}

#[test]
fn datagrams_come_whole_with_their_senders_and_an_idle_socket_holds_no_buffer() {
    let mut driver = skipping();
    let key = key(0, 1);
    let local = open(&mut driver, key, &udp(any()));
    driver.recv(key);
    quiet(&mut driver);
    assert_eq!(driver.memory().pool.leased(), 0);
    let peers = [peer(), peer()];
    for round in 0..50usize {
        let (socket, from) = &peers[round % 2];
        let sent: Vec<u8> = (0..round * 17 % 860).map(|n| n as u8).collect();
        assert_eq!(socket.send_to(&sent, local).expect("sent"), sent.len());
        assert_eq!(datagram(&mut driver, key), (sent, *from, false), "round {round}");
    }
    // Several that wait, empty ones among them.
    let (socket, from) = &peers[0];
    for n in 0..40u8 {
        socket.send_to(&vec![n; usize::from(n % 3)], local).expect("sent");
    }
    for n in 0..40u8 {
        assert_eq!(datagram(&mut driver, key), (vec![n; usize::from(n % 3)], *from, false));
    }
    quiet(&mut driver);
    driver.close(key, CloseHow::Fin);
    closed(&mut driver, key);
    UdpSocket::bind(local).expect("its address is free");
    end(driver);
}

#[test]
fn what_is_longer_than_a_buffer_is_cut_off() {
    let mut driver = skipping();
    let key = key(0, 1);
    let local = open(&mut driver, key, &udp(any()));
    let room = driver.memory().pool.buffer_size() as usize - PRELUDE;
    let (socket, from) = peer();
    let sent: Vec<u8> = (0..room + 1).map(|n| (n * 7) as u8).collect();
    for waiting in [false, true] {
        if !waiting {
            driver.recv(key);
        }
        socket.send_to(&sent, local).expect("sent");
        socket.send_to(&sent[..room], local).expect("sent");
        if waiting {
            driver.recv(key);
        }
        assert_eq!(datagram(&mut driver, key), (sent[..room].to_vec(), from, true));
        assert_eq!(datagram(&mut driver, key), (sent[..room].to_vec(), from, false));
        driver.cancel_recv(key);
        assert!(matches!(recv_ended(&mut driver, key), RecvEnd::Stopped));
    }
    driver.close(key, CloseHow::Reset);
    closed(&mut driver, key);
    end(driver);
}

#[test]
fn many_are_sent_at_a_time_and_each_is_answered_under_its_token() {
    let mut driver = skipping();
    let (one, two) = (key(0, 1), key(1, 1));
    let (socket, addr) = peer();
    let local = open(&mut driver, one, &udp(any()));
    let other = open(&mut driver, two, &connected(addr));
    assert!(matches!(driver.addresses(two).expect("open").peer, Some(Address::Inet(peer)) if peer == addr));
    assert!(driver.addresses(one).expect("open").peer.is_none());
    for round in 0..3 {
        for token in 0..DATAGRAM_SENDS {
            let to = (round % 2 == 0).then_some(addr);
            let (key, to) = if to.is_some() { (one, to) } else { (two, None) };
            send(&mut driver, key, token, &token.to_ne_bytes(), to);
        }
        let (key, from) = if round % 2 == 0 { (one, local) } else { (two, other) };
        let mut tokens = Vec::new();
        for _ in 0..DATAGRAM_SENDS {
            let (token, result) = datagram_sent(&mut driver, key);
            assert_eq!(result.expect("sent"), 4);
            tokens.push(token);
        }
        tokens.sort_unstable();
        assert_eq!(tokens, Vec::from_iter(0..DATAGRAM_SENDS));
        let mut room = [0; 9];
        for _ in 0..DATAGRAM_SENDS {
            assert_eq!(socket.recv_from(&mut room).expect("received"), (4, from));
        }
    }
    send(&mut driver, one, 7, b"", Some(addr));
    assert!(matches!(datagram_sent(&mut driver, one), (7, Ok(0))));
    assert_eq!(socket.recv_from(&mut [0; 9]).expect("received"), (0, local));
    // Objects are used again.
    assert!(driver.datagrams.len() <= DATAGRAM_SENDS as usize);
    assert_eq!(driver.in_flight(), 0);
    end(driver);
}

#[test]
fn a_payload_is_cut_into_segments() {
    let mut driver = skipping();
    let key = key(0, 1);
    let (socket, addr) = peer();
    open(&mut driver, key, &connected(addr));
    let bytes: Vec<u8> = (0..1_050).map(|n| (n * 3) as u8).collect();
    let cut = |len: usize, segment: u16| Datagram {
        payload: Payload::from(bytes[..len].to_vec()),
        to: None,
        segment: Some(segment),
    };
    driver.send_datagram(key, 1, cut(1_050, 100));
    assert!(matches!(datagram_sent(&mut driver, key), (1, Ok(1_050))));
    let mut room = [0; 2_000];
    for part in bytes.chunks(100) {
        let len = socket.recv(&mut room).expect("received");
        assert_eq!(room[..len], *part);
    }
    driver.send_datagram(key, 2, cut(65, 1));
    let (_, result) = datagram_sent(&mut driver, key);
    assert_eq!(result.expect_err("too many").kind(), ErrorKind::InvalidInput);
    driver.send_datagram(key, 3, cut(50, 100));
    assert!(matches!(datagram_sent(&mut driver, key), (3, Ok(50))));
    assert_eq!(socket.recv(&mut room).expect("received"), 50);
    end(driver);
}

#[test]
fn a_send_that_the_kernel_keeps_is_answered_by_its_packet_and_goes_on_with_its_next_segment() {
    let mut driver = skipping();
    let key = key(0, 1);
    let (socket, addr) = peer();
    open(&mut driver, key, &connected(addr));
    let cut = |segment| Datagram { payload: Payload::from(&b"one two three"[..]), to: None, segment };
    let packet = driver.keep_datagram(key, 5, cut(None));
    quiet(&mut driver);
    driver.port.post(13, port::OP, packet);
    assert!(matches!(datagram_sent(&mut driver, key), (5, Ok(13))));
    assert_eq!(driver.in_flight(), 0);
    // The first of four segments is with the kernel: of the others the driver takes care.
    let packet = driver.keep_datagram(key, 6, cut(Some(4)));
    driver.port.post(4, port::OP, packet);
    assert!(matches!(datagram_sent(&mut driver, key), (6, Ok(13))));
    let mut room = [0; 9];
    for part in ["two ", "thre", "e"] {
        let len = socket.recv(&mut room).expect("received");
        assert_eq!(room[..len], *part.as_bytes());
    }
    // A close waits for the packet, and the payload with it.
    let packet = driver.keep_datagram(key, 7, cut(Some(4)));
    send(&mut driver, key, 8, b"done at once, never told", None);
    driver.close(key, CloseHow::Fin);
    quiet(&mut driver);
    assert_eq!(driver.in_flight(), 1);
    driver.port.post(0, port::OP, packet);
    closed(&mut driver, key);
    assert_eq!(driver.counters.stale.get(), 0);
    // One more packet for an object that nobody waits for.
    driver.port.post(0, port::OP, packet);
    quiet(&mut driver);
    assert_eq!(driver.counters.stale.get(), 1);
    assert_eq!(driver.finish(PATIENCE), 0);
}

#[test]
fn what_cannot_be_sent_fails_under_its_token_and_concerns_nothing_else() {
    let mut driver = skipping();
    let key = key(0, 1);
    let (socket, addr) = peer();
    open(&mut driver, key, &udp(any()));
    driver.recv(key);
    send(&mut driver, key, 1, &[0; 65_508], Some(addr));
    let (token, result) = datagram_sent(&mut driver, key);
    assert_eq!((token, result.expect_err("too long").raw_os_error()), (1, Some(10040)));
    send(&mut driver, key, 2, b"x", None);
    let (token, result) = datagram_sent(&mut driver, key);
    assert_eq!(token, 2);
    assert_eq!(result.expect_err("nowhere").raw_os_error(), Some(10039));
    send(&mut driver, key, 3, b"x", Some(addr));
    assert!(matches!(datagram_sent(&mut driver, key), (3, Ok(1))));
    assert_eq!(socket.recv(&mut [0; 9]).expect("received"), 1);
    quiet(&mut driver);
    end(driver);
}

#[test]
fn only_a_connected_socket_is_told_that_nobody_is_there_and_it_goes_on() {
    let mut driver = skipping();
    let (one, two) = (key(0, 1), key(1, 1));
    let (socket, addr) = peer();
    drop(socket);
    let local = open(&mut driver, one, &udp(any()));
    open(&mut driver, two, &connected(addr));
    driver.recv(one);
    send(&mut driver, one, 0, b"anybody?", Some(addr));
    assert!(matches!(datagram_sent(&mut driver, one), (0, Ok(8))));
    quiet(&mut driver);
    let (stranger, from) = peer();
    stranger.send_to(b"me", local).expect("sent");
    assert_eq!(datagram(&mut driver, one), (b"me".to_vec(), from, false));

    driver.recv(two);
    send(&mut driver, two, 0, b"anybody?", None);
    let mut failed = None;
    for _ in 0..2 {
        match next(&mut driver) {
            Event::DatagramSent { token: 0, result, .. } => assert_eq!(result.expect("sent"), 8),
            Event::RecvEnded { end: RecvEnd::Failed(error), .. } => failed = Some(error.kind()),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(failed, Some(ErrorKind::ConnectionRefused));
    quiet(&mut driver);
    let there = UdpSocket::bind(addr).expect("the address is free");
    there.set_read_timeout(Some(PATIENCE)).expect("a read timeout");
    send(&mut driver, two, 1, b"and now?", None);
    assert!(matches!(datagram_sent(&mut driver, two), (1, Ok(8))));
    let mut room = [0; 9];
    let (len, from) = there.recv_from(&mut room).expect("received");
    assert_eq!(room[..len], *b"and now?");
    there.send_to(b"yes", from).expect("sent");
    // Not before: Wine does not wake those that wait on a socket which had an error.
    driver.recv(two);
    assert_eq!(datagram(&mut driver, two), (b"yes".to_vec(), addr, false));
    // A stranger is not heard.
    stranger.send_to(b"me too", from).expect("sent");
    quiet(&mut driver);
    end(driver);
}

#[test]
fn a_cancelled_receive_ends_once_and_loses_nothing() {
    let mut driver = skipping();
    let key = key(0, 1);
    let local = open(&mut driver, key, &udp(any()));
    let (socket, from) = peer();
    for round in 0..20u8 {
        driver.recv(key);
        if round % 2 == 0 {
            socket.send_to(&[round], local).expect("sent");
        }
        driver.cancel_recv(key);
        driver.cancel_recv(key);
        assert!(matches!(recv_ended(&mut driver, key), RecvEnd::Stopped));
        quiet(&mut driver);
        if round % 2 == 0 {
            driver.recv(key);
            assert_eq!(datagram(&mut driver, key), (vec![round], from, false));
            driver.cancel_recv(key);
            assert!(matches!(recv_ended(&mut driver, key), RecvEnd::Stopped));
        }
    }
    end(driver);
}

#[test]
fn without_a_buffer_datagrams_wait_in_their_socket() {
    let mut driver = skipping();
    let key = key(0, 1);
    let local = open(&mut driver, key, &udp(any()));
    let (socket, from) = peer();
    let mut kept = Vec::new();
    while let Some(buf) = driver.memory().pool.lease_with(|_| 1) {
        kept.push(buf);
    }
    driver.recv(key);
    quiet(&mut driver);
    for bytes in [&b""[..], b"waits"] {
        socket.send_to(bytes, local).expect("sent");
        assert!(matches!(recv_ended(&mut driver, key), RecvEnd::NoBuffer));
        let free = kept.pop();
        drop(free);
        driver.recv(key);
        assert_eq!(datagram(&mut driver, key), (bytes.to_vec(), from, false));
        kept.extend(driver.memory().pool.lease_with(|_| 1));
    }
    quiet(&mut driver);
    drop(kept);
    end(driver);
}

#[test]
fn a_close_with_everything_under_way_reports_itself_alone() {
    let mut driver = skipping();
    let (socket, addr) = peer();
    for generation in 1..20 {
        let key = key(0, generation);
        let local = open(&mut driver, key, &udp(any()));
        driver.recv(key);
        for token in 0..DATAGRAM_SENDS {
            send(&mut driver, key, token, &[1; 100], Some(addr));
        }
        if generation % 3 == 0 {
            socket.send_to(b"too late", local).expect("sent");
            driver.submit_and_wait(Some(Duration::from_millis(1))).expect("a wait");
        }
        driver.close(key, if generation % 2 == 0 { CloseHow::Fin } else { CloseHow::Reset });
        closed(&mut driver, key);
        quiet(&mut driver);
        assert_eq!(driver.in_flight(), 0);
    }
    // A driver that ends closes what is open.
    let last = key(1, 1);
    open(&mut driver, last, &udp(any()));
    driver.recv(last);
    send(&mut driver, last, 0, b"farewell", Some(addr));
    end(driver);
}

#[test]
fn ipv6_sockets_and_what_the_system_lacks() {
    let mut driver = skipping();
    let (one, two) = (key(0, 1), key(1, 1));
    let local = open(&mut driver, one, &udp(SocketAddr::from((Ipv6Addr::LOCALHOST, 0))));
    let config = DatagramConfig { peer: Some(Address::Inet(local)), local: None, ..udp(any()) };
    open(&mut driver, two, &config);
    driver.recv(one);
    send(&mut driver, two, 0, b"six", None);
    assert!(matches!(datagram_sent(&mut driver, two), (0, Ok(3))));
    let (bytes, from, truncated) = datagram(&mut driver, one);
    assert_eq!((&bytes[..], truncated, from.ip()), (&b"six"[..], false, Ipv6Addr::LOCALHOST.into()));
    let taken = driver.open_datagram(key(2, 1), &udp(local)).expect_err("in use");
    assert!([ErrorKind::AddrInUse, ErrorKind::PermissionDenied].contains(&taken.kind()), "{taken}");
    let shared = DatagramConfig { reuse_port: true, ..udp(any()) };
    let error = driver.open_datagram(key(2, 1), &shared).expect_err("not there");
    assert!(error.kind() == ErrorKind::Unsupported && error.to_string().contains("SO_REUSEPORT"), "{error}");
    let options = SocketOptions { recv_buffer: Some(70_000), ..SocketOptions::default() };
    driver.set_options(one, &options).expect("sizes can be set");
    end(driver);
    let [mut skipping, mut plain] = both();
    let error = plain.open_datagram(one, &udp(any())).expect_err("behind a layered provider");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    open(&mut skipping, one, &udp(any()));
    end(plain);
    end(skipping);
}

#[test]
fn one_busy_socket_does_not_hide_another() {
    let mut driver = skipping();
    let (busy, quiet) = (key(0, 1), key(1, 1));
    let busy_at = open(&mut driver, busy, &udp(any()));
    let quiet_at = open(&mut driver, quiet, &udp(any()));
    let (socket, _) = peer();
    for _ in 0..100 {
        socket.send_to(b"busy", busy_at).expect("sent");
    }
    driver.recv(busy);
    driver.recv(quiet);
    socket.send_to(b"quiet", quiet_at).expect("sent");
    let mut before = 0;
    loop {
        match next(&mut driver) {
            Event::Received { key, .. } if key == busy => before += 1,
            Event::Received { key, .. } if key == quiet => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(before <= 3 * usize::from(PIECES), "after {before} of the other");
    end(driver);
}
