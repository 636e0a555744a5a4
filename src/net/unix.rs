//! Streams between processes of one machine.

use std::fmt;
use std::fs::{self, Metadata};
use std::future::poll_fn;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::driver::{Address, ListenConfig};
use crate::task::{Accepting, Binding, Hub, TaskCore};
use crate::time::sleep;
use crate::worker::Opening;

use super::connect;
use super::methods::{connection, reading, writing};
use super::split::{self, OwnedReadHalf, OwnedWriteHalf, ReadHalf, ReuniteError, WriteHalf};
use super::stream::{Kind, Stream};

/// How many may wait in a listener's queue, where nobody says.
const BACKLOG: u32 = 1024;

/// How long connecting may take, where nobody says.
const CONNECTING: Duration = Duration::from_secs(10);

/// How often a listener whose queue is full is tried: nobody tells when there is room.
const RETRY: Duration = Duration::from_millis(10);

/// A listening Unix stream socket of this worker. Dropping it closes it, and whoever was accepted and not taken, and removes
/// the socket's file, if that is still the one that it made.
///
/// ```
/// use corelane::net::{UnixListener, UnixStream};
///
/// let path = std::env::temp_dir().join(format!("corelane-doc-listener-{}", std::process::id()));
/// let at = path.clone();
/// corelane::task::block_on(async move {
///     let mut listener = UnixListener::bind(&at).await?;
///     let mut client = UnixStream::connect(&at).await?;
///     client.send("hello").await?;
///     let mut server = listener.accept().await?;
///     assert_eq!(&server.recv().await?.unwrap()[..], b"hello");
///     std::io::Result::Ok(())
/// })??;
/// assert!(!path.exists(), "the listener has removed its file");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct UnixListener {
    hub: Rc<Hub>,
    accepting: Rc<Accepting>,
    file: Option<SocketFile>,
}

impl UnixListener {
    /// Listens on a path, where a socket's file is made.
    ///
    /// # Errors
    /// `AddrInUse` when there is a file already, also a socket's whose listener is gone: remove it if you know that
    /// nobody listens there. A path of more than 107 bytes; else of the system.
    ///
    /// # Panics
    /// Outside of a task.
    pub async fn bind(path: impl AsRef<Path>) -> io::Result<Self> {
        Self::bind_addr(SocketAddr::from_pathname(path)?).await
    }

    /// Listens on an address, which may be an abstract name: that makes no file, and is free again by itself.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    ///
    /// # Panics
    /// Outside of a task.
    pub async fn bind_addr(addr: SocketAddr) -> io::Result<Self> {
        Self::bind_with_backlog(addr, BACKLOG).await
    }

    /// [`bind_addr`](Self::bind_addr) with a queue of at most so many who wait to be accepted, instead of 1024; the kernel allows
    /// `net.core.somaxconn` of them.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    ///
    /// # Panics
    /// Outside of a task.
    pub async fn bind_with_backlog(addr: SocketAddr, backlog: u32) -> io::Result<Self> {
        let hub = Hub::current();
        let path = addr.as_pathname().map(std::path::absolute).transpose()?;
        let accepting = {
            let binding = Binding::new(&hub, ListenConfig::Unix(addr, backlog));
            poll_fn(|cx| binding.poll(cx)).await.map_err(|error| explain(error, path.as_deref()))?
        };
        Ok(Self { hub, accepting, file: path.and_then(SocketFile::of) })
    }

    /// Waits for a connection. Dropped before it is done, it has taken none. While 64 connections wait for this, no more
    /// are accepted: clients wait in the kernel's queue.
    ///
    /// # Errors
    /// When the runtime was asked to stop.
    pub async fn accept(&mut self) -> io::Result<UnixStream> {
        poll_fn(|cx| self.poll_accept(cx)).await
    }

    /// [`accept`](Self::accept), for use in streams and other futures.
    pub fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<UnixStream>> {
        let link = self.accepting.poll_accept(&self.hub, cx);
        link.map_ok(|link| UnixStream { stream: Stream::of(Kind::Unix, self.hub.clone(), link) })
    }

    pub(crate) fn accepting(&self) -> &Rc<Accepting> {
        &self.accepting
    }

    /// Its address.
    ///
    /// # Errors
    /// None today; fallible as elsewhere.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match &self.accepting.local {
            Address::Unix(addr) => Ok(addr.clone()),
            Address::Inet(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

impl Drop for UnixListener {
    fn drop(&mut self) {
        // Before the socket is closed: until then the file cannot be another one by the same number.
        drop(self.file.take());
        self.accepting.close(&self.hub);
    }
}

/// What an address in use means here, and what helps.
fn explain(error: io::Error, path: Option<&Path>) -> io::Error {
    let Some(path) = path.filter(|_| error.kind() == io::ErrorKind::AddrInUse) else { return error };
    let what = match fs::symlink_metadata(path) {
        Ok(file) if file.file_type().is_socket() => {
            "there is a socket already: if nobody listens on it any more (its process has crashed, say), remove the file"
        }
        _ => "there is a file already that is no socket: choose another path, or remove it",
    };
    io::Error::new(error.kind(), format!("{}: {what}", path.display()))
}

/// The file that a listener has made. Dropping it removes the file, unless another one is there now.
struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    fn of(path: PathBuf) -> Option<Self> {
        // Gone already: then there is nothing to remove either.
        let file = fs::symlink_metadata(&path).ok()?;
        Some(Self { device: file.dev(), inode: file.ino(), path })
    }

    fn is(&self, file: &Metadata) -> bool {
        file.file_type().is_socket() && (file.dev(), file.ino()) == (self.device, self.inode)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|file| self.is(&file)) {
            // Nobody is there to be told; whoever binds next is.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// A connection of this worker to a process of this machine. It does what a [`TcpStream`](super::TcpStream) does; dropping it closes
/// it gracefully.
///
/// ```
/// use corelane::net::{UnixListener, UnixStream};
/// # #[cfg(target_os = "linux")]
/// use std::os::{linux::net::SocketAddrExt, unix::net::SocketAddr};
///
/// # #[cfg(target_os = "linux")]
/// corelane::task::block_on(async {
///     let name = SocketAddr::from_abstract_name(format!("corelane-doc-{}", std::process::id()))?;
///     let mut listener = UnixListener::bind_addr(name.clone()).await?;
///     let mut client = UnixStream::connect_addr(&name).await?;
///     client.send("there").await?;
///     let mut server = listener.accept().await?;
///     server.send(server.recv().await?.unwrap()).await?;
///     assert_eq!(&client.recv().await?.unwrap()[..], b"there");
///     std::io::Result::Ok(())
/// })??;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct UnixStream {
    stream: Stream,
}

impl UnixStream {
    /// Connects to the listener on a path. It waits while the listener's queue is full, and while the worker or the
    /// runtime holds as many connections as it may: 10 seconds at most. Dropped before it is done, no connection is left.
    ///
    /// # Errors
    /// `NotFound` or `ConnectionRefused` when nobody listens there; `ResourceBusy` when the listener's queue stays full;
    /// `QuotaExceeded` when there was no room for a connection in time; else of the system.
    ///
    /// # Panics
    /// Outside of a task.
    pub async fn connect(path: impl AsRef<Path>) -> io::Result<Self> {
        Self::connect_addr(&SocketAddr::from_pathname(path)?).await
    }

    /// [`connect`](Self::connect) to an address, which may be an abstract name.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    ///
    /// # Panics
    /// Outside of a task.
    pub async fn connect_addr(addr: &SocketAddr) -> io::Result<Self> {
        let begin = |core: &mut TaskCore, left, link| core.open(Opening::Unix(addr.clone()), left, link);
        let begun = Hub::current().now();
        loop {
            let waited = Hub::current().now().since(begun);
            match connect::stream(Kind::Unix, None, CONNECTING.saturating_sub(waited), begin).await {
                Ok(stream) => return Ok(Self { stream }),
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy && waited + RETRY < CONNECTING => {
                    sleep(RETRY).await;
                }
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    let text = "the listener's queue is full: it accepts nobody, or give it a larger backlog";
                    return Err(io::Error::new(error.kind(), text));
                }
                Err(error) => return Err(error),
            }
        }
    }

    reading!(stream);
    writing!(stream);
    connection!(stream);

    /// The peer's address; one without a name where it has none, as clients mostly do. The system is asked for it (with
    /// direct descriptors Linux 6.8).
    ///
    /// # Errors
    /// When the connection has ended; when the system cannot tell.
    pub async fn peer_addr(&self) -> io::Result<SocketAddr> {
        unix(self.stream.addresses().await?.peer)
    }

    /// This end's address; see [`peer_addr`](Self::peer_addr).
    ///
    /// # Errors
    /// As [`peer_addr`](Self::peer_addr).
    pub async fn local_addr(&self) -> io::Result<SocketAddr> {
        unix(Some(self.stream.addresses().await?.local))
    }

    /// Closes the connection when nothing was received for so long; `None` turns that off. Resolution: 1 ms.
    pub fn set_idle_timeout(&self, timeout: Option<Duration>) {
        self.stream.set_idle_timeout(timeout);
    }

    /// Aborts the connection if it is still there after so long, whatever it does; `None` takes that back. Resolution:
    /// 1 ms.
    pub fn set_deadline(&self, after: Option<Duration>) {
        self.stream.set_deadline(after);
    }

    /// Whether receiving goes on when the runtime was asked to stop; see
    /// [`TcpStream::keep_receiving_on_stop`](super::TcpStream::keep_receiving_on_stop).
    pub fn keep_receiving_on_stop(&self, on: bool) {
        self.stream.link.ends_on_stop.set(!on);
    }

    /// Closes the connection at once; what is queued is dropped.
    pub fn abort(self) {
        self.stream.abort();
    }

    /// Two halves that borrow the stream, to receive and send at the same time in one task.
    pub fn split(&mut self) -> (ReadHalf<'_>, WriteHalf<'_>) {
        split::borrowed(&mut self.stream)
    }

    /// Two halves that own the stream together, for two tasks.
    pub fn into_split(self) -> (OwnedReadHalf, OwnedWriteHalf) {
        split::owned(self.stream)
    }

    /// Puts two halves together again.
    ///
    /// # Errors
    /// [`ReuniteError`] with both when they are not of one stream, or of one of another kind.
    pub fn reunite(from: OwnedReadHalf, to: OwnedWriteHalf) -> Result<Self, ReuniteError> {
        split::reunite(Kind::Unix, from, to).map(|stream| Self { stream })
    }
}

fn unix(address: Option<Address>) -> io::Result<SocketAddr> {
    match address {
        Some(Address::Unix(address)) => Ok(address),
        _ => Err(io::ErrorKind::NotConnected.into()),
    }
}

impl fmt::Debug for UnixStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UnixStream({})", self.id())
    }
}

impl fmt::Debug for UnixListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UnixListener({:?})", self.accepting.local)
    }
}
