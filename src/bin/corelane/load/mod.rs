//! `corelane load`: a load generator that verifies every reply and accounts for its own delays.
//!
//! * [`plan`]: what to do, and whether this machine can;
//! * [`handler`], [`traffic`]: doing it, one [`Generator`](handler::Generator) per worker, as callbacks; [`tasks`]: the same as async
//!   code; [`door`]: what both give it; [`engine`]: the runtime of either;
//! * [`run`]: leading the workers through ramp, warm-up, window and drain;
//! * [`stats`], [`json`], [`report`], [`threshold`]: counting, the result, the verdict;
//! * [`live`]: the line that is shown meanwhile.

mod door;
mod engine;
mod handler;
pub mod json;
mod live;
mod plan;
mod report;
mod run;
mod stats;
mod tasks;
mod threshold;
mod traffic;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Subcommand};
use corelane::{Backend, Signals, WaitPolicy};

use self::plan::{Content, Overlap, Phase, Plan, Schedule, Traffic};
use self::threshold::Condition;
use crate::output::{self, Sink, say};
use crate::units::{self, Cpus, Sources, Targets, Tier};
use crate::{Failure, proc};

/// What to generate.
#[derive(Debug, Subcommand)]
pub enum Load {
    /// Sends random bytes and expects them back: as fast as replies come, or at a given rate
    #[command(after_help = "Examples:\n  \
        corelane load echo --target 127.0.0.1:7000 -c 64 -d 10s\n  \
        corelane load echo --target 127.0.0.1:7000 -c 1k --size 1KiB --pipeline 4 --json result.json\n  \
        corelane load echo --target 127.0.0.1:7000 -c 64 --rate 50k/s --fail-if 'p99>1ms' --fail-if 'errors>0'\n\n\
        Without --rate each connection sends its next message when the reply has come (closed loop). With --rate \
        messages are sent by the clock, and latency counts from the moment they were due (open loop): what a \
        client sees that does not wait for the server.\n\n\
        The run has FAILED, with exit code 1, when nothing was answered in the window, when all connections ended \
        before it was over, or when more than 1 % of them were never established. Other errors are counted; \
        --fail-if makes them count.")]
    Echo(Echo),
    /// Holds many connections, each of which sends a small message at an interval
    #[command(after_help = "Examples:\n  \
        corelane load heartbeat --target 127.0.0.1:7000 -c 5k --interval 1s -d 10s\n  \
        corelane load heartbeat --target 127.0.0.1-7:7000 -c 50k --interval 5s --ramp 20k/s -d 30s \\\n    \
        --server-pid $(pidof server) --fail-if 'p99>20ms' --fail-if 'error_rate>0.1%'\n\n\
        Above some 8,000 connections per pair of source and target address, finding a free local port becomes \
        slow, and above some 28,000 (net.ipv4.ip_local_port_range) there is none: give more targets or sources.\n\n\
        The run has FAILED, with exit code 1, when nothing was answered in the window, when all connections ended \
        before it was over, or when more than 1 % of them were never established. Other errors are counted; \
        --fail-if makes them count.")]
    Heartbeat(Heartbeat),
}

/// What only `load echo` has.
#[derive(Debug, Args)]
pub struct Echo {
    #[command(flatten)]
    common: Common,

    /// Connections
    #[arg(short, long, default_value = "64", value_parser = units::positive_u32, allow_hyphen_values = true, value_name = "N")]
    connections: u32,

    /// Bytes of a message
    #[arg(long, default_value = "64", value_parser = units::bytes, allow_hyphen_values = true, value_name = "BYTES")]
    size: u64,

    /// Messages outstanding per connection
    #[arg(long, default_value = "1", value_parser = units::positive_u32, allow_hyphen_values = true, value_name = "N")]
    pipeline: u32,

    /// Messages per second, of all connections together, sent by the clock
    #[arg(long, value_name = "RATE", value_parser = units::rate, allow_hyphen_values = true)]
    rate: Option<f64>,

    /// With --rate: what happens to a message that is due while --pipeline others wait for replies
    #[arg(long, value_enum, default_value = "queue", requires = "rate")]
    overlap: Overlap,
}

/// What only `load heartbeat` has.
#[derive(Debug, Args)]
pub struct Heartbeat {
    #[command(flatten)]
    common: Common,

    /// Connections
    #[arg(short, long, default_value = "1000", value_parser = units::positive_u32, allow_hyphen_values = true, value_name = "N")]
    connections: u32,

    /// Time between two messages of a connection
    #[arg(long, default_value = "5s", value_parser = units::interval, allow_hyphen_values = true, value_name = "TIME")]
    interval: Duration,

    /// What is sent; escapes: \n \r \t \0 \\ \xNN
    #[arg(long, default_value = r"ping\n", value_name = "TEXT")]
    payload: String,

    /// What must come back [default: 'pong\n' for 'ping\n', else the payload itself]
    #[arg(long, value_name = "TEXT")]
    expect: Option<String>,

    /// How the connections' beats lie to each other
    #[arg(long, value_enum, default_value = "spread")]
    phase: Phase,

    /// What happens to a beat that is due while the reply to the one before is missing
    #[arg(long, value_enum, default_value = "skip")]
    overlap: Overlap,
}

/// What both have.
#[derive(Debug, Args)]
pub struct Common {
    /// Where to: ADDR:PORT, or a range like 127.0.0.1-8:7000; several are used in turn
    #[arg(long, value_name = "ADDR", value_delimiter = ',', default_value = "127.0.0.1:7000", value_parser = units::targets)]
    target: Vec<Targets>,

    /// Local addresses to connect from, in turn: 127.0.0.2 or 127.0.0.2-9
    #[arg(long, value_name = "ADDR", value_delimiter = ',', value_parser = units::addresses)]
    source: Vec<Sources>,

    /// Connections begun per second
    #[arg(long, default_value = "20k/s", value_name = "RATE", value_parser = units::rate, allow_hyphen_values = true)]
    ramp: f64,

    /// Length of the measured window
    #[arg(short, long, default_value = "10s", value_parser = units::positive_duration, allow_hyphen_values = true, value_name = "TIME")]
    duration: Duration,

    /// Time before the window in which messages flow but do not count
    #[arg(long, default_value = "1s", value_parser = units::duration, allow_hyphen_values = true, value_name = "TIME")]
    warmup: Duration,

    /// How long a reply may take
    #[arg(long, default_value = "2s", value_parser = units::positive_duration, allow_hyphen_values = true, value_name = "TIME")]
    timeout: Duration,

    /// How long establishing a connection may take
    #[arg(long, default_value = "10s", value_parser = units::positive_duration, allow_hyphen_values = true, value_name = "TIME")]
    connect_timeout: Duration,

    /// Kernel interface: auto, io_uring, epoll or iocp; auto is what CORELANE_BACKEND says, else the best that there is
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = units::backend)]
    backend: Backend,

    /// How the generator is written: as callbacks, or as async tasks, one for each connection
    #[arg(long, value_name = "TIER", value_enum, default_value = "handler")]
    tier: Tier,

    /// How the generator waits when there is nothing to do: block, spin=50us, coalesce=200us (or =200us,32: at most so many
    /// completions), adaptive=1ms; what each costs and brings is in benches/README.md
    #[arg(long, value_name = "HOW", default_value = "block", value_parser = units::wait)]
    wait: WaitPolicy,

    /// Threads of the generator
    #[arg(long, default_value = "1", value_parser = units::positive_u32, allow_hyphen_values = true, value_name = "N")]
    workers: u32,

    /// Cores to pin them to: 1 or 0,2-3
    #[arg(long, value_name = "LIST", value_parser = units::cpus, allow_hyphen_values = true)]
    cpus: Option<Cpus>,

    /// Write the result as JSON (corelane-load/1); '-' is standard output, the table then goes to standard error
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Exit with 3 when this holds: p99>20ms, error_rate>0.1%, errors>0, rate<10k ... (any number of times)
    #[arg(long, value_name = "CONDITION", value_parser = threshold::condition)]
    fail_if: Vec<Condition>,

    /// Process id of the server: its CPU time and memory go into the result
    #[arg(long, value_name = "PID", allow_hyphen_values = true)]
    server_pid: Option<u32>,

    /// No progress lines
    #[arg(short, long)]
    quiet: bool,

    /// Stop when standard input ends, as at a signal: for programs that start this one
    #[arg(long)]
    until_stdin_ends: bool,
}

/// Longest timeout that the runtime's timers take.
const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 24 * 3600);

/// Messages on their way at most, in bytes per connection.
const MAX_OUTSTANDING: u64 = 1 << 30;

/// Runs it.
///
/// # Errors
/// [`Failure`] when there is no result.
pub fn main(load: Load, signals: Signals) -> Result<ExitCode, Failure> {
    let (plan, mut config) = match &load {
        Load::Echo(echo) => echo.plan()?,
        Load::Heartbeat(heartbeat) => heartbeat.plan()?,
    };
    let (Load::Echo(Echo { common, .. }) | Load::Heartbeat(Heartbeat { common, .. })) = &load;
    common.check()?;
    plan.check_families().map_err(Failure::usage)?;
    // Without it there may still be enough.
    let _ = corelane::raise_nofile_limit();
    let advice = plan.preflight().map_err(Failure::preflight)?;
    let sink = common.json.as_deref().map(|path| Sink::open("--json", path)).transpose()?;
    for line in &advice {
        say!("advice: {line}");
    }
    let options = run::Options {
        backend: common.backend,
        tier: common.tier,
        wait: common.wait,
        workers: common.workers as usize,
        cpus: common.cpus.as_ref().map(|list| list.0.clone()).unwrap_or_default(),
        server_pid: common.server_pid,
        quiet: common.quiet,
        until_stdin_ends: common.until_stdin_ends,
    };
    let plan = Arc::new(plan);
    let mut outcome = run::run(&plan, &options, signals)?;
    outcome.notes.splice(0..0, advice);
    config.workers = outcome.environment.workers.len();
    let report = report::assemble(&plan, config, outcome, &common.fail_if);
    output::publish(&report::table(&report), sink, &report)?;
    Ok(ExitCode::from(report.verdict.exit_code))
}

impl Common {
    fn check(&self) -> Result<(), Failure> {
        for (name, value) in [("--timeout", self.timeout), ("--connect-timeout", self.connect_timeout)] {
            if !(Duration::from_millis(1)..=MAX_TIMEOUT).contains(&value) {
                return Err(Failure::usage(format!("{name} must be 1ms to 24 days")));
            }
        }
        if self.server_pid.is_none() && self.fail_if.iter().any(Condition::needs_server) {
            return Err(Failure::usage("--fail-if server_cpu needs --server-pid"));
        }
        if let Some(pid) = self.server_pid
            && proc::usage(Some(pid)).is_none()
        {
            return Err(Failure::usage(format!(
                "--server-pid {pid}: there is no such process, or this system does not tell about it"
            )));
        }
        Ok(())
    }

    fn plan(&self, connections: u32, traffic: Traffic, content: Content) -> Plan {
        Plan {
            targets: self.target.iter().flat_map(|entry| entry.0.iter().copied()).collect(),
            sources: self.source.iter().flat_map(|entry| entry.0.iter().copied()).collect(),
            connections,
            ramp_per_s: self.ramp,
            connect_timeout: self.connect_timeout,
            timeout: self.timeout,
            warmup: self.warmup,
            duration: self.duration,
            traffic,
            content,
        }
    }
}

fn config(mode: &str, plan: &Plan, common: &Common) -> json::Config {
    json::Config {
        mode: mode.to_owned(),
        loop_kind: match plan.traffic {
            Traffic::Closed { .. } => "closed".to_owned(),
            Traffic::Open { .. } => "open".to_owned(),
        },
        targets: plan.targets.iter().map(ToString::to_string).collect(),
        sources: plan.sources.iter().map(ToString::to_string).collect(),
        connections: plan.connections,
        workers: common.workers as usize,
        ramp_per_s: plan.ramp_per_s,
        warmup_s: plan.warmup.as_secs_f64(),
        duration_s: plan.duration.as_secs_f64(),
        timeout_s: plan.timeout.as_secs_f64(),
        connect_timeout_s: plan.connect_timeout.as_secs_f64(),
        size_bytes: plan.content.sizes().0 as u64,
        pipeline: plan.traffic.depth(),
        rate_per_s: None,
        interval_s: None,
        phase: None,
        overlap: None,
        payload: None,
        expect: None,
        server_pid: common.server_pid,
    }
}

/// The name of a value as it is typed.
fn name(value: &impl clap::ValueEnum) -> Option<String> {
    value.to_possible_value().map(|value| value.get_name().to_owned())
}

impl Echo {
    fn plan(&self) -> Result<(Plan, json::Config), Failure> {
        if self.size == 0 {
            return Err(Failure::usage("--size must be at least 1"));
        }
        if self.size.saturating_mul(self.pipeline.into()) > MAX_OUTSTANDING {
            return Err(Failure::usage("--size times --pipeline must be at most 1GiB"));
        }
        let traffic = match self.rate {
            None => Traffic::Closed { pipeline: self.pipeline },
            Some(rate) => Traffic::Open {
                schedule: Schedule::new(f64::from(self.connections) / rate, self.connections, Phase::Spread),
                overlap: self.overlap,
                depth: self.pipeline,
            },
        };
        let plan = self.common.plan(self.connections, traffic, Content::pattern(self.size as usize));
        let mut config = config("echo", &plan, &self.common);
        if let Some(rate) = self.rate {
            config.rate_per_s = Some(rate);
            config.interval_s = Some(f64::from(self.connections) / rate);
            config.phase = name(&Phase::Spread);
            config.overlap = name(&self.overlap);
        }
        Ok((plan, config))
    }
}

impl Heartbeat {
    fn plan(&self) -> Result<(Plan, json::Config), Failure> {
        let parse = |flag: &str, text: &str| {
            units::payload(text).map_err(|error| Failure::usage(format!("{flag} '{text}': {error}")))
        };
        let payload = parse("--payload", &self.payload)?;
        let expect = match &self.expect {
            Some(text) => parse("--expect", text)?,
            None if payload == b"ping\n" => b"pong\n".to_vec(),
            None => payload.clone(),
        };
        let traffic = Traffic::Open {
            schedule: Schedule::new(self.interval.as_secs_f64(), self.connections, self.phase),
            overlap: self.overlap,
            depth: 1,
        };
        let shown = (units::escape(&payload), units::escape(&expect));
        let plan = self.common.plan(self.connections, traffic, Content::fixed(payload, expect));
        let config = json::Config {
            interval_s: Some(self.interval.as_secs_f64()),
            phase: name(&self.phase),
            overlap: name(&self.overlap),
            payload: Some(shown.0),
            expect: Some(shown.1),
            ..config("heartbeat", &plan, &self.common)
        };
        Ok((plan, config))
    }
}
