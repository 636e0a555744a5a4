//! Datagram sockets: one multishot `RECVMSG` for all that comes, one `SENDMSG` for each that goes.
//!
//! Their sockets are ordinary descriptors, whatever connections have: they are few. Without multishot receives
//! (before Linux 6.0, or masked) there is one `RECVMSG` for each datagram, into a buffer of the ring, and what
//! stands before the payload is put there afterwards. Without a ring of buffers a socket is polled, and one datagram
//! is received by a system call each time that it is readable.
//!
//! # Sending
//!
//! ```text
//!                begin                    completion              (a closing socket's: no event)
//!  op: (free) ──────────► the kernel's ──────────────────► (free), DatagramSent
//!         │                ▲        │ EAGAIN
//!         │ no room, or    │ room   ▼
//!         └───────────► waiting ◄───┘
//!           not its turn
//! ```
//!
//! An operation object has everything that the kernel may read of a send until its completion: header, vector,
//! address, control message, payload. Objects are boxed and used again, so nothing moves and in steady state nothing
//! is allocated.
//!
//! Sends never wait in the kernel (`MSG_DONTWAIT`): a send that io_uring tries again by itself goes out *empty* on a
//! Unix socket (6.18 at least), because the first try has consumed its vector; and many that wait are woken in no
//! order. So they come back, and are begun again when a poll says that there is room. UDP's sends go to the kernel
//! together. A Unix socket's go one after the other, because Unix datagrams keep their order (unix(7)), and two
//! of one submission would not if the receiver made room between them.
//!
//! A Unix socket that is not connected is told nothing of room in its receiver's queue (it polls as writable all the
//! time), so it tries again after [`PACE`].

use std::cell::UnsafeCell;
use std::collections::BTreeMap;

use io_uring::types::Timespec;
use io_uring::{opcode, squeue, types};

use crate::buffer::{Buf, Payload};
use crate::driver::sys::datagram::{Control, Name, receive, segment_control};
use crate::driver::{Address, CONTROL_ROOM, Datagram, Event, Key, NAME_ROOM, PRELUDE, RecvEnd};

use super::UringDriver;
use super::buf_ring::GROUP;
use super::complete::error;
use super::receive::RecvMode;
use super::user_data::{Kind, encode};

/// What multishot receives are started with: how much room there is before the payload. The same for all, and
/// never changed, so it may be read at any time.
pub(super) fn receive_header() -> Box<libc::msghdr> {
    // SAFETY: a `msghdr` is made of integers and pointers, for which zero is a value (invariant 5).
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_namelen = NAME_ROOM as libc::socklen_t;
    header.msg_controllen = CONTROL_ROOM as _;
    Box::new(header)
}

/// A send.
struct Op {
    header: libc::msghdr,
    vector: libc::iovec,
    name: Name,
    control: Control,
    payload: Option<Payload>,
    key: Key,
    token: u32,
    /// Counts the uses, so that a late completion is known for one.
    generation: u32,
    /// Counts the datagrams, which gives their order.
    number: u64,
    /// To a Unix address, given with the datagram.
    paced: bool,
    /// The kernel has it.
    in_flight: bool,
}

/// When a send is tried again for whose room nobody tells.
static PACE: Timespec = Timespec::new().nsec(1_000_000);

/// What one `RECVMSG` into a buffer of the ring reads and writes besides.
#[derive(Clone, Copy)]
struct Message {
    header: libc::msghdr,
    vector: libc::iovec,
    name: [u64; NAME_ROOM / 8],
    control: Control,
}

/// All operation objects of a driver.
#[derive(Default)]
pub(super) struct DatagramOps {
    // Boxed because the kernel knows where they are.
    #[allow(clippy::vec_box)]
    ops: Vec<Box<Op>>,
    free: Vec<u32>,
    /// Objects that are to be submitted, by `number`.
    waiting: Vec<u32>,
    count: u64,
    /// By slot, of sockets that receive without multishot; kept for the slot's next socket.
    messages: BTreeMap<u32, Box<UnsafeCell<Message>>>,
}

impl DatagramOps {
    /// Fills a free object; returns its index.
    fn begin(&mut self, key: Key, token: u32, datagram: Datagram) -> u32 {
        let index = self.free.pop().unwrap_or_else(|| {
            // SAFETY: a `msghdr` is made of integers and pointers, for which zero is a value (invariant 5).
            let header: libc::msghdr = unsafe { std::mem::zeroed() };
            self.ops.push(Box::new(Op {
                header,
                vector: libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 },
                name: Name::NONE,
                control: Control::default(),
                payload: None,
                key,
                token,
                generation: 0,
                number: 0,
                paced: false,
                in_flight: false,
            }));
            self.ops.len() as u32 - 1
        });
        let op = &mut *self.ops[index as usize];
        debug_assert!(!op.in_flight);
        op.name = datagram.to.as_ref().map_or(Name::NONE, Name::from);
        op.key = key;
        op.token = token;
        op.number = self.count;
        self.count += 1;
        op.paced = matches!(datagram.to, Some(Address::Unix(_)));
        let bytes = op.payload.insert(datagram.payload).as_slice();
        op.vector = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        op.header.msg_name = op.name.as_ptr().cast_mut().cast();
        op.header.msg_namelen = op.name.len();
        op.header.msg_iov = &raw mut op.vector;
        op.header.msg_iovlen = 1;
        (op.header.msg_control, op.header.msg_controllen) = match datagram.segment {
            Some(segment) => {
                let (control, len) = segment_control(segment);
                op.control = control;
                (op.control.as_mut_ptr().cast(), len as _)
            }
            None => (std::ptr::null_mut(), 0),
        };
        index
    }

    /// The entry that gives an object to the kernel.
    fn submit(&mut self, index: u32, fd: i32) -> squeue::Entry {
        let op = &mut *self.ops[index as usize];
        op.generation = op.generation.wrapping_add(1);
        op.in_flight = true;
        // The object stays where it is and as it is until the completion (invariant 11).
        let header: *const libc::msghdr = &raw const op.header;
        let flags = (libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) as u32;
        let entry = opcode::SendMsg::new(types::Fd(fd), header).flags(flags).build();
        let name = Key { slot: index, generation: op.generation };
        entry.user_data(encode(Kind::SendDatagram, name))
    }

    /// The kernel no longer has an object; `None` for a completion that is not of this use.
    fn returned(&mut self, name: Key) -> Option<Key> {
        let op = self.ops.get_mut(name.slot as usize)?;
        if !op.in_flight || op.generation != name.generation {
            return None;
        }
        op.in_flight = false;
        Some(op.key)
    }

    /// Ends an object's use; returns the token of its datagram.
    fn end(&mut self, index: u32) -> u32 {
        let op = &mut self.ops[index as usize];
        op.payload = None;
        self.free.push(index);
        op.token
    }

    /// Has an object wait, behind those that were given before it.
    fn wait(&mut self, index: u32) {
        let number = self.ops[index as usize].number;
        let at = self.waiting.partition_point(|&other| self.ops[other as usize].number < number);
        self.waiting.insert(at, index);
    }

    /// Objects that were ever made.
    #[cfg(test)]
    pub(super) fn objects(&self) -> usize {
        self.ops.len()
    }

    /// Takes the first object of a socket that waits.
    fn next_of(&mut self, key: Key) -> Option<u32> {
        let at = self.waiting.iter().position(|&index| self.ops[index as usize].key == key)?;
        Some(self.waiting.remove(at))
    }

    /// The header that a receive into a buffer of the ring, of `size` bytes, is started with.
    fn message(&mut self, slot: u32, size: u32) -> *mut libc::msghdr {
        let none = std::ptr::null_mut();
        // SAFETY: a `msghdr` is made of integers and pointers, for which zero is a value (invariant 5).
        let header: libc::msghdr = unsafe { std::mem::zeroed() };
        let mut fresh = Message {
            header,
            vector: libc::iovec { iov_base: none, iov_len: size as usize - PRELUDE },
            name: [0; NAME_ROOM / 8],
            control: Control::default(),
        };
        let place = self.messages.entry(slot).or_insert_with(|| Box::new(UnsafeCell::new(fresh))).get();
        let at = place.cast::<u8>();
        fresh.header.msg_name = at.wrapping_add(std::mem::offset_of!(Message, name)).cast();
        fresh.header.msg_namelen = NAME_ROOM as libc::socklen_t;
        fresh.header.msg_iov = at.wrapping_add(std::mem::offset_of!(Message, vector)).cast();
        fresh.header.msg_iovlen = 1;
        fresh.header.msg_control = at.wrapping_add(std::mem::offset_of!(Message, control)).cast();
        fresh.header.msg_controllen = CONTROL_ROOM as _;
        // SAFETY: the socket has no receive in flight, so only this driver uses the place (invariant 11).
        unsafe { place.write(fresh) };
        at.wrapping_add(std::mem::offset_of!(Message, header)).cast()
    }

    /// What stands before a payload of `len` bytes that was received so.
    fn prelude(&self, slot: u32, len: u32) -> Option<[u8; PRELUDE]> {
        let place = self.messages.get(&slot)?.get();
        // SAFETY: the receive is complete, so only this driver uses the place (invariant 11).
        let message = unsafe { place.read() };
        let header = &message.header;
        let flags = header.msg_flags as u32;
        let words = [header.msg_namelen, header.msg_controllen as u32, len, flags].map(u32::to_ne_bytes);
        let name = message.name.map(u64::to_ne_bytes);
        let control = message.control.map(u64::to_ne_bytes);
        let mut prelude = [0; PRELUDE];
        let bytes = words.as_flattened().iter().chain(name.as_flattened()).chain(control.as_flattened());
        for (place, &byte) in prelude.iter_mut().zip(bytes) {
            *place = byte;
        }
        Some(prelude)
    }

    /// Names of the sends of a socket that the kernel has.
    fn of(&self, key: Key) -> impl Iterator<Item = u64> + '_ {
        let all = self.ops.iter().enumerate();
        all.filter(move |(_, op)| op.in_flight && op.key == key).map(|(index, op)| {
            encode(Kind::SendDatagram, Key { slot: index as u32, generation: op.generation })
        })
    }
}

impl UringDriver {
    /// The entry that begins to receive from a datagram socket.
    pub(super) fn recv_datagrams(&mut self, fd: i32, key: Key) -> squeue::Entry {
        let fd = types::Fd(fd);
        let entry = match self.recv_mode {
            RecvMode::Multishot => {
                let header: *const libc::msghdr = &raw const *self.datagram_header;
                opcode::RecvMsgMulti::new(fd, header, GROUP).build()
            }
            RecvMode::Selected => {
                let header = self.datagrams.message(key.slot, self.memory.pool.buffer_size());
                let entry = opcode::RecvMsg::new(fd, header).buf_group(GROUP).build();
                entry.flags(squeue::Flags::BUFFER_SELECT)
            }
            RecvMode::Polled => opcode::PollAdd::new(fd, libc::POLLIN as u32).build(),
        };
        entry.user_data(encode(self.recv_kind(), key))
    }

    /// A datagram of `len` bytes was received into a buffer of the ring: puts what belongs before it there.
    pub(super) fn take_message(&mut self, key: Key, buffer: Option<u16>, len: u32) -> Option<Buf> {
        let prelude = self.datagrams.prelude(key.slot, len)?;
        let Some(buffer) = buffer else {
            // No bytes, for which the kernel keeps its buffer.
            return Some(Buf::copied(&prelude));
        };
        let Some(mut buf) = self.memory.pool.lease(buffer.into(), len + PRELUDE as u32) else {
            self.counters.stale.add(1);
            return None;
        };
        let bytes = buf.get_mut()?;
        bytes.copy_within(..len as usize, PRELUDE);
        bytes[..PRELUDE].copy_from_slice(&prelude);
        Some(buf)
    }

    /// Receives the datagram that a polled socket is readable for.
    pub(super) fn take_datagram(&mut self, key: Key) -> Option<Event> {
        let slot = self.slots.get(key)?;
        let fd = slot.fd()?;
        self.counters.enters.add(1);
        let mut received = Ok(0);
        let buf = self.memory.pool.lease_with(|room| {
            received = receive(fd, room);
            *received.as_ref().unwrap_or(&0)
        });
        Some(match (buf, received) {
            (None, _) => Event::RecvEnded { key, end: RecvEnd::NoBuffer },
            (Some(buf), Ok(_)) => Event::Received { key, buf, armed: false },
            (Some(_), Err(error)) => {
                let again = matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR));
                let end = if again { RecvEnd::Stopped } else { RecvEnd::Failed(error) };
                Event::RecvEnded { key, end }
            }
        })
    }

    /// Begins a send.
    pub(super) fn begin_datagram(&mut self, key: Key, token: u32, datagram: Datagram) {
        let Some(slot) = self.slots.get(key) else { return };
        let must_wait = slot.stalled || (slot.serial && slot.sends > 0);
        let index = self.datagrams.begin(key, token, datagram);
        if must_wait {
            self.datagrams.wait(index);
        } else {
            self.submit_datagram(key, index);
        }
    }

    fn submit_datagram(&mut self, key: Key, index: u32) {
        let Some(slot) = self.slots.get(key) else { return };
        slot.sends += 1;
        let entry = self.datagrams.submit(index, slot.socket);
        self.in_flight += 1;
        self.submission.push(&entry, &self.counters);
    }

    /// Submits what waits, as much as may go together.
    fn submit_waiting(&mut self, key: Key) {
        while let Some(slot) = self.slots.get(key) {
            if slot.stalled || (slot.serial && slot.sends > 0) {
                return;
            }
            let Some(index) = self.datagrams.next_of(key) else { return };
            self.submit_datagram(key, index);
        }
    }

    /// Cancels the sends of a socket that is closing.
    pub(super) fn cancel_datagrams(&mut self, key: Key) {
        while let Some(index) = self.datagrams.next_of(key) {
            self.datagrams.end(index);
        }
        for target in self.datagrams.of(key) {
            self.submission.cancel(target, encode(Kind::Cancel, key), &self.counters);
        }
        if self.slots.get(key).is_some_and(|slot| slot.stalled) {
            self.cancel(Kind::Room, key, Kind::Cancel);
        }
    }

    /// A send is done, or there was no room for it.
    pub(super) fn datagram_sent(&mut self, name: Key, result: i32) -> Option<Event> {
        let Some(key) = self.datagrams.returned(name) else {
            self.counters.stale.add(1);
            return None;
        };
        self.in_flight = self.in_flight.saturating_sub(1);
        let index = name.slot;
        let Some(slot) = self.slots.get(key) else {
            self.datagrams.end(index);
            return None;
        };
        slot.sends = slot.sends.saturating_sub(1);
        if slot.closing {
            self.datagrams.end(index);
            return self.closed_if_done(key);
        }
        if result == -libc::EAGAIN {
            self.await_room(key, index);
            return None;
        }
        let token = self.datagrams.end(index);
        self.submit_waiting(key);
        let result = if result < 0 { Err(error(result)) } else { Ok(result as usize) };
        Some(Event::DatagramSent { key, token, result })
    }

    /// Has a send that found no room wait for it, and all behind it.
    fn await_room(&mut self, key: Key, index: u32) {
        self.datagrams.wait(index);
        let Some(slot) = self.slots.get(key) else { return };
        if std::mem::replace(&mut slot.stalled, true) {
            return;
        }
        slot.sends += 1;
        let entry = if self.datagrams.ops[index as usize].paced {
            opcode::Timeout::new(&raw const PACE).build()
        } else {
            opcode::PollAdd::new(types::Fd(slot.socket), libc::POLLOUT as u32).build()
        };
        self.in_flight += 1;
        self.submission.push(&entry.user_data(encode(Kind::Room, key)), &self.counters);
    }

    /// There may be room.
    pub(super) fn room(&mut self, key: Key) -> Option<Event> {
        self.in_flight = self.in_flight.saturating_sub(1);
        let Some(slot) = self.slots.get(key) else {
            self.counters.stale.add(1);
            return None;
        };
        slot.stalled = false;
        slot.sends = slot.sends.saturating_sub(1);
        if slot.closing {
            return self.closed_if_done(key);
        }
        self.submit_waiting(key);
        None
    }
}
