//! What can be sent, in one type.

use std::fmt;
use std::sync::Arc;

use super::Buf;

/// Bytes on their way to a peer: a lease, owned, shared or static bytes. None of them is copied.
#[derive(Clone)]
pub struct Payload {
    bytes: Bytes,
    /// Bytes at the front that are sent already.
    start: usize,
}

#[derive(Clone)]
enum Bytes {
    Lease(Buf),
    Free(Detached),
}

/// Bytes that do not belong to a worker's arena, so that they may cross threads.
#[derive(Clone)]
#[non_exhaustive]
pub enum Detached {
    /// Owned by this value alone.
    Owned(Vec<u8>),
    /// Living as long as the process.
    Static(&'static [u8]),
    /// Shared by reference count: what a broadcast uses, so that n receivers cost one buffer.
    Shared(Arc<[u8]>),
    /// Of the `bytes` crate (feature `bytes`).
    #[cfg(feature = "bytes")]
    Bytes(bytes::Bytes),
}

impl Detached {
    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Self::Owned(bytes) => bytes,
            Self::Static(bytes) => bytes,
            Self::Shared(bytes) => bytes,
            #[cfg(feature = "bytes")]
            Self::Bytes(bytes) => bytes,
        }
    }
}

impl Payload {
    /// The bytes not yet sent.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        let bytes = match &self.bytes {
            Bytes::Lease(lease) => &lease[..],
            Bytes::Free(free) => free.as_slice(),
        };
        &bytes[self.start..]
    }

    /// Number of bytes not yet sent.
    #[inline]
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Whether no byte is left.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Drops `n` bytes from the front.
    pub(crate) fn advance(&mut self, n: usize) {
        assert!(n <= self.len(), "advance by {n} over {} bytes", self.len());
        self.start += n;
    }

    /// Whether this payload keeps a buffer out of the worker's pool.
    pub(crate) fn is_pooled(&self) -> bool {
        matches!(&self.bytes, Bytes::Lease(lease) if lease.is_pooled())
    }

    /// Gives a lease's buffer back to the pool by copying its bytes to the heap.
    pub(crate) fn detach(&mut self) {
        if let Bytes::Lease(lease) = &mut self.bytes {
            lease.detach();
        }
    }

    /// The same bytes in a form that is cloned without copying them.
    pub(crate) fn into_shareable(self) -> Self {
        match self.bytes {
            Bytes::Free(Detached::Owned(_)) => Self::from(self.into_shared()),
            _ => self,
        }
    }

    /// The bytes not yet sent, shared; copied unless they are already.
    pub(crate) fn into_shared(self) -> Arc<[u8]> {
        match self.bytes {
            Bytes::Free(Detached::Shared(bytes)) if self.start == 0 => bytes,
            _ => Arc::from(self.as_slice()),
        }
    }

    /// The lease (what is unsent of it), when that is what this payload is.
    pub(crate) fn into_lease(self) -> Option<Buf> {
        match self.bytes {
            Bytes::Lease(mut lease) => {
                lease.advance(self.start);
                Some(lease)
            }
            Bytes::Free(_) => None,
        }
    }
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.bytes {
            Bytes::Lease(_) => "lease",
            Bytes::Free(Detached::Owned(_)) => "owned",
            Bytes::Free(Detached::Static(_)) => "static",
            Bytes::Free(Detached::Shared(_)) => "shared",
            #[cfg(feature = "bytes")]
            Bytes::Free(Detached::Bytes(_)) => "bytes",
        };
        write!(f, "Payload({kind}, {} bytes)", self.len())
    }
}

impl fmt::Debug for Detached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Detached({} bytes)", self.as_slice().len())
    }
}

impl From<Buf> for Payload {
    #[inline]
    fn from(lease: Buf) -> Self {
        Self { bytes: Bytes::Lease(lease), start: 0 }
    }
}

impl From<Vec<u8>> for Detached {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Owned(bytes)
    }
}

impl From<String> for Detached {
    fn from(text: String) -> Self {
        Self::Owned(text.into_bytes())
    }
}

impl From<&'static [u8]> for Detached {
    fn from(bytes: &'static [u8]) -> Self {
        Self::Static(bytes)
    }
}

impl<const N: usize> From<&'static [u8; N]> for Detached {
    fn from(bytes: &'static [u8; N]) -> Self {
        Self::Static(bytes)
    }
}

impl From<&'static str> for Detached {
    fn from(text: &'static str) -> Self {
        Self::Static(text.as_bytes())
    }
}

impl From<Arc<[u8]>> for Detached {
    fn from(bytes: Arc<[u8]>) -> Self {
        Self::Shared(bytes)
    }
}

/// Without copying.
///
/// ```
/// use corelane::net::{TcpListener, TcpStream};
///
/// corelane::task::block_on(async {
///     let mut listener = TcpListener::bind("127.0.0.1:0").await?;
///     let mut client = TcpStream::connect(listener.local_addr()?).await?;
///     let body = bytes::Bytes::from_static(b"a body that others have too");
///     client.send(body.slice(2..6)).await?;
///     assert_eq!(&listener.accept().await?.recv().await?.unwrap()[..], b"body");
///     std::io::Result::Ok(())
/// })??;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[cfg(feature = "bytes")]
impl From<bytes::Bytes> for Detached {
    fn from(bytes: bytes::Bytes) -> Self {
        Self::Bytes(bytes)
    }
}

impl<T: Into<Detached>> From<T> for Payload {
    fn from(bytes: T) -> Self {
        Self { bytes: Bytes::Free(bytes.into()), start: 0 }
    }
}
