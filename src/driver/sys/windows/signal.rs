//! Being told to stop, by the console's control events.

use std::io;
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use windows_sys::Win32::System::Console::{CTRL_BREAK_EVENT, CTRL_C_EVENT, SetConsoleCtrlHandler};
use windows_sys::core::BOOL;

/// Ctrl-C and its like (the console's control events), taken out of the way and waited for by one thread.
///
/// Events that come between [`block`](Self::block) and [`wait`](Self::wait) are kept; of the same one, one.
/// The number that `wait` returns is the one by which C programs on Windows know the event:
///
/// | event | number |
/// |---|---|
/// | Ctrl-C | 2 (`SIGINT`) |
/// | Ctrl-Break | 21 (`SIGBREAK`) |
/// | the console window is closed, the user logs off, the system shuts down | 15 (`SIGTERM`) |
///
/// After one of the last three Windows ends the process at the latest when a time of its own is over (5 s
/// for a closed window), whatever the process still does.
#[derive(Debug)]
pub struct Signals {
    _private: (),
}

const SIGINT: i32 = 2;
const SIGTERM: i32 = 15;
const SIGBREAK: i32 = 21;

/// Events that nobody has waited for yet: bit n for number n. One per process, as the console's handler is.
static PENDING: Mutex<u32> = Mutex::new(0);
static ARRIVED: Condvar = Condvar::new();

fn number(event: u32) -> i32 {
    match event {
        CTRL_C_EVENT => SIGINT,
        CTRL_BREAK_EVENT => SIGBREAK,
        _ => SIGTERM,
    }
}

fn arrive(number: i32) {
    // The bits are whole whatever a thread that held the lock did.
    *PENDING.lock().unwrap_or_else(PoisonError::into_inner) |= 1 << number;
    ARRIVED.notify_all();
}

/// Called by the system, on a thread that it makes for this.
unsafe extern "system" fn on_event(event: u32) -> BOOL {
    let number = number(event);
    arrive(number);
    if number == SIGTERM {
        // The process would be ended as soon as this returns; so it does not, and the program has the time
        // that Windows grants. The thread ends with the process.
        loop {
            std::thread::park();
        }
    }
    1
}

impl Signals {
    /// Takes the console's control events over for the whole process, for good. In which thread, and before
    /// or after others are started, makes no difference.
    ///
    /// # Errors
    /// When the system refuses to register the handler.
    pub fn block() -> io::Result<Self> {
        static REGISTERED: OnceLock<Option<i32>> = OnceLock::new();
        let refused = *REGISTERED.get_or_init(|| {
            // SAFETY: the handler is a function, which lives as long as the process, and touches nothing
            // but statics (invariant 5).
            let done = unsafe { SetConsoleCtrlHandler(Some(on_event), 1) };
            if done == 0 { Some(io::Error::last_os_error().raw_os_error().unwrap_or(0)) } else { None }
        });
        match refused {
            Some(error) => Err(io::Error::from_raw_os_error(error)),
            None => Ok(Self { _private: () }),
        }
    }

    /// Waits for one of the events, at most `timeout` (`None`: for ever). Returns its number (see the
    /// type), or `None` when the time is over.
    ///
    /// # Errors
    /// None on Windows.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<Option<i32>> {
        let until = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut pending = PENDING.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if *pending != 0 {
                let lowest = pending.trailing_zeros();
                *pending &= !(1 << lowest);
                return Ok(Some(lowest as i32));
            }
            pending = match until {
                None => ARRIVED.wait(pending).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Ok(None);
                    }
                    ARRIVED.wait_timeout(pending, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use windows_sys::Win32::System::Console::CTRL_CLOSE_EVENT;

    /// Calls the handler as the system does.
    fn event(event: u32) -> BOOL {
        // SAFETY: it takes any number and touches nothing but statics (invariant 5).
        unsafe { on_event(event) }
    }

    #[test]
    fn an_event_is_kept_until_it_is_waited_for_and_one_that_ends_the_process_is_held_up() {
        let signals = Signals::block().expect("registered");
        let again = Signals::block().expect("once is enough");
        assert_eq!(signals.wait(Some(Duration::ZERO)).expect("no error"), None);
        assert_eq!((event(CTRL_BREAK_EVENT), event(CTRL_C_EVENT), event(CTRL_C_EVENT)), (1, 1, 1));
        assert_eq!(signals.wait(None).expect("no error"), Some(SIGINT));
        assert_eq!(again.wait(None).expect("no error"), Some(SIGBREAK));
        assert_eq!(signals.wait(Some(Duration::from_millis(1))).expect("no error"), None);
        let waiting = std::thread::spawn(move || signals.wait(None));
        let closing = std::thread::spawn(|| event(CTRL_CLOSE_EVENT));
        assert_eq!(waiting.join().expect("the thread").expect("no error"), Some(SIGTERM));
        assert!(!closing.is_finished(), "the process would end now");
    }
}
