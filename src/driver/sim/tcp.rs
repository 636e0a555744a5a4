//! Virtual TCP: two ends, and a pipe from each to the other.
//!
//! ```text
//!   write ──► unsent ──(while there is credit)──► wire ──(latency)──► arrived ──► read
//!             at most socket_buffer        packets, in order     at most socket_buffer
//!                                ◄──(latency)── credit, as the reader takes bytes
//! ```
//!
//! Everything that one end tells the other (handshake, data, FIN, RST) is a packet in the pipe, so
//! the order on a connection is kept whatever the latencies are. What Linux does where it surprises
//! is done here too: a close with unread data resets, data for a closed socket is answered by a
//! reset, an error is told to one operation only (the next one sees EPIPE, or the end of the
//! stream), and data that came before a reset can still be read.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use super::errno;
use super::script::{Place, Strike};
use super::world::{Action, World};
use crate::clock::Time;

/// One end of a connection: side 0 connected, side 1 was connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sock {
    pub(crate) conn: u64,
    pub(crate) side: usize,
}

impl Sock {
    pub(crate) fn other(self) -> Sock {
        Sock { conn: self.conn, side: 1 - self.side }
    }
}

/// Who is told what happens to an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// Not accepted, not adopted, or closed.
    Nobody,
    /// A ring's operations.
    Ring,
    /// A scripted peer.
    Peer(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// The handshake goes on.
    Connecting,
    Open,
    /// Reset, refused or given up: nothing is sent or received any more.
    Dead,
}

#[derive(Debug)]
pub(crate) struct End {
    pub(crate) addr: SocketAddr,
    pub(crate) owner: Owner,
    pub(crate) state: State,
    /// The error that the next operation will be told.
    error: Option<i32>,
    /// The operations (ring and number) that wait on this end.
    pub(crate) reader: Option<(usize, u64)>,
    pub(crate) writer: Option<(usize, u64)>,
    /// Its program closed it.
    closed: bool,
}

#[derive(Debug)]
pub(crate) enum Packet {
    SynAck,
    Ack,
    Data(Vec<u8>),
    Fin,
    Rst,
}

/// One direction.
#[derive(Debug, Default)]
pub(crate) struct Pipe {
    unsent: VecDeque<u8>,
    /// FIN follows what is unsent.
    fin: bool,
    fin_sent: bool,
    /// Bytes that the receiver has room for.
    credit: usize,
    pub(crate) wire: VecDeque<Packet>,
    /// When the last packet on the wire arrives; none overtakes it.
    last: Time,
    /// Since when the first packet on the wire does not get through, when it is repeated, and how long
    /// after the one before.
    pub(crate) blocked_since: Option<Time>,
    pub(crate) retry_at: Time,
    pub(crate) rto: Duration,
    arrived: VecDeque<u8>,
    fin_arrived: bool,
}

#[derive(Debug)]
pub(crate) struct Conn {
    pub(crate) ends: [End; 2],
    /// Indexed by the side that sends.
    pub(crate) pipes: [Pipe; 2],
    /// The listener that the handshake is with.
    pub(crate) listener: Option<u32>,
    /// Until then nothing passes.
    pub(crate) stalled_until: Time,
    /// A reset of it got lost.
    pub(crate) reset_lost: bool,
    /// Bytes that have arrived at either end.
    pub(crate) arrived: u64,
}

/// What an operation finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Io {
    /// Bytes to read, or room to write.
    Ready(usize),
    WouldBlock,
    Eof,
    Error(i32),
}

/// How long Linux waits before it repeats an unanswered SYN: 1 s, then twice as long each time.
const SYN_RETRIES: u32 = 6;
/// The usual least time until a lost segment is sent again.
pub(crate) const RETRANSMIT: Duration = Duration::from_millis(200);

impl World {
    /// A socket that wants to connect; [`send_syn`](Self::send_syn) begins it.
    pub(crate) fn open(&mut self, from: SocketAddr, to: SocketAddr, owner: Owner) -> Sock {
        let end = |addr, owner| End {
            addr,
            owner,
            state: State::Connecting,
            error: None,
            reader: None,
            writer: None,
            closed: false,
        };
        let pipe = || Pipe { credit: self.settings.socket_buffer as usize, ..Pipe::default() };
        let conn = Conn {
            ends: [end(from, owner), End { closed: true, ..end(to, Owner::Nobody) }],
            pipes: [pipe(), pipe()],
            listener: None,
            stalled_until: Time::ZERO,
            reset_lost: false,
            arrived: 0,
        };
        let id = self.fresh();
        self.conns.insert(id, conn);
        Sock { conn: id, side: 0 }
    }

    // ---- handshake

    pub(crate) fn send_syn(&mut self, sock: Sock) {
        let at = self.now + self.latency(sock.conn);
        self.schedule(at, Action::Syn { conn: sock.conn, attempt: 0 });
    }

    pub(crate) fn syn(&mut self, id: u64, attempt: u32) {
        let Some(conn) = self.conns.get(&id) else { return };
        if conn.ends[0].state != State::Connecting {
            self.forget(id);
            return;
        }
        let (client, server) = (Sock { conn: id, side: 0 }, Sock { conn: id, side: 1 });
        let listener = self.listener_for(conn.ends[1].addr, id);
        let lost = self.is_cut(id, 0) || listener.is_some_and(|listener| !self.has_room(listener));
        if lost {
            if attempt == SYN_RETRIES {
                self.die(client, errno::ETIMEDOUT);
            } else {
                let wait = Duration::from_secs(1 << attempt);
                self.schedule(self.now + wait, Action::Syn { conn: id, attempt: attempt + 1 });
            }
            return;
        }
        let Some(listener) = listener else {
            self.transmit(server, Packet::Rst);
            return;
        };
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.listener = Some(listener);
            conn.ends[1].closed = false;
        }
        self.transmit(server, Packet::SynAck);
    }

    /// The client's answer to the server's answer: the connection joins the accept queue.
    fn handshake_done(&mut self, server: Sock) {
        let Some(conn) = self.conns.get_mut(&server.conn) else { return };
        if conn.ends[1].state != State::Connecting {
            return;
        }
        conn.ends[1].state = State::Open;
        let listener = conn.listener.take();
        let Some(id) = listener.filter(|id| self.listeners.contains_key(id)) else {
            // The listener was closed meanwhile.
            self.close_sock(server, true);
            return;
        };
        if let Some(listener) = self.listeners.get_mut(&id) {
            listener.queue.push_back(server);
        }
        self.wake_acceptors(id);
    }

    // ---- the wire

    pub(crate) fn transmit(&mut self, from: Sock, packet: Packet) {
        let mut delay = self.latency(from.conn);
        let loss = self.settings.faults.segment_loss;
        let data = matches!(packet, Packet::Data(_));
        if data && self.strikes(Strike::SegmentLoss, Place::wire(from.conn), loss) {
            delay += RETRANSMIT;
        }
        let at = self.now + delay;
        let Some(conn) = self.conns.get_mut(&from.conn) else { return };
        let pipe = &mut conn.pipes[from.side];
        pipe.last = pipe.last.max(at);
        pipe.wire.push_back(packet);
        let at = pipe.last;
        self.schedule(at, Action::Deliver { to: from.other() });
    }

    /// Puts on the wire what there is credit for.
    fn pump(&mut self, from: Sock) {
        let mut moved = 0;
        loop {
            let Some(conn) = self.conns.get_mut(&from.conn) else { return };
            let (end, pipe) = (&conn.ends[from.side], &mut conn.pipes[from.side]);
            if end.state != State::Open {
                return;
            }
            let most = pipe.credit.min(pipe.unsent.len());
            if most == 0 {
                if pipe.unsent.is_empty() && pipe.fin && !pipe.fin_sent {
                    pipe.fin_sent = true;
                    self.transmit(from, Packet::Fin);
                }
                break;
            }
            // Mostly full segments of a usual size, sometimes a crumb, sometimes all at once.
            let size = match self.rng.below(8) {
                0 => self.rng.between(1, 16) as usize,
                1 => most,
                _ => self.rng.between(1, 4) as usize * 1448,
            };
            let size = size.min(most);
            let Some(conn) = self.conns.get_mut(&from.conn) else { return };
            let pipe = &mut conn.pipes[from.side];
            let data = take_front(&mut pipe.unsent, size);
            pipe.credit -= size;
            moved += size;
            self.transmit(from, Packet::Data(data));
        }
        if moved > 0 {
            self.wake_writer(from);
        }
    }

    pub(crate) fn credit(&mut self, from: Sock, bytes: usize) {
        if self.is_cut(from.conn, from.other().side) {
            self.schedule(self.now + RETRANSMIT, Action::Credit { from, bytes });
            return;
        }
        if let Some(conn) = self.conns.get_mut(&from.conn) {
            conn.pipes[from.side].credit += bytes;
            self.pump(from);
        }
    }

    pub(crate) fn deliver(&mut self, to: Sock) {
        let from = to.other();
        let mut cut = self.is_cut(to.conn, from.side);
        let Some(conn) = self.conns.get(&to.conn) else { return };
        match conn.pipes[from.side].wire.front() {
            None => return,
            Some(Packet::Rst) => {}
            Some(Packet::Ack) => cut |= self.is_turned_away(to),
            Some(Packet::Data(_)) => cut = cut || self.segment_meets_fault(to),
            Some(_) => {}
        }
        let Some(conn) = self.conns.get_mut(&to.conn) else { return };
        let pipe = &mut conn.pipes[from.side];
        if cut && !matches!(pipe.wire.front(), Some(Packet::Rst)) {
            self.hold_back(to);
            return;
        }
        if pipe.blocked_since.take().is_some() {
            (pipe.retry_at, pipe.rto) = (Time::ZERO, Duration::ZERO);
        }
        let Some(packet) = conn.pipes[from.side].wire.pop_front() else { return };
        match packet {
            Packet::SynAck => self.established(to),
            Packet::Ack => self.handshake_done(to),
            Packet::Data(bytes) => self.data_arrived(to, bytes),
            Packet::Fin => {
                conn.pipes[from.side].fin_arrived = true;
                self.wake_reader(to);
            }
            // Nobody repeats a reset: behind a partition it is lost, and the other end half open.
            Packet::Rst if cut && conn.ends[to.side].state == State::Open => conn.reset_lost = true,
            Packet::Rst => self.reset_arrived(to),
        }
        self.forget(to.conn);
    }

    fn established(&mut self, client: Sock) {
        let Some(conn) = self.conns.get_mut(&client.conn) else { return };
        if conn.ends[0].state != State::Connecting {
            // Gave up meanwhile.
            self.transmit(client, Packet::Rst);
            return;
        }
        conn.ends[0].state = State::Open;
        self.transmit(client, Packet::Ack);
        self.pump(client);
        self.wake_writer(client);
    }

    fn data_arrived(&mut self, to: Sock, bytes: Vec<u8>) {
        let Some(conn) = self.conns.get_mut(&to.conn) else { return };
        let end = &conn.ends[to.side];
        if end.state != State::Open {
            // The sender does not know yet, or its news of the reset got lost.
            if conn.ends[to.other().side].state == State::Open {
                self.transmit(to, Packet::Rst);
            }
            return;
        }
        if end.closed {
            self.abort(to);
            return;
        }
        conn.arrived += bytes.len() as u64;
        conn.pipes[to.other().side].arrived.extend(&bytes);
        self.wake_reader(to);
    }

    fn reset_arrived(&mut self, to: Sock) {
        let Some(conn) = self.conns.get_mut(&to.conn) else { return };
        let error = match conn.ends[to.side].state {
            State::Dead => return,
            State::Connecting if to.side == 0 => errno::ECONNREFUSED,
            // As Linux: whoever saw the FIN already is told of a broken pipe.
            _ if conn.pipes[to.other().side].fin_arrived => errno::EPIPE,
            _ => errno::ECONNRESET,
        };
        if to.side == 1 && conn.ends[1].state == State::Connecting {
            // The client gave up in the middle of the handshake; nobody will accept this.
            self.forget_half_open(to);
        }
        self.die(to, error);
    }

    /// A server's end that nobody will accept.
    pub(crate) fn forget_half_open(&mut self, server: Sock) {
        let Some(conn) = self.conns.get_mut(&server.conn) else { return };
        let end = &mut conn.ends[server.side];
        end.closed = true;
        end.state = State::Dead;
        conn.listener = None;
    }

    /// The end is over, with an error for its next operation.
    pub(crate) fn die(&mut self, sock: Sock, error: i32) {
        let Some(conn) = self.conns.get_mut(&sock.conn) else { return };
        let end = &mut conn.ends[sock.side];
        end.state = State::Dead;
        end.error = Some(error);
        conn.pipes[sock.side].unsent.clear();
        self.wake_reader(sock);
        self.wake_writer(sock);
    }

    /// Sends a reset and forgets everything unsent.
    fn abort(&mut self, sock: Sock) {
        let Some(conn) = self.conns.get_mut(&sock.conn) else { return };
        conn.pipes[sock.side].unsent.clear();
        if conn.ends[sock.side].state == State::Dead {
            return;
        }
        conn.ends[sock.side].state = State::Dead;
        self.transmit(sock, Packet::Rst);
    }

    // ---- what a program does with its end

    fn end_mut(&mut self, sock: Sock) -> Option<&mut End> {
        self.conns.get_mut(&sock.conn).map(|conn| &mut conn.ends[sock.side])
    }

    pub(crate) fn set_owner(&mut self, sock: Sock, owner: Owner) {
        if let Some(end) = self.end_mut(sock) {
            end.owner = owner;
        }
    }

    pub(crate) fn set_reader(&mut self, sock: Sock, op: Option<(usize, u64)>) {
        match self.end_mut(sock) {
            Some(end) => end.reader = op,
            None => self.set_datagram_reader(sock, op),
        }
    }

    pub(crate) fn set_writer(&mut self, sock: Sock, op: Option<(usize, u64)>) {
        if let Some(end) = self.end_mut(sock) {
            end.writer = op;
        }
    }

    /// How connecting goes: `Ready` when established.
    pub(crate) fn connecting(&mut self, sock: Sock) -> Io {
        let Some(end) = self.end_mut(sock) else { return Io::Error(errno::ECONNRESET) };
        match end.state {
            State::Connecting => Io::WouldBlock,
            State::Open => Io::Ready(0),
            State::Dead => Io::Error(end.error.take().unwrap_or(errno::ECONNRESET)),
        }
    }

    /// What a read would find. An error is told only once, so asking takes it.
    pub(crate) fn readable(&mut self, sock: Sock) -> Io {
        let Some(conn) = self.conns.get_mut(&sock.conn) else { return Io::Eof };
        let pipe = &conn.pipes[sock.other().side];
        let end = &mut conn.ends[sock.side];
        if !pipe.arrived.is_empty() {
            return Io::Ready(pipe.arrived.len());
        }
        if let Some(error) = end.error.take() {
            return Io::Error(error);
        }
        if pipe.fin_arrived || end.state == State::Dead { Io::Eof } else { Io::WouldBlock }
    }

    /// Whether something more than nothing waits, without taking it.
    pub(crate) fn is_readable(&self, sock: Sock) -> bool {
        let Some(conn) = self.conns.get(&sock.conn) else {
            return self.is_datagram_readable(sock).unwrap_or(true);
        };
        let (end, pipe) = (&conn.ends[sock.side], &conn.pipes[sock.other().side]);
        !pipe.arrived.is_empty() || pipe.fin_arrived || end.error.is_some() || end.state == State::Dead
    }

    /// Takes arrived bytes into `room`; the sender learns of the room that this makes.
    pub(crate) fn read(&mut self, sock: Sock, room: &mut [u8]) -> usize {
        let Some(conn) = self.conns.get_mut(&sock.conn) else { return 0 };
        let arrived = &mut conn.pipes[sock.other().side].arrived;
        let n = room.len().min(arrived.len());
        copy_front(arrived, &mut room[..n]);
        let at = self.now + self.latency(sock.conn);
        self.schedule(at, Action::Credit { from: sock.other(), bytes: n });
        n
    }

    /// Room that a write would find.
    pub(crate) fn writable(&mut self, sock: Sock) -> Io {
        let capacity = self.settings.socket_buffer as usize;
        let Some(conn) = self.conns.get_mut(&sock.conn) else { return Io::Error(errno::EPIPE) };
        let (end, pipe) = (&mut conn.ends[sock.side], &conn.pipes[sock.side]);
        if let Some(error) = end.error.take() {
            return Io::Error(error);
        }
        if end.state == State::Dead || pipe.fin {
            return Io::Error(errno::EPIPE);
        }
        match capacity - pipe.unsent.len() {
            0 => Io::WouldBlock,
            room => Io::Ready(room),
        }
    }

    /// Takes bytes, for which [`writable`](Self::writable) found room.
    pub(crate) fn write(&mut self, sock: Sock, bytes: &[u8]) {
        if let Some(conn) = self.conns.get_mut(&sock.conn) {
            conn.pipes[sock.side].unsent.extend(bytes);
        }
        self.pump(sock);
    }

    /// FIN, after what was written.
    pub(crate) fn shutdown(&mut self, sock: Sock) {
        let Some(conn) = self.conns.get_mut(&sock.conn) else { return };
        conn.pipes[sock.side].fin = true;
        self.pump(sock);
    }

    /// Closes: by FIN, or by reset when asked to or when data is left unread. A datagram socket is gone at once.
    pub(crate) fn close_sock(&mut self, sock: Sock, reset: bool) {
        if self.close_datagram_sock(sock.conn) {
            return;
        }
        let Some(conn) = self.conns.get_mut(&sock.conn) else { return };
        let end = &mut conn.ends[sock.side];
        if end.closed {
            return;
        }
        end.closed = true;
        end.owner = Owner::Nobody;
        (end.reader, end.writer) = (None, None);
        if end.state == State::Connecting {
            // The handshake's next packet will find nobody and be answered by a reset.
            end.state = State::Dead;
        } else if reset || !conn.pipes[sock.other().side].arrived.is_empty() {
            self.abort(sock);
        } else {
            self.shutdown(sock);
        }
        self.forget(sock.conn);
    }

    /// Forgets a connection that nobody can notice any more.
    pub(crate) fn forget(&mut self, id: u64) {
        let Some(conn) = self.conns.get(&id) else { return };
        let over = |side: usize| {
            let (end, pipe) = (&conn.ends[side], &conn.pipes[side]);
            let silent = pipe.wire.is_empty();
            end.closed && silent && (end.state != State::Open || pipe.fin_sent)
        };
        if over(0) && over(1) && conn.listener.is_none() {
            self.conns.remove(&id);
        }
    }
}

/// Moves bytes from the front of a queue into `room`, which is not longer; in two copies, not byte
/// by byte.
fn copy_front(queue: &mut VecDeque<u8>, room: &mut [u8]) {
    let (front, back) = queue.as_slices();
    let split = room.len().min(front.len());
    let rest = room.len() - split;
    room[..split].copy_from_slice(&front[..split]);
    room[split..].copy_from_slice(&back[..rest]);
    queue.drain(..split + rest);
}

/// Takes `n` bytes, which must be there, from the front of a queue.
pub(crate) fn take_front(queue: &mut VecDeque<u8>, n: usize) -> Vec<u8> {
    let mut bytes = vec![0; n];
    copy_front(queue, &mut bytes);
    bytes
}
