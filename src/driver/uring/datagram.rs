//! Datagram sockets: one multishot `RECVMSG` for all that comes, one `SENDMSG` for each that goes.
//!
//! Their sockets are ordinary descriptors, whatever connections have: they are few. Where the kernel has no
//! multishot receive (or it is masked) a socket is polled, and one datagram is received by a system call each time
//! that it is readable.
//!
//! ```text
//!                begin                    completion              (a closing socket's: no event)
//!  op: (free) ──────────► the kernel's ──────────────────► (free), DatagramSent
//! ```
//!
//! An operation object has everything that the kernel may read of a send until its completion: header, vector,
//! address, control message, payload. The control message is read when the send is carried out, which may be
//! long after its submission. Objects are boxed and used again, so nothing moves and in steady state nothing is
//! allocated.

use io_uring::{opcode, squeue, types};

use crate::buffer::Payload;
use crate::driver::sys::datagram::{Control, Name, receive, segment_control};
use crate::driver::{CONTROL_ROOM, Datagram, Event, Key, NAME_ROOM, RecvEnd};

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
    in_flight: bool,
}

/// All operation objects of a driver.
#[derive(Default)]
pub(super) struct DatagramOps {
    // Boxed because the kernel knows where they are.
    #[allow(clippy::vec_box)]
    ops: Vec<Box<Op>>,
    free: Vec<u32>,
}

impl DatagramOps {
    /// Fills a free object; returns the entry that submits it.
    fn begin(&mut self, fd: i32, key: Key, token: u32, datagram: Datagram) -> squeue::Entry {
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
                in_flight: false,
            }));
            self.ops.len() as u32 - 1
        });
        let op = &mut *self.ops[index as usize];
        debug_assert!(!op.in_flight);
        op.name = datagram.to.as_ref().map_or(Name::NONE, Name::from);
        op.key = key;
        op.token = token;
        op.generation = op.generation.wrapping_add(1);
        op.in_flight = true;
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
        // The object stays where it is and as it is until the completion (invariant 11).
        let header: *const libc::msghdr = &raw const op.header;
        let entry = opcode::SendMsg::new(types::Fd(fd), header).flags(libc::MSG_NOSIGNAL as u32).build();
        let name = Key { slot: index, generation: op.generation };
        entry.user_data(encode(Kind::SendDatagram, name))
    }

    /// Ends an object's use; `None` for a completion that is not of this use.
    fn end(&mut self, name: Key) -> Option<(Key, u32)> {
        let op = self.ops.get_mut(name.slot as usize)?;
        if !op.in_flight || op.generation != name.generation {
            return None;
        }
        op.in_flight = false;
        op.payload = None;
        self.free.push(name.slot);
        Some((op.key, op.token))
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
    pub(super) fn recv_datagrams(&self, fd: i32, key: Key) -> squeue::Entry {
        if self.recv_mode == RecvMode::Multishot {
            let header: *const libc::msghdr = &raw const *self.datagram_header;
            let entry = opcode::RecvMsgMulti::new(types::Fd(fd), header, GROUP).build();
            return entry.user_data(encode(Kind::Recv, key));
        }
        let entry = opcode::PollAdd::new(types::Fd(fd), libc::POLLIN as u32).build();
        entry.user_data(encode(Kind::Poll, key))
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

    /// Submits a send.
    pub(super) fn begin_datagram(&mut self, key: Key, token: u32, datagram: Datagram) {
        let Some(slot) = self.slots.get(key) else { return };
        slot.sends += 1;
        let fd = slot.socket;
        let entry = self.datagrams.begin(fd, key, token, datagram);
        self.in_flight += 1;
        self.submission.push(&entry, &self.counters);
    }

    /// Cancels the sends of a socket that is closing.
    pub(super) fn cancel_datagrams(&mut self, key: Key) {
        for target in self.datagrams.of(key) {
            self.submission.cancel(target, encode(Kind::Cancel, key), &self.counters);
        }
    }

    /// A send is done.
    pub(super) fn datagram_sent(&mut self, name: Key, result: i32) -> Option<Event> {
        let Some((key, token)) = self.datagrams.end(name) else {
            self.counters.stale.add(1);
            return None;
        };
        self.in_flight = self.in_flight.saturating_sub(1);
        let slot = self.slots.get(key)?;
        slot.sends = slot.sends.saturating_sub(1);
        if slot.closing {
            return self.closed_if_done(key);
        }
        let result = if result < 0 { Err(error(result)) } else { Ok(result as usize) };
        Some(Event::DatagramSent { key, token, result })
    }
}
