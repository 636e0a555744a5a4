//! Error numbers that the simulated kernel answers with: those of the host, so that an
//! [`io::Error`](std::io::Error) made of one says what it means.

#[cfg(unix)]
pub(crate) use libc::{
    EACCES, EADDRINUSE, EADDRNOTAVAIL, EAFNOSUPPORT, EBUSY, ECANCELED, ECONNABORTED, ECONNREFUSED,
    ECONNRESET, EDESTADDRREQ, EHOSTUNREACH, EINVAL, EMFILE, EMSGSIZE, ENETUNREACH, ENFILE, ENOBUFS, ENOMEM,
    EPIPE, ETIMEDOUT,
};

#[cfg(windows)]
mod windows {
    pub(crate) const EACCES: i32 = 10013;
    pub(crate) const EADDRINUSE: i32 = 10048;
    pub(crate) const EADDRNOTAVAIL: i32 = 10049;
    pub(crate) const EAFNOSUPPORT: i32 = 10047;
    pub(crate) const EBUSY: i32 = 170;
    pub(crate) const ECANCELED: i32 = 995;
    pub(crate) const ECONNABORTED: i32 = 10053;
    pub(crate) const ECONNREFUSED: i32 = 10061;
    pub(crate) const ECONNRESET: i32 = 10054;
    pub(crate) const EDESTADDRREQ: i32 = 10039;
    pub(crate) const EHOSTUNREACH: i32 = 10065;
    pub(crate) const EINVAL: i32 = 10022;
    pub(crate) const EMFILE: i32 = 10024;
    pub(crate) const EMSGSIZE: i32 = 10040;
    pub(crate) const ENETUNREACH: i32 = 10051;
    pub(crate) const ENFILE: i32 = 10024;
    pub(crate) const ENOBUFS: i32 = 10055;
    pub(crate) const ENOMEM: i32 = 8;
    pub(crate) const EPIPE: i32 = 109;
    pub(crate) const ETIMEDOUT: i32 = 10060;
}
#[cfg(windows)]
pub(crate) use windows::*;
