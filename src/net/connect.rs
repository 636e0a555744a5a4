//! What is bounded: connections and send buffers. Whoever finds none waits for one, in order, for as long as he
//! said, and is then told by name what was missing.

use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use crate::buffer::BufMut;
use crate::handler::{ConnId, ConnectError, ConnectErrorKind};
use crate::task::{Hub, Life, Link, Place, TaskCore};
use crate::time::{sleep, timeout};

use super::error;
use super::stream::{Kind, Stream};

/// How often the runtime's total is looked at: nobody tells when another worker makes room.
const RECHECK: Duration = Duration::from_millis(50);

/// The shortest time limit of a connection.
const LEAST: Duration = Duration::from_millis(1);

/// Makes an outgoing connection within `limit`, with what `begin` begins when told how much time is left.
pub(super) async fn stream(
    kind: Kind,
    peer: Option<SocketAddr>,
    limit: Duration,
    begin: impl Fn(&mut TaskCore, Duration, Rc<Link>) -> Result<ConnId, ConnectError<Rc<Link>>>,
) -> io::Result<Stream> {
    let hub = Hub::current();
    let nobody = ConnId { worker: 0, slot: 0, generation: 0 };
    let link = Rc::new(Link::new(nobody, Life::Opening, peer));
    let started = hub.now();
    let mut refusal = None;
    let waiting = async {
        let mut place: Option<Place<'_>> = None;
        loop {
            if let Some(place) = &mut place {
                poll_fn(|cx| place.poll(cx)).await;
            }
            let waited = hub.now().since(started);
            // Somebody who is called at the last moment may still try.
            let left = if waited.is_zero() { limit } else { limit.saturating_sub(waited).max(LEAST) };
            let room = hub.with_core(|core| core.table.room() as usize);
            // Without room it is tried all the same: what cannot be at all is said at once.
            let kind = if place.is_some() || room == 0 || hub.vacancies.may_pass(room) {
                match hub.with_core(|core| begin(core, left, link.clone())) {
                    Ok(id) => return Ok(id),
                    Err(refused) => refused.kind,
                }
            } else {
                ConnectErrorKind::WorkerFull
            };
            match kind {
                ConnectErrorKind::WorkerFull => {
                    refusal = Some(kind);
                    match &mut place {
                        Some(place) => place.again(),
                        None => place = Some(hub.vacancies.wait()),
                    }
                }
                ConnectErrorKind::RuntimeFull => {
                    refusal = Some(kind);
                    place = None;
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
    let stream = Stream::of(kind, hub, link);
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
        let mut place: Option<Place<'_>> = None;
        loop {
            let may_try = match &mut place {
                Some(place) => {
                    poll_fn(|cx| place.poll(cx)).await;
                    true
                }
                None => hub.buffers.may_pass(hub.with_core(|core| core.memory.pool.sendable() as usize)),
            };
            if may_try && let Some(buffer) = hub.with_core(|core| core.alloc()) {
                return buffer;
            }
            match &mut place {
                Some(place) => place.again(),
                None => place = Some(hub.buffers.wait()),
            }
        }
    };
    timeout(limit, waiting).await.map_err(|_| {
        io::Error::new(
            io::ErrorKind::QuotaExceeded,
            "no send buffer became free in time: send a Vec, or raise BufferConfig::send_count",
        )
    })
}
