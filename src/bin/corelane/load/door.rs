//! What the generator needs of the tier that it runs on: the worker as a [`Lane`], a connection as a [`Door`].

use std::time::Duration;

use corelane::{Conn, ConnId, ConnectConfig, Cx, Time};

use super::handler::{Generator, Peer};

/// A connection.
pub trait Door {
    /// The time of this turn.
    fn now(&self) -> Time;
    /// What the generator keeps of it.
    fn peer(&mut self) -> &mut Peer;
    /// Queues bytes; false when the connection does not take them.
    fn send(&mut self, bytes: &'static [u8]) -> bool;
    /// Has the generator asked, after that time, which replies are overdue.
    fn set_timer(&mut self, after: Duration);
    /// Resets it.
    fn abort(&mut self);
}

/// The worker.
pub trait Lane {
    /// A connection of it.
    type Door<'a>: Door
    where
        Self: 'a;
    /// The time of this turn.
    fn now(&self) -> Time;
    /// A connection that is open.
    fn door(&mut self, id: ConnId) -> Option<Self::Door<'_>>;
    /// Begins a connection; false when there is no place for it.
    fn connect(&mut self, config: ConnectConfig, peer: Peer) -> bool;
    /// Has the generator advanced at that time; `None` for never.
    fn set_alarm(&mut self, at: Option<Time>);
}

impl Door for Conn<'_, Generator> {
    fn now(&self) -> Time {
        Conn::now(self)
    }

    #[inline]
    fn peer(&mut self) -> &mut Peer {
        self.state()
    }

    #[inline]
    fn send(&mut self, bytes: &'static [u8]) -> bool {
        Conn::send(self, bytes).is_ok()
    }

    fn set_timer(&mut self, after: Duration) {
        Conn::set_timer(self, Some(after));
    }

    fn abort(&mut self) {
        Conn::abort(self);
    }
}

impl Lane for Cx<'_, Generator> {
    type Door<'a>
        = Conn<'a, Generator>
    where
        Self: 'a;

    fn now(&self) -> Time {
        Cx::now(self)
    }

    fn door(&mut self, id: ConnId) -> Option<Conn<'_, Generator>> {
        self.conn(id)
    }

    fn connect(&mut self, config: ConnectConfig, peer: Peer) -> bool {
        // The plan is checked and the workers are sized for it: only a table that is too small for this worker's
        // share is left as a reason.
        Cx::connect(self, config, peer).is_ok()
    }

    fn set_alarm(&mut self, at: Option<Time>) {
        match at {
            Some(at) => Cx::set_alarm(self, at),
            None => self.clear_alarm(),
        }
    }
}
