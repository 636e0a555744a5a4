//! The conductor: starts the workers, leads them through ramp, warm-up, window and drain, and
//! gathers what they saw. It sleeps on one channel that everything arrives on.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use corelane::{Backend, Runtime, Signals, Snapshot, Time, WaitPolicy, WorkerConfig};

use super::engine::Engine;
use super::handler::{Command, Event, Generator, Spares};
use super::json::{Environment, Row};
use super::live::Live;
use super::plan::Plan;
use super::stats::{Gauges, Interval, Latency};
use crate::proc::{self, Usage};
use crate::units::Tier;
use crate::{Failure, exit};

/// What is not part of the plan: how this process does it.
pub struct Options {
    /// Kernel interface of the generator.
    pub backend: Backend,
    /// How it is written.
    pub tier: Tier,
    /// How it waits.
    pub wait: WaitPolicy,
    /// Worker threads.
    pub workers: usize,
    /// Cores to pin them to.
    pub cpus: Vec<usize>,
    /// Process to account for.
    pub server_pid: Option<u32>,
    /// No progress lines.
    pub quiet: bool,
    /// Whether the end of standard input is taken for a signal.
    pub until_stdin_ends: bool,
}

/// A process and this one, and the workers' counters, at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reading {
    /// The generator process.
    pub own: Option<Usage>,
    /// The server process.
    pub server: Option<Usage>,
    /// The generator's workers.
    pub counters: Snapshot,
}

/// Everything that was seen.
pub struct Outcome {
    /// Sums over all workers and the whole run.
    pub totals: Interval,
    /// One per second.
    pub rows: Vec<Row>,
    /// Connections when the ramp was over.
    pub ramped: Gauges,
    /// Connections when the window was over and the last replies were in.
    pub end: Gauges,
    /// How long the ramp took.
    pub ramp: Duration,
    /// How long the window was.
    pub window: Duration,
    /// Before the first connection.
    pub before: Reading,
    /// At the beginning of the window.
    pub from: Reading,
    /// At its end.
    pub until: Reading,
    /// Where it ran.
    pub environment: Environment,
    /// Whether a signal cut it short.
    pub interrupted: bool,
    /// Whether it was over before its time because all connections had ended.
    pub ended_early: bool,
    /// What the conductor noticed.
    pub notes: Vec<String>,
}

/// Why waiting ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wake {
    Ready,
    Deadline,
    Signal,
}

/// Shortest time from the command to the window's beginning: every worker must have heard of it.
const LEAD: Duration = Duration::from_millis(10);

/// Time that workers get beyond what their task needs before they count as stuck.
const PATIENCE: Duration = Duration::from_secs(10);

/// Time to close the connections in; what is left then is reset.
const SHUTDOWN: Duration = Duration::from_secs(2);

struct Conductor {
    runtime: Engine,
    inbox: Receiver<Event>,
    spares: Spares,
    server_pid: Option<u32>,
    workers: usize,
    live: Live,

    origin: Time,
    from: Option<Time>,
    until: Option<Time>,

    /// When a signal last counted.
    signalled: Option<Time>,

    ramped: usize,
    ramp_end: Time,
    at_ramp: Gauges,
    done: usize,
    gauges: Vec<Gauges>,
    /// Intervals that not all workers have handed over yet, by their end.
    pending: BTreeMap<Time, (usize, Interval)>,
    totals: Interval,
    rows: Vec<Row>,
    row_end: Time,
    scratch: Latency,
}

/// Does it all.
///
/// # Errors
/// [`Failure`] when the workers could not be started or got stuck.
pub fn run(plan: &Arc<Plan>, options: &Options, signals: Signals) -> Result<Outcome, Failure> {
    let (events, inbox) = channel();
    if options.until_stdin_ends {
        let events = events.clone();
        thread::spawn(move || {
            // Nothing that is read matters, nor why reading ended.
            let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
            let _ = events.send(Event::Signal);
        });
    }
    watch_signals(signals, events.clone());
    let spares: Spares = Arc::default();
    let runtime = start(plan, options, events, &spares)?;
    let workers = runtime.info().workers.len();
    let environment = Environment::collect(options.tier, Some(runtime.info()));
    let mut conductor = Conductor {
        inbox,
        spares,
        server_pid: options.server_pid,
        workers,
        live: Live::new(options.quiet),
        origin: Time::ZERO,
        from: None,
        until: None,
        signalled: None,
        ramped: 0,
        ramp_end: Time::ZERO,
        at_ramp: Gauges::default(),
        done: 0,
        gauges: vec![Gauges::default(); workers],
        pending: BTreeMap::new(),
        totals: Interval::new(),
        rows: Vec::new(),
        row_end: Time::ZERO,
        scratch: Latency::new(),
        runtime,
    };
    let outcome = conductor.conduct(plan, environment);
    conductor.live.finish();
    let mut outcome = outcome?;
    match conductor.runtime.shutdown(SHUTDOWN) {
        Ok(report) if report.ops_in_kernel + report.buffers_outstanding > 0 => outcome.notes.push(format!(
            "the generator's runtime left {} operations in the kernel and {} buffers outstanding: a bug in corelane",
            report.ops_in_kernel, report.buffers_outstanding
        )),
        Ok(_) => {}
        Err(error) => outcome.notes.push(format!("the generator's runtime did not stop cleanly: {error}")),
    }
    Ok(outcome)
}

/// Turns signals into events, for as long as the process lives.
fn watch_signals(signals: Signals, events: Sender<Event>) {
    thread::spawn(move || {
        while let Ok(signal) = signals.wait(None) {
            if signal.is_some() && events.send(Event::Signal).is_err() {
                return;
            }
        }
    });
}

fn start(
    plan: &Arc<Plan>,
    options: &Options,
    events: Sender<Event>,
    spares: &Spares,
) -> Result<Engine, Failure> {
    let (request, _) = plan.content.sizes();
    let largest = u64::from(plan.traffic.depth()) * request as u64;
    let mut config = WorkerConfig {
        // A generator that stopped reading because its own sending is behind could lock up with a
        // server that does the same.
        auto_pause: false,
        close_timeout: Duration::from_secs(1),
        timer_slack: Some(Duration::from_nanos(1)),
        wait: options.wait,
        ..WorkerConfig::default()
    };
    config.send_limit = config.send_limit.max(u32::try_from(largest * 2).unwrap_or(u32::MAX));
    if request > 8192 {
        config.buffers.size = 64 << 10;
        config.buffers.count = 128;
    }
    let (plan, spares) = (plan.clone(), spares.clone());
    let mut builder = Runtime::builder()
        .backend(options.backend)
        .workers(options.workers)
        .max_connections(plan.connections.into())
        .worker(config);
    if !options.cpus.is_empty() {
        builder = builder.cpus(options.cpus.clone());
    }
    let make = move |worker| Generator::new(plan.clone(), events.clone(), spares.clone(), worker);
    Engine::start(options.tier, builder, make)
}

impl Conductor {
    fn conduct(&mut self, plan: &Plan, environment: Environment) -> Result<Outcome, Failure> {
        let before = self.read();
        let (mut from, mut until) = (Reading::default(), Reading::default());
        let mut notes = Vec::new();
        let mut ended_early = false;

        self.origin = Time::now();
        self.row_end = self.origin;
        self.tell(Command::Ramp(self.origin))?;
        let expected = plan.ramp(plan.connections) + plan.connect_timeout;
        let mut wake = self.wait(expected + PATIENCE, |this| this.ramped == this.workers)?;
        if wake == Wake::Deadline {
            return Err(Failure::run(
                "the ramp did not end: connections were neither established nor refused in time",
            ));
        }
        if wake == Wake::Ready && self.at_ramp.open > 0 {
            let start = Time::now() + plan.warmup.max(LEAD);
            let end = start + plan.duration;
            (self.from, self.until) = (Some(start), Some(end));
            self.tell(Command::Run { from: start, until: end })?;
            wake = self.wait_until(start)?;
            if wake == Wake::Deadline {
                from = self.read();
                wake = self.wait_until(end)?;
                until = self.read();
            }
            ended_early = wake == Wake::Ready;
        }
        if wake != Wake::Deadline {
            let now = Time::now();
            self.until = Some(now);
            self.from = self.from.filter(|&from| from < now);
            self.tell(Command::Stop(now))?;
        }
        let mut interrupted = wake == Wake::Signal;
        match self.wait(plan.timeout + PATIENCE, |this| this.done == this.workers)? {
            Wake::Ready => {}
            Wake::Signal => {
                let times = if interrupted { "twice" } else { "at the end" };
                notes.push(format!("interrupted {times}: replies still outstanding were not waited for"));
                interrupted = true;
            }
            Wake::Deadline => {
                notes.push("some workers did not finish in time: their last second is missing".to_owned())
            }
        }
        for (_, (_, data)) in std::mem::take(&mut self.pending) {
            self.totals.add(&data);
        }
        let window = self.from.zip(self.until).map(|(from, until)| until.since(from));
        Ok(Outcome {
            totals: std::mem::replace(&mut self.totals, Interval::new()),
            rows: std::mem::take(&mut self.rows),
            ramped: self.at_ramp,
            end: self.gauges_now(),
            ramp: self.ramp_end.since(self.origin),
            window: window.unwrap_or_default(),
            before,
            from,
            until,
            environment,
            interrupted,
            ended_early,
            notes,
        })
    }

    fn tell(&self, command: Command) -> Result<(), Failure> {
        for worker in 0..self.workers {
            if !self.runtime.tell(worker, command) {
                let text = format!("worker {worker} takes no more messages: it is stuck or gone");
                return Err(Failure::run(text));
            }
        }
        Ok(())
    }

    fn read(&self) -> Reading {
        Reading {
            own: proc::usage(None),
            server: self.server_pid.and_then(|pid| proc::usage(Some(pid))),
            counters: self.runtime.metrics().total(),
        }
    }

    fn gauges_now(&self) -> Gauges {
        let mut sum = Gauges::default();
        for gauges in &self.gauges {
            sum.add(gauges);
        }
        sum
    }

    /// Lets the run go on until `at`, or until there is nothing left to go on with.
    fn wait_until(&mut self, at: Time) -> Result<Wake, Failure> {
        self.wait(at.since(Time::now()), |this| this.gauges_now().open == 0)
    }

    /// Takes in events until `ready`, a signal, or the time is over.
    fn wait(&mut self, limit: Duration, ready: impl Fn(&Self) -> bool) -> Result<Wake, Failure> {
        let deadline = Time::now() + limit;
        loop {
            if ready(self) {
                return Ok(Wake::Ready);
            }
            let left = deadline.since(Time::now());
            if left.is_zero() {
                return Ok(Wake::Deadline);
            }
            match self.inbox.recv_timeout(left.min(Duration::from_secs(1))) {
                Ok(Event::Signal) => {
                    let now = Time::now();
                    if self.signalled.is_none_or(|first| now.since(first) > exit::ECHO) {
                        self.signalled = Some(now);
                        return Ok(Wake::Signal);
                    }
                }
                Ok(event) => self.take(event),
                Err(RecvTimeoutError::Timeout) if self.runtime.is_running() => {}
                Err(_) => return Err(Failure::run("the generator's workers ended unexpectedly")),
            }
        }
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Signal => {}
            Event::Done => self.done += 1,
            Event::Ended { worker, gauges } => {
                if let Some(latest) = self.gauges.get_mut(worker) {
                    *latest = gauges;
                }
            }
            Event::Ramped { worker, at, gauges } => {
                if let Some(latest) = self.gauges.get_mut(worker) {
                    *latest = gauges;
                }
                self.ramped += 1;
                self.ramp_end = self.ramp_end.max(at);
                self.at_ramp.add(&gauges);
            }
            Event::Interval { worker, end, mut data } => {
                if let Some(gauges) = self.gauges.get_mut(worker) {
                    *gauges = data.gauges;
                }
                let (count, sum) = self.pending.entry(end).or_insert_with(|| (0, Interval::new()));
                sum.add(&data);
                *count += 1;
                let complete = *count == self.workers;
                data.clear();
                if let Ok(mut spares) = self.spares.lock() {
                    spares.push(data);
                }
                if complete {
                    self.close_row(end);
                }
            }
        }
    }

    /// All workers have handed over what they saw up to `end`.
    fn close_row(&mut self, end: Time) {
        let later = self.pending.split_off(&(end + Duration::from_nanos(1)));
        let mut sum = Interval::new();
        for (_, (_, data)) in std::mem::replace(&mut self.pending, later) {
            sum.add(&data);
        }
        self.totals.add(&sum);
        let start = std::mem::replace(&mut self.row_end, end);
        let phase = match (self.from, self.until) {
            (_, Some(until)) if end > until => return,
            (Some(from), _) if end > from => "measure",
            (Some(_), _) => "warmup",
            (None, _) => "ramp",
        };
        let mut counts = sum.window.counts;
        counts.add(&sum.before.counts);
        self.scratch.clear();
        self.scratch.add(&sum.window.response);
        self.scratch.add(&sum.before.response);
        let micros = |share| self.scratch.quantile(share).map(|nanos| nanos as f64 / 1e3);
        let gauges = self.gauges_now();
        let length = end.since(start).as_secs_f64();
        let row = Row {
            start_s: start.since(self.origin).as_secs_f64(),
            end_s: end.since(self.origin).as_secs_f64(),
            phase: phase.to_owned(),
            open: gauges.open,
            connecting: gauges.connecting,
            failed: gauges.failed,
            replied: counts.replied,
            messages_per_s: if length > 0.0 { counts.replied as f64 / length } else { 0.0 },
            error_rate: counts.error_rate(),
            p50_us: micros(0.5),
            p99_us: micros(0.99),
        };
        self.live.show(&row);
        self.rows.push(row);
    }
}
