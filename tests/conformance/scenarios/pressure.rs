//! Readers that are slow, queues that are full, buffers that are out.

use corelane::{BufferConfig, CloseReason, SendErrorKind, WorkerConfig};

use crate::bed::{Bed, Listen, Peer, Plan, config};
use crate::bytes::{pattern, same};
use crate::script::{Step, millis};

pub fn congested_connection_becomes_writable_once(bed: &Bed) {
    let worker = WorkerConfig { high_water: 256 << 10, low_water: 64 << 10, ..config() };
    let server = bed.serve(Plan { config: worker, ..Plan::listen([Listen::narrow()]) }, |script| {
        script.data(|conn, _| {
            assert!(!conn.is_congested());
            conn.send(pattern(1, 1 << 20)).expect("room");
            assert!(conn.is_congested());
            assert_eq!(conn.unsent(), 1 << 20);
        })
    });
    let (peer, serial) = server.join_narrow();
    for round in 1..=2 {
        peer.set_reading(false);
        peer.send(b"?");
        bed.until("its congestion", || server.metrics().congested == round);
        bed.pass(millis(5));
        let writable = |life: &crate::script::Life| life.count(Step::Writable);
        assert_eq!(server.log().life(serial, writable) as u64, round - 1);
        assert!(server.on(serial, |conn| conn.is_congested()));
        peer.set_reading(true);
        peer.expect(&pattern(1, 1 << 20));
        bed.until("it to be writable", || server.log().life(serial, writable) as u64 == round);
        server.counters("everything to be sent", |total| total.bytes_sent == round << 20);
    }
    let unsent = server.on(serial, |conn| (conn.unsent(), conn.is_congested()));
    assert_eq!(unsent, (0, false));
    assert_eq!(server.log().life(serial, |life| life.count(Step::Writable)), 2);
}

pub fn full_queue_gives_the_payload_back(bed: &Bed) {
    let worker = WorkerConfig { high_water: 64 << 10, send_limit: 512 << 10, ..config() };
    let server = bed.serve(Plan { config: worker, ..Plan::listen([Listen::narrow()]) }, |script| {
        script
            .data(|conn, _| {
                // Until it is refused; what was taken is what arrives.
                loop {
                    let payload = pattern(conn.state().count as u64, 100_000);
                    match conn.send(payload) {
                        Ok(()) => conn.state().count += 1,
                        Err(refused) => {
                            assert_eq!(refused.kind, SendErrorKind::Full);
                            same(
                                refused.payload.as_slice(),
                                &pattern(conn.state().count as u64, 100_000),
                                "what came back",
                            );
                            break;
                        }
                    }
                }
            })
            .writable(|conn| conn.send("there is room again").expect("room"))
    });
    let (peer, serial) = server.join_narrow();
    peer.set_reading(false);
    peer.send(b"?");
    server.counters("a refusal", |total| total.send_refusals == 1);
    let count = server.on(serial, |conn| conn.state().count);
    assert_eq!(count, 6, "512 KiB are reached by the sixth");
    peer.set_reading(true);
    for n in 0..count {
        peer.expect(&pattern(n as u64, 100_000));
    }
    peer.expect(b"there is room again");
}

/// An echo server and a peer that does not read: what waits is bounded, and the peer is slowed down.
pub fn reader_that_stalls_stalls_only_its_own_sending(bed: &Bed) {
    let server = bed.serve(Plan::listen([Listen::narrow()]), |script| script.echo());
    let (peer, serial) = server.join_narrow();
    let (other, _) = server.join();
    let bytes = pattern(2, bed.size(16 << 20, 1 << 20));
    peer.set_reading(false);
    peer.send(&bytes);
    bed.until("its congestion", || server.metrics().congested > 0);
    for n in 0..20 {
        other.exchange(&pattern(n, 5000));
        let unsent = server.on(serial, |conn| conn.unsent());
        // The mark, and what one turn may bring on top of it.
        assert!(unsent <= (64 << 10) + 128 * 2048, "{unsent} bytes wait");
    }
    assert!(!peer.sent_all(), "everything went through a server that keeps 64 KiB");
    peer.set_reading(true);
    peer.expect(&bytes);
}

/// liburing's `recv-mshot-drain` and `buf-ring-stress`: the pool runs dry again and again, and every stream
/// stays whole.
pub fn more_senders_than_buffers_are_all_answered(bed: &Bed) {
    let buffers = BufferConfig { size: 1024, count: 4, send_count: 0, ..BufferConfig::default() };
    let server = bed.serve(Plan::config(WorkerConfig { buffers, ..config() }), |script| script.echo());
    let peers: Vec<Peer> = (0..24).map(|_| server.join().0).collect();
    for round in 0..bed.rounds(6, 2) {
        for (n, peer) in peers.iter().enumerate() {
            peer.send(&pattern((round * 100 + n) as u64, 20_000));
        }
        for (n, peer) in peers.iter().enumerate() {
            peer.expect(&pattern((round * 100 + n) as u64, 20_000));
        }
    }
    for peer in &peers {
        peer.close();
    }
    server.empties();
}

/// The handler itself keeps every buffer; when it lets go, everybody goes on.
pub fn pool_kept_by_the_handler_recovers(bed: &Bed) {
    let buffers = BufferConfig { size: 512, count: 8, send_count: 0, ..BufferConfig::default() };
    let server = bed.serve(Plan::config(WorkerConfig { buffers, ..config() }), |script| {
        script.data(|conn, data| conn.state().kept.push(data))
    });
    let (keeper, keeping) = server.join();
    let bytes = pattern(3, 30_000);
    keeper.send(&bytes);
    let (other, serial) = server.join();
    other.send(&pattern(4, 10_000));
    bed.until("the pool to be out", || server.metrics().buffers_out == 8);
    // Some are on their way to the handler when it lets go of the others, so it takes several times.
    for _ in 0..2000 {
        for serial in [keeping, serial] {
            server.on(serial, |conn| conn.state().kept.clear());
        }
        bed.pass(millis(1));
        if server.log().data_len(keeping) + server.log().data_len(serial) == 40_000 {
            break;
        }
    }
    server.received(keeping, 30_000);
    server.received(serial, 10_000);
    same(&server.log().data(keeping), &bytes, "the keeper's stream");
    same(&server.log().data(serial), &pattern(4, 10_000), "the other's stream");
    // A handler that kept the last buffer could not expect to be told of an end.
    for serial in [keeping, serial] {
        server.on(serial, |conn| conn.state().kept.clear());
    }
    keeper.close();
    other.close();
    server.empties();
}

/// With the pool empty, a receive that would find only the end may find no buffer instead: the end is told
/// all the same, at the latest when a buffer is back.
pub fn end_hidden_behind_exhaustion_is_seen(bed: &Bed) {
    let buffers = BufferConfig { size: 512, count: 4, send_count: 0, ..BufferConfig::default() };
    let server = bed.serve(Plan::config(WorkerConfig { buffers, ..config() }), |script| {
        script.data(|conn, data| conn.state().kept.push(data))
    });
    let (keeper, _) = server.join();
    let leaving: Vec<(Peer, usize)> = (0..6).map(|_| server.join()).collect();
    keeper.send(&[7; 10_000]);
    bed.until("the pool to be out", || server.metrics().buffers_out == 4);
    for (n, (peer, _)) in leaving.iter().enumerate() {
        if n % 2 == 0 {
            peer.shutdown();
        } else {
            peer.send(b"bye");
            peer.shutdown();
        }
    }
    bed.pass(millis(20));
    // Let go of what is kept, as often as it takes: what comes in between takes buffers too.
    for _ in 0..1000 {
        server.ask(|cx| {
            let ids: Vec<_> = cx.ids().collect();
            for id in ids {
                cx.conn(id).expect("it is open").state().kept.clear();
            }
        });
        bed.pass(millis(1));
        if leaving.iter().all(|(_, serial)| server.log().closed(*serial).is_some()) {
            break;
        }
    }
    for (n, (peer, serial)) in leaving.iter().enumerate() {
        assert_eq!(server.log().closed(*serial), Some(CloseReason::Eof));
        assert_eq!(server.log().data(*serial), if n % 2 == 0 { &b""[..] } else { b"bye" });
        peer.expect_eof();
    }
}

/// Peers that do not read keep every buffer in their queues: the others are served all the same.
pub fn buffers_kept_by_slow_readers_are_taken_back(bed: &Bed) {
    let buffers = BufferConfig { size: 1024, count: 16, send_count: 0, ..BufferConfig::default() };
    let worker = WorkerConfig { buffers, ..config() };
    let server =
        bed.serve(Plan { config: worker, ..Plan::listen([Listen::narrow()]) }, |script| script.echo());
    let slow: Vec<Peer> = (0..4).map(|_| server.join_narrow().0).collect();
    let bytes = pattern(5, bed.size(4 << 20, 400_000));
    for peer in &slow {
        peer.set_reading(false);
        peer.send(&bytes);
    }
    let (quick, _) = server.join();
    for n in 0..20 {
        quick.exchange(&pattern(n, 5000));
    }
    for peer in slow {
        peer.set_reading(true);
        peer.expect(&bytes);
    }
}
