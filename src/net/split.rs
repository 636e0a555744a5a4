//! Streams in two halves, one for receiving and one for sending.

use std::fmt;
use std::rc::Rc;

use super::methods::{connection, reading, writing};
use super::stream::{Kind, Stream};

/// The receiving half of a borrowed stream; made by `split`.
///
/// ```
/// use corelane::net::{TcpListener, TcpStream};
/// use std::future::{Future, poll_fn};
/// use std::pin::pin;
/// use std::task::Poll;
///
/// corelane::task::block_on(async {
///     let mut listener = TcpListener::bind("127.0.0.1:0").await?;
///     let mut client = TcpStream::connect(listener.local_addr()?).await?;
///     let mut server = listener.accept().await?;
///     server.send("welcome").await?;
///     let (mut from, mut to) = client.split();
///     // Receives while it sends, in one task; any crate's `join!` does the same.
///     let (mut receiving, mut sending) = (pin!(from.recv()), pin!(to.send("hello")));
///     let mut sent = None;
///     let received = poll_fn(|cx| {
///         if sent.is_none()
///             && let Poll::Ready(result) = sending.as_mut().poll(cx)
///         {
///             sent = Some(result);
///         }
///         receiving.as_mut().poll(cx)
///     });
///     assert_eq!(&received.await?.unwrap()[..], b"welcome");
///     sent.expect("sent first")?;
///     assert_eq!(&server.recv().await?.unwrap()[..], b"hello");
///     std::io::Result::Ok(())
/// })??;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// One receiver at a time: a second one would take pieces out of the first one's data.
///
/// ```compile_fail
/// async fn two(stream: &mut corelane::net::TcpStream) {
///     let (mut from, _) = stream.split();
///     let first = from.recv();
///     let second = from.recv(); // borrowed mutably already
///     drop((first, second));
/// }
/// ```
pub struct ReadHalf<'a>(&'a Stream);

/// The sending half of a borrowed stream; made by `split`. See [`ReadHalf`] for an example.
pub struct WriteHalf<'a>(&'a Stream);

pub(super) fn borrowed(stream: &mut Stream) -> (ReadHalf<'_>, WriteHalf<'_>) {
    (ReadHalf(stream), WriteHalf(stream))
}

impl ReadHalf<'_> {
    reading!(0);
    connection!(0);
}

impl WriteHalf<'_> {
    writing!(0);
    connection!(0);
}

/// The receiving half of a stream, for a task of its own; made by `into_split`. The connection is closed when both halves are
/// dropped.
///
/// ```
/// use corelane::net::{TcpListener, TcpStream};
///
/// corelane::task::block_on(async {
///     let mut listener = TcpListener::bind("127.0.0.1:0").await?;
///     let (mut from, mut to) = TcpStream::connect(listener.local_addr()?).await?.into_split();
///     let mut other = listener.accept().await?;
///     let reading = corelane::task::spawn(async move { from.recv().await });
///     to.send("one way").await?;
///     drop(to); // tells the other side that nothing more comes
///     assert_eq!(&other.recv().await?.unwrap()[..], b"one way");
///     assert!(other.recv().await?.is_none());
///     other.send("and back").await?;
///     assert_eq!(&reading.await.unwrap()?.unwrap()[..], b"and back");
///     std::io::Result::Ok(())
/// })??;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct OwnedReadHalf(Rc<Stream>);

/// The sending half of a stream, for a task of its own; made by `into_split`. Dropping it tells the peer, after what is queued,
/// that nothing more will be sent. See [`OwnedReadHalf`] for an example.
pub struct OwnedWriteHalf {
    stream: Rc<Stream>,
    /// Put together again: nothing is told.
    is_reunited: bool,
}

pub(super) fn owned(stream: Stream) -> (OwnedReadHalf, OwnedWriteHalf) {
    let stream = Rc::new(stream);
    (OwnedReadHalf(stream.clone()), OwnedWriteHalf { stream, is_reunited: false })
}

impl OwnedReadHalf {
    reading!(0);
    connection!(0);
}

impl OwnedWriteHalf {
    writing!(stream);
    connection!(stream);

    /// Resets the connection; what is queued is dropped.
    pub fn abort(&mut self) {
        self.stream.abort();
    }
}

impl Drop for OwnedWriteHalf {
    fn drop(&mut self) {
        if !self.is_reunited {
            self.stream.shutdown();
        }
    }
}

/// Two halves that are not of one stream, or of one of another kind: here they are again.
///
/// ```
/// use corelane::net::{TcpListener, TcpStream};
///
/// corelane::task::block_on(async {
///     let mut listener = TcpListener::bind("127.0.0.1:0").await?;
///     let client = TcpStream::connect(listener.local_addr()?).await?;
///     let server = listener.accept().await?;
///     let ((from, to), (others_from, others_to)) = (client.into_split(), server.into_split());
///     let error = TcpStream::reunite(from, others_to).unwrap_err();
///     let (from, others_to) = (error.0, error.1);
///     assert!(TcpStream::reunite(from, to).is_ok());
///     assert!(TcpStream::reunite(others_from, others_to).is_ok());
///     std::io::Result::Ok(())
/// })??;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ReuniteError(pub OwnedReadHalf, pub OwnedWriteHalf);

impl fmt::Display for ReuniteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the two halves are not of one stream of this kind")
    }
}

impl std::error::Error for ReuniteError {}

pub(super) fn reunite(
    kind: Kind,
    from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
) -> Result<Stream, ReuniteError> {
    if !Rc::ptr_eq(&from.0, &to.stream) || from.0.kind() != kind {
        return Err(ReuniteError(from, to));
    }
    to.is_reunited = true;
    drop(to);
    let whole = Rc::try_unwrap(from.0);
    Ok(whole.unwrap_or_else(|_| unreachable!("a stream has two halves")))
}

impl fmt::Debug for ReadHalf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReadHalf({})", self.id())
    }
}

impl fmt::Debug for WriteHalf<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WriteHalf({})", self.id())
    }
}

impl fmt::Debug for OwnedReadHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OwnedReadHalf({})", self.id())
    }
}

impl fmt::Debug for OwnedWriteHalf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OwnedWriteHalf({})", self.id())
    }
}
