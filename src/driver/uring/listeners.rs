//! Listeners and their accept operations.

use std::cell::UnsafeCell;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;

use io_uring::{opcode, squeue, types};

use crate::driver::sys::RawAddress;
use crate::driver::{AcceptMode, Key, ListenerId};

use super::user_data::{Kind, encode};

/// Single accepts that may be armed on one listener at a time.
pub(super) const ONCE_OPS: u32 = 16;

struct OnceOp {
    /// Where the kernel writes the peer's address while the operation is armed.
    peer: UnsafeCell<RawAddress>,
    armed: bool,
}

pub(super) struct Listener {
    socket: Option<TcpListener>,
    multishot: bool,
    once: Box<[OnceOp]>,
}

#[derive(Default)]
pub(super) struct Listeners {
    all: Vec<Listener>,
}

impl Listeners {
    pub(super) fn add(&mut self, socket: TcpListener) -> ListenerId {
        let once = (0..ONCE_OPS)
            .map(|_| OnceOp { peer: UnsafeCell::new(RawAddress::UNSPECIFIED), armed: false })
            .collect();
        self.all.push(Listener { socket: Some(socket), multishot: false, once });
        ListenerId(self.all.len() as u16 - 1)
    }

    /// Closes the listening socket.
    pub(super) fn remove(&mut self, id: ListenerId) {
        if let Some(listener) = self.all.get_mut(usize::from(id.0)) {
            listener.socket = None;
        }
    }

    /// The entry that arms an accept; `None` when the listener is closed or all operations are armed.
    pub(super) fn arm(&mut self, id: ListenerId, mode: AcceptMode, direct: bool) -> Option<squeue::Entry> {
        let listener = self.all.get_mut(usize::from(id.0))?;
        let fd = types::Fd(listener.socket.as_ref()?.as_raw_fd());
        // A descriptor of the table has no close-on-exec, and the kernel refuses the flag for one.
        let flags = if direct { 0 } else { libc::SOCK_CLOEXEC };
        match mode {
            AcceptMode::Multishot => {
                if listener.multishot {
                    return None;
                }
                listener.multishot = true;
                let user_data = encode(Kind::AcceptMulti, Key { slot: id.0.into(), generation: 0 });
                let entry = opcode::AcceptMulti::new(fd).allocate_file_index(direct).flags(flags);
                Some(entry.build().user_data(user_data))
            }
            AcceptMode::Once => {
                let index = listener.once.iter().position(|op| !op.armed)?;
                let op = &mut listener.once[index];
                op.armed = true;
                let peer = op.peer.get_mut();
                peer.reset();
                // The box keeps its place while the operation is armed (invariant 7).
                let entry = opcode::Accept::new(fd, peer.as_mut_ptr(), peer.len_mut())
                    .file_index(direct.then(types::DestinationSlot::auto_target))
                    .flags(flags);
                Some(entry.build().user_data(once_user_data(id, index as u32)))
            }
        }
    }

    /// The user data of every accept armed on a listener.
    pub(super) fn armed(&self, id: ListenerId) -> Vec<u64> {
        let Some(listener) = self.all.get(usize::from(id.0)) else { return Vec::new() };
        let multi = encode(Kind::AcceptMulti, Key { slot: id.0.into(), generation: 0 });
        let once = listener.once.iter().enumerate().filter(|(_, op)| op.armed);
        let once = once.map(|(index, _)| once_user_data(id, index as u32));
        listener.multishot.then_some(multi).into_iter().chain(once).collect()
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = ListenerId> + use<> {
        (0..self.all.len() as u16).map(ListenerId)
    }

    /// Notes that the multishot accept ended; false if none was armed.
    pub(super) fn multishot_ended(&mut self, id: ListenerId) -> bool {
        let listener = self.all.get_mut(usize::from(id.0));
        listener.is_some_and(|listener| std::mem::take(&mut listener.multishot))
    }

    /// Notes that a single accept ended, and gives the peer's address that it wrote; `None` if it
    /// was not armed.
    pub(super) fn once_ended(&mut self, id: ListenerId, index: u32) -> Option<Option<SocketAddr>> {
        let op = self.all.get_mut(usize::from(id.0))?.once.get_mut(index as usize)?;
        // The kernel is done with the address: it is the operation's only completion.
        std::mem::take(&mut op.armed).then(|| op.peer.get_mut().to_std())
    }
}

fn once_user_data(id: ListenerId, index: u32) -> u64 {
    encode(Kind::AcceptOnce, Key { slot: u32::from(id.0) * ONCE_OPS + index, generation: 0 })
}

/// Listener and operation of a single accept's slot number.
pub(super) fn once_of(slot: u32) -> (ListenerId, u32) {
    (ListenerId((slot / ONCE_OPS) as u16), slot % ONCE_OPS)
}
