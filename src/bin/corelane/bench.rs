//! `corelane bench`: the main job, measured here and now.
//!
//! Server and load generator are two processes, each on a core of its own where there are two, and
//! each scenario gets a fresh server. Both children stop when their standard input ends, so that
//! none outlives this process, however it ends.

use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use clap::Args;
use corelane::{Backend, Signals};
use serde::Serialize;
use serde_json::Value;

use crate::load::json::{Environment, Report, Tool};
use crate::output::{self, Sink, say};
use crate::units::Tier;
use crate::{Failure, exit, proc, show, units};

/// Runs the main job.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  \
    corelane bench\n  \
    corelane bench --quick --json bench.json\n\n\
    Starts a server on one core and the load generator on another, and runs: echo, 64 connections, 64 bytes; echo, \
    1000 connections, 1 KiB; 5000 connections with a heartbeat each second. Where the server stands on io_uring, each is run once more \
    with the server on epoll, as a control: the same code on another kernel interface. Takes about 50 seconds, --quick about 16.")]
pub struct Bench {
    /// Write the result as JSON (corelane-bench/1); '-' is standard output, the table then goes to standard error
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Kernel interface of both sides: auto, io_uring, epoll or iocp; auto is what CORELANE_BACKEND says, else the best that there is
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = units::backend)]
    backend: Backend,

    /// Leave out the control on epoll
    #[arg(long)]
    no_control: bool,

    /// Shorter windows: to see that it works, not to quote
    #[arg(long)]
    quick: bool,
}

/// One measurement.
struct Scenario {
    name: &'static str,
    server: &'static str,
    load: &'static [&'static str],
}

const SCENARIOS: [Scenario; 3] = [
    Scenario { name: "echo, 64 × 64 B", server: "echo", load: &["echo", "-c", "64", "--size", "64"] },
    Scenario { name: "echo, 1000 × 1 KiB", server: "echo", load: &["echo", "-c", "1000", "--size", "1KiB"] },
    Scenario {
        name: "heartbeat, 5000 × 1/s",
        server: "heartbeat",
        load: &["heartbeat", "-c", "5000", "--interval", "1s"],
    },
];

/// Connections from which on the growth of memory per connection means something.
const MANY: u64 = 1000;

/// Time that a child gets to start or to stop.
const PATIENCE: Duration = Duration::from_secs(10);

/// The document.
#[derive(Debug, Serialize)]
struct Document {
    schema: &'static str,
    tool: Tool,
    environment: Environment,
    quick: bool,
    server_cpu: usize,
    load_cpu: usize,
    shared_core: bool,
    scenarios: Vec<Measured>,
}

impl Document {
    /// Every run, controls included.
    fn runs(&self) -> impl Iterator<Item = &Measured> {
        self.scenarios.iter().flat_map(|measured| [Some(measured), measured.control.as_deref()]).flatten()
    }
}

/// The figures of one scenario, and where they come from.
#[derive(Debug, Serialize)]
struct Measured {
    name: String,
    /// The kernel interface that the server stood on.
    backend: String,
    /// The same with the server on epoll, run right before or after.
    control: Option<Box<Measured>>,
    messages_per_s: f64,
    p50_us: f64,
    p99_us: f64,
    p999_us: f64,
    server_cpu_us_per_message: Option<f64>,
    server_rss_bytes_per_connection: Option<f64>,
    server_enters_per_message: Option<f64>,
    errors: u64,
    valid: bool,
    load: Report,
    server: Value,
}

/// Runs it.
///
/// # Errors
/// [`Failure`] when a child could not do its part.
pub fn main(args: Bench, signals: Signals) -> Result<ExitCode, Failure> {
    thread::spawn(move || {
        if let Ok(Some(_)) = signals.wait(None) {
            // Both children notice that their standard input ends.
            say!("interrupted");
            std::process::exit(exit::INTERRUPTED.into());
        }
    });
    // Found out before anything is started; the children would each say it in their own way.
    if args.backend == Backend::Auto
        && let Ok(value) = std::env::var(Backend::VARIABLE)
        && !value.is_empty()
        && let Err(error) = units::backend(&value)
    {
        return Err(Failure::usage(format!("{}: {error}", Backend::VARIABLE)));
    }
    let sink = args.json.as_deref().map(|path| Sink::open("--json", path)).transpose()?;
    let cpus = proc::allowed_cpus();
    let server_cpu = cpus.first().copied().unwrap_or(0);
    let load_cpu = cpus.get(1).copied().unwrap_or(server_cpu);
    let mut document = Document {
        schema: "corelane-bench/1",
        tool: Tool::this(),
        environment: Environment::collect(Tier::Handler, None),
        quick: args.quick,
        server_cpu,
        load_cpu,
        shared_core: server_cpu == load_cpu,
        scenarios: Vec::new(),
    };
    for scenario in &SCENARIOS {
        say!("running: {}", scenario.name);
        let run = |backend| {
            measure(scenario, &args, backend, server_cpu, load_cpu)
                .map_err(|failure| failure.at(scenario.name))
        };
        let mut measured = run(args.backend)?;
        if measured.backend == Backend::IoUring.as_str() && !args.no_control {
            say!("running: {}, on epoll", scenario.name);
            measured.control = Some(Box::new(run(Backend::Epoll)?));
        }
        let environment = &measured.server["environment"];
        if let (true, Some(fallback)) = (document.scenarios.is_empty(), environment["fallback"].as_str()) {
            say!("warning: {fallback}");
        }
        document.scenarios.push(measured);
    }
    if let Some(environment) = document.scenarios.first().and_then(|first| first.server.get("environment")) {
        // The server's view knows the kernel features that were measured.
        if let Ok(environment) = serde_json::from_value(environment.clone()) {
            document.environment = environment;
            document.environment.cpus_allowed = cpus;
        }
    }
    output::publish(&table(&document), sink, &document)?;
    let any = |code| document.runs().any(|measured| measured.load.verdict.exit_code == code);
    Ok(ExitCode::from(match () {
        () if any(exit::FAILURE) => exit::FAILURE,
        () if document.runs().any(|measured| !measured.valid) => exit::SATURATED,
        () => exit::OK,
    }))
}

/// A child of ours: what it prints arrives as lines; it is ended when this is dropped.
struct Process {
    /// What it is called.
    role: &'static str,
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    errors: Option<JoinHandle<String>>,
}

impl Process {
    fn start(role: &'static str, args: &[String]) -> Result<Self, Failure> {
        let program = std::env::current_exe()
            .map_err(|error| Failure::run(format!("cannot find this program: {error}")))?;
        let mut child = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| Failure::run(format!("cannot start another process: {error}")))?;
        let (sender, lines) = channel();
        if let Some(stdout) = child.stdout.take() {
            thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        break;
                    }
                }
            });
        }
        let errors = child.stderr.take().map(|mut stderr| {
            thread::spawn(move || {
                let mut text = String::new();
                let _ = stderr.read_to_string(&mut text);
                text
            })
        });
        Ok(Self { role, stdin: child.stdin.take(), child, lines, errors })
    }

    /// The next line, or what the child said on standard error if there is none.
    fn line(&mut self, limit: Duration) -> Result<String, Failure> {
        self.lines.recv_timeout(limit).map_err(|error| self.complaint(error))
    }

    /// Everything that the child still prints until it ends by itself.
    fn rest(&mut self, limit: Duration) -> Result<String, Failure> {
        let deadline = Instant::now() + limit;
        let mut text = String::new();
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    text.push_str(&line);
                    text.push('\n');
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(text),
                Err(error) => return Err(self.complaint(error)),
            }
        }
    }

    fn complaint(&mut self, error: RecvTimeoutError) -> Failure {
        let ended = match error {
            RecvTimeoutError::Timeout => None,
            RecvTimeoutError::Disconnected => self.status(),
        };
        // Ended before its words are awaited, so that they end too.
        let _ = self.child.kill();
        let said = self.errors.take().and_then(|thread| thread.join().ok()).unwrap_or_default();
        let said = said.trim();
        let role = self.role;
        match ended {
            Some(status) => {
                Failure::of_child(status.code(), format!("the {role} ended early ({status}): {said}"))
            }
            None => Failure::run(format!("the {role} took too long: {said}")),
        }
    }

    /// How it ended, given a moment to do so.
    fn status(&mut self) -> Option<ExitStatus> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(10)),
                _ => return None,
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Has no effect on a child that has ended; after it, waiting cannot last.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn strings(args: &[&str]) -> Vec<String> {
    args.iter().map(|&arg| arg.to_owned()).collect()
}

fn measure(
    scenario: &Scenario,
    wishes: &Bench,
    backend: Backend,
    server_cpu: usize,
    load_cpu: usize,
) -> Result<Measured, Failure> {
    let mut args = strings(&["serve", scenario.server, "--listen", "127.0.0.1:0", "--report-json", "-"]);
    args.extend(strings(&["--until-stdin-ends", "--shutdown-timeout", "3s"]));
    args.extend(strings(&["--backend", backend.as_str(), "--cpus", &server_cpu.to_string()]));
    let mut server = Process::start("server", &args)?;
    let line = server.line(PATIENCE)?;
    let address = line
        .strip_prefix("listening on ")
        .ok_or_else(|| Failure::run(format!("the server printed '{line}' instead of its address")))?;

    let (window, warmup) = if wishes.quick { ("2s", "300ms") } else { ("6s", "1s") };
    let mut args = strings(&["load"]);
    args.extend(strings(scenario.load));
    args.extend(strings(&["--target", address, "-d", window, "--warmup", warmup, "--json", "-", "--quiet"]));
    args.extend(strings(&["--until-stdin-ends", "--backend", wishes.backend.as_str()]));
    args.extend(strings(&["--cpus", &load_cpu.to_string()]));
    let server_pid = server.child.id();
    if proc::usage(Some(server_pid)).is_some() {
        args.extend(strings(&["--server-pid", &server_pid.to_string()]));
    }
    let mut load = Process::start("load generator", &args)?;
    let text = load.rest(Duration::from_secs(60))?;
    let report: Report =
        serde_json::from_str(&text).map_err(|_| load.complaint(RecvTimeoutError::Disconnected))?;
    drop(load);

    server.stdin = None;
    let text = server.rest(PATIENCE)?;
    let counters: Value =
        serde_json::from_str(&text).map_err(|_| server.complaint(RecvTimeoutError::Disconnected))?;
    Ok(figures(scenario.name, report, counters))
}

fn figures(name: &str, load: Report, server: Value) -> Measured {
    let counter = |name: &str| server["counters"][name].as_f64();
    let enters = counter("enters").zip(counter("messages")).filter(|&(_, messages)| messages > 0.0);
    Measured {
        name: name.to_owned(),
        backend: server["environment"]["backend"].as_str().unwrap_or("unknown").to_owned(),
        control: None,
        messages_per_s: load.window.messages_per_s,
        p50_us: load.window.response_us.p50_us,
        p99_us: load.window.response_us.p99_us,
        p999_us: load.window.response_us.p999_us,
        server_cpu_us_per_message: load.server.as_ref().and_then(|server| server.cpu_us_per_message),
        server_rss_bytes_per_connection: load
            .server
            .as_ref()
            .and_then(|server| server.rss_bytes_per_connection)
            // Memory grows by pages: over a few connections that says nothing about one.
            .filter(|_| load.ramp.connected >= MANY),
        server_enters_per_message: enters.map(|(enters, messages)| enters / messages),
        errors: load.errors.server_total,
        valid: load.verdict.valid,
        load,
        server,
    }
}

fn table(document: &Document) -> String {
    let Document { environment, .. } = document;
    let mut out = format!(
        "corelane {} bench: server and load generator on this machine, over loopback\n",
        document.tool.version
    );
    out.push_str(&format!(
        "kernel {}, {}\n",
        environment.kernel.as_deref().unwrap_or("unknown"),
        environment.cpu_model.as_deref().unwrap_or("unknown processor"),
    ));
    out.push_str(&if document.shared_core {
        format!("server and load SHARED core {}: neither shows what it can do alone\n", document.server_cpu)
    } else {
        format!("server on core {}, load on core {}\n", document.server_cpu, document.load_cpu)
    });
    let (on, off): (Vec<_>, Vec<_>) = environment.features.iter().partition(|feature| feature.on);
    let names = |list: &[&crate::load::json::Feature]| {
        list.iter().map(|feature| feature.name.as_str()).collect::<Vec<_>>().join(", ")
    };
    out.push_str(&format!(
        "{}: {}\n",
        environment.backend.as_deref().unwrap_or("backend unknown"),
        names(&on)
    ));
    if let Some(fallback) = &environment.fallback {
        out.push_str(&format!("{fallback}\n"));
    }
    if !off.is_empty() {
        out.push_str(&format!("without: {}\n", names(&off)));
    }
    out.push_str(&format!(
        "\n{:<23}{:>11}{:>10}{:>10}{:>10}{:>12}{:>13}{:>12}{:>8}\n",
        "", "messages/s", "p50", "p99", "p99.9", "server CPU", "memory/conn", "enters/msg", "errors"
    ));
    for measured in &document.scenarios {
        out.push_str(&row(&measured.name, measured));
        if let Some(control) = &measured.control {
            out.push_str(&row(&format!("  on {}", control.backend), control));
        }
    }
    out.push_str(&ratios(&document.scenarios));
    let fixed = environment.features.iter().any(|feature| feature.on && feature.name == "FIXED_BUFFERS");
    out.push_str(&format!(
        "\nserver CPU: user and kernel time per message; memory/conn: growth of the server's resident memory per\n\
         connection, its fixed buffers {}; enters/msg: system calls of the server per message received\n",
        if fixed { "not included" } else { "included" }
    ));
    if document.scenarios.iter().all(|measured| measured.load.server.is_none()) {
        out.push_str(
            "this system does not tell about another process: no CPU time and memory of the server\n",
        );
    }
    let notes = document.runs().flat_map(|measured| {
        let verdict = &measured.load.verdict;
        let place = format!("{}, {}", measured.name, measured.backend);
        verdict.reasons.iter().chain(&verdict.notes).map(move |note| format!("{place}: {note}\n"))
    });
    out.extend(notes);
    out
}

/// One run as a line of the table.
fn row(name: &str, measured: &Measured) -> String {
    let micros = |value: f64| show::nanos((value * 1e3).round() as u64);
    let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    format!(
        "{:<23}{:>11}{:>10}{:>10}{:>10}{:>12}{:>13}{:>12}{:>8}{}\n",
        name,
        show::rate(measured.messages_per_s),
        micros(measured.p50_us),
        micros(measured.p99_us),
        micros(measured.p999_us),
        or_dash(measured.server_cpu_us_per_message.map(|value| format!("{value:.2} µs"))),
        or_dash(measured.server_rss_bytes_per_connection.map(|value| format!("{value:.0} B"))),
        or_dash(measured.server_enters_per_message.map(|value| format!("{value:.3}"))),
        show::count(measured.errors),
        match () {
            () if measured.load.verdict.failed => "  FAILED",
            () if !measured.valid => "  INVALID",
            () => "",
        },
    )
}

/// What io_uring does with the work of epoll, scenario by scenario; nothing where there was no control.
fn ratios(scenarios: &[Measured]) -> String {
    let ratio = |of: fn(&Measured) -> Option<f64>| {
        let each = scenarios.iter().filter_map(|measured| {
            let control = of(measured.control.as_deref()?).filter(|&value| value > 0.0)?;
            Some(format!("{:.2}", of(measured)? / control))
        });
        each.collect::<Vec<_>>().join(", ")
    };
    let cpu = ratio(|measured| measured.server_cpu_us_per_message);
    let p99 = ratio(|measured| Some(measured.p99_us));
    if cpu.is_empty() {
        return String::new();
    }
    format!(
        "\nio_uring over epoll (one round each; benches/backends.py makes medians): server CPU {cpu}; p99 {p99}\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::json::sample;

    fn document(shared_core: bool) -> Document {
        let counters = serde_json::json!({ "counters": { "enters": 50, "messages": 1000 } });
        Document {
            schema: "corelane-bench/1",
            tool: Tool::this(),
            environment: Environment::collect(Tier::Handler, None),
            quick: true,
            server_cpu: 0,
            load_cpu: usize::from(!shared_core),
            shared_core,
            scenarios: vec![figures("echo, 64 × 64 B", sample::report(), counters)],
        }
    }

    #[test]
    fn the_table_has_every_figure() {
        let text = table(&document(false));
        assert!(text.contains("server on core 0, load on core 1"), "{text}");
        let row = text.lines().find(|line| line.starts_with("echo, 64")).expect("a row");
        let cells: Vec<_> = row.split_whitespace().collect();
        assert_eq!(&cells[5..], ["1,000", "500", "µs", "990", "µs", "999", "µs", "-", "-", "0.050", "0"]);
    }

    #[test]
    fn what_was_not_measured_and_what_it_fell_back_on_is_said() {
        let mut document = document(false);
        assert!(table(&document).contains("no CPU time and memory of the server"));
        document.environment.backend = Some("epoll".to_owned());
        document.environment.fallback = Some("epoll is used instead of io_uring: forbidden".to_owned());
        let text = table(&document);
        assert!(text.contains("\nepoll: \nepoll is used instead of io_uring: forbidden\n"), "{text}");
    }

    #[test]
    fn a_control_has_a_row_of_its_own_and_a_ratio() {
        let mut document = document(false);
        assert!(!table(&document).contains("over epoll"), "there was no control");
        let counters = serde_json::json!({ "counters": {}, "environment": { "backend": "epoll" } });
        let mut control = figures("echo, 64 × 64 B", sample::report(), counters);
        control.server_cpu_us_per_message = Some(8.0);
        document.scenarios[0].server_cpu_us_per_message = Some(6.0);
        document.scenarios[0].control = Some(Box::new(control));
        let text = table(&document);
        let row = text.lines().find(|line| line.starts_with("  on epoll")).expect("a row");
        assert!(row.contains("8.00 µs"), "{row}");
        assert!(text.contains("server CPU 0.75; p99 1.00"), "{text}");
    }

    #[test]
    fn a_shared_core_is_said_loudly() {
        assert!(table(&document(true)).contains("SHARED core 0"));
    }
}
