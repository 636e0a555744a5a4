//! How a driver is to wait.

use std::time::Duration;

/// One wait: how long, and what ends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wait {
    /// At most this long; `None`: for ever.
    pub timeout: Option<Duration>,
    /// How long to look for completions before sleeping.
    pub spin: Duration,
    /// How long more than one completion is waited for, from the beginning of the wait; afterwards one is enough.
    pub gather: Duration,
    /// The completions that are enough before that.
    pub batch: u32,
}

impl Wait {
    /// Sleeps until something completes, or `timeout` passes.
    #[inline]
    pub fn block(timeout: Option<Duration>) -> Self {
        Self { timeout, spin: Duration::ZERO, gather: Duration::ZERO, batch: 1 }
    }

    /// The same, but one completion ends it at once: what is under way is half done, and should not wait twice.
    #[inline]
    pub(crate) fn for_one(self) -> Self {
        Self { gather: Duration::ZERO, batch: 1, ..self }
    }

    /// Whether it does not wait at all.
    #[inline]
    pub(crate) fn is_look(&self) -> bool {
        self.timeout == Some(Duration::ZERO)
    }

    /// How long more than one completion is waited for, never longer than the whole wait.
    #[inline]
    pub(crate) fn gather(&self) -> Duration {
        if self.batch <= 1 {
            return Duration::ZERO;
        }
        self.timeout.map_or(self.gather, |timeout| timeout.min(self.gather))
    }

    /// How long to look before sleeping, never longer than the whole wait.
    #[inline]
    pub(crate) fn spin(&self) -> Duration {
        self.timeout.map_or(self.spin, |timeout| timeout.min(self.spin))
    }

    /// What is left of it after `spent`.
    pub(crate) fn less(self, spent: Duration) -> Self {
        Self {
            timeout: self.timeout.map(|timeout| timeout.saturating_sub(spent)),
            spin: Duration::ZERO,
            gather: self.gather.saturating_sub(spent),
            ..self
        }
    }
}

impl From<Option<Duration>> for Wait {
    fn from(timeout: Option<Duration>) -> Self {
        Self::block(timeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neither_looking_nor_gathering_outlasts_the_wait() {
        let micros = Duration::from_micros;
        let wait = Wait { timeout: Some(micros(30)), spin: micros(50), gather: micros(80), batch: 4 };
        assert_eq!((wait.spin(), wait.gather()), (micros(30), micros(30)));
        let rest = Wait { timeout: None, ..wait }.less(micros(50));
        assert_eq!((rest.timeout, rest.spin(), rest.gather()), (None, Duration::ZERO, micros(30)));
        assert_eq!(wait.less(micros(31)).timeout, Some(Duration::ZERO));
        assert_eq!(Wait { batch: 1, ..wait }.gather(), Duration::ZERO, "one is enough");
    }
}
