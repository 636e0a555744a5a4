//! What is found out when a kernel interface is opened, and why it may be refused.

use std::fmt;
use std::io;

use crate::buffer::BufferError;
use crate::config::Backend;

use super::sys;

/// Ordinary descriptors that are left for everything but connections.
pub(crate) const FD_RESERVE: u64 = 32;

/// A kernel feature: whether it is in use, and what that means or why it is not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Feature {
    /// Its name in the kernel's interface.
    pub name: &'static str,
    /// Whether it is in use.
    pub on: bool,
    /// What it does here, or why it is off and what that costs.
    pub why: String,
}

/// Why a worker's kernel interface could not be had.
#[derive(Debug)]
pub enum SetupError {
    /// `io_uring_setup` does not exist, or is refused by a seccomp filter that says so (`ENOSYS`).
    NotImplemented,
    /// The sysctl `kernel.io_uring_disabled` forbids it.
    Sysctl {
        /// Its value: 1 (privileged processes only) or 2 (nobody).
        value: String,
    },
    /// A seccomp filter forbids it (`EPERM`, with the sysctl allowing it).
    Seccomp,
    /// The backend asked for belongs to another system, or is none that a runtime can be started on.
    Unavailable {
        /// Which backend.
        backend: Backend,
        /// Where it is to be had.
        needs: &'static str,
    },
    /// The kernel lacks something that is needed.
    Missing {
        /// What.
        what: &'static str,
        /// Since when Linux has it.
        since: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// A limit of the system is too low.
    Limit {
        /// Which, what is needed and what is there, and the remedy.
        what: String,
    },
    /// The buffers could not be made.
    Buffers(BufferError),
    /// Anything else that the system said.
    Os {
        /// What was attempted.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

impl fmt::Display for SetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotImplemented => f.write_str(
                "io_uring_setup is not implemented (ENOSYS): this kernel is older than 5.1 or built \
                 without io_uring, or a sandbox (gVisor, a container's seccomp filter) hides it; run on \
                 Linux 5.19 or later and allow io_uring_setup, io_uring_enter and io_uring_register in \
                 the container's seccomp profile",
            ),
            Self::Sysctl { value } => write!(
                f,
                "io_uring is forbidden by the sysctl kernel.io_uring_disabled = {value} ({}); allow it \
                 with `sysctl kernel.io_uring_disabled=0`, or with 1 and this process's group in \
                 kernel.io_uring_group",
                if value == "1" { "only for unprivileged processes" } else { "for everybody" },
            ),
            Self::Seccomp => f.write_str(
                "io_uring is refused (EPERM, or ENOSYS for a part of it) although kernel.io_uring_disabled allows it: a seccomp filter forbids \
                 io_uring_setup, io_uring_enter or io_uring_register, as the default profiles of Docker and containerd \
                 do; allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile",
            ),
            Self::Unavailable { backend, needs } => {
                write!(f, "the backend {backend} needs {needs}; leave the choice to corelane (auto)")
            }
            Self::Missing { what, since, source } => write!(
                f,
                "this kernel ({}) lacks {what}, which Linux has since {since} ({source}); run on Linux \
                 5.19 or later",
                sys::kernel_version(),
            ),
            Self::Limit { what } => f.write_str(what),
            Self::Buffers(error) => error.fmt(f),
            Self::Os { what, source } => write!(f, "{what}: {source}"),
        }
    }
}

impl std::error::Error for SetupError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Missing { source, .. } | Self::Os { source, .. } => Some(source),
            Self::Buffers(error) => Some(error),
            Self::NotImplemented
            | Self::Sysctl { .. }
            | Self::Seccomp
            | Self::Unavailable { .. }
            | Self::Limit { .. } => None,
        }
    }
}

impl From<BufferError> for SetupError {
    fn from(error: BufferError) -> Self {
        Self::Buffers(error)
    }
}

/// What was found out while opening a driver.
#[derive(Clone, Debug, Default)]
pub(crate) struct DriverInfo {
    pub(crate) features: Vec<Feature>,
    pub(crate) warnings: Vec<String>,
    /// Sockets live in a table of the driver's own, not among the process's descriptors.
    pub(crate) direct: bool,
}

impl SetupError {
    /// A system call failed. For want of descriptors, which has a remedy, it is a limit.
    #[cfg(target_os = "linux")]
    pub(crate) fn os(what: &'static str, source: io::Error) -> Self {
        if matches!(source.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) {
            return Self::Limit {
                what: format!(
                    "no file descriptor left for {what} ({source}): raise RLIMIT_NOFILE (`ulimit -n`, LimitNOFILE=; \
                     now {}), or close what is not needed",
                    sys::nofile_limit(),
                ),
            };
        }
        Self::Os { what, source }
    }

    /// Whether this is the kernel's refusal of a whole interface, so that another one may do. A limit
    /// that is too low is not: the remedy is to raise it.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::NotImplemented | Self::Sysctl { .. } | Self::Seccomp | Self::Missing { .. })
    }
}
