//! What accepting, receiving and sending do when their socket is ready: in a file of their own
//! because this is where data moves and faults bite.

use super::super::event::{AcceptMode, Key, ListenerId, Socket};
use super::errno;
use super::ring::{Cqe, End, Kind, Receiving};
use super::script::{Place, Shortage, Strike};
use super::tcp::{Io, Sock};
use super::trace::Actor;
use super::world::{Action, World};
use crate::buffer::Buf;

/// Pieces that a multishot receive reports in one go before the others come first (Linux: 32
/// retries after the first).
const PIECES_PER_WAKE: u32 = 33;

/// What one attempt to receive came to.
pub(super) enum Piece {
    /// Data, and perhaps more behind it.
    Data(Buf),
    End(End),
    Nothing,
}

impl World {
    pub(crate) fn run_accept(
        &mut self,
        ring: usize,
        op: u64,
        listener: u32,
        id: ListenerId,
        mode: AcceptMode,
    ) {
        loop {
            let waits = self.listeners.get(&listener).is_some_and(|l| !l.queue.is_empty());
            if !waits {
                return;
            }
            if let Some(error) = self.accept_fails(ring) {
                self.end_op(ring, op, Cqe::AcceptFailed { id, mode, error });
                return;
            }
            let Some(sock) =
                self.listeners.get_mut(&listener).and_then(|listener| listener.queue.pop_front())
            else {
                return;
            };
            let aborted = self.settings.faults.accept_aborted;
            let place = Place::conn(ring, sock.conn);
            // A table without room is noticed only when the connection is accepted already.
            let lost = if self.strikes(Strike::AcceptAborted, place, aborted) {
                Some(errno::ECONNABORTED)
            } else {
                self.rings[ring].is_table_full().then_some(errno::ENFILE)
            };
            if let Some(error) = lost {
                self.close_sock(sock, error == errno::ECONNABORTED);
                self.end_op(ring, op, Cqe::AcceptFailed { id, mode, error });
                return;
            }
            let Some(peer) = self.peer_address(sock) else { continue };
            let armed = mode == AcceptMode::Multishot && !self.cq_overflows(ring, sock.conn);
            let this = &mut self.rings[ring];
            this.sockets += 1;
            this.next_socket += 1;
            let number = this.next_socket;
            this.loose.insert(number, sock);
            let cqe = Cqe::Accepted { id, socket: Socket(number), peer, mode, armed };
            if !armed {
                self.end_op(ring, op, cqe);
                return;
            }
            self.post_of(ring, None, cqe);
        }
    }

    /// Why the system makes no socket for a connection that waits.
    fn accept_fails(&mut self, ring: usize) -> Option<i32> {
        // A socket of the ring's own table is not one of the process's descriptors.
        let any: &[Shortage] = match self.rings[ring].shape.table {
            None => &[Shortage::ProcessFiles, Shortage::SystemFiles, Shortage::Buffers, Shortage::Memory],
            Some(_) => &[Shortage::SystemFiles, Shortage::Buffers, Shortage::Memory],
        };
        let probability = self.settings.faults.accept_error;
        let shortage = self.strikes_short_of(Strike::AcceptError, Place::ring(ring), probability, any);
        shortage.map(Shortage::errno)
    }

    /// Whether the completion queue has no room for one that is not the operation's last: really,
    /// or because a fault says so.
    fn cq_overflows(&mut self, ring: usize, conn: u64) -> bool {
        let full = self.rings[ring].cq.len() >= self.rings[ring].shape.cq_entries;
        let probability = self.settings.faults.cq_overflow;
        let overflows = full || self.strikes(Strike::CqOverflow, Place::conn(ring, conn), probability);
        if overflows {
            self.rings[ring].counters.cq_overflows.add(1);
        }
        overflows
    }

    pub(crate) fn run_recv(&mut self, ring: usize, op: u64, key: Key, sock: Sock) {
        let receiving = match self.rings[ring].shape.receiving {
            // Datagrams are received by one operation for all, or by a system call when there is one.
            Receiving::Once if self.datagrams.contains_key(&sock.conn) => Receiving::Polled,
            receiving => receiving,
        };
        match receiving {
            Receiving::Multishot => self.run_recv_multishot(ring, op, key, sock),
            Receiving::Once => self.run_recv_once(ring, op, key, sock),
            Receiving::Ready if !self.is_readable(sock) => {}
            Receiving::Ready => self.run_recv_multishot(ring, op, key, sock),
            Receiving::Polled => {
                if !self.is_readable(sock) {
                    return;
                }
                let Some(this) = self.rings[ring].ops.get_mut(&op) else { return };
                if this.polled {
                    self.run_recv_once(ring, op, key, sock);
                } else {
                    // The poll is over; the receive is submitted by the next wait.
                    this.polled = true;
                    self.rings[ring].midway = true;
                    self.wake_op(ring, op);
                }
            }
        }
    }

    /// One piece, or the end.
    fn run_recv_once(&mut self, ring: usize, op: u64, key: Key, sock: Sock) {
        match self.recv_piece(ring, sock) {
            Piece::Nothing => {}
            Piece::End(end) => self.end_op(ring, op, Cqe::RecvEnded { key, end }),
            Piece::Data(buf) => self.end_op(ring, op, Cqe::Data { key, buf, armed: false }),
        }
    }

    fn run_recv_multishot(&mut self, ring: usize, op: u64, key: Key, sock: Sock) {
        for _ in 0..PIECES_PER_WAKE {
            match self.recv_piece(ring, sock) {
                Piece::Nothing => return,
                Piece::End(end) => {
                    self.end_op(ring, op, Cqe::RecvEnded { key, end });
                    return;
                }
                Piece::Data(buf) => {
                    // A driver that receives by itself keeps what it has until it is taken.
                    let by_itself = self.rings[ring].shape.receiving == Receiving::Ready;
                    let armed = by_itself || !self.cq_overflows(ring, sock.conn);
                    let cqe = Cqe::Data { key, buf, armed };
                    if !armed {
                        self.end_op(ring, op, cqe);
                        return;
                    }
                    self.post_of(ring, Some(sock.conn), cqe);
                }
            }
            // The kernel tries again only where it knows of more, so that the last buffer's
            // departure is not reported as long as nobody needs another.
            if !self.is_readable(sock) {
                let place = Place::conn(ring, sock.conn);
                if self.strikes(Strike::RecvStop, place, self.settings.faults.recv_stop) {
                    self.end_op(ring, op, Cqe::RecvEnded { key, end: End::Stopped });
                }
                return;
            }
        }
        self.wake_op(ring, op);
    }

    fn recv_piece(&mut self, ring: usize, sock: Sock) -> Piece {
        if self.datagrams.contains_key(&sock.conn) {
            return self.datagram_piece(ring, sock);
        }
        let pool = self.rings[ring].memory.pool.clone();
        let place = Place::conn(ring, sock.conn);
        let (no_buffer, short) = (self.settings.faults.no_buffer, self.settings.faults.short_recv);
        // The buffer comes first: without one the kernel does not even look whether there is data,
        // an error or the end of the stream.
        if pool.available() == 0 || self.strikes(Strike::NoBuffer, place, no_buffer) {
            return Piece::End(End::NoBuffer);
        }
        let waiting = match self.readable(sock) {
            Io::WouldBlock => return Piece::Nothing,
            Io::Eof => return Piece::End(End::Eof),
            Io::Error(error) => return Piece::End(End::Error(error)),
            Io::Ready(bytes) => bytes,
        };
        let most = waiting.min(pool.buffer_size() as usize);
        let take = match self.strikes_down_to(Strike::ShortRecv, place, short, most as u64) {
            Some(bytes) => bytes as usize,
            // As if the rest had come a moment later.
            None if self.rng.one_in(8) => self.rng.between(1, most as u64) as usize,
            None => most,
        };
        let buf = pool.lease_with(|room| self.read(sock, &mut room[..take]));
        buf.map_or(Piece::End(End::NoBuffer), Piece::Data)
    }

    /// Moves what fits from the chain into the socket. The bytes are read now, not when the send
    /// was started: whoever reused their memory in between would send something else.
    pub(crate) fn run_send(&mut self, ring: usize, op: u64, key: Key, sock: Sock) {
        loop {
            let room = self.writable(sock);
            let Some(this) = self.rings[ring].ops.get(&op) else { return };
            let Kind::Send { chain, taken, .. } = &this.kind else { return };
            let left = chain.bytes() - *taken;
            let room = match room {
                Io::WouldBlock if left > 0 => return,
                Io::WouldBlock => 0,
                Io::Ready(room) => room as u64,
                Io::Error(error) => return self.sent(ring, op, key, Some(error)),
                Io::Eof => return self.sent(ring, op, key, Some(errno::EPIPE)),
            };
            if left == 0 {
                return self.sent(ring, op, key, None);
            }
            let most = left.min(room);
            let place = Place::conn(ring, sock.conn);
            let probability = self.settings.faults.short_send;
            let short = self.strikes_down_to(Strike::ShortSend, place, probability, most);
            let in_parts = short.is_none() && self.rng.one_in(8);
            let size = match short {
                Some(bytes) => bytes,
                None if in_parts => self.rng.between(1, most),
                None => most,
            };
            let Some(bytes) = self.copy_out(ring, op, size) else { return };
            self.write(sock, &bytes);
            if size < left && short.is_some() {
                return self.sent(ring, op, key, None);
            }
            if size < left && in_parts {
                // The rest a moment later.
                let delay = self.rng.between(0, 20_000);
                self.schedule_in(delay, Action::Run { ring, op });
                return;
            }
        }
    }

    /// Reads the next `len` bytes of a send's chain.
    fn copy_out(&mut self, ring: usize, op: u64, len: u64) -> Option<Vec<u8>> {
        let chunks = self.rings[ring].memory.chunks.clone();
        let this = self.rings[ring].ops.get_mut(&op)?;
        let Kind::Send { chain, taken, .. } = &mut this.kind else { return None };
        let (mut skip, len) = (*taken, len as usize);
        let mut out = Vec::with_capacity(len);
        chunks.for_each(chain, |bytes| {
            let from = skip.min(bytes.len() as u64) as usize;
            skip -= from as u64;
            let rest = &bytes[from..];
            out.extend_from_slice(&rest[..rest.len().min(len - out.len())]);
        });
        *taken += len as u64;
        Some(out)
    }

    /// Ends a send. An error counts only where nothing was taken: else the next send meets it.
    fn sent(&mut self, ring: usize, op: u64, key: Key, error: Option<i32>) {
        let Some(this) = self.rings[ring].ops.get_mut(&op) else { return };
        let Kind::Send { chain, taken, .. } = &mut this.kind else { return };
        let result = match error {
            Some(error) if *taken == 0 => Err(error),
            _ => Ok(*taken),
        };
        let chain = chain.take();
        self.end_op(ring, op, Cqe::Sent { key, chain, result });
    }

    fn peer_address(&self, sock: Sock) -> Option<std::net::SocketAddr> {
        self.conns.get(&sock.conn).map(|conn| conn.ends[1 - sock.side].addr)
    }

    /// Notes what a worker is told.
    pub(crate) fn note_cqe(&mut self, ring: usize, cqe: &Cqe) {
        let name = |key: Key| (u64::from(key.slot) << 32) | u64::from(key.generation);
        let sign = |result: &Result<u64, i32>| match result {
            Ok(n) => *n,
            Err(error) => i64::from(-*error) as u64,
        };
        let (what, which, value) = match cqe {
            Cqe::Accepted { id, socket, armed, .. } => {
                let what = if *armed { "accepted" } else { "accepted, disarmed" };
                (what, u64::from(id.0) << 32, socket.0 as u64)
            }
            Cqe::AcceptFailed { id, error, .. } => {
                ("accept failed", u64::from(id.0) << 32, i64::from(-*error) as u64)
            }
            Cqe::Data { key, buf, armed } => {
                self.trace.note_content(buf);
                let what = if *armed { "received" } else { "received, disarmed" };
                (what, name(*key), buf.len() as u64)
            }
            Cqe::RecvEnded { key, end } => match end {
                End::Eof => ("eof", name(*key), 0),
                End::NoBuffer => ("no buffer", name(*key), 0),
                End::Stopped => ("receive stopped", name(*key), 0),
                End::Error(error) => ("receive failed", name(*key), i64::from(-*error) as u64),
            },
            Cqe::Sent { key, result, .. } => ("sent", name(*key), sign(result)),
            Cqe::Connected { key, result } => ("connected", name(*key), sign(&result.map(|()| 0))),
            Cqe::DatagramSent { key, token, result } => {
                self.trace.note_content(&token.to_le_bytes());
                ("datagram sent", name(*key), sign(&result.map(|bytes| bytes as u64)))
            }
            Cqe::Closed { key } => ("closed", name(*key), 0),
            Cqe::Woken => ("woken", 0, 0),
        };
        self.note(Actor::Worker(ring), what, which, value);
    }
}
