//! Leases on buffers: to read what was received, to compose what is to be sent.

use std::fmt;
use std::io;
use std::ops::{Deref, RangeBounds};
use std::rc::Rc;

use super::Pool;

/// A lease on received (or composed) bytes in a worker's preregistered arena.
///
/// Dereferences to the bytes. Cloning and slicing copy nothing; the buffer returns to its pool when
/// the last lease on it is dropped, wherever that happens. A lease belongs to its worker's thread
/// (it is not `Send`); to keep data for long or to move it elsewhere, copy it out with
/// `to_vec()`, because leases that are kept starve the pool.
///
/// ```compile_fail
/// fn needs_send<T: Send>() {}
/// needs_send::<corelane::Buf>();
/// ```
pub struct Buf {
    store: Store,
    start: u32,
    len: u32,
}

enum Store {
    /// A buffer of the arena.
    Pool(Pool, u32),
    /// A copy, made because the arena's buffers were short and this one could not be delivered or
    /// sent for some time.
    Heap(Rc<[u8]>),
}

impl Buf {
    /// The first lease on the first `len` bytes of a buffer, for which the pool has counted it.
    #[inline]
    pub(super) fn first(pool: Pool, index: u32, len: u32) -> Self {
        Self { store: Store::Pool(pool, index), start: 0, len }
    }

    /// A lease on a copy of `bytes` on the heap.
    pub(crate) fn copied(bytes: &[u8]) -> Self {
        Self { store: Store::Heap(Rc::from(bytes)), start: 0, len: bytes.len() as u32 }
    }

    /// A lease on a part of this one, without copying.
    ///
    /// # Panics
    /// When the range lies outside, like slicing does.
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Buf {
        let mut part = self.clone();
        part.narrow(range);
        part
    }

    /// Narrows this lease to a part of itself, without copying.
    ///
    /// # Panics
    /// When the range lies outside, like slicing does.
    pub fn narrow(&mut self, range: impl RangeBounds<usize>) {
        use std::ops::Bound;
        let len = self.len as usize;
        let from = match range.start_bound() {
            Bound::Included(&n) => n,
            Bound::Excluded(&n) => n.saturating_add(1),
            Bound::Unbounded => 0,
        };
        let to = match range.end_bound() {
            Bound::Included(&n) => n.saturating_add(1),
            Bound::Excluded(&n) => n,
            Bound::Unbounded => len,
        };
        assert!(from <= to && to <= len, "range {from}..{to} outside a lease of {len} bytes");
        self.start += from as u32;
        self.len = (to - from) as u32;
    }

    /// Drops the first `n` bytes from view.
    ///
    /// # Panics
    /// When the lease is shorter than `n`.
    pub fn advance(&mut self, n: usize) {
        self.narrow(n..);
    }

    /// Splits off and returns the first `n` bytes; both parts share the buffer.
    ///
    /// # Panics
    /// When the lease is shorter than `n`.
    pub fn split_to(&mut self, n: usize) -> Buf {
        let head = self.slice(..n);
        self.advance(n);
        head
    }

    /// The bytes for writing, if this is the only lease on its buffer: for changing a message in
    /// place before it is sent on.
    pub fn get_mut(&mut self) -> Option<&mut [u8]> {
        let (start, len) = (self.start as usize, self.len as usize);
        match &mut self.store {
            Store::Heap(bytes) => Rc::get_mut(bytes).map(|bytes| &mut bytes[start..start + len]),
            Store::Pool(pool, index) => {
                if !pool.is_only_lease(*index) {
                    return None;
                }
                pool.allow_writing(*index);
                let address = pool.address(*index).as_ptr().wrapping_add(start);
                // SAFETY: the only lease, borrowed mutably; the kernel does not write leased buffers
                // and reads one only while a chain in flight holds a lease on it (invariants 1, 3).
                Some(unsafe { std::slice::from_raw_parts_mut(address, len) })
            }
        }
    }

    /// Whether this lease keeps a buffer of the arena from others.
    pub(crate) fn is_pooled(&self) -> bool {
        matches!(self.store, Store::Pool(..))
    }

    /// Gives the arena's buffer back by copying the bytes to the heap.
    pub(crate) fn detach(&mut self) {
        if self.is_pooled() {
            let copy: Rc<[u8]> = Rc::from(&self[..]);
            *self = Buf { store: Store::Heap(copy), start: 0, len: self.len };
        }
    }
}

impl Deref for Buf {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        let (start, len) = (self.start as usize, self.len as usize);
        match &self.store {
            Store::Pool(pool, index) => {
                let address = pool.address(*index).as_ptr().wrapping_add(start);
                // SAFETY: `start + len` lies inside the buffer (kept so by `lease` and `narrow`), and
                // a leased buffer is written by nobody while shared leases exist (invariant 1).
                unsafe { std::slice::from_raw_parts(address, len) }
            }
            Store::Heap(bytes) => &bytes[start..start + len],
        }
    }
}

impl AsRef<[u8]> for Buf {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Clone for Buf {
    fn clone(&self) -> Self {
        let store = match &self.store {
            Store::Pool(pool, index) => {
                pool.add_ref(*index);
                Store::Pool(pool.clone(), *index)
            }
            Store::Heap(bytes) => Store::Heap(bytes.clone()),
        };
        Self { store, start: self.start, len: self.len }
    }
}

impl Drop for Buf {
    #[inline]
    fn drop(&mut self) {
        if let Store::Pool(pool, index) = &self.store {
            pool.release(*index);
        }
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes)", self.len)
    }
}

/// A send buffer that is being filled; [`freeze`](BufMut::freeze) makes it a [`Buf`] to send.
pub struct BufMut {
    buf: Buf,
}

impl BufMut {
    /// A writable buffer: the only lease on it.
    pub(super) fn first(pool: Pool, index: u32) -> Self {
        Self { buf: Buf::first(pool, index, 0) }
    }

    /// Bytes that still fit.
    pub fn room(&self) -> usize {
        match &self.buf.store {
            Store::Pool(pool, _) => (pool.buffer_size() - self.buf.len) as usize,
            Store::Heap(_) => 0,
        }
    }

    /// Appends as much of `bytes` as fits; returns how much that was.
    pub fn put(&mut self, bytes: &[u8]) -> usize {
        let n = bytes.len().min(self.room());
        // A composed buffer always comes from the pool (`Pool::alloc`); a copy has no room.
        if let Store::Pool(pool, index) = &self.buf.store {
            let at = pool.address(*index).as_ptr().wrapping_add(self.buf.len as usize);
            // SAFETY: this is the only lease on the buffer, `n` bytes fit behind `len`, and `bytes`
            // cannot overlap because nothing else can refer to this buffer (invariant 1).
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, n) };
            self.buf.len += n as u32;
        }
        n
    }

    /// The bytes written so far, as a lease that can be sent.
    pub fn freeze(self) -> Buf {
        if let Store::Pool(pool, index) = &self.buf.store {
            pool.end_writing(*index);
        }
        self.buf
    }
}

impl io::Write for BufMut {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(self.put(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for BufMut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BufMut").field("len", &self.buf.len).field("room", &self.room()).finish()
    }
}
