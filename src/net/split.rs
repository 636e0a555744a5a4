//! Streams in two halves, one for receiving and one for sending.

use std::fmt;
use std::rc::Rc;

use super::methods::{connection, reading, writing};
use super::stream::Stream;

/// The receiving half of a borrowed stream; made by `split`.
pub struct ReadHalf<'a>(&'a Stream);

/// The sending half of a borrowed stream; made by `split`.
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

/// Two halves that are not of one stream.
#[derive(Debug)]
pub struct ReuniteError(pub OwnedReadHalf, pub OwnedWriteHalf);

impl fmt::Display for ReuniteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the two halves are not of one stream")
    }
}

impl std::error::Error for ReuniteError {}

pub(super) fn reunite(from: OwnedReadHalf, mut to: OwnedWriteHalf) -> Result<Stream, ReuniteError> {
    if !Rc::ptr_eq(&from.0, &to.stream) {
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
