//! How a worker waits when it has nothing to do: the price of a message in CPU against its latency.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::config::ConfigError;

/// How a worker waits for completions.
///
/// At part load most of what a message costs is going to sleep and being woken. One may pay with CPU for latency
/// ([`Spin`](Self::Spin)), or with latency for CPU ([`Coalesce`](Self::Coalesce)), or let the worker find out what
/// pays within a limit ([`Adaptive`](Self::Adaptive)). A worker that is busy never waits, so under full load all
/// four are the same. What each setting costs and brings is measured in `benches/README.md`.
///
/// Times are at least a microsecond. Timers are not delayed by any of them, nor is accepting connections. What other threads send to a worker counts as a completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitPolicy {
    /// Sleep until something completes.
    #[default]
    Block,
    /// Look for completions without sleeping for up to `max`, then sleep. A core is busy as long as something comes
    /// at least that often; an idle worker sleeps after `max`. At most [`LONGEST_SPIN`](Self::LONGEST_SPIN).
    Spin {
        /// How long to look before sleeping.
        max: Duration,
    },
    /// Sleep until `batch` completions are there or `max_delay` has passed since the wait began; from then on one
    /// completion ends the wait. So a message that comes after a quiet time is not delayed at all, and none by more
    /// than `max_delay`. Uses the kernel's minimum wait (`IORING_FEAT_MIN_TIMEOUT`, Linux 6.12). With epoll and
    /// earlier kernels the worker sleeps for what is left of `max_delay` once it was woken, whatever `batch` says. On
    /// completion ports delays are whole milliseconds, and shorter ones none.
    Coalesce {
        /// How long a completion may wait for others. At most [`LONGEST_DELAY`](Self::LONGEST_DELAY).
        max_delay: Duration,
        /// Completions that end the wait early (a send's end is one too). At least 1.
        batch: u32,
    },
    /// Measures what comes and chooses: coalesces where messages come often enough that several share a wake-up and
    /// their senders do not wait for the answers; spins where the next message is expected sooner than a sleep is
    /// worth; sleeps otherwise. No completion waits longer than `budget` for others, and an idle worker sleeps.
    Adaptive {
        /// How long a completion may wait for others. At most [`LONGEST_DELAY`](Self::LONGEST_DELAY).
        budget: Duration,
    },
}

impl WaitPolicy {
    /// Most that [`Spin`](Self::Spin) takes.
    pub const LONGEST_SPIN: Duration = Duration::from_millis(10);
    /// Most that [`Coalesce`](Self::Coalesce) and [`Adaptive`](Self::Adaptive) take.
    pub const LONGEST_DELAY: Duration = Duration::from_millis(100);

    /// Completions that end a coalescing wait early, where the text form names none.
    const BATCH: u32 = 64;

    /// Checks the values against their ranges.
    ///
    /// # Errors
    /// [`ConfigError`] naming what is out of range, and the range.
    pub fn check(self) -> Result<(), ConfigError> {
        let within = |what, value: Duration, most: Duration| {
            if value >= SHORTEST && value <= most {
                return Ok(());
            }
            let allowed = format!("{SHORTEST:?} to {most:?}");
            Err(ConfigError::Range { what, value: format!("{value:?}"), allowed })
        };
        match self {
            Self::Block => Ok(()),
            Self::Spin { max } => within("wait: spin", max, Self::LONGEST_SPIN),
            Self::Coalesce { batch: 0, .. } => Err(ConfigError::Range {
                what: "wait: batch",
                value: "0".to_owned(),
                allowed: "1 to 4294967295".to_owned(),
            }),
            Self::Coalesce { max_delay, .. } => within("wait: coalesce", max_delay, Self::LONGEST_DELAY),
            Self::Adaptive { budget } => within("wait: adaptive", budget, Self::LONGEST_DELAY),
        }
    }

    /// Whether it may look without sleeping.
    #[cfg(target_os = "linux")]
    pub(crate) fn may_spin(self) -> bool {
        matches!(self, Self::Spin { .. } | Self::Adaptive { .. })
    }

    /// Whether it may wait for more than one completion.
    pub(crate) fn may_gather(self) -> bool {
        matches!(self, Self::Coalesce { .. } | Self::Adaptive { .. })
    }
}

impl fmt::Display for WaitPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Block => f.write_str("block"),
            Self::Spin { max } => write!(f, "spin={max:?}"),
            Self::Coalesce { max_delay, batch } => write!(f, "coalesce={max_delay:?},{batch}"),
            Self::Adaptive { budget } => write!(f, "adaptive={budget:?}"),
        }
    }
}

/// `block`, `spin=50us`, `coalesce=200us`, `coalesce=200us,32` or `adaptive=1ms`; times in `us` or `ms`.
impl FromStr for WaitPolicy {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let refused = || ConfigError::Range {
            what: "wait",
            value: format!("{text:?}"),
            allowed: "block, spin=50us, coalesce=200us (or =200us,32) or adaptive=1ms".to_owned(),
        };
        let (name, values) = text.split_once('=').unwrap_or((text, ""));
        let (time, batch) = values.split_once(',').unwrap_or((values, ""));
        let policy = match (name, time, batch) {
            ("block", "", "") if !text.contains('=') => Self::Block,
            ("spin", time, "") => Self::Spin { max: duration(time).ok_or_else(refused)? },
            ("coalesce", time, batch) => Self::Coalesce {
                max_delay: duration(time).ok_or_else(refused)?,
                batch: match batch {
                    "" => Self::BATCH,
                    batch => batch.parse().map_err(|_| refused())?,
                },
            },
            ("adaptive", time, "") => Self::Adaptive { budget: duration(time).ok_or_else(refused)? },
            _ => return Err(refused()),
        };
        policy.check()?;
        Ok(policy)
    }
}

/// The kernel counts minimum waits in these.
const SHORTEST: Duration = Duration::from_micros(1);

fn duration(text: &str) -> Option<Duration> {
    let (number, unit): (&str, fn(u64) -> Duration) = if let Some(number) = text.strip_suffix("us") {
        (number, Duration::from_micros)
    } else if let Some(number) = text.strip_suffix("µs") {
        (number, Duration::from_micros)
    } else {
        (text.strip_suffix("ms")?, Duration::from_millis)
    };
    number.parse().ok().map(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_can_be_read() {
        for text in ["block", "spin=50µs", "coalesce=200µs,64", "coalesce=1ms,7", "adaptive=5ms"] {
            let policy: WaitPolicy = text.parse().expect("as documented");
            assert_eq!(policy.to_string(), text);
        }
        let short: WaitPolicy = "coalesce=200us".parse().expect("as documented");
        assert_eq!(short, WaitPolicy::Coalesce { max_delay: Duration::from_micros(200), batch: 64 });
    }

    #[test]
    fn a_refusal_names_the_value_and_what_is_right() {
        for text in
            ["", "block=", "spin", "spin=1", "spin=1s", "spin=1us,2", "coalesce=", "coalesce=1ms,x", "nap"]
        {
            let error = text.parse::<WaitPolicy>().expect_err(text).to_string();
            assert!(
                error.starts_with(&format!("wait {text:?} is out of range: allowed is block, spin=")),
                "{error}"
            );
        }
        let over = |text: &str| text.parse::<WaitPolicy>().expect_err(text).to_string();
        assert_eq!(over("spin=11ms"), "wait: spin 11ms is out of range: allowed is 1µs to 10ms");
        assert_eq!(over("coalesce=0us"), "wait: coalesce 0ns is out of range: allowed is 1µs to 100ms");
        assert_eq!(over("coalesce=1ms,0"), "wait: batch 0 is out of range: allowed is 1 to 4294967295");
        assert_eq!(over("adaptive=1000ms"), "wait: adaptive 1s is out of range: allowed is 1µs to 100ms");
    }
}
