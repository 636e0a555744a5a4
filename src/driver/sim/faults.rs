//! What goes wrong by chance, and how often.

use std::time::Duration;

/// Probabilities of what a kernel or a network may do to a program. All are 0 by default; what
/// always happens (random latency, segment sizes, order of completions of different connections)
/// is not a fault.
///
/// What each of them looks like on a real system, and whether a correct program notices it, is in
/// the [table of faults](crate::sim#faults). The same faults can be called for one by one, at a chosen
/// moment: [`Fault`](crate::sim::Fault).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Faults {
    /// Per attempt to accept a connection that waits: it fails with EMFILE (ordinary descriptors
    /// only), ENFILE, ENOBUFS or ENOMEM. The connection stays in the listener's queue.
    pub accept_error: f64,
    /// Per attempt to accept a connection that waits: it is gone (ECONNABORTED), reset for its
    /// client.
    pub accept_aborted: f64,
    /// Per outgoing connection, and per datagram socket: no socket can be made (EMFILE, ENFILE, ENOBUFS) or
    /// no local port is left (EADDRNOTAVAIL).
    pub connect_error: f64,
    /// Per outgoing connection: a router answers that there is no way (EHOSTUNREACH or ENETUNREACH).
    pub unreachable: f64,
    /// Per piece received: only a part of what is there is taken.
    pub short_recv: f64,
    /// Per attempt to receive: the kernel finds no buffer (ENOBUFS) although the pool has some.
    pub no_buffer: f64,
    /// Per wake-up of a multishot receive: it ends without data or reason.
    pub recv_stop: f64,
    /// Per piece received and per connection accepted: a multishot operation ends with it, as when
    /// the completion queue is full. What it brought is valid.
    pub cq_overflow: f64,
    /// Per send: it ends early, after a part of its bytes.
    pub short_send: f64,
    /// Per completion of an accept, a send or a connect, per wake-up of a receive, and per cancel: it is
    /// late, by up to [`late_by`](Self::late_by). Completions of one kind (say, the receives of one
    /// connection) keep their order; those of different kinds overtake each other.
    pub late_completion: f64,
    /// How late a late completion may be. 10 ms by default.
    pub late_by: Duration,
    /// Per operation that is cancelled: if it can end by itself when the cancel arrives, it does; the
    /// cancel lost the race.
    pub lost_cancel: f64,
    /// Per operation that is cancelled: it ignores that, and ends only if what it waits for happens
    /// (or the faults [end](crate::sim::Sim::calm)).
    pub stuck_cancel: f64,
    /// Per segment: it is lost once, and arrives 200 ms later.
    pub segment_loss: f64,
    /// Per segment or datagram: with it the connection, or the socket that the datagram is for, stalls, both
    /// directions, for up to
    /// [`stall_for`](Self::stall_for).
    pub stall: f64,
    /// How long a stall may last. 2 s by default.
    pub stall_for: Duration,
    /// Per segment: something in between resets the connection, both sides.
    pub reset: f64,
    /// Per segment: the end that it was for has given the connection up (ETIMEDOUT), as keepalive or
    /// `TCP_USER_TIMEOUT` do. The other end learns of it by a reset.
    pub timed_out: f64,
    /// Per datagram that is sent: it is lost, and nobody repeats it.
    pub datagram_loss: f64,
    /// Per datagram that is sent: it arrives twice.
    pub datagram_duplicate: f64,
    /// Per datagram that is sent: it is late, by up to [`datagram_reorder_by`](Self::datagram_reorder_by), and
    /// those behind it do not wait.
    pub datagram_reorder: f64,
    /// How late a datagram may be. 1 ms by default.
    pub datagram_reorder_by: Duration,
    /// Per send of a datagram: the system has no room for it (ENOBUFS or ENOMEM).
    pub datagram_error: f64,
    /// Per turn of a worker: its thread is not scheduled for up to [`pause_for`](Self::pause_for).
    pub pause: f64,
    /// How long a worker's thread may not be scheduled. 50 ms by default.
    pub pause_for: Duration,
    /// Per move of the clock: it leaps forward by up to [`clock_jump_by`](Self::clock_jump_by), so
    /// that everything of that time is due at once. It never goes back.
    pub clock_jump: f64,
    /// How far the clock may leap. 1 s by default.
    pub clock_jump_by: Duration,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            accept_error: 0.0,
            accept_aborted: 0.0,
            connect_error: 0.0,
            unreachable: 0.0,
            short_recv: 0.0,
            no_buffer: 0.0,
            recv_stop: 0.0,
            cq_overflow: 0.0,
            short_send: 0.0,
            late_completion: 0.0,
            late_by: Duration::from_millis(10),
            lost_cancel: 0.0,
            stuck_cancel: 0.0,
            segment_loss: 0.0,
            stall: 0.0,
            stall_for: Duration::from_secs(2),
            reset: 0.0,
            timed_out: 0.0,
            datagram_loss: 0.0,
            datagram_duplicate: 0.0,
            datagram_reorder: 0.0,
            datagram_reorder_by: Duration::from_millis(1),
            datagram_error: 0.0,
            pause: 0.0,
            pause_for: Duration::from_millis(50),
            clock_jump: 0.0,
            clock_jump_by: Duration::from_secs(1),
        }
    }
}

impl Faults {
    /// A slip of the pen is not to pass for a mild or a merciless world.
    ///
    /// # Panics
    /// When a probability is not within 0 to 1.
    pub(crate) fn check(&self) {
        let all = [
            ("accept_error", self.accept_error),
            ("accept_aborted", self.accept_aborted),
            ("connect_error", self.connect_error),
            ("unreachable", self.unreachable),
            ("short_recv", self.short_recv),
            ("no_buffer", self.no_buffer),
            ("recv_stop", self.recv_stop),
            ("cq_overflow", self.cq_overflow),
            ("short_send", self.short_send),
            ("late_completion", self.late_completion),
            ("lost_cancel", self.lost_cancel),
            ("stuck_cancel", self.stuck_cancel),
            ("segment_loss", self.segment_loss),
            ("stall", self.stall),
            ("reset", self.reset),
            ("timed_out", self.timed_out),
            ("datagram_loss", self.datagram_loss),
            ("datagram_duplicate", self.datagram_duplicate),
            ("datagram_reorder", self.datagram_reorder),
            ("datagram_error", self.datagram_error),
            ("pause", self.pause),
            ("clock_jump", self.clock_jump),
        ];
        for (name, probability) in all {
            assert!(
                (0.0..=1.0).contains(&probability),
                "Faults::{name} is {probability}: a probability is 0 to 1"
            );
        }
    }

    /// Nothing goes wrong.
    pub fn none() -> Self {
        Self::default()
    }

    /// Everything that a correct program does not notice, each with this probability: failing accepts,
    /// short receives and sends, missing buffers, full completion queues, receives that end, completions
    /// that are late or change places, cancels that lose their race; lost segments with a tenth of it.
    /// Nothing that ends a connection, and nothing that takes much time. Datagrams arrive, once and in
    /// order, unless a receiver has no room for them.
    pub fn benign(probability: f64) -> Self {
        Self {
            accept_error: probability,
            short_recv: probability,
            no_buffer: probability,
            recv_stop: probability,
            cq_overflow: probability,
            short_send: probability,
            late_completion: probability,
            lost_cancel: probability,
            segment_loss: probability / 10.0,
            ..Self::default()
        }
    }

    /// What a program must live through although it notices: [`benign`](Self::benign), lost, repeated and
    /// late datagrams, and with a tenth of the probability datagrams that cannot be sent, resets,
    /// connections that time out, stall, cannot be made or are gone before they are accepted, threads that
    /// are not scheduled; with a hundredth leaps of the clock. No operation that ignores a cancel: a real
    /// kernel has none.
    pub fn hostile(probability: f64) -> Self {
        let tenth = probability / 10.0;
        Self {
            accept_aborted: tenth,
            connect_error: tenth,
            unreachable: tenth,
            stall: tenth,
            reset: tenth,
            timed_out: tenth,
            datagram_loss: probability,
            datagram_duplicate: probability,
            datagram_reorder: probability,
            datagram_error: tenth,
            pause: tenth,
            clock_jump: probability / 100.0,
            ..Self::benign(probability)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Faults;

    #[test]
    fn a_probability_that_is_none_is_refused_by_its_name() {
        for (bad, text) in [
            (1.5, "Faults::reset is 1.5"),
            (f64::NAN, "Faults::reset is NaN"),
            (-0.1, "Faults::reset is -0.1"),
        ] {
            let faults = Faults { reset: bad, ..Faults::none() };
            let panic = std::panic::catch_unwind(|| faults.check()).expect_err("no probability");
            let message = panic.downcast_ref::<String>().expect("a message");
            assert!(message.starts_with(text), "{message}");
        }
        Faults::hostile(1.0).check();
    }
}
