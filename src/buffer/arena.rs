//! One page-aligned mapping, made once, unmapped once.

use std::io;
use std::ptr::NonNull;

/// Page-aligned anonymous memory. Pages cost nothing until they are first touched.
pub(crate) struct Arena {
    base: NonNull<u8>,
    len: usize,
}

impl Arena {
    /// Maps `len` bytes of zeroes.
    ///
    /// # Errors
    /// Whatever the system says when it has no room (`ENOMEM`).
    #[cfg(unix)]
    pub(crate) fn map(len: usize) -> io::Result<Self> {
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing
        // memory (invariant 1).
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        match NonNull::new(base.cast()) {
            Some(base) => Ok(Self { base, len }),
            None => Err(io::Error::from(io::ErrorKind::OutOfMemory)),
        }
    }

    /// Allocates `len` bytes of zeroes from the process heap, page-aligned.
    ///
    /// # Errors
    /// `OutOfMemory` when the allocator has no room.
    #[cfg(not(unix))]
    pub(crate) fn map(len: usize) -> io::Result<Self> {
        let layout = Self::layout(len)?;
        // SAFETY: the layout has a non-zero size, checked by `layout` (invariant 1).
        let base = unsafe { std::alloc::alloc_zeroed(layout) };
        match NonNull::new(base) {
            Some(base) => Ok(Self { base, len }),
            None => Err(io::Error::from(io::ErrorKind::OutOfMemory)),
        }
    }

    #[cfg(not(unix))]
    fn layout(len: usize) -> io::Result<std::alloc::Layout> {
        std::alloc::Layout::from_size_align(len.max(1), 4096)
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// A pointer to the byte at `offset`.
    ///
    /// # Panics
    /// When `offset` lies outside the arena: every caller computes it from a checked index.
    #[inline]
    pub(crate) fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset < self.len, "offset {offset} outside an arena of {} bytes", self.len);
        // SAFETY: `offset < len`, so the result stays inside the one mapping (invariant 1).
        unsafe { self.base.add(offset) }
    }
}

impl Drop for Arena {
    #[cfg(unix)]
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are exactly what `map` obtained; the pool drops its arena only
        // when no lease and no kernel operation refers to it (invariant 2).
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }

    #[cfg(not(unix))]
    fn drop(&mut self) {
        if let Ok(layout) = Self::layout(self.len) {
            // SAFETY: allocated in `map` with the same layout (invariant 2).
            unsafe { std::alloc::dealloc(self.base.as_ptr(), layout) };
        }
    }
}
