//! One page-aligned mapping, made once, unmapped once.

use std::io;
use std::ptr::NonNull;

/// What may be done with pages, by this process and by the kernel on its behalf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// Nothing: touching them is a fault (`SIGSEGV`; `EFAULT` for the kernel).
    Nothing,
    Read,
    ReadWrite,
}

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
        Self::map_for(len, Access::ReadWrite)
    }

    /// As [`map`](Self::map), with no access until [`protect`](Self::protect) gives it.
    #[cfg(unix)]
    pub(crate) fn map_shut(len: usize) -> io::Result<Self> {
        Self::map_for(len, Access::Nothing)
    }

    #[cfg(unix)]
    fn map_for(len: usize, access: Access) -> io::Result<Self> {
        // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing
        // memory (invariant 1).
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                protection(access),
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

    /// Not to be had on this system: pages of the process heap are not this arena's alone.
    #[cfg(not(unix))]
    pub(crate) fn map_shut(_: usize) -> io::Result<Self> {
        Err(io::Error::from(io::ErrorKind::Unsupported))
    }

    #[cfg(not(unix))]
    fn layout(len: usize) -> io::Result<std::alloc::Layout> {
        std::alloc::Layout::from_size_align(len.max(1), 4096)
            .map_err(|_| io::Error::from(io::ErrorKind::OutOfMemory))
    }

    /// Changes what may be done with whole pages.
    ///
    /// # Errors
    /// `ENOMEM` when the process has too many mappings: neighbours that differ count separately.
    #[cfg(unix)]
    pub(crate) fn protect(&self, offset: usize, len: usize, access: Access) -> io::Result<()> {
        assert!(offset + len <= self.len, "pages {offset}+{len} outside an arena of {} bytes", self.len);
        let start = self.at(offset).as_ptr();
        // SAFETY: the range lies inside this mapping, which is nobody else's; whoever takes access away
        // has made sure that no reference into it is left (invariant 1).
        let result = unsafe { libc::mprotect(start.cast(), len, protection(access)) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// As [`map_shut`](Self::map_shut): not to be had on this system.
    #[cfg(not(unix))]
    pub(crate) fn protect(&self, _: usize, _: usize, _: Access) -> io::Result<()> {
        Err(io::Error::from(io::ErrorKind::Unsupported))
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

/// Bytes of a page: what [`Arena::protect`] works in.
#[cfg(unix)]
pub(crate) fn page() -> usize {
    // SAFETY: takes and gives integers only (invariant 5).
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(4096)
}

/// Bytes of a page. Nothing is protected here, so only the order of magnitude matters.
#[cfg(not(unix))]
pub(crate) fn page() -> usize {
    4096
}

#[cfg(unix)]
fn protection(access: Access) -> libc::c_int {
    match access {
        Access::Nothing => libc::PROT_NONE,
        Access::Read => libc::PROT_READ,
        Access::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
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
