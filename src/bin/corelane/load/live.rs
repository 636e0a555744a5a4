//! One line a second about the run, for whoever watches.

use std::io::{IsTerminal, Write};

use super::json::Row;
use crate::output::say;
use crate::show;

/// Where the line goes: rewritten in place on a terminal, one after the other elsewhere.
pub enum Live {
    /// Nowhere.
    Quiet,
    /// Standard error.
    Stderr {
        /// Whether the line can be rewritten.
        rewrite: bool,
    },
}

impl Live {
    /// As the surroundings want it: plain lines where a terminal cannot rewrite, or a log is kept.
    pub fn new(quiet: bool) -> Self {
        if quiet {
            return Self::Quiet;
        }
        let dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        let log = std::env::var_os("CI").is_some();
        Self::Stderr { rewrite: std::io::stderr().is_terminal() && !dumb && !log }
    }

    /// Shows a second.
    pub fn show(&self, row: &Row) {
        let Self::Stderr { rewrite } = self else { return };
        let mut err = std::io::stderr().lock();
        // A progress line that cannot be written is no reason to end a measurement.
        let _ = if *rewrite {
            write!(err, "\r\x1b[2K{}", line(row)).and_then(|()| err.flush())
        } else {
            writeln!(err, "{}", line(row))
        };
    }

    /// Leaves the last line as it is, so that what follows begins on a new one.
    pub fn finish(&self) {
        if let Self::Stderr { rewrite: true } = self {
            say!("");
        }
    }
}

/// The line.
fn line(row: &Row) -> String {
    format!(
        "{:>6.1}s {:<7} open {}  connecting {}  failed {}  {}/s  errors {}  p99 {}",
        row.end_s,
        row.phase,
        show::count(row.open),
        show::count(row.connecting),
        show::count(row.failed),
        show::rate(row.messages_per_s),
        show::percent(row.error_rate),
        row.p99_us.map_or_else(|| "-".to_owned(), |micros| show::nanos((micros * 1e3) as u64)),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_how_it_stands() {
        let mut row = Row {
            start_s: 1.0,
            end_s: 2.0,
            phase: "measure".to_owned(),
            open: 49_998,
            connecting: 0,
            failed: 2,
            replied: 10_000,
            messages_per_s: 10_000.0,
            error_rate: 0.00004,
            p50_us: Some(40.0),
            p99_us: Some(212.5),
        };
        assert_eq!(
            line(&row),
            "   2.0s measure open 49,998  connecting 0  failed 2  10,000/s  errors 0.004%  p99 212 µs"
        );
        row.p99_us = None;
        assert!(line(&row).ends_with("p99 -"));
    }
}
