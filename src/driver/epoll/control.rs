//! What is rare: listeners that come and go, Unix connections, and what is asked of a connection's socket.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::SocketAddr;

use crate::driver::sys::{self, UnixConnect, stream};
use crate::driver::{Key, ListenerId};

use super::slots::State;
use super::submit::{Done, Started};
use super::user_data::Source;
use super::{EpollDriver, INTEREST_OUT};

impl EpollDriver {
    pub(super) fn take_listener(&mut self, socket: OwnedFd) -> io::Result<ListenerId> {
        // For all who share it; none of them wants to wait.
        stream::set_nonblocking(socket.as_fd(), true)?;
        let (id, generation) = self.listeners.next_id()?;
        self.watch(socket.as_fd(), super::INTEREST, Source::Listener(id, generation))?;
        self.listeners.add(id, generation, socket);
        Ok(id)
    }

    /// Connects at once, or is refused at once; either way it is told by the next wait.
    pub(super) fn start_unix_connect(&mut self, key: Key, target: &SocketAddr) -> io::Result<()> {
        self.counters.enters.add(1);
        let (fd, refused) = match sys::connect_unix(target)? {
            UnixConnect::Made(fd) => {
                stream::set_nonblocking(fd.as_fd(), true)?;
                self.watch(fd.as_fd(), INTEREST_OUT, Source::Conn(key))?;
                (fd, None)
            }
            UnixConnect::Refused(fd, error) => (fd, Some(error)),
        };
        let slot = self.slots.open(key, fd);
        slot.state.insert(State::CONNECT.and(State::CONNECT_OVER));
        match refused {
            None => slot.state.insert(State::WATCHED_OUT.and(State::WRITABLE)),
            Some(error) => {
                self.refused.insert(key.slot, error);
            }
        }
        self.in_flight += 1;
        self.start(Started::Done(Done::Connected(key)));
        Ok(())
    }

    /// Does something with a connection's socket.
    ///
    /// # Errors
    /// `NotConnected` when there is none; those of `with`.
    pub(in crate::driver) fn with_socket<R>(
        &mut self,
        key: Key,
        with: impl FnOnce(BorrowedFd<'_>) -> io::Result<R>,
    ) -> io::Result<R> {
        let slot = self.slots.get(key).ok_or(io::ErrorKind::NotConnected)?;
        with(slot.fd().ok_or(io::ErrorKind::NotConnected)?)
    }
}
