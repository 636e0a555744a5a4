//! How many workers, of what size: what the wishes and the limits of the system come to.

use crate::config::{ConfigError, Descriptors, WorkerConfig};
use crate::driver::{FD_RESERVE, MAX_SLOTS};

use super::{Builder, StartError};

/// Part of a ring's descriptor table that is planned for when connections are spread over several:
/// the kernel spreads them by a hash, not evenly.
const TABLE_FILL: f64 = 0.9;
/// Workers are numbered with 16 bits.
const MAX_WORKERS: usize = 4096;

/// What a runtime is to be like.
pub(super) struct Plan {
    pub(super) workers: usize,
    pub(super) config: WorkerConfig,
    /// Connections of all workers together, at most.
    pub(super) total: Option<u64>,
}

/// Plans a runtime. `nofile`: `RLIMIT_NOFILE`.
///
/// # Errors
/// [`StartError::Config`] when a number is out of range.
pub(super) fn plan(wishes: &Builder, nofile: u64, warnings: &mut Vec<String>) -> Result<Plan, StartError> {
    let out_of_range = |what, value: String, allowed: String| {
        StartError::Config(ConfigError::Range { what, value, allowed })
    };
    if !(1..=MAX_WORKERS).contains(&wishes.workers) {
        let allowed = format!("1 to {MAX_WORKERS}");
        return Err(out_of_range("workers", wishes.workers.to_string(), allowed));
    }
    let (mut workers, mut config) = (wishes.workers, wishes.worker.clone());
    let direct = config.descriptors == Descriptors::Direct;
    if let Some(total) = wishes.max_connections {
        if total == 0 || total > u64::from(MAX_SLOTS) * MAX_WORKERS as u64 {
            let allowed = "1 to the number of file descriptors of the system".to_owned();
            return Err(out_of_range("max_connections", total.to_string(), allowed));
        }
        let table = nofile.clamp(1, 1_000_000);
        if direct && total > table {
            // Spread over several tables, each has to hold more than its even share.
            let planned = (table as f64 * TABLE_FILL) as u64;
            let needed = total.div_ceil(planned.max(1)) as usize;
            workers = workers.max(needed);
            if workers > MAX_WORKERS {
                let allowed =
                    format!("at most {} with RLIMIT_NOFILE = {nofile}", planned * MAX_WORKERS as u64);
                return Err(out_of_range("max_connections", total.to_string(), allowed));
            }
        }
        // Ordinary descriptors are the process's: what exceeds the limit cannot be had, and the driver says so.
        let most = if direct { table } else { 1_000_000 };
        config.max_connections = total.min(most) as u32;
    }
    let mut total = wishes.max_connections;
    if direct {
        // A number that nobody asked for is no reason not to start.
        let default = WorkerConfig::default().max_connections;
        if total.is_none() && config.max_connections == default && nofile < default.into() {
            config.max_connections = nofile.max(1) as u32;
            warnings.push(format!(
                "each worker holds at most {nofile} connections, not {default}, because RLIMIT_NOFILE is \
                 {nofile}: raise it (`ulimit -n`, LimitNOFILE=), or ask for more with max_connections, which \
                 starts more rings",
            ));
        }
    } else if total.is_none() {
        total = share_descriptors(workers, &mut config, nofile, warnings);
    }
    config.check().map_err(StartError::Config)?;
    Ok(Plan { workers, config, total })
}

/// Ordinary descriptors belong to the process, so its workers share the limit. Whoever has the connections
/// may have them: the sum is limited, not each.
fn share_descriptors(
    workers: usize,
    config: &mut WorkerConfig,
    nofile: u64,
    warnings: &mut Vec<String>,
) -> Option<u64> {
    let usable = nofile.saturating_sub(FD_RESERVE).max(1);
    let asked = workers as u64 * u64::from(config.max_connections);
    if asked <= usable {
        return None;
    }
    // A number that nobody asked for is no reason not to start.
    if config.max_connections == WorkerConfig::default().max_connections {
        config.max_connections = config.max_connections.min(u32::try_from(usable).unwrap_or(u32::MAX));
    }
    warnings.push(format!(
        "at most {usable} connections are held, not {asked}, because they are ordinary descriptors, of which \
         RLIMIT_NOFILE allows this process {nofile}: raise it (`ulimit -n`, LimitNOFILE=)",
    ));
    Some(usable)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::Runtime;

    fn sizes(builder: &Builder, nofile: u64) -> (usize, u32, Option<u64>) {
        let plan = plan(builder, nofile, &mut Vec::new()).expect("a plan");
        (plan.workers, plan.config.max_connections, plan.total)
    }

    #[test]
    fn more_connections_than_one_table_holds_mean_more_rings() {
        let builder = Runtime::builder().max_connections(50_000);
        assert_eq!(sizes(&builder, 20_000), (3, 20_000, Some(50_000)));
        assert_eq!(sizes(&builder, 100_000), (1, 50_000, Some(50_000)));
        assert_eq!(sizes(&builder.workers(4), 20_000), (4, 20_000, Some(50_000)));
    }

    #[test]
    fn a_low_descriptor_limit_lowers_the_default_with_a_warning_and_nothing_else() {
        let mut warnings = Vec::new();
        let low = plan(&Runtime::builder(), 1024, &mut warnings).expect("a plan");
        assert_eq!(low.config.max_connections, 1024);
        assert!(warnings[0].contains("RLIMIT_NOFILE is 1024"), "{warnings:?}");
        warnings.clear();
        let asked = WorkerConfig { max_connections: 5000, ..WorkerConfig::default() };
        let asked = plan(&Runtime::builder().worker(asked), 1024, &mut warnings).expect("a plan");
        assert_eq!((asked.config.max_connections, warnings.len()), (5000, 0), "the ring refuses it by name");
    }

    #[test]
    fn workers_with_ordinary_descriptors_share_the_limit_with_one_warning() {
        let fds = |max_connections| {
            let descriptors = Descriptors::Fd;
            Runtime::builder().worker(WorkerConfig {
                descriptors,
                max_connections,
                ..WorkerConfig::default()
            })
        };
        let default = WorkerConfig::default().max_connections;
        assert_eq!(sizes(&fds(default), 20_000), (1, default, None));
        assert_eq!(sizes(&fds(default), u64::MAX), (1, default, None), "a system without such a limit");
        let mut warnings = Vec::new();
        let shared = plan(&fds(default).workers(2), 20_000, &mut warnings).expect("a plan");
        assert_eq!((shared.config.max_connections, shared.total), (default, Some(19_968)));
        assert!(warnings[0].contains("at most 19968 connections are held, not 32768"), "{warnings:?}");
        assert!(!warnings[0].contains("rings"), "epoll has none: {warnings:?}");
        assert_eq!(sizes(&fds(default), 1024), (1, 992, Some(992)));
        assert_eq!(sizes(&fds(5000), 1024), (1, 5000, Some(992)), "the driver refuses it by name");
        assert_eq!(sizes(&fds(default).max_connections(50_000), 20_000), (1, 50_000, Some(50_000)));
    }

    #[test]
    fn a_wrong_number_of_workers_is_refused() {
        let refused = plan(&Runtime::builder().workers(0), 20_000, &mut Vec::new());
        let text = refused.err().map(|error| error.to_string());
        assert_eq!(text.as_deref(), Some("workers 0 is out of range: allowed is 1 to 4096"));
    }
}
