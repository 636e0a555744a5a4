//! What goes wrong, and how often.

use std::time::Duration;

/// Probabilities of what a kernel or a network may do to a program. All are 0 by default; what
/// always happens (random latency, segment sizes, order of completions of different connections)
/// is not a fault.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Faults {
    /// Per attempt: accepting fails with EMFILE, ENFILE, ENOBUFS or ENOMEM. The connection stays in
    /// the listener's queue.
    pub accept_error: f64,
    /// Per outgoing connection: no socket can be made (EADDRNOTAVAIL).
    pub connect_error: f64,
    /// Per send: it ends early, after a part of its bytes.
    pub short_send: f64,
    /// Per piece received and per connection accepted: a multishot operation ends with it, as when
    /// the completion queue is full.
    pub cq_overflow: f64,
    /// Per wake-up of a multishot receive: it ends without data or reason.
    pub recv_stop: f64,
    /// Per send that ends and per operation that is cancelled: the completion is late, by up to
    /// [`late_by`](Self::late_by).
    pub late_completion: f64,
    /// How late a late completion may be. 10 ms by default.
    pub late_by: Duration,
    /// Per operation that is cancelled: it ignores that, and ends only if what it waits for happens.
    pub stuck_cancel: f64,
    /// Per segment: it is lost once, and arrives 200 ms later.
    pub segment_loss: f64,
    /// Per segment: something in between resets the connection, both sides.
    pub reset: f64,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            accept_error: 0.0,
            connect_error: 0.0,
            short_send: 0.0,
            cq_overflow: 0.0,
            recv_stop: 0.0,
            late_completion: 0.0,
            late_by: Duration::from_millis(10),
            stuck_cancel: 0.0,
            segment_loss: 0.0,
            reset: 0.0,
        }
    }
}

impl Faults {
    /// Nothing goes wrong.
    pub fn none() -> Self {
        Self::default()
    }

    /// Everything that a correct program does not notice, each with this probability: failing
    /// accepts, short sends, full completion queues, receives that end, late completions, lost
    /// segments. No resets, no failing connects, no operation that ignores a cancel.
    pub fn benign(probability: f64) -> Self {
        Self {
            accept_error: probability,
            short_send: probability,
            cq_overflow: probability,
            recv_stop: probability,
            late_completion: probability,
            segment_loss: probability / 10.0,
            ..Self::default()
        }
    }
}
