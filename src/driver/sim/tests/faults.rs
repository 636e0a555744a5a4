//! Faults on demand, their moments, and what the network does to connections.

use super::super::super::event::CloseHow;
use super::super::errno;
use super::super::script::Shortage;
use super::*;

#[test]
fn chances_are_counted_and_faults_strike_as_often_as_they_were_called_for() {
    let mut rig = Rig::with_buffers(1, Faults::none(), 200);
    let peer = rig.connection(0);
    rig.driver.recv(key(0));
    rig.script(When::nth(3).times(2), Fault::NoBuffer);
    rig.script(When::nth(1), Fault::ShortRecv { bytes: 5 });
    rig.rearm = true;
    rig.world.borrow_mut().peer_send(peer, &pattern(20_000));
    rig.run(millis(100));
    assert_eq!(rig.data[&0], pattern(20_000));
    assert_eq!(rig.count("0 NoBuffer"), 2);
    assert_eq!(rig.world.borrow().script.len(), 0);
    assert!(rig.position("0 NoBuffer") >= Some(1), "{:?}", rig.log);
}

#[test]
fn a_fault_strikes_only_where_and_when_it_was_called_for() {
    let mut rig = Rig::new(2, Faults::none());
    let (one, two) = (rig.connection(0), rig.connection(1));
    rig.rearm = true;
    rig.driver.recv(key(0));
    rig.driver.recv(key(1));
    let here = Some(rig.conn_of(two));
    let later = rig.now() + Duration::from_secs(1);
    rig.script(When { conn: here, ..When::at(later) }, Fault::NoBuffer);
    for peer in [one, two] {
        rig.world.borrow_mut().peer_send(peer, b"early");
    }
    rig.run(millis(500));
    rig.run(millis(600));
    assert_eq!(rig.count("1 NoBuffer"), 0);
    for peer in [one, two] {
        rig.world.borrow_mut().peer_send(peer, b"late");
    }
    rig.run(millis(500));
    assert_eq!((rig.count("0 NoBuffer"), rig.count("1 NoBuffer")), (0, 1));
    assert_eq!(rig.data[&1], b"earlylate");
}

#[test]
fn a_connection_is_reset_after_so_many_bytes() {
    for seed in 0..20 {
        let mut rig = Rig::new(seed, Faults::none());
        let peer = rig.connection(0);
        rig.rearm = true;
        rig.driver.recv(key(0));
        rig.script(When::after_bytes(10_000), Fault::Reset);
        rig.world.borrow_mut().peer_send(peer, &pattern(100_000));
        rig.run(Duration::from_secs(1));
        let got = rig.data[&0].len();
        assert!((10_000..100_000).contains(&got), "seed {seed}: {got}");
        assert_eq!(rig.data[&0], pattern(100_000)[..got]);
        let failed = format!("0 failed {}", errno::ECONNRESET);
        assert_eq!(rig.log.last(), Some(&failed), "seed {seed}");
        assert!(rig.world.borrow().peers[&peer].reset);
    }
}

#[test]
fn a_stalled_connection_goes_on_when_the_stall_is_over() {
    let mut rig = Rig::new(3, Faults::none());
    let peer = rig.connection(0);
    rig.rearm = true;
    rig.driver.recv(key(0));
    let conn = Some(rig.conn_of(peer));
    rig.script(When { conn, ..When::next() }, Fault::Stall { time: Duration::from_secs(2) });
    rig.run(millis(1));
    rig.world.borrow_mut().peer_send(peer, b"hello");
    rig.send(0, b"you too".to_vec());
    rig.run(millis(1_900));
    assert!(rig.data.is_empty() && rig.peer_received(peer).is_empty());
    // Repeated after 0.2, 0.6, 1.4 and 3 s.
    rig.run(millis(1_300));
    assert_eq!(rig.data[&0], b"hello");
    assert_eq!(rig.peer_received(peer), b"you too");
}

#[test]
fn who_gives_a_connection_up_tells_the_other_end_only_when_it_speaks() {
    let mut rig = Rig::new(4, Faults::none());
    let peer = rig.connection(0);
    rig.driver.recv(key(0));
    rig.run(millis(1));
    let conn = Some(rig.conn_of(peer));
    rig.script(When { conn, ..When::next() }, Fault::TimedOut);
    rig.run(millis(10));
    assert_eq!(rig.log, [format!("0 failed {}", errno::ETIMEDOUT)]);
    assert!(!rig.world.borrow().peers[&peer].reset);
    rig.world.borrow_mut().peer_send(peer, b"hello?");
    rig.run(millis(10));
    assert!(rig.world.borrow().peers[&peer].reset);
}

#[test]
fn data_that_is_never_acknowledged_ends_in_a_time_out_after_a_quarter_of_an_hour() {
    let mut rig = Rig::new(5, Faults::none());
    let peer = rig.connection(0);
    rig.driver.recv(key(0));
    rig.world.borrow_mut().set_reachable(addr(100), false);
    rig.send(0, b"hello?".to_vec());
    rig.run(Duration::from_secs(900));
    assert_eq!(rig.log, ["0 sent Ok(6)"]);
    rig.run(Duration::from_secs(150));
    assert_eq!(rig.log.last(), Some(&format!("0 failed {}", errno::ETIMEDOUT)));
    rig.driver.close(key(0), CloseHow::Fin);
    rig.world.borrow_mut().peer_dropped(peer);
    rig.run(Duration::from_secs(2_000));
    assert!(rig.world.borrow().conns.is_empty(), "{:?}", rig.world.borrow().conns);
    assert_eq!(rig.world.borrow().next_time(), None);
}

#[test]
fn a_partition_may_be_one_way_and_between_two_hosts_only() {
    let mut rig = Rig::new(6, Faults::none());
    let listener = rig.listen(80, 8);
    rig.driver.accept(listener, AcceptMode::Multishot);
    let from = |host: u8| SocketAddr::from(([10, 8, 0, host], 0));
    let peers: Vec<u64> =
        [1, 2].map(|host| rig.world.borrow_mut().peer_connect(Some(from(host)), addr(80))).to_vec();
    rig.run(millis(10));
    // Which is whose: the first that sends is the first in the log.
    for (slot, socket) in std::mem::take(&mut rig.sockets).into_iter().enumerate() {
        rig.driver.adopt(key(slot as u32), socket);
        rig.driver.recv(key(slot as u32));
    }
    rig.world.borrow_mut().net.cut_one_way(addr(80).ip(), from(1).ip());
    for peer in &peers {
        rig.world.borrow_mut().peer_send(*peer, b"hello");
    }
    rig.run(millis(100));
    assert_eq!(rig.data.values().filter(|data| *data == b"hello").count(), 2, "that way is open");
    for slot in 0..2 {
        rig.send(slot, b"back".to_vec());
    }
    rig.run(millis(100));
    assert_eq!(rig.peer_received(peers[0]), b"");
    assert_eq!(rig.peer_received(peers[1]), b"back");
    rig.world.borrow_mut().net.heal_between(from(1).ip(), addr(80).ip());
    rig.run(Duration::from_secs(1));
    assert_eq!(rig.peer_received(peers[0]), b"back");
}

#[test]
fn a_link_has_the_latency_that_it_was_given() {
    let mut rig = Rig::new(7, Faults::none());
    let far = SocketAddr::from(([10, 7, 0, 1], 0));
    let slow = (millis(50), millis(50));
    rig.world.borrow_mut().net.set_latency(far.ip(), addr(80).ip(), slow);
    let listener = rig.listen(80, 8);
    rig.driver.accept(listener, AcceptMode::Multishot);
    let _far = rig.world.borrow_mut().peer_connect(Some(far), addr(80));
    let _near = rig.peer(80);
    rig.run(millis(5));
    assert_eq!(rig.sockets.len(), 1, "three packets take three times as long");
    rig.run(millis(460));
    assert_eq!(rig.sockets.len(), 2);
}

#[test]
fn late_completions_overtake_those_of_another_kind_but_not_of_their_own() {
    let mut swapped = 0;
    for seed in 0..60 {
        let mut rig = Rig::new(seed, Faults { late_completion: 0.5, ..Faults::none() });
        let peer = rig.connection(0);
        rig.rearm = true;
        rig.driver.recv(key(0));
        rig.world.borrow_mut().peer_send(peer, &pattern(2_000));
        rig.run(millis(1));
        rig.send(0, b"x".to_vec());
        rig.run(millis(200));
        assert_eq!(rig.data[&0], pattern(2_000), "seed {seed}");
        assert_eq!(rig.count("0 sent Ok(1)"), 1);
        let last = rig.log.last().map(String::as_str);
        swapped += usize::from(last != Some("0 sent Ok(1)"));
        assert_eq!(rig.memory.pool.leased(), 0);
    }
    assert!((5..60).contains(&swapped), "both orders happen: {swapped} of 60");
}

#[test]
fn a_cancel_that_loses_the_race_finds_the_operation_done() {
    for seed in 0..20 {
        let mut rig = Rig::new(seed, Faults { lost_cancel: 1.0, ..Faults::none() });
        let peer = rig.connection(0);
        // The data is there, but the ring has not looked.
        rig.driver.recv(key(0));
        rig.turn();
        rig.world.borrow_mut().peer_send(peer, b"there");
        let now = rig.now();
        rig.world.borrow_mut().advance(now + millis(5));
        rig.driver.cancel_recv(key(0));
        rig.run(millis(5));
        assert_eq!(rig.data[&0], b"there", "seed {seed}");
        assert_eq!(rig.log.last().map(String::as_str), Some("0 Stopped"));
        // A send for which there is room takes it first.
        rig.world.borrow_mut().peer_set_reading(peer, false, None);
        rig.send(0, pattern(3 * SOCKET_BUFFER as usize));
        rig.run(millis(20));
        rig.world.borrow_mut().peer_set_reading(peer, true, None);
        let now = rig.now();
        rig.world.borrow_mut().advance(now + millis(20));
        rig.driver.cancel_send(key(0));
        rig.run(millis(20));
        let sent = rig.log.last().and_then(|line| line.strip_prefix("0 sent Ok("));
        let sent = sent.and_then(|rest| rest.strip_suffix(')')).and_then(|n| n.parse::<u32>().ok());
        assert!(sent > Some(2 * SOCKET_BUFFER), "seed {seed}: {:?}", rig.log);
    }
}

#[test]
fn an_operation_that_ignores_its_cancel_obeys_when_the_faults_end() {
    let mut rig = Rig::new(8, Faults::none());
    let _peer = rig.connection(0);
    rig.driver.recv(key(0));
    rig.script(When::next(), Fault::StuckCancel);
    rig.run(millis(1));
    rig.driver.cancel_recv(key(0));
    rig.run(Duration::from_secs(60));
    assert_eq!(rig.driver.in_flight(), 1);
    rig.world.borrow_mut().calm();
    rig.run(millis(1));
    assert_eq!(rig.log, ["0 Stopped"]);
    assert_eq!(rig.driver.in_flight(), 0);
}

#[test]
fn refused_sockets_name_what_there_is_a_shortage_of() {
    let mut rig = Rig::new(9, Faults::none());
    let listener = rig.listen(80, 8);
    let peer = rig.peer(80);
    let shortages = [
        (Shortage::ProcessFiles, errno::EMFILE),
        (Shortage::SystemFiles, errno::ENFILE),
        (Shortage::Buffers, errno::ENOBUFS),
        (Shortage::Memory, errno::ENOMEM),
    ];
    for (shortage, error) in shortages {
        rig.script(When::next(), Fault::AcceptError(shortage));
        rig.driver.accept(listener, AcceptMode::Once);
        rig.run(millis(10));
        assert_eq!(rig.log.pop(), Some(format!("accept failed {error}")));
    }
    // It was in the queue all the time; only the last fault loses it.
    rig.script(When::next(), Fault::AcceptAborted);
    rig.driver.accept(listener, AcceptMode::Once);
    rig.run(millis(10));
    assert_eq!(rig.log.pop(), Some(format!("accept failed {}", errno::ECONNABORTED)));
    assert!(rig.world.borrow().peers[&peer].reset);
}

#[test]
fn held_buffers_are_out_of_the_pool_and_come_back() {
    let mut rig = Rig::new(10, Faults::none());
    let time = millis(50);
    rig.script(When::next(), Fault::HoldBuffers { recv: BUFFERS - 1, send: 9, time });
    rig.run(millis(1));
    assert_eq!(rig.memory.pool.available(), 1);
    assert_eq!(rig.world.borrow().rings[0].buffers_held(), BUFFERS as usize - 1);
    rig.run(millis(60));
    assert_eq!(rig.memory.pool.available(), BUFFERS);
    assert_eq!(rig.count("woken"), 1, "who had none looks again");
}
