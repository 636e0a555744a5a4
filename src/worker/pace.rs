//! How to wait: what the policy says, or what recent arrivals say.
//!
//! [`Adaptive`] knows two ways, and tries which one pays:
//!
//! ```text
//!            an epoch is over, several messages are expected within the budget, and the last try is long enough ago
//!   Apart ──────────────────────────────────────────────────────────────────────────────────────────► Together
//!     ▲                                                                                                   │
//!     └───────────────────────────────────────────────────────────────────────────────────────────────────┘
//!        an epoch is over and waiting together did not pay (tried again later, ever later), or it is time to look
//!        what the messages do without it
//! ```
//!
//! *Apart*: every message is a wait of its own. If the last gaps were shorter than what a sleep costs, the worker looks
//! for that long before it sleeps. *Together*: waits are as long as the budget. That pays if a wait brings clearly more
//! messages than before, and as many messages come as before: where senders wait for the answers (a closed loop), the
//! delay only makes them send less.

use std::time::Duration;

use crate::clock::Time;
use crate::driver::Wait;
use crate::wait::WaitPolicy;

/// Up to this gap between two messages, looking is better than sleeping: about what a sleep and being woken cost
/// both ends together.
const WORTH_LOOKING: Duration = Duration::from_micros(50);

/// Waits that an epoch has; fewer after [`LONG_EPOCH`].
const EPOCH: u32 = 128;
const SHORT_EPOCH: u32 = 16;
/// Waits after which it is seen whether waiting together is in vain.
const ATTEMPT: u32 = 8;
const LONG_EPOCH: Duration = Duration::from_millis(50);

/// How long after an attempt that did not pay the next one is made, at first and at most.
const FIRST_RETRY: Duration = Duration::from_millis(20);
const LAST_RETRY: Duration = Duration::from_secs(2);

/// How long messages are taken together until it is looked again what they do without.
const CONFIRMED_FOR: Duration = Duration::from_secs(1);

/// Decides a worker's waits.
pub(super) enum Pace {
    /// Always the same.
    Fixed(Wait),
    /// As it pays.
    Adaptive(Box<Adaptive>),
}

impl Pace {
    pub(super) fn new(policy: WaitPolicy, now: Time) -> Self {
        let block = Wait::block(None);
        Self::Fixed(match policy {
            WaitPolicy::Block => block,
            WaitPolicy::Spin { max } => Wait { spin: max, ..block },
            WaitPolicy::Coalesce { max_delay, batch } => Wait { gather: max_delay, batch, ..block },
            WaitPolicy::Adaptive { budget } => return Self::Adaptive(Box::new(Adaptive::new(budget, now))),
        })
    }

    /// The next wait, of at most `timeout`.
    #[inline]
    pub(super) fn plan(&self, timeout: Option<Duration>) -> Wait {
        match self {
            Self::Fixed(wait) => Wait { timeout, ..*wait },
            Self::Adaptive(adaptive) => adaptive.plan(timeout),
        }
    }
}

/// Which way of waiting is being tried, or used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Apart,
    Together,
}

/// What an epoch has seen.
#[derive(Clone, Copy, Debug)]
struct Epoch {
    began: Time,
    waits: u32,
    messages: u64,
}

impl Epoch {
    fn at(began: Time) -> Self {
        Self { began, waits: 0, messages: 0 }
    }

    /// Messages a second.
    fn rate(&self, now: Time) -> f64 {
        self.messages as f64 / now.since(self.began).as_secs_f64().max(1e-9)
    }

    /// Messages a wait.
    fn harvest(&self) -> f64 {
        self.messages as f64 / f64::from(self.waits.max(1))
    }
}

/// Chooses by what recent waits brought.
pub(super) struct Adaptive {
    budget: Duration,
    mode: Mode,
    epoch: Epoch,
    /// Mean length of the last waits apart, in nanoseconds.
    gap: u64,
    /// What the last epoch apart brought: messages a second, and a wait.
    apart: (f64, f64),
    /// When waiting together may be tried again, and how long after that if it does not pay.
    retry_at: Time,
    retry_after: Duration,
    /// Since when waiting together pays.
    together_since: Time,
}

impl Adaptive {
    fn new(budget: Duration, now: Time) -> Self {
        Self {
            budget,
            mode: Mode::Apart,
            epoch: Epoch::at(now),
            gap: u64::MAX / 32,
            apart: (0.0, 1.0),
            retry_at: now,
            retry_after: FIRST_RETRY,
            together_since: now,
        }
    }

    fn plan(&self, timeout: Option<Duration>) -> Wait {
        let block = Wait::block(timeout);
        match self.mode {
            Mode::Together => {
                // A burst ends the wait before its time; the ends of sends count as well.
                let batch = (self.apart.0 * self.budget.as_secs_f64() * 4.0) as u32;
                Wait { gather: self.budget, batch: batch.clamp(32, 4096), ..block }
            }
            Mode::Apart if self.gap <= WORTH_LOOKING.as_nanos() as u64 => {
                Wait { spin: Duration::from_nanos(2 * self.gap).min(WORTH_LOOKING), ..block }
            }
            Mode::Apart => block,
        }
    }

    /// Takes note of a wait from `began` to `ended`, and of what the turn brought.
    pub(super) fn observe(&mut self, began: Time, ended: Time, messages: u64) {
        self.epoch.waits += 1;
        self.epoch.messages += messages;
        if self.mode == Mode::Apart && messages > 0 {
            let gap = ended.since(began).as_nanos().min(u128::from(u64::MAX / 32)) as u64;
            // A sixteenth is new, and a shorter gap counts at once half: whoever is answered sooner asks sooner.
            self.gap = if gap < self.gap / 2 { gap.midpoint(self.gap) } else { (self.gap * 15 + gap) / 16 };
        }
        let Epoch { began, waits, messages } = self.epoch;
        let lasted = ended.since(began);
        // Where hardly a wait brings two, one need not try for long.
        let in_vain =
            self.mode == Mode::Together && waits >= ATTEMPT && messages <= u64::from(waits + waits / 8);
        if waits >= EPOCH || waits >= SHORT_EPOCH && lasted >= LONG_EPOCH || in_vain {
            self.judge(ended);
            self.epoch = Epoch::at(ended);
        }
    }

    /// Takes note of what came without a wait.
    #[inline]
    pub(super) fn observe_busy(&mut self, messages: u64) {
        self.epoch.messages += messages;
    }

    /// Ends an epoch.
    fn judge(&mut self, now: Time) {
        let (rate, harvest) = (self.epoch.rate(now), self.epoch.harvest());
        match self.mode {
            Mode::Apart => {
                self.apart = (rate, harvest);
                // Below that, hardly a wait would bring more than one.
                let worth_it = rate * self.budget.as_secs_f64() >= 1.5;
                if worth_it && now >= self.retry_at {
                    self.mode = Mode::Together;
                    self.together_since = now;
                }
            }
            Mode::Together if harvest < self.apart.1 * 1.4 || rate < self.apart.0 * 0.75 => {
                self.mode = Mode::Apart;
                self.retry_at = now + self.retry_after;
                self.retry_after = (self.retry_after * 2).min(LAST_RETRY);
            }
            Mode::Together => {
                self.retry_after = FIRST_RETRY;
                if now.since(self.together_since) >= CONFIRMED_FOR {
                    self.mode = Mode::Apart;
                    self.retry_at = now;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICROS: fn(u64) -> Duration = Duration::from_micros;

    /// How a load behaves: what a wait is told decides when it ends and what it brings.
    type Load = fn(&Wait) -> (Duration, u64);

    /// One connection that asks again as soon as it is answered: alone in every wait.
    fn closed_loop(wait: &Wait) -> (Duration, u64) {
        let answer_takes = if wait.spin.is_zero() { MICROS(40) } else { MICROS(15) };
        (answer_takes.max(wait.gather), 1)
    }

    /// 20,000 messages a second, whatever this side does.
    fn open_loop(wait: &Wait) -> (Duration, u64) {
        let lasts = MICROS(50).max(wait.gather);
        (lasts, lasts.as_micros() as u64 / 50)
    }

    /// Three messages a second.
    fn rest(_: &Wait) -> (Duration, u64) {
        (MICROS(333_333), 1)
    }

    /// Lets a load run for a time; the time spent waiting together, and looking.
    fn run(adaptive: &mut Adaptive, now: &mut Time, load: Load, lasts: Duration) -> (f64, f64) {
        let (mut together, mut looking) = (Duration::ZERO, Duration::ZERO);
        let end = *now + lasts;
        let began_at = *now;
        while *now < end {
            let wait = adaptive.plan(None);
            let (takes, messages) = load(&wait);
            let began = *now;
            *now = began + takes;
            together += if wait.gather.is_zero() { Duration::ZERO } else { takes };
            looking += wait.spin.min(takes);
            adaptive.observe(began, *now, messages);
            *now += MICROS(2);
        }
        let whole = now.since(began_at).as_secs_f64();
        (together.as_secs_f64() / whole, looking.as_secs_f64() / whole)
    }

    #[test]
    fn who_waits_for_the_answer_is_not_made_to_wait_for_others() {
        let mut now = Time::ZERO;
        let mut adaptive = Adaptive::new(MICROS(200), now);
        let (together, looking) = run(&mut adaptive, &mut now, closed_loop, Duration::from_secs(5));
        assert!(together < 0.01, "{together} of the time");
        assert!(looking > 0.7, "{looking} of the time");
    }

    #[test]
    fn messages_that_come_anyway_are_taken_together() {
        let mut now = Time::ZERO;
        let mut adaptive = Adaptive::new(MICROS(200), now);
        let (together, _) = run(&mut adaptive, &mut now, open_loop, Duration::from_secs(5));
        assert!(together > 0.95, "{together} of the time");
        assert!(adaptive.plan(None).gather <= MICROS(200), "never longer than the budget");
    }

    #[test]
    fn at_rest_it_sleeps() {
        let mut now = Time::ZERO;
        let mut adaptive = Adaptive::new(MICROS(200), now);
        run(&mut adaptive, &mut now, closed_loop, Duration::from_secs(1));
        let (together, looking) = run(&mut adaptive, &mut now, rest, Duration::from_secs(600));
        assert!(together < 0.01 && looking < 0.001, "{together}, {looking} of the time");
        assert_eq!(adaptive.plan(None), Wait::block(None));
    }

    #[test]
    fn it_notices_when_the_load_changes() {
        let mut now = Time::ZERO;
        let mut adaptive = Adaptive::new(MICROS(200), now);
        for _ in 0..3 {
            run(&mut adaptive, &mut now, open_loop, Duration::from_secs(3));
            let (together, _) = run(&mut adaptive, &mut now, closed_loop, Duration::from_secs(3));
            assert!(together < 0.1, "{together} of the time");
            run(&mut adaptive, &mut now, closed_loop, Duration::from_secs(3));
            // It was found not to pay for a while, so the next attempt may take some time.
            run(&mut adaptive, &mut now, open_loop, Duration::from_secs(3));
            let (together, _) = run(&mut adaptive, &mut now, open_loop, Duration::from_secs(3));
            assert!(together > 0.9, "{together} of the time");
        }
    }
}
