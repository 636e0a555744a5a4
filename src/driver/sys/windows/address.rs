//! Socket addresses as Winsock reads and writes them.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use windows_sys::Win32::Networking::WinSock::{
    ADDRESS_FAMILY, AF_INET, AF_INET6, AF_UNSPEC, IN_ADDR, IN_ADDR_0, IN6_ADDR, IN6_ADDR_0, SOCKADDR,
    SOCKADDR_IN, SOCKADDR_IN6, SOCKADDR_IN6_0,
};

/// A `sockaddr` of either family, with its length.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct RawAddress {
    storage: Storage,
    len: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
union Storage {
    family: ADDRESS_FAMILY,
    v4: SOCKADDR_IN,
    v6: SOCKADDR_IN6,
}

impl RawAddress {
    /// Of no family: room for an address of any family that is known here.
    pub(crate) const UNSPECIFIED: RawAddress = RawAddress {
        storage: Storage {
            v6: SOCKADDR_IN6 {
                sin6_family: AF_UNSPEC,
                sin6_port: 0,
                sin6_flowinfo: 0,
                sin6_addr: IN6_ADDR { u: IN6_ADDR_0 { Byte: [0; 16] } },
                Anonymous: SOCKADDR_IN6_0 { sin6_scope_id: 0 },
            },
        },
        len: size_of::<SOCKADDR_IN6>() as i32,
    };

    pub(crate) fn as_ptr(&self) -> *const SOCKADDR {
        (&raw const self.storage).cast()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut SOCKADDR {
        (&raw mut self.storage).cast()
    }

    pub(crate) fn len(&self) -> i32 {
        self.len
    }

    /// For the system to write the length of the address it wrote.
    pub(crate) fn len_mut(&mut self) -> *mut i32 {
        &raw mut self.len
    }

    /// As std knows it; `None` for a family that is not IP.
    pub(crate) fn to_std(self) -> Option<SocketAddr> {
        // SAFETY: every variant begins with the family, and the union is always wholly initialised
        // (invariant 5).
        let family = unsafe { self.storage.family };
        match family {
            AF_INET => {
                // SAFETY: the family says which variant it is (invariant 5).
                let raw = unsafe { self.storage.v4 };
                // SAFETY: the variants of an IPv4 address are the same four bytes (invariant 5).
                let ip = Ipv4Addr::from(u32::from_be(unsafe { raw.sin_addr.S_un.S_addr }));
                Some(SocketAddrV4::new(ip, u16::from_be(raw.sin_port)).into())
            }
            AF_INET6 => {
                // SAFETY: the family says which variant it is (invariant 5).
                let raw = unsafe { self.storage.v6 };
                // SAFETY: the variants of an IPv6 address are the same sixteen bytes (invariant 5).
                let ip = Ipv6Addr::from(unsafe { raw.sin6_addr.u.Byte });
                // SAFETY: both variants of the scope are the same integer (invariant 5).
                let scope = unsafe { raw.Anonymous.sin6_scope_id };
                Some(SocketAddrV6::new(ip, u16::from_be(raw.sin6_port), raw.sin6_flowinfo, scope).into())
            }
            _ => None,
        }
    }
}

impl From<SocketAddr> for RawAddress {
    fn from(address: SocketAddr) -> Self {
        let mut raw = Self::UNSPECIFIED;
        match address {
            SocketAddr::V4(v4) => {
                raw.storage.v4 = SOCKADDR_IN {
                    sin_family: AF_INET,
                    sin_port: v4.port().to_be(),
                    sin_addr: IN_ADDR { S_un: IN_ADDR_0 { S_addr: u32::from(*v4.ip()).to_be() } },
                    sin_zero: [0; 8],
                };
                raw.len = size_of::<SOCKADDR_IN>() as i32;
            }
            SocketAddr::V6(v6) => {
                raw.storage.v6 = SOCKADDR_IN6 {
                    sin6_family: AF_INET6,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: IN6_ADDR { u: IN6_ADDR_0 { Byte: v6.ip().octets() } },
                    Anonymous: SOCKADDR_IN6_0 { sin6_scope_id: v6.scope_id() },
                };
                raw.len = size_of::<SOCKADDR_IN6>() as i32;
            }
        }
        raw
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_way_to_the_system_and_back() {
        for text in ["127.1.2.3:65535", "[::1]:1", "[fe80::1%7]:80"] {
            let address: SocketAddr = text.parse().expect("an address");
            assert_eq!(RawAddress::from(address).to_std(), Some(address), "{text}");
        }
        assert_eq!(RawAddress::UNSPECIFIED.to_std(), None);
    }
}
