//! Datagram sockets.

use std::cell::Cell;
use std::rc::Rc;

use super::super::super::{Address, CloseHow, DATAGRAM_SENDS, Datagram, DatagramConfig, PRELUDE, Received};
use super::super::errno;
use super::super::script::Shortage;
use super::*;

const SIZE: u32 = 1024;

pub(super) fn udp(local: SocketAddr) -> DatagramConfig {
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

pub(super) fn connected(local: SocketAddr, peer: SocketAddr) -> DatagramConfig {
    DatagramConfig { peer: Some(Address::Inet(peer)), ..udp(local) }
}

pub(super) fn foreign(port: u16) -> SocketAddr {
    SocketAddr::from(([10, 9, 0, 2], port))
}

fn inet(address: &Address) -> SocketAddr {
    match address {
        Address::Inet(addr) => *addr,
        #[cfg(unix)]
        Address::Unix(name) => panic!("{name:?}"),
    }
}

/// A ring with buffers that datagrams fit into.
fn rig_of(seed: u64, faults: Faults, uring: UringFeatures, count: u32) -> Rig {
    let buffers = BufferConfig { size: SIZE, count, send_count: 0, ..BufferConfig::default() };
    Rig::with(seed, faults, WorkerConfig { buffers, uring, ..WorkerConfig::default() })
}

pub(super) fn rig(seed: u64, faults: Faults) -> Rig {
    rig_of(seed, faults, UringFeatures::ALL, 64)
}

/// Kinds of kernels by how they receive.
fn kernels() -> [UringFeatures; 4] {
    let ready = UringFeatures { provided_buffers: false, ..UringFeatures::ALL };
    [UringFeatures::ALL, UringFeatures::LINUX_5_19, ready, UringFeatures::LEAST]
}

pub(super) fn open(rig: &mut Rig, slot: u32, config: &DatagramConfig) {
    rig.driver.open_datagram(key(slot), config).expect("it opens");
}

pub(super) fn refused(rig: &mut Rig, slot: u32, config: &DatagramConfig) -> i32 {
    let error = rig.driver.open_datagram(key(slot), config).expect_err("it is refused");
    error.raw_os_error().unwrap_or_else(|| panic!("{error}"))
}

pub(super) fn peer(rig: &mut Rig, port: u16) -> u64 {
    rig.world.borrow_mut().open_datagram_peer(foreign(port)).expect("it is free")
}

pub(super) fn peer_sends(rig: &mut Rig, peer: u64, to: SocketAddr, bytes: &[u8]) {
    rig.world.borrow_mut().datagram_peer_sends(peer, to, bytes).expect("it is sent");
}

pub(super) fn send(rig: &mut Rig, slot: u32, token: u32, bytes: &[u8], to: Option<SocketAddr>) {
    let to = to.map(Address::Inet);
    let datagram = Datagram { payload: Payload::from(bytes.to_vec()), to, segment: None };
    rig.driver.send_datagram(key(slot), token, datagram);
}

pub(super) fn peer_received(rig: &mut Rig, peer: u64) -> Vec<(SocketAddr, Vec<u8>)> {
    std::mem::take(rig.world.borrow_mut().datagram_peer_received(peer))
}

/// What was received so far (of a rig that keeps it), with the senders and whether their ends were cut off.
fn received(rig: &mut Rig) -> Vec<(SocketAddr, Vec<u8>, bool)> {
    let taken = rig.kept.drain(..).map(|buf| {
        let received = Received::parse(buf).expect("a driver's layout");
        let from = inet(received.from.as_ref().expect("a sender"));
        assert_eq!(received.segment, None);
        (from, received.bytes.to_vec(), received.truncated)
    });
    taken.collect()
}

pub(super) fn texts(rig: &mut Rig) -> Vec<String> {
    let all = received(rig).into_iter();
    all.map(|(_, bytes, _)| String::from_utf8(bytes).expect("text")).collect()
}

pub(super) fn numbered(n: usize) -> String {
    format!("{n:04}")
}

#[test]
fn datagrams_arrive_whole_once_and_in_order_with_their_senders_on_every_kernel() {
    for uring in kernels() {
        for seed in 0..20 {
            let mut rig = rig_of(seed, Faults::benign(0.1), uring, 64);
            (rig.keep, rig.rearm) = (true, true);
            // What the pool has no room for is not the point here.
            rig.world.borrow_mut().settings.socket_buffer = 1 << 20;
            let one = peer(&mut rig, 1);
            let two = peer(&mut rig, 2);
            open(&mut rig, 0, &udp(addr(53)));
            rig.driver.recv(key(0));
            let mut sent = BTreeMap::<SocketAddr, Vec<Vec<u8>>>::new();
            for n in 0..40 {
                let (peer, port) = if n % 3 == 0 { (one, 1) } else { (two, 2) };
                let bytes = pattern((n * 37) % 500);
                peer_sends(&mut rig, peer, addr(53), &bytes);
                sent.entry(foreign(port)).or_default().push(bytes);
            }
            rig.run(Duration::from_secs(1));
            let mut found = BTreeMap::<SocketAddr, Vec<Vec<u8>>>::new();
            for (from, bytes, truncated) in received(&mut rig) {
                assert!(!truncated);
                found.entry(from).or_default().push(bytes);
            }
            assert_eq!(found, sent, "seed {seed}, {uring:?}");
            assert_eq!(rig.memory.pool.leased(), 0);
            rig.driver.close(key(0), CloseHow::Fin);
            rig.run(millis(100));
            assert_eq!(rig.log.last().map(String::as_str), Some("0 closed"));
            assert_eq!(rig.driver.in_flight(), 0);
            assert!(rig.world.borrow().rings[0].violation().is_none());
        }
    }
}

#[test]
fn without_multishot_each_datagram_ends_its_operation() {
    for uring in [UringFeatures::LINUX_5_19, UringFeatures::LEAST] {
        let mut rig = rig_of(1, Faults::none(), uring, 8);
        let peer = peer(&mut rig, 1);
        open(&mut rig, 0, &udp(addr(53)));
        // An idle socket asks for no buffer.
        while let Some(buf) = rig.memory.pool.lease_with(|_| 1) {
            rig.kept.push(buf);
        }
        rig.driver.recv(key(0));
        rig.run(millis(1));
        assert!(rig.log.is_empty(), "{:?}", rig.log);
        rig.kept.clear();
        peer_sends(&mut rig, peer, addr(53), b"a");
        peer_sends(&mut rig, peer, addr(53), b"b");
        rig.run(millis(10));
        assert_eq!(rig.log, ["0 data armed=false"], "{uring:?}");
        rig.driver.recv(key(0));
        rig.run(millis(10));
        assert_eq!(rig.log.len(), 2);
    }
}

#[test]
fn what_is_sent_reaches_a_peer_and_another_socket_with_its_size_as_the_result() {
    let mut rig = rig(2, Faults::none());
    rig.keep = true;
    let peer = peer(&mut rig, 1);
    open(&mut rig, 0, &udp(addr(0)));
    open(&mut rig, 1, &connected(addr(0), foreign(1)));
    open(&mut rig, 2, &udp(addr(7)));
    rig.driver.recv(key(2));
    let mut locals = Vec::new();
    for slot in 0..3 {
        let addresses = rig.driver.addresses(key(slot)).expect("known");
        let local = inet(&addresses.local);
        assert_ne!(local.port(), 0);
        let is_peer = matches!(addresses.peer, Some(Address::Inet(peer)) if peer == foreign(1));
        assert_eq!(is_peer, slot == 1);
        locals.push(local);
    }
    let results = Rc::new(Cell::new(0));
    send(&mut rig, 0, 7, b"to a peer", Some(foreign(1)));
    send(&mut rig, 1, 0, b"", None);
    send(&mut rig, 0, 8, b"to a socket", Some(addr(7)));
    // A connected socket may still name another.
    send(&mut rig, 1, 1, b"elsewhere", Some(addr(7)));
    let now = rig.now();
    while rig.driver.in_flight() > 1 && rig.now() < now + millis(100) {
        rig.driver.submit_and_wait(None).expect("simulated");
        while let Some(event) = rig.driver.next_event() {
            match event {
                Event::DatagramSent { key, token, result } => {
                    let bytes = result.expect("sent");
                    let expected = match (key.slot, token) {
                        (0, 7) => 9,
                        (0, 8) => 11,
                        (1, 0) => 0,
                        (1, 1) => 9,
                        other => panic!("{other:?}"),
                    };
                    assert_eq!(bytes, expected);
                    results.set(results.get() + 1);
                }
                other => rig.note(other),
            }
        }
        let at = rig.world.borrow().next_time();
        if let Some(at) = at {
            rig.world.borrow_mut().advance(at);
        }
    }
    assert_eq!(results.get(), 4);
    rig.run(millis(10));
    let mut found = peer_received(&mut rig, peer);
    found.sort_unstable();
    let mut expected = vec![(locals[0], b"to a peer".to_vec()), (locals[1], Vec::new())];
    expected.sort_unstable();
    assert_eq!(found, expected);
    let mut found = received(&mut rig);
    found.sort_unstable();
    let mut expected =
        vec![(locals[0], b"to a socket".to_vec(), false), (locals[1], b"elsewhere".to_vec(), false)];
    expected.sort_unstable();
    assert_eq!(found, expected);
}

#[test]
fn segments_arrive_as_datagrams_and_too_many_are_refused() {
    let mut rig = rig(3, Faults::none());
    let peer = peer(&mut rig, 1);
    open(&mut rig, 0, &connected(addr(0), foreign(1)));
    let bytes = pattern(1_050);
    let cut = |len: usize, segment| Datagram {
        payload: Payload::from(bytes[..len].to_vec()),
        to: None,
        segment: Some(segment),
    };
    rig.driver.send_datagram(key(0), 0, cut(1_050, 100));
    rig.run(millis(10));
    let parts: Vec<Vec<u8>> = peer_received(&mut rig, peer).into_iter().map(|(_, bytes)| bytes).collect();
    let expected: Vec<Vec<u8>> = bytes.chunks(100).map(<[u8]>::to_vec).collect();
    assert_eq!(parts, expected);
    assert_eq!(parts[10].len(), 50);
    // 64 at most.
    rig.driver.send_datagram(key(0), 1, cut(640, 10));
    rig.driver.send_datagram(key(0), 2, cut(641, 10));
    rig.run(millis(10));
    assert_eq!(peer_received(&mut rig, peer).len(), 64);
    // A single one needs no cutting.
    rig.driver.send_datagram(key(0), 3, cut(100, 100));
    rig.driver.send_datagram(key(0), 4, cut(0, 100));
    rig.run(millis(10));
    assert_eq!(peer_received(&mut rig, peer).len(), 2);
}

/// The error of a send that was given alone.
fn fails(rig: &mut Rig, slot: u32, datagram: Datagram) -> i32 {
    rig.driver.send_datagram(key(slot), 9, datagram);
    for _ in 0..100 {
        rig.driver.submit_and_wait(None).expect("simulated");
        match rig.driver.next_event() {
            Some(Event::DatagramSent { token: 9, result, .. }) => {
                return result.expect_err("it cannot be sent").raw_os_error().expect("of the system");
            }
            Some(other) => panic!("{other:?}"),
            None => {}
        }
        let at = rig.world.borrow().next_time();
        if let Some(at) = at {
            rig.world.borrow_mut().advance(at);
        }
    }
    panic!("no result");
}

#[test]
fn what_cannot_be_sent_fails_as_on_linux() {
    let mut rig = rig(4, Faults::none());
    open(&mut rig, 0, &udp(addr(1)));
    let datagram = |len: usize, to: Option<SocketAddr>| Datagram {
        payload: Payload::from(vec![0; len]),
        to: to.map(Address::Inet),
        segment: None,
    };
    let v6 = SocketAddr::from(([0xfd00, 0, 0, 0, 0, 0, 0, 1], 1));
    assert_eq!(fails(&mut rig, 0, datagram(1, None)), errno::EDESTADDRREQ);
    assert_eq!(fails(&mut rig, 0, datagram(1, Some(v6))), errno::EAFNOSUPPORT);
    assert_eq!(fails(&mut rig, 0, datagram(1, Some(foreign(0)))), errno::EINVAL);
    assert_eq!(fails(&mut rig, 0, datagram(65_508, Some(foreign(1)))), errno::EMSGSIZE);
    let all = SocketAddr::from(([255; 4], 1));
    assert_eq!(fails(&mut rig, 0, datagram(1, Some(all))), errno::EACCES);
    let cut = Datagram { segment: Some(1), ..datagram(65, Some(foreign(1))) };
    assert_eq!(fails(&mut rig, 0, cut), errno::EINVAL);
    #[cfg(unix)]
    {
        let name = std::os::unix::net::SocketAddr::from_pathname("/x").expect("a path");
        let unix = Datagram { to: Some(Address::Unix(name.clone())), ..datagram(1, None) };
        assert_eq!(fails(&mut rig, 0, unix), errno::EAFNOSUPPORT);
        let config = DatagramConfig { local: Some(Address::Unix(name)), ..udp(addr(1)) };
        let error = rig.driver.open_datagram(key(1), &config).expect_err("not simulated");
        assert_eq!(error.kind(), std::io::ErrorKind::Unsupported);
        assert!(error.to_string().contains("not simulated"), "{error}");
    }
    rig.script(When::next(), Fault::DatagramError(Shortage::Memory));
    assert_eq!(fails(&mut rig, 0, datagram(1, Some(foreign(1)))), errno::ENOMEM);
    assert_eq!(rig.driver.in_flight(), 0);
}

#[test]
fn an_address_is_of_one_socket_unless_all_share_it() {
    let mut rig = rig(5, Faults::none());
    let shared = DatagramConfig { reuse_port: true, ..udp(addr(1)) };
    open(&mut rig, 0, &udp(addr(1)));
    assert_eq!(refused(&mut rig, 1, &udp(addr(1))), errno::EADDRINUSE);
    assert_eq!(refused(&mut rig, 1, &shared), errno::EADDRINUSE);
    let taken = rig.world.borrow_mut().open_datagram_peer(addr(1));
    assert_eq!(taken, Err(errno::EADDRINUSE));
    // A TCP listener has ports of its own.
    let _listener = rig.listen(2, 1);
    open(&mut rig, 1, &udp(addr(2)));
    rig.driver.close(key(0), CloseHow::Fin);
    rig.run(millis(1));
    open(&mut rig, 0, &shared);
    open(&mut rig, 2, &shared);
    assert_eq!(refused(&mut rig, 3, &udp(addr(1))), errno::EADDRINUSE);
    let v6 = SocketAddr::from(([0xfd00, 0, 0, 0, 0, 0, 0, 1], 1));
    assert_eq!(refused(&mut rig, 3, &connected(addr(3), v6)), errno::EAFNOSUPPORT);
    // Nothing is left of what was refused.
    open(&mut rig, 3, &udp(addr(3)));

    // Each sender has its socket, and both sockets have senders.
    rig.driver.recv(key(0));
    rig.driver.recv(key(2));
    let peers: Vec<u64> = (1..=16).map(|port| peer(&mut rig, port)).collect();
    for (n, peer) in peers.iter().enumerate() {
        for _ in 0..3 {
            peer_sends(&mut rig, *peer, addr(1), numbered(n).as_bytes());
        }
    }
    rig.run(millis(10));
    let (a, b) = (&rig.data[&0], &rig.data[&2]);
    assert_eq!(a.len() + b.len(), 16 * 3 * (PRELUDE + 4));
    for each in [a, b] {
        assert_eq!(each.len() % (3 * (PRELUDE + 4)), 0);
    }
    for n in 0..16 {
        let n = numbered(n);
        let of = |all: &Vec<u8>| all.chunks(PRELUDE + 4).filter(|one| one.ends_with(n.as_bytes())).count();
        assert!([(0, 3), (3, 0)].contains(&(of(a), of(b))), "sender {n}");
    }
}

#[test]
fn a_connected_socket_hears_its_peer_alone_and_before_others() {
    let mut rig = rig(6, Faults::none());
    rig.keep = true;
    let (mine, other) = (peer(&mut rig, 1), peer(&mut rig, 2));
    let shared = |config: DatagramConfig| DatagramConfig { reuse_port: true, ..config };
    open(&mut rig, 0, &shared(connected(addr(9), foreign(1))));
    rig.driver.recv(key(0));
    peer_sends(&mut rig, other, addr(9), b"from a stranger");
    peer_sends(&mut rig, mine, addr(9), b"from the peer");
    rig.run(millis(10));
    assert_eq!(received(&mut rig), [(foreign(1), b"from the peer".to_vec(), false)]);
    open(&mut rig, 1, &shared(udp(addr(9))));
    rig.driver.recv(key(1));
    rig.log.clear();
    peer_sends(&mut rig, mine, addr(9), b"a");
    peer_sends(&mut rig, other, addr(9), b"b");
    rig.run(millis(10));
    rig.log.sort_unstable();
    assert_eq!(rig.log, ["0 data armed=true", "1 data armed=true"]);
}

#[test]
fn a_connected_socket_is_told_once_when_nobody_has_the_address() {
    for (seed, uring) in (0..20).flat_map(|seed| kernels().map(|uring| (seed, uring))) {
        let mut rig = rig_of(seed, Faults::none(), uring, 8);
        open(&mut rig, 0, &connected(addr(1), foreign(1)));
        open(&mut rig, 1, &udp(addr(2)));
        rig.driver.recv(key(0));
        rig.driver.recv(key(1));
        send(&mut rig, 0, 0, b"anybody?", None);
        send(&mut rig, 1, 0, b"anybody?", Some(foreign(1)));
        rig.run(millis(10));
        let failed = format!("0 failed {}", errno::ECONNREFUSED);
        assert_eq!(rig.count(&failed), 1, "{:?}", rig.log);
        assert_eq!(rig.log.len(), 3, "two were sent, one failed: {:?}", rig.log);
        // With nobody receiving, the next send is told instead.
        send(&mut rig, 0, 1, b"really?", None);
        rig.run(millis(10));
        let nothing = Datagram { payload: Payload::from(vec![1]), to: None, segment: None };
        assert_eq!(fails(&mut rig, 0, nothing), errno::ECONNREFUSED);
        // And then it goes on.
        let peer = peer(&mut rig, 1);
        send(&mut rig, 0, 2, b"there", None);
        rig.driver.recv(key(0));
        rig.run(millis(10));
        assert_eq!(peer_received(&mut rig, peer).len(), 1);
        assert_eq!(rig.count(&failed), 1);
    }
}

#[test]
fn an_error_comes_before_what_waits() {
    let mut rig = rig(8, Faults::none());
    rig.keep = true;
    let peer = peer(&mut rig, 1);
    open(&mut rig, 0, &connected(addr(1), foreign(1)));
    peer_sends(&mut rig, peer, addr(1), b"farewell");
    rig.run(millis(10));
    rig.world.borrow_mut().close_datagram_sock(peer);
    send(&mut rig, 0, 0, b"?", None);
    rig.run(millis(10));
    rig.log.clear();
    rig.driver.recv(key(0));
    rig.run(millis(1));
    assert_eq!(rig.log, [format!("0 failed {}", errno::ECONNREFUSED)]);
    rig.driver.recv(key(0));
    rig.run(millis(1));
    assert_eq!(texts(&mut rig), ["farewell"]);
}

#[test]
fn what_does_not_fit_into_a_buffer_is_cut_off_and_what_finds_no_room_is_dropped() {
    let mut rig = rig(9, Faults::none());
    rig.keep = true;
    let peer = peer(&mut rig, 1);
    open(&mut rig, 0, &DatagramConfig { recv_buffer: Some(3_000), ..udp(addr(1)) });
    let room = SIZE as usize - PRELUDE;
    let long = pattern(60_000);
    // One longer than all the room fits, since it is the first.
    peer_sends(&mut rig, peer, addr(1), &long);
    peer_sends(&mut rig, peer, addr(1), b"dropped");
    rig.run(millis(1));
    rig.driver.recv(key(0));
    rig.run(millis(1));
    assert_eq!(received(&mut rig), [(foreign(1), long[..room].to_vec(), true)]);
    peer_sends(&mut rig, peer, addr(1), &long[..room]);
    rig.run(millis(1));
    assert_eq!(received(&mut rig), [(foreign(1), long[..room].to_vec(), false)]);
    rig.driver.cancel_recv(key(0));
    rig.run(millis(10));
    // Empty ones take room too.
    for _ in 0..100 {
        peer_sends(&mut rig, peer, addr(1), b"");
    }
    rig.run(millis(10));
    rig.rearm = true;
    rig.driver.recv(key(0));
    rig.run(millis(10));
    assert_eq!(received(&mut rig).len(), 3_000 / 256 + 1);
}

#[test]
fn datagrams_wait_for_a_buffer_in_their_socket() {
    for uring in kernels() {
        let mut rig = rig_of(10, Faults::none(), uring, 4);
        (rig.keep, rig.rearm) = (true, false);
        let peer = peer(&mut rig, 1);
        open(&mut rig, 0, &udp(addr(1)));
        rig.driver.recv(key(0));
        for n in 0..10 {
            peer_sends(&mut rig, peer, addr(1), numbered(n).as_bytes());
        }
        rig.run(millis(10));
        let mut all = Vec::new();
        for _ in 0..20 {
            let mut got = texts(&mut rig);
            assert!(got.len() <= 4);
            all.append(&mut got);
            if rig.driver.in_flight() == 0 {
                rig.driver.recv(key(0));
            }
            rig.run(millis(10));
        }
        let expected: Vec<String> = (0..10).map(numbered).collect();
        assert_eq!(all, expected, "{uring:?}");
        let starved = rig.count("0 NoBuffer");
        assert!(starved > 0 || !uring.multishot_recv, "{uring:?}: {:?}", rig.log);
    }
}

#[test]
fn a_cancelled_receive_ends_once_and_loses_nothing() {
    let mut raced = 0;
    for seed in 0..100 {
        let uring = kernels()[seed as usize % 4];
        let mut rig = rig_of(seed, Faults { late_completion: 0.2, ..Faults::none() }, uring, 8);
        rig.keep = true;
        let peer = peer(&mut rig, 1);
        open(&mut rig, 0, &udp(addr(1)));
        rig.driver.recv(key(0));
        rig.run(millis(1));
        peer_sends(&mut rig, peer, addr(1), b"late");
        let now = rig.now();
        rig.world.borrow_mut().advance(now + Duration::from_micros(seed * 4));
        rig.driver.cancel_recv(key(0));
        rig.driver.cancel_recv(key(0));
        rig.run(millis(50));
        assert_eq!(rig.driver.in_flight(), 0, "{:?}", rig.log);
        let once = rig.count("0 Stopped") + rig.count("0 data armed=false");
        assert_eq!(once, 1, "{:?}", rig.log);
        let early = rig.kept.len();
        raced += early;
        rig.driver.recv(key(0));
        rig.run(millis(10));
        assert_eq!(texts(&mut rig), ["late"]);
    }
    assert!((5..95).contains(&raced), "both happen: {raced} of 100");
}

#[test]
fn a_close_with_everything_under_way_reports_itself_alone_and_frees_the_address() {
    for seed in 0..200 {
        let faults = Faults { late_completion: 0.3, lost_cancel: 0.3, ..Faults::none() };
        let mut rig = rig_of(seed, faults, kernels()[seed as usize % 4], 8);
        let peer = peer(&mut rig, 1);
        open(&mut rig, 0, &udp(addr(1)));
        rig.driver.recv(key(0));
        for token in 0..DATAGRAM_SENDS {
            send(&mut rig, 0, token, b"perhaps", Some(foreign(1)));
        }
        if seed % 3 > 0 {
            peer_sends(&mut rig, peer, addr(1), b"to nobody soon");
            rig.turn();
            let now = rig.now();
            rig.world.borrow_mut().advance(now + Duration::from_micros(seed));
        }
        rig.log.clear();
        rig.driver.close(key(0), if seed % 2 == 0 { CloseHow::Fin } else { CloseHow::Reset });
        rig.run(millis(100));
        assert_eq!(rig.log.iter().filter(|line| !line.contains("closed")).count(), 0, "{:?}", rig.log);
        assert_eq!(rig.log, ["0 closed"]);
        assert_eq!((rig.driver.in_flight(), rig.memory.pool.leased()), (0, 0));
        assert!(rig.world.borrow().rings[0].ops.is_empty());
        let next = Key { slot: 0, generation: 2 };
        rig.driver.open_datagram(next, &udp(addr(1))).expect("the address is free");
        assert_eq!(rig.counters.stale.get(), 0);
    }
}

#[test]
fn every_send_is_answered_under_its_token_in_any_order() {
    let mut orders = std::collections::BTreeSet::new();
    for seed in 0..30 {
        let mut rig = rig(seed, Faults::benign(0.2));
        let peer = peer(&mut rig, 1);
        open(&mut rig, 0, &connected(addr(1), foreign(1)));
        for token in (0..DATAGRAM_SENDS).rev() {
            send(&mut rig, 0, token, numbered(token as usize).as_bytes(), None);
        }
        rig.run(millis(100));
        orders.insert(rig.log.clone());
        let mut tokens: Vec<&str> = rig.log.iter().filter_map(|line| line.split(' ').nth(2)).collect();
        tokens.sort_unstable_by_key(|token| token.parse::<u32>().expect("a token"));
        let expected: Vec<String> = (0..DATAGRAM_SENDS).map(|token| token.to_string()).collect();
        assert_eq!(tokens, expected);
        assert_eq!(peer_received(&mut rig, peer).len(), DATAGRAM_SENDS as usize);
        assert_eq!(rig.driver.in_flight(), 0);
    }
    assert!(orders.len() > 20, "{} orders", orders.len());
}

#[test]
#[should_panic(expected = "too many datagrams under way")]
fn one_send_more_than_there_may_be_breaks_the_contract() {
    let mut rig = rig(1, Faults::none());
    open(&mut rig, 0, &udp(addr(1)));
    for token in 0..=DATAGRAM_SENDS {
        send(&mut rig, 0, token, b"", Some(foreign(1)));
    }
}

#[test]
#[should_panic(expected = "is a datagram socket")]
fn a_chain_for_a_datagram_socket_breaks_the_contract() {
    let mut rig = rig(1, Faults::none());
    open(&mut rig, 0, &udp(addr(1)));
    rig.send(0, vec![0; 9]);
}

#[test]
fn buffers_too_small_for_an_address_are_refused_by_name() {
    let mut rig = Rig::new(1, Faults::none());
    let error = rig.driver.open_datagram(key(0), &udp(addr(1))).expect_err("too small");
    assert!(error.to_string().contains("BufferConfig::size"), "{error}");
}
