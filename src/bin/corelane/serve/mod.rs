//! `corelane serve`: the servers that the load generator, and anyone else, can talk to.

mod handlers;
mod tasks;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use corelane::{Backend, Builder, Descriptors, ListenerConfig, Runtime, RuntimeInfo, ShutdownReport};
use corelane::{Signals, Snapshot, StartError, WaitPolicy, WorkerConfig};
use serde::Serialize;

use crate::load::json::{Environment, Tool};
use crate::output::{self, Sink, say};
use crate::units::{self, Buffers, Cpus, Tier};
use crate::{Failure, exit, proc, show};

/// What the server does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Sends back what it receives
    Echo,
    /// Answers each line 'ping' with 'pong'
    Heartbeat,
    /// Takes everything, answers nothing
    Discard,
}

/// How sockets are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DescriptorKind {
    /// In the ring's own table: cheaper, and outside the process's limit of open files (io_uring only)
    Direct,
    /// As ordinary file descriptors, visible to ss -p and in /proc
    Fd,
}

/// Runs a server.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    corelane serve echo\n  \
    corelane serve heartbeat --listen 0.0.0.0:7000 --workers 4 --pin --max-connections 100k --stats 1s\n  \
    corelane serve echo --listen [::]:7000 --dual-stack --buffers 16KiBx1024\n  \
    corelane serve echo --tier async\n\n\
    Prints 'listening on ADDR' on standard output, one line per address, when it is ready; everything else goes to \
    standard error. SIGINT and SIGTERM (on Windows Ctrl-C and Ctrl-Break) shut it down in good order; a second one \
    ends it at once.\n\
    heartbeat answers 'ping\\n' with 'pong\\n'; any other line, or one over --max-line, is answered with an error \
    line and the connection is closed.")]
pub struct Serve {
    /// What the server does
    #[arg(value_enum)]
    kind: Kind,

    /// Address to listen on, any number of them; port 0 lets the system choose
    #[arg(long, value_name = "ADDR", value_delimiter = ',', default_value = "127.0.0.1:7000", value_parser = units::listen)]
    listen: Vec<SocketAddr>,

    /// Kernel interface: auto, io_uring, epoll or iocp; auto is what CORELANE_BACKEND says, else the best that there is
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = units::backend)]
    backend: Backend,

    /// How it is written: as callbacks, or as async tasks
    #[arg(long, value_name = "TIER", value_enum, default_value = "handler")]
    tier: Tier,

    /// How it waits when there is nothing to do: block, spin=50us, coalesce=200us (or =200us,32: at most so many
    /// completions), adaptive=1ms; what each costs and brings is in benches/README.md
    #[arg(long, value_name = "HOW", default_value = "block", value_parser = units::wait)]
    wait: WaitPolicy,

    /// Worker threads, each with its own ring [default: 1, or one per core of --cpus or --pin]
    #[arg(long, value_name = "N", value_parser = units::positive_u32, allow_hyphen_values = true)]
    workers: Option<u32>,

    /// Pin each worker to a core of its own
    #[arg(long, conflicts_with = "cpus")]
    pin: bool,

    /// Cores to pin the workers to: 0 or 0,2-3
    #[arg(long, value_name = "LIST", value_parser = units::cpus, allow_hyphen_values = true)]
    cpus: Option<Cpus>,

    /// Connections that may wait to be accepted, per listener; the kernel clamps it to net.core.somaxconn
    #[arg(long, value_name = "N", default_value = "4096", value_parser = units::positive_u32, allow_hyphen_values = true)]
    backlog: u32,

    /// Connections in total [default: 16384 per worker]
    #[arg(long, value_name = "N", value_parser = units::positive, allow_hyphen_values = true)]
    max_connections: Option<u64>,

    /// Close a connection that sends nothing for this long; 0 never [default: 60s for heartbeat, else 0]
    #[arg(long, value_name = "TIME", value_parser = units::duration, allow_hyphen_values = true)]
    idle_timeout: Option<Duration>,

    /// Size and number of receive buffers per worker [default: 8KiBx512]
    #[arg(long, value_name = "SIZExCOUNT", value_parser = units::buffers, allow_hyphen_values = true)]
    buffers: Option<Buffers>,

    /// How sockets are held
    #[arg(long, value_name = "KIND", value_enum, default_value = "direct")]
    descriptors: DescriptorKind,

    /// Print statistics on standard error, this often
    #[arg(long, value_name = "TIME", value_parser = units::positive_duration, allow_hyphen_values = true)]
    stats: Option<Duration>,

    /// Time for connections to end in when the server is told to stop
    #[arg(long, value_name = "TIME", default_value = "5s", value_parser = units::duration, allow_hyphen_values = true)]
    shutdown_timeout: Duration,

    /// IPv6 addresses take IPv4 connections too
    #[arg(long)]
    dual_stack: bool,

    /// heartbeat: longest line, in bytes: 4096 or 4KiB
    #[arg(long, value_name = "BYTES", default_value = "4096", value_parser = units::bytes_u32, allow_hyphen_values = true)]
    max_line: u32,

    /// At the end, write all counters as JSON (corelane-serve/1) to this file
    #[arg(long, value_name = "FILE")]
    report_json: Option<PathBuf>,

    /// Stop when standard input ends, so that a server does not outlive the program that started it
    #[arg(long)]
    until_stdin_ends: bool,
}

/// What may end the server.
enum Stop {
    Signal,
    StdinEnded,
}

/// Runs it.
///
/// # Errors
/// [`Failure`] when it could not start.
pub fn main(args: Serve, signals: Signals) -> Result<ExitCode, Failure> {
    let max_line = args.max_line;
    match (args.tier, args.kind) {
        (Tier::Async, kind) => {
            run(&args, signals, |builder| builder.start_tasks(move |_| tasks::serve(kind, max_line)))
        }
        (Tier::Handler, Kind::Echo) => run(&args, signals, |builder| builder.start(|_| handlers::Echo)),
        (Tier::Handler, Kind::Discard) => run(&args, signals, |builder| builder.start(|_| handlers::Discard)),
        (Tier::Handler, Kind::Heartbeat) => {
            run(&args, signals, |builder| builder.start(move |_| handlers::Heartbeat::new(max_line)))
        }
    }
}

fn run<M: Send + 'static>(
    args: &Serve,
    signals: Signals,
    start: impl FnOnce(Builder) -> Result<Runtime<M>, StartError>,
) -> Result<ExitCode, Failure> {
    let config = args.worker_config()?;
    let sink = args.report_json.as_deref().map(|path| Sink::open("--report-json", path)).transpose()?;
    // Without it there may still be enough.
    let _ = corelane::raise_nofile_limit();
    let cpus = match &args.cpus {
        Some(list) => list.0.clone(),
        None if args.pin => proc::allowed_cpus(),
        None => Vec::new(),
    };
    let workers = args.workers.map_or(cpus.len().max(1), |workers| workers as usize);
    let mut builder = Runtime::builder().backend(args.backend).workers(workers).worker(config);
    if !cpus.is_empty() {
        builder = builder.cpus(cpus);
    }
    if let Some(total) = args.max_connections {
        builder = builder.max_connections(total);
    }
    for &addr in &args.listen {
        let mut listener = ListenerConfig::new(addr);
        listener.backlog = args.backlog;
        listener.dual_stack = args.dual_stack && addr.is_ipv6();
        builder = builder.listen(listener);
    }
    let runtime = start(builder)?;
    announce(runtime.info())?;

    let stops = watch(signals, args.until_stdin_ends);
    let cause = serve(args, &runtime, &stops);
    let environment = Environment::collect(args.tier, Some(runtime.info()));
    let report = match cause {
        Some(cause) => {
            say!("{cause}: shutting down, at most {:?}", args.shutdown_timeout);
            force_on_second_signal(stops);
            runtime.shutdown(args.shutdown_timeout)
        }
        None => runtime.join(),
    };
    let report = report.map_err(|error| Failure::run(error.to_string()))?;
    finish(sink, environment, &report)
}

/// Says that it is ready, and how.
fn announce(info: &RuntimeInfo) -> Result<(), Failure> {
    for warning in &info.warnings {
        say!("warning: {warning}");
    }
    let on: Vec<_> = info.features.iter().filter(|feature| feature.on).map(|feature| feature.name).collect();
    say!("{} on kernel {}: {}", info.backend, info.kernel, on.join(", "));
    for feature in info.features.iter().filter(|feature| !feature.on) {
        say!("without {}: {}", feature.name, feature.why);
    }
    say!("{} worker(s), at most {} connections", info.workers.len(), show::count(info.max_connections));
    let lines: String =
        info.listeners.iter().map(|listener| format!("listening on {}\n", listener.addr)).collect();
    output::print(lines.as_bytes())
}

/// Turns signals, and the end of standard input, into messages on one channel.
fn watch(signals: Signals, stdin_too: bool) -> Receiver<Stop> {
    let (sender, receiver) = channel();
    if stdin_too {
        let sender = sender.clone();
        thread::spawn(move || {
            // Nothing that is read matters, nor why reading ended.
            let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
            let _ = sender.send(Stop::StdinEnded);
        });
    }
    thread::spawn(move || {
        while let Ok(signal) = signals.wait(None) {
            if signal.is_some() && sender.send(Stop::Signal).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Waits for the end, printing statistics; returns what ended it, or `None` when the workers ended.
fn serve<M: Send + 'static>(
    args: &Serve,
    runtime: &Runtime<M>,
    stops: &Receiver<Stop>,
) -> Option<&'static str> {
    let pace = args.stats.unwrap_or(Duration::from_secs(1));
    let mut last = (Instant::now(), runtime.metrics().total());
    let mut next = last.0 + pace;
    loop {
        match stops.recv_timeout(next.saturating_duration_since(Instant::now())) {
            Ok(Stop::Signal) => return Some("signal"),
            Ok(Stop::StdinEnded) => return Some("end of standard input"),
            Err(RecvTimeoutError::Disconnected) => return Some("signals lost"),
            Err(RecvTimeoutError::Timeout) => {}
        }
        next += pace;
        if !runtime.is_running() {
            return None;
        }
        if args.stats.is_some() {
            let now = (Instant::now(), runtime.metrics().total());
            say!("{}", stats_line(&last.1, &now.1, now.0 - last.0));
            last = now;
        }
    }
}

/// What happened between two snapshots.
fn stats_line(last: &Snapshot, now: &Snapshot, elapsed: Duration) -> String {
    let rate = |now: u64, last: u64| now.saturating_sub(last) as f64 / elapsed.as_secs_f64().max(1e-9);
    let messages = now.messages.saturating_sub(last.messages);
    let enters = now.enters.saturating_sub(last.enters);
    let mut line = format!(
        "{} connections (+{}/s -{}/s)  {} messages/s  {}/s in  {}/s out",
        show::count(now.connections),
        show::rate(rate(now.accepted, last.accepted)),
        show::rate(rate(now.closed_total(), last.closed_total())),
        show::rate(rate(now.messages, last.messages)),
        show::bytes(rate(now.bytes_received, last.bytes_received) as u64),
        show::bytes(rate(now.bytes_sent, last.bytes_sent) as u64),
    );
    if messages > 0 {
        line.push_str(&format!("  {:.3} enters/message", enters as f64 / messages as f64));
    }
    for (name, now, last) in [
        ("starved", now.starved, last.starved),
        ("congested", now.congested, last.congested),
        ("accept errors", now.accept_errors, last.accept_errors),
        ("CQ overflows", now.cq_overflows, last.cq_overflows),
    ] {
        if now > last {
            line.push_str(&format!("  {} {name}", show::count(now - last)));
        }
    }
    line
}

/// The user who signals twice wants it now.
fn force_on_second_signal(stops: Receiver<Stop>) {
    let first = Instant::now();
    thread::spawn(move || {
        while let Ok(stop) = stops.recv() {
            if let Stop::Signal = stop
                && first.elapsed() > exit::ECHO
            {
                say!("second signal: ending at once");
                std::process::exit(exit::INTERRUPTED.into());
            }
        }
    });
}

/// The counters, for programs.
#[derive(Debug, Serialize)]
struct Document {
    schema: &'static str,
    tool: Tool,
    environment: Environment,
    finished: u64,
    aborted: u64,
    ops_in_kernel: u64,
    buffers_outstanding: u64,
    counters: serde_json::Map<String, serde_json::Value>,
}

/// Prints and writes the report.
fn finish(
    sink: Option<Sink>,
    environment: Environment,
    report: &ShutdownReport,
) -> Result<ExitCode, Failure> {
    let total = report.metrics.total();
    let ShutdownReport { finished, aborted, ops_in_kernel, buffers_outstanding, .. } = *report;
    say!(
        "shut down: {finished} connections finished, {aborted} aborted, {ops_in_kernel} operations left in the kernel, {buffers_outstanding} buffers outstanding"
    );
    say!("{total}");
    let closed: Vec<_> = total
        .iter()
        .filter_map(|(name, value)| Some((name.strip_prefix("closed_")?.to_owned(), value)))
        .filter(|&(_, value)| value > 0)
        .map(|(name, value)| format!("{name} {}", show::count(value)))
        .collect();
    say!("closed: {}", if closed.is_empty() { "none".to_owned() } else { closed.join(", ") });
    if let Some(sink) = sink {
        let counters = total.iter().map(|(name, value)| (name, value.into())).collect();
        let document = Document {
            schema: "corelane-serve/1",
            tool: Tool::this(),
            environment,
            finished,
            aborted,
            ops_in_kernel,
            buffers_outstanding,
            counters,
        };
        sink.write(&document)?;
    }
    if ops_in_kernel + buffers_outstanding > 0 {
        return Err(Failure::run("the runtime did not get everything back from the kernel"));
    }
    Ok(ExitCode::from(exit::OK))
}

impl Serve {
    fn worker_config(&self) -> Result<WorkerConfig, Failure> {
        let mut config = WorkerConfig {
            idle_timeout: match (self.idle_timeout, self.kind) {
                (Some(Duration::ZERO), _) => None,
                (Some(timeout), _) => Some(timeout),
                (None, Kind::Heartbeat) => Some(Duration::from_secs(60)),
                (None, _) => None,
            },
            descriptors: match self.descriptors {
                DescriptorKind::Direct => Descriptors::Direct,
                DescriptorKind::Fd => Descriptors::Fd,
            },
            wait: self.wait,
            ..WorkerConfig::default()
        };
        if let Some(Buffers { size, count }) = self.buffers {
            config.buffers.size = size;
            config.buffers.count = count;
        }
        if self.max_line < 5 {
            return Err(Failure::usage("--max-line must be at least 5, the length of 'ping\\n'"));
        }
        if self.dual_stack && !self.listen.iter().any(SocketAddr::is_ipv6) {
            return Err(Failure::usage("--dual-stack needs an IPv6 address: --listen [::]:7000"));
        }
        config.check().map_err(|error| Failure::usage(error.to_string()))?;
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_statistics_line_is_about_the_time_between() {
        let last = Snapshot::default();
        let mut now = Snapshot::default();
        now.connections = 3;
        now.accepted = 4;
        now.messages = 2000;
        now.enters = 100;
        now.starved = 7;
        let line = stats_line(&last, &now, Duration::from_secs(2));
        assert!(line.starts_with("3 connections (+2.0/s -0.0/s)  1,000 messages/s"), "{line}");
        assert!(line.contains("0.050 enters/message") && line.ends_with("7 starved"), "{line}");
    }
}
