//! Listeners and their accept operations.
//!
//! A listener's record is used again when it was removed and nothing is armed on it. Its operations carry how
//! often that was.

use std::cell::UnsafeCell;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use io_uring::{opcode, squeue, types};

use crate::driver::sys::RawAddress;
use crate::driver::{self, AcceptMode, Key, ListenerId, MAX_LISTENERS};

use super::user_data::{Kind, encode};

/// Single accepts that may be armed on one listener at a time.
pub(super) const ONCE_OPS: u32 = 16;

struct OnceOp {
    /// Where the kernel writes the peer's address while the operation is armed.
    peer: UnsafeCell<RawAddress>,
    armed: bool,
}

pub(super) struct Listener {
    /// `None` once it is removed.
    socket: Option<OwnedFd>,
    /// How many had this number before.
    generation: u32,
    multishot: bool,
    once: Box<[OnceOp]>,
}

impl Listener {
    fn is_vacant(&self) -> bool {
        self.socket.is_none() && !self.multishot && self.once.iter().all(|op| !op.armed)
    }
}

#[derive(Default)]
pub(super) struct Listeners {
    all: Vec<Listener>,
}

impl Listeners {
    pub(super) fn add(&mut self, socket: OwnedFd) -> io::Result<ListenerId> {
        let vacant = self.all.iter().position(Listener::is_vacant);
        let index = match vacant {
            Some(index) => index,
            None if self.all.len() == MAX_LISTENERS => return Err(driver::too_many_listeners()),
            None => {
                let once = (0..ONCE_OPS)
                    .map(|_| OnceOp { peer: UnsafeCell::new(RawAddress::UNSPECIFIED), armed: false })
                    .collect();
                self.all.push(Listener { socket: None, generation: 0, multishot: false, once });
                self.all.len() - 1
            }
        };
        let listener = &mut self.all[index];
        listener.socket = Some(socket);
        listener.generation = listener.generation.wrapping_add(1);
        Ok(ListenerId(index as u16))
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
        let generation = listener.generation;
        let fd = types::Fd(listener.socket.as_ref()?.as_raw_fd());
        // A descriptor of the table has no close-on-exec, and the kernel refuses the flag for one.
        let flags = if direct { 0 } else { libc::SOCK_CLOEXEC };
        match mode {
            AcceptMode::Multishot => {
                if listener.multishot {
                    return None;
                }
                listener.multishot = true;
                let user_data = encode(Kind::AcceptMulti, Key { slot: id.0.into(), generation });
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
                Some(entry.build().user_data(once_user_data(id, index as u32, generation)))
            }
        }
    }

    /// The user data of every accept armed on a listener.
    pub(super) fn armed(&self, id: ListenerId) -> Vec<u64> {
        let Some(listener) = self.all.get(usize::from(id.0)) else { return Vec::new() };
        let generation = listener.generation;
        let multi = encode(Kind::AcceptMulti, Key { slot: id.0.into(), generation });
        let once = listener.once.iter().enumerate().filter(|(_, op)| op.armed);
        let once = once.map(|(index, _)| once_user_data(id, index as u32, generation));
        listener.multishot.then_some(multi).into_iter().chain(once).collect()
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = ListenerId> + use<> {
        (0..self.all.len()).map(|index| ListenerId(index as u16))
    }

    /// Whether a completion is of the number's present use.
    pub(super) fn is_present(&self, id: ListenerId, generation: u32) -> bool {
        self.all.get(usize::from(id.0)).is_some_and(|listener| listener.generation == generation)
    }

    /// Numbers in use or vacant.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.all.len()
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

fn once_user_data(id: ListenerId, index: u32, generation: u32) -> u64 {
    encode(Kind::AcceptOnce, Key { slot: u32::from(id.0) * ONCE_OPS + index, generation })
}

/// Listener and operation of a single accept's slot number.
pub(super) fn once_of(slot: u32) -> (ListenerId, u32) {
    (ListenerId((slot / ONCE_OPS) as u16), slot % ONCE_OPS)
}
