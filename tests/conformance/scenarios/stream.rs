//! The bytes of one connection: all of them, in order, however they are cut.

use std::sync::Arc;

use corelane::{BufferConfig, WorkerConfig};

use crate::bed::{Bed, Listen, Peer, Plan, config};
use crate::bytes::{pattern, same};
use crate::script::{Script, State, Step};

pub fn echo_returns_every_byte_in_order(bed: &Bed) {
    let server = bed.echo();
    let (peer, serial) = server.join();
    let bytes = pattern(1, 300_000);
    peer.exchange(&bytes);
    same(&server.log().data(serial), &bytes, "what the handler was given");
    assert_eq!(server.metrics().bytes_received, 300_000);
    bed.until("the sends to be counted", || server.metrics().bytes_sent == 300_000);
}

pub fn bytes_sent_one_by_one_arrive_in_order(bed: &Bed) {
    let server = bed.echo();
    let (peer, serial) = server.join();
    let bytes = pattern(2, 300);
    for byte in &bytes {
        // Each is a write of its own; how many of them arrive together is the kernel's choice.
        peer.send_now(&[*byte]);
    }
    peer.expect(&bytes);
    same(&server.log().data(serial), &bytes, "what the handler was given");
}

/// A message as it stands on the wire: its length in two bytes, then itself.
fn frame(message: &[u8]) -> Vec<u8> {
    let mut framed = (message.len() as u16).to_be_bytes().to_vec();
    framed.extend_from_slice(message);
    framed
}

/// Takes the first whole message out of what was received.
fn next_message(state: &mut State) -> Option<Vec<u8>> {
    let (head, rest) = state.bytes.split_first_chunk::<2>()?;
    let len = usize::from(u16::from_be_bytes(*head));
    let message = rest.get(..len)?.to_vec();
    state.bytes.drain(..2 + len);
    Some(message)
}

/// A server that answers every message by the number of bytes in it.
fn counting(script: Script) -> Script {
    script.data(|conn, data| {
        conn.state().bytes.extend_from_slice(&data);
        while let Some(message) = next_message(conn.state()) {
            conn.send((message.len() as u16).to_be_bytes().to_vec()).expect("room");
        }
    })
}

pub fn many_messages_in_one_segment_are_all_answered(bed: &Bed) {
    let server = bed.serve(Plan::default(), counting);
    let (peer, _) = server.join();
    let lens: Vec<usize> = (0..200).map(|n| n % 7).collect();
    let wire: Vec<u8> = lens.iter().flat_map(|len| frame(&pattern(3, *len))).collect();
    peer.send(&wire);
    let answers: Vec<u8> = lens.iter().flat_map(|len| (*len as u16).to_be_bytes()).collect();
    peer.expect(&answers);
}

pub fn message_cut_anywhere_is_put_together(bed: &Bed) {
    let server = bed.serve(Plan::default(), counting);
    let (peer, _) = server.join();
    let (mut wire, mut answers) = (Vec::new(), Vec::new());
    for n in 0..60 {
        let len = bed.random(0, 5000);
        wire.extend(frame(&pattern(n, len)));
        answers.extend((len as u16).to_be_bytes());
    }
    let mut rest = &wire[..];
    while !rest.is_empty() {
        let (part, later) = rest.split_at(bed.random(1, 3000).min(rest.len()));
        peer.send_now(part);
        rest = later;
    }
    peer.expect(&answers);
}

pub fn peer_that_reads_byte_by_byte_gets_every_byte(bed: &Bed) {
    let server = bed.echo();
    let (peer, _) = server.join();
    let bytes = pattern(4, 200);
    peer.set_reading(false);
    peer.send(&bytes);
    for byte in &bytes {
        peer.read_limit(1);
        peer.expect(&[*byte]);
    }
}

/// A sender that is much faster than its reader, with small buffers in between: most of it is sent short.
pub fn eight_megabytes_reach_a_slow_reader(bed: &Bed) {
    const LEN: usize = 8 << 20;
    let worker = WorkerConfig { send_limit: 16 << 20, ..config() };
    let plan = Plan { config: worker, ..Plan::listen([Listen::narrow()]) };
    let server = bed.serve(plan, |script| {
        script.data(|conn, _| {
            for part in pattern(5, LEN).chunks(100_000) {
                conn.send(part.to_vec()).expect("room");
            }
        })
    });
    let (peer, serial) = server.join_narrow();
    peer.set_reading(false);
    peer.send(b"?");
    bed.until("the queue to be congested", || server.metrics().congested == 1);
    let (mut got, mut portion) = (Vec::with_capacity(LEN), 1000);
    while got.len() < LEN {
        let wanted = portion.min(LEN - got.len());
        peer.read_limit(wanted as u64);
        bed.until("the next portion", || peer.waiting() >= wanted as u64 || peer.is_over());
        got.extend(peer.take());
        portion = (portion * 2).min(600_000);
    }
    same(&got, &pattern(5, LEN), "what the slow reader received");
    bed.until("the queue to be empty", || server.metrics().bytes_sent == LEN as u64);
    assert_eq!(server.log().life(serial, |life| life.count(Step::Writable)), 1);
}

/// What an empty payload does must be nothing: no operation that never ends, no place in the order.
pub fn empty_payload_is_harmless(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| {
        script.data(|conn, data| {
            let before = conn.unsent();
            conn.send("").expect("it is open");
            assert_eq!(conn.unsent(), before);
            conn.send(data).expect("it is open");
            conn.send(Vec::new()).expect("it is open");
            conn.send("!").expect("it is open");
            conn.send(Arc::<[u8]>::from([].as_slice())).expect("it is open");
        })
    });
    let (peer, serial) = server.join();
    for round in 0..20 {
        peer.send(&[round]);
        peer.expect(&[round, b'!']);
    }
    // Alone it does nothing either, from inside and from outside.
    server.on(serial, |conn| conn.send("").expect("it is open"));
    server.remote().send(server.log().id(serial), "").expect("there is room");
    peer.send(b"x");
    peer.expect(b"x!");
    peer.shutdown();
    peer.expect_eof();
    bed.until("its end", || server.log().closed(serial).is_some());
}

/// Every kind of payload, mixed, in one queue.
pub fn every_kind_of_payload_keeps_its_place(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| {
        script.data(|conn, data| {
            let mut composed = conn.cx().alloc().expect("a send buffer is free");
            assert_eq!(composed.put(b"composed,"), 9);
            conn.send("static,").expect("room");
            conn.send(data.clone()).expect("room");
            conn.send(composed.freeze()).expect("room");
            conn.send(b",owned,".to_vec()).expect("room");
            conn.send(Arc::<[u8]>::from(b"shared,".as_slice())).expect("room");
            conn.send(data).expect("room");
            conn.send("\n").expect("room");
        })
    });
    let (peer, _) = server.join();
    for _ in 0..30 {
        // One byte, so that it cannot arrive in two pieces.
        peer.send(b"L");
        peer.expect(b"static,Lcomposed,,owned,shared,L\n");
    }
    peer.close();
    server.empties();
}

/// More payloads in one callback than one vectored send takes, and an odd one among them.
pub fn thousand_small_payloads_of_one_callback_keep_their_order(bed: &Bed) {
    let server = bed.serve(Plan::default(), |script| {
        script.data(|conn, _| {
            for n in 0..1000u16 {
                let len = if n == 500 { 30_000 } else { 2 };
                conn.send(pattern(n.into(), len)).expect("room");
            }
        })
    });
    let (peer, _) = server.join();
    peer.send(b"?");
    let wanted: Vec<u8> = (0..1000).flat_map(|n| pattern(n, if n == 500 { 30_000 } else { 2 })).collect();
    peer.expect(&wanted);
}

/// liburing's `buf-ring-mshot`: one pool for many streams, and no buffer in two hands. The handler keeps
/// what it was given while the others receive, and looks at it again later.
pub fn no_buffer_is_in_two_hands(bed: &Bed) {
    let buffers = BufferConfig { size: 512, count: 64, send_count: 0, ..BufferConfig::default() };
    let plan = Plan::config(WorkerConfig { buffers, ..config() });
    let server = bed.serve(plan, |script| {
        script.data(|conn, data| {
            // The first byte names the client, and every byte of it is the same.
            assert!(data.iter().all(|byte| *byte == data[0]), "a buffer of two streams");
            conn.state().kept.push(data);
            if conn.state().kept.len() == 4 {
                for kept in std::mem::take(&mut conn.state().kept) {
                    assert!(kept.iter().all(|byte| *byte == kept[0]), "a lease was written to");
                    conn.send(kept).expect("room");
                }
            }
        })
    });
    let peers: Vec<Peer> = (0..12).map(|_| server.join().0).collect();
    for _ in 0..bed.rounds(30, 6) {
        for (n, peer) in peers.iter().enumerate() {
            peer.send(&vec![n as u8; bed.random(1, 1500)]);
        }
        bed.until("all of it to be with the server", || peers.iter().all(Peer::sent_all));
    }
    for peer in &peers {
        peer.shutdown();
        peer.end();
    }
    server.empties();
    for (n, peer) in peers.iter().enumerate() {
        assert!(peer.take().iter().all(|byte| *byte == n as u8), "another one's bytes");
    }
}

/// Both directions of one connection are full at once.
pub fn both_directions_go_on_at_once(bed: &Bed) {
    const LEN: usize = 1 << 20;
    let plan = Plan::config(WorkerConfig { auto_pause: false, ..config() });
    let server = bed.serve(plan, |script| {
        script.data(|conn, _| {
            if conn.state().count == 0 {
                conn.send(pattern(7, LEN)).expect("room");
            }
            conn.state().count += 1;
        })
    });
    let (peer, serial) = server.join();
    peer.send(&pattern(6, LEN));
    peer.expect(&pattern(7, LEN));
    server.received(serial, LEN);
    same(&server.log().data(serial), &pattern(6, LEN), "what the handler was given");
}
