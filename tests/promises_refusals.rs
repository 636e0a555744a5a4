//! Promise 9: every refusal is a clear error that names its cause and its remedy; what is lost without
//! being refused is a warning. Limits, privileges and filters are those of child processes.
#![cfg(target_os = "linux")]

mod support;

use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use corelane::{
    Backend, BufferConfig, Builder, Descriptors, ListenerConfig, Runtime, SetupError, StartError,
    WorkerConfig,
};
use support::*;

fn refused(builder: Builder) -> StartError {
    builder.start(|_| Hooks::echo()).expect_err("refused")
}

/// Whether there is io_uring here at all.
fn io_uring_is_here() -> bool {
    start(Runtime::builder(), |_| Hooks::echo()).map(stop).is_some()
}

#[test]
fn io_uring_refused_by_seccomp_is_named_with_the_remedy() {
    const NAME: &str = "io_uring_refused_by_seccomp_is_named_with_the_remedy";
    if let Some(role) = role() {
        forbid_io_uring(if role == "EPERM" { libc::EPERM } else { libc::ENOSYS });
        // Several workers fail at once: one error comes of it, and nothing hangs.
        let error = refused(Runtime::builder().backend(Backend::IoUring).workers(2).listen(any_port()));
        assert!(error.is_preflight());
        let kind = match &error {
            StartError::Kernel(SetupError::Seccomp) => "seccomp",
            StartError::Kernel(SetupError::NotImplemented) => "not implemented",
            StartError::Kernel(SetupError::Sysctl { .. }) => "sysctl",
            _ => "another",
        };
        say(kind);
        return say(&error.to_string());
    }
    if !io_uring_is_here() {
        return;
    }
    let mut child = rerun(NAME, "EPERM", &[]);
    assert_eq!(child.hears(), "seccomp");
    let text = child.hears();
    for word in ["EPERM", "seccomp", "io_uring_setup, io_uring_enter and io_uring_register", "profile"] {
        assert!(text.contains(word), "{word} is missing: {text}");
    }
    child.ends();
    let mut child = rerun(NAME, "ENOSYS", &[]);
    assert_eq!(child.hears(), "not implemented");
    let text = child.hears();
    for word in ["ENOSYS", "seccomp", "Linux 5.19"] {
        assert!(text.contains(word), "{word} is missing: {text}");
    }
    child.ends();
}

/// A copy of this program where any user may execute it; removed when dropped.
struct Copy(PathBuf);

impl Copy {
    fn new(name: &str) -> Self {
        let name = format!("corelane-test-{}-{name}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let program = std::env::current_exe().expect("the path of this program");
        std::fs::copy(program, &path).expect("a copy of this program");
        let permissions = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&path, permissions).expect("permissions");
        Self(path)
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Runs a test of this program again as a process that may lock `kilobytes` of memory.
fn rerun_with_lockable_memory(program: &Copy, name: &str, kilobytes: u32) -> Option<Process> {
    // A process that may lock memory at will knows no such limit.
    // SAFETY: takes no argument.
    let privileged = unsafe { libc::geteuid() } == 0;
    if privileged && !has_program("setpriv") {
        println!("skipped: setpriv is not installed");
        return None;
    }
    let limit = format!("ulimit -l {kilobytes}; exec \"$0\" \"$@\"");
    let mut wrap = vec!["sh", "-c", &limit];
    if privileged {
        wrap.splice(..0, UNPRIVILEGED);
    }
    Some(rerun_program(&program.0, name, "short of lockable memory", &wrap))
}

const UNPRIVILEGED: [&str; 6] =
    ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"];

#[test]
fn too_little_lockable_memory_is_one_warning_that_says_what_is_lost() {
    const NAME: &str = "too_little_lockable_memory_is_one_warning_that_says_what_is_lost";
    if role().is_some() {
        let builder = Runtime::builder().backend(Backend::IoUring).workers(2).listen(any_port());
        let Some(runtime) = start(builder, |_| Hooks::echo()) else {
            return say("skipped");
        };
        say(&format!("{} warnings", runtime.info().warnings.len()));
        for warning in &runtime.info().warnings {
            say(warning);
        }
        let fixed = runtime.info().features.iter().find(|feature| feature.name == "FIXED_BUFFERS");
        assert!(fixed.is_some_and(|feature| !feature.on && feature.why.contains("RLIMIT_MEMLOCK")));
        exchange(connect(addr(&runtime)), &pattern(1, 300_000));
        empties(&runtime);
        stop(runtime);
        return say("it works all the same");
    }
    let program = Copy::new("warning");
    // Enough for two rings, not for their arenas.
    let Some(mut child) = rerun_with_lockable_memory(&program, NAME, 4096) else { return };
    let first = child.hears();
    if first == "skipped" {
        println!("skipped: io_uring is not for unprivileged processes here");
        return;
    }
    assert_eq!(first, "1 warnings");
    let warning = child.hears();
    for word in ["RLIMIT_MEMLOCK is 4194304 bytes", "ulimit -l", "what is lost", "zero-copy"] {
        assert!(warning.contains(word), "{word} is missing: {warning}");
    }
    assert_eq!(child.ends(), ["it works all the same"]);
}

#[test]
fn too_little_lockable_memory_for_a_ring_is_named_with_the_remedy() {
    const NAME: &str = "too_little_lockable_memory_for_a_ring_is_named_with_the_remedy";
    if role().is_some() {
        // Kernels before 6.13 do not count a ring's memory, and io_uring may be forbidden altogether.
        let started = Runtime::builder().start(|_| Hooks::echo());
        return say(&started.map_or_else(|error| error.to_string(), |_| "started".to_owned()));
    }
    let program = Copy::new("error");
    let Some(mut child) = rerun_with_lockable_memory(&program, NAME, 16) else { return };
    let text = child.hears();
    child.ends();
    if text == "started" || text.starts_with("io_uring") {
        println!("skipped: {text}");
        return;
    }
    for word in ["no memory for a ring", "raise RLIMIT_MEMLOCK", "now 16384 bytes", "fewer workers"] {
        assert!(text.contains(word), "{word} is missing: {text}");
    }
}

#[test]
fn a_port_in_use_is_named_and_what_was_started_is_taken_back() {
    let taken = TcpListener::bind(any_port()).expect("a listener");
    let taken = (taken.local_addr().expect("its address"), taken);
    let probe = TcpListener::bind(any_port()).expect("a listener");
    let free = probe.local_addr().expect("its address");
    drop(probe);
    for workers in [1, 2] {
        let error = refused(Runtime::builder().workers(workers).listen(free).listen(taken.0));
        let text = error.to_string();
        assert!(matches!(error, StartError::Bind { addr, .. } if addr == taken.0), "{text}");
        assert!(error.is_preflight());
        assert!(text.contains(&taken.0.to_string()) && text.contains("in use"), "{text}");
        assert!(text.contains("another process listens there"), "{text}");
        eventually("the other address let go of", || TcpListener::bind(free).is_ok());
    }
}

#[test]
fn an_address_of_another_machine_is_named() {
    let error = refused(Runtime::builder().listen("192.0.2.1:0".parse::<SocketAddr>().expect("one")));
    let text = error.to_string();
    assert!(text.contains("192.0.2.1") && text.contains("no interface of this machine"), "{text}");
}

#[test]
fn a_processor_that_does_not_exist_is_named() {
    let probe = TcpListener::bind(any_port()).expect("a listener");
    let free = probe.local_addr().expect("its address");
    drop(probe);
    for cpus in [vec![4000], vec![0, 4000], vec![usize::MAX]] {
        let bad = cpus[cpus.len() - 1];
        let error = refused(Runtime::builder().workers(2).listen(free).cpus(cpus));
        let text = error.to_string();
        assert!(matches!(error, StartError::Pin { cpu, .. } if cpu == bad), "{text}");
        assert!(text.contains(&format!("processor {bad}")) && text.contains("taskset"), "{text}");
        eventually("the address let go of", || TcpListener::bind(free).is_ok());
    }
}

#[test]
fn a_clamped_backlog_is_reported_with_the_effective_value() {
    let text = std::fs::read_to_string("/proc/sys/net/core/somaxconn").expect("the sysctl");
    let somaxconn: u32 = text.trim().parse().expect("a number");
    let mut listener = ListenerConfig::new(any_port());
    listener.backlog = 1_000_000;
    let Some(runtime) = start(Runtime::builder().workers(2).listen(listener), |_| Hooks::echo()) else {
        return;
    };
    let info = runtime.info();
    assert_eq!((info.listeners[0].backlog_asked, info.listeners[0].backlog), (1_000_000, somaxconn));
    let about: Vec<_> = info.warnings.iter().filter(|text| text.contains("backlog")).collect();
    let [warning] = about[..] else { panic!("one warning about it: {:?}", info.warnings) };
    assert!(warning.contains(&format!("clamped to {somaxconn} by net.core.somaxconn")), "{warning}");
    assert!(warning.contains("sysctl net.core.somaxconn=1000000"), "{warning}");
    exchange(connect(addr(&runtime)), b"it works all the same");
    empties(&runtime);
    stop(runtime);
    let mut listener = ListenerConfig::new(any_port());
    listener.backlog = 16;
    let Some(runtime) = start(Runtime::builder().listen(listener), |_| Hooks::echo()) else { return };
    assert_eq!(runtime.info().listeners[0].backlog, 16);
    assert!(runtime.info().warnings.iter().all(|text| !text.contains("backlog")));
    stop(runtime);
}

fn nofile() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` outlives the call.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    assert_eq!(result, 0, "getrlimit: {}", std::io::Error::last_os_error());
    limit.rlim_cur
}

#[test]
fn more_connections_than_the_descriptor_limit_allows_are_refused_or_spread() {
    let nofile = nofile();
    if nofile > 100_000 || !io_uring_is_here() {
        println!("skipped: RLIMIT_NOFILE is {nofile}");
        return;
    }
    for descriptors in [Descriptors::Direct, Descriptors::Fd] {
        let max_connections = u32::try_from(nofile + 1).expect("a small limit");
        let config = WorkerConfig { descriptors, max_connections, ..WorkerConfig::default() };
        let error = refused(Runtime::builder().worker(config));
        let text = error.to_string();
        assert!(error.is_preflight(), "{text}");
        for word in [&max_connections.to_string(), &nofile.to_string(), "RLIMIT_NOFILE", "ulimit -n"] {
            assert!(text.contains(word), "{word} is missing: {text}");
        }
    }
    // Asked for as a total, they are spread over several rings.
    let builder = Runtime::builder().backend(Backend::IoUring).max_connections(nofile * 2);
    let Some(runtime) = start(builder, |_| Hooks::echo()) else {
        return;
    };
    let workers = &runtime.info().workers;
    assert_eq!(workers.len(), 3);
    assert!(workers.iter().all(|worker| u64::from(worker.max_connections) <= nofile));
    assert!(workers.iter().all(|worker| worker.descriptors == Descriptors::Direct));
    stop(runtime);
}

#[test]
fn settings_out_of_range_are_refused_with_field_value_and_range() {
    let with = |change: fn(&mut WorkerConfig)| {
        let mut config = WorkerConfig::default();
        change(&mut config);
        let error = refused(Runtime::builder().worker(config));
        assert!(matches!(error, StartError::Config(_)) && !error.is_preflight(), "{error}");
        error.to_string()
    };
    let text = with(|config| config.buffers = BufferConfig { size: 1, ..BufferConfig::default() });
    assert!(text.contains("size 1 is out of range"), "{text}");
    let text = with(|config| config.buffers.count = 32_769);
    assert!(text.contains("count 32769") && text.contains("32768"), "{text}");
    let text = with(|config| config.low_water = config.high_water);
    assert!(text.contains("low_water 65536 is out of range: allowed is 0 to 65535"), "{text}");
    let text = with(|config| config.sq_entries = 0);
    assert!(text.contains("sq_entries 0"), "{text}");
    let text = with(|config| config.mailbox = 0);
    assert!(text.contains("mailbox 0"), "{text}");
    let text = refused(Runtime::builder().workers(0)).to_string();
    assert!(text.contains("workers 0 is out of range"), "{text}");
    let text = refused(Runtime::builder().max_connections(0)).to_string();
    assert!(text.contains("max_connections 0"), "{text}");
}

/// The arena does not fit into memory: named, not a crash.
#[test]
fn buffers_that_no_memory_can_hold_are_refused() {
    const NAME: &str = "buffers_that_no_memory_can_hold_are_refused";
    if role().is_some() {
        let buffers =
            BufferConfig { size: 1 << 20, count: 32_768, send_count: 32_768, ..BufferConfig::default() };
        let config = WorkerConfig { buffers, ..WorkerConfig::default() };
        return say(&refused(Runtime::builder().worker(config)).to_string());
    }
    if !io_uring_is_here() {
        return;
    }
    let mut child = rerun(NAME, "short of memory", &["sh", "-c", "ulimit -v 4000000; exec \"$0\" \"$@\""]);
    let text = child.hears();
    assert!(text.contains("no memory for 68719476736 bytes of buffers"), "{text}");
    assert!(text.contains("fewer or smaller buffers"), "{text}");
    child.ends();
}

#[test]
fn a_panic_in_the_constructor_of_a_handler_is_an_error_of_the_start() {
    if !io_uring_is_here() {
        return;
    }
    let error = Runtime::builder()
        .workers(2)
        .listen(any_port())
        .start(|worker| {
            assert_eq!(worker, 0, "no handler for the second worker");
            Hooks::echo()
        })
        .expect_err("a constructor panicked");
    assert!(matches!(error, StartError::Panicked), "{error}");
    assert!(error.to_string().contains("constructor panicked"), "{error}");
}

#[test]
fn a_backend_of_another_system_or_of_none_is_refused_by_name() {
    let error = refused(Runtime::builder().backend(Backend::Iocp).listen(any_port()));
    assert!(error.is_preflight());
    assert_eq!(error.to_string(), "the backend iocp needs Windows; leave the choice to corelane (auto)");
    let error = "kqueue".parse::<Backend>().expect_err("no such backend").to_string();
    assert_eq!(error, "backend \"kqueue\" is out of range: allowed is auto, io_uring, epoll or iocp");
}

#[test]
fn what_was_found_on_this_kernel_is_reported_with_reasons() {
    for descriptors in [Descriptors::Direct, Descriptors::Fd] {
        let config = WorkerConfig { descriptors, ..WorkerConfig::default() };
        let builder = Runtime::builder().backend(Backend::IoUring).worker(config).workers(2);
        let Some(runtime) = start(builder, |_| Hooks::echo()) else { return };
        let info = runtime.info();
        assert_eq!((info.backend, &info.fallback), (Backend::IoUring, &None));
        let text = info.to_string();
        assert!(
            text.starts_with("io_uring on kernel ") && text.contains("\n2 worker(s), at most "),
            "{text}"
        );
        let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("procfs");
        assert_eq!(info.kernel, release.trim());
        assert!(info.features.len() >= 5, "{:?}", info.features);
        assert!(info.features.iter().all(|feature| !feature.why.is_empty()), "{:?}", info.features);
        let direct = info.features.iter().find(|feature| feature.name == "DIRECT_DESCRIPTORS");
        assert_eq!(direct.map(|feature| feature.on), Some(descriptors == Descriptors::Direct));
        assert!(info.workers.iter().all(|worker| worker.descriptors == descriptors));
        assert_eq!(info.workers.iter().map(|worker| worker.index).collect::<Vec<_>>(), [0, 1]);
        stop(runtime);
    }
}
