//! What all servers have in common, so that they differ in their runtime and in nothing else: the flags, the listening
//! socket, pinning, the proof of what really runs, and the end.

use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};
use std::{fs, process, thread};

/// Bytes of a receive buffer, in every server.
pub const BUFFER: usize = 16 * 1024;
/// Connections that may wait to be accepted.
pub const BACKLOG: i32 = 4096;
/// Connections at most; the load tool's side has the same limit of open files.
pub const MAX_CONNECTIONS: usize = 16_384;

/// What was asked for.
#[derive(Clone, Debug)]
pub struct Options {
    pub listen: SocketAddr,
    /// Core to which the whole process is pinned.
    pub cpu: Option<usize>,
    pub workers: usize,
    /// Take everything, answer nothing: the server of one-way streams.
    pub discard: bool,
    /// Flags that only one server knows, like `--flavor multi`.
    pub extra: Vec<(String, String)>,
}

impl Options {
    /// Reads the command line, and pins the process before any thread of the runtime exists: all of them inherit it.
    pub fn parse() -> Self {
        let mut options = Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            cpu: None,
            workers: 1,
            discard: false,
            extra: Vec::new(),
        };
        let mut args = std::env::args().skip(1);
        while let Some(flag) = args.next() {
            let value = args.next().unwrap_or_else(|| usage(&flag));
            match flag.as_str() {
                "--listen" => options.listen = value.parse().unwrap_or_else(|_| usage(&flag)),
                "--cpu" => options.cpu = Some(value.parse().unwrap_or_else(|_| usage(&flag))),
                "--workers" => options.workers = value.parse().unwrap_or_else(|_| usage(&flag)),
                "--mode" if value == "echo" => options.discard = false,
                "--mode" if value == "discard" => options.discard = true,
                _ if flag.starts_with("--") => options.extra.push((flag[2..].to_owned(), value)),
                _ => usage(&flag),
            }
        }
        if options.workers != 1 {
            eprintln!("one worker is what is compared here: --workers 1");
            process::exit(2);
        }
        if let Some(cpu) = options.cpu {
            pin(cpu);
        }
        raise_nofile_limit();
        options
    }

    /// The value of a flag that only this server knows.
    pub fn extra(&self, name: &str) -> Option<&str> {
        self.extra.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// The listening socket, for all runtimes that take one: not blocking, and with `TCP_NODELAY`, which the connections
    /// that it accepts inherit on Linux.
    pub fn listener(&self) -> TcpListener {
        let open = || -> std::io::Result<TcpListener> {
            let domain = socket2::Domain::for_address(self.listen);
            let socket = socket2::Socket::new(domain, socket2::Type::STREAM, Some(socket2::Protocol::TCP))?;
            socket.set_reuse_address(true)?;
            socket.set_tcp_nodelay(true)?;
            socket.bind(&self.listen.into())?;
            socket.listen(BACKLOG)?;
            socket.set_nonblocking(true)?;
            Ok(socket.into())
        };
        open().unwrap_or_else(|error| {
            eprintln!("cannot listen on {}: {error}", self.listen);
            process::exit(1);
        })
    }
}

fn usage(flag: &str) -> ! {
    eprintln!("{flag}: expected --listen ADDR, --cpu N, --workers 1, --mode echo|discard, each with a value");
    process::exit(2)
}

fn pin(cpu: usize) {
    // SAFETY: `cpu_set_t` is plain data for which zero is "no core"; the call reads it and keeps nothing.
    let done = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    if done != 0 {
        eprintln!("cannot pin to core {cpu}: {}", std::io::Error::last_os_error());
        process::exit(1);
    }
}

fn raise_nofile_limit() {
    // SAFETY: both calls take a pointer to a local and keep nothing.
    unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}

/// Says that the server is ready and what it really runs on; then, on a thread of its own, waits for the end of standard
/// input, which ends the process.
///
/// `runtime` is a package of this workspace's lock file; `driver` is what the running runtime itself says about its
/// backend, where it can be asked. The proof that does not depend on it is the process's open descriptors: an event loop
/// on io_uring has one `anon_inode:[io_uring]` for each ring, one on epoll an `anon_inode:[eventpoll]`.
pub fn announce(addr: SocketAddr, runtime: &str, expected: Backend, driver: &str) {
    // The runtime's own threads may still be building their drivers.
    let patience = Instant::now() + Duration::from_secs(5);
    let (rings, epolls) = loop {
        let found = (descriptors("[io_uring]"), descriptors("[eventpoll]"));
        let there = if expected == Backend::IoUring { found.0 > 0 } else { found.1 > 0 && found.0 == 0 };
        if there {
            break found;
        }
        if Instant::now() > patience {
            eprintln!(
                "{runtime} does not run on {expected:?}: {} rings, {} epolls are open",
                found.0, found.1
            );
            process::exit(1);
        }
        thread::sleep(Duration::from_millis(5));
    };
    let backend = if expected == Backend::IoUring { "io_uring" } else { "epoll" };
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let line = format!(
        "{{\"runtime\": \"{runtime} {}\", \"backend\": \"{backend}\", \"driver\": \"{driver}\", \
         \"io_uring_fds\": {rings}, \"epoll_fds\": {epolls}, \"kernel\": \"{}\", \"pid\": {}}}",
        locked_version(runtime),
        kernel.trim(),
        process::id(),
    );
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    // Nobody to tell when it fails: whoever started this server does not see it become ready.
    let _ = writeln!(out, "listening on {addr}\n{line}").and_then(|()| out.flush());
    thread::spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink());
        process::exit(0);
    });
}

/// Kernel interfaces that carry an event loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    IoUring,
    Epoll,
}

/// Open descriptors of this process whose target ends in `name`.
fn descriptors(name: &str) -> usize {
    let entries = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    entries
        .filter(|entry| fs::read_link(entry.path()).is_ok_and(|to| to.to_string_lossy().ends_with(name)))
        .count()
}

/// Version of a package in the lock file that this was built from. Where several are locked, the newest: the servers ask
/// for the newest, older ones are other crates' dependencies.
fn locked_version(package: &str) -> String {
    let lock = include_str!("../../Cargo.lock");
    let wanted = format!("name = \"{package}\"");
    let mut versions: Vec<&str> = lock
        .split("[[package]]")
        .filter(|entry| entry.lines().any(|line| line == wanted))
        .filter_map(|entry| entry.lines().find_map(|line| line.strip_prefix("version = ")))
        .map(|version| version.trim_matches('"'))
        .collect();
    versions.sort_by_key(|version| {
        version.split('.').map(|part| part.parse().unwrap_or(0)).collect::<Vec<u64>>()
    });
    versions.last().map_or_else(|| "?".to_owned(), |version| (*version).to_owned())
}
