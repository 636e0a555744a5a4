//! What guard mode is there to catch, done on purpose.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use io_uring::{IoUring, opcode, types};

use super::*;

/// Set in the environment of a child to what it is to do wrong.
const SIN: &str = "CORELANE_TEST_SIN";

/// Runs a test of this program again as a process of its own, which is to commit a sin; gives the signal that
/// ended it.
fn signal_for(test: &str, sin: &str) -> Option<i32> {
    let mut child = Command::new(std::env::current_exe().expect("the path of this program"));
    child.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(SIN, sin);
    // A sanitizer would take the signal for itself.
    for sanitizer in ["ASAN_OPTIONS", "TSAN_OPTIONS"] {
        child.env(sanitizer, "handle_segv=0");
    }
    let status = child.stdout(Stdio::null()).stderr(Stdio::null()).status().expect("a child");
    assert!(!status.success(), "{sin}: the child ended as if nothing were wrong");
    status.signal()
}

fn touch(at: *mut u8) {
    // SAFETY: none, on purpose: this process is expected to end here.
    unsafe { at.write_volatile(1) };
}

fn read(at: *const u8) -> u8 {
    // SAFETY: none, on purpose: this process is expected to end here.
    unsafe { at.read_volatile() }
}

#[test]
fn whoever_touches_a_buffer_that_is_not_his_is_ended() {
    const NAME: &str = "buffer::tests::guard::whoever_touches_a_buffer_that_is_not_his_is_ended";
    type Sin = (&'static str, fn(&Pool));
    let sins: [Sin; 6] = [
        ("read a free buffer", |pool| {
            read(pool.address(0).as_ptr());
        }),
        ("write to a buffer after its last lease was dropped", |pool| {
            let lease = pool.lease_with(|room| room.len()).expect("a buffer");
            let at = lease.as_ptr().cast_mut();
            drop(lease);
            touch(at);
        }),
        ("write to a buffer that was taken back from the kernel", |pool| {
            pool.lend_all(|_| true);
            touch(pool.address(1).as_ptr());
            pool.take_back(1);
            touch(pool.address(1).as_ptr());
        }),
        ("write through a lease that may be shared", |pool| {
            let lease = pool.lease_with(|room| room.len()).expect("a buffer");
            touch(lease.as_ptr().cast_mut());
        }),
        ("write behind a buffer", |pool| {
            let mut lease = pool.lease_with(|room| room.len()).expect("a buffer");
            let bytes = lease.get_mut().expect("alone");
            touch(bytes.as_mut_ptr_range().end);
        }),
        ("compose beyond the end", |pool| {
            let mut reply = pool.alloc().expect("a send buffer");
            reply.put(&[1; 1000]);
            let reply = reply.freeze();
            read(reply.as_ptr_range().end);
        }),
    ];
    if let Some(sin) = std::env::var_os(SIN) {
        let (_, commit) = sins.iter().find(|(name, _)| *name == sin).expect("a sin of the list");
        return commit(&pool(1000, 2, 1, true));
    }
    for (sin, _) in sins {
        assert_eq!(signal_for(NAME, sin), Some(libc::SIGSEGV), "{sin}");
    }
}

/// A ring of its own; `None`, with the reason printed, where the system forbids io_uring.
fn ring() -> Option<IoUring> {
    match IoUring::new(8) {
        Ok(ring) => Some(ring),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)) => {
            println!("skipped: {error}");
            None
        }
        Err(error) => panic!("no ring: {error}"),
    }
}

fn pipe() -> (OwnedFd, File) {
    let mut ends = [0; 2];
    // SAFETY: the kernel writes two descriptors to `ends`.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
    // SAFETY: a descriptor made above, owned by nobody else.
    let reader = unsafe { OwnedFd::from_raw_fd(ends[0]) };
    // SAFETY: as before.
    let writer = unsafe { File::from_raw_fd(ends[1]) };
    (reader, writer)
}

/// Starts a read of the kernel into a lent buffer, does `meanwhile`, lets the data come, and tells how the
/// read ended.
fn late_write(guard: bool, meanwhile: impl FnOnce(&Pool)) -> Option<(i32, Pool)> {
    let mut ring = ring()?;
    let pool = pool(1000, 1, 0, guard);
    assert_eq!(pool.lend_all(|_| true), 1);
    let (reader, mut writer) = pipe();
    let entry = opcode::Read::new(types::Fd(reader.as_raw_fd()), pool.address(0).as_ptr(), 1000).build();
    // SAFETY: the buffer stays mapped until the completion is taken below; what else is done to it is the
    // point of the test.
    unsafe { ring.submission().push(&entry) }.expect("room for one");
    ring.submit().expect("submitted");
    assert!(ring.completion().is_empty(), "the pipe is empty, so the read waits");
    meanwhile(&pool);
    writer.write_all(&[7; 10]).expect("written");
    ring.submit_and_wait(1).expect("completed");
    let result = ring.completion().next().expect("one completion").result();
    Some((result, pool))
}

#[test]
fn a_late_write_of_the_kernel_ends_with_efault() {
    // As it should be: the buffer is the kernel's until the completion.
    let Some((result, pool)) = late_write(true, |_| {}) else { return };
    assert_eq!(result, 10);
    assert_eq!(&pool.lease(0, 10).expect("lent")[..], [7; 10]);

    // Given back while the operation was on its way: seen in guard mode ...
    let (result, _) = late_write(true, |pool| pool.take_back(0)).expect("a ring, as before");
    assert_eq!(result, -libc::EFAULT);
    // ... also when somebody has a lease on the buffer by now ...
    let mut lease = None;
    let reuse = |pool: &Pool| {
        pool.take_back(0);
        lease = pool.lease_with(|room| {
            room.fill(1);
            room.len()
        });
    };
    let (result, _) = late_write(true, reuse).expect("a ring, as before");
    assert_eq!(result, -libc::EFAULT);
    assert_eq!(&lease.expect("a lease")[..], [1; 1000]);
    // ... and without it not seen at all: bytes of one connection would appear in another's.
    let (result, pool) = late_write(false, |pool| pool.take_back(0)).expect("a ring, as before");
    if pool.is_guarded() {
        println!("without it: skipped, the environment turns it on for everything");
        return;
    }
    assert_eq!(result, 10);
    assert_eq!(&pool.lease_with(|_| 10).expect("a buffer")[..], [7; 10]);
}

#[test]
fn buffers_end_where_their_pages_end_whatever_their_size() {
    for size in [64, 100, 4096, 5000, 8192] {
        let pool = pool(size, 2, 1, true);
        for index in 0..3 {
            let address = pool.address(index).as_ptr() as usize;
            assert_eq!((address + size as usize) % arena::page(), 0, "buffer {index} of {size} bytes");
        }
        pool.lend_all(|_| true);
        let first = pool.address(0).as_ptr();
        assert_eq!(access(first), Access::ReadWrite);
        assert_eq!(access(first.wrapping_add(size as usize)), Access::Nothing);
        if (size as usize).is_multiple_of(arena::page()) {
            assert_eq!(access(first.wrapping_sub(1)), Access::Nothing);
        }
    }
}

#[test]
fn nothing_of_a_guarded_arena_is_registered() {
    assert!(pool(4096, 1, 0, true).arena().is_none());
}

/// More mappings than a process may have: named at start, with the remedy.
#[test]
fn more_guarded_buffers_than_mappings_are_refused() {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").expect("procfs");
    if text.trim().parse::<u32>().expect("a number") > 131_072 {
        println!("skipped: vm.max_map_count = {} is enough for every configuration", text.trim());
        return;
    }
    let config = BufferConfig { size: 64, count: 32_768, send_count: 32_768, guard: true };
    let error = Pool::new(&config).map(drop).expect_err("too many");
    assert!(matches!(error, BufferError::Guard { .. }), "{error}");
    assert!(error.to_string().contains("vm.max_map_count"), "{error}");
}
