//! Sockets for tasks.
//!
//! Receiving gives *leases*: [`Buf`](crate::Buf), the kernel's own receive buffer, which can be sent on as it is. Sending takes
//! leases, `Vec<u8>`, static and shared bytes (with the feature `bytes` also `bytes::Bytes`), and copies none of them. Every future of these sockets may be
//! dropped at any point: nothing that arrived is lost, nothing is sent twice.

mod connect;
mod datagram;
mod error;
mod methods;
mod split;
mod stream;
mod tcp;
mod udp;
#[cfg(unix)]
mod unix;
#[cfg(unix)]
mod unix_datagram;

pub use connect::alloc;
pub(crate) use error::is_shutdown;
pub use split::{OwnedReadHalf, OwnedWriteHalf, ReadHalf, ReuniteError, WriteHalf};
pub use tcp::{TcpListener, TcpStream};
pub use udp::{UdpConfig, UdpDatagram, UdpSender, UdpSocket};
#[cfg(unix)]
pub use unix::{UnixListener, UnixStream};
#[cfg(unix)]
pub use unix_datagram::{UnixDatagram, UnixIncoming};
