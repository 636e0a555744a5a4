//! What is rare: listeners made at run time, addresses and options, Unix streams.
//!
//! A Unix stream is a connection like any other, between addresses that no network has: every name has one, and
//! every end without a name has the same. So it takes its time and meets the network's faults as one between
//! hosts does, except that connecting to a name where nobody listens, or where the queue is full, fails at
//! once. A path is a name without a file: it can be bound again as soon as its listener is gone.

use std::io;
#[cfg(unix)]
use std::net::Ipv6Addr;
use std::net::{IpAddr, SocketAddr};

use super::super::event::{Key, ListenerId};
use super::super::{Address, Addresses, ListenConfig, Listening, MAX_LISTENERS, too_many_listeners};
use super::errno;
use super::ring::{Phase, Ring};
use super::tcp::{Sock, State};
use super::trace::Actor;
use super::world::World;
use crate::config::{ListenerConfig, Sharing, SocketOptions};

/// A number that a ring gives listeners.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Number {
    /// The world's listener; `None` once it is removed.
    pub(crate) listener: Option<u32>,
    /// Accepts whose last event the worker has not taken.
    pub(crate) untold: u32,
}

impl Ring {
    /// Gives a listener a number: one that is vacant, if there is one.
    pub(crate) fn number(&mut self, listener: u32) -> io::Result<ListenerId> {
        let vacant = self.listeners.iter().position(|n| n.listener.is_none() && n.untold == 0);
        let index = match vacant {
            Some(index) => index,
            None if self.listeners.len() == MAX_LISTENERS => return Err(too_many_listeners()),
            None => {
                self.listeners.push(Number::default());
                self.listeners.len() - 1
            }
        };
        self.listeners[index].listener = Some(listener);
        Ok(ListenerId(index as u16))
    }

    /// Notes that an accept of a listener has begun (1), or that its last event was taken (-1).
    pub(crate) fn owe_accept(&mut self, id: ListenerId, change: i32) {
        if let Some(number) = self.listeners.get_mut(usize::from(id.0)) {
            number.untold = number.untold.saturating_add_signed(change);
        }
    }
}

fn os(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

impl World {
    pub(crate) fn listen_at_run_time(&mut self, ring: usize, config: &ListenConfig) -> io::Result<Listening> {
        let (addr, backlog, shared) = match config {
            ListenConfig::Tcp(config) => {
                let addr = self.own_address(ring, config).map_err(os)?;
                (addr, config.backlog, config.sharing == Sharing::PerWorker)
            }
            #[cfg(unix)]
            ListenConfig::Unix(name, backlog) => (self.unix_address(name, true), *backlog, false),
        };
        let taken = |shares: bool| !(shares && shared);
        if self.listeners.values().any(|other| other.addr == addr && taken(other.shared)) {
            return Err(os(errno::EADDRINUSE));
        }
        let listener = self.listen(addr, backlog);
        let id = match self.rings[ring].number(listener) {
            Ok(id) => id,
            Err(error) => {
                self.unlisten(listener);
                return Err(error);
            }
        };
        if let Some(listener) = self.listeners.get_mut(&listener) {
            listener.users = 1;
            listener.shared = shared;
        }
        self.note(Actor::Worker(ring), "listens", u64::from(id.0) << 32, addr.port().into());
        Ok(Listening { id, local: self.address(addr), backlog })
    }

    /// The address of a worker that asks for one: its host's, if it has one.
    pub(crate) fn own_host(&self, ring: usize, wanted: IpAddr) -> Result<IpAddr, i32> {
        match self.rings[ring].shape.host {
            Some(host) if wanted.is_unspecified() && host.is_ipv4() == wanted.is_ipv4() => Ok(host),
            Some(host) if wanted != host && !wanted.is_loopback() => Err(errno::EADDRNOTAVAIL),
            _ => Ok(wanted),
        }
    }

    /// Where a worker listens that asks for an address: on its own host, at a port that is free.
    fn own_address(&mut self, ring: usize, config: &ListenerConfig) -> Result<SocketAddr, i32> {
        let ip = self.own_host(ring, config.addr.ip())?;
        let addr = SocketAddr::new(ip, config.addr.port());
        if addr.port() != 0 {
            return Ok(addr);
        }
        // As many as there are.
        for _ in 0..28_000 {
            let port = self.ephemeral(addr).port();
            let found = SocketAddr::new(ip, port);
            if self.listeners.values().all(|listener| listener.addr != found) {
                return Ok(found);
            }
        }
        Err(errno::EADDRINUSE)
    }

    /// The socket of an open connection.
    fn open_sock(&self, ring: usize, key: Key) -> io::Result<Sock> {
        let slot = self.rings[ring].slots.get(key.slot as usize);
        match slot.filter(|slot| slot.generation == key.generation).map(|slot| slot.phase) {
            Some(Phase::Open(sock)) => Ok(sock),
            _ => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    pub(crate) fn addresses_of(&self, ring: usize, key: Key) -> io::Result<Addresses> {
        let sock = self.open_sock(ring, key)?;
        if let Some(addresses) = self.datagram_addresses(sock.conn) {
            return Ok(addresses);
        }
        let conn = self.conns.get(&sock.conn).ok_or(io::ErrorKind::NotConnected)?;
        let (own, other) = (&conn.ends[sock.side], &conn.ends[1 - sock.side]);
        let peer = (own.state == State::Open).then(|| self.address(other.addr));
        Ok(Addresses { local: self.address(own.addr), peer })
    }

    /// Checks options; they make no difference here.
    pub(crate) fn check_options_of(&self, ring: usize, key: Key, options: &SocketOptions) -> io::Result<()> {
        self.open_sock(ring, key)?;
        options.check().map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error.to_string()))
    }

    #[cfg(not(unix))]
    fn address(&self, addr: SocketAddr) -> Address {
        Address::Inet(addr)
    }
}

// ---- Unix streams

/// The addresses of names: `fd75:6e69:78::` and the name's number, 0 for none.
#[cfg(unix)]
const UNIX: u128 = 0xfd75_6e69_0078 << 80;

/// Whether an address stands for the name of a Unix socket.
pub(crate) fn is_unix(addr: SocketAddr) -> bool {
    match addr {
        #[cfg(unix)]
        SocketAddr::V6(addr) => addr.ip().to_bits() >> 80 == UNIX >> 80,
        _ => false,
    }
}

#[cfg(unix)]
mod unix {
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::SocketAddr as Name;

    use super::*;

    /// Names of Unix sockets, by number; the first is number 1.
    #[derive(Debug, Default)]
    pub(crate) struct Names(Vec<(Vec<u8>, Name)>);

    /// What two spellings of one name have in common; empty for none.
    fn bytes(name: &Name) -> Vec<u8> {
        if let Some(path) = name.as_pathname() {
            return path.as_os_str().as_bytes().to_vec();
        }
        #[cfg(target_os = "linux")]
        if let Some(name) = std::os::linux::net::SocketAddrExt::as_abstract_name(name) {
            return [&[0], name].concat();
        }
        Vec::new()
    }

    impl World {
        /// The address that stands for a name. `bind`: a listener without a name gets one of its own.
        pub(crate) fn unix_address(&mut self, name: &Name, bind: bool) -> SocketAddr {
            let mut bytes = bytes(name);
            if bytes.is_empty() && bind {
                // Nobody else has this number, and no abstract name of the kernel's choice is so long.
                bytes = format!("\0unnamed-{}", self.fresh()).into_bytes();
            }
            let number = if bytes.is_empty() {
                0
            } else {
                let known = self.names.0.iter().position(|(known, _)| *known == bytes);
                known.unwrap_or_else(|| {
                    self.names.0.push((bytes.clone(), spelled(&bytes).unwrap_or_else(|| name.clone())));
                    self.names.0.len() - 1
                }) + 1
            };
            SocketAddr::new(Ipv6Addr::from_bits(UNIX | number as u128).into(), 1)
        }

        /// The address of whoever has no name.
        pub(crate) fn unix_nowhere(&self) -> SocketAddr {
            SocketAddr::new(Ipv6Addr::from_bits(UNIX).into(), 1)
        }

        /// As the worker is told of it.
        pub(super) fn address(&self, addr: SocketAddr) -> Address {
            let SocketAddr::V6(v6) = addr else { return Address::Inet(addr) };
            if !is_unix(addr) {
                return Address::Inet(addr);
            }
            let number = (v6.ip().to_bits() & u128::from(u32::MAX)) as usize;
            let named = number.checked_sub(1).and_then(|index| self.names.0.get(index));
            match (named, Name::from_pathname("")) {
                (Some((_, name)), _) => Address::Unix(name.clone()),
                (None, Ok(unnamed)) => Address::Unix(unnamed),
                // An empty path is no name on every system; there would be nothing better to say.
                (None, Err(_)) => Address::Inet(addr),
            }
        }
    }

    /// An abstract name, as std has it.
    fn spelled(bytes: &[u8]) -> Option<Name> {
        let name = bytes.strip_prefix(&[0])?;
        #[cfg(target_os = "linux")]
        return <Name as std::os::linux::net::SocketAddrExt>::from_abstract_name(name).ok();
        #[cfg(not(target_os = "linux"))]
        return None.filter(|_: &Name| !name.is_empty());
    }
}
#[cfg(unix)]
pub(crate) use unix::Names;

impl World {
    /// Why a connection to a name cannot be begun; the network's others always can.
    pub(crate) fn refused_at_once(&self, sock: Sock) -> Option<i32> {
        let addr = self.conns.get(&sock.conn)?.ends[1].addr;
        if !is_unix(addr) {
            return None;
        }
        match self.listener_for(addr, sock.conn) {
            None => Some(errno::ECONNREFUSED),
            Some(listener) if !self.has_room(listener) => Some(errno::EBUSY),
            Some(_) => None,
        }
    }

    /// Whether a connection is one between names.
    pub(crate) fn is_local(&self, sock: Sock) -> bool {
        self.conns.get(&sock.conn).is_some_and(|conn| is_unix(conn.ends[1].addr))
    }
}
