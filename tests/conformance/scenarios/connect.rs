//! Outgoing connections.

use std::io::ErrorKind;

use corelane::{CloseReason, Conn, ConnectConfig};

use crate::bed::{Bed, Plan};
use crate::bytes::{pattern, same};
use crate::script::{Log, Script, Step, millis};

pub fn outgoing_connection_carries_data_both_ways(bed: &Bed) {
    let server = bed
        .serve(Plan::listen([]), |script| script.connected(|conn| conn.send("hello").expect("it is open")));
    let foreign = bed.listen();
    let serial = server.connect(ConnectConfig::new(foreign.addr())).expect("it is begun");
    let peer = foreign.accept();
    peer.expect(b"hello");
    peer.send(&pattern(1, 100_000));
    server.received(serial, 100_000);
    same(&server.log().data(serial), &pattern(1, 100_000), "what the foreign server sent");
    peer.close();
    assert_eq!(server.closed(serial), CloseReason::Eof);
    assert_eq!(server.metrics().connected, 1);
}

/// liburing's `connect-rep`: refused stays refused, however often it is tried.
pub fn refused_connect_stays_refused(bed: &Bed) {
    let server = bed.serve(Plan::listen([]), |script| script);
    let (nobody, _kept) = bed.refusing();
    for _ in 0..3 {
        let serial = server.connect(ConnectConfig::new(nobody)).expect("it is begun");
        match server.closed(serial) {
            CloseReason::ConnectFailed(code) => {
                let kind = std::io::Error::from_raw_os_error(code).kind();
                assert_eq!(kind, ErrorKind::ConnectionRefused, "error {code}");
            }
            other => panic!("{other}"),
        }
        assert!(!server.log().has(serial, Step::Connected));
    }
    server.empties();
}

/// A listener whose queue is full answers nothing.
pub fn unanswered_connect_times_out(bed: &Bed) {
    let server = bed.serve(Plan::listen([]), |script| script);
    let (full, _kept) = bed.full();
    let config = ConnectConfig { timeout: millis(150), ..ConnectConfig::new(full) };
    let serial = server.connect(config).expect("it is begun");
    let reason = server.closed(serial);
    if bed.differs() && matches!(reason, CloseReason::ConnectFailed(_)) {
        return;
    }
    assert_eq!(reason, CloseReason::ConnectTimeout);
    server.log().life(serial, |life| {
        let took = life.when(Step::Closed(reason)).expect("it ended").since(life.begun);
        assert!(took >= millis(150), "given up after {took:?}");
        if let Some(slack) = bed.slack() {
            assert!(took <= millis(150) + slack, "given up only after {took:?}");
        }
    });
    server.empties();
}

pub fn connect_taken_back_is_closed_once(bed: &Bed) {
    let server = bed.serve(Plan::listen([]), |script| script);
    let (full, _kept) = bed.full();
    for n in 0..6 {
        let serial = server.connect(ConnectConfig::new(full)).expect("it is begun");
        let id = server.log().id(serial);
        match n % 3 {
            0 => server.tell(move |cx| cx.conn(id).iter_mut().for_each(Conn::close)),
            1 => server.tell(move |cx| cx.conn(id).iter_mut().for_each(Conn::abort)),
            _ => server.remote().close(id).expect("there is room"),
        }
        let reason = server.closed(serial);
        let refused = bed.differs() && matches!(reason, CloseReason::ConnectFailed(_));
        assert!(reason == CloseReason::Local || refused, "{reason}");
        assert!(!server.log().has(serial, Step::Connected));
    }
    server.empties();
}

/// Begun and taken back in one callback: the kernel may never have heard of it.
pub fn connect_taken_back_in_its_own_turn_is_closed_once(bed: &Bed) {
    let server = bed.serve(Plan::listen([]), |script| script);
    let foreign = bed.listen();
    let log = server.log().clone();
    let serials = server.ask({
        let target = foreign.addr();
        move |cx| {
            let begun: Vec<usize> =
                (0..8).map(|_| log.connect(cx, ConnectConfig::new(target)).expect("it is begun")).collect();
            for serial in &begun {
                cx.conn(log.id(*serial)).expect("it is being made").abort();
            }
            begun
        }
    });
    for serial in serials {
        assert_eq!(server.closed(serial), CloseReason::Local);
        assert!(!server.log().has(serial, Step::Connected));
    }
    server.empties();
}

/// Both ends of a connection belong to one worker.
pub fn worker_may_connect_to_itself(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| {
        // The accepted end sends everything back; the other one sends the next byte until it is enough.
        script.connected(|conn| conn.send([0].to_vec()).expect("it is open")).data(|conn, data| {
            for byte in data.iter() {
                let outgoing = conn.state().count == 1;
                if !outgoing {
                    conn.send([*byte].to_vec()).expect("it is open");
                } else if *byte < 100 {
                    conn.send([byte + 1].to_vec()).expect("it is open");
                } else {
                    conn.close();
                }
            }
        })
    });
    let addr = server.addr();
    let log = server.log().clone();
    let serial = server.ask(move |cx| {
        let serial = log.connect(cx, ConnectConfig::new(addr)).expect("it is begun");
        cx.conn(log.id(serial)).expect("it is being made").state().count = 1;
        serial
    });
    assert_eq!(server.closed(serial), CloseReason::Local);
    assert_eq!(server.log().data(serial), (0..=100).collect::<Vec<u8>>());
    server.empties();
    assert_eq!((server.metrics().connected, server.metrics().accepted), (1, 1));
}

pub fn bytes_queued_before_the_connection_is_there_are_sent_first(bed: &Bed) {
    let server = bed
        .serve(Plan::listen([]), |script| script.connected(|conn| conn.send("third").expect("it is open")));
    let foreign = bed.listen();
    let (target, log) = (foreign.addr(), server.log().clone());
    server.tell(move |cx| {
        let serial = log.connect(cx, ConnectConfig::new(target)).expect("it is begun");
        let mut conn = cx.conn(log.id(serial)).expect("it is being made");
        conn.send(pattern(2, 30_000)).expect("it waits");
        conn.send("second").expect("it waits");
    });
    let peer = foreign.accept();
    peer.expect(&pattern(2, 30_000));
    peer.expect(b"secondthird");
}

pub fn close_before_the_connection_is_there_still_sends_what_waits(bed: &Bed) {
    let server = bed.serve(Plan::listen([]), |script| script);
    let foreign = bed.listen();
    let (target, log) = (foreign.addr(), server.log().clone());
    let serial = server.ask(move |cx| {
        let serial = log.connect(cx, ConnectConfig::new(target)).expect("it is begun");
        let mut conn = cx.conn(log.id(serial)).expect("it is being made");
        conn.send("precious").expect("it waits");
        conn.close();
        serial
    });
    let peer = foreign.accept();
    peer.expect(b"precious");
    peer.expect_eof();
    peer.close();
    assert_eq!(server.closed(serial), CloseReason::Local);
}

pub fn hundred_connects_at_once_are_all_made(bed: &Bed) {
    let server = bed.serve(Plan::listen([]), |script: Script| {
        script.echo().connected(|conn| {
            let serial = conn.state().serial;
            conn.send([serial as u8].to_vec()).expect("it is open");
        })
    });
    let foreign = bed.listen();
    let (target, log): (_, Log) = (foreign.addr(), server.log().clone());
    server.tell(move |cx| {
        for _ in 0..100 {
            log.connect(cx, ConnectConfig::new(target)).expect("it is begun");
        }
    });
    let mut seen = [false; 100];
    let mut peers = Vec::new();
    for _ in 0..100 {
        let peer = foreign.accept();
        bed.until("its greeting", || peer.waiting() == 1);
        let greeting = usize::from(peer.take()[0]);
        assert!(!std::mem::replace(&mut seen[greeting], true), "two with one greeting");
        peer.exchange(&pattern(greeting as u64, 1000));
        peers.push(peer);
    }
    assert_eq!(server.metrics().connected, 100);
    assert!(foreign.try_accept().is_none());
    for peer in peers {
        peer.close();
    }
    server.empties();
}
