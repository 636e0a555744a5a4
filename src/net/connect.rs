//! What is bounded: connections and send buffers. Whoever finds none waits for one, in order, for as long as he
//! said, and is then told by name what was missing.

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use crate::buffer::BufMut;
use crate::handler::{ConnId, ConnectError, ConnectErrorKind};
use crate::task::{Hub, Life, Link, TaskCore};
use crate::time::{sleep, timeout};

use super::error;
use super::stream::Stream;

/// How often the runtime's total is looked at: nobody tells when another worker makes room.
const RECHECK: Duration = Duration::from_millis(50);

/// Makes an outgoing connection, with what `begin` begins.
pub(super) async fn stream(
    limit: Duration,
    begin: impl Fn(&mut TaskCore, Rc<Link>) -> Result<ConnId, ConnectError<Rc<Link>>>,
) -> io::Result<Stream> {
    let hub = Hub::current();
    let nobody = ConnId { worker: 0, slot: 0, generation: 0 };
    let link = Rc::new(Link::new(nobody, Life::Opening, None));
    let mut refusal = None;
    let waiting = async {
        loop {
            let kind = match hub.with_core(|core| begin(core, link.clone())) {
                Ok(id) => return Ok(id),
                Err(refused) => refused.kind,
            };
            match kind {
                ConnectErrorKind::WorkerFull => {
                    refusal = Some(kind);
                    let mut place = hub.vacancies.wait();
                    poll_fn(|cx| place.poll(cx)).await;
                }
                ConnectErrorKind::RuntimeFull => {
                    refusal = Some(kind);
                    sleep(RECHECK).await;
                }
                _ => return Err(error::of_connect(kind)),
            }
        }
    };
    let id = match timeout(limit, waiting).await {
        Ok(begun) => begun?,
        Err(_) => return Err(error::of_connect(refusal.unwrap_or(ConnectErrorKind::WorkerFull))),
    };
    link.id.set(id);
    let stream = Stream::new(hub, link);
    poll_fn(|cx| stream.link.poll_open(cx)).await.map_err(error::of_close)?;
    Ok(stream)
}

/// A preregistered buffer to compose a message in. While all
/// [`send_count`](crate::BufferConfig::send_count) are in use it waits for one, at most `limit`.
///
/// ```
/// use std::time::Duration;
///
/// corelane::task::block_on(async {
///     let mut message = corelane::net::alloc(Duration::from_secs(1)).await?;
///     message.put(b"composed in place");
///     assert_eq!(message.freeze().len(), 17); // a lease to send
///     std::io::Result::Ok(())
/// })??;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// `QuotaExceeded` when there was none in time; send a `Vec` then, or raise `send_count`.
///
/// # Panics
/// Outside of a task.
pub async fn alloc(limit: Duration) -> io::Result<BufMut> {
    let hub = Hub::current();
    let waiting = async {
        loop {
            if let Some(buffer) = hub.with_core(|core| core.alloc()) {
                return buffer;
            }
            let mut place = hub.buffers.wait();
            poll_fn(|cx| place.poll(cx)).await;
        }
    };
    timeout(limit, waiting).await.map_err(|_| {
        io::Error::new(
            io::ErrorKind::QuotaExceeded,
            "no send buffer became free in time: send a Vec, or raise BufferConfig::send_count",
        )
    })
}
