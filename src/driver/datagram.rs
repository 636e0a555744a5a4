//! Datagrams as drivers take and bring them.
//!
//! A datagram socket is a connection to a driver: a [`Key`](super::Key), `recv`, `cancel_recv`, `close` and their
//! events are the same. Different are how it is opened ([`open_datagram`](super::Driver::open_datagram)), how it
//! sends ([`send_datagram`](super::Driver::send_datagram)), and what is in a received buffer: not the bytes
//! alone, but a whole [`Received`] in the layout of `io_uring_recvmsg_out`, on every backend, so that the sender's
//! address travels in the buffer and takes no memory of its own.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use crate::buffer::{Buf, Payload};

/// Datagrams of one socket that may be given to a driver at a time.
pub(crate) const DATAGRAM_SENDS: u32 = 64;

/// An address of a socket.
#[derive(Clone, Debug)]
pub enum Address {
    /// Of the internet protocols.
    Inet(SocketAddr),
    /// Of this machine: a path, an abstract name, or none.
    #[cfg(unix)]
    Unix(std::os::unix::net::SocketAddr),
}

/// A datagram socket to open.
#[derive(Clone, Debug)]
pub struct DatagramConfig {
    /// The local address; `None` only for Unix sockets that nobody needs to answer.
    pub local: Option<Address>,
    /// The only peer, of a connected socket.
    pub peer: Option<Address>,
    /// `SO_REUSEPORT`.
    pub reuse_port: bool,
    /// `SO_BROADCAST`.
    pub broadcast: bool,
    /// Whether the kernel may join datagrams of one sender (`UDP_GRO`, Linux 5.0).
    #[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "it may: nobody else does"))]
    pub gro: bool,
    /// `SO_RCVBUF` in bytes.
    pub recv_buffer: Option<u32>,
    /// `SO_SNDBUF` in bytes.
    pub send_buffer: Option<u32>,
}

/// A datagram to send.
#[derive(Debug)]
pub struct Datagram {
    /// Its bytes; may be none.
    pub payload: Payload,
    /// Where to; `None` on a connected socket.
    pub to: Option<Address>,
    /// The kernel cuts the bytes into datagrams of this size (`UDP_SEGMENT`, Linux 4.18).
    pub segment: Option<u16>,
}

/// Bytes of the header of a received buffer: lengths of name, control messages and payload, and flags, each
/// 32 bits of this machine's order.
const HEADER: usize = 16;
/// Room for the sender's address behind it: a `sockaddr_un` and a little more.
pub(crate) const NAME_ROOM: usize = 112;
/// Room for control messages behind that: one with an integer.
pub(crate) const CONTROL_ROOM: usize = 32;
/// Where the payload begins.
pub(crate) const PRELUDE: usize = HEADER + NAME_ROOM + CONTROL_ROOM;

/// `MSG_TRUNC`, as Linux has it.
const TRUNCATED: u32 = 0x20;
const AF_UNIX: u16 = 1;
const AF_INET: u16 = 2;
#[cfg(target_os = "linux")]
const AF_INET6: u16 = 10;
#[cfg(not(target_os = "linux"))]
const AF_INET6: u16 = 23;

/// A datagram that was received, taken out of its buffer.
#[derive(Debug)]
pub struct Received {
    /// Its bytes; may be none.
    pub bytes: Buf,
    /// Who sent it, if that socket has an address.
    pub from: Option<Address>,
    /// Several datagrams of this size were joined (`UDP_GRO`).
    pub segment: Option<u16>,
    /// Its end did not fit into the buffer and is lost.
    pub truncated: bool,
}

impl Received {
    /// Reads what a driver put into a buffer; `None` for anything else.
    pub(crate) fn parse(mut buf: Buf) -> Option<Self> {
        let word = |at: usize| Some(u32::from_ne_bytes(buf.get(at..at + 4)?.try_into().ok()?));
        let (name, control, payload, flags) = (word(0)?, word(4)?, word(8)?, word(12)?);
        let len = buf.len().checked_sub(PRELUDE)?;
        let name = &buf[HEADER..HEADER + (name as usize).min(NAME_ROOM)];
        let from = address(name);
        let control = &buf[HEADER + NAME_ROOM..][..(control as usize).min(CONTROL_ROOM)];
        let segment = segment(control);
        let truncated = flags & TRUNCATED != 0 || payload as usize > len;
        buf.advance(PRELUDE);
        Some(Self { bytes: buf, from, segment, truncated })
    }

    /// Writes what stands before a payload of `len` bytes, for drivers that fill a buffer themselves.
    pub(crate) fn write_prelude(room: &mut [u8; PRELUDE], from: SocketAddr, len: usize, truncated: bool) {
        *room = [0; PRELUDE];
        let (name, name_len) = name_of(from);
        let words = [name_len as u32, 0, len as u32, if truncated { TRUNCATED } else { 0 }];
        for (place, word) in room.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_ne_bytes());
        }
        room[HEADER..HEADER + name.len()].copy_from_slice(&name);
    }
}

/// A `sockaddr` of the internet protocols, and how much of it counts.
pub(crate) fn name_of(address: SocketAddr) -> ([u8; 28], usize) {
    let mut name = [0; 28];
    name[2..4].copy_from_slice(&address.port().to_be_bytes());
    match address {
        SocketAddr::V4(v4) => {
            name[..2].copy_from_slice(&AF_INET.to_ne_bytes());
            name[4..8].copy_from_slice(&v4.ip().octets());
            (name, 16)
        }
        SocketAddr::V6(v6) => {
            name[..2].copy_from_slice(&AF_INET6.to_ne_bytes());
            name[4..8].copy_from_slice(&v6.flowinfo().to_ne_bytes());
            name[8..24].copy_from_slice(&v6.ip().octets());
            name[24..].copy_from_slice(&v6.scope_id().to_ne_bytes());
            (name, 28)
        }
    }
}

/// The address in a `sockaddr`; `None` for no address, or none that is known here.
fn address(name: &[u8]) -> Option<Address> {
    let bytes = |from: usize, to: usize| name.get(from..to);
    let port = || Some(u16::from_be_bytes(bytes(2, 4)?.try_into().ok()?));
    match u16::from_ne_bytes(bytes(0, 2)?.try_into().ok()?) {
        AF_INET => {
            let ip: [u8; 4] = bytes(4, 8)?.try_into().ok()?;
            Some(Address::Inet(SocketAddrV4::new(Ipv4Addr::from(ip), port()?).into()))
        }
        AF_INET6 => {
            let flow = u32::from_ne_bytes(bytes(4, 8)?.try_into().ok()?);
            let ip: [u8; 16] = bytes(8, 24)?.try_into().ok()?;
            let scope = u32::from_ne_bytes(bytes(24, 28)?.try_into().ok()?);
            Some(Address::Inet(SocketAddrV6::new(Ipv6Addr::from(ip), port()?, flow, scope).into()))
        }
        AF_UNIX => unix_address(&name[2..]),
        _ => None,
    }
}

#[cfg(target_os = "linux")]
fn unix_address(path: &[u8]) -> Option<Address> {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::SocketAddr;
    let address = match path.split_first() {
        None => return None,
        Some((0, name)) => SocketAddr::from_abstract_name(name),
        Some(_) => {
            let end = path.iter().position(|&byte| byte == 0).unwrap_or(path.len());
            SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(&path[..end]))
        }
    };
    address.ok().map(Address::Unix)
}

#[cfg(not(target_os = "linux"))]
fn unix_address(_: &[u8]) -> Option<Address> {
    None
}

/// The size of joined datagrams, from a control message: length, level (`SOL_UDP`), type (`UDP_GRO`), value.
fn segment(control: &[u8]) -> Option<u16> {
    let int = |at: usize| Some(i32::from_ne_bytes(control.get(at..at + 4)?.try_into().ok()?));
    let word = size_of::<usize>();
    let (level, kind) = (int(word)?, int(word + 4)?);
    let value = int(word + 8)?;
    (level == 17 && kind == 104).then(|| u16::try_from(value).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::{BufferConfig, Pool};
    use proptest::prelude::*;

    fn buffer(bytes: &[u8]) -> Buf {
        let config = BufferConfig { size: 4096, count: 1, send_count: 1, guard: false };
        let pool = Pool::new(&config).expect("a small pool");
        let fill = |room: &mut [u8]| {
            room[..bytes.len()].copy_from_slice(bytes);
            bytes.len()
        };
        pool.lease_with(fill).expect("free")
    }

    proptest! {
        #[test]
        fn no_bytes_whatever_make_parsing_fail_badly(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let payload = bytes.len().saturating_sub(PRELUDE);
            match Received::parse(buffer(&bytes)) {
                Some(received) => prop_assert_eq!(received.bytes.len(), payload),
                None => prop_assert!(bytes.len() < PRELUDE),
            }
        }

        #[test]
        fn a_prelude_says_who_sent_the_bytes_behind_it(
            v6 in any::<bool>(), ip in any::<u128>(), port in any::<u16>(), scope in any::<u32>(),
            bytes in prop::collection::vec(any::<u8>(), 0..50), truncated in any::<bool>(),
        ) {
            let from: SocketAddr = if v6 {
                SocketAddrV6::new(Ipv6Addr::from(ip), port, 7, scope).into()
            } else {
                SocketAddrV4::new(Ipv4Addr::from(ip as u32), port).into()
            };
            let mut prelude = [0; PRELUDE];
            Received::write_prelude(&mut prelude, from, bytes.len(), truncated);
            let received = Received::parse(buffer(&[&prelude[..], &bytes].concat())).expect("whole");
            prop_assert_eq!(&received.bytes[..], &bytes[..]);
            prop_assert!(matches!(received.from, Some(Address::Inet(found)) if found == from));
            prop_assert_eq!((received.truncated, received.segment), (truncated, None));
        }
    }
}
