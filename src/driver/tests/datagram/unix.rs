//! Unix datagram sockets: names, and receivers whose queue is full.

use super::*;

/// Senders with a path, with an abstract name, and without any.
pub(in crate::driver) fn unix_names<D: Driver>(bed: &mut Bed<D>) {
    let (here, there) = (Path::new(), Path::new());
    let socket = bed.open(key(1, 0), &local(Address::Unix(here.address())));
    // With a path.
    let peer = UnixDatagram::bind(&there.0).expect("a socket");
    peer.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    peer.send_to(b"path", &here.0).expect("sent");
    let received = bed.received(socket);
    assert_eq!(&received.bytes[..], b"path");
    let from = received.from.expect("a sender");
    assert!(matches!(&from, Address::Unix(name) if name.as_pathname() == Some(&there.0)), "{from:?}");
    bed.send_now(socket, b"back", Some(from));
    let mut room = [0; 10];
    let (len, from) = persist(|| peer.recv_from(&mut room)).expect("an answer");
    assert_eq!((&room[..len], from.as_pathname()), (&b"back"[..], Some(&*here.0)));
    // With an abstract name, the longest possible and one with zeros in it too.
    let zeros = format!("{}\0\0 and \0", name());
    let long = format!("{:x<107}", name());
    for name in [name(), zeros, long] {
        let address = UnixAddr::from_abstract_name(&name).expect("a name");
        let peer = UnixDatagram::bind_addr(&address).expect("a socket");
        peer.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        peer.send_to(b"abstract", &here.0).expect("sent");
        let received = bed.received(socket);
        let from = received.from.expect("a sender");
        let told = matches!(&from, Address::Unix(from) if from.as_abstract_name() == Some(name.as_bytes()));
        assert!(told, "{from:?} instead of {name:?}");
        bed.send_now(socket, b"back", Some(from));
        assert_eq!(persist(|| peer.recv(&mut room)).expect("an answer"), 4);
    }
    // Without a name; and the driver's own sockets, connected.
    UnixDatagram::unbound().expect("a socket").send_to(b"who", &here.0).expect("sent");
    let received = bed.received(socket);
    assert_eq!((&received.bytes[..], received.from.is_none()), (&b"who"[..], true));
    let nobody = DatagramConfig {
        local: None,
        peer: Some(Address::Unix(here.address())),
        ..local(Address::Unix(there.address()))
    };
    let nobody = bed.open(key(2, 0), &nobody);
    bed.send_now(nobody, b"me", None);
    let received = bed.received(socket);
    assert_eq!((&received.bytes[..], received.from.is_none()), (&b"me"[..], true));
    let abstract_name = UnixAddr::from_abstract_name(name()).expect("a name");
    let named = bed.open(key(3, 0), &local(Address::Unix(abstract_name.clone())));
    bed.send_now(named, b"named", Some(Address::Unix(here.address())));
    let received = bed.received(socket);
    assert!(matches!(&received.from, Some(Address::Unix(from))
        if from.as_abstract_name() == abstract_name.as_abstract_name()));
    bed.send(socket, 1, received.bytes, received.from);
    assert_eq!(bed.sent(socket).1.expect("sent"), 5);
    assert_eq!(&bed.received(named).bytes[..], b"named");
    for key in [socket, nobody, named] {
        bed.close(key);
    }
    assert!(here.0.exists(), "removing the file is not the driver's business");
}

/// Unix datagrams are not lost, and not reordered, when their receiver is slow (unix(7)).
pub(in crate::driver) fn slow_receiver<D: Driver>(bed: &mut Bed<D>) {
    for connected in [true, false] {
        let (peer, peer_address) = unix_peer();
        let to = Address::Unix(peer_address.clone());
        let config = DatagramConfig { local: None, peer: connected.then(|| to.clone()), ..local(to.clone()) };
        let socket = bed.open(key(1, u32::from(connected)), &config);
        for token in 0..DATAGRAM_SENDS {
            bed.send(socket, token, vec![token as u8; 9], (!connected).then(|| to.clone()));
        }
        // Long enough for all that can be sent.
        for _ in 0..3 {
            bed.turn();
        }
        assert!(bed.events.len() < DATAGRAM_SENDS as usize, "the receiver's queue has no limit");
        let mut got = Vec::new();
        let mut room = [0; 10];
        peer.set_nonblocking(true).expect("an option");
        let until = Instant::now() + PATIENCE;
        while got.len() < DATAGRAM_SENDS as usize {
            match peer.recv(&mut room) {
                Ok(len) => {
                    assert_eq!(len, 9);
                    got.push(u32::from(room[0]));
                }
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
            }
            bed.turn();
            assert!(Instant::now() < until, "only {got:?} arrived");
        }
        assert!(got.iter().copied().eq(0..DATAGRAM_SENDS), "connected: {connected}; reordered: {got:?}");
        let mut sent: Vec<_> = (0..DATAGRAM_SENDS).map(|_| bed.sent(socket)).collect();
        sent.sort_by_key(|&(token, _)| token);
        for ((token, result), wanted) in sent.into_iter().zip(0..) {
            assert_eq!((token, result.expect("sent")), (wanted, 9));
        }
        bed.close(socket);
    }
}

/// A receiver's queue that others have filled: when there is room again, the sends go on.
pub(in crate::driver) fn crowded_receiver<D: Driver>(bed: &mut Bed<D>) {
    for connected in [true, false] {
        let (peer, peer_address) = unix_peer();
        let other = UnixDatagram::unbound().expect("a socket");
        other.set_nonblocking(true).expect("an option");
        while other.send_to_addr(b"other", &peer_address).is_ok() {}
        let to = Address::Unix(peer_address.clone());
        let config = DatagramConfig { local: None, peer: connected.then(|| to.clone()), ..local(to.clone()) };
        let socket = bed.open(key(1, u32::from(connected)), &config);
        bed.send(socket, 3, b"mine".to_vec(), (!connected).then(|| to.clone()));
        // It waits without burning a processor.
        let (until, mut waits) = (Instant::now() + Duration::from_millis(100), 0);
        while Instant::now() < until {
            bed.driver.submit_and_wait(Some(Duration::from_millis(20))).expect("a wait");
            bed.events.extend(bed.driver.next_event());
            waits += 1;
        }
        assert!(waits < 500, "{waits} waits in a tenth of a second, connected: {connected}");
        assert!(bed.events.is_empty(), "{:?}", bed.events);
        let mut room = [0; 10];
        while persist(|| peer.recv(&mut room)).expect("a datagram") == 5 {
            peer.set_nonblocking(true).expect("an option");
            if peer.recv(&mut room).is_err() {
                break;
            }
        }
        peer.set_nonblocking(false).expect("an option");
        let (token, result) = bed.sent(socket);
        assert_eq!((token, result.expect("sent")), (3, 4), "connected: {connected}");
        bed.close(socket);
    }
}

/// Nor are they reordered when the receiver makes room at the very moment in which they are sent.
pub(in crate::driver) fn busy_receiver<D: Driver>(bed: &mut Bed<D>) {
    for connected in [true, false] {
        const ALL: u32 = 20 * DATAGRAM_SENDS;
        let (peer, peer_address) = unix_peer();
        let receiver = std::thread::spawn(move || {
            let mut got = Vec::new();
            while got.len() < ALL as usize {
                let mut room = [0; 4];
                match persist(|| peer.recv(&mut room)) {
                    Ok(len) => assert_eq!(len, 4, "after {}", got.len()),
                    Err(error) => panic!("{error} after {} datagrams", got.len()),
                }
                got.push(u32::from_ne_bytes(room));
            }
            got
        });
        let to = Address::Unix(peer_address);
        let config = DatagramConfig { local: None, peer: connected.then(|| to.clone()), ..local(to.clone()) };
        let socket = bed.open(key(1, u32::from(connected)), &config);
        for number in 0..ALL {
            if number >= DATAGRAM_SENDS {
                let (token, result) = bed.sent(socket);
                assert_eq!((token, result.expect("sent")), (number - DATAGRAM_SENDS, 4));
            }
            let bytes = number.to_ne_bytes().to_vec();
            bed.send(socket, number, bytes, (!connected).then(|| to.clone()));
        }
        for _ in 0..DATAGRAM_SENDS {
            assert_eq!(bed.sent(socket).1.expect("sent"), 4);
        }
        let got = receiver.join().expect("a receiver");
        assert!(got.iter().copied().eq(0..ALL), "connected: {connected}; reordered: {got:?}");
        bed.close(socket);
    }
}
