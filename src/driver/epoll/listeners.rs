//! Listeners, the accept operations armed on them, and accepted sockets that nobody has adopted yet.

use std::collections::VecDeque;
use std::net::TcpListener;
use std::os::fd::{AsRawFd, OwnedFd};

use crate::driver::{AcceptMode, ListenerId, Socket};

/// Single accepts that may be armed on one listener at a time.
pub(super) const ONCE_OPS: u32 = 16;

/// Connections that one listener reports between two waits.
pub(super) const ACCEPTS: u32 = 64;

#[derive(Default)]
pub(super) struct Listener {
    /// `None` once it is removed.
    pub(super) socket: Option<TcpListener>,
    pub(super) multishot: bool,
    pub(super) once: u32,
    /// Connections may wait in its queue: from an edge until the queue was found empty.
    pub(super) ready: bool,
    /// It is in the list of what is to be looked at.
    pub(super) queued: bool,
    /// Connections reported since it came into that list.
    pub(super) served: u32,
}

impl Listener {
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
    /// The number that the next listener gets.
    pub(super) fn next_id(&self) -> ListenerId {
        ListenerId(self.all.len() as u16)
    }

    pub(super) fn add(&mut self, socket: TcpListener) {
        self.all.push(Listener { socket: Some(socket), ..Listener::default() });
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
