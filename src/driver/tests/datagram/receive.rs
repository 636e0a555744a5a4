//! What arrives, however it does: whole, empty, cut, not at all.

use super::*;

/// What a driver's socket sends back is what std's sent, and each sees the other's address; in both families,
/// connected and not, with the received buffer itself as the answer.
pub(in crate::driver) fn echo<D: Driver>(bed: &mut Bed<D>) {
    for (generation, any) in [(0, "127.0.0.1:0"), (1, "[::1]:0")] {
        let any: SocketAddr = any.parse().expect("an address");
        let peer = match UdpSocket::bind(any) {
            Ok(peer) => peer,
            Err(error) => {
                println!("skipped for {any}: {error}");
                continue;
            }
        };
        peer.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let peer_address = peer.local_addr().expect("its address");
        for connected in [false, true] {
            let key = key(1, generation * 2 + u32::from(connected));
            let target = Address::Inet(peer_address);
            let config =
                DatagramConfig { peer: connected.then(|| target.clone()), ..local(Address::Inet(any)) };
            bed.open(key, &config);
            let to = (!connected).then_some(target);
            bed.send_now(key, b"first", to.clone());
            let mut room = [0; 2000];
            let (len, from) = persist(|| peer.recv_from(&mut room)).expect("a datagram");
            assert_eq!(&room[..len], b"first");
            assert_eq!(from.ip(), any.ip());
            for round in 0..100u32 {
                let bytes = vec![round as u8; (round as usize * 13) % ROOM];
                peer.send_to(&bytes, from).expect("sent");
                let received = bed.received(key);
                assert_eq!(&received.bytes[..], &bytes[..], "round {round}");
                assert_eq!(inet(&received), peer_address);
                assert_eq!((received.segment, received.truncated), (None, false));
                bed.send(key, round, received.bytes, to.clone());
                let (token, result) = bed.sent(key);
                assert_eq!((token, result.expect("sent")), (round, bytes.len()));
                assert_eq!(persist(|| peer.recv_from(&mut room)).expect("an answer"), (bytes.len(), from));
                assert_eq!(&room[..bytes.len()], &bytes[..]);
            }
            bed.close(key);
        }
    }
}

/// Two sockets of one driver.
pub(in crate::driver) fn two_sockets<D: Driver>(bed: &mut Bed<D>) {
    let (a, b) = (bed.open(key(1, 5), &v4()), bed.open(key(2, 6), &v4()));
    let (a_address, b_address) = (bed.address(a), bed.address(b));
    let mut payload = b"ping".to_vec();
    for _ in 0..50 {
        bed.send_now(a, &payload, Some(Address::Inet(b_address)));
        let ping = bed.received(b);
        assert_eq!((&ping.bytes[..], inet(&ping)), (&payload[..], a_address));
        bed.send(b, 1, ping.bytes, ping.from);
        assert_eq!(bed.sent(b).1.expect("sent"), payload.len());
        let pong = bed.received(a);
        assert_eq!((&pong.bytes[..], inet(&pong)), (&payload[..], b_address));
        payload.push(b'.');
    }
    bed.close(a);
    bed.close(b);
}

/// Datagrams of no bytes are datagrams, in both directions, and end nothing.
pub(in crate::driver) fn empty<D: Driver>(bed: &mut Bed<D>) {
    let (peer, peer_address) = udp();
    let socket = bed.open(key(1, 0), &v4());
    let address = bed.address(socket);
    for round in 0..20u8 {
        let payload = vec![round; usize::from(round) % 3];
        peer.send_to(&payload, address).expect("sent");
    }
    for round in 0..20u8 {
        let received = bed.received(socket);
        assert_eq!(
            (&received.bytes[..], inet(&received)),
            (&vec![round; usize::from(round) % 3][..], peer_address)
        );
        assert!(!received.truncated);
    }
    bed.send_now(socket, b"", Some(Address::Inet(peer_address)));
    assert_eq!(persist(|| peer.recv_from(&mut [0; 10])).expect("a datagram"), (0, address));
    bed.close(socket);
    let (peer, peer_address) = unix_peer();
    let name = UnixAddr::from_abstract_name(name()).expect("a name");
    let socket = bed.open(key(1, 1), &local(Address::Unix(name.clone())));
    for payload in [&b""[..], b"", b"x", b""] {
        peer.send_to_addr(payload, &name).expect("sent");
        assert_eq!(&bed.received(socket).bytes[..], payload);
    }
    bed.send_now(socket, b"", Some(Address::Unix(peer_address)));
    assert_eq!(persist(|| peer.recv(&mut [0; 10])).expect("a datagram"), 0);
    bed.close(socket);
}

/// What does not fit into a buffer is cut, and said to be.
pub(in crate::driver) fn truncated<D: Driver>(bed: &mut Bed<D>) {
    let (peer, _) = udp();
    let socket = bed.open(key(1, 0), &v4());
    let address = bed.address(socket);
    for round in 0..30usize {
        let len = [ROOM - 1, ROOM, ROOM + 1, 60_000, 1][round % 5];
        let bytes: Vec<u8> = (0..len).map(|at| (at + round) as u8).collect();
        peer.send_to(&bytes, address).expect("sent");
        let received = bed.received(socket);
        assert_eq!(&received.bytes[..], &bytes[..len.min(ROOM)]);
        assert_eq!(received.truncated, len > ROOM, "{len} bytes");
    }
    bed.close(socket);
}

/// A connected socket is told that nobody listens; then it goes on.
pub(in crate::driver) fn refused<D: Driver>(bed: &mut Bed<D>) {
    let (peer, peer_address) = udp();
    drop(peer);
    let config = DatagramConfig { peer: Some(Address::Inet(peer_address)), ..v4() };
    let socket = bed.open(key(1, 0), &config);
    for _ in 0..3 {
        bed.arm(socket);
        bed.send_now(socket, b"anybody there", None);
        match bed.try_received(socket) {
            Err(RecvEnd::Failed(error)) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused),
            other => panic!("{other:?}"),
        }
        bed.arm(socket);
        bed.turn();
        assert!(bed.events.is_empty(), "{:?}", bed.events);
    }
    // Nobody receives: the next send is told.
    bed.close(socket);
    let socket = bed.open(key(1, 1), &config);
    bed.send_now(socket, b"anybody there", None);
    bed.send(socket, 9, b"and now".to_vec(), None);
    let (token, result) = bed.sent(socket);
    assert_eq!((token, result.expect_err("refused").kind()), (9, std::io::ErrorKind::ConnectionRefused));
    // Now somebody does.
    let peer = UdpSocket::bind(peer_address).expect("the address is free");
    peer.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    bed.send_now(socket, b"and now", None);
    let (_, from) = persist(|| peer.recv_from(&mut [0; 20])).expect("a datagram");
    peer.send_to(b"here", from).expect("sent");
    assert_eq!(&bed.received(socket).bytes[..], b"here");
    // A socket that is not connected is told nothing.
    bed.close(socket);
    bed.turn();
}

/// More datagrams than one looks at in a turn, and than there are buffers: whoever gives them back gets all.
pub(in crate::driver) fn many_received<D: Driver>(bed: &mut Bed<D>) {
    let (peer, _) = udp();
    let socket = bed.open(key(1, 0), &v4());
    let address = bed.address(socket);
    for burst in [1u32, 31, 32, 33, 64, 100] {
        for number in 0..burst {
            peer.send_to(&number.to_ne_bytes(), address).expect("sent");
        }
        for number in 0..burst {
            let received = bed.received_at_last(socket);
            assert_eq!(&received.bytes[..], number.to_ne_bytes(), "of {burst}");
        }
    }
    bed.close(socket);
}

/// Without a buffer receiving ends, and says so; with one it goes on where it was.
pub(in crate::driver) fn no_buffer<D: Driver>(bed: &mut Bed<D>) {
    let (peer, _) = udp();
    let socket = bed.open(key(1, 0), &v4());
    let address = bed.address(socket);
    let count = buffers().count as u8;
    for round in 0..3 {
        for number in 0..count + 2 {
            peer.send_to(&[number], address).expect("sent");
        }
        // The kernel takes a buffer before it looks, so the round before may have ended receiving once more.
        let mut held: Vec<_> = (0..count).map(|_| bed.received_at_last(socket)).collect();
        assert!(held.iter().zip(0..).all(|(received, number)| received.bytes[..] == [number]));
        assert!(matches!(bed.try_received(socket), Err(RecvEnd::NoBuffer)), "round {round}");
        assert!(matches!(bed.try_received(socket), Err(RecvEnd::NoBuffer)), "again, round {round}");
        held.pop();
        assert_eq!(bed.received_at_last(socket).bytes[..], [count]);
        assert_eq!(bed.received_at_last(socket).bytes[..], [count + 1]);
    }
    bed.close(socket);
}

/// A cancelled receive ends with an event and loses nothing.
pub(in crate::driver) fn cancelled<D: Driver>(bed: &mut Bed<D>) {
    let (peer, _) = udp();
    let socket = bed.open(key(1, 0), &v4());
    let address = bed.address(socket);
    let mut got = Vec::new();
    for round in 0..100u8 {
        bed.driver.recv(socket);
        if round % 3 == 0 {
            bed.turn();
        }
        peer.send_to(&[round], address).expect("sent");
        bed.driver.cancel_recv(socket);
        bed.driver.cancel_recv(socket);
        loop {
            let more = bed.wait("an end", |event| match event {
                Event::Received { buf, armed, .. } => {
                    got.push(Received::parse(buf).expect("a datagram").bytes[0]);
                    Ok(armed)
                }
                Event::RecvEnded { end: RecvEnd::Stopped, .. } => Ok(false),
                other => Err(other),
            });
            if !more {
                break;
            }
        }
    }
    while got.len() < 100 {
        got.push(bed.received(socket).bytes[0]);
    }
    assert!(got.iter().copied().eq(0..100), "{got:?}");
    bed.close(socket);
}
