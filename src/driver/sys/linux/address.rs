//! Socket addresses as the kernel reads and writes them.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

/// A `sockaddr` of either family, with its length.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct RawAddress {
    storage: Storage,
    len: libc::socklen_t,
}

#[derive(Clone, Copy)]
#[repr(C)]
union Storage {
    any: libc::sockaddr,
    v4: libc::sockaddr_in,
    v6: libc::sockaddr_in6,
}

impl RawAddress {
    /// Of no family: connecting to it disconnects, which on TCP sends a reset.
    pub(crate) const UNSPECIFIED: RawAddress = RawAddress {
        storage: Storage {
            v6: libc::sockaddr_in6 {
                sin6_family: libc::AF_UNSPEC as libc::sa_family_t,
                sin6_port: 0,
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: [0; 16] },
                sin6_scope_id: 0,
            },
        },
        len: size_of::<libc::sockaddr_in6>() as libc::socklen_t,
    };

    pub(crate) fn as_ptr(&self) -> *const libc::sockaddr {
        (&raw const self.storage).cast()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut libc::sockaddr {
        (&raw mut self.storage).cast()
    }

    pub(crate) fn len(&self) -> libc::socklen_t {
        self.len
    }

    /// For the kernel to write the length of the address it wrote.
    pub(crate) fn len_mut(&mut self) -> *mut libc::socklen_t {
        &raw mut self.len
    }

    /// Makes room for an address of any family that is known here.
    pub(crate) fn reset(&mut self) {
        *self = Self::UNSPECIFIED;
    }

    /// As std knows it; `None` for a family that is not IP.
    pub(crate) fn to_std(self) -> Option<SocketAddr> {
        // SAFETY: every variant begins with the family, and the union is always wholly initialised
        // (invariant 5).
        let family = libc::c_int::from(unsafe { self.storage.any.sa_family });
        match family {
            libc::AF_INET => {
                // SAFETY: the family says which variant it is (invariant 5).
                let raw = unsafe { self.storage.v4 };
                let ip = Ipv4Addr::from(u32::from_be(raw.sin_addr.s_addr));
                Some(SocketAddrV4::new(ip, u16::from_be(raw.sin_port)).into())
            }
            libc::AF_INET6 => {
                // SAFETY: the family says which variant it is (invariant 5).
                let raw = unsafe { self.storage.v6 };
                let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
                let port = u16::from_be(raw.sin6_port);
                Some(SocketAddrV6::new(ip, port, raw.sin6_flowinfo, raw.sin6_scope_id).into())
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
                raw.storage.v4 = libc::sockaddr_in {
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from(*v4.ip()).to_be() },
                    sin_zero: [0; 8],
                };
                raw.len = size_of::<libc::sockaddr_in>() as libc::socklen_t;
            }
            SocketAddr::V6(v6) => {
                raw.storage.v6 = libc::sockaddr_in6 {
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                    sin6_scope_id: v6.scope_id(),
                };
                raw.len = size_of::<libc::sockaddr_in6>() as libc::socklen_t;
            }
        }
        raw
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_the_way_to_the_kernel_and_back() {
        for text in ["127.1.2.3:65535", "[::1]:1", "[fe80::1%7]:80"] {
            let address: SocketAddr = text.parse().expect("an address");
            assert_eq!(RawAddress::from(address).to_std(), Some(address), "{text}");
        }
        assert_eq!(RawAddress::UNSPECIFIED.to_std(), None);
    }
}
