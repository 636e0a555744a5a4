//! The way down: operations become submission queue entries; one enter per turn.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::time::Duration;

use io_uring::squeue::{self, Flags};
use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, opcode, types};

use crate::clock::Time;
use crate::driver::sys::RawAddress;
use crate::driver::{Key, Wait};
use crate::metrics::Counters;

use super::user_data::{Kind, encode};

/// Vectors that one send may have.
pub(super) const MAX_VECTORS: usize = crate::driver::SEND_BATCH;

/// Memory that the kernel reads only until a submission is consumed (`IORING_FEAT_SUBMIT_STABLE`):
/// message headers, their vectors, addresses. Reserved once, used afresh after every enter.
struct Scratch {
    headers: Vec<libc::msghdr>,
    vectors: Vec<libc::iovec>,
    addresses: Vec<RawAddress>,
}

/// How often a full queue is given to the kernel in a row until that counts as a failure.
const FLUSH_ATTEMPTS: usize = 1000;

/// Pauses of the processor between two looks at the clock; one takes some tens of nanoseconds.
const LOOKS_PER_CLOCK: u32 = 4;

/// Messages with several vectors that one submission may hold before it is flushed early.
const SCRATCH_MESSAGES: usize = 256;

impl Scratch {
    fn new() -> Self {
        Self {
            headers: Vec::with_capacity(SCRATCH_MESSAGES),
            vectors: Vec::with_capacity(SCRATCH_MESSAGES * MAX_VECTORS),
            addresses: Vec::with_capacity(SCRATCH_MESSAGES),
        }
    }

    fn clear(&mut self) {
        self.headers.clear();
        self.vectors.clear();
        self.addresses.clear();
    }
}

/// For waits that are to gather and have no end of their own; an early return does no harm.
const LONG: Duration = Duration::from_secs(3600);

/// A ring's submission side.
pub(super) struct Submission {
    pub(super) ring: IoUring,
    scratch: Scratch,
    enter_flags: u32,
    /// The kernel can wait for several completions for a time, and then for one.
    min_wait: bool,
    /// Completions that had to be taken early, because the kernel submits nothing while it has no room
    /// for them; they come before those in the queue.
    spill: Vec<io_uring::cqueue::Entry>,
    /// An error of an early flush, for the next wait to report.
    failed: Option<io::Error>,
    /// Descriptors installed so far.
    installs: u32,
}

impl Submission {
    pub(super) fn new(ring: IoUring, no_iowait: bool, min_wait: bool) -> Self {
        let mut flags = EnterFlags::GETEVENTS | EnterFlags::EXT_ARG;
        if no_iowait {
            flags |= EnterFlags::NO_IOWAIT;
        }
        Self {
            ring,
            scratch: Scratch::new(),
            enter_flags: flags.bits(),
            min_wait,
            spill: Vec::new(),
            failed: None,
            installs: 0,
        }
    }

    /// Queues an entry, giving the queue to the kernel first when it is full.
    pub(super) fn push(&mut self, entry: &squeue::Entry, counters: &Counters) {
        counters.sqes.add(1);
        for _ in 0..FLUSH_ATTEMPTS {
            // SAFETY: what the entry points to is either in the scratch, which is reused only after
            // the kernel consumed the entry (invariant 6), or belongs to the operation until its
            // completion (invariants 2 and 3).
            let pushed = unsafe { self.ring.submission().push(entry) };
            if pushed.is_ok() || self.failed.is_some() {
                return;
            }
            counters.sq_full.add(1);
            self.flush(EnterFlags::empty(), counters);
        }
        // The kernel takes nothing: the next wait reports it and the worker ends.
        self.failed = Some(io::Error::from_raw_os_error(libc::EBUSY));
    }

    /// Gives what is queued to the kernel without waiting and, unless it insists, without working
    /// off completions.
    fn flush(&mut self, mut flags: EnterFlags, counters: &Counters) {
        loop {
            counters.enters.add(1);
            let queued = self.ring.submission().len() as u32;
            // SAFETY: no argument; the queue's entries are sound (see `push`).
            let entered =
                unsafe { self.ring.submitter().enter::<libc::sigset_t>(queued, 0, flags.bits(), None) };
            match entered.map_err(|error| (error.raw_os_error(), error)) {
                Ok(_) | Err((Some(libc::EINTR), _)) => break,
                // No room for completions, or no memory for a moment: make room and ask once more.
                Err((Some(libc::EBUSY | libc::EAGAIN), _)) if flags.is_empty() => {
                    self.spill.extend(self.ring.completion());
                    flags = EnterFlags::GETEVENTS;
                }
                Err((Some(libc::EBUSY | libc::EAGAIN), _)) => break,
                Err((_, error)) => {
                    self.failed = Some(error);
                    break;
                }
            }
        }
    }

    /// Gives a socket of the descriptor table an ordinary descriptor too, and has it when it returns (Linux 6.8).
    /// What else the kernel completes meanwhile stays in its order, before what it completes later.
    ///
    /// # Errors
    /// `EMFILE` and its like; `EBUSY` when the kernel takes no entries.
    pub(super) fn install(&mut self, index: u32, counters: &Counters) -> io::Result<OwnedFd> {
        self.installs = self.installs.wrapping_add(1);
        let wanted = encode(Kind::Install, Key { slot: 0, generation: self.installs });
        let entry = opcode::FixedFdInstall::new(types::Fixed(index), 0).build();
        self.push(&entry.user_data(wanted), counters);
        // The kernel completes it while it takes it, so the first look finds it, unless the completion queue
        // was full: then it comes when there is room, and when the kernel is asked to go on.
        let mut flags = EnterFlags::empty();
        for _ in 0..FLUSH_ATTEMPTS {
            self.flush(flags, counters);
            let mut found = None;
            for entry in self.ring.completion() {
                if entry.user_data() == wanted {
                    found = Some(entry.result());
                } else {
                    self.spill.push(entry);
                }
            }
            match found {
                Some(result) if result < 0 => return Err(io::Error::from_raw_os_error(-result)),
                // SAFETY: the kernel has just made this descriptor, for this completion alone (invariant 5).
                Some(result) => return Ok(unsafe { OwnedFd::from_raw_fd(result) }),
                None if self.failed.is_some() => break,
                None => flags = EnterFlags::GETEVENTS,
            }
        }
        Err(io::Error::from_raw_os_error(libc::EBUSY))
    }

    /// Closes a descriptor that came when nobody waited for it any more.
    pub(super) fn installed_late(result: i32) {
        if result >= 0 {
            // SAFETY: the kernel has made this descriptor for this completion alone (invariant 5).
            drop(unsafe { OwnedFd::from_raw_fd(result) });
        }
    }

    /// Makes room in the scratch for another message or address, by giving the queue to the kernel if
    /// need be. Only here and after a wait is the scratch used afresh: an entry that is still in hand
    /// points to it, so the flush of a full queue must leave it alone (invariant 6).
    fn make_room(&mut self, used: usize, counters: &Counters) {
        if used < SCRATCH_MESSAGES {
            return;
        }
        counters.sq_full.add(1);
        self.flush(EnterFlags::empty(), counters);
        if self.ring.submission().is_empty() {
            self.scratch.clear();
        } else {
            // The kernel took nothing: keep what is queued where it is and use a fresh scratch; the
            // old one is leaked, because entries still point to it (this is the way to a fatal error).
            std::mem::forget(std::mem::replace(&mut self.scratch, Scratch::new()));
        }
    }

    /// Whether completions were taken early.
    pub(super) fn has_spill(&self) -> bool {
        !self.spill.is_empty()
    }

    /// Submits everything and waits as it is told.
    #[inline]
    pub(super) fn wait(&mut self, wait: Wait, counters: &Counters) -> io::Result<()> {
        if wait.is_look() || wait.spin.is_zero() && wait.gather.is_zero() {
            return self.enter(wait.timeout, 1, Duration::ZERO, counters);
        }
        self.wait_long(wait, counters)
    }

    /// A wait that looks first, or is for several completions.
    fn wait_long(&mut self, wait: Wait, counters: &Counters) -> io::Result<()> {
        let began = clock();
        let spin = wait.spin();
        if !spin.is_zero() {
            if !self.ring.submission().is_empty() {
                self.enter(Some(Duration::ZERO), 0, Duration::ZERO, counters)?;
            }
            loop {
                if !self.ring.completion().is_empty() || self.has_spill() {
                    return Ok(());
                }
                let submission = self.ring.submission();
                let work = submission.taskrun() || submission.cq_overflow();
                drop(submission);
                if work {
                    // It may bring nothing, again and again: looking ends in its time all the same.
                    self.enter(Some(Duration::ZERO), 0, Duration::ZERO, counters)?;
                }
                if clock().since(began) >= spin {
                    break;
                }
                if work {
                    continue;
                }
                for _ in 0..LOOKS_PER_CLOCK {
                    std::hint::spin_loop();
                }
            }
        }
        let left = wait.less(clock().since(began));
        let gather = left.gather();
        // The kernel takes whole microseconds, and would take none for waiting until the batch is full.
        if gather < Duration::from_micros(1) {
            return self.enter(left.timeout, 1, Duration::ZERO, counters);
        }
        if self.min_wait {
            return self.enter(left.timeout, wait.batch, gather, counters);
        }
        self.enter(left.timeout, 1, Duration::ZERO, counters)?;
        let gather = wait.gather().saturating_sub(clock().since(began));
        if gather.is_zero() || self.ring.completion().len() >= wait.batch as usize {
            return Ok(());
        }
        std::thread::sleep(gather);
        self.enter(Some(Duration::ZERO), 0, Duration::ZERO, counters)
    }

    /// Submits everything and waits for `wanted` completions while `gather` lasts, then for one, at most `timeout`.
    pub(super) fn enter(
        &mut self,
        timeout: Option<Duration>,
        wanted: u32,
        gather: Duration,
        counters: &Counters,
    ) -> io::Result<()> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        let queued = self.ring.submission().len() as u32;
        let wanted = if timeout == Some(Duration::ZERO) { 0 } else { wanted };
        // A minimum wait without a timeout is a timeout for the kernel: it returns when that is over, with nothing.
        let timeout = if gather.is_zero() { timeout } else { timeout.or(Some(LONG)) };
        let spec = timeout.filter(|timeout| !timeout.is_zero()).map(Timespec::from);
        let args = match &spec {
            Some(spec) => SubmitArgs::new().timespec(spec),
            None => SubmitArgs::new(),
        };
        let args = args.min_wait_usec(gather.as_micros() as u32);
        counters.enters.add(1);
        // SAFETY: the arguments outlive the call; the queue's entries are sound (see `push`).
        let entered = unsafe { self.ring.submitter().enter(queued, wanted, self.enter_flags, Some(&args)) };
        let submission = self.ring.submission();
        if submission.cq_overflow() {
            counters.cq_overflows.add(1);
        }
        if submission.is_empty() {
            drop(submission);
            self.scratch.clear();
        }
        match entered {
            Ok(_) => Ok(()),
            Err(error) => match error.raw_os_error() {
                // Over in time; interrupted by a signal; short of memory or of room for completions
                // for a moment: what was not submitted stays queued for the next turn.
                Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY) => Ok(()),
                _ => Err(error),
            },
        }
    }

    /// Copies the next completions, `most` at most, unless some were taken early.
    #[inline]
    pub(super) fn fill(&mut self, into: &mut Vec<io_uring::cqueue::Entry>, most: usize) {
        into.clear();
        if !self.spill.is_empty() {
            std::mem::swap(into, &mut self.spill);
            return;
        }
        into.extend(self.ring.completion().take(most));
    }

    /// Queues a send of one slice.
    #[inline]
    pub(super) fn send(
        &mut self,
        socket: SocketRef,
        key: Key,
        bytes: *const u8,
        len: usize,
        counters: &Counters,
    ) {
        let len = u32::try_from(len).unwrap_or(u32::MAX).min(1 << 30);
        let flags = libc::MSG_WAITALL | libc::MSG_NOSIGNAL;
        let entry = match socket {
            SocketRef::Fixed(index) => opcode::Send::new(types::Fixed(index), bytes, len).flags(flags),
            SocketRef::Fd(fd) => opcode::Send::new(types::Fd(fd), bytes, len).flags(flags),
        };
        self.push(&entry.build().user_data(encode(Kind::Send, key)), counters);
    }

    /// Queues a send of several slices, `MAX_VECTORS` at most, that `fill` appends.
    pub(super) fn send_vectored(
        &mut self,
        socket: SocketRef,
        key: Key,
        fill: impl FnOnce(&mut dyn FnMut(&[u8])),
        counters: &Counters,
    ) {
        self.make_room(self.scratch.headers.len(), counters);
        let vectors = &mut self.scratch.vectors;
        let from = vectors.len();
        fill(&mut |bytes: &[u8]| {
            if vectors.len() - from < MAX_VECTORS {
                vectors
                    .push(libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() });
            }
        });
        // SAFETY: a `msghdr` is made of integers and pointers, for which zero is a value
        // (invariant 5).
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        header.msg_iov = vectors[from..].as_mut_ptr();
        header.msg_iovlen = vectors.len() - from;
        // Capacity is never exceeded, so neither headers nor vectors move (invariant 6).
        self.scratch.headers.push(header);
        let header: *const libc::msghdr = &raw const self.scratch.headers[self.scratch.headers.len() - 1];
        let flags = (libc::MSG_WAITALL | libc::MSG_NOSIGNAL) as u32;
        let entry = match socket {
            SocketRef::Fixed(index) => opcode::SendMsg::new(types::Fixed(index), header).flags(flags).build(),
            SocketRef::Fd(fd) => opcode::SendMsg::new(types::Fd(fd), header).flags(flags).build(),
        };
        self.push(&entry.user_data(encode(Kind::Send, key)), counters);
    }

    /// Queues a connect.
    pub(super) fn connect(
        &mut self,
        socket: SocketRef,
        user_data: u64,
        address: RawAddress,
        counters: &Counters,
    ) {
        self.make_room(self.scratch.addresses.len(), counters);
        self.scratch.addresses.push(address);
        let address = &self.scratch.addresses[self.scratch.addresses.len() - 1];
        let entry = match socket {
            SocketRef::Fixed(index) => {
                opcode::Connect::new(types::Fixed(index), address.as_ptr(), address.len()).build()
            }
            SocketRef::Fd(fd) => opcode::Connect::new(types::Fd(fd), address.as_ptr(), address.len()).build(),
        };
        self.push(&entry.user_data(user_data), counters);
    }

    /// Queues the cancelling of one operation by its exact user data. Only a failure is reported.
    pub(super) fn cancel(&mut self, target: u64, report: u64, counters: &Counters) {
        let entry = opcode::AsyncCancel::new(target).build().flags(Flags::SKIP_SUCCESS);
        self.push(&entry.user_data(report), counters);
    }

    /// Queues the closing of a socket.
    pub(super) fn close(&mut self, socket: SocketRef, user_data: u64, counters: &Counters) {
        let entry = match socket {
            SocketRef::Fixed(index) => opcode::Close::new(types::Fixed(index)).build(),
            SocketRef::Fd(fd) => opcode::Close::new(types::Fd(fd)).build(),
        };
        self.push(&entry.user_data(user_data), counters);
    }
}

/// A socket as operations name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SocketRef {
    /// An index of the ring's descriptor table.
    Fixed(u32),
    /// A file descriptor.
    Fd(i32),
}

/// Reads the clock.
pub(super) fn clock() -> Time {
    Time::now()
}
