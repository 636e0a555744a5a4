//! Making a ring: what is tried, what it means when it is refused, what is left off and why.
//!
//! Every feature is probed by trying it, never by the kernel's version, and what came of it is
//! kept for [`RuntimeInfo`](crate::RuntimeInfo).

use std::io;

use io_uring::{IoUring, Probe, opcode};

use crate::buffer::Memory;
use crate::config::{Descriptors, WorkerConfig};
use crate::driver::{Feature, SetupError, sys};

use super::super::FD_RESERVE;
use super::buf_ring::BufRing;
use super::receive::RecvMode;

/// What a refused `io_uring_setup` means.
fn refused(error: io::Error, sysctl: Option<String>) -> SetupError {
    match error.raw_os_error() {
        Some(libc::ENOSYS) => SetupError::NotImplemented,
        Some(libc::EPERM) => match sysctl.filter(|value| value != "0") {
            Some(value) => SetupError::Sysctl { value },
            None => SetupError::Seccomp,
        },
        Some(libc::ENOMEM) => SetupError::Limit {
            what: format!(
                "no memory for a ring ({error}): raise RLIMIT_MEMLOCK (`ulimit -l`, LimitMEMLOCK=; now {} bytes for \
                 all processes of this user) or the container's memory limit, or use fewer workers, or lower \
                 cq_entries and sq_entries",
                sys::memlock_limit(),
            ),
        },
        Some(libc::EMFILE | libc::ENFILE) => SetupError::Limit {
            what: format!(
                "no file descriptor for a ring ({error}): raise RLIMIT_NOFILE (now {})",
                sys::nofile_limit(),
            ),
        },
        _ => SetupError::Os { what: "io_uring_setup", source: error },
    }
}

/// A ring and what goes with it, before it becomes a driver.
pub(super) struct Parts {
    pub(super) ring: IoUring,
    pub(super) buf_ring: Option<BufRing>,
    pub(super) recv_mode: RecvMode,
    pub(super) memory: Memory,
    /// Entries of the descriptor table; 0 when sockets are ordinary descriptors.
    pub(super) table: u32,
    pub(super) no_iowait: bool,
    /// The kernel can wait for several completions for a time, and then for one.
    pub(super) min_wait: bool,
    /// A socket of the descriptor table can be given an ordinary descriptor.
    pub(super) install: bool,
    pub(super) features: Vec<Feature>,
    pub(super) warnings: Vec<String>,
}

impl std::fmt::Debug for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts").field("features", &self.features).finish_non_exhaustive()
    }
}

/// Smallest completion queue that is tried when memory is short; cancelling is slow with it.
const SMALLEST_CQ: u32 = 1024;

/// The best ring that this kernel makes; must be called on the thread that will use it. Since 6.13 a
/// ring's own memory counts towards `RLIMIT_MEMLOCK`, which all processes of a user share: a smaller
/// completion queue, which only makes overflows likelier (nothing is lost in one) and cancelling
/// slower, is better than none.
fn ring(
    config: &WorkerConfig,
    memlock: Option<u64>,
    features: &mut Vec<Feature>,
    warnings: &mut Vec<String>,
) -> Result<IoUring, SetupError> {
    let mut config = config.clone();
    let asked = config.cq_entries;
    // Other workers need their share too, so do not wait until there is nothing left.
    while memlock.is_some_and(|share| ring_bytes(&config) > share * 3 / 4)
        && config.cq_entries / 2 >= SMALLEST_CQ
    {
        config.cq_entries /= 2;
        config.sq_entries = config.sq_entries.min(256);
    }
    loop {
        let found = features.len();
        match best_ring(&config, features) {
            Err(SetupError::Limit { .. }) if config.cq_entries / 2 >= SMALLEST_CQ => {
                features.truncate(found);
                config.cq_entries /= 2;
                config.sq_entries = config.sq_entries.min(256);
            }
            Ok(ring) => {
                if config.cq_entries < asked {
                    warnings.push(format!(
                        "no memory for a completion queue of {asked} entries, {} are used: RLIMIT_MEMLOCK is \
                         {} bytes for all processes of this user; raise it (`ulimit -l`, LimitMEMLOCK=). What \
                         is lost: cancelling is slower, and bursts overflow the queue sooner (without loss)",
                        config.cq_entries,
                        sys::memlock_limit(),
                    ));
                }
                return Ok(ring);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Memory of a ring, about: 16 bytes a completion, 64 a submission, the buffer ring's 16 a buffer.
fn ring_bytes(config: &WorkerConfig) -> u64 {
    let buffers = config.buffers.count.next_power_of_two();
    u64::from(config.cq_entries) * 16
        + u64::from(config.sq_entries) * 64
        + u64::from(buffers) * 16
        + (16 << 10)
}

fn best_ring(config: &WorkerConfig, features: &mut Vec<Feature>) -> Result<IoUring, SetupError> {
    // From the best down: each rung says what it gives up. SUBMIT_ALL (5.18) is never given up.
    let rungs: [(bool, bool); 3] = [(true, true), (false, true), (false, false)];
    let mut last = None;
    for (no_sqarray, defer) in rungs.into_iter().filter(|&(_, defer)| config.uring.defer_taskrun || !defer) {
        let mut builder = IoUring::builder();
        builder.dontfork().setup_cqsize(config.cq_entries).setup_clamp().setup_submit_all();
        if defer {
            builder.setup_single_issuer().setup_defer_taskrun();
        } else {
            builder.setup_coop_taskrun();
        }
        if no_sqarray {
            builder.setup_no_sqarray();
        }
        if config.wait.may_spin() {
            // Without the flag, looking whether there is something to do would be a system call.
            builder.setup_taskrun_flag();
        }
        match builder.build(config.sq_entries) {
            Ok(ring) => {
                features.push(feature(
                    "DEFER_TASKRUN",
                    defer,
                    "completions are worked off only when the loop asks (6.1)",
                    if config.uring.defer_taskrun {
                        "refused by this kernel (needs 6.1): completions interrupt the loop"
                    } else {
                        "switched off: completions interrupt the loop"
                    },
                ));
                features.push(feature(
                    "NO_SQARRAY",
                    no_sqarray,
                    "one cache line less per submission (6.6)",
                    "refused by this kernel (needs 6.6), or not tried without DEFER_TASKRUN",
                ));
                return Ok(ring);
            }
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => last = Some(error),
            Err(error) => return Err(refused(error, sys::sysctl("kernel/io_uring_disabled"))),
        }
    }
    let source = last.unwrap_or_else(|| io::Error::from(io::ErrorKind::Unsupported));
    Err(SetupError::Missing { what: "IORING_SETUP_SUBMIT_ALL and COOP_TASKRUN", since: "5.19", source })
}

/// Whether this kernel lets this process use io_uring at all, found out with the smallest ring.
///
/// On a thread of its own: what the kernel has to do for a ring after it was closed, it does on the thread
/// that made it, and a system call of the caller's that has a time limit would end with EINTR for that.
///
/// # Errors
/// [`SetupError`], naming the cause and the remedy.
pub(crate) fn probe() -> Result<(), SetupError> {
    let attempt = || {
        let config = WorkerConfig { sq_entries: 8, cq_entries: 16, ..WorkerConfig::default() };
        let mut ring = best_ring(&config, &mut Vec::new())?;
        required(&mut ring).map(drop)
    };
    let os = |source| SetupError::Os { what: "starting a thread that tries io_uring", source };
    let thread = std::thread::Builder::new().name("corelane-probe".to_owned()).spawn(attempt).map_err(os)?;
    thread.join().unwrap_or_else(|_| Err(os(io::Error::other("it panicked"))))
}

/// Enters the kernel once, with an operation that does nothing: a filter may forbid that alone.
fn enter(ring: &mut IoUring) -> Result<(), SetupError> {
    let entry = opcode::Nop::new().build();
    // SAFETY: the operation points to nothing (invariant 6).
    let pushed = unsafe { ring.submission().push(&entry) };
    let entered = match pushed {
        Ok(()) => loop {
            match ring.submit_and_wait(1) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                entered => break entered.map(drop),
            }
        },
        Err(_) => Err(io::Error::other("an empty queue has no room")),
    };
    ring.completion().for_each(drop);
    entered.map_err(|source| match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => SetupError::Seccomp,
        _ => SetupError::Os { what: "io_uring_enter", source },
    })
}

/// What only a probe shows.
struct Probed {
    multishot_recv: bool,
    install: bool,
}

/// Checks what nothing works without; tells what else there is.
fn required(ring: &mut IoUring) -> Result<Probed, SetupError> {
    enter(ring)?;
    let params = ring.params();
    if !params.is_feature_submit_stable() || !params.is_feature_nodrop() || !params.is_feature_ext_arg() {
        return Err(SetupError::Missing {
            what: "IORING_FEAT_SUBMIT_STABLE, NODROP and EXT_ARG",
            since: "5.11",
            source: io::Error::from(io::ErrorKind::Unsupported),
        });
    }
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe).map_err(|source| match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES | libc::ENOSYS) => SetupError::Seccomp,
        _ => SetupError::Missing { what: "IORING_REGISTER_PROBE", since: "5.6", source },
    })?;
    // SEND_ZC came with 6.0, as multishot receive did, which no probe shows.
    Ok(Probed {
        multishot_recv: probe.is_supported(opcode::SendZc::CODE),
        install: probe.is_supported(opcode::FixedFdInstall::CODE),
    })
}

pub(super) fn feature(name: &'static str, on: bool, what: &str, why_not: &str) -> Feature {
    Feature { name, on, why: if on { what } else { why_not }.to_owned() }
}

/// Makes everything that a driver needs. `memlock`: this worker's share of `RLIMIT_MEMLOCK`, if that
/// applies to this process.
pub(super) fn parts(config: &WorkerConfig, memlock: Option<u64>) -> Result<Parts, SetupError> {
    let mut features = Vec::new();
    let mut warnings = Vec::new();
    let mut ring = ring(config, memlock, &mut features, &mut warnings)?;

    let Probed { multishot_recv, install } = required(&mut ring)?;
    let no_iowait = ring.params().is_feature_no_iowait();
    features.push(feature(
        "ENTER_NO_IOWAIT",
        no_iowait,
        "waiting does not show as iowait (6.15)",
        "not offered (needs 6.15): an idle worker shows as iowait in statistics",
    ));

    let min_wait = ring.params().is_feature_min_timeout() && config.uring.min_wait;
    if config.wait.may_gather() {
        features.push(feature(
            "MIN_WAIT",
            min_wait,
            "the kernel waits for several completions for a time, and then for one (6.12)",
            if config.uring.min_wait {
                "not offered (needs 6.12): once it was woken the worker sleeps for the rest of the delay"
            } else {
                "switched off: once it was woken the worker sleeps for the rest of the delay"
            },
        ));
    }

    let registered = ring.submitter().register_ring_fd();
    features.push(feature(
        "REGISTERED_RING",
        registered.is_ok(),
        "entering the kernel looks up no descriptor (5.18)",
        "refused by this kernel (needs 5.18)",
    ));

    let memory = Memory::new(&config.buffers)?;
    let spare = memlock.map(|share| share.saturating_sub(ring_bytes(config)));
    register_buffers(&ring, &memory, spare, &mut features, &mut warnings);
    let buf_ring = buf_ring(&ring, config, &memory, &mut features, &mut warnings);
    let recv_mode = match (&buf_ring, multishot_recv && config.uring.multishot_recv) {
        (None, _) => RecvMode::Polled,
        (Some(_), false) => RecvMode::Selected,
        (Some(_), true) => RecvMode::Multishot,
    };
    features.push(feature(
        "MULTISHOT_RECV",
        recv_mode == RecvMode::Multishot,
        "one receive operation per connection (6.0)",
        if !config.uring.multishot_recv {
            "switched off: one receive operation for each piece of data"
        } else if !multishot_recv {
            "not offered by this kernel (needs 6.0): one receive operation for each piece of data"
        } else {
            "needs provided buffers: each piece of data is polled for, then received"
        },
    ));

    let table = match config.descriptors {
        Descriptors::Direct => table(&ring, config, &mut features, &mut warnings)?,
        Descriptors::Fd => {
            features.push(feature("DIRECT_DESCRIPTORS", false, "", "not asked for"));
            0
        }
    };
    features.push(feature(
        "FIXED_FD_INSTALL",
        install,
        "a socket in the ring's own table can be asked for its addresses and given options (6.8)",
        "not offered by this kernel (needs 6.8): with direct descriptors a connection's addresses and options \
         are not to be had after it was made; ordinary descriptors have them",
    ));
    let nofile = sys::nofile_limit();
    if table == 0 && u64::from(config.max_connections) + FD_RESERVE > nofile {
        return Err(SetupError::Limit {
            what: format!(
                "max_connections {} and {FD_RESERVE} descriptors for everything else exceed RLIMIT_NOFILE = \
                 {nofile}, which ordinary descriptors count towards: raise the limit (`ulimit -n`, LimitNOFILE=), lower max_connections, or use direct descriptors \
                 with several workers",
                config.max_connections,
            ),
        });
    }
    Ok(Parts { ring, buf_ring, recv_mode, memory, table, no_iowait, min_wait, install, features, warnings })
}

/// The ring that receive buffers are lent through, unless it is switched off or refused.
fn buf_ring(
    ring: &IoUring,
    config: &WorkerConfig,
    memory: &Memory,
    features: &mut Vec<Feature>,
    warnings: &mut Vec<String>,
) -> Option<BufRing> {
    let (buf_ring, why_not) = if config.uring.provided_buffers {
        match BufRing::register(ring, &memory.pool) {
            Ok(buf_ring) => (Some(buf_ring), String::new()),
            Err(error) => {
                let text = format!(
                    "receive buffers cannot be provided through a ring ({error}; needs Linux 5.19): connections \
                     are polled instead, which costs two more operations for each piece of data",
                );
                warnings.push(text.clone());
                (None, text)
            }
        }
    } else {
        (None, "switched off: connections are polled, then receive into a buffer of the pool".to_owned())
    };
    let what = "an idle connection holds no buffer (5.19)";
    features.push(feature("PBUF_RING", buf_ring.is_some(), what, &why_not));
    buf_ring
}

/// Registers the arena as a fixed buffer, so that a zero-copy send need not pin its pages.
fn register_buffers(
    ring: &IoUring,
    memory: &Memory,
    spare: Option<u64>,
    features: &mut Vec<Feature>,
    warnings: &mut Vec<String>,
) {
    let Some((base, len)) = memory.pool.arena() else {
        let why_not = "guard mode: the kernel could write to registered pages whatever their protection";
        features.push(feature("FIXED_BUFFERS", false, "", why_not));
        return;
    };
    let registered = if spare.is_some_and(|spare| spare < len as u64) {
        // It might fit now, and leave nothing for another worker's ring, which is needed more.
        Err(io::Error::from_raw_os_error(libc::ENOMEM))
    } else {
        let whole = [libc::iovec { iov_base: base.as_ptr().cast(), iov_len: len }];
        // SAFETY: the arena stays mapped as long as the driver holds `memory`, which it drops only
        // after unregistering or leaks (invariant 2).
        unsafe { ring.submitter().register_buffers(&whole) }
    };
    let why_not = match registered {
        Ok(()) => String::new(),
        Err(error) if error.raw_os_error() == Some(libc::ENOMEM) => {
            let text = format!(
                "the arena of {len} bytes could not be registered as a fixed buffer: RLIMIT_MEMLOCK is {} \
                 bytes for all processes of this user together; raise it (`ulimit -l`, LimitMEMLOCK=) or use smaller buffers. Receiving and \
                 sending work all the same; what is lost is that zero-copy sends find their pages pinned",
                sys::memlock_limit(),
            );
            warnings.push(text.clone());
            text
        }
        Err(error) => {
            let text = format!("the arena could not be registered as a fixed buffer: {error}");
            warnings.push(text.clone());
            text
        }
    };
    features.push(feature(
        "FIXED_BUFFERS",
        why_not.is_empty(),
        "the arena is pinned and registered once (5.1)",
        &why_not,
    ));
}

/// Registers an empty descriptor table with room for every connection and some that are only
/// passing through (refused, or being closed).
fn table(
    ring: &IoUring,
    config: &WorkerConfig,
    features: &mut Vec<Feature>,
    warnings: &mut Vec<String>,
) -> Result<u32, SetupError> {
    let nofile = u32::try_from(sys::nofile_limit()).unwrap_or(u32::MAX);
    if config.max_connections > nofile {
        return Err(SetupError::Limit {
            what: format!(
                "max_connections {} exceeds what one ring's descriptor table can hold, RLIMIT_NOFILE = \
                 {nofile}: raise the limit (`ulimit -n`, LimitNOFILE=), ask for fewer per worker, or ask the \
                 runtime for the total (`Builder::max_connections`, `--max-connections`), which starts as many \
                 workers as it takes, each with a table of its own",
                config.max_connections,
            ),
        });
    }
    let entries = config.max_connections.saturating_add(64).min(nofile);
    match ring.submitter().register_files_sparse(entries) {
        Ok(()) => {
            features.push(feature(
                "DIRECT_DESCRIPTORS",
                true,
                "sockets live in the ring's own table, outside RLIMIT_NOFILE (5.19)",
                "",
            ));
            Ok(entries)
        }
        Err(error) => {
            let text = format!(
                "direct descriptors are not available ({error}): ordinary file descriptors are used, \
                 which count towards RLIMIT_NOFILE = {nofile}"
            );
            warnings.push(text.clone());
            features.push(feature("DIRECT_DESCRIPTORS", false, "", &text));
            Ok(0)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(errno: i32, sysctl: Option<&str>) -> String {
        refused(io::Error::from_raw_os_error(errno), sysctl.map(str::to_owned)).to_string()
    }

    #[test]
    fn a_refusal_names_its_cause_and_its_remedy() {
        let enosys = text(libc::ENOSYS, None);
        assert!(enosys.contains("ENOSYS") && enosys.contains("5.19 or later"), "{enosys}");
        let sysctl = text(libc::EPERM, Some("2"));
        assert!(sysctl.contains("io_uring_disabled = 2 (for everybody)"), "{sysctl}");
        assert!(sysctl.contains("sysctl kernel.io_uring_disabled=0"), "{sysctl}");
        let seccomp = text(libc::EPERM, Some("0"));
        assert!(seccomp.contains("seccomp") && seccomp.contains("profile"), "{seccomp}");
        let nofile = text(libc::EMFILE, Some("0"));
        assert!(nofile.contains("RLIMIT_NOFILE"), "{nofile}");
    }

    #[test]
    fn more_connections_than_a_table_holds_are_refused_with_both_numbers() {
        let nofile = sys::nofile_limit();
        let Ok(max_connections) = u32::try_from(nofile + 1) else { return };
        for descriptors in [Descriptors::Direct, Descriptors::Fd] {
            let config = WorkerConfig { max_connections, descriptors, ..WorkerConfig::default() };
            let text = parts(&config, None).expect_err("too many").to_string();
            assert!(text.contains(&max_connections.to_string()), "{text}");
            assert!(text.contains(&nofile.to_string()), "{text}");
        }
    }
}
