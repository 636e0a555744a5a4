//! The pool of equal buffers, and the leases on them.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::ops::{Deref, RangeBounds};
use std::rc::Rc;

use super::arena::Arena;

/// Size and number of a worker's buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferConfig {
    /// Bytes of one buffer: 64 to 1 MiB. The largest piece in which received data is handed out.
    pub size: u32,
    /// Number of receive buffers per worker: 1 to 32,768 (the kernel's limit for a provided-buffer ring).
    pub count: u32,
    /// Number of further buffers, of the same size, that handlers may take to compose replies in
    /// ([`Cx::alloc`](crate::Cx::alloc)). 0 to 32,768.
    pub send_count: u32,
}

impl Default for BufferConfig {
    /// 512 receive buffers and 32 send buffers of 8 KiB: 4.25 MiB per worker.
    fn default() -> Self {
        Self { size: 8192, count: 512, send_count: 32 }
    }
}

impl BufferConfig {
    /// Bytes of the arena that this configuration needs.
    pub fn arena_bytes(&self) -> usize {
        self.size as usize * (self.count as usize + self.send_count as usize)
    }

    /// Checks the ranges.
    ///
    /// # Errors
    /// [`BufferError`] naming the field, its value and what is allowed.
    pub fn check(&self) -> Result<(), BufferError> {
        let refuse = |what, value, allowed| Err(BufferError::Range { what, value, allowed });
        if !(64..=1 << 20).contains(&self.size) {
            return refuse("size", self.size, "64 to 1048576 bytes");
        }
        if !(1..=32768).contains(&self.count) {
            return refuse("count", self.count, "1 to 32768 buffers");
        }
        if self.send_count > 32768 {
            return refuse("send_count", self.send_count, "0 to 32768 buffers");
        }
        Ok(())
    }
}

/// Why a worker's buffers could not be made.
#[derive(Debug)]
pub enum BufferError {
    /// A field of [`BufferConfig`] is out of range.
    Range {
        /// The field.
        what: &'static str,
        /// Its value.
        value: u32,
        /// What is allowed.
        allowed: &'static str,
    },
    /// The system has no room for the arena.
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// What the system said.
        source: io::Error,
    },
}

impl fmt::Display for BufferError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Range { what, value, allowed } => {
                write!(f, "buffer {what} {value} is out of range: allowed are {allowed}")
            }
            Self::Memory { bytes, source } => write!(
                f,
                "no memory for {bytes} bytes of buffers ({source}): choose fewer or smaller buffers"
            ),
        }
    }
}

impl std::error::Error for BufferError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Range { .. } => None,
            Self::Memory { source, .. } => Some(source),
        }
    }
}

/// Value of a buffer's reference cell while the buffer is free.
const FREE: u32 = 0;
/// Value of a buffer's reference cell while the kernel may write it.
const KERNEL: u32 = u32::MAX;

struct Inner {
    arena: Arena,
    size: u32,
    recv_count: u32,
    /// Per buffer: `FREE`, `KERNEL`, or the number of leases.
    refs: Box<[Cell<u32>]>,
    free_recv: RefCell<Vec<u32>>,
    free_send: RefCell<Vec<u32>>,
    /// Receive buffers that are leased.
    leased_recv: Cell<u32>,
    leased_send: Cell<u32>,
}

/// A worker's buffers; a cheap handle.
#[derive(Clone)]
pub(crate) struct Pool(Rc<Inner>);

impl Pool {
    pub(crate) fn new(config: &BufferConfig) -> Result<Self, BufferError> {
        config.check()?;
        let bytes = config.arena_bytes();
        let arena = Arena::map(bytes).map_err(|source| BufferError::Memory { bytes, source })?;
        let total = config.count + config.send_count;
        Ok(Self(Rc::new(Inner {
            arena,
            size: config.size,
            recv_count: config.count,
            refs: (0..total).map(|_| Cell::new(FREE)).collect(),
            // Reversed, so that low indices are handed out first and untouched pages stay so.
            free_recv: RefCell::new((0..config.count).rev().collect()),
            free_send: RefCell::new((config.count..total).rev().collect()),
            leased_recv: Cell::new(0),
            leased_send: Cell::new(0),
        })))
    }

    /// Number of receive buffers.
    pub(crate) fn capacity(&self) -> u32 {
        self.0.recv_count
    }

    /// Bytes of one buffer.
    pub(crate) fn buffer_size(&self) -> u32 {
        self.0.size
    }

    /// Receive buffers that are not leased: free, or with the kernel and waiting for data.
    #[inline]
    pub(crate) fn available(&self) -> u32 {
        self.0.recv_count - self.0.leased_recv.get()
    }

    /// Buffers (of both kinds) that leases hold.
    pub(crate) fn leased(&self) -> u32 {
        self.0.leased_recv.get() + self.0.leased_send.get()
    }

    /// Whether every buffer is in one hand: free or leased. True whenever no kernel has any.
    pub(crate) fn is_balanced(&self) -> bool {
        let free = self.0.free_recv.borrow().len() + self.0.free_send.borrow().len();
        free + self.leased() as usize == self.0.refs.len()
    }

    /// The whole arena, for registration with the kernel.
    pub(crate) fn arena(&self) -> (std::ptr::NonNull<u8>, usize) {
        (self.0.arena.at(0), self.0.arena.len())
    }

    /// The memory of buffer `index`.
    #[inline]
    pub(crate) fn address(&self, index: u32) -> std::ptr::NonNull<u8> {
        self.0.arena.at(index as usize * self.0.size as usize)
    }

    /// Free → Kernel, for every free receive buffer; `each` gets the index. Stops early, and keeps
    /// the buffer free, when `each` says that it has no room.
    #[inline]
    pub(crate) fn lend_all(&self, mut each: impl FnMut(u32) -> bool) -> u32 {
        let mut free = self.0.free_recv.borrow_mut();
        let mut lent = 0;
        while let Some(&index) = free.last() {
            if !each(index) {
                break;
            }
            free.pop();
            self.0.refs[index as usize].set(KERNEL);
            lent += 1;
        }
        lent
    }

    /// Kernel → Leased: the kernel reported `len` bytes in buffer `index`.
    ///
    /// `None` when the buffer is not the kernel's or `len` exceeds it: a completion that lies, which
    /// must not become two owners of one buffer.
    #[inline]
    pub(crate) fn lease(&self, index: u32, len: u32) -> Option<Buf> {
        let cell = self.0.refs.get(index as usize)?;
        if cell.get() != KERNEL || len > self.0.size || index >= self.0.recv_count {
            return None;
        }
        cell.set(1);
        self.0.leased_recv.set(self.0.leased_recv.get() + 1);
        Some(Buf { store: Store::Pool(self.clone(), index), start: 0, len })
    }

    /// Kernel → Free: the kernel gave the buffer back without data, or will never use it again.
    pub(crate) fn take_back(&self, index: u32) {
        if let Some(cell) = self.0.refs.get(index as usize)
            && cell.get() == KERNEL
        {
            cell.set(FREE);
            self.0.free_recv.borrow_mut().push(index);
        }
    }

    /// Free → Leased in one step, for drivers that copy into the buffer themselves: `fill` gets the
    /// whole buffer and says how many bytes it wrote. `None` when no buffer is free or `fill` failed.
    pub(crate) fn lease_with(&self, fill: impl FnOnce(&mut [u8]) -> usize) -> Option<Buf> {
        let index = self.0.free_recv.borrow_mut().pop()?;
        let size = self.0.size as usize;
        let address = self.address(index).as_ptr();
        // SAFETY: the buffer was Free, so no lease and no kernel operation refers to it, and it is
        // out of the free list for the length of this call (invariant 1).
        let bytes = unsafe { std::slice::from_raw_parts_mut(address, size) };
        let len = fill(bytes).min(size) as u32;
        self.0.refs[index as usize].set(1);
        self.0.leased_recv.set(self.0.leased_recv.get() + 1);
        Some(Buf { store: Store::Pool(self.clone(), index), start: 0, len })
    }

    /// A send buffer to compose a reply in; `None` when all are in use.
    pub(crate) fn alloc(&self) -> Option<BufMut> {
        let index = self.0.free_send.borrow_mut().pop()?;
        self.0.refs[index as usize].set(1);
        self.0.leased_send.set(self.0.leased_send.get() + 1);
        Some(BufMut { buf: Buf { store: Store::Pool(self.clone(), index), start: 0, len: 0 } })
    }

    fn add_ref(&self, index: u32) {
        let cell = &self.0.refs[index as usize];
        let refs = cell.get();
        assert!(refs < KERNEL - 1, "more than {} leases of one buffer", KERNEL - 2);
        cell.set(refs + 1);
    }

    #[inline]
    fn release(&self, index: u32) {
        let cell = &self.0.refs[index as usize];
        let refs = cell.get() - 1;
        cell.set(refs);
        if refs == FREE {
            if index < self.0.recv_count {
                self.0.leased_recv.set(self.0.leased_recv.get() - 1);
                self.0.free_recv.borrow_mut().push(index);
            } else {
                self.0.leased_send.set(self.0.leased_send.get() - 1);
                self.0.free_send.borrow_mut().push(index);
            }
        }
    }
}

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
                if pool.0.refs[*index as usize].get() != 1 {
                    return None;
                }
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
    /// Bytes that still fit.
    pub fn room(&self) -> usize {
        match &self.buf.store {
            Store::Pool(pool, _) => (pool.0.size - self.buf.len) as usize,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(count: u32) -> Pool {
        Pool::new(&BufferConfig { size: 64, count, send_count: 1 }).expect("a small pool")
    }

    fn received(pool: &Pool, bytes: &[u8]) -> Buf {
        pool.lease_with(|room| {
            room[..bytes.len()].copy_from_slice(bytes);
            bytes.len()
        })
        .expect("a free buffer")
    }

    #[test]
    fn a_buffer_returns_when_its_last_lease_is_dropped() {
        let pool = pool(1);
        let whole = received(&pool, b"hello world");
        let part = whole.slice(6..);
        assert_eq!(pool.available(), 0);
        drop(whole);
        assert_eq!(&*part, b"world");
        assert_eq!(pool.available(), 0);
        drop(part);
        assert_eq!(pool.available(), 1);
        assert_eq!(pool.leased(), 0);
    }

    #[test]
    fn a_lying_completion_never_makes_a_second_owner() {
        let pool = pool(2);
        assert!(pool.lease(0, 10).is_none(), "a free buffer is not the kernel's");
        assert_eq!(pool.lend_all(|_| true), 2);
        assert!(pool.lease(0, 65).is_none(), "longer than the buffer");
        assert!(pool.lease(2, 1).is_none(), "a send buffer was never lent");
        assert!(pool.lease(99, 1).is_none());
        let lease = pool.lease(0, 10).expect("lent");
        assert!(pool.lease(0, 10).is_none(), "leased already");
        drop(lease);
        pool.take_back(1);
        pool.take_back(1);
        assert_eq!(pool.lend_all(|_| true), 2, "taking back twice frees once");
    }

    #[test]
    fn bytes_can_be_changed_only_by_the_only_lease() {
        let pool = pool(1);
        let mut lease = received(&pool, b"abc");
        let other = lease.clone();
        assert!(lease.get_mut().is_none());
        drop(other);
        lease.get_mut().expect("alone")[0] = b'x';
        assert_eq!(&*lease, b"xbc");
    }

    #[test]
    fn a_detached_lease_keeps_its_bytes_and_frees_its_buffer() {
        let pool = pool(1);
        let mut lease = received(&pool, b"hello world").slice(6..);
        lease.detach();
        assert_eq!(pool.available(), 1);
        assert_eq!(&*lease.slice(1..3), b"or");
        lease.get_mut().expect("alone")[0] = b'W';
        assert_eq!(&*lease, b"World");
    }

    #[test]
    fn a_composed_reply_takes_what_fits() {
        let pool = pool(1);
        let mut reply = pool.alloc().expect("one send buffer");
        assert!(pool.alloc().is_none());
        assert_eq!(reply.put(&[7; 60]), 60);
        assert_eq!(reply.put(&[8; 60]), 4);
        let reply = reply.freeze();
        assert_eq!(reply.len(), 64);
        assert_eq!(reply[59..61], [7, 8]);
        drop(reply);
        assert!(pool.alloc().is_some());
    }

    #[test]
    fn a_refused_configuration_names_field_value_and_range() {
        let refused = BufferConfig { size: 32, ..BufferConfig::default() }.check();
        let text = refused.expect_err("too small").to_string();
        assert!(text.contains("size 32") && text.contains("64 to 1048576"), "{text}");
    }
}
