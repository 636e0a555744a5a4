//! What all datagram sockets do, whatever their addresses are.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use crate::driver::{Addresses, DATAGRAM_SENDS, Datagram, DatagramConfig, Received};
use crate::handler::{CloseReason, ConnId, Taken};
use crate::task::{Hub, Life, Link, Sends};
use crate::worker::{Opening, Request};

use super::{error, stream};

/// Opening a datagram socket waits for nothing but the worker's turn.
const OPENING: Duration = Duration::from_secs(10);

/// A datagram socket from a task's side. Dropping it closes it; what was sent is on its way.
pub(super) struct Port {
    hub: Rc<Hub>,
    link: Rc<Link>,
    sends: Rc<Sends>,
    /// Where it is bound, and whom it is connected to.
    pub(super) addresses: io::Result<Addresses>,
}

impl Port {
    /// # Panics
    /// Outside of a task.
    pub(super) async fn open(config: DatagramConfig) -> io::Result<Self> {
        let hub = Hub::current();
        let nobody = ConnId { worker: 0, slot: 0, generation: 0 };
        let link = Rc::new(Link::new(nobody, Life::Opening, None));
        link.is_datagram.set(true);
        let begun = hub.with_core(|core| core.open(Opening::Datagram(config), OPENING, link.clone()));
        let id = begun.map_err(|refused| error::of_connect(refused.kind))?;
        link.id.set(id);
        let sends = Sends::new(id);
        hub.add_datagrams(sends.clone());
        let unknown = io::Error::from(io::ErrorKind::Unsupported);
        let mut port = Self { hub, link, sends, addresses: Err(unknown) };
        poll_fn(|cx| port.link.poll_open(cx)).await.map_err(error::of_close)?;
        port.addresses = stream::addresses(&port.hub, &port.link).await;
        Ok(port)
    }

    /// The next datagram, or an error that the system reports of an earlier one.
    pub(super) fn poll_recv(&self, cx: &Context<'_>) -> Poll<io::Result<Received>> {
        ready!(self.hub.poll_budget(cx));
        let id = self.link.id.get();
        match self.hub.with_core(|core| core.find(id).map(|slot| core.take(slot))) {
            Some(Taken::Data(buf)) => {
                // Written by the driver or the kernel, so it cannot be otherwise.
                let received = Received::parse(buf);
                Poll::Ready(received.ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData)))
            }
            Some(_) => match self.link.if_rare().and_then(|rare| rare.fault.take()) {
                Some(fault) => {
                    self.hub.request(Request::FaultTaken(id));
                    Poll::Ready(Err(fault))
                }
                None => {
                    self.link.reader.set(cx);
                    Poll::Pending
                }
            },
            None => Poll::Ready(Err(error::of_close(match self.link.life.get() {
                Life::Over(reason) => reason,
                _ => CloseReason::Local,
            }))),
        }
    }

    /// Sends through this socket, also when other tasks do.
    pub(super) fn sender(&self) -> Sender {
        Sender { hub: self.hub.clone(), sends: self.sends.clone() }
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        self.hub.with_core(|core| {
            if let Some(slot) = core.find(self.link.id.get()) {
                core.close(slot, CloseReason::Local);
            }
        });
        // Its senders know at once, not only when the close was carried out.
        self.sends.shut();
    }
}

/// The sending side of a socket.
#[derive(Clone)]
pub(super) struct Sender {
    hub: Rc<Hub>,
    sends: Rc<Sends>,
}

impl Sender {
    /// Gives a datagram to the worker without waiting; it comes back when too many are under way or the socket is
    /// closed.
    // A box would be an allocation for each that comes back.
    #[allow(clippy::result_large_err)]
    pub(super) fn try_begin(&self, datagram: Datagram) -> Result<(), (Datagram, io::Error)> {
        if let Some(reason) = self.sends.over() {
            return Err((datagram, error::of_close(reason)));
        }
        let Some(token) = self.sends.take() else {
            return Err((datagram, io::ErrorKind::WouldBlock.into()));
        };
        self.sends.begin(&self.hub, token, datagram);
        self.sends.abandon(token);
        Ok(())
    }

    async fn begin(&self, datagram: Datagram) -> io::Result<UnderWay<'_>> {
        let token = poll_fn(|cx| {
            ready!(self.hub.poll_budget(cx));
            self.sends.poll_take(cx)
        })
        .await
        .map_err(error::of_close)?;
        self.sends.begin(&self.hub, token, datagram);
        Ok(UnderWay { sends: &self.sends, token: Some(token) })
    }

    /// Sends one datagram and waits until the kernel has it.
    pub(super) async fn send(&self, datagram: Datagram) -> io::Result<usize> {
        self.begin(datagram).await?.await
    }

    /// Sends many; they go to the kernel together, as many as may be under way. Returns how many it took,
    /// and the first error, after which no more were begun.
    pub(super) async fn send_batch(
        &self,
        datagrams: impl Iterator<Item = Datagram>,
    ) -> (usize, io::Result<()>) {
        // Oldest first, in a ring: `first..first + len`.
        let mut under_way: [Option<UnderWay<'_>>; DATAGRAM_SENDS as usize] =
            [const { None }; DATAGRAM_SENDS as usize];
        let (mut first, mut len, mut sent) = (0, 0, 0);
        let mut outcome = Ok(());
        for datagram in datagrams {
            if len == under_way.len() {
                if let Some(oldest) = under_way[first].take() {
                    match oldest.await {
                        Ok(_) => sent += 1,
                        Err(error) => outcome = outcome.and(Err(error)),
                    }
                }
                first = (first + 1) % under_way.len();
                len -= 1;
            }
            if outcome.is_err() {
                break;
            }
            match self.begin(datagram).await {
                Ok(begun) => {
                    under_way[(first + len) % under_way.len()] = Some(begun);
                    len += 1;
                }
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        for at in 0..len {
            if let Some(oldest) = under_way[(first + at) % under_way.len()].take() {
                match oldest.await {
                    Ok(_) => sent += 1,
                    Err(error) => outcome = outcome.and(Err(error)),
                }
            }
        }
        (sent, outcome)
    }
}

/// A datagram that the kernel has not reported yet; dropped, it is sent all the same.
struct UnderWay<'a> {
    sends: &'a Sends,
    token: Option<u32>,
}

impl Future for UnderWay<'_> {
    type Output = io::Result<usize>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let Some(token) = self.token else { return Poll::Pending };
        let result = ready!(self.sends.poll_done(token, cx));
        self.token = None;
        Poll::Ready(result)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        if let Some(token) = self.token {
            self.sends.abandon(token);
        }
    }
}
