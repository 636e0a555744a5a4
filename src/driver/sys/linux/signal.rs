//! Being told to stop, without a signal handler.

use std::io;
use std::time::Duration;

use super::check;

/// SIGINT and SIGTERM, taken out of the way of every thread and waited for by one.
///
/// [`block`](Self::block) must be called before any other thread is started, best first thing in
/// `main`: threads inherit the mask of the thread that starts them. (So do child processes.)
#[derive(Debug)]
pub struct Signals {
    _private: (),
}

fn stop_signals() -> libc::sigset_t {
    // SAFETY: a `sigset_t` is an array of integers, for which zero is a value (invariant 5).
    let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: `set` is a signal set and the signal exists (invariant 5).
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    set
}

impl Signals {
    /// Blocks SIGINT and SIGTERM for the calling thread and the threads it starts.
    ///
    /// # Errors
    /// Never in practice: the call fails only on invalid arguments.
    pub fn block() -> io::Result<Self> {
        let set = stop_signals();
        // SAFETY: `set` outlives the call; the old mask is not asked for (invariant 5).
        let result = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
        if result != 0 {
            return Err(io::Error::from_raw_os_error(result));
        }
        Ok(Self { _private: () })
    }

    /// Waits for one of the signals, at most `timeout` (`None`: for ever). Returns its number, or
    /// `None` when the time is over.
    ///
    /// # Errors
    /// Only what the system reports besides a timeout or an interruption.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<Option<i32>> {
        let set = stop_signals();
        let until = timeout.and_then(|timeout| std::time::Instant::now().checked_add(timeout));
        loop {
            let left = until.map(|until| until.saturating_duration_since(std::time::Instant::now()));
            let spec = left.map(|left| libc::timespec {
                tv_sec: libc::time_t::try_from(left.as_secs()).unwrap_or(libc::time_t::MAX),
                tv_nsec: left.subsec_nanos().into(),
            });
            let spec = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
            // SAFETY: set and time outlive the call; the signal's details are not asked for
            // (invariant 5).
            let result = check(unsafe { libc::sigtimedwait(&raw const set, std::ptr::null_mut(), spec) });
            match result {
                Ok(signal) => return Ok(Some(signal)),
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN) => return Ok(None),
                    Some(libc::EINTR) => {}
                    _ => return Err(error),
                },
            }
        }
    }
}
