//! Making an epoll instance: what is needed, what is left off and why.

use std::io;

use crate::buffer::Memory;
use crate::config::WorkerConfig;
use crate::driver::sys::{self, Epoll};
use crate::driver::{DriverInfo, FD_RESERVE, Feature, SetupError};

fn refused(error: io::Error) -> SetupError {
    match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE) => SetupError::Limit {
            what: format!(
                "no file descriptor for an epoll instance ({error}): raise RLIMIT_NOFILE (now {})",
                sys::nofile_limit(),
            ),
        },
        _ => SetupError::Os { what: "epoll_create1", source: error },
    }
}

/// Makes what a driver needs, after checking the limits.
pub(super) fn parts(config: &WorkerConfig) -> Result<(Epoll, Memory, DriverInfo), SetupError> {
    let nofile = sys::nofile_limit();
    let connections = u64::from(config.max_connections);
    if connections + FD_RESERVE > nofile {
        return Err(SetupError::Limit {
            what: format!(
                "max_connections {connections} and {FD_RESERVE} descriptors for everything else exceed \
                 RLIMIT_NOFILE = {nofile}, which the sockets of this backend (epoll) count towards: raise the \
                 limit (`ulimit -n`, LimitNOFILE=) or lower max_connections",
            ),
        });
    }
    let epoll = Epoll::new().map_err(refused)?;
    let memory = Memory::new(&config.buffers)?;
    if let Some(slack) = config.timer_slack {
        sys::set_timer_slack(slack).map_err(|source| SetupError::os("setting the timer slack", source))?;
    }
    let mut warnings = Vec::new();
    let watches = sys::sysctl("fs/epoll/max_user_watches").and_then(|text| text.parse::<u64>().ok());
    if let Some(watches) = watches.filter(|&watches| watches < connections) {
        warnings.push(format!(
            "max_connections {connections} exceeds fs.epoll.max_user_watches = {watches}, for all processes of this user: \
             connections beyond it fail; raise it with `sysctl fs.epoll.max_user_watches=`",
        ));
    }
    let precise = epoll.nanoseconds();
    let mut features = vec![
        feature("EPOLLET", true, "one epoll_ctl per connection, however often it becomes ready (2.6)"),
        feature(
            "EPOLL_PWAIT2",
            precise,
            if precise {
                "waits end to the nanosecond (5.11)"
            } else {
                "refused by this kernel or a filter (needs 5.11): waits are rounded up to whole milliseconds"
            },
        ),
        feature(
            "EPOLLEXCLUSIVE",
            false,
            "not used: a worker at its limit would keep from the others the wake-up for a connection that \
             it does not take; so all workers that share a listener wake up for each",
        ),
        feature("DIRECT_DESCRIPTORS", false, "io_uring only: sockets count towards RLIMIT_NOFILE"),
    ];
    if config.wait.may_gather() {
        let why = "once it was woken the worker sleeps for the rest of the delay";
        features.push(feature("MIN_WAIT", false, why));
    }
    Ok((epoll, memory, DriverInfo { features, warnings, direct: false }))
}

fn feature(name: &'static str, on: bool, why: &str) -> Feature {
    Feature { name, on, why: why.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_connections_than_descriptors_are_refused_with_both_numbers_and_the_remedy() {
        let nofile = sys::nofile_limit();
        let Ok(max_connections) = u32::try_from(nofile - FD_RESERVE + 1) else { return };
        let config = WorkerConfig { max_connections, ..WorkerConfig::default() };
        let Err(error) = parts(&config) else { panic!("started") };
        let text = error.to_string();
        for part in [&max_connections.to_string(), &nofile.to_string(), "ulimit -n", "max_connections"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!error.is_refusal());
    }

    #[test]
    fn a_full_descriptor_table_is_named() {
        let text = refused(io::Error::from_raw_os_error(libc::EMFILE)).to_string();
        assert!(text.contains("RLIMIT_NOFILE"), "{text}");
    }
}
