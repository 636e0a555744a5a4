//! Families, and who is told which address.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};

use corelane::{CloseReason, ConnectConfig, ConnectErrorKind, WorkerConfig};

use crate::bed::{Bed, Listen, Plan, config};
use crate::bytes::pattern;
use crate::script::Script;

/// Whether the system has IPv6; says so when it has not.
fn has_ipv6(bed: &Bed) -> bool {
    let has = bed.is_sim() || TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok();
    if !has {
        println!("skipped: this system has no IPv6");
    }
    has
}

fn six() -> Listen {
    Listen { ip: Ipv6Addr::LOCALHOST.into(), ..Listen::default() }
}

fn telling() -> WorkerConfig {
    WorkerConfig { peer_addresses: true, ..config() }
}

pub fn ipv6_echo(bed: &Bed) {
    if !has_ipv6(bed) {
        return;
    }
    let server = bed.serve(Plan { config: telling(), ..Plan::listen([six()]) }, Script::echo);
    assert!(server.addr().is_ipv6());
    let (peer, serial) = server.join();
    peer.exchange(&pattern(1, 50_000));
    assert_eq!(server.log().life(serial, |life| life.peer), Some(peer.addr()));
    peer.shutdown();
    assert_eq!(server.closed(serial), CloseReason::Eof);
}

/// One listener for both families; IPv4 clients are told as mapped addresses.
pub fn dual_stack_listener_takes_both_families(bed: &Bed) {
    if !has_ipv6(bed) {
        return;
    }
    let dual = Listen { ip: Ipv6Addr::UNSPECIFIED.into(), dual_stack: true, ..Listen::default() };
    let server = bed.serve(Plan { config: telling(), ..Plan::listen([dual]) }, Script::echo);
    let port = server.addr().port();
    for ip in [IpAddr::from(Ipv6Addr::LOCALHOST), Ipv4Addr::LOCALHOST.into()] {
        let serial = server.log().begun();
        let peer = bed.connect(SocketAddr::new(ip, port));
        peer.exchange(b"whichever family");
        let told = server.log().life(serial, |life| life.peer).expect("it is told");
        let plain = SocketAddr::new(told.ip().to_canonical(), told.port());
        assert_eq!(plain, peer.addr(), "told as {told}");
    }
}

pub fn listener_of_one_family_takes_only_that(bed: &Bed) {
    if !has_ipv6(bed) {
        return;
    }
    let server = bed.serve(Plan::listen([Listen::default(), six()]), Script::echo);
    let addrs = server.addrs().to_vec();
    assert!(addrs[0].is_ipv4() && addrs[1].is_ipv6());
    for (index, addr) in addrs.into_iter().enumerate() {
        let serial = server.log().begun();
        let peer = bed.connect(addr);
        peer.exchange(b"hello");
        assert_eq!(server.log().life(serial, |life| life.listener), Some(index));
    }
}

pub fn peer_address_is_told_when_asked_for(bed: &Bed) {
    for asked in [true, false] {
        let config = WorkerConfig { peer_addresses: asked, ..config() };
        let server = bed.serve(Plan::config(config), Script::echo);
        for _ in 0..20 {
            let (peer, serial) = server.join();
            peer.exchange(b"who am I");
            let told = server.log().life(serial, |life| life.peer);
            if asked {
                assert_eq!(told, Some(peer.addr()));
            } else {
                assert!(told.is_none_or(|told| told == peer.addr()), "a wrong address: {told:?}");
            }
        }
    }
}

pub fn source_address_of_an_outgoing_connection_is_kept(bed: &Bed) {
    let server = bed.serve(Plan::listen([]), |script| script.connected(|conn| drop(conn.send("hi"))));
    let foreign = bed.listen();
    let ip = IpAddr::from([127, 0, 0, 2]);
    for _ in 0..3 {
        let config =
            ConnectConfig { source: Some(SocketAddr::new(ip, 0)), ..ConnectConfig::new(foreign.addr()) };
        server.connect(config).expect("it is begun");
        let peer = foreign.accept();
        peer.expect(b"hi");
        assert_eq!(peer.addr().ip(), ip);
    }
    let six = SocketAddr::new(Ipv6Addr::LOCALHOST.into(), 0);
    let mixed = ConnectConfig { source: Some(six), ..ConnectConfig::new(foreign.addr()) };
    assert_eq!(server.connect(mixed), Err(ConnectErrorKind::FamilyMismatch));
}
