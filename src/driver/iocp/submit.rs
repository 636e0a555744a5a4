//! The way down: operations are started, cancelled and given up.

use std::io;
use std::os::windows::io::IntoRawSocket;

use windows_sys::Win32::Networking::WinSock::{INVALID_SOCKET, SOCKET};

use crate::buffer::Chain;
use crate::config::ConnectConfig;
use crate::driver::sys::{self, RawAddress};
use crate::driver::{AcceptMode, CloseHow, Event, Key, ListenerId, Socket};

use super::op::Kind;
use super::slots::Ops;
use super::socket::{self, Started};
use super::{IocpDriver, Work, datagram, error};

impl IocpDriver {
    pub(super) fn start_accept(&mut self, listener: ListenerId, mode: AcceptMode) {
        let started = match mode {
            AcceptMode::Once => self.listeners.arm(listener, &self.extensions),
            AcceptMode::Multishot => Err(error::UNSUPPORTED),
        };
        match started {
            Ok(()) => {
                self.counters.sqes.add(1);
                self.in_flight += 1;
            }
            Err(number) => {
                let error = error::io(number);
                self.listeners.owe(listener, 1);
                self.ready.push_back(Event::AcceptFailed { listener, mode, error });
            }
        }
    }

    /// Has a socket's packets come to this worker's port, once and for its life.
    pub(super) fn attach(&self, socket: SOCKET) -> Result<(), i32> {
        let number = |error: io::Error| error.raw_os_error().unwrap_or(error::UNSUPPORTED);
        // First of all: where the rest fails, that is told when the socket was found empty, which must not
        // mean waiting for the peer.
        socket::set_nonblocking(socket)?;
        self.port.associate(socket).map_err(number)?;
        if self.skip {
            socket::skip_packets_of_successes(socket).map_err(number)?;
        }
        Ok(())
    }

    pub(super) fn open_accepted(&mut self, key: Key, socket: &Socket) {
        let attached = self.attach(socket.handle());
        self.ops.reach(key.slot);
        let slot = self.slots.open(key, socket.handle());
        // Nobody is told here, so what is asked of it next is refused.
        slot.failed = attached.err().unwrap_or(0);
    }

    pub(super) fn start_connect(&mut self, key: Key, config: &ConnectConfig) -> io::Result<()> {
        let extensions = self.extensions[usize::from(config.target.is_ipv6())];
        let extensions = extensions.ok_or_else(|| error::io(error::UNSUPPORTED))?;
        let socket = sys::client(config)?;
        self.attach(sys_handle(&socket)).map_err(error::io)?;
        self.ops.reach(key.slot);
        let slot = self.slots.open(key, socket.into_raw_socket() as SOCKET);
        let op = &self.ops.get(key.slot).send;
        op.begin(Kind::Connect, key);
        self.counters.sqes.add(1);
        match extensions.connect(slot.socket, &RawAddress::from(config.target), op, self.skip) {
            Started::Pending => {
                slot.ops.insert(Ops::CONNECT);
                self.in_flight += 1;
            }
            Started::Done(_) => {
                slot.outcome = Ok(0);
                slot.ops.insert(Ops::CONNECTED);
                self.later.push_back(Work::Connected(key));
            }
            Started::Failed(number) => {
                slot.outcome = Err(number);
                slot.ops.insert(Ops::CONNECTED);
                self.later.push_back(Work::Connected(key));
            }
        }
        Ok(())
    }

    /// Waits for something to receive. What is there already is taken after the next wait of the worker, so
    /// that a connection where there always is something cannot hide the others.
    #[inline]
    pub(super) fn start_recv(&mut self, key: Key) {
        let Some(slot) = self.slots.usable(key) else { return };
        if slot.ops.has(Ops::RECV) || slot.ops.has(Ops::READING) {
            return;
        }
        slot.ops.remove(Ops::CANCELLED);
        if slot.failed == 0 {
            let op = &self.ops.get(key.slot).recv;
            op.begin(Kind::Recv, key);
            self.counters.sqes.add(1);
            let started = if slot.datagram {
                datagram::wait_readable(slot.socket, op)
            } else {
                socket::wait_readable(slot.socket, op, self.skip)
            };
            match started {
                Started::Pending => {
                    slot.ops.insert(Ops::RECV);
                    self.in_flight += 1;
                    return;
                }
                Started::Done(_) => {}
                Started::Failed(number) if slot.datagram => self.note_datagram_failure(key, number),
                Started::Failed(number) => slot.failed = number,
            }
        }
        let Some(slot) = self.slots.usable(key) else { return };
        slot.ops.insert(Ops::READING);
        self.later.push_back(Work::Read(key));
    }

    pub(super) fn stop_recv(&mut self, key: Key) {
        let Some(slot) = self.slots.usable(key) else { return };
        if slot.ops.has(Ops::RECV) {
            slot.ops.insert(Ops::CANCELLED);
            self.counters.sqes.add(1);
            socket::cancel(slot.socket, &self.ops.get(key.slot).recv);
        } else if slot.ops.has(Ops::READING) {
            slot.ops.insert(Ops::CANCELLED);
        }
    }

    #[inline]
    pub(super) fn start_send(&mut self, key: Key, chain: Chain) {
        let Some(slot) = self.slots.usable(key) else {
            self.memory.chunks.clear(chain);
            return;
        };
        // The object would be used while it is with the kernel (promise 3).
        assert!(slot.chain.is_empty() && !slot.ops.has(Ops::CONNECT), "a send while another is in flight");
        slot.chain = chain;
        let op = &self.ops.get(key.slot).send;
        op.begin(Kind::Send, key);
        self.counters.sqes.add(1);
        // A connection that never came to be refuses.
        let started = match slot.failed {
            0 => socket::send(slot.socket, &self.memory.chunks, &slot.chain, op, self.skip),
            number => Started::Failed(number),
        };
        slot.outcome = match started {
            Started::Pending => {
                slot.ops.insert(Ops::SEND);
                self.in_flight += 1;
                return;
            }
            Started::Done(sent) => Ok(sent),
            Started::Failed(number) => Err(number),
        };
        slot.ops.insert(Ops::SENT);
        self.later.push_back(Work::Sent(key));
    }

    pub(super) fn stop_send(&mut self, key: Key) {
        let Some(slot) = self.slots.usable(key) else { return };
        if slot.ops.has(Ops::SEND) {
            self.counters.sqes.add(1);
            socket::cancel(slot.socket, &self.ops.get(key.slot).send);
        }
    }

    /// Cancels what is in flight and closes the socket. The objects stay with the kernel until their packets
    /// were taken, and the slot with them: that the socket's number may mean another one at once harms
    /// nobody, since packets name objects.
    pub(super) fn begin_close(&mut self, key: Key, how: CloseHow) {
        let Some(slot) = self.slots.usable(key) else { return };
        slot.closing = true;
        let ops = self.ops.get(key.slot);
        if slot.ops.has(Ops::RECV) {
            self.counters.sqes.add(1);
            socket::cancel(slot.socket, &ops.recv);
        }
        if slot.ops.has(Ops::SEND) || slot.ops.has(Ops::CONNECT) {
            self.counters.sqes.add(1);
            socket::cancel(slot.socket, &ops.send);
        }
        let handle = slot.socket;
        if slot.datagram {
            self.close_datagrams(key, handle);
        }
        let Some(slot) = self.slots.get(key) else { return };
        if slot.ops.has(Ops::SENT) {
            let chain = slot.chain.take();
            self.memory.chunks.clear(chain);
        }
        if how == CloseHow::Reset && !slot.datagram && !slot.ops.has(Ops::CONNECT) {
            socket::reset_on_close(slot.socket);
        }
        self.counters.sqes.add(1);
        socket::close(slot.socket);
        slot.socket = INVALID_SOCKET;
        if let Some(closed) = self.closed_if_done(key) {
            self.ready.push_back(closed);
        }
    }
}

fn sys_handle(socket: &impl std::os::windows::io::AsRawSocket) -> SOCKET {
    socket.as_raw_socket() as SOCKET
}
