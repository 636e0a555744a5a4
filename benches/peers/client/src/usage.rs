//! What a process has used, summed over its threads: processor time in nanoseconds from `schedstat`, context switches.

use std::fs;
use std::path::Path;

#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    pub cpu_ns: u64,
    pub switches: u64,
}

/// `None` when there is no such process.
pub fn usage(pid: u32) -> Option<Usage> {
    let mut sum = Usage::default();
    for task in fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten() {
        // A thread may end between the listing and this.
        let Some(one) = thread(&task.path()) else { continue };
        sum.cpu_ns += one.cpu_ns;
        sum.switches += one.switches;
    }
    Some(sum)
}

fn thread(task: &Path) -> Option<Usage> {
    let schedstat = fs::read_to_string(task.join("schedstat")).ok()?;
    let status = fs::read_to_string(task.join("status")).ok()?;
    let switches = status
        .lines()
        .filter(|line| line.contains("ctxt_switches:"))
        .filter_map(|line| line.rsplit_once(':')?.1.trim().parse::<u64>().ok())
        .sum();
    Some(Usage { cpu_ns: schedstat.split_whitespace().next()?.parse().ok()?, switches })
}

/// Memory in bytes: resident now, and at most so far.
pub fn memory(pid: u32) -> Option<(u64, u64)> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = |name: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
    };
    Some((field("VmRSS:")?, field("VmHWM:")?))
}
