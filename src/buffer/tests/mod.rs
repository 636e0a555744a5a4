//! The pool against a model of itself, and what guard mode catches.
//!
//! `model.rs`: any history of a pool, in both modes. `guard.rs`: late and wrong accesses, by this process and
//! by the kernel.

#[cfg(target_os = "linux")]
mod guard;
mod model;

use super::*;
#[cfg(unix)]
use arena::Access;

fn pool(size: u32, count: u32, send_count: u32, guard: bool) -> Pool {
    Pool::new(&BufferConfig { size, count, send_count, guard }).expect("a small pool")
}

/// What the system lets anybody do with a byte, found out by letting the kernel try: a byte that may be read
/// goes into a pipe, and comes back into its place if that may be written.
#[cfg(unix)]
fn access(at: *mut u8) -> Access {
    let mut ends = [0; 2];
    // SAFETY: the kernel writes two descriptors to `ends`.
    assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the kernel checks what it may read, and says so.
    let read = unsafe { libc::write(ends[1], at.cast(), 1) };
    let outcome = if read != 1 {
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
        Access::Nothing
    } else {
        // SAFETY: the kernel checks what it may write, and what it writes is what was there before; no
        // reference to the byte exists while this runs.
        let written = unsafe { libc::read(ends[0], at.cast(), 1) };
        assert!(written == 1 || std::io::Error::last_os_error().raw_os_error() == Some(libc::EFAULT));
        if written == 1 { Access::ReadWrite } else { Access::Read }
    };
    for end in ends {
        // SAFETY: made above, and closed once.
        unsafe { libc::close(end) };
    }
    outcome
}
