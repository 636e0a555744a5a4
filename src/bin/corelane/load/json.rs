//! The result of a load run: the document that `--json` writes, that the table is printed from,
//! that thresholds are judged by, and that `bench` reads. `docs/json-schema.md` describes it; a
//! change that takes something away or changes a meaning needs a new number in [`SCHEMA`].

use std::collections::BTreeMap;

use corelane::RuntimeInfo;
use serde::{Deserialize, Serialize};

use super::stats::Latency;
use crate::proc;
use crate::units::Tier;

/// Name and version of the document's form.
pub const SCHEMA: &str = "corelane-load/1";

/// A whole result.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    pub schema: String,
    pub tool: Tool,
    pub environment: Environment,
    pub config: Config,
    pub ramp: Ramp,
    pub window: Window,
    pub errors: Errors,
    pub generator: Generator,
    pub server: Option<Server>,
    pub intervals: Vec<Row>,
    pub thresholds: Vec<Threshold>,
    pub verdict: Verdict,
}

/// Which program made it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Tool {
    pub name: String,
    pub version: String,
    pub command: Vec<String>,
}

impl Tool {
    /// This program, as it was called.
    pub fn this() -> Self {
        Self {
            name: "corelane".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            command: std::env::args_os().map(|arg| arg.to_string_lossy().into_owned()).collect(),
        }
    }
}

/// Where it ran.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Environment {
    pub kernel: Option<String>,
    pub cpu_model: Option<String>,
    pub cpus_allowed: Vec<usize>,
    pub open_files_limit: Option<u64>,
    pub local_ports: Option<[u16; 2]>,
    pub tier: String,
    pub backend: Option<String>,
    pub fallback: Option<String>,
    pub features: Vec<Feature>,
    pub workers: Vec<Worker>,
    pub warnings: Vec<String>,
}

/// A feature of the kernel, and whether it is used.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Feature {
    pub name: String,
    pub on: bool,
    pub why: String,
}

/// A worker of the runtime.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Worker {
    pub index: usize,
    pub cpu: Option<usize>,
    pub descriptors: String,
    pub max_connections: u32,
    pub wait: String,
}

impl Environment {
    /// This machine, what runs there, and the runtime if there is one.
    pub fn collect(tier: Tier, info: Option<&RuntimeInfo>) -> Self {
        let mut environment = Self {
            kernel: info.map(|info| info.kernel.clone()).or_else(proc::kernel),
            cpu_model: proc::cpu_model(),
            cpus_allowed: proc::allowed_cpus(),
            open_files_limit: proc::open_files_limit(),
            local_ports: proc::local_ports().map(|ports| [*ports.start(), *ports.end()]),
            tier: tier.as_str().to_owned(),
            backend: None,
            fallback: None,
            features: Vec::new(),
            workers: Vec::new(),
            warnings: Vec::new(),
        };
        if let Some(info) = info {
            let features = info.features.iter();
            environment.backend = Some(info.backend.to_string());
            environment.fallback.clone_from(&info.fallback);
            environment.features = features
                .map(|feature| Feature {
                    name: feature.name.to_owned(),
                    on: feature.on,
                    why: feature.why.clone(),
                })
                .collect();
            let workers = info.workers.iter();
            environment.workers = workers
                .map(|worker| Worker {
                    index: worker.index,
                    cpu: worker.cpu,
                    descriptors: format!("{:?}", worker.descriptors).to_lowercase(),
                    max_connections: worker.max_connections,
                    wait: worker.wait.to_string(),
                })
                .collect();
            environment.warnings.clone_from(&info.warnings);
        }
        environment
    }
}

/// What was asked for, defaults filled in.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Config {
    pub mode: String,
    pub loop_kind: String,
    pub targets: Vec<String>,
    pub sources: Vec<String>,
    pub connections: u32,
    pub workers: usize,
    pub ramp_per_s: f64,
    pub warmup_s: f64,
    pub duration_s: f64,
    pub timeout_s: f64,
    pub connect_timeout_s: f64,
    pub size_bytes: u64,
    pub pipeline: u32,
    pub rate_per_s: Option<f64>,
    pub interval_s: Option<f64>,
    pub phase: Option<String>,
    pub overlap: Option<String>,
    pub payload: Option<String>,
    pub expect: Option<String>,
    pub server_pid: Option<u32>,
}

/// Percentiles of a latency, in microseconds; all zero when `count` is.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Percentiles {
    pub count: u64,
    pub min_us: f64,
    pub mean_us: f64,
    pub p50_us: f64,
    pub p90_us: f64,
    pub p99_us: f64,
    pub p999_us: f64,
    pub max_us: f64,
}

impl From<&Latency> for Percentiles {
    fn from(latency: &Latency) -> Self {
        let Some((min, mean, max)) = latency.extremes() else {
            return Self::default();
        };
        let micros = |nanos: f64| (nanos / 1e3 * 1e3).round() / 1e3;
        let at = |share| micros(latency.quantile(share).unwrap_or_default() as f64);
        Self {
            count: latency.count(),
            min_us: micros(min as f64),
            mean_us: micros(mean),
            p50_us: at(0.5),
            p90_us: at(0.9),
            p99_us: at(0.99),
            p999_us: at(0.999),
            max_us: micros(max as f64),
        }
    }
}

/// Establishing the connections; apart from everything else.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ramp {
    pub attempted: u64,
    pub connected: u64,
    pub failed: u64,
    pub duration_s: f64,
    pub rate_per_s: f64,
    pub connect_us: Percentiles,
}

/// The measured window.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Window {
    pub duration_s: f64,
    pub planned: u64,
    pub sent: u64,
    pub replied: u64,
    pub timed_out: u64,
    pub lost: u64,
    pub missed: u64,
    pub gone: u64,
    pub late_replies: u64,
    pub messages_per_s: f64,
    pub sent_bytes_per_s: f64,
    pub received_bytes_per_s: f64,
    pub error_rate: f64,
    pub response_us: Percentiles,
    pub service_us: Option<Percentiles>,
    pub open_at_end: u64,
}

/// Errors of the whole run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Errors {
    pub server_total: u64,
    pub generator_total: u64,
    pub before_window: u64,
    pub server: BTreeMap<String, u64>,
    pub generator: BTreeMap<String, u64>,
    pub first_mismatch: Option<String>,
}

/// How the generator itself did.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Generator {
    pub rate_ratio: Option<f64>,
    pub lag_us: Option<Percentiles>,
    pub cpu_s: Option<f64>,
    pub cpu_cores: Option<f64>,
    pub busy_ratio: f64,
    pub enters_per_message: f64,
}

/// The server process, if its id was given.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Server {
    pub pid: u32,
    pub cpu_s: f64,
    pub cpu_us_per_message: Option<f64>,
    pub rss_before_bytes: u64,
    pub rss_connected_bytes: u64,
    pub rss_end_bytes: u64,
    pub rss_peak_bytes: u64,
    pub rss_bytes_per_connection: Option<f64>,
}

/// About one second.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    pub start_s: f64,
    pub end_s: f64,
    pub phase: String,
    pub open: u64,
    pub connecting: u64,
    pub failed: u64,
    pub replied: u64,
    pub messages_per_s: f64,
    pub error_rate: f64,
    pub p50_us: Option<f64>,
    pub p99_us: Option<f64>,
}

/// A `--fail-if`, judged.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Threshold {
    pub expression: String,
    pub value: Option<f64>,
    pub unit: String,
    pub failed: bool,
}

/// What to make of it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Verdict {
    pub valid: bool,
    pub passed: bool,
    pub failed: bool,
    pub interrupted: bool,
    pub exit_code: u8,
    pub reasons: Vec<String>,
    pub notes: Vec<String>,
}

#[cfg(test)]
pub mod sample {
    //! A small result for tests.

    use std::time::Duration;

    use super::*;
    use crate::load::stats::Latency;

    /// 1000 messages of 1 to 1000 µs, no errors.
    pub fn report() -> Report {
        let mut latency = Latency::new();
        for micros in 1..=1000 {
            latency.record(Duration::from_micros(micros));
        }
        let percentiles = Percentiles::from(&latency);
        Report {
            schema: SCHEMA.to_owned(),
            tool: Tool::this(),
            environment: Environment::collect(Tier::Handler, None),
            config: Config {
                mode: "heartbeat".to_owned(),
                loop_kind: "open".to_owned(),
                targets: vec!["127.0.0.1:7000".to_owned()],
                sources: Vec::new(),
                connections: 100,
                workers: 1,
                ramp_per_s: 20_000.0,
                warmup_s: 1.0,
                duration_s: 1.0,
                timeout_s: 2.0,
                connect_timeout_s: 10.0,
                size_bytes: 5,
                pipeline: 1,
                rate_per_s: None,
                interval_s: Some(0.1),
                phase: Some("spread".to_owned()),
                overlap: Some("skip".to_owned()),
                payload: Some(r"ping\n".to_owned()),
                expect: Some(r"pong\n".to_owned()),
                server_pid: None,
            },
            ramp: Ramp {
                attempted: 100,
                connected: 100,
                failed: 0,
                duration_s: 0.005,
                rate_per_s: 20_000.0,
                connect_us: percentiles.clone(),
            },
            window: Window {
                duration_s: 1.0,
                planned: 1000,
                sent: 1000,
                replied: 1000,
                timed_out: 0,
                lost: 0,
                missed: 0,
                gone: 0,
                late_replies: 0,
                messages_per_s: 1000.0,
                sent_bytes_per_s: 5000.0,
                received_bytes_per_s: 5000.0,
                error_rate: 0.0,
                response_us: percentiles.clone(),
                service_us: Some(percentiles.clone()),
                open_at_end: 100,
            },
            errors: Errors {
                server_total: 0,
                generator_total: 0,
                before_window: 0,
                server: BTreeMap::new(),
                generator: BTreeMap::new(),
                first_mismatch: None,
            },
            generator: Generator {
                rate_ratio: Some(1.0),
                lag_us: Some(percentiles),
                cpu_s: Some(0.1),
                cpu_cores: Some(0.1),
                busy_ratio: 0.1,
                enters_per_message: 1.0,
            },
            server: None,
            intervals: Vec::new(),
            thresholds: Vec::new(),
            verdict: Verdict { valid: true, passed: true, ..Verdict::default() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_reads_back_as_it_was_written() {
        let report = sample::report();
        let text = serde_json::to_string_pretty(&report).expect("writes");
        let again: Report = serde_json::from_str(&text).expect("reads");
        assert_eq!(serde_json::to_string_pretty(&again).expect("writes"), text);
        assert_eq!(again.window.response_us.count, 1000);
        assert!((again.window.response_us.p99_us / 990.0 - 1.0).abs() < 0.002);
    }
}
