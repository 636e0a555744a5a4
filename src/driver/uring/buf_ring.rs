//! The ring through which receive buffers are lent to the kernel (`io_uring_buf_ring`, Linux 5.19).

use std::io;
use std::sync::atomic::{AtomicU16, Ordering};

use io_uring::IoUring;
use io_uring::types::BufRingEntry;

use crate::buffer::{Pool, arena::Arena};

/// The buffer group that receives draw from.
pub(crate) const GROUP: u16 = 0;

pub(crate) struct BufRing {
    /// The entries; the kernel reads them.
    memory: std::mem::ManuallyDrop<Arena>,
    leaked: bool,
    mask: u16,
    tail: u16,
}

impl BufRing {
    /// Makes a ring with room for every receive buffer of `pool`, and registers it.
    ///
    /// # Errors
    /// What the kernel says; `EINVAL` before Linux 5.19.
    pub(crate) fn register(ring: &IoUring, pool: &Pool) -> io::Result<Self> {
        let entries = pool.capacity().next_power_of_two() as u16;
        let memory = Arena::map(usize::from(entries) * size_of::<BufRingEntry>())?;
        let address = memory.at(0).as_ptr() as u64;
        // SAFETY: the ring's memory is page-aligned, `entries` entries long, and lives as long as
        // this value, which the driver drops only after unregistering or leaks (invariant 2).
        unsafe { ring.submitter().register_buf_ring_with_flags(address, entries, GROUP, 0) }?;
        Ok(Self { memory: std::mem::ManuallyDrop::new(memory), leaked: false, mask: entries - 1, tail: 0 })
    }

    /// Keeps the ring's memory mapped for ever, because the kernel may still read it.
    pub(crate) fn leak(&mut self) {
        self.leaked = true;
    }

    /// Lends every free buffer of `pool` to the kernel: one store makes all of them visible.
    #[inline]
    pub(crate) fn lend(&mut self, pool: &Pool) {
        let size = pool.buffer_size();
        let mut tail = self.tail;
        let lent = pool.lend_all(|index| {
            let offset = usize::from(tail & self.mask) * size_of::<BufRingEntry>();
            let entry: *mut BufRingEntry = self.memory.at(offset).cast().as_ptr();
            // SAFETY: inside the ring's memory, aligned, and not visible to the kernel until the
            // tail moves; there are at least as many entries as buffers, so it is not in use
            // (invariant 4).
            let entry = unsafe { &mut *entry };
            entry.set_addr(pool.address(index).as_ptr() as u64);
            entry.set_len(size);
            entry.set_bid(index as u16);
            tail = tail.wrapping_add(1);
            true
        });
        if lent > 0 {
            self.tail = tail;
            let base: *const BufRingEntry = self.memory.at(0).cast().as_ptr();
            // SAFETY: `base` is the start of a registered ring (invariant 4).
            let tail_field = unsafe { BufRingEntry::tail(base) };
            // SAFETY: the tail field is an aligned u16 that only this thread writes and the kernel
            // reads (invariant 4).
            let shared = unsafe { AtomicU16::from_ptr(tail_field.cast_mut()) };
            shared.store(tail, Ordering::Release);
        }
    }
}

impl Drop for BufRing {
    fn drop(&mut self) {
        if !self.leaked {
            // SAFETY: dropped once, here, and not used afterwards; the driver has unregistered the ring
            // or closed it with no operation left, or else said `leak` (invariant 2).
            unsafe { std::mem::ManuallyDrop::drop(&mut self.memory) };
        }
    }
}
