//! Settings of the calling thread.

use std::io;

use windows_sys::Win32::Foundation::ERROR_INVALID_PARAMETER;
use windows_sys::Win32::System::SystemInformation::GROUP_AFFINITY;
use windows_sys::Win32::System::Threading::{
    GetActiveProcessorCount, GetActiveProcessorGroupCount, GetCurrentThread, SetThreadGroupAffinity,
};

/// For [`GetActiveProcessorCount`]: of all groups.
const ALL_PROCESSOR_GROUPS: u16 = 0xffff;

/// Processors of this machine, in all processor groups.
pub(crate) fn cpu_count() -> usize {
    // SAFETY: takes no pointer (invariant 5).
    let count = unsafe { GetActiveProcessorCount(ALL_PROCESSOR_GROUPS) };
    (count as usize).max(1)
}

/// Binds the calling thread to one processor. Processors are numbered through: those of the first
/// processor group (of at most 64), then those of the next.
///
/// # Errors
/// `ERROR_INVALID_PARAMETER` when there is no such processor, or the process may not use it.
pub(crate) fn pin_to_cpu(cpu: usize) -> io::Result<()> {
    let mut left = cpu;
    // SAFETY: takes no pointer (invariant 5).
    for group in 0..unsafe { GetActiveProcessorGroupCount() } {
        // SAFETY: takes no pointer (invariant 5).
        let count = unsafe { GetActiveProcessorCount(group) } as usize;
        if left >= count {
            left -= count;
            continue;
        }
        let affinity = GROUP_AFFINITY { Mask: 1 << left, Group: group, Reserved: [0; 3] };
        // SAFETY: takes no pointer; the handle means the calling thread, whichever it is (invariant 5).
        let thread = unsafe { GetCurrentThread() };
        // SAFETY: `affinity` outlives the call; the old one is not asked for (invariant 5).
        let done = unsafe { SetThreadGroupAffinity(thread, &raw const affinity, std::ptr::null_mut()) };
        return if done == 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    }
    Err(io::Error::from_raw_os_error(ERROR_INVALID_PARAMETER as i32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_bound_to_any_processor_that_there_is_and_to_no_other() {
        std::thread::spawn(|| {
            for cpu in 0..cpu_count() {
                pin_to_cpu(cpu).expect("a processor of this machine");
            }
            let error = pin_to_cpu(cpu_count()).expect_err("one too many");
            assert_eq!(error.raw_os_error(), Some(ERROR_INVALID_PARAMETER as i32));
        })
        .join()
        .expect("the thread");
    }
}
