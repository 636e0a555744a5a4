//! What the tests on the real kernel share: a handler made of closures, clients that cannot wait for
//! ever, and children of the test program for what concerns a whole process.

// Each test program uses its own part of this.
#![allow(dead_code, unused_imports)]

mod child;
mod client;
mod hooks;
#[cfg(target_os = "linux")]
mod seccomp;

pub use child::*;
pub use client::*;
pub use hooks::*;
#[cfg(target_os = "linux")]
pub use seccomp::*;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use corelane::{Builder, Handler, Metrics, Runtime, SetupError, ShutdownReport, Snapshot, StartError};

/// No test waits longer than this for any one thing.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Starts a runtime; `None`, with the reason printed, where the system forbids io_uring: there is
/// nothing to test then.
pub fn start<H, F>(builder: Builder, make: F) -> Option<Runtime<H::Message>>
where
    H: Handler + 'static,
    F: Fn(usize) -> H + Send + Sync + 'static,
{
    started_or_skipped(builder.start(make))
}

/// What was started; `None`, said in the output, where the kernel forbids it.
pub fn started_or_skipped<M: Send>(started: Result<Runtime<M>, StartError>) -> Option<Runtime<M>> {
    use SetupError::{NotImplemented, Seccomp, Sysctl};
    match started {
        Ok(runtime) => Some(runtime),
        Err(StartError::Kernel(error @ (NotImplemented | Sysctl { .. } | Seccomp))) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("the runtime does not start: {error}"),
    }
}

/// Loopback, with a port of the kernel's choice.
pub fn any_port() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

/// The first listening address.
pub fn addr<M: Send>(runtime: &Runtime<M>) -> SocketAddr {
    runtime.info().listeners[0].addr
}

/// Waits until `done` holds; it is asked every millisecond.
pub fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < until, "waited {PATIENCE:?} in vain for: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until the counters of all workers together satisfy `done`, and returns them.
pub fn counters<M: Send>(
    runtime: &Runtime<M>,
    what: &str,
    mut done: impl FnMut(&Snapshot) -> bool,
) -> Snapshot {
    let until = Instant::now() + PATIENCE;
    loop {
        let total = runtime.metrics().total();
        if done(&total) {
            return total;
        }
        assert!(Instant::now() < until, "waited {PATIENCE:?} in vain for: {what}; {total:#?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until no connection and no lease is left.
pub fn empties<M: Send>(runtime: &Runtime<M>) -> Snapshot {
    counters(runtime, "no connections and no buffers out", |total| {
        total.connections == 0 && total.buffers_out == 0
    })
}

/// Waits until the workers sleep: no turn but those of the odd timer in a tenth of a second.
/// A worker that spins never gets there.
pub fn sleeps<M: Send>(runtime: &Runtime<M>, what: &str) {
    const WINDOW: Duration = Duration::from_millis(100);
    let until = Instant::now() + PATIENCE;
    loop {
        let before = runtime.metrics().total().turns;
        std::thread::sleep(WINDOW);
        let turns = runtime.metrics().total().turns - before;
        if turns <= 12 {
            return;
        }
        assert!(Instant::now() < until, "{what}: still {turns} turns in {WINDOW:?}");
    }
}

/// Stops a runtime and checks what must be true of every end: nothing is left in the kernel, no
/// buffer is out, no connection is held, and every connection had its close counted.
pub fn stop<M: Send>(runtime: Runtime<M>) -> ShutdownReport {
    let report = runtime.shutdown(Duration::from_secs(10)).expect("a clean shutdown");
    nothing_left(&report);
    report
}

/// What must be true of every report.
pub fn nothing_left(report: &ShutdownReport) {
    assert_eq!(report.ops_in_kernel, 0, "operations left in the kernel: {report}");
    assert_eq!(report.buffers_outstanding, 0, "buffers out: {report}");
    let Metrics { workers } = &report.metrics;
    for (index, worker) in workers.iter().enumerate() {
        assert_eq!(worker.faults, 0, "worker {index}: the kernel was given memory it must not touch");
        assert_eq!(worker.connections, 0, "worker {index} holds connections: {worker:#?}");
        assert_eq!(worker.buffers_out, 0, "worker {index} has buffers out: {worker:#?}");
    }
}

/// Numbers that look random and are the same in every run (xorshift64*).
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    /// A number in `low..=high`.
    pub fn within(&mut self, low: usize, high: usize) -> usize {
        low + (self.next() % (high - low + 1) as u64) as usize
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.next().is_multiple_of(n)
    }
}

/// `len` bytes that differ by seed and by place, so that no two mix-ups look alike.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&rng.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Compares long byte strings without printing them.
pub fn same_bytes(got: &[u8], wanted: &[u8], what: &str) {
    let differs = got.iter().zip(wanted).position(|(a, b)| a != b);
    assert_eq!(differs, None, "{what}: first difference at this byte");
    assert_eq!(got.len(), wanted.len(), "{what}: length");
}
