//! What the system allows this process.

use std::fs;

fn limit(resource: libc::__rlimit_resource_t) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` outlives the call, which writes one `rlimit` (invariant 5).
    let result = unsafe { libc::getrlimit(resource, &raw mut limit) };
    if result == 0 { limit.rlim_cur } else { u64::MAX }
}

/// `RLIMIT_NOFILE`: file descriptors of this process, and entries of one ring's descriptor table.
pub(crate) fn nofile_limit() -> u64 {
    limit(libc::RLIMIT_NOFILE)
}

/// Raises this process's limit of open files (`RLIMIT_NOFILE`, the soft limit) to what it is allowed
/// at most (the hard limit), and returns that. A process decides this for itself as a whole, so the
/// library never does it unasked; a program that holds many connections should, first thing.
///
/// # Errors
/// What the system says; the limit is as it was then.
pub fn raise_nofile_limit() -> std::io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` outlives the call, which writes one `rlimit` (invariant 5).
    super::check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) })?;
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: `limit` outlives the call, which reads one `rlimit` (invariant 5).
    super::check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })?;
    Ok(limit.rlim_cur)
}

/// `RLIMIT_MEMLOCK` in bytes.
pub(crate) fn memlock_limit() -> u64 {
    limit(libc::RLIMIT_MEMLOCK)
}

/// `RLIMIT_MEMLOCK` in bytes if it applies to this process; `None` with `CAP_IPC_LOCK`, which exempts.
pub(crate) fn memlock_limit_enforced() -> Option<u64> {
    const CAP_IPC_LOCK: u64 = 14;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    let limit = memlock_limit();
    (effective >> CAP_IPC_LOCK & 1 == 0 && limit < u64::MAX).then_some(limit)
}

/// The value of a sysctl, by its path below `/proc/sys`; `None` where it does not exist.
pub(crate) fn sysctl(path: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/sys/{path}")).ok()?;
    Some(text.trim().to_owned())
}

/// The running kernel's release, such as `6.18.44`.
pub(crate) fn kernel_version() -> String {
    sysctl("kernel/osrelease").unwrap_or_else(|| "unknown".to_owned())
}
