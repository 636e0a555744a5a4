//! From what was seen to a result: figures, verdict, and the table that people read.

use std::collections::BTreeMap;
use std::fmt::{self, Write};

use super::json::{Config, Threshold};
use super::json::{Errors, Generator, Percentiles, Ramp, Report, SCHEMA, Server, Tool, Verdict, Window};
use super::plan::{Plan, Traffic};
use super::run::Outcome;
use super::stats::{ErrorClass, Side};
use super::threshold::Condition;
use crate::{exit, show};

/// Share of the messages that must have been sent on time for the result to mean anything.
const MIN_RATE_RATIO: f64 = 0.99;

/// Share of the connections that may remain unestablished.
const MAX_UNESTABLISHED: f64 = 0.01;

/// Makes the result.
pub fn assemble(plan: &Plan, config: Config, outcome: Outcome, conditions: &[Condition]) -> Report {
    let (request, reply) = plan.content.sizes();
    let seconds = outcome.window.as_secs_f64();
    let per_s = |amount: f64| if seconds > 0.0 { amount / seconds } else { 0.0 };
    let stats = &outcome.totals.window;
    let counts = stats.counts;
    let open_loop = matches!(plan.traffic, Traffic::Open { .. });
    let late = stats.errors[ErrorClass::GeneratorLate as usize];
    let sendable = counts.planned - counts.missed - counts.gone;
    let rate_ratio = (open_loop && sendable > 0).then(|| 1.0 - (late.min(sendable) as f64 / sendable as f64));
    let ramp_s = outcome.ramp.as_secs_f64();

    let mut report = Report {
        schema: SCHEMA.to_owned(),
        tool: Tool::this(),
        ramp: Ramp {
            attempted: outcome.ramped.open + outcome.ramped.gone + outcome.ramped.failed,
            connected: outcome.ramped.open + outcome.ramped.gone,
            failed: outcome.ramped.failed,
            duration_s: ramp_s,
            rate_per_s: if ramp_s > 0.0 { outcome.totals.connect.count() as f64 / ramp_s } else { 0.0 },
            connect_us: Percentiles::from(&outcome.totals.connect),
        },
        window: Window {
            duration_s: seconds,
            planned: counts.planned,
            sent: counts.sent,
            replied: counts.replied,
            timed_out: counts.timed_out,
            lost: counts.lost,
            missed: counts.missed,
            gone: counts.gone,
            late_replies: counts.late_replies,
            messages_per_s: per_s(counts.replied as f64),
            sent_bytes_per_s: per_s(counts.sent as f64 * request as f64),
            received_bytes_per_s: per_s(counts.replied as f64 * reply as f64),
            error_rate: counts.error_rate(),
            response_us: Percentiles::from(&stats.response),
            service_us: open_loop.then(|| Percentiles::from(&stats.service)),
            open_at_end: outcome.end.open,
        },
        errors: errors(&outcome),
        generator: generator(&outcome, rate_ratio, seconds),
        server: server(&config, &outcome),
        intervals: outcome.rows,
        environment: outcome.environment,
        config,
        thresholds: Vec::new(),
        verdict: Verdict { interrupted: outcome.interrupted, notes: outcome.notes, ..Verdict::default() },
    };
    report.thresholds = conditions.iter().map(|condition| condition.judge(&report)).collect();
    judge(&mut report, outcome.ended_early);
    report
}

fn errors(outcome: &Outcome) -> Errors {
    let (window, before) = (&outcome.totals.window, &outcome.totals.before);
    let of = |side| {
        let classes = ErrorClass::ALL.iter().filter(|class| class.side() == side);
        classes
            .map(|&class| {
                // Messages sent late before the window disturb nothing that is reported.
                let early =
                    if class == ErrorClass::GeneratorLate { 0 } else { before.errors[class as usize] };
                (class.name().to_owned(), window.errors[class as usize] + early)
            })
            .collect::<BTreeMap<_, _>>()
    };
    let (server, generator) = (of(Side::Server), of(Side::Generator));
    Errors {
        server_total: server.values().sum(),
        generator_total: generator.values().sum(),
        before_window: before.errors_of(Side::Server),
        server,
        generator,
        first_mismatch: outcome.totals.mismatch.clone(),
    }
}

fn generator(outcome: &Outcome, rate_ratio: Option<f64>, seconds: f64) -> Generator {
    let (from, until) = (&outcome.from, &outcome.until);
    let cpu = from.own.zip(until.own).map(|(from, until)| until.cpu.saturating_sub(from.cpu).as_secs_f64());
    let busy = until.counters.busy_ns.saturating_sub(from.counters.busy_ns) as f64;
    let parked = until.counters.parked_ns.saturating_sub(from.counters.parked_ns) as f64;
    let enters = until.counters.enters.saturating_sub(from.counters.enters) as f64;
    let messages = until.counters.messages.saturating_sub(from.counters.messages) as f64;
    let ratio = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    Generator {
        rate_ratio,
        lag_us: rate_ratio.map(|_| Percentiles::from(&outcome.totals.window.lag)),
        cpu_s: cpu,
        cpu_cores: cpu.filter(|_| seconds > 0.0).map(|cpu| cpu / seconds),
        busy_ratio: ratio(busy, busy + parked),
        enters_per_message: ratio(enters, messages),
    }
}

fn server(config: &Config, outcome: &Outcome) -> Option<Server> {
    let pid = config.server_pid?;
    let (before, from, until) = (outcome.before.server?, outcome.from.server?, outcome.until.server?);
    let cpu_s = until.cpu.saturating_sub(from.cpu).as_secs_f64();
    let replied = outcome.totals.window.counts.replied;
    let connected = outcome.ramped.open;
    let growth = from.rss_bytes as f64 - before.rss_bytes as f64;
    Some(Server {
        pid,
        cpu_s,
        cpu_us_per_message: (replied > 0).then(|| cpu_s * 1e6 / replied as f64),
        rss_before_bytes: before.rss_bytes,
        rss_connected_bytes: from.rss_bytes,
        rss_end_bytes: until.rss_bytes,
        rss_peak_bytes: until.peak_rss_bytes,
        rss_bytes_per_connection: (connected > 0).then(|| growth / connected as f64),
    })
}

/// Why the run was none, whatever its figures.
fn failures(report: &Report, ended_early: bool) -> Vec<String> {
    let Report { ramp, window, errors, .. } = report;
    if report.verdict.interrupted {
        return Vec::new();
    }
    let causes = || {
        let all = nonzero(&errors.server).chain(nonzero(&errors.generator));
        all.map(|(name, number)| format!("{} × {name}", show::count(number))).collect::<Vec<_>>().join(", ")
    };
    if ramp.connected == 0 {
        return vec![format!(
            "no connection could be made to {} ({}): is the server running there?",
            report.config.targets.join(", "),
            causes()
        )];
    }
    let mut reasons = Vec::new();
    if window.planned == 0 {
        reasons.push("no message was sent in the window".to_owned());
    } else if window.replied == 0 {
        reasons
            .push(format!("none of the {} messages of the window was answered", show::count(window.planned)));
    }
    if ended_early || (window.planned == 0 && window.open_at_end == 0) {
        reasons.push(format!("stopped early: all connections had ended ({})", causes()));
    }
    // What this machine had no descriptor or port for makes the result invalid instead.
    let local: u64 = nonzero(&errors.generator)
        .filter(|(name, _)| name.starts_with("local_"))
        .map(|(_, number)| number)
        .sum();
    let refused = ramp.failed.saturating_sub(local);
    if refused as f64 > ramp.attempted as f64 * MAX_UNESTABLISHED {
        reasons.push(format!(
            "{} of {} connections were never established ({})",
            show::count(refused),
            show::count(ramp.attempted),
            causes()
        ));
    }
    reasons
}

/// Fills in the verdict.
fn judge(report: &mut Report, ended_early: bool) {
    let failures = failures(report, ended_early);
    let mut reasons = Vec::new();
    let local: Vec<_> =
        nonzero(&report.errors.generator).filter(|(name, _)| name.starts_with("local_")).collect();
    for (name, number) in &local {
        let remedy = match *name {
            "local_fd_limit" => "out of descriptors: raise ulimit -n",
            "local_addr_unavailable" => "out of local ports: use more target or source addresses",
            _ => "the kernel is out of network memory: use fewer connections",
        };
        reasons.push(format!("{} × {name}: {remedy}", show::count(*number)));
    }
    if let Some(ratio) = report.generator.rate_ratio.filter(|&ratio| ratio < MIN_RATE_RATIO) {
        reasons.push(format!(
            "only {} of the messages were sent on schedule: the generator is saturated or its machine too busy; give \
             it more --workers and cores, or ask for less",
            show::percent(ratio)
        ));
    }
    let valid = reasons.is_empty();
    let failed: Vec<_> = report.thresholds.iter().filter(|threshold| threshold.failed).collect();
    reasons.extend(failed.iter().map(|threshold| format!("--fail-if '{}' holds", threshold.expression)));
    let passed = failed.is_empty();
    let notes = notes(report);
    let verdict = &mut report.verdict;
    verdict.notes.extend(notes);
    verdict.failed = !failures.is_empty();
    verdict.valid = valid && !verdict.failed;
    verdict.passed = passed;
    verdict.reasons = failures;
    verdict.reasons.extend(reasons);
    verdict.exit_code = match () {
        () if verdict.interrupted => exit::INTERRUPTED,
        () if verdict.failed => exit::FAILURE,
        () if !valid => exit::SATURATED,
        () if !passed => exit::THRESHOLD,
        () => exit::OK,
    };
}

fn nonzero(classes: &BTreeMap<String, u64>) -> impl Iterator<Item = (&str, u64)> {
    classes.iter().filter(|&(_, &number)| number > 0).map(|(name, &number)| (name.as_str(), number))
}

/// What a reader should know although it spoils nothing.
fn notes(report: &Report) -> Vec<String> {
    let mut notes = Vec::new();
    let (window, generator) = (&report.window, &report.generator);
    if let Some(lag) = &generator.lag_us
        && lag.p99_us > window.response_us.p99_us / 10.0
        && lag.p99_us > 200.0
    {
        notes.push(format!(
            "the generator's own delay (p99 {}) is more than a tenth of the response time's p99, and part of it",
            micros(lag.p99_us)
        ));
    }
    let cores = report.environment.workers.len() as f64;
    if generator.rate_ratio.is_none() && generator.cpu_cores.is_some_and(|used| used > 0.95 * cores) {
        notes.push(
            "the generator used all of its processor time: the server may be able to do more than this shows"
                .to_owned(),
        );
    }
    if report.config.loop_kind == "closed" && window.timed_out > 0 {
        notes.push(
            "a connection that waits in vain sends nothing more, so the error rate of a closed loop is too kind: \
             use --rate to see what clients would"
                .to_owned(),
        );
    }
    if !report.verdict.interrupted
        && report.config.interval_s.is_some_and(|interval| window.duration_s < 2.0 * interval)
        && report.config.rate_per_s.is_none()
    {
        notes.push("the window is shorter than two beats of a connection: use a longer -d".to_owned());
    }
    notes
}

fn micros(value: f64) -> String {
    show::nanos((value * 1e3).round() as u64)
}

/// The table.
pub fn table(report: &Report) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_table(&mut out, report);
    out
}

fn write_table(out: &mut String, report: &Report) -> fmt::Result {
    let Report { config, environment, ramp, window, errors, generator, verdict, .. } = report;
    writeln!(out, "corelane load {}: {}", config.mode, describe(config))?;
    let machine = [
        environment.kernel.as_ref().map(|kernel| format!("kernel {kernel}")),
        environment.cpu_model.clone(),
        Some(format!(
            "generator: {} worker(s) on {}",
            environment.workers.len(),
            environment.backend.as_deref().unwrap_or("?")
        )),
    ];
    writeln!(out, "{}\n", machine.into_iter().flatten().collect::<Vec<_>>().join(", "))?;

    writeln!(
        out,
        "ramp        {} connected, {} failed in {:.2} s ({}/s)",
        show::count(ramp.connected),
        show::count(ramp.failed),
        ramp.duration_s,
        show::rate(ramp.rate_per_s)
    )?;
    writeln!(
        out,
        "window      {:.2} s after {:.2} s of warm-up; {} connections open at its end",
        window.duration_s,
        config.warmup_s,
        show::count(window.open_at_end)
    )?;
    writeln!(
        out,
        "messages    {} answered ({}/s, {}/s out, {}/s in)\n",
        show::count(window.replied),
        show::rate(window.messages_per_s),
        show::bytes(window.sent_bytes_per_s as u64),
        show::bytes(window.received_bytes_per_s as u64)
    )?;

    writeln!(out, "{:<10}{:>10}{:>10}{:>10}{:>10}{:>10}", "", "p50", "p90", "p99", "p99.9", "max")?;
    row(out, "response", &window.response_us)?;
    if let Some(service) = &window.service_us {
        row(out, "service", service)?;
    }
    row(out, "connect", &ramp.connect_us)?;

    writeln!(out, "\nerrors      {}", error_line(report))?;
    if let Some(mismatch) = &errors.first_mismatch {
        writeln!(out, "            first wrong reply: {mismatch}")?;
    }
    let mut own = Vec::new();
    if let Some(ratio) = generator.rate_ratio {
        own.push(format!("{} sent on schedule", show::percent(ratio)));
    }
    if let Some(lag) = &generator.lag_us {
        own.push(format!("delay p99 {}", micros(lag.p99_us)));
    }
    if let Some(cores) = generator.cpu_cores {
        own.push(format!("{cores:.2} cores"));
    }
    own.push(format!("{:.3} enters/message", generator.enters_per_message));
    writeln!(out, "generator   {}", own.join(", "))?;
    if let Some(server) = &report.server {
        writeln!(
            out,
            "server      process {}: {:.2} s of CPU{}, {} before the connections, {} with them{}",
            server.pid,
            server.cpu_s,
            server.cpu_us_per_message.map_or(String::new(), |each| format!(" ({each:.2} µs/message)")),
            show::bytes(server.rss_before_bytes),
            show::bytes(server.rss_connected_bytes),
            server
                .rss_bytes_per_connection
                .map_or(String::new(), |each| format!(" ({each:+.0} B/connection)")),
        )?;
    }
    for threshold in &report.thresholds {
        writeln!(out, "threshold   {}", threshold_line(threshold))?;
    }
    for note in &verdict.notes {
        writeln!(out, "note        {note}")?;
    }
    let word = match () {
        () if verdict.interrupted => "INTERRUPTED: what was measured until then",
        () if verdict.failed => "FAILED",
        () if !verdict.valid => "INVALID: the limit was the generator, not the server",
        () if !verdict.passed => "THRESHOLD MISSED",
        () => "valid",
    };
    let mut reasons = verdict.reasons.iter();
    write!(out, "\nresult      {word}")?;
    if verdict.failed
        && let Some(first) = reasons.next()
    {
        write!(out, ": {first}")?;
    }
    writeln!(out)?;
    for reason in reasons {
        writeln!(out, "            {reason}")?;
    }
    Ok(())
}

fn row(out: &mut String, name: &str, latency: &Percentiles) -> fmt::Result {
    if latency.count == 0 {
        return writeln!(out, "{name:<10}{:>10}", "-");
    }
    let Percentiles { p50_us, p90_us, p99_us, p999_us, max_us, .. } = *latency;
    write!(out, "{name:<10}")?;
    for value in [p50_us, p90_us, p99_us, p999_us, max_us] {
        write!(out, "{:>10}", micros(value))?;
    }
    writeln!(out)
}

fn describe(config: &Config) -> String {
    let mut text = format!("{} connections to {}", show::count(config.connections.into()), config.targets[0]);
    if config.targets.len() > 1 {
        let _ = write!(text, " and {} more", config.targets.len() - 1);
    }
    if let Some(payload) = &config.payload {
        let _ = write!(text, ", '{payload}'");
    } else {
        let _ = write!(text, ", {}", show::bytes(config.size_bytes));
    }
    match (config.rate_per_s, config.interval_s) {
        (Some(rate), _) => {
            let _ = write!(text, ", {}/s by the clock", show::rate(rate));
        }
        (None, Some(interval)) => {
            let phase = config.phase.as_deref().unwrap_or("spread");
            let _ = write!(text, " every {}, {phase}", micros(interval * 1e6));
        }
        (None, None) => {
            let _ = write!(text, ", {} outstanding each", config.pipeline);
        }
    }
    text
}

fn error_line(report: &Report) -> String {
    let Report { window, errors, .. } = report;
    let mut parts: Vec<_> = nonzero(&errors.server)
        .map(|(name, number)| format!("{name} {}", show::count(number)))
        .chain(
            nonzero(&errors.generator)
                .map(|(name, number)| format!("{name} {} (generator)", show::count(number))),
        )
        .collect();
    for (name, number) in [("lost", window.lost), ("missed", window.missed), ("gone", window.gone)] {
        if number > 0 {
            parts.push(format!("messages {name} {}", show::count(number)));
        }
    }
    if parts.is_empty() {
        return "none".to_owned();
    }
    if window.planned == 0 {
        return parts.join(", ");
    }
    format!("{} of the messages; {}", show::percent(window.error_rate), parts.join(", "))
}

fn threshold_line(threshold: &Threshold) -> String {
    let state = if threshold.failed { "MISSED" } else { "kept  " };
    let value = match (threshold.value, threshold.unit.as_str()) {
        (None, _) => "not measured".to_owned(),
        (Some(value), "us") => micros(value),
        (Some(value), "ratio") => show::percent(value),
        (Some(value), "per_s") => format!("{}/s", show::rate(value)),
        (Some(value), _) => show::count(value as u64),
    };
    format!("{state} fail if {}: {value}", threshold.expression)
}

#[cfg(test)]
mod tests {
    use super::super::json::sample;
    use super::super::threshold::condition;
    use super::*;

    fn judged(change: impl FnOnce(&mut Report)) -> Report {
        let mut report = sample::report();
        change(&mut report);
        judge(&mut report, false);
        report
    }

    #[test]
    fn a_late_generator_makes_the_result_invalid_and_says_so() {
        let report = judged(|report| report.generator.rate_ratio = Some(0.95));
        assert_eq!(report.verdict.exit_code, exit::SATURATED);
        let text = table(&report);
        assert!(text.contains("INVALID") && text.contains("only 95.0% of the messages"), "{text}");
    }

    #[test]
    fn local_errors_make_it_invalid_and_name_the_remedy() {
        let report = judged(|report| {
            report.errors.generator.insert("local_addr_unavailable".to_owned(), 7);
        });
        assert!(!report.verdict.valid);
        assert!(report.verdict.reasons[0].contains("more target or source addresses"));
    }

    #[test]
    fn a_missed_threshold_is_its_own_exit_code() {
        let report = judged(|report| {
            let condition = condition("p99>1us").expect("a condition");
            report.thresholds = vec![condition.judge(report)];
        });
        assert_eq!(report.verdict.exit_code, exit::THRESHOLD);
        assert!(table(&report).contains("MISSED fail if p99>1us: 990 µs"), "{}", table(&report));
    }

    #[test]
    fn errors_alone_are_shown_and_do_not_fail() {
        let report = judged(|report| {
            report.errors.server.insert("reply_timeout".to_owned(), 3);
            report.window.error_rate = 0.003;
        });
        assert_eq!(report.verdict.exit_code, exit::OK);
        assert!(table(&report).contains("0.3% of the messages; reply_timeout 3"), "{}", table(&report));
    }

    #[test]
    fn no_connection_at_all_is_a_failure_that_names_the_cause() {
        let report = judged(|report| {
            report.ramp.connected = 0;
            report.window.planned = 0;
            report.errors.server.insert("connect_refused".to_owned(), 64);
        });
        assert_eq!(report.verdict.exit_code, exit::FAILURE);
        assert!(report.verdict.reasons[0].contains("64 × connect_refused"));
    }

    #[test]
    fn runs_that_were_none_fail_and_say_why() {
        let unanswered = judged(|report| report.window.replied = 0);
        assert_eq!(unanswered.verdict.exit_code, exit::FAILURE);
        assert!(table(&unanswered).contains("result      FAILED: none of the"), "{}", table(&unanswered));
        let refused = judged(|report| {
            report.ramp.attempted = 1000;
            report.ramp.failed = 11;
            report.errors.server.insert("connect_refused".to_owned(), 11);
        });
        assert_eq!(refused.verdict.exit_code, exit::FAILURE);
        assert!(refused.verdict.reasons[0].contains("11 of 1,000") && !refused.verdict.valid);
        let few = judged(|report| {
            report.ramp.attempted = 1000;
            report.ramp.failed = 10;
        });
        assert_eq!(few.verdict.exit_code, exit::OK);
        let mut ended = sample::report();
        judge(&mut ended, true);
        assert_eq!(ended.verdict.exit_code, exit::FAILURE);
        assert!(ended.verdict.reasons[0].contains("stopped early"));
    }
}
