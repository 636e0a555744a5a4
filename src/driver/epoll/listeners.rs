//! Listeners, the accept operations armed on them, and accepted sockets that nobody has adopted yet.
//!
//! A listener's record is used again when it was removed and no event of it is to come.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::driver::{self, AcceptMode, ListenerId, MAX_LISTENERS, Socket};

/// Single accepts that may be armed on one listener at a time.
pub(super) const ONCE_OPS: u32 = 16;

/// Connections that one listener reports between two waits.
pub(super) const ACCEPTS: u32 = 64;

#[derive(Default)]
pub(super) struct Listener {
    /// `None` once it is removed.
    pub(super) socket: Option<OwnedFd>,
    /// How many had this number before.
    pub(super) generation: u32,
    pub(super) multishot: bool,
    pub(super) once: u32,
    /// Operations that are over, of which that is still to be reported.
    pub(super) owed: u32,
    /// Connections may wait in its queue: from an edge until the queue was found empty.
    pub(super) ready: bool,
    /// It is in the list of what is to be looked at.
    pub(super) queued: bool,
    /// Connections reported since it came into that list.
    pub(super) served: u32,
}

impl Listener {
    fn is_vacant(&self) -> bool {
        self.socket.is_none() && self.armed().is_none() && self.owed == 0 && !self.queued
    }

    /// How the next connection is accepted, if at all.
    pub(super) fn armed(&self) -> Option<AcceptMode> {
        match (self.multishot, self.once) {
            (true, _) => Some(AcceptMode::Multishot),
            (false, 0) => None,
            (false, _) => Some(AcceptMode::Once),
        }
    }

    /// Arms an operation; false when the listener is closed or all operations are armed.
    pub(super) fn arm(&mut self, mode: AcceptMode) -> bool {
        if self.socket.is_none() {
            return false;
        }
        match mode {
            AcceptMode::Multishot => !std::mem::replace(&mut self.multishot, true),
            AcceptMode::Once => {
                let free = self.once < ONCE_OPS;
                self.once += u32::from(free);
                free
            }
        }
    }

    /// Notes the end of an operation.
    pub(super) fn disarm(&mut self, mode: AcceptMode) {
        match mode {
            AcceptMode::Multishot => self.multishot = false,
            AcceptMode::Once => self.once -= 1,
        }
    }
}

#[derive(Default)]
pub(super) struct Listeners {
    all: Vec<Listener>,
    /// Accepted sockets between `Accepted` and `adopt` or `discard`: kept here, so that they are closed
    /// with the driver if it comes to neither (the worker panicked).
    loose: VecDeque<OwnedFd>,
}

impl Listeners {
    /// The number that the next listener gets, and how many had it before.
    ///
    /// # Errors
    /// When there are too many.
    pub(super) fn next_id(&mut self) -> io::Result<(ListenerId, u32)> {
        let vacant = self.all.iter().position(Listener::is_vacant);
        let index = match vacant {
            Some(index) => index,
            None if self.all.len() == MAX_LISTENERS => return Err(driver::too_many_listeners()),
            None => {
                self.all.push(Listener::default());
                self.all.len() - 1
            }
        };
        let generation = self.all[index].generation.wrapping_add(1);
        Ok((ListenerId(index as u16), generation))
    }

    /// Takes over a listener under the number that [`next_id`](Self::next_id) has given.
    pub(super) fn add(&mut self, id: ListenerId, generation: u32, socket: OwnedFd) {
        self.all[usize::from(id.0)] = Listener { socket: Some(socket), generation, ..Listener::default() };
    }

    /// Numbers in use or vacant.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn get(&mut self, id: ListenerId) -> Option<&mut Listener> {
        self.all.get_mut(usize::from(id.0))
    }

    /// Keeps an accepted socket until it is asked for.
    pub(super) fn keep(&mut self, fd: OwnedFd) -> Socket {
        let socket = Socket(fd.as_raw_fd());
        self.loose.push_back(fd);
        socket
    }

    /// Hands an accepted socket over. They are asked for in the order in which they came, nearly.
    pub(super) fn take(&mut self, socket: &Socket) -> Option<OwnedFd> {
        let index = self.loose.iter().position(|fd| fd.as_raw_fd() == socket.0)?;
        self.loose.remove(index)
    }

    /// Closes everything.
    pub(super) fn clear(&mut self) {
        self.all.clear();
        self.loose.clear();
    }
}
