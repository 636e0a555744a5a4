//! Sends: many at once, cut by the kernel, under way when everything ends.

use super::*;

/// As many sends as may be under way, given in one turn: each is told once, in the order given, with what is its
/// own; the one that is too large stops none.
pub(in crate::driver) fn many_sends<D: Driver>(bed: &mut Bed<D>) {
    let (peer, peer_address) = udp();
    let socket = bed.open(key(1, 0), &v4());
    for round in 0..5 {
        for token in 0..DATAGRAM_SENDS {
            let len = if token == 20 { 70_000 } else { token as usize * 3 };
            bed.send(socket, token, vec![token as u8; len], Some(Address::Inet(peer_address)));
        }
        for wanted in 0..DATAGRAM_SENDS {
            let (token, result) = bed.sent(socket);
            assert_eq!(token, wanted, "round {round}");
            match result {
                Ok(len) => assert_eq!(len, token as usize * 3),
                Err(error) => assert_eq!((token, error.raw_os_error()), (20, Some(libc::EMSGSIZE))),
            }
        }
        let mut room = [0; 1000];
        for token in (0..DATAGRAM_SENDS).filter(|&token| token != 20) {
            let (len, _) = persist(|| peer.recv_from(&mut room)).expect("a datagram");
            assert_eq!(&room[..len], &vec![token as u8; token as usize * 3][..]);
        }
    }
    bed.close(socket);
}

/// The kernel cuts, and joins again.
pub(in crate::driver) fn segments<D: Driver>(bed: &mut Bed<D>) {
    let (peer, peer_address) = udp();
    let config = DatagramConfig { gro: true, ..v4() };
    let (sender, receiver) = (bed.open(key(1, 0), &v4()), bed.open(key(2, 0), &config));
    let address = bed.address(receiver);
    let bytes: Vec<u8> = (0..800u32).map(|at| (at / 3) as u8).collect();
    for (to, segment) in [(peer_address, 100u16), (peer_address, 300), (address, 100), (address, 300)] {
        let payload = bytes.clone().into();
        let datagram = Datagram { payload, to: Some(Address::Inet(to)), segment: Some(segment) };
        bed.driver.send_datagram(sender, u32::from(segment), datagram);
        let (token, result) = bed.sent(sender);
        assert_eq!(token, u32::from(segment));
        match result {
            Ok(len) => assert_eq!(len, 800),
            Err(error) => {
                println!("skipped: this kernel does not cut datagrams: {error}");
                break;
            }
        }
        let mut got = Vec::new();
        if to == peer_address {
            let mut room = [0; 1000];
            while got.len() < 800 {
                let (len, _) = persist(|| peer.recv_from(&mut room)).expect("a piece");
                assert_eq!(len, (800 - got.len()).min(segment.into()));
                got.extend_from_slice(&room[..len]);
            }
        } else {
            let mut joined = 0;
            while got.len() < 800 {
                let received = bed.received(receiver);
                assert!(!received.truncated);
                if let Some(size) = received.segment {
                    assert_eq!(size, segment);
                    joined += 1;
                }
                got.extend_from_slice(&received.bytes);
            }
            assert!(joined > 0, "nothing of {segment} was joined");
        }
        assert_eq!(got, bytes);
    }
    bed.close(sender);
    bed.close(receiver);
}

/// A close with a receive and sends under way: nothing but `Closed`, and every buffer comes back.
pub(in crate::driver) fn close_in_flight<D: Driver>(bed: &mut Bed<D>) {
    let pool = bed.driver.memory().pool.clone();
    for generation in 0..30 {
        let (peer, peer_address) = unix_peer();
        let to = Address::Unix(peer_address);
        let connected = generation % 2 == 0;
        let here = UnixAddr::from_abstract_name(name()).expect("a name");
        let config =
            DatagramConfig { peer: connected.then(|| to.clone()), ..local(Address::Unix(here.clone())) };
        let socket = bed.open(key(1, generation), &config);
        bed.arm(socket);
        let mut held = Vec::new();
        for _ in 0..3 {
            peer.send_to_addr(b"mine", &here).expect("sent");
            held.push(bed.received(socket).bytes);
        }
        for token in 0..DATAGRAM_SENDS {
            let lease = held[token as usize % 3].clone();
            bed.send(socket, token, lease, (!connected).then(|| to.clone()));
        }
        drop(held);
        if generation % 3 != 0 {
            bed.turn();
            bed.turn();
            assert!(pool.leased() > 0, "some sends wait");
        }
        if generation % 5 == 0 {
            peer.send_to_addr(b"too late", &here).expect("sent");
        }
        bed.close(socket);
        assert_eq!((pool.leased(), bed.driver.in_flight()), (0, 0), "generation {generation}");
    }
}

/// A driver that ends with everything in flight gets it back.
pub(in crate::driver) fn end_in_flight<D: Driver>(mut bed: Bed<D>) {
    let (_peer, peer_address) = unix_peer();
    let to = Address::Unix(peer_address);
    let config = DatagramConfig { local: None, peer: Some(to.clone()), ..local(to) };
    let socket = bed.open(key(1, 0), &config);
    let other = bed.open(key(2, 0), &v4());
    bed.arm(socket);
    bed.arm(other);
    for token in 0..DATAGRAM_SENDS {
        bed.send(socket, token, vec![1; 10], None);
    }
    bed.turn();
    bed.end_in_flight();
}
