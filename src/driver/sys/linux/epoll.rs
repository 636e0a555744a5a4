//! epoll: being told which descriptors became ready.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use super::check;

/// An epoll instance.
pub(crate) struct Epoll {
    fd: OwnedFd,
    /// Whether `epoll_pwait2` may be used.
    nanoseconds: bool,
}

/// Where the kernel writes what became ready.
pub(crate) struct Harvest {
    events: Box<[libc::epoll_event]>,
    len: usize,
}

impl Harvest {
    /// Room for `capacity` descriptors in one wait; those beyond it come with the next.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { events: vec![libc::epoll_event { events: 0, u64: 0 }; capacity].into_boxed_slice(), len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Readiness (`EPOLL*` bits) and token of an entry of the last wait.
    pub(crate) fn get(&self, index: usize) -> (u32, u64) {
        // Copied out field by field: on some processors the struct is packed.
        let event = self.events[index];
        (event.events, event.u64)
    }
}

impl Epoll {
    /// Makes one. Waits are precise to the nanosecond if the kernel has `epoll_pwait2` (Linux 5.11).
    ///
    /// # Errors
    /// What the kernel says: `EMFILE` and its like.
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: takes no pointer (invariant 5).
        let fd = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
        // SAFETY: the descriptor is new and nobody else's (invariant 5).
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut this = Self { fd, nanoseconds: true };
        // ENOSYS on an older kernel, anything under a filter that does not know it: either way it is
        // not to be had.
        this.nanoseconds = this.wait_nanoseconds(&mut Harvest::new(1), Duration::ZERO).is_ok();
        Ok(this)
    }

    /// Whether waits are precise to the nanosecond, not rounded up to milliseconds.
    pub(crate) fn nanoseconds(&self) -> bool {
        self.nanoseconds
    }

    fn control(&self, op: libc::c_int, fd: BorrowedFd<'_>, interest: u32, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: interest, u64: token };
        // SAFETY: `event` outlives the call, which reads it (invariant 5).
        check(unsafe { libc::epoll_ctl(self.fd.as_raw_fd(), op, fd.as_raw_fd(), &raw mut event) })?;
        Ok(())
    }

    /// Begins to watch a descriptor; what is ready already is reported too.
    ///
    /// # Errors
    /// `ENOSPC` at the limit of `fs.epoll.max_user_watches`, `ENOMEM`.
    pub(crate) fn add(&self, fd: BorrowedFd<'_>, interest: u32, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_ADD, fd, interest, token)
    }

    /// Watches a descriptor for something else; what is ready already is reported.
    ///
    /// # Errors
    /// `ENOENT` when it is not watched.
    pub(crate) fn modify(&self, fd: BorrowedFd<'_>, interest: u32, token: u64) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_MOD, fd, interest, token)
    }

    /// Ends watching a descriptor.
    ///
    /// # Errors
    /// `ENOENT` when it is not watched.
    pub(crate) fn remove(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        self.control(libc::EPOLL_CTL_DEL, fd, 0, 0)
    }

    /// Waits until something is ready or `timeout` has passed (`None`: for ever), not less.
    ///
    /// # Errors
    /// `EINTR`, and nothing else while the instance is open.
    pub(crate) fn wait(&self, harvest: &mut Harvest, timeout: Option<Duration>) -> io::Result<()> {
        match timeout {
            Some(timeout) if self.nanoseconds && !timeout.is_zero() => {
                self.wait_nanoseconds(harvest, timeout)
            }
            _ => self.wait_milliseconds(harvest, timeout.map_or(-1, milliseconds)),
        }
    }

    fn wait_milliseconds(&self, harvest: &mut Harvest, timeout: libc::c_int) -> io::Result<()> {
        harvest.len = 0;
        let room = harvest.events.len() as libc::c_int;
        let events = harvest.events.as_mut_ptr();
        // SAFETY: `events` has `room` entries and outlives the call (invariant 5).
        let ready = check(unsafe { libc::epoll_wait(self.fd.as_raw_fd(), events, room, timeout) })?;
        harvest.len = ready as usize;
        Ok(())
    }

    fn wait_nanoseconds(&self, harvest: &mut Harvest, timeout: Duration) -> io::Result<()> {
        /// `struct __kernel_timespec`, the same on all processors.
        #[repr(C)]
        struct Timespec {
            seconds: i64,
            nanoseconds: i64,
        }
        harvest.len = 0;
        let spec = Timespec {
            seconds: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            nanoseconds: timeout.subsec_nanos().into(),
        };
        let room = harvest.events.len() as libc::c_int;
        let events = harvest.events.as_mut_ptr();
        let no_mask = std::ptr::null::<libc::sigset_t>();
        // Not through the C library, whose function is younger than the system call.
        // SAFETY: `events` has `room` entries, and it and `spec` outlive the call; there is no signal
        // mask, so its size is not looked at (invariant 5).
        let ready = unsafe {
            libc::syscall(
                libc::SYS_epoll_pwait2,
                self.fd.as_raw_fd(),
                events,
                room,
                &raw const spec,
                no_mask,
                0usize,
            )
        };
        harvest.len = check(ready as libc::c_int)? as usize;
        Ok(())
    }
}

/// Whole milliseconds, rounded up: a wait never ends too early.
fn milliseconds(timeout: Duration) -> libc::c_int {
    libc::c_int::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(libc::c_int::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::time::Instant;

    #[test]
    fn milliseconds_are_rounded_up_and_clamped() {
        let of = |nanos| milliseconds(Duration::from_nanos(nanos));
        assert_eq!([of(0), of(1), of(999_999), of(1_000_000), of(1_000_001)], [0, 1, 1, 1, 2]);
        assert_eq!(milliseconds(Duration::MAX), libc::c_int::MAX);
    }

    #[test]
    fn neither_wait_ends_too_early_and_both_tell_what_is_ready() {
        for nanoseconds in [true, false] {
            let mut epoll = Epoll::new().expect("an instance");
            epoll.nanoseconds &= nanoseconds;
            let mut harvest = Harvest::new(4);
            for timeout in [Duration::ZERO, Duration::from_micros(1200)] {
                let before = Instant::now();
                epoll.wait(&mut harvest, Some(timeout)).expect("a wait");
                assert!(before.elapsed() >= timeout);
                assert_eq!(harvest.len(), 0);
            }
            let counter = super::super::eventfd().expect("a counter");
            epoll.add(counter.as_fd(), libc::EPOLLIN as u32, u64::MAX - 3).expect("watched");
            super::super::eventfd_write(&counter);
            for timeout in [None, Some(Duration::ZERO), Some(Duration::MAX)] {
                epoll.wait(&mut harvest, timeout).expect("a wait");
                assert_eq!((harvest.len(), harvest.get(0)), (1, (libc::EPOLLIN as u32, u64::MAX - 3)));
            }
            epoll.remove(counter.as_fd()).expect("was watched");
            epoll.wait(&mut harvest, Some(Duration::ZERO)).expect("a wait");
            assert_eq!(harvest.len(), 0);
        }
    }
}
