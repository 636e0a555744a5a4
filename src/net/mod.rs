//! Sockets for tasks.
//!
//! Receiving gives *leases*: [`Buf`](crate::Buf), the kernel's own receive buffer, which can be sent on as it is. Sending takes
//! leases, `Vec<u8>`, static and shared bytes, and copies none of them. Every future of these sockets may be
//! dropped at any point: nothing that arrived is lost, nothing is sent twice.

mod error;
mod stream;
mod tcp;

pub(crate) use error::is_shutdown;
pub use tcp::{TcpListener, TcpStream};
