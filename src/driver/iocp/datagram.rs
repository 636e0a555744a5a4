//! Datagram sockets.
//!
//! # Receiving
//!
//! As with streams, the kernel is asked to tell when there is something, and holds no buffer meanwhile: by a
//! receive of **no bytes that leaves the datagram where it is** (`MSG_PEEK`). It ends with `WSAEMSGSIZE`, since
//! the datagram did not fit, or with success, for an empty one. Datagrams are then taken by calls that do not
//! wait, each into a buffer from the pool. So an idle socket costs no buffer, and a cancel cannot lose a
//! datagram. (Winsock's documentation wants this flag for sockets only that are not overlapped. libuv, and what is
//! built on it, have relied on it for as long as they know Windows; where the data goes does not matter here.)
//!
//! An error that the receive of no bytes brings may still be there for the one that follows, or not any more
//! (Wine): it is kept until one or the other has told it.
//!
//! # Sending
//!
//! Each datagram has an operation object from a table of its own, until its completion was reported:
//!
//! ```text
//!            begin                packet                  reported
//!   Free ──────────► Kernel ──────────────────────────────────────► Free
//!     ▲      └──(done at once)──► Done ──(after the next wait)──►──┘
//!     └── close: Done at once, Kernel when its packet was taken
//! ```
//!
//! The kernel reads the payload while the object is its own. What is to be cut (`segment`) is sent by the same
//! object, one datagram after the other.
//!
//! # Why there are none behind a layered provider
//!
//! Whether `WSAEMSGSIZE`, which is a warning to the kernel and an error to Winsock, brings a packet when it comes
//! at once depends on what stands between; what is known is that with `FILE_SKIP_COMPLETION_PORT_ON_SUCCESS`
//! nothing that is done at once brings one. An object that is used again while its packet is on the way would
//! break invariant 8, so without this mode datagram sockets are refused.

use std::io;
use std::os::windows::io::{AsRawSocket, IntoRawSocket, RawSocket};

use windows_sys::Win32::Networking::WinSock::{
    self, MSG_PEEK, SOCKET, WSABUF, WSAECONNREFUSED, WSAECONNRESET, WSAEDESTADDRREQ, WSAEINVAL, WSAEMSGSIZE,
    WSAENETRESET, WSAEWOULDBLOCK,
};

use crate::buffer::Payload;
use crate::driver::sys::{self, RawAddress};
use crate::driver::{Address, Datagram, DatagramConfig, Event, Key, RecvEnd, check_datagram_room};

use super::complete::Read;
use super::op::{Kind, Op};
use super::slots::Ops;
use super::socket::{self, Started};
use super::{IocpDriver, Work, error};

/// Datagrams that one send is cut into at most, and bytes of all of them: as Linux has it.
const MOST_SEGMENTS: usize = 64;
const MOST_BYTES: usize = 65_507;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Kernel,
    /// To be reported.
    Done(Result<usize, i32>),
}

/// A send. The base comes first, as `OVERLAPPED` does there.
#[repr(C)]
pub(super) struct SendOp {
    op: Op,
    /// The socket's.
    key: Key,
    token: u32,
    /// Counts the uses, so that a late packet or a late report is known for one.
    generation: u32,
    state: State,
    payload: Option<Payload>,
    to: Option<RawAddress>,
    /// Bytes of each datagram that the payload is cut into, and bytes that are sent.
    size: usize,
    sent: usize,
}

impl SendOp {
    fn part(&self) -> &[u8] {
        let bytes = self.payload.as_ref().map_or(&[][..], Payload::as_slice);
        let rest = &bytes[self.sent.min(bytes.len())..];
        &rest[..rest.len().min(self.size)]
    }

    /// One datagram of it is sent; whether that was the last.
    fn advance(&mut self) -> bool {
        self.sent += self.part().len();
        self.part().is_empty()
    }
}

/// The objects of all sends.
#[derive(Default)]
pub(super) struct DatagramOps {
    // Boxed because the kernel knows where they are.
    #[allow(clippy::vec_box)]
    ops: Vec<Box<SendOp>>,
    free: Vec<u32>,
}

impl DatagramOps {
    /// Fills a free object; its name.
    fn begin(&mut self, key: Key, token: u32, datagram: Datagram) -> Key {
        let index = self.free.pop().unwrap_or_else(|| {
            self.ops.push(Box::new(SendOp {
                op: Op::new(),
                key,
                token,
                generation: 0,
                state: State::Free,
                payload: None,
                to: None,
                size: 0,
                sent: 0,
            }));
            self.ops.len() as u32 - 1
        });
        let op = &mut *self.ops[index as usize];
        debug_assert!(op.state == State::Free);
        (op.key, op.token, op.sent) = (key, token, 0);
        op.generation = op.generation.wrapping_add(1);
        op.to = datagram.to.map(|Address::Inet(to)| RawAddress::from(to));
        // Of no bytes: none, as on Linux.
        op.size = datagram.segment.map(usize::from).filter(|size| *size > 0).unwrap_or(usize::MAX);
        op.payload = Some(datagram.payload);
        Key { slot: index, generation: op.generation }
    }

    /// Objects that there are.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.ops.len()
    }

    fn get(&mut self, name: Key) -> Option<&mut SendOp> {
        let op = self.ops.get_mut(name.slot as usize)?;
        (op.state != State::Free && op.generation == name.generation).then_some(op)
    }

    /// Takes what is to be reported of an object, which is free then.
    fn end(&mut self, name: Key) -> Option<(Key, u32, Result<usize, i32>)> {
        let op = self.get(name)?;
        let State::Done(result) = op.state else { return None };
        op.state = State::Free;
        op.payload = None;
        let ended = (op.key, op.token, result);
        self.free.push(name.slot);
        Some(ended)
    }

    /// A socket is closed: cancels its sends that the kernel has, and forgets those that are done. Returns how
    /// many it cancelled.
    fn close(&mut self, key: Key, socket: SOCKET) -> u64 {
        let mut cancelled = 0;
        for index in 0..self.ops.len() {
            // Only looked at: it may be the kernel's.
            let op = &*self.ops[index];
            if op.key != key {
                continue;
            }
            match op.state {
                State::Kernel => {
                    cancelled += 1;
                    socket::cancel(socket, &op.op);
                }
                State::Done(_) => {
                    let name = Key { slot: index as u32, generation: op.generation };
                    self.end(name);
                }
                State::Free => {}
            }
        }
        cancelled
    }
}

/// Whether an error says that somebody was not there.
fn is_reset(number: i32) -> bool {
    matches!(number, WSAECONNRESET | WSAENETRESET)
}

/// The error as other systems have it.
fn of_connected(number: i32) -> i32 {
    if is_reset(number) { WSAECONNREFUSED } else { number }
}

/// Starts a receive that ends when there is something to receive, which stays where it is.
pub(super) fn wait_readable(socket: SOCKET, op: &Op) -> Started {
    let buffer = WSABUF { len: 0, buf: std::ptr::NonNull::dangling().as_ptr() };
    let (mut received, mut flags) = (0, MSG_PEEK as u32);
    // SAFETY: the vector is read within the call and names no bytes; the object keeps its place until the
    // packet was taken (invariants 5, 8).
    let result = unsafe {
        WinSock::WSARecv(
            socket,
            &raw const buffer,
            1,
            &raw mut received,
            &raw mut flags,
            op.overlapped(),
            None,
        )
    };
    match Started::of(result == 0, 0, true) {
        Started::Failed(WSAEMSGSIZE) => Started::Done(0),
        started => started,
    }
}

/// Starts sending one datagram. The vector is read within the call; bytes and address stay until the packet.
fn start(socket: SOCKET, op: &SendOp) -> Started {
    let bytes = op.part();
    // The kernel only reads; the type serves receiving too.
    let buffer = WSABUF { len: bytes.len() as u32, buf: bytes.as_ptr().cast_mut() };
    let (to, to_len) = op.to.as_ref().map_or((std::ptr::null(), 0), |to| (to.as_ptr(), to.len()));
    let mut sent = 0;
    // SAFETY: the vector is read within the call; bytes and address are the object's, which keeps its place and
    // its payload until the packet was taken (invariants 3, 8).
    let result = unsafe {
        WinSock::WSASendTo(
            socket,
            &raw const buffer,
            1,
            &raw mut sent,
            0,
            to,
            to_len,
            op.op.overlapped(),
            None,
        )
    };
    Started::of(result == 0, sent, true)
}

impl IocpDriver {
    pub(super) fn open_datagrams(&mut self, key: Key, config: &DatagramConfig) -> io::Result<()> {
        check_datagram_room(&self.memory)?;
        if !self.skip {
            let text = "datagram sockets need Winsock without layered providers";
            return Err(io::Error::new(io::ErrorKind::Unsupported, text));
        }
        let socket = sys::datagram::open(config)?;
        self.attach(socket.as_raw_socket() as SOCKET).map_err(error::io)?;
        self.ops.reach(key.slot);
        let slot = self.slots.open(key, socket.into_raw_socket() as SOCKET);
        (slot.datagram, slot.connected) = (true, config.peer.is_some());
        Ok(())
    }

    pub(super) fn begin_datagram(&mut self, key: Key, token: u32, datagram: Datagram) {
        let Some(slot) = self.slots.usable(key) else { return };
        let has_target = slot.connected || datagram.to.is_some();
        let (bytes, segment) = (datagram.payload.len(), datagram.segment.map_or(0, usize::from));
        let name = self.datagrams.begin(key, token, datagram);
        let is_cut = segment > 0 && bytes > segment;
        // What systems have different errors for, or none.
        let done = if !has_target {
            Some(Err(WSAEDESTADDRREQ))
        } else if is_cut && bytes > MOST_BYTES {
            Some(Err(WSAEMSGSIZE))
        } else if is_cut && bytes.div_ceil(segment) > MOST_SEGMENTS {
            Some(Err(WSAEINVAL))
        } else {
            self.send_on(name)
        };
        self.note_done(name, done);
    }

    /// Makes believe that the kernel keeps a datagram, which systems rarely do. Returns the pointer of its packet.
    #[cfg(test)]
    pub(super) fn keep_datagram(
        &mut self,
        key: Key,
        token: u32,
        datagram: Datagram,
    ) -> *mut windows_sys::Win32::System::IO::OVERLAPPED {
        let name = self.datagrams.begin(key, token, datagram);
        let op = &mut self.datagrams.ops[name.slot as usize];
        op.state = State::Kernel;
        self.in_flight += 1;
        self.slots.usable(key).expect("open").sends += 1;
        op.op.begin(Kind::SendDatagram, name)
    }

    /// Has a send that is done reported after the next wait.
    fn note_done(&mut self, name: Key, done: Option<Result<usize, i32>>) {
        let (Some(result), Some(op)) = (done, self.datagrams.ops.get_mut(name.slot as usize)) else { return };
        op.state = State::Done(result);
        self.later.push_back(Work::DatagramSent(name));
    }

    /// Sends until the kernel keeps the object (`None`), or all is sent.
    fn send_on(&mut self, name: Key) -> Option<Result<usize, i32>> {
        let op = &mut **self.datagrams.ops.get_mut(name.slot as usize)?;
        let slot = self.slots.usable(op.key)?;
        loop {
            op.op.begin(Kind::SendDatagram, name);
            self.counters.sqes.add(1);
            match start(slot.socket, op) {
                Started::Pending => {
                    op.state = State::Kernel;
                    slot.sends += 1;
                    self.in_flight += 1;
                    return None;
                }
                Started::Done(_) if op.advance() => return Some(Ok(op.sent)),
                Started::Done(_) => {}
                Started::Failed(number) => return Some(Err(number)),
            }
        }
    }

    /// The packet of a send.
    pub(super) fn datagram_packet(&mut self, name: Key, status: i32) -> Option<Event> {
        let Some(op) = self.datagrams.get(name).filter(|op| op.state == State::Kernel) else {
            self.counters.stale.add(1);
            return None;
        };
        let key = op.key;
        self.in_flight = self.in_flight.saturating_sub(1);
        let is_all = op.advance();
        let mut done = match error::of_status(status) {
            Some(number) => Some(Err(number)),
            None if is_all => Some(Ok(op.sent)),
            None => None,
        };
        let slot = self.slots.get(key)?;
        slot.sends = slot.sends.saturating_sub(1);
        if slot.closing {
            op.state = State::Done(Ok(0));
            self.datagrams.end(name);
            return self.closed_if_done(key);
        }
        if done.is_none() {
            done = self.send_on(name);
        }
        let op = self.datagrams.get(name)?;
        op.state = State::Done(done?);
        self.datagram_sent(name)
    }

    /// Reports a send that is done; `None` when it was forgotten with its socket.
    pub(super) fn datagram_sent(&mut self, name: Key) -> Option<Event> {
        let (key, token, result) = self.datagrams.end(name)?;
        let connected = self.slots.usable(key)?.connected;
        let number = |number| if connected { of_connected(number) } else { number };
        let result = result.map_err(|failed| error::io(number(failed)));
        Some(Event::DatagramSent { key, token, result })
    }

    /// Cancels the sends of a socket that is closing.
    pub(super) fn close_datagrams(&mut self, key: Key, socket: SOCKET) {
        self.counters.sqes.add(self.datagrams.close(key, socket));
    }

    /// Notes why the receive of no bytes ended, as far as that is an error which somebody is to be told of.
    pub(super) fn note_datagram_failure(&mut self, key: Key, number: i32) {
        let Some(slot) = self.slots.usable(key) else { return };
        let is_none = number == WSAEMSGSIZE || (!slot.connected && is_reset(number));
        slot.failed = if is_none { 0 } else { number };
    }

    /// Takes one datagram.
    pub(super) fn read_datagram(&mut self, key: Key) -> Option<Event> {
        let slot = self.slots.usable(key)?;
        let (handle, connected) = (slot.socket, slot.connected);
        let read = self.take_datagram(handle);
        let slot = self.slots.usable(key)?;
        let end = match read {
            Read::Data(buf) => {
                // There may be more: behind the others, it is this socket's turn again.
                self.work.push_back(Work::Read(key));
                return Some(Event::Received { key, buf, armed: true });
            }
            Read::Failed(number) if !connected && is_reset(number) => {
                self.work.push_back(Work::Read(key));
                return None;
            }
            Read::Nothing | Read::Eof if slot.failed == 0 => {
                self.rearm(key);
                return None;
            }
            Read::NoBuffer => RecvEnd::NoBuffer,
            Read::Nothing | Read::Eof => {
                RecvEnd::Failed(error::io(of_connected(std::mem::take(&mut slot.failed))))
            }
            Read::Failed(number) => {
                slot.failed = 0;
                RecvEnd::Failed(error::io(if connected { of_connected(number) } else { number }))
            }
        };
        slot.ops.remove(Ops::READING);
        Some(Event::RecvEnded { key, end })
    }

    fn take_datagram(&self, handle: SOCKET) -> Read {
        let mut failed = None;
        let buf =
            self.memory.pool.lease_with(|room| match sys::datagram::receive(handle as RawSocket, room) {
                Ok(len) => len,
                Err(number) => {
                    failed = Some(number);
                    0
                }
            });
        match (buf, failed) {
            (Some(buf), None) => Read::Data(buf),
            (_, Some(WSAEWOULDBLOCK)) => Read::Nothing,
            (_, Some(number)) => Read::Failed(number),
            // Only for a datagram a buffer is needed.
            (None, None) => match socket::peek(handle) {
                Err(WSAEWOULDBLOCK) => Read::Nothing,
                Ok(_) | Err(WSAEMSGSIZE) => Read::NoBuffer,
                Err(number) => Read::Failed(number),
            },
        }
    }
}
