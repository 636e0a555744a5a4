//! What the async tier asks of the driver beyond a connection's sending and receiving, and what came of it.
//!
//! A request is noted while tasks run and carried out when the turn's wishes become operations; its
//! answer is there in the next turn at the latest.

use std::io;

use crate::config::{ConnectConfig, SocketOptions};
use crate::driver::{Address, Addresses, Datagram, DatagramConfig, Driver, Key, ListenConfig};
use crate::handler::{Conn, ConnId, Handler};

use super::Worker;
use super::accept::Acceptor;
use super::table::{Flags, Phase};

/// A socket to open.
#[derive(Debug)]
pub(crate) enum Opening {
    Tcp(ConnectConfig),
    #[cfg(unix)]
    Unix(std::os::unix::net::SocketAddr),
    Datagram(DatagramConfig),
}

/// A wish.
#[derive(Debug)]
pub(crate) enum Request {
    /// Bind a listener; answered with the same ticket. Nothing is accepted from it until `Accepting` says so: whoever
    /// asked must know its number first.
    Listen { ticket: u64, config: ListenConfig },
    /// Accept from a listener, or leave who comes in its queue.
    Accepting { listener: usize, on: bool },
    /// Accept at most so many more from a listener, those included that were not handed over yet.
    LimitAccepting { listener: usize, left: i64 },
    /// So many of them are gone.
    AcceptMore { listener: usize, count: u32 },
    /// Close a listener, and whoever was accepted from it and not handed over.
    Unlisten { listener: usize },
    /// Ask for both addresses.
    Addresses(ConnId),
    /// Set options.
    SetOptions(ConnId, Box<SocketOptions>),
    /// Send a datagram; answered with the same token.
    SendDatagram(ConnId, u32, Datagram),
    /// A fault of a datagram socket was taken note of.
    FaultTaken(ConnId),
}

/// What came of one.
#[derive(Debug)]
pub(crate) enum Answer {
    Listening {
        ticket: u64,
        result: io::Result<(usize, Address)>,
    },
    Addresses {
        id: ConnId,
        result: io::Result<Addresses>,
    },
    Options {
        id: ConnId,
        result: io::Result<()>,
    },
    DatagramSent {
        id: ConnId,
        token: u32,
        result: io::Result<usize>,
    },
    /// Receiving from a datagram socket failed.
    Fault {
        id: ConnId,
        error: io::Error,
    },
}

impl<D: Driver, H: Handler> Worker<D, H> {
    /// Carries out what was asked.
    pub(super) fn carry_out(&mut self) {
        let mut requests = std::mem::take(&mut self.core.requests);
        let mut later = Vec::new();
        for request in requests.drain(..) {
            match request {
                // On the same address, perhaps, where clients would still find the one that nobody accepts from.
                listen @ Request::Listen { .. } if self.is_unlistening() => later.push(listen),
                Request::Listen { ticket, config } => self.begin_listening(ticket, &config),
                Request::Accepting { listener, on } => self.set_accepting(listener, on),
                Request::LimitAccepting { listener, left } => self.limit_accepting(listener, left),
                Request::AcceptMore { listener, count } => self.accept_more(listener, count),
                Request::Unlisten { listener } => self.unlisten(listener),
                Request::Addresses(id) => {
                    let result = match self.core.find(id) {
                        Some(slot) => self.driver.addresses(self.core.table.key(slot)),
                        None => Err(io::ErrorKind::NotConnected.into()),
                    };
                    self.core.answers.push_back(Answer::Addresses { id, result });
                }
                Request::SetOptions(id, options) => {
                    let result = match self.core.find(id) {
                        Some(slot) => self.driver.set_options(self.core.table.key(slot), &options),
                        None => Err(io::ErrorKind::NotConnected.into()),
                    };
                    self.core.answers.push_back(Answer::Options { id, result });
                }
                Request::SendDatagram(id, token, datagram) => match self.core.find(id) {
                    Some(slot) => self.driver.send_datagram(self.core.table.key(slot), token, datagram),
                    None => {
                        let result = Err(io::ErrorKind::NotConnected.into());
                        self.core.answers.push_back(Answer::DatagramSent { id, token, result });
                    }
                },
                Request::FaultTaken(id) => {
                    if let Some(slot) = self.core.find(id) {
                        self.core.table.get_mut(slot).flags.remove(Flags::RX_FAULT);
                        self.core.mark_dirty(slot);
                    }
                }
            }
        }
        requests.append(&mut later);
        requests.append(&mut self.core.requests);
        self.core.requests = requests;
    }

    fn begin_listening(&mut self, ticket: u64, config: &ListenConfig) {
        let result = if self.core.stopping {
            Err(io::Error::other("the runtime is shutting down"))
        } else {
            self.driver.listen(config)
        };
        let result = result.map(|listening| {
            let acceptor = Acceptor::new(listening.id, listening.backlog, self.once_only).paused();
            let free = self.acceptors.iter().position(Acceptor::is_over);
            let free = free.filter(|&index| self.waiting.iter().all(|waiting| waiting.acceptor() != index));
            let index = match free {
                Some(index) => {
                    self.acceptors[index] = acceptor;
                    index
                }
                None => {
                    self.acceptors.push(acceptor);
                    self.acceptors.len() - 1
                }
            };
            (index, listening.local)
        });
        self.check_accept = true;
        self.core.answers.push_back(Answer::Listening { ticket, result });
    }

    /// A datagram socket is there.
    pub(super) fn on_datagram_open(&mut self, slot: u32) {
        let entry = self.core.table.get_mut(slot);
        entry.phase = Phase::Open;
        entry.flags.insert(Flags::DATAGRAM);
        entry.limit = 0;
        entry.idle = 0;
        self.core.retime(slot);
        self.core.mark_dirty(slot);
        self.handler.on_connected(&mut Conn { core: &mut self.core, slot });
    }

    pub(super) fn on_datagram_sent(&mut self, key: Key, token: u32, result: io::Result<usize>) {
        if self.core.table.find(key).is_none() {
            self.core.counters.stale.add(1);
            return;
        }
        self.core.counters.sends.add(1);
        if let Ok(bytes) = &result {
            self.core.counters.bytes_sent.add(*bytes as u64);
        }
        let id = self.core.name(key);
        self.core.answers.push_back(Answer::DatagramSent { id, token, result });
    }
}
