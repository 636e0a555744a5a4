//! How many buffers of what size, and why they could not be made.

use std::fmt;
use std::io;

/// Size and number of a worker's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferConfig {
    /// Bytes of one buffer: 64 to 1 MiB. The largest piece in which received data is handed out.
    pub size: u32,
    /// Number of receive buffers per worker: 1 to 32,768 (the kernel's limit for a provided-buffer ring).
    pub count: u32,
    /// Number of further buffers, of the same size, that handlers may take to compose replies in
    /// ([`Cx::alloc`](crate::Cx::alloc)). 0 to 32,768.
    pub send_count: u32,
    /// A mode for tests: every buffer lies on pages of its own, ends where they end, is followed by a
    /// page that is never accessible, and can be accessed only while it is in somebody's hand. Whoever
    /// touches a buffer that was given back, or goes beyond one, is caught on the spot: this process
    /// dies of `SIGSEGV`; an operation of the kernel ends with `EFAULT`, which ends the process with a
    /// message. A lease is read-only until [`Buf::get_mut`](crate::Buf::get_mut) is called on it.
    ///
    /// Costs two or three `mprotect` calls per message, a page per buffer, and two of the process's
    /// mappings per buffer (sysctl `vm.max_map_count`: the default, 65,530, is enough for 32,000 buffers; a
    /// process that exceeds it later, with further workers, panics). Nothing is registered as a fixed
    /// buffer, because the kernel writes to pinned pages whatever their protection. Off by default; the
    /// environment variable [`GUARD_VARIABLE`](Self::GUARD_VARIABLE) turns it on as well. Unix only.
    pub guard: bool,
}

impl Default for BufferConfig {
    /// 512 receive buffers and 32 send buffers of 8 KiB: 4.25 MiB per worker.
    fn default() -> Self {
        Self { size: 8192, count: 512, send_count: 32, guard: false }
    }
}

impl BufferConfig {
    /// The environment variable that turns [`guard`](Self::guard) on for every worker when it is `1`,
    /// so that a whole test suite can run in that mode. Empty and `0` are as if it were not set.
    pub const GUARD_VARIABLE: &str = "CORELANE_GUARD_BUFFERS";

    /// Bytes of buffers that this configuration asks for (without what [`guard`](Self::guard) adds).
    pub fn arena_bytes(&self) -> usize {
        self.size as usize * (self.count as usize + self.send_count as usize)
    }

    /// Whether guard mode is asked for, here or by the environment.
    pub(super) fn is_guarded(&self) -> Result<bool, BufferError> {
        let value = std::env::var_os(Self::GUARD_VARIABLE).unwrap_or_default();
        super::guard::is_on(self.guard, &value.to_string_lossy())
    }

    /// Checks the ranges, and the variable [`GUARD_VARIABLE`](Self::GUARD_VARIABLE).
    ///
    /// # Errors
    /// [`BufferError`] naming the field, its value and what is allowed.
    pub fn check(&self) -> Result<(), BufferError> {
        let refuse = |what, value, allowed| Err(BufferError::Range { what, value, allowed });
        if !(64..=1 << 20).contains(&self.size) {
            return refuse("size", self.size, "64 to 1048576 bytes");
        }
        if !(1..=32768).contains(&self.count) {
            return refuse("count", self.count, "1 to 32768 buffers");
        }
        if self.send_count > 32768 {
            return refuse("send_count", self.send_count, "0 to 32768 buffers");
        }
        self.is_guarded()?;
        Ok(())
    }
}

/// Why a worker's buffers could not be made.
#[derive(Debug)]
pub enum BufferError {
    /// A field of [`BufferConfig`] is out of range.
    Range {
        /// The field.
        what: &'static str,
        /// Its value.
        value: u32,
        /// What is allowed.
        allowed: &'static str,
    },
    /// The system has no room for the arena.
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// What the system said.
        source: io::Error,
    },
    /// The environment variable [`BufferConfig::GUARD_VARIABLE`] says neither yes nor no.
    Variable {
        /// What it says.
        value: String,
    },
    /// [`BufferConfig::guard`] cannot be had.
    Guard {
        /// Why, and the remedy.
        why: String,
    },
}

impl fmt::Display for BufferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range { what, value, allowed } => {
                write!(f, "buffer {what} {value} is out of range: allowed are {allowed}")
            }
            Self::Memory { bytes, source } => write!(
                f,
                "no memory for {bytes} bytes of buffers ({source}): choose fewer or smaller buffers"
            ),
            Self::Variable { value } => write!(
                f,
                "{} is {value:?}: 1 puts every buffer on pages of its own, 0 does not",
                BufferConfig::GUARD_VARIABLE,
            ),
            Self::Guard { why } => write!(f, "guard pages for buffers are not to be had: {why}"),
        }
    }
}

impl std::error::Error for BufferError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Range { .. } | Self::Variable { .. } | Self::Guard { .. } => None,
            Self::Memory { source, .. } => Some(source),
        }
    }
}
