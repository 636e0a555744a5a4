//! `--fail-if 'p99>20ms'`: conditions under which a result is not good enough.

use std::fmt;

use super::json::{Report, Threshold};
use crate::units;

/// A condition that must not hold.
#[derive(Clone, Debug, PartialEq)]
pub struct Condition {
    text: String,
    metric: Metric,
    operator: Operator,
    /// In the metric's unit.
    limit: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    Greater,
    GreaterOrEqual,
    Less,
    LessOrEqual,
    Equal,
    NotEqual,
}

impl Operator {
    /// Longer ones first, because `>` begins `>=`.
    const ALL: [(&str, Operator); 6] = [
        (">=", Self::GreaterOrEqual),
        ("<=", Self::LessOrEqual),
        ("==", Self::Equal),
        ("!=", Self::NotEqual),
        (">", Self::Greater),
        ("<", Self::Less),
    ];

    fn holds(self, value: f64, limit: f64) -> bool {
        match self {
            Self::Greater => value > limit,
            Self::GreaterOrEqual => value >= limit,
            Self::Less => value < limit,
            Self::LessOrEqual => value <= limit,
            Self::Equal => value == limit,
            Self::NotEqual => value != limit,
        }
    }
}

/// What a limit is written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    /// Written as a time, compared in microseconds.
    Time,
    /// Written as `0.1%` or `0.001`.
    Share,
    /// Written as `10k`.
    Count,
    /// Written as `10k/s`.
    Rate,
}

impl Unit {
    fn parse(self, text: &str) -> Result<f64, String> {
        match self {
            Self::Time => Ok(units::duration(text)?.as_secs_f64() * 1e6),
            Self::Count => Ok(units::count(text)? as f64),
            Self::Rate if text == "0" => Ok(0.0),
            Self::Rate => units::rate(text),
            Self::Share => {
                let (digits, factor) = match text.strip_suffix('%') {
                    Some(digits) => (digits.trim(), 100.0),
                    None => (text, 1.0),
                };
                let value: f64 =
                    digits.parse().map_err(|_| format!("'{text}' is not a share: write 0.1% or 0.001"))?;
                let share = value / factor;
                if !(0.0..=1.0).contains(&share) {
                    let percent = if factor == 1.0 && (0.0..=100.0).contains(&value) {
                        format!(": did you mean {value}%?")
                    } else {
                        String::new()
                    };
                    return Err(format!("'{text}' is not a share from 0 to 100%{percent}"));
                }
                Ok(share)
            }
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Time => "us",
            Self::Share => "ratio",
            Self::Count => "count",
            Self::Rate => "per_s",
        }
    }
}

macro_rules! metrics {
    ($($name:literal $unit:ident $value:expr,)*) => {
        /// A figure of a result that a condition can be about.
        #[derive(Clone, Copy)]
        struct Metric {
            name: &'static str,
            unit: Unit,
            value: fn(&Report) -> Option<f64>,
        }

        const METRICS: &[Metric] = &[
            $(Metric { name: $name, unit: Unit::$unit, value: $value },)*
        ];
    };
}

/// A percentile says nothing when nothing was recorded.
fn some<T>(count: u64, value: T) -> Option<T> {
    (count > 0).then_some(value)
}

metrics! {
    "p50" Time |r| some(r.window.response_us.count, r.window.response_us.p50_us),
    "p90" Time |r| some(r.window.response_us.count, r.window.response_us.p90_us),
    "p99" Time |r| some(r.window.response_us.count, r.window.response_us.p99_us),
    "p99.9" Time |r| some(r.window.response_us.count, r.window.response_us.p999_us),
    "max" Time |r| some(r.window.response_us.count, r.window.response_us.max_us),
    "mean" Time |r| some(r.window.response_us.count, r.window.response_us.mean_us),
    "service_p99" Time |r| r.window.service_us.as_ref().and_then(|s| some(s.count, s.p99_us)),
    "connect_p99" Time |r| some(r.ramp.connect_us.count, r.ramp.connect_us.p99_us),
    "connect_max" Time |r| some(r.ramp.connect_us.count, r.ramp.connect_us.max_us),
    "error_rate" Share |r| some(r.window.planned, r.window.error_rate),
    "connect_error_rate" Share |r| some(r.ramp.attempted, r.ramp.failed as f64 / r.ramp.attempted as f64),
    "errors" Count |r| some(r.ramp.connected, r.errors.server_total as f64),
    "timeouts" Count |r| some(r.ramp.connected, r.window.timed_out as f64),
    "mismatches" Count |r| some(
        r.ramp.connected,
        r.errors.server.get("reply_mismatch").copied().unwrap_or(0) as f64,
    ),
    "missed" Count |r| some(r.ramp.connected, r.window.missed as f64),
    "connected" Count |r| Some(r.ramp.connected as f64),
    "messages" Count |r| Some(r.window.replied as f64),
    "rate" Rate |r| Some(r.window.messages_per_s),
    "ramp_rate" Rate |r| Some(r.ramp.rate_per_s),
    "server_cpu" Time |r| r.server.as_ref().and_then(|s| s.cpu_us_per_message),
}

impl fmt::Debug for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl PartialEq for Metric {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

/// Parses one `--fail-if`.
pub fn condition(text: &str) -> Result<Condition, String> {
    let (at, operator, length) = Operator::ALL
        .iter()
        .filter_map(|&(sign, operator)| Some((text.find(sign)?, operator, sign.len())))
        // The leftmost sign; of those at one place the longest, which stands first in the list.
        .min_by_key(|&(at, _, length)| (at, std::cmp::Reverse(length)))
        .ok_or_else(|| format!("'{text}' compares nothing: write METRIC>LIMIT, as in p99>20ms"))?;
    let name = text[..at].trim();
    let name = if name == "p999" { "p99.9" } else { name };
    let metric = METRICS.iter().find(|metric| metric.name == name).copied().ok_or_else(|| {
        let known: Vec<_> = METRICS.iter().map(|metric| metric.name).collect();
        format!("unknown metric '{name}': known are {}", known.join(", "))
    })?;
    let limit = text[at + length..].trim();
    if limit.is_empty() {
        return Err(format!("'{text}' has no limit: write it like p99>20ms"));
    }
    let limit = metric.unit.parse(limit)?;
    Ok(Condition { text: text.to_owned(), metric, operator, limit })
}

impl Condition {
    /// Judges a result. A figure that the result does not have fails: what was not measured was
    /// not good enough.
    pub fn judge(&self, report: &Report) -> Threshold {
        let value = (self.metric.value)(report);
        Threshold {
            expression: self.text.clone(),
            value,
            unit: self.metric.unit.name().to_owned(),
            failed: value.is_none_or(|value| self.operator.holds(value, self.limit)),
        }
    }

    /// Whether it needs `--server-pid`.
    pub fn needs_server(&self) -> bool {
        self.metric.name == "server_cpu"
    }
}

#[cfg(test)]
mod tests {
    use super::super::json::sample;
    use super::*;

    fn failed(text: &str) -> bool {
        condition(text).expect("a condition").judge(&sample::report()).failed
    }

    #[test]
    fn limits_are_compared_in_their_own_unit() {
        assert!(failed("p99>500us"));
        assert!(!failed("p99>20ms"));
        assert!(!failed("p99 > 1s"));
        assert!(failed("p99.9>=900us") && failed("p999>=900us"));
        assert!(failed("rate<2k") && failed("rate<2k/s") && !failed("rate<1k"));
        assert!(!failed("errors>0") && failed("errors==0") && !failed("errors!=0"));
        assert!(!failed("error_rate>0.1%") && !failed("error_rate>0.001"));
        assert!(failed("connected<=100"));
        assert!(failed("connect_max>1us"));
    }

    #[test]
    fn what_was_not_measured_fails() {
        let condition = condition("server_cpu>5us").expect("a condition");
        assert!(condition.needs_server());
        let judged = condition.judge(&sample::report());
        assert!(judged.failed && judged.value.is_none());
        let mut report = sample::report();
        report.window.response_us = Default::default();
        assert!(super::condition("p99>1h").expect("a condition").judge(&report).failed);
        report.window.planned = 0;
        report.ramp.connected = 0;
        for text in ["error_rate>50%", "errors>1m", "timeouts>1m"] {
            let judged = super::condition(text).expect("a condition").judge(&report);
            assert!(judged.failed && judged.value.is_none(), "{text}");
        }
    }

    #[test]
    fn refusals_say_what_is_known() {
        assert!(condition("p99").expect_err("no sign").contains("p99>20ms"));
        assert!(condition("p98>1ms").expect_err("metric").contains("p99.9"));
        assert!(condition("p99>20").expect_err("unit").contains("20ms"));
        assert!(condition("p99>").expect_err("limit").contains("limit"));
        assert!(condition("error_rate>x%").is_err());
        assert!(condition("error_rate>5").expect_err("share").contains("did you mean 5%?"));
        assert!(condition("error_rate>101%").is_err() && condition("error_rate>nan").is_err());
        assert!(condition("error_rate>=100%").is_ok() && condition("error_rate>=1").is_ok());
    }
}
