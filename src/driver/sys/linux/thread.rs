//! Settings of the calling thread.

use std::io;
use std::time::Duration;

use super::check;

/// Processors that this process may run on.
pub(crate) fn cpu_count() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Binds the calling thread to one processor.
///
/// # Errors
/// `EINVAL` when there is no such processor, or the process may not use it.
pub(crate) fn pin_to_cpu(cpu: usize) -> io::Result<()> {
    // SAFETY: a `cpu_set_t` is an array of integers, for which zero is a value (invariant 5).
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    if cpu >= libc::CPU_SETSIZE as usize {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: `cpu` is within the set (invariant 5).
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: `set` outlives the call; 0 is the calling thread (invariant 5).
    check(unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) })?;
    Ok(())
}

/// Sets how much later than asked the kernel may end this thread's waits.
pub(crate) fn set_timer_slack(slack: Duration) -> io::Result<()> {
    let nanos = libc::c_ulong::try_from(slack.as_nanos().max(1)).unwrap_or(libc::c_ulong::MAX);
    // SAFETY: the option takes an integer and touches no memory (invariant 5).
    check(unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, nanos) })?;
    Ok(())
}
