//! The machine's state: how long a cache line takes between the two cores, and how fast each of them computes.

use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

/// Round trips in a batch, and batches: some 10 to 50 ms in all.
const TRIPS: u64 = 2_000;
const BATCHES: usize = 41;
/// Steps of the fixed computation, each of which waits for the one before: about 5 ms.
const STEPS: u64 = 5_000_000;

/// Pins this thread to a core.
pub fn pin(cpu: usize) {
    // SAFETY: `cpu_set_t` is plain data for which zero is "no core"; the call reads it and keeps nothing.
    let done = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(cpu, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    assert_eq!(done, 0, "pinning to core {cpu}");
}

/// Both, as JSON: medians and best, since other processes only ever make it longer.
pub fn calibrate(cpus: (usize, usize)) -> String {
    let (trip, best_trip) = round_trip(cpus);
    let first = compute(cpus.0);
    let second = compute(cpus.1);
    format!(
        "{{\"round_trip_ns\": {trip:.1}, \"best_round_trip_ns\": {best_trip:.1}, \"compute_ms\": [{:.3}, {:.3}]}}",
        first, second
    )
}

/// A cache line to the other core and back: median and least of all batches, in nanoseconds.
fn round_trip(cpus: (usize, usize)) -> (f64, f64) {
    #[repr(align(128))]
    struct Line(AtomicU64);
    let line = Line(AtomicU64::new(0));
    let rounds = TRIPS * BATCHES as u64;
    thread::scope(|scope| {
        scope.spawn(|| {
            pin(cpus.1);
            for round in 0..rounds {
                wait(&line.0, 2 * round + 1);
                line.0.store(2 * round + 2, Ordering::Release);
            }
        });
        let timing = scope.spawn(|| {
            pin(cpus.0);
            let mut batches = Vec::new();
            let mut round = 0;
            for _ in 0..BATCHES {
                let start = Instant::now();
                for _ in 0..TRIPS {
                    line.0.store(2 * round + 1, Ordering::Release);
                    wait(&line.0, 2 * round + 2);
                    round += 1;
                }
                batches.push(start.elapsed().as_nanos() as f64 / TRIPS as f64);
            }
            batches.sort_by(f64::total_cmp);
            (batches[batches.len() / 2], batches[0])
        });
        timing.join().expect("no panic")
    })
}

/// Spins for a value; gives the core away now and then, in case both threads were put on one.
fn wait(line: &AtomicU64, value: u64) {
    let mut spins = 0_u32;
    while line.load(Ordering::Acquire) != value {
        spins += 1;
        if spins.is_multiple_of(1 << 14) {
            thread::yield_now();
        }
        spin_loop();
    }
}

/// Milliseconds of the fixed computation on a core, the best of three.
fn compute(cpu: usize) -> f64 {
    thread::scope(|scope| {
        let timing = scope.spawn(|| {
            pin(cpu);
            let mut best = f64::MAX;
            for _ in 0..3 {
                let start = Instant::now();
                let mut x = black_box(0x9E37_79B9_7F4A_7C15_u64);
                for _ in 0..STEPS {
                    x ^= x << 13;
                    x ^= x >> 7;
                    x ^= x << 17;
                }
                black_box(x);
                best = best.min(start.elapsed().as_secs_f64() * 1e3);
            }
            best
        });
        timing.join().expect("no panic")
    })
}
