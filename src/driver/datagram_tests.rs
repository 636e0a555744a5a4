//! What every driver of a real kernel promises of datagram sockets: scenarios over any of them, which the tests
//! beside each driver run. The counterpart is std's sockets wherever that is possible.

use std::collections::VecDeque;
use std::net::{SocketAddr, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixDatagram};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::buffer::{BufferConfig, Payload};

use super::{
    Address, CloseHow, DATAGRAM_SENDS, Datagram, DatagramConfig, Driver, Event, Key, PRELUDE, Received,
    RecvEnd,
};

const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of a datagram that fit into one of the [`buffers`].
const ROOM: usize = 1024 - PRELUDE;

/// Few buffers, so that none can be lost unnoticed.
pub(in crate::driver) fn buffers() -> BufferConfig {
    BufferConfig { size: 1024, count: 8, send_count: 0, guard: false }
}

fn key(slot: u32, generation: u32) -> Key {
    Key { slot, generation }
}

fn local(address: Address) -> DatagramConfig {
    DatagramConfig {
        local: Some(address),
        peer: None,
        reuse_port: false,
        broadcast: false,
        gro: false,
        recv_buffer: None,
        send_buffer: None,
    }
}

fn v4() -> DatagramConfig {
    local(Address::Inet(SocketAddr::from(([127, 0, 0, 1], 0))))
}

/// A name that no other test uses.
fn name() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    format!("corelane-datagram-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// A path that no other test uses; the file goes with it.
struct Path(PathBuf);

impl Path {
    fn new() -> Self {
        Self(std::env::temp_dir().join(name()))
    }

    fn address(&self) -> UnixAddr {
        UnixAddr::from_pathname(&self.0).expect("a short path")
    }
}

impl Drop for Path {
    fn drop(&mut self) {
        // Not there if the test ended before it was bound.
        let _ = std::fs::remove_file(&self.0);
    }
}

fn udp() -> (UdpSocket, SocketAddr) {
    let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
    socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let address = socket.local_addr().expect("its address");
    (socket, address)
}

fn unix() -> (UnixDatagram, UnixAddr) {
    let address = UnixAddr::from_abstract_name(name()).expect("a name");
    let socket = UnixDatagram::bind_addr(&address).expect("a socket");
    socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    (socket, address)
}

/// A driver, and what it has reported that nobody asked for yet.
pub(in crate::driver) struct Bed<D: Driver> {
    pub(in crate::driver) driver: D,
    events: VecDeque<Event>,
    armed: [bool; 16],
}

impl<D: Driver> Bed<D> {
    pub(in crate::driver) fn new(driver: D) -> Self {
        Self { driver, events: VecDeque::new(), armed: [false; 16] }
    }

    /// The next event that `wanted` takes; others wait for their turn.
    fn wait<T>(&mut self, what: &str, mut wanted: impl FnMut(Event) -> Result<T, Event>) -> T {
        let until = Instant::now() + PATIENCE;
        for _ in 0..self.events.len() {
            let Some(event) = self.events.pop_front() else { break };
            match wanted(event) {
                Ok(found) => {
                    return found;
                }
                Err(event) => self.events.push_back(event),
            }
        }
        loop {
            while let Some(event) = self.driver.next_event() {
                match wanted(event) {
                    Ok(found) => return found,
                    Err(event) => self.events.push_back(event),
                }
            }
            assert!(Instant::now() < until, "waited in vain for {what}; there are {:?}", self.events);
            self.driver.submit_and_wait(Some(Duration::from_millis(100))).expect("a wait");
        }
    }

    fn turn(&mut self) {
        self.driver.submit_and_wait(Some(Duration::ZERO)).expect("a wait");
        while let Some(event) = self.driver.next_event() {
            self.events.push_back(event);
        }
    }

    /// Nothing may be reported in a while.
    fn quiet(&mut self) {
        for _ in 0..3 {
            self.driver.submit_and_wait(Some(Duration::from_millis(5))).expect("a wait");
            self.events.extend(self.driver.next_event());
            assert!(self.events.is_empty(), "{:?}", self.events);
        }
    }

    fn open(&mut self, key: Key, config: &DatagramConfig) -> Key {
        self.driver.open_datagram(key, config).expect("a socket");
        self.armed[key.slot as usize] = false;
        key
    }

    fn send(&mut self, key: Key, token: u32, bytes: impl Into<Payload>, to: Option<Address>) {
        let datagram = Datagram { payload: bytes.into(), to, segment: None };
        self.driver.send_datagram(key, token, datagram);
    }

    fn sent(&mut self, wanted: Key) -> (u32, std::io::Result<usize>) {
        self.wait("a datagram sent", |event| match event {
            Event::DatagramSent { key, token, result } if key == wanted => Ok((token, result)),
            other => Err(other),
        })
    }

    /// Sends one datagram, and waits until it is sent.
    fn send_now(&mut self, key: Key, bytes: &[u8], to: Option<Address>) {
        self.send(key, 7, bytes.to_vec(), to);
        let (token, result) = self.sent(key);
        assert_eq!((token, result.expect("sent")), (7, bytes.len()));
    }

    fn arm(&mut self, key: Key) {
        if !std::mem::replace(&mut self.armed[key.slot as usize], true) {
            self.driver.recv(key);
        }
    }

    /// The next datagram, or why there is none; arms when need be.
    fn try_received(&mut self, wanted: Key) -> Result<Received, RecvEnd> {
        loop {
            self.arm(wanted);
            let outcome = self.wait("a datagram", |event| match event {
                Event::Received { key, buf, armed } if key == wanted => Ok((Ok(buf), armed)),
                Event::RecvEnded { key, end } if key == wanted => Ok((Err(end), false)),
                other => Err(other),
            });
            self.armed[wanted.slot as usize] = outcome.1;
            match outcome.0 {
                Ok(buf) => return Ok(Received::parse(buf).expect("a whole prelude")),
                Err(RecvEnd::Stopped) => {}
                Err(end) => return Err(end),
            }
        }
    }

    fn received(&mut self, key: Key) -> Received {
        self.try_received(key).expect("a datagram")
    }

    fn close(&mut self, wanted: Key) {
        self.driver.close(wanted, CloseHow::Fin);
        self.events.retain(|event| {
            !matches!(event, Event::Received { key, .. } | Event::RecvEnded { key, .. }
            | Event::DatagramSent { key, .. } if *key == wanted)
        });
        self.wait("the close", |event| match event {
            Event::Closed { key } if key == wanted => Ok(()),
            Event::Received { key, .. } | Event::RecvEnded { key, .. } | Event::DatagramSent { key, .. }
                if key == wanted =>
            {
                panic!("reported after close: {event:?}")
            }
            other => Err(other),
        });
        self.armed[wanted.slot as usize] = false;
    }

    /// Where a socket is bound: it tells somebody, who looks at the sender.
    fn address(&mut self, key: Key) -> SocketAddr {
        let (witness, address) = udp();
        self.send_now(key, b"where am I", Some(Address::Inet(address)));
        witness.recv_from(&mut [0; 20]).expect("a datagram").1
    }

    /// Ends the driver: nothing may be left anywhere.
    pub(in crate::driver) fn end(mut self) {
        assert!(self.events.is_empty(), "nobody wanted {:?}", self.events);
        self.quiet();
        self.end_in_flight();
    }

    fn end_in_flight(self) {
        let memory = self.driver.memory().clone();
        drop(self.events);
        assert_eq!(self.driver.finish(PATIENCE), 0, "operations left in the kernel");
        assert_eq!(memory.pool.leased(), 0, "buffers out");
        assert!(memory.pool.is_balanced(), "buffers lost");
    }
}

fn inet(received: &Received) -> SocketAddr {
    match &received.from {
        Some(Address::Inet(address)) => *address,
        other => panic!("{other:?}"),
    }
}

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
            let (len, from) = peer.recv_from(&mut room).expect("a datagram");
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
                assert_eq!(peer.recv_from(&mut room).expect("an answer"), (bytes.len(), from));
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
    let (len, from) = peer.recv_from(&mut room).expect("an answer");
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
        assert_eq!(peer.recv(&mut room).expect("an answer"), 4);
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
    assert_eq!(peer.recv_from(&mut [0; 10]).expect("a datagram"), (0, address));
    bed.close(socket);
    let (peer, peer_address) = unix();
    let name = UnixAddr::from_abstract_name(name()).expect("a name");
    let socket = bed.open(key(1, 1), &local(Address::Unix(name.clone())));
    for payload in [&b""[..], b"", b"x", b""] {
        peer.send_to_addr(payload, &name).expect("sent");
        assert_eq!(&bed.received(socket).bytes[..], payload);
    }
    bed.send_now(socket, b"", Some(Address::Unix(peer_address)));
    assert_eq!(peer.recv(&mut [0; 10]).expect("a datagram"), 0);
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
    let (_, from) = peer.recv_from(&mut [0; 20]).expect("a datagram");
    peer.send_to(b"here", from).expect("sent");
    assert_eq!(&bed.received(socket).bytes[..], b"here");
    // A socket that is not connected is told nothing.
    bed.close(socket);
    bed.turn();
}

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
            let (len, _) = peer.recv_from(&mut room).expect("a datagram");
            assert_eq!(&room[..len], &vec![token as u8; token as usize * 3][..]);
        }
    }
    bed.close(socket);
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
            let received = loop {
                match bed.try_received(socket) {
                    Ok(received) => break received,
                    // The bed keeps what it was not asked for yet, so buffers may run out.
                    Err(RecvEnd::NoBuffer) => {}
                    Err(end) => panic!("{end:?}"),
                }
            };
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
        let mut held: Vec<_> = (0..count).map(|_| bed.received(socket)).collect();
        assert!(held.iter().zip(0..).all(|(received, number)| received.bytes[..] == [number]));
        assert!(matches!(bed.try_received(socket), Err(RecvEnd::NoBuffer)), "round {round}");
        assert!(matches!(bed.try_received(socket), Err(RecvEnd::NoBuffer)), "again, round {round}");
        held.pop();
        assert_eq!(bed.received(socket).bytes[..], [count]);
        assert_eq!(bed.received(socket).bytes[..], [count + 1]);
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
                let (len, _) = peer.recv_from(&mut room).expect("a piece");
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

/// Unix datagrams are not lost, and not reordered, when their receiver is slow (unix(7)).
pub(in crate::driver) fn slow_receiver<D: Driver>(bed: &mut Bed<D>) {
    for connected in [true, false] {
        let (peer, peer_address) = unix();
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
        let (peer, peer_address) = unix();
        let other = UnixDatagram::unbound().expect("a socket");
        other.set_nonblocking(true).expect("an option");
        while other.send_to_addr(b"other", &peer_address).is_ok() {}
        let to = Address::Unix(peer_address.clone());
        let config = DatagramConfig { local: None, peer: connected.then(|| to.clone()), ..local(to.clone()) };
        let socket = bed.open(key(1, u32::from(connected)), &config);
        bed.send(socket, 3, b"mine".to_vec(), (!connected).then(|| to.clone()));
        for _ in 0..3 {
            bed.turn();
        }
        assert!(bed.events.is_empty(), "{:?}", bed.events);
        let mut room = [0; 10];
        while peer.recv(&mut room).expect("a datagram") == 5 {
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

/// A close with a receive and sends under way: nothing but `Closed`, and every buffer comes back.
pub(in crate::driver) fn close_in_flight<D: Driver>(bed: &mut Bed<D>) {
    let pool = bed.driver.memory().pool.clone();
    for generation in 0..30 {
        let (peer, peer_address) = unix();
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
    let (_peer, peer_address) = unix();
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
