//! What the system says about this machine and about a process. Linux keeps it in `/proc`; where
//! there is no such file, the answer is `None` and the report says nothing about it.

use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use crate::units;

/// Resources that a process has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Processor time of all its threads, kernel and user, in steps of 10 ms.
    pub cpu: Duration,
    /// Memory that it holds now.
    pub rss_bytes: u64,
    /// The most memory that it held.
    pub peak_rss_bytes: u64,
}

/// Length of a clock tick in `/proc/PID/stat`: `USER_HZ` is 100 on every Linux architecture in use.
const TICK: Duration = Duration::from_millis(10);

/// Usage of a process (`None`: this one), as far as the system tells.
pub fn usage(pid: Option<u32>) -> Option<Usage> {
    let pid = pid.map_or_else(|| "self".to_owned(), |pid| pid.to_string());
    let base = Path::new("/proc").join(pid);
    let stat = fs::read_to_string(base.join("stat")).ok()?;
    let status = fs::read_to_string(base.join("status")).ok()?;
    Some(Usage {
        cpu: cpu_time(&stat)?,
        rss_bytes: kilobytes(&status, "VmRSS")?,
        peak_rss_bytes: kilobytes(&status, "VmHWM")?,
    })
}

/// `utime` + `stime`, fields 14 and 15. The name in field 2 may itself hold blanks and brackets.
fn cpu_time(stat: &str) -> Option<Duration> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_whitespace().skip(11);
    let user: u32 = fields.next()?.parse().ok()?;
    let system: u32 = fields.next()?.parse().ok()?;
    Some(TICK * user + TICK * system)
}

/// The value of a line like `VmRSS:      1234 kB`, in bytes.
fn kilobytes(status: &str, name: &str) -> Option<u64> {
    let value = field(status, name)?;
    let number: u64 = value.split_whitespace().next()?.parse().ok()?;
    Some(number * 1024)
}

/// What follows `name:` in a file of such lines.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':')).map(str::trim)
}

/// Release of the running kernel.
pub fn kernel() -> Option<String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    Some(release.trim().to_owned())
}

/// Name of the processor.
pub fn cpu_model() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    field(&text, "model name").or_else(|| field(&text, "Model")).map(str::to_owned)
}

/// Cores that this process may run on.
pub fn allowed_cpus() -> Vec<usize> {
    fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|status| units::cpus(field(&status, "Cpus_allowed_list")?).ok())
        .map(|list| list.0)
        .unwrap_or_else(|| (0..std::thread::available_parallelism().map_or(1, usize::from)).collect())
}

/// Soft limit of open files.
pub fn open_files_limit() -> Option<u64> {
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Ports that the kernel gives to outgoing connections.
pub fn local_ports() -> Option<RangeInclusive<u16>> {
    let text = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
    let mut ends = text.split_whitespace().map(str::parse::<u16>);
    Some(ends.next()?.ok()?..=ends.next()?.ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_survives_a_hostile_process_name() {
        let stat = "12 (a ) S 9 (b)) S 1 12 12 0 -1 4194560 100 0 0 0 150 25 0 0 20 0 1 0 100 1 1";
        assert_eq!(cpu_time(stat), Some(Duration::from_millis(1750)));
        assert_eq!(cpu_time("garbage"), None);
    }

    #[test]
    fn memory_is_in_bytes() {
        let status = "Name:\tx\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\nCpus_allowed_list:\t0-1\n";
        assert_eq!(kilobytes(status, "VmRSS"), Some(1 << 20));
        assert_eq!(kilobytes(status, "VmSwap"), None);
        assert_eq!(field(status, "Cpus_allowed_list"), Some("0-1"));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_and_this_machine_are_readable() {
        let usage = usage(None).expect("usage of this process");
        assert!(usage.rss_bytes > 0 && usage.peak_rss_bytes >= usage.rss_bytes);
        assert!(kernel().is_some() && !allowed_cpus().is_empty());
        assert!(
            open_files_limit().is_some() && local_ports().is_some_and(|ports| ports.start() < ports.end())
        );
        assert_eq!(super::usage(Some(u32::MAX)), None);
    }
}
